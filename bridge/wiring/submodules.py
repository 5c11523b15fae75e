"""Hook points at any module of a model, by the module's path: `bridge.at`.

Input: a path such as ``model.layers.1.mlp.act_fn``, and whether its input or its output is meant.
Output: the declaration of a hook point that shows the tensor as the module has it.

One run of the model on sample inputs (three rows of eleven tokens) says what an adapter would
declare: whether the module runs, and how often; which hook points come before it; and which of the
tensor's axes are rows and positions, by their sizes. Nothing about the activation's meaning is
known or verified. The tensor is copied when it is read, because the model may write over it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adapters.inputs import CannotBeMade, sample_inputs
from adapters.observe.observe import (
    CallRecorder,
    ModuleCall,
    Recording,
    evaluating,
    outside_of_modes,
)
from adapters.points import (
    Border,
    Point,
    Site,
    call_number,
    module_at,
    module_path,
)
from adapters.views import Copied, FlatRows, View
from bridge.hooks.hooks import HookPoint
from bridge.modules import argument, element_of
from bridge.wiring.wiring import Wiring

#: The ends of the names of these hook points.
_ENDINGS: dict[str, str] = {"input": "hook_in", "output": "hook_out"}


class SubmoduleError(ValueError):
    """An error for a place in a model that cannot have a hook point; the message says why."""


class Place(NamedTuple):
    """A hook point at a module, and its place in the order of the computation.

    Attributes:
        point: its declaration.
        behind: the hook point that it follows; None: it comes first.
    """

    point: Point
    behind: HookPoint | None


def name_at(path: str, border: Border, key: int | str | None) -> str:
    """Return the name of the hook point at a module."""
    name = f"{path}.{_ENDINGS[border]}"
    return name if key is None else f"{name}_{key}"


def check_path(path: str, model: nn.Module) -> None:
    """Check that a model has a module at a path.

    Raises:
        SubmoduleError: it has none; the message names those that are near.
    """
    if not path or module_path(path) not in dict(model.named_modules(remove_duplicate=False)):
        raise SubmoduleError(_no_module(model, path))


def place_of(
    wiring: Wiring,
    recording: Recording,
    path: str,
    border: Border,
    key: int | str | None,
    axes: str | None,
) -> Place:
    """Return a hook point at a module.

    Args:
        wiring: the model's hook points.
        recording: a run of the model, from `recorded`.
        path, border, key, axes: as for `TransformerBridge.at`.

    Raises:
        SubmoduleError: see there.
    """
    site = Site(path, border, key)
    call = _call_of(recording, module_at(wiring.model, path), path)
    x = _tensor_of(call, site)
    behind = _last_before(wiring, recording, call, border)
    if behind is None:
        depth, stack = -1, ""
    else:
        depth, stack = _block_of(wiring, recording, call, behind)
    streams = _streams(wiring, recording)
    rows = _rows_of(x, streams) if axes is None else None
    axes = axes or _axes_of(x, streams)
    view: View = Copied(View())
    if rows is not None:
        axes, view = f"{' '.join(_row_axes(rows))} d", Copied(FlatRows())
    elif len(axes.split()) != x.ndim:
        raise SubmoduleError(
            f"axes={axes!r} names {len(axes.split())} axes, and the tensor at {path} has the shape"
            f" {list(x.shape)}"
        )
    sources = () if rows is None else (rows.point.site,)
    point = Point(
        name_at(path, border, key),
        site,
        view,
        axes,
        depth,
        "extra",
        sources=sources,
        stack=stack,
        declared=False,
    )
    return Place(point, behind)


def recorded(wiring: Wiring, path: str, inputs: Mapping[str, Tensor] | None) -> Recording:
    """Run the model on sample inputs, and return the calls of its modules.

    Args:
        wiring: the model's hook points.
        path, inputs: as for `TransformerBridge.at`.

    Raises:
        SubmoduleError: there is no such module, the model is spread over processes, or it cannot
            run.
    """
    model = wiring.model
    check_path(path, model)
    if wiring.sharing is not None:
        raise SubmoduleError(
            f"the model is spread over processes, and which part of {path} each of them has is not"
            " known: only the adapter's hook points are available"
        )
    try:
        arguments = sample_inputs(model, inputs)
    except CannotBeMade as error:
        raise SubmoduleError(
            f"{path} is found in a run, and the model cannot run: {error}"
        ) from error
    recorder = CallRecorder(model.named_modules(), copies=False)
    with (
        evaluating(model),
        outside_of_modes(model),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        recorder as recording,
    ):
        model(**arguments)
    return recording


def _call_of(recording: Recording, module: nn.Module, path: str) -> ModuleCall:
    """Return the call of a module that a path means.

    Raises:
        SubmoduleError: there is none, or there are several.
    """
    calls = _calls(recording, module)
    number = call_number(path) or 0
    if len(calls) > 1 and call_number(path) is None:
        raise SubmoduleError(
            f"{path} runs {len(calls)} times in a run: name one call, {path}@0 to @{len(calls) - 1}"
        )
    if number >= len(calls):
        often = f"runs only {len(calls)} times" if calls else "does not run"
        raise SubmoduleError(f"{path} {often} when the model runs on three rows of eleven tokens")
    return calls[number]


def _call_at(wiring: Wiring, recording: Recording, site: Site) -> ModuleCall | None:
    """Return the call of the module at a site that the site's path means; None if there is none."""
    calls = _calls(recording, wiring.finder(site.path).module)
    number = call_number(site.path) or 0
    return calls[number] if number < len(calls) else None


def _calls(recording: Recording, module: nn.Module) -> list[ModuleCall]:
    return [call for call in recording.calls if call.module is module]


def _tensor_of(call: ModuleCall, site: Site) -> Tensor:
    """Return the tensor at a site in one call.

    Raises:
        SubmoduleError: there is none.
    """
    x: Any = None
    with suppress(KeyError, IndexError, TypeError, ValueError):  # it is refused below
        if site.kind == "input":
            x = argument(call.module, call.args, call.kwargs, site.key)[0]
        elif not isinstance(call.output, Tensor):
            x = element_of(call.output, int(site.key or 0))
        elif site.key is None:
            x = call.output
    if isinstance(x, Tensor):
        return x
    if site.kind == "input":
        shown = [f"a {type(x).__name__}" for x in call.args]
        shown += [f"{name} (a {type(x).__name__})" for name, x in call.kwargs.items()]
        has = f"is called with {', '.join(shown) or 'no arguments'}"
    else:
        number = f" of {len(call.output)}" if isinstance(call.output, tuple | list) else ""
        has = f"returns a {type(call.output).__name__}{number}"
    raise SubmoduleError(
        f"{site.path} {has}: key={site.key!r} is no tensor there. It names an argument, or the"
        " index in the output"
    )


def _last_before(
    wiring: Wiring, recording: Recording, call: ModuleCall, border: Border
) -> HookPoint | None:
    """Return the last hook point that a run reaches before a border of a call, or None."""
    time = call.start if border == "input" else call.end
    before: list[HookPoint] = []
    for hook in wiring.points.values():
        site = hook.point.site
        other = _call_at(wiring, recording, site) if site.kind in _ENDINGS else None
        if other and (other.start if site.kind == "input" else other.end) <= time:
            before.append(hook)
    return max(before, key=lambda hook: hook.order, default=None)


def _block_of(
    wiring: Wiring, recording: Recording, call: ModuleCall, behind: HookPoint
) -> tuple[int, str]:
    """Return the depth and the stack of a call, inside a block's or outside of all."""
    for name, hook in wiring.points.items():
        if name.endswith("hook_resid_pre"):
            block = _call_at(wiring, recording, hook.point.site)
            if block and block.start <= call.start and call.end <= block.end:
                return hook.point.depth, hook.point.stack
    return behind.point.depth + bool(behind.point.stack), ""


def _streams(wiring: Wiring, recording: Recording) -> dict[HookPoint, torch.Size]:
    """Return the shape of the residual stream before each stack, by the hook point there."""
    streams = {}
    for name, hook in wiring.points.items():
        if name.endswith(".0.hook_resid_pre") and hook.view.identity:
            call = _call_at(wiring, recording, hook.point.site)
            if call and (x := _tensor_of(call, hook.point.site)).ndim == 3:
                streams[hook] = x.shape
    return streams


def _row_axes(stream: HookPoint) -> list[str]:
    """Return the axes of rows and positions of a stream."""
    return stream.point.axes.split()[:2]


def _rows_of(x: Tensor, streams: Mapping[HookPoint, torch.Size]) -> HookPoint | None:
    """Return the stream with as many positions in all rows as the tensor has rows; None if the
    tensor has other axes.
    """
    if x.ndim != 2:
        return None
    return next((hook for hook, shape in streams.items() if len(x) == shape[:2].numel()), None)


def _axes_of(x: Tensor, streams: Mapping[HookPoint, torch.Size]) -> str:
    """Return names of a tensor's axes, by their sizes in the run.

    Args:
        x: the tensor.
        streams: see `_streams`.
    """
    rows = {shape[0] for shape in streams.values()}
    lengths = {shape[1]: _row_axes(hook)[1] for hook, shape in streams.items()}
    names = [lengths.get(size, "d") for size in x.shape]
    if x.ndim and x.shape[0] in rows:
        names[0] = "batch"
    if len(names) > 1 and names[-1] == names[-2] != "d":
        pos = names[-1]
        names[-2:] = [pos.replace("pos", "query_pos"), pos.replace("pos", "key_pos")]
    return _numbered(names)


def _numbered(names: Iterable[str]) -> str:
    """Join names of axes; several that are ``d`` become ``d1``, ``d2``."""
    names = list(names)
    others = [axis for axis, name in enumerate(names) if name == "d"]
    if len(others) > 1:
        for number, axis in enumerate(others, start=1):
            names[axis] = f"d{number}"
    return " ".join(names)


def _no_module(model: nn.Module, path: str) -> str:
    """Return the error message for a path without a module."""
    parent = module_path(path)
    names = dict(model.named_modules(remove_duplicate=False))
    while parent not in names:
        parent = parent.rpartition(".")[0]
    children = [name for name, _ in names[parent].named_children()]
    inside = [name for name in names if name.endswith(f".{path}")]
    near = inside or get_close_matches(path, names, 3)
    return (
        f"the model has no module {path!r}; {parent or type(model).__name__} has"
        f" {', '.join(children) or 'no modules'}"
        + (f". Did you mean {' or '.join(near[:3])}?" if near else "")
    )
