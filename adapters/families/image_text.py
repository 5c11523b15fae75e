"""Models of images, or of sound, and text: their text model is declared by its own adapter."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, language_part
from adapters.registry import declaration_of, register
from adapters.views import Affine

#: Where the text model stands in the base model: there, in those of them that have its head outside.
_LANGUAGE_MODEL = (
    "Aria", "AudioFlamingo3", "CohereCompass", "DeepseekVL", "DeepseekVLHybrid", "Exaone4_5_", "Glm46V", "Glm4v",
    "Glm4vMoe", "GlmAsr", "GlmOcr", "GotOcr2", "HunYuanVL", "HyperCLOVAXVisionV2", "InternVL", "Janus", "Kimi_K25",
    "LightOnOcr", "Llava", "LlavaNext", "LlavaNextVideo", "LlavaOnevision", "Mistral3", "MossTranscribeDiarize",
    "MusicFlamingo", "QianfanOCR", "Qwen2Audio", "Qwen2VL", "Qwen2_5_VL", "Qwen3ASR", "Qwen3VL", "Qwen3VLMoe",
    "VibeVoiceAsr", "VideoLlama3", "VideoLlava", "VipLlava", "Voxtral",
)  # fmt: skip
#: The same, of which the output layer leaves out the factor that the text model by itself multiplies its logits with.
_WITHOUT_FACTOR = ("AyaVision", "Cohere2Vision", "GraniteSpeech", "GraniteSpeechPlus")
_TEXT_MODEL = ("Emu3", "GraniteDocling", "Idefics2", "Idefics3", "SmolVLM")


@register(*(f"{name}ForConditionalGeneration" for name in _LANGUAGE_MODEL))
def with_language_model(config: PreTrainedConfig) -> Architecture:
    return language_part(declaration_of(config.get_text_config()), "language_model")


@register(*(f"{name}ForConditionalGeneration" for name in _TEXT_MODEL))
def with_text_model(config: PreTrainedConfig) -> Architecture:
    return language_part(declaration_of(config.get_text_config()), "text_model")


@register(*(f"{name}ForConditionalGeneration" for name in _WITHOUT_FACTOR))
def without_factor(config: PreTrainedConfig) -> Architecture:
    declared = with_language_model(config)
    return replace(declared, readout=replace(declared.readout, output_transform=Affine()))
