"""The state of one pass of a program, available to the code at its sites."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from adapters.imports import is_compiling
from adapters.points import Site
from adapters.views import Args, Call, Kwargs
from bridge.hooks.context import (
    CURRENT,
    ForwardPass,
    Listener,
    NamedPoint,
    Pass,
    PassMemory,
    RunContext,
    SourceSite,
    setting,
)
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import suggestion
from bridge.interventions.operations import Operation
from bridge.wiring.site import SiteHandler

#: A function of unknown type.
AnyFunction = Callable[..., Any]


class ProgramPass(Pass, PassMemory):
    """A pass of a program, as its hook points see it; the counterpart of `RunContext`.

    A run stores its pass in a context variable, which torch.compile cannot trace; a program's pass
    is in thread-local storage (see `current`).

    Args:
        inputs: the program's declared inputs.

    Attributes:
        kept: the captured activations, by canonical name.
        sources: the tensors at sites that other views need, each with the module called there.
        received: the activations that rerun bodies received, in order, by name.
        in_user_function: a user's function is running; its computation is not the model's.
    """

    __slots__ = ("in_user_function", "inputs", "kept", "received", "sources")

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.kept: dict[str, Tensor] = {}
        self.sources: dict[Site, tuple[nn.Module, Tensor]] = {}
        self.received: dict[object, dict[str, Tensor]] = {}
        self.in_user_function = False

    @property
    def run(self) -> ProgramPass:
        """Return the pass itself."""
        return self

    def tensor_at(self, source: SourceSite) -> tuple[nn.Module, Tensor] | None:
        """Return the module called at a site and its tensor; None if the site was not reached."""
        return self.sources.get(source.site)

    def show(self, listener: Listener, act: Tensor, point: NamedPoint) -> None:
        """Capture an activation."""
        self.kept[point.name] = act.clone()  # copy, so that later in-place writes do not show

    def call_user_function(self, listener: Listener, act: Tensor, point: NamedPoint) -> Any:
        """Call a user's function with a copy of an activation.

        A program called by that function, or the body of a trace, does not belong to the waiting
        run.
        """
        self.in_user_function = True
        try:
            if is_compiling() or (here := CURRENT.get()).run is not None:
                return listener.fn(act, point, self)
            outside = RunContext(here.shared, inherited=here.inherited, caller=ForwardPass())
            with setting(CURRENT, outside):
                return listener.fn(act, point, self)
        finally:
            self.in_user_function = False

    def end(self) -> None:
        """End the pass."""
        for body in self.bodies.values():
            body.end()
        self.received.clear()


def current(here: threading.local) -> ProgramPass:
    """Return the pass that is running in this thread.

    Raises:
        RuntimeError: there is none, because a part of the program was called on its own.
    """
    program_pass: ProgramPass | None = getattr(here, "program_pass", None)
    if program_pass is None:
        raise RuntimeError(
            "a part of a program was called by itself: call the program, or its `generate`"
        )
    return program_pass


# --------------------------------------------------------------------------------------------------
# The functions of a program's interventions, and the declared inputs that they take.
# --------------------------------------------------------------------------------------------------


class Function:
    """A user's function at one hook point.

    Args:
        fn: called as ``fn(activation, hook=point)``, and with the declared inputs that its
            signature names.
        hook: the hook point.
        declared: the names of the program's declared inputs.

    Attributes:
        takes: the declared inputs that it receives.

    Raises:
        TypeError: it takes an input that is not declared, or has no parameter `hook`.
    """

    def __init__(self, fn: AnyFunction, hook: HookPoint, declared: Collection[str]) -> None:
        self.fn = fn
        self.takes = _taken(fn, hook, declared)
        self.__name__ = _name_of(fn)

    def __call__(self, act: Tensor, hook: HookPoint, program_pass: ProgramPass) -> object:
        """Call the function and return its result."""
        inputs = {name: program_pass.inputs[name] for name in self.takes}
        return self.fn(act, hook=hook, **inputs)


def _name_of(fn: AnyFunction) -> str:
    return getattr(fn, "__name__", None) or repr(fn)


def _taken(fn: AnyFunction, hook: HookPoint, declared: Collection[str]) -> tuple[str, ...]:
    """Return the declared inputs that a function's signature names.

    Raises:
        TypeError: see `Function`.
    """
    if isinstance(fn, Operation):
        return _taken_by_operation(fn, hook, declared)
    try:
        signature = inspect.signature(fn)
    except ValueError:  # a C function without a signature
        return ()
    parameters = signature.parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes = tuple([name for name in declared if takes_all or name in parameters])
    try:
        signature.bind(None, hook=None, **dict.fromkeys(takes))
    except TypeError as error:
        undeclared = [
            name
            for name, parameter in list(parameters.items())[1:]
            if name not in ("hook", *takes) and _is_needed(parameter)
        ]
        remedy = "give it a second parameter named `hook`"
        near = ""
        if undeclared:
            remedy = f"declare {', '.join(undeclared)} in inputs={{...}}"
            near = suggestion(undeclared[0], declared)
        raise TypeError(
            f"the function {_name_of(fn)} at {hook.name} takes {signature}, but a program calls it"
            " as fn(activation, hook=point) and gives it the declared inputs that it names"
            f" ({', '.join(declared) or 'none are declared'}): {remedy}.{near}"
        ) from error
    return takes


def _taken_by_operation(
    operation: Operation, hook: HookPoint, declared: Collection[str]
) -> tuple[str, ...]:
    """Return the declared inputs that an operation takes."""
    if operation.remembers:
        raise TypeError(
            f"{type(operation).__name__} at {hook.name} is a probe, or asks one (where=), which"
            " programs do not: use a run"
        )
    missing = [name for name in operation.inputs if name not in declared]
    if missing:
        raise TypeError(
            f"{type(operation).__name__} at {hook.name} asks for the input {missing[0]!r}: declare"
            f" it in inputs={{...}} ({', '.join(declared) or 'none are declared'})."
            f"{suggestion(missing[0], declared)}"
        )
    return operation.inputs


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL


# --------------------------------------------------------------------------------------------------
# A hook point in a program: its listeners are fixed.
# --------------------------------------------------------------------------------------------------


_CAPTURES = Listener("read", lambda act, hook: None)


class LoweredPoint:
    """A hook point of a program.

    Args:
        hook: the hook point.
        changes: the functions that may change the activation, in order.
        captured: whether it is an output of the program.

    Attributes:
        copies: whether the tensor at the site is later written in place.
    """

    def __init__(self, hook: HookPoint, changes: Sequence[Listener], captured: bool) -> None:
        self.hook = hook
        self.changes = tuple(changes)
        self.captured = captured
        self.copies = False
        self._listeners = (*changes, _CAPTURES) if captured else self.changes

    def apply(self, x: Tensor, call: Call, program_pass: ProgramPass) -> Tensor:
        """Run the hook point on the tensor at the site and return the result.

        Args:
            x: the tensor.
            call: the module call that the tensor belongs to.
            program_pass: the pass.
        """
        hook = self.hook
        if hook.sources:
            call.sources = hook.sources_in(program_pass)
        return hook.edited(x, call, program_pass, self._listeners, self.copies, hook.view)


# --------------------------------------------------------------------------------------------------
# A module's input or output in a program: a torch hook on a shell, installed once.
# --------------------------------------------------------------------------------------------------


class LoweredSite(SiteHandler):
    """A site of a program.

    Args:
        site: the site.
        module: the shell that it is on.
        steps: the hook points at the site, in the order of their declaration.
        is_source: whether views of other sites need its tensor.
        here: returns the pass that is running.
    """

    def __init__(
        self,
        site: Site,
        module: nn.Module,
        steps: Sequence[LoweredPoint],
        is_source: bool,
        here: threading.local,
    ) -> None:
        self.site = site
        self.steps = tuple(steps)
        self.is_source = is_source
        self._here = here
        writers = [step.changes and step.hook.view.writes_through for step in self.steps]
        for index, step in enumerate(self.steps):
            step.copies = any(writers[index + 1 :])
        if site.kind == "input":
            module.register_forward_pre_hook(self.on_input, with_kwargs=True)
        else:
            module.register_forward_hook(self.on_output, with_kwargs=True)

    def see(self, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs) -> Tensor:
        """Run the hook points in order, and keep the tensor for views of other sites."""
        program_pass = current(self._here)
        call = Call(module, args, kwargs)
        for step in self.steps:
            x = step.apply(x, call, program_pass)
        if self.is_source:
            program_pass.sources[self.site] = (module, x)
        return x
