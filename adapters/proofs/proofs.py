"""Proofs: `verify` shows on a live model that what its adapter declares is so, without knowing the family.

**In**: a bridge (anything that runs a model with hooks and has a declaration), and what the model takes.

**Out**: a `Report`: a `Check` for each claim, with what was seen where it fails, and what could not be told apart.

**How**, in order:

1. The modules that the declaration names are there. If not, nothing else can be looked at.
2. Mechanics (`mechanics.py`): what every hook point promises, whatever it is called. Without hooks the logits are the
   model's; each point fires once, with its axes; what is read and written back changes nothing; edits arrive.
3. Claims, on a run in which queries, keys, values and what enters activation functions are random and wide
   (`evidence.py`), on a probe copy where the model's own parameters prove nothing. Each claim compares **what was
   seen** with **what the noun computes**: the stream adds up and each part reads what it is said to read (`stream.py`);
   a norm makes of telling rows what `NormKind.of` makes of them, neurons are what `MLP.neurons` says, experts are
   chosen and weighted as `MoE.best` and `MoE.shares` say (`feed_forward.py`); scores, pattern and `z` (`scores.py`).
4. Facts and weights: each field of `cfg`, each matrix, and that no module that computes something is left out
   (`facts.py`).
5. Columns: by gradient, each head's queries, keys and values are the columns that reach its scores and its `z`
   (`projections.py`). The gradient at each point is the slope of an edit there (`slopes.py`).

`Proof` is the same for a declaration that was inferred: a search for the hook points that hold, tried together and
apart only where that fails. What does not hold is not offered, and says why.

**It refuses** a model without weights, and one that needs what cannot be made up; an error in the middle is a claim
that fails. A proof that accepts everything is worth nothing: the table of mutated declarations in the tests is what it
is measured by.

**It must not know** of families, nor of how a hook point is served: it sees a bridge through `Bridge`, a Protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from adapters.architecture import NOT_PROVED, Architecture
from adapters.attention import Attention
from adapters.imports import known_error
from adapters.inputs import Given, arguments_of, may_take, sample_inputs, split
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
    few_tokens,
    named_at,
    places_of,
    randomized_run,
    some_tokens,
    with_graph,
    with_what_it_needs,
)
from adapters.proofs.facts import FACTS as FACTS
from adapters.proofs.facts import LEFT_OUT as LEFT_OUT
from adapters.proofs.facts import WEIGHTS as WEIGHTS
from adapters.proofs.facts import prove_coverage, prove_facts, prove_modules, prove_weights
from adapters.proofs.feed_forward import CLAIM as NORMS
from adapters.proofs.feed_forward import GATED, prove_feed_forward, prove_norms
from adapters.proofs.mechanics import ATTRIBUTED, EMBEDDED, Edits, Mechanics, Test
from adapters.proofs.projections import CLAIM as COLUMNS
from adapters.proofs.projections import WRITTEN, prove_choices, prove_projections, prove_written
from adapters.proofs.scores import PATTERN, SCORES, VALUES, prove_attention, telling_distance
from adapters.proofs.slopes import SLOPES, Slopes
from adapters.proofs.stream import ENDS, LOGITS, READS, prove_streams

#: How much of a verification is done: all of it, or what takes a few runs.
Level = Literal["full", "quick"]

#: The hook points that are right only where a claim holds, by the ends of their names: those of what it is made of.
_SHOWN_BY = {
    SCORES: ("hook_q", "hook_k"),
    VALUES: ("hook_v",),
    GATED: ("hook_pre", "hook_pre_linear"),
}
REPLACED = "activations can be replaced by random numbers"
_CONSTANT = "random numbers in"
#: How long a text is of which the claims are proved, too.
_FAR = 67
#: Claims that are not about the points that they are looked at: what is not offered is what is claimed.
_OF_ALL = (ENDS, LOGITS, ATTRIBUTED)
#: How long a text is at most that shows how far a position bias goes.
_LONG = 160
#: Each proof of the activations of one run, and what is said not to hold when it cannot be made.
_PROOFS = (
    (READS, prove_streams),
    (NORMS, prove_norms),
    (SCORES, prove_attention),
    (GATED, prove_feed_forward),
    (WRITTEN, prove_written),
    (FACTS, prove_facts),
)


def verify(
    bridge: Bridge, tokens: Tensor | None = None, level: Level = "full", *, inputs: Given | None = None
) -> Report:
    """Proves on a model what its adapter declares, without knowing the family.

    Every claim of the declaration is proved by what the model computes: which columns are which head's, by gradient;
    the stream, the norms, scores, pattern and MLPs, by computing them again; that nothing is left out, by what ran. The
    model is not changed. What takes other parameters than its own (biases of zero and norms of one prove nothing, half
    precision little) is proved on a probe copy: other modules, which share all other parameters with it.

    Args:
        bridge: a bridge around any model with weights.
        tokens: ``[batch, pos]`` to run; None: 2 random rows of 9.
        inputs: images or sound that the model needs, by the names of its own arguments, and tokens, where these have to
            fit: what its processor returns. None: made up, of the sizes that its configuration says.
        level: ``full``; or ``quick``: a few runs, without those for each kind of hook point and each layer, and without
            gradients.

    Returns:
        A report; ``report.passed`` says whether everything holds, ``print(report)`` shows the table. A claim that
        fails is there with what was seen, and so is what could not be told apart.

    Raises:
        ValueError: the model has no weights to run (it is on the ``meta`` device); there is no such level; it needs
            something that cannot be made up.

    Example:
        >>> from adapters import verify
        >>> from bridge import TransformerBridge
        >>> verify(TransformerBridge.boot_embedded()).passed
        True
    """
    if level not in ("full", "quick"):
        raise ValueError(f"level={level!r} is neither 'full' nor 'quick'")
    if bridge.cfg.device.type == "meta":
        raise ValueError("this model has no weights (load_weights=False), so there is nothing to run")
    # Wherever it is asked for: it goes by gradients, and by what the model computes in its own type.
    with outside_of_modes(bridge.original_model):
        return _report(bridge, tokens, level, inputs and {name: _savable(given) for name, given in inputs.items()})


def why_refuted(bridge: Bridge, inputs: Given | None = None) -> str:
    """The first claim of a declaration that a few runs show not to hold, with what was seen; "" where there is none.

    Args:
        bridge: a bridge around any model; without weights (on the ``meta`` device), nothing is shown.
        inputs: as for `verify`.

    Raises:
        CannotBeMade: it needs something that cannot be made up.
    """
    if bridge.cfg.device.type == "meta":
        return ""
    with outside_of_modes(bridge.original_model):
        failed = _report(
            bridge, None, "declared", inputs and {name: _savable(given) for name, given in inputs.items()}
        ).failed
    return f"{failed[0].name}: {failed[0].detail.partition('; ')[0]}" if failed else ""


def without_claims(architecture: Architecture, names: Mapping[str, str]) -> Architecture:
    """A declaration in which what is not proved of the stream's beginning and end is said not to be known.

    Args:
        architecture: the declaration.
        names: what `Proof.not_proved` found.
    """
    first, *rest = architecture.stacks
    if EMBEDDED in names:
        first = replace(first, embedding=replace(first.embedding, given="other"))
    wrong = names.get(ENDS) or names.get(LOGITS) or names.get(ATTRIBUTED)
    unknown = {"embedding": wrong, "readout": wrong} if wrong else {}
    return replace(architecture, stacks=(first, *rest), unknown={**unknown, **architecture.unknown})


def _savable(x: Tensor) -> Tensor:
    """A tensor that autograd takes: what was made in inference mode, copied."""
    return x.clone() if x.is_inference() else x


def _report(bridge: Bridge, tokens: Tensor | None, level: Level | Literal["declared"], inputs: Given | None) -> Report:
    if tokens is None:
        tokens, more = some_tokens(bridge, 2, 5 if level == "declared" else 9, given=inputs)
    else:
        tokens, more = with_what_it_needs(bridge, _savable(tokens.to(bridge.cfg.device)), inputs)
    report = Report(bridge.cfg.model_name)
    there = prove_modules(bridge.original_model, places_of(bridge))
    if not there.passed:  # nothing else can be looked at
        report.checks.append(there)
        return report
    with evaluating(bridge.original_model):
        with torch.no_grad():
            mechanics = Mechanics(bridge, tokens, more, tolerance(bridge.cfg.dtype))
            report.checks += mechanics.declared() if level == "declared" else mechanics.quick()
        if report.passed:  # what does not fire cannot be looked at
            report.checks += _proofs(bridge, level, inputs, mechanics.step if level == "full" else 1)
            if level == "full":
                with torch.no_grad():
                    report.checks += mechanics.full()
        report.checks += mechanics.last()
    if wrong := known_error(bridge.core):
        report.checks.append(Check("transformers computes this model as its configuration says", False, wrong))
    return report


def _proofs(bridge: Bridge, level: str, inputs: Given | None, step: int) -> list[Check]:
    """The claims of the declaration, on the model or on its probe copy."""
    why, half = _why_probe_copy(bridge), _is_half(bridge)
    with _tried_on(bridge, why) as subject:
        return [*_proofs_on(subject, level, inputs, step, half=half), *_proved_on(bridge, why)]


@contextmanager
def _tried_on(bridge: Bridge, why: Collection[str]) -> Iterator[Bridge]:
    """The bridge, or one of a probe copy, where there is a reason for one, and it can be made."""
    if not why or why_no_probe_copy(bridge.original_model):
        yield bridge
        return
    # Not what wraps it: compiled code keeps to the modules that it was made of.
    with probe_copy(bridge.core) as copied:
        yield bridge.rewrapped(copied)


def _proofs_on(subject: Bridge, level: str, inputs: Given | None, step: int, *, half: bool) -> list[Check]:
    findings = Findings(tolerance(subject.cfg.dtype), 3e-2 if half else 1e-4, subject.not_offered)
    pos = _length(subject, level)
    rows = max(2, min(subject.cfg.n_heads, 8))  # a gradient for each head, so many at a time
    # Experts are chosen by many tokens.
    few = rows if subject.cfg.num_experts else min(rows, 4 if level == "full" else 2)
    tokens, more = some_tokens(subject, few, pos, 1, inputs)
    try:
        evidence = randomized_run(subject, tokens, more)
    except WRONG as error:
        findings.holds(REPLACED, "a run", False, one_line(error))
        return list(findings.checks())
    for claim, prove in _PROOFS:
        findings.attempt(claim, partial(prove, evidence, findings))
    declared = level == "declared"
    findings.attempt(WEIGHTS, lambda: prove_weights(evidence, findings, of_each_kind=declared))
    one_row = lambda: Evidence(subject, *some_tokens(subject, 1, 5 if declared else pos, 1, inputs))
    ran = evidence if subject.cfg.num_experts else one_row()
    findings.attempt(LEFT_OUT, lambda: prove_coverage(ran, findings))
    if level in ("full", "inferred") and not tokens.is_floating_point():
        with few_tokens(subject, step):
            _prove_long(subject, 2 if level == "full" else 1, inputs, findings)
            if may_take(subject.core, "attention_mask"):  # padding among images and sound is the model's own business
                _prove_padded(subject, *some_tokens(subject, 2, pos, 1, inputs), findings)
            else:
                findings.inconclusive(PATTERN, "padding: it takes no attention_mask")
    if level == "full":
        tokens, more = some_tokens(subject, rows, pos, 1, inputs)
        findings.attempt(COLUMNS, lambda: prove_projections(with_graph(subject, tokens, more), findings))
        slopes = Slopes(subject, list(subject.hook_dict), some_tokens(subject, 2, 5, 3, inputs), findings, step)
        findings.attempt(SLOPES, slopes.prove)
    else:
        findings.attempt(COLUMNS, lambda: prove_choices(evidence, findings))
    return list(findings.checks())


def _prove_long(bridge: Bridge, rows: int, inputs: Given | None, findings: Findings) -> None:
    """Proves the same of a longer text, where positions may count in another way."""
    pos = _FAR if bridge.cfg.n_ctx is None else min(_FAR, bridge.cfg.n_ctx)
    try:
        evidence = randomized_run(bridge, *some_tokens(bridge, rows, pos, 4, inputs))
    except WRONG as error:
        if why := _why_not_run(bridge, *some_tokens(bridge, rows, pos, 4, inputs)):
            findings.inconclusive(SCORES, f"texts of {pos} tokens: {why}")
        else:
            findings.holds(SCORES, f"a run of {pos} tokens", False, one_line(error))
        return
    for claim, prove in _PROOFS[:-1]:
        findings.attempt(claim, partial(prove, evidence, findings))


def _padded(tokens: Tensor) -> dict[str, Tensor]:
    """A mask that calls the first three tokens of the first row padding."""
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return {"attention_mask": mask}


def _prove_padded(bridge: Bridge, tokens: Tensor, more: dict[str, Tensor], findings: Findings) -> None:
    """Proves attention where the first row begins with padding, if the model can be told so."""
    padded = more | _padded(tokens)
    try:
        evidence = randomized_run(bridge, tokens, padded)
    except WRONG as error:
        if why := _why_not_run(bridge, tokens, padded):  # a run of its own, for few models
            findings.inconclusive(PATTERN, f"padding: it takes no attention_mask of two axes ({why})")
        else:
            findings.holds(PATTERN, "a run with padding", False, one_line(error))
        return
    findings.attempt(PATTERN, lambda: prove_attention(evidence, findings))


def _why_not_run(bridge: Bridge, tokens: Tensor, more: dict[str, Tensor]) -> str:
    """Why a model does not run on something by itself; "" where it does."""
    try:
        bridge.run_with_hooks(tokens, fwd_hooks=[], **more)
    except WRONG as error:
        return one_line(error)
    return ""


def _why_probe_copy(bridge: Bridge) -> list[str]:
    """What of a model claims cannot be proved on, in the words of a report; none where they can."""
    model, trivial = bridge.original_model, trivial_parameters(bridge.original_model)
    inference = [name for name, p in model.named_parameters() if p.is_inference()]
    return [
        *([f"{_CONSTANT} {len(trivial)} constant parameters"] if trivial else []),
        *(["in float32"] if _is_half(bridge) else []),
        *(["copied, since they were made in inference mode"] if inference else []),
        *(["each brought when it is used"] if is_moved(model) else []),
    ]


def _is_half(bridge: Bridge) -> bool:
    return bridge.cfg.dtype in (torch.float16, torch.bfloat16)


def _proved_on(bridge: Bridge, why: list[str]) -> Iterator[Check]:
    """What claims were proved on, where that is not the model as it is, or where it proves little."""
    if why and (reason := why_no_probe_copy(bridge.original_model)):
        count = len(trivial_parameters(bridge.original_model))
        more = [f"{count} parameters are constant and could be left out unseen"] if count else []
        if _is_half(bridge):
            close = f"{tolerance(bridge.cfg.dtype):.0%} in {bridge.cfg.dtype}"
            more.append(f"what differs by less than {close} is not told apart")
        said = f"the model itself ({reason}){': ' if more else ''}{'; '.join(more)}"
        yield Check("proved on", True, said)
    elif why:
        yield Check("proved on", True, ", ".join(["a probe copy with the model's parameters", *why]))


def _length(bridge: Bridge, level: str) -> int:
    """How long a text has to be to show windows and, at the level ``full``, distances, where that is not long."""
    cfg = bridge.cfg
    pos = 11
    if cfg.window_size is not None and cfg.window_size <= 64:
        pos = max(pos, cfg.window_size + 3)
    buckets, most = cfg.relative_attention_num_buckets, cfg.relative_attention_max_distance
    if buckets is not None:
        pos = max(pos, 29)
    if buckets is not None and most is not None and level == "full":
        both = cfg.attention_dir != "causal"
        told = [telling_distance(buckets, most, other, both=both) + 1 for other in (most - 1, most + 1)]
        pos = max([pos, *(each for each in told if each <= _LONG)])
    taken = {cfg.n_heads, cfg.n_kv_heads, max(2, min(cfg.n_heads, 8)), 4}
    while pos in taken or pos - 4 in taken:
        pos += 1
    if cfg.n_ctx is not None:
        pos = min(pos, cfg.n_ctx)
    return pos


# ----------------------------------------------------------------------------------------------------------------------
# What of an inferred declaration holds on the live model: a search over checks. What does not is left out by name.
#
# Points are tried together, and apart only where that fails: a model of some thousand points takes some dozen runs.
# ----------------------------------------------------------------------------------------------------------------------


class Proof:
    """What holds of an inferred declaration.

    Args:
        bridge: a bridge with all points that were inferred.
        inputs: images or sound that its model needs, by the names of its own arguments; None: made up.

    Attributes:
        not_offered: the hook points that do not hold, and why.
        no_layer_runs: why a run cannot start at a layer; "" where it can.
    """

    def __init__(self, bridge: Bridge, inputs: Given | None = None) -> None:
        self.bridge = bridge
        self._given = inputs and {name: _savable(given) for name, given in inputs.items()}
        self.arguments = sample_inputs(bridge.core, inputs)
        self.tokens, self.inputs = split(bridge.core, self.arguments)
        self.not_offered: dict[str, str] = {}
        self.no_layer_runs = bridge.no_layer_runs
        self._progress = ProgressBar()
        self._slopes: list[Check] = []

    def run(self) -> Proof:
        """Tries everything. The model's mode is evaluation meanwhile."""
        model = self.bridge.original_model
        with outside_of_modes(model), evaluating(model), torch.no_grad(), progress("proving") as self._progress:
            self._progress("the model itself", 0)
            self.mechanics = Mechanics(self.bridge, self.tokens, self.inputs, tolerance(self.bridge.cfg.dtype))
            self._progress.grow(len(self.mechanics.names))
            self.mechanics.run_plain()  # before any hook is there: BigBird chooses its attention in its first run
            for what, test in (("are seen", self._shown), ("and kept, of a short run", self._kept_of_few)):
                self._progress(f"hook points {what}", 0)
                self._leave_out(test)
            with self.mechanics.of_few_tokens():
                self._progress("what is read is written back", 0)
                self._leave_out(self.mechanics.written_back)
                if not self.no_layer_runs:
                    self._progress("runs of some layers", 0)
                    self.no_layer_runs = self._why_no_layer_runs()
                self._leave_out(self._edited)
        return self

    def not_proved(self) -> dict[str, str]:
        """What `verify` finds not to hold of the hook points that are left, once the bridge has these alone.

        Returns:
            Hook points, what their names begin with, weights, modules, or a claim that names none of these, each with
            the claim and what was seen.
        """
        model = self.bridge.original_model
        with outside_of_modes(model), evaluating(model):
            with torch.no_grad():
                checks = self.mechanics.promised()
                if any(check.wrong for check in self._slopes):  # what is left, as `verify` tries it
                    given = arguments_of(self.bridge.core, *some_tokens(self.bridge, 2, 5, 3, self._given))
                    self._moved(list(self.bridge.hook_dict), given)
            checks += [*_proofs(self.bridge, "inferred", self._given, self.mechanics.step), *self._slopes]
        found: dict[str, str] = {}
        for check in checks:
            for place, seen in check.wrong:
                what = check.name if check.name in _OF_ALL else named_at(check.name, place)
                what = self._around(what) if check.name == LEFT_OUT else what
                found.setdefault(what, f"{NOT_PROVED}: {check.name}: {seen or place}")
                for more in _SHOWN_BY.get(check.name, ()) if ".hook_" in what else ():
                    found.setdefault(f"{what.rpartition('.')[0]}.{more}", found[what])
        return {what: why for what, why in found.items() if what not in self.bridge.not_offered}

    def _around(self, path: str) -> str:
        """The outermost module around one in which no hook point stands."""
        sites = [hook.point.site.path for hook in self.bridge.hook_dict.values()]
        while (outer := path.rpartition(".")[0]) and not any(is_inside(site, outer) for site in sites):
            path = outer
        return path

    def _leave_out(self, test: Test) -> None:
        """Leaves out what a test does not hold of."""
        failed = self.mechanics.failing(self.mechanics.names, test)
        self.not_offered |= failed
        self.mechanics.names = [name for name in self.mechanics.names if name not in failed]

    def _shown(self, names: list[str]) -> dict[str, str]:
        """Each is seen once."""
        return self.mechanics.seen_once(names)

    def _kept_of_few(self, names: list[str]) -> dict[str, str]:
        """Each is seen in a short run, too: what some lengths leave out is no place that is there in every run.

        A cache keeps it.
        """
        names = [name for name in names if name not in self.mechanics.idle]
        short = self._cut(lambda length: length // 2)
        if short is None:  # images: what each head has would take gigabytes
            points = {name: self.bridge.hook_dict[name].point for name in names}
            self.mechanics.cache([name for name, each in points.items() if each.group != "heavy" or not each.depth])
            return {}
        seen: set[str] = set()

        def look(x: Tensor, hook: Hook) -> None:
            seen.add(hook.name)

        tokens, more = split(self.bridge.core, short)
        self.bridge.run_with_hooks(tokens, fwd_hooks=[(names, look)], **more)
        self.bridge.run_with_cache(tokens, names_filter=[name for name in names if name in seen], **more)
        left = [name for name in names if name not in seen and ".experts." not in name]
        return dict.fromkeys(left, "it is not seen in a run of few tokens")

    def _cut(self, to: Callable[[int], int]) -> Given | None:
        """Shorter texts; None where the model does not run on them.

        Images and sound have the size that they have: with them, no other run is made.
        """
        if any(x.is_floating_point() or x.ndim != 2 for x in self.arguments.values()):
            return None
        short = {name: x[:, : to(x.shape[1])] for name, x in self.arguments.items()}
        tokens, more = split(self.bridge.core, short)
        try:
            self.bridge.run_with_hooks(tokens, fwd_hooks=[], **more)
        except WRONG as error:  # the model itself takes no such text
            one_line(error)
            return None
        return short

    def _edited(self, names: list[str]) -> dict[str, str]:
        """An edit at one point, in one row of the batch, changes that row of the logits."""
        rows_of = [name for name in names if self.bridge.hook_dict[name].point.axes.startswith("batch ")]
        only_choose = self._auxiliary() | {"embed.hook_in"}
        edited = [name for name in rows_of if name not in only_choose and "hook_expert_indices" not in name]
        few = self._cut(lambda length: min(length, 3)) or self.arguments
        moved = self._moved(edited, few)
        edited = [name for name in edited if name not in moved]
        edits = Edits(self.bridge, few, self.arguments, not self.no_layer_runs, self._progress)
        return edits.without_effect(edited, moved)

    def _moved(self, names: list[str], few: Given) -> set[str]:
        """Those of which an edit moves the logits, as far as their gradient says."""
        why = [each for each in _why_probe_copy(self.bridge) if not each.startswith(_CONSTANT)]
        dtype = torch.float32 if _is_half(self.bridge) else self.bridge.cfg.dtype
        findings = Findings(tolerance(dtype), not_offered=self.bridge.not_offered)
        if why and why_no_probe_copy(self.bridge.original_model):
            return set()
        with _tried_on(self.bridge, why) as subject:
            slopes = Slopes(subject, names, split(subject.core, few), findings, self.mechanics.step)
            findings.attempt(SLOPES, slopes.prove)
        self._slopes += findings.checks()
        return slopes.moved

    def _auxiliary(self) -> set[str]:
        """The hook points of what attention has besides: an indexer chooses keys, and of a short text it takes all."""
        return {
            f"{place.part}{path}.hook_out"
            for place in places_of(self.bridge)
            if isinstance(part := place.named.step.part, Attention)
            for path, _ in part.auxiliary_modules
        }

    def _why_no_layer_runs(self) -> str:
        """Why a run that starts at a layer with what another stopped at gives other logits; "" where it does not."""
        try:
            for layer, logits, whole in self.mechanics.layer_runs():
                if not self.mechanics.close(logits, whole)[0]:
                    return f"a run that starts at {layer} gives other logits: blocks are given more"
        except WRONG as error:
            return f"its blocks cannot be run by themselves ({one_line(error)})"
        return ""
