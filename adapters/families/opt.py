"""OPT."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import UnsupportedModelError, register


@register("OPTPreTrainedModel")
def opt(config: PreTrainedConfig) -> Architecture:
    if not config.do_layer_norm_before:
        raise UnsupportedModelError(
            "OPT with do_layer_norm_before=False (opt-350m) norms the residual stream itself, after attention and MLP: "
            "there is no adapter for it"
        )
    if config.word_embed_proj_dim != config.hidden_size:
        raise UnsupportedModelError(
            f"OPT with word_embed_proj_dim={config.word_embed_proj_dim} and hidden_size={config.hidden_size} projects "
            "its embeddings into and out of the residual stream: there is no adapter for it"
        )
    attn = Attention("self_attn", Projection("q_proj"), Projection("k_proj"), Projection("v_proj"), o="out_proj")
    mlp = MLP("", up=Projection("fc1"), down="fc2", out="fc2", flat=True)
    block = Block(
        (
            Step(attn, pre=Norm("self_attn_layer_norm", LAYER_NORM)),
            Step(mlp, pre=Norm("final_layer_norm", LAYER_NORM)),
        )
    )
    final_norm = None if config._remove_final_layer_norm else Norm("decoder.final_layer_norm", LAYER_NORM)
    return Architecture(
        embed="decoder.embed_tokens",
        pos_embed="decoder.embed_positions",
        stacks=(Stack("decoder.layers", block, final_norm=final_norm),),
        unembed="lm_head",
    )
