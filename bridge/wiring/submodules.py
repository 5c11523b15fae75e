"""Hook points at any module of a model, by the module's path: `bridge.at`.

Input: a path such as ``model.layers.1.mlp.act_fn``, and whether its input or its output is meant.
Output: the declaration of a hook point that shows the tensor as the module has it.

One run of the model on sample inputs (three rows of eleven tokens) says what an adapter would
declare: whether the module runs, and how often; which hook points come before it; and which of the
tensor's axes are rows and positions, by their sizes. Nothing about the activation's meaning is
known or verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adapters.inputs import CannotBeMade, sample_inputs
from adapters.observe.observe import evaluating, outside_of_modes
from adapters.points import Border, Point, Site, Sites, call_number, is_inside, module_path
from adapters.views import Args, Copied, FlatRows, Kwargs, View
from bridge.hooks.hooks import HookPoint
from bridge.modules import argument, element_of
from bridge.wiring.wiring import Wiring

#: The ends of the names of these hook points.
_ENDINGS: dict[Border, str] = {"input": "hook_in", "output": "hook_out"}


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


@dataclass
class _Visit:
    """What one run shows of a site.

    Attributes:
        calls: how often its module ran.
        x: the tensor at the intended call, which the model may write to afterwards.
        version: torch's count of the writes to it before.
        behind: the last hook point that was reached before it.
    """

    calls: int = 0
    x: Tensor | None = None
    version: int = 0
    behind: HookPoint | None = None


@dataclass
class _Run:
    """A run on sample inputs.

    Attributes:
        wiring: the hook points of the model.
        site: the site to find.
        visit: what was seen there.
        last: the last hook point that was reached so far.
        streams: the hook point before each stack's first block, with the shape of the stream there.
    """

    wiring: Wiring
    site: Site
    visit: _Visit = field(default_factory=_Visit)
    last: HookPoint | None = None
    streams: dict[HookPoint, torch.Size] = field(default_factory=dict)

    def reach(self, hook: HookPoint, x: Any) -> None:
        """Note that a hook point was reached."""
        if self.last is None or hook.order > self.last.order:
            self.last = hook
        is_stream = hook.name.endswith(".0.hook_resid_pre") and hook.view.identity
        if is_stream and isinstance(x, Tensor) and x.ndim == 3:
            self.streams[hook] = x.shape

    def visit_site(self, x: Any) -> None:
        """Note a call of the module at the site."""
        number = call_number(self.site.path)
        if number is None or number == self.visit.calls:
            if not isinstance(x, Tensor):
                raise SubmoduleError(
                    f"the {self.site.kind} of {self.site.path} is {_kind_of(x)}, and no tensor:"
                    " key= names the argument, or the index in the output, that is one"
                )
            self.visit.x, self.visit.version = x.detach(), x._version
            self.visit.behind = self.last
        self.visit.calls += 1

    def attach(self, stack: ExitStack) -> None:
        """Attach torch hooks at all hook points that are inputs or outputs, and at the site."""
        for hook in self.wiring.points.values():
            site = hook.point.site
            if site.kind in _ENDINGS and call_number(site.path) is None:
                self._listen(stack, site, partial(self.reach, hook), optional=True)
        self._listen(stack, self.site, self.visit_site)

    def _listen(self, stack: ExitStack, site: Site, note: Any, optional: bool = False) -> None:
        module = self.wiring.finder(site.path).module

        def on_input(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
            note(_argument(module, args, kwargs, site, optional))

        def on_output(module: nn.Module, args: Args, output: Any) -> None:
            note(_element(output, site, optional))

        if site.kind == "input":
            handle = module.register_forward_pre_hook(on_input, with_kwargs=True)
        else:
            handle = module.register_forward_hook(on_output)
        stack.callback(handle.remove)


def name_at(path: str, border: Border, key: int | str | None) -> str:
    """Return the name of the hook point at a module."""
    name = f"{path}.{_ENDINGS[border]}"
    return name if key is None else f"{name}_{key}"


def place_of(
    wiring: Wiring,
    path: str,
    border: Border,
    key: int | str | None,
    axes: str | None,
    inputs: Mapping[str, Tensor] | None,
) -> Place:
    """Return a hook point at a module, from one run of the model on sample inputs.

    Args:
        wiring: the model's hook points.
        path, border, key, axes, inputs: as for `TransformerBridge.at`.

    Raises:
        SubmoduleError: see there.
    """
    model = wiring.model
    if module_path(path) not in dict(model.named_modules(remove_duplicate=False)) or not path:
        raise SubmoduleError(_no_module(model, path))
    if wiring.sharing is not None:
        raise SubmoduleError(
            f"the model is spread over processes, and which part of {path} each of them has is not"
            " known: only the adapter's hook points are available"
        )
    run = _Run(wiring, Site(path, border, key))
    try:
        arguments = sample_inputs(model, inputs)
    except CannotBeMade as error:
        raise SubmoduleError(
            f"{path} is found in a run, and the model cannot run: {error}"
        ) from error
    with evaluating(model), outside_of_modes(model), torch.no_grad(), ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        run.attach(stack)
        model(**arguments)
    return Place(_point(run, border, axes), run.visit.behind)


def _point(run: _Run, border: Border, axes: str | None) -> Point:
    """Return the declaration of the hook point at the visited site."""
    site, visit = run.site, run.visit
    if visit.x is None:
        ran = f"runs only {visit.calls} times" if visit.calls else "does not run"
        raise SubmoduleError(f"{site.path} {ran} when the model runs on {_ROWS}")
    if visit.calls > 1 and call_number(site.path) is None:
        raise SubmoduleError(
            f"{site.path} runs {visit.calls} times in a run: name one call,"
            f" {site.path}@0 to @{visit.calls - 1}"
        )
    first = next(iter(run.wiring.points.values()))
    block = _block_of(run.wiring, site.path)
    if block is not None:
        depth, stack = block.point.depth, block.point.stack
    else:
        last = (visit.behind or first).point
        depth, stack = last.depth + bool(last.stack), ""
    sources: Sites = ()
    view = View()
    if axes is None and (rows := _rows_of(visit.x, run.streams)) is not None:
        axes, view, sources = f"{_axes_shown(rows)} d", FlatRows(), (rows.point.site,)
    axes = _axes_of(visit.x, run.streams) if axes is None else axes
    if not sources and len(axes.split()) != visit.x.ndim:
        raise SubmoduleError(
            f"axes={axes!r} names {len(axes.split())} axes, and the tensor at {site.path} has the"
            f" shape {list(visit.x.shape)}"
        )
    if visit.x._version != visit.version:
        view = Copied(view)
    name = name_at(site.path, border, site.key)
    return Point(
        name, site, view, axes, depth, "extra", sources=sources, stack=stack, declared=False
    )


def _rows_of(x: Tensor, streams: Mapping[HookPoint, torch.Size]) -> HookPoint | None:
    """Return the stream with as many positions in all rows as the tensor has rows; None if the
    tensor has other axes.
    """
    if x.ndim != 2:
        return None
    return next((hook for hook, shape in streams.items() if len(x) == shape[:2].numel()), None)


def _axes_shown(stream: HookPoint) -> str:
    """Return the axes of rows and positions of a stream."""
    return " ".join(stream.point.axes.split()[:2])


def _axes_of(x: Tensor, streams: Mapping[HookPoint, torch.Size]) -> str:
    """Return names of a tensor's axes, by their sizes in the run.

    Args:
        x: the tensor.
        streams: see `_Run`.
    """
    rows = {shape[0] for shape in streams.values()}
    lengths = {shape[1]: _axes_shown(hook).split()[1] for hook, shape in streams.items()}
    names = [lengths.get(size, "d") for size in x.shape]
    if x.ndim and x.shape[0] in rows:
        names[0] = "batch"
    if len(names) > 1 and names[-1] == names[-2] != "d":
        pos = names[-1]
        names[-2:] = [pos.replace("pos", "query_pos"), pos.replace("pos", "key_pos")]
    others = [axis for axis, name in enumerate(names) if name == "d"]
    if len(others) > 1:
        for number, axis in enumerate(others, start=1):
            names[axis] = f"d{number}"
    return " ".join(names)


#: The sample inputs, in words.
_ROWS = "three rows of eleven tokens"


def _block_of(wiring: Wiring, path: str) -> HookPoint | None:
    """Return the `hook_resid_pre` of the block that a module lies in; None outside of all."""
    for name, hook in wiring.points.items():
        if name.endswith("hook_resid_pre") and is_inside(path, hook.point.site.path):
            return hook
    return None


def _argument(module: nn.Module, args: Args, kwargs: Kwargs, site: Site, optional: bool) -> Any:
    """Return the argument at a site.

    Raises:
        SubmoduleError: the module has no such argument, or it was not passed.
    """
    try:
        return argument(module, args, kwargs, site.key)[0]
    except (ValueError, KeyError, IndexError) as error:
        if optional:
            return None
        raise SubmoduleError(
            f"{site.path} is called without {site.key or 'an argument'}: its arguments are"
            f" {', '.join(_passed(args, kwargs))}, and key= names one of those with a name"
        ) from error


def _passed(args: Args, kwargs: Kwargs) -> Iterator[str]:
    """Yield descriptions of the arguments of a call."""
    if args:
        yield f"{len(args)} without a name"
    yield from kwargs


def _element(output: Any, site: Site, optional: bool) -> Any:
    """Return the element of an output at a site.

    Raises:
        SubmoduleError: the output has no such element.
    """
    if isinstance(output, Tensor):
        if optional or site.key is None:
            return output
        raise SubmoduleError(f"{site.path} returns one tensor: leave out key={site.key!r}")
    try:
        return element_of(output, int(site.key or 0))
    except (TypeError, ValueError, IndexError) as error:
        if optional:
            return None
        raise SubmoduleError(
            f"{site.path} returns {_kind_of(output)}, which has no element {site.key or 0}"
        ) from error


def _kind_of(x: Any) -> str:
    """Return a description of a value that is not a tensor."""
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    return "None" if x is None else type(x).__name__


def _no_module(model: nn.Module, path: str) -> str:
    """Return the error message for a path without a module."""
    parts = module_path(path).split(".")
    names = dict(model.named_modules(remove_duplicate=False))
    while parts and ".".join(parts) not in names:
        parts.pop()
    parent = ".".join(parts)
    children = [name for name, _ in names[parent].named_children()]
    return (
        f"the model has no module {path!r}; {parent or type(model).__name__} has"
        f" {', '.join(children) or 'no modules'}"
    )
