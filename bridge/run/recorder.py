"""Recording activations and their gradients during one run."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from adapters.views import Args, Call, Deferred, Kwargs
from adapters.views.views import NO_CALL
from bridge.arguments import (
    TokenPositions,
    check_positive,
    positions_of,
    shown,
    without_batch_axis,
)
from bridge.hooks.context import CURRENT, Listener, Scope, of_the_next_run
from bridge.hooks.hooks import HookPoint
from bridge.hooks.parts import KeptHeads, rows_within
from bridge.rows import token_axis
from bridge.wiring.reading_plan import ReadSite
from bridge.wiring.wiring import Wiring

#: A tuple is a range, ``(start, stop)`` or ``(start, stop, step)``, as in the methods of a cache; a
#: list holds indices.
PosSlice = int | slice | tuple[int | None, ...] | Sequence[int] | TokenPositions | None


_AXES = ("pos", "decoder_pos", "key_pos", "decoder_key_pos")


class ActivationRecorder:
    """A recorder of selected hook points in one run, or at each step of a generation
    (`StepRecorder`).

    Args:
        points: the hook points.
        pos_slice: the positions to keep.
        device: the device on which to keep activations.
        gradients: keep gradients too.
        check: raise an error if a point requested by name does not run.
        everything: whether these are all points of an unfiltered cache. Derived activations are
            then computed on request; otherwise they are computed in the run, so that no larger
            tensor is kept for them.
        heads: by hook point, the heads to keep, if not all.
    """

    #: Whether activations may be kept without a copy, or deferred where possible.
    as_shown = True

    def __init__(
        self,
        points: Sequence[HookPoint],
        pos_slice: PosSlice = None,
        device: torch.device | str | None = None,
        gradients: bool = False,
        check: bool = True,
        everything: bool = False,
        heads: Mapping[HookPoint, KeptHeads] | None = None,
    ) -> None:
        if pos_slice is not None:
            pos_slice = checked_pos_slice(pos_slice)
        self.heads = heads or {}
        self.points = points
        self.pos_slice = pos_slice
        self.device = None if device is None else torch.device(device)
        self.gradients = gradients
        self.check = check
        self.everything = everything
        #: Whether only some heads or rows of an activation are kept, or some at a time.
        self.partial = pos_slice is not None or bool(heads)
        self.values: dict[str, Any] = {}
        self.versions: list[tuple[str, Tensor, int]] = []
        self._edges: dict[HookPoint, tuple[GradientEdge, Tensor]] = {}
        self._copied_from: set[torch.device] = set()

    @contextmanager
    def attached(self, wiring: Wiring) -> Iterator[Scope]:
        """Record the next run inside the ``with`` statement, which sees the given scope."""
        scope = Scope()
        as_shown = self.as_shown and self.pos_slice is None and self.device is None
        read = self.read
        if as_shown:
            read = self._keep if self.everything else self._keep_compact
        listener = Listener(
            "read",
            read,
            scope,
            deferrable=as_shown,
            optional=self.everything,
            partial=self.partial,
        )
        keep_all = self._keep_all if as_shown and not self.heads else self._read_all
        with wiring.reading(self.points, listener, keep_all), of_the_next_run(scope):
            if not self.gradients:
                yield scope
                return
            edges = [(point, Listener("edge", self._edge, scope)) for point in self.points]
            wiring.attach_members(edges, scope)
            try:
                yield scope
            finally:
                wiring.detach_scope(scope)

    def _keep(self, act: Tensor | Deferred, hook: HookPoint) -> None:
        """Keep an activation unchanged. This is a hot path: it runs hundreds of times a run."""
        self.values[hook.name] = act if isinstance(act, Deferred) else self.noted(act, hook)

    def noted(self, act: Tensor, hook: HookPoint) -> Tensor:
        """Detach an activation from its graph, and register it so that `check_unchanged` detects
        later writes."""
        act = act.detach() if act.requires_grad else act
        if act.is_inference():  # later writes to it are not counted
            return act.clone()
        self.versions.append((hook.name, act, act._version))
        return act

    def _keep_all(
        self, place: ReadSite, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs
    ) -> None:
        """Keep the activations of the points at a site without editors. This is a hot path."""
        x = x.detach() if x.requires_grad else x
        values, now = self.values, place.points
        if not (inference := x.is_inference()):  # otherwise later writes to it are not counted
            for name in place.names:
                values[name] = x
                self.versions.append((name, x, x._version))
            now = place.at_once if self.everything else place.views
            if not place.views:
                return
        call = Call(module, args, kwargs).without_graph() if place.contextual else NO_CALL
        if self.everything and not inference:
            for name, view in place.waiting:
                values[name] = Deferred(view, x, call)
        if now:
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                for point in now:
                    self._keep(point.view.get(x, call), point)

    def _read_all(
        self, place: ReadSite, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs
    ) -> None:
        """Keep activations as `_keep_all` does, but only some positions or heads, or on another
        device."""
        call = Call(module, args, kwargs) if place.contextual else NO_CALL
        x = x.detach() if x.requires_grad else x
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            for point in place.points:
                self.read(x if point.view.identity else point.view.get(x, call), point)

    def _keep_compact(self, act: Tensor | Deferred, hook: HookPoint) -> None:
        """Keep an activation, or its selected heads, without any larger tensor it is computed
        from."""
        act = self.heads[hook].of(act) if hook in self.heads else act
        if isinstance(act, Deferred) and (act.keeps_more or not act.waits):
            alone = act.part(hook.name, None, None)
            act = act.value(hook.name) if alone is None else alone
        self._keep(act, hook)

    def read(self, act: Tensor | Deferred, hook: HookPoint) -> None:
        """Keep the requested part of an activation, on the requested device."""
        value = act.detach() if isinstance(act, Tensor) and act.requires_grad else act
        value = self.heads[hook].of(value) if hook in self.heads else value
        value = picked_positions(value, self.pos_slice, hook)
        if self.device is not None and value.device != self.device:
            self.values[hook.name] = self._copy(value, self.device)
        else:
            self._keep(value, hook)

    def _copy(self, x: Tensor, device: torch.device) -> Tensor:
        """Copy asynchronously, from an accelerator into pinned host memory.

        On the host, the copy must not be read before `finish`, which waits for it.
        """
        if x.device.type != "cuda" or device.type != "cpu":
            return x.to(device, non_blocking=True)
        self._copied_from.add(x.device)
        return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)

    def _edge(self, act: Tensor, hook: HookPoint) -> None:
        # Keep the first: of several separate consumers (see `Point.separate_consumers`), it is the
        # query.
        if act.requires_grad and hook not in self._edges:
            self._edges[hook] = (get_gradient_edge(act), act.detach())

    def backward(self, loss: Any) -> None:
        """Add the gradients of a loss, without touching the parameters' own.

        Raises:
            ValueError: the run did not return a single number, or gradients are switched off.
        """
        if isinstance(loss, tuple):
            loss = loss[-1]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                'incl_bwd needs a single number to run backward from: use return_type="loss"'
            )
        if not loss.requires_grad:
            raise ValueError("incl_bwd needs gradients, and they are switched off (torch.no_grad?)")
        edges = list(self._edges.items())
        if not edges:
            names = ", ".join(hook.name for hook in self.points[:3])
            raise ValueError(f"none of the chosen hook points has a gradient: {names}")
        gradients = torch.autograd.grad(loss, [edge for _, (edge, _) in edges], allow_unused=True)
        for (hook, (_, act)), gradient in zip(edges, gradients, strict=True):
            gradient = torch.zeros_like(act) if gradient is None else gradient
            gradient = picked_positions(gradient, self.pos_slice, hook)
            if self.device is not None:
                gradient = self._copy(gradient, self.device)
            self.values[f"{hook.name}_grad"] = gradient

    def finish(self, explicit: bool) -> dict[str, Any]:
        """Return the activations by canonical name, in the order of the hook points; some are
        `Deferred`.

        Args:
            explicit: whether the hook points were named one by one, so that each must be present.

        Raises:
            RuntimeError: one is missing, or was changed in place after it was recorded.
        """
        for device in self._copied_from:
            torch.cuda.current_stream(device).synchronize()
        self._copied_from.clear()
        if explicit and self.check:
            missing = [hook.name for hook in self.points if hook.name not in self.values]
            if missing:
                raise RuntimeError(
                    f"these hook points did not run on this input: {', '.join(missing)}"
                )
        self.check_unchanged()
        # The model may compute a head's keys before its query input is shown, for example.
        names = [hook.name for hook in self.points]
        values = {name: self.values[name] for name in names if name in self.values} | self.values
        if not self.heads:
            return values
        of_heads = {hook.name: kept.name for hook, kept in self.heads.items()}
        return {of_heads.get(name, name): value for name, value in values.items()}

    def check_unchanged(self) -> None:
        """Check that the kept activations were not written to since.

        Raises:
            RuntimeError: something was changed in place after it was recorded.
        """
        for name, value, version in self.versions:
            if value._version != version:
                raise RuntimeError(
                    f"{name} was changed in place after it was recorded, by the model or by a hook;"
                    " its adapter has to declare that it is to be copied"
                )


# --------------------------------------------------------------------------------------------------
# The positions of an activation that are kept.
# --------------------------------------------------------------------------------------------------


def checked_pos_slice(pos_slice: PosSlice) -> Any:
    """Return positions, checked.

    Raises:
        TypeError: they are no index, slice, list of indices or `TokenPositions`.
    """
    chosen, pos_slice = pos_slice, positions_of(pos_slice)
    if pos_slice is None or isinstance(chosen, slice | TokenPositions):
        return chosen
    positions = pos_slice if isinstance(pos_slice, list | tuple | range) else [pos_slice]
    for position in positions:
        if position is None and isinstance(pos_slice, tuple):
            continue  # an open end of a range
        if type(position) is not int:
            raise TypeError(
                f"pos_slice is {pos_slice!r}; it must be an index, a slice, or a list of indices"
            )
    return pos_slice


def check_positions_of_chat(positions: object, mask: Tensor | None) -> None:
    """Reject positions among a chat's own tokens if a row is left-padded: its tokens have others.

    Args:
        positions: the positions; only a `TokenPositions` is checked.
        mask: ``[row, token]``, 1 for tokens and 0 for padding; None: no padding.

    Raises:
        ValueError: they are such positions, and a row is left-padded.
    """
    if mask is None or not isinstance(positions, TokenPositions):
        return
    if bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError(
            f"{shown(positions)} counts a chat's own tokens, and a row is left-padded: run each"
            " chat alone, or pass padding_side='right'"
        )


def position_axis(hook: HookPoint) -> int | None:
    """Return the axis of an activation that counts positions (of queries), or None."""
    return _position_axis(hook.point.axes)


@functools.cache
def _position_axis(label: str) -> int | None:
    axes = label.split()
    return next((axes.index(axis) for axis in _AXES if axis in axes), None)


def picked_positions(x: Tensor | Deferred, pos_slice: PosSlice, hook: HookPoint) -> Tensor:
    """Copy the selected positions of an activation, so that the rest of it can be freed.

    Args:
        x: the activation, or a `Deferred` whose rows are positions, of which only the selected ones
            are computed.
        pos_slice: an index (which keeps the axis), a slice, a tuple ``(start, stop)``, or a list of
            indices; None: all. See `PosSlice`.
        hook: its hook point.

    Raises:
        IndexError: there is no such position.
        ValueError: positions of a chat, and a row is left-padded.
    """
    axis = position_axis(hook)
    if isinstance(x, Deferred):
        rows = axis is not None and axis == len(hook.point.axes.split()) - 2
        if not rows or pos_slice is None:
            x = x.value(hook.name)
        else:
            return x.value(hook.name, _index(pos_slice, x.n_rows, hook, x.x.device))
    if axis is None or pos_slice is None:
        return x
    length = x.shape[axis]
    # In one expression: this is a hot path.
    if type(pos_slice) is int and -length <= pos_slice < length:
        return x.narrow(axis, pos_slice % length, 1).clone()
    index = _index(pos_slice, length, hook, x.device)
    if isinstance(index, Tensor):
        return x.index_select(axis, index)
    start, stop, step = index.indices(length)
    if step == 1:
        return x.narrow(axis, start, stop - start).clone()
    return x[(slice(None),) * axis + (index,)].clone()


def _index(pos_slice: Any, length: int, hook: HookPoint, device: torch.device) -> slice | Tensor:
    """Return the index of the selected positions along an axis of a given length."""
    if isinstance(pos_slice, TokenPositions):
        run, axis = CURRENT.get().run, position_axis(hook)
        if run is not None and run.rows is not None and axis is not None:
            name = token_axis(hook.point.axes.split()[axis])
            check_positions_of_chat(pos_slice, run.rows.masks.get(name))
        pos_slice = pos_slice.positions
    if isinstance(pos_slice, tuple):
        pos_slice = slice(*pos_slice)
    if isinstance(pos_slice, slice):
        if not range(length)[pos_slice]:
            raise IndexError(
                f"pos_slice is {pos_slice}, which is none of the {length} positions of {hook.name}"
            )
        return pos_slice
    assert pos_slice is not None
    positions = [pos_slice] if isinstance(pos_slice, int) else list(pos_slice)
    for position in positions:
        if not -length <= position < length:
            raise IndexError(f"pos_slice is {pos_slice}; {hook.name} has {length} positions")
    if isinstance(pos_slice, int):
        return slice(pos_slice, (pos_slice + 1) or None)
    return torch.tensor([position % length for position in positions], device=device)


# --------------------------------------------------------------------------------------------------
# Activations that are passed to a callback, or kept by permanent hooks.
# --------------------------------------------------------------------------------------------------


def watching(
    wiring: Wiring,
    points: Sequence[HookPoint],
    callback: Callable[[Tensor, HookPoint], None],
    max_bytes: int | None = None,
) -> AbstractContextManager[Scope]:
    """Pass each activation of the next run to a callback as it is computed, and keep none.

    Args:
        wiring: the bridge's wiring.
        points: the hook points.
        callback: called as ``callback(activation, point)``; the activation is the model's own,
            detached.
        max_bytes: roughly how much memory scores and patterns may take; they are then passed in
            chunks of queries.
    """
    if not callable(callback):
        raise TypeError(f"callback is {callback!r}, which cannot be called")
    if max_bytes is not None:
        check_positive("max_bytes", max_bytes)
    return _Watcher(points, callback, max_bytes).attached(wiring)


class _Watcher(ActivationRecorder):
    """A recorder that keeps nothing; see `watching`."""

    as_shown = False

    def __init__(
        self,
        points: Sequence[HookPoint],
        callback: Callable[[Tensor, HookPoint], None],
        max_bytes: int | None,
    ) -> None:
        super().__init__(points)
        self._callback, self._max_bytes = callback, max_bytes
        self.partial = max_bytes is not None

    def read(self, act: Tensor | Deferred, hook: HookPoint) -> None:
        """Pass an activation to the callback, or its chunks, one after the other."""
        for piece in [act] if self._max_bytes is None else _pieces(act, hook, self._max_bytes):
            assert isinstance(piece, Tensor)  # nothing is deferred if no part is requested
            self._callback(piece.detach() if piece.requires_grad else piece, hook)


def _pieces(act: Tensor | Deferred, hook: HookPoint, max_bytes: int) -> Iterator[Tensor]:
    """Yield scores or a pattern in chunks of queries; anything else whole."""
    if not hook.point.axes.endswith("key_pos") or len(act.shape) != 4:
        yield act if isinstance(act, Tensor) else act.value(hook.name)
        return
    dtype = (act if isinstance(act, Tensor) else act.x).dtype
    rows = rows_within(max_bytes, act.shape, range(act.shape[1]), dtype)
    for first in range(0, act.shape[2], rows):
        piece = slice(first, first + rows)
        yield act[:, :, piece] if isinstance(act, Tensor) else act.value(hook.name, piece)


def caching_functions(
    cache: dict[str, Tensor],
    device: torch.device | str | None,
    remove_batch_dim: bool,
    pos_slice: PosSlice,
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return forward and backward hook functions that fill a dictionary (see
    `get_caching_hooks`).
    """
    pos_slice = checked_pos_slice(pos_slice)
    order: dict[str, int] = {}

    def keep(value: Tensor, hook: HookPoint, suffix: str) -> None:
        value = picked_positions(value.detach(), pos_slice, hook)
        value = value if device is None else value.to(device)
        if remove_batch_dim:
            value = without_batch_axis(value, hook.name)
        cache[hook.name + suffix] = value

    def forward(activation: Tensor, hook: HookPoint) -> None:
        is_new = hook.name not in cache
        keep(activation.clone() if hook.one_tensor else activation, hook, "")
        order[hook.name] = hook.order
        # In the order of the hook points, which may differ from the order of computation.
        if is_new:
            before = islice(reversed(cache), 1, None)
            later = [*takewhile(lambda name: order.get(name, -1) > hook.order, before)]
            for name in reversed(later):
                cache[name] = cache.pop(name)

    def backward(gradient: Tensor, hook: HookPoint) -> None:
        keep(gradient.clone(), hook, "_grad")

    forward.__dict__["in_run"] = True  # where the padding of the run is known
    return forward, backward


# --------------------------------------------------------------------------------------------------
# The amount of free memory.
# --------------------------------------------------------------------------------------------------


def free_memory(device: torch.device) -> int:
    """Return the number of free bytes on a device.

    Args:
        device: the device.

    Example:
        >>> import torch
        >>> from bridge.run.recorder import free_memory
        >>> free_memory(torch.device("cpu")) > 0
        True
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    facts = Path("/proc/meminfo")
    if facts.exists():
        lines = dict(line.split(":", 1) for line in facts.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
