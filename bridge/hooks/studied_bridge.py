"""`StudiedBridge`: the interface of a bridge that the packages below the facade use.

Running a model needs more, from higher packages: see `RunnableBridge` in `bridge.run.inputs`. The
public class derives from both, so that it provides what both declare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapters.architecture import Architecture
from adapters.config import ModelConfig
from adapters.weights import Weights
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import Names, NamesFilter


class StudiedBridge:
    """The interface of a bridge for code that reads its activations and weights.

    Attributes:
        original_model: the model, with any wrappers.
        core: the Hugging Face model.
        architecture: the declaration of its adapter.
        cfg: the facts about the model.
        names: its hook points by name and alias.
        tokenizer: its tokenizer, if it has one.
        counts_norm_weights: whether attribution to logits counts the final norm's weight.
        block_paths, block_output: the paths of its blocks, and the index of the stream in their
            output.
        no_layer_runs: why a run cannot start or stop at a layer; empty if it can.
        refuses_silent_hooks: whether a run raises an error if a hook of a ``with`` statement would
            never be called.
    """

    original_model: nn.Module
    core: PreTrainedModel
    architecture: Architecture
    cfg: ModelConfig
    names: Names
    tokenizer: PreTrainedTokenizerBase | None
    counts_norm_weights: bool
    block_paths: list[str]
    block_output: tuple[int | None, int]
    no_layer_runs: str
    refuses_silent_hooks: bool

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """Return the hook points by canonical name."""
        raise NotImplementedError

    @property
    def weights(self) -> Weights:
        """Return the canonical weights."""
        raise NotImplementedError

    @property
    def W_U(self) -> Tensor:
        """Return the unembedding, ``[d_model, d_vocab]``."""
        raise NotImplementedError

    def select_hooks(self, names: NamesFilter | HookPoint) -> list[HookPoint]:
        """Return the hook points that a filter selects."""
        raise NotImplementedError

    def to_tokens(self, input: Any, *, truncate: bool = True) -> Tensor:
        """Convert a text to tokens, ``[1, pos]``."""
        raise NotImplementedError

    def to_single_token(self, string: str) -> int:
        """Return the id of a text that is one token."""
        raise NotImplementedError

    def to_answer_token(self, answer: str) -> int:
        """Return the id of an answer that is one token; warn if it lacks a space."""
        raise NotImplementedError

    def to_single_str_token(self, int_token: int) -> str:
        """Return the text of one token."""
        raise NotImplementedError

    def run_with_cache(
        self, input: Any = None, *, names_filter: NamesFilter | HookPoint = None, **kwargs: Any
    ) -> tuple[Any, Mapping[str, Tensor]]:
        """Run the model; return its output, and the activations at these hook points."""
        raise NotImplementedError

    def call_part(self, name: str, input: Any, **kwargs: Any) -> Tensor:
        """Call a part of the model by itself."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        raise NotImplementedError
