"""Attention functions that transformers looks up by name in `AttentionInterface`.

While a module's scores, pattern, or rotated queries and keys are watched, the entry of the implementation that it was
loaded with is replaced by one that asks the watch first; what the model sees of itself stays as it is. Where the
function calls torch functions (sdpa, a user's own), they are watched; of kernels that are none (flash, flex), the
arguments say everything.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bridge.taps.attention_call import AttentionCall

#: What stands before a kernel: it is given the call, and what runs the kernel on queries and keys.
BeforeKernel = Callable[[AttentionCall, Callable[[Tensor, Tensor], Tensor]], Tensor]


class _Watched(NamedTuple):
    """A module whose attention function is watched."""

    module: nn.Module
    watch: TorchFunctionMode
    before: BeforeKernel


_LOCK = threading.RLock()
#: What is watched in this context.
_WATCHED: ContextVar[_Watched | None] = ContextVar("transformer_bridge_kernel", default=None)


def implementation_of(module: nn.Module) -> str | None:
    """The attention implementation that a module was loaded with."""
    # Straight from its dictionary: a configuration's own attribute access takes microseconds.
    config = module.__dict__.get("config")
    if config is None:
        return None
    implementation: str | None = object.__getattribute__(config, "__dict__").get("_attn_implementation_internal")
    return implementation


@functools.cache
def is_looked_up(forward: Callable[..., object], implementation: str | None) -> bool:
    """Whether the forward of a class of modules finds the function of an implementation in `AttentionInterface`."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    names: tuple[str, ...] = () if code is None else code.co_names
    return "ALL_ATTENTION_FUNCTIONS" in names and implementation not in (None, "eager")


def is_opaque(implementation: str) -> bool:
    """Whether an implementation is no torch function, so that only its arguments can be seen: its mask is known."""
    return "flash" in implementation or implementation == "flex_attention"


class KernelTap:
    """Watches the attention function of one module inside ``with`` statements.

    The entry that stands in for the function in `AttentionInterface` is there as long as anything holds on to it, so
    that it is not made anew for each call.
    """

    def __init__(self) -> None:
        self._entry: _Entry | None = None

    def stand(self, implementation: str | None) -> None:
        """Sees to it that an implementation can be watched."""
        assert implementation is not None
        if self._entry is ALL_ATTENTION_FUNCTIONS[implementation]:
            return
        with _LOCK:
            there = ALL_ATTENTION_FUNCTIONS[implementation]
            if self._entry is there:
                return  # another thread was quicker
            self.leave()
            self._entry = there if isinstance(there, _Entry) else _Entry(implementation)
            self._entry.users += 1
            ALL_ATTENTION_FUNCTIONS[implementation] = self._entry

    def leave(self) -> None:
        """Lets go of it."""
        with _LOCK:
            entry, self._entry = self._entry, None
            if entry is not None:
                entry.users -= 1
                if not entry.users:
                    entry.leave()


@contextmanager
def watched_kernel(module: nn.Module, watch: TorchFunctionMode, before: BeforeKernel) -> Iterator[None]:
    """Watches the attention function of a module whose `KernelTap` stands.

    Args:
        module: the attention module.
        watch: sees the torch functions that it calls.
        before: stands before it, where it is no torch function.
    """
    token = _WATCHED.set(_Watched(module, watch, before))
    try:
        yield
    finally:
        _WATCHED.reset(token)


class _Entry:
    """Stands in for one implementation in `AttentionInterface`.

    Args:
        name: of the implementation.

    Attributes:
        users: how many taps need it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        #: The function, where it was put into this mapping alone; others are registered for all, also later.
        self._local = ALL_ATTENTION_FUNCTIONS._local_mapping.get(name)
        self.users = 0

    def _own(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        function = self._local or ALL_ATTENTION_FUNCTIONS._global_mapping[self._name]
        output: tuple[Tensor, Tensor | None] = function(*args, **options)
        return output

    def leave(self) -> None:
        """Puts back what was there, unless somebody put something else in its place meanwhile."""
        if ALL_ATTENTION_FUNCTIONS[self._name] is not self:
            return
        if self._local is not None:
            ALL_ATTENTION_FUNCTIONS[self._name] = self._local
        else:
            del ALL_ATTENTION_FUNCTIONS[self._name]

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        watched = _WATCHED.get()
        if watched is None or watched.module is not module:
            return self._own(module, query, key, value, attention_mask, **options)
        if not is_opaque(self._name):
            with watched.watch:
                return self._own(module, query, key, value, attention_mask, **options)
        weights: list[Tensor | None] = [None]

        def run(query: Tensor, key: Tensor) -> Tensor:
            output, weights[0] = self._own(module, query, key, value, attention_mask, **options)
            return output.transpose(1, 2)

        known = {"is_causal": getattr(module, "is_causal", True)} | {
            name: given for name, given in options.items() if given is not None
        }
        call = AttentionCall(
            query,
            key,
            value,
            attention_mask,
            query.shape[1],
            scale=options.get("scaling"),
            dropout=options.get("dropout") or 0.0,
            kernel=self._name,
            options=known,
        )
        z = watched.before(call, run)
        return z.transpose(1, 2).contiguous(), weights[0]
