"""The native models of `bridge.native`."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Embedding, Readout, Stack, Step, tables
from adapters.attention import Attention, Projection
from adapters.families.shapes.llama import normed
from adapters.feed_forward import MLP, MoE
from adapters.norms import LAYER_NORM, NO_NORM, RMS_NORM, Norm

_SAME_FIELDS = (
    "model_name",
    "normalization_type",
    "final_rms",
    "positional_embedding_type",
    "rotary_dim",
    "rotary_base",
    "attention_dir",
    "attn_scores_soft_cap",
    "use_attn_scale",
    "attn_scale",
    "scale_attn_by_inverse_layer_idx",
    "seed",
    "tokenizer_name",
    "default_prepend_bos",
    "use_attn_result",
    "use_split_qkv_input",
    "use_attn_in",
    "use_hook_mlp_in",
)


def native(config: PreTrainedConfig) -> Architecture:
    kind = config.normalization_type
    norm = NO_NORM
    if kind is not None:
        norm = RMS_NORM if kind.startswith("RMS") else LAYER_NORM
    positions = config.positional_embedding_type
    q, k, v = map(Projection, "qkv")
    attn = Attention("attn", q, k, v, o="o", rotary="last" if positions == "rotary" else None)
    if positions == "shortformer":
        attn = replace(attn, qk_shift="pos_embed")
    if config.use_qk_norm:
        attn = normed(attn, "q_norm", "k_norm")
    mlp: MLP | MoE = MLP(
        "mlp",
        up=Projection("up"),
        gate=Projection("gate") if config.gated_mlp else None,
        ln=Norm("ln", LAYER_NORM) if config.act_fn == "solu_ln" else None,
        down="down",
    )
    if config.num_experts is not None:
        mlp = MoE("mlp", router="gate")
    steps = [
        Step(attn, Norm("ln1", norm)),
        Step(mlp, Norm("ln2", norm), parallel_to=0 if config.parallel_attn_mlp else None),
    ]
    if config.use_normalization_before_and_after:
        for i, step in enumerate(steps):
            steps[i] = replace(step, result_chain=(Norm(f"ln{i + 1}_post", norm),))
    if config.attn_only:
        del steps[1:]
    final_norm = Norm("ln_final", RMS_NORM if config.final_rms else norm)
    has_table = positions in ("standard", "shortformer")
    embedding = Embedding("embed", added=tables("pos_embed" if has_table else None))
    stack = Stack("blocks", Block(tuple(steps)), {}, final_norm, embedding)
    cap = config.output_logits_soft_cap
    readout = Readout("unembed", soft_cap=cap if cap > 0 else None)
    return Architecture((stack,), readout, config_values=_values(config))


def _values(config: PreTrainedConfig) -> dict[str, object]:
    values = {name: getattr(config, name) for name in _SAME_FIELDS}
    if config.num_experts is not None:
        values |= {"num_experts": config.num_experts, "experts_per_token": config.experts_per_token}
        values |= {"d_expert": config.d_mlp, "d_mlp": config.d_mlp, "gated_mlp": True}
    return values
