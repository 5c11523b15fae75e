"""`map_model`: what a bridge needs to know about one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from adapters import automatic as inference
from adapters.architecture import Architecture
from adapters.attention import Attention
from adapters.building import hook_points
from adapters.config import ModelConfig, model_config
from adapters.inputs import Given
from adapters.plain_model import PlainModel
from adapters.points import Point, base_path, core_of, join
from adapters.registry import UnsupportedModelError, check_modules, declaration_for, is_declared
from adapters.spread import Layout, SpreadModelError, layout_of

#: Whether what plays which part is inferred: where a class has no adapter, never, always.
Automatic = bool | Literal["always"]


@dataclass(frozen=True)
class ModelMap:
    """What plays which part in one model.

    Attributes:
        core: the Hugging Face model, without what wraps it (PEFT, `torch.compile`).
        architecture: what its adapter declares.
        cfg: its configuration.
        points: its hook points, in the order of the computation.
        block_paths: the paths of its blocks.
        block_output: which element of a block's output is the residual stream, and how many there are.
        no_layer_runs: why a run cannot start or stop at a layer; "" where it can.
        inferred: its class has no declaration: this one was inferred from a run.
        not_offered: hook points, or what their names begin with, that are left out, and why: they did not hold when an
            inferred adapter was tried, or each process computes a part of them.
        layout: how the model is spread over processes; None where it is not.
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
        """The same without some hook points and weights, and without what stands on them, with the reasons."""
        weights = ("unembed.W_U", "unembed.b_U")
        names = {**names, **self._feeding(names)}
        there = {*weights, *(point.name for point in self.points)}
        # Rotated queries may be there where nobody knows what makes them: queries that were there take them along.
        of_kernels = (".hook_q", ".hook_k")
        more = _standing_on({x: why for x, why in names.items() if x in there or not x.endswith(of_kernels)})
        names = {**names, **{name: more[name] for name in more if name in there}}
        points = [point for point in self.points if not _is_among(point.name, names)]
        left = {point.name for point in points}
        # Where a reader is not offered, the gradient of what it reads is taken in one, for all of them.
        points = [
            each if left.issuperset(each.separate_consumers) else replace(each, separate_consumers=())
            for each in points
        ]  # fmt: skip
        return replace(self, points=points, not_offered={**self.not_offered, **names})

    def _feeding(self, names: Mapping[str, str]) -> dict[str, str]:
        """The points whose edits others take over, of which one is left out, with the reasons."""
        return {
            point.name: f"it stands on {gone[0]}: {next(names[x] for x in names if _is_among(gone[0], {x: ''}))}"
            for point in self.points
            if (gone := [each.name for each in point.linked if _is_among(each.name, names)])
            and not _is_among(point.name, names)
        }


#: What stands on a hook point, by the end of its name: of the same part.
_STANDS_ON = {
    "hook_attn_in": ("hook_q_input", "hook_k_input", "hook_v_input"),
    "hook_q": ("hook_rot_q",),
    "hook_k": ("hook_rot_k",),
    "hook_z": ("hook_result",),
    "unembed.hook_out": ("W_U", "b_U"),
}


def _standing_on(names: Mapping[str, str]) -> dict[str, str]:
    """What stands on these, and on that in turn, with the reasons."""
    found: dict[str, str] = {}
    pending = list(names)
    while pending:
        base = pending.pop()
        prefix, _, end = base.rpartition(".")
        for more in _STANDS_ON.get(end, _STANDS_ON.get(base, ())):
            name = f"{prefix}.{more}" if prefix else more
            if name not in names and name not in found:
                found[name] = found.get(base) or f"it stands on {base}: {names[base]}"
                pending.append(name)
    return found


def _is_among(name: str, names: Mapping[str, str]) -> bool:
    # Of a part whose inside is not offered, what it puts out before its norm or factor is.
    return any(name == each or (name.startswith(each + ".") and name != f"{each}.hook_out") for each in names)


def map_model(
    model: nn.Module,
    declared: Architecture | None = None,
    *,
    automatic: Automatic = False,
    inputs: Given | None = None,
) -> ModelMap:
    """What plays which part in a Hugging Face model.

    Args:
        model: a Hugging Face model.
        declared: its declaration; None: that of its class.
        automatic: where its class has no adapter, infer what one would declare from a run on a few tokens; ``always``:
            where it has one, too.
        inputs: what the model needs for that besides tokens (images, sound), by the names of its own arguments; None:
            made up.

    Raises:
        UnsupportedModelError: there is no adapter for its class, and none could be inferred, or was to be.
        SpreadModelError: it is spread over processes, and hook points would show parts.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from adapters import map_model
        >>> map_model(GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=10))).block_paths
        ['transformer.h.0', 'transformer.h.1']
    """
    core = core_of(model)
    layout = layout_of(model)
    if declared is None and is_inferred(model, automatic):
        if layout is not None:
            raise SpreadModelError(
                f"{type(core).__name__} is spread over processes ({layout.said}), and what plays which part is "
                "inferred in one process: wrap it in one, on the CPU or offloaded, call "
                "bridge.declaration().save(file) there, and give TransformerBridge(model, declaration=file) here. "
                "docs/adapters.md shows how to declare one by hand"
            )
        try:
            found = inference.automatic.infer(model, inputs)
        except inference.automatic.NotFound as why:
            plain = isinstance(core, PlainModel)
            name = type(core.module if plain else core).__name__
            refusal = "" if plain else _refusal(core)  # no adapter is near to a module of plain torch
            said = f"{why}: so what plays which part in {name} could not be inferred; {refusal}"
            raise UnsupportedModelError(said.removesuffix("; ")) from None
        return _mapped(model, core, found.architecture, found).without(found.not_offered)
    architecture = declaration_for(core) if declared is None else declared
    check_modules(core)
    declared_map = _mapped(model, core, architecture, None)
    if layout is None:
        return declared_map
    layout = layout.of(declared_map.points, _norms_of_heads(declared_map))
    return replace(declared_map.without(layout.not_shown(declared_map.points)), layout=layout)


def _norms_of_heads(found: ModelMap) -> Iterator[str]:
    """The paths of the norms of each head's queries, keys or values."""
    for index, block in enumerate(found.block_paths):
        for named in found.architecture.stack.block_at(index).named:
            part = named.step.part
            if isinstance(part, Attention) and part.norms_over != "width":
                for projection in part.projections.values():
                    if projection.norm is not None and projection.norm.path:
                        yield join(block, part.path, projection.norm.path)


def is_inferred(model: nn.Module, automatic: Automatic) -> bool:
    """Whether what plays which part in a model is inferred.

    Args:
        model: a Hugging Face model.
        automatic: as for `map_model`.
    """
    core = core_of(model)
    if automatic not in (True, False, "always"):
        raise ValueError(f'automatic is {automatic!r}; it must be True, False or "always"')
    return automatic == "always" or (bool(automatic) and not is_declared(core))


def _refusal(core: nn.Module) -> str:
    """What is said of a model whose class has no adapter."""
    try:
        declaration_for(core)
    except UnsupportedModelError as error:
        return str(error)
    return ""


def _mapped(
    model: nn.Module, core: nn.Module, architecture: Architecture, inferred: inference.automatic.Inferred | None
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
        inferred=inferred is not None,
    )
