"""What an adapter produces: hook points, each a site seen through a view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypedDict, Unpack

from torch import Tensor

from adapters.paths import join
from adapters.views import View

#: ``input``: an argument of a module. ``output``: what it returns. ``attention``: inside the attention that it
#: computes. ``softmax``: the softmax in its forward. ``experts``: inside the module that holds a mixture's experts.
#: ``batched experts``: likewise, where it is one product of batches. ``router``: inside the module that chooses them by
#: their logits. ``recurrence``: inside a mixer.
SiteKind = Literal["input", "output", "attention", "softmax", "experts", "batched experts", "router", "recurrence"]
#: ``standard``: in an unfiltered cache. ``heavy``: there when the matching ``set_use_*`` is on. ``extra``: when named.
Group = Literal["standard", "heavy", "extra"]


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the model's own computation.

    Attributes:
        path: the module, as a dotted path from the Hugging Face model.
        kind: see `SiteKind`.
        key: for an input, the name of the argument (None: the first); for an output, which element of a tuple (None:
            the output itself); inside attention, one of ``q``, ``k``, ``scores`` (what enters the softmax),
            ``pattern`` (what leaves it); inside expert e, ``{e}.in`` and ``{e}.out`` (its input and its output),
            ``{e}.gate``, ``{e}.pre`` (before and parallel to the activation function) and ``{e}.post`` (what enters its
            last projection); in a router, ``logits`` (of all experts, that the best are chosen from), ``product``
            (what its matrix makes of its input) and ``weights`` (of all, zero for those that are not chosen); in a
            mixer, a channel of `adapters.mixers.functions`, or ``state``.
    """

    path: str
    kind: SiteKind
    key: int | str | None = None


@dataclass(frozen=True, slots=True)
class LinkedPoint:
    """A point that takes over what was written at another one (`hook_attn_in` feeds the query, key and value inputs).

    Attributes:
        name: the point that takes over.
        convert: from the value written to the linked point's own activation.
    """

    name: str
    convert: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Point:
    """A hook point as an adapter declares it.

    Attributes:
        name: the canonical name.
        site, view: where it stands and how the tensor there is seen.
        axes: the axes of the activation, such as ``batch pos d_model``.
        depth: -1 before the blocks, the block's index inside, the number of blocks after.
        group: see `Group`.
        aliases: other names for it.
        sources: further sites whose tensors the view needs.
        linked: see `LinkedPoint`.
        separate_consumers: the points that read this one separately in HookedTransformer, which runs the norm before
            attention once for each of query, key and value: a gradient is taken for each of them.
        stack: the list of blocks it belongs to (``blocks``, ``encoder``, ``decoder``), or "" outside of all.
        n_heads: of a point inside attention, how many heads it shows, whatever the kernel repeats or packs.
        flag: for a heavy point, the ``cfg.use_*`` field that includes it in an unfiltered cache.
    """

    name: str
    site: Site
    view: View
    axes: str
    depth: int
    group: Group = "standard"
    aliases: tuple[str, ...] = ()
    sources: tuple[Site, ...] = ()
    linked: tuple[LinkedPoint, ...] = ()
    separate_consumers: tuple[str, ...] = ()
    stack: str = "blocks"
    flag: str | None = None
    n_heads: int | None = None


class MoreOfPoint(TypedDict, total=False):
    """What may be said of a point besides, see `Point`."""

    group: Group
    aliases: tuple[str, ...]
    sources: tuple[Site, ...]
    linked: tuple[LinkedPoint, ...]
    separate_consumers: tuple[str, ...]
    flag: str | None
    n_heads: int | None


@dataclass(frozen=True)
class PointList:
    """Collects the points of one part of a model, in the order of the computation.

    Attributes:
        prefix: what all their names begin with, such as ``blocks.3.attn``.
        depth, stack: of all of them, see `Point`.
        pos: the axis of positions.
        points: what was added so far; shared with the lists made by `inside`.
    """

    prefix: str
    depth: int
    stack: str
    pos: str = "pos"
    points: list[Point] = field(default_factory=list)

    def inside(self, name: str) -> PointList:
        """The same list, for names that begin with a further word."""
        return PointList(join(self.prefix, name), self.depth, self.stack, self.pos, self.points)

    def add(
        self, name: str, site: Site, view: View | None = None, axes: str | None = None, **more: Unpack[MoreOfPoint]
    ) -> None:
        """Adds a point.

        Args:
            name: behind the prefix.
            site: see `Point`.
            view: see `Point`; None: the site's tensor as it is.
            axes: see `Point`; None: those of the residual stream.
            more: see `Point`; aliases are behind the prefix, but for those that begin with a dot.
        """
        more["aliases"] = tuple(
            alias[1:] if alias.startswith(".") else join(self.prefix, alias) for alias in more.get("aliases", ())
        )
        own, axes = join(self.prefix, name), axes or f"batch {self.pos} d_model"
        self.points.append(Point(own, site, view or View(), axes, self.depth, stack=self.stack, **more))
