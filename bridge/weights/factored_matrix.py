"""`FactoredMatrix`: a matrix of low rank, kept as the product of two."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Complex, Float, Num
from torch import Tensor

from bridge.hooks.arguments import refuse_wrong_types


class FactoredMatrixError(ValueError, AssertionError):
    """The factors do not fit. HookedTransformer's gives an `AssertionError` there."""


class FactoredMatrix:
    """The product ``A @ B``, which is not formed unless it is asked for.

    Names and meaning are HookedTransformer's. With `mdim` much smaller than `ldim` and `rdim`, as in a head's OV and QK
    circuits (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"), products, norm, eigenvalues and
    singular values cost what the factors cost. It stands for the tensors that it was made of: edit them, and make a
    new one.

    Args:
        A: ``[..., ldim, mdim]``.
        B: ``[..., mdim, rdim]``; leading axes are broadcast.

    Attributes:
        A, B: the factors, with all leading axes.
        ldim, mdim, rdim: their sizes.
        shape: of the product.

    Raises:
        FactoredMatrixError: (a ValueError) the factors do not fit.
        RuntimeError: their leading axes cannot be broadcast.

    Example:
        >>> import torch
        >>> from bridge import FactoredMatrix
        >>> m = FactoredMatrix(torch.ones(3, 5, 2), torch.ones(2, 4))
        >>> m.shape, (m @ torch.ones(4, 7)).shape, (torch.ones(5) @ m).shape
        (torch.Size([3, 5, 4]), torch.Size([3, 5, 7]), torch.Size([3, 4]))
    """

    @refuse_wrong_types
    def __init__(self, A: Num[Tensor, "..."], B: Num[Tensor, "..."]) -> None:
        if A.ndim < 2 or B.ndim < 2 or A.shape[-1] != B.shape[-2]:
            raise FactoredMatrixError(
                f"the factors must be [..., ldim, mdim] and [..., mdim, rdim]; they are {list(A.shape)} and "
                f"{list(B.shape)}"
            )
        self.ldim, self.mdim, self.rdim = A.shape[-2], A.shape[-1], B.shape[-1]
        try:
            leading = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        except RuntimeError as error:
            raise RuntimeError(
                f"Shape mismatch: the leading axes of {list(A.shape)} and {list(B.shape)} cannot be broadcast"
            ) from error
        self.has_leading_dims = bool(leading)
        self.shape = torch.Size((*leading, self.ldim, self.rdim))
        self.A = A.expand(*leading, self.ldim, self.mdim)
        self.B = B.expand(*leading, self.mdim, self.rdim)
        self._svd: tuple[Tensor, Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        return f"FactoredMatrix(shape={list(self.shape)}, mdim={self.mdim})"

    @property
    def ndim(self) -> int:
        """How many axes the product has."""
        return len(self.shape)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Both factors."""
        return self.A, self.B

    @property
    def AB(self) -> Num[Tensor, "*leading ldim rdim"]:
        """The product itself."""
        return self.A @ self.B

    @property
    def BA(self) -> Num[Tensor, "*leading mdim mdim"]:
        """The product the other way round.

        Raises:
            FactoredMatrixError: (a ValueError) `ldim` and `rdim` differ.
        """
        if self.ldim != self.rdim:
            raise FactoredMatrixError(f"BA needs a square matrix; this one is {list(self.shape)}")
        return self.B @ self.A

    @property
    def T(self) -> FactoredMatrix:
        """The transpose."""
        return FactoredMatrix(self.B.mT, self.A.mT)

    def __matmul__(self, other: Any) -> Any:
        """With a vector: a vector; with a matrix or another `FactoredMatrix`: a `FactoredMatrix`."""
        if not isinstance(other, Tensor | FactoredMatrix):
            return NotImplemented
        if other.shape[-1 if other.ndim < 2 else -2] != self.rdim:
            raise FactoredMatrixError(f"cannot multiply {list(self.shape)} with {list(other.shape)}")
        if isinstance(other, FactoredMatrix):
            return (self @ other.A) @ other.B
        if other.ndim < 2:
            return (self.A @ (self.B @ other.unsqueeze(-1))).squeeze(-1)
        return FactoredMatrix(self.A, self.B @ other) if self.rdim > self.mdim else FactoredMatrix(self.AB, other)

    def __rmatmul__(self, other: Any) -> Any:
        if not isinstance(other, Tensor):
            return NotImplemented
        if other.shape[-1] != self.ldim:
            raise FactoredMatrixError(f"cannot multiply {list(other.shape)} with {list(self.shape)}")
        if other.ndim < 2:
            return ((other.unsqueeze(-2) @ self.A) @ self.B).squeeze(-2)
        return FactoredMatrix(other @ self.A, self.B) if self.ldim > self.mdim else FactoredMatrix(other, self.AB)

    def __mul__(self, scalar: Any) -> FactoredMatrix:
        """Times a number."""
        if isinstance(scalar, Tensor) and scalar.numel() != 1:
            raise FactoredMatrixError(
                f"* is for numbers, not a tensor of shape {list(scalar.shape)}; matrices multiply with @"
            )
        if not isinstance(scalar, Tensor | int | float):
            return NotImplemented
        return FactoredMatrix(self.A * (scalar.reshape(()) if isinstance(scalar, Tensor) else scalar), self.B)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> FactoredMatrix:
        """Indexes the product. An int for a row or column keeps its axis, so that there is a matrix left.

        Example:
            >>> import torch
            >>> from bridge import FactoredMatrix
            >>> m = FactoredMatrix(torch.ones(3, 5, 2), torch.ones(3, 2, 4))
            >>> m[1].shape, m[:, 2:4, 0].shape
            (torch.Size([5, 4]), torch.Size([3, 2, 1]))
        """
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in [i for i in index if not isinstance(i, Tensor)]:
            at = next(n for n, i in enumerate(index) if i is Ellipsis)
            given = sum(i is not None for i in index) - 1
            index = (*index[:at], *(slice(None),) * (self.ndim - given), *index[at + 1 :])
        if sum(i is not None for i in index) > self.ndim:
            raise IndexError(f"{len(index)} indices for a matrix of shape {list(self.shape)}")
        leading: list[Any] = []
        inner: list[Any] = []
        seen = 0
        for i in index:
            before_rows = seen < self.ndim - 2 or (i is None and not inner)
            (leading if before_rows else inner).append(i)
            seen += i is not None
        if None in [i for i in inner if not isinstance(i, Tensor)]:
            raise IndexError("a new axis must come before rows and columns")
        kept = [slice(i, i + 1 or None) if isinstance(i, int) else i for i in inner] + [slice(None)] * (2 - len(inner))
        A, B = self.A[tuple(leading)], self.B[tuple(leading)]
        return FactoredMatrix(A[..., kept[0], :], B[..., :, kept[1]])

    @refuse_wrong_types
    def unsqueeze(self, k: int) -> FactoredMatrix:
        """A leading axis of size 1 at place `k`."""
        return FactoredMatrix(self.A.unsqueeze(k), self.B.unsqueeze(k))

    @refuse_wrong_types
    def get_corner(self, k: int = 3) -> Num[Tensor, "..."]:
        """The first `k` entries along every axis of the product."""
        leading = (slice(k),) * (self.ndim - 2)
        return self.A[(*leading, slice(k))] @ self.B[(*leading, slice(None), slice(k))]

    def svd(self) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."], Float[Tensor, "..."]]:
        """The singular value decomposition, from those of the factors.

        Returns:
            ``U`` ``[..., ldim, mdim]``, ``S`` ``[..., mdim]`` and ``Vh`` ``[..., rdim, mdim]``, with
            ``U @ diag(S) @ Vh.T`` the product: as in HookedTransformer, ``Vh`` is what others call ``V``.

        Example:
            >>> import torch
            >>> from bridge import FactoredMatrix
            >>> m = FactoredMatrix(torch.randn(5, 2), torch.randn(2, 4))
            >>> U, S, Vh = m.svd()
            >>> torch.allclose(U @ S.diag() @ Vh.T, m.AB, atol=1e-5)
            True
        """
        if self._svd is None:
            # Two small factors that are triangular hold the whole product, between two orthonormal ones.
            left, middle, right = self._middle()
            U, S, V = torch.linalg.svd(middle, full_matrices=False)
            self._svd = left @ U, S, right @ V.mT
        return self._svd

    def _middle(self) -> tuple[Tensor, Tensor, Tensor]:
        """Orthonormal ``left``, small ``middle``, orthonormal ``right``: the product is ``left @ middle @ right.T``."""
        left, upper = torch.linalg.qr(at_least_float32(self.A))
        right, lower = torch.linalg.qr(at_least_float32(self.B).mT)
        return left, upper @ lower.mT, right

    @property
    def U(self) -> Float[Tensor, "..."]:
        """Left singular vectors, ``[..., ldim, mdim]``."""
        return self.svd()[0]

    @property
    def S(self) -> Float[Tensor, "..."]:
        """Singular values, ``[..., mdim]``, largest first."""
        return self.svd()[1]

    @property
    def Vh(self) -> Float[Tensor, "..."]:
        """Right singular vectors in columns, ``[..., rdim, mdim]``."""
        return self.svd()[2]

    @property
    def V(self) -> Float[Tensor, "..."]:
        """`Vh` by its usual name."""
        return self.Vh

    @property
    def eigenvalues(self) -> Complex[Tensor, "..."]:
        """The eigenvalues of the product, but for zeros: those of the smaller ``BA``, ``[..., mdim]``."""
        return torch.linalg.eigvals(at_least_float32(self.BA))

    def norm(self) -> Float[Tensor, "..."]:
        """The Frobenius norm, ``[...]``."""
        return self._middle()[1].flatten(-2).norm(dim=-1)

    def make_even(self) -> FactoredMatrix:
        """The same matrix, with half of each singular value on either side."""
        U, S, Vh = self.svd()
        return FactoredMatrix(U * S.sqrt()[..., None, :], S.sqrt()[..., :, None] * Vh.mT)

    def collapse_l(self) -> Float[Tensor, "..."]:
        """The matrix without its orthonormal left side: ``diag(S) @ Vh.T``, ``[..., mdim, rdim]``."""
        return self.S[..., :, None] * self.Vh.mT

    def collapse_r(self) -> Float[Tensor, "..."]:
        """The matrix without its orthonormal right side: ``U @ diag(S)``, ``[..., ldim, mdim]``."""
        return self.U * self.S[..., None, :]


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in a type that has decompositions on every device.

    Args:
        x: any tensor of floating-point type.

    Example:
        >>> import torch
        >>> from bridge.weights.factored_matrix import at_least_float32
        >>> at_least_float32(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
