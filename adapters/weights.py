"""A model's own parameters under HookedTransformer's names, in its shapes and orientation.

Everything that the model stores is a zero-copy view: editing it edits the model, and gradients reach the parameter.
What HookedTransformer has and the model has not (a bias) is zero; what the model computes from its parameter (Gemma's
``1 + weight``, its scaled embeddings) is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.architecture import MLP, Architecture, Block, MoE
from adapters.attention import Attention, Projection
from adapters.experts import ExpertPart, expert_bias, expert_weight
from adapters.linear import weight_in_out
from adapters.norms import NormKind
from adapters.paths import base_path, core_path, has_module, join
from adapters.views import Call, Heads, View

Get = Callable[[], Tensor]


class Weights:
    """A model's canonical weights, by name.

    Args:
        architecture: what its adapter declares.
        model: the Hugging Face model, with what wraps it.
        cfg: the facts about it.

    Attributes:
        getters: for each of HookedTransformer's state-dict names, a function that gives the tensor.
    """

    def __init__(self, architecture: Architecture, model: nn.Module, cfg: Any) -> None:
        self.model, self.cfg, self.architecture = model, cfg, architecture
        self.base, self.core = base_path(model), core_path(model)
        self.getters: dict[str, Get] = {}
        (architecture.weights or decoder_weights)(self)

    def __getitem__(self, name: str) -> Float[Tensor, "..."]:
        return self.getters[name]()

    def module(self, path: str) -> nn.Module:
        """The module at a path from the base model; a path that begins with a dot is from the model itself."""
        return self.model.get_submodule(join(self.core, path[1:]) if path.startswith(".") else join(self.base, path))

    def has(self, path: str) -> bool:
        """Whether there is a module at such a path."""
        return has_module(self.model, join(self.core, path[1:]) if path.startswith(".") else join(self.base, path))

    def zeros(self, *shape: int) -> Get:
        return lambda: torch.zeros(shape, dtype=self.cfg.dtype, device=self.cfg.device)

    def parameter(self, path: str, name: str = "weight") -> Get:
        return lambda: getattr(self.module(path), name)

    def matrix(self, path: str) -> Tensor:
        """The weight of a linear layer, ``[d_in, d_out]``.

        Raises:
            TypeError: it is no plain linear layer.
        """
        module = self.module(path)
        weight = weight_in_out(module)
        if weight is None:
            raise TypeError(
                f"{path} is a {type(module).__name__}, whose weight is not a plain matrix; "
                "merge adapters (merge_and_unload) or dequantise the model first"
            )
        return weight

    def bias(self, path: str, *shape: int, part: View | None = None) -> Get:
        """A bias, seen through `part`, or zeros of this shape."""

        def get() -> Tensor:
            bias = getattr(self.module(path), "bias", None)
            if bias is None:
                return self.zeros(*shape)()
            return bias if part is None else part.get(bias, _NO_CALL)

        return get

    def embedding(self, path: str) -> Get:
        def get() -> Tensor:
            module = self.module(path)
            scale = getattr(module, "scalar_embed_scale", 1.0)
            weight = module.weight
            assert isinstance(weight, Tensor)
            return weight if scale == 1.0 else weight * scale

        return get

    def add_norm(self, name: str, path: str, kind: NormKind) -> None:
        if kind.identity:
            return
        module = self.module(path)

        def weight() -> Tensor:
            found = kind.weight(self.module(path))
            assert found is not None
            return found

        if getattr(module, "weight", None) is not None:
            self.getters[f"{name}.w"] = weight
        if getattr(module, "bias", None) is not None:
            self.getters[f"{name}.b"] = self.parameter(path, "bias")

    def add_attention(self, name: str, path: str, part: Attention) -> None:
        heads, d_head = self.cfg.n_heads, self.cfg.d_head
        for letter, projection, n in (
            ("Q", part.q, heads), ("K", part.k, self.cfg.n_kv_heads), ("V", part.v, self.cfg.n_kv_heads),
        ):  # fmt: skip
            self._add_projection(name, join(path, part.path), letter, projection, n)
        out = join(path, part.path, part.o)
        self.getters[f"{name}.W_O"] = lambda: self.matrix(out).unflatten(0, (heads, d_head))
        self.getters[f"{name}.b_O"] = self.bias(out, self.cfg.d_model)

    def _add_projection(self, name: str, path: str, letter: str, projection: Projection, n: int) -> None:
        module, view = join(path, projection.path), projection.part or Heads(n)
        # HookedTransformer's grouped keys and values are stored once for each group, under a leading underscore.
        own = "_" if letter != "Q" and n != self.cfg.n_heads else ""
        weight = f"{name}.{own}W_{letter}"
        self.getters[weight] = lambda: view.get(self.matrix(module), _NO_CALL).movedim(0, 1)
        self.getters[f"{name}.{own}b_{letter}"] = self.bias(module, n, self.cfg.d_head, part=view)

    def add_mlp(self, name: str, path: str, mlp: MLP, d_mlp: int) -> None:
        module = join(path, mlp.path)

        def matrix(projection: Projection) -> Get:
            at = join(module, projection.path)
            part = projection.part
            return lambda: self.matrix(at) if part is None else part.get(self.matrix(at), _NO_CALL)

        self.getters[f"{name}.W_in"] = matrix(mlp.up)
        self.getters[f"{name}.b_in"] = self.bias(join(module, mlp.up.path), d_mlp, part=mlp.up.part)
        if mlp.gate:
            self.getters[f"{name}.W_gate"] = matrix(mlp.gate)
        down = join(module, mlp.down)
        self.getters[f"{name}.W_out"] = lambda: self.matrix(down)
        self.getters[f"{name}.b_out"] = self.bias(down, self.cfg.d_model)

    def add_experts(self, name: str, path: str, moe: MoE) -> None:
        """The router and each expert, oriented as the linear layers that HookedTransformer keeps them in."""
        inside = join(path, moe.path)
        experts, router = join(inside, moe.experts), join(inside, moe.router)
        self.getters[f"{name}.W_gate.weight"] = self.parameter(router)
        if getattr(self.module(router), "bias", None) is not None:
            self.getters[f"{name}.W_gate.bias"] = self.parameter(router, "bias")
        has_bias = self.module(experts).has_bias

        def add(index: int, part: ExpertPart) -> None:
            at = f"{name}.experts.{index}.{part}"
            self.getters[f"{at}.weight"] = lambda: expert_weight(self.module(experts), index, part)
            if has_bias:
                self.getters[f"{at}.bias"] = lambda: expert_bias(self.module(experts), index, part)

        for e in range(self.cfg.num_experts):
            for part in ("W_gate", "W_in", "W_out"):
                add(e, part)
        if moe.shared:
            self.add_mlp(f"{name}.shared_expert", inside, moe.shared, self.cfg.d_shared_expert)
        if moe.shared_gate:
            self.getters[f"{name}.shared_expert_gate.weight"] = self.parameter(join(inside, moe.shared_gate))

    def add_block(self, name: str, path: str, block: Block) -> None:
        for norm in ("ln1", "ln2", "ln3", "ln1_post", "ln2_post"):
            at = getattr(block, norm, None)
            if norm == "ln2" and block.shared_norm:
                at = block.ln1
            if at:
                self.add_norm(f"{name}.{norm}", join(path, at), block.norm)
        if block.attn:
            self.add_attention(f"{name}.{block.attn.name}", path, block.attn)
            for letter, at in (("q", block.attn.q_norm), ("k", block.attn.k_norm)):
                if at and block.qk_norm:
                    self.add_norm(f"{name}.attn.{letter}_norm", join(path, block.attn.path, at), block.qk_norm)
        if block.cross_attn:
            self.add_attention(f"{name}.{block.cross_attn.name}", path, block.cross_attn)
        if isinstance(block.mlp, MLP):
            self.add_mlp(f"{name}.mlp", path, block.mlp, self.cfg.d_mlp)
        elif isinstance(block.mlp, MoE):
            self.add_experts(f"{name}.mlp", path, block.mlp)

    def add_unembed(self, path: str) -> None:
        """The output layer at a path from the model itself."""
        if self.has("." + path):
            self.getters["unembed.W_U"] = lambda: self.matrix("." + path)
            self.getters["unembed.b_U"] = self.bias("." + path, self.cfg.d_vocab_out)


_NO_CALL = Call(nn.Identity(), (), {})


def decoder_weights(weights: Weights) -> None:
    """The weights of a model with one stack of blocks, as `architecture_points` names its parts."""
    a, cfg = weights.architecture, weights.cfg
    weights.getters["embed.W_E"] = weights.embedding(a.embed)
    if a.embed_norm:
        weights.add_norm("embed.ln", a.embed_norm, a.block.norm)
    if a.pos_embed:
        path = a.pos_embed
        # OPT keeps two rows before those of its positions.
        weights.getters["pos_embed.W_pos"] = (
            lambda: weights.module(path).weight[  # type: ignore[index]
                getattr(weights.module(path), "offset", 0) :
            ]
        )
    for index in range(cfg.n_layers):
        weights.add_block(f"blocks.{index}", join(a.blocks, str(index)), a.block_at(index))
    if a.final_norm:
        weights.add_norm("ln_final", a.final_norm, a.final_kind or a.block.norm)
    weights.add_unembed(a.unembed)


def bert_weights(weights: Weights) -> None:
    """The weights of BERT, as HookedTransformer's encoder names them."""
    a, kind = weights.architecture, weights.architecture.block.norm
    weights.getters["embed.embed.W_E"] = weights.parameter("embeddings.word_embeddings")
    weights.getters["embed.pos_embed.W_pos"] = weights.parameter("embeddings.position_embeddings")
    weights.getters["embed.token_type_embed.W_token_type"] = weights.parameter("embeddings.token_type_embeddings")
    weights.add_norm("embed.ln", "embeddings.LayerNorm", kind)
    for index in range(weights.cfg.n_layers):
        weights.add_block(f"blocks.{index}", join(a.blocks, str(index)), a.block)
    heads = {
        "mlm_head": ".cls.predictions.transform.dense",
        "pooler": "pooler.dense",
        "nsp_head": ".cls.seq_relationship",
    }
    for name, path in heads.items():
        if weights.has(path):
            weights.getters[f"{name}.W"] = lambda path=path: weights.matrix(path)  # type: ignore[misc]
            weights.getters[f"{name}.b"] = weights.parameter(path, "bias")
    if weights.has(".cls.predictions"):
        weights.add_norm("mlm_head.ln", ".cls.predictions.transform.LayerNorm", kind)
    weights.add_unembed(a.unembed)
