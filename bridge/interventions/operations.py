"""The operations: a closed set, so that a file of them can say nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bridge.hooks.arguments import check_choice
from bridge.hooks.hook_point import HookPoint
from bridge.interventions.operation import Number, Operation
from bridge.interventions.places import axis_of, tokens_along


@dataclass(frozen=True, repr=False, eq=False)
class Set(Operation):
    """Puts a value in the activation's place, such as a mean over a data set.

    Args:
        value: broadcasts over the activation.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.interventions import Set
        >>> bridge = TransformerBridge.boot_embedded()
        >>> op = Set(0.0, heads=1, positions=-1)
        >>> bridge.run_with_hooks("Mary and", fwd_hooks=[("blocks.2.attn.hook_z", op)]).shape
        torch.Size([1, 3, 654])
    """

    value: Number
    numbers: ClassVar[tuple[str, ...]] = ("value",)

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        value = self.number("value", activation, inputs, hook)
        return torch.full_like(activation, value) if isinstance(value, float | int) else value.expand_as(activation)


@dataclass(frozen=True, repr=False, eq=False)
class Add(Operation):
    """Adds a value: a steering vector (Turner et al. 2023).

    Args:
        value: broadcasts over the activation.
        scale: what it is multiplied with.
    """

    value: Number
    scale: Number = 1.0
    numbers: ClassVar[tuple[str, ...]] = ("value", "scale")

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        value = self.number("value", activation, inputs, hook)
        if self.scale == 1.0:
            return activation + value
        return activation + self.number("scale", activation, inputs, hook) * value


@dataclass(frozen=True, repr=False, eq=False)
class Scale(Operation):
    """Multiplies the activation.

    Args:
        by: broadcasts over the activation.
    """

    by: Number
    numbers: ClassVar[tuple[str, ...]] = ("by",)

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        return activation * self.number("by", activation, inputs, hook)


@dataclass(frozen=True, repr=False, eq=False)
class Clamp(Operation):
    """Keeps the activation between two bounds.

    Args:
        min, max: broadcast over the activation; None: no bound there.
    """

    min: Number | None = None
    max: Number | None = None
    numbers: ClassVar[tuple[str, ...]] = ("min", "max")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min is None and self.max is None:
            raise ValueError("Clamp needs min, max, or both")

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        made = activation
        for name, bound in (("min", torch.maximum), ("max", torch.minimum)):
            if getattr(self, name) is not None:
                value = self.number(name, activation, inputs, hook)
                value = value if isinstance(value, Tensor) else torch.full_like(activation, value)
                made = bound(made, value)
        return made


@dataclass(frozen=True, repr=False, eq=False)
class Zero(Operation):
    """Puts zero in the activation's place."""

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        return torch.zeros_like(activation)


@dataclass(frozen=True, repr=False, eq=False)
class Mean(Operation):
    """Puts the activation's own mean along an axis in its place. (`Set` puts a mean over other data.)

    Args:
        over: ``"rows"`` of the batch, position by position; ``"heads"``; or ``"features"``.
    """

    over: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("over", self.over, ("rows", "heads", "features"))

    @property
    def mixes_rows(self) -> bool:
        return self.over == "rows"

    def check_point(self, hook: HookPoint) -> None:
        super().check_point(hook)
        axis_of(self.over, hook)

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        return mean(activation, axis_of(self.over, hook)).expand_as(activation)


def mean(activation: Tensor, axis: int) -> Tensor:
    """The mean along an axis, which stays; whole numbers have none, and are left as they are."""
    return activation.mean(axis, keepdim=True) if activation.is_floating_point() else activation


@dataclass(frozen=True, repr=False, eq=False)
class ProjectOut(Operation):
    """Takes the part along some directions out of the activation (Arditi et al. 2024).

    Args:
        directions: ``[feature]``, or several ``[direction feature]``; of any length, at any angle.
    """

    directions: Tensor | str
    numbers: ClassVar[tuple[str, ...]] = ("directions",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.directions, float):
            raise TypeError(f"directions is {self.directions}; it must be a tensor, or the name of an input")
        if isinstance(self.directions, Tensor):
            if self.directions.ndim not in (1, 2) or not self.directions.is_floating_point():
                raise ValueError(
                    f"directions has shape {list(self.directions.shape)} and type {self.directions.dtype}; it must be "
                    "of fractions, [feature] or [direction feature]"
                )
            rows = self.directions.detach().double().reshape(-1, self.directions.shape[-1])
            if int(torch.linalg.matrix_rank(rows)) < len(rows):
                raise ValueError("the directions depend on each other (or one is zero): give each of them once")

    def check_point(self, hook: HookPoint) -> None:
        super().check_point(hook)
        axis_of("features", hook)

    def check_number(self, name: str, value: Tensor, axes: list[str], hook: HookPoint) -> None:
        pass  # its axes are not those of the activation

    def along(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        """The part of the activation along the directions."""
        rows = self.number("directions", activation, inputs, hook)
        basis = orthonormal(rows.reshape(-1, rows.shape[-1]))
        return (activation @ basis.T) @ basis

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        return activation - self.along(activation, hook, inputs)


@dataclass(frozen=True, repr=False, eq=False)
class ProjectOnto(ProjectOut):
    """Leaves of the activation only the part along some directions.

    Args:
        directions: as for `ProjectOut`.
    """

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.along(activation, hook, inputs)


@dataclass(frozen=True, repr=False, eq=False)
class Cap(ProjectOut):
    """Keeps the coordinate along a direction at a value or below.

    Args:
        directions: one direction ``[feature]``, of any length; the coordinate is of one of length one.
        most: a number.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.interventions import Cap
        >>> bridge = TransformerBridge.boot_embedded()
        >>> capped = Cap(bridge.tokens_to_residual_directions(" Mary"), 0.0)
        >>> with bridge.hooks(fwd_hooks=[("blocks.3.hook_resid_post", capped)]):
        ...     bridge("When Mary and John went to the store, John gave a drink to", return_type="predictions")
        ' John'
    """

    most: Number
    numbers: ClassVar[tuple[str, ...]] = ("directions", "most")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, axes in (("directions", 1), ("most", 0)):
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.ndim != axes:
                raise ValueError(f"{name} has shape {list(value.shape)}; Cap is along one direction, at one number")

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        unit = orthonormal(self.number("directions", activation, inputs, hook).reshape(1, -1))[0]
        above = (activation @ unit - self.number("most", activation, inputs, hook)).clamp_min(0)
        return activation - above.unsqueeze(-1) * unit


def orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of what rows span, by Gram and Schmidt (twice), which every runtime has.

    Args:
        rows: ``[direction feature]``, independent.
    """
    found: list[Tensor] = []
    for row in rows.to(torch.promote_types(rows.dtype, torch.float32)).unbind(0):
        for _ in range(2):
            for before in found:
                row = row - (row * before).sum() * before
            row = row / (row * row).sum().sqrt()
        found.append(row)
    return torch.stack(found).to(rows.dtype)


@dataclass(frozen=True, repr=False, eq=False)
class Replace(Operation):
    """Puts the activation of another run in the activation's place.

    Args:
        source: the activation there: of one row, or of as many as here; of as many positions as the prompt has.
    """

    source: Tensor | str
    numbers: ClassVar[tuple[str, ...]] = ("source",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.source, float):
            raise TypeError(f"source is {self.source}; it must be a tensor, or the name of an input")

    def check_number(self, name: str, value: Tensor, axes: list[str], hook: HookPoint) -> None:
        if value.ndim != len(axes):
            raise ValueError(
                f"the source of Replace has shape {list(value.shape)}; at {hook.name} it needs the axes "
                f"[{hook.point.axes}], as a cache with its batch axis has them"
            )

    @property
    def chooses_tokens(self) -> bool:
        return True  # those that the other run has

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        source: Tensor = self.number("source", activation, inputs, hook)
        if torch.compiler.is_compiling():
            return source.expand_as(activation)
        axes = hook.point.axes.split()
        made, here, there = activation, [slice(None)] * len(axes), [slice(None)] * len(axes)
        for axis, name in enumerate(axes):
            if not name.endswith("pos"):
                if source.shape[axis] not in (1, activation.shape[axis]):
                    raise ValueError(self._misfit(source, activation, hook))
                continue
            tokens = tokens_along(name, activation.shape[axis], activation.shape[0], hook)
            if source.shape[axis] != tokens.prompt:
                raise ValueError(self._misfit(source, activation, hook))
            both = max(0, min(tokens.prompt, tokens.first + tokens.length) - tokens.first)
            here[axis], there[axis] = slice(0, both), slice(tokens.first, tokens.first + both)
        made = activation.clone()
        made[tuple(here)] = source[tuple(there)]
        return made

    def _misfit(self, source: Tensor, activation: Tensor, hook: HookPoint) -> str:
        return (
            f"the source of Replace at {hook.name} has shape {list(source.shape)}, the activation "
            f"{list(activation.shape)} ([{hook.point.axes}]): it needs the positions of the prompt, and one row or as "
            "many"
        )


#: All operations, by name.
OPERATIONS: dict[str, type[Operation]] = {
    kind.__name__: kind for kind in (Set, Add, Scale, Clamp, Zero, Mean, ProjectOut, ProjectOnto, Cap, Replace)
}
