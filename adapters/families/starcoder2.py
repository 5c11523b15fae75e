"""StarCoder 2, and other Llamas with layer norms and without gates."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Projection
from adapters.families.llama import UNGATED
from adapters.families.shapes.llama import llama_like
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, NormKind


def starcoder2(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, norm=LAYER_NORM, mlp=MLP("mlp", up=Projection("c_fc"), down="c_proj"))


def jais2(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, norm=LAYER_NORM, mlp=UNGATED)


def nemotron(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, norm=NormKind("layer", offset=1.0), mlp=UNGATED)
