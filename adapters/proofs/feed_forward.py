"""MLPs and mixtures: what enters the last layer is the gate's activation function times the other projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from adapters.architecture import Step
from adapters.attention import Attention
from adapters.config import config_of
from adapters.feed_forward import MLP, MoE, activated, are_modules, router_matrix, sent_to
from adapters.norms import Norm, NormKind, NormScale
from adapters.observe.recognised import probed, recognise_module, results_by_token, same_rows, weights_in_sum
from adapters.points import join
from adapters.proofs.evidence import Evidence, Findings, Hook, LayerStep, like
from adapters.views import Composed, View

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
        part = place.step.part
        if isinstance(part, MLP):
            _mlp(evidence, findings, place.part, part, place.module)
        elif isinstance(part, MoE):
            if part.shared:
                _mlp(
                    evidence, findings, f"{place.part}shared_expert.", part.shared, join(place.module, part.shared.path)
                )
            _experts(evidence, findings, place)
            _Mixture(evidence, findings, place, part, place.step).prove()


def _mlp(evidence: Evidence, findings: Findings, prefix: str, part: MLP, module: str) -> None:
    pre, linear = evidence.get(f"{prefix}hook_pre"), evidence.get(f"{prefix}hook_pre_linear")
    post = evidence.get(f"{prefix}{'hook_mid' if part.ln else 'hook_post'}")
    if pre is None or post is None or (part.gate is None and part.given is None) != (linear is None):
        findings.holds(GATED, f"{prefix}hook_post", False, "its layers did not all run")
        return
    if part.ln is not None:
        normed = evidence.made(module, part.ln.path)
        findings.equal(GATED, f"{prefix}hook_post", evidence.get(f"{prefix}hook_post"), normed)
    own, act_fn = evidence.module(module), evidence.bridge.cfg.act_fn
    _post(evidence, findings, f"{prefix}hook_post", part.neurons(pre, linear, own, act_fn, _config(evidence)), post)


def _post(evidence: Evidence, findings: Findings, at: str, expected: Tensor | None, post: Tensor) -> None:
    if expected is None:
        act_fn = evidence.bridge.cfg.act_fn
        cure = "say config_values={'act_fn': ...}, or MLP.activation"
        findings.holds(GATED, f"cfg.act_fn ({at})", False, f"act_fn={act_fn!r} is no function that is known: {cure}")
    else:
        findings.equal(GATED, at, post, expected)


def _config(evidence: Evidence) -> PreTrainedConfig:
    return config_of(evidence.bridge.core).get_text_config()


def _experts(evidence: Evidence, findings: Findings, place: LayerStep) -> None:
    used = 0
    for e in range(evidence.bridge.cfg.num_experts or 0):
        prefix = f"{place.part}experts.{e}."
        gate, pre, post = (evidence.get(f"{prefix}hook_{name}") for name in ("gate", "pre", "post"))
        if pre is not None and post is not None and len(post):
            used += 1
            entered, linear = (pre, None) if gate is None else (gate, pre)
            made = activated(evidence.bridge.cfg.act_fn, entered, linear, _config(evidence))
            _post(evidence, findings, f"{prefix}hook_post", made, post)
    findings.holds(GATED, f"{place.part}experts", used > 0, "no expert ran")


@dataclass
class _Mixture:
    evidence: Evidence
    findings: Findings
    place: LayerStep
    part: MoE
    step: Step

    def get(self, name: str) -> Tensor | None:
        found = self.evidence.get(f"{self.place.part}hook_{name}")
        return None if found is None else found.flatten(0, 1)

    def prove(self) -> None:
        at, names = self.place.part, ("router_logits", "expert_weights", "topk_weights", "expert_indices")
        logits, weights, top, chosen = map(self.get, names)
        router = self.evidence.call(self.place.module, self.part.router)
        if self.part.in_batches and weights is not None and chosen is not None:
            top = weights.gather(-1, chosen.long())
        held = self.evidence.module(self.place.module, self.part.experts)
        missing = [] if are_modules(held) else [weights, top, chosen]
        if logits is None or router is None or router.input is None or any(x is None for x in missing):
            self.findings.holds(CHOICE, at, False, "the router did not run")
            return
        tokens, wide = router.input.flatten(0, -2), logits.double()
        self._routes(router.module, tokens, logits)
        if are_modules(held):
            self._of_modules(held, tokens.double(), wide)
            return
        assert weights is not None and top is not None and chosen is not None
        self._of_one_module(wide, weights, top, chosen)
        if self.part.in_batches:
            for e in range(weights.shape[-1]):
                entered = self.evidence.get(f"{at}experts.{e}.hook_in")
                self.findings.equal(CHOICE, f"{at}experts.{e}.hook_in", entered, tokens * weights[:, e, None])
            everyone = torch.arange(weights.shape[-1], device=weights.device).expand_as(weights)
            top, chosen = torch.ones_like(weights), everyone  # what an expert is given is weighted already
        self._total(top, chosen)

    def _routes(self, router: nn.Module, tokens: Tensor, logits: Tensor) -> None:
        """The router's matrix makes the logits of the tokens."""
        at, matrix = f"{self.place.part}hook_router_logits", router.get_submodule(router_matrix(router))
        weight, bias = (getattr(matrix, name, None) for name in ("weight", "bias"))
        if isinstance(weight, Tensor) and weight.ndim == 2:
            self.findings.equal(CHOICE, at, logits, torch.nn.functional.linear(tokens, weight.detach(), bias))
        else:
            self.findings.inconclusive(CHOICE, f"{at}: the router has no matrix")

    def _of_one_module(self, logits: Tensor, weights: Tensor, top: Tensor, chosen: Tensor) -> None:
        """The experts are those of the largest logits, and weighted as the mixture weights them."""
        at, part, findings, n = self.place.part, self.part, self.findings, chosen.shape[-1]
        sent, by = sent_to(chosen, logits.shape[-1]), part.chosen_by
        same = part.may_correct or torch.equal(part.best(logits, n), sent)
        findings.holds(CHOICE, f"{at}hook_expert_indices", same, "they are not those of the largest logits")
        shares = part.shares(logits, sent)
        expected = logits.softmax(-1) if by.endswith("probabilities") else shares
        if by == "scores" and not part.in_batches:  # they are told up to a number for each token
            expected = expected / expected.sum(-1, keepdim=True) * weights.double().sum(-1, keepdim=True)
            if n == 1:
                findings.inconclusive(CHOICE, f"{at}: one expert is chosen, and its weight is in no ratio")
        if part.in_batches:
            wrong = f"chosen_by={by!r}, and the weights are those of each logit alone"
            findings.holds(CHOICE, at, by == "scores", wrong)
        if by == "in turn" and bool((shares.gather(-1, chosen.long()) == 1).all()):
            findings.inconclusive(CHOICE, f"{at}: no other expert came within the margin of a chosen one")
        findings.equal(CHOICE, f"{at}hook_expert_weights", weights, expected.to(weights.dtype), 1.0)
        share, seen = weights.double().gather(-1, chosen.long()), top.double()
        if by != "scores" and by != "in turn":  # whether those of the chosen sum to one is seen in the sum of results
            share, seen = share / share.sum(-1, keepdim=True), seen / seen.sum(-1, keepdim=True)
        findings.equal(CHOICE, f"{at}hook_topk_weights", seen, share, 1.0)

    def _of_modules(self, experts: nn.Module, tokens: Tensor, logits: Tensor) -> None:
        """Each expert is a module of a list: the rows that it is given say which tokens it was sent."""
        at = self.place.part
        given: list[list[tuple[Tensor, Tensor]]] = []
        for e in range(self.evidence.bridge.cfg.num_experts or 0):
            rows, post = (self.evidence.get(f"{at}experts.{e}.hook_{name}") for name in ("in", "post"))
            given.append([])
            if rows is not None and post is not None:
                given[-1].append((rows, self.part.made_by(experts, e, post.double())))
        results, sent = results_by_token(tokens, given)
        added = self._added()
        if added is None:
            return
        total = added.flatten(0, 1).double() - self._shared(results.sum(1))
        used = weights_in_sum(total, results, [], added)
        self.findings.holds(
            CHOICE, f"{at}(sum)", used is not None, "it is no sum of what its experts make of each token"
        )
        if used is None:
            return
        weights, top, chosen = map(self.get, ("expert_weights", "topk_weights", "expert_indices"))
        share = self.part.shares(logits, sent)
        share = share / share.sum(-1, keepdim=True)
        seen = used / used.sum(-1, keepdim=True)
        self.findings.equal(CHOICE, f"{at}(weights)", seen.to(added.dtype), share.to(added.dtype), 1.0)
        if self.part.chosen_by in ("probabilities", "logits"):
            best = self.part.best(logits, int(sent.sum(-1).max()))
            self.findings.holds(CHOICE, at, torch.equal(best, sent), "experts are not those of the largest logits")
        if chosen is not None:
            same = torch.equal(sent_to(chosen, sent.shape[-1]), sent)
            self.findings.holds(CHOICE, f"{at}hook_expert_indices", same, "its tokens are sent to other experts")
        if top is not None and chosen is not None:
            expected = used.gather(-1, chosen.long()) / self.part.factor
            self.findings.equal(CHOICE, f"{at}hook_topk_weights", top, expected.to(top.dtype))
        else:
            why = f"factor={self.part.factor}, and no weights are shown that it would multiply"
            self.findings.holds(CHOICE, at, self.part.factor == 1, why)
        if weights is not None:
            of_all = self.part.chosen_by.endswith("probabilities")
            expected = logits.softmax(-1) if of_all else used * sent / self.part.factor
            self.findings.equal(CHOICE, f"{at}hook_expert_weights", weights, expected.to(weights.dtype), 1.0)

    def _total(self, top: Tensor, chosen: Tensor) -> None:
        """The weighted results of the experts, and of the one that all tokens are sent to."""
        at, module = self.place.part, self.place.module
        experts = self.evidence.module(module, self.part.experts)
        added = self._added(returned=False)
        if added is None:
            return
        total = torch.zeros_like(added.flatten(0, 1), dtype=torch.float64)
        for e in range(self.evidence.bridge.cfg.num_experts or 0):
            post = self.evidence.get(f"{at}experts.{e}.hook_post")
            if post is None:
                continue
            rank, rows = chosen.T.eq(e).nonzero(as_tuple=True)
            total.index_add_(0, rows, self.part.made_by(experts, e, post.double()) * top[rows, rank].double()[:, None])
        total = total * self.part.factor
        total = total + self._shared(total)
        if not self.step.changes_its_result:
            total = self.step.added(total, self.evidence.module(self.place.path))
        self.findings.equal(CHOICE, f"{at}(sum)", added, like(total.to(added.dtype), added))

    def _added(self, *, returned: bool = True) -> Tensor | None:
        """What the mixture returns, or, where nothing stands between, what is added to the stream; None is said."""
        # Behind it a norm may stand: what it returns is then seen before that, and has no factor yet.
        own = self.step.changes_its_result
        added = self.evidence.get(f"{self.place.part}hook_out" if own else self.place.result)
        if added is None:
            self.findings.inconclusive(CHOICE, f"{self.place.part}: what it returns is not seen")
        if own or not returned or added is None or self.step.last_factor in (None, 1.0):
            return added
        block = self.evidence.module(self.place.path)
        for link in reversed(self.step.output_transform):
            added = link.undone(added, block)
        return added

    def _shared(self, like: Tensor) -> Tensor:
        """What the expert that all tokens are sent to adds, ``[token, d_model]``."""
        if not self.part.shared:
            return torch.zeros_like(like)
        result_of = self.evidence.get(f"{self.place.part}shared_expert.hook_out")
        shared = result_of.flatten(0, 1).double() if result_of is not None else torch.zeros_like(like)
        if self.part.shared_gate:
            gate = self.evidence.get(f"{self.place.part}shared_expert_gate.hook_out")
            shared = torch.zeros_like(shared) if gate is None else self.part.shared_gate.of(shared, gate.flatten(0, 1))
        return shared * self.part.shared_factor


# ----------------------------------------------------------------------------------------------------------------------
# Norms are of the declared kind: recomputed from rows that tell kinds, offsets and epsilons apart.
# ----------------------------------------------------------------------------------------------------------------------


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
            what = f"{path}, which is to compute nothing"
            findings.equal(CLAIM, what, evidence.made(path), evidence.entered(path))


def _declared(evidence: Evidence) -> Iterator[tuple[str, Norm]]:
    """Every declared norm that is there, with its path."""
    architecture = evidence.architecture
    if norm := architecture.embedding.norm:
        yield join(evidence.base, norm.path), norm
    for stack in evidence.stacks():
        if stack.final_norm and not stack.final_norm.kind.function:
            yield join(evidence.base, stack.final_norm.path), stack.final_norm
    for head in architecture.heads:
        if head.norm and evidence.call(evidence.from_model(head.path)):
            yield evidence.from_model(head.norm.path), head.norm
    for place in evidence.places():
        step = place.step
        block = place.stack.block_at(place.layer)
        if block.norm and place.named is block.named[0]:
            yield join(place.path, block.norm.path), block.norm
        yield from ((join(place.path, n.path), n) for n in step.norms)
        if isinstance(step.part, Attention):
            latents = (each.latent for each in step.part.projections.values() if each.latent)
            yield from ((join(place.module, n.path), n) for n in (*step.part.qk_norms, *latents))
        elif isinstance(step.part, MLP) and step.part.ln:
            yield join(place.module, step.part.ln.path), step.part.ln


def _scale(view: View) -> NormScale | None:
    """The view of a norm's scale, whatever it is seen through."""
    if isinstance(view, Composed):
        return _scale(view.inner) or _scale(view.outer)
    return view if isinstance(view, NormScale) else None


def _norm(evidence: Evidence, findings: Findings, name: str, hook: Hook, view: NormScale) -> None:
    path, kind = hook.point.sources[0].path if view.shared else hook.point.site.path, view.kind
    call = evidence.call(path)
    if call is None or call.input is None:
        findings.holds(CLAIM, name, False, f"{path} did not run")
        return
    if kind.of_each:
        findings.equal(CLAIM, f"{name}.(each head's)", call.result, kind.of(call.input, call.module))
    one = replace(kind, inside=None) if kind.of_each else kind
    for module in kind.parts(call.module) if kind.of_each else (call.module,):
        _computes(findings, name, path, one, module, call.input)


def _computes(findings: Findings, name: str, path: str, kind: NormKind, module: nn.Module, entered: Tensor) -> None:
    """A norm's module makes of rows that tell kinds and epsilons apart what is declared."""
    rows = probed(module, entered.shape[-1], entered)
    if rows is None:
        findings.holds(CLAIM, name, False, f"{path} computes no norm that is known")
        return
    x, seen = rows
    made = kind.of(x, module)
    if not same_rows(made, seen, findings.tolerance):
        findings.holds(CLAIM, name, False, f"{path} computes {_seen(findings, kind, module, entered)}")
        return
    findings.holds(CLAIM, name, True)
    if same_rows(replace(kind, eps=0.0).of(x, module), made, findings.tolerance):
        findings.inconclusive(CLAIM, "epsilons, where they are too small to be seen")


def _seen(findings: Findings, declared: NormKind, module: nn.Module, entered: Tensor) -> str:
    """What a module computes instead of what is declared."""
    own = declared.normalizer(module)
    found = recognise_module(own, entered.shape[-1], entered, tolerance=findings.tolerance)
    if found is None:
        return "no norm that is known"
    names = _kind(found), _kind(declared)
    epsilons = f" with the epsilon {found.eps or 0:.3g}", f" with {declared.epsilon(module):.3g}"
    what, instead = (f"{name}{eps}" for name, eps in zip(names, epsilons, strict=True)) if len({*names}) < 2 else names
    return f"{what}, and {instead} is declared"


def _kind(kind: NormKind) -> str:
    name = "nothing" if kind.identity else "a layer norm" if kind.centered else "an RMS norm"
    return f"{name} with {kind.offset:g} + weight" if kind.offset else name
