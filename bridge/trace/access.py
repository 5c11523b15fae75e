"""Access to a traced run's activations: by hook point, by module, by part of the bridge."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from bridge.hooks.names import Names, UnknownHookError, suggestion
from bridge.interventions.operations import Index
from bridge.modules import first_parameter
from bridge.run.inputs import Input, Request, RunnableBridge, check_arguments
from bridge.run.recorder import watching
from bridge.run.run import PreparedPass, checked_layers, points_that_run
from bridge.trace.coroutine import assigned
from bridge.trace.edit import BodyActivations
from bridge.trace.stops import PointPart, Stop, Stops, Target

#: The hook point that shows the input, or the output, of a part.
_AT_POINT = {"input": "hook_in", "output": "hook_out"}
ModuleInputs = tuple[tuple[Any, ...], dict[str, Any]]


class Access(OpenTrace, BodyActivations):
    """The interface for the body of a trace to read and write activations.

    Args:
        bridge: the bridge.
        stops: the stops of its run.

    Attributes:
        bridge, stops: the arguments.
    """

    def __init__(self, bridge: RunnableBridge, stops: Stops) -> None:
        self.bridge, self.stops = bridge, stops

    def pass_of(self, point: NamedPoint) -> tuple[ForwardPass | None, Generation | None] | None:
        """Return the pass and generation that the trace shows; None if the hook point is another
        bridge's.
        """
        return self.shows if self.bridge.wiring.points.get(point.name) is point else None

    @property
    def shows(self) -> tuple[ForwardPass | None, Generation | None]:
        """Return the pass and generation that are currently shown."""
        raise NotImplementedError

    def reach(self, target: Target) -> Stop:
        """Run the model up to the requested place."""
        return self.stops.reach(target)

    def __getitem__(self, name: str) -> Tensor:
        """Return the activation at a hook point: run the model until it arrives there, and pause
        it. The model uses in-place changes made before the next request.

        Args:
            name: a name or alias.

        Raises:
            UnknownHookError: no hook point has this name.
            OutOfStepError: the model has already passed it, or never reaches it.
        """
        activation: Tensor = self.reach(self.bridge.names.find(name)).value
        return activation

    def __setitem__(self, name: str, value: Tensor) -> None:
        """Replace an activation by a tensor.

        Args:
            name: a name or alias.
            value: a tensor of the same shape.

        Raises:
            TypeError: it is not a tensor.
            ValueError: its shape or device differs.
        """
        hook = self.bridge.names.find(name)
        stop = self.reach(hook)
        assigned(value, stop.value, hook)
        stop.replace(value)

    def part(
        self, name: str, *, heads: Index = None, queries: Index = None, keys: Index = None
    ) -> Tensor:
        """Return some heads, queries or keys of an activation; only these scores or patterns are
        computed.

        As for a whole activation, the model uses in-place changes made before the next request;
        `grad` then returns the gradient of the part. (If queries or keys were requested before, all
        scores are computed, because the attention is already running.)

        Args:
            name: a name or alias.
            heads, queries, keys: as for `bridge.interventions.Touching`; all axes are kept.

        Raises:
            UnknownHookError: no hook point has this name.
            ValueError: nothing is selected, or the activation has no such axis.
            OutOfStepError: the model has already passed it, never reaches it, or is there for
                another part or for the whole activation.

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
        part: Tensor = self.reach(PointPart(self.bridge.names.find(name), chosen)).value
        return part

    def module(self, module: str | nn.Module) -> _TracedModule:
        """Return a module of the original model, with its `output`, `input` and `inputs`.

        Args:
            module: its path in the original model (``transformer.h.5``), or the module itself.

        Raises:
            ValueError: the model has no such module.
        """
        return _TracedModule(self, self._path_of(module))

    def _path_of(self, module: str | nn.Module) -> str:
        model = self.bridge.original_model
        if isinstance(module, nn.Module):
            for path, other in model.named_modules():
                if other is module:
                    return path
            raise ValueError(f"this {type(module).__name__} is not in the model that is traced")
        if not isinstance(module, str):
            raise TypeError(
                f"module is {module!r}; it must be a path, such as 'transformer.h.5', or a module"
            )
        try:
            module_at(model, module)
        except AttributeError:
            paths = [path for path, _ in model.named_modules()]
            raise ValueError(
                f"the model has no module {module!r}.{suggestion(module, paths)}"
            ) from None
        return module

    # The parts of the bridge.

    def seen_of_part(self, part: str, what: str) -> Any:
        """Return the input or output of a part of the bridge, from its hook point or else from its
        module.
        """
        if (hook := self._find_hook(part, what)) is not None:
            return self[hook]
        value = getattr(self.module(self._module_path(part)), what)
        return _first_tensor(value, part) if what == "output" else value

    def set_for_part(self, part: str, what: str, value: Any) -> None:
        """Replace the input or output of a part of the bridge."""
        if (hook := self._find_hook(part, what)) is not None:
            self[hook] = value
        else:
            setattr(self.module(self._module_path(part)), what, value)

    def leave_out(self, path: str, value: Any) -> None:
        """Make a module return a value instead of being called.

        Raises:
            TypeError: the trace is a generation.
        """
        raise TypeError(
            f"{path} cannot be skipped in a generation: assign to its output at each step"
        )

    def _is_whole_part(self, path: str, part: str) -> bool:
        """Tell whether a single module implements the whole part. OPT's MLP consists of two
        modules, and the last one reads neurons.
        """
        for name, hook in self.bridge.names.points.items():
            if name.startswith(f"{part}.") and hook.point.site.path != path:
                return False
        return True

    def _find_hook(self, part: str, what: str) -> str | None:
        """Return the name of the hook point at a part's input or output; None if there is none."""
        if what not in _AT_POINT:
            return None
        try:
            return self.bridge.names.find(f"{part}.{_AT_POINT[what]}").name
        except UnknownHookError:
            return None

    def _module_path(self, part: str) -> str:
        """Return the path of a part's module.

        Raises:
            ValueError: it has no module. (An AttributeError would be mistaken for a missing name.)
        """
        base = base_path(self.bridge.original_model)
        name, _, rest = part.partition(".")
        index, _, inside = rest.partition(".")
        for stack in self.bridge.architecture.stacks:
            if name != stack.name or not rest:
                continue
            path = join(base, stack.place_of(int(index)))
            block = stack.block_at(int(index))
            if not inside and block.ends:
                break
            if not inside:
                return path
            if inside in block.module_paths:
                return join(path, block.module_paths[inside])
        for kind in _AT_POINT:
            hook = self._find_hook(part, kind)
            site = None if hook is None else self.bridge.names.find(hook).point.site
            if site is not None and site.kind == kind and self._is_whole_part(site.path, part):
                return site.path
        raise ValueError(
            f"{part} is not a single module in {type(self.bridge.core).__name__}; ask for hook"
            " points in it, or for a module by its path: run.module(path)"
        )


class _TracedModule:
    """A module of the original model in a trace.

    Args:
        access: the access of the trace.
        path: the module's path.
    """

    def __init__(self, access: Access, path: str) -> None:
        self._access, self.path = access, path

    def __repr__(self) -> str:
        return f"TracedModule({self.path})"

    def _stop(self, what: str) -> Stop:
        return self._access.reach((self.path, what))

    @property
    def output(self) -> Any:
        """Return the module's output unchanged: a tensor, or a tuple with the model's own
        elements.
        """
        return self._stop("output").value

    @output.setter
    def output(self, value: Any) -> None:
        stop = self._stop("output")
        _check_like(value, stop.value, f"{self.path}.output")
        stop.replace(value)

    @property
    def outputs(self) -> Any:
        """Return the module's whole output: the same as `output`."""
        return self.output

    @outputs.setter
    def outputs(self, value: Any) -> None:
        self.output = value

    def skip(self, value: Any) -> None:
        """Skip the module in this run: it returns `value`, and nothing inside it is computed.

        Args:
            value: everything that the module would return: a tensor, or a tuple with the same
                elements as the model's.

        Raises:
            TypeError: the module is not called, or the trace is a generation.
            ValueError: a hook point in it is captured, or has a hook.
            OutOfStepError: raised at the end of the block, if the model had already reached the
                module.
        """
        self._access.leave_out(self.path, value)

    @property
    def inputs(self) -> ModuleInputs:
        """Return all arguments of the module: positional and keyword."""
        inputs: ModuleInputs = self._stop("inputs").value
        return inputs

    @inputs.setter
    def inputs(self, value: ModuleInputs) -> None:
        stop = self._stop("inputs")
        if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)):
            raise TypeError(
                f"{self.path}.inputs is {value!r}; it must be a tuple of arguments and a dict of"
                " arguments"
            )
        stop.replace((tuple(value[0]), value[1]))

    @property
    def input(self) -> Any:
        """Return the first argument of the module."""
        args, kwargs = self.inputs
        return args[0] if args else kwargs[self._first]

    @input.setter
    def input(self, value: Any) -> None:
        stop = self._stop("inputs")
        args, kwargs = stop.value
        what = f"{self.path}.input"
        if args:
            _check_like(value, args[0], what)
            stop.replace(((value, *args[1:]), kwargs))
        else:
            _check_like(value, kwargs[self._first], what)
            stop.replace((args, kwargs | {self._first: value}))

    @property
    def _first(self) -> str:
        """Return the name of the module's first parameter."""
        module = module_at(self._access.bridge.original_model, self.path)
        return first_parameter(type(module).forward)


def _check_like(value: Any, old: Any, what: str) -> None:
    """Reject a value that cannot replace a tensor.

    Raises:
        TypeError: it is not a tensor although the old value is, its dtype differs, or it is not a
            tuple of the same length.
        ValueError: its shape or device differs.
    """
    if isinstance(old, Tensor):
        if not isinstance(value, Tensor):
            raise TypeError(f"{what} was a tensor, and {type(value).__name__} was assigned")
        if value.shape != old.shape or value.device != old.device:
            raise ValueError(
                f"{what} has shape {list(old.shape)} on {old.device}; what was assigned has"
                f" {list(value.shape)} on {value.device}"
            )
        if value.dtype != old.dtype:
            raise TypeError(
                f"{what} is {old.dtype}, and {value.dtype} was assigned: assign .to({old.dtype})"
                " of it"
            )
    elif isinstance(old, tuple | list):
        if type(value) is not type(old) or len(value) != len(old):
            raise TypeError(
                f"{what} was a {type(old).__name__} of {len(old)}; {value!r} was assigned"
            )
        for index, (new, before) in enumerate(zip(value, old, strict=True)):
            _check_like(new, before, f"{what}[{index}]")
    elif not isinstance(value, type(old)):
        raise TypeError(f"{what} was {type(old).__name__}, and {type(value).__name__} was assigned")


def _first_tensor(value: Any, part: str) -> Tensor:
    """Return the tensor that a module returns, or the first one of several.

    Raises:
        TypeError: there is none.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple | list) and value and isinstance(value[0], Tensor):
        return value[0]
    raise TypeError(
        f"{part} returns {type(value).__name__}; ask for its module by path:"
        " run.module(path).output"
    )


# --------------------------------------------------------------------------------------------------
# The shape and dtype of every activation, from fake tensors: nothing is computed.
# --------------------------------------------------------------------------------------------------


class PointShape(NamedTuple):
    """The shape, dtype and device of an activation.

    Attributes:
        shape: its shape; None for a size that depends on values.
        dtype: its dtype.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype


class Shapes(Mapping[str, PointShape]):
    """Shapes and dtypes by hook point, under all names.

    Args:
        shapes: the shapes, by canonical name.
        names: the bridge's names.
    """

    def __init__(self, shapes: dict[str, PointShape], names: Names) -> None:
        self._shapes, self._names = shapes, names

    def __getitem__(self, name: str) -> PointShape:
        hook = self._names.find(name)
        if hook.name not in self._shapes:
            raise KeyError(f"{hook.name} does not run on this input")
        return self._shapes[hook.name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __repr__(self) -> str:
        lines = [
            f"  {name}: {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
            for name, x in self._shapes.items()
        ]
        return "\n".join(["Shapes(", *lines, ")"])


_LAYERS = ("start_at_layer", "stop_at_layer")
_OF_THE_RUN = ("prepend_bos", "padding_side", "attention_mask", *_LAYERS)


def shapes(bridge: RunnableBridge, input: Input, forward_kwargs: dict[str, Any]) -> Shapes:
    """See `TransformerBridge.shapes`."""
    kwargs = dict(forward_kwargs)
    options = {name: kwargs.pop(name, None) for name in _OF_THE_RUN}
    request = Request(input, **options, model_kwargs=kwargs)
    check_arguments(bridge, request, _OF_THE_RUN)
    start, stop = checked_layers(bridge, request.start_at_layer, request.stop_at_layer)
    layers = {name: options[name] for name in _LAYERS}
    points = points_that_run(bridge, list(bridge.wiring.points.values()), layers)
    experts = [hook for hook in points if hook.point.site.kind == "experts"]
    watched = [hook for hook in points if hook not in experts]
    prepared = PreparedPass(bridge, request, start, stop, traced=True)
    by_name = _run_on_fake_tensors(bridge, prepared, watched, experts)
    for hook in experts:
        by_name[hook.name] = _expert_shape(bridge, hook)
    ordered = {name: by_name[name] for name in bridge.wiring.points if name in by_name}
    return Shapes(ordered, bridge.names)


def _expert_shape(bridge: RunnableBridge, hook: HookPoint) -> PointShape:
    """Return the shape of an expert's activation; its number of rows is decided by the router."""
    module = module_at(bridge.original_model, hook.point.site.path)
    in_stream = str(hook.point.site.key).endswith((".in", ".out"))
    size = bridge.cfg.d_model if in_stream else width(module)
    return PointShape((None, size), next(module.parameters()).dtype)


def _run_on_fake_tensors(
    bridge: RunnableBridge,
    prepared: PreparedPass,
    watched: Sequence[HookPoint],
    experts: Iterable[HookPoint],
) -> dict[str, PointShape]:
    """Run a pass without computing, and return the shapes at the watched hook points by name.

    Raises:
        RuntimeError: the model needs a value.
    """
    by_name: dict[str, PointShape] = {}

    def note(act: Tensor, hook: HookPoint) -> None:
        by_name[hook.name] = PointShape(tuple(act.shape), act.dtype)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    paths = dict.fromkeys(hook.point.site.path for hook in experts)
    modules = [module_at(bridge.original_model, path) for path in paths]
    # The user's hooks do not run: they would be given fake tensors.
    watch = watching(bridge.wiring, watched, note)
    with torch.no_grad(), without_hooks(), watch, prepared as pass_:
        # Copies also a key-value cache, into which the model would write fake tensors.
        with FakeCopyMode(mode):
            pass_.inputs.kwargs = copy.deepcopy(pass_.inputs.kwargs)
        try:
            with mode, _experts_in_batches(modules):
                pass_.run_model()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise RuntimeError(
                f"{type(bridge.core).__name__} asks for a value on its way ({error}), so its shapes"
                " are not known without computing; run_with_callback shows them in a run"
            ) from error
    return by_name


@contextmanager
def _experts_in_batches(modules: list[nn.Module]) -> Iterator[None]:
    """Run experts in the implementation with data-independent shapes that accepts every dtype."""
    before = [
        (module, module.__dict__["config"]) for module in modules if "config" in module.__dict__
    ]
    try:
        for module, config in before:
            module.__dict__["config"] = copy.copy(config)
            module.__dict__["config"]._experts_implementation_internal = "batched_mm"
        yield
    finally:
        for module, config in before:
            module.__dict__["config"] = config
