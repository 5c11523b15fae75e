"""What a model family is declared as: stacks of blocks, each block an ordered list of residual steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from adapters.attention import Attention
from adapters.block import Block, Mix, NamedStep, Opaque, Part, Step, feeds_forward
from adapters.norms import Norm, NormKind
from adapters.paths import join, members_of, module_at
from adapters.views import Affine

__all__ = (
    "Architecture", "Block", "Head", "Mix", "NamedStep", "Opaque", "Part", "Stack", "Step", "feeds_forward",
    "language_part",
)  # fmt: skip


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
        embed: the embedding of its own tokens, where the model has several stacks.
        embed_factor, pos_embed, token_types: what that is multiplied with, and what is added to it, as in
            `Architecture`.
        embed_norm: a norm of the token embedding, or of the sum.
        name: the canonical name: ``blocks``, or ``encoder`` and ``decoder``.
        pos: the axis of its positions.
        output_key: which element of a block's output is the residual stream (None: the output itself).
        output_length: how many elements a tuple output has (for skipping a block).
        rescaled: what the model multiplies the stream with before a block, by the block's index, or before the final
            norm, by their number (RWKV).
        n_streams: how many streams its blocks carry, where they are several: ``[batch, pos, n_streams, d_model]``.
        side_by_side: the model keeps them side by side, ``[batch, pos, (n_streams d_model)]``.
        collapse: the module that makes one of them behind the last block.
        joined: of blocks that are not given what left the one before, by their index: the calls outside of the blocks
            that what they are given is the sum of, each with its factor (HRM, whose two lists of blocks run in turn).
        positions_first: its blocks, and the embeddings before them, are given ``[pos, batch, ...]`` (XLNet).
    """

    path: str
    block: Block
    layers: Mapping[int, Block] = field(default_factory=dict)
    final_norm: Norm | None = None
    embed: str | None = None
    name: str = "blocks"
    pos: str = "pos"
    output_key: int | None = None
    output_length: int = 1
    embed_factor: float = 1.0
    pos_embed: str | None = None
    embed_norm: Norm | None = None
    token_types: str | None = None
    members: tuple[str, ...] = ()
    rescaled: Mapping[int, float] = field(default_factory=dict)
    positions_first: bool = False
    joined: Mapping[int, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    n_streams: int | None = None
    side_by_side: bool = False
    collapse: str | None = None

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
    def key_pos(self) -> str:
        """The axis of its positions as keys."""
        return self.pos.removesuffix("pos") + "key_pos"

    @property
    def keeps_its_stream(self) -> bool:
        """Nothing multiplies its stream, or norms it as it enters a block."""
        return (
            not (self.rescaled or self.joined)
            and self.n_streams is None
            and all(block.is_sum for block in self.every_block)
        )

    @property
    def one_of_two(self) -> bool:
        """It is the encoder or the decoder of a model that has both."""
        return self.name != "blocks"


@dataclass(frozen=True)
class Head:
    """What stands behind the last block beside the unembedding, or between the two. A model may lack it.

    Paths are relative to the base model, or, if they begin with a dot, to the model itself.

    Attributes:
        name: the canonical name.
        path: the module.
        linear: its linear layer.
        hook: the name of the hook point on its output, with its `axes` (None: it has none).
        norm: its norm.
        unembeds: the unembedding reads what it makes.
        width: of what it makes, where that is not the stream's.
    """

    name: str
    path: str
    linear: str
    hook: str | None = None
    axes: str = "batch d_model"
    norm: Norm | None = None
    unembeds: bool = False
    width: int | None = None


@dataclass(frozen=True)
class Architecture:
    """A model family, as its adapter declares it for one configuration.

    Paths are relative to the base model (the one under ``base_model_prefix``), except `unembed`, which is relative to
    the model itself.

    Attributes:
        stacks: the lists of blocks; of an encoder-decoder model, ``encoder`` and ``decoder``.
        embed, pos_embed, token_types: the embeddings of tokens, positions, and of the two sentences. "" where the first
            list of blocks reads no tokens, but images or sound (ViT, Whisper's encoder).
        more_embeds: further embeddings that are added, of which each runs once (TAPAS).
        embed_project: a linear layer that brings the embeddings to the stream's width. Either it is what `embeddings`
            names: then it reads their sum, or the norm of it (RemBERT, ALBERT). Or it reads the token embedding, alone
            or before others, and what it puts out stands in the sum (RoCBert).
        d_embed: how wide the embeddings before it are, where that is not the stream's width.
        embed_factor: what the model multiplies the token embedding's result with.
        embed_adjust: what parameters of the base model do to that besides; `hook_embed` stands before it.
        embed_norm: a norm that follows: the token embedding alone (`hook_embed` is then its output), or, with
            `embeddings`, their sum.
        embeddings: the module that makes the first residual stream of all of them, where there is one (BERT): the names
            are then those of HookedTransformer's encoder, and `hook_full_embed` is what it returns.
        unembed: the output layer.
        changed_in_place: as in `Block`, of the modules that run before the blocks.
        heads: see `Head`; in the order of the computation.
        no_layer_runs: why a run cannot start or stop at a layer; "" where it can.
        refuse: is given the model, and raises `UnsupportedModelError` where its modules are not those declared.
        config_values: fields of `ModelConfig` that the configuration does not say by itself.
    """

    stacks: tuple[Stack, ...]
    embed: str
    unembed: str
    pos_embed: str | None = None
    token_types: str | None = None
    embed_norm: Norm | None = None
    embeddings: str | None = None
    embed_factor: float = 1.0
    embed_adjust: Affine | None = None
    more_embeds: tuple[str, ...] = ()
    embed_project: str | None = None
    d_embed: int | None = None
    changed_in_place: tuple[tuple[str, Literal["input", "output"]], ...] = ()
    heads: tuple[Head, ...] = ()
    no_layer_runs: str = ""
    refuse: Callable[[nn.Module], None] | None = None
    config_values: Mapping[str, object] = field(default_factory=dict)

    @property
    def stack(self) -> Stack:
        """The first list of blocks: the only one, or the encoder's."""
        return self.stacks[0]

    @property
    def token_embeddings(self) -> str:
        """The first token embeddings that there are: of the first stack, or else of the next; "" without any."""
        return self.embed or next((stack.embed for stack in self.stacks if stack.embed), "")

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
        if self.embed_adjust or not all(stack.keeps_its_stream for stack in self.stacks):
            return (
                "its residual stream is multiplied, or normed as it enters a block, and so no sum of what was written "
                "to it"
            )
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
        return {named.name: named.step for named in self.stack.block_at(layer).named}[name]

    def steps(self) -> Iterator[Step]:
        """The steps of all blocks of the first stack, each kind of block once."""
        for block in self.stack.every_block:
            yield from block.steps


def language_part(text: Architecture, path: str) -> Architecture:
    """A text model's declaration for a model of images and text that holds the text model's base, with its own head.

    Args:
        text: the declaration of a model of one stack.
        path: of the text model, from the base model that holds it.
    """
    stack, final = text.stack, text.stack.final_norm
    return replace(
        text,
        stacks=(
            replace(
                stack, path=join(path, stack.path), final_norm=final and replace(final, path=join(path, final.path))
            ),
        ),
        embed=join(path, text.embed),
    )
