"""``transformer_lens.components``'s names: the classes of parts, which stand for the Hugging Face model's own."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.config import ModelConfig
from bridge.legacy.parts import BUFFERS, Part
from bridge.legacy.table import named

__all__ = [
    "MLP", "AbstractAttention", "Attention", "BertEmbed", "CanBeUsedAsMLP", "Embed", "GatedMLP",
    "GroupedQueryAttention", "LayerNorm", "LayerNormPre", "MoE", "Norm", "Part", "PosEmbed", "RMSNorm", "RMSNormPre",
    "T5Attention", "TransformerBlock", "Unembed",
]  # fmt: skip

__path__: list[str] = []  # the modules of the table are below it
__getattr__ = named(__name__)
_RELATIVE = ("relative_attention_num_buckets", "relative_attention_max_distance")


class CanBeUsedAsMLP(Part):
    """What stands where a block has its MLP. `W_gate` is None without a gate."""

    at, fields = "blocks.0.mlp", {"attn_only": False}

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "W_gate" and not self.host.cfg.gated_mlp and "W_gate" not in self._modules:
            return None
        return super().__getattr__(attribute)


class AbstractAttention(Part):
    """Attention of any kind."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute in BUFFERS:
            return self.host.buffer_of(self.name, attribute)
        return super().__getattr__(attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        if attribute not in BUFFERS:
            super().__setattr__(attribute, value)
        elif not torch.equal(getattr(self, attribute), value):
            raise TypeError(f"{self.name}.{attribute} is the model's own: other values would change nothing")

    @property
    def layer_id(self) -> int:
        """The index of its block."""
        return int(self.name.split(".")[1])

    @property
    def attn_type(self) -> str:
        """``"global"`` or ``"local"``."""
        types = self.host.cfg.attn_types
        return "global" if types is None else types[self.layer_id]


class Attention(AbstractAttention):
    """Attention with keys and values for each head."""

    at, fields = "blocks.0.attn", {"attn_only": True, "n_key_value_heads": None}


class T5Attention(Attention):
    """Attention of T5. In the first layer of each stack it holds the biases of relative positions for all of them."""

    at = ""

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("has_relative_attention_bias", *_RELATIVE):
            return getattr(self.module, attribute)
        return super().__getattr__(attribute)

    def compute_relative_attention_bias(self, query_length: int, key_length: int) -> Float[Tensor, "1 head q k"]:
        """The biases, as the model's own module computes them."""
        module: Any = self.module
        return module.compute_bias(query_length, key_length)  # type: ignore[no-any-return]


class Norm(Part):
    """A norm of any kind."""


def _kind(name: str, doc: str, at: str, base: type[Part] = Part, **fields: Any) -> type[Part]:
    fields.setdefault("attn_only", base is not CanBeUsedAsMLP)
    return type(name, (base,), {"__doc__": doc, "__module__": __name__, "at": at, "fields": fields})


MLP = _kind("MLP", "A feed-forward layer.", "blocks.0.mlp", CanBeUsedAsMLP, gated_mlp=False)
GatedMLP = _kind("GatedMLP", "A feed-forward layer with a gate.", "blocks.0.mlp", CanBeUsedAsMLP, gated_mlp=True)
MoE = _kind("MoE", "A mixture of experts.", "", CanBeUsedAsMLP)
GroupedQueryAttention = _kind(
    "GroupedQueryAttention", "Attention with keys and values for groups of heads.", "blocks.0.attn", AbstractAttention
)
LayerNorm = _kind("LayerNorm", "A layer norm with weights.", "ln_final", Norm, normalization_type="LN")
LayerNormPre = _kind("LayerNormPre", "A layer norm without weights.", "ln_final", Norm, normalization_type="LNPre")
RMSNorm = _kind("RMSNorm", "A root mean square norm with weights.", "ln_final", Norm, normalization_type="RMS")
RMSNormPre = _kind("RMSNormPre", "One without weights.", "ln_final", Norm, normalization_type="RMSPre")
Embed = _kind("Embed", "The token embedding.", "embed")
PosEmbed = _kind("PosEmbed", "The position embedding.", "pos_embed", positional_embedding_type="standard")
Unembed = _kind("Unembed", "From the residual stream to logits.", "unembed")


class TransformerBlock(Part):
    """One layer."""

    at = "blocks.0"


class BertEmbed(Part):
    """The embeddings of an encoder: tokens, positions and token types."""


_NORMS = {"LN": LayerNorm, "LNPre": LayerNormPre, "RMS": RMSNorm, "RMSPre": RMSNormPre}
_BY_NAME = {"embed": Embed, "pos_embed": PosEmbed, "unembed": Unembed}


def kind_of(name: str, inside: set[str], cfg: ModelConfig) -> type[Part]:
    """The class of a part."""
    last = name.rpartition(".")[2]
    if last.isdigit():
        return TransformerBlock if name.count(".") == 1 else Part
    if last == "embed" and "embed" in inside:
        return BertEmbed
    if last in ("attn", "cross_attn"):
        if cfg.relative_attention_num_buckets is not None:
            return T5Attention
        return GroupedQueryAttention if cfg.n_key_value_heads is not None else Attention
    if last == "mlp":
        return MoE if "experts" in inside else GatedMLP if "W_gate" in inside else MLP
    if last.startswith("ln") or last.endswith("_ln"):
        return _NORMS.get(str(cfg.normalization_type), Part)
    return _BY_NAME.get(last, Part)
