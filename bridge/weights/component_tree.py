"""Attribute access to hook points and weights: ``bridge.blocks[3].attn.hook_z``, ``bridge.blocks[3].attn.W_Q``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from adapters.weights import Weights
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.names import Names, suggestion
from bridge.hooks.shapes import shape_text
from bridge.hooks.tracing import OpenTrace, trace_of
from bridge.weights.factored_matrix import FactoredMatrix


class NameTree:
    """The hook points by the parts of their names.

    Args:
        names: all names and aliases.
        weights: gives the canonical weights, which are in the tree as the hook points are.
    """

    def __init__(self, names: Names, weights: Callable[[], Weights]) -> None:
        self.names = names
        self.weights = weights
        self._children: dict[str, dict[str, str]] | None = None

    @property
    def children(self) -> dict[str, dict[str, str]]:
        """For each prefix, what may follow it, and the full name of that."""
        if self._children is None:
            self._children = {}
            grouped = [name.replace("._", ".") for name in self.weights().getters if "._" in name]
            for name in (*self.names.points, *self.names.aliases, *self.weights().getters, *grouped):
                prefix = ""
                for part in name.split("."):
                    full = f"{prefix}.{part}" if prefix else part
                    self._children.setdefault(prefix, {})[part] = full
                    prefix = full
        return self._children

    def refresh(self) -> None:
        """Forgets what may follow a prefix: names have come or gone."""
        self._children = None

    def get(
        self, prefix: str, name: str, others: Iterable[str] = ()
    ) -> HookPoint | Component | ComponentList | Tensor | FactoredMatrix:
        """What stands under `name` at `prefix`.

        Args:
            prefix: the full name of a part, "" for the whole model.
            name: of what is wanted.
            others: names in addition to those of the tree, to be suggested where one was mistyped.

        Raises:
            AttributeError: nothing does.
        """
        below = self.children.get(prefix, {})
        full = below.get(name)
        if full is None:
            if name in ("OV", "QK") and "W_O" in below:  # of one layer's heads, [n_heads, d_model, d_model]
                W_Q, W_K, W_V, W_O = (self._weight(f"{prefix}.W_{letter}") for letter in "QKVO")
                return FactoredMatrix(W_V, W_O) if name == "OV" else FactoredMatrix(W_Q, W_K.mT)
            raise AttributeError(f"{prefix or 'the bridge'} has no {name!r}.{suggestion(name, (*below, *others))}")
        if full not in self.children:
            return self._leaf(full)
        if all(part.isdigit() for part in self.children[full]):
            return ComponentList(self, full)
        return Component(self, full)

    def _weight(self, name: str) -> Tensor:
        found = self._leaf(name)
        assert isinstance(found, Tensor), name
        return found

    def _leaf(self, name: str) -> HookPoint | Tensor:
        weights = self.weights()
        if name in weights.getters:
            return weights[name]
        grouped = name[: name.rfind(".") + 1] + "_" + name[name.rfind(".") + 1 :]
        if grouped in weights.getters:
            # As HookedTransformer shows grouped keys and values: repeated for each query head.
            each, heads = weights[grouped], weights[name[: name.rfind(".")] + ".W_O"]
            return each.repeat_interleave(len(heads) // len(each), dim=0)
        return self.names.find(name)


class Component:
    """A part of the model, such as a block or its attention, with its hook points and weights."""

    def __init__(self, tree: NameTree, name: str) -> None:
        self.__dict__["_tree"] = tree
        self.__dict__["name"] = name

    @property
    def output(self) -> Tensor:
        """What it returns, in a trace: the same as at its ``hook_out``, where it has one."""
        return self._trace("output").part_output(self.name)

    @property
    def input(self) -> Tensor:
        """What it is given first, in a trace: the same as at its ``hook_in``, where it has one."""
        return self._trace("input").part_input(self.name)

    @property
    def outputs(self) -> Any:
        """All that its module returns, in a trace."""
        return self._trace("outputs").part_outputs(self.name)

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All that its module is called with, in a trace: positional arguments, and those with names."""
        return self._trace("inputs").part_inputs(self.name)

    def _trace(self, asked: str) -> OpenTrace:
        return trace_of(self._tree.names, f"{self.name}.{asked}")

    def __setattr__(self, attribute: str, value: Any) -> None:
        if attribute == "output":
            return self._trace(attribute).set_part_output(self.name, value)
        if attribute == "input":
            return self._trace(attribute).set_part_input(self.name, value)
        if attribute == "inputs":
            return self._trace(attribute).set_part_inputs(self.name, value)
        raise AttributeError(
            f"{self.name}.{attribute} cannot be assigned, since a part is made anew each time it is asked for; "
            "edit a weight in place (W[:] = ...), or replace the module in original_model"
        )

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self._tree.get(self.name, attribute)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._tree.children[self.name]]

    def __repr__(self) -> str:
        points = {name: hook for name, hook in self._tree.names.points.items() if name.startswith(f"{self.name}.")}
        shown = {n.removeprefix(f"{self.name}."): h for n, h in points.items() if h.point.group != "extra"}
        weights = self._tree.weights()
        width = max(map(len, shown), default=0)
        lines = [f"{name:{width}}  {shape_text(weights.cfg, hook.point.axes)}" for name, hook in shown.items()]
        if len(points) > len(shown):
            lines.append(f"and {len(points) - len(shown)} more hook points, when named")
        held = [n.removeprefix(f"{self.name}.") for n in weights.getters if n.startswith(f"{self.name}.")]
        if held:
            lines.append(f"weights: {', '.join(held)}")
        return "\n  ".join([self.name, *lines])


class ComponentList:
    """The blocks of a model, by their numbers: one that has no hook points is not among them."""

    def __init__(self, tree: NameTree, name: str) -> None:
        self._tree = tree
        self.name = name

    def __len__(self) -> int:
        return len(self._tree.children[self.name])

    def __getitem__(self, index: int) -> Component:
        numbers = self._numbers()
        if type(index) is not int:
            raise TypeError(
                f"{self.name}[{index!r}]: an index must be a whole number; for several, such as a slice, use "
                f"[bridge.{self.name}[i] for i in range(...)]"
            )
        number = index if index >= 0 else numbers[-1] + 1 + index
        if number not in numbers:
            some = f": {', '.join(map(str, numbers))}" if len(numbers) <= numbers[-1] else ""
            raise IndexError(f"{self.name} has {len(numbers)} members{some}; {index} is out of range")
        return Component(self._tree, f"{self.name}.{number}")

    def __iter__(self) -> Iterator[Component]:
        return (self[i] for i in self._numbers())

    def _numbers(self) -> list[int]:
        return sorted(map(int, self._tree.children[self.name]))

    def __repr__(self) -> str:
        return f"ComponentList({self.name}: {len(self)} members)"
