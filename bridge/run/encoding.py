"""An input as Hugging Face's tokenizers and processors give it, and as its models take it: by name, or in a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: What Hugging Face's models call the input of a run.
NAMES = ("input_ids", "inputs_embeds")


def unpacked(input: Any, mask: Any, arguments: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The input, its mask and the model's other arguments.

    Args:
        input: what a run is given first: what it takes, a mapping of the model's arguments (`BatchEncoding`), or None.
        mask: ``[batch, pos]``, if it is given.
        arguments: the model's arguments by name, the input perhaps among them.

    Returns:
        The input, tokens or embeddings out of a mapping or from their names, arrays of NumPy as tensors; None where
        only images or sound are given; the mask; the other arguments.

    Raises:
        TypeError: something is given twice, or there is no input at all.

    Example:
        >>> from bridge.run.encoding import unpacked
        >>> unpacked({"input_ids": [[5, 6]], "attention_mask": [[1, 1]]}, None, {})
        ([[5, 6]], tensor([[1, 1]]), {})
    """
    rest = dict(arguments)
    if isinstance(input, Mapping):
        twice = [name for name in input if name in rest or (name == "attention_mask" and mask is not None)]
        if twice:
            raise TypeError(f"{', '.join(twice)}: given twice, by name and in the {type(input).__name__}")
        found = dict(input)
        one_row = isinstance(ids := found.get("input_ids"), list | tuple) and ids and isinstance(ids[0], int)
        rest |= {name: value if name in NAMES else _as_tensor(value, bool(one_row)) for name, value in found.items()}
        input, mask = None, rest.pop("attention_mask", mask)
    named = [name for name in NAMES if rest.get(name) is not None]
    if input is None and named:
        input = rest.pop(named[0])
        mask = rest.pop("attention_mask", mask)
    if input is None and not any(isinstance(value, Tensor | np.ndarray) for value in rest.values()):
        raise TypeError(
            "there is no input: give a text, a list of texts, tokens [pos] or [batch, pos], embeddings "
            "[batch, pos, d_model], or what a tokenizer gives"
        )
    return _as_tensor(input, False, arrays_only=True), _as_tensor(mask, False, arrays_only=True), rest


def _as_tensor(value: Any, one_row: bool, arrays_only: bool = False) -> Any:
    """Arrays and lists of numbers as tensors; anything else as it is."""
    if isinstance(value, np.ndarray) or (not arrays_only and isinstance(value, list | tuple)):
        value = torch.as_tensor(value)
        return value.unsqueeze(0) if one_row and value.ndim == 1 else value
    return value
