"""Scores, pattern and `z` recomputed: rotation, scale, cap, bias and mask are those that are declared."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.attention import Attention
from adapters.config import config_of
from adapters.proofs.evidence import Evidence, Place
from adapters.proofs.report import Findings
from adapters.proofs.rotation import prove_rotation

SCORES = "scores are queries times keys, with the declared norms, rotation, scale, cap and bias"
PATTERN = "the pattern is the softmax of the scores, less what declared sinks take"
VALUES = "pattern @ v = z"
MASK = "attention goes where the declared direction and window allow it"

#: Of queries, or of keys: they may differ in everything but the batch.
Heads = Float[Tensor, "_batch _pos _head _d_head"]


def prove_attention(evidence: Evidence, findings: Findings) -> None:
    """Scores from queries and keys, the pattern from scores, `z` from pattern and values, in every attention.

    Args:
        evidence: a driven run.
        findings: what is found is added to it.
    """
    for claim in (SCORES, PATTERN, VALUES, MASK):
        findings.claim(claim)
    rotates = []
    biases: dict[str, Tensor] = {}
    for place in evidence.places():
        part = place.named.step.part
        if not isinstance(part, Attention):
            continue
        if not part.shows_scores:
            for claim in (SCORES, PATTERN, VALUES, MASK):
                findings.untold(claim, f"{place.part}: its scores cannot be seen")
            continue
        proof = _Attention(evidence, findings, place, part)
        rotates.append(proof.prove(biases))
    cfg = evidence.bridge.cfg
    if rotates:
        declared = cfg.positional_embedding_type == "rotary"
        if cfg.positional_embedding_type == "relative_positional_bias":
            findings.holds(SCORES, "position bias", bool(biases), "cfg says that there is one, and no table of it ran")
        findings.holds(SCORES, "rotary", any(rotates) == declared, f"in the layers {rotates}, and cfg says {declared}")


def normed(evidence: Evidence, place: Place, part: Attention, letter: str) -> Heads | None:
    """Queries or keys behind their norm, where they have one."""
    made = evidence.get(f"{place.part}hook_{letter}")
    norm = part.q_norm if letter == "q" else part.k_norm
    if norm is None or made is None:
        return made
    call = evidence.call(place.module, norm.path)
    if call is None or call.result is None:
        return None
    result = call.result
    if part.qk_norm_over == "heads first":
        result = result.transpose(1, 2)
    return result.reshape(made.shape) if result.numel() == made.numel() else None


class _Attention:
    def __init__(self, evidence: Evidence, findings: Findings, place: Place, part: Attention) -> None:
        self.evidence, self.findings, self.place, self.part = evidence, findings, place, part
        self.cfg = evidence.bridge.cfg
        types = self.cfg.attn_types
        self.local = bool(types and self.cfg.use_local_attn and types[place.layer] == "local")

    def get(self, name: str) -> Tensor | None:
        return self.evidence.get(f"{self.place.part}hook_{name}")

    def prove(self, biases: dict[str, Tensor]) -> bool:
        """Whether queries and keys are rotated here."""
        at = self.place.part
        q, k = (normed(self.evidence, self.place, self.part, letter) for letter in "qk")
        for letter in "qk":
            self._norm_reads(letter)
        scores, pattern, v, z = map(self.get, ("attn_scores", "pattern", "v", "z"))
        if q is None or k is None or scores is None or pattern is None or v is None or z is None:
            self.findings.holds(SCORES, at, False, "queries, keys, values, scores, pattern and z did not all run")
            return False
        rotated = False
        if self.part.rotary:
            turned_q, turned_k = self.get("rot_q"), self.get("rot_k")
            config = config_of(self.evidence.bridge.core)
            turned = (turned_q, turned_k)
            rotated = prove_rotation(self.findings, SCORES, at, self.cfg, config, self.local, (q, k), turned)
            q, k = turned_q, turned_k
        assert q is not None and k is not None
        n_heads = pattern.shape[1]
        if q.shape[2] != n_heads or n_heads % k.shape[2] or n_heads % v.shape[2]:
            self.findings.holds(SCORES, at, False, f"{q.shape[2]} and {k.shape[2]} heads for {n_heads} patterns")
            return rotated
        self._scores(q, k, scores, biases)
        self._pattern(scores, pattern)
        repeated = v.repeat_interleave(n_heads // v.shape[2], 2)
        product = torch.einsum("bhqk,bkhd->bqhd", pattern.double(), repeated.double())
        self.findings.equal(VALUES, f"{at}hook_z", z, product.to(z.dtype), float(v.abs().max()))
        self._mask(pattern)
        return rotated

    def _norm_reads(self, letter: str) -> None:
        norm = self.part.q_norm if letter == "q" else self.part.k_norm
        if norm is None:
            return
        made = self.get(letter)
        call = self.evidence.call(self.place.module, norm.path)
        entered = call.input if call else None
        if entered is not None and made is not None and self.part.qk_norm_over == "heads first":
            entered = entered.transpose(1, 2)
        if entered is not None and made is not None and entered.numel() == made.numel():
            width = made.shape[-1] * (made.shape[-2] if self.part.qk_norm_over == "width" else 1)
            over = call.input.shape[-1] if call and call.input is not None else 0
            self.findings.holds(SCORES, f"{self.place.part}{letter}_norm", over == width, f"it is over {over} columns")
            entered = entered.reshape(made.shape)
        self.findings.equal(SCORES, f"{self.place.part}{letter}_norm", entered, made)

    def _scores(self, q: Heads, k: Heads, scores: Tensor, biases: dict[str, Tensor]) -> None:
        cfg, at = self.cfg, f"{self.place.part}hook_attn_scores"
        repeated = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        made = torch.einsum("bqhd,bkhd->bhqk", q.double(), repeated.double())
        size = float(made.abs().max())
        scale = cfg.attn_scale if cfg.use_attn_scale and cfg.attn_scale is not None else 1.0
        if cfg.scale_attn_by_inverse_layer_idx:
            scale *= self.place.layer + 1
        made, size = made / scale, size / scale
        if cfg.attn_scores_soft_cap > 0:
            cap = cfg.attn_scores_soft_cap
            made = cap * (made / cap).tanh()
            size = min(size, cap)
        seen = scores.isfinite()
        bias = torch.where(seen, scores.double() - made, torch.nan)
        kind = cfg.positional_embedding_type
        if kind not in ("alibi", "relative_positional_bias"):
            self.findings.equal(SCORES, at, scores.where(seen, 0), made.where(seen, 0.0).to(scores.dtype), size)
            return
        # A bias depends on the places alone: it is the same in every row of the batch.
        one = bias.nanmean(0)
        expected = (made + one).where(seen, 0.0).to(scores.dtype)
        self.findings.equal(SCORES, at, scores.where(seen, 0), expected, size)
        if kind == "alibi":
            self._alibi(one, at)
        else:
            self._relative(one, at, biases)

    def _alibi(self, bias: Float[Tensor, "head query key"], at: str) -> None:
        _, queries, keys = bias.shape
        distance = (torch.arange(keys)[None] - torch.arange(queries)[:, None]).to(bias)
        there = ~bias.isnan()
        slopes = (bias * distance).where(there, 0).sum((-1, -2)) / (distance**2 * there).sum((-1, -2))
        expected = slopes[:, None, None] * distance
        ok = self.findings.equal(
            SCORES, at, bias.where(there, 0), expected.where(there, 0), float(bias[there].abs().max())
        )
        if ok:
            self.findings.holds(SCORES, at, bool((slopes > 0).all()), "the slopes of ALiBi are not above zero")

    def _relative(self, bias: Float[Tensor, "head query key"], at: str, biases: dict[str, Tensor]) -> None:
        part, cfg, place = self.part, self.cfg, self.place
        there = ~bias.isnan()
        size = max(float(bias[there].abs().max()), 1e-3)
        if part.cross or part.position_bias is None:
            self.findings.holds(SCORES, at, size <= 1e-3, "there is a position bias, and none is declared")
            return
        call = self.evidence.call(place.module, part.position_bias)
        if call is not None and isinstance(weight := getattr(call.module, "weight", None), Tensor):
            biases[place.stack.name] = weight.detach()
        table = biases.get(place.stack.name)
        buckets, most = cfg.relative_attention_num_buckets, cfg.relative_attention_max_distance
        if table is None or buckets is None or most is None or table.shape[0] != buckets:
            self.findings.holds(SCORES, at, False, f"no table of {buckets} biases at {part.position_bias}")
            return
        _, queries, keys = bias.shape
        distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        causal = bool(there.tril().equal(there))
        number = relative_buckets(distance, buckets, most, both=not causal).to(table.device)
        expected = table[number].permute(2, 0, 1).to(bias)
        # Scores hold their bias to within their own rounding.
        self.findings.holds(
            SCORES,
            at,
            float((bias - expected)[there].abs().max()) < max(1e-3 * size, 1e-4),
            f"its bias is not {part.position_bias} with {buckets} buckets up to {most}",
        )

    def _pattern(self, scores: Tensor, pattern: Tensor) -> None:
        sinks: Tensor | None = None
        if self.part.sinks:
            site = self.evidence.bridge.hook_dict[f"{self.place.part}hook_pattern"].point.site
            sinks = getattr(self.evidence.bridge.original_model.get_submodule(site.path), self.part.sinks, None)
            if not isinstance(sinks, Tensor) or sinks.numel() != scores.shape[1]:
                self.findings.holds(PATTERN, f"{self.place.part}hook_pattern", False, f"no sinks in {self.part.sinks}")
                return
        wide = scores.double()
        somewhere = wide.isfinite().any(-1, keepdim=True)
        wide = wide.masked_fill(~somewhere, 0)
        if sinks is not None:
            column = sinks.detach().double().view(1, -1, 1, 1).expand(*wide.shape[:-1], 1)
            expected = torch.cat([wide, column], -1).softmax(-1)[..., :-1]
        else:
            expected = wide.softmax(-1)
        seen = pattern.masked_fill(~somewhere, 0)
        expected = expected.masked_fill(~somewhere, 0).to(pattern.dtype)
        self.findings.equal(PATTERN, f"{self.place.part}hook_pattern", seen, expected, 1.0)

    def _mask(self, pattern: Tensor) -> None:
        """Where attention goes in some row of the batch, by where it may go."""
        if self.place.stack is not self.evidence.bridge.architecture.stack:
            return  # cfg speaks of the first
        _, _, queries, keys = pattern.shape
        seen = (pattern > 0).any(0).any(0).cpu()
        back = torch.arange(queries)[:, None] - torch.arange(keys)[None]
        allowed = back >= 0 if self.cfg.attention_dir == "causal" else torch.ones_like(back, dtype=torch.bool)
        window = self.cfg.window_size
        if self.local and window is not None:
            allowed = allowed & (back < window) & (back > -window)
            if window > queries:
                self.findings.untold(MASK, f"a window of {window} is longer than the text of {queries} tokens")
        at = f"{self.place.part}hook_pattern"
        more, less = (seen & ~allowed).nonzero().tolist(), (allowed & ~seen).nonzero().tolist()
        if more:
            self.findings.holds(MASK, at, False, f"token {more[0][0]} attends to token {more[0][1]}")
        elif less:
            self.findings.holds(MASK, at, False, f"token {less[0][0]} does not attend to token {less[0][1]}")
        else:
            self.findings.holds(MASK, at, True)


def relative_buckets(distance: Tensor, buckets: int, most: int, *, both: bool) -> Tensor:
    """The number of the bias for each distance (Raffel et al. 2020): exact for short ones, logarithmic up to `most`.

    Args:
        distance: from the query to the key.
        buckets: how many there are.
        most: from which distance on all have the last.
        both: half of them are for keys behind the query.
    """
    found = torch.zeros_like(distance)
    if both:
        buckets //= 2
        found = (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = -distance.clamp_max(0)
    exact = buckets // 2
    far = exact + (
        (distance.clamp_min(1).float() / exact).log() / math.log(most / exact) * (buckets - exact)
    ).long().clamp_max(buckets - exact - 1)
    return found + torch.where(distance < exact, distance, far)
