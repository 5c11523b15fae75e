"""What is measured of a recorded attention: rotation, scale, soft cap, window, position bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapters.automatic.attention import FoundAttention
from adapters.automatic.ends.readout import capped_between
from adapters.automatic.layouts import relative
from adapters.automatic.norms import rounded
from adapters.observe.errors import NotFound
from adapters.observe.gradients import by_position, gradient_of
from adapters.observe.tolerance import FITTED, ROUNDED_TABLE, tolerance, worked_out
from adapters.views import AlibiScores, Composed, FilledScores, HeadsOfBatch, MaskedScores, SinkScores, View

#: A filler is this many times below the lowest score: half of it is then below those of a run in which scores are five
#: times as large.
_FAR_BELOW = 10
#: To how much an angle is told, relatively.
_TOLD_BY_AN_ANGLE = 3e-6
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
    close = worked_out(attention.softmax.scores) * float(before.abs().max())
    least = 0.0 if plain else close
    changed = ((before - after).abs().amax((0, 1, 2)) > least).nonzero().flatten().tolist()
    if not changed:
        return None
    for dim in range(changed[-1] + 1 + (changed[-1] + 1) % 2, before.shape[-1] + 1, 2):
        for adjacent in (False, True):
            pairs = [x[..., :dim].unflatten(-1, (-1, 2) if adjacent else (2, -1)) for x in (before, after)]
            sizes = [pair.norm(dim=-1 if adjacent else -2) for pair in pairs]
            if bool(((sizes[0] - sizes[1]).abs() <= close + ROUNDED_TABLE * sizes[0]).all()):
                return dim, adjacent, plain
    return None


def rotary_base(attention: FoundAttention, dim: int, adjacent: bool) -> float | None:
    """The base of the angles, from how far the second pair of columns turns from the first position to the next."""
    query = attention.turned("q")
    if query is None or dim < 4:
        return None
    x, y = attention.normed("q").double(), query.transpose(1, 2).double()
    first, second = (2, 3) if adjacent else (1, 1 + dim // 2)
    turn = torch.complex(x[..., first], -x[..., second]) * torch.complex(y[..., first], y[..., second])
    steps = turn[:, 1:].sum((0, 2)) * turn[:, :-1].sum((0, 2)).conj()
    if bool(((steps / steps.abs() - (steps / steps.abs())[:1]).abs() > 0.1).any()):
        return None  # a position is not one number, as in a grid of patches
    turned = (turn[:, 1] * turn[:, 0].conj()).angle().abs()  # the first may be turned already (PaliGemma)
    angle = float(turned.median())
    if angle <= 0 or bool(((turned - angle).abs() > FITTED * angle).any()):
        return None
    base = angle ** (-dim / 2)
    plain = float(f"{base:.4g}")  # a round number, as far as an angle in float32 tells
    return plain if abs(plain / base - 1) <= _TOLD_BY_AN_ANGLE * dim / 2 else base


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

    return said if left(capped) < tolerance(attention.softmax.scores) or left(capped) < 0.1 * left(plain) else -1.0


def cap_that_is_not_said(attention: FoundAttention) -> tuple[float, float] | None:
    """What the product is divided by, and the soft cap behind that, of scores that the two explain; None of others."""
    found = attention.product()
    if found is None:
        return None
    product = found[0]
    scores = attention.softmax.scores.detach().double()[..., : product.shape[-1]]
    seen = attention.softmax.pattern[..., : product.shape[-1]] > 0
    both = capped_between(product[seen].to(attention.softmax.scores.dtype), scores[seen])
    if both is None:
        return None
    usual, divided = attention.normed("q").shape[-1] ** 0.5, 1 / both[0]
    return usual if abs(divided / usual - 1) < FITTED else divided, both[1]


def scale(attention: FoundAttention, cap: float, *, biased: bool = False) -> float | None:
    """What the product of queries and keys is divided by; None where the scores are not that product.

    Args:
        attention: the attention.
        cap: the soft cap of its scores; -1: they have none.
        biased: what is added for each place alone, the same in every row of the batch, does not count.
    """
    found = attention.product()
    q, k = attention.normed("q").double(), attention.normed("k").double()
    rotated = attention.rotated() or attention.shares_keys()
    if found is None or not (rotated or (found[1].transpose(1, 2).shape == q.shape and q.shape[-1] == k.shape[-1])):
        return None
    product, query, key = found
    position = min(5, attention.query_pos - 1)
    pair = [position, position - 1]
    scores = attention.softmax.scores.detach().double()[:, :, position, pair]
    scores = cap * (scores / cap).atanh() if cap > 0 else scores
    differences, products = (
        scores[..., 0] - scores[..., 1],
        (product[:, :, position, pair] * _SIGNS.to(product.device)).sum(-1),
    )
    if biased:
        differences, products = differences - differences.mean(0), products - products.mean(0)
    factor = _ratio(differences, products)
    if factor is None:
        return None
    if not rotated:  # of rotated ones, it is that of the product of what `hook_rot_q` and `hook_rot_k` show
        factor *= (
            float(query.norm() / q.norm()) * float(key.norm() / k.norm()) / (attention.n_heads / k.shape[2]) ** 0.5
        )
    usual = q.shape[-1] ** 0.5
    return usual if abs(factor * usual - 1) < FITTED else rounded(1 / factor)


def scale_elsewhere(attention: FoundAttention) -> float | None:
    """What the product is divided by, where queries alone, keys alone or places alone add to it.

    The gradient of a score with respect to its query is the key, divided, and what is the same in every row.
    """
    position = min(5, attention.query_pos - 1)
    score = attention.softmax.scores[:, :, position, position - 1].sum()
    query, key = attention.softmax.query, attention.softmax.key
    if attention.recording.batch < 2:
        return None
    if attention.rotated():
        gradient = None if query is None else gradient_of(score, query)
        if gradient is None or key is None:
            return None
        reached, keys = gradient[:, :, position].double(), key.detach()[:, :, position - 1].double()
    else:
        call, sets, _ = attention.found["q"]
        gradient = gradient_of(score, call.left[0].live)
        rows = None if gradient is None else by_position(gradient, attention.recording.batch, attention.query_pos)
        if rows is None:
            return None
        reached = rows[:, position][..., torch.tensor(sets, device=rows.device)].double()
        keys = attention.normed("k").double()[:, position - 1]
    if attention.n_heads % keys.shape[1]:
        return None
    keys = keys.repeat_interleave(attention.n_heads // keys.shape[1], dim=1)
    factor = _ratio(reached - reached.mean(0), keys - keys.mean(0)) if reached.shape == keys.shape else None
    if factor is None:
        return None
    usual = keys.shape[-1] ** 0.5
    return usual if abs(factor * usual - 1) < FITTED else rounded(1 / factor)


def adding(attention: FoundAttention) -> tuple[str, ...]:
    """The linear layers inside that make something of places which has a part in the scores."""
    known = {attention.found[letter][0].path for letter in "qk"}
    of_tokens = (attention.recording.batch, attention.query_pos)
    total = (attention.softmax.scores * torch.linspace(-1, 1, attention.key_pos).to(attention.softmax.scores)).sum()
    found = []
    for call in attention.recording.between(attention.owner.start, attention.softmax.time):
        if call.is_linear and call.path not in known and attention.owner.holds(call) and len(call.left) == 1:
            if call.left[0].value.shape[:2] == of_tokens:
                continue
            gradient = gradient_of(total, call.left[0].live)
            if gradient is not None and bool(gradient.any()):
                found.append(relative(call.path, attention.owner.path))
    return tuple(found)


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
    scores = scores.where(pattern > 0, 0)  # they may be minus infinity
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
        if slope <= 0 or left > FITTED * float(y.abs().max()):
            return None
        factors.append(factor)
    if max(factors) - min(factors) > FITTED * max(factors) or min(factors) <= 0:
        return None
    usual = attention.normed("q").shape[-1] ** 0.5
    scale = 1 / (sum(factors) / len(factors))
    return usual if abs(scale / usual - 1) < FITTED else rounded(scale)


def _ratio(made: Tensor, of: Tensor) -> float | None:
    """The factor between two tensors; None where they are not proportional."""
    factor = float((made * of).sum() / (of * of).sum())
    return factor if bool(((made - factor * of).abs() <= FITTED * made.abs().max()).all()) else None


def _bias(attention: FoundAttention) -> Tensor | None:
    """What is added to the scores for each place, the same in every row, ``[head, query, key]``, zero where masked.

    None where there is none, or not that alone.
    """
    found = attention.product()
    if found is None or len(attention.softmax.pattern) < 2:
        return None
    product = found[0]
    seen = (attention.softmax.pattern > 0)[..., : product.shape[-1]]
    scores = attention.softmax.scores.detach().double()[..., : product.shape[-1]].where(seen, 0)
    product = product.where(seen, 0)
    factor = _ratio(scores - scores.mean(0), product - product.mean(0))
    if factor is None:
        return None
    bias = (scores - factor * product).mean(0)
    return bias if float(bias.abs().max()) > FITTED * (float(scores.abs().max()) + 1) else None


@dataclass(frozen=True, eq=False)
class FoundTable:
    """A table of position biases.

    Attributes:
        path: of the module, relative to the attention module.
        buckets: how many distances it tells apart.
        values: what it adds, ``[head, query, key]``.
    """

    path: str
    buckets: int
    values: Tensor


def find_table(attention: FoundAttention, before: FoundTable | None) -> FoundTable | None:
    """The table that what is added to the scores of an attention comes from; None where it has none.

    Args:
        attention: the attention.
        before: the table of a layer before it, which it may use, too.
    """
    bias = _bias(attention)
    if bias is None:
        return None
    seen = (attention.softmax.pattern > 0).any(0)[..., : bias.shape[-1]]
    close = worked_out(attention.softmax.scores) * float(attention.softmax.scores.detach()[..., :1].abs().max() + 1)

    def adds(values: Tensor) -> bool:
        return values.shape == bias.shape and bool(((values - bias)[seen].abs() <= close).all())

    for call in attention.recording.calls:
        table = getattr(call.module, "weight", None)
        if not (attention.owner.holds(call) and isinstance(call.module, nn.Embedding) and isinstance(table, Tensor)):
            continue
        made = call.left[0].value.double()
        values = made.permute(2, 0, 1) if made.ndim == 3 else torch.zeros(0)
        if adds(values):
            return FoundTable(relative(call.path, attention.owner.path), table.shape[0], values)
    return before if before is not None and adds(before.values) else None


def scores_view(attention: FoundAttention) -> View:
    """How the scores are seen: by their filler, without a sink's column, and by head."""
    name, view = sinks(attention), _filled_scores(attention)
    view = view if name is None else SinkScores(view, name)
    return Composed(HeadsOfBatch(attention.n_heads), view) if attention.flat_heads else view


def _filled_scores(attention: FoundAttention) -> View:
    """`AlibiScores` where the module is given what is added to the scores for each key; else by the filler."""
    scores, pattern = attention.softmax.scores.detach(), attention.softmax.pattern
    hidden, seen = scores[(pattern == 0) & ~MaskedScores().masked(scores)], scores[pattern > 0]
    if hidden.numel() and not sinks(attention) and float(hidden.max()) < _FAR_BELOW * float(seen.min()):
        return FilledScores(float(hidden.max()) / 2)
    alibi, pattern = attention.owner.given.get("alibi"), attention.softmax.pattern
    found = attention.product() if alibi is not None else None
    if alibi is None or found is None or alibi.shape != (len(pattern) * attention.n_heads, 1, attention.key_pos):
        return MaskedScores()
    seen = pattern > 0
    product = found[0][seen]
    rest = (attention.softmax.scores.detach() - alibi.view(len(pattern), attention.n_heads, 1, -1))[seen].double()
    factor = float((rest * product).sum() / (product**2).sum())
    is_sum = bool(((rest - factor * product).abs() <= FITTED * rest.abs().max()).all())
    return AlibiScores() if is_sum else MaskedScores()


def sinks(attention: FoundAttention) -> str | None:
    """The parameter that holds each head's sink, where the scores have a column more than there are keys."""
    scores = attention.softmax.scores.detach()
    if scores.shape[-1] != attention.query_pos + 1:
        return None
    for name, parameter in attention.owner.module.named_parameters(recurse=False):
        if parameter.shape != (attention.n_heads,):
            continue
        taken = parameter.detach().view(1, -1, 1, 1) - scores[..., -1:]
        highest = scores.amax(-1, keepdim=True)
        close = worked_out(scores)
        if bool((taken.abs() <= close).all()) or bool((highest.abs() <= close).all()):
            return name
    raise NotFound("its scores have a column that belongs to no key, and no parameter of its own that makes it")
