"""What proofs look at: runs of the model with what entered and left its modules, and what the hook points showed."""

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
from adapters.observe.observe import WRONG, CallRecorder, Calls, Function, ModuleCall, Watch, one_line
from adapters.observe.probe_copy import is_moved
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

# ----------------------------------------------------------------------------------------------------------------------
# What a verification found: a check for each claim, with what was seen where it failed.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One claim: its name, whether it holds, and what was found.

    Attributes:
        wrong: where it does not hold, and what was seen there: hook points, or what their names begin with, weights,
            modules, fields of ``cfg``.
    """

    name: str
    passed: bool
    detail: str = ""
    wrong: tuple[tuple[str, str], ...] = ()


@dataclass
class Report:
    """What `verify` found: for each claim of a declaration whether it holds.

    Attributes:
        model: the model's name.
        checks: in the order they were made.
    """

    model: str
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every claim holds."""
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        """The claims that do not hold."""
        return [check for check in self.checks if not check.passed]

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"{self.model}: {'verified' if self.passed else 'NOT verified'}"]
        lines += [f"  {'ok  ' if c.passed else 'FAIL'}  {c.name:<{width}}  {c.detail}".rstrip() for c in self.checks]
        return "\n".join(lines)


@dataclass
class _Claim:
    compared: int = 0
    worst: tuple[float, str] = (0.0, "")
    wrong: list[tuple[str, str]] = field(default_factory=list)
    inconclusive: list[str] = field(default_factory=list)


#: A row's numbers count as no smaller than this, relative to those of all: they may be what is left of larger ones.
_SMALL = 1e-3


class Findings:
    """Collects what is seen of each claim, at each of its places.

    Args:
        tolerance: what two results of the same sum may differ by, relative to the largest number in it.
        angles: what the angles of a rotation may differ by: a model in half precision may have rounded its speeds.
        not_offered: what nothing is claimed of: hook points, or what their names begin with, and more (see `Check`).
    """

    def __init__(self, tolerance: float, angles: float = 1e-4, not_offered: Collection[str] = ()) -> None:
        self.tolerance, self.angles, self._not_offered = tolerance, angles, not_offered
        self._claims: defaultdict[str, _Claim] = defaultdict(_Claim)

    def claim(self, name: str) -> None:
        """Says that a claim is looked at, so that it is in the report where it has no place in the model."""
        self._claims.setdefault(name, _Claim())

    def holds(self, claim: str, place: str, ok: bool, seen: str = "") -> bool:
        """Whether a claim holds at a place.

        Args:
            claim: its name.
            place: where in the model.
            ok: whether it does.
            seen: what was seen instead.
        """
        entry = self._claims[claim]
        entry.compared += 1
        if not ok and (claim in self._not_offered or self.is_left_out(named_at(claim, place))):
            self.inconclusive(claim, f"{named_at(claim, place)} is not offered")
        elif not ok:
            entry.wrong.append((place, seen))
        return ok

    def is_left_out(self, name: str) -> bool:
        """Whether something is not offered, or what its name begins with is not."""
        return any(is_inside(name, each) for each in self._not_offered)

    def equal(
        self, claim: str, place: str, seen: Tensor | None, expected: Tensor | None, size: float | None = None
    ) -> bool:
        """Whether two tensors agree.

        Args:
            claim, place: as for `holds`.
            seen: what the model computes.
            expected: what it is by the declaration; anything that broadcasts is no excuse: the shapes must agree.
            size: of the numbers that both are made from; None: of the larger.
        """
        if seen is None or expected is None:
            return self.holds(claim, place, False, "it did not run")
        if seen.shape != expected.shape:
            return self.holds(claim, place, False, f"shape {list(seen.shape)} for {list(expected.shape)}")
        if not seen.numel():
            return self.holds(claim, place, True)
        wide = torch.float64 if torch.float64 in (seen.dtype, expected.dtype) else torch.float32
        a, b = seen.detach().to(wide), expected.detach().to(wide)
        worst, most = float((a - b).abs().max()), max(float(a.abs().max()), float(b.abs().max()))
        if not (math.isfinite(worst) and math.isfinite(most)):
            both = torch.isfinite(a) & torch.isfinite(b)
            if not bool((both | (a == b)).all()):
                return self.holds(claim, place, False, "one is infinite where the other is not")
            a, b = (torch.where(both, x, 0.0) for x in (a, b))
            worst, most = float((a - b).abs().max()), max(float(a.abs().max()), float(b.abs().max()))
        relative = worst / max(most if size is None else size, 1e-30)
        if size is None and a.ndim > 1 and len(a) > 1:  # rows are of several sizes
            rows = torch.maximum(a.abs(), b.abs()).flatten(1).amax(-1).clamp(min=max(_SMALL * most, 1e-30))
            relative = float(((a - b).abs().flatten(1).amax(-1) / rows).max())
        entry = self._claims[claim]
        entry.worst = max(entry.worst, (relative, place))
        return self.holds(claim, place, relative <= self.tolerance, f"differs by {relative:.1e}, relatively")

    def attempt(self, claim: str, prove: Callable[[], None]) -> None:
        """Tries a proof; what it raises says that its claim does not hold.

        Args:
            claim: what the proof is of.
            prove: adds what it finds.
        """
        try:
            prove()
        except WRONG as error:
            self.holds(claim, "a run", False, one_line(error))

    def inconclusive(self, claim: str, reason: str) -> None:
        """Says that a claim could not be told from another one, and why."""
        entry = self._claims[claim]
        if reason not in entry.inconclusive:
            entry.inconclusive.append(reason)

    def checks(self) -> Iterator[Check]:
        """A check for each claim, in the order in which they were first looked at."""
        for name, entry in self._claims.items():
            if entry.wrong:
                more = f" (and at {len(entry.wrong) - 3} more places)" if len(entry.wrong) > 3 else ""
                detail = "; ".join(f"{place}: {seen}" if seen else place for place, seen in entry.wrong[:3]) + more
            elif not entry.compared:
                detail = "does not apply"
            else:
                where = f", worst {entry.worst[0]:.1e} at {entry.worst[1]}" if entry.worst[1] else ""
                detail = f"{entry.compared} compared{where}"
            if entry.inconclusive:
                detail = "; ".join([detail, *(f"inconclusive: {reason}" for reason in entry.inconclusive)])
            yield Check(name, not entry.wrong, detail, tuple(entry.wrong))


def named_at(claim: str, place: str) -> str:
    """What a place names that can be left out: a hook point, or what names begin with; else the claim itself.

    Args:
        claim: its name.
        place: as for `Findings.holds`.
    """
    found = re.split(r"[ (,]", place)[0].rstrip(".")
    return found if "." in found or "hook_" in found else claim


# ----------------------------------------------------------------------------------------------------------------------
# What is proved: a bridge, as far as proofs need one.
# ----------------------------------------------------------------------------------------------------------------------


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


#: A cache, as far as it is needed here: activations by name.
Cache = Mapping[str, Tensor]


@runtime_checkable
class Bridge(Protocol):
    """What is verified: a `bridge.TransformerBridge`, as far as it is needed here."""

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
        self, input: Tensor, *, start_at_layer: int | None = None, stop_at_layer: int | None = None, **kwargs: Any
    ) -> Tensor: ...

    def run_with_hooks(self, input: Tensor, *, fwd_hooks: Sequence[NamedHook], **kwargs: Any) -> Tensor: ...

    def run_with_cache(
        self, input: Tensor, *, names_filter: Sequence[str] | None, **kwargs: Any
    ) -> tuple[Any, Cache]: ...

    def hooks(
        self, *, fwd_hooks: Sequence[NamedHook], bwd_hooks: Sequence[NamedHook] = ()
    ) -> AbstractContextManager[object]: ...

    def rewrapped(self, model: nn.Module) -> Self:
        """A bridge of the same declaration and facts around another model."""
        ...

    def train(self, mode: bool = True) -> object: ...


def add_numbered(calls: Calls, bridge: Bridge) -> Calls:
    """The same, and what a declaration calls the n-th call of a module under that name (``layers.0@2.attention``).

    Args:
        calls: what was recorded.
        bridge: the bridge, whose hook points say which calls are meant.
    """
    sites = (site for hook in bridge.hook_dict.values() for site in (hook.point.site, *hook.point.sources))
    numbered = {site.path[: match.end()] for site in sites for match in re.finditer(r"@\d+", site.path)}
    for start in numbered:
        outer, number = module_path(start), call_number(start)
        for path in [path for path in calls if is_inside(path, outer)]:
            if number is not None and number < len(calls[path]):
                calls.setdefault(start + path[len(outer) :], [calls[path][number]])
    return calls


@dataclass(frozen=True)
class LayerStep:
    """One step of one block.

    Attributes:
        prefix: what its hook points begin with, such as ``blocks.0.``.
        path: of the block.
        layer: its index.
        stack: the list that it is in.
        named: the step.
    """

    prefix: str
    path: str
    layer: int
    stack: Stack
    named: NamedStep

    @property
    def step(self) -> Step:
        """Its declaration."""
        return self.named.step

    @property
    def part(self) -> str:
        """What the hook points of its part begin with."""
        return f"{self.prefix}{self.named.name}."

    @property
    def result(self) -> str:
        """The hook point of what it adds to the stream."""
        return f"{self.prefix}hook_{self.named.name}_out"

    @property
    def added(self) -> str:
        """The hook point of what its last layer makes, with what is declared behind it, before a norm that follows."""
        return f"{self.part}hook_out" if self.named.step.post else self.result

    @property
    def module(self) -> str:
        """The path of its part."""
        return join(self.path, self.step.part.path)

    def makes(self, letter: str) -> LayerStep:
        """The step that makes an attention's queries (``q``), keys or values: this one, or one of another block."""
        part = self.step.part
        if letter == "q" or not isinstance(part, Attention) or part.keys_of is None:
            return self
        path = self.path.removesuffix(self.stack.place_of(self.layer)) + self.stack.place_of(part.keys_of)
        return replace(self, prefix=f"{self.stack.name}.{part.keys_of}.", path=path, layer=part.keys_of)


@dataclass
class Evidence:
    """A bridge that is to be proved, and one run of it.

    Attributes:
        bridge: the bridge.
        tokens: what was run; images or sound, where the first blocks read these.
        more: what the model was given besides.
        activations: by the names of the hook points.
        calls: by the paths of the modules; what is given positions first is there with the batch first.
        raw: the same as they were.
        output: what the model returned, its first tensor.
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
        """What was run, by the names of the model's own arguments."""
        return arguments_of(self.bridge.core, self.tokens, self.more)

    @property
    def text(self) -> Tensor:
        """The tokens: those of the decoder, where it runs on images or sound."""
        return self.more["decoder_input_ids"] if self.tokens.is_floating_point() else self.tokens

    @property
    def architecture(self) -> Architecture:
        """The declaration."""
        return self.bridge.architecture

    def module(self, *parts: str) -> nn.Module:
        """The module at a path."""
        return module_at(self.bridge.original_model, join(*parts))

    @property
    def base(self) -> str:
        """The path of the base model."""
        return base_path(self.bridge.original_model)

    def stacks(self) -> Iterator[Stack]:
        """The lists of blocks that are there: a model may be the encoder alone."""
        for stack in self.bridge.architecture.stacks:
            if has_module(self.bridge.original_model, join(self.base, stack.path)):
                yield stack

    def places(self) -> Iterator[LayerStep]:
        """Every step of every block that is there."""
        return places_of(self.bridge)

    def attentions(self) -> Iterator[tuple[LayerStep, Attention]]:
        """Every attention: of the steps, and inside of mixers."""
        for place in self.places():
            for named, part in place.named.attentions:
                yield replace(place, named=named), part

    def call(self, *parts: str) -> ModuleCall | None:
        """The first call of a module, by its path; None where it did not run."""
        return next(iter(self.calls.get(join(*parts), ())), None)

    def entered(self, *parts: str) -> Tensor | None:
        """What a module is given in its first call; None where it did not run."""
        call = self.call(*parts)
        return call.input if call else None

    def made(self, *parts: str) -> Tensor | None:
        """What it returns there; None where it did not run."""
        call = self.call(*parts)
        return call.result if call else None

    def calls_in(self, path: str) -> Iterator[ModuleCall]:
        """The first calls of the modules inside one."""
        for each, found in self.calls.items():
            if each.startswith(f"{path}.") and found:
                yield found[0]

    def from_model(self, path: str) -> str:
        """A path as it is declared, as one from the model."""
        return path_from(self.bridge.original_model, path)

    def seen_by(self, hook: Hook) -> Call | None:
        """The call of the module that a hook point stands on, as its view is given it; None where it did not run."""
        raw = next(iter(self.raw.get(hook.point.site.path, ())), None)
        if raw is None:
            return None
        sources = tuple(
            (found.module, found.input)
            for found in map(self.call, (site.path for site in hook.point.sources))
            if found is not None and found.input is not None
        )
        return Call(raw.module, raw.args, raw.kwargs, sources)

    def get(self, name: str) -> Tensor | None:
        """An activation; None where there is no such hook point."""
        return self.activations.get(name)


def like(x: Tensor | None, shape: Tensor | None) -> Tensor | None:
    """A tensor of ``(batch pos)`` rows with the axes of another; any other as it is."""
    if x is None or shape is None or x.shape == shape.shape or x.numel() != shape.numel():
        return x
    return x.reshape(shape.shape)


def places_of(bridge: Bridge) -> Iterator[LayerStep]:
    """Every step of every block that is there."""
    for stack in bridge.architecture.stacks:
        for index in blocks_of(bridge, stack):
            for named in stack.block_at(index).named:
                path = join(base_path(bridge.original_model), stack.place_of(index))
                yield LayerStep(f"{stack.name}.{index}.", path, index, stack, named)


def blocks_of(bridge: Bridge, stack: Stack) -> list[int]:
    """The blocks of a list that have hook points: some run with images alone."""
    names = (re.fullmatch(rf"{stack.name}\.(\d+)\.hook_resid_pre", name) for name in bridge.hook_dict)
    return [int(found[1]) for found in names if found]


def light_points(bridge: Bridge) -> list[str]:
    """The hook points that may be kept all at once: no stream for each head, no state at each position."""
    points = {name: hook.point for name, hook in bridge.hook_dict.items()}
    return [name for name, each in points.items() if each.group != "heavy" and each.site.key != "state"]


def some_tokens(
    bridge: Bridge, batch: int, pos: int, seed: int = 0, given: Given | None = None
) -> tuple[Tensor, Arguments]:
    """Random tokens, and what the model needs besides them; or images or sound, and tokens for a decoder behind them.

    Args:
        bridge: the bridge.
        batch, pos: how many.
        seed: which ones.
        given: its other inputs, or others in place of them; None: made up.
    """
    generator = torch.Generator().manual_seed(seed)
    table = getattr(token_embedding(bridge.core), "weight", None)
    known = bridge.cfg.d_vocab > 0 and isinstance(table, Tensor)
    most = min(bridge.cfg.d_vocab, table.shape[0]) if known and isinstance(table, Tensor) else bridge.cfg.d_vocab
    tokens = torch.randint(0, max(most, 1), (batch, pos), generator=generator).to(bridge.cfg.device)
    padding = getattr(config_of(bridge.core), "pad_token_id", None)
    if isinstance(padding, int) and most > 1:  # whose embedding may be zero, which no query and no key is seen in
        tokens = tokens.masked_fill(tokens == padding, (padding + 1) % most)
    return with_what_it_needs(bridge, tokens, given)


def with_what_it_needs(bridge: Bridge, tokens: Tensor, given: Given | None = None) -> tuple[Tensor, Arguments]:
    """The input of a run, and its other inputs.

    Args:
        bridge: the bridge.
        tokens: ``[batch, pos]``.
        given: as for `some_tokens`.
    """
    two = config_of(bridge.core).is_encoder_decoder and len(bridge.architecture.stacks) > 1
    return split(bridge.core, with_required_inputs(bridge.core, tokens, two, given))


def few_logits(bridge: Bridge, names: Sequence[str]) -> Kwargs:
    """Asks for the last position's logits alone, where nobody looks at them and the model can be asked so.

    Args:
        bridge: the bridge.
        names: the hook points that are looked at.
    """
    looked_at = any(name.startswith("unembed") for name in names)
    return {} if looked_at or "logits_to_keep" not in accepted_by(bridge.core) else {"logits_to_keep": 1}


#: Of how many tokens logits are made where two runs are compared, at least; with fewer than four times as many, of all.
_TOKENS = 1024


def few_tokens(bridge: Bridge, step: int) -> AbstractContextManager[object]:
    """A ``with`` statement in which runs return each how-many-th token's logits alone.

    It is for what compares two runs: of a large vocabulary, nearly all of their time would be spent in the output
    layer. Its product is made with some rows of its matrix.

    Args:
        bridge: the bridge, or one of a probe copy of its model.
        step: what `step_of_tokens` said of the model; 1: all tokens.
    """
    layer = _output_layer(bridge) if step > 1 else None

    def some_rows(func: Function, args: Args, kwargs: Kwargs) -> Any:
        if layer is None or func is not torch.nn.functional.linear or len(args) != 3 or args[1] is not layer.weight:
            return func(*args, **kwargs)
        bias = args[2]
        return func(args[0], args[1][::step], None if bias is None else bias[::step])

    return nullcontext() if layer is None else Watch.calling(some_rows)


def _output_layer(bridge: Bridge) -> nn.Linear | None:
    model, readout = bridge.original_model, bridge.architecture.readout
    path = path_from(model, "." + readout.path)
    layer = model.get_submodule(path) if readout.path and has_module(model, path) else None
    return layer if type(layer) is nn.Linear else None


def step_of_tokens(bridge: Bridge, tokens: Tensor, more: Given) -> int:
    """Each how-many-th token's logits are enough where two runs are compared; 1: all are needed, or there are few.

    On a CPU alone: a model may look for tokens that are left out, which no other device survives.

    Args:
        bridge: the bridge.
        tokens, more: what the model is tried on.
    """
    model, layer = bridge.original_model, _output_layer(bridge)
    plain = model is bridge.core and bridge.layout is None and not bridge.architecture.readout.bias
    if layer is None or not plain or is_moved(model) or layer.out_features < 4 * _TOKENS:
        return 1
    if layer.weight.device.type != "cpu":
        return 1
    step = layer.out_features // _TOKENS
    try:
        with torch.no_grad():
            right = bridge.run_with_hooks(tokens, fwd_hooks=[], **more)[..., ::step]
            with few_tokens(bridge, step):
                found = bridge.run_with_hooks(tokens, fwd_hooks=[], **more)
        # Others, where the model puts something in the place of the logits of some tokens, by their numbers.
        same = torch.allclose(found, right, rtol=0.02, atol=0.02 * float(right.abs().median()))
    except WRONG as error:  # the model looks at the logits of all tokens
        one_line(error)
        return 1
    return step if same else 1


#: The activations that `randomized_run` replaces by random numbers, by the ends of their names, and their size.
RANDOMIZED = {
    ".hook_q": 2.0, ".hook_k": 2.0, ".hook_v": 1.0, ".hook_pre": 1.5, ".hook_pre_linear": 1.5, ".hook_gate": 1.5,
    "unembed.hook_out": 20.0,
}  # fmt: skip


#: What they are multiplied with, row by row: what is wrong of small or of large values alone is wrong there. Where
#: queries are large keys are small: scores stay as they are.
_SIZES_OF_ROWS = (6.0, 1 / 6, 1.0, 1.0)


def randomized_run(bridge: Bridge, tokens: Tensor, more: Given) -> Evidence:
    """A run in which what enters every function is replaced by random numbers, wide enough to tell functions apart.

    Queries, keys, values, what enters activation functions, and what the unembedding makes. A model's own may be so
    small that every function of them is a straight line.

    Args:
        bridge: the bridge.
        tokens, more: what to run.
    """
    evidence = Evidence(bridge, tokens, more)
    generator = torch.Generator().manual_seed(1)
    sizes, cap = dict(RANDOMIZED), bridge.cfg.attn_scores_soft_cap
    if cap > 0:  # scores as large as it is, which show what it does to them
        sizes[".hook_q"] = sizes[".hook_k"] = 0.8 * max(cap, 6.25) ** 0.5
    clips = [part.clip or 0.0 for _, part in evidence.attentions()]
    for end in (".hook_q", ".hook_k", ".hook_v"):  # beyond every clamp, in the rows of large values
        sizes[end] = max([sizes[end], *(clip / 4 for clip in clips)])

    def look(x: Tensor, hook: Hook) -> Tensor | None:
        size = next((size for end, size in sizes.items() if hook.name.endswith(end)), None)
        if size is None:
            evidence.activations[hook.name] = recorder.copied(x)
            return None
        new = torch.randn(x.shape, generator=generator) * size
        if hook.point.axes.startswith("batch ") and len(x) == len(tokens):
            factors = [_SIZES_OF_ROWS[row % len(_SIZES_OF_ROWS)] for row in range(len(x))]
            factors = [1 / each for each in factors] if hook.name.endswith(".hook_k") else factors
            new = new * torch.tensor(factors).view(-1, *(1 for _ in x.shape[1:]))
        evidence.activations[hook.name] = new.to(x)
        return new.to(x)

    hooks: list[NamedHook] = [(light_points(bridge), look)]  # no claim is of a state
    recorder = CallRecorder(bridge.original_model.named_modules(), layout=bridge.layout)
    with torch.no_grad(), recorder as recording:
        output = bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more)
    evidence.raw = add_numbered(recording.by_path, bridge)
    evidence.output = output if isinstance(output, Tensor) else None
    evidence.calls = _batch_first(evidence) if bridge.architecture.stack.positions_first else evidence.raw
    return evidence


def _batch_first(evidence: Evidence) -> Calls:
    """The calls with the batch before the positions."""
    shapes = [tuple(x.shape[:2]) for x in (evidence.tokens, *evidence.more.values()) if x.ndim > 1]

    def turned(x: Any) -> Any:
        if isinstance(x, Tensor) and tuple(x.shape[1::-1]) in shapes:
            return x.transpose(0, 1)
        return type(x)(turned(value) for value in x) if type(x) in (tuple, list) else x

    def call(each: ModuleCall) -> ModuleCall:
        kwargs = {name: turned(value) for name, value in each.kwargs.items()}
        return replace(each, args=turned(each.args), kwargs=kwargs, output=turned(each.output))

    return {path: [call(each) for each in calls] for path, calls in evidence.raw.items()}


def with_graph(bridge: Bridge, tokens: Tensor, more: Given) -> Evidence:
    """A run that keeps the graph of each block by itself, with the patterns cut out of it.

    Scores and patterns are in its activations; what made them and was made of them, in its calls.

    Args:
        bridge: the bridge.
        tokens, more: what to run.
    """
    evidence = Evidence(bridge, tokens, more)
    scores = [name for name in bridge.hook_dict if name.endswith((".hook_attn_scores", ".hook_pattern"))]
    blocks = {place.path for place in evidence.places()}

    def look(x: Tensor, hook: Hook) -> Tensor | None:
        evidence.activations[hook.name] = x
        return x.detach() if hook.name.endswith("pattern") else None

    def cut(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return tuple(map(_leaf, args)), {name: _leaf(value) for name, value in kwargs.items()}

    model = bridge.original_model
    plain = {module_path(block) for block in blocks}
    wanted = [each for each in model.named_modules() if any(each[0].startswith(f"{block}.") for block in plain)]
    hooks: list[NamedHook] = [(scores, look)] if scores else []
    with ExitStack() as cuts, torch.enable_grad():
        for path in plain:
            cuts.enter_context(model.get_submodule(path).register_forward_pre_hook(cut, with_kwargs=True))
        recording = cuts.enter_context(CallRecorder(wanted, copies=False, layout=bridge.layout))
        bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more, **few_logits(bridge, scores))
    evidence.calls = add_numbered(recording.by_path, bridge)
    return evidence


def _leaf(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().requires_grad_()
    return x
