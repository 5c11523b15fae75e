"""What the layers of a recorded model say of all of it: the fields of `ModelConfig`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adapters.architecture import Block, Part, Stack, Step
from adapters.attention import Attention, Projection, per_head
from adapters.automatic.attention import FoundAttention
from adapters.automatic.blocks import FoundStack
from adapters.automatic.ends import capped_between
from adapters.automatic.norms import relative
from adapters.config import config_of, first, rotary_values
from adapters.feed_forward import MLP
from adapters.imports import rotation_of
from adapters.mixers import Mixer
from adapters.observe.gradients import by_position, gradient_of
from adapters.observe.observe import ModuleCall, NotFound, Recording
from adapters.observe.recognised import FITTED, ROUNDED_TABLE, agree, factor_of, tolerance, worked_out
from adapters.points import token_embedding
from adapters.views import AlibiScores, Composed, FilledScores, HeadsOfBatch, MaskedScores, SinkScores, View

# ----------------------------------------------------------------------------------------------------------------------
# What is measured of a recorded attention: rotation, scale, soft cap, window, position bias.
# ----------------------------------------------------------------------------------------------------------------------


#: A filler is this many times below the lowest score: half of it is then below those of a run in which scores are five
#: times as large.
_FAR_BELOW = 10
#: To how much an angle is told, relatively.
_TOLD_BY_AN_ANGLE = 3e-6


def window(attention: FoundAttention) -> int | None:
    """How far back it looks at most; None where the last query sees the first key."""
    seen = (attention.softmax.pattern[:, :, -1, : attention.query_pos] > 0).any(0).any(0)
    return None if bool(seen[0]) else attention.query_pos - int(seen.nonzero()[0])


def rotated_dimensions(attention: FoundAttention) -> tuple[int, bool, bool] | None:
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
    met = attention.met()
    if not said or met is None:
        return -1.0
    seen = met.seen & (met.scores.abs() < said)
    capped, plain, product = said * (met.scores[seen] / said).atanh(), met.scores[seen], met.product[seen]

    def left(x: Tensor) -> float:
        return float((x - product * (x @ product / (product @ product))).norm() / x.norm())

    return said if left(capped) < tolerance(attention.softmax.scores) or left(capped) < 0.1 * left(plain) else -1.0


def cap_that_is_not_said(attention: FoundAttention) -> tuple[float, float] | None:
    """What the product is divided by, and the soft cap behind that, of scores that the two explain; None of others."""
    met = attention.met()
    if met is None:
        return None
    both = capped_between(met.product[met.seen].to(attention.softmax.scores.dtype), met.scores[met.seen])
    if both is None:
        return None
    usual, divided = attention.normed("q").shape[-1] ** 0.5, 1 / both[0]
    return usual if abs(divided / usual - 1) < FITTED else divided, both[1]


def scale_of_scores(attention: FoundAttention, cap: float, *, biased: bool = False) -> float | None:
    """What the product of queries and keys is divided by; None where the scores are not that product.

    Args:
        attention: the attention.
        cap: the soft cap of its scores; -1: they have none.
        biased: what is added for each place alone, the same in every row of the batch, does not count.
    """
    met = attention.met()
    q, k = attention.normed("q").double(), attention.normed("k").double()
    rotated = attention.rotated() or attention.shares_keys()
    if met is None or not (rotated or (met.query.transpose(1, 2).shape == q.shape and q.shape[-1] == k.shape[-1])):
        return None
    position = min(5, attention.query_pos - 1)
    scores, product = (x[:, :, position, [position, position - 1]] for x in (met.scores, met.product))
    scores = cap * (scores / cap).atanh() if cap > 0 else scores
    differences, products = (x[..., 0] - x[..., 1] for x in (scores, product))
    if biased:
        differences, products = differences - differences.mean(0), products - products.mean(0)
    factor = _ratio(differences, products)
    if factor is None:
        return None
    if not rotated:  # of rotated ones, it is that of the product of what `hook_rot_q` and `hook_rot_k` show
        group = (attention.n_heads / k.shape[2]) ** 0.5
        factor *= float(met.query.norm() / q.norm()) * float(met.key.norm() / k.norm()) / group
    return attention.divided_by(factor)


def scale_elsewhere(attention: FoundAttention) -> float | None:
    """What the product is divided by, where queries alone, keys alone or places alone add to it.

    The gradient of a score with respect to its query is the key, divided, and what is the same in every row.
    """
    position = min(5, attention.query_pos - 1)
    score = attention.softmax.scores[:, :, position, position - 1].sum()
    query, key = attention.softmax.query, attention.softmax.key
    if attention.recording.batch < 2:
        return None
    if "q" not in attention.found or attention.rotated():
        gradient = None if query is None else gradient_of(score, query)
        if gradient is None or key is None:
            return None
        reached, keys = gradient[:, :, position].double(), key.detach()[:, :, position - 1].double()
    else:
        call, sets, _ = attention.found["q"]
        gradient = gradient_of(score, call.returned.live)
        rows = None if gradient is None else by_position(gradient, attention.recording.batch, attention.query_pos)
        if rows is None:
            return None
        reached = rows[:, position][..., torch.tensor(sets, device=rows.device)].double()
        keys = attention.normed("k").double()[:, position - 1]
    if attention.n_heads % keys.shape[1]:
        return None
    keys = per_head(keys, attention.n_heads)
    factor = _ratio(reached - reached.mean(0), keys - keys.mean(0)) if reached.shape == keys.shape else None
    return None if factor is None else attention.divided_by(factor)


def adding(attention: FoundAttention) -> tuple[str, ...]:
    """The linear layers inside that make something of places which has a part in the scores."""
    known = {call.path for call, *_ in attention.found.values()}
    of_tokens = (attention.recording.batch, attention.query_pos)
    total = (attention.softmax.scores * torch.linspace(-1, 1, attention.key_pos).to(attention.softmax.scores)).sum()
    found = []
    for call in attention.recording.between(attention.owner.start, attention.softmax.time):
        if call.is_linear and call.path not in known and attention.owner.holds(call) and len(call.left) == 1:
            if call.returned.value.shape[:2] == of_tokens:
                continue
            gradient = gradient_of(total, call.returned.live)
            if gradient is not None and bool(gradient.any()):
                found.append(relative(call.path, attention.owner.path))
    return tuple(found)


def alibi_scale(attention: FoundAttention) -> float | None:
    """What the product is divided by, where each head adds a slope times the key's position to it (ALiBi)."""
    met = attention.met()
    if met is None:
        return None
    product, seen = met.product, met.seen.double()
    places = torch.arange(product.shape[-1], dtype=torch.float64, device=product.device).expand_as(product)
    scores = met.scores.where(met.seen, 0)  # they may be minus infinity
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
    return attention.divided_by(sum(factors) / len(factors))


def _ratio(made: Tensor, of: Tensor) -> float | None:
    """The factor between two tensors; None where they are not proportional."""
    factor = factor_of(made, of)
    return factor if bool(((made - factor * of).abs() <= FITTED * made.abs().max()).all()) else None


def _bias(attention: FoundAttention) -> Tensor | None:
    """What is added to the scores for each place, the same in every row, ``[head, query, key]``, zero where masked.

    None where there is none, or not that alone.
    """
    met = attention.met()
    if met is None or len(met.seen) < 2:
        return None
    scores, product = met.scores.where(met.seen, 0), met.product.where(met.seen, 0)
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
        made = call.returned.value.double()
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
    alibi = attention.owner.given.get("alibi")
    met = attention.met() if alibi is not None else None
    rows = len(pattern)
    if alibi is None or met is None or alibi.shape != (rows * attention.n_heads, 1, attention.key_pos):
        return MaskedScores()
    product, rest = met.product[met.seen], (met.scores - alibi.view(rows, attention.n_heads, 1, -1))[met.seen]
    return MaskedScores() if _ratio(rest, product) is None else AlibiScores()


def sinks(attention: FoundAttention) -> str | None:
    """The parameter that holds each head's sink, where the scores have a column more than there are keys."""
    scores, key = attention.softmax.scores.detach(), attention.softmax.key
    if scores.shape[-1] != (attention.query_pos if key is None else key.shape[2]) + 1:
        return None
    for name, parameter in attention.owner.module.named_parameters(recurse=False):
        if parameter.shape != (attention.n_heads,):
            continue
        taken = parameter.detach().view(1, -1, 1, 1) - scores[..., -1:]
        highest = scores.amax(-1, keepdim=True)
        close = worked_out(scores)
        if bool((taken.abs() <= close).all()) or bool((highest.abs() <= close).all()):
            return name
    column = scores[..., -1].transpose(1, 2)
    for call in filter(attention.owner.holds, attention.recording.calls):
        made = call.returned.value if call.left else None
        if made is not None and made.shape == column.shape and agree(made, column):
            said = f"its scores have a column that belongs to no key, a sink that {call.path} makes for each query"
            raise NotFound(f"{said}: only sinks that a parameter holds, one for each head, are known")
    raise NotFound("its scores have a column that belongs to no key, and no parameter of its own that makes it")


#: Angles of half precision that differ by more, relatively, are of another base than the configuration says.
_OTHER_ANGLE = 0.02
#: So many rows of an embedding and an unembedding are compared.
_ROWS = 256


class _Scaling(NamedTuple):
    """What the products of queries and keys are divided by, None where it was not found.

    Attributes:
        by: it, wherever it was found.
        cap: the soft cap behind it; -1: none.
        alibi: it, where each head adds slopes (ALiBi).
        elsewhere: it, where queries alone, keys alone or places alone add to the scores.
    """

    by: float | None
    cap: float
    alibi: float | None
    elsewhere: float | None


class Facts:
    """Collects facts, layer by layer: what most layers say is said of the model.

    Args:
        model: the model.
        recording: of its run.
    """

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self.model, self.recording = model, recording
        self.config = config_of(model).get_text_config()
        self.counts: dict[str, Counter[object]] = {}
        #: How far back each attention looks at most, None where it looks at the first token.
        self.windows: list[int | None] = []
        self.exact_rotation = False

        #: The table of position biases that the layers of a stack share.
        self.table: FoundTable | None = None
        self._of_the_first: tuple[dict[str, Counter[object]], list[int | None]] | None = None

    def freeze_first_stack(self) -> None:
        """What is added from now on is said of the model only where its first stack says nothing."""
        self._of_the_first = {name: Counter(each) for name, each in self.counts.items()}, list(self.windows)

    def add(self, **said: object) -> None:
        """What a layer says, by the names of the fields."""
        for name, value in said.items():
            self.counts.setdefault(name, Counter())[value] += 1

    def at_layer(self, index: int) -> None:
        """A layer begins: those before it that have no attention have no window."""
        self.windows += [None] * (index - len(self.windows))

    def add_attention(self, found: FoundAttention, declared: Attention) -> Attention:
        """What an attention says, and its declaration with how its scores are seen, and its position bias."""
        own = dict(declared.config_values)
        declared = replace(declared, scores=scores_view(found))
        self.add(n_heads=found.n_heads, n_key_value_heads=found.n_key_heads, d_head=found.d_head)
        scaling = self._scaling(found, declared)
        direction = "causal" if found.is_causal else "bidirectional"
        self.add(attn_scores_soft_cap=scaling.cap, attn_scale=scaling.by, attention_dir=direction)
        own["attn_scale"] = scaling.by
        self.windows.append(window(found))
        biased = scaling.elsewhere is not None and not declared.cross
        if declared.rotary:
            own |= self._add_rotation(found, declared)
            biased = biased and declared.k.latent is None
        elif scaling.alibi is not None or isinstance(declared.scores, AlibiScores):
            self.add(positional_embedding_type="alibi")
            biased = False
        elif table := find_table(found, self.table):
            declared = replace(declared, position_bias=self._add_table(table))
            biased = False
        if biased:
            declared = replace(declared, score_bias_modules=adding(found))
        return replace(declared, config_values=own)

    def _scaling(self, found: FoundAttention, declared: Attention) -> _Scaling:
        """What the products of queries and keys are divided by, and what is added to them."""
        told = getattr(self.config, "attn_logit_softcapping", None)
        cap = soft_cap(found, told)
        scale = scale_of_scores(found, cap)
        alibi = None if scale is not None or declared.rotary else alibi_scale(found)
        biased = scale_of_scores(found, cap, biased=True) if scale is None and alibi is None else None
        elsewhere = scale_elsewhere(found) if found.adds or not (scale or alibi) else None
        by = scale or alibi or biased or elsewhere
        if by is None and not told and (capped := cap_that_is_not_said(found)):
            by, cap = capped
        return _Scaling(by, cap, alibi, elsewhere)

    def _add_rotation(self, found: FoundAttention, declared: Attention) -> dict[str, object]:
        """What a rotation says of the model; what it says of this attention is returned."""
        self.add(positional_embedding_type="rotary")
        rotation, own = rotated_dimensions(found), dict[str, object]()
        if declared.k.latent is not None and declared.q.width and declared.k.width:
            own["rotary_dim"] = declared.q.width - declared.k.width  # the last, which all heads share
            self.add(rotary_dim=own["rotary_dim"])
        elif rotation is not None:
            self.exact_rotation |= rotation[2]
            base = rotary_base(found, *rotation[:2])
            self.add(rotary_dim=rotation[0], rotary_base=base)
            if rotation[2]:
                own["rotary_dim"] = rotation[0]
            if getattr(self.config, "is_heterogeneous", False):
                own["rotary_base"] = base
        if rotation is not None:
            self.add(rotary_adjacent_pairs=rotation[1])
        return own

    def _add_table(self, table: FoundTable) -> str:
        """What a table of position biases says; where it is, is returned."""
        self.table = table
        self.add(
            positional_embedding_type="relative_positional_bias",
            relative_attention_num_buckets=table.buckets,
            relative_attention_max_distance=getattr(self.config, "relative_attention_max_distance", None),
        )
        return table.path

    def values(self, found: FoundStack, unembed: ModuleCall | None) -> dict[str, object]:
        """The fields of `ModelConfig`.

        Args:
            found: the first list of blocks.
            unembed: the call of the output layer.
        """
        if self._of_the_first is not None:
            counts, self.windows = self._of_the_first
            self.counts |= counts
        values: dict[str, object] = {"d_model": found.d_model, "d_mlp": None, "act_fn": None}
        values |= {"n_heads": 0, "n_key_value_heads": None, "d_head": 0, "attn_scale": None}
        values |= {name: counts.most_common(1)[0][0] for name, counts in self.counts.items()}
        if "attention_dir" not in values and _looks_ahead(found):
            values["attention_dir"] = "bidirectional"
        if values.get("positional_embedding_type") == "rotary":
            dims = [dim for dim in self.counts.get("rotary_dim", {}) if isinstance(dim, int)]
            said = self._rotary_values(values.get("rotary_base"), values.get("rotary_dim"))
            values |= said
            # Where queries are scaled elsewhere, a run of few tokens may not show that slow columns turn.
            if dims and (self.exact_rotation or "rotary_dim" not in said):
                values["rotary_dim"] = max(dims)
        if (start := getattr(config_of(self.model), "decoder_start_token_id", None)) is not None:
            values["decoder_start_token_id"] = start
        values["tie_word_embeddings"] = unembed is not None and self._is_tied(unembed)
        values |= self._window_values(len(found.blocks))
        if values["d_mlp"] is None:
            values["d_mlp"] = values.get("d_expert")
        if values["n_key_value_heads"] == values["n_heads"]:
            values["n_key_value_heads"] = None
        return values

    def _is_tied(self, unembed: ModuleCall) -> bool:
        """One tensor is both the embedding and the unembedding; or both are brought from one that is elsewhere."""
        modules = (token_embedding(self.model), unembed.module)
        first_weight, last = (getattr(module, "weight", None) for module in modules)
        if not isinstance(first_weight, Tensor) or not isinstance(last, Tensor) or first_weight is last:
            return first_weight is not None and first_weight is last
        said = any(first(each, "tie_word_embeddings") for each in (config_of(self.model), self.config))
        return said and first_weight.shape == last.shape and torch.equal(first_weight[:_ROWS], last[:_ROWS])

    def _window_values(self, n_layers: int) -> dict[str, object]:
        """Sliding windows, where the run shows that they are not those that the configuration says, or it says none."""
        said = None if getattr(self.config, "is_heterogeneous", False) else first(self.config, "sliding_window")
        if isinstance(said, int) and said < self.recording.pos and all(seen is None for seen in self.windows):
            return {"use_local_attn": False, "window_size": None, "attn_types": None}
        seen = {window for window in self.windows if window is not None}
        whole = config_of(self.model)
        told = None if getattr(whole, "is_heterogeneous", False) else first(whole, "sliding_window", "layer_types")
        # A text as long as this one shows whether it is the window that the configuration tells.
        other = isinstance(told, int) and seen and told not in seen and told < self.recording.pos
        self.at_layer(n_layers)
        types = ["global" if window is None else "local" for window in self.windows]
        kinds = first(self.config, "layer_types") or ()
        unsaid = bool(kinds) and types != ["local" if "sliding" in kind else "global" for kind in kinds]
        if len(seen) == 1 and n_layers == len(self.windows) and (told is None or other or unsaid):
            return {"use_local_attn": True, "window_size": seen.pop(), "attn_types": types}
        return {}

    def _rotary_values(self, base: object, dim: object) -> dict[str, object]:
        """What the configuration says of the rotation that was seen, as far as it says it as transformers does.

        Args:
            base, dim: as they were seen.
        """
        if getattr(self.config, "is_heterogeneous", False):
            return {}  # another one for each layer
        parameters = rotation_of(self.config)
        if "rope_theta" not in parameters and "rope_theta" not in (parameters.get("full_attention") or {}):
            return {}
        said = rotary_values(self.config)
        if parameters.get("rope_type") == "default" and isinstance(base, float) and isinstance(dim, int):
            # Angles may be those of another number of columns than turn (Moonshine).
            whole = all(p.dtype == torch.float32 for p in self.model.parameters())
            off = abs((base / float(str(said["rotary_base"]))) ** (-2 / dim) - 1)
            if off > (FITTED if whole else _OTHER_ANGLE):
                return said | {"rotary_base": base, "rotary_dim": dim}
        return said


def _looks_ahead(found: FoundStack) -> bool:
    """Whether the first token's last stream is made of later ones: of blocks in which no attention was found."""
    last = found.outputs[-1].live
    first = last[0] if found.positions_first else last[:, 0]
    try:
        gradient = gradient_of(first.pow(2).sum(), found.stream.live)
    except NotFound:  # the model writes over what it would be made from (RWKV): nothing says that it does
        return False
    return gradient is not None and bool((gradient[1:] if found.positions_first else gradient[:, 1:]).any())


def all_rotated(blocks: list[Block]) -> list[Block]:
    """Where some layers rotate queries and keys, the others show them as they are, if they meet as in those."""
    parts = [part for block in blocks for part in block.attentions]
    scales = {part.own("attn_scale", None) for part in parts if part.rotary}
    if not scales:
        return blocks

    def shown(step: Step) -> Step:
        part = step.part
        if not isinstance(part, Attention) or part.rotary or part.own("attn_scale", None) not in scales:
            return step
        return replace(step, part=replace(part, rotary="last"))

    return [replace(block, steps=tuple(map(shown, block.steps))) for block in blocks]


def with_sizes(block: Block, values: Mapping[str, object]) -> Block:
    """A block whose parts say their sizes only where these are not those of the model."""
    n_heads, d_head = values["n_heads"], values["d_head"]
    usual = {**values, "n_key_value_heads": values["n_key_value_heads"] or n_heads}
    usual["attn_scale"] = values["attn_scale"] or (float(str(d_head)) ** 0.5 if d_head else None)

    def sized(projection: Projection, width: object) -> Projection:
        return replace(projection, width=None if projection.width == width else projection.width)

    def own(part: Part) -> Part:
        if isinstance(part, MLP):
            return replace(part, up=sized(part.up, values["d_mlp"]))
        if isinstance(part, Mixer):
            return replace(part, modules=tuple(each if isinstance(each, tuple) else of(each) for each in part.modules))
        return of(part) if isinstance(part, Attention) else part

    def of(part: Attention) -> Attention:
        q, k, v = (sized(each, d_head) for each in (part.q, part.k, part.v))
        others = {name: x for name, x in part.config_values.items() if x is not None and x != usual.get(name)}
        return replace(part, q=q, k=k, v=v, config_values=others)

    return replace(block, steps=tuple(replace(step, part=own(step.part)) for step in block.steps))


def all_sized(stack: Stack, values: Mapping[str, object]) -> Stack:
    """A stack of such blocks."""
    layers = {i: with_sizes(each, values) for i, each in stack.layers.items()}
    return replace(stack, block=with_sizes(stack.block, values), layers=layers)
