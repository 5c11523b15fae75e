"""Language models in plain torch: tokens go in, logits come out, and nothing else is said of
them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.adapters.unknown_classes.parts import (
    D_HEAD,
    D_MLP,
    D_MODEL,
    D_VOCAB,
    N_CTX,
    N_HEADS,
    N_LAYERS,
    Rms,
    by_head,
    gated,
    mixed,
    rotated,
)
from tests.adapters.unknown_classes.shown import at, outside


class NanoGPTAttention(nn.Module):
    """nanoGPT's: one fused projection, and torch's kernel."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.c_attn, self.c_proj = (
            layer,
            nn.Linear(D_MODEL, 3 * D_MODEL),
            nn.Linear(D_MODEL, D_MODEL),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (by_head(each) for each in self.c_attn(x).split(D_MODEL, dim=2))
        q, k, v = (
            at(self.layer, f"attn.hook_{name}", x).transpose(1, 2)
            for name, x in zip("qkv", (q, k, v), strict=True)
        )
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(
            at(self.layer, "attn.hook_z", z.transpose(1, 2)).contiguous().view(x.shape)
        )


class NanoGPTMLP(nn.Module):
    """Two layers and GELU."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.c_fc, self.gelu, self.c_proj = (
            layer,
            nn.Linear(D_MODEL, D_MLP),
            nn.GELU(),
            nn.Linear(D_MLP, D_MODEL),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(
            at(self.layer, "mlp.hook_post", self.gelu(at(self.layer, "mlp.hook_pre", self.c_fc(x))))
        )


class NanoGPTBlock(nn.Module):
    """A block."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.ln_1, self.ln_2 = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
        self.attn, self.mlp = NanoGPTAttention(layer), NanoGPTMLP(layer)

    def forward(self, x: Tensor) -> Tensor:
        x = at(self.layer, "hook_resid_pre", x)
        x = at(
            self.layer,
            "hook_resid_mid",
            x + at(self.layer, "hook_attn_out", self.attn(self.ln_1(x))),
        )
        return at(
            self.layer,
            "hook_resid_post",
            x + at(self.layer, "hook_mlp_out", self.mlp(self.ln_2(x))),
        )


class NanoGPT(nn.Module):
    """nanoGPT: a tied output layer; logits and a loss come out, of all positions where it is given
    targets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(D_VOCAB, D_MODEL),
                "wpe": nn.Embedding(N_CTX, D_MODEL),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(map(NanoGPTBlock, range(N_LAYERS))),
                "ln_f": nn.LayerNorm(D_MODEL),
            }
        )
        self.lm_head = nn.Linear(D_MODEL, D_VOCAB, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts = self.transformer
        embedded = outside("hook_embed", parts["wte"](idx))
        x = parts["drop"](
            embedded
            + outside(
                "hook_pos_embed", parts["wpe"](torch.arange(idx.shape[1])).expand(*idx.shape, -1)
            )
        )
        for block in parts["h"]:
            x = block(x)
        logits = outside(
            "unembed.hook_out", self.lm_head(outside("ln_final.hook_out", parts["ln_f"](x)))
        )
        return logits, (
            None
            if targets is None
            else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )


class Head(nn.Module):
    """One head of attention, a module of its own."""

    def __init__(self, layer: int, head: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (
            nn.Linear(D_MODEL, D_HEAD, bias=False) for _ in range(3)
        )
        self.register_buffer("tril", torch.ones(N_CTX, N_CTX).tril())

    def forward(self, x: Tensor) -> Tensor:
        k, q = self.key(x), self.query(x)
        weights = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        weights = weights.masked_fill(
            self.tril[: x.shape[1], : x.shape[1]] == 0, float("-inf")
        ).softmax(-1)
        return weights @ self.value(x)


class SeparateHeads(nn.Module):
    """The lecture's: heads in a list, their results joined."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(layer, h) for h in range(N_HEADS))
        self.proj = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class LectureBlock(nn.Module):
    """A block."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.sa = layer, SeparateHeads(layer)
        self.ffwd = nn.Sequential(nn.Linear(D_MODEL, D_MLP), nn.ReLU(), nn.Linear(D_MLP, D_MODEL))
        self.ln1, self.ln2 = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        x = at(self.layer, "hook_resid_pre", x)
        x = at(
            self.layer, "hook_resid_mid", x + at(self.layer, "hook_attn_out", self.sa(self.ln1(x)))
        )
        up, act, down = self.ffwd
        post = at(self.layer, "mlp.hook_post", act(at(self.layer, "mlp.hook_pre", up(self.ln2(x)))))
        return at(self.layer, "hook_resid_post", x + at(self.layer, "hook_mlp_out", down(post)))


class CalledWhole(LectureBlock):
    """The same, which calls its `nn.Sequential` as it should."""

    def forward(self, x: Tensor) -> Tensor:
        x = at(self.layer, "hook_resid_pre", x)
        x = at(
            self.layer, "hook_resid_mid", x + at(self.layer, "hook_attn_out", self.sa(self.ln1(x)))
        )
        return at(
            self.layer,
            "hook_resid_post",
            x + at(self.layer, "hook_mlp_out", self.ffwd(self.ln2(x))),
        )


class Lecture(nn.Module):
    """A language model of a lecture: blocks in an `nn.Sequential`; it returns logits and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding_table, self.position_embedding_table = (
            nn.Embedding(D_VOCAB, D_MODEL),
            nn.Embedding(N_CTX, D_MODEL),
        )
        self.blocks = nn.Sequential(*(CalledWhole(i) for i in range(N_LAYERS)))
        self.ln_f, self.lm_head = nn.LayerNorm(D_MODEL), nn.Linear(D_MODEL, D_VOCAB)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, None]:
        x = outside("hook_embed", self.token_embedding_table(idx)) + self.position_embedding_table(
            torch.arange(idx.shape[1])
        )
        x = self.ln_f(self.blocks(x))
        return outside("unembed.hook_out", self.lm_head(x)), None


class HundredAttention(nn.Module):
    """Three projections, eager."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.to_out(
            mixed(
                self.layer,
                by_head(self.to_q(x)),
                by_head(self.to_k(x)),
                by_head(self.to_v(x)),
                rotated,
            )
        )


class HundredBlock(nn.Module):
    """A block, whose parts know their norms."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.attention = layer, HundredAttention(layer)
        self.w1, self.w2, self.w3 = (
            nn.Linear(D_MODEL, D_MLP),
            nn.Linear(D_MLP, D_MODEL),
            nn.Linear(D_MODEL, D_MLP),
        )
        self.before, self.between = Rms(), Rms()

    def forward(self, x: Tensor) -> Tensor:
        x = at(self.layer, "hook_resid_pre", x)
        x = at(
            self.layer,
            "hook_resid_mid",
            x + at(self.layer, "hook_attn_out", self.attention(self.before(x))),
        )
        h = self.between(x)
        return at(
            self.layer,
            "hook_resid_post",
            x + at(self.layer, "hook_mlp_out", self.w2(gated(self.layer, self.w1(h), self.w3(h)))),
        )


class HundredLines(nn.Module):
    """A language model in a hundred lines: as Llama, with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = (
            nn.Embedding(D_VOCAB, D_MODEL),
            nn.ModuleList(map(HundredBlock, range(N_LAYERS))),
        )
        self.norm, self.out = Rms(), nn.Linear(D_MODEL, D_VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = outside("hook_embed", self.table(tokens))
        for block in self.blocks:
            x = block(x)
        return outside("unembed.hook_out", self.out(outside("ln_final.hook_out", self.norm(x))))


class AttentionOnly(nn.Module):
    """Two layers of attention, no MLP and no norm: a toy of the field's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = (
            nn.Embedding(D_VOCAB, D_MODEL),
            nn.Parameter(torch.empty(N_CTX, D_MODEL)),
        )
        self.layers = nn.ModuleList(HundredAttention(i) for i in range(2))
        self.unembed = nn.Linear(D_MODEL, D_VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = outside("hook_embed", self.embed(tokens)) + self.positions[: tokens.shape[1]]
        for i, layer in enumerate(self.layers):
            x = at(i, "hook_resid_pre", x)
            x = at(i, "hook_resid_post", x + at(i, "hook_attn_out", layer(x)))
        return outside("unembed.hook_out", self.unembed(x))
