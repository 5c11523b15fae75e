"""OPT."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention, Projection
from adapters.families.shapes.gpt2 import K, Q, V, gpt2_like
from adapters.feed_forward import MLP
from adapters.registry import UnsupportedModelError


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
    return gpt2_like(
        Attention("self_attn", Q, K, V, o="out_proj"),
        MLP("", up=Projection("fc1"), down="fc2", flat=True),
        out=(None, "fc2"),
        pre=("self_attn_layer_norm", "final_layer_norm"),
        path="decoder.layers",
        final_norm=None if config._remove_final_layer_norm else "decoder.final_layer_norm",
        embed="decoder.embed_tokens",
        pos_embed="decoder.embed_positions",
    )
