"""The complete example of transformers' page on monkey patching: experts one after the other, fused
projections.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2_moe.modeling_qwen2_moe import apply_rotary_pos_emb


class Expert(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        d = config.hidden_size
        width = (
            getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        )  # OLMoE's has one width
        self.gate_proj = nn.Linear(d, width, bias=False)
        self.up_proj = nn.Linear(d, width, bias=False)
        self.down_proj = nn.Linear(width, d, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SequentialExperts(nn.ModuleList):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = getattr(config, "num_experts", None) or config.num_local_experts
        for _ in range(self.num_experts):
            self.append(Expert(config))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        final = torch.zeros_like(hidden_states)
        chosen = torch.nn.functional.one_hot(top_k_index, num_classes=self.num_experts).permute(
            2, 1, 0
        )
        for index in range(self.num_experts):
            rank, token = torch.where(chosen[index])
            made = self[index](hidden_states[token]) * top_k_weights[token, rank, None]
            final.index_add_(0, token, made.to(final.dtype))
        return final


class FusedAttention(nn.Module):
    """Queries, and keys and values of as many heads or of groups, in one projection."""

    bias = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.sizes = [
            self.head_dim * n
            for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2)
        ]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=self.bias)
        self.o_proj = nn.Linear(self.sizes[0], config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        shape = hidden_states.shape[:-1]
        parts = torch.split(self.qkv_proj(hidden_states), self.sizes, dim=-1)
        query, key, value = (part.view(*shape, -1, self.head_dim).transpose(1, 2) for part in parts)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        made, weights = sdpa_attention_forward(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return self.o_proj(made.reshape(*shape, -1).contiguous()), weights
