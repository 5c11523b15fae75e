"""`Mixer`: a part that mixes positions without attention, and its hook points."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from adapters.attention import Attention
from adapters.norms import Norm, NormKind, norm_points
from adapters.points import Group, PointList, Site, join
from adapters.views import Branch, FlatRows

# ----------------------------------------------------------------------------------------------------------------------
# The functions in which transformers' mixers convolve and recur, and what each argument of them is.
#
# The mixers of transformers call a few functions by fixed names, with torch code behind them or a kernel. Their
# arguments say what a mixer computes from, in whichever of them it is computed.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionTensor:
    """One argument, or the result, of a function.

    Attributes:
        channel: what it is: ``conv_in``, ``conv``, ``x``, ``dt``, ``B``, ``C``, ``q``, ``k``, ``v``, ``log_decay``,
            ``beta``, ``recurrence``.
        parameter: the name of the argument; None for the result (of a tuple, its first element).
        axes: the tensor's axes: ``b`` the batch, ``p`` positions (missing in functions of one step), ``_`` an axis
            along which all values are one and the same, any other letter as it is.
        gate: of a result, the name of an argument that the function may be given, by whose SiLU it multiplies the
            result last. What is shown is the result before that: the function of a whole sequence leaves the gate to
            the mixer, and so do most mixers in a step (Falcon H1 does not).
    """

    channel: str
    parameter: str | None
    axes: str
    gate: str | None = None

    @property
    def shown(self) -> str:
        """The axes of the activation that is shown: batch and positions first."""
        rest = [axis for axis in self.axes.split() if axis not in ("b", "p", "_")]
        return " ".join(["b", "p" if "p" in self.axes.split() else "1", *rest])


#: What the argument is called that a channel is, where it has another name.
_ARGUMENTS = {"x": "hidden_states", "q": "query", "k": "key", "v": "value", "log_decay": "g"}


def _recurrence(axes: str, gate: str | None = None, **given: str) -> tuple[FunctionTensor, ...]:
    """What a recurrence is given, by channel, and what it returns, each with its axes; see `FunctionTensor`."""
    arguments = (FunctionTensor(channel, _ARGUMENTS.get(channel, channel), own) for channel, own in given.items())
    return (*arguments, FunctionTensor("recurrence", None, axes, gate))


_CONVOLUTION = FunctionTensor("conv_in", "hidden_states", "b c p"), FunctionTensor("conv", None, "b c p")
#: The gated delta rule, with one decay for each head.
_GATED_DELTA = _recurrence("b p h d", q="b p h d", k="b p h d", v="b p h d", log_decay="b p h", beta="b p h")
#: The same with a decay of its own for each column of the keys.
_KIMI_DELTA = _recurrence("b p h d", q="b p h d", k="b p h d", v="b p h d", log_decay="b p h d", beta="b p h")
#: What is seen of each function, by its name.
FUNCTIONS: dict[str, tuple[FunctionTensor, ...]] = {
    "causal_conv1d_fn": _CONVOLUTION,
    "causal_conv1d_update": _CONVOLUTION,
    "mamba_selective_scan": _recurrence("b d p", x="b d p", dt="b d p", B="b n p", C="b n p"),
    "mamba_selective_state_update": _recurrence("b d", x="b d", dt="b d", B="b n", C="b n"),
    "mamba2_chunk_scan": _recurrence("b p h d", x="b p h d", dt="b p h", B="b p g n", C="b p g n"),
    "mamba2_selective_state_update": _recurrence("b h d", "z", x="b h d", dt="b h _", B="b g n", C="b g n"),
    "torch_chunk_gated_delta_rule": _GATED_DELTA,
    "torch_recurrent_gated_delta_rule": _GATED_DELTA,
    "chunk_kimi_delta_attention": _KIMI_DELTA,
    "recurrent_kimi_delta_attention": _KIMI_DELTA,
}

#: For each function of a whole sequence, the one of the same module that does a step.
ONE_STEP: dict[str, str] = {
    "mamba_selective_scan": "mamba_selective_state_update",
    "mamba2_chunk_scan": "mamba2_selective_state_update",
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}

#: For each channel, the hook point (TransformerLens' name where it has one), and the axes that follow the positions'.
POINTS: dict[str, tuple[str, dict[int, str]]] = {
    "conv_in": ("hook_pre_conv", {1: "d_conv"}),
    "conv": ("hook_conv", {1: "d_conv"}),
    "x": ("hook_x", {1: "d_inner", 2: "ssm_head ssm_d_head"}),
    "dt": ("hook_dt_proj", {1: "ssm_head"}),
    "B": ("hook_B", {1: "d_state", 2: "ssm_group d_state"}),
    "C": ("hook_C", {1: "d_state", 2: "ssm_group d_state"}),
    "q": ("hook_q", {2: "key_head d_key"}),
    "k": ("hook_k", {2: "key_head d_key"}),
    "v": ("hook_v", {2: "value_head d_value"}),
    "log_decay": ("hook_log_decay", {1: "value_head", 2: "value_head d_key"}),
    "beta": ("hook_beta", {1: "value_head"}),
    "recurrence": ("hook_recurrence_out", {1: "d_inner", 2: "value_head d_value"}),
}

#: The axes of a state of each function of a whole sequence, behind batch and positions.
STATES: dict[str, str] = {
    "mamba_selective_scan": "d_inner d_state",
    "mamba2_chunk_scan": "ssm_head ssm_d_head d_state",
    "torch_chunk_gated_delta_rule": "value_head d_key d_value",
    "chunk_kimi_delta_attention": "value_head d_key d_value",
}


#: Names of hook points for modules that TransformerLens calls otherwise.
_NAMES = {"conv1d": "conv", "conv_1d": "conv", "norm": "inner_norm", "rg_lru": "recurrence_out"}


@dataclass(frozen=True)
class Mixer:
    """A part of which what enters and leaves it is declared: a state space, a linear attention, a convolution.

    Attributes:
        path: the module, relative to the block.
        plays: what names its hook points have: those of a ``mixer``, which mixes positions; of an ``attn`` or an
            ``mlp`` that could not be taken apart.
        modules: what is shown inside of it: modules and norms that are each called once, relative to `path`, with the
            axes of what they return (``(batch pos head) d``: rows of each head of each position); attentions whose
            results are not added to the stream, or of which not all is known, whose paths are relative to the block.

    Raises:
        ValueError: an attention inside of it is said to read an encoder.
    """

    path: str
    plays: Literal["mixer", "attn", "mlp"] = "mixer"
    modules: tuple[tuple[str | Norm, str] | Attention, ...] = ()

    def __post_init__(self) -> None:
        if any(each.cross for each in self.attentions):
            raise ValueError(f"the attention inside of {self.path} reads an encoder: only one that is a step can")

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Those inside of it."""
        return tuple(each for each in self.modules if isinstance(each, Attention))

    @property
    def layers(self) -> tuple[tuple[str, str], ...]:
        """The modules inside of it that are shown by their outputs, with their axes."""
        return tuple((at.path if isinstance(at, Norm) else at, axes) for at, axes in self._shown)

    @property
    def norms(self) -> dict[str, NormKind]:
        """What the norms among them compute, by their paths."""
        return {at.path: at.kind for at, _ in self._shown if isinstance(at, Norm)}

    @property
    def _shown(self) -> list[tuple[str | Norm, str]]:
        return [each for each in self.modules if not isinstance(each, Attention)]

    @property
    def submodules(self) -> dict[str, str]:
        """What is known to play its parts: nothing."""
        return {}

    @property
    def mixes(self) -> bool:
        """It mixes positions, and is no attention or MLP that could not be taken apart."""
        return self.plays == "mixer"


def functions_of(module: nn.Module) -> tuple[str, ...]:
    """The functions that a mixer's forward calls, of those in `adapters.mixers`."""
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


def mixer_points(
    points: PointList, mixer: Mixer, module: str, functions: tuple[str, ...], rows: tuple[Site, ...]
) -> None:
    """Adds the points inside one mixer.

    Args:
        points: what they are added to.
        mixer: the declaration.
        module: the path of the module.
        functions: the functions that it calls, of those in `adapters.mixers`.
        rows: where the sizes of rows ``(batch pos head)`` are seen.
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
    for path, axes_returned in mixer.layers:
        last = path.rpartition(".")[2]
        name = f"hook_{_NAMES.get(last, last)}"
        if name not in taken:
            each = axes_returned.replace("(", "").replace(")", "").split()
            renamed = " ".join(points.pos if axis == "pos" else axis for axis in each)
            site, norm = Site(join(module, path), "output"), mixer.norms.get(path)
            view, sources = (FlatRows(heads=True), rows) if axes_returned[0] == "(" else (None, ())
            if norm:
                norm_points(points, last, norm, site, axes=renamed, view=view, sources=sources)
            points.add(name, site, view, renamed, aliases=(f"{last}.hook_out",) if norm else (), sources=sources)
    if any(ONE_STEP.get(name) in functions for name in functions):  # its states can be had, position by position
        names = next(STATES[name] for name in functions if name in STATES)
        points.add("hook_ssm_state", Site(module, "recurrence", "state"), axes=f"{start} {names}", group="extra")
