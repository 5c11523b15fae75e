"""What an adapter produces: hook points, each a site seen through a view."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypedDict, Unpack

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adapters.views import View

# ----------------------------------------------------------------------------------------------------------------------
# Where things are in a model: dotted paths.
#
# A module may run several times in a pass (ALBERT's one layer is all of its blocks). ``layers.0@2`` is the third call
# of it, and what is inside during that call.
# ----------------------------------------------------------------------------------------------------------------------


_CALL = re.compile(r"@(\d+)")


def module_path(path: str) -> str:
    """A path without the numbers of calls."""
    return _CALL.sub("", path) if "@" in path else path


def call_number(path: str) -> int | None:
    """Which call of its module a path means, None where that is called once."""
    found = _CALL.search(path) if "@" in path else None
    return int(found[1]) if found else None


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module at a path, whichever call of it is meant.

    Raises:
        AttributeError: there is none.
    """
    for part in module_path(path).split(".") if path else ():
        child = model._modules.get(part)
        model = model.get_submodule(part) if child is None else child  # which says what is missing
    return model


def join(*parts: str) -> str:
    """Dotted paths one after another; empty ones are left out."""
    return ".".join(part for part in parts if part)


def is_inside(path: str, *modules: str) -> bool:
    """Whether a path is that of one of these modules, or of something in one."""
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def has_module(model: nn.Module, path: str) -> bool:
    """Whether there is a module at a path; at "", the model itself."""
    found: object = model
    for part in module_path(path).split(".") if path else ():
        if not isinstance(found, nn.Module):
            return False
        child = found._modules.get(part)
        found = getattr(found, part, None) if child is None else child
        if found is None:
            return False
    return True


def token_embedding(model: nn.Module) -> nn.Module | None:
    """The module of a model's token embeddings; None where its class does not say."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        found: nn.Module | None = None if find is None else find()
    except NotImplementedError:
        return None
    return found


def members_of(modules: nn.Module) -> list[nn.Module]:
    """The modules in a list of modules; one that is at two places is there twice, as `children` does not say."""
    return [module for module in modules._modules.values() if module is not None]


#: What to do where a model has other modules than its adapter declares: a class was replaced by one of another layout.
INFER = 'If a patch has another layout, TransformerBridge(model, automatic="always") finds out what is where'


def missing_module_message(path: str) -> str:
    """What to say of a module that is not where it was when the bridge was made, or not where it is declared."""
    return (
        f"the model has no module {path}. If it was replaced since the bridge was made, make a new bridge of the "
        f"changed model, TransformerBridge(model). {INFER}"
    )


def core_path(model: nn.Module) -> str:
    """The path of the Hugging Face model inside what wraps it (PEFT, `torch.compile`, `DistributedDataParallel`), ""
    where nothing does."""
    path = ""
    while True:
        if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            inner = model.get_base_model()  # type: ignore[operator]
            step = "base_model" if model._modules.get("base_model") is inner else "base_model.model"
            model = inner
        elif "_orig_mod" in model._modules:
            step, model = "_orig_mod", model.get_submodule("_orig_mod")
        elif isinstance(model, DistributedDataParallel):
            step, model = "module", model.module
        else:
            return path
        path = join(path, step)


def core_of(model: nn.Module) -> nn.Module:
    """The Hugging Face model inside what wraps it."""
    return model.get_submodule(core_path(model))


def learns_prompt(model: nn.Module) -> bool:
    """Whether PEFT puts learned tokens, or keys and values, before what the model is given."""
    return hasattr(model, "get_base_model") and bool(getattr(model.active_peft_config, "is_prompt_learning", False))


def base_path(model: nn.Module) -> str:
    """The path of the base model (the one without a head) inside `model`, "" where `model` is the base model."""
    core = core_path(model)
    module = model.get_submodule(core)
    prefix = getattr(module, "base_model_prefix", "")
    base = getattr(module, prefix, None) if prefix else None
    return join(core, prefix) if base is not None and _takes_all(type(base), type(module)) else core


def _takes_all(base: type[nn.Module], model: type[nn.Module]) -> bool:
    """Whether a base model takes what its model does: the encoder of DINOv3, of that name, is given embeddings."""
    main = getattr(model, "main_input_name", "input_ids")
    taken = inspect.signature(base.forward).parameters
    return main == "input_ids" or main in taken or any(x.kind is x.VAR_POSITIONAL for x in taken.values())


def path_from(model: nn.Module, path: str) -> str:
    """A declared path as one from `model`: it is relative to the base model, or, if it begins with a dot, to the model
    itself."""
    return join(core_path(model), path[1:]) if path.startswith(".") else join(base_path(model), path)


#: What a module is given, or what it returns.
Border = Literal["input", "output"]
#: ``input``: an argument of a module. ``output``: what it returns. ``attention``: inside the attention that it
#: computes. ``softmax``: the softmax in its forward. ``experts``: inside the module that holds a mixture's experts.
#: ``batched experts``: likewise, where it is one product of batches. ``router``: inside the module that chooses them by
#: their logits. ``recurrence``: inside a mixer.
SiteKind = Literal["input", "output", "attention", "softmax", "experts", "batched experts", "router", "recurrence"]
#: ``standard``: in an unfiltered cache. ``heavy``: there when the matching ``set_use_*`` is on. ``extra``: when named.
Group = Literal["standard", "heavy", "extra"]


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the model's own computation.

    Attributes:
        path: the module, as a dotted path from the Hugging Face model.
        kind: see `SiteKind`.
        key: for an input, the name of the argument (None: the first); for an output, which element of a tuple (None:
            the output itself); inside attention, one of ``q``, ``k``, ``scores`` (what enters the softmax),
            ``pattern`` (what leaves it); inside expert e, ``{e}.in`` and ``{e}.out`` (its input and its output),
            ``{e}.gate``, ``{e}.pre`` (before and parallel to the activation function) and ``{e}.post`` (what enters its
            last projection); in a router, ``logits`` (of all experts, that the best are chosen from), ``product``
            (what its matrix makes of its input) and ``weights`` (of all, zero for those that are not chosen); in a
            mixer, a channel of `adapters.mixers`, or ``state``.
    """

    path: str
    kind: SiteKind
    key: int | str | None = None


@dataclass(frozen=True, slots=True)
class LinkedPoint:
    """A point that takes over what was written at another one (`hook_attn_in` feeds the query, key and value inputs).

    Attributes:
        name: the point that takes over.
        convert: from the value written to the linked point's own activation.
    """

    name: str
    convert: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Point:
    """A hook point as an adapter declares it.

    Attributes:
        name: the canonical name.
        site, view: where it stands and how the tensor there is seen.
        axes: the axes of the activation, such as ``batch pos d_model``.
        depth: -1 before the blocks, the block's index inside, the number of blocks after.
        group: see `Group`.
        aliases: other names for it.
        sources: further sites whose tensors the view needs.
        linked: see `LinkedPoint`.
        separate_consumers: the points that read this one separately in HookedTransformer, which runs the norm before
            attention once for each of query, key and value: a gradient is taken for each of them.
        stack: the list of blocks it belongs to (``blocks``, ``encoder``, ``decoder``), or "" outside of all.
        n_heads: of a point inside attention, how many heads it shows, whatever the kernel repeats or packs.
        flag: for a heavy point, the ``cfg.use_*`` field that includes it in an unfiltered cache.
    """

    name: str
    site: Site
    view: View
    axes: str
    depth: int
    group: Group = "standard"
    aliases: tuple[str, ...] = ()
    sources: tuple[Site, ...] = ()
    linked: tuple[LinkedPoint, ...] = ()
    separate_consumers: tuple[str, ...] = ()
    stack: str = "blocks"
    flag: str | None = None
    n_heads: int | None = None


class MoreOfPoint(TypedDict, total=False):
    """What may be said of a point besides, see `Point`."""

    group: Group
    aliases: tuple[str, ...]
    sources: tuple[Site, ...]
    linked: tuple[LinkedPoint, ...]
    separate_consumers: tuple[str, ...]
    flag: str | None
    n_heads: int | None


@dataclass(frozen=True)
class PointList:
    """Collects the points of one part of a model, in the order of the computation.

    Attributes:
        prefix: what all their names begin with, such as ``blocks.3.attn``.
        depth, stack: of all of them, see `Point`.
        pos: the axis of positions.
        points: what was added so far; shared with the lists made by `inside`.
    """

    prefix: str
    depth: int
    stack: str
    pos: str = "pos"
    points: list[Point] = field(default_factory=list)

    def inside(self, name: str) -> PointList:
        """The same list, for names that begin with a further word."""
        return PointList(join(self.prefix, name), self.depth, self.stack, self.pos, self.points)

    def add(
        self, name: str, site: Site, view: View | None = None, axes: str | None = None, **more: Unpack[MoreOfPoint]
    ) -> None:
        """Adds a point.

        Args:
            name: behind the prefix.
            site: see `Point`.
            view: see `Point`; None: the site's tensor as it is.
            axes: see `Point`; None: those of the residual stream.
            more: see `Point`; aliases are behind the prefix, but for those that begin with a dot.
        """
        more["aliases"] = tuple(
            alias[1:] if alias.startswith(".") else join(self.prefix, alias) for alias in more.get("aliases", ())
        )
        own, axes = join(self.prefix, name), axes or f"batch {self.pos} d_model"
        self.points.append(Point(own, site, view or View(), axes, self.depth, stack=self.stack, **more))
