"""Attention functions that transformers looks up by name in `AttentionInterface`.

While a module's scores, pattern, or rotated queries and keys are watched, the entry of the implementation that it was
loaded with is replaced by one that asks the watch first; what the model sees of itself stays as it is. Where the
function calls torch functions (sdpa, a user's own), they are watched; of kernels that are none (flash, flex), the
arguments say everything.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adapters.views import Args, Kwargs
from bridge.taps.attention_call import AttentionCall
from bridge.taps.patched_functions import LOCK, PatchedFunction, calling_instead

#: What is called before a kernel: it is given the call, and what runs the kernel on queries and keys.
BeforeKernel = Callable[[AttentionCall, Callable[[Tensor, Tensor], Tensor]], Tensor]


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
    """Whether the forward of a class of modules finds the function of an implementation in `AttentionInterface`.

    Not where it looks in one of its own (Doge).
    """
    function = inspect.unwrap(forward)
    code = getattr(function, "__code__", None)
    names: tuple[str, ...] = () if code is None else code.co_names
    looks = "ALL_ATTENTION_FUNCTIONS" in names and implementation not in (None, "eager")
    found = getattr(function, "__globals__", {}).get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return looks and found is ALL_ATTENTION_FUNCTIONS


def is_opaque(implementation: str) -> bool:
    """Whether an implementation is no torch function, so that only its arguments can be seen: its mask is known."""
    return "flash" in implementation or implementation == "flex_attention"


class _Kernel(PatchedFunction):
    """Patches one implementation in `AttentionInterface`, which looks at its own entries and at those for all."""

    def __init__(self, namespace: MutableMapping[str, Any], name: str) -> None:
        super().__init__(namespace, name)
        self._local = ALL_ATTENTION_FUNCTIONS._local_mapping.get(name)

    @property
    def own(self) -> Callable[..., Any]:
        """The function; one that is registered for all may be registered anew at any time."""
        return self._local or ALL_ATTENTION_FUNCTIONS._global_mapping[self.name]

    def restore(self) -> None:
        """Puts back the entry of its own, if there was one."""
        if self._local is None:
            del self.namespace[self.name]
        else:
            self.namespace[self.name] = self._local


class KernelTap:
    """Sees to it that the attention function of a module can be watched.

    The patched function is there as long as anything holds on to it, so that it is not made anew for each
    call.
    """

    def __init__(self) -> None:
        self._kernel: _Kernel | None = None
        self._uninstall: Callable[[], object] = lambda: None

    def install(self, implementation: str) -> None:
        """Patches an implementation."""
        if self._kernel is ALL_ATTENTION_FUNCTIONS[implementation]:
            return
        with LOCK:
            if self._kernel is ALL_ATTENTION_FUNCTIONS[implementation]:
                return  # another thread was quicker
            self.uninstall()
            self._kernel = _Kernel.install(ALL_ATTENTION_FUNCTIONS, implementation)
            self._uninstall = self._kernel.uninstalled_with(self)

    def uninstall(self) -> None:
        """Lets go of it."""
        if self._kernel is not None:
            with LOCK:
                self._kernel = None
                self._uninstall()


def watched_kernel(module: nn.Module, watch: TorchFunctionMode, before: BeforeKernel) -> AbstractContextManager[None]:
    """Watches the attention function of a module whose `KernelTap` stands, inside a ``with`` statement.

    Args:
        module: the attention module.
        watch: sees the torch functions that it calls.
        before: called before it, where it is no torch function.
    """

    def instead(own: Callable[..., Any], name: str, args: Args, options: Kwargs) -> object:
        if args[0] is not module:
            return own(*args, **options)
        if not is_opaque(name):
            with watch:
                return own(*args, **options)
        return _before_opaque(own, name, before, *args, **options)

    return calling_instead(instead)


def _before_opaque(
    own: Callable[..., Any],
    name: str,
    before: BeforeKernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Calls a kernel of which only the arguments can be seen."""
    weights: list[Tensor | None] = [None]

    def run(query: Tensor, key: Tensor) -> Tensor:
        output, weights[0] = own(module, query, key, value, attention_mask, **options)
        result: Tensor = output.transpose(1, 2)
        return result

    known = {"is_causal": getattr(module, "is_causal", True)} | {
        option: given for option, given in options.items() if given is not None
    }
    call = AttentionCall(
        query,
        key,
        value,
        attention_mask,
        query.shape[1],
        scale=options.get("scaling"),
        dropout=options.get("dropout") or 0.0,
        kernel=name,
        options=known,
    )
    z = before(call, run)
    return z.transpose(1, 2).contiguous(), weights[0]
