"""Evidence that proofs read: runs of the model with the inputs and outputs of its modules, and the
activations at its hook points.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from adapters.architecture import Architecture, NamedStep, Stack, Step
from adapters.attention import Attention
from adapters.config import ModelConfig, config_of
from adapters.inputs import Arguments, Given, accepted_by, arguments_of, split, with_required_inputs
from adapters.linear import OpaqueLayerError
from adapters.observe.observe import (
    WRONG,
    CallRecorder,
    Calls,
    Function,
    ModuleCall,
    Watch,
    one_line,
)
from adapters.observe.probe_copy import is_moved
from adapters.observe.recognised import show_check
from adapters.points import (
    Point,
    base_path,
    call_number,
    has_module,
    is_inside,
    join,
    module_at,
    module_path,
    path_from,
    token_embedding,
)
from adapters.spread import Layout
from adapters.views import Args, Call, Kwargs, View

# --------------------------------------------------------------------------------------------------
# The result of a verification: a check for each claim, with the observed values where it failed.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """Result for a claim: its name, whether it holds, and the details.

    Attributes:
        wrong: pairs of a place where the claim fails and the observed value. A place is a hook
            point, a prefix of hook point names, a weight, a module or a field of ``cfg``.
        refused: pairs of a place that the bridge refuses to show, and why: a quantised layer has no
            plain weight. There the claim is not checked.
    """

    name: str
    passed: bool
    detail: str = ""
    wrong: tuple[tuple[str, str], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(repr=False)
class Report:
    """Result of `verify`: for each claim of a declaration, whether it holds. It is true if it
    `passed`.

    Attributes:
        model: the model's name.
        checks: the checks, in the order in which they were made.
        not_verified: the hook points about which nothing is declared, because `bridge.at` added
            them.
    """

    model: str
    checks: list[Check] = field(default_factory=list)
    not_verified: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Tell whether every claim holds."""
        return all(check.passed for check in self.checks)

    @property
    def refused(self) -> dict[str, str]:
        """Return the hook points and weights that the bridge refuses to show, and why."""
        return {place: why for check in self.checks for place, why in check.refused}

    @property
    def failed(self) -> list[Check]:
        """Return the claims that do not hold."""
        return [check for check in self.checks if not check.passed]

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        first = f", the first: {self.failed[0].name}" if self.failed else ""
        refused = f", {len(self.refused)} refused" if self.refused else ""
        held = len(self.checks) - len(self.failed)
        return f"Report({self.model}: {held} of {len(self.checks)} checks hold{refused}{first})"

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        refused = f", {len(self.refused)} refused" if self.refused else ""
        lines = [f"{self.model}: {'verified' if self.passed else 'NOT verified'}{refused}"]
        for check in self.checks:
            result = "FAIL" if not check.passed else "part" if check.refused else "ok  "
            detail = "; ".join(filter(None, (check.detail, listed("refused: ", check.refused))))
            lines.append(f"  {result}  {check.name:<{width}}  {detail}".rstrip())
        if self.not_verified:
            lines.append(f"  not verified: {', '.join(self.not_verified)}")
        return "\n".join(lines)


def listed(before: str, places: Sequence[tuple[str, str]]) -> str:
    """Return the first three places with the values observed there, and the number of the others;
    "" if there are none.
    """
    shown = [f"{place}: {why}" if why else place for place, why in places[:3]]
    more = f" (and at {len(places) - 3} more places)" if len(places) > 3 else ""
    return f"{before}{'; '.join(shown)}{more}" if shown else ""


@dataclass
class _Observations:
    """Observations of one claim at all of its places."""

    compared: int = 0
    worst: tuple[float, str] = (0.0, "")
    wrong: list[tuple[str, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    inconclusive: list[str] = field(default_factory=list)

    @property
    def detail(self) -> str:
        """Return a summary for the report."""
        if self.wrong:
            summary = listed("", self.wrong)
        elif not self.compared:
            summary = "" if self.refused else "does not apply"
        else:
            difference, place = self.worst
            summary = f"{self.compared} compared"
            if place:
                summary += f", worst {difference:.1e} at {place}"
        reasons = [f"inconclusive: {reason}" for reason in self.inconclusive]
        return "; ".join(filter(None, (summary, *reasons)))


#: Lower bound for the magnitude of a row, relative to the largest number of all rows: small numbers
#: may be the remainder of a cancellation.
_SMALL = 1e-3


class Findings:
    """Collector of observations for each claim, at each of its places.

    Args:
        tolerance: the maximum difference between two results of the same sum, relative to its
            largest number.
        angles: the maximum difference between rotation angles. A model in half precision may have
            rounded its frequencies.
        not_offered: names about which nothing is claimed: hook points, prefixes of hook point
            names, and the other names of `Check`.
    """

    def __init__(
        self, tolerance: float, angles: float = 1e-4, not_offered: Collection[str] = ()
    ) -> None:
        self.tolerance = tolerance
        self.angles = angles
        self._not_offered = not_offered
        self._claims: defaultdict[str, _Observations] = defaultdict(_Observations)

    def claim(self, *names: str) -> None:
        """Register claims so that they appear in the report even if they do not apply to the
        model.
        """
        for name in names:
            self._claims.setdefault(name, _Observations())

    def holds(self, claim: str, place: str, ok: bool, detail: str = "") -> bool:
        """Record whether a claim holds at a place, and return it.

        Args:
            claim: its name.
            place: where in the model.
            ok: whether the claim holds there.
            detail: the observed value, if it does not.
        """
        observations = self._claims[claim]
        observations.compared += 1
        if ok:
            return True
        name = named_at(claim, place)
        if claim in self._not_offered or self.is_left_out(name):
            self.inconclusive(claim, f"{name} is not offered")
        else:
            observations.wrong.append((place, detail))
        return False

    def is_left_out(self, name: str) -> bool:
        """Tell whether a name, or a prefix of it, is excluded."""
        return is_inside(name, *self._not_offered)

    def equal(
        self,
        claim: str,
        place: str,
        observed: Tensor | None,
        expected: Tensor | None,
        size: float | None = None,
    ) -> bool:
        """Record whether two tensors agree, and return it.

        Args:
            claim, place: as for `holds`.
            observed: the tensor that the model computes.
            expected: the tensor that the declaration implies. Shapes must match exactly;
                broadcasting is not allowed.
            size: the magnitude of the numbers from which both are computed; None: the magnitude of
                the larger tensor.
        """
        if observed is None or expected is None:
            return self.holds(claim, place, False, "it did not run")
        if observed.shape != expected.shape:
            detail = f"shape {list(observed.shape)} for {list(expected.shape)}"
            return self.holds(claim, place, False, detail)
        if not observed.numel():
            return self.holds(claim, place, True)
        difference = _difference(observed, expected, size)
        if difference is None:
            return self.holds(claim, place, False, "one is infinite where the other is not")
        observations = self._claims[claim]
        observations.worst = max(observations.worst, (difference, place))
        detail = f"differs by {difference:.1e}, relatively"
        return self.holds(claim, place, difference <= self.tolerance, detail)

    def attempt(self, claim: str, prove: Callable[[], None]) -> None:
        """Run a proof; if it raises, record that its claim does not hold.

        Args:
            claim: the claim that is proved.
            prove: a function that records its observations.
        """
        show_check(claim)
        try:
            prove()
        except OpaqueLayerError as error:
            self.refused(claim, claim, one_line(error))
        except WRONG as error:
            self.holds(claim, "a run", False, one_line(error))

    def refused(self, claim: str, place: str, reason: str) -> None:
        """Record that a claim cannot be checked at a place, which the bridge refuses to show."""
        self._claims[claim].refused[place] = reason

    def inconclusive(self, claim: str, reason: str) -> None:
        """Record that the evidence cannot decide a claim, and why."""
        reasons = self._claims[claim].inconclusive
        if reason not in reasons:
            reasons.append(reason)

    def checks(self) -> Iterator[Check]:
        """Yield a check for each claim, in the order in which the claims were first registered."""
        for name, observations in self._claims.items():
            wrong, refused = tuple(observations.wrong), tuple(observations.refused.items())
            yield Check(name, not wrong, observations.detail, wrong, refused)


def _difference(x: Tensor, y: Tensor, size: float | None) -> float | None:
    """Return the largest difference between two tensors, relative to a size or to each row's
    largest number; None if only one of them is infinite somewhere.
    """
    wide = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    x = x.detach().to(wide)
    y = y.detach().to(wide)
    differences = (x - y).abs()
    if not math.isfinite(differences.max()):
        finite = torch.isfinite(x) & torch.isfinite(y)
        if not bool((finite | (x == y)).all()):
            return None
        x = x.where(finite, 0.0)
        y = y.where(finite, 0.0)
        differences = (x - y).abs()
    worst = float(differences.max())
    if size is not None:
        return worst / max(size, 1e-30)
    sizes = torch.maximum(x.abs(), y.abs())
    most = float(sizes.max())
    if x.ndim < 2 or len(x) < 2:
        return worst / max(most, 1e-30)
    # Rows differ in magnitude.
    rows = sizes.flatten(1).amax(-1).clamp(min=max(_SMALL * most, 1e-30))
    return float((differences.flatten(1).amax(-1) / rows).max())


def named_at(claim: str, place: str) -> str:
    """Return the name by which a place can be excluded: a hook point or a prefix of names;
    otherwise the claim.

    Args:
        claim: its name.
        place: as for `Findings.holds`.
    """
    name = re.split(r"[ (,]", place)[0].rstrip(".")
    return name if "." in name or "hook_" in name else claim


# --------------------------------------------------------------------------------------------------
# The interface of a bridge that proofs need.
# --------------------------------------------------------------------------------------------------


@runtime_checkable
class Hook(Protocol):
    """Hook point of a bridge, reduced to the attributes that proofs need."""

    name: str
    point: Point
    view: View


#: Function of an activation and its hook point. A tensor that it returns replaces the activation.
HookFunction = Callable[[Tensor, Hook], Tensor | None]
#: One name or several, and the function.
NamedHook = tuple[str | list[str], HookFunction]


#: Cache, reduced to what proofs need: activations by name.
Cache = Mapping[str, Tensor]


@runtime_checkable
class Bridge(Protocol):
    """Bridge to verify: a `bridge.TransformerBridge`, reduced to the attributes that proofs
    need.
    """

    cfg: ModelConfig
    training: bool
    architecture: Architecture
    no_layer_runs: str
    not_offered: Mapping[str, str]
    layout: Layout | None

    @property
    def core(self) -> nn.Module: ...

    @property
    def original_model(self) -> nn.Module: ...

    @property
    def hook_dict(self) -> Mapping[str, Hook]: ...

    def __call__(
        self,
        input: Tensor,
        *,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        **kwargs: Any,
    ) -> Tensor: ...

    def run_with_hooks(
        self, input: Tensor, *, fwd_hooks: Sequence[NamedHook], **kwargs: Any
    ) -> Tensor: ...

    def run_with_cache(
        self, input: Tensor, *, names_filter: Sequence[str] | None, **kwargs: Any
    ) -> tuple[Any, Cache]: ...

    def hooks(
        self, *, fwd_hooks: Sequence[NamedHook], bwd_hooks: Sequence[NamedHook] = ()
    ) -> AbstractContextManager[object]: ...

    def rewrapped(self, model: nn.Module) -> Self:
        """Return a bridge around another model, with the same declaration and facts."""
        ...

    def train(self, mode: bool = True) -> object: ...


def add_numbered(calls: Calls, bridge: Bridge) -> Calls:
    """Add numbered calls to a recording: the n-th call of a module, under its name in the
    declaration (``layers.0@2.attention``).

    Args:
        calls: the recorded calls.
        bridge: the bridge; its hook points tell which calls the declaration refers to.
    """
    numbered: set[str] = set()
    for hook in bridge.hook_dict.values():
        for site in (hook.point.site, *hook.point.sources):
            ends = [match.end() for match in re.finditer(r"@\d+", site.path)]
            numbered.update(site.path[:end] for end in ends)
    for outer_call in numbered:
        outer = module_path(outer_call)
        number = call_number(outer_call) or 0
        for path in [path for path in calls if is_inside(path, outer)]:
            if number < len(calls[path]):
                inner = path.removeprefix(outer)
                calls.setdefault(outer_call + inner, [calls[path][number]])
    return calls


@dataclass(frozen=True)
class LayerStep:
    """Step of one block, with its place in the model.

    Attributes:
        prefix: the prefix of its hook points, such as ``blocks.0.``.
        path: the path of the block.
        layer: the index of the block.
        stack: the list that contains the block.
        named: the step.
    """

    prefix: str
    path: str
    layer: int
    stack: Stack
    named: NamedStep

    @property
    def step(self) -> Step:
        """Return the step's declaration."""
        return self.named.step

    @property
    def part(self) -> str:
        """Return the prefix of the hook points of its part."""
        return f"{self.prefix}{self.named.name}."

    @property
    def result(self) -> str:
        """Return the hook point of the step's output, as added to the residual stream."""
        return f"{self.prefix}hook_{self.named.name}_out"

    @property
    def added(self) -> str:
        """Return the hook point of its last layer's output, including declared factors, before any
        norm that follows.
        """
        return f"{self.part}hook_out" if self.named.step.post else self.result

    @property
    def module(self) -> str:
        """Return the path of its part."""
        return join(self.path, self.step.part.path)

    def projecting(self, letter: str) -> LayerStep:
        """Return the step that computes an attention's queries (``q``), keys or values: this step,
        or one of another block.
        """
        part = self.step.part
        if letter == "q" or not isinstance(part, Attention) or part.keys_of is None:
            return self
        layer = part.keys_of
        stack = self.stack
        base = self.path.removesuffix(stack.place_of(self.layer))
        path = base + stack.place_of(layer)
        return replace(self, prefix=f"{stack.name}.{layer}.", path=path, layer=layer)


@dataclass
class Evidence:
    """Bridge to verify, and one run of it.

    Attributes:
        bridge: the bridge.
        tokens: the input; images or sound if the first blocks read these.
        more: the model's other inputs.
        activations: the activations, by hook point name.
        calls: the module calls, by path. Tensors with positions first are transposed to have the
            batch first.
        raw: the module calls, not transposed.
        output: the first tensor that the model returned.
    """

    bridge: Bridge
    tokens: Tensor
    more: Given
    activations: dict[str, Tensor] = field(default_factory=dict)
    calls: Calls = field(default_factory=dict)
    raw: Calls = field(default_factory=dict)
    output: Tensor | None = None

    @property
    def arguments(self) -> Arguments:
        """Return the inputs of the run, by the names of the model's own arguments."""
        return arguments_of(self.bridge.core, self.tokens, self.more)

    @property
    def text(self) -> Tensor:
        """Return the tokens, or the decoder's tokens if the model runs on images or sound."""
        return self.more["decoder_input_ids"] if self.tokens.is_floating_point() else self.tokens

    @property
    def architecture(self) -> Architecture:
        """Return the declaration."""
        return self.bridge.architecture

    def module(self, *parts: str) -> nn.Module:
        """Return the module at a path."""
        return module_at(self.bridge.original_model, join(*parts))

    @property
    def base(self) -> str:
        """Return the path of the base model."""
        return base_path(self.bridge.original_model)

    def stacks(self) -> Iterator[Stack]:
        """Yield the lists of blocks that the model has; it may be an encoder alone."""
        for stack in self.bridge.architecture.stacks:
            if has_module(self.bridge.original_model, join(self.base, stack.path)):
                yield stack

    def places(self) -> Iterator[LayerStep]:
        """Yield every step of every block that the model has."""
        return places_of(self.bridge)

    def attentions(self) -> Iterator[tuple[LayerStep, Attention]]:
        """Yield every attention, including attentions inside of mixers, with its step."""
        for place in self.places():
            for named, part in place.named.attentions:
                yield replace(place, named=named), part

    def call(self, *parts: str) -> ModuleCall | None:
        """Return the first call of the module at a path; None if it did not run."""
        return next(iter(self.calls.get(join(*parts), ())), None)

    def input_of(self, *parts: str) -> Tensor | None:
        """Return the input of a module's first call; None if it did not run."""
        call = self.call(*parts)
        return call.input if call else None

    def output_of(self, *parts: str) -> Tensor | None:
        """Return the output of a module's first call; None if it did not run."""
        call = self.call(*parts)
        return call.result if call else None

    def calls_in(self, path: str) -> Iterator[ModuleCall]:
        """Yield the first calls of the modules inside a module."""
        for inner, calls in self.calls.items():
            if inner.startswith(f"{path}.") and calls:
                yield calls[0]

    def from_model(self, path: str) -> str:
        """Return a declared path as a path from the model."""
        return path_from(self.bridge.original_model, path)

    @property
    def unembed(self) -> str:
        """Return the path of the output layer, from the model."""
        return self.from_model("." + self.architecture.readout.path)

    def call_at(self, hook: Hook) -> Call | None:
        """Return the module call at a hook point's site, as passed to its view; None if the module
        did not run.
        """
        raw = next(iter(self.raw.get(hook.point.site.path, ())), None)
        if raw is None:
            return None
        sources: list[tuple[nn.Module, Tensor]] = []
        for site in hook.point.sources:
            call = self.call(site.path)
            if call is not None and call.input is not None:
                sources.append((call.module, call.input))
        return Call(raw.module, raw.args, raw.kwargs, tuple(sources))

    def get(self, name: str) -> Tensor | None:
        """Return an activation; None if there is no such hook point."""
        return self.activations.get(name)


class Claim:
    """A claim of the declaration, checked on a run.

    Args:
        evidence: the run.
        findings: collects the results.
        path: the module that the claim is about; None: the base model.
        prefix: the prefix of its hook points.

    Attributes:
        name: the claim's name in a report.
    """

    name: str

    def __init__(
        self, evidence: Evidence, findings: Findings, path: str | None = None, prefix: str = ""
    ) -> None:
        self.evidence = evidence
        self.findings = findings
        self.bridge = evidence.bridge
        self.cfg = self.bridge.cfg
        self.architecture = self.bridge.architecture
        self.path = evidence.base if path is None else path
        self.prefix = prefix

    def point(self, name: str) -> str:
        """Return the full name of a hook point."""
        return self.prefix + name

    def get(self, name: str) -> Tensor | None:
        """Return the activation at a hook point; None if there is none."""
        return self.evidence.get(self.prefix + name)

    def call(self, *path: str) -> ModuleCall | None:
        """Return the first call of a module; None if it did not run."""
        return self.evidence.call(self.path, *path)

    def input_of(self, *path: str) -> Tensor | None:
        """Return the input of a module's first call; None if it did not run."""
        return self.evidence.input_of(self.path, *path)

    def output_of(self, *path: str) -> Tensor | None:
        """Return the output of a module's first call; None if it did not run."""
        return self.evidence.output_of(self.path, *path)

    def holds(self, place: str, ok: bool, detail: str = "") -> bool:
        """Record whether the claim holds at a place; see `Findings.holds`."""
        return self.findings.holds(self.name, place, ok, detail)

    def fails(self, place: str, detail: str) -> None:
        """Record that the claim does not hold at a place."""
        self.holds(place, False, detail)

    def equal(
        self,
        place: str,
        observed: Tensor | None,
        expected: Tensor | None,
        size: float | None = None,
    ) -> bool:
        """Record whether two tensors agree; see `Findings.equal`."""
        return self.findings.equal(self.name, place, observed, expected, size)

    def inconclusive(self, reason: str) -> None:
        """Record that the evidence cannot decide the claim."""
        self.findings.inconclusive(self.name, reason)


class StepClaim(Claim):
    """A claim about one step of a block, or an attention in it.

    Args:
        evidence, findings: as for `Claim`.
        place: the step.
    """

    def __init__(self, evidence: Evidence, findings: Findings, place: LayerStep) -> None:
        super().__init__(evidence, findings, place.path, place.part)
        self.place = place
        self.step = place.step


class AttentionClaim(StepClaim):
    """A claim about one attention."""

    def __init__(self, evidence: Evidence, findings: Findings, place: LayerStep) -> None:
        super().__init__(evidence, findings, place)
        assert isinstance(self.step.part, Attention)
        self.part = self.step.part
        self.path = place.module
        self.prefix += "hook_"
        self.padded = "attention_mask" in evidence.more

    def get(self, name: str) -> Tensor | None:
        """Return the activation at a hook point; keys and values may belong to another block."""
        if name not in ("k", "v"):
            return super().get(name)
        place = self.place.projecting(name)
        return self.evidence.get(f"{place.part}hook_{name}")

    @property
    def is_local(self) -> bool:
        """Tell whether the attention has a window."""
        types = self.cfg.attn_types
        return bool(types and self.cfg.use_local_attn and types[self.place.layer] == "local")


def largest(x: Tensor) -> float:
    """Return the largest absolute value of a tensor."""
    return float(x.abs().max())


def like(x: Tensor | None, shape: Tensor | None) -> Tensor | None:
    """Reshape a tensor of ``(batch pos)`` rows to the axes of another tensor; return any other
    tensor unchanged.
    """
    if x is None or shape is None or x.shape == shape.shape or x.numel() != shape.numel():
        return x
    return x.reshape(shape.shape)


def places_of(bridge: Bridge) -> Iterator[LayerStep]:
    """Yield every step of every block that the model has."""
    for stack in bridge.architecture.stacks:
        for index in blocks_of(bridge, stack):
            prefix = f"{stack.name}.{index}."
            for named in stack.block_at(index).named:
                path = join(base_path(bridge.original_model), stack.place_of(index))
                yield LayerStep(prefix, path, index, stack, named)


def blocks_of(bridge: Bridge, stack: Stack) -> list[int]:
    """Return the indices of the blocks that have hook points; some blocks run only with images."""
    pattern = re.compile(rf"{stack.name}\.(\d+)\.hook_resid_pre")
    matches = map(pattern.fullmatch, bridge.hook_dict)
    return [int(match[1]) for match in matches if match]


def claimed_points(bridge: Bridge) -> list[str]:
    """Return the hook points that can be verified: all but those of `bridge.at`, about which
    nothing is declared.
    """
    return [name for name, hook in bridge.hook_dict.items() if hook.point.declared]


def light_points(bridge: Bridge) -> list[str]:
    """Return the hook points whose activations fit in memory together: no stream per head, no state
    per position.
    """
    return [
        name
        for name, hook in bridge.hook_dict.items()
        if hook.point.group != "heavy" and hook.point.site.key != "state" and hook.point.declared
    ]


def some_tokens(
    bridge: Bridge, batch: int, pos: int, seed: int = 0, inputs: Given | None = None
) -> tuple[Tensor, Arguments]:
    """Return random tokens and the model's other required inputs; or images or sound, and tokens
    for a decoder.

    Args:
        bridge: the bridge.
        batch, pos: the shape of the tokens.
        seed: the seed of the random generator.
        inputs: other inputs, which replace the generated ones; None: all are generated.
    """
    cfg = bridge.cfg
    generator = torch.Generator().manual_seed(seed)
    table = getattr(token_embedding(bridge.core), "weight", None)
    d_vocab = cfg.d_vocab
    if d_vocab > 0 and isinstance(table, Tensor):
        d_vocab = min(d_vocab, table.shape[0])
    tokens = torch.randint(0, max(d_vocab, 1), (batch, pos), generator=generator, device="cpu").to(
        cfg.device
    )
    padding = getattr(config_of(bridge.core), "pad_token_id", None)
    # The embedding of padding may be zero; queries and keys would be, too.
    if isinstance(padding, int) and d_vocab > 1:
        tokens = tokens.masked_fill(tokens == padding, (padding + 1) % d_vocab)
    return with_required(bridge, tokens, inputs)


def with_required(
    bridge: Bridge, tokens: Tensor, inputs: Given | None = None
) -> tuple[Tensor, Arguments]:
    """Return the input of a run and the model's other required inputs.

    Args:
        bridge: the bridge.
        tokens: ``[batch, pos]``.
        inputs: as for `some_tokens`.
    """
    core = bridge.core
    two = config_of(core).is_encoder_decoder and len(bridge.architecture.stacks) > 1
    return split(core, with_required_inputs(core, tokens, two, inputs))


def few_logits(bridge: Bridge, names: Sequence[str]) -> Kwargs:
    """Return arguments that restrict the output to the last position's logits, if no listed hook
    point reads the logits and the model supports it.

    Args:
        bridge: the bridge.
        names: the hook points that are read.
    """
    reads_logits = any(name.startswith("unembed") for name in names)
    if reads_logits or "logits_to_keep" not in accepted_by(bridge.core):
        return {}
    return {"logits_to_keep": 1}


#: Minimum number of vocabulary entries to compute logits for when two runs are compared.
#: Vocabularies of less than four times this size are computed in full.
_TOKENS = 1024


def few_tokens(bridge: Bridge, step: int) -> AbstractContextManager[object]:
    """Return a context manager in which runs compute only the logits of every `step`-th vocabulary
    entry.

    Use it to compare two runs. With a large vocabulary, the output layer would take nearly all of
    their time. Its product uses only some rows of its matrix.

    Args:
        bridge: the bridge, or one of a probe copy of its model.
        step: the result of `step_of_tokens` for the model; 1: all entries.
    """
    layer = _output_layer(bridge) if step > 1 else None
    if layer is None:
        return nullcontext()
    weight = layer.weight

    def multiply_some_rows(func: Function, args: Args, kwargs: Kwargs) -> Any:
        is_linear = func is torch.nn.functional.linear and len(args) == 3
        if not is_linear or args[1] is not weight:
            return func(*args, **kwargs)
        x, _, bias = args
        return func(x, weight[::step], None if bias is None else bias[::step])

    return Watch.calling(multiply_some_rows)


def _output_layer(bridge: Bridge) -> nn.Linear | None:
    model = bridge.original_model
    name = bridge.architecture.readout.path
    path = path_from(model, "." + name)
    if not name or not has_module(model, path):
        return None
    layer = model.get_submodule(path)
    return layer if type(layer) is nn.Linear else None


def step_of_tokens(bridge: Bridge, tokens: Tensor, more: Given) -> int:
    """Return a step such that the logits of every `step`-th vocabulary entry suffice to compare two
    runs; 1 if all are needed, or if the vocabulary is small. The result is above 1 only on a CPU: a
    model may index missing entries, which causes an unrecoverable error on other devices.

    Args:
        bridge: the bridge.
        tokens, more: the inputs of the trial run.
    """
    model = bridge.original_model
    layer = _output_layer(bridge)
    plain = model is bridge.core and bridge.layout is None and not bridge.architecture.readout.bias
    if layer is None or not plain or is_moved(model):
        return 1
    if layer.out_features < 4 * _TOKENS or layer.weight.device.type != "cpu":
        return 1
    step = layer.out_features // _TOKENS
    try:
        with torch.no_grad():
            logits = bridge.run_with_hooks(tokens, fwd_hooks=[], **more)[..., ::step]
            with few_tokens(bridge, step):
                few = bridge.run_with_hooks(tokens, fwd_hooks=[], **more)
        # The results differ if the model overwrites the logits of some entries, by index.
        size = float(logits.abs().median())
        same = torch.allclose(few, logits, rtol=0.02, atol=0.02 * size)
    except WRONG as error:  # the model reads the logits of all entries
        one_line(error)
        return 1
    return step if same else 1


#: Activations that `randomized_run` replaces by random numbers: the ends of their names, and their
#: standard deviation.
RANDOMIZED = {
    ".hook_q": 2.0,
    ".hook_k": 2.0,
    ".hook_v": 1.0,
    ".hook_pre": 1.5,
    ".hook_pre_linear": 1.5,
    ".hook_gate": 1.5,
    "unembed.hook_out": 20.0,
}


#: Factors by row, so that errors at small or at large values only are detected. Keys are small
#: where queries are large: scores keep their magnitude.
_SIZES_OF_ROWS = (6.0, 1 / 6, 1.0, 1.0)


def randomized_run(bridge: Bridge, tokens: Tensor, more: Given) -> Evidence:
    """Run the model with the inputs of all its functions replaced by random numbers, spread widely
    enough to distinguish functions.

    Replaces queries, keys, values, the inputs of activation functions and the output of the
    unembedding. A model's own activations may be so small that every function is close to linear on
    them.

    Args:
        bridge: the bridge.
        tokens, more: the inputs of the run.
    """
    evidence = Evidence(bridge, tokens, more)
    generator = torch.Generator().manual_seed(1)
    sizes = _standard_deviations(evidence)

    def look(x: Tensor, hook: Hook) -> Tensor | None:
        size = next((size for end, size in sizes.items() if hook.name.endswith(end)), None)
        if size is None:
            evidence.activations[hook.name] = recorder.copied(x)
            return None
        noise = torch.randn(x.shape, generator=generator, device="cpu") * size
        if hook.point.axes.startswith("batch ") and len(x) == len(tokens):
            noise = noise * _row_factors(x, hook)
        evidence.activations[hook.name] = noise.to(x)
        return noise.to(x)

    hooks: list[NamedHook] = [(light_points(bridge), look)]  # no claim is about a state
    recorder = CallRecorder(bridge.original_model.named_modules(), layout=bridge.layout)
    with torch.no_grad(), recorder as recording:
        output = bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more)
    evidence.raw = evidence.calls = add_numbered(recording.by_path, bridge)
    if isinstance(output, Tensor):
        evidence.output = output
    if bridge.architecture.stack.positions_first:
        evidence.calls = _batch_first(evidence)
    return evidence


def _standard_deviations(evidence: Evidence) -> dict[str, float]:
    """Return the standard deviation of the random numbers for each ending of hook point names."""
    sizes = dict(RANDOMIZED)
    cap = evidence.bridge.cfg.attn_scores_soft_cap
    if cap > 0:  # scores as large as the cap, so that it has an effect
        sizes[".hook_q"] = sizes[".hook_k"] = 0.8 * max(cap, 6.25) ** 0.5
    clips = [part.clip or 0.0 for _, part in evidence.attentions()]
    for end in (".hook_q", ".hook_k", ".hook_v"):  # beyond every clamp, in the rows of large values
        sizes[end] = max([sizes[end], *(clip / 4 for clip in clips)])
    return sizes


def _row_factors(x: Tensor, hook: Hook) -> Tensor:
    """Return a factor for each row of a tensor."""
    factors = [_SIZES_OF_ROWS[row % len(_SIZES_OF_ROWS)] for row in range(len(x))]
    if hook.name.endswith(".hook_k"):
        factors = [1 / factor for factor in factors]
    return torch.tensor(factors, device="cpu").view(-1, *(1 for _ in x.shape[1:]))


def _batch_first(evidence: Evidence) -> Calls:
    """Return the calls with the batch before the positions."""
    inputs = (evidence.tokens, *evidence.more.values())
    shapes = [tuple(x.shape[:2]) for x in inputs if x.ndim > 1]

    def turned(x: Any) -> Any:
        if isinstance(x, Tensor) and tuple(x.shape[1::-1]) in shapes:
            return x.transpose(0, 1)
        return type(x)(turned(value) for value in x) if type(x) in (tuple, list) else x

    def turned_call(call: ModuleCall) -> ModuleCall:
        kwargs = {name: turned(value) for name, value in call.kwargs.items()}
        return replace(call, args=turned(call.args), kwargs=kwargs, output=turned(call.output))

    return {path: list(map(turned_call, calls)) for path, calls in evidence.raw.items()}


def with_graph(bridge: Bridge, tokens: Tensor, more: Given) -> Evidence:
    """Run the model and keep the graph of each block separately, with the patterns detached.

    The activations contain scores and patterns; the calls contain their inputs and outputs.

    Args:
        bridge: the bridge.
        tokens, more: the inputs of the run.
    """
    evidence = Evidence(bridge, tokens, more)
    ends = (".hook_attn_scores", ".hook_pattern")
    scores = [name for name in bridge.hook_dict if name.endswith(ends)]
    blocks = {module_path(place.path) for place in evidence.places()}

    def look(x: Tensor, hook: Hook) -> Tensor | None:
        evidence.activations[hook.name] = x
        return x.detach() if hook.name.endswith("pattern") else None

    def cut(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return tuple(map(_leaf, args)), {name: _leaf(value) for name, value in kwargs.items()}

    model = bridge.original_model
    starts = tuple(f"{block}." for block in blocks)
    inside = [(path, module) for path, module in model.named_modules() if path.startswith(starts)]
    hooks: list[NamedHook] = [(scores, look)] if scores else []
    with ExitStack() as cuts, torch.enable_grad():
        for path in blocks:
            block = model.get_submodule(path)
            cuts.enter_context(block.register_forward_pre_hook(cut, with_kwargs=True))
        recording = cuts.enter_context(CallRecorder(inside, copies=False, layout=bridge.layout))
        bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more, **few_logits(bridge, scores))
    evidence.calls = add_numbered(recording.by_path, bridge)
    return evidence


def _leaf(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().requires_grad_()
    return x
