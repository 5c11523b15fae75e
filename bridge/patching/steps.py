"""One patch of a sweep: where it stands, which piece it is of, and what that was in the clean run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bridge.hooks.hook_point import HookPoint
from bridge.patching.regions import Region, from_position, region_of
from bridge.patching.setters import PatchSetter


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
