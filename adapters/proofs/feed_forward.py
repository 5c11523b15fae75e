"""Proofs of MLPs, mixtures of experts and norms: the neurons are the gate's activation function
times the other projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from adapters.attention import Attention
from adapters.config import config_of
from adapters.feed_forward import MLP, MoE, activated, are_modules, router_matrix, sent_to
from adapters.norms import Norm, NormKind, NormScale
from adapters.observe.recognised import (
    probed,
    recognise_module,
    results_by_token,
    same_rows,
    weights_in_sum,
)
from adapters.points import join
from adapters.proofs.evidence import Claim, Evidence, Findings, Hook, LayerStep, StepClaim, like
from adapters.views import Composed, View

GATED = "act(pre) = post, with a gate act(pre) * pre_linear = post"
CHOICE = (
    "experts are chosen and weighted as declared, and their weighted results are what a mixture"
    " returns"
)


def prove_feed_forward(evidence: Evidence, findings: Findings) -> None:
    """Check that every MLP, and every expert, computes its declared function.

    Args:
        evidence: a run with randomized activations.
        findings: collects the results.
    """
    findings.claim(GATED, CHOICE)
    for place in evidence.places():
        part = place.step.part
        path = place.module
        prefix = place.part
        if isinstance(part, MLP):
            _Neurons(evidence, findings, path, prefix).prove_mlp(part)
        elif isinstance(part, MoE):
            if part.shared:
                shared_path = join(path, part.shared.path)
                shared_prefix = f"{prefix}shared_expert."
                _Neurons(evidence, findings, shared_path, shared_prefix).prove_mlp(part.shared)
            _Neurons(evidence, findings, path, prefix).prove_experts()
            _Mixture(evidence, findings, place).prove()


class _Neurons(Claim):
    """The neurons of MLPs and experts are the activation function of their input."""

    name = GATED

    def prove_mlp(self, part: MLP) -> None:
        """Check the neurons of an MLP, and their norm."""
        point = self.point("hook_post")
        pre = self.get("hook_pre")
        linear = self.get("hook_pre_linear")
        post = self.get("hook_mid" if part.ln else "hook_post")
        multiplied = part.gate is not None or part.given is not None
        if pre is None or post is None or (linear is not None) != multiplied:
            self.fails(point, "its layers did not all run")
            return
        if part.ln is not None:
            self.equal(point, self.get("hook_post"), self.output_of(part.ln.path))
        module = self.evidence.module(self.path)
        config = config_of(self.bridge.core).get_text_config()
        self._prove_post(point, part.neurons(pre, linear, module, self.cfg.act_fn, config), post)

    def prove_experts(self) -> None:
        """Check the neurons of every expert that received a token."""
        config = config_of(self.bridge.core).get_text_config()
        any_ran = False
        for e in range(self.cfg.num_experts or 0):
            prefix = f"experts.{e}.hook_"
            gate = self.get(f"{prefix}gate")
            pre = self.get(f"{prefix}pre")
            post = self.get(f"{prefix}post")
            if pre is None or post is None or not len(post):
                continue
            any_ran = True
            entered, linear = (pre, None) if gate is None else (gate, pre)
            expected = activated(self.cfg.act_fn, entered, linear, config)
            self._prove_post(self.point(f"{prefix}post"), expected, post)
        self.holds(self.point("experts"), any_ran, "no expert ran")

    def _prove_post(self, point: str, expected: Tensor | None, post: Tensor) -> None:
        """Check neurons; without expected ones, the activation function is unknown."""
        if expected is not None:
            self.equal(point, post, expected)
            return
        cure = "say config_values={'act_fn': ...}, or MLP.activation"
        self.fails(
            f"cfg.act_fn ({point})",
            f"act_fn={self.cfg.act_fn!r} is no function that is known: {cure}",
        )


# --------------------------------------------------------------------------------------------------
# Mixtures: the router's logits choose and weight the experts.
# --------------------------------------------------------------------------------------------------


class _Mixture(StepClaim):
    """A mixture of experts returns the weighted sum of the chosen experts' outputs."""

    name = CHOICE

    def __init__(self, evidence: Evidence, findings: Findings, place: LayerStep) -> None:
        super().__init__(evidence, findings, place)
        assert isinstance(self.step.part, MoE)
        self.part = self.step.part
        self.path = place.module
        self.count = self.cfg.num_experts or 0

    def rows(self, name: str) -> Tensor | None:
        """Return an activation with a row for each token."""
        x = self.get(f"hook_{name}")
        return None if x is None else x.flatten(0, 1)

    def prove(self) -> None:
        """Check the router, the choice and the sum."""
        part = self.part
        logits = self.rows("router_logits")
        weights = self.rows("expert_weights")
        top = self.rows("topk_weights")
        chosen = self.rows("expert_indices")
        if part.in_batches and weights is not None and chosen is not None:
            top = weights.gather(-1, chosen.long())
        router = self.call(part.router)
        entered = router.input if router else None
        if logits is None or router is None or entered is None:
            self._fail_without_router()
            return
        tokens = entered.flatten(0, -2)
        experts = self.evidence.module(self.path, part.experts)
        if are_modules(experts):
            self._prove_router(router.module, tokens, logits)
            self._prove_modules(experts, tokens.double(), logits.double())
        elif weights is None or top is None or chosen is None:
            self._fail_without_router()
        else:
            self._prove_router(router.module, tokens, logits)
            self._prove_choice(logits.double(), weights, top, chosen)
            if part.in_batches:
                self._prove_inputs(tokens, weights)
                # The inputs of experts are weighted already.
                top = torch.ones_like(weights)
                everyone = torch.arange(weights.shape[-1], device=weights.device)
                chosen = everyone.expand_as(weights)
            self._prove_sum(experts, top, chosen)

    def _fail_without_router(self) -> None:
        self.fails(self.prefix, "the router did not run")

    def _prove_router(self, router: nn.Module, tokens: Tensor, logits: Tensor) -> None:
        """Check that the router's matrix maps the tokens to the router logits."""
        point = self.point("hook_router_logits")
        matrix = router.get_submodule(router_matrix(router))
        weight = getattr(matrix, "weight", None)
        bias = getattr(matrix, "bias", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            product = torch.nn.functional.linear(tokens, weight.detach(), bias)
            self.equal(point, logits, product)
        else:
            self.inconclusive(f"{point}: the router has no matrix")

    def _prove_inputs(self, tokens: Tensor, weights: Tensor) -> None:
        """Check that every expert of a batch receives every token, times its weight."""
        for e in range(weights.shape[-1]):
            name = f"experts.{e}.hook_in"
            self.equal(self.point(name), self.get(name), tokens * weights[:, e, None])

    def _prove_choice(self, logits: Tensor, weights: Tensor, top: Tensor, chosen: Tensor) -> None:
        """Check that the experts with the largest logits are chosen, and weighted as declared."""
        part = self.part
        place = self.prefix
        by = self.part.chosen_by
        count = chosen.shape[-1]
        sent = sent_to(chosen, logits.shape[-1])
        same = part.may_correct or torch.equal(part.best(logits, count), sent)
        self.holds(
            self.point("hook_expert_indices"), same, "they are not those of the largest logits"
        )
        shares = part.shares(logits, sent)
        expected = logits.softmax(-1) if by.endswith("probabilities") else shares
        if by == "scores" and not part.in_batches:  # known up to a factor for each token
            expected = _normalised(expected) * weights.double().sum(-1, keepdim=True)
            if count == 1:
                self.inconclusive(f"{place}: one expert is chosen, and its weight is in no ratio")
        if part.in_batches:
            self.holds(
                place,
                by == "scores",
                f"chosen_by={by!r}, and the weights are those of each logit alone",
            )
        if by == "in turn" and bool((shares.gather(-1, chosen.long()) == 1).all()):
            self.inconclusive(f"{place}: no other expert came within the margin of a chosen one")
        self.equal(self.point("hook_expert_weights"), weights, expected.to(weights.dtype), 1.0)
        share = weights.double().gather(-1, chosen.long())
        observed = top.double()
        if by not in ("scores", "in turn"):  # the sum of results shows whether weights sum to one
            share = _normalised(share)
            observed = _normalised(observed)
        self.equal(self.point("hook_topk_weights"), observed, share, 1.0)

    def _prove_sum(self, experts: nn.Module, top: Tensor, chosen: Tensor) -> None:
        """Check the sum of the weighted outputs of the experts and of the shared expert."""
        added = self._output
        if added is None:
            return
        total = torch.zeros_like(added.flatten(0, 1), dtype=torch.float64)
        for e in range(self.count):
            post = self.get(f"experts.{e}.hook_post")
            if post is not None:
                rank, rows = chosen.T.eq(e).nonzero(as_tuple=True)
                results = self.part.made_by(experts, e, post.double())
                total.index_add_(0, rows, results * top[rows, rank].double()[:, None])
        total = total * self.part.factor
        total = total + self._shared(total)
        if not self.step.changes_its_result:
            total = self.step.added(total, self.evidence.module(self.place.path))
        self.equal(self.point("(sum)"), added, like(total.to(added.dtype), added))

    @property
    def _output(self) -> Tensor | None:
        """Return the mixture's output, or its addition to the stream if the two are the same;
        record it as missing if it is None.
        """
        # A norm may follow: the output is then observed before the norm, without the factor.
        own = self.step.changes_its_result
        output = self.evidence.get(self.point("hook_out") if own else self.place.result)
        if output is None:
            self.inconclusive(f"{self.prefix}: what it returns is not seen")
        return output

    def _shared(self, like: Tensor) -> Tensor:
        """Return the shared expert's output, ``[token, d_model]``."""
        nothing = torch.zeros_like(like)
        if not self.part.shared:
            return nothing
        output = self.get("shared_expert.hook_out")
        shared = nothing if output is None else output.flatten(0, 1).double()
        if self.part.shared_gate:
            gate = self.get("shared_expert_gate.hook_out")
            if gate is None:
                shared = nothing
            else:
                shared = self.part.shared_gate.of(shared, gate.flatten(0, 1))
        return shared * self.part.shared_factor

    # ----------------------------------------------------------------------------------------------
    # Experts that are modules of a list.
    # ----------------------------------------------------------------------------------------------

    def _prove_modules(self, experts: nn.Module, tokens: Tensor, logits: Tensor) -> None:
        """Check experts that are modules of a list: the rows of their inputs tell which tokens each
        received.
        """
        part = self.part
        results, sent = self._results(experts, tokens)
        added = self._output_before_factors
        if added is None:
            return
        total = added.flatten(0, 1).double() - self._shared(results.sum(1))
        used = weights_in_sum(total, results, [], added)
        self.holds(
            self.point("(sum)"),
            used is not None,
            "it is not the sum of what its experts make of each token",
        )
        if used is None:
            return
        share = _normalised(part.shares(logits, sent)).to(added.dtype)
        self.equal(self.point("(weights)"), _normalised(used).to(added.dtype), share, 1.0)
        if part.chosen_by in ("probabilities", "logits"):
            same = torch.equal(part.best(logits, int(sent.sum(-1).max())), sent)
            self.holds(self.prefix, same, "experts are not those of the largest logits")
        self._prove_chosen(used, sent)
        weights = self.rows("expert_weights")
        if weights is not None:
            of_all = part.chosen_by.endswith("probabilities")
            expected = logits.softmax(-1) if of_all else used * sent / part.factor
            point = self.point("hook_expert_weights")
            self.equal(point, weights, expected.to(weights.dtype), 1.0)

    def _results(self, experts: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return each expert's output for each token, and which tokens it received."""
        calls: list[list[tuple[Tensor, Tensor]]] = []
        for e in range(self.count):
            rows = self.get(f"experts.{e}.hook_in")
            post = self.get(f"experts.{e}.hook_post")
            ran: list[tuple[Tensor, Tensor]] = []
            if rows is not None and post is not None:
                ran = [(rows, self.part.made_by(experts, e, post.double()))]
            calls.append(ran)
        return results_by_token(tokens, calls)

    @property
    def _output_before_factors(self) -> Tensor | None:
        """Return the mixture's output, without the constant factors that follow."""
        output = self._output
        own = self.step.changes_its_result
        if output is None or own or self.step.last_factor in (None, 1.0):
            return output
        block = self.evidence.module(self.place.path)
        for link in reversed(self.step.output_transform):
            output = link.undone(output, block)
        return output

    def _prove_chosen(self, used: Tensor, sent: Tensor) -> None:
        """Check the indices and the weights of the chosen experts, if the router returns them.

        Args:
            used: the weights in the observed sum.
            sent: the experts that received each token.
        """
        top = self.rows("topk_weights")
        chosen = self.rows("expert_indices")
        if chosen is not None:
            same = torch.equal(sent_to(chosen, sent.shape[-1]), sent)
            point = self.point("hook_expert_indices")
            self.holds(point, same, "its tokens are sent to other experts")
        if top is not None and chosen is not None:
            expected = used.gather(-1, chosen.long()) / self.part.factor
            self.equal(self.point("hook_topk_weights"), top, expected.to(top.dtype))
        else:
            factor = self.part.factor
            self.holds(
                self.prefix,
                factor == 1,
                f"factor={factor}, and no weights are shown that it would multiply",
            )


def _normalised(x: Tensor) -> Tensor:
    """Return weights that sum to one."""
    return x / x.sum(-1, keepdim=True)


# --------------------------------------------------------------------------------------------------
# Norms are of the declared kind: recomputed from rows that distinguish kinds, offsets and epsilons.
# --------------------------------------------------------------------------------------------------


CLAIM = "norms compute what is declared: kind, epsilon, what is added to the weight"


def prove_norms(evidence: Evidence, findings: Findings) -> None:
    """Check every norm with hook points, and every norm that is declared to compute nothing.

    Args:
        evidence: a run.
        findings: collects the results.
    """
    findings.claim(CLAIM)
    for name, hook in evidence.bridge.hook_dict.items():
        view = _scale(hook.view)
        if view is not None:
            _Norm(evidence, findings, "", name.removesuffix(".hook_scale")).prove(hook, view)
    for path, norm in _declared_norms(evidence):
        if norm.kind.identity:
            place = f"{path}, which is to compute nothing"
            findings.equal(CLAIM, place, evidence.output_of(path), evidence.input_of(path))


def _declared_norms(evidence: Evidence) -> Iterator[tuple[str, Norm]]:
    """Yield every declared norm that the model has, with its path."""
    architecture = evidence.architecture
    if norm := architecture.embedding.norm:
        yield join(evidence.base, norm.path), norm
    for stack in evidence.stacks():
        final = stack.final_norm
        if final and not final.kind.function:
            yield join(evidence.base, final.path), final
    for head in architecture.heads:
        if head.norm and evidence.call(evidence.from_model(head.path)):
            yield evidence.from_model(head.norm.path), head.norm
    for place in evidence.places():
        yield from _norms_of_step(place)


def _norms_of_step(place: LayerStep) -> Iterator[tuple[str, Norm]]:
    """Yield the norms of a step, with their paths."""
    step = place.step
    part = place.step.part
    block = place.stack.block_at(place.layer)
    outer = list(step.norms)
    if block.norm and place.named is block.named[0]:
        outer.insert(0, block.norm)
    inner: list[Norm] = []
    if isinstance(part, Attention):
        latents = [projection.latent for projection in part.projections.values()]
        inner = [*part.qk_norms, *(latent for latent in latents if latent)]
    elif isinstance(part, MLP) and part.ln:
        inner = [part.ln]
    for norm in outer:
        yield join(place.path, norm.path), norm
    for norm in inner:
        yield join(place.module, norm.path), norm


def _scale(view: View) -> NormScale | None:
    """Return the view of a norm's scale, also if it is part of a composition."""
    if isinstance(view, Composed):
        return _scale(view.inner) or _scale(view.outer)
    return view if isinstance(view, NormScale) else None


class _Norm(Claim):
    """A norm computes its declared function."""

    name = CLAIM

    def prove(self, hook: Hook, view: NormScale) -> None:
        """Check the module of a norm's scale; for norms of each head, all of their modules."""
        site = hook.point.sources[0] if view.shared else hook.point.site
        kind = view.kind
        call = self.call(site.path)
        if call is None or call.input is None:
            self.fails(self.prefix, f"{site.path} did not run")
            return
        modules: Iterable[nn.Module] = (call.module,)
        if kind.of_each:
            expected = kind.of(call.input, call.module)
            self.equal(self.point(".(each head's)"), call.result, expected)
            modules = kind.parts(call.module)
            kind = replace(kind, inside=None)
        for module in modules:
            self._prove_module(site.path, kind, module, call.input)

    def _prove_module(self, path: str, kind: NormKind, module: nn.Module, entered: Tensor) -> None:
        """Check that a norm's module computes the declared function, on rows that distinguish kinds
        and epsilons.
        """
        tolerance = self.findings.tolerance
        rows = probed(module, entered.shape[-1], entered)
        if rows is None:
            self.fails(self.prefix, f"{path} computes no norm that is known")
            return
        x, observed = rows
        expected = kind.of(x, module)
        if not same_rows(expected, observed, tolerance):
            self.fails(self.prefix, f"{path} computes {self._observed(kind, module, entered)}")
            return
        self.holds(self.prefix, True)
        if same_rows(replace(kind, eps=0.0).of(x, module), expected, tolerance):
            self.inconclusive("epsilons, where they are too small to be seen")

    def _observed(self, declared: NormKind, module: nn.Module, entered: Tensor) -> str:
        """Describe the function that a module computes and the declared one."""
        inner = declared.normalizer(module)
        width = entered.shape[-1]
        kind = recognise_module(inner, width, entered, tolerance=self.findings.tolerance)
        if kind is None:
            return "no norm that is known"
        observed = _description(kind)
        expected = _description(declared)
        if observed == expected:
            observed = f"{observed} with the epsilon {kind.eps or 0:.3g}"
            expected = f"{expected} with {declared.epsilon(module):.3g}"
        return f"{observed}, and {expected} is declared"


def _description(kind: NormKind) -> str:
    """Describe a kind of norm, without its epsilon."""
    name = "nothing" if kind.identity else "a layer norm" if kind.centered else "an RMS norm"
    return f"{name} with {kind.offset:g} + weight" if kind.offset else name
