"""How the columns that were found lie in a projection's output, as a view."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from adapters.observe.errors import NotFound
from adapters.views import View, columns, gathered, interleaved


def relative(path: str, base: str) -> str:
    """A path from a module that stands above it.

    Raises:
        NotFound: it does not stand above it.
    """
    if path == base:
        return ""
    if base and not path.startswith(base + "."):
        raise NotFound(f"{path} is not inside {base}")
    return path[len(base) + 1 :] if base else path


def heads_view(sets: Sequence[tuple[int, ...]], width: int) -> View | None:
    """The view that shows the columns of each head; None: all of them, one head after the other.

    Args:
        sets: the columns of each head.
        width: of the projection's output.
    """
    n, d = len(sets), len(sets[0])
    first = sets[0][0]
    if any(each != tuple(range(each[0], each[0] + d)) for each in sets):
        return gathered(tuple(sets))
    starts = [each[0] for each in sets]
    if starts == [first + head * d for head in range(n)]:
        return None if n * d == width else columns(first, first + n * d, n)
    step = starts[1] - starts[0]
    every = starts == [first + head * step for head in range(n)]
    if every and step % d == 0 and first % d == 0 and step * n == width:
        return interleaved(n, first // d, step // d)
    return gathered(tuple(sets))


def neurons_view(index: Sequence[int], width: int) -> View | None:
    """The view that shows these columns; None: all of them, in order."""
    start, stop = index[0], index[0] + len(index)
    if list(index) == list(range(start, stop)):
        return None if len(index) == width else columns(start, stop)
    return gathered((tuple(index),), flat=True)


def parameter_of(module: nn.Module, row: Tensor, close: float) -> str | None:
    """The name of the parameter of a module, or of one inside, that is a row of numbers; None where none is.

    Args:
        module: the module.
        row: the numbers, of any shape.
        close: what they may differ by.
    """
    for name, parameter in module.named_parameters():
        if parameter.numel() == row.numel() and bool(
            ((parameter.detach().flatten() - row.flatten()).abs() <= close).all()
        ):
            return name
    return None
