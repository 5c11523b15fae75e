"""The transforms of `weight_processing`, done to a model's own parameters, a piece of one matrix at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from adapters.norms import parameter_names
from weight_processing import (
    center_unembed,
    center_writing_weights,
    fold_layer_norm,
    fold_value_biases,
    refactor_query_key,
    refactor_value_output,
)
from weight_processing.parts import (
    Get,
    NormReader,
    NormWithReaders,
    ProcessedParts,
    ensure_bias,
    norm_parameters,
    precise,
)
from weight_processing.saving import SavedBiases

Parameters: TypeAlias = dict[str, Get]


def _pieces(parts: ProcessedParts, x: Tensor, dim: int) -> Iterator[Tensor]:
    """Views of a matrix, cut along an axis."""
    return iter(x.split(max(1, parts.piece * x.shape[dim] // x.numel()), dim))


def _fold_into(
    parts: ProcessedParts, reader: NormReader, norm: NormWithReaders, w: Tensor | None, b: Tensor | None
) -> None:
    weight = reader.weight()
    cut = 0 if weight.ndim == 3 else -1
    if b is not None:
        assert reader.bias is not None
        ensure_bias(parts.weights.module(reader.holder))
        biases = iter(reader.bias().split(next(_pieces(parts, weight, cut)).shape[cut]))
    for piece in _pieces(parts, weight, cut):
        new, more = fold_layer_norm(precise(piece), w, b, norm.kind.centered)
        piece.copy_(new)
        if more is not None:
            bias = next(biases)
            bias.copy_(precise(bias) + more)


def do_fold_ln(parts: ProcessedParts, saved_biases: SavedBiases) -> None:
    """Folds every norm into all its readers, and leaves it with ones and zeros."""
    for place, norms in parts.by_place((norm.name, norm) for norm in parts.norms):
        with parts.around(place):
            for norm in norms:
                _fold(parts, norm, saved_biases)


def _fold(parts: ProcessedParts, norm: NormWithReaders, saved_biases: SavedBiases) -> None:
    w, b = parts.affine(norm)
    b = None if b is None or not bool(b.any()) else b
    bare = set() if b is None else {r.holder for r in norm.readers if not parts.has_bias(r.holder)}
    if bare:
        saved_biases.add_readers(norm, bare)
    for reader in norm.readers:
        _fold_into(parts, reader, norm, w, b)
    weight, bias = norm_parameters(parts.weights.module(norm.path))
    if weight is not None:
        weight.fill_(1.0 - norm.kind.added)
    if bias is not None:
        bias.zero_()


def do_center_writing_weights(parts: ProcessedParts, saved_biases: SavedBiases) -> None:
    """Centres all that writes to the residual stream."""
    for place, writers in parts.by_place(parts.writers.items()):
        with parts.around(place):
            for get in writers:
                for piece in _pieces(parts, get(), 0) if get().ndim > 1 else [get()]:
                    piece.copy_(center_writing_weights(precise(piece)))


def do_center_unembed(parts: ProcessedParts, saved_biases: SavedBiases) -> None:
    """Centres the unembedding and its bias."""
    with parts.around(""):
        W_U = parts.get("unembed.W_U")()
        # The stored matrix has the vocabulary first: these lie together in memory.
        pieces = list(_pieces(parts, W_U, 1))
        # One total: a sum for each piece, kept, would hold the freed pieces between them apart.
        total = torch.zeros_like(precise(W_U[:, :1]))
        for piece in pieces:
            total += precise(piece).sum(1, keepdim=True)
        for piece in pieces:
            piece.copy_(center_unembed(precise(piece), total / W_U.shape[1]))
        if parts.has_bias("." + parts.architecture.readout.path):
            bias = parts.get("unembed.b_U")()
            bias.copy_(center_unembed(precise(bias)))


def do_fold_value_biases(parts: ProcessedParts, saved_biases: SavedBiases) -> None:
    """Folds the value biases of every block into its output bias."""
    for name, path in parts.blocks:
        with parts.around(name):
            _fold_value_biases(parts, saved_biases, f"{name}.attn", path)


def _fold_value_biases(parts: ProcessedParts, saved_biases: SavedBiases, at: str, path: str) -> None:
    b_V = parts.get(parts.find(at, "b_V"))()
    if not bool(b_V.any()):
        return
    output, W_O = parts.output(path), parts.get(f"{at}.W_O")()
    more = sum(
        fold_value_biases(precise(biases), precise(heads))
        for biases, heads in zip(b_V.split(1), W_O.split(len(W_O) // len(b_V)), strict=True)
    )
    if not parts.has_bias(output) or saved_biases.has_output(output):
        saved_biases.add_output(parts, path, b_V)
        ensure_bias(parts.weights.module(output))
    b_O = parts.get(f"{at}.b_O")()
    b_O.copy_(precise(b_O) + more)
    b_V.zero_()


def do_refactor(parts: ProcessedParts, saved_biases: SavedBiases) -> None:
    """Folds the value biases, and chooses other factors for every head."""
    do_fold_value_biases(parts, saved_biases)
    for name, path in parts.blocks:
        with parts.around(name):
            _refactor(parts, f"{name}.attn", path)


def _refactor(parts: ProcessedParts, at: str, path: str) -> None:
    names = ("W_Q", "b_Q", "W_K", "b_K")
    views = [parts.get(f"{at}.{part}")() for part in names]
    new = refactor_query_key(*map(precise, views))
    for part, view, value in zip(names, views, new, strict=True):
        # Where there is no bias its row of the matrix was zero, and is zero.
        if part.startswith("W") or parts.has_bias(parts.projection(path, part[-1])):
            view.copy_(value)
    W_V, W_O = (parts.get(f"{at}.{part}")() for part in ("W_V", "W_O"))
    for view, value in zip((W_V, W_O), refactor_value_output(precise(W_V), precise(W_O)), strict=True):
        view.copy_(value)


def _folded(parts: ProcessedParts) -> Parameters:
    """The norms' own parameters, and those of what reads them."""
    found: Parameters = {}
    for norm in parts.norms:
        module = parts.weights.module(norm.path)
        for short, name, x in zip("wb", parameter_names(module), norm_parameters(module), strict=True):
            if x is not None:
                found[f"{norm.name}.{short}"] = partial(getattr, module, name)
        for reader in norm.readers:
            found[reader.name] = reader.weight
            if reader.bias is not None and parts.has_bias(reader.holder):
                found[f"{reader.name} (its bias)"] = reader.bias
    return found


def _unembedding(parts: ProcessedParts) -> Parameters:
    names = ["unembed.W_U"] + ["unembed.b_U"] * parts.has_bias("." + parts.architecture.readout.path)
    return {name: parts.get(name) for name in names}


def _projections(parts: ProcessedParts, letters: str) -> Parameters:
    """Those of every attention, each with the bias that it has."""
    found: Parameters = {}
    for name, path in parts.blocks:
        for letter in letters:
            at = f"{name}.attn"
            weight, bias = parts.find(at, f"W_{letter}"), parts.find(at, f"b_{letter}")
            found[weight] = parts.get(weight)
            if parts.has_bias(parts.projection(path, letter)):
                found[bias] = parts.get(bias)
    return found


class Transform(NamedTuple):
    """A transform of a model's parameters.

    Attributes:
        do: does it.
        writes: the parameters that it needs to write to, by canonical name.
    """

    do: Callable[[ProcessedParts, SavedBiases], None]
    writes: Callable[[ProcessedParts], Parameters]


#: In the order in which they are done.
TRANSFORMS: dict[str, Transform] = {
    "fold_ln": Transform(do_fold_ln, _folded),
    "center_writing_weights": Transform(do_center_writing_weights, lambda parts: parts.writers),
    "center_unembed": Transform(do_center_unembed, _unembedding),
    "fold_value_biases": Transform(do_fold_value_biases, partial(_projections, letters="VO")),
    "refactor_factored_attn_matrices": Transform(do_refactor, partial(_projections, letters="QKVO")),
}
