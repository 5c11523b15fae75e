"""What torch's attention kernel is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class KernelArguments(NamedTuple):
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`, by its names and in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def with_products(self, query: Tensor, key: Tensor) -> KernelArguments:
        """The same call with other queries and keys."""
        _, _, value, mask, dropped, causal, scale, grouped = self
        return KernelArguments(query, key, value, mask, dropped, causal, scale, grouped)

    def of(self, kernel: Callable[..., Tensor]) -> Tensor:
        """What a kernel makes of them."""
        query, key, value, mask, dropped, causal, scale, grouped = self
        return kernel(query, key, value, mask, dropped, causal, scale=scale, enable_gqa=grouped)
