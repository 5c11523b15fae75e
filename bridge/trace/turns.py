"""Two sides that take turns on one thread: the body of a ``with`` statement, and a forward pass in a greenlet."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from greenlet import getcurrent, greenlet

from bridge.trace.state import Switchboard, TorchState

T = TypeVar("T")


class Leave(BaseException):
    """Takes a forward pass apart that is no longer needed. It never leaves its greenlet."""


class Turns:
    """A piece of work that pauses in the middle of its calls, and goes on when it is told to.

    It runs in a copy of the context of whoever makes this, with the grad mode, autocast and modes that are there then;
    what either side changes of them is not seen by the other.

    Args:
        work: the work.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._thread = threading.get_ident()
        self._context = contextvars.copy_context()
        self._greenlet: greenlet | None = greenlet(self._begin)
        self._greenlet.gr_context = self._context
        self._state = TorchState.now()
        self._switchboard = Switchboard()
        self._leaving = False

    def beside(self, function: Callable[[], T]) -> T:
        """Calls a function in the work's context, before the work begins or after it ended.

        Args:
            function: what to call. (To begin the work for it, and to let it pause, would take five times as long.)
        """
        return self._context.run(function)

    @property
    def finished(self) -> bool:
        """Whether the work is done, or was left."""
        return self._greenlet is None

    def go_on(self) -> None:
        """Lets the work go on until it pauses or ends.

        Raises:
            RuntimeError: another thread than the one that began it does this.
        """
        if self._greenlet is None:
            return
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "a trace goes on in the thread that began it; hand the values to another thread, not the trace"
            )
        mine = TorchState.now()
        self._switchboard.exchange(mine, self._state)
        self._greenlet.parent = getcurrent()
        try:
            self._greenlet.switch()
        finally:
            ended = self._greenlet.dead
            self._state = TorchState.now()
            self._switchboard.exchange(self._state, mine, last=ended)
            if ended:
                self._greenlet = None

    def pause(self) -> None:
        """Called by the work: gives the turn back until it is to go on."""
        if self._leaving:
            raise Leave
        assert self._greenlet is not None and self._greenlet.parent is not None
        self._greenlet.parent.switch()
        if self._leaving:
            raise Leave

    def leave(self) -> None:
        """Ends the work where it is: what it holds open is closed."""
        self._leaving = True
        if self._work is not None:  # it never began
            self._work = self._greenlet = None
        while not self.finished:
            self.go_on()

    def _begin(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        with contextlib.suppress(Leave):
            work()
