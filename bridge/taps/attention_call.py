"""What an attention kernel was called with, and what it computes from it, in full: scores, pattern, result.

A kernel such as `scaled_dot_product_attention` never holds the scores. Its arguments say everything they depend on.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_torch_flex_attn_available

from adapters.attention import pattern_of, result_of, scores_of, writes_over
from adapters.views import Args, Call, Deferred, Kwargs, View
from adapters.views.attention import KernelArguments
from bridge.hooks.parts import MAX_BYTES, entries_of, index_on, picked, rows_within
from bridge.sharing import SharedTensor
from bridge.taps.taps import PatchedFunction, calling_instead

# ----------------------------------------------------------------------------------------------------------------------
# What kernels that are no torch functions mean by their masks, as a mask to be added to the scores.
# ----------------------------------------------------------------------------------------------------------------------


#: Which positions of an axis: as they are indexed with.
QueryPositions = slice | Tensor


def additive_mask(
    kernel: str,
    query: Shaped[Tensor, "batch head pos d_head"],
    key: Shaped[Tensor, "batch kv_head key_pos d_head"],
    mask: Any,
    options: Mapping[str, Any],
    chosen: QueryPositions | None = None,
) -> Tensor | None:
    """Which keys each query may see.

    Args:
        kernel: the attention implementation.
        query, key: what it was given.
        mask: what it was given.
        options: what it was given besides (`is_causal`, `sliding_window`).
        chosen: which queries are asked about; None: all.

    Returns:
        A tensor that broadcasts to ``[batch, head, pos, key_pos]``: true where attention is allowed, or to be added to
        the scores; None: everything is allowed.
    """
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return of_queries(mask, chosen)
    if kernel == "flex_attention" and is_torch_flex_attn_available():
        from torch.nn.attention.flex_attention import BlockMask, create_mask

        if isinstance(mask, BlockMask):
            rows = torch.arange(query.shape[2], device=query.device)
            rows, allows = rows if chosen is None else rows[chosen], mask.mask_mod
            shape = (query.shape[0], 1, len(rows), key.shape[2])
            return create_mask(lambda b, h, q, k: allows(b, h, rows[q], k), *shape, device=query.device)
        return _causal(query, key, options, chosen, last_aligned=False)
    allowed = _causal(query, key, options, chosen, last_aligned=True)
    if mask is not None:
        padding = mask[:, None, None, :].bool()
        allowed = padding if allowed is None else allowed & padding
    return allowed


def of_queries(x: Tensor, chosen: QueryPositions | None) -> Tensor:
    """The rows of some queries.

    Args:
        x: ``[..., pos, any]``, or with one row for all queries.
        chosen: which queries; None: all.
    """
    return x if chosen is None or x.ndim < 2 or x.shape[-2] == 1 else x[..., chosen, :]


def causal_mask(
    query: Shaped[Tensor, "batch head pos d_head"],
    key: Shaped[Tensor, "batch kv_head key_pos d_head"],
    chosen: QueryPositions | None,
    offset: int = 0,
    window: int | None = None,
) -> Shaped[Tensor, "chosen key_pos"]:
    """Each query sees the keys up to its own place.

    Args:
        query, key: as they were given to the kernel.
        chosen: which queries are asked about; None: all.
        offset: at which key the first query is.
        window: how many keys it sees; None: all that come before.
    """
    rows = torch.arange(query.shape[2], device=query.device)[:, None] + offset
    columns = torch.arange(key.shape[2], device=query.device)[None, :]
    rows = rows if chosen is None else rows[chosen]
    allowed = columns <= rows
    return allowed if window is None else allowed & (columns > rows - window)


def _causal(
    query: Tensor, key: Tensor, options: Mapping[str, Any], chosen: QueryPositions | None, last_aligned: bool
) -> Tensor | None:
    """Which keys each query may see where only "causal" was said; None: all of them.

    Flex attention aligns the first query with the first key, flash attention the last with the last.
    """
    queries, keys = query.shape[2], key.shape[2]
    window = options.get("sliding_window") if last_aligned else None
    if (queries == 1 and window is None) or not options.get("is_causal", True):
        return None
    return causal_mask(query, key, chosen, keys - queries if last_aligned else 0, window)[None, None]


@dataclass(slots=True)
class AttentionCall:
    """One call of an attention kernel.

    Attributes:
        query, key, value: ``[batch, head, pos, d_head]`` as the kernel was given them: keys and values of each group
            once or repeated, the queries of a single position perhaps packed in groups.
        mask: what the kernel was given.
        n_heads: how many query heads there are.
        scale: what the products are multiplied with; None: ``1 / sqrt(d_head)``.
        causal: each query sees the keys up to its own place, the first query and the first key being at the same one.
        dropout: the share of the pattern that is dropped.
        kernel: the implementation, where it is no torch function: it decides what `mask` means.
        options: what it was given besides (`softcap`, `s_aux`, `sliding_window`, `is_causal`).
        chosen: of which queries scores and pattern are computed; None: of all.
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
    def of_torch(cls, given: KernelArguments, n_heads: int) -> AttentionCall:
        """A call of `scaled_dot_product_attention`."""
        query, key, value, mask, dropped, causal, scale, _ = given
        return cls(query, key, value, mask, n_heads, scale=scale, causal=causal, dropout=dropped)

    def kept(self) -> AttentionCall:
        """What a cache may hold of it to compute scores and pattern later: no graph, nothing that changes unseen.

        Values have no part in that: the keys take their place, so that nobody need keep them.
        """
        query, key = _kept(self.query), _kept(self.key)
        mask = _kept(self.mask) if isinstance(self.mask, Tensor) else self.mask
        options = {name: _kept(x) if isinstance(x, Tensor) else x for name, x in self.options.items()}
        return AttentionCall(
            query, key, key, mask, self.n_heads, self.scale, self.causal, 0.0, self.kernel, options
        )  # fmt: skip

    def of_queries(self, chosen: QueryPositions) -> AttentionCall:
        """The same call, of some queries alone. (`dataclasses.replace` takes longer than a small product.)"""
        return AttentionCall(
            self.query, self.key, self.value, self.mask, self.n_heads, self.scale, self.causal, self.dropout,
            self.kernel, self.options, chosen,
        )  # fmt: skip

    def of_heads(self, heads: Tensor) -> AttentionCall:
        """The same call, of some query heads alone.

        Args:
            heads: which, on the CPU.
        """
        query, key, value, mask, options = self._queries(), self.key, self.value, self.mask, dict(self.options)
        key, value = (picked(x, {1: heads // (self.n_heads // x.shape[1])}) for x in (key, value))
        if isinstance(mask, Tensor) and mask.ndim > 2 and mask.shape[-3] == self.n_heads > 1:
            mask = picked(mask, {mask.ndim - 3: heads})
        if options.get("s_aux") is not None:
            options["s_aux"] = picked(options["s_aux"], {0: heads})
        return AttentionCall(
            picked(query, {1: heads}), key, value, mask, len(heads), self.scale, self.causal, self.dropout,
            self.kernel, options, self.chosen,
        )  # fmt: skip

    def whole(self, shared: SharedTensor) -> AttentionCall:
        """The call with the heads of all processes, without values: for those who only look."""
        heads, n = self.n_heads, self.n_heads * shared.parts
        mask, options = self.mask, dict(self.options)
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] == heads > 1:
            mask = shared.joined(mask)
        if options.get("s_aux") is not None:
            options["s_aux"] = shared.joined(options["s_aux"], axis=0)
        key = shared.joined(self.key)
        return AttentionCall(
            shared.joined(self._queries()), key, key, mask, n, self.scale, self.causal, 0.0, self.kernel, options
        )  # fmt: skip

    def versions(self) -> tuple[int, ...]:
        """How often everything that scores and pattern depend on was written to."""
        tensors = (self.query, self.key, self.mask, *self.options.values())
        return tuple([x._version for x in tensors if isinstance(x, Tensor) and not x.is_inference()])

    @property
    def n_queries(self) -> int:
        """How many queries there are of each head."""
        return self.query.shape[1] * self.query.shape[2] // self.n_heads

    def _queries(self) -> Tensor:
        """The queries, one head each."""
        query = self.query
        return (
            query
            if query.shape[1] == self.n_heads
            else query.reshape(query.shape[0], self.n_heads, -1, query.shape[-1])
        )

    def _mask(self) -> Tensor | None:
        """What is added to the scores, or where attention is allowed."""
        query = self._queries()
        if self.kernel:
            return additive_mask(self.kernel, query, self.key, self.mask, self.options, self.chosen)
        if self.causal:
            return causal_mask(query, self.key, self.chosen)
        mask = self.mask
        if mask is not None and mask.ndim == 4 and mask.shape[2] not in (1, query.shape[2]):  # packed as the queries
            mask = mask.reshape(mask.shape[0], self.n_heads, -1, mask.shape[-1])
        return mask if mask is None else of_queries(mask, self.chosen)

    def scores(self) -> Float[Tensor, "batch head pos key_pos"]:
        """The scores that enter the softmax; where attention is forbidden, a large negative number.

        With attention sinks (``s_aux``), the last column is the sinks'.
        """
        query = self._queries()
        query = query if self.chosen is None else query[:, :, self.chosen]
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        return scores_of(query, self.key, scale, self.options.get("softcap"), self._mask(), self.options.get("s_aux"))

    def pattern(
        self, scores: Float[Tensor, "batch head pos key_pos"], over: bool = False
    ) -> Float[Tensor, "batch head pos key_pos"]:
        """The pattern of such scores. A query that may attend to nothing attends to nothing.

        Args:
            scores: the scores.
            over: nobody needs them any more, so that the pattern may be written over them.
        """
        pattern = pattern_of(scores, over)
        mask = None if self.causal else self._mask()
        if mask is not None and mask.dtype == torch.bool:
            sees = mask.any(-1, keepdim=True)
            pattern = pattern.mul_(sees) if over and writes_over() else pattern * sees
        return pattern

    def result(
        self, pattern: Float[Tensor, "batch head pos key_pos"]
    ) -> Float[Tensor, "batch kernel_head kernel_pos d_head"]:
        """What the kernel returns when this is the pattern, with the heads as the kernel has them."""
        if self.options.get("s_aux") is not None:
            pattern = pattern[..., :-1]
        if self.dropout:
            pattern = dropout(pattern, self.dropout)
        z = result_of(pattern, self.value)
        return z if z.shape[1] == self.query.shape[1] else z.reshape(*self.query.shape[:-1], z.shape[-1])


def softmax_of(scores: Tensor, before: Tensor, softmax: Callable[[Tensor], Tensor]) -> Tensor:
    """The softmax of scores. Where a user forbids everything there is no attention, rather than NaN.

    Args:
        scores: as they are now.
        before: as the model made them.
        softmax: the model's own.
    """
    if scores is before:
        return softmax(scores)
    nothing = scores.isneginf().all(-1, keepdim=True)
    return softmax(scores.masked_fill(nothing, 0.0)).masked_fill(nothing, 0.0)


def is_over_keys(args: Args, kwargs: Kwargs) -> bool:
    """Whether a softmax is one of rows of keys: of three axes or more, over the last.

    Args:
        args, kwargs: what it is called with.
    """
    x: Tensor = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    return x.ndim > 2 and dim in (-1, x.ndim - 1)


def with_heads(x: Tensor, n_heads: int | None, show: Callable[[Tensor], Tensor]) -> Tensor:
    """What is made of queries or keys, with the heads as the kernel was given them.

    Args:
        x: ``[batch, kernel_head, kernel_pos, d_head]``.
        n_heads: how many heads are shown; None: those of the kernel.
        show: shows ``[batch, head, pos, d_head]``, and returns what becomes of it.

    Raises:
        RuntimeError: there are others than so many, in groups or repeated.
    """
    n = n_heads or x.shape[1]
    if x.shape[1] % n if x.shape[1] > n else x.shape[1] * x.shape[2] % n:
        raise RuntimeError(
            f"the first product of queries and keys in it is of {x.shape[1]} heads at {x.shape[2]} positions, not of "
            f"{n} heads: a module inside of it may multiply others before"
        )
    if x.shape[1] < n:  # the queries of one position, packed in groups
        shown = x.reshape(x.shape[0], n, -1, x.shape[-1])
        new = show(shown)
        return x if new is shown else new.reshape(x.shape)
    if x.shape[1] > n:  # each group's keys, repeated for its queries
        shown = x[:, :: x.shape[1] // n]
        new = show(shown)
        return x if new is shown else new.repeat_interleave(x.shape[1] // n, dim=1)
    return show(x)


def _kept(x: Tensor) -> Tensor:
    return x.clone() if x.is_inference() else x.detach() if x.requires_grad else x


# ----------------------------------------------------------------------------------------------------------------------
# Attention functions that transformers looks up by name in `AttentionInterface`.
#
# While a module's scores, pattern, or rotated queries and keys are watched, the entry of the implementation that it was
# loaded with is replaced by one that asks the watch first; what the model sees of itself stays as it is. Where the
# function calls torch functions (sdpa, a user's own), they are watched; of kernels that are none (flash, flex), the
# arguments say everything.
# ----------------------------------------------------------------------------------------------------------------------


#: What is called before a kernel: it is given the call, and what runs the kernel on queries and keys.
BeforeKernel = Callable[[AttentionCall, Callable[[Tensor, Tensor], Tensor]], Tensor]


def implementation_of(module: nn.Module) -> str | None:
    """The attention implementation that a module was loaded with."""
    # Straight from its dictionary: a configuration's own attribute access takes microseconds.
    config = module.__dict__.get("config")
    if config is None:
        return None
    implementation: str | None = object.__getattribute__(config, "__dict__").get("_attn_implementation_internal")
    return implementation


@functools.cache
def is_looked_up(forward: Callable[..., object], implementation: str | None) -> bool:
    """Whether the forward of a class of modules finds the function of an implementation in `AttentionInterface`.

    Not where it looks in one of its own (Doge).
    """
    function = inspect.unwrap(forward)
    code = getattr(function, "__code__", None)
    names: tuple[str, ...] = () if code is None else code.co_names
    looks = "ALL_ATTENTION_FUNCTIONS" in names and implementation not in (None, "eager")
    found = getattr(function, "__globals__", {}).get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return looks and found is ALL_ATTENTION_FUNCTIONS


def is_opaque(implementation: str) -> bool:
    """Whether an implementation is no torch function, so that only its arguments can be seen: its mask is known."""
    return "flash" in implementation or implementation == "flex_attention"


class PatchedKernel(PatchedFunction):
    """Patches one implementation in `AttentionInterface`, which looks at its own entries and at those for all."""

    def __init__(self, namespace: MutableMapping[str, Any], name: str) -> None:
        super().__init__(namespace, name)
        self._local = ALL_ATTENTION_FUNCTIONS._local_mapping.get(name)

    @property
    def own(self) -> Callable[..., Any]:
        """The function; one that is registered for all may be registered anew at any time."""
        return self._local or ALL_ATTENTION_FUNCTIONS._global_mapping[self.name]

    def restore(self) -> None:
        """Puts back the entry of its own, if there was one."""
        if self._local is None:
            del self.namespace[self.name]
        else:
            self.namespace[self.name] = self._local


def watched_kernel(module: nn.Module, watch: TorchFunctionMode, before: BeforeKernel) -> AbstractContextManager[None]:
    """Watches the attention function of a module whose kernel is patched, inside a ``with`` statement.

    Args:
        module: the attention module.
        watch: sees the torch functions that it calls.
        before: called before it, where it is no torch function.
    """

    def instead(own: Callable[..., Any], name: str, args: Args, options: Kwargs) -> object:
        if args[0] is not module:
            return own(*args, **options)
        if not is_opaque(name):
            with watch:
                return own(*args, **options)
        return _before_opaque(own, name, before, *args, **options)

    return calling_instead(instead)


def _before_opaque(
    own: Callable[..., Any],
    name: str,
    before: BeforeKernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Calls a kernel of which only the arguments can be seen."""
    weights: list[Tensor | None] = [None]

    def run(query: Tensor, key: Tensor) -> Tensor:
        output, weights[0] = own(module, query, key, value, attention_mask, **options)
        result: Tensor = output.transpose(1, 2)
        return result

    known = {"is_causal": getattr(module, "is_causal", True)} | {
        option: given for option, given in options.items() if given is not None
    }
    call = AttentionCall(
        query,
        key,
        value,
        attention_mask,
        query.shape[1],
        scale=options.get("scaling"),
        dropout=options.get("dropout") or 0.0,
        kernel=name,
        options=known,
    )
    z = before(call, run)
    return z.transpose(1, 2).contiguous(), weights[0]


# ----------------------------------------------------------------------------------------------------------------------
# Scores and patterns that a cache holds, computed when it is asked for them.
# ----------------------------------------------------------------------------------------------------------------------


def autocasts(device: str) -> bool:
    """Whether `torch.autocast` is on for this type of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


class DeferredAttention(Deferred):
    """Scores or a pattern, computed when asked for.

    Args:
        view: of the hook point.
        attention: the call of the kernel.
        channel: ``scores`` or ``pattern``.
        call: as the view sees it.
        seen: the versions of what it is computed from.
        waits: it can be computed after the run, whose precision `torch.autocast` did not choose.
    """

    __slots__ = ("attention", "channel")

    def __init__(
        self, view: View, attention: AttentionCall, channel: str, call: Call, seen: tuple[int, ...], waits: bool
    ) -> None:
        self.view, self.x, self.attention, self.channel, self.call = view, attention.query, attention, channel, call
        self._seen, self.waits = seen, waits

    @property
    def n_rows(self) -> int:
        return self.attention.n_queries

    @property
    def shape(self) -> tuple[int, ...]:
        return score_shape(self.attention)

    @property
    def keeps_more(self) -> bool:
        """Queries and keys grow with the prompt; scores and patterns with its square."""
        return False

    def _versions(self) -> tuple[int, ...]:
        return self.attention.versions()

    def _at_site(self, rows: slice | Tensor | None) -> Tensor:
        device = self.x.device.type
        attention = self.attention if rows is None else self.attention.of_queries(rows)
        with torch.autocast(device, enabled=False) if self.waits and autocasts(device) else nullcontext():
            scores = attention.scores()
            return scores if self.channel == "scores" else attention.pattern(scores, over=True)

    def of_heads(self, heads: Tensor) -> DeferredAttention | None:
        """The same of some heads, in any order, as `Deferred` says."""
        if not (self.view.identity or self.view.by_row):
            return None
        some = copy.copy(self)
        some.attention = self.attention.of_heads(heads)
        some.call = replace(self.call, scratch=parameters_of_heads(self.call, (self.view,), heads))
        some.x, some._seen = some.attention.query, some._versions()
        return some

    def part(self, name: str, heads: Any, queries: Any) -> Tensor | None:
        """Some heads and queries, as `Deferred` says: no others are computed, and some queries after the other."""
        self.check(name)
        wanted = torch.tensor(entries_of("heads", heads, self.shape[1], name))
        some = self.of_heads(wanted)
        if some is None:
            return None
        rows = torch.tensor(entries_of("queries", queries, self.shape[2], name))
        made: Tensor | None = None
        for first in range(0, len(rows), n := rows_within(MAX_BYTES, self.shape, wanted, self.x.dtype)):
            piece = rows[first : first + n]
            found = some.value(name, index_on(piece, self.x.device))
            if len(piece) == len(rows):
                return found
            if made is None:
                made = found.new_empty((*found.shape[:2], len(rows), found.shape[3]))
            made[:, :, first : first + n] = found
        return made


def score_shape(attention: AttentionCall) -> tuple[int, int, int, int]:
    """The shape of the scores of all heads and queries, without a column of sinks."""
    return attention.query.shape[0], attention.n_heads, attention.n_queries, attention.key.shape[2]


def parameters_of_heads(call: Call, views: Iterable[View], heads: Tensor) -> dict[str, Any]:
    """What views look for in ``call.scratch``, where some heads alone are seen: entries of their parameters.

    Args:
        call: the call of the module.
        views: of the hook points.
        heads: which heads.
    """
    names = dict.fromkeys(name for view in views for name in view.parameters)
    found = {name: call.scratch[name] if name in call.scratch else getattr(call.module, name) for name in names}
    return {name: picked(x, {0: heads}) for name, x in found.items()}
