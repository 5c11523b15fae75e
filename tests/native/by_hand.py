"""A transformer written out by hand, in HookedTransformer's terms: the other side of the
comparisons in this folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bridge.native import NativeConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    # Its constant has ten digits only.
    "gelu_fast": lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * x * x))),
    "silu": F.silu,
    "solu": lambda x: x * x.softmax(-1),
    "solu_ln": lambda x: x * x.softmax(-1),
}


class ByHand:
    """Runs the model of a configuration on its weights.

    Args:
        cfg: the configuration.
        weights: the state dict.
        halved: the name of an activation that is halved wherever it is computed.

    Attributes:
        seen: every activation by name, with the inputs of single heads, of the MLP, and the single
            heads' results.
    """

    def __init__(
        self, cfg: NativeConfig, weights: dict[str, Tensor], halved: str | None = None
    ) -> None:
        self.cfg, self.weights, self.halved = cfg, weights, halved
        self.seen: dict[str, Tensor] = {}

    def hook(self, name: str, x: Tensor) -> Tensor:
        self.seen[name] = x * 0.5 if name == self.halved else x
        return self.seen[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = torch.einsum("...i,oi->...o", x, self.weights[f"{name}.weight"])
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def norm(self, x: Tensor, name: str, kind: str | None, hooked: bool = True) -> Tensor:
        if kind is None:
            return x
        hook = self.hook if hooked else lambda _, x: x
        if kind.startswith("LN"):
            x = x - x.mean(-1, keepdim=True)
        x = x / hook(
            f"{name}.hook_scale", (x.square().mean(-1, keepdim=True) + self.cfg.eps).sqrt()
        )
        weight, bias = self.weights.get(f"{name}.weight"), self.weights.get(f"{name}.bias")
        if kind == "LN":
            assert weight is not None
            assert bias is not None
            return hook(f"{name}.hook_normalized", x * weight + bias)
        x = hook(f"{name}.hook_normalized", x)
        return x if weight is None else x * weight

    def rotate(self, x: Tensor) -> Tensor:
        """``[batch, pos, head, d_head]``: elements i and i + half are the two parts of a complex
        number.
        """
        dim, base = self.cfg.rotary_dim, self.cfg.rotary_base
        assert dim is not None
        assert base is not None
        half = dim // 2
        frequency = torch.tensor([base ** (-2 * i / dim) for i in range(half)], dtype=x.dtype)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequency
        turned = (
            torch.complex(x[..., :half], x[..., half:dim])
            * torch.polar(torch.ones_like(angle), angle)[:, None]
        )
        return torch.cat([turned.real, turned.imag, x[..., dim:]], dim=-1)

    def attention(self, x: Tensor, block: str, layer: int, shift: Tensor | float) -> Tensor:
        cfg = self.cfg
        kv_heads = cfg.n_key_value_heads or cfg.n_heads
        kind = cfg.normalization_type
        normed = self.norm(x, f"{block}.ln1", kind)
        made = {}
        for letter, heads in (("q", cfg.n_heads), ("k", kv_heads), ("v", kv_heads)):
            name = f"{block}.hook_{letter}_input"
            per_head = self.hook(name, x.unsqueeze(2).repeat(1, 1, heads, 1))
            # Only an edit of the heads' own inputs makes them read something else than the norm's
            # output.
            read = self.norm(per_head, f"{block}.ln1", kind, hooked=False)
            if name != self.halved:
                read = normed.unsqueeze(2).repeat(1, 1, heads, 1)
            if letter != "v":
                read = read + shift
            weight = self.weights[f"{block}.attn.{letter}.weight"].reshape(
                heads, cfg.d_head, cfg.d_model
            )
            bias = self.weights[f"{block}.attn.{letter}.bias"].reshape(heads, cfg.d_head)
            made[letter] = self.hook(
                f"{block}.attn.hook_{letter}", torch.einsum("bphm,hdm->bphd", read, weight) + bias
            )
        q, k, v = made["q"], made["k"], made["v"]
        if cfg.positional_embedding_type == "rotary":
            q = self.hook(f"{block}.attn.hook_rot_q", self.rotate(q))
            k = self.hook(f"{block}.attn.hook_rot_k", self.rotate(k))
        groups = cfg.n_heads // kv_heads
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        scale = (cfg.attn_scale or math.sqrt(cfg.d_head)) if cfg.use_attn_scale else 1.0
        scale *= layer + 1 if cfg.scale_attn_by_inverse_layer_idx else 1
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / scale
        if cfg.attention_dir == "causal":
            forbidden = torch.ones(scores.shape[-2:]).triu(1).bool()
            scores = scores.masked_fill(forbidden, -math.inf)
        scores = self.hook(f"{block}.attn.hook_attn_scores", scores)
        pattern = self.hook(f"{block}.attn.hook_pattern", scores.softmax(-1))
        z = self.hook(f"{block}.attn.hook_z", torch.einsum("bhqk,bkhd->bqhd", pattern, v))
        w_o = self.weights[f"{block}.attn.o.weight"].reshape(cfg.d_model, cfg.n_heads, cfg.d_head)
        result = self.hook(f"{block}.attn.hook_result", torch.einsum("bphd,mhd->bphm", z, w_o))
        return self.hook(
            f"{block}.hook_attn_out", result.sum(2) + self.weights[f"{block}.attn.o.bias"]
        )

    def mlp(self, x: Tensor, block: str) -> Tensor:
        cfg = self.cfg
        assert cfg.act_fn is not None
        normed = self.norm(
            self.hook(f"{block}.hook_mlp_in", x), f"{block}.ln2", cfg.normalization_type
        )
        act = ACTIVATIONS[cfg.act_fn]
        if cfg.gated_mlp:
            pre = self.hook(f"{block}.mlp.hook_pre", self.linear(normed, f"{block}.mlp.gate"))
            post = act(pre) * self.hook(
                f"{block}.mlp.hook_pre_linear", self.linear(normed, f"{block}.mlp.up")
            )
        else:
            post = act(self.hook(f"{block}.mlp.hook_pre", self.linear(normed, f"{block}.mlp.up")))
        if cfg.act_fn == "solu_ln":
            post = self.hook(f"{block}.mlp.hook_mid", post)
            post = self.norm(
                post, f"{block}.mlp.ln", "LN" if cfg.normalization_type == "LN" else "LNPre"
            )
        post = self.hook(f"{block}.mlp.hook_post", post)
        return self.hook(f"{block}.hook_mlp_out", self.linear(post, f"{block}.mlp.down"))

    def logits(self, tokens: Tensor) -> Tensor:
        cfg = self.cfg
        x = self.hook("hook_embed", self.weights["embed.weight"][tokens])
        shift: Tensor | float = 0.0
        if cfg.positional_embedding_type in ("standard", "shortformer"):
            positions = self.weights["pos_embed.weight"][: tokens.shape[1]].expand(
                len(tokens), -1, -1
            )
            positions = self.hook("hook_pos_embed", positions)
            if cfg.positional_embedding_type == "standard":
                x = x + positions
            else:
                shift = positions.unsqueeze(2)
        for layer in range(cfg.n_layers):
            block = f"blocks.{layer}"
            x = self.hook(f"{block}.hook_resid_pre", x)
            after = x + self.attention(x, block, layer, shift)
            if not cfg.attn_only:
                if not cfg.parallel_attn_mlp:
                    after = x = self.hook(f"{block}.hook_resid_mid", after)
                after = after + self.mlp(x, block)
            x = self.hook(f"{block}.hook_resid_post", after)
        kind = cfg.normalization_type
        if cfg.final_rms:
            assert kind is not None
            kind = "RMSPre" if kind.endswith("Pre") else "RMS"
        return self.linear(self.norm(x, "ln_final", kind), "unembed")
