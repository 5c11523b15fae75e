"""Models whose weights a call left half processed: it was interrupted, or its check found a difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bridge.processing.check import ProcessingError

Samples = dict[str, Tensor]

#: For each such model, some values of each parameter that was written to: a model that was loaded again has others.
_BROKEN: WeakKeyDictionary[nn.Module, Samples] = WeakKeyDictionary()
_SIZE = 256


def _samples(core: nn.Module) -> Samples:
    flat = {name: p.detach().flatten() for name, p in core.named_parameters() if type(p) is nn.Parameter}
    return {name: x[:: max(1, len(x) // _SIZE)].clone() for name, x in flat.items()}


@contextmanager
def all_or_broken(core: nn.Module) -> Iterator[None]:
    """Remembers a model as broken when the body is left by an exception after it has written to a parameter.

    Args:
        core: the Hugging Face model.
    """
    before = _samples(core)
    try:
        yield
    except BaseException as error:
        now = _samples(core)
        changed = {n: x for n, x in now.items() if n not in before or not _same(x, before[n])}
        if changed:
            _BROKEN[core] = changed
            if not isinstance(error, ProcessingError):
                error.add_note("The model's weights are processed in part: load them again.")
        raise


def is_broken(core: nn.Module) -> bool:
    """Whether a model's weights are as a call left them that did not come to its end.

    Args:
        core: the Hugging Face model.
    """
    if core not in _BROKEN:
        return False
    now = _samples(core)
    if any(name in now and _same(x, now[name]) for name, x in _BROKEN[core].items()):
        return True
    del _BROKEN[core]
    return False


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x.to(y), y)
