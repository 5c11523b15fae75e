"""What ExecuTorch 1.5 makes something else of, in words that it takes as they are meant.

- Its check of the lowered program asks how long the first tensor of a split is, which fixes the number of rows as the
  example's (``executorch/exir/verification/arg_validator.py``): GPT-2 and NeoX then run with that number alone.
- XNNPACK computes GELU by the error function, also where the model asks for the approximation by tanh (Gemma).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bridge.export.example import AnyFunction, Example


class ForExecutorch(TorchFunctionMode):
    """While it is active, tensors are split by slices, and GELU by tanh is computed step by step."""

    def __torch_function__(
        self, func: AnyFunction, types: object, args: tuple[object, ...] = (), kwargs: Example | None = None
    ) -> object:
        kwargs = {} if kwargs is None else kwargs
        other = _IN_OTHER_WORDS.get(func)
        return func(*args, **kwargs) if other is None else other(*args, **kwargs)


def _split(tensor: Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    total = tensor.shape[dim]
    if not isinstance(total, int):  # it may be of any size, and its number of parts with it
        return tensor.split(split_size_or_sections, dim)
    if isinstance(split_size_or_sections, Sequence):
        sizes = list(split_size_or_sections)
    else:
        sizes = [min(split_size_or_sections, total - i) for i in range(0, total, split_size_or_sections)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple([tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)])


def _chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    total = input.shape[dim]
    return _split(input, -(-total // chunks), dim) if isinstance(total, int) else input.chunk(chunks, dim)


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    if approximate != "tanh":
        return functional.gelu(input, approximate=approximate)
    return 0.5 * input * (1 + torch.tanh(math.sqrt(2 / math.pi) * (input + 0.044715 * input * input * input)))


_IN_OTHER_WORDS: dict[AnyFunction, AnyFunction] = {
    torch.split: _split, Tensor.split: _split, torch.chunk: _chunk, Tensor.chunk: _chunk, functional.gelu: _gelu,
}  # fmt: skip
