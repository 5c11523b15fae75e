"""Places inside a forward in a program: the watches of `bridge.taps` see what a shell's own forward computes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from adapters.views import Call
from bridge.hooks.hook_point import HookPoint
from bridge.programs.program_pass import ProgramPass, current
from bridge.programs.steps import LoweredPoint
from bridge.taps.attention import AttentionWatch, show_scores_and_pattern
from bridge.taps.attention_call import AttentionCall
from bridge.taps.kernels import implementation_of, is_looked_up
from bridge.taps.router import RouterWatch


class LoweredTap:
    """Stands for the forward of a shell.

    Args:
        module: the shell.
        steps: the hook points inside its forward, by channel.
        here: finds the pass that is under way.
    """

    def __init__(self, module: nn.Module, steps: Mapping[str, Sequence[LoweredPoint]], here: threading.local) -> None:
        self.module, self.here = module, here
        self.steps = {channel: tuple(points) for channel, points in steps.items()}
        self.original = module.forward

    def install(self) -> None:
        """Puts it in the place of the shell's forward."""
        self.module.__dict__["forward"] = self.__call__

    def show(self, channel: str, x: Tensor, call: Call, program_pass: ProgramPass) -> Tensor:
        """What the points of a channel make of a tensor."""
        for step in self.steps.get(channel, ()):
            x = step.apply(x, call, program_pass)
        return x

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's forward."""
        raise NotImplementedError


class _CallInProgram:
    """One call of a tapped shell."""

    def __init__(self, tap: LoweredTap, call: Call) -> None:
        self.tap, self.call, self.module = tap, call, tap.module
        self.program_pass = current(tap.here)

    @property
    def parts(self) -> int:
        """Over how many processes the heads are spread."""
        return 1

    @property
    def in_user_function(self) -> bool:
        """Whether a function of the program is being called: what it computes is not the model's."""
        return self.program_pass.in_user_function

    def points(self, channel: str) -> Sequence[HookPoint]:
        """The hook points of a channel."""
        return [step.hook for step in self.tap.steps.get(channel, ())]

    def active_points(self, channels: Sequence[str]) -> Sequence[HookPoint]:
        """The hook points on these channels: the program listens to all of its own."""
        return [step.hook for channel in channels for step in self.tap.steps.get(channel, ())]

    def show(self, channel: str, x: Tensor, private: bool = False) -> Tensor:
        """Shows a tensor to the hook points of a channel, and returns what they make of it."""
        return self.tap.show(channel, x, self.call, self.program_pass)

    def is_read_only(self, attention: AttentionCall) -> bool:
        """Whether nothing changes scores or pattern; then they have been captured."""
        if any(step.changes for channel in ("scores", "pattern") for step in self.tap.steps.get(channel, ())):
            return False
        show_scores_and_pattern(self, attention)
        return True


class LoweredAttention(LoweredTap):
    """The attention of one module. Its channels are those of `AttentionWatch`."""

    def __init__(self, module: nn.Module, steps: Mapping[str, Sequence[LoweredPoint]], here: threading.local) -> None:
        super().__init__(module, steps, here)
        self._kernel_alone = implementation_of(module) == "sdpa" and is_looked_up(type(module).forward, "sdpa")

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's forward."""
        watch = AttentionWatch(_CallInProgram(self, Call(self.module, args, kwargs)), self._kernel_alone)
        self.here.attention = watch
        try:
            with watch:
                output = self.original(*args, **kwargs)
        finally:
            self.here.attention = None
        watch.check()
        return output


class LoweredRouter(LoweredTap):
    """A router. Its channels are those of `RouterWatch`."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's forward."""
        watch = RouterWatch(_CallInProgram(self, Call(self.module, args, kwargs)))
        return watch.output_of(lambda: self.original(*args, **kwargs))
