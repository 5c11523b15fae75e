"""The attention part: queries, keys, values, scores, pattern, z, and what is derived from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from adapters.linear import bias_of, head_results, project_per_head
from adapters.points import Follower, Point, Site
from adapters.views import Branch, Call, Derived, Heads, HeadsFirst, MaskedScores, SinkPattern, SinkScores, View


@dataclass(frozen=True)
class PerHeadInput(Derived):
    """The residual stream as each head's query (key, value) reads it, before the norm: ``[batch, pos, head, d_model]``.

    It stands on the output of the projection; an edit is normalised and projected by the model's own modules. Without
    sources there is no norm. A second source is what the model adds after the norm (see `Block.qk_shift`).
    """

    part: View
    n_heads: int

    def get(self, x: Tensor, call: Call) -> Tensor:
        entered = call.sources[0][1] if call.sources else call.input
        return entered.unsqueeze(-2).expand(*entered.shape[:-1], self.n_heads, -1)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        # `forward`, not a call: the hook points that stand on the norm see the model's own computation only.
        normed = call.sources[0][0].forward(new) if call.sources else new
        for _, shift in call.sources[1:]:
            normed = normed + shift.unsqueeze(-2)
        return self.part.put(x, project_per_head(call.module, self.part, normed, call), call)


@dataclass(frozen=True)
class EveryHeadInput(Derived):
    """`hook_attn_in`: one input per head for query, key and value together; its followers do the writing."""

    n_heads: int

    def get(self, x: Tensor, call: Call) -> Tensor:
        return call.input.unsqueeze(-2).expand(*call.input.shape[:-1], self.n_heads, -1)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return x


@dataclass(frozen=True)
class HeadResults(Derived):
    """`hook_result`: what each head adds to the residual stream, ``[batch, pos, head, d_model]``."""

    n_heads: int

    def get(self, x: Tensor, call: Call) -> Tensor:
        return head_results(call.module, call.input.unflatten(-1, (self.n_heads, -1)))

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return (new.sum(-2) + bias_of(call.module, call.input)).to(x.dtype)


@dataclass(frozen=True)
class Projection:
    """Where queries (keys, values) are made.

    Attributes:
        path: the module, relative to the attention module.
        part: how its output shows the heads; None: all of it, ``(head d_head)``.
    """

    path: str
    part: View | None = None


@dataclass(frozen=True)
class Attention:
    """An attention module.

    Attributes:
        path: the attention module, relative to the block.
        q, k, v: the projections, relative to the attention module.
        o: the output projection, relative to the attention module.
        out: where the result stands that is added to the residual stream, relative to the block; by default element 0
            of the attention module's output. ``out_key`` is the element, None for a module that returns a tensor.
        rotary: queries and keys are rotated.
        tap: how the scores are reached. ``interface``: the module calls transformers' `AttentionInterface`;
            ``forward``: it computes the softmax in its own forward; ``core``: in its method ``_attn``, which is given
            queries, keys and values; None: there is no softmax (linear attention, flash attention of its own).
        scores: how the scores are seen.
        sinks: where the last column of the scores is an attention sink: the name of the attention module's parameter
            that holds each head's.
        q_norm, k_norm: norms of queries and keys, relative to the attention module (see `Block.qk_norm`).
        norm_heads_first: those norms are given ``batch head pos d_head``.
        core: the module that computes scores and pattern, relative to `path`, where it is not that module itself.
        name: the canonical name of the part within the block.
    """

    path: str
    q: Projection
    k: Projection
    v: Projection
    o: str
    out: str | None = None
    out_key: int | None = 0
    rotary: bool = False
    tap: Literal["interface", "forward", "core"] | None = "interface"
    scores: View = field(default_factory=MaskedScores)
    sinks: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    norm_heads_first: bool = False
    core: str = ""
    name: str = "attn"


def attention_points(
    part: Attention,
    root: nn.Module,
    block: str,
    prefix: str,
    depth: int,
    n_heads: int,
    n_kv_heads: int,
    norm: Site | None,
    stack: str,
    out_name: str | None = "hook_attn_out",
    shift: Site | None = None,
    pos: str = "pos",
    key_pos: str = "key_pos",
    per_head_inputs: bool = True,
) -> list[Point]:
    """The hook points of one attention module.

    Args:
        part: the declaration.
        root: the Hugging Face model.
        block: the path of the block.
        prefix: the canonical name of the block, such as ``blocks.3``.
        depth: the block's index.
        n_heads, n_kv_heads: numbers of query heads, and of key and value heads.
        norm: the site at which the attention's input enters its norm (None: not normed).
        stack: the list of blocks.
        out_name: the canonical name of the attention's output, or None when a later norm's output takes that role.
        shift: what is added to the inputs of queries and keys after the norm.
        pos, key_pos: the axes of queries and of keys (a decoder's differ from its encoder's).
        per_head_inputs: whether query, key and value read the same stream, so that each head can be given its own.
    """
    module = f"{block}.{part.path}"
    name = f"{prefix}.{part.name}"
    views = {
        letter: (projection, projection.part or Heads(heads), heads)
        for letter, projection, heads in (("q", part.q, n_heads), ("k", part.k, n_kv_heads), ("v", part.v, n_kv_heads))
    }
    core = f"{module}.{part.core}" if part.core else module
    shared = len({projection.path for projection, _, _ in views.values()}) < 3
    own = "" if part.name == "attn" else f"{part.name}_"

    points: list[Point] = []

    def add(suffix: str, site: Site, view: View, axes: str, **more) -> None:  # type: ignore[no-untyped-def]
        points.append(Point(suffix, site, view, axes, depth, stack=stack, **more))

    inputs = {letter: f"{prefix}.hook_{own}{letter}_input" for letter in views}
    if norm is not None and per_head_inputs:
        group_size = n_heads // n_kv_heads

        def by_group(value: Tensor) -> Tensor:
            # A key head serves several query heads: it reads the mean of their inputs (all equal unless edited).
            return value if group_size == 1 else value.unflatten(-2, (n_kv_heads, group_size)).mean(-2)

        add(
            f"{prefix}.hook_{own}attn_in",
            Site(norm.path, "output", None),
            EveryHeadInput(n_heads),
            f"batch {pos} n_heads d_model",
            group="heavy",
            flag="use_attn_in",
            aliases=(f"{name}.hook_attn_in",),
            followers=(
                Follower(inputs["q"], lambda value: value),
                Follower(inputs["k"], by_group),
                Follower(inputs["v"], by_group),
            ),
        )
    for letter, (projection, view, heads) in views.items() if per_head_inputs else ():
        add(
            inputs[letter],
            Site(f"{module}.{projection.path}", "output"),
            PerHeadInput(view, heads),
            f"batch {pos} {'n_heads' if letter == 'q' else 'n_key_value_heads'} d_model",
            group="heavy",
            flag="use_split_qkv_input",
            sources=tuple(site for site in (norm, shift if letter != "v" else None) if site),
            aliases=(f"{name}.hook_{letter}_input",),
        )
    for letter, (projection, view, _) in views.items():
        own_pos = pos if letter == "q" or per_head_inputs else key_pos
        axes = f"batch {own_pos} {'n_heads' if letter == 'q' else 'n_key_value_heads'} d_head"
        site = Site(f"{module}.{projection.path}", "output")
        add(f"{name}.hook_{letter}", site, view, axes, aliases=(f"{name}.{letter}.hook_out",))
        if not shared:
            add(
                f"{name}.{letter}.hook_in",
                Site(site.path, "input"),
                Branch(),
                f"batch {own_pos} d_model",
                group="extra",
            )
    if part.tap is not None:
        if part.rotary and part.tap != "forward":
            for letter in "qk":
                axes = f"batch {f'{pos} n_heads' if letter == 'q' else f'{key_pos} n_key_value_heads'} d_head"
                heads = n_heads if letter == "q" else n_kv_heads
                add(f"{name}.hook_rot_{letter}", Site(core, part.tap, letter), HeadsFirst(), axes, n_heads=heads)
        scores = SinkScores(part.scores, part.sinks) if part.sinks else part.scores
        pattern = SinkPattern(part.sinks) if part.sinks else View()
        square = f"batch n_heads {pos} {key_pos}"
        add(f"{name}.hook_attn_scores", Site(core, part.tap, "scores"), scores, square, n_heads=n_heads)
        add(f"{name}.hook_pattern", Site(core, part.tap, "pattern"), pattern, square, n_heads=n_heads)
    output_projection = f"{module}.{part.o}"
    add(
        f"{name}.hook_z",
        Site(output_projection, "input"),
        Heads(n_heads),
        f"batch {pos} n_heads d_head",
        aliases=(f"{name}.o.hook_in",),
    )
    add(
        f"{name}.hook_result",
        Site(output_projection, "output"),
        HeadResults(n_heads),
        f"batch {pos} n_heads d_model",
        group="heavy",
        flag="use_attn_result",
    )
    out = Site(f"{block}.{part.out}", "output", part.out_key) if part.out else Site(module, "output", part.out_key)
    if out_name is not None:
        aliases = (f"{name}.hook_out", f"{name}.o.hook_out")
        add(f"{prefix}.{out_name}", out, View(), f"batch {pos} d_model", aliases=aliases)
    else:
        add(f"{name}.hook_out", out, View(), "batch pos d_model", group="extra", aliases=(f"{name}.o.hook_out",))
    return points
