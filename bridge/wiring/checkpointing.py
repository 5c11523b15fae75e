"""Activation checkpointing: blocks that backward computes again run under the hooks of their forward pass.

transformers hands each such block to ``_gradient_checkpointing_func`` with a function that computes it. While somebody
listens, that function also brings along which hooks were there. Backward may call it later, on a thread of autograd's
own, when the ``with`` statement of those hooks has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from bridge.hooks.context import CURRENT, ForwardPass, RunContext, SourceSite
from bridge.hooks.listener import Scope
from bridge.hooks.modules import Finder
from bridge.hooks.recomputation import recomputation_frame

_NAME = "_gradient_checkpointing_func"


class AttachesScopes(Protocol):
    """What attaches the hooks of a scope, also after its ``with`` statement has ended.

    Attributes:
        changes: how often a hook was added or removed that belongs to no scope.
    """

    changes: int

    @property
    def model(self) -> nn.Module:
        """The model."""

    def attach_scope(self, scope: Scope) -> None:
        """Attaches its hooks, if they are not attached already."""

    def detach_scope(self, scope: Scope) -> None:
        """The reverse, once nobody needs them any more."""


class CheckpointedBlocks:
    """The modules that may be computed again.

    Args:
        modules: finds them: the blocks, and the stacks that they stand in.
        attaches: attaches hooks.
    """

    def __init__(self, modules: Sequence[Finder], attaches: AttachesScopes | None = None) -> None:
        #: By the path that leads to several of them, with their names there: to find each anew from the model took
        #: longer than a hook.
        self._inside: dict[str, list[tuple[str, Finder]]] = {}
        for finder in modules:
            *above, name = finder.parts or [""]
            self._inside.setdefault(".".join(above), []).append((name, finder))
        self._attaches = attaches
        self._prepared: list[nn.Module] = []

    def prepare(self) -> None:
        """Puts our function before the model's own, where checkpointing is switched on."""
        for finder, module, own in self._found():
            if isinstance(own, _CheckpointFunction) or not (module.training and module.gradient_checkpointing):
                continue
            if finder.call is not None:
                raise RuntimeError(
                    f"{'.'.join(finder.parts)} is several blocks, and backward would compute them again (activation "
                    "checkpointing) in an order in which nothing tells them apart: switch checkpointing off"
                )
            assert self._attaches is not None
            module.__dict__[_NAME] = _CheckpointFunction(own, ".".join(finder.parts), self._attaches)
            self._prepared.append(module)

    def _found(self) -> Iterator[tuple[Finder, nn.Module, Callable[..., Any]]]:
        """The modules there that have a checkpointing function, and it: asked in each step of a generation."""
        for path, finders in self._inside.items():
            holder = Finder(finders[0][1].root, path).module
            inside = holder._modules
            for name, finder in finders:
                module = inside.get(name)
                if module is None:
                    module = finder.module
                own = module.__dict__.get(_NAME)
                if own is not None:
                    yield finder, module, own

    def release(self) -> None:
        """Takes it back."""
        for module in self._prepared:
            ours = module.__dict__.get(_NAME)
            if isinstance(ours, _CheckpointFunction):
                module.__dict__[_NAME] = ours.own
        self._prepared.clear()


class _CheckpointFunction:
    """Wraps the checkpointing function of one module.

    Args:
        own: the module's own.
        path: the module's path.
        attaches: attaches hooks.
    """

    def __init__(self, own: Callable[..., Any], path: str, attaches: AttachesScopes) -> None:
        self.own, self._path, self._attaches = own, path, attaches

    # A copy of the model that is made meanwhile has the module's own function.
    def __reduce__(self) -> str | tuple[object, ...]:
        return _itself, (self.own,)

    def __call__(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        return self.own(_BlockWithHooks(function, self._path, self._attaches), *args, **kwargs)


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class _BlockWithHooks:
    """A function that computes a block, and which hooks it was computed with first."""

    def __init__(self, function: Callable[..., Any], path: str, attaches: AttachesScopes) -> None:
        context = CURRENT.get()
        self._function, self._path, self._attaches = function, path, attaches
        self._model = attaches.model  # hooks find its modules, also where nobody holds more of it than a loss
        self._shared = context.shared
        for scope in self._shared:
            if scope is not None:
                scope.recomputed = True
        self._changes = attaches.changes
        # The block's own input, which is outside of what is computed again.
        self._sources = {} if context.run is None else _sources_outside(context.run, path)
        self._ran = False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if not self._ran:
            self._ran = True
            return recomputation_frame(self._function, args, kwargs)
        if self._changes != self._attaches.changes:
            raise RuntimeError(
                f"backward computes {self._path} again (activation checkpointing), and hooks were added or removed "
                "since its forward pass: run backward before changing them, or use run_with_hooks or "
                "`with bridge.hooks(...)`, whose hooks are brought along"
            )
        run = ForwardPass()
        run.sources.update(self._sources)
        before = CURRENT.get()
        CURRENT.set(RunContext(self._shared, run=run))
        try:
            with self._attached():
                return recomputation_frame(self._function, args, kwargs)
        finally:
            run.end()
            CURRENT.set(before)

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Attaches the hooks, which may be gone, for the time of a recomputation."""
        scopes = [scope for scope in self._shared if scope is not None]
        for scope in scopes:
            self._attaches.attach_scope(scope)
        try:
            yield
        finally:
            for scope in scopes:
                self._attaches.detach_scope(scope)


def _sources_outside(run: ForwardPass, path: str) -> dict[SourceSite, tuple[nn.Module, Tensor]]:
    """What the pass saw at the input of the block at a path."""
    return {hook: seen for hook, seen in run.sources.items() if hook.site.path == path}
