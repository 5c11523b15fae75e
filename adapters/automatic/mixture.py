"""Router, experts and shared expert of a recorded mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from adapters.automatic.feed_forward import ACTIVATIONS, FoundMLP
from adapters.automatic.layouts import relative
from adapters.automatic.norms import tolerance
from adapters.automatic.parts import FoundPart
from adapters.automatic.recording import ModuleCall, NotFound, Recording
from adapters.feed_forward import MLP, MoE


def experts_of(part: FoundPart, recording: Recording) -> ModuleCall | None:
    """The call of the module that keeps a mixture's experts, as transformers does; None where there is none."""
    inside = recording.between(part.start, part.producer.end)
    for call in inside:
        weights = [getattr(call.module, name, None) for name in ("gate_up_proj", "down_proj")]
        if all(isinstance(weight, Tensor) and weight.ndim == 3 for weight in weights):
            return call
    return None


class FoundMixture:
    """Finds out what a mixture of experts is made of.

    Args:
        part: the part.
        recording: the run.
        block: the path of its block.
        experts: the call of its experts.

    Attributes:
        num_experts, experts_per_token, d_expert: its sizes.
        d_shared: the width of its shared expert, None where it has none.
        act_fn: the name of the activation function, None where it has none that is known.

    Raises:
        NotFound: it cannot be declared as a mixture.
    """

    def __init__(self, part: FoundPart, recording: Recording, block: str, experts: ModuleCall) -> None:
        self.part, self.recording, self.block, self.experts = part, recording, block, experts
        missing = [
            name for name in ("is_transposed", "is_concatenated", "has_bias") if not hasattr(experts.module, name)
        ]
        if missing:
            raise NotFound(f"{experts.path} does not say how its experts lie ({', '.join(missing)})")
        down = experts.module.down_proj
        assert isinstance(down, Tensor)
        self.num_experts = len(down)
        self.d_expert = down.shape[1 if experts.module.is_transposed else 2]
        self.router = self._router()
        self.experts_per_token = self.router.output(1).value.shape[-1]
        self.owner = self._owner()
        self.d_shared: int | None = None
        self.factors = (1.0, 1.0)
        self.act_fn = self._activation()

    def _router(self) -> ModuleCall:
        """What chooses: it returns logits, and weights and indices of the chosen ones."""
        for call in self.recording.between(self.part.start, self.part.producer.end):
            given = [tuple(seen.value.shape) for seen in call.left]
            if call.end <= self.experts.start and call.n_left == 3 and call.indices == [2] and len(given) == 2:
                (rows, experts), (others, chosen) = given[0][-2:], given[1][-2:]
                if rows == others and experts == self.num_experts and chosen <= experts:
                    return call
        raise NotFound(
            f"no module before {self.experts.path} returns logits, weights and indices of the chosen experts"
        )

    def _owner(self) -> ModuleCall:
        around = [
            call for call in self.recording.calls
            if call.holds(self.router) and call.holds(self.experts) and call.path.startswith(self.block + ".")
        ]  # fmt: skip
        if not around:
            raise NotFound("no module stands around its router and its experts")
        return min(around, key=lambda call: call.end - call.start)

    def chosen_by(self) -> Literal["probabilities", "logits", "scores"]:
        """What the router compares the experts by."""
        inside = [s for s in self.recording.softmaxes if self.router.start < s.time < self.router.end]
        choice = [time for time in self.recording.choices if self.router.start < time < self.router.end]
        if not inside:
            return "scores"
        first = inside[0]
        if first.scores.shape[-1] == self.num_experts and (not choice or first.time < choice[0]):
            return "probabilities"
        if len(inside) == 1 and first.scores.shape[-1] == self.experts_per_token and choice and first.time > choice[0]:
            return "logits"
        raise NotFound(f"{self.router.path} computes softmaxes of {[tuple(s.scores.shape) for s in inside]}")

    def _corrected(self) -> bool:
        """Whether the chosen experts are others than those of the largest logits."""
        if (
            self.chosen_by() == "scores"
        ):  # in groups, or with a term for each expert, which may not show in a few tokens
            return True
        logits = self.router.output(0).value.flatten(0, -2)
        best = logits.topk(self.experts_per_token).values
        routed = self.router.indices_seen.flatten(0, -2)
        chosen = logits.gather(-1, routed.long()).sort(-1, descending=True).values
        return not torch.equal(best, chosen)

    def declare(self) -> MoE:
        """The declaration.

        Raises:
            NotFound: what is added is not what its experts and its shared expert put out.
        """
        owner = self.owner.path
        shared, gate = self._shared()
        linear = [call for call in self.recording.calls if self.router.holds(call) and call.is_linear]
        if not linear and getattr(self.router.module, "weight", None) is None:
            raise NotFound(f"{self.router.path} has no matrix of its own")
        out, seen = self.part.out
        return MoE(
            relative(owner, self.block),
            router=relative(self.router.path, owner),
            experts=relative(self.experts.path, owner),
            chosen_by=self.chosen_by(),
            router_matrix=relative(linear[0].path, self.router.path) if linear and linear[0] is not self.router else "",
            corrected=self._corrected(),
            factor=self.factors[0],
            shared=shared,
            shared_factor=self.factors[1],
            shared_gate=None if gate is None else relative(gate.path, owner),
            out=None if out is self.owner else relative(out.path, self.block),
            out_key=seen.key,
        )

    def _shared(self) -> tuple[MLP | None, ModuleCall | None]:
        """The expert that every token is sent to, and the gate behind it."""
        total = self.part.out[1].value.double().flatten()
        routed = self.experts.left[0].value.double().flatten()
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
                    return self._mlp(call), gate
        raise NotFound("what it puts out is not the sum of its experts and of one that all tokens are sent to")

    def _is_sum(self, total: Tensor, terms: list[Tensor]) -> bool:
        """Whether terms add up, each with a factor, which is kept."""
        if any(term.shape != total.shape for term in terms):
            return False
        columns = torch.stack(terms, 1)
        weights = torch.linalg.lstsq(columns, total[:, None]).solution[:, 0]
        close = 10 * tolerance(self.part.out[1].value) * float(total.abs().max())
        if not bool(((columns @ weights - total).abs() <= close).all()) or bool((weights.abs() < 1e-3).any()):
            return False
        first, *second = (float(f"{weight:.5g}") for weight in weights.tolist())
        self.factors = (first, second[0] if second else 1.0)
        return True

    def _mlp(self, call: ModuleCall) -> MLP:
        inside = [c for c in self.recording.calls if call.holds(c) and c.is_linear]
        last = [c for c in inside if c.left[0].mark == call.left[0].mark]
        if not last:
            raise NotFound(f"what {call.path} puts out is not what a linear layer of it does")
        matrices = [c for c in inside if c is not last[-1]]
        seen = call.left[0]
        part = FoundPart(call, (call, seen), last[-1], None, None, matrices, [], self.part.reads, call.start)
        found = FoundMLP(part, self.owner.path)
        declared = found.declare()
        self.d_shared = found.d_mlp
        return replace(declared, d_mlp=None)

    def _activation(self) -> str | None:
        for call in self.recording.calls:
            if not self.experts.holds(call) or call.entered is None or not call.is_leaf or not call.left:
                continue
            x, y = call.entered.value, call.left[0].value
            for name in ACTIVATIONS:
                if x.shape == y.shape and torch.allclose(ACT2FN[name](x), y, rtol=1e-3, atol=tolerance(y)):
                    return name
        return None
