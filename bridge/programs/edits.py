"""Bodies of `trace_edit` in a program.

Outside of compiled code the body runs once in each pass, in step with the model, as in a run. Code that is compiled
or exported cannot pause: there the body runs anew at each of its points, with the activations that it was given
before, and is left where it asks for the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from adapters.views import Args, Kwargs
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.listener import Listener
from bridge.hooks.results import checked
from bridge.programs.functions import Function
from bridge.programs.program_pass import AnyFunction, ProgramPass
from bridge.trace.edit import BodyInStep, Edit, EditHook
from bridge.trace.errors import PointPassedError

#: What makes other numbers at each call.
_RANDOM = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like,
    torch.bernoulli, torch.multinomial, torch.normal, torch.nn.functional.dropout, torch.dropout,
    Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.normal_, Tensor.uniform_, Tensor.random_,
    Tensor.exponential_,
}  # fmt: skip
_ASSIGNED = Listener("fwd", lambda act, hook: None)


def listeners_of(
    interventions: Sequence[tuple[HookPoint, AnyFunction]], declared: Collection[str]
) -> Iterator[tuple[HookPoint, Listener]]:
    """Interventions as listeners of a program, with bodies of edits as bodies.

    Args:
        interventions: hook points and functions.
        declared: the names of the declared inputs.

    Raises:
        TypeError: see `Function`.
    """
    bodies: dict[Edit, Body] = {}
    for hook, fn in interventions:
        if isinstance(fn, EditHook):
            yield hook, Listener("fwd", bodies.setdefault(fn.edit, Body(fn.edit)))
        else:
            yield hook, Listener("fwd", Function(fn, hook, declared))


class Body:
    """The body of an edit in a program.

    Args:
        edit: the edit.
    """

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    def __call__(self, given: Tensor, hook: HookPoint, program_pass: ProgramPass) -> Tensor | None:
        """What becomes of an activation; None where the body leaves it, or changes it in place."""
        return (self._in_new_step if torch.compiler.is_compiling() else self._in_step)(given, hook, program_pass)

    def _in_step(self, given: Tensor, hook: HookPoint, program_pass: ProgramPass) -> Tensor | None:
        """With the body paused in between."""
        body = program_pass.bodies.get(self)
        if not isinstance(body, BodyInStep):
            body = program_pass.bodies[self] = BodyInStep(self.edit, None)
        return body.visit(hook, given)

    def _in_new_step(self, given: Tensor, hook: HookPoint, program_pass: ProgramPass) -> Tensor | None:
        """With the body run up to it once more."""
        seen = program_pass.bodies.get(self)
        if not isinstance(seen, PassActivations):
            seen = program_pass.bodies[self] = PassActivations()
        seen.values[hook.name] = given
        again = ReplayedActivations(self.edit, seen.values, hook)
        with _RefuseRandom(self.edit), contextlib.suppress(_PointNotReached):
            self.edit.body(again)
        return again.result


class PassActivations:
    """The activations that a body was given in one pass, in turn, by name."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def end(self) -> None:
        """Lets go of them."""
        self.values.clear()


class _PointNotReached(Exception):
    """The body asks for a point that has not come yet."""


class ReplayedActivations:
    """What a body is given that is run up to a point once more.

    Args:
        edit: the edit.
        values: what it was given so far, the last at `hook`.
        hook: the point that the model is at.

    Attributes:
        result: the activation at `hook` as the body leaves it; None where it does not ask for it.
    """

    def __init__(self, edit: Edit, values: dict[str, Tensor], hook: HookPoint) -> None:
        self._edit, self._hook = edit, hook
        self._given = {name: act.clone() for name, act in values.items()}
        self._at = 0
        self.result: Tensor | None = None

    def _reach(self, name: str) -> str:
        hook = self._edit.names.find(name)
        if hook not in self._edit.points:
            raise ValueError(
                f"the body asks for {hook.name}, which it did not when its points were found: "
                f"{', '.join(point.name for point in self._edit.points)}. Name them all: trace_edit(fn, points=[...])"
            )
        if hook.name not in self._given:
            raise _PointNotReached
        passed = list(self._given).index(hook.name) < self._at
        if passed:
            raise PointPassedError(f"{hook.name} has passed. Ask for points in the model's order")
        self._at = list(self._given).index(hook.name)
        return hook.name

    def _note(self, name: str) -> None:
        if name == self._hook.name:
            self.result = self._given[name]

    def __getitem__(self, name: str) -> Tensor:
        found = self._reach(name)
        self._note(found)
        return self._given[found]

    def __setitem__(self, name: str, value: Tensor) -> None:
        found = self._reach(name)
        self._given[found] = checked(value, self._given[found], _ASSIGNED, self._edit.names.find(name))
        self._note(found)


class _RefuseRandom(TorchFunctionMode):
    """Refuses random numbers in a body that is run more than once."""

    def __init__(self, edit: Edit) -> None:
        super().__init__()
        self._edit = edit

    def __torch_function__(
        self, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func in _RANDOM and len(self._edit.points) > 1:
            raise ValueError(
                f"{self._edit!r} draws random numbers ({getattr(func, '__name__', func)}), and asks for several "
                "points: in a compiled or exported program its body runs once for each of them, with other numbers "
                "each time. Give the numbers to the program as an input"
            )
        return func(*args, **({} if kwargs is None else kwargs))
