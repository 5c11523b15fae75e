"""Starting and stopping a run at a layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bridge.hook_point import STATE
from bridge.modules import first_parameter


class StopRun(BaseException):
    """Leaves a forward pass at the layer that the run was to stop at. It never leaves `stopping_at`."""

    def __init__(self, residual: Tensor) -> None:
        self.residual = residual


_LOCK = threading.RLock()


class _Bypass:
    """Stands in for a block's forward: for the threads that skip the block, it hands the residual stream on."""

    def __init__(self, block: nn.Module, key: int | None, length: int) -> None:
        self.block, self.key, self.length = block, key, length
        self.own = block.__dict__.get("forward")
        self.original = block.forward
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.block not in STATE.skipping:
            return self.original(*args, **kwargs)
        hidden = args[0] if args else kwargs[first_parameter(type(self.block).forward)]
        if self.key is None:
            return hidden
        return tuple(hidden if i == self.key else None for i in range(self.length))


@contextmanager
def skipping(blocks: list[nn.Module], key: int | None, length: int) -> Iterator[None]:
    """Makes this thread's runs pass over some blocks.

    Args:
        blocks: the blocks.
        key: which element of a block's output is the residual stream (None: the output itself).
        length: how many elements a tuple output has.
    """
    with _LOCK:
        for block in blocks:
            bypass = block.__dict__.get("forward")
            if not isinstance(bypass, _Bypass):
                bypass = _Bypass(block, key, length)
                block.forward = bypass  # type: ignore[assignment, method-assign]
            bypass.users += 1
    before = STATE.skipping
    STATE.skipping = before | frozenset(blocks)
    try:
        yield
    finally:
        STATE.skipping = before
        with _LOCK:
            for block in blocks:
                bypass = block.__dict__["forward"]
                bypass.users -= 1
                if not bypass.users:
                    if bypass.own is None:
                        del block.__dict__["forward"]
                    else:
                        block.forward = bypass.own


@contextmanager
def starting_from(block: nn.Module, residual: Tensor, start: int) -> Iterator[None]:
    """Makes this thread's next run give `residual` to a block, whatever came before it.

    Args:
        block: the block.
        residual: ``[batch, pos, d_model]``.
        start: its index; hook points before it are not shown anything.
    """
    owner = STATE.owner

    def replace(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if STATE.owner is not owner:
            return None
        if args:
            return (residual, *args[1:]), kwargs
        return args, kwargs | {first_parameter(type(module).forward): residual}

    handle = block.register_forward_pre_hook(replace, with_kwargs=True, prepend=True)
    before, STATE.start_at = STATE.start_at, start
    try:
        yield
    finally:
        STATE.start_at = before
        handle.remove()


@contextmanager
def stopping_at(module: nn.Module) -> Iterator[list[Tensor]]:
    """Ends this thread's run where a module would be called; the list then holds the tensor that was to enter it.

    Args:
        module: a block, or what comes after the last one.
    """
    owner = STATE.owner
    found: list[Tensor] = []

    def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
        if STATE.owner is owner:
            raise StopRun(args[0] if args else kwargs[first_parameter(type(module).forward)])

    handle = module.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        yield found
    except StopRun as stopped:
        found.append(stopped.residual)
    finally:
        handle.remove()


def check_layers(start: int | None, stop: int | None, n_layers: int) -> tuple[int | None, int | None]:
    """The two layers as counted from the front.

    Args:
        start: the first block to run, or None; negative counts from the end. ``n_layers`` runs what follows the blocks.
        stop: the first block not to run, or None; likewise. ``n_layers`` stops after the last.
        n_layers: the number of blocks.

    Raises:
        ValueError: one is out of range, or `stop` is not after `start`.
    """

    def check(name: str, layer: int | None, last: int) -> int | None:
        if layer is None:
            return None
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise ValueError(f"{name} is {layer!r}; it must be a whole number")
        if not -n_layers <= layer <= last:
            raise ValueError(
                f"{name} is {layer}; this model has {n_layers} layers: it must be from {-n_layers} to {last}"
            )
        return layer + n_layers if layer < 0 else layer

    start, stop = check("start_at_layer", start, n_layers), check("stop_at_layer", stop, n_layers)
    if start is not None and stop is not None and stop < start:
        raise ValueError(f"stop_at_layer={stop} is before start_at_layer={start}")
    return start, stop


def placeholder(residual: Tensor) -> Tensor:
    """What stands in for the embeddings of a run that starts at a layer: its shape and type matter, not its values."""
    return torch.zeros_like(residual, requires_grad=False)
