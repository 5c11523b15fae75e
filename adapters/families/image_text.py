"""Models of images, or of sound, and text: their text model is declared by its own adapter."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, language_part
from adapters.registry import declaration_of
from adapters.views import Affine


def with_language_model(config: PreTrainedConfig) -> Architecture:
    """The text model stands in the base model, and its head outside of it."""
    return language_part(declaration_of(config.get_text_config()), "language_model")


def with_text_model(config: PreTrainedConfig) -> Architecture:
    """The same, with another name for it."""
    return language_part(declaration_of(config.get_text_config()), "text_model")


def without_factor(config: PreTrainedConfig) -> Architecture:
    """The same, without the factor that the text model by itself multiplies its logits with."""
    declared = with_language_model(config)
    return replace(declared, readout=replace(declared.readout, output_transform=Affine()))
