"""What the rooms below the facade ask of a bridge, whichever class it is of: `StudiedBridge`.

A run asks for more, which is of higher rooms: see `RunnableBridge` in `bridge.run.inputs`. The class that users see
derives from both, so that what is asked for is what it has.
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
    """A bridge, as those need it who look at its activations and weights.

    Attributes:
        original_model: the model, with what wraps it.
        core: the Hugging Face model.
        architecture: what its adapter declares.
        cfg: the facts about the model.
        names: its hook points by name and alias.
        tokenizer: its tokenizer, if it has one.
        counts_norm_weights: whether attribution to logits counts the final norm's weight.
        block_paths, block_output: where its blocks are, and which element of what they return is the stream.
        no_layer_runs: why it cannot start or stop at a layer; empty where it can.
        refuses_silent_hooks: a run is refused in which a hook of a ``with`` statement would never be called.
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
        """The hook points by canonical name."""
        raise NotImplementedError

    @property
    def weights(self) -> Weights:
        """The canonical weights."""
        raise NotImplementedError

    @property
    def W_U(self) -> Tensor:
        """The unembedding, ``[d_model, d_vocab]``."""
        raise NotImplementedError

    def select_hooks(self, names: NamesFilter | HookPoint) -> list[HookPoint]:
        """The hook points that a filter chooses."""
        raise NotImplementedError

    def to_tokens(self, input: Any, *, truncate: bool = True) -> Tensor:
        """A text as tokens, ``[1, pos]``."""
        raise NotImplementedError

    def to_single_token(self, string: str) -> int:
        """The id of a text that is one token."""
        raise NotImplementedError

    def to_single_str_token(self, int_token: int) -> str:
        """The text of one token."""
        raise NotImplementedError

    def run_with_cache(
        self, input: Any = None, *, names_filter: NamesFilter | HookPoint = None, **kwargs: Any
    ) -> tuple[Any, Mapping[str, Tensor]]:
        """Runs the model: what it returns, and the activations of these names."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        raise NotImplementedError
