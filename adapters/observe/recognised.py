"""Recognise the norm that a module computes from its numbers, never by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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
    """Return the norm that turns `x` into `y`, with the epsilon measured on the smallest row (0 if
    it is too small to measure); None if no norm does.

    Args:
        x, y: its input and output. Rows of different sizes, some with a mean square near epsilon,
            are the most informative: see `probe`.
        module: the module that has its weight and bias; None for no weight.
        tolerance: the allowed difference, relative to the largest value of the row.
    """
    if not x.numel():  # an expert that no token was sent to
        return None
    x = x.detach().double()
    y = y.detach().double()
    with torch.no_grad():
        for kind in norms_to_try(module, 0.0):
            eps = _epsilon(kind, x, y, module, tolerance)
            if eps is None:
                continue
            norm = replace(kind, eps=eps)
            if same_rows(norm.of(x, module), y, tolerance):
                return norm
    return None


def norms_to_try(module: nn.Module | None, eps: float) -> Iterator[NormKind]:
    """Yield the kinds of norm that a module may compute, with an epsilon."""
    weight = None
    if module is not None:
        weight = getattr(module, parameter_names(module)[0], None)
    offsets = (0.0,) if weight is None else (0.0, 1.0)
    kinds: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")
    for computes in kinds:
        for offset in offsets:
            yield NormKind(computes, offset, eps)


def same_rows(computed: Tensor, recorded: Tensor, tolerance: float) -> bool:
    """Tell whether each row agrees with the recorded one, relative to the row's largest number."""
    largest = recorded.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return bool(((computed - recorded).abs() <= 4 * tolerance * largest).all())


def _epsilon(
    kind: NormKind, x: Tensor, y: Tensor, module: nn.Module | None, tolerance: float
) -> float | None:
    """Return the epsilon that explains the smallest row of `y`; 0 if it is too small to measure;
    None if no epsilon fits.
    """
    around = kind.around(x)
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    own = nn.Identity() if module is None else module
    bias = kind.behind(zero, own, x.dtype)
    shaped = kind.behind(around, own, x.dtype) - bias
    products = (y - bias) * shaped
    squares = shaped.pow(2)
    scale = (products.sum(-1) / squares.sum(-1)).flatten()
    if not bool((scale > 0).all()):
        return None
    square = around.pow(2).mean(-1).flatten()
    smallest = square.argmin()
    least = float(square[smallest])
    eps = float(scale[smallest] ** -2 - square[smallest])
    if eps > 50 * tolerance * least:
        return eps
    if abs(eps) <= 4 * tolerance * least:
        return 0.0
    return None


#: Sizes of the rows of `probe`.
_SIZES = (3e-4, 3e-3, 3e-2, 1.0)


def probe(width: int, like: Tensor) -> Float[Tensor, "size width"]:
    """Return rows of different sizes around a non-zero mean, which distinguish norms and their
    epsilons.

    Args:
        width: the width of a row.
        like: a tensor with the dtype and the device of the result.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(_SIZES, dtype=torch.float64, device="cpu")
    rows = (
        torch.randn(len(sizes), width, generator=generator, dtype=torch.float64, device="cpu") + 0.5
    )
    return (rows * sizes[:, None]).to(like)


def probed(
    module: nn.Module, width: int, like: Tensor
) -> tuple[Float[Tensor, "*any width"], Float[Tensor, "*any width"]] | None:
    """Return rows that distinguish norms, and the module's output for them; None if the output has
    another shape.

    A weight of ones or zeros works too: there, weight and ``1 + weight`` differ most.

    Args:
        module: the module. It is called through `forward`, so that no hook runs.
        width: the width of its input.
        like: a tensor with the dtype and the number of axes of its input in a run.
    """
    x = probe(width, like)
    weight = getattr(module, parameter_names(module)[0], None)
    # Each head may have its own weight.
    heads = tuple(weight.shape[:-1]) if isinstance(weight, Tensor) else ()
    ones = (1,) * max(like.ndim - 2 - len(heads), 0)
    x = x.reshape(*ones, len(x), *(1 for _ in heads), width)
    x = x.expand(*x.shape[: len(ones) + 1], *heads, width)
    with torch.no_grad():
        y = module.forward(x)
    if not isinstance(y, Tensor):
        return None
    if y.shape != x.shape:
        return None
    if not y.is_floating_point():
        return None
    return x, y


def recognise_module(
    module: nn.Module, width: int, like: Tensor, *, tolerance: float = 2e-5
) -> NormKind | None:
    """Return the norm that a module computes, from its own forward on rows that distinguish norms;
    None if it is not a norm.

    Args:
        module, width, like: as for `probed`.
        tolerance: as for `recognise_norm`.
    """
    rows = probed(module, width, like)
    if rows is None:
        return None
    return recognise_norm(*rows, module, tolerance=tolerance)


# --------------------------------------------------------------------------------------------------
# Tolerances of computed numbers.
#
# Measured with `verify` on tiny random models of 35 families (28 in float64, in which transformers
# runs no mixtures): the largest difference between two results of a correct declaration, relative
# to the largest number in them.
#
# | type | a recomputed claim | logits after writing back | tolerance |
# |---|---|---|---|
# | float64 | 1.8e-7 | 2.1e-7 | 5e-6 |
# | float32 | 5.5e-7 | 8.0e-7 | 2e-5 |
# | bfloat16 | 4.4e-7 (on a probe copy in float32) | 1.6e-2 | 5e-2 |
#
# A float64 model differs by more than its own rounding: many compute norms, softmaxes and rotations
# in float32 whatever the dtype. The factor of about 25 leaves room for models of more layers and
# wider sums. The table of mutations tests that wrong declarations differ by more.
#
# Sensitivity to the constants of inference: number of types, out of 39 tiny ones (every seventh
# causal, masked and encoder-decoder type of transformers), that are inferred differently if the
# constant is multiplied by a factor (`tools/tolerances.py`):
#
# | constant | 1/1000 | 1/100 | 1/10 | 1/3 | 3 | 10 | 100 | 1000 |
# |---|---|---|---|---|---|---|---|---|
# | `TOLERANCES` | 6 | 0 | 0 | 0 | 0 | 1 | 1 | 12 |
# | `_WORKED_OUT` | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 12 |
# | `FITTED` | 1 | 0 | 0 | 0 | 0 | 0 | 2 | 4 |
# | `NEGLIGIBLE` | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 14 |
# --------------------------------------------------------------------------------------------------


#: Allowed difference of computed values, relative to the largest, for each dtype.
TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 5e-6, torch.float32: 2e-5}
_HALF = 5e-2
#: Largest residual of a fit (of one factor, or of three per column), relative to the largest
#: number. Measured by inferring the 185 causal types of transformers: of 418 fits of one factor,
#: 410 leave at most 2.1e-6 and 8 at least 2.0e-2; of 534 columns, 54 are a constant or a parameter
#: up to 4.6e-7, and 480 differ from one by at least 0.13.
FITTED = 1e-3
#: Factors below this are treated as zero: such a term is smaller than the residual `FITTED`.
NEGLIGIBLE = 1e-3
#: Allowed change of the norm of a rotated pair of columns: sines and cosines in a table (RoFormer)
#: are rounded with the parameters, in bfloat16 by 2 ** -9.
ROUNDED_TABLE = 1e-2
#: Factor on the tolerance for numbers that are computed from many others: sums, differences,
#: quotients, least squares.
_WORKED_OUT = 10


def tolerance(of: Tensor | torch.dtype) -> float:
    """Return the allowed difference between values of a dtype, relative to the largest value."""
    return TOLERANCES.get(of if isinstance(of, torch.dtype) else of.dtype, _HALF)


def worked_out(of: Tensor | torch.dtype) -> float:
    """Return the allowed difference between numbers computed from values of a dtype, relative to
    the largest number.
    """
    return _WORKED_OUT * tolerance(of)


def agree(
    computed: Tensor, recorded: Tensor, of: Tensor | None = None, *, each: bool = False
) -> bool:
    """Tell whether computed numbers agree with recorded ones.

    Args:
        computed: the computed numbers.
        recorded: the recorded numbers, of the same shape or one that broadcasts.
        of: a tensor of the dtype they were computed from; None: the dtype of `recorded`.
        each: whether each number is a function of one number, which allows a smaller tolerance.
            (GELU and its approximations differ by less than `worked_out`.)
    """
    like = recorded if of is None else of
    relative = tolerance(like) if each else worked_out(like)
    close = relative * recorded.abs().max()
    return bool(((computed - recorded).abs() <= close).all())


def factor_of(y: Tensor, x: Tensor) -> float:
    """Return the least-squares factor from `x` to `y`."""
    return float((y * x).sum() / (x * x).sum())


# --------------------------------------------------------------------------------------------------
# Assignment of an expert's rows to tokens, and the weights of experts' outputs in their sum.
# --------------------------------------------------------------------------------------------------


#: A row is matched to a token if no number differs by more than this, relative to the largest.
_SAME_ROW = 1e-6


def results_by_token(
    tokens: Float[Tensor, "token d_model"], experts: Sequence[Sequence[tuple[Tensor, Tensor]]]
) -> tuple[Float[Tensor, "token expert d_model"], Bool[Tensor, "token expert"]]:
    """Return each expert's output for each token, zero where the expert did not receive it, and the
    mask of tokens it received.

    Args:
        tokens: the mixture's input.
        experts: for each expert, its input rows and its output rows, ``[row, d_model]``.
    """
    n_tokens, width = tokens.shape
    results = tokens.new_zeros(n_tokens, len(experts), width)
    sent = torch.zeros(n_tokens, len(experts), dtype=torch.bool, device=tokens.device)
    close = _SAME_ROW * float(tokens.abs().max())
    for expert, calls in enumerate(experts):
        for rows, outputs in calls:
            difference = (tokens[:, None] - rows.to(tokens)).abs().amax(-1)
            token, row = (difference <= close).nonzero(as_tuple=True)
            results[token, expert] = outputs.to(tokens)[row]
            sent[token, expert] = True
    return results, sent


def weights_in_sum(
    total: Float[Tensor, "token d_model"],
    results: Float[Tensor, "token expert d_model"],
    others: Sequence[Float[Tensor, "token d_model"]],
    like: Tensor,
) -> Float[Tensor, "token term"] | None:
    """Return the weights of experts' outputs and other terms in a sum, token by token; None if the
    sum is not made of these.

    Args:
        total: the sum.
        results: the experts' outputs, zero for tokens that an expert did not receive (it gets no
            weight there).
        others: terms that all tokens have.
        like: a tensor of the dtype in which the sum was computed.
    """
    terms = [results, *(x[:, None] for x in others)]
    columns = torch.cat(terms, 1).transpose(1, 2)
    solver = torch.linalg.lstsq(columns.cpu(), total.cpu().unsqueeze(-1), driver="gelsd")
    weights = solver.solution.to(columns)
    if agree((columns @ weights)[..., 0], total, like):
        return weights[..., 0]
    return None


# --------------------------------------------------------------------------------------------------
# Progress bar for long computations.
# --------------------------------------------------------------------------------------------------


#: Seconds before the bar is shown.
_DELAY = 2.0


class ProgressBar:
    """Progress display. Without a tqdm bar it shows nothing.

    Args:
        bar: the bar.
    """

    def __init__(self, bar: tqdm | None = None) -> None:
        self._bar = bar

    def __call__(self, what: str, done: int) -> None:
        """Show the current subject, and advance the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(what, refresh=False)
            self._bar.update(done)

    def grow(self, by: int) -> None:
        """Set the total amount of work."""
        if self._bar is not None:
            self._bar.total = by


#: The bar that is shown now.
_CURRENT: ContextVar[ProgressBar | None] = ContextVar("_CURRENT", default=None)


@contextmanager
def progress(description: str, unit: str = "point", total: int | None = 0) -> Iterator[ProgressBar]:
    """Show a progress bar in a terminal or a notebook after two seconds.

    Like the bars for loading a model, it is disabled by
    `transformers.utils.logging.disable_progress_bar`.

    Args:
        description: the text in front of the bar.
        unit: what is counted.
        total: how many of these there are; None: not known.
    """
    disable = None if is_progress_bar_enabled() else True
    with tqdm(
        total=total, desc=description, unit=unit, delay=_DELAY, disable=disable, leave=False
    ) as bar:
        shown = ProgressBar(bar)
        before = _CURRENT.set(shown)
        try:
            yield shown
        finally:
            _CURRENT.reset(before)


def show_check(name: str, done: int = 1) -> None:
    """Show the name of a check in the bar of `progress` that is shown now, if any.

    Args:
        name: the check that begins.
        done: how many checks this counts as.
    """
    bar = _CURRENT.get()
    if bar is not None:
        bar(name, done)
