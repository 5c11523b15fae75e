"""One prompt of several in a trace."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class HasActivations(Protocol):
    """A trace.

    Attributes:
        logits: ``[batch, pos, d_vocab]``.
        tokens: ``[batch, pos]``.
    """

    @property
    def logits(self) -> Tensor: ...
    @property
    def tokens(self) -> Tensor | None: ...
    def __getitem__(self, name: str) -> Tensor: ...
    def axes_of(self, name: str) -> list[str]:
        """The names of the axes of an activation."""


class Rows:
    """One prompt's part of every activation: a view of it, so that the model sees what is changed in it.

    Args:
        run: the trace.
        index: which prompt.
        start, stop: where its tokens stand.
        length: of all rows.
    """

    def __init__(self, run: HasActivations, index: int, start: int, stop: int, length: int) -> None:
        self._run, self._index = run, index
        self._start, self._stop, self._length = start, stop, length

    def __getitem__(self, name: str) -> Tensor:
        """The prompt's activation, with a batch axis of one, and without padding."""
        return self._part(self._run[name], self._run.axes_of(name))

    def __setitem__(self, name: str, value: Tensor | float) -> None:
        """Writes to it; what `value` is spread over is the prompt's own part."""
        part = self[name]
        if value is not part:
            part[...] = value

    @property
    def logits(self) -> Tensor:
        """The prompt's logits, ``[1, pos, d_vocab]``."""
        return self._part(self._run.logits, ["batch", "pos", "d_vocab"])

    @property
    def tokens(self) -> Tensor | None:
        """The prompt's tokens, ``[1, pos]``."""
        tokens = self._run.tokens
        return None if tokens is None else self._part(tokens, ["batch", "pos"])

    def _part(self, x: Tensor, axes: list[str]) -> Tensor:
        if axes[0] != "batch":
            raise ValueError(f"an activation with the axes {' '.join(axes)} has no rows of prompts")
        part = x[self._index : self._index + 1]
        for axis, name in enumerate(axes):
            if name in ("pos", "key_pos", "encoder_pos", "encoder_key_pos") and x.shape[axis] == self._length:
                part = part.narrow(axis, self._start, self._stop - self._start)
        return part
