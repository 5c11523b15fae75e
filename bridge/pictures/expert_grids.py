"""Mixtures of experts: which tokens are sent where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.pictures.grid import Axis, grid
from bridge.pictures.labels import token_labels
from bridge.pictures.picture import Picture
from bridge.pictures.style import sequential
from bridge.pictures.values import checked, limit, without_batch


def routing(
    weights: Float[Tensor, "..."] | Mapping[int, Float[Tensor, "..."]],
    tokens: Sequence[str],
    *,
    title: str = "Expert routing",
) -> Picture:
    """Which experts each token is sent to: experts down, tokens across, a panel for each layer.

    Args:
        weights: ``cache["blocks.0.mlp.hook_expert_weights"]``, ``[pos, expert]``, with a batch axis of 1 in front or
            without; or a dictionary of these by layer. Experts with weight zero stay blank.
        tokens: the text of each position: ``bridge.to_str_tokens(prompt)``.
        title: over the picture.

    Raises:
        ValueError: other axes, a batch of several prompts, layers with different numbers of experts, a negative weight.

    Example:
        >>> import torch
        >>> from bridge import pictures
        >>> weights = {0: torch.rand(3, 4).softmax(-1), 2: torch.rand(3, 4).softmax(-1)}
        >>> pictures.routing(weights, ["<bos>", " Mary", " and"])
        Picture('Expert routing')
    """
    by_layer = dict(weights) if isinstance(weights, Mapping) else None
    given = [weights] if isinstance(weights, Tensor) else list((by_layer or {}).values())
    if not given:
        raise ValueError(f"weights are {weights!r}; give a tensor [pos, expert], or a dictionary of them by layer")
    tables = [without_batch(checked(each, "the weights"), 2, "weights of experts [pos, expert]") for each in given]
    shapes = {tuple(table.shape) for table in tables}
    if len(shapes) > 1:
        raise ValueError(
            f"the layers' weights have different shapes, {sorted(map(list, shapes))}: one picture for each"
        )
    values = torch.stack(tables).mT  # layer expert pos
    if bool((values < 0).any()):
        raise ValueError("weights of experts hold negative numbers: give hook_expert_weights, not hook_router_logits")
    labels = token_labels(tokens, values.shape[-1])
    n_experts = values.shape[-2]
    top = limit(values)
    values = values.masked_fill(values == 0, float("-inf"))
    alone = by_layer is None
    wide = max(5.0, min(26.0, (900 if alone else 480) / len(labels)))
    high = max(3.0, min(20.0, (600 if alone else 320) / n_experts))
    return grid(
        values[0] if alone else values,
        Axis("expert", [str(expert) for expert in range(n_experts)], high),
        Axis("token", labels, wide),
        sequential(top),
        "weight",
        title,
        panels=None if by_layer is None else [f"layer {layer}" for layer in by_layer],
        panels_wide=max(1, int(1050 // (wide * len(labels) + 20))),
    )
