"""What a lens needs of a bridge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from adapters.architecture import Architecture
from adapters.config import ModelConfig
from bridge.hooks.hook_point import HookPoint
from bridge.run.positions import PosSlice
from bridge.run.protocol import Input, TextBatch


class Readable(Protocol):
    """A bridge whose residual stream is read.

    Attributes:
        original_model: the model, with what wraps it.
        core: the Hugging Face model.
        cfg: the facts about it.
        architecture: what its adapter declares.
    """

    original_model: nn.Module
    core: PreTrainedModel
    architecture: Architecture
    cfg: ModelConfig

    @property
    def hook_dict(self) -> Mapping[str, HookPoint]:
        """The hook points, by name."""

    def __call__(self, input: Tensor, *, start_at_layer: int) -> Tensor:
        """Runs the model from a layer on: its logits."""

    def run_with_cache(
        self,
        input: Input,
        *,
        names_filter: Sequence[str],
        pos_slice: PosSlice = None,
        attention_mask: Tensor | None = None,
        return_type: str | None = "logits",
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Runs the model: its logits, and the activations of these names."""

    def batch_of(
        self, texts: Sequence[str], prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> TextBatch:
        """Texts as tokens, padded to one length."""
