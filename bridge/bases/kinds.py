"""Bases that come with the package: directions, rotations, single neurons, layers of a cross-layer transcoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrizations


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
        linear = nn.Linear(n, d, bias=False)
        with torch.no_grad():
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
    """One layer of a cross-layer transcoder: features that are written at the points of several layers.

    The tensors are those of one layer of circuit-tracer's `CrossLayerTranscoder` (Ameisen et al. 2025, "Circuit
    Tracing"), whose layers are all placed to have the whole.

    Args:
        W_enc: ``[feature, d]``, from what is read to the features.
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
        W_enc: Float[Tensor, "feature d"],
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
        before = x @ self.W_enc.T + self.b_enc
        return before.relu() if self.threshold is None else before * (before > self.threshold)

    def decode(self, features: Float[Tensor, "... feature"]) -> Float[Tensor, "... d_out"]:
        """What they explain at the layer's own point."""
        return features @ self.W_dec[:, 0] + self.b_dec

    def decode_later(self, features: Float[Tensor, "... feature"], ahead: int) -> Float[Tensor, "... d_out"]:
        """What they add at the point that is so many behind."""
        return features @ self.W_dec[:, ahead]
