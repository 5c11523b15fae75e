"""`Mixer`: a part that mixes positions without attention, and its hook points."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from adapters.mixers.functions import FUNCTIONS, ONE_STEP, POINTS, STATES
from adapters.paths import join
from adapters.points import Group, PointList, Site
from adapters.views import Branch

#: Names of hook points for modules that TransformerLens calls otherwise.
_NAMES = {"conv1d": "conv", "conv_1d": "conv", "norm": "inner_norm", "rg_lru": "recurrence_out"}


@dataclass(frozen=True)
class Mixer:
    """A part of which what enters and leaves it is declared: a state space, a linear attention, a convolution.

    Attributes:
        path: the module, relative to the block.
        plays: what names its hook points have: those of a ``mixer``, which mixes positions; of an ``attn`` or an
            ``mlp`` that could not be taken apart.
        modules: the modules in it that are each called once, relative to `path`, with the axes of what they return.
    """

    path: str
    plays: Literal["mixer", "attn", "mlp"] = "mixer"
    modules: tuple[tuple[str, str], ...] = ()

    @property
    def submodules(self) -> dict[str, str]:
        """What is known to play its parts: nothing."""
        return {}

    @property
    def mixes(self) -> bool:
        """It mixes positions, and is no attention or MLP that could not be taken apart."""
        return self.plays == "mixer"


def functions_of(module: nn.Module) -> tuple[str, ...]:
    """The functions that a mixer's forward calls, of those in `adapters.mixers.functions`."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = () if code is None else code.co_names
    return tuple(name for name in FUNCTIONS if name in names)


def axes_of(name: str, shape: Sequence[int], batch: int, pos: int) -> str:
    """Names for the axes of what a module in a mixer returned.

    Args:
        name: of the module.
        shape: what it returned.
        batch, pos: how many prompts and positions there were, which are no other size in the model.
    """
    known = {0: "batch"} if shape[0] == batch else {0: "row"}
    if len(shape) > 2 and pos in shape[1:]:
        known[list(shape).index(pos, 1)] = "pos"
    known[max(i for i in range(len(shape)) if i not in known)] = f"d_{name}"
    return " ".join(known.get(i, f"{name}_{i}") for i in range(len(shape)))


def mixer_points(points: PointList, mixer: Mixer, module: str, functions: tuple[str, ...]) -> None:
    """Adds the points inside one mixer.

    Args:
        points: what they are added to.
        mixer: the declaration.
        module: the path of the module.
        functions: the functions that it calls, of those in `adapters.mixers.functions`.
    """
    start = f"batch {points.pos}"
    whole = [name for name in functions if name in ONE_STEP or name == "causal_conv1d_fn"]
    #: What is shown, and how many axes it has behind batch and positions.
    channels = {seen.channel: len(seen.shown.split()) - 2 for name in whole for seen in FUNCTIONS[name]}
    for channel, rank in channels.items():
        name, axes = POINTS[channel]
        group: Group = "extra" if channel == "conv_in" else "standard"
        # What is shown is the model's own tensor with its axes in another order.
        points.add(name, Site(module, "recurrence", channel), Branch(), f"{start} {axes[rank]}", group=group)
    taken = {POINTS[channel][0] for channel in channels}
    for path, axes_returned in mixer.modules:
        last = path.rpartition(".")[2]
        name = f"hook_{_NAMES.get(last, last)}"
        if name not in taken:
            renamed = " ".join(points.pos if axis == "pos" else axis for axis in axes_returned.split())
            points.add(name, Site(join(module, path), "output"), axes=renamed)
    if any(ONE_STEP.get(name) in functions for name in functions):  # its states can be had, position by position
        names = next(STATES[name] for name in functions if name in STATES)
        points.add("hook_ssm_state", Site(module, "recurrence", "state"), axes=f"{start} {names}", group="extra")
