"""A tensor of which each process holds a part: put together, and cut again. Each undoes the other for gradients too."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """A tensor of which each process holds a part: equal parts, in the order of the processes.

    Attributes:
        axis: along which it is cut.
        group: the processes.
    """

    axis: int
    group: dist.ProcessGroup

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

    axis: int = 0
    group: dist.ProcessGroup = field(kw_only=True)

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


class DifferentEditsError(RuntimeError):
    """Hooks did not do the same on all processes that share a model."""


def agreed(make: Callable[[], Tensor], name: str, group: dist.ProcessGroup) -> Tensor:
    """What hooks make of an activation, if they make the same on all processes.

    Args:
        make: runs the hooks.
        name: of the hook point.
        group: the processes, all of which have to ask.

    Raises:
        DifferentEditsError: on all processes, where they differ; on the others, where a hook failed on one.
    """
    try:
        made = make()
    except BaseException:
        _compared(0, group.rank() + 1, group)
        raise
    same, failed = _compared(_checksum(made), 0, group)
    if failed:
        raise DifferentEditsError(f"a hook at {name} failed on process {failed - 1} of {group.size()}, which says why")
    if not same:
        raise DifferentEditsError(
            f"what hooks made of {name} differs between the {group.size()} processes that share this model: seed "
            "random numbers alike, and do the same on all"
        )
    return made


def agree(number: int, group: dist.ProcessGroup) -> bool:
    """Whether a number is the same on all processes, all of which have to ask."""
    return _compared(number, 0, group)[0]


def least(number: int, group: dist.ProcessGroup) -> int:
    """The smallest of the processes' numbers; all have to ask."""
    return -_largest([-number], group)[0]


def number_of(given: object) -> int:
    """A number that says which tensors, texts and numbers these are; other objects do not count.

    Args:
        given: one of them, or a list or mapping of them.

    Example:
        >>> import torch
        >>> from adapters.gathering import number_of
        >>> number_of({"input": torch.tensor([1, 2])}) == number_of({"input": torch.tensor([1, 3])})
        False
    """
    if isinstance(given, Tensor):
        data = given.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return zlib.crc32(data.numpy().tobytes(), zlib.crc32(repr(given.shape).encode()))
    if isinstance(given, Mapping):
        return number_of(list(given.values()))
    if isinstance(given, list | tuple):
        return zlib.crc32(repr([number_of(each) for each in given]).encode())
    return zlib.crc32(repr(given).encode()) if isinstance(given, str | int | float) else 0


def _compared(number: int, failed: int, group: dist.ProcessGroup) -> tuple[bool, int]:
    highest, lowest, failed = _largest([number, -number, failed], group)
    return highest == -lowest, failed


def _largest(numbers: list[int], group: dist.ProcessGroup) -> list[int]:
    device = torch.device("cuda", torch.cuda.current_device()) if _on_cuda(group) else torch.device("cpu")
    found = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    largest: list[int] = found.tolist()
    return largest


def _on_cuda(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "nccl"


def _checksum(x: Tensor) -> int:
    """A number that another tensor of this shape would not have: of its bits, each with a factor of its place."""
    size = x.element_size()
    bits = x.detach().contiguous().flatten()
    bits = torch.view_as_real(bits).flatten() if bits.is_complex() else bits
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = bits.view(integers[bits.element_size()]).long()
    places = torch.arange(1, len(words) + 1, device=x.device) % 65521 + 1
    return int((words * places).sum()) % (2**61) + size
