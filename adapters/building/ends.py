"""The hook points before the first block and behind the last."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from torch import nn

from adapters.architecture import Architecture, Head, Stack
from adapters.norms import Norm, norm_points
from adapters.paths import call_number, has_module, join, module_path, path_from
from adapters.points import Point, PointList, Site
from adapters.views import Composed, Copied, PositionsFirst, Scaled, WithBatchAxis


def embedding_points(architecture: Architecture, base: str) -> list[Point]:
    """The hook points of the embeddings, in the order in which they are computed.

    Args:
        architecture: what the adapter declares.
        base: the path of the model without its head.
    """
    tokens = Site(join(base, architecture.embed), "output")
    points = PointList("", -1, "")
    together = architecture.embeddings is not None  # HookedTransformer's encoder has one part for all of them
    points.add("embed.hook_in", Site(tokens.path, "input"), axes="batch pos", group="extra")
    norm, project = architecture.embed_norm, architecture.embed_project
    width = "d_model" if architecture.d_embed is None else str(architecture.d_embed)
    axes = f"batch pos {width}"  # of the embeddings
    total = axes if project == architecture.embeddings else None  # of their sum
    scaled = Scaled(architecture.embed_factor) if architecture.embed_factor != 1 else None
    if together:
        points.add("embed.hook_embed", tokens, scaled, axes, aliases=("hook_embed", "embed.hook_out"))
        if project and project != architecture.embeddings:
            points.add("embed.hook_projected", Site(join(base, project), "output"))
    else:
        embed = Site(join(base, norm.path), "output") if norm else tokens
        if norm:
            norm_points(points, "embed.ln", norm.kind, embed)
        points.add("hook_embed", embed, None if norm else scaled, aliases=("embed.hook_out",))
    if architecture.token_types:
        points.add("embed.hook_token_type_embed", Site(join(base, architecture.token_types), "output"), axes=total)
    for path in architecture.more_embeds:
        site = Site(join(base, path), "output")
        points.add(more_embed_name(path), site, WithBatchAxis(), total, group="extra", sources=(tokens,))
    if architecture.pos_embed:
        site = Site(join(base, architecture.pos_embed), "output")
        names = ("hook_pos_embed", "pos_embed.hook_out")
        name, aliases = ("embed.hook_pos_embed", names) if together else (names[0], names[1:])
        points.add(name, site, WithBatchAxis(), total, aliases=aliases, sources=(tokens,))
    if architecture.embeddings is not None:
        if norm:
            norm_points(points, "embed.ln", norm.kind, Site(join(base, norm.path), "output"), axes=total)
        points.add("hook_full_embed", Site(join(base, architecture.embeddings), "output"))
    found = copied(points.points, {(join(base, path), kind) for path, kind in architecture.changed_in_place})
    return batch_first(found) if architecture.stack.positions_first else found


def batch_first(points: list[Point]) -> list[Point]:
    """The points of modules that are given positions first, with the batch first."""
    return [
        replace(point, view=Composed(point.view, PositionsFirst())) if point.axes.startswith("batch pos") else point
        for point in points
    ]


def copied(points: list[Point], changed: Set[tuple[str, str]]) -> list[Point]:
    """The points, of which those that stand where the model writes over show copies."""
    return [
        replace(point, view=Copied(point.view)) if (point.site.path, point.site.kind) in changed else point
        for point in points
    ]


def more_embed_name(path: str) -> str:
    """The hook point of one of an architecture's `more_embeds`."""
    number = call_number(path)
    return f"embed.{module_path(path).rpartition('.')[2]}{f'_{number + 1}' if number else ''}.hook_out"


def add_own_embeddings(points: PointList, stack: Stack, embed: str, base: str) -> None:
    """The embeddings of a stack's own tokens."""
    tokens = Site(join(base, embed), "output")
    scaled = Scaled(stack.embed_factor) if stack.embed_factor != 1 else None
    points.add(f"{stack.name}_embed.hook_out", tokens, scaled, group="extra")
    if stack.pos_embed:
        site = Site(join(base, stack.pos_embed), "output")
        points.add(f"{stack.name}_pos_embed.hook_out", site, WithBatchAxis(), group="extra", sources=(tokens,))
    if stack.token_types:
        points.add(
            f"{stack.name}_token_type_embed.hook_out", Site(join(base, stack.token_types), "output"), group="extra"
        )
    if stack.embed_norm:
        norm_points(
            points, f"{stack.name}_embed.ln", stack.embed_norm.kind, Site(join(base, stack.embed_norm.path), "output")
        )


def add_collapse(points: PointList, base: str, path: str) -> None:
    """What is made of several streams behind the last block."""
    points.add("hook_resid_final", Site(join(base, path), "output"), aliases=("ln_final.hook_in",))


def add_final_norm(points: PointList, stack: Stack, base: str, norm: Norm) -> None:
    """Adds the hook points of the norm behind a stack's last block.

    Args:
        points: they are added to it.
        stack: the stack.
        base: the path of the model without its head.
        norm: its norm.
    """
    site = Site(join(base, norm.path), "output")
    name = f"{stack.name}_final_ln" if stack.one_of_two else "ln_final"
    aliases = (f"{stack.name}_ln_final.hook_out",) if stack.one_of_two else ()
    norm_points(points, name, norm.kind, site)
    points.add(f"{name}.hook_out", site, group="extra", aliases=aliases)


def add_head(points: PointList, head: Head, model: nn.Module) -> None:
    """Adds the hook points of a layer between the last norm and the unembedding, if this class of models has it.

    Args:
        points: they are added to it.
        head: the layer.
        model: the model.
    """
    path = path_from(model, head.path)
    if not has_module(model, path):
        return
    if head.norm:
        axes = None if head.width is None else f"batch {points.pos} {head.width}"
        norm_points(
            points, f"{head.name}.ln", head.norm.kind, Site(path_from(model, head.norm.path), "output"), axes=axes
        )
    if head.hook:
        points.add(f"{head.name}.{head.hook}", Site(path, "output"), axes=head.axes)


def add_unembedding(points: PointList, architecture: Architecture, model: nn.Module) -> None:
    """Adds the hook points of the unembedding, if this class of models has one.

    Args:
        points: they are added to it.
        architecture: what the adapter declares.
        model: the model.
    """
    path = path_from(model, "." + architecture.unembed)
    if architecture.unembed and has_module(model, path):
        width = next((head.width for head in architecture.heads if head.unembeds and head.width), None)
        entered = None if width is None else f"batch {points.pos} {width}"
        points.add("unembed.hook_in", Site(path, "input"), axes=entered, group="extra")
        axes = f"batch {points.pos} d_vocab_out"
        points.add("unembed.hook_out", Site(path, "output"), axes=axes, group="extra", aliases=("hook_unembed",))
