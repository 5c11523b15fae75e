"""Whether the numbers of an operation fit the sizes of a model, as far as these are known before it runs."""

from __future__ import annotations

from torch import Tensor

from adapters.config import ModelConfig
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.shapes import size_of
from bridge.interventions.operation import Operation
from bridge.interventions.operations import ProjectOut
from bridge.interventions.places import axis_of


def check_sizes(operation: Operation, hook: HookPoint, cfg: ModelConfig) -> None:
    """Refuses tensors and indices that cannot fit.

    Args:
        operation: at this hook point.
        hook: the hook point.
        cfg: the facts about the model.

    Raises:
        ValueError: a tensor of another size.
        IndexError: there is no such head or feature.
    """
    axes = hook.point.axes.split()
    known = [size_of(cfg, axis) for axis in axes]
    for name in operation.numbers:
        value = getattr(operation, name)
        if not isinstance(value, Tensor):
            continue
        wanted = known[-1:] if isinstance(operation, ProjectOut) else known
        for size, its in zip(reversed(wanted), reversed(value.shape), strict=False):
            single = its == 1 and not isinstance(operation, ProjectOut)
            if size is not None and its != size and not single:
                raise ValueError(
                    f"{name} of {type(operation).__name__} has shape {list(value.shape)}; {hook.name} has "
                    f"[{', '.join(axis if n is None else str(n) for axis, n in zip(axes, known, strict=True))}]"
                )
    for field in ("heads", "features"):
        index = getattr(operation, field)
        size = None if index is None else known[axis_of(field, hook)]
        if size is not None and isinstance(index, tuple) and not all(-size <= one < size for one in index):
            raise IndexError(f"{field} is {index}; {hook.name} has {size} of them")
