"""Parts of a model that backward computes again: hooks there must be known to come along."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch.utils.checkpoint import checkpoint

from adapters.imports.versions import check_checkpointed_gradients


def recomputation_frame(function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function that has its hooks with it whenever it is called again: a whole run, a block that brings them.

    Args:
        function: the function.
        args, kwargs: with what.
    """
    return function(*args, **kwargs)


def refuse_unknown_recomputation(name: str) -> None:
    """Refuses to change an activation, or to listen to its gradient, in a part of the model that is checkpointed.

    What backward computes again there would be computed without the hook, when its run is over.

    Args:
        name: of the hook point.

    Raises:
        RuntimeError: it lies within `torch.utils.checkpoint.checkpoint` that is not the model's own.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _KNOWN:
            return
        if code is _CHECKPOINT:
            raise RuntimeError(
                f"{name} lies in a part of the model that torch.utils.checkpoint computes again in backward, and "
                "nothing would bring its hook along: the gradients would be those of another function. Checkpoint with "
                "the model's own gradient_checkpointing_enable(), or switch checkpointing off in runs with hooks"
            )
        frame = frame.f_back  # type: ignore[assignment]


def refuse_older_checkpointing() -> None:
    """Refuses to listen to a gradient in a checkpointed block of a transformers that is too old for it.

    Raises:
        VersionError: it is before 5.23.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            check_checkpointed_gradients()
            return
        frame = frame.f_back  # type: ignore[assignment]


_KNOWN: CodeType = inspect.unwrap(recomputation_frame).__code__
_CHECKPOINT: CodeType = inspect.unwrap(checkpoint).__code__
