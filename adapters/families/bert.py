"""BERT, with its masked-language, next-sentence and pooler heads."""

from __future__ import annotations

from typing import Any

from adapters.architecture import MLP, Architecture, Block
from adapters.attention import Attention, Projection
from adapters.post_norm import PostNormEncoder
from adapters.registry import UnsupportedModelError, register
from adapters.weights import bert_weights


@register("BertPreTrainedModel")
def bert(config: Any) -> Architecture:
    for name in ("add_cross_attention", "chunk_size_feed_forward"):
        if getattr(config, name):
            raise UnsupportedModelError(f"BERT with {name}={getattr(config, name)} has no adapter, only without it")
    q, k, v = (Projection(f"self.{name}") for name in ("query", "key", "value"))
    out = "attention.output.dense"
    return Architecture(
        embed="embeddings.word_embeddings",
        pos_embed="embeddings.position_embeddings",
        blocks="encoder.layer",
        block=Block(
            attn=Attention("attention", q, k, v, o="output.dense", out=out, out_key=None, core="self"),
            ln1="attention.output.LayerNorm",
            mlp=MLP("", up=Projection("intermediate.dense"), down="output.dense"),
            ln2="output.LayerNorm",
        ),
        final_norm=None,
        unembed="cls.predictions.decoder",
        points=PostNormEncoder(
            embeddings="embeddings",
            token_types="embeddings.token_type_embeddings",
            norm="embeddings.LayerNorm",
            pooler="pooler",
            head_norm="cls.predictions.transform.LayerNorm",
            next_sentence="cls.seq_relationship",
        ),
        weights=bert_weights,
        facts={"attention_dir": "causal" if config.is_decoder else "bidirectional"},
    )
