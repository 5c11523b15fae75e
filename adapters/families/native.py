"""The native models of `bridge.native`."""

from __future__ import annotations

from typing import Any

from adapters.architecture import MLP, Architecture, Block
from adapters.attention import Attention, Projection
from adapters.norms import LAYER_NORM, NO_NORM, RMS_NORM
from adapters.registry import register

_SAME_FACTS = (
    "model_name", "normalization_type", "final_rms", "positional_embedding_type", "rotary_dim", "rotary_base",
    "attention_dir", "use_attn_scale", "attn_scale", "scale_attn_by_inverse_layer_idx", "seed", "tokenizer_name",
    "default_prepend_bos", "use_attn_result", "use_split_qkv_input", "use_attn_in", "use_hook_mlp_in",
)  # fmt: skip


@register("NativeModel")
def native(config: Any) -> Architecture:
    kind = config.normalization_type
    norm = NO_NORM if kind is None else RMS_NORM if kind.startswith("RMS") else LAYER_NORM
    positions = config.positional_embedding_type
    mlp = MLP(
        "mlp",
        up=Projection("up"),
        gate=Projection("gate") if config.gated_mlp else None,
        ln="ln" if config.act_fn == "solu_ln" else None,
        down="down",
    )
    return Architecture(
        embed="embed",
        pos_embed="pos_embed" if positions in ("standard", "shortformer") else None,
        blocks="blocks",
        block=Block(
            ln1="ln1",
            attn=Attention(
                "attn",
                Projection("q"),
                Projection("k"),
                Projection("v"),
                o="o",
                rotary=positions == "rotary",
            ),
            ln2=None if config.attn_only else "ln2",
            mlp=None if config.attn_only else mlp,
            norm=norm,
            qk_shift="pos_embed" if positions == "shortformer" else None,
            parallel=config.parallel_attn_mlp,
        ),
        final_norm="ln_final",
        final_kind=RMS_NORM if config.final_rms else norm,
        unembed="unembed",
        facts={name: getattr(config, name) for name in _SAME_FACTS},
    )
