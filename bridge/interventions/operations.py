"""The operations: a closed set, so that a file of them cannot contain anything else."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar, dataclass_transform

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from adapters.imports import is_compiling
from bridge.arguments import TokenPositions, check_choice, positions_of
from bridge.hooks.context import Generation, HookFunction, pass_of, pass_under_way
from bridge.hooks.hooks import HookPoint
from bridge.hooks.parts import MAX_BYTES, Part, Touched, TouchesPart, picked
from bridge.rows import BatchRows, token_axis

# --------------------------------------------------------------------------------------------------
# The axes of an activation, and the entries that an index selects.
# --------------------------------------------------------------------------------------------------


#: Entries along an axis: one, several, a range; None: all of them.
Index = int | np.integer | Sequence[int] | TokenPositions | np.ndarray | Tensor | slice | None
#: The same, in the form that an operation stores.
Kept = tuple[int, ...] | slice | None

POSITIONS = ("pos", "decoder_pos", "key_pos", "decoder_key_pos")
_KEYS = ("key_pos", "decoder_key_pos")
_HEADS = ("n_heads", "n_key_value_heads")
_NO_FEATURES = ("batch", "row", *POSITIONS, *_HEADS)


#: The axes that each field of an operation selects from, but for features.
_AXES = {"positions": POSITIONS, "keys": _KEYS, "heads": _HEADS, "rows": ("batch",)}


def kept_index(name: str, index: object) -> Kept:
    """Convert an index to the form that an operation stores.

    Args:
        name: the name of the field, for the error.
        index: the user's index.

    Raises:
        TypeError: it is not an index.
        ValueError: it selects nothing, or goes backwards.
    """
    index = positions_of(index) if name in ("positions", "keys") else index
    if index is None:
        return None
    if isinstance(index, slice):
        ends = (index.start, index.stop, index.step)
        if any(end is not None and type(end) is not int for end in ends):
            raise TypeError(f"{name} is {index}; the ends of a range are whole numbers")
        if index.step is not None and index.step < 1:
            raise ValueError(f"{name} is {index}; a range goes forwards")
        return index
    if isinstance(index, np.integer | np.ndarray | Tensor):
        index = index.tolist()
    entries: tuple[Any, ...] = (index,)
    if isinstance(index, Sequence) and not isinstance(index, str):
        entries = tuple(index)
    if any(type(entry) is not int for entry in entries):
        raise TypeError(f"{name} is {index!r}; it must be a whole number, several, or a slice")
    if not entries:
        raise ValueError(f"{name} is {index!r}, which chooses nothing")
    return entries


def axis_of(field: str, hook: HookPoint) -> int:
    """Return the axis of an activation that a field of an operation selects from.

    Raises:
        ValueError: the activation has no such axis.
    """
    axes = hook.point.axes.split()
    if field == "features" and axes[-1] not in _NO_FEATURES and not axes[-1].isdigit():
        return len(axes) - 1
    for name in _AXES.get(field, ()):
        if name in axes:
            return axes.index(name)
    if field == "heads":  # a layer with its own number of heads
        for axis, name in enumerate(axes[:-1]):
            if name.isdigit():
                return axis
    raise ValueError(f"{hook.name} has the axes [{hook.point.axes}], and no {field} among them")


@dataclass(frozen=True)
class SequencePart:
    """The range of a sequence's tokens to which the entries along an axis belong.

    Attributes:
        first: the position of the first entry in the sequence, counting padding.
        length: the number of entries.
        prompt: the number of tokens in the prompt, counting padding.
        real: mask of the prompt's tokens that are not padding, ``[row, prompt]``; None: there is no
            padding.
        continues: whether the run continues another one, so that the end of the prompt is unknown,
            and `prompt` counts all tokens so far.
    """

    first: int
    length: int
    prompt: int
    real: Tensor | None = None
    continues: bool = False

    def check_end_is_known(self, hook_name: str) -> None:
        """Check that positions can be counted from the end of the prompt.

        Raises:
            ValueError: the run continues another one.
        """
        if self.continues:
            raise ValueError(
                f"the intervention at {hook_name} counts from the end of the prompt, and this run"
                " continues another one, so it does not know where that is: count positions from"
                " the front, or use bridge.generate, or bridge.generate_batch"
            )


def tokens_along(axis: int, activation: Tensor, hook: HookPoint) -> SequencePart:
    """Return the tokens at the entries of a position axis, in the current pass.

    Args:
        axis: the position axis.
        activation: the activation.
        hook: its hook point.

    Raises:
        ValueError: the tokens are unknown.
    """
    rows, length = activation.shape[0], activation.shape[axis]
    if is_compiling():
        return SequencePart(0, length, length)
    run, generation = pass_of(hook)
    name = hook.point.axes.split()[axis]
    if generation is not None and generation.prompt is not None:
        if not generation.in_order:
            raise ValueError(
                f"the intervention at {hook.name} is only for some tokens, and in this way of"
                " generating tokens are processed that do not stay in the sequence, so their places"
                " are not known: generate without assistant, look-up or contrastive search"
            )
        if name.startswith("decoder_") == generation.of_decoder:
            return _generated_tokens(name, length, rows, hook, generation)
    elif run is not None and run.past and _grows(name, run.rows):
        return _continued_tokens(name, length, rows, run.past, run.rows)
    # A plain run, or the encoder of a generation: all its tokens are the prompt.
    batch = None if run is None else run.rows
    if batch is None or (batch.count != rows and run is not pass_under_way()):
        # Without a batch, or in a trace's part of one prompt: no padding.
        return SequencePart(0, length, length)
    return SequencePart(0, length, length, batch.real(name, length, rows))


def _grows(axis: str, batch: BatchRows | None) -> bool:
    """Tell whether an axis belongs to the sequence that a run with a past continues."""
    return batch is None or token_axis(axis) == batch.growing


def _continued_tokens(
    axis: str, length: int, rows: int, past: int, batch: BatchRows | None
) -> SequencePart:
    """Return the tokens at the entries of a position axis, in a run that continues a past."""
    mask = None if batch is None else batch.masks.get(token_axis(axis))
    whole = past + (length if axis not in _KEYS else max(length - past, 0))
    if mask is not None:
        whole = mask.shape[1]
    real = None if batch is None else batch.real(axis, whole, rows)
    return SequencePart(max(0, whole - length), length, whole, real, continues=True)


def padded_tokens(axis: int, activation: Tensor, hook: HookPoint) -> SequencePart | None:
    """Return the tokens along a position axis; None if no row of the pass is padded.

    Args:
        axis, activation, hook: as for `tokens_along`.
    """
    if is_compiling():
        return None
    run, generation = pass_of(hook)
    of_run = None if run is None else run.rows
    batch = of_run if generation is None or generation.rows is None else generation.rows
    if batch is None or not batch.masks:
        return None
    tokens = tokens_along(axis, activation, hook)
    return None if tokens.real is None else tokens


def _generated_tokens(
    axis: str, length: int, rows: int, hook: HookPoint, generation: Generation
) -> SequencePart:
    """Return the tokens at the entries of a position axis, in a step of a generation."""
    if generation.step and axis not in _KEYS and length not in (1, generation.tokens):
        raise ValueError(
            f"the intervention at {hook.name} is for some tokens alone, and it has {length}"
            f" positions in a step of one, after {generation.tokens - 1} tokens: which tokens"
            " these are is not known. Generate the rows one by one (transformers' RWKV mixes"
            " the rows of a batch)"
        )
    assert generation.prompt is not None
    first = max(0, generation.tokens - length)
    batch = generation.rows
    real = None if batch is None else batch.real(axis, generation.prompt, rows)
    return SequencePart(first, length, generation.prompt, real)


def chosen(index: Kept, tokens: SequencePart, name: str, like: Tensor) -> Tensor:
    """Return a mask of the entries that an index selects, ``[length]`` or ``[row length]`` if rows
    differ.

    Args:
        index: an index that counts from the front or, if negative, from the end of the prompt.
        tokens: the tokens of the entries.
        name: the names of the hook point and field, for the error.
        like: a tensor on the target device.

    Raises:
        IndexError: there is no such entry.
    """
    positions, size = _positions(tokens, like.device)
    if isinstance(index, slice):
        if any(end is not None and end < 0 for end in (index.start, index.stop)):
            tokens.check_end_is_known(name)
        return _in_range(index, positions, size)
    assert index is not None
    if min(index) < 0:
        tokens.check_end_is_known(name)
    shortest = longest = tokens.prompt
    if isinstance(size, Tensor):
        shortest, longest = int(size.min()), int(size.max())
    mask = torch.zeros_like(positions, dtype=torch.bool)
    for entry in index:
        if entry >= shortest or entry < -shortest:
            sizes = f"{shortest} to {longest}" if shortest != longest else str(longest)
            raise IndexError(f"{name} is {entry}, and there are {sizes} of them")
        mask = mask | (positions == (entry if entry >= 0 else size + entry))
    return mask


def _positions(tokens: SequencePart, device: torch.device) -> tuple[Tensor, int | Tensor]:
    """Return the positions of the entries and the length of the prompt, without counting padding.
    If rows differ, the results are ``[row length]`` and ``[row 1]``. Padding has the position -1.
    """
    places = torch.arange(tokens.length, device=device)
    if tokens.first:
        places = places + tokens.first
    if tokens.real is None:
        return places, tokens.prompt
    real = tokens.real.to(device)
    size = real.sum(-1, keepdim=True)
    counted = (real.cumsum(-1) - 1).masked_fill(~real, -1)
    in_prompt = counted[:, places.clamp(max=tokens.prompt - 1)]
    behind_prompt = places - tokens.prompt + size
    return torch.where(places < tokens.prompt, in_prompt, behind_prompt), size


def _in_range(index: slice, positions: Tensor, size: int | Tensor) -> Tensor:
    """Return a mask of the positions in a range, whose bounds may count from the prompt's end."""
    start, stop, step = index.start or 0, index.stop, index.step or 1
    first: int | Tensor = start
    if start < 0:
        first = size + start
        first = first.clamp_min(0) if isinstance(first, Tensor) else max(first, 0)
    mask = (positions >= first) & (positions < size)
    if stop is not None:
        mask = mask & (positions < (stop if stop >= 0 else size + stop))
    return mask if step == 1 else mask & ((positions - first) % step == 0)


def user_rows(rows: int, hook: HookPoint) -> int:
    """Return the user's number of rows: a generation repeats rows for beams and sequences.

    Args:
        rows: the number of rows in the activation.
        hook: the hook point.
    """
    generation = None if is_compiling() else pass_of(hook)[1]
    if generation is None or generation.rows is None:
        return rows
    count = generation.rows.count
    return count if count and rows % count == 0 else rows


def along(mask: Tensor, axis: int, ndim: int) -> Tensor:
    """Reshape a mask ``[length]`` or ``[rows length]`` to broadcast over an activation.

    Args:
        mask: the mask.
        axis: the axis of the activation that the mask runs along; rows are the first axis.
        ndim: the number of the activation's axes.
    """
    shape = [1] * ndim
    shape[axis] = mask.shape[-1]
    if mask.ndim == 2:
        shape[0] = mask.shape[0]
    return mask.reshape(shape)


# --------------------------------------------------------------------------------------------------
# The common part of all operations: where they act, their numbers, and their call.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A condition on a `Probe`'s reading: written ``probe > threshold`` or ``probe < threshold``.

    Args:
        probe: its name.
        above: whether the reading has to be above the threshold; otherwise below.
        threshold: a number.
        over: ``"tokens"``: test each token's own reading; ``"rows"``: test, for all tokens of a row
            (or request), the highest reading of its tokens so far.
    """

    probe: str
    above: bool
    threshold: float
    over: str = "tokens"

    def __post_init__(self) -> None:
        check_choice("over", self.over, ("tokens", "rows"))
        if not isinstance(self.probe, str) or type(self.above) is not bool:
            raise TypeError(
                f"a condition is made by `probe > threshold`, not of {self.probe!r} and"
                f" {self.above!r}"
            )
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int | float):
            raise TypeError(f"threshold is {self.threshold!r}; it must be a number")
        if not math.isfinite(self.threshold):
            raise ValueError(
                f"threshold is {self.threshold}, which no reading can be compared with"
            )

    def mask(self, activation: Tensor, hook: HookPoint) -> Tensor:
        """Return where the condition holds, as a mask that broadcasts over the activation.

        Raises:
            RuntimeError: its probe has not read anything in this pass.
            ValueError: the probe read different tokens from the activation's.
        """
        readings, step = probe_readings(hook)
        reading = readings.get(self.probe)
        if reading is None or (self.over == "tokens" and reading.step != step):
            raise RuntimeError(
                f"the operation at {hook.name} asks what the probe {self.probe!r} read, and it has"
                " read nothing in this pass: put the probe at a point that comes before, [(earlier"
                " point, probe), (this point, operation)]"
            )
        values = reading.tokens if self.over == "tokens" else reading.highest
        holds = values > self.threshold if self.above else values < self.threshold
        return self._spread(holds.to(activation.device), activation, hook)

    def _spread(self, holds: Tensor, activation: Tensor, hook: HookPoint) -> Tensor:
        """Reshape a mask of rows or tokens so that it broadcasts over the activation."""
        rows = activation.shape[0]
        if self.over == "rows":
            count = user_rows(rows, hook)
            if len(holds) != count:
                raise ValueError(
                    f"the probe {self.probe!r} read {len(holds)} rows; {hook.name} has {count}"
                )
            return along(holds.repeat_interleave(rows // count), 0, activation.ndim)
        axis = axis_of("positions", hook)
        if holds.shape != (rows, activation.shape[axis]):
            raise ValueError(
                f"the probe {self.probe!r} read {list(holds.shape)} tokens; {hook.name} has"
                f" [{rows}, {activation.shape[axis]}] of them: use a probe over rows"
            )
        return along(holds, axis, activation.ndim)


@dataclass(frozen=True)
class TokenReadings:
    """The value that a probe has read.

    Attributes:
        step: the number of tokens of a generation that were processed then; None outside of a
            generation.
        tokens: ``[row, token]``, the readings in the current pass.
        highest: ``[row]``, the highest reading of all tokens so far except padding, for the user's
            rows.
    """

    step: int | None
    tokens: Tensor
    highest: Tensor


def probe_readings(hook: HookPoint) -> tuple[dict[str, TokenReadings], int | None]:
    """Return the readings of probes in the current run, or in its generation, and the current step.

    Raises:
        RuntimeError: no run is in progress.
    """
    run, generation = pass_of(hook)
    holder = run if generation is None else generation
    if holder is None or is_compiling():
        raise RuntimeError(
            f"a probe, or a condition, at {hook.name} is for runs of a bridge, not for programs"
        )
    return holder.readings, None if generation is None else generation.tokens


#: A number of an operation: a tensor that broadcasts over the activation, a float, or the name of a
#: program's input.
Number = Tensor | float | str
#: The inputs of a program, by name.
Inputs = Mapping[str, Tensor]
#: The numbers of an operation by field, each a float or a tensor like the activation.
Numbers = Mapping[str, Any]

_WHERE = ("positions", "keys", "heads", "features", "rows")
_PARTS = ("all", "prompt", "generated")


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Operation(TouchesPart):
    """A change of an activation as data: a hook function, called as ``operation(activation,
    hook)``.

    Without any of the following arguments, it acts on the whole activation. An index is a number,
    several numbers, or a slice.

    Args:
        positions: tokens of the prompt, counted from its front or, if negative, from its end,
            without padding. In a run, all tokens are the prompt.
        keys: the same, along the keys of a pattern or of scores.
        heads: attention heads.
        features: entries along the last axis.
        rows: rows of the batch.
        part: ``"all"`` tokens, only those of the ``"prompt"``, or only the ``"generated"`` ones.
        from_step: only tokens that are processed in this step of a generation or later: step 0
            processes the prompt, step 1 the first new token.
        where: only tokens for which a probe at an earlier point read more, or less, than a
            threshold: ``probe > 0.5``.
    """

    positions: Index = None
    keys: Index = None
    heads: Index = None
    features: Index = None
    rows: Index = None
    part: str = "all"
    from_step: int = 0
    where: Condition | None = None

    #: The fields that hold numbers of the operation.
    numbers: ClassVar[tuple[str, ...]] = ()
    #: Whether its numbers are vectors of features.
    of_features: ClassVar[bool] = False
    #: Whether hooks are told the current run (see `Listener`).
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
            raise TypeError(
                f"where is {self.where!r}; it must be a condition, as `probe > 0.5` makes it"
            )
        for name in self.numbers:
            self._check_kind(name)

    def _check_kind(self, name: str) -> None:
        """Reject a value that is not a valid number; convert integers to floats.

        Raises:
            TypeError: it is not a number, or complex.
            ValueError: a text that is not a valid input name.
        """
        value = getattr(self, name)
        if type(value) is int:
            object.__setattr__(self, name, float(value))
        elif isinstance(value, str):
            if not value.isidentifier():
                raise ValueError(f"{name} is {value!r}, which cannot be the name of an input")
        elif isinstance(value, Tensor):
            if value.is_complex():
                raise TypeError(
                    f"{name} is of {value.dtype}, and activations are no complex numbers"
                )
        elif not isinstance(value, float):
            optional = getattr(type(self), name, 0.0) is None  # its default
            if value is not None or not optional:
                shown = repr(value)
                if hasattr(value, "vector"):
                    shown = f"a {type(value).__name__} (give its .vector)"
                raise TypeError(
                    f"{name} is {shown}; it must be a tensor, a number, or the name of an input"
                )

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in self.numbers or value != field.default:
                shown.append(f"{field.name}={_code(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __hash__(self) -> int:
        return hash((type(self), self.part, self.from_step, str(self.positions), str(self.heads)))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the program inputs that the operation needs."""
        values = [getattr(self, name) for name in self.numbers]
        return tuple(dict.fromkeys([value for value in values if isinstance(value, str)]))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors, by name."""
        values = {name: getattr(self, name) for name in self.numbers}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def chooses_tokens(self) -> bool:
        """Tell whether it acts on selected tokens, so that it must know each token's position."""
        return self.positions is not None or self.keys is not None or self._limits_steps

    @property
    def _limits_steps(self) -> bool:
        """Tell whether it acts only on the prompt, only on generated tokens, or only from some step
        on."""
        return self.part != "all" or self.from_step > 0

    @property
    def mixes_rows(self) -> bool:
        """Tell whether the result for one row depends on other rows."""
        return False

    @property
    def remembers(self) -> bool:
        """Tell whether it reads, or depends on, a value read elsewhere in the pass."""
        return self.where is not None

    def check_alone(self, hook: HookPoint) -> None:
        """Raise an error if the operation would give a different result for requests of a batch,
        which are run as single rows.

        Args:
            hook: the hook point.

        Raises:
            ValueError: it selects rows, has different numbers for rows, mixes rows, or needs an
                input.
        """
        ndim = len(hook.point.axes.split())
        per_row = any(x.ndim == ndim and len(x) > 1 for x in self.tensors.values())
        if self.rows is not None or self.mixes_rows or per_row or self.inputs:
            what = "asks for inputs" if self.inputs else "is for the rows of one batch"
            raise ValueError(
                f"{type(self).__name__} at {hook.name} {what}, and each request here is a run of"
                " its own row: give each request its own interventions"
            )

    def check_point(self, hook: HookPoint) -> None:
        """Reject a hook point that the operation does not fit.

        Args:
            hook: the hook point.

        Raises:
            ValueError: its activation lacks the required axes.
        """
        for field in _WHERE:
            if getattr(self, field) is not None:
                axis_of(field, hook)
        if self._limits_steps or (self.where is not None and self.where.over == "tokens"):
            axis_of("positions", hook)
        if self.where is not None:
            axis_of("rows", hook)
        if self.of_features:
            axis_of("features", hook)
        for name, value in self.tensors.items():
            self.check_number(name, value, hook)

    def check_number(self, name: str, value: Tensor, hook: HookPoint) -> None:
        """Reject a tensor that does not broadcast over the activation for every number of tokens.

        Raises:
            ValueError: it does not broadcast.
        """
        axes = hook.point.axes.split()
        pairs = zip(reversed(axes), reversed(value.shape), strict=False)
        per_token = any(axis.endswith("pos") and size != 1 for axis, size in pairs)
        if value.ndim > len(axes) or per_token:
            raise ValueError(
                f"{self._described(name, value)}; at {hook.name} it has to broadcast over"
                f" [{hook.point.axes}], with one number for all positions (Replace takes a number"
                " for each)"
            )
        self._check_heads(name, value, hook)

    def _check_heads(self, name: str, value: Tensor, hook: HookPoint) -> None:
        n_heads = hook.point.n_heads
        if n_heads is None:
            return
        axis = axis_of("heads", hook) - len(hook.point.axes.split())
        if value.ndim < -axis:
            return
        size = value.shape[axis]
        if size not in (1, n_heads):
            raise ValueError(
                f"{self._described(name, value)}, for {size} heads; {hook.name} has {n_heads}, all"
                " of which it needs, or 1 for all (heads= says which are changed)"
            )

    def _described(self, name: str, value: Tensor) -> str:
        """Return the beginning of an error message about a number's shape."""
        return f"{name} of {type(self).__name__} has shape {list(value.shape)}"

    def __call__(self, activation: Tensor, hook: HookPoint, **inputs: Tensor) -> Tensor:
        """Return the activation, changed by the operation.

        Args:
            activation: the activation.
            hook: its hook point, whose axes are known.
            inputs: the inputs that it needs, by name.

        Raises:
            TypeError: an input is missing.
            IndexError: there is no such position, head, feature or row.
        """
        changed = self._changed(activation, hook, inputs)
        mask = self.mask(activation, hook)
        return changed if mask is None else torch.where(mask, changed, activation)

    def _changed(self, activation: Tensor, hook: HookPoint, inputs: Inputs) -> Tensor:
        """Return the operation's result as if it acted on the whole activation."""
        numbers = {
            name: self.number(name, activation, inputs, hook)
            for name in self.numbers
            if getattr(self, name) is not None
        }
        return self.change(activation, numbers)

    def change(self, activation: Tensor, numbers: Numbers) -> Tensor:
        """Return the operation's result for the whole activation."""
        raise NotImplementedError

    def number(self, name: str, activation: Tensor, inputs: Inputs, hook: HookPoint) -> Any:
        """Return a number on the activation's device and in its dtype.

        Raises:
            TypeError: the input was not passed; or it is fractional and the activation has an
                integer dtype.
            ValueError: its width differs from the activation's.
        """
        value = self._value(name, inputs, hook)
        fractional = activation.is_floating_point()
        if isinstance(value, float):
            if not fractional and not value.is_integer():
                raise TypeError(
                    f"{name} is {value}; the activation at {hook.name} is {activation.dtype}"
                )
            return value if fractional else int(value)
        width = activation.shape[-1]
        if value.ndim and value.shape[-1] not in (1, width):
            raise ValueError(
                f"{self._described(name, value)}; the activation at {hook.name} has {width} entries"
                f" along its last axis, {hook.point.axes.split()[-1]}"
            )
        if value.is_floating_point() and not fractional:
            raise TypeError(
                f"{name} is {value.dtype}; the activation at {hook.name} is {activation.dtype}"
            )
        if value.ndim == activation.ndim and value.shape[0] > 1:
            rows = activation.shape[0]
            if value.shape[0] == user_rows(rows, hook):  # one number for all beams of a request
                value = value.repeat_interleave(rows // value.shape[0], 0)
        return value.to(activation.device, activation.dtype)

    def _value(self, name: str, inputs: Inputs, hook: HookPoint) -> Any:
        """Return a field's number, from the inputs if it is the name of one."""
        value = getattr(self, name)
        if not isinstance(value, str):
            return value
        if value not in inputs:
            raise TypeError(
                f"{type(self).__name__} at {hook.name} asks for the input {value!r}, which"
                " nobody gave: declare it in a program's inputs, or give the number:"
                f" Interventions.with_inputs({value}=...)"
            )
        return inputs[value]

    def mask(self, activation: Tensor, hook: HookPoint) -> Tensor | None:
        """Return a mask of where it acts, which broadcasts over the activation; None:
        everywhere."""
        return _all_of(self.masks(activation, hook))

    def masks(self, activation: Tensor, hook: HookPoint) -> list[Tensor]:
        """Return masks that broadcast over the activation; the operation acts where all are
        true.
        """
        masks = _masks_of_padded_keys(activation, hook)
        for field in _WHERE:
            if getattr(self, field) is not None:
                masks.append(self._mask_along(field, activation, hook))
        if self._limits_steps:
            masks.append(self._mask_of_steps(activation, hook))
        if self.where is not None:
            masks.append(self.where.mask(activation, hook))
        return masks

    def _mask_along(self, field: str, activation: Tensor, hook: HookPoint) -> Tensor:
        """Return a mask of the entries that a field selects."""
        axis = axis_of(field, hook)
        length = activation.shape[axis]
        if field in ("positions", "keys"):
            tokens = tokens_along(axis, activation, hook)
        else:
            count = user_rows(length, hook) if field == "rows" else length
            tokens = SequencePart(0, count, count)
        name = f"one of {field} at {hook.name}"
        mask = chosen(getattr(self, field), tokens, name, activation)
        if field == "rows":  # all beams of a request
            mask = mask.repeat_interleave(length // tokens.length)
        return along(mask, axis, activation.ndim)

    def _mask_of_steps(self, activation: Tensor, hook: HookPoint) -> Tensor:
        """Return a mask of the tokens that `part` and `from_step` select."""
        axis = axis_of("positions", hook)
        tokens = tokens_along(axis, activation, hook)
        tokens.check_end_is_known(hook.name)
        places = torch.arange(tokens.length, device=activation.device) + tokens.first
        first = tokens.prompt + max(0, self.from_step - 1)
        mask = places < first if self.part == "prompt" else places >= first
        return along(mask, axis, activation.ndim)

    # For scores and patterns: the touched heads and queries, so that only these are computed.

    def touched(self, shape: tuple[int, int, int, int], hook: HookPoint) -> Touched | None:
        """Return the heads and queries that it touches."""
        if self.heads is None and self.positions is None and not self._limits_steps:
            return None
        heads = torch.ones(shape[1], dtype=torch.bool, device="cpu")
        queries = torch.ones(shape[2], dtype=torch.bool, device="cpu")
        for mask in replace(self, where=None).masks(
            torch.empty((), device="cpu").expand(shape), hook
        ):
            heads &= mask.amax((0, 2, 3))
            queries &= mask.amax((0, 1, 3))
        return Touched(heads, queries, MAX_BYTES)

    def within(self, part: Part, hook: HookPoint) -> HookFunction:
        """Return the operation restricted to a part, with the numbers for the part's heads."""
        numbers: dict[str, Any] = {
            name: picked(value, {value.ndim - 3: part.heads})
            for name, value in self.tensors.items()
            if value.ndim > 2 and value.shape[-3] > 1
        }
        operation = replace(self, **numbers) if numbers else self

        def on_part(mask: Tensor) -> Tensor:
            places = {1: part.heads, 2: part.queries}
            return picked(mask, {axis: i for axis, i in places.items() if mask.shape[axis] > 1})

        def change(activation: Tensor, hook: HookPoint, **inputs: Tensor) -> Tensor:
            changed = operation._changed(activation, hook, inputs)
            masks = self.masks(activation.new_empty(()).expand(part.shape), hook)
            mask = _all_of([on_part(x) for x in masks])
            return changed if mask is None else torch.where(mask, changed, activation)

        return change


_Kind = TypeVar("_Kind", bound=Operation)


@dataclass_transform(eq_default=False, frozen_default=True)
def _operation(kind: type[_Kind]) -> type[_Kind]:
    """Make a class of operations a frozen dataclass, with the methods of `Operation`."""
    return dataclass(frozen=True, repr=False, eq=False)(kind)


def _masks_of_padded_keys(activation: Tensor, hook: HookPoint) -> list[Tensor]:
    """Return masks of the keys that are not padding, for scores and patterns: no operation may let
    a query attend to padding, because a row on its own has none.
    """
    axes = hook.point.axes.split()
    for axis, name in enumerate(axes):
        if name in _KEYS and (tokens := padded_tokens(axis, activation, hook)) is not None:
            positions, _ = _positions(tokens, activation.device)
            allowed = along(positions >= 0, axis, activation.ndim)
            for queries in [i for i, other in enumerate(axes) if other in ("pos", "decoder_pos")]:
                of_queries = padded_tokens(queries, activation, hook)
                if of_queries is not None:  # what padding attends to is of no row
                    positions, _ = _positions(of_queries, activation.device)
                    allowed = allowed | along(positions < 0, queries, activation.ndim)
            return [allowed]
    return []


def _all_of(masks: Sequence[Tensor]) -> Tensor | None:
    """Return the conjunction of all masks; None if there are none."""
    return functools.reduce(torch.logical_and, masks) if masks else None


def _code(value: object) -> str:
    """Return the source code of a field's value."""
    if isinstance(value, Tensor):
        return f"torch.tensor({value.detach().tolist()!r}, dtype={value.dtype})"
    return repr(value)


def _same(value: object, other: object) -> bool:
    """Tell whether two fields have equal values; for tensors, also equal dtypes."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    return not isinstance(value, Tensor) and not isinstance(other, Tensor) and value == other


@_operation
class Set(Operation):
    """An operation that replaces the activation by a value, such as a mean over a data set.

    Args:
        value: a number or a tensor that broadcasts over the activation.

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

    def change(self, activation: Tensor, numbers: Numbers) -> Tensor:
        value = numbers["value"]
        if isinstance(value, float | int):
            return torch.full_like(activation, value)
        try:
            return value.expand_as(activation)
        except RuntimeError as error:
            raise ValueError(
                f"{self._described('value', value)}, which does not broadcast over"
                f" {list(activation.shape)}. It covers the whole activation: heads= and the other"
                " arguments select which entries of it are set"
            ) from error


@_operation
class Add(Operation):
    """An operation that adds a value: a steering vector (Turner et al. 2023).

    Args:
        value: a number or a tensor that broadcasts over the activation.
        scale: a factor that multiplies the value; it broadcasts too.
    """

    value: Number
    scale: Number = 1.0
    numbers = ("value", "scale")

    def change(self, activation: Tensor, numbers: Numbers) -> Tensor:
        if isinstance(self.scale, float) and self.scale == 1.0:
            return activation + numbers["value"]
        return activation + numbers["scale"] * numbers["value"]


@_operation
class AddScaled(Operation):
    """An operation that adds a direction with the activation's norm: ``h + scale * |h| * v / |v|``,
    norms along features.

    Activation oracles (Karvonen et al. 2025) are given activations this way, independently of the
    stream's norm.

    Args:
        value: the direction, ``[feature]``, or a tensor that broadcasts over the activation; of any
            length except zero.
        scale: the size of the added vector, in units of the activation's norm.

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
        check_vectors("value", self.value)

    def change(self, activation: Tensor, numbers: Numbers) -> Tensor:
        wide = torch.promote_types(activation.dtype, torch.float32)
        value = numbers["value"].to(wide)
        activation_norm = torch.linalg.vector_norm(activation.to(wide), dim=-1, keepdim=True)
        value_norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
        added = value * (activation_norm / value_norm) * numbers["scale"]
        return activation + added.to(activation.dtype)


def _refuse_number(name: str, value: object) -> None:
    """Reject a single number where several are needed.

    Raises:
        TypeError: it is a single number.
    """
    if isinstance(value, float):
        raise TypeError(f"{name} is {value}; it must be a tensor, or the name of an input")


def check_vectors(name: str, value: object) -> None:
    """Reject vectors without a direction.

    Raises:
        TypeError: a number.
        ValueError: a vector of zeros.
    """
    _refuse_number(name, value)
    # Values of tensors under `torch.vmap` cannot be read.
    if not isinstance(value, Tensor) or is_functorch_wrapped_tensor(value):
        return
    if value.ndim == 0 or not bool(value.any(-1).all()):
        raise ValueError(
            f"{name} has shape {list(value.shape)} and a vector of zeros in it, which has no"
            " direction"
        )


@_operation
class Scale(Operation):
    """An operation that multiplies the activation by a number, or by a tensor.

    Args:
        by: a number or a tensor that broadcasts over the activation.
    """

    by: Number
    numbers = ("by",)

    def change(self, activation: Tensor, numbers: Numbers) -> Tensor:
        return activation * numbers["by"]


@_operation
class Clamp(Operation):
    """An operation that clamps the activation between two bounds.

    Args:
        min, max: numbers or tensors that broadcast over the activation; None: no bound.
    """

    min: Number | None = None
    max: Number | None = None
    numbers = ("min", "max")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min is None and self.max is None:
            raise ValueError("Clamp needs min, max, or both")
        bounds = [x for x in (self.min, self.max) if x is not None and not isinstance(x, str)]
        if len(bounds) == 2:
            lower, upper = map(torch.as_tensor, bounds)
            if bool((lower > upper).any()):
                raise ValueError(f"min is {self.min} and max {self.max}: nothing is between them")

    def change(self, activation: Tensor, numbers: Numbers) -> Tensor:
        clamped = activation
        for name, clamp in (("min", torch.maximum), ("max", torch.minimum)):
            if name in numbers:
                bound = numbers[name]
                if not isinstance(bound, Tensor):
                    bound = torch.full_like(activation, bound)
                clamped = clamp(clamped, bound)
        return clamped


@_operation
class Zero(Operation):
    """An operation that replaces the activation by zero (zero ablation)."""

    def change(self, activation: Tensor, numbers: Numbers) -> Tensor:
        return torch.zeros_like(activation)


@_operation
class Mean(Operation):
    """An operation that replaces the activation by its own mean along an axis. (`Set` uses a mean
    over other data.)

    Args:
        over: the axis: ``"rows"`` of the batch, position by position; ``"heads"``; or
            ``"features"``.
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

    def _changed(self, activation: Tensor, hook: HookPoint, inputs: Inputs) -> Tensor:
        if self.over == "rows":
            return _mean_of_rows(activation, hook)
        return mean(activation, axis_of(self.over, hook)).expand_as(activation)


def _mean_of_rows(activation: Tensor, hook: HookPoint) -> Tensor:
    """Return, for each token, the mean over the rows that have a token at its position.

    Padding is excluded and unchanged.

    Raises:
        ValueError: rows are padded, and the activation has axes of queries and keys; or a row of
            the generation has ended.
    """
    _, generation = pass_of(hook)
    if generation is not None and generation.ended is not None and bool(generation.ended.any()):
        raise ValueError(
            f'Mean("rows") at {hook.name}: a row of this generation has ended, and its padding'
            " would be in the mean of the others. Pass stop_at_eos=False, and cut the rows"
            " afterwards"
        )
    axes = hook.point.axes.split()
    of_tokens = [axis for axis, name in enumerate(axes) if name in POSITIONS]
    parts = [padded_tokens(axis, activation, hook) for axis in of_tokens]
    if not activation.is_floating_point() or not any(parts):
        return mean(activation, axis_of("rows", hook)).expand_as(activation)
    if len(of_tokens) > 1:
        raise ValueError(
            f'Mean("rows") at {hook.name} has no meaning for rows with padding, whose queries have'
            " other keys: run rows of one length, without padding"
        )
    (tokens,), (axis,) = parts, of_tokens
    assert tokens is not None
    positions, _ = _positions(tokens, activation.device)
    real, rows = positions >= 0, activation.movedim(axis, 1)
    at_position = nn.functional.one_hot(positions.clamp(min=0)) * real[..., None]
    counts = at_position.sum((0, 1)).clamp(min=1)
    weights = (at_position / counts).to(rows.dtype)
    means = torch.einsum("rpn,rp...->n...", weights, rows)
    of_tokens_own = means[positions.clamp(min=0)]
    real = real.reshape(*real.shape, *(1 for _ in rows.shape[2:]))
    return torch.where(real, of_tokens_own, rows).movedim(1, axis)


def mean(activation: Tensor, axis: int) -> Tensor:
    """Return the mean along an axis, which is kept; integers are returned unchanged."""
    return activation.mean(axis, keepdim=True) if activation.is_floating_point() else activation


@_operation
class ProjectOut(Operation):
    """An operation that removes the activation's component along directions (Arditi et al. 2024).

    Args:
        directions: ``[feature]``, or several ``[direction feature]``; of any length, at any angle.
    """

    directions: Tensor | str
    numbers: ClassVar[tuple[str, ...]] = ("directions",)
    of_features = True

    def __post_init__(self) -> None:
        super().__post_init__()
        directions = self.directions
        _refuse_number("directions", directions)
        if not isinstance(directions, Tensor):
            return
        if directions.ndim not in (1, 2) or not directions.is_floating_point():
            raise ValueError(
                f"directions has shape {list(directions.shape)} and type {directions.dtype}; it"
                " must be of fractions, [feature] or [direction feature]"
            )
        rows = directions.detach().double().reshape(-1, directions.shape[-1])
        if is_functorch_wrapped_tensor(rows):
            return
        if int(torch.linalg.matrix_rank(rows)) < len(rows):
            raise ValueError(
                "the directions depend on each other (or one is zero): give each of them once"
            )

    def check_number(self, name: str, value: Tensor, hook: HookPoint) -> None:
        pass  # its axes differ from the activation's

    def change(self, activation: Tensor, numbers: Numbers) -> Tensor:
        return activation - _component(activation, numbers["directions"])


@_operation
class ProjectOnto(ProjectOut):
    """An operation that keeps only the activation's component along directions.

    Args:
        directions: as for `ProjectOut`.
    """

    def change(self, activation: Tensor, numbers: Numbers) -> Tensor:
        return _component(activation, numbers["directions"])


@_operation
class Cap(ProjectOut):
    """An operation that caps the coordinate along a direction at a value.

    Args:
        directions: one direction ``[feature]``, of any length; the coordinate is measured along the
            unit vector.
        most: the largest allowed coordinate.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.interventions import Cap
        >>> bridge = TransformerBridge.boot_embedded()
        >>> capped = Cap(bridge.tokens_to_residual_directions(" Mary"), 0.0)
        >>> with bridge.hooks(fwd_hooks=[("blocks.3.hook_resid_post", capped)]):
        ...     bridge(
        ...         "When Mary and John went to the store, John gave a drink to",
        ...         return_type="predictions",
        ...     )
        ' John'
    """

    most: Number
    numbers = ("directions", "most")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, axes in (("directions", 1), ("most", 0)):
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.ndim != axes:
                raise ValueError(
                    f"{name} has shape {list(value.shape)}; Cap is along one direction, at one"
                    " number"
                )

    def change(self, activation: Tensor, numbers: Numbers) -> Tensor:
        unit = orthonormal(numbers["directions"].reshape(1, -1))[0]
        excess = (activation @ unit - numbers["most"]).clamp_min(0)
        return activation - excess.unsqueeze(-1) * unit


#: The largest cosine of two directions whose coordinates can be told apart.
_MOST_COSINE = 0.999


@_operation
class Swap(Operation):
    """An operation that exchanges the coordinates of two directions (Gurnee et al. 2026,
    "Verbalizable Representations Form a Global Workspace in Language Models"): the rest of the
    activation, orthogonal to both, is unchanged.

    Args:
        a, b: ``[feature]``, of any length, and not parallel. Coordinates are those of the sum
            ``coordinate_a * a + coordinate_b * b`` that is closest to the activation.
        scale: how far it goes: 1 exchanges them, 2 goes as far again.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.interventions import Swap
        >>> from bridge.lens import Lens
        >>> bridge = TransformerBridge.boot_embedded()
        >>> swap = Swap(*Lens(bridge).vectors([" Mary", " John"], 4), positions=-1)
        >>> with bridge.hooks(fwd_hooks=[("blocks.3.hook_resid_post", swap)]):
        ...     bridge(
        ...         "When Mary and John went to the store, John gave a drink to",
        ...         return_type="predictions",
        ...     )
        ' John'
    """

    a: Tensor | str
    b: Tensor | str
    scale: Number = 1.0
    numbers = ("a", "b", "scale")
    of_features = True

    def __post_init__(self) -> None:
        super().__post_init__()
        a, b = self.a, self.b
        check_vectors("a", a)
        check_vectors("b", b)
        # Values of tensors under `torch.vmap` cannot be read.
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or is_functorch_wrapped_tensor(a):
            return
        if a.ndim != 1 or a.shape != b.shape:
            raise ValueError(
                f"a and b have the shapes {list(a.shape)} and {list(b.shape)}; they must be"
                " [feature]"
            )
        cosine = float(torch.cosine_similarity(a.detach().double(), b.detach().double(), dim=0))
        if not abs(cosine) < _MOST_COSINE:
            raise ValueError(
                f"the cosine of a and b is {cosine:.4f}; it must be below {_MOST_COSINE}, or their"
                " coordinates cannot be told apart"
            )

    def change(self, activation: Tensor, numbers: Numbers) -> Tensor:
        wide = torch.promote_types(activation.dtype, torch.float32)
        a, b = numbers["a"].to(wide), numbers["b"].to(wide)
        aa, ab, bb = (a * a).sum(), (a * b).sum(), (b * b).sum()
        # The difference of the coordinates, by Cramer's rule.
        reading = (b * (aa + ab) - a * (bb + ab)) / (aa * bb - ab * ab)
        difference = (activation.to(wide) @ reading).unsqueeze(-1)
        return activation + (numbers["scale"] * difference * (a - b)).to(activation.dtype)


def _component(activation: Tensor, directions: Tensor) -> Tensor:
    """Return the component of an activation along directions."""
    basis = orthonormal(directions.reshape(-1, directions.shape[-1]))
    return (activation @ basis.T) @ basis


def orthonormal(rows: Tensor) -> Tensor:
    """Return an orthonormal basis of the row space by Gram-Schmidt (twice), which every export
    runtime supports.

    Args:
        rows: ``[direction feature]``, linearly independent.
    """
    basis: list[Tensor] = []
    for row in rows.to(torch.promote_types(rows.dtype, torch.float32)).unbind(0):
        for _ in range(2):
            for before in basis:
                row = row - (row * before).sum() * before
            row = row / (row * row).sum().sqrt()
        basis.append(row)
    return torch.stack(basis).to(rows.dtype)


@_operation
class Replace(Operation):
    """An operation that replaces the activation by one from another run.

    Args:
        source: the other run's activation, with one row or the same number of rows, and with as
            many positions as the prompt.
    """

    source: Tensor | str
    numbers = ("source",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_number("source", self.source)

    def check_number(self, name: str, value: Tensor, hook: HookPoint) -> None:
        if value.ndim != len(hook.point.axes.split()):
            raise ValueError(
                f"the source of Replace has shape {list(value.shape)}; at {hook.name} it needs the"
                f" axes [{hook.point.axes}], as a cache with its batch axis has them"
            )
        self._check_heads(name, value, hook)

    @property
    def chooses_tokens(self) -> bool:
        return True  # the tokens of the other run

    def touched(self, shape: tuple[int, int, int, int], hook: HookPoint) -> Touched | None:
        touched = super().touched(shape, hook)
        if touched is None:
            return None
        return Touched(touched.heads, torch.ones_like(touched.queries), None)

    def _changed(self, activation: Tensor, hook: HookPoint, inputs: Inputs) -> Tensor:
        source: Tensor = self.number("source", activation, inputs, hook)
        if is_compiling():
            return source.expand_as(activation)
        axes = hook.point.axes.split()
        here = [slice(None)] * len(axes)
        of_source = here.copy()
        for axis, name in enumerate(axes):
            size = source.shape[axis]
            if name.endswith("pos"):
                tokens = tokens_along(axis, activation, hook)
                fits = size == tokens.prompt
                end = max(tokens.first, min(tokens.prompt, tokens.first + tokens.length))
                here[axis] = slice(0, end - tokens.first)
                of_source[axis] = slice(tokens.first, end)
            else:
                fits = size in (1, activation.shape[axis])
            if not fits:
                raise ValueError(
                    f"the source of Replace at {hook.name} has shape {list(source.shape)}, the"
                    f" activation {list(activation.shape)} ([{hook.point.axes}]): it needs the"
                    " positions of the prompt, and one row or as many"
                )
        replaced = activation.clone()
        replaced[tuple(here)] = source[tuple(of_source)]
        return replaced


#: The operations that change activations.
KINDS: tuple[type[Operation], ...] = (
    Set,
    Add,
    AddScaled,
    Scale,
    Clamp,
    Zero,
    Mean,
    ProjectOut,
    ProjectOnto,
    Cap,
    Swap,
    Replace,
)
