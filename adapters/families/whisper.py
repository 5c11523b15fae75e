"""Whisper, and Speech2Text: an encoder of sound, and a decoder that writes what it hears."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.bart import bart_like


def whisper(config: PreTrainedConfig) -> Architecture:
    hears = config.is_encoder_decoder  # or its decoder alone, as a language model
    found = bart_like(config, on_stream=False, final=True, embed_norm=False, hears=hears)
    # Its tokenizer puts what begins a transcript before a text.
    values = {**found.config_values, "n_ctx": config.max_target_positions, "default_prepend_bos": False}
    return replace(found, readout=replace(found.readout, path="proj_out"), config_values=values)


def speech_to_text(config: PreTrainedConfig) -> Architecture:
    found = bart_like(config, on_stream=False, final=True, embed_norm=False, scales=True, hears=True)
    return replace(found, config_values={**found.config_values, "n_ctx": config.max_target_positions})
