"""The hook points before the first block and behind the last."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from adapters.architecture import Architecture, Stack
from adapters.norms import Norm, norm_points
from adapters.paths import call_number, has_module, join, module_at, module_path, path_from
from adapters.points import Point, PointList, Site
from adapters.stream_ends import Embedding, Head
from adapters.views import Composed, Copied, Patches, PositionsFirst, Scaled, View, WithBatchAxis


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
    scaled = Scaled(made.factor) if made.factor != 1 else None
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
        view = Patches() if isinstance(module_at(model, site.path), nn.Conv2d) else None
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
    scaled = Scaled(made.factor) if made.factor != 1 else None
    points.add(f"{stack.name}_embed.hook_out", tokens, scaled, group="extra")
    if made.positions:
        site = Site(join(base, made.positions), "output")
        view, sources = _of_positions(made, tokens)
        points.add(f"{stack.name}_pos_embed.hook_out", site, view, group="extra", sources=sources)
    if made.types:
        points.add(f"{stack.name}_token_type_embed.hook_out", Site(join(base, made.types), "output"), group="extra")
    if made.norm:
        norm_points(points, f"{stack.name}_embed.ln", made.norm.kind, Site(join(base, made.norm.path), "output"))


def add_collapse(points: PointList, base: str, path: str) -> None:
    """What is made of several streams behind the last block."""
    points.add("hook_resid_final", Site(join(base, path), "output"), aliases=("ln_final.hook_in",))


def add_final_norm(
    points: PointList, architecture: Architecture, stack: Stack, base: str, norm: Norm, model: nn.Module
) -> None:
    """Adds the hook points of the norm behind a stack's last block.

    Args:
        points: they are added to it.
        architecture: what the adapter declares.
        stack: the stack.
        base: the path of the model without its head.
        norm: its norm. What a function puts out is seen where the output layer reads it.
        model: the model.
    """
    site, shared = Site(join(base, norm.path), "output"), None
    if norm.kind.function:
        path = path_from(model, "." + architecture.readout.path)
        if not architecture.readout.path or not has_module(model, path):
            return
        last = join(base, stack.place_of(len(stack.modules(model.get_submodule(base))) - 1))
        site, shared = Site(path, "input"), Site(last, "output", stack.output[0])
    name = f"{stack.name}_final_ln" if stack.one_of_two else "ln_final"
    aliases = (f"{stack.name}_ln_final.hook_out",) if stack.one_of_two else ()
    axes = "batch d_model" if stack.pooled else None
    norm_points(points, name, norm.kind, site, shared=shared, axes=axes)
    points.add(f"{name}.hook_out", site, axes=axes, group="extra", aliases=aliases)


def _width_behind(head: Head, model: nn.Module, d_model: int) -> str:
    """The axis of what the layer of a head makes."""
    width = getattr(module_at(model, path_from(model, head.linear)), "out_features", d_model)
    return "d_model" if width == d_model else str(width)


def add_head(points: PointList, head: Head, model: nn.Module, d_model: int) -> None:
    """Adds the hook points of a layer between the last norm and the unembedding, if this class of models has it.

    Args:
        points: they are added to it.
        head: the layer.
        model: the model.
        d_model: how wide the residual stream is.
    """
    path = path_from(model, head.path)
    if not has_module(model, path):
        return
    width = _width_behind(head, model, d_model)
    if head.norm:
        norm = Site(path_from(model, head.norm.path), "output")
        norm_points(points, f"{head.name}.ln", head.norm.kind, norm, axes=f"batch {points.pos} {width}")
    if head.hook:
        points.add(f"{head.name}.{head.hook}", Site(path, "output"), axes=f"batch {width}")


def add_unembedding(points: PointList, architecture: Architecture, model: nn.Module, d_model: int) -> None:
    """Adds the hook points of the unembedding, if this class of models has one.

    Args:
        points: they are added to it.
        architecture: what the adapter declares.
        model: the model.
        d_model: how wide the residual stream is.
    """
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
