"""Runs and blocks that backward computes again: they see the hooks of their first computation.

1. *A run of the bridge* inside a checkpoint of the user's (`bridge.hooks.recomputation` says what
   counts as one) notes the hooks that were opened outside of it, and is computed again under these
   (`entering_run`).
2. *A block* that the model checkpoints itself: transformers passes it to the module's
   ``_gradient_checkpointing_func`` with a function that computes it. While listeners are attached,
   that function also carries the hooks of the forward pass (`CheckpointedBlocks`).

Backward may come after the ``with`` statement of the hooks, on one of autograd's threads. If hooks
that belong to no ``with`` statement were added or removed in between, an error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from bridge.hooks.context import CURRENT, ForwardPass, RunContext, Scope, setting
from bridge.hooks.hooks import AttachesListeners
from bridge.hooks.recomputation import (
    CheckpointRegion,
    NotedRun,
    Regions,
    recomputation_frame,
    regions,
)
from bridge.modules import Finder, NotCopied, itself

Scopes = frozenset[Scope | None]


@contextmanager
def _reattach_scopes(attaches: AttachesListeners, context: RunContext) -> Iterator[None]:
    """Run code in a context whose scopes may have been closed since."""
    with setting(CURRENT, context), attaches.scopes_attached(context.shared):
        yield


# --------------------------------------------------------------------------------------------------
# Runs in a checkpoint of the user's.
# --------------------------------------------------------------------------------------------------


def entering_run(attaches: AttachesListeners) -> AbstractContextManager[None] | None:
    """Record the hooks of a run that backward may repeat, or return the context of a repeated run.

    Args:
        attaches: the registry of the run's bridge.

    Raises:
        RuntimeError: the run is repeated but the hooks of its first computation are unknown, or it
            is the first one and its hooks cannot be recorded.
    """
    present = regions()
    if present.again is not None:
        return _repeated_context(attaches, present, present.again)
    if present.first or present.unbound is not None:
        _note(attaches, present, CURRENT.get().shared)
    return None


def refuse_repeated_call(attaches: AttachesListeners) -> None:
    """Raise an error if backward repeats a direct call of the model that has hooks.

    Args:
        attaches: the registry of the bridge whose hooks the call would see.

    Raises:
        RuntimeError: it is such a call.
    """
    if torch._C._current_graph_task_id() == -1:
        return
    active_scopes = attaches.attached_scopes() & CURRENT.get().visible
    if active_scopes and regions().again is not None:
        raise RuntimeError(
            "backward computes the model again, with hooks attached, and nothing says whether they"
            " were in the forward pass: call the bridge instead, bridge(...), whose runs note their"
            " hooks"
        )


def _outside(region: CheckpointRegion, shared: Scopes) -> Scopes:
    """Return the scopes that were opened outside of a region."""
    return frozenset(
        [scope for scope in shared if scope is None or region.number not in scope.opened_in]
    )


def _note(attaches: AttachesListeners, present: Regions, shared: Scopes) -> None:
    """Record the hooks of a run in every surrounding region that is being computed for the first
    time."""
    if present.unbound is not None and attaches.attached_scopes() & shared:
        raise RuntimeError(
            f"this run is in the forward of the autograd.Function {present.unbound}, which has no"
            " ctx there, so its hooks cannot be brought along if backward computes it again: write"
            " forward(ctx, ...) without setup_context, or open the hooks inside of it"
        )
    for region in present.first:
        scopes = _outside(region, shared)
        region.runs.append(NotedRun(attaches, scopes, attaches.changes))
        for scope in scopes - {None}:
            assert scope is not None
            scope.recomputed = True


def _repeated_context(
    attaches: AttachesListeners, present: Regions, region: CheckpointRegion
) -> AbstractContextManager[None] | None:
    """Return the context of a repeated run: the hooks that the original run had, and the hooks that
    the region's own code opens.
    """
    context = CURRENT.get()
    noted_runs = [run for run in region.runs if run.owner is attaches]
    if not noted_runs:
        _check_unnoted(attaches, region, context.shared)
        return None
    first = noted_runs[_number_of_run(attaches, region, noted_runs)]
    if None in first.scopes and first.changes != attaches.changes:
        raise RuntimeError(
            "backward computes a run of the bridge again (activation checkpointing), and hooks were"
            " added or removed since its forward pass: run backward before changing them, or use"
            " run_with_hooks or `with bridge.hooks(...)`, whose hooks are brought along"
        )
    shared = first.scopes | (context.shared - _outside(region, context.shared))
    _note(attaches, present, shared)
    return _reattach_scopes(attaches, context.with_shared(shared))


def _number_of_run(
    attaches: AttachesListeners, region: CheckpointRegion, noted: Sequence[NotedRun]
) -> int:
    """Return the index of the region's run that is being repeated, and count it."""
    key = torch._C._current_graph_task_id(), id(attaches)
    number = region.repeated.get(key, 0)
    region.repeated[key] = number + 1
    if number < len(noted):
        return number
    if len({run.scopes for run in noted}) > 1:
        raise RuntimeError(
            f"backward runs the model {number + 1} times where its forward pass ran it"
            f" {len(noted)} times, with different hooks: which of them belong to this run is not"
            " known"
        )
    return -1


def _check_unnoted(attaches: AttachesListeners, region: CheckpointRegion, shared: Scopes) -> None:
    """Check a repeated run in a region whose first computation recorded no runs.

    Raises:
        RuntimeError: no runs could be recorded, but this run sees hooks.
    """
    if not region.notes and attaches.attached_scopes() & _outside(region, shared):
        raise RuntimeError(
            "this run is in the backward of an autograd.Function whose forward has no ctx, so"
            " nothing says whether its forward ran the model with these hooks: write forward(ctx,"
            " ...) without setup_context, or open the hooks inside of it"
        )


# --------------------------------------------------------------------------------------------------
# Blocks that the model checkpoints itself.
# --------------------------------------------------------------------------------------------------


_NAME = "_gradient_checkpointing_func"


class CheckpointedBlocks:
    """The modules that backward may recompute.

    Args:
        modules: returns these modules: the blocks, and the stacks that contain them.
        attaches: the registry that attaches hooks.
    """

    def __init__(self, modules: Sequence[Finder], attaches: AttachesListeners) -> None:
        #: Modules by the path of their parent, with their names there: resolving each one anew took
        #: longer than a hook.
        self._inside: dict[str, list[tuple[str, Finder]]] = {}
        for finder in modules:
            *above, name = finder.parts or [""]
            self._inside.setdefault(".".join(above), []).append((name, finder))
        self._attaches = attaches
        self._prepared: list[nn.Module] = []

    def prepare(self) -> None:
        """Wrap the model's checkpointing function, if checkpointing is enabled."""
        for path, finders in self._inside.items():  # called in each step of a generation
            inside = Finder(finders[0][1].root, path).module._modules
            for name, finder in finders:
                module = inside.get(name)
                if module is None:
                    module = finder.module
                own = module.__dict__.get(_NAME)
                if own is None or isinstance(own, _CheckpointFunction):
                    continue
                if not (module.training and module.gradient_checkpointing):
                    continue
                if finder.call is not None:
                    raise RuntimeError(
                        f"{'.'.join(finder.parts)} is several blocks, and backward would compute"
                        " them again (activation checkpointing) in an order in which nothing tells"
                        " them apart: switch checkpointing off"
                    )
                module.__dict__[_NAME] = _CheckpointFunction(own, finder, self._attaches)
                self._prepared.append(module)

    def release(self) -> None:
        """Restore the model's checkpointing function."""
        for module in self._prepared:
            function = module.__dict__.get(_NAME)
            if isinstance(function, _CheckpointFunction):
                module.__dict__[_NAME] = function.own
        self._prepared.clear()


class _CheckpointFunction(NotCopied):
    """A wrapper of the checkpointing function of one module.

    Args:
        own: the module's own function.
        find: returns the module.
        attaches: the registry that attaches hooks.
    """

    def __init__(self, own: Callable[..., Any], find: Finder, attaches: AttachesListeners) -> None:
        self.own, self._find, self._attaches = own, find, attaches

    def left_in_copy(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return itself, (self.own,)

    def __call__(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        return self.own(_BlockWithHooks(function, self._find, self._attaches), *args, **kwargs)


class _BlockWithHooks:
    """A function that computes a block again with the hooks of its first computation."""

    def __init__(
        self, function: Callable[..., Any], find: Finder, attaches: AttachesListeners
    ) -> None:
        context = CURRENT.get()
        self._function, self._path, self._attaches = function, ".".join(find.parts), attaches
        self._model = find.root  # hooks find its modules, even if the user only holds a loss
        self._shared = context.shared
        for scope in self._shared:
            if scope is not None:
                scope.recomputed = True
        self._changes = attaches.changes
        # The block's own input, which is outside of the recomputation.
        sources = {} if context.run is None else context.run.sources
        self._sources = {site: x for site, x in sources.items() if site.site.path == self._path}
        self._ran = False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if not self._ran:
            self._ran = True
            return recomputation_frame(self._function, args, kwargs)
        if self._changes != self._attaches.changes:
            raise RuntimeError(
                f"backward computes {self._path} again (activation checkpointing), and hooks were"
                " added or removed since its forward pass: run backward before changing them, or"
                " use run_with_hooks or `with bridge.hooks(...)`, whose hooks are brought along"
            )
        run = ForwardPass()
        run.sources.update(self._sources)
        try:
            with _reattach_scopes(self._attaches, RunContext(self._shared, run=run)):
                return recomputation_frame(self._function, args, kwargs)
        finally:
            run.end()
