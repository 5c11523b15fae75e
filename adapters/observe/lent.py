"""Parameters that stand elsewhere, or in half precision: brought in float32 for each use, and given up after it.

A model of some billion parameters is looked at so with the memory of its largest layer, whatever brings them otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Lender:
    """Brings one parameter.

    Attributes:
        bring: returns it as it is kept.
        device: where it is used.
    """

    bring: Callable[[], Tensor]
    device: torch.device

    def __call__(self) -> Tensor:
        """It, where it is used."""
        x = self.bring().detach().to(self.device)
        return x.clone() if x.is_inference() else x


#: Of a weight with more elements, so many are in float32 at a time.
_AT_ONCE = 2**26
#: What is read of a parameter without its values.
_OUTSIDE = ("shape", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf", "layout", "is_sparse", "is_quantized")
_MEASURES = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__)
#: What says where the values lie, as they are kept: which expert's a part is, is told from it.
_PLACES = (Tensor.data_ptr, Tensor.element_size, Tensor.stride, Tensor.storage_offset)


class _Brought(torch.autograd.Function):
    """A parameter in float32, of which a graph keeps nothing: a leaf would stay there as long as the graph."""

    @staticmethod
    def forward(ctx: Any, bring: Callable[[], Tensor], anchor: Tensor) -> Tensor:
        x = bring()
        return x.view_as(x) if x.dtype == torch.float32 else x.float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class Lent(TorchFunctionMode):
    """Functions get parameters as what is brought for them, in float32.

    Args:
        brings: for each parameter, by its `id`.
    """

    def __init__(self, brings: Mapping[int, Lender]) -> None:
        super().__init__()
        self._brings = dict(brings)
        #: Parts of parameters, such as those of one expert: lent for as long as they are there.
        self._parts: list[weakref.ref[Tensor]] = []
        #: What those are parts of, for as long as there are any.
        self._wholes: dict[int, weakref.ref[Tensor]] = {}
        self._anchor = torch.zeros((), requires_grad=True)
        #: What was brought and is still in use, by where its numbers lie.
        self._used: dict[int, tuple[weakref.ref[Tensor], Callable[[], Tensor]]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if id(first) in self._brings and isinstance(first, Tensor):
            name = getattr(getattr(func, "__self__", None), "__name__", "") if func.__name__ == "__get__" else ""
            if name in _OUTSIDE or func in _MEASURES:
                return func(*args, **kwargs)
            if name in ("dtype", "device", "is_meta"):
                device = self._brings[id(first)].device
                return {"dtype": torch.float32, "device": device, "is_meta": device.type == "meta"}[name]
            if func in _PLACES:
                return func(self._whole(id(first)), *args[1:])
            if func is Tensor.__getitem__:
                return self._part(id(first), args[1])
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if id(weight) in self._brings and isinstance(weight, Tensor):
            if func is functional.embedding:
                rest = {name: value for name, value in kwargs.items() if name not in ("weight", "input")}
                ids = kwargs.get("input", first)
                return func(ids, self._brings[id(weight)](), *args[2:], **rest).float()
            if func is functional.linear and weight.numel() > _AT_ONCE:
                return self._in_pieces(*args, **kwargs)
        return func(*map(self._brought, args), **{name: self._brought(value) for name, value in kwargs.items()})

    def _whole(self, place: int) -> Tensor:
        """A parameter as it is kept: the same tensor for as long as a part of it is there."""
        kept = self._wholes[place]() if place in self._wholes else None
        if kept is None:
            kept = self._brings[place]()
            self._wholes[place] = weakref.ref(kept)
        return kept

    def _part(self, of: int, index: Any) -> Tensor:
        whole, lender = self._whole(of), self._brings[of]
        part = whole[index]
        part.__dict__["whole"] = whole
        if part.dtype != torch.float32:
            place = id(part)
            self._brings[place] = Lender(lambda: lender()[index], lender.device)
            self._parts.append(weakref.ref(part, lambda _: self._brings.pop(place)))
        return part

    def _brought(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self._brought, value))
        bring = self._brings.get(id(value))
        return value if bring is None else self._kept_for_use(bring)

    def _kept_for_use(self, bring: Callable[[], Tensor]) -> Tensor:
        new: Tensor = _Brought.apply(bring, self._anchor)
        self._used[new.untyped_storage().data_ptr()] = (weakref.ref(new), bring)
        return new

    def _in_pieces(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer whose weight is large, some rows of it at a time."""
        bring, rows = self._brings[id(weight)], max(1, _AT_ONCE // weight.shape[-1])
        pieces = [
            functional.linear(input, self._kept_for_use(lambda at=at: bring()[at : at + rows]))  # type: ignore[misc]
            for at in range(0, weight.shape[0], rows)
        ]
        made = torch.cat(pieces, -1)
        return made if bias is None else made + self._brought(bias)

    def packed(self, x: Tensor) -> object:
        """What a graph keeps of a tensor: of a parameter, how it is brought again."""
        made, bring = self._used.get(x.untyped_storage().data_ptr(), (None, None))
        if made is None or bring is None or made() is None:
            return x, x._version
        return bring, x.size(), x.stride(), x.storage_offset()

    @staticmethod
    def unpacked(kept: Any) -> Tensor:
        """The other way."""
        if len(kept) == 2:
            x, version = kept
            if x._version != version:
                raise RuntimeError("a tensor that a gradient is made from was modified by an inplace operation")
            return x  # type: ignore[no-any-return]
        bring, size, stride, offset = kept
        return bring().float().as_strided(size, stride, offset)  # type: ignore[no-any-return]


@contextmanager
def lending(brings: Mapping[int, Lender]) -> Iterator[None]:
    """Inside a ``with`` statement, parameters are what is brought for them.

    Args:
        brings: for each parameter, by its `id`; none: nothing is done.
    """
    if not brings:
        yield
        return
    lent = Lent(brings)
    with lent, saved_tensors_hooks(lent.packed, lent.unpacked):
        yield
