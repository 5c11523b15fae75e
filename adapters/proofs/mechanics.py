"""What every hook point promises, whatever it means: it fires once, writes back, reaches readers, leaves nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from adapters.config import ModelConfig
from adapters.inputs import Given, arguments_of, may_take, repeated, split, with_stream
from adapters.linear import bias_of, head_results
from adapters.mixers import Mixer
from adapters.observe.observe import WRONG, CallRecorder, one_line
from adapters.points import call_number, module_at, module_path
from adapters.proofs.evidence import (
    Bridge,
    Cache,
    Check,
    Hook,
    LayerStep,
    NamedHook,
    few_logits,
    few_tokens,
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

#: Says of some hook points which do not hold, and why; what it raises is a reason, too.
Test = Callable[[list[str]], dict[str, str]]


class Mechanics:
    """The promises that hold for any name, checked on the live model.

    Args:
        bridge: the bridge.
        tokens: ``[batch, pos]``; images or sound, where the first blocks read these.
        more: what the model is given besides.
        tolerance: what the sum of a few rounded numbers may differ by, relative to the largest of them or one.
    """

    def __init__(self, bridge: Bridge, tokens: Tensor, more: dict[str, Tensor], tolerance: float) -> None:
        self.bridge, self.cfg, self.model = bridge, bridge.cfg, bridge.original_model
        self.tokens, self.more, self.tolerance = tokens, more, tolerance
        self.hooks_before = self.count_hooks()
        self.names = list(bridge.hook_dict)
        #: Those inside of experts that none of these tokens was sent to.
        self.idle: set[str] = set()
        #: The most that writing back has changed the logits by.
        self.written_by = 0.0

    @cached_property
    def plain(self) -> Tensor:
        """The model's own logits, or what else it returns first."""
        output = self.model(**arguments_of(self.bridge.core, self.tokens, self.more))
        return output.logits if hasattr(output, "logits") else output[0]

    def run_plain(self) -> Tensor:
        """Runs the model without hooks, if that has not been done yet."""
        return self.plain

    @cached_property
    def step(self) -> int:
        """Each how-many-th token's logits are enough to compare two runs."""
        return step_of_tokens(self.bridge, self.tokens, self.more)

    @contextmanager
    def of_few_tokens(self) -> Iterator[None]:
        """The logits are those of some tokens meanwhile, where there are many."""
        whole = self.plain
        with few_tokens(self.bridge, self.step):
            del self.plain
            self.run_plain()
            yield
        self.plain = whole

    def quick(self) -> list[Check]:
        """The checks that take a few runs."""
        return self._all(self.unhooked, self.every_hook_fires)

    def declared(self) -> list[Check]:
        """Those that a declaration can break, in fewer."""
        return self._all(self.every_hook_fires, self.starting_at_a_block)

    def full(self) -> list[Check]:
        """The checks that take a run for each kind of hook point, or for each layer."""
        return self._all(
            self.writing_back,
            self.z_through_w_o,
            self.resid_mid_reaches_both,
            self.starting_after_stopping,
            self.embeddings_in_place_of_tokens,
            self.attributions_are_the_logits,
        )

    def promised(self) -> list[Check]:
        """Those of a full proof that a search for hook points that hold does not make."""
        self.names = list(self.bridge.hook_dict)
        return self._all(
            self.unhooked,
            self.z_through_w_o,
            self.resid_mid_reaches_both,
            self.embeddings_in_place_of_tokens,
            self.attributions_are_the_logits,
        )

    def last(self) -> list[Check]:
        """What is to be looked at when everything else is done."""
        return self._all(self.nothing_left_behind)

    def _all(self, *checks: Callable[[], None]) -> list[Check]:
        """What checks find; one that raises does not hold."""
        self.checks: list[Check] = []
        for check in checks:
            try:
                check()
            except WRONG as error:
                self.add((check.__doc__ or check.__name__).strip().rstrip("."), False, one_line(error))
        return self.checks

    def add(self, name: str, passed: bool, detail: str = "", wrong: tuple[tuple[str, str], ...] = ()) -> None:
        if not passed and name in self.bridge.not_offered:
            passed, detail = True, f"not offered: {detail}"
        self.checks.append(Check(name, passed, detail, () if passed else wrong or ((name, detail),)))

    def close(self, a: Tensor, b: Tensor) -> tuple[bool, float]:
        if a.shape != b.shape:
            return False, float("inf")
        worst = (a.double() - b.double()).abs().max().item()
        return worst <= self.tolerance * max(1.0, b.double().abs().max().item()), worst

    def add_worst(self, name: str, pairs: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """One check that holds if all pairs agree; it shows the worst."""
        results = [(*self.close(a, b), label) for label, a, b in pairs]
        if not results:
            self.add(name, True, "does not apply")
            return
        worst = max(results, key=lambda result: (not result[0], result[1]))
        wrong = tuple((label, f"differs by {by:.1e}") for ok, by, label in results if not ok)
        self.add(name, not wrong, f"{len(results)} compared, worst {worst[1]:.1e} at {worst[2]}", wrong)

    def add_failed(self, name: str, failed: dict[str, str], right: str) -> None:
        """One check that holds if nothing failed; it shows the first three that did."""
        wrong = "; ".join(f"{each}: {why}" for each, why in list(failed.items())[:3])
        self.add(name, not failed, wrong or right)

    def count_hooks(self) -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.model.modules())

    def logits(self, fwd_hooks: Sequence[NamedHook] = ()) -> Tensor:
        return self.bridge.run_with_hooks(self.tokens, fwd_hooks=list(fwd_hooks), **self.more)

    def cache(self, names: Sequence[str]) -> Cache:
        more = self.more | few_logits(self.bridge, names)
        return self.bridge.run_with_cache(self.tokens, names_filter=names, **more)[1]

    def unhooked(self) -> None:
        """Unhooked logits are the model's own."""
        self.add("unhooked logits are the model's own, bit by bit", torch.equal(self.logits(), self.plain))

    def expected_shape(self, axes: Sequence[str], first: Sequence[int]) -> list[int | None]:
        """The sizes of axes, None where the model does not say; `first` is the shape of the first stream."""
        pos = first[1] if self.tokens.is_floating_point() and len(first) > 1 else self.tokens.shape[1]
        sizes: dict[str, int | None] = {"batch": self.tokens.shape[0], "n_key_value_heads": self.cfg.n_kv_heads}
        sizes |= {"n_experts": self.cfg.num_experts, "pos": pos, "key_pos": pos}
        if isinstance(decoder := self.more.get("decoder_input_ids"), Tensor):
            sizes |= {"decoder_pos": decoder.shape[1], "decoder_key_pos": decoder.shape[1]}
        sizes |= {axis: int(axis) for axis in axes if axis.isdigit()}
        return [sizes[axis] if axis in sizes else getattr(self.cfg, axis, None) for axis in axes]

    def failing(self, names: list[str], test: Test, most: int | None = None) -> dict[str, str]:
        """The hook points for which a test does not hold, and why. Where it raises for several, halves are tried apart.

        Args:
            names: which to try, all at once.
            test: what says of some which of them fail; it may raise an error of `WRONG`.
            most: how many to look for; None: all.
        """
        failed: dict[str, str] = {}
        pending = [names]
        while pending and (most is None or len(failed) < most):
            some = pending.pop(0)
            if not some:
                continue
            try:
                failed |= test(some)
            except WRONG as error:
                why = f"looking there ends in an error ({one_line(error)})"
                if len(some) > 1:
                    pending = [some[: len(some) // 2], some[len(some) // 2 :], *pending]
                else:
                    failed[some[0]] = why
        return failed

    def seen_once(self, names: list[str]) -> dict[str, str]:
        """Each hook point is seen once in a run, with the shape that its axes say."""
        seen: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}

        def look(x: Tensor, hook: Hook) -> None:
            seen[hook.name].append(tuple(x.shape))

        self.logits([(names, look)])
        first = next((shapes[0] for name, shapes in seen.items() if name.endswith("resid_pre") and shapes), ())
        failed = {}
        for name, shapes in seen.items():
            axes = self.bridge.hook_dict[name].point.axes.split()
            if not shapes and axes[0] == "row" and ".experts." in name:
                self.idle.add(name)
                continue  # an expert that is a module, to which none of these tokens was sent
            sizes = self.expected_shape(axes, first)
            if len(shapes) != 1:
                failed[name] = f"it is seen {len(shapes)} times in a run"
            elif len(shapes[0]) != len(axes) or any(
                size not in (None, seen) for size, seen in zip(sizes, shapes[0], strict=True)
            ):
                said = _said_otherwise(axes, sizes, shapes[0])
                failed[name] = f"its shape is {shapes[0]}, not [{' '.join(axes)}]{said}"
        return failed

    def every_hook_fires(self) -> None:
        """Every hook point fires once, with its declared shape."""
        failed = self.failing(self.names, self.seen_once, most=3)
        self.add_failed(
            "every hook point fires once, with its declared shape", failed, f"{len(self.names)} hook points"
        )

    def written_back(self, names: list[str]) -> dict[str, str]:
        """Writing back what was read changes nothing.

        Raises:
            RuntimeError: it does, of several.
        """

        def same(x: Tensor, hook: Hook) -> Tensor:
            return x

        routes = self.routes  # before the run that is to keep to them

        def keep(x: Tensor, hook: Hook) -> Tensor:
            return routes[hook.name]

        kept: list[NamedHook] = [(name, keep) for name in routes if name not in names]
        close, worst = self.close(self.logits([(names, same), *kept]), self.plain)
        if close:
            self.written_by = max(self.written_by, worst)
            return {}
        if len(names) > 1:
            raise RuntimeError("written back, they change the logits")
        return {names[0]: f"writing back what was read changes the logits by {worst:.1e}"}

    @cached_property
    def routes(self) -> dict[str, Tensor]:
        """Which experts each token is sent to without hooks: that can depend on the last digit."""
        names = [name for name in self.names if name.endswith("hook_expert_indices")]
        cache = self.cache(names) if names else {}
        return {name: cache[name] for name in names}

    def writing_back(self) -> None:
        """Writing back what was read changes nothing."""
        # Many kinds of hook point at once, in all layers; where that differs, half of them, and so on. The inputs of
        # heads come first and what norms make last: in one run, they are not changed together.
        kinds = sorted(self.kinds(), key=lambda kind: _NORMED.search(kind[0]) is not None)
        kinds.sort(key=lambda kind: _OF_HEADS.search(kind[0]) is None)
        failed: dict[str, str] = {}
        some = max(1, min(18, (len(kinds) + 1) // 2))
        for start in range(0, len(kinds), some):
            names = [name for kind in kinds[start : start + some] for name in kind]
            failed |= self.failing(names, self.written_back)
        right = f"{len(self.names)} hook points, worst {self.written_by:.1e}"
        self.add_failed("writing back what was read changes nothing", failed, right)

    def kinds(self) -> list[list[str]]:
        """The hook points by what they are, whatever their layer or expert."""
        kinds: dict[str, list[str]] = {}
        for name in self.names:
            kinds.setdefault(".".join(part for part in name.split(".") if not part.isdigit()), []).append(name)
        return list(kinds.values())

    def middles(self) -> Iterator[tuple[str, str, list[str], Callable[[Cache], Tensor]]]:
        """Each stream between two steps that is written through: its name, the next, what is added, and the sum."""
        for place in places_of(self.bridge):
            first, prefix = place.named, place.prefix
            mixed_by_its_block = first.step.mix is not None and first.step.mix.by_block
            if first.first and first.before.startswith("hook_resid_mid") and not mixed_by_its_block:
                steps = place.stack.block_at(place.layer).named
                added = [f"{prefix}hook_{named.name}_out" for named in steps if named.after == first.after]
                if first.step.mix:
                    weights = (f"{prefix}hook_{first.name}_{what}" for what in ("write", "keep"))
                    added += [name for name in weights if name in self.bridge.hook_dict]
                if all(name in self.names for name in (prefix + first.before, prefix + first.after, *added)):
                    yield prefix + first.before, prefix + first.after, added, partial(self._total, place, added)

    def _total(self, place: LayerStep, added: Sequence[str], cache: Cache) -> Tensor:
        """What a block makes of a stream and what is added to it."""
        step, stream = place.named.step, cache[place.prefix + place.named.before]
        if step.mix:
            result, write, *keep = (cache[name] for name in added)
            return step.mix.of(stream, result, write, keep[0] if keep else None)
        stream = transformed(step.residual_transform, stream, module_at(self.model, place.path))
        return sum((cache[name] for name in added), stream)

    def z_through_w_o(self) -> None:
        """z through W_O gives attn_out."""
        places = [place for place in places_of(self.bridge) if f"{place.part}hook_result" in self.names]
        sites = {place.part: self.bridge.hook_dict[f"{place.part}hook_z"].point.site.path for place in places}
        names = [f"{part}{name}" for part in sites for name in ("hook_z", "hook_result")]
        watched = {module_path(path): module_at(self.model, path) for path in sites.values()}
        with CallRecorder(watched.items(), layout=self.bridge.layout) as recording:
            cache = self.cache([*names, *(place.added for place in places)]) if places else {}

        def pairs() -> Iterable[tuple[str, Tensor, Tensor]]:
            for place in places:
                at, step, path = place.part, place.named.step, sites[place.part]
                projection, z = module_at(self.model, path), cache[f"{at}hook_z"]
                bias = bias_of(projection, z.flatten(-2))
                made = recording.of(module_path(path))[call_number(path) or 0].output
                made = made.transpose(0, 1) if place.stack.positions_first else made
                yield f"{at}hook_z", head_results(projection, z).sum(-2) + bias, made
                bias = bias if step.post else step.added(bias, module_at(self.model, place.path))
                yield f"{at}hook_result", cache[f"{at}hook_result"].sum(-2) + bias, cache[place.added]

        self.add_worst("z through W_O gives attn_out", pairs())

    def resid_mid_reaches_both(self) -> None:
        """Halving resid_mid reaches both branches."""

        seen: dict[str, Tensor] = {}

        def halve(x: Tensor, hook: Hook) -> Tensor:
            seen[hook.name] = x.clone()
            return x * 0.5

        # All at once: what a layer makes of halved streams is compared with itself.
        middles = list(self.middles())
        names = [name for mid, after, added, _ in middles for name in (mid, after, *added)]

        def pairs() -> Iterable[tuple[str, Tensor, Tensor]]:
            if not middles:
                return
            with self.bridge.hooks(fwd_hooks=[([mid for mid, *_ in middles], halve)]):
                cache = self.cache(list(dict.fromkeys(names)))
            for mid, after, _, summed in middles:
                yield mid, cache[mid], seen[mid] * 0.5
                # What leaves a step is halved in its turn, where that is another middle.
                total = seen[after] if after in seen else cache[after]
                yield mid, summed(cache), total

        self.add_worst("halving resid_mid reaches both branches", pairs())

    def layer_runs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The logits of runs that start at a layer with what another stopped at, and those of a whole run."""
        # Each layer alone, on what the one before it made; the logits from each of a few of them, and from the end.
        n, given, stack = self.cfg.n_layers, Kwargs(self.more), self.bridge.architecture.stack
        more = Kwargs(with_stream(self.bridge.core, self.tokens, self.more))
        others = (part.keys_of for block in stack.every_block for part in block.attentions)
        last = min([n, *(each for each in others if each is not None)])
        residual = self.bridge(self.tokens, stop_at_layer=0, **given)
        for layer in range(n + 1):
            if layer in (0, n // 2, n - 1, n) and (layer <= last or layer == n):
                yield f"layer {layer}", self.bridge(residual, start_at_layer=layer, **more), self.plain
            if layer < last:
                residual = self.bridge(residual, start_at_layer=layer, stop_at_layer=layer + 1, **more)
            elif layer < n:  # a later one reads its keys, or it reads those of another
                residual = self.bridge(self.tokens, stop_at_layer=layer + 1, **given)

    def starting_after_stopping(self) -> None:
        """start_at_layer after stop_at_layer gives the full logits."""
        name = "start_at_layer after stop_at_layer gives the full logits"
        if reason := self.bridge.no_layer_runs:
            self.add(name, True, f"does not apply: {reason}")
        else:
            self.add_worst(name, self.layer_runs())

    def embeddings_in_place_of_tokens(self) -> None:
        """Rows of W_E in place of tokens give the logits of the tokens."""
        name, stack = EMBEDDED, self.bridge.architecture.token_stack
        takes_none = stack is None or stack.embedding.given == "other" or not may_take(self.bridge.core, _EMBEDS)
        if takes_none or self.tokens.is_floating_point() or any(x.is_floating_point() for x in self.more.values()):
            self.add(name, True, "does not apply")
            return
        weights = Weights(self.bridge.architecture, self.model, self.cfg).getters
        try:
            rows = (weights.get("embed.W_E") or weights["embed.embed.W_E"])()[self.tokens]
            made = self.bridge(rows, **Kwargs(self.more))
        except WRONG as error:  # which whoever gives it embeddings is told
            self.add(name, True, f"does not apply: {one_line(error)}")
        else:
            self.add_worst(name, [("logits", made, self.plain)])

    def attributions_are_the_logits(self) -> None:
        """What all terms of the stream add to the difference of two logits is that difference."""
        weights = Weights(self.bridge.architecture, self.model, self.cfg).getters
        if "unembed.W_U" not in weights or self.tokens.is_floating_point() or self.plain.ndim != 3:
            self.add(ATTRIBUTED, True, "does not apply")
            return
        one, other = 1, 2
        try:
            cache: Any = self.bridge.run_with_cache(self.tokens, names_filter=light_points(self.bridge), **self.more)[1]
            parts: Tensor = cache.logit_attrs(cache.decompose_resid(), one, other, norm_weights=True).double()
        except WRONG as error:  # which whoever asks for it is told
            self.add(ATTRIBUTED, True, f"does not apply: {one_line(error)}")
            return
        direction = weights["unembed.W_U"]()[:, one].double() - weights["unembed.W_U"]()[:, other].double()
        total = parts.sum(0)
        if get := weights.get("unembed.b_U"):
            total = total + (get()[one] - get()[other]).double()
        if get := weights.get("ln_final.b"):
            total = total + get().double() @ direction
        logits, cap = self.plain.double(), self.bridge.architecture.readout.soft_cap
        logits = logits if cap is None else torch.atanh(logits / cap) * cap
        size = max(1.0, float(parts.abs().max()), float(logits[..., [one, other]].abs().max()))
        self.add_worst(ATTRIBUTED, [("logits", total / size, (logits[..., one] - logits[..., other]) / size)])

    def starting_at_a_block(self) -> None:
        """A block that runs alone makes what it makes in a run from the start."""
        first, given = min(1, self.cfg.n_layers - 1), Kwargs(self.more)
        more = Kwargs(with_stream(self.bridge.core, self.tokens, self.more))
        if any(part.keys_of is not None for part in self.bridge.architecture.stack.block_at(first).attentions):
            first = 0

        def pairs() -> Iterator[tuple[str, Tensor, Tensor]]:
            before, behind = (self.bridge(self.tokens, stop_at_layer=layer, **given) for layer in (first, first + 1))
            alone = self.bridge(before, start_at_layer=first, stop_at_layer=first + 1, **more)
            yield f"layer {first}", alone, behind

        if not self.bridge.no_layer_runs:
            self.add_worst("a block that runs alone makes what it makes in a run from the start", pairs())

    def nothing_left_behind(self) -> None:
        """No torch hook and no replaced forward is there that was not there before."""
        left = self.count_hooks() - self.hooks_before
        patched = [n for n, m in self.model.named_modules() if "forward" in m.__dict__ and _is_ours(m.forward)]
        self.add("no torch hook is left behind", not left and not patched, f"{left} hooks, {len(patched)} patches")


def _said_otherwise(axes: Sequence[str], sizes: Sequence[int | None], seen: Sequence[int]) -> str:
    """Which keys of `config_values` would say the sizes that were seen, where sizes alone are other ones."""
    if len(seen) != len(axes):
        return ""
    keys = {f.name for f in fields(ModelConfig)}
    wrong = [(axis, size, x) for axis, size, x in zip(axes, sizes, seen, strict=True) if size not in (None, x)]
    told = "; ".join(
        f"{axis} is {size} (config_values={{{axis!r}: {x}}} says another)" for axis, size, x in wrong if axis in keys
    )
    return f": {told}" if told else ""


def _is_ours(forward: object) -> bool:
    return type(forward).__module__.split(".")[0] == "bridge"


# ----------------------------------------------------------------------------------------------------------------------
# Whether an edit at a hook point changes what the model computes behind it: a batch row for each point.
# ----------------------------------------------------------------------------------------------------------------------


#: So many rows are in one run at most; fewer where a block scans, of which each row may take gigabytes.
ROWS, ROWS_OF_SCANS = 48, 6
_PRE, _POST = ".hook_resid_pre", ".hook_resid_post"
#: Runs a number of rows with hooks, and returns what is compared, a row each.
Run = Callable[[int, Sequence[NamedHook]], Tensor]


class Edits:
    """Edits of one row each, compared bit by bit with the same run whose hooks write back what they read.

    Args:
        bridge: the bridge.
        few, whole: what is run, by the names of the model's own arguments: a short text where it takes one, and all.
        alone: a block can be run alone; else all run in one pass, each on what it is given without edits.
        step: told what was tried, and at how many points.
    """

    def __init__(self, bridge: Bridge, few: Given, whole: Given, alone: bool, step: Callable[[str, int], None]) -> None:
        self.bridge, self._few, self._whole, self._alone, self._step = bridge, few, whole, alone, step

    def without_effect(self, names: list[str], known: Collection[str] = ()) -> dict[str, str]:
        """The hook points of which no edit changes anything, with the reason.

        Args:
            names: of those that are looked at.
            known: of those of which an edit is known to change the logits.

        One inside of a block has an effect where its edit changes what leaves the block, and an edit of what leaves
        that block changes the logits. All others, and those of which that is not seen, are tried to the logits.
        """
        ends = {name: end for name in names if (end := self._end(name)) != name and (end in names or end in known)}
        inside = self._inside(list(ends)) if self._alone else self._inside_together(list(ends))
        reached = self._reaching(self._few, [name for name in names if name not in inside])
        reached |= {name for name in inside if ends[name] in reached or ends[name] in known}
        reached |= self._reaching(self._whole, [name for name in names if name not in reached])
        return dict.fromkeys([name for name in names if name not in reached], "an edit changes nothing")

    def _end(self, name: str) -> str:
        """The hook point where the block ends that one is inside of; "" where that is no block of the first list."""
        depth = self.bridge.hook_dict[name].point.depth
        return f"blocks.{depth}.hook_resid_post" if name.startswith(f"blocks.{depth}.") else ""

    def _inside(self, names: list[str]) -> set[str]:
        """Those of which an edit changes what leaves their block."""
        found: set[str] = set()
        layers = [self.bridge.hook_dict[name].point.depth for name in names]
        if not layers:
            return found
        tokens, more = split(self.bridge.core, self._few)
        residual = self.bridge(tokens, stop_at_layer=0, **Kwargs(more))
        for layer in range(max(layers) + 1):
            here = [name for name, at in zip(names, layers, strict=True) if at == layer]

            def run(times: int, hooks: Sequence[NamedHook], stream: Tensor = residual, layer: int = layer) -> Tensor:
                more = with_stream(self.bridge.core, *split(self.bridge.core, repeated(self._few, times)))
                with self.bridge.hooks(fwd_hooks=hooks):
                    rows = stream.repeat(times, *(1 for _ in stream.shape[1:]))
                    return self.bridge(rows, start_at_layer=layer, stop_at_layer=layer + 1, **more)

            try:
                found |= self._changed(here, run, f"block {layer}")
            except WRONG as error:
                one_line(error)  # this block does not run so: its points are tried in whole runs
                residual = self.bridge(tokens, stop_at_layer=layer + 1, **Kwargs(more))
            else:
                residual = run(1, [])
        return found

    def _inside_together(self, names: list[str]) -> set[str]:
        """The same where no block runs alone: one pass edits a point of every block, each given what it was without."""
        pres, posts = ([name for name in self.bridge.hook_dict if name.endswith(end)] for end in (_PRE, _POST))
        streams: dict[str, Tensor] = {}
        found: set[str] = set()

        def keep(x: Tensor, hook: Hook) -> None:
            streams[hook.name] = x.clone()

        def changed(some: list[str]) -> set[str]:
            """Those of which an edit changes its row of what leaves its block."""
            of_layers: dict[int, list[str]] = {}
            for name in some:
                of_layers.setdefault(self.bridge.hook_dict[name].point.depth, []).append(name)
            rows = {name: row for each in of_layers.values() for row, name in enumerate(each)}
            times = -(-max(map(len, of_layers.values())) // next(iter(self._few.values())).shape[0])
            tokens, more = split(self.bridge.core, repeated(self._few, times))
            seen: list[dict[str, list[float]]] = [{}, {}]

            def reset(x: Tensor, hook: Hook) -> Tensor:
                return streams[hook.name].repeat(times, *(1 for _ in x.shape[1:])).to(x)

            for made, edit in zip(seen, (_same, _edit_of(rows)), strict=True):

                def look(x: Tensor, hook: Hook, made: dict[str, list[float]] = made) -> None:
                    made[hook.name] = _digests(x)

                hooks: list[NamedHook] = [(pres, reset), (some, edit), (posts, look)]
                self.bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more)
            plain, edited = seen
            return {name for name, row in rows.items() if edited[end := self._end(name)][row] != plain[end][row]}

        try:
            tokens, more = split(self.bridge.core, self._few)
            self.bridge.run_with_hooks(tokens, fwd_hooks=[(pres, keep)], **more)
            for some in filter(None, self._apart(names)):
                found |= (first := changed(some))
                hidden = [name for name in some if name not in first]
                found |= changed(hidden) if hidden else set()
                self._step("edits, all blocks", len(some))
        except WRONG as error:
            one_line(error)  # its points are tried in whole runs
        return found

    def _apart(self, names: list[str]) -> tuple[list[str], list[str]]:
        """Those that each head has, which take the most memory, by themselves.

        A run may edit inputs of heads, or the norm that they read through, not both.
        """
        heavy = [name for name in names if self.bridge.hook_dict[name].point.group == "heavy"]
        return [name for name in names if name not in set(heavy)], heavy

    def _reaching(self, given: Given, names: list[str]) -> set[str]:
        """Those of which an edit changes the logits."""

        def run(times: int, hooks: Sequence[NamedHook]) -> Tensor:
            tokens, more = split(self.bridge.core, repeated(given, times))
            return self.bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more)

        return self._changed(names, run, "logits")

    def _changed(self, names: list[str], run: Run, where: str) -> set[str]:
        """Those of which an edit changes its row of what a run returns."""
        found: set[str] = set()
        scans = any(isinstance(step.part, Mixer) and step.part.mixes for step in self.bridge.architecture.steps())
        rows = ROWS_OF_SCANS if scans else ROWS
        apart = self._apart(names)
        for some in (each[start : start + rows] for each in apart for start in range(0, len(each), rows)):
            changed = self._changed_together(some, run)
            # Where every reader of a tensor is edited by itself, an edit of the tensor reaches none of them.
            hidden = [name for name in some if name not in changed]
            found |= changed | (self._changed_together(hidden, run) if changed and hidden else set())
            self._step(f"edits, {where}", len(some))
        return found

    def _changed_together(self, names: list[str], run: Run) -> set[str]:
        times = -(-len(names) // next(iter(self._few.values())).shape[0])
        rows = {name: row for row, name in enumerate(names)}
        plain, edited = (run(times, [(names, hook)]) for hook in (_same, _edit_of(rows)))
        return {name for name, row in rows.items() if not torch.equal(edited[row], plain[row])}


def _digests(x: Tensor) -> list[float]:
    """A number for each row, another where any of its numbers is."""
    rows = x.detach().double().flatten(1)
    noise = torch.rand(rows.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    return (rows @ noise.to(rows.device)).tolist()


def _same(x: Tensor, hook: Hook) -> Tensor:
    return x


def _edit_of(rows: dict[str, int]) -> Callable[[Tensor, Hook], Tensor]:
    def edit(x: Tensor, hook: Hook) -> Tensor:
        y, old = x.clone(), x[rows[hook.name]]
        # What is large becomes small, and the other way round: experts are chosen by what is largest.
        noise = (1.8 * torch.rand(old.shape, generator=torch.Generator().manual_seed(0)) - 0.9).to(x)
        y[rows[hook.name]] = torch.where(torch.isfinite(old), old * (1 + noise) + noise, old)
        return y

    return edit
