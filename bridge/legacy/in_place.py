"""Calling a part, or a module of the user's, where the Hugging Face model calls its own module."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from adapters.views import Call, View
from bridge.hooks.modules import first_parameter
from bridge.legacy.kinds import AbstractAttention
from bridge.legacy.parts import Part
from bridge.legacy.point import CALLS
from bridge.taps.tap import Tap

#: What a call must not do twice: add keys and values to a cache.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class InPlace:
    """The forward of a Hugging Face module in whose place another module is called.

    The Hugging Face module stays where it is, with its torch hooks, weights and path.

    Args:
        part: the part that it plays.
        standing: what is called: the part itself, or a module of the user's, which may call the part.
        view: how what the module returns is seen as what the part makes.
    """

    def __init__(self, part: Part, standing: Callable[[], nn.Module], view: View) -> None:
        self.part, self.standing, self.module, self.view = part, standing, part.module, view
        own = self.module.__dict__.get("forward")
        if isinstance(own, Tap):  # which goes on to stand before it
            self.inner: Callable[..., Any] = own.original
            own.original = own.own = self
        else:
            self.inner = self.module.forward
            self.module.__dict__["forward"] = self

    # A copy of the model has its class's forward, until its own bridge puts another in its place.
    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self.module, "forward")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(type(self.module).forward, copy.deepcopy(self.module, memo))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = CALLS.get()
        if self.part in calls and calls[self.part] is None:  # the part is being called by itself
            return self.inner(*args, **kwargs)
        name = "" if args else first_parameter(type(self.module).forward)
        x, call, made = args[0] if args else kwargs[name], Call(self.module, args, kwargs), []

        def inner(given: Tensor) -> Tensor:
            made.append(self.inner(given, *args[1:], **kwargs) if args else self.inner(**{**kwargs, name: given}))
            return self.view.get(_first(made[-1]), call)

        token = CALLS.set({**calls, self.part: inner})
        try:
            if isinstance(self.part, AbstractAttention):
                out = self.standing()(
                    query_input=x, key_input=x, value_input=x, past_kv_cache_entry=None, attention_mask=None
                )
            else:
                out = self.standing()(x)
        finally:
            CALLS.reset(token)
        if not made:
            made.append(self._without(args, kwargs))
        out = self.view.put(_first(made[-1]), out, call)
        return out if isinstance(made[-1], Tensor) else type(made[-1])((out, *made[-1][1:]))

    @torch.no_grad()
    def _without(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns, where the user's module does not call it and knows nothing of what is beside the
        first tensor."""
        return self.inner(*args, **{key: value for key, value in kwargs.items() if key not in _CACHES})


def _first(made: Any) -> Tensor:
    return made if isinstance(made, Tensor) else made[0]  # type: ignore[no-any-return]
