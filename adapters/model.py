"""`map_model`: what a bridge needs to know about one model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from adapters.architecture import Architecture
from adapters.builder import hook_points
from adapters.config import ModelConfig, model_config
from adapters.paths import base_path, core_path, join
from adapters.points import Point
from adapters.registry import declaration_for


@dataclass(frozen=True)
class ModelMap:
    """What plays which part in one model.

    Attributes:
        core: the Hugging Face model, without what wraps it (PEFT, `torch.compile`).
        architecture: what its adapter declares.
        cfg: its configuration.
        points: its hook points, in the order of the computation.
        block_paths: the paths of its blocks.
        block_output: which element of a block's output is the residual stream, and how many there are.
        no_layer_runs: why a run cannot start or stop at a layer; "" where it can.
    """

    core: nn.Module
    architecture: Architecture
    cfg: ModelConfig
    points: list[Point]
    block_paths: list[str]
    block_output: tuple[int | None, int]
    no_layer_runs: str = ""


def map_model(model: nn.Module, declared: Architecture | None = None) -> ModelMap:
    """What plays which part in a Hugging Face model.

    Args:
        model: a model of a supported family.
        declared: its declaration; None: that of its class.

    Raises:
        UnsupportedModelError: there is no adapter for its class.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from adapters import map_model
        >>> map_model(GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=10))).block_paths
        ['transformer.h.0', 'transformer.h.1']
    """
    base = base_path(model)
    core = model.get_submodule(core_path(model))
    architecture = declaration_for(core) if declared is None else declared
    if architecture.refuse is not None:
        architecture.refuse(model)
    cfg = model_config(architecture, core, model.get_submodule(base))
    stack = architecture.stack
    return ModelMap(
        core=core,
        architecture=architecture,
        cfg=cfg,
        points=hook_points(architecture, model, cfg),
        block_paths=[join(base, stack.path, str(i)) for i in range(cfg.n_layers)],
        block_output=(stack.output_key, stack.output_length),
        no_layer_runs=architecture.no_layer_runs,
    )
