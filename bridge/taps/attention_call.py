"""What an attention kernel was called with, and what it computes from it, in full: scores, pattern, result.

A kernel such as `scaled_dot_product_attention` never holds the scores. Its arguments say everything they depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import dropout

from adapters.gathering import Cut
from adapters.views.kernel_arguments import KernelArguments
from bridge.taps.attention_mask import Positions, additive_mask, causal_mask, of_queries


@dataclass(slots=True)
class AttentionCall:
    """One call of an attention kernel.

    Attributes:
        query, key, value: ``[batch, head, pos, d_head]`` as the kernel was given them: keys and values of each group
            once or repeated, the queries of a single position perhaps packed in groups.
        mask: what the kernel was given.
        n_heads: how many query heads there are.
        scale: what the products are multiplied with; None: ``1 / sqrt(d_head)``.
        causal: each query sees the keys up to its own place, the first query and the first key being at the same one.
        dropout: the share of the pattern that is dropped.
        kernel: the implementation, where it is no torch function: it decides what `mask` means.
        options: what it was given besides (`softcap`, `s_aux`, `sliding_window`, `is_causal`).
        chosen: of which queries scores and pattern are computed; None: of all.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    n_heads: int
    scale: float | None = None
    causal: bool = False
    dropout: float = 0.0
    kernel: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    chosen: Positions | None = None

    @classmethod
    def of_torch(cls, given: KernelArguments, n_heads: int) -> AttentionCall:
        """A call of `scaled_dot_product_attention`."""
        query, key, value, mask, dropped, causal, scale, _ = given
        return cls(query, key, value, mask, n_heads, scale=scale, causal=causal, dropout=dropped)

    def kept(self) -> AttentionCall:
        """What a cache may hold of it to compute scores and pattern later: no graph, nothing that changes unseen.

        Values have no part in that: the keys take their place, so that nobody need keep them.
        """
        query, key = _kept(self.query), _kept(self.key)
        mask = _kept(self.mask) if isinstance(self.mask, Tensor) else self.mask
        options = {name: _kept(x) if isinstance(x, Tensor) else x for name, x in self.options.items()}
        return AttentionCall(
            query, key, key, mask, self.n_heads, self.scale, self.causal, 0.0, self.kernel, options
        )  # fmt: skip

    def of_queries(self, chosen: Positions) -> AttentionCall:
        """The same call, of some queries alone. (`dataclasses.replace` takes longer than a small product.)"""
        return AttentionCall(
            self.query, self.key, self.value, self.mask, self.n_heads, self.scale, self.causal, self.dropout,
            self.kernel, self.options, chosen,
        )  # fmt: skip

    def whole(self, cut: Cut) -> AttentionCall:
        """The call with the heads of all processes, without values: for those who only look."""
        heads, n = self.n_heads, self.n_heads * cut.parts
        mask, options = self.mask, dict(self.options)
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] == heads > 1:
            mask = cut.joined(mask)
        if options.get("s_aux") is not None:
            options["s_aux"] = replace(cut, axis=0).joined(options["s_aux"])
        key = cut.joined(self.key)
        return AttentionCall(
            cut.joined(self._queries()), key, key, mask, n, self.scale, self.causal, 0.0, self.kernel, options
        )  # fmt: skip

    def versions(self) -> tuple[int, ...]:
        """How often everything that scores and pattern depend on was written to."""
        tensors = (self.query, self.key, self.mask, *self.options.values())
        return tuple([x._version for x in tensors if isinstance(x, Tensor) and not x.is_inference()])

    @property
    def has_past(self) -> bool:
        """Whether there are more keys than queries."""
        return self.n_queries != self.key.shape[2]

    @property
    def n_queries(self) -> int:
        """How many queries there are of each head."""
        return self._queries().shape[2]

    def _queries(self) -> Tensor:
        """The queries, one head each."""
        query = self.query
        return (
            query
            if query.shape[1] == self.n_heads
            else query.reshape(query.shape[0], self.n_heads, -1, query.shape[-1])
        )

    def _per_head(self, x: Tensor) -> Tensor:
        """Keys or values, one head for each query head."""
        return x if x.shape[1] == self.n_heads else x.repeat_interleave(self.n_heads // x.shape[1], dim=1)

    def _mask(self) -> Tensor | None:
        """What is added to the scores, or where attention is allowed."""
        query = self._queries()
        if self.kernel:
            return additive_mask(self.kernel, query, self.key, self.mask, self.options, self.chosen)
        if self.causal:
            return causal_mask(query, self.key, self.chosen)
        mask = self.mask
        if mask is not None and mask.ndim == 4 and mask.shape[2] not in (1, query.shape[2]):  # packed as the queries
            mask = mask.reshape(mask.shape[0], self.n_heads, -1, mask.shape[-1])
        return mask if mask is None else of_queries(mask, self.chosen)

    def scores(self) -> Float[Tensor, "batch head pos key_pos"]:
        """The scores that enter the softmax; where attention is forbidden, a large negative number.

        With attention sinks (``s_aux``), the last column is the sinks'.
        """
        query = self._queries()
        query = query if self.chosen is None else query[:, :, self.chosen]
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        scores = query @ self._per_head(self.key).transpose(-1, -2)
        # New memory takes longer than these operations: without a graph they write over what the last one made.
        here = _writes_over()
        scores = scores.mul_(scale) if here else scores * scale
        cap = self.options.get("softcap")
        if cap:
            scores = scores.div_(cap).tanh_().mul_(cap) if here else cap * torch.tanh(scores / cap)
        mask = self._mask()
        if mask is not None and mask.dtype == torch.bool:
            filler = torch.finfo(scores.dtype).min
            scores = scores.masked_fill_(~mask, filler) if here else scores.masked_fill(~mask, filler)
        elif mask is not None:
            scores = scores.add_(mask) if here and mask.dtype == scores.dtype else scores + mask
        sinks = self.options.get("s_aux")
        if sinks is not None:
            sinks = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        return scores

    def pattern(
        self, scores: Float[Tensor, "batch head pos key_pos"], over: bool = False
    ) -> Float[Tensor, "batch head pos key_pos"]:
        """The pattern of such scores. A query that may attend to nothing attends to nothing.

        Args:
            scores: the scores.
            over: nobody needs them any more, so that the pattern may be written over them.
        """
        wide = scores.dtype if scores.dtype == torch.float64 else torch.float32
        if over and scores.is_cpu and scores.dtype == wide and _writes_over():
            pattern = torch.softmax(scores, -1, out=scores)  # on the CPU, row by row
        else:
            pattern = scores.softmax(-1, dtype=wide).to(scores.dtype)
        mask = None if self.causal else self._mask()
        if mask is not None and mask.dtype == torch.bool:
            pattern = pattern * mask.any(-1, keepdim=True)
        return pattern

    def result(
        self, pattern: Float[Tensor, "batch head pos key_pos"]
    ) -> Float[Tensor, "batch kernel_head kernel_pos d_head"]:
        """What the kernel returns when this is the pattern, with the heads as the kernel has them."""
        if self.options.get("s_aux") is not None:
            pattern = pattern[..., :-1]
        if self.dropout:
            pattern = dropout(pattern, self.dropout)
        z = pattern.to(self.value.dtype) @ self._per_head(self.value)
        return z if z.shape[1] == self.query.shape[1] else z.reshape(*self.query.shape[:-1], z.shape[-1])


def softmax_of(scores: Tensor, before: Tensor, softmax: Callable[[Tensor], Tensor]) -> Tensor:
    """The softmax of scores. Where a user forbids everything there is no attention, rather than NaN.

    Args:
        scores: as they are now.
        before: as the model made them.
        softmax: the model's own.
    """
    if scores is before:
        return softmax(scores)
    nothing = scores.isneginf().all(-1, keepdim=True)
    return softmax(scores.masked_fill(nothing, 0.0)).masked_fill(nothing, 0.0)


def with_heads(x: Tensor, n_heads: int | None, show: Callable[[Tensor], Tensor]) -> Tensor:
    """What is made of queries or keys, with the heads as the kernel was given them.

    Args:
        x: ``[batch, kernel_head, kernel_pos, d_head]``.
        n_heads: how many heads are shown; None: those of the kernel.
        show: shows ``[batch, head, pos, d_head]``, and returns what becomes of it.

    Raises:
        RuntimeError: there are others than so many, in groups or repeated.
    """
    n = n_heads or x.shape[1]
    if x.shape[1] % n if x.shape[1] > n else x.shape[1] * x.shape[2] % n:
        raise RuntimeError(
            f"the first product of queries and keys in it is of {x.shape[1]} heads at {x.shape[2]} positions, not of "
            f"{n} heads: a module inside of it may multiply others before"
        )
    if x.shape[1] < n:  # the queries of one position, packed in groups
        shown = x.reshape(x.shape[0], n, -1, x.shape[-1])
        new = show(shown)
        return x if new is shown else new.reshape(x.shape)
    if x.shape[1] > n:  # each group's keys, repeated for its queries
        shown = x[:, :: x.shape[1] // n]
        new = show(shown)
        return x if new is shown else new.repeat_interleave(x.shape[1] // n, dim=1)
    return show(x)


def _writes_over() -> bool:
    """Whether a result may be written over what it was made from: no graph needs that."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def _kept(x: Tensor) -> Tensor:
    return x.clone() if x.is_inference() else x.detach() if x.requires_grad else x
