"""What a trace costs: beside the plain forward pass, plain torch hooks, and nnsight where it is installed.

    python benchmarks/trace.py [--rounds N]

All are done in turn in one process; the figures are medians of their times, and of the differences in the same round.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge

MODELS: dict[str, Callable[[], Any]] = {
    "tiny Llama, 24 layers, d64": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, num_hidden_layers=24, num_attention_heads=4, num_key_value_heads=4,
            intermediate_size=128, vocab_size=100, max_position_embeddings=128,
        )
    ),
    "tiny GPT-2, 24 layers, d64": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=24, n_head=4, vocab_size=100, n_positions=128)
    ),
    "GPT-2, 12 layers, d768": lambda: GPT2LMHeadModel(GPT2Config()),
}  # fmt: skip


def medians(jobs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """For each job its median time, and the median of what it takes above the first in the same round, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        for _ in range(3):
            job()
    for _ in range(rounds):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
    base = next(iter(times.values()))
    return {
        name: (
            statistics.median(values),
            statistics.median(mine - plain for mine, plain in zip(values, base, strict=True)),
        )
        for name, values in times.items()
    }


def jobs_for(hf: Any, tokens: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What is timed on one model."""
    bridge = TransformerBridge(hf)
    blocks = [hf.get_submodule(path) for path in bridge.block_paths]
    names = [f"blocks.{i}.hook_resid_post" for i in range(len(blocks))]
    middle = len(blocks) // 2

    def plain() -> None:
        hf(tokens)

    def torch_hooks(some: list[Any]) -> list[Any]:
        seen: list[Any] = []
        handles = [block.register_forward_hook(lambda module, args, output: seen.append(output)) for block in some]
        hf(tokens)
        for handle in handles:
            handle.remove()
        return seen

    def empty() -> None:
        with bridge.trace(tokens):
            pass

    def one() -> None:
        with bridge.trace(tokens) as run:
            run[names[middle]]

    def every() -> list[Any]:
        with bridge.trace(tokens) as run:
            return [run[name] for name in names]

    def module_outputs() -> list[Any]:
        with bridge.trace(tokens) as run:
            return [run.module(path).output for path in bridge.block_paths]

    jobs: dict[str, Callable[[], Any]] = {
        "plain forward": plain,
        "bridge(tokens)": lambda: bridge(tokens),
        "one torch hook": lambda: torch_hooks(blocks[middle : middle + 1]),
        "a torch hook on every layer": lambda: torch_hooks(blocks),
        "run_with_hooks, one point": lambda: bridge.run_with_hooks(
            tokens, fwd_hooks=[(names[middle], lambda x, hook: None)]
        ),
        "trace, nothing asked for": empty,
        "trace, one point": one,
        "trace, every layer": every,
        "trace, every layer by its module": module_outputs,
    }
    if importlib.util.find_spec("nnsight"):
        from nnsight import NNsight  # type: ignore[import-not-found]

        peer = NNsight(hf)
        layers = blocks_of(peer, bridge.block_paths)

        def peer_one() -> Any:
            with peer.trace(tokens):
                h = layers[middle].output.save()
            return h

        def peer_every() -> Any:
            with peer.trace(tokens):
                found = list().save()  # noqa: C408
                for layer in layers:
                    found.append(layer.output)
            return found

        jobs |= {"nnsight, one layer": peer_one, "nnsight, every layer": peer_every}
    return jobs


def blocks_of(model: Any, paths: list[str]) -> list[Any]:
    """The modules of a model of another library, by path."""
    found = []
    for path in paths:
        module = model
        for part in path.split("."):
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        found.append(module)
    return found


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, make in MODELS.items():
        torch.manual_seed(0)
        hf = make().eval()
        for grad in (False, True):
            print(f"{name}, 1 x 16 tokens, {'with' if grad else 'without'} gradients")
            with torch.set_grad_enabled(grad):
                found = medians(jobs_for(hf, torch.randint(0, 100, (1, 16))), arguments.rounds)
            base = found["plain forward"][0]
            for job, (median, above) in found.items():
                print(f"  {job:<36} {median * 1e3:8.3f} ms  {median / base:6.3f}x  {above * 1e3:+8.3f} ms", flush=True)


if __name__ == "__main__":
    main()
