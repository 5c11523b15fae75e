"""GPT-2's shape: attention and an MLP, each after a layer norm, in sequence or in parallel."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Embedding, Readout, Stack, Step, tables
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.points import Border
from adapters.views import columns, interleaved

FEED_FORWARD = MLP("mlp", up=Projection("c_fc"), down="c_proj")
#: The MLP of GPT-NeoX, BLOOM and Falcon.
WIDE_AND_BACK = MLP("mlp", up=Projection("dense_h_to_4h"), down="dense_4h_to_h")
#: Queries, keys and values of modules of their own.
Q, K, V = (Projection(f"{letter}_proj") for letter in "qkv")


#: Queries, keys and values.
Projections = tuple[Projection, Projection, Projection]


def fused(path: str, config: PreTrainedConfig, one: bool = False) -> Projections:
    """Declare queries, keys and values that one projection outputs head by head; or all queries,
    and then `one` head of keys and one of values.

    Args:
        path: the projection's path.
        config: the Hugging Face configuration.
        one: there is one head of keys and one of values.
    """
    width = config.hidden_size
    heads = config.num_attention_heads
    if one:
        return in_a_row(path, width // heads, heads, 1)
    q, k, v = (Projection(path, interleaved(heads, i)) for i in range(3))
    return q, k, v


def in_a_row(path: str, d_head: int, heads: int, kv_heads: int) -> Projections:
    """Declare queries, keys and values that one projection outputs one after the other.

    Args:
        path: the projection's path.
        d_head: the width of a head.
        heads, kv_heads: the number of heads of queries, and of keys and of values.
    """
    k, v, end = (n * d_head for n in (heads, heads + kv_heads, heads + 2 * kv_heads))
    return (
        Projection(path, columns(0, k, heads)),
        Projection(path, columns(k, v, kv_heads)),
        Projection(path, columns(v, end, kv_heads)),
    )


def gpt2_like(
    attn: Attention,
    mlp: MLP = FEED_FORWARD,
    *,
    pre: tuple[str, str] = ("ln_1", "ln_2"),
    out: tuple[str | None, str | None] = (None, None),
    parallel: bool = False,
    path: str = "h",
    output: tuple[int | None, int] = (None, 1),
    final_norm: str | None = "ln_f",
    embed: str = "wte",
    pos_embed: str | None = None,
    embed_norm: str | None = None,
    unembed: str = "lm_head",
    changed_in_place: tuple[tuple[str, Border], ...] = (),
    config_values: Mapping[str, object] | None = None,
) -> Architecture:
    """Declare GPT-2 with differences.

    Args:
        attn, mlp: the parts of a block.
        pre: the norms of their inputs.
        out: the modules whose outputs are their results, where they are not the parts themselves.
        parallel: both read the same stream.
        path: the path of the list of blocks.
        output: the index of the stream in a block's output (None: it returns a tensor), and the
            number of elements.
        final_norm: the norm after the last block.
        embed, pos_embed, embed_norm: the embeddings of tokens and of positions, and a norm after
            those of tokens.
        unembed: the output layer.
        changed_in_place: as for `Stack`.
        config_values: fields of `ModelConfig` that the configuration lacks.
    """
    first, second = (Norm(name, LAYER_NORM) for name in pre)
    last, embedded = (name and Norm(name, LAYER_NORM) for name in (final_norm, embed_norm))
    ff = Step(mlp, second, parallel_to=0 if parallel else None, out=out[1])
    block = Block((Step(attn, first, out=out[0]), ff))
    embedding = Embedding(embed, added=tables(pos_embed), norm=embedded or None)
    stack = Stack(
        path,
        block,
        final_norm=last or None,
        embedding=embedding,
        output=output,
        changed_in_place=changed_in_place,
    )
    return Architecture((stack,), Readout(unembed), config_values=config_values or {})
