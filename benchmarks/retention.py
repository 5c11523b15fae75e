"""What keeping activations costs by itself: plain torch hooks that keep what modules return, without any of our code.

    python benchmarks/retention.py

The floor under `run_with_cache` of everything: memory that a run would reuse is kept, so that the kernel has to give it
new pages instead. Ratios to eager attention with `output_attentions`, alternated, medians.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from overhead import MODELS, medians, row

from bridge import TransformerBridge


def main() -> None:
    """Prints the figures for the two models of ordinary size."""
    transformers.utils.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    for name, (cls, config, shapes) in list(MODELS.items())[:2]:
        plain = cls._from_config(config, attn_implementation="eager").eval()
        watched = cls._from_config(config, attn_implementation="eager").eval()
        bridge = TransformerBridge(cls._from_config(config).eval())
        tokens = torch.randint(0, config.vocab_size, shapes[0])
        kept: list[Any] = []
        for module in watched.modules():
            if not list(module.children()):
                module.register_forward_hook(lambda module, args, output, kept=kept: kept.append((args, output)))

        def keeping(watched=watched, kept=kept, tokens=tokens):  # type: ignore[no-untyped-def]
            kept.clear()
            return watched(tokens, output_attentions=True)

        jobs = {
            "hf eager, output_attentions": lambda plain=plain, tokens=tokens: plain(tokens, output_attentions=True),
            "the same, every layer's input and output kept": keeping,
            "run_with_cache, everything": lambda bridge=bridge, tokens=tokens: bridge.run_with_cache(tokens),
        }
        results = medians(jobs, 12, "cpu")
        print(f"\n{name}, batch {shapes[0][0]}x{shapes[0][1]}")
        for label, value in results.items():
            row(label, value, results["hf eager, output_attentions"])


if __name__ == "__main__":
    main()
