"""`NormKind`, the noun of a norm: what it computes, and its hook points `hook_scale` and `hook_normalized`.

They follow HookedTransformer: the scale divides; `hook_normalized` of a layer norm is its output (after weight and
bias), that of an RMS norm is the value before the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from adapters.linear import materialized
from adapters.points import PointList, Site
from adapters.views import Call, Composed, Derived, View


@dataclass(frozen=True)
class NormKind:
    """What a family's norm computes.

    Attributes:
        computes: a ``layer`` norm, which subtracts the mean; an ``rms`` norm; ``nothing``: it is there as a place to
            stand on, and has no hook points of its own; ``unknown``: it is a place to stand on too.
        offset: what is added to the weight (1 for Gemma, whose weight is stored as its difference from one). None: it
            is a function that the model calls, without a module, a weight or a bias; `eps` says its epsilon.
        eps: its epsilon, where its module does not keep it (None: the module does).
        inside: what computes, where that is not the module itself: the norm, and what makes a gate, by the sigmoid of
            which, made of the norm's output, that is multiplied (A.X K2), so that what is read is the product; or the
            list of norms of which each head has one (StableLM 2), whose epsilon `eps` says. None: the module itself,
            the same for all heads, or with a row of its weight for each.

    Raises:
        ValueError: a layer norm has a gate; or a function has no epsilon.
    """

    computes: Literal["layer", "rms", "nothing", "unknown"]
    offset: float | None = 0.0
    eps: float | None = None
    inside: tuple[str, str] | str | None = None

    def __post_init__(self) -> None:
        if self.gate and self.centered:
            raise ValueError(f"inside={self.inside!r}: an RMS norm may have a gate, a layer norm has none")
        if self.function and self.eps is None:
            raise ValueError("offset=None and eps=None: no module says the epsilon of a norm that is a function")

    @property
    def inner(self) -> str:
        """The module inside that is the norm; "": it is the module itself."""
        return self.inside[0] if isinstance(self.inside, tuple) else ""

    @property
    def gate(self) -> str:
        """The module inside that makes the gate; "" without one."""
        return self.inside[1] if isinstance(self.inside, tuple) else ""

    @property
    def of_each(self) -> str:
        """The list of norms inside, of which each head has one; "": all have the same."""
        return self.inside if isinstance(self.inside, str) else ""

    @property
    def centered(self) -> bool:
        """The mean is subtracted."""
        return self.computes == "layer"

    @property
    def identity(self) -> bool:
        """It computes nothing."""
        return self.computes == "nothing"

    @property
    def opaque(self) -> bool:
        """What it computes is not known."""
        return self.computes == "unknown"

    @property
    def function(self) -> bool:
        """The model calls it as a function, without a module."""
        return self.offset is None

    @property
    def added(self) -> float:
        """What is added to the weight, where there is one."""
        return self.offset or 0.0

    def normalizer(self, module: nn.Module) -> nn.Module:
        """What keeps the weight: the norm's module, the one inside of it, or, of a function, a module without any."""
        if self.function:
            return _NO_PARAMETERS
        return module.get_submodule(self.inner) if self.inner else module

    def around(self, x: Tensor) -> Tensor:
        """What it divides: a tensor, a layer norm's less its mean, in a type that squares can be summed in."""
        x = at_least_float32(x)
        return x - x.mean(-1, keepdim=True) if self.centered else x

    def scale(self, x: Tensor, module: nn.Module) -> Tensor:
        """What it divides by, ``[..., 1]``."""
        return (self.around(x).pow(2).mean(-1, keepdim=True) + self.epsilon(module)).sqrt()

    def behind(self, normalized: Tensor, module: nn.Module, dtype: torch.dtype) -> Tensor:
        """What it makes of what has been divided: times its weight, plus its bias, times its gate.

        The gate is called, so that hooks on it hold.
        """
        weight, bias = self._parameter(module, 0), self.bias(module)
        if weight is not None:
            normalized = normalized * (weight.to(normalized.dtype) + self.offset if self.offset else weight)
        if bias is not None:
            normalized = normalized + bias
        made = normalized.to(dtype)
        if not self.gate:
            return made
        return (made * module.get_submodule(self.gate)(made).float().sigmoid()).to(dtype)

    def of(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        """What the norm makes of a tensor, in its type.

        Args:
            x: ``[..., d_model]``.
            module: the norm's, whose parameters it has; None: it has none.
        """
        module = _NO_PARAMETERS if module is None else module
        return self.behind(self.around(x) / self.scale(x, module), module, x.dtype)

    @property
    def name(self) -> str | None:
        if self.identity or self.opaque:
            return None
        return "LN" if self.centered else "RMS"

    def weight(self, module: nn.Module) -> Tensor | None:
        """The factor the norm multiplies with, ``[d_model]``, or None where it has none."""
        weight = self._parameter(module, 0)
        return weight + self.offset if weight is not None and self.offset else weight

    def bias(self, module: nn.Module) -> Tensor | None:
        """What the norm adds, ``[d_model]``, or None where it adds nothing."""
        return self._parameter(module, 1)

    def parts(self, module: nn.Module) -> list[nn.Module]:
        """The norms of the heads, or the one norm."""
        return list(module.get_submodule(self.of_each).children()) if self.of_each else [self.normalizer(module)]

    def _parameter(self, module: nn.Module, which: int) -> Tensor | None:
        held: list[Tensor | None] = [materialized(part, parameter_names(part)[which]) for part in self.parts(module)]
        if not self.of_each:
            return held[0]
        return torch.stack([x for x in held if x is not None])[:, None] if held[0] is not None else None

    def epsilon(self, module: nn.Module) -> float:
        """The epsilon of a norm of this kind."""
        return eps_of(self.normalizer(module)) if self.eps is None else self.eps


@dataclass(frozen=True)
class Norm:
    """A norm: the module, and what it computes.

    Attributes:
        path: the module, relative to what declares it: a block, an attention module, the base model; "" of a function.
        kind: what it computes.
    """

    path: str
    kind: NormKind


_NO_PARAMETERS = nn.Identity()
LAYER_NORM = NormKind("layer")
RMS_NORM = NormKind("rms")
NO_NORM = NormKind("nothing")
GEMMA_NORM = NormKind("rms", offset=1.0)
OPAQUE_NORM = NormKind("unknown")


def parameter_names(module: nn.Module) -> tuple[str, str]:
    """What a norm's module calls its weight and its bias: so, or anything else, the weight first.

    Args:
        module: the norm's.
    """
    own = [name for name, parameter in module._parameters.items() if parameter is not None]
    if not own or "bias" in own or hasattr(module, "weight"):
        return "weight", "bias"
    return own[0], own[1] if len(own) > 1 else "bias"


def eps_of(module: nn.Module) -> float:
    """The norm's epsilon, under whichever name its class keeps it."""
    for name in ("eps", "variance_epsilon", "epsilon"):
        value = getattr(module, name, None)
        if value is not None:
            return float(value)
    raise AttributeError(f"{type(module).__name__} has none of eps, variance_epsilon, epsilon")


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in a type that sums of squares can be taken in."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@dataclass(frozen=True)
class _NormView(Derived):
    """What both views share. `shared`: parts share the norm, whose input is then a source."""

    kind: NormKind
    shared: bool = False

    @property
    def deferrable(self) -> bool:  # type: ignore[override]
        """A norm that is computed outside another module's call needs that call's sources now."""
        return not self.shared

    def norm(self, call: Call) -> tuple[nn.Module, Tensor]:
        """The norm module and the tensor that entered it: of one that parts share, what this part has of it."""
        if not self.shared:
            return call.module, call.input
        module, entered = call.sources[0]
        return module, call.scratch.get("entered", entered)

    def scale(self, call: Call) -> Tensor:
        """The scale of this call: an edited one where `hook_scale` was edited."""
        if "scale" not in call.scratch:
            module, x = self.norm(call)
            call.scratch["scale"] = self.kind.scale(x, module)
        return call.scratch["scale"]


class NormScale(_NormView):
    """``sqrt(mean(x^2) + eps)``, of the centred input for a layer norm; shape ``[batch, pos, 1]``."""

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.scale(call)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        call.scratch["scale"] = new
        module, entered = self.norm(call)
        return self.kind.behind(self.kind.around(entered) / new, module, x.dtype)


class NormNormalized(_NormView):
    """The normalised value, ``[batch, pos, d_model]``."""

    @property
    def deferrable(self) -> bool:  # type: ignore[override]
        """A layer norm's is its own output, which is there."""
        return not self.shared and not self.kind.centered

    def get(self, x: Tensor, call: Call) -> Tensor:
        if self.kind.centered:
            # A shared norm's output has another reader, whose gradient is not ours.
            return x.view_as(x) if self.shared and x.requires_grad else x
        return (self.kind.around(self.norm(call)[1]) / self.scale(call)).to(x.dtype)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        if self.kind.centered:
            return new
        return self.kind.behind(new, self.norm(call)[0], x.dtype)


@dataclass(frozen=True, repr=False)
class NormalizedOutput(View):
    """What `NormNormalized` shows, from the norm's output alone: for those who look at it from elsewhere.

    Attributes:
        kind: what the norm computes.
    """

    kind: NormKind

    def get(self, x: Tensor, call: Call) -> Tensor:
        weight = None if self.kind.centered else self.kind.weight(call.module)
        bias = None if self.kind.centered else self.kind.bias(call.module)
        y = x if bias is None else at_least_float32(x) - bias
        return y.to(x.dtype) if weight is None else (at_least_float32(y) / weight).to(x.dtype)


class SharedNormInput(Derived):
    """`hook_mlp_in` where attention and MLP share a norm: the residual stream as the MLP alone reads it."""

    def get(self, x: Tensor, call: Call) -> Tensor:
        entered = call.sources[0][1]
        return entered.view_as(entered) if entered.requires_grad else entered

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        call.scratch["entered"] = new
        return call.sources[0][0].forward(new)


def norm_points(
    points: PointList,
    name: str,
    kind: NormKind,
    site: Site,
    *,
    shared: Site | None = None,
    view: View | None = None,
    sources: tuple[Site, ...] = (),
    axes: str | None = None,
    separate_consumers: tuple[str, ...] = (),
) -> None:
    """Adds `hook_scale` and `hook_normalized` of a norm.

    Args:
        points: what they are added to.
        name: of the norm, such as ``ln1``.
        kind, site: what the norm computes, and its output.
        shared: for a norm that several parts share, its input; `site` is then where one of them reads it.
        view: how the norm's tensors are seen, and `sources`, the sites which that needs.
        axes: of `hook_normalized`; None: those of the residual stream.
        separate_consumers: see `Point`.
    """
    if kind.identity or kind.opaque:
        return
    axes = axes or f"batch {points.pos} d_model"
    sources = (shared, *sources) if shared else sources
    both: tuple[tuple[str, View, str], ...] = (
        ("hook_scale", NormScale(kind, shared is not None), axes.rsplit(" ", 1)[0] + " 1"),
        ("hook_normalized", NormNormalized(kind, shared is not None), axes),
    )
    for suffix, own, shape in both:
        seen = Composed(own, view) if view else own
        points.add(f"{name}.{suffix}", site, seen, shape, sources=sources, separate_consumers=separate_consumers)
