"""Which norm a module computes, found by trying: never by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.utils.logging import is_progress_bar_enabled

from adapters.norms import NormKind, parameter_names


def recognise_norm(
    x: Float[Tensor, "*batch width"],
    y: Float[Tensor, "*batch width"],
    module: nn.Module | None = None,
    *,
    tolerance: float = 2e-5,
) -> NormKind | None:
    """Which norm makes `y` of `x`, with the epsilon that the smallest row shows (0: none does); None where none does.

    Args:
        x, y: what entered it and what left it. Rows of different sizes, some with a mean square near epsilon, tell
            more: see `probe`.
        module: whose weight and bias it has; None: it has none.
        tolerance: what values may differ by, relative to the largest of their row.
    """
    if not x.numel():  # an expert that no token was sent to
        return None
    x, y = x.detach().double(), y.detach().double()
    with torch.no_grad():
        for kind in norms_to_try(module, 0.0):
            eps = _epsilon(kind, x, y, module, tolerance)
            found = None if eps is None else replace(kind, eps=eps)
            if found and same_rows(found.of(x, module), y, tolerance):
                return found
    return None


def norms_to_try(module: nn.Module | None, eps: float) -> Iterator[NormKind]:
    """The kinds of norm that a module may compute, with an epsilon."""
    weight = None if module is None else getattr(module, parameter_names(module)[0], None)
    kinds: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")
    for computes in kinds:
        for offset in (0.0,) if weight is None else (0.0, 1.0):
            yield NormKind(computes, offset, eps)


def same_rows(made: Tensor, seen: Tensor, tolerance: float) -> bool:
    """Whether each row is what was seen, relative to the largest number in it."""
    bound = 4 * tolerance * seen.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return bool(((made - seen).abs() <= bound).all())


def _epsilon(kind: NormKind, x: Tensor, y: Tensor, module: nn.Module | None, tolerance: float) -> float | None:
    """The epsilon with which a norm makes `y` of the smallest row; 0 where that shows none; None where it cannot."""
    around, nothing = kind.around(x), torch.zeros((), dtype=x.dtype, device=x.device)
    own = nn.Identity() if module is None else module
    bias = kind.behind(nothing, own, x.dtype)
    shaped = kind.behind(around, own, x.dtype) - bias
    r = (((y - bias) * shaped).sum(-1) / shaped.pow(2).sum(-1)).flatten()
    if not bool((r > 0).all()):
        return None
    square = around.pow(2).mean(-1).flatten()
    smallest = square.argmin()
    eps, least = float(r[smallest] ** -2 - square[smallest]), float(square[smallest])
    if eps > 50 * tolerance * least:
        return eps
    return 0.0 if abs(eps) <= 4 * tolerance * least else None


def probe(
    width: int, like: Tensor, *, sizes: tuple[float, ...] = (3e-4, 3e-3, 3e-2, 1.0)
) -> Float[Tensor, "size width"]:
    """Rows of different sizes, around a mean that is not zero: what tells norms and their epsilons apart.

    Args:
        width: of a row.
        like: a tensor of the type and on the device that they are to have.
        sizes: of the rows.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(sizes), width, generator=generator, dtype=torch.float64) + 0.5
    return (rows * torch.tensor(sizes, dtype=torch.float64)[:, None]).to(like)


def probed(
    module: nn.Module, width: int, like: Tensor
) -> tuple[Float[Tensor, "*any width"], Float[Tensor, "*any width"]] | None:
    """Rows that tell norms apart, and what a module's own forward makes of them; None where it makes no such rows.

    A weight of ones, or of zeros, is no obstacle: it is where weight and ``1 + weight`` differ most.

    Args:
        module: it is called through `forward`: no hook sees it.
        width: of what it norms.
        like: a tensor as it is given in a run: of that type, and with as many axes.
    """
    x, weight = probe(width, like), getattr(module, parameter_names(module)[0], None)
    heads = tuple(weight.shape[:-1]) if isinstance(weight, Tensor) else ()  # each may have a weight of its own
    ones = (1,) * max(like.ndim - 2 - len(heads), 0)
    x = x.reshape(*ones, len(x), *(1 for _ in heads), width).expand(*ones, len(x), *heads, width)
    with torch.no_grad():
        y = module.forward(x)
    return (x, y) if isinstance(y, Tensor) and y.shape == x.shape and y.is_floating_point() else None


def recognise_module(module: nn.Module, width: int, like: Tensor, *, tolerance: float = 2e-5) -> NormKind | None:
    """Which norm a module computes, from its own forward on rows that tell them apart; None where it is none.

    Args:
        module, width, like: as for `probed`.
        tolerance: as for `recognise_norm`.
    """
    found = probed(module, width, like)
    return None if found is None else recognise_norm(*found, module, tolerance=tolerance)


# ----------------------------------------------------------------------------------------------------------------------
# What computed numbers may differ by.
#
# Measured with `verify` on tiny random models of 35 families (28 in float64, in which transformers runs no mixtures):
# the most that two results of what is declared right differ by, relative to the largest number in them.
#
# | type | a claim that is recomputed | logits after writing back | tolerance |
# |---|---|---|---|
# | float64 | 1.8e-7 | 2.1e-7 | 5e-6 |
# | float32 | 5.5e-7 | 8.0e-7 | 2e-5 |
# | bfloat16 | 4.4e-7 (on a probe copy in float32) | 1.6e-2 | 5e-2 |
#
# A float64 model differs by more than its own rounding, as many compute norms, softmaxes and rotations in float32,
# whatever they are given. The factor of about 25 is for models of more layers and wider sums than these. That a wrong
# declaration differs by more is what the table of wrong declarations in the tests is for.
#
# How much a constant of inference may vary: of 39 tiny types, every seventh of the causal, masked and encoder-decoder
# ones of transformers, as many are inferred differently with the constant times a factor (`tools/tolerances.py`):
#
# | constant | 1/1000 | 1/100 | 1/10 | 1/3 | 3 | 10 | 100 | 1000 |
# |---|---|---|---|---|---|---|---|---|
# | `TOLERANCES` | 6 | 0 | 0 | 0 | 0 | 1 | 1 | 12 |
# | `_WORKED_OUT` | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 12 |
# | `FITTED` | 1 | 0 | 0 | 0 | 0 | 0 | 2 | 4 |
# | `NEGLIGIBLE` | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 14 |
# | `_PARALLEL` (`stream.py`) | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |
# | `_FAR_BELOW` (`facts.py`) | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |
# | `_BEYOND_CHANCE` (`ends.py`) | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |
# ----------------------------------------------------------------------------------------------------------------------


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


def factor_of(made: Tensor, x: Tensor) -> float:
    """The factor with which one tensor comes nearest to another, by least squares."""
    return float((made * x).sum() / (x * x).sum())


# ----------------------------------------------------------------------------------------------------------------------
# Which tokens an expert's rows are, and what the results of experts are multiplied with in the sum of them.
# ----------------------------------------------------------------------------------------------------------------------


#: A row counts as a token's where no number differs by more than rounding, relative to the largest.
_SAME_ROW = 1e-6


def results_by_token(
    tokens: Float[Tensor, "token d_model"], experts: Sequence[Sequence[tuple[Tensor, Tensor]]]
) -> tuple[Float[Tensor, "token expert d_model"], Bool[Tensor, "token expert"]]:
    """What each expert made of each token, zero of those that it was not given; and whether it was given it.

    Args:
        tokens: what the mixture is given.
        experts: for each expert the rows that it was given, and what it made of them, ``[row, d_model]``.
    """
    results = tokens.new_zeros(len(tokens), len(experts), tokens.shape[-1])
    sent = torch.zeros(results.shape[:2], dtype=torch.bool, device=results.device)
    close = _SAME_ROW * float(tokens.abs().max())
    for e, calls in enumerate(experts):
        for rows, made in calls:
            token, row = ((tokens[:, None] - rows.to(tokens)).abs().amax(-1) <= close).nonzero(as_tuple=True)
            results[token, e], sent[token, e] = made.to(tokens)[row], True
    return results, sent


def weights_in_sum(
    total: Float[Tensor, "token d_model"],
    results: Float[Tensor, "token expert d_model"],
    others: Sequence[Float[Tensor, "token d_model"]],
    like: Tensor,
) -> Float[Tensor, "token term"] | None:
    """What results, and others, are multiplied with to make a sum, token by token; None where they do not make it.

    Args:
        total: the sum.
        results: of experts, zero where they were not given the token: they have no weight there.
        others: that all tokens have.
        like: a tensor of the type that the sum was computed in.
    """
    columns = torch.cat([results, *(x[:, None] for x in others)], 1).transpose(1, 2)
    solution = torch.linalg.lstsq(columns.cpu(), total.cpu().unsqueeze(-1), driver="gelsd").solution.to(columns)
    if not agree((columns @ solution)[..., 0], total, like):
        return None
    return solution[..., 0]


# ----------------------------------------------------------------------------------------------------------------------
# A bar that says what is being found out about a model, where that takes more than a moment.
# ----------------------------------------------------------------------------------------------------------------------


#: Seconds before it is shown.
_DELAY = 2.0


class ProgressBar:
    """Is told how far something is. Without a bar of tqdm it shows nothing.

    Args:
        bar: what shows it.
    """

    def __init__(self, bar: tqdm | None = None) -> None:
        self._bar = bar

    def __call__(self, what: str, done: int) -> None:
        """Says what is looked at now, and how much more is done."""
        if self._bar is not None:
            self._bar.set_postfix_str(what, refresh=False)
            self._bar.update(done)

    def grow(self, by: int) -> None:
        """Says how much is to be done."""
        if self._bar is not None:
            self._bar.total = by


@contextmanager
def progress(description: str) -> Iterator[ProgressBar]:
    """A bar that is shown in a terminal or a notebook after two seconds.

    As all bars of loading a model it is switched off by `transformers.utils.logging.disable_progress_bar`.

    Args:
        description: what is done.
    """
    disable = None if is_progress_bar_enabled() else True
    with tqdm(total=0, desc=description, unit="point", delay=_DELAY, disable=disable, leave=False) as bar:
        yield ProgressBar(bar)
