"""Modules that a user puts into a model: hook points in them, and the model's own hook points inside of wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from adapters import ModelMap, Weights
from adapters.paths import base_path, join
from adapters.points import Point, Site
from adapters.views import View
from bridge.bridge import TransformerBridge
from bridge.hooks.context import CURRENT, Scope, forward_pass
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.listener import Handle, Listener
from bridge.hooks.modules import Finder, first_parameter
from bridge.hooks.names import suggestion
from bridge.legacy.editable import EditableComponent, EditableTree
from bridge.legacy.point import HookPoint as PlacedHookPoint
from bridge.legacy.running import LegacyNames
from bridge.legacy.tokens import position_embeddings
from bridge.run.layer_range import StopRun
from bridge.taps.taps import TAPS


class WeightsInside(Weights):
    """Weights that are also found inside of wrappers."""

    def module(self, path: str) -> nn.Module:
        full = self.full_path(path)
        return self.model.get_submodule(inside(self.model, full) or full)


def inside(root: nn.Module, path: str) -> str | None:
    """Where a module is now: at its path, or inside of what was put in its way. None: nowhere."""
    module, parts = root, path.split(".") if path else []
    for i, part in enumerate(parts):
        child = module._modules.get(part)
        if child is None and isinstance(getattr(module, part, None), nn.Module):
            child = getattr(module, part)
        if child is None:
            for name, wrapped in module.named_children():
                found = inside(wrapped, ".".join(parts[i:]))
                if found is not None:
                    return join(*parts[:i], name, found)
            return None
        module = child
    return path


class PartsAsBefore(TransformerBridge):
    """A bridge whose parts can be replaced by wrappers with hook points of their own."""

    placed: dict[str, PlacedHookPoint]
    spliced: dict[str, tuple[nn.Module, Handle]]

    def _wire(self, found: ModelMap) -> None:
        super()._wire(found)
        # Kept out of the module tree: what is placed is in the model's, and what is spliced is no part of the model.
        self.__dict__["placed"], self.__dict__["spliced"] = {}, {}
        self._declared = {point.name: point for point in found.points}
        self.names = LegacyNames(self.wiring.points)
        self._tree = EditableTree(self.names, lambda: self.weights, self)
        self.setup()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("placed", "spliced", "_declared"):
            state.pop(name)
        return state

    @property
    def weights(self) -> Weights:
        """The canonical weights by HookedTransformer's state-dict names."""
        if self._weights is None:
            self._weights = WeightsInside(self.architecture, self.original_model, self.cfg)
        return self._weights

    def setup(self) -> None:
        """Finds what was put into the model since: hook points in it, and the model's own inside of it.

        A `bridge.legacy.hook_points.HookPoint` anywhere in the Hugging Face model becomes a hook point of this bridge,
        with a name such as ``blocks.0.mlp.hook_sae``; the model's own keep their names.

        Raises:
            ValueError: a hook point in it has the name of one of the model's own.
            RuntimeError: a module was wrapped while hooks were attached inside of it.

        Example:
            >>> from torch import nn
            >>> from bridge.embedded import MODEL_DIR
            >>> from bridge.legacy import HookedTransformer
            >>> from bridge.legacy.hook_points import HookPoint
            >>> class Wrapper(nn.Module):
            ...     def __init__(self, mlp):
            ...         super().__init__()
            ...         self.mlp, self.hook_sae = mlp, HookPoint()
            ...     def forward(self, x):
            ...         return self.hook_sae(self.mlp(x))
            >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
            >>> model.blocks[0].mlp = Wrapper(model.blocks[0].mlp.module)
            >>> model.setup()
            >>> names = ["blocks.0.mlp.hook_sae", "blocks.0.mlp.hook_post"]
            >>> _, cache = model.run_with_cache("Mary and", names_filter=names)
            >>> sorted(cache)
            ['blocks.0.mlp.hook_post', 'blocks.0.mlp.hook_sae']
        """
        points = self.wiring.points
        for point in list(points.values()):
            if point.name in self.placed:
                point.remove_hooks("both", including_permanent=True)
                del points[point.name]
            else:
                self._follow(point)
        self.placed.clear()
        for path, module in self.original_model.named_modules():
            if isinstance(module, PlacedHookPoint):
                self._place(*self._canonical(path), Site(path, "output"), module)
        for at, (spliced, _) in self.spliced.items():
            for path, module in spliced.named_modules():
                if isinstance(module, PlacedHookPoint):
                    site = Site(f"{at}.{path}", "output")  # no path in the model: it is told where to find it
                    self.wiring.find_at(site, Finder(spliced, path))
                    self._place(f"{at}.{path}", points[at].point.depth, site, module)
        if self.placed:
            in_order = sorted(points.items(), key=lambda item: item[1].order)
            points.clear()
            points.update(in_order)
        self.names.refresh()
        self._tree.refresh()

    def _follow(self, hook: HookPoint) -> None:
        """Moves a hook point of the model's to where its module is now."""
        point = self._declared[hook.name]
        site, sources = self._now(point.site), tuple(self._now(source) for source in point.sources)
        if site == hook.point.site and sources == hook.point.sources:
            return
        if hook.listeners:
            raise RuntimeError(
                f"a module was wrapped while {hook.name} had hooks: reset_hooks(), then wrap, then setup()"
            )
        hook.point = replace(point, site=site, sources=sources)
        self.wiring.place(hook)

    def _now(self, site: Site) -> Site:
        attn = self.architecture.stack.attn
        if site.kind in TAPS and site.kind != "experts" and attn is not None:
            # The module itself, which what wraps it does not look like: it is where its output projection is.
            found = inside(self.original_model, join(site.path, attn.o))
            path = found[: -len(attn.o) - 1] if found else None
        else:
            path = inside(self.original_model, site.path)
        return site if path is None or path == site.path else replace(site, path=path)

    def _place(self, name: str, depth: int, site: Site, module: PlacedHookPoint) -> None:
        points = self.wiring.points
        if name in points:
            raise ValueError(f"{name} is a hook point of the model already: give the one at {site.path} another name")
        stack = "blocks" if 0 <= depth < self.cfg.n_layers else ""
        order = max((hook.order for hook in points.values() if hook.point.depth == depth), default=len(points))
        point = Point(name, site, View(), "...", depth, stack=stack)
        self.wiring.place(HookPoint(point, order, self.wiring))
        module.name = name
        self.placed[name] = module

    def _parts(self) -> Iterator[tuple[str, str, int]]:
        """The paths of modules that play canonical parts, with their names and depths."""
        stack = self.architecture.stack
        for i, path in enumerate(self.block_paths):
            for part, at in stack.block_at(i).module_paths.items():
                yield join(path, at), f"blocks.{i}.{part}", i
            yield path, f"blocks.{i}", i
        base = base_path(self.original_model)
        for name, below, depth in (
            ("embed", self.architecture.embed, -1),
            ("pos_embed", self.architecture.pos_embed, -1),
            ("ln_final", stack.final_norm.path if stack.final_norm else None, self.cfg.n_layers),
        ):
            if below:
                yield join(base, below), name, depth

    def _canonical(self, path: str) -> tuple[str, int]:
        """The name of a module by its path, and the layer that it belongs to."""
        for start, name, depth in self._parts():
            if path.startswith(start + "."):
                return name + path[len(start) :], depth
        return path, -1

    def module_path(self, name: str) -> str:
        """Where the module of a part is.

        Args:
            name: such as ``blocks.0.mlp``.

        Raises:
            AttributeError: no module plays this part alone.
        """
        paths = {part: path for path, part, _ in self._parts()}
        if name not in paths:
            raise AttributeError(f"{name} is not one module of the model.{suggestion(name, paths)}")
        return paths[name]

    def replace_part(self, name: str, module: nn.Module) -> None:
        """Puts a module in the place of an attention or an MLP, and calls `setup`.

        Args:
            name: the part, such as ``blocks.0.mlp``.
            module: a wrapper around ``model.blocks[0].mlp.module``, say; it takes and returns what the other did.

        Raises:
            AttributeError: no module plays this part alone.
            TypeError: it is neither attention nor MLP.
        """
        if not name.endswith((".attn", ".mlp")):
            raise TypeError(f"{name} cannot be replaced: only attention and MLPs can")
        parent, _, last = self.module_path(name).rpartition(".")
        setattr(self.original_model.get_submodule(parent), last, module)
        self.setup()

    def call_part(self, name: str, *inputs: Any, **kwargs: Any) -> Tensor:
        """What a part of the model makes of tensors. Hooks inside of it act.

        Args:
            name: ``embed`` (of tokens), ``pos_embed`` (of tokens, ``past_kv_pos_offset`` and ``attention_mask``: the
                positions' embeddings, zero for padding), a block such as ``blocks.0`` (of a residual stream), its
                norms, ``ln_final``, attention and MLP (of what they read), or ``unembed``. Attention is run within its
                block, where hook points that stand before it see zeros; query, key and value input are one.
            inputs, kwargs: the tensor, and what else the part takes.

        Raises:
            TypeError: the part cannot be called by itself, or not with these.

        Example:
            >>> import torch
            >>> from bridge.embedded import MODEL_DIR
            >>> from bridge.legacy import HookedTransformer
            >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
            >>> residual = model("Mary and John", stop_at_layer=3)
            >>> logits = model.unembed(model.ln_final(model.blocks[3](residual)))
            >>> torch.allclose(logits, model("Mary and John"), atol=1e-4)
            True
        """
        paths = {part: path for path, part, _ in self._parts()}
        stack, _, part = name.partition(".")
        if stack == "blocks" and part.isdigit():
            made: Tensor = self(*inputs, start_at_layer=int(part), stop_at_layer=int(part) + 1, **kwargs)
            return made
        if name == "pos_embed":
            return position_embeddings(self.weights["pos_embed.W_pos"], *inputs, **kwargs)
        if stack == "blocks" and part.partition(".")[2] == "attn":
            return self._attend(name, *inputs, **kwargs)
        if name == "unembed":
            module: nn.Module = self.core.get_output_embeddings()
        elif name in paths and name.rpartition(".")[2] in ("embed", "ln1", "ln2", "ln_final", "mlp"):
            module = self.original_model.get_submodule(paths[name])
        else:
            raise TypeError(f"{name} cannot be called by itself: run the model, with start_at_layer and stop_at_layer")
        with forward_pass():
            made = module(*inputs, **kwargs)
        return made

    def _attend(
        self, name: str, query_input: Tensor, key_input: Tensor | None = None, value_input: Tensor | None = None
    ) -> Tensor:
        """What attention makes of its input: the model runs its block, where it is given that and then left."""
        for other in (key_input, value_input):
            if other is not None and not torch.equal(other, query_input):
                raise TypeError(
                    f"{name} reads one tensor: inputs of queries, keys and values differ by hooks on hook_q_input, "
                    "hook_k_input and hook_v_input"
                )
        layer = int(name.split(".")[1])
        scope = Scope()

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if scope not in CURRENT.get().visible:
                return None
            if args:
                return (query_input, *args[1:]), kwargs
            return args, kwargs | {first_parameter(type(module).forward): query_input}

        def leave(out: Tensor, hook: HookPoint) -> None:
            raise StopRun(out)

        module = self.original_model.get_submodule(self.module_path(name))
        handle = module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        try:
            out = self.names.find(f"{name}.hook_out")
            with self.wiring.scoped([(out, Listener("fwd", leave, scope))], scope):
                made: Tensor = self(torch.zeros_like(query_input), start_at_layer=layer, stop_at_layer=layer + 1)
        finally:
            handle.remove()
        return made

    def splice(self, name: str, module: nn.Module) -> None:
        """Puts a module, such as a sparse autoencoder, at a hook point: later computation uses what it returns.

        ``model.blocks[0].mlp.hook_post = sae`` does the same, and assigning a new `HookPoint` takes it away. Hook
        points in it become hook points of this bridge, such as ``blocks.0.mlp.hook_post.hook_sae_acts``. It acts in
        this thread's runs, and is no part of the model: not of its parameters, state dict, or copies.

        Args:
            name: the hook point.
            module: called with the activation; a bare `HookPoint` takes away what is there.

        Raises:
            UnknownHookError: there is no such hook point.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from bridge.embedded import MODEL_DIR
            >>> from bridge.legacy import HookedTransformer
            >>> from bridge.legacy.hook_points import HookPoint
            >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
            >>> plain = model("Mary and John")
            >>> model.blocks[0].mlp.hook_post = nn.Sequential(nn.ReLU(), HookPoint())
            >>> _, cache = model.run_with_cache("Mary and John")
            >>> bool(cache["blocks.0.mlp.hook_post.1"].min() == 0)
            True
            >>> model.blocks[0].mlp.hook_post = HookPoint()
            >>> torch.equal(model("Mary and John"), plain)
            True
        """
        point = self.names.find(name)
        if point.name in self.spliced:
            self.spliced.pop(point.name)[1].remove()
        if not isinstance(module, PlacedHookPoint):
            self.spliced[point.name] = module, self._put_at(point, module)
        self.setup()

    def _put_at(self, point: HookPoint, module: nn.Module) -> Handle:
        def call(activation: Tensor, hook: HookPoint) -> Tensor:
            made: Tensor = module(activation)
            return made

        # Hooks in it are of this run, as in no other function of the user's.
        listener = Listener("fwd", call, permanent=True, in_run=True)
        self.wiring.add(point, listener)
        return Handle(point, listener, self.wiring)

    def __setattr__(self, name: str, value: Any) -> None:
        tree = self.__dict__.get("_tree")
        if isinstance(value, nn.Module) and tree is not None and name in tree.children[""]:
            tree.put("", name, value)
        else:
            super().__setattr__(name, value)

    @property
    def mod_dict(self) -> dict[str, Any]:
        """Hook points and parts by name."""
        parts = [prefix for prefix in self._tree.children if prefix and prefix not in self.hook_dict]
        return {name: EditableComponent(self._tree, name) for name in parts} | self.hook_dict  # type: ignore[arg-type]

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes hooks, also those that were added to hook points in the user's modules themselves.

        Args:
            clear_contexts, direction, including_permanent, level: as for `TransformerBridge.reset_hooks`. What is
                spliced stays.
        """
        super().reset_hooks(clear_contexts, direction, including_permanent, level)
        for placed in self.placed.values():
            placed.remove_hooks(direction, including_permanent, level)
            if clear_contexts:
                placed.clear_context()
        if including_permanent:
            for name, (module, handle) in self.spliced.items():
                handle.remove()
                self.spliced[name] = module, self._put_at(self.hook_dict[name], module)
