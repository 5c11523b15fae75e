"""A model's own parameters under HookedTransformer's names, in its shapes and orientation.

Every stored parameter is a zero-copy view: editing it edits the model, and gradients reach the
parameter. A weight that only HookedTransformer has (a bias) is zero; one that the model computes
from its parameter (Gemma's ``1 + weight``, its scaled embeddings) is computed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapters.architecture import Architecture, Head, NamedStep, Stack
from adapters.attention import Attention, Projection
from adapters.config import ModelConfig
from adapters.feed_forward import (
    MLP,
    ExpertPart,
    MoE,
    expert_bias,
    expert_weight,
    has_bias,
    has_gate,
    has_layers,
    router_matrix,
)
from adapters.linear import (
    OpaqueLayerError,
    adapted_bias,
    materialized,
    runs_its_class,
    weight_in_out,
)
from adapters.norms import Norm, parameter_names
from adapters.points import (
    base_path,
    core_path,
    has_module,
    join,
    missing_module_message,
    module_at,
)
from adapters.tuners import holder_of_parameters, wraps_parameters
from adapters.views import Chain, Heads, View, linearly, transformed
from adapters.views.views import NO_CALL

Get = Callable[[], Tensor]
#: Functions that return tensors, by name.
Getters = dict[str, Get]
#: `transformed` or `linearly`.
Transform = Callable[[Chain, Tensor, nn.Module], Tensor]


def _what_helps(module: nn.Module) -> str:
    """Return advice for a user who needs the matrix of such a layer."""
    if hasattr(module, "base_layer"):
        return "merge adapters first (merge_and_unload)"
    weight = getattr(module, "weight", None)
    is_parameter = type(weight) is nn.Parameter and weight.is_floating_point()
    if isinstance(module, nn.Linear | Conv1D) and is_parameter:
        return (
            "its class may compute something else of it than torch's linear layer does: read it"
            " from the layer itself"
        )
    return "dequantise the model first"


class Weights:
    """The canonical weights of a model, by name.

    Args:
        architecture: the adapter's declaration.
        model: the Hugging Face model, with its wrappers.
        cfg: its configuration.
        not_offered: the excluded names.

    Attributes:
        getters: for each of HookedTransformer's state-dict names, a function that returns the
            tensor.
    """

    def __init__(
        self,
        architecture: Architecture,
        model: nn.Module,
        cfg: ModelConfig,
        not_offered: Collection[str] = (),
    ) -> None:
        self.model = model
        self.cfg = cfg
        self.architecture = architecture
        self.base = base_path(model)
        self.core = core_path(model)
        # The functions refer to a copy without this table: a reference cycle would keep the model
        # alive.
        getters = copy.copy(self)._everything()
        self.getters = {name: get for name, get in getters.items() if name not in not_offered}

    def unembedding_of(self, ids: Tensor) -> Tensor:
        """Return the columns of `W_U` for some tokens, without computing the other columns.

        Args:
            ids: the tokens' ids, of any shape.

        Returns:
            ``[*ids, d_model]``.
        """
        readout = self.architecture.readout
        matrix = self.matrix("." + readout.path)
        rows = matrix.T[ids.to(matrix.device)]
        return rows if readout.factor == 1 else rows * readout.factor

    @property
    def core_model(self) -> nn.Module:
        """Return the Hugging Face model without its wrappers."""
        return self.model.get_submodule(self.core)

    def __getitem__(self, name: str) -> Float[Tensor, "..."]:
        return _with_gradient(self.getters[name]())

    def module(self, path: str) -> nn.Module:
        """Return the module at a path from the base model; a path that begins with a dot is from
        the model itself.
        """
        path = self.full_path(path)
        try:
            return module_at(self.model, path)
        except AttributeError:
            raise RuntimeError(missing_module_message(path)) from None

    def has(self, path: str) -> bool:
        """Tell whether there is a module at such a path."""
        return has_module(self.model, self.full_path(path))

    def full_path(self, path: str) -> str:
        """Return such a path, starting from the model's wrapper."""
        if path.startswith("."):
            return join(self.core, path[1:])
        return join(self.base, path)

    # Functions that return the parameters of a module.

    def parameter(self, path: str, name: str = "weight") -> Get:
        """Return the getter of a module's own parameter."""
        return lambda: materialized(self.module(path), name)

    def matrix(self, path: str) -> Tensor:
        """Return the weight of a linear layer, ``[d_in, d_out]``.

        Raises:
            OpaqueLayerError: it is not a plain linear layer.
        """
        module = self.module(path)
        weight = weight_in_out(module)
        if weight is None:
            kind = type(getattr(module, "weight", None)).__name__
            raise OpaqueLayerError(
                f"{path} is a {type(module).__name__}, whose weight ({kind}) is not a plain matrix;"
                f" {_what_helps(module)}"
            )
        return weight

    def bias(
        self, path: str, shape: Callable[[], tuple[int, ...]], part: View | None = None
    ) -> Get:
        """Return the getter of a bias, viewed through `part`, or of zeros of this shape."""

        def get() -> Tensor:
            module = self.module(path)
            bias = materialized(module, "bias")
            like = bias
            if bias is None:
                like = torch.empty(0, dtype=self.cfg.dtype, device=self.cfg.device)
            elif not isinstance(bias, Tensor):
                raise OpaqueLayerError(
                    f"{path} is a {type(module).__name__}, which has no plain bias;"
                    f" {_what_helps(module)}"
                )
            bias = adapted_bias(module, bias, like)
            if bias is None:
                # A write in place would be lost, and is an error in memory that elements share.
                return like.new_zeros(()).expand(shape())
            return bias if part is None else part.get(bias, NO_CALL)

        return get

    def _matrix(self, path: str, projection: Projection) -> Get:
        """Return the getter of a projection's matrix, as its view shows it."""
        path = join(path, projection.path)
        view = projection.view
        if view is None:
            return partial(self.matrix, path)
        return lambda: view.get(self.matrix(path), NO_CALL)

    def _table(self, path: str, of: str) -> Tensor:
        """Return the rows that a module looks up.

        Raises:
            OpaqueLayerError: it has no such table.
        """
        module = holder_of_parameters(self.module(path))
        weight = materialized(module, "weight")
        adapts = hasattr(module, "base_layer") or hasattr(module, "token_adapter")
        if adapts and isinstance(weight, Tensor):  # PEFT's layer, whose rows are adapted
            rows: Tensor = module.forward(torch.arange(len(weight), device=weight.device)[None])
            return rows[0]
        if not isinstance(weight, Tensor):
            raise OpaqueLayerError(
                f"{path} is a {type(module).__name__}, which has no table of {of}"
            )
        return weight

    def _norm(self, path: str, norm: Norm) -> Getters:
        """Return the getters of a norm's weight and bias, if it has them; its path is relative to
        `path`.
        """
        kind = norm.kind
        if kind.identity or kind.function:
            return {}
        path = norm.path if norm.path.startswith(".") else join(path, norm.path)
        getters: Getters = {}

        def weight() -> Tensor:
            factor = kind.weight(self.module(path))
            assert factor is not None
            return factor

        def bias() -> Tensor:
            constant = kind.bias(self.module(path))
            assert constant is not None
            return constant

        module = kind.normalizer(self.module(path))
        own, added = parameter_names(module)
        if getattr(module, own, None) is not None:
            getters["w"] = weight
        if getattr(module, added, None) is not None:
            getters["b"] = bias
        return getters

    # Tables of functions: of the whole model, and of its parts.

    def _everything(self) -> Getters:
        architecture = self.architecture
        getters = self._embeddings()
        for stack in architecture.stacks:
            if self.has(stack.path):
                getters |= self._stack(stack)
        for head in architecture.heads:
            if self.has(head.path):
                getters |= _inside(head.name, self._head(head))
        readout = architecture.readout
        path = f".{readout.path}"
        if readout.path and self.has(path):
            getters["unembed.W_U"] = times(readout.factor, partial(self.matrix, path))
            getters["unembed.b_U"] = partial(self._unembedding_bias, path)
        return getters

    def _embeddings(self) -> Getters:
        embedding = self.architecture.embedding
        first = self.architecture.token_stack
        getters: Getters = {}
        if first is not None:
            path = first.embedding.tokens
            factor = first.embedding.factor
            getters["embed.W_E"] = partial(self._token_embedding, path, factor)
        if embedding.positions:
            getters["pos_embed.W_pos"] = partial(self._position_embedding, embedding.positions)
        if embedding.types:
            getters["token_type_embed.W_token_type"] = self.parameter(embedding.types)
        if embedding.module is not None:  # HookedTransformer's encoder has one part for all tables
            getters = _inside("embed", getters)
        if embedding.norm:
            getters |= _inside("embed.ln", self._norm("", embedding.norm))
        return getters

    def _token_embedding(self, path: str, factor: float) -> Tensor:
        weight = self._table(path, "embeddings")
        module = holder_of_parameters(self.module(path))
        is_plain = type(module).forward is nn.Embedding.forward and runs_its_class(module)
        if isinstance(module, nn.Embedding) and not is_plain:  # such as one that scales its rows
            twin = copy.copy(module)  # a copy, so that no hooks are called
            twin._parameters = {**module._parameters, "weight": cast(nn.Parameter, weight)}
            twin.padding_idx = None
            weight = twin.forward(torch.arange(len(weight), device=weight.device))
        return weight if factor == 1.0 else weight * factor

    def _position_embedding(self, path: str) -> Tensor:
        # OPT keeps two rows before those of its positions.
        offset = getattr(self.module(path), "offset", 0)
        return self._table(path, "positions")[offset:]

    def _unembedding_bias(self, path: str) -> Tensor:
        """Compute the logits' bias: the output layer's, plus any bias that the model adds after
        it."""
        readout = self.architecture.readout
        own = self.bias(path, lambda: (self.cfg.d_vocab_out,))
        bias = times(readout.factor_out, own)()
        added = readout.bias_of(self.core_model)
        return bias if added is None else bias + added.to(bias)

    def _head(self, head: Head) -> Getters:
        layer = head.linear
        getters: Getters = {"W": partial(self.matrix, layer), "b": self.parameter(layer, "bias")}
        if head.norm:
            getters |= _inside("ln", self._norm("", head.norm))
        return getters

    def _stack(self, stack: Stack) -> Getters:
        count = len(stack.modules(self.module("")))
        if stack is self.architecture.stack:
            # A deleted block then raises an error that names it.
            count = max(count, self.cfg.n_layers)
        getters: Getters = {}
        for index in range(count):
            path = stack.place_of(index)
            for named in stack.block_at(index).named:
                getters |= _inside(f"{stack.name}.{index}", self._step(path, named))
        if stack.final_norm:
            name = f"{stack.name}_final_ln" if stack.one_of_two else "ln_final"
            getters |= _inside(name, self._norm("", stack.final_norm))
        return getters

    def _step(self, path: str, named: NamedStep) -> Getters:
        """Return the getters of one residual step: of its norms, and of its part."""
        step = named.step
        part = named.step.part
        getters: Getters = {}
        if norm := step.pre or step.stream_norm:
            getters |= _inside(named.norm, self._norm(path, norm))
        if step.post:
            getters |= _inside(f"{named.norm}_post", self._norm(path, step.post))
        inside: Getters = {}
        if isinstance(part, Attention):
            inside = self._attention(path, part)
        elif isinstance(part, MLP):
            inside = self._mlp(path, part)
        elif isinstance(part, MoE):
            inside = self._experts(path, part)
        if step.behind_last:
            inside = self._transformed(path, inside, step.behind_last)
        return getters | _inside(named.name, inside)

    def _transformed(self, path: str, getters: Getters, chain: Chain) -> Getters:
        """Fold the transform of a part's result into its last matrix and bias, as in
        HookedTransformer.
        """

        def behind(transform: Transform, get: Get) -> Tensor:
            return transform(chain, get(), self.module(path))

        folded = dict(getters)
        for name, get in getters.items():
            if name in ("b_O", "b_out"):
                folded[name] = partial(behind, transformed, get)
            # The bias of an expert is one of several terms.
            elif re.search(r"\b(W_O|W_out|b_out)(\.weight|\.bias)?$", name):
                folded[name] = partial(behind, linearly, get)
        return folded

    def _attention(self, path: str, part: Attention) -> Getters:
        path = join(path, part.path)
        n_heads = part.own("n_heads", self.cfg.n_heads)
        getters = self._projections(path, part, n_heads)
        out = join(path, part.o)
        getters["W_O"] = lambda: rearrange(self.matrix(out), "(h d) m -> h d m", h=n_heads)
        getters["b_O"] = self.bias(out, lambda: (self.cfg.d_model,))
        for letter, projection in part.projections.items():
            if projection.norm and letter != "v":
                getters |= _inside(f"{letter}_norm", self._norm(path, projection.norm))
        if part.position_bias and self.has(table := join(path, part.position_bias)):
            getters["rel_pos_bias.weight"] = self.parameter(table)
        return getters

    def _projections(self, path: str, part: Attention, n_heads: int) -> Getters:
        """Return the getters of queries, keys and values. Projections from a latent have none,
        because their matrices do not read the stream.
        """
        n_groups = part.own("n_key_value_heads", self.cfg.n_kv_heads)
        getters: Getters = {}
        for letter, projection in part.projections.items():
            if projection.latent is None:
                n = n_heads if letter == "q" else n_groups
                weight, bias = self._projection(path, projection, n)
                # HookedTransformer's grouped keys and values are stored once for each group, under
                # a leading underscore.
                grouped = "" if n == n_heads else "_"
                getters[f"{grouped}W_{letter.upper()}"] = weight
                getters[f"{grouped}b_{letter.upper()}"] = bias
        return getters

    def _projection(self, path: str, projection: Projection, n: int) -> tuple[Get, Get]:
        """Return the getters of the weight and the bias of `n` heads."""
        view = projection.view or Heads(n)
        matrix = self._matrix(path, replace(projection, view=view))
        shape = (n, projection.width or self.cfg.d_head)
        bias = self.bias(join(path, projection.path), lambda: shape, view)
        if projection.bias:
            bias = partial(self._with_bias, bias, join(path, projection.bias))
        return lambda: rearrange(matrix(), "m h d -> h m d"), bias

    def _with_bias(self, get: Get, path: str) -> Tensor:
        module, _, name = path.rpartition(".")
        own = get()
        return own + self.module(module).get_parameter(name).view_as(own)

    def _mlp(self, path: str, mlp: MLP, factor: float = 1.0) -> Getters:
        path = join(path, mlp.path)
        up = self._matrix(path, mlp.up)
        getters: Getters = {"W_in": up, "b_in": self._bias_of_neurons(path, mlp.up, up)}
        if mlp.gate:
            gate = self._matrix(path, mlp.gate)
            getters["W_gate"] = gate
            # HookedTransformer has no name for its bias.
            if self._has_bias(join(path, mlp.gate.path)):
                getters["b_gate"] = self._bias_of_neurons(path, mlp.gate, gate)
        down = join(path, mlp.down)
        getters["W_out"] = times(factor, partial(self.matrix, down))
        getters["b_out"] = times(factor, self.bias(down, lambda: (self.cfg.d_model,)))
        if mlp.ln:
            getters |= _inside("ln", self._norm(path, mlp.ln))
        return getters

    def _bias_of_neurons(self, path: str, projection: Projection, matrix: Get) -> Get:
        path = join(path, projection.path)
        return self.bias(path, lambda: (matrix().shape[-1],), projection.view)

    def _has_bias(self, path: str) -> bool:
        return getattr(self.module(path), "bias", None) is not None

    def _experts(self, path: str, moe: MoE) -> Getters:
        """Return the getters of the router and of each expert, in the orientation of
        HookedTransformer's linear layers.
        """
        path = join(path, moe.path)
        router = join(path, moe.router)
        router = join(router, router_matrix(self.module(router)))
        getters: Getters = {"W_gate.weight": self.parameter(router)}
        if self._has_bias(router):
            getters["W_gate.bias"] = self.parameter(router, "bias")
        holder = join(path, moe.experts)
        experts = holder_of_parameters(self.module(holder))
        if has_layers(experts, moe.layers):
            for index in range(self.cfg.num_experts or 0):
                getters |= _inside(f"experts.{index}", self._expert(holder, index, moe))
        if moe.shared:
            shared = self._mlp(path, moe.shared, moe.shared_factor)
            getters |= _inside("shared_expert", shared)
        if gate := moe.shared_gate:
            gate_path = join(path, gate.projection.path)
            getters["shared_expert_gate.weight"] = self.parameter(gate_path)
        return getters

    def _holder(self, path: str) -> nn.Module:
        """Return the module that holds all experts.

        Raises:
            TypeError: PEFT adapts its parameters.
        """
        experts = self.module(path)
        if wraps_parameters(experts):
            raise TypeError(
                f"{path} is a {type(experts).__name__}, whose experts are not plain matrices;"
                f" {_what_helps(experts)}"
            )
        return holder_of_parameters(experts)

    def _expert(self, path: str, index: int, moe: MoE) -> Getters:
        """Return the getters of an expert; `path` is the path of the module that holds all
        experts."""

        def getter(read: Callable[..., Tensor], part: ExpertPart) -> Get:
            factor = moe.factor if part == "W_out" else 1.0
            return times(factor, lambda: read(self._holder(path), index, part, moe.layers))

        experts = holder_of_parameters(self.module(path))
        parts: tuple[ExpertPart, ...] = ("W_gate", "W_in", "W_out")
        getters: Getters = {}
        for part in parts if has_gate(experts, moe.layers) else parts[1:]:
            getters[f"{part}.weight"] = getter(expert_weight, part)
            if has_bias(experts, part, moe.layers):
                getters[f"{part}.bias"] = getter(expert_bias, part)
        return getters


def _inside(prefix: str, getters: Getters) -> Getters:
    """Return the getters of a part, with a prefix before their names."""
    return {f"{prefix}.{name}": get for name, get in getters.items()}


def _with_gradient(weight: Tensor) -> Tensor:
    """Return a view of a parameter that also has the matching view of the parameter's gradient."""
    parameter = weight._base
    if parameter is None or not parameter.is_leaf:  # LoRA's are computed
        return weight
    gradient = parameter.grad
    if gradient is not None and gradient.stride() == parameter.stride():
        offset = weight.storage_offset() - parameter.storage_offset()
        start = gradient.storage_offset() + offset
        weight.grad = gradient.as_strided(weight.shape, weight.stride(), start)
    return weight


def times(factor: float, get: Get) -> Get:
    """Multiply a getter's tensor by a step's factor, which belongs to its last matrix and bias, as
    in HookedTransformer.
    """
    return get if factor == 1 else lambda: get() * factor
