"""The residual stream: it adds up, and every part reads what it is declared to read and returns what is added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from adapters.architecture import Stack
from adapters.attention import Attention
from adapters.feed_forward import MLP, MoE
from adapters.observe.calls import ModuleCall
from adapters.observe.recording import Recorder
from adapters.paths import call_number, join, module_at, module_path
from adapters.proofs.ends.embeddings import CHAIN, ENDS, prove_beginning, zeroed
from adapters.proofs.ends.logits import prove_end
from adapters.proofs.evidence import Evidence, LayerStep, like
from adapters.proofs.protocol import Hook
from adapters.proofs.report import Findings
from adapters.views import constant_of, parameters_of, transformed

READS = "each part reads the stream that it is declared to read, through its norm"
RETURNS = "what is added is what the part's last layer makes, through its norm, with its factor"


def prove_streams(evidence: Evidence, findings: Findings) -> None:
    """Sums, readers, results and ends of all streams.

    Args:
        evidence: any run.
        findings: what is found is added to it.
    """
    for claim in (CHAIN, READS, RETURNS, ENDS):
        findings.claim(claim)
    places = list(evidence.places())
    for place in places:
        if place.named.first:
            _sum(evidence, findings, place)
        _reads(evidence, findings, place)
        _returns(evidence, findings, place)
    for stack in evidence.stacks():
        _chain(evidence, findings, stack)
    prove_beginning(evidence, findings)
    prove_end(evidence, findings, [(stack, _last(evidence, stack)) for stack in evidence.stacks()])


def _sum(evidence: Evidence, findings: Findings, place: LayerStep) -> None:
    """Each stream is the one before it and what the steps between them add; the sum is the claim's name."""
    steps = place.stack.block_at(place.layer).named
    names = [place.named.onto, *(f"hook_{n.name}_out" for n in steps if n.after == place.named.after)]
    left = " + ".join(name.removeprefix("hook_") for name in names)
    on_stream = place.named.step.residual_transform
    if on_stream:
        left = f"({', '.join(parameters_of(on_stream)) or f'{constant_of(on_stream):g}'}) * {left}"
    claim = f"{left} = {place.named.after.removeprefix('hook_')}"
    at = place.prefix + place.named.after
    terms = [evidence.get(place.prefix + name) for name in names]
    there = [term for term in terms if term is not None]
    total = evidence.get(at)
    if len(there) < len(terms) or total is None:
        findings.holds(claim, at, False, "a term of it has no hook point that ran")
        return
    if place.named.step.mix:
        _mixed(evidence, findings, place, there)
        return
    added = transformed(on_stream, there[0].double(), module_at(evidence.bridge.original_model, place.path))
    for term in there[1:]:
        added = added + term.double()
    findings.equal(claim, at, total, added.to(total.dtype), max(float(term.abs().max()) for term in there))


def _mixed(evidence: Evidence, findings: Findings, place: LayerStep, there: list[Tensor]) -> None:
    """The same of several streams."""
    mix, total = place.named.step.mix, evidence.get(place.prefix + place.named.after)
    call = evidence.call(place.path, mix.path) if mix else None
    claim = f"streams + {place.named.name}_out, with weights = {place.named.after.removeprefix('hook_')}"
    if mix is None or call is None or total is None or not isinstance(call.output, tuple | list) or len(there) != 2:
        findings.holds(claim, place.prefix, False, "what mixes the streams did not run, or returns no weights")
        return
    keep = None if mix.keep is None else call.output[mix.keep]
    after = mix.of(there[0].double(), there[1].double(), call.output[mix.write], keep)
    findings.equal(claim, place.prefix + place.named.after, total, after.to(total.dtype))


def _reads(evidence: Evidence, findings: Findings, place: LayerStep) -> None:
    step, part = place.named.step, place.named.step.part
    read = evidence.get(place.prefix + place.named.before)
    if step.mix:
        mixing = evidence.call(place.path, step.mix.path)
        entered = like(evidence.entered(place.path, step.mix.path), read)
        findings.equal(READS, f"{place.prefix}{step.mix.path}", entered, read)
        out = mixing.output if mixing else None
        read = out[step.mix.read] if isinstance(out, tuple | list) else None
    if step.pre:
        calls = evidence.calls.get(join(place.path, step.pre.path), ())
        if not calls:
            findings.holds(READS, f"{place.prefix}{place.named.norm}", False, f"{step.pre.path} did not run")
            return
        # A norm that runs again reads something else then.
        call = next((c for c in calls if _same(c.input, read, findings.tolerance)), calls[0])
        findings.equal(READS, f"{place.prefix}{place.named.norm}", like(call.input, read), read)
        read = call.result
    entries = _entries(place)
    if not entries:
        findings.inconclusive(READS, f"what {place.part.removesuffix('.')} reads")
    for entry in entries:
        seen = like(evidence.entered(place.path, entry), read)
        findings.equal(READS, f"{place.part}({entry})", seen, like(read, seen))
    if isinstance(part, Attention) and part.cross:
        _reads_encoder(evidence, findings, place, part)


def _same(x: Tensor | None, y: Tensor | None, tolerance: float) -> bool:
    x = like(x, y)
    if x is None or y is None or x.shape != y.shape:
        return False
    return float((x.double() - y.double()).abs().max()) <= tolerance * float(y.abs().max())


def _entries(place: LayerStep) -> list[str]:
    """The modules, relative to the block, that are given what a part reads."""
    step = place.named.step
    part, pre = step.part, step.pre
    if isinstance(part, Attention) and pre and pre.path.startswith(f"{part.path}."):  # it norms its own input
        inside = [projection.path for projection in part.projections.values() if not projection.latent]
        return [join(part.path, path) for path in dict.fromkeys(inside)]
    if step.entry is not None:
        return [step.entry] if step.entry else []
    return [part.path] if part.path else list(step.readers)


def _reads_encoder(evidence: Evidence, findings: Findings, place: LayerStep, part: Attention) -> None:
    first = evidence.bridge.architecture.stack
    if place.stack is first:
        _reads_second_input(evidence, findings, place, part)
        return
    read = next((left for *_, left, _ in reversed(list(streams_of(evidence, first)))), None)
    if first.final_norm:
        read = evidence.made(evidence.base, first.final_norm.path)
    for projection in (part.k, part.v):
        entered = evidence.entered(place.module, projection.path)
        findings.equal(READS, f"{place.part}({projection.path})", entered, read)


def _reads_second_input(evidence: Evidence, findings: Findings, place: LayerStep, part: Attention) -> None:
    """Without an encoder in the declaration: keys and values are made from one thing, which is not made of text."""
    key, value = (evidence.entered(place.module, each.path) for each in (part.k, part.v))
    if not evidence.arguments.keys() - {"input_ids", "attention_mask"} or key is None or value is None:
        findings.holds(READS, place.part, False, "there is no second input that it could read")
        return
    findings.equal(READS, f"{place.part}({part.v.path})", value, key)
    first = f"{place.stack.name}.0.hook_resid_pre"
    path = join(place.module, part.k.path)

    def other(x: Tensor, hook: Hook) -> Tensor:
        return x.flip(1) * 0.5

    watched = [(path, evidence.bridge.original_model.get_submodule(path))]
    with torch.no_grad(), Recorder(watched, layout=evidence.bridge.layout) as recording:
        evidence.bridge.run_with_hooks(evidence.tokens, fwd_hooks=[(first, other)], **evidence.more)
    findings.equal(READS, f"{place.part}({part.k.path})", recording.of(path)[0].input, key)


def _returns(evidence: Evidence, findings: Findings, place: LayerStep) -> None:
    step, part = place.named.step, place.named.step.part
    at = place.result
    added, block = evidence.get(at), module_at(evidence.bridge.original_model, place.path)
    raw = evidence.get(f"{place.part}hook_out") if step.changes_its_result else None
    if isinstance(part, Attention | MLP):
        made = evidence.made(place.module, part.o if isinstance(part, Attention) else part.down)
        if step.changes_its_result:
            findings.equal(RETURNS, at, raw, like(made, raw))
        else:
            findings.equal(RETURNS, at, added, like(None if made is None else step.added(made, block), added))
    if step.post:
        findings.equal(RETURNS, at, evidence.entered(place.path, step.post.path), raw)
        raw = evidence.made(place.path, step.post.path)
    if step.changes_its_result:
        made = None if raw is None else step.added(raw, block)
        findings.equal(RETURNS, at, like(added, made), made)
    if step.stream_norm:
        total = evidence.get(place.prefix + place.named.after)
        findings.equal(RETURNS, at, evidence.entered(place.path, step.stream_norm.path), total)
    as_it_is = step.out_element == 0 and not step.result_chain
    if isinstance(part, MoE) and added is not None and as_it_is:
        findings.equal(RETURNS, at, added, like(evidence.made(place.module), added))


def streams_of(
    evidence: Evidence, stack: Stack
) -> Iterator[tuple[str, Tensor | None, Tensor | None, ModuleCall | None]]:
    """Each block's prefix, what entered it, what left it as the stream, and its call."""
    index = 0
    while f"{stack.name}.{index}.hook_resid_pre" in evidence.bridge.hook_dict:
        prefix = f"{stack.name}.{index}."
        normed = evidence.get(f"{prefix}hook_normalized_resid_post")
        after = normed if normed is not None else evidence.get(f"{prefix}hook_resid_post")
        call = evidence.call(evidence.base, stack.place_of(index))
        yield prefix, evidence.get(f"{prefix}hook_resid_pre"), after, call
        index += 1


def _chain(evidence: Evidence, findings: Findings, stack: Stack) -> None:
    """What leaves a block enters the next, as the declared element of what it returns."""
    before: Tensor | None = None
    for index, (prefix, entered, left, call) in enumerate(streams_of(evidence, stack)):
        if before is not None and stack.every_block[0].ends:
            before = zeroed(findings, before, entered)
        if index in stack.block_inputs:
            before = _entered(evidence, stack.block_inputs[index], before)
            findings.holds(CHAIN, f"{prefix}hook_resid_pre", before is not None, "what it is the sum of did not run")
        if before is not None:
            findings.equal(CHAIN, f"{prefix}hook_resid_pre", entered, before)
        before = left
        if stack.every_block[0].ends:
            continue  # no module returns it
        output = call.output if call else None
        several = isinstance(output, tuple | list | Mapping)
        length = len(output) if isinstance(output, tuple | list | Mapping) else 1
        key, expected = stack.output
        fits = length == expected and several == (key is not None)
        seen = f"{length} elements in a {type(output).__name__}, for {expected} with key {key}"
        findings.holds(CHAIN, f"{prefix}(output)", fits, seen)


def _last(evidence: Evidence, stack: Stack) -> Tensor | None:
    """What leaves the last block, as the final norm reads it."""
    left = [left for _, _, left, _ in streams_of(evidence, stack)]
    last = left[-1] if left else None
    return _entered(evidence, stack.block_inputs.get(len(left), (("", 1.0),)), last)


def _entered(evidence: Evidence, sources: Sequence[tuple[str, float]], before: Tensor | None) -> Tensor | None:
    """The sum of what calls outside of the blocks put out, or, without a path, of what left the block before."""
    total: Tensor | None = None
    for path, factor in sources:
        calls = evidence.calls.get(join(evidence.base, module_path(path)), ()) if path else ()
        number = call_number(path) or 0
        made = calls[number].result if number < len(calls) else None if path else before
        if made is None:
            return None
        total = made * factor if total is None else total + made * factor
    return total
