"""A probe copy of a model for proofs: its own modules, with the model's parameters but for those that prove nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from adapters.linear import Turned, has_weights, input_device, materialized, whole

# ----------------------------------------------------------------------------------------------------------------------
# Parameters that stand elsewhere, or in half precision: brought in float32 for each use, and given up after it.
#
# A model of some billion parameters is looked at so with the memory of its largest layer, whatever brings them
# otherwise.
# ----------------------------------------------------------------------------------------------------------------------


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


#: Of a linear layer's weight, so many elements are in float32 at a time.
_AT_ONCE = 2**22
#: What is read of a parameter without its values.
_OUTSIDE = ("shape", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf", "layout", "is_sparse", "is_quantized")
_MEASURES = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__)
#: What says where the values lie, as they are kept: which expert's a part is, is told from it.
_PLACES = (Tensor.data_ptr, Tensor.element_size, Tensor.stride, Tensor.storage_offset)


def _pieces(weight: Tensor, place: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some rows of a weight after the other, each in the same place."""
    count = max(1, len(place) // weight.shape[-1])
    for at in range(0, len(weight), count):
        rows = slice(at, at + count)
        some = weight[rows]
        whole = place[: some.numel()] if some.numel() <= len(place) else place.new_empty(some.numel())
        yield rows, whole.view(some.shape).copy_(some)


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
        #: Where pieces of weights are in float32, on each device.
        self._places: dict[torch.device, Tensor] = {}
        #: What was brought and is still in use, by where its numbers lie.
        self._used: dict[int, tuple[weakref.ref[Tensor], Callable[[], Tensor]]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not kwargs and not any(id(x) in self._brings or type(x) in (tuple, list) for x in args):
            return func(*args)  # most calls
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
            if func is functional.linear:
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
        def in_float32(_: Tensor) -> Tensor:
            x = bring()
            return x.view_as(x) if x.dtype == torch.float32 else x.float()

        # The graph keeps nothing of it: a leaf would stay there as long as the graph.
        new: Tensor = Turned.apply(self._anchor, in_float32, lambda gradient: None)
        self._used[new.untyped_storage().data_ptr()] = (weakref.ref(new), bring)
        return new

    def _in_pieces(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer, some rows of its weight at a time in float32, all in one place.

        A weight in float32 of its own would be new memory in each use, which takes longer than the product.
        """
        bring = self._brings[id(weight)]
        if bring.device not in self._places:
            self._places[bring.device] = torch.empty(_AT_ONCE, dtype=torch.float32, device=bring.device)
        place = self._places[bring.device]

        def there(x: Tensor) -> Tensor:
            return torch.cat([functional.linear(x, piece) for _, piece in _pieces(bring(), place)], -1)

        def back(gradient: Tensor) -> Tensor:
            products = [gradient[..., rows] @ piece for rows, piece in _pieces(bring(), place)]
            return sum(products[1:], products[0])

        made: Tensor = Turned.apply(input, there, back)
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


#: The dictionaries in which a module keeps what was attached to it: its probe copy has none of it.
_ATTACHED = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
#: Parameters in float32 that a probe copy may take of its own, in bytes; of a model with more, each is brought for use.
ROOM = 2**31
_HALF = (torch.float16, torch.bfloat16)


def trivial_parameters(model: nn.Module) -> list[str]:
    """The parameters whose elements are all the same (biases of zero, norms of one): they prove nothing.

    Buffers that are biases count, such as what BART adds to its logits.
    """
    held = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if name.endswith("bias"))]
    return [name for name, p in held if not p.is_meta and _is_trivial(p)]


def _is_trivial(p: Tensor) -> bool:
    """Whether all elements are the first: of most parameters the second is not. A scalar may be 1 or 0 by chance."""
    plain = type(p) in (nn.Parameter, Tensor) or isinstance(p, DTensor)
    if not plain or not p.is_floating_point() or p.numel() == 0:
        return False
    p = whole(p).flatten()
    return all(bool((x == x[0]).all()) for x in (p[:2], p))


def why_no_probe_copy(model: nn.Module) -> str:
    """Why a model can have no probe copy; "" where it can."""
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__}"
        if not parameter.is_floating_point():
            return f"{name} is quantised"
    return ""


def is_moved(model: nn.Module) -> bool:
    """Whether accelerate brings parameters for a run: they are offloaded, or on several devices."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


@contextmanager
def probe_copy(model: nn.Module, *, noise: float = 0.2) -> Iterator[nn.Module]:
    """A model of other modules that shares the parameters: nothing done to it is done to the model.

    Parameters whose elements are all the same get noise, those in half precision are in float32, and those that were
    made in inference mode are copied; these are its own. Where they would take too much room, and where accelerate
    moves parameters, each is brought in float32 when it is used (see `lent`): the copy runs inside the ``with``
    statement alone.
    Hooks of any kind, the user's and the bridge's, stay with the model.

    Args:
        model: the model; see `why_no_probe_copy`.
        noise: the standard deviation of what is added.
    """
    moved = is_moved(model)
    half = sum(p.numel() for p in model.parameters() if p.dtype in _HALF)
    device = input_device(model)
    generator = torch.Generator().manual_seed(0)
    lenders: dict[int, Lender] = {}
    tensors: dict[int, Tensor] = {}
    for module, name, held in _held(model):
        if id(held) in tensors:
            continue
        lender = Lender(partial(materialized, module, name), device if moved else held.device)
        is_parameter = isinstance(held, nn.Parameter)
        new = lender() if moved or held.is_inference() else held.detach()
        trivial = (is_parameter or name.endswith("bias")) and _is_trivial(new)
        if trivial:
            new = new + (torch.randn(new.shape, generator=generator) * noise).to(new)
        elif is_parameter and (moved or (held.dtype in _HALF and 4 * half > ROOM)):
            tensors[id(held)], lenders[id(held)] = held, lender
            continue
        elif not is_parameter:
            new = new.clone()
        if new.dtype in _HALF:
            new = new.float()
        own = is_parameter and new.data_ptr() != held.data_ptr()
        tensors[id(held)] = (
            nn.Parameter(new, requires_grad=held.requires_grad) if own else held if is_parameter else new
        )
    copies: dict[int, nn.Module] = {id(module): object.__new__(type(module)) for module in model.modules()}
    for module in model.modules():
        copies[id(module)].__dict__ = _state(module, copies, tensors)
    with lending(lenders):
        yield copies[id(model)]


def _held(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """All parameters and buffers, with the modules that have them."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            yield from ((module, name, x) for name, x in held.items() if x is not None)


def _state(module: nn.Module, copies: Mapping[int, nn.Module], tensors: Mapping[int, Tensor]) -> dict[str, Any]:
    """What a module keeps, with copies for modules and the other tensors for its own."""
    state: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        if name in _ATTACHED:
            state[name] = type(value)()
        elif name in ("_hf_hook", "_old_forward") or (name == "forward" and "_hf_hook" in module.__dict__):
            continue  # accelerate's
        elif name == "forward" and type(value).__module__.split(".")[0] == "bridge":
            continue  # a tap
        elif name in ("_parameters", "_buffers"):
            state[name] = {key: tensors.get(id(held), held) for key, held in value.items()}
        else:
            state[name] = _other(value, copies)
    return state


def _other(value: Any, copies: Mapping[int, nn.Module]) -> Any:
    """A value with copies for the modules in it."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if type(value) is dict:
        return {key: _other(held, copies) for key, held in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_other(held, copies) for held in value)
    owner = getattr(value, "__self__", None)
    if isinstance(owner, nn.Module) and id(owner) in copies and hasattr(value, "__func__"):
        return value.__func__.__get__(copies[id(owner)])
    return value


@contextmanager
def model_or_probe_copy(model: nn.Module) -> Iterator[nn.Module]:
    """What is run: the model; or its probe copy, where its parameters prove nothing, or little, or have no gradients.

    Args:
        model: a Hugging Face model.
    """
    parameters = list(model.parameters())
    inference = any(p.is_inference() for p in parameters)
    half = any(p.dtype in _HALF for p in parameters)
    if (
        not has_weights(model)
        or why_no_probe_copy(model)
        or not (is_moved(model) or half or inference or trivial_parameters(model))
    ):
        yield model
        return
    with probe_copy(model) as copied:
        yield copied
