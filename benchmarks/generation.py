"""What generating through the bridge costs: 32 greedy tokens against the model's own `generate`, in turn, medians.

python benchmarks/generation.py [--device cpu] [--dtype float32] [--attention sdpa] [--rounds N]
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from alternated import alternated, row
from overhead import MODELS

from bridge import TransformerBridge


def main() -> None:
    """Prints the figures for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    for name, (cls, config, _) in MODELS.items():
        torch.manual_seed(0)
        hf = cls._from_config(config, attn_implementation=arguments.attention, dtype=getattr(torch, arguments.dtype))
        hf = hf.eval().to(arguments.device)
        hf.generation_config.eos_token_id = None
        hf.generation_config.pad_token_id = 0
        bridge = TransformerBridge(hf)
        tokens = torch.randint(1, config.vocab_size, (1, 16)).to(arguments.device)
        mask = torch.ones_like(tokens)
        layer = f"blocks.{config.num_hidden_layers // 2}.hook_resid_post"
        options = {"max_new_tokens": 32, "do_sample": False}
        quiet = options | {"verbose": False}

        def hooked(bridge=bridge, tokens=tokens, layer=layer, quiet=quiet):  # type: ignore[no-untyped-def]
            with bridge.hooks(fwd_hooks=[(layer, lambda x, hook: x)]):
                return bridge.generate(tokens, **quiet)

        plain = lambda hf=hf, tokens=tokens, mask=mask, options=options: hf.generate(
            tokens, attention_mask=mask, **options
        )
        ours = lambda bridge=bridge, tokens=tokens, quiet=quiet: bridge.generate(tokens, **quiet)
        cached = lambda bridge=bridge, tokens=tokens, quiet=quiet: bridge.generate(tokens, return_cache=True, **quiet)
        assert torch.equal(plain(), ours())
        jobs = {
            "hf.generate": plain,
            "bridge.generate": ours,
            "with one residual hook": hooked,
            "with return_cache, everything": cached,
        }
        print(f"\n{name}, 32 greedy tokens, {arguments.device}, {arguments.dtype}, {arguments.attention}")
        for label, value in alternated(jobs, arguments.rounds, arguments.device).items():
            row(label, value)


if __name__ == "__main__":
    main()
