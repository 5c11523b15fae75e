"""A model's own parameters under HookedTransformer's names, in its shapes and orientation.

Everything that the model stores is a zero-copy view: editing it edits the model, and gradients reach the parameter.
What HookedTransformer has and the model has not (a bias) is zero; what the model computes from its parameter (Gemma's
``1 + weight``, its scaled embeddings) is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import cast

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from adapters.architecture import Architecture, NamedStep, Stack
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
from adapters.linear import adapted_bias, materialized, weight_in_out
from adapters.norms import Norm, parameter_names
from adapters.points import base_path, core_path, has_module, join, missing_module_message, module_at
from adapters.views import Chain, Heads, View, linearly, transformed
from adapters.views.views import NO_CALL

Get = Callable[[], Tensor]


def _what_helps(module: nn.Module) -> str:
    """What somebody can do who asked for the matrix of such a layer."""
    if hasattr(module, "base_layer"):
        return "merge adapters first (merge_and_unload)"
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear) and type(weight) is nn.Parameter and weight.is_floating_point():
        return (
            "its class may compute something else of it than torch's linear layer does: read it from the layer itself"
        )
    return "dequantise the model first"


class Weights:
    """A model's canonical weights, by name.

    Args:
        architecture: what its adapter declares.
        model: the Hugging Face model, with what wraps it.
        cfg: its configuration.
        not_offered: names of those that are left out.

    Attributes:
        getters: for each of HookedTransformer's state-dict names, a function that gives the tensor.
    """

    def __init__(
        self, architecture: Architecture, model: nn.Module, cfg: ModelConfig, not_offered: Collection[str] = ()
    ) -> None:
        self.model, self.cfg, self.architecture = model, cfg, architecture
        self.base, self.core = base_path(model), core_path(model)
        self.getters: dict[str, Get] = {}
        made = copy.copy(
            self
        )  # the functions do not know this table: with a cycle the model would outlive its last user
        made._add_everything()
        self.getters = {name: get for name, get in made.getters.items() if name not in not_offered}
        made.getters = {}

    def unembedding_of(self, ids: Tensor) -> Tensor:
        """The columns of `W_U` that belong to tokens, without the others.

        Args:
            ids: of any shape.

        Returns:
            ``[*ids, d_model]``.
        """
        readout = self.architecture.readout
        matrix = self.matrix("." + readout.path)
        rows = matrix.T[ids.to(matrix.device)]
        return rows if readout.factor == 1 else rows * readout.factor

    @property
    def core_model(self) -> nn.Module:
        """The Hugging Face model without what wraps it."""
        return self.model.get_submodule(self.core)

    def __getitem__(self, name: str) -> Float[Tensor, "..."]:
        return _with_gradient(self.getters[name]())

    def module(self, path: str) -> nn.Module:
        """The module at a path from the base model; a path that begins with a dot is from the model itself."""
        at = self.full_path(path)
        try:
            return module_at(self.model, at)
        except AttributeError:
            raise RuntimeError(missing_module_message(at)) from None

    def has(self, path: str) -> bool:
        """Whether there is a module at such a path."""
        return has_module(self.model, self.full_path(path))

    def full_path(self, path: str) -> str:
        """Such a path, from what wraps the model."""
        return join(self.core, path[1:]) if path.startswith(".") else join(self.base, path)

    def parameter(self, path: str, name: str = "weight") -> Get:
        """A module's own parameter."""
        return lambda: materialized(self.module(path), name)

    def matrix(self, path: str) -> Tensor:
        """The weight of a linear layer, ``[d_in, d_out]``.

        Raises:
            TypeError: it is no plain linear layer.
        """
        module = self.module(path)
        weight = weight_in_out(module)
        if weight is None:
            kind, helps = type(getattr(module, "weight", None)).__name__, _what_helps(module)
            raise TypeError(
                f"{path} is a {type(module).__name__}, whose weight ({kind}) is not a plain matrix; {helps}"
            )
        return weight

    def bias(self, path: str, shape: Callable[[], tuple[int, ...]], part: View | None = None) -> Get:
        """A bias, seen through `part`, or zeros of this shape."""

        def get() -> Tensor:
            bias = materialized(self.module(path), "bias")
            if bias is not None and not isinstance(bias, Tensor):
                module = self.module(path)
                raise TypeError(f"{path} is a {type(module).__name__}, which has no plain bias; {_what_helps(module)}")
            like = torch.empty(0, dtype=self.cfg.dtype, device=self.cfg.device) if bias is None else bias
            bias = adapted_bias(self.module(path), bias, like)
            if bias is None:
                return like.new_zeros(shape())
            return bias if part is None else part.get(bias, NO_CALL)

        return get

    # Making the functions that give the weights.

    def _add_everything(self) -> None:
        architecture, cfg = self.architecture, self.cfg
        self._add_embeddings()
        for stack in architecture.stacks:
            if self.has(stack.path):
                self._add_stack(stack)
        self._add_heads()
        readout = architecture.readout
        unembed = "." + readout.path
        if readout.path and self.has(unembed):
            self.getters["unembed.W_U"] = times(readout.factor, lambda: self.matrix(unembed))
            self.getters["unembed.b_U"] = self._unembedding_bias(self.bias(unembed, lambda: (cfg.d_vocab_out,)))

    def _add_embeddings(self) -> None:
        made, token_stack = self.architecture.embedding, self.architecture.token_stack
        at = "" if made.module is None else "embed."  # HookedTransformer's encoder has one part for all of them
        if token_stack is not None:
            tokens = token_stack.embedding
            self.getters[f"{at}embed.W_E"] = partial(self._token_embedding, tokens.tokens, tokens.factor)
        if made.positions:
            self.getters[f"{at}pos_embed.W_pos"] = partial(self._position_embedding, made.positions)
        if made.types:
            self.getters[f"{at}token_type_embed.W_token_type"] = self.parameter(made.types)
        if made.norm:
            self.add_norm("embed.ln", "", made.norm)

    def _unembedding_bias(self, own: Get) -> Get:
        """The bias of the logits: of the output layer, and what the model adds behind it."""
        readout = self.architecture.readout
        scaled = times(readout.factor_out, own)

        def both() -> Tensor:
            bias, more = scaled(), readout.bias_of(self.core_model)
            return bias if more is None else bias + more.to(bias)

        return both

    def _table(self, path: str, of: str) -> Tensor:
        """The rows that a module looks up.

        Raises:
            TypeError: it has none.
        """
        module = self.module(path)
        weight = materialized(module, "weight")
        if not isinstance(weight, Tensor):
            raise TypeError(f"{path} is a {type(module).__name__}, which has no table of {of}")
        return weight

    def _token_embedding(self, path: str, factor: float) -> Tensor:
        weight, module = self._table(path, "embeddings"), self.module(path)
        if isinstance(module, nn.Embedding) and type(module).forward is not nn.Embedding.forward:  # it scales, say
            twin = copy.copy(module)  # of which nobody's hooks are called
            twin._parameters, twin.padding_idx = {**module._parameters, "weight": cast(nn.Parameter, weight)}, None
            weight = twin.forward(torch.arange(len(weight), device=weight.device))
        return weight if factor == 1.0 else weight * factor

    def _position_embedding(self, path: str) -> Tensor:
        # OPT keeps two rows before those of its positions.
        return self._table(path, "positions")[getattr(self.module(path), "offset", 0) :]

    def _add_stack(self, stack: Stack) -> None:
        count = len(stack.modules(self.module("")))
        if stack is self.architecture.stack:
            count = max(count, self.cfg.n_layers)  # one that was deleted is missed by name
        for index in range(count):
            path = stack.place_of(index)
            for named in stack.block_at(index).named:
                self._add_step(f"{stack.name}.{index}", path, named)
        if stack.final_norm:
            self.add_norm(f"{stack.name}_final_ln" if stack.one_of_two else "ln_final", "", stack.final_norm)

    def _add_step(self, prefix: str, path: str, named: NamedStep) -> None:
        """The weights of one residual step: its norms, and what is inside."""
        step, part = named.step, named.step.part
        if norm := step.pre or step.stream_norm:
            self.add_norm(f"{prefix}.{named.norm}", path, norm)
        if step.post:
            self.add_norm(f"{prefix}.{named.norm}_post", path, step.post)
        name = f"{prefix}.{named.name}"
        if isinstance(part, Attention):
            self._add_attention(name, path, part)
        elif isinstance(part, MLP):
            self._add_mlp(name, path, part)
        elif isinstance(part, MoE):
            self._add_experts(name, path, part)
        if step.behind_last:
            self._add_transform(name, path, step.behind_last)

    def _add_transform(self, name: str, path: str, chain: Chain) -> None:
        """What a part's result goes through is a part of its last matrix and bias, as HookedTransformer has them."""
        for own in [own for own in self.getters if own.startswith(f"{name}.")]:
            whole = own in (f"{name}.b_O", f"{name}.b_out")  # that of an expert is one of several terms
            if whole or own.removesuffix(".weight").removesuffix(".bias").endswith((".W_O", ".W_out", ".b_out")):
                self.getters[own] = partial(self._behind, chain, self.getters[own], path, whole)

    def _behind(self, chain: Chain, get: Get, path: str, whole: bool) -> Tensor:
        return (transformed if whole else linearly)(chain, get(), self.module(path))

    def add_norm(self, name: str, path: str, norm: Norm) -> None:
        """The weight and bias of a norm, as far as it has them; its path is relative to `path`."""
        if norm.kind.identity or norm.kind.function:
            return
        at = norm.path if norm.path.startswith(".") else join(path, norm.path)
        module, inner = norm.kind.normalizer(self.module(at)), join(at, norm.kind.inner)

        def weight() -> Tensor:
            found = norm.kind.weight(self.module(at))
            assert found is not None
            return found

        own, added = parameter_names(module)
        if getattr(module, own, None) is not None:
            self.getters[f"{name}.w"] = weight
        if getattr(module, added, None) is not None:
            self.getters[f"{name}.b"] = self.parameter(inner, added)

    def _add_attention(self, name: str, path: str, part: Attention) -> None:
        heads, at = part.own("n_heads", self.cfg.n_heads), join(path, part.path)
        groups = part.own("n_key_value_heads", self.cfg.n_kv_heads)
        for letter, projection in part.projections.items():
            if projection.latent is None:  # what is made from a latent has no matrix that reads the stream
                letter, n = letter.upper(), heads if letter == "q" else groups
                own = "_" if letter != "Q" and n != heads else ""
                self._add_projection(f"{name}.{own}", at, letter, projection, n)
                if added := projection.bias:
                    at_bias = f"{name}.{own}b_{letter}"
                    self.getters[at_bias] = partial(self._with_bias, self.getters[at_bias], join(at, added))
        out = join(at, part.o)
        self.getters[f"{name}.W_O"] = lambda: rearrange(self.matrix(out), "(h d) m -> h d m", h=heads)
        self.getters[f"{name}.b_O"] = self.bias(out, lambda: (self.cfg.d_model,))
        for letter, projection in part.projections.items():
            if letter != "v" and (norm := projection.norm):
                self.add_norm(f"{name}.{letter}_norm", at, norm)
        if part.position_bias and self.has(table := join(at, part.position_bias)):
            self.getters[f"{name}.rel_pos_bias.weight"] = self.parameter(table)

    def _add_projection(self, prefix: str, path: str, letter: str, projection: Projection, n: int) -> None:
        # HookedTransformer's grouped keys and values are stored once for each group, under a leading underscore.
        module, view = join(path, projection.path), projection.view or Heads(n)
        weight = lambda: rearrange(view.get(self.matrix(module), NO_CALL), "m h d -> h m d")
        self.getters[f"{prefix}W_{letter}"] = weight
        self.getters[f"{prefix}b_{letter}"] = self.bias(module, lambda: (n, projection.width or self.cfg.d_head), view)

    def _with_bias(self, get: Get, path: str) -> Tensor:
        (holder, _, name), own = path.rpartition("."), get()
        return own + self.module(holder).get_parameter(name).view_as(own)

    def _add_mlp(self, name: str, path: str, mlp: MLP, factor: float = 1.0) -> None:
        module = join(path, mlp.path)

        def matrix(projection: Projection) -> Get:
            at, view = join(module, projection.path), projection.view
            return lambda: self.matrix(at) if view is None else view.get(self.matrix(at), NO_CALL)

        up, down = matrix(mlp.up), join(module, mlp.down)
        self.getters[f"{name}.W_in"] = up
        self.getters[f"{name}.b_in"] = self.bias(join(module, mlp.up.path), lambda: (up().shape[-1],), mlp.up.view)
        if mlp.gate:
            self.getters[f"{name}.W_gate"] = gate = matrix(mlp.gate)
            holder = join(module, mlp.gate.path)
            if getattr(self.module(holder), "bias", None) is not None:  # HookedTransformer has no name for it
                self.getters[f"{name}.b_gate"] = self.bias(holder, lambda: (gate().shape[-1],), mlp.gate.view)
        self.getters[f"{name}.W_out"] = times(factor, lambda: self.matrix(down))
        self.getters[f"{name}.b_out"] = times(factor, self.bias(down, lambda: (self.cfg.d_model,)))
        if mlp.ln:
            self.add_norm(f"{name}.ln", module, mlp.ln)

    def _add_experts(self, name: str, path: str, moe: MoE) -> None:
        """The router and each expert, oriented as the linear layers that HookedTransformer keeps them in."""
        inside = join(path, moe.path)
        at, router = join(inside, moe.experts), join(inside, moe.router)
        router = join(router, router_matrix(self.module(router)))
        self.getters[f"{name}.W_gate.weight"] = self.parameter(router)
        if getattr(self.module(router), "bias", None) is not None:
            self.getters[f"{name}.W_gate.bias"] = self.parameter(router, "bias")

        def add(index: int, part: ExpertPart) -> None:
            own, scale = f"{name}.experts.{index}.{part}", moe.factor if part == "W_out" else 1.0
            weight = lambda: expert_weight(self.module(at), index, part, moe.layers)
            self.getters[f"{own}.weight"] = times(scale, weight)
            if has_bias(self.module(at), part, moe.layers):
                self.getters[f"{own}.bias"] = times(
                    scale, lambda: expert_bias(self.module(at), index, part, moe.layers)
                )

        for e in range(self.cfg.num_experts or 0) if has_layers(self.module(at), moe.layers) else ():
            for part in ("W_gate", "W_in", "W_out") if has_gate(self.module(at), moe.layers) else ("W_in", "W_out"):
                add(e, part)
        if moe.shared:
            self._add_mlp(f"{name}.shared_expert", inside, moe.shared, moe.shared_factor)
        if gate := moe.shared_gate:
            self.getters[f"{name}.shared_expert_gate.weight"] = self.parameter(join(inside, gate.projection.path))

    def _add_heads(self) -> None:
        for head in self.architecture.heads:
            if not self.has(head.path):
                continue
            self.getters[f"{head.name}.W"] = partial(self.matrix, head.linear)
            self.getters[f"{head.name}.b"] = self.parameter(head.linear, "bias")
            if head.norm:
                self.add_norm(f"{head.name}.ln", "", head.norm)


def _with_gradient(weight: Tensor) -> Tensor:
    """A view of a parameter shows its part of that parameter's gradient."""
    whole = weight._base
    gradient = whole.grad if whole is not None and whole.is_leaf else None  # (LoRA's are computed)
    if whole is not None and gradient is not None and gradient.stride() == whole.stride():
        offset = weight.storage_offset() - whole.storage_offset()
        weight.grad = gradient.as_strided(weight.shape, weight.stride(), gradient.storage_offset() + offset)
    return weight


def times(factor: float, get: Get) -> Get:
    """What a step multiplies its result with is a part of its last matrix and bias, as HookedTransformer has them."""
    return get if factor == 1 else lambda: get() * factor
