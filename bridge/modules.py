"""Lookup of modules by path, and of their arguments by name."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from adapters.linear import ReplacesForward
from adapters.points import call_number, missing_module_message, module_path, token_embedding
from adapters.views import Args, Kwargs
from adapters.views.values import Fingerprint, fingerprints
from adapters.views.views import place_of_input

T = TypeVar("T")


@functools.cache
def first_parameter(forward: Callable[..., Any]) -> str:
    """Return the name of a forward function's first parameter after self."""
    return list(inspect.signature(forward).parameters)[1]


@functools.cache
def place_of_argument(forward: Callable[..., Any], name: str) -> int:
    """Return the position of an argument of a forward function, after self.

    Raises:
        ValueError: it has no such argument.
    """
    names = list(inspect.signature(forward).parameters)[1:]
    if name not in names:
        raise ValueError(
            f"{forward.__qualname__} has no argument {name!r}; it has {', '.join(names)}"
        )
    return names.index(name)


def argument(
    module: nn.Module, args: Args, kwargs: Kwargs, name: int | str | None
) -> tuple[Any, int | str]:
    """Return an argument of a call, and its position in `args`, or its name in `kwargs`.

    Args:
        module: the module that is called.
        args, kwargs: the arguments of the call.
        name: the argument's name (the key of an input's site); None: the first tensor.
    """
    if name is None:
        index = place_of_input(module, args, kwargs)
        place: int | str = first_parameter(type(module).forward) if index is None else index
    else:
        place = name if name in kwargs else place_of_argument(type(module).forward, str(name))
    value = args[place] if isinstance(place, int) else kwargs[place]
    return value, place


def with_argument(args: Args, kwargs: Kwargs, place: int | str, new: Tensor) -> tuple[Args, Kwargs]:
    """Return a call's arguments with another value for one of them (see `argument`)."""
    if isinstance(place, int):
        return (*args[:place], new, *args[place + 1 :]), kwargs
    return args, {**kwargs, place: new}


def element_of(output: Any, place: int) -> Any:
    """Return an element of a module's output: of a tuple, a list, or a dictionary's values."""
    return list(output.values())[place] if isinstance(output, Mapping) else output[place]


def with_element(output: Any, place: int, new: Any) -> Any:
    """Return a module's output with one element replaced."""
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)
        changed[list(output)[place]] = new
        return changed
    return type(output)((*output[:place], new, *output[place + 1 :]))


class Finder:
    """A path to a module, which is resolved on each access, because users may replace modules
    (LoRA, wrappers).

    Args:
        root: the model.
        path: the dotted path from the model.

    Attributes:
        call: the number of the call in a pass, for a module that is called several times; otherwise
            None.
    """

    __slots__ = ("_root", "call", "parts")

    def __init__(self, root: nn.Module, path: str) -> None:
        # A finder must not keep its model alive: a bridge and its model end with their last user.
        self._root = weakref.ref(root)
        self.call = call_number(path)
        self.parts = module_path(path).split(".") if path else []

    @property
    def root(self) -> nn.Module:
        """Return the model.

        Raises:
            RuntimeError: the model was garbage-collected.
        """
        root = self._root()
        if root is None:
            raise RuntimeError(
                "the model is gone: keep the bridge, or the model, as long as you use a part of it"
            )
        return root

    @property
    def module(self) -> nn.Module:
        """Return the module that is currently at the path.

        Raises:
            RuntimeError: there is no longer a module at the path.
        """
        module: Any = self.root
        for name in self.parts:
            child = module._modules.get(name)
            module = getattr(module, name, None) if child is None else child
            if module is None:
                raise RuntimeError(missing_module_message(".".join(self.parts)))
        return module

    @property
    def modules_on_path(self) -> list[nn.Module]:
        """Return the modules from the model to the module at the path, both included."""
        below = [
            getattr(parent, name) if child is None else child
            for parent, name, child in self.steps()
        ]
        return [self.root, *below]

    def steps(self) -> Iterator[tuple[nn.Module, str, nn.Module | None]]:
        """Return the steps to the module: each parent, the name, and the child.

        A step through a plain attribute is given as None.
        """
        module: Any = self.root
        for name in self.parts:
            child = module._modules.get(name)
            yield module, name, child
            module = getattr(module, name) if child is None else child


class TokenEmbedding:
    """A cached lookup of a model's token embeddings, because the model's own method searches for
    them on each call.

    Args:
        model: the model.
    """

    __slots__ = ("_find", "_paths")

    def __init__(self, model: nn.Module) -> None:
        self._find = Finder(model, "")
        known = token_embedding(model)
        everywhere = model.named_modules(remove_duplicate=False)
        self._paths = [path.split(".") for path, module in everywhere if module is known]

    @property
    def module(self) -> nn.Module | None:
        """Return the current embedding module; None if the model does not define one."""
        model = self._find.root
        embedding: nn.Module | None = None
        for path in self._paths:
            module: nn.Module | None = model
            for name in path:
                # None if an attribute leads to it.
                module = None if module is None else module._modules.get(name)
            if module is None or (embedding is not None and module is not embedding):
                return token_embedding(model)
            embedding = module
        return token_embedding(model) if embedding is None else embedding


class NotCopied:
    """An attribute of a model that is not copied with the model, because hooks belong to one
    bridge. In a copied or pickled model, a replacement takes its place; by default it does nothing.
    """

    __slots__ = ()

    def left_in_copy(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return the function, with its arguments, that creates the replacement in a copy."""
        return type(self), ()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.left_in_copy()


class InForwardsPlace(NotCopied, ReplacesForward):
    """An instance attribute that replaces a module's forward; a copy has its class's forward again.

    Attributes:
        module: the module.
    """

    module: nn.Module

    def left_in_copy(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return getattr, (self.module, "forward")


def itself(x: T) -> T:
    """Return the argument."""
    return x


def check_places(finders: Iterable[Finder]) -> None:
    """Reject a module that is used at several places, because a hook would act at all of them.

    Raises:
        ValueError: a module is used at several places.
    """
    places: dict[int, str] = {}
    for finder in finders:
        path = ".".join(finder.parts)
        other = places.setdefault(id(finder.module), path)
        if other != path:
            raise ValueError(
                f"one module is at {other!r} and at {path!r}: a hook at one place would act at"
                " both. Give each place a module of its own (copy.deepcopy; parameters may be"
                " shared)"
            )


# --------------------------------------------------------------------------------------------------
# Whether a module computes what it did.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ModuleState:
    """The tensors, numbers and active PEFT adapters that a module computes with.

    Attributes:
        identities: name, identity and version of each tensor; names of the numbers and adapters,
            with their values.
        values: fingerprints of the tensors.
    """

    identities: tuple[tuple[object, ...], ...]
    values: tuple[Fingerprint, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModuleState):
            return NotImplemented
        return self.identities == other.identities and self.values == other.values

    __hash__ = None  # type: ignore[assignment]


def state_of(module: nn.Module) -> ModuleState:
    """Return a state that changes whenever a module is changed so that it computes something
    different.

    Such changes are: a write to a weight or buffer, whether torch counts it or not; a replaced
    tensor; pruning and other reparametrisations; a different epsilon; different PEFT adapters. In a
    large matrix, every row and column is checked, but not every number (see `Fingerprint`).

    Args:
        module: any module. Offloaded parameters, which are loaded when needed, do not count.

    Example:
        >>> import torch
        >>> from bridge.modules import state_of
        >>> layer = torch.nn.Linear(2, 2)
        >>> before = state_of(layer)
        >>> layer.weight.data *= 2
        >>> state_of(layer) == before
        False
    """
    identities: list[tuple[object, ...]] = []
    values: list[Fingerprint] = []
    # A plain layer needs no module traversal, which would take most of the time here.
    modules = module.named_modules() if module._modules else [("", module)]
    with torch._C.DisableTorchFunctionSubclass():  # a quantised weight may not support queries
        for path, part in modules:
            for name, x in _held_by(part):
                if isinstance(x, Tensor):
                    version = None if x.is_inference() else x._version
                    identities.append((path, name, id(x), version))
                    values += fingerprints(x)
                else:
                    identities.append((path, name, x))
    if module._modules:
        identities += adapters_at_work(module)
    return ModuleState(tuple(identities), tuple(values))


def _held_by(module: nn.Module) -> list[tuple[str, object]]:
    """Return the tensors and numbers that a module itself computes with, by name."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    held: list[tuple[str, object]] = [
        (name, x) for name, x in tensors if x is not None and not x.is_meta
    ]
    for name, x in module.__dict__.items():
        # A number such as an epsilon; or a weight that pruning computes.
        if (type(x) is float or isinstance(x, Tensor)) and not name.startswith("_"):
            held.append((name, x))
    return held


def adapters_at_work(module: nn.Module) -> tuple[tuple[object, ...], ...]:
    """Return the active adapters, and their scales, of each PEFT layer inside a module, in order.

    Args:
        module: any module.
    """
    adapters = []
    for layer in module.modules():
        active = getattr(layer, "active_adapters", None)
        disabled = getattr(layer, "disable_adapters", None)
        # Of a whole model they are methods.
        if not isinstance(active, list) or not isinstance(disabled, bool):
            continue
        scaling = getattr(layer, "scaling", None)
        scales = scaling.items() if isinstance(scaling, dict) else ()
        adapters.append((*active, disabled, *scales))
    return tuple(adapters)


# --------------------------------------------------------------------------------------------------
# Whether two results are the same computation, done in another batch.
# --------------------------------------------------------------------------------------------------


#: The relative tolerance between results of the same computation in another batch, with respect to
#: the largest number.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}

#: How many numbers are compared at once.
_COMPARED = 2**22


def close(result: Tensor, expected: Tensor) -> bool:
    """Tell whether two results are equal up to rounding differences between batch sizes.

    Args:
        result: one result.
        expected: the other result; the tolerance is relative to its largest number.
    """
    least, most = (float(x) for x in expected.detach().aminmax())
    relative = ROUNDING.get(expected.dtype, 10 * torch.finfo(expected.dtype).eps)
    tolerance = relative * max(-least, most)
    if result.shape != expected.shape:
        return False
    result, expected = torch.atleast_1d(result, expected)
    # In chunks: a comparison needs several times the memory of its arguments.
    axis = min(1, expected.ndim - 1)
    width = max(1, _COMPARED * expected.shape[axis] // expected.numel())
    chunks = zip(result.split(width, axis), expected.split(width, axis), strict=True)
    return all(torch.allclose(x, y, rtol=0, atol=tolerance) for x, y in chunks)
