"""What is measured of a recorded attention: rotation, scale, soft cap, window."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.automatic.attention import FoundAttention
from adapters.automatic.norms import tolerance

_SIGNS = torch.tensor([1.0, -1.0], dtype=torch.float64)


def window(attention: FoundAttention) -> int | None:
    """How far back it looks at most; None where the last query sees the first key."""
    seen = (attention.softmax.pattern[:, :, -1, : attention.query_pos] > 0).any(0).any(0)
    return None if bool(seen[0]) else attention.query_pos - int(seen.nonzero()[0])


def rotation(attention: FoundAttention) -> tuple[int, bool, bool] | None:
    """How many of each head's first columns are rotated, whether neighbours turn together, whether that is exact.

    None where that is not what changes: other columns than the first, or in other pairs.
    """
    query = attention.turned("q")
    if query is None:
        return None
    before, after = attention.normed("q").double(), query.transpose(1, 2).double()
    if before.shape != after.shape:
        return None
    # What is not rotated passes as it is; a slow rotation shows in the last digits.
    plain = torch.equal(before[:, 0], after[:, 0])
    after = after if plain else after * float(before[:, 0].norm() / after[:, 0].norm())
    close = 20 * tolerance(attention.softmax.scores) * float(before.abs().max())
    least = 0.0 if plain else close
    changed = ((before - after).abs().amax((0, 1, 2)) > least).nonzero().flatten().tolist()
    if not changed:
        return None
    for dim in range(changed[-1] + 1 + (changed[-1] + 1) % 2, before.shape[-1] + 1, 2):
        for adjacent in (False, True):
            pairs = [x[..., :dim].unflatten(-1, (-1, 2) if adjacent else (2, -1)) for x in (before, after)]
            sizes = [pair.norm(dim=-1 if adjacent else -2) for pair in pairs]
            if bool(((sizes[0] - sizes[1]).abs() <= 2 * close).all()):
                return dim, adjacent, plain
    return None


def rotary_base(attention: FoundAttention, dim: int, adjacent: bool) -> float | None:
    """The base of the angles, from how far the second pair of columns turns from the first position to the next."""
    query = attention.turned("q")
    if query is None or dim < 4:
        return None
    x, y = attention.normed("q").double()[:, 1], query.transpose(1, 2).double()[:, 1]
    first, second = (2, 3) if adjacent else (1, 1 + dim // 2)
    turned = torch.atan2(
        x[..., first] * y[..., second] - x[..., second] * y[..., first],
        x[..., first] * y[..., first] + x[..., second] * y[..., second],
    ).abs()
    angle = float(turned.median())
    if angle <= 0 or bool(((turned - angle).abs() > 1e-3 * angle).any()):
        return None
    return float(f"{angle ** (-dim / 2):.4g}")


def soft_cap(attention: FoundAttention, said: float | None) -> float:
    """The soft cap of the scores: the one that the configuration says, where the scores are so; -1 where not."""
    found = attention.product()
    if not said or found is None:
        return -1.0
    scores, product = attention.softmax.scores.detach().double()[..., : found[0].shape[-1]], found[0]
    seen = (attention.softmax.pattern[..., : product.shape[-1]] > 0) & (scores.abs() < said)
    capped, plain, product = said * (scores[seen] / said).atanh(), scores[seen], product[seen]

    def left(x: Tensor) -> float:
        return float((x - product * (x @ product / (product @ product))).norm() / x.norm())

    return said if left(capped) < 1e-5 or left(capped) < 0.1 * left(plain) else -1.0


def scale(attention: FoundAttention) -> float | None:
    """What the product of queries and keys is divided by; None where the scores are not that product."""
    found = attention.product()
    q, k = attention.normed("q").double(), attention.normed("k").double()
    rotated = attention.rotated()
    if found is None or not (rotated or (found[1].transpose(1, 2).shape == q.shape and q.shape[-1] == k.shape[-1])):
        return None
    product, query, key = found
    position = min(5, attention.query_pos - 1)
    pair = [position, position - 1]
    scores = attention.softmax.scores.detach().double()[:, :, position, pair]
    differences, products = (
        scores[..., 0] - scores[..., 1],
        (product[:, :, position, pair] * _SIGNS.to(product.device)).sum(-1),
    )
    factor = float((differences * products).sum() / (products * products).sum())
    if not bool(((differences - factor * products).abs() <= 1e-3 * differences.abs().max()).all()):
        return None
    if not rotated:  # of rotated ones, it is that of the product of what `hook_rot_q` and `hook_rot_k` show
        factor *= (
            float(query.norm() / q.norm()) * float(key.norm() / k.norm()) / (attention.n_heads / k.shape[2]) ** 0.5
        )
    usual = q.shape[-1] ** 0.5
    return usual if abs(factor * usual - 1) < 1e-4 else float(f"{1 / factor:.5g}")


def alibi_scale(attention: FoundAttention) -> float | None:
    """What the product is divided by, where each head adds a slope times the key's position to it (ALiBi)."""
    found = attention.product()
    if found is None:
        return None
    product = found[0]
    pattern = attention.softmax.pattern[..., : product.shape[-1]]
    scores = attention.softmax.scores.detach().double()[..., : product.shape[-1]]
    places = torch.arange(product.shape[-1], dtype=torch.float64, device=product.device).expand_as(product)
    seen = (pattern > 0).double()
    # A row's constant is nothing to its softmax.
    rows = [
        (x - (x * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)) * seen for x in (scores, product, places)
    ]
    factors = []
    for head in range(attention.n_heads):
        y, p, k = (x[:, head].flatten() for x in rows)
        columns = torch.stack([p, k], 1)
        factor, slope = torch.linalg.lstsq(columns, y[:, None]).solution[:, 0].tolist()
        left = float((columns @ torch.tensor([factor, slope], dtype=y.dtype, device=y.device) - y).abs().max())
        if slope <= 0 or left > 1e-4 * float(y.abs().max()):
            return None
        factors.append(factor)
    if max(factors) - min(factors) > 1e-3 * max(factors) or min(factors) <= 0:
        return None
    usual = attention.normed("q").shape[-1] ** 0.5
    scale = 1 / (sum(factors) / len(factors))
    return usual if abs(scale / usual - 1) < 1e-3 else float(f"{scale:.4g}")
