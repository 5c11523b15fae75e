"""Whose hooks are whose: the context that code runs in, and what one forward pass remembers.

A hook that is *added* belongs to its hook point, and every run sees it. A hook that is *scoped* (`run_with_hooks`,
``with bridge.hooks(...)``, a cache, a trace) belongs to a `Scope`. Which scopes are open is a value in a context
variable, so other threads, asyncio tasks and greenlets do not see them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adapters.imports import check_checkpointed_gradients
from adapters.inputs import past_of
from adapters.points import Point, Site, token_embedding
from bridge.hooks.rows import BatchRows

# ----------------------------------------------------------------------------------------------------------------------
# What is attached to hook points: listeners, and the scopes that they are opened and end with.
# ----------------------------------------------------------------------------------------------------------------------


#: ``fn(activation, hook=point)`` returns the new activation, or None to leave it (or what was done to it in place).
HookFunction = Callable[..., Tensor | None]
#: ``fwd`` and ``bwd`` are functions of the user; ``read`` only looks at the activation; ``edge`` is given the
#: activation that later computation uses, to ask for its gradient; ``follow`` is our own: it is shown the activation
#: itself, may put another in its place, and stays where hooks are reset; ``leader`` takes over what was written at
#: another point, which it is asked for with the pass in place of an activation.
Kind = Literal["fwd", "bwd", "read", "edge", "follow", "leader"]


class Scope:
    """The hooks that were opened together, and end together.

    Attributes:
        members: the listeners at their hook points, so that a recomputation after the end can attach it again.
        users: how many `with` statements and recomputations need it attached now.
        recomputed: a block that backward may compute again has run with it, and needs it then.
        of_one_run: only one run of the bridge ever sees it, no direct call of the model.
    """

    __slots__ = ("__weakref__", "members", "of_one_run", "recomputed", "users")

    def __init__(self, of_one_run: bool = False) -> None:
        self.of_one_run, self.recomputed = of_one_run, False
        self.members: list[tuple[NamedPoint, Listener]] = []
        self.users = 0


class Listener:
    """Something attached to a hook point.

    Args:
        kind: see `Kind`.
        fn: called as ``fn(activation, hook=point)``.
        scope: the scope that it belongs to; None: every run sees it.
        permanent, level: what `reset_hooks` asks for.
        named: its hook point was chosen by name, not by a filter.
        deferrable: of a ``read``: it takes a `Deferred` in place of an activation that would have to be computed.
        partial: of a ``read``: it takes a `Deferred` whose rows it can have computed, and has those that it keeps
            computed at once.
        optional: of a ``read``: where there is nothing to see, it does without, and a warning says so.

    Attributes:
        in_run: the function is a part of the run: hooks and caches see what it computes with the model. It says so by
            an attribute of this name.
    """

    __slots__ = ("deferrable", "fn", "in_run", "kind", "level", "named", "optional", "partial", "permanent", "scope")

    def __init__(
        self,
        kind: Kind,
        fn: Callable[..., Any],
        scope: Scope | None = None,
        permanent: bool = False,
        level: int | None = None,
        deferrable: bool = False,
        named: bool = False,
        optional: bool = False,
        partial: bool = False,
    ) -> None:
        self.in_run, self.named, self.optional = getattr(fn, "in_run", False) is True, named, optional
        self.kind, self.fn, self.scope = kind, fn, scope
        self.permanent, self.level, self.deferrable, self.partial = permanent, level, deferrable, partial


class NamedPoint:
    """What those know of a hook point who call functions at it.

    Attributes:
        name: its canonical name.
        point: its declaration.
    """

    __slots__ = ("name", "point")

    name: str
    point: Point


class SourceSite:
    """A site whose tensor hook points elsewhere need.

    Attributes:
        site: where it is.
    """

    __slots__ = ()

    site: Site

    @property
    def module(self) -> nn.Module | None:
        """The module that it stands on; None where it stands on none any more."""
        raise NotImplementedError


class RunsWithPass:
    """What runs in step with a forward pass."""

    def end(self) -> None:
        """The pass is over."""
        raise NotImplementedError


class Generation:
    """One generation: how many steps it has done, from which prompt.

    Attributes:
        step: 0 for the prompt, 1 for the first token that was generated, and so on.
        prompt: how many tokens the prompt has, padding included; None where that is not known.
        rows: how the rows of its prompt lie; None: they are one, without padding.
        of_decoder: it is the decoder's sequence that grows.
        in_order: each step processes the tokens that the sequence has gained, or all of them.
        processed: how many tokens of the sequence are processed after the present pass, where `step` does not say.
        readings: what probes read in its passes, by their names.
    """

    __slots__ = ("in_order", "of_decoder", "processed", "prompt", "readings", "rows", "step")

    def __init__(
        self,
        prompt: int | None = None,
        rows: BatchRows | None = None,
        of_decoder: bool = False,
        in_order: bool = True,
    ) -> None:
        self.step = 0
        self.prompt, self.rows, self.of_decoder, self.in_order = prompt, rows, of_decoder, in_order
        self.processed: int | None = None
        self.readings: dict[str, Any] = {}

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


class Pass:
    """A forward pass as hook points meet it: that of a run, or that of a program."""

    __slots__ = ()

    @property
    def run(self) -> PassMemory | None:
        """What it remembers; None where the code does not run in a pass."""
        raise NotImplementedError

    def show(self, listener: Listener, act: Tensor, point: NamedPoint) -> None:
        """Shows an activation to a listener that only looks."""
        listener.fn(act, hook=point)

    def call_user_function(self, listener: Listener, given: Tensor, point: NamedPoint) -> Any:
        """What a user's function returns for a copy of an activation."""
        raise NotImplementedError


class ForwardPass(PassMemory):
    """What the forward pass of a run remembers. It ends with the pass, and holds no tensor afterwards.

    Attributes:
        opened_by: the module whose call began it; None where a run of the bridge did.
        outside: the generation in one of whose hooks that call was made.
        frame: of that call.
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
        rows: how the rows of its batch lie; None where nobody asked.
        readings: what probes read in it, by their names.
    """

    __slots__ = (
        "calls", "embeddings", "entering", "frame", "gradients", "opened_by", "outside", "past", "readings", "rows",
        "separate", "skipped", "sources", "start_at",
    )  # fmt: skip

    def __init__(self, opened_by: nn.Module | None = None, outside: Generation | None = None) -> None:
        super().__init__()
        self.opened_by, self.outside = opened_by, outside
        self.frame: FrameType | None = None
        self.gradients = opened_by is not None or torch.is_grad_enabled()
        self.start_at: int | None = None
        self.skipped: frozenset[nn.Module] = frozenset()
        self.sources: dict[SourceSite, tuple[nn.Module, Tensor]] = {}
        self.separate: dict[str, Tensor] = {}
        self.entering: dict[nn.Module, object] = {}
        self.embeddings: tuple[nn.Module, Tensor] | None = None
        self.calls: dict[nn.Module, int] = {}
        self.past = False
        self.rows: BatchRows | None = None
        self.readings: dict[str, Any] = {}

    def end(self) -> None:
        """Lets go of every tensor."""
        while self.bodies:
            self.bodies.popitem()[1].end()
        for kept in (self.sources, self.written, self.separate, self.entering, self.readings):
            kept.clear()
        self.calls.clear()
        self.skipped = frozenset()
        self.embeddings = self.rows = self.frame = None

    @property
    def is_padded(self) -> bool:
        """Whether a row of its batch has padding."""
        return self.rows is not None and not all(bool(mask.all()) for mask in self.rows.masks.values())

    @property
    def is_left(self) -> bool:
        """Whether the call that began it is over, and nothing has ended it: after an interrupt, or where another thread
        took away what would have."""
        if self.frame is None:
            return False
        try:
            self.frame.clear()  # which only a frame can be that does not run any more
        except RuntimeError:
            return False
        return True

    def is_call(self, module: nn.Module, number: int) -> bool:
        """Whether the call of a module that is under way, or has just ended, is the one with a number."""
        return self.calls.get(module, 0) == number + 1

    def take_arguments(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        """Notes what a model is given in place of the output of its token embeddings, what is padding, if it goes on.

        Args:
            model: the model.
            kwargs: the arguments of its call.
        """
        past = past_of(kwargs)
        self.past = past is not None and bool(past.get_seq_length())
        self.rows = BatchRows(model, kwargs)
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


class RunContext(Pass):
    """What code that runs here sees.

    Args:
        shared: the scopes that are open: every run that starts here sees their hooks. None among them stands for the
            hooks that were added, and belong to no scope.
        own: the scopes of the present run alone, such as its cache; outside of a run, of the next one.
        run: what the present forward pass remembers; None outside of any.
        generation: the generation that this is part of.
        inherited: in a user's hook function, those scopes that were open for the run that called it.
        caller: likewise, what that run remembers: the function may hand its activation to an operation.

    Attributes:
        visible: `shared` and `own`.
    """

    __slots__ = ("_outside", "caller", "generation", "inherited", "own", "run", "shared", "visible")

    run: ForwardPass | None

    def __init__(
        self,
        shared: frozenset[Scope | None] = _ADDED_HOOKS,
        own: frozenset[Scope | None] = _NO_SCOPES,
        run: ForwardPass | None = None,
        generation: Generation | None = None,
        inherited: frozenset[Scope | None] = _NO_SCOPES,
        caller: ForwardPass | None = None,
    ) -> None:
        self.inherited, self.caller = inherited, caller
        self.shared, self.own, self.run, self.generation = shared, own, run, generation
        self.visible = shared | own if own else shared
        self._outside: RunContext | None = None

    def with_shared(self, shared: frozenset[Scope | None]) -> RunContext:
        """The same with other scopes open."""
        return RunContext(shared, self.own, self.run, self.generation, self.inherited, self.caller)

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
            self._outside = RunContext(self.shared, _NO_SCOPES, None, self.generation, self.shared, self.run)
        return self._outside

    def after_the_run(self) -> RunContext:
        """What a function of gradients runs in, when the run may be over: what is known of its rows stays."""
        if self.run is None:
            return self.outside_the_run()
        kept = ForwardPass()
        kept.past, kept.rows = self.run.past, self.run.rows
        return RunContext(self.shared, _NO_SCOPES, None, self.generation, self.shared, kept)


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


def pass_under_way() -> ForwardPass | None:
    """The pass that is under way in this context; None outside of one, also where one was left behind."""
    run = CURRENT.get().run
    return None if run is None or run.is_left else run


T = TypeVar("T")


class setting(Generic[T]):
    """Sets a context variable inside a ``with`` statement. (A generator would take three times as long, in every run.)

    Args:
        variable: such as `CURRENT`.
        value: what it is meanwhile.
    """

    __slots__ = ("_before", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._before = self._variable.get()
        self._variable.set(self._value)

    def __exit__(self, *error: object) -> None:
        self._variable.set(self._before)


def without_hooks() -> setting[RunContext]:
    """A ``with`` statement in which no hook sees the model run."""
    return setting(CURRENT, RunContext(frozenset()))


@contextmanager
def open_scope(scope: Scope) -> Iterator[Scope]:
    """Lets every run inside a ``with`` statement see the hooks of a scope."""
    before = CURRENT.get()
    CURRENT.set(before.with_shared(before.shared | {scope}))
    try:
        yield scope
    finally:
        # Not simply what was there before: several may be open, and end in any order.
        now = CURRENT.get()
        if scope in now.shared:
            CURRENT.set(now.with_shared(now.shared - {scope}))


def of_the_next_run(scope: Scope) -> setting[RunContext]:
    """Lets the run that starts inside a ``with`` statement see a scope, and no run that its hooks start."""
    before = CURRENT.get()
    own: frozenset[Scope | None] = frozenset((scope,))
    return setting(CURRENT, RunContext(before.shared, own, None, before.generation, before.inherited))


class forward_pass(setting[RunContext]):
    """A run of its own: it sees the hooks that are open, and nothing of a run in whose hooks it was started.

    Args:
        generation: the generation that it is; None: a run of its own, also where a hook of a generation starts it.
        scope: what it alone sees; by default that of the next run.

    Attributes:
        run: what it remembers, which ends with it.
    """

    __slots__ = ("run",)

    def __init__(self, generation: Generation | None = None, scope: Scope | None = None) -> None:
        before = CURRENT.get()
        run = self.run = ForwardPass()
        own = frozenset((scope,)) if scope is not None else before.own if before.run is None else _NO_SCOPES
        self._variable, self._value = CURRENT, RunContext(before.shared, own, run, generation)

    def __exit__(self, *error: object) -> None:
        self.run.end()
        CURRENT.set(self._before)


# ----------------------------------------------------------------------------------------------------------------------
# Which traces are open in the present context, for the parts of a bridge that show what a trace sees.
# ----------------------------------------------------------------------------------------------------------------------


class OpenTrace:
    """A trace, as the parts of a bridge ask it."""

    def seen_of_part(self, part: str, what: str) -> Any:
        """What a part of the bridge is given or returns.

        Args:
            part: such as ``blocks.3``.
            what: ``output`` or ``input``, the tensor; ``outputs`` or ``inputs``, all that its module returns, or is
                called with.
        """
        raise NotImplementedError

    def set_for_part(self, part: str, what: str, value: Any) -> None:
        """Replaces it."""
        raise NotImplementedError

    def pass_of(self, point: NamedPoint) -> tuple[ForwardPass | None, Generation | None] | None:
        """The pass, and the generation, whose activations it shows; None: the hook point is of another bridge."""
        raise NotImplementedError


#: The open traces, each with the names of its bridge, which tell bridges apart.
_OPEN: ContextVar[tuple[tuple[object, OpenTrace], ...]] = ContextVar("transformer_bridge_traces", default=())


def opened(names: object, trace: OpenTrace) -> None:
    """Says that a trace is open.

    Args:
        names: the names of its bridge.
        trace: the trace.
    """
    _OPEN.set((*_OPEN.get(), (names, trace)))


def closed(trace: OpenTrace) -> None:
    """Says that it is open no more.

    Args:
        trace: the trace.
    """
    # Not simply what was there before: several may be open, and end in any order.
    _OPEN.set(tuple([entry for entry in _OPEN.get() if entry[1] is not trace]))


def trace_of(names: object, asked: str) -> OpenTrace:
    """The trace that is open on a bridge.

    Args:
        names: the names of the bridge.
        asked: what was asked for, for the error.

    Raises:
        RuntimeError: none is open, or several are.
    """
    found = [trace for owner, trace in _OPEN.get() if owner is names]
    if len(found) == 1:
        return found[0]
    if not found:
        raise RuntimeError(
            f"{asked} is there inside a trace only: with bridge.trace(prompt) as run: ... (a cache of a whole run has "
            "activations by the names of their hook points)"
        )
    raise RuntimeError(
        f"{asked} does not say which of the {len(found)} traces that are open on this bridge is meant: "
        'ask the trace itself, run["blocks.0.hook_resid_post"]'
    )


def pass_of(point: NamedPoint) -> tuple[ForwardPass | None, Generation | None]:
    """The pass that an activation is of, and the generation that it is a step of, as far as they are known here.

    That is the pass under way; in a user's hook function, that which called it; in the body of a trace, the trace's.

    Args:
        point: where the activation is seen.

    Raises:
        RuntimeError: several traces are open that show this hook point, and their tokens are not counted alike.
    """
    here = CURRENT.get()
    run = pass_under_way() or here.caller
    if run is not None or here.generation is not None:
        return run, here.generation
    found = [seen for _, trace in _OPEN.get() if (seen := trace.pass_of(point)) is not None]
    if len(found) > 1 and any(made is not None or (run is not None and run.is_padded) for run, made in found):
        raise RuntimeError(
            f"{len(found)} traces are open that show {point.name}, and which of them an activation is of is not known, "
            "so neither is where its tokens stand: open one, or trace the rows without padding"
        )
    return found[-1] if found else (None, None)


# ----------------------------------------------------------------------------------------------------------------------
# Parts of a model that backward computes again: hooks there must be known to come along.
# ----------------------------------------------------------------------------------------------------------------------


def recomputation_frame(function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function that has its hooks with it whenever it is called again: a whole run, a block that brings them.

    Args:
        function: the function.
        args, kwargs: with what.
    """
    return function(*args, **kwargs)


def refuse_unknown_recomputation(name: str) -> None:
    """Refuses to change an activation, or to listen to its gradient, in a part of the model that is checkpointed.

    What backward computes again there would be computed without the hook, when its run is over.

    Args:
        name: of the hook point.

    Raises:
        RuntimeError: it lies within `torch.utils.checkpoint.checkpoint` that is not the model's own.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _KNOWN:
            return
        if code is _CHECKPOINT:
            raise RuntimeError(
                f"{name} lies in a part of the model that torch.utils.checkpoint computes again in backward, and "
                "nothing would bring its hook along: the gradients would be those of another function. Checkpoint with "
                "the model's own gradient_checkpointing_enable(), or switch checkpointing off in runs with hooks"
            )
        frame = frame.f_back  # type: ignore[assignment]


def refuse_older_checkpointing() -> None:
    """Refuses to listen to a gradient in a checkpointed block of a transformers that is too old for it.

    Raises:
        VersionError: it is before 5.23.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            check_checkpointed_gradients()
            return
        frame = frame.f_back  # type: ignore[assignment]


_KNOWN: CodeType = inspect.unwrap(recomputation_frame).__code__
_CHECKPOINT: CodeType = inspect.unwrap(checkpoint).__code__
