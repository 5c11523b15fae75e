"""Norms are of the declared kind: recomputed from rows that tell kinds, offsets and epsilons apart."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from adapters.attention import Attention
from adapters.feed_forward import MLP
from adapters.norms import Norm, NormKind, NormScale, apply_weight_and_bias
from adapters.observe.recognised import probe, recognise_module
from adapters.offloaded import materialized
from adapters.paths import join
from adapters.proofs.evidence import Evidence
from adapters.proofs.protocol import Hook
from adapters.proofs.report import Findings
from adapters.views import Call, Composed, View

CLAIM = "norms compute what is declared: kind, epsilon, what is added to the weight"


def prove_norms(evidence: Evidence, findings: Findings) -> None:
    """Every norm that has hook points, and every one that is said to compute nothing.

    Args:
        evidence: a run.
        findings: what is found is added to it.
    """
    findings.claim(CLAIM)
    for name, hook in evidence.bridge.hook_dict.items():
        view = _scale(hook.view)
        if view is not None:
            _norm(evidence, findings, name.removesuffix(".hook_scale"), hook, view)
    for path, norm in _declared(evidence):
        if norm.kind.identity:
            call = evidence.call(path)
            seen, entered = (call.result, call.input) if call else (None, None)
            findings.equal(CLAIM, f"{path}, which is to compute nothing", seen, entered)


def _declared(evidence: Evidence) -> Iterator[tuple[str, Norm]]:
    """Every declared norm that is there, with its path."""
    architecture = evidence.bridge.architecture
    if norm := architecture.embedding.norm:
        yield join(evidence.base, norm.path), norm
    for stack in evidence.stacks():
        if stack.final_norm and not stack.final_norm.kind.function:
            yield join(evidence.base, stack.final_norm.path), stack.final_norm
    for head in architecture.heads:
        if head.norm and evidence.call(evidence.from_model(head.path)):
            yield evidence.from_model(head.norm.path), head.norm
    for place in evidence.places():
        step = place.named.step
        block = place.stack.block_at(place.layer)
        if block.norm and place.named is block.named[0]:
            yield join(place.path, block.norm.path), block.norm
        yield from ((join(place.path, n.path), n) for n in step.norms)
        if isinstance(step.part, Attention):
            yield from ((join(place.module, n.path), n) for n in step.part.qk_norms)
        elif isinstance(step.part, MLP) and step.part.ln:
            yield join(place.module, step.part.ln.path), step.part.ln


def _scale(view: View) -> NormScale | None:
    """The view of a norm's scale, whatever it is seen through."""
    if isinstance(view, Composed):
        return _scale(view.inner) or _scale(view.outer)
    return view if isinstance(view, NormScale) else None


def _norm(evidence: Evidence, findings: Findings, name: str, hook: Hook, view: NormScale) -> None:
    path = hook.point.sources[0].path if view.shared else hook.point.site.path
    call = evidence.call(path)
    if call is None or call.input is None:
        findings.holds(CLAIM, name, False, f"{path} did not run")
        return
    outer = call.module
    if view.kind.gate:
        inner, gate = evidence.call(path, view.kind.inner), evidence.call(path, view.kind.gate)
        if inner is None or inner.input is None or inner.result is None or gate is None or gate.result is None:
            findings.holds(CLAIM, name, False, f"{view.kind.inner} and {view.kind.gate} of {path} did not both run")
            return
        findings.equal(CLAIM, f"{name}.(norm)", inner.input, call.input)
        findings.equal(CLAIM, f"{name}.(gate)", gate.input, inner.result)
        by = evidence.get(f"{name}.hook_gate")
        by = gate.result if by is None else by
        findings.equal(CLAIM, f"{name}.hook_out", call.result, inner.result * by.sigmoid())
        call = inner
    assert call.input is not None
    if view.kind.of_each and call.result is not None:
        around = view.centered(call.input) / view.scale(Call(call.module, (call.input,), {}))
        made = apply_weight_and_bias(view.kind, call.module, around, call.result.dtype)
        findings.equal(CLAIM, f"{name}.(each head's)", call.result, made)
    for module in view.kind.parts(call.module) if view.kind.of_each else (call.module,):
        _computes(findings, name, path, view, outer, module, call.input)


def _computes(
    findings: Findings, name: str, path: str, view: NormScale, outer: nn.Module, module: nn.Module, entered: Tensor
) -> None:
    """What a norm's module makes of rows that tell kinds apart."""
    width = entered.shape[-1]
    held = {key: materialized(module, key) for key in ("weight", "bias")}
    parameters = {key: value if isinstance(value, Tensor) else None for key, value in held.items()}
    found = recognise_module(module, width, entered, **parameters, tolerance=findings.tolerance)
    if found is None:
        findings.holds(CLAIM, name, False, f"{path} computes no norm that is known")
        return
    declared = view.kind
    seen = f"{path} computes {_kind(NormKind(found.computes, found.offset))}, and {_kind(declared)} is declared"
    offset = declared.offset if parameters["weight"] is not None else found.offset
    if not findings.holds(CLAIM, name, (found.centered, found.offset) == (declared.centered, offset), seen):
        return
    # The epsilon of the hook point: what it makes of a row that is nearly zero.
    rows = probe(width, torch.zeros((), dtype=torch.float64, device=entered.device), sizes=(1e-3, 1e-3))
    scale = view.scale(Call(outer, (rows,), {}, ((outer, rows),)))
    square = rows.var(-1, correction=0) if declared.centered else rows.pow(2).mean(-1)
    eps = float((scale.squeeze(-1).double() ** 2 - square).mean())
    if found.eps is None:
        findings.inconclusive(CLAIM, "epsilons, where they are too small to be seen")
        return
    close = abs(eps - found.eps) <= max(100 * findings.tolerance, 1e-3) * found.eps
    findings.holds(CLAIM, name, close, f"{path} has an epsilon of {found.eps:.3g}, and {eps:.3g} is declared")


def _kind(kind: NormKind) -> str:
    name = "nothing" if kind.identity else "a layer norm" if kind.centered else "an RMS norm"
    return f"{name} with {kind.offset:g} + weight" if kind.offset else name
