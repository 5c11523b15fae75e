"""Infer the fields of `ModelConfig` from the layers of a recorded model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from adapters.architecture import Block, Part, Stack, Step
from adapters.attention import Attention, Projection, per_head, scores_of
from adapters.automatic.attention import FoundAttention
from adapters.automatic.blocks import FoundStack
from adapters.automatic.norms import relative, rounded
from adapters.config import config_of, first, rotary_values
from adapters.feed_forward import MLP
from adapters.imports import rotation_of
from adapters.mixers import Mixer
from adapters.observe.gradients import gradient_of, zero_sum_weights
from adapters.observe.observe import ModuleCall, NotFound, Recording
from adapters.observe.operations import between
from adapters.observe.recognised import (
    FITTED,
    ROUNDED_TABLE,
    agree,
    factor_of,
    worked_out,
)
from adapters.points import token_embedding
from adapters.views import (
    AlibiScores,
    Composed,
    FilledScores,
    HeadsOfBatch,
    MaskedScores,
    SinkScores,
    View,
)

# --------------------------------------------------------------------------------------------------
# Rotation of queries and keys, and the window of a recorded attention.
# --------------------------------------------------------------------------------------------------


#: Relative precision of a measured angle.
_ANGLE_PRECISION = 3e-6


def window(attention: FoundAttention) -> int | None:
    """Return the attention's window size; None if the last query sees the first key."""
    last_row = attention.softmax.pattern[:, :, -1, : attention.query_pos]
    visible = (last_row > 0).any(0).any(0)
    if bool(visible[0]):
        return None
    return attention.query_pos - int(visible.nonzero()[0])


def _around_rotation(attention: FoundAttention) -> tuple[Tensor, Tensor] | None:
    """Return queries before and after their rotation, ``[batch, pos, head, d_head]``; None if they
    were not recorded, or if the rotation changes their shape.
    """
    query = attention.turned("q")
    if query is None:
        return None
    before = attention.normed("q").double()
    after = query.transpose(1, 2).double()
    if before.shape == after.shape:
        return (before, after)
    return None


def rotated_dimensions(attention: FoundAttention) -> tuple[int, bool, bool] | None:
    """Return the number of leading columns that are rotated in each head, whether adjacent columns
    form pairs, and whether the result is exact.

    None if later columns change too, or if columns form other pairs.
    """
    queries = _around_rotation(attention)
    if queries is None:
        return None
    before, after = queries
    # Columns that are not rotated pass unchanged; a slow rotation shows in the last digits.
    is_exact = torch.equal(before[:, 0], after[:, 0])
    if not is_exact:
        after = after * float(before[:, 0].norm() / after[:, 0].norm())
    close = worked_out(attention.softmax.scores) * float(before.abs().max())
    change = (before - after).abs().amax((0, 1, 2))
    changed = (change > (0.0 if is_exact else close)).nonzero()
    if not len(changed):
        return None
    smallest_even = int(changed[-1]) // 2 * 2 + 2
    for dim in range(smallest_even, before.shape[-1] + 1, 2):
        for adjacent in (False, True):
            size_before = _pair_norms(before[..., :dim], adjacent)
            size_after = _pair_norms(after[..., :dim], adjacent)
            bound = close + ROUNDED_TABLE * size_before
            if bool(((size_before - size_after).abs() <= bound).all()):
                return dim, adjacent, is_exact
    return None


def _pair_norms(x: Tensor, adjacent: bool) -> Tensor:
    """Return the norm of each pair of columns: adjacent ones, or one of each half."""
    if adjacent:
        return x.unflatten(-1, (-1, 2)).norm(dim=-1)
    return x.unflatten(-1, (2, -1)).norm(dim=-2)


def rotary_base(attention: FoundAttention, dim: int, adjacent: bool) -> float | None:
    """Return the rotary base, measured as the angle by which the second pair of columns turns from
    the first position to the next.
    """
    queries = _around_rotation(attention)
    if queries is None or dim < 4:
        return None
    before, after = queries
    real, imaginary = (2, 3) if adjacent else (1, 1 + dim // 2)
    conjugate = torch.complex(before[..., real], -before[..., imaginary])
    turn = torch.complex(after[..., real], after[..., imaginary]) * conjugate
    steps = turn[:, 1:].sum((0, 2)) * turn[:, :-1].sum((0, 2)).conj()
    directions = steps / steps.abs()
    if bool(((directions - directions[:1]).abs() > 0.1).any()):
        return None  # a position has several coordinates, as in a grid of patches
    # The first position may be rotated already (PaliGemma).
    angles = (turn[:, 1] * turn[:, 0].conj()).angle().abs()
    angle = float(angles.median())
    if angle <= 0:
        return None
    if bool(((angles - angle).abs() > FITTED * angle).any()):
        return None
    base = angle ** (-dim / 2)
    short = float(f"{base:.4g}")  # a round number, if it is within the precision of a float32 angle
    if abs(short / base - 1) <= _ANGLE_PRECISION * dim / 2:
        return short
    return base


# --------------------------------------------------------------------------------------------------
# Scores of a recorded attention: the soft cap, the scale of the query-key products, other terms.
# --------------------------------------------------------------------------------------------------


#: Relative precision of a measured scale.
_SCALE_PRECISION = 1e-6


class _FoundScores:
    """Inferred structure of an attention's scores: query-key products divided by the scale, and
    other terms.

    Attributes:
        cap: the soft cap; -1 for none.
        scale: the divisor of the query-key products; None if it is unknown.
        rest: the scores without cap minus the divided products, ``[batch, head, query, key]``, zero
            where masked; None if the scale is unknown.
        largest: the largest of the scores without cap.
        visible: mask, true where the pattern is not zero.
    """

    scale: float | None = None
    rest: Tensor | None = None
    largest: float = 0.0
    visible: Tensor

    def __init__(self, attention: FoundAttention) -> None:
        self.attention = attention
        operations = between(attention.softmax.scores.grad_fn)
        self.cap = -1.0 if operations.cap is None else rounded(operations.cap)
        factor = self._factor()
        if factor is None:
            return
        if abs(factor / operations.factor - 1) < FITTED:
            factor = operations.factor  # without the rounding of the run
        self.scale = _scale(factor, attention.normed("q").shape[-1])
        self._subtract_products(factor)

    def _factor(self) -> float | None:
        """Return the factor of the query-key products in the scores.

        d(score)/d(query) = factor * key + a term that does not depend on the batch row.
        """
        attention = self.attention
        query, keys = attention.probed
        scores = attention.softmax.scores[:, :, query, keys]
        gradient = self._gradient((scores * zero_sum_weights(len(keys), scores)).sum())
        if gradient is None:
            return None
        key = attention.factors()[1].detach()[:, :, keys].double()
        if attention.n_heads % key.shape[1]:
            return None
        key = per_head(key, attention.n_heads)
        weights = zero_sum_weights(len(keys), key)
        if self.cap > 0:
            weights = weights * (1 - (scores.detach().double() / self.cap) ** 2)
        expected = (key * weights.unsqueeze(-1)).sum(2)
        gradient = gradient[:, query].double()
        if gradient.shape != expected.shape:
            return None
        factor = _ratio(gradient, expected)
        if factor is None:
            factor = _ratio(gradient - gradient.mean(0), expected - expected.mean(0))
        return factor or None

    def _gradient(self, total: Tensor) -> Tensor | None:
        """Return the gradient of some scores with respect to the queries, ``[batch, pos, head,
        d_head]``."""
        if not self.attention.meets_changed:
            return self.attention.gradient_by_head(total, "q")
        query = self.attention.softmax.query
        gradient = None if query is None else gradient_of(total, query)
        return None if gradient is None else gradient.transpose(1, 2)

    def _subtract_products(self, factor: float) -> None:
        """Compute what the scores contain besides the query-key products."""
        query, key = self.attention.factors()
        n_keys = key.shape[2]
        scores = self.attention.softmax.scores.detach().double()[..., :n_keys]
        if self.cap > 0:
            scores = self.cap * (scores / self.cap).atanh()
        self.visible = self.attention.softmax.pattern[..., :n_keys] > 0
        scores = scores.where(self.visible, 0)  # they may be minus infinity
        self.largest = float(scores.abs().max())
        products = scores_of(query.detach().double(), key.detach().double())
        self.rest = (scores - factor * products).where(self.visible, 0)

    def _is_negligible(self, x: Tensor) -> bool:
        return bool((x.abs() <= FITTED * self.largest).all())

    def _centred(self, x: Tensor) -> Tensor:
        """Subtract the mean of each row: a softmax does not change if a constant is added to its
        row.
        """
        visible = self.visible.double()
        mean = (x * visible).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
        return (x - mean) * visible

    def are_products(self) -> bool:
        """Tell whether the scores have no other terms."""
        if self.rest is None:
            return False
        return self._is_negligible(self._centred(self.rest))

    def are_alibi(self) -> bool:
        """Tell whether each head adds a slope times the key's position (ALiBi)."""
        if self.rest is None:
            return False
        positions = torch.arange(self.rest.shape[-1], device=self.rest.device)
        positions = self._centred(positions.double().expand_as(self.rest))
        rest = self._centred(self.rest)
        for head in range(self.attention.n_heads):
            slope = factor_of(rest[:, head], positions[:, head])
            if slope <= FITTED:
                return False
            if not self._is_negligible(rest[:, head] - slope * positions[:, head]):
                return False
        return True

    def are_products_and(self, term: Tensor) -> bool:
        """Tell whether a tensor is the only other term."""
        if self.rest is None:
            return False
        return self._is_negligible((self.rest - term).where(self.visible, 0))

    def have_position_bias(self) -> bool:
        """Tell whether the only other term is the same for every batch row."""
        if self.rest is None:
            return False
        if len(self.rest) < 2:
            return False
        if self.are_products():
            return False
        return self._is_negligible(self.rest - self.rest.mean(0))


def _scale(factor: float, d_head: int) -> float:
    """Return the divisor for a measured factor: preferably the square root of the head width or of
    another integer, otherwise the measured number.
    """
    square = d_head if abs(factor * d_head**0.5 - 1) < FITTED else round(factor**-2)
    if square == d_head:
        return square**0.5
    if abs(factor * square**0.5 - 1) < _SCALE_PRECISION:
        return float(f"{square**0.5:.8g}")
    return rounded(1 / factor)


def _ratio(y: Tensor, x: Tensor) -> float | None:
    """Return the factor from `x` to `y`; None if they are not proportional."""
    factor = factor_of(y, x)
    residual = (y - factor * x).abs()
    if bool((residual <= FITTED * y.abs().max()).all()):
        return factor
    return None


def adding(attention: FoundAttention) -> tuple[str, ...]:
    """Return the paths of the attention's linear layers that compute a position-dependent term of
    the scores.
    """
    known = {projection.call.path for projection in attention.projections.values()}
    of_tokens = (attention.recording.batch, attention.query_pos)
    owner = attention.owner
    paths = []
    for call in attention.recording.between(owner.start, attention.softmax.time):
        is_candidate = call.is_linear and owner.holds(call) and len(call.outputs) == 1
        if not is_candidate:
            continue
        if call.path in known:
            continue
        if call.value.shape[:2] == of_tokens:
            continue
        if _reach_scores(call, attention):
            paths.append(relative(call.path, owner.path))
    return tuple(paths)


@dataclass(frozen=True, eq=False)
class _FoundTable:
    """A table of position biases.

    Attributes:
        call: the call of the embedding that holds it.
        path: its path, relative to the attention module.
        buckets: the number of distance buckets.
    """

    call: ModuleCall
    path: str
    buckets: int


def find_table(scores: _FoundScores, before: _FoundTable | None) -> _FoundTable | None:
    """Return the table that supplies the position bias of an attention's scores; None if there is
    none.

    Args:
        scores: the scores.
        before: the table of an earlier layer, which may be shared.
    """
    attention = scores.attention
    if not scores.have_position_bias():
        return None
    for call in attention.recording.inside(attention.owner):
        if isinstance(call.module, nn.Embedding) and _reach_scores(call, attention):
            path = relative(call.path, attention.owner.path)
            return _FoundTable(call, path, len(call.module.weight))
    if before is not None and _reach_scores(before.call, attention):
        return before
    return None


def _reach_scores(call: ModuleCall, attention: FoundAttention) -> bool:
    """Tell whether the scores depend on a module's output."""
    scores = attention.softmax.scores
    weights = torch.linspace(-1, 1, scores.shape[-1], device="cpu").to(scores)
    gradient = gradient_of((scores * weights).sum(), call.returned.live)
    if gradient is None:
        return False
    return bool(gradient.any())


# --------------------------------------------------------------------------------------------------
# Views of the scores.
# --------------------------------------------------------------------------------------------------


#: A filler lies this many times below the lowest score. Half of it is then still below the scores
#: of a run whose scores are five times as large.
_FAR_BELOW = 10


def scores_view(scores: _FoundScores) -> View:
    """Return the view of the scores, which handles the fill value of masked entries, the sink
    column, and the layout of heads.
    """
    attention = scores.attention
    sink = sinks(attention)
    if sink is not None:
        view: View = SinkScores(MaskedScores(), sink)
    elif (filler := _filler(attention)) is not None:
        view = FilledScores(filler)
    else:
        view = AlibiScores() if _reads_alibi(scores) else MaskedScores()
    if attention.flat_heads:
        return Composed(HeadsOfBatch(attention.n_heads), view)
    return view


def _filler(attention: FoundAttention) -> float | None:
    """Return half of the finite number that masked scores are filled with; None if they are not, or
    it is not far below the other scores.
    """
    scores = attention.softmax.scores.detach()
    pattern = attention.softmax.pattern
    hidden = scores[(pattern == 0) & ~MaskedScores().masked(scores)]
    if not hidden.numel():
        return None
    highest = float(hidden.max())
    lowest_visible = float(scores[pattern > 0].min())
    if highest < _FAR_BELOW * lowest_visible:
        return highest / 2
    return None


def _reads_alibi(scores: _FoundScores) -> bool:
    """Tell whether the module receives an ALiBi bias for each key, and adds it."""
    attention = scores.attention
    alibi = attention.owner.named_tensors.get("alibi")
    rows = len(attention.softmax.pattern)
    heads = attention.n_heads
    if alibi is None:
        return False
    if alibi.shape != (rows * heads, 1, attention.key_pos):
        return False
    return scores.are_products_and(alibi.view(rows, heads, 1, -1))


def sinks(attention: FoundAttention) -> str | None:
    """Return the name of the parameter that holds each head's sink; None if the scores have one
    column per key.

    Raises:
        NotFound: no parameter holds the sinks.
    """
    scores = attention.softmax.scores.detach()
    key = attention.softmax.key
    if scores.shape[-1] != (attention.query_pos if key is None else key.shape[2]) + 1:
        return None
    owner = attention.owner
    close = worked_out(scores)
    for name, parameter in owner.module.named_parameters(recurse=False):
        if parameter.shape != (attention.n_heads,):
            continue
        difference = parameter.detach().view(1, -1, 1, 1) - scores[..., -1:]
        highest = scores.amax(-1, keepdim=True)
        if bool((difference.abs() <= close).all()):
            return name
        if bool((highest.abs() <= close).all()):
            return name
    column = scores[..., -1].transpose(1, 2)
    for call in attention.recording.inside(owner):
        output = call.value if call.outputs else None
        if output is not None and output.shape == column.shape and agree(output, column):
            raise NotFound(
                "its scores have a column that belongs to no key, a sink that"
                f" {call.path} makes for each query: only sinks that a parameter holds, one for"
                " each head, are known"
            )
    raise NotFound(
        "its scores have a column that belongs to no key, and no parameter of its own that makes it"
    )


# --------------------------------------------------------------------------------------------------
# The fields of `ModelConfig`.
# --------------------------------------------------------------------------------------------------


#: Half-precision angles with a larger relative difference have another base than the one in the
#: configuration.
_OTHER_ANGLE = 0.02
#: Number of rows of embedding and unembedding that are compared.
_ROWS = 256


class Facts:
    """Collector of facts, layer by layer: the most common value of each field becomes the model's.

    Args:
        model: the model.
        recording: the recording of its run.
    """

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self.model = model
        self.recording = recording
        self.config = config_of(model).get_text_config()
        #: Each layer has its own values in the configuration.
        self._by_layer = bool(getattr(self.config, "is_heterogeneous", False))
        self.counts: dict[str, Counter[object]] = {}
        #: The window size of each attention; None if it sees the first token.
        self.windows: list[int | None] = []
        self.exact_rotation = False
        #: The table of position biases that the layers of a stack share.
        self.table: _FoundTable | None = None
        self._of_the_first: tuple[dict[str, Counter[object]], list[int | None]] | None = None

    def freeze_first_stack(self) -> None:
        """Give the first stack precedence: later facts only fill fields that it left open."""
        counts = {name: Counter(values) for name, values in self.counts.items()}
        self._of_the_first = counts, list(self.windows)

    def add(self, **values: object) -> None:
        """Count a layer's values, by field name."""
        for name, value in values.items():
            self.counts.setdefault(name, Counter())[value] += 1

    def at_layer(self, index: int) -> None:
        """Begin a layer: earlier layers without attention get no window."""
        self.windows += [None] * (index - len(self.windows))

    def add_attention(self, attention: FoundAttention, declared: Attention) -> Attention:
        """Add an attention's facts, and return its declaration with the view of its scores and its
        position bias.
        """
        scores = _FoundScores(attention)
        declared = replace(declared, scores=scores_view(scores))
        self.add(
            n_heads=attention.n_heads,
            n_key_value_heads=attention.n_key_heads,
            d_head=attention.d_head,
            attn_scores_soft_cap=scores.cap,
            attn_scale=scores.scale,
            attention_dir="causal" if attention.is_causal else "bidirectional",
        )
        own = {**declared.config_values, "attn_scale": scores.scale}
        self.windows.append(window(attention))
        has_other_terms = scores.scale is not None and not scores.are_products()
        has_other_terms = has_other_terms and not declared.cross
        if declared.rotary:
            own |= self._add_rotation(attention, declared)
            has_other_terms = has_other_terms and declared.k.latent is None
        elif scores.are_alibi() or isinstance(declared.scores, AlibiScores):
            self.add(positional_embedding_type="alibi")
            has_other_terms = False
        elif table := find_table(scores, self.table):
            declared = replace(declared, position_bias=self._add_table(table))
            has_other_terms = False
        if has_other_terms:
            declared = replace(declared, score_bias_modules=adding(attention))
        return replace(declared, config_values=own)

    def _add_rotation(self, attention: FoundAttention, declared: Attention) -> dict[str, object]:
        """Add a rotation's facts about the model, and return the values of this attention only."""
        self.add(positional_embedding_type="rotary")
        rotation = rotated_dimensions(attention)
        own = dict[str, object]()
        if declared.k.latent is not None and declared.q.width and declared.k.width:
            # The trailing columns, which all heads share.
            own["rotary_dim"] = declared.q.width - declared.k.width
            self.add(rotary_dim=own["rotary_dim"])
        elif rotation is not None:
            dim, adjacent, is_exact = rotation
            self.exact_rotation |= is_exact
            base = rotary_base(attention, dim, adjacent)
            self.add(rotary_dim=dim, rotary_base=base)
            if is_exact:
                own["rotary_dim"] = dim
            if self._by_layer:
                own["rotary_base"] = base
        if rotation is not None:
            self.add(rotary_adjacent_pairs=rotation[1])
        return own

    def _add_table(self, table: _FoundTable) -> str:
        """Add the facts of a table of position biases, and return its path."""
        self.table = table
        self.add(
            positional_embedding_type="relative_positional_bias",
            relative_attention_num_buckets=table.buckets,
            relative_attention_max_distance=getattr(
                self.config, "relative_attention_max_distance", None
            ),
        )
        return table.path

    def values(self, stack: FoundStack, unembed: ModuleCall | None) -> dict[str, object]:
        """Return the fields of `ModelConfig`.

        Args:
            stack: the first list of blocks.
            unembed: the call of the output layer.
        """
        if self._of_the_first is not None:
            counts, self.windows = self._of_the_first
            self.counts |= counts
        values: dict[str, object] = {"d_model": stack.d_model, "d_mlp": None, "act_fn": None}
        values |= {"n_heads": 0, "n_key_value_heads": None, "d_head": 0, "attn_scale": None}
        values |= {name: counts.most_common(1)[0][0] for name, counts in self.counts.items()}
        if "attention_dir" not in values and _looks_ahead(stack):
            values["attention_dir"] = "bidirectional"
        if values.get("positional_embedding_type") == "rotary":
            self._add_rotary_values(values)
        start_token = getattr(config_of(self.model), "decoder_start_token_id", None)
        if start_token is not None:
            values["decoder_start_token_id"] = start_token
        values["tie_word_embeddings"] = unembed is not None and self._is_tied(unembed)
        values |= self._window_values(len(stack.blocks))
        if values["d_mlp"] is None:
            values["d_mlp"] = values.get("d_expert")
        if values["n_key_value_heads"] == values["n_heads"]:
            values["n_key_value_heads"] = None
        return values

    def _is_tied(self, unembed: ModuleCall) -> bool:
        """Tell whether embedding and unembedding are one tensor, or are both loaded from the same
        offloaded tensor.
        """
        rows = getattr(token_embedding(self.model), "weight", None)
        columns = getattr(unembed.module, "weight", None)
        if rows is columns:
            return rows is not None
        if not isinstance(rows, Tensor):
            return False
        if not isinstance(columns, Tensor):
            return False
        configs = (config_of(self.model), self.config)
        if not any(first(config, "tie_word_embeddings") for config in configs):
            return False
        if rows.shape != columns.shape:
            return False
        return torch.equal(rows[:_ROWS], columns[:_ROWS])

    def _window_values(self, n_layers: int) -> dict[str, object]:
        """Return the sliding windows, if the run contradicts the configuration or the configuration
        has none.
        """
        sizes = {size for size in self.windows if size is not None}
        # A text longer than the configured window shows whether the model uses that window.
        text = None if self._by_layer else first(self.config, "sliding_window")
        if isinstance(text, int) and text < self.recording.pos and not sizes:
            return {"use_local_attn": False, "window_size": None, "attn_types": None}
        config = config_of(self.model)
        configured = None
        if not getattr(config, "is_heterogeneous", False):
            configured = first(config, "sliding_window", "layer_types")
        is_other = False
        if isinstance(configured, int) and configured < self.recording.pos:
            is_other = bool(sizes) and configured not in sizes
        self.at_layer(n_layers)
        types = ["global" if size is None else "local" for size in self.windows]
        kinds = first(self.config, "layer_types") or ()
        configured_types = ["local" if "sliding" in kind else "global" for kind in kinds]
        other_types = bool(kinds) and types != configured_types
        contradicts = configured is None or is_other or other_types
        if len(sizes) == 1 and n_layers == len(self.windows) and contradicts:
            return {"use_local_attn": True, "window_size": sizes.pop(), "attn_types": types}
        return {}

    def _add_rotary_values(self, values: dict[str, object]) -> None:
        """Correct the measured rotary values by the configuration's."""
        dims = [dim for dim in self.counts.get("rotary_dim", {}) if isinstance(dim, int)]
        configured = self._rotary_values(values.get("rotary_base"), values.get("rotary_dim"))
        values |= configured
        # Where queries are scaled elsewhere, the rotation of slow columns may not show in a run of
        # few tokens.
        if dims and (self.exact_rotation or "rotary_dim" not in configured):
            values["rotary_dim"] = max(dims)

    def _rotary_values(self, base: object, dim: object) -> dict[str, object]:
        """Return the rotary values of the configuration, if it follows transformers' conventions,
        corrected by the measured ones.

        Args:
            base, dim: the measured values.
        """
        if self._by_layer:
            return {}
        parameters = rotation_of(self.config)
        of_some_layers = parameters.get("full_attention") or {}
        if "rope_theta" not in parameters and "rope_theta" not in of_some_layers:
            return {}
        configured = rotary_values(self.config)
        is_default = parameters.get("rope_type") == "default"
        if is_default and isinstance(base, float) and isinstance(dim, int):
            # The angles may be computed for another number of columns than is rotated (Moonshine).
            in_float32 = all(p.dtype == torch.float32 for p in self.model.parameters())
            ratio = base / float(str(configured["rotary_base"]))
            if abs(ratio ** (-2 / dim) - 1) > (FITTED if in_float32 else _OTHER_ANGLE):
                return configured | {"rotary_base": base, "rotary_dim": dim}
        return configured


def _looks_ahead(stack: FoundStack) -> bool:
    """Tell whether the first token's final stream depends on later tokens, for blocks without a
    known attention.
    """
    positions = 0 if stack.positions_first else 1
    first_token = stack.outputs[-1].live.select(positions, 0)
    try:
        gradient = gradient_of(first_token.pow(2).sum(), stack.stream.live)
    except NotFound:
        # The model overwrites tensors in place (RWKV): nothing indicates that it looks ahead.
        return False
    if gradient is None:
        return False
    return bool(gradient.narrow(positions, 1, gradient.shape[positions] - 1).any())


# --------------------------------------------------------------------------------------------------
# Facts of the whole model, written into the declarations of its blocks.
# --------------------------------------------------------------------------------------------------


def all_rotated(blocks: list[Block]) -> list[Block]:
    """Give unrotated attentions the hook points of rotated ones, if some layers rotate queries and
    keys and all have the same scale.
    """
    parts = [part for block in blocks for part in block.attentions]
    scales = {part.own("attn_scale", None) for part in parts if part.rotary}

    def rotated(step: Step) -> Step:
        part = step.part
        if not isinstance(part, Attention):
            return step
        if part.rotary:
            return step
        if part.own("attn_scale", None) not in scales:
            return step
        return replace(step, part=replace(part, rotary="last"))

    return [replace(block, steps=tuple(map(rotated, block.steps))) for block in blocks]


def with_sizes(block: Block, values: Mapping[str, object]) -> Block:
    """Return a block whose parts declare their sizes only where they differ from the model's."""
    steps = tuple(replace(step, part=_sized(step.part, values)) for step in block.steps)
    return replace(block, steps=steps)


def _sized(part: Part, values: Mapping[str, object]) -> Part:
    """Return a part that declares its sizes only where they differ from the model's."""
    if isinstance(part, MLP):
        return replace(part, up=_with_width(part.up, values["d_mlp"]))
    if isinstance(part, Attention):
        return _sized_attention(part, values)
    if isinstance(part, Mixer):
        modules = [
            _sized_attention(module, values) if isinstance(module, Attention) else module
            for module in part.modules
        ]
        return replace(part, modules=tuple(modules))
    return part


def _sized_attention(part: Attention, values: Mapping[str, object]) -> Attention:
    d_head = values["d_head"]
    usual = {**values, "n_key_value_heads": values["n_key_value_heads"] or values["n_heads"]}
    if not values["attn_scale"]:
        usual["attn_scale"] = float(str(d_head)) ** 0.5 if d_head else None
    own = {
        name: value
        for name, value in part.config_values.items()
        if value is not None and value != usual.get(name)
    }
    q, k, v = (_with_width(projection, d_head) for projection in (part.q, part.k, part.v))
    return replace(part, q=q, k=k, v=v, config_values=own)


def _with_width(projection: Projection, usual: object) -> Projection:
    """Return a projection that declares its width only if it is not the usual one."""
    if projection.width == usual:
        return replace(projection, width=None)
    return projection


def all_sized(stack: Stack, values: Mapping[str, object]) -> Stack:
    """Return a stack with `with_sizes` applied to its blocks."""
    layers = {index: with_sizes(block, values) for index, block in stack.layers.items()}
    return replace(stack, block=with_sizes(stack.block, values), layers=layers)
