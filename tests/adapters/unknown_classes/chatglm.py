"""ChatGLM 2: positions before the batch, one fused projection, neighbouring dimensions turned in
half of each head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from tests.adapters.unknown_classes.parts import (
    D_HEAD,
    D_MLP,
    D_MODEL,
    D_VOCAB,
    N_HEADS,
    N_LAYERS,
    Config,
    OtherModel,
    Rms,
    causal,
    repeated,
    rotated,
)
from tests.adapters.unknown_classes.shown import at, outside


class CoreAttention(nn.Module):
    """Scores and pattern."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q.permute(1, 2, 0, 3), k.permute(1, 2, 3, 0)) / D_HEAD**0.5
        scores = at(self.layer, "attn.hook_attn_scores", causal(scores))
        pattern = at(self.layer, "attn.hook_pattern", nn.functional.softmax(scores, dim=-1))
        z = at(
            self.layer, "attn.hook_z", torch.matmul(pattern, v.permute(1, 2, 0, 3)).transpose(1, 2)
        )
        return z.transpose(0, 1).flatten(2)


class SelfAttention(nn.Module):
    """``[pos, batch, d_model]`` throughout."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.n_kv = layer, 2
        self.query_key_value = nn.Linear(D_MODEL, D_MODEL + 4 * D_HEAD)
        self.core_attention, self.dense = (
            CoreAttention(layer),
            nn.Linear(D_MODEL, D_MODEL, bias=False),
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        def shown(name: str, x: Tensor) -> Tensor:
            return at(self.layer, f"attn.hook_{name}", x.transpose(0, 1))

        q, k, v = self.query_key_value(hidden_states).split([D_MODEL, 2 * D_HEAD, 2 * D_HEAD], -1)
        q, k, v = q.unflatten(-1, (N_HEADS, -1)), k.unflatten(-1, (2, -1)), v.unflatten(-1, (2, -1))
        q, k, v = shown("q", q), shown("k", k), shown("v", v).transpose(0, 1)
        q, k = (rotated(x, D_HEAD // 3 * 2, adjacent=True).transpose(0, 1) for x in (q, k))
        q, k = shown("rot_q", q).transpose(0, 1), shown("rot_k", k).transpose(0, 1)
        return self.dense(self.core_attention(q, repeated(k, N_HEADS), repeated(v, N_HEADS)))


class GLMBlock(nn.Module):
    """A block."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm, self.post_attention_layernorm = Rms(), Rms()
        self.self_attention = SelfAttention(layer)
        self.dense_h_to_4h, self.dense_4h_to_h = (
            nn.Linear(D_MODEL, 2 * D_MLP, bias=False),
            nn.Linear(D_MLP, D_MODEL, bias=False),
        )

    def shown(self, name: str, x: Tensor) -> Tensor:
        """Of ``[pos, batch, ...]``."""
        return at(self.layer, name, x.transpose(0, 1)).transpose(0, 1)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        x = self.shown("hook_resid_pre", hidden_states)
        x = x + self.shown("hook_attn_out", self.self_attention(self.input_layernorm(x)))
        x = self.shown("hook_resid_mid", x)
        gate, up = self.dense_h_to_4h(self.post_attention_layernorm(x)).chunk(2, -1)
        gate, up = self.shown("mlp.hook_pre", gate), self.shown("mlp.hook_pre_linear", up)
        post = self.shown("mlp.hook_post", nn.functional.silu(gate) * up)
        return (
            self.shown("hook_resid_post", x + self.shown("hook_mlp_out", self.dense_4h_to_h(post))),
            None,
        )


class GLMTransformer(nn.Module):
    """The blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.final_layernorm = (
            nn.ModuleList(GLMBlock(i) for i in range(N_LAYERS)),
            Rms(),
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states)
        return self.final_layernorm(hidden_states)


class Embedding(nn.Module):
    """Tokens, with positions first."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(D_VOCAB, D_MODEL)

    def forward(self, input_ids: Tensor) -> Tensor:
        return outside("hook_embed", self.word_embeddings(input_ids)).transpose(0, 1).contiguous()


class ChatGLMModel(nn.Module):
    """Embedding, blocks, and an output layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.encoder = Embedding(), GLMTransformer()
        self.output_layer = nn.Linear(D_MODEL, D_VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.encoder(self.embedding(input_ids))


class ChatGLM(OtherModel):
    """The model with its logits."""

    base_model_prefix = "transformer"

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())
        self.transformer = ChatGLMModel()
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embedding.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.transformer.output_layer

    def forward(self, input_ids: Tensor | None = None) -> CausalLMOutput:
        made = self.transformer.output_layer(self.transformer(input_ids))
        return CausalLMOutput(logits=outside("unembed.hook_out", made.transpose(0, 1)).contiguous())
