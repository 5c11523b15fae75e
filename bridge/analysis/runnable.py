"""What analyses that run the model need of a bridge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from bridge.analysis.requirements import AnalysedModel


class RunnableModel(AnalysedModel, Protocol):
    """A bridge that an analysis runs.

    Attributes:
        core: the Hugging Face model.
    """

    core: PreTrainedModel

    def __call__(self, input: Tensor, *, start_at_layer: int | None = None) -> Any:
        """Runs the model, from a layer on: its logits."""
        ...

    def run_with_cache(
        self, input: Tensor, *, names_filter: Sequence[str], pos_slice: int | None = None
    ) -> tuple[Any, Mapping[str, Tensor]]:
        """Runs the model: its logits, and the activations of these names."""
        ...

    def to_tokens(self, input: str, *, truncate: bool = True) -> Tensor:
        """A text as tokens, ``[1, pos]``."""
        ...
