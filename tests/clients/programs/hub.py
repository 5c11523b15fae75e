"""A hub of small random models under the names of those that notebooks and tests ask for, with
GPT-2's own tokenizer.

`write` fills a folder that `HF_HUB_CACHE` names; `offline` answers what else is asked of a hub.
"""

import json
import os
from pathlib import Path

import torch

#: Who is asked for, and is a GPT-2 here: notebooks name its layers and heads.
GPT2 = ("gpt2", "distilgpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "openai-community/gpt2")
#: Other text models, with what is not the same for all of them. Only the tokenizer of the first is
#: asked for.
OTHERS = {
    "EleutherAI/gpt-neox-20b": "gpt_neox",
    "EleutherAI/gpt-j-6b": "gptj",
    "EleutherAI/pythia-70m": "gpt_neox",
    "EleutherAI/pythia-14m": "gpt_neox",
    "facebook/opt-125m": "opt",
    "bigscience/bloom-560m": "bloom",
    "Qwen/Qwen2-0.5B": "qwen2",
}
#: In HookedTransformer's own format.
OWN = {"SoLU_1L": 1, "SoLU_2L": 2, "SoLU_3L": 3, "Attn_Only_1L": 1, "Attn_Only_2L": 2}
REVISION = "0" * 40


def place(name: str, folder: str | Path | None = None) -> Path:
    """Where a repository's files are: in a hub's cache, that of HF_HUB_CACHE if none is given."""
    return Path(
        folder or os.environ["HF_HUB_CACHE"],
        f"models--{name.replace('/', '--')}",
        "snapshots",
        REVISION,
    )


def _snapshot(folder: Path, name: str) -> Path:
    snapshot = place(name, folder)
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(REVISION)
    return snapshot


def write(folder: Path, vocabulary: Path, layers: int = 12, heads: int = 12) -> None:
    """Fills a hub's cache; `vocabulary` holds GPT-2's `encoder.json` and `vocab.bpe`, which all of
    them have.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GPT2Tokenizer

    from bridge.legacy import HookedTransformer

    tokens = json.loads((vocabulary / "encoder.json").read_text(encoding="utf-8"))
    lines = (vocabulary / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:]
    tokenizer = GPT2Tokenizer(vocab=tokens, merges=[tuple(line.split()) for line in lines if line])
    for name in (*GPT2, *OTHERS):
        shape = {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "vocab_size": 50304,
        }
        if name in GPT2:
            shape = {"n_layer": layers, "n_head": heads, "n_ctx": 256}
        elif "opt" in name:
            shape |= {"ffn_dim": 96, "word_embed_proj_dim": 48}
        elif "gpt-j" in name:
            shape |= {"rotary_dim": 8}
        elif "Qwen" in name:
            shape |= {"num_key_value_heads": 2}
        kind = OTHERS.get(name, "gpt2")
        spread = {
            "init_std" if kind == "opt" else "initializer_range": 0.15,
            "max_position_embeddings": 256,
        }
        config = AutoConfig.for_model(kind, hidden_size=48, **shape, **spread)
        torch.manual_seed(0)
        snapshot = _snapshot(folder, name)
        AutoModelForCausalLM.from_config(config).save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
    for name, n_layers in OWN.items():
        fields = {
            "n_layers": n_layers,
            "d_model": 32,
            "d_mlp": 64,
            "d_head": 8,
            "n_heads": 8,
            "n_ctx": 256,
            "d_vocab": 50278,
            "act_fn": "solu_ln",
            "attn_only": name.startswith("Attn"),
            "normalization_type": "LN",
            "tokenizer_name": next(iter(OTHERS)),
        }
        model = HookedTransformer({**fields, "device": "cpu", "seed": 0, "tokenizer_name": None})
        state = model.state_dict()
        for i in range(n_layers):
            state[f"blocks.{i}.attn.mask"] = torch.ones(256, 256).tril().bool()
            state[f"blocks.{i}.attn.IGNORE"] = torch.tensor(-1e5)
        snapshot = _snapshot(folder, f"NeelNanda/{name}512W_C4_Code")
        (snapshot / "config.json").write_text(json.dumps(fields))
        torch.save(
            {key: value.clone() for key, value in state.items()}, snapshot / "model_final.pth"
        )


def at(folder: str) -> dict[str, str]:
    """The environment in which this hub is asked; TransformerLens knows the older name."""
    return dict.fromkeys(("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"), folder)


def offline() -> None:
    """Lists a repository's files as its folder has them."""
    import huggingface_hub

    def files(self, repo_id: str, **options: object) -> list[str]:
        there = place(repo_id)
        return sorted(str(file.relative_to(there)) for file in there.rglob("*") if file.is_file())

    huggingface_hub.HfApi.list_repo_files = files
