"""Hooks in compiled models, and in passes that the bridge did not start.

1. *Compiled code* ignores hooks that are added later. While listeners are attached it is disabled
   (`ForcedEager`, `call_eagerly`): the same modules run eagerly. A pass that began inside compiled
   code raises an error.
2. *A direct call* of the Hugging Face model, without the bridge: the memory of a pass
   (`ForwardPass`) ends with the pass. A run of the bridge opens and ends its own; for direct calls
   two torch hooks do, which are attached while there are listeners (`PassBoundary`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.hooks import RemovableHandle
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from adapters.imports import is_compiling
from adapters.views import Args, Kwargs
from bridge.hooks.context import CURRENT, ForwardPass, RunContext
from bridge.modules import Finder, NotCopied, itself
from bridge.taps.taps import LOCK, noop_hook
from bridge.wiring.reading_plan import ReadingHook
from bridge.wiring.repeated import CheckpointedBlocks
from bridge.wiring.site import InputFront, SiteHook

# --------------------------------------------------------------------------------------------------
# Compiled models: compiled code ignores hooks that are added later.
# --------------------------------------------------------------------------------------------------


class _EagerStance:
    """A process-wide switch that disables compiled code, in all threads, while it has users (torch
    has only one global stance).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._stance: Any = None
        #: `_call`, excluded from compilation: made on first use, since that imports the compiler.
        self.outside: Callable[..., Any] | None = None

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
    """Run a compiled model in its original, eager form."""
    with _EAGER_STANCE if ever_compiled() and is_compiled(model) else nullcontext():
        yield


def ever_compiled() -> bool:
    """Tell whether `torch.compile` was called in this process; torch initialises itself on the
    first call.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    prepares: Callable[[], None] = frames.TorchPatcher.patch
    cache_info = getattr(prepares, "cache_info", None)
    return cache_info is None or cache_info().currsize > 0


def is_compiled(model: nn.Module) -> bool:
    """Tell whether a module or its forward was compiled. (`Module.modules` would take ten times
    as long.)
    """
    todo: list[nn.Module | None] = [model]
    while todo:
        module = todo.pop()
        if module is None:
            continue
        fields = module.__dict__
        inside = fields["_modules"]
        if "_compiled_call_impl" in fields or "forward" in fields or "_orig_mod" in inside:
            compiled = module._compiled_call_impl is not None or "_orig_mod" in inside
            forward = fields.get("forward")
            if isinstance(forward, ForcedEager):
                forward = forward.original
            if compiled or hasattr(forward, "_torchdynamo_orig_callable"):
                return True
        if inside:
            todo.extend(inside.values())
    return False


class ForcedEager(NotCopied):
    """A wrapper of a model's forward while hooks are attached, which prevents compiled code from
    running.

    Code that ``torch.compile`` produced earlier has a guard on the model's forward, so it is not
    used; code compiled meanwhile breaks its graph at this wrapper.

    Args:
        find: returns the model.
    """

    def __init__(self, find: Finder) -> None:
        self._find = find
        self.original: Callable[..., Any] = nothing
        self._own: Callable[..., Any] | None = None
        self._module: nn.Module | None = None
        self._was_on: Callable[[], nn.Module | None] = nothing  # weak: nothing outlives the model
        self._shares: ForcedEager | None = None
        self._users = 0

    def left_in_copy(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if self._own is not None:
            return itself, (self._own,)
        return getattr, (self._module, "forward")

    def attach(self) -> None:
        """Attach it, unless another bridge around the model has attached it already."""
        module = self._find.module
        with LOCK:  # a generation may begin where another thread's run ends
            own = module.__dict__.get("forward")
            self._shares = own if isinstance(own, ForcedEager) else self
            self._shares._users += 1
            if self._shares is own:  # another bridge's; or this one, attached by another since
                return
            self._module = module
            self._own, self.original = own, module.forward
            self.__wrapped__ = self.original  # whose signature this has
            module.__dict__["forward"] = self

    def detach(self) -> None:
        """Detach it when no bridge needs it."""
        with LOCK:
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
        original = self.original  # before the module: another thread may detach it meanwhile
        module = self._module
        if module is not None:
            return call_eagerly(module, original, args, kwargs)
        # The calling thread read this as the module's forward before it was detached.
        module = self._was_on()
        assert module is not None
        return module.forward(*args, **kwargs)


@contextmanager
def forced_eager(find: Finder) -> Iterator[None]:
    """Prevent compiled code from running instead of a model inside a ``with`` statement.

    Args:
        find: returns the model.
    """
    forced = ForcedEager(find)
    forced.attach()
    try:
        yield
    finally:
        forced.detach()


def refuse_inside_compiled() -> None:
    """Raise an error if hooks are attached from code that `torch.compile` runs.

    Raises:
        RuntimeError: this is such code.
    """
    if is_compiling() or get_eval_frame_callback() not in (None, False):
        raise RuntimeError(
            "hooks and caches cannot be attached inside a function that torch.compile runs:"
            " compiled code does not know them. Compile the model (torch.compile(hf_model)), or"
            " what you do with the results, and call run_with_hooks, run_with_cache and hooks"
            " outside"
        )


def nothing(*args: object, **kwargs: object) -> Any:
    """Raise an error; used in place of a missing forward."""
    raise RuntimeError("there is no forward here")


def call_eagerly(model: nn.Module, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Call a function of a model with compilation disabled, also from compiled code.

    Args:
        model: the model.
        function: the function to call.
        args, kwargs: its arguments.
    """
    if not ever_compiled():
        return function(*args, **kwargs)
    if _EAGER_STANCE.outside is None:
        # No `functools.cache`: torch warns if compiled code meets one.
        _EAGER_STANCE.outside = torch.compiler.disable(_call)
    return _EAGER_STANCE.outside(model, function, args, kwargs)


setattr(call_eagerly, "_torchdynamo_disable", True)  # noqa: B010 - which functions do not have otherwise


def _call(model: nn.Module, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    with uncompiled(model):
        return function(*args, **kwargs)


# --------------------------------------------------------------------------------------------------
# Passes that the bridge did not start.
# --------------------------------------------------------------------------------------------------


#: The file in which torch calls modules and their hooks.
_TORCH_CALLS = nn.Module.__call__.__code__.co_filename


class PassBoundary(NotCopied):
    """The torch hooks that open and end a pass.

    Args:
        modules: return the modules whose call is a pass: the base model, and each stack of an
            encoder-decoder model.
        blocks: the object that carries hooks into blocks that backward recomputes.
        forced_eager: keeps compiled code from running in place of the model.
        check: called when a pass begins that the bridge did not start.
        unseen: tells whether hooks of a ``with`` statement are attached that are not visible to the
            current code.
    """

    #: The handles of the hooks; none in a copy, which does nothing.
    _handles: Sequence[RemovableHandle] = ()

    def __init__(
        self,
        modules: Sequence[Finder],
        blocks: CheckpointedBlocks,
        forced_eager: ForcedEager,
        check: Callable[[], None],
        unseen: Callable[[], bool],
    ) -> None:
        self._modules, self._blocks = modules, blocks
        self._forced_eager, self._check, self._unseen = forced_eager, check, unseen

    def left_in_copy(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return PassBoundary.__new__, (PassBoundary,)

    def attach(self) -> None:
        """Begin to watch."""
        for module in [finder.module for finder in self._modules]:
            begins = module.register_forward_pre_hook(self.begin, prepend=True, with_kwargs=True)
            self._handles = (
                *self._handles,
                begins,
                module.register_forward_hook(self.end, always_call=True),
            )
        self._forced_eager.attach()

    def detach(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = ()
        self._forced_eager.detach()
        self._blocks.release()

    def begin(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Open a pass, as a forward pre-hook; end abandoned passes of this module first."""
        if not self._handles:
            return
        context = CURRENT.get()
        before = context.run
        over = before is None or before.opened_by is module or before.is_left
        if over and not is_of_batch(kwargs):
            self._check()
            refuse_streamers_thread(self._unseen)
            run = ForwardPass(module, context.generation)
            run.frame = _frame_of_call()
            run.take_arguments(module, kwargs)
            CURRENT.set(RunContext(context.shared, context.own, run))
        self._blocks.prepare()

    def end(self, module: nn.Module, args: Args, output: Any) -> None:
        """End the pass, as a forward hook that is called after an exception too."""
        context = CURRENT.get()
        if context.run is not None and context.run.opened_by is module:
            context.run.end()
            CURRENT.set(RunContext(context.shared, context.own, None, context.run.outside))


def _frame_of_call() -> FrameType | None:
    """Return torch's frame of the module call whose hook is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _TORCH_CALLS:
        frame = frame.f_back
    return frame


#: The mark on the keys and values of a batch: every bridge of the model must recognise it.
_BEGUN_BY_BATCH = "begun_by_batch"


def mark_as_of_batch(cache: PagedAttentionCache) -> None:
    """Mark passes that use this cache as begun by a bridge's batch, whichever hook runs first.

    If the base model is the whole model, the hooks of a batch and of a boundary are on one module.
    """
    setattr(cache, _BEGUN_BY_BATCH, True)


def is_of_batch(kwargs: Kwargs) -> bool:
    """Tell whether a continuous-batching pass belongs to a bridge's batch, which opens and ends it.

    Another batch's thread does not see the scopes of the calling code, and its rows mix tokens of
    many requests.

    Raises:
        RuntimeError: it belongs to another batch.
    """
    cache = kwargs.get("cache")
    if not isinstance(cache, PagedAttentionCache):
        return False
    if not getattr(cache, _BEGUN_BY_BATCH, False):
        raise RuntimeError(
            "hooks are attached to this model, and its own generate_batch (continuous batching)"
            " would run without those of a `with` statement, and show the others all requests as"
            " one row: use bridge.generate_batch"
        )
    return True


def refuse_streamers_thread(unseen: Callable[[], bool]) -> None:
    """Reject a pass in the thread of a `TextIteratorStreamer`, which does not see the open hooks.

    ``Thread(target=model.generate, kwargs={"streamer": ...})`` runs in an empty context. The
    streamer is ended first, since its reader would otherwise wait forever.

    Args:
        unseen: whether hooks of a ``with`` statement are attached that this thread does not see.

    Raises:
        RuntimeError: it is such a thread.
    """
    started = vars(threading.current_thread())
    streamer = (started.get("_kwargs") or {}).get("streamer")
    function = getattr(started.get("_target"), "__name__", "")
    if streamer is None or function != "generate" or not unseen():
        return
    streamer.end()
    raise RuntimeError(
        "this thread generates for a streamer, and does not see the hooks of a `with` statement"
        " that is open elsewhere: use bridge.generate_stream, or hand the context over,"
        " Thread(target=contextvars.copy_context().run, args=(model.generate,), kwargs=...)"
    )


def strip(model: nn.Module) -> None:
    """Remove our hooks from a copy of a model that was made while hooks were attached."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                del hooks[key]


def has_other_hooks(model: nn.Module) -> bool:
    """Tell whether a model has forward hooks that were not attached by a bridge.

    Args:
        model: the model.
    """
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if not all(map(_is_ours, list(hooks.values()))):
                return True
    return False


def _is_ours(hook: object) -> bool:
    return hook is noop_hook or isinstance(getattr(hook, "__self__", None), _OURS)


_OURS = (SiteHook, InputFront, PassBoundary, ReadingHook)
