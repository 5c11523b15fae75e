"""The feed-forward part: an MLP, or a mixture of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from adapters.attention import Gate, Projection
from adapters.imports import clamp_of
from adapters.linear import OpaqueLayerError, materialized, weight_in_out
from adapters.norms import Norm, norm_points
from adapters.points import (
    Group,
    PointList,
    PointNames,
    Site,
    SiteKind,
    has_module,
    join,
    missing_module_message,
)
from adapters.views import Affine, ExpertRows, FlatRows

# --------------------------------------------------------------------------------------------------
# How the experts of a mixture are stored. transformers keeps all of them in two parameters,
# ``gate_up_proj`` (``up_proj``, where they have no gate: ``has_gate``) and ``down_proj``. A
# family's experts module declares their layout: outputs first or last (``is_transposed``), gate and
# up concatenated or interleaved (``is_concatenated``), with biases or without (``has_bias``). Llama
# 4's module declares nothing: it multiplies the tokens of all experts in one batched product
# (`in_batches`), in which every expert gets every token, times its weight. Where a patch has put a
# list of modules in that place, each expert is one of them, and its projections are linear layers.
# --------------------------------------------------------------------------------------------------


#: The projections of an expert, by HookedTransformer's names: before the activation function,
#: parallel to it, after it.
ExpertPart = Literal["W_gate", "W_in", "W_out"]
#: The paths of an expert's layers from its own module: gate ("" without one), up, down.
Layers = tuple[str, str, str]
#: The layout in which all experts' matrices are one parameter each, ``[(expert d_expert),
#: d_model]``, as DBRX names them.
_STACKED = {"W_gate": "mlp.w1", "W_in": "mlp.v1", "W_out": "mlp.w2"}
#: The names in transformers' own models.
_USUAL: tuple[Layers, ...] = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def sparsemixer_topk(
    logits: Float[Tensor, "row n_experts"], margin: float, n: int
) -> tuple[Float[Tensor, "row chosen"], Integer[Tensor, "row chosen"]]:
    """Return the weights and indices of experts that are chosen one after the other (SparseMixer,
    Liu et al. 2023).

    Each chosen expert has the largest logit of the remaining ones. Its weight is its probability in
    a softmax over the remaining experts with a similar logit. Similar: the difference is at most
    twice the margin times the larger of the chosen logit and the other logit's absolute value.

    Args:
        logits: the logit of each expert.
        margin: see above.
        n: the number of experts to choose.
    """
    remaining = logits
    chosen: list[Tensor] = []
    weights: list[Tensor] = []
    for _ in range(n):
        best, index = remaining.max(-1, keepdim=True)
        distance = (best - logits) / logits.abs().clamp(min=best)
        similar = remaining.masked_fill(distance > 2 * margin, -torch.inf)
        weights.append(similar.softmax(-1).gather(-1, index))
        chosen.append(index)
        remaining = remaining.scatter(-1, index, -torch.inf)
    return torch.cat(weights, -1), torch.cat(chosen, -1)


def sent_to(
    indices: Integer[Tensor, "token chosen"], n_experts: int
) -> Bool[Tensor, "token n_experts"]:
    """Return a mask of the experts that each token is sent to."""
    nobody = torch.zeros(len(indices), n_experts, dtype=torch.bool, device=indices.device)
    return nobody.scatter(-1, indices.long(), True)


def router_matrix(router: nn.Module) -> str:
    """Return the path, inside a router, of the module whose weight computes the logits; "" for the
    router itself, or if there is no such module.
    """
    for path, module in router.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and (not path or weight.ndim == 2):
            return path
    return ""


def are_modules(experts: nn.Module | None) -> bool:
    """Tell whether each expert is a module of its own."""
    return isinstance(experts, nn.ModuleList)


def has_layers(experts: nn.Module, declared: Layers | None) -> bool:
    """Tell whether it is known where each expert's projections are."""
    return not are_modules(experts) or layers_of(experts.get_submodule("0"), declared) is not None


def layers_of(expert: nn.Module, declared: Layers | None = None) -> Layers | None:
    """Return the layers of an expert that is a module; None if their names are unknown.

    Args:
        expert: the module.
        declared: its layers, by the declaration of the mixture.
    """
    for layers in _USUAL if declared is None else (declared,):
        if all(has_module(expert, path) for path in layers):
            return layers
    return None


def expert_layer(
    experts: nn.Module, index: int, part: ExpertPart, declared: Layers | None
) -> nn.Module | None:
    """Return the linear layer of an expert that is a module; None where the experts are stored in
    one parameter.

    Raises:
        RuntimeError: it has no such layer.
    """
    if not are_modules(experts):
        return None
    expert = experts.get_submodule(str(index))
    layers = layers_of(expert, declared)
    if layers is None:
        _, _, down = declared or _USUAL[0]
        raise RuntimeError(missing_module_message(f"{index}.{down} in {type(experts).__name__}"))
    return expert.get_submodule(layers[("W_gate", "W_in", "W_out").index(part)])


def _held(experts: nn.Module, name: str) -> Tensor:
    """Return a module's tensor for all its experts.

    Raises:
        TypeError: it holds no such tensor.
    """
    parameter = materialized(experts, name)
    if not isinstance(parameter, Tensor):
        raise TypeError(
            f"{type(experts).__name__} does not keep its experts as transformers does: it has no"
            f" {name}"
        )
    return parameter


def stacked(experts: nn.Module) -> dict[str, Float[Tensor, "expert d_expert d_model"]]:
    """Return the experts' projections by name if each one is stored as one parameter for all
    experts; otherwise an empty dict.
    """
    if are_modules(experts) or hasattr(experts, "down_proj"):
        return {}
    known = dict(experts.named_parameters())
    if not set(_STACKED.values()) <= known.keys():
        return {}
    shape = (experts.num_experts, -1)
    return {part: known[name].unflatten(0, shape) for part, name in _STACKED.items()}


def keeps_experts(experts: nn.Module) -> bool:
    """Tell whether a module stores experts in a known layout."""
    usual = all(hasattr(experts, name) for name in (first_projection(experts), "down_proj"))
    return are_modules(experts) or usual or bool(stacked(experts))


def in_batches(experts: nn.Module) -> bool:
    """Tell whether every expert gets every token, times its weight, in one batched product
    ``[expert, token, d]``.
    """
    if are_modules(experts) or hasattr(experts, "is_transposed"):
        return False
    return hasattr(experts, "down_proj")


def is_transposed(experts: nn.Module) -> bool:
    """Tell whether their parameters are ``[expert, d_in, d_out]``, as for batched products."""
    return in_batches(experts) or bool(experts.is_transposed)


def has_gate(experts: nn.Module, declared: Layers | None = None) -> bool:
    """Tell whether the experts have a gate."""
    if are_modules(experts):
        layers = layers_of(experts.get_submodule("0"), declared)
        return layers is None or bool(layers[0])
    return getattr(experts, "has_gate", True) is not False


def first_projection(experts: nn.Module) -> str:
    """Return the name of the parameter that makes the activation function's input and the
    projection parallel to it.
    """
    return "gate_up_proj" if has_gate(experts) else "up_proj"


def gate_and_up(experts: nn.Module, x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Split ``gate_up_proj``, or its output, into gate and up, as views.

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
    """Join gate and up along the last axis: the inverse of `gate_and_up`."""
    if in_batches(experts) or experts.is_concatenated:
        return torch.cat([gate, up], dim=-1)
    return torch.stack([gate, up], dim=-1).flatten(-2)


def width(experts: nn.Module) -> int:
    """Return the number of neurons of an expert."""
    if held := stacked(experts):
        return held["W_out"].shape[1]
    down = experts.down_proj
    assert isinstance(down, Tensor)
    return down.shape[1 if is_transposed(experts) else 2]


def expert_weight(
    experts: nn.Module, index: int, part: ExpertPart, declared: Layers | None = None
) -> Float[Tensor, "d_out d_in"]:
    """Return one projection of one expert, ``[d_out, d_in]`` as in a linear layer: a view.

    Raises:
        OpaqueLayerError: it is not a plain matrix.
    """
    if (layer := expert_layer(experts, index, part, declared)) is not None:
        weight = weight_in_out(layer)
        if weight is None:
            raise OpaqueLayerError(
                f"{part} of expert {index} is a {type(layer).__name__}, whose weight is not a plain"
                " matrix"
            )
        return weight.T
    if every := stacked(experts):
        weight = every[part][index]
        return weight.mT if part == "W_out" else weight
    name = "down_proj" if part == "W_out" else first_projection(experts)
    weight = _held(experts, name)[index]
    if is_transposed(experts):
        weight = weight.mT
    if part == "W_out" or not has_gate(experts):
        return weight
    gate, up = gate_and_up(experts, weight, dim=0)
    return up if part == "W_in" else gate


def has_bias(experts: nn.Module, part: ExpertPart, declared: Layers | None) -> bool:
    """Tell whether a projection of the experts has a bias."""
    layer = expert_layer(experts, 0, part, declared)
    if layer is not None:
        return getattr(layer, "bias", None) is not None
    return not (in_batches(experts) or stacked(experts)) and bool(experts.has_bias)


def expert_bias(
    experts: nn.Module, index: int, part: ExpertPart, declared: Layers | None = None
) -> Float[Tensor, " d_out"]:
    """Return the bias of one projection of one expert, ``[d_out]``: a view."""
    if (layer := expert_layer(experts, index, part, declared)) is not None:
        return materialized(layer, "bias")
    if part == "W_out":
        return _held(experts, "down_proj_bias")[index]
    both = _held(experts, f"{first_projection(experts)}_bias")[index]
    if not has_gate(experts):
        return both
    gate, up = gate_and_up(experts, both)
    return up if part == "W_in" else gate


def activated(
    act_fn: str | None, pre: Tensor, linear: Tensor | None, config: PreTrainedConfig
) -> Tensor | None:
    """Apply an activation function and multiply by the other projection; return None for an unknown
    name.

    Args:
        act_fn: its name, as in `cfg.act_fn`.
        pre: the input of the activation function.
        linear: the other projection; None without a gate.
        config: the model's configuration, which contains the clamp limit of gpt-oss's function.
    """
    if act_fn == "clamped_swiglu" and linear is not None:
        limit, alpha = clamp_of(config)
        clamped = pre.clamp(max=limit)
        return (linear.clamp(-limit, limit) + 1) * clamped * (alpha * clamped).sigmoid()
    if act_fn in ("solu", "solu_ln"):
        neurons = pre * pre.softmax(-1)
    elif act_fn is None or act_fn not in ACT2FN:
        return None
    else:
        neurons = ACT2FN[act_fn](pre)
    return neurons if linear is None else neurons * linear


@dataclass(frozen=True)
class MLP:
    """A feed-forward module: the layers before and after its activation function, and its gate.

    Attributes:
        path: the module, relative to the block ("" if its layers belong directly to the block).
        up: the projection before the activation function; in a gated MLP, the linear projection
            parallel to the gate.
        down: the projection after it, relative to `path`.
        gate: for a gated MLP, the projection that goes through the activation function.
        ln: a norm of the activated (and gated) neurons, before `down` (SoLU, BitNet), relative to
            `path`.
        flat: the preceding norm, `up` and `down` work on ``(batch pos)`` rows.
        given: the block argument that multiplies the activated neurons (Gemma 4's per-layer
            inputs), if the layers belong directly to the block. `hook_pre_linear` shows it.
        activation: for an activation function without a name, its module, relative to `path`; or
            the name of a method that is applied before the named function (``_gaussian_topk``,
            Gemma 3n); or a factor that multiplies the function's input (Falcon-H1).
    """

    path: str
    up: Projection
    down: str
    gate: Projection | None = None
    ln: Norm | None = None
    flat: bool = False
    activation: str | float | None = None
    given: str | None = None

    def neurons(
        self,
        pre: Tensor,
        linear: Tensor | None,
        module: nn.Module,
        act_fn: str | None,
        config: PreTrainedConfig,
    ) -> Tensor | None:
        """Compute the activated neurons from the outputs of its first layers, before `ln` and
        `down`; None for an unknown function.

        Args:
            pre, linear, act_fn, config: as for `activated`; `act_fn` is used if the MLP declares no
                module for it.
            module: the MLP's.
        """
        if isinstance(self.activation, str):
            method = getattr(type(module), self.activation, None)
            if method is None:
                neurons: Tensor = module.get_submodule(self.activation).forward(pre)
                return neurons if linear is None else neurons * linear
            pre = method(module, pre)
        elif self.activation is not None:
            pre = pre * self.activation
        return activated(act_fn, pre, linear, config)

    @property
    def submodules(self) -> dict[str, str]:
        """Return its layers and its norm by role, with paths relative to `path`."""
        roles = {"its gate made": self.gate.path} if self.gate else {}
        roles["its neurons made"] = self.up.path
        if self.ln:
            roles["its neurons normed"] = self.ln.path
        return roles | {"its output made": self.down}


#: The meaning of an element of a router's output.
RouterElement = Literal["logits", "weights", "indices", "every weight", ""]
#: The output of most routers.
CHOICE: tuple[RouterElement, ...] = ("logits", "weights", "indices")
#: The quantity by which a router compares the experts.
ChosenBy = Literal["probabilities", "corrected probabilities", "logits", "scores", "in turn"]


@dataclass(frozen=True)
class MoE:
    """A mixture of experts: the router, its choice, and the experts.

    Attributes:
        path: the module, relative to the block.
        router: the module, relative to `path`, that chooses among the experts for each of the
            ``(batch pos)`` rows.
        router_returns: the elements of its output, in order: the experts' ``logits`` (or another
            score), the ``weights`` and ``indices`` of the chosen experts, and "" for anything else.
            Only ``logits`` (DBRX, Mixtral's own code): the forward of the module at `path` makes
            the choice. ``every weight``, the weights of all experts (Llama 4): every expert gets
            every token, times its weight, and `experts` works on ``(expert batch pos)`` rows.
        experts: the module, relative to `path`, that holds the experts' weights (see
            `adapters.feed_forward`).
        layers: if each expert is a separate module, the paths of its projections in it: gate, up,
            down; None: the usual names.
        chosen_by: the quantity by which the router compares the experts: their ``probabilities``, a
            softmax over all; ``corrected probabilities``, chosen by groups or with a bias for each
            expert, so that the chosen experts need not have the largest weights; their ``logits``,
            followed by a softmax over the chosen experts; ``scores``, a function of each logit
            alone (a sigmoid), possibly corrected too; or ``in turn``, one after the other, weighted
            among experts with similar logits (see `adapters.feed_forward.sparsemixer_topk`).
        margin: for ``in turn``: the largest distance at which logits count as similar.
        factor: the factor that multiplies the sum of the chosen experts.
        shared: an expert that every token is sent to; its path is relative to `path`.
        shared_transform: the transform of its result: a `Gate`, whose projection is relative to
            `path`, an `Affine` with a factor, or one after the other.
        flat: the result of the mixture is ``(batch pos)`` rows.
    """

    path: str
    router: str
    experts: str = "experts"
    chosen_by: ChosenBy = "probabilities"
    margin: float = 0.0
    router_returns: tuple[RouterElement, ...] = CHOICE
    factor: float = 1.0
    shared: MLP | None = None
    shared_transform: tuple[Gate | Affine, ...] = ()
    layers: Layers | None = None
    flat: bool = False

    @property
    def submodules(self) -> dict[str, str]:
        """Return its modules by role, with paths relative to `path`."""
        roles = {"experts chosen": self.router, "experts kept": self.experts}
        if self.shared_gate:
            roles["the shared expert's gate made"] = self.shared_gate.projection.path
        if self.shared:
            for role, path in self.shared.submodules.items():
                roles[f"of the shared expert, {role}"] = join(self.shared.path, path)
        return roles

    def shares(
        self, logits: Float[Tensor, "token n_experts"], chosen: Bool[Tensor, "token n_experts"]
    ) -> Float[Tensor, "token n_experts"]:
        """Compute the weights of the chosen experts' results, up to a factor for each token; zero
        for the other experts.
        """
        if self.chosen_by == "in turn":
            weights, indices = sparsemixer_topk(logits, self.margin, int(chosen.sum(-1).max()))
            return torch.zeros_like(logits).scatter(-1, indices, weights)
        if self.chosen_by == "scores":
            return logits.sigmoid() * chosen
        return logits.masked_fill(~chosen, -torch.inf).softmax(-1) * chosen

    def best(
        self, logits: Float[Tensor, "token n_experts"], n: int
    ) -> Bool[Tensor, "token n_experts"]:
        """Return a mask of the chosen experts, by the logits alone."""
        if self.chosen_by == "in turn":
            _, indices = sparsemixer_topk(logits, self.margin, n)
        else:
            indices = logits.topk(n).indices
        return sent_to(indices, logits.shape[-1])

    @property
    def may_correct(self) -> bool:
        """Tell whether anything besides the logits may affect the choice."""
        return self.chosen_by == "corrected probabilities" or (
            self.chosen_by == "scores" and not self.in_batches
        )

    def made_by(
        self, experts: nn.Module, e: int, post: Float[Tensor, "row d_expert"]
    ) -> Float[Tensor, "row d_model"]:
        """Compute an expert's output from its neurons, in their dtype.

        Args:
            experts: the module that holds all experts.
            e: the index of the expert.
            post: the input of its last layer.
        """
        weight = expert_weight(experts, e, "W_out", self.layers)
        output = post @ weight.detach().to(post.dtype).T
        if not has_bias(experts, "W_out", self.layers):
            return output
        bias = expert_bias(experts, e, "W_out", self.layers)
        return output + bias.detach().to(post.dtype)

    @property
    def in_batches(self) -> bool:
        """Tell whether every expert gets every token."""
        return "every weight" in self.router_returns

    @property
    def chooses(self) -> str:
        """Return the path, relative to `path`, of the module whose forward makes the choice."""
        return "" if self.router_returns == ("logits",) else self.router

    @property
    def shared_factor(self) -> float:
        """Return the factor of the shared expert's result."""
        return math.prod(link.factor for link in self.shared_transform if isinstance(link, Affine))

    @property
    def shared_gate(self) -> Gate | None:
        """Return the gate of the shared expert's result."""
        for link in self.shared_transform:
            if isinstance(link, Gate):
                return link
        return None


#: Sites by the names of their activations.
Sites = dict[str, Site]
#: The activations of an expert with a gate, and without.
_GATED = ("in", "gate", "pre", "post", "out")
_UNGATED = ("in", "pre", "post", "out")


def _expert_sites(path: str, e: int, experts: nn.Module | None, layers: Layers | None) -> Sites:
    """Return the sites of an expert's activations: inside the module that holds all experts, or in
    the expert's own module.
    """
    if not are_modules(experts):
        parts = _GATED if experts is None or has_gate(experts) else _UNGATED
        in_one_product = experts is not None and in_batches(experts)
        kind: SiteKind = "batched experts" if in_one_product else "experts"
        return {part: Site(path, kind, f"{e}.{part}") for part in parts}
    assert experts is not None
    own = join(path, str(e))
    sites = {"in": Site(own, "input")}
    paths = layers_of(experts.get_submodule(str(e)), layers)
    if paths is not None:
        gate, up, down = paths
        if gate:
            sites["gate"] = Site(join(own, gate), "output")
        sites["pre"] = Site(join(own, up), "output")
        sites["post"] = Site(join(own, down), "input")
    return sites | {"out": Site(own, "output")}


def mlp_points(points: PointList, mlp: MLP, axis: str = "d_mlp") -> None:
    """Add the points inside one feed-forward module.

    Args:
        points: the list that they are added to, with the prefix and the path of the module.
        mlp: the declaration.
        axis: the axis of its neurons.
    """
    wide = f"batch {points.pos} {axis if mlp.up.width is None else mlp.up.width}"
    rows = replace(points, flat=mlp.flat)
    up = mlp.up
    gate = mlp.gate
    if gate:
        rows.add("hook_pre", gate.path, gate.view, wide, aliases=("gate.hook_out",))
        rows.add("hook_pre_linear", up.path, up.view, wide, aliases=("in.hook_out",))
    else:
        rows.add("hook_pre", up.path, up.view, wide, aliases=("in.hook_out",))
    if mlp.given:
        rows.add("hook_pre_linear", points.site("", "input", mlp.given), axes=wide)
    if mlp.ln:
        rows.add("hook_mid", points.input(mlp.ln.path), axes=wide)
        norm_points(points, "ln", mlp.ln, axes=wide)
    rows.add("hook_post", points.input(mlp.down), axes=wide, aliases=("out.hook_in",))


def mixture_points(
    points: PointList, moe: MoE, num_experts: int, experts: nn.Module | None
) -> None:
    """Add the points inside a mixture of experts.

    Args:
        points: as for `mlp_points`.
        moe: the declaration.
        num_experts: the number of experts.
        experts: the module that holds them, if the model has it.
    """

    def add(
        name: str, site: Site | str, axis: str, group: Group = "standard", aliases: PointNames = ()
    ) -> None:
        axes, rows = f"batch {points.pos} {axis}", points.rows
        points.add(name, site, FlatRows(), axes, group=group, aliases=aliases, sources=rows)

    sites = _routing(points, moe, are_modules(experts))
    add("hook_router_logits", sites["logits"], "n_experts", "extra", ("gate.hook_out",))
    if "weights" in sites:
        add("hook_expert_weights", sites["weights"], "n_experts")
    if "weights of the chosen" in sites:
        chosen = sites["weights of the chosen"]
        add("hook_topk_weights", chosen, "experts_per_token", "extra")
    add("hook_expert_indices", sites["indices"], "experts_per_token")
    _add_experts(points, moe, num_experts, experts)
    if moe.shared:
        shared = points.inside("shared_expert", moe.shared.path)
        mlp_points(shared, moe.shared, "d_shared_expert")
        add("shared_expert.hook_out", moe.shared.path, "d_model", "extra")
    if moe.shared_gate:
        gate = moe.shared_gate.projection.path
        add("shared_expert_gate.hook_out", gate, "1", "extra")


def _routing(points: PointList, moe: MoE, of_modules: bool) -> Sites:
    """Return the sites of a router's logits, its choice and its weights.

    As in HookedTransformer, an expert's weight is its probability before the best experts are
    chosen. If the choice comes before the softmax, it is the factor of the expert's output: zero
    for experts that are not chosen.

    Args:
        points, moe: as for `mixture_points`.
        of_modules: the experts are separate modules, which receive neither indices nor weights.
    """
    returned = {
        element: points.site(moe.router, "output", index)
        for index, element in enumerate(moe.router_returns)
    }
    chooses = partial(points.site, moe.chooses)
    sites: Sites = {}
    if moe.in_batches:
        sites["weights"] = returned["every weight"]
    elif moe.chosen_by.endswith("probabilities"):
        sites["logits"] = chooses("softmax", "scores")
        sites["weights"] = chooses("softmax", "pattern")
    elif "weights" in returned:
        sites["weights"] = chooses("router", "weights")
    is_matrix = moe.chosen_by != "logits"
    sites.setdefault("logits", chooses("router", "product" if is_matrix else "logits"))
    receives_choice = not (moe.in_batches or of_modules)
    indices = chooses("router", "indices")
    if receives_choice:
        indices = points.site(moe.experts, "input", "top_k_index")
    if "weights" in returned:
        sites["weights of the chosen"] = returned["weights"]
    elif receives_choice:
        sites["weights of the chosen"] = points.site(moe.experts, "input", "top_k_weights")
    sites["indices"] = returned.get("indices", indices)
    return sites


def _add_experts(points: PointList, moe: MoE, num_experts: int, experts: nn.Module | None) -> None:
    """Add the points inside each expert."""
    path = join(points.module, moe.experts)
    view = ExpertRows() if are_modules(experts) else None
    for e in range(num_experts):
        for part, site in _expert_sites(path, e, experts, moe.layers).items():
            # Its rows belong to no batch: they are cached only when named.
            axes = "row d_model" if part in ("in", "out") else "row d_expert"
            points.add(f"experts.{e}.hook_{part}", site, view, axes, group="extra")
