"""Hook points from a declaration, by one walk over the steps of every block, whatever the model.

**In**: an `Architecture`, the model (for the number of blocks and the widths) and its
`ModelConfig`.

**Out**: a list of `Point`s, in the order of the computation. A point is a name with its aliases and
axes, its `Site`, its `View`, and the further sites that the view needs.

**How**: `hook_points` goes from the first tensor to the last.

1. The embeddings, or the patches of an image, and their sum (`_ModelBuilder.embeddings`).
2. For each stack, its own embeddings, then each block by a `_BlockBuilder`: `hook_resid_pre`; then
   for each step its input (the norm's points, `hook_attn_in`, `hook_mlp_in`), its inside (each noun
   adds its own points, in its own module: `AttentionPoints`, `mlp_points`, `mixture_points`,
   `mixer_points`), and its result; between two steps `hook_resid_mid`; at the end
   `hook_resid_post`.
3. After the last block the final norm, heads, and the unembedding.
4. Where positions come before the batch, or the model overwrites a tensor, every view is composed
   with one that transposes, or copies.

A stream that a block reads and adds to in two places is written **through**: the point stands on
the input of the norm, and an edit is copied into that very tensor, so that the skip connection sees
it.

**Errors**: a point that is not available (no constant factor, no softmax) is not added, and its
name is then unknown. A declared path that the model lacks raises an error that names it.

**Independent of** listeners, and of whether the declaration is right. It runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import replace
from typing import Unpack, cast

from torch import Tensor, nn

from adapters.architecture import (
    Architecture,
    Embedding,
    Head,
    Mix,
    NamedStep,
    Stack,
    Step,
    feeds_forward,
)
from adapters.attention import Attention, AttentionPoints, qk_norm_points
from adapters.config import ModelConfig
from adapters.feed_forward import MLP, MoE, mixture_points, mlp_points
from adapters.mixers import Mixer, functions_of, mixer_points
from adapters.norms import Norm, SharedNormInput, norm_points
from adapters.points import (
    MoreOfPoint,
    Point,
    PointList,
    PointNames,
    Site,
    Sites,
    base_path,
    call_number,
    has_module,
    join,
    module_at,
    module_path,
    path_from,
)
from adapters.views import (
    Branch,
    Composed,
    Copied,
    FlatPatches,
    PositionsFirst,
    SeveralStreams,
    StreamWeights,
    View,
    WithBatchAxis,
    WriteThrough,
    parameters_of,
    through,
    times,
)

# --------------------------------------------------------------------------------------------------
# The hook points before the first block and after the last.
# --------------------------------------------------------------------------------------------------


def hook_points(architecture: Architecture, model: nn.Module, cfg: ModelConfig) -> list[Point]:
    """Return all hook points of a model, in the order of the computation.

    Args:
        architecture: the declaration; a model may lack a stack, a head, the unembedding.
        model: the Hugging Face model, with its wrappers.
        cfg: its configuration.
    """
    builder = _ModelBuilder(architecture, model, cfg)
    points = builder.embeddings()
    after_blocks: list[Point] = []
    for stack in architecture.stacks:
        if has_module(model, join(builder.base, stack.path)):
            points += after_blocks + builder.stack(stack)
            after_blocks = builder.final_norm(stack)
    after_blocks += builder.logits()
    view = architecture.stacks[-1].stream_view
    if isinstance(view, PositionsFirst) and view.end:
        after_blocks = batch_first(after_blocks)
    return points + after_blocks


class _ModelBuilder:
    """A builder of a model's hook points. `_BlockBuilder` builds those of its blocks.

    Args:
        architecture: the adapter's declaration.
        model: the Hugging Face model, with its wrappers.
        cfg: its configuration.
    """

    def __init__(self, architecture: Architecture, model: nn.Module, cfg: ModelConfig) -> None:
        self.architecture = architecture
        self.model = model
        self.cfg = cfg
        self.base = base_path(model)

    def embeddings(self) -> list[Point]:
        """Return the points of the first stack's embeddings: of tokens, or of an image's
        patches.
        """
        stack = self.architecture.stack
        embedding = stack.embedding
        if not embedding.tokens:
            return self._patches(embedding)
        points = PointList(module=self.base)
        entered = points.input(embedding.tokens)
        points.add("embed.hook_in", entered, axes="batch pos", group="extra")
        axes = axes_of_sum = None
        if embedding.project:
            table = cast(Tensor, module_at(self.model, entered.path).weight)
            axes = f"batch pos {self._axis(table.shape[-1])}"
            axes_of_sum = axes if embedding.projects_sum else None
        self._add_tokens(points, embedding, axes)
        self._add_tables(points, embedding, axes_of_sum)
        self._add_sum(points, embedding, axes_of_sum)
        shown = copied(points.points, stack.changed_below(self.base, in_blocks=False))
        view = stack.stream_view
        return batch_first(shown) if isinstance(view, PositionsFirst) and view.embeddings else shown

    def _axis(self, width: int) -> str:
        """Return the name of an axis of this width."""
        return "d_model" if width == self.cfg.d_model else str(width)

    @staticmethod
    def _add_tokens(points: PointList, embedding: Embedding, axes: str | None) -> None:
        """Add the embeddings of tokens, with their own norm or projection."""
        tokens = embedding.tokens
        scaled = through(times(embedding.factor))
        if embedding.module is not None:  # HookedTransformer's encoder has one part for all tables
            aliases = ("hook_embed", "embed.hook_out")
            points.add("embed.hook_embed", tokens, scaled, axes, aliases=aliases)
            if embedding.project and not embedding.projects_sum:
                points.add("embed.hook_projected", embedding.project)
        elif embedding.norm:
            norm_points(points, "embed.ln", embedding.norm)
            points.add("hook_embed", embedding.norm.path, aliases=("embed.hook_out",))
        else:
            points.add("hook_embed", tokens, scaled, aliases=("embed.hook_out",))

    @staticmethod
    def _add_tables(points: PointList, embedding: Embedding, axes: str | None) -> None:
        """Add the tables that are added to the embeddings of tokens."""
        if embedding.types:
            points.add("embed.hook_token_type_embed", embedding.types, axes=axes)
        rows = (points.site(embedding.tokens),)
        for path in embedding.more:
            points.add(more_embed_name(path), path, WithBatchAxis(), axes, sources=rows)
        names: PointNames = ("hook_pos_embed", "pos_embed.hook_out")
        if embedding.module is not None:
            names = ("embed.hook_pos_embed", *names)
        _add_positions(points, names[0], embedding, axes, aliases=names[1:])

    def _patches(self, embedding: Embedding) -> list[Point]:
        """Return the points of an image's patches, and of the first stream, which is made of
        them.
        """
        points = PointList(module=self.base)
        if embedding.patches:
            site = points.site(embedding.patches)
            is_convolution = isinstance(module_at(self.model, site.path), nn.Conv2d)
            view = FlatPatches() if is_convolution else None
            points.add("hook_embed", site, view, "batch patch d_model", aliases=("embed.hook_out",))
        self._add_sum(points, embedding)
        return points.points

    @staticmethod
    def _add_sum(points: PointList, embedding: Embedding, axes: str | None = None) -> None:
        """Add the sum of embeddings, where a module outputs the first stream, and the norm of
        it.
        """
        if embedding.module is None:
            return
        if embedding.norm:
            norm_points(points, "embed.ln", embedding.norm, axes=axes)
        points.add("hook_full_embed", embedding.module)

    def stack(self, stack: Stack) -> list[Point]:
        """Return the points of a list of blocks, with its own embeddings before it and the collapse
        of several streams after it.
        """
        points = PointList(module=self.base, pos=stack.pos)
        if stack is not self.architecture.stack and stack.embedding.tokens:
            _add_own_embeddings(points, stack)
        n = len(stack.modules(self.model.get_submodule(self.base)))
        for index in range(n):
            block = _BlockBuilder(stack, self.cfg, self.base, index, n, self.model)
            points.points.extend(block.build())
        collapsed = None
        if isinstance(stack.collapse, str):
            collapsed = points.site(stack.collapse)
        elif stack.n_streams is not None and stack.final_norm and stack.final_norm.path:
            collapsed = points.input(stack.final_norm.path)
        if collapsed:  # of several streams, after the last block
            after_blocks = replace(points, depth=n)
            after_blocks.add("hook_resid_final", collapsed, aliases=("ln_final.hook_in",))
        return _named_by_readers(points.points, stack, n)

    def final_norm(self, stack: Stack) -> list[Point]:
        """Return the points of the norm after a stack's last block. The output of a norm that is a
        function is read at the output layer.
        """
        norm = stack.final_norm
        if norm is None:
            return []
        n = len(stack.modules(self.model.get_submodule(self.base)))
        points = PointList("", self.base, n, "", stack.pos)
        site = points.site(norm.path)
        shared = None
        if norm.kind.function:
            unembed = self._unembed()
            if unembed is None:
                return []
            site = Site(unembed, "input")
            shared = points.site(stack.place_of(n - 1), "output", stack.output[0])
        name = f"{stack.name}_final_ln" if stack.one_of_two else "ln_final"
        aliases = (f"{stack.name}_ln_final.hook_out",) if stack.one_of_two else ()
        axes = "batch d_model" if stack.pooled else None
        norm_points(points, name, norm, site, shared=shared, axes=axes)
        points.add(f"{name}.hook_out", site, axes=axes, group="extra", aliases=aliases)
        return points.points

    def _unembed(self) -> str | None:
        """Return the path of the output layer; None if this class of models has none."""
        declared = self.architecture.readout.path
        path = path_from(self.model, f".{declared}")
        return path if declared and has_module(self.model, path) else None

    def logits(self) -> list[Point]:
        """Return the points of the heads and of the unembedding, which may be one of them or follow
        them."""
        points = PointList("", "", self.cfg.n_layers, "", self.architecture.stacks[-1].pos)
        heads = self.architecture.heads
        for head in heads:
            self._add_head(points, head)
            if head.unembeds:
                self._add_unembedding(points)
        if not any(head.unembeds for head in heads):
            self._add_unembedding(points)
        return points.points

    def _add_head(self, points: PointList, head: Head) -> None:
        """Add the hook points of a layer between the last norm and the unembedding, if this class
        of models has it.
        """
        path = path_from(self.model, head.path)
        if not has_module(self.model, path):
            return
        width = self._width_of_head(head)
        if norm := head.norm:
            site = points.site(path_from(self.model, norm.path))
            axes = f"batch {points.pos} {width}"
            norm_points(points, f"{head.name}.ln", norm, site, axes=axes)
        if head.hook:
            points.add(f"{head.name}.{head.hook}", path, axes=f"batch {width}")

    def _width_of_head(self, head: Head) -> str:
        """Return the axis of the output of a head's layer."""
        layer = module_at(self.model, path_from(self.model, head.linear))
        return self._axis(getattr(layer, "out_features", self.cfg.d_model))

    def _add_unembedding(self, points: PointList) -> None:
        """Add the hook points of the unembedding, if this class of models has one."""
        path = self._unembed()
        if path is None:
            return
        width = "d_model"
        for head in self.architecture.heads:
            if head.unembeds and has_module(self.model, path_from(self.model, head.path)):
                width = self._width_of_head(head)
                break
        rows = f"batch {points.pos}" if self.architecture.pooled is None else "batch"
        entered = points.input(path)
        points.add("unembed.hook_in", entered, axes=f"{rows} {width}", group="extra")
        axes = f"{rows} d_vocab_out"
        aliases = ("hook_unembed",)
        points.add("unembed.hook_out", path, axes=axes, group="extra", aliases=aliases)


def _add_positions(
    points: PointList,
    name: str,
    embedding: Embedding,
    axes: str | None = None,
    **more: Unpack[MoreOfPoint],
) -> None:
    """Add the table of positions, if there is one."""
    path = embedding.positions
    if not path:
        return
    view = None
    if all(kind != "row positions" for kind, _ in embedding.added):
        # It has one row for the whole batch: the table of tokens shows the batch size.
        view = WithBatchAxis()
        more["sources"] = (points.site(embedding.tokens),)
    points.add(name, path, view, axes, **more)


def _add_own_embeddings(points: PointList, stack: Stack) -> None:
    """Add the embeddings of a second stack's own tokens."""
    embedding = stack.embedding
    prefix = f"{stack.name}_"
    scaled = through(times(embedding.factor))
    points.add(f"{prefix}embed.hook_out", embedding.tokens, scaled, group="extra")
    _add_positions(points, f"{prefix}pos_embed.hook_out", embedding, group="extra")
    if embedding.types:
        points.add(f"{prefix}token_type_embed.hook_out", embedding.types, group="extra")
    if embedding.norm:
        norm_points(points, f"{prefix}embed.ln", embedding.norm)


def more_embed_name(path: str) -> str:
    """Return the name of the hook point of one of the further tables of an `Embedding`."""
    number = call_number(path)
    last = module_path(path).rpartition(".")[2]
    return f"embed.{last}_{number + 1}.hook_out" if number else f"embed.{last}.hook_out"


def batch_first(points: list[Point]) -> list[Point]:
    """Return the points of modules that have positions first, with the batch first."""
    turned = []
    for point in points:
        # A kernel has heads before positions.
        if re.match(r"batch \w*pos\b", point.axes) and point.site.kind != "attention":
            point = replace(point, view=Composed(point.view, PositionsFirst()))
        turned.append(point)
    return turned


def copied(points: list[Point], changed: Set[tuple[str, str]]) -> list[Point]:
    """Return the points; points on tensors that the model overwrites get views that copy."""
    if not changed:
        return points
    shown = []
    for point in points:
        if (point.site.path, point.site.kind) in changed:
            point = replace(point, view=Copied(point.view))
        shown.append(point)
    return shown


def _named_by_readers(points: list[Point], stack: Stack, n: int) -> list[Point]:
    """Add aliases for keys and values that another block's attention reads, under that block's
    names.
    """
    aliases: dict[str, list[str]] = {}
    for index in range(n):
        for named in stack.block_at(index).named:
            part = named.step.part
            if not isinstance(part, Attention) or part.keys_of is None:
                continue
            own = f"{stack.name}.{index}.{named.name}"
            source = f"{stack.name}.{part.keys_of}.{named.name}"
            for letter in "kv":
                names = aliases.setdefault(f"{source}.hook_{letter}", [])
                names += [f"{own}.hook_{letter}", f"{own}.{letter}.hook_out"]
    return [
        replace(point, aliases=(*point.aliases, *aliases.get(point.name, ()))) for point in points
    ]


# --------------------------------------------------------------------------------------------------
# The hook points of a block.
# --------------------------------------------------------------------------------------------------


class _BlockBuilder:
    """A builder of the hook points of one block, whatever its steps are.

    Args:
        stack: the list of blocks that it is in.
        cfg: the model's configuration.
        base: the path of the base model.
        index, n: the block's index, and the number of blocks.
        model: the Hugging Face model, with its wrappers.
    """

    def __init__(
        self, stack: Stack, cfg: ModelConfig, base: str, index: int, n: int, model: nn.Module
    ) -> None:
        self.stack = stack
        self.cfg = cfg
        self.base = base
        self.model = model
        self.block = stack.block_at(index)
        #: The final norm reads its output.
        self.last = index == n - 1 and n not in stack.block_inputs and stack.n_streams is None
        self.path = join(base, stack.place_of(index))
        first, self.exit = self.block.ends or ("", "")
        self.points = PointList(
            prefix=f"{stack.name}.{index}",
            module=self.path,
            depth=index,
            stack=stack.name,
            pos=stack.pos,
            rows=(Site(join(self.path, first), "input"),),
        )

    def build(self) -> list[Point]:
        """Build the points, in the order of the computation."""
        # Without a module around the block, its first module's input is also the skip connection.
        view = WriteThrough() if self.block.ends else None
        self._add_stream("hook_resid_pre", self.points.rows[0], view, aliases=("hook_in",))
        if self.block.norm:
            self._add_norm(self.points, "ln0", self.block.norm)
        steps = self.block.named
        for named, following in zip(steps, (*steps[1:], None), strict=False):
            self._add_reading(named)
            self._add_inside(named)
            self._add_result(named)
            if norm := named.step.stream_norm:
                self._add_norm_on_the_stream(named, norm, following)
        self._add_output()
        stack = self.stack
        points = copied(self.points.points, stack.changed_below(self.path, in_blocks=True))
        if stack.positions_first:
            points = batch_first(points)
        return list(map(_renamed, points)) if stack.one_of_two else points

    def _add_output(self) -> None:
        """Add the stream after the last step."""
        steps = self.block.steps
        output = self.points.site(self.exit, "output", self.stack.output[0])
        if steps and steps[-1].stream_norm:
            self.points.add("hook_normalized_resid_post", output, aliases=("hook_out",))
            return
        aliases: PointNames = ("hook_out",)
        if self.last and not self.stack.one_of_two:
            aliases = ("hook_out", ".ln_final.hook_in")
        self._add_stream("hook_resid_post", output, aliases=aliases)

    # The residual stream.

    def _add_stream(
        self, name: str, site: Site, view: View | None = None, aliases: PointNames = ()
    ) -> None:
        """Add a point of the stream, or of all streams if the block carries several."""
        axes = None
        streams = self.stack.stream_view
        if isinstance(streams, SeveralStreams):
            axes = f"batch {self.stack.pos} n_streams d_model"
            view = Composed(view, streams) if view else streams
        self.points.add(name, site, view, axes, aliases=aliases)

    def _is_module_output(self, stream: str) -> bool:
        """Tell whether a module outputs this stream, so that its point is on that output."""
        return any(
            named.after == stream and named.step.residual_sum_module for named in self.block.named
        )

    # The input of a part.

    def _entry(self, step: Step) -> Site:
        """Return the site of a part's input.

        Raises:
            ValueError: it has no module of its own, and two layers read the input.
        """
        if path := step.entry or step.part.path:
            return self.points.input(path)
        readers = step.readers
        if len(readers) > 1:
            raise ValueError(
                f"a part of {self.path} has no module of its own, and {' and '.join(readers)} read"
                " its input: there is no one place where it enters. Give it a norm of its own, or"
                " a path"
            )
        return self.points.input(readers[0])

    def _add_reading(self, named: NamedStep) -> None:
        """Add the points from the stream to the part's input: the stream between two steps, the
        part's own input, the norm.
        """
        step = named.step
        part = step.part
        norm = step.pre
        points = replace(self.points, flat=isinstance(part, MLP) and part.flat)
        entry = points.input(norm.path) if norm else None
        is_between = named.before.startswith("hook_resid_mid")
        if step.mix:
            self._add_mix(named, step.mix, is_between)
        elif named.first and is_between and not self._is_module_output(named.before):
            points.add(named.before, entry or self._entry(step), WriteThrough())
        if norm is None or entry is None:
            self._add_unnormed_input(points, named)
        elif named.shared and not named.through_one:
            self._add_shared_norm(named, norm, entry)
        elif named.leads:  # else one module reads the norm for both: no site is this part's alone
            # As in HookedTransformer's encoder-decoder, the MLP's input is also what its output is
            # added to.
            is_skipped = isinstance(part, MLP) and self.stack.one_of_two
            view = WriteThrough() if is_skipped else Branch()
            self._add_own_input(points, named, entry, view)
            self._add_norm(points, named.norm, norm, self._separate_readers(named))

    def _add_mix(self, named: NamedStep, mix: Mix, is_between: bool) -> None:
        """Add the streams before their mixing, and the mixing weights."""
        points = self.points
        axes = f"batch {points.pos} n_streams"
        square = f"{axes} to_n_streams"
        prefix = f"hook_{named.name}_"
        if mix.by_block:
            if is_between:
                points.add(named.before, self._entry(named.step), WriteThrough())
            (element,) = mix.returns
            view = StreamWeights(self.stack.n_streams or 1)
            axes = square if element == "keep" else axes
            points.add(prefix + element, mix.path, view, axes, group="extra")
            return
        if is_between:
            self._add_stream(named.before, points.input(mix.path), WriteThrough())
        site = points.site(mix.path, "output", mix.write)
        points.add(f"{prefix}write", site, axes=axes, group="extra")
        if mix.keep is not None:
            site = points.site(mix.path, "output", mix.keep)
            points.add(f"{prefix}keep", site, axes=square, group="extra")

    def _add_unnormed_input(self, points: PointList, named: NamedStep) -> None:
        """Add the input of a part that reads the stream without a norm, where no other part reads
        it.
        """
        step = named.step
        part = named.step.part
        reads_alone = feeds_forward(part) or (isinstance(part, Mixer) and part.mixes)
        if not reads_alone or named.before.endswith("hook_out"):
            return
        if step.mix and step.mix.by_block:  # it reads a mix of the streams, made by the block
            entry = points.input(step.readers[0])
        else:
            entry = self._entry(step)
        self._add_own_input(points, named, entry, Branch())

    def _add_own_input(
        self, points: PointList, named: NamedStep, entry: Site, view: View, sources: Sites = ()
    ) -> None:
        """Add the stream as only this part reads it."""
        part = named.step.part
        norm_in = f"{named.norm}.hook_in"
        if isinstance(part, Attention) and not part.cross:
            points.add(norm_in, entry, view, group="extra", sources=sources)
            return
        hook = f"hook_{named.name}_in"
        more: MoreOfPoint = {"group": "extra", "aliases": (norm_in,), "sources": sources}
        if isinstance(part, Attention):
            more |= {"group": "heavy", "flag": "use_attn_in"}
        elif feeds_forward(part):
            more |= {"group": "heavy", "flag": "use_hook_mlp_in"}
            if not self.stack.one_of_two:
                more["aliases"] = (norm_in, f"{named.name}.{hook}")
        points.add(hook, entry, view, **more)

    def _add_shared_norm(self, named: NamedStep, norm: Norm, entry: Site) -> None:
        """Add a norm that several parts read; its points are repeated for each part that reads
        it."""
        site = self._entry(named.step)
        if not named.leads:
            self._add_own_input(self.points, named, site, SharedNormInput(), (entry,))
        points = self.points
        name = named.norm
        readers = self._separate_readers(named)
        norm_points(points, name, norm, site, shared=entry, separate_consumers=readers)
        output = f"{name}.hook_out"
        points.add(output, site, Branch(), group="extra", separate_consumers=readers)

    def _separate_readers(self, named: NamedStep) -> PointNames:
        """Return queries, keys and values; in HookedTransformer each of them has its own norm (see
        `Point.separate_consumers`).
        """
        part = named.step.part
        if not isinstance(part, Attention) or part.cross:
            return ()
        # With a shift, the projections do not read the norm's output alone; keys and values that
        # are made from one latent do not read the norm at all.
        if part.qk_shift or part.q.latent or part.k.latent:
            return ()
        d_model = self.cfg.d_model
        for projection in part.projections.values():
            layer = self._module(join(self.path, part.path, projection.path))
            if getattr(layer, "in_features", d_model) != d_model:
                return ()  # another layer makes its input from the norm (Dots 3)
        prefix = f"{self.points.prefix}.{named.name}"
        return tuple(f"{prefix}.hook_{letter}" for letter in part.projections)

    @staticmethod
    def _add_norm(points: PointList, name: str, norm: Norm, readers: PointNames = ()) -> None:
        norm_points(points, name, norm, separate_consumers=readers)
        if gate := norm.kind.gate:
            unflat = replace(points, flat=False)
            unflat.add(f"{name}.hook_gate", join(norm.path, gate), group="extra")
        output = f"{name}.hook_out"
        points.add(output, norm.path, group="extra", separate_consumers=readers)

    # The inside of a part.

    def _add_inside(self, named: NamedStep) -> None:
        part = named.step.part
        points = self.points.inside(named.name, part.path)
        if isinstance(part, Attention):
            self._add_attention(named, part, inner=False)
        elif isinstance(part, MLP):
            mlp_points(points, part)
        elif isinstance(part, MoE):
            n_experts = self.cfg.num_experts
            if n_experts is None:
                raise ValueError(
                    f"{points.module} is declared as a mixture, and config_values has no"
                    " num_experts"
                )
            experts = self._module(join(points.module, part.experts))
            mixture_points(points, part, n_experts, experts)
        elif isinstance(part, Mixer):
            mixer = self._module(points.module) if part.mixes else None
            functions = () if mixer is None else functions_of(mixer)
            for inner, attention in named.attentions:
                self._add_attention(inner, attention, inner=True)
                qk_norm_points(self.points.inside(inner.name, attention.path), attention)
            mixer_points(points, part, functions)

    def _key_pos(self, part: Attention) -> str:
        """Return the axis of an attention's keys."""
        if part.keys_from == "more":
            return "held_pos"  # a window, or keys that stand for several tokens: not positions
        if not part.cross:
            return self.stack.key_pos
        return "key_pos" if self.stack.one_of_two else "memory_pos"

    def _add_attention(self, named: NamedStep, part: Attention, *, inner: bool) -> None:
        norm = named.step.pre
        AttentionPoints(
            self.points,
            named.name,
            part,
            n_heads=part.own("n_heads", self.cfg.n_heads),
            n_kv_heads=part.own("n_key_value_heads", self.cfg.n_kv_heads),
            key_pos=self._key_pos(part),
            norm=self.points.input(norm.path) if norm else None,
            shift=Site(join(self.base, part.qk_shift), "output") if part.qk_shift else None,
            factor=None if inner else named.step.last_factor,
            inner=inner,
        ).add()

    def _module(self, path: str) -> nn.Module | None:
        return module_at(self.model, path) if has_module(self.model, path) else None

    # The result of a part.

    def _returned(self, step: Step) -> Site:
        """Return the site of a part's output."""
        if step.post and step.out == step.post.path:  # no module outputs this sum
            return self.points.input(step.out)
        return self.points.site(step.out or step.part.path, "output", step.out_element or None)

    def _add_result(self, named: NamedStep) -> None:
        """Add the part's output and the term added to the stream."""
        step = named.step
        part = step.part
        name = named.name
        points = replace(self.points, flat=isinstance(part, MLP | MoE) and part.flat)
        returned = self._returned(step)
        chain = step.output_transform
        output = f"{name}.hook_out"
        aliases = _names_of_last_matrix(named)
        if step.changes_its_result or chain:
            points.add(output, returned, group="extra", aliases=aliases)
            aliases = ()
        else:
            aliases = (output, *aliases)
        result = f"hook_{name}_out"
        scaled = through(chain)
        sources = points.rows if parameters_of(chain) else ()
        if not step.changes_its_result:
            points.add(result, returned, scaled, aliases=aliases, sources=sources)
        if isinstance(part, Attention):
            qk_norm_points(self.points.inside(name, part.path), part)
        if step.post:
            points = self.points
            self._add_norm(points, f"{named.norm}_post", step.post)
            returned = points.site(step.post.path)
        if step.changes_its_result:
            points.add(result, returned, scaled, sources=sources)
        if step.residual_sum_module and named.after != "hook_resid_post":
            self.points.add(named.after, step.residual_sum_module)

    def _add_norm_on_the_stream(
        self, named: NamedStep, norm: Norm, following: NamedStep | None
    ) -> None:
        """Add the sum of stream and part, and its norm, which is the stream from there on."""
        total = self.points.input(norm.path)
        names = (f"{named.norm}.hook_in",)
        if following is not None and feeds_forward(following.step.part):
            # The norm's output is both the MLP's input and the skip connection: the MLP has no
            # input of its own.
            self.points.add(named.after, total)
            flag = "use_hook_mlp_in"
            self.points.add("hook_mlp_in", total, group="heavy", flag=flag, aliases=names)
        else:
            self.points.add(named.after, total, aliases=names)
        self._add_norm(self.points, named.norm, norm)


def _names_of_last_matrix(named: NamedStep) -> PointNames:
    """Return HookedTransformer's name for the output of a part's last matrix; a mixer has none."""
    part = named.step.part
    if isinstance(part, Mixer):
        return ()
    matrix = "o" if isinstance(part, Attention) else "out"
    return (f"{named.name}.{matrix}.hook_out",)


def _renamed(point: Point) -> Point:
    """Return the point with TransformerLens 3's names for an encoder's and a decoder's blocks as
    further aliases.
    """
    stack = point.stack
    names = [
        name.replace(f"{stack}.", f"{stack}_blocks.", 1) for name in (point.name, *point.aliases)
    ]
    if stack == "decoder":
        for name in list(names):
            name = name.replace(".attn.", ".self_attn.")
            names.append(name.replace("resid_mid_cross", "resid_mid2"))
    return replace(point, aliases=(*point.aliases, *dict.fromkeys(names)))
