"""Attention patterns: heads as small multiples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import altair as alt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.pictures.heat_maps import Axis, grid
from bridge.pictures.pictures import Picture
from bridge.pictures.style import (
    checked,
    diverging,
    limit,
    names_for,
    sequential,
    token_labels,
    without_batch,
)

#: The largest number of queries or keys shown individually; above it, cells are blocks.
LONGEST = 256
#: The largest size of an overview in pixels, across and down.
SCREEN = (1100, 780)


def attention(
    pattern: Float[Tensor, "..."],
    tokens: Sequence[str],
    *,
    key_tokens: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[str] | None = None,
    title: str = "Attention patterns",
) -> Picture:
    """Draw attention patterns: one panel for each head, queries down, keys across. Hovering names
    the pair.

    For more than `LONGEST` tokens, each cell is a block of queries and keys, and the picture says
    so. A cell shows the total weight that a query of the block gives to the block's keys, averaged
    over its queries; for scores, it shows the maximum. The subtitle names what the blocks hide: the
    pair whose weight exceeds its cell's value most.

    Args:
        pattern: ``cache["pattern", layer]``, ``[head, query, key]``, with or without a leading
            batch axis of 1; one head, ``[query, key]``; or all layers,
            ``cache.stack_activation("pattern")``, ``[layer, batch, head, query, key]``. Scores are
            accepted, too. Masked entries stay blank: those of minus infinity, and keys after the
            query, unless some head attends to one.
        tokens: the text of each query, such as ``bridge.to_str_tokens(prompt)``.
        key_tokens: the text of each key, if it differs (cross attention).
        layers: the layer numbers, for all layers; None: from 0.
        heads: a name for each head; None: its number.
        title: the picture's title.

    Raises:
        ValueError: unsupported axes, a batch of several prompts, a wrong number of names, a NaN.
        TypeError: tokens that are not a list of texts.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> bridge = TransformerBridge.boot_embedded()
        >>> _, cache = bridge.run_with_cache("Mary and John")
        >>> pictures.attention(
        ...     cache["pattern", 2], bridge.to_str_tokens("Mary and John"), title="Layer 2"
        ... )
        Picture('Layer 2')
    """
    values = _without_batch(checked(pattern, "the pattern", masked=True))
    labels = token_labels(tokens, values.shape[-2])
    cross = key_tokens is not None
    keys = token_labels(
        tokens if key_tokens is None else key_tokens, values.shape[-1], "key tokens"
    )
    weights = bool((values >= 0).all() and (values <= 1 + 1e-3).all())
    heading: str | alt.Title = title
    size = math.ceil(max(len(labels), len(keys)) / LONGEST)
    if size > 1:
        values, subtitle = _in_blocks(values, size, weights)
        heading = alt.Title(title, subtitle=subtitle)
        labels = _block_labels(labels, size)
        keys = _block_labels(keys, size)
    elif weights and not cross:
        values = _masked(values)

    values, panels, sides = _panels(values, layers, heads)
    longest = max(len(labels), len(keys))
    if sides is None:
        cell = max(3.0, min(18.0, 220 / longest))
    else:
        cell = _panel_size(*sides) / longest
    return grid(
        values,
        Axis("query", labels, cell),
        Axis("key", keys, cell),
        sequential() if weights else diverging(limit(values)),
        "weight" if weights else "score",
        heading,
        panels=panels,
        sides=sides,
    )


def _panels(
    values: Tensor, layers: Sequence[int] | None, heads: Sequence[str] | None
) -> tuple[Tensor, list[str] | None, tuple[list[str], list[str]] | None]:
    """Return the panels of a pattern, their names, and the names of their rows and columns if they
    are a table of layers and heads.

    Raises:
        ValueError: a wrong number of names, or layers of a pattern of one layer.
    """
    if values.ndim < 4 and layers is not None:
        raise ValueError(
            "layers names the layers of [layer, batch, head, query, key]; the shape is"
            f" {list(values.shape)}"
        )
    n_heads = values.shape[-3] if values.ndim > 2 else 1
    panels = names_for(heads, n_heads, "head ", "heads")
    if values.ndim == 2:
        return values, None, None
    if values.ndim == 3:
        return values, panels, None
    by_layer = _layer_names(layers, values)
    by_head = names_for(heads, n_heads, "H", "heads")
    gap = "" if heads is None else " "
    return _table(values, by_layer, by_head, gap)


def _table(
    values: Tensor, layers: list[str], heads: list[str], gap: str
) -> tuple[Tensor, list[str], tuple[list[str], list[str]]]:
    """Return the patterns of all layers as panels, their names, and the names of their rows and
    columns. The table is wide rather than high.
    """
    if len(layers) > len(heads):
        sides = heads, layers
        panels = [f"{layer}{gap}{head}" for head in heads for layer in layers]
        values = values.transpose(0, 1)
    else:
        sides = layers, heads
        panels = [f"{layer}{gap}{head}" for layer in layers for head in heads]
    return values.flatten(0, 1), panels, sides


def _without_batch(values: Tensor) -> Tensor:
    """Return a pattern without its batch axis.

    Raises:
        ValueError: unsupported axes, or a batch of several.
    """
    shape = list(values.shape)
    if not 2 <= values.ndim <= 5:
        raise ValueError(f"a pattern is [head, query, key]; the shape is {shape}")
    if values.ndim < 4:
        return values
    batch = values.shape[-4]
    if batch != 1:
        raise ValueError(
            f"the pattern of shape {shape} is of a batch of {batch}: take one prompt,"
            " cache['pattern', layer][0]"
        )
    return values.squeeze(-4)


def _masked(values: Tensor) -> Tensor:
    """Return a pattern in which masked entries are blank instead of zero: keys after the query,
    unless some head attends to one.
    """
    if values.triu(1).any():
        return values
    later = torch.ones(values.shape[-2:], device="cpu").triu(1).bool()
    return values.masked_fill(later, -torch.inf)


def _layer_names(layers: Sequence[int] | None, values: Tensor) -> list[str]:
    """Return the names of the layers.

    Raises:
        ValueError: the number of layers is wrong.
    """
    numbers = range(len(values)) if layers is None else layers
    if len(numbers) != len(values):
        raise ValueError(
            f"there are {len(numbers)} layers, and {len(values)} in the pattern of shape"
            f" {list(values.shape)}"
        )
    return [f"L{layer}" for layer in numbers]


def _panel_size(rows: Sequence[str], columns: Sequence[str]) -> float:
    """Return the size of a panel in pixels, so that a screen shows all of them."""
    across, down = SCREEN
    room = min(across / len(columns), down / len(rows)) - 3
    return max(12.0, min(72.0, room))


def _in_blocks(
    values: Float[Tensor, "*any query key"], size: int, weights: bool
) -> tuple[Float[Tensor, "*any query_block key_block"], str]:
    """Return a pattern of blocks, and a sentence about what the blocks hide."""
    by_key = torch.stack([block.amax(-1) for block in values.split(size, -1)], -1)
    highest = torch.stack([block.amax(-2) for block in by_key.split(size, -2)], -2)
    cells = f"a cell is of {size} queries and {size} keys"
    if not weights:
        return highest, f"{cells}: the highest score in it; lower ones are not shown"
    by_key = torch.stack([block.sum(-1) for block in values.split(size, -1)], -1)
    blocks = torch.stack([block.mean(-2) for block in by_key.split(size, -2)], -2)
    place = torch.unravel_index((highest - blocks).argmax(), blocks.shape)
    *panel, row, column = [int(index) for index in place]
    first_query = row * size
    first_key = column * size
    pattern = values[tuple(panel)]
    block = pattern[first_query : first_query + size, first_key : first_key + size]
    query, key = divmod(int(block.argmax()), block.shape[1])
    furthest = (
        f"furthest above its cell, of {float(blocks[place]):.2f}, is the weight"
        f" {float(block[query, key]):.2f} of query {first_query + query} to key {first_key + key}"
    )
    averages = "what a query gives to the keys, on average; which of them is not shown"
    return blocks, f"{cells}: {averages} ({furthest})"


def _block_labels(labels: list[str], size: int) -> list[str]:
    """Return the labels of blocks: the first and last token of each, and their positions."""
    blocks = []
    for first in range(0, len(labels), size):
        last = min(first + size, len(labels)) - 1
        blocks.append(f"{first}{labels[first]} to {last}{labels[last]}")
    return blocks


# --------------------------------------------------------------------------------------------------
# Mixtures of experts: the routing of tokens.
# --------------------------------------------------------------------------------------------------


def routing(
    weights: Float[Tensor, "..."] | Mapping[int, Float[Tensor, "..."]],
    tokens: Sequence[str],
    indices: Int[Tensor, "..."] | Mapping[int, Int[Tensor, "..."]] | None = None,
    *,
    n_experts: int | None = None,
    title: str = "Expert routing",
) -> Picture:
    """Draw the experts that each token is routed to: experts down, tokens across, a panel for each
    layer.

    Args:
        weights: with `indices`, the weights of the chosen experts,
            ``cache["blocks.0.mlp.hook_topk_weights"]``, ``[pos, chosen]``. Without `indices`, the
            weights of all experts, ``[pos, expert]``, zero for experts that are not chosen (not
            ``hook_expert_weights``, the probabilities of choosing experts). With or without a
            leading batch axis of 1; or a dictionary of these by layer. Zeros stay blank.
        tokens: the text of each position: ``bridge.to_str_tokens(prompt)``.
        indices: the chosen experts, ``cache["blocks.0.mlp.hook_expert_indices"]``, in the shape of
            the weights.
        n_experts: the number of experts; needed with `indices`.
        title: the picture's title.

    Raises:
        ValueError: unsupported axes, a batch of several prompts, layers with different numbers of
            experts, a negative weight, indices that do not match the weights, or a missing number
            of experts; without indices, no zero weight although there are several experts.

    Example:
        >>> import torch
        >>> from bridge import pictures
        >>> weights, chosen = (
        ...     {0: torch.tensor([[0.7, 0.3], [0.6, 0.4]])},
        ...     {0: torch.tensor([[5, 1], [2, 5]])},
        ... )
        >>> pictures.routing(weights, ["<bos>", " Mary"], chosen, n_experts=8)
        Picture('Expert routing')
    """
    single = isinstance(weights, Tensor)
    by_layer: dict[int, Tensor] = {}
    if isinstance(weights, Tensor):
        by_layer[0] = weights
    elif isinstance(weights, Mapping):
        by_layer |= weights
    if not by_layer:
        raise ValueError(
            f"weights are {weights!r}; give a tensor [pos, expert], or a dictionary of them by"
            " layer"
        )
    values = _weights_of_experts(by_layer, indices, n_experts).mT  # layer expert pos
    if bool((values < 0).any()):
        raise ValueError(
            "weights of experts hold negative numbers: give hook_topk_weights, not"
            " hook_router_logits"
        )
    labels = token_labels(tokens, values.shape[-1])
    experts = values.shape[-2]
    if indices is None and experts > 1 and bool((values > 0).all()):
        raise ValueError(
            "every expert has a weight at every token, which does not tell the chosen ones:"
            " give hook_topk_weights, and hook_expert_indices as the indices, not"
            " hook_expert_weights"
        )
    scale = sequential(limit(values))
    values = values.masked_fill(values == 0, float("-inf"))
    wide = max(5.0, min(26.0, (900 if single else 480) / len(labels)))
    high = max(3.0, min(20.0, (600 if single else 320) / experts))
    return grid(
        values[0] if single else values,
        Axis("expert", list(map(str, range(experts))), high),
        Axis("token", labels, wide),
        scale,
        "weight",
        title,
        panels=None if single else [f"layer {layer}" for layer in by_layer],
        panels_wide=max(1, int(1050 // (wide * len(labels) + 20))),
    )


def _weights_of_experts(
    by_layer: Mapping[int, Tensor],
    indices: Tensor | Mapping[int, Tensor] | None,
    n_experts: int | None,
) -> Float[Tensor, "layer pos expert"]:
    """Return the weights of all experts.

    Raises:
        ValueError: an unsupported shape, layers with different shapes, or no number of experts.
    """
    what = "weights of experts [pos, expert]"
    tables = [without_batch(checked(table, "the weights"), 2, what) for table in by_layer.values()]
    if indices is not None:
        if n_experts is None:
            raise ValueError("n_experts is None: with indices, say how many experts there are")
        if isinstance(indices, Tensor):
            chosen = [indices]
        else:
            chosen = [indices[layer] for layer in by_layer]
        for i, (table, experts) in enumerate(zip(tables, chosen, strict=True)):
            tables[i] = _of_all_experts(table, experts, n_experts)
    shapes = {tuple(table.shape) for table in tables}
    if len(shapes) > 1:
        raise ValueError(
            f"the layers' weights have different shapes, {sorted(map(list, shapes))}: one picture"
            " for each"
        )
    return torch.stack(tables)


def _of_all_experts(
    weights: Tensor, indices: Tensor, n_experts: int
) -> Float[Tensor, "pos expert"]:
    """Return the weights of the chosen experts, with zeros for the others.

    Raises:
        ValueError: the indices have another shape, or are not experts.
    """
    chosen = without_batch(indices.detach().cpu(), 2, "indices of experts [pos, chosen]").long()
    if chosen.shape != weights.shape:
        raise ValueError(
            f"weights have shape {list(weights.shape)} and indices {list(chosen.shape)}: give"
            " hook_topk_weights with hook_expert_indices"
        )
    if not 0 <= int(chosen.min()) <= int(chosen.max()) < n_experts:
        raise ValueError(
            f"indices are {int(chosen.min())} to {int(chosen.max())}, and there are {n_experts}"
            " experts"
        )
    return weights.new_zeros(len(weights), n_experts).scatter(1, chosen, weights)
