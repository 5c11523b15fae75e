"""Runs with hooks: which hook points are meant, and hooks that last as long as a ``with`` statement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bridge.hooks.context import CURRENT, RunContext
from bridge.hooks.hook_point import HookPoint, checked_function
from bridge.hooks.listener import HookFunction, Kind, Listener, Scope
from bridge.hooks.names import NamesFilter, named_one_by_one
from bridge.run.layer_range import check_layers
from bridge.run.protocol import HookSpec, RunnableBridge


def runs_some_layers(forward_kwargs: Mapping[str, Any]) -> bool:
    """Whether a run starts or stops at a layer."""
    return any(forward_kwargs.get(name) is not None for name in ("start_at_layer", "stop_at_layer"))


def points_that_run(
    bridge: RunnableBridge, points: Sequence[HookPoint], forward_kwargs: Mapping[str, Any]
) -> list[HookPoint]:
    """Those of the hook points that lie in the layers that run."""
    start, stop = check_layers(
        forward_kwargs.get("start_at_layer"), forward_kwargs.get("stop_at_layer"), bridge.cfg.n_layers
    )
    if start is None and stop is None:
        return list(points)
    first, last = start if start is not None else -1, stop if stop is not None else bridge.cfg.n_layers + 1
    return [hook for hook in points if first <= hook.point.depth < last]


def points_of_run(
    bridge: RunnableBridge, names: NamesFilter | HookPoint, forward_kwargs: Mapping[str, Any]
) -> list[HookPoint]:
    """The chosen hook points, of which those named one by one must lie in the layers that run.

    Raises:
        ValueError: one does not; or none does.
    """
    points = bridge.select_hooks(names)
    running = points_that_run(bridge, points, forward_kwargs)
    if len(running) == len(points):
        return points
    layers = ", ".join(f"{name}={forward_kwargs.get(name)}" for name in ("start_at_layer", "stop_at_layer"))
    if named_one_by_one(names):
        outside = next(hook for hook in points if hook not in running)
        raise ValueError(f"{outside.name} does not run with {layers}")
    if not running:
        raise ValueError(f"none of the chosen hook points runs with {layers}")
    return running


@contextmanager
def hooked(
    bridge: RunnableBridge,
    fwd_hooks: Sequence[HookSpec],
    bwd_hooks: Sequence[HookSpec],
    reset_hooks_end: bool,
    clear_contexts: bool,
) -> Iterator[None]:
    """Hooks for the runs inside a ``with`` statement: see `TransformerBridge.hooks`."""
    check_specs("fwd_hooks", fwd_hooks)
    check_specs("bwd_hooks", bwd_hooks)
    chosen: list[tuple[HookPoint, HookFunction, Kind, bool]] = []
    for names, fn in fwd_hooks:
        named = named_one_by_one(names)
        chosen += [(hook, checked_function(hook, fn), "fwd", named) for hook in bridge.select_hooks(names)]
    for names, fn in bwd_hooks:
        named = named_one_by_one(names)
        chosen += [(hook, checked_function(hook, fn), "bwd", named) for hook in bridge.select_hooks(names)]
    try:
        if reset_hooks_end:
            scope = Scope()
            members = [(hook, Listener(kind, fn, scope, named=named)) for hook, fn, kind, named in chosen]
            with bridge.wiring.scoped(members, scope):
                yield
        else:
            add_all(bridge, [(hook, Listener(kind, fn)) for hook, fn, kind, _ in chosen])
            yield
    finally:
        if clear_contexts:
            clear_all_contexts(bridge)


def check_hooks_run(bridge: RunnableBridge, start: int | None, stop: int | None) -> None:
    """Refuses a run of some layers where a hook that was opened for it, by name, would never be called.

    Args:
        bridge: the bridge.
        start, stop: the layers, counted from the front.

    Raises:
        ValueError: there is such a hook. (One that was added stays silent in the runs that leave its layer out.)
    """
    first, last = start if start is not None else -1, stop if stop is not None else bridge.cfg.n_layers + 1
    refuse_unreached_points(
        bridge, lambda depth: first <= depth < last, f"start_at_layer={start}, stop_at_layer={stop}"
    )


def refuse_unreached_points(
    bridge: RunnableBridge, runs: Callable[[int], bool], how: str, context: RunContext | None = None
) -> None:
    """Refuses a run that leaves out points at which hooks were opened for it, by name.

    Args:
        bridge: the bridge.
        runs: whether the points at a depth run.
        how: what leaves them out, for the error.
        context: that of the run; None: the present one.

    Raises:
        ValueError: there is such a hook.
    """
    context = CURRENT.get() if context is None else context
    opened = context.shared - context.inherited - {None}
    if not (opened and bridge.refuses_silent_hooks):
        return
    for hook in bridge.wiring.points.values():
        if hook.listeners and not runs(hook.point.depth):
            for listener in hook.listeners:
                if listener.named and listener.scope in opened:
                    raise ValueError(
                        f"{hook.name} has a hook of a `with` statement, and does not run with {how}: the hook would "
                        "never be called. Open it around other runs, or choose its points with a function"
                    )


def check_specs(argument: str, specs: Sequence[HookSpec]) -> None:
    """Refuses what is no list of hook points and functions.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(specs, Sequence) or isinstance(specs, str):
        raise TypeError(f"{argument} is {specs!r}; it must be a list of pairs (hook point, function)")
    for index, spec in enumerate(specs):
        if not isinstance(spec, list | tuple) or len(spec) != 2:
            raise TypeError(f"{argument}[{index}] is {spec!r}; it must be a pair (hook point, function)")
        if isinstance(spec[1], str | HookPoint):
            raise TypeError(f"{argument}[{index}] is {spec!r}: the hook point comes first, then the function")


def add_all(bridge: RunnableBridge, members: Sequence[tuple[HookPoint, Listener]]) -> None:
    """Adds hooks that stay: all of them, or none where one is refused."""
    added: list[tuple[HookPoint, Listener]] = []
    try:
        for hook, listener in members:
            bridge.wiring.add(hook, listener)
            added.append((hook, listener))
    except ValueError:
        for hook, listener in added:
            bridge.wiring.remove(hook, (listener,))
        raise


def clear_all_contexts(bridge: RunnableBridge) -> None:
    """Empties the `ctx` of every hook point."""
    for hook in bridge.wiring.points.values():
        hook.clear_context()
