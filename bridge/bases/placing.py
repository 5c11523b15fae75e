"""Placing a hook point in a basis: what is refused, and what the point is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from adapters.config import ModelConfig
from adapters.norms import NormalizedOutput, NormNormalized
from adapters.points import Point
from adapters.views import View
from adapters.views.basis import Basis, Error, InBasis
from bridge.hooks.hook_point import HookPoint

#: SAELens' normalisations of which `decode` undoes what the last `encode` remembered.
_AT_RUN_TIME = ("constant_norm_rescale", "layer_norm")


@dataclass(frozen=True)
class Functions:
    """A basis of two functions.

    Attributes:
        encode, decode: see `Basis`.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]

    def parts(self) -> list[nn.Module]:
        """The modules whose methods they are, each once."""
        owners = (getattr(function, "__self__", function) for function in (self.encode, self.decode))
        return list(dict.fromkeys(owner for owner in owners if isinstance(owner, nn.Module)))


def modules_of(basis: Basis) -> list[nn.Module]:
    """The modules that hold a basis's tensors; none where it is no module.

    Args:
        basis: the basis.
    """
    if isinstance(basis, Functions):
        return basis.parts()
    return [basis] if isinstance(basis, nn.Module) else []


def basis_point(
    base: HookPoint,
    name: str,
    basis: Basis,
    reads: HookPoint | None,
    skip: Callable[[Tensor], Tensor] | None,
    error: Error,
    cfg: ModelConfig,
    model: nn.Module,
) -> Point:
    """The declaration of a hook point in a basis.

    Args:
        base, name, basis, reads, skip, error: see `TransformerBridge.add_basis`.
        cfg: the facts about the model.
        model: the model.

    Raises:
        ValueError, TypeError: see there.
    """
    full = f"{base.name}.{name}"
    axes = base.point.axes.split()
    if not name.isidentifier():
        raise ValueError(
            f"the name of a basis is {name!r}; it becomes the end of {base.name}.NAME: a word without dots"
        )
    if base.point.linked:
        fed = ", ".join(follower.name for follower in base.point.linked)
        raise ValueError(f"{base.name} only hands on to {fed}: place the basis there")
    if len(axes) < 3:
        raise ValueError(f"{base.name} has the axes [{base.point.axes}]: no axis of features that a basis could be of")
    for part in ("encode", "decode"):
        if not callable(getattr(basis, part, None)):
            raise TypeError(f"the basis {name} is {type(basis).__name__}, which has no method {part}")
    if isinstance(error, str) and error not in ("keep", "drop"):
        raise ValueError(f'error is {error!r}; it is "keep", "drop", or a tensor to be added to what is decoded')
    if skip is None and getattr(basis, "W_skip", None) is not None and not (isinstance(error, str) and error == "keep"):
        raise ValueError(
            f"the basis {name} has a skip path (W_skip): give it as skip=, a function of what is read, so that it is "
            "not left out with the error"
        )
    _check_tensors(full, basis, cfg)
    config = getattr(basis, "cfg", None)
    stateful = getattr(config, "normalize_activations", None) in _AT_RUN_TIME
    if getattr(basis, "hook_z_reshaping_mode", False) and axes[-2:] == ["n_heads", "d_head"]:
        axes = axes[:-1]  # SAELens' SAEs of all heads together
    seen = None if reads is None else (reads.name, _readable(reads, model))
    return replace(
        base.point,
        name=full,
        view=InBasis(full, base.view, basis, error, seen, skip, stateful),
        axes=" ".join([*axes[:-1], "feature"]),
        group="extra",
        flag=None,
        aliases=tuple(f"{alias}.{name}" for alias in base.point.aliases),
        sources=base.point.sources if reads is None else (*base.point.sources, reads.point.site),
        linked=(),
        separate_consumers=(),
    )


def _readable(reads: HookPoint, model: nn.Module) -> View:
    """How a point is seen by a basis that stands elsewhere.

    Raises:
        ValueError: it is seen with the help of its module's call, or of other sites.
    """
    point, view = reads.point, reads.view
    if isinstance(view, NormNormalized) and not (view.shared or view.kind.gate):
        module = model.get_submodule(point.site.path)
        weight = None if view.kind.centered else view.kind.weight(module)
        if weight is None or bool((weight != 0).all()):
            return NormalizedOutput(view.kind)
        raise ValueError(f"a basis cannot read at {reads.name}: the norm's weight has zeros. Read at the norm's input")
    if view.contextual or point.sources or point.site.kind not in ("input", "output"):
        raise ValueError(
            f"a basis that writes elsewhere cannot read at {reads.name}, which is worked out inside a call of its "
            "module: read at a point that is a module's input or output, such as hook_resid_mid, ln2.hook_normalized "
            "or hook_attn_out"
        )
    return view


def _check_tensors(full: str, basis: Basis, cfg: ModelConfig) -> None:
    """Refuses tensors that are elsewhere than the model, or of another type.

    Raises:
        ValueError: one is.
    """
    for module in modules_of(basis):
        for tensor in (*module.parameters(), *module.buffers()):
            wrong_type = tensor.is_floating_point() and tensor.dtype != cfg.dtype
            if wrong_type or tensor.device.type != torch.device(cfg.device).type:
                raise ValueError(
                    f"{full}: the basis holds {tensor.dtype} on {tensor.device}, and the model is {cfg.dtype} on "
                    f"{cfg.device}. Move the basis (.to), or give functions that convert: encode=..., decode=..."
                )
