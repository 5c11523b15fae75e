"""What computed numbers may differ by.

Measured with `verify` on tiny random models of 35 families (28 in float64, in which transformers runs no mixtures): the
most that two results of what is declared right differ by, relative to the largest number in them.

| type | a claim that is recomputed | logits after writing back | tolerance |
|---|---|---|---|
| float64 | 1.8e-7 | 2.1e-7 | 5e-6 |
| float32 | 5.5e-7 | 8.0e-7 | 2e-5 |
| bfloat16 | 4.4e-7 (on a probe copy in float32) | 1.6e-2 | 5e-2 |

A float64 model differs by more than its own rounding, as many compute norms, softmaxes and rotations in float32,
whatever they are given. The factor of about 25 is for models of more layers and wider sums than these. That a wrong
declaration differs by more is what the table of wrong declarations in the tests is for.

How much a constant of inference may vary: of 39 tiny types, every seventh of the causal, masked and encoder-decoder
ones of transformers, as many are inferred differently with the constant times a factor (`tools/tolerances.py`):

| constant | 1/1000 | 1/100 | 1/10 | 1/3 | 3 | 10 | 100 | 1000 |
|---|---|---|---|---|---|---|---|---|
| `TOLERANCES` | 6 | 0 | 0 | 0 | 0 | 1 | 1 | 12 |
| `_WORKED_OUT` | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 12 |
| `FITTED` | 1 | 0 | 0 | 0 | 0 | 0 | 2 | 4 |
| `NEGLIGIBLE` | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 14 |
| `_PARALLEL` (`stream.py`) | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |
| `_FAR_BELOW` (`measured.py`) | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |
| `_BEYOND_CHANCE` (`embedding.py`) | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

#: What computed values may differ by, relative to the largest, for each type of numbers.
TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 5e-6, torch.float32: 2e-5}
_HALF = 5e-2
#: What is left of numbers that a factor, or three for each column, are fitted to, relative to the largest. Measured by
#: inferring the 185 causal types of transformers: of 418 fits of one factor, 410 leave at most 2.1e-6 and 8 at least
#: 2.0e-2; of 534 columns, 54 are a constant or a parameter up to 4.6e-7, and 480 are none by at least 0.13.
FITTED = 1e-3
#: A factor below this is none: what it would add is what `FITTED` leaves of the rest.
NEGLIGIBLE = 1e-3
#: What the size of a pair of columns that is turned may change by: sines and cosines in a table (RoFormer) are rounded
#: with the parameters, in bfloat16 by 2 ** -9.
ROUNDED_TABLE = 1e-2
#: How much more than single numbers those may differ by that are worked out from many: sums, differences, quotients,
#: least squares.
_WORKED_OUT = 10


def tolerance(of: Tensor | torch.dtype) -> float:
    """What values of a type of numbers may differ by, relative to the largest."""
    return TOLERANCES.get(of if isinstance(of, torch.dtype) else of.dtype, _HALF)


def worked_out(of: Tensor | torch.dtype) -> float:
    """What numbers may differ by that are worked out from values of a type, relative to the largest."""
    return _WORKED_OUT * tolerance(of)


def agree(made: Tensor, seen: Tensor, of: Tensor | None = None, *, each: bool = False) -> bool:
    """Whether numbers that were worked out are those that were seen.

    Args:
        made: the numbers.
        seen: of the same shape, or one that broadcasts.
        of: what they were worked out from; None: numbers of the type of `seen`.
        each: each number is a function of one number. (GELU and its approximations differ by less than `worked_out`.)
    """
    like = seen if of is None else of
    close = (tolerance(like) if each else worked_out(like)) * seen.abs().max()
    return bool(((made - seen).abs() <= close).all())
