"""The classes of parts, with HookedTransformer's names."""

from __future__ import annotations

from typing import Any

import torch

from adapters.config import ModelConfig
from bridge.legacy.parts import BUFFERS, Part


class CanBeUsedAsMLP(Part):
    """What stands where a block has its MLP. `W_gate` is None without a gate."""

    at, fields = "blocks.0.mlp", {"attn_only": False}

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "W_gate" and not self.cfg.gated_mlp and "W_gate" not in self._modules:
            return None
        return super().__getattr__(attribute)


class MLP(CanBeUsedAsMLP):
    """A feed-forward layer."""

    at, fields = "blocks.0.mlp", {"gated_mlp": False, "attn_only": False}


class GatedMLP(CanBeUsedAsMLP):
    """A feed-forward layer with a gate."""

    at, fields = "blocks.0.mlp", {"gated_mlp": True, "attn_only": False}


class MoE(CanBeUsedAsMLP):
    """A mixture of experts."""

    at = ""


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
        types = self.cfg.attn_types
        return "global" if types is None else types[self.layer_id]

    @property
    def OV(self) -> Any:
        """The matrices from what heads read to what they write."""
        return self.host.tree.get(self.name, "OV")

    @property
    def QK(self) -> Any:
        """The matrices of queries and keys."""
        return self.host.tree.get(self.name, "QK")


class Attention(AbstractAttention):
    """Attention with keys and values for each head."""

    at, fields = "blocks.0.attn", {"attn_only": True, "n_key_value_heads": None}


class GroupedQueryAttention(AbstractAttention):
    """Attention with keys and values for groups of heads."""

    at, fields = "blocks.0.attn", {"attn_only": True}


class LayerNorm(Part):
    """A layer norm with weights."""

    at, fields = "ln_final", {"attn_only": True, "normalization_type": "LN"}


class LayerNormPre(Part):
    """A layer norm without weights."""

    at, fields = "ln_final", {"attn_only": True, "normalization_type": "LNPre"}


class RMSNorm(Part):
    """A root mean square norm with weights."""

    at, fields = "ln_final", {"attn_only": True, "normalization_type": "RMS"}


class RMSNormPre(Part):
    """A root mean square norm without weights."""

    at, fields = "ln_final", {"attn_only": True, "normalization_type": "RMSPre"}


class Embed(Part):
    """The token embedding."""

    at, fields = "embed", {"attn_only": True}


class PosEmbed(Part):
    """The position embedding."""

    at, fields = "pos_embed", {"attn_only": True, "positional_embedding_type": "standard"}


class Unembed(Part):
    """From the residual stream to logits."""

    at, fields = "unembed", {"attn_only": True}


class TransformerBlock(Part):
    """One layer."""

    at = "blocks.0"


class BertEmbed(Part):
    """The embeddings of an encoder: tokens, positions and token types."""


_NORMS = {"LN": LayerNorm, "LNPre": LayerNormPre, "RMS": RMSNorm, "RMSPre": RMSNormPre}
_BY_NAME = {"embed": Embed, "pos_embed": PosEmbed, "unembed": Unembed}


def kind_of(name: str, inside: set[str], cfg: ModelConfig) -> type[Part]:
    """The class of a part.

    Args:
        name: the part's.
        inside: the names of what is directly in it.
        cfg: the model's.
    """
    last = name.rpartition(".")[2]
    if last.isdigit():
        return TransformerBlock if name.count(".") == 1 else Part
    if last == "embed" and "embed" in inside:
        return BertEmbed
    if last in ("attn", "cross_attn"):
        return GroupedQueryAttention if cfg.n_key_value_heads is not None else Attention
    if last == "mlp":
        return MoE if "experts" in inside else GatedMLP if "W_gate" in inside else MLP
    if last.startswith("ln") or last.endswith("_ln"):
        return _NORMS.get(str(cfg.normalization_type), Part)
    return _BY_NAME.get(last, Part)
