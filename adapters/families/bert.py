"""BERT, with its masked-language, next-sentence and pooler heads."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Embedding, Head, Readout, Stack, Step, tables
from adapters.attention import Attention, Projection
from adapters.config import rotary_values
from adapters.families.shapes.llama import fused_gate
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import UnsupportedModelError


def bert(config: PreTrainedConfig) -> Architecture:
    for name in ("add_cross_attention", "chunk_size_feed_forward"):
        if getattr(config, name):
            raise UnsupportedModelError(
                f"BERT with {name}={getattr(config, name)} has no adapter, only without it"
            )
    q, k, v = (Projection(f"self.{name}") for name in ("query", "key", "value"))
    attn = Attention("attention", q, k, v, o="output.dense", core="self")
    mlp = MLP("", up=Projection("intermediate.dense"), down="output.dense")
    block = Block(
        (
            Step(
                attn,
                stream_norm=Norm("attention.output.LayerNorm", LAYER_NORM),
                out="attention.output.dense",
            ),
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
    nsp = ".cls.seq_relationship"
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
            Head("nsp_head", nsp, linear=nsp, hook="hook_nsp_out"),
        ),
        config_values={"attention_dir": "causal" if config.is_decoder else "bidirectional"},
    )


# --------------------------------------------------------------------------------------------------
# ModernBERT as a decoder.
# --------------------------------------------------------------------------------------------------


def modernbert_decoder(config: PreTrainedConfig) -> Architecture:
    q, k, v = (Projection(f"{letter}_proj") for letter in "qkv")
    gate, up = fused_gate("Wi", config.intermediate_size)
    attn = Attention("attn", q, k, v, o="Wo", rotary="last")
    mlp = Step(MLP("mlp", up=up, gate=gate, down="Wo"), pre=Norm("mlp_norm", LAYER_NORM))
    block = Block((Step(attn, pre=Norm("attn_norm", LAYER_NORM)), mlp))
    # The embeddings are normed already.
    first = {0: Block((Step(attn), mlp))}
    embedding = Embedding("embeddings.tok_embeddings", norm=Norm("embeddings.norm", LAYER_NORM))
    stack = Stack("layers", block, first, Norm("final_norm", LAYER_NORM), embedding)
    head = Head("mlm_head", ".lm_head", ".lm_head.dense", norm=Norm(".lm_head.norm", LAYER_NORM))
    return Architecture(
        (stack,), Readout("decoder"), heads=(head,), config_values=rotary_values(config)
    )
