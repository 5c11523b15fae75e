"""`NormKind`, the computation of a norm, and its hook points `hook_scale` and `hook_normalized`.

They follow HookedTransformer: the scale divides; `hook_normalized` of a layer norm is its output
(after weight and bias), that of an RMS norm is the value before the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from adapters.linear import materialized
from adapters.points import MoreOfPoint, Point, PointList, Site
from adapters.torch_hooks import refuse_other_hooks
from adapters.tuners import working_norm
from adapters.views import Call, Composed, Copied, Derived, View
from adapters.views.values import is_readable


@dataclass(frozen=True)
class NormKind:
    """The computation of a family's norm.

    Attributes:
        computes: ``layer``, a norm that subtracts the mean; ``rms``; ``nothing``: the module is
            only a site for other hook points; or ``unknown``, likewise.
        offset: the constant added to the weight (1 for Gemma, which stores the weight minus one).
            None: the norm is a plain function without module, weight or bias; its epsilon is `eps`.
        eps: its epsilon, if its module does not store it (None: the module does).
        inside: the submodules that do the computation, if the module itself does not. Either the
            norm and a gate's layer: the sigmoid of the layer's output multiplies the norm's output
            (A.X K2). Or the list of the heads' norms (StableLM 2), whose epsilon is `eps`. None:
            the module itself is the norm, with one weight for all heads or a row of weights for
            each.

    Raises:
        ValueError: a layer norm has a gate; or a function has no epsilon.
    """

    computes: Literal["layer", "rms", "nothing", "unknown"]
    offset: float | None = 0.0
    eps: float | None = None
    inside: tuple[str, str] | str | None = None

    def __post_init__(self) -> None:
        if self.gate and self.centered:
            raise ValueError(
                f"inside={self.inside!r}: an RMS norm may have a gate, a layer norm has none"
            )
        if self.function and self.eps is None:
            raise ValueError(
                "offset=None and eps=None: no module says the epsilon of a norm that is a function"
            )

    @property
    def inner(self) -> str:
        """Return the path of the norm inside; "" where it is the module itself."""
        return self.inside[0] if isinstance(self.inside, tuple) else ""

    @property
    def gate(self) -> str:
        """Return the path of the module inside that makes the gate; "" without one."""
        return self.inside[1] if isinstance(self.inside, tuple) else ""

    @property
    def of_each(self) -> str:
        """Return the path of the list of norms inside, one for each head; "" where all heads share
        one.
        """
        return self.inside if isinstance(self.inside, str) else ""

    @property
    def centered(self) -> bool:
        """Tell whether the mean is subtracted."""
        return self.computes == "layer"

    @property
    def identity(self) -> bool:
        """Tell whether it computes nothing."""
        return self.computes == "nothing"

    @property
    def opaque(self) -> bool:
        """Tell whether its computation is unknown."""
        return self.computes == "unknown"

    @property
    def function(self) -> bool:
        """Tell whether the model calls it as a function, without a module."""
        return self.offset is None

    @property
    def added(self) -> float:
        """Return the constant added to the weight, where there is one."""
        return self.offset or 0.0

    def normalizer(self, module: nn.Module) -> nn.Module:
        """Return the module that holds the weight: the norm's module, the one inside it, or, for a
        plain function, a module without weight.
        """
        if self.function:
            return _NO_PARAMETERS
        return working_norm(module.get_submodule(self.inner) if self.inner else module)

    def around(self, x: Tensor) -> Tensor:
        """Return the tensor to divide by the scale (for a layer norm, minus its mean), in a dtype
        in which squares can be summed.
        """
        x = at_least_float32(x)
        if self.centered:
            return x - x.mean(-1, keepdim=True)
        return x

    def scale(self, x: Tensor, module: nn.Module) -> Tensor:
        """Compute the divisor, ``[..., 1]``."""
        mean_square = self.around(x).pow(2).mean(-1, keepdim=True)
        return (mean_square + self.epsilon(module)).sqrt()

    def behind(self, normalized: Tensor, module: nn.Module, dtype: torch.dtype) -> Tensor:
        """Apply the weight, bias and gate to a tensor that was divided by the scale.

        The gate is called as a module, so that hooks on it apply.
        """
        weight = self._parameter(module, 0)
        bias = self.bias(module)
        if weight is not None:
            if self.offset:
                weight = weight.to(normalized.dtype) + self.offset
            normalized = normalized * weight
        if bias is not None:
            normalized = normalized + bias
        output = normalized.to(dtype)
        if not self.gate:
            return output
        gate = module.get_submodule(self.gate)(output)
        return (output * gate.float().sigmoid()).to(dtype)

    def of(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        """Compute the norm of a tensor, in its dtype.

        Args:
            x: ``[..., d_model]``.
            module: the norm's module, which holds the parameters; None: it has none.
        """
        if module is None:
            module = _NO_PARAMETERS
        normalized = self.around(x) / self.scale(x, module)
        return self.behind(normalized, module, x.dtype)

    def is_computed_by(self, module: nn.Module, like: Tensor) -> bool:
        """Tell whether a module computes this norm, on one row of numbers.

        Modules with a gate, and those whose numbers cannot be read, are not tried.

        Args:
            module: the norm's.
            like: a tensor of the same width, type and device.
        """
        if self.function or self.gate or self.of_each or not is_readable(like):
            return True
        held = [*self.normalizer(module).parameters()]
        if any(x.is_meta or isinstance(x, DTensor) or not is_readable(x) for x in held):
            return True
        like = held[0] if held else like
        row = torch.linspace(-1, 2, like.shape[-1], dtype=like.dtype, device=like.device)[None]
        with torch.no_grad():
            output, right = module.forward(row), self.of(row, module)
        # Most norms compute in float32, whatever the type.
        eps = max(torch.finfo(row.dtype).eps, torch.finfo(torch.float32).eps)
        tolerance = 16 * eps * right.abs().max()
        return bool(((output - right).abs() <= tolerance).all())

    @property
    def name(self) -> str | None:
        if self.identity or self.opaque:
            return None
        return "LN" if self.centered else "RMS"

    def weight(self, module: nn.Module) -> Tensor | None:
        """Return the norm's weight, ``[d_model]``; None if it has none."""
        weight = self._parameter(module, 0)
        if weight is None or not self.offset:
            return weight
        return weight + self.offset

    def bias(self, module: nn.Module) -> Tensor | None:
        """Return the norm's bias, ``[d_model]``; None if it has none."""
        return self._parameter(module, 1)

    def parts(self, module: nn.Module) -> list[nn.Module]:
        """Return the norms of the heads, or the single norm as a list."""
        if self.of_each:
            return list(module.get_submodule(self.of_each).children())
        return [self.normalizer(module)]

    def _parameter(self, module: nn.Module, which: int) -> Tensor | None:
        parameters = [
            materialized(norm, parameter_names(norm)[which]) for norm in self.parts(module)
        ]
        first: Tensor | None = parameters[0]
        if first is None or not self.of_each:
            return first
        return torch.stack(parameters)[:, None]

    def epsilon(self, module: nn.Module) -> float:
        """Return the epsilon of a norm of this kind.

        Raises:
            AttributeError: its module has none.
        """
        eps = self.stored_epsilon(module)
        if eps is None:
            name = type(self.normalizer(module)).__name__
            raise AttributeError(f"{name} has none of eps, variance_epsilon, epsilon")
        return eps

    def stored_epsilon(self, module: nn.Module) -> float | None:
        """Return the epsilon of a norm of this kind; None if its module has none, such as one that
        was put in the place of a norm.
        """
        return stored_eps(self.normalizer(module)) if self.eps is None else self.eps


@dataclass(frozen=True)
class Norm:
    """A norm: its module and its computation.

    Attributes:
        path: the module, relative to the block, attention module or base model that declares it; ""
            for a function.
        kind: its computation.
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
    """Return the names of the weight and the bias of a norm's module: the usual ones, or others,
    the weight first.

    Args:
        module: the norm's.
    """
    own = [name for name, parameter in module._parameters.items() if parameter is not None]
    if not own or "bias" in own or hasattr(module, "weight"):
        return "weight", "bias"
    return own[0], own[1] if len(own) > 1 else "bias"


def stored_eps(module: nn.Module) -> float | None:
    """Return the norm's epsilon, whatever name its class gives it; None if it has none."""
    for name in ("eps", "variance_epsilon", "epsilon"):
        value = getattr(module, name, None)
        if value is not None:
            return float(value)
    if isinstance(module, nn.RMSNorm):  # torch's default
        dtype = torch.float32 if module.weight is None else module.weight.dtype
        return torch.finfo(dtype).eps
    return None


def at_least_float32(x: Tensor) -> Tensor:
    """Cast a tensor to a dtype in which squares can be summed."""
    if x.dtype in (torch.float32, torch.float64):
        return x
    return x.float()


@dataclass(frozen=True)
class _NormView(Derived):
    """The base class of both views. `shared`: several parts share the norm, and its input is a
    source of the view.
    """

    kind: NormKind
    shared: bool = False

    @property
    def deferrable(self) -> bool:  # type: ignore[override]
        """Tell whether it can be computed later; not if the norm is computed outside another
        module's call, whose sources are needed now.
        """
        return not self.shared

    def constants(self, call: Call) -> tuple[object, ...]:
        return (self.kind.epsilon(call.module),)  # one that can wait is not shared

    def norm(self, call: Call) -> tuple[nn.Module, Tensor]:
        """Return the norm module and its input: of a shared norm, the input as this part
        reads it.
        """
        if not self.shared:
            return call.module, call.input
        module, entered = call.sources[0]
        return module, call.scratch.get("entered", entered)

    def scale(self, call: Call) -> Tensor:
        """Return the scale of this call: the edited one where `hook_scale` was edited."""
        if "scale" not in call.scratch:
            module, x = self.norm(call)
            call.scratch["scale"] = self.kind.scale(x, module)
        return call.scratch["scale"]


class NormScale(_NormView):
    """The scale ``sqrt(mean(x^2) + eps)``, of the centred input for a layer norm; shape ``[batch,
    pos, 1]``.
    """

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.scale(call)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        module, entered = self.norm(call)
        refuse_other_hooks(x, module, entered, call)
        call.scratch["scale"] = new
        return self.kind.behind(self.kind.around(entered) / new, module, x.dtype)


def weights_path(point: Point) -> str:
    """Return the path of the module whose weights an activation is computed with: of a scale, its
    norm's.
    """
    view = point.view
    while isinstance(view, Composed | Copied):
        view = view.inner
    shared = isinstance(view, NormScale) and view.shared
    return (point.sources[0] if shared else point.site).path


class NormNormalized(_NormView):
    """The normalised value, ``[batch, pos, d_model]``."""

    @property
    def deferrable(self) -> bool:  # type: ignore[override]
        """Tell whether it can be computed later; it can for a layer norm, whose own output is
        available."""
        return not self.shared and not self.kind.centered

    def get(self, x: Tensor, call: Call) -> Tensor:
        if not self.kind.centered:
            _, entered = self.norm(call)
            return (self.kind.around(entered) / self.scale(call)).to(x.dtype)
        # A shared norm's output has another reader, whose gradient must not be mixed in.
        return x.view_as(x) if self.shared and x.requires_grad else x

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        if self.kind.centered:
            return new
        module, entered = self.norm(call)
        refuse_other_hooks(x, module, entered, call)
        return self.kind.behind(new, module, x.dtype)


@dataclass(frozen=True, repr=False)
class NormalizedOutput(View):
    """The activation of `NormNormalized`, computed only from the norm's output, for views of other
    sites.

    Attributes:
        kind: the norm's computation.
    """

    kind: NormKind

    def get(self, x: Tensor, call: Call) -> Tensor:
        if self.kind.centered:
            return x
        weight = self.kind.weight(call.module)
        bias = self.kind.bias(call.module)
        y = x
        if bias is not None:
            y = at_least_float32(y) - bias
        if weight is not None:
            y = at_least_float32(y) / weight
        return y.to(x.dtype)


class SharedNormInput(Derived):
    """The view of `hook_mlp_in` if attention and MLP share a norm: the residual stream as only the
    MLP reads it.
    """

    def get(self, x: Tensor, call: Call) -> Tensor:
        entered = call.sources[0][1]
        return entered.view_as(entered) if entered.requires_grad else entered

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        norm, entered = call.sources[0]
        refuse_other_hooks(x, norm, entered, call)
        call.scratch["entered"] = new
        return norm.forward(new)


def norm_points(
    points: PointList,
    name: str,
    norm: Norm,
    site: Site | None = None,
    *,
    shared: Site | None = None,
    view: View | None = None,
    axes: str | None = None,
    **more: Unpack[MoreOfPoint],
) -> None:
    """Add `hook_scale` and `hook_normalized` of a norm.

    Args:
        points: the list that they are added to.
        name: the norm's name, such as ``ln1``.
        norm: the norm, whose path is relative to the list's module.
        site: its output, if that is not the output of the module at that path.
        shared: for a norm that several parts share, its input; `site` is then the input of one of
            these parts.
        view: the view of the norm's tensors.
        axes: the axes of `hook_normalized`; None: the residual stream's.
        more: further fields of both points, see `Point`: the sites that `view` needs, the separate
            consumers.
    """
    kind = norm.kind
    if kind.name is None:
        return
    site = site or points.site(norm.path)
    axes = axes or f"batch {points.pos} d_model"
    axes_of_scale = axes.rsplit(" ", 1)[0] + " 1"
    if shared:
        more["sources"] = (shared,)
    views = NormScale(kind, shared is not None), NormNormalized(kind, shared is not None)
    scale, normalized = (Composed(own, view) if view else own for own in views)
    points.add(f"{name}.hook_scale", site, scale, axes_of_scale, **more)
    points.add(f"{name}.hook_normalized", site, normalized, axes, **more)
