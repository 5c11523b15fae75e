"""What the layers of a model are made of."""

from __future__ import annotations

from adapters.architecture import Architecture
from adapters.config import ModelConfig
from bridge.hooks.names import suggestion
from bridge.weights.component_tree import Component, NameTree

_KNOWN = ("attn", "cross_attn", "mixer", "mlp")


def parts_of_layers(tree: NameTree, architecture: Architecture, cfg: ModelConfig) -> dict[str, list[str]]:
    """The names of each layer's parts, in the order of the computation, by the layer's name.

    Args:
        tree: of the model.
        architecture: what is declared.
        cfg: the facts about the model.

    Example:
        >>> from bridge import TransformerBridge
        >>> TransformerBridge.boot_embedded().layer_types[0]
        'attn+mlp'
    """
    return {
        f"{stack.name}.{index}": [named.name for named in stack.block_at(index).named]
        for stack in architecture.stacks
        for index in range(len(tree.children.get(stack.name, {})) if stack.one_of_two else cfg.n_layers)
    }


def layers_with(part: str, layers: dict[str, list[str]], tree: NameTree) -> list[tuple[int, Component]]:
    """The layers that have a part; see `TransformerBridge.blocks_with`.

    Args:
        part: its name.
        layers: from `parts_of_layers`.
        tree: of the model.

    Raises:
        ValueError: no part is called so, in any model.
    """
    known = sorted({*_KNOWN, *(name for names in layers.values() for name in names)})
    if part not in known:
        mixes = part in ("mamba", "ssm", "linear_attn")
        hint = " State spaces and linear attention are mixers." if mixes else suggestion(part, known)
        raise ValueError(f"no part of a block is called {part!r}: there are {', '.join(known)}.{hint}")
    return [(int(name.split(".")[-1]), Component(tree, name)) for name, names in layers.items() if part in names]
