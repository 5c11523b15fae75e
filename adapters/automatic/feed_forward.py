"""Infer gate, up and down projections of a recorded feed-forward part from its gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

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
from adapters.observe.observe import (
    BorderTensor,
    ModuleCall,
    NotFound,
    Recording,
    Softmax,
    elements_of,
    tightest,
)
from adapters.observe.recognised import (
    NEGLIGIBLE,
    agree,
    factor_of,
    results_by_token,
    weights_in_sum,
)
from adapters.points import join, members_of
from adapters.views import Affine, times

#: Known activation functions, HookedTransformer's first.
ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_new",
    "relu",
    "relu2",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "gelu_fast",
    "tanh",
    "sigmoid",
)


def activations(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the activation functions to try, in order. If several compute the same, the first
    match wins, so the function that the configuration names comes first.

    Args:
        config: the model's configuration.
    """
    configured = first(config, "hidden_act", "hidden_activation", "activation_function")
    if isinstance(configured, str) and configured in ACT2FN:
        return (configured, *ACTIVATIONS)
    return ACTIVATIONS


#: The gate that may scale a shared expert's output.
GATE = Gate(Projection(""), "sigmoid")


class _NeuronColumns(NamedTuple):
    """A projection, and its columns, one for each neuron."""

    call: ModuleCall
    columns: tuple[int, ...]

    @property
    def values(self) -> Tensor:
        """Return the projection's output for each neuron."""
        return self.call.value[..., _index(self.columns)]

    def declared(self, owner: str) -> Projection:
        """Return the declaration, with its path from a module around it."""
        view = neurons_view(self.columns, self.call.value.shape[-1])
        return Projection(relative(self.call.path, owner), view)


class FoundMLP:
    """Inferred structure of a feed-forward part.

    Args:
        part: the part.
        block: the path of its block.
        config: the model's configuration. The activation function that it names is preferred to
            others that compute the same.
        norms: the norms of its block.
        block_inputs: the block's inputs, by argument name.
        usual: the activation function of the earlier layers. A different one is declared by the
            module that computes it.

    Attributes:
        d_mlp: the number of neurons.
        norm: the call of a norm between the neurons and the last layer, or None.
        act_fn: the name of its activation function; None if it is not a known one.

    Raises:
        NotFound: it cannot be declared as an MLP.
    """

    def __init__(
        self,
        part: FoundPart,
        block: str,
        config: PreTrainedConfig,
        norms: Norms,
        block_inputs: Mapping[str, Tensor],
        usual: str | None = None,
    ) -> None:
        self.part = part
        self.block = block
        self.config = config
        self.norms = norms
        self.block_inputs = block_inputs
        self.usual = usual
        self.names = activations(config)
        if hasattr(config, "swiglu_limit") and hasattr(config, "swiglu_alpha"):
            self.names += ("clamped_swiglu",)
        producer = part.producer
        if not producer.is_linear or producer.entered is None:
            raise NotFound(f"{producer.path}, which computes its result, is not a linear layer")
        self.post: BorderTensor = producer.entered
        self.norm: ModuleCall | None = None
        for norm in norms:
            if norm in part.inside and norm.returned.mark == producer.entered.mark:
                self.norm = norm
        if self.norm is not None and self.norm.entered is not None:
            self.post = self.norm.entered
        self.d_mlp = self.post.value.shape[-1]
        #: The row of neurons that is looked at.
        self.row = (0,) * (self.post.value.ndim - 2) + (2,)
        self.act_fn: str | None = None
        #: The projections that the neurons are linear in, and the others.
        self.linear: list[_NeuronColumns] = []
        self.activated: list[_NeuronColumns] = []
        for call in part.calls:
            self._look_at(call)

    def _look_at(self, call: ModuleCall) -> None:
        """Record how the neurons depend on a projection: each neuron reads one column of it, or one
        column of each of its parts.
        """
        if len(call.outputs) != 1:
            return
        output = call.returned.live
        gradient = self._gradient(output)
        if gradient is None:
            return
        # Other columns of the projection may be queries, keys and values (PaLM).
        width = output.shape[-1]
        own = list(range(width))
        if width % self.d_mlp:
            own = gradient.nonzero().flatten().tolist()
        for order in _orders(len(own), self.d_mlp):
            columns = tuple(own[column] for column in order)
            if not self._is_elementwise(output, columns, gradient):
                continue
            derivative = gradient[_index(columns)] / self._neuron_weights()
            value = output.detach()[self.row][_index(columns)]
            projection = _NeuronColumns(call, columns)
            if agree(derivative * value, self.post.value[self.row]):
                self.linear.append(projection)
            else:
                self.activated.append(projection)

    def _neuron_weights(self) -> Tensor:
        """Return the weights of the neurons whose sum is differentiated."""
        return 1 + torch.arange(self.d_mlp, device=self.post.live.device) % 7

    def _gradient(self, output: Tensor) -> Tensor | None:
        """Return the gradient of one row's neurons with respect to that row of a projection's
        output; None if they do not depend on it, or also depend on other rows.
        """
        post = self.post.live
        if output.shape[:-1] != post.shape[:-1] or output.shape[-1] < self.d_mlp:
            return None
        if not post.requires_grad:
            return None
        gradient = gradient_of((post[self.row] * self._neuron_weights()).sum(), output)
        if gradient is None:
            return None
        elsewhere = gradient.clone()
        elsewhere[self.row] = 0
        return None if bool(elsewhere.any()) else gradient[self.row]

    def _is_elementwise(self, output: Tensor, columns: tuple[int, ...], gradient: Tensor) -> bool:
        """Tell whether each of a sample of neurons depends on its own column only, among the
        columns of this part.
        """
        live = gradient[_index(columns)].nonzero().flatten().tolist()
        if len(live) < 2:
            return False
        for neuron in (live[0], live[len(live) // 2]):
            own = gradient_of(self.post.live[self.row][neuron], output)
            if own is None:
                return False
            reached = own[self.row][_index(columns)].nonzero().flatten().tolist()
            if reached != [neuron]:
                return False
        return True

    def declare(self) -> MLP:
        """Return the declaration.

        Raises:
            NotFound: gate and up were not found, or cannot be distinguished.
        """
        part = self.part
        if not bool(self.post.value.any()):
            raise NotFound(
                f"{part.producer.path} is given zeros alone, as where a kernel is missing: nothing"
                " tells what makes them"
            )
        gate, up = self._gate_and_up()
        activation, block_input = self._activation(gate, up)
        owner = part.owner.path if part.owner else self.block
        if part.owner is None and part.pre is None and gate and gate.call.path != up.call.path:
            raise NotFound("its layers stand in the block itself, and two of them read the stream")
        norm = None
        if self.norm is not None:
            norm = Norm(relative(self.norm.path, owner), self.norms[self.norm])
        return MLP(
            relative(owner, self.block),
            up=replace(up.declared(owner), width=self.d_mlp),
            down=relative(part.producer.path, owner),
            gate=gate and gate.declared(owner),
            ln=norm,
            flat=self.post.value.ndim == 2,
            activation=activation,
            given=block_input,
        )

    def _gate_and_up(self) -> tuple[_NeuronColumns | None, _NeuronColumns]:
        """Return the gate, if there is one, and the up projection."""
        projections = self.linear + self.activated
        if len(projections) == 1:
            return None, projections[0]
        if len(projections) != 2:
            raise NotFound(
                f"{len(projections)} projections reach its neurons one by one, not one or two"
            )
        if len(self.linear) == 1:
            return self.activated[0], self.linear[0]
        if self.activated:
            return self._by_trying()
        return self._by_zeros()

    def _by_zeros(self) -> tuple[_NeuronColumns, _NeuronColumns]:
        """Return gate and up. The gate is the projection whose negative values zero the neuron.

        For ReLU, grad * x == relu(x): the gate looks linear too.
        """
        zero = self.post.value == 0
        for gate, up in (self.linear, self.linear[::-1]):
            if torch.equal(zero, gate.values <= 0):
                return gate, up
        raise NotFound("which of its two projections is the gate cannot be told")

    def _by_trying(self) -> tuple[_NeuronColumns, _NeuronColumns]:
        """Return gate and up by trying both orders, where neither projection is a plain factor of
        the product.
        """
        for gate, up in (self.activated, self.activated[::-1]):
            if self._function(gate, up) is not None:
                return gate, up
        raise NotFound("neither of its two projections enters the product as it is")

    def _activation(
        self, gate: _NeuronColumns | None, up: _NeuronColumns
    ) -> tuple[str | float | None, str | None]:
        """Find the activation function.

        Returns:
            The factor of its input, or the module that computes it, if one is declared; and the
            block argument that multiplies the activated neurons, or None.
        """
        activation: str | float | None = None
        block_input = None
        self.act_fn = self._function(gate, up)
        if self.act_fn is None and (factor := self._factor(gate, up)) is not None:
            self.act_fn = self._function(gate, up, factor)
            activation = factor
        if self.act_fn is None:
            if gate is None and self.part.owner is None:
                block_input = self._times_an_argument(up)
            activation = None if self.act_fn else self._activation_module(gate, up)
        if self.usual and self.act_fn and act_fn_name(self.act_fn) != self.usual:
            activation = self._activation_module(gate, up)
            if activation is None:
                raise NotFound(
                    f"its activation function is {self.act_fn}, and that of the layers before it"
                    f" {self.usual}"
                )
            self.act_fn = None
        return activation, block_input

    def _activation_module(self, gate: _NeuronColumns | None, up: _NeuronColumns) -> str | None:
        """Return the path of the module that computes the activation function, or None."""
        owner = self.part.owner
        if owner is None:
            return None
        before = (gate or up).values
        other = up.values if gate else 1.0
        for call in self.part.inside:
            x = call.entered_value
            if x is None:
                continue
            if not call.outputs:
                continue
            if not call.is_leaf:
                continue
            if not torch.equal(x, before):
                continue
            if agree(call.value * other, self.post.value, each=True):
                return relative(call.path, owner.path)
        return None

    def _times_an_argument(self, up: _NeuronColumns) -> str | None:
        """Return the name of the block argument that multiplies the activated neurons, or None."""
        post = self.post.value
        for name, x in self.block_inputs.items():
            if x.shape == post.shape:
                self.act_fn = _act_fn(self.names, up.values, x.detach(), post, self.config)
                if self.act_fn:
                    return name
        return None

    def _factor(self, gate: _NeuronColumns | None, up: _NeuronColumns) -> float | None:
        """Return the factor by which the activation module's input is multiplied (Falcon-H1), or
        None.
        """
        owner = self.part.owner
        before = (gate or up).values.double()
        if owner is None or any(p.numel() == 1 for p in owner.module.parameters()):
            return None  # a scalar parameter: training may change the factor
        for call in self.part.inside:
            x = call.entered_value
            if x is None:
                continue
            if not call.is_leaf:
                continue
            if call.is_linear:
                continue
            if x.shape != before.shape:
                continue
            factor = factor_of(x, before)
            if agree(factor * before, x.double(), each=True):
                return rounded(factor)
        return None

    def _function(
        self, gate: _NeuronColumns | None, up: _NeuronColumns, factor: float = 1.0
    ) -> str | None:
        """Return the name of the activation function, or None."""
        before = (gate or up).values * factor
        other = up.values if gate else None
        return _act_fn(self.names, before, other, self.post.value, self.config)


def _act_fn(
    names: Sequence[str],
    x: Tensor,
    other: Tensor | None,
    recorded: Tensor,
    config: PreTrainedConfig,
) -> str | None:
    """Return the name of the activation function that reproduces the recorded values from `x`,
    multiplied by `other` if it is not None; None if no function does.
    """
    for name in names:
        y = activated(name, x, other, config)
        if y is not None and agree(y, recorded, each=True):
            return name
    return None


def _index(columns: Sequence[int]) -> Tensor:
    """Return columns as an index tensor: torch converts a list number by number, which is slow."""
    return torch.tensor(columns, device="cpu")


def _orders(width: int, d_mlp: int) -> Iterator[range]:
    """Yield the candidate columns for each part of a projection: parts concatenated, or interleaved
    neuron by neuron.
    """
    n = width // d_mlp
    if width % d_mlp:
        return
    for start in range(0, width, d_mlp):
        yield range(start, start + d_mlp)
    for start in range(n if n > 1 else 0):
        yield range(start, width, n)


# --------------------------------------------------------------------------------------------------
# Router, experts and shared expert of a recorded mixture.
# --------------------------------------------------------------------------------------------------


def experts_of(part: FoundPart, recording: Recording) -> ModuleCall | None:
    """Return the call of the module that holds a mixture's experts; None if there is none.

    The module stacks all experts in two parameters, as in transformers, or is a list of modules
    that defines a forward.
    """
    for call in recording.between(part.start, part.producer.end):
        module = call.module
        if are_modules(module) and any(True for _ in module.children()):
            return call
        if stacked(module):
            return call
        weights = (getattr(module, name, None) for name in (first_projection(module), "down_proj"))
        if all(isinstance(weight, Tensor) and weight.ndim == 3 for weight in weights):
            return call
    return None


_NO_SUM = "its output is not the sum of its experts and of one that all tokens are sent to"


class _FoundExperts:
    """Inferred structure of a mixture of experts, for any storage of the experts.

    Args:
        part: the part.
        recording: the run.
        block: the path of its block.
        config: the model's configuration.

    Attributes:
        num_experts, experts_per_token, d_expert: its sizes.
        gated: whether its experts have a gate.
        d_shared: the width of its shared expert; None if there is none.
        act_fn: the name of the activation function; None if it is not a known one.
    """

    owner: ModuleCall
    num_experts: int
    experts_per_token: int
    gated: bool

    def __init__(
        self, part: FoundPart, recording: Recording, block: str, config: PreTrainedConfig
    ) -> None:
        self.part = part
        self.recording = recording
        self.block = block
        self.config = config
        self.layers: Layers | None = None
        self.d_expert: int | None = None
        self.d_shared: int | None = None
        self.act_fn: str | None = None
        #: Factors of the experts' sum, and of the shared expert's output.
        self.factors: tuple[float, float] = (1.0, 1.0)

    def mlp_of(self, call: ModuleCall, base: str = "") -> tuple[MLP, FoundMLP]:
        """Return the MLP declaration of a module of the mixture, with its path from `base`, and the
        `FoundMLP` behind it.

        Raises:
            NotFound: the module is not an MLP.
        """
        linear = [other for other in self.recording.inside(call) if other.is_linear]
        last = [other for other in linear if other.returned.mark == call.returned.mark]
        if not last:
            raise NotFound(f"what {call.path} returns is not what a linear layer of it returns")
        part = FoundPart(
            owner=call,
            out=call,
            added=call.returned,
            producer=last[-1],
            calls=[other for other in linear if other is not last[-1]],
            softmaxes=[],
            reads=self.part.reads,
            start=call.start,
        )
        mlp = FoundMLP(part, base, self.config, {}, {})
        declared = mlp.declare()
        return replace(declared, up=replace(declared.up, width=None)), mlp

    def with_shared(
        self, known: Sequence[ModuleCall], results: Tensor
    ) -> tuple[Tensor, MLP | None, ModuleCall | None]:
        """Explain the output as a sum of the experts' outputs and of a shared expert, which
        receives every token.

        Args:
            known: the modules of the experts and the router.
            results: the experts' outputs, ``[token, expert, d_model]``, zero where they did not
                receive the token.

        Returns:
            The weight of each expert's output, ``[token, expert]``, the shared expert, and its
            gate.

        Raises:
            NotFound: the output is not such a sum.
        """
        output = self.part.added.value
        total = output.flatten(0, -2).double()
        if total.shape != results[:, 0].shape:
            raise NotFound(f"{self.owner.path} returns {total.shape[-1]} numbers for a token")
        weights = weights_in_sum(total, results, [], output)
        if weights is not None:
            return weights, None, None
        others, gates = self._beside(known)
        for call in others:
            shared = call.value.flatten(0, -2).double()
            weights = weights_in_sum(total, results, [shared], output)
            if weights is None:
                continue
            for gate in (None, *gates):
                factor = _constant(_ungated(weights[:, -1], gate), call.value)
                if factor is not None:
                    declared, mlp = self.mlp_of(call, self.owner.path)
                    self.d_shared = mlp.d_mlp
                    self.act_fn = self.act_fn or mlp.act_fn
                    self.factors = (self.factors[0], factor)
                    return weights[:, :-1], declared, gate
        raise NotFound(_NO_SUM)

    def _beside(self, known: Sequence[ModuleCall]) -> tuple[list[ModuleCall], list[ModuleCall]]:
        """Return candidates for the shared expert and candidates for its gate, outside of known
        modules.
        """
        size = self.part.added.value.numel()
        others: list[ModuleCall] = []
        gates: list[ModuleCall] = []
        for call in self.recording.between(self.owner.start, self.owner.end):
            if not call.outputs or any(other.holds(call) for other in known):
                continue
            if call.is_linear and call.value.shape[-1] == 1:
                gates.append(call)
            if not call.is_leaf and call.value.numel() == size:
                others.append(call)
        return others, gates

    def declared(
        self,
        experts: str,
        router: ModuleCall,
        returns: tuple[RouterElement, ...],
        chosen_by: ChosenBy,
        shared: MLP | None,
        gate: ModuleCall | None,
        margin: float = 0.0,
    ) -> MoE:
        """Return the declaration; the arguments are those of `MoE`, with paths from the model."""
        owner = self.owner.path
        shared_transform: tuple[Gate | Affine, ...] = times(self.factors[1])
        if gate is not None:
            projection = Projection(relative(gate.path, owner))
            shared_transform = (replace(GATE, projection=projection), *shared_transform)
        return MoE(
            relative(owner, self.block),
            router=relative(router.path, owner),
            experts=relative(experts, owner),
            chosen_by=chosen_by,
            margin=margin,
            router_returns=returns,
            factor=self.factors[0],
            shared=shared,
            shared_transform=shared_transform,
            layers=self.layers,
            flat=self.part.added.value.ndim == 2,
        )


def _ungated(factors: Tensor, gate: ModuleCall | None) -> Tensor:
    """Return the weights of a shared expert in the sum, divided by its gate."""
    if gate is None:
        return factors
    return factors / GATE.of(torch.ones_like(factors), gate.value.flatten())


def _constant(factors: Tensor, like: Tensor) -> float | None:
    """Return the common value of all factors; None if they differ, or are zero."""
    factor = rounded(float(factors.mean()))
    if abs(factor) < NEGLIGIBLE:
        return None
    if not agree(factors, torch.full_like(factors, factor), like):
        return None
    return factor


class FoundMixture(_FoundExperts):
    """Inferred structure of a mixture with one experts module.

    Args:
        part, recording, block, config: as for `_FoundExperts`.
        experts: the call of its experts.

    Raises:
        NotFound: it cannot be declared as a mixture.
    """

    def __init__(
        self,
        part: FoundPart,
        recording: Recording,
        block: str,
        experts: ModuleCall,
        config: PreTrainedConfig,
    ) -> None:
        super().__init__(part, recording, block, config)
        module = experts.module
        self.experts = experts
        self.in_batches = False
        self.gated = has_gate(module)
        if are_modules(module):
            self.num_experts = len(members_of(module))
            self._look_into_an_expert()
        else:
            stacks = stacked(module)
            matrices = stacks["W_out"] if stacks else materialized(module, "down_proj")
            self.num_experts = len(matrices)
            if not stacks:
                self._look_how_they_lie()
            self.d_expert = width(module)
            self.act_fn = self._activation()
        self.router = self._router()
        #: If the router returns only logits, the chosen experts are read from the input of the
        #: experts module.
        self.chosen: Tensor | None = None
        if self.router.n_outputs == 1:
            self.chosen = experts.named_tensors.get("top_k_index")
        if self.in_batches:
            self.experts_per_token = int((self.router.element(0).value != 0).sum(-1).max())
        else:
            chosen = self.router.element(1).value if self.chosen is None else self.chosen
            self.experts_per_token = chosen.shape[-1]
        self.owner = self._owner()

    def _look_how_they_lie(self) -> None:
        """Check whether every expert receives every token; if not, the module must describe the
        layout of its weights.

        Raises:
            NotFound: the module does not describe it.
        """
        module = self.experts.module
        rows = self.experts.entered_value
        n_rows = self.num_experts * self._rows()
        self.in_batches = in_batches(module) and rows is not None and len(rows) == n_rows
        flags = ("is_transposed", "is_concatenated", "has_bias")
        missing = [name for name in flags if not hasattr(module, name)]
        if missing and not self.in_batches:
            raise NotFound(
                f"{self.experts.path} does not say how its experts lie ({', '.join(missing)})"
            )

    def _rows(self) -> int:
        """Return the number of tokens in the part's input."""
        return self.recording.batch * self.recording.pos

    def _router(self) -> ModuleCall:
        """Return the call of the router, which outputs logits, and the weights and indices of the
        chosen experts.
        """
        for call in self.recording.between(self.part.start, self.part.producer.end):
            if call.end <= self.experts.start and self._chooses(call):
                return call
            if self._is_chosen_from(call):
                return call
        raise NotFound(
            f"no module before {self.experts.path} returns logits, weights and indices of the"
            " chosen experts"
        )

    def _chooses(self, call: ModuleCall) -> bool:
        """Tell whether a call returns logits, weights and indices of the chosen experts; or, if
        every expert receives every token, logits and weights of all experts.
        """
        shapes = [tuple(output.value.shape) for output in call.outputs]
        if len(shapes) != 2:
            return False
        if self.in_batches and shapes == [(self._rows(), self.num_experts)] * 2:
            return True
        places = [output.key for output in call.outputs]
        if call.n_outputs != 3:
            return False
        if call.indices is None:
            return False
        if places != [0, 1]:
            return False
        (rows, n_experts), (weight_rows, n_chosen) = shapes[0][-2:], shapes[1][-2:]
        if rows != weight_rows:
            return False
        return n_experts == self.num_experts >= n_chosen

    def _is_chosen_from(self, call: ModuleCall) -> bool:
        """Tell whether the experts were chosen by a softmax that was computed over a call's
        output."""
        arguments = self.experts.named_tensors
        is_shape = call.n_outputs == len(call.outputs) == 1
        if not is_shape:
            return False
        if not {"top_k_index", "top_k_weights"} <= arguments.keys():
            return False
        if call.value.shape != (self._rows(), self.num_experts):
            return False
        softmaxes = self.recording.softmaxes_between(call.end, self.experts.start)
        return any(torch.equal(softmax.scores.detach(), call.value) for softmax in softmaxes)

    def _look_into_an_expert(self) -> None:
        """Read the layers of the expert with the most tokens: telling gate from up takes several
        rows.
        """
        inside = self.recording.between(self.experts.start, self.experts.end)
        children = [c for c in inside if c.path.rpartition(".")[0] == self.experts.path]
        ran = [call for call in children if call.outputs]
        most = max(ran, key=lambda call: len(call.value), default=None)
        if most is None or len(most.value) < 3:
            raise NotFound(
                f"no module in {self.experts.path} was given three tokens, by which it could be"
                " known"
            )
        declared, mlp = self.mlp_of(most)
        up = declared.up
        gate = declared.gate
        if gate is not None and gate.view is None and up.view is None:
            layers = gate.path, up.path, declared.down
            self.layers = None if layers_of(most.module) == layers else layers  # None: the default
            self.d_expert = mlp.d_mlp
            self.act_fn = mlp.act_fn

    def _owner(self) -> ModuleCall:
        inside = [call for call in self.recording.calls if call.path.startswith(self.block + ".")]
        around = [call for call in inside if call.holds(self.router) and call.holds(self.experts)]
        owner = tightest(around)
        if owner is None:
            raise NotFound("no module stands around its router and its experts")
        return owner

    def _weights(self, candidate: MoE) -> tuple[Tensor, Tensor]:
        """Return the weights of the chosen experts twice: as a declaration computes them from the
        logits, and as the router returned them.
        """
        logits, weights = (self.router.element(key).value.flatten(0, -2).double() for key in (0, 1))
        assert self.router.indices is not None
        chosen = self.router.indices.flatten(0, -2).long()
        shares = candidate.shares(logits, sent_to(chosen, self.num_experts))
        return shares.gather(-1, chosen), weights

    def _margin(self) -> float | None:
        """Return the margin within which other experts compete with the experts chosen one after
        the other. Only float attributes of the router are tried; None if none fits.
        """
        logits = self.router.element(0).value
        for margin in vars(self.router.module).values():
            if isinstance(margin, float) and margin > 0:
                candidate = MoE("", "", chosen_by="in turn", margin=margin)
                if agree(*self._weights(candidate), logits):
                    return margin
        return None

    def chosen_by(self) -> Literal["probabilities", "logits", "scores", "in turn"]:
        """Return what the router compares the experts by."""
        if self.in_batches:
            return "scores"
        if self.chosen is not None:
            return "probabilities"
        router = self.router
        softmaxes = self.recording.softmaxes_between(router.start, router.end)
        choice = self.recording.first_choice(router)
        if not softmaxes:
            self._check_sigmoids()
            return "scores"
        if len(softmaxes) == self.experts_per_token and self._margin() is not None:
            return "in turn"
        softmax = softmaxes[0]
        width = softmax.scores.shape[-1]
        is_before = choice is None or softmax.time < choice
        if width == self.num_experts and is_before:
            return "probabilities"
        if len(softmaxes) == 1 and width == self.experts_per_token and not is_before:
            return "logits"
        shapes = [tuple(softmax.scores.shape) for softmax in softmaxes]
        raise NotFound(f"{router.path} computes softmaxes of {shapes}")

    def _check_sigmoids(self) -> None:
        """Check that the weights of the chosen experts are proportional to the sigmoids of their
        logits.
        """
        computed, recorded = self._weights(MoE("", "", chosen_by="scores"))
        computed = computed / computed.sum(-1, keepdim=True)
        recorded = recorded / recorded.sum(-1, keepdim=True)
        if not agree(recorded, computed, self.router.element(1).value):
            raise NotFound(
                f"{self.router.path} weighs the experts by something else than a softmax or"
                " sigmoids"
            )

    def _corrected(self) -> bool:
        """Tell whether the chosen experts differ from those with the largest logits."""
        chosen = self.router.indices if self.chosen is None else self.chosen
        assert chosen is not None
        best = MoE("", "").best(self.router.value.flatten(0, -2), self.experts_per_token)
        return not torch.equal(best, sent_to(chosen.flatten(0, -2), self.num_experts))

    def declare(self) -> MoE:
        """Return the declaration.

        Raises:
            NotFound: the output is not the sum of its experts and its shared expert.
        """
        shared, gate = self._shared()
        router = self.router
        has_matrix = any(call.is_linear for call in self.recording.inside(router))
        if not has_matrix and getattr(router.module, "weight", None) is None:
            raise NotFound(f"{router.path} has no matrix of its own")
        chosen_by: ChosenBy = self.chosen_by()
        if chosen_by == "probabilities" and self._corrected():
            chosen_by = "corrected probabilities"
        margin = (self._margin() or 0.0) if chosen_by == "in turn" else 0.0
        returns: tuple[RouterElement, ...] = CHOICE if self.chosen is None else ("logits",)
        if self.in_batches:
            returns = ("every weight", "logits")
        return self.declared(self.experts.path, router, returns, chosen_by, shared, gate, margin)

    def _shared(self) -> tuple[MLP | None, ModuleCall | None]:
        """Return the shared expert, which receives every token, and its gate."""
        output = self.experts.value.double()
        if self.in_batches:
            output = output.unflatten(0, (self.num_experts, -1)).sum(0)
        routed = output.flatten(0, -2).unsqueeze(1)
        weights, shared, gate = self.with_shared([self.experts, self.router], routed)
        reached = routed.squeeze(1).any(-1)
        factor = _constant(weights[reached], self.part.added.value)
        if factor is None:
            raise NotFound(_NO_SUM)
        self.factors = (factor, self.factors[1])
        return shared, gate

    def _activation(self) -> str | None:
        """Return the name of the activation function of experts stored in one stacked parameter."""
        names = activations(self.config)
        for call in self.recording.inside(self.experts):
            x = call.entered_value
            if x is None:
                continue
            if not call.is_leaf:
                continue
            if not call.outputs:
                continue
            y = call.value
            if (
                x.shape == y.shape
                and y.numel()
                and (name := _act_fn(names, x, None, y, self.config))
            ):
                return name
        return None


# --------------------------------------------------------------------------------------------------
# Mixtures whose forward loops over a list of expert modules, as in most remote code.
# --------------------------------------------------------------------------------------------------


def list_of_experts(part: FoundPart, recording: Recording) -> tuple[str, nn.ModuleList] | None:
    """Return the path of the list of a mixture's experts, and the list; None if there is none.

    The list has two or more modules of one class, whose inputs are as wide as the stream.
    """
    if part.owner is None:
        return None
    for path, module in part.owner.module.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        if len({type(member) for member in members_of(module)}) != 1:
            continue
        path = join(part.owner.path, path)
        calls = [call for i in range(len(module)) for call in recording.of(join(path, str(i)))]
        if len(calls) > 1 and all(_is_expert(call, part.owner) for call in calls):
            return path, module
    return None


def _is_expert(call: ModuleCall, owner: ModuleCall) -> bool:
    """Tell whether a call has submodules, an input and an output, and runs inside the mixture."""
    if not bool(call.entered and call.outputs):
        return False
    if call.is_leaf:
        return False
    return owner.holds(call)


class FoundExpertModules(_FoundExperts):
    """Inferred structure of a mixture whose experts are modules of a list: the rows that each
    expert receives, and the weights of their sum.

    Args:
        part, recording, block, config: as for `_FoundExperts`.
        experts: the path of the list, and the list.

    Raises:
        NotFound: it cannot be declared as a mixture.
    """

    def __init__(
        self,
        part: FoundPart,
        recording: Recording,
        block: str,
        experts: tuple[str, nn.ModuleList],
        config: PreTrainedConfig,
    ) -> None:
        super().__init__(part, recording, block, config)
        assert part.owner is not None and part.owner.entered is not None
        self.owner = part.owner
        self.path, modules = experts
        self.num_experts = len(modules)
        self.by_expert = [recording.of(join(self.path, str(e))) for e in range(self.num_experts)]
        self.calls = [call for calls in self.by_expert for call in calls]
        self.tokens = part.owner.entered.value.flatten(0, -2).double()
        self.results, self.sent = self._results()
        self.experts_per_token = int(self.sent.sum(1).max())
        self._look_into_an_expert()

    def _results(self) -> tuple[Tensor, Tensor]:
        """Return each expert's output for each token, and whether the expert received the token."""
        width = self.tokens.shape[-1]
        rows: list[list[tuple[Tensor, Tensor]]] = []
        for calls in self.by_expert:
            rows.append([])
            for call in calls:
                assert call.entered is not None
                x = call.entered.value.flatten(0, -2)
                y = call.value.flatten(0, -2)
                if x.shape != y.shape or x.shape[-1] != width:
                    raise NotFound(
                        f"{call.path} is given rows of {x.shape[-1]} numbers, and returns"
                        f" {y.shape[-1]}"
                    )
                rows[-1].append((x, y))
        return results_by_token(self.tokens, rows)

    def _look_into_an_expert(self) -> None:
        """Read the layers of the expert that received the most tokens."""
        most = max(self.calls, key=lambda call: call.value.numel())
        declared, mlp = self.mlp_of(most)
        gate = declared.gate
        up = declared.up
        if up.view is not None or (gate is not None and gate.view is not None):
            raise NotFound(f"a layer of {most.path} makes gate and up at once")
        self.gated = gate is not None
        self.d_expert = mlp.d_mlp
        self.act_fn = mlp.act_fn
        layers: Layers = (gate.path if gate else "", up.path, declared.down)
        self.layers = None if layers_of(most.module) == layers else layers  # None: the default

    def _router(self) -> tuple[ModuleCall, Tensor]:
        """Return the call that computes the experts' logits by a matrix on the tokens, and the
        logits, ``[token, expert]``.
        """
        shape = (self.num_experts, self.tokens.shape[-1])
        for call in self.recording.between(self.owner.start, self.owner.end):
            if call.entered is None:
                continue
            if any(expert.holds(call) for expert in self.calls):
                continue
            matrix = call.module.get_submodule(router_matrix(call.module))
            weight = getattr(matrix, "weight", None)
            bias = getattr(matrix, "bias", None)
            if not isinstance(weight, Tensor):
                continue
            if weight.shape != shape:
                continue
            x = call.entered.value
            if agree(x.flatten(0, -2).double(), self.tokens, x):
                bias = None if bias is None else bias.detach().double()
                logits = torch.nn.functional.linear(self.tokens, weight.detach().double(), bias)
                return call, logits
        raise NotFound(f"no module before {self.path} makes a logit for each of its experts")

    def declare(self) -> MoE:
        """Return the declaration.

        Raises:
            NotFound: the output is not the sum of its experts and its shared expert, or their
                weighting is unknown.
        """
        weights, shared, gate = self.with_shared(self.calls, self.results)
        router, logits = self._router()
        returns = self._returns(router, logits, weights)
        chooses = self.owner if returns == ("logits",) else router
        chosen_by = self._chosen_by(chooses, logits, weights)
        return self.declared(self.path, router, returns, chosen_by, shared, gate)

    def _returns(
        self, router: ModuleCall, logits: Tensor, weights: Tensor
    ) -> tuple[RouterElement, ...]:
        """Return the meaning of each element of the router's output. Weights may differ by one
        common factor, which is stored.
        """
        output = router.output
        elements = [output] if isinstance(output, Tensor) else elements_of(output)
        elements = [x.detach() for x in elements if isinstance(x, Tensor)]
        integers = (x for x in elements if not x.is_floating_point() and x.ndim > 1)
        indices = next((x.flatten(0, -2) for x in integers), None)
        names: list[RouterElement] = []
        for x in elements:
            rows = x.flatten(0, -2) if x.ndim > 1 else x
            name: RouterElement = ""
            if not x.is_floating_point():
                if indices is not None and torch.equal(rows, indices):
                    name = "indices"
            elif rows.shape == logits.shape and agree(rows.double(), logits, x):
                name = "logits"
            elif indices is not None and rows.shape == indices.shape:
                self._read_weights(router, x, weights.gather(1, indices.long()))
                name = "weights"
            names.append(name)
        return tuple(names)

    def _read_weights(self, router: ModuleCall, returned: Tensor, of_chosen: Tensor) -> None:
        """Store the factor between the weights that a router returns and those of the sum."""
        rows = returned.flatten(0, -2).double()
        factor = rounded(factor_of(of_chosen, rows))
        if not agree(rows * factor, of_chosen, returned):
            raise NotFound(
                f"{router.path} returns other weights than those with which its experts are added"
            )
        self.factors = (factor, self.factors[1])

    def _chosen_by(self, chooses: ModuleCall, logits: Tensor, weights: Tensor) -> ChosenBy:
        """Return what the experts are compared by: see `MoE.chosen_by`."""

        softmax = self._own_softmax(chooses)
        if softmax is None:
            if self._are_shares("scores", logits, weights):
                return "scores"
        elif self._are_shares("logits", logits, weights):
            scores = softmax.scores.detach().flatten(0, -2).double()
            if scores.shape == logits.shape and agree(scores, logits, softmax.scores):
                best = MoE("", "").best(logits, self.experts_per_token)
                is_best = torch.equal(best, self.sent)
                return "probabilities" if is_best else "corrected probabilities"
            choice = self.recording.first_choice(chooses)
            if choice is not None and softmax.time > choice:
                return "logits"
        raise NotFound(
            f"{chooses.path} weighs the experts by something else than a softmax or sigmoids"
        )

    def _are_shares(self, chosen_by: ChosenBy, logits: Tensor, weights: Tensor) -> bool:
        """Tell whether the weights are proportional to the shares that a declaration computes."""
        shares = MoE("", "", chosen_by=chosen_by).shares(logits, self.sent)
        weights = weights * self.sent
        weights, shares = (x / x.sum(1, keepdim=True) for x in (weights, shares))
        return agree(weights, shares, self.part.added.value)

    def _own_softmax(self, chooses: ModuleCall) -> Softmax | None:
        """Return the first softmax of a call that is not inside an expert, or None."""
        for softmax in self.recording.softmaxes_between(chooses.start, chooses.end):
            if not any(expert.start < softmax.time < expert.end for expert in self.calls):
                return softmax
        return None
