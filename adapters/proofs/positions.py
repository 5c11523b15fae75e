"""Proofs of positions in attention: queries and keys rotate with the declared angles. Also the
buckets of distances that share a bias (T5).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from adapters.config import config_of
from adapters.imports import rotation_of
from adapters.proofs.evidence import AttentionClaim, largest

SCORES = "scores are queries times keys, with the declared norms, rotation, scale, cap and bias"

#: Queries or keys: their shapes may differ in everything but the batch.
ByHead = Float[Tensor, "_batch _pos _head _d_head"]
#: The complex number that each pair of dimensions is multiplied by at each position.
Turn = Complex[Tensor, "pos pair"]
#: The frequency of each pair.
Speeds = Float[Tensor, " pair"]


@dataclass(frozen=True)
class RelativeBuckets:
    """Buckets of query-key distances (Raffel et al. 2020): exact for short distances, logarithmic
    up to `most`.

    Attributes:
        count: the number of buckets.
        most: the distance beyond which all distances share the last bucket.
        both: whether half of the buckets are for keys after the query.
    """

    count: int
    most: int
    both: bool

    def of(self, distance: Tensor) -> Tensor:
        """Return the index of the bucket for each distance."""
        count = self.count
        first = torch.zeros_like(distance)
        if self.both:
            count //= 2
            first = (distance > 0).long() * count
            distance = distance.abs()
        else:
            distance = -distance.clamp_max(0)
        exact = count // 2
        rest = count - exact
        ratio = distance.clamp_min(1).float() / exact
        share = ratio.log() / math.log(self.most / exact)
        far = (share * rest).long().clamp_max(rest - 1)
        return first + torch.where(distance < exact, distance, exact + far)

    def telling_distance(self, other: int) -> int:
        """Return the shortest distance whose bucket changes if the last bucket begins at `other`;
        `most` if none does.
        """
        if other <= self.count // (4 if self.both else 2):  # the logarithm is not defined
            return self.most
        distances = -torch.arange(self.most, device="cpu")
        others = RelativeBuckets(self.count, other, self.both)
        differs = self.of(distances) != others.of(distances)
        return int(differs.nonzero()[0]) if bool(differs.any()) else self.most


# --------------------------------------------------------------------------------------------------
# Rotary embeddings: the dimensions that rotate together, and their angles.
# --------------------------------------------------------------------------------------------------


class RotaryAngles(AttentionClaim):
    """The rotation of queries and keys."""

    name = SCORES

    @property
    def is_left_out(self) -> bool:
        """Tell whether queries or keys after their rotation have no hook point, because a trial
        found other values there.
        """
        names = {self.point("rot_q"), self.point("rot_k")}
        return not names <= self.bridge.hook_dict.keys()

    def prove(self, q: ByHead, k: ByHead, turned_q: Tensor | None, turned_k: Tensor | None) -> bool:
        """Check that rotated queries and keys are the plain ones, rotated as in `cfg`. Return
        whether any rotation takes place.
        """
        if self.is_left_out:
            return self.part.rotary is not None
        if self.part.k.latent is not None:
            return self._prove_latent(q, k, turned_q, turned_k)
        if self.padded:  # positions count differently in each row of the batch
            return False
        rotated = False
        backwards: set[bool] = set()
        for letter, plain, turned in (("q", q, turned_q), ("k", k, turned_k)):
            point = self.point(f"rot_{letter}")
            if turned is None or turned.shape != plain.shape:
                shape = None if turned is None else list(turned.shape)
                self.fails(point, f"shape {shape} for {list(plain.shape)}")
            elif not self._stands_still(point, plain, turned):
                rotated = True
                backwards |= self._prove_angles(point, plain, turned)
        if len(backwards) > 1:
            self.fails(self.point("rot_k"), "queries and keys turn in opposite directions")
        return rotated

    def _stands_still(self, point: str, x: ByHead, y: ByHead) -> bool:
        """Tell whether queries, or keys, are not rotated: unchanged, or multiplied by a number at
        each position.
        """
        if torch.equal(x[:, 1:], y[:, 1:]):
            return self.holds(point, True)
        axes = (0, 2, 3)
        squares = (x * x).sum(axes, keepdim=True)
        factor = (x * y).sum(axes, keepdim=True) / squares
        tolerance = self.findings.tolerance * largest(y)
        if not (factor > 0).all() or largest(factor * x - y) > tolerance:
            return False
        self.inconclusive(f"{point}: what it is multiplied with at each place")
        return self.holds(point, True)

    def _prove_angles(self, point: str, plain: ByHead, turned: ByHead) -> set[bool]:
        """Check the width and the angles of a rotation. Return whether it turns backwards; None if
        it is not a rotation.
        """
        width = self.part.own("rotary_dim", None) or self.cfg.rotary_dim
        if width is None:
            self.fails(point, "cfg does not say how many dimensions are rotated")
            return set()
        base = self._base
        speeds = None if base is None else _scaled_speeds(self._config, base, self.is_local)
        differs = plain[:, 1:] != turned[:, 1:]
        changed = differs.flatten(0, 2).any(0).cpu()
        if not self._turns_width(point, changed, width, base, speeds):
            return set()
        columns = slice(width)
        turn = self._turn(point, plain[..., columns], turned[..., columns])
        return set() if turn is None else {self._turns_backwards(point, turn, base, speeds)}

    @property
    def _config(self) -> PreTrainedConfig:
        """Return the configuration of the text model, or of its layer."""
        config = config_of(self.bridge.core).get_text_config()
        if getattr(config, "is_heterogeneous", False):
            config = config.per_layer_config[self.place.layer]
        return config

    @property
    def _base(self) -> float | None:
        """Return the base of the frequencies, from `cfg` or the declaration."""
        base = self.cfg.rotary_base
        if self.is_local and self.cfg.rotary_base_local is not None:
            base = self.cfg.rotary_base_local
        return self.part.own("rotary_base", None) or base

    def _turns_width(
        self, point: str, changed: Tensor, width: int, base: float | None, speeds: Speeds | None
    ) -> bool:
        """Check that the first dimensions change, and no others."""
        still = 0
        if speeds is not None and 2 * len(speeds) == width:
            still = 2 * int((speeds == 0).sum())
        moved = int(changed[:width].sum())
        # A rotation too slow to be visible does not imply a constant dimension.
        slow = base is not None and base ** (2 / width - 1) < 1e-5
        if bool(changed[width:].any()):
            self.fails(point, f"more than the first {width} dimensions are rotated")
            return False
        self.holds(point, True)
        all_turn = moved + still == width or slow
        if not self.holds(point, all_turn, f"{moved} dimensions of {width} turn"):
            return False
        return self.holds(point, width % 2 == 0, f"{width} dimensions cannot be paired")

    def _turn(self, point: str, x: ByHead, y: ByHead) -> Turn | None:
        """Return, as a complex number, the multiplier that rotates each pair of columns; None if it
        differs between heads or texts.
        """
        adjacent = self.cfg.rotary_adjacent_pairs
        start = _pairs(x.double(), adjacent)
        end = _pairs(y.double(), adjacent)
        squares = start.abs().pow(2).sum((0, 2))
        turn = (start.conj() * end).sum((0, 2)) / squares
        expected = start * turn[None, :, None]
        worst = largest(end - expected) / largest(end)
        kind = "neighbouring dimensions" if adjacent else "dimensions half of the width apart"
        detail = f"{kind} do not turn together ({worst:.1e})"
        return turn if self.holds(point, worst <= self.findings.tolerance, detail) else None

    def _turns_backwards(
        self, point: str, turn: Turn, base: float | None, speeds: Speeds | None
    ) -> bool:
        """Check the angles of a rotation; return whether it turns backwards. That is consistent if
        queries and keys both do (nanochat).

        The expected angle is the position times a power of the base, scaled as the model's
        configuration says. Positions count from the first one: if the first one is itself rotated
        (PaliGemma begins at 1), that angle is subtracted from all.
        """
        pos, pairs = turn.shape
        turn = turn / turn.abs()
        if base is None and not self.cfg.d_vocab:  # images
            worst = _off_grid(turn)
            self.holds(
                point,
                worst <= self.findings.angles,
                f"rows and columns do not turn by themselves ({worst:.1e})",
            )
            return False
        if base is None and pairs == 1:
            base = 1.0  # a single pair takes no power of the base
        if base is None:
            self.fails(point, "cfg does not say the base of the rotation")
            return False
        if speeds is None or len(speeds) != pairs:
            exponents = -torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs
            speeds = float(base) ** exponents
        angle = torch.arange(pos, dtype=torch.float64, device="cpu")[:, None] * speeds
        expected = torch.polar(torch.ones_like(angle), angle).to(turn.device)
        relative = turn * turn[:1].conj()
        forwards = largest(relative - expected)
        backwards = largest(relative.conj() - expected)
        self.holds(
            point,
            min(forwards, backwards) <= self.findings.angles,
            f"the angles are not those of the base {base} (by {forwards:.1e})",
        )
        return backwards < forwards

    # ----------------------------------------------------------------------------------------------
    # Keys with a latent: after their own columns, they have columns that all heads share; only
    # these are rotated.
    # ----------------------------------------------------------------------------------------------

    def _prove_latent(
        self, q: ByHead, k: ByHead, turned_q: ByHead | None, turned_k: ByHead | None
    ) -> bool:
        """Check queries and keys before and after the rotation of their last columns, and return
        whether they are rotated.
        """
        rot_q = self.point("rot_q")
        rot_k = self.point("rot_k")
        if (
            turned_q is None
            or turned_k is None
            or turned_q.shape != q.shape
            or turned_k.shape[-1] != q.shape[-1]
        ):
            self.fails(rot_k, "it is not as wide as queries are")
            return False
        config = config_of(self.bridge.core).get_text_config()
        base = rotation_of(config).get("rope_theta")
        # The angles cannot be separated from the order of the columns.
        if self.part.rotary and base is not None:
            self.holds("cfg.rotary_base", self.cfg.rotary_base == base, f"it is not {base}")
        width = k.shape[-1]
        q = self._multiplied(q, turned_q, width)
        own = slice(width)
        self.equal(rot_q, turned_q[..., own], q[..., own])
        self.equal(rot_k, turned_k[..., own], k)
        shared = turned_k[..., width:]
        self.equal(rot_k, shared, shared[:, :, :1].expand_as(shared))
        if not self.part.rotary:
            self.equal(rot_q, turned_q, q)
            return False
        self._prove_columns(q[..., width:], turned_q[..., width:])
        return bool((turned_q != q).any())

    def _multiplied(self, q: ByHead, turned_q: ByHead, width: int) -> ByHead:
        """Return queries times a factor that the model applies and no declaration covers; record
        the factor.

        The factor may depend on the position and the head (Mistral Large 4); padding shifts the
        positions.
        """
        if not width:
            return q
        plain = q[..., :width].double()
        turned = turned_q[..., :width].double()
        axes = (-1,) if self.padded else (0, -1)
        squares = plain.pow(2).sum(axes, keepdim=True)
        factor = (turned * plain).sum(axes, keepdim=True) / squares
        if largest(factor - 1) <= self.findings.tolerance:
            return q
        self.inconclusive(f"{self.point('rot_q')}: what queries are multiplied with")
        return (q.double() * factor).to(q.dtype)

    def _prove_columns(self, plain: ByHead, turned: ByHead) -> None:
        """Check the number of rotated columns of queries, and that rotation keeps their norm."""
        point = self.point("rot_q")
        columns = plain.shape[-1]
        declared = self.part.own("rotary_dim", self.cfg.rotary_dim)
        self.holds(
            point, columns == declared, f"{columns} columns are rotated, and cfg says {declared}"
        )
        self.inconclusive(f"{point}: how fast its columns turn, and in which pairs")
        before = plain.norm(dim=-1)
        after = turned.norm(dim=-1)
        ratio = float(after.norm() / before.norm()) if columns else 1.0
        self.equal(point, after, before * ratio)


def _pairs(x: Tensor, adjacent: bool) -> Tensor:
    """Return the pairs of dimensions as complex numbers."""
    if adjacent:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = x.chunk(2, dim=-1)
    return torch.complex(first.contiguous(), second.contiguous())


def _off_grid(turn: Turn) -> float:
    """Return how far the rotations of a square of patches deviate from the product of one rotation
    for the row and one for the column.

    Positions before the patches (the class token, registers) are not rotated.
    """
    turned = ((turn - 1).abs() > 1e-6).any(1).nonzero().flatten()
    patches = turn[int(turned[0]) :]
    side = math.isqrt(len(patches))
    if side**2 != len(patches) or side < 2:
        return math.inf
    grid = patches.view(side, side, -1)
    column = grid[:, :1]
    row = grid[:1]
    return largest(grid * grid[:1, :1] - column * row)


def _scaled_speeds(config: PreTrainedConfig, base: float, local: bool) -> Speeds | None:
    """Return the frequency of each pair, if the configuration scales them; otherwise None."""
    if getattr(config, "is_heterogeneous", False):  # each layer has its own
        return None
    rotation = rotation_of(config)
    if rotation and "rope_theta" not in rotation:  # one set for each layer type
        kind = "sliding_attention" if local else "full_attention"
        rotation = rotation[kind] or {}  # None: no rotation in these layers
    scale = ROPE_INIT_FUNCTIONS.get(rotation.get("rope_type", "default"))
    if scale is None:
        return None
    config = copy.deepcopy(config)
    config.rope_parameters = rotation | {"rope_theta": base}
    speeds: Tensor = scale(config, torch.device("cpu"))[0]
    return speeds.double()
