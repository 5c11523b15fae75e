"""The ``with`` statement whose body runs in step with a piece of work that the model does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

from bridge.hooks.hook_point import HookPoint
from bridge.hooks.listener import Scope
from bridge.hooks.tracing import OpenTrace, closed, opened
from bridge.trace.coroutine import Coroutine
from bridge.trace.errors import LateEditError, PointNeverCameError, PointPassedError
from bridge.trace.places import ModelOrder
from bridge.trace.protocol import TraceableBridge
from bridge.trace.stops import Stops


class InStep:
    """What a traced run and a traced generation share: model and body begin, wait for each other, and end.

    Args:
        bridge: the bridge.
        places: the order of its hook points.
        captured: hook points that are kept whenever they come.

    Attributes:
        scope: what its runs alone see.
        stops: where the work waits.
    """

    #: Why it cannot be entered twice.
    once: str

    def __init__(self, bridge: TraceableBridge, places: ModelOrder, captured: Sequence[HookPoint] = ()) -> None:
        self.scope = Scope(of_one_run=True)
        self.stops = Stops(bridge.wiring, self.scope, places, captured)
        self._stack: ExitStack | None = None
        self._shown: OpenTrace | None = None
        self._state: Literal["new", "open", "ran", "stopped"] = "new"

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RuntimeError(self.once)
        self._state = "open"
        coroutine = self.stops.coroutine = Coroutine(self._work)
        try:
            self._begin(coroutine)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._run_to_the_end()
                self.stops.late_edits.check()
        finally:
            self._end()
        if error is not None:
            explain(error, traceback)

    def _begin(self, coroutine: Coroutine) -> None:
        """Makes ready what the body needs."""
        raise NotImplementedError

    def _work(self) -> None:
        """The model's side."""
        raise NotImplementedError

    def _show(self, names: object, trace: OpenTrace) -> None:
        """Lets the parts of the bridge show what a trace sees, as long as the block lasts."""
        opened(names, trace)
        self._shown = trace

    def _until_the_end(self) -> ExitStack:
        """What is closed when the block ends."""
        if self._stack is None:
            self._stack = ExitStack()
        return self._stack

    def _run_to_the_end(self) -> None:
        """Lets the work end, where the block is still open."""
        if self._state != "open":
            return
        assert self.stops.coroutine is not None
        while not self.stops.coroutine.finished:
            self.stops.resume()

    def _end(self) -> None:
        """Leaves the work where it is, and takes away what was attached."""
        try:
            if self.stops.coroutine is not None and not self.stops.coroutine.finished:
                self.stops.coroutine.abandon()
        finally:
            self.stops.detach()
            self.stops.late_edits.forget()
            shown, self._shown = self._shown, None  # it may be this very object
            if shown is not None:
                closed(shown)
            if self._stack is not None:
                self._stack.close()
            if self._state == "open":
                self._state = "stopped"


def explain(error: BaseException, traceback: TracebackType | None) -> None:
    """Ends the traceback of our own errors at the user's line, and says of `save` what it is."""
    if isinstance(error, AttributeError) and error.name == "save":
        error.add_note(
            "Values of a trace are real, and stay: there is nothing to save. bridge.save(x) is there for code that "
            "has it, and returns x."
        )
    if isinstance(error, PointPassedError | PointNeverCameError | LateEditError) and traceback is not None:
        traceback.tb_next = None
