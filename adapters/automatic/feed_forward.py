"""Gate, up and down of a recorded feed-forward part, by its elementwise gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from adapters.attention import Gate, Projection
from adapters.automatic.norms import neurons_view, relative, rounded
from adapters.automatic.parts import FoundPart, Norms
from adapters.config import act_fn_name, first
from adapters.feed_forward import (
    CHOICE,
    MLP,
    ChosenBy,
    Layers,
    MoE,
    RouterElement,
    activated,
    are_modules,
    first_projection,
    has_gate,
    in_batches,
    layers_of,
    router_matrix,
    sent_to,
    stacked,
    width,
)
from adapters.linear import materialized
from adapters.norms import Norm
from adapters.observe.gradients import gradient_of
from adapters.observe.observe import BorderTensor, ModuleCall, NotFound, Recording, elements_of, tightest
from adapters.observe.recognised import NEGLIGIBLE, agree, factor_of, results_by_token, weights_in_sum
from adapters.points import join, members_of
from adapters.views import times

#: The activation functions whose names are known, with HookedTransformer's first.
ACTIVATIONS = (
    "silu", "gelu", "gelu_new", "relu", "relu2", "gelu_pytorch_tanh", "quick_gelu", "gelu_fast", "tanh", "sigmoid",
)  # fmt: skip


def activations(config: PreTrainedConfig) -> tuple[str, ...]:
    """The activation functions to try: of several that compute the same, the first is the one, as the model says it.

    Args:
        config: the model's.
    """
    said = first(config, "hidden_act", "hidden_activation", "activation_function")
    return (*((said,) if isinstance(said, str) and said in ACT2FN else ()), *ACTIVATIONS)


#: What a shared expert may go through.
GATE = Gate(Projection(""), "sigmoid")
#: A projection, and which of its columns are one for each neuron.
Found = tuple[ModuleCall, tuple[int, ...]]


class FoundMLP:
    """Finds out what a feed-forward part is made of.

    Args:
        part: the part.
        block: the path of its block.
        config: the model's, which names an activation function: of several that compute the same, it is the one.
        norms: the norms of its block.
        given: what the block is given, by the names of its arguments.
        said: the activation function of the layers before it: another is declared as the module that computes it.

    Attributes:
        d_mlp: how many neurons it has.
        norm: the call of a norm between the neurons and the last layer, None where there is none.
        act_fn: the name of its activation function, None where it has none that is known.

    Raises:
        NotFound: it cannot be declared as an MLP.
    """

    def __init__(
        self,
        part: FoundPart,
        block: str,
        config: PreTrainedConfig,
        norms: Norms,
        given: Mapping[str, Tensor],
        said: str | None = None,
    ) -> None:
        self.part, self.block, self.config, self.given, self.said = part, block, config, given, said
        self.names = activations(config)
        if hasattr(config, "swiglu_limit") and hasattr(config, "swiglu_alpha"):
            self.names += ("clamped_swiglu",)
        if not part.producer.is_linear or part.producer.entered is None:
            raise NotFound(f"{part.producer.path}, which puts out its result, is no linear layer")
        self.post: BorderTensor = part.producer.entered
        behind = [norm for norm in norms if norm in part.inside and norm.returned.mark == self.post.mark]
        self.norms, self.norm = norms, behind[-1] if behind else None
        if self.norm is not None and self.norm.entered is not None:
            self.post = self.norm.entered
        self.d_mlp = self.post.value.shape[-1]
        self.act_fn: str | None = None
        self.linear: list[Found] = []
        self.activated: list[Found] = []
        for call in part.calls:
            self._look_at(call)

    def _look_at(self, call: ModuleCall) -> None:
        """Whether each neuron is made from one column of a projection, or of each of its parts, and how."""
        if len(call.left) != 1:
            return
        made, post = call.returned.live, self.post.live
        if made.shape[:-1] != post.shape[:-1] or made.shape[-1] < self.d_mlp or not post.requires_grad:
            return
        row = (0,) * (post.ndim - 2) + (2,)
        neurons = torch.arange(self.d_mlp, device=post.device)
        weights = 1 + (neurons % 7)
        gradient = gradient_of((post[row] * weights).sum(), made)
        if gradient is None:
            return
        elsewhere = gradient.clone()
        elsewhere[row] = 0
        if bool(elsewhere.any()):
            return
        # Others of its columns may be queries, keys and values (PaLM).
        own = (
            list(range(made.shape[-1]))
            if made.shape[-1] % self.d_mlp == 0
            else gradient[row].nonzero().flatten().tolist()
        )
        for way in _ways(len(own), self.d_mlp) if len(own) % self.d_mlp == 0 else ():
            index = tuple(own[column] for column in way)
            columns = list(index)
            if not self._is_elementwise(made, row, columns, gradient[row]):
                continue
            derivative = gradient[row][_at(index)] / weights
            value = made.detach()[row][_at(index)]
            at = self.post.value[row]
            is_linear = agree(derivative * value, at)
            (self.linear if is_linear else self.activated).append((call, index))

    def _is_elementwise(self, made: Tensor, row: tuple[int, ...], columns: list[int], gradient: Tensor) -> bool:
        """Whether some neurons, alone, each reach back to their own column, and to no other of this part."""
        live = gradient[_at(columns)].nonzero().flatten().tolist()
        if len(live) < 2:
            return False
        others = set(columns)
        for neuron in (live[0], live[len(live) // 2]):
            post = self.post.live[row][neuron]
            one = gradient_of(post, made)
            if one is None or {c for c in one[row].nonzero().flatten().tolist() if c in others} != {columns[neuron]}:
                return False
        return True

    def declare(self) -> MLP:
        """The declaration.

        Raises:
            NotFound: gate and up could not be told apart, or were not found.
        """
        linear, activated = self.linear, self.activated
        if not bool(self.post.value.any()):
            path = self.part.producer.path
            raise NotFound(f"{path} is given zeros alone, as where a kernel is missing: nothing tells what makes them")
        reach = linear + activated
        if len(reach) not in (1, 2):
            raise NotFound(f"{len(reach)} projections reach its neurons one by one, not one or two")
        gate: Found | None
        if len(reach) == 1:
            gate, up = None, reach[0]
        elif len(linear) == 1:
            gate, up = activated[0], linear[0]
        elif len(linear) == 2:  # a ReLU's derivative is the step that it is multiplied with
            gate, up = self._by_zeros(linear)
        else:
            gate, up = self._by_trying(activated)
        self.act_fn = self._activation(gate, up)
        factor = None if self.act_fn else self._factor(gate, up)
        self.act_fn = self.act_fn if factor is None else self._activation(gate, up, factor)
        given = None if self.act_fn or gate or self.part.owner else self._times_an_argument(up)
        activation: str | float | None = factor if self.act_fn else self._activation_module(gate, up)
        if self.said and self.act_fn and act_fn_name(self.act_fn) != self.said:
            self.act_fn, other = None, self.act_fn
            activation = self._activation_module(gate, up)
            if activation is None:
                raise NotFound(f"its activation function is {other}, and that of the layers before it {self.said}")
        owner = self.part.owner.path if self.part.owner else self.block
        if self.part.owner is None and gate and gate[0].path != up[0].path and self.part.pre is None:
            raise NotFound("its layers stand in the block itself, and two of them read the stream")
        return MLP(
            relative(owner, self.block),
            up=replace(_projection(up, owner), width=self.d_mlp),
            down=relative(self.part.producer.path, owner),
            gate=gate and _projection(gate, owner),
            ln=None if self.norm is None else Norm(relative(self.norm.path, owner), self.norms[self.norm]),
            flat=self.post.value.ndim == 2,
            activation=activation,
            given=given,
        )

    def _by_zeros(self, two: list[Found]) -> tuple[Found, Found]:
        """Of two, the one whose negative values put the neuron out is the gate."""
        for gate, up in (two, two[::-1]):
            if bool(((self.post.value == 0) == (_values(gate) <= 0)).all()):
                return gate, up
        raise NotFound("which of its two projections is the gate cannot be told")

    def _by_trying(self, two: list[Found]) -> tuple[Found, Found]:
        """Of two, neither of which enters the product as it is, the gate of a function of both."""
        for gate, up in (two, two[::-1]):
            if self._activation(gate, up) is not None:
                return gate, up
        raise NotFound("neither of its two projections enters the product as it is")

    def _activation_module(self, gate: Found | None, up: Found) -> str | None:
        """The module that computes the activation function."""
        owner = self.part.owner
        before, other = _values(gate or up), _values(up) if gate else 1.0
        for each in self.part.inside if owner else ():
            made = each.returned.value if each.left and each.entered and each.is_leaf else None
            if made is None or each.entered is None or not torch.equal(each.entered.value, before):
                continue
            if owner and agree(made * other, self.post.value, each=True):
                return relative(each.path, owner.path)
        return None

    def _times_an_argument(self, up: Found) -> str | None:
        """The argument of the block that the activated neurons are multiplied with."""
        for name, other in self.given.items():
            if other.shape == self.post.value.shape:
                self.act_fn = _act_fn(self.names, _values(up), other.detach(), self.post.value, self.config)
                if self.act_fn:
                    return name
        return None

    def _factor(self, gate: Found | None, up: Found) -> float | None:
        """What enters the module of the activation function is multiplied with before (Falcon-H1)."""
        owner, before = self.part.owner, _values(gate or up).double()
        if owner is None or any(p.numel() == 1 for p in owner.module.parameters()):
            return None  # training may change it
        for each in self.part.inside:
            entered = each.entered.value if each.entered and each.is_leaf and not each.is_linear else None
            if entered is not None and entered.shape == before.shape:
                factor = factor_of(entered, before)
                if agree(factor * before, entered.double(), each=True):
                    return rounded(factor)
        return None

    def _activation(self, gate: Found | None, up: Found, factor: float = 1.0) -> str | None:
        """The name of the activation function."""
        before, other = _values(gate or up) * factor, _values(up) if gate else None
        return _act_fn(self.names, before, other, self.post.value, self.config)


def _act_fn(
    names: Sequence[str], x: Tensor, other: Tensor | None, seen: Tensor, config: PreTrainedConfig
) -> str | None:
    """The name of the activation function that makes, with another factor or without, what was seen."""
    made = ((name, activated(name, x, other, config)) for name in names)
    return next((name for name, y in made if y is not None and agree(y, seen, each=True)), None)


def _values(found: Found) -> Tensor:
    """What a projection makes of each neuron."""
    return found[0].returned.value[..., _at(found[1])]


def _at(index: Sequence[int]) -> Tensor:
    """Columns, as an index: torch looks at a list number by number."""
    return torch.tensor(index)


def _ways(width: int, d_mlp: int) -> list[tuple[int, ...]]:
    """The columns that a part of a projection may have: one part after the other, or neuron by neuron."""
    n = width // d_mlp
    after = [tuple(range(i * d_mlp, (i + 1) * d_mlp)) for i in range(n)]
    return after + ([tuple(range(i, width, n)) for i in range(n)] if n > 1 else [])


def _projection(found: Found, owner: str) -> Projection:
    call, index = found
    return Projection(relative(call.path, owner), neurons_view(index, call.returned.value.shape[-1]))


# ----------------------------------------------------------------------------------------------------------------------
# Router, experts and shared expert of a recorded mixture.
# ----------------------------------------------------------------------------------------------------------------------


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


_NO_SUM = "what it puts out is not the sum of its experts and of one that all tokens are sent to"


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
        last = [c for c in inside if c.returned.mark == call.returned.mark]
        if not last:
            raise NotFound(f"what {call.path} puts out is not what a linear layer of it does")
        matrices = [c for c in inside if c is not last[-1]]
        of_call = FoundPart(call, call, call.returned, last[-1], None, None, matrices, [], self.part.reads, call.start)
        found = FoundMLP(of_call, base, self.config, {}, {})
        mlp = found.declare()
        return replace(mlp, up=replace(mlp.up, width=None)), found

    def beside(self, known: Sequence[ModuleCall]) -> tuple[list[ModuleCall], list[ModuleCall]]:
        """What may be an expert that all tokens are sent to, and what may be its gate: not inside of known modules."""
        inside = self.recording.between(self.owner.start, self.owner.end)
        others = [call for call in inside if call.left and not any(each.holds(call) for each in known)]
        size, gates = self.part.added.value.numel(), [call for call in others if call.is_linear]
        return (
            [call for call in others if not call.is_leaf and call.returned.value.numel() == size],
            [call for call in gates if call.returned.value.shape[-1] == 1],
        )

    def declared(
        self, experts: str, router: ModuleCall, returns: tuple[RouterElement, ...], chosen_by: ChosenBy,
        shared: MLP | None, gate: ModuleCall | None, margin: float = 0.0,
    ) -> MoE:  # fmt: skip
        """The declaration; its arguments are what `MoE` says, with paths from the model."""
        owner = self.owner.path
        gates = () if gate is None else (replace(GATE, projection=Projection(relative(gate.path, owner))),)
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
            flat=self.part.added.value.ndim == 2,
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
        else:
            every = stacked(experts.module)
            self.num_experts = len(every["W_out"] if every else materialized(experts.module, "down_proj"))
            if not every:
                self._look_how_they_lie()
            self.d_expert, self.act_fn = width(experts.module), self._activation()
        self.router = self._router()
        #: The router returns logits alone, and what is chosen is seen where the experts are given it.
        self.chosen = experts.given.get("top_k_index") if self.router.n_left == 1 else None
        if self.in_batches:
            self.experts_per_token = int((self.router.element(0).value != 0).sum(-1).max())
        else:
            chosen = self.router.element(1).value if self.chosen is None else self.chosen
            self.experts_per_token = chosen.shape[-1]
        self.owner = self._owner()

    def _look_how_they_lie(self) -> None:
        """Whether every expert is given every token; if not, their module has to say how they lie.

        Raises:
            NotFound: it does not.
        """
        experts, flags = self.experts, ("is_transposed", "is_concatenated", "has_bias")
        entered = () if experts.entered is None else experts.entered.value.shape
        self.in_batches = in_batches(experts.module) and entered[:1] == (self.num_experts * self._rows(),)
        missing = [name for name in flags if not hasattr(experts.module, name)]
        if missing and not self.in_batches:
            raise NotFound(f"{experts.path} does not say how its experts lie ({', '.join(missing)})")

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
        logits = call.returned.value
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
        most = max(ran, key=lambda call: len(call.returned.value), default=None)
        if most is None or len(most.returned.value) < 3:
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

    def _weights(self, tried: MoE) -> tuple[Tensor, Tensor]:
        """The weights of the chosen experts, as a noun makes them of the logits, and as the router returned them."""
        logits, weights = (self.router.element(key).value.flatten(0, -2).double() for key in (0, 1))
        chosen = self.router.indices_seen.flatten(0, -2).long()
        return tried.shares(logits, sent_to(chosen, self.num_experts)).gather(-1, chosen), weights

    def _margin(self) -> float | None:
        """How close others have to come to experts that are chosen in turn: one of the router's own numbers."""
        for margin in [each for each in vars(self.router.module).values() if isinstance(each, float) and each > 0]:
            both = self._weights(MoE("", "", chosen_by="in turn", margin=margin))
            if agree(*both, self.router.element(0).value):
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
        made, seen = (x / x.sum(-1, keepdim=True) for x in self._weights(MoE("", "", chosen_by="scores")))
        if not agree(seen, made, self.router.element(1).value):
            raise NotFound(f"{self.router.path} weighs the experts by something else than a softmax or sigmoids")

    def _corrected(self) -> bool:
        """Whether the chosen experts are others than those of the largest logits."""
        routed = (self.router.indices_seen if self.chosen is None else self.chosen).flatten(0, -2)
        best = MoE("", "").best(self.router.returned.value.flatten(0, -2), self.experts_per_token)
        return not torch.equal(best, sent_to(routed, self.num_experts))

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
        total = self.part.added.value.double().flatten()
        put_out = self.experts.returned.value.double()
        routed = (put_out.unflatten(0, (self.num_experts, -1)).sum(0) if self.in_batches else put_out).flatten()
        if self._is_sum(total, [routed]):
            return None, None
        others, gates = self.beside([self.experts, self.router])
        for call in others:
            for gate in (None, *gates):
                value = call.returned.value.flatten(0, -2).double()
                if gate is not None:
                    value = GATE.of(value, gate.returned.value.flatten(0, -2))
                if self._is_sum(total, [routed, value.flatten()]):
                    shared, found = self.mlp_of(call, self.owner.path)
                    self.d_shared, self.act_fn = found.d_mlp, self.act_fn or found.act_fn
                    return shared, gate
        raise NotFound(_NO_SUM)

    def _is_sum(self, total: Tensor, terms: list[Tensor]) -> bool:
        """Whether terms add up, each with a factor, which is kept."""
        if any(term.shape != total.shape for term in terms):
            return False
        columns = torch.stack(terms, 1)
        weights = torch.linalg.lstsq(columns, total[:, None]).solution[:, 0]
        if not agree(columns @ weights, total, self.part.added.value) or bool((weights.abs() < NEGLIGIBLE).any()):
            return False
        first, *second = map(rounded, weights.tolist())
        self.factors = (first, second[0] if second else 1.0)
        return True

    def _activation(self) -> str | None:
        """The name of the activation function of experts that are kept in one parameter for all."""
        for call in self.recording.calls:
            if not self.experts.holds(call) or call.entered is None or not call.is_leaf or not call.left:
                continue
            x, y = call.entered.value, call.returned.value
            if (
                x.shape == y.shape
                and y.numel()
                and (name := _act_fn(activations(self.config), x, None, y, self.config))
            ):
                return name
        return None


# ----------------------------------------------------------------------------------------------------------------------
# A mixture whose experts are modules of a list that a forward loops over, as in most remote code.
# ----------------------------------------------------------------------------------------------------------------------


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
            rows, made = call.entered.value.flatten(0, -2), call.returned.value.flatten(0, -2)
            if rows.shape != made.shape or rows.shape[-1] != self.tokens.shape[-1]:
                raise NotFound(f"{call.path} is given rows of {rows.shape[-1]} numbers, and returns {made.shape[-1]}")
            given[e].append((rows, made))
        return results_by_token(self.tokens, given)

    def _look_into_an_expert(self) -> None:
        """The layers of the expert that was given most tokens."""
        ran = [call for calls in self.calls for call in calls]
        most = max(ran, key=lambda call: call.returned.value.numel())
        mlp, found = self.mlp_of(most)
        if mlp.up.view is not None or (mlp.gate is not None and mlp.gate.view is not None):
            raise NotFound(f"a layer of {most.path} makes gate and up at once")
        self.gated, self.d_expert, self.act_fn = mlp.gate is not None, found.d_mlp, found.act_fn
        own: Layers = (mlp.gate.path if mlp.gate else "", mlp.up.path, mlp.down)
        self.layers = None if layers_of(most.module) == own else own  # as it is without being said

    def _router(self) -> tuple[ModuleCall, Tensor]:
        """What makes the logits of the experts from the tokens by a matrix, and these, ``[token, expert]``."""
        for call in self.recording.between(self.owner.start, self.owner.end):
            if call.entered is None or any(each.holds(call) for calls in self.calls for each in calls):
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
                factor = rounded(factor_of(of_chosen, rows.double()))
                if not agree(rows.double() * factor, of_chosen, x):
                    raise NotFound(f"{router.path} returns other weights than those that its experts are added with")
                self.factors = (factor, self.factors[1])
                found.append("weights")
            else:
                found.append("")
        return tuple(found)

    def _chosen_by(self, chooses: ModuleCall, logits: Tensor, weights: Tensor) -> ChosenBy:
        """What the experts are compared by: see `MoE.chosen_by`."""

        def weighed(by: ChosenBy) -> bool:
            both = weights * self.sent, noun(by).shares(logits, self.sent)
            seen, made = (x / x.sum(1, keepdim=True) for x in both)
            return agree(seen, made, self.part.added.value)

        def noun(by: ChosenBy) -> MoE:
            return MoE("", "", chosen_by=by)

        softmaxes = [s for s in self.recording.softmaxes_between(chooses.start, chooses.end) if s.scores.ndim > 1]
        own = [
            s for s in softmaxes if not any(each.start < s.time < each.end for calls in self.calls for each in calls)
        ]
        choice = [time for time in self.recording.choices if chooses.start < time < chooses.end]
        if not own:
            if weighed("scores"):
                return "scores"
        elif weighed("logits"):
            scores = own[0].scores.detach().flatten(0, -2).double()
            if scores.shape == logits.shape and agree(scores, logits, own[0].scores):
                best = noun("probabilities").best(logits, self.experts_per_token)
                return "probabilities" if torch.equal(best, self.sent) else "corrected probabilities"
            if choice and own[0].time > choice[0]:
                return "logits"
        raise NotFound(f"{chooses.path} weighs the experts by something else than a softmax or sigmoids")

    def _sum(self) -> tuple[Tensor, MLP | None, ModuleCall | None]:
        """What each expert's result is multiplied with, ``[token, expert]``; the shared expert, and its gate."""
        total = self.part.added.value.flatten(0, -2).double()
        if total.shape != self.tokens.shape:
            raise NotFound(f"{self.owner.path} puts out {total.shape[-1]} numbers for a token")
        if (weights := self._weights(total, [])) is not None:
            return weights[:, : self.num_experts], None, None
        others, gates = self.beside([call for calls in self.calls for call in calls])
        for call in others:
            made = call.returned.value.flatten(0, -2).double()
            weights = self._weights(total, [made])
            if weights is None:
                continue
            for gate in (None, *gates):
                factors = weights[:, -1]
                if gate is not None:
                    factors = factors / GATE.of(torch.ones_like(factors), gate.returned.value.flatten())
                factor = rounded(float(factors.mean()))
                if agree(factors, torch.full_like(factors, factor), call.returned.value):
                    shared, found = self.mlp_of(call, self.owner.path)
                    self.d_shared, self.factors = found.d_mlp, (self.factors[0], factor)
                    return weights[:, : self.num_experts], shared, gate
        raise NotFound(_NO_SUM)

    def _weights(self, total: Tensor, others: Sequence[Tensor]) -> Tensor | None:
        """What the experts' results, and others, are multiplied with; None where their sum is something else."""
        return weights_in_sum(total, self.results, others, self.part.added.value)
