"""Attention while a program is traced for another runtime.

transformers' exporters put a function of their own in the place of `scaled_dot_product_attention`, which turns masks of
truth values into numbers to be added. A query that may attend to nothing (padding in front) then attends to everything
alike, while torch's kernel gives it zero, and a pattern would be another one. What comes before their function shows
the call to the taps of the program as the model made it, and puts the zeros back. It does so in the context that
traces, and in no other: a thread that calls attention meanwhile calls what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from adapters.views import Args, Kwargs
from adapters.views.kernel_arguments import KernelArguments
from bridge.taps.patched_functions import PatchedFunction, calling_instead

_NAME = "scaled_dot_product_attention"


class SeesAttention(Protocol):
    """What is shown a call of `scaled_dot_product_attention` in its place."""

    def scaled_dot_product(self, kernel: Callable[..., Tensor], given: KernelArguments) -> Tensor:
        """What the call returns, by this kernel."""


#: What sees the attention that a tapped module is computing now, if any does.
UnderWay = Callable[[], SeesAttention | None]


@contextmanager
def attention_as_called(under_way: UnderWay) -> Iterator[None]:
    """While the body of a ``with`` statement runs, its calls of attention are seen as the model makes them.

    Args:
        under_way: finds what sees them.
    """

    def instead(own: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> object:
        if name != _NAME:
            return own(*args, **kwargs)
        given, watch = KernelArguments(*args, **kwargs), under_way()
        kernel = _with_zeros(own)
        return given.of(kernel) if watch is None else watch.scaled_dot_product(kernel, given)

    patched = PatchedFunction.install(vars(functional), _NAME)
    try:
        with calling_instead(instead):
            yield
    finally:
        patched.uninstall()


def _with_zeros(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Their function, whose result is zero where a query attends to nothing."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        made = theirs(query, key, value, mask, *args, **kwargs)
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            attends = mask.to(made.dtype).sum(-1, keepdim=True) > 0
            made = torch.where(attends, made, torch.zeros((), dtype=made.dtype, device=made.device))
        return made

    return attend
