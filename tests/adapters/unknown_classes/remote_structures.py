"""Structures that files of remote code have: latents by hand, shared values, differences of
patterns, fused gates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.adapters.unknown_classes.parts import (
    D_HEAD,
    D_MLP,
    D_MODEL,
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
    gated,
    mixed,
    rotated,
)
from tests.adapters.unknown_classes.shown import at, outside


def _model(layers: Any, decoder: type[nn.Module] = Decoder) -> type[nn.Module]:
    class Model(CausalModel):
        def base(self) -> nn.Module:
            return decoder([layers(i) for i in range(N_LAYERS)])

    return Model


class FusedMLP(nn.Module):
    """Gate and up of one layer: one behind the other, or in turn."""

    def __init__(self, layer: int, in_turn: bool) -> None:
        super().__init__()
        self.layer, self.in_turn = layer, in_turn
        self.gate_up, self.down = nn.Linear(D_MODEL, 2 * D_MLP), nn.Linear(D_MLP, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        made = self.gate_up(x)
        gate, up = (made[..., ::2], made[..., 1::2]) if self.in_turn else made.chunk(2, -1)
        return self.down(gated(self.layer, gate, up))


class AdjacentAttention(Attention):
    """Neighbouring columns turn together, of the first four."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            by_head(self.q_proj(x)),
            by_head(self.k_proj(x), self.n_kv),
            by_head(self.v_proj(x), self.n_kv),
        )
        return self.o_proj(mixed(self.layer, q, k, v, lambda x: rotated(x, 4, adjacent=True)))


Fused = _model(lambda i: DecoderLayer(i, AdjacentAttention(i), FusedMLP(i, in_turn=False)))
FusedInTurn = _model(lambda i: DecoderLayer(i, AdjacentAttention(i), FusedMLP(i, in_turn=True)))


class LatentAttention(nn.Module):
    """Queries, keys and values from latents; a rotated part of the key that all heads share."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.q_a, self.q_b = (
            nn.Linear(D_MODEL, 10, bias=False),
            nn.Linear(10, N_HEADS * (D_HEAD + 4), bias=False),
        )
        self.kv_a = nn.Linear(D_MODEL, 8 + 4, bias=False)
        self.kv_b = nn.Linear(8, N_HEADS * 2 * D_HEAD, bias=False)
        self.q_norm, self.kv_norm, self.o = (
            Rms(10),
            Rms(8),
            nn.Linear(N_HEADS * D_HEAD, D_MODEL, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        q = at(self.layer, "attn.hook_q", by_head(self.q_b(self.q_norm(self.q_a(x)))))
        latent, shared = self.kv_a(x).split([8, 4], -1)
        k, v = by_head(self.kv_b(self.kv_norm(latent))).chunk(2, -1)
        k, v = at(self.layer, "attn.hook_k", k), at(self.layer, "attn.hook_v", v)
        q = torch.cat([q[..., :D_HEAD], rotated(q[..., D_HEAD:])], -1)
        k = torch.cat([k, rotated(shared[:, :, None]).expand(-1, -1, N_HEADS, -1)], -1)
        scores = causal(q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / (D_HEAD + 4) ** 0.5)
        pattern = at(
            self.layer,
            "attn.hook_pattern",
            at(self.layer, "attn.hook_attn_scores", scores).softmax(-1),
        )
        return self.o(
            at(self.layer, "attn.hook_z", (pattern @ v.transpose(1, 2)).transpose(1, 2)).flatten(2)
        )


Latents = _model(lambda i: DecoderLayer(i, LatentAttention(i), GatedMLP(i)))


class ParallelLayer(DecoderLayer):
    """Both parts read the same stream, each through a norm of its own."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = at(self.layer, "hook_resid_pre", hidden_states)
        attn = at(self.layer, "hook_attn_out", self.self_attn(self.input_layernorm(x)))
        mlp = at(self.layer, "hook_mlp_out", self.mlp(self.post_attention_layernorm(x)))
        return at(self.layer, "hook_resid_post", x + attn + mlp)


class ScaledLogits(CausalModel):
    """Parallel blocks with two norms; logits times a number."""

    def base(self) -> nn.Module:
        return Decoder([ParallelLayer(i, Attention(i), GatedMLP(i)) for i in range(N_LAYERS)])

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None) -> Any:
        made = super().forward(input_ids)
        made.logits = made.logits * 0.0625
        return made


class CappedAttention(Attention):
    """Scores with a soft cap, which its configuration does not say."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            by_head(self.q_proj(x)),
            by_head(self.k_proj(x), self.n_kv),
            by_head(self.v_proj(x), self.n_kv),
        )
        return self.o_proj(
            mixed(
                self.layer, q, k, v, rotated, lambda scores: causal(5.0 * torch.tanh(scores / 5.0))
            )
        )


class SandwichLayer(nn.Module):
    """Norms before and behind each part."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.attn, self.mlp = layer, CappedAttention(layer), GatedMLP(layer)
        self.n1, self.n2, self.n3, self.n4 = Rms(), Rms(), Rms(), Rms()

    def forward(self, x: Tensor) -> Tensor:
        x = at(self.layer, "hook_resid_pre", x)
        x = at(
            self.layer,
            "hook_resid_mid",
            x + at(self.layer, "hook_attn_out", self.n2(self.attn(self.n1(x)))),
        )
        return at(
            self.layer,
            "hook_resid_post",
            x + at(self.layer, "hook_mlp_out", self.n4(self.mlp(self.n3(x)))),
        )


Sandwich = _model(SandwichLayer)


class SharedAttention(nn.Module):
    """Layers behind the first take its keys and values."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.q, self.o = nn.Linear(D_MODEL, D_MODEL), nn.Linear(D_MODEL, D_MODEL)
        if layer == 0:
            self.kv = nn.Linear(D_MODEL, 2 * D_MODEL)

    def forward(
        self, x: Tensor, shared: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q = at(self.layer, "attn.hook_q", by_head(self.q(x)))
        if shared is None:
            k, v = (by_head(each) for each in self.kv(x).chunk(2, -1))
            shared = at(self.layer, "attn.hook_k", k), at(self.layer, "attn.hook_v", v)
        k, v = shared
        scores = causal(q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / D_HEAD**0.5)
        pattern = at(
            self.layer,
            "attn.hook_pattern",
            at(self.layer, "attn.hook_attn_scores", scores).softmax(-1),
        )
        z = at(self.layer, "attn.hook_z", (pattern @ v.transpose(1, 2)).transpose(1, 2))
        return self.o(z.flatten(2)), shared


class SharedLayer(nn.Module):
    """A block that is given the keys and values of the first."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.attn, self.mlp, self.n1, self.n2 = (
            layer,
            SharedAttention(layer),
            GatedMLP(layer),
            Rms(),
            Rms(),
        )

    def forward(self, x: Tensor, shared: Any = None) -> Any:
        x = at(self.layer, "hook_resid_pre", x)
        made, shared = self.attn(self.n1(x), shared)
        x = at(self.layer, "hook_resid_mid", x + at(self.layer, "hook_attn_out", made))
        return (
            at(
                self.layer,
                "hook_resid_post",
                x + at(self.layer, "hook_mlp_out", self.mlp(self.n2(x))),
            ),
            shared,
        )


class SharingDecoder(Decoder):
    """Gives them on."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x, shared = outside("hook_embed", self.embed_tokens(input_ids)), None
        for layer in self.layers:
            x, shared = layer(x, shared)
        return outside("ln_final.hook_out", self.norm(x))


SharedValues = _model(SharedLayer, SharingDecoder)


class DifferentialAttention(nn.Module):
    """The difference of two patterns, of halves of each head's columns, and a norm of each head
    behind it.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.factor = layer, nn.Parameter(torch.tensor(0.3))
        self.q, self.k, self.v, self.o = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(4))
        self.norm = Rms(D_HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (by_head(each(x)).transpose(1, 2) for each in (self.q, self.k, self.v))
        one, two = (
            causal(a @ b.transpose(-1, -2) / 3**0.5).softmax(-1)
            for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        z = self.norm(((one - self.factor * two) @ v).transpose(1, 2))
        return self.o(z.flatten(2))


Differential = _model(lambda i: DecoderLayer(i, DifferentialAttention(i), GatedMLP(i)))


class ValueResidualAttention(nn.Module):
    """Values are mixed with those of the first layer."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.mixing = layer, nn.Parameter(torch.tensor(0.5))
        self.q, self.k, self.v, self.o = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(4))

    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = (by_head(each(x)) for each in (self.q, self.k, self.v))
        first = v if first is None else first
        v = v if first is v else self.mixing * v + (1 - self.mixing) * first
        q, k = rotated(q), rotated(k)
        pattern = causal(q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / D_HEAD**0.5).softmax(-1)
        return self.o((pattern @ v.transpose(1, 2)).transpose(1, 2).flatten(2)), first


class ValueResidualLayer(SharedLayer):
    """The same, of values alone."""

    def __init__(self, layer: int) -> None:
        super().__init__(layer)
        self.attn = ValueResidualAttention(layer)


ValueResidual = _model(ValueResidualLayer, SharingDecoder)


class TwoInTurn(Decoder):
    """Two blocks that run in turn, four in all."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = outside("hook_embed", self.embed_tokens(input_ids))
        for i in range(4):
            block = self.layers[i % 2]
            for module in block.modules():
                if hasattr(module, "layer"):
                    module.layer = i
            x = block(x)
        return outside("ln_final.hook_out", self.norm(x))


class TiedLayers(CausalModel):
    """Two blocks in turn."""

    def base(self) -> nn.Module:
        return TwoInTurn([DecoderLayer(i, Attention(i), GatedMLP(i)) for i in range(2)])
