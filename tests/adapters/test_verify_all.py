"""`verify` holds for all eighteen families, from tiny random configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from adapters import verify
from adapters.imports import gptj_is_like_others, known_error
from bridge import TransformerBridge

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 61,
    "n_positions": 40,
    "pad_token_id": 0,
}
NEO = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 40,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
}
OPT = {name: size for name, size in SIZES.items() if name != "intermediate_size"} | {
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "dropout": 0.0,
}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61}
T5 = {
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "vocab_size": 61,
    "decoder_start_token_id": 0,
}
MHA, GQA, MQA = ({"num_key_value_heads": n} for n in (4, 2, 1))
WIDE = {"head_dim": 12}
WINDOW = {"sliding_window": 4}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 10,
    }
}
TIED, UNTIED = ({"tie_word_embeddings": tied} for tied in (True, False))

#: Each family's configuration as its models usually are: class, configuration's class, its fields.
USUAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig", NEO),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", GPT | {"rotary_dim": 4}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "bloom": ("BloomForCausalLM", "BloomConfig", BLOOM),
    "llama-gqa": ("LlamaForCausalLM", "LlamaConfig", SIZES | GQA),
    "mistral-gqa-window": ("MistralForCausalLM", "MistralConfig", SIZES | GQA | WINDOW),
    "mixtral-gqa": ("MixtralForCausalLM", "MixtralConfig", SIZES | GQA | {"num_local_experts": 4}),
    "qwen2-gqa": ("Qwen2ForCausalLM", "Qwen2Config", SIZES | GQA),
    "qwen3-gqa": ("Qwen3ForCausalLM", "Qwen3Config", SIZES | GQA | WIDE),
    "gemma-mqa": ("GemmaForCausalLM", "GemmaConfig", SIZES | MQA | WIDE),
    "gemma2-gqa": ("Gemma2ForCausalLM", "Gemma2Config", SIZES | GQA | WIDE | WINDOW),
    "gemma3-gqa": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        SIZES | GQA | WIDE | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", SIZES),
    "phi3-gqa": ("Phi3ForCausalLM", "Phi3Config", SIZES | GQA),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
}
#: Transformers itself has no scaled-dot-product attention for these, and says so when one asks for
#: it.
EAGER_ONLY = ("gpt_neo", *(() if gptj_is_like_others() else ("gptj",)), "bloom", "gemma2-gqa")

#: What else their configurations allow: which of the usual ones it changes, and how.
OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-untied": ("gpt2", UNTIED),
    "gpt2-scaled-by-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 20}),
    "gpt_neo-untied": ("gpt_neo", UNTIED | {"intermediate_size": 20}),
    "gptj-tied": ("gptj", TIED | {"rotary_dim": 8}),
    "gpt_neox-one-after-the-other": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox-tied-no-bias": ("gpt_neox", TIED | {"attention_bias": False}),
    "opt-no-bias-untied": ("opt", {"enable_bias": False} | UNTIED),
    "opt-no-norm-weights": ("opt", {"layer_norm_elementwise_affine": False}),
    "bloom-untied": ("bloom", UNTIED),
    "llama-mha-tied": ("llama-gqa", MHA | TIED),
    "llama-mqa-bias": ("llama-gqa", MQA | WIDE | {"attention_bias": True, "mlp_bias": True}),
    "mistral-mha-tied": ("mistral-gqa-window", MHA | TIED | {"sliding_window": None}),
    "mistral-mqa": ("mistral-gqa-window", MQA | WIDE),
    "mixtral-mha-tied-window": ("mixtral-gqa", MHA | TIED | WINDOW | {"num_experts_per_tok": 1}),
    "mixtral-mqa": ("mixtral-gqa", MQA | {"num_experts_per_tok": 3}),
    "qwen2-mha-tied-window": (
        "qwen2-gqa",
        MHA | TIED | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen2-mqa": ("qwen2-gqa", MQA),
    "qwen3-mha-bias-tied": ("qwen3-gqa", MHA | TIED | {"attention_bias": True}),
    "qwen3-mqa": ("qwen3-gqa", MQA),
    "gemma-gqa-bias": ("gemma-mqa", GQA | {"attention_bias": True}),
    "gemma-mha-untied": ("gemma-mqa", MHA | UNTIED),
    "gemma2-mha-bias-untied": ("gemma2-gqa", MHA | UNTIED | {"attention_bias": True}),
    "gemma2-mqa-no-caps": (
        "gemma2-gqa",
        MQA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3-mha-bias-untied": ("gemma3-gqa", MHA | UNTIED | {"attention_bias": True}),
    "gemma3-mqa": ("gemma3-gqa", MQA),
    "phi-gqa-tied": ("phi", GQA | TIED),
    "phi-mqa-normed": ("phi", MQA | {"qk_layernorm": True}),
    "phi3-mha-tied": ("phi3-gqa", MHA | TIED),
    "phi3-mqa-window": ("phi3-gqa", MQA | WINDOW),
    "bert-untied": ("bert", UNTIED),
    "gpt_oss-mha-no-bias-tied": (
        "gpt_oss-gqa",
        MHA | TIED | {"attention_bias": False, "num_experts_per_tok": 1},
    ),
    "gpt_oss-mqa-no-window": ("gpt_oss-gqa", MQA | {"layer_types": ["full_attention"] * 2}),
    "qwen2_moe-mha-tied-dense-first": ("qwen2_moe-gqa", MHA | TIED | {"mlp_only_layers": [0]}),
    "qwen2_moe-mqa-window": (
        "qwen2_moe-gqa",
        MQA | WINDOW | {"use_sliding_window": True, "decoder_sparse_step": 2},
    ),
    "qwen2_moe-equal-widths": (
        "qwen2_moe-gqa",
        {
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe-dense-window": (
        "qwen3_moe-gqa",
        WINDOW | {"use_sliding_window": True, "mlp_only_layers": [1]},
    ),
    "t5-gated-untied": ("t5", UNTIED | {"feed_forward_proj": "gated-gelu"}),
}
# In half precision, torch multiplies groups of rows that are multiples of 16 bytes.
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 40}
#: Families beyond the eighteen.
ALIKE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "cwm-gqa": ("CwmForCausalLM", "CwmConfig", SIZES | GQA | WIDE | WINDOW),
    "ministral-gqa": ("MinistralForCausalLM", "MinistralConfig", SIZES | GQA | WIDE | WINDOW),
    "seed_oss-gqa": ("SeedOssForCausalLM", "SeedOssConfig", SIZES | GQA | WIDE),
    "smollm3-gqa": (
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        SIZES | GQA | {"no_rope_layers": [1, 0]},
    ),
    "helium-gqa": ("HeliumForCausalLM", "HeliumConfig", SIZES | GQA | {"head_dim": 8}),
    "ernie4_5-gqa": ("Ernie4_5ForCausalLM", "Ernie4_5Config", SIZES | GQA | WIDE),
    "gpt_oss-gqa": (
        "GptOssForCausalLM",
        "GptOssConfig",
        SIZES | GQA | WIDE | WINDOW | YARN | {"num_local_experts": 4},
    ),
    "qwen2_moe-gqa": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", SIZES | GQA | MIXED | SHARED),
    "qwen3_moe-gqa": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", SIZES | GQA | WIDE | MIXED),
}
#: Other heads, and none.
CLASSES = {
    "gpt2": ("GPT2Model", "GPT2ForSequenceClassification"),
    "llama-gqa": ("LlamaModel", "LlamaForTokenClassification"),
    "bert": (
        "BertForNextSentencePrediction",
        "BertForPreTraining",
        "BertModel",
        "BertForSequenceClassification",
    ),
    "t5": ("T5EncoderModel", "T5Model"),
}


def tiny(case: str, cls: str | None = None, **more: Any) -> PreTrainedModel:
    """The model of a case with random weights, none of them left at a trivial value, in evaluation
    mode.
    """
    usual, changes = OTHER.get(case, (case, {}))
    usual_cls, config_cls, fields = (USUAL | ALIKE)[usual]
    config = getattr(transformers, config_cls)(**fields | changes)
    with torch.random.fork_rng():
        torch.manual_seed(len(case))
        model = getattr(transformers, cls or usual_cls)._from_config(config, **more)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def holds(model: PreTrainedModel) -> None:
    report = verify(TransformerBridge(model))
    if wrong := known_error(model):
        assert wrong in str(report)
        pytest.xfail(wrong)
    assert report.passed, str(report)


def test_these_are_eighteen_families() -> None:
    assert len(USUAL) == len({case.split("-")[0] for case in USUAL}) == 18


@pytest.mark.parametrize("case", [case for case in USUAL if case not in EAGER_ONLY])
def test_verified_with_sdpa(case: str) -> None:
    holds(tiny(case, attn_implementation="sdpa"))


@pytest.mark.parametrize("case", USUAL)
def test_verified_with_eager_attention(case: str) -> None:
    holds(tiny(case, attn_implementation="eager"))


@pytest.mark.parametrize("case", [*USUAL, "gpt_oss-gqa", "qwen2_moe-gqa", "qwen3_moe-gqa"])
def test_verified_in_bfloat16(case: str) -> None:
    holds(tiny(case, dtype=torch.bfloat16))


@pytest.mark.parametrize("case", OTHER)
def test_verified_with_other_options(case: str) -> None:
    holds(tiny(case))


@pytest.mark.parametrize(
    ("case", "cls"), [(case, cls) for case, classes in CLASSES.items() for cls in classes]
)
def test_verified_with_other_heads(case: str, cls: str) -> None:
    holds(tiny(case, cls))


@pytest.mark.parametrize("case", [*ALIKE, "phi-gqa-tied", "phi-mqa-normed"])
def test_verified_beyond_the_eighteen(case: str) -> None:
    model = tiny(case)
    holds(model)
    tokens = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, cache = TransformerBridge(model).run_with_cache(tokens)
        model.set_attn_implementation("eager")
        own = model(tokens, output_attentions=True, output_hidden_states=True)
    for layer in range(2):
        torch.testing.assert_close(cache["pattern", layer], own.attentions[layer])
        torch.testing.assert_close(cache["resid_pre", layer], own.hidden_states[layer])


def test_a_layer_without_rotation_says_so() -> None:
    with torch.no_grad():
        _, cache = TransformerBridge(tiny("smollm3-gqa")).run_with_cache(torch.arange(3, 9)[None])
    rotated = [
        not torch.equal(cache["q", layer, "attn"], cache["rot_q", layer, "attn"])
        for layer in range(2)
    ]
    assert rotated == [True, False]


@pytest.mark.parametrize("case", EAGER_ONLY)
def test_transformers_refuses_sdpa(case: str) -> None:
    with pytest.raises(ValueError, match="does not support an attention implementation"):
        tiny(case, attn_implementation="sdpa")
