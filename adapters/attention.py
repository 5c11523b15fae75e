"""The attention part: queries, keys, values, scores, pattern, z, and what is derived from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor
from torch._subclasses import FakeTensor

from adapters.imports import is_compiling
from adapters.linear import bias_of, head_results, project_per_head
from adapters.norms import Norm, norm_points
from adapters.points import LinkedPoint, PointList, Site, SiteKind, join, module_path
from adapters.views import (
    Affine,
    Biased,
    Branch,
    Call,
    Composed,
    Derived,
    Heads,
    HeadsFirst,
    MaskedScores,
    SinkScores,
    View,
    columns,
)

T = TypeVar("T")


@dataclass(frozen=True)
class PerHeadInput(Derived):
    """The residual stream as each head's query (key, value) reads it, before the norm: ``[batch, pos, head, d_model]``.

    It stands on the output of the projection; an edit is normalised and projected by the model's own modules. Without
    sources there is no norm. A second source is what the model adds after the norm (see `Attention.qk_shift`).

    Attributes:
        n_heads: how many.
        part: how the projection's output shows them; None: of all three together (`hook_attn_in`), where nothing is
            written: linked points do that.
    """

    n_heads: int
    part: View | None = None

    def get(self, x: Tensor, call: Call) -> Tensor:
        entered = call.sources[0][1] if call.sources else call.input
        return entered.unsqueeze(-2).expand(*entered.shape[:-1], self.n_heads, -1)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        if self.part is None:
            return x
        # `forward`, not a call: the hook points that stand on the norm see the model's own computation only.
        # Head by head in memory, as they are projected: neither that nor its gradient copies them.
        normed = call.sources[0][0].forward(new.movedim(-2, 0)).movedim(0, -2) if call.sources else new
        for _, shift in call.sources[1:]:
            normed = normed + shift.unsqueeze(-2)
        projected = self.part.put(x, project_per_head(call.module, self.part, normed, call), call)
        if is_compiling() or isinstance(x, FakeTensor):
            return projected
        # Positions that nobody changed keep what the model made, of an edited norm too; gradients come through `new`.
        changed = None if new.requires_grad else (new != self.get(x, call)).flatten(2).any(-1)
        if call.sources:
            self._refuse_edited_norm(call, changed)
        rows = changed is not None and x.shape[:2] == changed.shape
        return torch.where(changed.unsqueeze(-1), projected, x) if rows and changed is not None else projected

    @staticmethod
    @torch.no_grad()
    def _refuse_edited_norm(call: Call, changed: Tensor | None) -> None:
        """Refuses to norm inputs of heads anew where a hook changed the norm that they share: its edit would be lost.

        Args:
            call: of the projection.
            changed: the positions that are normed anew, ``[batch, pos]``; None: all of them.

        Raises:
            RuntimeError: it did.
        """
        norm, entered = call.sources[0]
        read = norm.forward(entered)
        for _, shift in call.sources[1:]:
            read = read + shift
        if read.shape != call.input.shape or torch.equal(read, call.input):
            return
        # What is written back as it was read differs by rounding: by a few last digits of a position's vector.
        apart, length = (read - call.input).norm(dim=-1), read.norm(dim=-1)
        same = (apart <= 4 * torch.finfo(read.dtype).eps * length) | ~length.isfinite()  # no number equals itself there
        if not (same if changed is None or changed.shape != same.shape else same | ~changed).all():
            raise RuntimeError(
                "in one run a hook changes the norm before attention (its hook_scale, hook_normalized or hook_out), "
                "and another gives heads inputs of their own (hook_attn_in, hook_q_input, hook_k_input, hook_v_input), "
                "which are normed again without that change: use two runs, or change one of them"
            )


@dataclass(frozen=True)
class HeadResults(Derived):
    """`hook_result`: what each head adds to the residual stream, ``[batch, pos, head, d_model]``."""

    n_heads: int
    #: What the output projection's result is multiplied with before it is added.
    factor: float = 1.0

    def get(self, x: Tensor, call: Call) -> Tensor:
        results = head_results(call.module, call.input.unflatten(-1, (self.n_heads, -1)), call.told)
        return results if self.factor == 1 else results * self.factor

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        total = new.sum(-2) if self.factor == 1 else new.sum(-2) / self.factor
        return (total + bias_of(call.module, call.input, call.told)).to(x.dtype)


@dataclass(frozen=True)
class Projection:
    """Where queries (keys, values), the neurons of an MLP, or a gate are made.

    Attributes:
        path: the module, relative to the part's.
        view: how its output shows the heads (the neurons); None: all of it, ``(head d_head)``.
        norm: a norm of what it makes, relative to the part's module; hook points come before it.
        bias: a parameter that is added behind it, relative to the part's module: hook points show the sum (DeBERTa).
        width: how wide a head's queries (keys, values), or how many neurons, it makes, where that is not `d_head`
            (`d_mlp`) of `ModelConfig`.
        latent: the norm whose output is the latent that they are made from, relative to the part's module; of the kind
            `OPAQUE_NORM` where another module puts it out, with the path "" where none does. Keys are then what is made
            from the latent; a part that all heads share is in `hook_rot_k` only.
    """

    path: str
    view: View | None = None
    norm: Norm | None = None
    bias: str | None = None
    width: int | None = None
    latent: Norm | None = None


#: Of an attention in a `Mixer`: no one module makes them, or it is not known which; they are seen where they meet.
UNKNOWN = Projection("")


# ----------------------------------------------------------------------------------------------------------------------
# What an attention computes, step by step: scores, pattern, result. Hook points stand between the steps.
#
# Nobody else holds what a step makes, so without a graph the next one writes over it: new memory takes longer than
# these operations.
# ----------------------------------------------------------------------------------------------------------------------


def writes_over() -> bool:
    """Whether a result may be written over what it was made from: no graph needs that."""
    return not (torch.is_grad_enabled() or is_compiling())


def per_head(x: Float[Tensor, "batch kv_head *any"], n_heads: int) -> Float[Tensor, "batch head *any"]:
    """Keys or values, once for each query head that they serve."""
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], dim=1)


def scores_of(
    query: Float[Tensor, "batch head pos d"],
    key: Float[Tensor, "batch kv_head key_pos d"],
    scale: float = 1.0,
    cap: float | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Float[Tensor, "batch head pos scored_pos"]:
    """What enters the softmax: a column for each key, and one for the sinks behind them.

    Args:
        query, key: behind their norms and rotation.
        scale: what their product is multiplied with.
        cap: the bound of a soft cap.
        mask: true where attention is allowed, elsewhere scores are a large negative number; or what is added to them.
        sinks: one number for each head, which become the last column.
    """
    scores, here = query @ per_head(key, query.shape[1]).transpose(-1, -2), writes_over()
    scores = scores.mul_(scale) if here else scores * scale
    if cap:
        scores = scores.div_(cap).tanh_().mul_(cap) if here else capped(scores, cap)
    if mask is not None and mask.dtype == torch.bool:
        filler = torch.finfo(scores.dtype).min
        scores = scores.masked_fill_(~mask, filler) if here else scores.masked_fill(~mask, filler)
    elif mask is not None:
        scores = scores.add_(mask) if here and mask.dtype == scores.dtype else scores + mask
    return scores if sinks is None else with_sinks(scores, sinks)


def capped(x: Tensor, cap: float) -> Tensor:
    """Numbers within a soft cap."""
    return cap * torch.tanh(x / cap)


def with_sinks(scores: Tensor, sinks: Float[Tensor, " head"]) -> Tensor:
    """Scores with a last column that belongs to no key."""
    return torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)


#: How many numbers of a softmax are in memory in float32, where they are written over scores of another precision.
_AT_ONCE = 2**20


def pattern_of(scores: Tensor, over: bool = False) -> Tensor:
    """The softmax of scores, in float32 at least.

    Args:
        scores: as `scores_of` makes them.
        over: nobody needs them any more, so that the pattern may be written over them.
    """
    wide = scores.dtype if scores.dtype == torch.float64 else torch.float32
    if not (over and writes_over()):
        return scores.softmax(-1, dtype=wide).to(scores.dtype)
    if scores.is_cpu and scores.dtype == wide:
        return torch.softmax(scores, -1, out=scores)  # on the CPU, row by row
    rows = max(1, _AT_ONCE * scores.shape[-2] // max(1, scores.numel()))
    for piece in scores.split(rows, -2):  # some queries after the other: the wide ones take more room than the scores
        piece.copy_(piece.softmax(-1, dtype=wide))
    return scores


def result_of(
    pattern: Float[Tensor, "batch head pos key_pos"], value: Float[Tensor, "batch kv_head key_pos d"]
) -> Float[Tensor, "batch head pos d"]:
    """``pattern @ v``."""
    return pattern.to(value.dtype) @ per_head(value, pattern.shape[1])


#: What a gate's projection goes through, by name.
GATE_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class Gate:
    """``pattern @ v`` is multiplied with a function of what a projection makes.

    Attributes:
        projection: with one column for each of a head's, or one for each head.
        function: the name of that function, of `GATE_FUNCTIONS`.
    """

    projection: Projection
    function: str

    def of(self, x: Tensor, made: Tensor) -> Tensor:
        """What it makes of a tensor, by what its projection made."""
        return x * GATE_FUNCTIONS[self.function](made.to(x.dtype))


@dataclass(frozen=True)
class SinkGate:
    """``pattern @ v`` is multiplied with the sigmoid of the scores' log-sum-exp less a parameter of each head.

    Attributes:
        parameter: its name in the attention module.
    """

    parameter: str

    def of(
        self, x: Float[Tensor, "batch pos head d"], scores: Float[Tensor, "batch head pos key_pos"], sinks: Tensor
    ) -> Float[Tensor, "batch pos head d"]:
        """What it makes of ``pattern @ v``, by the scores and the parameter."""
        total = scores.to(x.dtype).logsumexp(-1).transpose(1, 2)[..., None]
        return x * (total - sinks.to(x.dtype)[:, None]).sigmoid()


@dataclass(frozen=True)
class AddedOutput:
    """The output of a module that reads the values too is added to ``pattern @ v`` (Nystroemformer's convolution).

    Attributes:
        path: the module, relative to the attention module; it returns ``batch head pos d_head``.
    """

    path: str

    def of(
        self, x: Float[Tensor, "batch pos head d"], made: Float[Tensor, "batch head pos d"]
    ) -> Float[Tensor, "batch pos head d"]:
        """``pattern @ v`` with what its module made."""
        return x + made.transpose(1, 2).to(x.dtype)


#: What may stand between ``pattern @ v`` and `hook_z`, which is what enters the output projection.
ZTransform = Gate | SinkGate | AddedOutput | Norm | Affine


@dataclass(frozen=True)
class Attention:
    """An attention module: what makes queries, keys and values, what stands between the pattern and `z`, what follows.

    Attributes:
        path: the attention module, relative to the block.
        q, k, v: the projections, relative to the attention module; `UNKNOWN`: only queries and keys are shown, where
            they meet.
        o: the output projection, relative to the attention module; "": what reads ``pattern @ v`` is not known, and
            there is no `hook_z`.
        rotary: queries and keys are rotated, ``last``, behind their norms, or ``first``, before them. None: they are
            not.
        scores: how the scores are seen: `SinkScores` where their last column is an attention sink, `HeadsOfBatch`
            within `Composed` where they are ``[(batch head), query, key]``. None: scores and pattern cannot be seen: it
            calls no softmax, no `scaled_dot_product_attention` and no `AttentionInterface` of transformers (linear
            attention, or flash attention of a family's own).
        norms_over: what the norms of queries and keys are given: each head, as ``batch pos head d_head`` (``heads``) or
            as ``batch head pos d_head`` (``heads first``), or all heads at once, ``batch pos (head d_head)``
            (``width``).
        qk_shift: the module whose output is added to what queries and keys read, after the norm (Shortformer's position
            embeddings), relative to the base model.
        position_bias: the module of a position bias that is added to the scores, relative to the attention module; a
            layer may lack it and use the first one's.
        core: the module that computes scores and pattern, relative to `path`, where it is not that module itself.
        keys_from: what keys and values are made from, where that is not what queries are made from: ``encoder``, its
            output; the index of the block whose attention's keys and values it reads (the last layers of Gemma 4): `k`
            and `v` are that attention's, which has the same path; or ``more``: there are keys for positions, and behind
            them some that are made of several (DeepSeek V4).
        z_transform: what stands between ``pattern @ v`` and `hook_z`: a `Gate`, a `SinkGate`, an `AddedOutput`, a
            `Norm`, or an `Affine` with a factor.
        clamp: the bound that queries, keys and values are clamped to, and where: behind their projections (``made``),
            which the hook points stand on, or queries and keys behind their norms (``normed``).
        score_bias_modules: something that queries alone, keys alone, or places alone make is added to the product of
            queries and keys (relative positions, as in DeBERTa and MPNet): the modules inside that make it, relative to
            the attention module; none, where others do. None: nothing is added, but for a `position_bias` or ALiBi.
        auxiliary_modules: further modules inside that make something of their own (an indexer), relative to the
            attention module, with the axes of what they return.
        config_values: fields of `ModelConfig` that are others here: ``n_heads``, ``n_key_value_heads``,
            ``attn_scale``, ``rotary_dim``, ``rotary_base``.
    """

    path: str
    q: Projection
    k: Projection
    v: Projection
    o: str
    rotary: Literal["last", "first"] | None = None
    scores: View | None = field(default_factory=MaskedScores)
    norms_over: Literal["heads", "heads first", "width"] = "heads"
    qk_shift: str | None = None
    position_bias: str | None = None
    core: str = ""
    keys_from: Literal["encoder", "more"] | int | None = None
    z_transform: ZTransform | None = None
    clamp: tuple[float, Literal["made", "normed"]] | None = None
    score_bias_modules: tuple[str, ...] | None = None
    auxiliary_modules: tuple[tuple[str, str], ...] = ()
    config_values: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def cross(self) -> bool:
        """Keys and values are made from an encoder's output."""
        return self.keys_from == "encoder"

    @property
    def keys_of(self) -> int | None:
        """The index of the block whose attention's keys and values it reads; None where it makes its own."""
        return self.keys_from if isinstance(self.keys_from, int) else None

    @property
    def projections(self) -> dict[str, Projection]:
        """Its own that are known: those of queries (``q``), and of keys (``k``) and values (``v``)."""
        own = {"q": self.q} if self.keys_of is not None else {"q": self.q, "k": self.k, "v": self.v}
        return {letter: each for letter, each in own.items() if each.path}

    @property
    def qk_norms(self) -> tuple[Norm, ...]:
        """The norms of queries and keys."""
        return tuple(each.norm for letter, each in self.projections.items() if each.norm and letter != "v")

    @property
    def clip(self) -> float | None:
        """The bound of its clamp."""
        return self.clamp and self.clamp[0]

    @property
    def clips_normed(self) -> bool:
        """Queries and keys are clamped behind their norms, and not before."""
        return self.clamp is not None and self.clamp[1] == "normed"

    @property
    def submodules(self) -> dict[str, str]:
        """The layers and norms that play its parts, relative to `path`, by what they do."""
        words = {"q": "queries", "k": "keys", "v": "values"}
        named = {words[letter]: each for letter, each in self.projections.items()}
        made = {f"{what} made": each.path for what, each in named.items()}
        made |= {"its output made": self.o} if self.o else {}
        return made | {f"{what} normed": each.norm.path for what, each in named.items() if each.norm}

    @property
    def from_latents(self) -> bool:
        """Queries, or keys and values, are made from a latent."""
        return any(each.latent is not None for each in self.projections.values())

    @property
    def shows_rotated(self) -> bool:
        """`hook_rot_q` and `hook_rot_k` show what enters the product: rotated, or keys with columns that all heads
        share as well as those that are made from a latent; or what no known module makes.
        """
        return self.rotary is not None or self.q.width != self.k.width or UNKNOWN.path in (self.q.path, self.k.path)

    @property
    def sinks(self) -> str | None:
        """The name of the module's parameter that holds each head's attention sink."""
        scores = self.scores.outer if isinstance(self.scores, Composed) else self.scores
        return scores.sinks if isinstance(scores, SinkScores) else None

    @property
    def gate(self) -> Projection | None:
        """The projection that makes a gate."""
        return self.z_transform.projection if isinstance(self.z_transform, Gate) else None

    def own(self, name: str, usual: T) -> T:
        """A field of `ModelConfig`, as it is here.

        Args:
            name: of the field.
            usual: what the configuration says.
        """
        return cast(T, self.config_values.get(name, usual))

    def heads(self, letter: str) -> str:
        """The axis of the heads of queries, keys, values, or of the rotated ones."""
        name = "n_heads" if letter == "q" else "n_key_value_heads"
        return str(self.config_values.get(name, name))

    def width(self, letter: str) -> str:
        """The axis of one head's columns."""
        own = {"q": self.q, "k": self.k, "v": self.v}[letter].width
        return "d_head" if own is None else str(own)


def _pattern_view(scores: View) -> View:
    """How the pattern of such scores is seen."""
    if isinstance(scores, Composed):
        return Composed(scores.inner, _pattern_view(scores.outer))
    return columns(0, -1) if isinstance(scores, SinkScores) else View()  # without the sink's, the last


@dataclass(frozen=True)
class AttentionPoints:
    """Adds the points of one attention module, but for its output.

    Attributes:
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
        inner: it is inside of a `Mixer`: what it reads need not be the stream, and its result is not added to it.
    """

    points: PointList
    name: str
    part: Attention
    module: str
    n_heads: int
    n_kv_heads: int
    key_pos: str
    norm: Site | None
    shift: Site | None
    factor: float | None
    inner: bool = False

    def add(self) -> None:
        """Adds them, in the order of the computation."""
        if not (self.part.cross or self.inner):  # they read the same stream, of which each head can be given its own
            self._add_inputs("" if self.name == "attn" else f"{self.name}_")
        self._add_projections()
        if self.part.scores is not None:
            self._add_product(self.part.scores)
        self._add_others()
        if self.part.o:
            self._add_results()

    def _site(self, path: str, kind: SiteKind = "output", key: str | None = None) -> Site:
        return Site(join(self.module, path), kind, key)

    def _n_heads(self, letter: str) -> int:
        return self.n_heads if letter == "q" else self.n_kv_heads

    def _add_inputs(self, own: str) -> None:
        """What each head reads of the stream."""
        if self.norm is not None and not self.part.from_latents:
            self._add_every_head_input(self.norm, own)
        for letter, projection in self.part.projections.items():
            if projection.latent is not None:
                continue
            n_heads = self._n_heads(letter)
            self.points.add(
                f"hook_{own}{letter}_input",
                self._site(projection.path),
                PerHeadInput(n_heads, projection.view or Heads(n_heads)),
                f"batch {self.points.pos} {self.part.heads(letter)} d_model",
                group="heavy",
                flag="use_split_qkv_input",
                sources=tuple(site for site in (self.norm, self.shift if letter != "v" else None) if site),
                aliases=(f"{self.name}.hook_{letter}_input",),
            )

    def _add_every_head_input(self, norm: Site, own: str) -> None:
        def by_group(value: Tensor) -> Tensor:
            # A key head serves several query heads: it reads the mean of their inputs (all equal unless edited).
            if self.n_heads == self.n_kv_heads:
                return value
            return reduce(value, "b p (kv group) d -> b p kv d", "mean", kv=self.n_kv_heads)

        inputs = {letter: join(self.points.prefix, f"hook_{own}{letter}_input") for letter in self.part.projections}
        self.points.add(
            f"hook_{own}attn_in",
            Site(norm.path, "output"),
            PerHeadInput(self.n_heads),
            f"batch {self.points.pos} {self.part.heads('q')} d_model",
            group="heavy",
            flag="use_attn_in",
            aliases=(f"{self.name}.hook_attn_in",),
            linked=tuple(LinkedPoint(at, by_group if letter != "q" else _as_it_is) for letter, at in inputs.items()),
        )

    def _add_projections(self) -> None:
        """Queries, keys and values, and the latents that they are made from."""
        part, inner, pos = self.part, self.points.inside(self.name), self.points.pos
        for name, latent in (("q", part.q.latent), ("kv", part.k.latent)):
            if latent and latent.path:
                self._add_latent(name, latent)
        fused = len({projection.path for projection in part.projections.values()}) < len(part.projections)
        for letter, projection in part.projections.items():
            own_pos = self.key_pos if part.cross and letter != "q" else pos
            axes = f"batch {own_pos} {part.heads(letter)} {part.width(letter)}"
            view, sources = self._seen(projection, self._n_heads(letter))
            site, aliases = self._site(projection.path), (f"{letter}.hook_out",)
            inner.add(f"hook_{letter}", site, view, axes, aliases=aliases, sources=sources)
            if not (fused or self.inner) and projection.latent is None:
                entered = Site(site.path, "input")
                inner.add(f"{letter}.hook_in", entered, Branch(), f"batch {own_pos} d_model", group="extra")

    def _seen(self, projection: Projection, n_heads: int) -> tuple[View, tuple[Site, ...]]:
        """How a projection's output shows heads, and what that needs: the module that adds a bias behind it."""
        view = projection.view or Heads(n_heads)
        if projection.bias is None:
            return view, ()
        holder, _, parameter = projection.bias.rpartition(".")
        return Biased(view, parameter), (self._site(holder, "input"),)

    def _add_latent(self, name: str, latent: Norm) -> None:
        """What queries, or keys and values, are made from; with the norm that makes it, under DeepSeek's names."""
        inner, norm, site = self.points.inside(self.name), f"{name}_a_layernorm", self._site(latent.path)
        axes, known = f"batch {self.points.pos} d_{name}_latent", not latent.kind.opaque
        if known:
            inner.add(f"{norm}.hook_in", Site(site.path, "input"), axes=axes, group="extra")
            norm_points(inner, norm, latent.kind, site, axes=axes)
        inner.add(f"hook_{name}_latent", site, axes=axes, aliases=(f"{norm}.hook_out",) if known else ())

    def _add_product(self, scores: View) -> None:
        """What meets in the product of queries and keys, the scores, and the pattern."""
        part, inner, pos = self.part, self.points.inside(self.name), self.points.pos
        for letter, own_pos in (("q", pos), ("k", self.key_pos)) if part.shows_rotated else ():
            axes = f"batch {own_pos} {part.heads(letter)} {part.width('q')}"
            site = self._site(part.core, "attention", letter)
            inner.add(f"hook_rot_{letter}", site, HeadsFirst(), axes, n_heads=self._n_heads(letter))
        square = f"batch {part.heads('q')} {pos} {self.key_pos}"
        for name, key, view in (("attn_scores", "scores", scores), ("pattern", "pattern", _pattern_view(scores))):
            inner.add(f"hook_{name}", self._site(part.core, "attention", key), view, square, n_heads=self.n_heads)

    def _add_others(self) -> None:
        """What else is made inside of it: biases of scores, auxiliary modules, what stands between pattern and `z`."""
        part, inner, pos = self.part, self.points.inside(self.name), self.points.pos
        for path in part.score_bias_modules or ():
            made = module_path(path).rpartition(".")[2]
            inner.add(f"{made}.hook_places", self._site(path), axes=f"one places d_{made}", group="extra")
        for path, axes in part.auxiliary_modules:
            named = " ".join(pos if axis == "pos" else axis for axis in axes.split())
            inner.add(f"{module_path(path)}.hook_out", self._site(path), axes=named, group="extra")
        if isinstance(part.z_transform, AddedOutput):
            axes = f"batch {part.heads('q')} {pos} {part.width('v')}"
            inner.add("hook_branch", self._site(part.z_transform.path), axes=axes, group="extra")
        if part.gate:
            axes = f"batch {pos} {part.heads('q')} d_gate"
            view, sources = self._seen(part.gate, self.n_heads)
            inner.add("hook_gate", self._site(part.gate.path), view, axes, group="extra", sources=sources)

    def _add_results(self) -> None:
        """`z`, and what each head adds."""
        part, inner, heads = self.part, self.points.inside(self.name), f"batch {self.points.pos} {self.part.heads('q')}"
        entered, axes = self._site(part.o, "input"), f"{heads} {part.width('v')}"
        inner.add("hook_z", entered, Heads(self.n_heads), axes, aliases=("o.hook_in",))
        if self.factor is not None:
            view, site = HeadResults(self.n_heads, self.factor), self._site(part.o)
            inner.add("hook_result", site, view, f"{heads} d_model", group="heavy", flag="use_attn_result")


def _as_it_is(value: Tensor) -> Tensor:
    return value


def qk_norm_points(points: PointList, part: Attention, module: str) -> None:
    """Adds the points of the norms of queries and keys (arguments as for `AttentionPoints`)."""
    view = HeadsFirst() if part.norms_over == "heads first" else None
    for letter, projection in part.projections.items():
        if norm := projection.norm:
            heads, width = part.heads(letter), part.width(letter)
            axes = f"{heads}*{width}" if part.norms_over == "width" else f"{heads} {width}"
            path, name, axes = join(module, norm.path), f"{letter}_norm", f"batch {points.pos} {axes}"
            points.add(f"{name}.hook_in", Site(path, "input"), view, axes, group="extra")
            norm_points(points, name, norm.kind, Site(path, "output"), view=view, axes=axes)
            points.add(f"{name}.hook_out", Site(path, "output"), view, axes, group="extra")
