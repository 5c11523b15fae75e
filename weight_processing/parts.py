"""What weight processing works on: a model's norms with the matrices that read them, and what writes to the stream.

Matrices are views of the model's own parameters, in HookedTransformer's orientation: writing to one changes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapters import MLP, Attention, MoE, Weights
from adapters.linear import weight_in_out
from adapters.norms import LAYER_NORM, NormKind
from adapters.paths import join
from adapters.views import Call, Heads

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
    def mlps(self) -> Iterator[tuple[str, str, MLP | MoE | None]]:
        """Each block's canonical prefix, its path, and its MLP, in which alone blocks may differ."""
        for i, (name, path) in enumerate(self.blocks):
            yield name, path, self.architecture.block_at(i).mlp

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
            for name, path, part in self.mlps:
                attn, mlp = tuple(self._attention_readers(name, path)), tuple(self._mlp_readers(name, path, part))
                gated = isinstance(part, MLP) and part.gate is not None
                if block.ln1:
                    shared = block.shared_norm
                    readers = attn + mlp if shared else attn
                    yield Norm(f"{name}.ln1", join(path, block.ln1), kind, readers, gated and shared)
                if block.ln2 and not block.shared_norm:
                    yield Norm(f"{name}.ln2", join(path, block.ln2), kind, mlp, gated)
                if isinstance(part, MLP) and part.ln:
                    down = join(path, part.path, part.down)
                    at = f"{name}.mlp"
                    out = Reader(f"{at}.W_out", self.get(f"{at}.W_out"), self.get(f"{at}.b_out"), down)
                    yield Norm(f"{at}.ln", join(path, part.path, part.ln), LAYER_NORM, (out,))
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

    def _mlp_readers(self, name: str, path: str, mlp: MLP | MoE | None) -> Iterator[Reader]:
        if isinstance(mlp, MLP):
            yield from self._feed_forward_readers(f"{name}.mlp", join(path, mlp.path), mlp)
        elif isinstance(mlp, MoE):
            names = [f"{name}.mlp.W_gate.weight"]
            for e in range(self.cfg.num_experts):
                names += [f"{name}.mlp.experts.{e}.{kind}.weight" for kind in ("W_gate", "W_in")]
            if mlp.shared_gate:
                names.append(f"{name}.mlp.shared_expert_gate.weight")
            for weight in names:
                yield Reader(weight, _transposed(self.get(weight)), None, "")
            if mlp.shared:
                inside = join(path, mlp.path, mlp.shared.path)
                yield from self._feed_forward_readers(f"{name}.mlp.shared_expert", inside, mlp.shared)

    def _feed_forward_readers(self, name: str, path: str, mlp: MLP) -> Iterator[Reader]:
        up = join(path, mlp.up.path)
        yield Reader(f"{name}.W_in", self.get(f"{name}.W_in"), self.get(f"{name}.b_in"), up)
        if mlp.gate:
            yield Reader(f"{name}.W_gate", self.get(f"{name}.W_gate"), None, join(path, mlp.gate.path))

    def _writers(self) -> Iterator[tuple[str, Get]]:
        getters = self.weights.getters
        for name in ("embed.W_E", "pos_embed.W_pos"):
            if name in getters:
                yield name, getters[name]
        for name, path, mlp in self.mlps:
            if self.block.attn:
                at = f"{name}.{self.block.attn.name}"
                yield f"{at}.W_O", getters[f"{at}.W_O"]
                if self.has_bias(self.output(path)):
                    yield f"{at}.b_O", getters[f"{at}.b_O"]
            if isinstance(mlp, MLP):
                yield from self._feed_forward_writers(f"{name}.mlp", join(path, mlp.path), mlp)
            elif isinstance(mlp, MoE):
                for e in range(self.cfg.num_experts):
                    out = f"{name}.mlp.experts.{e}.W_out"
                    yield f"{out}.weight", _transposed(getters[f"{out}.weight"])
                    if f"{out}.bias" in getters:
                        yield f"{out}.bias", getters[f"{out}.bias"]
                if mlp.shared:
                    inside = join(path, mlp.path, mlp.shared.path)
                    yield from self._feed_forward_writers(f"{name}.mlp.shared_expert", inside, mlp.shared)

    def _feed_forward_writers(self, name: str, path: str, mlp: MLP) -> Iterator[tuple[str, Get]]:
        yield f"{name}.W_out", self.get(f"{name}.W_out")
        if self.has_bias(join(path, mlp.down)):
            yield f"{name}.b_out", self.get(f"{name}.b_out")

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
        view = self.attn.v.part or Heads(self.cfg.n_kv_heads)
        weight = weight_in_out(self.weights.module(self.value(path)))
        assert weight is not None
        return view.get(torch.arange(weight.shape[1], device="cpu"), Call(nn.Identity(), (), {}))

    def has_bias(self, path: str) -> bool:
        return getattr(self.weights.module(path), "bias", None) is not None

    def affine(self, norm: Norm) -> tuple[Tensor | None, Tensor | None]:
        """What a norm multiplies with, and what it adds, in the type that is computed in."""
        module = self.weights.module(norm.path)
        weight, bias = (None if x is None else precise(x) for x in norm_parameters(module))
        return None if weight is None else weight + norm.kind.offset, bias

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
        for _, path, mlp in self.mlps:
            norms = (block.ln1, block.ln2, block.ln1_post, block.ln2_post)
            paths += [join(path, at) for at in norms if at]
            if attn := block.attn:
                inside = (attn.q.path, attn.k.path, attn.v.path, attn.o, attn.q_norm, attn.k_norm)
                paths += [join(path, attn.path, at) for at in inside if at]
                if attn.sinks:
                    known.add(id(getattr(self.weights.module(join(path, attn.path)), attn.sinks)))
            if isinstance(mlp, MLP):
                paths += [join(path, mlp.path, at) for at in _inside(mlp)]
            elif isinstance(mlp, MoE):
                shared = [join(mlp.shared.path, at) for at in _inside(mlp.shared)] if mlp.shared else []
                paths += [join(path, mlp.path, at) for at in (mlp.router, mlp.experts, mlp.shared_gate, *shared) if at]
        for path in paths:
            known.update(id(parameter) for parameter in self.weights.module(path).parameters())
        return [name for name, parameter in self.weights.model.named_parameters() if id(parameter) not in known]


def _inside(mlp: MLP) -> list[str]:
    """The paths of the layers of a feed-forward module."""
    return [at for at in (mlp.up.path, mlp.gate.path if mlp.gate else None, mlp.down, mlp.ln) if at]


def precise(x: Tensor) -> Tensor:
    """In the type that is computed in: float64, or float32 for half precision and where there is no float64."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return x.to(torch.float32 if half or x.device.type == "mps" else torch.float64)


def norm_parameters(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """The weight and the bias that a norm has."""
    return getattr(module, "weight", None), getattr(module, "bias", None)


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
