"""Reaching the scores, the pattern and the rotated queries and keys inside the model's own attention.

Only the attention modules whose scores or pattern someone may change compute them in full; they do so by the model's
own ``eager_attention_forward``. All others keep the implementation that the model was loaded with; a cache computes
their scores and patterns when it is asked for them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adapters.views import Call
from bridge.hooks.hook_point import STATE, HookPoint, Listener
from bridge.taps.attention_mask import additive_mask
from bridge.taps.deferred_attention import SOFTMAXES, AttentionCall

#: The name under which `AttentionInterface` knows us; a tapped module's configuration asks for it.
TAPPED = "transformer_bridge"


class SoftmaxTap(TorchFunctionMode):
    """Shows the first softmax that is computed while it is active: its input is the scores, its output the pattern."""

    def __init__(self, tap: Tap, call: Call) -> None:
        super().__init__()
        self._tap, self._call, self._done, self._within = tap, call, False, STATE.within

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._done or func not in SOFTMAXES or STATE.within != self._within:
            return func(*args, **kwargs)
        self._done = True
        scores = args[0] if args else kwargs.pop("input")
        new = self._tap.fire("scores", scores, self._call)
        if new is scores:
            pattern = func(scores, *args[1:], **kwargs)
        else:
            # Where a user forbids everything there is no attention, rather than NaN.
            nothing = new.isneginf().all(-1, keepdim=True)
            pattern = func(new.masked_fill(nothing, 0.0), *args[1:], **kwargs).masked_fill(nothing, 0.0)
        return self._tap.fire("pattern", pattern, self._call)


class Tap:
    """What both kinds of tap share: the hook points of one attention module, by channel.

    Args:
        module: the attention module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.points: dict[str, tuple[HookPoint, ...]] = {}

    def connect(self, channel: str, point: HookPoint) -> None:
        """Adds a hook point; the first one attaches the tap."""
        if not self.points:
            self.attach()
        self.points[channel] = (*self.points.get(channel, ()), point)

    def disconnect(self, channel: str, point: HookPoint) -> bool:
        """Removes a hook point; the last one detaches the tap, and the answer is True."""
        left = tuple(p for p in self.points[channel] if p is not point)
        if left:
            self.points[channel] = left
        else:
            del self.points[channel]
        if not self.points:
            self.detach()
        return not self.points

    def attach(self) -> None:
        raise NotImplementedError

    def detach(self) -> None:
        raise NotImplementedError

    def wanted(self, *channels: str) -> bool:
        """Whether this thread listens on any of the channels."""
        owner, start = STATE.owner, STATE.start_at
        for channel in channels:
            for point in self.points.get(channel, ()):
                if start is None or point.point.depth >= start:
                    for listener in point.listeners:
                        if listener.owner is owner:
                            return True
        return False

    def looking(self, *channels: str) -> list[tuple[str, HookPoint, Listener]]:
        """This thread's listeners on the channels, if all of them only look; else none."""
        owner, found = STATE.owner, []
        for channel in channels:
            for point in self.points.get(channel, ()):
                for listener in point.listeners:
                    if listener.owner is owner:
                        if listener.kind != "read" or point.sources:
                            return []
                        found.append((channel, point, listener))
        return found

    def fire(self, channel: str, x: Tensor, call: Call) -> Tensor:
        for point in self.points.get(channel, ()):
            if point.sources:
                call.sources = tuple(STATE.sources[source] for source in point.sources)
            x = point.fire(x, call)
        return x


class InterfaceTap(Tap):
    """For modules that call transformers' `AttentionInterface`: they are given a configuration that names us."""

    def attach(self) -> None:
        self.config = self.module.config
        self.base = loaded_implementation(self.config)
        self.eager = own_eager_attention(type(self.module))  # type: ignore[arg-type]
        _TAPS[self.module] = self
        # Past `nn.Module.__setattr__`, which looks for parameters in everything.
        self.module.__dict__["config"] = _tapped_copy(self.config, self.base)

    def detach(self) -> None:
        self.module.__dict__["config"] = self.config
        del _TAPS[self.module]

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.base, self.eager)
        if not self.wanted("q", "k", "scores", "pattern"):
            return attend(module, query, key, value, attention_mask, **kwargs)
        call = Call(module, (query,), kwargs)
        query, key = self.fire("q", query, call), self.fire("k", key, call)
        if not self.wanted("scores", "pattern"):
            return attend(module, query, key, value, attention_mask, **kwargs)
        looking = self.looking("scores", "pattern") if self.base != "eager" else []
        if looking:
            AttentionCall(self.eager, self.base, module, query, key, attention_mask, kwargs).show(looking)
            return attend(module, query, key, value, attention_mask, **kwargs)
        mask = additive_mask(self.base, module, query, key, attention_mask, kwargs)
        with SoftmaxTap(self, call):
            return self.eager(module, query, key, value, mask, **kwargs)


_TAPS: weakref.WeakKeyDictionary[nn.Module, InterfaceTap] = weakref.WeakKeyDictionary()
_last_copy: tuple[Any, Any, str] = (None, None, "")


def _tapped_copy(config: Any, base: str) -> Any:
    """A configuration that differs in the attention implementation alone; one for all modules that share theirs."""
    global _last_copy
    source, copied_to, for_base = _last_copy
    tapped = copied_to() if source is not None and source() is config and for_base == base else None
    if tapped is None:
        copied = copy.copy(config)
        # The setter would reach into sub-configurations that the copy shares with the model's own.
        copied._attn_implementation_internal = TAPPED
        copied.transformer_bridge_base = base
        _last_copy = (weakref.ref(config), weakref.ref(copied), base)
        return copied
    return tapped


def loaded_implementation(config: Any) -> str:
    """The attention implementation that a model was loaded with, also where it is a copy of a tapped one."""
    # Straight from its dictionary: a configuration's own attribute access takes microseconds.
    fields = object.__getattribute__(config, "__dict__")
    implementation = fields.get("_attn_implementation_internal") or "eager"
    return fields["transformer_bridge_base"] if implementation == TAPPED else implementation


def untap(model: nn.Module) -> None:
    """Makes a copy of a model that was tapped attend as it was loaded."""
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is not None and getattr(config, "_attn_implementation_internal", None) == TAPPED:
            config._attn_implementation_internal = config.__dict__.pop("transformer_bridge_base")


def _tapped_attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    tap = _TAPS.get(module)
    if tap is None:  # a copy of a module that was tapped: it attends as it was loaded
        base, eager = loaded_implementation(module.config), own_eager_attention(type(module))  # type: ignore[arg-type]
        return ALL_ATTENTION_FUNCTIONS.get_interface(base, eager)(module, *args, **kwargs)
    return tap(module, *args, **kwargs)


AttentionInterface.register(TAPPED, _tapped_attention)


class ForwardTap(Tap):
    """For modules that compute the softmax in their own forward: it is watched while that runs."""

    #: The method that computes it.
    method = "forward"

    def attach(self) -> None:
        self.own = self.module.__dict__.get(self.method)
        self.original = getattr(self.module, self.method)
        self.module.__dict__[self.method] = self

    def detach(self) -> None:
        if self.own is None:
            del self.module.__dict__[self.method]
        else:
            self.module.__dict__[self.method] = self.own

    # A copy of the model that is made meanwhile has its class's method.
    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, self.method)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(getattr(type(self.module), self.method), copy.deepcopy(self.module, memo))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.wanted("scores", "pattern"):
            return self.original(*args, **kwargs)
        with SoftmaxTap(self, Call(self.module, args, kwargs)):
            return self.original(*args, **kwargs)


class CoreTap(ForwardTap):
    """For modules whose method ``_attn`` is given queries, keys and values and computes the softmax."""

    method = "_attn"

    def __call__(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.wanted("q", "k", "scores", "pattern"):
            return self.original(query, key, *args, **kwargs)
        call = Call(self.module, (query,), kwargs)
        query, key = self.fire("q", query, call), self.fire("k", key, call)
        if not self.wanted("scores", "pattern"):
            return self.original(query, key, *args, **kwargs)
        with SoftmaxTap(self, call):
            return self.original(query, key, *args, **kwargs)


#: The tap for each kind of site that is not simply a module's input or output.
TAPS: dict[str, type[Tap]] = {"interface": InterfaceTap, "forward": ForwardTap, "core": CoreTap}


@functools.cache
def own_eager_attention(module_class: Any) -> Callable[..., Any]:
    """The ``eager_attention_forward`` of the file that the attention module's class comes from.

    Raises:
        TypeError: there is none.
    """
    for cls in module_class.__mro__:
        forward = cls.__dict__.get("forward")
        if forward is not None:
            found = inspect.unwrap(forward).__globals__.get("eager_attention_forward")
            if found is not None:
                return found
    raise TypeError(
        f"{module_class.__name__} has no eager_attention_forward beside it: its scores cannot be computed in full. "
        'Its adapter should declare tap="forward" or tap=None.'
    )
