"""Router, experts and shared expert of a recorded mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from adapters.attention import Gate, Projection
from adapters.automatic.feed_forward import FoundMLP, activations
from adapters.automatic.layouts import relative
from adapters.automatic.norms import rounded
from adapters.automatic.parts import FoundPart
from adapters.experts import (
    Layers,
    are_modules,
    first_projection,
    has_gate,
    in_batches,
    layers_of,
    sparsemixer_topk,
    stacked,
    width,
)
from adapters.feed_forward import CHOICE, MLP, ChosenBy, MoE, RouterElement
from adapters.observe.calls import ModuleCall, Recording, tightest
from adapters.observe.errors import NotFound
from adapters.observe.tolerance import NEGLIGIBLE, agree
from adapters.offloaded import materialized
from adapters.paths import members_of
from adapters.views import times


def experts_of(part: FoundPart, recording: Recording) -> ModuleCall | None:
    """The call of the module that keeps a mixture's experts; None where there is none.

    It has two parameters for all of them, as transformers has it, or is a list of modules with a forward of its own.
    """
    inside = recording.between(part.start, part.producer.end)
    for call in inside:
        if are_modules(call.module) and any(True for _ in call.module.children()):
            return call
        if stacked(call.module):
            return call
        weights = [getattr(call.module, name, None) for name in (first_projection(call.module), "down_proj")]
        if all(isinstance(weight, Tensor) and weight.ndim == 3 for weight in weights):
            return call
    return None


class FoundExperts:
    """What is found of a mixture, however its experts are kept.

    Args:
        part: the part.
        recording: the run.
        block: the path of its block.
        config: the model's.

    Attributes:
        num_experts, experts_per_token, d_expert: its sizes.
        gated: its experts have a gate.
        d_shared: the width of its shared expert, None where it has none.
        act_fn: the name of the activation function, None where it has none that is known.
    """

    owner: ModuleCall
    num_experts: int
    experts_per_token: int
    gated: bool

    def __init__(self, part: FoundPart, recording: Recording, block: str, config: PreTrainedConfig) -> None:
        self.part, self.recording, self.block, self.config = part, recording, block, config
        self.layers: Layers | None = None
        self.d_expert: int | None = None
        self.d_shared: int | None = None
        self.act_fn: str | None = None
        #: What the results of the experts, and of the shared one, are multiplied with.
        self.factors: tuple[float, float] = (1.0, 1.0)

    def mlp_of(self, call: ModuleCall, base: str = "") -> tuple[MLP, FoundMLP]:
        """What a module of the mixture is as an MLP, with its path from `base`, and how that was found.

        Raises:
            NotFound: it is none.
        """
        inside = [c for c in self.recording.calls if call.holds(c) and c.is_linear]
        last = [c for c in inside if c.left[0].mark == call.left[0].mark]
        if not last:
            raise NotFound(f"what {call.path} puts out is not what a linear layer of it does")
        matrices, ends = [c for c in inside if c is not last[-1]], (call, call.left[0])
        of_call = FoundPart(call, ends, last[-1], None, None, matrices, [], self.part.reads, call.start)
        found = FoundMLP(of_call, base, self.config, {}, {})
        mlp = found.declare()
        return replace(mlp, up=replace(mlp.up, width=None)), found

    def declared(
        self, experts: str, router: ModuleCall, returns: tuple[RouterElement, ...], chosen_by: ChosenBy,
        shared: MLP | None, gate: ModuleCall | None, margin: float = 0.0,
    ) -> MoE:  # fmt: skip
        """The declaration; its arguments are what `MoE` says, with paths from the model."""
        owner = self.owner.path
        gates = () if gate is None else (Gate(Projection(relative(gate.path, owner)), "sigmoid"),)
        return MoE(
            relative(owner, self.block),
            router=relative(router.path, owner),
            experts=relative(experts, owner),
            chosen_by=chosen_by,
            margin=margin,
            router_returns=returns,
            factor=self.factors[0],
            shared=shared,
            shared_transform=(*gates, *times(self.factors[1])),
            layers=self.layers,
            flat=self.part.out[1].value.ndim == 2,
        )


class FoundMixture(FoundExperts):
    """Finds out what a mixture of experts is made of.

    Args:
        part, recording, block, config: as for `FoundExperts`.
        experts: the call of its experts.

    Raises:
        NotFound: it cannot be declared as a mixture.
    """

    def __init__(
        self, part: FoundPart, recording: Recording, block: str, experts: ModuleCall, config: PreTrainedConfig
    ) -> None:
        super().__init__(part, recording, block, config)
        self.experts, self.in_batches, self.gated = experts, False, has_gate(experts.module)
        if are_modules(experts.module):
            self.num_experts = len(members_of(experts.module))
            self._look_into_an_expert()
        elif every := stacked(experts.module):
            self.num_experts, self.d_expert = len(every["W_out"]), width(experts.module)
            self.act_fn = self._activation()
        else:
            missing = [
                name for name in ("is_transposed", "is_concatenated", "has_bias") if not hasattr(experts.module, name)
            ]
            entered = () if experts.entered is None else experts.entered.value.shape
            everyone = len(materialized(experts.module, "down_proj")) * self._rows()
            self.in_batches = in_batches(experts.module) and entered[:1] == (everyone,)
            if missing and not self.in_batches:
                raise NotFound(f"{experts.path} does not say how its experts lie ({', '.join(missing)})")
            self.num_experts, self.d_expert = len(materialized(experts.module, "down_proj")), width(experts.module)
            self.act_fn = self._activation()
        self.router = self._router()
        #: The router returns logits alone, and what is chosen is seen where the experts are given it.
        self.chosen = experts.given.get("top_k_index") if self.router.n_left == 1 else None
        if self.in_batches:
            self.experts_per_token = int((self.router.element(0).value != 0).sum(-1).max())
        else:
            chosen = self.router.element(1).value if self.chosen is None else self.chosen
            self.experts_per_token = chosen.shape[-1]
        self.owner = self._owner()

    def _rows(self) -> int:
        """How many tokens the part is given."""
        return self.recording.batch * self.recording.pos

    def _router(self) -> ModuleCall:
        """What chooses: it returns logits, and weights and indices of the chosen ones."""
        for call in self.recording.between(self.part.start, self.part.producer.end):
            given = [tuple(seen.value.shape) for seen in call.left]
            if self.in_batches and call.end <= self.experts.start and given == [(self._rows(), self.num_experts)] * 2:
                return call
            if call.end <= self.experts.start and call.n_left == 3 and call.indices == [2] and len(given) == 2:
                (rows, experts), (others, chosen) = given[0][-2:], given[1][-2:]
                if rows == others and experts == self.num_experts and chosen <= experts:
                    return call
            if given == [(self._rows(), self.num_experts)] and call.n_left == 1 and self._is_chosen_from(call):
                return call
        raise NotFound(
            f"no module before {self.experts.path} returns logits, weights and indices of the chosen experts"
        )

    def _is_chosen_from(self, call: ModuleCall) -> bool:
        """Whether a softmax of what a call returned, behind it, is what the experts that are given were chosen by."""
        logits = call.left[0].value
        behind = [s.scores for s in self.recording.softmaxes_between(call.end, self.experts.start)]
        given = {"top_k_index", "top_k_weights"} <= self.experts.given.keys()
        return given and any(torch.equal(scores.detach(), logits) for scores in behind)

    def _look_into_an_expert(self) -> None:
        """The layers of the expert that most tokens were sent to: which of two is the gate, a few rows say."""
        prefix = f"{self.experts.path}."
        ran = [
            call for call in self.recording.between(self.experts.start, self.experts.end)
            if call.path.startswith(prefix) and "." not in call.path[len(prefix) :] and call.left
        ]  # fmt: skip
        most = max(ran, key=lambda call: len(call.left[0].value), default=None)
        if most is None or len(most.left[0].value) < 3:
            raise NotFound(f"no module in {self.experts.path} was given three tokens, by which it could be known")
        mlp, found = self.mlp_of(most)
        if mlp.gate is not None and mlp.gate.view is None and mlp.up.view is None:
            self.layers = mlp.gate.path, mlp.up.path, mlp.down
            if layers_of(most.module) == self.layers:
                self.layers = None  # as it is without being said
            self.d_expert, self.act_fn = found.d_mlp, found.act_fn

    def _owner(self) -> ModuleCall:
        around = tightest(
            call for call in self.recording.calls
            if call.holds(self.router) and call.holds(self.experts) and call.path.startswith(self.block + ".")
        )  # fmt: skip
        if around is None:
            raise NotFound("no module stands around its router and its experts")
        return around

    def _margin(self) -> float | None:
        """How close others have to come to experts that are chosen in turn: one of the router's own numbers."""
        logits, weights = (self.router.element(key).value.flatten(0, -2).double() for key in (0, 1))
        chosen = self.router.indices_seen.flatten(0, -2)
        for margin in [each for each in vars(self.router.module).values() if isinstance(each, float) and each > 0]:
            shares, best = sparsemixer_topk(logits, margin, chosen.shape[-1])
            if torch.equal(best, chosen) and agree(shares, weights, self.router.element(0).value):
                return margin
        return None

    def chosen_by(self) -> Literal["probabilities", "logits", "scores", "in turn"]:
        """What the router compares the experts by."""
        if self.in_batches:
            return "scores"
        if self.chosen is not None:
            return "probabilities"
        inside = self.recording.softmaxes_between(self.router.start, self.router.end)
        choice = [time for time in self.recording.choices if self.router.start < time < self.router.end]
        if not inside:
            self._are_sigmoids()
            return "scores"
        if len(inside) == self.experts_per_token and self._margin() is not None:
            return "in turn"
        first = inside[0]
        if first.scores.shape[-1] == self.num_experts and (not choice or first.time < choice[0]):
            return "probabilities"
        if len(inside) == 1 and first.scores.shape[-1] == self.experts_per_token and choice and first.time > choice[0]:
            return "logits"
        raise NotFound(f"{self.router.path} computes softmaxes of {[tuple(s.scores.shape) for s in inside]}")

    def _are_sigmoids(self) -> None:
        """The weights of the chosen experts are in the ratios of their logits' sigmoids."""
        logits, weights = (self.router.element(key).value.flatten(0, -2).double() for key in (0, 1))
        scores = logits.sigmoid().gather(-1, self.router.indices_seen.flatten(0, -2).long())
        shares = [x / x.sum(-1, keepdim=True) for x in (scores, weights)]
        if not agree(shares[1], shares[0], self.router.element(1).value):
            raise NotFound(f"{self.router.path} weighs the experts by something else than a softmax or sigmoids")

    def _corrected(self) -> bool:
        """Whether the chosen experts are others than those of the largest logits."""
        logits = self.router.left[0].value.flatten(0, -2)
        best = logits.topk(self.experts_per_token).values
        routed = (self.router.indices_seen if self.chosen is None else self.chosen).flatten(0, -2)
        chosen = logits.gather(-1, routed.long()).sort(-1, descending=True).values
        return not torch.equal(best, chosen)

    def declare(self) -> MoE:
        """The declaration.

        Raises:
            NotFound: what is added is not what its experts and its shared expert put out.
        """
        shared, gate = self._shared()
        linear = [call for call in self.recording.calls if self.router.holds(call) and call.is_linear]
        if not linear and getattr(self.router.module, "weight", None) is None:
            raise NotFound(f"{self.router.path} has no matrix of its own")
        chosen_by: ChosenBy = self.chosen_by()
        if chosen_by == "probabilities" and self._corrected():
            chosen_by = "corrected probabilities"
        returns: tuple[RouterElement, ...] = CHOICE if self.chosen is None else ("logits",)
        returns = ("every weight", "logits") if self.in_batches else returns
        margin = (self._margin() or 0.0) if chosen_by == "in turn" else 0.0
        return self.declared(self.experts.path, self.router, returns, chosen_by, shared, gate, margin)

    def _shared(self) -> tuple[MLP | None, ModuleCall | None]:
        """The expert that every token is sent to, and the gate behind it."""
        total = self.part.out[1].value.double().flatten()
        put_out = self.experts.left[0].value.double()
        routed = (put_out.unflatten(0, (self.num_experts, -1)).sum(0) if self.in_batches else put_out).flatten()
        if self._is_sum(total, [routed]):
            return None, None
        others = [
            call for call in self.recording.calls
            if self.owner.holds(call) and call is not self.owner and not self.experts.holds(call)
            and not self.router.holds(call) and call.left
        ]  # fmt: skip
        gates = [call for call in others if call.is_linear and call.left[0].value.shape[-1] == 1]
        for call in others:
            y = call.left[0].value
            if y.numel() != total.numel() or call.is_leaf:
                continue
            for gate in (None, *gates):
                value = y.flatten(0, -2).double()
                if gate is not None:
                    value = value * gate.left[0].value.flatten(0, -2).double().sigmoid()
                if self._is_sum(total, [routed, value.flatten()]):
                    shared, found = self.mlp_of(call, self.owner.path)
                    self.d_shared, self.act_fn = found.d_mlp, self.act_fn or found.act_fn
                    return shared, gate
        raise NotFound("what it puts out is not the sum of its experts and of one that all tokens are sent to")

    def _is_sum(self, total: Tensor, terms: list[Tensor]) -> bool:
        """Whether terms add up, each with a factor, which is kept."""
        if any(term.shape != total.shape for term in terms):
            return False
        columns = torch.stack(terms, 1)
        weights = torch.linalg.lstsq(columns, total[:, None]).solution[:, 0]
        if not agree(columns @ weights, total, self.part.out[1].value) or bool((weights.abs() < NEGLIGIBLE).any()):
            return False
        first, *second = map(rounded, weights.tolist())
        self.factors = (first, second[0] if second else 1.0)
        return True

    def _activation(self) -> str | None:
        """The name of the activation function of experts that are kept in one parameter for all."""
        for call in self.recording.calls:
            if not self.experts.holds(call) or call.entered is None or not call.is_leaf or not call.left:
                continue
            x, y = call.entered.value, call.left[0].value
            for name in activations(self.config) if x.shape == y.shape and y.numel() else ():
                if agree(ACT2FN[name](x), y, each=True):
                    return name
        return None
