"""Saving of processed models: untied embeddings, and biases that the model's class does not have.

If a transform adds a bias to a layer whose class has none, `from_pretrained` would drop it.
transformers writes a model through the conversions registered on it, which map the parameters in
memory to those of the file. This module registers one for each such bias: the file expresses the
same function with the parameters that the class has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightConverter
from transformers.pytorch_utils import Conv1D

from adapters import Architecture
from adapters.points import base_path, has_module, join
from weight_processing import fold_layer_norm, fold_value_biases
from weight_processing.parts import NormWithReaders, ProcessedParts, held_here, precise

# --------------------------------------------------------------------------------------------------
# Parameters in a saved model's file that replace biases the model's class does not have.
# --------------------------------------------------------------------------------------------------


_PIECE = 1 << 21


@dataclass(frozen=True)
class _ReaderKeys:
    """State-dict keys of a layer that reads a norm.

    Attributes:
        path: the path of the layer.
        bare: whether its class gives it no bias.
        transposed: whether its weight is ``[d_in, d_out]``.
    """

    path: str
    bare: bool
    transposed: bool


@dataclass(frozen=True)
class _OutputKeys:
    """State-dict keys of an output projection whose class gives it no bias.

    Attributes:
        path, value: the paths of the output projection and of the value projection.
        places: the indices of the value biases in the latter's bias, ``[kv_heads d_head]``.
        b_V: the value biases that were folded, ``[kv_heads d_head]``.
        n_heads: the number of query heads.
        eps: the rounding error of the output projection at that time.
    """

    path: str
    value: str
    places: Tensor
    b_V: Tensor
    n_heads: int
    eps: float


@dataclass(eq=False, repr=False)
class _BiasIntoNorm(ConversionOps):
    """Conversion that stores the biases of a layer norm's readers in the bias of the norm, because
    the class has a parameter for it.

    The normalised value ``n`` sums to zero. With a norm bias of ones, and a row ``c`` added to each
    row of ``W``, ``(n + 1) @ (W + c) == n @ W + (sum over d_model of W) + d_model * c``, and ``c =
    (b - sum of W) / d_model`` gives the bias ``b``. Folding the norm again restores ``W`` and
    ``b``. If the norm was trained meanwhile, it is folded first. A reader with its own bias
    subtracts the sum of ``W`` from it.

    Before that, an output bias that came from value biases is converted back to value biases.

    Args:
        norm: the path of the norm; "" if no reader's bias is to be written with it.
        offset: the number added to its weight.
        readers: all readers of the norm.
        output: the output projection, if its class has no bias for it.
    """

    norm: str = ""
    offset: float = 0.0
    readers: tuple[_ReaderKeys, ...] = ()
    output: _OutputKeys | None = None

    @property
    def keys(self) -> list[str]:
        """Return all keys that are read; the first one is always written."""
        keys = []
        modules = [self.norm] if self.norm else []
        modules += [reader.path for reader in self.readers]
        if self.output:
            keys.append(f"{self.output.value}.bias")
            modules.append(self.output.path)
        for module in modules:
            keys += [f"{module}.bias", f"{module}.weight"]
        return list(dict.fromkeys(keys))

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the tensors of the file, computed from those in memory."""
        tensors = {key: value[0].detach() for key, value in input_dict.items()}
        if self.output:
            _output_into_values(tensors, self.output)
        if self.norm:
            self._readers_into_norm(tensors)
        return tensors

    def _readers_into_norm(self, tensors: dict[str, Tensor]) -> None:
        weight = tensors.get(f"{self.norm}.weight")
        bias = tensors[f"{self.norm}.bias"]
        w = None if weight is None else precise(weight) + self.offset
        b: Tensor | None = precise(bias)
        if not bool(bias.any()) and (w is None or bool((w == 1).all())):
            b = None  # the norm was not trained since it was folded
        for reader in self.readers:
            _reader_into_norm(tensors, reader, w, b)
        tensors[f"{self.norm}.bias"] = torch.ones_like(bias)
        if weight is not None:
            tensors[f"{self.norm}.weight"] = torch.full_like(weight, 1.0 - self.offset)


def _reader_into_norm(
    tensors: dict[str, Tensor], reader: _ReaderKeys, w: Tensor | None, b: Tensor | None
) -> None:
    """Replace a reader's matrix and bias by those for a norm with a bias of ones.

    Args:
        tensors: the tensors, by key; changed in place.
        reader: the reader's keys.
        w, b: the weight and bias of the norm, which are folded first if there is a bias.
    """
    W = tensors[f"{reader.path}.weight"]
    bias = precise(tensors.pop(f"{reader.path}.bias"))
    new_W = torch.empty_like(W)
    new_biases: list[Tensor] = []
    rows, new_rows = (W.T, new_W.T) if reader.transposed else (W, new_W)  # d_out d_model
    size = max(1, _PIECE * len(bias) // W.numel())
    pieces = [x.split(size) for x in (rows, new_rows, bias)]
    for old, new, bias_piece in zip(*pieces, strict=True):
        matrix = precise(old)
        if b is not None:
            folded, added = fold_layer_norm(matrix.T, w, b)
            assert added is not None
            matrix, bias_piece = folded.T, bias_piece + added
        if reader.bare:
            constant = (bias_piece - matrix.sum(1)) / matrix.shape[1]
            new.copy_(_rounded(matrix + constant.unsqueeze(1), W.dtype))
        else:
            new.copy_(matrix)
            new_biases.append(bias_piece - precise(new).sum(1))
    tensors[f"{reader.path}.weight"] = new_W
    if new_biases:
        tensors[f"{reader.path}.bias"] = torch.cat(new_biases).to(W.dtype)


def _output_into_values(tensors: dict[str, Tensor], keys: _OutputKeys) -> None:
    """Replace the bias of an output projection by the value biases that it comes from.

    Raises:
        ValueError: it has changed since.
    """
    weight = tensors[f"{keys.path}.weight"]
    b_O = tensors.pop(f"{keys.path}.bias").double()
    b_V = keys.b_V.to(weight.device)
    W_O = weight.double().T.unflatten(0, (keys.n_heads, -1))
    # Each product in the sum of a bias was rounded, and the sum itself.
    rounding = 8 * fold_value_biases(b_V.square(), W_O.square()).sqrt() + b_O.abs()
    allowed = max(keys.eps, torch.finfo(weight.dtype).eps) * rounding + 1e-30
    difference = fold_value_biases(b_V, W_O) - b_O
    if bool((difference.abs() > allowed).any()):
        raise ValueError(
            f"{keys.path}.bias has changed since the value biases were folded into it, and the"
            " model's class has no place for it: keep it with torch.save(model.state_dict(), ...),"
            " not with save_pretrained"
        )
    key = f"{keys.value}.bias"
    values = tensors[key].to(torch.float64, copy=True)
    values[keys.places.to(values.device)] += b_V
    tensors[key] = values.to(tensors[key].dtype)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a matrix to a dtype with its row sums preserved: each element's rounding error is
    added to the next one.

    Otherwise most elements would lose an added constant that is small compared with them.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return x.to(dtype)
    columns = x.T.contiguous()
    rounded = torch.empty_like(columns, dtype=dtype)
    error = torch.zeros_like(columns[0])
    for column, target in zip(columns, rounded, strict=True):
        error += column
        target.copy_(error)
        error -= target
    return rounded.T


class _FileConversion(WeightConverter):
    """Conversion between memory and file for exactly these keys; it is used only for saving.

    Args:
        operation: the conversion of the tensors.
    """

    def __init__(self, operation: _BiasIntoNorm) -> None:
        super().__init__(operation.keys, operation.keys[:1], [operation])

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the name under which matching tensors are collected, and the pattern that matched:
        the key itself.
        """
        if source_key not in self.source_patterns:
            return source_key, None
        self._was_used = True
        return self.target_patterns[0], source_key

    def reverse_transform(self) -> _FileConversion:
        """Return the conversion for saving, which transformers derives as the reverse of
        loading.
        """
        return _FileConversion(self.operations[0])  # type: ignore[arg-type]


class SavedBiases:
    """Registry of the biases added to layers without one, and of their conversion for saving.

    Args:
        core: the Hugging Face model.
    """

    def __init__(self, core: PreTrainedModel) -> None:
        self.core = core
        self.base = base_path(core)
        self.norms: dict[str, _BiasIntoNorm] = {}
        self.outputs: dict[str, _OutputKeys] = {}
        for conversion in getattr(core, "_weight_conversions", None) or ():
            if not isinstance(conversion, _FileConversion):
                continue
            operation = conversion.operations[0]
            assert isinstance(operation, _BiasIntoNorm)
            if operation.norm:
                self.norms[operation.norm] = operation
            if operation.output:
                self.outputs[operation.output.path] = operation.output

    def _full(self, path: str) -> str:
        return path[1:] if path.startswith(".") else join(self.base, path)

    def add_readers(self, norm: NormWithReaders, bare: set[str]) -> None:
        """Register that some of a norm's readers are given a bias.

        Args:
            norm: the norm.
            bare: the paths of these readers.
        """
        norm_path = self._full(norm.path)
        bare_paths = {self._full(path) for path in bare}
        if norm_path in self.norms:
            bare_paths |= {reader.path for reader in self.norms[norm_path].readers if reader.bare}
        readers = []
        for holder in dict.fromkeys(reader.holder for reader in norm.readers):
            path = self._full(holder)
            transposed = type(self.core.get_submodule(path)) is Conv1D
            readers.append(_ReaderKeys(path, path in bare_paths, transposed))
        self.norms[norm_path] = _BiasIntoNorm(norm_path, norm.kind.added, tuple(readers))

    def has_output(self, output: str) -> bool:
        """Tell whether an output projection was given its bias by a transform."""
        return self._full(output) in self.outputs

    def add_output(self, parts: ProcessedParts, path: str, b_V: Tensor) -> None:
        """Register that a block's output projection is given a bias that comes from these value
        biases.

        Args:
            parts: the model's parts.
            path: the path of the block.
            b_V: ``[kv_heads d_head]``.
        """
        output = self._full(parts.projection(path, "O"))
        value = self._full(parts.projection(path, "V"))
        eps = torch.finfo(b_V.dtype).eps
        b_V = b_V.detach().to("cpu", torch.float64, copy=True)
        before = self.outputs.get(output)
        if before is not None:
            b_V = before.b_V + b_V
            eps = max(before.eps, eps)
        places = parts.value_places(path)
        self.outputs[output] = _OutputKeys(output, value, places, b_V, parts.cfg.n_heads, eps)

    def note(self) -> None:
        """Register the conversions for saving on the model."""
        outputs = dict(self.outputs)
        operations = []
        for norm in self.norms.values():
            readers = {reader.path for reader in norm.readers}
            inside = [keys for keys in outputs.values() if keys.value in readers]
            for keys in inside:
                del outputs[keys.path]
            operations.append(replace(norm, output=inside[0] if inside else None))
        operations += [_BiasIntoNorm(output=keys) for keys in outputs.values()]
        if not operations:
            return
        conversions = getattr(self.core, "_weight_conversions", None)
        if conversions is None:
            # The fallback of transformers for a model that was not loaded.
            mapping = get_model_conversion_mapping(self.core, add_legacy=False)
            conversions = [entry for entry in mapping if type(entry) is not PrefixChange]
        kept = [entry for entry in conversions if not isinstance(entry, _FileConversion)]
        self.core.__dict__["_weight_conversions"] = [*kept, *map(_FileConversion, operations)]


def untie(core: PreTrainedModel, architecture: Architecture) -> None:
    """Give the unembedding its own parameter if it shares the embedding's; record this in the
    configuration.
    """
    tokens, readout = architecture.embedding.tokens, architecture.readout.path
    if not (tokens and readout and has_module(core, readout)):
        return
    embed = core.get_submodule(join(base_path(core), tokens))
    unembed = core.get_submodule(readout)
    weight, tied = unembed.weight, embed.weight
    assert isinstance(weight, Tensor) and isinstance(tied, Tensor)
    if held_here(weight).data_ptr() == held_here(tied).data_ptr():
        unembed.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    core.config.tie_word_embeddings = False
    getattr(core, "all_tied_weights_keys", {}).pop(f"{readout}.weight", None)
