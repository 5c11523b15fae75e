"""Models of images, or of sound, and text: their text model is declared by its own adapter."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, language_part
from adapters.registry import declaration_of
from adapters.views import Affine


def with_language_model(config: PreTrainedConfig) -> Architecture:
    """Declare a model whose base model holds the text model, with its head outside of it."""
    return language_part(declaration_of(config.get_text_config()), "language_model")


def with_text_model(config: PreTrainedConfig) -> Architecture:
    """Declare the same as `with_language_model`, with the text model under another name."""
    return language_part(declaration_of(config.get_text_config()), "text_model")


def without_factor(config: PreTrainedConfig) -> Architecture:
    """Declare the same, without the logit factor of the text model."""
    declared = with_language_model(config)
    return replace(declared, readout=replace(declared.readout, output_transform=Affine()))
