"""The declared inputs of a program: tensors that its functions are given, other ones in each call."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

_TAKEN = ("input_ids", "inputs_embeds", "hook", "activation")


def declared_inputs(inputs: Mapping[str, object], known: Collection[str]) -> dict[str, Tensor]:
    """The declared inputs of a program, as tensors.

    Args:
        inputs: an example of each, by name: a tensor, or a number.
        known: the names of the model's own arguments.

    Raises:
        TypeError: something else than a tensor or a number.
        ValueError: a name that means something else, or that no parameter can have.
    """
    found = {}
    for name, example in inputs.items():
        if not name.isidentifier() or name in known or name in _TAKEN:
            raise ValueError(
                f"{name!r} cannot be the name of an input: it must be one that a function's parameter can have, and "
                "that is no argument of the model"
            )
        found[name] = _tensor(name, example).detach()
    return found


def _tensor(name: str, value: object, like: Tensor | None = None) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value) if like is None else torch.tensor(value, device=like.device)
    raise TypeError(f"the input {name} is {type(value).__name__}; it must be a tensor or a number")


def checked_inputs(declared: Mapping[str, Tensor], given: Mapping[str, object]) -> dict[str, Tensor]:
    """What is given for declared inputs in one call, as tensors of the types of the examples.

    Args:
        declared: the examples, by name.
        given: the values, by name.

    Raises:
        TypeError: one is missing, or of another kind of number.
        ValueError: one has another number of axes.
    """
    missing = [name for name in declared if name not in given]
    if missing:
        raise TypeError(
            f"the program needs {', '.join(f'{name}=...' for name in missing)}: "
            f"it was declared with the inputs {', '.join(declared)}"
        )
    found = {}
    for name, example in declared.items():
        value = _tensor(name, given[name], example)
        if value.ndim != example.ndim:
            raise ValueError(
                f"the input {name} has shape {list(value.shape)}; it was declared with {list(example.shape)}, and "
                "must have as many axes"
            )
        if value.dtype != example.dtype:
            truth = example.dtype == torch.bool
            if truth or (value.is_floating_point() and not example.is_floating_point()):
                raise TypeError(f"the input {name} is of {value.dtype}; it was declared as {example.dtype}")
            value = value.to(example.dtype)
        found[name] = value
    return found
