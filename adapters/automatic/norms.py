"""Which of the recorded modules are norms, and of which kind: by trying, never by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from adapters.norms import Norm, NormKind, eps_of, parameter_names
from adapters.observe.observe import WRONG, ModuleCall, NotFound, one_line
from adapters.observe.recognised import TOLERANCES, agree, norms_to_try, recognise_module, recognise_norm, tolerance
from adapters.views import View, columns, gathered, interleaved

# ----------------------------------------------------------------------------------------------------------------------
# How the columns that were found lie in a projection's output, as a view.
# ----------------------------------------------------------------------------------------------------------------------


def relative(path: str, base: str) -> str:
    """A path from a module that stands above it.

    Raises:
        NotFound: it does not stand above it.
    """
    if path == base:
        return ""
    if base and not path.startswith(base + "."):
        raise NotFound(f"{path} is not inside {base}")
    return path[len(base) + 1 :] if base else path


def heads_view(sets: Sequence[tuple[int, ...]], width: int) -> View | None:
    """The view that shows the columns of each head; None: all of them, one head after the other.

    Args:
        sets: the columns of each head.
        width: of the projection's output.
    """
    n, d = len(sets), len(sets[0])
    first = sets[0][0]
    if any(each != tuple(range(each[0], each[0] + d)) for each in sets):
        return gathered(tuple(sets))
    starts = [each[0] for each in sets]
    if starts == [first + head * d for head in range(n)]:
        return None if n * d == width else columns(first, first + n * d, n)
    step = starts[1] - starts[0]
    every = starts == [first + head * step for head in range(n)]
    if every and step % d == 0 and first % d == 0 and step * n == width:
        return interleaved(n, first // d, step // d)
    return gathered(tuple(sets))


def neurons_view(index: Sequence[int], width: int) -> View | None:
    """The view that shows these columns; None: all of them, in order."""
    start, stop = index[0], index[0] + len(index)
    if list(index) == list(range(start, stop)):
        return None if len(index) == width else columns(start, stop)
    return gathered((tuple(index),), flat=True)


def parameter_of(module: nn.Module, row: Tensor, close: float) -> str | None:
    """The name of the parameter of a module, or of one inside, that is a row of numbers; None where none is.

    Args:
        module: the module.
        row: the numbers, of any shape.
        close: what they may differ by.
    """
    for name, parameter in module.named_parameters():
        if parameter.numel() == row.numel() and bool(
            ((parameter.detach().flatten() - row.flatten()).abs() <= close).all()
        ):
            return name
    return None


def rounded(factor: float) -> float:
    """A factor that was measured, as it was written, if that is a whole number or one of a few digits; else as far as a
    run says it.
    """
    if round(factor) and abs(round(factor) - factor) <= tolerance(torch.float32) * abs(factor):
        return float(round(factor))
    short = float(f"{factor:.5g}")
    # Fits of one factor leave at most 2.1e-6 (see `FITTED`); five digits of another are further off, nine times in ten.
    return short if abs(short - factor) <= 2e-6 * abs(factor) else float(f"{factor:.8g}")


def norm_kind(call: ModuleCall) -> NormKind | None:
    """What a recorded call computes, None where it is no norm.

    Args:
        call: of a module.
    """
    seen = call.entered
    if isinstance(call.module, nn.Dropout):  # of small numbers, a norm with an epsilon of one
        return None
    if seen is None or not call.is_leaf or call.is_linear or len(call.left) != 1 or call.returned.key is not None:
        return None
    x, y = seen.value, call.returned.value
    if x.shape != y.shape or x.ndim < 2 or x.shape[-1] < 2 or not x.numel():
        return None
    for parameter in (getattr(call.module, name, None) for name in parameter_names(call.module)):
        if parameter is not None and (
            not isinstance(parameter, Tensor) or x.shape[-parameter.ndim :] != parameter.shape
        ):
            return None
    kept = _kept(call)
    probed = None
    if call.alone and x.dtype in TOLERANCES and not isinstance(call.module, nn.Identity):
        try:
            probed = recognise_module(call.module, x.shape[-1], x, tolerance=tolerance(x))
        except WRONG as error:  # it takes none of other sizes than it was given
            one_line(error)  # which raises it again where the memory is full
            return None
    if probed is None or (found := _kind(probed, kept)) is None:
        return _of_numbers(x, y, call.module, kept)
    return found


def norm_of(call: ModuleCall) -> Norm | None:
    """The norm that a recorded call is, with its path from the model; None where it is none."""
    kind = norm_kind(call)
    return None if kind is None else Norm(call.path, kind)


def function_norm(x: Tensor, y: Tensor) -> NormKind | None:
    """The norm without a module, a weight or a bias that makes one tensor of another; None where none does.

    Args:
        x, y: before and behind it.
    """
    found = recognise_norm(x, y, tolerance=tolerance(x)) if x.shape == y.shape else None
    if found is None:
        return None
    # What does not show in the numbers is the epsilon that torch's functions take where they are given none.
    return replace(found, offset=None, eps=float(f"{found.eps:.2g}") if found.eps else torch.finfo(x.dtype).eps)


def with_gated(calls: Sequence[ModuleCall], norms: Mapping[ModuleCall, NormKind]) -> dict[ModuleCall, NormKind]:
    """The norms, of which those that a gate is behind are the modules around both.

    Args:
        calls: all of a block.
        norms: those that are norms by themselves.
    """
    found = dict(norms)
    for call in calls:
        inside = [each for each in calls if call.holds(each) and each is not call]
        if not inside or len(call.left) != 1 or call.entered is None:
            continue
        for norm in [each for each in inside if each in norms and each.entered and not norms[each].centered]:
            assert norm.entered is not None
            made, left = norm.returned, call.returned.value
            for gate in [each for each in inside if each.reads(made.mark) and each.left]:
                if not call.reads(norm.entered.mark) or gate.returned.value.shape != left.shape:
                    continue
                if agree(made.value * gate.returned.value.sigmoid(), left):
                    inner, behind = (relative(each.path, call.path) for each in (norm, gate))
                    found[call] = replace(norms[norm], inside=(inner, behind))
                    found.pop(norm, None)
                    break
    return found


def _kept(call: ModuleCall) -> float | None:
    """The epsilon that a module keeps."""
    try:
        return eps_of(call.module)
    except AttributeError:
        return None


def _kind(found: NormKind, kept: float | None) -> NormKind | None:
    """The kind, with the epsilon that was measured, unless the module says the same one."""
    assert found.eps is not None
    # Two digits of an epsilon are measured: what rounds to the same is the same.
    if kept is not None and (not found.eps or abs(found.eps - kept) <= 0.02 * kept):
        return replace(found, eps=None)
    return replace(found, eps=float(f"{found.eps:.2g}")) if found.eps else None


def _of_numbers(x: Tensor, y: Tensor, module: nn.Module, kept: float | None) -> NormKind | None:
    """What makes `y` of `x` in the run itself: with the epsilon that the module says, or with one that shows."""
    if kept is not None:
        tried = (kind for kind in norms_to_try(module, kept) if agree(kind.of(x.double(), module), y, x))
        return next((replace(kind, eps=None) for kind in tried), None)
    found = recognise_norm(x, y, module, tolerance=tolerance(x))
    return None if found is None else _kind(found, kept)


def same_numbers(x: Tensor, y: Tensor, close: float) -> bool:
    """Whether two tensors have the same numbers, in the same order or with heads and positions exchanged."""
    if x.numel() != y.numel():
        return False
    options = [y, y.transpose(1, 2)] if y.ndim == 4 else [y]
    return any(bool(((x.flatten() - each.flatten()).abs() <= close * each.abs().max()).all()) for each in options)
