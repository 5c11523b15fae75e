"""What the bridge costs: ratios to the same Hugging Face model, alternated in one process, medians and their spread.

    python benchmarks/overhead.py [--device cpu] [--dtype float32] [--attention sdpa] [--rounds N] [--threads N]
        [--quick]

Beside each ratio stands between which values those of half of the rounds lie, and above it what the plain model is to
itself (`alternated.NULL`).

A peer is measured beside it where it is installed (the extra ``peers``). Whole processes are compared nowhere: every
ratio is of two things done in turn in this one, so that a machine whose speed drifts does not change it much.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import transformers
from alternated import alternated, row, spread
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge

MODELS: dict[str, tuple[Any, Any, list[tuple[int, int]]]] = {
    "GPT-2, 12 layers, d768": (GPT2LMHeadModel, GPT2Config(), [(1, 128), (4, 512)]),
    "Llama, 8 layers, d512, grouped": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
            intermediate_size=1408, vocab_size=32000, max_position_embeddings=2048,
        ),
        [(1, 128), (4, 512)],
    ),
    "tiny Llama, 24 layers, d64": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=64, num_hidden_layers=24, num_attention_heads=4, num_key_value_heads=4,
            intermediate_size=128, vocab_size=100, max_position_embeddings=128,
        ),
        [(1, 16)],
    ),
    "tiny GPT-2, 24 layers, d64": (
        GPT2LMHeadModel,
        GPT2Config(n_embd=64, n_layer=24, n_head=4, vocab_size=100, n_positions=128),
        [(1, 16)],
    ),
}  # fmt: skip


def measure(name: str, shape: tuple[int, int], rounds: int, arguments: argparse.Namespace) -> None:
    """All figures for one model and one batch."""
    cls, config, _ = MODELS[name]
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    make = {"dtype": dtype}
    # A configuration of its own for each: it holds the attention implementation.
    hf = cls._from_config(copy.deepcopy(config), attn_implementation=arguments.attention, **make).eval()
    eager = cls._from_config(copy.deepcopy(config), attn_implementation="eager", **make).eval()
    hf, eager = hf.to(arguments.device), eager.to(arguments.device)
    eager.load_state_dict(hf.state_dict())
    bridge = TransformerBridge(hf)
    tokens = torch.randint(0, config.vocab_size, shape).to(arguments.device)
    layer = f"blocks.{config.num_hidden_layers // 2}.hook_resid_pre"
    print(f"\n{name}, batch {shape[0]}x{shape[1]}, {arguments.device}, {arguments.dtype}, {arguments.attention}")
    assert torch.equal(bridge(tokens), hf(tokens).logits)

    plain = alternated(
        {
            "hf(tokens)": lambda: hf(tokens),
            "bridge(tokens)": lambda: bridge(tokens),
            "run_with_hooks, one residual hook": lambda: bridge.run_with_hooks(
                tokens, fwd_hooks=[(layer, lambda x, hook: x)]
            ),
            "run_with_cache, one name": lambda: bridge.run_with_cache(tokens, names_filter=layer),
        },
        rounds,
        arguments.device,
    )
    for label, value in plain.items():
        row(label, value)
    everything = alternated(
        {
            "hf eager, output_attentions": lambda: eager(tokens, output_attentions=True),
            "run_with_cache, everything": lambda: bridge.run_with_cache(tokens),
        },
        rounds,
        arguments.device,
    )
    for label, value in everything.items():
        row(label, value)

    n = config.num_hidden_layers
    half, whole = bridge(tokens, stop_at_layer=n // 2), bridge(tokens, stop_at_layer=n)
    parts = alternated(
        {
            "all blocks": lambda: hf(tokens),
            "second half": lambda: bridge(half, start_at_layer=n // 2),
            "no block": lambda: bridge(whole, start_at_layer=n),
        },
        rounds,
        arguments.device,
    )
    label = "start_at_layer, second half of the blocks (of their time)"
    columns = zip(*(parts[name].rounds for name in ("all blocks", "second half", "no block")), strict=True)
    print(f"  {label:<71} {spread([(half - none) / (whole - none) for whole, half, none in columns])}", flush=True)

    wraps = []
    for _ in range(7):
        start = time.perf_counter()
        TransformerBridge(hf)
        wraps.append(time.perf_counter() - start)
    print(f"  {'wrapping':<58} {statistics.median(wraps) * 1e3:9.3f} ms")
    if importlib.util.find_spec("transformer_lens"):
        peer(hf, eager, tokens, layer, rounds, arguments)
    del hf, eager, bridge
    gc.collect()


def peer(hf: Any, eager: Any, tokens: Any, layer: str, rounds: int, arguments: argparse.Namespace) -> None:
    """The same for TransformerLens' bridge, around a copy of the same model."""
    import tempfile

    from transformer_lens.model_bridge import TransformerBridge as Peer

    with tempfile.TemporaryDirectory() as folder:  # it looks for a configuration and a tokenizer by name
        hf.config.save_pretrained(folder)
        theirs = Peer.boot_transformers(
            folder,
            hf_model=copy.deepcopy(hf),
            tokenizer=TransformerBridge.boot_embedded().tokenizer,
            device=arguments.device,
        )
    results = alternated(
        {
            "hf(tokens)": lambda: hf(tokens),
            "TransformerLens: bridge(tokens)": lambda: theirs(tokens),
            "TransformerLens: one residual hook": lambda: theirs.run_with_hooks(
                tokens, fwd_hooks=[(layer, lambda x, hook: x)]
            ),
            "TransformerLens: cache, one name": lambda: theirs.run_with_cache(tokens, names_filter=layer),
        },
        rounds,
        arguments.device,
    )
    for label, value in list(results.items())[1:]:
        row(label, value)
    everything = alternated(
        {
            "eager": lambda: eager(tokens, output_attentions=True),
            "TransformerLens: cache, everything": lambda: theirs.run_with_cache(tokens),
        },
        rounds,
        arguments.device,
    )
    row("TransformerLens: cache, everything", everything["TransformerLens: cache, everything"])


def import_time(rounds: int) -> None:
    """`import bridge`, alone and with what it stands on, against `import torch, transformers`."""
    programs = {
        "import torch, transformers": "import torch, transformers",
        "import torch, transformers, bridge": "import torch, transformers, bridge",
        "import bridge": "import bridge",
        "from bridge import TransformerBridge": "from bridge import TransformerBridge",
        "torch, transformers + its modeling_utils": "import torch, transformers.modeling_utils",
    }
    jobs = {
        name: lambda code=code: subprocess.run([sys.executable, "-c", code], check=True)
        for name, code in programs.items()
    }
    times = alternated(jobs, rounds)
    print("\nImporting")
    for name, value in times.items():
        row(name, value)


def main() -> None:
    """Prints all figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--rounds", type=int, default=0, help="default: 60 for tiny models, 20 and 7 for the others")
    parser.add_argument("--quick", action="store_true", help="the tiny models only")
    parser.add_argument("--threads", type=int, default=0, help="of the processor; default: as torch chooses")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    for name, (_, _, shapes) in MODELS.items():
        tiny = name.startswith("tiny")
        if arguments.quick and not tiny:
            continue
        for shape in shapes:
            measure(name, shape, arguments.rounds or (60 if tiny else 20 if shape[0] == 1 else 7), arguments)
    import_time(5)


if __name__ == "__main__":
    main()
