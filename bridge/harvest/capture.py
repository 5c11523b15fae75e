"""The activations of one batch, each taken as it comes, without what pads it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.harvest.errors import HarvestError
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.listener import HookFunction

#: Called with a hook point's name and its activation while the model runs.
Take = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class RowAxes:
    """Where a hook point's activation has its batch and its positions.

    Attributes:
        position: the axis of the positions that make rows.
        keys: the axis of the keys, where there is one besides it.
        fill: what stands for keys that an input does not reach.
    """

    position: int
    keys: int | None
    fill: float

    @classmethod
    def of(cls, point: HookPoint) -> RowAxes:
        """The places of a hook point.

        Raises:
            HarvestError: its activation has no row for each token.
        """
        axes = point.point.axes.split()
        if axes[0] != "batch" or "decoder_pos" in axes or not {"pos", "key_pos"} & set(axes):
            raise HarvestError(
                f"{point.name} has the axes [{point.point.axes}]: it has no row for each token of the source, "
                "so it cannot be harvested"
            )
        if "pos" not in axes:
            return cls(axes.index("key_pos"), None, 0.0)
        keys = axes.index("key_pos") if "key_pos" in axes else None
        return cls(axes.index("pos"), keys, float("-inf") if point.name.endswith("scores") else 0.0)

    def rows(self, activation: Tensor, taken: Int[Tensor, "row"], context_size: int) -> Tensor:
        """A row for each token that is taken.

        Args:
            activation: ``[batch, ...]`` with the axes of the hook point.
            taken: ``[row]``, the tokens among ``batch * pos``.
            context_size: how many keys a row has.
        """
        if self.keys is not None and activation.shape[self.keys] < context_size:
            assert self.keys == activation.ndim - 1
            missing = context_size - activation.shape[-1]
            activation = torch.nn.functional.pad(activation, (0, missing), value=self.fill)
        rows = activation.movedim(self.position, 1).flatten(0, 1)
        return rows if len(taken) == len(rows) else rows[taken.to(rows.device)]


def stop_layer(bridge: TransformerBridge, points: Sequence[HookPoint]) -> int | None:
    """The first layer that no hook point needs; None where the model has to run to its end."""
    deepest = max(point.point.depth for point in points)
    if bridge.no_layer_runs or deepest >= bridge.cfg.n_layers:
        return None
    return int(deepest) + 1


def model_arguments(bridge: TransformerBridge, points: Sequence[HookPoint]) -> dict[str, Any]:
    """What spares a model work that no hook point needs: keys and values kept, logits of every position."""
    known = inspect.signature(type(bridge.core).forward).parameters
    wanted: dict[str, Any] = {"use_cache": False} if "use_cache" in known else {}
    if "logits_to_keep" in known and not any(point.name.startswith("unembed") for point in points):
        wanted["logits_to_keep"] = 1
    return wanted


def run(
    bridge: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    mask: Int[Tensor, "batch pos"] | None,
    points: Sequence[HookPoint],
    interventions: Sequence[tuple[str, HookFunction]],
    stop_at_layer: int | None,
    arguments: dict[str, Any],
    take: Take,
) -> None:
    """Runs the model as far as it is needed, and hands over each activation as it comes.

    Args:
        bridge: the bridge.
        tokens: the inputs.
        mask: 1 for tokens, 0 for padding; None where nothing is padded.
        points: whose activations.
        interventions: hooks that are active meanwhile, and whose effect the activations have.
        stop_at_layer: where to stop, or None.
        arguments: further arguments of the model.
        take: what the activations are handed to.
    """

    def give(activation: Tensor, hook: HookPoint) -> None:
        take(hook.name, activation)

    seen = [(point.name, give) for point in points]
    with torch.no_grad():
        bridge.run_with_hooks(
            tokens,
            fwd_hooks=[*interventions, *seen],
            return_type=None,
            attention_mask=mask,
            stop_at_layer=stop_at_layer,
            **arguments,
        )
