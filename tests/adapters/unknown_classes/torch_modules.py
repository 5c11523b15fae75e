"""Language models of torch's `MultiheadAttention` and `TransformerEncoderLayer`, and what these
compute, by hand.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.adapters.unknown_classes.parts import (
    D_MLP,
    D_MODEL,
    D_VOCAB,
    N_CTX,
    N_HEADS,
    N_LAYERS,
    by_head,
    mixed,
)
from tests.adapters.unknown_classes.shown import at, outside


def attended(layer: int, attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """What `MultiheadAttention` returns, by hand: ``[batch, pos, d_model]``."""
    made = nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = (by_head(each) for each in made.chunk(3, -1))
    return nn.functional.linear(
        mixed(layer, q, k, v), attention.out_proj.weight, attention.out_proj.bias
    )


class MultiheadBlock(nn.Module):
    """A block around torch's attention."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.attention = nn.MultiheadAttention(D_MODEL, N_HEADS, batch_first=True)
        self.norm_1, self.norm_2 = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
        self.feed_forward = nn.Sequential(
            nn.Linear(D_MODEL, D_MLP), nn.GELU(), nn.Linear(D_MLP, D_MODEL)
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.norm_1(x)
        h, _ = self.attention(h, h, h, attn_mask=mask, need_weights=False)
        x = x + h
        return x + self.feed_forward(self.norm_2(x))

    def by_hand(self, x: Tensor) -> Tensor:
        """The same, shown."""
        x = at(self.layer, "hook_resid_pre", x)
        x = at(
            self.layer,
            "hook_resid_mid",
            x
            + at(self.layer, "hook_attn_out", attended(self.layer, self.attention, self.norm_1(x))),
        )
        first, act, last = self.feed_forward
        post = at(
            self.layer, "mlp.hook_post", act(at(self.layer, "mlp.hook_pre", first(self.norm_2(x))))
        )
        return at(self.layer, "hook_resid_post", x + at(self.layer, "hook_mlp_out", last(post)))


class Multihead(nn.Module):
    """Tokens, learned positions, blocks, a norm and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(D_VOCAB, D_MODEL), nn.Embedding(N_CTX, D_MODEL)
        self.blocks = nn.ModuleList(MultiheadBlock(i) for i in range(N_LAYERS))
        self.norm, self.head = nn.LayerNorm(D_MODEL), nn.Linear(D_MODEL, D_VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def by_hand(self, tokens: Tensor) -> Tensor:
        """The same, shown."""
        x = outside("hook_embed", self.tokens(tokens)) + self.positions(
            torch.arange(tokens.shape[1])
        )
        for block in self.blocks:
            x = block.by_hand(x)
        return outside("unembed.hook_out", self.head(self.norm(x)))


class EncoderLayers(nn.Module):
    """torch's tutorial of language models: an encoder of `TransformerEncoderLayer` with a causal
    mask.

    Args:
        first: norms stand before the parts, and not on the stream.
    """

    def __init__(self, first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            D_MODEL,
            N_HEADS,
            D_MLP,
            dropout=0.1,
            activation="relu",
            batch_first=True,
            norm_first=first,
        )
        self.first = first
        self.embedding, self.position = nn.Embedding(D_VOCAB, D_MODEL), nn.Embedding(N_CTX, D_MODEL)
        self.transformer_encoder = nn.TransformerEncoder(
            layer, N_LAYERS, enable_nested_tensor=False
        )
        self.linear = nn.Linear(D_MODEL, D_VOCAB)

    def forward(self, src: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1])
        x = self.embedding(src) * D_MODEL**0.5 + self.position.weight[: src.shape[1]]
        return self.linear(self.transformer_encoder(x, mask))

    def by_hand(self, src: Tensor) -> Tensor:
        """The same, shown."""
        x = (
            outside("hook_embed", self.embedding(src) * D_MODEL**0.5)
            + self.position.weight[: src.shape[1]]
        )
        for i, block in enumerate(self.transformer_encoder.layers):
            x = self._block(i, block, x)
        return outside("unembed.hook_out", self.linear(x))

    def _block(self, i: int, block: nn.Module, x: Tensor) -> Tensor:
        def fed(x: Tensor) -> Tensor:
            post = at(i, "mlp.hook_post", at(i, "mlp.hook_pre", block.linear1(x)).relu())
            return at(i, "hook_mlp_out", block.linear2(post))

        x = at(i, "hook_resid_pre", x)
        if self.first:
            x = at(
                i,
                "hook_resid_mid",
                x + at(i, "hook_attn_out", attended(i, block.self_attn, block.norm1(x))),
            )
            return at(i, "hook_resid_post", x + fed(block.norm2(x)))
        x = block.norm1(
            at(i, "hook_resid_mid", x + at(i, "hook_attn_out", attended(i, block.self_attn, x)))
        )
        return at(
            i, "hook_normalized_resid_post", block.norm2(at(i, "hook_resid_post", x + fed(x)))
        )


class EncoderLayersAfter(EncoderLayers):
    """Norms on the stream."""

    def __init__(self) -> None:
        super().__init__(first=False)


class EncoderLayersFirst(EncoderLayers):
    """Norms before the parts."""

    def __init__(self) -> None:
        super().__init__(first=True)
