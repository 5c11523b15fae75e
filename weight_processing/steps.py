"""The transforms of `weight_processing`, applied in place to a model's parameters, one piece of a
matrix at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
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

#: Functions that return parameters, by canonical name.
Parameters: TypeAlias = dict[str, Get]


def _pieces(parts: ProcessedParts, x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Return views of a matrix, split along an axis."""
    return x.split(max(1, parts.piece * x.shape[dim] // x.numel()), dim)


def _fold_into(
    parts: ProcessedParts,
    reader: NormReader,
    norm: NormWithReaders,
    w: Tensor | None,
    b: Tensor | None,
) -> None:
    weight = reader.weight()
    axis = 0 if weight.ndim == 3 else -1
    pieces = _pieces(parts, weight, axis)
    biases: Iterable[Tensor | None] = repeat(None, len(pieces))
    if b is not None:
        assert reader.bias is not None
        ensure_bias(parts.weights.module(reader.holder))
        biases = reader.bias().split(pieces[0].shape[axis])
    for piece, bias in zip(pieces, biases, strict=True):
        folded, added = fold_layer_norm(precise(piece), w, b, norm.kind.centered)
        piece.copy_(folded)
        if bias is not None and added is not None:
            bias.copy_(precise(bias) + added)


def do_fold_ln(parts: ProcessedParts, saved_biases: SavedBiases) -> None:
    """Fold every norm into all its readers; its weight becomes one and its bias zero."""
    for place, norms in parts.by_place((norm.name, norm) for norm in parts.norms):
        with parts.around(place):
            for norm in norms:
                _fold(parts, norm, saved_biases)


def _fold(parts: ProcessedParts, norm: NormWithReaders, saved_biases: SavedBiases) -> None:
    w, b = parts.affine(norm)
    if b is not None and not bool(b.any()):
        b = None
    if b is not None:
        holders = {reader.holder for reader in norm.readers}
        bare = {holder for holder in holders if not parts.has_bias(holder)}
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
    """Center all matrices and biases that write to the residual stream."""
    for place, writers in parts.by_place(parts.writers.items()):
        with parts.around(place):
            for get in writers:
                writer = get()
                pieces = _pieces(parts, writer, 0) if writer.ndim > 1 else (writer,)
                for piece in pieces:
                    piece.copy_(center_writing_weights(precise(piece)))


def do_center_unembed(parts: ProcessedParts, saved_biases: SavedBiases) -> None:
    """Center the unembedding and its bias."""
    with parts.around(""):
        W_U = parts.get("unembed.W_U")()
        # The stored matrix has the vocabulary first: pieces along it are contiguous.
        pieces = _pieces(parts, W_U, 1)
        # One total in place: a stored sum for each piece would fragment the freed memory.
        total = torch.zeros_like(precise(W_U[:, :1]))
        for piece in pieces:
            total += precise(piece).sum(1, keepdim=True)
        for piece in pieces:
            piece.copy_(center_unembed(precise(piece), total / W_U.shape[1]))
        if parts.has_bias(parts.unembed):
            bias = parts.get("unembed.b_U")()
            bias.copy_(center_unembed(precise(bias)))


def do_fold_value_biases(parts: ProcessedParts, saved_biases: SavedBiases) -> None:
    """Fold the value biases of every block into its output bias."""
    for name, path in parts.blocks:
        with parts.around(name):
            _fold_value_biases(parts, saved_biases, f"{name}.attn", path)


def _fold_value_biases(
    parts: ProcessedParts, saved_biases: SavedBiases, attn: str, path: str
) -> None:
    b_V = parts.get(parts.find(attn, "b_V"))()
    if not bool(b_V.any()):
        return
    W_O = parts.get(f"{attn}.W_O")()
    added: Tensor | int = 0
    groups = W_O.split(len(W_O) // len(b_V))
    for bias, heads in zip(b_V.split(1), groups, strict=True):
        added = added + fold_value_biases(precise(bias), precise(heads))
    output = parts.projection(path, "O")
    if not parts.has_bias(output) or saved_biases.has_output(output):
        saved_biases.add_output(parts, path, b_V)
        ensure_bias(parts.weights.module(output))
    b_O = parts.get(f"{attn}.b_O")()
    b_O.copy_(precise(b_O) + added)
    b_V.zero_()


def do_refactor(parts: ProcessedParts, saved_biases: SavedBiases) -> None:
    """Fold the value biases, and refactor every head."""
    do_fold_value_biases(parts, saved_biases)
    for name, path in parts.blocks:
        with parts.around(name):
            _refactor(parts, f"{name}.attn", path)


def _refactor(parts: ProcessedParts, attn: str, path: str) -> None:
    names = ("W_Q", "b_Q", "W_K", "b_K")
    views = [parts.get(f"{attn}.{name}")() for name in names]
    factors = refactor_query_key(*map(precise, views))
    for name, view, factor in zip(names, views, factors, strict=True):
        # Without a bias, its row of the matrix was zero, and stays zero.
        if name.startswith("W") or parts.has_bias(parts.projection(path, name[-1])):
            view.copy_(factor)
    W_V = parts.get(f"{attn}.W_V")()
    W_O = parts.get(f"{attn}.W_O")()
    new_W_V, new_W_O = refactor_value_output(precise(W_V), precise(W_O))
    W_V.copy_(new_W_V)
    W_O.copy_(new_W_O)


def _norms_and_readers(parts: ProcessedParts) -> Parameters:
    """Return the parameters of the norms and of their readers."""
    parameters: Parameters = {}
    for norm in parts.norms:
        module = parts.weights.module(norm.path)
        for suffix, name in zip("wb", parameter_names(module), strict=True):
            if getattr(module, name, None) is not None:
                parameters[f"{norm.name}.{suffix}"] = partial(getattr, module, name)
        for reader in norm.readers:
            parameters[reader.name] = reader.weight
            if reader.bias is not None and parts.has_bias(reader.holder):
                parameters[f"{reader.name} (its bias)"] = reader.bias
    return parameters


def _unembedding(parts: ProcessedParts) -> Parameters:
    names = ["unembed.W_U"]
    if parts.has_bias(parts.unembed):
        names.append("unembed.b_U")
    return {name: parts.get(name) for name in names}


def _projections(parts: ProcessedParts, letters: str) -> Parameters:
    """Return the projections of every attention, each with its bias if it has one."""
    parameters: Parameters = {}
    for block, path in parts.blocks:
        for letter in letters:
            names = [parts.find(f"{block}.attn", f"W_{letter}")]
            if parts.has_bias(parts.projection(path, letter)):
                names.append(parts.find(f"{block}.attn", f"b_{letter}"))
            parameters |= {name: parts.get(name) for name in names}
    return parameters


class Transform(NamedTuple):
    """Transform of a model's parameters.

    Attributes:
        do: applies it.
        writes: returns the parameters that it writes to, by canonical name.
    """

    do: Callable[[ProcessedParts, SavedBiases], None]
    writes: Callable[[ProcessedParts], Parameters]


REFACTOR = "refactor_factored_attn_matrices"
#: The transforms, in the order in which they are applied.
TRANSFORMS: dict[str, Transform] = {
    "fold_ln": Transform(do_fold_ln, _norms_and_readers),
    "center_writing_weights": Transform(do_center_writing_weights, lambda parts: parts.writers),
    "center_unembed": Transform(do_center_unembed, _unembedding),
    "fold_value_biases": Transform(do_fold_value_biases, partial(_projections, letters="VO")),
    REFACTOR: Transform(do_refactor, partial(_projections, letters="QKVO")),
}
