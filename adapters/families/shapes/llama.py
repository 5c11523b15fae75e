"""Llama's shape: attention and a gated MLP, one after the other, each after a norm."""

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

_QKV = (Projection("q_proj"), Projection("k_proj"), Projection("v_proj"))
ATTENTION = Attention("self_attn", *_QKV, o="o_proj", rotary="last")


def normed(attn: Attention, q: str, k: str, kind: NormKind = RMS_NORM) -> Attention:
    """Return the attention with norms of queries and keys.

    Args:
        attn: the attention.
        q, k: the paths of these norms, from the attention module.
        kind: their kind.
    """
    return replace(
        attn, q=replace(attn.q, norm=Norm(q, kind)), k=replace(attn.k, norm=Norm(k, kind))
    )


FEED_FORWARD = MLP("mlp", up=Projection("up_proj"), gate=Projection("gate_proj"), down="down_proj")
#: The same with a norm of each head's queries and keys.
NORMED_ATTENTION = normed(ATTENTION, "q_norm", "k_norm")
#: The same with heads before positions where they are normed.
HEADS_FIRST = replace(NORMED_ATTENTION, norms_over="heads first")
#: The same with one norm over all queries of a position, and one over all keys.
NORMED_WIDTH = replace(NORMED_ATTENTION, norms_over="width")
#: Norms of the results of attention and MLP (Gemma 2, OLMo 2).
POST = ("post_attention_layernorm", "post_feedforward_layernorm")


def fused_gate(path: str, width: int) -> tuple[Projection, Projection]:
    """Declare gate and up projection that one layer outputs one after the other.

    Args:
        path: the projection's path.
        width: the number of neurons.
    """
    return Projection(path, columns(0, width)), Projection(path, columns(width, 2 * width))


#: A module of the attention, and one of the MLP.
Pair = tuple[str | None, str | None]


class Differences(TypedDict, total=False):
    """The possible differences from Llama, as the arguments of `llama_like`."""

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
    """Declare Llama with differences.

    Args:
        config: the Hugging Face configuration.
        attn, mlp: the parts of a block.
        layers: the MLPs of the layers that have a different one, by index.
        norm: the kind of all norms.
        pre, post: the norms of the inputs of attention and MLP, and the norms of their results.
        out: the modules whose outputs are these results, where they are not the parts themselves.
        parallel: attention and MLP read the same stream.
        factor: the factor of these results.
        embed_factor: the factor of the token embedding, applied by the model itself.
        logit_factor, soft_cap: the factor of the logits, and their soft cap.
        final_norm: the norm after the last block.
        config_values: fields of `ModelConfig`, in addition to those of the rotary embedding.
    """
    norms = [Norm(path, norm) if path else None for path in (*pre, *post)]
    chains = [(*((behind,) if behind else ()), *times(factor)) for behind in norms[2:]]
    first = Step(attn, norms[0], chains[0], out=out[0])
    last = Step(mlp, norms[1], chains[1], parallel_to=0 if parallel else None, out=out[1])
    others = {}
    for index, part in (layers or {}).items():
        others[index] = Block((first, replace(last, part=part)))
    embedding = Embedding("embed_tokens", times(embed_factor))
    stack = Stack("layers", Block((first, last)), others, Norm(final_norm, norm), embedding)
    readout = Readout("lm_head", output_transform=Affine(logit_factor), soft_cap=soft_cap)
    values = {**rotary_values(config), **(config_values or {})}
    return Architecture((stack,), readout, config_values=values)
