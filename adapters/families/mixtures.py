"""Mixtral, and the families whose blocks hold mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import mode
from typing import Unpack

from torch import nn
from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Embedding, Readout, Stack, Step
from adapters.attention import Attention, Gate, Projection, SinkGate
from adapters.families.llama import VALUES
from adapters.families.shapes.gpt2 import in_a_row
from adapters.families.shapes.llama import (
    ATTENTION,
    FEED_FORWARD,
    HEADS_FIRST,
    NORMED_ATTENTION,
    NORMED_WIDTH,
    POST,
    Differences,
    fused_gate,
    llama_like,
    normed,
)
from adapters.families.shapes.mixture import (
    FLAT_SIGMOID,
    SHARED,
    SIGMOID,
    dense_first,
    dense_listed,
    latent_attention,
    latent_values,
    mixture_like,
)
from adapters.feed_forward import MLP, ChosenBy, MoE
from adapters.norms import LAYER_NORM, Norm, NormKind
from adapters.registry import UnsupportedModelError, only, register
from adapters.views import MaskedScores, SinkScores


def mixtral(config: PreTrainedConfig) -> Architecture:
    return mixture_like(
        config, MoE("mlp", router="gate"), n_experts="num_local_experts", width="intermediate_size"
    )


# --------------------------------------------------------------------------------------------------
# Qwen's mixtures of experts.
# --------------------------------------------------------------------------------------------------


def qwen2_moe(config: PreTrainedConfig) -> Architecture:
    shared = replace(FEED_FORWARD, path="shared_expert", flat=True)
    moe = MoE(
        "mlp",
        router="gate",
        shared=shared,
        shared_transform=(Gate(Projection("shared_expert_gate"), "sigmoid"),),
    )
    return sparse_steps(config, ATTENTION, moe, config.shared_expert_intermediate_size)


def qwen3_moe(config: PreTrainedConfig) -> Architecture:
    return sparse_steps(config, NORMED_ATTENTION, MoE("mlp", router="gate"))


def qwen3_vl_moe(config: PreTrainedConfig) -> Architecture:
    # Its configuration has a window, which it does not use.
    values = VALUES | {"use_local_attn": False, "window_size": None, "attn_types": None}
    return sparse_steps(config, NORMED_ATTENTION, MoE("mlp", router="gate"), None, values)


def sparse_steps(
    config: PreTrainedConfig,
    attn: Attention,
    moe: MoE,
    d_shared_expert: int | None = None,
    values: Mapping[str, object] = VALUES,
) -> Architecture:
    """Declare a mixture in each layer, except the layers that the configuration excludes."""
    step = config.decoder_sparse_step
    excepted = config.mlp_only_layers
    mixed = [
        config.num_experts > 0 and i not in excepted and (i + 1) % step == 0
        for i in range(config.num_hidden_layers)
    ]
    dense = [index for index, mixes in enumerate(mixed) if not mixes]
    return mixture_like(
        config, moe, d_shared_expert=d_shared_expert, dense=dense, attn=attn, config_values=values
    )


# --------------------------------------------------------------------------------------------------
# DeepSeek, and others whose keys and values are made from one latent.
# --------------------------------------------------------------------------------------------------


def deepseek_v2(config: PreTrainedConfig) -> Architecture:
    chosen_by: ChosenBy = (
        "probabilities" if config.topk_method == "greedy" else "corrected probabilities"
    )
    moe = MoE("mlp", router="gate", shared=SHARED, chosen_by=chosen_by)
    values = latent_values(config) | {"rotary_adjacent_pairs": True}
    return _mixed(config, moe, dense_first(config), values)


def deepseek_v3(config: PreTrainedConfig) -> Architecture:
    return _mixed(config, SIGMOID, dense_first(config), latent_values(config))


def glm4_moe_lite(config: PreTrainedConfig) -> Architecture:
    return _mixed(config, SIGMOID, dense_listed(config), latent_values(config))


def youtu(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, attn=latent_attention(config), config_values=latent_values(config))


def minicpm3(config: PreTrainedConfig) -> Architecture:
    factor = config.scale_depth / config.num_hidden_layers**0.5
    attn = latent_attention(config)
    values = latent_values(config)
    declared = llama_like(config, attn=attn, factor=factor, config_values=values)
    return replace(declared, readout=replace(declared.readout, factor_in=1 / config.logits_scaling))


def _mixed(
    config: PreTrainedConfig, moe: MoE, dense: range | list[int], values: dict[str, object]
) -> Architecture:
    attn = latent_attention(config)
    return mixture_like(
        config,
        moe,
        n_experts="n_routed_experts",
        n_shared="n_shared_experts",
        dense=dense,
        attn=attn,
        config_values=values,
    )


# --------------------------------------------------------------------------------------------------
# dots.llm1, and other mixtures of experts behind Llama's attention.
# --------------------------------------------------------------------------------------------------


def dots1(config: PreTrainedConfig) -> Architecture:
    return mixture_like(
        config,
        SIGMOID,
        n_experts="n_routed_experts",
        n_shared="n_shared_experts",
        dense=dense_first(config),
        attn=NORMED_ATTENTION,
    )


def solar_open(config: PreTrainedConfig) -> Architecture:
    return mixture_like(config, SIGMOID, n_experts="n_routed_experts", n_shared="n_shared_experts")


def minimax_m2(config: PreTrainedConfig) -> Architecture:
    return mixture_like(
        config,
        replace(SIGMOID, shared=None),
        n_experts="num_local_experts",
        width="intermediate_size",
        attn=NORMED_WIDTH,
    )


def aria_text(config: PreTrainedConfig) -> Architecture:
    only(config, hidden_act="silu")  # its experts use that, whatever its configuration says
    moe = MoE("mlp", router="router", chosen_by="logits", shared=SHARED)
    return mixture_like(
        config,
        moe,
        n_experts="moe_num_experts",
        width="intermediate_size",
        n_shared="moe_num_shared_experts",
        per_token=config.moe_topk,
    )


def mellum(config: PreTrainedConfig) -> Architecture:
    return mixture_like(
        config, MoE("mlp", router="gate"), dense=dense_listed(config), attn=NORMED_ATTENTION
    )


# --------------------------------------------------------------------------------------------------
# DBRX.
# --------------------------------------------------------------------------------------------------


def dbrx(config: PreTrainedConfig) -> Architecture:
    """Declare DBRX: one clamped layer makes queries, keys and values; its router returns only
    logits.
    """
    own = config.attn_config
    mixture = config.ffn_config
    n_heads = config.n_heads
    n_kv_heads = own.kv_n_heads
    d_head = config.d_model // config.n_heads
    qkv = in_a_row("Wqkv", d_head, n_heads, n_kv_heads)
    attention = Attention("norm_attn_norm.attn", *qkv, o="out_proj", rotary="last")
    if own.clip_qkv is not None:
        attention = replace(attention, clamp=(own.clip_qkv, "made"))
    moe = MoE("ffn", router="router", router_returns=("logits",))
    steps = (
        Step(attention, pre=Norm("norm_attn_norm.norm_1", LAYER_NORM)),
        Step(moe, pre=Norm("norm_attn_norm.norm_2", LAYER_NORM)),
    )
    values = {
        "positional_embedding_type": "rotary",
        "rotary_dim": d_head,
        "rotary_base": own.rope_theta,
        "n_key_value_heads": n_kv_heads,
        "num_experts": mixture.moe_num_experts,
        "experts_per_token": mixture.moe_top_k,
        "d_mlp": mixture.ffn_hidden_size,
        "d_expert": mixture.ffn_hidden_size,
        "act_fn": mixture.ffn_act_fn.get("name", "silu"),
        "gated_mlp": True,
    }
    stack = Stack("blocks", Block(steps), {}, Norm("norm_f", LAYER_NORM), Embedding("wte"))
    return Architecture((stack,), Readout("lm_head"), config_values=values)


# --------------------------------------------------------------------------------------------------
# gpt-oss.
# --------------------------------------------------------------------------------------------------


def _refuse_packed(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).__name__ == "Mxfp4GptOssMLP":
            raise UnsupportedModelError(
                f"{name} is packed in MXFP4, and computes its routing where no hook can stand; load"
                " the model with quantization_config=transformers.Mxfp4Config(dequantize=True)"
            )


@register(check=_refuse_packed)
def gpt_oss(config: PreTrainedConfig) -> Architecture:
    """Declare gpt-oss: Llama with attention sinks and a mixture of experts, which are chosen by
    their logits.
    """
    # Its configuration says silu, but its experts compute min(gate, limit) * sigmoid(alpha *
    # min(gate, limit)), times the clamped other half plus one.
    values = {"act_fn": "clamped_swiglu"}
    moe = MoE("mlp", router="router", chosen_by="logits")
    attn = replace(ATTENTION, scores=SinkScores(MaskedScores(), "sinks"))
    return mixture_like(
        config,
        moe,
        n_experts="num_local_experts",
        width="intermediate_size",
        attn=attn,
        config_values=values,
    )


# --------------------------------------------------------------------------------------------------
# Kolibri, Laguna and AFMoE: mixtures with a norm or a gate more.
# --------------------------------------------------------------------------------------------------


def kolibri1(config: PreTrainedConfig) -> Architecture:
    shared = config.shared_expert_intermediate_size
    return mixture_like(config, SIGMOID, d_shared_expert=shared, attn=HEADS_FIRST, post=GLM_POST)


def laguna(config: PreTrainedConfig) -> Architecture:
    """Declare Laguna: a gate of each head's `z`; layers may differ in their number of heads and in
    their rotated columns.
    """
    only(config, moe_router_logit_softcapping=0.0)
    attn = replace(NORMED_ATTENTION, z_transform=Gate(Projection("g_proj"), "softplus"))
    moe = replace(FLAT_SIGMOID, factor=config.moe_routed_scaling_factor)
    heads = config.num_attention_heads_per_layer[: config.num_hidden_layers]
    usual = mode(heads)
    declared = mixture_like(
        config,
        moe,
        d_shared_expert=config.shared_expert_intermediate_size,
        dense=dense_listed(config),
        attn=attn,
        config_values={"n_heads": usual},
    )
    own: dict[int, dict[str, object]] = {
        i: {"n_heads": n} for i, n in enumerate(heads) if n != usual
    }
    for index, kind in enumerate(config.layer_types):
        if kind == "sliding_attention":
            share = config.rope_parameters[kind].get("partial_rotary_factor", 1.0)
            own.setdefault(index, {})["rotary_dim"] = int(config.head_dim * share)
    stack = declared.stack
    layers = dict(stack.layers)
    for index, values in own.items():
        layers[index] = _with(stack.block_at(index), values)
    return replace(declared, stacks=(replace(stack, layers=layers),))


def _with(block: Block, values: Mapping[str, object]) -> Block:
    """Return a block whose attention has its own values of configuration fields."""
    first, *others = block.steps
    assert isinstance(first.part, Attention)
    part = replace(first.part, config_values={**first.part.config_values, **values})
    return replace(block, steps=(replace(first, part=part), *others))


def afmoe(config: PreTrainedConfig) -> Architecture:
    """Declare AFMoE: a gate of each column of `z`, norms on both sides."""
    attn = replace(NORMED_ATTENTION, z_transform=Gate(Projection("gate_proj"), "sigmoid"))
    return mixture_like(
        config,
        replace(FLAT_SIGMOID, router="router"),
        dense=range(min(config.num_dense_layers, config.num_hidden_layers)),
        attn=attn,
        pre=("input_layernorm", "pre_mlp_layernorm"),
        post=("post_attention_layernorm", "post_mlp_layernorm"),
        embed_factor=config.hidden_size**0.5 if config.mup_enabled else 1.0,
    )


# --------------------------------------------------------------------------------------------------
# OLMo: Llama with norms in other places.
# --------------------------------------------------------------------------------------------------


def olmo(config: PreTrainedConfig) -> Architecture:
    only(config, clip_qkv=None)  # queries, keys and values would be changed in place
    # Its norm, without weights, does not store its epsilon.
    return llama_like(config, norm=NormKind("layer", eps=1e-5))


def olmo2(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, attn=NORMED_WIDTH, pre=(None, None), post=POST)


def olmoe(config: PreTrainedConfig) -> Architecture:
    only(config, clip_qkv=None)
    return mixture_like(
        config, MoE("mlp", router="gate"), width="intermediate_size", attn=NORMED_WIDTH
    )


def flex_olmo(config: PreTrainedConfig) -> Architecture:
    moe = MoE("mlp", router="gate")
    return mixture_like(
        config, moe, width="intermediate_size", attn=NORMED_WIDTH, pre=(None, None), post=POST
    )


# --------------------------------------------------------------------------------------------------
# Granite: Llama with factors on the results of attention and MLP, the embedding, the scores and the
# logits.
# --------------------------------------------------------------------------------------------------


#: The gate of each head's `z`: the sigmoid of the log-sum-exp of its scores minus a parameter of
#: the head.
SINKS = replace(ATTENTION, z_transform=SinkGate("sinks"))


def _factors(config: PreTrainedConfig, **others: Unpack[Differences]) -> Differences:
    return {
        "factor": config.residual_multiplier,
        "embed_factor": config.embedding_multiplier,
        "logit_factor": 1 / config.logits_scaling,
        **others,
    }


def _scale(config: PreTrainedConfig) -> dict[str, object]:
    return {"attn_scale": 1 / config.attention_multiplier}


def granite(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, **_factors(config), config_values=_scale(config))


def hyperclovax(config: PreTrainedConfig) -> Architecture:
    post = ("post_norm1", "post_norm2") if config.use_post_norm else (None, None)
    # Where Granite divides its logits.
    differences = _factors(config, post=post, logit_factor=config.logits_scaling)
    return llama_like(config, **differences, config_values=_scale(config))


def granite_moe(config: PreTrainedConfig) -> Architecture:
    if hasattr(config, "shared_intermediate_size"):
        only(config, shared_intermediate_size=0)
    moe = MoE("block_sparse_moe", router="router", chosen_by="logits")
    attn = SINKS if type(config).__name__ == "GraniteMoeSWAConfig" else ATTENTION
    return mixture_like(
        config,
        moe,
        n_experts="num_local_experts",
        width="intermediate_size",
        **_factors(config, attn=attn),
        config_values=_scale(config),
    )


def granite_swa(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, **_factors(config, attn=SINKS), config_values=_scale(config))


# --------------------------------------------------------------------------------------------------
# GLM: Llama with gate and up in one projection, partly rotated.
# --------------------------------------------------------------------------------------------------


GLM_POST = ("post_self_attn_layernorm", "post_mlp_layernorm")
PAIRS = {"rotary_adjacent_pairs": True}


def _mlp(config: PreTrainedConfig) -> MLP:
    gate, up = fused_gate("gate_up_proj", config.intermediate_size)
    return MLP("mlp", up=up, gate=gate, down="down_proj")


def glm(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, mlp=_mlp(config), config_values=PAIRS)


def glm4(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, mlp=_mlp(config), post=GLM_POST, config_values=PAIRS)


def glm4_moe(config: PreTrainedConfig) -> Architecture:
    attn = NORMED_ATTENTION if getattr(config, "use_qk_norm", False) else ATTENTION
    return mixture_like(
        config,
        SIGMOID,
        n_experts="n_routed_experts",
        n_shared="n_shared_experts",
        dense=dense_first(config),
        attn=attn,
    )


# --------------------------------------------------------------------------------------------------
# Helium and ERNIE 4.5: Llama, with neighbouring dimensions of queries and keys rotated together.
# --------------------------------------------------------------------------------------------------


def helium(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, config_values=PAIRS)


def ernie4_5_moe(config: PreTrainedConfig) -> Architecture:
    n = config.num_hidden_layers
    mixed = range(config.moe_layer_start_index, config.moe_layer_end_index + 1)
    dense = [i for i in range(n) if i not in mixed or (i + 1) % config.moe_layer_interval]
    moe = MoE(
        "mlp",
        router="gate",
        chosen_by="corrected probabilities",
        shared=replace(SHARED, flat=True) if config.moe_num_shared_experts else None,
    )
    return mixture_like(
        config,
        moe,
        n_experts="moe_num_experts",
        n_shared="moe_num_shared_experts",
        per_token=config.moe_k,
        dense=dense,
        config_values=PAIRS,
    )


# --------------------------------------------------------------------------------------------------
# Hunyuan: Llama with norms of queries and keys.
# --------------------------------------------------------------------------------------------------


#: Queries and keys are rotated first, and then normed.
NORMED_LAST = replace(
    normed(ATTENTION, "query_layernorm", "key_layernorm"), norms_over="heads first", rotary="first"
)


def hunyuan(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, attn=NORMED_LAST)


def hunyuan_moe(config: PreTrainedConfig) -> Architecture:
    per_token = config.moe_topk
    width = config.intermediate_size
    if isinstance(per_token, list):  # a separate number for each layer
        only(config, moe_topk=None)
    moe = MoE("mlp", router="gate", shared=replace(FEED_FORWARD, path="shared_mlp"))
    return mixture_like(
        config,
        moe,
        width="intermediate_size",
        d_shared_expert=width,
        per_token=per_token,
        attn=NORMED_LAST,
    )


def hy_v3(config: PreTrainedConfig) -> Architecture:
    return mixture_like(config, FLAT_SIGMOID, dense=dense_listed(config), attn=HEADS_FIRST)


# --------------------------------------------------------------------------------------------------
# EXAONE: Llama with norms of queries and keys.
# --------------------------------------------------------------------------------------------------


def exaone4(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, attn=HEADS_FIRST, pre=(None, None), post=POST)


def exaone_moe(config: PreTrainedConfig) -> Architecture:
    return mixture_like(config, SIGMOID, dense=dense_listed(config), attn=HEADS_FIRST)


# --------------------------------------------------------------------------------------------------
# Flint.
# --------------------------------------------------------------------------------------------------


def flint(config: PreTrainedConfig) -> Architecture:
    """Declare Flint: Qwen 3 with attention sinks, and a shared expert without a gate."""
    moe = replace(SIGMOID, shared=replace(FEED_FORWARD, path="shared_expert", flat=True))
    attn = replace(NORMED_ATTENTION, scores=SinkScores(MaskedScores(), "sinks"))
    return sparse_steps(config, attn, moe, config.shared_expert_intermediate_size, {})
