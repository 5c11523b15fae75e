"""A Hugging Face model seen by plain torch hooks: nothing of the bridge runs here.

Only the names of the blocks are the declaration's. What enters and leaves them is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Edit = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Place:
    """Where a tensor is in a model.

    Attributes:
        path: the module; ``layers.0@2`` is its third call.
        side: what it is given, or what it returns.
        streams_first: its first axis counts streams, which are shown behind the positions.
    """

    path: str
    side: Literal["input", "output"]
    streams_first: bool = False


def _is_activation(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= 2


def _edited(values: Any, edit: Edit) -> Any:
    """Arguments, or what a module returned, with the first activation in them edited; None: as it
    was.
    """
    if _is_activation(values):
        return edit(values)
    if not isinstance(values, Mapping | tuple | list):
        return None
    items = list(values.items() if isinstance(values, Mapping) else enumerate(values))
    for key, value in items:
        if _is_activation(value):
            new = edit(value)
            if new is None:
                return None
            if isinstance(values, Mapping):
                return {**values, key: new}
            return type(values)(new if i == key else x for i, x in items)
    return None


def _of_streams(edit: Edit) -> Edit:
    def turned(x: Tensor) -> Tensor | None:
        new = edit(x.movedim(0, 2))
        return None if new is None else new.movedim(2, 0)

    return turned


@contextmanager
def editing(model: nn.Module, place: Place, edit: Edit) -> Iterator[None]:
    """Shows the activation at a place to a function while the block runs; what it returns takes its
    place.

    Args:
        model: the model.
        place: where.
        edit: from the activation to another, or None.
    """
    path, _, call = place.path.partition("@")
    module, calls = model.get_submodule(path), [0]
    edit = _of_streams(edit) if place.streams_first else edit

    def now() -> bool:
        calls[0] += 1
        return not call or calls[0] == int(call) + 1

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not now():
            return None
        if any(_is_activation(x) for x in args):
            new = _edited(args, edit)
            return None if new is None else (tuple(new), kwargs)
        new = _edited(kwargs, edit)
        return None if new is None else (args, dict(new))

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return _edited(output, edit) if now() else None

    if place.side == "input":
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def seen(
    model: nn.Module, places: Mapping[str, Place], run: Callable[[], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """What a run returns, and the activations at some places, by name. A place that is not reached
    is missing.

    Args:
        model: the model.
        places: by name.
        run: runs it.
    """
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name, place in places.items():

            def keep(x: Tensor, name: str = name) -> None:
                found.setdefault(name, x.detach().clone())

            stack.enter_context(editing(model, place, keep))
        output = run()
    return output, found


def outputs_inside(model: nn.Module, path: str, run: Callable[[], Tensor]) -> dict[Place, Tensor]:
    """What every module inside of a block is given and returns, in a run. One that runs several
    times is left out.

    Args:
        model: the model.
        path: the block; "" for the whole model.
        run: runs it.
    """
    block, at, call = path.partition("@")
    found: dict[Place, list[Tensor]] = {}
    with ExitStack() as stack, torch.no_grad():
        for name, _ in model.get_submodule(block).named_modules():
            for side in ("input", "output"):
                place = Place(f"{block}.{name}{at}{call}".removeprefix("."), side)

                def keep(x: Tensor, place: Place = place) -> None:
                    found.setdefault(place, []).append(x.detach().clone())

                if name:
                    stack.enter_context(editing(model, place, keep))
        run()
    return {place: xs[0] for place, xs in found.items() if len(xs) == 1}


def read_behind(model: nn.Module, blocks: Sequence[str], run: Callable[[], Tensor]) -> list[Tensor]:
    """What layers with a matrix are given that run behind the last of some blocks, in order.

    Args:
        model: the model.
        blocks: the paths of its blocks.
        run: runs it.
    """
    paths = {path.partition("@")[0] for path in blocks}
    inside = tuple(f"{path}." for path in paths)
    read: list[Tensor] = []
    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if name in paths:
                stack.callback(module.register_forward_hook(lambda *ran: read.clear()).remove)
            elif (
                not name.startswith(inside)
                and getattr(getattr(module, "weight", None), "ndim", 0) == 2
            ):
                stack.enter_context(
                    editing(model, Place(name, "input"), lambda x: read.append(x.detach().clone()))
                )
        run()
    return read
