"""What a run needs of a bridge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxtyping import Float, Integer
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapters.config import ModelConfig
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.listener import HookFunction
from bridge.hooks.names import Names, NamesFilter
from bridge.wiring.wiring import Wiring

#: What a run takes: a text, texts, tokens ``[pos]`` or ``[batch, pos]`` (a tensor, or lists of ids), or embeddings
#: ``[batch, pos, d_model]``; or a mapping of the model's arguments, as a tokenizer gives it.
Input = str | Sequence[Any] | Mapping[str, Any] | NDArray[Any] | Integer[Tensor, "..."] | Float[Tensor, "..."]
#: Which hook point (a name, an alias, a function of the name) gets which function.
HookSpec = tuple[NamesFilter | HookPoint, HookFunction]


class TextBatch(Protocol):
    """Texts as tokens.

    Attributes:
        tokens: ``[batch, pos]``.
        mask: ``[batch, pos]``, 1 for tokens and 0 for padding; None when nothing is padded.
    """

    @property
    def tokens(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor | None: ...


class RunnableBridge(Protocol):
    """A bridge, as a run needs it."""

    original_model: nn.Module
    core: PreTrainedModel
    cfg: ModelConfig
    names: Names
    wiring: Wiring
    block_paths: list[str]
    block_output: tuple[int | None, int]
    no_layer_runs: str
    refuses_silent_hooks: bool

    def select_hooks(self, names: NamesFilter | HookPoint) -> list[HookPoint]:
        """The hook points that a filter chooses."""

    def batch_of(self, texts: Sequence[str], prepend_bos: bool | None, padding_side: str | None) -> TextBatch:
        """Texts as tokens, padded to one length."""

    def to_single_str_token(self, token: int) -> str:
        """The text of one token."""
