"""BART, and other encoders and decoders that have the names of its modules."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.bart import bart_like
from adapters.registry import only


def bart(config: PreTrainedConfig) -> Architecture:
    return bart_like(config, on_stream=True, final=False, embed_norm=True)


def blenderbot_small(config: PreTrainedConfig) -> Architecture:
    # Its decoder norms the tokens and then adds the positions: alone, that is no sum that a norm reads.
    only(config, is_encoder_decoder=True, scale_embedding=False)
    return bart(config)


def marian(config: PreTrainedConfig) -> Architecture:
    return bart_like(config, on_stream=True, final=False, embed_norm=False, scales=True)


def mbart(config: PreTrainedConfig) -> Architecture:
    return bart_like(config, on_stream=False, final=True, embed_norm=True)


def m2m_100(config: PreTrainedConfig) -> Architecture:
    return bart_like(config, on_stream=False, final=True, embed_norm=False)


def pegasus(config: PreTrainedConfig) -> Architecture:
    return bart_like(config, on_stream=False, final=True, embed_norm=False, scales=True)
