"""Layer ranges: starting and stopping a run at a layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bridge.hooks.context import CURRENT, ForwardPass
from bridge.modules import argument, element_of, with_argument


class StopRun(BaseException):
    """An exception that ends a forward pass at a layer. It never leaves `stopping`."""

    def __init__(self, residual: Tensor) -> None:
        self.residual = residual


class GivenOutput:
    """A module's replacement output in a run, returned without calling it.

    Attributes:
        value: the returned value.
        used: whether the model has reached it.
    """

    def __init__(self, value: object) -> None:
        self.value = value
        self.used = False


_LOCK = threading.RLock()


_CALL = "_compiled_call_impl"


class _Bypass:
    """A wrapper around a block's call (including its torch hooks) that returns the block's input or
    another residual stream.

    It is stored where ``block.compile()`` stores compiled code, which torch excludes from every
    copy of a module.
    """

    def __init__(self, block: nn.Module, key: int | None, length: int) -> None:
        self.block = block
        self.key = key
        self.length = length
        self.own = block.__dict__.get(_CALL)
        self.original: Callable[..., Any] = block._call_impl if self.own is None else self.own
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = CURRENT.get().run
        if run is None:
            return self.original(*args, **kwargs)
        hidden: object = run.entering.get(self.block)
        if self.block not in run.skipped:
            if isinstance(hidden, Tensor):  # the first block that runs
                _, place = argument(self.block, args, kwargs, None)
                args, kwargs = with_argument(args, kwargs, place, hidden)
            return self.original(*args, **kwargs)
        if isinstance(hidden, GivenOutput):
            hidden.used = True
            return hidden.value
        if hidden is None:
            hidden = argument(self.block, args, kwargs, None)[0]
        if self.key is None:
            return hidden
        # RWKV passes a list of every block's state from block to block.
        rest = [kwargs.get("state"), None]
        return tuple(hidden if i == self.key else rest[i > 1] for i in range(self.length))


@contextmanager
def starting(
    run: ForwardPass,
    blocks: list[nn.Module],
    start: int,
    residual: Tensor,
    key: int | None,
    length: int,
) -> Iterator[None]:
    """Skip the first blocks of a run, and pass a residual stream to the next block or the head.

    Args:
        run: the run.
        blocks: all blocks.
        start: the first block that runs.
        residual: ``[batch, pos, d_model]``.
        key: the index of the residual stream in a block's output tuple (None: the output itself).
        length: the length of that tuple.
    """
    with (
        bypassing(run, blocks[:start], key, length),
        _standing(blocks[start : start + 1], key, length),
    ):
        # The model may add a term between two blocks (image columns): the given stream is the next
        # block's input.
        run.entering = dict.fromkeys(blocks[max(0, start - 1) : start + 1], residual)
        yield


@contextmanager
def bypassing(
    run: ForwardPass, blocks: list[nn.Module], key: int | None, length: int
) -> Iterator[None]:
    """Skip blocks that a run has not reached: each returns its input.

    Args:
        run, blocks, key, length: as for `starting`.
    """
    with _standing(blocks, key, length):
        run.skipped |= frozenset(blocks)
        yield


@contextmanager
def _standing(blocks: list[nn.Module], key: int | None, length: int) -> Iterator[None]:
    with _LOCK:
        for block in blocks:
            bypass = block.__dict__.get(_CALL)
            if not isinstance(bypass, _Bypass):
                bypass = _Bypass(block, key, length)
                block.__dict__[_CALL] = bypass
            bypass.users += 1
    try:
        yield
    finally:
        with _LOCK:
            for block in blocks:
                bypass = block.__dict__[_CALL]
                bypass.users -= 1
                if not bypass.users:
                    if bypass.own is None:
                        del block.__dict__[_CALL]
                    else:
                        block.__dict__[_CALL] = bypass.own


@contextmanager
def stopping(
    run: ForwardPass, block: nn.Module, after: bool, key: int | None
) -> Iterator[list[Tensor]]:
    """End a run before or after a block; the yielded list then holds the residual stream there.

    Args:
        run: the run.
        block: the block.
        after: end after the block, with its output; False: before it, with its input.
        key: the index of the residual stream in its output tuple (None: the output itself).
    """
    residuals: list[Tensor] = []

    def before_it(module: nn.Module, args: Any, kwargs: Any) -> None:
        if CURRENT.get().run is run:
            raise StopRun(argument(module, args, kwargs, None)[0])

    def after_it(module: nn.Module, args: Any, output: Any) -> None:
        if CURRENT.get().run is run:
            raise StopRun(output if isinstance(output, Tensor) else element_of(output, key or 0))

    if after:
        handle: RemovableHandle = block.register_forward_hook(after_it)
    else:
        handle = block.register_forward_pre_hook(before_it, with_kwargs=True, prepend=True)
    try:
        yield residuals
    except StopRun as stopped:
        residuals.append(stopped.residual)
    finally:
        handle.remove()


def check_layers(
    start: int | None, stop: int | None, n_layers: int
) -> tuple[int | None, int | None]:
    """Return both layers, counted from the front.

    Args:
        start: the first block to run, or None; negative counts from the end. ``n_layers`` runs only
            the modules after the blocks.
        stop: the first block not to run, or None; likewise. ``n_layers`` stops after the last.
        n_layers: the number of blocks.

    Raises:
        TypeError: one is not an integer.
        ValueError: one is out of range, or `stop` is not after `start`.
    """

    def check(name: str, layer: int | None) -> int | None:
        if layer is None:
            return None
        if type(layer) is not int:
            raise TypeError(f"{name} is {layer!r}; it must be a whole number")
        if not -n_layers <= layer <= n_layers:
            raise ValueError(
                f"{name} is {layer}; this model has {n_layers} layers: it must be from {-n_layers}"
                f" to {n_layers}"
            )
        return layer + n_layers if layer < 0 else layer

    start = check("start_at_layer", start)
    stop = check("stop_at_layer", stop)
    if start is not None and stop is not None and stop < start:
        raise ValueError(f"stop_at_layer={stop} is before start_at_layer={start}")
    return start, stop


def placeholder(residual: Tensor, embedding: nn.Module | None) -> Tensor:
    """Return stand-ins for the embeddings of a run that starts at a layer; their values do not
    matter.

    Args:
        residual: ``[batch, pos, d_model]``.
        embedding: the token embedding, whose width may differ.
    """
    table = getattr(embedding, "weight", None)
    width = table.shape[-1] if isinstance(table, Tensor) and table.ndim == 2 else residual.shape[-1]
    return residual.new_zeros((*residual.shape[:-1], width))
