"""What one pass of a program remembers, where the code at its sites finds it."""

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

#: A function of which nothing more is known.
AnyFunction = Callable[..., Any]


class ProgramPass(Pass, PassMemory):
    """A pass of a program, as hook points meet it: what `RunContext` is in a run.

    A run finds its pass in a context variable, which torch.compile cannot trace: this one is found in thread-local
    storage (see `current`).

    Args:
        inputs: the program's declared inputs.

    Attributes:
        kept: the captured activations, by canonical name.
        sources: what passed the sites that views elsewhere need: the module called there, the tensor.
        given: the activations that bodies were given, in turn, by name, where these run anew at each point.
        in_user_function: a user's function is being called: what it computes is not the model's.
    """

    __slots__ = ("given", "in_user_function", "inputs", "kept", "sources")

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.kept: dict[str, Tensor] = {}
        self.sources: dict[Site, tuple[nn.Module, Tensor]] = {}
        self.given: dict[object, dict[str, Tensor]] = {}
        self.in_user_function = False

    @property
    def run(self) -> ProgramPass:
        """What it remembers."""
        return self

    def tensor_at(self, source: SourceSite) -> tuple[nn.Module, Tensor] | None:
        """What passed a site: the module called there, and the tensor; None where nothing did."""
        return self.sources.get(source.site)

    def show(self, listener: Listener, act: Tensor, point: NamedPoint) -> None:
        """Captures an activation."""
        self.kept[point.name] = act.clone()  # so that nothing which is written into it later is seen

    def call_user_function(self, listener: Listener, given: Tensor, point: NamedPoint) -> Any:
        """What a function of the program returns for a copy of an activation.

        A program that a user's function calls, or the body of a trace, is no part of the run that is waiting there.
        """
        self.in_user_function = True
        try:
            if is_compiling() or (here := CURRENT.get()).run is not None:
                return listener.fn(given, point, self)
            with setting(CURRENT, RunContext(here.shared, inherited=here.inherited, caller=ForwardPass())):
                return listener.fn(given, point, self)
        finally:
            self.in_user_function = False

    def end(self) -> None:
        """The pass is over."""
        for body in self.bodies.values():
            body.end()
        self.given.clear()


def current(here: threading.local) -> ProgramPass:
    """The pass that is under way in this thread.

    Raises:
        RuntimeError: none is: a part of the program was called by itself.
    """
    found: ProgramPass | None = getattr(here, "program_pass", None)
    if found is None:
        raise RuntimeError("a part of a program was called by itself: call the program, or its `generate`")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The functions of a program's interventions, and the inputs that they ask for.
# ----------------------------------------------------------------------------------------------------------------------


class Function:
    """A user's function at one point.

    Args:
        fn: called as ``fn(activation, hook=point)``, and with the declared inputs that its signature names.
        hook: the hook point.
        declared: the names of the program's declared inputs.

    Attributes:
        takes: the declared inputs that it is given.

    Raises:
        TypeError: it asks for something that is not declared, or has no parameter `hook`.
    """

    def __init__(self, fn: AnyFunction, hook: HookPoint, declared: Collection[str]) -> None:
        self.fn, self.takes = fn, _taken(fn, hook, declared)
        self.__name__ = getattr(fn, "__name__", None) or repr(fn)

    def __call__(self, given: Tensor, hook: HookPoint, program_pass: ProgramPass) -> object:
        """What the function returns."""
        return self.fn(given, hook=hook, **{name: program_pass.inputs[name] for name in self.takes})


def _taken(fn: AnyFunction, hook: HookPoint, declared: Collection[str]) -> tuple[str, ...]:
    """The declared inputs that a function's signature names.

    Raises:
        TypeError: see `Function`.
    """
    if isinstance(fn, Operation):
        if fn.remembers:
            raise TypeError(
                f"{type(fn).__name__} at {hook.name} is a probe, or asks one (where=), which programs do not: use a run"
            )
        missing = [name for name in fn.inputs if name not in declared]
        if missing:
            raise TypeError(
                f"{type(fn).__name__} at {hook.name} asks for the input {missing[0]!r}: declare it in inputs={{...}} "
                f"({', '.join(declared) or 'none are declared'}).{suggestion(missing[0], declared)}"
            )
        return fn.inputs
    try:
        signature = inspect.signature(fn)
    except ValueError:  # a function of C without a signature
        return ()
    parameters = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        takes = tuple(declared)
    else:
        takes = tuple([name for name in declared if name in parameters])
    try:
        signature.bind(None, hook=None, **dict.fromkeys(takes))
    except TypeError as error:
        name = getattr(fn, "__name__", None) or repr(fn)
        left = [x for x in list(parameters)[1:] if x not in ("hook", *takes) and _is_needed(parameters[x])]
        what = f"declare {', '.join(left)} in inputs={{...}}" if left else "give it a second parameter named `hook`"
        near = suggestion(left[0], declared) if left else ""
        raise TypeError(
            f"the function {name} at {hook.name} takes {signature}, but a program calls it as fn(activation, "
            "hook=point) and gives it the declared inputs that it names "
            f"({', '.join(declared) or 'none are declared'}): "
            f"{what}.{near}"
        ) from error
    return takes


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL


# ----------------------------------------------------------------------------------------------------------------------
# A hook point in a program: its listeners, which no run can change.
# ----------------------------------------------------------------------------------------------------------------------


_CAPTURES = Listener("read", lambda act, hook: None)


class LoweredPoint:
    """One hook point of a program.

    Args:
        hook: the hook point.
        changes: what may change the activation, in turn.
        captured: it is an output of the program.

    Attributes:
        copies: the tensor at the site is written to afterwards, in place.
    """

    def __init__(self, hook: HookPoint, changes: Sequence[Listener], captured: bool) -> None:
        self.hook, self.changes, self.captured = hook, tuple(changes), captured
        self.copies = False
        self._listeners = (*changes, _CAPTURES) if captured else self.changes

    def apply(self, x: Tensor, call: Call, program_pass: ProgramPass) -> Tensor:
        """What the tensor at the site becomes.

        Args:
            x: the tensor.
            call: the call of the module that it belongs to.
            program_pass: the pass.
        """
        hook = self.hook
        if hook.sources:
            call.sources = hook.sources_in(program_pass)
        return hook.edited(x, call, program_pass, self._listeners, self.copies, hook.view)


# ----------------------------------------------------------------------------------------------------------------------
# What is at a module's input or output in a program: a torch hook on a shell, put there once.
# ----------------------------------------------------------------------------------------------------------------------


class LoweredSite(SiteHandler):
    """One site.

    Args:
        site: the site.
        module: the shell that it is on.
        steps: the hook points that stand here, in the order of their declaration.
        is_source: views elsewhere need what passes here.
        here: finds the pass that is under way.
    """

    def __init__(
        self, site: Site, module: nn.Module, steps: Sequence[LoweredPoint], is_source: bool, here: threading.local
    ) -> None:
        self.site, self.steps, self.is_source, self._here = site, tuple(steps), is_source, here
        writers = [step.changes and step.hook.view.writes_through for step in self.steps]
        for index, step in enumerate(self.steps):
            step.copies = any(writers[index + 1 :])
        if site.kind == "input":
            module.register_forward_pre_hook(self.on_input, with_kwargs=True)
        else:
            module.register_forward_hook(self.on_output, with_kwargs=True)

    def see(self, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs) -> Tensor:
        """Runs the steps in turn, and keeps the tensor for those who need it elsewhere."""
        program_pass = current(self._here)
        call = Call(module, args, kwargs)
        for step in self.steps:
            x = step.apply(x, call, program_pass)
        if self.is_source:
            program_pass.sources[self.site] = (module, x)
        return x
