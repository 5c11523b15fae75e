"""Relative positions: which dimensions turn together, by which angle (rotary embeddings); buckets of biases (T5)."""

from __future__ import annotations

import copy
import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from adapters.config import ModelConfig
from adapters.imports.versions import rotation_of
from adapters.proofs.report import Findings

#: Of queries, or of keys: they may differ in everything but the batch.
Heads = Float[Tensor, "_batch _pos _head _d_head"]


def prove_rotation(
    findings: Findings,
    claim: str,
    at: str,
    cfg: ModelConfig,
    config: PreTrainedConfig,
    local: bool,
    before: tuple[Heads, Heads],
    after: tuple[Tensor | None, Tensor | None],
    own: tuple[int | None, float | None] = (None, None),
) -> bool:
    """Rotated queries and keys are the plain ones, turned as `cfg` says. Whether they are turned at all.

    Args:
        findings: what is found is added to it.
        claim: what it is part of.
        at: where.
        cfg: `rotary_dim`, `rotary_adjacent_pairs`, `rotary_base` and `rotary_base_local` are looked at.
        config: the model's own, which may say that the angles are scaled.
        local: this layer has a window.
        before, after: queries and keys.
        own: the layer's `rotary_dim` and `rotary_base`, where they are not the model's.
    """
    turned = []
    backwards: set[bool] = set()
    for letter, x, y in zip("qk", before, after, strict=True):
        where = f"{at}hook_rot_{letter}"
        if y is None or y.shape != x.shape:
            findings.holds(claim, where, False, f"shape {None if y is None else list(y.shape)} for {list(x.shape)}")
            continue
        changed = (x[:, 1:] != y[:, 1:]).flatten(0, 2).any(0).cpu()
        if not bool(changed.any()):
            findings.holds(claim, where, True)
            continue
        turned.append(letter)
        width = own[0] or cfg.rotary_dim
        if width is None:
            findings.holds(claim, where, False, "cfg does not say how many dimensions are rotated")
            continue
        base = cfg.rotary_base_local if local and cfg.rotary_base_local is not None else cfg.rotary_base
        base = own[1] or base
        speeds = None if base is None else _scaled_speeds(config, base, local)
        still = 0 if speeds is None or 2 * len(speeds) != width else 2 * int((speeds == 0).sum())
        scaled = bool((x[:, 1:, :, width:] != y[:, 1:, :, width:]).any())
        if not findings.holds(claim, where, not scaled, f"more than the first {width} dimensions are rotated"):
            continue
        # A turn too slow to see does not say that its dimension stands still.
        moved = int(changed[:width].sum())
        if not findings.holds(
            claim, where, moved + still == width or _slow(base, width), f"{moved} dimensions of {width} turn"
        ):
            continue
        if not findings.holds(claim, where, width % 2 == 0, f"{width} dimensions cannot be paired"):
            continue
        turn = _turn(findings, claim, where, x[..., :width], y[..., :width], cfg.rotary_adjacent_pairs)
        if turn is not None:
            backwards.add(_speed(findings, claim, where, turn, base, speeds, images=not cfg.d_vocab))
    if len(backwards) > 1:
        findings.holds(claim, f"{at}hook_rot_k", False, "queries and keys turn in opposite directions")
    return bool(turned)


def _slow(base: float | None, width: int) -> bool:
    return base is not None and base ** (2 / width - 1) < 1e-5


def _turn(
    findings: Findings, claim: str, where: str, x: Heads, y: Heads, adjacent: bool
) -> Complex[Tensor, "pos pair"] | None:
    """By what each pair is multiplied, as a complex number; None where that is not the same for all heads and texts."""
    start, end = (_pairs(value.double(), adjacent) for value in (x, y))
    turn = (start.conj() * end).sum((0, 2)) / start.abs().pow(2).sum((0, 2))
    expected = start * turn[None, :, None]
    kind = "neighbouring dimensions" if adjacent else "dimensions half of the width apart"
    worst = float((end - expected).abs().max()) / float(end.abs().max())
    ok = findings.holds(claim, where, worst <= findings.tolerance, f"{kind} do not turn together ({worst:.1e})")
    return turn if ok else None


def _pairs(x: Tensor, adjacent: bool) -> Tensor:
    if adjacent:
        first, second = x[..., ::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    return torch.complex(first.contiguous(), second.contiguous())


def _speed(
    findings: Findings,
    claim: str,
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
            claim, where, found <= findings.angles, f"rows and columns do not turn by themselves ({found:.1e})"
        )
        return False
    if base is None and pairs == 1:
        base = 1.0  # of one pair, no power of it is taken
    if base is None:
        findings.holds(claim, where, False, "cfg does not say the base of the rotation")
        return False
    if speeds is None or len(speeds) != pairs:
        speeds = float(base) ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = torch.arange(pos, dtype=torch.float64)[:, None] * speeds
    expected = torch.polar(torch.ones_like(angle), angle).to(turn.device)
    turn = turn / turn.abs()
    relative = turn * turn[:1].conj()
    worst, mirrored = (float((each - expected).abs().max()) for each in (relative, relative.conj()))
    seen = f"the angles are not those of the base {base} (by {worst:.1e})"
    findings.holds(claim, where, min(worst, mirrored) <= findings.angles, seen)
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
        own = own["sliding_attention" if local else "full_attention"]
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
