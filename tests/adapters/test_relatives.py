"""Families like others: what they declare is proved, and is what would be inferred; with other
options, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from adapters import verify
from adapters.config import ModelConfig
from adapters.imports import known_error, older_than_declared
from adapters.registry import UndeclaredOptionError, declaration_for, has_declaration
from bridge import TransformerBridge
from tests.tiny_models import CANNOT_BE_BUILT, Task, model_class, tiny_config, tiny_model, types

#: Those that are always tried: of each sort of difference, one.
SAMPLE = (
    "afmoe",
    "apertus",
    "granite_swa",
    "hunyuan_v1_moe",
    "hyperclovax",
    "modernbert-decoder",
    "mpt",
    "openai-gpt",
    "xglm",
)
#: Their relatives, and what else is declared.
OTHERS = (
    "arcee",
    "aria_text",
    "biogpt",
    "codegen",
    "cohere",
    "cohere2",
    "cohere_compass_text",
    "cwm",
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "emu3",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon",
    "flex_olmo",
    "flint",
    "fuyu",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_bigcode",
    "granite",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hy_v3",
    "jais2",
    "kolibri1",
    "laguna",
    "mellum",
    "minicpm3",
    "minimax_m2",
    "ministral",
    "ministral3",
    "moshi",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "persimmon",
    "phi4_multimodal",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "youtu",
    "bart",
    "blenderbot",
    "got_ocr2",
    "marian",
    "mbart",
    "moss_transcribe_diarize",
    "pegasus",
    "plbart",
    "whisper",
)
#: Encoders and decoders, and models of images, or of sound, and text.
ENCODER_DECODERS = (
    "bart",
    "blenderbot",
    "blenderbot-small",
    "m2m_100",
    "marian",
    "mbart",
    "mt5",
    "pegasus",
    "plbart",
)
OF_IMAGES = (
    "aria",
    "aya_vision",
    "cohere2_vision",
    "cohere_compass",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "emu3",
    "exaone4_5",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "got_ocr2",
    "granite_docling",
    "hunyuan_vl",
    "hyperclovax_vision_v2",
    "idefics2",
    "idefics3",
    "internvl",
    "janus",
    "kimi_k25",
    "lighton_ocr",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "mistral3",
    "qianfan_ocr",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "video_llama_3",
    "video_llava",
    "vipllava",
)
OF_SOUND = (
    "audioflamingo3",
    "glmasr",
    "granite_speech",
    "granite_speech_plus",
    "moss_transcribe_diarize",
    "musicflamingo",
    "qwen2_audio",
    "qwen3_asr",
    "voxtral",
)
#: The first families, which `test_verify_all` tries with their options.
FIRST = (
    "bert",
    "bloom",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gpt-sw3",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "internlm3",
    "iquestcoder",
    "llama",
    "mistral",
    "mixtral",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
#: Facts of `cfg` that a run does not show, or a family's configuration says of what it does not do.
NOT_SEEN = {"_model", "default_prepend_bos", "decoder_start_token_id", "use_attn_scale"}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "bridge")


def is_proved_and_inferred(model: PreTrainedModel) -> None:
    """What is declared is proved, quickly, and has the points, tensors and facts of what is
    inferred.
    """
    declared, inferred = TransformerBridge(model), TransformerBridge(model, automatic="always")
    assert inferred.offered().inferred and not declared.offered().inferred
    assert set(inferred.hook_dict) == set(declared.hook_dict)
    # Some configurations have a name of their own for the number of positions.
    not_seen = NOT_SEEN | {"n_ctx"} if inferred.cfg.n_ctx is None else NOT_SEEN
    for field in fields(ModelConfig):
        if field.name not in not_seen:
            one, other = getattr(declared.cfg, field.name), getattr(inferred.cfg, field.name)
            assert (
                one == pytest.approx(other, rel=1e-4) if isinstance(one, float) else one == other
            ), field.name
    names = list(declared.hook_dict)
    tokens = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    more = {"decoder_input_ids": tokens[:, :7]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        caches = [
            each.run_with_cache(tokens, names_filter=names, **more)[1]
            for each in (declared, inferred)
        ]
    for name, hook in declared.hook_dict.items():
        assert inferred.hook_dict[name].point.aliases == hook.point.aliases, name
        torch.testing.assert_close(
            caches[1][name], caches[0][name], rtol=1e-5, atol=1e-5, equal_nan=True, msg=name
        )
    report = verify(declared, level="quick")
    assert report.passed, str(report)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_relative_is_proved_and_is_what_is_inferred(model_type: str) -> None:
    is_proved_and_inferred(tiny_model(model_type))


@pytest.mark.parametrize("model_type", OTHERS)
def test_a_declaration_is_proved_quickly(model_type: str) -> None:
    """`make slow` proves them in full, and infers them."""
    model = tiny_model(model_type)
    bridge = TransformerBridge(model)
    assert bridge.offered().inferred == any(
        older_than_declared(cls.__name__) for cls in type(model).__mro__
    )
    report = verify(bridge, level="quick")
    if wrong := known_error(model):
        assert wrong in str(report)
        pytest.xfail(wrong)
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("mbart", {"encoder_ffn_dim": 40, "decoder_layers": 3}),
        ("marian", {"scale_embedding": True}),
    ],
)
def test_an_encoder_and_a_decoder(model_type: str, fields: dict[str, object]) -> None:
    is_proved_and_inferred(tiny_model(model_type, "seq2seq", **fields))


def test_the_text_of_a_model_of_images_is_declared_by_its_own_adapter() -> None:
    is_proved_and_inferred(tiny_model("idefics3", "image_text"))
    of_its_own = tiny_model("llava", "image_text").config
    of_its_own.text_config = tiny_config("diffllama")
    with pytest.raises(
        UndeclaredOptionError, match="the model of a DiffLlamaConfig inside of it has no adapter"
    ):
        declaration_for(type(tiny_model("llava", "image_text"))(of_its_own))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "task"),
    [
        *((name, "seq2seq") for name in (*ENCODER_DECODERS, *OF_SOUND)),
        *((name, "image_text") for name in OF_IMAGES),
    ],
)
def test_every_one_of_two_stacks_or_of_more_than_text(model_type: str, task: Task) -> None:
    is_proved_and_inferred(tiny_model(model_type, task))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OTHERS)
def test_every_relative_is_proved_and_is_what_is_inferred(model_type: str) -> None:
    is_proved_and_inferred(tiny_model(model_type))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*SAMPLE, *OTHERS])
def test_every_relative_is_proved_in_full(model_type: str) -> None:
    report = verify(TransformerBridge(tiny_model(model_type)))
    assert report.passed, str(report)


@pytest.mark.slow
def test_these_are_all() -> None:
    # BlenderbotSmall's adapter is for an encoder and a decoder; of its decoder alone all is
    # inferred.
    left_out = {*CANNOT_BE_BUILT, "transformer_bridge_native", "blenderbot-small"}
    found = {name for name in {*types()} - left_out if has_declaration(tiny_model(name))}
    assert found == {*SAMPLE, *OTHERS, *FIRST}


def test_heads_in_groups_of_their_own() -> None:
    """CodeGen has four groups of heads whatever their number: with four heads, its layout is
    another's, too.
    """
    is_proved_and_inferred(tiny_model("codegen", n_head=8))


def test_latent_values_of_another_width() -> None:
    """As wide as the keys' columns that are not rotated, they would lie in turn with these."""
    is_proved_and_inferred(tiny_model("deepseek_v3", v_head_dim=12))


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("falcon", {"multi_query": False, "parallel_attn": False}),
        ("flint", {"decoder_sparse_step": 1, "mlp_only_layers": [0]}),
        ("laguna", {"moe_routed_scaling_factor": 1.5}),
        ("laguna", {"num_attention_heads_per_layer": [4, 8]}),
        ("stablelm", {"use_parallel_residual": True}),
        ("vaultgemma", {"final_logit_softcapping": 2.0}),
        (
            "deepseek_v2",
            {
                "topk_method": "group_limited_greedy",
                "n_group": 2,
                "topk_group": 1,
                "n_shared_experts": 2,
            },
        ),
    ],
)
def test_options_that_change_what_is_declared(model_type: str, fields: dict[str, object]) -> None:
    is_proved_and_inferred(tiny_model(model_type, **fields))


def test_layers_that_rotate_more_than_others() -> None:
    kinds = ["full_attention", "sliding_attention"]
    bridge = TransformerBridge(
        tiny_model("laguna", layer_types=kinds, num_attention_heads_per_layer=[4, 8])
    )
    report = verify(bridge)
    assert report.passed and not bridge.offered().inferred, str(report)


#: Fields of configurations that say nothing of what one run without labels computes.
_NO_OPTIONS = {
    "use_cache",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "is_decoder",
    "is_encoder_decoder",
    "chunk_size_feed_forward",
    "tie_word_embeddings",
}
#: Other values of what is no flag, by the name of the field.
_VALUES: dict[str, tuple[object, ...]] = {
    "clip_qkv": (0.1,),
    "attn_logit_softcapping": (2.0, None),
    "final_logit_softcapping": (2.0, None),
    "sliding_window": (4, None),
    "n_group": (2,),
    "q_lora_rank": (None,),
    "num_key_value_heads": (4, 1),
    "head_dim": (12,),
    "v_head_dim": (16,),
    "first_k_dense_replace": (0, 2),
    "num_dense_layers": (0, 2),
    "n_shared_experts": (0, 2),
    "num_shared_experts": (0, 2),
    "shared_intermediate_size": (0, 16),
    "decoder_sparse_step": (1, 2),
    "moe_layer_interval": (1, 2),
    "moe_num_shared_experts": (0, 2),
    "mlp_only_layers": ([0], []),
    "hidden_act": ("relu",),
    "activation_function": ("relu",),
}


def variants(config: PreTrainedConfig) -> Iterator[dict[str, object]]:
    """One field of a configuration changed at a time: flags, factors, and what else decides between
    layouts.
    """
    for name, value in vars(config).items():
        if name in _NO_OPTIONS or name.startswith("_"):
            continue
        if isinstance(value, bool):
            yield {name: not value}
        elif (
            isinstance(value, float)
            and value
            and ("scal" in name or "multiplier" in name or "factor" in name)
        ):
            yield {name: value * 1.5}
        elif name in ("mlp_layer_types", "layer_types") and isinstance(value, list):
            yield {name: value[::-1]}
        for other in _VALUES.get(name, ()):
            if other != value:
                yield {name: other}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*SAMPLE, *OTHERS])
def test_any_option_is_declared_or_left_to_inference(model_type: str) -> None:
    """With one option changed, what is declared is proved; or the declaration says that it is not
    for that.
    """
    config, tried = tiny_config(model_type), 0
    text = config.get_text_config()
    for fields_changed in variants(text):
        try:
            if text is config:
                model = tiny_model(model_type, **fields_changed)
            else:
                model = tiny_model(
                    model_type, text_config=type(text)(**{**text.to_dict(), **fields_changed})
                )
            model(torch.arange(3, 14)[None])
        except (
            StrictDataclassError,
            ValueError,
            TypeError,
            RuntimeError,
            IndexError,
            KeyError,
            ZeroDivisionError,
        ):
            continue  # transformers has no such model
        try:
            declaration_for(model)
        except UndeclaredOptionError:
            tried += 1
            continue
        report = verify(TransformerBridge(model), level="quick")
        assert report.passed, f"{fields_changed}: {report}"
        tried += 1
    assert tried, model_class(model_type)


def test_falcons_own_linear_layer_has_plain_weights() -> None:
    """It is torch's layer in another order of rounding: once its weights were refused as those of
    LoRA.
    """
    bridge = TransformerBridge(tiny_model("falcon", bias=True))
    part, layer = bridge.blocks[1].mlp, bridge.core.transformer.h[1].mlp.dense_4h_to_h
    assert torch.equal(part.W_out, layer.weight.T) and torch.equal(part.b_out, layer.bias)
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        before = bridge(tokens).log_softmax(-1)
        bridge.process_weights()
        torch.testing.assert_close(bridge(tokens).log_softmax(-1), before, rtol=1e-4, atol=1e-4)
    assert set(bridge.cfg.processed.values()) == {"done"}
