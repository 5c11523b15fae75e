"""`verify`: checks on a live model what every adapter promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from adapters.architecture import Architecture, NamedStep
from adapters.attention import HeadResults
from adapters.config import ModelConfig, config_of
from adapters.linear import bias_of, head_results
from adapters.points import Point
from adapters.views import SinkPattern, View


@runtime_checkable
class Hook(Protocol):
    """A hook point of a bridge, as far as it is needed here."""

    name: str
    point: Point
    view: View


#: What is called with an activation and its hook point; a tensor that it returns takes the activation's place.
HookFunction = Callable[[Tensor, Hook], Tensor | None]
#: One name or several, and the function.
NamedHook = tuple[str | list[str], HookFunction]


@runtime_checkable
class Activations(Protocol):
    """A cache, as far as it is needed here."""

    def __getitem__(self, name: str, /) -> Tensor: ...


@runtime_checkable
class Bridge(Protocol):
    """What is verified: a `bridge.TransformerBridge`, as far as it is needed here."""

    cfg: ModelConfig
    training: bool
    architecture: Architecture
    no_layer_runs: str

    @property
    def core(self) -> nn.Module: ...

    @property
    def original_model(self) -> nn.Module: ...

    @property
    def hook_dict(self) -> Mapping[str, Hook]: ...

    def __call__(
        self, input: Tensor, *, start_at_layer: int | None = None, stop_at_layer: int | None = None
    ) -> Tensor: ...

    def run_with_hooks(self, input: Tensor, *, fwd_hooks: Sequence[NamedHook], **kwargs: Any) -> Tensor: ...

    def run_with_cache(
        self, input: Tensor, *, names_filter: Sequence[str] | None, **kwargs: Any
    ) -> tuple[Any, Activations]: ...

    def hooks(self, *, fwd_hooks: Sequence[NamedHook]) -> AbstractContextManager[object]: ...

    def train(self, mode: bool = True) -> object: ...


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


def verify(bridge: Bridge, tokens: Tensor | None = None) -> Report:
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
    bridge.train(False)
    try:
        with torch.no_grad():
            return _Verification(bridge, tokens).run()
    finally:
        bridge.train(was_training)


class _Verification:
    def __init__(self, bridge: Bridge, tokens: Tensor | None) -> None:
        self.bridge, self.cfg, self.model = bridge, bridge.cfg, bridge.original_model
        if tokens is None:
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randint(0, self.cfg.d_vocab, (2, 9), generator=generator)
        self.tokens = tokens.to(self.cfg.device)
        # A decoder of its own is given a shorter text, so that its shapes cannot be mistaken for the encoder's.
        two = config_of(bridge.core).is_encoder_decoder
        self.more: dict[str, Tensor] = {"decoder_input_ids": self.tokens[:, :-4]} if two else {}
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

    def logits(self, fwd_hooks: Sequence[NamedHook] = ()) -> Tensor:
        return self.bridge.run_with_hooks(self.tokens, fwd_hooks=list(fwd_hooks), **self.more)

    def cache(self, names: Sequence[str] | None = None) -> Activations:
        return self.bridge.run_with_cache(self.tokens, names_filter=names, **self.more)[1]

    def unhooked(self) -> None:
        self.add("unhooked logits are the model's own, bit by bit", torch.equal(self.logits(), self.plain))

    def expected_shape(self, axes: str) -> list[int | None]:
        batch, pos = self.tokens.shape
        sizes: dict[str, int | None] = {
            "batch": batch,
            "pos": pos,
            "key_pos": pos,
            "n_key_value_heads": self.cfg.n_kv_heads,
        }
        sizes |= {"decoder_pos": pos - 4, "decoder_key_pos": pos - 4, "n_experts": self.cfg.num_experts}
        sizes |= {axis: int(axis) for axis in axes.split() if axis.isdigit()}
        return [sizes[axis] if axis in sizes else getattr(self.cfg, axis, None) for axis in axes.split()]

    def every_hook_fires(self, names: list[str]) -> None:
        seen: dict[str, list[list[int]]] = {name: [] for name in names}

        def look(x: Tensor, hook: Hook) -> None:
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
        def same(x: Tensor, hook: Hook) -> Tensor:
            return x

        # Which experts are chosen can depend on the last digit: each token keeps those that it has without hooks.
        routes = [name for name in names if name.endswith("hook_expert_indices")]
        chosen: Activations = self.cache(routes) if routes else {}

        def keep(x: Tensor, hook: Hook) -> Tensor:
            return chosen[hook.name]

        def result(name: str) -> tuple[str, Tensor, Tensor]:
            kept: list[NamedHook] = [(route, keep) for route in routes if route != name]
            return name, self.logits([(name, same), *kept]), self.plain

        self.add_worst("writing back what was read changes nothing", (result(name) for name in names))

    def blocks(self) -> Iterator[tuple[str, tuple[NamedStep, ...]]]:
        """Each block that is there: what its hook points begin with, and its steps."""
        for stack in self.bridge.architecture.stacks:
            index = 0
            while f"{stack.name}.{index}.hook_resid_pre" in self.bridge.hook_dict:
                yield f"{stack.name}.{index}.", stack.block_at(index).named
                index += 1

    def residual_sums(self) -> None:
        """Each stream is the one before it and what the steps between them add."""
        sums: dict[str, list[tuple[str, list[str], str]]] = {
            "resid_pre + attn_out = resid_mid": [],
            "resid_mid + mlp_out = resid_post": [],
        }
        for prefix, steps in self.blocks():
            for first in (named for named in steps if named.first):
                group = [named for named in steps if named.after == first.after]
                terms = [first.before, *(f"hook_{named.name}_out" for named in group)]
                left = " + ".join(term.removeprefix("hook_") for term in terms)
                total = [prefix + term for term in terms]
                label = f"{left} = {first.after.removeprefix('hook_')}"
                sums.setdefault(label, []).append((prefix + first.after, total, prefix + first.after))
        needed = {name for entries in sums.values() for _, terms, after in entries for name in (*terms, after)}
        cache = self.cache(sorted(needed))
        for label, entries in sums.items():
            pairs = [(at, sum((cache[t] for t in terms[1:]), cache[terms[0]]), cache[to]) for at, terms, to in entries]
            self.add_worst(label, pairs)

    def middles(self) -> Iterator[tuple[str, str, str, list[str]]]:
        """Each stream between two steps that is written through: its prefix, its name, the next, what is added."""
        for prefix, steps in self.blocks():
            for first in (named for named in steps if named.first):
                if first.before.startswith("hook_resid_mid"):
                    added = [f"{prefix}hook_{named.name}_out" for named in steps if named.after == first.after]
                    yield prefix, prefix + first.before, prefix + first.after, added

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
                view = hooks[name].view
                factor = view.factor if isinstance(view, HeadResults) else 1.0
                yield name, cache[name].sum(-2) / factor + bias_of(projection, z.flatten(-2)), seen[0]

        self.add_worst("z through W_O gives attn_out", pairs())

    def resid_mid_reaches_both(self) -> None:
        def halve(x: Tensor, hook: Hook) -> Tensor:
            return x * 0.5

        def pairs() -> Iterable[tuple[str, Tensor, Tensor]]:
            for _, mid, after, added in self.middles():
                before = self.cache([mid])
                with self.bridge.hooks(fwd_hooks=[(mid, halve)]):
                    cache = self.cache([mid, after, *added])
                yield mid, cache[mid], before[mid] * 0.5
                yield mid, sum((cache[name] for name in added), cache[mid]), cache[after]

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


def _is_ours(forward: object) -> bool:
    return type(forward).__module__.split(".")[0] == "bridge"
