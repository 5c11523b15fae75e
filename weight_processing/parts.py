"""What weight processing works on: a model's norms with the matrices that read them, and what writes to the stream.

Matrices are views of the model's own parameters, in HookedTransformer's orientation: writing to one changes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from adapters import MLP, Attention, MoE, Weights
from adapters.architecture import NamedStep, Part
from adapters.linear import is_linear, weight_in_out
from adapters.norms import Norm, NormKind, parameter_names
from adapters.points import join
from adapters.views import Heads
from adapters.views.views import NO_CALL

# ----------------------------------------------------------------------------------------------------------------------
# Parameters that are spread over processes: put together while a transform writes to them, and cut again.
# ----------------------------------------------------------------------------------------------------------------------


def held_here(parameter: Tensor) -> Tensor:
    """What this process has of a parameter: all of it, or its part."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def is_spread(model: nn.Module) -> bool:
    """Whether processes have parts of its parameters."""
    return is_sharded(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has made a plan of the parameters, in which others have no place."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


@contextmanager
def put_together(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Puts the parameters of modules together, and writes what became of them to the parts. All processes have to ask.

    A bias that a layer is given meanwhile is spread as its weight is.

    Args:
        model: that they are of.
        modules: with those inside of them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what FSDP2 has put together for a run is dropped behind it, with what is written there
    inside = dict.fromkeys(module for each in modules for module in each.modules())
    spread = [module for module in inside if any(isinstance(p, DTensor) for p in module._parameters.values())]
    parts = {module: dict(module._parameters) for module in spread}
    together: dict[nn.Parameter, nn.Parameter] = {}
    with torch.no_grad():
        for module in spread:
            for name, part in parts[module].items():
                if isinstance(part, DTensor):
                    if part not in together:
                        together[part] = nn.Parameter(part.full_tensor(), requires_grad=part.requires_grad)
                    module._parameters[name] = together[part]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, full in together.items():
                assert isinstance(part, DTensor)
                part.to_local().copy_(_part(full.detach(), part, part.placements))
            for module in spread:
                bias = module._parameters.get("bias")
                module._parameters.update(parts[module])
                weight = module._parameters.get("weight")
                if bias is not None and parts[module].get("bias") is None and isinstance(weight, DTensor):
                    place = [Shard(0) if there == Shard(0) else Replicate() for there in weight.placements]
                    new = _part(bias.detach(), weight, place)
                    whole = DTensor.from_local(
                        new, weight.device_mesh, place, run_check=False, shape=bias.shape, stride=(1,)
                    )
                    module._parameters["bias"] = nn.Parameter(whole, requires_grad=bias.requires_grad)


def _part(full: Tensor, of: DTensor, placements: Sequence[Placement]) -> Tensor:
    """What this process has of a tensor that is cut over the processes of a parameter."""
    return distribute_tensor(full, of.device_mesh, placements, src_data_rank=None).to_local()


Get = Callable[[], Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class NormReader:
    """A matrix that reads a norm.

    Attributes:
        name: its canonical name.
        weight: gives it, ``[*heads d_model out]``.
        bias: gives the bias behind it, ``[*heads out]``; a view where `holder` has one, None where there can be none.
        holder: the path of the module that holds the bias.
    """

    name: str
    weight: Get
    bias: Get | None
    holder: str


@dataclass(frozen=True)
class NormWithReaders:
    """A norm, and all that reads it.

    Attributes:
        name, path, kind: its canonical name, its path, what it computes.
        readers: the matrices that read it.
        gated: they are those of a gated MLP, in which HookedTransformer has no place for a bias of the gate.
    """

    name: str
    path: str
    kind: NormKind
    readers: tuple[NormReader, ...]
    gated: bool = False


class ProcessedParts:
    """The parts of a model that are processed.

    Args:
        weights: the canonical weights.

    Attributes:
        norms: the norms before attention, MLP and unembedding.
        writers: for each canonical name, a matrix or bias that writes to the residual stream, ``[*rows d_model]``.
        spread: processes share the model.
        piece: how many elements are worked on at a time: few of the model's, and few enough for processor caches.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights, self.cfg, self.architecture = weights, weights.cfg, weights.architecture
        self.core = cast(PreTrainedModel, weights.core_model)
        self.spread = is_spread(self.core)
        self.piece = max(4096, min(self.cfg.n_params // 64, 1 << 17))

    @cached_property
    def norms(self) -> list[NormWithReaders]:
        """See the class."""
        return list(self._norms())

    @cached_property
    def writers(self) -> dict[str, Get]:
        """See the class."""
        return dict(self._writers())

    @property
    def attn(self) -> Attention:
        """What all blocks have, where the values' biases are folded or factors are chosen (see `limits.py`)."""
        attn = self.architecture.stack.attn
        assert attn
        return attn

    @property
    def shifted(self) -> bool:
        """Whether something is added to what queries and keys read, behind the norm."""
        blocks = self.architecture.stack.every_block
        return any(attn.qk_shift for block in blocks for attn in block.attentions)

    @property
    def blocks(self) -> Iterator[tuple[str, str]]:
        """Each block's canonical prefix and its path."""
        for i in range(self.cfg.n_layers):
            yield f"blocks.{i}", self.architecture.stack.place_of(i)

    @property
    def steps(self) -> Iterator[tuple[str, str, NamedStep]]:
        """Each residual step, with its block's canonical prefix and path."""
        for i, (name, path) in enumerate(self.blocks):
            for named in self.architecture.stack.block_at(i).named:
                yield name, path, named

    @property
    def final_kind(self) -> NormKind | None:
        """What the norm before the unembedding computes, None where there is none."""
        norm = self.architecture.stack.final_norm
        return norm.kind if norm and not (norm.kind.identity or norm.kind.function) else None

    def by_place(self, named: Iterable[tuple[str, T]]) -> list[tuple[str, list[T]]]:
        """Those of one block together, and those outside of blocks (`around`).

        Args:
            named: each with its canonical name.
        """
        groups = groupby(named, lambda each: ".".join(each[0].split(".")[:2]) if each[0].startswith("blocks.") else "")
        return [(place, [part for _, part in group]) for place, group in groups]

    def around(self, place: str) -> AbstractContextManager[None]:
        """Where processes share the model, puts the parameters of a place together for a while, to be written to.

        Args:
            place: a block's canonical prefix; "": what is outside of blocks.
        """
        if not self.spread:
            return nullcontext()
        paths = [dict(self.blocks)[place]] if place else self._ends
        return put_together(self.core, [self.weights.module(path) for path in paths])

    @property
    def _ends(self) -> list[str]:
        """The paths of what is outside of blocks."""
        a = self.architecture
        norms = [norm.path for norm in (a.embedding.norm, a.stack.final_norm) if norm and not norm.kind.function]
        ends = (a.embedding.tokens, a.embedding.positions, *norms, "." + a.readout.path)
        return [path for path in ends if path and self.weights.has(path)]

    def find(self, prefix: str, name: str) -> str:
        """The name of a weight, with the underscore of grouped keys and values where it has that."""
        full = f"{prefix}.{name}"
        return full if full in self.weights.getters else f"{prefix}._{name}"

    def get(self, name: str) -> Get:
        """What gives a weight. Of the output layer it is what is stored, without the factors that `W_U` has in it."""
        unembed = "." + self.architecture.readout.path
        if name == "unembed.W_U" and self.architecture.readout.factor != 1:
            return lambda: self.weights.matrix(unembed)
        if name == "unembed.b_U":
            return self.weights.bias(unembed, lambda: (self.cfg.d_vocab_out,))
        return self.weights.getters[name]

    def _reader(self, weight: str, bias: str, path: str) -> NormReader:
        return NormReader(weight, self.get(weight), self.get(bias), path)

    def _norms(self) -> Iterator[NormWithReaders]:
        for name, path, named in self.steps:
            if named.step.pre and named.leads and not named.step.pre.kind.identity:
                yield self._norm_before(name, path, named, named.step.pre)
            part, at = named.step.part, f"{name}.{named.name}"
            if isinstance(part, MLP) and part.ln:
                down = join(path, part.path, part.down)
                out = self._reader(f"{at}.W_out", f"{at}.b_out", down)
                yield NormWithReaders(f"{at}.ln", join(path, part.path, part.ln.path), part.ln.kind, (out,))
        final = self.architecture.stack.final_norm
        if final and self.final_kind and "unembed.W_U" in self.weights.getters:
            unembed = "." + self.architecture.readout.path
            reader = self._reader("unembed.W_U", "unembed.b_U", unembed)
            yield NormWithReaders("ln_final", final.path, self.final_kind, (reader,))

    def _norm_before(self, name: str, path: str, named: NamedStep, norm: Norm) -> NormWithReaders:
        """The norm that a step reads through, with those that share it."""
        together = [named]
        if named.shared:
            together += [other for at, _, other in self.steps if at == name and other.name in named.shared]
        readers = tuple(reader for one in together for reader in self._readers(name, path, one))
        gated = any(isinstance(one.step.part, MLP) and one.step.part.gate for one in together)
        return NormWithReaders(f"{name}.{named.norm}", join(path, norm.path), norm.kind, readers, gated)

    def _readers(self, name: str, path: str, named: NamedStep) -> Iterator[NormReader]:
        """The matrices of a step that read its norm."""
        part, at = named.step.part, f"{name}.{named.name}"
        if isinstance(part, Attention):
            for letter, projection in part.projections.items():
                weight, bias = self.find(at, f"W_{letter.upper()}"), self.find(at, f"b_{letter.upper()}")
                yield self._reader(weight, bias, join(path, part.path, projection.path))
        elif isinstance(part, MoE):
            names = [f"{at}.W_gate.weight"]
            for e in range(self.cfg.num_experts or 0):
                both = [f"{at}.experts.{e}.{kind}.weight" for kind in ("W_gate", "W_in")]
                names += [name for name in both if name in self.weights.getters]  # those without a gate have no W_gate
            if part.shared_gate:
                names.append(f"{at}.shared_expert_gate.weight")
            for weight in names:
                yield NormReader(weight, _transposed(self.get(weight)), None, "")
        for own, inside, mlp in _feed_forward(at, path, part):
            up = join(inside, mlp.up.path)
            yield self._reader(f"{own}.W_in", f"{own}.b_in", up)
            if mlp.gate:
                yield NormReader(f"{own}.W_gate", self.get(f"{own}.W_gate"), None, join(inside, mlp.gate.path))

    def _writers(self) -> Iterator[tuple[str, Get]]:
        for name in ("embed.W_E", "pos_embed.W_pos"):
            if name in self.weights.getters:
                yield name, self.weights.getters[name]
        for name, path, named in self.steps:
            part, at = named.step.part, f"{name}.{named.name}"
            if isinstance(part, Attention):
                yield from self._output(f"{at}.W_O", f"{at}.b_O", join(path, part.path, part.o))
            elif isinstance(part, MoE):
                yield from self._outputs_of_experts(at)
            for own, inside, mlp in _feed_forward(at, path, part):
                yield from self._output(f"{own}.W_out", f"{own}.b_out", join(inside, mlp.down))

    def _output(self, weight: str, bias: str, path: str) -> Iterator[tuple[str, Get]]:
        """The matrix of an output projection, and its bias where it has one."""
        yield weight, self.get(weight)
        if self.has_bias(path):
            yield bias, self.get(bias)

    def _outputs_of_experts(self, at: str) -> Iterator[tuple[str, Get]]:
        getters = self.weights.getters
        for e in range(self.cfg.num_experts or 0):
            out = f"{at}.experts.{e}.W_out"
            yield f"{out}.weight", _transposed(getters[f"{out}.weight"])
            if f"{out}.bias" in getters:
                yield f"{out}.bias", getters[f"{out}.bias"]

    def projection(self, path: str, letter: str) -> str:
        """The path of the projection that makes a block's queries (Q), keys (K), values (V) or output (O)."""
        attn = self.attn
        inside = {"Q": attn.q.path, "K": attn.k.path, "V": attn.v.path, "O": attn.o}
        return join(path, attn.path, inside[letter])

    def output(self, path: str) -> str:
        """The path of a block's output projection."""
        return self.projection(path, "O")

    def value(self, path: str) -> str:
        """The path of the projection that makes a block's values."""
        return self.projection(path, "V")

    def value_places(self, path: str) -> Tensor:
        """Where in the bias of a block's value projection those of the values stand, ``[kv_heads d_head]``."""
        view = self.attn.v.view or Heads(self.cfg.n_kv_heads)
        weight = weight_in_out(self.weights.module(self.value(path)))
        assert weight is not None
        return view.get(torch.arange(weight.shape[1], device="cpu"), NO_CALL)

    def has_bias(self, path: str) -> bool:
        return getattr(self.weights.module(path), "bias", None) is not None

    def affine(self, norm: NormWithReaders) -> tuple[Tensor | None, Tensor | None]:
        """What a norm multiplies with, and what it adds, in the type that is computed in."""
        module = self.weights.module(norm.path)
        weight, bias = (None if x is None else precise(x) for x in norm_parameters(module))
        return None if weight is None else weight + norm.kind.added, bias

    def is_plain(self, norm: NormWithReaders) -> bool:
        """Whether a norm multiplies with ones and adds zeros."""
        weight, bias = self.affine(norm)
        ones = weight is None or bool((weight == 1).all())
        return ones and (bias is None or not bool(bias.any()))

    def undeclared(self) -> list[str]:
        """Parameters of which the adapter does not say what they do: they may read or write what is to be changed."""
        a = self.architecture
        known: set[int] = set()
        paths = self._ends
        for _, path, named in self.steps:
            step, part = named.step, named.step.part
            paths += [join(path, norm.path) for norm in step.norms]
            paths += [join(path, part.path, at) for at in part.submodules.values()]
            if isinstance(part, Attention) and part.sinks:
                known.add(id(getattr(self.weights.module(join(path, part.path)), part.sinks)))
        if (bias := a.readout.bias_of(self.core)) is not None:
            known.add(id(bias))
        for path in paths:
            known.update(id(parameter) for parameter in self.weights.module(path).parameters())
        return [name for name, parameter in self.weights.model.named_parameters() if id(parameter) not in known]


def _feed_forward(at: str, path: str, part: Part) -> Iterator[tuple[str, str, MLP]]:
    """The MLP that a step has, alone or as its shared expert: its canonical name, its path, what it is."""
    if isinstance(part, MLP):
        yield at, join(path, part.path), part
    elif isinstance(part, MoE) and part.shared:
        yield f"{at}.shared_expert", join(path, part.path, part.shared.path), part.shared


def precise(x: Tensor) -> Tensor:
    """In the type that is computed in: float64, or float32 for half precision and where there is no float64."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return x.to(torch.float32 if half or x.device.type == "mps" else torch.float64)


def norm_parameters(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """The weight and the bias that a norm has."""
    weight, bias = (getattr(module, name, None) for name in parameter_names(module))
    return weight, bias


def _transposed(get: Get) -> Get:
    return lambda: get().mT


def ensure_bias(module: nn.Module) -> None:
    """Gives a linear layer a bias of zeros where it has none.

    Raises:
        TypeError: it is no `torch.nn.Linear`.
    """
    if getattr(module, "bias", None) is not None:
        return
    if not is_linear(module):
        raise TypeError(f"a {type(module).__name__} cannot be given a bias, only a Linear")
    weight = module.weight
    zeros = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
    module.bias = nn.Parameter(zeros, requires_grad=weight.requires_grad)
