"""Attention patterns: heads as small multiples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.pictures.heat_maps import Axis, grid
from bridge.pictures.pictures import Picture, finished, rows_chart
from bridge.pictures.style import (
    checked,
    colour,
    compact,
    diverging,
    limit,
    lookup,
    names_for,
    of_one_prompt,
    sequential,
    token_labels,
    tooltips,
    visible,
    without_batch,
)

#: How many queries or keys are shown one by one; where there are more, cells are of blocks of them.
LONGEST = 256
#: The pixels that an overview may take, across and down.
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
    """Who attends to whom: one panel for each head, queries down, keys across. Hovering names the pair.

    Of more than `LONGEST` tokens, a cell is of a block of queries and keys, and the picture says so: what a query of it
    gives to its keys together, the mean over its queries; of scores, the highest. Below the title stands what that
    leaves out: the pair whose weight is the furthest above what its cell shows.

    Args:
        pattern: ``cache["pattern", layer]``, ``[head, query, key]`` with a batch axis of 1 in front or without; one
            head, ``[query, key]``; or all layers, ``cache.stack_activation("pattern")``,
            ``[layer, batch, head, query, key]``. Scores may be given too. Places that a mask forbids stay blank: those
            of minus infinity, and keys behind the query where no head gives any of them a weight.
        tokens: the text of each query, such as ``bridge.to_str_tokens(prompt)``.
        key_tokens: the text of each key, where it is another (cross attention).
        layers: for all layers, their numbers; None: from 0.
        heads: a name for each head; None: its number.
        title: over the picture.

    Raises:
        ValueError: other axes, a batch of several prompts, names of another number, a NaN.
        TypeError: tokens that are no list of texts.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> bridge = TransformerBridge.boot_embedded()
        >>> _, cache = bridge.run_with_cache("Mary and John")
        >>> pictures.attention(cache["pattern", 2], bridge.to_str_tokens("Mary and John"), title="Layer 2")
        Picture('Layer 2')
    """
    values = checked(pattern, "the pattern", masked=True)
    shape = list(values.shape)
    if values.ndim < 2 or values.ndim > 5:
        raise ValueError(f"a pattern is [head, query, key]; the shape is {shape}")
    if values.ndim >= 4:
        batch = values.shape[-4]
        if batch != 1:
            raise ValueError(
                f"the pattern of shape {shape} is of a batch of {batch}: take one prompt, cache['pattern', layer][0]"
            )
        values = values.squeeze(-4)
    labels = token_labels(tokens, values.shape[-2])
    keys = token_labels(tokens if key_tokens is None else key_tokens, values.shape[-1], "key tokens")
    many = values.ndim == 4
    sides: tuple[list[str], list[str]] | None = None
    if not many and layers is not None:
        raise ValueError(f"layers names the layers of [layer, batch, head, query, key]; the shape is {shape}")
    n_heads = values.shape[-3] if values.ndim > 2 else 1
    panels = names_for(heads, n_heads, "head ", "heads")
    if many:
        numbers = list(range(len(values))) if layers is None else list(layers)
        if len(numbers) != len(values):
            raise ValueError(f"there are {len(numbers)} layers, and {len(values)} in the pattern of shape {shape}")
        short = names_for(heads, n_heads, "H", "heads")
        sides = [f"L{layer}" for layer in numbers], short
        if len(values) > n_heads:  # wide rather than high
            values, sides = values.transpose(0, 1), (short, sides[0])
        gap = "" if heads is None else " "
        panels = [f"{b}{gap}{a}" if sides[0] is short else f"{a}{gap}{b}" for a in sides[0] for b in sides[1]]
    weights = bool((values >= 0).all() and (values <= 1 + 1e-3).all())
    told: str | alt.Title = title
    size = -(-max(len(labels), len(keys)) // LONGEST)
    if size > 1:
        values, dropped = _in_blocks(values, size, weights)
        labels, keys = _block_labels(labels, size), _block_labels(keys, size)
        told = alt.Title(title, subtitle=dropped)
    elif weights and key_tokens is None and not values.triu(1).any():
        values = values.masked_fill(torch.ones(values.shape[-2:]).triu(1).bool(), -torch.inf)  # no zero: blank
    flat = values.reshape(-1, *values.shape[-2:])
    longest = max(len(labels), len(keys))
    down, across = (len(sides[0]), len(sides[1])) if sides else (1, 1)
    panel = max(12.0, min(72.0, SCREEN[0] / across - 3, SCREEN[1] / down - 3))  # so that a screen shows all
    cell = panel / longest if sides else max(3.0, min(18.0, 220 / longest))
    return grid(
        flat if values.ndim > 2 else flat[0],
        Axis("query", labels, cell),
        Axis("key", keys, cell),
        sequential() if weights else diverging(limit(values)),
        "weight" if weights else "score",
        told,
        panels=panels if values.ndim > 2 else None,
        panels_wide=min(4, n_heads),
        sides=sides,
    )


def _in_blocks(
    values: Float[Tensor, "*any query key"], size: int, weights: bool
) -> tuple[Float[Tensor, "*any query_block key_block"], str]:
    """A pattern of blocks, and what that leaves out, in words."""
    by_key = torch.stack([x.amax(-1) for x in values.split(size, -1)], -1)
    highest = torch.stack([x.amax(-2) for x in by_key.split(size, -2)], -2)
    cells = f"a cell is of {size} queries and {size} keys"
    if not weights:
        return highest, f"{cells}: the highest score in it; lower ones are not shown"
    by_key = torch.stack([x.sum(-1) for x in values.split(size, -1)], -1)
    blocks = torch.stack([x.mean(-2) for x in by_key.split(size, -2)], -2)
    place = torch.unravel_index((highest - blocks).argmax(), blocks.shape)
    *panel, row, column = [int(i) for i in place]
    first, left = row * size, column * size
    block = values[tuple(panel)][first : first + size, left : left + size]
    query, key = [int(i) for i in torch.unravel_index(block.argmax(), block.shape)]
    return blocks, (
        f"{cells}: what a query gives to the keys, on average; which of them is not shown (furthest above its cell, of "
        f"{float(blocks[place]):.2f}, is the weight {float(block[query, key]):.2f} of query {first + query} to key "
        f"{left + key})"
    )


def _block_labels(labels: list[str], size: int) -> list[str]:
    """The names of blocks: the first and the last token of each, and where they are."""
    ends = [(first, min(first + size, len(labels)) - 1) for first in range(0, len(labels), size)]
    return [f"{first}{labels[first]} to {last}{labels[last]}" for first, last in ends]


# ----------------------------------------------------------------------------------------------------------------------
# Mixtures of experts: which tokens are sent where.
# ----------------------------------------------------------------------------------------------------------------------


def routing(
    weights: Float[Tensor, "..."] | Mapping[int, Float[Tensor, "..."]],
    tokens: Sequence[str],
    indices: Int[Tensor, "..."] | Mapping[int, Int[Tensor, "..."]] | None = None,
    *,
    n_experts: int | None = None,
    title: str = "Expert routing",
) -> Picture:
    """Which experts each token is sent to: experts down, tokens across, a panel for each layer.

    Args:
        weights: with `indices`, how much the chosen experts count, ``cache["blocks.0.mlp.hook_topk_weights"]``, ``[pos,
            chosen]``; without, those of all experts, ``[pos, expert]``, zero for those that are not chosen (not
            ``hook_expert_weights``, the probabilities that experts are chosen by). With a batch axis of 1 in front or
            without; or a dictionary of these by layer. What is zero stays blank.
        tokens: the text of each position: ``bridge.to_str_tokens(prompt)``.
        indices: which experts were chosen, ``cache["blocks.0.mlp.hook_expert_indices"]``, of the shape of the weights.
        n_experts: how many experts there are; needed with `indices`.
        title: over the picture.

    Raises:
        ValueError: other axes, a batch of several prompts, layers with different numbers of experts, a negative weight,
            indices that do not fit the weights, or without the number of experts; without indices, no weight that is
            zero, where there are several experts.

    Example:
        >>> import torch
        >>> from bridge import pictures
        >>> weights, chosen = {0: torch.tensor([[0.7, 0.3], [0.6, 0.4]])}, {0: torch.tensor([[5, 1], [2, 5]])}
        >>> pictures.routing(weights, ["<bos>", " Mary"], chosen, n_experts=8)
        Picture('Expert routing')
    """
    by_layer = dict(weights) if isinstance(weights, Mapping) else None
    given = [weights] if isinstance(weights, Tensor) else list((by_layer or {}).values())
    if not given:
        raise ValueError(f"weights are {weights!r}; give a tensor [pos, expert], or a dictionary of them by layer")
    tables = [without_batch(checked(each, "the weights"), 2, "weights of experts [pos, expert]") for each in given]
    if indices is not None:
        chosen = [indices] if isinstance(indices, Tensor) else [indices[layer] for layer in by_layer or {}]
        if n_experts is None:
            raise ValueError("n_experts is None: with indices, say how many experts there are")
        tables = [_of_all_experts(*each, n_experts) for each in zip(tables, chosen, strict=True)]
    shapes = {tuple(table.shape) for table in tables}
    if len(shapes) > 1:
        raise ValueError(
            f"the layers' weights have different shapes, {sorted(map(list, shapes))}: one picture for each"
        )
    values = torch.stack(tables).mT  # layer expert pos
    if bool((values < 0).any()):
        raise ValueError("weights of experts hold negative numbers: give hook_topk_weights, not hook_router_logits")
    labels = token_labels(tokens, values.shape[-1])
    experts = values.shape[-2]
    if indices is None and experts > 1 and bool((values > 0).all()):
        raise ValueError(
            "every expert has a weight at every token, which says nothing of those that are chosen: give "
            "hook_topk_weights, and hook_expert_indices as the indices, not hook_expert_weights"
        )
    top = limit(values)
    values = values.masked_fill(values == 0, float("-inf"))
    alone = by_layer is None
    wide = max(5.0, min(26.0, (900 if alone else 480) / len(labels)))
    high = max(3.0, min(20.0, (600 if alone else 320) / experts))
    return grid(
        values[0] if alone else values,
        Axis("expert", [str(expert) for expert in range(experts)], high),
        Axis("token", labels, wide),
        sequential(top),
        "weight",
        title,
        panels=None if by_layer is None else [f"layer {layer}" for layer in by_layer],
        panels_wide=max(1, int(1050 // (wide * len(labels) + 20))),
    )


def _of_all_experts(weights: Tensor, indices: Tensor, n_experts: int) -> Float[Tensor, "pos expert"]:
    """Weights of the chosen experts among zeros for the others.

    Raises:
        ValueError: the indices have another shape, or are no experts.
    """
    chosen = without_batch(indices.detach().cpu(), 2, "indices of experts [pos, chosen]").long()
    if chosen.shape != weights.shape:
        raise ValueError(
            f"weights have shape {list(weights.shape)} and indices {list(chosen.shape)}: give hook_topk_weights with "
            "hook_expert_indices"
        )
    if not 0 <= int(chosen.min()) <= int(chosen.max()) < n_experts:
        raise ValueError(f"indices are {int(chosen.min())} to {int(chosen.max())}, and there are {n_experts} experts")
    return weights.new_zeros(len(weights), n_experts).scatter(1, chosen, weights)


# ----------------------------------------------------------------------------------------------------------------------
# Lines over layers: the norms of the residual stream.
# ----------------------------------------------------------------------------------------------------------------------


def residual_norms(
    stream: Float[Tensor, "..."],
    tokens: Sequence[str],
    labels: Sequence[str] | None = None,
    *,
    title: str = "Norm of the residual stream",
) -> Picture:
    """How long the residual stream is before each layer: a line for each position, and their median.

    The token of the largest norm stands beside it.

    Args:
        stream: what `cache.accumulated_resid` returned, ``[component, pos, d_model]``, with a batch axis of 1 after the
            first or without.
        tokens: the text of each position: ``bridge.to_str_tokens(prompt)``.
        labels: the components' names, which ``return_labels=True`` gives; None: 0, 1, ...
        title: over the picture.

    Raises:
        ValueError: other axes, a batch of several prompts, names of another number, a value that is not finite.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> bridge = TransformerBridge.boot_embedded()
        >>> _, cache = bridge.run_with_cache("Mary and John")
        >>> stream, labels = cache.accumulated_resid(return_labels=True)
        >>> pictures.residual_norms(stream, bridge.to_str_tokens("Mary and John"), labels)
        Picture('Norm of the residual stream')
    """
    norms = of_one_prompt(checked(stream, "the stream"), 3, "the stream is [component, pos, d_model]").norm(dim=-1)
    names = [visible(name) for name in names_for(labels, len(norms), "", "labels")]
    positions = token_labels(tokens, norms.shape[1])
    rows = [
        {"i": i, "p": p, "v": value}
        for i, row in enumerate(norms)
        for p, value in enumerate(compact(row))
    ]  # fmt: skip
    base = (
        rows_chart(rows)
        .transform_calculate(component=lookup(names, "datum.i"), token=lookup(positions, "datum.p"))
        .encode(
            x=alt.X("i:O", title="stream", axis=alt.Axis(labelExpr=lookup(names, "datum.value"), labelAngle=-45)),
            y=alt.Y("v:Q", title="norm (L2)", scale=alt.Scale(type="log" if bool((norms > 0).all()) else "symlog")),
        )
    )
    tooltip = tooltips({"p:Q": "position", "token:N": "token", "component:N": "component", "v:Q": "norm"})
    each = base.mark_line(strokeWidth=1, strokeOpacity=0.45, color=colour("line")).encode(detail="p:N")
    dots = base.mark_circle(size=28, fillOpacity=0.75, color=colour("line")).encode(tooltip=tooltip)
    median = base.mark_line(strokeWidth=3, color=colour("accent")).encode(y="median(v):Q", tooltip=alt.Tooltip(
        "median(v):Q", title="median over positions", format=".3~g"
    ))  # fmt: skip
    component, position = divmod(int(norms.argmax()), norms.shape[1])
    right = 2 * component >= len(names)
    label = base.mark_text(
        align="right" if right else "left", dx=-8 if right else 8, dy=-6, fontSize=11, color=colour("ink")
    ).encode(text="token:N").transform_filter(f"datum.i == {component} && datum.p == {position}")  # fmt: skip
    told = alt.Title(title, subtitle="thin: each position; thick: their median; named: the largest")
    return finished(each + median + dots + label, told, width=max(320, min(620, 42 * len(names))), height=260)
