"""The parts of a model that weight processing changes: its norms with the matrices that read them,
and the matrices and biases that write to the residual stream.

Matrices are views of the model's own parameters, in HookedTransformer's orientation: writing to one
changes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar, cast

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

# --------------------------------------------------------------------------------------------------
# Parameters that are sharded over processes: gathered while a transform writes to them, then
# sharded again.
# --------------------------------------------------------------------------------------------------


def held_here(parameter: Tensor) -> Tensor:
    """Return this process's part of a parameter; all of it if it is not sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def is_spread(model: nn.Module) -> bool:
    """Tell whether the model's parameters are sharded over processes."""
    has_shards = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return has_shards or is_sharded(model)


def is_sharded(model: nn.Module) -> bool:
    """Tell whether FSDP2 manages the parameters; it cannot manage new ones."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


@contextmanager
def put_together(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gather the parameters of modules, and write their new values to the shards on exit. All
    processes must call this.

    A bias that a layer gets meanwhile is sharded like its weight.

    Args:
        model: the model that contains the modules.
        modules: the modules; their submodules are included.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP2 drops parameters that it gathered for a run, including values written to them.
            module.reshard()
    sharded = _sharded_parameters(modules)
    gathered: dict[nn.Parameter, nn.Parameter] = {}
    with torch.no_grad():
        for module, parameters in sharded.items():
            for name, parameter in parameters.items():
                if not isinstance(parameter, DTensor):
                    continue
                if parameter not in gathered:
                    full = parameter.full_tensor()
                    gathered[parameter] = nn.Parameter(full, parameter.requires_grad)
                module._parameters[name] = gathered[parameter]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, full in gathered.items():
                assert isinstance(parameter, DTensor)
                shard = _shard(full.detach(), parameter, parameter.placements)
                parameter.to_local().copy_(shard)
            for module, parameters in sharded.items():
                _restore_shards(module, parameters)


def _sharded_parameters(
    modules: Sequence[nn.Module],
) -> dict[nn.Module, dict[str, nn.Parameter | None]]:
    """Return the parameters of each module, or submodule, that has sharded ones."""
    sharded = {}
    for outer in modules:
        for module in outer.modules():
            parameters = module._parameters
            if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
                sharded[module] = dict(parameters)
    return sharded


def _restore_shards(module: nn.Module, parameters: dict[str, nn.Parameter | None]) -> None:
    """Put a module's sharded parameters back, and shard a bias that it got meanwhile."""
    bias = module._parameters.get("bias")
    module._parameters.update(parameters)
    weight = parameters.get("weight")
    is_new = bias is not None and parameters.get("bias") is None
    if not is_new or not isinstance(weight, DTensor):
        return
    placements: list[Placement] = []
    for placement in weight.placements:
        placements.append(Shard(0) if placement == Shard(0) else Replicate())
    sharded_bias = DTensor.from_local(
        _shard(bias.detach(), weight, placements),
        weight.device_mesh,
        placements,
        run_check=False,
        shape=bias.shape,
        stride=(1,),
    )
    module._parameters["bias"] = nn.Parameter(sharded_bias, bias.requires_grad)


def _shard(full: Tensor, like: DTensor, placements: Sequence[Placement]) -> Tensor:
    """Return this process's part of a tensor, sharded over the processes of a parameter."""
    return distribute_tensor(full, like.device_mesh, placements, src_data_rank=None).to_local()


Get = Callable[[], Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class NormReader:
    """Matrix that reads a norm.

    Attributes:
        name: its canonical name.
        weight: a function that returns it, ``[*heads d_model out]``.
        bias: a function that returns the bias after it, ``[*heads out]``: a view if `holder` has
            one. None if it cannot have one.
        holder: the path of the module that has the bias.
    """

    name: str
    weight: Get
    bias: Get | None
    holder: str


@dataclass(frozen=True)
class NormWithReaders:
    """Norm with all of its readers.

    Attributes:
        name, path, kind: its canonical name, its path and its computation.
        readers: the matrices that read it.
        gated: whether they belong to a gated MLP, where HookedTransformer has no bias for the gate.
    """

    name: str
    path: str
    kind: NormKind
    readers: tuple[NormReader, ...]
    gated: bool = False


class _PlacedStep(NamedTuple):
    """Residual step with its place in the model.

    Attributes:
        block, path: its block's canonical prefix and path.
        named: the step.
    """

    block: str
    path: str
    named: NamedStep

    @property
    def part(self) -> Part:
        """Return the declaration of its part."""
        return self.named.step.part

    @property
    def name(self) -> str:
        """Return the canonical name of its part."""
        return f"{self.block}.{self.named.name}"

    def inside(self, *paths: str) -> str:
        """Return the path of a module of its part.

        Args:
            paths: the module's path in the part, in pieces.
        """
        return join(self.path, self.part.path, *paths)


class ProcessedParts:
    """Parts of a model that are processed.

    Args:
        weights: the canonical weights.

    Attributes:
        norms: the norms before attention, MLP and unembedding.
        writers: the matrices and biases that write to the residual stream, ``[*rows d_model]``, by
            canonical name.
        stack: the blocks.
        unembed: the path of the output layer.
        spread: whether the model is sharded over processes.
        piece: the number of elements processed at a time: a small part of the model that fits in
            processor caches.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights, self.getters, self.cfg = weights, weights.getters, weights.cfg
        self.architecture = weights.architecture
        self.stack = weights.architecture.stack
        self.unembed = "." + weights.architecture.readout.path
        self.core = cast(PreTrainedModel, weights.core_model)
        self.spread = is_spread(self.core)
        self.piece = max(4096, min(self.cfg.n_params // 64, 1 << 17))

    @cached_property
    def norms(self) -> list[NormWithReaders]:
        """Return the norms; see the class."""
        return list(self._norms())

    @cached_property
    def writers(self) -> dict[str, Get]:
        """Return the writers; see the class."""
        return {name: self.get(name) for name in self._writers()}

    @property
    def attn(self) -> Attention:
        """Return the attention that all blocks share, as folding value biases and refactoring
        require (see `limits.py`).
        """
        attn = self.stack.attn
        assert attn
        return attn

    @property
    def shifted(self) -> bool:
        """Tell whether position embeddings are added to the input of queries and keys after the
        norm.
        """
        return any(attn.qk_shift for block in self.stack.every_block for attn in block.attentions)

    @property
    def blocks(self) -> Iterator[tuple[str, str]]:
        """Yield each block's canonical prefix and its path."""
        for i in range(self.cfg.n_layers):
            yield f"blocks.{i}", self.stack.place_of(i)

    @property
    def steps(self) -> Iterator[_PlacedStep]:
        """Yield each residual step."""
        for i, (block, path) in enumerate(self.blocks):
            for named in self.stack.block_at(i).named:
                yield _PlacedStep(block, path, named)

    @property
    def final_norm(self) -> Norm | None:
        """Return the norm before the unembedding; None if no module computes one."""
        norm = self.stack.final_norm
        return norm if norm and not (norm.kind.identity or norm.kind.function) else None

    def by_place(self, named: Iterable[tuple[str, T]]) -> list[tuple[str, list[T]]]:
        """Group consecutive items by block; items outside of blocks get the place "" (see
        `around`).

        Args:
            named: the items, each with its canonical name.
        """
        groups: list[tuple[str, list[T]]] = []
        for name, item in named:
            place = ""
            if name.startswith("blocks."):
                place = ".".join(name.split(".")[:2])
            if not groups or groups[-1][0] != place:
                groups.append((place, []))
            groups[-1][1].append(item)
        return groups

    def around(self, place: str) -> AbstractContextManager[None]:
        """Return a context manager that gathers the parameters of a place for writing, if the model
        is sharded.

        Args:
            place: a block's canonical prefix; "": the modules outside of blocks.
        """
        if not self.spread:
            return nullcontext()
        paths = [dict(self.blocks)[place]] if place else self._ends
        return put_together(self.core, [self.weights.module(path) for path in paths])

    @property
    def _ends(self) -> list[str]:
        """Return the paths of the modules outside of blocks."""
        embedding = self.architecture.embedding
        ends = [embedding.tokens, embedding.positions]
        for norm in (embedding.norm, self.stack.final_norm):
            if norm and not norm.kind.function:
                ends.append(norm.path)
        ends.append(self.unembed)
        return [path for path in ends if path and self.weights.has(path)]

    def find(self, prefix: str, name: str) -> str:
        """Return the name of a weight, with an underscore for grouped keys and values."""
        grouped = f"{prefix}._{name}"
        return grouped if grouped in self.getters else f"{prefix}.{name}"

    def get(self, name: str) -> Get:
        """Return a function that returns a weight, ``[*rows d_in d_out]``. The output layer's is
        the stored matrix, without the factors that `W_U` includes.
        """
        if name == "unembed.W_U" and self.architecture.readout.factor != 1:
            return lambda: self.weights.matrix(self.unembed)
        if name == "unembed.b_U":
            return self.weights.bias(self.unembed, lambda: (self.cfg.d_vocab_out,))
        get = self.getters[name]
        # Routers and experts are oriented as linear layers.
        return (lambda: get().mT) if name.endswith(".weight") else get

    def _reader(self, prefix: str, suffix: str, path: str) -> NormReader:
        """Return the reader with the weight ``W_{suffix}`` and the bias ``b_{suffix}``."""
        name = self.find(prefix, f"W_{suffix}")
        bias = self.get(self.find(prefix, f"b_{suffix}"))
        return NormReader(name, self.get(name), bias, path)

    def _norms(self) -> Iterator[NormWithReaders]:
        for step in self.steps:
            norm, part = step.named.step.pre, step.part
            if norm and step.named.leads and not norm.kind.identity:
                yield self._norm_before(step, norm)
            if isinstance(part, MLP) and part.ln:
                reader = self._reader(step.name, "out", step.inside(part.down))
                path = step.inside(part.ln.path)
                yield NormWithReaders(f"{step.name}.ln", path, part.ln.kind, (reader,))
        final = self.final_norm
        if final and "unembed.W_U" in self.getters:
            reader = self._reader("unembed", "U", self.unembed)
            yield NormWithReaders("ln_final", final.path, final.kind, (reader,))

    def _norm_before(self, step: _PlacedStep, norm: Norm) -> NormWithReaders:
        """Return the norm of a step, with the readers of all steps that share it."""
        steps = [step]
        if step.named.shared:
            for other in self.steps:
                if other.block == step.block and other.named.name in step.named.shared:
                    steps.append(other)
        readers: list[NormReader] = []
        gated = False
        for sharing in steps:
            part = sharing.part
            readers += self._readers(sharing)
            gated = gated or (isinstance(part, MLP) and part.gate is not None)
        name = f"{step.block}.{step.named.norm}"
        path = join(step.path, norm.path)
        return NormWithReaders(name, path, norm.kind, tuple(readers), gated)

    def _readers(self, step: _PlacedStep) -> Iterator[NormReader]:
        """Yield the matrices of a step that read its norm."""
        part = step.part
        if isinstance(part, Attention):
            for letter, projection in part.projections.items():
                path = step.inside(projection.path)
                yield self._reader(step.name, letter.upper(), path)
        elif isinstance(part, MoE):
            for name in self._router_and_experts(step.name, part):
                yield NormReader(name, self.get(name), None, "")
        for prefix, inside, mlp in _feed_forward(step):
            yield self._reader(prefix, "in", join(inside, mlp.up.path))
            if mlp.gate:
                name = f"{prefix}.W_gate"
                yield NormReader(name, self.get(name), None, join(inside, mlp.gate.path))

    def _router_and_experts(self, prefix: str, part: MoE) -> Iterator[str]:
        """Yield the names of the matrices of a mixture of experts that read its norm."""
        yield f"{prefix}.W_gate.weight"
        for expert in range(self.cfg.num_experts or 0):
            for kind in ("W_gate", "W_in"):
                name = f"{prefix}.experts.{expert}.{kind}.weight"
                if name in self.getters:  # experts without a gate have no W_gate
                    yield name
        if part.shared_gate:
            yield f"{prefix}.shared_expert_gate.weight"

    def _writers(self) -> Iterator[str]:
        """Yield the names of the writers."""
        for name in ("embed.W_E", "pos_embed.W_pos"):
            if name in self.getters:
                yield name
        for step in self.steps:
            part = step.part
            if isinstance(part, Attention):
                yield from self._output(step.name, "O", step.inside(part.o))
            elif isinstance(part, MoE):
                yield from self._outputs_of_experts(step.name)
            for prefix, inside, mlp in _feed_forward(step):
                yield from self._output(prefix, "out", join(inside, mlp.down))

    def _output(self, prefix: str, suffix: str, path: str) -> Iterator[str]:
        """Yield the names of an output projection's matrix, and of its bias if it has one."""
        yield f"{prefix}.W_{suffix}"
        if self.has_bias(path):
            yield f"{prefix}.b_{suffix}"

    def _outputs_of_experts(self, prefix: str) -> Iterator[str]:
        """Yield the names of all experts' output matrices and biases."""
        for expert in range(self.cfg.num_experts or 0):
            out = f"{prefix}.experts.{expert}.W_out"
            yield f"{out}.weight"
            if f"{out}.bias" in self.getters:
                yield f"{out}.bias"

    def projection(self, path: str, letter: str) -> str:
        """Return the path of the projection that computes a block's queries (Q), keys (K), values
        (V) or output (O).
        """
        attn = self.attn
        inside = {"Q": attn.q.path, "K": attn.k.path, "V": attn.v.path, "O": attn.o}
        return join(path, attn.path, inside[letter])

    def value_places(self, path: str) -> Tensor:
        """Return the indices of the value biases in the bias of a block's value projection,
        ``[kv_heads d_head]``.
        """
        view = self.attn.v.view or Heads(self.cfg.n_kv_heads)
        weight = weight_in_out(self.weights.module(self.projection(path, "V")))
        assert weight is not None
        return view.get(torch.arange(weight.shape[1], device="cpu"), NO_CALL)

    def has_bias(self, path: str) -> bool:
        """Tell whether the module at a path has a bias."""
        return getattr(self.weights.module(path), "bias", None) is not None

    def affine(self, norm: NormWithReaders) -> tuple[Tensor | None, Tensor | None]:
        """Return a norm's factor and its bias, in the dtype of the computation."""
        weight, bias = norm_parameters(self.weights.module(norm.path))
        factor = None if weight is None else precise(weight) + norm.kind.added
        return factor, None if bias is None else precise(bias)

    def is_plain(self, norm: NormWithReaders) -> bool:
        """Tell whether a norm multiplies by ones and adds zeros."""
        factor, bias = self.affine(norm)
        if factor is not None and not bool((factor == 1).all()):
            return False
        return bias is None or not bool(bias.any())

    def undeclared(self) -> list[str]:
        """Return the parameters that the adapter does not declare: they may read or write the
        changed parameters.
        """
        weights = self.weights
        paths = self._ends
        declared = {id(self.architecture.readout.bias_of(self.core))}
        for step in self.steps:
            part = step.part
            paths += [join(step.path, norm.path) for norm in step.named.step.norms]
            paths += [step.inside(path) for path in part.submodules.values()]
            if isinstance(part, Attention) and part.sinks:
                declared.add(id(getattr(weights.module(step.inside()), part.sinks)))
        for path in paths:
            declared.update(map(id, weights.module(path).parameters()))
        parameters = weights.model.named_parameters()
        return [name for name, parameter in parameters if id(parameter) not in declared]


def _feed_forward(step: _PlacedStep) -> Iterator[tuple[str, str, MLP]]:
    """Yield a step's MLP or shared expert: its canonical name, its path and its declaration."""
    part = step.part
    if isinstance(part, MLP):
        yield step.name, step.inside(), part
    elif isinstance(part, MoE) and part.shared:
        yield f"{step.name}.shared_expert", step.inside(part.shared.path), part.shared


def precise(x: Tensor) -> Tensor:
    """Convert to the dtype of the computation: float64; float32 for half precision, and on devices
    without float64.
    """
    half = x.dtype in (torch.float16, torch.bfloat16)
    return x.to(torch.float32 if half or x.device.type == "mps" else torch.float64)


def norm_parameters(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight and the bias of a norm."""
    weight, bias = parameter_names(module)
    return getattr(module, weight, None), getattr(module, bias, None)


def ensure_bias(module: nn.Module) -> None:
    """Give a linear layer a bias of zeros if it has none.

    Raises:
        TypeError: it is not a `torch.nn.Linear`.
    """
    if getattr(module, "bias", None) is not None:
        return
    if not is_linear(module):
        raise TypeError(f"a {type(module).__name__} cannot be given a bias, only a Linear")
    weight = module.weight
    zeros = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
    module.bias = nn.Parameter(zeros, requires_grad=weight.requires_grad)
