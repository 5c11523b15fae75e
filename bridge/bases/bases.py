"""Hook points in a basis: the checks, and the declaration of the hook point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from adapters.config import ModelConfig
from adapters.norms import NormalizedOutput, NormNormalized
from adapters.points import LinkedPoint, Point, module_at
from adapters.views import Copied, View
from adapters.views.basis import Basis, Error, InBasis, dense
from adapters.views.values import fingerprints, is_readable
from bridge.bases.components import sizes_of
from bridge.hooks.hooks import HookPoint
from bridge.modules import close, itself

#: An activation, ``[..., d]``, and its features, ``[..., n]``.
Activation = Float[Tensor, "... d"]
Features = Float[Tensor, "... n"]
#: SAELens' normalisations for which `decode` inverts the last `encode`.
_AT_RUN_TIME = ("constant_norm_rescale", "layer_norm")


@dataclass(frozen=True)
class _FunctionBasis:
    """A basis of two functions.

    Attributes:
        encode, decode: see `Basis`.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


def modules_of(basis: Basis) -> list[nn.Module]:
    """Return the modules that hold a basis's tensors; empty if the basis is not a module.

    Args:
        basis: the basis.
    """
    if isinstance(basis, _FunctionBasis):  # the owners of these methods, each once
        owners = [getattr(x, "__self__", x) for x in (basis.encode, basis.decode)]
        return list(dict.fromkeys(x for x in owners if isinstance(x, nn.Module)))
    if isinstance(basis, _LaterWrite):
        return modules_of(basis.basis)
    return [basis] if isinstance(basis, nn.Module) else []


def one_of(
    basis: Basis | None,
    encode: Callable[[Tensor], Tensor] | None,
    decode: Callable[[Tensor], Tensor] | None,
) -> Basis:
    """Return the given basis, or one that consists of the two given functions.

    Args:
        basis, encode, decode: see `TransformerBridge.add_basis`.

    Raises:
        TypeError: neither is complete, or both are given.
    """
    if basis is not None and encode is None and decode is None:
        return basis
    if basis is None and encode is not None and decode is not None:
        return _FunctionBasis(encode, decode)
    raise TypeError(
        "give either a basis, with encode and decode, or both functions: encode=..., decode=..."
    )


@dataclass(frozen=True)
class _LaterWrite:
    """The write of a cross-layer transcoder's layer at a later hook point.

    Attributes:
        basis: the layer.
        decode_later: its method of that name.
        ahead: how many hook points after its own.
    """

    basis: Basis
    decode_later: Callable[[Tensor, int], Tensor]
    ahead: int

    def encode(self, x: Tensor) -> Tensor:
        """Return the layer's features."""
        return self.basis.encode(x)

    def decode(self, features: Tensor) -> Tensor:
        """Return the features' contribution at this hook point."""
        return self.decode_later(features, self.ahead)


@dataclass(frozen=True)
class BasisRequest:
    """The arguments of `TransformerBridge.add_basis`.

    Attributes:
        name, basis, point, reads, later, skip, error: see there; with hook points instead of names.
    """

    name: str
    basis: Basis
    point: HookPoint
    reads: tuple[HookPoint, ...]
    later: tuple[HookPoint, ...]
    skip: Callable[[Tensor], Tensor] | None
    error: Error

    @property
    def keeps(self) -> bool:
        """Tell whether the error term, which the basis does not explain, is kept."""
        return isinstance(self.error, str) and self.error == "keep"

    def points(self, cfg: ModelConfig, model: nn.Module) -> list[Point]:
        """Return the declarations of the hook point in the basis, and of the later points it writes
        to.

        Args:
            cfg: the facts about the model.
            model: the model.

        Raises:
            ValueError, TypeError: see `TransformerBridge.add_basis`.
        """
        self._check_reads()
        own = self._point(self.point, self.name, self.basis, cfg, model)
        self._check_later(own.name)
        if not self.later:
            return [own]
        decode_later = getattr(self.basis, "decode_later", None)
        if not callable(decode_later):
            raise TypeError(
                f"the basis {self.name} is {type(self.basis).__name__}, which has no method"
                " decode_later"
            )
        if not self.reads:
            raise ValueError(
                f"the features of {own.name} are written at later points: say what they are of"
                " (reads=)"
            )
        name = f"{self.name}_of_{self.point.point.depth}"
        others = []
        for ahead, hook in enumerate(self.later, start=1):
            write = _LaterWrite(self.basis, decode_later, ahead)
            others.append(self._point(hook, name, write, cfg, model))
        linked = tuple(LinkedPoint(other.name, itself) for other in others)
        return [replace(own, linked=linked), *others]

    def _check_reads(self) -> None:
        """Check that the points that it reads come before its own point, and have the same axes.

        Raises:
            ValueError: see `TransformerBridge.add_basis`.
        """
        late = [hook.name for hook in self.reads if hook.order >= self.point.order]
        if late:
            raise ValueError(
                f"{', '.join(late)} does not come before {self.point.name}: features of it cannot"
                " be written there"
            )
        axes = {tuple(hook.point.axes.split()) for hook in self.reads}
        repeated = len({*self.reads}) < len(self.reads)
        if len(axes) > 1 or repeated:
            shown = ", ".join(f"{hook.name} [{hook.point.axes}]" for hook in self.reads)
            raise ValueError(
                f"the features of {self.name} are of {shown}: several points are different, with"
                " like axes"
            )

    def _check_later(self, name: str) -> None:
        """Check the order and the number of the later points that it writes to.

        Raises:
            ValueError: see `TransformerBridge.add_basis`.
        """
        before = self.point
        for hook in self.later:
            if hook.order <= before.order:
                raise ValueError(
                    f"{hook.name} does not come behind {before.name}: features cannot be written"
                    " there"
                )
            before = hook
        n_later = getattr(self.basis, "n_later", 0)
        if len(self.later) != n_later:
            raise ValueError(
                f"the features of {name} are written at {n_later} later points, and later= names"
                f" {len(self.later)}"
            )

    def _point(
        self, base: HookPoint, name: str, basis: Basis, cfg: ModelConfig, model: nn.Module
    ) -> Point:
        """Return the declaration of a hook point in a basis."""
        full = f"{base.name}.{name}"
        self._check(base, name, cfg)
        normalization = getattr(getattr(basis, "cfg", None), "normalize_activations", None)
        later = isinstance(basis, _LaterWrite)
        error, skip = self.error, self.skip
        if later:
            error, skip = "keep" if self.keeps else "drop", None
        reads = [(hook.name, _readable(hook, base, model)) for hook in self.reads]
        view = InBasis(
            full,
            base.view,
            basis,
            error,
            reads,
            skip,
            normalization in _AT_RUN_TIME,
            on_top=later,
        )
        point = base.point
        axes = point.axes.split()
        over_heads = getattr(basis, "hook_z_reshaping_mode", False)
        n_replaced = 2 if over_heads and axes[-2:] == ["n_heads", "d_head"] else 1
        return replace(
            point,
            name=full,
            view=view,
            axes=" ".join([*axes[:-n_replaced], "feature"]),
            group="extra",
            flag=None,
            aliases=tuple(f"{alias}.{name}" for alias in point.aliases),
            sources=(*point.sources, *[hook.point.site for hook in self.reads]),
            linked=(),
            separate_consumers=(),
        )

    def _check(self, base: HookPoint, name: str, cfg: ModelConfig) -> None:
        """Reject a basis that does not fit the hook point.

        Raises:
            ValueError, TypeError: see `TransformerBridge.add_basis`.
        """
        basis = self.basis
        if not name.isidentifier():
            raise ValueError(
                f"the name of a basis is {name!r}; it becomes the end of {base.name}.NAME: a word"
                " without dots"
            )
        if base.point.linked:
            followers = ", ".join(follower.name for follower in base.point.linked)
            raise ValueError(
                f"{base.name} hands on to {followers}, which would not see what a basis there"
                " changes"
            )
        if len(base.point.axes.split()) < 3:
            raise ValueError(
                f"{base.name} has the axes [{base.point.axes}]: no axis of features that a basis"
                " could be of"
            )
        for method in ("encode", "decode"):
            if not callable(getattr(basis, method, None)):
                raise TypeError(
                    f"the basis {name} is {type(basis).__name__}, which has no method {method}"
                )
        if isinstance(self.error, str) and self.error not in ("keep", "drop"):
            raise ValueError(
                f'error is {self.error!r}; it is "keep", "drop", or a tensor to be added to what is'
                " decoded"
            )
        has_skip = getattr(basis, "W_skip", None) is not None
        if has_skip and self.skip is None and not self.keeps:
            raise ValueError(
                f"the basis {name} has a skip path (W_skip): give it as skip=, a function of what"
                " is read, so that it is not left out with the error"
            )
        _check_tensors(f"{base.name}.{name}", basis, cfg)


def takes_over(hook: HookPoint) -> bool:
    """Tell whether a hook point shows the features of an earlier hook point (in a cross-layer
    transcoder).

    Args:
        hook: the hook point.
    """
    return isinstance(hook.view, InBasis) and isinstance(hook.view.basis, _LaterWrite)


def written_later(
    base: str, layers: Iterable[HookPoint], hooks: Mapping[str, HookPoint]
) -> list[tuple[HookPoint, InBasis]]:
    """Return which layers of a cross-layer transcoder write to a later hook point, and how.

    Args:
        base: the point.
        layers: the hook points of their features.
        hooks: all hook points.
    """
    writes = []
    for layer in layers:
        for follower in layer.point.linked:
            view = hooks[follower.name].view
            if follower.name.rpartition(".")[0] == base and isinstance(view, InBasis):
                writes.append((layer, view))
    return writes


def _readable(reads: HookPoint, base: HookPoint, model: nn.Module) -> View:
    """Return how a basis reads a hook point other than its own, `base`.

    Raises:
        ValueError: it depends on its module's call, or on other sites.
    """
    point, view = reads.point, reads.view
    if isinstance(view, NormNormalized) and not (view.shared or view.kind.gate):
        module = model.get_submodule(point.site.path)
        weight = None if view.kind.centered else view.kind.weight(module)
        if weight is None or bool((weight != 0).all()):
            return NormalizedOutput(view.kind)
        raise ValueError(
            f"a basis cannot read at {reads.name}: the norm's weight has zeros. Read at the norm's"
            " input"
        )
    at_module = point.site.kind in ("input", "output")
    own_input = point.site == replace(base.point.site, kind="input")
    if own_input and isinstance(view, Copied) and sizes_of(module_at(model, point.site.path)):
        view = view.inner  # a linear layer does not write over its input
    if view.contextual or view.at_once or point.sources or not at_module:
        raise ValueError(
            f"a basis that writes elsewhere cannot read at {reads.name}, which is computed inside"
            " a call of its module: read at a point that is a module's input or output as it"
            " stands (in most models hook_resid_mid, ln2.hook_normalized or hook_attn_out)"
        )
    return view


def _check_tensors(full: str, basis: Basis, cfg: ModelConfig) -> None:
    """Reject tensors whose device or dtype differs from the model's.

    Raises:
        ValueError: a tensor's device or dtype differs.
    """
    own = torch.device(cfg.device).type
    for module in modules_of(basis):
        for tensor in (*module.parameters(), *module.buffers()):
            wrong_type = tensor.is_floating_point() and tensor.dtype != cfg.dtype
            # A model without weights has no device.
            if wrong_type or tensor.device.type != own != "meta":
                raise ValueError(
                    f"{full}: the basis holds {tensor.dtype} on {tensor.device}, and the model is"
                    f" {cfg.dtype} on {cfg.device}. Move the basis (.to), or give functions that"
                    " convert: encode=..., decode=..."
                )


# --------------------------------------------------------------------------------------------------
# Bases that come with the package: directions, rotations, single neurons, layers of a cross-layer
# transcoder.
# --------------------------------------------------------------------------------------------------


class Directions(nn.Module):
    """The span of one or several directions; the features are the coordinates in it.

    Coordinates can be changed independently: if the directions are not orthonormal, `encode` uses
    the pseudo-inverse, not the product with the directions. The orthogonal complement is not
    explained.

    Args:
        directions: the directions as columns ``[d, n]``, or one direction ``[d]``; of any length.
        orthonormal: True if the columns are orthonormal: this is checked, and `encode` is then a
            product with them.

    Raises:
        ValueError: they are declared orthonormal but are not; or they are not linearly independent.

    Example:
        >>> import torch
        >>> from bridge.bases import Directions
        >>> basis = Directions(torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 0.0]]))
        >>> basis.encode(torch.tensor([5.0, 1.0, 7.0]))
        tensor([2., 1.])
        >>> basis.decode(torch.tensor([2.0, 1.0]))
        tensor([5., 1., 0.])
    """

    columns: Tensor
    dual: Tensor

    def __init__(self, directions: Float[Tensor, "..."], *, orthonormal: bool = False) -> None:
        super().__init__()
        columns = directions.detach().reshape(len(directions), -1)
        if directions.ndim not in (1, 2) or not columns.numel():
            raise ValueError(
                f"directions have shape {list(directions.shape)}; they are [d], or columns [d, n]"
            )
        exact, n = columns.double(), columns.shape[1]
        if orthonormal:
            identity = torch.eye(n, device=exact.device)
            error = float((exact.T @ exact - identity).abs().max())
            if error > 1e-3:
                raise ValueError(
                    f"the directions are not orthonormal: their products are up to {error:.3g} off"
                    " the identity"
                )
        elif int(torch.linalg.matrix_rank(exact)) < n:
            raise ValueError(
                f"the {n} directions are not linearly independent: their coordinates are not"
                " determined"
            )
        dual = columns if orthonormal else torch.linalg.pinv(exact).T.to(columns.dtype)
        self.register_buffer("columns", columns.clone())
        self.register_buffer("dual", dual.clone())
        self._columns_of_dual = fingerprints(self.columns)

    def encode(self, x: Activation) -> Features:
        """Return the coordinates."""
        if not torch.compiler.is_compiling() and is_readable(x):
            self._update_dual()
        return x @ self.dual

    def _update_dual(self) -> None:
        """Compute the pseudo-inverse anew if the directions were written to."""
        present = fingerprints(self.columns)
        if present and present != self._columns_of_dual:
            dual = torch.linalg.pinv(self.columns.double()).T
            self.dual, self._columns_of_dual = dual.to(self.columns.dtype), present

    def decode(self, features: Features) -> Activation:
        """Return the vector with these coordinates."""
        return features @ self.columns.T


class Rotation(nn.Module):
    """A subspace with a trainable basis that stays orthonormal (Geiger et al. 2023, "DAS").

    Args:
        d: the width of the activation.
        n: the dimension of the subspace; None: `d`, a rotation of the whole space.
        generator: draws the initial subspace; None: torch's default generator.

    Raises:
        ValueError: there is no such subspace.

    Example:
        >>> import torch
        >>> from bridge.bases import Rotation
        >>> rotation = Rotation(8, 3)
        >>> x = torch.randn(2, 8)
        >>> bool(
        ...     (rotation.encode(rotation.decode(rotation.encode(x))) - rotation.encode(x))
        ...     .abs()
        ...     .max()
        ...     < 1e-5
        ... )
        True
    """

    def __init__(
        self, d: int, n: int | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        n = d if n is None else n
        if not 1 <= n <= d:
            raise ValueError(f"a subspace of dimension {n} of a space of dimension {d}")
        drawn = torch.randn(d, n, generator=generator, device="cpu")
        start, _ = torch.linalg.qr(drawn)
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        # Torch draws the rest of the space from its own random numbers.
        with torch.random.fork_rng(devices=()), torch.no_grad():
            torch.manual_seed(seed)
            linear = nn.Linear(n, d, bias=False)
            linear.weight.copy_(start)
            self.linear = parametrizations.orthogonal(linear, orthogonal_map="householder")

    @property
    def columns(self) -> Float[Tensor, "d n"]:
        """Return the columns of the basis."""
        parametrization: Any = self.linear.parametrizations
        (turn,), original = parametrization.weight, parametrization.weight.original
        reflections = original.tril(diagonal=-1)
        scales = 2 / (1 + reflections.square().sum(-2))
        # Torch's own forward multiplies by the parameter's diagonal, cut to integers. It begins as
        # -1, and one step of weight decay (AdamW) makes it 0.
        return -(turn.base @ torch.linalg.householder_product(reflections, scales))

    def encode(self, x: Activation) -> Features:
        """Return the coordinates in the subspace."""
        return x @ self.columns

    def decode(self, features: Features) -> Activation:
        """Return the vector in the subspace with these coordinates."""
        return features @ self.columns.T


class Neurons(nn.Module):
    """A basis of some of an activation's own coordinates.

    Args:
        d: the width of the activation.
        indices: the coordinates.

    Raises:
        ValueError: an index is out of range, or occurs twice.

    Example:
        >>> import torch
        >>> from bridge.bases import Neurons
        >>> basis = Neurons(4, [3, 1])
        >>> basis.encode(torch.tensor([5.0, 6.0, 7.0, 8.0])), basis.decode(torch.tensor([8.0, 6.0]))
        (tensor([8., 6.]), tensor([0., 6., 0., 8.]))
    """

    indices: Tensor

    def __init__(self, d: int, indices: Sequence[int]) -> None:
        super().__init__()
        repeated = len(set(indices)) < len(indices)
        if not indices or repeated or min(indices) < 0 or max(indices) >= d:
            raise ValueError(
                f"indices are {list(indices)}; each of them is once there, from 0 to {d - 1}"
            )
        self.d = d
        self.register_buffer("indices", torch.tensor(indices, device="cpu"))

    def encode(self, x: Activation) -> Features:
        """Return the chosen coordinates."""
        return x[..., self.indices]

    def decode(self, features: Features) -> Activation:
        """Return the vector with these coordinates, and zeros elsewhere."""
        wide = features.new_zeros(*features.shape[:-1], self.d)
        return wide.index_copy(-1, self.indices, features)


class CrossLayer(nn.Module):
    """One layer of a cross-layer transcoder, or a crosscoder: features of one or several points,
    written to several points.

    The tensors have the layout of one layer of circuit-tracer's `CrossLayerTranscoder` (Ameisen et
    al. 2025, "Circuit Tracing"); add all layers to add the whole transcoder.

    Args:
        W_enc: ``[feature, d]``, from the input to the features; for several points ``[feature,
            read, d]``.
        b_enc: ``[feature]``.
        W_dec: ``[feature, point, d_out]``, the directions written at the layer's own point and at
            later points.
        b_dec: ``[d_out]``, added only at the layer's own point.
        threshold: the threshold of a JumpReLU, ``[feature]``; None: a ReLU.

    Raises:
        ValueError: the sizes do not fit each other.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.bases import CrossLayer
        >>> bridge = TransformerBridge.boot_embedded()
        >>> reads, writes = (
        ...     [f"blocks.{i}.{name}" for i in range(4)]
        ...     for name in ("hook_resid_mid", "hook_mlp_out")
        ... )
        >>> for i in range(4):
        ...     layer = CrossLayer(
        ...         torch.randn(6, 128),
        ...         torch.zeros(6),
        ...         torch.randn(6, 4 - i, 128),
        ...         torch.zeros(128),
        ...     )
        ...     point = bridge.add_basis(
        ...         writes[i], "clt", layer, reads=reads[i], later=writes[i + 1 :]
        ...     )
        >>> _, cache = bridge.run_with_cache("Mary and", names_filter="blocks.1.hook_mlp_out.clt")
        >>> cache["blocks.1.hook_mlp_out.clt"].shape
        torch.Size([1, 3, 6])
        >>> [name for name in bridge.hook_dict if "hook_mlp_out.clt_of_2" in name]
        ['blocks.3.hook_mlp_out.clt_of_2']
    """

    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor
    b_dec: Tensor
    threshold: Tensor | None

    def __init__(
        self,
        W_enc: Float[Tensor, "feature *read"],
        b_enc: Float[Tensor, " feature"],
        W_dec: Float[Tensor, "feature point d_out"],
        b_dec: Float[Tensor, " d_out"],
        threshold: Float[Tensor, " feature"] | None = None,
    ) -> None:
        super().__init__()
        tensors = {
            "W_enc": W_enc,
            "b_enc": b_enc,
            "W_dec": W_dec,
            "b_dec": b_dec,
            "threshold": threshold,
        }
        sizes = {name: list(value.shape) for name, value in tensors.items() if value is not None}
        n = W_enc.shape[0]
        fits = len(b_enc) == len(W_dec) == n and W_dec.shape[2] == len(b_dec)
        if not fits or sizes.get("threshold", [n]) != [n]:
            raise ValueError(f"the sizes of a layer do not fit each other: {sizes}")
        self.n_later = W_dec.shape[1] - 1
        for name, value in tensors.items():
            self.register_buffer(name, None if value is None else value.detach().clone())

    def encode(self, x: Activation) -> Float[Tensor, "... feature"]:
        """Return the features."""
        if self.W_enc.ndim > 2:
            x = x.flatten(-2)
        before = x @ self.W_enc.flatten(1).T + self.b_enc
        if self.threshold is None:
            return before.relu()
        return before * (before > self.threshold)

    def decode(self, features: Float[Tensor, "... feature"]) -> Float[Tensor, "... d_out"]:
        """Return the reconstruction at the layer's own hook point."""
        return features @ self.W_dec[:, 0] + self.b_dec

    def decode_later(
        self, features: Float[Tensor, "... feature"], ahead: int
    ) -> Float[Tensor, "... d_out"]:
        """Return the contribution at the hook point a given number of layers later."""
        return features @ self.W_dec[:, ahead]


# --------------------------------------------------------------------------------------------------
# Whether a basis treats positions, or rows of a batch, independently of each other.
# --------------------------------------------------------------------------------------------------


def read_by(hooks: Sequence[HookPoint]) -> dict[HookPoint, str]:
    """Return the name of the hook point that each hook point in a basis is computed from.

    Args:
        hooks: any hook points.

    Raises:
        ValueError: the features read several points, which callers cannot separate by row or
            position.
    """
    sources = {}
    for hook in hooks:
        if not isinstance(hook.view, InBasis):
            continue
        names = [name for name, _ in hook.view.reads]
        if len(names) > 1:
            raise ValueError(
                f"{hook.name} is of several points ({', '.join(names)}): it is offered in runs,"
                " with hooks, caches and traces, and in graphs of features, but not in sweeps,"
                " harvests and batches of requests"
            )
        sources[hook] = names[0] if names else hook.name.rpartition(".")[0]
    return sources


def by_position(hook: HookPoint, read: Float[Tensor, "batch pos ..."]) -> bool:
    """Test on an activation whether a basis treats each position independently of the others.

    Args:
        hook: the point in the basis.
        read: the activation that its features are computed from.
    """
    moved = read.roll(1, 1)
    moved[:, ::2] = 0
    expected = reconstructed(hook, read).roll(1, 1)
    result = reconstructed(hook, moved)
    return read.shape[1] == 1 or close(result[:, 1::2], expected[:, 1::2])


def by_row(hook: HookPoint, read: Float[Tensor, "batch pos ..."]) -> bool:
    """Test whether a basis treats each row of a batch independently of the others.

    Args:
        hook: the point in the basis.
        read: the activation that its features are computed from.
    """
    crowd = torch.cat([read, 3 * read.roll(1, 1)])
    in_crowd = reconstructed(hook, crowd)[: len(read)]
    return close(in_crowd, reconstructed(hook, read))


def reconstructed(hook: HookPoint, x: Float[Tensor, "batch pos ..."]) -> Tensor:
    """Return a basis's reconstruction of an activation.

    Args:
        hook: the point in the basis.
        x: the activation that its features are computed from.
    """
    view = hook.view
    assert isinstance(view, InBasis)
    return view.basis.decode(dense(view.encode(x)))
