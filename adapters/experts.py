"""How the experts of a mixture are kept.

transformers keeps all of them in two parameters, ``gate_up_proj`` (``up_proj``, where they have no gate: ``has_gate``)
and ``down_proj``. A family's experts module says of
itself how they lie there: with the outputs first or last (``is_transposed``), gate and up one after the other or in
turn (``is_concatenated``), with biases or without (``has_bias``).

Llama 4's says nothing: it multiplies the tokens of all experts in one product of batches (`in_batches`), in which every
expert is given every token, times its weight.

Where a patch has put a list of modules in that place, each expert is one of them, and its projections are linear
layers.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from adapters.linear import weight_in_out
from adapters.offloaded import materialized
from adapters.paths import has_module, missing_module_message

#: The projections of an expert, by HookedTransformer's names: before the activation function, parallel to it, after it.
ExpertPart = Literal["W_gate", "W_in", "W_out"]
#: The paths of an expert's layers from its own module: gate ("" without one), up, down.
Layers = tuple[str, str, str]
#: Where all experts' matrices are one parameter each, ``[(expert d_expert), d_model]``, as DBRX names them.
_STACKED = {"W_gate": "mlp.w1", "W_in": "mlp.v1", "W_out": "mlp.w2"}
#: As transformers' own models name them.
_USUAL: tuple[Layers, ...] = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def sparsemixer_topk(
    logits: Float[Tensor, "row n_experts"], margin: float, n: int
) -> tuple[Float[Tensor, "row chosen"], Integer[Tensor, "row chosen"]]:
    """The weights and indices of experts that are chosen one after the other (SparseMixer, Liu et al. 2023).

    Each has the largest logit of those that are left. Its weight is its share in a softmax over those of them that come
    close: within twice the margin of it, relative to the larger of it and their own size.

    Args:
        logits: of each expert.
        margin: see above.
        n: how many are chosen.
    """
    left, chosen, weights = logits, list[Tensor](), list[Tensor]()
    for _ in range(n):
        best, index = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * margin
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, index))
        chosen.append(index)
        left = left.scatter(-1, index, -torch.inf)
    return torch.cat(weights, -1), torch.cat(chosen, -1)


def router_matrix(router: nn.Module) -> str:
    """The path in a router of the module whose weight makes the logits; "" for the router itself, or without any."""
    if isinstance(getattr(router, "weight", None), Tensor):
        return ""
    weights = ((path, getattr(module, "weight", None)) for path, module in router.named_modules())
    return next((path for path, weight in weights if isinstance(weight, Tensor) and weight.ndim == 2), "")


def are_modules(experts: nn.Module | None) -> bool:
    """Whether each expert is a module of its own."""
    return isinstance(experts, nn.ModuleList)


def has_layers(experts: nn.Module, declared: Layers | None = None) -> bool:
    """Whether it is known where each expert's projections are."""
    return not are_modules(experts) or layers_of(experts.get_submodule("0"), declared) is not None


def layers_of(expert: nn.Module, declared: Layers | None = None) -> Layers | None:
    """The layers of an expert that is a module; None where they have unknown names.

    Args:
        expert: the module.
        declared: what its mixture's declaration says of them.
    """
    known = _USUAL if declared is None else (declared,)
    return next((layers for layers in known if all(has_module(expert, path) for path in layers)), None)


def expert_layer(experts: nn.Module, index: int, part: ExpertPart, declared: Layers | None = None) -> nn.Module | None:
    """The linear layer of an expert that is a module; None where the experts are kept in one parameter.

    Raises:
        RuntimeError: it has no such layer.
    """
    if not are_modules(experts):
        return None
    expert = experts.get_submodule(str(index))
    layers = layers_of(expert, declared)
    if layers is None:
        raise RuntimeError(missing_module_message(f"{index}.{(declared or _USUAL[0])[2]} in {type(experts).__name__}"))
    return expert.get_submodule(layers[("W_gate", "W_in", "W_out").index(part)])


def _held(experts: nn.Module, name: str) -> Tensor:
    """What a module holds for all its experts.

    Raises:
        TypeError: it holds no such tensor.
    """
    found = materialized(experts, name)
    if not isinstance(found, Tensor):
        raise TypeError(f"{type(experts).__name__} does not keep its experts as transformers does: it has no {name}")
    return found


def stacked(experts: nn.Module) -> dict[str, Float[Tensor, "expert d_expert d_model"]]:
    """The projections of all experts, where each is one parameter for all of them; empty where it is not."""
    if are_modules(experts) or hasattr(experts, "down_proj"):
        return {}
    known = dict(experts.named_parameters())
    if not set(_STACKED.values()) <= known.keys():
        return {}
    return {part: known[name].unflatten(0, (experts.num_experts, -1)) for part, name in _STACKED.items()}


def keeps_experts(experts: nn.Module) -> bool:
    """Whether a module holds experts in one of the ways that are known."""
    usual = all(hasattr(experts, name) for name in (first_projection(experts), "down_proj"))
    return are_modules(experts) or usual or bool(stacked(experts))


def in_batches(experts: nn.Module) -> bool:
    """Whether every expert is given every token, times its weight, in one product ``[expert, token, d]``."""
    flags = hasattr(experts, "is_transposed") or not hasattr(experts, "down_proj")
    return not are_modules(experts) and not flags


def is_transposed(experts: nn.Module) -> bool:
    """Whether their parameters are ``[expert, d_in, d_out]``, as products of batches take them."""
    return in_batches(experts) or bool(experts.is_transposed)


def has_gate(experts: nn.Module, declared: Layers | None = None) -> bool:
    """Whether the experts have a gate."""
    if are_modules(experts):
        found = layers_of(experts.get_submodule("0"), declared)
        return found is None or bool(found[0])
    return getattr(experts, "has_gate", True) is not False


def first_projection(experts: nn.Module) -> str:
    """The name of the parameter that holds the input of the activation function, and of what is parallel to it."""
    return "gate_up_proj" if has_gate(experts) else "up_proj"


def gate_and_up(experts: nn.Module, x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """The two halves of what ``gate_up_proj`` is or makes, as views.

    Args:
        experts: the module that holds the experts.
        x: a tensor with both along an axis.
        dim: that axis.
    """
    if in_batches(experts) or experts.is_concatenated:
        gate, up = x.chunk(2, dim=dim)
        return gate, up
    x = x.movedim(dim, -1)
    return x[..., ::2].movedim(-1, dim), x[..., 1::2].movedim(-1, dim)


def joined(experts: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """The reverse of `gate_and_up`, along the last axis."""
    if in_batches(experts) or experts.is_concatenated:
        return torch.cat([gate, up], dim=-1)
    return torch.stack([gate, up], dim=-1).flatten(-2)


def width(experts: nn.Module) -> int:
    """How many neurons an expert has."""
    if held := stacked(experts):
        return held["W_out"].shape[1]
    down = experts.down_proj
    assert isinstance(down, Tensor)
    return down.shape[1 if is_transposed(experts) else 2]


def expert_weight(
    experts: nn.Module, index: int, part: ExpertPart, declared: Layers | None = None
) -> Float[Tensor, "d_out d_in"]:
    """One projection of one expert, ``[d_out, d_in]`` as in a linear layer: a view.

    Raises:
        TypeError: it is no plain matrix.
    """
    if (layer := expert_layer(experts, index, part, declared)) is not None:
        weight = weight_in_out(layer)
        if weight is None:
            raise TypeError(f"{part} of expert {index} is a {type(layer).__name__}, whose weight is not a plain matrix")
        return weight.T
    if every := stacked(experts):
        return every[part][index].mT if part == "W_out" else every[part][index]
    if part == "W_out":
        weight = _held(experts, "down_proj")[index]
        return weight.mT if is_transposed(experts) else weight
    both = _held(experts, first_projection(experts))[index]
    if not has_gate(experts):
        return both.mT if is_transposed(experts) else both
    return gate_and_up(experts, both.mT if is_transposed(experts) else both, dim=0)[part == "W_in"]


def has_bias(experts: nn.Module, part: ExpertPart, declared: Layers | None = None) -> bool:
    """Whether a projection of the experts has a bias."""
    layer = expert_layer(experts, 0, part, declared)
    if layer is None and (in_batches(experts) or stacked(experts)):
        return False
    return bool(experts.has_bias) if layer is None else getattr(layer, "bias", None) is not None


def expert_bias(
    experts: nn.Module, index: int, part: ExpertPart, declared: Layers | None = None
) -> Float[Tensor, " d_out"]:
    """The bias of one projection of one expert, ``[d_out]``: a view."""
    if (layer := expert_layer(experts, index, part, declared)) is not None:
        bias: Tensor = materialized(layer, "bias")
        return bias
    if part == "W_out":
        return _held(experts, "down_proj_bias")[index]
    both = _held(experts, f"{first_projection(experts)}_bias")[index]
    return gate_and_up(experts, both)[part == "W_in"] if has_gate(experts) else both
