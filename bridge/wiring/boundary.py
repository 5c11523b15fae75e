"""Where a forward pass begins and ends when the Hugging Face model is called directly, without the bridge.

What hook points remember of a pass (`ForwardPass`) ends with it. A run of the bridge opens and ends its own; for a
direct call the model's own call does, through two torch hooks that are there while somebody listens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from bridge.hooks.context import CURRENT, ForwardPass, RunContext
from bridge.hooks.modules import Finder
from bridge.taps.tap import noop_hook
from bridge.wiring.checkpointing import CheckpointedBlocks
from bridge.wiring.compiled import ForcedEager
from bridge.wiring.reading_plan import ReadingHook
from bridge.wiring.site import SiteHook


class PassBoundary:
    """The torch hooks that open and end a pass.

    Args:
        modules: finds the modules whose call is a pass: the base model, and each stack of an encoder-decoder model.
        blocks: what carries hooks into the blocks that backward computes again.
        forced_eager: keeps compiled code from running in place of the model.
        check: called when a pass begins that is no run of the bridge.
        unseen: says whether hooks of a ``with`` statement are attached that the present code does not see.
    """

    def __init__(
        self,
        modules: Sequence[Finder],
        blocks: CheckpointedBlocks,
        forced_eager: ForcedEager | None = None,
        check: Callable[[], None] | None = None,
        unseen: Callable[[], bool] | None = None,
    ) -> None:
        self._modules = modules
        self._forced_eager, self._check, self._unseen = forced_eager, check, unseen
        self._blocks = blocks
        self._handles: list[RemovableHandle] = []

    # A copy of a model that has hooks attached carries inert ones: hooks belong to one bridge.
    def __reduce__(self) -> tuple[object, ...]:
        return PassBoundary, ((), CheckpointedBlocks(()))

    def __deepcopy__(self, memo: dict[int, Any]) -> PassBoundary:
        return PassBoundary((), CheckpointedBlocks(()))

    def attach(self) -> None:
        """Begins to watch."""
        for finder in self._modules:
            module = finder.module
            self._handles.append(module.register_forward_pre_hook(self.begin, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self.end, always_call=True))
        if self._forced_eager is not None:
            self._forced_eager.attach()

    def detach(self) -> None:
        """Ends it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._forced_eager is not None:
            self._forced_eager.detach()
        self._blocks.release()

    def begin(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook. A pass that this module opened before was left by an interrupt: it is over."""
        context = CURRENT.get()
        if self._handles and (context.run is None or context.run.opened_by is module):
            if self._check is not None:
                self._check()
            refuse_packed(kwargs)
            if self._unseen is not None:
                refuse_streamers_thread(self._unseen)
            run = ForwardPass(module)
            run.take_arguments(module, kwargs)
            CURRENT.set(RunContext(context.shared, context.own, run, context.generation))
        self._blocks.prepare()

    def end(self, module: nn.Module, args: tuple[object, ...], output: Any) -> None:
        """The forward hook, which is called after an exception too."""
        context = CURRENT.get()
        if context.run is not None and context.run.opened_by is module:
            context.run.end()
            CURRENT.set(RunContext(context.shared, context.own, None, context.generation))


def refuse_packed(kwargs: dict[str, Any]) -> None:
    """Refuses a pass of transformers' continuous batching that is not the bridge's.

    Its thread sees none of the scopes of the code that called, and its tokens are those of many requests in one row.

    Raises:
        RuntimeError: it is one.
    """
    packed = isinstance(kwargs.get("cache"), PagedAttentionCache)
    if packed:
        raise RuntimeError(
            "hooks are attached to this model, and its own generate_batch (continuous batching) would run without "
            "those of a `with` statement, and show the others all requests as one row: use bridge.generate_batch"
        )


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
            ours = [
                key
                for key, hook in hooks.items()
                if hook is noop_hook or isinstance(getattr(hook, "__self__", None), _OURS)
            ]
            for key in ours:
                del hooks[key]


_OURS = (SiteHook, PassBoundary, ReadingHook)
