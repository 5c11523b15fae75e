"""Finding modules by path, and their arguments by name."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from adapters.points import call_number, missing_module_message, module_path, token_embedding
from adapters.views import Args, Kwargs
from adapters.views.views import place_of_input

T = TypeVar("T")


@functools.cache
def first_parameter(forward: Callable[..., Any]) -> str:
    """The name of a forward function's first parameter after self."""
    return list(inspect.signature(forward).parameters)[1]


@functools.cache
def place_of_argument(forward: Callable[..., Any], name: str) -> int:
    """At which place a forward function takes an argument, after self.

    Raises:
        ValueError: it has no such argument.
    """
    names = list(inspect.signature(forward).parameters)[1:]
    if name not in names:
        raise ValueError(f"{forward.__qualname__} has no argument {name!r}; it has {', '.join(names)}")
    return names.index(name)


def argument(module: nn.Module, args: Args, kwargs: Kwargs, name: int | str | None) -> tuple[Any, int | str]:
    """An argument of a call, and its place among `args`, or its name among `kwargs`.

    Args:
        module: which is called.
        args, kwargs: with these.
        name: of the argument, which is the key of an input's site; None: the first that is a tensor.
    """
    if name is None:
        found = place_of_input(module, args, kwargs)
        place: int | str = first_parameter(type(module).forward) if found is None else found
    else:
        place = name if name in kwargs else place_of_argument(type(module).forward, str(name))
    return (args[place] if isinstance(place, int) else kwargs[place]), place


def with_argument(args: Args, kwargs: Kwargs, place: int | str, new: Tensor) -> tuple[Args, Kwargs]:
    """What a call is given with another value for one argument (see `argument`)."""
    if isinstance(place, int):
        return (*args[:place], new, *args[place + 1 :]), kwargs
    return args, {**kwargs, place: new}


def element_of(output: Any, place: int) -> Any:
    """An element of what a module returns: a tuple, a list, or a dictionary, whose values are counted."""
    return list(output.values())[place] if isinstance(output, Mapping) else output[place]


def with_element(output: Any, place: int, new: Any) -> Any:
    """What a module returns, with something else in the place of an element."""
    if isinstance(output, Mapping):
        made: Any = copy.copy(output)
        made[list(output)[place]] = new
        return made
    return type(output)((*output[:place], new, *output[place + 1 :]))


class Finder:
    """Finds a module anew each time, since users replace modules (LoRA, wrappers of their own).

    Args:
        root: the model.
        path: dotted, from the model.

    Attributes:
        call: which call of it in a pass is meant, None where it is called once.
    """

    __slots__ = ("_root", "call", "parts")

    def __init__(self, root: nn.Module, path: str) -> None:
        # What finds a model must not keep it: a bridge and its model end with their last user.
        self._root, self.call = weakref.ref(root), call_number(path)
        self.parts = module_path(path).split(".") if path else []

    @property
    def root(self) -> nn.Module:
        """The model.

        Raises:
            RuntimeError: nobody holds it any more.
        """
        root = self._root()
        if root is None:
            raise RuntimeError("the model is gone: keep the bridge, or the model, as long as you use a part of it")
        return root

    @property
    def module(self) -> nn.Module:
        """The module that stands there now.

        Raises:
            RuntimeError: there is none any more.
        """
        found: Any = self.root
        for part in self.parts:
            child = found._modules.get(part)
            found = getattr(found, part, None) if child is None else child
            if found is None:
                raise RuntimeError(missing_module_message(".".join(self.parts)))
        return found

    @property
    def modules_on_path(self) -> list[nn.Module]:
        """The modules from the model to the one that stands there, both included."""
        found = [getattr(holder, part) if child is None else child for holder, part, child in self.steps()]
        return [self.root, *found]

    def steps(self) -> Iterator[tuple[nn.Module, str, nn.Module | None]]:
        """The steps from the model to the module: the module in which it was looked, the name, what was found.

        None stands for a step that led through an attribute.
        """
        found: Any = self.root
        for part in self.parts:
            child = found._modules.get(part)
            yield found, part, child
            found = getattr(found, part) if child is None else child


class TokenEmbedding:
    """Finds a model's token embeddings, which its own method looks for at one place after the other, in every run.

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
        """The module that it is now; None where the model does not say."""
        model, found = self._find.root, None
        for path in self._paths:
            here: nn.Module | None = model
            for part in path:
                here = None if here is None else here._modules.get(part)  # None where an attribute leads to it
            if here is None or (found is not None and here is not found):
                return token_embedding(model)
            found = here
        return token_embedding(model) if found is None else found


class NotCopied:
    """What is attached to a model while somebody listens, and no copy of it has: hooks belong to one bridge.

    A model that is copied or pickled meanwhile has something else in its place, by default one that does nothing.
    """

    __slots__ = ()

    def left_in_copy(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """What makes that which stands in its place in a copy, and of what."""
        return type(self), ()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.left_in_copy()


class InForwardsPlace(NotCopied):
    """What stands in a module's dictionary in the place of its class's forward, which a copy has.

    Attributes:
        module: the module.
    """

    module: nn.Module

    def left_in_copy(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return getattr, (self.module, "forward")


def itself(x: T) -> T:
    """What it is given."""
    return x


def check_places(finders: Iterable[Finder]) -> None:
    """Looks whether one module is at several places, where a hook at one would act at all.

    Raises:
        ValueError: one does.
    """
    places: dict[int, str] = {}
    for finder in finders:
        path = ".".join(finder.parts)
        other = places.setdefault(id(finder.module), path)
        if other != path:
            raise ValueError(
                f"one module is at {other!r} and at {path!r}: a hook at one place would act at both. Give each "
                "place a module of its own (copy.deepcopy; parameters may be shared)"
            )


# ----------------------------------------------------------------------------------------------------------------------
# Whether a module computes with the weights that it did, as far as torch counts what is written to them.
# ----------------------------------------------------------------------------------------------------------------------


#: For each parameter of a module, which one it is and how often it was written to; which adapters of PEFT are at work.
Written = tuple[tuple[object, ...], ...]


def written_to(module: nn.Module) -> Written:
    """What changes when a module computes with other weights: these are exchanged or written to, or PEFT's adapters
    inside of it are switched or scaled. (What is written through ``weight.data`` torch does not count.)

    Args:
        module: any module. Parameters on no device, which are loaded when they are needed, do not count.

    Example:
        >>> import torch
        >>> from bridge.hooks.modules import written_to
        >>> layer = torch.nn.Linear(2, 2)
        >>> before = written_to(layer)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(2)
        >>> written_to(layer) == before
        False
    """
    # A plain layer is asked alone: to go through modules takes longer than all else here.
    own = module.parameters() if module._modules else module._parameters.values()
    with torch._C.DisableTorchFunctionSubclass():  # a quantised weight may know no such question
        written: list[tuple[object, ...]] = [
            (id(x), 0 if x.is_inference() else x._version) for x in own if x is not None and not x.is_meta
        ]
    return (*written, *adapters_at_work(module)) if module._modules else tuple(written)


def adapters_at_work(module: nn.Module) -> tuple[tuple[object, ...], ...]:
    """Of each layer of PEFT's inside of a module, in order: which adapters are at work, and how much each counts.

    Args:
        module: any module.
    """
    found = []
    for part in module.modules():
        active, disabled = getattr(part, "active_adapters", None), getattr(part, "disable_adapters", None)
        if isinstance(active, list) and isinstance(disabled, bool):  # of a whole model they are methods
            scaling = getattr(part, "scaling", None)
            found.append((*active, disabled, *(scaling.items() if isinstance(scaling, dict) else ())))
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------------------
# Whether two results are the same computation, done in another batch.
# ----------------------------------------------------------------------------------------------------------------------


#: How far numbers of the same computation in another batch may be from each other, of the largest of them.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}

#: How many numbers are compared at once.
_COMPARED = 2**22


def close(found: Tensor, right: Tensor) -> bool:
    """Whether two results are the same but for the rounding of another batch.

    Args:
        found: the one.
        right: the other.
    """
    least, most = (float(x) for x in right.detach().aminmax())
    tolerance = ROUNDING.get(right.dtype, 10 * torch.finfo(right.dtype).eps) * max(-least, most)
    if found.shape != right.shape:
        return False
    # A part after the other: to compare takes several times the memory of what is compared.
    axis = min(1, right.ndim - 1)
    width = max(1, _COMPARED * right.shape[axis] // right.numel()) if axis >= 0 else 1
    parts = [(found, right)] if axis < 0 else zip(found.split(width, axis), right.split(width, axis), strict=True)
    return all(torch.allclose(one, other, rtol=0, atol=tolerance) for one, other in parts)
