"""The feed-forward part: an MLP, or a mixture of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from adapters.attention import Gate, Projection
from adapters.imports import clamp_of
from adapters.linear import materialized, weight_in_out
from adapters.norms import Norm, norm_points
from adapters.points import Group, PointList, Site, SiteKind, has_module, join, missing_module_message
from adapters.views import Affine, Composed, ExpertRows, FlatRows, View

# ----------------------------------------------------------------------------------------------------------------------
# How the experts of a mixture are kept.
#
# transformers keeps all of them in two parameters, ``gate_up_proj`` (``up_proj``, where they have no gate:
# ``has_gate``) and ``down_proj``. A family's experts module says of
# itself how they lie there: with the outputs first or last (``is_transposed``), gate and up one after the other or in
# turn (``is_concatenated``), with biases or without (``has_bias``).
#
# Llama 4's says nothing: it multiplies the tokens of all experts in one product of batches (`in_batches`), in which
# every expert is given every token, times its weight.
#
# Where a patch has put a list of modules in that place, each expert is one of them, and its projections are linear
# layers.
# ----------------------------------------------------------------------------------------------------------------------


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


def sent_to(indices: Integer[Tensor, "token chosen"], n_experts: int) -> Bool[Tensor, "token n_experts"]:
    """Which experts each token is sent to."""
    nobody = torch.zeros(len(indices), n_experts, dtype=torch.bool, device=indices.device)
    return nobody.scatter(-1, indices.long(), True)


def router_matrix(router: nn.Module) -> str:
    """The path in a router of the module whose weight makes the logits; "" for the router itself, or without any."""
    if isinstance(getattr(router, "weight", None), Tensor):
        return ""
    weights = ((path, getattr(module, "weight", None)) for path, module in router.named_modules())
    return next((path for path, weight in weights if isinstance(weight, Tensor) and weight.ndim == 2), "")


def are_modules(experts: nn.Module | None) -> bool:
    """Whether each expert is a module of its own."""
    return isinstance(experts, nn.ModuleList)


def has_layers(experts: nn.Module, declared: Layers | None) -> bool:
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


def expert_layer(experts: nn.Module, index: int, part: ExpertPart, declared: Layers | None) -> nn.Module | None:
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
    held = _held(experts, "down_proj" if part == "W_out" else first_projection(experts))[index]
    held = held.mT if is_transposed(experts) else held
    if part == "W_out" or not has_gate(experts):
        return held
    return gate_and_up(experts, held, dim=0)[part == "W_in"]


def has_bias(experts: nn.Module, part: ExpertPart, declared: Layers | None) -> bool:
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


def activated(act_fn: str | None, pre: Tensor, linear: Tensor | None, config: PreTrainedConfig) -> Tensor | None:
    """What an activation function makes of what enters it and of the other projection; None for an unknown name.

    Args:
        act_fn: its name, as `cfg.act_fn` says it.
        pre: what enters it.
        linear: what is multiplied with that; None without a gate.
        config: the model's, which bounds gpt-oss's.
    """
    if act_fn == "clamped_swiglu" and linear is not None:
        limit, alpha = clamp_of(config)
        clamped = pre.clamp(max=limit)
        return (linear.clamp(-limit, limit) + 1) * clamped * (alpha * clamped).sigmoid()
    if act_fn in ("solu", "solu_ln"):
        made = pre * pre.softmax(-1)
    elif act_fn is None or act_fn not in ACT2FN:
        return None
    else:
        made = ACT2FN[act_fn](pre)
    return made if linear is None else made * linear


@dataclass(frozen=True)
class MLP:
    """A feed-forward module: the layers before and after its activation function, and its gate.

    Attributes:
        path: the module, relative to the block ("" where its layers stand in the block itself).
        up: the projection before the activation function (of a gated MLP: the linear one parallel to the gate).
        down: the projection after it, relative to `path`.
        gate: for a gated MLP, the projection that goes through the activation function.
        ln: a norm between what the activation function and the gate make and `down` (SoLU, BitNet), relative to
            `path`.
        flat: the norm before it, `up` and `down` work on ``(batch pos)`` rows.
        given: the argument of the block that its activated neurons are multiplied with (the inputs per layer of
            Gemma 4), where its layers stand in the block itself: `hook_pre_linear` shows it.
        activation: the module that is its activation function, relative to `path`, where that has no name; or a method
            of its own that its neurons go through before the one that has a name (``_gaussian_topk``, Gemma 3n); or
            what they are multiplied with before it (Falcon-H1).
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
        self, pre: Tensor, linear: Tensor | None, module: nn.Module, act_fn: str | None, config: PreTrainedConfig
    ) -> Tensor | None:
        """What it makes of what its first layers put out, before `ln` and `down`; None of an unknown function.

        Args:
            pre, linear, act_fn, config: as for `activated`; `act_fn` is that of a model whose MLPs name no module.
            module: the MLP's.
        """
        if not isinstance(self.activation, str):
            return activated(act_fn, pre if self.activation is None else pre * self.activation, linear, config)
        if (before := getattr(type(module), self.activation, None)) is not None:
            return activated(act_fn, before(module, pre), linear, config)
        made: Tensor = module.get_submodule(self.activation).forward(pre)
        return made if linear is None else made * linear

    @property
    def submodules(self) -> dict[str, str]:
        """The layers and the norm that play its parts, relative to `path`, by what they do."""
        gate = {"its gate made": self.gate.path} if self.gate else {}
        norm = {"its neurons normed": self.ln.path} if self.ln else {}
        return {**gate, "its neurons made": self.up.path, **norm, "its output made": self.down}


#: What an element is of what a router returns.
RouterElement = Literal["logits", "weights", "indices", "every weight", ""]
#: What most routers return.
CHOICE: tuple[RouterElement, ...] = ("logits", "weights", "indices")
#: What a router compares the experts by.
ChosenBy = Literal["probabilities", "corrected probabilities", "logits", "scores", "in turn"]


@dataclass(frozen=True)
class MoE:
    """A mixture of experts: the router, how it chooses, and the experts.

    Attributes:
        path: the module, relative to the block.
        router: the module, relative to `path`, that chooses among the experts for each of the ``(batch pos)`` rows.
        router_returns: what the elements of its output are, in order: the experts' ``logits``, or another score; the
            ``weights`` and ``indices`` of the chosen ones; "", another. ``logits`` alone (DBRX, Mixtral's own code):
            the choice is made in the forward of the module at `path`. ``every weight``, of all experts (Llama 4):
            every expert is given every token, times its weight, and `experts` works on ``(expert batch pos)`` rows.
        experts: the module, relative to `path`, that holds the experts' weights (see `adapters.feed_forward`).
        layers: where each expert is a module of its own, the paths in it of its projections: gate, up, down; None: the
            usual names.
        chosen_by: what the router compares the experts by: their ``probabilities``, a softmax over all; ``corrected
            probabilities``, by groups, or with a term of each expert's own, so that the chosen ones are not those of
            the largest weights; their ``logits``, with a softmax over the chosen ones afterwards; ``scores``, each made
            from its logit alone (a sigmoid), perhaps corrected so, too; or ``in turn``, each among those that come
            close to it (see `adapters.feed_forward.sparsemixer_topk`).
        margin: of those that are chosen in turn: how close the others have to come.
        factor: what the sum of the chosen experts is multiplied with.
        shared: an expert that every token is sent to; its path is relative to `path`.
        shared_transform: what its result goes through: a `Gate`, whose projection is relative to `path`, an `Affine`
            with a factor, or one after the other.
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
        """What plays its parts, relative to `path`, by what it does."""
        found = {"experts chosen": self.router, "experts kept": self.experts}
        if self.shared_gate:
            found["the shared expert's gate made"] = self.shared_gate.projection.path
        shared = self.shared.submodules.items() if self.shared else ()
        return found | {
            f"of the shared expert, {what}": join(self.shared.path, at) for what, at in shared if self.shared
        }

    def shares(
        self, logits: Float[Tensor, "token n_experts"], chosen: Bool[Tensor, "token n_experts"]
    ) -> Float[Tensor, "token n_experts"]:
        """What the results of the chosen experts are weighted with, up to a number for each token; zero of others."""
        if self.chosen_by == "in turn":
            weights, indices = sparsemixer_topk(logits, self.margin, int(chosen.sum(-1).max()))
            return torch.zeros_like(logits).scatter(-1, indices, weights)
        if self.chosen_by == "scores":
            return logits.sigmoid() * chosen
        return logits.masked_fill(~chosen, -torch.inf).softmax(-1) * chosen

    def best(self, logits: Float[Tensor, "token n_experts"], n: int) -> Bool[Tensor, "token n_experts"]:
        """Which experts it chooses, where nothing but their logits is looked at."""
        one_by_one = self.chosen_by == "in turn"
        indices = sparsemixer_topk(logits, self.margin, n)[1] if one_by_one else logits.topk(n).indices
        return sent_to(indices, logits.shape[-1])

    @property
    def may_correct(self) -> bool:
        """Something beside the logits may have a part in the choice."""
        return self.chosen_by == "corrected probabilities" or (self.chosen_by == "scores" and not self.in_batches)

    def made_by(self, experts: nn.Module, e: int, post: Float[Tensor, "row d_expert"]) -> Float[Tensor, "row d_model"]:
        """What an expert makes of its neurons, in their type.

        Args:
            experts: the module that holds all.
            e: which one.
            post: what enters its last layer.
        """
        made = post @ expert_weight(experts, e, "W_out", self.layers).detach().to(post.dtype).T
        if not has_bias(experts, "W_out", self.layers):
            return made
        return made + expert_bias(experts, e, "W_out", self.layers).detach().to(post.dtype)

    @property
    def in_batches(self) -> bool:
        """Every expert is given every token."""
        return "every weight" in self.router_returns

    @property
    def chooses(self) -> str:
        """The path, relative to `path`, of the module in whose forward the choice is made."""
        return "" if self.router_returns == ("logits",) else self.router

    @property
    def shared_factor(self) -> float:
        """What the result of the shared expert is multiplied with."""
        return math.prod(each.factor for each in self.shared_transform if isinstance(each, Affine))

    @property
    def shared_gate(self) -> Gate | None:
        """The gate that the result of the shared expert goes through."""
        return next((each for each in self.shared_transform if isinstance(each, Gate)), None)


#: What is seen of an expert without a gate.
_UNGATED = ("in", "pre", "post", "out")


def _expert_sites(path: str, e: int, experts: nn.Module | None, layers: Layers | None) -> dict[str, Site]:
    """Where the activations of an expert stand: inside the module that holds all, or in a module of its own."""
    if not are_modules(experts):
        parts = ("in", "gate", "pre", "post", "out") if experts is None or has_gate(experts) else _UNGATED
        kind: SiteKind = "batched experts" if experts is not None and in_batches(experts) else "experts"
        return {part: Site(path, kind, f"{e}.{part}") for part in parts}
    own = join(path, str(e))
    sites = {"in": Site(own, "input")}
    assert experts is not None
    found = layers_of(experts.get_submodule(str(e)), layers)
    if found is not None:
        gate, up, down = found
        sites |= {"gate": Site(join(own, gate), "output")} if gate else {}
        sites["pre"] = Site(join(own, up), "output")
        sites["post"] = Site(join(own, down), "input")
    return sites | {"out": Site(own, "output")}


def mlp_points(points: PointList, mlp: MLP, module: str, rows: tuple[Site, ...], axes: str = "d_mlp") -> None:
    """Adds the points inside one feed-forward module.

    Args:
        points: what they are added to.
        mlp: the declaration.
        module: the path of the module.
        rows: where the batch size of a flat one is seen.
        axes: the axis of its neurons.
    """
    wide = f"batch {points.pos} {axes if mlp.up.width is None else mlp.up.width}"

    def add(name: str, site: Site, view: View | None = None, aliases: tuple[str, ...] = ()) -> None:
        if mlp.flat:
            points.add(name, site, Composed(view or View(), FlatRows()), wide, aliases=aliases, sources=rows)
        else:
            points.add(name, site, view, wide, aliases=aliases)

    up_site = Site(join(module, mlp.up.path), "output")
    if mlp.gate:
        add("hook_pre", Site(join(module, mlp.gate.path), "output"), mlp.gate.view, ("gate.hook_out",))
        add("hook_pre_linear", up_site, mlp.up.view, ("in.hook_out",))
    else:
        add("hook_pre", up_site, mlp.up.view, ("in.hook_out",))
    if mlp.given:
        add("hook_pre_linear", Site(module, "input", mlp.given))
    if mlp.ln:
        add("hook_mid", Site(join(module, mlp.ln.path), "input"))
        norm_points(points, "ln", mlp.ln.kind, Site(join(module, mlp.ln.path), "output"), axes=wide)
    add("hook_post", Site(join(module, mlp.down), "input"), aliases=("out.hook_in",))


def mixture_points(
    points: PointList, mlp: MoE, module: str, rows: tuple[Site, ...], num_experts: int, experts: nn.Module | None
) -> None:
    """Adds the points inside a mixture of experts.

    Args:
        points, mlp, module, rows: as for `mlp_points`.
        num_experts: how many there are.
        experts: the module that holds them, where the model has it.
    """

    def add(name: str, site: Site, axes: str, group: Group = "standard", aliases: tuple[str, ...] = ()) -> None:
        shape = f"batch {points.pos} {axes}"
        points.add(name, site, FlatRows(), shape, group=group, aliases=aliases, sources=rows)

    path, routing = join(module, mlp.experts), _routing(mlp, module, are_modules(experts))
    add("hook_router_logits", routing["logits"], "n_experts", "extra", ("gate.hook_out",))
    if "weights" in routing:
        add("hook_expert_weights", routing["weights"], "n_experts")
    if "weights of the chosen" in routing:
        add("hook_topk_weights", routing["weights of the chosen"], "experts_per_token", "extra")
    add("hook_expert_indices", routing["indices"], "experts_per_token")
    _expert_points(points, mlp, path, num_experts, experts)
    if mlp.shared:
        shared = join(module, mlp.shared.path)
        mlp_points(points.inside("shared_expert"), mlp.shared, shared, rows, "d_shared_expert")
        add("shared_expert.hook_out", Site(shared, "output"), "d_model", "extra")
    if mlp.shared_gate:
        add("shared_expert_gate.hook_out", Site(join(module, mlp.shared_gate.projection.path), "output"), "1", "extra")


def _routing(mlp: MoE, module: str, of_modules: bool) -> dict[str, Site]:
    """Where the logits of a router stand, and which experts it chooses with which weights.

    As in HookedTransformer, an expert's weight is its probability before the best are chosen; where these are chosen
    before that is computed, it is what the expert's output is multiplied with: zero for those that are not chosen.

    Args:
        mlp, module: as for `mixture_points`.
        of_modules: the experts are modules of their own, which are given neither indices nor weights.
    """
    router, chooses, path = (join(module, at) for at in (mlp.router, mlp.chooses, mlp.experts))
    returned = {what: Site(router, "output", place) for place, what in enumerate(mlp.router_returns)}
    made = "logits" if mlp.chosen_by == "logits" else "product"
    found = {"logits": Site(chooses, "router", made)}
    if mlp.in_batches:
        found["weights"] = returned["every weight"]
    elif mlp.chosen_by.endswith("probabilities"):
        found = {"logits": Site(chooses, "softmax", "scores"), "weights": Site(chooses, "softmax", "pattern")}
    elif "weights" in returned:
        found["weights"] = Site(chooses, "router", "weights")
    given = not (mlp.in_batches or of_modules)
    if "weights" in returned:
        found["weights of the chosen"] = returned["weights"]
    elif given:
        found["weights of the chosen"] = Site(path, "input", "top_k_weights")
    own = Site(path, "input", "top_k_index") if given else Site(chooses, "router", "indices")
    return found | {"indices": returned.get("indices", own)}


def _expert_points(points: PointList, mlp: MoE, path: str, num_experts: int, experts: nn.Module | None) -> None:
    """Adds the points inside each expert."""
    for e in range(num_experts):
        for part, site in _expert_sites(path, e, experts, mlp.layers).items():
            # Its rows are of no batch: in caches only when named.
            axes = "row d_model" if part in ("in", "out") else "row d_expert"
            view = ExpertRows() if are_modules(experts) else None
            points.add(f"experts.{e}.hook_{part}", site, view, axes, group="extra")
