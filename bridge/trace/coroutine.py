"""Coroutines on one thread: the body of a ``with`` statement, and a forward pass in a greenlet."""

from __future__ import annotations

import contextvars
import ctypes
import linecache
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch
from transformers.utils import ModelOutput

from adapters.views.values import Fingerprint, fingerprint, is_readable, same_bits
from bridge.hooks.context import Listener
from bridge.hooks.hooks import HookPoint, checked, version_of
from bridge.hooks.recomputation import Packing, packing_hooks

# --------------------------------------------------------------------------------------------------
# The thread-local state of torch, kept apart for the two sides of a trace, which take turns on one
# thread.
#
# It consists of grad mode, inference mode, autocast, modes that see torch functions or dispatched
# operators, and saved-tensor hooks of autograd. Context variables need no handling: each greenlet
# has its own.
# --------------------------------------------------------------------------------------------------


#: Autocast on the CPU and on CUDA: whether it is on, and its dtype.
Autocast = tuple[bool, torch.dtype, bool, torch.dtype]


class _TorchState(NamedTuple):
    """The thread-local state of torch at one moment.

    Attributes:
        grad, inference: grad mode, inference mode.
        autocast: see `Autocast`.
        autocast_cache: whether autocast caches converted weights. functions, operators: the active
            modes for torch functions and for dispatched operators, innermost last.
        saved: the saved-tensor hooks of autograd, innermost last.
    """

    grad: bool
    inference: bool
    autocast: Autocast
    autocast_cache: bool
    functions: tuple[TorchFunctionMode, ...]
    operators: tuple[Any, ...]
    saved: tuple[Packing, ...]

    @classmethod
    def now(cls) -> _TorchState:
        """Return the present state."""
        n_functions, autocast = _n_functions(), _any_autocast()
        # Built in one call because this is a hot path.
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
                (
                    tuple([torch._C._get_function_stack_at(i) for i in range(n_functions)])
                    if n_functions
                    else ()
                ),
                tuple(dispatch._get_current_dispatch_mode_stack()) if _n_operators() else (),
                packing_hooks() if _packing(False) is not None else (),
            ),
        )


# Imported names: attribute lookups would take longer than the functions themselves.
_grad, _inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_any_autocast, _autocast_type = torch._C._is_any_autocast_enabled, torch.get_autocast_dtype
_autocast_cache = torch.is_autocast_cache_enabled
_n_functions, _n_operators = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_packing = torch._C._autograd._top_saved_tensors_default_hooks


def exchange(now: _TorchState, target: _TorchState, guard: Any, last: bool = False) -> Any:
    """Replace the current thread state by the other side's, where they differ.

    Args:
        now: the state of the side that will wait.
        target: the state of the side that will continue.
        guard: the result of the previous call.
        last: whether this is the last turn.

    Returns:
        A guard (of a class of torch's) that sets the side's inference mode and has to be ended at
        the next turn; None if the modes agree.
    """
    if guard is not None:
        # It was entered when the other side paused, and would restore the state of that moment.
        guard.__exit__(None, None, None)
        guard, now = None, _TorchState.now()
    if now == target:
        return None
    _replace_modes(now, target)
    if now.inference != target.inference:
        guard = torch._C._InferenceMode(target.inference)
        guard.__enter__()
        if last:  # Leak the guard on purpose; the surviving side exits its own.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(guard))
            guard = None
    torch._C._set_grad_enabled(target.grad)
    if now.autocast != target.autocast or now.autocast_cache != target.autocast_cache:
        torch.clear_autocast_cache()
        on_cpu, cpu_type, on_cuda, cuda_type = target.autocast
        torch.set_autocast_enabled("cpu", on_cpu)
        torch.set_autocast_dtype("cpu", cpu_type)
        torch.set_autocast_enabled("cuda", on_cuda)
        torch.set_autocast_dtype("cuda", cuda_type)
        torch.set_autocast_cache_enabled(target.autocast_cache)
    return guard


def _replace_modes(now: _TorchState, target: _TorchState) -> None:
    if now.functions != target.functions:
        for _ in now.functions:
            torch._C._pop_torch_function_stack()
        for mode in target.functions:
            torch._C._push_on_torch_function_stack(mode)
    if now.operators != target.operators:
        for mode in reversed(now.operators):
            dispatch._pop_mode(getattr(mode, "_mode_key", None))
        for mode in target.operators:
            dispatch._push_mode(mode)
    if now.saved != target.saved:
        for _ in now.saved:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for pack, unpack in target.saved:
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


T = TypeVar("T")


class _AbandonForward(BaseException):
    """An exception that unwinds an abandoned forward pass. It never leaves its greenlet."""


#: The number of frames that a reused greenlet may have less than a new one before the recursion
#: limit.
_FEWER_FRAMES = 50


class _Worker(NamedTuple):
    """A greenlet that does one piece of work after another.

    Attributes:
        greenlet: the greenlet.
        next_work: the list in which it finds its work.
        depth: the number of calls permanently below it on the stack: those in which its first piece
            of work began.
    """

    greenlet: greenlet
    next_work: list[Callable[[], None]]
    depth: int

    @classmethod
    def new(cls) -> _Worker:
        """Return a worker that has not begun."""
        frame, depth = sys._getframe(), 0
        while frame.f_back is not None:
            frame, depth = frame.f_back, depth + 1
        next_work: list[Callable[[], None]] = []
        return cls(greenlet(partial(_serve, next_work)), next_work, depth)

    def has_room(self) -> bool:
        """Tell whether its work can nest nearly as many calls as in a new worker."""
        if self.depth > _FEWER_FRAMES:
            try:
                sys._getframe(self.depth - _FEWER_FRAMES)
            except ValueError:
                return False  # the present call is not that deep
        return True


#: Each thread's idle `worker`: a new one's stack needs memory pages from the system.
_IDLE = threading.local()


def _serve(next_work: list[Callable[[], None]]) -> None:
    """Run work in a greenlet until a piece of work raises, or nothing refers to the greenlet."""
    while True:
        next_work.pop()()
        back = getcurrent().parent
        assert back is not None
        back.switch()


class Coroutine:
    """A piece of work that can pause inside nested calls, and is resumed later.

    It runs in a copy of its creator's context, with the grad mode, autocast and modes of that
    moment. Changes of these on one side do not affect the other.

    Args:
        work: the work.

    Attributes:
        finished: whether the work has ended or was abandoned.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._thread = threading.get_ident()
        self._context = contextvars.copy_context()
        self._greenlet: greenlet | None = None
        self._worker: _Worker | None = None
        self._state = _TorchState.now()
        self._guard: Any = None  # see `exchange`
        self._leaving = False
        self.finished = False

    def run_in_context(self, function: Callable[[], T]) -> T:
        """Call a function in the work's context, before the work begins or after it has ended.

        Args:
            function: the function to call. (Starting the work for this, and pausing it, would take
                five times as long.)
        """
        return self._context.run(function)

    def resume(self) -> None:
        """Run the work until it pauses or ends.

        Raises:
            RuntimeError: this is not the thread that began the work.
        """
        if self.finished:
            return
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "a trace goes on in the thread that began it; hand the values to another thread,"
                " not the trace"
            )
        worker = self._begin() if self._greenlet is None else self._greenlet
        mine = _TorchState.now()
        if mine != self._state or self._guard is not None:
            self._guard = exchange(mine, self._state, self._guard)
        worker.parent = getcurrent()
        try:
            worker.switch()
        finally:
            self.finished = self.finished or worker.dead
            self._state = _TorchState.now()
            if mine != self._state or self._guard is not None:
                self._guard = exchange(self._state, mine, self._guard, last=self.finished)
            if self.finished:
                self._give_back()

    def pause(self) -> None:
        """Yield the turn until the work is resumed. Called by the work."""
        if self._leaving:
            raise _AbandonForward
        assert self._greenlet is not None and self._greenlet.parent is not None
        self._greenlet.parent.switch()
        if self._leaving:
            raise _AbandonForward

    def abandon(self) -> None:
        """End the work where it is, and exit the contexts that it has open."""
        self._leaving = True
        if self._greenlet is None:  # it never began, or has ended
            self._work, self.finished = None, True
        while not self.finished:
            self.resume()

    def _begin(self) -> greenlet:
        idle: _Worker | None = getattr(_IDLE, "worker", None)
        _IDLE.worker = None
        worker = self._worker = idle if idle is not None and idle.has_room() else _Worker.new()
        worker.next_work.append(self._do)
        worker.greenlet.gr_context = self._context
        self._greenlet = worker.greenlet
        return worker.greenlet

    def _give_back(self) -> None:
        worker, self._worker, self._greenlet = self._worker, None, None
        # In a greenlet of another library, the idle worker would keep that greenlet alive.
        if worker is not None and not worker.greenlet.dead and getcurrent().parent is None:
            worker.greenlet.gr_context = None
            _IDLE.worker = worker

    def _do(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            work()
        except _AbandonForward:
            self._leaving = True  # expected; `contextlib.suppress` is slower
        self.finished = True


# --------------------------------------------------------------------------------------------------
# The errors of a trace for a point that was passed, or never comes.
# --------------------------------------------------------------------------------------------------


#: Our own package, and packages that may check its annotations.
_NOT_THE_USER = ("bridge.", "jaxtyping.", "beartype.")


class OutOfStepError(RuntimeError):
    """An error for a request that the model has passed or never reaches, or for an edit after
    use.
    """


class Line(NamedTuple):
    """A line of user code that made a request; it is looked up when an error names it.

    Attributes:
        code: the function's code object.
        instruction: the index of the instruction in that code.
    """

    code: CodeType
    instruction: int

    def __str__(self) -> str:
        number: int | None = None
        for start, end, line in self.code.co_lines():
            if start <= self.instruction < end:
                number = line
                break
        text = linecache.getline(self.code.co_filename, number or 0).strip()
        place = f"{os.path.basename(self.code.co_filename)}:{number}"
        return f"{place}: {text}" if text else place


def calling_line() -> Line:
    """Return the line outside this package that makes the request."""
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(
        _NOT_THE_USER
    ):
        frame = frame.f_back
    return Line(frame.f_code, frame.f_lasti)


# --------------------------------------------------------------------------------------------------
# Copies of module inputs and outputs, and checks whether a copy was changed.
# --------------------------------------------------------------------------------------------------


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a structure; other leaves stay unchanged."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[mapped(item, change) for item in value])
    if type(value) in (tuple, list):
        return type(value)([mapped(item, change) for item in value])
    if type(value) is dict:
        return {name: mapped(item, change) for name, item in value.items()}
    if isinstance(value, ModelOutput):
        return type(value)(**{name: mapped(item, change) for name, item in value.items()})
    return value


def leaves(value: Any) -> Iterator[Any]:
    """Return the leaves of a structure, in order."""
    if isinstance(value, dict | ModelOutput):
        for name, item in value.items():
            yield name
            yield from leaves(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def differ(shown: Any, original: Any) -> bool:
    """Tell whether a copied structure was changed, or has become part of a graph.

    Args:
        shown: the copy, which the body may have changed.
        original: the original.
    """
    now, before = list(leaves(shown)), list(leaves(original))
    return len(now) != len(before) or any(map(_leaves_differ, now, before))


def _leaves_differ(leaf: Any, original: Any) -> bool:
    if not isinstance(leaf, Tensor) or not isinstance(original, Tensor):
        return leaf is not original
    if leaf.requires_grad or leaf.shape != original.shape or leaf.dtype != original.dtype:
        return True
    # Elsewhere writing back takes less time than waiting for a comparison.
    return not leaf.is_cpu or not is_readable(leaf) or not same_bits(leaf, original)


_ASSIGNED = Listener("fwd", lambda act, hook: None)


def assigned(value: object, old: Tensor, hook: HookPoint) -> Tensor:
    """Check that a value that a body assigned can replace the activation, and return it (see
    `checked`).
    """
    return checked(value, old, _ASSIGNED, hook)


class _UsedValue(NamedTuple):
    """A value that the model has used, held weakly.

    Attributes:
        name: the hook point where it was shown.
        tensor: a weak reference to it.
        was: a fingerprint of its values when the model used it.
        counter: a tensor that shares its version counter, which its views may outlive.
        version: the version at that time; None if versions are not counted.
    """

    name: str
    tensor: weakref.ref[Tensor]
    was: Fingerprint | None
    counter: Tensor | None
    version: int | None

    @property
    def changed(self) -> bool:
        """Tell whether the value was changed after the model used it."""
        if self.counter is not None and self.counter._version != self.version:
            return True
        value = self.tensor()
        if value is None or self.was is None:
            return False
        return fingerprint(value, whole=True) != self.was


class LateEditGuard:
    """A set of weakly held values that the model has used; changing one of them later is an
    error."""

    def __init__(self) -> None:
        self._used: list[_UsedValue] = []

    def add(self, value: Tensor, name: str) -> None:
        """Register a value that the model uses as it is now.

        Args:
            value: a value that the user may hold.
            name: the hook point where it was shown.
        """
        was = fingerprint(value, whole=True) if is_readable(value) else None
        version = version_of(value)
        counter = None if version is None else _counter_of(value)
        self._used.append(_UsedValue(name, weakref.ref(value), was, counter, version))

    def check(self) -> None:
        """Check that no value was changed after the model used it.

        Raises:
            OutOfStepError: one was.
        """
        for used in self._used:
            if used.changed:
                raise OutOfStepError(
                    f"the value at {used.name} was changed in place after the model had gone on,"
                    " which sees nothing of that: change it before you ask for a later point, or"
                    " change a copy (value.clone())"
                )

    def forget(self) -> None:
        """Ignore later changes to all registered values."""
        self._used.clear()


#: Storage for version counters of CPU tensors: allocating one each would dominate the cost here.
_NOTHING = torch.empty(0, device="cpu")


def _counter_of(value: Tensor) -> Tensor:
    """Return a tensor that shares another's version counter, but not its memory."""
    if type(value) is not Tensor:
        return value
    counter = value.detach()
    counter.data = _NOTHING if value.is_cpu else value.new_empty(0)
    return counter
