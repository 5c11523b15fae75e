"""Where the heads lie in a tensor: in the columns of a projection, next to the batch, before the positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.views.base import Call, View, split


@dataclass(frozen=True, repr=False)
class Heads(View):
    """``... (head d_head) -> ... head d_head``."""

    n_heads: int
    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return split(x, self.n_heads)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.flatten(-2)


@dataclass(frozen=True, repr=False)
class Patches(View):
    """``batch d_model row column -> batch patch d_model``: row by row."""

    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.flatten(2).transpose(1, 2)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.transpose(1, 2).reshape(x.shape)


class Selected(View):
    """A part of a fused projection: `get` returns a view of its argument, which can be written to."""

    identity = False

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        whole = x.clone()
        self.get(whole, call).copy_(new)
        return whole


@dataclass(frozen=True)
class columns(Selected):
    """Columns `start` to `stop` of the last axis, split into heads where `n_heads` is given."""

    start: int
    stop: int
    n_heads: int | None = None

    def get(self, x: Tensor, call: Call) -> Tensor:
        part = x[..., self.start : self.stop]
        return part if self.n_heads is None else split(part, self.n_heads)


@dataclass(frozen=True)
class interleaved(Selected):
    """Part `index` of a projection laid out as ``(head part d_head)`` (GPT-NeoX, BLOOM)."""

    n_heads: int
    index: int
    parts: int = 3

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.unflatten(-1, (self.n_heads, self.parts, -1)).select(-2, self.index)


@dataclass(frozen=True)
class gathered(View):
    """Columns of the last axis in any order: ``rows`` has those of each head, or, if `flat`, one row for all."""

    rows: tuple[tuple[int, ...], ...]
    flat: bool = False
    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x[..., torch.tensor(self.rows[0] if self.flat else self.rows, device=x.device)]

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        whole = x.clone()
        whole[..., torch.tensor(self.rows[0] if self.flat else self.rows, device=x.device)] = new
        return whole


class OneHead(View):
    """``batch 1 pos d -> batch pos d``: a latent that is kept as one head of keys. Two axes stay as they are."""

    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.squeeze(1) if x.ndim == 4 else x

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.unsqueeze(1) if x.ndim == 4 else new


class HeadsFirst(View):
    """``batch head pos d_head -> batch pos head d_head`` (inside the attention interface)."""

    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.transpose(1, 2)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.transpose(1, 2)


@dataclass(frozen=True)
class HeadsOfBatch(View):
    """``(batch head) pos key_pos -> batch head pos key_pos``."""

    n_heads: int
    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.unflatten(0, (-1, self.n_heads))

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.flatten(0, 1)


@dataclass(frozen=True)
class Biased(View):
    """Heads of a projection with a bias that its module's parent adds: a parameter of the last source's module.

    Attributes:
        heads: how the projection's output shows them.
        name: of the parameter, ``(head d_head)``.
    """

    heads: View
    name: str
    identity = False
    contextual = True

    def _bias(self, like: Tensor, call: Call) -> Tensor:
        bias = call.sources[-1][0].get_parameter(self.name)
        return bias.view(like.shape[-2:]).to(like)

    def get(self, x: Tensor, call: Call) -> Tensor:
        made = self.heads.get(x, call)
        return made + self._bias(made, call)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return self.heads.put(x, new - self._bias(new, call), call)
