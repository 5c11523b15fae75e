"""``transformer_lens.components``'s names: the parts of a model, which stand for the Hugging Face model's own."""

from __future__ import annotations

from typing import Any

from bridge.legacy.components import mlps as mlps
from bridge.legacy.HookedTransformer import HookedTransformer as _HookedTransformer  # which makes parts by themselves
from bridge.legacy.kinds import (
    MLP,
    AbstractAttention,
    Attention,
    BertEmbed,
    CanBeUsedAsMLP,
    Embed,
    GatedMLP,
    GroupedQueryAttention,
    LayerNorm,
    LayerNormPre,
    MoE,
    PosEmbed,
    RMSNorm,
    RMSNormPre,
    TransformerBlock,
    Unembed,
)
from bridge.legacy.missing import missing
from bridge.legacy.parts import Part

__all__ = [
    "MLP", "AbstractAttention", "Attention", "BertEmbed", "CanBeUsedAsMLP", "Embed", "GatedMLP",
    "GroupedQueryAttention", "LayerNorm", "LayerNormPre", "MoE", "Part", "PosEmbed", "RMSNorm", "RMSNormPre",
    "TransformerBlock", "Unembed",
]  # fmt: skip

_BERT = "HookedEncoder's parts are those of its model: model.blocks[0], model.mlm_head; none is made by itself"
NOT_HERE = {
    "BertBlock": _BERT, "BertMLMHead": _BERT, "BertNSPHead": _BERT, "BertPooler": _BERT,
    "TokenTypeEmbed": "the embeddings of an encoder are one part: HookedEncoder(...).embed",
    "T5Attention": "HookedEncoderDecoder(...).encoder[0].attn", "T5Block": "HookedEncoderDecoder(...).encoder[0]",
    "GatedMLP4Bit": "quantised layers are Hugging Face's own, behind the same MLP",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    raise missing(__name__, name, NOT_HERE, __all__)


assert Part.makes_host is not None, _HookedTransformer
