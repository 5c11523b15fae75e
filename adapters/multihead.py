"""torch's own `MultiheadAttention`, opened: its projection is a module like any other while somebody looks inside.

torch keeps the three matrices of queries, keys and values in one parameter, multiplies with them in a function where no
hook reaches, and not even calls its output layer. An opened one does, with torch's own functions, only while there
are hooks on what is inside, or something watches the functions that it calls; else it runs torch's code.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import _canonical_mask, _none_or_dtype, dropout, linear, scaled_dot_product_attention
from torch.overrides import has_torch_function


class InProjection(nn.Module):
    """The matrices of queries, keys and values, one below the other, as a module without parameters of its own.

    Args:
        attention: whose they are.
    """

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self._of = (attention,)  # past `nn.Module.__setattr__`: it is no part of this one

    @property
    def weight(self) -> Tensor:
        """``[(three d_model), d_model]``, the attention's own parameter."""
        return self._of[0].in_proj_weight

    @property
    def bias(self) -> Tensor | None:
        """``[(three d_model)]``, likewise."""
        return self._of[0].in_proj_bias

    def forward(self, x: Tensor) -> Tensor:
        """Queries, keys and values of ``[..., d_model]``."""
        return linear(x, self.weight, self.bias)


class OpenMultiheadAttention(nn.MultiheadAttention):
    """See above. `open_multihead` makes one of torch's."""

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
        """As torch's."""
        masks: dict[str, Any] = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "is_causal": is_causal}
        if not (query is key and key is value and query.ndim == 3 and self._is_watched(query)):
            options: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": average_attn_weights}
            return super().forward(query, key, value, **masks, **options)
        mask = _additive(query, key_padding_mask, attn_mask, self.num_heads)
        made = self.in_proj(query)
        made = made if self.batch_first else made.transpose(0, 1)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in made.chunk(3, -1))
        dropped, pattern = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
            pattern = (scores if mask is None else scores + mask).softmax(-1)
            pattern = dropout(pattern, dropped)
            z = pattern @ v
        else:
            z = scaled_dot_product_attention(q, k, v, mask, dropped)
        joined = z.transpose(1, 2).flatten(2)
        result = self.out_proj(joined if self.batch_first else joined.transpose(0, 1).contiguous())
        return result, pattern.mean(1) if pattern is not None and average_attn_weights else pattern

    def _is_watched(self, x: Tensor) -> bool:
        """Whether there are hooks inside, or a mode watches torch's functions of this tensor."""
        inside = (self.in_proj, self.out_proj)
        hooks = any(each._forward_hooks or each._forward_pre_hooks for each in inside)
        return hooks or has_torch_function((x,))


def _additive(x: Tensor, padding: Tensor | None, mask: Tensor | None, n_heads: int) -> Tensor | None:
    """What torch's masks add to the scores, ``[batch, head, query, key]`` or with axes of one."""
    padding = _canonical_mask(padding, "key_padding_mask", _none_or_dtype(mask), "attn_mask", x.dtype)
    mask = _canonical_mask(mask, "attn_mask", None, "", x.dtype, False)
    if mask is not None:
        mask = mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (-1, n_heads))
    if padding is None:
        return mask
    padding = padding[:, None, None]
    return padding if mask is None else mask + padding


def open_multihead(model: nn.Module) -> None:
    """Opens torch's attentions in a model, where one parameter makes queries, keys and values and nothing else does.

    They keep their parameters, and compute what they did, by the same code while nobody looks inside.

    Args:
        model: the model.
    """
    for module in list(model.modules()):
        plain = type(module) is nn.MultiheadAttention and module.kdim == module.vdim == module.embed_dim
        if plain and module.bias_k is None and not module.add_zero_attn:
            module.__class__ = OpenMultiheadAttention
            module.in_proj = InProjection(module)
