"""`HookPoint` and `HookedRootModule`: hook points as torch modules, for users' own modules.

A Hugging Face model does not need these: its hook points are `bridge.HookPoint`. They are for your
own modules: a toy model, or a wrapper inside a model (see `HookedTransformer.setup`).
"""

from __future__ import annotations

import weakref
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
from bridge.arguments import check_choice
from bridge.facade.hooks import AddsHooks
from bridge.hooks import hooks as bridge_point
from bridge.hooks.context import Listener
from bridge.hooks.hooks import AttachesListeners, Handle
from bridge.hooks.names import Names, NamesFilter
from bridge.legacy.table import named, why_not

T = TypeVar("T")

#: ``fn(activation, hook=point)`` returns the new activation, or None.
HookFunction = Callable[..., Any]
#: A device or dtype to move to, or None to keep it.
DeviceType = torch.device | None

#: The original parts and hook points whose replacements are being called: calling one runs the
#: original.
CALLS: ContextVar[dict[nn.Module, Callable[..., Any] | None]] = ContextVar(
    "legacy_calls",
    default={},  # noqa: B039
)


@dataclass(frozen=True)
class _TorchHook:
    """A function at a hook point in torch's signature, called as HookedTransformer calls its
    own.
    """

    point: bridge_point.HookPoint
    function: HookFunction

    @property
    def __name__(self) -> str:
        function = self.function
        if isinstance(function, partial):
            return f"partial({function.func!r},...)"
        return repr(function)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.function(output[0] if isinstance(output, tuple) else output, hook=self.point)


class _TorchHandle(Handle, RemovableHandle):  # type: ignore[misc,override]
    """A handle with torch's interface. Its dictionary is read-only; use the hook point's methods to
    add and remove hooks.
    """

    def hooks_dict_ref(self) -> Mapping[int, _TorchHook]:  # type: ignore[override]
        """Return all functions of its kind at its hook point, by handle id."""
        hooks = {}
        for listener in self.hook.listeners:
            if listener.kind == self.listener.kind:
                hooks[id(listener)] = _TorchHook(self.hook, listener.fn)
        return MappingProxyType(hooks)


class LensHandle(NamedTuple):
    """A hook at a hook point: `hook` removes it, `user_hook` is the function."""

    hook: _TorchHandle
    is_permanent: bool = False
    context_level: int | None = None
    user_hook: HookFunction | None = None

    def remove(self) -> None:
        """Remove the hook."""
        self.hook.remove()


def point_named(name: str, depth: int = -1, stacks: Collection[str] | None = None) -> Point:
    """Describe a hook point in a user's module.

    Args:
        name: its name, which may contain the layer, as in ``blocks.3.mlp.hook_post``.
        depth: the layer, if the name does not contain it.
        stacks: the prefixes before layer numbers; None: any prefix.
    """
    stack, _, rest = name.partition(".")
    index = rest.partition(".")[0]
    if index.isdigit() and (stacks is None or stack in stacks):
        depth = int(index)
    else:
        stack = ""
    return Point(name, Site(name, "output"), View(), "...", depth, stack=stack)


class HookPoint(bridge_point.HookPoint, nn.Module):
    """An identity module at which an activation can be read and changed.

    A hook point that you make runs its hooks when it is called. The model runs the hooks of its own
    hook points.

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
    #: The output of a part that was called by itself, whose hooks have run, and these hooks.
    shown: tuple[weakref.ref[Tensor], Sequence[Listener]] | None = None

    def __init__(
        self, point: Point | None = None, order: int = 0, attaches: AttachesListeners | None = None
    ) -> None:
        nn.Module.__init__(self)
        super().__init__(point or point_named(""), order, attaches or AttachesListeners())
        self.is_standalone = point is None
        if point is None:
            self.name = None  # type: ignore[assignment]  # until `setup` gives it one

    def forward(self, x: Tensor) -> Tensor:
        """Run the hooks on a tensor and return the result; if the model runs the hooks itself,
        or has run them already, return the tensor unchanged.
        """
        if self in CALLS.get() or self._has_shown(x):
            return x
        return self._path(self, x, Call(nn.Identity(), (x,), {}), False, View())

    @property
    def has_visible_listeners(self) -> bool:
        """Tell whether hooks run here: not at a part that calls another one."""
        return self not in CALLS.get() and super().has_visible_listeners

    def note_shown(self, x: Tensor) -> None:
        """Note that the hooks have run on a tensor, which a program may pass on to them."""
        self.__dict__["shown"] = weakref.ref(x), self.visible_listeners()

    def _has_shown(self, x: Tensor) -> bool:
        if self.shown is None or self.shown[0]() is not x:
            return False
        return self.shown[1] == self.visible_listeners()

    def apply(self, x: Any, call: Call | None = None, copy: bool = False) -> Any:  # type: ignore[override]
        """Apply the view, as `bridge.HookPoint.apply`; or, with a function, act as
        `torch.nn.Module.apply`.
        """
        if call is None:
            return nn.Module.apply(self, x)
        return x if self in CALLS.get() else super().apply(x, call, copy)

    def register_forward_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, **kwargs: Any
    ) -> Any:
        """Add a function with torch's signature, called as ``hook(point, (activation,),
        activation)``.
        """
        if any(kwargs.values()):
            raise TypeError(
                f"a hook point is called with one tensor: {', '.join(kwargs)} has no meaning for it"
            )
        torch_hook = hook
        return self.add_hook(lambda x, hook: torch_hook(hook, (x,), x), prepend=prepend)

    def register_forward_pre_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, **kwargs: Any
    ) -> Any:
        """Add a function with torch's signature, called as ``hook(point, (activation,))``."""
        return self.register_forward_hook(
            lambda point, inputs, output: _alone(hook(point, inputs)), prepend=prepend, **kwargs
        )

    def register_full_backward_hook(self, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Add a function with torch's signature, called as ``hook(point, (gradient,),
        (gradient,))``.
        """
        torch_hook = hook
        return self.add_hook(
            lambda x, hook: _alone(torch_hook(hook, (x,), (x,))), dir="bwd", prepend=prepend
        )

    def register_full_backward_pre_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> Any:
        """Add a function with torch's signature, called as ``hook(point, (gradient,))``."""
        return self.register_full_backward_hook(
            lambda point, gradient, _: hook(point, gradient), prepend
        )

    @property
    def fwd_hooks(self) -> list[LensHandle]:  # type: ignore[override]
        """Return the functions that were added to it."""
        return self._of_kind("fwd")

    @property
    def bwd_hooks(self) -> list[LensHandle]:  # type: ignore[override]
        """Return the backward hooks that were added to it."""
        return self._of_kind("bwd")

    def _of_kind(self, kind: str) -> list[LensHandle]:
        hooks = []
        for listener in self.listeners:
            if listener.kind == kind:
                handle = _TorchHandle(self, listener, self._attaches)
                hooks.append(
                    LensHandle(handle, listener.permanent, listener.level, handle.function)
                )
        return hooks

    def has_hooks(
        self,
        dir: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = True,
        level: int | None = None,
    ) -> bool:
        """Tell whether the hook point has hooks.

        Args:
            dir: the direction to count.
            including_permanent: count permanent hooks, too.
            level: count only hooks of this level.
        """
        return bool(self.handles(dir, including_permanent, level))

    def handles(
        self, dir: str, including_permanent: bool, level: int | None = None
    ) -> list[LensHandle]:
        """Return the hooks of one direction or ``"both"``, by handle.

        Raises:
            ValueError: `dir` is neither ``"fwd"``, ``"bwd"`` nor ``"both"``.
        """
        check_choice("dir", dir, ("fwd", "bwd", "both"))
        hooks: list[LensHandle] = []
        if dir != "bwd":
            hooks += self.fwd_hooks
        if dir != "fwd":
            hooks += self.bwd_hooks
        if not including_permanent:
            hooks = [hook for hook in hooks if not hook.is_permanent]
        return [hook for hook in hooks if level in (None, hook.context_level)]

    def __getattr__(self, name: str) -> Any:
        if why := why_not("HookPoint", name):
            raise AttributeError(why)
        return super().__getattr__(name)

    def leave(self) -> tuple[Listener, ...]:
        """Remove the hook point from its model, and return its hooks."""
        hooks = self.listeners
        self._attaches.remove(self, hooks)
        self._attaches = AttachesListeners()
        return hooks

    def join(self, attaches: AttachesListeners, hooks: tuple[Listener, ...]) -> None:
        """Add the hook point to a model, whose runs call its hooks."""
        self._attaches = attaches
        for listener in hooks:
            attaches.add(self, listener)

    def __getstate__(self) -> dict[str, Any]:
        state = {"name": self.name, "ctx": self.ctx, "is_standalone": True, "shown": None}
        return self.__dict__ | state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy without hooks; it belongs to no model until that model's `setup`."""
        HookPoint.__init__(self)
        state = {**state}
        name, ctx = state.pop("name"), state.pop("ctx")
        self.__dict__.update(state)
        self.name, self.ctx = name, ctx


def _alone(result: Any) -> Any:
    """Unpack the tuple that a torch-style hook returned."""
    return result[0] if isinstance(result, tuple) else result


Hooks = Sequence[tuple[NamesFilter, HookFunction]]
Device = torch.device | str | None
Activations = dict[str, Tensor]


class ListsHooks(AddsHooks):
    """A holder of hook points, with the methods of TransformerLens that the bridge names
    differently.
    """

    def list_hooks(
        self,
        name_filter: NamesFilter = None,
        dir: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = True,
    ) -> dict[str, list[LensHandle]]:
        """List the hooks by hook point name; hook points without hooks are omitted.

        Args:
            name_filter: the names to list: one, a list, or a function of the name; None: all.
            dir: ``"fwd"``, ``"bwd"`` or ``"both"``.
            including_permanent: include permanent hooks.
        """
        chosen = {name_filter} if isinstance(name_filter, str) else name_filter
        names: dict[Any, str] = {}
        for name, point in getattr(self, "hook_dict").items():  # noqa: B009  # of a subclass, a field or a property
            if chosen is None or (chosen(name) if callable(chosen) else name in chosen):
                names.setdefault(point, name)  # later ones are aliases
        hooks = {name: point.handles(dir, including_permanent) for point, name in names.items()}
        return {name: handles for name, handles in hooks.items() if handles}

    def remove_all_hook_fns(
        self,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove all hooks, as `reset_hooks`, but keep the contexts."""
        self.reset_hooks(False, direction, including_permanent, level)

    def cache_all(
        self,
        cache: Activations | None,
        incl_bwd: bool = False,
        device: Device = None,
        remove_batch_dim: bool = False,
    ) -> None:
        """Add caching hooks without a filter; the old name of `add_caching_hooks`."""
        self.cache_some(cache, None, incl_bwd, device, remove_batch_dim)

    def cache_some(
        self,
        cache: Activations | None,
        names: NamesFilter,
        incl_bwd: bool = False,
        device: Device = None,
        remove_batch_dim: bool = False,
    ) -> None:
        """Add caching hooks with a filter; the old name of `add_caching_hooks`."""
        self.add_caching_hooks(names, incl_bwd, device, remove_batch_dim, cache)


class HookedRootModule(nn.Module, ListsHooks, metaclass=ABCMeta):
    """A user's torch module that contains hook points. Its `__init__` ends with ``self.setup()``.

    Models of this package are registered as virtual subclasses (`abc.ABCMeta.register`), although
    they behave as bridges.

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
        ...
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
        """Name all modules and collect the hook points."""
        self.mod_dict, self.hook_dict = {}, {}
        for name, module in self.named_modules():
            if name:
                # A model inside it knows its parts by their names
                if "host" not in module.__dict__:
                    module.name = name  # type: ignore[assignment]
                self.mod_dict[name] = module
                if isinstance(module, HookPoint):
                    if module.is_standalone:
                        module.order, module.point = len(self.hook_dict), point_named(name)
                    self.hook_dict[name] = module

    def hook_points(self) -> Collection[bridge_point.HookPoint]:
        """Return all hook points."""
        return self.hook_dict.values()

    def select_hooks(
        self, names: NamesFilter | bridge_point.HookPoint
    ) -> Sequence[bridge_point.HookPoint]:
        """Return the hook points that a filter selects."""
        if isinstance(names, bridge_point.HookPoint):
            if not any(names is point for point in self.hook_dict.values()):
                raise ValueError(f"{names!r} belongs to another module")
            return [names]
        return Names({**self.hook_dict}).select(names, bool)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[HookedRootModule]:
        """Add hooks for the runs inside a ``with`` statement."""
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
        self,
        *args: Any,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the module with hooks. If the backward pass follows this call, backward hooks need
        ``reset_hooks_end=False``.
        """
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*args, **kwargs)

    def run_with_cache(
        self,
        *args: Any,
        names_filter: NamesFilter = None,
        device: Device = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Activations]:
        """Run the module and cache activations. With `incl_bwd` the output must be a scalar, and
        the backward pass runs too.
        """
        cache, forward, backward = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim
        )
        with self.hooks(forward, backward, reset_hooks_end, clear_contexts):
            output = self(*args, **kwargs)
            if incl_bwd:
                output.backward()
        return output, cache


__getattr__ = named(__name__)
