"""Models whose weights a call left half processed: it was interrupted, or its check found a difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weight_processing.check import ProcessingError
from weight_processing.spread import held_here

Samples = dict[str, Tensor]

#: Where such a model, and each copy of it, has some values of every parameter that was written to: when it has been
#: loaded again, it has others.
_MARK = "transformer_bridge_half_processed"
_SIZE = 256


def _samples(core: nn.Module) -> Samples:
    known = {name: p for name, p in core.named_parameters() if type(p) is nn.Parameter or isinstance(p, DTensor)}
    flat = {name: held_here(p.detach()).flatten() for name, p in known.items()}
    return {name: x[:: max(1, len(x) // _SIZE)].clone() for name, x in flat.items()}


@contextmanager
def marking_interrupted(core: nn.Module) -> Iterator[None]:
    """Marks a model as half processed when the body is left by an exception after it has written to a parameter.

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
            core.__dict__[_MARK] = changed
            if not isinstance(error, ProcessingError):
                error.add_note("The model's weights are processed in part: load them again.")
        raise


def is_interrupted(core: nn.Module) -> bool:
    """Whether a model's weights are as a call left them that did not come to its end.

    Args:
        core: the Hugging Face model.
    """
    if _MARK not in core.__dict__:
        return False
    now = _samples(core)
    if any(name in now and _same(x, now[name]) for name, x in core.__dict__[_MARK].items()):
        return True
    del core.__dict__[_MARK]
    return False


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x.to(y), y)
