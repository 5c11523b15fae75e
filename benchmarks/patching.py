"""How long activation patching takes, as a part of the time of whole runs: starting at the patch's layer, and batched.

    python benchmarks/patching.py [--rounds N] [--patches-per-run N]

A random GPT-2 (12 layers, width 256), one prompt of 15 tokens, one CPU thread. The three ways are done in turn; the
figures are medians of their ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from bridge import TransformerBridge
from bridge import patching as ready


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patches-per-run", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    config = GPT2Config(n_layer=12, n_embd=256, n_head=8, vocab_size=5000, bos_token_id=0, eos_token_id=0)
    bridge = TransformerBridge(GPT2LMHeadModel(config).eval())
    clean = torch.randint(0, 5000, (1, 15))
    corrupted = clean.clone()
    corrupted[0, 9] = 3
    _, cache = bridge.run_with_cache(clean)

    def run(patcher: Any, **more: Any) -> Any:
        return patcher(bridge, corrupted, cache, lambda logits: logits[0, -1, 7], verbose=False, **more)

    print(f"{'':<48}  whole runs  from the layer  {options.patches_per_run} in a run")
    for name in ("resid_pre", "attn_head_out_all_pos", "attn_head_pattern_all_pos"):
        patcher = getattr(ready, f"get_act_patch_{name}")
        run(patcher)
        whole, later, together = [], [], []
        for _ in range(options.rounds):
            with mock.patch("bridge.patching.runs.may_start_later", return_value=False):
                base = seconds(lambda patcher=patcher: run(patcher))
            whole.append(base)
            later.append(seconds(lambda patcher=patcher: run(patcher)) / base)
            batched = seconds(lambda patcher=patcher: run(patcher, patches_per_run=options.patches_per_run))
            together.append(batched / base)
        figures = statistics.median(whole), statistics.median(later), statistics.median(together)
        print("get_act_patch_{:<34}  {:>8.2f} s  {:>14.2f}  {:>11.2f}".format(name, *figures))


if __name__ == "__main__":
    main()
