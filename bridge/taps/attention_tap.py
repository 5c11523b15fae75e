"""Attention taps: scores, pattern, and rotated queries and keys inside the model's own attention.

One mode sees the torch functions that an attention module calls. Eager attention calls a softmax,
whose input is the scores and whose output is the pattern. Others call
`scaled_dot_product_attention`: if a listener may change scores or pattern, attention is computed in
full in its place; for read-only listeners, they are computed later from the kernel's arguments.
Kernels that are not torch functions are reached through transformers' `AttentionInterface` (see
`bridge.taps.attention_call`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adapters.imports import is_compiling
from adapters.linear import materialized
from adapters.observe.observe import SOFTMAXES, Function, SeesAttention
from adapters.views import Args, Call, Kwargs
from adapters.views.heads import KernelArguments
from bridge.hooks.context import CURRENT, Listener, setting
from bridge.hooks.hooks import GradientRule, HookPoint, with_gradient_of
from bridge.hooks.parts import Part, Touched, TouchesPart, index_on, put_back, within
from bridge.hooks.recomputation import refuse_unknown_recomputation
from bridge.taps.attention_call import (
    AttentionCall,
    DeferredAttention,
    autocasts,
    call_opaque,
    implementation_of,
    is_looked_up,
    is_opaque,
    is_over_keys,
    kernels_of,
    parameters_of_heads,
    score_shape,
    show_heads,
    softmax_of,
)
from bridge.taps.taps import INSTEAD, LOCK, PatchedFunction, RunCall, Tap, TappedCall

#: With at most this many scores, over all heads and queries, computing the whole is faster than a
#: part beside the kernel.
FEW_SCORES = 2**17

QueryAndKey = tuple[Tensor, Tensor]

_PRODUCT = ("q", "k")
_INSIDE = ("scores", "pattern")


class AttentionTap(Tap):
    """The tap of an attention module. Its channels are ``q``, ``k``, ``scores`` and ``pattern``."""

    _kernel: Function | None = None  # the patched one, while there is something to undo

    def watched(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward while listeners are attached."""
        watch = AttentionWatch(_CallInRun(self, Call(self.module, args, kwargs)))
        implementation = implementation_of(self.module)
        if implementation is not None and is_looked_up(type(self.module).forward, implementation):
            # Only the kernel's call is watched: the mode would see every torch function.
            self._patch_kernel(implementation)
            try:
                with setting(INSTEAD, watch.call_kernel):
                    output = self.original(*args, **kwargs)
            finally:
                if not (self.points or self.opened):  # the last hook was removed meanwhile
                    with LOCK:
                        self._undo_patches()
            watch.check()
            return output
        return watch.output_of(lambda: self.original(*args, **kwargs))

    def _patch_kernel(self, implementation: str) -> None:
        """Patch the kernel for as long as the tap is installed, rather than for each call."""
        with LOCK:
            if self._undo and self._kernel is ALL_ATTENTION_FUNCTIONS[implementation]:
                return
            self._undo_patches()
            kernels = kernels_of(implementation)
            self._undo.append(PatchedFunction.install(kernels, implementation, self))
            self._kernel = kernels[implementation]


class ObservedAttentionCall(TappedCall):
    """One call of an attention module, in a run or in a program."""

    def is_read_only(self, attention: AttentionCall) -> bool:
        """Tell whether no listener changes scores or pattern; if so, show them, possibly
        deferred.
        """
        raise NotImplementedError

    @property
    def readers_and_rules(self) -> list[Listener]:
        """Return the listeners of scores and pattern, if none of them changes values."""
        return []

    def touched(self, attention: AttentionCall) -> Touched | None:
        """Return the heads and queries that listeners of scores and pattern touch; None: all."""
        return None

    def part_call(self, part: Part) -> TappedCall:
        """Return the call for the heads and queries that `touched` returned."""
        raise NotImplementedError


class AttentionWatch(SeesAttention):
    """A watch on one call of an attention module. Its channels are ``q``, ``k``, ``scores`` and
    ``pattern``.

    Args:
        shown: the call.
        kernel_alone: watch only the kernel: any other softmax or product in the module does not
            belong to the attention.
    """

    def __init__(self, shown: ObservedAttentionCall, kernel_alone: bool = False) -> None:
        super().__init__()
        self.shown = shown
        self._kernel_alone = kernel_alone
        self._seen: list[tuple[str, str]] = []  # the channels that were shown
        self._begun = False  # the scores of a manual softmax were shown
        self._went_by = False  # a kernel or a softmax ran while nobody listened
        #: The last queries and keys multiplied before the scores were shown, and the listeners'
        #: result for them.
        self._met: tuple[QueryAndKey, QueryAndKey] | None = None
        self._meet_again = False
        #: The pattern that was shown, complete or of some heads and queries.
        self._patterns: tuple[list[Part], list[Tensor]] | None = None

    @property
    def in_user_function(self) -> bool:
        return self.shown.in_user_function

    def _awaits(self, channels: tuple[str, str]) -> bool:
        """Tell whether these channels have listeners."""
        return channels not in self._seen and bool(self.shown.active_points(channels))

    @property
    def follows_steps(self) -> bool:
        return self._begun or self._awaits(_INSIDE)

    def call(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call one of the module's functions, and show its arguments and its result."""
        kernel = func is scaled_dot_product_attention
        awaited = self._awaits(_INSIDE) or self._awaits(_PRODUCT)
        if (kernel or func in SOFTMAXES) and not (awaited or self._seen):
            self._went_by = True
        elif kernel or not self._kernel_alone:
            return super().call(func, args, kwargs)
        return func(*args, **kwargs)

    def output_of(self, run: Callable[[], Any]) -> Any:
        """Run the module with all of its functions watched; return its output."""
        with self:
            output = run()
        self.check()
        return output

    def check(self) -> None:
        """Check that everything that has listeners was seen.

        Raises:
            RuntimeError: something was not.
        """
        missed = [channel for both in (_PRODUCT, _INSIDE) if self._awaits(both) for channel in both]
        if not missed:
            return
        active = self.shown.active_points(missed)
        listeners = [x for point in active for x in point.visible_listeners()]
        if self._went_by and all(x.kind == "follow" for x in listeners):
            return  # a late request of a trace, which raises its own error
        if not active:
            return
        module = self.shown.module
        reason = (
            f"{type(module).__name__} computed no scores that could be seen with"
            f" attn_implementation={implementation_of(module)!r}"
        )
        cure = 'load the model with attn_implementation="sdpa" or "eager"'
        needed = [
            point.name for point in active if not all(x.optional for x in point.visible_listeners())
        ]
        if needed:
            names = ", ".join(needed)
            raise RuntimeError(f"{reason}, so there is nothing to show at {names}; {cure}")
        names = ", ".join(dict.fromkeys(point.name.rpartition(".")[2] for point in active))
        message = f"the cache leaves out {names} of such layers: {reason}; {cure}"
        warnings.warn(message, stacklevel=2)

    def softmax(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Show scores and pattern, if the softmax is over keys."""
        if not self._is_its_own(args, kwargs):
            return func(*args, **kwargs)
        if self._meet_again and self._patterns is not None:
            self._meet_again = False
            return self._patterns[1][0]
        if not self._awaits(_INSIDE):
            return func(*args, **kwargs)
        self._seen.append(_INSIDE)
        scores = args[0] if args else kwargs.pop("input")
        args = args[1:]
        new = self.shown.show("scores", scores)
        pattern = self._show_pattern(softmax_of(new, scores, lambda x: func(x, *args, **kwargs)))
        self._patterns = [], [pattern]
        return pattern

    def _is_its_own(self, args: Args, kwargs: Kwargs) -> bool:
        """Tell whether a softmax may be the attention's: over keys, with its number of heads (not a
        router's).
        """
        for channel in _INSIDE:
            for point in self.shown.points(channel):
                if point.point.n_heads is not None:
                    return is_over_keys(args, kwargs)
        return True

    def _show_pattern(self, pattern: Tensor) -> Tensor:
        """Show a pattern in the attention's dtype, and continue with the result in the softmax's
        dtype."""
        call, device = self.shown.call, pattern.device.type
        dtype = pattern.dtype
        for x in (*call.args, *call.kwargs.values()):
            if isinstance(x, Tensor) and x.is_floating_point():
                dtype = x.dtype
                break
        if autocasts(device):
            dtype = torch.get_autocast_dtype(device)
        elif dtype == pattern.dtype:
            return self.shown.show("pattern", pattern)
        shown = pattern.to(dtype)
        new = self.shown.show("pattern", shown)
        result = new.to(pattern.dtype)
        if new is not shown:
            return result
        if not result.requires_grad:
            return pattern
        # The values of the softmax, with the gradient of the shown pattern.
        return pattern.detach() + (result - result.detach())

    def begins(self, scores: Tensor) -> Tensor:
        """Show the scores."""
        if _INSIDE in self._seen:
            return scores
        self._begun = True
        self._seen.append(_INSIDE)
        return self.shown.show("scores", scores)

    def ends(self, scores: Tensor, pattern: Tensor) -> Tensor:
        """Show the pattern."""
        if not self._begun:
            return pattern
        self._begun = False
        return self._show_pattern(pattern)

    def scaled_dot_product(
        self, kernel: Callable[..., Tensor], arguments: KernelArguments
    ) -> Tensor:
        """Handle a call of `scaled_dot_product_attention`, before it runs.

        Args:
            kernel: the original kernel.
            arguments: the arguments of the call.
        """
        query, key = self.product(arguments.query, arguments.key)
        arguments = arguments._replace(query=query, key=key)
        again, self._meet_again = self._meet_again, False
        if not (self._awaits(_INSIDE) or again):
            return arguments.of(kernel)
        attention = AttentionCall.of_torch(arguments, self._n_heads(query))
        if not again:
            run = lambda query, key: arguments._replace(query=query, key=key).of(kernel)
            return self._attend(attention, run)
        if self._patterns is None:  # there are no editors
            return arguments.of(kernel)
        parts, patterns = self._patterns
        if patterns and not parts:
            return self._result(attention, patterns[0], lambda: arguments.of(kernel))
        if len(patterns) != len(parts):
            raise RuntimeError(
                f"{type(self.shown.module).__name__} attends twice with the same queries and keys,"
                " and a function that touches heads and queries was given them in pieces: touch"
                " fewer of them in a run"
            )
        return self._insert_patterns(attention, parts, patterns, lambda: arguments.of(kernel))

    def call_kernel(self, own: Function, name: str, args: Args, kwargs: Kwargs) -> Any:
        """Call a patched kernel: the module's own is watched, or given what listeners return."""
        if args[0] is not self.shown.module:
            return own(*args, **kwargs)
        if is_opaque(name):
            return call_opaque(own, name, self.before_opaque, *args, **kwargs)
        with self:
            return own(*args, **kwargs)

    def before_opaque(
        self, attention: AttentionCall, run: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Handle a call of a kernel that is not a torch function, before it runs.

        Args:
            attention: the arguments of the call.
            run: calls the kernel with queries and keys.
        """
        attention.query, attention.key = self.product(attention.query, attention.key)
        attention.n_heads = self._n_heads(attention.query)
        return self._attend(attention, run)

    def _n_heads(self, query: Tensor, *more: str) -> int:
        """Return the number of query heads, taken from a hook point because a kernel may get them
        packed.
        """
        for channel in ("scores", "pattern", "q", *more):
            for point in self.shown.points(channel):
                if point.point.n_heads is not None:
                    return point.point.n_heads // self.shown.parts
        return query.shape[1]

    def product(self, query: Tensor, key: Tensor) -> QueryAndKey:
        """Show queries and keys, and return the results, with the heads in the given layout."""
        if self._met is not None and self._seen:
            (met_query, met_key), result = self._met
            if met_query is query and _are_equal(met_key, key):
                # Differential attention computes one pattern for each half of its values.
                self._meet_again = True
                return result
        shown, awaited = (query, key), _PRODUCT not in self._seen
        if self._awaits(_PRODUCT):
            self._seen.append(_PRODUCT)
            shown = show_heads(self.shown, "q", query), show_heads(self.shown, "k", key)
        if _INSIDE not in self._seen and awaited:  # the product of pattern and values counts too
            self._met = (query, key), shown
        return shown

    def flat_heads(self, query: Tensor) -> tuple[int, int] | None:
        """Return the layout of packed heads, with as many key heads as query heads."""
        return (-1, self._n_heads(query, "k")) if self._awaits(_PRODUCT) else None

    def _attend(
        self, attention: AttentionCall, kernel: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Run the kernel, or compute it in full if a listener may change scores or pattern."""
        run = lambda: kernel(attention.query, attention.key)
        if not self._awaits(_INSIDE):
            return run()
        self._seen.append(_INSIDE)
        if self.shown.is_read_only(attention):
            return run()
        rules = [x.fn for x in self.shown.readers_and_rules]
        held = bool(rules) and all(isinstance(fn, GradientRule) and fn.holds for fn in rules)
        if held and not any(x.requires_grad for x in attention.tensors()[2:]):
            return kernel(attention.query.detach(), attention.key.detach())
        touched = self.shown.touched(attention)
        if touched is None:
            pattern = show_scores_and_pattern(self.shown, attention)
            self._patterns = [], [pattern]
            return self._result(attention, pattern, run)
        shape, dtype = score_shape(attention), attention.query.dtype
        parts = touched.parts(shape, dtype, whole_queries=torch.is_grad_enabled())
        patterns: Iterable[Tensor] = (
            show_scores_and_pattern(self.shown.part_call(part), _attention_part(attention, part))
            for part in parts
        )
        if len(parts) > 1:
            self._patterns = parts, []  # only one of several patterns is in memory at a time
        else:
            patterns = list(patterns)
            self._patterns = parts, patterns
        return self._insert_patterns(attention, parts, patterns, run)

    def _result(
        self, attention: AttentionCall, pattern: Tensor, run: Callable[[], Tensor]
    ) -> Tensor:
        """Return the result for a pattern: with the kernel's values, if only gradients differ."""
        result = attention.result(pattern)
        if not self.shown.readers_and_rules or attention.dropout:
            return result
        with torch.no_grad():
            values = run()
        return with_gradient_of(values, result)

    @staticmethod
    def _insert_patterns(
        attention: AttentionCall,
        parts: list[Part],
        patterns: Iterable[Tensor],
        run: Callable[[], Tensor],
    ) -> Tensor:
        """Run the kernel, and insert the results of the touched heads and queries."""
        results = [
            _attention_part(attention, part).result(pattern)
            for part, pattern in zip(parts, patterns, strict=True)
        ]
        if not parts:
            return run()
        heads = parts[0].heads
        n_queries = sum(len(part.queries) for part in parts)
        if len(heads) == attention.n_heads and n_queries == attention.n_queries:
            return torch.cat(results, 2)
        z = run()
        if attention.kernel:
            z = z.clone()  # a user's kernel may keep its result
        queries = torch.cat([part.queries for part in parts])
        return put_back(z, {1: heads, 2: queries}, torch.cat(results, 2).to(z.dtype))


def _are_equal(x: Tensor, y: Tensor) -> bool:
    return x is y or (x.shape == y.shape and torch.equal(x, y))


def _attention_part(attention: AttentionCall, part: Part) -> AttentionCall:
    """Return the call for the heads and queries of a part."""
    queries = index_on(part.queries, attention.query.device)
    return attention.of_heads(part.heads).of_queries(queries)


def show_scores_and_pattern(shown: TappedCall, attention: AttentionCall) -> Tensor:
    """Show scores and pattern, and return the pattern after the listeners' edits."""
    scores = attention.scores()
    if not shown.active_points(("scores",)):
        return shown.show("pattern", attention.pattern(scores, over=True), private=True)
    new = shown.show("scores", scores)
    return shown.show("pattern", softmax_of(new, scores, attention.pattern), private=True)


class _CallInRun(RunCall, ObservedAttentionCall):
    """One call of an attention module in a run."""

    tap: AttentionTap

    def __init__(self, tap: AttentionTap, call: Call) -> None:
        super().__init__(tap, call)
        #: How heads are sharded over processes, as on any channel.
        self._shared = next(iter(tap.shared.values()), None)
        #: The listeners of scores and pattern, if all of them touch only a part.
        self._touching: dict[HookPoint, list[Listener]] = {}
        self._known: dict[Sequence[str], list[HookPoint]] = {}
        if not tap.opened:  # a trace may add listeners while the module runs
            for channels in (_PRODUCT, _INSIDE):
                self._known[channels] = tap.active_points(channels)
        if self._shared is None:
            return
        self.parts = self._shared.parts
        # Gathered before the module's forward, which sees its own shard.
        for point in self.active_points(_INSIDE):
            for name in point.view.parameters:
                if name not in call.scratch:
                    call.scratch[name] = materialized(tap.module, name)

    def active_points(self, channels: Sequence[str]) -> Sequence[HookPoint]:
        """Return the hook points on these channels with listeners that are visible to the current
        code."""
        known = self._known.get(channels) if isinstance(channels, tuple) else None
        return self.tap.active_points(channels) if known is None else known

    def is_read_only(self, attention: AttentionCall) -> bool:
        """Tell whether no listener changes scores or pattern. If so, show the deferred
        activation, or the tensor if it cannot be deferred.
        """
        listening = [(point, point.visible_listeners()) for point in self.active_points(_INSIDE)]
        harmless = {"read"} if torch.is_grad_enabled() else {"read", "rule"}
        for point, listeners in listening:
            if point.sources or any(listener.kind not in harmless for listener in listeners):
                return False
        if self._shared is not None:
            attention = attention.gathered(self._shared)
        waits = self._can_wait(attention)
        attention, call = attention.kept(), self.call.without_graph()
        versions = attention.versions()
        scores: Tensor | None = None
        for point, listeners in listening:
            view, channel = point.view, str(point.point.site.key)
            by_row = view.identity or view.by_row
            for listener in listeners:
                if listener.kind == "rule":
                    continue
                if (waits and listener.deferrable) or (listener.partial and by_row):
                    deferred = DeferredAttention(view, attention, channel, call, versions, waits)
                    listener.fn(deferred, hook=point)
                    continue
                with torch.no_grad():
                    if scores is None:
                        scores = attention.scores()
                    shown = scores if channel == "scores" else attention.pattern(scores)
                    listener.fn(view.get(shown, self.call), hook=point)
        return True

    @property
    def readers_and_rules(self) -> list[Listener]:
        """Return the listeners of scores and pattern, if none of them changes values."""
        listeners = [x for point in self.active_points(_INSIDE) for x in point.visible_listeners()]
        return listeners if all(x.kind in ("read", "rule") for x in listeners) else []

    def _can_wait(self, attention: AttentionCall) -> bool:
        """Tell whether scores and pattern can be computed after the run.

        Under autocast they cannot, because autocast chooses the precision during the run. If there
        are more keys than queries, the keys include a cache of past tokens: keeping them needs more
        memory than the scores, and later runs may overwrite them.
        """
        if attention.n_queries != attention.key.shape[2]:
            return False
        for x in (*self.call.args, *self.call.kwargs.values()):
            if isinstance(x, Cache) and x.is_compileable:
                return False  # its keys are overwritten
        return not autocasts(attention.query.device.type)

    def touched(self, attention: AttentionCall) -> Touched | None:
        """Return the touched part, or None if a listener or a hook point's view may need
        everything.
        """
        packed = attention.query.shape[1] != attention.n_heads
        if is_compiling() or self._shared is not None or packed:
            return None
        visible, shape = CURRENT.get().visible, score_shape(attention)
        if math.prod(shape) <= FEW_SCORES or any(scope in visible for scope in self.tap.opened):
            return None
        total: Touched | None = None
        for point in self.active_points(_INSIDE):
            by_row = point.view.identity or point.view.by_row
            if point.sources or point.point.linked or not by_row:
                return None
            self._touching[point] = point.visible_listeners()
            for listener in self._touching[point]:
                listener.called = True  # also if it touches no head here
                touched = _touched_by(listener, point, shape)
                if touched is None:
                    return None
                total = touched if total is None else total | touched
        if total is None or (total.heads.all() and total.queries.all() and total.max_bytes is None):
            return None
        if self._run is None or self._run.gradients:
            for point in self._touching:
                refuse_unknown_recomputation(point.name)
        return total

    def part_call(self, part: Part) -> TappedCall:
        """Return the call for a part; see `ObservedAttentionCall`."""
        views = [point.view for point in self._touching]
        scratch = parameters_of_heads(self.call, views, part.heads)
        return _PartInRun(replace(self.call, scratch=scratch), part, self._touching)


def _touched_by(
    listener: Listener, point: HookPoint, shape: tuple[int, int, int, int]
) -> Touched | None:
    """Return the heads and queries that a listener touches, or None if it may touch all."""
    fn = listener.fn
    if listener.kind in ("fwd", "follow") and isinstance(fn, TouchesPart):
        return fn.touched(shape, point)
    return None


class _PartInRun(TappedCall):
    """The part of an attention call in a run that covers some heads and queries.

    Args:
        call: the call.
        part: the heads and queries.
        touching: the listeners to which they are shown. Listeners added meanwhile are ignored,
            because they may need the whole.
    """

    def __init__(
        self, call: Call, part: Part, touching: Mapping[HookPoint, Sequence[Listener]]
    ) -> None:
        self.module, self.call = call.module, call
        self._part, self._touching = part, touching

    def active_points(self, channels: Sequence[str]) -> Sequence[HookPoint]:
        """Return the hook points on these channels to which something is shown."""
        return [
            point
            for point, listeners in self._touching.items()
            if listeners and point.point.site.key in channels
        ]

    def show(self, channel: str, x: Tensor, private: bool = False) -> Tensor:
        """Show a tensor on a channel; see `TappedCall`."""
        points = self.active_points((channel,))
        call = replace(self.call, private=private and len(points) == 1)
        for point in points:
            listeners = [within(listener, self._part, point) for listener in self._touching[point]]
            x = point.edited(x, call, CURRENT.get(), listeners, False, point.view)
        return x
