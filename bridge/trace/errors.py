"""What a trace says when a point has passed, or never comes."""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType

#: Our own package, and what may check its annotations.
_NOT_THE_USER = ("bridge.", "jaxtyping.", "beartype.")


class PointPassedError(RuntimeError):
    """A trace was asked for a point that the model has passed."""


class PointNeverCameError(RuntimeError):
    """A trace was asked for a point that the model did not come to."""


class LateEditError(RuntimeError):
    """A value of a trace was changed in place after the model had used it."""


class Line:
    """A line of the user's that asked for something; it is looked up when an error names it.

    Args:
        code: of the function.
        at: which instruction of it.
    """

    __slots__ = ("_at", "_code")

    def __init__(self, code: CodeType, at: int) -> None:
        self._code, self._at = code, at

    def __str__(self) -> str:
        number = next((line for start, end, line in self._code.co_lines() if start <= self._at < end), None)
        text = linecache.getline(self._code.co_filename, number or 0).strip()
        return f"{os.path.basename(self._code.co_filename)}:{number}" + (f": {text}" if text else "")


def calling_line() -> Line:
    """The line outside of this package that is asking."""
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_NOT_THE_USER):
        frame = frame.f_back
    return Line(frame.f_code, frame.f_lasti)
