"""CodeGen: GPT-J with queries, values and keys in one projection."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention, Projection
from adapters.families.gptj import gptj_like
from adapters.views import gathered

_GROUPS = 4  # of heads, each with its own queries, values and keys: a constant in its source


def codegen(config: PreTrainedConfig) -> Architecture:
    heads, d_head = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    each = heads // _GROUPS

    def part(place: int) -> Projection:
        starts = [((head // each * 3 + place) * each + head % each) * d_head for head in range(heads)]
        return Projection("qkv_proj", gathered(tuple(tuple(range(start, start + d_head)) for start in starts)))

    attn = Attention("attn", q=part(0), k=part(2), v=part(1), o="out_proj", rotary="last")
    return gptj_like(attn, config.rotary_dim or d_head)
