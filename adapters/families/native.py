"""The native models of `bridge.native`."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Embedding, Readout, Stack, Step, tables
from adapters.attention import Attention, Projection
from adapters.families.shapes.llama import normed
from adapters.feed_forward import MLP, MoE
from adapters.norms import LAYER_NORM, NO_NORM, RMS_NORM, Norm

_SAME_FIELDS = (
    "model_name", "normalization_type", "final_rms", "positional_embedding_type", "rotary_dim", "rotary_base",
    "attention_dir", "attn_scores_soft_cap",
    "use_attn_scale", "attn_scale", "scale_attn_by_inverse_layer_idx", "seed", "tokenizer_name",
    "default_prepend_bos", "use_attn_result", "use_split_qkv_input", "use_attn_in", "use_hook_mlp_in",
)  # fmt: skip


def native(config: PreTrainedConfig) -> Architecture:
    kind = config.normalization_type
    norm = NO_NORM if kind is None else RMS_NORM if kind.startswith("RMS") else LAYER_NORM
    positions = config.positional_embedding_type
    attn = Attention(
        "attn",
        Projection("q"),
        Projection("k"),
        Projection("v"),
        o="o",
        rotary="last" if positions == "rotary" else None,
        qk_shift="pos_embed" if positions == "shortformer" else None,
    )
    if config.use_qk_norm:
        attn = normed(attn, "q_norm", "k_norm")
    mlp: MLP | MoE = MLP(
        "mlp",
        up=Projection("up"),
        gate=Projection("gate") if config.gated_mlp else None,
        ln=Norm("ln", LAYER_NORM) if config.act_fn == "solu_ln" else None,
        down="down",
    )
    values = {name: getattr(config, name) for name in _SAME_FIELDS}
    if config.num_experts is not None:
        mlp, d_expert = MoE("mlp", router="gate"), config.d_mlp
        values |= {"num_experts": config.num_experts, "experts_per_token": config.experts_per_token}
        values |= {"d_expert": d_expert, "d_mlp": d_expert, "gated_mlp": True}
    after = [(Norm(f"ln{i}_post", norm),) if config.use_normalization_before_and_after else () for i in (1, 2)]
    steps = (
        Step(attn, Norm("ln1", norm), after[0]),
        Step(mlp, Norm("ln2", norm), after[1], parallel_to=0 if config.parallel_attn_mlp else None),
    )
    final_norm = Norm("ln_final", RMS_NORM if config.final_rms else norm)
    embedding = Embedding("embed", added=tables("pos_embed" if positions in ("standard", "shortformer") else None))
    return Architecture(
        (Stack("blocks", Block(steps[:1] if config.attn_only else steps), {}, final_norm, embedding),),
        Readout("unembed", soft_cap=config.output_logits_soft_cap if config.output_logits_soft_cap > 0 else None),
        config_values=values,
    )
