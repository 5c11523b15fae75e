"""BERT, with its masked-language, next-sentence and pooler heads."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Embedding, Head, Readout, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import UnsupportedModelError
from adapters.stream_ends import tables


def bert(config: PreTrainedConfig) -> Architecture:
    for name in ("add_cross_attention", "chunk_size_feed_forward"):
        if getattr(config, name):
            raise UnsupportedModelError(f"BERT with {name}={getattr(config, name)} has no adapter, only without it")
    q, k, v = (Projection(f"self.{name}") for name in ("query", "key", "value"))
    attn = Attention("attention", q, k, v, o="output.dense", core="self")
    mlp = MLP("", up=Projection("intermediate.dense"), down="output.dense")
    block = Block(
        (
            Step(attn, stream_norm=Norm("attention.output.LayerNorm", LAYER_NORM), out="attention.output.dense"),
            Step(mlp, stream_norm=Norm("output.LayerNorm", LAYER_NORM), out="output.dense"),
        )
    )
    embedding = Embedding(
        "embeddings.word_embeddings",
        added=tables("embeddings.position_embeddings", "embeddings.token_type_embeddings"),
        norm=Norm("embeddings.LayerNorm", LAYER_NORM),
        module="embeddings",
    )
    transform = ".cls.predictions.transform"
    return Architecture(
        stacks=(Stack("encoder.layer", block, embedding=embedding),),
        readout=Readout("cls.predictions.decoder"),
        heads=(
            Head("pooler", "pooler", linear="pooler.dense", hook="hook_pooler_out"),
            Head(
                "mlm_head",
                transform,
                linear=f"{transform}.dense",
                norm=Norm(f"{transform}.LayerNorm", LAYER_NORM),
            ),
            Head(
                "nsp_head",
                ".cls.seq_relationship",
                linear=".cls.seq_relationship",
                hook="hook_nsp_out",
            ),
        ),
        config_values={"attention_dir": "causal" if config.is_decoder else "bidirectional"},
    )
