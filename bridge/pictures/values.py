"""Numbers for a picture: checked, and as few digits as the eye can use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def checked(values: Tensor, what: str, masked: bool = False, absent: Tensor | None = None) -> Tensor:
    """The values as float64 on the CPU, outside of autograd.

    Args:
        values: any tensor of numbers.
        what: what they are, for errors.
        masked: minus infinity may stand where there is nothing.
        absent: of the shape of the values, where a NaN says that there is nothing; None: nowhere.

    Raises:
        TypeError: no tensor, or one of truth values or complex numbers.
        ValueError: it is empty, or holds a NaN or an infinity, which would be a hole in the picture.

    Example:
        >>> import torch
        >>> from bridge.pictures.values import checked
        >>> checked(torch.ones(2, dtype=torch.bfloat16), "scores").dtype
        torch.float64
    """
    if not isinstance(values, Tensor):
        raise TypeError(f"{what} must be a tensor; it is {type(values).__name__}")
    if values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{what} is a tensor of {values.dtype}; a picture needs real numbers")
    if not values.numel():
        raise ValueError(f"{what} of shape {list(values.shape)} hold no value")
    values = values.detach().to("cpu", torch.float64)
    bad = ~values.isfinite()
    if masked:
        bad &= values != -math.inf
    if absent is not None:
        bad &= ~absent
    if bad.any():
        place = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{what} of shape {list(values.shape)} hold {int(bad.sum())} values that are no finite numbers, the first "
            f"of them {values[tuple(place)].item()} at {place}"
        )
    return values


def without_batch(values: Tensor, ndim: int, what: str) -> Tensor:
    """The values of one prompt.

    Args:
        values: with or without a batch axis of one in front.
        ndim: how many axes there are without it.
        what: what they are, with their axes, for errors.

    Raises:
        ValueError: other axes, or a batch of several.

    Example:
        >>> import torch
        >>> from bridge.pictures.values import without_batch
        >>> without_batch(torch.ones(1, 4, 3), 2, "contributions [layer, head]").shape
        torch.Size([4, 3])
    """
    if values.ndim == ndim:
        return values
    if values.ndim == ndim + 1 and len(values) == 1:
        return values[0]
    several = values.ndim == ndim + 1
    hint = f"; the first axis has {len(values)} rows: take one, [0], or their mean, .mean(0)" if several else ""
    raise ValueError(
        f"{what} are asked for, with a batch axis of 1 or without; the shape is {list(values.shape)}{hint}"
    )


def of_one_prompt(values: Tensor, ndim: int, what: str) -> Tensor:
    """The values of components in one prompt.

    Args:
        values: with or without a batch axis of one after the first.
        ndim: how many axes there are without it.
        what: what they are, with their axes, for errors.

    Raises:
        ValueError: other axes, or a batch of several.

    Example:
        >>> import torch
        >>> from bridge.pictures.values import of_one_prompt
        >>> of_one_prompt(torch.ones(5, 1, 3), 2, "attributions are [component, pos]").shape
        torch.Size([5, 3])
    """
    kept = values.squeeze(1) if values.ndim == ndim + 1 else values
    if kept.ndim != ndim:
        raise ValueError(f"{what}, of one prompt; the shape is {list(values.shape)}")
    return kept


def compact(values: Tensor, digits: int = 3) -> list[float | None]:
    """The values in order, rounded to some digits; None for what is not finite.

    Args:
        values: any shape.
        digits: how many of each number count.

    Example:
        >>> import torch
        >>> from bridge.pictures.values import compact
        >>> compact(torch.tensor([0.123456, -float("inf"), 2.0]))
        [0.123, None, 2]
    """
    return [_rounded(value, digits) for value in values.flatten().tolist()]


def _rounded(value: float, digits: int) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def limit(values: Tensor) -> float:
    """The largest absolute value, of those that are finite.

    Args:
        values: any shape.

    Example:
        >>> import torch
        >>> from bridge.pictures.values import limit
        >>> limit(torch.tensor([-3.0, 2.0]))
        3.0
    """
    finite = values[values.isfinite()]
    return float(f"{finite.abs().max().item():.3g}") if finite.numel() else 0.0


def names_for(labels: Sequence[str] | None, n: int, default: str, what: str) -> list[str]:
    """Given names, or numbered ones.

    Args:
        labels: one name for each; None: `default` and a number.
        n: how many.
        default: such as ``head``.
        what: the argument's name, for errors.

    Raises:
        ValueError: another number of names.

    Example:
        >>> from bridge.pictures.values import names_for
        >>> names_for(None, 2, "head ", "heads")
        ['head 0', 'head 1']
    """
    if labels is None:
        return [f"{default}{index}" for index in range(n)]
    if isinstance(labels, str):
        raise TypeError(f"{what} is {labels!r}; give a list of {n} names")
    if len(labels) != n:
        raise ValueError(f"there are {len(labels)} {what}, and {n} are needed: {list(labels)}")
    return [str(label) for label in labels]
