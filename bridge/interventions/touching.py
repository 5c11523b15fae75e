"""`Touching`: a function of the user's that touches some heads and queries, so that no others are made for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bridge.hooks.arguments import check_positive, refuse_wrong_types
from bridge.hooks.context import HookFunction, Listener
from bridge.hooks.hooks import HookPoint, checked, checked_function
from bridge.hooks.parts import Part, Touched, TouchesPart, entries_of, picked, put_back, rows_within
from bridge.interventions.operations import Index, Kept, axis_of, kept_index


class Touching(TouchesPart):
    """A hook function that is shown, and may change, some heads and queries of an activation.

    Of scores and patterns only these are made: the other heads stay with the kernel that the model was loaded with, so
    that one head of a long prompt costs one head. (Where a model makes all by itself, as with ``"eager"``, or somebody
    else listens to the whole, they are taken from that. Who listens is asked once for each call of the attention.)
    Operations do the same by their ``heads=`` and ``positions=``.

    Args:
        function: called as ``function(activation, hook=point)`` with the chosen part, all axes there and entries in the
            model's order. It may return a new tensor of that shape, or change the given one in place, or neither.
        heads: a number, several, or a slice; from the end if negative; None: all.
        queries: the same along the positions, padding included.
        keys: the same along the keys of scores or a pattern. (Scores are made of all keys: a softmax needs them.)
        max_bytes: about how much memory scores and patterns may take at once: the function is called with some queries
            after the other, each time with as many as fit. (A run that records gradients keeps all of them.) None: it
            is called once.

    Raises:
        TypeError: `function` cannot be called with an activation and ``hook=``, or is an operation, or another one of
            these; an index is none.
        ValueError: no heads, queries, keys or bound are given: then the function itself is a hook.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.interventions import Touching
        >>> bridge = TransformerBridge.boot_embedded()
        >>> seen = []
        >>> look = Touching(lambda pattern, hook: seen.append(pattern.shape), heads=3, queries=slice(4, None))
        >>> with bridge.hooks(fwd_hooks=[("blocks.2.attn.hook_pattern", look)]):
        ...     _ = bridge("Mary and John went to the store")
        >>> seen
        [torch.Size([1, 1, 4, 8])]
    """

    @refuse_wrong_types
    def __init__(
        self,
        function: Callable[..., Any],
        *,
        heads: Index = None,
        queries: Index = None,
        keys: Index = None,
        max_bytes: int | None = None,
    ) -> None:
        if isinstance(function, TouchesPart):
            raise TypeError(
                f"the function is {function!r}, which would count heads and positions within the part that it is "
                "shown: give it as a hook itself; operations have heads=, positions= and keys= of their own"
            )
        self.function = function
        self.in_run: bool = getattr(function, "in_run", False) is True
        given: dict[str, Index] = {"heads": heads, "positions": queries, "keys": keys}
        self.chosen: dict[str, Kept] = {name: kept_index(name, x) for name, x in given.items() if x is not None}
        self.max_bytes = max_bytes
        if max_bytes is not None:
            check_positive("max_bytes", max_bytes)
        elif not self.chosen:
            raise ValueError("neither heads, queries, keys nor max_bytes is given: use the function itself as a hook")
        if (signature := _signature(function)) is not None:
            self.__signature__ = signature  # which inputs of a program it takes
        self.__name__ = getattr(function, "__name__", None) or repr(function)
        self._shown = Listener("fwd", function)

    def __repr__(self) -> str:
        given = [f"{'queries' if name == 'positions' else name}={index}" for name, index in self.chosen.items()]
        bound = [] if self.max_bytes is None else [f"max_bytes={self.max_bytes}"]
        return f"Touching({', '.join([self.__name__, *given, *bound])})"

    def check_point(self, hook: HookPoint) -> None:
        """Refuses a hook point that it does not fit.

        Args:
            hook: the hook point.

        Raises:
            ValueError: its activation has not the axes that are asked for.
        """
        for name in self.chosen if self.max_bytes is None else (*self.chosen, "keys"):
            axis_of(name, hook)
        checked_function(hook, self.function)

    def __call__(self, activation: Tensor, hook: HookPoint, **inputs: Tensor) -> Tensor | None:
        """The activation as the function makes it.

        Args:
            activation: all of it.
            hook: its hook point.
            inputs: what a program gives the function.

        Raises:
            IndexError: there is no such head, query or key.
        """
        return self._changed(activation, self._places(activation.shape, hook), hook, inputs)

    def touched(self, shape: tuple[int, int, int, int], hook: HookPoint) -> Touched:
        """Which heads and queries it touches."""
        places = self._places(shape, hook)
        heads, queries = (torch.zeros(shape[axis], dtype=torch.bool) for axis in (1, 2))
        heads[places.get(1, slice(None))] = True
        queries[places.get(2, slice(None))] = True
        return Touched(heads, queries, self.max_bytes)

    def within(self, part: Part, hook: HookPoint) -> HookFunction:
        """The same, of a part."""
        places = self._places(part.shape, hook)
        for axis, there in ((1, part.heads), (2, part.queries)):
            if axis in places:
                places[axis] = torch.isin(there, places[axis]).nonzero()[:, 0]

        def change(activation: Tensor, hook: HookPoint) -> Tensor | None:
            if not all(map(len, places.values())):
                return None  # another function touches these queries
            return self._changed(activation, places, hook, {})

        return change

    def _places(self, shape: tuple[int, ...], hook: HookPoint) -> dict[int, Tensor]:
        """Which entries it touches along the axes where it does not touch all."""
        found: dict[int, Tensor] = {}
        for name, index in self.chosen.items():
            axis = axis_of(name, hook)
            entries = entries_of("queries" if name == "positions" else name, index, shape[axis], hook.name)
            if len(once := sorted(set(entries))) < shape[axis]:
                found[axis] = torch.tensor(once)
        return found

    def _changed(
        self, activation: Tensor, places: dict[int, Tensor], hook: HookPoint, inputs: dict[str, Tensor]
    ) -> Tensor | None:
        if self.max_bytes is None:
            return self._piece(activation, places, hook, inputs)
        heads, queries = (places.get(axis, torch.arange(activation.shape[axis])) for axis in (1, 2))
        for piece in queries.split(rows_within(self.max_bytes, activation.shape, heads, activation.dtype)):
            made = self._piece(activation, places | {2: piece}, hook, inputs)
            activation = activation if made is None else made
        return activation

    def _piece(
        self, activation: Tensor, places: dict[int, Tensor], hook: HookPoint, inputs: dict[str, Tensor]
    ) -> Tensor | None:
        places = {axis: index for axis, index in places.items() if len(index) < activation.shape[axis]}
        own = picked(activation, places).clone() if places else activation
        new = self.function(own, hook=hook, **inputs)
        if new is None and not places:
            return None
        return put_back(activation, places, own if new is None else checked(new, own, self._shown, hook))


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a hook function; None where it has none.

    Raises:
        TypeError: it cannot be called with ``hook=``.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function of C without a signature
        return None
    try:
        signature.bind_partial(None, hook=None)
    except TypeError as error:
        raise TypeError(
            f"the function takes {signature}, but it is called as function(activation, hook=point): give it a second "
            "parameter named `hook`"
        ) from error
    return signature
