"""Attention kernels that are no torch functions (flash attention, flex attention, kernels of the hub).

transformers looks them up by name in `AttentionInterface`. While a module's scores, pattern, or rotated queries and
keys are watched, the entry of the implementation that it was loaded with is replaced by one that asks the watch first;
what the model sees of itself stays as it is. `sdpa` and eager attention need none of this: they call torch functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bridge.taps.attention_call import AttentionCall

#: What stands before a kernel: it is given the call, and what runs the kernel on queries and keys.
BeforeKernel = Callable[[AttentionCall, Callable[[Tensor, Tensor], Tensor]], Tensor]

_LOCK = threading.RLock()
#: The module that is watched in this context, and what stands before its kernel.
_WATCHED: ContextVar[tuple[nn.Module, BeforeKernel] | None] = ContextVar("transformer_bridge_kernel", default=None)


def needs_interface(implementation: str | None) -> bool:
    """Whether an attention implementation can only be reached by name: its mask and its options are known."""
    return bool(implementation) and ("flash" in str(implementation) or implementation == "flex_attention")


class KernelTap:
    """Stands before the kernel of one module's attention inside a ``with`` statement.

    Args:
        module: the attention module.
        before: what stands before it.
    """

    def __init__(self, module: nn.Module, before: BeforeKernel) -> None:
        self._watched = (module, before)
        # Straight from its dictionary: a configuration's own attribute access takes microseconds.
        config = module.__dict__.get("config")
        fields = {} if config is None else object.__getattribute__(config, "__dict__")
        self._implementation: str | None = fields.get("_attn_implementation_internal")
        self._token: Token[tuple[nn.Module, BeforeKernel] | None] | None = None

    def __enter__(self) -> None:
        if needs_interface(self._implementation):
            assert self._implementation is not None
            self._token = _WATCHED.set(self._watched)
            with _LOCK:
                entry = ALL_ATTENTION_FUNCTIONS[self._implementation]
                if not isinstance(entry, _Entry):
                    entry = _Entry(self._implementation, entry)
                    ALL_ATTENTION_FUNCTIONS[self._implementation] = entry
                entry.users += 1

    def __exit__(self, *exc: object) -> None:
        if self._token is None:
            return
        _WATCHED.reset(self._token)
        assert self._implementation is not None
        with _LOCK:
            entry = ALL_ATTENTION_FUNCTIONS[self._implementation]
            if isinstance(entry, _Entry):
                entry.users -= 1
                if not entry.users:
                    entry.leave()


class _Entry:
    """Stands in for one implementation in `AttentionInterface`.

    Args:
        name: of the implementation.
        own: its function.
    """

    def __init__(self, name: str, own: Callable[..., Any]) -> None:
        self._name, self._own = name, own
        self._was_local = name in ALL_ATTENTION_FUNCTIONS._local_mapping
        self.users = 0

    def leave(self) -> None:
        """Puts back what was there."""
        if self._was_local:
            ALL_ATTENTION_FUNCTIONS[self._name] = self._own
        else:
            del ALL_ATTENTION_FUNCTIONS[self._name]

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        watched = _WATCHED.get()
        if watched is None or watched[0] is not module:
            return self._own(module, query, key, value, attention_mask, **options)
        before = watched[1]
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
        z = before(call, run)
        return z.transpose(1, 2).contiguous(), weights[0]
