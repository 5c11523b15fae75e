"""A model's weights over all layers, and those that may have one of several names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.config import ModelConfig
from adapters.weights import Weights
from bridge.weights.component_tree import NameTree


def stacked_weight(tree: NameTree, cfg: ModelConfig, part: str, name: str) -> Float[Tensor, "layer ..."]:
    """One weight of all blocks.

    Args:
        tree: of the model.
        cfg: the facts about it.
        part: of a block, such as ``attn``.
        name: of the weight, such as ``W_Q``.

    Returns:
        ``[layer, ...]``, a new tensor.

    Raises:
        AttributeError: the blocks do not have it, or several of it each.
    """
    stack = "blocks" if any(key.startswith("blocks.0.") for key in tree.weights().getters) else "encoder"
    without = [i for i in range(cfg.n_layers) if part not in tree.children.get(f"{stack}.{i}", {})]
    if without and len(without) < cfg.n_layers:
        raise AttributeError(
            f"layers {', '.join(map(str, without))} of {cfg.model_name} have no {part}, and so no {name}: go through "
            f'those that have, [block.{part}.{name} for _, block in bridge.blocks_with("{part}")]'
        )
    found = [tree.get(f"{stack}.{i}.{part}", name) for i in range(cfg.n_layers)]
    tensors = [weight for weight in found if isinstance(weight, Tensor)]
    if len(tensors) < len(found):
        raise AttributeError(f"{cfg.model_name} has several {name} in each block: see tl_named_parameters()")
    shapes = sorted({tuple(weight.shape) for weight in tensors})
    if len(shapes) > 1:
        raise AttributeError(
            f"{name} of {cfg.model_name} has other shapes in other layers, {', '.join(map(str, shapes))}: take them "
            f"one by one, bridge.blocks[0].{part}.{name}"
        )
    return torch.stack(tensors)


def stacked_where(
    tree: NameTree, cfg: ModelConfig, part: str, path: str, reshape: Callable[[Tensor], Tensor] | None
) -> tuple[list[int], Float[Tensor, "layer ..."]]:
    """One weight of those blocks that have a part, and which blocks they are.

    Args:
        tree, cfg: as for `stacked_weight`.
        part: of a block, such as ``mlp``.
        path: of the weight from the block, such as ``mlp.W_in``.
        reshape: is done to each weight; None: nothing.

    Raises:
        ValueError: no block has it.
    """
    getters, found = tree.weights().getters, dict[int, Tensor]()
    at, _, name = path.rpartition(".")
    for i in range(cfg.n_layers):
        if any(key.startswith(f"blocks.{i}.{part}.") for key in getters):
            weight = tree.get(f"blocks.{i}.{at}" if at else f"blocks.{i}", name)
            if not isinstance(weight, Tensor):
                raise ValueError(f"blocks.{i}.{path} is no weight")
            found[i] = weight if reshape is None else reshape(weight)
    if not found:
        raise ValueError(f"no block of {cfg.model_name} has {part!r}")
    return list(found), torch.stack(list(found.values()))


def first_weight(weights: Weights, *names: str) -> Float[Tensor, "..."]:
    """The first weight that a model has of some names.

    Args:
        weights: the model's.
        names: HookedTransformer's state-dict names.

    Raises:
        AttributeError: it has none of them.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.weights.accessors import first_weight
        >>> first_weight(TransformerBridge.boot_embedded().weights, "unembed.W_U").shape[0]
        128
    """
    for name in names:
        if name in weights.getters:
            return weights[name]
    raise AttributeError(f"{weights.cfg.model_name} has no {names[0]}")
