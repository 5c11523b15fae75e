"""The functions of a program's interventions, and the inputs that they ask for."""

from __future__ import annotations

import inspect
from collections.abc import Collection

from torch import Tensor

from bridge.hooks.hook_point import HookPoint
from bridge.hooks.names import suggestion
from bridge.interventions.operation import Operation
from bridge.programs.program_pass import AnyFunction, ProgramPass


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
