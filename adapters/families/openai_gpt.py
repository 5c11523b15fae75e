"""GPT (the first): norms stand on the stream itself."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Embedding, Readout, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.stream_ends import tables
from adapters.views import FilledScores, columns


def openai_gpt(config: PreTrainedConfig) -> Architecture:
    width, heads = config.hidden_size, config.num_attention_heads
    q, k, v = (Projection("c_attn", columns(i * width, (i + 1) * width, heads)) for i in range(3))
    attn = Attention("attn", q, k, v, o="c_proj", scores=FilledScores(-5000.0))  # it hides with -10000
    mlp = MLP("mlp", up=Projection("c_fc"), down="c_proj")
    norms = Norm("ln_1", LAYER_NORM), Norm("ln_2", LAYER_NORM)
    block = Block((Step(attn, stream_norm=norms[0]), Step(mlp, stream_norm=norms[1])))
    return Architecture(
        (Stack("h", block, embedding=Embedding("tokens_embed", added=tables("positions_embed")), output=(0, 1)),),
        Readout("lm_head"),
        config_values={"d_mlp": 4 * width, "act_fn": {"gelu": "gelu_new", "swish": "silu"}.get(config.afn, config.afn)},
    )
