"""Attention patterns: heads as small multiples."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from bridge.pictures.grid import Axis, grid
from bridge.pictures.labels import token_labels
from bridge.pictures.picture import Picture
from bridge.pictures.style import diverging, sequential
from bridge.pictures.values import checked, limit, names_for

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

    Args:
        pattern: ``cache["pattern", layer]``, ``[head, query, key]`` with a batch axis of 1 in front or without; one
            head, ``[query, key]``; or all layers, ``cache.stack_activation("pattern")``,
            ``[layer, batch, head, query, key]``. Scores may be given too: places that a mask forbids (minus infinity)
            stay blank.
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
    flat = values.reshape(-1, *values.shape[-2:])
    weights = bool((values >= 0).all() and (values <= 1 + 1e-3).all())
    longest = max(len(labels), len(keys))
    cell = _overview_cell(longest, *map(len, sides)) if sides else max(3.0, min(18.0, 220 / longest))
    return grid(
        flat if values.ndim > 2 else flat[0],
        Axis("query", labels, cell),
        Axis("key", keys, cell),
        sequential() if weights else diverging(limit(values)),
        "weight" if weights else "score",
        title,
        panels=panels if values.ndim > 2 else None,
        panels_wide=min(4, n_heads),
        sides=sides,
    )


def _overview_cell(n: int, down: int, across: int) -> float:
    """The pixels of a cell of so many panels that a screen shows them all."""
    return max(12.0, min(72.0, SCREEN[0] / across - 3, SCREEN[1] / down - 3)) / n
