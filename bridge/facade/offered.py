"""What a bridge offers of a model, and what it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, repr=False)
class Offered:
    """What a bridge offers; printed, what it does not offer is listed with the reasons.

    Attributes:
        model: its name.
        names: the hook points, in the order of the computation.
        not_offered: hook points, or what their names begin with, that are missing, and why.
        inferred: the model's class has no adapter: all this was inferred from a run and proved on the model.
    """

    model: str
    names: tuple[str, ...]
    not_offered: Mapping[str, str]
    inferred: bool

    @property
    def summary(self) -> str:
        """It in a sentence."""
        if not self.inferred:
            return f"{self.model}: {len(self.names)} hook points, as its adapter declares"
        left_out = f"; {len(self.not_offered)} things are not offered: print(bridge.offered())"
        return (
            f"{self.model} has no adapter. One was inferred and proved on it, with {len(self.names)} hook points"
            f"{left_out if self.not_offered else ''}"
        )

    def __repr__(self) -> str:
        why = [f"  not offered: {name}: {reason}" for name, reason in self.not_offered.items()]
        return "\n".join([self.summary, *why])
