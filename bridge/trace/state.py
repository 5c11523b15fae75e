"""What torch keeps for each thread, kept apart for the two sides of a trace, which take turns on one thread.

These are grad mode, inference mode, autocast, modes that see torch functions or dispatched operators, and hooks on what
autograd saves. Context variables need nothing of the kind: a greenlet has its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch

#: Autocast on the CPU and on CUDA: whether it is on, and its type.
Autocast = tuple[bool, torch.dtype, bool, torch.dtype]
Packing = tuple[Callable[..., Any], Callable[..., Any]]


class TorchState(NamedTuple):
    """What torch keeps for a thread at one moment.

    Attributes:
        grad, inference: grad mode, inference mode.
        autocast: see `Autocast`.
        autocast_cache: whether autocast keeps what it converted.
        functions, operators: the modes that see torch functions, and dispatched operators, the innermost last.
        saved: the hooks on what autograd saves, the innermost last.
    """

    grad: bool
    inference: bool
    autocast: Autocast
    autocast_cache: bool
    functions: tuple[TorchFunctionMode, ...]
    operators: tuple[Any, ...]
    saved: tuple[Packing, ...]

    @classmethod
    def now(cls) -> TorchState:
        """As it is."""
        n_functions, autocast = _n_functions(), _any_autocast()
        # In one piece: this is done at every turn.
        return tuple.__new__(
            cls,
            (
                _grad(),
                _inference(),
                (
                    autocast and torch.is_autocast_enabled("cpu"),
                    _autocast_type("cpu"),
                    autocast and torch.is_autocast_enabled("cuda"),
                    _autocast_type("cuda"),
                ),
                _autocast_cache(),
                tuple([torch._C._get_function_stack_at(i) for i in range(n_functions)]) if n_functions else (),
                tuple(dispatch._get_current_dispatch_mode_stack()) if _n_operators() else (),
                _packing_hooks() if _packing(False) is not None else (),
            ),
        )


# By their own names: several attributes on the way to each would take longer than the functions.
_grad, _inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_any_autocast, _autocast_type = torch._C._is_any_autocast_enabled, torch.get_autocast_dtype
_autocast_cache = torch.is_autocast_cache_enabled
_n_functions, _n_operators = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_packing = torch._C._autograd._top_saved_tensors_default_hooks


class Switchboard:
    """Exchanges the state of the two sides when they take turns and it is not the same.

    Attributes:
        guard: what keeps one side in another inference mode, which has to be ended at the next turn; None: nothing.
    """

    def __init__(self) -> None:
        self.guard: Any = None  # of torch's own class for inference mode

    def exchange(self, now: TorchState, wanted: TorchState, last: bool = False) -> None:
        """Puts one side's state in the place of the other's.

        Args:
            now: the state of the side that waits from now on.
            wanted: the state of the side that goes on.
            last: there will be no further turn.
        """
        if self.guard is not None:
            # It was entered when the side that now goes on was left, and restores all that was there then.
            self.guard.__exit__(None, None, None)
            self.guard = None
            now = TorchState.now()
        if now == wanted:
            return
        _replace_modes(now, wanted)
        if now.inference != wanted.inference:
            self.guard = torch._C._InferenceMode(wanted.inference)
            self.guard.__enter__()
            if last:  # it must never be left: the side that stays leaves its own
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.guard))
                self.guard = None
        torch._C._set_grad_enabled(wanted.grad)
        if now.autocast != wanted.autocast or now.autocast_cache != wanted.autocast_cache:
            torch.clear_autocast_cache()
            on_cpu, cpu_type, on_cuda, cuda_type = wanted.autocast
            torch.set_autocast_enabled("cpu", on_cpu)
            torch.set_autocast_dtype("cpu", cpu_type)
            torch.set_autocast_enabled("cuda", on_cuda)
            torch.set_autocast_dtype("cuda", cuda_type)
            torch.set_autocast_cache_enabled(wanted.autocast_cache)


def _replace_modes(now: TorchState, wanted: TorchState) -> None:
    if now.functions != wanted.functions:
        for _ in now.functions:
            torch._C._pop_torch_function_stack()
        for mode in wanted.functions:
            torch._C._push_on_torch_function_stack(mode)
    if now.operators != wanted.operators:
        for mode in reversed(now.operators):
            dispatch._pop_mode(getattr(mode, "_mode_key", None))
        for mode in wanted.operators:
            dispatch._push_mode(mode)
    if now.saved != wanted.saved:
        for _ in now.saved:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for pack, unpack in wanted.saved:
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _packing_hooks() -> tuple[Packing, ...]:
    """All hooks on what autograd saves, which only shows the innermost."""
    found: list[Packing] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        found.insert(0, top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in found:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return tuple(found)
