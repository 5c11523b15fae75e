"""MLPs and mixtures: what enters the last layer is the gate's activation function times the other projection."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.architecture import Step
from adapters.attention import GATE_FUNCTIONS
from adapters.config import config_of
from adapters.experts import expert_bias, expert_weight, has_bias, router_matrix, sparsemixer_topk
from adapters.feed_forward import MLP, MoE
from adapters.observe.activations import product
from adapters.paths import join, module_at
from adapters.proofs.evidence import Evidence, LayerStep, like
from adapters.proofs.report import Findings

GATED = "act(pre) = post, with a gate act(pre) * pre_linear = post"
CHOICE = "experts are chosen and weighted as declared, and their weighted results are what a mixture returns"


def prove_feed_forward(evidence: Evidence, findings: Findings) -> None:
    """Every MLP, and every expert, computes what is declared.

    Args:
        evidence: a run with randomized activations.
        findings: what is found is added to it.
    """
    findings.claim(GATED)
    findings.claim(CHOICE)
    for place in evidence.places():
        part = place.named.step.part
        if isinstance(part, MLP):
            _mlp(evidence, findings, place.part, part, place.module)
        elif isinstance(part, MoE):
            if part.shared:
                _mlp(evidence, findings, f"{place.part}shared_expert.", part.shared)
            _experts(evidence, findings, place)
            _Mixture(evidence, findings, place, part, place.named.step).prove()


def _mlp(evidence: Evidence, findings: Findings, prefix: str, part: MLP, module: str = "") -> None:
    pre, linear = evidence.get(f"{prefix}hook_pre"), evidence.get(f"{prefix}hook_pre_linear")
    post = evidence.get(f"{prefix}{'hook_mid' if part.ln else 'hook_post'}")
    if pre is None or post is None or (part.gate is None and part.given is None) != (linear is None):
        findings.holds(GATED, f"{prefix}hook_post", False, "its layers did not all run")
        return
    if part.ln is not None:
        normed = evidence.call(module, part.ln.path)
        findings.equal(
            GATED, f"{prefix}hook_post", evidence.get(f"{prefix}hook_post"), normed.result if normed else None
        )
    if part.activation is not None:
        function = module_at(evidence.bridge.original_model, join(module, part.activation))
        made = function.forward(pre)
        findings.equal(GATED, f"{prefix}hook_post", post, made if linear is None else made * linear)
        return
    _post(evidence, findings, f"{prefix}hook_post", pre, linear, post)


def _post(evidence: Evidence, findings: Findings, at: str, pre: Tensor, linear: Tensor | None, post: Tensor) -> None:
    act_fn = evidence.bridge.cfg.act_fn
    expected = product(act_fn, pre, linear, config_of(evidence.bridge.core).get_text_config())
    if expected is None:
        findings.holds(GATED, at, False, f"act_fn={act_fn!r} is no function that is known")
    else:
        findings.equal(GATED, at, post, expected)


def _experts(evidence: Evidence, findings: Findings, place: LayerStep) -> None:
    used = 0
    for e in range(evidence.bridge.cfg.num_experts or 0):
        prefix = f"{place.part}experts.{e}."
        gate, pre, post = (evidence.get(f"{prefix}hook_{name}") for name in ("gate", "pre", "post"))
        if pre is not None and post is not None and len(post):
            used += 1
            entered, linear = (pre, None) if gate is None else (gate, pre)
            _post(evidence, findings, f"{prefix}hook_post", entered, linear, post)
    findings.holds(GATED, f"{place.part}experts", used > 0, "no expert ran")


class _Mixture:
    def __init__(self, evidence: Evidence, findings: Findings, place: LayerStep, part: MoE, step: Step) -> None:
        self.evidence, self.findings, self.place, self.part, self.step = evidence, findings, place, part, step

    def get(self, name: str) -> Tensor | None:
        found = self.evidence.get(f"{self.place.part}hook_{name}")
        return None if found is None else found.flatten(0, 1)

    def prove(self) -> None:
        at = self.place.part
        logits, weights, top, chosen = map(
            self.get, ("router_logits", "expert_weights", "topk_weights", "expert_indices")
        )
        router = self.evidence.call(self.place.module, self.part.router)
        if self.part.in_batches and weights is not None and chosen is not None:
            top = weights.gather(-1, chosen.long())
        if logits is None or weights is None or top is None or chosen is None or router is None or router.input is None:
            self.findings.holds(CHOICE, at, False, "the router did not run")
            return
        matrix = router.module.get_submodule(router_matrix(router.module))
        weight, bias = (getattr(matrix, name, None) for name in ("weight", "bias"))
        if isinstance(weight, Tensor) and weight.ndim == 2:
            made = torch.nn.functional.linear(router.input.flatten(0, -2), weight.detach(), bias)
            self.findings.equal(CHOICE, f"{at}hook_router_logits", logits, made)
        else:
            self.findings.inconclusive(CHOICE, f"{at}hook_router_logits: the router has no matrix")
        wide = logits.double()
        if self.part.in_batches:
            self._in_batches(wide, weights, chosen, router.input.flatten(0, -2))
            return
        if self.part.chosen_by == "in turn":
            self._in_turn(wide, weights, top, chosen)
            return
        if self.part.chosen_by == "scores":
            self._by_scores(wide, weights, top, chosen)
            return
        if self.part.chosen_by.endswith("probabilities"):
            expected = wide.softmax(-1)
        else:
            expected = torch.zeros_like(wide)
            expected.scatter_(-1, chosen.long(), wide.gather(-1, chosen.long()).softmax(-1))
        self.findings.equal(CHOICE, f"{at}hook_expert_weights", weights, expected.to(weights.dtype), 1.0)
        best = expected.topk(chosen.shape[-1]).indices.sort(-1).values
        same = self.part.chosen_by.startswith("corrected") or bool((best == chosen.long().sort(-1).values).all())
        self.findings.holds(CHOICE, f"{at}hook_expert_indices", same, "they are not those of the largest weights")
        share = weights.double().gather(-1, chosen.long())
        normed = share / share.sum(-1, keepdim=True)
        seen = top.double() / top.double().sum(-1, keepdim=True)
        self.findings.equal(CHOICE, f"{at}hook_topk_weights", seen, normed, 1.0)
        self._total(top, chosen)

    def _by_scores(self, logits: Tensor, weights: Tensor, top: Tensor, chosen: Tensor) -> None:
        """The weights of the chosen are in the ratios of their logits' sigmoids; the others have none."""
        at = self.place.part
        scores = torch.zeros_like(logits).scatter(-1, chosen.long(), logits.sigmoid().gather(-1, chosen.long()))
        expected = scores / scores.sum(-1, keepdim=True) * weights.double().sum(-1, keepdim=True)
        self.findings.equal(CHOICE, f"{at}hook_expert_weights", weights, expected.to(weights.dtype), 1.0)
        self.findings.equal(CHOICE, f"{at}hook_topk_weights", top, weights.gather(-1, chosen.long()).to(top.dtype), 1.0)
        if chosen.shape[-1] == 1:
            self.findings.inconclusive(CHOICE, f"{at}: one expert is chosen, and its weight is in no ratio")
        self._total(top, chosen)

    def _in_batches(self, logits: Tensor, weights: Tensor, chosen: Tensor, tokens: Tensor) -> None:
        """Weights are the sigmoids of the largest logits; each expert is given the tokens times its own."""
        at = self.place.part
        by = self.part.chosen_by
        self.findings.holds(
            CHOICE, at, by == "scores", f"chosen_by={by!r}, and the weights are those of each logit alone"
        )
        best = logits.topk(chosen.shape[-1]).indices.sort(-1).values
        same = bool((best == chosen.long().sort(-1).values).all())
        self.findings.holds(CHOICE, f"{at}hook_expert_indices", same, "they are not those of the largest logits")
        share = logits.sigmoid().gather(-1, chosen.long())
        expected = torch.zeros_like(logits).scatter(-1, chosen.long(), share)
        self.findings.equal(CHOICE, f"{at}hook_expert_weights", weights, expected.to(weights.dtype), 1.0)
        for e in range(self.evidence.bridge.cfg.num_experts or 0):
            entered = self.evidence.get(f"{at}experts.{e}.hook_in")
            self.findings.equal(CHOICE, f"{at}experts.{e}.hook_in", entered, tokens * weights[:, e, None])
        everyone = torch.arange(weights.shape[-1], device=weights.device).expand_as(weights)
        self._total(torch.ones_like(weights), everyone)

    def _in_turn(self, logits: Tensor, weights: Tensor, top: Tensor, chosen: Tensor) -> None:
        """One after the other, each weighted among those that come close to it."""
        at = self.place.part
        shares, best = sparsemixer_topk(logits, self.part.margin, chosen.shape[-1])
        same = bool((best == chosen).all())
        self.findings.holds(CHOICE, f"{at}hook_expert_indices", same, "they are not those of the largest logits")
        self.findings.equal(CHOICE, f"{at}hook_topk_weights", top, shares.to(top.dtype), 1.0)
        if bool((shares == 1).all()):
            self.findings.inconclusive(CHOICE, f"{at}: no other expert came within the margin of a chosen one")
        everyone = torch.zeros_like(weights).scatter(-1, chosen.long(), top.to(weights.dtype))
        self.findings.equal(CHOICE, f"{at}hook_expert_weights", weights, everyone, 1.0)
        self._total(top, chosen)

    def _total(self, top: Tensor, chosen: Tensor) -> None:
        """The weighted results of the experts, and of the one that all tokens are sent to."""
        at, module = self.place.part, self.place.module
        experts = module_at(self.evidence.bridge.original_model, join(module, self.part.experts))
        # Behind it a norm may stand: what it returns is then seen before that, and has no factor yet.
        later = self.step.changes_its_result
        added = self.evidence.get(f"{at}hook_out" if later else f"{self.place.prefix}hook_{self.place.named.name}_out")
        if added is None:
            self.findings.inconclusive(CHOICE, f"{at}: what it returns is not seen")
            return
        total = torch.zeros_like(added.flatten(0, 1), dtype=torch.float64)
        for e in range(self.evidence.bridge.cfg.num_experts or 0):
            post = self.evidence.get(f"{at}experts.{e}.hook_post")
            if post is None:
                continue
            rank, rows = chosen.T.eq(e).nonzero(as_tuple=True)
            result = post.double() @ expert_weight(experts, e, "W_out", self.part.layers).detach().double().T
            if has_bias(experts, "W_out", self.part.layers):
                result = result + expert_bias(experts, e, "W_out", self.part.layers).detach().double()
            total.index_add_(0, rows, result * top[rows, rank].double()[:, None])
        total = total * self.part.factor
        if self.part.shared:
            result_of = self.evidence.get(f"{at}shared_expert.hook_out")
            shared = result_of.flatten(0, 1).double() if result_of is not None else torch.zeros_like(total)
            if self.part.shared_gate:
                gate = self.evidence.get(f"{at}shared_expert_gate.hook_out")
                function = GATE_FUNCTIONS[self.part.shared_gate.function]
                shared = shared * (function(gate.flatten(0, 1).double()) if gate is not None else 0)
            total = total + shared * self.part.shared_factor
        if not later:
            total = self.step.added(total, module_at(self.evidence.bridge.original_model, self.place.path))
        self.findings.equal(CHOICE, f"{at}(sum)", added, like(total.to(added.dtype), added))
