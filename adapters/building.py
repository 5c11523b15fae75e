"""Building: from a declaration to hook points, by one walk over the steps of every block, whatever the model.

**In**: an `Architecture`, the model (for what only it knows: how many blocks, which widths) and its `ModelConfig`.

**Out**: a list of `Point`s, in the order of the computation. A point is a name with its aliases and axes, the `Site` it
stands on, the `View` it is seen through, and the sites that the view needs besides.

**How**: `hook_points` goes from the first tensor to the last.

1. The embeddings, or the patches of an image, and their sum (`embedding_points`, `image_points`).
2. For each stack, its own embeddings, then each block by a `BlockBuilder`: `hook_resid_pre`; then step by step what is
   read (the norm's points, `hook_attn_in`, `hook_mlp_in`), what is inside (each noun adds its own points, in its own
   module: `AttentionPoints`, `mlp_points`, `mixture_points`, `mixer_points`), and what is added; between two steps
   `hook_resid_mid`; at the end `hook_resid_post`.
3. Behind the last block the final norm, heads, and the unembedding.
4. Where positions come before the batch, or the model writes over a tensor, every view is put behind one that turns, or
   copies.

A stream that a block reads and adds to in two places is written **through**: the point stands on the input of the norm,
and an edit is copied into that very tensor, so that the skip connection sees it.

**It refuses** by leaving out: a point that cannot be had (no constant factor, no softmax) is not there, and its name is
then unknown. A declared path that the model does not have is an error that names it.

**It does not know** who listens, or whether the declaration is right. It runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import replace
from typing import Unpack, cast

from torch import Tensor, nn

from adapters.architecture import Architecture, Embedding, Head, Mix, NamedStep, Part, Stack, Step, feeds_forward
from adapters.attention import Attention, AttentionPoints, qk_norm_points
from adapters.config import ModelConfig
from adapters.feed_forward import MLP, MoE, mixture_points, mlp_points
from adapters.mixers import Mixer, functions_of, mixer_points
from adapters.norms import Norm, SharedNormInput, norm_points
from adapters.points import (
    Border,
    Group,
    MoreOfPoint,
    Point,
    PointList,
    Site,
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
    FlatRows,
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

# ----------------------------------------------------------------------------------------------------------------------
# The hook points before the first block and behind the last.
# ----------------------------------------------------------------------------------------------------------------------


def embedding_points(architecture: Architecture, base: str, model: nn.Module, d_model: int) -> list[Point]:
    """The hook points of the embeddings, in the order in which they are computed.

    Args:
        architecture: what the adapter declares.
        base: the path of the model without its head.
        model: the Hugging Face model, which has the table of tokens.
        d_model: how wide the stream is.
    """
    made = architecture.embedding
    tokens = Site(join(base, made.tokens), "output")
    points = PointList("", -1, "")
    together = made.module is not None  # HookedTransformer's encoder has one part for all of them
    points.add("embed.hook_in", Site(tokens.path, "input"), axes="batch pos", group="extra")
    width = cast(Tensor, module_at(model, tokens.path).weight).shape[-1] if made.project else d_model
    axes = f"batch pos {'d_model' if width == d_model else width}"
    total = axes if made.projects_sum else None  # of their sum
    scaled = through(times(made.factor))
    if together:
        points.add("embed.hook_embed", tokens, scaled, axes, aliases=("hook_embed", "embed.hook_out"))
        if made.project and not made.projects_sum:
            points.add("embed.hook_projected", Site(join(base, made.project), "output"))
    else:
        embed = Site(join(base, made.norm.path), "output") if made.norm else tokens
        if made.norm:
            norm_points(points, "embed.ln", made.norm.kind, embed)
        points.add("hook_embed", embed, None if made.norm else scaled, aliases=("embed.hook_out",))
    if made.types:
        points.add("embed.hook_token_type_embed", Site(join(base, made.types), "output"), axes=total)
    for path in made.more:
        site = Site(join(base, path), "output")
        points.add(more_embed_name(path), site, WithBatchAxis(), total, sources=(tokens,))
    if made.positions:
        site = Site(join(base, made.positions), "output")
        names = ("hook_pos_embed", "pos_embed.hook_out")
        name, aliases = ("embed.hook_pos_embed", names) if together else (names[0], names[1:])
        view, sources = _of_positions(made, tokens)
        points.add(name, site, view, total, aliases=aliases, sources=sources)
    _add_sum(points, made, base, total)
    found = copied(points.points, architecture.stack.changed_below(base, in_blocks=False))
    view = architecture.stack.stream_view
    return batch_first(found) if isinstance(view, PositionsFirst) and view.embeddings else found


def _of_positions(made: Embedding, tokens: Site) -> tuple[View | None, tuple[Site, ...]]:
    """How a table of positions is seen, and with the help of what: of that of tokens, where it has one row for all."""
    of_rows = any(what == "row positions" for what, _ in made.added)
    return (None, ()) if of_rows else (WithBatchAxis(), (tokens,))


def image_points(made: Embedding, base: str, model: nn.Module) -> list[Point]:
    """The hook points of an image's patches, and of the first stream that is made of them.

    Args:
        made: what the adapter declares.
        base: the path of the model without its head.
        model: the Hugging Face model.
    """
    points = PointList("", -1, "")
    if made.patches:
        site = Site(join(base, made.patches), "output")
        view = FlatPatches() if isinstance(module_at(model, site.path), nn.Conv2d) else None
        points.add("hook_embed", site, view, "batch patch d_model", aliases=("embed.hook_out",))
    _add_sum(points, made, base)
    return points.points


def _add_sum(points: PointList, made: Embedding, base: str, axes: str | None = None) -> None:
    """The sum of embeddings, where a module puts out the first stream, and the norm of it."""
    if made.module is not None:
        if made.norm:
            norm_points(points, "embed.ln", made.norm.kind, Site(join(base, made.norm.path), "output"), axes=axes)
        points.add("hook_full_embed", Site(join(base, made.module), "output"))


def batch_first(points: list[Point]) -> list[Point]:
    """The points of modules that are given positions first, with the batch first."""
    return [
        replace(point, view=Composed(point.view, PositionsFirst()))
        # A kernel has heads before positions.
        if re.match(r"batch \w*pos\b", point.axes) and point.site.kind != "attention"
        else point
        for point in points
    ]


def copied(points: list[Point], changed: Set[tuple[str, str]]) -> list[Point]:
    """The points, of which those that stand where the model writes over show copies."""
    return [
        replace(point, view=Copied(point.view)) if (point.site.path, point.site.kind) in changed else point
        for point in points
    ]


def more_embed_name(path: str) -> str:
    """The hook point of one of the further tables of an `Embedding`."""
    number = call_number(path)
    return f"embed.{module_path(path).rpartition('.')[2]}{f'_{number + 1}' if number else ''}.hook_out"


def add_own_embeddings(points: PointList, stack: Stack, base: str) -> None:
    """The embeddings of a second stack's own tokens."""
    made = stack.embedding
    tokens = Site(join(base, made.tokens), "output")
    scaled = through(times(made.factor))
    points.add(f"{stack.name}_embed.hook_out", tokens, scaled, group="extra")
    if made.positions:
        site = Site(join(base, made.positions), "output")
        view, sources = _of_positions(made, tokens)
        points.add(f"{stack.name}_pos_embed.hook_out", site, view, group="extra", sources=sources)
    if made.types:
        points.add(f"{stack.name}_token_type_embed.hook_out", Site(join(base, made.types), "output"), group="extra")
    if made.norm:
        norm_points(points, f"{stack.name}_embed.ln", made.norm.kind, Site(join(base, made.norm.path), "output"))


def _final_norm_points(architecture: Architecture, stack: Stack, base: str, model: nn.Module) -> list[Point]:
    """The hook points of the norm behind a stack's last block. What a function puts out the output layer reads."""
    n, norm = len(stack.modules(model.get_submodule(base))), stack.final_norm
    points = PointList("", n, "", stack.pos)
    if norm is None:
        return []
    site, shared = Site(join(base, norm.path), "output"), None
    if norm.kind.function:
        path = path_from(model, "." + architecture.readout.path)
        if not architecture.readout.path or not has_module(model, path):
            return []
        site, shared = Site(path, "input"), Site(join(base, stack.place_of(n - 1)), "output", stack.output[0])
    name = f"{stack.name}_final_ln" if stack.one_of_two else "ln_final"
    aliases = (f"{stack.name}_ln_final.hook_out",) if stack.one_of_two else ()
    axes = "batch d_model" if stack.pooled else None
    norm_points(points, name, norm.kind, site, shared=shared, axes=axes)
    points.add(f"{name}.hook_out", site, axes=axes, group="extra", aliases=aliases)
    return points.points


def _width_behind(head: Head, model: nn.Module, d_model: int) -> str:
    """The axis of what the layer of a head makes."""
    width = getattr(module_at(model, path_from(model, head.linear)), "out_features", d_model)
    return "d_model" if width == d_model else str(width)


def _add_head(points: PointList, head: Head, model: nn.Module, d_model: int) -> None:
    """Adds the hook points of a layer between the last norm and the unembedding, if this class of models has it."""
    path = path_from(model, head.path)
    if not has_module(model, path):
        return
    width = _width_behind(head, model, d_model)
    if head.norm:
        norm = Site(path_from(model, head.norm.path), "output")
        norm_points(points, f"{head.name}.ln", head.norm.kind, norm, axes=f"batch {points.pos} {width}")
    if head.hook:
        points.add(f"{head.name}.{head.hook}", Site(path, "output"), axes=f"batch {width}")


def _add_unembedding(points: PointList, architecture: Architecture, model: nn.Module, d_model: int) -> None:
    """Adds the hook points of the unembedding, if this class of models has one."""
    unembed = architecture.readout.path
    path = path_from(model, "." + unembed)
    if unembed and has_module(model, path):
        between = (
            head for head in architecture.heads if head.unembeds and has_module(model, path_from(model, head.path))
        )
        width = next((_width_behind(head, model, d_model) for head in between), "d_model")
        rows = f"batch {points.pos}" if architecture.pooled is None else "batch"
        points.add("unembed.hook_in", Site(path, "input"), axes=f"{rows} {width}", group="extra")
        made, aliases = Site(path, "output"), ("hook_unembed",)
        points.add("unembed.hook_out", made, axes=f"{rows} d_vocab_out", group="extra", aliases=aliases)


def hook_points(architecture: Architecture, model: nn.Module, cfg: ModelConfig) -> list[Point]:
    """All hook points of a model, in the order of the computation.

    Args:
        architecture: the declaration; a model may lack a stack, a head, the unembedding.
        model: the Hugging Face model, with what wraps it.
        cfg: its configuration.
    """
    base = base_path(model)
    made = architecture.embedding
    points = (
        embedding_points(architecture, base, model, cfg.d_model) if made.tokens else image_points(made, base, model)
    )
    behind: list[Point] = []  # what comes behind the last block
    for stack in architecture.stacks:
        if has_module(model, join(base, stack.path)):
            points += behind + _stack_points(architecture, stack, base, model, cfg)
            behind = _final_norm_points(architecture, stack, base, model)
    behind += _logits_points(architecture, model, cfg)
    view = architecture.stacks[-1].stream_view
    return points + (batch_first(behind) if isinstance(view, PositionsFirst) and view.end else behind)


def _stack_points(
    architecture: Architecture, stack: Stack, base: str, model: nn.Module, cfg: ModelConfig
) -> list[Point]:
    """Those of a list of blocks, with its own embeddings before it and what is made of several streams behind it."""
    points = PointList("", -1, "", stack.pos)
    if stack is not architecture.stack and stack.embedding.tokens:
        add_own_embeddings(points, stack, base)
    n = len(stack.modules(model.get_submodule(base)))
    for index in range(n):
        points.points.extend(BlockBuilder(stack, cfg, base, index, n, model).build())
    made = Site(join(base, stack.collapse), "output") if isinstance(stack.collapse, str) else None
    if not made and stack.n_streams is not None and stack.final_norm and stack.final_norm.path:
        made = Site(join(base, stack.final_norm.path), "input")
    if made:  # of several streams, behind the last block
        replace(points, depth=n).add("hook_resid_final", made, aliases=("ln_final.hook_in",))
    return _named_by_readers(points.points, stack, n)


def _named_by_readers(points: list[Point], stack: Stack, n: int) -> list[Point]:
    """Keys and values that another block's attention reads have the names of that one's, too."""
    also: dict[str, list[str]] = {}
    for index in range(n):
        for named in stack.block_at(index).named:
            if isinstance(named.step.part, Attention) and (of := named.step.part.keys_of) is not None:
                for name in ("hook_k", "hook_v", "k.hook_out", "v.hook_out"):
                    made = f"{stack.name}.{of}.{named.name}.hook_{name[0] if '.' in name else name[-1]}"
                    also.setdefault(made, []).append(f"{stack.name}.{index}.{named.name}.{name}")
    return [replace(each, aliases=(*each.aliases, *also.get(each.name, ()))) for each in points]


def _logits_points(architecture: Architecture, model: nn.Module, cfg: ModelConfig) -> list[Point]:
    """Those of the heads, and of the unembedding where it is, or behind them all."""
    points = PointList("", cfg.n_layers, "", architecture.stacks[-1].pos)
    for head in architecture.heads:
        _add_head(points, head, model, cfg.d_model)
        if head.unembeds:
            _add_unembedding(points, architecture, model, cfg.d_model)
    if not any(head.unembeds for head in architecture.heads):
        _add_unembedding(points, architecture, model, cfg.d_model)
    return points.points


class BlockBuilder:
    """Makes the hook points of one block, whatever its steps are.

    Args:
        stack: the list of blocks that it is in.
        cfg: the model's configuration.
        base: the path of the base model.
        index, n: which block of how many.
        model: the Hugging Face model, with what wraps it.
    """

    def __init__(self, stack: Stack, cfg: ModelConfig, base: str, index: int, n: int, model: nn.Module) -> None:
        self.stack, self.cfg, self.base, self.model = stack, cfg, base, model
        self.block = stack.block_at(index)
        #: What leaves it is what the final norm reads.
        self.last = index == n - 1 and n not in stack.block_inputs and stack.n_streams is None
        self.path = join(base, stack.place_of(index))
        self.points = PointList(f"{stack.name}.{index}", index, stack.name, stack.pos)
        #: Where the batch size of rows ``(batch pos)`` is seen.
        first, self.exit = self.block.ends or ("", "")
        self.rows = (self._site("input", first),)

    def build(self) -> list[Point]:
        """The points, in the order of the computation."""
        # Without a module around it all, what its first module is given is also what is added to.
        view = WriteThrough() if self.block.ends else None
        self._add_stream("hook_resid_pre", self.rows[0], view, aliases=("hook_in",))
        if self.block.norm:
            self._add_norm("ln0", self.block.norm)
        steps = self.block.named
        for index, named in enumerate(steps):
            self._add_reading(named)
            self._add_inside(named)
            self._add_result(named)
            if norm := named.step.stream_norm:
                following = steps[index + 1].step.part if index + 1 < len(steps) else None
                self._add_norm_on_the_stream(named, norm, following)
        output = Site(join(self.path, self.exit), "output", self.stack.output[0])
        if steps and steps[-1].step.stream_norm:
            self.points.add("hook_normalized_resid_post", output, aliases=("hook_out",))
        else:
            others = (".ln_final.hook_in",) if self.last and not self.stack.one_of_two else ()
            self._add_stream("hook_resid_post", output, aliases=("hook_out", *others))
        points = copied(self.points.points, self.stack.changed_below(self.path, in_blocks=True))
        points = batch_first(points) if self.stack.positions_first else points
        return list(map(_renamed, points)) if self.stack.one_of_two else points

    def _site(self, kind: Border, *parts: str) -> Site:
        """What a module of the block is given, or what it returns."""
        return Site(join(self.path, *parts), kind)

    def _add(self, flat: bool, name: str, site: Site, view: View | None = None, **more: Unpack[MoreOfPoint]) -> None:
        """Adds a point of the shape of the stream, whose site holds ``(batch pos)`` rows in a flat part."""
        if flat:
            view, more["sources"] = Composed(view or View(), FlatRows()), self.rows
        self.points.add(name, site, view, **more)

    def _add_stream(self, name: str, site: Site, view: View | None = None, aliases: tuple[str, ...] = ()) -> None:
        """Adds a point of the stream; where the block carries several, of all of them."""
        axes, apart = None, self.stack.stream_view
        if isinstance(apart, SeveralStreams):
            axes = f"batch {self.stack.pos} n_streams d_model"
            view = Composed(view, apart) if view else apart
        self.points.add(name, site, view, axes, aliases=aliases)

    def _is_put_out(self, stream: str) -> bool:
        """Whether a module puts out this stream: its point stands there."""
        return any(named.after == stream and named.step.residual_sum_module for named in self.block.named)

    def _entry(self, step: Step) -> Site:
        """Where a part's input enters it.

        Raises:
            ValueError: it has no module of its own, and two layers read the input.
        """
        part = step.part
        if path := step.entry or part.path:
            return self._site("input", path)
        readers = step.readers
        if len(readers) > 1:
            raise ValueError(
                f"a part of {self.path} has no module of its own, and {' and '.join(readers)} read its input: there is "
                "no one place where it enters. Give it a norm of its own, or a path"
            )
        return self._site("input", readers[0])

    def _add_reading(self, named: NamedStep) -> None:
        """From the stream to what the part reads: the stream between two steps, the part's own input, the norm."""
        step, part = named.step, named.step.part
        flat = isinstance(part, MLP) and part.flat
        entry = self._site("input", step.pre.path) if step.pre else None
        if step.mix:
            self._add_mix(named, step.mix)
        elif named.first and named.before.startswith("hook_resid_mid") and not self._is_put_out(named.before):
            self._add(flat, named.before, entry or self._entry(step), WriteThrough())
        if step.pre is None:
            reads_alone = feeds_forward(part) or (isinstance(part, Mixer) and part.mixes)
            if reads_alone and not named.before.endswith("hook_out"):
                mixed = step.mix is not None and step.mix.by_block  # it reads what the block makes of the streams
                own = self._site("input", step.readers[0]) if mixed else self._entry(step)
                self._add_own_input(named, flat, own, Branch())
            return
        assert entry
        if named.shared and not named.through_one:
            self._add_shared_norm(named, step.pre, entry)
            return
        if not named.leads:
            return  # one module reads the norm for both: there is no place that is this part's alone
        view = WriteThrough() if isinstance(part, MLP) and self.stack.one_of_two else Branch()
        # As in HookedTransformer's encoder-decoder, what the MLP reads there is also what its output is added to.
        self._add_own_input(named, flat, entry, view)
        self._add_norm(named.norm, step.pre, flat, self._separate_readers(named))

    def _add_mix(self, named: NamedStep, mix: Mix) -> None:
        """The streams as they enter what mixes them, and the weights that it makes."""
        at, name = join(self.path, mix.path), named.name
        axes = f"batch {self.stack.pos} n_streams"
        if mix.by_block:
            n, (what,) = self.stack.n_streams or 1, mix.returns
            if named.before.startswith("hook_resid_mid"):
                self.points.add(named.before, self._entry(named.step), WriteThrough())
            every = f"{axes} to_n_streams" if what == "keep" else axes
            self.points.add(f"hook_{name}_{what}", Site(at, "output"), StreamWeights(n), every, group="extra")
            return
        if named.before.startswith("hook_resid_mid"):
            self._add_stream(named.before, Site(at, "input"), WriteThrough())
        self.points.add(f"hook_{name}_write", Site(at, "output", mix.write), axes=axes, group="extra")
        if mix.keep is not None:
            self.points.add(
                f"hook_{name}_keep", Site(at, "output", mix.keep), axes=f"{axes} to_n_streams", group="extra"
            )

    def _add_own_input(
        self, named: NamedStep, flat: bool, entry: Site, view: View, sources: tuple[Site, ...] = ()
    ) -> None:
        """What this part alone reads of the stream."""
        part, hook, norm_in = named.step.part, f"hook_{named.name}_in", f"{named.norm}.hook_in"
        if isinstance(part, Attention) and not part.cross:
            self._add(False, norm_in, entry, view, group="extra", sources=sources)
            return
        cross, feeds = isinstance(part, Attention), feeds_forward(part)
        flag = "use_attn_in" if cross else "use_hook_mlp_in" if feeds else None
        aliases = (norm_in, f"{named.name}.{hook}") if feeds and not self.stack.one_of_two else (norm_in,)
        group: Group = "heavy" if flag else "extra"
        self._add(flat, hook, entry, view, group=group, aliases=aliases, flag=flag, sources=sources)

    def _add_shared_norm(self, named: NamedStep, norm: Norm, entry: Site) -> None:
        """A norm that several parts read: its points are repeated for each, where that part reads it."""
        at = self._entry(named.step)
        if not named.leads:
            self._add_own_input(named, False, at, SharedNormInput(), (entry,))
        separate_consumers = self._separate_readers(named)
        norm_points(self.points, named.norm, norm.kind, at, shared=entry, separate_consumers=separate_consumers)
        self.points.add(f"{named.norm}.hook_out", at, Branch(), group="extra", separate_consumers=separate_consumers)

    def _separate_readers(self, named: NamedStep) -> tuple[str, ...]:
        """Queries, keys and values, which HookedTransformer gives a norm each (see `Point.separate_consumers`)."""
        part = named.step.part
        # With a shift, the norm's output alone does not say what the projections read; keys and values that are made
        # from one latent do not read the norm at all.
        if not isinstance(part, Attention) or part.cross or part.qk_shift or part.q.latent or part.k.latent:
            return ()
        layers = (self._module(join(self.path, part.path, each.path)) for each in part.projections.values())
        if any(getattr(layer, "in_features", self.cfg.d_model) != self.cfg.d_model for layer in layers):
            return ()  # what it reads was made of the norm by another layer (Dots 3)
        return tuple(f"{self.points.prefix}.{named.name}.hook_{letter}" for letter in part.projections)

    def _add_norm(self, name: str, norm: Norm, flat: bool = False, separate_consumers: tuple[str, ...] = ()) -> None:
        site = self._site("output", norm.path)
        view, sources = (FlatRows(), self.rows) if flat else (None, ())
        norm_points(
            self.points, name, norm.kind, site, view=view, sources=sources, separate_consumers=separate_consumers
        )
        seen = Composed(View(), FlatRows()) if flat else None
        if norm.kind.gate:
            self.points.add(f"{name}.hook_gate", self._site("output", norm.path, norm.kind.gate), group="extra")
        self.points.add(
            f"{name}.hook_out", site, seen, group="extra", sources=sources, separate_consumers=separate_consumers
        )

    def _add_inside(self, named: NamedStep) -> None:
        part = named.step.part
        module = join(self.path, part.path)
        if isinstance(part, Attention):
            self._add_attention(named, part, inner=False)
        elif isinstance(part, MLP):
            mlp_points(self.points.inside(named.name), part, module, self.rows)
        elif isinstance(part, MoE):
            experts = self.cfg.num_experts
            if experts is None:
                raise ValueError(f"{module} is declared as a mixture, and config_values has no num_experts")
            held = self._module(join(module, part.experts))
            mixture_points(self.points.inside(named.name), part, module, self.rows, experts, held)
        elif isinstance(part, Mixer):
            inside = self._module(module) if part.mixes else None
            functions = () if inside is None else functions_of(inside)
            for own, each in named.attentions:
                self._add_attention(own, each, inner=True)
                qk_norm_points(self.points.inside(own.name), each, join(self.path, each.path))
            mixer_points(self.points.inside(named.name), part, module, functions, self.rows)

    def _key_pos(self, part: Attention) -> str:
        """The axis of an attention's keys."""
        if part.keys_from == "more":
            return "held_pos"  # a window, and keys that stand for several tokens: no positions
        if part.cross and not self.stack.one_of_two:
            return "memory_pos"
        return "key_pos" if part.cross else self.stack.key_pos

    def _add_attention(self, named: NamedStep, part: Attention, *, inner: bool) -> None:
        norm = named.step.pre
        AttentionPoints(
            self.points,
            named.name,
            part,
            join(self.path, part.path),
            n_heads=part.own("n_heads", self.cfg.n_heads),
            n_kv_heads=part.own("n_key_value_heads", self.cfg.n_kv_heads),
            key_pos=self._key_pos(part),
            norm=self._site("input", norm.path) if norm else None,
            shift=Site(join(self.base, part.qk_shift), "output") if part.qk_shift else None,
            factor=None if inner else named.step.last_factor,
            inner=inner,
        ).add()

    def _module(self, path: str) -> nn.Module | None:
        return module_at(self.model, path) if has_module(self.model, path) else None

    def _add_result(self, named: NamedStep) -> None:
        """What the part returns, and what is added to the stream."""
        step, part, name = named.step, named.step.part, named.name
        flat = isinstance(part, MLP | MoE) and part.flat
        if step.post and step.out == step.post.path:  # a sum that no module puts out
            returned = self._site("input", step.out)
        else:
            returned = Site(join(self.path, step.out or part.path), "output", step.out_element or None)
        projection = {Attention: (f"{name}.o.hook_out",), Mixer: ()}.get(type(part), (f"{name}.out.hook_out",))
        chain = step.output_transform
        scaled = through(chain)
        more = self.rows if chain and parameters_of(chain) else ()
        if step.changes_its_result or chain:
            self._add(flat, f"{name}.hook_out", returned, group="extra", aliases=projection)
        if not step.changes_its_result:
            aliases = () if chain else (f"{name}.hook_out", *projection)
            self._add(flat, f"hook_{name}_out", returned, scaled, aliases=aliases, sources=more)
        if isinstance(part, Attention):
            qk_norm_points(self.points.inside(name), part, join(self.path, part.path))
        if step.post:
            self._add_norm(f"{named.norm}_post", step.post)
            returned, flat = self._site("output", step.post.path), False
        if step.changes_its_result:
            self._add(flat, f"hook_{name}_out", returned, scaled, sources=more)
        if step.residual_sum_module and named.after != "hook_resid_post":
            self.points.add(named.after, self._site("output", step.residual_sum_module))

    def _add_norm_on_the_stream(self, named: NamedStep, norm: Norm, following: Part | None) -> None:
        """The sum of stream and part, and the norm of it, which is the stream from there on."""
        total, norm_in = self._site("input", norm.path), f"{named.norm}.hook_in"
        if following is not None and feeds_forward(following):
            # The norm's output is both what the MLP reads and the skip connection: there is nothing it alone reads.
            self.points.add(named.after, total)
            self.points.add("hook_mlp_in", total, group="heavy", flag="use_hook_mlp_in", aliases=(norm_in,))
        else:
            self.points.add(named.after, total, aliases=(norm_in,))
        self._add_norm(named.norm, norm)


def _renamed(point: Point) -> Point:
    """The same, with TransformerLens 3's names for an encoder's and a decoder's blocks as further aliases."""
    stack = point.stack
    names = tuple(name.replace(f"{stack}.", f"{stack}_blocks.", 1) for name in (point.name, *point.aliases))
    if stack == "decoder":
        other = (name.replace(".attn.", ".self_attn.").replace("resid_mid_cross", "resid_mid2") for name in names)
        names = tuple(dict.fromkeys((*names, *other)))
    return replace(point, aliases=(*point.aliases, *names))
