"""What a trace says when a point has passed, or never comes."""

from __future__ import annotations

import linecache
import os
import sys

_ROOM = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class PointPassedError(RuntimeError):
    """A trace was asked for a point that the model has passed."""


class PointNeverCameError(RuntimeError):
    """A trace was asked for a point that the model did not come to."""


class LateEditError(RuntimeError):
    """A value of a trace was changed in place after the model had gone on with it."""


def asking_line() -> str:
    """The line outside of this package that is asking: file, number, text."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_ROOM):
        frame = frame.f_back
    file, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, number, frame.f_globals).strip()
    return f"{os.path.basename(file)}:{number}" + (f": {text}" if text else "")
