"""The declaration of a model: an `Architecture`, from which everything else is made.

**In**: paths of modules, and nouns for their roles: an `Embedding`, a `Stack` of `Block`s, each an
ordered list of residual `Step`s (`adapters.block`), a final norm, `Head`s and a `Readout`. A
family's file (`adapters.families`) creates them from a configuration; inference
(`adapters.automatic`) creates them from a recorded run.

**Out**: an immutable value. Hook points (`adapters.building`), weights (`adapters.weights`) and
facts (`adapters.config`) are made from it, and `verify` (`adapters.proofs`) proves it.
Decompositions, lenses and weight processing read it and make no other assumptions about the model.

**The declared computation**, from tokens to logits:

1. The stream begins as ``project(norm(transform(tokens) + added tables))`` (`Embedding`).
2. Each block of a stack takes the stream through its steps. A step reads the stream (through a
   norm), computes its part (an `Attention`, `MLP`, `MoE` or `Mixer`), and adds the result (through
   a norm and a factor). Steps that read the same stream are parallel. A block may differ from its
   neighbours (`Stack.layers`).
3. After the last block a final norm reads the stream; several streams, or positions, are first
   collapsed to one (`Stack.collapse`).
4. Heads may follow (`Head`), and the `Readout` makes the logits:
   ``cap(output_transform(unembed(factor_in * x)))``.

Each noun implements its own computation: `NormKind.of`, `MLP.neurons`, `MoE.shares`, `Affine.of`,
`Gate.of`, `Readout.logits` and the steps of `adapters.attention`. Proofs compare recorded
activations with it, and inference uses it for trials: a norm or a softmax is implemented nowhere
else.

**Errors**: a contradictory declaration raises an error (a norm that is a function and has no
epsilon; a layer norm with a gate). Whether a declaration is true of a model is not checked here:
`verify` does that.

**Independent of** hooks, runs, processes and families. A path is a string until it is looked up in
a model.
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

# --------------------------------------------------------------------------------------------------
# How a residual stream begins and how logits are read from its end.
# --------------------------------------------------------------------------------------------------


#: The prefix of the reason why something is unavailable because a claim does not hold.
NOT_PROVED = "not proved"


#: The kind of an embedding table.
TableOf = Literal["positions", "row positions", "types", "patches", "more"]
#: The kinds in the order in which families list them.
KINDS: tuple[TableOf, ...] = get_args(TableOf)
Tables = tuple[tuple[TableOf, str], ...]
#: The first and the last (exclusive) of some positions, such as ``(0, 1)``, the class token.
Positions = tuple[int, int | None]
#: The terms of a sum: paths of calls, each with its factor.
Terms = tuple[tuple[str, float], ...]


def tables(
    positions: str | None = None,
    types: str | None = None,
    more: tuple[str, ...] = (),
    patches: str | None = None,
) -> Tables:
    """Return the tables added to the token embedding; None: there is no such table."""
    added: list[tuple[TableOf, str]] = []
    if positions is not None:
        added.append(("positions", positions))
    if types is not None:
        added.append(("types", types))
    if patches is not None:
        added.append(("patches", patches))
    added += [("more", path) for path in more]
    return tuple(added)


__all__ = (
    "Architecture",
    "Block",
    "Embedding",
    "Head",
    "Mix",
    "NamedStep",
    "Part",
    "Readout",
    "Stack",
    "Step",
    "feeds_forward",
    "language_part",
    "vocabulary",
)


@dataclass(frozen=True)
class Embedding:
    """The start of a block list's residual stream: embedding tables are summed, normalised and
    projected.

    Paths are relative to the base model.

    Attributes:
        tokens: the table of tokens; "" where the stream begins with images or sound (ViT, Whisper's
            encoder).
        transform: the transforms of its rows, a constant first. `hook_embed` shows the rows before
            parameters of the base model are applied.
        added: the tables that are added, each with its kind: ``positions``, the same in each row;
            ``row positions``, a table that takes the tokens and runs before the table of tokens
            (FSMT); ``types`` (the two sentences); ``more`` (TAPAS), tables that run once each; or
            ``patches``, the layer that embeds an image's patches, which take the last positions of
            the stream. See `tables`.
        norm: a norm: of the sum if there is a `module`, otherwise of the token embedding alone.
        project: a linear layer that projects the embeddings to the stream's width. If it is the
            `module`, it reads their sum, or the norm of that sum (RemBERT, ALBERT). Otherwise it
            reads the token embedding, alone or with other inputs, and its output is a term of the
            sum (RoCBert).
        module: the module that outputs the first stream (BERT). The hook points then have the names
            of HookedTransformer's encoder, and `hook_full_embed` is its output.
        given: the inputs that the model takes in place of tokens: ``rows`` of the table, treated
            like the rows of tokens; rows already ``multiplied`` by the factor (Falcon-H1); or
            ``other``: embeddings are treated differently from tokens (Inkling, which norms only
            tokens).
    """

    tokens: str = ""
    transform: Chain = ()
    added: Tables = ()
    norm: Norm | None = None
    project: str | None = None
    module: str | None = None
    given: Literal["rows", "multiplied", "other"] = "rows"

    def in_place_of_tokens(self, rows: Tensor) -> Tensor:
        """Return the inputs that make the model compute as if its tokens had these embeddings.

        Args:
            rows: of `W_E`, which includes the factor.

        Raises:
            ValueError: the model treats embeddings differently from tokens.
        """
        if self.given == "other":
            raise ValueError(
                "the model does not do with embeddings what it does with tokens: edit hook_embed in"
                " a run of tokens, or give the model's own argument by its name, inputs_embeds="
            )
        if self.factor == 1 or self.given == "multiplied":
            return rows
        return rows / self.factor

    @property
    def positions(self) -> str | None:
        """Return the table of positions."""
        return self._table("positions", "row positions")

    @property
    def types(self) -> str | None:
        """Return the table of the two sentences."""
        return self._table("types")

    @property
    def patches(self) -> str | None:
        """Return the layer that embeds patches."""
        return self._table("patches")

    def _table(self, *of: TableOf) -> str | None:
        for kind, path in self.added:
            if kind in of:
                return path
        return None

    @property
    def more(self) -> tuple[str, ...]:
        """Return the further tables."""
        return tuple(path for kind, path in self.added if kind == "more")

    @property
    def factor(self) -> float:
        """Return the factor of the token table's rows."""
        return self.transform[0].factor if self._begins_with_constant else 1.0

    @property
    def behind_embed(self) -> Chain:
        """Return the further transforms of the rows, by parameters of the base model."""
        return self.transform[1:] if self._begins_with_constant else self.transform

    @property
    def _begins_with_constant(self) -> bool:
        return bool(self.transform) and not self.transform[0].parameters

    def adds_places(self, base: nn.Module) -> bool:
        """Tell whether a term is added for each position, from a table or from a parameter or
        buffer that serves as one.

        Args:
            base: the base model.
        """
        terms = []
        for link in self.transform:
            if link.plus:
                module, _, name = link.plus.rpartition(".")
                terms.append(getattr(base.get_submodule(module), name))
        return self.positions is not None or any(term.ndim > 1 for term in terms)

    @property
    def norm_of_sum(self) -> Norm | None:
        """Return the norm that reads the sum of the embeddings."""
        return self.norm if self.module is not None else None

    @property
    def projects_sum(self) -> bool:
        """Tell whether the linear layer reads the sum of the embeddings, or the norm of it."""
        return self.project is not None and self.project == self.module

    def moved(self, to: Callable[[str], str]) -> Embedding:
        """Return a copy with other paths.

        Args:
            to: maps each path to the new one.
        """
        return replace(
            self,
            tokens=self.tokens and to(self.tokens),
            added=tuple((kind, to(path)) for kind, path in self.added),
            norm=self.norm and replace(self.norm, path=to(self.norm.path)),
            project=self.project and to(self.project),
            module=None if self.module is None else to(self.module),
        )


def mean_at(positions: Positions | None, x: Tensor) -> Tensor:
    """Compute the mean over some positions of ``[batch, pos, d_model]``, ``[batch, d_model]``;
    None: return all of them.
    """
    if positions is None:
        return x
    return x[:, slice(*positions)].mean(1)


@dataclass(frozen=True)
class Readout:
    """The computation of logits from the output of the final norm (or the last stream, without
    one).

    ``logits = cap(output_transform(unembed(factor_in * x)))`` with ``cap(y) = soft_cap * tanh(y /
    soft_cap)``. `W_U` and `b_U` include both factors and the bias, so that ``logits = cap(x @ W_U +
    b_U)``, unless a `Head` comes between.

    Attributes:
        path: the output layer, relative to the model itself; "" without one.
        factor_in: the factor of its input.
        output_transform: the transforms of its output: a factor, and a bias, given as the path of a
            parameter or buffer of the model; a class may lack it.
        soft_cap: see above.
        pooled: if the logits are computed from one vector per image: the positions whose mean it
            is. None: each position has logits, or the final norm itself reads such a mean
            (`Stack.collapse`).
    """

    path: str = ""
    factor_in: float = 1.0
    output_transform: Affine = field(default_factory=Affine)
    soft_cap: float | None = None
    pooled: Positions | None = None

    def __post_init__(self) -> None:
        if self.output_transform.weight:
            raise ValueError(
                f"behind the output layer, {self.output_transform} multiplies with a parameter: not"
                " known"
            )

    @property
    def factor_out(self) -> float:
        """Return the factor after the output layer."""
        return self.output_transform.factor

    @property
    def bias(self) -> str | None:
        """Return the path of the bias added after the output layer."""
        return self.output_transform.plus

    @property
    def factor(self) -> float:
        """Return the factor of the output layer's matrix."""
        return self.factor_in * self.factor_out

    def bias_of(self, model: nn.Module) -> Tensor | None:
        """Return the bias added after the output layer, ``[d_vocab]``; None if this class of models
        adds none.

        Args:
            model: the Hugging Face model.
        """
        if self.bias is None:
            return None
        module, _, name = self.bias.rpartition(".")
        bias = getattr(model.get_submodule(module), name, None)
        return bias.reshape(-1) if isinstance(bias, Tensor) else None

    def logits(self, unembedded: Tensor, model: nn.Module) -> Tensor:
        """Compute the logits from the output of the output layer.

        Args:
            unembedded: ``[..., d_vocab]``.
            model: the Hugging Face model, which holds the bias.
        """
        logits = unembedded * self.factor_out
        bias = self.bias_of(model)
        if bias is not None:
            logits = logits + bias.to(logits)
        return logits if self.soft_cap is None else capped(logits, self.soft_cap)


@dataclass(frozen=True)
class Head:
    """A module between the last block and the unembedding, or in place of the unembedding. A model
    may lack it.

    Paths are relative to the base model, or, if they begin with a dot, to the model itself.

    Attributes:
        name: the canonical name.
        path: the module.
        linear: its linear layer.
        hook: the name of the hook point on its output, one row for each text; None: the unembedding
            reads its output.
        norm: its norm.
    """

    name: str
    path: str
    linear: str
    hook: str | None = None
    norm: Norm | None = None

    @property
    def unembeds(self) -> bool:
        """Tell whether the unembedding reads its output."""
        return self.hook is None


@dataclass(frozen=True)
class Stack:
    """A list of blocks that the residual stream runs through.

    Paths are relative to the base model.

    Attributes:
        path: the path of the list of blocks.
        members: the path of each block, relative to `path`, if these are not ``0``, ``1``...:
            ``0@2`` is the third call of the first module (ALBERT, whose blocks are one module).
        block: the usual block.
        layers: the blocks, by index, that differ from it.
        final_norm: the norm after the last block.
        embedding: the embedding that computes the first block's input.
        name: the canonical name: ``blocks``, or ``encoder`` and ``decoder``.
        output: the index of the residual stream in a block's output tuple, and the length of that
            tuple (for skipping a block); ``(None, 1)``: a block returns the stream itself.
        block_inputs: the inputs that are not simply the previous block's output, by block index
            (the final norm's, by the number of blocks). Each is a list of terms with their factors.
            A term is a call outside of the blocks (HRM, whose two lists of blocks alternate) or "",
            the previous block's output (RWKV, which halves it).
        stream_view: the view of the stream in a block's input: `SeveralStreams` if blocks carry
            several, as ``[batch, pos, n_streams, d_model]`` or concatenated, ``[batch, pos,
            (n_streams d_model)]``; `PositionsFirst` if blocks and embeddings have ``[pos, batch,
            ...]`` (XLNet). None: unchanged.
        collapse: the reduction between the last block and the final norm: a module that combines
            several streams, or the positions whose mean is taken (CLIP).
        changed_in_place: modules whose ``input`` or ``output`` the model later overwrites, so that
            hook points show a copy: modules in the blocks (``*.mlp``) and before them (``wte``).
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
        """Return the path of a block."""
        member = self.members[index] if index < len(self.members) else str(index)
        return join(self.path, member)

    def modules(self, base: nn.Module) -> list[nn.Module]:
        """Return the modules that are its blocks, in order.

        Args:
            base: the base model.
        """
        if self.members:
            return [module_at(base, self.place_of(index)) for index in range(len(self.members))]
        return members_of(base.get_submodule(self.path))

    def changed_below(self, path: str, *, in_blocks: bool) -> set[tuple[str, Border]]:
        """Return the sites whose tensors the model overwrites, in a block or before the blocks.

        Args:
            path: the path of the block, or of the base model.
            in_blocks: which of the two.
        """
        changed: set[tuple[str, Border]] = set()
        for module, kind in self.changed_in_place:
            is_in_blocks = module[:1] == "*"
            if is_in_blocks == in_blocks:
                changed.add((join(path, module[2:] if in_blocks else module), kind))
        return changed

    @property
    def shares_modules(self) -> bool:
        """Tell whether some of its blocks are one module, which runs several times."""
        return any("@" in member for member in self.members)

    def block_at(self, index: int) -> Block:
        """Return the declaration of a layer's block."""
        return self.layers.get(index, self.block)

    @property
    def every_block(self) -> tuple[Block, ...]:
        """Return the different declarations of its blocks."""
        return (self.block, *self.layers.values())

    @property
    def attn(self) -> Attention | None:
        """Return the first self-attention of any of its blocks."""
        for block in self.every_block:
            if block.attn:
                return block.attn
        return None

    @property
    def n_streams(self) -> int | None:
        """Return the number of streams of its blocks, where there are several."""
        return self.stream_view.n_streams if isinstance(self.stream_view, SeveralStreams) else None

    @property
    def positions_first(self) -> bool:
        """Tell whether its blocks have positions before the batch."""
        return isinstance(self.stream_view, PositionsFirst)

    @property
    def pos(self) -> str:
        """Return the axis of its positions."""
        return "decoder_pos" if self.name == "decoder" else "pos"

    @property
    def key_pos(self) -> str:
        """Return the axis of its positions as keys."""
        return self.pos.removesuffix("pos") + "key_pos"

    @property
    def pooled(self) -> Positions | None:
        """Return the positions whose mean the final norm reads; None: it reads each position."""
        return self.collapse if isinstance(self.collapse, tuple) else None

    @property
    def keeps_its_stream(self) -> bool:
        """Tell whether no factor and no norm is applied to the stream itself as it enters a
        block.
        """
        if self.block_inputs or self.n_streams is not None:
            return False
        return all(block.is_sum for block in self.every_block)

    @property
    def one_of_two(self) -> bool:
        """Tell whether it is the encoder or the decoder of a model that has both."""
        return self.name != "blocks"


@dataclass(frozen=True)
class Architecture:
    """A model family, as its adapter declares it for one configuration.

    Paths are relative to the base model (the one under ``base_model_prefix``), except those of
    `readout`, which are relative to the model.

    Attributes:
        stacks: the lists of blocks; of an encoder-decoder model, ``encoder`` and ``decoder``.
        readout: the computation of logits from the output of the last final norm.
        heads: see `Head`; in the order of the computation.
        no_layer_runs: why a run cannot start or stop at a layer; "" if it can.
        config_values: fields of `ModelConfig` that the configuration lacks.
        unknown: the unknown part of the ``embedding``, without which nothing can be decomposed, or
            of the ``readout``, without which nothing can be attributed to logits.
    """

    stacks: tuple[Stack, ...]
    readout: Readout = field(default_factory=Readout)
    heads: tuple[Head, ...] = ()
    no_layer_runs: str = ""
    config_values: Mapping[str, object] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def stack(self) -> Stack:
        """Return the first list of blocks: the only one, or the encoder's."""
        return self.stacks[0]

    @property
    def token_embeddings(self) -> str:
        """Return the first token table: the first stream's, or else the next one's; "" if there is
        none.
        """
        return "" if self.token_stack is None else self.token_stack.embedding.tokens

    @property
    def token_stack(self) -> Stack | None:
        """Return the first list of blocks whose stream begins with tokens."""
        for stack in self.stacks:
            if stack.embedding.tokens:
                return stack
        return None

    @property
    def embedding(self) -> Embedding:
        """Return the embedding of the first list of blocks."""
        return self.stack.embedding

    @property
    def pooled(self) -> Positions | None:
        """Return the positions whose mean the logits are computed from; None: each position has
        logits."""
        return self.stack.pooled or self.readout.pooled

    @property
    def norm_kind(self) -> NormKind | None:
        """Return the kind of the first norm of the blocks; None if they have none."""
        for block in self.stack.every_block:
            if block.norms:
                return block.norms[0].kind
        return None

    @property
    def norms_on_the_stream(self) -> bool:
        """Tell whether norms are applied to the residual stream itself."""
        return any(
            step.stream_norm
            for stack in self.stacks
            for block in stack.every_block
            for step in block.steps
        )

    def why_no_sum(self, *, of_normed: bool = False) -> str:
        """Return why a residual stream does not decompose into the outputs of embeddings and parts;
        "" if it does.

        Args:
            of_normed: ignore norms on the stream itself: every term is passed through them.
        """
        if self.norms_on_the_stream and not of_normed:
            return (
                "norms are applied to its residual stream itself, so it is not the sum of what was"
                " written to it"
            )
        if why := self.unknown.get("embedding"):
            return f"the start of its residual stream is unknown: {why}"
        if self.embedding.behind_embed or not all(stack.keeps_its_stream for stack in self.stacks):
            return (
                "its residual stream is multiplied or normalised on entering a block, so it is not"
                " the sum of what was written to it"
            )
        return ""

    def why_no_logit_sum(self) -> str:
        """Return why logits, before a soft cap, do not decompose over the terms of the last stream;
        "" if they do.
        """
        for head in self.heads:
            if head.unembeds:
                return (
                    f"{head.linear.removeprefix('.')} and an activation function come between its"
                    " residual stream and its logits, so the logits are not a sum over the stream's"
                    " terms"
                )
        if self.stack.pooled:
            return (
                "its final norm reads one vector of each text or image, not the positions of its"
                " residual stream"
            )
        if why := self.unknown.get("readout"):
            return f"the computation of logits from its residual stream is unknown: {why}"
        return ""

    def refuse_several_streams(self, name: str) -> None:
        """Raise an error for a model with several streams: decompositions and lenses need one
        residual stream.

        Args:
            name: of the model.

        Raises:
            ValueError: its blocks carry several.
        """
        if (n := self.stack.n_streams) is not None:
            raise ValueError(
                f"{name} has {n} residual streams, hook_resid_pre of shape [batch, pos, n_streams,"
                " d_model]: decompositions and lenses are for models with one; its hook points"
                " show them all"
            )

    def step_at(self, layer: int, name: str) -> Step:
        """Return a step of a layer of the first stack, by the name of its part.

        Raises:
            KeyError: the layer has no such part.
        """
        for named in self.stack.block_at(layer).named:
            if named.name == name:
                return named.step
        raise KeyError(name)

    def steps(self) -> Iterator[Step]:
        """Yield the steps of all blocks of the first stack, each kind of block once."""
        for block in self.stack.every_block:
            yield from block.steps


def vocabulary() -> list[type]:
    """Return the dataclasses of a declaration, collected from the types of their fields."""
    nouns: list[type] = []

    def walk(hint: object) -> None:
        if isinstance(hint, type) and is_dataclass(hint) and hint not in nouns:
            nouns.append(hint)
            for inner in get_type_hints(hint).values():
                walk(inner)
        for inner in get_args(hint):
            walk(inner)

    walk(Architecture)
    return nouns


def language_part(text: Architecture, path: str) -> Architecture:
    """Return a text model's declaration for an image-text model that holds the text model's base,
    with its own head.

    Args:
        text: the declaration of a model of one stack.
        path: the text model's path from the base model that holds it.
    """
    stack = text.stack
    final_norm = text.stack.final_norm
    if final_norm and not final_norm.kind.function:
        final_norm = replace(final_norm, path=join(path, final_norm.path))
    changed = tuple(
        (module if module[:1] == "*" else join(path, module), kind)
        for module, kind in stack.changed_in_place
    )
    inside = replace(
        stack,
        path=join(path, stack.path),
        embedding=stack.embedding.moved(partial(join, path)),
        final_norm=final_norm,
        changed_in_place=changed,
    )
    return replace(text, stacks=(inside,))
