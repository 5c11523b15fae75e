"""Llama's shape: attention and a gated MLP, one after the other, each behind a norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypedDict

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Embedding, Readout, Stack, Step
from adapters.attention import Attention, Projection
from adapters.config import rotary_values
from adapters.feed_forward import MLP, MoE
from adapters.norms import RMS_NORM, Norm, NormKind
from adapters.views import Affine, columns, times

ATTENTION = Attention(
    "self_attn", Projection("q_proj"), Projection("k_proj"), Projection("v_proj"), o="o_proj", rotary="last"
)


def normed(attn: Attention, q: str, k: str, kind: NormKind = RMS_NORM) -> Attention:
    """The same attention with norms of queries and keys.

    Args:
        attn: the attention.
        q, k: the paths of these norms, from the attention module.
        kind: what they compute.
    """
    return replace(attn, q=replace(attn.q, norm=Norm(q, kind)), k=replace(attn.k, norm=Norm(k, kind)))


FEED_FORWARD = MLP("mlp", up=Projection("up_proj"), gate=Projection("gate_proj"), down="down_proj")
#: The same with a norm of each head's queries and keys.
NORMED_ATTENTION = normed(ATTENTION, "q_norm", "k_norm")
#: The same with heads before positions where they are normed.
HEADS_FIRST = replace(NORMED_ATTENTION, norms_over="heads first")
#: The same with one norm over all queries of a position, and one over all keys.
NORMED_WIDTH = replace(NORMED_ATTENTION, norms_over="width")
#: Norms that the results of attention and MLP go through (Gemma 2, OLMo 2).
POST = ("post_attention_layernorm", "post_feedforward_layernorm")


def fused_gate(path: str, width: int) -> tuple[Projection, Projection]:
    """Gate and up of one projection, one after the other.

    Args:
        path: of the projection.
        width: how many neurons there are.
    """
    return Projection(path, columns(0, width)), Projection(path, columns(width, 2 * width))


#: A module of the attention, and one of the MLP.
Pair = tuple[str | None, str | None]


class Differences(TypedDict, total=False):
    """What may differ from Llama, as the arguments of `llama_like`."""

    attn: Attention
    norm: NormKind
    pre: Pair
    post: Pair
    out: Pair
    factor: float
    embed_factor: float
    logit_factor: float
    final_norm: str


def llama_like(
    config: PreTrainedConfig,
    *,
    attn: Attention = ATTENTION,
    mlp: MLP | MoE = FEED_FORWARD,
    layers: Mapping[int, MLP | MoE] | None = None,
    norm: NormKind = RMS_NORM,
    pre: Pair = ("input_layernorm", "post_attention_layernorm"),
    post: Pair = (None, None),
    out: Pair = (None, None),
    parallel: bool = False,
    factor: float = 1.0,
    embed_factor: float = 1.0,
    logit_factor: float = 1.0,
    soft_cap: float | None = None,
    final_norm: str = "norm",
    config_values: Mapping[str, object] | None = None,
) -> Architecture:
    """Llama with differences.

    Args:
        config: the Hugging Face configuration.
        attn, mlp: the parts of a block; `layers` has the MLPs of those, by index, in which it is another.
        norm: what all norms compute.
        pre, post: the norms that attention and MLP read through, and those that their results go through.
        out: the modules whose outputs are these results, where they are others than the parts'.
        parallel: attention and MLP read the same stream.
        factor: what these results are multiplied with.
        embed_factor: what the token embedding is multiplied with, by the model itself.
        logit_factor, soft_cap: what the logits are multiplied with, and the soft cap that they go through.
        final_norm: the norm behind the last block.
        config_values: fields of `ModelConfig`, in addition to those of the rotary embedding.
    """
    norms = [Norm(path, norm) if path else None for path in (*pre, *post)]
    chains = [(*((behind,) if behind else ()), *times(factor)) for behind in norms[2:]]
    first = Step(attn, norms[0], chains[0], out=out[0])
    last = Step(mlp, norms[1], chains[1], parallel_to=0 if parallel else None, out=out[1])
    others = {index: Block((first, replace(last, part=part))) for index, part in (layers or {}).items()}
    embedding = Embedding("embed_tokens", times(embed_factor))
    return Architecture(
        (Stack("layers", Block((first, last)), others, Norm(final_norm, norm), embedding),),
        Readout("lm_head", output_transform=Affine(logit_factor), soft_cap=soft_cap),
        config_values={**rotary_values(config), **(config_values or {})},
    )
