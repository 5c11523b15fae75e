"""Placing a hook point in a basis: what is refused, and what the point is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from adapters.config import ModelConfig
from adapters.norms import NormalizedOutput, NormNormalized
from adapters.points import LinkedPoint, Point
from adapters.views import View
from adapters.views.basis import Basis, Error, InBasis, dense
from bridge.hooks.hooks import HookPoint
from bridge.hooks.modules import close, itself

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


def modules_of(basis: Basis) -> list[nn.Module]:
    """The modules that hold a basis's tensors; none where it is no module.

    Args:
        basis: the basis.
    """
    if isinstance(basis, FunctionBasis):  # those whose methods they are, each once
        owners = (getattr(function, "__self__", function) for function in (basis.encode, basis.decode))
        return list(dict.fromkeys(owner for owner in owners if isinstance(owner, nn.Module)))
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
        decode_later: its method of that name.
        ahead: how many points behind its own.
    """

    basis: Basis
    decode_later: Callable[[Tensor, int], Tensor]
    ahead: int

    def encode(self, x: Tensor) -> Tensor:
        """The layer's features."""
        return self.basis.encode(x)

    def decode(self, features: Tensor) -> Tensor:
        """What they add here."""
        return self.decode_later(features, self.ahead)


@dataclass(frozen=True)
class BasisRequest:
    """What `TransformerBridge.add_basis` is asked for.

    Attributes:
        name, basis, point, reads, later, skip, error: see there; hook points in the place of names.
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
        if late := [reads.name for reads in self.reads if reads.order >= self.point.order]:
            raise ValueError(
                f"{', '.join(late)} does not come before {self.point.name}: features of it cannot be written there"
            )
        axes = {tuple(reads.point.axes.split()) for reads in self.reads}
        if len(axes) > 1 or len({*self.reads}) < len(self.reads):
            read = ", ".join(f"{reads.name} [{reads.point.axes}]" for reads in self.reads)
            raise ValueError(f"the features of {self.name} are of {read}: several points are different, with like axes")
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
        if not callable(decode_later := getattr(self.basis, "decode_later", None)):
            raise TypeError(f"the basis {self.name} is {type(self.basis).__name__}, which has no method decode_later")
        if not self.reads:
            raise ValueError(f"the features of {own.name} are written at later points: say what they are of (reads=)")
        name = f"{self.name}_of_{self.point.point.depth}"
        others = [
            self._point(hook, name, LaterWrite(self.basis, decode_later, at), cfg, model)
            for at, hook in enumerate(self.later, start=1)
        ]
        linked = tuple(LinkedPoint(other.name, itself) for other in others)
        return [replace(own, linked=linked), *others]

    def _point(self, base: HookPoint, name: str, basis: Basis, cfg: ModelConfig, model: nn.Module) -> Point:
        full = f"{base.name}.{name}"
        axes = base.point.axes.split()
        self._check(base, name, cfg)
        config = getattr(basis, "cfg", None)
        stateful = getattr(config, "normalize_activations", None) in _AT_RUN_TIME
        if getattr(basis, "hook_z_reshaping_mode", False) and axes[-2:] == ["n_heads", "d_head"]:
            axes = axes[:-1]  # SAELens' SAEs of all heads together
        later = isinstance(basis, LaterWrite)
        return replace(
            base.point,
            name=full,
            view=InBasis(
                full,
                base.view,
                basis,
                self.error if self.keeps or not later else "drop",
                [(reads.name, _readable(reads, model)) for reads in self.reads],
                None if later else self.skip,
                stateful,
                on_top=later,
            ),
            axes=" ".join([*axes[:-1], "feature"]),
            group="extra",
            flag=None,
            aliases=tuple(f"{alias}.{name}" for alias in base.point.aliases),
            sources=(*base.point.sources, *[reads.point.site for reads in self.reads]),
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
            "module: read at a point that is a module's input or output as it stands (in most models hook_resid_mid, "
            "ln2.hook_normalized or hook_attn_out)"
        )
    return view


def _check_tensors(full: str, basis: Basis, cfg: ModelConfig) -> None:
    """Refuses tensors that are elsewhere than the model, or of another type.

    Raises:
        ValueError: one is.
    """
    own = torch.device(cfg.device).type
    for module in modules_of(basis):
        for tensor in (*module.parameters(), *module.buffers()):
            wrong_type = tensor.is_floating_point() and tensor.dtype != cfg.dtype
            if wrong_type or tensor.device.type != own != "meta":  # a model without weights is nowhere
                raise ValueError(
                    f"{full}: the basis holds {tensor.dtype} on {tensor.device}, and the model is {cfg.dtype} on "
                    f"{cfg.device}. Move the basis (.to), or give functions that convert: encode=..., decode=..."
                )


# ----------------------------------------------------------------------------------------------------------------------
# Bases that come with the package: directions, rotations, single neurons, layers of a cross-layer transcoder.
# ----------------------------------------------------------------------------------------------------------------------


class Directions(nn.Module):
    """The span of one direction or several; the features are the coordinates in it.

    One coordinate can be changed without another: where the directions are not orthonormal, `encode` is the
    pseudo-inverse and no product with the directions. What is orthogonal to all of them is not explained.

    Args:
        directions: the directions as columns ``[d, n]``, or one direction ``[d]``; of any length.
        orthonormal: say True where the columns are orthonormal: it is checked, and `encode` is a product with them.

    Raises:
        ValueError: they are not orthonormal though that was said; or they are not linearly independent.

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
            raise ValueError(f"directions have shape {list(directions.shape)}; they are [d], or columns [d, n]")
        wide = columns.double()
        if orthonormal:
            far = float((wide.T @ wide - torch.eye(wide.shape[1], device=wide.device)).abs().max())
            if far > 1e-3:
                raise ValueError(
                    f"the directions are not orthonormal: their products are up to {far:.3g} off the identity"
                )
        elif int(torch.linalg.matrix_rank(wide)) < wide.shape[1]:
            raise ValueError(
                f"the {wide.shape[1]} directions are not linearly independent: their coordinates are not determined"
            )
        dual = columns if orthonormal else torch.linalg.pinv(wide).T.to(columns.dtype)
        self.register_buffer("columns", columns.clone())
        self.register_buffer("dual", dual.clone())

    def encode(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... n"]:
        """The coordinates."""
        return x @ self.dual

    def decode(self, features: Float[Tensor, "... n"]) -> Float[Tensor, "... d"]:
        """The vector with these coordinates."""
        return features @ self.columns.T


class Rotation(nn.Module):
    """A subspace by an orthonormal basis that can be trained: it stays orthonormal (Geiger et al. 2023, "DAS").

    Args:
        d: the width of the activation.
        n: the dimension of the subspace; None: `d`, a rotation of the whole space.
        generator: draws the subspace that it begins with; None: torch's own.

    Raises:
        ValueError: there is no such subspace.

    Example:
        >>> import torch
        >>> from bridge.bases import Rotation
        >>> rotation = Rotation(8, 3)
        >>> x = torch.randn(2, 8)
        >>> bool((rotation.encode(rotation.decode(rotation.encode(x))) - rotation.encode(x)).abs().max() < 1e-5)
        True
    """

    def __init__(self, d: int, n: int | None = None, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        n = d if n is None else n
        if not 1 <= n <= d:
            raise ValueError(f"a subspace of dimension {n} of a space of dimension {d}")
        start, _ = torch.linalg.qr(torch.randn(d, n, generator=generator))
        seed = int(torch.randint(2**62, (), generator=generator))
        with torch.random.fork_rng(devices=()), torch.no_grad():  # torch draws the rest of the space by its own numbers
            torch.manual_seed(seed)
            linear = nn.Linear(n, d, bias=False)
            linear.weight.copy_(start)
            self.linear = parametrizations.orthogonal(linear, orthogonal_map="householder")

    @property
    def columns(self) -> Float[Tensor, "d n"]:
        """The basis."""
        weight = self.linear.weight
        assert isinstance(weight, Tensor)
        return weight

    def encode(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... n"]:
        """The coordinates in the subspace."""
        return x @ self.columns

    def decode(self, features: Float[Tensor, "... n"]) -> Float[Tensor, "... d"]:
        """The vector in the subspace with these coordinates."""
        return features @ self.columns.T


class Neurons(nn.Module):
    """Some of an activation's own coordinates.

    Args:
        d: the width of the activation.
        indices: which.

    Raises:
        ValueError: an index is not there, or is there twice.

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
        if not indices or len(set(indices)) < len(indices) or not 0 <= min(indices) <= max(indices) < d:
            raise ValueError(f"indices are {list(indices)}; each of them is once there, from 0 to {d - 1}")
        self.d = d
        self.register_buffer("indices", torch.tensor(indices))

    def encode(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... n"]:
        """The chosen coordinates."""
        return x[..., self.indices]

    def decode(self, features: Float[Tensor, "... n"]) -> Float[Tensor, "... d"]:
        """The vector that has these, and zeros elsewhere."""
        wide = features.new_zeros(*features.shape[:-1], self.d)
        return wide.index_copy(-1, self.indices, features)


class CrossLayer(nn.Module):
    """One layer of a cross-layer transcoder, or a crosscoder: features of one point or several, written at several.

    The tensors are those of one layer of circuit-tracer's `CrossLayerTranscoder` (Ameisen et al. 2025, "Circuit
    Tracing"), whose layers are all placed to have the whole.

    Args:
        W_enc: ``[feature, d]``, from what is read to the features; of several points ``[feature, read, d]``.
        b_enc: ``[feature]``.
        W_dec: ``[feature, point, d_out]``, what is written at the layer's own point and at those behind it.
        b_dec: ``[d_out]``, added at the layer's own point alone.
        threshold: of a JumpReLU, ``[feature]``; None: a ReLU.

    Raises:
        ValueError: the sizes do not fit each other.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.bases import CrossLayer
        >>> bridge = TransformerBridge.boot_embedded()
        >>> reads, writes = ([f"blocks.{i}.{name}" for i in range(4)] for name in ("hook_resid_mid", "hook_mlp_out"))
        >>> for i in range(4):
        ...     layer = CrossLayer(torch.randn(6, 128), torch.zeros(6), torch.randn(6, 4 - i, 128), torch.zeros(128))
        ...     point = bridge.add_basis(writes[i], "clt", layer, reads=reads[i], later=writes[i + 1 :])
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
        parts = {"W_enc": W_enc, "b_enc": b_enc, "W_dec": W_dec, "b_dec": b_dec, "threshold": threshold}
        sizes = {name: list(value.shape) for name, value in parts.items() if value is not None}
        n, out = W_enc.shape[0], b_dec.shape[0]
        if [b_enc.shape[0], W_dec.shape[0], W_dec.shape[2]] != [n, n, out] or sizes.get("threshold", [n]) != [n]:
            raise ValueError(f"the sizes of a layer do not fit each other: {sizes}")
        self.n_later = W_dec.shape[1] - 1
        for name, value in parts.items():
            self.register_buffer(name, None if value is None else value.detach().clone())

    def encode(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... feature"]:
        """The features."""
        if self.W_enc.ndim > 2:
            x = x.flatten(-2)
        before = x @ self.W_enc.flatten(1).T + self.b_enc
        return before.relu() if self.threshold is None else before * (before > self.threshold)

    def decode(self, features: Float[Tensor, "... feature"]) -> Float[Tensor, "... d_out"]:
        """What they explain at the layer's own point."""
        return features @ self.W_dec[:, 0] + self.b_dec

    def decode_later(self, features: Float[Tensor, "... feature"], ahead: int) -> Float[Tensor, "... d_out"]:
        """What they add at the point that is so many behind."""
        return features @ self.W_dec[:, ahead]


# ----------------------------------------------------------------------------------------------------------------------
# What a basis makes of a position, or of a row of a batch: the same whatever the others are, or not.
# ----------------------------------------------------------------------------------------------------------------------


def read_by(hooks: Sequence[HookPoint]) -> dict[HookPoint, str]:
    """Of the hook points that are in a basis, the names of those that their features are of.

    Args:
        hooks: any hook points.

    Raises:
        ValueError: features of several points, which none of those who ask can tell apart by row or position.
    """
    found = {}
    for hook in hooks:
        if isinstance(hook.view, InBasis):
            if len(hook.view.reads) > 1:
                names = ", ".join(name for name, _ in hook.view.reads)
                raise ValueError(
                    f"{hook.name} is of several points ({names}): it is offered in runs, with hooks, caches and "
                    "traces, and in graphs of features, but not in sweeps, harvests and batches of requests"
                )
            found[hook] = hook.view.reads[0][0] if hook.view.reads else hook.name.rpartition(".")[0]
    return found


def by_position(hook: HookPoint, read: Float[Tensor, "batch pos ..."]) -> bool:
    """Whether a basis gives each position the same, wherever it is and whatever the others are: tried on an activation.

    Args:
        hook: the point in the basis.
        read: what its features are of.
    """
    moved = read.roll(1, 1)
    moved[:, ::2] = 0
    there = reconstructed(hook, read).roll(1, 1)
    return read.shape[1] == 1 or close(reconstructed(hook, moved)[:, 1::2], there[:, 1::2])


def by_row(hook: HookPoint, read: Float[Tensor, "batch pos ..."]) -> bool:
    """Whether a basis gives each row of a batch the same whatever the others are: tried with larger ones behind it.

    Args:
        hook: the point in the basis.
        read: what its features are of.
    """
    crowd = torch.cat([read, 3 * read.roll(1, 1)])
    return close(reconstructed(hook, crowd)[: len(read)], reconstructed(hook, read))


def reconstructed(hook: HookPoint, x: Float[Tensor, "batch pos ..."]) -> Tensor:
    """What a basis explains of an activation.

    Args:
        hook: the point in the basis.
        x: what its features are of.
    """
    view = hook.view
    assert isinstance(view, InBasis)
    return view.basis.decode(dense(view.encode(x)))
