"""The end of the stream: its final norm, the heads behind it, and the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adapters.architecture import Stack
from adapters.norms import Norm, normalized
from adapters.paths import core_path, has_module, is_inside
from adapters.proofs.ends.embeddings import ENDS, zeroed
from adapters.proofs.evidence import Evidence, like
from adapters.proofs.report import Findings
from adapters.stream_ends import Head, mean_at

LOGITS = "the logits are what the output layer makes of the final norm, with the declared factors, bias and soft cap"


def prove_end(evidence: Evidence, findings: Findings, streams: Sequence[tuple[Stack, Tensor | None]]) -> None:
    """The final norm reads the last stream, the output layer reads that norm, and the logits are as the readout says.

    Args:
        evidence: a run with randomized activations.
        findings: what is found is added to it.
        streams: each list of blocks with what leaves its last block.
    """
    findings.claim(LOGITS)
    stream: Tensor | None = None
    for stack, last in streams:
        stream = last
        if isinstance(stack.collapse, str):
            entered = like(evidence.entered(evidence.base, stack.collapse), stream)
            findings.equal(ENDS, stack.collapse, entered, stream)
            stream = evidence.made(evidence.base, stack.collapse)
        stream = None if stream is None else mean_at(stack.pooled, stream)
        if stack.final_norm:
            stream = _normed(evidence, findings, stack.final_norm, stream)
    for head in evidence.bridge.architecture.heads:
        stream = _headed(evidence, findings, head, stream)
    _unembedded(evidence, findings, stream)
    _logits(evidence, findings)


def _normed(evidence: Evidence, findings: Findings, norm: Norm, stream: Tensor | None) -> Tensor | None:
    """What the final norm makes of the last stream."""
    if norm.kind.function:
        return None if stream is None else normalized(norm.kind, stream)
    findings.equal(ENDS, norm.path, evidence.entered(evidence.base, norm.path), stream)
    return evidence.made(evidence.base, norm.path)


def _headed(evidence: Evidence, findings: Findings, head: Head, stream: Tensor | None) -> Tensor | None:
    """What the output layer reads behind a head."""
    path, unembed = evidence.from_model(head.path), evidence.bridge.architecture.readout.path
    linear, module = evidence.call(evidence.from_model(head.linear)), evidence.call(path)
    if module is None:
        return stream
    weight = getattr(linear.module, "weight", None) if linear else None
    inside = is_inside(evidence.from_model(head.linear), path)
    ok = inside and isinstance(weight, Tensor) and weight.ndim == 2
    findings.holds(ENDS, head.name, ok, f"{head.linear} is no linear layer of it that ran")
    if not head.unembeds:
        return stream
    findings.equal(ENDS, head.name, module.input, stream)
    normed = evidence.call(evidence.from_model(head.norm.path)) if head.norm else None
    if is_inside(evidence.from_model("." + unembed), path) and not normed:
        return evidence.entered(evidence.from_model("." + unembed))  # the module holds the output layer, too
    return normed.result if normed else module.result


def _unembedded(evidence: Evidence, findings: Findings, stream: Tensor | None) -> None:
    """The output layer reads what the final norm makes, times the declared factor."""
    readout = evidence.bridge.architecture.readout
    if readout.unknown:
        findings.inconclusive(ENDS, readout.unknown)
        return
    unembed = evidence.call(evidence.from_model("." + readout.path)) if readout.path else None
    if unembed is None and evidence.bridge.architecture.pooled is not None:
        return  # one vector of each image, which its norm puts out
    last = unembed.input if unembed else evidence.made(evidence.base)
    stream = None if stream is None else mean_at(readout.pooled, stream)
    if last is None or stream is None or last.shape != stream.shape:
        if last is not None and not readout.path and evidence.base == core_path(evidence.bridge.original_model):
            # It has no base model whose output is the last stream.
            findings.inconclusive(ENDS, "what the model makes of the last stream, of which nothing is declared")
        else:
            findings.holds(ENDS, "unembed", False, "what it reads is not what the final norm makes")
        return
    if evidence.bridge.architecture.stack.every_block[0].ends:
        stream = zeroed(findings, stream, last)
    factor = readout.factor_in if unembed else 1.0
    findings.equal(ENDS, "unembed", last, (stream.double() * factor).to(last.dtype))


def _logits(evidence: Evidence, findings: Findings) -> None:
    """The logits are what the output layer puts out, as the readout and `cfg` say."""
    readout, made, seen = evidence.bridge.architecture.readout, evidence.get("unembed.hook_out"), evidence.output
    cap = evidence.bridge.cfg.output_logits_soft_cap
    said = cap if cap > 0 else None
    same = said == readout.soft_cap
    findings.holds(LOGITS, "cfg.output_logits_soft_cap", same, f"it says {cap}, and the declaration {readout.soft_cap}")
    if readout.unknown:
        findings.inconclusive(LOGITS, readout.unknown)
        return
    model = evidence.bridge.original_model
    if not readout.path or not has_module(model, evidence.from_model("." + readout.path)):
        return  # this class of models has none
    if made is None or seen is None or made.shape[:-1] != seen.shape[:-1] or made.shape[-1] < seen.shape[-1]:
        findings.holds(LOGITS, "unembed.hook_out", False, "the model returns nothing of its shape")
        return
    if float(seen.abs().max()) > 1e30:
        findings.holds(LOGITS, "unembed.hook_out", False, "a constant is in place of the logits of some tokens")
        return
    with torch.no_grad():
        expected = readout.logits(made.double(), evidence.bridge.core)[..., : seen.shape[-1]]
    findings.equal(LOGITS, "unembed.hook_out", seen, expected.to(seen.dtype))
