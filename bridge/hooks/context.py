"""Hook scope: the context that code runs in, and the memory of one forward pass.

A hook that is *added* belongs to its hook point, and every run sees it. A hook that is *scoped*
(`run_with_hooks`, ``with bridge.hooks(...)``, a cache, a trace) belongs to a `Scope`. The open
scopes are the value of a context variable, so other threads, asyncio tasks and greenlets do not see
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from adapters.inputs import past_of
from adapters.points import Point, Site, token_embedding
from bridge.rows import BatchRows

# --------------------------------------------------------------------------------------------------
# Listeners attached to hook points, and the scopes that open and close them.
# --------------------------------------------------------------------------------------------------


#: ``fn(activation, hook=point)`` returns the new activation, or None to keep it (with any in-place
#: change).
HookFunction = Callable[..., Tensor | None]
#: ``fwd`` and ``bwd`` are user functions; ``read`` only looks at the activation; ``edge`` is given
#: the activation that later computation uses, to ask for its gradient; ``follow`` is internal: it
#: is given the activation itself, may replace it, and survives `reset_hooks`; ``leader`` takes over
#: what was written at another point, and is called with the pass instead of an activation; ``rule``
#: is a `GradientRule`, which changes gradients and no value.
Kind = Literal["fwd", "bwd", "read", "edge", "follow", "leader", "rule"]


class Scope:
    """A set of hooks that are opened and closed together.

    Attributes:
        members: the listeners with their hook points, so that a later recomputation can attach the
            scope again.
        users: the number of `with` statements and recomputations that currently need it attached.
        recomputed: whether a block that backward may recompute has run with it, and needs it then.
        of_one_run: whether only one run of the bridge sees it, and no direct call of the model.
        opened_in: the numbers of the regions in which it was opened (see `recomputation`).
        rows: the layout of the rows of the run whose own scope it was, once that run is over.
    """

    __slots__ = ("__weakref__", "members", "of_one_run", "opened_in", "recomputed", "rows", "users")

    def __init__(self, of_one_run: bool = False) -> None:
        self.of_one_run = of_one_run
        self.recomputed = False
        self.opened_in: frozenset[int] = frozenset()
        self.members: list[tuple[NamedPoint, Listener]] = []
        self.rows: BatchRows | None = None
        self.users = 0


class Listener:
    """A function attached to a hook point.

    Args:
        kind: see `Kind`.
        fn: called as ``fn(activation, hook=point)``.
        scope: the scope that it belongs to; None: every run sees it.
        permanent, level: criteria of `reset_hooks`.
        named: whether its hook point was selected by name, not by a filter.
        deferrable: for a ``read``: whether it accepts a `Deferred` in place of an activation that
            would have to be computed.
        partial: for a ``read``: whether it accepts a `Deferred`, and immediately computes only the
            rows that it keeps.
        optional: for a ``read``: if nothing is shown, warn instead of raising.

    Attributes:
        in_run: whether the function is part of the run, so that hooks and caches see its own calls
            of the model. The function declares this by an attribute of this name.
        called: whether the function was called.
    """

    __slots__ = (
        "called",
        "deferrable",
        "fn",
        "in_run",
        "kind",
        "level",
        "named",
        "optional",
        "partial",
        "permanent",
        "scope",
    )

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
        self.kind = kind
        self.fn = fn
        self.scope = scope
        self.permanent = permanent
        self.level = level
        self.deferrable = deferrable
        self.named = named
        self.optional = optional
        self.partial = partial
        self.in_run = getattr(fn, "in_run", False) is True
        self.called = False


class NamedPoint:
    """The name and axes of a hook point, as functions called there see them.

    Attributes:
        name: its canonical name.
        point: its declaration.
    """

    __slots__ = ("name", "point")

    name: str
    point: Point


class SourceSite:
    """A site whose tensor is needed by hook points elsewhere.

    Attributes:
        site: its location.
    """

    __slots__ = ()

    site: Site

    @property
    def module(self) -> nn.Module | None:
        """Return the module at the site; None if it was replaced."""
        raise NotImplementedError


class RunsWithPass:
    """An object that runs in step with a forward pass."""

    def end(self) -> None:
        """End the pass."""
        raise NotImplementedError


class Generation:
    """A generation: the number of finished steps, and the prompt.

    Attributes:
        step: 0 for the prompt, 1 for the first generated token, and so on.
        prompt: the number of tokens in the prompt, including padding; None if unknown.
        rows: the layout of the prompt's rows; None for a single row without padding.
        of_decoder: whether the growing sequence is the decoder's.
        in_order: whether each step processes the newly added tokens, or the whole sequence.
        processed: the number of tokens processed after the current pass, if it does not follow from
            `step`.
        readings: the readings of probes in its passes, by name.
        endings: the tokens that end a row.
        ended: which rows one of them has ended, ``[row]``; what follows there is padding. None: it
            is at the prompt, or no token ends a row.
    """

    __slots__ = (
        "ended",
        "endings",
        "in_order",
        "of_decoder",
        "processed",
        "prompt",
        "readings",
        "rows",
        "step",
    )

    def __init__(
        self,
        prompt: int | None = None,
        rows: BatchRows | None = None,
        of_decoder: bool = False,
        in_order: bool = True,
    ) -> None:
        self.step = 0
        self.prompt = prompt
        self.rows = rows
        self.of_decoder = of_decoder
        self.in_order = in_order
        self.processed: int | None = None
        self.readings: dict[str, Any] = {}
        self.endings: list[int] = []
        self.ended: Tensor | None = None

    def note_endings(self, newest: Tensor) -> None:
        """Note which rows have ended.

        Args:
            newest: the token that each row has gained, ``[row]``.
        """
        if self.endings:
            now = torch.isin(newest, torch.tensor(self.endings, device=newest.device))
            self.ended = now if self.ended is None else self.ended | now

    @property
    def tokens(self) -> int:
        """Return the number of tokens processed after the current pass, including padding."""
        return (self.prompt or 0) + self.step if self.processed is None else self.processed


class PassMemory:
    """The memory of a forward pass, in a run or in a program.

    Attributes:
        written: the values written at points that have linked points, by name (see `Point.linked`).
        bodies: the trace bodies that run in step with it, by the objects that created them (see
            `RunsWithPass`).
    """

    __slots__ = ("bodies", "written")

    def __init__(self) -> None:
        self.written: dict[str, Tensor] = {}
        self.bodies: dict[object, RunsWithPass] = {}

    def tensor_at(self, source: SourceSite) -> tuple[nn.Module, Tensor] | None:
        """Return the tensor at a site in this pass, and the module called there; None if the site
        has not run.
        """
        raise NotImplementedError


class Pass:
    """A forward pass as hook points see it: a run's, or a program's."""

    __slots__ = ()

    @property
    def run(self) -> PassMemory | None:
        """Return the memory of the pass; None outside of one."""
        raise NotImplementedError

    def show(self, listener: Listener, act: Tensor, point: NamedPoint) -> None:
        """Show an activation to a read-only listener."""
        listener.fn(act, hook=point)

    def call_user_function(self, listener: Listener, argument: Tensor, point: NamedPoint) -> Any:
        """Call a user's function on a copy of an activation."""
        raise NotImplementedError


class ForwardPass(PassMemory):
    """The memory of a run's forward pass. It is cleared when the pass ends.

    Attributes:
        opened_by: the module whose call began it; None if a run of the bridge did.
        outside: the generation in one of whose hooks that call was made, if any.
        frame: the frame of that call.
        sources: the tensors at sites that other hook points need, with the modules called there.
        separate: the copies for separate readers of a norm, by reader, each with the tensor with
            which the model continued (see `Point.separate_consumers`).
        start_at: the first block that runs; points before it stay silent.
        skipped: the blocks that are skipped.
        embeddings: the module of the token embeddings, and the replacement of its output; None: no
            replacement.
        entering: for a block, a residual stream that replaces its input; for a module that a trace
            skips, its return value.
        fronts: for a module's input, the tensor before the forward pre-hooks of others, with its
            version and the activations there; for a hook point, the tensor after these hooks and
            the activation before them, whose gradient is requested.
        gradients: whether gradients were enabled when it began, or may have been enabled outside a
            checkpointed call of the model.
        calls: the number of calls so far of modules that run several times and whose calls have
            separate hook points.
        past: the number of tokens of an earlier pass whose keys and values it continues.
        rows: the layout of the rows of its batch; None if it was not needed.
        readings: the readings of probes in this pass, by name.
    """

    __slots__ = (
        "calls",
        "embeddings",
        "entering",
        "frame",
        "fronts",
        "gradients",
        "opened_by",
        "outside",
        "past",
        "readings",
        "rows",
        "separate",
        "skipped",
        "sources",
        "start_at",
    )

    def __init__(
        self, opened_by: nn.Module | None = None, outside: Generation | None = None
    ) -> None:
        super().__init__()
        self.opened_by = opened_by
        self.outside = outside
        self.frame: FrameType | None = None
        self.gradients = opened_by is not None or torch.is_grad_enabled()
        self.start_at: int | None = None
        self.skipped: frozenset[nn.Module] = frozenset()
        self.sources: dict[SourceSite, tuple[nn.Module, Tensor]] = {}
        self.separate: dict[str, tuple[Tensor, Tensor]] = {}
        self.entering: dict[nn.Module, object] = {}
        self.fronts: dict[object, Any] = {}
        self.embeddings: tuple[nn.Module, Tensor] | None = None
        self.calls: dict[nn.Module, int] = {}
        self.past = 0
        self.rows: BatchRows | None = None
        self.readings: dict[str, Any] = {}

    def end(self) -> None:
        """Release every tensor."""
        while self.bodies:
            self.bodies.popitem()[1].end()
        for kept in (self.sources, self.written, self.separate, self.entering, self.readings):
            kept.clear()
        self.fronts.clear()
        self.calls.clear()
        self.skipped = frozenset()
        self.embeddings = self.rows = self.frame = None

    @property
    def is_padded(self) -> bool:
        """Tell whether a row of the batch is padded."""
        return self.rows is not None and not all(
            bool(mask.all()) for mask in self.rows.masks.values()
        )

    @property
    def is_left(self) -> bool:
        """Tell whether the pass was abandoned: its call is over, but nothing ended it."""
        if self.frame is None:
            return False
        try:
            self.frame.clear()  # only the frame of a call that has ended has this property
        except RuntimeError:
            return False
        return True

    def is_call(self, module: nn.Module, number: int) -> bool:
        """Tell whether the current or most recent call of a module has the given number."""
        return self.calls.get(module, 0) == number + 1

    def take_arguments(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        """Record a pass's arguments: the input embeddings, the padding mask, and the past.

        Args:
            model: the model.
            kwargs: the arguments of its call.
        """
        past = past_of(kwargs)
        self.past = 0 if past is None else int(past.get_seq_length() or 0)
        self.rows = BatchRows(model, kwargs)
        embeddings = kwargs.get("inputs_embeds")
        if isinstance(embeddings, Tensor):
            module = token_embedding(model)
            if module is not None:
                self.embeddings = module, embeddings

    def tensor_at(self, source: SourceSite) -> tuple[nn.Module, Tensor] | None:
        """Return the tensor at a site in this pass, and the module called there; None if the site
        has not run.

        If input embeddings were passed, they count as the output of the model's own embeddings.
        """
        passed = self.sources.get(source)
        if passed is None and self.embeddings is not None and source.site.kind == "output":
            return self.embeddings if source.module is self.embeddings[0] else None
        return passed


#: The default scope: the added hooks.
_ADDED_HOOKS: frozenset[Scope | None] = frozenset({None})
_NO_SCOPES: frozenset[Scope | None] = frozenset()


class RunContext(Pass):
    """The context of a run, as seen by code that runs in it.

    Args:
        shared: the open scopes, whose hooks every run that starts here sees. The entry None
            represents added hooks, which belong to no scope.
        own: scopes that only the current run sees, such as its cache; outside a run, the next run.
        run: the memory of the current forward pass; None outside of one.
        generation: the generation that the run is part of.
        inherited: in a user's hook function, the scopes of `shared` that were open for the calling
            run.
        caller: in a user's hook function, the memory of the calling run, which is needed if the
            function passes its activation to an operation.

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
        self.shared = shared
        self.own = own
        self.run = run
        self.generation = generation
        self.inherited = inherited
        self.caller = caller
        self.visible = shared | own if own else shared
        self._outside: RunContext | None = None

    def with_shared(self, shared: frozenset[Scope | None]) -> RunContext:
        """Return a copy of the context with other scopes open."""
        return RunContext(shared, self.own, self.run, self.generation, self.inherited, self.caller)

    def call_user_function(self, listener: Listener, argument: Tensor, point: NamedPoint) -> Any:
        """Call a user's function outside of the run: its computation does not belong to the
        model.
        """
        if not listener.in_run:
            CURRENT.set(self.outside_the_run())
        try:
            return listener.fn(argument, hook=point)
        except TypeError as error:
            if _takes_hook(listener.fn):
                raise
            name = getattr(listener.fn, "__name__", None) or repr(listener.fn)
            raise TypeError(
                f"the hook {name} at {point.name} takes {inspect.signature(listener.fn)}, but it is"
                " called as fn(activation, hook=point): give it a second parameter named `hook`"
            ) from error
        finally:
            CURRENT.set(self)

    def outside_the_run(self) -> RunContext:
        """Return the context of a user's hook function: the open scopes, without the calling
        run.
        """
        if self.run is None and not self.own:
            return self
        if self._outside is None:
            self._outside = RunContext(
                self.shared, _NO_SCOPES, None, self.generation, self.shared, self.run
            )
        return self._outside

    def after_the_run(self) -> RunContext:
        """Return the context of a gradient function, which may be called after the run has
        ended.
        """
        if self.run is None:
            return self.outside_the_run()
        kept = ForwardPass()
        kept.past, kept.rows = self.run.past, self.run.rows
        return RunContext(self.shared, _NO_SCOPES, None, self.generation, self.shared, kept)


def _takes_hook(fn: Callable[..., Any]) -> bool:
    """Tell whether a function accepts an activation and ``hook=``; True if unknown."""
    try:
        inspect.signature(fn).bind(None, hook=None)
    except TypeError:
        return False
    except ValueError:  # a C function without a signature
        return True
    return True


#: The context that the present code runs in.
CURRENT: ContextVar[RunContext] = ContextVar("transformer_bridge_run", default=RunContext())  # noqa: B039


def pass_under_way() -> ForwardPass | None:
    """Return the current pass in this context; None outside of one, or if it was abandoned."""
    run = CURRENT.get().run
    return None if run is None or run.is_left else run


T = TypeVar("T")


class setting(Generic[T]):
    """A context manager that sets a context variable. (A generator would take three times as long,
    in every run.)

    Args:
        variable: the variable, such as `CURRENT`.
        value: its value inside the ``with`` statement.
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
    """Disable all hooks in a ``with`` statement."""
    return setting(CURRENT, RunContext(frozenset()))


@contextmanager
def open_scope(scope: Scope) -> Iterator[Scope]:
    """Make the hooks of a scope visible to every run inside a ``with`` statement."""
    before = CURRENT.get()
    CURRENT.set(before.with_shared(before.shared | {scope}))
    try:
        yield scope
    finally:
        # Do not restore the previous value: several may be open, and close in any order.
        now = CURRENT.get()
        if scope in now.shared:
            CURRENT.set(now.with_shared(now.shared - {scope}))


def of_the_next_run(scope: Scope) -> setting[RunContext]:
    """Make a scope visible to the run that starts inside a ``with`` statement, but not to runs
    started by its hooks.
    """
    before = CURRENT.get()
    own: frozenset[Scope | None] = frozenset((scope,))
    return setting(
        CURRENT, RunContext(before.shared, own, None, before.generation, before.inherited)
    )


class forward_pass(setting[RunContext]):
    """A context manager for a separate run: it sees the open hooks, but not the run of the calling
    hook.

    Args:
        generation: the generation that the run belongs to; None: a separate run, even if a hook in
            a generation starts it.
        scope: a scope that only this run sees; by default, the one prepared by `of_the_next_run`.

    Attributes:
        run: its memory, which is cleared at the end.
    """

    __slots__ = ("run",)

    def __init__(self, generation: Generation | None = None, scope: Scope | None = None) -> None:
        before = CURRENT.get()
        run = self.run = ForwardPass()
        own = _NO_SCOPES
        if scope is not None:
            own = frozenset((scope,))
        elif before.run is None:
            own = before.own
        self._variable, self._value = CURRENT, RunContext(before.shared, own, run, generation)

    def __exit__(self, *error: object) -> None:
        for scope in self._value.own:
            if scope is not None:
                scope.rows = self.run.rows
        self.run.end()
        CURRENT.set(self._before)


# --------------------------------------------------------------------------------------------------
# The open traces of the present context, for the parts of a bridge that show a trace's activations.
# --------------------------------------------------------------------------------------------------


class OpenTrace:
    """A trace, as the parts of the bridge use it."""

    def seen_of_part(self, part: str, what: str) -> Any:
        """Return the input or output of a part of the bridge.

        Args:
            part: the part, such as ``blocks.3``.
            what: ``output`` or ``input``, the tensor; ``outputs`` or ``inputs``, everything that
                its module returns, or is called with.
        """
        raise NotImplementedError

    def set_for_part(self, part: str, what: str, value: Any) -> None:
        """Replace the input or output of a part of the bridge."""
        raise NotImplementedError

    def pass_of(self, point: NamedPoint) -> tuple[ForwardPass | None, Generation | None] | None:
        """Return the pass and generation that the trace shows; None if the hook point is another
        bridge's.
        """
        raise NotImplementedError


#: The open traces, each with the names object of its bridge, which identifies the bridge.
_OPEN: ContextVar[tuple[tuple[object, OpenTrace], ...]] = ContextVar(
    "transformer_bridge_traces", default=()
)


def opened(names: object, trace: OpenTrace) -> None:
    """Register an open trace.

    Args:
        names: the names of its bridge.
        trace: the trace.
    """
    _OPEN.set((*_OPEN.get(), (names, trace)))


def closed(trace: OpenTrace) -> None:
    """Unregister a trace that was closed.

    Args:
        trace: the trace.
    """
    # Do not restore the previous value: several may be open, and close in any order.
    _OPEN.set(tuple([entry for entry in _OPEN.get() if entry[1] is not trace]))


def trace_of(names: object, request: str) -> OpenTrace:
    """Return the open trace of a bridge.

    Args:
        names: the names of the bridge.
        request: the requested value, for the error.

    Raises:
        RuntimeError: none is open, or several are.
    """
    traces = [trace for owner, trace in _OPEN.get() if owner is names]
    if len(traces) == 1:
        return traces[0]
    if not traces:
        raise RuntimeError(
            f"{request} is there inside a trace only: with bridge.trace(prompt) as run: ... (a"
            " cache of a whole run has activations by the names of their hook points)"
        )
    raise RuntimeError(
        f"{request} does not say which of the {len(traces)} traces that are open on this bridge is"
        ' meant: ask the trace itself, run["blocks.0.hook_resid_post"]'
    )


def pass_of(point: NamedPoint) -> tuple[ForwardPass | None, Generation | None]:
    """Return the pass of an activation, and its generation, if known here.

    This is the current pass; in a user's hook function, the calling pass; in the body of a trace,
    the trace's pass.

    Args:
        point: the hook point of the activation.

    Raises:
        RuntimeError: several open traces show this hook point, and they count tokens differently.
    """
    here = CURRENT.get()
    run = pass_under_way() or here.caller
    if run is not None or here.generation is not None:
        return run, here.generation
    passes = [shown for _, trace in _OPEN.get() if (shown := trace.pass_of(point)) is not None]
    is_ambiguous = len(passes) > 1 and any(
        generation is not None or (run is not None and run.is_padded) for run, generation in passes
    )
    if is_ambiguous:
        raise RuntimeError(
            f"{len(passes)} traces are open that show {point.name}, and which of them an activation"
            " is of is not known, so neither is where its tokens stand: open one, or trace the"
            " rows without padding"
        )
    return passes[-1] if passes else (None, None)
