"""What a bridge offers of a model, and what it does not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from adapters.paths import join

_ADAPTERS = {
    "none": "no adapter", "there": "an adapter, which was not used",
    "other options": "an adapter for other options than these",
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class SupportReport:
    """What a bridge offers; printed, what it does not offer is listed with the reasons.

    Attributes:
        model: its name.
        names: the hook points, in the order of the computation.
        not_offered: hook points, or what their names begin with, that are missing, and why.
        inferred: all this was inferred from a run, and each hook point was tried on the model: it is seen once, with
            its shape, and writing there what was read, or something else, does what it should. Whether it is the
            activation of its name is for `adapters.verify` to prove.
        adapter: whether the model's class has an adapter: ``none``, one that is ``there`` (though it may not be asked,
            with ``automatic="always"``), or one that is for ``other options`` of its configuration.
        modules_without_points: of a model of images or sound and text, the modules that are not the text part, with
            their classes.
    """

    model: str
    names: tuple[str, ...]
    not_offered: Mapping[str, str]
    inferred: bool
    adapter: Literal["none", "there", "other options"]
    modules_without_points: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """It in a sentence."""
        if not self.inferred:
            return f"{self.model}: {len(self.names)} hook points, as its adapter declares"
        count = len(self.not_offered)
        left_out = f"; {count} things are not offered: print(bridge.offered())" if count else ""
        return (
            f"{self.model} has {_ADAPTERS[self.adapter]}. One was inferred from a run, with {len(self.names)} hook "
            f"points that were tried on it; adapters.verify(bridge) proves what holds{left_out}"
        )

    def __repr__(self) -> str:
        why = [f"  not offered: {name}: {reason}" for name, reason in self.not_offered.items()]
        modules_without_points = [
            f"  has no hook points: {path} ({cls})" for path, cls in self.modules_without_points.items()
        ]
        return "\n".join([self.summary, *why, *modules_without_points])


def modules_without_points(model: nn.Module, used: Collection[str], path: str = "") -> dict[str, str]:
    """The outermost modules with parameters that neither are nor hold what is used, with the names of their classes.

    Args:
        model: the model, or the module in it at `path`.
        used: paths of modules.
        path: where to look.
    """
    if path in used or not any(True for _ in model.parameters()):
        return {}
    if path and not any(each.startswith(f"{path}.") for each in used):
        return {path: type(model).__name__}
    found: dict[str, str] = {}
    for name, child in model.named_children():
        found |= modules_without_points(child, used, join(path, name))
    return found
