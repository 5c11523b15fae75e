"""A model as a tree of modules: its parts and hook points, and what users put in their place."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from adapters import ModelMap
from adapters.points import Point, join
from adapters.views import View
from bridge.hooks.context import CURRENT, Listener
from bridge.hooks.hooks import Handle, checked
from bridge.hooks.hooks import HookPoint as AnyHookPoint
from bridge.hooks.names import NamesFilter, suggestion
from bridge.legacy.calling import CallableParts, ReplacedForward
from bridge.legacy.components import kind_of
from bridge.legacy.hook_points import CALLS, HookedRootModule, HookPoint, ListsHooks, point_named
from bridge.legacy.HookedTransformerConfig import HookedModelConfig
from bridge.legacy.parameters import HoldsParameters, PartParameters, names_of
from bridge.legacy.parts import Blocks, Part
from bridge.legacy.table import why_not
from bridge.run.run import points_that_run
from bridge.weights import NameTree
from weight_processing.saving import untie

#: HookedTransformer's name of the point at the tokens, which it has where the configuration says so.
_TOKENS = "embed.hook_in"
#: The embedding, by either of its names, and the unembedding: they may be one parameter.
ENDS = ("embed.W_E", "embed.embed.W_E", "unembed.W_U")


def _renamed(point: Point) -> Point:
    if point.name != _TOKENS:
        return point
    return replace(point, name="hook_tokens", aliases=(*point.aliases, _TOKENS), group="heavy", flag="use_hook_tokens")


class ModuleTree(HoldsParameters, CallableParts, ListsHooks):
    """A bridge that is a tree of modules, whose parts can be called, replaced and copied."""

    #: The class whose names it has, of which some are left out.
    name_before = "HookedTransformer"
    makes_points = HookPoint
    refuses_silent_hooks = False  # they do not fire, as in HookedTransformer
    #: Hook points that HookedTransformer lacks, while a user's own have their names.
    gave_way: dict[str, AnyHookPoint]
    #: The parts by name, and the names of the weights that stand directly in each.
    parts: dict[str, Any]
    own_weights: dict[str, list[str]]
    #: For the path of each parameter, the part that it stands in (where tied, two), and its name there.
    parameter_names: dict[str, dict[str, str]]

    def _wire(self, found: ModelMap) -> None:
        if not isinstance(self.cfg, HookedModelConfig):
            self.cfg = HookedModelConfig.of(self.cfg)
        mine = self.__dict__
        if "original_model" in self._modules:  # the tree holds the parts; what they stand for is not in it twice
            mine["original_model"] = self._modules.pop("original_model")
        super()._wire(replace(found, points=[_renamed(point) for point in found.points]))
        if hasattr(type(self), "set_ungroup_grouped_query_attention"):
            self.cfg.__dict__["acts"] = self.set_ungroup_grouped_query_attention
        if not isinstance(self._parameters, PartParameters):
            mine["_parameters"] = PartParameters(self, "", self._parameters)
        mine["calls"], mine["spliced"], mine["gave_way"] = {}, {}, {}
        self._grow()
        self.setup()

    @property
    def tree(self) -> NameTree:
        """Names and weights by the parts of their names."""
        return self._tree

    def _grow(self) -> None:
        """Makes the tree: a module for each part, with the hook points in it."""
        known = self.__dict__.setdefault("parts", {})
        for part in known.values():
            for key in [key for key, module in part._modules.items() if self._is_own(part.name, key, module)]:
                del part._modules[key]
        names, inside = [*self.weights.getters, *self.wiring.points], dict[str, set[str]]()
        self.__dict__["own_weights"], self.__dict__["parameter_names"] = {}, {}
        for name in names:
            path, _, last = name.rpartition(".")
            if name in self.weights.getters:
                self.own_weights.setdefault(path, []).append(last)
            while path:
                inside.setdefault(path, set()).add(last)
                path, _, last = path.rpartition(".")
        for name in names:
            parent: nn.Module = self
            *above, last = name.split(".")
            for depth, word in enumerate(above):
                path = ".".join(above[: depth + 1])
                if word not in parent._modules:
                    parent._modules[word] = known.get(path) or self._new(path, inside[path])
                parent = parent._modules[word]  # type: ignore[assignment]
            if name in self.wiring.points:
                parent._modules[last] = self.wiring.points[name]  # type: ignore[assignment]

    def _new(self, path: str, inside: set[str]) -> nn.Module:
        if all(word.isdigit() for word in inside):
            self.parts[path] = made = Blocks(self, path)
            return made
        return kind_of(path, inside, self.cfg).of(self, path)

    @property
    def context_level(self) -> int:
        """How many ``with`` statements of hooks are open where it is asked for."""
        return len(CURRENT.get().visible - {None})

    def points_of_run(self, names: NamesFilter | AnyHookPoint, forward_kwargs: dict[str, Any]) -> list[AnyHookPoint]:
        """The chosen hook points that lie in the layers that run: the others do not fire, as in HookedTransformer."""
        return points_that_run(self, self.select_hooks(names), forward_kwargs)

    def process_weights(self, *args: Any, **kwargs: Any) -> Any:
        """As for `TransformerBridge.process_weights`; the part of a folded norm gives way to one of another class."""
        done = super().process_weights(*args, **kwargs)
        for name, part in [*self.parts.items()]:
            kind = kind_of(name, {*part._modules, *self.own_weights.get(name, ())}, self.cfg)
            path, _, last = name.rpartition(".")
            parent: nn.Module = self.parts[path] if path else self
            if isinstance(part, Part) and kind is not type(part) and parent._modules.get(last) is part:
                parent._modules[last] = new = kind.of(self, name)
                new.__dict__ |= part.__dict__  # hook points and all that it was given: whoever has the old one goes on
                if name in self.calls:
                    self.calls[name].part = new
        return done

    def adopt_part(self, part: Part) -> None:
        """Lets a part stand where this model has one of its name, which was made with the model."""
        part._modules.update(self.parts[part.name]._modules)
        self.parts[part.name] = part
        path, _, last = part.name.rpartition(".")
        self.get_submodule(path)._modules[last] = part

    # What is put in.

    def setup(self) -> None:
        """Names all modules, and finds the hook points in modules that were put in since.

        Raises:
            ValueError: a hook point in them has the name of one of the model's own.

        Example:
            >>> from torch import nn
            >>> from bridge.embedded import MODEL_DIR
            >>> from bridge.legacy import HookedTransformer, HookPoint
            >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
            >>> model.blocks[0].mlp = nn.Sequential(model.blocks[0].mlp, HookPoint())
            >>> list(model.run_with_cache("Mary and", names_filter="blocks.0.mlp.1")[1])
            ['blocks.0.mlp.1']
        """
        points, here = self.wiring.points, self._hook_points_put_in()
        placed = {name: point for name, point in points.items() if getattr(point, "is_standalone", False)}
        for name, point in placed.items():
            if here.get(name) is not point:
                self._take_out(name)
        for name, point in here.items():
            if points.get(name, point) is not point:
                self._make_way(name)
        for name, point in here.items():
            if name not in points:
                self._place(name, point)
        if placed or here:
            in_order = sorted(points.items(), key=lambda item: item[1].order)
            points.clear()
            points.update(in_order)
        self.names.refresh()
        self._tree.refresh()

    def _hook_points_put_in(self) -> dict[str, HookPoint]:
        """The hook points in modules that were put in, by name."""
        named = (*self.named_modules(), *self.original_model.named_modules())
        return {name: module for name, module in named if isinstance(module, HookPoint) and module.is_standalone}

    def _take_out(self, name: str) -> None:
        """Takes a user's hook point out; one that it stood in the place of is there again."""
        point = self.wiring.points.pop(name)
        assert isinstance(point, HookPoint)
        point.keep_listeners(point.leave())
        if name in self.gave_way:
            self.wiring.points[name] = self.gave_way.pop(name)

    def _make_way(self, name: str) -> None:
        """Takes a hook point that HookedTransformer does not have away, whose name one of the user's has.

        Raises:
            ValueError: HookedTransformer has it.
        """
        if self.wiring.points[name].point.group != "extra":
            raise ValueError(f"{name} is a hook point of the model already: give the other one another name")
        self.gave_way[name] = self.wiring.points.pop(name)

    def _place(self, name: str, point: HookPoint) -> None:
        depth = self.cfg.n_layers if name.startswith(("ln_final.", "unembed.")) else -1
        place = point_named(name, depth, [stack.name for stack in self.architecture.stacks])
        others = self.wiring.points.values()
        order = max((hook.order for hook in others if hook.point.depth == place.depth), default=len(others))
        hooks = point.leave()
        point.name, point.point, point.order = name, place, order
        self.wiring.adopt(point)
        point.join(self.wiring, hooks)

    def put(self, parent: nn.Module, prefix: str, name: str, value: Any) -> None:
        """Assigns to what is in a part (of this name; of the model itself, which is called ""): a tensor to a weight, a
        module to a part or a hook point, in whose place it is called, or anything to any other attribute.

        Raises:
            AttributeError: there is no such part, but one with a similar name.
            TypeError: what is there cannot be set to this.
            ValueError: a weight of another shape.
        """
        full, was = join(prefix, name), parent._modules.get(name)
        point = self.wiring.points.get(full)
        if full in self.weights.getters:
            self._set_weight(full, value)
        elif self._has(full):
            if not isinstance(value, nn.Module):
                raise TypeError(f"{full} cannot be set to {type(value).__name__}: a module can take its place")
            if point is not None:
                return self._splice(parent, name, point, value)
            if isinstance(self.parts[full], Blocks):
                self.parts[full].refuse()
            if name == "pos_embed":
                raise TypeError(f"{full} cannot be replaced: its modules can, or use hooks on its hook points")
            self.call_in_place_of(self.parts[full])
            parent._modules[name] = value
            try:
                self.setup()
            except ValueError:
                parent._modules[name] = was
                self.setup()
                raise
        else:
            self._set_other(parent, prefix, name, value)

    def _set_other(self, parent: nn.Module, prefix: str, name: str, value: Any) -> None:
        """Sets what is neither a weight nor the model's own part or hook point."""
        known = [*parent._modules, *self._tree.children.get(prefix, ())]
        is_new = isinstance(value, nn.Module | Tensor) and parent._modules.get(name) is None
        hint = suggestion(name, known) if is_new else ""
        if hint and not isinstance(value, HookPoint):
            raise AttributeError(f"{prefix or 'the model'} has no {name!r}.{hint}")
        nn.Module.__setattr__(parent, name, value)
        if name == "forward" and isinstance(parent, Part):
            self.call_in_place_of(parent)

    def _set_weight(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} cannot be set to {type(value).__name__}: weights take tensors")
        why = self.fits(name, value)
        if why is not None:
            raise ValueError(why) if "shape" in why else TypeError(why)
        self.write({name: value})

    def _has(self, name: str) -> bool:
        """Whether a part or a hook point of this name is the Hugging Face model's."""
        point = self.wiring.points.get(name)
        return name in self.parts or (point is not None and not getattr(point, "is_standalone", False))

    def call_in_place_of(self, part: Part) -> None:
        """Lets the model call what stands in a part's place, where it calls its own module."""
        if part.name in self.calls:
            return
        path, _, last = part.name.rpartition(".")
        parent = self.parts[path] if path else self
        view, out = View(), self.names.aliases.get(f"{part.name}.hook_out", f"{part.name}.hook_out")
        if last in ("attn", "mlp") and out in self.wiring.points:
            site, at = self.wiring.points[out].point.site, dict(self._paths()).get(part.name, "")
            if site.path == at and site.kind == "output":
                view = self.wiring.points[out].point.view
            elif site.path.startswith(f"{at}."):
                raise TypeError(
                    f"{part.name} cannot be replaced: {type(part.module).__name__} does more than {out} shows, such as "
                    f"adding the residual stream; use hooks on {out}"
                )
        self.calls[part.name] = ReplacedForward(part, lambda: parent._modules[last], view)  # type: ignore[arg-type,return-value]

    def _splice(self, parent: nn.Module, name: str, point: AnyHookPoint, module: nn.Module) -> None:
        """Calls a module with the activation at a hook point; later computation uses what it returns."""
        if point.name in self.spliced:
            self.spliced.pop(point.name).remove()
        if isinstance(module, HookPoint) and not module._modules:
            hooks = module.leave() if module is not point else ()
            parent._modules[name] = point  # type: ignore[assignment]
            for listener in hooks:
                self.wiring.add(point, listener)
        else:
            parent._modules[name] = module
            self.spliced[point.name] = self._put_at(point, module)
        self.setup()

    def _put_at(self, point: AnyHookPoint, module: nn.Module) -> Handle:
        def call(activation: Tensor, hook: HookPoint) -> Tensor:
            token = CALLS.set({**CALLS.get(), hook: None})  # it may call the hook point, whose hooks the model runs
            try:
                return checked(module(activation.clone()), activation, listener, point)
            finally:
                CALLS.reset(token)

        listener = Listener("follow", call)  # no hook of the user's: it stays, and what it computes is of the run
        self.wiring.add(point, listener)
        return Handle(point, listener, self.wiring)

    def __getattr__(self, name: str) -> Any:
        if why := why_not(self.name_before, name):
            raise AttributeError(why)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and name in self._modules and "spliced" in self.__dict__:
            self.put(self, "", name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self.check_removal("", name)
        super().__delattr__(name)

    def check_removal(self, prefix: str, name: str) -> None:
        """Looks whether something may be taken out of a part of this name.

        Raises:
            TypeError: the Hugging Face model has it, and would go on to call it.
        """
        full = join(prefix, name)
        if self._has(full):
            raise TypeError(f"{full} is the Hugging Face model's: put a module in its place, such as nn.Identity()")

    # Weights.

    @property
    def W_gate(self) -> Tensor | None:  # type: ignore[override]
        """The gates' weights of all layers; None without gates."""
        return super().W_gate if self.cfg.gated_mlp else None

    def fits(self, name: str, value: Tensor) -> str | None:
        """Why a weight cannot be set to a value; None where it can, or has it."""
        here = self.weights[name]
        if here.shape != value.shape:
            return f"{name} has shape {list(here.shape)}, not {list(value.shape)}"
        if not self._is_stored(here) and not torch.equal(here.to(value), value):
            kind = type(self.core).__name__
            return f"{name} is fixed in {kind}, or computed from its parameters: other values have no place"
        return None

    def _is_stored(self, weight: Tensor) -> bool:
        at = weight.untyped_storage().data_ptr()
        return any(p.untyped_storage().data_ptr() == at for p in self.original_model.parameters())

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Writes weights into the model, where `fits` finds a place."""
        ends = [name for name in ENDS if name in self.weights.getters]
        if set(ends) & set(weights) and len(ends) == 2:
            now = [self.weights[name].detach() for name in ends]
            embed, unembed = (weights.get(name, value).to(value) for name, value in zip(ends, now, strict=True))
            if now[0].data_ptr() == now[1].data_ptr() and not torch.equal(embed.T, unembed):
                untie(self.core, self.architecture)
        for name, value in weights.items():
            here = self.weights[name]
            if self._is_stored(here):
                here.copy_(value)

    # What torch asks of a module.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The Hugging Face model's parameters, and those of modules that were put in, by their places in the tree. One
        has the name of the weight that is stored in it, or of several, and its own shape."""
        by_part = self._sort_parameters()

        def members(module: nn.Module) -> ItemsView[str, Any]:
            held: Any = module._parameters
            mine = isinstance(held, PartParameters) and held.host is self
            return held.all(by_part).items() if mine else held.items()

        yield from self._named_members(members, prefix, recurse, remove_duplicate)

    def parameters_of(self, part: str) -> Mapping[str, nn.Parameter]:
        """The Hugging Face model's parameters that stand in a part; in the model itself, called "", the rest."""
        return self._sort_parameters().get(part, {}) if "parts" in self.__dict__ else {}

    def _sort_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        given = dict(self.original_model.named_parameters())
        if not given.keys() <= self.parameter_names.keys():
            modules = [(name, path) for name, path in self._paths() if name in self.parts]
            self.parameter_names.update(names_of(given, self.weights, modules))
        found: dict[str, dict[str, nn.Parameter]] = {}
        for path, parameter in given.items():
            for part, name in self.parameter_names[path].items():
                found.setdefault(part, {})[name] = parameter
        return found

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The weights by HookedTransformer's names: views of the model's own parameters."""
        return nn.Module.state_dict(self, *args, **kwargs)

    def to(self, *args: Any, print_details: bool = True, **kwargs: Any) -> Self:
        """Moves the model and what was put in, or changes the type of their weights."""
        given = [x for x in args if x is not None and not isinstance(x, bool)]
        self.original_model.to(*given, **kwargs)  # which may refuse
        return nn.Module.to(self, *given, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.original_model._apply(fn, recurse)
        for *_, module in self._user_modules():
            module._apply(fn, recurse)
        for holder in (self, *self.parts.values()):
            if isinstance(holder, HoldsParameters):
                holder.own_state()._apply(fn, recurse=False)
        return self

    @property
    def mod_dict(self) -> dict[str, nn.Module]:  # type: ignore[override]
        """All modules by name."""
        return {name: module for name, module in self.named_modules() if name}

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("parts", "own_weights", "parameter_names", "calls", "spliced", "gave_way"):
            state.pop(name)
        theirs = {(name, key): module for name, key, module in self._user_modules()}
        in_place = {at for at in theirs if at[0] or join(*at) in self.parts or join(*at) in self.hook_dict}
        state["put_in"] = [(*at, theirs[at]) for at in theirs if at in in_place]
        state["_modules"] = {at[1]: module for at, module in theirs.items() if at not in in_place}
        state["given"] = {}
        for name, part in self.parts.items():
            if "forward" in part.__dict__:
                part.__getstate__()  # which says why it cannot be copied
            state["given"][name] = getattr(part._parameters, "own", {}), part._buffers
        state["_parameters"] = self.__dict__["_parameters"].own
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        put_in, given = state.pop("put_in"), state.pop("given")
        super().__setstate__(state)
        for name, (parameters, buffers) in given.items():
            self.parts[name]._parameters.update(parameters)
            self.parts[name]._buffers.update(buffers)
        for name, key, module in put_in:
            self.put(self.parts[name] if name else self, name, key, module)
        self.setup()

    def _user_modules(self) -> Iterator[tuple[str, str, nn.Module]]:
        """The modules that were put in: the part each stands in, its name there, and the module."""
        for name, part in {"": self, **self.parts}.items():
            for key, module in part._modules.items():
                if module is not None and not self._is_own(name, key, module):
                    yield name, key, module

    def _is_own(self, name: str, key: str, module: nn.Module | None) -> bool:
        """Whether what stands in a part is what the model has there, rather than the user's."""
        of_model = isinstance(module, HookPoint) and not module.is_standalone
        return of_model or module is self.parts.get(join(name, key))


HookedRootModule.register(ModuleTree)  # which programs ask for by isinstance
