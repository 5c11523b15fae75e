"""Attention calls: a kernel's arguments, and the scores, pattern and result computed from them.

A kernel such as `scaled_dot_product_attention` never holds the scores. Its arguments determine
them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_torch_flex_attn_available

from adapters.attention import pattern_of, result_of, scores_of, writes_over
from adapters.observe.observe import Function
from adapters.views import Args, Call, Deferred, Kwargs, View
from adapters.views.heads import KernelArguments
from adapters.views.values import fingerprint
from bridge.hooks.parts import MAX_BYTES, entries_of, index_on, picked, rows_within
from bridge.sharing import SharedTensor
from bridge.taps.taps import TappedCall

# --------------------------------------------------------------------------------------------------
# The masks of kernels that are not torch functions, converted to additive masks.
# --------------------------------------------------------------------------------------------------


#: The selected entries of a position axis, as an index.
QueryPositions = slice | Tensor


def additive_mask(
    kernel: str,
    query: Shaped[Tensor, "batch head pos d_head"],
    key: Shaped[Tensor, "batch kv_head key_pos d_head"],
    mask: Any,
    options: Mapping[str, Any],
    chosen: QueryPositions | None = None,
) -> Tensor | None:
    """Return the additive mask of the keys that each query may attend to.

    Args:
        kernel: the attention implementation.
        query, key: the kernel's arguments.
        mask: the kernel's mask.
        options: further arguments (`is_causal`, `sliding_window`).
        chosen: the requested queries; None: all.

    Returns:
        A tensor that broadcasts to ``[batch, head, pos, key_pos]``: booleans, true where attention
        is allowed, or numbers to add to the scores; None: everything is allowed.
    """
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return select_queries(mask, chosen)
    if kernel == "flex_attention" and is_torch_flex_attn_available():
        from torch.nn.attention.flex_attention import BlockMask, create_mask

        if not isinstance(mask, BlockMask):
            return _causal(query, key, options, chosen, last_aligned=False)
        device = query.device
        rows = torch.arange(query.shape[2], device=device)
        if chosen is not None:
            rows = rows[chosen]
        allows = mask.mask_mod
        shape = (query.shape[0], 1, len(rows), key.shape[2])
        return create_mask(lambda b, h, q, k: allows(b, h, rows[q], k), *shape, device=device)
    allowed = _causal(query, key, options, chosen, last_aligned=True)
    if mask is None:
        return allowed
    padding: Tensor = mask[:, None, None, :].bool()
    return padding if allowed is None else allowed & padding


def select_queries(x: Tensor, chosen: QueryPositions | None) -> Tensor:
    """Select the rows of some queries.

    Args:
        x: ``[..., pos, any]``, or with one row for all queries.
        chosen: the indices of the queries; None: all.
    """
    if chosen is None or x.ndim < 2 or x.shape[-2] == 1:
        return x
    return x[..., chosen, :]


def causal_mask(
    query: Shaped[Tensor, "batch head pos d_head"],
    key: Shaped[Tensor, "batch kv_head key_pos d_head"],
    chosen: QueryPositions | None,
    offset: int = 0,
    window: int | None = None,
) -> Shaped[Tensor, "chosen key_pos"]:
    """Return the causal mask: each query attends to the keys up to its own position.

    Args:
        query, key: the kernel's arguments.
        chosen: the requested queries; None: all.
        offset: the index of the key at the first query's position.
        window: the number of keys that a query sees; None: all up to its position.
    """
    rows = torch.arange(query.shape[2], device=query.device)[:, None] + offset
    columns = torch.arange(key.shape[2], device=query.device)[None, :]
    if chosen is not None:
        rows = rows[chosen]
    allowed = columns <= rows
    return allowed if window is None else allowed & (columns > rows - window)


def _causal(
    query: Tensor,
    key: Tensor,
    options: Mapping[str, Any],
    chosen: QueryPositions | None,
    last_aligned: bool,
) -> Tensor | None:
    """Return the mask of a call that is only marked causal; None: all keys are visible.

    Flex attention aligns the first query with the first key, flash attention the last with the
    last.
    """
    queries, keys = query.shape[2], key.shape[2]
    window = options.get("sliding_window") if last_aligned else None
    if (queries == 1 and window is None) or not options.get("is_causal", True):
        return None
    offset = keys - queries if last_aligned else 0
    allowed = causal_mask(query, key, chosen, offset, window)
    return allowed[None, None]


@dataclass(slots=True)
class AttentionCall:
    """One call of an attention kernel.

    Attributes:
        query, key, value: ``[batch, head, pos, d_head]``, as passed to the kernel: keys and values
            may be repeated for the heads of a group, and the queries of a single position may be
            packed by group.
        mask: the kernel's mask.
        n_heads: the number of query heads.
        scale: the factor of the products; None: ``1 / sqrt(d_head)``.
        causal: whether each query sees the keys up to its own position, with the first query and
            the first key at the same position.
        dropout: the dropout rate of the pattern.
        kernel: the implementation, if it is not a torch function; it determines the meaning of
            `mask`.
        options: further arguments (`softcap`, `s_aux`, `sliding_window`, `is_causal`).
        chosen: the queries for which scores and pattern are computed; None: all.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    n_heads: int
    scale: float | None = None
    causal: bool = False
    dropout: float = 0.0
    kernel: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    chosen: QueryPositions | None = None

    @classmethod
    def of_torch(cls, arguments: KernelArguments, n_heads: int) -> AttentionCall:
        """Build the call from the arguments of `scaled_dot_product_attention`."""
        query, key, value, mask, dropped, causal, scale, _ = arguments
        return cls(query, key, value, mask, n_heads, scale=scale, causal=causal, dropout=dropped)

    def kept(self) -> AttentionCall:
        """Return a copy without graph from which a cache can compute scores and pattern later. The
        values are not needed and therefore not kept; the keys stand in for them.
        """
        query, key = _without_graph(self.query), _without_graph(self.key)
        mask, n_heads, scale = _without_graph(self.mask), self.n_heads, self.scale
        options = {name: _without_graph(x) for name, x in self.options.items()}
        kept = query, key, key, mask, n_heads, scale, self.causal, 0.0, self.kernel, options
        return AttentionCall(*kept, self.chosen)

    def of_queries(self, chosen: QueryPositions | None) -> AttentionCall:
        """Return a copy of the call for some queries; None: all. (`dataclasses.replace` takes
        longer than a small product.)
        """
        return AttentionCall(
            self.query,
            self.key,
            self.value,
            self.mask,
            self.n_heads,
            self.scale,
            self.causal,
            self.dropout,
            self.kernel,
            self.options,
            chosen,
        )

    def of_heads(self, heads: Tensor) -> AttentionCall:
        """Return the call for some query heads.

        Args:
            heads: the indices of the heads, on the CPU.
        """
        call = self.of_queries(self.chosen)
        call.n_heads = len(heads)
        call.query = picked(self._queries(), {1: heads})
        call.key = self._picked_groups(self.key, heads)
        call.value = self._picked_groups(self.value, heads)
        mask = self.mask
        if isinstance(mask, Tensor) and mask.ndim > 2 and mask.shape[-3] == self.n_heads > 1:
            call.mask = picked(mask, {mask.ndim - 3: heads})
        sinks = self.options.get("s_aux")
        if sinks is not None:
            call.options = self.options | {"s_aux": picked(sinks, {0: heads})}
        return call

    def _picked_groups(self, x: Tensor, heads: Tensor) -> Tensor:
        """Return the keys or values for some query heads, one for each."""
        group_size = self.n_heads // x.shape[1]
        return picked(x, {1: heads // group_size})

    def gathered(self, shared: SharedTensor) -> AttentionCall:
        """Return the call with the heads of all processes, without values, for read-only
        listeners.
        """
        call = self.of_queries(self.chosen)
        call.n_heads = self.n_heads * shared.parts
        # Every process joins these tensors in the same order.
        mask, sinks = self.mask, self.options.get("s_aux")
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] == self.n_heads > 1:
            call.mask = shared.joined(mask)
        if sinks is not None:
            call.options = self.options | {"s_aux": shared.joined(sinks, axis=0)}
        call.key = call.value = shared.joined(self.key)
        call.query = shared.joined(self._queries())
        call.dropout = 0.0
        return call

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that scores and pattern depend on."""
        used = (self.query, self.key, self.mask, *self.options.values())
        return tuple([x for x in used if isinstance(x, Tensor)])

    def versions(self) -> tuple[object, ...]:
        """Return the versions of these tensors, with fingerprints of parameters."""
        used = self.tensors()
        versions = [x._version for x in used if not x.is_inference()]
        return (*versions, *[fingerprint(x) for x in used if isinstance(x, nn.Parameter)])

    @property
    def n_queries(self) -> int:
        """Return the number of queries of each head."""
        return self.query.shape[1] * self.query.shape[2] // self.n_heads

    def _queries(self) -> Tensor:
        """Return the queries, unpacked to one per head."""
        query = self.query
        if query.shape[1] == self.n_heads:
            return query
        return query.reshape(query.shape[0], self.n_heads, -1, query.shape[-1])

    def _mask(self) -> Tensor | None:
        """Return the additive mask, or the boolean mask of allowed keys."""
        query = self._queries()
        if self.kernel:
            return additive_mask(self.kernel, query, self.key, self.mask, self.options, self.chosen)
        if self.causal:
            return causal_mask(query, self.key, self.chosen)
        mask: Tensor | None = self.mask
        if mask is None:
            return None
        if mask.ndim == 4 and mask.shape[2] not in (1, query.shape[2]):  # packed as the queries
            mask = mask.reshape(mask.shape[0], self.n_heads, -1, mask.shape[-1])
        return select_queries(mask, self.chosen)

    def scores(self) -> Float[Tensor, "batch head pos key_pos"]:
        """Compute the scores that enter the softmax; masked entries are large negative numbers.

        With attention sinks (``s_aux``), the last column holds the sinks.
        """
        query = self._queries()
        if self.chosen is not None:
            query = query[:, :, self.chosen]
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        softcap, sinks = self.options.get("softcap"), self.options.get("s_aux")
        return scores_of(query, self.key, scale, softcap, self._mask(), sinks)

    def pattern(
        self, scores: Float[Tensor, "batch head pos key_pos"], over: bool = False
    ) -> Float[Tensor, "batch head pos key_pos"]:
        """Compute the pattern from scores; the row of a fully masked query is zero.

        Args:
            scores: the scores.
            over: whether the pattern may overwrite the scores, because they are not needed
                afterwards.
        """
        pattern = pattern_of(scores, over)
        mask = None if self.causal else self._mask()
        if mask is None or mask.dtype != torch.bool:
            return pattern
        sees_any_key = mask.any(-1, keepdim=True)
        if over and writes_over():
            return pattern.mul_(sees_any_key)
        return pattern * sees_any_key

    def result(
        self, pattern: Float[Tensor, "batch head pos key_pos"]
    ) -> Float[Tensor, "batch kernel_head kernel_pos d_head"]:
        """Compute the kernel's result for this pattern, with the heads in the kernel's layout."""
        if self.options.get("s_aux") is not None:
            pattern = pattern[..., :-1]
        if self.dropout:
            pattern = dropout(pattern, self.dropout)
        z = result_of(pattern, self.value)
        if z.shape[1] == self.query.shape[1]:
            return z
        return z.reshape(*self.query.shape[:-1], z.shape[-1])


def softmax_of(scores: Tensor, before: Tensor, softmax: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute the softmax of scores; a row that a user has fully masked becomes zero instead of
    NaN.

    Args:
        scores: the current scores.
        before: the model's own scores.
        softmax: the model's softmax.
    """
    if scores is before:
        return softmax(scores)
    all_masked = scores.isneginf().all(-1, keepdim=True)
    pattern = softmax(scores.masked_fill(all_masked, 0.0))
    return pattern.masked_fill(all_masked, 0.0)


def is_over_keys(args: Args, kwargs: Kwargs) -> bool:
    """Tell whether a softmax is over keys: over the last of at least three axes.

    Args:
        args, kwargs: the arguments of the call.
    """
    x: Tensor = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    return x.ndim > 2 and dim in (-1, x.ndim - 1)


def show_heads(shown: TappedCall, channel: str, x: Tensor) -> Tensor:
    """Show queries or keys, and return the results, with the heads in the kernel's layout.

    Args:
        shown: the call of the module, whose hook points are shown ``[batch, head, pos, d_head]``.
        channel: ``q`` or ``k``.
        x: ``[batch, kernel_head, kernel_pos, d_head]``.

    Raises:
        RuntimeError: the kernel's heads, grouped or repeated, do not match the hook point's number.
    """
    points = shown.points(channel)
    if not points:
        return x
    heads, positions = x.shape[1:3]
    n = (points[0].point.n_heads or 0) // shown.parts or heads
    if heads == n:
        return shown.show(channel, x)
    rest = heads % n if heads > n else heads * positions % n
    if rest:
        raise RuntimeError(
            f"the first product of queries and keys in it is of {heads} heads at {positions}"
            f" positions, not of {n} heads: a module inside of it may multiply others before"
        )
    if heads < n:  # the queries of one position, packed in groups
        before = x.reshape(x.shape[0], n, -1, x.shape[-1])
        new = shown.show(channel, before)
        return x if new is before else new.reshape(x.shape)
    repeats = heads // n  # each group's keys, repeated for its queries
    before = x[:, ::repeats]
    new = shown.show(channel, before)
    return x if new is before else new.repeat_interleave(repeats, dim=1)


def _without_graph(x: Any) -> Any:
    """Return a detached tensor that later runs can use; other values unchanged."""
    if not isinstance(x, Tensor):
        return x
    if x.is_inference():
        return x.clone()
    return x.detach() if x.requires_grad else x


# --------------------------------------------------------------------------------------------------
# Attention functions that transformers looks up by name in `AttentionInterface`.
#
# While listeners are attached to a module's scores, pattern, or rotated queries and keys, its
# implementation's entry is replaced by one that calls the watch first; the model's own attributes
# do not change. If the function calls torch functions (sdpa, a user's own), these are watched; for
# other kernels (flash, flex), the arguments are sufficient.
# --------------------------------------------------------------------------------------------------


#: The function that is called before a kernel, with the call, and a function that runs the kernel
#: on queries and keys.
BeforeKernel = Callable[[AttentionCall, Callable[[Tensor, Tensor], Tensor]], Tensor]


def implementation_of(module: nn.Module) -> str | None:
    """Return the attention implementation that a module was loaded with."""
    # Read from the dictionary: a configuration's attribute access takes microseconds.
    config = module.__dict__.get("config")
    if config is None:
        return None
    implementation: str | None = object.__getattribute__(config, "__dict__").get(
        "_attn_implementation_internal"
    )
    return implementation


@functools.cache
def is_looked_up(forward: Callable[..., object], implementation: str | None) -> bool:
    """Tell whether a module class's forward looks its kernel up in `AttentionInterface`.

    It does not if it uses a registry of its own (Doge).
    """
    function = inspect.unwrap(forward)
    code = getattr(function, "__code__", None)
    names: tuple[str, ...] = () if code is None else code.co_names
    looks = "ALL_ATTENTION_FUNCTIONS" in names and implementation not in (None, "eager")
    namespace = getattr(function, "__globals__", {})
    registry = namespace.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return looks and registry is ALL_ATTENTION_FUNCTIONS


def is_opaque(implementation: str) -> bool:
    """Tell whether an implementation is not a torch function, so that only its arguments are
    visible.
    """
    return "flash" in implementation or implementation == "flex_attention"


def kernels_of(implementation: str) -> MutableMapping[str, Any]:
    """Return the part of `AttentionInterface` that holds an implementation: its own, or global."""
    own = ALL_ATTENTION_FUNCTIONS._local_mapping
    return own if implementation in own else ALL_ATTENTION_FUNCTIONS._global_mapping


def call_opaque(
    own: Function,
    name: str,
    before: BeforeKernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call a kernel of which only the arguments are visible."""
    weights: list[Tensor | None] = [None]

    def run(query: Tensor, key: Tensor) -> Tensor:
        output, weights[0] = own(module, query, key, value, attention_mask, **options)
        result: Tensor = output.transpose(1, 2)
        return result

    call = AttentionCall(query, key, value, attention_mask, query.shape[1], kernel=name)
    call.scale = options.get("scaling")
    call.dropout = options.get("dropout") or 0.0
    call.options = {"is_causal": getattr(module, "is_causal", True)}
    for option, setting in options.items():
        if setting is not None:
            call.options[option] = setting
    z = before(call, run)
    return z.transpose(1, 2).contiguous(), weights[0]


# --------------------------------------------------------------------------------------------------
# Scores and patterns in a cache, computed on access.
# --------------------------------------------------------------------------------------------------


def autocasts(device: str) -> bool:
    """Tell whether `torch.autocast` is on for this type of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


class DeferredAttention(Deferred):
    """A deferred activation: scores or a pattern, computed on access.

    Args:
        view: the hook point's view.
        attention: the call of the kernel.
        channel: ``scores`` or ``pattern``.
        call: the module's call, for the view.
        versions: the versions of the tensors that it is computed from.
        waits: whether it can be computed after the run, because `torch.autocast` did not choose the
            run's precision.
    """

    __slots__ = ("attention", "channel")

    def __init__(
        self,
        view: View,
        attention: AttentionCall,
        channel: str,
        call: Call,
        versions: tuple[object, ...],
        waits: bool,
    ) -> None:
        self.view, self.x, self.call, self.waits = view, attention.query, call, waits
        self.attention, self.channel = attention, channel
        self._seen, self._noted = versions, None

    @property
    def n_rows(self) -> int:
        return self.attention.n_queries

    @property
    def shape(self) -> tuple[int, ...]:
        return score_shape(self.attention)

    @property
    def keeps_more(self) -> bool:
        """Return False: queries and keys grow linearly with the prompt, scores and patterns
        quadratically.
        """
        return False

    def tensors(self) -> tuple[Tensor, ...]:
        return self.attention.tensors()

    def _state(self) -> tuple[object, ...]:
        return self.attention.versions()

    def _at_site(self, rows: slice | Tensor | None) -> Tensor:
        device = self.x.device.type
        attention = self.attention if rows is None else self.attention.of_queries(rows)
        exact = self.waits and autocasts(device)
        with torch.autocast(device, enabled=False) if exact else nullcontext():
            scores = attention.scores()
            return scores if self.channel == "scores" else attention.pattern(scores, over=True)

    def of_heads(self, heads: Tensor) -> DeferredAttention | None:
        """Return the deferred activation of some heads, in any order; see `Deferred`."""
        if not (self.view.identity or self.view.by_row):
            return None
        some = copy.copy(self)
        some.attention = self.attention.of_heads(heads)
        some.call = replace(self.call, scratch=parameters_of_heads(self.call, (self.view,), heads))
        some.x, some._seen = some.attention.query, some._state()
        return some

    def part(self, name: str, heads: Any, queries: Any) -> Tensor | None:
        """Compute only some heads and queries, in chunks of queries; see `Deferred`."""
        self.check(name)
        head_numbers = torch.tensor(entries_of("heads", heads, self.shape[1], name), device="cpu")
        some = self.of_heads(head_numbers)
        if some is None:
            return None
        rows = torch.tensor(entries_of("queries", queries, self.shape[2], name), device="cpu")
        size = rows_within(MAX_BYTES, self.shape, head_numbers, self.x.dtype)
        result: Tensor | None = None
        for first in range(0, len(rows), size):
            chunk = rows[first : first + size]
            value = some.value(name, index_on(chunk, self.x.device))
            if len(chunk) == len(rows):
                return value
            if result is None:
                result = value.new_empty((*value.shape[:2], len(rows), value.shape[3]))
            result[:, :, first : first + size] = value
        return result


def score_shape(attention: AttentionCall) -> tuple[int, int, int, int]:
    """Return the shape of the scores of all heads and queries, without a column of sinks."""
    return attention.query.shape[0], attention.n_heads, attention.n_queries, attention.key.shape[2]


def parameters_of_heads(call: Call, views: Iterable[View], heads: Tensor) -> dict[str, Any]:
    """Return a ``call.scratch`` with the parameters that views need for some heads.

    Args:
        call: the call of the module.
        views: the views of the hook points.
        heads: the heads.
    """
    parameters: dict[str, Any] = {}
    for name in dict.fromkeys(name for view in views for name in view.parameters):
        value = call.scratch[name] if name in call.scratch else getattr(call.module, name)
        parameters[name] = picked(value, {0: heads})
    return parameters
