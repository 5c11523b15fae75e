"""The patches of a sweep: where each stands, which piece it is of, and what that was in the clean run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.hooks.hook_point import HookPoint
from bridge.patching.regions import Region, from_position, region_of
from bridge.patching.setters import PatchSetter

#: From the logits ``[batch, pos, d_vocab]`` of one patched run to numbers.
Numbers = Callable[[Float[Tensor, "batch pos d_vocab"]], Float[Tensor, "..."]]


@dataclass(frozen=True)
class PatchStep:
    """One patch.

    Attributes:
        hook: where it stands.
        place: the index, the layer first.
        clean: the activation of the clean run.
        setter: copies the piece.
    """

    hook: HookPoint
    place: list[int]
    clean: Tensor
    setter: PatchSetter

    @property
    def region(self) -> Region | None:
        """What the setter writes, where that is known."""
        return region_of(self.setter, self.hook.point.axes)

    def whole(self, activation: Tensor) -> Tensor | None:
        """Patches the corrupted activation of all positions."""
        return self.setter(activation, list(self.place), self.clean)

    def later(self, activation: Tensor, start: int) -> Tensor | None:
        """Patches the corrupted activation of the positions from `start` on."""
        region = self.region
        if region is None or not start:
            return self.whole(activation)
        if activation.shape[1 + region.pos] == self.clean.shape[1 + region.pos]:  # keys and values made from latents
            return self.whole(activation)  # are made for all positions, those before `start` too
        place, clean = from_position(region, self.place, self.clean, start)
        return self.setter(activation, place, clean)


@dataclass(frozen=True)
class Patches:
    """The patches of a sweep, and what is measured of each.

    Attributes:
        model: the bridge.
        tokens: the corrupted prompts.
        steps: the patches.
        metric: from the logits of one patched run to numbers.
        attention_mask: 1 for tokens and 0 for padding; None: no padding.
        report: called with how many more patches are done.
    """

    model: TransformerBridge
    tokens: Int[Tensor, "batch pos"]
    steps: Sequence[PatchStep]
    metric: Numbers
    attention_mask: Int[Tensor, "batch pos"] | None
    report: Callable[[int], object]

    @property
    def hooks(self) -> list[HookPoint]:
        """The hook points at which anything is patched."""
        return list(dict.fromkeys(step.hook for step in self.steps))
