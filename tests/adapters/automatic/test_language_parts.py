"""The language parts of models of images and text: found from text alone, and run with images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adapters import verify
from adapters.inputs import sample_inputs
from bridge import TransformerBridge
from tests.tiny_images import image_inputs
from tests.tiny_models import Task, tiny_model, types

TOKENS = torch.randint(9, 99, (2, 9), generator=torch.Generator().manual_seed(0))
#: Types whose language part is offered in full and proved.
FULL = (
    "aria",
    "aya_vision",
    "cohere2_vision",
    "cohere_compass",
    "cosmos3_edge",
    "cosmos3_omni",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "emu3",
    "exaone4_5",
    "florence2",
    "fuyu",
    "gemma3",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "glmga",
    "got_ocr2",
    "granite_docling",
    "hunyuan_vl",
    "hyperclovax_vision_v2",
    "idefics2",
    "idefics3",
    "internvl",
    "janus",
    "kimi_k25",
    "lfm2_vl",
    "lighton_ocr",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "minicpm_ocr",
    "minicpmv4_6",
    "minicpmv4_7",
    "mistral3",
    "molmo2",
    "ovis2",
    "paddleocr_vl",
    "paligemma",
    "pp_chart2table",
    "qianfan_ocr",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_omni_moe_thinker",
    "qwen3_vl",
    "qwen3_vl_moe",
    "shieldgemma2",
    "smolvlm",
    "unlimited_ocr",
    "video_llama_3",
    "video_llava",
    "vipllava",
)
#: One of each kind: where the text's base is, a declaration, positions in sections, a mixture,
#: another first position.
QUICK = ("aria", "gemma3", "idefics3", "llava", "paligemma", "qwen2_vl", "qwen3_vl_moe")


def is_whole(model_type: str, task: Task = "image_text") -> None:
    model = tiny_model(model_type, task)
    bridge = TransformerBridge(model)
    assert not bridge.offered().not_offered
    report = verify(bridge)
    assert report.passed, str(report)
    text = model.config.get_text_config()
    assert (bridge.cfg.d_model, bridge.cfg.n_layers) == (text.hidden_size, text.num_hidden_layers)
    with torch.no_grad():
        more = (
            {"decoder_input_ids": TOKENS}
            if model.config.get_text_config().is_encoder_decoder
            else {}
        )
        assert torch.equal(bridge(TOKENS, **more), model(TOKENS, **more).logits)


@pytest.mark.parametrize("model_type", QUICK)
def test_the_language_part_is_whole_and_proved(model_type: str) -> None:
    is_whole(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*FULL} - {*QUICK}))
def test_every_language_part(model_type: str) -> None:
    assert model_type in types("image_text")
    is_whole(model_type)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", ["audioflamingo3", "granite_speech", "musicflamingo", "qwen2_audio", "voxtral"]
)
def test_language_parts_of_models_of_sound(model_type: str) -> None:
    is_whole(model_type, "seq2seq")


@pytest.fixture(scope="module", params=["gemma3", "llava", "qwen2_audio", "qwen2_vl"])
def seeing(request: pytest.FixtureRequest) -> tuple[TransformerBridge, Tensor, dict[str, Any]]:
    """A bridge, prompts with images (or sound) in them, and these."""
    task: Task = "seq2seq" if request.param == "qwen2_audio" else "image_text"
    return TransformerBridge(tiny_model(request.param, task)), *image_inputs(request.param)


Seeing = tuple[TransformerBridge, Tensor, dict[str, Any]]


def test_what_stands_beside_the_text_is_named(seeing: Seeing) -> None:
    bridge, _, _ = seeing
    offered = bridge.offered()
    tower, *_ = offered.modules_without_points
    assert tower in ("model.audio_tower", "model.vision_tower", "model.visual")
    assert f"has no hook points: {tower} ({offered.modules_without_points[tower]})" in str(offered)
    assert not any(
        tower in point.site.path for point in (hook.point for hook in bridge.hook_dict.values())
    )


def test_a_run_with_images_is_the_models_own(seeing: Seeing) -> None:
    bridge, tokens, images = seeing
    with torch.no_grad():
        own = bridge.original_model(tokens, **images).logits
        assert torch.equal(bridge(tokens, **images), own)
        logits, cache = bridge.run_with_cache(tokens, **images)
        others = {name: x.flip(0) for name, x in images.items() if x.is_floating_point()}
        other = bridge.original_model(tokens, **images | others).logits
    torch.testing.assert_close(logits, own)
    assert not torch.equal(other, own)  # it does look at them
    assert cache["blocks.1.attn.hook_pattern"].shape[-1] == tokens.shape[1]


def test_the_stream_of_a_run_with_images(seeing: Seeing) -> None:
    """Against the model's own hidden states, and plain torch hooks on the text's blocks."""
    bridge, tokens, images = seeing
    model, path = bridge.original_model, bridge.block_paths[1]
    seen: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    try:
        with torch.no_grad():
            own = model(tokens, **images, output_hidden_states=True).hidden_states
    finally:
        handle.remove()
    with torch.no_grad():
        _, cache = bridge.run_with_cache(tokens, **images)
    torch.testing.assert_close(cache["blocks.0.hook_resid_pre"], own[0])
    torch.testing.assert_close(cache["blocks.1.hook_resid_pre"], seen[0])
    assert not torch.allclose(
        cache["hook_embed"], own[0]
    )  # images took the places of their tokens in between


def test_a_hook_on_the_text_changes_the_answer(seeing: Seeing) -> None:
    """As the same edit with a plain torch hook on the block."""
    bridge, tokens, images = seeing
    model = bridge.original_model

    def plain(module: torch.nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> object:
        return output * 0.5 if isinstance(output, Tensor) else (output[0] * 0.5, *output[1:])

    with torch.no_grad():
        handle = model.get_submodule(bridge.block_paths[0]).register_forward_hook(plain)
        try:
            expected = model(tokens, **images).logits
        finally:
            handle.remove()
        edited = bridge.run_with_hooks(
            tokens, fwd_hooks=[("blocks.0.hook_resid_post", lambda x, hook: x * 0.5)], **images
        )
        plain_logits = bridge(tokens, **images)
    torch.testing.assert_close(edited, expected)
    assert not torch.allclose(edited, plain_logits)


def test_what_images_put_into_the_stream_is_a_term(seeing: Seeing) -> None:
    bridge, tokens, images = seeing
    with torch.no_grad():
        _, cache = bridge.run_with_cache(tokens, **images)
        _, text = bridge.run_with_cache(TOKENS)
    stack, labels = cache.decompose_resid(1, return_labels=True)
    assert labels == ["embed", "images", "0_attn_out", "0_mlp_out"]
    torch.testing.assert_close(stack.sum(0), cache["resid_pre", 1], rtol=1e-5, atol=1e-5)
    written = stack[1].abs().amax(-1) > 1e-5  # at the places of images, and nowhere else
    assert torch.equal(written, tokens == 5)
    assert text.decompose_resid(1, return_labels=True)[1] == ["embed", "0_attn_out", "0_mlp_out"]


def test_what_images_add_before_later_layers_is_a_term() -> None:
    """Qwen 3 VL adds inner features of its images to the stream between the blocks."""
    bridge, (tokens, images) = (
        TransformerBridge(tiny_model("qwen3_vl", "image_text")),
        image_inputs("qwen3_vl"),
    )
    with torch.no_grad():
        _, cache = bridge.run_with_cache(tokens, **images)
    stack, labels = cache.decompose_resid(return_labels=True)
    assert labels == [
        "embed",
        "images",
        "0_attn_out",
        "0_mlp_out",
        "1_images",
        "1_attn_out",
        "1_mlp_out",
    ]
    torch.testing.assert_close(
        stack.sum(0), cache["blocks.1.hook_resid_post"], rtol=1e-5, atol=1e-5
    )
    assert torch.equal(stack[4].abs().amax(-1) > 1e-5, tokens == 5)


def test_padding_before_images_is_left_to_the_model() -> None:
    """Where the model finds the positions of an image's parts, those of a row of tokens are not put
    in their place.
    """
    model = tiny_model("qwen2_vl", "image_text")
    bridge, (tokens, images) = TransformerBridge(model), image_inputs("qwen2_vl")
    tokens = torch.cat([torch.zeros(2, 3, dtype=tokens.dtype), tokens], 1)
    mask = torch.ones_like(tokens)
    mask[:, :3] = 0
    images = images | {"mm_token_type_ids": (tokens == 5).int()}
    with torch.no_grad():
        own = model(tokens, attention_mask=mask, **images).logits
        assert torch.equal(bridge(tokens, attention_mask=mask, **images), own)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        other = model(tokens, attention_mask=mask, position_ids=positions, **images).logits
    assert not torch.allclose(own[:, 3:], other[:, 3:], atol=1e-5)


def test_blocks_that_look_at_images_alone_are_left_out_by_name() -> None:
    """Mllama's text model skips them."""
    bridge = TransformerBridge(tiny_model("mllama"))
    assert bridge.offered().not_offered == {"blocks.1": "it does not run with text alone"}
    assert "blocks.2.attn.hook_z" in bridge.hook_dict and not any(
        n.startswith("blocks.1.") for n in bridge.hook_dict
    )


def test_blocks_that_look_at_images_alone_run_with_these() -> None:
    """With an image to be looked at, they are found; without one, a run does not have their
    points.
    """
    bridge = TransformerBridge(tiny_model("mllama", "image_text"))
    report = verify(bridge)
    assert report.passed, str(report)
    arguments = sample_inputs(bridge.core)
    tokens = arguments.pop("input_ids")
    with torch.no_grad():
        own = bridge.original_model(tokens, **arguments, output_hidden_states=True)
        logits, cache = bridge.run_with_cache(tokens, **arguments)
        _, text = bridge.run_with_cache(TOKENS)
        assert torch.equal(bridge(TOKENS), bridge.original_model(TOKENS).logits)
    torch.testing.assert_close(logits, own.logits)
    torch.testing.assert_close(cache["blocks.2.hook_resid_pre"], own.hidden_states[2])
    torch.testing.assert_close(
        cache["blocks.1.hook_resid_pre"] + cache["blocks.1.hook_attn_out"],
        cache["blocks.1.hook_resid_mid"],
    )
    assert "blocks.2.hook_resid_pre" in text and not any(
        name.startswith("blocks.1.") for name in text
    )
    with pytest.raises(RuntimeError, match=r"blocks\.1\.hook_attn_out"):
        bridge.run_with_cache(TOKENS, names_filter="blocks.1.hook_attn_out")


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_it_is_found_where_gradients_are_off(
    off: type[torch.no_grad] | type[torch.inference_mode],
) -> None:
    model = tiny_model("smolvlm", "image_text")
    with off():
        bridge = TransformerBridge(model)
    assert list(bridge.hook_dict) == list(TransformerBridge(model).hook_dict)
