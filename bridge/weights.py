"""The weights by HookedTransformer's names, and the products of them.

What comes in is the model's own parameters, which `adapters.weights` shows under canonical names. What goes out:

1. Attribute access to hook points and weights: ``bridge.blocks[3].attn.hook_z``, ``bridge.blocks[3].attn.W_Q``. A
   `NameTree` has no modules and no tensors: each step is a longer name, and its end is asked of the bridge.
2. Weights of all layers on one axis (`stacked_weight`), with a refusal that names the layers where they differ.
3. `FactoredMatrix`: a product of two matrices that is kept as its factors.

No weight is copied to be looked at; only stacks are new tensors, and gradients reach the parameters through them.
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
from bridge.hooks.arguments import CannotBeDoneError, refuse_wrong_types, shape_text
from bridge.hooks.context import trace_of
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import Names, suggestion

# ----------------------------------------------------------------------------------------------------------------------
# `FactoredMatrix`: a matrix of low rank, kept as the product of two.
# ----------------------------------------------------------------------------------------------------------------------


def _one_index(index: Any) -> Any:
    """An index as torch has it: arrays and lists are tensors, a number of any kind an int."""
    if isinstance(index, list | tuple | np.ndarray):
        index = torch.as_tensor(index)
    is_number = isinstance(index, np.integer) or (isinstance(index, Tensor) and not index.ndim and not _is_mask(index))
    return int(index) if is_number else index


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _axes_of(index: Any) -> int:
    """How many axes of the product an index stands for."""
    return 0 if index is None or index is Ellipsis else index.ndim if _is_mask(index) else 1


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
            CannotBeDoneError: (a ValueError) `ldim` and `rdim` differ.
        """
        if self.ldim != self.rdim:
            raise CannotBeDoneError(f"BA needs a square matrix; this one is {list(self.shape)}")
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
            raise CannotBeDoneError(f"cannot multiply {list(self.shape)} with {list(other.shape)}")
        if isinstance(other, FactoredMatrix):
            return (self @ other.A) @ other.B
        if other.ndim < 2:
            return (self.A @ (self.B @ other.unsqueeze(-1))).squeeze(-1)
        return FactoredMatrix(self.A, self.B @ other) if self.rdim > self.mdim else FactoredMatrix(self.AB, other)

    def __rmatmul__(self, other: Any) -> Any:
        if not isinstance(other, Tensor):
            return NotImplemented
        if other.shape[-1] != self.ldim:
            raise CannotBeDoneError(f"cannot multiply {list(other.shape)} with {list(self.shape)}")
        if other.ndim < 2:
            return ((other.unsqueeze(-2) @ self.A) @ self.B).squeeze(-2)
        return FactoredMatrix(other @ self.A, self.B) if self.ldim > self.mdim else FactoredMatrix(other, self.AB)

    def __mul__(self, scalar: Any) -> FactoredMatrix:
        """Times a number."""
        if isinstance(scalar, Tensor) and scalar.numel() != 1:
            raise CannotBeDoneError(
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
        index = tuple(map(_one_index, index if isinstance(index, tuple) else (index,)))
        ellipses = [n for n, i in enumerate(index) if i is Ellipsis]
        if len(ellipses) > 1:
            raise IndexError("an index has one ... at most")
        given = sum(map(_axes_of, index))
        if given > self.ndim:
            raise IndexError(f"{given} indices for a matrix of shape {list(self.shape)}")
        for at in ellipses:
            index = (*index[:at], *(slice(None),) * (self.ndim - given), *index[at + 1 :])
        leading: list[Any] = []
        inner: list[Any] = []
        seen = 0
        for i in index:
            before_rows = seen < self.ndim - 2 or (i is None and not inner)
            (leading if before_rows else inner).append(i)
            seen += _axes_of(i)
        if any(i is None for i in inner):
            raise IndexError("a new axis must come before rows and columns")
        if sum(map(_axes_of, leading)) > self.ndim - 2 or any(_axes_of(i) > 1 for i in inner):
            raise IndexError("a mask is for leading axes, or for rows, or for columns")
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
        >>> from bridge.weights import at_least_float32
        >>> at_least_float32(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class NameTree:
    """The hook points by the parts of their names.

    Args:
        names: all names and aliases.
        weights: gives the canonical weights, which are in the tree as the hook points are.
    """

    def __init__(self, names: Names, weights: Callable[[], Weights]) -> None:
        self.names = names
        self.weights = weights
        self._children: dict[str, dict[str, str]] | None = None

    @property
    def children(self) -> dict[str, dict[str, str]]:
        """For each prefix, what may follow it, and the full name of that."""
        if self._children is None:
            self._children = {}
            grouped = [name.replace("._", ".") for name in self.weights().getters if "._" in name]
            for name in (*self.names.points, *self.names.aliases, *self.weights().getters, *grouped):
                prefix = ""
                for part in name.split("."):
                    full = f"{prefix}.{part}" if prefix else part
                    self._children.setdefault(prefix, {})[part] = full
                    prefix = full
        return self._children

    def refresh(self) -> None:
        """Forgets what may follow a prefix: names have come or gone."""
        self._children = None

    def get(
        self, prefix: str, name: str, others: Iterable[str] = ()
    ) -> HookPoint | Component | ComponentList | Tensor | FactoredMatrix:
        """What stands under `name` at `prefix`.

        Args:
            prefix: the full name of a part, "" for the whole model.
            name: of what is wanted.
            others: names in addition to those of the tree, to be suggested where one was mistyped.

        Raises:
            AttributeError: nothing does.
        """
        below = self.children.get(prefix, {})
        full = below.get(name)
        if full is None:
            if name in ("OV", "QK") and "W_O" in below:  # of one layer's heads, [n_heads, d_model, d_model]
                W_Q, W_K, W_V, W_O = (self._weight(f"{prefix}.W_{letter}") for letter in "QKVO")
                return FactoredMatrix(W_V, W_O) if name == "OV" else FactoredMatrix(W_Q, W_K.mT)
            raise AttributeError(f"{prefix or 'the bridge'} has no {name!r}.{suggestion(name, (*below, *others))}")
        if full not in self.children:
            return self._leaf(full)
        if all(part.isdigit() for part in self.children[full]):
            return ComponentList(self, full)
        return Component(self, full)

    def _weight(self, name: str) -> Tensor:
        found = self._leaf(name)
        assert isinstance(found, Tensor), name
        return found

    def _leaf(self, name: str) -> HookPoint | Tensor:
        weights = self.weights()
        if name in weights.getters:
            return weights[name]
        grouped = name[: name.rfind(".") + 1] + "_" + name[name.rfind(".") + 1 :]
        if grouped in weights.getters:
            # As HookedTransformer shows grouped keys and values: repeated for each query head.
            each, heads = weights[grouped], weights[name[: name.rfind(".")] + ".W_O"]
            return each.repeat_interleave(len(heads) // len(each), dim=0)
        return self.names.find(name)


class Component:
    """A part of the model, such as a block or its attention, with its hook points and weights."""

    def __init__(self, tree: NameTree, name: str) -> None:
        self.__dict__["_tree"] = tree
        self.__dict__["name"] = name

    @property
    def output(self) -> Tensor:
        """What it returns, in a trace: the same as at its ``hook_out``, where it has one."""
        found: Tensor = self._seen("output")
        return found

    @property
    def input(self) -> Tensor:
        """What it is given first, in a trace: the same as at its ``hook_in``, where it has one."""
        found: Tensor = self._seen("input")
        return found

    @property
    def outputs(self) -> Any:
        """All that its module returns, in a trace."""
        return self._seen("outputs")

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All that its module is called with, in a trace: positional arguments, and those with names."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = self._seen("inputs")
        return found

    def _seen(self, what: str) -> Any:
        return trace_of(self._tree.names, f"{self.name}.{what}").seen_of_part(self.name, what)

    def __setattr__(self, attribute: str, value: Any) -> None:
        if attribute in ("output", "input", "inputs"):
            return trace_of(self._tree.names, f"{self.name}.{attribute}").set_for_part(self.name, attribute, value)
        raise AttributeError(
            f"{self.name}.{attribute} cannot be assigned, since a part is made anew each time it is asked for; "
            "edit a weight in place (W[:] = ...), or replace the module in original_model"
        )

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self._tree.get(self.name, attribute)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._tree.children[self.name]]

    def __repr__(self) -> str:
        points = {name: hook for name, hook in self._tree.names.points.items() if name.startswith(f"{self.name}.")}
        shown = {n.removeprefix(f"{self.name}."): h for n, h in points.items() if h.point.group != "extra"}
        weights = self._tree.weights()
        width = max(map(len, shown), default=0)
        lines = [f"{name:{width}}  {shape_text(weights.cfg, hook.point.axes)}" for name, hook in shown.items()]
        if len(points) > len(shown):
            lines.append(f"and {len(points) - len(shown)} more hook points, when named")
        held = [n.removeprefix(f"{self.name}.") for n in weights.getters if n.startswith(f"{self.name}.")]
        if held:
            lines.append(f"weights: {', '.join(held)}")
        return "\n  ".join([self.name, *lines])


class ComponentList:
    """The blocks of a model, by their numbers: one that has no hook points is not among them."""

    def __init__(self, tree: NameTree, name: str) -> None:
        self._tree = tree
        self.name = name

    def __len__(self) -> int:
        return len(self._tree.children[self.name])

    def __getitem__(self, index: int) -> Component:
        numbers = self._numbers()
        if type(index) is not int:
            raise TypeError(
                f"{self.name}[{index!r}]: an index must be a whole number; for several, such as a slice, use "
                f"[bridge.{self.name}[i] for i in range(...)]"
            )
        number = index if index >= 0 else numbers[-1] + 1 + index
        if number not in numbers:
            some = f": {', '.join(map(str, numbers))}" if len(numbers) <= numbers[-1] else ""
            raise IndexError(f"{self.name} has {len(numbers)} members{some}; {index} is out of range")
        return Component(self._tree, f"{self.name}.{number}")

    def __iter__(self) -> Iterator[Component]:
        return (self[i] for i in self._numbers())

    def _numbers(self) -> list[int]:
        return sorted(map(int, self._tree.children[self.name]))

    def __repr__(self) -> str:
        return f"ComponentList({self.name}: {len(self)} members)"


# ----------------------------------------------------------------------------------------------------------------------
# A model's weights over all layers, and those that may have one of several names.
# ----------------------------------------------------------------------------------------------------------------------


def stacked_weight(tree: NameTree, cfg: ModelConfig, part: str, name: str) -> Float[Tensor, "layer ..."]:
    """One weight of all blocks.

    Args:
        tree: of the model.
        cfg: the facts about it.
        part: of a block, such as ``attn``.
        name: of the weight, such as ``W_Q``.

    Returns:
        ``[layer, ...]``, a new tensor.

    Raises:
        AttributeError: the blocks do not have it, or several of it each.
    """
    stack = "blocks" if any(key.startswith("blocks.0.") for key in tree.weights().getters) else "encoder"
    without = [i for i in range(cfg.n_layers) if part not in tree.children.get(f"{stack}.{i}", {})]
    if without and len(without) < cfg.n_layers:
        raise AttributeError(
            f"layers {', '.join(map(str, without))} of {cfg.model_name} have no {part}, and so no {name}: go through "
            f'those that have, [block.{part}.{name} for _, block in bridge.blocks_with("{part}")]'
        )
    found = [tree.get(f"{stack}.{i}.{part}", name) for i in range(cfg.n_layers)]
    tensors = [weight for weight in found if isinstance(weight, Tensor)]
    if len(tensors) < len(found):
        raise AttributeError(f"{cfg.model_name} has several {name} in each block: see tl_named_parameters()")
    shapes = sorted({tuple(weight.shape) for weight in tensors})
    if len(shapes) > 1:
        raise AttributeError(
            f"{name} of {cfg.model_name} has other shapes in other layers, {', '.join(map(str, shapes))}: take them "
            f"one by one, bridge.blocks[0].{part}.{name}"
        )
    return torch.stack(tensors)


def stacked_where(
    tree: NameTree, cfg: ModelConfig, part: str, path: str, reshape: Callable[[Tensor], Tensor] | None
) -> tuple[list[int], Float[Tensor, "layer ..."]]:
    """One weight of those blocks that have a part, and which blocks they are.

    Args:
        tree, cfg: as for `stacked_weight`.
        part: of a block, such as ``mlp``.
        path: of the weight from the block, such as ``mlp.W_in``.
        reshape: is done to each weight; None: nothing.

    Raises:
        ValueError: no block has it.
    """
    getters, found = tree.weights().getters, dict[int, Tensor]()
    at, _, name = path.rpartition(".")
    for i in range(cfg.n_layers):
        if any(key.startswith(f"blocks.{i}.{part}.") for key in getters):
            weight = tree.get(f"blocks.{i}.{at}" if at else f"blocks.{i}", name)
            if not isinstance(weight, Tensor):
                raise ValueError(f"blocks.{i}.{path} is no weight")
            found[i] = weight if reshape is None else reshape(weight)
    if not found:
        raise ValueError(f"no block of {cfg.model_name} has {part!r}")
    return list(found), torch.stack(list(found.values()))


def first_weight(weights: Weights, *names: str) -> Float[Tensor, "..."]:
    """The first weight that a model has of some names.

    Args:
        weights: the model's.
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


# ----------------------------------------------------------------------------------------------------------------------
# What the layers of a model are made of.
# ----------------------------------------------------------------------------------------------------------------------


_KNOWN = ("attn", "cross_attn", "mixer", "mlp")


def parts_of_layers(tree: NameTree, architecture: Architecture, cfg: ModelConfig) -> dict[str, list[str]]:
    """The names of each layer's parts, in the order of the computation, by the layer's name.

    Args:
        tree: of the model.
        architecture: what is declared.
        cfg: the facts about the model.

    Example:
        >>> from bridge import TransformerBridge
        >>> TransformerBridge.boot_embedded().layer_types[0]
        'attn+mlp'
    """
    return {
        f"{stack.name}.{index}": [named.name for named in stack.block_at(index).named]
        for stack in architecture.stacks
        for index in range(len(tree.children.get(stack.name, {})) if stack.one_of_two else cfg.n_layers)
    }


def layers_with(part: str, layers: dict[str, list[str]], tree: NameTree) -> list[tuple[int, Component]]:
    """The layers that have a part; see `TransformerBridge.blocks_with`.

    Args:
        part: its name.
        layers: from `parts_of_layers`.
        tree: of the model.

    Raises:
        ValueError: no part is called so, in any model.
    """
    known = sorted({*_KNOWN, *(name for names in layers.values() for name in names)})
    if part not in known:
        mixes = part in ("mamba", "ssm", "linear_attn")
        hint = " State spaces and linear attention are mixers." if mixes else suggestion(part, known)
        raise ValueError(f"no part of a block is called {part!r}: there are {', '.join(known)}.{hint}")
    return [(int(name.split(".")[-1]), Component(tree, name)) for name, names in layers.items() if part in names]
