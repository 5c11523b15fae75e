"""Two sides that take turns on one thread: the body of a ``with`` statement, and a forward pass in a greenlet."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

from greenlet import getcurrent, greenlet

from bridge.trace.state import Switchboard, TorchState

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


class _Idle(threading.local):
    """A thread's greenlet that waits for its next piece of work: the frames of a new one need pages from the system.

    Attributes:
        worker: the greenlet; None where it is at work, or there is none yet.
    """

    worker: _Worker | None = None


_IDLE = _Idle()


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
        self._switchboard = Switchboard()
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
        switchboard, mine = self._switchboard, TorchState.now()
        if mine != self._state or switchboard.guard is not None:
            switchboard.exchange(mine, self._state)
        worker.parent = getcurrent()
        try:
            worker.switch()
        finally:
            self.finished = self.finished or worker.dead
            self._state = TorchState.now()
            if mine != self._state or switchboard.guard is not None:
                switchboard.exchange(self._state, mine, last=self.finished)
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
        idle, _IDLE.worker = _IDLE.worker, None
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
