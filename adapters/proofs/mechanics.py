"""What every hook point promises, whatever it means: it fires once, writes back, reaches readers, leaves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from adapters.inputs.made import arguments_of
from adapters.linear import bias_of, head_results
from adapters.paths import call_number, module_at, module_path
from adapters.proofs.evidence import Place, places_of, recorded
from adapters.proofs.protocol import Activations, Bridge, Hook, NamedHook
from adapters.proofs.report import WRONG, Check, said
from adapters.views import Kwargs, SinkPattern


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
        output = self.model(**arguments_of(bridge.core, tokens, more))
        self.plain: Tensor = output.logits if hasattr(output, "logits") else output[0]
        self.names = list(bridge.hook_dict)

    def quick(self) -> list[Check]:
        """The checks that take a few runs."""
        return self._all(self.unhooked, self.every_hook_fires)

    def full(self) -> list[Check]:
        """The checks that take a run for each kind of hook point, or for each layer."""
        return self._all(
            self.writing_back,
            self.pattern_rows,
            self.z_through_w_o,
            self.resid_mid_reaches_both,
            self.starting_after_stopping,
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
                self.add((check.__doc__ or check.__name__).strip().rstrip("."), False, said(error))
        return self.checks

    def add(self, name: str, passed: bool, detail: str = "") -> None:
        self.checks.append(Check(name, passed, detail))

    def close(self, a: Tensor, b: Tensor) -> tuple[bool, float]:
        worst = (a.double() - b.double()).abs().max().item()
        return worst <= self.tolerance * max(1.0, b.double().abs().max().item()), worst

    def add_worst(self, name: str, pairs: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """One check that holds if all pairs agree; it shows the worst."""
        results = [(*self.close(a, b), label) for label, a, b in pairs]
        if not results:
            self.add(name, True, "does not apply")
            return
        worst = max(results, key=lambda result: (not result[0], result[1]))
        self.add(name, all(ok for ok, _, _ in results), f"{len(results)} compared, worst {worst[1]:.1e} at {worst[2]}")

    def count_hooks(self) -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.model.modules())

    def logits(self, fwd_hooks: Sequence[NamedHook] = ()) -> Tensor:
        return self.bridge.run_with_hooks(self.tokens, fwd_hooks=list(fwd_hooks), **self.more)

    def cache(self, names: Sequence[str] | None = None) -> Activations:
        return self.bridge.run_with_cache(self.tokens, names_filter=names, **self.more)[1]

    def unhooked(self) -> None:
        """Unhooked logits are the model's own."""
        self.add("unhooked logits are the model's own, bit by bit", torch.equal(self.logits(), self.plain))

    def expected_shape(self, axes: str, first: Sequence[int]) -> list[int | None]:
        """The sizes of axes, None where the model does not say; `first` is the shape of the first stream."""
        pos = first[1] if self.tokens.is_floating_point() else self.tokens.shape[1]
        sizes: dict[str, int | None] = {"batch": self.tokens.shape[0], "n_key_value_heads": self.cfg.n_kv_heads}
        sizes |= {"n_experts": self.cfg.num_experts, "pos": pos, "key_pos": pos}
        if isinstance(decoder := self.more.get("decoder_input_ids"), Tensor):
            sizes |= {"decoder_pos": decoder.shape[1], "decoder_key_pos": decoder.shape[1]}
        sizes |= {axis: int(axis) for axis in axes.split() if axis.isdigit()}
        return [sizes[axis] if axis in sizes else getattr(self.cfg, axis, None) for axis in axes.split()]

    def every_hook_fires(self) -> None:
        """Every hook point fires once, with its declared shape."""
        seen: dict[str, list[list[int]]] = {name: [] for name in self.names}

        def look(x: Tensor, hook: Hook) -> None:
            seen[hook.name].append(list(x.shape))

        wrong = []
        try:
            self.logits([(self.names, look)])
        except WRONG as error:
            wrong = self.what_raises() or [said(error)]
            seen = {}
        first = next((shapes[0] for name, shapes in seen.items() if name.endswith("resid_pre") and shapes), [0, 0])
        for name, shapes in seen.items():
            expected = self.expected_shape(self.bridge.hook_dict[name].point.axes, first)
            fits = len(shapes) == 1 and len(shapes[0]) == len(expected)
            if not fits or any(want not in (None, size) for want, size in zip(expected, shapes[0], strict=True)):
                wrong.append(f"{name} {shapes} for {expected}")
        self.add(
            "every hook point fires once, with its declared shape",
            not wrong,
            f"{len(self.names)} hook points" if not wrong else "; ".join(wrong[:3]),
        )

    def what_raises(self) -> list[str]:
        """The first hook points at which a listener alone is enough to make a run fail, with the error."""
        found: list[str] = []
        for name in self.names:
            try:
                self.logits([(name, lambda x, hook: None)])
            except WRONG as error:
                found.append(f"{name}: {said(error)}")
                if len(found) == 3:
                    break
        return found

    def writing_back(self) -> None:
        """Writing back what was read changes nothing."""
        # Many kinds of hook point at once, in all layers; where that differs, half of them, and so on, and then each.

        def same(x: Tensor, hook: Hook) -> Tensor:
            return x

        # Which experts are chosen can depend on the last digit: each token keeps those that it has without hooks.
        routes = [name for name in self.names if name.endswith("hook_expert_indices")]
        chosen: Activations = self.cache(routes) if routes else {}

        def keep(x: Tensor, hook: Hook) -> Tensor:
            return chosen[hook.name]

        def result(names: list[str]) -> Tensor:
            kept: list[NamedHook] = [(route, keep) for route in routes if route not in names]
            return self.logits([(names, same), *kept])

        def results(kinds: list[list[str]]) -> Iterator[tuple[str, Tensor, Tensor]]:
            names = [name for kind in kinds for name in kind]
            together = result(names)
            if len(names) == 1 or self.close(together, self.plain)[0]:
                yield from ((kind[0], together, self.plain) for kind in kinds)
            elif len(kinds) > 1:
                yield from results(kinds[: len(kinds) // 2])
                yield from results(kinds[len(kinds) // 2 :])
            else:
                yield from ((name, result([name]), self.plain) for name in names)

        kinds = self.kinds()
        found = (pair for start in range(0, len(kinds), 18) for pair in results(kinds[start : start + 18]))
        self.add_worst("writing back what was read changes nothing", found)

    def kinds(self) -> list[list[str]]:
        """The hook points by what they are, whatever their layer or expert."""
        kinds: dict[str, list[str]] = {}
        for name in self.names:
            kinds.setdefault(".".join(part for part in name.split(".") if not part.isdigit()), []).append(name)
        return list(kinds.values())

    def middles(self) -> Iterator[tuple[str, str, list[str], Callable[[Activations], Tensor]]]:
        """Each stream between two steps that is written through: its name, the next, what is added, and the sum."""
        for place in places_of(self.bridge):
            first, prefix = place.named, place.prefix
            if first.first and first.before.startswith("hook_resid_mid"):
                steps = place.stack.block_at(place.layer).named
                added = [f"{prefix}hook_{named.name}_out" for named in steps if named.after == first.after]
                if first.step.mix:
                    weights = (f"{prefix}hook_{first.name}_{what}" for what in ("write", "keep"))
                    added += [name for name in weights if name in self.bridge.hook_dict]
                yield prefix + first.before, prefix + first.after, added, partial(self._total, place, added)

    def _total(self, place: Place, added: Sequence[str], cache: Activations) -> Tensor:
        """What a block makes of a stream and what is added to it."""
        step, stream = place.named.step, cache[place.prefix + place.named.before]
        if step.mix:
            result, write, *keep = (cache[name] for name in added)
            return step.mix.of(stream, result, write, keep[0] if keep else None)
        carried = stream if step.carry is None else step.carry.of(stream, module_at(self.model, place.path))
        return sum((cache[name] for name in added), carried)

    def pattern_rows(self) -> None:
        """Pattern rows sum to one."""
        patterns = [name for name in self.names if name.endswith("hook_pattern")]
        if not patterns:
            self.add("pattern rows sum to one", True, "does not apply")
            return
        views = {name: self.bridge.hook_dict[name].view for name in patterns}
        sunk = {name: view.sinks for name, view in views.items() if isinstance(view, SinkPattern)}
        scores = {name: name.replace("hook_pattern", "hook_attn_scores") for name in sunk}
        cache = self.cache([*patterns, *scores.values()])

        def pairs() -> Iterable[tuple[str, Tensor, Tensor]]:
            for name in patterns:
                sums = cache[name].sum(-1)
                right = torch.ones_like(sums)
                if name in sunk:
                    # What goes to no token is the sink's part of a softmax over scores and sink.
                    module = module_at(self.model, self.bridge.hook_dict[name].point.site.path)
                    sink = getattr(module, sunk[name]).double().view(-1, 1)
                    right = (cache[scores[name]].double().logsumexp(-1) - sink).sigmoid()
                yield name, sums, right

        self.add_worst("pattern rows sum to one" + (" less what sinks take" if sunk else ""), pairs())

    def z_through_w_o(self) -> None:
        """z through W_O gives attn_out."""
        places = [place for place in places_of(self.bridge) if f"{place.part}hook_result" in self.names]
        sites = {place.part: self.bridge.hook_dict[f"{place.part}hook_z"].point.site.path for place in places}
        ends = {
            place.part: f"{place.part}hook_out"
            if place.named.step.post
            else f"{place.prefix}hook_{place.named.name}_out"
            for place in places
        }
        names = [f"{part}{name}" for part in sites for name in ("hook_z", "hook_result")] + list(ends.values())
        with recorded(self.bridge, [module_path(path) for path in sites.values()]) as calls:
            cache = self.cache(names) if places else {}

        def pairs() -> Iterable[tuple[str, Tensor, Tensor]]:
            for place in places:
                at, step, path = place.part, place.named.step, sites[place.part]
                projection, z = module_at(self.model, path), cache[f"{at}hook_z"]
                bias = bias_of(projection, z.flatten(-2))
                made = calls[module_path(path)][call_number(path) or 0].output
                yield f"{at}hook_z", head_results(projection, z).sum(-2) + bias, made
                bias = bias if step.post else step.added(bias, module_at(self.model, place.path))
                yield f"{at}hook_result", cache[f"{at}hook_result"].sum(-2) + bias, cache[ends[at]]

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

    def starting_after_stopping(self) -> None:
        """start_at_layer after stop_at_layer gives the full logits."""
        name = "start_at_layer after stop_at_layer gives the full logits"
        reason = self.bridge.no_layer_runs
        if reason:
            self.add(name, True, f"does not apply: {reason}")
            return

        def pairs() -> Iterable[tuple[str, Tensor, Tensor]]:
            # Each layer alone, on what the one before it made; then the logits from each of a few of them.
            n, more = self.cfg.n_layers, Kwargs(self.more)
            residual = self.bridge(self.tokens, stop_at_layer=0, **more)
            for layer in range(n):
                if layer in (0, n // 2, n - 1):
                    yield f"layer {layer}", self.bridge(residual, start_at_layer=layer, **more), self.plain
                if layer < n - 1:
                    residual = self.bridge(residual, start_at_layer=layer, stop_at_layer=layer + 1, **more)

        self.add_worst(name, pairs())

    def nothing_left_behind(self) -> None:
        """No torch hook and no replaced forward is there that was not there before."""
        left = self.count_hooks() - self.hooks_before
        patched = [n for n, m in self.model.named_modules() if "forward" in m.__dict__ and _is_ours(m.forward)]
        self.add("no torch hook is left behind", not left and not patched, f"{left} hooks, {len(patched)} patches")


def _is_ours(forward: object) -> bool:
    return type(forward).__module__.split(".")[0] == "bridge"
