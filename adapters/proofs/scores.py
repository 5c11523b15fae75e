"""Scores, pattern and `z` recomputed: rotation, scale, cap, bias and mask are those that are declared."""

from __future__ import annotations

import copy
import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from adapters.attention import (
    AddedOutput,
    Attention,
    Gate,
    SinkGate,
    capped,
    pattern_of,
    result_of,
    scores_of,
    with_sinks,
)
from adapters.config import config_of
from adapters.imports import rotation_of
from adapters.inputs import repeated, split
from adapters.linear import materialized
from adapters.norms import Norm
from adapters.points import join
from adapters.proofs.evidence import Evidence, Findings, LayerStep, NamedHook, like
from adapters.views import Affine, AlibiScores

SCORES = "scores are queries times keys, with the declared norms, rotation, scale, cap and bias"
PATTERN = "the pattern is the softmax of the scores, less what declared sinks take"
VALUES = "pattern @ v = z"
MASK = "attention goes where the declared direction and window allow it"

#: A soft cap is told apart from one that is so many times as large.
_NEXT = 1.005

# ----------------------------------------------------------------------------------------------------------------------
# Relative positions: which dimensions turn together, by which angle (rotary embeddings); buckets of biases (T5).
# ----------------------------------------------------------------------------------------------------------------------


#: Of queries, or of keys: they may differ in everything but the batch.
ByHead = Float[Tensor, "_batch _pos _head _d_head"]


def _stands_still(findings: Findings, where: str, x: ByHead, y: ByHead) -> bool:
    """Whether queries, or keys, are not rotated: as they are, or multiplied with a number for each place."""
    if torch.equal(x[:, 1:], y[:, 1:]):
        return findings.holds(SCORES, where, True)
    factor = (x * y).sum((0, 2, 3), keepdim=True) / (x * x).sum((0, 2, 3), keepdim=True)
    worst = float((factor * x - y).abs().max())
    if not (factor > 0).all() or worst > findings.tolerance * float(y.abs().max()):
        return False
    findings.inconclusive(SCORES, f"{where}: what it is multiplied with at each place")
    return findings.holds(SCORES, where, True)


def _slow(base: float | None, width: int) -> bool:
    return base is not None and base ** (2 / width - 1) < 1e-5


def _turn(findings: Findings, where: str, x: ByHead, y: ByHead, adjacent: bool) -> Complex[Tensor, "pos pair"] | None:
    """By what each pair is multiplied, as a complex number; None where that is not the same for all heads and texts."""
    start, end = (_pairs(value.double(), adjacent) for value in (x, y))
    turn = (start.conj() * end).sum((0, 2)) / start.abs().pow(2).sum((0, 2))
    expected = start * turn[None, :, None]
    kind = "neighbouring dimensions" if adjacent else "dimensions half of the width apart"
    worst = float((end - expected).abs().max()) / float(end.abs().max())
    ok = findings.holds(SCORES, where, worst <= findings.tolerance, f"{kind} do not turn together ({worst:.1e})")
    return turn if ok else None


def _pairs(x: Tensor, adjacent: bool) -> Tensor:
    if adjacent:
        first, second = x[..., ::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    return torch.complex(first.contiguous(), second.contiguous())


def _speed(
    findings: Findings,
    where: str,
    turn: Complex[Tensor, "pos pair"],
    base: float | None,
    speeds: Float[Tensor, " pair"] | None,
    *,
    images: bool,
) -> bool:
    """Whether they turn backwards, which is one if both do (nanochat).

    Angles are the position times a power of the base, scaled as the model's configuration says. Positions are counted
    from the first: where that one is turned (PaliGemma begins at 1), so are all by as much.
    """
    pos, pairs = turn.shape
    if base is None and images:
        found = _on_grid(turn / turn.abs())
        findings.holds(
            SCORES, where, found <= findings.angles, f"rows and columns do not turn by themselves ({found:.1e})"
        )
        return False
    if base is None and pairs == 1:
        base = 1.0  # of one pair, no power of it is taken
    if base is None:
        findings.holds(SCORES, where, False, "cfg does not say the base of the rotation")
        return False
    if speeds is None or len(speeds) != pairs:
        speeds = float(base) ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = torch.arange(pos, dtype=torch.float64)[:, None] * speeds
    expected = torch.polar(torch.ones_like(angle), angle).to(turn.device)
    turn = turn / turn.abs()
    relative = turn * turn[:1].conj()
    worst, mirrored = (float((each - expected).abs().max()) for each in (relative, relative.conj()))
    seen = f"the angles are not those of the base {base} (by {worst:.1e})"
    findings.holds(SCORES, where, min(worst, mirrored) <= findings.angles, seen)
    return mirrored < worst


def _on_grid(turn: Complex[Tensor, "pos pair"]) -> float:
    """How far the turns of a square of patches are from one for the row times one for the column.

    Positions before the patches (the class token, registers) do not turn.
    """
    turned = ((turn - 1).abs() > 1e-6).any(1).nonzero().flatten()
    patches = turn[int(turned[0]) :]
    side = math.isqrt(len(patches))
    if side**2 != len(patches) or side < 2:
        return math.inf
    grid = patches.view(side, side, -1)
    return float((grid * grid[:1, :1] - grid[:, :1] * grid[:1]).abs().max())


def _scaled_speeds(config: PreTrainedConfig, base: float, local: bool) -> Float[Tensor, " pair"] | None:
    """How fast each pair turns, where the configuration scales that; None where it does not."""
    if getattr(config, "is_heterogeneous", False):  # another one for each layer
        return None
    own = rotation_of(config)
    if own and "rope_theta" not in own:  # one set for each kind of layer
        own = own["sliding_attention" if local else "full_attention"] or {}  # None: nothing is rotated there
    scale = ROPE_INIT_FUNCTIONS.get(own.get("rope_type", "default"))
    if scale is None:
        return None
    config = copy.deepcopy(config)
    config.rope_parameters = own | {"rope_theta": base}
    speeds: Tensor = scale(config, torch.device("cpu"))[0]
    return speeds.double()


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


def telling_distance(buckets: int, most: int, other: int, *, both: bool) -> int:
    """The shortest distance whose bias is another one where the last bucket begins elsewhere; `most`: there is none.

    Args:
        buckets, most, both: as for `relative_buckets`.
        other: in place of `most`.
    """
    distances = -torch.arange(most)
    if other <= buckets // (4 if both else 2):  # no logarithm can be taken
        return most
    one, two = (relative_buckets(distances, buckets, each, both=both) for each in (most, other))
    return int((one != two).nonzero()[0]) if bool((one != two).any()) else most


# ----------------------------------------------------------------------------------------------------------------------
# Each attention.
# ----------------------------------------------------------------------------------------------------------------------


def prove_attention(evidence: Evidence, findings: Findings) -> None:
    """Scores from queries and keys, the pattern from scores, `z` from pattern and values, in every attention.

    Args:
        evidence: a run with randomized activations.
        findings: what is found is added to it.
    """
    for claim in (SCORES, PATTERN, VALUES, MASK):
        findings.claim(claim)
    rotates: list[tuple[str, bool]] = []
    biases: dict[str, Tensor] = {}
    for place, part in evidence.attentions():
        if part.scores is None:
            for claim in (SCORES, PATTERN, VALUES, MASK):
                findings.inconclusive(claim, f"{place.part}: its scores cannot be seen")
            continue
        proof = _Attention(evidence, findings, place, part)
        if not part.projections:
            proof.prove_kernel()
            continue
        rotated = proof.prove(biases)
        if part.rotary:
            rotates.append((place.stack.name, rotated))
    cfg = evidence.bridge.cfg
    attends = any(part.projections for _, part in evidence.attentions())
    if attends and "attention_mask" not in evidence.more:
        if cfg.positional_embedding_type == "relative_positional_bias":
            findings.holds(SCORES, "position bias", bool(biases), "cfg says that there is one, and no table of it ran")
        kind = cfg.positional_embedding_type
        findings.holds(SCORES, "rotary", bool(rotates) or kind != "rotary", "cfg says that they are rotated")
        for stack in {name for name, _ in rotates}:
            turned = any(rotated for name, rotated in rotates if name == stack)
            findings.holds(SCORES, f"{stack}, rotary", turned, "queries and keys are rotated in no layer")


class _Attention:
    def __init__(self, evidence: Evidence, findings: Findings, place: LayerStep, part: Attention) -> None:
        self.evidence, self.findings, self.place, self.part = evidence, findings, place, part
        self.at = place.part
        self.cfg = evidence.bridge.cfg
        types = self.cfg.attn_types
        self.padded = "attention_mask" in evidence.more
        self.local = bool(types and self.cfg.use_local_attn and types[place.layer] == "local")

    def get(self, name: str) -> Tensor | None:
        return self.evidence.get(f"{self.place.makes(name).part if name in ('k', 'v') else self.at}hook_{name}")

    def prove(self, biases: dict[str, Tensor]) -> bool:
        """Whether queries and keys are rotated here."""
        at = self.at
        q, k = map(self._normed, "qk")
        for letter in "qk" if self.part.rotary != "first" else "":
            if letter in self.part.projections:
                self._norm_reads(letter)
        self._latents_are_read()
        scores, pattern, v, z = map(self.get, ("attn_scores", "pattern", "v", "z"))
        v, known = self._clipped(v), bool(self.part.o)
        if q is None or k is None or scores is None or pattern is None or (known and (v is None or z is None)):
            names = [f"{at}hook_{each}" for each in ("q", "k", "attn_scores", "pattern", "v", "z")]
            if left := [name for name in names if self.findings.is_left_out(name)]:
                self.findings.inconclusive(SCORES, f"{left[0]} is not offered")
                return bool(self.part.rotary)
            self.findings.holds(SCORES, at, False, "queries, keys, values, scores, pattern and z did not all run")
            return False
        rotated = False
        if self.part.shows_rotated:
            seen = self.get("rot_q"), self.get("rot_k")
            rotated = self._rotated(q, k, *(self._normed_last(*seen) if self.part.rotary == "first" else seen))
            q, k = seen
        n_heads = pattern.shape[1]
        if q is None or k is None:
            if self._left_out():
                self.findings.inconclusive(SCORES, f"{at}hook_rot_q and hook_rot_k: they are not offered")
            else:
                self.findings.holds(SCORES, at, False, "queries or keys after their rotation are not shown")
                return rotated
        elif q.shape[2] != n_heads or n_heads % k.shape[2] or (v is not None and n_heads % v.shape[2]):
            self.findings.holds(SCORES, at, False, f"{q.shape[2]} and {k.shape[2]} heads for {n_heads} patterns")
            return rotated
        else:
            self._scores(q, k, scores, biases)
        self._pattern(scores, pattern)
        self._values(v, pattern, z, self._sees_something(scores).transpose(1, 2))
        if not self.padded:
            self._mask(pattern)
        return rotated

    def prove_kernel(self) -> None:
        """Scores of queries and keys where they meet, and their pattern: what makes and reads these is not known."""
        q, k, scores, pattern = map(self.get, ("rot_q", "rot_k", "attn_scores", "pattern"))
        if scores is None or pattern is None:
            self._not_seen("attn_scores", "pattern")
            return
        if q is None or k is None:
            self._not_seen("rot_q", "rot_k")
        elif q.shape[2] != pattern.shape[1] or pattern.shape[1] % k.shape[2]:
            self.findings.holds(SCORES, self.at, False, f"{q.shape[2]} and {k.shape[2]} heads")
        else:
            self._scores(q, k, scores, {})
        self._values(None, pattern, None, pattern)
        self._pattern(scores, pattern)
        if not self.padded:
            self._mask(pattern)

    def _not_seen(self, *names: str) -> None:
        """Says of hook points that they are not offered, or did not run."""
        for name in (f"{self.at}hook_{each}" for each in names):
            if name in self.evidence.bridge.hook_dict:
                self.findings.holds(SCORES, name, self.get(name.rpartition("hook_")[2]) is not None, "it did not run")
            else:
                self.findings.inconclusive(SCORES, f"{name} is not offered")

    def _left_out(self) -> bool:
        """Whether queries or keys after their rotation have no hook point: a trial showed something else there."""
        return any(f"{self.at}hook_rot_{letter}" not in self.evidence.bridge.hook_dict for letter in "qk")

    def _rotated(self, q: ByHead, k: ByHead, turned_q: Tensor | None, turned_k: Tensor | None) -> bool:
        """Whether queries and keys are rotated, as it is declared."""
        if self._left_out():
            return self.part.rotary is not None
        if self.part.k.latent is not None:
            return self._latent(q, k, turned_q, turned_k)
        if self.padded:  # positions are counted in another way in each row of the batch
            return False
        return self._turn(q, k, (turned_q, turned_k))

    def _turn(self, q: ByHead, k: ByHead, turned: tuple[Tensor | None, Tensor | None]) -> bool:
        """Rotated queries and keys are the plain ones, turned as `cfg` says. Whether they are turned at all."""
        config = config_of(self.evidence.bridge.core).get_text_config()
        if getattr(config, "is_heterogeneous", False):
            config = config.per_layer_config[self.place.layer]
        turns, backwards = False, set[bool]()
        for letter, x, y in zip("qk", (q, k), turned, strict=True):
            where = f"{self.at}hook_rot_{letter}"
            if y is None or y.shape != x.shape:
                self.findings.holds(
                    SCORES, where, False, f"shape {None if y is None else list(y.shape)} for {list(x.shape)}"
                )
                continue
            changed = (x[:, 1:] != y[:, 1:]).flatten(0, 2).any(0).cpu()
            if _stands_still(self.findings, where, x, y):
                continue
            turns = True
            width = self.part.own("rotary_dim", None) or self.cfg.rotary_dim
            if width is None:
                self.findings.holds(SCORES, where, False, "cfg does not say how many dimensions are rotated")
                continue
            locally = self.local and self.cfg.rotary_base_local is not None
            base = self.cfg.rotary_base_local if locally else self.cfg.rotary_base
            base = self.part.own("rotary_base", None) or base
            speeds = None if base is None else _scaled_speeds(config, base, self.local)
            still = 0 if speeds is None or 2 * len(speeds) != width else 2 * int((speeds == 0).sum())
            scaled = bool((x[:, 1:, :, width:] != y[:, 1:, :, width:]).any())
            moved = int(changed[:width].sum())
            needed = (
                (not scaled, f"more than the first {width} dimensions are rotated"),
                # A turn too slow to see does not say that its dimension stands still.
                (moved + still == width or _slow(base, width), f"{moved} dimensions of {width} turn"),
                (width % 2 == 0, f"{width} dimensions cannot be paired"),
            )
            if not all(self.findings.holds(SCORES, where, ok, seen) for ok, seen in needed):
                continue
            turn = _turn(self.findings, where, x[..., :width], y[..., :width], self.cfg.rotary_adjacent_pairs)
            if turn is not None:
                backwards.add(_speed(self.findings, where, turn, base, speeds, images=not self.cfg.d_vocab))
        if len(backwards) > 1:
            self.findings.holds(SCORES, f"{self.at}hook_rot_k", False, "queries and keys turn in opposite directions")
        return turns

    def _normed_last(self, *normed: ByHead | None) -> tuple[Tensor | None, Tensor | None]:
        """What the norms behind the rotation are given; what they put out is what enters the product."""
        given: list[Tensor | None] = []
        for letter, norm, seen in zip("qk", (self.part.q.norm, self.part.k.norm), normed, strict=True):
            at = (self.place.makes(letter).module, norm.path if norm else "")
            entered, made = self.evidence.entered(*at), self.evidence.made(*at)
            if norm is None or entered is None or made is None:
                given.append(seen)
                continue
            if self.part.norms_over == "heads first":
                entered, made = entered.transpose(1, 2), made.transpose(1, 2)
            self.findings.equal(SCORES, f"{self.at}{letter}_norm", seen, made)
            given.append(entered)
        return given[0], given[1]

    def _latent(self, q: ByHead, k: ByHead, turned_q: ByHead | None, turned_k: ByHead | None) -> bool:
        """Behind what the latent makes, keys have columns that all heads share; only these columns are rotated."""
        at, width = self.at, k.shape[-1]
        if turned_q is None or turned_k is None or turned_q.shape != q.shape or turned_k.shape[-1] != q.shape[-1]:
            self.findings.holds(SCORES, f"{at}hook_rot_k", False, "it is not as wide as queries are")
            return False
        base = rotation_of(config_of(self.evidence.bridge.core).get_text_config()).get("rope_theta")
        if self.part.rotary and base is not None:  # its angles are not told apart from the order of its columns
            self.findings.holds(SCORES, "cfg.rotary_base", self.cfg.rotary_base == base, f"it is not {base}")
        # Queries may be multiplied with a number for each place and head (Mistral Large 4); padding moves the places.
        wide, plain = turned_q[..., :width].double(), q[..., :width].double()
        axes = (-1,) if self.padded else (0, -1)
        factor = (wide * plain).sum(axes, keepdim=True) / plain.pow(2).sum(axes, keepdim=True)
        q = (q.double() * factor).to(q.dtype) if width and self._is_factor(factor) else q
        self.findings.equal(SCORES, f"{at}hook_rot_q", turned_q[..., :width], q[..., :width])
        self.findings.equal(SCORES, f"{at}hook_rot_k", turned_k[..., :width], k)
        shared = turned_k[..., width:]
        self.findings.equal(SCORES, f"{at}hook_rot_k", shared, shared[:, :, :1].expand_as(shared))
        if not self.part.rotary:
            self.findings.equal(SCORES, f"{at}hook_rot_q", turned_q, q)
            return False
        dims, said = q.shape[-1] - width, self.part.own("rotary_dim", self.cfg.rotary_dim)
        self.findings.holds(SCORES, f"{at}hook_rot_q", dims == said, f"{dims} columns are rotated, and cfg says {said}")
        self.findings.inconclusive(SCORES, f"{at}hook_rot_q: how fast its columns turn, and in which pairs")
        sizes = [x[..., width:].norm(dim=-1) for x in (turned_q, q)]
        ratio = float(sizes[0].norm() / sizes[1].norm()) if q.shape[-1] > width else 1.0
        self.findings.equal(SCORES, f"{at}hook_rot_q", sizes[0], sizes[1] * ratio)
        return bool((turned_q != q).any())

    def _clipped(self, made: Tensor | None) -> Tensor | None:
        """Queries, keys or values behind the clamp that their attention has."""
        clip = self.part.clip
        return made if made is None or clip is None else made.clamp(-clip, clip)

    def _normed(self, letter: str) -> Tensor | None:
        """Queries or keys behind their norm, where they have one."""
        place, norm = self.place.makes(letter), (self.part.q if letter == "q" else self.part.k).norm
        made = self.get(letter)
        if norm is None or made is None or self.part.rotary == "first":
            return self._clipped(made)
        result = self.evidence.made(place.module, norm.path)
        if result is not None and self.part.norms_over == "heads first":
            result = result.transpose(1, 2)
        if result is None or result.numel() != made.numel():
            return None
        result = result.reshape(made.shape)
        return self._clipped(result) if self.part.clips_normed else result

    def _latents_are_read(self) -> None:
        """Each declared latent is what the projection made from it reads."""
        module = self.place.module
        for each in (self.part.q, self.part.k, self.part.v):
            if each.latent and (path := each.latent.path):
                made, read = self.evidence.made(module, path), self.evidence.entered(module, each.path)
                at = f"{self.at}({path}, read by {each.path})"
                self.findings.equal(SCORES, at, made, like(read, made))

    def _is_factor(self, factor: Tensor) -> bool:
        """Whether queries are multiplied with something, which no declaration says; it is then said."""
        if float((factor - 1).abs().max()) <= self.findings.tolerance:
            return False
        self.findings.inconclusive(SCORES, f"{self.at}hook_rot_q: what queries are multiplied with")
        return True

    def _values(self, v: ByHead | None, pattern: Tensor, z: Tensor | None, seen: Tensor) -> None:
        """``pattern @ v = z``, with what is declared to stand between, for the queries that see something."""
        if v is None or z is None:
            self.findings.inconclusive(VALUES, f"{self.at}: what makes or reads its values is not known")
            return
        place, at, transform = self.place, f"{self.at}hook_z", self.part.z_transform
        if norm := self.part.v.norm:
            made = self.evidence.made(place.makes("v").module, norm.path)
            if made is None or made.numel() != v.numel():
                self.findings.holds(VALUES, at, False, f"{norm.path} did not norm the values")
                return
            v = made.reshape(v.shape)
        product = result_of(pattern.double(), v.double().transpose(1, 2)).transpose(1, 2)
        if isinstance(transform, Norm):
            self._normed_values(transform, product, z)
            return
        behind = self._behind(transform, product)
        if isinstance(behind, str):
            self.findings.holds(VALUES, at, False, behind)
            return
        self.findings.equal(VALUES, at, z.where(seen, 0), behind.where(seen, 0).to(z.dtype), float(v.abs().max()))

    def _behind(self, transform: Gate | SinkGate | AddedOutput | Affine | None, product: Tensor) -> Tensor | str:
        """What is made of ``pattern @ v``; or what of it did not run."""
        module = self.evidence.module(self.place.module)
        if isinstance(transform, Gate):
            gate = self.get("gate")
            if gate is None:
                return f"the gate {transform.projection.path} did not run"
            return transform.of(product, gate)
        if isinstance(transform, SinkGate):
            scores, sinks = self.get("attn_scores"), materialized(module, transform.parameter)
            if scores is None or not isinstance(sinks, Tensor):
                return f"there are no sinks in {transform.parameter}"
            return transform.of(product, scores, sinks.detach())
        if isinstance(transform, AddedOutput):
            made = self.evidence.made(self.place.module, transform.path)
            if made is None or made.ndim != 4:
                return f"{transform.path} returned no tensor of heads"
            return transform.of(product, made)
        return product if transform is None else transform.of(product, module)

    def _normed_values(self, norm: Norm, product: Tensor, z: Tensor) -> None:
        """A norm of each head, or of all, stands between."""
        at, path = f"{self.at}hook_z", (self.place.module, norm.path)
        entered, result = self.evidence.entered(*path), self.evidence.made(*path)
        if entered is None or result is None or entered.numel() != product.numel() or result.numel() != z.numel():
            self.findings.holds(VALUES, at, False, f"{norm.path} did not norm pattern @ v")
            return
        self.findings.equal(VALUES, at, entered.reshape(product.shape), product.to(entered.dtype))
        self.findings.equal(VALUES, at, z, result.reshape(z.shape))

    def _norm_reads(self, letter: str) -> None:
        norm = self.part.projections[letter].norm
        if norm is None:
            return
        made, at = self.get(letter), f"{self.at}{letter}_norm"
        made = made if self.part.clips_normed else self._clipped(made)
        entered = self.evidence.entered(self.place.module, norm.path)
        over = 0 if entered is None else entered.shape[-1]
        if entered is not None and made is not None and self.part.norms_over == "heads first":
            entered = entered.transpose(1, 2)
        if entered is not None and made is not None and entered.numel() == made.numel():
            width = made.shape[-1] * (made.shape[-2] if self.part.norms_over == "width" else 1)
            self.findings.holds(SCORES, at, over == width, f"it is over {over} columns")
            entered = entered.reshape(made.shape)
        self.findings.equal(SCORES, at, entered, made)

    def _scores(self, q: ByHead, k: ByHead, scores: Tensor, biases: dict[str, Tensor]) -> None:
        cfg, at = self.cfg, f"{self.at}hook_attn_scores"
        scale = cfg.attn_scale if cfg.use_attn_scale and cfg.attn_scale is not None else 1.0
        scale = self.part.own("attn_scale", scale)
        if cfg.scale_attn_by_inverse_layer_idx:
            scale *= self.place.layer + 1
        made = scores_of(q.double().transpose(1, 2), k.double().transpose(1, 2), 1 / scale)
        size = float(made.abs().max())
        if cfg.attn_scores_soft_cap > 0:
            cap, uncapped = cfg.attn_scores_soft_cap, made
            made, other = (capped(uncapped, bound) for bound in (cap, cap * _NEXT))
            size = min(size, cap)
            if float((other - made).abs().max()) <= 10 * self.findings.tolerance * size:
                self.findings.inconclusive(SCORES, f"{cap} from a soft cap that differs by 0.5 %, as scores are small")
        seen = scores.isfinite() & self._sees_something(scores)
        if self.part.score_bias_modules is not None:
            if not self.padded:
                self._interaction(q, k, scale, at)
            return
        if bool((scores.amax(-1)[seen.any(-1)] == 0).all()):  # MiMo: the softmax is the same
            made = made - made.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
            self.findings.inconclusive(SCORES, f"{at} is less the largest score of each row")
        bias = torch.where(seen, scores.double() - made, torch.nan)
        kind = cfg.positional_embedding_type
        if self.padded and kind == "alibi":
            return  # the model counts the places of each row from its first token
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

    def _sees_something(self, scores: Tensor) -> Tensor:
        """Which queries have a token at or before them, ``[batch, 1, query, 1]``: others see nothing."""
        mask = self.evidence.more.get("attention_mask")
        if mask is None or self.cfg.attention_dir != "causal" or self.part.cross or mask.shape[-1] != scores.shape[-2]:
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=scores.device)
        return (mask.cumsum(-1) > 0)[:, None, :, None].to(scores.device)

    def _interaction(self, q: ByHead, k: ByHead, scale: float, at: str) -> None:
        """Beside the product of queries and keys, scores are made of what each, or the places, make alone.

        Four rows have two queries and two keys in all pairs: what each makes alone is gone from their alternating sum.
        """
        bridge, place = self.evidence.bridge, self.at
        generator = torch.Generator().manual_seed(2)
        rows = {"q": torch.tensor([0, 0, 1, 1]), "k": torch.tensor([0, 1, 0, 1])}
        pairs = {
            letter: torch.randn(2, *x.shape[1:], generator=generator)[rows[letter]].to(x)
            for letter, x in (("q", q), ("k", k))
        }
        made: list[Tensor] = []
        turned = "rot_" if self.part.shows_rotated else ""
        hooks: list[NamedHook] = [
            *(([f"{place}hook_{turned}{letter}"], lambda x, hook, new=new: new) for letter, new in pairs.items()),
            ([f"{place}hook_attn_scores"], lambda x, hook: made.append(x.detach().double())),
        ]
        with torch.no_grad():
            given = repeated({name: x[:1] for name, x in self.evidence.arguments.items()}, 4)
            tokens, more = split(bridge.core, given)
            bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more)
        biases = [projection.bias for projection in self.part.projections.values()]
        core = self.evidence.module(self.place.module, self.part.core)
        for name, bias in core.named_parameters(recurse=False):
            told = bias.numel() != q.shape[2:].numel() or join(self.part.core, name) in biases
            self.findings.holds(SCORES, at, told, f"{name} is added to a projection, and no bias is declared")
        queries, keys = (x.double().transpose(1, 2) for x in pairs.values())
        product = scores_of(queries, keys, 1 / scale)
        (scores,) = made
        seen = scores.isfinite().all(0)
        shown, computed = ((x[0] - x[1] - x[2] + x[3]).where(seen, 0) for x in (scores, product))
        if self.findings.equal(SCORES, at, shown, computed, float(product.abs().max())):
            rest = (scores - product).where(seen, 0)
            there = float((rest - rest.mean(-1, keepdim=True)).abs().max()) > 1e-4 * float(product.abs().max())
            self.findings.holds(SCORES, at, there, "something is declared to be added to it, and nothing is")
            self.findings.inconclusive(SCORES, f"{at} is the product and what queries, keys or places alone add to it")

    def _alibi(self, bias: Float[Tensor, "head query key"], at: str) -> None:
        _, queries, keys = bias.shape
        distance = (torch.arange(keys)[None] - torch.arange(queries)[:, None]).to(bias)
        if not isinstance(self.part.scores, AlibiScores):
            # As the model has them, relative to the first or last key: a constant in each row of the softmax.
            bias = bias - bias.diagonal(dim1=-2, dim2=-1)[..., None]
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
        for other in (most - 1, most + 1):
            if telling_distance(buckets, most, other, both=not causal) >= max(queries, keys):
                self.findings.inconclusive(SCORES, f"{place.stack.name}: {most} from {other} as the largest distance")
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
            site = self.evidence.bridge.hook_dict[f"{self.at}hook_pattern"].point.site
            sinks = materialized(self.evidence.module(site.path), self.part.sinks)
            if not isinstance(sinks, Tensor) or sinks.numel() != scores.shape[1]:
                self.findings.holds(PATTERN, f"{self.at}hook_pattern", False, f"no sinks in {self.part.sinks}")
                return
        wide = scores.double()
        somewhere = wide.isfinite().any(-1, keepdim=True)
        wide = wide.masked_fill(~somewhere, 0)
        expected = pattern_of(wide if sinks is None else with_sinks(wide, sinks.detach()))[..., : pattern.shape[-1]]
        seen = pattern.masked_fill(~somewhere, 0)
        expected = expected.masked_fill(~somewhere, 0).to(pattern.dtype)
        self.findings.equal(PATTERN, f"{self.at}hook_pattern", seen, expected, 1.0)

    def _mask(self, pattern: Tensor) -> None:
        """Where attention goes in some row of the batch, by where it may go."""
        if self.part.cross or self.place.stack is not self.evidence.architecture.stack:
            return  # cfg speaks of the first, and of what looks at its own text
        if self.part.keys_from == "more":
            self.findings.inconclusive(MASK, f"{self.at}hook_pattern: which keys behind those of positions are seen")
            pattern = pattern[..., : pattern.shape[-2]]
        _, _, queries, keys = pattern.shape
        seen = (pattern > 0).any(0).any(0).cpu()
        back = torch.arange(queries)[:, None] - torch.arange(keys)[None]
        allowed = back >= 0 if self.cfg.attention_dir == "causal" else torch.ones_like(back, dtype=torch.bool)
        window = self.cfg.window_size
        if self.local and window is not None:
            ahead = window
            if self.cfg.attention_dir != "causal" and int(-back[seen].min()) == window:  # as T5Gemma 2's encoder
                self.findings.inconclusive(MASK, f"{window} tokens ahead are seen, and {window - 1} back as cfg says")
                ahead += 1
            allowed = allowed & (back < window) & (back > -ahead)
            if window > queries:
                self.findings.inconclusive(MASK, f"a window of {window} is longer than the text of {queries} tokens")
        at, sees = f"{self.at}hook_pattern", (pattern > 0).any(1)
        more, less = (seen & ~allowed).nonzero().tolist(), (allowed & ~seen).nonzero().tolist()
        if more:
            self.findings.holds(MASK, at, False, f"token {more[0][0]} attends to token {more[0][1]}")
        elif less and (
            (self.part.auxiliary_modules and self.part.o)
            or (bool((sees != sees[:1]).any()) and {q - k for q, k in less} <= set(back[seen].tolist()))
        ):  # keys are chosen by what they are (an indexer), and others as far away have been
            self.findings.inconclusive(MASK, f"{at}: whether token {less[0][0]} may attend to token {less[0][1]}")
        elif less:
            self.findings.holds(MASK, at, False, f"token {less[0][0]} does not attend to token {less[0][1]}")
        else:
            self.findings.holds(MASK, at, True)
