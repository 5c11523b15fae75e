"""Recognise norms among the recorded modules by their numbers, never by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from adapters.norms import Norm, NormKind, parameter_names, stored_eps
from adapters.observe.observe import WRONG, ModuleCall, NotFound, one_line
from adapters.observe.recognised import (
    TOLERANCES,
    agree,
    norms_to_try,
    recognise_module,
    recognise_norm,
    tolerance,
)
from adapters.views import View, columns, gathered, interleaved

# --------------------------------------------------------------------------------------------------
# Views that select columns of a projection's output.
# --------------------------------------------------------------------------------------------------


def relative(path: str, base: str) -> str:
    """Return a path relative to that of a module around it.

    Raises:
        NotFound: the module is not around it.
    """
    if path == base:
        return ""
    if base and not path.startswith(base + "."):
        raise NotFound(f"{path} is not inside {base}")
    if base:
        return path[len(base) + 1 :]
    return path


def heads_view(sets: Sequence[tuple[int, ...]], width: int) -> View | None:
    """Return the view that selects the columns of each head; None if the columns are all of them,
    head after head.

    Args:
        sets: the columns of each head.
        width: the width of the projection's output.
    """
    n = len(sets)
    d = len(sets[0])
    starts = [head[0] for head in sets]
    first = starts[0]
    if any(head != tuple(range(head[0], head[0] + d)) for head in sets):
        return gathered(tuple(sets))
    if starts == list(range(first, first + n * d, d)):
        if n * d == width:
            return None
        return columns(first, first + n * d, n)
    step = starts[1] - first
    is_regular = starts == [first + head * step for head in range(n)]
    if is_regular and step % d == 0 and first % d == 0 and step * n == width:
        return interleaved(n, first // d, step // d)
    return gathered(tuple(sets))


def neurons_view(index: Sequence[int], width: int) -> View | None:
    """Return the view that selects these columns; None if they are all columns, in order."""
    start = index[0]
    stop = index[0] + len(index)
    if list(index) != list(range(start, stop)):
        return gathered((tuple(index),), flat=True)
    if len(index) == width:
        return None
    return columns(start, stop)


def parameter_of(module: nn.Module, row: Tensor, close: float) -> str | None:
    """Return the name of the parameter of a module, or of a submodule, that equals a row of
    numbers; None if there is none.

    Args:
        module: the module.
        row: the numbers, of any shape.
        close: the largest allowed difference.
    """
    for name, parameter in module.named_parameters():
        if parameter.numel() != row.numel():
            continue
        difference = parameter.detach().flatten() - row.flatten()
        if bool((difference.abs() <= close).all()):
            return name
    return None


def rounded(factor: float) -> float:
    """Return a measured factor as it was probably written: a whole number, or one with few digits.
    Otherwise keep the measured precision.
    """
    integer = round(factor)
    if integer and abs(integer - factor) <= tolerance(torch.float32) * abs(factor):
        return float(integer)
    short = float(f"{factor:.5g}")
    # Fits of one factor leave at most 2.1e-6 (see `FITTED`). A factor with more digits is further
    # from its five-digit value nine times in ten.
    if abs(short - factor) <= 2e-6 * abs(factor):
        return short
    return float(f"{factor:.8g}")


def norm_kind(call: ModuleCall) -> NormKind | None:
    """Return the kind of norm that a recorded call computes; None if it is not a norm.

    Args:
        call: the call of a module.
    """
    x = call.entered_value
    # On small numbers, dropout looks like a norm with an epsilon of one.
    if isinstance(call.module, nn.Dropout) or x is None or not call.is_leaf or call.is_linear:
        return None
    if call.only_output is None:
        return None
    y = call.value
    if x.shape != y.shape or x.ndim < 2 or x.shape[-1] < 2 or not x.numel():
        return None
    if not _has_parameters_for(call.module, x):
        return None
    stored = stored_eps(call.module)
    kind = None
    if call.has_one_argument and x.dtype in TOLERANCES and not isinstance(call.module, nn.Identity):
        try:
            kind = recognise_module(call.module, x.shape[-1], x, tolerance=tolerance(x))
        except WRONG as error:  # it rejects rows of other sizes than in the run
            one_line(error)  # raises it again if it is an `OutOfMemoryError`
            return None
    if kind is not None:
        kind = _with_epsilon(kind, stored)
    if kind is None:
        return _of_numbers(x, y, call.module, stored)
    return kind


def _has_parameters_for(module: nn.Module, x: Tensor) -> bool:
    """Tell whether a module's weight and bias, if it has them, are as wide as its input."""
    for name in parameter_names(module):
        parameter = getattr(module, name, None)
        if parameter is None:
            continue
        if not isinstance(parameter, Tensor):
            return False
        if x.shape[-parameter.ndim :] != parameter.shape:
            return False
    return True


def norm_of(call: ModuleCall) -> Norm | None:
    """Return the norm that a recorded call computes, with its path from the model; None if it is
    not a norm.
    """
    kind = norm_kind(call)
    if kind is None:
        return None
    return Norm(call.path, kind)


def function_norm(x: Tensor, y: Tensor) -> NormKind | None:
    """Return the norm without weight and bias that turns one tensor into another; None if there is
    none.

    Args:
        x, y: its input and output.
    """
    kind = recognise_norm(x, y, tolerance=tolerance(x)) if x.shape == y.shape else None
    if kind is None:
        return None
    # If no epsilon shows in the numbers, use the default of torch's functions.
    eps = float(f"{kind.eps:.2g}") if kind.eps else torch.finfo(x.dtype).eps
    return replace(kind, offset=None, eps=eps)


def with_gated(
    calls: Sequence[ModuleCall], norms: Mapping[ModuleCall, NormKind]
) -> dict[ModuleCall, NormKind]:
    """Return the norms with each gated one replaced by the module around the norm and its gate.

    Args:
        calls: all calls of a block.
        norms: its norms.
    """
    result = dict(norms)
    for around in calls:
        if len(around.outputs) != 1:
            continue
        if around.entered is None:
            continue
        for norm in calls:
            is_plain = norm in norms and not norms[norm].centered
            if norm is around:
                continue
            if not is_plain:
                continue
            if not around.holds(norm):
                continue
            gate = _gate_of(norm, around, calls)
            if gate is not None:
                inside = relative(norm.path, around.path), relative(gate.path, around.path)
                result[around] = replace(norms[norm], inside=inside)
                result.pop(norm, None)
    return result


def _gate_of(
    norm: ModuleCall, around: ModuleCall, calls: Sequence[ModuleCall]
) -> ModuleCall | None:
    """Return the call of the gate if a module multiplies a norm by the sigmoid of a gate that reads
    it.
    """
    normed = norm.returned
    output = around.value
    if norm.entered is None:
        return None
    if not around.reads(norm.entered.mark):
        return None
    for gate in calls:
        if gate is around:
            continue
        if not around.holds(gate):
            continue
        if not gate.reads(normed.mark):
            continue
        if not gate.outputs:
            continue
        if gate.value.shape != output.shape:
            continue
        if agree(normed.value * gate.value.sigmoid(), output):
            return gate
    return None


def _with_epsilon(kind: NormKind, stored: float | None) -> NormKind | None:
    """Return the kind with the measured epsilon, or with None if the module stores the same one."""
    assert kind.eps is not None
    # Only two digits of an epsilon can be measured.
    if stored is not None and (not kind.eps or abs(kind.eps - stored) <= 0.02 * stored):
        return replace(kind, eps=None)
    if kind.eps:
        return replace(kind, eps=float(f"{kind.eps:.2g}"))
    return None


def _of_numbers(x: Tensor, y: Tensor, module: nn.Module, stored: float | None) -> NormKind | None:
    """Return the norm that turns `x` into `y` in the recorded run, with the module's epsilon or a
    measured one.
    """
    if stored is None:
        kind = recognise_norm(x, y, module, tolerance=tolerance(x))
        if kind is None:
            return None
        return _with_epsilon(kind, None)
    for kind in norms_to_try(module, stored):
        if agree(kind.of(x.double(), module), y, x):
            return replace(kind, eps=None)
    return None
