"""Logits that are computed only at the positions that a metric looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: From positions ``[k]`` to logits ``[batch, k, d_vocab]``.
LogitsAt = Callable[[list[int]], Tensor]

#: What says nothing about the values.
_FACTS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
        Tensor.size,
        Tensor.dim,
        Tensor.ndimension,
        Tensor.numel,
        Tensor.nelement,
        Tensor.__len__,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.get_device,
    ]
)


class LazyLogits(Tensor):
    """Stands for logits ``[batch, pos, d_vocab]``, which are computed when they are used.

    Indexing with positions (``logits[:, -1]``, ``logits[rows, positions, tokens]``) computes the logits there alone.
    Anything else computes all of them first: the values are those of plain logits, whatever is done. Should something
    read the memory itself, past torch's functions, it finds NaN there, and its gradient reaches it (`passed_by`).

    Example:
        >>> import torch
        >>> from bridge.patching.lazy_logits import lazy
        >>> whole, asked = torch.arange(24.0).view(1, 4, 6), []
        >>> def at(positions):
        ...     asked.append(positions)
        ...     return whole[:, positions]
        >>> lazy(at, whole.shape, whole)[0, -1, 2], asked
        (tensor(20.), [[3]])
    """

    _at: LogitsAt
    _whole: Tensor | None
    _memory: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            return super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.__getitem__ and isinstance(args[0], LazyLogits) and args[0]._whole is None:
            found = _chosen(args[0], args[1])
            if found is not None:
                return found
        return func(*_plain(args), **{name: _plain(value) for name, value in kwargs.items()})

    @property
    def computed(self) -> bool:
        """Whether all logits were computed."""
        return self._whole is not None

    def passed_by(self, number: Tensor) -> bool:
        """Whether a number was computed from the memory itself, as far as its gradient says.

        Args:
            number: what was computed, where gradients are wanted.
        """
        wanted = number.requires_grad and self._memory.requires_grad
        return wanted and torch.autograd.grad(number, self._memory, retain_graph=True, allow_unused=True)[0] is not None

    def whole(self) -> Tensor:
        """All logits, ``[batch, pos, d_vocab]``, as a plain tensor."""
        if self._whole is None:
            self._whole = self._at(list(range(_shape(self)[1])))
        return self._whole


def lazy(at: LogitsAt, shape: Sequence[int], like: Tensor) -> LazyLogits:
    """Logits that are computed where they are looked at.

    Args:
        at: computes them at some positions.
        shape: of all of them.
        like: a tensor of the same type and on the same device.
    """
    nothing = torch.full((), float("nan"), dtype=like.dtype, device=like.device, requires_grad=torch.is_grad_enabled())
    made = nothing.expand(*shape).as_subclass(LazyLogits)
    made._at, made._whole, made._memory = at, None, nothing
    return made


def _shape(logits: LazyLogits) -> torch.Size:
    with torch._C.DisableTorchFunctionSubclass():
        return logits.shape


def _plain(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.whole()
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)([_plain(item) for item in value])
    return value


def _chosen(logits: LazyLogits, index: Any) -> Tensor | None:
    """What an index picks, computed at its positions alone; None where that is not the plain case."""
    shape = _shape(logits)
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is None or isinstance(item, bool | LazyLogits) for item in items):
        return None
    if any(isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) for item in items):
        return None
    dots = [place for place, item in enumerate(items) if item is Ellipsis]
    if dots:
        items[dots[0] : dots[0] + 1] = [slice(None)] * (4 - len(items))
    if len(dots) > 1 or not 2 <= len(items) <= 3:
        return None
    chosen = _positions(items[1], shape[1])
    if chosen is None:
        return None
    positions, new = chosen
    if len(positions) == shape[1]:
        return None
    values = logits._at(positions)
    return values[(items[0], new.to(values.device) if isinstance(new, Tensor) else new, *items[2:])]


def _positions(item: Any, n: int) -> tuple[list[int], Any] | None:
    """The positions that an index picks of `n`, and what picks the same of these alone."""
    if isinstance(item, int):
        return ([item % n], 0) if -n <= item < n else None
    if isinstance(item, slice):
        return list(range(n))[item], slice(None)
    if isinstance(item, list) and all(type(i) is int for i in item):
        item = torch.tensor(item, dtype=torch.long)
    if isinstance(item, Tensor) and item.dtype in (torch.int64, torch.int32) and item.numel():
        if bool((item < -n).any() | (item >= n).any()):
            return None
        found, inverse = torch.unique(item.long() % n, return_inverse=True)
        return found.tolist(), inverse
    return None
