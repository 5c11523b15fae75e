"""Proofs of scores, pattern and `z` by recomputation with the declared rotation, scale, cap, bias
and mask.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from adapters.attention import (
    AddedOutput,
    Gate,
    SinkGate,
    capped,
    pattern_of,
    result_of,
    scores_of,
    with_sinks,
)
from adapters.inputs import repeated, split
from adapters.linear import materialized
from adapters.norms import Norm
from adapters.points import join
from adapters.proofs.evidence import (
    AttentionClaim,
    Claim,
    Evidence,
    Findings,
    Hook,
    NamedHook,
    largest,
    like,
)
from adapters.proofs.positions import SCORES, ByHead, RelativeBuckets, RotaryAngles
from adapters.views import Affine, AlibiScores

PATTERN = "the pattern is the softmax of the scores, less what declared sinks take"
VALUES = "pattern @ v = z"
MASK = "attention goes where the declared direction and window allow it"

#: A soft cap is distinguishable from one that is larger by this factor.
_NEXT = 1.005
#: For each head, query and key: the number that the model adds to the score.
Bias = Float[Tensor, "head query key"]


def prove_attention(evidence: Evidence, findings: Findings) -> None:
    """Check in every attention the scores from queries and keys, the pattern from scores, and `z`
    from pattern and values.

    Args:
        evidence: a run with randomized activations.
        findings: collects the results.
    """
    claims = (SCORES, PATTERN, VALUES, MASK)
    findings.claim(*claims)
    rotates: dict[str, bool] = {}
    biases: dict[str, Tensor] = {}
    for place, part in evidence.attentions():
        if part.scores is None:
            for claim in claims:
                findings.inconclusive(claim, f"{place.part}: its scores cannot be seen")
            continue
        proof = _Attention(evidence, findings, place)
        if not part.projections:
            proof.prove_kernel()
            continue
        rotated = proof.prove(biases)
        if part.rotary:
            name = place.stack.name
            rotates[name] = rotated or rotates.get(name, False)
    attends = any(part.projections for _, part in evidence.attentions())
    if attends and "attention_mask" not in evidence.more:
        _Positions(evidence, findings).prove(rotates, biases)


class _Positions(Claim):
    """The kind of positional encoding named by `cfg` occurs in some layer."""

    name = SCORES

    def prove(self, rotates: dict[str, bool], biases: dict[str, Tensor]) -> None:
        """Check that there are the declared biases or rotations.

        Args:
            rotates: for each stack with declared rotations, whether queries or keys are rotated in
                any layer.
            biases: for each stack, its table of relative biases.
        """
        kind = self.cfg.positional_embedding_type
        if kind == "relative_positional_bias":
            self.holds(
                "position bias", bool(biases), "cfg says that there is one, and no table of it ran"
            )
        declared = bool(rotates) or kind != "rotary"
        self.holds("rotary", declared, "cfg says that they are rotated")
        for stack, rotated in rotates.items():
            self.holds(f"{stack}, rotary", rotated, "queries and keys are rotated in no layer")


# --------------------------------------------------------------------------------------------------
# One attention: its queries and keys, and the claims about it in order.
# --------------------------------------------------------------------------------------------------


class _Attention(AttentionClaim):
    """The queries and keys of an attention enter its scores."""

    name = SCORES

    def prove(self, biases: dict[str, Tensor]) -> bool:
        """Check this attention and return whether its queries and keys are rotated.

        Args:
            biases: for each stack, its table of relative biases; filled by the layer that has it.
        """
        run = self.evidence, self.findings, self.place
        q = self._normed("q")
        k = self._normed("k")
        self._prove_norm_input("q")
        self._prove_norm_input("k")
        self._prove_latents()
        scores = self.get("attn_scores")
        pattern = self.get("pattern")
        v = self._clamped(self.get("v"))
        z = self.get("z")
        if q is None or k is None or scores is None or pattern is None:
            return self._note_missing()
        if self.part.o and (v is None or z is None):
            return self._note_missing()
        rotated = False
        rotated_q: Tensor | None = q
        rotated_k: Tensor | None = k
        if self.part.shows_rotated:
            rotated_q = self.get("rot_q")
            rotated_k = self.get("rot_k")
            rotated = self._prove_rotation(q, k, rotated_q, rotated_k)
        if rotated_q is not None and rotated_k is not None:
            if not self._heads_fit(rotated_q, rotated_k, v, pattern.shape[1]):
                return rotated
            _Scores(*run).prove(rotated_q, rotated_k, scores, biases)
        elif RotaryAngles(*run).is_left_out:
            point = self.point("rot_q")
            self.inconclusive(f"{point} and hook_rot_k: they are not offered")
        else:
            self.fails(self.place.part, "queries or keys after their rotation are not shown")
            return rotated
        _Pattern(*run).prove(scores, pattern)
        _Values(*run).prove(v, pattern, z, scores)
        _Mask(*run).prove(pattern)
        return rotated

    def prove_kernel(self) -> None:
        """Check the scores of queries and keys at the attention kernel, and their pattern. Their
        projections and the reader of the result are unknown.
        """
        run = self.evidence, self.findings, self.place
        scores = self.get("attn_scores")
        pattern = self.get("pattern")
        if scores is None or pattern is None:
            self._note_not_offered("attn_scores", "pattern")
            return
        q = self.get("rot_q")
        k = self.get("rot_k")
        if q is None or k is None:
            self._note_not_offered("rot_q", "rot_k")
        else:
            n_queries = q.shape[2]
            n_keys = k.shape[2]
            n_heads = pattern.shape[1]
            if n_queries != n_heads or n_heads % n_keys:
                self.fails(self.place.part, f"{n_queries} and {n_keys} heads")
            else:
                _Scores(*run).prove(q, k, scores, {})
        _Values(*run).prove(None, pattern, None, scores)
        _Pattern(*run).prove(scores, pattern)
        _Mask(*run).prove(pattern)

    def _note_missing(self) -> bool:
        """Record that some activations did not run, or are not available. Return whether queries
        and keys may be rotated.
        """
        for name in ("q", "k", "attn_scores", "pattern", "v", "z"):
            point = self.point(name)
            if self.findings.is_left_out(point):
                self.inconclusive(f"{point} is not offered")
                return bool(self.part.rotary)
        self.fails(self.place.part, "queries, keys, values, scores, pattern and z did not all run")
        return False

    def _note_not_offered(self, *names: str) -> None:
        """Record that hook points are not available, or did not run."""
        for name in names:
            point = self.point(name)
            if point in self.bridge.hook_dict:
                self.holds(point, self.get(name) is not None, "it did not run")
            else:
                self.inconclusive(f"{point} is not offered")

    def _heads_fit(self, q: ByHead, k: ByHead, v: ByHead | None, n_heads: int) -> bool:
        """Check that the heads of queries, keys and values can be assigned to the pattern's
        heads."""
        n_queries = q.shape[2]
        n_keys = k.shape[2]
        shares_values = v is None or not n_heads % v.shape[2]
        if n_queries == n_heads and not n_heads % n_keys and shares_values:
            return True
        self.fails(self.place.part, f"{n_queries} and {n_keys} heads for {n_heads} patterns")
        return False

    def _prove_rotation(
        self, q: ByHead, k: ByHead, rotated_q: Tensor | None, rotated_k: Tensor | None
    ) -> bool:
        """Check the rotation, before any norms that follow it. Return whether there is a
        rotation."""
        if self.part.rotary == "first":
            rotated_q = self._before_norm("q", rotated_q)
            rotated_k = self._before_norm("k", rotated_k)
        rotation = RotaryAngles(self.evidence, self.findings, self.place)
        return rotation.prove(q, k, rotated_q, rotated_k)

    # ----------------------------------------------------------------------------------------------
    # Norms and clamps of queries, keys and values.
    # ----------------------------------------------------------------------------------------------

    def _norm_of(self, letter: str) -> Norm | None:
        """Return the norm of queries or keys."""
        return (self.part.q if letter == "q" else self.part.k).norm

    def _by_position(self, x: Tensor | None) -> Tensor | None:
        """Return the input or output of a norm of heads with positions before heads."""
        if x is None or self.part.norms_over != "heads first":
            return x
        return x.transpose(1, 2)

    def _clamped(self, x: Tensor | None) -> Tensor | None:
        """Return queries, keys or values after the declared clamp."""
        clip = self.part.clip
        return x if x is None or clip is None else x.clamp(-clip, clip)

    def _normed(self, letter: str) -> Tensor | None:
        """Return queries or keys after their norm, if they have one."""
        norm = self._norm_of(letter)
        projected = self.get(letter)
        if norm is None or projected is None or self.part.rotary == "first":
            return self._clamped(projected)
        module = self.place.projecting(letter).module
        normed = self._by_position(self.evidence.output_of(module, norm.path))
        if normed is None or normed.numel() != projected.numel():
            return None
        normed = normed.reshape(projected.shape)
        return self._clamped(normed) if self.part.clips_normed else normed

    def _before_norm(self, letter: str, rotated: ByHead | None) -> Tensor | None:
        """Return the input of the norm that follows the rotation, and check that its output enters
        the product.
        """
        norm = self._norm_of(letter)
        if norm is None:
            return rotated
        module = self.place.projecting(letter).module
        entered = self._by_position(self.evidence.input_of(module, norm.path))
        normed = self._by_position(self.evidence.output_of(module, norm.path))
        if entered is None or normed is None:
            return rotated
        self.equal(f"{self.place.part}{letter}_norm", rotated, normed)
        return entered

    def _prove_norm_input(self, letter: str) -> None:
        """Check that the norm of queries or keys reads the projection's output."""
        norm = self._norm_of(letter)
        if norm is None or self.part.rotary == "first" or letter not in self.part.projections:
            return
        projected = self.get(letter)
        if not self.part.clips_normed:
            projected = self._clamped(projected)
        entered = self.input_of(norm.path)
        columns = 0 if entered is None else entered.shape[-1]
        entered = self._by_position(entered)
        place = f"{self.place.part}{letter}_norm"
        if entered is not None and projected is not None and entered.numel() == projected.numel():
            axes = 2 if self.part.norms_over == "width" else 1
            width = projected.shape[-axes:].numel()
            self.holds(place, columns == width, f"it is over {columns} columns")
            entered = entered.reshape(projected.shape)
        self.equal(place, entered, projected)

    def _prove_latents(self) -> None:
        """Check that each declared latent is the input of its projection."""
        for projection in (self.part.q, self.part.k, self.part.v):
            if projection.latent and (path := projection.latent.path):
                latent = self.output_of(path)
                read = self.input_of(projection.path)
                place = f"{self.place.part}({path}, read by {projection.path})"
                self.equal(place, latent, like(read, latent))


# --------------------------------------------------------------------------------------------------
# Scores: products of queries and keys, with the scale, the cap and the bias of positions.
# --------------------------------------------------------------------------------------------------


def _queries_with_tokens(claim: AttentionClaim, scores: Tensor) -> Bool[Tensor, "..."]:
    """Return the queries that have a token at or before their position, ``[batch, 1, query, 1]``;
    others attend to padding only.
    """
    mask = claim.evidence.more.get("attention_mask")
    if (
        mask is None
        or claim.cfg.attention_dir != "causal"
        or claim.part.cross
        or mask.shape[-1] != scores.shape[-2]
    ):
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=scores.device)
    return (mask.cumsum(-1) > 0)[:, None, :, None].to(scores.device)


def _product(q: ByHead, k: ByHead, factor: float) -> Tensor:
    """Return scores, ``[batch, head, query, key]``, in double precision."""
    return scores_of(q.double().transpose(1, 2), k.double().transpose(1, 2), factor)


class _Scores(AttentionClaim):
    """The scores of an attention."""

    name = SCORES

    def prove(self, q: ByHead, k: ByHead, scores: Tensor, biases: dict[str, Tensor]) -> None:
        """Check the scores.

        Args:
            q, k: queries and keys as they enter the product.
            scores: the observed scores.
            biases: as for `_Attention.prove`.
        """
        point = self.point("attn_scores")
        scale = self._scale
        expected = _product(q, k, 1 / scale)
        size = largest(expected)
        if self.cfg.attn_scores_soft_cap > 0:
            size = min(size, self.cfg.attn_scores_soft_cap)
            expected = self._capped(expected, size)
        visible = scores.isfinite() & _queries_with_tokens(self, scores)
        if self.part.score_bias_modules is not None:
            if not self.padded:
                self._prove_interaction(q, k, scale)
            return
        if bool((scores.amax(-1)[visible.any(-1)] == 0).all()):  # MiMo; the softmax is the same
            most = expected.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
            expected = expected - most
            self.inconclusive(f"{point} is less the largest score of each row")
        kind = self.cfg.positional_embedding_type
        if self.padded and kind == "alibi":
            return  # the model counts the positions of each row from its first token
        bias: Bias | None = None
        if kind in ("alibi", "relative_positional_bias"):
            # A bias depends only on positions: it is the same in every row of the batch.
            rest = torch.where(visible, scores.double() - expected, torch.nan)
            bias = rest.nanmean(0)
            expected = expected + bias
        expected = expected.where(visible, 0.0).to(scores.dtype)
        self.equal(point, scores.where(visible, 0), expected, size)
        if bias is not None and kind == "alibi":
            self._prove_slopes(bias)
        elif bias is not None:
            self._prove_buckets(bias, biases)

    @property
    def _scale(self) -> float:
        """Return the divisor of the scores."""
        cfg = self.cfg
        scale = 1.0
        if cfg.use_attn_scale and cfg.attn_scale is not None:
            scale = cfg.attn_scale
        scale = self.part.own("attn_scale", scale)
        return scale * (self.place.layer + 1) if cfg.scale_attn_by_inverse_layer_idx else scale

    def _capped(self, scores: Tensor, size: float) -> Tensor:
        """Return scores with the soft cap; record it if they are too small for the cap to
        matter."""
        cap = self.cfg.attn_scores_soft_cap
        expected = capped(scores, cap)
        effect = largest(capped(scores, cap * _NEXT) - expected)
        if effect <= 10 * self.findings.tolerance * size:
            self.inconclusive(f"{cap} from a soft cap that differs by 0.5 %, as scores are small")
        return expected

    def _prove_slopes(self, bias: Bias) -> None:
        """Check that a bias is the distance times a slope for each head (ALiBi)."""
        point = self.point("attn_scores")
        distance = _distances(bias).to(bias)
        if not isinstance(self.part.scores, AlibiScores):
            # The model adds biases relative to the first or last key: a constant in each row of the
            # softmax.
            bias = bias - bias.diagonal(dim1=-2, dim2=-1)[..., None]
        known = ~bias.isnan()
        squares = (distance**2 * known).sum((-1, -2))
        slopes = (bias * distance).where(known, 0).sum((-1, -2)) / squares
        expected = (slopes[:, None, None] * distance).where(known, 0)
        size = largest(bias[known])
        if self.equal(point, bias.where(known, 0), expected, size):
            above = bool((slopes > 0).all())
            self.holds(point, above, "the slopes of ALiBi are not above zero")

    def _prove_buckets(self, bias: Bias, biases: dict[str, Tensor]) -> None:
        """Check that a bias is the table's entry for the bucket of each distance (T5)."""
        part = self.part
        point = self.point("attn_scores")
        known = ~bias.isnan()
        size = max(largest(bias[known]), 1e-3)
        if part.cross or part.position_bias is None:
            self.holds(point, size <= 1e-3, "there is a position bias, and none is declared")
            return
        table = self._bias_table(part.position_bias, biases)
        count = self.cfg.relative_attention_num_buckets
        most = self.cfg.relative_attention_max_distance
        if table is None or count is None or most is None or table.shape[0] != count:
            self.fails(point, f"no table of {count} biases at {part.position_bias}")
            return
        causal = bool(known.tril().equal(known))
        buckets = RelativeBuckets(count, most, both=not causal)
        for other in (most - 1, most + 1):
            if buckets.telling_distance(other) >= max(bias.shape[1:]):
                stack = self.place.stack.name
                self.inconclusive(f"{stack}: {most} from {other} as the largest distance")
        numbers = buckets.of(_distances(bias)).to(table.device)
        expected = table[numbers].permute(2, 0, 1).to(bias)
        # Scores determine their bias up to their own rounding.
        worst = largest((bias - expected)[known])
        self.holds(
            point,
            worst < max(1e-3 * size, 1e-4),
            f"its bias is not {part.position_bias} with {count} buckets up to {most}",
        )

    def _bias_table(self, path: str, biases: dict[str, Tensor]) -> Tensor | None:
        """Return the table of biases of this attention, or of an earlier one in its stack."""
        call = self.call(path)
        weight = getattr(call.module, "weight", None) if call is not None else None
        if isinstance(weight, Tensor):
            biases[self.place.stack.name] = weight.detach()
        return biases.get(self.place.stack.name)

    # ----------------------------------------------------------------------------------------------
    # Scores with terms that depend on queries, keys or positions alone, in addition to the product
    # of queries and keys.
    # ----------------------------------------------------------------------------------------------

    def _prove_interaction(self, q: ByHead, k: ByHead, scale: float) -> None:
        """Check the query-key product when the scores contain further terms, each of which depends
        on only one of the two factors. Four rows contain all pairs of two queries and two keys; in
        their alternating sum, terms that depend on one factor cancel.
        """
        point = self.point("attn_scores")
        generator = torch.Generator().manual_seed(2)
        two_queries = torch.randn(2, *q.shape[1:], generator=generator, device="cpu")
        two_keys = torch.randn(2, *k.shape[1:], generator=generator, device="cpu")
        queries = two_queries[[0, 0, 1, 1]].to(q)
        keys = two_keys[[0, 1, 0, 1]].to(k)
        scores = self._scores_with(queries, keys)
        self._prove_no_bias(q.shape[2:].numel())
        product = _product(queries, keys, 1 / scale)
        size = largest(product)
        finite = scores.isfinite().all(0)
        observed = _alternating_sum(scores).where(finite, 0)
        expected = _alternating_sum(product).where(finite, 0)
        if self.equal(point, observed, expected, size):
            terms = (scores - product).where(finite, 0)
            spread = largest(terms - terms.mean(-1, keepdim=True))
            self.holds(
                point,
                spread > 1e-4 * size,
                "something is declared to be added to it, and nothing is",
            )
            self.inconclusive(
                f"{point} is the product and what queries, keys or places alone add to it"
            )

    def _scores_with(self, queries: ByHead, keys: ByHead) -> Tensor:
        """Return the scores that the model computes from these queries and keys."""
        observed: list[Tensor] = []
        turned = "rot_" if self.part.shows_rotated else ""

        def look(x: Tensor, hook: Hook) -> None:
            observed.append(x.detach().double())

        hooks: list[NamedHook] = [
            (self.point(f"{turned}q"), lambda x, hook: queries),
            (self.point(f"{turned}k"), lambda x, hook: keys),
            (self.point("attn_scores"), look),
        ]
        first = {name: x[:1] for name, x in self.evidence.arguments.items()}
        with torch.no_grad():
            tokens, more = split(self.bridge.core, repeated(first, len(queries)))
            self.bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more)
        (scores,) = observed
        return scores

    def _prove_no_bias(self, width: int) -> None:
        """Check that the attention has no parameter that may be the bias of a projection of this
        width, unless it is declared.
        """
        core = self.part.core
        declared = [projection.bias for projection in self.part.projections.values()]
        module = self.evidence.module(self.path, core)
        for name, parameter in module.named_parameters(recurse=False):
            known = parameter.numel() != width or join(core, name) in declared
            self.holds(
                self.point("attn_scores"),
                known,
                f"{name} is added to a projection, and no bias is declared",
            )


def _distances(bias: Bias) -> Tensor:
    """Return the distance from each query to each key."""
    _, queries, keys = bias.shape
    return torch.arange(keys, device="cpu")[None] - torch.arange(queries, device="cpu")[:, None]


def _alternating_sum(rows: Tensor) -> Tensor:
    """Return the alternating sum of four rows, in which terms that depend on one factor cancel."""
    return rows[0] - rows[1] - rows[2] + rows[3]


# --------------------------------------------------------------------------------------------------
# The pattern, where it attends, and `z`.
# --------------------------------------------------------------------------------------------------


class _Pattern(AttentionClaim):
    """The pattern of an attention."""

    name = PATTERN

    def prove(self, scores: Tensor, pattern: Tensor) -> None:
        """Check that the pattern is the softmax of the scores, with the declared sinks."""
        point = self.point("pattern")
        somewhere = scores.isfinite().any(-1, keepdim=True)
        finite = scores.double().masked_fill(~somewhere, 0)
        if self.part.sinks:
            site = self.bridge.hook_dict[point].point.site
            sinks = materialized(self.evidence.module(site.path), self.part.sinks)
            if not isinstance(sinks, Tensor) or sinks.numel() != scores.shape[1]:
                self.fails(point, f"no sinks in {self.part.sinks}")
                return
            finite = with_sinks(finite, sinks.detach())
        expected = pattern_of(finite)[..., : pattern.shape[-1]]
        expected = expected.masked_fill(~somewhere, 0).to(pattern.dtype)
        self.equal(point, pattern.masked_fill(~somewhere, 0), expected, 1.0)


class _Values(AttentionClaim):
    """The product of the pattern and the values."""

    name = VALUES

    def prove(self, v: ByHead | None, pattern: Tensor, z: Tensor | None, scores: Tensor) -> None:
        """Check ``pattern @ v = z``, with the declared transform, for the queries that attend to a
        token.
        """
        if v is None or z is None:
            place = self.place.part
            self.inconclusive(f"{place}: what makes or reads its values is not known")
            return
        point = self.point("z")
        transform = self.part.z_transform
        if norm := self.part.v.norm:
            module = self.place.projecting("v").module
            normed = self.evidence.output_of(module, norm.path)
            if normed is None or normed.numel() != v.numel():
                self.fails(point, f"{norm.path} did not norm the values")
                return
            v = normed.reshape(v.shape)
        product = result_of(pattern.double(), v.double().transpose(1, 2)).transpose(1, 2)
        if isinstance(transform, Norm):
            self._prove_norm(transform, product, z)
            return
        transformed = self._transformed(transform, product)
        if isinstance(transformed, str):
            self.fails(point, transformed)
            return
        visible = _queries_with_tokens(self, scores).transpose(1, 2)
        expected = transformed.where(visible, 0).to(z.dtype)
        self.equal(point, z.where(visible, 0), expected, largest(v))

    def _transformed(
        self, transform: Gate | SinkGate | AddedOutput | Affine | None, product: Tensor
    ) -> Tensor | str:
        """Return the declared transform of ``pattern @ v``; or the reason why it did not run."""
        module = self.evidence.module(self.path)
        if isinstance(transform, Gate):
            gate = self.get("gate")
            if gate is None:
                return f"the gate {transform.projection.path} did not run"
            return transform.of(product, gate)
        if isinstance(transform, SinkGate):
            scores = self.get("attn_scores")
            sinks = materialized(module, transform.parameter)
            if scores is None or not isinstance(sinks, Tensor):
                return f"there are no sinks in {transform.parameter}"
            return transform.of(product, scores, sinks.detach())
        if isinstance(transform, AddedOutput):
            added = self.output_of(transform.path)
            if added is None or added.ndim != 4:
                return f"{transform.path} returned no tensor of heads"
            return transform.of(product, added)
        return product if transform is None else transform.of(product, module)

    def _prove_norm(self, norm: Norm, product: Tensor, z: Tensor) -> None:
        """Check a norm between ``pattern @ v`` and `z`, over each head or over all."""
        point = self.point("z")
        entered = self.input_of(norm.path)
        normed = self.output_of(norm.path)
        if (
            entered is None
            or normed is None
            or entered.numel() != product.numel()
            or normed.numel() != z.numel()
        ):
            self.fails(point, f"{norm.path} did not norm pattern @ v")
            return
        self.equal(point, entered.reshape(product.shape), product.to(entered.dtype))
        self.equal(point, z, normed.reshape(z.shape))


class _Mask(AttentionClaim):
    """The positions that an attention attends to."""

    name = MASK

    def prove(self, pattern: Tensor) -> None:
        """Check that the batch rows together attend to every allowed position, and to no others."""
        if self.padded or self.part.cross:
            return
        if self.place.stack is not self.architecture.stack:
            return  # cfg describes self-attention of the first stack
        point = self.point("pattern")
        if self.part.keys_from == "more":
            self.inconclusive(f"{point}: which keys behind those of positions are seen")
            pattern = pattern[..., : pattern.shape[-2]]
        _, _, queries, keys = pattern.shape
        back = torch.arange(queries, device="cpu")[:, None] - torch.arange(keys, device="cpu")[None]
        attended = (pattern > 0).any(0).any(0).cpu()
        allowed = self._allowed(back, attended)
        excess = (attended & ~allowed).nonzero().tolist()
        missing = (allowed & ~attended).nonzero().tolist()
        if excess:
            query, key = excess[0]
            self.fails(point, f"token {query} attends to token {key}")
        elif not missing:
            self.holds(point, True)
        else:
            query, key = missing[0]
            distances = {position - other for position, other in missing}
            elsewhere = distances <= set(back[attended].tolist())
            if self._chooses_keys(pattern, elsewhere):
                self.inconclusive(f"{point}: whether token {query} may attend to token {key}")
            else:
                self.fails(point, f"token {query} does not attend to token {key}")

    def _chooses_keys(self, pattern: Tensor, elsewhere: bool) -> bool:
        """Tell whether an indexer chose the keys of each row.

        Args:
            pattern: the pattern.
            elsewhere: whether other queries attend to keys at the distances that are missing.
        """
        if self.part.auxiliary_modules and self.part.o:
            return True
        rows = (pattern > 0).any(1)
        return elsewhere and bool((rows != rows[:1]).any())

    def _allowed(self, back: Tensor, attended: Tensor) -> Tensor:
        """Return where a query may attend to a key, considering direction and window.

        Args:
            back: the distance from each query back to each key.
            attended: where any head attends.
        """
        causal = self.cfg.attention_dir == "causal"
        allowed = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
        window = self.cfg.window_size
        if not self.is_local or window is None:
            return allowed
        ahead = window
        if not causal and int(-back[attended].min()) == window:  # T5Gemma 2's encoder
            self.inconclusive(f"{window} tokens ahead are seen, and {window - 1} back as cfg says")
            ahead += 1
        queries = len(back)
        if window > queries:
            self.inconclusive(f"a window of {window} is longer than the text of {queries} tokens")
        return allowed & (back < window) & (back > -ahead)
