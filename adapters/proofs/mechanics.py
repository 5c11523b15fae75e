"""Checks that apply to every hook point: it fires once, can be written back, reaches its readers
and leaves nothing behind.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adapters.config import ModelConfig
from adapters.inputs import Given, arguments_of, may_take, repeated, split, with_stream
from adapters.linear import OpaqueLayerError, bias_of, head_results
from adapters.mixers import Mixer
from adapters.observe.observe import WRONG, CallRecorder, one_line
from adapters.observe.recognised import show_check
from adapters.points import call_number, module_at, module_path
from adapters.proofs.evidence import (
    Bridge,
    Cache,
    Check,
    Hook,
    LayerStep,
    NamedHook,
    claimed_points,
    few_logits,
    few_tokens,
    largest,
    light_points,
    places_of,
    step_of_tokens,
)
from adapters.views import Kwargs, transformed
from adapters.weights import Weights

_EMBEDS = "inputs_embeds"
_OF_HEADS = re.compile(r"hook_(attn_in|[qkv]_input)$")
_NORMED = re.compile(r"\bln.*hook_(scale|normalized|out)$")

EMBEDDED = "rows of W_E in place of tokens give their logits"
ATTRIBUTED = "what all terms of the stream add to the logits is the logits"

#: A name, and two tensors that should agree.
Pair = tuple[str, Tensor, Tensor]
#: Returns the hook points that fail, each with the reason. An error that it raises counts as a
#: reason.
Test = Callable[[list[str]], dict[str, str]]


class _Middle(NamedTuple):
    """A residual stream between two steps: its name, the name of the next stream, and the outputs
    that are added between them (with the weights, if there are several streams).
    """

    place: LayerStep
    before: str
    after: str
    added: list[str]


class Mechanics:
    """Checks that apply to every hook point, run on the live model.

    Args:
        bridge: the bridge.
        tokens: ``[batch, pos]``; images or sound if the first blocks read these.
        more: the model's other inputs.
        tolerance: the maximum difference between sums of a few rounded numbers, relative to the
            largest of them or to one.
    """

    def __init__(
        self, bridge: Bridge, tokens: Tensor, more: dict[str, Tensor], tolerance: float
    ) -> None:
        self.bridge = bridge
        self.cfg = bridge.cfg
        self.model = bridge.original_model
        self.tokens = tokens
        self.more = more
        self.tolerance = tolerance
        self.hooks_before = self.count_hooks()
        self.names = claimed_points(bridge)
        #: Hook points that the bridge refuses to show, and why.
        self.refused: dict[str, str] = {}
        #: Hook points inside of experts that received none of these tokens.
        self.idle: set[str] = set()
        #: The largest change of the logits that writing back has caused.
        self.written_by = 0.0

    @cached_property
    def plain(self) -> Tensor:
        """Return the model's own logits, or the first tensor that it returns."""
        output = self.model(**arguments_of(self.bridge.core, self.tokens, self.more))
        return output.logits if hasattr(output, "logits") else output[0]

    def run_plain(self) -> Tensor:
        """Run the model without hooks on the first call; return the same result later."""
        return self.plain

    @cached_property
    def step(self) -> int:
        """Return a step such that every `step`-th logit suffices to compare two runs."""
        return step_of_tokens(self.bridge, self.tokens, self.more)

    @contextmanager
    def of_few_tokens(self) -> Iterator[None]:
        """Return a context in which logits are restricted to some vocabulary entries, if the
        vocabulary is large."""
        logits = self.plain
        with few_tokens(self.bridge, self.step):
            del self.plain
            self.run_plain()
            yield
        self.plain = logits

    def quick(self) -> list[Check]:
        """Run the checks that take a few runs."""
        return self._all(self.unhooked, self.every_hook_fires)

    def declared(self) -> list[Check]:
        """Run the checks that a wrong declaration can fail, in fewer runs."""
        return self._all(self.every_hook_fires, self.starting_at_a_block)

    def full(self) -> list[Check]:
        """Run the checks that take a run for each kind of hook point, or for each layer."""
        return self._all(
            self.writing_back,
            self.z_through_w_o,
            self.resid_mid_reaches_both,
            self.starting_after_stopping,
            self.embeddings_in_place_of_tokens,
            self.attributions_are_the_logits,
        )

    def promised(self) -> list[Check]:
        """Run the checks that a full verification needs and a search for valid hook points
        skips.
        """
        self.names = claimed_points(self.bridge)
        return self._all(
            self.unhooked,
            self.z_through_w_o,
            self.resid_mid_reaches_both,
            self.embeddings_in_place_of_tokens,
            self.attributions_are_the_logits,
        )

    def last(self) -> list[Check]:
        """Run the checks that must follow all others."""
        return self._all(self.nothing_left_behind)

    def _all(self, *checks: Callable[[], None]) -> list[Check]:
        """Run checks and return their results; a check that raises fails."""
        self.checks: list[Check] = []
        for check in checks:
            show_check(check.__name__.replace("_", " "))
            try:
                check()
            except WRONG as error:
                name = (check.__doc__ or check.__name__).strip().rstrip(".")
                if isinstance(error, OpaqueLayerError):
                    self.add_raised(name, error)
                else:
                    self.add(name, False, one_line(error))
        return self.checks

    # ----------------------------------------------------------------------------------------------
    # Runs, and comparisons of their results.
    # ----------------------------------------------------------------------------------------------

    def add(
        self, name: str, passed: bool, detail: str = "", wrong: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Add a check."""
        if passed:
            self.checks.append(Check(name, True, detail))
        elif name in self.bridge.not_offered:
            self.checks.append(Check(name, True, f"not offered: {detail}"))
        else:
            self.checks.append(Check(name, False, detail, wrong or ((name, detail),)))

    def add_raised(self, name: str, error: Exception) -> None:
        """Add a check of something that the user, too, gets an error for: it is refused, or does
        not apply.
        """
        why = one_line(error)
        if isinstance(error, OpaqueLayerError):
            self.checks.append(Check(name, True, refused=((name, why),)))
        else:
            self.add(name, True, f"does not apply: {why}")

    def close(self, a: Tensor, b: Tensor) -> tuple[bool, float]:
        """Return whether two tensors agree, and their largest difference."""
        if a.shape != b.shape:
            return False, float("inf")
        a = a.double()
        b = b.double()
        worst = largest(a - b)
        return worst <= self.tolerance * max(1.0, largest(b)), worst

    def add_worst(self, name: str, pairs: Iterable[Pair]) -> None:
        """Add one check that holds if all pairs agree; its detail is the largest difference."""
        wrong: list[tuple[str, str]] = []
        worst = (False, 0.0, "")
        count = 0
        for place, a, b in pairs:
            close, difference = self.close(a, b)
            if not close:
                wrong.append((place, f"differs by {difference:.1e}"))
            if not count or (not close, difference) > worst[:2]:
                worst = (not close, difference, place)
            count += 1
        if not count:
            self.add(name, True, "does not apply")
            return
        _, difference, place = worst
        self.add(
            name, not wrong, f"{count} compared, worst {difference:.1e} at {place}", tuple(wrong)
        )

    def add_failed(self, name: str, failed: dict[str, str], right: str) -> None:
        """Add one check that holds if nothing failed; its detail lists the first three failures."""
        wrong = [f"{point}: {why}" for point, why in failed.items()]
        self.add(name, not failed, "; ".join(wrong[:3]) or right)

    def count_hooks(self) -> int:
        """Return the number of torch hooks on the model's modules."""
        modules = self.model.modules()
        return sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules
        )

    def logits(self, fwd_hooks: Sequence[NamedHook] = ()) -> Tensor:
        """Run the model with hooks."""
        return self.bridge.run_with_hooks(self.tokens, fwd_hooks=list(fwd_hooks), **self.more)

    def cache(self, names: Sequence[str]) -> Cache:
        """Run the model; return some activations."""
        more = self.more | few_logits(self.bridge, names)
        return self.bridge.run_with_cache(self.tokens, names_filter=names, **more)[1]

    @property
    def weights(self) -> dict[str, Callable[[], Tensor]]:
        """Return the functions that make the canonical weights, by name."""
        return Weights(self.bridge.architecture, self.model, self.cfg).getters

    # ----------------------------------------------------------------------------------------------
    # Hook points fire once, and what is read there can be written back.
    # ----------------------------------------------------------------------------------------------

    def unhooked(self) -> None:
        """Unhooked logits are the model's own."""
        same = torch.equal(self.logits(), self.plain)
        self.add("unhooked logits are the model's own, bit by bit", same)

    def expected_shape(self, axes: Sequence[str], first: Sequence[int]) -> list[int | None]:
        """Return the expected sizes of axes, None where the model does not define one. `first` is
        the shape of the first residual stream.
        """
        pos = self.tokens.shape[1]
        if self.tokens.is_floating_point() and len(first) > 1:
            pos = first[1]
        sizes: dict[str, int | None] = {"batch": len(self.tokens), "pos": pos, "key_pos": pos}
        sizes["n_key_value_heads"] = self.cfg.n_kv_heads
        sizes["n_experts"] = self.cfg.num_experts
        decoder = self.more.get("decoder_input_ids")
        if isinstance(decoder, Tensor):
            sizes["decoder_pos"] = sizes["decoder_key_pos"] = decoder.shape[1]
        for axis in axes:
            if axis not in sizes:
                own = getattr(self.cfg, axis, None)
                sizes[axis] = int(axis) if axis.isdigit() else own
        return [sizes[axis] for axis in axes]

    def failing(self, names: list[str], test: Test, most: int | None = None) -> dict[str, str]:
        """Return the hook points that fail a test, each with the reason, and add to `refused`
        the hook points that the bridge refuses to show. Bisect them if the test raises an error.

        Args:
            names: the hook points to test, all at once.
            test: a function that returns the failing hook points of a list; it may raise an error
                of `WRONG`.
            most: the number of failures after which to stop; None: find all.
        """
        failed: dict[str, str] = {}
        pending = [[name for name in names if name not in self.refused]]
        while pending and (most is None or len(failed) < most):
            some = pending.pop(0)
            if not some:
                continue
            try:
                failed |= test(some)
            except WRONG as error:
                why = f"looking there ends in an error ({one_line(error)})"
                if len(some) > 1:
                    half = len(some) // 2
                    pending = [some[:half], some[half:], *pending]
                elif isinstance(error, OpaqueLayerError):
                    self.refused[some[0]] = why
                else:
                    failed[some[0]] = why
        return failed

    def seen_once(self, names: list[str]) -> dict[str, str]:
        """Return the hook points that do not fire exactly once per run with the shape of their
        axes.
        """
        shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}

        def look(x: Tensor, hook: Hook) -> None:
            shapes[hook.name].append(tuple(x.shape))

        self.logits([(names, look)])
        streams = [shapes[name] for name in names if name.endswith("resid_pre")]
        first = next((of_stream[0] for of_stream in streams if of_stream), ())
        failed: dict[str, str] = {}
        for name, of_point in shapes.items():
            axes = self.bridge.hook_dict[name].point.axes.split()
            if not of_point and axes[0] == "row" and ".experts." in name:
                self.idle.add(name)  # an expert in a module of its own received none of the tokens
            elif len(of_point) != 1:
                failed[name] = f"it is seen {len(of_point)} times in a run"
            else:
                expected = self.expected_shape(axes, first)
                wrong = _wrong_shape(axes, expected, of_point[0])
                if wrong:
                    failed[name] = wrong
        return failed

    def every_hook_fires(self) -> None:
        """Every hook point fires once, with its declared shape."""
        failed = self.failing(self.names, self.seen_once, most=3)
        self.names = [name for name in self.names if name not in self.refused]
        name = "every hook point fires once, with its declared shape"
        self.add_failed(name, failed, f"{len(self.names)} hook points")
        self.checks[-1] = replace(self.checks[-1], refused=tuple(self.refused.items()))

    def written_back(self, names: list[str]) -> dict[str, str]:
        """Return a hook point, with the reason, if writing back its activation changes the logits.

        Raises:
            RuntimeError: the logits change, and there are several hook points.
        """
        routes = self.routes  # computed before the run that must use them

        def keep(x: Tensor, hook: Hook) -> Tensor:
            return routes[hook.name]

        hooks: list[NamedHook] = [(names, _same)]
        hooks += [(name, keep) for name in routes if name not in names]
        close, worst = self.close(self.logits(hooks), self.plain)
        if close:
            self.written_by = max(self.written_by, worst)
            return {}
        if len(names) > 1:
            raise RuntimeError("written back, they change the logits")
        return {names[0]: f"writing back what was read changes the logits by {worst:.1e}"}

    @cached_property
    def routes(self) -> dict[str, Tensor]:
        """Return the experts that each token is routed to without hooks; rounding can change the
        routing.
        """
        names = [name for name in self.names if name.endswith("hook_expert_indices")]
        cache = self.cache(names) if names else {}
        return {name: cache[name] for name in names}

    def writing_back(self) -> None:
        """Writing back what was read changes nothing."""
        # Write back many kinds of hook points at once, in all layers; if the logits differ, bisect.
        # Inputs of heads come first and outputs of norms last, so that one run does not edit both.
        kinds = sorted(self.kinds(), key=lambda kind: _NORMED.search(kind[0]) is not None)
        kinds.sort(key=lambda kind: _OF_HEADS.search(kind[0]) is None)
        failed: dict[str, str] = {}
        some = max(1, min(18, (len(kinds) + 1) // 2))
        for start in range(0, len(kinds), some):
            names = list(chain(*kinds[start : start + some]))
            failed |= self.failing(names, self.written_back)
        right = f"{len(self.names)} hook points, worst {self.written_by:.1e}"
        self.add_failed("writing back what was read changes nothing", failed, right)

    def kinds(self) -> list[list[str]]:
        """Return the hook points grouped by kind, across layers and experts."""
        kinds: dict[str, list[str]] = {}
        for name in self.names:
            kind = ".".join(part for part in name.split(".") if not part.isdigit())
            kinds.setdefault(kind, []).append(name)
        return list(kinds.values())

    # ----------------------------------------------------------------------------------------------
    # What is read reaches its readers.
    # ----------------------------------------------------------------------------------------------

    def middles(self) -> Iterator[_Middle]:
        """Yield each writable residual stream between two steps."""
        for place in places_of(self.bridge):
            step = place.named
            prefix = place.prefix
            mix = place.step.mix
            if not step.first or not step.before.startswith("hook_resid_mid"):
                continue
            if mix and mix.by_block:
                continue
            steps = place.stack.block_at(place.layer).named
            parallel = [other.name for other in steps if other.after == step.after]
            added = [f"{prefix}hook_{name}_out" for name in parallel]
            for weights in ("write", "keep") if mix else ():
                name = f"{prefix}hook_{step.name}_{weights}"
                if name in self.bridge.hook_dict:
                    added.append(name)
            middle = _Middle(place, prefix + step.before, prefix + step.after, added)
            if {middle.before, middle.after, *added} <= set(self.names):
                yield middle

    def _total(self, middle: _Middle, cache: Cache) -> Tensor:
        """Return a block's residual stream after the outputs are added."""
        step = middle.place.step
        stream = cache[middle.before]
        outputs = [cache[name] for name in middle.added]
        if step.mix:
            result, write, *keep = outputs
            return step.mix.of(stream, result, write, keep[0] if keep else None)
        block = module_at(self.model, middle.place.path)
        return sum(outputs, transformed(step.residual_transform, stream, block))

    def z_through_w_o(self) -> None:
        """z through W_O gives attn_out."""
        places = [
            place for place in places_of(self.bridge) if f"{place.part}hook_result" in self.names
        ]
        paths: list[str] = []
        names: list[str] = []
        for place in places:
            point = self.bridge.hook_dict[f"{place.part}hook_z"].point
            paths.append(point.site.path)
            names += [f"{place.part}hook_z", f"{place.part}hook_result", place.added]
        watched = {module_path(path): module_at(self.model, path) for path in paths}
        with CallRecorder(watched.items(), layout=self.bridge.layout) as recording:
            cache = self.cache(names) if places else {}

        def pairs() -> Iterator[Pair]:
            for place, path in zip(places, paths, strict=True):
                step = place.step
                projection = module_at(self.model, path)
                name = f"{place.part}hook_z"
                z = cache[name]
                bias = bias_of(projection, z.flatten(-2))
                output = recording.of(module_path(path))[call_number(path) or 0].output
                if place.stack.positions_first:
                    output = output.transpose(0, 1)
                yield name, head_results(projection, z).sum(-2) + bias, output
                if not step.post:
                    bias = step.added(bias, module_at(self.model, place.path))
                name = f"{place.part}hook_result"
                yield name, cache[name].sum(-2) + bias, cache[place.added]

        self.add_worst("z through W_O gives attn_out", pairs())

    def resid_mid_reaches_both(self) -> None:
        """Halving resid_mid reaches both branches."""
        streams: dict[str, Tensor] = {}

        def halve(x: Tensor, hook: Hook) -> Tensor:
            streams[hook.name] = x.clone()
            return x * 0.5

        # Edit all layers in one run: each layer's output is compared with its own halved input.
        middles = list(self.middles())
        halved = [middle.before for middle in middles]
        names: dict[str, None] = {}
        for middle in middles:
            names |= dict.fromkeys((middle.before, middle.after, *middle.added))

        def pairs() -> Iterator[Pair]:
            if not middles:
                return
            with self.bridge.hooks(fwd_hooks=[(halved, halve)]):
                cache = self.cache(list(names))
            for middle in middles:
                name = middle.before
                after = middle.after
                yield name, cache[name], streams[name] * 0.5
                # The next stream is halved as well, if it is another middle.
                total = streams[after] if after in streams else cache[after]
                yield name, self._total(middle, cache), total

        self.add_worst("halving resid_mid reaches both branches", pairs())

    @property
    def _arguments_with_stream(self) -> Kwargs:
        """Return the other arguments of a run that starts at a layer."""
        return Kwargs(with_stream(self.bridge.core, self.tokens, self.more))

    def layer_runs(self) -> Iterator[Pair]:
        """Yield the logits of runs that resume at the layer where another run stopped, and the
        logits of a full run.
        """
        # Run each layer alone on the output of the previous one. Compute the logits from a few of
        # them, and from the end.
        n = self.cfg.n_layers
        run = self.bridge
        more = self._arguments_with_stream
        blocks = self.bridge.architecture.stack.every_block
        sources = [part.keys_of for block in blocks for part in block.attentions]
        last = min([n, *(layer for layer in sources if layer is not None)])
        residual = run(self.tokens, stop_at_layer=0, **Kwargs(self.more))
        resumed = {layer for layer in (0, n // 2, n - 1) if layer <= last}
        for layer in range(n + 1):
            if layer in resumed or layer == n:
                yield f"layer {layer}", run(residual, start_at_layer=layer, **more), self.plain
            if layer < last:
                residual = run(residual, start_at_layer=layer, stop_at_layer=layer + 1, **more)
            elif layer < n:  # it shares keys with another layer: run from the tokens
                residual = run(self.tokens, stop_at_layer=layer + 1, **Kwargs(self.more))

    def starting_after_stopping(self) -> None:
        """start_at_layer after stop_at_layer gives the full logits."""
        name = "start_at_layer after stop_at_layer gives the full logits"
        if reason := self.bridge.no_layer_runs:
            self.add(name, True, f"does not apply: {reason}")
        else:
            self.add_worst(name, self.layer_runs())

    def starting_at_a_block(self) -> None:
        """A block that runs alone has the same output as in a full run."""
        layer = min(1, self.cfg.n_layers - 1)
        attentions = self.bridge.architecture.stack.block_at(layer).attentions
        if any(part.keys_of is not None for part in attentions):
            layer = 0
        more = self._arguments_with_stream
        run = self.bridge

        def pairs() -> Iterator[Pair]:
            before = run(self.tokens, stop_at_layer=layer, **Kwargs(self.more))
            after = run(self.tokens, stop_at_layer=layer + 1, **Kwargs(self.more))
            alone = run(before, start_at_layer=layer, stop_at_layer=layer + 1, **more)
            yield f"layer {layer}", alone, after

        if not self.bridge.no_layer_runs:
            self.add_worst(
                "a block that runs alone makes what it makes in a run from the start", pairs()
            )

    def embeddings_in_place_of_tokens(self) -> None:
        """Rows of W_E passed in place of tokens give the same logits."""
        stack = self.bridge.architecture.token_stack
        takes_rows = stack is not None and stack.embedding.given != "other"
        inputs = (self.tokens, *self.more.values())
        if any(x.is_floating_point() for x in inputs):
            takes_rows = False
        if not takes_rows or not may_take(self.bridge.core, _EMBEDS):
            self.add(EMBEDDED, True, "does not apply")
            return
        weights = self.weights
        try:
            table = (weights.get("embed.W_E") or weights["embed.embed.W_E"])()
            logits = self.bridge(table[self.tokens], **Kwargs(self.more))
        except WRONG as error:  # the user gets this error when passing embeddings
            self.add_raised(EMBEDDED, error)
        else:
            self.add_worst(EMBEDDED, [("logits", logits, self.plain)])

    def attributions_are_the_logits(self) -> None:
        """The contributions of all stream terms to a logit difference add up to it."""
        weights = self.weights
        if "unembed.W_U" not in weights or self.tokens.is_floating_point() or self.plain.ndim != 3:
            self.add(ATTRIBUTED, True, "does not apply")
            return
        one = 1
        other = 2
        names = light_points(self.bridge)
        try:
            cache: Any = self.bridge.run_with_cache(self.tokens, names_filter=names, **self.more)[1]
            with warnings.catch_warnings():
                # The sum is compared below, and a difference is a failed check.
                warnings.filterwarnings("ignore", "the terms do not sum")
                terms = cache.decompose_resid()
            shares: Tensor = cache.logit_attrs(terms, one, other, norm_weights=True).double()
        except WRONG as error:  # the user gets this error when calling it
            self.add_raised(ATTRIBUTED, error)
            return
        total = shares.sum(0)
        unembed = weights["unembed.W_U"]()
        chosen = unembed[:, [one, other]].double()
        direction = chosen[:, 0] - chosen[:, 1]
        if get := weights.get("unembed.b_U"):
            bias = get()
            total = total + (bias[one] - bias[other]).double()
        if get := weights.get("ln_final.b"):
            total = total + get().double() @ direction
        logits = self.plain.double()
        cap = self.bridge.architecture.readout.soft_cap
        if cap is not None:
            logits = torch.atanh(logits / cap) * cap
        pair = logits[..., [one, other]]
        difference = pair[..., 0] - pair[..., 1]
        size = max(1.0, largest(shares), largest(pair))
        self.add_worst(ATTRIBUTED, [("logits", total / size, difference / size)])

    def nothing_left_behind(self) -> None:
        """No torch hook and no replaced forward is left on the model."""
        hooks = self.count_hooks() - self.hooks_before
        patches = sum(_is_ours(vars(module).get("forward")) for module in self.model.modules())
        self.add(
            "no torch hook is left behind",
            not hooks and not patches,
            f"{hooks} hooks, {patches} patches",
        )


def _wrong_shape(axes: Sequence[str], expected: Sequence[int | None], shape: Sequence[int]) -> str:
    """Describe how a shape differs from the declared axes; "" if it fits. If it differs in sizes
    only, name the keys of `config_values` that would correct them.
    """
    differ = len(shape) != len(axes)
    keys = {field.name for field in fields(ModelConfig)}
    cures: list[str] = []
    if not differ:
        for axis, size, observed in zip(axes, expected, shape, strict=True):
            if size in (None, observed):
                continue
            differ = True
            if axis in keys:
                cure = f"config_values={{{axis!r}: {observed}}}"
                cures.append(f"{axis} is {size} ({cure} says another)")
    if not differ:
        return ""
    wrong = f"its shape is {shape}, not [{' '.join(axes)}]"
    return f"{wrong}: {'; '.join(cures)}" if cures else wrong


def _is_ours(forward: object) -> bool:
    """Tell whether a forward function was replaced by this library."""
    return type(forward).__module__.split(".")[0] == "bridge"


# --------------------------------------------------------------------------------------------------
# Whether an edit at a hook point changes the activations that follow it: one batch row per hook
# point.
# --------------------------------------------------------------------------------------------------


#: Maximum number of rows in a run. It is lower if a block scans, because each row may take
#: gigabytes.
ROWS = 48
ROWS_OF_SCANS = 6
_PRE = ".hook_resid_pre"
_POST = ".hook_resid_post"
#: Runs a number of copies of the input with hooks; returns tensors whose rows are compared: the
#: logits, by the name "", or digests of the output of each block, by its hook point.
Run = Callable[[int, list[NamedHook]], dict[str, Tensor]]


class Edits:
    """Edits of one row per hook point, compared bit by bit with a run whose hooks write back
    unchanged activations.

    Args:
        bridge: the bridge.
        few: a short text, if the model takes one, by the names of the model's own arguments.
        full: the full input, by the names of the model's own arguments.
        step: called with a description and the number of hook points after each trial.
    """

    def __init__(
        self, bridge: Bridge, few: Given, full: Given, step: Callable[[str, int], None]
    ) -> None:
        self.bridge = bridge
        self._few = few
        self._full = full
        self._step = step

    def without_effect(self, names: list[str], known: Collection[str] = ()) -> dict[str, str]:
        """Return the hook points whose edits change nothing, each with the reason.

        Args:
            names: the hook points to test.
            known: the hook points whose edits are known to change the logits.

        A hook point inside a block has an effect if its edit changes the block's output, and an
        edit of that output changes the logits. All others, and those for which this fails, are
        tested by their effect on the logits.
        """
        tested = {*names, *known}
        ends = {name: self._end(name) for name in names}
        within = [name for name, end in ends.items() if end != name and end in tested]
        inside = self._inside(within)
        effective = self._reaching(self._few, [name for name in names if name not in inside])
        ending = effective.union(known)
        effective |= {name for name in inside if ends[name] in ending}
        rest = [name for name in names if name not in effective]
        effective |= self._reaching(self._full, rest)
        return {name: "an edit changes nothing" for name in rest if name not in effective}

    def _end(self, name: str) -> str:
        """Return the output hook point of the block that contains a hook point; "" if the block is
        not in the first list.
        """
        depth = self.bridge.hook_dict[name].point.depth
        return f"blocks.{depth}.hook_resid_post" if name.startswith(f"blocks.{depth}.") else ""

    def _inside(self, names: list[str]) -> set[str]:
        """Return the hook points whose edit changes the output of their block. One pass edits one
        hook point per block and row; each block gets its unedited input.
        """
        if not names:
            return set()
        pres = [name for name in self.bridge.hook_dict if name.endswith(_PRE)]
        posts = [name for name in self.bridge.hook_dict if name.endswith(_POST)]
        streams: dict[str, Tensor] = {}

        def keep(x: Tensor, hook: Hook) -> None:
            streams[hook.name] = x.clone()

        def run(times: int, hooks: list[NamedHook]) -> dict[str, Tensor]:
            digests: dict[str, Tensor] = {}

            def reset(x: Tensor, hook: Hook) -> Tensor:
                other_axes = [1] * (x.ndim - 1)
                return streams[hook.name].repeat(times, *other_axes).to(x)

            def look(x: Tensor, hook: Hook) -> None:
                digests[hook.name] = _digests(x)

            self._run(self._few, times, [(pres, reset), *hooks, (posts, look)])
            return digests

        try:
            self._run(self._few, 1, [(pres, keep)])
            return self._changed(names, run, self._end, "all blocks")
        except WRONG as error:
            one_line(error)  # these hook points are tested in full runs
            return set()

    def _reaching(self, inputs: Given, names: list[str]) -> set[str]:
        """Return the hook points whose edit changes the logits."""

        def run(times: int, hooks: list[NamedHook]) -> dict[str, Tensor]:
            return {"": self._run(inputs, times, hooks)}

        return self._changed(names, run, lambda name: "", "logits")

    def _run(self, inputs: Given, times: int, hooks: list[NamedHook]) -> Tensor:
        """Run copies of an input; return the logits."""
        tokens, more = split(self.bridge.core, repeated(inputs, times))
        return self.bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more)

    def _changed(
        self, names: list[str], run: Run, end_of: Callable[[str], str], where: str
    ) -> set[str]:
        """Return the hook points whose edit changes their row of a run's result.

        Args:
            names: the hook points.
            run: runs the model.
            end_of: returns the name of the result that an edit changes.
            where: a description of the results.
        """
        changed: set[str] = set()
        for some in self._batches(names, end_of):
            together = self._changed_together(some, run, end_of)
            # If every reader of a tensor is edited as well, an edit of the tensor itself has no
            # effect.
            hidden = [name for name in some if name not in together]
            if together and hidden:
                together |= self._changed_together(hidden, run, end_of)
            changed |= together
            self._step(f"edits, {where}", len(some))
        return changed

    def _batches(self, names: list[str], end_of: Callable[[str], str]) -> list[list[str]]:
        """Yield groups of hook points that one run edits together. Points with a full stream per
        head, which take the most memory, get separate groups.

        A run may edit the inputs of heads, or the norm before them, but not both.
        """
        parts = [step.part for step in self.bridge.architecture.steps()]
        scans = any(isinstance(part, Mixer) and part.mixes for part in parts)
        rows = ROWS_OF_SCANS if scans else ROWS
        batches: dict[tuple[bool, int], list[str]] = {}
        counts: Counter[tuple[bool, str]] = Counter()
        for name in names:
            heavy = self.bridge.hook_dict[name].point.group == "heavy"
            end = (heavy, end_of(name))
            batches.setdefault((heavy, counts[end] // rows), []).append(name)
            counts[end] += 1
        return list(batches.values())

    def _changed_together(
        self, names: list[str], run: Run, end_of: Callable[[str], str]
    ) -> set[str]:
        """Return the hook points whose edit changes their row, all edited in one run."""
        rows: dict[str, int] = {}
        counts: Counter[str] = Counter()
        for name in names:
            rows[name] = counts[end_of(name)]
            counts[end_of(name)] += 1
        batch = len(next(iter(self._few.values())))
        copies = math.ceil(max(counts.values()) / batch)
        plain = run(copies, [(names, _same)])
        edited = run(copies, [(names, _edit_of(rows))])
        changed: set[str] = set()
        for name, row in rows.items():
            end = end_of(name)
            before = plain[end]
            after = edited[end]
            if not torch.equal(after[row], before[row]):
                changed.add(name)
        return changed


def _digests(x: Tensor) -> Tensor:
    """Return a number for each row that changes if any number in the row changes."""
    rows = x.detach().double().flatten(1)
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(rows.shape[1], generator=generator, dtype=torch.float64, device="cpu") + 0.5
    return rows @ noise.to(rows.device)


def _same(x: Tensor, hook: Hook) -> Tensor:
    """Return an activation unchanged."""
    return x


def _edit_of(rows: dict[str, int]) -> Callable[[Tensor, Hook], Tensor]:
    """Return a function that edits each hook point's row."""

    def edit(x: Tensor, hook: Hook) -> Tensor:
        row = rows[hook.name]
        y = x.clone()
        old = x[row]
        # Make large numbers small and small numbers large: experts are selected by the largest
        # ones.
        random = torch.rand(old.shape, generator=torch.Generator().manual_seed(0), device="cpu")
        noise = (1.8 * random - 0.9).to(x)
        new = old * (1 + noise) + noise
        y[row] = new.where(torch.isfinite(old), old)
        return y

    return edit
