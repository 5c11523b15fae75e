"""The attention part: queries, keys, values, scores, pattern, `z`, and the activations between
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeVar, Unpack, cast

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor
from torch._subclasses import FakeTensor

from adapters.imports import is_compiling
from adapters.linear import bias_of, head_results, project_per_head
from adapters.norms import Norm, norm_points
from adapters.points import LinkedPoint, MoreOfPoint, PointList, PointNames, Site, join, module_path
from adapters.torch_hooks import refuse_other_gradients, refuse_other_hooks
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
    """The residual stream as each head's query (key, value) reads it, before the norm: ``[batch,
    pos, head, d_model]``.

    Its site is the projection's output: an edited input is normalised and projected by the model's
    own modules. Without sources there is no norm. A second source is a term that the model adds
    after the norm (see `Attention.qk_shift`).

    Attributes:
        n_heads: the number of heads.
        part: the view of heads in the projection's output. None: the input of all three together
            (`hook_attn_in`); its edits are written through the three linked points.
    """

    n_heads: int
    part: View | None = None

    def get(self, x: Tensor, call: Call) -> Tensor:
        entered = call.sources[0][1] if call.sources else call.input
        return entered.unsqueeze(-2).expand(*entered.shape[:-1], self.n_heads, -1)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        if self.part is None:
            return x
        refuse_other_hooks(x, call.module, call.input, call)
        # `forward`, not a call: hook points on the norm then see only the model's own computation.
        # The memory layout is head by head, as the projection reads it, so that neither it nor its
        # gradient makes copies.
        normed = new
        if call.sources:
            norm, entered = call.sources[0]
            if len(call.sources) == 1:
                refuse_other_gradients(call.input, norm, entered, call)
            normed = norm.forward(new.movedim(-2, 0)).movedim(0, -2)
        for _, shift in call.sources[1:]:
            normed = normed + shift.unsqueeze(-2)
        results = project_per_head(call.module, self.part, normed, call)
        projected = self.part.put(x, results, call)
        if is_compiling() or isinstance(x, FakeTensor):
            return projected
        # Unchanged positions keep the model's own values, including those of an edited norm;
        # gradients flow through `new`.
        changed = None
        if not new.requires_grad:
            changed = (new != self.get(x, call)).flatten(2).any(-1)
        if call.sources:
            self._refuse_edited_norm(call, changed)
        if changed is None or x.shape[:2] != changed.shape:
            return projected
        return torch.where(changed.unsqueeze(-1), projected, x)

    @staticmethod
    @torch.no_grad()
    def _refuse_edited_norm(call: Call, changed: Tensor | None) -> None:
        """Raise an error if inputs of heads would be normed again although a hook edited the shared
        norm: its edit would be lost.

        Args:
            call: of the projection.
            changed: the positions that are normalised again, ``[batch, pos]``; None: all of them.

        Raises:
            RuntimeError: a hook edited it.
        """
        norm, entered = call.sources[0]
        read = norm.forward(entered)
        for _, shift in call.sources[1:]:
            read = read + shift
        if read.shape != call.input.shape or torch.equal(read, call.input):
            return
        # Reading and writing back differs by rounding: by the last digits of a position's vector.
        length = read.norm(dim=-1)
        rounding = 4 * torch.finfo(read.dtype).eps * length
        same = (read - call.input).norm(dim=-1) <= rounding
        same |= ~length.isfinite()  # NaN compares unequal to itself
        if changed is not None and changed.shape == same.shape:
            same |= ~changed
        if not same.all():
            raise RuntimeError(
                "in one run a hook changes the norm before attention (its hook_scale,"
                " hook_normalized or hook_out), and another gives heads inputs of their own"
                " (hook_attn_in, hook_q_input, hook_k_input, hook_v_input), which are normed again"
                " without that change: use two runs, or change one of them"
            )


@dataclass(frozen=True)
class _HeadResults(Derived):
    """The view of `hook_result`: each head's contribution to the residual stream, ``[batch, pos,
    head, d_model]``.
    """

    n_heads: int
    #: The factor of the output projection's result before it is added.
    factor: float = 1.0

    def get(self, x: Tensor, call: Call) -> Tensor:
        z = call.input.unflatten(-1, (self.n_heads, -1))
        results = head_results(call.module, z, call.told)
        return results if self.factor == 1 else results * self.factor

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        total = new.sum(-2)
        if self.factor != 1:
            total = total / self.factor
        refuse_other_hooks(x, call.module, call.input, call)
        bias = bias_of(call.module, call.input, call.told)
        return (total + bias).to(x.dtype)


def heads_in_columns(view: View | None) -> int | None:
    """Return how many heads a view sees in all columns of a layer's output; None of another."""
    return view.n_heads if isinstance(view, Heads) else None


@dataclass(frozen=True)
class Projection:
    """The layer that makes queries (keys, values), the neurons of an MLP, or a gate.

    Attributes:
        path: the module, relative to the part's.
        view: the view of heads (or neurons) in its output; None: all of it, ``(head d_head)``.
        norm: a norm of its output, relative to the part's module; hook points come before it.
        bias: a parameter that is added to its output, relative to the part's module: hook points
            show the sum (DeBERTa).
        width: the width of a head's queries (keys, values), or the number of neurons, where that is
            not `d_head` (`d_mlp`) of `ModelConfig`.
        latent: the norm that outputs the latent that it reads, relative to the part's module. Its
            kind is `OPAQUE_NORM` if a module that is not a norm outputs the latent; its path is ""
            if no module does. `hook_k` then has only the columns made from the latent; columns that
            all heads share are in `hook_rot_k` only.
    """

    path: str
    view: View | None = None
    norm: Norm | None = None
    bias: str | None = None
    width: int | None = None
    latent: Norm | None = None


#: Of an attention in a `Mixer`: no single module makes them, or it is unknown which; they are seen
#: where they are used.
UNKNOWN = Projection("")


# --------------------------------------------------------------------------------------------------
# The computation of an attention, step by step: scores, pattern, result. Hook points stand between
# the steps. Without a graph nothing else holds a step's output, so the next step overwrites it:
# allocating memory takes longer than these operations.
# --------------------------------------------------------------------------------------------------


def writes_over() -> bool:
    """Tell whether a result may overwrite its input: neither autograd nor `vmap` needs it."""
    in_transform: bool = torch._C._are_functorch_transforms_active()
    return not (torch.is_grad_enabled() or in_transform or is_compiling())


def per_head(
    x: Float[Tensor, "batch kv_head *any"], n_heads: int
) -> Float[Tensor, "batch head *any"]:
    """Repeat keys or values for each query head that they serve."""
    groups = x.shape[1]
    if groups == n_heads:
        return x
    return x.repeat_interleave(n_heads // groups, dim=1)


def scores_of(
    query: Float[Tensor, "batch head pos d"],
    key: Float[Tensor, "batch kv_head key_pos d"],
    scale: float = 1.0,
    cap: float | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Float[Tensor, "batch head pos scored_pos"]:
    """Compute the input of the softmax: a column for each key, and one for the sinks after them.

    Args:
        query, key: after their norms and rotation.
        scale: the factor of their product.
        cap: the bound of a soft cap.
        mask: true where attention is allowed, elsewhere scores are a large negative number; or a
            term added to the scores.
        sinks: one number for each head, added as the last column.
    """
    keys = per_head(key, query.shape[1])
    scores = query @ keys.transpose(-1, -2)
    in_place = writes_over()
    scores = scores.mul_(scale) if in_place else scores * scale
    if cap and in_place:
        scores.div_(cap).tanh_().mul_(cap)
    elif cap:
        scores = capped(scores, cap)
    if mask is not None and mask.dtype == torch.bool:
        fill = scores.masked_fill_ if in_place else scores.masked_fill
        scores = fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        in_place = in_place and mask.dtype == scores.dtype
        scores = scores.add_(mask) if in_place else scores + mask
    return scores if sinks is None else with_sinks(scores, sinks)


def capped(x: Tensor, cap: float) -> Tensor:
    """Apply a soft cap."""
    return cap * torch.tanh(x / cap)


def with_sinks(scores: Tensor, sinks: Float[Tensor, " head"]) -> Tensor:
    """Append a last column to scores that belongs to no key."""
    by_head = sinks.to(scores.dtype).view(1, -1, 1, 1)
    column = by_head.expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1)


#: The largest number of softmax entries held in float32 at once, where they overwrite scores of
#: another precision.
_AT_ONCE = 2**20


def pattern_of(scores: Tensor, over: bool = False) -> Tensor:
    """Compute the softmax of scores, in float32 at least.

    Args:
        scores: the output of `scores_of`.
        over: the scores are no longer needed, so that the pattern may overwrite them.
    """
    wide = scores.dtype if scores.dtype == torch.float64 else torch.float32
    if not (over and writes_over()):
        return scores.softmax(-1, dtype=wide).to(scores.dtype)
    if scores.is_cpu and scores.dtype == wide:
        return torch.softmax(scores, -1, out=scores)  # on the CPU, row by row
    rows = max(1, _AT_ONCE * scores.shape[-2] // max(1, scores.numel()))
    # In chunks of queries: float32 copies take more memory than the scores.
    for chunk in scores.split(rows, -2):
        chunk.copy_(chunk.softmax(-1, dtype=wide))
    return scores


def result_of(
    pattern: Float[Tensor, "batch head pos key_pos"],
    value: Float[Tensor, "batch kv_head key_pos d"],
) -> Float[Tensor, "batch head pos d"]:
    """Compute ``pattern @ v``."""
    return pattern.to(value.dtype) @ per_head(value, pattern.shape[1])


#: The function of a gate's projection, by name.
GATE_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class Gate:
    """A gate: ``pattern @ v`` is multiplied by a function of a projection's output.

    Attributes:
        projection: the projection, with one column for each column of a head, or one for each head.
        function: the name of that function, of `GATE_FUNCTIONS`.
    """

    projection: Projection
    function: str

    def of(self, x: Tensor, projected: Tensor) -> Tensor:
        """Apply the gate to a tensor, given the output of its projection."""
        return x * GATE_FUNCTIONS[self.function](projected.to(x.dtype))


@dataclass(frozen=True)
class SinkGate:
    """A gate by attention sinks: ``pattern @ v`` is multiplied by the sigmoid of the scores'
    log-sum-exp minus a parameter of each head.

    Attributes:
        parameter: its name in the attention module.
    """

    parameter: str

    def of(
        self,
        x: Float[Tensor, "batch pos head d"],
        scores: Float[Tensor, "batch head pos key_pos"],
        sinks: Tensor,
    ) -> Float[Tensor, "batch pos head d"]:
        """Apply the gate to ``pattern @ v``, given the scores and the parameter."""
        total = scores.to(x.dtype).logsumexp(-1).transpose(1, 2)[..., None]
        return x * (total - sinks.to(x.dtype)[:, None]).sigmoid()


@dataclass(frozen=True)
class AddedOutput:
    """A module that also reads the values and whose output is added to ``pattern @ v``
    (Nystroemformer's convolution).

    Attributes:
        path: the module, relative to the attention module; it returns ``batch head pos d_head``.
    """

    path: str

    def of(
        self, x: Float[Tensor, "batch pos head d"], output: Float[Tensor, "batch head pos d"]
    ) -> Float[Tensor, "batch pos head d"]:
        """Add the output of the module to ``pattern @ v``."""
        return x + output.transpose(1, 2).to(x.dtype)


#: The possible transforms between ``pattern @ v`` and `hook_z`, the input of the output projection.
ZTransform = Gate | SinkGate | AddedOutput | Norm | Affine


@dataclass(frozen=True)
class Attention:
    """An attention module: its projections, the computation of the pattern, and the transforms up
    to `z`.

    Attributes:
        path: the attention module, relative to the block.
        q, k, v: the projections, relative to the attention module; `UNKNOWN`: hook points show only
            the queries and keys that are multiplied.
        o: the output projection, relative to the attention module; "": the reader of ``pattern @
            v`` is unknown, and there is no `hook_z`.
        rotary: when queries and keys are rotated: ``last``, after their norms, or ``first``, before
            them. None: they are not rotated.
        scores: the view of the scores: `SinkScores` where their last column is an attention sink,
            `HeadsOfBatch` within `Composed` where they are ``[(batch head), query, key]``. None:
            scores and pattern are not available: the module calls no softmax, no
            `scaled_dot_product_attention` and no `AttentionInterface` of transformers (linear
            attention, or flash attention of a family's own).
        norms_over: what the norms of queries and keys normalise: each head, in the layout ``batch
            pos head d_head`` (``heads``) or ``batch head pos d_head`` (``heads first``), or all
            heads at once, ``batch pos (head d_head)`` (``width``).
        qk_shift: the module whose output is added to the input of queries and keys, after the norm
            (Shortformer's position embeddings), relative to the base model.
        position_bias: the module of a position bias that is added to the scores, relative to the
            attention module; a layer may lack it and use the first layer's.
        core: the module that computes scores and pattern, relative to `path`, if it is not the
            module at `path`.
        keys_from: the source of keys and values, if it is not the source of queries: ``encoder``,
            the encoder's output; the index of an earlier block whose keys and values are used again
            (the last layers of Gemma 4; `k` and `v` are then that block's projections); or
            ``more``: a key for each position, followed by keys that summarise several positions
            (DeepSeek V4).
        z_transform: the transform between ``pattern @ v`` and `hook_z`: a `Gate`, a `SinkGate`, an
            `AddedOutput`, a `Norm`, or an `Affine` with a factor.
        clamp: the bound that queries, keys and values are clamped to, and where: after their
            projections (``made``), before the hook points, or, for queries and keys only, after
            their norms (``normed``).
        score_bias_modules: the modules inside the attention that compute a further term of the
            scores, from queries, keys or positions alone (relative positions, as in DeBERTa and
            MPNet), relative to the attention module; an empty tuple if modules elsewhere compute
            it. None: there is no such term, except a `position_bias` or ALiBi.
        auxiliary_modules: further modules inside the attention that get hook points (an indexer),
            relative to the attention module, with the axes of their outputs.
        config_values: fields of `ModelConfig` that differ in this attention: ``n_heads``,
            ``n_key_value_heads``, ``attn_scale``, ``rotary_dim``, ``rotary_base``.
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
        """Tell whether keys and values are made from an encoder's output."""
        return self.keys_from == "encoder"

    @property
    def keys_of(self) -> int | None:
        """Return the index of the block whose keys and values it reads; None if it makes its
        own."""
        return self.keys_from if isinstance(self.keys_from, int) else None

    @property
    def projections(self) -> dict[str, Projection]:
        """Return its own known projections by letter, ``q``, ``k``, ``v``: without the keys and
        values that it reads from another block."""
        own = {"q": self.q}
        if self.keys_of is None:
            own |= {"k": self.k, "v": self.v}
        return {letter: projection for letter, projection in own.items() if projection.path}

    @property
    def qk_norms(self) -> tuple[Norm, ...]:
        """Return the norms of queries and keys."""
        normed = (self.projections.get(letter) for letter in "qk")
        return tuple(projection.norm for projection in normed if projection and projection.norm)

    @property
    def clip(self) -> float | None:
        """Return the bound that queries, keys and values are clamped to; None: they are not."""
        return self.clamp and self.clamp[0]

    @property
    def clips_normed(self) -> bool:
        """Tell whether queries and keys are clamped after their norms, and not before."""
        return self.clamp is not None and self.clamp[1] == "normed"

    @property
    def submodules(self) -> dict[str, str]:
        """Return its layers and norms by role, with paths relative to `path`."""
        words = {"q": "queries", "k": "keys", "v": "values"}
        layers: dict[str, str] = {}
        norms: dict[str, str] = {}
        for letter, projection in self.projections.items():
            layers[f"{words[letter]} made"] = projection.path
            if projection.norm:
                norms[f"{words[letter]} normed"] = projection.norm.path
        if self.o:
            layers["its output made"] = self.o
        return layers | norms

    @property
    def from_latents(self) -> bool:
        """Tell whether queries, or keys and values, are made from a latent."""
        return any(projection.latent is not None for projection in self.projections.values())

    @property
    def shows_rotated(self) -> bool:
        """Tell whether `hook_rot_q` and `hook_rot_k` show the factors of the product.

        They do if queries and keys are rotated, if keys have columns shared by all heads besides
        the columns made from a latent, or if no known module makes the factors.
        """
        return (
            self.rotary is not None
            or self.q.width != self.k.width
            or UNKNOWN.path in (self.q.path, self.k.path)
        )

    @property
    def sinks(self) -> str | None:
        """Return the name of the module's parameter that holds each head's attention sink."""
        scores = self.scores.outer if isinstance(self.scores, Composed) else self.scores
        return scores.sinks if isinstance(scores, SinkScores) else None

    @property
    def gate(self) -> Projection | None:
        """Return the projection that makes a gate."""
        return self.z_transform.projection if isinstance(self.z_transform, Gate) else None

    def own(self, name: str, usual: T) -> T:
        """Return a field of `ModelConfig`, with the value that this attention has.

        Args:
            name: of the field.
            usual: the value in the model's configuration.
        """
        return cast(T, self.config_values.get(name, usual))

    def heads(self, letter: str) -> str:
        """Return the head axis of queries, keys, values, or the rotated queries or keys."""
        name = "n_heads" if letter == "q" else "n_key_value_heads"
        return str(self.config_values.get(name, name))

    def width(self, letter: str) -> str:
        """Return the axis of one head's columns."""
        projection: Projection = getattr(self, letter)
        return "d_head" if projection.width is None else str(projection.width)


def _pattern_view(scores: View) -> View:
    """Return the view of a pattern from the view of its scores."""
    if isinstance(scores, Composed):
        return Composed(scores.inner, _pattern_view(scores.outer))
    if isinstance(scores, SinkScores):
        return columns(0, -1)  # without the sink's, the last
    return View()


@dataclass(frozen=True)
class AttentionPoints:
    """The hook points of one attention module, except for its output.

    Attributes:
        block: the list that they are added to, with the block's prefix and module.
        name: the part's name: ``attn``, ``cross_attn``.
        part: the declaration.
        n_heads, n_kv_heads: numbers of query heads, and of key and value heads.
        key_pos: the axis of keys.
        norm: the input of the norm that the attention reads (None: no norm).
        shift: the term added to the inputs of queries and keys after the norm.
        factor: the factor that multiplies its result before it is added to the stream; None: not a
            constant, so each head's contribution is not available.
        inner: the attention is inside a `Mixer`: its input need not be the stream, and its result
            is not added to the stream.
    """

    block: PointList
    name: str
    part: Attention
    n_heads: int
    n_kv_heads: int
    key_pos: str
    norm: Site | None
    shift: Site | None
    factor: float | None
    inner: bool = False

    def add(self) -> None:
        """Add the points, in the order of the computation."""
        # They read the same stream, which can be set for each head.
        if not (self.part.cross or self.inner):
            self._add_inputs()
        self._add_latents()
        self._add_projections()
        if self.part.scores is not None:
            self._add_product(self.part.scores)
        self._add_others()
        if self.part.o:
            self._add_results()

    @cached_property
    def points(self) -> PointList:
        """Return the list, with the prefix and the module of the attention."""
        return self.block.inside(self.name, self.part.path)

    def _n_heads(self, letter: str) -> int:
        return self.n_heads if letter == "q" else self.n_kv_heads

    def _axes(self, letter: str, pos: str, width: str) -> str:
        """Return the axes of an activation of each head."""
        return f"batch {pos} {self.part.heads(letter)} {width}"

    def _add_inputs(self) -> None:
        """Add the input of each head."""
        prefix = "hook_" if self.name == "attn" else f"hook_{self.name}_"
        if self.norm is not None and not self.part.from_latents:
            self._add_every_head_input(self.norm, prefix)
        for letter, projection in self.part.projections.items():
            if projection.latent is not None:
                continue
            n_heads = self._n_heads(letter)
            shift = None if letter == "v" else self.shift
            self.block.add(
                f"{prefix}{letter}_input",
                self.points.site(projection.path),
                PerHeadInput(n_heads, projection.view or Heads(n_heads)),
                self._axes(letter, self.block.pos, "d_model"),
                group="heavy",
                flag="use_split_qkv_input",
                sources=tuple(site for site in (self.norm, shift) if site),
                aliases=(f"{self.name}.hook_{letter}_input",),
            )

    def _add_every_head_input(self, norm: Site, prefix: str) -> None:
        def by_group(value: Tensor) -> Tensor:
            # A key head serves several query heads: it reads the mean of their inputs (all equal
            # unless edited).
            if self.n_heads == self.n_kv_heads:
                return value
            return reduce(value, "b p (kv group) d -> b p kv d", "mean", kv=self.n_kv_heads)

        linked = []
        for letter in self.part.projections:
            name = join(self.block.prefix, f"{prefix}{letter}_input")
            linked.append(LinkedPoint(name, _unchanged if letter == "q" else by_group))
        self.block.add(
            f"{prefix}attn_in",
            Site(norm.path, "output"),
            PerHeadInput(self.n_heads),
            self._axes("q", self.block.pos, "d_model"),
            group="heavy",
            flag="use_attn_in",
            aliases=(f"{self.name}.hook_attn_in",),
            linked=tuple(linked),
        )

    def _add_latents(self) -> None:
        """Add the latents of queries, and of keys and values, with the norms that make them, under
        DeepSeek's names.
        """
        for name, latent in (("q", self.part.q.latent), ("kv", self.part.k.latent)):
            if latent is None or not latent.path:
                continue
            norm = f"{name}_a_layernorm"
            aliases: PointNames = ()
            axes = f"batch {self.block.pos} d_{name}_latent"
            if not latent.kind.opaque:
                entered = self.points.input(latent.path)
                self.points.add(f"{norm}.hook_in", entered, axes=axes, group="extra")
                norm_points(self.points, norm, latent, axes=axes)
                aliases = (f"{norm}.hook_out",)
            self.points.add(f"hook_{name}_latent", latent.path, axes=axes, aliases=aliases)

    def _add_projections(self) -> None:
        """Add queries, keys and values."""
        part = self.part
        points = self.points
        projections = part.projections
        paths = {projection.path for projection in projections.values()}
        is_fused = len(paths) < len(projections)
        for letter, projection in projections.items():
            pos = self.key_pos if part.cross and letter != "q" else points.pos
            axes = self._axes(letter, pos, part.width(letter))
            names = (f"{letter}.hook_out",)
            self._add_heads(f"hook_{letter}", projection, letter, axes, aliases=names)
            if not (is_fused or self.inner) and projection.latent is None:
                entered = points.input(projection.path)
                axes = f"batch {pos} d_model"
                points.add(f"{letter}.hook_in", entered, Branch(), axes, group="extra")

    def _add_heads(
        self, name: str, projection: Projection, letter: str, axes: str, **more: Unpack[MoreOfPoint]
    ) -> None:
        """Add the heads in a projection's output, including the bias that is added to it."""
        view = projection.view or Heads(self._n_heads(letter))
        if projection.bias is not None:
            module, _, parameter = projection.bias.rpartition(".")
            view = Biased(view, parameter)
            more["sources"] = (self.points.input(module),)
        self.points.add(name, projection.path, view, axes, **more)

    def _add_product(self, scores: View) -> None:
        """Add the factors of the product of queries and keys, the scores, and the pattern."""
        part = self.part
        points = self.points
        key_pos = self.key_pos
        if part.shows_rotated:
            for letter, pos in (("q", points.pos), ("k", key_pos)):
                axes = self._axes(letter, pos, part.width("q"))
                site = points.site(part.core, "attention", letter)
                n_heads = self._n_heads(letter)
                points.add(f"hook_rot_{letter}", site, HeadsFirst(), axes, n_heads=n_heads)
        axes = f"batch {part.heads('q')} {points.pos} {key_pos}"
        site = points.site(part.core, "attention", "scores")
        points.add("hook_attn_scores", site, scores, axes, n_heads=self.n_heads)
        site = points.site(part.core, "attention", "pattern")
        points.add("hook_pattern", site, _pattern_view(scores), axes, n_heads=self.n_heads)

    def _add_others(self) -> None:
        """Add the remaining inner activations: biases of scores, auxiliary modules, and the
        transforms between pattern and `z`.
        """
        part = self.part
        points = self.points
        pos = points.pos
        for path in part.score_bias_modules or ():
            name = module_path(path).rpartition(".")[2]
            axes = f"one places d_{name}"
            points.add(f"{name}.hook_places", path, axes=axes, group="extra")
        for path, axes in part.auxiliary_modules:
            named = " ".join(pos if axis == "pos" else axis for axis in axes.split())
            points.add(f"{module_path(path)}.hook_out", path, axes=named, group="extra")
        if isinstance(part.z_transform, AddedOutput):
            axes = f"batch {part.heads('q')} {pos} {part.width('v')}"
            points.add("hook_branch", part.z_transform.path, axes=axes, group="extra")
        if part.gate:
            axes = self._axes("q", pos, "d_gate")
            self._add_heads("hook_gate", part.gate, "q", axes, group="extra")

    def _add_results(self) -> None:
        """Add `z` and each head's contribution."""
        points = self.points
        part = self.part
        axes = self._axes("q", points.pos, part.width("v"))
        points.add(
            "hook_z", points.input(part.o), Heads(self.n_heads), axes, aliases=("o.hook_in",)
        )
        if self.factor is not None:
            view = _HeadResults(self.n_heads, self.factor)
            axes = self._axes("q", points.pos, "d_model")
            flag = "use_attn_result"
            points.add("hook_result", part.o, view, axes, group="heavy", flag=flag)


def _unchanged(value: Tensor) -> Tensor:
    return value


def qk_norm_points(points: PointList, part: Attention) -> None:
    """Add the points of the norms of queries and keys.

    Args:
        points: the list that they are added to, with the prefix and the module of the attention.
        part: the declaration.
    """
    view = HeadsFirst() if part.norms_over == "heads first" else None
    separator = "*" if part.norms_over == "width" else " "
    for letter, projection in part.projections.items():
        if norm := projection.norm:
            name = f"{letter}_norm"
            axes = f"batch {points.pos} {part.heads(letter)}{separator}{part.width(letter)}"
            points.add(f"{name}.hook_in", points.input(norm.path), view, axes, group="extra")
            norm_points(points, name, norm, view=view, axes=axes)
            points.add(f"{name}.hook_out", norm.path, view, axes, group="extra")
