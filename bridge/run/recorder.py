"""Recording activations and their gradients during one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from adapters.views import Deferred
from bridge.hooks.hook_point import STATE, HookPoint, Listener
from bridge.run.wiring import Wiring

PosSlice = int | slice | Sequence[int] | None


def position_axis(hook: HookPoint) -> int | None:
    """Which axis of the activation counts positions (of queries), or None."""
    axes = hook.point.axes.split()
    return next(
        (axes.index(axis) for axis in ("pos", "decoder_pos", "key_pos", "decoder_key_pos") if axis in axes), None
    )


class Recorder:
    """Keeps what chosen hook points see in one run.

    Args:
        points: the hook points.
        pos_slice: which positions to keep.
        device: where to keep them.
        gradients: keep gradients too.
        check: every point that is asked for by name has to run.
    """

    def __init__(
        self,
        points: Sequence[HookPoint],
        pos_slice: PosSlice = None,
        device: torch.device | str | None = None,
        gradients: bool = False,
        check: bool = True,
    ) -> None:
        self.points = points
        self.pos_slice = pos_slice
        self.index = slice(pos_slice, (pos_slice + 1) or None) if isinstance(pos_slice, int) else pos_slice
        self.device = torch.device(device) if device is not None else None
        self.gradients = gradients
        self.check = check
        self.values: dict[str, Any] = {}
        self._versions: dict[str, tuple[Tensor, int]] = {}
        self._edges: dict[HookPoint, tuple[GradientEdge, Tensor]] = {}
        self._within = STATE.within

    @contextmanager
    def attached(self, wiring: Wiring) -> Iterator[None]:
        """Listens, for this thread's runs inside the ``with`` statement."""
        whole = self.index is None and self.device is None
        read = Listener("read", self._keep if whole else self._read, STATE.owner, lazy=whole)
        mine = (read, Listener("edge", self._edge, STATE.owner))
        try:
            wiring.listen(self.points, mine[: 1 + self.gradients])
            yield
        finally:
            wiring.forget(self.points, mine)

    def _keep(self, act: Tensor | Deferred, hook: HookPoint) -> None:
        """Keeps an activation as it is: this runs hundreds of times in one run."""
        if STATE.within != self._within:
            return  # of a run that a hook of this one started
        if isinstance(act, Deferred):
            self.values[hook.name] = act
            return
        self.values[hook.name] = act.detach() if act.requires_grad else act
        if not act.is_inference():
            self._versions[hook.name] = (act, act._version)

    def _read(self, act: Tensor, hook: HookPoint) -> None:
        if STATE.within != self._within:
            return
        value = act.detach() if act.requires_grad else act
        if self.index is not None:
            value = self._sliced(value, hook)
        if self.device is not None and value.device != self.device:
            self.values[hook.name] = value.to(self.device)  # a copy, which nothing can change
        else:
            self._keep(value, hook)

    def _sliced(self, value: Tensor, hook: HookPoint) -> Tensor:
        axis = position_axis(hook)
        if axis is None or self.index is None:
            return value
        index = self.index if isinstance(self.index, slice) else torch.as_tensor(self.index, device=value.device)
        if isinstance(self.pos_slice, int) and not -value.shape[axis] <= self.pos_slice < value.shape[axis]:
            raise IndexError(f"pos_slice is {self.pos_slice}; {hook.name} has {value.shape[axis]} positions")
        picked = value[(slice(None),) * axis + (index,)]
        return picked.clone()  # so that the rest of the activation can be freed

    def _edge(self, act: Tensor, hook: HookPoint) -> None:
        # The first is kept: where several read the point separately, that is the query (see `Point.branches`).
        if act.requires_grad and hook not in self._edges and STATE.within == self._within:
            self._edges[hook] = (get_gradient_edge(act), act.detach())

    def backward(self, loss: Any) -> None:
        """Adds the gradients of a loss, without touching the parameters' own.

        Raises:
            ValueError: the run did not return a single number, or gradients are switched off.
        """
        if isinstance(loss, tuple):
            loss = loss[-1]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError('incl_bwd needs a single number to run backward from: use return_type="loss"')
        if not loss.requires_grad:
            raise ValueError("incl_bwd needs gradients, and they are switched off (torch.no_grad?)")
        edges = list(self._edges.items())
        if not edges:
            names = ", ".join(hook.name for hook in self.points[:3])
            raise ValueError(f"none of the chosen hook points has a gradient: {names}")
        gradients = torch.autograd.grad(loss, [edge for _, (edge, _) in edges], allow_unused=True)
        for (hook, (_, act)), gradient in zip(edges, gradients, strict=True):
            gradient = torch.zeros_like(act) if gradient is None else gradient
            if self.index is not None:
                gradient = self._sliced(gradient, hook)
            self.values[f"{hook.name}_grad"] = gradient if self.device is None else gradient.to(self.device)

    def finish(self, explicit: bool) -> dict[str, Any]:
        """The activations, by canonical name; some of them a `Deferred`.

        Args:
            explicit: the hook points were named one by one: each of them has to be there.

        Raises:
            RuntimeError: one is not; or one was changed in place after it was recorded.
        """
        if explicit and self.check:
            missing = [hook.name for hook in self.points if hook.name not in self.values]
            if missing:
                raise RuntimeError(f"these hook points did not run on this input: {', '.join(missing)}")
        for name, (value, version) in self._versions.items():
            if value._version != version:
                raise RuntimeError(
                    f"{name} was changed in place after it was recorded, by the model or by a hook; "
                    "its adapter has to declare that it is to be copied"
                )
        return self.values


def caching_functions(
    cache: dict[str, Tensor], device: torch.device | str | None, remove_batch_dim: bool, pos_slice: PosSlice
) -> tuple[Any, Any]:
    """A forward and a backward hook function that fill a dictionary (see `get_caching_hooks`)."""
    recorder = Recorder((), pos_slice)

    def keep(value: Tensor, hook: HookPoint, suffix: str) -> None:
        value = recorder._sliced(value.detach(), hook)
        value = value if device is None else value.to(device)
        if remove_batch_dim:
            if value.shape[0] != 1:
                raise ValueError(f"cannot remove a batch axis of {value.shape[0]}: {hook.name} has {list(value.shape)}")
            value = value[0]
        cache[hook.name + suffix] = value

    def forward(activation: Tensor, hook: HookPoint) -> None:
        keep(activation, hook, "")

    def backward(gradient: Tensor, hook: HookPoint) -> None:
        keep(gradient.clone(), hook, "_grad")

    return forward, backward
