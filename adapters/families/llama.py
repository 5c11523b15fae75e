"""Llama and the families that have its shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.attention import Attention, Projection
from adapters.config import rotary_values
from adapters.feed_forward import MLP, MoE
from adapters.norms import RMS_NORM, Norm, NormKind
from adapters.registry import register

ATTENTION = Attention(
    "self_attn", Projection("q_proj"), Projection("k_proj"), Projection("v_proj"), o="o_proj", rotary=True
)
FEED_FORWARD = MLP("mlp", up=Projection("up_proj"), gate=Projection("gate_proj"), down="down_proj")
_SAME_SHAPE = ("Cwm", "Llama", "Ministral", "Mistral", "SeedOss", "SmolLM3")


@register(*(f"{name}PreTrainedModel" for name in _SAME_SHAPE))
def llama(config: PreTrainedConfig) -> Architecture:
    return llama_like(config)


def llama_like(
    config: PreTrainedConfig,
    *,
    attn: Attention = ATTENTION,
    mlp: MLP | MoE = FEED_FORWARD,
    layers: Mapping[int, MLP | MoE] | None = None,
    norm: NormKind = RMS_NORM,
    pre: tuple[str | None, str | None] = ("input_layernorm", "post_attention_layernorm"),
    post: tuple[str | None, str | None] = (None, None),
    factor: float = 1.0,
    config_values: Mapping[str, object] | None = None,
) -> Architecture:
    """Llama with differences.

    Args:
        config: the Hugging Face configuration.
        attn, mlp: the parts of a block; `layers` has the MLPs of those, by index, in which it is another.
        norm: what all norms compute.
        pre, post: the norms that attention and MLP read through, and those that their results go through.
        factor: what these results are multiplied with.
        config_values: fields of `ModelConfig`, beside those of the rotary embedding.
    """
    norms = [Norm(path, norm) if path else None for path in (*pre, *post)]
    first, last = Step(attn, norms[0], norms[2], factor), Step(mlp, norms[1], norms[3], factor)
    others = {index: Block((first, replace(last, part=part))) for index, part in (layers or {}).items()}
    return Architecture(
        embed="embed_tokens",
        stacks=(Stack("layers", Block((first, last)), others, final_norm=Norm("norm", norm)),),
        unembed="lm_head",
        config_values={**rotary_values(config), **(config_values or {})},
    )
