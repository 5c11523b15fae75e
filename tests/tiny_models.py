"""Tiny random instances of every text architecture of transformers, made from its configuration
class alone.

A default configuration hides what a class can do. Here factors are not one, sliding windows are
shorter than a prompt of ten tokens, there is a layer of each kind, and noise is on every parameter,
so that none is zero or one.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)

from adapters.imports import checkpointing_method, has_transformers
from tests.tiny_images import OWN as OWN_OF_IMAGES

Task = Literal["causal", "masked", "seq2seq", "image_text", "speech"]
MAPPINGS = {
    "causal": MODEL_FOR_CAUSAL_LM_MAPPING,
    "masked": MODEL_FOR_MASKED_LM_MAPPING,
    "seq2seq": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "image_text": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    "speech": MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
}

#: What a configuration class is given of these, as far as it has fields of the names.
SIZES: dict[str, Any] = {
    # widths
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "n_embed": 32,
    "dim": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "lru_width": 32,
    "audio_hidden_size": 32,
    "base_channels": 32,
    "num_filters": 2,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "ffn_hidden_size": 48,
    "hidden_dim": 48,
    "mlp_dim": 48,
    "d_inner": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "intermediate_size_mlp": 48,
    "speech_encoder_intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "expert_intermediate_size": 16,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "multi_query_group_num": 2,
    "head_dim": 8,
    "d_kv": 8,
    "d_head": 8,
    "attention_head_dim": 8,
    "rotary_dim": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 12,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "partial_rotary_factor": 1.0,
    "num_kv_shared_layers": 0,
    "speech_encoder_attention_heads": 4,
    # lengths
    "vocab_size": 99,
    "vocab_size_per_layer_input": 99,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "max_seq_len": 64,
    "max_sequence_length": 64,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "sliding_window": 8,
    "attention_window_size": 8,
    "index_topk": 8,
    "block_sparse_block_size": 8,
    "attention_types": [[["global", "local"], 1]],
    # layers
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "speech_encoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "max_window_layers": 1,
    # mixtures
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_top_k": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_experts_shared": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # state spaces and linear attention
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "n_mamba_heads": 2,
    "mamba_expand": 2,
    "time_step_rank": 4,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "conv1d_width": 4,
    # the rest
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "decoder_start_token_id": 1,
    "attention_dropout": 0.0,
}
#: The same of a shape that trained models have: 512 wide, eight heads of 64 columns, four of keys.
WIDE: dict[str, Any] = SIZES | {
    **{name: 512 for name, size in SIZES.items() if size == 32},
    **{name: 768 for name, size in SIZES.items() if size == 48},
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 8),
    **dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "speech_encoder_attention_heads"), 8
    ),
    **dict.fromkeys(
        ("head_dim", "d_kv", "d_head", "attention_head_dim", "mamba_head_dim", "mamba_d_head"), 64
    ),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 4),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 16),
    "rotary_dim": 32,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "qk_head_dim": 96,
    "index_head_dim": 64,
    "n_mamba_heads": 2,
}
#: The same with other heads: two, and one of keys.
OTHER_HEADS: dict[str, Any] = SIZES | {
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "speech_encoder_attention_heads"), 2
    ),
    "num_key_value_heads": 1,
    "multi_query_group_num": 1,
    "state_size": 16,
    "n_groups": 2,
}
#: Factors, which are one by default.
FACTORS = {
    "residual_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.0,
    "attention_out_multiplier": 0.7,
    "ssm_out_multiplier": 0.6,
    "lm_head_multiplier": 0.8,
    "key_multiplier": 0.9,
    "scale_depth": 0.8,
    "scale_emb": 2.0,
    "full_attn_alpha_factor": 0.7,
    "full_attn_beta_factor": 0.9,
    "linear_attn_alpha_factor": 0.8,
    "linear_attn_beta_factor": 1.1,
    "mlp_alpha_factor": 0.6,
    "mlp_beta_factor": 1.2,
}
_MIXED = ["linear_attention", "full_attention"]
_COMPASS_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_WINDOWS = {  # of the layers that have a sliding window
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 8,
    "swa_kv_lora_rank": 8,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 8,
    "swa_head_dim": 16,
    "swa_qk_rope_head_dim": 4,
}
#: What a model type needs besides.
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "num_group": 1, "topk_group": 1, "num_expert_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _COMPASS_ROPE, "full_attention": _COMPASS_ROPE},
    },
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "share_att_key": True,
        "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "dots3_note": {"num_key_value_heads": 4, "adapter_in_dim": 32} | _WINDOWS,
    "dots3_note_text": {"num_key_value_heads": 4} | _WINDOWS,
    "speech-encoder-decoder": {"decoder_start_token_id": 1, "pad_token_id": 0},
    "encoder-decoder": {"decoder_start_token_id": 1},
    "esmc": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 64},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "granitemoehybrid": {"layer_types": _MIXED},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 4},
    "luke": {"entity_vocab_size": 50, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8, "expand": 2},
    "mimo_v2_flash": {  # so that an even number of columns is rotated
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))
        },
    },
    "mobilebert": {"intra_bottleneck_size": 32, "num_feedforward_networks": 2},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "phimoe": {"router_jitter_noise": 0.2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 4,
        "ngram_vocab_size_base": 50,
    },
    "perceiver": {
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "qk_channels": 32,
        "v_channels": 32,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 8],
        "attn_layers": ["local", "lsh"],
        "num_buckets": 4,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
        "feed_forward_size": 48,
        "attention_head_size": 8,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 20,
        "shape_vocab_size": 20,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}
#: Types that cannot be had, and why.
CANNOT_BE_BUILT = {
    "blt": (
        "its patches of bytes need a second model, which its configuration class does not describe"
        " by itself"
    ),
    "gemma3n": "it needs a package for images (timm)",
    "gemma4_assistant": "it reads the hidden states of another model, whose widths have to fit",
    "gemma4_unified_assistant": (
        "it reads the hidden states of another model, whose layers have to fit"
    ),
}


def types(task: Task = "causal") -> list[str]:
    """The model types that transformers has a class for, sorted."""
    return sorted(name for name, cls in CONFIG_MAPPING.items() if cls in MAPPINGS[task])


def model_class(model_type: str, task: Task = "causal") -> type[PreTrainedModel]:
    """The class of a model type (as in transformers' ``CONFIG_MAPPING``) for a task."""
    _skip_if_newer(model_type)
    found = MAPPINGS[task][CONFIG_MAPPING[model_type]]
    return found[0] if isinstance(found, tuple) else found


def _skip_if_newer(model_type: str) -> None:
    """Skips a test of a type that the installed transformers does not have yet."""
    if model_type not in CONFIG_MAPPING and not has_transformers("5.23"):
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")


def checkpoint(model: PreTrainedModel, options: dict[str, bool] | None = None) -> None:
    """Turns activation checkpointing on, with transformers' own method for it."""
    getattr(model, checkpointing_method())(options)


def tiny_config(
    model_type: str, task: Task = "causal", sizes: Mapping[str, Any] = SIZES, **fields: Any
) -> PreTrainedConfig:
    """A tiny configuration for the class of a model type: of a model of images and text, that of
    its text.

    Args:
        model_type, task: as for `model_class`.
        sizes: `SIZES`, `WIDE` or `OTHER_HEADS`.
        fields: what it is given besides.
    """
    return config_for(model_class(model_type, task), CONFIG_MAPPING[model_type], sizes, **fields)


def config_for(
    cls: type[PreTrainedModel],
    otherwise: type[PreTrainedConfig] | None = None,
    sizes: Mapping[str, Any] = SIZES,
    **fields: Any,
) -> PreTrainedConfig:
    """A tiny configuration for a class of transformers.

    Args:
        cls: the class.
        otherwise: the class of the configuration, where `cls` names none.
        sizes: `SIZES`, `WIDE` or `OTHER_HEADS`.
        fields: what it is given besides.
    """
    config = cls.config_class or otherwise
    assert config is not None
    return _configured(config, fields, sizes)


def tiny_model(
    model_type: str,
    task: Task = "causal",
    *,
    attn_implementation: str | None = None,
    seed: int = 0,
    **fields: Any,
) -> PreTrainedModel:
    """A tiny instance with noise on every parameter, in evaluation mode.

    Args:
        model_type, task, fields: as for `tiny_config`.
        attn_implementation: None: what transformers chooses.
        seed: of the parameters.
    """
    return tiny_of(
        model_class(model_type, task),
        tiny_config(model_type, task, **fields),
        attn_implementation,
        seed=seed,
    )


def tiny_of(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    attn_implementation: str | None = None,
    *,
    seed: int = 0,
) -> PreTrainedModel:
    """An instance of a class with noise on every parameter, in evaluation mode.

    Args:
        cls: the class.
        config: its configuration.
        attn_implementation, seed: as for `tiny_model`.
    """
    more = {"attn_implementation": attn_implementation} if attn_implementation else {}
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of transformers, about options that a tiny model does not use
        torch.manual_seed(seed)
        model = cls._from_config(config, **more)
        add_noise(model)
    return model.eval()


@torch.no_grad()
def add_noise(model: nn.Module) -> None:
    """Random numbers on every parameter, none of which stays at zero or one. A table that is not
    trained stays.
    """
    for parameter in model.parameters():
        constant = parameter.numel() > 0 and bool((parameter == parameter.flatten()[0]).all())
        if parameter.is_floating_point() and (parameter.requires_grad or constant):
            wide = (
                parameter.ndim > 1 and parameter.shape[-1] >= 512
            )  # sums of so many are to stay as large
            parameter.add_(torch.randn_like(parameter) * (0.025 if wide else 0.1))
            if not bool(torch.isfinite(parameter).all()):  # a parameter that nobody initialised
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    for module in (
        model.modules()
    ):  # a router's table of tokens, which is all zeros until a checkpoint is read
        if isinstance(table := getattr(module, "tid2eid", None), Tensor):
            rows = torch.rand(len(table), module.num_experts)  # of each token other experts
            table.copy_(rows.argsort(-1)[:, : table.shape[1]])


def _configured(
    cls: type[PreTrainedConfig], fields: Mapping[str, Any], sizes: Mapping[str, Any] = SIZES
) -> PreTrainedConfig:
    if cls.__name__ == "DbrxConfig":
        return _dbrx(cls)
    nested = {
        name: value for name, value in vars(cls()).items() if isinstance(value, PreTrainedConfig)
    }
    shrunk: dict[str, Any] = {}
    for name, value in nested.items():
        try:
            kept = {
                flag: True
                for flag in ("is_decoder", "add_cross_attention")
                if getattr(value, flag, False)
            }
            shrunk[name] = _configured(type(value), kept, sizes)
        except (
            ValueError,
            TypeError,
            AttributeError,
            KeyError,
        ):  # a part for images or sound that keeps its own size
            shrunk[name] = value
    if not nested:
        return cls(**_fields(cls, fields, sizes))
    try:
        return cls(**_fields(cls, {**shrunk, **fields}, sizes))
    except (ValueError, TypeError, AttributeError, KeyError):  # its sizes are those of its parts
        return cls(**shrunk, **fields)


def _dbrx(cls: type[PreTrainedConfig]) -> PreTrainedConfig:
    from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig, DbrxFFNConfig

    attention = DbrxAttentionConfig(kv_n_heads=2, rope_theta=1e4, clip_qkv=2.0)
    mixture = DbrxFFNConfig(hidden_size=32, ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2)
    return cls(
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        vocab_size=99,
        attn_config=attention,
        ffn_config=mixture,
        pad_token_id=0,
    )


def _is_computed(cls: type[PreTrainedConfig], name: str) -> bool:
    """Whether a configuration class computes a field."""
    found = getattr(cls, name, None)
    return isinstance(found, property) and found.fset is None


def _field_names(cls: type[PreTrainedConfig], default: PreTrainedConfig) -> set[str]:
    names = set(vars(default))
    for base in cls.__mro__:
        names |= set(vars(base).get("__annotations__", {}))
        if "__init__" in vars(base):
            names |= set(inspect.signature(base.__init__).parameters)
    return names


def _own(cls: type[PreTrainedConfig], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration class needs besides, in these sizes."""
    own = {**OWN.get(cls.model_type, {}), **OWN_OF_IMAGES.get(cls.model_type, {})}
    return {name: _enlarged(name, value) for name, value in own.items()} if sizes is WIDE else own


def _enlarged(name: str, value: Any) -> Any:
    """The same of a model of the sizes of `WIDE`."""
    if isinstance(value, dict):
        return {inner: _enlarged(inner, each) for inner, each in value.items()}
    if name == "mrope_section":
        return [8 * each for each in value]
    if (
        name == "num_key_value_heads" and value == SIZES["num_attention_heads"]
    ):  # as many as there are heads
        return WIDE["num_attention_heads"]
    if larger := {"mamba_d_ssm=64": 1024, "num_heads=8": 16, "indexer_head_dim=8": 64}.get(
        f"{name}={value}"
    ):
        return larger
    if value == SIZES.get(name, ()):
        return WIDE[name]
    widths = (
        "embed_dim",
        "out_hidden_size",
        "decoder_hidden_size",
        "text_hidden_size",
        "adapter_in_dim",
        "d_latents",
        "adapter_input_size",
        "adapter_out_dim",
    )
    return (
        512
        if value == 32 and name in (*widths, "qk_channels", "v_channels", "intra_bottleneck_size")
        else value
    )


def _layers(
    cls: type[PreTrainedConfig], default: PreTrainedConfig, given: Mapping[str, Any]
) -> tuple[int, dict[str, list[str]]]:
    """How many layers there are: two, or one of each kind; and their kinds, by the fields that say
    them.
    """
    aliases, layers = cls.attribute_map or {}, 2
    kinds: dict[str, list[str]] = {}
    for name in ("layer_types", "mlp_layer_types"):
        if aliases.get(name, name) in given or _is_computed(cls, aliases.get(name, name)):
            continue
        if found := getattr(default, name, None):
            kinds[name] = list(dict.fromkeys(found))
            layers = max(layers, len(kinds[name]))
    for name in ("layer_types", "layers_block_type"):
        layers = len(given[name]) if isinstance(given.get(name), list) else layers
    return layers, kinds


def _fields(
    cls: type[PreTrainedConfig], given: Mapping[str, Any], sizes: Mapping[str, Any] = SIZES
) -> dict[str, Any]:
    """What a configuration class is given: the sizes that it has fields for, one layer of each
    kind, what it needs.
    """
    default = cls()
    given = {**_own(cls, sizes), **given}
    names, aliases = _field_names(cls, default), cls.attribute_map or {}
    fields = {
        n: v
        for n, v in sizes.items()
        if n in names and n not in aliases and not _is_computed(cls, n)
    }
    if (
        "kv_lora_rank" in fields
    ):  # a latent attention has as many heads of keys as of queries, of their own width
        fields.pop("head_dim", None)
        if "num_key_value_heads" in fields:
            fields["num_key_value_heads"] = fields.get("num_attention_heads", 4)
    rotated = getattr(default, "partial_rotary_factor", None)
    if isinstance(rotated, float) and rotated < 1:
        fields["partial_rotary_factor"] = 0.5
    layers, kinds = _layers(cls, default, given)
    fields |= {
        name: layers
        for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        if name in fields
    }
    fields |= {name: (found * layers)[:layers] for name, found in kinds.items()}
    for name, factor in FACTORS.items():
        if name in names and isinstance(getattr(default, name, None), int | float):
            fields[name] = factor
    return fields | given
