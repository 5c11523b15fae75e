"""Falcon: queries, keys and values in one projection; attention and MLP side by side or one after the other."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.attention import Attention, Projection
from adapters.config import rotary_values
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import only, register
from adapters.views import columns, interleaved


@register("FalconPreTrainedModel")
def falcon(config: PreTrainedConfig) -> Architecture:
    only(config, new_decoder_architecture=False, alibi=False)  # keys and values repeated; scores that ALiBi is in
    width, heads = config.hidden_size, config.num_attention_heads
    d_head, parallel = width // heads, config.parallel_attn
    if config.multi_query:
        places = ((0, width, heads), (width, width + d_head, 1), (width + d_head, width + 2 * d_head, 1))
        q, k, v = (Projection("query_key_value", columns(*place)) for place in places)
    else:
        q, k, v = (Projection("query_key_value", interleaved(heads, i)) for i in range(3))
    shows = "flash" not in (config._attn_implementation or "")  # it has a class of its own for that
    attn = Attention("self_attention", q, k, v, o="dense", rotary=True, shows_scores=shows)
    mlp = MLP("mlp", up=Projection("dense_h_to_4h"), down="dense_4h_to_h")
    norms = [Norm(path, LAYER_NORM) for path in ("input_layernorm", "post_attention_layernorm")]
    steps = (Step(attn, pre=norms[0]), Step(mlp, pre=norms[not parallel], parallel=parallel))
    # Side by side, what attention adds is written into what the MLP returned.
    block = Block(steps, changed_in_place=(("mlp", "output"),) if parallel else ())
    return Architecture(
        embed="word_embeddings",
        stacks=(Stack("h", block, final_norm=Norm("ln_f", LAYER_NORM), output_key=0, output_length=2),),
        unembed="lm_head",
        config_values={
            **rotary_values(config),
            "n_key_value_heads": 1 if config.multi_query else None,
            "d_mlp": config.ffn_hidden_size,
            "act_fn": config.activation,
        },
    )
