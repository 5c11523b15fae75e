"""The weights by HookedTransformer's names, and products of them.

Input: the model's own parameters, under the canonical names of `adapters.weights`. Output:

1. Attribute access to hook points and weights: ``bridge.blocks[3].attn.hook_z``,
   ``bridge.blocks[3].attn.W_Q``. A `NameTree` has no modules and no tensors: each attribute extends
   a name, and the complete name is looked up in the bridge.
2. Weights of all layers on one axis (`stacked_weight`); if layers differ, an error names them.
3. `FactoredMatrix`: a product of two matrices that is kept as its factors.

Weights are not copied on access; only stacks are new tensors, and gradients reach the parameters
through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Complex, Float, Num
from torch import Tensor

from adapters.architecture import Architecture
from adapters.config import ModelConfig
from adapters.weights import Weights
from bridge.arguments import CannotBeDoneError, refuse_wrong_types, shape_text
from bridge.hooks.context import trace_of
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import Names, suggestion

# --------------------------------------------------------------------------------------------------
# `FactoredMatrix`: a matrix of low rank, kept as the product of two.
# --------------------------------------------------------------------------------------------------


def _one_index(index: Any) -> Any:
    """Convert an index to a form that torch accepts: arrays and lists become tensors, numbers
    ints.
    """
    if isinstance(index, list | tuple | np.ndarray):
        index = torch.as_tensor(index)
    if isinstance(index, np.integer):
        return int(index)
    if isinstance(index, Tensor) and not index.ndim and not _is_mask(index):
        return int(index)
    return index


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _axes_of(index: Any) -> int:
    """Return the number of axes of the product that an index covers."""
    if index is None or index is Ellipsis:
        return 0
    return index.ndim if _is_mask(index) else 1


class FactoredMatrix:
    """The product ``A @ B``, kept as its factors and computed only on request.

    Names and meaning are HookedTransformer's. If `mdim` is much smaller than `ldim` and `rdim`, as
    in a head's OV and QK circuits (Elhage et al. 2021, "A Mathematical Framework for Transformer
    Circuits"), products, norm, eigenvalues and singular values are as cheap as the factors. The
    SVD is cached: after editing the factors, make a new object.

    Args:
        A: ``[..., ldim, mdim]``.
        B: ``[..., mdim, rdim]``; leading axes are broadcast.

    Attributes:
        A, B: the factors, with all leading axes.
        ldim, mdim, rdim: their sizes.
        shape: the shape of the product.

    Raises:
        CannotBeDoneError: (a ValueError) the factors do not fit.
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
            raise CannotBeDoneError(
                "the factors must be [..., ldim, mdim] and [..., mdim, rdim]; they are"
                f" {list(A.shape)} and {list(B.shape)}"
            )
        self.ldim, self.mdim = A.shape[-2:]
        self.rdim = B.shape[-1]
        try:
            leading = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        except RuntimeError as error:
            raise RuntimeError(
                f"Shape mismatch: the leading axes of {list(A.shape)} and {list(B.shape)} cannot be"
                " broadcast"
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
        """Return the number of axes of the product."""
        return len(self.shape)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Return both factors."""
        return self.A, self.B

    @property
    def AB(self) -> Num[Tensor, "*leading ldim rdim"]:
        """Return the product itself."""
        return self.A @ self.B

    @property
    def BA(self) -> Num[Tensor, "*leading mdim mdim"]:
        """Return the product in reverse order.

        Raises:
            CannotBeDoneError: (a ValueError) `ldim` and `rdim` differ.
        """
        if self.ldim != self.rdim:
            raise CannotBeDoneError(f"BA needs a square matrix; this one is {list(self.shape)}")
        return self.B @ self.A

    @property
    def T(self) -> FactoredMatrix:
        """Return the transpose."""
        return FactoredMatrix(self.B.mT, self.A.mT)

    def __matmul__(self, other: Any) -> Any:
        """Multiply by a vector (the result is a vector), a matrix or a `FactoredMatrix`."""
        if not isinstance(other, Tensor | FactoredMatrix):
            return NotImplemented
        if other.shape[-1 if other.ndim < 2 else -2] != self.rdim:
            raise CannotBeDoneError(f"cannot multiply {list(self.shape)} with {list(other.shape)}")
        if isinstance(other, FactoredMatrix):
            return (self @ other.A) @ other.B
        if other.ndim < 2:
            return (self.A @ (self.B @ other.unsqueeze(-1))).squeeze(-1)
        if self.rdim > self.mdim:
            return FactoredMatrix(self.A, self.B @ other)
        return FactoredMatrix(self.AB, other)

    def __rmatmul__(self, other: Any) -> Any:
        if not isinstance(other, Tensor):
            return NotImplemented
        if other.shape[-1] != self.ldim:
            raise CannotBeDoneError(f"cannot multiply {list(other.shape)} with {list(self.shape)}")
        if other.ndim < 2:
            return ((other.unsqueeze(-2) @ self.A) @ self.B).squeeze(-2)
        if self.ldim > self.mdim:
            return FactoredMatrix(other @ self.A, self.B)
        return FactoredMatrix(other, self.AB)

    def __mul__(self, scalar: Any) -> FactoredMatrix:
        """Multiply by a number."""
        if isinstance(scalar, Tensor) and scalar.numel() != 1:
            raise CannotBeDoneError(
                f"* is for numbers, not a tensor of shape {list(scalar.shape)}; matrices multiply"
                " with @"
            )
        if not isinstance(scalar, Tensor | int | float):
            return NotImplemented
        if isinstance(scalar, Tensor):
            scalar = scalar.reshape(())
        return FactoredMatrix(self.A * scalar, self.B)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> FactoredMatrix:
        """Index the product. An int for a row or column keeps its axis, so that the result is a
        matrix.

        Example:
            >>> import torch
            >>> from bridge import FactoredMatrix
            >>> m = FactoredMatrix(torch.ones(3, 5, 2), torch.ones(3, 2, 4))
            >>> m[1].shape, m[:, 2:4, 0].shape
            (torch.Size([5, 4]), torch.Size([3, 2, 1]))
        """
        leading, inner = self._split_index(index if isinstance(index, tuple) else (index,))
        entries: list[Any] = [slice(None), slice(None)]  # of rows, and of columns
        for axis, i in enumerate(inner):
            entries[axis] = slice(i, i + 1 or None) if isinstance(i, int) else i
        A = self.A[leading]
        B = self.B[leading]
        return FactoredMatrix(A[..., entries[0], :], B[..., :, entries[1]])

    def _split_index(self, index: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split an index into the part for the leading axes and the part for rows and columns.

        Raises:
            IndexError: too many indices, or one that the product does not support.
        """
        index = tuple(map(_one_index, index))
        ellipses = [n for n, i in enumerate(index) if i is Ellipsis]
        if len(ellipses) > 1:
            raise IndexError("an index has one ... at most")
        n_axes = sum(map(_axes_of, index))
        if n_axes > self.ndim:
            raise IndexError(f"{n_axes} indices for a matrix of shape {list(self.shape)}")
        for place in ellipses:
            missing = (slice(None),) * (self.ndim - n_axes)
            index = (*index[:place], *missing, *index[place + 1 :])
        leading: list[Any] = []
        inner: list[Any] = []
        n_before = 0
        for i in index:
            before_rows = n_before < self.ndim - 2 or (i is None and not inner)
            (leading if before_rows else inner).append(i)
            n_before += _axes_of(i)
        if any(i is None for i in inner):
            raise IndexError("a new axis must come before rows and columns")
        if sum(map(_axes_of, leading)) > self.ndim - 2 or any(_axes_of(i) > 1 for i in inner):
            raise IndexError("a mask is for leading axes, or for rows, or for columns")
        return tuple(leading), tuple(inner)

    @refuse_wrong_types
    def unsqueeze(self, k: int) -> FactoredMatrix:
        """Insert a leading axis of size 1 at position `k`."""
        return FactoredMatrix(self.A.unsqueeze(k), self.B.unsqueeze(k))

    @refuse_wrong_types
    def get_corner(self, k: int = 3) -> Num[Tensor, "..."]:
        """Return the first `k` entries along every axis of the product."""
        leading = (slice(k),) * (self.ndim - 2)
        return self.A[(*leading, slice(k))] @ self.B[(*leading, slice(None), slice(k))]

    def svd(self) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."], Float[Tensor, "..."]]:
        """Compute the singular value decomposition, from those of the factors.

        Returns:
            ``U`` ``[..., ldim, mdim]``, ``S`` ``[..., mdim]`` and ``Vh`` ``[..., rdim, mdim]``,
            with ``U @ diag(S) @ Vh.T`` the product: as in HookedTransformer, ``Vh`` is what others
            call ``V``.

        Example:
            >>> import torch
            >>> from bridge import FactoredMatrix
            >>> m = FactoredMatrix(torch.randn(5, 2), torch.randn(2, 4))
            >>> U, S, Vh = m.svd()
            >>> torch.allclose(U @ S.diag() @ Vh.T, m.AB, atol=1e-5)
            True
        """
        if self._svd is None:
            # Two small triangular factors hold the whole product, between two orthonormal ones.
            orthonormal, middle, other = self._middle()
            U, S, V = torch.linalg.svd(middle, full_matrices=False)
            self._svd = orthonormal @ U, S, other @ V.mT
        return self._svd

    def _middle(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return orthonormal ``left``, small ``middle``, orthonormal ``right``: the product is
        ``left @ middle @ right.T``.
        """
        orthonormal, upper = torch.linalg.qr(at_least_float32(self.A))
        other, lower = torch.linalg.qr(at_least_float32(self.B).mT)
        return orthonormal, upper @ lower.mT, other

    @property
    def U(self) -> Float[Tensor, "..."]:
        """Return the left singular vectors, ``[..., ldim, mdim]``."""
        return self.svd()[0]

    @property
    def S(self) -> Float[Tensor, "..."]:
        """Return the singular values, ``[..., mdim]``, largest first."""
        return self.svd()[1]

    @property
    def Vh(self) -> Float[Tensor, "..."]:
        """Return the right singular vectors as columns, ``[..., rdim, mdim]``."""
        return self.svd()[2]

    @property
    def V(self) -> Float[Tensor, "..."]:
        """Return `Vh`, by its usual name."""
        return self.Vh

    @property
    def eigenvalues(self) -> Complex[Tensor, "..."]:
        """Return the eigenvalues of the product, except zeros: those of the smaller ``BA``,
        ``[..., mdim]``.
        """
        return torch.linalg.eigvals(at_least_float32(self.BA))

    def norm(self) -> Float[Tensor, "..."]:
        """Return the Frobenius norm, ``[...]``."""
        return self._middle()[1].flatten(-2).norm(dim=-1)

    def make_even(self) -> FactoredMatrix:
        """Return the same matrix with the root of each singular value in both factors."""
        U, S, Vh = self.svd()
        return FactoredMatrix(U * S.sqrt()[..., None, :], S.sqrt()[..., :, None] * Vh.mT)

    def collapse_l(self) -> Float[Tensor, "..."]:
        """Return the matrix without its orthonormal left side: ``diag(S) @ Vh.T``, ``[..., mdim,
        rdim]``.
        """
        return self.S[..., :, None] * self.Vh.mT

    def collapse_r(self) -> Float[Tensor, "..."]:
        """Return the matrix without its orthonormal right side: ``U @ diag(S)``, ``[..., ldim,
        mdim]``.
        """
        return self.U * self.S[..., None, :]


def at_least_float32(x: Tensor) -> Tensor:
    """Return the tensor in a dtype whose decompositions every device implements.

    Args:
        x: any tensor of floating-point type.

    Example:
        >>> import torch
        >>> from bridge.weights import at_least_float32
        >>> at_least_float32(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class NameTree:
    """The hook points and weights as a tree, by the components of their names.

    Args:
        names: all names and aliases.
        weights: returns the canonical weights, which are in the tree too.
    """

    def __init__(self, names: Names, weights: Callable[[], Weights]) -> None:
        self.names = names
        self.weights = weights
        self._children: dict[str, dict[str, str]] | None = None

    @property
    def children(self) -> dict[str, dict[str, str]]:
        """Return, for each prefix, the next name parts and the full names."""
        if self._children is None:
            self._children = {}
            weights = self.weights().getters
            grouped = [name.replace("._", ".") for name in weights if "._" in name]
            for name in [*self.names.points, *self.names.aliases, *weights, *grouped]:
                prefix = ""
                for part in name.split("."):
                    full = f"{prefix}.{part}" if prefix else part
                    self._children.setdefault(prefix, {})[part] = full
                    prefix = full
        return self._children

    def refresh(self) -> None:
        """Clear the cached name parts after names were added or removed."""
        self._children = None

    def get(
        self,
        prefix: str,
        name: str,
        others: Iterable[str] = (),
        call: CallPart | None = None,
    ) -> HookPoint | Component | _ComponentList | Tensor | FactoredMatrix:
        """Return the entry `name` at `prefix`.

        Args:
            prefix: the full name of a part, "" for the whole model.
            name: the name of the entry.
            others: further names that an error may suggest for a mistyped one.
            call: calls a part by its name.

        Raises:
            AttributeError: there is no such entry.
        """
        below = self.children.get(prefix, {})
        full = below.get(name)
        if full is None:
            # One layer's heads, [n_heads, d_model, d_model].
            if name in ("OV", "QK") and "W_O" in below:
                W_Q, W_K, W_V, W_O = (self._weight(f"{prefix}.W_{letter}") for letter in "QKVO")
                return FactoredMatrix(W_V, W_O) if name == "OV" else FactoredMatrix(W_Q, W_K.mT)
            raise AttributeError(
                f"{prefix or 'the bridge'} has no {name!r}.{suggestion(name, (*below, *others))}"
            )
        if full not in self.children:
            return self._leaf(full)
        if all(part.isdigit() for part in self.children[full]):
            return _ComponentList(self, full, call)
        return Component(self, full, call)

    def _weight(self, name: str) -> Tensor:
        weight = self._leaf(name)
        assert isinstance(weight, Tensor), name
        return weight

    def _leaf(self, name: str) -> HookPoint | Tensor:
        weights = self.weights()
        if name in weights.getters:
            return weights[name]
        part, dot, weight = name.rpartition(".")
        grouped = f"{part}{dot}_{weight}"
        if grouped in weights.getters:
            # As HookedTransformer shows grouped keys and values: repeated for each query head.
            groups = weights[grouped]
            n_repeats = len(weights[f"{part}.W_O"]) // len(groups)
            return groups.repeat_interleave(n_repeats, dim=0)
        return self.names.find(name)


#: Calls a part of a model: its name, the input and further arguments.
CallPart = Callable[..., Tensor]


class Component:
    """A part of the model, such as a block or its attention, with its hook points and weights.

    Calling a block, an embedding, a norm, an MLP or the unembedding runs it alone, with its hooks;
    see `TransformerBridge.call_part`.
    """

    def __init__(self, tree: NameTree, name: str, call: CallPart | None = None) -> None:
        self.__dict__["_tree"] = tree
        self.__dict__["name"] = name
        self.__dict__["_call"] = call

    def __call__(self, input: Any, **kwargs: Any) -> Tensor:
        """Call the part, as `TransformerBridge.call_part`.

        Args:
            input: what it reads.
            kwargs: further arguments.
        """
        call: CallPart | None = self.__dict__["_call"]
        if call is None:
            raise TypeError(f"{self.name} is called by its bridge: bridge.call_part({self.name!r})")
        return call(self.name, input, **kwargs)

    @property
    def output(self) -> Tensor:
        """Return the component's output in a trace: the activation at its ``hook_out``, if it
        has one.
        """
        output: Tensor = self._seen("output")
        return output

    @property
    def input(self) -> Tensor:
        """Return the component's first input in a trace: the activation at ``hook_in``, if it
        has one.
        """
        value: Tensor = self._seen("input")
        return value

    @property
    def outputs(self) -> Any:
        """Return the module's whole output in a trace."""
        return self._seen("outputs")

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return all arguments of the module in a trace: positional and keyword."""
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = self._seen("inputs")
        return arguments

    def _seen(self, what: str) -> Any:
        return trace_of(self._tree.names, f"{self.name}.{what}").seen_of_part(self.name, what)

    def __setattr__(self, attribute: str, value: Any) -> None:
        if attribute in ("output", "input", "inputs"):
            return trace_of(self._tree.names, f"{self.name}.{attribute}").set_for_part(
                self.name, attribute, value
            )
        raise AttributeError(
            f"{self.name}.{attribute} cannot be assigned, since a part is made anew each time it is"
            " asked for; edit a weight in place (W[:] = ...), or replace the module in"
            " original_model"
        )

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self._tree.get(self.name, attribute, (), self.__dict__["_call"])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._tree.children[self.name]]

    def __repr__(self) -> str:
        prefix = f"{self.name}."
        points: dict[str, HookPoint] = {}
        n_extra = 0
        for name, hook in self._tree.names.points.items():
            if name.startswith(prefix):
                if hook.point.group == "extra":
                    n_extra += 1
                else:
                    points[name.removeprefix(prefix)] = hook
        weights = self._tree.weights()
        width = max(map(len, points), default=0)
        lines = [self.name]
        for name, hook in points.items():
            lines.append(f"{name:{width}}  {shape_text(weights.cfg, hook.point.axes)}")
        if n_extra:
            lines.append(f"and {n_extra} more hook points, when named")
        names = [name.removeprefix(prefix) for name in weights.getters if name.startswith(prefix)]
        if names:
            lines.append(f"weights: {', '.join(names)}")
        return "\n  ".join(lines)


class _ComponentList:
    """The blocks of a model by their indices; blocks without hook points are not included."""

    def __init__(self, tree: NameTree, name: str, call: CallPart | None = None) -> None:
        self._tree = tree
        self.name = name
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise the error that says how to run the blocks."""
        raise TypeError(
            f"bridge.{self.name} is a list: bridge.{self.name}[0](residual) runs one of them, and"
            " bridge(residual, start_at_layer=0, stop_at_layer=n) the first n"
        )

    def __len__(self) -> int:
        return len(self._tree.children[self.name])

    def __getitem__(self, index: int) -> Component:
        numbers = self._numbers()
        if type(index) is not int:
            raise TypeError(
                f"{self.name}[{index!r}]: an index must be a whole number; for several, such as a"
                f" slice, use [bridge.{self.name}[i] for i in range(...)]"
            )
        number = index if index >= 0 else numbers[-1] + 1 + index
        if number not in numbers:
            some = f": {', '.join(map(str, numbers))}" if len(numbers) <= numbers[-1] else ""
            raise IndexError(
                f"{self.name} has {len(numbers)} members{some}; {index} is out of range"
            )
        return Component(self._tree, f"{self.name}.{number}", self._call)

    def __iter__(self) -> Iterator[Component]:
        return (self[i] for i in self._numbers())

    def _numbers(self) -> list[int]:
        return sorted(map(int, self._tree.children[self.name]))

    def __repr__(self) -> str:
        return f"ComponentList({self.name}: {len(self)} members)"


# --------------------------------------------------------------------------------------------------
# A model's weights over all layers, and weights with several possible names.
# --------------------------------------------------------------------------------------------------


def stacked_weight(
    tree: NameTree, cfg: ModelConfig, part: str, name: str
) -> Float[Tensor, "layer ..."]:
    """Return one weight of all blocks, stacked.

    Args:
        tree: the model's name tree.
        cfg: the facts about it.
        part: the part of a block, such as ``attn``.
        name: the weight's name, such as ``W_Q``.

    Returns:
        ``[layer, ...]``, a new tensor.

    Raises:
        AttributeError: the blocks do not have this weight, or have several of them.
    """
    has_blocks = any(key.startswith("blocks.0.") for key in tree.weights().getters)
    stack = "blocks" if has_blocks else "encoder"
    without = [i for i in range(cfg.n_layers) if part not in tree.children.get(f"{stack}.{i}", {})]
    if without and len(without) < cfg.n_layers:
        raise AttributeError(
            f"layers {', '.join(map(str, without))} of {cfg.model_name} have no {part}, and so no"
            f" {name}: go through "
            f'the other layers, [block.{part}.{name} for _, block in bridge.blocks_with("{part}")]'
        )
    entries = [tree.get(f"{stack}.{i}.{part}", name) for i in range(cfg.n_layers)]
    tensors = [weight for weight in entries if isinstance(weight, Tensor)]
    if len(tensors) < len(entries):
        raise AttributeError(
            f"{cfg.model_name} has several {name} in each block: see tl_named_parameters()"
        )
    shapes = sorted({tuple(weight.shape) for weight in tensors})
    if len(shapes) > 1:
        raise AttributeError(
            f"{name} of {cfg.model_name} has other shapes in other layers,"
            f" {', '.join(map(str, shapes))}: take them one by one, bridge.blocks[0].{part}.{name}"
        )
    return torch.stack(tensors)


def stacked_where(
    tree: NameTree,
    cfg: ModelConfig,
    part: str,
    path: str,
    reshape: Callable[[Tensor], Tensor] | None,
) -> tuple[list[int], Float[Tensor, "layer ..."]]:
    """Return one weight of the blocks that have a part, and the indices of these blocks.

    Args:
        tree, cfg: as for `stacked_weight`.
        part: the part of a block, such as ``mlp``.
        path: the weight's path from the block, such as ``mlp.W_in``.
        reshape: a function applied to each weight; None: none.

    Raises:
        ValueError: no block has it.
    """
    getters = tree.weights().getters
    weights: dict[int, Tensor] = {}
    for i in range(cfg.n_layers):
        if any(key.startswith(f"blocks.{i}.{part}.") for key in getters):
            owner, _, name = f"blocks.{i}.{path}".rpartition(".")
            weight = tree.get(owner, name)
            if not isinstance(weight, Tensor):
                raise ValueError(f"blocks.{i}.{path} is no weight")
            weights[i] = weight if reshape is None else reshape(weight)
    if not weights:
        raise ValueError(f"no block of {cfg.model_name} has {part!r}")
    return list(weights), torch.stack(list(weights.values()))


def first_weight(weights: Weights, *names: str) -> Float[Tensor, "..."]:
    """Return the first weight in a list of names that a model has.

    Args:
        weights: the model's weights.
        names: HookedTransformer's state-dict names.

    Raises:
        AttributeError: it has none of them.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.weights import first_weight
        >>> first_weight(TransformerBridge.boot_embedded().weights, "unembed.W_U").shape[0]
        128
    """
    for name in names:
        if name in weights.getters:
            return weights[name]
    raise AttributeError(f"{weights.cfg.model_name} has no {names[0]}")


# --------------------------------------------------------------------------------------------------
# The parts of a model's layers.
# --------------------------------------------------------------------------------------------------


_KNOWN = ("attn", "cross_attn", "mixer", "mlp")


def parts_of_layers(
    tree: NameTree, architecture: Architecture, cfg: ModelConfig
) -> dict[str, list[str]]:
    """Return the names of each layer's parts, in the order of the computation, by the layer's name.

    Args:
        tree: the model's name tree.
        architecture: the declaration.
        cfg: the facts about the model.

    Example:
        >>> from bridge import TransformerBridge
        >>> TransformerBridge.boot_embedded().layer_types[0]
        'attn+mlp'
    """
    parts: dict[str, list[str]] = {}
    for stack in architecture.stacks:
        n_layers = cfg.n_layers
        if stack.one_of_two:
            n_layers = len(tree.children.get(stack.name, {}))
        for index in range(n_layers):
            block = stack.block_at(index)
            parts[f"{stack.name}.{index}"] = [named.name for named in block.named]
    return parts


def layers_with(
    part: str, layers: dict[str, list[str]], tree: NameTree, call: CallPart
) -> list[tuple[int, Component]]:
    """Return the layers that have a part; see `TransformerBridge.blocks_with`.

    Args:
        part: its name.
        layers: the result of `parts_of_layers`.
        tree: the model's name tree.
        call: calls a part by its name.

    Raises:
        ValueError: no model has a part of this name.
    """
    known = sorted({*_KNOWN, *(name for names in layers.values() for name in names)})
    if part not in known:
        hint = suggestion(part, known)
        if part in ("mamba", "ssm", "linear_attn"):
            hint = " State spaces and linear attention are mixers."
        raise ValueError(
            f"no part of a block is called {part!r}: there are {', '.join(known)}.{hint}"
        )
    return [
        (int(name.split(".")[-1]), Component(tree, name, call))
        for name, names in layers.items()
        if part in names
    ]
