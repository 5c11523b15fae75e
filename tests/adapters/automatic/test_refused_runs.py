"""Models that no bridge is for, or that do not run on what is made up: refused with the reason,
left as they were.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from adapters import UnsupportedModelError, verify
from bridge import TransformerBridge

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def tiny(name: str) -> nn.Module:
    cls = getattr(transformers, name)
    return cls(cls.config_class(text_config=_TEXT, vision_config=_IMAGES, projection_dim=16)).eval()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", ["CLIPModel", "SiglipModel", "AltCLIPModel", "ChineseCLIPModel"])
def test_a_model_of_two_streams_that_never_meet(name: str, given: bool) -> None:
    model = tiny(name)
    inputs = (
        {"input_ids": torch.randint(3, 99, (3, 11)), "pixel_values": torch.randn(3, 3, 32, 32)}
        if given
        else None
    )
    with pytest.raises(
        UnsupportedModelError,
        match=rf"{name} compares texts with images or sound.* model\.text_model",
    ):
        TransformerBridge(model, inputs=inputs)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("part", ["text_model", "vision_model"])
@pytest.mark.parametrize("name", ["CLIPModel", "SiglipModel"])
def test_each_of_the_two_is_a_model(name: str, part: str) -> None:
    report = verify(TransformerBridge(getattr(tiny(name), part)))
    assert report.passed, str(report)


def test_a_run_that_fails_is_a_reason() -> None:
    model = tiny("Siglip2Model").vision_model
    with pytest.raises(
        UnsupportedModelError,
        match=r"does not run on pixel_values \(TypeError: .*spatial_shapes.*inputs=",
    ):
        TransformerBridge(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


_WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 61,
    "num_mel_bins": 8,
    "max_source_positions": 30,
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 2,
}


def test_part_of_a_class_with_an_adapter() -> None:
    """A part of Whisper's has none of the tokens of its adapter; its decoder alone needs what the
    bridge lacks.
    """
    whole = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**_WHISPER)
    ).eval()
    with pytest.raises(UnsupportedModelError, match=r"WhisperEncoder has no decoder\.embed_tokens"):
        TransformerBridge(whole.get_encoder(), automatic=False)
    with pytest.raises(
        UnsupportedModelError, match="so no hook point that was inferred for WhisperDecoder holds"
    ):
        TransformerBridge(whole.get_decoder())
