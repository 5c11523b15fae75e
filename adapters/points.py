"""Hook points, each a site seen through a view, and paths to the modules of a model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict, Unpack

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adapters.views import Composed, FlatRows, View

# --------------------------------------------------------------------------------------------------
# Dotted paths to the modules of a model. A module may run several times in a pass (ALBERT's one
# layer is all of its blocks). ``layers.0@2`` is its third call, and whatever is inside during that
# call.
# --------------------------------------------------------------------------------------------------


_CALL = re.compile(r"@(\d+)")


def module_path(path: str) -> str:
    """Return a path without call numbers."""
    return _CALL.sub("", path) if "@" in path else path


def call_number(path: str) -> int | None:
    """Return the number of the call in a path, None if its module is called only once."""
    number = _CALL.search(path)
    return int(number[1]) if number else None


def module_at(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path, whatever call of it the path names.

    Raises:
        AttributeError: there is none.
    """
    for part in module_path(path).split(".") if path else ():
        child = model._modules.get(part)
        # `get_submodule` names a missing module in its error.
        model = model.get_submodule(part) if child is None else child
    return model


def join(*parts: str) -> str:
    """Join dotted paths; empty ones are skipped."""
    return ".".join(part for part in parts if part)


def is_inside(path: str, *modules: str) -> bool:
    """Tell whether a path is the path of one of these modules, or of something inside one."""
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def has_module(model: nn.Module, path: str) -> bool:
    """Tell whether there is a module at a path; at "", the model itself."""
    module: object = model
    for part in module_path(path).split(".") if path else ():
        if not isinstance(module, nn.Module):
            return False
        child = module._modules.get(part)
        module = getattr(module, part, None) if child is None else child
    return module is not None


def token_embedding(model: nn.Module) -> nn.Module | None:
    """Return the module of a model's token embeddings; None if its class does not name one."""
    find = getattr(model, "get_input_embeddings", lambda: None)
    try:
        table: nn.Module | None = find()
    except NotImplementedError:
        return None
    return table


def members_of(modules: nn.Module) -> list[nn.Module]:
    """Return the modules in a list of modules; unlike `children`, repeat a module that occurs
    twice.
    """
    return [module for module in modules._modules.values() if module is not None]


#: The advice for a model with other modules than its adapter declares: a class was replaced by one
#: of another layout.
INFER = (
    'If a patch has another layout, TransformerBridge(model, automatic="always") finds out what is'
    " where"
)


def missing_module_message(path: str) -> str:
    """Return the error message for a module that has moved since the bridge was made, or is not at
    its declared place.
    """
    return (
        f"the model has no module {path}. If it was replaced since the bridge was made, make a new"
        f" bridge of the changed model, TransformerBridge(model). {INFER}"
    )


def core_path(model: nn.Module) -> str:
    """Return the path of the Hugging Face model inside its wrappers (PEFT, `torch.compile`,
    `DistributedDataParallel`); "" if it has none.
    """
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
    """Return the Hugging Face model inside its wrappers."""
    return model.get_submodule(core_path(model))


def learns_prompt(model: nn.Module) -> bool:
    """Tell whether PEFT puts learned tokens, or keys and values, before the model's input."""
    return hasattr(model, "get_base_model") and bool(
        getattr(model.active_peft_config, "is_prompt_learning", False)
    )


def base_path(model: nn.Module) -> str:
    """Return the path of the base model (the one without a head) inside `model`, "" if `model` is
    the base model.
    """
    core = core_path(model)
    module = model.get_submodule(core)
    prefix = getattr(module, "base_model_prefix", "")
    base = getattr(module, prefix, None) if prefix else None
    if base is None or not _takes_all(type(base), type(module)):
        return core
    return join(core, prefix)


def _takes_all(base: type[nn.Module], model: type[nn.Module]) -> bool:
    """Tell whether a base model takes the same inputs as its model. DINOv3's encoder has a base
    model's name, but takes embeddings.
    """
    main = getattr(model, "main_input_name", "input_ids")
    parameters = inspect.signature(base.forward).parameters
    if main == "input_ids" or main in parameters:
        return True
    return any(x.kind is x.VAR_POSITIONAL for x in parameters.values())


def path_from(model: nn.Module, path: str) -> str:
    """Return a declared path relative to `model`. It was declared relative to the base model, or,
    if it begins with a dot, to the model itself.
    """
    if path.startswith("."):
        return join(core_path(model), path[1:])
    return join(base_path(model), path)


#: The input or the output of a module.
Border = Literal["input", "output"]
#: ``input``: an argument of a module. ``output``: its output. ``attention``: inside the attention
#: that it computes. ``softmax``: the softmax in its forward. ``experts``: inside the module that
#: holds a mixture's experts. ``batched experts``: likewise, where it is one batched product.
#: ``router``: inside the module that chooses them by their logits. ``recurrence``: inside a mixer.
SiteKind = Literal[
    "input", "output", "attention", "softmax", "experts", "batched experts", "router", "recurrence"
]
#: ``standard``: in an unfiltered cache. ``heavy``: in it when the matching ``set_use_*`` is on.
#: ``extra``: only when named.
Group = Literal["standard", "heavy", "extra"]


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the model's own computation.

    Attributes:
        path: the module, as a dotted path from the Hugging Face model.
        kind: see `SiteKind`.
        key: for an input, the name of the argument (None: the first); for an output, the index in a
            tuple (None: the output itself); inside attention, one of ``q``, ``k``, ``scores`` (the
            input of the softmax), ``pattern`` (its output); inside expert e, ``{e}.in`` and
            ``{e}.out`` (its input and its output), ``{e}.gate``, ``{e}.pre`` (before and parallel
            to the activation function) and ``{e}.post`` (the input of its last projection); in a
            router, ``logits`` (of all experts, before the choice), ``product`` (of its matrix and
            its input) and ``weights`` (of all experts, zero for those not chosen); in a mixer, a
            channel of `adapters.mixers`, or ``state``.
    """

    path: str
    kind: SiteKind
    key: int | str | None = None


#: The sites that a view needs.
Sites = tuple[Site, ...]
#: Names of hook points.
PointNames = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LinkedPoint:
    """A point that receives the value written at another one (`hook_attn_in` feeds the query, key
    and value inputs).

    Attributes:
        name: the receiving point.
        convert: converts the written value to the linked point's own activation.
    """

    name: str
    convert: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Point:
    """A hook point as an adapter declares it.

    Attributes:
        name: the canonical name.
        site, view: its place in the model, and the view of the tensor there.
        axes: the axes of the activation, such as ``batch pos d_model``.
        depth: -1 before the blocks, the block's index inside one, the number of blocks after them.
        group: see `Group`.
        aliases: other names for it.
        sources: further sites whose tensors the view needs.
        linked: see `LinkedPoint`.
        separate_consumers: the points that read this one separately in HookedTransformer, where the
            norm before attention runs once each for query, key and value, so that each has its own
            gradient.
        stack: the list of blocks it belongs to (``blocks``, ``encoder``, ``decoder``), or ""
            outside of all.
        n_heads: for a point inside attention, the number of heads shown, even if the kernel repeats
            or packs them.
        flag: for a heavy point, the ``cfg.use_*`` field that includes it in an unfiltered cache.
        declared: whether an adapter declares it; False: a user added it (a basis, `bridge.at`).
    """

    name: str
    site: Site
    view: View
    axes: str
    depth: int
    group: Group = "standard"
    aliases: PointNames = ()
    sources: Sites = ()
    linked: tuple[LinkedPoint, ...] = ()
    separate_consumers: PointNames = ()
    stack: str = "blocks"
    flag: str | None = None
    n_heads: int | None = None
    declared: bool = True


class MoreOfPoint(TypedDict, total=False):
    """The optional fields of a point, see `Point`."""

    group: Group
    aliases: PointNames
    sources: Sites
    linked: tuple[LinkedPoint, ...]
    separate_consumers: PointNames
    flag: str | None
    n_heads: int | None


@dataclass(frozen=True)
class PointList:
    """The points of one part of a model, in the order of the computation.

    Attributes:
        prefix: the prefix of all their names, such as ``blocks.3.attn``.
        module: the path of the module that the paths of their sites begin with.
        depth, stack: the same for all of them, see `Point`.
        pos: the axis of positions.
        rows: the site that shows the batch size, for tensors of rows ``(batch pos)``.
        flat: their sites hold such rows.
        points: the points added so far; shared with the lists made by `inside`.
    """

    prefix: str = ""
    module: str = ""
    depth: int = -1
    stack: str = ""
    pos: str = "pos"
    rows: Sites = ()
    flat: bool = False
    points: list[Point] = field(default_factory=list)

    def inside(self, name: str, path: str = "") -> PointList:
        """Return a list for a module inside, which extends the prefix and the path; both share
        their points."""
        return replace(self, prefix=join(self.prefix, name), module=join(self.module, path))

    def site(self, path: str, kind: SiteKind = "output", key: int | str | None = None) -> Site:
        """Return a site of a module inside."""
        return Site(join(self.module, path), kind, key)

    def input(self, path: str) -> Site:
        """Return the site of the input of a module inside."""
        return self.site(path, "input")

    def add(
        self,
        name: str,
        site: Site | str,
        view: View | None = None,
        axes: str | None = None,
        **more: Unpack[MoreOfPoint],
    ) -> None:
        """Add a point.

        Args:
            name: the name after the prefix.
            site: see `Point`; a path means the output of the module at that path.
            view: see `Point`; None: the site's tensor unchanged.
            axes: see `Point`; None: the residual stream's.
            more: see `Point`; aliases come after the prefix, except aliases that begin with a dot.
        """
        if isinstance(site, str):
            site = self.site(site)
        view = view or View()
        if self.flat:
            view = Composed(view, FlatRows())
            more["sources"] = self.rows
        more["aliases"] = tuple(
            alias[1:] if alias.startswith(".") else join(self.prefix, alias)
            for alias in more.get("aliases", ())
        )
        axes = axes or f"batch {self.pos} d_model"
        point = Point(
            join(self.prefix, name), site, view, axes, self.depth, stack=self.stack, **more
        )
        self.points.append(point)
