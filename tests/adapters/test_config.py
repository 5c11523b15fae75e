"""What `cfg` says about each family is what its model does, and what no adapter can declare is
refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from adapters import UnsupportedModelError, map_model
from tests.adapters.by_hand.families import CASES, GPTJ, OPT, tiny

COMMON = {"n_layers": 2, "n_heads": 4, "d_model": 32, "d_vocab": 61, "d_vocab_out": 61, "n_ctx": 20}
NORMED = {"normalization_type": "LN", "eps": 1e-5, "final_rms": False}
RMS = {"normalization_type": "RMS", "eps": 1e-6, "final_rms": True, "gated_mlp": True, "d_mlp": 28}
EXPERTS = {
    **RMS,
    "num_experts": 4,
    "experts_per_token": 2,
    "d_expert": 12,
    "default_prepend_bos": False,
}
GELU = "gelu_pytorch_tanh"
NEO = {
    "use_attn_scale": False,
    "attn_scale": None,
    "attn_types": ["global", "local"],
    "window_size": 3,
    **NORMED,
}
GPT_J = {
    "rotary_adjacent_pairs": True,
    "rotary_base": 10000.0,
    "parallel_attn_mlp": True,
    "d_head": 8,
    **NORMED,
}
GEMMA_3 = {
    "use_qk_norm": True,
    "attn_types": ["local", "global"],
    "window_size": 3,
    "rotary_base": 1e5,
    "act_fn": GELU,
    "rotary_base_local": 100.0,
    "attn_scale": 5**0.5,
    "use_local_attn": True,
    "use_normalization_before_and_after": True,
}

EXPECTED: dict[str, dict[str, Any]] = {
    "gpt_neo": {"positional_embedding_type": "standard", "act_fn": "gelu_new", "d_mlp": 128, **NEO},
    "gpt_neo-wide-untied": {"d_mlp": 20, "tie_word_embeddings": False, **NEO},
    "gptj": {
        "positional_embedding_type": "rotary",
        "rotary_dim": 4,
        "d_mlp": 128,
        "act_fn": "gelu_new",
        **GPT_J,
    },
    "gptj-tied-all-rotated": {"rotary_dim": 8, "d_mlp": 20, "tie_word_embeddings": True, **GPT_J},
    "phi": {
        "rotary_dim": 4,
        "rotary_adjacent_pairs": False,
        "parallel_attn_mlp": True,
        "d_mlp": 28,
        **NORMED,
    },
    "phi-mqa-quarter-rotated": {
        "rotary_dim": 2,
        "rotary_base": 300.0,
        "n_key_value_heads": 1,
        **NORMED,
    },
    "phi-gqa-normed": {"use_qk_norm": True, "n_key_value_heads": 2, **NORMED},
    "gemma-mqa": {
        "n_key_value_heads": 1,
        "d_head": 8,
        "act_fn": GELU,
        "attention_dir": "causal",
        **RMS,
    },
    "gemma-mha-bias-untied": {
        "n_key_value_heads": None,
        "d_head": 4,
        "attn_scale": 2.0,
        "rotary_dim": 4,
        **RMS,
    },
    "gemma2-mha-bias": {
        "attn_scores_soft_cap": -1.0,
        "output_logits_soft_cap": 2.0,
        "attn_scale": 3**0.5,
        "window_size": 3,
        "use_normalization_before_and_after": True,
        "attn_types": ["local", "global"],
        "act_fn": GELU,
        **RMS,
    },
    "gemma3-gqa": {"n_key_value_heads": 2, "output_logits_soft_cap": -1.0, **GEMMA_3, **RMS},
    "gemma3-mqa-bias-untied": {
        "n_key_value_heads": 1,
        "tie_word_embeddings": False,
        **GEMMA_3,
        **RMS,
    },
    "mixtral-gqa": {
        "num_experts": 4,
        "experts_per_token": 2,
        "d_expert": 28,
        "use_local_attn": False,
        **RMS,
        "eps": 1e-5,
    },
    "gpt_oss-gqa": {
        "num_experts": 4,
        "experts_per_token": 2,
        "d_expert": 28,
        "n_key_value_heads": 2,
        "act_fn": "clamped_swiglu",
        "attn_types": ["local", "global"],
        "window_size": 3,
        "rotary_base": 300.0,
        "d_head": 8,
        **RMS,
        "eps": 1e-5,
    },
    "gpt_oss-mha-no-bias-tied": {
        "num_experts": 3,
        "experts_per_token": 1,
        "tie_word_embeddings": True,
    },
    "qwen2_moe-gqa": {**EXPERTS, "d_mlp": 12, "d_shared_expert": 20, "n_key_value_heads": 2},
    "qwen2_moe-dense-window": {
        **EXPERTS,
        "d_shared_expert": 20,
        "window_size": 3,
        "attn_types": ["local", "global"],
    },
    "qwen2_moe-equal-widths": {**EXPERTS, "d_mlp": 32, "d_expert": 32, "d_shared_expert": 32},
    "qwen3_moe-gqa": {
        **EXPERTS,
        "d_shared_expert": None,
        "use_qk_norm": True,
        "d_head": 6,
        "attn_scale": 6**0.5,
    },
    "mixtral-mha-window": {
        "num_experts": 3,
        "use_local_attn": True,
        "window_size": 3,
        "attn_types": ["local", "local"],
        "act_fn": "silu",
    },
    "phi3-gqa": {
        "n_key_value_heads": 2,
        "rotary_dim": 4,
        "rotary_base": 200.0,
        "window_size": 4,
        **RMS,
        "eps": 1e-5,
    },
    "qwen3-mha-bias": {
        "use_qk_norm": True,
        "default_prepend_bos": False,
        "use_local_attn": False,
        **RMS,
    },
    "cwm-gqa": {"window_size": 3, "attn_types": ["local", "global"], **RMS, "eps": 1e-5},
    "ministral-gqa": {
        "use_local_attn": True,
        "window_size": 3,
        "attn_types": ["local", "global"],
        **RMS,
    },
    "seed_oss-gqa": {"d_head": 6, "attn_scale": 6**0.5, "use_local_attn": False, **RMS},
    "smollm3-gqa": {"n_key_value_heads": 2, "rotary_dim": 8, "rotary_base": 2e6, **RMS},
    "helium-gqa": {"rotary_adjacent_pairs": True, "rotary_base": 1e5, **RMS, "eps": 1e-8},
    "ernie4_5-gqa": {"rotary_adjacent_pairs": True, "rotary_base": 5e5, **RMS, "eps": 1e-5},
    "opt-no-bias": {
        "act_fn": "relu",
        "positional_embedding_type": "standard",
        "d_mlp": 28,
        **NORMED,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_config(case: str) -> None:
    cfg = map_model(tiny(case)).cfg
    expected = COMMON | EXPECTED[case]
    assert {name: getattr(cfg, name) for name in expected} == expected


@pytest.mark.parametrize("case", CASES)
def test_the_scale_is_the_one_that_attention_uses(case: str) -> None:
    hf = tiny(case)
    scales = [module.scaling for module in hf.modules() if hasattr(module, "scaling")]
    scales += [1 / module.scale_attn for module in hf.modules() if hasattr(module, "scale_attn")]
    cfg = map_model(hf).cfg
    assert cfg.use_attn_scale == bool(scales)
    if scales:
        assert scales == pytest.approx([1 / cfg.attn_scale] * 2)


def test_a_bidirectional_gemma_says_so() -> None:
    fields = CASES["gemma-mqa"][1] | {"use_bidirectional_attention": True}
    assert (
        map_model(transformers.GemmaModel(transformers.GemmaConfig(**fields))).cfg.attention_dir
        == "bidirectional"
    )


def test_bloom() -> None:
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
    cfg = map_model(transformers.BloomForCausalLM(config)).cfg
    facts = (
        cfg.act_fn,
        cfg.positional_embedding_type,
        cfg.d_mlp,
        cfg.n_ctx,
        cfg.post_embedding_ln,
        cfg.attn_scale,
    )
    assert facts == ("gelu_fast", "alibi", 128, None, True, 8**0.5)


SMALL_OPT = OPT | {"word_embed_proj_dim": 32}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
BLOOM = {"hidden_size": 32, "n_layer": 1, "n_head": 4}


@pytest.mark.parametrize(
    ("family", "fields", "field"),
    [
        ("OPT", SMALL_OPT | {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("OPT", SMALL_OPT | {"word_embed_proj_dim": 16}, "word_embed_proj_dim"),
        ("Bloom", BLOOM | {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact"),
        ("Bert", {"is_decoder": True, "add_cross_attention": True}, "add_cross_attention"),
        ("Bert", {"chunk_size_feed_forward": 2}, "chunk_size_feed_forward"),
        (
            "Bloom",
            BLOOM | {"apply_residual_connection_post_layernorm": True},
            "connection_post_layernorm",
        ),
    ],
)
def test_what_cannot_be_declared_is_refused(
    family: str, fields: dict[str, Any], field: str
) -> None:
    model = getattr(transformers, f"{family}Model")(
        getattr(transformers, f"{family}Config")(**fields)
    )
    with pytest.raises(UnsupportedModelError, match=field):
        map_model(model)


def test_opt_may_lack_a_final_norm() -> None:
    model = transformers.OPTForCausalLM(
        transformers.OPTConfig(**SMALL_OPT, _remove_final_layer_norm=True)
    )
    assert not [
        point for point in map_model(model).points if point.name.startswith("ln_final.hook_scale")
    ]


def test_scores_are_declared_only_where_they_can_be_reached() -> None:
    config = transformers.GPTJConfig(**GPTJ)
    model = transformers.GPTJForCausalLM(config)
    config._attn_implementation = (  # what a model loaded with flash attention says
        "flash_attention_2"
    )
    names = [point.name for point in map_model(model).points]
    assert "blocks.0.attn.hook_z" in names
    assert not [name for name in names if "pattern" in name or "rot" in name]


def test_experts_packed_in_mxfp4_are_refused() -> None:
    model = tiny("gpt_oss-gqa")
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type("Mxfp4GptOssMLP", (type(mlp),), {})
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.1\.mlp is packed in MXFP4.*dequantize=True"
    ):
        map_model(model)


def test_a_qwen_without_experts_has_none() -> None:
    fields = CASES["qwen2_moe-gqa"][1] | {"num_experts": 0}
    found = map_model(transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**fields)))
    assert (found.cfg.num_experts, found.cfg.d_expert, found.cfg.d_mlp, found.cfg.gated_mlp) == (
        None,
        None,
        28,
        True,
    )
    assert not [point.name for point in found.points if "expert" in point.name]
