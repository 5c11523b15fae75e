"""`Touching`: a user function for some heads and queries, so that only these are computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bridge.arguments import check_positive, refuse_wrong_types
from bridge.hooks.context import HookFunction, Listener
from bridge.hooks.hooks import HookPoint, checked, checked_function
from bridge.hooks.parts import Part, Touched, TouchesPart, entries_of, picked, put_back, rows_within
from bridge.interventions.operations import Index, Kept, axis_of, kept_index

#: Entries of an activation by axis, for axes of which not all are meant.
Places = dict[int, Tensor]


class Touching(TouchesPart):
    """A hook function that is shown, and may change, some heads and queries of an activation.

    Only these scores and patterns are computed. The other heads use the kernel that the model was
    loaded with, so that one head of a long prompt takes the time and memory of one head. (If the
    model itself computes all scores, as with ``"eager"``, or another listener needs all, the part
    is selected from these. Listeners are looked up once for each call of the attention.) Operations
    do the same with ``heads=`` and ``positions=``.

    Args:
        function: called as ``function(activation, hook=point)`` with the selected part, with all
            axes and with entries in the model's order. It may return a new tensor of that shape, or
            change the given one in place, or neither.
        heads: a number, several numbers, or a slice; negative numbers count from the end; None:
            all.
        queries: the same for query positions, counting padding.
        keys: the same for the keys of scores or a pattern. (Scores are computed for all keys,
            because the softmax needs them.)
        max_bytes: roughly how much memory scores and patterns may take: the function is called with
            one chunk of queries after the other, as large as fits. (A run that records gradients
            keeps all chunks.) None: it is called once.

    Raises:
        TypeError: `function` cannot be called with an activation and ``hook=``, is an operation, or
            is itself a `Touching`; or an index is invalid.
        ValueError: no heads, queries, keys or bound are given; use the function itself as a hook
            then.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.interventions import Touching
        >>> bridge = TransformerBridge.boot_embedded()
        >>> seen = []
        >>> look = Touching(
        ...     lambda pattern, hook: seen.append(pattern.shape), heads=3, queries=slice(4, None)
        ... )
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
                f"the function is {function!r}, which would count heads and positions within the"
                " part that it is shown: give it as a hook itself; operations have heads=,"
                " positions= and keys= of their own"
            )
        self.function = function
        self.in_run: bool = getattr(function, "in_run", False) is True
        indices: dict[str, Index] = {"heads": heads, "positions": queries, "keys": keys}
        self.chosen: dict[str, Kept] = {
            name: kept_index(name, index) for name, index in indices.items() if index is not None
        }
        self.max_bytes = max_bytes
        if max_bytes is not None:
            check_positive("max_bytes", max_bytes)
        elif not self.chosen:
            raise ValueError(
                "neither heads, queries, keys nor max_bytes is given: use the function itself as a"
                " hook"
            )
        signature = _signature(function)
        if signature is not None:
            self.__signature__ = signature  # the inputs of a program that it takes
        self.__name__ = getattr(function, "__name__", None) or repr(function)
        self._listener = Listener("fwd", function)

    def __repr__(self) -> str:
        shown = [f"{_parameter(name)}={index}" for name, index in self.chosen.items()]
        if self.max_bytes is not None:
            shown.append(f"max_bytes={self.max_bytes}")
        return f"Touching({', '.join([self.__name__, *shown])})"

    def check_point(self, hook: HookPoint) -> None:
        """Reject a hook point that the function does not fit.

        Args:
            hook: the hook point.

        Raises:
            ValueError: its activation lacks the required axes.
        """
        for name in self.chosen if self.max_bytes is None else (*self.chosen, "keys"):
            axis_of(name, hook)
        checked_function(hook, self.function)

    def __call__(self, activation: Tensor, hook: HookPoint, **inputs: Tensor) -> Tensor | None:
        """Return the activation, changed by the function.

        Args:
            activation: the whole activation.
            hook: its hook point.
            inputs: the program inputs that the function needs.

        Raises:
            IndexError: there is no such head, query or key.
        """
        return self._changed(activation, self._places(activation.shape, hook), hook, inputs)

    def touched(self, shape: tuple[int, int, int, int], hook: HookPoint) -> Touched:
        """Return the heads and queries that it touches."""
        places = self._places(shape, hook)
        heads = torch.zeros(shape[1], dtype=torch.bool, device="cpu")
        queries = torch.zeros(shape[2], dtype=torch.bool, device="cpu")
        heads[places.get(1, slice(None))] = True
        queries[places.get(2, slice(None))] = True
        return Touched(heads, queries, self.max_bytes)

    def within(self, part: Part, hook: HookPoint) -> HookFunction:
        """Return the function on a part."""
        places = self._places(part.shape, hook)
        for axis, entries in ((1, part.heads), (2, part.queries)):
            if axis in places:
                places[axis] = torch.isin(entries, places[axis]).nonzero()[:, 0]

        def change(activation: Tensor, hook: HookPoint) -> Tensor | None:
            if not all(map(len, places.values())):
                return None  # another function touches these queries
            return self._changed(activation, places, hook, {})

        return change

    def _places(self, shape: tuple[int, ...], hook: HookPoint) -> Places:
        """Return the touched entries along each axis on which it does not touch all."""
        places: Places = {}
        for name, index in self.chosen.items():
            axis = axis_of(name, hook)
            entries = set(entries_of(_parameter(name), index, shape[axis], hook.name))
            if len(entries) < shape[axis]:
                places[axis] = torch.tensor(sorted(entries), device="cpu")
        return places

    def _changed(
        self,
        activation: Tensor,
        places: Places,
        hook: HookPoint,
        inputs: dict[str, Tensor],
    ) -> Tensor | None:
        if self.max_bytes is None:
            return self._piece(activation, places, hook, inputs)
        shape = activation.shape
        heads = places.get(1, range(shape[1]))
        queries = places.get(2, torch.arange(shape[2], device="cpu"))
        rows = rows_within(self.max_bytes, shape, heads, activation.dtype)
        for piece in queries.split(rows):
            changed = self._piece(activation, places | {2: piece}, hook, inputs)
            activation = activation if changed is None else changed
        return activation

    def _piece(
        self,
        activation: Tensor,
        places: Places,
        hook: HookPoint,
        inputs: dict[str, Tensor],
    ) -> Tensor | None:
        shape = activation.shape
        places = {axis: index for axis, index in places.items() if len(index) < shape[axis]}
        shown = picked(activation, places).clone() if places else activation
        changed = self.function(shown, hook=hook, **inputs)
        if changed is not None:
            changed = checked(changed, shown, self._listener, hook)
        elif places:
            changed = shown  # it may have been changed in place
        else:
            return None
        return put_back(activation, places, changed)


def _parameter(field: str) -> str:
    """Return the parameter of `Touching` for a field of an operation."""
    return "queries" if field == "positions" else field


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a hook function; None if it has none.

    Raises:
        TypeError: it cannot be called with ``hook=``.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a C function without a signature
        return None
    try:
        signature.bind_partial(None, hook=None)
    except TypeError as error:
        raise TypeError(
            f"the function takes {signature}, but it is called as function(activation, hook=point):"
            " give it a second parameter named `hook`"
        ) from error
    return signature
