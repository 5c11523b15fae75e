"""Which axis of an activation is which, and which of its entries are meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bridge.hooks.context import CURRENT, ForwardPass
from bridge.hooks.hook_point import HookPoint

#: Entries along an axis: one, several, a range; None: all of them.
Index = int | Sequence[int] | slice | None
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
        before, after: how many tokens of padding come before each row's prompt, and behind it; None: nowhere.
    """

    first: int
    length: int
    prompt: int
    before: Tensor | None = None
    after: Tensor | None = None


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
    if torch.compiler.is_compiling():
        return SequencePart(0, length, length)
    context = CURRENT.get()
    generation = context.generation
    if generation is None or generation.prompt is None:
        if context.run is not None and context.run.past:
            raise ValueError(
                f"the intervention at {hook.name} is for some tokens alone, and this run continues another one, whose "
                "length it does not know: use bridge.generate, or bridge.generate_batch"
            )
        return _in_a_run(axis, length, context.run)
    if not generation.in_order:
        raise ValueError(
            f"the intervention at {hook.name} is for some tokens alone, and in this way of generating tokens are "
            "processed that do not stay in the sequence, so their places are not known: generate without assistant, "
            "look-up or contrastive search"
        )
    if axis.startswith("decoder_") != generation.of_decoder:
        return _in_a_run(axis, length, context.run)  # an encoder's tokens: the prompt, all at once
    before: Tensor | None = None
    if any(generation.padding):
        copies = max(1, rows // len(generation.padding))
        before = torch.tensor(generation.padding).repeat_interleave(copies)
    return SequencePart(max(0, generation.tokens - length), length, generation.prompt, before)


def _in_a_run(axis: str, length: int, run: ForwardPass | None) -> SequencePart:
    """The tokens of a run: all of them are the prompt, but what a mask says is padding."""
    mask = None if run is None else run.masks.get(f"{'decoder_' * axis.startswith('decoder_')}attention_mask")
    if mask is None or mask.shape[1] != length or bool(mask.all()):
        return SequencePart(0, length, length)
    before, after = ((ends.cumsum(-1) == 0).sum(-1) for ends in (mask, mask.flip(-1)))
    return SequencePart(0, length, length, before, after)


def chosen(index: Kept, tokens: SequencePart, name: str, like: Tensor) -> Tensor:
    """Which entries an index means, ``[length]`` or, where rows differ, ``[rows length]``.

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
    if tokens.before is not None:
        before = tokens.before.to(like.device)[:, None]
        places, size = places - before, tokens.prompt - before
        if tokens.after is not None:
            size = size - tokens.after.to(like.device)[:, None]
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
