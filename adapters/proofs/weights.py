"""The canonical weights are those that make the activations: what is read, times the matrix, plus the bias."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from adapters.architecture import NamedStep
from adapters.attention import Attention
from adapters.feed_forward import MLP, MoE
from adapters.paths import module_at
from adapters.proofs.evidence import Evidence, LayerStep, like
from adapters.proofs.report import Findings
from adapters.views import Call, linearly, transformed
from adapters.weights import Weights

CLAIM = "weights and biases make the activations of their names"


def prove_weights(
    evidence: Evidence, findings: Findings, weights: Weights | None = None, *, of_each_kind: bool = False
) -> None:
    """Queries, keys, values, what attention adds, and the layers of MLPs, from what was read and the weights' names.

    Args:
        evidence: a run.
        findings: what is found is added to it.
        weights: which ones; None: those that the declaration makes.
        of_each_kind: in the first block of each kind that is declared, not in all of them.
    """
    findings.claim(CLAIM)
    bridge = evidence.bridge
    weights = weights or Weights(bridge.architecture, bridge.original_model, bridge.cfg)
    seen: list[tuple[str, NamedStep]] = []
    for place in evidence.places():
        if of_each_kind and (place.stack.name, place.named) in seen:
            continue
        seen.append((place.stack.name, place.named))
        part = place.named.step.part
        proof = _Layer(evidence, findings, weights, place)
        if isinstance(part, Attention):
            for letter in "qkv":
                findings.attempt(CLAIM, partial(proof.projection, letter))
            findings.attempt(CLAIM, partial(proof.last, "W_O", "b_O", "hook_z"))
        elif isinstance(part, MLP):
            proof.mlp(part, "")
        elif isinstance(part, MoE) and part.shared:
            proof.mlp(part.shared, "shared_expert.")


class _Layer:
    def __init__(self, evidence: Evidence, findings: Findings, weights: Weights, place: LayerStep) -> None:
        self.evidence, self.findings, self.weights, self.place = evidence, findings, weights, place

    def weight(self, name: str) -> Tensor | None:
        """A weight; None, and said so, where the layer has no plain one."""
        full = f"{self.place.part}{name}"
        head, _, last = full.rpartition(".")
        get = self.weights.getters.get(full) or self.weights.getters.get(f"{head}._{last}")
        if get is None:
            return None
        try:
            return get().detach()
        except TypeError as error:  # merged or quantised layers have none, and say how to get one
            self.findings.inconclusive(CLAIM, str(error))
            return None

    def own(self, point: str) -> tuple[Tensor, Tensor] | None:
        """What the module of a hook point read, and what it made as the hook point shows it: nothing replaced."""
        hook = self.evidence.bridge.hook_dict[f"{self.place.part}{point}"]
        call = self.evidence.call(hook.point.site.path)
        if call is None or call.input is None or not isinstance(call.output, Tensor):
            return None
        raw = self.evidence.raw[hook.point.site.path][0]
        sources = tuple(
            (found.module, found.input)
            for found in map(self.evidence.call, (site.path for site in hook.point.sources))
            if found is not None and found.input is not None
        )
        return call.input, hook.view.get(raw.output, Call(raw.module, raw.args, raw.kwargs, sources))

    def projection(self, letter: str) -> None:
        """Queries, keys or values of each head."""
        at, found = f"{self.place.part}hook_{letter}", self.own(f"hook_{letter}")
        matrix, bias = self.weight(f"W_{letter.upper()}"), self.weight(f"b_{letter.upper()}")
        if matrix is None or bias is None or found is None:
            return
        read, made = found
        expected = torch.einsum("bpm,hmd->bphd", _precise(read), _precise(matrix)) + _precise(bias)
        self.findings.equal(CLAIM, at, made, expected.to(made.dtype))

    def last(self, matrix_name: str, bias_name: str, point: str) -> None:
        """What the last layer of a part makes, with the step's factor."""
        matrix, bias = self.weight(matrix_name), self.weight(bias_name)
        hook = self.evidence.bridge.hook_dict[f"{self.place.part}{point}"]
        call = self.evidence.call(hook.point.site.path)
        if matrix is None or bias is None or call is None or call.input is None or call.result is None:
            return
        entered = _precise(call.input.flatten(0, -2))
        expected = entered @ _precise(matrix).flatten(0, -2) + _precise(bias)
        step = self.place.named.step
        block = module_at(self.evidence.bridge.original_model, self.place.path)
        if isinstance(step.part, MoE) and "shared" in matrix_name:  # one of several terms
            made = linearly(step.behind_last, call.result * step.part.shared_factor, block)
        else:
            made = transformed(step.behind_last, call.result, block)
        self.findings.equal(CLAIM, f"{self.place.part}{matrix_name}", like(expected.to(made.dtype), made), made)

    def mlp(self, part: MLP, inside: str) -> None:
        """An MLP's first layers, and its last."""
        first = (("hook_pre", "W_gate", "b_gate"), ("hook_pre_linear", "W_in", "b_in")) if part.gate else ()
        for point, matrix, bias in first or (("hook_pre", "W_in", "b_in"),):
            self.findings.attempt(CLAIM, partial(self.first, inside, point, matrix, bias))
        self.findings.attempt(CLAIM, partial(self.last, f"{inside}W_out", f"{inside}b_out", f"{inside}hook_post"))

    def first(self, inside: str, point: str, matrix_name: str, bias_name: str) -> None:
        """What enters the activation function, or is multiplied with what it makes."""
        found, matrix = self.own(f"{inside}{point}"), self.weight(f"{inside}{matrix_name}")
        bias = self.weight(f"{inside}{bias_name}")
        if matrix is None or found is None:
            return
        read, made = found
        expected = _precise(read) @ _precise(matrix)
        if bias is not None:
            expected = expected + _precise(bias)
        expected = expected.to(made.dtype)
        self.findings.equal(CLAIM, f"{self.place.part}{inside}{point}", made, like(expected, made))


def _precise(x: Tensor) -> Tensor:
    """Numbers that can be summed up: those of half precision, and integers, in single."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
