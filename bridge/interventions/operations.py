"""The operations: a closed set, so that a file of them can say nothing else."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from adapters.imports import is_compiling
from bridge.hooks.arguments import check_choice
from bridge.hooks.context import HookFunction, pass_of, pass_under_way
from bridge.hooks.hooks import HookPoint
from bridge.hooks.parts import MAX_BYTES, Part, Touched, TouchesPart, picked
from bridge.hooks.rows import BatchRows

# ----------------------------------------------------------------------------------------------------------------------
# Which axis of an activation is which, and which of its entries are meant.
# ----------------------------------------------------------------------------------------------------------------------


#: Entries along an axis: one, several, a range; None: all of them.
Index = int | np.integer | Sequence[int] | np.ndarray | Tensor | slice | None
#: The same as an operation keeps it.
Kept = tuple[int, ...] | slice | None

_POSITIONS = ("pos", "decoder_pos", "key_pos", "decoder_key_pos")
_KEYS = ("key_pos", "decoder_key_pos")
_HEADS = ("n_heads", "n_key_value_heads")
_NO_FEATURES = ("batch", "row", *_POSITIONS, *_HEADS)


def kept_index(name: str, given: object) -> Kept:
    """An index as an operation keeps it.

    Args:
        name: of the field, for the error.
        given: what the user wrote.

    Raises:
        TypeError: it is none.
        ValueError: it chooses nothing, or goes backwards.
    """
    if given is None:
        return None
    if isinstance(given, slice):
        ends = (given.start, given.stop, given.step)
        if any(end is not None and type(end) is not int for end in ends):
            raise TypeError(f"{name} is {given}; the ends of a range are whole numbers")
        if given.step is not None and given.step < 1:
            raise ValueError(f"{name} is {given}; a range goes forwards")
        return given
    if isinstance(given, np.integer | np.ndarray | Tensor):
        given = given.tolist()
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    whole = tuple([one for one in several if type(one) is int])
    if len(whole) < len(several):
        raise TypeError(f"{name} is {given!r}; it must be a whole number, several, or a slice")
    if not whole:
        raise ValueError(f"{name} is {given!r}, which chooses nothing")
    return whole


def axis_of(field: str, hook: HookPoint) -> int:
    """The axis of an activation that a field of an operation chooses from.

    Raises:
        ValueError: the activation has no such axis.
    """
    axes = hook.point.axes.split()
    if field == "features":
        if axes[-1] not in _NO_FEATURES and not axes[-1].isdigit():
            return len(axes) - 1
    else:
        names = {"positions": _POSITIONS, "keys": _KEYS, "heads": _HEADS, "rows": ("batch",)}[field]
        found = [axes.index(name) for name in names if name in axes]
        if field == "heads":  # where a layer has a number of its own
            found += [index for index, name in enumerate(axes[:-1]) if name.isdigit()]
        if found:
            return found[0]
    raise ValueError(f"{hook.name} has the axes [{hook.point.axes}], and no {field} among them")


@dataclass(frozen=True)
class SequencePart:
    """Which tokens of a sequence the entries along an axis are.

    Attributes:
        first: the place of the first entry in the sequence, padding included.
        length: how many entries there are.
        prompt: how many tokens of the sequence are the prompt, padding included.
        real: which of the prompt are no padding, ``[row, prompt]``; None: all of them are none.
    """

    first: int
    length: int
    prompt: int
    real: Tensor | None = None


def tokens_along(axis: str, length: int, rows: int, hook: HookPoint) -> SequencePart:
    """Which tokens the entries along an axis of positions are, in the pass that is under way.

    Args:
        axis: the name of the axis.
        length: how many entries it has.
        rows: how many rows the activation has.
        hook: the hook point.

    Raises:
        ValueError: that cannot be known.
    """
    if is_compiling():
        return SequencePart(0, length, length)
    run, generation = pass_of(hook)
    lie: BatchRows | None = None if run is None else run.rows
    if lie is not None and lie.count != rows and run is not pass_under_way():
        lie = None  # one prompt's part of a trace, without the padding of its row
    prompt, first = length, 0
    if generation is None or generation.prompt is None:
        if run is not None and run.past:
            raise ValueError(
                f"the intervention at {hook.name} is for some tokens alone, and this run continues another one, whose "
                "length it does not know: use bridge.generate, or bridge.generate_batch"
            )
    elif not generation.in_order:
        raise ValueError(
            f"the intervention at {hook.name} is for some tokens alone, and in this way of generating tokens are "
            "processed that do not stay in the sequence, so their places are not known: generate without assistant, "
            "look-up or contrastive search"
        )
    elif axis.startswith("decoder_") == generation.of_decoder:
        if generation.step and axis not in _KEYS and length not in (1, generation.tokens):
            raise ValueError(
                f"the intervention at {hook.name} is for some tokens alone, and it has {length} positions in a step of "
                f"one, after {generation.tokens - 1} tokens: which tokens these are is not known. Generate the rows "
                "one by one (transformers' RWKV mixes the rows of a batch)"
            )
        lie, prompt, first = generation.rows, generation.prompt, max(0, generation.tokens - length)
    # else an encoder's tokens: the prompt, all at once
    return SequencePart(first, length, prompt, None if lie is None else lie.real(axis, prompt, rows))


def chosen(index: Kept, tokens: SequencePart, name: str, like: Tensor) -> Tensor:
    """Which entries an index means, ``[length]`` or, where rows differ, ``[row length]``.

    Args:
        index: from the front or, if negative, from the end of the prompt.
        tokens: which tokens the entries are.
        name: of the hook point and field, for the error.
        like: a tensor of the device.

    Raises:
        IndexError: there is no such entry.
    """
    places = torch.arange(tokens.length, device=like.device)
    if tokens.first:
        places = places + tokens.first
    size: int | Tensor = tokens.prompt
    longest = shortest = tokens.prompt
    if tokens.real is not None:
        real = tokens.real.to(like.device)
        counted = (real.cumsum(-1) - 1).masked_fill(~real, -1)  # padding is at no place
        size = real.sum(-1, keepdim=True)
        known = counted[:, places.clamp(max=tokens.prompt - 1)]
        places = torch.where(places < tokens.prompt, known, places - tokens.prompt + size)
        shortest, longest = int(size.min()), int(size.max())
    if isinstance(index, slice):
        return _in_range(index, places, size)
    assert index is not None
    found = torch.zeros_like(places, dtype=torch.bool)
    for one in index:
        if one >= shortest or one < -shortest:
            has = f"{shortest} to {longest}" if shortest != longest else str(longest)
            raise IndexError(f"{name} is {one}, and there are {has} of them")
        found = found | (places == (one if one >= 0 else size + one))
    return found


def _in_range(index: slice, places: Tensor, size: int | Tensor) -> Tensor:
    start, stop, step = index.start or 0, index.stop, index.step or 1
    first = start if start >= 0 else size + start
    if isinstance(first, Tensor):
        first = first.clamp_min(0)
    elif start < 0:
        first = max(first, 0)
    found = (places >= first) & (places < size)
    if stop is not None:
        found = found & (places < (stop if stop >= 0 else size + stop))
    return found if step == 1 else found & ((places - first) % step == 0)


def rows_given(rows: int, hook: HookPoint) -> int:
    """How many rows the user gave, of those of an activation: a generation repeats them for beams and sequences.

    Args:
        rows: of the activation.
        hook: the hook point.
    """
    generation = None if is_compiling() else pass_of(hook)[1]
    count = 0 if generation is None or generation.rows is None else generation.rows.count
    return count if count and rows % count == 0 else rows


def along(mask: Tensor, axis: int, ndim: int) -> Tensor:
    """A mask ``[length]`` or ``[rows length]`` as one that fits an activation.

    Args:
        mask: the mask.
        axis: of the activation, that it goes along; rows are its first axis.
        ndim: the number of the activation's axes.
    """
    shape = [1] * ndim
    shape[axis] = mask.shape[-1]
    if mask.ndim == 2:
        shape[0] = mask.shape[0]
    return mask.reshape(shape)


# ----------------------------------------------------------------------------------------------------------------------
# What all operations share: where they act, their numbers, what they are called with.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """What a `Probe` must have read for an operation to act: made by ``probe > threshold`` or ``probe < threshold``.

    Args:
        probe: its name.
        above: the reading is to be above the threshold; else below.
        threshold: a number.
        over: ``"tokens"``, each by its own reading; ``"rows"``, all tokens of a row (of a request) by the highest
            reading of its tokens so far.
    """

    probe: str
    above: bool
    threshold: float
    over: str = "tokens"

    def __post_init__(self) -> None:
        check_choice("over", self.over, ("tokens", "rows"))
        if not isinstance(self.probe, str) or type(self.above) is not bool:
            raise TypeError(f"a condition is made by `probe > threshold`, not of {self.probe!r} and {self.above!r}")
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int | float):
            raise TypeError(f"threshold is {self.threshold!r}; it must be a number")
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold is {self.threshold}, which no reading can be compared with")

    def mask(self, activation: Tensor, hook: HookPoint) -> Tensor:
        """Where it holds, as a mask that broadcasts over the activation of a hook point.

        Raises:
            RuntimeError: its probe has read nothing in this pass.
            ValueError: it read other tokens than those of the activation.
        """
        found = _readings(hook).get(self.probe)
        generation = pass_of(hook)[1]
        step = None if generation is None else generation.tokens
        if found is None or (self.over == "tokens" and found.step != step):
            raise RuntimeError(
                f"the operation at {hook.name} asks what the probe {self.probe!r} read, and it has read nothing in "
                "this pass: put the probe at a point that comes before, [(earlier point, probe), (this point, "
                "operation)]"
            )
        read = found.tokens if self.over == "tokens" else found.highest
        holds = (read > self.threshold) if self.above else (read < self.threshold)
        holds = holds.to(activation.device)
        rows = activation.shape[0]
        if self.over == "rows":
            own = rows_given(rows, hook)
            if holds.shape[0] != own:
                raise ValueError(f"the probe {self.probe!r} read {holds.shape[0]} rows; {hook.name} has {own}")
            return along(holds.repeat_interleave(rows // own), 0, activation.ndim)
        axis = axis_of("positions", hook)
        if holds.shape != (rows, activation.shape[axis]):
            raise ValueError(
                f"the probe {self.probe!r} read {list(holds.shape)} tokens; {hook.name} has "
                f"[{rows}, {activation.shape[axis]}] of them: use a probe over rows"
            )
        return along(holds, axis, activation.ndim)


@dataclass(frozen=True)
class ProbeReading:
    """What a probe has read.

    Attributes:
        step: how many tokens of a generation were processed then; None: outside of one.
        tokens: ``[row, token]``, of the present pass.
        highest: ``[row]``, of all tokens so far but padding; rows are those that the user gave.
    """

    step: int | None
    tokens: Tensor
    highest: Tensor


def _readings(hook: HookPoint) -> dict[str, ProbeReading]:
    """What probes have read in the present run, or in its generation.

    Raises:
        RuntimeError: this is no run.
    """
    run, generation = pass_of(hook)
    holder = run if generation is None else generation
    if holder is None or is_compiling():
        raise RuntimeError(f"a probe, or a condition, at {hook.name} is for runs of a bridge, not for programs")
    return holder.readings


#: A number of an operation: a tensor that broadcasts over the activation, a number, or the name of a program's input.
Number = Tensor | float | str

_WHERE = ("positions", "keys", "heads", "features", "rows")
_PARTS = ("all", "prompt", "generated")


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Operation(TouchesPart):
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
        where: only where a probe at an earlier point read more, or less, than a threshold: ``probe > 0.5``.
    """

    positions: Index = None
    keys: Index = None
    heads: Index = None
    features: Index = None
    rows: Index = None
    part: str = "all"
    from_step: int = 0
    where: Condition | None = None

    #: The fields that are numbers of the operation.
    numbers: ClassVar[tuple[str, ...]] = ()
    #: Its numbers are vectors of features.
    of_features: ClassVar[bool] = False
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
        if not isinstance(self.where, Condition | None):
            raise TypeError(f"where is {self.where!r}; it must be a condition, as `probe > 0.5` makes it")
        for name in self.numbers:
            self._check_kind(name)

    def _check_kind(self, name: str) -> None:
        """Refuses what is no number of an operation; whole ones become fractions.

        Raises:
            TypeError: it is something else, or complex.
            ValueError: a text that no input can be called.
        """
        value = getattr(self, name)
        missing = value is None and any(field.name == name and field.default is None for field in fields(self))
        if type(value) is int:
            object.__setattr__(self, name, float(value))
        elif not isinstance(value, Tensor | float | str) and not missing:
            raise TypeError(f"{name} is {value!r}; it must be a tensor, a number, or the name of an input")
        elif isinstance(value, str) and not value.isidentifier():
            raise ValueError(f"{name} is {value!r}, which is no name of an input")
        elif isinstance(value, Tensor) and value.is_complex():
            raise TypeError(f"{name} is of {value.dtype}, and activations are no complex numbers")

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

    @property
    def remembers(self) -> bool:
        """Whether it reads, or asks, what was read elsewhere in the pass."""
        return self.where is not None

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
        if self.part != "all" or self.from_step or (self.where is not None and self.where.over == "tokens"):
            axis_of("positions", hook)
        if self.where is not None:
            axis_of("rows", hook)
        if self.of_features:
            axis_of("features", hook)
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
        self._check_heads(name, value, axes, hook)

    def _check_heads(self, name: str, value: Tensor, axes: list[str], hook: HookPoint) -> None:
        if (n_heads := hook.point.n_heads) is None:
            return
        axis = axis_of("heads", hook) - len(axes)
        if value.ndim >= -axis and value.shape[axis] not in (1, n_heads):
            raise ValueError(
                f"{name} of {type(self).__name__} has shape {list(value.shape)}, for {value.shape[axis]} heads; "
                f"{hook.name} has {n_heads}, all of which it needs, or 1 for all (heads= says which are changed)"
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
            ValueError: it is of another width than the activation.
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
        if value.ndim and value.shape[-1] not in (1, activation.shape[-1]):
            raise ValueError(
                f"{name} of {type(self).__name__} has shape {list(value.shape)}; the activation at {hook.name} has "
                f"{activation.shape[-1]} entries along its last axis, {hook.point.axes.split()[-1]}"
            )
        if value.is_floating_point() and not activation.is_floating_point():
            raise TypeError(f"{name} is {value.dtype}; the activation at {hook.name} is {activation.dtype}")
        if value.ndim == activation.ndim and 1 < value.shape[0] == rows_given(activation.shape[0], hook):
            value = value.repeat_interleave(activation.shape[0] // value.shape[0], 0)  # one number for all of its beams
        return value.to(activation.device, activation.dtype)

    def mask(self, activation: Tensor, hook: HookPoint) -> Tensor | None:
        """Where it acts, as a mask that broadcasts over the activation; None: everywhere."""
        return _all_of(self.masks(activation, hook))

    def masks(self, activation: Tensor, hook: HookPoint) -> list[Tensor]:
        """Masks that broadcast over the activation; it acts where all are true."""
        masks: list[Tensor] = []
        axes = hook.point.axes.split()
        for field in _WHERE:
            index = getattr(self, field)
            if index is None:
                continue
            axis, what = axis_of(field, hook), f"one of {field} at {hook.name}"
            length = activation.shape[axis]
            if field in ("positions", "keys"):
                tokens = tokens_along(axes[axis], length, activation.shape[0], hook)
                mask = chosen(index, tokens, what, activation)
            elif field == "rows":
                own = rows_given(length, hook)
                mask = chosen(index, SequencePart(0, own, own), what, activation).repeat_interleave(length // own)
            else:
                mask = chosen(index, SequencePart(0, length, length), what, activation)
            masks.append(along(mask, axis, activation.ndim))
        if self.part != "all" or self.from_step:
            axis = axis_of("positions", hook)
            tokens = tokens_along(axes[axis], activation.shape[axis], activation.shape[0], hook)
            places = torch.arange(tokens.length, device=activation.device) + tokens.first
            first = tokens.prompt + (self.from_step - 1 if self.from_step else 0)
            masks.append(along(places < first if self.part == "prompt" else places >= first, axis, activation.ndim))
        if self.where is not None:
            masks.append(self.where.mask(activation, hook))
        return masks

    # Of scores and patterns, which heads and queries it touches: no others are made for it.

    def touched(self, shape: tuple[int, int, int, int], hook: HookPoint) -> Touched | None:
        """Which heads and queries it touches."""
        if self.heads is None and self.positions is None and self.part == "all" and not self.from_step:
            return None
        heads, queries = torch.ones(shape[1], dtype=torch.bool), torch.ones(shape[2], dtype=torch.bool)
        for mask in replace(self, where=None).masks(torch.empty(()).expand(shape), hook):
            heads &= mask.amax((0, 2, 3))
            queries &= mask.amax((0, 1, 3))
        return Touched(heads, queries, MAX_BYTES)

    def within(self, part: Part, hook: HookPoint) -> HookFunction:
        """The same, of a part: its numbers for heads are those of the part's."""
        own: dict[str, Any] = {
            name: picked(value, {value.ndim - 3: part.heads})
            for name in self.numbers
            if isinstance(value := getattr(self, name), Tensor) and value.ndim > 2 and value.shape[-3] > 1
        }
        made, places = replace(self, **own) if own else self, {1: part.heads, 2: part.queries}

        def change(activation: Tensor, hook: HookPoint, **inputs: Tensor) -> Tensor:
            new = made.made(activation, hook, inputs)
            masks = self.masks(activation.new_empty(()).expand(part.shape), hook)
            mask = _all_of([picked(x, {a: i for a, i in places.items() if x.shape[a] > 1}) for x in masks])
            return new if mask is None else torch.where(mask, new, activation)

        return change


def _all_of(masks: Sequence[Tensor]) -> Tensor | None:
    """Where all masks are true; None: there are none."""
    return functools.reduce(torch.logical_and, masks) if masks else None


def _code(value: object) -> str:
    """A field as the code that makes it."""
    if isinstance(value, Tensor):
        return f"torch.tensor({value.detach().tolist()!r}, dtype={value.dtype})"
    return repr(value)


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other


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
    numbers = ("value",)

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        value = self.number("value", activation, inputs, hook)
        return torch.full_like(activation, value) if isinstance(value, float | int) else value.expand_as(activation)


@dataclass(frozen=True, repr=False, eq=False)
class Add(Operation):
    """Adds a value: a steering vector (Turner et al. 2023).

    Args:
        value: broadcasts over the activation.
        scale: what it is multiplied with; broadcasts, too.
    """

    value: Number
    scale: Number = 1.0
    numbers = ("value", "scale")

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        value = self.number("value", activation, inputs, hook)
        if isinstance(self.scale, float) and self.scale == 1.0:
            return activation + value
        return activation + self.number("scale", activation, inputs, hook) * value


@dataclass(frozen=True, repr=False, eq=False)
class AddScaled(Operation):
    """Adds a direction that is as long as the activation is: ``h + scale * |h| * v / |v|``, lengths along features.

    So are activations given to an activation oracle (Karvonen et al. 2025), whatever the norm of the stream is there.

    Args:
        value: ``[feature]``, or what broadcasts over the activation; of any length but zero.
        scale: in lengths of the activation.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.interventions import AddScaled
        >>> bridge = TransformerBridge.boot_embedded()
        >>> op = AddScaled(torch.ones(128), 0.5, positions=-1)
        >>> bridge.run_with_hooks("Mary and", fwd_hooks=[("blocks.1.hook_resid_post", op)]).shape
        torch.Size([1, 3, 654])
    """

    value: Tensor | str
    scale: Number = 1.0
    numbers = ("value", "scale")
    of_features = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_vectors("value", self.value)

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        value = self.number("value", activation, inputs, hook)
        wide = torch.promote_types(activation.dtype, torch.float32)
        longs = [torch.linalg.vector_norm(x.to(wide), dim=-1, keepdim=True) for x in (activation, value)]
        added = value.to(wide) * (longs[0] / longs[1]) * self.number("scale", activation, inputs, hook)
        return activation + added.to(activation.dtype)


def _refuse_number(name: str, value: object) -> None:
    """Refuses a number where several are needed.

    Raises:
        TypeError: it is one.
    """
    if isinstance(value, float):
        raise TypeError(f"{name} is {value}; it must be a tensor, or the name of an input")


def _check_vectors(name: str, value: object) -> None:
    """Refuses what has no direction.

    Raises:
        TypeError: a number.
        ValueError: a vector of zeros.
    """
    _refuse_number(name, value)
    # Of what `torch.vmap` maps over, nothing can be asked.
    if (
        isinstance(value, Tensor)
        and not is_functorch_wrapped_tensor(value)
        and not bool(value.any(-1).all() if value.ndim else False)
    ):
        raise ValueError(f"{name} has shape {list(value.shape)} and a vector of zeros in it, which has no direction")


@dataclass(frozen=True, repr=False, eq=False)
class Probe(Operation):
    """Reads ``activation @ direction + bias`` and leaves the activation as it is; conditions ask what it read.

    Args:
        direction: ``[feature]``.
        name: what conditions call it.
        bias: a number.
        over: whether ``probe > threshold`` is asked of each token, or of each row (see `Condition`).

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.interventions import Add, Interventions, Probe
        >>> bridge = TransformerBridge.boot_embedded()
        >>> probe = Probe(torch.ones(128), "sure")
        >>> steer = Add(torch.randn(128), where=probe > 2.0)
        >>> pairs = Interventions([("blocks.1.hook_resid_post", probe), ("blocks.2.hook_resid_post", steer)], bridge)
        >>> bridge.run_with_hooks("Mary and", fwd_hooks=pairs).shape
        torch.Size([1, 3, 654])
    """

    direction: Tensor | str
    name: str
    bias: Number = 0.0
    over: str = "tokens"
    numbers = ("direction", "bias")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("over", self.over, ("tokens", "rows"))
        _check_vectors("direction", self.direction)
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name is {self.name!r}; it must be a text")
        if isinstance(self.direction, Tensor) and self.direction.ndim != 1:
            raise ValueError(f"direction has shape {list(self.direction.shape)}; it must be [feature]")
        chosen = [f.name for f in fields(Operation) if getattr(self, f.name) != f.default]
        if chosen:
            raise ValueError(f"a probe reads everywhere: {', '.join(chosen)} would have no effect")

    def __gt__(self, threshold: float) -> Condition:
        return Condition(self.name, True, threshold, self.over)

    def __lt__(self, threshold: float) -> Condition:
        return Condition(self.name, False, threshold, self.over)

    @property
    def remembers(self) -> bool:
        return True

    def check_point(self, hook: HookPoint) -> None:
        super().check_point(hook)
        axes = hook.point.axes.split()
        if len(axes) != 3 or axes[0] != "batch" or axes[1] not in _POSITIONS:
            raise ValueError(f"{hook.name} has the axes [{hook.point.axes}]; a probe reads [batch pos feature]")

    def __call__(self, activation: Tensor, hook: HookPoint, **inputs: Tensor) -> Tensor:
        self.check_point(hook)
        readings = _readings(hook)
        read = activation @ self.number("direction", activation, inputs, hook)
        read = read + self.number("bias", activation, inputs, hook)
        rows, length = read.shape
        tokens = tokens_along(hook.point.axes.split()[1], length, rows, hook)
        known = read
        if tokens.real is not None:
            places = torch.arange(length) + tokens.first
            real = tokens.real.to(read.device)[:, places.clamp(max=tokens.prompt - 1)]
            known = read.masked_fill(~(real | (places >= tokens.prompt).to(read.device)), float("-inf"))
        own = rows_given(rows, hook)
        highest = known.reshape(own, -1).amax(-1)
        before = readings.get(self.name)
        if before is not None and before.highest.shape == highest.shape:
            highest = torch.maximum(highest, before.highest.to(highest.device))
        generation = pass_of(hook)[1]
        step = None if generation is None else generation.tokens
        readings[self.name] = ProbeReading(step, read.detach(), highest.detach())
        return activation


@dataclass(frozen=True, repr=False, eq=False)
class Scale(Operation):
    """Multiplies the activation with a number, or a tensor of them.

    Args:
        by: broadcasts over the activation.
    """

    by: Number
    numbers = ("by",)

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
    numbers = ("min", "max")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min is None and self.max is None:
            raise ValueError("Clamp needs min, max, or both")
        bounds = [x for x in (self.min, self.max) if x is not None and not isinstance(x, str)]
        if len(bounds) == 2 and bool((torch.as_tensor(bounds[0]) > torch.as_tensor(bounds[1])).any()):
            raise ValueError(f"min is {self.min} and max {self.max}: nothing is between them")

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

    def touched(self, shape: tuple[int, int, int, int], hook: HookPoint) -> Touched | None:
        return None if self.over == "heads" else super().touched(shape, hook)

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
    of_features = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_number("directions", self.directions)
        if isinstance(self.directions, Tensor):
            if self.directions.ndim not in (1, 2) or not self.directions.is_floating_point():
                raise ValueError(
                    f"directions has shape {list(self.directions.shape)} and type {self.directions.dtype}; it must be "
                    "of fractions, [feature] or [direction feature]"
                )
            rows = self.directions.detach().double().reshape(-1, self.directions.shape[-1])
            if not is_functorch_wrapped_tensor(rows) and int(torch.linalg.matrix_rank(rows)) < len(rows):
                raise ValueError("the directions depend on each other (or one is zero): give each of them once")

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
    numbers = ("directions", "most")

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
    numbers = ("source",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_number("source", self.source)

    def check_number(self, name: str, value: Tensor, axes: list[str], hook: HookPoint) -> None:
        if value.ndim != len(axes):
            raise ValueError(
                f"the source of Replace has shape {list(value.shape)}; at {hook.name} it needs the axes "
                f"[{hook.point.axes}], as a cache with its batch axis has them"
            )
        self._check_heads(name, value, axes, hook)

    @property
    def chooses_tokens(self) -> bool:
        return True  # those that the other run has

    def touched(self, shape: tuple[int, int, int, int], hook: HookPoint) -> Touched | None:
        found = super().touched(shape, hook)
        return None if found is None else Touched(found.heads, torch.ones_like(found.queries), None)

    def made(self, activation: Tensor, hook: HookPoint, inputs: Mapping[str, Tensor]) -> Tensor:
        source: Tensor = self.number("source", activation, inputs, hook)
        if is_compiling():
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
    kind.__name__: kind
    for kind in (Set, Add, AddScaled, Scale, Clamp, Zero, Mean, ProjectOut, ProjectOnto, Cap, Replace, Probe)
}
