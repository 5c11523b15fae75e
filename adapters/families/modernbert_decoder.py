"""ModernBERT as a decoder."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Embedding, Head, Readout, Stack, Step
from adapters.attention import Attention, Projection
from adapters.config import rotary_values
from adapters.families.shapes.llama import fused_gate
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm


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
    return Architecture((stack,), Readout("decoder"), heads=(head,), config_values=rotary_values(config))
