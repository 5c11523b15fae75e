"""Parts that compute something of their own: clamped and normed queries, x0 mixed in, one
projection for a block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.adapters.unknown_classes.parts import (
    D_HEAD,
    D_MLP,
    D_MODEL,
    D_VOCAB,
    N_HEADS,
    N_LAYERS,
    Attention,
    CausalModel,
    Decoder,
    DecoderLayer,
    GatedMLP,
    Rms,
    by_head,
    causal,
    mixed,
    repeated,
    rotated,
)
from tests.adapters.unknown_classes.shown import at, outside


class MptAttention(nn.Module):
    """MPT's own file: one projection, clamped, norms of all queries and all keys, ALiBi."""

    def __init__(self, layer: int, clip: float | None, normed: bool) -> None:
        super().__init__()
        self.layer, self.clip_qkv, self.normed = layer, clip, normed
        self.Wqkv, self.out_proj = (
            nn.Linear(D_MODEL, 3 * D_MODEL, bias=False),
            nn.Linear(D_MODEL, D_MODEL, bias=False),
        )
        if normed:
            self.q_ln, self.k_ln = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).chunk(3, -1)
        q, k, v = (
            at(self.layer, f"attn.hook_{name}", by_head(each)).flatten(2)
            for name, each in zip("qkv", (q, k, v), strict=True)
        )
        if self.clip_qkv:
            q, k, v = (each.clamp(-self.clip_qkv, self.clip_qkv) for each in (q, k, v))
        if self.normed:
            q, k = self.q_ln(q), self.k_ln(k)
        q, k, v = (by_head(each).transpose(1, 2) for each in (q, k, v))
        places = (
            torch.arange(1 - x.shape[1], 1.0) * (2.0 ** -torch.arange(1.0, N_HEADS + 1))[:, None]
        )
        scores = causal(q @ k.transpose(-1, -2) / D_HEAD**0.5 + places[:, None])
        pattern = at(
            self.layer,
            "attn.hook_pattern",
            at(self.layer, "attn.hook_attn_scores", scores).softmax(-1),
        )
        z = at(self.layer, "attn.hook_z", (pattern @ v).transpose(1, 2))
        return self.out_proj(z.flatten(2))


class PlainMLP(nn.Module):
    """Two layers and GELU."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.up_proj, self.down_proj = (
            layer,
            nn.Linear(D_MODEL, D_MLP),
            nn.Linear(D_MLP, D_MODEL),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(
            at(
                self.layer,
                "mlp.hook_post",
                nn.functional.gelu(at(self.layer, "mlp.hook_pre", self.up_proj(x))),
            )
        )


def mpt(clip: float | None, normed: bool) -> type[nn.Module]:
    class Mpt(CausalModel):
        def base(self) -> nn.Module:
            return Decoder(
                [
                    DecoderLayer(i, MptAttention(i, clip, normed), PlainMLP(i))
                    for i in range(N_LAYERS)
                ]
            )

    return Mpt


MptClipped, MptNormed, MptBoth = mpt(2.5, False), mpt(None, True), mpt(2.5, True)


def rms(x: Tensor) -> Tensor:
    """A norm without weights."""
    return nn.functional.rms_norm(x, (x.shape[-1],))


class NanoAttention(Attention):
    """Queries and keys are normed behind their rotation, by a function."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            by_head(self.q_proj(x)),
            by_head(self.k_proj(x), self.n_kv),
            by_head(self.v_proj(x), self.n_kv),
        )
        return self.o_proj(mixed(self.layer, q, k, v, lambda x: rms(rotated(x))))


class NanoMLP(nn.Module):
    """Two layers and a squared ReLU."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.c_fc, self.c_proj = (
            nn.Linear(D_MODEL, D_MLP, bias=False),
            nn.Linear(D_MLP, D_MODEL, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        post = nn.functional.relu(at(self.layer, "mlp.hook_pre", self.c_fc(x))).square()
        return self.c_proj(at(self.layer, "mlp.hook_post", post))


class NanoBlock(nn.Module):
    """Norms are functions."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.attn, self.mlp = layer, NanoAttention(layer), NanoMLP(layer)

    def forward(self, x: Tensor) -> Tensor:
        x = at(self.layer, "hook_resid_pre", x)
        x = at(self.layer, "hook_resid_mid", x + at(self.layer, "hook_attn_out", self.attn(rms(x))))
        return at(
            self.layer, "hook_resid_post", x + at(self.layer, "hook_mlp_out", self.mlp(rms(x)))
        )


class Nanochat(nn.Module):
    """The normed embedding is mixed in before each block, and logits are capped. No interface of
    Hugging Face's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(D_VOCAB, D_MODEL),
                "h": nn.ModuleList(map(NanoBlock, range(N_LAYERS))),
            }
        )
        self.lm_head = nn.Linear(D_MODEL, D_VOCAB, bias=False)
        self.resid_lambdas, self.x0_lambdas = (
            nn.Parameter(torch.ones(N_LAYERS)),
            nn.Parameter(torch.zeros(N_LAYERS)),
        )

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        x = x0 = rms(self.transformer["wte"](idx))
        for i, block in enumerate(self.transformer["h"]):
            x = block(self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0)
        logits = outside("unembed.hook_out", self.lm_head(rms(x)))
        return 15 * torch.tanh(logits / 15)


class PalmBlock(nn.Module):
    """One projection makes queries, one head of keys, one of values, and both inputs of the gate;
    one norm.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.widths = layer, (D_MODEL, D_HEAD, D_HEAD, 2 * D_MLP)
        self.norm = nn.LayerNorm(D_MODEL)
        self.fused_attn_ff_proj = nn.Linear(D_MODEL, sum(self.widths), bias=False)
        self.attn_out, self.ff_out = (
            nn.Linear(D_MODEL, D_MODEL, bias=False),
            nn.Linear(D_MLP, D_MODEL, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = at(self.layer, "hook_resid_pre", x)
        q, k, v, ff = self.fused_attn_ff_proj(self.norm(x)).split(self.widths, -1)
        z = mixed(self.layer, by_head(q), by_head(k, 1), by_head(v, 1), rotated)
        up, gate = ff.chunk(2, -1)
        gate, up = at(self.layer, "mlp.hook_pre", gate), at(self.layer, "mlp.hook_pre_linear", up)
        post = at(self.layer, "mlp.hook_post", nn.functional.silu(gate) * up)
        attn, mlp = (
            at(self.layer, "hook_attn_out", self.attn_out(z)),
            at(self.layer, "hook_mlp_out", self.ff_out(post)),
        )
        return at(self.layer, "hook_resid_post", x + (attn + mlp))


class Palm(nn.Module):
    """Blocks that add to themselves, in an `nn.Sequential` with embedding, norm and output
    layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(D_VOCAB, D_MODEL),
            *map(PalmBlock, range(N_LAYERS)),
            nn.LayerNorm(D_MODEL),
            nn.Linear(D_MODEL, D_VOCAB, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return outside("unembed.hook_out", self.net(x))


class ScaledLayer(DecoderLayer):
    """MiniCPM's: what is added has a factor."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, factor = at(self.layer, "hook_resid_pre", hidden_states), 1.4 / N_LAYERS**0.5
        x = x + at(self.layer, "hook_attn_out", self.self_attn(self.input_layernorm(x)) * factor)
        x = at(self.layer, "hook_resid_mid", x)
        x = x + at(self.layer, "hook_mlp_out", self.mlp(self.post_attention_layernorm(x)) * factor)
        return at(self.layer, "hook_resid_post", x)


class MiniCPM(CausalModel):
    """Factors of the embedding, of what is added, and before the output layer."""

    def base(self) -> nn.Module:
        class Model(Decoder):
            def forward(self, input_ids: Tensor) -> Tensor:
                x = outside("hook_embed", self.embed_tokens(input_ids) * 3.0)
                for layer in self.layers:
                    x = layer(x)
                return outside("ln_final.hook_out", self.norm(x)) / 2.0

        return Model([ScaledLayer(i, Attention(i), GatedMLP(i)) for i in range(N_LAYERS)])


class InternAttention(nn.Module):
    """InternLM 2's: each group of queries with its key and value, one after the other."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.wqkv, self.wo = (
            layer,
            nn.Linear(D_MODEL, 8 * D_HEAD, bias=False),
            nn.Linear(D_MODEL, D_MODEL, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        made = self.wqkv(x).unflatten(-1, (2, 4, D_HEAD))
        q, k, v = made[:, :, :, :2].flatten(2, 3), made[:, :, :, 2], made[:, :, :, 3]
        return self.wo(mixed(self.layer, q, k, v, rotated))


class InternLM(CausalModel):
    """InternLM 2."""

    def base(self) -> nn.Module:
        return Decoder([DecoderLayer(i, InternAttention(i), GatedMLP(i)) for i in range(N_LAYERS)])


class OpenElmAttention(nn.Module):
    """OpenELM's: each layer has numbers of heads of its own, a fused projection, and a norm of each
    head's queries.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.n, self.n_kv = layer, 2 + 2 * layer, 1 + layer
        self.qkv_proj = nn.Linear(D_MODEL, (self.n + 2 * self.n_kv) * D_HEAD, bias=False)
        self.q_norm, self.k_norm, self.out_proj = (
            Rms(D_HEAD),
            Rms(D_HEAD),
            nn.Linear(self.n * D_HEAD, D_MODEL, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            x.transpose(1, 2)
            for x in (
                by_head(self.qkv_proj(x), self.n + 2 * self.n_kv)
                .transpose(1, 2)
                .split([self.n, self.n_kv, self.n_kv], 1)
            )
        )
        q, k, v = (
            at(self.layer, f"attn.hook_{name}", x) for name, x in zip("qkv", (q, k, v), strict=True)
        )
        q = at(self.layer, "attn.hook_rot_q", rotated(self.q_norm(q)))
        k = at(self.layer, "attn.hook_rot_k", rotated(self.k_norm(k)))
        made = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            repeated(k, self.n).transpose(1, 2),
            repeated(v, self.n).transpose(1, 2),
            is_causal=True,
        )
        return self.out_proj(at(self.layer, "attn.hook_z", made.transpose(1, 2)).flatten(2))


class OpenELM(CausalModel):
    """OpenELM."""

    def base(self) -> nn.Module:
        return Decoder([DecoderLayer(i, OpenElmAttention(i), GatedMLP(i)) for i in range(N_LAYERS)])


class BaichuanHead(nn.Module):
    """Baichuan 2's output layer, whose rows are made one long."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(D_VOCAB, D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, nn.functional.normalize(self.weight))


class Baichuan(CausalModel):
    """Baichuan 2: a fused projection, and that head."""

    def base(self) -> nn.Module:
        class Packed(nn.Module):
            def __init__(self, layer: int) -> None:
                super().__init__()
                self.layer, self.W_pack, self.o_proj = (
                    layer,
                    nn.Linear(D_MODEL, 3 * D_MODEL, bias=False),
                    nn.Linear(D_MODEL, D_MODEL, bias=False),
                )

            def forward(self, x: Tensor) -> Tensor:
                q, k, v = self.W_pack(x).unflatten(-1, (3, D_MODEL)).unbind(-2)
                return self.o_proj(mixed(self.layer, by_head(q), by_head(k), by_head(v), rotated))

        self.lm_head = BaichuanHead()
        return Decoder([DecoderLayer(i, Packed(i), GatedMLP(i)) for i in range(N_LAYERS)])

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = BaichuanHead()
