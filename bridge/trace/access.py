"""Asking a run for activations, by hook point, by module, by part of the bridge."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)

from adapters.feed_forward import width
from adapters.points import base_path, join, module_at
from bridge.hooks.context import ForwardPass, Generation, NamedPoint, OpenTrace, without_hooks
from bridge.hooks.hooks import HookPoint
from bridge.hooks.modules import first_parameter
from bridge.hooks.names import Names, UnknownHookError, suggestion
from bridge.interventions.operations import Index
from bridge.run.inputs import Input, Request, RunnableBridge, check_arguments
from bridge.run.recorder import watching
from bridge.run.run import PreparedPass, checked_layers, points_that_run
from bridge.trace.coroutine import assigned
from bridge.trace.edit import BodyActivations
from bridge.trace.stops import Asked, PointPart, Stop, Stops

#: The hook point at which the tensor that a part is given, or returns, is seen.
_AT_POINT = {"input": "hook_in", "output": "hook_out"}
ModuleInputs = tuple[tuple[Any, ...], dict[str, Any]]


class Access(OpenTrace, BodyActivations):
    """What the body of a trace asks for.

    Args:
        bridge: the bridge.
        stops: of its run.

    Attributes:
        bridge, stops: likewise.
    """

    def __init__(self, bridge: RunnableBridge, stops: Stops) -> None:
        self.bridge, self.stops = bridge, stops

    def pass_of(self, point: NamedPoint) -> tuple[ForwardPass | None, Generation | None] | None:
        """The pass, and the generation, whose activations it shows; None: the hook point is of another bridge."""
        return self.shows if self.bridge.wiring.points.get(point.name) is point else None

    @property
    def shows(self) -> tuple[ForwardPass | None, Generation | None]:
        """The pass, and the generation, whose activations it shows now."""
        raise NotImplementedError

    def reach(self, asked: Asked) -> Stop:
        """Lets the model go on to what is asked for."""
        return self.stops.reach(asked)

    def __getitem__(self, name: str) -> Tensor:
        """The activation at a hook point: the model goes on until it comes there, and waits.

        The model sees what is changed in it in place before anything later is asked for.

        Args:
            name: a name or alias.

        Raises:
            UnknownHookError: no hook point has this name.
            OutOfStepError: the model has passed it, or did not come to it.
        """
        found: Tensor = self.reach(self.bridge.names.find(name)).value
        return found

    def __setitem__(self, name: str, value: Tensor) -> None:
        """Puts a tensor in the place of an activation.

        Args:
            name: a name or alias.
            value: of the same shape.

        Raises:
            TypeError: it is no tensor.
            ValueError: it has another shape, or is on another device.
        """
        hook = self.bridge.names.find(name)
        stop = self.reach(hook)
        assigned(value, stop.value, hook)
        stop.replace(value)

    def part(self, name: str, *, heads: Index = None, queries: Index = None, keys: Index = None) -> Tensor:
        """Some heads, queries or keys of an activation: of scores and patterns no others are made.

        The model sees what is changed in them in place before anything later is asked for, as of a whole activation;
        `grad` of the name is then that of the part. (All are made where the attention's own queries or keys were asked
        for before, which are inside of it.)

        Args:
            name: a name or alias.
            heads, queries, keys: as for `bridge.interventions.Touching`; all axes stay.

        Raises:
            UnknownHookError: no hook point has this name.
            ValueError: nothing is chosen, or the activation has no such axis.
            OutOfStepError: the model has passed it, is there for another part of it or for the whole, or did not come
                to it.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> with bridge.trace("Mary and John") as run:
            ...     head = run.part("blocks.2.attn.hook_pattern", heads=3)
            ...     head *= 0.5
            >>> head.shape
            torch.Size([1, 1, 4, 4])
        """
        chosen = {"heads": heads, "queries": queries, "keys": keys}
        found: Tensor = self.reach(PointPart(self.bridge.names.find(name), chosen)).value
        return found

    def module(self, module: str | nn.Module) -> TracedModule:
        """A module of the original model, whose `output`, `input` and `inputs` can be asked for.

        Args:
            module: its path in the original model (``transformer.h.5``), or the module itself.

        Raises:
            ValueError: the model has no such module.
        """
        return TracedModule(self, self._path_of(module))

    def _path_of(self, module: str | nn.Module) -> str:
        model = self.bridge.original_model
        if isinstance(module, nn.Module):
            for path, other in model.named_modules():
                if other is module:
                    return path
            raise ValueError(f"this {type(module).__name__} is no module of the model that is traced")
        if not isinstance(module, str):
            raise TypeError(f"module is {module!r}; it must be a path, such as 'transformer.h.5', or a module")
        try:
            module_at(model, module)
        except AttributeError:
            paths = [path for path, _ in model.named_modules()]
            raise ValueError(f"the model has no module {module!r}.{suggestion(module, paths)}") from None
        return module

    # The parts of the bridge.

    def seen_of_part(self, part: str, what: str) -> Any:
        """What a part of the bridge is given or returns: at its hook point where it has one, else its module's."""
        if (hook := self._hook_of(part, what)) is not None:
            return self[hook]
        found = getattr(self.module(self._module_of(part)), what)
        return _first_tensor(found, part) if what == "output" else found

    def set_for_part(self, part: str, what: str, value: Any) -> None:
        """Replaces it."""
        if (hook := self._hook_of(part, what)) is not None:
            self[hook] = value
        else:
            setattr(self.module(self._module_of(part)), what, value)

    def leave_out(self, path: str, value: Any) -> None:
        """Lets a module return a value in place of being called.

        Raises:
            TypeError: not in a generation.
        """
        raise TypeError(f"{path} cannot be skipped in a generation: assign to its output at each step")

    def _is_all_of(self, path: str, part: str) -> bool:
        """Whether nothing of a part is at another module: OPT's MLP is two, and its last one is given neurons."""
        return all(
            hook.point.site.path == path
            for name, hook in self.bridge.names.points.items()
            if name.startswith(part + ".")
        )

    def _hook_of(self, part: str, what: str) -> str | None:
        try:
            return self.bridge.names.find(f"{part}.{_AT_POINT[what]}").name if what in _AT_POINT else None
        except UnknownHookError:
            return None

    def _module_of(self, part: str) -> str:
        """The path of the module that a part of the bridge is.

        Raises:
            ValueError: it is none. (An AttributeError would become that of a name which is not there.)
        """
        base = base_path(self.bridge.original_model)
        for stack in self.bridge.architecture.stacks:
            name, _, rest = part.partition(".")
            if name == stack.name and rest:
                index, _, inside = rest.partition(".")
                block = join(base, stack.place_of(int(index)))
                paths = stack.block_at(int(index)).module_paths
                if not inside and not stack.block_at(int(index)).ends:
                    return block
                if not inside:
                    break
                if inside in paths:
                    return join(block, paths[inside])
        for kind in _AT_POINT:
            hook = self._hook_of(part, kind)
            site = None if hook is None else self.bridge.names.find(hook).point.site
            if site is not None and site.kind == kind and self._is_all_of(site.path, part):
                return site.path
        raise ValueError(
            f"{part} is no module of its own in {type(self.bridge.core).__name__}; ask for hook points in it, or for "
            "a module by its path: run.module(path)"
        )


class TracedModule:
    """A module of the original model in a trace.

    Args:
        access: asks for it.
        path: of the module.
    """

    def __init__(self, access: Access, path: str) -> None:
        self._access, self.path = access, path

    def __repr__(self) -> str:
        return f"TracedModule({self.path})"

    def _stop(self, what: str) -> Stop:
        return self._access.reach((self.path, what))

    @property
    def output(self) -> Any:
        """What the module returns, as it returns it: a tensor, or a tuple with the model's own elements."""
        return self._stop("output").value

    @output.setter
    def output(self, value: Any) -> None:
        stop = self._stop("output")
        _check_like(value, stop.value, f"{self.path}.output")
        stop.replace(value)

    @property
    def outputs(self) -> Any:
        """All that the module returns: the same as `output`."""
        return self.output

    @outputs.setter
    def outputs(self, value: Any) -> None:
        self.output = value

    def skip(self, value: Any) -> None:
        """Leaves the module out of this run: it returns `value`, and nothing in it is computed.

        Args:
            value: all that the module would return: a tensor, or a tuple with the model's own elements.

        Raises:
            TypeError: it is no module that is called, or the trace is a generation.
            ValueError: a hook point in it is captured, or has a hook.
            OutOfStepError: at the end of the block, where the model had come to it before.
        """
        self._access.leave_out(self.path, value)

    @property
    def inputs(self) -> ModuleInputs:
        """All that the module is called with: its positional arguments, and those with names."""
        found: ModuleInputs = self._stop("inputs").value
        return found

    @inputs.setter
    def inputs(self, value: ModuleInputs) -> None:
        stop = self._stop("inputs")
        if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)):
            raise TypeError(f"{self.path}.inputs is {value!r}; it must be a tuple of arguments and a dict of arguments")
        stop.replace((tuple(value[0]), value[1]))

    @property
    def input(self) -> Any:
        """The first argument of the module."""
        args, kwargs = self.inputs
        return args[0] if args else kwargs[self._first]

    @input.setter
    def input(self, value: Any) -> None:
        stop = self._stop("inputs")
        args, kwargs = stop.value
        _check_like(value, args[0] if args else kwargs[self._first], f"{self.path}.input")
        stop.replace(((value, *args[1:]), kwargs) if args else (args, kwargs | {self._first: value}))

    @property
    def _first(self) -> str:
        module = module_at(self._access.bridge.original_model, self.path)
        return first_parameter(type(module).forward)


def _check_like(value: Any, old: Any, what: str) -> None:
    """Refuses what cannot take the place of a tensor.

    Raises:
        TypeError: it is no tensor where one was, one of another type, or no tuple of as many elements.
        ValueError: it has another shape, or is on another device.
    """
    if isinstance(old, Tensor):
        if not isinstance(value, Tensor):
            raise TypeError(f"{what} was a tensor, and {type(value).__name__} was assigned")
        if value.shape != old.shape or value.device != old.device:
            raise ValueError(
                f"{what} has shape {list(old.shape)} on {old.device}; what was assigned has {list(value.shape)} on "
                f"{value.device}"
            )
        if value.dtype != old.dtype:
            raise TypeError(f"{what} is {old.dtype}, and {value.dtype} was assigned: assign .to({old.dtype}) of it")
    elif isinstance(old, tuple | list):
        if type(value) is not type(old) or len(value) != len(old):
            raise TypeError(f"{what} was a {type(old).__name__} of {len(old)}; {value!r} was assigned")
        for index, (new, before) in enumerate(zip(value, old, strict=True)):
            _check_like(new, before, f"{what}[{index}]")
    elif not isinstance(value, type(old)):
        raise TypeError(f"{what} was {type(old).__name__}, and {type(value).__name__} was assigned")


def _first_tensor(value: Any, part: str) -> Tensor:
    """The tensor that a module returns, or the first of several.

    Raises:
        TypeError: there is none.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple | list) and value and isinstance(value[0], Tensor):
        return value[0]
    raise TypeError(f"{part} returns {type(value).__name__}; ask for its module by path: run.module(path).output")


# ----------------------------------------------------------------------------------------------------------------------
# The shape and type of every activation, from fake tensors: nothing is computed.
# ----------------------------------------------------------------------------------------------------------------------


class PointShape(NamedTuple):
    """What an activation is like.

    Attributes:
        shape: its shape; None stands for a number that depends on values.
        dtype: its type.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype


class Shapes(Mapping[str, PointShape]):
    """Shapes and types by hook point, under all names.

    Args:
        found: by canonical name.
        names: of the bridge.
    """

    def __init__(self, found: dict[str, PointShape], names: Names) -> None:
        self._found, self._names = found, names

    def __getitem__(self, name: str) -> PointShape:
        hook = self._names.find(name)
        if hook.name not in self._found:
            raise KeyError(f"{hook.name} does not run on this input")
        return self._found[hook.name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        lines = [f"  {name}: {list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in self._found.items()]
        return "\n".join(["Shapes(", *lines, ")"])


def shapes(bridge: RunnableBridge, input: Input, forward_kwargs: dict[str, Any]) -> Shapes:
    """See `TransformerBridge.shapes`."""
    kwargs = dict(forward_kwargs)
    layers = {name: kwargs.pop(name, None) for name in ("start_at_layer", "stop_at_layer")}
    ours = {name: kwargs.pop(name, None) for name in ("prepend_bos", "padding_side", "attention_mask")}
    asked = Request(input, **ours, **layers, model_kwargs=kwargs)
    check_arguments(bridge, asked, (*ours, *layers))
    start, stop = checked_layers(bridge, asked.start_at_layer, asked.stop_at_layer)
    points = points_that_run(bridge, list(bridge.wiring.points.values()), layers)
    experts = [hook for hook in points if hook.point.site.kind == "experts"]
    paths = dict.fromkeys(hook.point.site.path for hook in experts)
    found: dict[str, PointShape] = {}

    def note(act: Tensor, hook: HookPoint) -> None:
        found[hook.name] = PointShape(tuple(act.shape), act.dtype)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    watched = [hook for hook in points if hook not in experts]
    # The user's hooks see nothing of it: they would be given fake tensors.
    ready = PreparedPass(bridge, asked, start, stop, traced=True)
    with torch.no_grad(), without_hooks(), watching(bridge.wiring, watched, note), ready as pass_:
        with FakeCopyMode(mode):  # of a cache of keys and values too, into which the model would write fake ones
            pass_.inputs.kwargs = copy.deepcopy(pass_.inputs.kwargs)
        try:
            with mode, _experts_in_batches([module_at(bridge.original_model, path) for path in paths]):
                pass_.run_model()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise RuntimeError(
                f"{type(bridge.core).__name__} asks for a value on its way ({error}), so its shapes cannot be had "
                "without computing; run_with_callback shows them in a run"
            ) from error
    for hook in experts:
        module = module_at(bridge.original_model, hook.point.site.path)
        whole = str(hook.point.site.key).endswith((".in", ".out"))
        size = bridge.cfg.d_model if whole else width(module)
        found[hook.name] = PointShape((None, size), next(module.parameters()).dtype)
    ordered = {name: found[name] for name in bridge.wiring.points if name in found}
    return Shapes(ordered, bridge.names)


@contextmanager
def _experts_in_batches(modules: list[nn.Module]) -> Iterator[None]:
    """Experts computed in the one way whose shapes depend on no value and that takes every type."""
    before = [(module, module.__dict__["config"]) for module in modules if "config" in module.__dict__]
    try:
        for module, config in before:
            module.__dict__["config"] = copy.copy(config)
            module.__dict__["config"]._experts_implementation_internal = "batched_mm"
        yield
    finally:
        for module, config in before:
            module.__dict__["config"] = config
