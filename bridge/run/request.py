"""What a user asks of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bridge.run.encoding import unpacked
from bridge.run.protocol import Input


@dataclass(slots=True)
class Request:
    """An input, how it is taken, and which layers run. The fields are arguments of `TransformerBridge.forward`.

    Attributes:
        input: text, texts, tokens ``[pos]`` or ``[batch, pos]``, or embeddings ``[batch, pos, d_model]``; for a model
            whose first blocks read images or sound, these, or the decoder's tokens. A mapping of arguments, and
            what is given by the names of the model, is taken apart; None: images or sound are given by their name.
        prepend_bos, padding_side: for text.
        attention_mask: ``[batch, pos]``, 1 for tokens and 0 for padding.
        start_at_layer, stop_at_layer: the layers between which the model runs.
        model_kwargs: further arguments of the model.
    """

    input: Input | None
    prepend_bos: bool | None = None
    padding_side: str | None = None
    attention_mask: Any = None  # an array becomes a tensor
    start_at_layer: int | None = None
    stop_at_layer: int | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.input, Tensor | str | list):
            self.input, self.attention_mask, self.model_kwargs = unpacked(
                self.input, self.attention_mask, self.model_kwargs
            )
