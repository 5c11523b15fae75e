"""The declaration of a model: an `Architecture`, said in nouns, from which everything else is made.

**In**: paths of modules, and the nouns that say what they play: an `Embedding`, a `Stack` of `Block`s, each an ordered
list of residual `Step`s (`adapters.block`), a final norm, `Head`s and a `Readout`. A family's file
(`adapters.families`) writes them from a configuration; inference (`adapters.automatic`) writes them from a recorded
run.

**Out**: an immutable value. Hook points (`adapters.building`), weights (`adapters.weights`) and facts
(`adapters.config`) are made from it, `verify` (`adapters.proofs`) proves it, and whatever is computed about a model
(decompositions, lenses, processed weights) reads it and assumes nothing beside it.

**The recipe that it says**, from tokens to logits:

1. The stream begins as ``project(norm(transform(tokens) + added tables))`` (`Embedding`).
2. Each block of a stack takes the stream through its steps. A step reads the stream (through a norm), lets its part
   make something (an `Attention`, `MLP`, `MoE` or `Mixer`), and adds that (through a norm and a factor). Steps that
   read the same stream are parallel. A block may be other than its neighbours (`Stack.layers`).
3. Behind the last block a final norm reads the stream; of several streams, or positions, one is made
   (`Stack.collapse`).
4. Heads may stand between (`Head`), and the `Readout` makes the logits: ``cap(output_transform(unembed(factor_in *
   x)))``.

Each noun computes itself: `NormKind.of` what a norm makes of a tensor, `MLP.neurons`, `MoE.shares`, `Affine.of`,
`Gate.of`, `Readout.logits` and the steps of `adapters.attention` what their parts do. Proofs compare what was seen with
that, and inference tries it: there is no second place in which a norm or a softmax is worked out.

**It refuses** what contradicts itself (a norm that is a function and has no epsilon; a layer norm with a gate). Whether
it is true of a model is not asked here: `verify` does.

**It does not know** of hooks, runs, processes or any family. A path is a string until somebody looks it up in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Literal, get_args, get_type_hints

from torch import Tensor, nn

from adapters.attention import Attention, capped
from adapters.block import Block, Mix, NamedStep, Part, Step, feeds_forward
from adapters.norms import Norm, NormKind
from adapters.points import Border, join, members_of, module_at
from adapters.views import Affine, Chain, PositionsFirst, SeveralStreams, View

# ----------------------------------------------------------------------------------------------------------------------
# How a residual stream begins and how logits are read from its end.
# ----------------------------------------------------------------------------------------------------------------------


#: What begins the reason of whatever is not offered since a claim does not hold.
NOT_PROVED = "not proved"


#: What a table of embeddings is of.
TableOf = Literal["positions", "row positions", "types", "patches", "more"]
#: In the order in which families say them.
KINDS: tuple[TableOf, ...] = get_args(TableOf)
Tables = tuple[tuple[TableOf, str], ...]
#: The first and the last (exclusive) of some positions, such as ``(0, 1)``, the class token.
Positions = tuple[int, int | None]
#: What is added up: calls, by their paths, each with its factor.
Terms = tuple[tuple[str, float], ...]


def tables(
    positions: str | None = None, types: str | None = None, more: tuple[str, ...] = (), patches: str | None = None
) -> Tables:
    """The tables that are added to the token embedding; None: there is none."""
    named: tuple[tuple[TableOf, str | None], ...] = (("positions", positions), ("types", types), ("patches", patches))
    return (*((what, path) for what, path in named if path is not None), *(("more", path) for path in more))


__all__ = (
    "Architecture", "Block", "Embedding", "Head", "Mix", "NamedStep", "Part", "Readout", "Stack", "Step",
    "feeds_forward", "language_part", "vocabulary",
)  # fmt: skip


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
        given: what the model takes in place of tokens: ``rows`` of the table, which go through all that rows of tokens
            do; rows that are ``multiplied`` with the factor (Falcon-H1); or ``other``: what it does with them is not
            what it does with tokens (Inkling, whose norm is of tokens alone).
    """

    tokens: str = ""
    transform: Chain = ()
    added: Tables = ()
    norm: Norm | None = None
    project: str | None = None
    module: str | None = None
    given: Literal["rows", "multiplied", "other"] = "rows"

    def in_place_of_tokens(self, rows: Tensor) -> Tensor:
        """What a model is given in place of tokens, so that the run is that of tokens with these embeddings.

        Args:
            rows: of `W_E`, which has the factor in it.

        Raises:
            ValueError: it does something else with embeddings than with tokens.
        """
        if self.given == "other":
            raise ValueError(
                "the model does not do with embeddings what it does with tokens: edit hook_embed in a run of tokens, "
                "or give the model's own argument by its name, inputs_embeds="
            )
        return rows if self.factor == 1 or self.given == "multiplied" else rows / self.factor

    @property
    def positions(self) -> str | None:
        """The table of positions."""
        return self._table("positions", "row positions")

    @property
    def types(self) -> str | None:
        """The table of the two sentences."""
        return self._table("types")

    @property
    def patches(self) -> str | None:
        """The layer that makes vectors of patches."""
        return self._table("patches")

    def _table(self, *of: TableOf) -> str | None:
        return next((path for what, path in self.added if what in of), None)

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
    """

    path: str = ""
    factor_in: float = 1.0
    output_transform: Affine = field(default_factory=Affine)
    soft_cap: float | None = None
    pooled: Positions | None = None

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
        return y if self.soft_cap is None else capped(y, self.soft_cap)


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


@dataclass(frozen=True)
class Stack:
    """A list of blocks that the residual stream runs through.

    Paths are relative to the base model.

    Attributes:
        path: of the list of blocks.
        members: where each block stands in it, relative to `path`, where that is not ``0``, ``1``...: ``0@2`` is the
            third call of the first (ALBERT, whose blocks are one module).
        block: what a block looks like.
        layers: the blocks, by index, that look different, in any way.
        final_norm: the norm after the last block.
        embedding: how its stream begins.
        name: the canonical name: ``blocks``, or ``encoder`` and ``decoder``.
        output: which element of what a block returns is the residual stream, and how many there are (for skipping a
            block); ``(None, 1)``: it returns the stream itself.
        block_inputs: of blocks that are not given what left the one before, by their index, or of the final norm, by
            their number: what they are given is the sum of, each with its factor: calls outside of the blocks (HRM,
            whose two lists of blocks run in turn), or "", what left the block before (RWKV, which halves it).
        stream_view: how what blocks are given shows the stream: `SeveralStreams`, where they carry several, ``[batch,
            pos, n_streams, d_model]``, or side by side, ``[batch, pos, (n_streams d_model)]``; `PositionsFirst`, where
            they, and the embeddings before them, are given ``[pos, batch, ...]`` (XLNet). None: as it is.
        collapse: what makes one of several behind the last block, for the final norm to read: of several streams, a
            module; of several positions, the mean over these (CLIP).
        changed_in_place: modules whose ``input`` or ``output`` the model writes over afterwards, so that a copy is
            shown: of the blocks (``*.mlp``), and of what runs before them (``wte``).
    """

    path: str
    block: Block
    layers: Mapping[int, Block] = field(default_factory=dict)
    final_norm: Norm | None = None
    embedding: Embedding = field(default_factory=Embedding)
    name: str = "blocks"
    output: tuple[int | None, int] = (None, 1)
    members: tuple[str, ...] = ()
    block_inputs: Mapping[int, Terms] = field(default_factory=dict)
    stream_view: View | None = None
    collapse: str | Positions | None = None
    changed_in_place: tuple[tuple[str, Border], ...] = ()

    def place_of(self, index: int) -> str:
        """The path of a block."""
        return join(self.path, self.members[index] if index < len(self.members) else str(index))

    def modules(self, base: nn.Module) -> list[nn.Module]:
        """The modules that are its blocks, in order.

        Args:
            base: the base model.
        """
        if self.members:
            return [module_at(base, self.place_of(index)) for index in range(len(self.members))]
        return members_of(base.get_submodule(self.path))

    def changed_below(self, path: str, *, in_blocks: bool) -> set[tuple[str, Border]]:
        """What the model writes over of the modules in a block, or of those that run before the blocks.

        Args:
            path: of the block, or of the base model.
            in_blocks: which of the two.
        """
        found = (
            (at[2:] if in_blocks else at, kind) for at, kind in self.changed_in_place if (at[:1] == "*") == in_blocks
        )
        return {(join(path, at), kind) for at, kind in found}

    @property
    def shares_modules(self) -> bool:
        """Some of its blocks are one module, which runs several times."""
        return any("@" in member for member in self.members)

    def block_at(self, index: int) -> Block:
        """What the block of a layer looks like."""
        return self.layers.get(index, self.block)

    @property
    def every_block(self) -> tuple[Block, ...]:
        """All that blocks look like."""
        return (self.block, *self.layers.values())

    @property
    def attn(self) -> Attention | None:
        """The first self-attention that any of its blocks has."""
        return next((block.attn for block in self.every_block if block.attn), None)

    @property
    def n_streams(self) -> int | None:
        """How many streams its blocks carry, where they are several."""
        return self.stream_view.n_streams if isinstance(self.stream_view, SeveralStreams) else None

    @property
    def positions_first(self) -> bool:
        """Its blocks are given positions before the batch."""
        return isinstance(self.stream_view, PositionsFirst)

    @property
    def pos(self) -> str:
        """The axis of its positions."""
        return "decoder_pos" if self.name == "decoder" else "pos"

    @property
    def key_pos(self) -> str:
        """The axis of its positions as keys."""
        return self.pos.removesuffix("pos") + "key_pos"

    @property
    def pooled(self) -> Positions | None:
        """The positions whose mean the final norm reads; None: it reads each."""
        return self.collapse if isinstance(self.collapse, tuple) else None

    @property
    def keeps_its_stream(self) -> bool:
        """Nothing multiplies its stream, or norms it as it enters a block."""
        return not self.block_inputs and self.n_streams is None and all(block.is_sum for block in self.every_block)

    @property
    def one_of_two(self) -> bool:
        """It is the encoder or the decoder of a model that has both."""
        return self.name != "blocks"


@dataclass(frozen=True)
class Architecture:
    """A model family, as its adapter declares it for one configuration.

    Paths are relative to the base model (the one under ``base_model_prefix``), but those of `readout` to the model.

    Attributes:
        stacks: the lists of blocks; of an encoder-decoder model, ``encoder`` and ``decoder``.
        readout: how logits are made of what the last final norm puts out.
        heads: see `Head`; in the order of the computation.
        no_layer_runs: why a run cannot start or stop at a layer; "" where it can.
        config_values: fields of `ModelConfig` that the configuration does not say by itself.
        unknown: what cannot be said of the ``embedding``, what else the stream begins with: then nothing can be
            decomposed; of the ``readout``, what else is between: then nothing can be attributed to logits.
    """

    stacks: tuple[Stack, ...]
    readout: Readout = field(default_factory=Readout)
    heads: tuple[Head, ...] = ()
    no_layer_runs: str = ""
    config_values: Mapping[str, object] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def stack(self) -> Stack:
        """The first list of blocks: the only one, or the encoder's."""
        return self.stacks[0]

    @property
    def token_embeddings(self) -> str:
        """The first table of tokens that there is: of the first stack, or else of the next; "" without any."""
        return "" if self.token_stack is None else self.token_stack.embedding.tokens

    @property
    def token_stack(self) -> Stack | None:
        """The first list of blocks whose stream begins with tokens."""
        return next((stack for stack in self.stacks if stack.embedding.tokens), None)

    @property
    def embedding(self) -> Embedding:
        """How the stream of the first list of blocks begins."""
        return self.stack.embedding

    @property
    def pooled(self) -> Positions | None:
        """The positions whose mean is read for logits; None: each position has logits."""
        return self.stack.pooled or self.readout.pooled

    @property
    def norm_kind(self) -> NormKind | None:
        """What the first norm of the blocks computes, None where they have none."""
        return next((norm.kind for block in self.stack.every_block for norm in block.norms), None)

    @property
    def norms_on_the_stream(self) -> bool:
        """Norms stand on the residual stream itself."""
        return any(step.stream_norm for stack in self.stacks for block in stack.every_block for step in block.steps)

    def why_no_sum(self, *, of_normed: bool = False) -> str:
        """Why a residual stream is no sum of what the embeddings and the parts wrote; "" where it is.

        Args:
            of_normed: norms that stand on the stream itself are no reason: every term is taken through them.
        """
        if self.norms_on_the_stream and not of_normed:
            return "norms stand on its residual stream itself, which is then no sum of what was written to it"
        if why := self.unknown.get("embedding"):
            return f"how its residual stream begins is not known: {why}"
        if self.embedding.behind_embed or not all(stack.keeps_its_stream for stack in self.stacks):
            return (
                "its residual stream is multiplied, or normed as it enters a block, and so no sum of what was written "
                "to it"
            )
        return ""

    def why_no_logit_sum(self) -> str:
        """Why logits, before a soft cap, are no sum over the terms of the last stream; "" where they are."""
        for head in self.heads:
            if head.unembeds:
                return (
                    f"{head.linear.removeprefix('.')} and an activation function stand between its residual stream and "
                    "its logits: these are no sum over the stream's terms"
                )
        if self.stack.pooled:
            return "its final norm reads one vector of each text or image, not the positions of its residual stream"
        if why := self.unknown.get("readout"):
            return f"how its logits are made of its residual stream is not known: {why}"
        return ""

    def refuse_several_streams(self, name: str) -> None:
        """Decompositions and lenses are for models with one residual stream.

        Args:
            name: of the model.

        Raises:
            ValueError: its blocks carry several.
        """
        if (n := self.stack.n_streams) is not None:
            raise ValueError(
                f"{name} has {n} residual streams, hook_resid_pre of shape [batch, pos, n_streams, d_model]: "
                "decompositions and lenses are for models with one; its hook points show them all"
            )

    def step_at(self, layer: int, name: str) -> Step:
        """A step of a layer of the first stack, by the name of its part.

        Raises:
            KeyError: the layer has no such part.
        """
        for named in self.stack.block_at(layer).named:
            if named.name == name:
                return named.step
        raise KeyError(name)

    def steps(self) -> Iterator[Step]:
        """The steps of all blocks of the first stack, each kind of block once."""
        for block in self.stack.every_block:
            yield from block.steps


def vocabulary() -> list[type]:
    """The dataclasses that a declaration is made of, found by the types of their fields."""
    found: list[type] = []

    def walk(hint: object) -> None:
        if isinstance(hint, type) and is_dataclass(hint) and hint not in found:
            found.append(hint)
            for inner in get_type_hints(hint).values():
                walk(inner)
        for inner in get_args(hint):
            walk(inner)

    walk(Architecture)
    return found


def language_part(text: Architecture, path: str) -> Architecture:
    """A text model's declaration for a model of images and text that holds the text model's base, with its own head.

    Args:
        text: the declaration of a model of one stack.
        path: of the text model, from the base model that holds it.
    """
    stack, final = text.stack, text.stack.final_norm
    inside = replace(
        stack,
        path=join(path, stack.path),
        embedding=stack.embedding.moved(partial(join, path)),
        final_norm=final and (final if final.kind.function else replace(final, path=join(path, final.path))),
        changed_in_place=tuple((at if at[:1] == "*" else join(path, at), kind) for at, kind in stack.changed_in_place),
    )
    return replace(text, stacks=(inside,))
