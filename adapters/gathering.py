"""A tensor of which each process holds a part: put together, and cut again. Each undoes the other for gradients too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from adapters.agreeing import Peers


@dataclass(frozen=True)
class Cut:
    """A tensor of which each process holds a part: equal parts, in the order of the processes.

    Attributes:
        axis: along which it is cut.
        group: the processes.
        peers: they, where hooks are shown it.
    """

    axis: int
    group: dist.ProcessGroup
    peers: Peers | None = None

    @property
    def parts(self) -> int:
        """How many there are."""
        return self.group.size()

    def whole(self, part: Tensor) -> Tensor:
        """All parts, one after the other. All processes have to ask for it."""
        return cast(Tensor, _Split.apply(part, self.joined, self.own))

    def part(self, whole: Tensor) -> Tensor:
        """This process's part."""
        return cast(Tensor, _Split.apply(whole, self.own, self.joined))

    def joined(self, part: Tensor) -> Tensor:
        """As `whole`, without a gradient."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.parts)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, self.axis)

    def own(self, whole: Tensor) -> Tensor:
        """As `part`, without a gradient."""
        size = whole.shape[self.axis] // self.parts
        return whole.narrow(self.axis, self.group.rank() * size, size).contiguous()


@dataclass(frozen=True)
class Alike(Cut):
    """A tensor that all processes have, whole."""

    @property
    def parts(self) -> int:
        """One: all of it."""
        return 1

    def whole(self, part: Tensor) -> Tensor:
        """The tensor."""
        return part

    def part(self, whole: Tensor) -> Tensor:
        """The tensor."""
        return whole

    def joined(self, part: Tensor) -> Tensor:
        """The tensor."""
        return part


@dataclass(frozen=True)
class Summed(Cut):
    """A tensor that is the sum of what the processes have. What is written is held by the first; others have 0."""

    def joined(self, part: Tensor) -> Tensor:
        """The sum."""
        total = part.contiguous().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def own(self, whole: Tensor) -> Tensor:
        """What this process has of the sum."""
        return whole.clone() if self.group.rank() == 0 else torch.zeros_like(whole)

    def whole(self, part: Tensor) -> Tensor:
        return cast(Tensor, _Split.apply(part, self.joined, _same))

    def part(self, whole: Tensor) -> Tensor:
        return cast(Tensor, _Split.apply(whole, self.own, _same))


@dataclass(frozen=True)
class SummedGradients(Summed):
    """A tensor that all processes have, and the gradient of which is the sum of what they have."""

    def whole(self, part: Tensor) -> Tensor:
        return cast(Tensor, _Split.apply(part, _same, self.own))

    def part(self, whole: Tensor) -> Tensor:
        return cast(Tensor, _Split.apply(whole, _same, self.joined))


def _same(x: Tensor) -> Tensor:
    return x.clone()


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None
