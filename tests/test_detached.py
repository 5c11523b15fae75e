"""What stands on the core is no part of it: without those rooms, and without reading them,
everything else works.
"""

from __future__ import annotations

import subprocess
import sys

from tools.structure import above_the_core

_CORE_ALONE = f"""
import importlib.abc
import sys

ABOVE = {above_the_core()!r}


class NotThere(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(ABOVE):
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)


sys.meta_path.insert(0, NotThere())

import torch
import adapters, bridge, weight_processing
from bridge import TransformerBridge

model = TransformerBridge.boot_embedded()
tokens = model.to_tokens("Mary and John")
logits, cache = model.run_with_cache(tokens)
cache.decompose_resid()
halving = [("blocks.1.attn.hook_pattern", lambda act, hook: act * 0.5)]
halved = model.run_with_hooks(tokens, fwd_hooks=halving)
assert not torch.equal(halved, logits)
with model.trace(tokens) as run:
    run["blocks.1.hook_resid_post"] *= 0.5
program = model.program(capture=["blocks.1.hook_resid_post"])
assert torch.equal(program(tokens)["logits"], logits)
model.generate(tokens, max_new_tokens=2, verbose=False)
model.lens(tokens)
model.process_weights()
assert not [name for name in sys.modules if name.startswith(ABOVE)]
"""


def test_the_core_works_without_what_stands_on_it():
    subprocess.run(
        [sys.executable, "-c", _CORE_ALONE], check=True, capture_output=True, text=True, timeout=300
    )
