"""Gradient rules: changes of the backward pass at hook points, for attribution.

Input: a `Rules` declaration, or its name. Output: listeners of the kind ``rule``, which leave every
value of the forward pass as it is. Each gives an activation the gradient of a surrogate: of a
detached tensor where a quantity is held, of a scaled one where a gradient is scaled. A rule for a
function (a softmax, an activation) cuts the gradient at the function's input and gives the
function's output the gradient of a surrogate of that input (`_Cut`, `_Joint`).

Errors: a part of the model without the hook point that a rule needs, before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from adapters.attention import Attention, PerHeadInput
from adapters.block import NamedStep
from adapters.feed_forward import MLP, MoE
from adapters.mixers import Mixer
from adapters.norms import Norm, NormKind, NormScale, SharedNormInput, weights_path
from adapters.points import base_path
from adapters.views import Call, Composed, Copied, View
from bridge.arguments import check_choice
from bridge.hooks.context import CURRENT, Listener, PassMemory, Scope
from bridge.hooks.hooks import GradientRule, HookPoint, with_gradient_of
from bridge.hooks.names import UnknownHookError
from bridge.run.inputs import RunnableBridge


@dataclass(frozen=True)
class Rules:
    """Gradient rules: how gradients flow backward, with every value of the forward pass unchanged.

    Named rules: ``"gim"``, of Edin et al. 2025, "GIM: Improved Interpretability for Large Language
    Models" (https://arxiv.org/abs/2505.17630); ``"relp"``, of Rezaei Jafari et al. 2025, "RelP:
    Faithful and Efficient Circuit Discovery via Relevance Patching"
    (https://arxiv.org/abs/2508.21258); ``"attnlrp"``, of Achtibat et al. 2024, "AttnLRP:
    Attention-Aware Layer-Wise Relevance Propagation for Transformers"
    (https://arxiv.org/abs/2402.05602), whose rule of the softmax is the plain gradient.

    Attributes:
        norms: ``"held"``: norms are linear; their scales have no gradient.
        softmax: ``"held"``: attention patterns have no gradient; a number: the gradient of the
            softmax at this temperature, times the temperature.
        q, k, v: factors of the gradients at queries, keys and values.
        activation: ``"held"``: the gradient of an MLP's activation function ``f`` is ``f(x) / x``
            (0 at 0).
        gate: the factor of the gradients of both factors of a gated MLP's product.
        mlps: ``"held"``: the outputs of MLPs have no gradient.

    Raises:
        ValueError: a value that is none of these, or not finite.

    Example:
        >>> from bridge import Rules
        >>> Rules(norms="held", softmax=2.0, q=0.25, k=0.25, v=0.5).changed  # "gim"
        ('norms', 'softmax', 'q', 'k', 'v')
    """

    norms: Literal["held"] | None = None
    softmax: Literal["held"] | float | None = None
    q: float = 1.0
    k: float = 1.0
    v: float = 1.0
    activation: Literal["held"] | None = None
    gate: float = 1.0
    mlps: Literal["held"] | None = None

    def __post_init__(self) -> None:
        for name in ("norms", "activation", "mlps"):
            check_choice(name, getattr(self, name), ("held", None))
        if isinstance(self.softmax, str):
            check_choice("softmax", self.softmax, ("held", None))
        elif self.softmax is not None and not 0 < self.softmax < math.inf:
            raise ValueError(f"softmax is {self.softmax}; a temperature is above 0, and finite")
        for name in ("q", "k", "v", "gate"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite")

    @property
    def temperature(self) -> float | None:
        """Return the temperature of the softmax; None without one."""
        return None if isinstance(self.softmax, str) else self.softmax

    @property
    def changed(self) -> tuple[str, ...]:
        """Return the names of the rules that change gradients."""
        return tuple(x.name for x in fields(self) if getattr(self, x.name) != x.default)


_NAMED = {
    "gim": Rules(norms="held", softmax=2.0, q=0.25, k=0.25, v=0.5),
    "relp": Rules(norms="held", softmax="held", activation="held", gate=0.5),
    "attnlrp": Rules(norms="held", q=0.25, k=0.25, v=0.5, activation="held", gate=0.5),
}


def declared_rules(rules: str | Rules | None) -> Rules:
    """Return the rules of this name, or the same rules; None: rules that change nothing.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(rules, str):
        check_choice("rules", rules, tuple(_NAMED))
        return _NAMED[rules]
    return rules or Rules()


# --------------------------------------------------------------------------------------------------
# The listeners.
# --------------------------------------------------------------------------------------------------


class _Scaled(GradientRule):
    """A factor of the gradient; 0 holds the activation.

    Args:
        factor: the factor.
    """

    def __init__(self, factor: float) -> None:
        self.factor, self.holds = factor, factor == 0

    def __call__(self, act: Tensor, run: PassMemory) -> Tensor:
        return act * self.factor if self.factor else act.detach()


class _Cut(GradientRule):
    """The input of a function, kept for the rule at the function's output.

    Args:
        output: the name of the hook point at the function's output.
    """

    def __init__(self, output: str) -> None:
        self.output = output

    def __call__(self, act: Tensor, run: PassMemory) -> Tensor:
        run.written[self.output] = act
        return act.detach()


@dataclass(eq=False)
class _Joint(GradientRule):
    """The output of a function whose input was cut.

    Attributes:
        name: the name of the hook point.
        compute: returns the surrogate from output and input.
    """

    name: str
    compute: Callable[[Tensor, Tensor], Tensor]
    first = True

    def __call__(self, act: Tensor, run: PassMemory) -> Tensor:
        return self.compute(act, run.written.pop(self.name))


class _HeldReading(GradientRule):
    """An activation that is normed again when it is written back: with the norm held.

    Args:
        kind: the norm's computation.
    """

    first = True

    def __init__(self, kind: NormKind) -> None:
        self.kind = kind

    def prepare(self, call: Call) -> None:
        (norm, entered), *rest = call.sources
        call.sources = ((_HeldNorm(norm, self.kind), entered), *rest)


class _HeldNorm(nn.Module):
    """A norm whose scale has no gradient.

    Args:
        norm: the module.
        kind: its computation.
    """

    def __init__(self, norm: nn.Module, kind: NormKind) -> None:
        super().__init__()
        self.norm, self.kind = norm, kind

    def forward(self, x: Tensor) -> Tensor:
        normalized = self.kind.around(x) / self.kind.scale(x, self.norm).detach()
        held = self.kind.behind(normalized, self.norm, x.dtype)
        return with_gradient_of(self.norm.forward(x), held)


def _tempered(temperature: float, pattern: Tensor, scores: Tensor) -> Tensor:
    """Return a softmax at a temperature, times the temperature; a fully masked row is constant."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    cooled = (scores.to(dtype) / temperature).clamp(min=torch.finfo(dtype).min)
    return (cooled.softmax(-1) * temperature).to(pattern.dtype)


def _proportional(factor: float, post: Tensor, pre: Tensor) -> Tensor:
    """Return ``f(x) * gate`` as a product of x, with the quotient ``f(x) * gate / x`` held, plus
    that of the gate, with ``f(x)`` held.
    """
    quotient = (post.detach() / pre.detach()).masked_fill(pre == 0, 0.0)
    return factor * (post + quotient * pre)


# --------------------------------------------------------------------------------------------------
# Which hook points a rule needs, and which a model lacks.
# --------------------------------------------------------------------------------------------------


class _Placing:
    """The hook points of a bridge that rules need.

    Args:
        bridge: the bridge.
        rules: the rules.

    Raises:
        ValueError: the model has no such hook point; the message names it and the rule.
    """

    def __init__(self, bridge: RunnableBridge, rules: Rules) -> None:
        self.bridge, self.rules, self.changed = bridge, rules, set(rules.changed)
        #: At most one rule at a point: several blocks may read the values of one of them.
        self.placed: dict[HookPoint, GradientRule] = {}
        base = bridge.original_model.get_submodule(base_path(bridge.original_model))
        for stack in bridge.architecture.stacks:
            own = f"{stack.name}_" if stack.one_of_two else ""
            second = stack is not bridge.architecture.stack
            self.need_norm(f"{own if second else ''}embed.ln", stack.embedding.norm)
            self.need_norm(f"{own}final_ln" if own else "ln_final", stack.final_norm)
            for index in range(len(stack.modules(base))):
                block, name = stack.block_at(index), f"{stack.name}.{index}"
                self.need_norm(f"{name}.ln0", block.norm)
                for step in block.named:
                    self.place(name, step)
        if "norms" in self.changed:
            self.place_norms()

    def find(self, rule: str, name: str) -> HookPoint:
        """Return a hook point.

        Raises:
            ValueError: the model has none of this name.
        """
        try:
            return self.bridge.names.find(name)
        except UnknownHookError as error:
            raise ValueError(
                f"the rule {rule!r} needs {name} of {self.bridge.cfg.model_name}: {error}"
            ) from None

    def need_norm(self, name: str, norm: object) -> None:
        """Check that the scale of a norm, if it is one, is a hook point where norms are held."""
        if "norms" in self.changed and isinstance(norm, Norm) and not norm.kind.identity:
            self.find("norms", f"{name}.hook_scale")

    def place(self, block: str, named: NamedStep) -> None:
        """Place the rules of one step, and check the names of its norms."""
        step, part, name = named.step, named.step.part, f"{block}.{named.name}"
        if isinstance(part, Mixer):
            raise ValueError(  # noqa: TRY004 - the model's part, no argument's type
                f"the rule {self.rules.changed[0]!r} needs the hook points of attention and MLPs;"
                f" {name} of {self.bridge.cfg.model_name} is neither"
            )
        if named.leads or not named.through_one:
            self.need_norm(f"{block}.{named.norm}", step.pre or step.stream_norm)
        self.need_norm(f"{block}.{named.norm}_post", step.post)
        if isinstance(part, Attention):
            self.place_attention(name, part)
        elif self.changed & {"activation", "gate"}:
            self.place_neurons(name, part)
        if isinstance(part, MLP):
            self.need_norm(f"{name}.ln", part.ln)
        if isinstance(part, MLP | MoE) and "mlps" in self.changed:
            self.placed[self.find("mlps", f"{block}.hook_{named.name}_out")] = _Scaled(0.0)

    def place_attention(self, name: str, part: Attention) -> None:
        """Place the rules of queries, keys, values and the softmax."""
        for letter in sorted(self.changed & {"q", "k", "v"}):
            # A factor's gradients pass the projection's output once, unless it is made from a
            # latent or unknown. The keys of another block are its own hook point, by an alias.
            projected = letter in part.projections and not part.from_latents
            elsewhere = letter == "k" and part.keys_of is not None
            rotated = "" if projected or elsewhere or letter == "v" else "rot_"
            point = self.find(letter, f"{name}.hook_{rotated}{letter}")
            self.placed[point] = _Scaled(getattr(self.rules, letter))
        for letter, projection in part.projections.items():
            self.need_norm(f"{name}.{letter}_norm", projection.norm)
            if projection.latent and projection.latent.path:
                latent = "q" if letter == "q" else "kv"
                self.need_norm(f"{name}.{latent}_a_layernorm", projection.latent)
        self.need_norm(f"{name}.z_norm", part.z_transform)
        if "softmax" in self.changed:
            self.place_softmax(name, part)

    def place_softmax(self, name: str, part: Attention) -> None:
        """Place the rule of an attention's softmax."""
        scores = self.find("softmax", f"{name}.hook_attn_scores")
        if self.rules.temperature is None:
            self.placed[scores] = _Scaled(0.0)
            return
        if part.sinks:
            raise ValueError(
                f"the rule 'softmax' at a temperature needs every score, and {scores.name} of"
                f" {self.bridge.cfg.model_name} does not show those of attention sinks: take"
                ' softmax="held", or leave softmax out'
            )
        pattern = self.find("softmax", f"{name}.hook_pattern")
        self.placed[scores] = _Cut(pattern.name)
        self.placed[pattern] = _Joint(pattern.name, partial(_tempered, self.rules.temperature))

    def place_neurons(self, name: str, part: MLP | MoE) -> None:
        """Place the rules of an MLP's activation function and of its gate."""
        rule = "activation" if "activation" in self.changed else "gate"
        if isinstance(part, MoE):
            raise ValueError(  # noqa: TRY004 - the model's part, no argument's type
                f"the rule {rule!r} needs {name}.hook_post, and {name} of"
                f" {self.bridge.cfg.model_name} is a mixture of experts"
            )
        pre = self.find(rule, f"{name}.hook_pre")
        post = self.find(rule, f"{name}.hook_{'mid' if part.ln else 'post'}")
        factor = self.rules.gate if part.gate or part.given else 1.0
        if "activation" in self.changed:
            self.placed[pre] = _Cut(post.name)
            self.placed[post] = _Joint(post.name, partial(_proportional, factor))
        elif factor != 1.0:
            self.placed[post] = _Scaled(factor)

    def place_norms(self) -> None:
        """Hold the scales of all norms, also where heads or an MLP have their own input."""
        kinds: dict[str, NormKind] = {}
        for hook in self.bridge.hook_dict.values():
            view = _inner(hook.view)
            if isinstance(view, NormScale):
                kinds[weights_path(hook.point)] = view.kind
                self.placed[hook] = _Scaled(0.0)
        for hook in self.bridge.hook_dict.values():
            if isinstance(_inner(hook.view), PerHeadInput | SharedNormInput) and hook.sources:
                kind = kinds.get(hook.point.sources[0].path)
                if kind is not None:
                    self.placed[hook] = _HeldReading(kind)


def _inner(view: View) -> View:
    while isinstance(view, Composed | Copied):
        view = view.inner
    return view


@contextmanager
def ruled(bridge: RunnableBridge, rules: Rules) -> Iterator[None]:
    """Apply gradient rules to the runs inside a ``with`` statement; see `TransformerBridge.rules`.

    Args:
        bridge: the bridge.
        rules: the rules.

    Raises:
        ValueError: the model lacks a hook point of a rule, or other rules are open.
    """
    if not rules.changed:
        yield
        return
    visible = CURRENT.get().visible
    for hook in bridge.hook_dict.values():
        if any(x.kind == "rule" and x.scope in visible for x in hook.listeners):
            raise ValueError(
                f"gradient rules are open already, at {hook.name}: put all of them into one"
                " Rules(...)"
            )
    scope = Scope()
    placed = _Placing(bridge, rules).placed
    members = [(hook, Listener("rule", rule, scope)) for hook, rule in placed.items()]
    with bridge.wiring.scoped(members, scope):
        yield
