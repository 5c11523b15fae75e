"""What weight processing works on: a model's norms with the matrices that read them, and what writes to the stream.

Matrices are views of the model's own parameters, in HookedTransformer's orientation: writing to one changes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adapters import MLP, Attention, MoE, Weights
from adapters.norms import LAYER_NORM, NormKind
from adapters.paths import join

Get = Callable[[], Tensor]


@dataclass(frozen=True)
class Reader:
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
class Norm:
    """A norm, and all that reads it.

    Attributes:
        name, path, kind: its canonical name, its path, what it computes.
        readers: the matrices that read it.
        gated: they are those of a gated MLP, in which HookedTransformer has no place for a bias of the gate.
    """

    name: str
    path: str
    kind: NormKind
    readers: tuple[Reader, ...]
    gated: bool = False


class Parts:
    """The parts of a model that are processed.

    Args:
        weights: the canonical weights.

    Attributes:
        norms: the norms before attention, MLP and unembedding.
        writers: for each canonical name, a matrix or bias that writes to the residual stream, ``[*rows d_model]``.
        piece: how many elements are worked on at a time: few beside the model, and few enough for processor caches.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights, self.cfg, self.architecture = weights, weights.cfg, weights.architecture
        self.block = self.architecture.block
        self.piece = max(4096, min(self.cfg.n_params // 64, 1 << 17))
        self.norms = list(self._norms())
        self.writers = dict(self._writers())

    @property
    def attn(self) -> Attention:
        assert self.block.attn
        return self.block.attn

    @property
    def blocks(self) -> Iterator[tuple[str, str]]:
        """Each block's canonical prefix and its path."""
        for i in range(self.cfg.n_layers):
            yield f"blocks.{i}", join(self.architecture.blocks, str(i))

    @property
    def final_kind(self) -> NormKind | None:
        """What the norm before the unembedding computes, None where there is none."""
        a = self.architecture
        kind = a.final_kind or a.block.norm
        return kind if a.final_norm and not kind.identity else None

    def find(self, prefix: str, name: str) -> str:
        """The name of a weight, with the underscore of grouped keys and values where it has that."""
        full = f"{prefix}.{name}"
        return full if full in self.weights.getters else f"{prefix}._{name}"

    def get(self, name: str) -> Get:
        return self.weights.getters[name]

    def _norms(self) -> Iterator[Norm]:
        block, kind = self.block, self.block.norm
        if not kind.identity:
            for name, path in self.blocks:
                attn, mlp = tuple(self._attention_readers(name, path)), tuple(self._mlp_readers(name, path))
                gated = isinstance(block.mlp, MLP) and block.mlp.gate is not None
                if block.ln1:
                    shared = block.shared_norm
                    readers = attn + mlp if shared else attn
                    yield Norm(f"{name}.ln1", join(path, block.ln1), kind, readers, gated and shared)
                if block.ln2 and not block.shared_norm:
                    yield Norm(f"{name}.ln2", join(path, block.ln2), kind, mlp, gated)
                if isinstance(block.mlp, MLP) and block.mlp.ln:
                    down = join(path, block.mlp.path, block.mlp.down)
                    at = f"{name}.mlp"
                    out = Reader(f"{at}.W_out", self.get(f"{at}.W_out"), self.get(f"{at}.b_out"), down)
                    yield Norm(f"{at}.ln", join(path, block.mlp.path, block.mlp.ln), LAYER_NORM, (out,))
        if self.architecture.final_norm and self.final_kind and "unembed.W_U" in self.weights.getters:
            unembed = "." + self.architecture.unembed
            reader = Reader("unembed.W_U", self.get("unembed.W_U"), self.get("unembed.b_U"), unembed)
            yield Norm("ln_final", self.architecture.final_norm, self.final_kind, (reader,))

    def _attention_readers(self, name: str, path: str) -> Iterator[Reader]:
        part = self.block.attn
        if part is None:
            return
        at = f"{name}.{part.name}"
        for letter, projection in (("Q", part.q), ("K", part.k), ("V", part.v)):
            weight, bias = self.find(at, f"W_{letter}"), self.find(at, f"b_{letter}")
            yield Reader(weight, self.get(weight), self.get(bias), join(path, part.path, projection.path))

    def _mlp_readers(self, name: str, path: str) -> Iterator[Reader]:
        mlp = self.block.mlp
        if isinstance(mlp, MLP):
            up = join(path, mlp.path, mlp.up.path)
            yield Reader(f"{name}.mlp.W_in", self.get(f"{name}.mlp.W_in"), self.get(f"{name}.mlp.b_in"), up)
            if mlp.gate:
                gate = join(path, mlp.path, mlp.gate.path)
                yield Reader(f"{name}.mlp.W_gate", self.get(f"{name}.mlp.W_gate"), None, gate)
        elif isinstance(mlp, MoE):
            names = [f"{name}.mlp.W_gate.weight"]
            for e in range(self.cfg.num_experts):
                names += [f"{name}.mlp.experts.{e}.{kind}.weight" for kind in ("W_gate", "W_in")]
            for weight in names:
                yield Reader(weight, _transposed(self.get(weight)), None, "")

    def _writers(self) -> Iterator[tuple[str, Get]]:
        getters = self.weights.getters
        for name in ("embed.W_E", "pos_embed.W_pos"):
            if name in getters:
                yield name, getters[name]
        for name, path in self.blocks:
            if self.block.attn:
                at = f"{name}.{self.block.attn.name}"
                yield f"{at}.W_O", getters[f"{at}.W_O"]
                if self.has_bias(self.output(path)):
                    yield f"{at}.b_O", getters[f"{at}.b_O"]
            mlp = self.block.mlp
            if isinstance(mlp, MLP):
                yield f"{name}.mlp.W_out", getters[f"{name}.mlp.W_out"]
                if self.has_bias(join(path, mlp.path, mlp.down)):
                    yield f"{name}.mlp.b_out", getters[f"{name}.mlp.b_out"]
            elif isinstance(mlp, MoE):
                for e in range(self.cfg.num_experts):
                    weight = f"{name}.mlp.experts.{e}.W_out.weight"
                    yield weight, _transposed(getters[weight])

    def output(self, path: str) -> str:
        """The path of a block's output projection."""
        return join(path, self.attn.path, self.attn.o)

    def value(self, path: str) -> str:
        """The path of the projection that makes a block's values."""
        return join(path, self.attn.path, self.attn.v.path)

    def has_bias(self, path: str) -> bool:
        return getattr(self.weights.module(path), "bias", None) is not None

    def affine(self, norm: Norm) -> tuple[Tensor | None, Tensor | None]:
        """What a norm multiplies with, and what it adds."""
        module = self.weights.module(norm.path)
        return norm.kind.weight(module), getattr(module, "bias", None)

    def is_plain(self, norm: Norm) -> bool:
        """Whether a norm multiplies with ones and adds zeros."""
        weight, bias = self.affine(norm)
        ones = weight is None or bool((weight == 1).all())
        return ones and (bias is None or not bool(bias.any()))

    def undeclared(self) -> list[str]:
        """Parameters of which the adapter does not say what they do: they may read or write what is to be changed."""
        a, block = self.architecture, self.block
        known: set[int] = set()
        outside = (a.embed, a.pos_embed, a.embed_norm, a.final_norm, "." + a.unembed)
        paths = [path for path in outside if path and self.weights.has(path)]
        for _, path in self.blocks:
            norms = (block.ln1, block.ln2, block.ln1_post, block.ln2_post)
            paths += [join(path, at) for at in norms if at]
            if attn := block.attn:
                inside = (attn.q.path, attn.k.path, attn.v.path, attn.o, attn.q_norm, attn.k_norm)
                paths += [join(path, attn.path, at) for at in inside if at]
            if isinstance(block.mlp, MLP):
                gate = block.mlp.gate.path if block.mlp.gate else None
                paths += [
                    join(path, block.mlp.path, at)
                    for at in (block.mlp.up.path, gate, block.mlp.down, block.mlp.ln)
                    if at
                ]
            elif isinstance(block.mlp, MoE):
                paths += [join(path, block.mlp.path, at) for at in (block.mlp.router, "experts")]
        for path in paths:
            known.update(id(parameter) for parameter in self.weights.module(path).parameters())
        core: Any = self.weights.model
        return [name for name, parameter in core.named_parameters() if id(parameter) not in known]


def _transposed(get: Get) -> Get:
    return lambda: get().mT


def ensure_bias(module: nn.Module) -> None:
    """Gives a linear layer a bias of zeros where it has none.

    Raises:
        TypeError: it is no `torch.nn.Linear`.
    """
    if getattr(module, "bias", None) is not None:
        return
    if type(module) is not nn.Linear:
        raise TypeError(f"a {type(module).__name__} cannot be given a bias, only a Linear")
    weight = module.weight
    zeros = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
    module.bias = nn.Parameter(zeros, requires_grad=weight.requires_grad)
