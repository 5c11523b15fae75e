"""What a run may raise that looks where a wrong declaration says, and what is said of it."""

from __future__ import annotations

import torch

#: What a run may raise that looks where a wrong declaration says.
WRONG = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


class NotFound(Exception):
    """Something is not what a declaration could say; the message says what."""


def one_line(error: Exception) -> str:
    """An error in one line.

    Args:
        error: the error; one that says that the memory is full is no finding, and is raised again.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:300] if words else type(error).__name__
