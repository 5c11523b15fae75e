"""Models that were compiled: compiled code does not know hooks that come later."""

from __future__ import annotations

import copy
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from bridge.hooks.modules import Finder


class _EagerStance:
    """Keeps all compiled code away while anybody needs that, in whatever thread: torch knows one stance for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._users += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._stance.__exit__(None, None, None)
                self._stance = None


_EAGER_STANCE = _EagerStance()


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Runs a model that was compiled as it was written."""
    with _EAGER_STANCE if ever_compiled() and is_compiled(model) else nullcontext():
        yield


def ever_compiled() -> bool:
    """Whether `torch.compile` was called in this process: torch prepares itself for it once, the first time."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    prepares: Callable[[], None] = frames.TorchPatcher.patch
    asked = getattr(prepares, "cache_info", None)
    return asked is None or asked().currsize > 0


def is_compiled(model: nn.Module) -> bool:
    """Whether a module or its forward was compiled. (`Module.modules` takes ten times as long, in every run.)"""
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None:
            fields = module.__dict__
            inside = fields["_modules"]
            if "_compiled_call_impl" in fields or "forward" in fields or "_orig_mod" in inside:
                compiled = module._compiled_call_impl is not None or "_orig_mod" in inside
                forward = fields.get("forward")
                forward = forward.original if isinstance(forward, ForcedEager) else forward
                if compiled or hasattr(forward, "_torchdynamo_orig_callable"):
                    return True
            if inside:
                left.extend(inside.values())
    return False


class ForcedEager:
    """Wraps a model's forward while hooks are attached, so that no compiled code runs in its place.

    Code that ``torch.compile`` made of the model before checks that the model's forward is where it was; what is
    compiled meanwhile leaves the compiled code at this point, and comes back after it.

    Args:
        find: finds the model.
    """

    def __init__(self, find: Finder | None = None) -> None:
        self._find = find
        self.original: Callable[..., Any] = nothing
        self._own: Callable[..., Any] | None = None
        self._module: nn.Module | None = None
        self._was_on: Callable[[], nn.Module | None] = nothing  # weak: nothing outlives the model
        self._shares: ForcedEager | None = None
        self._users = 0

    # A copy of the model that is made meanwhile has the model's own forward.
    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self._module, "forward")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        assert self._module is not None
        return types.MethodType(type(self._module).forward, copy.deepcopy(self._module, memo))

    def attach(self) -> None:
        """Puts it there, unless that of another bridge around the model is there already."""
        assert self._find is not None
        module = self._find.module
        there = module.__dict__.get("forward")
        self._shares = there if isinstance(there, ForcedEager) else self
        self._shares._users += 1
        if self._shares is not self:
            return
        self._module = module
        self._own, self.original = module.__dict__.get("forward"), module.forward
        self.__wrapped__ = self.original  # whose signature this has
        module.__dict__["forward"] = self

    def detach(self) -> None:
        """Takes it away, when no bridge needs it any more."""
        shares, self._shares = self._shares, None
        if shares is not None:
            shares._uninstall()

    def _uninstall(self) -> None:
        self._users -= 1
        if self._users:
            return
        module, self._module = self._module, None
        assert module is not None
        if self._own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self._own
        self._own, self.original, self._was_on = None, nothing, weakref.ref(module)
        del self.__wrapped__

    def __call__(self, *args: object, **kwargs: object) -> Any:
        original, module = self.original, self._module  # in this order: another thread may take it away meanwhile
        if module is None:  # another thread took this for the module's forward, and calls it only now
            module = self._was_on()
            assert module is not None
            return module.forward(*args, **kwargs)
        return call_eagerly(module, original, args, kwargs)


@contextmanager
def forced_eager(find: Finder) -> Iterator[None]:
    """Keeps compiled code from running in place of a model inside a ``with`` statement.

    Args:
        find: finds the model.
    """
    forced = ForcedEager(find)
    forced.attach()
    try:
        yield
    finally:
        forced.detach()


def refuse_inside_compiled() -> None:
    """Refuses to attach hooks from within code that `torch.compile` runs.

    Raises:
        RuntimeError: this is such code.
    """
    if torch.compiler.is_compiling() or get_eval_frame_callback() not in (None, False):
        raise RuntimeError(
            "hooks and caches cannot be attached inside a function that torch.compile runs: compiled code does not "
            "know them. Compile the model (torch.compile(hf_model)), or what you do with the results, and call "
            "run_with_hooks, run_with_cache and hooks outside"
        )


def nothing(*args: object, **kwargs: object) -> Any:
    """The forward of what has none."""
    raise RuntimeError("there is no forward here")


def call_eagerly(
    model: nn.Module, function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a function of a model with nothing compiled, also from within compiled code.

    Args:
        model: the model.
        function: what to call.
        args, kwargs: with what.
    """
    if not ever_compiled():
        return function(*args, **kwargs)
    return _outside_compiled_code()(model, function, args, kwargs)


setattr(call_eagerly, "_torchdynamo_disable", True)  # noqa: B010 - which functions do not have otherwise


@functools.cache
def _outside_compiled_code() -> Callable[..., Any]:
    """`_call`, which code that was compiled leaves to call."""
    disabled: Callable[..., Any] = torch.compiler.disable(_call)
    return disabled


def _call(model: nn.Module, function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
    with uncompiled(model):
        return function(*args, **kwargs)
