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
    known = [size_of(cfg, axis) for axis in hook.point.axes.split()]
    for name in operation.numbers:
        if isinstance(getattr(operation, name), Tensor):
            _check_tensor(operation, name, hook, known)
    for field in ("heads", "features"):
        index = getattr(operation, field)
        size = None if index is None else known[axis_of(field, hook)]
        if size is not None and isinstance(index, tuple) and not all(-size <= one < size for one in index):
            raise IndexError(f"{field} is {index}; {hook.name} has {size} of them")


def _check_tensor(operation: Operation, name: str, hook: HookPoint, known: list[int | None]) -> None:
    """Refuses a tensor whose last axes are not those of the hook point, as far as their sizes are known."""
    value, broadcasts = getattr(operation, name), not isinstance(operation, ProjectOut)
    sizes = known if broadcasts else known[-1:]
    for size, its in zip(reversed(sizes), reversed(value.shape), strict=False):
        if size is not None and its != size and not (its == 1 and broadcasts):
            axes = zip(hook.point.axes.split(), known, strict=True)
            raise ValueError(
                f"{name} of {type(operation).__name__} has shape {list(value.shape)}; {hook.name} has "
                f"[{', '.join(axis if n is None else str(n) for axis, n in axes)}]"
            )
