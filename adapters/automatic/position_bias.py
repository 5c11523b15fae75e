"""The table of a position bias that is added to the scores: the same in every row of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapters.automatic.attention import FoundAttention
from adapters.automatic.layouts import relative
from adapters.automatic.norms import tolerance


@dataclass(frozen=True, eq=False)
class FoundTable:
    """A table of position biases.

    Attributes:
        path: of the module, relative to the attention module.
        buckets: how many distances it tells apart.
        values: what it adds, ``[head, query, key]``.
    """

    path: str
    buckets: int
    values: Tensor


def find_table(attention: FoundAttention, before: FoundTable | None) -> FoundTable | None:
    """The table that what is added to the scores of an attention comes from; None where it has none.

    Args:
        attention: the attention.
        before: the table of a layer before it, which it may use, too.
    """
    bias = attention.bias()
    if bias is None:
        return None
    seen = (attention.softmax.pattern > 0).any(0)[..., : bias.shape[-1]]
    close = 30 * tolerance(attention.softmax.scores) * float(attention.softmax.scores.detach()[..., :1].abs().max() + 1)

    def adds(values: Tensor) -> bool:
        return values.shape == bias.shape and bool(((values - bias)[seen].abs() <= close).all())

    for call in attention.recording.calls:
        table = getattr(call.module, "weight", None)
        if not (attention.owner.holds(call) and isinstance(call.module, nn.Embedding) and isinstance(table, Tensor)):
            continue
        made = call.left[0].value.double()
        values = made.permute(2, 0, 1) if made.ndim == 3 else torch.zeros(0)
        if adds(values):
            return FoundTable(relative(call.path, attention.owner.path), table.shape[0], values)
    return before if before is not None and adds(before.values) else None
