"""Proofs: `verify` checks on a live model that an adapter's declaration is true, without knowing
the family.

**Input**: a bridge (anything that runs a model with hooks and has a declaration), and the model's
inputs.

**Output**: a `Report`: a `Check` for each claim, with the observed values where it fails, and what
the evidence could not decide.

**Steps**, in order:

1. The modules that the declaration names exist. If not, nothing else can be checked.
2. Mechanics (`mechanics.py`): the checks that apply to every hook point. Without hooks, the logits
   are the model's; each point fires once, with its axes; writing back an activation changes
   nothing; edits have an effect.
3. Claims, on a run in which queries, keys, values and the inputs of activation functions are random
   and widely spread (`evidence.py`), on a probe copy if the model's own parameters prove nothing.
   Each claim compares **the observed activation** with **the one that the declaration implies**:
   the stream adds up and each part reads its declared input (`stream.py`); a norm returns the
   result of `NormKind.of`, neurons are the result of `MLP.neurons`, experts are chosen and weighted
   as by `MoE.best` and `MoE.shares` (`feed_forward.py`); scores, pattern and `z` (`scores.py`),
   with the rotation of queries and keys (`positions.py`).
4. Facts and weights: each field of `cfg`, each matrix, and that no module that computes something
   is missing (`facts.py`).
5. Columns: by gradient, each head's queries, keys and values are the columns that reach its scores
   and its `z` (`projections.py`). The gradient at each point is the slope of an edit there
   (`slopes.py`).

`Proof` does the same for an inferred declaration: it searches for the hook points that hold. It
tests many together and bisects on failure. A hook point that fails is not available, and its error
says why.

**Errors**: a model without weights, or with required inputs that cannot be generated. An error
during a check is a failed claim. The mutated declarations in the tests measure whether wrong
declarations are detected.

**Constraint**: this package does not depend on families, nor on how a hook point is implemented: it
sees a bridge through `Bridge`, a Protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from adapters.architecture import NOT_PROVED, Architecture
from adapters.attention import Attention
from adapters.imports import known_error
from adapters.inputs import Arguments, Given, may_take, sample_inputs, split
from adapters.observe.observe import WRONG, evaluating, one_line, outside_of_modes
from adapters.observe.probe_copy import is_moved, probe_copy, trivial_parameters, why_no_probe_copy
from adapters.observe.recognised import ProgressBar, progress, tolerance
from adapters.points import is_inside
from adapters.proofs.evidence import (
    Bridge,
    Check,
    Evidence,
    Findings,
    Hook,
    Report,
    claimed_points,
    few_tokens,
    named_at,
    places_of,
    randomized_run,
    some_tokens,
    with_graph,
    with_required,
)
from adapters.proofs.facts import FACTS as FACTS
from adapters.proofs.facts import LEFT_OUT as LEFT_OUT
from adapters.proofs.facts import WEIGHTS as WEIGHTS
from adapters.proofs.facts import prove_coverage, prove_facts, prove_modules, prove_weights
from adapters.proofs.feed_forward import CLAIM as NORMS
from adapters.proofs.feed_forward import GATED, prove_feed_forward, prove_norms
from adapters.proofs.mechanics import ATTRIBUTED, EMBEDDED, Edits, Mechanics, Test
from adapters.proofs.positions import SCORES, RelativeBuckets
from adapters.proofs.projections import CLAIM as COLUMNS
from adapters.proofs.projections import WRITTEN, prove_choices, prove_projections, prove_written
from adapters.proofs.scores import PATTERN, VALUES, prove_attention
from adapters.proofs.slopes import SLOPES, Slopes, layers_without_slopes
from adapters.proofs.stream import ENDS, LOGITS, READS, prove_streams

#: Extent of a verification: all of it, or only a few runs.
Level = Literal["full", "quick"]

#: Hook points that are correct only if a claim holds, by the endings of their names: the inputs of
#: the claim's computation.
_SHOWN_BY = {
    SCORES: ("hook_q", "hook_k"),
    VALUES: ("hook_v",),
    GATED: ("hook_pre", "hook_pre_linear"),
}
REPLACED = "activations can be replaced by random numbers"
_CONSTANT = "random numbers in"
#: Length of a longer text on which the claims are checked as well.
_FAR = 67
#: Claims that are not about the hook points at which they are checked: if one fails, the claim
#: itself is not available.
_OF_ALL = (ENDS, LOGITS, ATTRIBUTED)
#: Maximum length of a text that shows the reach of a position bias.
_LONG = 160
#: A claim that fails if its proof raises, and the proof.
NamedProof = tuple[str, Callable[[Evidence, Findings], None]]
#: Each proof for the activations of a run.
_PROOFS: tuple[NamedProof, ...] = (
    (READS, prove_streams),
    (NORMS, prove_norms),
    (SCORES, prove_attention),
    (GATED, prove_feed_forward),
    (WRITTEN, prove_written),
    (FACTS, prove_facts),
)


def verify(
    bridge: Bridge,
    tokens: Tensor | None = None,
    level: Level = "full",
    *,
    inputs: Given | None = None,
) -> Report:
    """Check on a model every claim of its adapter, without knowing the family.

    Every claim of the declaration is compared with the model's computation: the columns of each
    head, by gradient; the stream, the norms, scores, pattern and MLPs, by recomputation;
    completeness, by the modules that ran. The model is not changed. If its parameters prove nothing
    (biases of zero and norms of one; half precision proves little), a probe copy is used: it has
    new modules and shares all other parameters with the model.

    Args:
        bridge: a bridge around any model with weights.
        tokens: ``[batch, pos]`` to run; None: two rows of nine random tokens.
        inputs: images or sound that the model needs, by the names of its own arguments, and tokens
            that fit them, if the model needs such: the output of its processor. None: generated,
            with the sizes in its configuration.
        level: ``full``; or ``quick``: only a few runs, none of them per layer or per kind of hook
            point, and no gradients.

    Returns:
        A report. ``report.passed`` tells whether everything holds; ``print(report)`` prints the
        table. It lists each failed claim with the observed values, and the claims that the evidence
        could not decide.

    Raises:
        ValueError: the model has no weights to run (it is on the ``meta`` device); the level does
            not exist; a required input cannot be generated.

    Example:
        >>> from adapters import verify
        >>> from bridge import TransformerBridge
        >>> verify(TransformerBridge.boot_embedded()).passed
        True
    """
    if level not in ("full", "quick"):
        raise ValueError(f"level={level!r} is neither 'full' nor 'quick'")
    if bridge.cfg.device.type == "meta":
        raise ValueError(
            "this model has no weights (load_weights=False), so there is nothing to run"
        )
    # Leave inference and autocast modes: verification needs gradients, and the model's own type.
    with outside_of_modes(bridge.original_model), progress("verifying", "check", None):
        return _report(bridge, tokens, level, _savable_inputs(inputs))


def why_refuted(bridge: Bridge, inputs: Given | None = None) -> str:
    """Return the first claim of a declaration that fails in a few runs, with the observed values;
    "" if none fails.

    Args:
        bridge: a bridge around any model. Without weights (on the ``meta`` device), no claim fails.
        inputs: as for `verify`.

    Raises:
        CannotBeMade: a required input cannot be generated.
    """
    if bridge.cfg.device.type == "meta":
        return ""
    with outside_of_modes(bridge.original_model):
        failed = _report(bridge, None, "declared", _savable_inputs(inputs)).failed
    if not failed:
        return ""
    first = failed[0]
    return f"{first.name}: {first.detail.partition('; ')[0]}"


def without_claims(architecture: Architecture, names: Mapping[str, str]) -> Architecture:
    """Return a declaration that marks unproved embedding and readout claims as unknown.

    Args:
        architecture: the declaration.
        names: the result of `Proof.not_proved`.
    """
    first, *rest = architecture.stacks
    if EMBEDDED in names:
        first = replace(first, embedding=replace(first.embedding, given="other"))
    wrong = names.get(ENDS) or names.get(LOGITS) or names.get(ATTRIBUTED)
    unknown = {"embedding": wrong, "readout": wrong} if wrong else {}
    return replace(architecture, stacks=(first, *rest), unknown={**unknown, **architecture.unknown})


def _savable(x: Tensor) -> Tensor:
    """Return a tensor that autograd can use; copy it if it was created in inference mode."""
    return x.clone() if x.is_inference() else x


def _savable_inputs(inputs: Given | None) -> Given | None:
    """Return inputs that autograd can use."""
    return inputs and {name: _savable(x) for name, x in inputs.items()}


def _report(
    bridge: Bridge, tokens: Tensor | None, level: Level | Literal["declared"], inputs: Given | None
) -> Report:
    if tokens is None:
        tokens, more = some_tokens(bridge, 2, 5 if level == "declared" else 9, inputs=inputs)
    else:
        tokens, more = with_required(bridge, _savable(tokens.to(bridge.cfg.device)), inputs)
    claimed = {*claimed_points(bridge)}
    unclaimed = tuple(name for name in bridge.hook_dict if name not in claimed)
    report = Report(bridge.cfg.model_name, not_verified=unclaimed)
    presence = prove_modules(bridge.original_model, places_of(bridge))
    if not presence.passed:  # nothing else can be checked
        report.checks.append(presence)
        return report
    with evaluating(bridge.original_model):
        with torch.no_grad():
            mechanics = Mechanics(bridge, tokens, more, tolerance(bridge.cfg.dtype))
            report.checks += mechanics.declared() if level == "declared" else mechanics.quick()
        if report.passed:  # hook points that do not fire cannot be checked
            report.checks += _proofs(mechanics, level, inputs)
            if level == "full":
                with torch.no_grad():
                    report.checks += mechanics.full()
        report.checks += mechanics.last()
    if wrong := known_error(bridge.core):
        name = "transformers computes this model as its configuration says"
        report.checks.append(Check(name, False, wrong))
    return report


def _proofs(mechanics: Mechanics, level: str, inputs: Given | None) -> list[Check]:
    """Return the checks of the declaration, on the model or on its probe copy."""
    bridge = mechanics.bridge
    step = mechanics.step if level in ("full", "inferred") else 1
    why = _why_probe_copy(bridge)
    half = _is_half(bridge)
    with _tried_on(bridge, why) as subject:
        checks = _proofs_on(subject, level, inputs, step, mechanics.refused, half=half)
        return [*checks, *_proved_on(bridge, why)]


@contextmanager
def _tried_on(bridge: Bridge, why: Collection[str]) -> Iterator[Bridge]:
    """Yield the bridge, or one of a probe copy if it is needed and possible."""
    if not why or why_no_probe_copy(bridge.original_model):
        yield bridge
        return
    # Copy the core, not its wrapper: compiled code keeps its original modules.
    with probe_copy(bridge.core) as copied:
        yield bridge.rewrapped(copied)


def _proofs_on(
    subject: Bridge,
    level: str,
    inputs: Given | None,
    step: int,
    refused: Collection[str],
    *,
    half: bool,
) -> list[Check]:
    """Return the checks of the declaration on a model that proves it."""
    cfg = subject.cfg
    findings = Findings(tolerance(cfg.dtype), 3e-2 if half else 1e-4, subject.not_offered)
    pos = _length(subject, level)
    rows = max(2, min(cfg.n_heads, 8))
    if not cfg.num_experts:  # experts need many tokens to be chosen
        rows = min(rows, 4 if level == "full" else 2)
    tokens, more = some_tokens(subject, rows, pos, 1, inputs)
    try:
        evidence = randomized_run(subject, tokens, more)
    except WRONG as error:
        findings.holds(REPLACED, "a run", False, one_line(error))
        return list(findings.checks())
    _attempt(_PROOFS, evidence, findings)
    declared = level == "declared"
    findings.attempt(WEIGHTS, lambda: prove_weights(evidence, findings, of_each_kind=declared))
    ran = evidence
    if not cfg.num_experts:
        ran = Evidence(subject, *some_tokens(subject, 1, 5 if declared else pos, 1, inputs))
    findings.attempt(LEFT_OUT, lambda: prove_coverage(ran, findings))
    if level in ("full", "inferred") and not tokens.is_floating_point():
        with few_tokens(subject, step):
            _prove_long(subject, 2 if level == "full" else 1, inputs, findings)
            # Padding among images and sound is up to the model.
            _prove_padded(subject, some_tokens(subject, 2, pos, 1, inputs), findings)
    if level == "full":
        _prove_gradients(evidence, refused, inputs, step, findings)
    else:
        findings.attempt(COLUMNS, lambda: prove_choices(evidence, findings))
    return list(findings.checks())


def _attempt(proofs: Sequence[NamedProof], evidence: Evidence, findings: Findings) -> None:
    """Run proofs on the activations of a run."""
    for claim, prove in proofs:
        findings.attempt(claim, partial(prove, evidence, findings))


def _prove_gradients(
    evidence: Evidence,
    refused: Collection[str],
    inputs: Given | None,
    step: int,
    findings: Findings,
) -> None:
    """Check the columns of each head, and the gradients at all hook points but the refused ones."""
    subject = evidence.bridge
    if without := layers_without_slopes(evidence.raw):
        for path, reason in without.items():
            findings.refused(COLUMNS, path, reason)
            findings.refused(SLOPES, path, reason)
        findings.attempt(COLUMNS, lambda: prove_choices(evidence, findings))
        return
    rows = max(2, min(subject.cfg.n_heads, 8))  # one gradient per head, up to this many at a time
    run = some_tokens(subject, rows, _length(subject, "full"), 1, inputs)
    findings.attempt(COLUMNS, lambda: prove_projections(with_graph(subject, *run), findings))
    run = some_tokens(subject, 2, 5, 3, inputs)
    names = [name for name in claimed_points(subject) if name not in refused]
    slopes = Slopes(subject, names, run, findings, step)
    findings.attempt(SLOPES, slopes.prove)


def _prove_long(bridge: Bridge, rows: int, inputs: Given | None, findings: Findings) -> None:
    """Check the same claims on a longer text, where positions may count differently."""
    n_ctx = bridge.cfg.n_ctx
    pos = _FAR if n_ctx is None else min(_FAR, n_ctx)
    inputs_of_run = some_tokens(bridge, rows, pos, 4, inputs)
    try:
        evidence = randomized_run(bridge, *inputs_of_run)
    except WRONG as error:
        if why := _why_not_run(bridge, *inputs_of_run):
            findings.inconclusive(SCORES, f"texts of {pos} tokens: {why}")
        else:
            findings.holds(SCORES, f"a run of {pos} tokens", False, one_line(error))
        return
    _attempt(_PROOFS[:-1], evidence, findings)  # without the facts


def _prove_padded(
    bridge: Bridge, inputs: tuple[Tensor, dict[str, Tensor]], findings: Findings
) -> None:
    """Check attention with a left-padded first row, if the model takes an attention mask."""
    if not may_take(bridge.core, "attention_mask"):
        findings.inconclusive(PATTERN, "padding: it takes no attention_mask")
        return
    tokens, more = inputs
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    more = more | {"attention_mask": mask}
    try:
        evidence = randomized_run(bridge, tokens, more)
    except WRONG as error:
        if why := _why_not_run(bridge, tokens, more):  # a separate run; few models need it
            findings.inconclusive(
                PATTERN, f"padding: it takes no attention_mask of two axes ({why})"
            )
        else:
            findings.holds(PATTERN, "a run with padding", False, one_line(error))
        return
    findings.attempt(PATTERN, lambda: prove_attention(evidence, findings))


def _why_not_run(bridge: Bridge, tokens: Tensor, more: dict[str, Tensor]) -> str:
    """Return why a model does not run on an input without hooks; "" if it runs."""
    try:
        bridge.run_with_hooks(tokens, fwd_hooks=[], **more)
    except WRONG as error:
        return one_line(error)
    return ""


def _why_probe_copy(bridge: Bridge) -> list[str]:
    """Return the properties of a model that require a probe copy, in the words of a report."""
    model = bridge.original_model
    why = list[str]()
    if trivial := trivial_parameters(model):
        why.append(f"{_CONSTANT} {len(trivial)} constant parameters")
    if _is_half(bridge):
        why.append("in float32")
    if any(parameter.is_inference() for parameter in model.parameters()):
        why.append("copied, since they were made in inference mode")
    if is_moved(model):
        why.append("each brought when it is used")
    return why


def _is_half(bridge: Bridge) -> bool:
    """Tell whether a model computes in half precision."""
    return bridge.cfg.dtype in (torch.float16, torch.bfloat16)


def _proved_on(bridge: Bridge, why: list[str]) -> Iterator[Check]:
    """Yield a check that names the tested model, if that is a probe copy or a model that proves
    little.
    """
    if not why:
        return
    reason = why_no_probe_copy(bridge.original_model)
    if not reason:
        subject = "a probe copy with the model's parameters"
        yield Check("proved on", True, ", ".join([subject, *why]))
        return
    limits: list[str] = []
    if trivial := trivial_parameters(bridge.original_model):
        limits.append(f"{len(trivial)} parameters are constant and could be left out unseen")
    if _is_half(bridge):
        close = f"{tolerance(bridge.cfg.dtype):.0%} in {bridge.cfg.dtype}"
        limits.append(f"what differs by less than {close} is not told apart")
    more = f": {'; '.join(limits)}" if limits else ""
    yield Check("proved on", True, f"the model itself ({reason}){more}")


def _length(bridge: Bridge, level: str) -> int:
    """Return a text length at which windows and (at the level ``full``) the buckets of distances
    have an effect, if that is not too long.
    """
    cfg = bridge.cfg
    pos = 11
    if cfg.window_size is not None and cfg.window_size <= 64:
        pos = max(pos, cfg.window_size + 3)
    count = cfg.relative_attention_num_buckets
    most = cfg.relative_attention_max_distance
    if count is not None:
        pos = max(pos, 29)
    if count is not None and most is not None and level == "full":
        buckets = RelativeBuckets(count, most, both=cfg.attention_dir != "causal")
        for other in (most - 1, most + 1):
            length = buckets.telling_distance(other) + 1
            if length <= _LONG:
                pos = max(pos, length)
    other_sizes = {cfg.n_heads, cfg.n_kv_heads, max(2, min(cfg.n_heads, 8)), 4}
    while pos in other_sizes or pos - 4 in other_sizes:
        pos += 1
    return pos if cfg.n_ctx is None else min(pos, cfg.n_ctx)


# --------------------------------------------------------------------------------------------------
# Search for the hook points of an inferred declaration that hold on the live model. The others are
# excluded by name.
#
# Points are tested together and bisected on failure: a model with some thousand points takes some
# dozen runs.
# --------------------------------------------------------------------------------------------------


class Proof:
    """Search for the valid hook points of an inferred declaration.

    Args:
        bridge: a bridge with all points that were inferred.
        inputs: images or sound that its model needs, by the names of its own arguments; None:
            generated.

    Attributes:
        not_offered: the hook points that do not hold, and why.
        no_layer_runs: why a run cannot start at a layer; "" if it can.
    """

    def __init__(self, bridge: Bridge, inputs: Given | None = None) -> None:
        self.bridge = bridge
        self._inputs = _savable_inputs(inputs)
        self.arguments = sample_inputs(bridge.core, inputs)
        self.not_offered: dict[str, str] = {}
        self.no_layer_runs = bridge.no_layer_runs
        self._progress = ProgressBar()
        self._slopes: list[Check] = []

    @property
    def tokens(self) -> Tensor:
        """Return the input of the runs."""
        return split(self.bridge.core, self.arguments)[0]

    def run(self) -> Proof:
        """Test all hook points, with the model in evaluation mode; return self."""
        model = self.bridge.original_model
        with (
            outside_of_modes(model),
            evaluating(model),
            torch.no_grad(),
            progress("proving") as self._progress,
        ):
            self._progress("the model itself", 0)
            inputs = split(self.bridge.core, self.arguments)
            self.mechanics = Mechanics(self.bridge, *inputs, tolerance(self.bridge.cfg.dtype))
            self._progress.grow(len(self.mechanics.names))
            # Run before any hook is installed: BigBird chooses its attention in its first run.
            self.mechanics.run_plain()
            self._leave_out(self.mechanics.seen_once, "hook points are seen")
            self._leave_out(self._kept_of_few, "hook points and kept, of a short run")
            with self.mechanics.of_few_tokens():
                self._leave_out(self.mechanics.written_back, "what is read is written back")
                if not self.no_layer_runs:
                    self._progress("runs of some layers", 0)
                    self.no_layer_runs = self._why_no_layer_runs()
                self._leave_out(self._without_effect)
        return self

    def not_proved(self) -> dict[str, str]:
        """Return the claims of `verify` that fail on the remaining hook points, once the bridge has
        only these.

        Returns:
            Hook points, prefixes of their names, weights, modules, or claims that name none of
            these, each with the claim and the observed value.
        """
        model = self.bridge.original_model
        with (
            outside_of_modes(model),
            evaluating(model),
            progress("proving the rest", "check", None),
        ):
            with torch.no_grad():
                checks = self.mechanics.promised()
                if any(check.wrong for check in self._slopes):  # test the rest as `verify` does
                    inputs = some_tokens(self.bridge, 2, 5, 3, self._inputs)
                    self._moved(claimed_points(self.bridge), inputs)
            checks += _proofs(self.mechanics, "inferred", self._inputs)
        reasons: dict[str, str] = {}
        for check in (*checks, *self._slopes):
            for place, observed in check.wrong:
                name = check.name if check.name in _OF_ALL else named_at(check.name, place)
                if check.name == LEFT_OUT:
                    name = self._around(name)
                reason = f"{NOT_PROVED}: {check.name}: {observed or place}"
                reason = reasons.setdefault(name, reason)
                if ".hook_" in name:
                    part = name.rpartition(".")[0]
                    for point in _SHOWN_BY.get(check.name, ()):
                        reasons.setdefault(f"{part}.{point}", reason)
        return {name: why for name, why in reasons.items() if name not in self.bridge.not_offered}

    def _around(self, path: str) -> str:
        """Return the outermost module around a path that contains no site of a hook point."""
        sites = [hook.point.site.path for hook in self.bridge.hook_dict.values()]
        while outer := path.rpartition(".")[0]:
            if any(is_inside(site, outer) for site in sites):
                break
            path = outer
        return path

    def _leave_out(self, test: Test, description: str = "") -> None:
        """Exclude the hook points that fail a test."""
        if description:
            self._progress(description, 0)
        failed = self.mechanics.failing(self.mechanics.names, test) | self.mechanics.refused
        self.not_offered |= failed
        self.mechanics.names = [name for name in self.mechanics.names if name not in failed]

    def _kept_of_few(self, names: list[str]) -> dict[str, str]:
        """Return the hook points that do not fire in a short run: a hook point must fire in runs of
        any length. Also check that a cache contains the other points.
        """
        names = [name for name in names if name not in self.mechanics.idle]
        short = self._cut(lambda length: length // 2)
        if short is None:  # images: activations per head would take gigabytes
            points = {name: self.bridge.hook_dict[name].point for name in names}
            light = [
                name for name in names if points[name].group != "heavy" or not points[name].depth
            ]
            self.mechanics.cache(light)
            return {}
        fired: set[str] = set()

        def look(x: Tensor, hook: Hook) -> None:
            fired.add(hook.name)

        tokens, more = split(self.bridge.core, short)
        self.bridge.run_with_hooks(tokens, fwd_hooks=[(names, look)], **more)
        kept = [name for name in names if name in fired]
        self.bridge.run_with_cache(tokens, names_filter=kept, **more)
        missing = [name for name in names if name not in fired and ".experts." not in name]
        return dict.fromkeys(missing, "it is not seen in a run of few tokens")

    def _cut(self, to: Callable[[int], int]) -> Arguments | None:
        """Return shorter texts; None if the model does not run on them.

        With images or sound, whose size is fixed, no shorter run is made.
        """
        if any(x.is_floating_point() or x.ndim != 2 for x in self.arguments.values()):
            return None
        short = {name: x[:, : to(x.shape[1])] for name, x in self.arguments.items()}
        # An error: the model itself does not accept such a text.
        return None if _why_not_run(self.bridge, *split(self.bridge.core, short)) else short

    def _without_effect(self, names: list[str]) -> dict[str, str]:
        """Return the hook points where an edit in one row of the batch does not change that row of
        the logits.
        """
        only_choose = self._auxiliary() | {"embed.hook_in"}
        edited: list[str] = []
        for name in names:
            has_rows = self.bridge.hook_dict[name].point.axes.startswith("batch ")
            if has_rows and name not in only_choose and "hook_expert_indices" not in name:
                edited.append(name)
        few = self._cut(lambda length: min(length, 3)) or self.arguments
        moved = self._moved(edited, split(self.bridge.core, few))
        rest = [name for name in edited if name not in moved]
        return Edits(self.bridge, few, self.arguments, self._progress).without_effect(rest, moved)

    def _moved(self, names: list[str], inputs: tuple[Tensor, Arguments]) -> set[str]:
        """Return the hook points whose gradient shows that an edit changes the logits."""
        reasons = _why_probe_copy(self.bridge)
        why = [reason for reason in reasons if not reason.startswith(_CONSTANT)]
        if why and why_no_probe_copy(self.bridge.original_model):
            return set()
        dtype = torch.float32 if _is_half(self.bridge) else self.bridge.cfg.dtype
        findings = Findings(tolerance(dtype), not_offered=self.bridge.not_offered)
        with _tried_on(self.bridge, why) as subject:
            slopes = Slopes(subject, names, inputs, findings, self.mechanics.step)
            findings.attempt(SLOPES, slopes.prove)
        self._slopes += findings.checks()
        return slopes.moved

    def _auxiliary(self) -> set[str]:
        """Return the hook points of attention's auxiliary modules: an indexer selects keys, and
        selects all of them in a short text.
        """
        names: set[str] = set()
        for place in places_of(self.bridge):
            part = place.step.part
            if isinstance(part, Attention):
                names |= {f"{place.part}{path}.hook_out" for path, _ in part.auxiliary_modules}
        return names

    def _why_no_layer_runs(self) -> str:
        """Return why a run that resumes at the layer where another stopped returns other logits; ""
        if it does not.
        """
        try:
            for layer, logits, expected in self.mechanics.layer_runs():
                if not self.mechanics.close(logits, expected)[0]:
                    return (
                        f"a run that starts at {layer} gives different logits: its blocks need"
                        " further inputs"
                    )
        except WRONG as error:
            return f"its blocks cannot be run by themselves ({one_line(error)})"
        return ""
