"""The module that is given to transformers' exporters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from bridge.export.attention import SeesAttention, attention_as_called
from bridge.export.example import Example
from bridge.export.executorch import ForExecutorch


class Exportable(Protocol):
    """A program, as export needs it.

    Attributes:
        model: the module objects.
        inputs: an example of each declared input.
        captured, changed: names of hook points.
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    captured: tuple[str, ...]

    @property
    def axes(self) -> dict[str, str]:
        """The axes of what it captures, by name."""

    @property
    def one_by_one(self) -> bool:
        """Numbers of rows depend on the values."""

    def attention_under_way(self) -> SeesAttention | None:
        """What sees the attention that a tapped module is computing now."""

    @property
    def changed(self) -> tuple[str, ...]:
        """The hook points with interventions."""

    @property
    def core(self) -> PreTrainedModel:
        """The Hugging Face model among the module objects."""

    @property
    def config(self) -> PreTrainedConfig:
        """Its configuration."""

    def generating(self, inputs: Mapping[str, object]) -> PreTrainedModel:
        """What runs it in `generate`."""

    def run_lowered(self, input_ids: Tensor | None, inputs: Mapping[str, Tensor], given: Example) -> Example:
        """The run itself."""


class NamedArguments(nn.Module):
    """A program whose every argument has a name, and nothing else of the program.

    Args:
        program: the program.
        format: the name of the format that it is traced for.
    """

    def __init__(self, program: Exportable, format: str) -> None:
        super().__init__()
        self.model = program.model
        self.config = program.config
        self.training = program.model.training
        self._run, self._declared, self._format = program.run_lowered, tuple(program.inputs), format
        self._attention = program.attention_under_way

    def forward(self, **given: Any) -> Example:
        """Runs the program."""
        inputs = {name: given.pop(name) for name in self._declared}
        tokens = given.pop("input_ids", None)
        if self._format == "dynamo":  # attention stays torch's own
            return self._run(tokens, inputs, given)
        others = ForExecutorch() if self._format == "executorch" else nullcontext()
        with attention_as_called(self._attention), others:
            return self._run(tokens, inputs, given)


@contextmanager
def restoring_model(core: PreTrainedModel, experts: str | None) -> Iterator[None]:
    """Puts back what exporters change in a model: its mode, what wants gradients, how experts are computed.

    Args:
        core: the Hugging Face model among a program's module objects.
        experts: how experts are to be computed meanwhile; None: as they are.
    """
    wanted = [(parameter, parameter.requires_grad) for parameter in core.parameters()]
    before: Any = core.get_experts_implementation()
    settable = experts is not None and core._can_set_experts_implementation()
    try:
        if settable and experts is not None:
            core.set_experts_implementation(experts)
        with torch.no_grad():
            yield
    finally:
        if settable:
            core.set_experts_implementation(before)
        for parameter, wants in wanted:
            parameter.requires_grad_(wants)
