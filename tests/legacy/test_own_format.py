"""Models that are stored in HookedTransformer's own format."""

import json
import shutil

import pytest
import torch

from bridge.embedded import MODEL_DIR
from bridge.legacy import HookedTransformer, loading

FIELDS = {
    "n_layers": 2,
    "d_model": 16,
    "d_mlp": 32,
    "d_head": 4,
    "n_heads": 4,
    "n_ctx": 12,
    "d_vocab": 654,
    "act_fn": "solu_ln",
    "attn_only": False,
    "final_rms": False,
    "normalization": "LN",
    "tokenizer_name": str(MODEL_DIR),
}
TOKENS = torch.tensor([[1, 5, 7, 9]])


def by_hand(state, tokens, cfg):
    """HookedTransformer's model of one sequence, in float64."""
    x64 = {name: value.double() for name, value in state.items()}
    pos = x64["pos_embed.W_pos"][: tokens.shape[1]]
    x = x64["embed.W_E"][tokens] + (0 if cfg.get("shortformer_pos") else pos)
    shift = pos if cfg.get("shortformer_pos") else 0

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * x64[f"{name}.w"] + x64[f"{name}.b"] if f"{name}.w" in x64 else x

    for i in range(cfg["n_layers"]):
        at = f"blocks.{i}"
        h = norm(x, f"{at}.ln1")
        q, k, v = (
            torch.einsum(
                "bpm,hmd->bhpd", h + (shift if letter in "QK" else 0), x64[f"{at}.attn.W_{letter}"]
            )
            + x64[f"{at}.attn.b_{letter}"][None, :, None]
            for letter in "QKV"
        )
        scores = (q @ k.mT / 2).masked_fill(
            ~torch.ones(*q.shape[2:3] * 2).tril().bool(), -torch.inf
        )
        x = (
            x
            + torch.einsum("bhpd,hdm->bpm", scores.softmax(-1) @ v, x64[f"{at}.attn.W_O"])
            + x64[f"{at}.attn.b_O"]
        )
        if not cfg["attn_only"]:
            pre = norm(x, f"{at}.ln2") @ x64[f"{at}.mlp.W_in"] + x64[f"{at}.mlp.b_in"]
            post = (
                torch.nn.functional.gelu(pre)
                if cfg["act_fn"] == "gelu"
                else norm(pre * pre.softmax(-1), f"{at}.mlp.ln")
            )
            x = x + post @ x64[f"{at}.mlp.W_out"] + x64[f"{at}.mlp.b_out"]
    return norm(x, "ln_final") @ x64["unembed.W_U"] + x64["unembed.b_U"]


def weights(fields, seed=0):
    config = {
        "normalization_type" if key == "normalization" else key: value
        for key, value in fields.items()
    }
    config.pop("architecture", None)
    if config.pop("shortformer_pos", False):
        config["positional_embedding_type"] = "shortformer"
    model = HookedTransformer(config | {"device": "cpu", "tokenizer_name": None})
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(x.shape, generator=generator) * 0.3
        for name, x in model.state_dict().items()
    }
    return state | {
        "blocks.0.attn.mask": torch.ones(2, 2),
        "blocks.0.attn.IGNORE": torch.tensor(-1e5),
    }


@pytest.fixture
def stored(tmp_path):
    def store(changes=None, change=lambda state: state, name="SoLU_2L_tiny"):
        fields = FIELDS | (changes or {})
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(fields))
        state = weights(fields)
        torch.save(change(state), folder / "model_final.pth")
        for value in (1000, 2000):
            torch.save(
                change(weights(fields, value)), folder / "checkpoints" / f"model_{value}.pth"
            )
        return str(folder), state, fields

    return store


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"act_fn": "gelu"},
        {"attn_only": True, "shortformer_pos": True},
        {"normalization": "LNPre"},
    ],
    ids=["solu", "gelu", "attn_only_shortformer", "folded"],
)
def test_a_folder(stored, changes):
    folder, state, fields = stored(changes)
    right = by_hand(state, TOKENS, fields)
    model = HookedTransformer.from_pretrained_no_processing(
        folder, device="cpu", dtype=torch.float64
    )
    assert torch.allclose(model(TOKENS), right, atol=1e-9)
    assert model.cfg.model_name == "SoLU_2L_tiny"
    assert model.tokenizer is not None
    processed = HookedTransformer.from_pretrained(folder, device="cpu", dtype=torch.float64)
    assert torch.allclose(processed(TOKENS).log_softmax(-1), right.log_softmax(-1), atol=1e-9)
    cfg = loading.get_pretrained_model_config(folder)
    assert (cfg.n_layers, cfg.act_fn, cfg.d_vocab) == (2, fields["act_fn"], 654)
    assert torch.equal(loading.get_pretrained_state_dict(folder)["embed.W_E"], state["embed.W_E"])


def test_checkpoints_layers_and_contexts(stored):
    folder, _, fields = stored()
    assert loading.get_checkpoint_labels(folder) == ([1000, 2000], "step")
    load = HookedTransformer.from_pretrained_no_processing
    for given, value in (({"checkpoint_index": -1}, 2000), ({"checkpoint_value": 1000}, 1000)):
        model = load(folder, device="cpu", dtype=torch.float64, **given)
        assert torch.allclose(
            model(TOKENS), by_hand(weights(fields, value), TOKENS, fields), atol=1e-6
        )
        assert (model.cfg.checkpoint_value, model.cfg.from_checkpoint) == (value, True)
    one = load(folder, device="cpu", dtype=torch.float64, first_n_layers=1, n_ctx=5)
    assert torch.allclose(
        one(TOKENS), by_hand(weights(fields), TOKENS, fields | {"n_layers": 1}), atol=1e-6
    )
    assert one.W_pos.shape == (5, 16)
    with pytest.raises(ValueError, match=r"no checkpoint 1500; the nearest are \[1000, 2000\]"):
        load(folder, checkpoint_value=1500)
    with pytest.raises(ValueError, match="out of range"):
        load(folder, checkpoint_index=2)


def test_the_oldest_models_had_other_names_and_matrices(stored):
    def as_then(state):
        turned = {n: x.mT.contiguous() if "W_" in n else x for n, x in state.items()}
        return {
            name.replace("ln_final", "norm").replace("ln", "norm"): x for name, x in turned.items()
        }

    folder, state, fields = stored(change=as_then, name="SoLU_2L_v10_old")
    model = HookedTransformer.from_pretrained_no_processing(
        folder, device="cpu", dtype=torch.float64
    )
    assert torch.allclose(model(TOKENS), by_hand(state, TOKENS, fields), atol=1e-9)


def test_the_hub(stored, tmp_path, monkeypatch):
    """From the hub's cache, without a network."""
    folder, state, fields = stored()
    snapshot = tmp_path / "models--NeelNanda--SoLU_2L512W_C4_Code" / "snapshots" / "abc"
    shutil.copytree(folder, snapshot)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    for name in ("solu-2l", "solu-2l-c4-code", "NeelNanda/SoLU_2L512W_C4_Code"):
        model = HookedTransformer.from_pretrained_no_processing(
            name, device="cpu", dtype=torch.float64, cache_dir=str(tmp_path), local_files_only=True
        )
        assert torch.allclose(model(TOKENS), by_hand(state, TOKENS, fields), atol=1e-9)
    assert loading.get_checkpoint_labels("solu-2l", cache_dir=str(tmp_path))[0] == [1000, 2000]


def test_what_does_not_fit_is_an_error(stored):
    folder, *_ = stored(
        change=lambda state: {n: x for n, x in state.items() if n != "blocks.1.attn.W_Q"}
    )
    with pytest.raises(ValueError, match=r"has no blocks\.1\.attn\.W_Q"):
        HookedTransformer.from_pretrained(folder, device="cpu")


@pytest.mark.parametrize(
    ("short", "hub"),
    [
        ("solu-1l", "NeelNanda/SoLU_1L512W_C4_Code"),
        ("solu-8l-new", "NeelNanda/SoLU_8L1024W_C4_Code"),
        ("solu-4l-pile", "NeelNanda/SoLU_4L_v11_old"),
        ("gelu-2l", "NeelNanda/GELU_2L512W_C4_Code"),
        ("attn-only-3l", "NeelNanda/Attn_Only_3L512W_C4_Code"),
        ("attn-only-demo", "NeelNanda/Attn-Only-2L512W-Shortformer-6B-big-lr"),
        ("solu-4l-wiki", "NeelNanda/SoLU_4L512W_Wiki_Finetune"),
        ("redwood_attn_2l", "ArthurConmy/redwood_attn_2l"),
        ("othello-gpt", "Baidicoot/Othello-GPT-Transformer-Lens"),
    ],
)
def test_names(short, hub):
    assert loading.get_official_model_name(short) == hub
