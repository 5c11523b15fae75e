"""What processing weights costs: time, memory on top of the model, the speed of the processed
model; and precision.

    python benchmarks/processing.py [--dtype float32] [--rounds N]
    python benchmarks/processing.py --precision
    python benchmarks/processing.py --resident [--check]

Memory is what tensors that torch makes meanwhile hold at most, as a part of the model's own
parameters; an unembedding that was tied and has become a matrix of its own is counted apart. The
forward ratio is of two models done in turn. Resident memory is what the system counts for the
process (Linux), in a fresh process for each of six hash seeds: it differs where small tensors that
are kept hold freed pieces of the heap apart.

Precision is the largest and the mean difference of log probabilities: to those of the same model
before processing, and to those of the model in float32 before it was rounded to its type.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge
from bridge.embedded import prompts
from weight_processing.process import OFF, ON

MODELS: dict[str, tuple[Any, Any]] = {
    "GPT-2 small": (GPT2LMHeadModel, GPT2Config()),
    "Llama, 8 layers, d1024, grouped": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=1024,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=4,
            intermediate_size=2816,
            vocab_size=32000,
            max_position_embeddings=2048,
        ),
    ),
}


class Memory(TorchDispatchMode):
    """The most bytes that tensors made while it is active hold together.

    Args:
        model: its own parameters do not count.

    Attributes:
        peak, now: in bytes.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.alive = {at: entry for at, entry in self.alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.now = sum(size for _, size in self.alive.values())
        self.peak = max(self.peak, self.now)
        return result


def bytes_of(model: nn.Module) -> int:
    """What a model's parameters hold."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def extra_memory(model: Any, check: bool = False) -> tuple[float, float]:
    """What processing takes beside the model, and what of it an untied unembedding keeps, as parts
    of the model.
    """
    size = bytes_of(model)
    bridge = TransformerBridge(model)
    with Memory(model) as memory:
        bridge.process_weights(check=check)
    untied = bytes_of(model) - size
    return (memory.peak - untied) / size, untied / size


def measure(name: str, dtype: torch.dtype, rounds: int) -> None:
    cls, config = MODELS[name]
    torch.manual_seed(0)
    raw = cls(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in raw.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    times: dict[str, list[float]] = {"process": [], "check": []}
    for _ in range(3):
        for label in times:
            bridge = TransformerBridge(copy.deepcopy(raw))
            start = time.perf_counter()
            bridge.process_weights(check=label == "check")
            times[label].append(time.perf_counter() - start)
    print(f"\n{name} ({bridge.cfg.n_params / 1e6:.0f} M parameters, {dtype})")
    print(f"  process_weights(check=False)  {min(times['process']):6.2f} s")
    print(f"  process_weights()             {min(times['check']):6.2f} s")
    (extra, untied), (checked, _) = (
        extra_memory(copy.deepcopy(raw), check) for check in (False, True)
    )
    print(
        f"  memory while processing       {extra:6.3f} of the model's, beside {untied:.3f} for an"
        " untied unembedding"
    )
    print(f"  memory, with the check        {checked:6.3f}")
    tokens = torch.randint(0, config.vocab_size, (1, 128))
    forwards: list[list[float]] = [[], []]
    with torch.no_grad():
        for _ in range(rounds + 1):
            for model, found in zip((raw, bridge.original_model), forwards, strict=True):
                start = time.perf_counter()
                model(tokens)
                found.append(time.perf_counter() - start)
    before, after = (statistics.median(found[1:]) for found in forwards)
    print(
        f"  forward, processed / raw      {after / before:6.3f} ({before * 1e3:.1f} ms raw, 128"
        " tokens)"
    )


def resident(check: bool) -> None:
    """Prints the resident memory that processing GPT-2 small adds at most, as a part of the
    model.
    """
    torch.set_num_threads(1)
    cls, config = MODELS["GPT-2 small"]
    model = cls(config).eval()
    bridge, size = TransformerBridge(model), bytes_of(model)
    bridge.W_U  # noqa: B018 - what is made at the first use is no part of processing
    gc.collect()
    status = pathlib.Path("/proc/self/status")

    def read_bytes(field: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    before = read_bytes("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    bridge.process_weights(check=check)
    untied = bytes_of(model) - size
    print(
        f"  hash seed {os.environ['PYTHONHASHSEED']}:"
        f" {(read_bytes('VmHWM') - before - untied) / size:.3f}",
        flush=True,
    )


TRANSFORMS = (
    "fold_ln",
    "center_writing_weights",
    "center_unembed",
    "fold_value_biases",
    "refactor_factored_attn_matrices",
)
#: Sets of transforms, by name. A set is shown where the last of it is for the model.
SETS: dict[str, tuple[str, ...]] = {
    "fold_ln": ("fold_ln",),
    "centring": ("center_writing_weights", "center_unembed"),
    "value biases": ("fold_value_biases",),
    "the defaults": TRANSFORMS[:4],
    "all five": TRANSFORMS,
}


def precise_models() -> Iterator[tuple[str, Any, Tensor]]:
    """Models in float32, no parameter of which is trivial, and tokens for them."""
    for name, (cls, config) in MODELS.items():
        torch.manual_seed(0)
        model = cls(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.02))
        yield name, model, torch.randint(0, config.vocab_size, (2, 64))
    shipped = TransformerBridge.boot_embedded()
    text = " ".join(prompt.text for prompt in prompts("ioi", 20))
    yield (
        "the shipped model",
        shipped.original_model.eval(),
        shipped.to_tokens(text)[:, :128].view(2, 64),
    )


def precision() -> None:
    """Prints how far log probabilities move, for each set of transforms and each type."""

    def log_probs(model: Any, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return model(tokens, use_cache=False).logits.float().log_softmax(-1)

    def far(x: Tensor, y: Tensor) -> str:
        return f"{float((x - y).abs().max()):.1e} / {float((x - y).abs().mean()):.1e}"

    for name, model, tokens in precise_models():
        exact = log_probs(model, tokens)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            raw = copy.deepcopy(model).to(dtype)
            before = log_probs(raw, tokens)
            print(
                f"\n{name}, {dtype}: largest / mean\n  {'unprocessed, to float32':40}"
                f" {far(before, exact)}"
            )
            for label, names in SETS.items():
                bridge = TransformerBridge(copy.deepcopy(raw))
                bridge.process_weights(**{x: ON if x in names else OFF for x in TRANSFORMS})
                if bridge.cfg.processed[names[-1]] == "done":
                    after = log_probs(bridge.original_model, tokens)
                    print(
                        f"  {label:15} to before {far(after, before)}   to float32"
                        f" {far(after, exact)}"
                    )
            if dtype != torch.float32:
                bridge = TransformerBridge(copy.deepcopy(model))
                bridge.process_weights()
                after = log_probs(bridge.original_model.to(dtype), tokens)
                print(f"  {'the defaults, done in float32':40} {far(after, exact)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--precision", action="store_true")
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.precision:
        return precision()
    if arguments.resident and "PYTHONHASHSEED" in os.environ:
        return resident(arguments.check)
    if arguments.resident:
        print("resident memory added, of the model's, beside an untied unembedding")
        for seed in "012345":
            subprocess.run(
                [sys.executable, *sys.argv], check=True, env=os.environ | {"PYTHONHASHSEED": seed}
            )
        return None
    for name in MODELS:
        measure(name, getattr(torch, arguments.dtype), arguments.rounds)
        gc.collect()


if __name__ == "__main__":
    main()
