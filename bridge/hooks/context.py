"""Whose hooks are whose: the context that code runs in, and what one forward pass remembers.

A hook that is *added* belongs to its hook point, and every run sees it. A hook that is *scoped* (`run_with_hooks`,
``with bridge.hooks(...)``, a cache, a trace) belongs to a `Scope`. Which scopes are open is a value in a context
variable, so other threads, asyncio tasks and greenlets do not see them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from adapters.paths import token_embedding
from adapters.points import Point, Site
from bridge.hooks.listener import Listener, Scope

T = TypeVar("T")


class NamedPoint(Protocol):
    """A hook point, as those know it who call functions at it.

    Attributes:
        name: its canonical name.
        point: its declaration.
    """

    name: str
    point: Point


class SourceSite(Protocol):
    """A site whose tensor hook points elsewhere need."""

    @property
    def site(self) -> Site:
        """Where it is."""

    @property
    def module(self) -> nn.Module | None:
        """The module that it stands on; None where it stands on none any more."""


class RunsWithPass(Protocol):
    """What runs in step with a forward pass."""

    def end(self) -> None:
        """The pass is over."""


class Generation:
    """One generation: how many steps it has done, from which prompt.

    Attributes:
        step: 0 for the prompt, 1 for the first token that was generated, and so on.
        prompt: how many tokens the prompt has, padding included; None where that is not known.
        padding: how many tokens of padding come before each row.
        of_decoder: it is the decoder's sequence that grows.
        in_order: each step processes the tokens that the sequence has gained, or all of them.
        processed: how many tokens of the sequence are processed after the present pass, where `step` does not say.
    """

    __slots__ = ("in_order", "of_decoder", "padding", "processed", "prompt", "step")

    def __init__(
        self,
        prompt: int | None = None,
        padding: Sequence[int] = (),
        of_decoder: bool = False,
        in_order: bool = True,
    ) -> None:
        self.step = 0
        self.prompt, self.padding, self.of_decoder, self.in_order = prompt, padding, of_decoder, in_order
        self.processed: int | None = None

    @property
    def tokens(self) -> int:
        """How many tokens of the sequence are processed after the present pass, padding included."""
        return (self.prompt or 0) + self.step if self.processed is None else self.processed


class PassMemory:
    """What a forward pass remembers, in a run or in a program.

    Attributes:
        written: what was written at points that others follow, by their names (see `Point.linked`).
        bodies: what runs in step with it, by what made it (see `RunsWithPass`).
    """

    __slots__ = ("bodies", "written")

    def __init__(self) -> None:
        self.written: dict[str, Tensor] = {}
        self.bodies: dict[object, RunsWithPass] = {}

    def tensor_at(self, source: SourceSite) -> tuple[nn.Module, Tensor] | None:
        """What passed a site: the module called there, and the tensor; None where nothing did."""
        raise NotImplementedError


class Pass(Protocol):
    """A forward pass as hook points meet it: that of a run, or that of a program."""

    @property
    def run(self) -> PassMemory | None:
        """What it remembers; None where the code does not run in a pass."""

    def show(self, listener: Listener, act: Tensor, point: NamedPoint) -> None:
        """Shows an activation to a listener that only looks."""

    def call_user_function(self, listener: Listener, given: Tensor, point: NamedPoint) -> Any:
        """What a user's function returns for a copy of an activation."""


class ForwardPass(PassMemory):
    """What the forward pass of a run remembers. It ends with the pass, and holds no tensor afterwards.

    Attributes:
        opened_by: the module whose call began it; None where a run of the bridge did.
        sources: what was seen at sites that other hook points need: the module called there, and the tensor.
        separate: for each reader of a norm that is given a copy of its own, that copy (see `Point.separate_consumers`).
        start_at: the first block that runs; points before it stay silent.
        skipped: the blocks that are passed over.
        embeddings: the module of the token embeddings, and what was given in place of its output; None: it runs.
        entering: for a block, the residual stream that is handed on or put in, in place of what the model has; for a
            module that a trace skips, what it returns.
        gradients: gradients were on when it began, or may have been outside of a checkpointed call of the model.
        calls: how often modules began that run several times, of which hook points tell the calls apart.
        past: it goes on from the keys and values of an earlier one.
        masks: its masks of padding, by the names of the arguments.
    """

    __slots__ = (
        "calls", "embeddings", "entering", "gradients", "masks", "opened_by", "past", "separate", "skipped", "sources",
        "start_at",
    )  # fmt: skip

    def __init__(self, opened_by: nn.Module | None = None) -> None:
        super().__init__()
        self.opened_by = opened_by
        self.gradients = opened_by is not None or torch.is_grad_enabled()
        self.start_at: int | None = None
        self.skipped: frozenset[nn.Module] = frozenset()
        self.sources: dict[SourceSite, tuple[nn.Module, Tensor]] = {}
        self.separate: dict[str, Tensor] = {}
        self.entering: dict[nn.Module, object] = {}
        self.embeddings: tuple[nn.Module, Tensor] | None = None
        self.calls: dict[nn.Module, int] = {}
        self.past = False
        self.masks: dict[str, Tensor] = {}

    def end(self) -> None:
        """Lets go of every tensor."""
        while self.bodies:
            self.bodies.popitem()[1].end()
        for kept in (self.sources, self.written, self.separate, self.entering, self.masks):
            kept.clear()
        self.calls.clear()
        self.skipped = frozenset()
        self.embeddings = None

    def is_call(self, module: nn.Module, number: int) -> bool:
        """Whether the call of a module that is under way, or has just ended, is the one with a number."""
        return self.calls.get(module, 0) == number + 1

    def take_arguments(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        """Notes what a model is given in place of the output of its token embeddings, what is padding, if it goes on.

        Args:
            model: the model.
            kwargs: the arguments of its call.
        """
        past = kwargs.get("past_key_values")
        self.past = past is not None and bool(past.get_seq_length())
        for name in ("attention_mask", "decoder_attention_mask"):
            mask = kwargs.get(name)
            if isinstance(mask, Tensor) and mask.ndim == 2:
                self.masks[name] = mask
        given = kwargs.get("inputs_embeds")
        embedding = token_embedding(model) if isinstance(given, Tensor) else None
        if isinstance(given, Tensor) and embedding is not None:
            self.embeddings = embedding, given

    def tensor_at(self, source: SourceSite) -> tuple[nn.Module, Tensor] | None:
        """What passed a site: the module called there, and the tensor; None where nothing did.

        Embeddings that were given in place of tokens passed where the model's own would have.
        """
        seen = self.sources.get(source)
        if seen is None and self.embeddings is not None and source.site.kind == "output":
            return self.embeddings if source.module is self.embeddings[0] else None
        return seen


#: What is seen where no scope is open: the hooks that were added.
_ADDED_HOOKS: frozenset[Scope | None] = frozenset({None})
_NO_SCOPES: frozenset[Scope | None] = frozenset()


class RunContext:
    """What code that runs here sees.

    Args:
        shared: the scopes that are open: every run that starts here sees their hooks. None among them stands for the
            hooks that were added, and belong to no scope.
        own: the scopes of the present run alone, such as its cache; outside of a run, of the next one.
        run: what the present forward pass remembers; None outside of any.
        generation: the generation that this is part of.
        inherited: in a user's hook function, those scopes that were open for the run that called it.

    Attributes:
        visible: `shared` and `own`.
    """

    __slots__ = ("_outside", "generation", "inherited", "own", "run", "shared", "visible")

    def __init__(
        self,
        shared: frozenset[Scope | None] = _ADDED_HOOKS,
        own: frozenset[Scope | None] = _NO_SCOPES,
        run: ForwardPass | None = None,
        generation: Generation | None = None,
        inherited: frozenset[Scope | None] = _NO_SCOPES,
    ) -> None:
        self.inherited = inherited
        self.shared, self.own, self.run, self.generation = shared, own, run, generation
        self.visible = shared | own if own else shared
        self._outside: RunContext | None = None

    def show(self, listener: Listener, act: Tensor, point: NamedPoint) -> None:
        """Shows an activation to a listener that only looks."""
        listener.fn(act, hook=point)

    def call_user_function(self, listener: Listener, given: Tensor, point: NamedPoint) -> Any:
        """Calls a user's function outside of the run, since what it computes is not the model's. This context is that
        of the present code.
        """
        if not listener.in_run:
            CURRENT.set(self.outside_the_run())
        try:
            return listener.fn(given, hook=point)
        except TypeError as error:
            if _takes_hook(listener.fn):
                raise
            name = getattr(listener.fn, "__name__", None) or repr(listener.fn)
            raise TypeError(
                f"the hook {name} at {point.name} takes {inspect.signature(listener.fn)}, but it is called as "
                "fn(activation, hook=point): give it a second parameter named `hook`"
            ) from error
        finally:
            CURRENT.set(self)

    def outside_the_run(self) -> RunContext:
        """What a user's hook function runs in: the scopes that are open, and nothing of the run that called it."""
        if self.run is None and not self.own:
            return self
        if self._outside is None:
            self._outside = RunContext(self.shared, generation=self.generation, inherited=self.shared)
        return self._outside


def _takes_hook(fn: Callable[..., Any]) -> bool:
    """Whether a function can be called with an activation and ``hook=``; True where that cannot be known."""
    try:
        inspect.signature(fn).bind(None, hook=None)
    except TypeError:
        return False
    except ValueError:  # a function of C without a signature
        return True
    return True


#: The context that the present code runs in.
CURRENT: ContextVar[RunContext] = ContextVar("transformer_bridge_run", default=RunContext())  # noqa: B039


class _ContextScope(Generic[T]):
    """A ``with`` statement in a context. (A generator would take three times as long, several times in every run.)

    Args:
        context: the context.
        gives: what it is for.
    """

    __slots__ = ("_before", "_context", "_gives")

    def __init__(self, context: RunContext, gives: T) -> None:
        self._context, self._gives = context, gives

    def __enter__(self) -> T:
        self._before = CURRENT.get()
        CURRENT.set(self._context)
        return self._gives

    def __exit__(self, *error: object) -> None:
        CURRENT.set(self._before)


class _PassScope(_ContextScope[ForwardPass]):
    """A ``with`` statement in the context of a forward pass, which ends with it."""

    __slots__ = ()

    def __exit__(self, *error: object) -> None:
        self._gives.end()
        CURRENT.set(self._before)


def in_context(context: RunContext) -> AbstractContextManager[RunContext]:
    """Runs the body of a ``with`` statement in a context."""
    return _ContextScope(context, context)


def without_hooks() -> AbstractContextManager[RunContext]:
    """A ``with`` statement in which no hook sees the model run."""
    return in_context(RunContext(frozenset()))


@contextmanager
def open_scope(scope: Scope) -> Iterator[Scope]:
    """Lets every run inside a ``with`` statement see the hooks of a scope."""
    before = CURRENT.get()
    CURRENT.set(RunContext(before.shared | {scope}, before.own, before.run, before.generation, before.inherited))
    try:
        yield scope
    finally:
        # Not simply what was there before: several may be open, and end in any order.
        now = CURRENT.get()
        if scope in now.shared:
            CURRENT.set(RunContext(now.shared - {scope}, now.own, now.run, now.generation, now.inherited))


def of_the_next_run(scope: Scope) -> AbstractContextManager[Scope]:
    """Lets the run that starts inside a ``with`` statement see a scope, and no run that its hooks start."""
    before = CURRENT.get()
    own: frozenset[Scope | None] = frozenset((scope,))
    return _ContextScope(RunContext(before.shared, own, None, before.generation, before.inherited), scope)


def forward_pass(
    generation: Generation | None = None, scope: Scope | None = None
) -> AbstractContextManager[ForwardPass]:
    """A run of its own: it sees the hooks that are open, and nothing of a run in whose hooks it was started.

    Args:
        generation: the generation that it is; by default the one that is under way.
        scope: what it alone sees; by default that of the next run.
    """
    before = CURRENT.get()
    run = ForwardPass()
    own = frozenset((scope,)) if scope is not None else before.own if before.run is None else _NO_SCOPES
    return _PassScope(RunContext(before.shared, own, run, generation or before.generation), run)
