"""Attribute access to hook points: ``bridge.blocks[3].attn.hook_z``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridge.hook_point import HookPoint
from bridge.names import Names, suggestion


class Tree:
    """The hook points by the parts of their names.

    Args:
        names: all names and aliases.
    """

    def __init__(self, names: Names) -> None:
        self.names = names
        self._children: dict[str, dict[str, str]] | None = None

    @property
    def children(self) -> dict[str, dict[str, str]]:
        """For each prefix, what may follow it, and the full name of that."""
        if self._children is None:
            self._children = {}
            for name in (*self.names.points, *self.names.aliases):
                prefix = ""
                for part in name.split("."):
                    full = f"{prefix}.{part}" if prefix else part
                    self._children.setdefault(prefix, {})[part] = full
                    prefix = full
        return self._children

    def get(self, prefix: str, name: str) -> HookPoint | Component | ComponentList:
        """What stands under `name` at `prefix`.

        Raises:
            AttributeError: nothing does.
        """
        below = self.children.get(prefix, {})
        full = below.get(name)
        if full is None:
            raise AttributeError(f"{prefix or 'the bridge'} has no {name!r}.{suggestion(name, below)}")
        if full not in self.children:
            return self.names.find(full)
        if all(part.isdigit() for part in self.children[full]):
            return ComponentList(self, full)
        return Component(self, full)


class Component:
    """A part of the model, such as a block or its attention, with the hook points that stand in it."""

    def __init__(self, tree: Tree, name: str) -> None:
        self._tree = tree
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self._tree.get(self.name, attribute)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._tree.children[self.name]]

    def __repr__(self) -> str:
        return f"Component({self.name}: {', '.join(self._tree.children[self.name])})"


class ComponentList:
    """The blocks of a model."""

    def __init__(self, tree: Tree, name: str) -> None:
        self._tree = tree
        self.name = name

    def __len__(self) -> int:
        return len(self._tree.children[self.name])

    def __getitem__(self, index: int) -> Component:
        n = len(self)
        if not -n <= index < n:
            raise IndexError(f"{self.name} has {n} members; {index} is out of range")
        return Component(self._tree, f"{self.name}.{index % n}")

    def __iter__(self) -> Iterator[Component]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"ComponentList({self.name}: {len(self)} members)"
