"""Refusing what is no matrix or bias, by name."""

from __future__ import annotations

from torch import Tensor


def check_tensor(name: str, value: object, *axes: int) -> None:
    """Refuses what is no tensor of floating-point numbers with as many axes.

    Args:
        name: of the argument.
        value: it.
        axes: how many axes it may have; none: any.

    Raises:
        TypeError: it is no such tensor.
        ValueError: it has another number of axes.

    Example:
        >>> import torch
        >>> from weight_processing.matrices import check_tensor
        >>> check_tensor("W_O", torch.zeros(2, 3), 3)
        Traceback (most recent call last):
        ValueError: W_O has shape [2, 3]; it must have 3 axes
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {type(value).__name__}; it must be a tensor")
    if not value.is_floating_point():
        raise TypeError(f"{name} is of {value.dtype}; it must be of floating-point numbers")
    if axes and value.ndim not in axes:
        raise ValueError(f"{name} has shape {list(value.shape)}; it must have {' or '.join(map(str, axes))} axes")
    if not value.ndim:
        raise ValueError(f"{name} is a single number; it must be a matrix or a bias")
