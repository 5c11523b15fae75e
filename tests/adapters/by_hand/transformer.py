"""What HookedTransformer computes, written out by hand: the other side of the comparisons in this
folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: A weight (``[d_out, d_in]``; heads apart where there are heads) and a bias, or 0.
Linear = tuple[Tensor, Tensor | float]


@dataclass
class Model:
    """A model's weights, by the names of the parts, and what else decides its values.

    Attributes:
        linear: projections and embeddings.
        norm: weights and biases of norms.
        heads, kv_heads: of queries, and of keys and values.
        act: the activation function.
        gated: what an expert makes of its gate and of what stands beside it; None: ``act(gate) *
            pre``.
        eps: of all norms.
        centered: the norms are layer norms.
        scale: what scores are divided by.
        rotary: how many dimensions are rotated, and the base for each layer; None: no rotation.
        adjacent: neighbours are rotated together, not the two halves.
        windows: how many positions each layer sees; None: all.
        parallel: attention and MLP read the same.
        experts: how many experts are chosen, in the layers that have a router.
        by_logits: they are chosen by their logits, and the softmax is over those.
        shares_sum_to_one: the probabilities of the chosen ones are divided by their sum.
        sinks: each layer's attention sinks, ``[head]``.
        logit_cap: the soft cap of the logits; 0: none.
    """

    linear: dict[str, Linear]
    norm: dict[str, tuple[Tensor, Tensor | float]]
    layers: int
    heads: int
    kv_heads: int
    act: Callable[[Tensor], Tensor]
    eps: float
    centered: bool
    scale: float
    rotary: tuple[int, list[float]] | None = None
    adjacent: bool = False
    windows: list[int | None] = field(default_factory=lambda: [None, None])
    parallel: bool = False
    gated: Callable[[Tensor, Tensor], Tensor] | None = None
    experts: int = 0
    by_logits: bool = False
    shares_sum_to_one: bool = True
    sinks: list[Tensor] | None = None
    logit_cap: float = 0.0


class Run:
    """One run.

    Args:
        model: the model.
        tokens: ``[batch, pos]``.
        fine: give each head its own input and result, and the MLP its own.
        edits: by name, what an activation becomes wherever it is computed.

    Attributes:
        seen: each activation, by name, as often as it was computed (the norm before attention: for
            queries, keys and values in turn).
        logits: ``[batch, pos, d_vocab]``.
    """

    def __init__(
        self,
        model: Model,
        tokens: Tensor,
        fine: bool = False,
        edits: dict[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        self.model, self.fine, self.edits = model, fine, edits or {}
        self.seen: dict[str, list[Tensor]] = {}
        self.logits = self.run(tokens)

    def hook(self, name: str, x: Tensor) -> Tensor:
        # A new tensor, so that the gradient here is that of what reads this very activation.
        x = self.edits.get(name, torch.clone)(x)
        if x.requires_grad:
            x.retain_grad()
        elif x.is_floating_point():
            x.requires_grad_()  # an embedding: the graph starts here
        self.seen.setdefault(name, []).append(x)
        return x

    def apply(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.model.linear[name]
        return torch.einsum("...i,oi->...o", x, weight) + bias

    def normed(self, name: str, x: Tensor, centered: bool | None = None) -> Tensor:
        weight, bias = self.model.norm[name]
        centered = self.model.centered if centered is None else centered
        if centered:
            x = x - x.mean(-1, keepdim=True)
        x = x / self.hook(
            f"{name}.hook_scale", (x.square().mean(-1, keepdim=True) + self.model.eps).sqrt()
        )
        if centered:
            return self.hook(f"{name}.hook_normalized", x * weight + bias)
        return self.hook(f"{name}.hook_normalized", x) * weight

    def rotated(self, x: Tensor, layer: int) -> Tensor:
        """``[batch, pos, head, d_head]``: pairs of dimensions are complex numbers that turn with
        the position.
        """
        assert self.model.rotary is not None
        dim, bases = self.model.rotary
        turned, rest = x[..., :dim], x[..., dim:]
        pairs = (
            turned.unflatten(-1, (dim // 2, 2))
            if self.model.adjacent
            else turned.unflatten(-1, (2, -1)).mT
        )
        angle = torch.outer(
            torch.arange(x.shape[1]), bases[layer] ** (-torch.arange(0, dim, 2) / dim)
        ).to(x.dtype)
        number = (
            torch.view_as_complex(pairs.contiguous())
            * torch.polar(torch.ones_like(angle), angle)[:, None]
        )
        pairs = torch.view_as_real(number)
        return torch.cat([(pairs if self.model.adjacent else pairs.mT).flatten(-2), rest], dim=-1)

    def attention(self, x: Tensor, layer: int) -> Tensor:
        model, block = self.model, f"blocks.{layer}"
        made, inputs = {}, {}
        for letter in "qkv":
            heads = model.heads if letter == "q" else model.kv_heads
            if self.fine:
                inputs[letter] = self.hook(
                    f"{block}.hook_{letter}_input", x.unsqueeze(2).expand(-1, -1, heads, -1)
                )
            else:
                inputs[letter] = x
        inputs = {letter: self.normed(f"{block}.ln1", value) for letter, value in inputs.items()}
        for letter, value in inputs.items():
            weight, bias = model.linear[f"{block}.attn.{letter}"]
            pattern = "bphm,hdm->bphd" if self.fine else "bpm,hdm->bphd"
            made[letter] = self.hook(
                f"{block}.attn.hook_{letter}", torch.einsum(pattern, value, weight) + bias
            )
        q, k, v = made.values()
        if f"{block}.attn.q_norm" in model.norm:
            q, k = self.normed(f"{block}.attn.q_norm", q), self.normed(f"{block}.attn.k_norm", k)
        if model.rotary:
            q = self.hook(f"{block}.attn.hook_rot_q", self.rotated(q, layer))
            k = self.hook(f"{block}.attn.hook_rot_k", self.rotated(k, layer))
        groups = model.heads // model.kv_heads
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(groups, 2)) / model.scale
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        forbidden = (distance < 0) | (distance >= (model.windows[layer] or math.inf))
        scores = self.hook(
            f"{block}.attn.hook_attn_scores", scores.masked_fill(forbidden, -math.inf)
        )
        if model.sinks:
            sinks = model.sinks[layer].view(-1, 1, 1).expand(*scores.shape[:-1], 1)
            pattern = torch.cat([sinks, scores], dim=-1).softmax(-1)[..., 1:]
        else:
            pattern = scores.softmax(-1)
        pattern = self.hook(f"{block}.attn.hook_pattern", pattern)
        z = torch.einsum("bhqk,bkhd->bqhd", pattern, v.repeat_interleave(groups, 2))
        z = self.hook(f"{block}.attn.hook_z", z)
        weight, bias = model.linear[f"{block}.attn.o"]  # d_model head d_head
        result = torch.einsum("bphd,mhd->bphm", z, weight)
        if self.fine:
            result = self.hook(f"{block}.attn.hook_result", result)
        out = result.sum(2) + bias
        out = self.normed(f"{block}.ln1_post", out) if f"{block}.ln1_post" in model.norm else out
        return self.hook(f"{block}.hook_attn_out", out)

    def mlp(self, x: Tensor, block: str) -> Tensor:
        x = self.normed(f"{block}.ln2", self.hook(f"{block}.hook_mlp_in", x) if self.fine else x)
        name = f"{block}.mlp"
        out = (
            self.mixture(x, name)
            if f"{name}.router" in self.model.linear
            else self.feed_forward(x, name)
        )
        out = (
            self.normed(f"{block}.ln2_post", out) if f"{block}.ln2_post" in self.model.norm else out
        )
        return self.hook(f"{block}.hook_mlp_out", out)

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        if f"{name}.gate" in self.model.linear:
            pre = self.hook(f"{name}.hook_pre", self.apply(f"{name}.gate", x))
            post = self.model.act(pre) * self.hook(
                f"{name}.hook_pre_linear", self.apply(f"{name}.in", x)
            )
        else:
            post = self.model.act(self.hook(f"{name}.hook_pre", self.apply(f"{name}.in", x)))
        return self.apply(f"{name}.out", self.hook(f"{name}.hook_post", post))

    def mixture(self, x: Tensor, name: str) -> Tensor:
        logits = self.hook(f"{name}.hook_router_logits", self.apply(f"{name}.router", x))
        everyone = (
            logits
            if self.model.by_logits
            else self.hook(f"{name}.hook_expert_weights", logits.softmax(-1))
        )
        best, chosen = everyone.topk(self.model.experts, dim=-1)
        if self.model.by_logits:
            everyone = torch.zeros_like(logits).scatter(-1, chosen, best.softmax(-1))
            best = self.hook(f"{name}.hook_expert_weights", everyone).gather(-1, chosen)
        elif self.model.shares_sum_to_one:
            best = best / best.sum(-1, keepdim=True)
        weights = self.hook(f"{name}.hook_topk_weights", best)
        chosen = self.hook(f"{name}.hook_expert_indices", chosen)
        rows, share = x.flatten(0, 1), weights.flatten(0, 1)
        ranks, out = chosen.flatten(0, 1).T, torch.zeros_like(rows)
        for expert in range(logits.shape[-1]):
            at = f"{name}.experts.{expert}"
            rank, row = torch.where(ranks == expert)
            gate = self.hook(f"{at}.hook_gate", self.apply(f"{at}.gate", rows[row]))
            pre = self.hook(f"{at}.hook_pre", self.apply(f"{at}.in", rows[row]))
            post = self.model.gated(gate, pre) if self.model.gated else self.model.act(gate) * pre
            made = self.apply(f"{at}.out", self.hook(f"{at}.hook_post", post))
            out = out.index_add(0, row, made * share[row, rank].unsqueeze(-1))
        out = out.view_as(x)
        at = f"{name}.shared_expert"
        if f"{at}_gate" not in self.model.linear:
            return out
        shared = self.hook(f"{at}.hook_out", self.feed_forward(x, at))
        return (
            out + self.hook(f"{at}_gate.hook_out", self.apply(f"{at}_gate", x)).sigmoid() * shared
        )

    def run(self, tokens: Tensor) -> Tensor:
        model = self.model
        x = self.hook("hook_embed", model.linear["embed"][0][tokens])
        if "pos_embed" in model.linear:
            positions = model.linear["pos_embed"][0][: tokens.shape[1]]
            x = x + self.hook("hook_pos_embed", positions.expand(len(tokens), -1, -1))
        for layer in range(model.layers):
            block = f"blocks.{layer}"
            x = self.hook(f"{block}.hook_resid_pre", x)
            after = x + self.attention(x, layer)
            if not model.parallel:
                after = x = self.hook(f"{block}.hook_resid_mid", after)
            x = self.hook(f"{block}.hook_resid_post", after + self.mlp(x, block))
        logits = self.apply("unembed", self.normed("ln_final", x))
        return model.logit_cap * (logits / model.logit_cap).tanh() if model.logit_cap else logits
