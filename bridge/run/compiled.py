"""Models that were compiled: compiled code does not know hooks that come later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Runs a model that was compiled as it was written."""
    with torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext():
        yield


def is_compiled(model: nn.Module) -> bool:
    """Whether a module or its forward was compiled. (`Module.modules` takes ten times as long, in every run.)"""
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None:
            fields = module.__dict__
            inside = fields["_modules"]
            if "_compiled_call_impl" in fields or "forward" in fields or "_orig_mod" in inside:
                compiled = module._compiled_call_impl is not None or "_orig_mod" in inside
                if compiled or hasattr(fields.get("forward"), "_torchdynamo_orig_callable"):
                    return True
            if inside:
                left.extend(inside.values())
    return False
