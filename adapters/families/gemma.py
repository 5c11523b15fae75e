"""Gemma, Gemma 2, Gemma 3 and Gemma 3n, with images and without."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import (
    Architecture,
    Block,
    Embedding,
    Readout,
    Stack,
    Step,
    language_part,
)
from adapters.attention import Attention, Projection
from adapters.block import Mix
from adapters.config import rotary_values
from adapters.families.shapes.llama import ATTENTION, FEED_FORWARD, POST, llama_like, normed
from adapters.feed_forward import MLP
from adapters.mixers import Mixer
from adapters.norms import GEMMA_NORM, RMS_NORM, Norm
from adapters.registry import only
from adapters.views import Affine, SeveralStreams, times

# From Gemma 2 on there is a norm on both sides of attention and MLP.
PRE = ("input_layernorm", "pre_feedforward_layernorm")


def _direction(config: PreTrainedConfig) -> dict[str, object]:
    return {
        "attention_dir": (
            "bidirectional" if getattr(config, "use_bidirectional_attention", False) else "causal"
        )
    }


def _scales(config: PreTrainedConfig) -> dict[str, object]:
    return _direction(config) | {"attn_scale": config.query_pre_attn_scalar**0.5}


def _cap(config: PreTrainedConfig) -> float | None:
    """Return the soft cap of the logits."""
    return config.final_logit_softcapping or None


def gemma(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, norm=GEMMA_NORM, config_values=_direction(config))


def gemma2(config: PreTrainedConfig) -> Architecture:
    cap = {"attn_scores_soft_cap": config.attn_logit_softcapping or -1.0}
    values = _scales(config) | cap
    return llama_like(
        config, norm=GEMMA_NORM, pre=PRE, post=POST, soft_cap=_cap(config), config_values=values
    )


def gemma3(config: PreTrainedConfig) -> Architecture:
    if hasattr(config, "vision_config"):  # with images: the same in its text model
        declared = language_part(gemma3(config.get_text_config()), "language_model")
        return replace(declared, readout=replace(declared.readout, soft_cap=None))  # which it omits
    attn = replace(normed(ATTENTION, "q_norm", "k_norm", GEMMA_NORM), norms_over="heads first")
    # Its configuration has attn_logit_softcapping, but its attention leaves the scores as they are.
    return llama_like(
        config,
        attn=attn,
        norm=GEMMA_NORM,
        pre=PRE,
        post=POST,
        soft_cap=_cap(config),
        config_values=_scales(config),
    )


# --------------------------------------------------------------------------------------------------
# Gemma 3n: several streams, of which each block works on the first (AltUp), Laurel, inputs per
# layer, shared keys.
# --------------------------------------------------------------------------------------------------


_HALF = times(0.5**0.5)
_PREDICTED = Mix("altup.prediction_coefs", ("keep",))
#: A part of low rank beside attention, with its own skip connection: it reads the same input as
#: attention.
_LAUREL = Mixer(
    "laurel",
    "mlp",
    (
        ("linear_left", "batch pos d_laurel"),
        ("linear_right", "batch pos d_model"),
        (Norm("post_laurel_norm", RMS_NORM), "batch pos d_model"),
    ),
)
#: The part that is added to all streams but the first.
_PER_LAYER = MLP(
    "", up=Projection("per_layer_input_gate"), down="per_layer_projection", given="per_layer_input"
)


def gemma3n(config: PreTrainedConfig) -> Architecture:
    if hasattr(config, "vision_config"):  # with images and sound: the same in its text model
        return language_part(gemma3n(config.get_text_config()), "language_model")
    only(config, altup_active_idx=0)
    blocks = [_gemma3n_block(config, layer) for layer in range(config.num_hidden_layers)]
    stack = Stack(
        "layers",
        blocks[0],
        {i: block for i, block in enumerate(blocks) if block != blocks[0]},
        Norm("norm", RMS_NORM),
        Embedding("embed_tokens", given="other"),  # whose inputs per layer are of tokens alone
        stream_view=SeveralStreams(config.altup_num_inputs, first=True),
    )
    values = {
        **rotary_values(config),
        "attn_scale": 1.0,
        "d_mlp": max(config.intermediate_size),
        "act_fn": config.hidden_activation,
    }
    return Architecture(
        (stack,),
        Readout("lm_head", output_transform=Affine(), soft_cap=_cap(config)),
        no_layer_runs=f"its blocks carry {config.altup_num_inputs} streams",
        config_values=values,
    )


def _gemma3n_block(config: PreTrainedConfig, layer: int) -> Block:
    """Return the declaration of a layer: the source of its keys, the width of its MLP, and whether
    its neurons are sparse.
    """
    v = Projection("v_proj", norm=Norm("v_norm", RMS_NORM))
    attn = replace(normed(ATTENTION, "q_norm", "k_norm"), v=v)
    mlp = FEED_FORWARD
    if config.activation_sparsity_pattern[layer] > 0:
        mlp = replace(mlp, activation="_gaussian_topk")
    if len(set(config.intermediate_size)) > 1:
        width = config.intermediate_size[layer]
        up = replace(mlp.up, width=width)
        mlp = replace(mlp, up=up, gate=Projection("gate_proj", width=width))
    up = replace(_PER_LAYER.up, width=config.hidden_size_per_layer_input)
    pre = Norm("input_layernorm", RMS_NORM)
    behind = [Norm(path, RMS_NORM) for path in POST]
    steps = (
        Step(
            _sharing(attn, config, layer),
            pre,
            (behind[0], *_HALF),
            residual_transform=_HALF,
            mix=_PREDICTED,
        ),
        Step(_LAUREL, pre, _HALF, parallel_to=0),
        Step(mlp, Norm("pre_feedforward_layernorm", RMS_NORM), (behind[1],)),
        Step(
            replace(_PER_LAYER, up=up),
            result_chain=(Norm("post_per_layer_input_norm", RMS_NORM),),
            mix=Mix("altup.correction_coefs", ("write",)),
            out="per_layer_projection",
            entry="altup.router_norm@1",
        ),
    )
    return Block(steps)


def _sharing(attn: Attention, config: PreTrainedConfig, layer: int) -> Attention:
    """Return the attention of a layer. The last layers reuse the keys and values of an earlier
    layer: the last of the same kind that has its own.
    """
    own = config.num_hidden_layers - config.num_kv_shared_layers
    if layer < own:
        return attn
    kinds = config.layer_types
    return replace(attn, keys_from=max(i for i in range(own) if kinds[i] == kinds[layer]))


def vaultgemma(config: PreTrainedConfig) -> Architecture:
    values = _scales(config) | {"attn_scores_soft_cap": config.attn_logit_softcapping or -1.0}
    return llama_like(config, norm=GEMMA_NORM, pre=PRE, soft_cap=_cap(config), config_values=values)
