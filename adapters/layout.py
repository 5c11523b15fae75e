"""How a model is spread over processes, as the model itself says, and where that cuts a hook point's site.

Under tensor parallelism (`tp_plan` of transformers) some linear layers hold a part of their columns or rows on each
process. What they pass to each other is then a part too: some heads, some neurons. The plan names the layers and says
how each is cut, their parameters are `DTensor`. Everything else, the residual stream first of all, is whole and equal
on all processes. Under FSDP2 and data parallelism every process computes whole activations, of rows of its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from adapters.agreeing import Peers
from adapters.gathering import Alike, Cut, Summed, SummedGradients
from adapters.paths import core_path, is_inside, module_at, module_path
from adapters.points import Point, Site
from adapters.views import View
from adapters.views.heads import HeadsFirst
from adapters.views.stream import Composed

#: Layers of these styles give a part of their columns to what follows.
_GIVES_PART = "colwise"
#: Layers of these styles are given a part of their columns.
_TAKES_PART = "rowwise"
#: A norm of each head alone, between the two.
_OF_HEADS = "replicated_with_grad_allreduce"
#: A layer that every process has whole, before the two: a latent, and a part of keys that goes straight to attention.
_LATENT = "mla_kv_a_proj"
#: A module that every process has whole, and is given whole.
_WHOLE = "replicate"
#: An attention module that has parameters of its own, an entry for each head (sinks), of which it sees a part.
_OWN_PARAMETERS = "local_params"
#: How a mixture's experts are cut: each process has some neurons of all of them.
_EXPERTS = {"moe_tp_experts", "packed_colwise", _TAKES_PART}
#: Or each process has all neurons of some of them.
_WHOLE_EXPERTS = {"ep_dispatch_experts", "grouped_gemm"}
#: Layers of these styles are cut inside, and are given and give whole tensors.
_WHOLE_OUTSIDE = (
    "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep", "embedding_rowwise",
    "embedding_colwise", _WHOLE, "moe_tp_experts", _OWN_PARAMETERS, _LATENT,
    *_WHOLE_EXPERTS,
)  # fmt: skip

#: Layers that make keys, alone or with others, as transformers' own `get_kv_heads_per_rank` knows them.
_KEY_LAYERS = ("k_proj", "qkv_proj", "query_key_value")


class SpreadModelError(TypeError):
    """A model is spread over processes in a way in which hook points would show parts."""


@dataclass(frozen=True)
class Layout:
    """How a model is spread over processes.

    Attributes:
        said: in words.
        peers: the processes that share each layer; None where none is shared.
        styles: how each module is cut, by its path from the wrapped model.
        sizes: over how many columns, of modules that give or take a part.
        heads_first: the norms of heads that are given heads before positions.
        bare: the modules without parameters.
    """

    said: str
    peers: Peers | None = None
    styles: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    heads_first: frozenset[str] = frozenset()
    bare: frozenset[str] = frozenset()

    def cut(self, site: Site) -> Cut | None:
        """How a site's tensor is spread over processes; None where each has rows of its own.

        Raises:
            SpreadModelError: it is a part, and which is not known.
        """
        if self.peers is None:
            return None
        path = module_path(site.path)
        if site.kind in ("input", "output"):
            return self._along(self._axis(path, site.kind))
        if site.kind in ("attention", "softmax"):
            return self._along(self._axis_of_heads(path))
        styles = self._styles_in(path)
        if site.kind == "experts" and styles == _EXPERTS:
            return self._cut_of_expert(path, str(site.key).partition(".")[2])
        if styles and not (site.kind == "experts" and styles == _WHOLE_EXPERTS):
            raise SpreadModelError(f"{path} is cut inside ({', '.join(sorted(styles))})")
        return self._along(None)

    def _along(self, axis: int | None) -> Cut:
        """A tensor that is cut along an axis; None: it is whole."""
        assert self.peers is not None
        return Alike(0, self.peers.group, self.peers) if axis is None else Cut(axis, self.peers.group, self.peers)

    def of(self, points: Sequence[Point], norms_of_heads: Iterable[str] = ()) -> Layout:
        """The same, of a model with these hook points, whose views and axes say what some modules are given.

        Args:
            points: the hook points.
            norms_of_heads: the paths of norms of each head's queries, keys or values.
        """
        first = (module_path(point.site.path) for point in points if _sees_heads_first(point.view))
        latents = (module_path(point.site.path) for point in points if point.axes.endswith("_latent"))
        # Of what has no plan: a latent, which the cut layers behind it are given whole, and norms without weights.
        unplanned = dict.fromkeys(latents, _WHOLE) | dict.fromkeys(self.bare.intersection(norms_of_heads), _OF_HEADS)
        styles = {path: style for path, style in unplanned.items() if self._region(path)}
        return replace(self, heads_first=frozenset(first), styles={**styles, **self.styles})

    def asking(self, compares: bool, patience: float) -> Layout:
        """The same, whose processes ask each other in this way; see `Peers`."""
        peers = None if self.peers is None else replace(self.peers, compares=compares, patience=patience)
        return replace(self, peers=peers)

    def not_shown(self, points: Iterable[Point]) -> dict[str, str]:
        """The hook points that would show a part that cannot be put together, with the reason."""
        found = {}
        for point in points:
            try:
                for site in (point.site, *point.sources):
                    self.cut(site)
                if point.view.contextual and module_path(point.site.path) in self.styles:
                    self.cut(Site(point.site.path, "input"))
            except SpreadModelError as error:
                found[point.name] = f"{error}: {self.said}"
        return found

    def check_in_place(self, path: str, module: nn.Module) -> None:
        """Looks whether what stands at a path is cut as it was when the bridge was made.

        Raises:
            SpreadModelError: it is another module, of which this process has all.
        """
        cut = self._layers(module_path(path))
        if cut and not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise SpreadModelError(
                f"the module at {path!r} was replaced by one that is not cut, and the bridge was made of one that is: "
                "make another bridge"
            )

    def _axis(self, path: str, kind: str) -> int | None:
        """Along which axis what enters or leaves a module is cut."""
        style = self.styles.get(path)
        if style in _WHOLE_OUTSIDE or (style, kind) in ((_GIVES_PART, "input"), (_TAKES_PART, "output")):
            return None
        if style in (_GIVES_PART, _TAKES_PART):
            self._check_even(path)
            return -1
        region = self._region(path)
        if style is None and region is None:
            return None
        if style == _OF_HEADS and region is not None and self._axis_of_heads(region) is not None:
            return 1 if path in self.heads_first else -2
        raise SpreadModelError(f"each process computes a part of {path} ({style or f'inside {region}'})")

    def _axis_of_heads(self, path: str) -> int | None:
        """Along which axis heads are cut inside an attention module."""
        styles = self._styles_in(path)
        if styles <= set(_WHOLE_OUTSIDE) - {_OWN_PARAMETERS, "moe_tp_experts", *_WHOLE_EXPERTS}:
            return None
        if not styles <= {_GIVES_PART, _TAKES_PART, _OF_HEADS, _LATENT, _OWN_PARAMETERS, _WHOLE}:
            raise SpreadModelError(f"each process computes some of the heads of {path} ({', '.join(sorted(styles))})")
        for other in self._layers(path):
            self._check_even(other)
        return 1

    def _cut_of_expert(self, path: str, part: str) -> Cut:
        """How what is inside of an expert is cut: its neurons; what it returns is a sum over them."""
        assert self.peers is not None
        self._check_even(f"{path}.down_proj")
        kind = {"in": SummedGradients, "out": Summed}.get(part, Cut)
        return kind(-1, self.peers.group, self.peers)

    def _layers(self, region: str) -> list[str]:
        """The layers in a module that give or take parts."""
        return [path for path, style in self.styles.items() if is_inside(path, region) and path in self.sizes]

    def _styles_in(self, region: str) -> set[str]:
        return {style for path, style in self.styles.items() if is_inside(path, region)}

    def _region(self, path: str) -> str | None:
        """The innermost module around another in which layers pass parts to each other."""
        regions = {other.rpartition(".")[0] for other, style in self.styles.items() if style not in _WHOLE_OUTSIDE}
        while path := path.rpartition(".")[0]:
            if path in regions:
                return path
        return None

    def _check_even(self, path: str) -> None:
        assert self.peers is not None
        if path not in self.sizes:
            raise SpreadModelError(f"{path} is cut, and its weight does not say how (a quantised layer)")
        if self.sizes[path] % self.peers.group.size():
            raise SpreadModelError(f"the {self.sizes[path]} columns of {path} are cut into unequal parts")


def _sees_heads_first(view: View) -> bool:
    if isinstance(view, Composed):
        return _sees_heads_first(view.inner) or _sees_heads_first(view.outer)
    return isinstance(view, HeadsFirst)


def refuse_context_parallel() -> None:
    """Refuses to run where torch's `context_parallel` gives each process a part of the positions.

    Raises:
        SpreadModelError: it does.
    """
    attention = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if torch.nn.functional.scaled_dot_product_attention in getattr(attention, "_replaced_functions", ()):
        raise SpreadModelError(
            "the model is context parallel (torch's context_parallel is open): a hook would be shown some of the "
            "positions. Run it outside of that"
        )


def layout_of(model: nn.Module) -> Layout | None:
    """How a model is spread over processes; None where this process holds all of it, alone.

    Args:
        model: a Hugging Face model, with what wraps it.

    Raises:
        SpreadModelError: hook points would show parts, or nothing says what they would show.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from adapters.layout import layout_of
        >>> layout_of(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=10))) is None
        True
    """
    path = core_path(model)
    core = model.get_submodule(path)
    said = []
    if isinstance(model, DistributedDataParallel):
        said.append(f"data parallel over {model.process_group.size()} processes, each with rows of its own")
    config = getattr(getattr(core, "config", None), "distributed_config", None)
    _refuse_stages(core, config)
    spread = {name: each for name, each in core.named_parameters() if isinstance(each, DTensor)}
    sharded = {name for name, module in core.named_modules() if isinstance(module, FSDPModule)}
    if sharded:
        said.append("parameters sharded by FSDP2, each process with rows of its own")
    plan = _plan(core, config) if (getattr(core, "_tp_size", None) or 1) > 1 else {}
    if not plan:
        if spread and not sharded:
            name, parameter = next(iter(spread.items()))
            raise SpreadModelError(
                f"{name} is spread over processes ({parameter.placements}), and the model has no plan that says how: "
                'load it with from_pretrained(..., distributed_config=DistributedConfig(tp_plan="auto"))'
            )
        return Layout("; ".join(said)) if said else None
    if sharded:
        raise SpreadModelError("the model is tensor parallel and sharded by FSDP2 at once: take one of them")
    return _by_plan(path, core, plan, spread, said)


def _refuse_stages(core: nn.Module, config: Any) -> None:
    sizes = {name: getattr(config, f"{name}_size", None) or 1 for name in ("pp", "ep", "tp")}
    instead = "Load it with distributed_config=DistributedConfig(tp_plan='auto'), or in one process"
    if sizes["pp"] > 1:
        raise SpreadModelError(
            f"the model is pipeline parallel over {sizes['pp']} processes: each holds some of the layers, and passes "
            f"no others. {instead}"
        )
    if sizes["ep"] > 1 and sizes["ep"] != sizes["tp"]:
        raise SpreadModelError(
            f"the model is expert parallel over {sizes['ep']} processes of which each {sizes['tp']} are given the "
            "same: an expert's rows come from inputs that the others do not have. Load it with tp_size as large as "
            "ep_size"
        )
    if getattr(config, "enable_sequence_parallel", False):
        raise SpreadModelError("the model is sequence parallel: a hook would be shown some of the positions")


def _plan(core: nn.Module, config: Any) -> dict[str, str]:
    """How each module and parameter that the plans name is cut. A plan for experts goes before the other."""
    found = _named(core, "_tp_plan")
    if (getattr(config, "ep_size", None) or 1) > 1:
        experts = _named(core, "_ep_plan")
        found = {path: style for path, style in found.items() if not is_inside(path, *experts)}
        found |= experts
    return found


def _named(core: nn.Module, name: str) -> dict[str, str]:
    plan: Mapping[str, str] = getattr(core, name, None) or {}
    paths = [path for path, _ in (*core.named_modules(), *core.named_parameters())]
    found = {path: plan.get(path) or plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)) for path in paths}
    return {path: style for path, style in found.items() if style is not None}


def _by_plan(
    path: str, core: nn.Module, plan: Mapping[str, str], spread: Mapping[str, DTensor], said: list[str]
) -> Layout:
    mesh = _mesh(core, plan, spread)
    inside = f"{path}." if path else ""
    sizes = {inside + name: size for name, size in _whole_sizes(core, plan, spread).items()}
    kinds = {"expert" if style in _WHOLE_EXPERTS else "tensor" for style in plan.values()}
    said.append(f"{' and '.join(sorted(kinds, reverse=True))} parallel over {mesh.size()} processes")
    styles = {inside + name: style for name, style in plan.items()}
    bare = frozenset(inside + name for name, module in core.named_modules() if next(module.parameters(), None) is None)
    group = mesh.get_group()
    return Layout("; ".join(said), Peers(group, _side_of(group)), styles, sizes, bare=bare)


def _mesh(core: nn.Module, plan: Mapping[str, str], spread: Mapping[str, DTensor]) -> DeviceMesh:
    """The processes that a model is cut for.

    Raises:
        SpreadModelError: it is cut in a way of which it is not known what each process has.
    """
    if "sequence_parallel" in plan.values():
        raise SpreadModelError("the model is sequence parallel: a hook would be shown some of the positions")
    if not spread:
        raise SpreadModelError(
            f"the model was loaded to be tensor parallel, and no parameter says that it is cut. The plan names "
            f"{', '.join(sorted(plan))[:200]}: if nothing of that is cut (a tied output layer alone), load it without "
            "distributed_config. transformers before 5.23 cuts unseen, and any version quantised layers: load "
            "it with 5.23, and not quantised"
        )
    mesh = next(iter(spread.values())).device_mesh
    same = [parameter.device_mesh.mesh.tolist() == mesh.mesh.tolist() for parameter in spread.values()]
    if mesh.ndim > 1 or not all(same):
        raise SpreadModelError(f"the model is spread over a grid of processes ({mesh}): one axis is known to be right")
    _refuse_cut_heads(core, plan, mesh.size())
    output = core.get_output_embeddings() if isinstance(core, PreTrainedModel) else None
    if output is not None and any(
        plan.get(name) == _GIVES_PART for name, module in core.named_modules() if module is output
    ):
        raise SpreadModelError(
            "the plan gives each process the logits of a part of the vocabulary: let it say colwise_gather_output of "
            "the output layer"
        )
    return mesh


def _whole_sizes(core: nn.Module, plan: Mapping[str, str], spread: Mapping[str, DTensor]) -> dict[str, int]:
    """How wide the whole is of which a process has a part, by the names in the plan."""
    sizes = {}
    for name, style in plan.items():
        module = module_at(core, name) if f"{name}.weight" in spread else None
        if module is not None and style in (_GIVES_PART, _TAKES_PART):
            sizes[name] = int(getattr(module, "out_features" if style == _GIVES_PART else "in_features"))
        elif name in spread and style == _TAKES_PART:
            sizes[name] = spread[name].shape[-1]
    return sizes


def _refuse_cut_heads(core: nn.Module, plan: Mapping[str, str], processes: int) -> None:
    """The model's own forward fails where a process has a part of a head of keys."""
    config: Any = core.config
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    cut = any(style == _GIVES_PART and name.rpartition(".")[2] in _KEY_LAYERS for name, style in plan.items())
    if cut and isinstance(heads, int) and heads % processes:
        raise SpreadModelError(
            f"{heads} heads of keys cannot be cut for {processes} processes, and transformers does not copy them: take "
            f"as many processes as divide {heads}"
        )


@lru_cache(maxsize=4)
def _side_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same processes for questions, on their processors. All of them have to ask."""
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
