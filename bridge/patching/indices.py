"""Which pieces of an activation a sweep patches: an index for each, the layer first."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.hooks.act_names import act_name
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.names import suggestion
from bridge.patching.result import data_frame

AXES = ("layer", "pos", "head_index", "head", "src_pos", "dest_pos", "feature")


@dataclass(frozen=True)
class Indices:
    """The indices of a sweep.

    Attributes:
        rows: all of them.
        tried: which of them the model has: of a hybrid's layers some have no such activation, or fewer heads.
        axis_names: what they go through in all combinations; of a data frame, nothing.
        sizes: how many values each of these axes has.
        table: the data frame that they are from.
    """

    rows: list[list[int]]
    tried: list[bool]
    axis_names: Sequence[str]
    sizes: Sequence[int]
    table: Any = None

    @classmethod
    def of_frame(cls, table: Any) -> Indices:
        """Those of a pandas data frame's rows."""
        rows = [[int(i) for i in row] for row in table.itertuples(index=False, name=None)]
        return cls(rows, [True] * len(rows), (), (len(rows),), table)

    @classmethod
    def of_axes(
        cls,
        model: TransformerBridge,
        tokens: Tensor,
        activation_name: str,
        axis_names: Sequence[str],
        clean_cache: Mapping[str, Tensor],
    ) -> Indices:
        """All combinations along axes; the arguments are those of `generic_activation_patch`."""
        there = _layers(model, activation_name)
        sizes = [_size(model, tokens, activation_name, axis, there, clean_cache) for axis in axis_names]
        rows = [list(row) for row in itertools.product(*map(range, sizes))]
        heads = {layer: _heads(model, activation_name, layer) for layer in there}
        at_head = [i for i, axis in enumerate(axis_names) if axis.startswith("head")]
        tried = [row[0] in there and all(row[i] < heads[row[0]] for i in at_head) for row in rows]
        return cls(rows, tried, axis_names, sizes)

    @property
    def given(self) -> Any:
        """They as a `PatchingResult` holds them."""
        return self.rows if self.table is None else self.table

    def frame(self) -> Any:
        """They as a data frame.

        Raises:
            ImportError: pandas is not installed; it is not one of this package's dependencies.
        """
        return data_frame(self.rows, self.axis_names) if self.table is None else self.table


def _layers(model: TransformerBridge, activation_name: str) -> list[int]:
    """The layers that have an activation: of hybrids, some.

    Raises:
        UnknownHookError: none has.
    """
    names = [act_name(activation_name, layer) for layer in range(model.cfg.n_layers)]
    found = [layer for layer, name in enumerate(names) if name in model.hook_dict or name in model.names.aliases]
    if not found:
        model.names.find(names[0])
    return found


def _size(
    model: TransformerBridge,
    tokens: Tensor,
    activation_name: str,
    axis: str,
    there: Sequence[int],
    clean_cache: Mapping[str, Tensor],
) -> int:
    """How many values an index axis has."""
    if axis not in AXES:
        raise ValueError(f"there is no index axis {axis!r}; there are {', '.join(AXES)}.{suggestion(axis, AXES)}")
    if axis == "layer":
        return model.cfg.n_layers
    if axis.endswith("pos"):
        return tokens.shape[1]
    if axis == "feature":
        hook = model.names.find(act_name(activation_name, there[0]))
        if not hook.point.axes.endswith(" feature"):
            raise ValueError(f"{hook.name} has the axes [{hook.point.axes}]: only a point in a basis has features")
        return clean_activation(clean_cache, hook).shape[-1]
    return max(_heads(model, activation_name, layer) for layer in there)


def _heads(model: TransformerBridge, activation_name: str, layer: int) -> int:
    """How many heads an activation has in a layer: some models have more in one than in another."""
    axes = model.names.find(act_name(activation_name, layer)).point.axes.split()
    attn = model.architecture.stack.block_at(layer).attn
    if "n_key_value_heads" in axes:
        return attn.own("n_key_value_heads", model.cfg.n_kv_heads) if attn else model.cfg.n_kv_heads
    return attn.own("n_heads", model.cfg.n_heads) if attn else model.cfg.n_heads


def clean_activation(clean_cache: Mapping[str, Tensor], hook: HookPoint) -> Tensor:
    """The clean run's activation.

    Args:
        clean_cache: of that run.
        hook: the hook point.

    Raises:
        KeyError: it was not cached.
    """
    if hook.name not in clean_cache:
        how = "by default" if hook.point.group == "standard" else f"with names_filter={hook.name!r}"
        raise KeyError(f"the clean cache does not hold {hook.name}; run_with_cache(clean_tokens) caches it {how}")
    return clean_cache[hook.name]
