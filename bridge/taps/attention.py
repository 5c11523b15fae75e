"""Scores, pattern, and rotated queries and keys, seen inside the model's own attention while it runs.

One mode sees the torch functions that an attention module calls. Eager attention calls a softmax: its input is the
scores, its output the pattern. Others call `scaled_dot_product_attention`: while someone changes scores or pattern, the
same is computed in full in its place; for those who only look, it is computed later from what the kernel was given.
Kernels that are no torch functions are reached through transformers' `AttentionInterface` (see
`bridge.taps.attention_call`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adapters.imports import is_compiling
from adapters.linear import materialized
from adapters.observe.observe import SOFTMAXES, SeesAttention
from adapters.views import Args, Call, Kwargs
from adapters.views.attention import KernelArguments
from bridge.hooks.context import CURRENT, Listener, refuse_unknown_recomputation
from bridge.hooks.hooks import HookPoint
from bridge.hooks.parts import Part, Touched, TouchesPart, index_on, put_back, within
from bridge.taps.attention_call import (
    AttentionCall,
    DeferredAttention,
    PatchedKernel,
    autocasts,
    implementation_of,
    is_looked_up,
    is_over_keys,
    parameters_of_heads,
    score_shape,
    softmax_of,
    watched_kernel,
    with_heads,
)
from bridge.taps.taps import LOCK, RunCall, Tap, TappedCall, noop_hook

#: Of so many scores, all heads and queries together, or fewer, the whole is quicker than a part beside the kernel.
FEW_SCORES = 2**17

_PRODUCT = ("q", "k")
_INSIDE = ("scores", "pattern")


class AttentionTap(Tap):
    """The tap of an attention module. Its channels are ``q``, ``k``, ``scores`` and ``pattern``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._kernel: PatchedKernel | None = None  # while there is something to undo

    def watched(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward when somebody listens."""
        watch = AttentionWatch(_CallInRun(self, Call(self.module, args, kwargs)))
        implementation = implementation_of(self.module)
        if implementation is not None and is_looked_up(type(self.module).forward, implementation):
            # Only the call of the kernel is watched: the mode sees every torch function.
            self._patch_kernel(implementation)
            try:
                with watched_kernel(self.module, watch, watch.before_opaque):
                    output = self.original(*args, **kwargs)
            finally:
                if not (self.points or self.opened):  # the last hook was removed meanwhile
                    with LOCK:
                        self._undone()
            watch.check()
            return output
        return watch.output_of(lambda: self.original(*args, **kwargs))

    def _patch_kernel(self, implementation: str) -> None:
        """Sees to it that the kernel can be watched, as long as the tap stands: it is not made anew for each call."""
        if self._undo and self._kernel is ALL_ATTENTION_FUNCTIONS[implementation]:
            return
        with LOCK:
            if self._undo and self._kernel is ALL_ATTENTION_FUNCTIONS[implementation]:
                return  # another thread was quicker
            self._undone()
            self._kernel = PatchedKernel.install(ALL_ATTENTION_FUNCTIONS, implementation)
            self._undo.append(self._kernel.uninstalled_with(self))

    def _install(self) -> None:
        super()._install()
        if isinstance(self.module, nn.MultiheadAttention):
            # torch's encoder layer calls no module of a layer in which none has hooks.
            self._undo.append(self.module.register_forward_hook(noop_hook).remove)


class ObservedAttentionCall(TappedCall):
    """One call of an attention module, in a run or in a program."""

    def is_read_only(self, attention: AttentionCall) -> bool:
        """Whether nobody changes scores or pattern; then they have been shown, or what will compute them."""
        raise NotImplementedError

    def touched(self, attention: AttentionCall) -> Touched | None:
        """Which heads and queries are touched by those who listen to scores and pattern; None: all may be."""
        return None

    def of_part(self, part: Part) -> TappedCall:
        """The same call, where some heads and queries are shown to those that `touched` has found."""
        raise NotImplementedError


class AttentionWatch(SeesAttention):
    """Shows what one call of an attention module computes. Its channels are ``q``, ``k``, ``scores`` and ``pattern``.

    Args:
        shown: the call.
        kernel_alone: only the kernel is looked at: a softmax or a product elsewhere in the module is another one.
    """

    def __init__(self, shown: ObservedAttentionCall, kernel_alone: bool = False) -> None:
        super().__init__()
        self.shown = shown
        self._kernel_alone = kernel_alone
        self._seen: list[tuple[str, str]] = []  # the channels on which something was shown
        self._begun = False  # a softmax by hand was given the scores
        self._went_by = False  # a kernel, or a softmax, while nobody listened
        #: The last queries and keys that met before the scores were shown, and what was made of them.
        self._met: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        self._meet_again = False
        #: The pattern that was shown, whole or of some heads and queries.
        self._patterns: tuple[list[Part], list[Tensor]] | None = None

    @property
    def in_user_function(self) -> bool:
        return self.shown.in_user_function

    def _awaits(self, channels: tuple[str, str]) -> bool:
        """Whether somebody waits for what is shown on these channels."""
        return channels not in self._seen and bool(self.shown.active_points(channels))

    @property
    def follows_steps(self) -> bool:
        return self._begun or self._awaits(_INSIDE)

    def call(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls a function of the module's, and shows its arguments and its result."""
        kernel = func is scaled_dot_product_attention
        awaited = self._awaits(_INSIDE) or self._awaits(_PRODUCT)
        if (kernel or func in SOFTMAXES) and not (awaited or self._seen):
            self._went_by = True
        elif kernel or not self._kernel_alone:
            return super().call(func, args, kwargs)
        return func(*args, **kwargs)

    def output_of(self, run: Callable[[], Any]) -> Any:
        """What the module returns when it is run, all of whose functions are seen."""
        with self:
            output = run()
        self.check()
        return output

    def check(self) -> None:
        """Looks whether everything was seen that somebody listens to.

        Raises:
            RuntimeError: it was not.
        """
        missed = [channel for both in (_PRODUCT, _INSIDE) if self._awaits(both) for channel in both]
        if not missed:
            return
        active = self.shown.active_points(missed)
        if self._went_by and all(x.kind == "follow" for point in active for x in point.visible_listeners()):
            return  # a trace that asked too late, which says so itself
        if not active:
            return
        module = self.shown.module
        needed = [point for point in active if not all(x.optional for x in point.visible_listeners())]
        reason = (
            f"{type(module).__name__} computed no scores that could be seen with attn_implementation="
            f"{implementation_of(module)!r}"
        )
        cure = 'load the model with attn_implementation="sdpa" or "eager"'
        if needed:
            names = ", ".join(point.name for point in needed)
            raise RuntimeError(f"{reason}, so there is nothing to show at {names}; {cure}")
        names = ", ".join(dict.fromkeys(point.name.rpartition(".")[2] for point in active))
        warnings.warn(f"the cache leaves out {names} of such layers: {reason}; {cure}", stacklevel=2)

    def softmax(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Shows scores and pattern, where it is one over keys."""
        if not self._is_its_own(args, kwargs):
            return func(*args, **kwargs)
        if self._meet_again and self._patterns is not None:
            self._meet_again = False
            return self._patterns[1][0]
        if not self._awaits(_INSIDE):
            return func(*args, **kwargs)
        self._seen.append(_INSIDE)
        scores, args = (args[0], args[1:]) if args else (kwargs.pop("input"), args)
        new = self.shown.show("scores", scores)
        pattern = self._show_pattern(softmax_of(new, scores, lambda x: func(x, *args, **kwargs)))
        self._patterns = [], [pattern]
        return pattern

    def _is_its_own(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether a softmax may be the one that is shown: over keys, where that is of heads (and no router's)."""
        heads = any(point.point.n_heads is not None for channel in _INSIDE for point in self.shown.points(channel))
        return not heads or is_over_keys(args, kwargs)

    def _show_pattern(self, pattern: Tensor) -> Tensor:
        """Shows a pattern in the type that attention is computed in, and goes on in that of the softmax."""
        call, device = self.shown.call, pattern.device.type
        given = (x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point())
        first = next(given, pattern)
        if first.dtype == pattern.dtype and not autocasts(device):
            return self.shown.show("pattern", pattern)
        shown = pattern.to(torch.get_autocast_dtype(device) if autocasts(device) else first.dtype)
        new = self.shown.show("pattern", shown)
        made = new.to(pattern.dtype)
        if new is not shown:
            return made
        return pattern.detach() + (made - made.detach()) if made.requires_grad else pattern

    def begins(self, scores: Tensor) -> Tensor:
        """Shows the scores."""
        if _INSIDE in self._seen:
            return scores
        self._begun = True
        self._seen.append(_INSIDE)
        return self.shown.show("scores", scores)

    def ends(self, scores: Tensor, pattern: Tensor) -> Tensor:
        """Shows the pattern."""
        if not self._begun:
            return pattern
        self._begun = False
        return self._show_pattern(pattern)

    def scaled_dot_product(self, kernel: Callable[..., Tensor], given: KernelArguments) -> Tensor:
        """Called before `scaled_dot_product_attention`.

        Args:
            kernel: what is called in the end.
            given: what it was called with.
        """
        query, key = self.product(given.query, given.key)
        given = given._replace(query=query, key=key)
        again, self._meet_again = self._meet_again, False
        if not (self._awaits(_INSIDE) or again):
            return given.of(kernel)
        attention = AttentionCall.of_torch(given, self._n_heads(given.query))
        if not again:
            return self._attend(attention, lambda: given.of(kernel))
        if self._patterns is None:  # nobody changes it
            return given.of(kernel)
        parts, patterns = self._patterns
        if patterns and not parts:
            return attention.result(patterns[0])
        if len(patterns) != len(parts):
            raise RuntimeError(
                f"{type(self.shown.module).__name__} attends twice with the same queries and keys, and a function that "
                "touches heads and queries was given them in pieces: touch fewer of them in a run"
            )
        return self._with_patterns(attention, parts, patterns, lambda: given.of(kernel))

    def before_opaque(self, attention: AttentionCall, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Called before a kernel that is no torch function.

        Args:
            attention: what it was called with.
            run: calls it with queries and keys.
        """
        attention.query, attention.key = self.product(attention.query, attention.key)
        attention.n_heads = self._n_heads(attention.query)
        return self._attend(attention, lambda: run(attention.query, attention.key))

    def _n_heads(self, query: Tensor, *more: str) -> int:
        """How many query heads there are: a point says so, since a kernel may be given them packed."""
        for channel in ("scores", "pattern", "q", *more):
            for point in self.shown.points(channel):
                if point.point.n_heads is not None:
                    return point.point.n_heads // self.shown.parts
        return query.shape[1]

    def product(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Shows queries and keys, and returns what is made of them, with the heads as they were given."""
        if self._met is not None and self._seen and self._met[0][0] is query:
            (_, first), made = self._met
            if first is key or (first.shape == key.shape and torch.equal(first, key)):
                self._meet_again = True  # as in differential attention, which has two halves of values for a pattern
                return made
        shown, awaited = (query, key), _PRODUCT not in self._seen
        if self._awaits(_PRODUCT):
            self._seen.append(_PRODUCT)
            shown = self._with_heads("q", query), self._with_heads("k", key)
        if _INSIDE not in self._seen and awaited:  # a pattern's product with values is one, too
            self._met = (query, key), shown
        return shown

    def flat_heads(self, query: Tensor) -> tuple[int, int] | None:
        """The heads are known, and the batches are the rest: keys have as many there as queries."""
        return (-1, self._n_heads(query, "k")) if self._awaits(_PRODUCT) else None

    def _with_heads(self, channel: str, x: Tensor) -> Tensor:
        points = self.shown.points(channel)
        if not points:
            return x
        n_heads = points[0].point.n_heads
        return with_heads(x, n_heads and n_heads // self.shown.parts, lambda shown: self.shown.show(channel, shown))

    def _attend(self, attention: AttentionCall, run: Callable[[], Tensor]) -> Tensor:
        """Runs the kernel, or computes what it would in full where somebody may change scores or pattern."""
        if not self._awaits(_INSIDE):
            return run()
        self._seen.append(_INSIDE)
        if self.shown.is_read_only(attention):
            return run()
        touched = self.shown.touched(attention)
        if touched is None:
            self._patterns = [], [show_scores_and_pattern(self.shown, attention)]
            return attention.result(self._patterns[1][0])
        parts = touched.parts(score_shape(attention), attention.query.dtype, whole_queries=torch.is_grad_enabled())
        shown = (show_scores_and_pattern(self.shown.of_part(part), _part_of(attention, part)) for part in parts)
        # Of several parts one is in memory at a time.
        self._patterns = parts, list(shown) if len(parts) < 2 else []
        return self._with_patterns(attention, parts, self._patterns[1] if len(parts) < 2 else shown, run)

    @staticmethod
    def _with_patterns(
        attention: AttentionCall, parts: list[Part], patterns: Iterable[Tensor], run: Callable[[], Tensor]
    ) -> Tensor:
        """Runs the kernel, and puts in what comes of the heads and queries that somebody touches."""
        made = [_part_of(attention, part).result(pattern) for part, pattern in zip(parts, patterns, strict=True)]
        shape = score_shape(attention)
        if parts and len(parts[0].heads) == shape[1] and sum(len(part.queries) for part in parts) == shape[2]:
            return torch.cat(made, 2)
        z = run()
        if not parts:
            return z
        z = z.clone() if attention.kernel else z  # a kernel of somebody's may keep what it returned
        queries = torch.cat([part.queries for part in parts])
        return put_back(z, {1: parts[0].heads, 2: queries}, torch.cat(made, 2).to(z.dtype))


def _part_of(attention: AttentionCall, part: Part) -> AttentionCall:
    return attention.of_heads(part.heads).of_queries(index_on(part.queries, attention.query.device))


def show_scores_and_pattern(shown: TappedCall, attention: AttentionCall) -> Tensor:
    """Shows scores and pattern, and returns the pattern that is made of them."""
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
        #: How heads are shared by processes: as on any channel.
        self._shared = next(iter(tap.shared.values()), None)
        #: Who listens to scores and pattern, where these touch a part alone.
        self._touching: dict[HookPoint, list[Listener]] = {}
        # A trace may ask for something while the module runs: then it is asked anew who listens.
        self._known = {} if tap.opened else {channels: tap.active_points(channels) for channels in (_PRODUCT, _INSIDE)}
        if self._shared is not None:
            self.parts = self._shared.parts
            names = [name for point in self.active_points(_INSIDE) for name in point.view.parameters]
            for name in dict.fromkeys(names):  # put together before the module's forward, which sees its own part
                call.scratch[name] = materialized(tap.module, name)

    def active_points(self, channels: Sequence[str]) -> Sequence[HookPoint]:
        """The hook points on these channels to which the present code listens."""
        known = self._known.get(channels) if isinstance(channels, tuple) else None
        return self.tap.active_points(channels) if known is None else known

    def is_read_only(self, attention: AttentionCall) -> bool:
        """Whether nobody changes scores or pattern; those who look are then given what will compute them, or these
        where it cannot wait.
        """
        listening = [(point, point.visible_listeners()) for point in self.active_points(_INSIDE)]
        for point, mine in listening:
            if point.sources or any(listener.kind != "read" for listener in mine):
                return False
        # With autocast the precision is chosen by the run: it cannot be left to a later time. Keys of more than these
        # queries are a past: they take more room than the scores, and later runs may write into them.
        attention = attention if self._shared is None else attention.whole(self._shared)
        given = (*self.call.args, *self.call.kwargs.values())
        fixed = True in [x.is_compileable for x in given if isinstance(x, Cache)]  # its keys are written over
        has_past = attention.n_queries != attention.key.shape[2]
        waits = not (has_past or fixed or autocasts(attention.query.device.type))
        attention, call = attention.kept(), self.call.without_graph()
        scores: Tensor | None = None
        seen = attention.versions()
        for point, mine in listening:
            channel = str(point.point.site.key)
            for listener in mine:
                by_row = point.view.identity or point.view.by_row
                if (waits and listener.deferrable) or (listener.partial and by_row):
                    listener.fn(DeferredAttention(point.view, attention, channel, call, seen, waits), hook=point)
                    continue
                with torch.no_grad():
                    scores = attention.scores() if scores is None else scores
                    shown = scores if channel == "scores" else attention.pattern(scores)
                    listener.fn(point.view.get(shown, self.call), hook=point)
        return True

    def touched(self, attention: AttentionCall) -> Touched | None:
        """As `ObservedAttentionCall` says: somebody who listens may need all, or the view of a hook point."""
        if is_compiling() or self._shared is not None or attention.query.shape[1] != attention.n_heads:
            return None
        visible, shape, found = CURRENT.get().visible, score_shape(attention), None
        if math.prod(shape) <= FEW_SCORES or any(scope in visible for scope in self.tap.opened):
            return None
        for point in self.active_points(_INSIDE):
            if point.sources or point.point.linked or not (point.view.identity or point.view.by_row):
                return None
            self._touching[point] = point.visible_listeners()
            for listener in self._touching[point]:
                fn = listener.fn
                mine = (
                    fn.touched(shape, point)
                    if listener.kind in ("fwd", "follow") and isinstance(fn, TouchesPart)
                    else None
                )
                if mine is None:
                    return None
                found = mine if found is None else found | mine
        if found is None or (found.heads.all() and found.queries.all() and found.max_bytes is None):
            return None
        if self._run is not None and self._run.gradients:
            for point in self._touching:
                refuse_unknown_recomputation(point.name)
        return found

    def of_part(self, part: Part) -> TappedCall:
        """As `ObservedAttentionCall` says."""
        scratch = parameters_of_heads(self.call, [point.view for point in self._touching], part.heads)
        return _PartInRun(replace(self.call, scratch=scratch), part, self._touching)


class _PartInRun(TappedCall):
    """Some heads and queries of a call of an attention module in a run.

    Args:
        call: the call.
        part: which heads and queries.
        touching: who is shown them: who comes or goes meanwhile is not asked about, since others may need the whole.
    """

    def __init__(self, call: Call, part: Part, touching: Mapping[HookPoint, Sequence[Listener]]) -> None:
        self.module, self.call, self._part, self._touching = call.module, call, part, touching

    def active_points(self, channels: Sequence[str]) -> Sequence[HookPoint]:
        """The hook points on these channels that are shown something."""
        return [point for point, mine in self._touching.items() if mine and point.point.site.key in channels]

    def show(self, channel: str, x: Tensor, private: bool = False) -> Tensor:
        """As `TappedCall` says."""
        points = self.active_points((channel,))
        call = replace(self.call, private=private and len(points) == 1)
        for point in points:
            mine = [within(listener, self._part, point) for listener in self._touching[point]]
            x = point.edited(x, call, CURRENT.get(), mine, False, point.view)
        return x
