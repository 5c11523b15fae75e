"""The attention part: queries, keys, values, scores, pattern, z, and what is derived from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from einops import reduce
from torch import Tensor

from adapters.linear import bias_of, head_results, project_per_head
from adapters.norms import Norm, norm_points
from adapters.paths import join, module_path
from adapters.points import LinkedPoint, PointList, Site
from adapters.views import (
    Biased,
    Branch,
    Call,
    Composed,
    Derived,
    Heads,
    HeadsFirst,
    HeadsOfBatch,
    MaskedScores,
    SinkPattern,
    SinkScores,
    View,
)


@dataclass(frozen=True)
class PerHeadInput(Derived):
    """The residual stream as each head's query (key, value) reads it, before the norm: ``[batch, pos, head, d_model]``.

    It stands on the output of the projection; an edit is normalised and projected by the model's own modules. Without
    sources there is no norm. A second source is what the model adds after the norm (see `Attention.qk_shift`).
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
    """`hook_attn_in`: one input per head for query, key and value together; its linked points do the writing."""

    n_heads: int

    def get(self, x: Tensor, call: Call) -> Tensor:
        return call.input.unsqueeze(-2).expand(*call.input.shape[:-1], self.n_heads, -1)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return x


@dataclass(frozen=True)
class HeadResults(Derived):
    """`hook_result`: what each head adds to the residual stream, ``[batch, pos, head, d_model]``."""

    n_heads: int
    #: What the output projection's result is multiplied with before it is added.
    factor: float = 1.0

    def get(self, x: Tensor, call: Call) -> Tensor:
        results = head_results(call.module, call.input.unflatten(-1, (self.n_heads, -1)))
        return results if self.factor == 1 else results * self.factor

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        total = new.sum(-2) if self.factor == 1 else new.sum(-2) / self.factor
        return (total + bias_of(call.module, call.input)).to(x.dtype)


@dataclass(frozen=True)
class Projection:
    """Where queries (keys, values) are made.

    Attributes:
        path: the module, relative to the attention module.
        part: how its output shows the heads; None: all of it, ``(head d_head)``.
    """

    path: str
    part: View | None = None


#: What a gate's projection goes through, by name.
GATE_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
    "tanh": torch.tanh,
}


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
        shows_scores: its scores and pattern can be seen: it calls a softmax, `scaled_dot_product_attention` or
            transformers' `AttentionInterface`. False for linear attention, or flash attention of a family's own.
        scores: how the scores are seen.
        sinks: where the last column of the scores is an attention sink: the name of the attention module's parameter
            that holds each head's.
        q_norm, k_norm: norms of queries and keys, relative to the attention module.
        qk_norm_over: what those norms are given: each head, as ``batch pos head d_head`` (``heads``) or as ``batch head
            pos d_head`` (``heads first``), or all heads at once, ``batch pos (head d_head)`` (``width``).
        qk_norm_last: these norms are given rotated queries and keys: what they put out enters the product.
        qk_shift: the module whose output is added to what queries and keys read, after the norm (Shortformer's position
            embeddings), relative to the base model.
        position_bias: the module of a position bias that is added to the scores, relative to the attention module; a
            layer may lack it and use the first one's.
        core: the module that computes scores and pattern, relative to `path`, where it is not that module itself.
        cross: keys and values are made from an encoder's output.
        q_latent, kv_latent: the modules whose outputs are the latents that queries, and keys and values, are made from,
            relative to the attention module ("": there is one, that no module puts out). Keys are then what is made
            from the latent; a part that all heads share is in `hook_rot_k` only.
        n_heads, n_kv_heads: its numbers of heads, where they are not those of `ModelConfig`.
        z_is: what stands between ``pattern @ v`` and `hook_z`, which is what enters the output projection: a ``gate``
            (see `gate`), a ``norm``, a ``factor`` (`z_factor`); or ``sink``: the sigmoid of the scores' log-sum-exp
            less each head's parameter, whose name `z_sinks` is. None: nothing.
        z_factor: the factor that `z` is ``pattern @ v`` times.
        gate: the projection that makes the gate, with one column for each of a head's, or one for each head.
        gate_fn: the name of its activation function, of `GATE_FUNCTIONS`.
        v_norm: a norm of the values, relative to the attention module: the pattern is multiplied with what it puts out.
        flat_heads: scores and pattern are ``[(batch head), query, key]``.
        clip: queries, keys and values are clamped to this behind their projections, which the hook points stand on.
        q_bias, k_bias, v_bias: parameters that are added behind the projections, relative to the attention module:
            `hook_q` (`hook_k`, `hook_v`) shows the sum (DeBERTa).
        adds: something that queries alone, keys alone, or places alone make is added to the product of queries and keys
            (relative positions, as in DeBERTa and MPNet): the modules inside that make it, relative to the attention
            module; none, where others do. None: nothing is added, but for a `position_bias` or ALiBi.
        branch: a module that reads the values too, and whose output is added to ``pattern @ v`` (Nystroemformer's
            convolution), relative to the attention module; it returns ``batch head pos d_head``.
        scale: what its product of queries and keys is divided by, where that is not `ModelConfig.attn_scale`.
        rotary_dim, rotary_base: of its rotation, where they are not the model's.
        shared_keys: keys made from a latent have further columns, which all heads share and nothing rotates:
            `hook_rot_q` and `hook_rot_k` show what enters the product.
        beside: further modules inside that make something of their own (an indexer), relative to the attention module,
            with the axes of what they return.
        d_q, d_k, d_v: how wide a head's queries, keys and values are, where that is not its `d_head`.
    """

    path: str
    q: Projection
    k: Projection
    v: Projection
    o: str
    out: str | None = None
    out_key: int | None = 0
    rotary: bool = False
    shows_scores: bool = True
    scores: View = field(default_factory=MaskedScores)
    sinks: str | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    qk_norm_over: Literal["heads", "heads first", "width"] = "heads"
    qk_norm_last: bool = False
    qk_shift: str | None = None
    position_bias: str | None = None
    core: str = ""
    cross: bool = False
    q_latent: str | None = None
    kv_latent: str | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    z_is: Literal["gate", "norm", "factor", "sink"] | None = None
    z_factor: float = 1.0
    gate: Projection | None = None
    gate_fn: str | None = None
    z_sinks: str | None = None
    v_norm: Norm | None = None
    flat_heads: bool = False
    clip: float | None = None
    q_bias: str | None = None
    k_bias: str | None = None
    v_bias: str | None = None
    adds: tuple[str, ...] | None = None
    branch: str | None = None
    scale: float | None = None
    rotary_dim: int | None = None
    rotary_base: float | None = None
    shared_keys: bool = False
    beside: tuple[tuple[str, str], ...] = ()
    d_q: int | None = None
    d_k: int | None = None
    d_v: int | None = None

    def bias(self, letter: str) -> str | None:
        """The parameter that is added to queries (``q``), keys (``k``) or values (``v``)."""
        return {"q": self.q_bias, "k": self.k_bias, "v": self.v_bias}[letter]

    def latent(self, letter: str) -> str | None:
        """The latent that queries (``q``), keys (``k``) or values (``v``) are made from."""
        return self.q_latent if letter == "q" else self.kv_latent

    def heads(self, letter: str) -> str:
        """The axis of the heads of queries, keys, values, or of the rotated ones."""
        if letter == "q":
            return "n_heads" if self.n_heads is None else str(self.n_heads)
        return "n_key_value_heads" if self.n_kv_heads is None else str(self.n_kv_heads)

    def width(self, letter: str) -> str:
        """The axis of one head's columns."""
        own = {"q": self.d_q, "k": self.d_k, "v": self.d_v}[letter]
        return "d_head" if own is None else str(own)


def attention_points(
    points: PointList,
    name: str,
    part: Attention,
    module: str,
    n_heads: int,
    n_kv_heads: int,
    *,
    key_pos: str = "key_pos",
    norm: Site | None = None,
    shift: Site | None = None,
    factor: float | None = 1.0,
) -> None:
    """Adds the points of one attention module, but for its output.

    Args:
        points: what they are added to; its prefix is the block's.
        name: of the part: ``attn``, ``cross_attn``.
        part: the declaration.
        module: the path of the attention module.
        n_heads, n_kv_heads: numbers of query heads, and of key and value heads.
        key_pos: the axis of keys.
        norm: the site at which the attention's input enters its norm (None: not normed).
        shift: what is added to the inputs of queries and keys after the norm.
        factor: what its result is multiplied with before it is added to the stream; None: no constant, so that what
            each head adds is not shown.
    """
    pos = points.pos
    n_heads, n_kv_heads = part.n_heads or n_heads, part.n_kv_heads or n_kv_heads
    inner = points.inside(name)
    own = "" if name == "attn" else f"{name}_"
    letters = {
        letter: (projection, projection.part or Heads(heads), heads)
        for letter, projection, heads in (("q", part.q, n_heads), ("k", part.k, n_kv_heads), ("v", part.v, n_kv_heads))
    }
    if not part.cross:  # query, key and value read the same stream: each head can be given its own
        if norm is not None and part.q_latent is None and part.kv_latent is None:
            _add_every_head_input(points, name, own, norm, n_heads, n_kv_heads, part.heads("q"))
        for letter, (projection, view, heads) in letters.items():
            if part.latent(letter) is not None:
                continue
            points.add(
                f"hook_{own}{letter}_input",
                Site(join(module, projection.path), "output"),
                PerHeadInput(view, heads),
                f"batch {pos} {part.heads(letter)} d_model",
                group="heavy",
                flag="use_split_qkv_input",
                sources=tuple(site for site in (norm, shift if letter != "v" else None) if site),
                aliases=(f"{name}.hook_{letter}_input",),
            )
    for name_of, latent in (("q", part.q_latent), ("kv", part.kv_latent)):
        if latent:
            inner.add(
                f"hook_{name_of}_latent", Site(join(module, latent), "output"), axes=f"batch {pos} d_{name_of}_latent"
            )
    fused = len({projection.path for projection, _, _ in letters.values()}) < 3
    for letter, (projection, view, _) in letters.items():
        own_pos = key_pos if part.cross and letter != "q" else pos
        site = Site(join(module, projection.path), "output")
        axes = f"batch {own_pos} {part.heads(letter)} {part.width(letter)}"
        shown: View = view
        sources: tuple[Site, ...] = ()
        if bias := part.bias(letter):
            holder, _, name = bias.rpartition(".")
            shown, sources = Biased(view, name), (Site(join(module, holder), "input"),)
        inner.add(f"hook_{letter}", site, shown, axes, aliases=(f"{letter}.hook_out",), sources=sources)
        if not fused and part.latent(letter) is None:
            entered = Site(site.path, "input")
            inner.add(f"{letter}.hook_in", entered, Branch(), f"batch {own_pos} d_model", group="extra")
    if part.shows_scores:
        core = join(module, part.core)
        if part.rotary or part.shared_keys:
            for letter, own_pos in (("q", pos), ("k", key_pos)):
                axes = f"batch {own_pos} {part.heads(letter)} {part.width('q')}"
                heads = n_heads if letter == "q" else n_kv_heads
                inner.add(f"hook_rot_{letter}", Site(core, "attention", letter), HeadsFirst(), axes, n_heads=heads)
        square = f"batch {part.heads('q')} {pos} {key_pos}"
        scores = SinkScores(part.scores, part.sinks) if part.sinks else part.scores
        pattern: View = SinkPattern(part.sinks) if part.sinks else View()
        if part.flat_heads:
            scores, pattern = Composed(HeadsOfBatch(n_heads), scores), Composed(HeadsOfBatch(n_heads), pattern)
        inner.add("hook_attn_scores", Site(core, "attention", "scores"), scores, square, n_heads=n_heads)
        inner.add("hook_pattern", Site(core, "attention", "pattern"), pattern, square, n_heads=n_heads)
    for path in part.adds or ():
        made = module_path(path).rpartition(".")[2]
        inner.add(f"{made}.hook_places", Site(join(module, path), "output"), axes=f"one places d_{made}", group="extra")
    for path, axes in part.beside:
        named = " ".join(pos if axis == "pos" else axis for axis in axes.split())
        inner.add(f"{module_path(path)}.hook_out", Site(join(module, path), "output"), axes=named, group="extra")
    if part.branch:
        axes = f"batch {part.heads('q')} {pos} {part.width('v')}"
        inner.add("hook_branch", Site(join(module, part.branch), "output"), axes=axes, group="extra")
    if part.gate:
        gate = Site(join(module, part.gate.path), "output")
        inner.add(
            "hook_gate", gate, part.gate.part or Heads(n_heads), f"batch {pos} {part.heads('q')} d_gate", group="extra"
        )
    output = join(module, part.o)
    z_axes = f"batch {pos} {part.heads('q')} {part.width('v')}"
    inner.add("hook_z", Site(output, "input"), Heads(n_heads), z_axes, aliases=("o.hook_in",))
    if factor is not None:
        inner.add(
            "hook_result",
            Site(output, "output"),
            HeadResults(n_heads, factor),
            f"batch {pos} {part.heads('q')} d_model",
            group="heavy",
            flag="use_attn_result",
        )


def _add_every_head_input(
    points: PointList, name: str, own: str, norm: Site, n_heads: int, n_kv_heads: int, axis: str
) -> None:
    group_size = n_heads // n_kv_heads

    def by_group(value: Tensor) -> Tensor:
        # A key head serves several query heads: it reads the mean of their inputs (all equal unless edited).
        return value if group_size == 1 else reduce(value, "b p (kv group) d -> b p kv d", "mean", kv=n_kv_heads)

    convert: dict[str, Callable[[Tensor], Tensor]] = {"q": lambda value: value, "k": by_group, "v": by_group}
    points.add(
        f"hook_{own}attn_in",
        Site(norm.path, "output"),
        EveryHeadInput(n_heads),
        f"batch {points.pos} {axis} d_model",
        group="heavy",
        flag="use_attn_in",
        aliases=(f"{name}.hook_attn_in",),
        linked=tuple(
            LinkedPoint(join(points.prefix, f"hook_{own}{letter}_input"), function)
            for letter, function in convert.items()
        ),
    )


def qk_norm_points(points: PointList, part: Attention, module: str) -> None:
    """Adds the points of the norms of queries and keys (arguments as for `attention_points`)."""
    view = HeadsFirst() if part.qk_norm_over == "heads first" else None
    for letter, norm in (("q", part.q_norm), ("k", part.k_norm), ("v", part.v_norm)):
        if norm:
            heads, width = part.heads(letter), part.width(letter)
            axes = f"{heads}*{width}" if part.qk_norm_over == "width" else f"{heads} {width}"
            site = Site(join(module, norm.path), "output")
            norm_points(points, f"{letter}_norm", norm.kind, site, view=view, axes=f"batch {points.pos} {axes}")
