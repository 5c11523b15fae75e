"""What processing changes about saving: embeddings that were tied, biases for which the model's class has no place.

A bias that a transform puts behind a layer without one is not in the class of the model: `from_pretrained` would drop
it. transformers writes a model through the conversions noted on it, which turn what is in memory into what is in the
file. We add one for each such bias: the file holds the same function in the parameters that the class has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.pytorch_utils import Conv1D

from adapters import Architecture
from adapters.paths import base_path, has_module, join
from weight_processing.file_conversion import BiasIntoNorm, FileConversion, OutputKeys, ReaderKeys
from weight_processing.parts import Norm, ProcessedParts
from weight_processing.spread import held_here


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

    def add_readers(self, norm: Norm, bare: set[str]) -> None:
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
    if not has_module(core, architecture.readout.path):
        return
    embed = core.get_submodule(join(base_path(core), architecture.embedding.tokens))
    unembed = core.get_submodule(architecture.readout.path)
    weight, tied = unembed.weight, embed.weight
    assert isinstance(weight, Tensor) and isinstance(tied, Tensor)
    if held_here(weight).data_ptr() == held_here(tied).data_ptr():
        unembed.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    core.config.tie_word_embeddings = False
    getattr(core, "all_tied_weights_keys", {}).pop(f"{architecture.readout.path}.weight", None)
