"""Tokens a second and memory on an accelerator: runs, compiled programs and batches of requests,
and the engine.

    python benchmarks/gpu.py [--only runs,batches,compiled] [--device cuda] [--width 2048] [--layers
    16]
                             [--positions 1024] [--rows 8] [--rounds 10]

One Llama with random weights in bfloat16, 850 million parameters unless sizes are given. All rows
of a table are done in turn in one process; a ratio is to the plain model's in the same round.
Memory is the most that the device's allocator held, less what it held before. Where there is no
accelerator (``--device cpu``, to try the script) it is not told.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import transformers
from alternated import NULL, alternated, spread
from batch import ways
from rows import llama

from bridge import TransformerBridge
from bridge.interventions import Add, Scale

Jobs = dict[str, Callable[[], Any]]


def watched(name: str, job: Callable[[], Any], held: dict[str, int]) -> Callable[[], Any]:
    """The same thing done on an accelerator, and the most bytes that it held besides what was
    there.
    """

    def run() -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, kept = torch.cuda.memory_allocated(), job()
        torch.cuda.synchronize()
        held[name] = max(held.get(name, 0), torch.cuda.max_memory_allocated() - before)
        del kept

    return run


def table(title: str, jobs: Jobs, tokens: int, rounds: int, device: str) -> None:
    """Prints what each thing takes, beside the first."""
    held: dict[str, int] = {}
    if device == "cuda":
        jobs = {name: watched(name, job, held) for name, job in jobs.items()}
    found = alternated(jobs, rounds, device)
    held |= {NULL: held[next(iter(jobs))]} if held else {}
    print(
        f"\n{title}\n\n| | tokens a second | time, of the first row's | most held, MB"
        " |\n|---|---|---|---|"
    )
    for name, timed in found.items():
        most = f"{held[name] / 2**20:.0f}" if held else "–"
        print(
            f"| {name} | {tokens / timed.seconds:,.0f} | {spread(timed.ratios)} | {most} |",
            flush=True,
        )


def model(width: int, layers: int, device: str) -> TransformerBridge:
    """A Llama that never ends a text."""
    made = llama(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(width // 256, 1),
        intermediate_size=width * 11 // 4,
    ).to(device, torch.bfloat16)
    made.generation_config.eos_token_id = None
    return TransformerBridge(made)


def runs(bridge: TransformerBridge, tokens: torch.Tensor) -> Jobs:
    """What people do with one pass."""
    hf, middle = bridge.original_model, bridge.cfg.n_layers // 2
    resid, pattern = f"blocks.{middle}.hook_resid_pre", f"blocks.{middle}.attn.hook_pattern"
    vector = torch.randn(bridge.cfg.d_model, device=tokens.device, dtype=torch.bfloat16)
    edit = (resid, Add(vector))
    streams = [f"blocks.{layer}.hook_resid_post" for layer in range(bridge.cfg.n_layers)]
    patterns = [f"blocks.{layer}.attn.hook_pattern" for layer in range(bridge.cfg.n_layers)]

    def read() -> Any:
        _, cache = bridge.run_with_cache(tokens, names_filter=patterns)
        return sum(cache[name][:, :, -1].sum() for name in patterns)

    def traced() -> Any:
        with bridge.trace(tokens) as run:
            run[resid] += vector
        return run.logits

    return {
        "`hf(tokens)`": lambda: hf(tokens),
        "`bridge(tokens)`": lambda: bridge(tokens),
        "`run_with_hooks`, one edit of the stream": lambda: bridge.run_with_hooks(
            tokens, fwd_hooks=[edit]
        ),
        "the same in a trace": traced,
        "`run_with_cache`, the stream of every layer": lambda: bridge.run_with_cache(
            tokens, names_filter=streams
        ),
        "`run_with_cache`, everything, at the last position": lambda: bridge.run_with_cache(
            tokens, pos_slice=-1
        ),
        "`run_with_cache`, every layer's pattern, kept and not read": lambda: bridge.run_with_cache(
            tokens, names_filter=patterns
        ),
        "every layer's pattern, read, one at a time": read,
        "one head's pattern, edited": lambda: bridge.run_with_hooks(
            tokens, fwd_hooks=[(pattern, Scale(0.5, heads=[0]))]
        ),
        "`run_with_cache`, one layer's pattern, read": lambda: bridge.run_with_cache(
            tokens, names_filter=pattern
        )[1][pattern],
        "a lens at the last position": lambda: bridge.lens(tokens, pos_slice=-1).top(1),
    }


def compiled(bridge: TransformerBridge, tokens: torch.Tensor) -> Jobs:
    """The same with torch's compiler: the plain model, and programs with an edit and with a
    capture.
    """
    hf, middle = bridge.original_model, bridge.cfg.n_layers // 2
    at = f"blocks.{middle}.hook_resid_pre"
    vector = torch.randn(bridge.cfg.d_model, device=tokens.device, dtype=torch.bfloat16)
    streams = [f"blocks.{layer}.hook_resid_post" for layer in range(bridge.cfg.n_layers)]
    plain: Any = torch.compile(hf)
    edited = bridge.program((), [(at, lambda x, hook: x + vector)]).compile()
    kept = bridge.program(streams, [(at, lambda x, hook: x + vector)]).compile()
    return {
        "`hf(tokens)`": lambda: hf(tokens, use_cache=False),
        "`torch.compile(hf)(tokens)`": lambda: plain(tokens, use_cache=False),
        "compiled program, one edit": lambda: edited(tokens),
        "compiled program, one edit, the stream of every layer": lambda: kept(tokens),
    }


def batches(bridge: TransformerBridge, requests: int, new: int) -> Jobs:
    """Requests of 4 to 120 tokens."""
    torch.manual_seed(0)
    prompts = [
        torch.randint(3, 30000, (int(n),)).tolist() for n in torch.randint(4, 121, (requests,))
    ]
    jobs = ways(bridge, prompts, new)
    return {name: job for name, job in jobs.items() if "generate_batch" in name}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="runs,batches,compiled")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    name = torch.cuda.get_device_name() if given.device == "cuda" else given.device
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    bridge = model(given.width, given.layers, given.device)
    parameters = sum(each.numel() for each in bridge.original_model.parameters())
    print(
        f"{given.layers} layers of width {given.width}, {parameters / 1e9:.2f} billion parameters,"
        " bfloat16"
    )
    tokens = torch.randint(1, 30000, (given.rows, given.positions), device=given.device)
    shape = f"{given.rows} prompts of {given.positions} tokens"
    wanted, device, rounds = given.only.split(","), given.device, given.rounds
    if "runs" in wanted:
        table(f"A run: {shape}", runs(bridge, tokens), tokens.numel(), rounds, device)
    if "batches" in wanted:
        requests, new = 64, 24
        jobs = batches(bridge, requests, new)
        table(
            f"{requests} requests, {new} new tokens each",
            jobs,
            requests * new,
            max(rounds // 3, 2),
            device,
        )
    if "compiled" in wanted:
        table(f"Compiled: {shape}", compiled(bridge, tokens), tokens.numel(), rounds, device)
    if importlib.util.find_spec("vllm") is None:
        print(
            "\nThe engine was not measured: vllm is not installed here. `make engine` measures it."
        )


if __name__ == "__main__":
    main()
