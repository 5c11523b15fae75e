"""How a residual stream begins and how logits are read from its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from adapters.norms import Norm
from adapters.views import Affine, Chain

#: What a table of embeddings is of.
TableOf = Literal["positions", "row positions", "types", "patches", "more"]
#: In the order in which families say them.
KINDS: tuple[TableOf, ...] = get_args(TableOf)
Tables = tuple[tuple[TableOf, str], ...]
#: The first and the last (exclusive) of some positions, such as ``(0, 1)``, the class token.
Positions = tuple[int, int | None]


def tables(
    positions: str | None = None, types: str | None = None, more: tuple[str, ...] = (), patches: str | None = None
) -> Tables:
    """The tables that are added to the token embedding; None: there is none."""
    named: tuple[tuple[TableOf, str | None], ...] = (("positions", positions), ("types", types), ("patches", patches))
    return (*((what, path) for what, path in named if path is not None), *(("more", path) for path in more))


@dataclass(frozen=True)
class Embedding:
    """How the stream of a list of blocks begins: tables of embeddings are added up, normed and projected.

    Paths are relative to the base model.

    Attributes:
        tokens: the table of tokens; "" where the stream begins with images or sound (ViT, Whisper's encoder).
        transform: what its rows go through, a constant first; `hook_embed` shows them before parameters of the base
            model.
        added: the tables that are added, each with what it is of: ``positions``, the same in each row; ``row
            positions``, of a table that is given the tokens, before the table of tokens is (FSMT); ``types`` (the two
            sentences); ``more`` (TAPAS), of which each runs once; or ``patches``, the layer that makes vectors of an
            image's patches, which stand at the last positions of the stream. See `tables`.
        norm: a norm; of the sum where there is a `module`, else of the token embedding alone.
        project: a linear layer that brings the embeddings to the stream's width. Where it is the `module`, it reads
            their sum, or the norm of it (RemBERT, ALBERT). Else it reads the token embedding, alone or among others,
            and its output is a term of the sum (RoCBert).
        module: the module that puts out the first stream (BERT). The hook points then have the names of
            HookedTransformer's encoder, and `hook_full_embed` is its output.
        unknown: what else the stream begins with, where that cannot be said. Nothing can then be decomposed.
    """

    tokens: str = ""
    transform: Chain = ()
    added: Tables = ()
    norm: Norm | None = None
    project: str | None = None
    module: str | None = None
    unknown: str = ""

    @property
    def positions(self) -> str | None:
        """The table of positions."""
        return next((path for what, path in self.added if what in ("positions", "row positions")), None)

    @property
    def types(self) -> str | None:
        """The table of the two sentences."""
        return next((path for what, path in self.added if what == "types"), None)

    @property
    def patches(self) -> str | None:
        """The layer that makes vectors of patches."""
        return next((path for what, path in self.added if what == "patches"), None)

    @property
    def more(self) -> tuple[str, ...]:
        """The further tables."""
        return tuple(path for what, path in self.added if what == "more")

    @property
    def factor(self) -> float:
        """What the rows of the table of tokens are multiplied with first."""
        return self.transform[0].factor if self.transform[: len(self.transform) - len(self.behind_embed)] else 1.0

    @property
    def behind_embed(self) -> Chain:
        """What they go through besides, in parameters of the base model."""
        starts = bool(self.transform) and not self.transform[0].parameters
        return self.transform[1:] if starts else self.transform

    def adds_places(self, base: nn.Module) -> bool:
        """Whether something of its own is added for each place: by a table, or a parameter or buffer that is one.

        Args:
            base: the base model.
        """
        added = [getattr(base.get_submodule(at), name) for link in self.transform if link.plus
                 for at, _, name in [link.plus.rpartition(".")]]  # fmt: skip
        return self.positions is not None or any(held.ndim > 1 for held in added)

    @property
    def norm_of_sum(self) -> Norm | None:
        """The norm that reads the sum of the embeddings."""
        return self.norm if self.module is not None else None

    @property
    def projects_sum(self) -> bool:
        """Whether the linear layer reads the sum of the embeddings, or the norm of it."""
        return self.project is not None and self.project == self.module

    def moved(self, to: Callable[[str], str]) -> Embedding:
        """The same with other paths.

        Args:
            to: makes each of what it is.
        """
        return replace(
            self,
            tokens=self.tokens and to(self.tokens),
            added=tuple((what, to(path)) for what, path in self.added),
            norm=self.norm and replace(self.norm, path=to(self.norm.path)),
            project=self.project and to(self.project),
            module=None if self.module is None else to(self.module),
        )


def mean_at(positions: Positions | None, x: Tensor) -> Tensor:
    """The mean over some positions of ``[batch, pos, d_model]``, ``[batch, d_model]``; None: what is at all of them."""
    return x if positions is None else x[:, slice(*positions)].mean(1)


@dataclass(frozen=True)
class Readout:
    """How logits are made of what the final norm puts out (or the last stream, without one).

    ``logits = cap(output_transform(unembed(factor_in * x)))`` with ``cap(y) = soft_cap * tanh(y / soft_cap)``. `W_U`
    and `b_U` have both factors and the bias in them, so that ``logits = cap(x @ W_U + b_U)``, where no `Head` stands
    between.

    Attributes:
        path: the output layer, relative to the model itself; "" without one.
        factor_in: what is multiplied with before it.
        output_transform: what happens behind it: a factor, and a parameter or buffer of the model that is added, a
            bias, by its path; a class may lack that.
        soft_cap: see above.
        pooled: where one vector of each image is read: the positions whose mean that is. None: each position has
            logits, or the final norm itself reads such a mean (`Stack.collapse`).
        unknown: what else is between, where that cannot be said. Nothing can then be attributed to logits.
    """

    path: str = ""
    factor_in: float = 1.0
    output_transform: Affine = field(default_factory=Affine)
    soft_cap: float | None = None
    pooled: Positions | None = None
    unknown: str = ""

    def __post_init__(self) -> None:
        if self.output_transform.weight:
            raise ValueError(f"behind the output layer, {self.output_transform} multiplies with a parameter: not known")

    @property
    def factor_out(self) -> float:
        """What is multiplied with behind the output layer."""
        return self.output_transform.factor

    @property
    def bias(self) -> str | None:
        """What is added behind it."""
        return self.output_transform.plus

    @property
    def factor(self) -> float:
        """What the matrix of the output layer is multiplied with."""
        return self.factor_in * self.factor_out

    def bias_of(self, model: nn.Module) -> Tensor | None:
        """What is added behind the output layer, ``[d_vocab]``; None where this class of models adds nothing.

        Args:
            model: the Hugging Face model.
        """
        if self.bias is None:
            return None
        holder, _, name = self.bias.rpartition(".")
        found = getattr(model.get_submodule(holder), name, None)
        return found.reshape(-1) if isinstance(found, Tensor) else None

    def logits(self, unembedded: Tensor, model: nn.Module) -> Tensor:
        """The logits from what the output layer puts out.

        Args:
            unembedded: ``[..., d_vocab]``.
            model: the Hugging Face model, which has the bias.
        """
        y, bias = unembedded * self.factor_out, self.bias_of(model)
        y = y if bias is None else y + bias.to(y)
        return y if self.soft_cap is None else self.soft_cap * torch.tanh(y / self.soft_cap)


@dataclass(frozen=True)
class Head:
    """What comes after the last block besides the unembedding, or between the two. A model may lack it.

    Paths are relative to the base model, or, if they begin with a dot, to the model itself.

    Attributes:
        name: the canonical name.
        path: the module.
        linear: its linear layer.
        hook: the name of the hook point on its output, one row for each text; None: the unembedding reads
            what it makes.
        norm: its norm.
    """

    name: str
    path: str
    linear: str
    hook: str | None = None
    norm: Norm | None = None

    @property
    def unembeds(self) -> bool:
        """The unembedding reads what it makes."""
        return self.hook is None
