"""torch's own `MultiheadAttention`, opened: its projection is a module while it is hooked.

torch keeps the three matrices of queries, keys and values in one parameter, multiplies by them in a
function that hooks do not reach, and does not call its output layer. An opened one calls both as
modules, with torch's own functions, but only while there are hooks on its inside or a mode that
watches the functions that it calls; else it runs torch's code.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import (
    _canonical_mask,
    _none_or_dtype,
    dropout,
    linear,
    scaled_dot_product_attention,
)
from torch.overrides import has_torch_function


class InProjection(nn.Module):
    """The stacked matrices of queries, keys and values, as a module that has no parameters itself.

    Args:
        attention: the module that holds them.
    """

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        # In a tuple, so that it is not registered as a submodule.
        self._of = (attention,)

    @property
    def weight(self) -> Tensor:
        """Return ``[(three d_model), d_model]``, the attention's own parameter."""
        return self._of[0].in_proj_weight

    @property
    def bias(self) -> Tensor | None:
        """Return ``[(three d_model)]``, the attention's own parameter."""
        return self._of[0].in_proj_bias

    def forward(self, x: Tensor) -> Tensor:
        """Compute queries, keys and values of ``[..., d_model]``."""
        return linear(x, self.weight, self.bias)


class OpenMultiheadAttention(nn.MultiheadAttention):
    """A `torch.nn.MultiheadAttention` whose input projection can be hooked (see the module's
    docstring). `open_multihead` converts torch's.
    """

    in_proj: InProjection

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention as torch's module does."""
        if not (query is key is value and query.ndim == 3 and self._is_watched(query)):
            options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return super().forward(query, key, value, *options)
        mask = _additive(query, key_padding_mask, attn_mask, self.num_heads)
        projected = self.in_proj(query)
        if not self.batch_first:
            projected = projected.transpose(0, 1)
        q, k, v = map(self._by_head, projected.chunk(3, -1))
        z, pattern = self._attend(q, k, v, mask, need_weights)
        joined = z.transpose(1, 2).flatten(2)
        if not self.batch_first:
            joined = joined.transpose(0, 1).contiguous()
        result = self.out_proj(joined)
        if pattern is not None and average_attn_weights:
            pattern = pattern.mean(1)
        return result, pattern

    def _by_head(self, x: Tensor) -> Tensor:
        """Return queries, keys or values with heads before positions."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute ``pattern @ v``, and the pattern where it is needed."""
        dropped = self.dropout if self.training else 0.0
        if not need_weights:
            return scaled_dot_product_attention(q, k, v, mask, dropped), None
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        if mask is not None:
            scores = scores + mask
        pattern = dropout(scores.softmax(-1), dropped)
        return pattern @ v, pattern

    def _is_watched(self, x: Tensor) -> bool:
        """Tell whether there are hooks inside, or an active mode that watches torch functions on
        this tensor.
        """
        inside = (self.in_proj, self.out_proj)
        is_hooked = any(module._forward_hooks or module._forward_pre_hooks for module in inside)
        return is_hooked or has_torch_function((x,))


def _additive(
    x: Tensor, padding: Tensor | None, mask: Tensor | None, n_heads: int
) -> Tensor | None:
    """Return torch's masks as a term added to the scores, ``[batch, head, query, key]`` or with
    axes of one.
    """
    padding = _canonical_mask(
        padding, "key_padding_mask", _none_or_dtype(mask), "attn_mask", x.dtype
    )
    mask = _canonical_mask(mask, "attn_mask", None, "", x.dtype, False)
    if mask is not None and mask.ndim == 2:
        mask = mask[None, None]
    elif mask is not None:
        mask = mask.unflatten(0, (-1, n_heads))
    if padding is None:
        return mask
    padding = padding[:, None, None]
    return padding if mask is None else mask + padding


def open_multihead(model: nn.Module) -> None:
    """Make torch's attentions in a model hookable, if a single parameter makes queries, keys and
    values.

    They keep their parameters and results, and run torch's code unless something inside them is
    hooked.

    Args:
        model: the model.
    """
    for module in list(model.modules()):
        if type(module) is not nn.MultiheadAttention or module.bias_k is not None:
            continue
        one_width = module.kdim == module.vdim == module.embed_dim
        if one_width and not module.add_zero_attn:
            module.__class__ = OpenMultiheadAttention
            module.in_proj = InProjection(module)
