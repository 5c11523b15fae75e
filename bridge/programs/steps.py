"""A hook point in a program: what is done with the tensor at its site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from adapters.views import Call
from bridge.hooks.hook_point import HookPoint
from bridge.programs.one_pass import OnePass


class Changes(Protocol):
    """Something that may put another activation in the place of one."""

    def __call__(self, act: Tensor, one_pass: OnePass) -> Tensor | None:
        """What becomes of an activation; None when nothing came of it."""


class TakesOver:
    """Takes over what was written at another point in this pass.

    Args:
        leader: the name of the other point.
        convert: from the value written there to the activation here.
    """

    def __init__(self, leader: str, convert: Callable[[Tensor], Tensor]) -> None:
        self._leader, self._convert = leader, convert

    def __call__(self, act: Tensor, one_pass: OnePass) -> Tensor | None:
        written = one_pass.written.get(self._leader)
        return None if written is None else self._convert(written)


class Step:
    """One hook point of a program.

    Args:
        hook: the hook point.
        changes: what may change the activation, in turn.
        captured: it is an output of the program.

    Attributes:
        copies: the tensor at the site is written to afterwards, in place.
    """

    def __init__(self, hook: HookPoint, changes: Sequence[Changes], captured: bool) -> None:
        self.hook, self.changes, self.captured = hook, tuple(changes), captured
        self.copies = False
        self._leads = bool(self.hook.point.followers)

    def apply(self, x: Tensor, call: Call, one_pass: OnePass) -> Tensor:
        """What the tensor at the site becomes.

        Args:
            x: the tensor.
            call: the call of the module that it belongs to.
            one_pass: the pass.
        """
        hook = self.hook
        view, name = hook.view, hook.name
        if hook.point.sources:
            call.sources = sources_seen(hook, one_pass)
        act = view.get(x, call)
        if not self.changes:
            if self.captured:
                one_pass.kept[name] = act.clone()  # so that nothing which is written into it later is seen
            return x
        if act.is_sparse:
            act = act.to_dense()
        elif self.copies or view.writes_through:
            act = act.clone()
        changed = False
        for change in self.changes:
            new = change(act, one_pass)
            if new is not None:
                act, changed = new, True
        if changed:
            x = view.put(x, act, call)
        if self._leads and changed:
            one_pass.written[name] = act
        if self.captured:
            one_pass.kept[name] = act.clone()
        return x


def sources_seen(hook: HookPoint, one_pass: OnePass) -> tuple[tuple[nn.Module, Tensor], ...]:
    """What passed the sites whose tensors a view needs.

    Raises:
        RuntimeError: the pass did not come past them.
    """
    found = []
    for site in hook.point.sources:
        seen = one_pass.sources.get(site)
        if seen is None:
            raise RuntimeError(
                f"{hook.name} is seen with the help of what passes {site.path}, which did not run before it"
            )
        found.append(seen)
    return tuple(found)
