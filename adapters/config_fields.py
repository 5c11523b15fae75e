"""The fields that several kinds of configuration have, with HookedTransformer's names and defaults, said once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, repr=False, eq=False)
class ModelFields:
    """What every configuration says: that of a model (`ModelConfig`), of one from scratch, HookedTransformer's."""

    n_key_value_heads: int | None = None
    attention_dir: str = "causal"
    attn_only: bool = False
    parallel_attn_mlp: bool = False
    gated_mlp: bool = False
    final_rms: bool = False
    rotary_dim: int | None = None
    use_attn_scale: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    use_qk_norm: bool = False
    use_local_attn: bool = False
    window_size: int | None = None
    attn_types: list[str] | None = None
    attn_scores_soft_cap: float = -1.0
    output_logits_soft_cap: float = -1.0
    use_normalization_before_and_after: bool = False
    num_experts: int | None = None
    experts_per_token: int | None = None
    tie_word_embeddings: bool = False
    tokenizer_name: str | None = None
    default_prepend_bos: bool = True
    use_attn_result: bool = False
    use_split_qkv_input: bool = False
    use_attn_in: bool = False
    use_hook_mlp_in: bool = False
    seed: int | None = None


@dataclass(kw_only=True, repr=False, eq=False)
class LoadedModelFields(ModelFields):
    """What is said besides of a model that may have been loaded."""

    rotary_base_local: float | None = None
    rotary_adjacent_pairs: bool = False
    post_embedding_ln: bool = False
    relative_attention_num_buckets: int | None = None
    relative_attention_max_distance: int | None = None
    decoder_start_token_id: int | None = None
    tokenizer_prepends_bos: bool | None = None
    ungroup_grouped_query_attention: bool = False
    n_devices: int = 1
    from_checkpoint: bool = False
    checkpoint_index: int | None = None
    checkpoint_label_type: str | None = None
    checkpoint_value: int | None = None
