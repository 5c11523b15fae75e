"""`verify`: checks on a live model what every adapter promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adapters.linear import bias_of, head_results
from adapters.views import SinkPattern


@dataclass(frozen=True)
class Check:
    """One promise: its name, whether it holds, and what was found."""

    name: str
    passed: bool
    detail: str = ""


@dataclass
class Report:
    """What `verify` found.

    Attributes:
        model: the model's name.
        checks: in the order they were made.
    """

    model: str
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every promise holds."""
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"{self.model}: {'verified' if self.passed else 'NOT verified'}"]
        lines += [f"  {'ok  ' if c.passed else 'FAIL'}  {c.name:<{width}}  {c.detail}".rstrip() for c in self.checks]
        return "\n".join(lines)


def verify(bridge: Any, tokens: Tensor | None = None) -> Report:
    """Checks what every adapter promises.

    Nothing is trained or changed; the model is run some dozens of times on a short input.

    Args:
        bridge: a bridge around any model with weights.
        tokens: ``[batch, pos]`` to run; None: 2 random rows of 9.

    Returns:
        A report; ``report.passed`` says whether everything holds, ``print(report)`` shows the table.

    Raises:
        ValueError: the model has no weights to run (it is on the ``meta`` device).

    Example:
        >>> from adapters import verify
        >>> from bridge import TransformerBridge
        >>> verify(TransformerBridge.boot_embedded()).passed
        True
    """
    if bridge.cfg.device.type == "meta":
        raise ValueError("this model has no weights (load_weights=False), so there is nothing to run")
    was_training = bridge.training
    bridge.eval()
    try:
        with torch.no_grad():
            return _Verification(bridge, tokens).run()
    finally:
        bridge.train(was_training)


class _Verification:
    def __init__(self, bridge: Any, tokens: Tensor | None) -> None:
        self.bridge, self.cfg, self.model = bridge, bridge.cfg, bridge.original_model
        if tokens is None:
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randint(0, self.cfg.d_vocab, (2, 9), generator=generator)
        self.tokens = tokens.to(self.cfg.device)
        # A decoder of its own is given a shorter text, so that its shapes cannot be mistaken for the encoder's.
        self.more = {"decoder_input_ids": self.tokens[:, :-4]} if bridge.core.config.is_encoder_decoder else {}
        # What a sum of a few rounded numbers may differ by, relative to the largest of them.
        self.tolerance = {torch.float64: 1e-10, torch.float32: 2e-5}.get(self.cfg.dtype, 5e-2)
        self.report = Report(self.cfg.model_name)

    def run(self) -> Report:
        self.hooks_before = self.count_hooks()
        self.plain = self.model(input_ids=self.tokens, **self.more)[0]
        names = list(self.bridge.hook_dict)
        for check in (
            self.unhooked,
            lambda: self.every_hook_fires(names),
            lambda: self.writing_back(names),
            self.residual_sums,
            self.pattern_rows,
            self.z_through_w_o,
            self.resid_mid_reaches_both,
            self.starting_after_stopping,
            self.nothing_left_behind,
        ):
            check()
        return self.report

    def add(self, name: str, passed: bool, detail: str = "") -> None:
        self.report.checks.append(Check(name, passed, detail))

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

    def logits(self, fwd_hooks: list[Any] | None = None) -> Tensor:
        return self.bridge.run_with_hooks(self.tokens, fwd_hooks=fwd_hooks or [], **self.more)

    def cache(self, names: Any = None) -> Any:
        return self.bridge.run_with_cache(self.tokens, names_filter=names, **self.more)[1]

    def unhooked(self) -> None:
        self.add("unhooked logits are the model's own, bit by bit", torch.equal(self.logits(), self.plain))

    def expected_shape(self, axes: str) -> list[int | None]:
        batch, pos = self.tokens.shape
        sizes = {"batch": batch, "pos": pos, "key_pos": pos, "n_key_value_heads": self.cfg.n_kv_heads}
        sizes |= {"decoder_pos": pos - 4, "decoder_key_pos": pos - 4, "n_experts": self.cfg.num_experts}
        sizes |= {axis: int(axis) for axis in axes.split() if axis.isdigit()}
        return [sizes[axis] if axis in sizes else getattr(self.cfg, axis, None) for axis in axes.split()]

    def every_hook_fires(self, names: list[str]) -> None:
        seen: dict[str, list[list[int]]] = {name: [] for name in names}

        def look(x: Tensor, hook: Any) -> None:
            seen[hook.name].append(list(x.shape))

        self.logits([(names, look)])
        wrong = []
        for name, shapes in seen.items():
            expected = self.expected_shape(self.bridge.hook_dict[name].point.axes)
            fits = len(shapes) == 1 and len(shapes[0]) == len(expected)
            if not fits or any(want not in (None, size) for want, size in zip(expected, shapes[0], strict=True)):
                wrong.append(f"{name} {shapes} for {expected}")
        self.add(
            "every hook point fires once, with its declared shape",
            not wrong,
            f"{len(names)} hook points" if not wrong else "; ".join(wrong[:3]),
        )

    def writing_back(self, names: list[str]) -> None:
        def same(x: Tensor, hook: Any) -> Tensor:
            return x

        # Which experts are chosen can depend on the last digit: each token keeps those that it has without hooks.
        routes = [name for name in names if name.endswith("hook_expert_indices")]
        chosen = self.cache(routes) if routes else {}

        def keep(x: Tensor, hook: Any) -> Tensor:
            return chosen[hook.name]

        def result(name: str) -> tuple[str, Tensor, Tensor]:
            kept: list[Any] = [(route, keep) for route in routes if route != name]
            return name, self.logits([(name, same), *kept]), self.plain

        self.add_worst("writing back what was read changes nothing", (result(name) for name in names))

    def residual_sums(self) -> None:
        cache = self.cache()

        def sums(first: str, second: str, total: str) -> Iterable[tuple[str, Tensor, Tensor]]:
            for hook in self.bridge.hook_dict:
                if hook.endswith("." + first):
                    stem = hook.removesuffix(first)
                    if {stem + second, stem + total} <= set(cache):
                        yield stem + total, cache[hook] + cache[stem + second], cache[stem + total]

        def after_mlp() -> Iterable[tuple[str, Tensor, Tensor]]:
            for stem, middle in self.middles():
                yield stem, cache[middle] + cache[stem + "hook_mlp_out"], cache[stem + "hook_resid_post"]

        self.add_worst("resid_pre + attn_out = resid_mid", sums("hook_resid_pre", "hook_attn_out", "hook_resid_mid"))
        cross = list(sums("hook_resid_mid", "hook_cross_attn_out", "hook_resid_mid_cross"))
        if cross:
            self.add_worst("resid_mid + cross_attn_out = resid_mid_cross", cross)
        self.add_worst("resid_mid + mlp_out = resid_post", after_mlp())

    def middles(self) -> Iterable[tuple[str, str]]:
        """For each block in which the MLP adds to what it reads: its prefix, and the stream that enters the MLP."""
        hooks = self.bridge.hook_dict
        for name in hooks:
            if name.endswith("hook_mlp_out"):
                stem = name.removesuffix("hook_mlp_out")
                if stem + "hook_normalized_resid_post" in hooks:
                    continue  # the norm stands between the stream and the sum
                for middle in ("hook_resid_mid_cross", "hook_resid_mid"):
                    if stem + middle in hooks:
                        yield stem, stem + middle
                        break

    def pattern_rows(self) -> None:
        patterns = [name for name in self.bridge.hook_dict if name.endswith("hook_pattern")]
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
                    module = self.model.get_submodule(self.bridge.hook_dict[name].point.site.path)
                    sink = getattr(module, sunk[name]).double().view(-1, 1)
                    right = (cache[scores[name]].double().logsumexp(-1) - sink).sigmoid()
                yield name, sums, right

        self.add_worst("pattern rows sum to one" + (" less what sinks take" if sunk else ""), pairs())

    def z_through_w_o(self) -> None:
        hooks = self.bridge.hook_dict
        names = [n for n in hooks if n.endswith(".hook_result")]

        def pairs() -> Iterable[tuple[str, Tensor, Tensor]]:
            for name in names:
                z_name = name.replace("hook_result", "hook_z")
                path = hooks[z_name].point.site.path
                projection = self.model.get_submodule(path)
                seen: list[Tensor] = []
                handle = projection.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
                try:
                    cache = self.cache([z_name, name])
                finally:
                    handle.remove()
                z = cache[z_name]
                total = head_results(projection, z).sum(-2) + bias_of(projection, z.flatten(-2))
                yield name, total, seen[0]
                yield name, cache[name].sum(-2) + bias_of(projection, z.flatten(-2)), seen[0]

        self.add_worst("z through W_O gives attn_out", pairs())

    def resid_mid_reaches_both(self) -> None:
        def halve(x: Tensor, hook: Any) -> Tensor:
            return x * 0.5

        def pairs() -> Iterable[tuple[str, Tensor, Tensor]]:
            for stem, mid in self.middles():
                out, post = stem + "hook_mlp_out", stem + "hook_resid_post"
                before = self.cache([mid])
                with self.bridge.hooks(fwd_hooks=[(mid, halve)]):
                    cache = self.cache([mid, out, post])
                yield mid, cache[mid], before[mid] * 0.5
                yield mid, cache[mid] + cache[out], cache[post]

        self.add_worst("halving resid_mid reaches both branches", pairs())

    def starting_after_stopping(self) -> None:
        reason = self.bridge.no_layer_runs
        if reason:
            self.add("start_at_layer after stop_at_layer gives the full logits", True, f"does not apply: {reason}")
            return

        def pairs() -> Iterable[tuple[str, Tensor, Tensor]]:
            for layer in range(self.cfg.n_layers):
                residual = self.bridge(self.tokens, stop_at_layer=layer)
                yield f"layer {layer}", self.bridge(residual, start_at_layer=layer), self.plain

        self.add_worst("start_at_layer after stop_at_layer gives the full logits", pairs())

    def nothing_left_behind(self) -> None:
        left = self.count_hooks() - self.hooks_before
        patched = [n for n, m in self.model.named_modules() if "forward" in m.__dict__ and _is_ours(m.forward)]
        self.add("no torch hook is left behind", not left and not patched, f"{left} hooks, {len(patched)} patches")


def _is_ours(forward: Callable[..., Any]) -> bool:
    return type(forward).__module__.split(".")[0] == "bridge"
