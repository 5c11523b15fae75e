"""`anatomy`: what a bridge needs to know about one model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from adapters.architecture import Architecture, architecture_points
from adapters.config import ModelConfig, model_config
from adapters.paths import base_path, core_path, join
from adapters.points import Point
from adapters.registry import declaration_for


@dataclass(frozen=True)
class Anatomy:
    """A model's parts.

    Attributes:
        core: the Hugging Face model, without what wraps it (PEFT, `torch.compile`).
        architecture: what its adapter declares.
        cfg: the facts about it.
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


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of a Hugging Face model.

    Args:
        model: a model of a supported family.

    Raises:
        UnsupportedModelError: there is no adapter for its class.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from adapters import anatomy
        >>> anatomy(GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=10))).block_paths
        ['transformer.h.0', 'transformer.h.1']
    """
    core_at, base = core_path(model), base_path(model)
    core = model.get_submodule(core_at)
    architecture = declaration_for(core)
    cfg = model_config(architecture, core, model.get_submodule(base))
    return Anatomy(
        core=core,
        architecture=architecture,
        cfg=cfg,
        points=(architecture.points or architecture_points)(architecture, model, cfg),
        block_paths=[join(base, architecture.blocks, str(i)) for i in range(cfg.n_layers)],
        block_output=(architecture.block.output_key, architecture.block.output_length),
        no_layer_runs=architecture.no_layer_runs,
    )
