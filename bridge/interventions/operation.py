"""What all operations share: where they act, their numbers, what they are called with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from bridge.hooks.arguments import check_choice
from bridge.hooks.hook_point import HookPoint
from bridge.interventions.places import Index, along, axis_of, chosen, kept_index, tokens_along

#: A number of an operation: a tensor that broadcasts over the activation, a number, or the name of a program's input.
Number = Tensor | float | str

_WHERE = ("positions", "keys", "heads", "features", "rows")
_PARTS = ("all", "prompt", "generated")


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Operation:
    """A change of an activation that is data: a hook function, called as ``operation(activation, hook)``.

    Without any of the arguments that follow, the whole activation is meant. An index is a number, several, or a slice.

    Args:
        positions: tokens of the prompt, from its front or, if negative, from its end. In a run, all tokens are the
            prompt; in a generation, those that it starts from, without padding.
        keys: the same, along the keys of a pattern or of scores.
        heads: of attention.
        features: entries along the last axis.
        rows: of the batch.
        part: ``"all"`` tokens, those of the ``"prompt"``, or those that are ``"generated"``.
        from_step: only tokens that are processed from this step of a generation on: 0 reads the prompt, 1 the first
            new token.
    """

    positions: Index = None
    keys: Index = None
    heads: Index = None
    features: Index = None
    rows: Index = None
    part: str = "all"
    from_step: int = 0

    #: The fields that are numbers of the operation.
    numbers: ClassVar[tuple[str, ...]] = ()
    #: Hooks are told in which run they are (see `Listener`).
    in_run: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in _WHERE:
            object.__setattr__(self, name, kept_index(name, getattr(self, name)))
        check_choice("part", self.part, _PARTS)
        if type(self.from_step) is not int:
            raise TypeError(f"from_step is {self.from_step!r}; it must be a whole number")
        if self.from_step < 0:
            raise ValueError(f"from_step is {self.from_step}; steps are counted from 0")
        if (self.positions is not None) + (self.part != "all") + (self.from_step > 0) > 1:
            raise ValueError("positions, part and from_step each choose tokens: give one of them")
        for name in self.numbers:
            value = getattr(self, name)
            if type(value) is int:
                object.__setattr__(self, name, float(value))
            elif not isinstance(value, Tensor | float | str | None):
                raise TypeError(f"{name} is {value!r}; it must be a tensor, a number, or the name of an input")
            elif isinstance(value, str) and not value.isidentifier():
                raise ValueError(f"{name} is {value!r}, which is no name of an input")

    def __repr__(self) -> str:
        from_default = [f for f in fields(self) if f.name in self.numbers or getattr(self, f.name) != f.default]
        shown = [f"{field.name}={_code(getattr(self, field.name))}" for field in from_default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __hash__(self) -> int:
        return hash((type(self), self.part, self.from_step, str(self.positions), str(self.heads)))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs of a program that it asks for, by name."""
        found = [getattr(self, name) for name in self.numbers]
        return tuple(dict.fromkeys([value for value in found if isinstance(value, str)]))

    @property
    def chooses_tokens(self) -> bool:
        """Whether it acts on some tokens alone, so that it has to know which tokens of the sequence it is shown."""
        return self.positions is not None or self.keys is not None or self.part != "all" or self.from_step > 0

    @property
    def mixes_rows(self) -> bool:
        """Whether what it makes of one row depends on the others."""
        return False

    def check_alone(self, hook: HookPoint) -> None:
        """Refuses to act on the requests of a batch, each of which is one row, where that means something else.

        Args:
            hook: the hook point.

        Raises:
            ValueError: it chooses rows, has numbers for several, mixes them, or asks for an input.
        """
        several = [
            name
            for name in self.numbers
            if isinstance(value := getattr(self, name), Tensor)
            and value.ndim == len(hook.point.axes.split())
            and value.shape[0] > 1
        ]
        if self.rows is not None or self.mixes_rows or several or self.inputs:
            what = "asks for inputs" if self.inputs else "is for the rows of one batch"
            raise ValueError(
                f"{type(self).__name__} at {hook.name} {what}, and each request here is a run of its own row: give "
                "each request its own interventions"
            )

    def check_point(self, hook: HookPoint) -> None:
        """Refuses a hook point that it does not fit.

        Args:
            hook: the hook point.

        Raises:
            ValueError: its activation has not the axes that are asked for.
        """
        for field in _WHERE:
            if getattr(self, field) is not None:
                axis_of(field, hook)
        if self.part != "all" or self.from_step:
            axis_of("positions", hook)
        axes = hook.point.axes.split()
        for name in self.numbers:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                self.check_number(name, value, axes, hook)

    def check_number(self, name: str, value: Tensor, axes: list[str], hook: HookPoint) -> None:
        """Refuses a tensor that does not broadcast over the activation, whatever the number of tokens is.

        Raises:
            ValueError: it does not.
        """
        sizes = dict(zip(reversed(axes), reversed(value.shape), strict=False))
        long = [axis for axis in sizes if axis.endswith("pos") and sizes[axis] != 1]
        if value.ndim > len(axes) or long:
            raise ValueError(
                f"{name} of {type(self).__name__} has shape {list(value.shape)}; at {hook.name} it has to broadcast "
                f"over [{hook.point.axes}], with one number for all positions (Replace takes a number for each)"
            )

    def __call__(self, activation: Tensor, hook: HookPoint, **inputs: Tensor) -> Tensor:
        """The activation as the operation makes it.

        Args:
            activation: the activation.
            hook: its hook point, whose axes are known.
            inputs: the inputs that it asks for by name.

        Raises:
            TypeError: an input is missing.
            IndexError: there is no such position, head, feature or row.
        """
        made = self.made(activation, hook, inputs)
        mask = self.mask(activation, hook)
        return made if mask is None else torch.where(mask, made, activation)

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        """What it makes of the whole activation."""
        raise NotImplementedError

    def number(self, name: str, activation: Tensor, inputs: Mapping[str, Tensor], hook: HookPoint) -> Any:
        """A number, on the activation's device and in its type.

        Raises:
            TypeError: it is an input that nobody gave; or a fraction, where the activation is of whole numbers.
        """
        value = getattr(self, name)
        if isinstance(value, str):
            if value not in inputs:
                raise TypeError(
                    f"{type(self).__name__} at {hook.name} asks for the input {value!r}, which nobody gave: declare it "
                    f"in a program's inputs, or give the number: Interventions.with_inputs({value}=...)"
                )
            value = inputs[value]
        if isinstance(value, float):
            if not activation.is_floating_point() and not value.is_integer():
                raise TypeError(f"{name} is {value}; the activation at {hook.name} is {activation.dtype}")
            return value if activation.is_floating_point() else int(value)
        if value.is_floating_point() and not activation.is_floating_point():
            raise TypeError(f"{name} is {value.dtype}; the activation at {hook.name} is {activation.dtype}")
        return value.to(activation.device, activation.dtype)

    def mask(self, activation: Tensor, hook: HookPoint) -> Tensor | None:
        """Where it acts, as a mask that broadcasts over the activation; None: everywhere."""
        masks: list[Tensor] = []
        axes = hook.point.axes.split()
        for field in _WHERE:
            index = getattr(self, field)
            if index is not None:
                axis = axis_of(field, hook)
                tokens = tokens_along(axes[axis], activation.shape[axis], activation.shape[0], hook)
                if field not in ("positions", "keys"):
                    tokens = type(tokens)(0, activation.shape[axis], activation.shape[axis])
                mask = chosen(index, tokens, f"one of {field} at {hook.name}", activation)
                masks.append(along(mask, axis, activation.ndim))
        if self.part != "all" or self.from_step:
            axis = axis_of("positions", hook)
            tokens = tokens_along(axes[axis], activation.shape[axis], activation.shape[0], hook)
            places = torch.arange(tokens.length, device=activation.device) + tokens.first
            first = tokens.prompt + (self.from_step - 1 if self.from_step else 0)
            masks.append(along(places < first if self.part == "prompt" else places >= first, axis, activation.ndim))
        found: Tensor | None = None
        for mask in masks:
            found = mask if found is None else found & mask
        return found


def _code(value: object) -> str:
    """A field as the code that makes it."""
    if isinstance(value, Tensor):
        return f"torch.tensor({value.detach().tolist()!r}, dtype={value.dtype})"
    return repr(value)


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other
