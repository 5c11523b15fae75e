"""What processing changes about saving: embeddings that were tied, biases for which the model's class has no place.

A bias that a transform puts behind a layer without one is not in the class of the model: `from_pretrained` would drop
it. transformers writes a model through the conversions noted on it, which turn what is in memory into what is in the
file. We add one for each such bias: the file holds the same function in the parameters that the class has.
"""

from __future__ import annotations

from dataclasses import dataclass
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

# ----------------------------------------------------------------------------------------------------------------------
# What stands in a saved model's file for biases for which the model's class has no place.
# ----------------------------------------------------------------------------------------------------------------------


_PIECE = 1 << 21


@dataclass(frozen=True)
class ReaderKeys:
    """A layer that reads a norm, in the state dict.

    Attributes:
        path: of the layer.
        bare: its class gives it no bias.
        transposed: its weight is ``[d_in, d_out]``.
    """

    path: str
    bare: bool
    transposed: bool


@dataclass(frozen=True)
class OutputKeys:
    """An output projection whose class gives it no bias, in the state dict.

    Attributes:
        path, value: of the output projection, and of the projection that makes the values.
        places: where in the latter's bias those of the values stand, ``[kv_heads d_head]``.
        b_V: the value biases that were folded, ``[kv_heads d_head]``.
        n_heads: the number of query heads.
        eps: how far the output projection was rounded then.
    """

    path: str
    value: str
    places: Tensor
    b_V: Tensor
    n_heads: int
    eps: float


class BiasIntoNorm(ConversionOps):
    """Writes biases behind a layer norm's readers as a bias of the norm, which any such model can hold.

    The normalised value ``n`` sums to zero: with a norm bias of ones, and a row ``c`` added to each row of ``W``,
    ``(n + 1) @ (W + c) == n @ W + (sum over d_model of W) + d_model * c``, and ``c = (b - sum of W) / d_model`` makes
    the bias ``b``. Folding the norm again gives ``W`` and ``b`` back. A norm that was trained meanwhile is folded
    first. What reads the norm and has a bias of its own takes the sum of ``W`` out of that.

    Before that, an output bias that came from value biases is written as these.

    Args:
        norm: the path of the norm, "" where no reader's bias is to be written with it.
        offset: what is added to its weight.
        readers: all that read it.
        output: the output projection, where it has no place for its bias.
    """

    def __init__(
        self,
        norm: str = "",
        offset: float = 0.0,
        readers: tuple[ReaderKeys, ...] = (),
        output: OutputKeys | None = None,
    ) -> None:
        self.norm, self.offset, self.readers, self.output = norm, offset, readers, output

    @property
    def keys(self) -> list[str]:
        """All that are read, the first of which is written in any case."""
        modules = [self.norm] if self.norm else []
        keys = [f"{self.output.value}.bias"] if self.output else []
        modules += [reader.path for reader in self.readers] + ([self.output.path] if self.output else [])
        return list(dict.fromkeys(keys + [f"{path}.{name}" for path in modules for name in ("bias", "weight")]))

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The tensors of the file from those in memory."""
        found = {key: value[0].detach() for key, value in input_dict.items()}
        if self.output:
            _output_into_values(found, self.output)
        if self.norm:
            self._readers_into_norm(found)
        return found

    def _readers_into_norm(self, found: dict[str, Tensor]) -> None:
        weight, bias = found.get(f"{self.norm}.weight"), found[f"{self.norm}.bias"]
        w = None if weight is None else precise(weight) + self.offset
        plain = not bool(bias.any()) and (w is None or bool((w == 1).all()))
        for reader in self.readers:
            key = f"{reader.path}.bias"
            W = found[f"{reader.path}.weight"]
            new = torch.empty_like(W)
            rows = (W.T, new.T) if reader.transposed else (W, new)  # d_out d_model
            b = precise(found.pop(key))
            own: list[Tensor] = []
            pieces = (x.split(max(1, _PIECE * len(b) // W.numel())) for x in (*rows, b))
            for old, place, behind in zip(*pieces, strict=True):
                matrix = precise(old)
                if not plain:
                    folded, more = fold_layer_norm(matrix.T, w, precise(bias))
                    assert more is not None
                    matrix, behind = folded.T, behind + more
                if reader.bare:
                    c = (behind - matrix.sum(1)) / matrix.shape[1]
                    place.copy_(_rounded(matrix + c.unsqueeze(1), W.dtype))
                else:
                    place.copy_(matrix)
                    own.append(behind - precise(place).sum(1))
            found[f"{reader.path}.weight"] = new
            if own:
                found[key] = torch.cat(own).to(W.dtype)
        found[f"{self.norm}.bias"] = torch.ones_like(bias)
        if weight is not None:
            found[f"{self.norm}.weight"] = torch.full_like(weight, 1.0 - self.offset)


def _output_into_values(found: dict[str, Tensor], keys: OutputKeys) -> None:
    weight, key = found[f"{keys.path}.weight"], f"{keys.value}.bias"
    b_O, b_V = found.pop(f"{keys.path}.bias").double(), keys.b_V.to(weight.device)
    W_O = weight.double().T.unflatten(0, (keys.n_heads, -1))
    # Each of the products that a bias is the sum of was rounded, and the sum.
    rounding = 8 * fold_value_biases(b_V.square(), W_O.square()).sqrt() + b_O.abs()
    allowed = max(keys.eps, torch.finfo(weight.dtype).eps) * rounding + 1e-30
    if bool(((fold_value_biases(b_V, W_O) - b_O).abs() > allowed).any()):
        raise ValueError(
            f"{keys.path}.bias has changed since the value biases were folded into it, and the model's class has no "
            "place for it: keep it with torch.save(model.state_dict(), ...), not with save_pretrained"
        )
    values = found[key].to(torch.float64, copy=True)
    values[keys.places.to(values.device)] += b_V
    found[key] = values.to(found[key].dtype)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix in a type, with the sum of each row kept: rounding an element goes over to the next one.

    A constant that is small compared with the elements would be rounded away from most of them otherwise.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return x.to(dtype)
    columns = x.T.contiguous()
    new, over = torch.empty_like(columns, dtype=dtype), torch.zeros_like(columns[0])
    for column, place in zip(columns, new, strict=True):
        over += column
        place.copy_(over)
        over -= place
    return new.T


class FileConversion(WeightConverter):
    """A conversion between memory and file for exactly these keys; it is only ever made use of when saving.

    Args:
        operation: what is done.
    """

    def __init__(self, operation: BiasIntoNorm) -> None:
        super().__init__(operation.keys, operation.keys[:1], [operation])

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The name under which what belongs together is collected, and the pattern that matched: the key itself."""
        if source_key not in self.source_patterns:
            return source_key, None
        self._was_used = True
        return self.target_patterns[0], source_key

    def reverse_transform(self) -> FileConversion:
        """Saving asks for the reverse of loading."""
        return FileConversion(self.operations[0])  # type: ignore[arg-type]


class SavedBiases:
    """Biases that were given to layers without one, and how they are saved.

    Args:
        core: the Hugging Face model.
    """

    def __init__(self, core: PreTrainedModel) -> None:
        self.core = core
        self.base = base_path(core)
        self.norms: dict[str, BiasIntoNorm] = {}
        self.outputs: dict[str, OutputKeys] = {}
        for conversion in getattr(core, "_weight_conversions", None) or ():
            if isinstance(conversion, FileConversion):
                operation = conversion.operations[0]
                assert isinstance(operation, BiasIntoNorm)
                if operation.norm:
                    self.norms[operation.norm] = operation
                if operation.output:
                    self.outputs[operation.output.path] = operation.output

    def _full(self, path: str) -> str:
        return path[1:] if path.startswith(".") else join(self.base, path)

    def add_readers(self, norm: NormWithReaders, bare: set[str]) -> None:
        """Notes that some of a norm's readers are given a bias.

        Args:
            norm: the norm.
            bare: the paths of these.
        """
        known = self.norms.get(self._full(norm.path))
        before = {keys.path for keys in known.readers if keys.bare} if known else set()
        readers = []
        for path in dict.fromkeys(reader.holder for reader in norm.readers):
            full = self._full(path)
            transposed = type(self.core.get_submodule(full)) is Conv1D
            readers.append(ReaderKeys(full, path in bare or full in before, transposed))
        self.norms[self._full(norm.path)] = BiasIntoNorm(self._full(norm.path), norm.kind.added, tuple(readers))

    def has_output(self, output: str) -> bool:
        """Whether an output projection was given its bias."""
        return self._full(output) in self.outputs

    def add_output(self, parts: ProcessedParts, path: str, b_V: Tensor) -> None:
        """Notes that a block's output projection is given a bias that comes from these value biases.

        Args:
            parts: the model's parts.
            path: the block's.
            b_V: ``[kv_heads d_head]``.
        """
        output, value = self._full(parts.output(path)), self._full(parts.value(path))
        known = self.outputs.get(output)
        eps = torch.finfo(b_V.dtype).eps
        b_V = b_V.detach().to("cpu", torch.float64, copy=True)
        if known is not None:
            b_V, eps = known.b_V + b_V, max(known.eps, eps)
        self.outputs[output] = OutputKeys(output, value, parts.value_places(path), b_V, parts.cfg.n_heads, eps)

    def note(self) -> None:
        """Notes on the model how it is saved."""
        outputs, operations = dict(self.outputs), []
        for operation in self.norms.values():
            read = {keys.path for keys in operation.readers}
            inside = [keys for keys in outputs.values() if keys.value in read]
            for keys in inside:
                del outputs[keys.path]
            operations.append(
                BiasIntoNorm(operation.norm, operation.offset, operation.readers, inside[0] if inside else None)
            )
        operations += [BiasIntoNorm(output=keys) for keys in outputs.values()]
        if not operations:
            return
        known = getattr(self.core, "_weight_conversions", None)
        if known is None:
            # What transformers falls back on for a model that was not loaded.
            known = [
                c for c in get_model_conversion_mapping(self.core, add_legacy=False) if type(c) is not PrefixChange
            ]
        kept = [conversion for conversion in known if not isinstance(conversion, FileConversion)]
        self.core.__dict__["_weight_conversions"] = [*kept, *map(FileConversion, operations)]


def untie(core: PreTrainedModel, architecture: Architecture) -> None:
    """Gives the unembedding a parameter of its own where it shares the embedding's; the configuration says so."""
    tokens, readout = architecture.embedding.tokens, architecture.readout.path
    if not (tokens and readout and has_module(core, readout)):
        return
    embed = core.get_submodule(join(base_path(core), tokens))
    unembed = core.get_submodule(readout)
    weight, tied = unembed.weight, embed.weight
    assert isinstance(weight, Tensor) and isinstance(tied, Tensor)
    if held_here(weight).data_ptr() == held_here(tied).data_ptr():
        unembed.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    core.config.tie_word_embeddings = False
    getattr(core, "all_tied_weights_keys", {}).pop(f"{readout}.weight", None)
