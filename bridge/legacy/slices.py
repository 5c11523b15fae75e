"""`Slice`: which entries of an axis, in the notation of HookedTransformer's ``pos_slice``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: A position; ``(stop,)``, ``(start, stop)`` or ``(start, stop, step)``; a list, array or tensor of positions; or None.
SliceInput = int | tuple[int | None, ...] | Sequence[int] | np.ndarray | Tensor | slice | None


class Slice:
    """Which entries of an axis: an int takes one and drops the axis, a tuple is the arguments of Python's `slice`, a
    list, array or tensor takes several, None takes all.

    Raises:
        ValueError: it is none of these.

    Example:
        >>> import torch
        >>> from bridge.legacy.utils import Slice
        >>> x = torch.arange(10)
        >>> Slice((2, 8, 3)).apply(x), Slice(-1).apply(x), Slice([0, 4]).apply(x)
        (tensor([2, 5]), tensor(9), tensor([0, 4]))
    """

    def __init__(self, input_slice: SliceInput = None) -> None:
        self.slice: Any = input_slice
        if input_slice is None:
            self.slice, self.mode = slice(None), "identity"
        elif type(input_slice) is int:
            self.mode = "int"
        elif isinstance(input_slice, slice | tuple):
            self.slice = slice(*input_slice) if isinstance(input_slice, tuple) else input_slice
            self.mode = "slice"
        elif isinstance(input_slice, list | np.ndarray | Tensor):
            self.slice = np.asarray(input_slice.detach().cpu() if isinstance(input_slice, Tensor) else input_slice)
            self.mode = "array"
        else:
            raise ValueError(
                f"a slice cannot be {input_slice!r}; it must be an int, a tuple, a list, an array, a tensor or None"
            )

    @classmethod
    def unwrap(cls, slice_input: Slice | SliceInput) -> Slice:
        """A `Slice` of what may be one already. An int keeps its axis here, with length 1."""
        if isinstance(slice_input, Slice):
            return slice_input
        return cls([slice_input] if isinstance(slice_input, int) else slice_input)

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The chosen entries of one axis of a tensor."""
        index: list[Any] = [slice(None)] * tensor.ndim
        index[dim] = torch.from_numpy(self.slice).to(tensor.device) if self.mode == "array" else self.slice
        return tensor[tuple(index)]

    def indices(self, max_ctx: int | None = None) -> np.ndarray:
        """The chosen positions of an axis of length `max_ctx`."""
        if self.mode == "int":
            return np.array([self.slice], dtype=np.int64)
        if max_ctx is None:
            raise ValueError(f"max_ctx is needed to know the positions of {self!r}")
        return np.arange(max_ctx, dtype=np.int64)[self.slice]

    def __repr__(self) -> str:
        return f"Slice: {self.slice} Mode: {self.mode} "
