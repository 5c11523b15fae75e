"""OPT."""

from __future__ import annotations

from typing import Any

from adapters.architecture import MLP, Architecture, Block
from adapters.attention import Attention, Projection
from adapters.registry import UnsupportedModelError, register


@register("OPTPreTrainedModel")
def opt(config: Any) -> Architecture:
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
    return Architecture(
        embed="decoder.embed_tokens",
        pos_embed="decoder.embed_positions",
        blocks="decoder.layers",
        block=Block(
            ln1="self_attn_layer_norm",
            attn=Attention("self_attn", Projection("q_proj"), Projection("k_proj"), Projection("v_proj"), o="out_proj"),
            ln2="final_layer_norm",
            mlp=MLP("", up=Projection("fc1"), down="fc2", out="fc2", flat=True),
        ),
        final_norm=None if config._remove_final_layer_norm else "decoder.final_layer_norm",
        unembed="lm_head",
    )
