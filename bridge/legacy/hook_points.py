"""`HookPoint` and `HookedRootModule`: the bridge's hook point as a torch module, and modules of users that hold some.

A Hugging Face model needs none of this: its hook points are `bridge.HookPoint`. These are for a user's own modules: a
toy model, or a wrapper that is put into a model (see `HookedTransformer.setup`).
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adapters.points import Point, Site
from adapters.views import Call, View
from bridge.facade.hooks import AddsHooks
from bridge.hooks import hooks as bridge_point
from bridge.hooks.arguments import check_choice
from bridge.hooks.context import Listener
from bridge.hooks.hooks import AttachesListeners, Handle
from bridge.hooks.names import Names, NamesFilter
from bridge.legacy.table import named, why_not

T = TypeVar("T")

#: ``fn(activation, hook=point)`` returns the new activation, or None.
HookFunction = Callable[..., Any]
#: Where something is to be, or None for where it is.
DeviceType = torch.device | None

#: For parts and hook points in whose place a user's module is being called: what the old one does there.
CALLS: ContextVar[dict[nn.Module, Callable[..., Any] | None]] = ContextVar("legacy_calls", default={})  # noqa: B039


@dataclass(frozen=True)
class TorchHook:
    """A function at a hook point as torch would call it; it is called as HookedTransformer calls its own."""

    point: bridge_point.HookPoint
    function: HookFunction

    @property
    def __name__(self) -> str:
        function = self.function
        return f"partial({function.func!r},...)" if isinstance(function, partial) else repr(function)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.function(output[0] if isinstance(output, tuple) else output, hook=self.point)


class TorchHandle(Handle, RemovableHandle):  # type: ignore[misc,override]
    """A handle as torch has them. Its dictionary can be read; hook points have methods that add and remove hooks."""

    def hooks_dict_ref(self) -> Mapping[int, TorchHook]:  # type: ignore[override]
        """All functions of its kind at its hook point, by the numbers of their handles."""
        there = [listener for listener in self.hook.listeners if listener.kind == self.listener.kind]
        return MappingProxyType({id(listener): TorchHook(self.hook, listener.fn) for listener in there})


class LensHandle(NamedTuple):
    """One hook at a hook point: `hook` removes it, `user_hook` is the function."""

    hook: TorchHandle
    is_permanent: bool = False
    context_level: int | None = None
    user_hook: HookFunction | None = None

    def remove(self) -> None:
        """Removes the hook."""
        self.hook.remove()


def point_named(name: str, depth: int = -1, stacks: Collection[str] | None = None) -> Point:
    """A place in a module of the user's.

    Args:
        name: its name; one such as ``blocks.3.mlp.hook_post`` says its layer.
        depth: the layer, where the name does not say it.
        stacks: what names of layers begin with; None: whatever comes before a number.
    """
    stack, _, rest = name.partition(".")
    index = rest.partition(".")[0]
    inside = index.isdigit() and (stacks is None or stack in stacks)
    return Point(name, Site(name, "output"), View(), "...", int(index) if inside else depth, stack=stack * inside)


class HookPoint(bridge_point.HookPoint, nn.Module):
    """An identity module at which an activation can be read and changed.

    One that a user makes runs its hooks when it is called. Those of a model are called by the model itself.

    Attributes:
        name: its name in the root module, set by `HookedRootModule.setup`.
        ctx: a dictionary for hook functions to keep state in.

    Example:
        >>> import torch
        >>> from bridge.legacy.hook_points import HookPoint
        >>> point = HookPoint()
        >>> handle = point.add_hook(lambda x, hook: x * 2)
        >>> point(torch.ones(2))
        tensor([2., 2.])
    """

    __call__ = nn.Module.__call__
    one_tensor = True

    def __init__(self, point: Point | None = None, order: int = 0, attaches: AttachesListeners | None = None) -> None:
        nn.Module.__init__(self)
        super().__init__(point or point_named(""), order, attaches or AttachesListeners())
        self.is_standalone = point is None
        if point is None:
            self.name = None  # type: ignore[assignment]  # until `setup` gives it one

    def forward(self, x: Tensor) -> Tensor:
        """What the hooks make of a tensor. Where the model runs them itself, the same tensor."""
        return x if self in CALLS.get() else self._path(self, x, Call(nn.Identity(), (x,), {}), False, View())

    def apply(self, x: Any, call: Call | None = None, copy: bool = False) -> Any:  # type: ignore[override]
        """As for `bridge.HookPoint.apply`; or, with a function, as for `torch.nn.Module.apply`."""
        return super().apply(x, call, copy) if call is not None else nn.Module.apply(self, x)

    def register_forward_hook(self, hook: Callable[..., Any], *, prepend: bool = False, **kwargs: Any) -> Any:
        """Adds a function of torch's kind, called as ``hook(point, (activation,), activation)``."""
        if any(kwargs.values()):
            raise TypeError(f"a hook point is called with one tensor: {', '.join(kwargs)} has no meaning for it")
        theirs = hook
        return self.add_hook(lambda x, hook: theirs(hook, (x,), x), prepend=prepend)

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, prepend: bool = False, **kwargs: Any) -> Any:
        """Adds a function of torch's kind, called as ``hook(point, (activation,))``."""
        return self.register_forward_hook(lambda *given: _alone(hook(*given[:2])), prepend=prepend, **kwargs)

    def register_full_backward_hook(self, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Adds a function of torch's kind, called as ``hook(point, (gradient,), (gradient,))``."""
        theirs = hook
        return self.add_hook(lambda x, hook: _alone(theirs(hook, (x,), (x,))), dir="bwd", prepend=prepend)

    def register_full_backward_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Adds a function of torch's kind, called as ``hook(point, (gradient,))``."""
        return self.register_full_backward_hook(lambda point, gradient, _: hook(point, gradient), prepend)

    @property
    def fwd_hooks(self) -> list[LensHandle]:  # type: ignore[override]
        """The functions that were added to it."""
        return self._of_kind("fwd")

    @property
    def bwd_hooks(self) -> list[LensHandle]:  # type: ignore[override]
        """The functions of gradients that were added to it."""
        return self._of_kind("bwd")

    def _of_kind(self, kind: str) -> list[LensHandle]:
        handles = [TorchHandle(self, listener, self._attaches) for listener in self.listeners if listener.kind == kind]
        return [LensHandle(each, each.is_permanent, each.context_level, each.function) for each in handles]

    def has_hooks(
        self, dir: Literal["fwd", "bwd", "both"] = "both", including_permanent: bool = True, level: int | None = None
    ) -> bool:
        """Whether functions were added to it, and are there.

        Args:
            dir: which of them count.
            including_permanent: permanent ones count, too.
            level: only those count that were added at this level.
        """
        return bool(self.handles(dir, including_permanent, level))

    def handles(self, dir: str, including_permanent: bool, level: int | None = None) -> list[LensHandle]:
        """The functions that were added to it, by their handles, of one direction or ``"both"``.

        Raises:
            ValueError: `dir` is none of the three.
        """
        check_choice("dir", dir, ("fwd", "bwd", "both"))
        found = [*(self.fwd_hooks if dir != "bwd" else ()), *(self.bwd_hooks if dir != "fwd" else ())]
        kept = [handle for handle in found if including_permanent or not handle.is_permanent]
        return [handle for handle in kept if level in (None, handle.context_level)]

    def __getattr__(self, name: str) -> Any:
        if why := why_not("HookPoint", name):
            raise AttributeError(why)
        return super().__getattr__(name)

    def leave(self) -> tuple[Listener, ...]:
        """Takes its hooks away, and makes it belong to nobody. Gives the hooks."""
        hooks = self.listeners
        self._attaches.remove(self, hooks)
        self._attaches = AttachesListeners()
        return hooks

    def join(self, attaches: AttachesListeners, hooks: tuple[Listener, ...]) -> None:
        """Makes it belong to a model, whose runs see its hooks."""
        self._attaches = attaches
        for listener in hooks:
            attaches.add(self, listener)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"name": self.name, "ctx": self.ctx, "is_standalone": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has no hooks, and belongs to no model until that model's `setup`."""
        HookPoint.__init__(self)
        self.__dict__.update({name: value for name, value in state.items() if name not in ("name", "ctx")})
        self.name, self.ctx = state["name"], state["ctx"]


def _alone(result: Any) -> Any:
    """What a hook of torch's kind returned, out of its tuple."""
    return result[0] if isinstance(result, tuple) else result


Hooks = Sequence[tuple[NamesFilter, HookFunction]]
Device = torch.device | str | None
Activations = dict[str, Tensor]


class ListsHooks(AddsHooks):
    """What has hook points, with the methods of TransformerLens that the bridge has under other names."""

    def list_hooks(
        self,
        name_filter: NamesFilter = None,
        dir: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = True,
    ) -> dict[str, list[LensHandle]]:
        """The functions that were added, by the names of their hook points, of which those without any are left out.

        Args:
            name_filter: which names: one, a list of them, a function of the name; None: all.
            dir: ``"fwd"``, ``"bwd"`` or ``"both"``.
            including_permanent: list permanent ones, too.
        """
        chosen = {name_filter} if isinstance(name_filter, str) else name_filter
        found: dict[Any, str] = {}
        for name, hook in getattr(self, "hook_dict").items():  # noqa: B009  # of a subclass, a field or a property
            if chosen is None or (chosen(name) if callable(chosen) else name in chosen):
                found.setdefault(hook, name)  # which may have aliases
        handles = {name: hook.handles(dir, including_permanent) for hook, name in found.items()}
        return {name: there for name, there in handles.items() if there}

    def remove_all_hook_fns(
        self,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """`reset_hooks` that leaves contexts as they are."""
        self.reset_hooks(False, direction, including_permanent, level)

    def cache_all(
        self,
        cache: Activations | None,
        incl_bwd: bool = False,
        device: Device = None,
        remove_batch_dim: bool = False,
    ) -> None:
        """The old name of `add_caching_hooks` without a filter."""
        self.cache_some(cache, None, incl_bwd, device, remove_batch_dim)

    def cache_some(
        self, cache: Activations | None, names: NamesFilter, incl_bwd: bool = False, device: Device = None,
        remove_batch_dim: bool = False,
    ) -> None:  # fmt: skip
        """The old name of `add_caching_hooks` with a filter."""
        self.add_caching_hooks(names, incl_bwd, device, remove_batch_dim, cache)


class HookedRootModule(nn.Module, ListsHooks, metaclass=ABCMeta):
    """A torch module of the user's that holds hook points. Its `__init__` ends with ``self.setup()``.

    Models of this package count as some, too (`abc.ABCMeta.register`), though what they do is a bridge's.

    Attributes:
        mod_dict: all modules by name.
        hook_dict: all hook points by name.

    Example:
        >>> import torch
        >>> from bridge.legacy.hook_points import HookedRootModule, HookPoint
        >>> class Square(HookedRootModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.hook_square = HookPoint()
        ...         self.setup()
        ...     def forward(self, x):
        ...         return self.hook_square(x * x) + 1
        >>> output, cache = Square().run_with_cache(torch.tensor([3.0]))
        >>> output, cache["hook_square"]
        (tensor([10.]), tensor([9.]))
    """

    mod_dict: dict[str, nn.Module]
    hook_dict: dict[str, HookPoint]

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.context_level = 0

    def __getattr__(self, name: str) -> Any:
        if why := why_not("HookedRootModule", name):
            raise AttributeError(why)
        return super().__getattr__(name)

    def setup(self) -> None:
        """Names all modules and collects the hook points."""
        self.mod_dict, self.hook_dict = {}, {}
        for name, module in self.named_modules():
            if name:
                if "host" not in module.__dict__:  # a model inside knows its parts by their names
                    module.name = name  # type: ignore[assignment]
                self.mod_dict[name] = module
                if isinstance(module, HookPoint):
                    if module.is_standalone:
                        module.order, module.point = len(self.hook_dict), point_named(name)
                    self.hook_dict[name] = module

    def hook_points(self) -> Collection[bridge_point.HookPoint]:
        """All hook points."""
        return self.hook_dict.values()

    def select_hooks(self, names: NamesFilter | bridge_point.HookPoint) -> Sequence[bridge_point.HookPoint]:
        """The hook points that a filter chooses."""
        if isinstance(names, bridge_point.HookPoint):
            if not any(names is each for each in self.hook_dict.values()):
                raise ValueError(f"{names!r} belongs to another module")
            return [names]
        return Names({**self.hook_dict}).select(names, bool)

    @contextmanager
    def hooks(
        self, fwd_hooks: Hooks = (), bwd_hooks: Hooks = (), reset_hooks_end: bool = True, clear_contexts: bool = False
    ) -> Iterator[HookedRootModule]:
        """Hooks for the runs inside a ``with`` statement."""
        self.context_level += 1
        try:
            for specs, direction in ((fwd_hooks, "fwd"), (bwd_hooks, "bwd")):
                for names, hook in specs:
                    self.add_hook(names, hook, direction, level=self.context_level)  # type: ignore[arg-type]
            yield self
        finally:
            if reset_hooks_end:
                self.reset_hooks(clear_contexts, level=self.context_level)
            self.context_level -= 1

    def run_with_hooks(
        self, *args: Any, fwd_hooks: Hooks = (), bwd_hooks: Hooks = (), reset_hooks_end: bool = True,
        clear_contexts: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Runs the module with hooks. Backward hooks need ``reset_hooks_end=False`` where the backward pass comes after
        this call."""
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*args, **kwargs)

    def run_with_cache(
        self, *args: Any, names_filter: NamesFilter = None, device: Device = None, remove_batch_dim: bool = False,
        incl_bwd: bool = False, reset_hooks_end: bool = True, clear_contexts: bool = False, **kwargs: Any,
    ) -> tuple[Any, Activations]:  # fmt: skip
        """Runs the module and keeps activations. With `incl_bwd` the output is a number, and is run backward."""
        cache, forward, backward = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim)
        with self.hooks(forward, backward, reset_hooks_end, clear_contexts):
            output = self(*args, **kwargs)
            if incl_bwd:
                output.backward()
        return output, cache


__getattr__ = named(__name__)
