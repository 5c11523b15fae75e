"""Copy a model for proofs: shared parameters, but noise in place of constant ones."""

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

# --------------------------------------------------------------------------------------------------
# Parameters that are offloaded or in half precision: loaded in float32 for each use, and freed
# afterwards.
#
# A model of some billion parameters then needs only the memory of its largest layer, however its
# parameters are usually loaded.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lender:
    """Provider of one parameter.

    Attributes:
        bring: returns the parameter as stored.
        device: the device where it is used.
    """

    bring: Callable[[], Tensor]
    device: torch.device

    def __call__(self) -> Tensor:
        """Return the parameter on the device where it is used."""
        x = self.bring().detach().to(self.device)
        if x.is_inference():
            return x.clone()
        return x


#: Number of elements of a linear layer's weight that are in float32 at a time.
_AT_ONCE = 2**22
#: Attributes of a parameter that do not need its values.
_OUTSIDE = (
    "shape",
    "ndim",
    "requires_grad",
    "grad",
    "grad_fn",
    "is_leaf",
    "layout",
    "is_sparse",
    "is_quantized",
)
_MEASURES = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__)
#: Methods about the storage of the values: they identify the expert to which a part belongs.
_PLACES = (Tensor.data_ptr, Tensor.element_size, Tensor.stride, Tensor.storage_offset)


def _pieces(weight: Tensor, buffer: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield a weight in groups of rows, each copied into the same buffer."""
    count = max(1, len(buffer) // weight.shape[-1])
    for start in range(0, len(weight), count):
        rows = slice(start, start + count)
        piece = weight[rows]
        size = piece.numel()
        room = buffer[:size] if size <= len(buffer) else buffer.new_empty(size)
        yield rows, room.view(piece.shape).copy_(piece)


class _Lent(TorchFunctionMode):
    """Mode in which functions receive parameters in float32, loaded for each use.

    Args:
        brings: the lender of each parameter, by its `id`.
    """

    def __init__(self, brings: Mapping[int, _Lender]) -> None:
        super().__init__()
        self._brings = dict(brings)
        #: Parts of parameters, such as those of one expert: lent for as long as they are alive.
        self._parts: list[weakref.ref[Tensor]] = []
        #: The parameters of those parts, while any part is alive.
        self._wholes: dict[int, weakref.ref[Tensor]] = {}
        self._anchor = torch.zeros((), requires_grad=True, device="cpu")
        #: The float32 buffer for pieces of weights, on each device.
        self._buffers: dict[torch.device, Tensor] = {}
        #: Loaded parameters still in use, by data pointer.
        self._used: dict[int, tuple[weakref.ref[Tensor], Callable[[], Tensor]]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not kwargs and not any(id(x) in self._brings or type(x) in (tuple, list) for x in args):
            return func(*args)  # most calls
        kwargs = kwargs or {}
        first = args[0] if args else None
        if id(first) in self._brings and isinstance(first, Tensor):
            result = self._on_parameter(func, first, args, kwargs)
            if result is not NotImplemented:
                return result
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if id(weight) in self._brings and isinstance(weight, Tensor):
            if func is functional.embedding:
                return self._embedding(*args, **kwargs)
            if func is functional.linear:
                return self._in_pieces(*args, **kwargs)
        brought = {name: self._brought(value) for name, value in kwargs.items()}
        return func(*map(self._brought, args), **brought)

    def _on_parameter(
        self,
        func: Callable[..., Any],
        parameter: Tensor,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a function of a parameter if it does not need the values in float32; otherwise
        return `NotImplemented`.
        """
        name = ""
        if func.__name__ == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _OUTSIDE or func in _MEASURES:
            return func(*args, **kwargs)
        device = self._brings[id(parameter)].device
        if name == "dtype":
            return torch.float32
        if name == "device":
            return device
        if name == "is_meta":
            return device.type == "meta"
        if func in _PLACES:
            return func(self._whole(id(parameter)), *args[1:])
        if func is Tensor.__getitem__:
            return self._part(id(parameter), args[1])
        return NotImplemented

    def _embedding(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Look up rows of a parameter as stored, and convert them to float32."""
        rows: Tensor = functional.embedding(input, self._brings[id(weight)](), *args, **kwargs)
        return rows.float()

    def _whole(self, place: int) -> Tensor:
        """Return a parameter as stored: the same tensor for as long as a part of it is alive."""
        kept = self._wholes[place]() if place in self._wholes else None
        if kept is None:
            kept = self._brings[place]()
            self._wholes[place] = weakref.ref(kept)
        return kept

    def _part(self, place: int, index: Any) -> Tensor:
        parameter = self._whole(place)
        lender = self._brings[place]
        part = parameter[index]
        part.__dict__["whole"] = parameter
        if part.dtype != torch.float32:
            key = id(part)
            self._brings[key] = _Lender(lambda: lender()[index], lender.device)
            self._parts.append(weakref.ref(part, lambda _: self._brings.pop(key)))
        return part

    def _brought(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self._brought, value))
        bring = self._brings.get(id(value))
        if bring is None:
            return value
        return self._kept_for_use(bring)

    def _kept_for_use(self, bring: Callable[[], Tensor]) -> Tensor:
        def in_float32(_: Tensor) -> Tensor:
            x = bring()
            if x.dtype == torch.float32:
                return x.view_as(x)
            return x.float()

        # Not a leaf: the graph would keep a leaf alive.
        new: Tensor = Turned.apply(self._anchor, in_float32, lambda gradient: None)
        self._used[new.untyped_storage().data_ptr()] = (weakref.ref(new), bring)
        return new

    def _in_pieces(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute a linear layer in float32 with a few rows of its weight at a time, in one reused
        buffer.

        A float32 copy of the whole weight would be allocated at each use, which takes longer than
        the product.
        """
        bring = self._brings[id(weight)]
        device = bring.device
        if device not in self._buffers:
            self._buffers[device] = torch.empty(_AT_ONCE, dtype=torch.float32, device=device)
        buffer = self._buffers[device]

        def forward(x: Tensor) -> Tensor:
            columns = [functional.linear(x, piece) for _, piece in _pieces(bring(), buffer)]
            return torch.cat(columns, -1)

        def backward(gradient: Tensor) -> Tensor:
            products = [gradient[..., rows] @ piece for rows, piece in _pieces(bring(), buffer)]
            return sum(products[1:], products[0])

        result: Tensor = Turned.apply(input, forward, backward)
        if bias is None:
            return result
        return result + self._brought(bias)

    def packed(self, x: Tensor) -> object:
        """Return what the graph saves for a tensor: for a parameter, how to load it again."""
        alive, bring = self._used.get(x.untyped_storage().data_ptr(), (None, None))
        if alive is None or bring is None or alive() is None:
            return x, x._version
        return bring, x.size(), x.stride(), x.storage_offset()

    @staticmethod
    def unpacked(kept: Any) -> Tensor:
        """Return the tensor that `packed` saved."""
        if len(kept) == 2:
            x, version = kept
            if x._version != version:
                raise RuntimeError(
                    "a tensor that a gradient is made from was modified by an inplace operation"
                )
            return x  # type: ignore[no-any-return]
        bring, size, stride, offset = kept
        return bring().float().as_strided(size, stride, offset)  # type: ignore[no-any-return]


@contextmanager
def lending(brings: Mapping[int, _Lender]) -> Iterator[None]:
    """Load parameters on use inside a ``with`` statement.

    Args:
        brings: the lender of each parameter, by its `id`; if empty, nothing is done.
    """
    if not brings:
        yield
        return
    lent = _Lent(brings)
    with lent, saved_tensors_hooks(lent.packed, lent.unpacked):
        yield


#: The dictionaries of a module's hooks: they are empty in its probe copy.
_ATTACHED = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
#: Says that transformers has attached the hooks by which it returns hidden states; it attaches them
#: to a copy anew.
_CAPTURES = "_output_capturing_hooks_installed"
#: Largest size of a probe copy's own float32 parameters, in bytes. In larger models, each parameter
#: is loaded on use.
ROOM = 2**31
#: Standard deviation of the noise on constant parameters.
_NOISE = 0.2
_HALF = (torch.float16, torch.bfloat16)


def trivial_parameters(model: nn.Module) -> list[str]:
    """Return the names of parameters whose elements are all equal (zero biases, norm weights of
    one): they prove nothing.

    Buffers that are biases are included, such as the bias of BART's logits.
    """
    held: list[tuple[str, Tensor]] = list(model.named_parameters())
    held += [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias")]
    return [name for name, x in held if not x.is_meta and _is_trivial(x)]


def _is_trivial(p: Tensor) -> bool:
    """Tell whether all elements are equal. Compare the first two first, because they differ in most
    parameters. A scalar counts, because it may be 1 or 0 by chance.
    """
    plain = type(p) in (nn.Parameter, Tensor) or isinstance(p, DTensor)
    if not plain:
        return False
    if not p.is_floating_point():
        return False
    if p.numel() == 0:
        return False
    numbers = whole(p).flatten()
    return all(bool((x == x[0]).all()) for x in (numbers[:2], numbers))


def why_no_probe_copy(model: nn.Module) -> str:
    """Return the reason why a model cannot have a probe copy; "" if it can."""
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__}"
        if not parameter.is_floating_point():
            return f"{name} is quantised"
    return ""


def is_moved(model: nn.Module) -> bool:
    """Tell whether accelerate loads parameters for a run: they are offloaded, or on several
    devices.
    """
    return any(hasattr(module, "_hf_hook") for module in model.modules())


@contextmanager
def probe_copy(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a copy of the model with new modules and shared parameters: changes to the copy's
    modules do not affect the model.

    The copy has its own version of some parameters: constant ones get noise, half-precision ones
    are converted to float32, and ones created in inference mode are copied. If these would take too
    much memory, or accelerate moves parameters, each is loaded in float32 when it is used (see
    `lending`): the copy then works only inside the ``with`` statement. Hooks, the user's and the
    bridge's, stay with the model.

    Args:
        model: the model; see `why_no_probe_copy`.
    """
    moved = is_moved(model)
    half = sum(p.numel() for p in model.parameters() if p.dtype in _HALF)
    lends_half = 4 * half > ROOM
    device = input_device(model)
    generator = torch.Generator().manual_seed(0)
    lenders: dict[int, _Lender] = {}
    tensors: dict[int, Tensor] = {}
    for module, name, held in _held(model):
        if id(held) in tensors:
            continue
        lender = _Lender(partial(materialized, module, name), device if moved else held.device)
        is_parameter = isinstance(held, nn.Parameter)
        new = lender() if moved or held.is_inference() else held.detach()
        if (is_parameter or name.endswith("bias")) and _is_trivial(new):
            noise = torch.randn(new.shape, generator=generator, device="cpu") * _NOISE
            new = new + noise.to(new)
        elif is_parameter and (moved or (lends_half and held.dtype in _HALF)):
            tensors[id(held)] = held
            lenders[id(held)] = lender
            continue
        elif not is_parameter:
            new = new.clone()
        tensors[id(held)] = _owned(new, held)
    copies = {id(module): object.__new__(type(module)) for module in model.modules()}
    for module in model.modules():
        copies[id(module)].__dict__ = _state(module, copies, tensors)
    with lending(lenders):
        yield copies[id(model)]


def _owned(new: Tensor, held: Tensor) -> Tensor:
    """Return the copy's tensor for one of the model's; an unchanged parameter is shared."""
    if new.dtype in _HALF:
        new = new.float()
    if not isinstance(held, nn.Parameter):
        return new
    if new.data_ptr() == held.data_ptr():
        return held
    return nn.Parameter(new, requires_grad=held.requires_grad)


def _held(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield all parameters and buffers, with the modules that own them."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is not None:
                    yield module, name, x


def _state(
    module: nn.Module, copies: Mapping[int, nn.Module], tensors: Mapping[int, Tensor]
) -> dict[str, Any]:
    """Return a module's state, with its modules replaced by their copies and its tensors by the new
    ones.
    """
    state: dict[str, Any] = {}
    left_out = {"_hf_hook", "_old_forward", _CAPTURES}
    if "_hf_hook" in module.__dict__:
        left_out.add("forward")
    for name, value in module.__dict__.items():
        if name in left_out:
            continue
        if name == "forward" and type(value).__module__.split(".")[0] == "bridge":
            continue  # set by a tap
        if name in _ATTACHED:
            state[name] = type(value)()
        elif name in ("_parameters", "_buffers"):
            state[name] = {key: tensors.get(id(held), held) for key, held in value.items()}
        else:
            state[name] = _other(value, copies)
    return state


def _other(value: Any, copies: Mapping[int, nn.Module]) -> Any:
    """Return a value with the modules in it replaced by their copies."""
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
    """Yield the model, or its probe copy if parameters are constant, in half precision, offloaded,
    or without gradients.

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
