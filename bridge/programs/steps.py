"""A hook point in a program: its listeners, which no run can change."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from adapters.views import Call
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.listener import Listener
from bridge.programs.program_pass import ProgramPass

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
