"""What is attached to hook points: listeners, and the scopes that they are opened and end with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from torch import Tensor

#: ``fn(activation, hook=point)`` returns the new activation, or None to leave it (or what was done to it in place).
HookFunction = Callable[..., Tensor | None]
#: ``fwd`` and ``bwd`` are functions of the user; ``read`` only looks at the activation; ``edge`` is given the
#: activation that later computation uses, to ask for its gradient; ``follow`` is our own: it is shown the activation
#: itself, may put another in its place, and stays where hooks are reset; ``leader`` takes over what was written at
#: another point, which it is asked for with the pass in place of an activation.
Kind = Literal["fwd", "bwd", "read", "edge", "follow", "leader"]


class Attached(Protocol):
    """A listener at its hook point."""

    def attach(self) -> None:
        """Attaches it, if it is not attached already."""

    def remove(self) -> None:
        """Removes it."""


class Scope:
    """The hooks that were opened together, and end together.

    Attributes:
        members: what was attached, so that a recomputation after the end can attach it again.
        users: how many `with` statements and recomputations need it attached now.
        recomputed: a block that backward may compute again has run with it, and needs it then.
        of_one_run: only one run of the bridge ever sees it, no direct call of the model.
    """

    __slots__ = ("__weakref__", "members", "of_one_run", "recomputed", "users")

    def __init__(self, of_one_run: bool = False) -> None:
        self.of_one_run, self.recomputed = of_one_run, False
        self.members: list[Attached] = []
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
