"""What the classes in this folder share: sizes, norms, rotation, masks, and bases with
transformers' interface.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tests.adapters.unknown_classes.shown import at, outside

D_MODEL, N_HEADS, D_HEAD, D_MLP, D_VOCAB, N_LAYERS, N_CTX = 24, 4, 6, 40, 61, 3, 32


class Rms(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int = D_MODEL, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


def rotated(
    x: Tensor, dim: int | None = None, base: float = 10000.0, adjacent: bool = False
) -> Tensor:
    """``[batch, pos, head, d_head]``, of which the first columns are turned."""
    dim = x.shape[-1] if dim is None else dim
    turned, rest = x[..., :dim], x[..., dim:]
    angles = torch.arange(x.shape[1])[:, None] * base ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    if adjacent:
        a, b = turned[..., ::2], turned[..., 1::2]
        made = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        made = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([made, rest], -1)


def causal(scores: Tensor) -> Tensor:
    """Scores ``[..., query, key]`` without those of later keys."""
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(mask, -torch.inf)


def repeated(x: Tensor, n_heads: int) -> Tensor:
    """Keys or values ``[batch, pos, kv_head, d]``, once for each query head."""
    return x.repeat_interleave(n_heads // x.shape[2], dim=2)


def mixed(
    layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Any = None, mask: Any = causal
) -> Tensor:
    """Eager attention, ``[batch, pos, (head d_head)]``, with everything shown that has a name."""
    q, k, v = (at(layer, f"attn.hook_{name}", x) for name, x in zip("qkv", (q, k, v), strict=True))
    if turn is not None:
        q, k = at(layer, "attn.hook_rot_q", turn(q)), at(layer, "attn.hook_rot_k", turn(k))
    k, v = (repeated(x, q.shape[2]) for x in (k, v))
    scores = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1)) / q.shape[-1] ** 0.5
    scores = at(layer, "attn.hook_attn_scores", mask(scores))
    pattern = at(layer, "attn.hook_pattern", torch.softmax(scores, -1))
    z = at(layer, "attn.hook_z", torch.matmul(pattern, v.transpose(1, 2)).transpose(1, 2))
    return z.flatten(2)


def by_head(x: Tensor, n: int = N_HEADS) -> Tensor:
    """``[batch, pos, (head d)]`` by head."""
    return x.unflatten(-1, (n, -1))


def gated(layer: int, gate: Tensor, up: Tensor, name: str = "mlp") -> Tensor:
    """The neurons of a gated MLP, with everything shown that has a name."""
    gate, up = at(layer, f"{name}.hook_pre", gate), at(layer, f"{name}.hook_pre_linear", up)
    return at(layer, f"{name}.hook_post", nn.functional.silu(gate) * up)


class Config(PreTrainedConfig):
    """A configuration of remote code."""

    model_type = "other_class"

    def __init__(self, **options: Any) -> None:
        self.hidden_size, self.num_attention_heads, self.num_hidden_layers = (
            D_MODEL,
            N_HEADS,
            N_LAYERS,
        )
        self.intermediate_size, self.max_position_embeddings, self.hidden_act = D_MLP, N_CTX, "silu"
        self.vocab_size = D_VOCAB
        super().__init__(tie_word_embeddings=False, **options)


class OtherModel(PreTrainedModel):
    """A base class of remote code: the model without its head under ``model``."""

    config_class = Config
    base_model_prefix = "model"


class CausalModel(OtherModel):
    """A head over a model without one, which a subclass makes."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())
        self.model = self.base()
        self.lm_head = nn.Linear(D_MODEL, D_VOCAB, bias=False)
        self.post_init()

    def base(self) -> nn.Module:
        """The model without its head."""
        raise NotImplementedError

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)))


class Attention(nn.Module):
    """Attention as in Llama, eager."""

    def __init__(self, layer: int, n_kv: int = 2) -> None:
        super().__init__()
        self.layer, self.n_kv = layer, n_kv
        self.q_proj, self.o_proj = (
            nn.Linear(D_MODEL, D_MODEL, bias=False),
            nn.Linear(D_MODEL, D_MODEL, bias=False),
        )
        self.k_proj, self.v_proj = (nn.Linear(D_MODEL, n_kv * D_HEAD, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            by_head(self.q_proj(x)),
            by_head(self.k_proj(x), self.n_kv),
            by_head(self.v_proj(x), self.n_kv),
        )
        return self.o_proj(mixed(self.layer, q, k, v, rotated))


class GatedMLP(nn.Module):
    """An MLP as in Llama."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.gate_proj, self.up_proj = (nn.Linear(D_MODEL, D_MLP, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(D_MLP, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.layer, self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Module):
    """A block as in Llama, of these two."""

    def __init__(self, layer: int, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.layer, self.self_attn, self.mlp = layer, attention, feed_forward
        self.input_layernorm, self.post_attention_layernorm = Rms(), Rms()

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = at(self.layer, "hook_resid_pre", hidden_states)
        x = x + at(self.layer, "hook_attn_out", self.self_attn(self.input_layernorm(x)))
        x = at(self.layer, "hook_resid_mid", x)
        x = x + at(self.layer, "hook_mlp_out", self.mlp(self.post_attention_layernorm(x)))
        return at(self.layer, "hook_resid_post", x)


class Decoder(nn.Module):
    """Tokens, blocks and a final norm."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens, self.layers, self.norm = (
            nn.Embedding(D_VOCAB, D_MODEL),
            nn.ModuleList(layers),
            Rms(),
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        x = outside("hook_embed", self.embed_tokens(input_ids))
        for layer in self.layers:
            x = layer(x)
        return outside("ln_final.hook_out", self.norm(x))


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """A model whose parameters are random everywhere, none of them zero or one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(
                    noise
                    * (1.0 if parameter.shape[0] == D_VOCAB else 1.5 * parameter.shape[-1] ** -0.5)
                )
            else:
                parameter.add_(noise * 0.3)
    return model.eval()
