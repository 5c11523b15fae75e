"""Placing a hook point in a basis: what is refused, and what the point is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from adapters.config import ModelConfig
from adapters.norms import NormalizedOutput, NormNormalized
from adapters.points import LinkedPoint, Point
from adapters.views import View
from adapters.views.basis import Basis, Error, InBasis, WritesLater
from bridge.hooks.hook_point import HookPoint

#: SAELens' normalisations of which `decode` undoes what the last `encode` remembered.
_AT_RUN_TIME = ("constant_norm_rescale", "layer_norm")


@dataclass(frozen=True)
class FunctionBasis:
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
    if isinstance(basis, FunctionBasis):
        return basis.parts()
    if isinstance(basis, LaterWrite):
        return modules_of(basis.basis)
    return [basis] if isinstance(basis, nn.Module) else []


def one_of(
    basis: Basis | None, encode: Callable[[Tensor], Tensor] | None, decode: Callable[[Tensor], Tensor] | None
) -> Basis:
    """The basis that was given, or that of two functions.

    Args:
        basis, encode, decode: see `TransformerBridge.add_basis`.

    Raises:
        TypeError: neither is whole, or both are there.
    """
    if basis is not None and encode is None and decode is None:
        return basis
    if basis is None and encode is not None and decode is not None:
        return FunctionBasis(encode, decode)
    raise TypeError("give either a basis, with encode and decode, or both functions: encode=..., decode=...")


@dataclass(frozen=True)
class LaterWrite:
    """What a layer of a cross-layer transcoder is at a later point.

    Attributes:
        basis: the layer.
        ahead: how many points behind its own.
    """

    basis: WritesLater
    ahead: int

    def encode(self, x: Tensor) -> Tensor:
        """The layer's features."""
        return self.basis.encode(x)

    def decode(self, features: Tensor) -> Tensor:
        """What they add here."""
        return self.basis.decode_later(features, self.ahead)


@dataclass(frozen=True)
class BasisRequest:
    """What `TransformerBridge.add_basis` is asked for.

    Attributes:
        name, basis, point, reads, later, skip, error: see there; hook points in the place of names.
    """

    name: str
    basis: Basis
    point: HookPoint
    reads: HookPoint | None
    later: tuple[HookPoint, ...]
    skip: Callable[[Tensor], Tensor] | None
    error: Error

    @property
    def keeps(self) -> bool:
        """Whether what the basis does not explain stays."""
        return isinstance(self.error, str) and self.error == "keep"

    def points(self, cfg: ModelConfig, model: nn.Module) -> list[Point]:
        """The declarations of the hook point in the basis, and of those that take over its features later.

        Args:
            cfg: the facts about the model.
            model: the model.

        Raises:
            ValueError, TypeError: see `TransformerBridge.add_basis`.
        """
        if self.reads is not None and self.reads.order >= self.point.order:
            raise ValueError(
                f"{self.reads.name} does not come before {self.point.name}: features of it cannot be written there"
            )
        own = self._point(self.point, self.name, self.basis, cfg, model)
        before = self.point
        for hook in self.later:
            if hook.order <= before.order:
                raise ValueError(f"{hook.name} does not come behind {before.name}: features cannot be written there")
            before = hook
        wanted = getattr(self.basis, "n_later", 0)
        if len(self.later) != wanted:
            raise ValueError(
                f"the features of {own.name} are written at {wanted} later points, and later= names {len(self.later)}"
            )
        if not self.later:
            return [own]
        if not callable(getattr(self.basis, "decode_later", None)):
            raise TypeError(f"the basis {self.name} is {type(self.basis).__name__}, which has no method decode_later")
        if self.reads is None:
            raise ValueError(f"the features of {own.name} are written at later points: say what they are of (reads=)")
        layer = cast(WritesLater, self.basis)
        name = f"{self.name}_of_{self.point.point.depth}"
        others = [
            self._point(hook, name, LaterWrite(layer, at), cfg, model) for at, hook in enumerate(self.later, start=1)
        ]
        linked = tuple(LinkedPoint(other.name, _as_it_is) for other in others)
        return [replace(own, linked=linked), *others]

    def _point(self, base: HookPoint, name: str, basis: Basis, cfg: ModelConfig, model: nn.Module) -> Point:
        full = f"{base.name}.{name}"
        axes = base.point.axes.split()
        self._check(base, name, cfg)
        config = getattr(basis, "cfg", None)
        stateful = getattr(config, "normalize_activations", None) in _AT_RUN_TIME
        if getattr(basis, "hook_z_reshaping_mode", False) and axes[-2:] == ["n_heads", "d_head"]:
            axes = axes[:-1]  # SAELens' SAEs of all heads together
        reads, later = self.reads, isinstance(basis, LaterWrite)
        return replace(
            base.point,
            name=full,
            view=InBasis(
                full,
                base.view,
                basis,
                self.error if self.keeps or not later else "drop",
                None if reads is None else (reads.name, _readable(reads, model)),
                None if later else self.skip,
                stateful,
                on_top=later,
            ),
            axes=" ".join([*axes[:-1], "feature"]),
            group="extra",
            flag=None,
            aliases=tuple(f"{alias}.{name}" for alias in base.point.aliases),
            sources=base.point.sources if reads is None else (*base.point.sources, reads.point.site),
            linked=(),
            separate_consumers=(),
        )

    def _check(self, base: HookPoint, name: str, cfg: ModelConfig) -> None:
        """Refuses what cannot be a basis at a hook point.

        Raises:
            ValueError, TypeError: see `TransformerBridge.add_basis`.
        """
        basis = self.basis
        if not name.isidentifier():
            raise ValueError(
                f"the name of a basis is {name!r}; it becomes the end of {base.name}.NAME: a word without dots"
            )
        if base.point.linked:
            fed = ", ".join(follower.name for follower in base.point.linked)
            raise ValueError(f"{base.name} hands on to {fed}, which would not see what a basis there changes")
        if len(base.point.axes.split()) < 3:
            raise ValueError(
                f"{base.name} has the axes [{base.point.axes}]: no axis of features that a basis could be of"
            )
        for part in ("encode", "decode"):
            if not callable(getattr(basis, part, None)):
                raise TypeError(f"the basis {name} is {type(basis).__name__}, which has no method {part}")
        if isinstance(self.error, str) and self.error not in ("keep", "drop"):
            raise ValueError(
                f'error is {self.error!r}; it is "keep", "drop", or a tensor to be added to what is decoded'
            )
        if self.skip is None and getattr(basis, "W_skip", None) is not None and not self.keeps:
            raise ValueError(
                f"the basis {name} has a skip path (W_skip): give it as skip=, a function of what is read, so that it "
                "is not left out with the error"
            )
        _check_tensors(f"{base.name}.{name}", basis, cfg)


def takes_over(hook: HookPoint) -> bool:
    """Whether a hook point shows features of an earlier one (a cross-layer transcoder's), at which they are changed.

    Args:
        hook: the hook point.
    """
    return isinstance(hook.view, InBasis) and isinstance(hook.view.basis, LaterWrite)


def written_later(
    base: str, layers: Iterable[HookPoint], hooks: Mapping[str, HookPoint]
) -> list[tuple[HookPoint, InBasis]]:
    """Which layers of a cross-layer transcoder are written at a point behind their own, and how.

    Args:
        base: the point.
        layers: the hook points of their features.
        hooks: all hook points.
    """
    found = []
    for layer in layers:
        for follower in layer.point.linked:
            view = hooks[follower.name].view
            if follower.name.rpartition(".")[0] == base and isinstance(view, InBasis):
                found.append((layer, view))
    return found


def _as_it_is(features: Tensor) -> Tensor:
    """What is taken over."""
    return features


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
    if view.contextual or view.at_once or point.sources or point.site.kind not in ("input", "output"):
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
