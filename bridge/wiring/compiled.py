"""Hooks in compiled and checkpointed models, and in passes that the bridge did not start.

1. *Compiled code* knows no hooks that come after it was made. While somebody listens it is kept away (`ForcedEager`,
   `call_eagerly`): the same modules run eagerly. A pass that began inside of it is refused.
2. *Checkpointed blocks* are computed again by backward. They are computed with the hooks that they were computed with
   first, or it is refused where these have changed (`CheckpointedBlocks`).
3. *A direct call* of the Hugging Face model, without the bridge: what hook points remember of a pass (`ForwardPass`)
   ends with it. A run of the bridge opens and ends its own; here two torch hooks do, which are there while somebody
   listens (`PassBoundary`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.hooks import RemovableHandle
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from adapters.imports import is_compiling
from adapters.views import Kwargs
from bridge.hooks.context import CURRENT, ForwardPass, RunContext, recomputation_frame, setting
from bridge.hooks.hooks import AttachesListeners
from bridge.hooks.modules import Finder, NotCopied, itself
from bridge.taps.taps import LOCK, noop_hook
from bridge.wiring.reading_plan import ReadingHook
from bridge.wiring.site import SiteHook

# ----------------------------------------------------------------------------------------------------------------------
# Models that were compiled: compiled code does not know hooks that come later.
# ----------------------------------------------------------------------------------------------------------------------


class _EagerStance:
    """Keeps all compiled code away while anybody needs that, in whatever thread: torch knows one stance for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._stance: Any = None
        #: `_call`, which compiled code leaves to call: made when it is needed, since that imports the compiler.
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


class ForcedEager(NotCopied):
    """Wraps a model's forward while hooks are attached, so that no compiled code runs in its place.

    Code that ``torch.compile`` made of the model before checks that the model's forward is where it was; what is
    compiled meanwhile leaves the compiled code at this point, and comes back after it.

    Args:
        find: finds the model.
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
        return (itself, (self._own,)) if self._own is not None else (getattr, (self._module, "forward"))

    def attach(self) -> None:
        """Puts it there, unless that of another bridge around the model is there already."""
        module = self._find.module
        with LOCK:  # a generation may begin where another thread's run ends
            there = module.__dict__.get("forward")
            self._shares = there if isinstance(there, ForcedEager) else self
            self._shares._users += 1
            if self._shares is there:  # another's; or this one, which another has needed since it was detached
                return
            self._module = module
            self._own, self.original = there, module.forward
            self.__wrapped__ = self.original  # whose signature this has
            module.__dict__["forward"] = self

    def detach(self) -> None:
        """Takes it away, when no bridge needs it any more."""
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
    if is_compiling() or get_eval_frame_callback() not in (None, False):
        raise RuntimeError(
            "hooks and caches cannot be attached inside a function that torch.compile runs: compiled code does not "
            "know them. Compile the model (torch.compile(hf_model)), or what you do with the results, and call "
            "run_with_hooks, run_with_cache and hooks outside"
        )


def nothing(*args: object, **kwargs: object) -> Any:
    """The forward of what has none."""
    raise RuntimeError("there is no forward here")


def call_eagerly(model: nn.Module, function: Callable[..., Any], args: tuple[object, ...], kwargs: Kwargs) -> Any:
    """Calls a function of a model with nothing compiled, also from within compiled code.

    Args:
        model: the model.
        function: what to call.
        args, kwargs: with what.
    """
    if not ever_compiled():
        return function(*args, **kwargs)
    if _EAGER_STANCE.outside is None:  # no `functools.cache`: torch warns where compiled code meets one
        _EAGER_STANCE.outside = torch.compiler.disable(_call)
    return _EAGER_STANCE.outside(model, function, args, kwargs)


setattr(call_eagerly, "_torchdynamo_disable", True)  # noqa: B010 - which functions do not have otherwise


def _call(model: nn.Module, function: Callable[..., Any], args: tuple[object, ...], kwargs: Kwargs) -> Any:
    with uncompiled(model):
        return function(*args, **kwargs)


# ----------------------------------------------------------------------------------------------------------------------
# Activation checkpointing: blocks that backward computes again run under the hooks of their forward pass.
#
# transformers hands each such block to ``_gradient_checkpointing_func`` with a function that computes it. While
# somebody listens, that function also brings along which hooks were there. Backward may call it later, on a thread of
# autograd's own, when the ``with`` statement of those hooks has ended.
# ----------------------------------------------------------------------------------------------------------------------


_NAME = "_gradient_checkpointing_func"


class CheckpointedBlocks:
    """The modules that may be computed again.

    Args:
        modules: finds them: the blocks, and the stacks that they stand in.
        attaches: attaches hooks.
    """

    def __init__(self, modules: Sequence[Finder], attaches: AttachesListeners) -> None:
        #: By the path that leads to several of them, with their names there: to find each anew from the model took
        #: longer than a hook.
        self._inside: dict[str, list[tuple[str, Finder]]] = {}
        for finder in modules:
            *above, name = finder.parts or [""]
            self._inside.setdefault(".".join(above), []).append((name, finder))
        self._attaches = attaches
        self._prepared: list[nn.Module] = []

    def prepare(self) -> None:
        """Puts our function before the model's own, where checkpointing is switched on."""
        for path, finders in self._inside.items():  # asked in each step of a generation
            inside = Finder(finders[0][1].root, path).module._modules
            for name, finder in finders:
                module = inside.get(name)
                if module is None:
                    module = finder.module
                own = module.__dict__.get(_NAME)
                if own is None or isinstance(own, _CheckpointFunction):
                    continue
                if not (module.training and module.gradient_checkpointing):
                    continue
                if finder.call is not None:
                    raise RuntimeError(
                        f"{'.'.join(finder.parts)} is several blocks, and backward would compute them again "
                        "(activation checkpointing) in an order in which nothing tells them apart: switch "
                        "checkpointing off"
                    )
                module.__dict__[_NAME] = _CheckpointFunction(own, finder, self._attaches)
                self._prepared.append(module)

    def release(self) -> None:
        """Takes it back."""
        for module in self._prepared:
            ours = module.__dict__.get(_NAME)
            if isinstance(ours, _CheckpointFunction):
                module.__dict__[_NAME] = ours.own
        self._prepared.clear()


class _CheckpointFunction(NotCopied):
    """Wraps the checkpointing function of one module.

    Args:
        own: the module's own.
        find: finds the module.
        attaches: attaches hooks.
    """

    def __init__(self, own: Callable[..., Any], find: Finder, attaches: AttachesListeners) -> None:
        self.own, self._find, self._attaches = own, find, attaches

    def left_in_copy(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return itself, (self.own,)

    def __call__(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        return self.own(_BlockWithHooks(function, self._find, self._attaches), *args, **kwargs)


class _BlockWithHooks:
    """A function that computes a block, and which hooks it was computed with first."""

    def __init__(self, function: Callable[..., Any], find: Finder, attaches: AttachesListeners) -> None:
        context = CURRENT.get()
        self._function, self._path, self._attaches = function, ".".join(find.parts), attaches
        self._model = find.root  # hooks find its modules, also where nobody holds more of it than a loss
        self._shared = context.shared
        for scope in self._shared:
            if scope is not None:
                scope.recomputed = True
        self._changes = attaches.changes
        # The block's own input, which is outside of what is computed again.
        seen = {} if context.run is None else context.run.sources
        self._sources = {hook: found for hook, found in seen.items() if hook.site.path == self._path}
        self._ran = False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if not self._ran:
            self._ran = True
            return recomputation_frame(self._function, args, kwargs)
        if self._changes != self._attaches.changes:
            raise RuntimeError(
                f"backward computes {self._path} again (activation checkpointing), and hooks were added or removed "
                "since its forward pass: run backward before changing them, or use run_with_hooks or "
                "`with bridge.hooks(...)`, whose hooks are brought along"
            )
        run = ForwardPass()
        run.sources.update(self._sources)
        try:
            with setting(CURRENT, RunContext(self._shared, run=run)), ExitStack() as attached:
                for scope in self._shared - {None}:  # it may be gone
                    assert scope is not None
                    self._attaches.attach_scope(scope)
                    attached.callback(self._attaches.detach_scope, scope)
                return recomputation_frame(self._function, args, kwargs)
        finally:
            run.end()


#: The file in which torch calls modules and their hooks.
_TORCH_CALLS = nn.Module.__call__.__code__.co_filename


class PassBoundary(NotCopied):
    """The torch hooks that open and end a pass.

    Args:
        modules: find the modules whose call is a pass: the base model, and each stack of an encoder-decoder model.
        blocks: what carries hooks into the blocks that backward computes again.
        forced_eager: keeps compiled code from running in place of the model.
        check: called when a pass begins that is no run of the bridge.
        unseen: says whether hooks of a ``with`` statement are attached that the present code does not see.
    """

    #: Of the hooks; none in a copy, which does nothing.
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
        """Begins to watch."""
        for module in [finder.module for finder in self._modules]:
            begins = module.register_forward_pre_hook(self.begin, prepend=True, with_kwargs=True)
            self._handles = (*self._handles, begins, module.register_forward_hook(self.end, always_call=True))
        self._forced_eager.attach()

    def detach(self) -> None:
        """Ends it."""
        for handle in self._handles:
            handle.remove()
        self._handles = ()
        self._forced_eager.detach()
        self._blocks.release()

    def begin(self, module: nn.Module, args: tuple[object, ...], kwargs: Kwargs) -> None:
        """The forward pre-hook. A pass that this module opened before, or whose call is over, was left behind."""
        if not self._handles:
            return
        context = CURRENT.get()
        left = context.run is not None and (context.run.opened_by is module or context.run.is_left)
        if (context.run is None or left) and not is_of_batch(kwargs):
            self._check()
            refuse_streamers_thread(self._unseen)
            run = ForwardPass(module)
            run.frame = _frame_of_call()
            run.take_arguments(module, kwargs)
            CURRENT.set(RunContext(context.shared, context.own, run, context.generation))
        self._blocks.prepare()

    def end(self, module: nn.Module, args: tuple[object, ...], output: Any) -> None:
        """The forward hook, which is called after an exception too."""
        context = CURRENT.get()
        if context.run is not None and context.run.opened_by is module:
            context.run.end()
            CURRENT.set(RunContext(context.shared, context.own, None, context.generation))


def _frame_of_call() -> FrameType | None:
    """The frame of torch in which a module is called, whose hook asks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _TORCH_CALLS:
        frame = frame.f_back
    return frame


#: What keys and values of a batch are marked with: any bridge of the model has to know them.
_BEGUN_BY_BATCH = "begun_by_batch"


def mark_as_of_batch(cache: PagedAttentionCache) -> None:
    """Says that the passes with these keys and values are begun by a batch of a bridge, whichever hook is called first.

    Where the base model is the whole, the hooks of a batch and of a boundary stand at one module.
    """
    setattr(cache, _BEGUN_BY_BATCH, True)


def is_of_batch(kwargs: Kwargs) -> bool:
    """Whether a pass of transformers' continuous batching is that of a bridge's batch, which opens and ends it.

    The thread of another sees none of the scopes of the code that called, and its tokens are those of many requests in
    one row.

    Raises:
        RuntimeError: it is another.
    """
    cache = kwargs.get("cache")
    if not isinstance(cache, PagedAttentionCache):
        return False
    if not getattr(cache, _BEGUN_BY_BATCH, False):
        raise RuntimeError(
            "hooks are attached to this model, and its own generate_batch (continuous batching) would run without "
            "those of a `with` statement, and show the others all requests as one row: use bridge.generate_batch"
        )
    return True


def refuse_streamers_thread(unseen: Callable[[], bool]) -> None:
    """Refuses a pass in the thread that `TextIteratorStreamer` is used with, where it does not see open hooks.

    ``Thread(target=model.generate, kwargs={"streamer": ...})`` runs in an empty context. The streamer is ended first:
    whoever waits for text would wait for ever.

    Args:
        unseen: whether hooks of a ``with`` statement are attached that this thread does not see.

    Raises:
        RuntimeError: it is such a thread.
    """
    started = vars(threading.current_thread())
    streamer = (started.get("_kwargs") or {}).get("streamer")
    if streamer is not None and getattr(started.get("_target"), "__name__", "") == "generate" and unseen():
        streamer.end()
        raise RuntimeError(
            "this thread generates for a streamer, and does not see the hooks of a `with` statement that is open "
            "elsewhere: use bridge.generate_stream, or hand the context over, "
            "Thread(target=contextvars.copy_context().run, args=(model.generate,), kwargs=...)"
        )


def strip(model: nn.Module) -> None:
    """Takes what is ours from a copy of a model that was made while hooks were attached."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                del hooks[key]


def has_other_hooks(model: nn.Module) -> bool:
    """Whether there are torch hooks around forwards that no bridge has attached.

    Args:
        model: whose modules are looked at.
    """
    found = ((module._forward_hooks, module._forward_pre_hooks) for module in model.modules())
    return any(not _is_ours(hook) for both in found for hooks in both for hook in list(hooks.values()))


def _is_ours(hook: object) -> bool:
    return hook is noop_hook or isinstance(getattr(hook, "__self__", None), _OURS)


_OURS = (SiteHook, PassBoundary, ReadingHook)
