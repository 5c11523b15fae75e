"""`Mixer`: a part that mixes positions without attention, and its hook points."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from adapters.attention import Attention
from adapters.norms import Norm, NormKind, norm_points
from adapters.points import Group, MoreOfPoint, PointList
from adapters.views import Branch, FlatRows

# --------------------------------------------------------------------------------------------------
# The functions in which transformers' mixers convolve and recur, and the meaning of each argument.
# The mixers of transformers call a few functions by fixed names, with torch code behind them or a
# kernel. Their arguments show the inputs of a mixer's computation, whichever of them computes it.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionTensor:
    """An argument, or the result, of a function.

    Attributes:
        channel: its role: ``conv_in``, ``conv``, ``x``, ``dt``, ``B``, ``C``, ``q``, ``k``, ``v``,
            ``log_decay``, ``beta``, ``recurrence``.
        parameter: the name of the argument; None for the result (of a tuple, its first element).
        axes: the tensor's axes: ``b`` for the batch, ``p`` for positions (missing in one-step
            functions), ``_`` for an axis along which all values are equal, and any other letter for
            an axis that is kept.
        gate: for a result, the name of an optional argument whose SiLU multiplies the result last.
            The activation is the result before that, because the whole-sequence function leaves the
            gate to the mixer, as does the one-step function of most mixers (not of Falcon H1).
    """

    channel: str
    parameter: str | None
    axes: str
    gate: str | None = None

    @property
    def shown(self) -> str:
        """Return the axes of the activation that is shown: batch and positions first."""
        axes = self.axes.split()
        rest = [axis for axis in axes if axis not in ("b", "p", "_")]
        return " ".join(["b", "p" if "p" in axes else "1", *rest])


#: The tensors seen of a function.
Tensors = tuple[FunctionTensor, ...]
#: The name of a channel's argument, where it differs from the channel's.
_ARGUMENTS = {"x": "hidden_states", "q": "query", "k": "key", "v": "value", "log_decay": "g"}


def _recurrence(axes: str, gate: str | None = None, **channels: str) -> Tensors:
    """Return the arguments of a recurrence, by channel, and its result, each with its axes; see
    `FunctionTensor`.
    """
    arguments = (
        FunctionTensor(channel, _ARGUMENTS.get(channel, channel), own)
        for channel, own in channels.items()
    )
    return (*arguments, FunctionTensor("recurrence", None, axes, gate))


_CONVOLUTION = (
    FunctionTensor("conv_in", "hidden_states", "b c p"),
    FunctionTensor("conv", None, "b c p"),
)
#: The gated delta rule, with one decay for each head.
_GATED_DELTA = _recurrence(
    "b p h d", q="b p h d", k="b p h d", v="b p h d", log_decay="b p h", beta="b p h"
)
#: The same with a separate decay for each column of the keys.
_KIMI_DELTA = _recurrence(
    "b p h d", q="b p h d", k="b p h d", v="b p h d", log_decay="b p h d", beta="b p h"
)
#: The tensors seen of each function, by its name.
FUNCTIONS: dict[str, Tensors] = {
    "causal_conv1d_fn": _CONVOLUTION,
    "causal_conv1d_update": _CONVOLUTION,
    "mamba_selective_scan": _recurrence("b d p", x="b d p", dt="b d p", B="b n p", C="b n p"),
    "mamba_selective_state_update": _recurrence("b d", x="b d", dt="b d", B="b n", C="b n"),
    "mamba2_chunk_scan": _recurrence("b p h d", x="b p h d", dt="b p h", B="b p g n", C="b p g n"),
    "mamba2_selective_state_update": _recurrence(
        "b h d", "z", x="b h d", dt="b h _", B="b g n", C="b g n"
    ),
    "torch_chunk_gated_delta_rule": _GATED_DELTA,
    "torch_recurrent_gated_delta_rule": _GATED_DELTA,
    "chunk_kimi_delta_attention": _KIMI_DELTA,
    "recurrent_kimi_delta_attention": _KIMI_DELTA,
}

#: For each function of a whole sequence, the function of the same module that does one step.
ONE_STEP: dict[str, str] = {
    "mamba_selective_scan": "mamba_selective_state_update",
    "mamba2_chunk_scan": "mamba2_selective_state_update",
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}

#: For each channel, the hook point (TransformerLens' name where it has one), and the axes after the
#: positions.
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

#: The axes of a state of each function of a whole sequence, after batch and positions.
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
    """A part declared only by its input and output: a state space, a linear attention, a
    convolution.

    Attributes:
        path: the module, relative to the block.
        plays: which names its hook points have: ``mixer``, for a part that mixes positions; or
            ``attn`` or ``mlp``, for one whose inner structure is unknown.
        modules: the submodules shown: modules and norms that are each called once, relative to
            `path`, with the axes of their outputs (``(batch pos head) d``: rows of each head of
            each position); and attentions that are only partly known or whose results are not added
            to the stream, with paths relative to the block.

    Raises:
        ValueError: an attention inside it is declared to read an encoder.
    """

    path: str
    plays: Literal["mixer", "attn", "mlp"] = "mixer"
    modules: tuple[tuple[str | Norm, str] | Attention, ...] = ()

    def __post_init__(self) -> None:
        if any(attention.cross for attention in self.attentions):
            raise ValueError(
                f"the attention inside of {self.path} reads an encoder: only one that is a step can"
            )

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Return the attentions inside it."""
        return tuple(module for module in self.modules if isinstance(module, Attention))

    @property
    def layers(self) -> tuple[tuple[str, str], ...]:
        """Return the modules inside it whose outputs are shown, with their axes."""
        return tuple(
            (module.path if isinstance(module, Norm) else module, axes)
            for module, axes in self._shown
        )

    @property
    def norms(self) -> dict[str, NormKind]:
        """Return the kinds of the norms among them, by their paths."""
        return {norm.path: norm.kind for norm, _ in self._shown if isinstance(norm, Norm)}

    @property
    def _shown(self) -> list[tuple[str | Norm, str]]:
        return [module for module in self.modules if not isinstance(module, Attention)]

    @property
    def submodules(self) -> dict[str, str]:
        """Return the known submodules: none."""
        return {}

    @property
    def mixes(self) -> bool:
        """Tell whether it is a ``mixer`` (see `plays`), and not an attention or MLP of unknown
        structure.
        """
        return self.plays == "mixer"


def functions_of(module: nn.Module) -> tuple[str, ...]:
    """Return those functions in `adapters.mixers` that a mixer's forward calls."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = getattr(code, "co_names", ())
    return tuple(name for name in FUNCTIONS if name in names)


def axes_of(name: str, shape: Sequence[int], batch: int, pos: int) -> str:
    """Name the axes of the output of a module in a mixer.

    Args:
        name: the module's name.
        shape: the shape of its output.
        batch, pos: the numbers of prompts and positions, which equal no other size in the model.
    """
    known = {0: "batch"} if shape[0] == batch else {0: "row"}
    if len(shape) > 2 and pos in shape[1:]:
        known[list(shape).index(pos, 1)] = "pos"
    known[max(i for i in range(len(shape)) if i not in known)] = f"d_{name}"
    return " ".join(known.get(i, f"{name}_{i}") for i in range(len(shape)))


def mixer_points(points: PointList, mixer: Mixer, functions: tuple[str, ...]) -> None:
    """Add the points inside one mixer.

    Args:
        points: the list that they are added to, with the prefix and the path of the module.
        mixer: the declaration.
        functions: the functions in `adapters.mixers` that it calls.
    """
    start = f"batch {points.pos}"
    taken = set()
    for channel, rank in _channels(functions).items():
        name, axes = POINTS[channel]
        taken.add(name)
        site = points.site("", "recurrence", channel)
        group: Group = "extra" if channel == "conv_in" else "standard"
        # The activation is the model's own tensor with its axes reordered.
        points.add(name, site, Branch(), f"{start} {axes[rank]}", group=group)
    for path, own_axes in mixer.layers:
        last = path.rpartition(".")[2]
        name = f"hook_{_NAMES.get(last, last)}"
        if name not in taken:
            _add_layer(points, name, path, own_axes, mixer.norms.get(path))
    if any(ONE_STEP.get(name) in functions for name in functions):
        # Its states are available, position by position.
        state = next(STATES[name] for name in functions if name in STATES)
        site = points.site("", "recurrence", "state")
        points.add("hook_ssm_state", site, axes=f"{start} {state}", group="extra")


def _channels(functions: tuple[str, ...]) -> dict[str, int]:
    """Return the channels to show, each with the number of its axes after batch and positions."""
    channels = {}
    for name in functions:
        if name in ONE_STEP or name == "causal_conv1d_fn":
            for tensor in FUNCTIONS[name]:
                channels[tensor.channel] = len(tensor.shown.split()) - 2
    return channels


def _add_layer(points: PointList, name: str, path: str, axes: str, kind: NormKind | None) -> None:
    """Add the output of a module inside a mixer, and a norm's points."""
    view = None
    more: MoreOfPoint = {}
    if axes[0] == "(":
        view = FlatRows(heads=True)
        more["sources"] = points.rows
    axes = axes.replace("(", "").replace(")", "")
    named = " ".join(points.pos if axis == "pos" else axis for axis in axes.split())
    if kind:
        last = path.rpartition(".")[2]
        norm_points(points, last, Norm(path, kind), view=view, axes=named, **more)
        more["aliases"] = (f"{last}.hook_out",)
    points.add(name, path, view, named, **more)
