"""Checks of argument types in the public API, before anything runs."""

from __future__ import annotations

import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ParamSpec, TypeVar

import torch
from jaxtyping import jaxtyped
from torch import Tensor

from adapters.config import ModelConfig

P = ParamSpec("P")
T = TypeVar("T")


def refuse_wrong_types(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that first checks its arguments against its annotations.

    A tensor must have the annotated kind of dtype and number of axes. Booleans do not count as
    numbers, and a string is not a sequence, unless the annotation names them. NumPy numbers and
    arrays are accepted like Python's. An object with a `hook_dict` counts as a model, whatever its
    class: other libraries' wrappers hold one, and forward missing attributes to it.

    Args:
        function: a function with annotations for all its parameters.

    Returns:
        The function; it raises a `TypeError` that names the argument, what was given and what would
        work.

    Example:
        >>> from bridge.arguments import refuse_wrong_types
        >>> @refuse_wrong_types
        ... def double(n: int) -> int:
        ...     return 2 * n
        >>> double("2")
        Traceback (most recent call last):
        TypeError: n is '2'; double takes int there
    """
    parameters = inspect.signature(function).parameters.values()
    in_turn = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = frozenset(
        p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    )

    # Python itself reports too many arguments, or one missing.
    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        known = _parameters(function)
        for name, value in zip(in_turn, args, strict=False):
            if name in known:
                known[name].check(value)
        for name, value in kwargs.items():
            if name in known and name in by_name:
                known[name].check(value)
        return function(*args, **kwargs)

    return checked


class _Parameter:
    """A parameter whose arguments are checked.

    Args:
        function: the function's name, for the error.
        name: the parameter's name.
        hint: its annotation.
        words: the annotation as written in the source.
    """

    __slots__ = ("_fitting", "_function", "_members", "_name", "_words")

    def __init__(self, function: str, name: str, hint: Any, words: str) -> None:
        self._function = function
        self._name = name
        self._words = words
        self._members = tuple(_members(hint))
        #: The questions that annotations ask about arguments that passed all checks.
        self._fitting: set[object] = set()

    def check(self, value: object) -> None:
        """Reject a value that the annotation does not allow.

        Raises:
            TypeError: the annotation does not allow it.
        """
        kind = type(value)
        if isinstance(value, Tensor):
            question: object = (value.dtype, value.shape) if kind is Tensor else None
        else:
            question = kind if kind in _ALIKE else None
        if question is not None and question in self._fitting:
            return
        if not self._accepts(value):
            hint = "; bridge.to_tokens makes tokens of text" if self._needs_tokens(value) else ""
            raise TypeError(
                f"{self._name} is {shown(value)}; {self._function} takes {self._words} there{hint}"
            )
        if question is not None:
            if len(self._fitting) > 1000:
                self._fitting.clear()
            self._fitting.add(question)

    def _accepts(self, value: object) -> bool:
        return any(_fits(value, part) for part in self._members)

    def _needs_tokens(self, value: object) -> bool:
        """Tell whether a value is text although only token tensors are accepted."""
        if isinstance(value, list | tuple) and value:
            value = value[0]
        return (
            isinstance(value, str) and self._accepts(_TOKENS) and not self._accepts(_TOKENS.float())
        )


#: The number of a container's elements that are checked: a run may be given thousands.
_LOOKED_AT = 8
#: A stand-in for tokens, to check whether they would be accepted instead of text.
_TOKENS = torch.zeros(1, 1, dtype=torch.long, device="cpu")
#: The attributes that an annotation of a model requires, and that every model has.
_OF_MODELS = "hook_dict"
#: Types whose values an annotation does not distinguish.
_ALIKE = frozenset({type(None), bool, int, float, str})


def check_types(function: str, arguments: Mapping[str, object], hints: Mapping[str, Any]) -> None:
    """Reject arguments that do not match their annotations.

    Args:
        function: its name, for the error.
        arguments: by name; an argument without an annotation is not checked.
        hints: the annotations.

    Raises:
        TypeError: an argument does not match.
    """
    for name, value in arguments.items():
        if name in hints:
            hint = hints[name]
            words = getattr(hint, "__name__", str(hint))
            _Parameter(function, name, hint, words).check(value)


@functools.cache
def _parameters(function: Callable[..., object]) -> dict[str, _Parameter]:
    """Return the parameters that are checked."""
    hints = typing.get_type_hints(function)
    called = function.__qualname__.removesuffix(".__init__")
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        p.name: _Parameter(called, p.name, hints[p.name], str(p.annotation))
        for p in inspect.signature(function).parameters.values()
        if p.kind not in several and p.name in hints
    }


def _members(hint: Any) -> Iterator[Any]:
    """Return the members of a union, or the hint itself."""
    alias = typing.get_origin(hint) or hint
    # Python 3.12's `type` statement, by which NumPy 2.5 says what `NDArray` is.
    if hasattr(alias, "__value__"):
        yield from _members(alias.__value__)
    elif alias in (typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from _members(part)
    else:
        yield hint


def _fits(value: object, part: Any) -> bool:
    if part is Any or isinstance(part, TypeVar):
        return True
    if hasattr(part, _OF_MODELS) or (
        getattr(part, "_is_protocol", False) and not getattr(part, "_is_runtime_protocol", 0)
    ):
        return _answers_to(value, part)
    if typing.get_origin(part) is typing.Literal:  # the function itself checks the value
        return type(value) in {type(known) for known in typing.get_args(part)}
    if isinstance(value, bool):
        return part is bool
    if part is int or part is float:
        return isinstance(value, numbers.Integral if part is int else numbers.Real)
    origin = typing.get_origin(part)
    if isinstance(value, str) and origin is not None:
        return False  # a string is not a sequence of strings
    if hasattr(value, "__array__") and inspect.isclass(origin):  # a tensor, or a NumPy array
        scalar, kind = (not value.ndim, Tensor) if isinstance(value, Tensor) else (False, list)
        return not scalar and (isinstance(value, origin) or issubclass(kind, origin))
    if origin is not None:
        return _holds(value, origin, typing.get_args(part))
    with jaxtyped("context"):  # the axes of a caller's function have any size
        return isinstance(value, part)


def _answers_to(value: object, part: Any) -> bool:
    """Tell whether a value is a model, or has a public member of the annotated protocol."""
    if hasattr(part, _OF_MODELS):
        return hasattr(value, _OF_MODELS)  # other missing members raise an error on access
    members = set(vars(part)) | set(getattr(part, "__annotations__", ()))
    # Without evaluating properties: one may be slow, or raise.
    own = getattr(value, "__dict__", ())
    return any(name in own or hasattr(type(value), name) for name in members if name[0] != "_")


def _holds(value: object, origin: Any, inside: tuple[Any, ...]) -> bool:
    """Tell whether a value is a container of the annotated kind whose first elements have the right
    types.

    Args:
        value: the argument.
        origin: the annotation without its type arguments.
        inside: the type arguments.
    """
    if origin is type:
        return isinstance(value, type) and all(
            base is Any or issubclass(value, base) for base in inside
        )
    if not isinstance(value, origin):
        return False
    if not inside or not isinstance(value, Collection):
        return True  # do not consume iterators
    if isinstance(value, tuple) and origin is tuple and inside[-1] is not Ellipsis:
        return len(value) == len(inside) and all(map(_is_one_of, value, inside))
    if not all(_is_one_of(item, inside[0]) for item in islice(value, _LOOKED_AT)):
        return False
    # Other mappings may compute their values on access.
    return type(value) is not dict or all(
        _is_one_of(item, inside[-1]) for item in islice(value.values(), _LOOKED_AT)
    )


def _is_one_of(value: object, hint: Any) -> bool:
    return any(_fits(value, part) for part in _members(hint))


class TokenPositions:
    """An object that stands for positions of tokens, such as `Span` and `Spans`: accepted wherever
    several positions are.
    """

    @property
    def positions(self) -> list[int]:
        """Return the positions, in ascending order."""
        raise NotImplementedError


def positions_of(value: Any) -> Any:
    """Return the positions that a value stands for; any other value is returned unchanged.

    Args:
        value: an argument.

    Raises:
        ValueError: it stands for no position.
    """
    if not isinstance(value, TokenPositions):
        return value
    if not value.positions:
        raise ValueError(f"{shown(value)} has no tokens: choose other spans")
    return value.positions


def check_choice(
    name: str, value: object, choices: Iterable[object], error: type[ValueError] = ValueError
) -> None:
    """Reject a value that is not one of the choices.

    Args:
        name: the argument's name.
        value: the argument.
        choices: the allowed values.
        error: the class of the error.

    Raises:
        ValueError: it is none of them.

    Example:
        >>> from bridge.arguments import check_choice
        >>> check_choice("mode", "O", ("Q", "K", "V"))
        Traceback (most recent call last):
        ValueError: mode is 'O'; it must be 'Q', 'K' or 'V'
    """
    known = tuple(choices)
    if value not in known:
        *others, last = map(repr, known)
        raise error(f"{name} is {value!r}; it must be {', '.join(others)} or {last}")


def check_positive(name: str, value: float) -> None:
    """Reject a count below one.

    Args:
        name: the argument's name.
        value: the argument.

    Raises:
        ValueError: it is below one.
    """
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be 1 or more")


def listed(names: Sequence[str], most: int = 3) -> str:
    """Format some names as a list in words, with the number of omitted ones.

    Args:
        names: the names.
        most: the number of names to list.

    Example:
        >>> from bridge.arguments import listed
        >>> listed(["q", "k", "v", "z"])
        'q, k, v and 1 more'
    """
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def shown(value: object) -> str:
    """Describe an argument in a few words.

    Args:
        value: the argument.

    Example:
        >>> import torch
        >>> from bridge.arguments import shown
        >>> shown(torch.zeros(2, 3))
        'a tensor [2, 3] of torch.float32'
    """
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --------------------------------------------------------------------------------------------------
# Shapes of activations in the model's own sizes.
# --------------------------------------------------------------------------------------------------


def shape_text(cfg: ModelConfig, axes: str) -> str:
    """Return the axes of a hook point, with the sizes that the model fixes.

    Args:
        cfg: the facts about the model.
        axes: the axes, such as ``batch pos n_heads d_head``.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.arguments import shape_text
        >>> shape_text(TransformerBridge.boot_embedded().cfg, "batch pos n_heads d_head")
        '[batch, pos, 4, 32]'
    """
    sizes: list[str] = []
    for axis in axes.split():
        size = size_of(cfg, axis)
        sizes.append(axis if size is None else str(size))
    return f"[{', '.join(sizes)}]"


def size_of(cfg: ModelConfig, axis: str) -> int | None:
    """Return the size of an axis; None if the model does not fix it.

    Args:
        cfg: the facts about the model.
        axis: the axis, such as ``n_heads``.
    """
    known = {"n_key_value_heads": cfg.n_kv_heads, "n_experts": cfg.num_experts}
    value = known.get(axis, getattr(cfg, axis, None) if not axis.isdigit() else int(axis))
    return value if isinstance(value, int) else None


def heads_shown(cfg: ModelConfig, axes: str) -> int:
    """Return the number of query heads in an activation; it differs between layers in some models.

    Args:
        cfg: the facts about the model.
        axes: the axes of a layer's ``hook_z`` or ``hook_pattern``.
    """
    names = axes.split()
    return size_of(cfg, names[1] if names[-1] == "key_pos" else names[-2]) or cfg.n_heads


class CannotBeDoneError(ValueError, AssertionError):
    """An error for an impossible request, for which HookedTransformer raises an
    `AssertionError`."""


def without_batch_axis(x: Tensor, name: str) -> Tensor:
    """Return an activation of one prompt without its batch axis.

    Raises:
        CannotBeDoneError: the activation belongs to several prompts.
    """
    if x.shape[0] != 1:
        raise CannotBeDoneError(
            f"cannot remove a batch axis of {x.shape[0]}: {name} has {list(x.shape)}"
        )
    return x[0]
