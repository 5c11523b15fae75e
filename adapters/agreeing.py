"""Whether processes that share a model do the same."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Cache


class DifferentEditsError(RuntimeError):
    """Processes did not do the same on all processes that share a model."""


@dataclass(frozen=True)
class Peers:
    """The processes that share a model, and how they ask each other.

    Attributes:
        group: they, as the model's own tensors are sent.
        side: a group of the same ones for questions alone: one that is asked in vain does not take part in what the
            model sends.
        compares: what hooks make is compared.
        patience: how many seconds a process that looks into a pass waits for the others.
    """

    group: dist.ProcessGroup
    side: dist.ProcessGroup
    compares: bool = True
    patience: float = 60.0

    def agreed(self, make: Callable[[], Tensor], name: str) -> Tensor:
        """What hooks make of an activation, if they make the same on all processes.

        Args:
            make: runs the hooks.
            name: of the hook point.

        Raises:
            DifferentEditsError: on all processes, where they differ; on the others, where a hook failed on one; where
                the others do not come.
        """
        if not self.compares:
            return make()
        try:
            made = make()
        except BaseException:
            self._compared(0, self.side.rank() + 1, name)
            raise
        same, failed = self._compared(_checksum(made), 0, name)
        self._raise(name, failed)
        if not same:
            raise DifferentEditsError(
                f"what hooks made of {name} differs between the {self.side.size()} processes that share this model: "
                "seed random numbers alike, and do the same on all"
            )
        return made

    def meet(self, name: str) -> None:
        """Waits until all processes look at a hook point, before anything of it is sent.

        Args:
            name: of the hook point.

        Raises:
            DifferentEditsError: the others look at another one, or at none.
        """
        same, failed = self._compared(zlib.crc32(name.encode()), 0, name)
        self._raise(name, failed)
        if not same:
            raise DifferentEditsError(
                f"{name} is asked for here, and another hook point on other processes that share this model: do the "
                "same on all"
            )

    def _raise(self, name: str, failed: int) -> None:
        if failed:
            raise DifferentEditsError(
                f"a hook at {name} failed on process {failed - 1} of {self.side.size()}, which says why"
            )

    def agree(self, numbers: list[int]) -> list[bool]:
        """Whether each of some numbers is the same on all processes, all of which have to ask."""
        found = self._largest([*numbers, *(-number for number in numbers)])
        return [high == -low for high, low in zip(found, found[len(numbers) :], strict=False)]

    def least(self, number: int) -> int:
        """The smallest of the processes' numbers; all have to ask."""
        return -self._largest([-number])[0]

    def _compared(self, number: int, failed: int, name: str) -> tuple[bool, int]:
        try:
            highest, lowest, failed = self._largest([number, -number, failed], self.patience)
        except RuntimeError as error:  # gloo's of a process that is late, or gone
            raise DifferentEditsError(
                f"hooks are called at {name} here, and other processes that share this model did not come there in "
                f"{self.patience:g} seconds, or ended ({error}): make each call on all, with the same hooks"
            ) from error
        return highest == -lowest, failed

    def _largest(self, numbers: list[int], seconds: float | None = None) -> list[int]:
        found = torch.tensor(numbers, dtype=torch.int64)
        work = dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.side, async_op=True)
        assert work is not None
        if seconds is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=seconds))
        largest: list[int] = found.tolist()
        return largest


def number_of(given: object) -> int:
    """A number that says which tensors, arrays, texts and numbers these are; other objects do not count.

    Of a cache of keys and values, of which each process may have a part, it is the length.

    Args:
        given: one of them, or a list or mapping of them.

    Example:
        >>> import torch
        >>> from adapters.agreeing import number_of
        >>> number_of({"input": torch.tensor([1, 2])}) == number_of({"input": torch.tensor([1, 3])})
        False
    """
    if isinstance(given, Tensor):
        data = given.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return zlib.crc32(data.numpy().tobytes(), zlib.crc32(repr(given.shape).encode()))
    if isinstance(given, np.ndarray):
        return number_of(torch.as_tensor(given))
    if isinstance(given, Cache):
        return number_of(given.get_seq_length())
    if isinstance(given, Mapping):
        return number_of(list(given.values()))
    if isinstance(given, list | tuple):
        return zlib.crc32(repr([number_of(each) for each in given]).encode())
    return zlib.crc32(repr(given).encode()) if isinstance(given, str | int | float) else 0


def _checksum(x: Tensor) -> int:
    """A number that another tensor of this shape has by accident only: of its bits, each with a factor of its place."""
    size = x.element_size()
    bits = x.detach().contiguous().flatten()
    bits = torch.view_as_real(bits).flatten() if bits.is_complex() else bits
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = bits.view(integers[bits.element_size()]).long()
    words = words ^ (words >> 32)  # the upper bits, signs among them, count where they are not cut off
    places = torch.arange(1, len(words) + 1, device=x.device) * 2_654_435_761 + 1
    return int((words * places).sum()) % (2**61) + size
