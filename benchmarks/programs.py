"""What a compiled program costs, against the plain model: ratios, the two done in turn in one
process, medians.

    python benchmarks/programs.py [--rounds N] [--device cpu] [--only WORD]

Beside each ratio stand the same hooks without a program, and the program uncompiled. Compiling is
not in the ratios; it has a row of its own, in seconds of a processor, with nothing kept from before
(set TORCHINDUCTOR_COMPILE_THREADS=1).
"""

from __future__ import annotations

import argparse
import gc
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from bridge import TransformerBridge

TINY = LlamaConfig(
    hidden_size=64,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=128,
    vocab_size=100,
    max_position_embeddings=128,
)
MIDDLE = LlamaConfig(
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    intermediate_size=1408,
    vocab_size=32000,
    max_position_embeddings=2048,
)


def alternated(jobs: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """The median of each job's time over the first one's in the same round, and the first one's in
    milliseconds.
    """
    # On one thread of a CPU, the processor's time: other processes have no part in it.
    clock = (
        time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    )
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job(), job()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, job in jobs.items():
            start = clock()
            job()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append(clock() - start)
    gc.enable()
    first = next(iter(times.values()))
    found = {
        name: statistics.median(t / f for t, f in zip(ts, first, strict=True))
        for name, ts in list(times.items())[1:]
    }
    return found | {"plain, ms": statistics.median(first) * 1000}


def show(title: str, goal: float, found: dict[str, float]) -> None:
    """Prints a row of the table."""
    print(f"\n{title} (to reach: {goal})")
    for name, value in found.items():
        print(f"  {name:<40} {value:.3f}", flush=True)


def steer(activation: Tensor, hook: object, vector: Tensor, strength: Tensor) -> Tensor:
    """The edit."""
    return activation + vector * strength


def bridge_of(config: LlamaConfig, device: str) -> TransformerBridge:
    """A random model of a configuration."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().to(device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return TransformerBridge(model)


def products(model: LlamaForCausalLM, length: int) -> Callable[[], None]:
    """The matrix products of a run, with numbers of their shapes: what no way of running the model
    does without.
    """
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    pairs = [
        (torch.randn(1, length, each.in_features, device=each.weight.device), each.weight)
        for each in layers
    ]

    def job() -> None:
        for x, weight in pairs:
            torch.nn.functional.linear(x, weight)

    return job


def forward(
    title: str, goal: float, config: LlamaConfig, length: int, rounds: int, device: str
) -> None:
    """One edit, and all residuals captured."""
    bridge = bridge_of(config, device)
    tokens = torch.randint(0, config.vocab_size, (1, length), device=device)
    vector = torch.randn(config.hidden_size, device=device)
    names = [name for name in bridge.hook_dict if name.endswith("hook_resid_post")]
    at = f"blocks.{config.num_hidden_layers // 2}.hook_resid_post"
    program = bridge.program(names, [(at, steer)], {"vector": vector, "strength": 1.0})
    compiled = program.compile()
    inputs = {"vector": vector, "strength": torch.tensor(0.5, device=device)}
    plain: Any = bridge.original_model

    def hooks() -> object:
        with bridge.hooks([(at, lambda activation, hook: activation + vector * 0.5)]):
            return bridge.run_with_cache(tokens, names_filter=names)

    with torch.no_grad():
        wanted, made = program(tokens, **inputs), compiled(tokens, **inputs)
        worst = max((wanted[name] - made[name]).abs().max().item() for name in wanted)
        found = alternated(
            {
                "plain": lambda: plain(tokens),
                "compiled program": lambda: compiled(tokens, **inputs),
                "program, not compiled": lambda: program(tokens, **inputs),
                "the same hooks and cache": hooks,
                "the plain model's matrix products alone": products(plain, length),
            },
            rounds,
            device,
        )
    show(title, goal, found)
    print(f"  {'largest difference to the uncompiled':<40} {worst:.1e}")


def recompilations(device: str) -> None:
    """Over 100 values of an input, 5 numbers of rows and 5 lengths."""
    bridge = bridge_of(TINY, device)
    names = [name for name in bridge.hook_dict if name.endswith("hook_resid_post")]
    vector = torch.zeros(TINY.hidden_size, device=device)
    program = bridge.program(
        names, [("blocks.6.hook_resid_post", steer)], {"vector": vector, "strength": 1.0}
    )
    compiled = program.compile(backend="eager")  # what decides about it is the same
    counters.clear()
    with torch.no_grad():
        for i in range(100):
            tokens = torch.randint(
                0, 100, ((2, 1, 3, 5, 4)[i % 5], (9, 6, 12, 20, 15)[i // 5 % 5]), device=device
            )
            compiled(tokens, vector=torch.randn_like(vector), strength=i / 10)
    print("\nrecompilations over 100 values, 5 batch sizes, 5 lengths (to reach: at most 2)")
    print(f"  {counters['stats']['unique_graphs'] - 1}", flush=True)


def compilations(device: str) -> None:
    """Seconds of a processor, and graphs, for what a compiled program meets in turn."""
    bridge = bridge_of(TINY, device)
    names = [name for name in bridge.hook_dict if name.endswith("hook_resid_post")]

    def program() -> Any:
        vector = torch.randn(TINY.hidden_size, device=device)
        hook = ("blocks.6.hook_resid_post", lambda activation, hook: activation + vector * 0.5)
        return bridge.program(names, [hook]).compile()

    def seconds() -> float:
        spent = os.times()
        return spent.user + spent.system + spent.children_user + spent.children_system

    compiled = program()
    met: dict[str, tuple[Any, int, int, bool]] = {
        "first call, 1x16": (compiled, 1, 16, False),
        "other positions, 1x23": (compiled, 1, 23, False),
        "other rows, 3x16": (compiled, 3, 16, False),
        "padded, 3x16": (compiled, 3, 16, True),
        "another closure's tensor, 1x16": (program(), 1, 16, False),
        "one position, 2x1": (compiled, 2, 1, False),
    }
    print("\nseconds of a processor to compile, tiny 12-layer Llama, and graphs")
    with tempfile.TemporaryDirectory() as nothing_there, torch.no_grad():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = nothing_there
        torch._dynamo.reset()
        counters.clear()
        for what, (one, rows, length, padded) in met.items():
            tokens = torch.randint(1, 100, (rows, length), device=device)
            mask = torch.ones_like(tokens)
            mask[0, :3] = 0
            before, graphs = seconds(), counters["stats"]["unique_graphs"]
            one(tokens, attention_mask=mask) if padded else one(tokens)
            print(
                f"  {what:<40} {seconds() - before:6.2f}"
                f" {counters['stats']['unique_graphs'] - graphs}",
                flush=True,
            )
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]


def generation(rounds: int, device: str) -> None:
    """32 greedy tokens with an intervention."""
    bridge = bridge_of(TINY, device)
    tokens = torch.randint(1, 100, (1, 16), device=device)
    mask, vector = torch.ones_like(tokens), torch.randn(64, device=device)
    at = "blocks.6.hook_resid_post"
    compiled = bridge.program((), [(at, steer)], {"vector": vector, "strength": 1.0}).compile()
    options: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}
    inputs = {"vector": vector, "strength": 0.5}

    def hooks() -> Tensor:
        with bridge.hooks([(at, lambda activation, hook: activation + vector * 0.5)]):
            made: Tensor = bridge.generate(tokens, verbose=False, **options)
        return made

    def by_program() -> Tensor:
        made: Tensor = bridge.generate(
            tokens, verbose=False, program=compiled, inputs=inputs, **options
        )
        return made

    assert torch.equal(hooks(), by_program())
    plain: Any = bridge.original_model
    jobs: dict[str, Callable[[], Any]] = {
        "plain hf.generate": lambda: plain.generate(tokens, attention_mask=mask, **options),
        "compiled program": by_program,
        "the same hook": hooks,
    }
    show(
        "32 greedy tokens with an intervention, tiny 12-layer Llama",
        0.8,
        alternated(jobs, rounds, device),
    )


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--only", default="", help="tiny, middle, recompilations, compilations or generation"
    )
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__},"
        f" {torch.get_num_threads()} threads"
    )
    if given.only in ("", "tiny"):
        forward(
            "one edit, all residuals, tiny 12-layer Llama, 1x16",
            0.6,
            TINY,
            16,
            given.rounds * 4,
            given.device,
        )
    if given.only in ("", "middle"):
        forward(
            "the same, 8-layer d512 Llama, 1x128", 0.95, MIDDLE, 128, given.rounds, given.device
        )
    if given.only in ("", "recompilations"):
        recompilations(given.device)
    if given.only in ("", "compilations"):
        compilations(given.device)
    if given.only in ("", "generation"):
        generation(max(given.rounds // 4, 3), given.device)


if __name__ == "__main__":
    main()
