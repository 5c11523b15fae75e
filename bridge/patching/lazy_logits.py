"""Lazy logits: computed only at the positions that a metric reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: From positions ``[k]`` to logits ``[batch, k, d_vocab]``.
LogitsAt = Callable[[list[int]], Tensor]

#: Attributes and methods that do not depend on the values.
_PROPERTIES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")
_FACTS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
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
    """Logits ``[batch, pos, d_vocab]`` that are computed on first use.

    Indexing with positions (``logits[:, -1]``, ``logits[rows, positions, tokens]``) computes the
    logits at these positions only. Any other operation computes all logits first, so the values
    always equal those of plain logits. Code that reads the memory itself, bypassing torch's
    functions, sees NaN, and its gradient reaches that memory (`passed_by`).

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
        if func is Tensor.__getitem__ and isinstance(args[0], LazyLogits):
            entries = _entries(*args)
            if entries is not None:
                return entries
        return func(*_plain(args), **{name: _plain(value) for name, value in kwargs.items()})

    @property
    def computed(self) -> bool:
        """Tell whether all logits were computed."""
        return self._whole is not None

    def passed_by(self, number: Tensor) -> bool:
        """Tell whether a number was computed from the placeholder memory, according to its
        gradient.

        Args:
            number: the result of the metric, with gradients enabled.
        """
        memory = self._memory
        if not (number.requires_grad and memory.requires_grad):
            return False
        (gradient,) = torch.autograd.grad(number, memory, retain_graph=True, allow_unused=True)
        return gradient is not None

    def whole(self) -> Tensor:
        """Return all logits, ``[batch, pos, d_vocab]``, as a plain tensor."""
        if self._whole is None:
            self._whole = self._at(list(range(_shape(self)[1])))
        return self._whole


def lazy(at: LogitsAt, shape: Sequence[int], like: Tensor) -> LazyLogits:
    """Return logits that are computed only where they are read.

    Args:
        at: the function that computes the logits at some positions.
        shape: the shape of all logits.
        like: a tensor of the same type and on the same device.
    """
    memory = torch.full((), float("nan"), dtype=like.dtype, device=like.device)
    memory.requires_grad_(torch.is_grad_enabled())
    logits = memory.expand(*shape).as_subclass(LazyLogits)
    logits._at, logits._whole, logits._memory = at, None, memory
    return logits


def _shape(logits: LazyLogits) -> torch.Size:
    with torch._C.DisableTorchFunctionSubclass():
        return logits.shape


def _plain(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.whole()
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)([_plain(item) for item in value])
    return value


def _entries(logits: LazyLogits, index: Any) -> Tensor | None:
    """Return the indexed logits, computed at the indexed positions only; None if the index is not a
    simple one, or all logits were computed.
    """
    length = _shape(logits)[1]
    items = _index_items(index)
    selected = None if items is None or logits.computed else _positions(items[1], length)
    if items is None or selected is None:
        return None
    positions, new = selected
    if len(positions) == length:
        return None
    values = logits._at(positions)
    items[1] = new.to(values.device) if isinstance(new, Tensor) else new
    return values[tuple(items)]


def _index_items(index: Any) -> list[Any] | None:
    """Return what an index selects along batch, position and vocabulary; None if it is not simple:
    it adds axes, has masks, or does not reach the positions.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    for item in items:
        if item is None or isinstance(item, bool | LazyLogits):
            return None
        if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
            return None
    dots = [place for place, item in enumerate(items) if item is Ellipsis]
    if dots:
        items[dots[0] : dots[0] + 1] = [slice(None)] * (4 - len(items))
    return items if len(dots) <= 1 and 2 <= len(items) <= 3 else None


def _positions(item: Any, n: int) -> tuple[list[int], Any] | None:
    """Return the positions that an index selects of `n`, and an equivalent index into these."""
    if isinstance(item, int):
        return ([item % n], 0) if -n <= item < n else None
    if isinstance(item, slice):
        return list(range(n))[item], slice(None)
    if isinstance(item, list) and all(type(i) is int for i in item):
        item = torch.tensor(item, dtype=torch.long, device="cpu")
    if not isinstance(item, Tensor) or item.dtype not in (torch.int64, torch.int32):
        return None
    if not item.numel() or bool((item < -n).any() | (item >= n).any()):
        return None
    positions, inverse = torch.unique(item.long() % n, return_inverse=True)
    return positions.tolist(), inverse
