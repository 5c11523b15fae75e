"""Attention without `softmax`: by hand, as the exponential of `log_softmax`, and with sigmoids in
its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.adapters.unknown_classes.parts import (
    N_LAYERS,
    Attention,
    CausalModel,
    Decoder,
    DecoderLayer,
    GatedMLP,
    by_head,
    repeated,
)
from tests.adapters.unknown_classes.shown import at


def by_hand(scores: Tensor) -> Tensor:
    """A softmax."""
    shares = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return shares / shares.sum(dim=-1, keepdim=True)


def of_logarithms(scores: Tensor) -> Tensor:
    """A softmax."""
    return torch.log_softmax(scores, dim=-1).exp()


def sigmoids(scores: Tensor) -> Tensor:
    """No softmax: each share by itself."""
    return torch.sigmoid(scores - math.log(scores.shape[-1]))


class OtherAttention(Attention):
    """Attention with one of these."""

    def __init__(self, layer: int, shares: Callable[[Tensor], Tensor]) -> None:
        super().__init__(layer)
        self.shares = shares

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            by_head(self.q_proj(x)),
            by_head(self.k_proj(x), self.n_kv),
            by_head(self.v_proj(x), self.n_kv),
        )
        q, k, v = (
            at(self.layer, f"attn.hook_{name}", x) for name, x in zip("qkv", (q, k, v), strict=True)
        )
        k, v = repeated(k, q.shape[2]), repeated(v, q.shape[2])
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / math.sqrt(q.shape[-1])
        mask = torch.full(scores.shape[-2:], torch.finfo(scores.dtype).min).triu(1)
        scores = at(self.layer, "attn.hook_attn_scores", scores + mask)
        pattern = at(self.layer, "attn.hook_pattern", self.shares(scores))
        z = at(self.layer, "attn.hook_z", (pattern @ v.transpose(1, 2)).transpose(1, 2))
        return self.o_proj(z.flatten(2))


def _with(shares: Callable[[Tensor], Tensor]) -> type[nn.Module]:
    class Model(CausalModel):
        def base(self) -> nn.Module:
            return Decoder(
                [DecoderLayer(i, OtherAttention(i, shares), GatedMLP(i)) for i in range(N_LAYERS)]
            )

    return Model


ByHand, OfLogarithms, Sigmoids = map(_with, (by_hand, of_logarithms, sigmoids))
