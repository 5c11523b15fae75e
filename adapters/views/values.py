"""Whether the numbers of a tensor are what they were, also after writes that torch does not count.

A tensor's version counts its in-place changes, but not those through ``.data``, numpy or dlpack,
nor those of fused optimizers and `torch.nn.utils.vector_to_parameters`, and in inference mode there
is no version. So numbers are compared: all of them where both tensors are there (`same_bits`), and
otherwise a `Fingerprint`, which is taken when the tensor is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import is_fake

#: Integers of the sizes of numbers, in bytes: bits are compared, so that NaN equals itself.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Tensors of at most this many numbers are summed whole, which takes less time than one layer's
#: product with them.
SUMMED = 2**16


def bits(x: Tensor) -> Tensor:
    """Return a tensor's numbers as integers of the same size, as a view."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.view(_INTEGERS[x.element_size()])


def same_bits(x: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors of the same shape and dtype are equal bit by bit.

    Example:
        >>> import torch
        >>> from adapters.views.values import same_bits
        >>> x = torch.tensor([1.0, float("nan")])
        >>> same_bits(x, x.clone()), same_bits(x, torch.zeros(2))
        (True, False)
    """
    return torch.equal(bits(x.detach()), bits(other.detach()))


def is_readable(x: Tensor) -> bool:
    """Tell whether a tensor's values can be read; under `torch.vmap` they cannot."""
    return not (x.is_meta or is_functorch_wrapped_tensor(x) or is_fake(x))


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """A sample of a tensor's numbers; for a small tensor, also the sum of all its bits. The sample
    has a number of every row and every column of a matrix. So it detects every change of a whole
    row or column, and, in a small tensor (`SUMMED`), every change of a single number.

    Attributes:
        shape: the tensor's shape.
        sample: the numbers.
        total: the sum; None for a large tensor.
    """

    shape: torch.Size
    sample: Tensor
    total: Tensor | None

    def __eq__(self, other: object) -> bool:
        """Tell whether another fingerprint is equal, on whatever device its tensor is."""
        if not isinstance(other, Fingerprint):
            return NotImplemented
        if self.shape != other.shape or self.sample.dtype != other.sample.dtype:
            return False
        if (self.total is None) != (other.total is None):
            return False
        pairs = [(bits(self.sample), bits(other.sample))]
        if self.total is not None and other.total is not None:
            pairs.append((self.total, other.total))
        return all(torch.equal(mine, theirs.to(mine.device)) for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]


def fingerprint(x: Tensor, whole: bool = False) -> Fingerprint:
    """Take the fingerprint of a tensor, without waiting for an accelerator.

    Args:
        x: the tensor, of any layout in memory.
        whole: sum its bits, whatever its size.

    Example:
        >>> import torch
        >>> from adapters.views.values import fingerprint
        >>> x = torch.zeros(3, 4)
        >>> before = fingerprint(x)
        >>> x.data[1, 2] = 1
        >>> fingerprint(x) == before
        False
    """
    with torch.no_grad():
        x = x.detach()
        total = bits(x).sum() if whole or x.numel() <= SUMMED else None
        return Fingerprint(x.shape, _sample(x), total)


def fingerprints(parameter: Tensor) -> list[Fingerprint]:
    """Return the fingerprints of the tensors that make up a parameter: the tensors inside a
    quantised parameter; none for a parameter without memory.

    Args:
        parameter: a parameter of any type.
    """
    if not is_readable(parameter):
        return []
    flatten = getattr(parameter, "__tensor_flatten__", None)
    if flatten is None:
        with torch._C.DisableTorchFunctionSubclass():
            return [fingerprint(parameter)]
    names, _ = flatten()
    inside = [getattr(parameter, name) for name in names]
    return [known for x in inside if isinstance(x, Tensor) for known in fingerprints(x)]


def _sample(x: Tensor) -> Tensor:
    """Copy numbers from every row and every column."""
    n = x.numel()
    if x.ndim < 2:
        return x[:: max(1, n // SUMMED)].clone() if x.ndim else x.clone()
    if not x.is_contiguous():
        x = x.T if x.ndim == 2 and x.T.is_contiguous() else x.contiguous()
    width = x.shape[-1]
    step = max(1, n // (n // max(width, 1) + width)) if n else 1
    while step > 1 and math.gcd(step, width) > 1:
        step -= 1
    return x.as_strided((-(-n // step),), (step,)).clone()
