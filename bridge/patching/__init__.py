"""Activation patching: which activations of a clean run bring a corrupted run's answer back.

Two prompts of the same length, of which one leads to another answer. The corrupted one is run again and again, each
time with one activation replaced by what it was in the clean run, and a metric of the logits says how much that repairs
(causal tracing of Meng et al. 2022, "Locating and Editing Factual Associations in GPT"; for single heads Wang et al.
2022, "Interpretability in the Wild"). Names and arguments are those of ``transformer_lens.patching``.
"""

from bridge.patching.ablations import ablated
from bridge.patching.everything import PatchedEverything, patch_everything
from bridge.patching.generic import (
    Metric,
    generic_activation_patch,
    make_df_from_ranges,
)
from bridge.patching.result import PatchingResult
from bridge.patching.setters import (
    PatchSetter,
    layer_feature_patch_setter,
    layer_head_dest_src_pos_pattern_patch_setter,
    layer_head_pattern_patch_setter,
    layer_head_pos_pattern_patch_setter,
    layer_head_vector_patch_setter,
    layer_pos_feature_patch_setter,
    layer_pos_head_vector_patch_setter,
    layer_pos_patch_setter,
)
from bridge.patching.standard import (
    get_act_patch_attn_head_all_pos_every,
    get_act_patch_attn_head_by_pos_every,
    get_act_patch_attn_head_k_all_pos,
    get_act_patch_attn_head_k_by_pos,
    get_act_patch_attn_head_out_all_pos,
    get_act_patch_attn_head_out_by_pos,
    get_act_patch_attn_head_pattern_all_pos,
    get_act_patch_attn_head_pattern_by_pos,
    get_act_patch_attn_head_pattern_dest_src_pos,
    get_act_patch_attn_head_q_all_pos,
    get_act_patch_attn_head_q_by_pos,
    get_act_patch_attn_head_v_all_pos,
    get_act_patch_attn_head_v_by_pos,
    get_act_patch_attn_out,
    get_act_patch_block_every,
    get_act_patch_mixer_out,
    get_act_patch_mlp_out,
    get_act_patch_resid_mid,
    get_act_patch_resid_pre,
)

__all__ = [
    "Metric",
    "PatchSetter",
    "PatchedEverything",
    "PatchingResult",
    "ablated",
    "generic_activation_patch",
    "get_act_patch_attn_head_all_pos_every",
    "get_act_patch_attn_head_by_pos_every",
    "get_act_patch_attn_head_k_all_pos",
    "get_act_patch_attn_head_k_by_pos",
    "get_act_patch_attn_head_out_all_pos",
    "get_act_patch_attn_head_out_by_pos",
    "get_act_patch_attn_head_pattern_all_pos",
    "get_act_patch_attn_head_pattern_by_pos",
    "get_act_patch_attn_head_pattern_dest_src_pos",
    "get_act_patch_attn_head_q_all_pos",
    "get_act_patch_attn_head_q_by_pos",
    "get_act_patch_attn_head_v_all_pos",
    "get_act_patch_attn_head_v_by_pos",
    "get_act_patch_attn_out",
    "get_act_patch_block_every",
    "get_act_patch_mixer_out",
    "get_act_patch_mlp_out",
    "get_act_patch_resid_mid",
    "get_act_patch_resid_pre",
    "layer_feature_patch_setter",
    "layer_head_dest_src_pos_pattern_patch_setter",
    "layer_head_pattern_patch_setter",
    "layer_head_pos_pattern_patch_setter",
    "layer_head_vector_patch_setter",
    "layer_pos_feature_patch_setter",
    "layer_pos_head_vector_patch_setter",
    "layer_pos_patch_setter",
    "make_df_from_ranges",
    "patch_everything",
]
