"""Parts of a model, such as ``model.blocks[0].mlp``, that can be assigned to and called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from adapters import Weights
from adapters.paths import join
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.names import Names
from bridge.weights.component_tree import Component, ComponentList, Tree


class EditableComponent(Component):
    """A part of the model that can be assigned to: a weight is written into, a module takes the part's place."""

    def __init__(self, tree: EditableTree, name: str) -> None:
        object.__setattr__(self, "_tree", tree)
        object.__setattr__(self, "name", name)

    def __setattr__(self, attribute: str, value: Any) -> None:
        self._tree.put(self.name, attribute, value)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """What the part makes of tensors: a block of a residual stream, a norm or an MLP of what it reads.

        Raises:
            TypeError: the part cannot be called by itself, as attention cannot.
        """
        tree: Any = self._tree
        made: Tensor = tree.bridge.call_part(self.name, *inputs, **kwargs)
        return made

    @property
    def module(self) -> nn.Module:
        """The Hugging Face module that plays this part.

        Raises:
            AttributeError: no single module does.
        """
        tree: Any = self._tree
        return tree.bridge.original_model.get_submodule(tree.bridge.module_path(self.name))


class EditableList(ComponentList):
    """The blocks of a model."""

    def __getitem__(self, index: int) -> EditableComponent:
        found = super().__getitem__(index)
        return EditableComponent(self._tree, found.name)  # type: ignore[arg-type]


class EditableTree(Tree):
    """`Tree` with parts that can be assigned to.

    Args:
        names, weights: as for `Tree`.
        bridge: the bridge that it belongs to.
    """

    def __init__(self, names: Names, weights: Callable[[], Weights], bridge: Any) -> None:
        super().__init__(names, weights)
        self.bridge = bridge

    def get(self, prefix: str, name: str, others: Iterable[str] = ()) -> Any:
        point = self.names.points.get(self.children.get(prefix, {}).get(name, ""))
        if point is not None:
            return point  # also where a module with hook points of its own stands at it
        found = super().get(prefix, name, others)
        if isinstance(found, Component):
            return EditableComponent(self, found.name)
        return EditableList(self, found.name) if isinstance(found, ComponentList) else found

    def put(self, prefix: str, name: str, value: Any) -> None:
        """Assigns to a part.

        Raises:
            AttributeError: there is no such weight or part.
            TypeError: what is there cannot be replaced by this.
            ValueError: a weight of another shape.
        """
        found = self.get(prefix, name)
        full = join(prefix, name)
        if isinstance(found, Component) and isinstance(value, nn.Module | EditableComponent):
            self.bridge.replace_part(full, value if isinstance(value, nn.Module) else value.module)
            return
        if isinstance(found, HookPoint) and isinstance(value, nn.Module):
            self.bridge.splice(found.name, value)
            return
        if not isinstance(found, Tensor) or not isinstance(value, Tensor):
            raise TypeError(f"{full} cannot be set to {type(value).__name__}: weights take tensors, parts take modules")
        if found.shape != value.shape:
            raise ValueError(f"{full} has shape {list(found.shape)}, not {list(value.shape)}")
        parameters = {p.untyped_storage().data_ptr() for p in self.bridge.original_model.parameters()}
        if found.untyped_storage().data_ptr() not in parameters:
            raise TypeError(f"{full} is computed from the model's parameters: writing to it would change nothing")
        self.bridge.part_embeddings({full: value})
        with torch.no_grad():
            self.get(prefix, name).copy_(value)
