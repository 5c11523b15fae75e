"""Refusing arguments of wrong types at the public edge, by name and in words, before anything runs."""

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
    """A function that looks at its arguments first, as its annotations say what they may be.

    A tensor has to be of the annotated kind of numbers and number of axes. Truth values are no numbers, and a string is
    no sequence of strings, unless the annotation names them. Numbers and arrays of NumPy are taken for Python's. What
    answers to `hook_dict` is a model, whatever its class: other people's hold one, and forward what they lack.

    Args:
        function: with annotations for all its parameters.

    Returns:
        The function; it raises a `TypeError` that names the argument, what was given and what would work.

    Example:
        >>> from bridge.hooks.arguments import refuse_wrong_types
        >>> @refuse_wrong_types
        ... def double(n: int) -> int:
        ...     return 2 * n
        >>> double("2")
        Traceback (most recent call last):
        TypeError: n is '2'; double takes int there
    """
    parameters = inspect.signature(function).parameters.values()
    in_turn = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))

    # That there are too many, or one too few, Python says.
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
    """A parameter whose arguments are looked at.

    Args:
        function: what the function is called, for the error.
        name: of the parameter.
        hint: its annotation.
        words: how that is written.
    """

    __slots__ = ("_fitting", "_function", "_members", "_name", "_words")

    def __init__(self, function: str, name: str, hint: Any, words: str) -> None:
        self._function, self._name, self._words = function, name, words
        self._members = tuple(_members(hint))
        #: Of arguments that fitted, all that annotations ask about them.
        self._fitting: set[object] = set()

    def check(self, value: object) -> None:
        """Refuses what the annotation does not allow.

        Raises:
            TypeError: it does not.
        """
        kind = type(value)
        if isinstance(value, Tensor):
            asked: object = (value.dtype, value.shape) if kind is Tensor else None
        else:
            asked = kind if kind in _ALIKE else None
        if asked is not None and asked in self._fitting:
            return
        if not any(_fits(value, part) for part in self._members):
            tokens, other = (any(_fits(x, part) for part in self._members) for x in (_TOKENS, _TOKENS.float()))
            text = isinstance(value, str) or (isinstance(value, list | tuple) and isinstance((*value, 0)[0], str))
            hint = "; bridge.to_tokens makes tokens of text" if text and tokens and not other else ""
            raise TypeError(f"{self._name} is {shown(value)}; {self._function} takes {self._words} there{hint}")
        if asked is not None:
            if len(self._fitting) > 1000:
                self._fitting.clear()
            self._fitting.add(asked)


#: How many elements of a container are looked at: a run may be given thousands.
_LOOKED_AT = 8
#: Tokens, to ask whether they would have been taken where text was not.
_TOKENS = torch.zeros(1, 1, dtype=torch.long)
#: What an annotation of a model has, and every model.
_OF_MODELS = "hook_dict"
#: Types whose values are all the same to an annotation.
_ALIKE = frozenset({type(None), bool, int, float, str})


def check_types(function: str, given: Mapping[str, object], hints: Mapping[str, Any]) -> None:
    """Refuses arguments that are not what annotations say.

    Args:
        function: what it is called, for the error.
        given: the arguments, by name; those without an annotation are not looked at.
        hints: the annotations.

    Raises:
        TypeError: one is not.
    """
    for name, value in given.items():
        if name in hints:
            wanted = getattr(hints[name], "__name__", str(hints[name]))
            _Parameter(function, name, hints[name], wanted).check(value)


@functools.cache
def _parameters(function: Callable[..., object]) -> dict[str, _Parameter]:
    """The parameters that are looked at."""
    hints = typing.get_type_hints(function)
    called = function.__qualname__.removesuffix(".__init__")
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    looked_at = [p for p in inspect.signature(function).parameters.values() if p.kind not in several]
    return {p.name: _Parameter(called, p.name, hints[p.name], str(p.annotation)) for p in looked_at if p.name in hints}


def _members(hint: Any) -> Iterator[Any]:
    """The members of a union, or the hint itself."""
    alias = typing.get_origin(hint) or hint
    if hasattr(alias, "__value__"):  # Python 3.12's `type` statement, by which NumPy 2.5 says what `NDArray` is
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
    if typing.get_origin(part) is typing.Literal:  # which of them there are, is the function's to say
        return type(value) in {type(known) for known in typing.get_args(part)}
    if isinstance(value, bool):
        return part is bool
    if part is int or part is float:
        return isinstance(value, numbers.Integral if part is int else numbers.Real)
    origin = typing.get_origin(part)
    if isinstance(value, str) and origin is not None:
        return False  # a sequence of strings is none
    if hasattr(value, "__array__") and inspect.isclass(origin):  # a tensor, or an array of NumPy
        scalar, kind = (not value.ndim, Tensor) if isinstance(value, Tensor) else (False, list)
        return not scalar and (isinstance(value, origin) or issubclass(kind, origin))
    if origin is not None:
        return _holds(value, origin, typing.get_args(part))
    with jaxtyped("context"):  # the axes of a caller's function, of whatever size, are not ours
        return isinstance(value, part)


def _answers_to(value: object, part: Any) -> bool:
    """Whether a value is a model, where a class of models is annotated, or has a public member of a protocol."""
    if hasattr(part, _OF_MODELS):
        return hasattr(value, _OF_MODELS)  # what else it lacks is an error when it is missed
    members = set(vars(part)) | set(getattr(part, "__annotations__", ()))
    # Without computing any: a property may cost much, or say that there is none.
    own = getattr(value, "__dict__", ())
    return any(name in own or hasattr(type(value), name) for name in members if name[0] != "_")


def _holds(value: object, origin: Any, inside: tuple[Any, ...]) -> bool:
    """Whether a value is a container of a kind, whose first elements are what they should be.

    Args:
        value: the argument.
        origin: the annotation without what is in its brackets.
        inside: what is.
    """
    if origin is type:
        return isinstance(value, type) and all(each is Any or issubclass(value, each) for each in inside)
    if not isinstance(value, origin):
        return False
    if not inside or not isinstance(value, Collection):
        return True  # what can be gone through only once is not looked into
    if isinstance(value, tuple) and origin is tuple and inside[-1] is not Ellipsis:
        return len(value) == len(inside) and all(map(_is_one_of, value, inside))
    if not all(_is_one_of(each, inside[0]) for each in islice(value, _LOOKED_AT)):
        return False
    # What other mappings hold may be computed when it is asked for.
    return type(value) is not dict or all(_is_one_of(each, inside[-1]) for each in islice(value.values(), _LOOKED_AT))


def _is_one_of(value: object, hint: Any) -> bool:
    return any(_fits(value, part) for part in _members(hint))


def check_choice(name: str, value: object, choices: Iterable[object], error: type[ValueError] = ValueError) -> None:
    """Refuses what is none of two or more choices.

    Args:
        name: the argument's.
        value: the argument.
        choices: what it may be.
        error: what is raised.

    Raises:
        ValueError: it is none of them.

    Example:
        >>> from bridge.hooks.arguments import check_choice
        >>> check_choice("mode", "O", ("Q", "K", "V"))
        Traceback (most recent call last):
        ValueError: mode is 'O'; it must be 'Q', 'K' or 'V'
    """
    known = tuple(choices)
    if value not in known:
        *others, last = map(repr, known)
        raise error(f"{name} is {value!r}; it must be {', '.join(others)} or {last}")


def check_positive(name: str, value: float) -> None:
    """Refuses a number of things that is less than one.

    Args:
        name: the argument's.
        value: the argument.

    Raises:
        ValueError: it is.
    """
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be 1 or more")


def listed(names: Sequence[str], most: int = 3) -> str:
    """Some names in a sentence, and how many there are besides.

    Args:
        names: the names.
        most: so many are said.

    Example:
        >>> from bridge.hooks.arguments import listed
        >>> listed(["q", "k", "v", "z"])
        'q, k, v and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shown(value: object) -> str:
    """What an argument is, in a few words.

    Args:
        value: the argument.

    Example:
        >>> import torch
        >>> from bridge.hooks.arguments import shown
        >>> shown(torch.zeros(2, 3))
        'a tensor [2, 3] of torch.float32'
    """
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ----------------------------------------------------------------------------------------------------------------------
# Shapes of activations in a model's own sizes.
# ----------------------------------------------------------------------------------------------------------------------


def shape_text(cfg: ModelConfig, axes: str) -> str:
    """The axes of a hook point with the model's sizes where they are fixed.

    Args:
        cfg: the facts about the model.
        axes: such as ``batch pos n_heads d_head``.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.hooks.arguments import shape_text
        >>> shape_text(TransformerBridge.boot_embedded().cfg, "batch pos n_heads d_head")
        '[batch, pos, 4, 32]'
    """
    sizes = [(axis, size_of(cfg, axis)) for axis in axes.split()]
    return f"[{', '.join(axis if size is None else str(size) for axis, size in sizes)}]"


def size_of(cfg: ModelConfig, axis: str) -> int | None:
    """The size of an axis; None where the model does not fix it.

    Args:
        cfg: the facts about the model.
        axis: such as ``n_heads``.
    """
    known = {"n_key_value_heads": cfg.n_kv_heads, "n_experts": cfg.num_experts}
    value = known.get(axis, getattr(cfg, axis, None) if not axis.isdigit() else int(axis))
    return value if isinstance(value, int) else None


def heads_shown(cfg: ModelConfig, axes: str) -> int:
    """How many query heads an activation shows: some models have more in one layer than in another.

    Args:
        cfg: the facts about the model.
        axes: of a layer's ``hook_z``, or of its ``hook_pattern``.
    """
    names = axes.split()
    return size_of(cfg, names[1] if names[-1] == "key_pos" else names[-2]) or cfg.n_heads


class CannotBeDoneError(ValueError, AssertionError):
    """What was asked for cannot be done. HookedTransformer gives an `AssertionError` there."""


def without_batch_axis(x: Tensor, name: str) -> Tensor:
    """An activation of one prompt without its first axis.

    Raises:
        CannotBeDoneError: it is of several.
    """
    if x.shape[0] != 1:
        raise CannotBeDoneError(f"cannot remove a batch axis of {x.shape[0]}: {name} has {list(x.shape)}")
    return x[0]
