"""Two sides that take turns on one thread: the body of a ``with`` statement, and a forward pass in a greenlet."""

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
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils import ModelOutput

from bridge.hooks.context import Listener
from bridge.hooks.hooks import HookPoint, changed_in_place, checked, version_of

# ----------------------------------------------------------------------------------------------------------------------
# What torch keeps for each thread, kept apart for the two sides of a trace, which take turns on one thread.
#
# These are grad mode, inference mode, autocast, modes that see torch functions or dispatched operators, and hooks on
# what autograd saves. Context variables need nothing of the kind: a greenlet has its own.
# ----------------------------------------------------------------------------------------------------------------------


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


def exchange(now: TorchState, wanted: TorchState, guard: Any, last: bool = False) -> Any:
    """Puts one side's state in the place of the other's, where it is not the same.

    Args:
        now: the state of the side that waits from now on.
        wanted: the state of the side that goes on.
        guard: what this returned the last time.
        last: there will be no further turn.

    Returns:
        What keeps the side in another inference mode, which has to be ended at the next turn (it is of torch's own
        class); None: nothing.
    """
    if guard is not None:
        # It was entered when the side that now goes on was left, and restores all that was there then.
        guard.__exit__(None, None, None)
        guard, now = None, TorchState.now()
    if now == wanted:
        return None
    _replace_modes(now, wanted)
    if now.inference != wanted.inference:
        guard = torch._C._InferenceMode(wanted.inference)
        guard.__enter__()
        if last:  # it must never be left: the side that stays leaves its own
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(guard))
            guard = None
    torch._C._set_grad_enabled(wanted.grad)
    if now.autocast != wanted.autocast or now.autocast_cache != wanted.autocast_cache:
        torch.clear_autocast_cache()
        on_cpu, cpu_type, on_cuda, cuda_type = wanted.autocast
        torch.set_autocast_enabled("cpu", on_cpu)
        torch.set_autocast_dtype("cpu", cpu_type)
        torch.set_autocast_enabled("cuda", on_cuda)
        torch.set_autocast_dtype("cuda", cuda_type)
        torch.set_autocast_cache_enabled(wanted.autocast_cache)
    return guard


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


T = TypeVar("T")


class AbandonForward(BaseException):
    """Takes a forward pass apart that is no longer needed. It never leaves its greenlet."""


#: How many frames fewer than a new greenlet one that waits may have before the limit of recursion.
_FEWER_FRAMES = 50


class _Worker(NamedTuple):
    """A greenlet that does one piece of work after another.

    Attributes:
        greenlet: the greenlet.
        next_work: the list in which it finds its work.
        depth: how many calls are below it for good: those in which its first piece of work began.
    """

    greenlet: greenlet
    next_work: list[Callable[[], None]]
    depth: int

    @classmethod
    def new(cls) -> _Worker:
        """One that has not begun."""
        frame, depth = sys._getframe(), 0
        while frame.f_back is not None:
            frame, depth = frame.f_back, depth + 1
        next_work: list[Callable[[], None]] = []
        return cls(greenlet(partial(_serve, next_work)), next_work, depth)

    def has_room(self) -> bool:
        """Whether its work can make about as many nested calls as that of a new one."""
        if self.depth > _FEWER_FRAMES:
            try:
                sys._getframe(self.depth - _FEWER_FRAMES)
            except ValueError:
                return False  # we are not so deep now
        return True


#: Each thread's `worker` that waits for its next piece of work: the frames of a new one need pages from the system.
_IDLE = threading.local()


def _serve(next_work: list[Callable[[], None]]) -> None:
    """What such a greenlet runs, until a piece of work ends with an exception, or nobody holds the greenlet."""
    while True:
        next_work.pop()()
        back = getcurrent().parent
        assert back is not None
        back.switch()


class Coroutine:
    """A piece of work that pauses in the middle of its calls, and goes on when it is told to.

    It runs in a copy of the context of whoever makes this, with the grad mode, autocast and modes that are there then;
    what either side changes of them is not seen by the other.

    Args:
        work: the work.

    Attributes:
        finished: whether the work is done, or was left.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._thread = threading.get_ident()
        self._context = contextvars.copy_context()
        self._greenlet: greenlet | None = None
        self._worker: _Worker | None = None
        self._state = TorchState.now()
        self._guard: Any = None  # see `exchange`
        self._leaving = False
        self.finished = False

    def run_in_context(self, function: Callable[[], T]) -> T:
        """Calls a function in the work's context, before the work begins or after it ended.

        Args:
            function: what to call. (To begin the work for it, and to let it pause, would take five times as long.)
        """
        return self._context.run(function)

    def resume(self) -> None:
        """Lets the work go on until it pauses or ends.

        Raises:
            RuntimeError: another thread than the one that began it does this.
        """
        if self.finished:
            return
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "a trace goes on in the thread that began it; hand the values to another thread, not the trace"
            )
        worker = self._begin() if self._greenlet is None else self._greenlet
        mine = TorchState.now()
        if mine != self._state or self._guard is not None:
            self._guard = exchange(mine, self._state, self._guard)
        worker.parent = getcurrent()
        try:
            worker.switch()
        finally:
            self.finished = self.finished or worker.dead
            self._state = TorchState.now()
            if mine != self._state or self._guard is not None:
                self._guard = exchange(self._state, mine, self._guard, last=self.finished)
            if self.finished:
                self._give_back()

    def pause(self) -> None:
        """Called by the work: gives the turn back until it is to go on."""
        if self._leaving:
            raise AbandonForward
        assert self._greenlet is not None and self._greenlet.parent is not None
        self._greenlet.parent.switch()
        if self._leaving:
            raise AbandonForward

    def abandon(self) -> None:
        """Ends the work where it is: what it holds open is closed."""
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
        # In somebody's greenlet it would keep that one.
        if worker is not None and not worker.greenlet.dead and getcurrent().parent is None:
            worker.greenlet.gr_context = None
            _IDLE.worker = worker

    def _do(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            work()
        except AbandonForward:
            self._leaving = True  # it is; `contextlib.suppress` takes longer
        self.finished = True


# ----------------------------------------------------------------------------------------------------------------------
# What a trace says when a point has passed, or never comes.
# ----------------------------------------------------------------------------------------------------------------------


#: Our own package, and what may check its annotations.
_NOT_THE_USER = ("bridge.", "jaxtyping.", "beartype.")


class OutOfStepError(RuntimeError):
    """A trace was asked for what the model has passed, or did not come to, or a value was changed after it was used."""


class Line(NamedTuple):
    """A line of the user's that asked for something; it is looked up when an error names it.

    Attributes:
        code: of the function.
        at: which instruction of it.
    """

    code: CodeType
    at: int

    def __str__(self) -> str:
        number = next((line for start, end, line in self.code.co_lines() if start <= self.at < end), None)
        text = linecache.getline(self.code.co_filename, number or 0).strip()
        return f"{os.path.basename(self.code.co_filename)}:{number}" + (f": {text}" if text else "")


def calling_line() -> Line:
    """The line outside of this package that is asking."""
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_NOT_THE_USER):
        frame = frame.f_back
    return Line(frame.f_code, frame.f_lasti)


# ----------------------------------------------------------------------------------------------------------------------
# Copies of what modules are given and return, and whether anything in a copy was changed.
# ----------------------------------------------------------------------------------------------------------------------


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor in it changed; what is neither tensor nor container stays what it is."""
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
    """What stands in a structure, in order."""
    if isinstance(value, dict | ModelOutput):
        for name, item in value.items():
            yield name
            yield from leaves(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def leaves_now(value: Any) -> list[tuple[Any, int | None]]:
    """What stands in a structure that a user may change, in order, and the versions of what are tensors."""
    return [(leaf, version_of(leaf) if isinstance(leaf, Tensor) else 0) for leaf in leaves(value)]


def differ(value: Any, before: list[tuple[Any, int | None]]) -> bool:
    """Whether anything in a structure was changed or exchanged since `leaves_now`, or takes part in a graph."""
    now = list(leaves(value))
    return len(now) != len(before) or any(
        leaf is not old or (isinstance(leaf, Tensor) and (leaf.requires_grad or changed_in_place(leaf, version)))
        for leaf, (old, version) in zip(now, before, strict=True)
    )


_ASSIGNED = Listener("fwd", lambda act, hook: None)


def assigned(value: object, old: Tensor, hook: HookPoint) -> Tensor:
    """What a body has assigned, if it can take the place of the activation (see `checked`)."""
    return checked(value, old, _ASSIGNED, hook)


class LateEditGuard:
    """Values that the model has used already, none of which is kept alive: a change of them comes too late."""

    def __init__(self) -> None:
        self._counters: list[tuple[Tensor, int, str]] = []
        # A tensor of inference mode does not count its versions.
        self._as_they_were: list[tuple[weakref.ref[Tensor], str]] = []
        self._copies: WeakTensorKeyDictionary | None = None

    def add(self, value: Tensor, name: str) -> None:
        """The model uses a value as it is now.

        Args:
            value: what the user may hold.
            name: where it was shown.
        """
        if not value.is_inference():
            self._counters.append((_counter_of(value), value._version, name))
            return
        if self._copies is None:
            self._copies = WeakTensorKeyDictionary()
        self._as_they_were.append((weakref.ref(value), name))
        self._copies[value] = value.clone()

    def check(self) -> None:
        """Looks whether any was changed since.

        Raises:
            OutOfStepError: one was.
        """
        changed = [name for counter, version, name in self._counters if counter._version != version]
        for ref, name in self._as_they_were:
            value = ref()
            if value is not None and self._copies is not None and not _is_same(value, self._copies[value]):
                changed.append(name)
        for name in changed:
            raise OutOfStepError(
                f"the value at {name} was changed in place after the model had gone on, which sees nothing of "
                "that: change it before you ask for a later point, or change a copy (value.clone())"
            )

    def forget(self) -> None:
        """What is done to them from now on does not matter."""
        self._counters.clear()
        self._as_they_were.clear()
        self._copies = None


#: For counters of tensors in the CPU's memory: to make one each takes longer than all else here.
_NOTHING = torch.empty(0)


def _counter_of(value: Tensor) -> Tensor:
    """A tensor that counts the versions of another one, of which it holds nothing."""
    if type(value) is not Tensor:
        return value
    counter = value.detach()
    counter.data = _NOTHING if value.is_cpu else value.new_empty(0)
    return counter


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values, NaN in the same places."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
