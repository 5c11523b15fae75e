"""Gate, up and down of a recorded feed-forward part, by its elementwise gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from adapters.attention import Projection
from adapters.automatic.layouts import neurons_view, relative
from adapters.automatic.parts import FoundPart, Norms
from adapters.config import act_fn_name, first
from adapters.feed_forward import MLP
from adapters.norms import Norm
from adapters.observe.activations import product
from adapters.observe.calls import BorderTensor, ModuleCall
from adapters.observe.errors import NotFound
from adapters.observe.gradients import gradient_of
from adapters.observe.tolerance import agree

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
        behind = [norm for norm in norms if norm in part.inside and norm.left[0].mark == self.post.mark]
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
        made, post = call.left[0].live, self.post.live
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
            derivative = gradient[row][columns] / weights
            value = made.detach()[row][columns]
            at = self.post.value[row]
            is_linear = agree(derivative * value, at)
            (self.linear if is_linear else self.activated).append((call, index))

    def _is_elementwise(self, made: Tensor, row: tuple[int, ...], columns: list[int], gradient: Tensor) -> bool:
        """Whether some neurons, alone, each reach back to their own column, and to no other of this part."""
        live = [n for n in range(self.d_mlp) if float(gradient[columns[n]]) != 0]
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
        linear, activated = list(self.linear), list(self.activated)
        if not bool(self.post.value.any()):
            path = self.part.producer.path
            raise NotFound(f"{path} is given zeros alone, as where a kernel is missing: nothing tells what makes them")
        if len(linear) + len(activated) not in (1, 2):
            raise NotFound(f"{len(linear) + len(activated)} projections reach its neurons one by one, not one or two")
        gate: Found | None
        if len(linear) + len(activated) == 1:
            gate, up = None, (linear + activated)[0]
        elif len(linear) == 1:
            gate, up = activated[0], linear[0]
        elif len(linear) == 2:  # a ReLU's derivative is the step that it is multiplied with
            gate, up = self._by_zeros(linear)
        else:
            gate, up = self._by_trying(activated)
        self.act_fn = self._activation(gate, up)
        given = None if self.act_fn or gate or self.part.owner else self._times_an_argument(up)
        activation = None if self.act_fn else self._activation_module(gate, up)
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
        for gate, up in ((two[0], two[1]), (two[1], two[0])):
            value = gate[0].left[0].value[..., list(gate[1])]
            if bool(((self.post.value == 0) == (value <= 0)).all()):
                return gate, up
        raise NotFound("which of its two projections is the gate cannot be told")

    def _by_trying(self, two: list[Found]) -> tuple[Found, Found]:
        """Of two, neither of which enters the product as it is, the gate of a function of both."""
        for gate, up in ((two[0], two[1]), (two[1], two[0])):
            if self._activation(gate, up) is not None:
                return gate, up
        raise NotFound("neither of its two projections enters the product as it is")

    def _activation_module(self, gate: Found | None, up: Found) -> str | None:
        """The module that computes the activation function."""
        owner = self.part.owner
        call, index = gate or up
        before, post = call.left[0].value[..., list(index)], self.post.value
        other = up[0].left[0].value[..., list(up[1])] if gate else 1.0
        for each in self.part.inside if owner else ():
            made = each.left[0].value if each.left and each.entered and each.is_leaf else None
            if made is None or each.entered is None or not torch.equal(each.entered.value, before):
                continue
            if owner and agree(made * other, post, each=True):
                return relative(each.path, owner.path)
        return None

    def _times_an_argument(self, up: Found) -> str | None:
        """The argument of the block that the activated neurons are multiplied with."""
        before, post = up[0].left[0].value[..., list(up[1])], self.post.value
        for name, other in self.given.items():
            if other.shape != post.shape:
                continue
            for act_fn in self.names:
                made = product(act_fn, before, other.detach(), self.config)
                if made is not None and agree(made, post, each=True):
                    self.act_fn = act_fn
                    return name
        return None

    def _activation(self, gate: Found | None, up: Found) -> str | None:
        """The name of the activation function."""
        call, index = gate or up
        before = call.left[0].value[..., list(index)]
        other = up[0].left[0].value[..., list(up[1])] if gate else None
        post = self.post.value
        for name in self.names:
            made = product(name, before, other, self.config)
            if made is not None and agree(made, post, each=True):
                return name
        return None


def _ways(width: int, d_mlp: int) -> list[tuple[int, ...]]:
    """The columns that a part of a projection may have: one part after the other, or neuron by neuron."""
    n = width // d_mlp
    after = [tuple(range(i * d_mlp, (i + 1) * d_mlp)) for i in range(n)]
    return after + ([tuple(range(i, width, n)) for i in range(n)] if n > 1 else [])


def _projection(found: Found, owner: str) -> Projection:
    call, index = found
    return Projection(relative(call.path, owner), neurons_view(index, call.left[0].value.shape[-1]))
