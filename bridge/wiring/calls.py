"""Counting the calls of modules that run several times in a pass, of which each has hook points of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle

from adapters.paths import call_number, core_path, module_path
from bridge.hooks.context import CURRENT
from bridge.hooks.modules import Finder


class CallCounter:
    """Counts, in each pass, the calls of modules that run several times.

    Nothing is attached for a model that has none, or while nobody may listen.

    Attributes:
        modules: finds those modules, by path.
    """

    def __init__(self) -> None:
        self.modules: dict[str, Finder] = {}
        self._core: Finder | None = None
        self._handles: list[RemovableHandle] = []
        self._users = 0

    # A copy of a model that has hooks attached carries inert ones.
    def __deepcopy__(self, memo: dict[int, object]) -> CallCounter:
        return CallCounter()

    def __reduce__(self) -> tuple[Callable[[], CallCounter], tuple[()]]:
        return CallCounter, ()

    def add(self, root: nn.Module, paths: Iterable[str]) -> None:
        """Takes in the modules at paths that mean one of a module's calls."""
        for path in paths:
            if call_number(path) is not None:
                self._core = Finder(root, core_path(root))
                self.modules[module_path(path)] = Finder(root, path)

    def change(self, by: int) -> None:
        """One more (or less) who needs to know."""
        if not self.modules:
            return
        before, self._users = self._users, self._users + by
        if not before and self._users:
            assert self._core is not None
            self._handles.append(self._core.module.register_forward_pre_hook(self.restart, prepend=True))
            for finder in self.modules.values():
                self._handles.append(finder.module.register_forward_pre_hook(self.count, prepend=True))
        elif before and not self._users:
            while self._handles:
                self._handles.pop().remove()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts inside a ``with`` statement."""
        self.change(1)
        try:
            yield
        finally:
            self.change(-1)

    def restart(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """The forward pre-hook of the model, which a generation calls for each of its steps."""
        run = CURRENT.get().run
        if run is not None and self._handles:
            run.calls.clear()

    def count(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """The forward pre-hook: before those of all others."""
        run = CURRENT.get().run
        if run is not None and self._handles:
            run.calls[module] = run.calls.get(module, 0) + 1
