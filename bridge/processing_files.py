"""What processing changes about saving: embeddings that were tied, biases for which the model's class has no place.

A bias that a transform puts behind a layer without one is not in the class of the model: `from_pretrained` would drop
it. transformers writes a model through the conversions noted on it, which turn what is in memory into what is in the
file. We add one for each such bias: the file holds the same function in the parameters that the class has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightConverter

from adapters import Architecture
from adapters.paths import base_path, has_module, join
from weight_processing import fold_value_biases


class IntoNorm(ConversionOps):
    """Writes biases behind a layer norm's readers as a bias of the norm, which any such model can hold.

    The normalised value ``n`` sums to zero: with a norm bias of ones, and a row ``c`` added to each row of ``W``,
    ``(n + 1) @ (W + c) == n @ W + (sum over d_model of W) + d_model * c``. Columns of a folded ``W`` sum to zero, and
    ``c = b / d_model`` makes the bias ``b``. Folding the norm again gives ``W`` and ``b`` back.

    Before that, an output bias that came from value biases is written as these.

    Args:
        norm: the key of the norm's bias, "" where no reader's bias is to be written with it.
        readers: the keys of the readers' weights and biases.
        output: the keys of the output projection's weight and bias, and of the value projection's bias.
        b_V: the value biases that were folded, ``[kv_heads d_head]``.
        n_heads: the number of query heads.
    """

    def __init__(
        self,
        norm: str = "",
        readers: tuple[tuple[str, str], ...] = (),
        output: tuple[str, str, str] | None = None,
        b_V: Tensor | None = None,
        n_heads: int = 0,
    ) -> None:
        self.norm, self.readers, self.output, self.b_V, self.n_heads = norm, readers, output, b_V, n_heads

    @property
    def keys(self) -> list[str]:
        """All that are read, the first of which is written in any case."""
        keys = [self.norm] if self.norm else []
        if self.output:
            keys += [self.output[2], *self.output[:2]]
        return list(dict.fromkeys([*keys, *(key for pair in self.readers for key in pair)]))

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = {key: value[0].detach() for key, value in input_dict.items()}
        dtypes = {key: value.dtype for key, value in found.items()}
        if self.output:
            self._output_into_values(found)
        for weight, bias in self.readers:
            W = found[weight]  # d_out d_model
            c = (found.pop(bias).double() - W.sum(1, dtype=torch.float64)) / W.shape[1]
            found[weight] = (W + c.unsqueeze(1).to(W.dtype)).to(W.dtype)
        if self.norm:
            found[self.norm] = torch.ones_like(found[self.norm])
        return {key: value.to(dtypes[key]) for key, value in found.items()}

    def _output_into_values(self, found: dict[str, Tensor]) -> None:
        assert self.output is not None
        assert self.b_V is not None
        weight, bias, value = self.output
        b_O, b_V = found.pop(bias).double(), self.b_V.to(found[weight].device).double()
        W_O = found[weight].double().T.unflatten(0, (self.n_heads, -1))
        size = max(float(b_O.abs().max()), float(W_O.abs().max()), 1e-12)
        if float((fold_value_biases(b_V, W_O) - b_O).abs().max()) > 64 * torch.finfo(found[weight].dtype).eps * size:
            raise ValueError(
                f"{bias} has changed since the value biases were folded into it, and the model's class has no place "
                "for it: keep it with torch.save(model.state_dict(), ...), not with save_pretrained"
            )
        found[value] = (found[value].double().unflatten(0, b_V.shape) + b_V).flatten()


class InFile(WeightConverter):
    """A conversion between memory and file for exactly these keys; it is only ever made use of when saving.

    Args:
        operation: what is done.
    """

    def __init__(self, operation: IntoNorm) -> None:
        super().__init__(operation.keys, operation.keys[:1], [operation])

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The name under which what belongs together is collected, and the pattern that matched: the key itself."""
        if source_key not in self.source_patterns:
            return source_key, None
        self._was_used = True
        return self.target_patterns[0], source_key

    def reverse_transform(self) -> InFile:
        """Saving asks for the reverse of loading."""
        return InFile(self.operations[0])  # type: ignore[arg-type]


class Carried:
    """Biases that were given to layers without one, and how they are saved.

    Args:
        core: the Hugging Face model.
    """

    def __init__(self, core: nn.Module) -> None:
        self.core: Any = core
        self.base = base_path(core)
        self.readers: dict[str, dict[str, None]] = {}
        self.outputs: dict[str, tuple[str, Tensor, int]] = {}
        for conversion in getattr(core, "_weight_conversions", None) or ():
            if isinstance(conversion, InFile):
                self._take(conversion.operations[0])  # type: ignore[arg-type]

    def _take(self, operation: IntoNorm) -> None:
        for weight, _ in operation.readers:
            self.readers.setdefault(_module(operation.norm), {})[_module(weight)] = None
        if operation.output:
            assert operation.b_V is not None
            weight, _, value = operation.output
            self.outputs[_module(weight)] = (_module(value), operation.b_V, operation.n_heads)

    def _full(self, path: str) -> str:
        return path[1:] if path.startswith(".") else join(self.base, path)

    def add_reader(self, norm: str, reader: str) -> None:
        """Notes that a reader of a norm is given a bias."""
        self.readers.setdefault(self._full(norm), {})[self._full(reader)] = None

    def has_output(self, output: str) -> bool:
        """Whether an output projection was given its bias."""
        return self._full(output) in self.outputs

    def add_output(self, output: str, value: str, b_V: Tensor, n_heads: int) -> None:
        """Notes that an output projection is given a bias that comes from these value biases."""
        known = self.outputs.get(self._full(output))
        b_V = b_V.detach().to("cpu", torch.float64, copy=True)
        self.outputs[self._full(output)] = (self._full(value), b_V if known is None else known[1] + b_V, n_heads)

    def note(self) -> None:
        """Notes on the model how it is saved."""
        outputs, operations = dict(self.outputs), []
        for norm, readers in self.readers.items():
            into: dict[str, Any] = {}
            for output, (value, b_V, heads) in list(outputs.items()):
                if value in readers:
                    into = _output_arguments(output, value, b_V, heads)
                    del outputs[output]
            pairs = tuple((f"{reader}.weight", f"{reader}.bias") for reader in readers)
            operations.append(IntoNorm(f"{norm}.bias", pairs, **into))
        operations += [IntoNorm(**_output_arguments(output, *facts)) for output, facts in outputs.items()]
        if not operations:
            return
        known = getattr(self.core, "_weight_conversions", None)
        if known is None:
            # What transformers falls back on for a model that was not loaded.
            known = [
                c for c in get_model_conversion_mapping(self.core, add_legacy=False) if type(c) is not PrefixChange
            ]
        kept = [conversion for conversion in known if not isinstance(conversion, InFile)]
        self.core._weight_conversions = [*kept, *map(InFile, operations)]


def _module(key: str) -> str:
    return key.rpartition(".")[0]


def _output_arguments(output: str, value: str, b_V: Tensor, n_heads: int) -> dict[str, Any]:
    return {"output": (f"{output}.weight", f"{output}.bias", f"{value}.bias"), "b_V": b_V, "n_heads": n_heads}


def untie(core: Any, architecture: Architecture) -> bool:
    """Gives the unembedding a parameter of its own where it shares the embedding's.

    Returns:
        Whether it did share it.
    """
    if not has_module(core, architecture.unembed):
        return False
    embed = core.get_submodule(join(base_path(core), architecture.embed))
    unembed = core.get_submodule(architecture.unembed)
    if unembed.weight is not embed.weight:
        return False
    weight = embed.weight
    unembed.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    core.config.tie_word_embeddings = False
    tied = getattr(core, "all_tied_weights_keys", {})
    for key in [key for key in tied if key == f"{architecture.unembed}.weight"]:
        del tied[key]
    return True
