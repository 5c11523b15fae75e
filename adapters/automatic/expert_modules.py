"""A mixture whose experts are modules of a list that a forward loops over, as in most remote code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from adapters.automatic.mixture import FoundExperts
from adapters.automatic.norms import rounded
from adapters.automatic.parts import FoundPart
from adapters.experts import Layers, layers_of, router_matrix
from adapters.feed_forward import MLP, ChosenBy, MoE, RouterElement
from adapters.observe.calls import ModuleCall, Recording, elements_of
from adapters.observe.errors import NotFound
from adapters.observe.token_rows import results_by_token, weights_in_sum
from adapters.observe.tolerance import agree
from adapters.paths import join, members_of


def list_of_experts(part: FoundPart, recording: Recording) -> tuple[str, nn.ModuleList] | None:
    """The path of the list of a mixture's experts, and it; None where there is none.

    Two or more modules of one class, which are given rows that are as wide as the stream.
    """
    if part.owner is None:
        return None
    for path, module in part.owner.module.named_modules():
        if not isinstance(module, nn.ModuleList) or len({type(each) for each in members_of(module)}) != 1:
            continue
        at = join(part.owner.path, path)
        calls = [call for i in range(len(module)) for call in recording.of(join(at, str(i)))]
        wide = [call for call in calls if call.entered and call.left and not call.is_leaf]
        if len(module) > 1 and len(wide) == len(calls) > 1 and all(part.owner.holds(call) for call in calls):
            return at, module
    return None


class FoundExpertModules(FoundExperts):
    """Finds out what such a mixture is made of: which rows each expert is given, and how their results add up.

    Args:
        part, recording, block, config: as for `FoundExperts`.
        experts: the path of the list, and the list.

    Raises:
        NotFound: it cannot be declared as a mixture.
    """

    def __init__(
        self, part: FoundPart, recording: Recording, block: str, experts: tuple[str, nn.ModuleList],
        config: PreTrainedConfig,
    ) -> None:  # fmt: skip
        super().__init__(part, recording, block, config)
        assert part.owner is not None and part.owner.entered is not None
        self.owner, (self.path, modules) = part.owner, experts
        self.num_experts = len(modules)
        self.calls = [recording.of(join(self.path, str(e))) for e in range(self.num_experts)]
        self.tokens = part.owner.entered.value.flatten(0, -2).double()
        self.results, self.sent = self._results()
        self.experts_per_token = int(self.sent.sum(1).max())
        self._look_into_an_expert()

    def _results(self) -> tuple[Tensor, Tensor]:
        """What each expert made of each token, and whether it was given it."""
        given: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.calls]
        for e, call in ((e, call) for e, calls in enumerate(self.calls) for call in calls):
            assert call.entered is not None
            rows, made = call.entered.value.flatten(0, -2), call.left[0].value.flatten(0, -2)
            if rows.shape != made.shape or rows.shape[-1] != self.tokens.shape[-1]:
                raise NotFound(f"{call.path} is given rows of {rows.shape[-1]} numbers, and returns {made.shape[-1]}")
            given[e].append((rows, made))
        return results_by_token(self.tokens, given)

    def _look_into_an_expert(self) -> None:
        """The layers of the expert that was given most tokens."""
        ran = [call for calls in self.calls for call in calls]
        most = max(ran, key=lambda call: call.left[0].value.numel())
        mlp, found = self.mlp_of(most)
        if mlp.up.view is not None or (mlp.gate is not None and mlp.gate.view is not None):
            raise NotFound(f"a layer of {most.path} makes gate and up at once")
        self.gated, self.d_expert, self.act_fn = mlp.gate is not None, found.d_mlp, found.act_fn
        own: Layers = (mlp.gate.path if mlp.gate else "", mlp.up.path, mlp.down)
        self.layers = None if layers_of(most.module) == own else own  # as it is without being said

    def _router(self) -> tuple[ModuleCall, Tensor]:
        """What makes the logits of the experts from the tokens by a matrix, and these, ``[token, expert]``."""
        for call in self.recording.between(self.owner.start, self.owner.end):
            if call.entered is None or self._is_inside_an_expert(call):
                continue
            path = router_matrix(call.module)
            matrix = call.module.get_submodule(path)
            weight, bias = getattr(matrix, "weight", None), getattr(matrix, "bias", None)
            if not isinstance(weight, Tensor) or weight.shape != (self.num_experts, self.tokens.shape[-1]):
                continue
            if agree(call.entered.value.flatten(0, -2).double(), self.tokens, call.entered.value):
                made = torch.nn.functional.linear(self.tokens, weight.detach().double())
                return call, made if bias is None else made + bias.detach().double()
        raise NotFound(f"no module before {self.path} makes a logit for each of its experts")

    def _is_inside_an_expert(self, call: ModuleCall) -> bool:
        return any(each.holds(call) for calls in self.calls for each in calls)

    def declare(self) -> MoE:
        """The declaration.

        Raises:
            NotFound: what is added is not what its experts and its shared expert put out, or how they are weighted is
                not known.
        """
        weights, shared, gate = self._sum()
        router, logits = self._router()
        returns = self._returns(router, logits, weights)
        chosen_by = self._chosen_by(self.owner if returns == ("logits",) else router, logits, weights)
        return self.declared(self.path, router, returns, chosen_by, shared, gate)

    def _returns(self, router: ModuleCall, logits: Tensor, weights: Tensor) -> tuple[RouterElement, ...]:
        """What the elements of the router's output are: the weights of the chosen experts, up to one factor, ..."""
        shown = router.output if not isinstance(router.output, Tensor) else [router.output]
        found: list[RouterElement] = []
        elements = [x.detach() for x in elements_of(shown) if isinstance(x, Tensor)]
        indices = next((x.flatten(0, -2) for x in elements if not x.is_floating_point() and x.ndim > 1), None)
        for x in elements:
            rows = x.flatten(0, -2) if x.ndim > 1 else x
            if not x.is_floating_point():
                found.append("indices" if indices is not None and torch.equal(rows, indices) else "")
            elif rows.shape == logits.shape and agree(rows.double(), logits, x):
                found.append("logits")
            elif indices is not None and rows.shape == indices.shape:
                of_chosen = weights.gather(1, indices.long())
                factor = rounded(float((of_chosen * rows).sum() / rows.double().pow(2).sum()))
                if not agree(rows.double() * factor, of_chosen, x):
                    raise NotFound(f"{router.path} returns other weights than those that its experts are added with")
                self.factors = (factor, self.factors[1])
                found.append("weights")
            else:
                found.append("")
        return tuple(found)

    def _chosen_by(self, chooses: ModuleCall, logits: Tensor, weights: Tensor) -> ChosenBy:
        """What the experts are compared by: see `MoE.chosen_by`."""

        def shares(of: Tensor) -> Tensor:
            chosen = of * self.sent
            return chosen / chosen.sum(1, keepdim=True)

        softmaxes = [s for s in self.recording.softmaxes_between(chooses.start, chooses.end) if s.scores.ndim > 1]
        own = [
            s for s in softmaxes if not any(each.start < s.time < each.end for calls in self.calls for each in calls)
        ]
        choice = [time for time in self.recording.choices if chooses.start < time < chooses.end]
        like = self.part.out[1].value
        if not own:
            if agree(shares(weights), shares(logits.sigmoid()), like):
                return "scores"
        elif agree(shares(weights), shares(logits.softmax(-1)), like):
            scores = own[0].scores.detach().flatten(0, -2).double()
            if scores.shape == logits.shape and agree(scores, logits, own[0].scores):
                best = torch.zeros_like(self.sent).scatter(1, logits.topk(self.experts_per_token).indices, True)
                return "probabilities" if torch.equal(best, self.sent) else "corrected probabilities"
            if choice and own[0].time > choice[0]:
                return "logits"
        raise NotFound(f"{chooses.path} weighs the experts by something else than a softmax or sigmoids")

    def _sum(self) -> tuple[Tensor, MLP | None, ModuleCall | None]:
        """What each expert's result is multiplied with, ``[token, expert]``; the shared expert, and its gate."""
        total = self.part.out[1].value.flatten(0, -2).double()
        if total.shape != self.tokens.shape:
            raise NotFound(f"{self.owner.path} puts out {total.shape[-1]} numbers for a token")
        if (weights := self._weights(total, [])) is not None:
            return weights[:, : self.num_experts], None, None
        inside = self.recording.between(self.owner.start, self.owner.end)
        others = [
            call for call in inside
            if not call.is_leaf and not self._is_inside_an_expert(call) and len(call.left) == 1
            and call.left[0].value.numel() == total.numel()
        ]  # fmt: skip
        gates = [call for call in inside if call.is_linear and call.left[0].value.shape[-1] == 1]
        for call in others:
            made = call.left[0].value.flatten(0, -2).double()
            weights = self._weights(total, [made])
            if weights is None:
                continue
            for gate in (None, *gates):
                factors = weights[:, -1]
                if gate is not None:
                    factors = factors / gate.left[0].value.flatten().double().sigmoid()
                factor = rounded(float(factors.mean()))
                if agree(factors, torch.full_like(factors, factor), call.left[0].value):
                    shared, found = self.mlp_of(call, self.owner.path)
                    self.d_shared, self.factors = found.d_mlp, (self.factors[0], factor)
                    return weights[:, : self.num_experts], shared, gate
        raise NotFound("what it puts out is not the sum of its experts and of one that all tokens are sent to")

    def _weights(self, total: Tensor, others: Sequence[Tensor]) -> Tensor | None:
        """What the experts' results, and others, are multiplied with; None where their sum is something else."""
        return weights_in_sum(total, self.results, others, self.part.out[1].value)
