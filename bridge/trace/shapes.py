"""The shape and type of every activation, from fake tensors: nothing is computed."""

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

from adapters.experts import width
from adapters.paths import module_at
from bridge.hooks.context import without_hooks
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.names import Names
from bridge.run.forward import PreparedPass, checked_layers
from bridge.run.hooked import points_that_run
from bridge.run.model_inputs import check_arguments
from bridge.run.protocol import Input
from bridge.run.recorder import watching
from bridge.run.request import Request
from bridge.trace.protocol import TraceableBridge


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


def shapes(bridge: TraceableBridge, input: Input, forward_kwargs: dict[str, Any]) -> Shapes:
    """See `TransformerBridge.shapes`."""
    kwargs = dict(forward_kwargs)
    layers = {name: kwargs.pop(name, None) for name in ("start_at_layer", "stop_at_layer")}
    ours = {name: kwargs.pop(name, None) for name in ("prepend_bos", "padding_side", "attention_mask")}
    asked = Request(input, **ours, **layers, model_kwargs=kwargs)
    check_arguments(bridge.core, kwargs, (*ours, *layers))
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
