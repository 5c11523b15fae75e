"""The example that a program is traced with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

#: A function of which nothing more is known.
AnyFunction = Callable[..., Any]
#: What an exported program is traced with, and how its axes may change.
Example = dict[str, Any]


def example_of(
    given: Tensor | Mapping[str, object], inputs: Mapping[str, Tensor], dynamic: bool
) -> tuple[Example, Example]:
    """The arguments to trace with, and which of their axes may have other sizes.

    Args:
        given: tokens ``[batch, pos]``, or the model's arguments by name.
        inputs: examples of the declared inputs.
        dynamic: axes may have other sizes.

    Raises:
        TypeError: it is neither.
        ValueError: it has one position, which would be all that the exported program ever takes.
    """
    if isinstance(given, Tensor):
        given = {"input_ids": given}
    if not isinstance(given, Mapping) or not given:
        raise TypeError(
            f"the example is {type(given).__name__}; it must be tokens [batch, pos], or a mapping of the model's "
            "arguments, such as a tokenizer gives; bridge.to_tokens(text) makes tokens of text"
        )
    example: Example = {name: value for name, value in given.items() if value is not None}
    taken = [name for name in example if name in inputs]
    if taken:
        raise TypeError(f"{', '.join(taken)}: an example of a declared input is given where the program is made")
    if dynamic:
        example = {name: _two_rows(name, value, example) for name, value in example.items()}
        for name in ("input_ids", "decoder_input_ids"):
            if isinstance(example.get(name), Tensor) and example[name].shape[1] < 2:
                raise ValueError(f"{name} of the example has one position; with two or more, the length may change")
    example |= inputs
    if not dynamic:
        return example, {}
    shapes = {name: _any_size(value) for name, value in example.items()}
    return example, {"dynamic_shapes": shapes} if None not in shapes.values() else {}


def _two_rows(name: str, value: object, example: Example) -> object:
    """An argument of one row, as two: torch.export takes an axis of one for one that is always one."""
    first = next((x for x in example.values() if isinstance(x, Tensor) and x.ndim > 1), None)
    if isinstance(value, Tensor) and first is not None and first.shape[0] == 1 and value.ndim > 1 and len(value) == 1:
        return torch.cat([value, value])
    return value


def _any_size(value: object) -> dict[int, object] | None:
    if isinstance(value, Tensor):
        return dict.fromkeys(range(value.ndim), torch.export.Dim.AUTO)
    return None
