"""Training checkpoints that were published with a model."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Steps at which EleutherAI saved Pythia.
PYTHIA_STEPS = (0, *(2**i for i in range(10)), *range(1000, 143001, 1000))
#: Steps at which stanford-crfm saved its GPT-2 models.
STANFORD_STEPS = (
    *range(0, 100, 10), *range(100, 2000, 50), *range(2000, 20000, 100), *range(20000, 400001, 1000),
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """One of a model's checkpoints: where it is, and which one it is."""

    repository: str
    revision: str
    index: int
    value: int


def checkpoint_steps(name: str) -> tuple[int, ...]:
    """The training steps at which a model was saved.

    Raises:
        ValueError: none are known for this model.

    Example:
        >>> from bridge.loading.training_checkpoints import checkpoint_steps
        >>> checkpoint_steps("EleutherAI/pythia-70m")[:3]
        (0, 1, 2)
    """
    if re.match(r"(EleutherAI/)?pythia-", name):
        return PYTHIA_STEPS
    if name.startswith("stanford-crfm/"):
        return STANFORD_STEPS
    raise ValueError(f"no checkpoints are known for {name!r}; they are for EleutherAI/pythia-* and stanford-crfm/*")


def checkpoint_revision(name: str, index: int | None, value: int | None) -> Checkpoint | None:
    """Where a checkpoint is.

    Args:
        name: the model's name on the hub.
        index: its position in the list of the model's checkpoints; negative counts from the end.
        value: its training step.

    Raises:
        ValueError: both are given, or there is no such checkpoint.
    """
    if index is None and value is None:
        return None
    if index is not None and value is not None:
        raise ValueError(f"checkpoint_index={index} and checkpoint_value={value} exclude each other")
    steps = checkpoint_steps(name)
    if value is not None:
        if value not in steps:
            near = sorted(steps, key=lambda step: abs(step - value))[:3]
            raise ValueError(f"{name} has no checkpoint at step {value}; the nearest are {sorted(near)}")
        index = steps.index(value)
    assert index is not None
    if not -len(steps) <= index < len(steps):
        raise ValueError(f"{name} has {len(steps)} checkpoints; checkpoint_index={index} is out of range")
    index %= len(steps)
    prefix = "step" if "pythia" in name else "checkpoint-"
    return Checkpoint(name, f"{prefix}{steps[index]}", index, steps[index])
