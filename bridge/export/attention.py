"""Attention while a program is traced for another runtime.

transformers' exporters put a function of their own in the place of `scaled_dot_product_attention`, which turns masks of
truth values into numbers to be added. A query that may attend to nothing (padding in front) then attends to everything
alike, while torch's kernel gives it zero, and a pattern would be another one. What stands here before their function
shows the call to the taps of the program as the model made it, and puts the zeros back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional


class SeesAttention(Protocol):
    """What is shown a call of `scaled_dot_product_attention` in its place."""

    def scaled_dot_product(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What the call returns."""


#: What sees the attention that a tapped module is computing now, if any does.
UnderWay = Callable[[], SeesAttention | None]


@contextmanager
def attention_as_called(under_way: UnderWay) -> Iterator[None]:
    """While the body of a ``with`` statement runs, calls of attention are seen as the model makes them.

    Args:
        under_way: finds what sees them.
    """
    theirs = functional.scaled_dot_product_attention
    setattr(functional, "scaled_dot_product_attention", _as_called(theirs, under_way))  # noqa: B010
    try:
        yield
    finally:
        setattr(functional, "scaled_dot_product_attention", theirs)  # noqa: B010


def _as_called(theirs: Callable[..., Tensor], under_way: UnderWay) -> Callable[..., Tensor]:
    inside = False

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal inside
        watch = None if inside else under_way()
        if watch is not None:
            inside = True  # the kernel that it calls is this one again
            try:
                return watch.scaled_dot_product(query, key, value, *args, **kwargs)
            finally:
                inside = False
        made = theirs(query, key, value, *args, **kwargs)
        mask = args[0] if args else kwargs.get("attn_mask")
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            attends = mask.to(made.dtype).sum(-1, keepdim=True) > 0
            made = torch.where(attends, made, torch.zeros((), dtype=made.dtype, device=made.device))
        return made

    return attend
