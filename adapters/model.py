"""`map_model`: a model's declaration, hook points and configuration, as a bridge needs them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from adapters import automatic as inference
from adapters.architecture import Architecture
from adapters.attention import Attention, heads_in_columns
from adapters.building import hook_points
from adapters.config import ModelConfig, config_of, model_config
from adapters.inputs import Given
from adapters.plain_model import PlainModel
from adapters.points import Point, base_path, core_of, has_module, join, module_at, module_path
from adapters.registry import UnsupportedModelError, check_modules, declaration_for, is_declared
from adapters.spread import Layout, SpreadModelError, layout_of
from adapters.tuners import is_of_peft

_LOGGER = logging.getLogger("bridge")

#: Whether a declaration is inferred: where a class has no adapter, never, always.
Automatic = bool | Literal["always"]


@dataclass(frozen=True)
class ModelMap:
    """The declaration of one model, with its hook points and configuration.

    Attributes:
        core: the Hugging Face model, without wrappers (PEFT, `torch.compile`).
        architecture: the declaration.
        cfg: its configuration.
        points: its hook points, in the order of the computation.
        block_paths: the paths of its blocks.
        block_output: the index of the residual stream in a block's output tuple, and the length of
            that tuple.
        no_layer_runs: why a run cannot start or stop at a layer; "" if it can.
        inferred: whether the declaration was inferred from a run, because its class has none.
        not_offered: excluded hook points, or prefixes of their names, and the reason: a proof of an
            inferred adapter failed, or each process computes a shard of them.
        layout: the distribution of the model over processes; None if there is none.
    """

    core: nn.Module
    architecture: Architecture
    cfg: ModelConfig
    points: list[Point]
    block_paths: list[str]
    block_output: tuple[int | None, int]
    no_layer_runs: str = ""
    inferred: bool = False
    not_offered: Mapping[str, str] = field(default_factory=dict)
    layout: Layout | None = None

    def without(self, names: Mapping[str, str]) -> ModelMap:
        """Return the map without some hook points and weights and without anything that depends on
        them; record the reasons.
        """
        reasons = {**names, **self._feeding(names)}
        offered = {"unembed.W_U", "unembed.b_U", *(point.name for point in self.points)}
        # Rotated queries may be available although their projection is unknown; removing the
        # queries removes them, too.
        of_kernels = (".hook_q", ".hook_k")
        bases = {
            name: why
            for name, why in reasons.items()
            if name in offered or not name.endswith(of_kernels)
        }
        for name, why in _standing_on(bases).items():
            if name in offered:
                reasons[name] = why
        remaining = [point for point in self.points if _among(point.name, reasons) is None]
        readers = {point.name for point in remaining}
        points = []
        for point in remaining:
            # Where a reader is removed, its source's gradient is taken once for all readers.
            if not readers.issuperset(point.separate_consumers):
                point = replace(point, separate_consumers=())
            points.append(point)
        return replace(self, points=points, not_offered={**self.not_offered, **reasons})

    def _feeding(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the points that forward their edits to a removed point, with the reasons."""
        reasons: dict[str, str] = {}
        for point in self.points:
            if _among(point.name, names) is not None:
                continue
            for linked in point.linked:
                removed = _among(linked.name, names)
                if removed is not None:
                    reasons[point.name] = f"it stands on {linked.name}: {names[removed]}"
                    break
        return reasons


#: The points that depend on a hook point of the same part, by the end of its name.
_STANDS_ON = {
    "hook_attn_in": ("hook_q_input", "hook_k_input", "hook_v_input"),
    "hook_q": ("hook_rot_q",),
    "hook_k": ("hook_rot_k",),
    "hook_z": ("hook_result",),
    "unembed.hook_out": ("W_U", "b_U"),
}


def _standing_on(names: Mapping[str, str]) -> dict[str, str]:
    """Return the points that directly or indirectly depend on the named ones, with the reasons."""
    reasons: dict[str, str] = {}
    pending = list(names)
    while pending:
        base = pending.pop()
        prefix, _, end = base.rpartition(".")
        for more in _STANDS_ON.get(end, _STANDS_ON.get(base, ())):
            name = f"{prefix}.{more}" if prefix else more
            if name not in names and name not in reasons:
                reasons[name] = reasons.get(base) or f"it stands on {base}: {names[base]}"
                pending.append(name)
    return reasons


def _among(name: str, names: Iterable[str]) -> str | None:
    """Return the name, or its prefix, if it is one of `names`."""
    for prefix in names:
        # If the inside of a part is removed, its output before its norm or factor remains.
        if name == prefix or (name.startswith(f"{prefix}.") and name != f"{prefix}.hook_out"):
            return prefix
    return None


def map_model(
    model: nn.Module,
    declared: Architecture | None = None,
    *,
    automatic: Automatic = False,
    inputs: Given | None = None,
) -> ModelMap:
    """Return the declaration, hook points and configuration of a Hugging Face model.

    Args:
        model: a Hugging Face model.
        declared: its declaration; None: that of its class.
        automatic: infer a declaration from a run on a few tokens if the class has no adapter;
            ``always``: even if it has one.
        inputs: the inputs that this run needs besides tokens (images, sound), by the names of the
            model's own arguments; None: generated.

    Raises:
        UnsupportedModelError: there is no adapter for its class, and inference failed or was
            disabled.
        SpreadModelError: it is spread over processes, and hook points would show only parts of
            activations.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from adapters import map_model
        >>> map_model(
        ...     GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=10))
        ... ).block_paths
        ['transformer.h.0', 'transformer.h.1']
    """
    core = core_of(model)
    layout = layout_of(model)
    if declared is None and is_inferred(model, automatic):
        if layout is not None:
            raise SpreadModelError(
                f"{type(core).__name__} is spread over processes ({layout.description}), and what"
                " plays which part is inferred in one process: wrap it in one, on the CPU or"
                " offloaded, call bridge.declaration().save(file) there, and give"
                " TransformerBridge(model, declaration=file) here. docs/adapters.md shows how to"
                " declare one by hand"
            )
        try:
            inferred = inference.automatic.infer(model, inputs)
        except inference.automatic.NotFound as why:
            raise UnsupportedModelError(_not_inferred(core, why)) from None
        return _mapped(model, core, inferred.architecture, True).without(inferred.not_offered)
    architecture = declaration_for(core) if declared is None else declared
    check_modules(core)
    declared_map = _mapped(model, core, architecture, False)
    if layout is None:
        reason = "" if declared is not None else misfit(declared_map, model)
        if reason and automatic:
            _LOGGER.warning("%s: what plays which part is inferred", reason)
            return map_model(model, automatic="always", inputs=inputs)
        if reason:
            raise UnsupportedModelError(f"{reason}: leave automatic=False out, and it is inferred")
        return declared_map
    layout = layout.of(declared_map.points, _norms_of_heads(declared_map))
    return replace(declared_map.without(layout.not_shown(declared_map.points)), layout=layout)


def misfit(declared: ModelMap, model: nn.Module) -> str:
    """Return how a model's modules differ from what its class and configuration imply; "" if they
    do not. Modules may be wrapped in other modules (PEFT's LLaMA-Adapter), or heads may be pruned.

    Args:
        declared: the map by the adapter of its class.
        model: the model.
    """
    name = type(declared.core).__name__
    if other := _other_number(declared.core) or _replaced_norm(declared, model):
        return f"{name}: {other} (was one changed after loading?)"
    for point in declared.points:
        path = module_path(point.site.path)
        above = path.rpartition(".")[0]
        if not has_module(model, path) and is_of_peft(model, above):
            return f"{name} has no module {path}, which its adapter declares"
        if not has_module(model, path):
            continue  # `verify` says so
        if point.name.endswith(".hook_k") and (n_heads := heads_in_columns(point.view)):
            module = model.get_submodule(path)
            width = getattr(module, "out_features", None)
            around = model.get_submodule(path.rpartition(".")[0])
            d_head = declared.cfg.d_head
            if width not in (None, n_heads * d_head, n_heads * getattr(around, "head_dim", d_head)):
                return (
                    f"{path} of {name} makes {width} numbers, and {n_heads} heads of {d_head}"
                    f" numbers, as its configuration says, are {n_heads * d_head}"
                )
        if point.name.endswith(".hook_z") and point.site.kind == "input":
            module = model.get_submodule(path)
            n_heads = point.n_heads or heads_in_columns(point.view) or declared.cfg.n_heads
            width = getattr(module, "in_features", getattr(module, "nx", None))
            around = model.get_submodule(path.rpartition(".")[0])
            # Layers of one model may have heads of different width, or in other numbers.
            d_heads = {declared.cfg.d_head, getattr(around, "head_dim", declared.cfg.d_head)}
            own_heads = {n_heads, getattr(around, "num_heads", n_heads)}
            fitting = {n * d for n in own_heads for d in d_heads}
            if width not in (None, *fitting):
                return (
                    f"{path} of {name} reads {width} numbers, and {n_heads} heads of"
                    f" {declared.cfg.d_head} numbers, as its configuration says, make"
                    f" {n_heads * declared.cfg.d_head} (were heads pruned?)"
                )
            if others := _other_heads(around, n_heads, declared.cfg.n_kv_heads):
                return (
                    f"{path.rpartition('.')[0]} of {name} {others}, and its configuration says"
                    " otherwise (was it changed after loading?)"
                )
    return ""


def _replaced_norm(declared: ModelMap, model: nn.Module) -> str:
    """Describe the first norm of a block whose module has no epsilon, as one that was put in its
    place; return "" if all have one.
    """
    for index, path in enumerate(declared.block_paths):
        for norm in declared.architecture.stack.block_at(index).norms:
            place = join(path, norm.path)
            if norm.kind.name is None or not has_module(model, module_path(place)):
                continue  # `verify` says so
            if norm.kind.stored_epsilon(module_at(model, place)) is None:
                return f"the norm {place} has no epsilon"
    return ""


def _other_number(core: nn.Module) -> str:
    """Describe the first float attribute of a module (an epsilon, a multiplier) that differs from
    the configuration's value of the same name; return "" if all agree. Dropout rates are ignored,
    because they do not affect a declaration.
    """
    config = config_of(core)
    numbers = {
        name: value
        for name, value in vars(config).items()
        if type(value) is float and not name.startswith("_") and "drop" not in name
    }
    for path, module in core.named_modules():
        if getattr(module, "config", None) not in (None, config):
            continue
        for name in numbers.keys() & module.__dict__.keys():
            held = module.__dict__[name]
            if type(held) is float and held != numbers[name]:
                where = path or type(core).__name__
                return f"{name} of {where} is {held}, and of the configuration {numbers[name]}"
    return ""


def _other_heads(attention: nn.Module, n_heads: int, n_key_value_heads: int) -> str:
    """Return what an attention module says of its heads, if it is not these numbers; else ""."""
    held, groups = (
        attention.__dict__.get("num_heads"),
        attention.__dict__.get("num_key_value_groups"),
    )
    if isinstance(held, int) and held != n_heads:
        return f"has {held} heads"
    if isinstance(groups, int) and groups * n_key_value_heads != n_heads:
        return f"has {groups} query heads for each key head"
    return ""


def _norms_of_heads(model: ModelMap) -> Iterator[str]:
    """Yield the paths of the norms of each head's queries, keys or values."""
    for index, block in enumerate(model.block_paths):
        for named in model.architecture.stack.block_at(index).named:
            part = named.step.part
            if isinstance(part, Attention) and part.norms_over != "width":
                for projection in part.projections.values():
                    if projection.norm is not None and projection.norm.path:
                        yield join(block, part.path, projection.norm.path)


def is_inferred(model: nn.Module, automatic: Automatic) -> bool:
    """Tell whether a model's declaration is inferred.

    Args:
        model: a Hugging Face model.
        automatic: as for `map_model`.
    """
    core = core_of(model)
    if automatic not in (True, False, "always"):
        raise ValueError(f'automatic is {automatic!r}; it must be True, False or "always"')
    return automatic == "always" or (bool(automatic) and not is_declared(core))


def _not_inferred(core: nn.Module, why: Exception) -> str:
    """Return the error message for a model whose declaration could not be inferred."""
    if isinstance(core, PlainModel):  # no adapter is close to a plain torch module
        name = type(core.module).__name__
        return (
            f"{why}: so what plays which part in {name} could not be inferred. A single block, too,"
            " belongs into an nn.ModuleList, and weights into nn.Linear and nn.Embedding: see"
            ' docs/adapters.md, "What the model must look like"'
        )
    message = f"{why}: so what plays which part in {type(core).__name__} could not be inferred"
    try:
        declaration_for(core)
    except UnsupportedModelError as error:
        return f"{message}; {error}"
    return message


def _mapped(
    model: nn.Module, core: nn.Module, architecture: Architecture, inferred: bool
) -> ModelMap:
    base = base_path(model)
    cfg = model_config(architecture, core, model.get_submodule(base))
    stack = architecture.stack
    return ModelMap(
        core=core,
        architecture=architecture,
        cfg=cfg,
        points=hook_points(architecture, model, cfg),
        block_paths=[join(base, stack.place_of(i)) for i in range(cfg.n_layers)],
        block_output=stack.output,
        no_layer_runs=architecture.no_layer_runs,
        inferred=inferred,
    )
