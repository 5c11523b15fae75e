"""What the model would say if it ended earlier: the residual stream of each layer, read as next tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.hooks.arguments import refuse_wrong_types

#: The most logits that are held at once.
MOST_LOGITS = 2**25


@dataclass(frozen=True)
class Top:
    """The likeliest tokens.

    Attributes:
        tokens: their ids, the likeliest first, ``[layer, batch, pos, k]``.
        probabilities: theirs.
    """

    tokens: Int[Tensor, "layer batch pos k"]
    probabilities: Float[Tensor, "layer batch pos k"]


@dataclass(frozen=True)
class Reading:
    """The residual streams of a run, and what a lens reads in them. Logits are computed when they are asked for.

    Attributes:
        streams: before each chosen layer, ``[layer, batch, pos, d_model]``; layer ``n_layers`` is the end.
        layers: which layers.
        decode: from ``[batch, pos, d_model]`` and a layer to logits ``[batch, pos, d_vocab]``.
        mask: ``[batch, pos]``, 0 where a shorter prompt is padded (in front); None: nowhere.
        n_layers: how many layers the model has.
        d_vocab: how many tokens there are.
    """

    streams: Float[Tensor, "layer batch pos d_model"]
    layers: tuple[int, ...]
    decode: Callable[[Tensor, int], Tensor]
    mask: Int[Tensor, "batch pos"] | None
    n_layers: int
    d_vocab: int

    @property
    def labels(self) -> list[str]:
        """Such as ``0_pre``, and ``final_post``."""
        return ["final_post" if layer == self.n_layers else f"{layer}_pre" for layer in self.layers]

    @refuse_wrong_types
    def logits(self, layer: int) -> Float[Tensor, "batch pos d_vocab"]:
        """The logits of one layer.

        Args:
            layer: as in `layers`; -1 is the last of them.

        Raises:
            ValueError: it was not read.
        """
        if layer == -1:
            layer = self.layers[-1]
        if layer not in self.layers:
            raise ValueError(f"layer {layer} was not read; there are {', '.join(map(str, self.layers))}")
        return self.decode(self.streams[self.layers.index(layer)], layer)

    def stack(self) -> Float[Tensor, "layer batch pos d_vocab"]:
        """The logits of all layers at all positions that were read. Everything else here does without that tensor."""
        return torch.stack([self.logits(layer) for layer in self.layers])

    @refuse_wrong_types
    def top(self, k: int = 5) -> Top:
        """The `k` likeliest tokens of each layer.

        Args:
            k: how many.

        Raises:
            ValueError: there are not so many tokens.
        """
        if not 1 <= k <= self.d_vocab:
            raise ValueError(f"k is {k}; it must be from 1 to {self.d_vocab}")
        found = self._gather(lambda logits: torch.cat(list(_top(logits, k)), -1))
        tokens, probabilities = found.split(k, -1)
        return Top(tokens.long(), probabilities)

    @refuse_wrong_types
    def probabilities(self, token: int) -> Float[Tensor, "layer batch pos"]:
        """The probability of one token in each layer.

        Args:
            token: its id.
        """
        self._check(token)
        return self._gather(lambda logits: logits.softmax(-1)[..., token])

    @refuse_wrong_types
    def ranks(self, token: int) -> Int[Tensor, "layer batch pos"]:
        """How many tokens are likelier than this one in each layer.

        Args:
            token: its id.
        """
        self._check(token)
        return self._gather(lambda logits: (logits > logits[..., token : token + 1]).sum(-1)).long()

    def divergence(self) -> Float[Tensor, "layer batch pos"]:
        """The Kullback-Leibler divergence of each layer's distribution from the last one's, in nats."""
        last = self.layers[-1]
        rows = []
        for layer, stream in zip(self.layers, self.streams, strict=True):
            parts = []
            for part, end in zip(self._parts(stream), self._parts(self.streams[-1]), strict=True):
                right = self.decode(end, last).double().log_softmax(-1)
                found = self.decode(part, layer).double().log_softmax(-1)
                parts.append((right.exp() * (right - found)).sum(-1))
            rows.append(torch.cat(parts, 1).to(self.streams.dtype))
        return torch.stack(rows)

    def _check(self, token: int) -> None:
        if not 0 <= token < self.d_vocab:
            raise ValueError(f"token is {token}; it must be from 0 to {self.d_vocab - 1}")

    def _gather(self, look: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of the logits for each layer, some positions at a time."""
        return torch.stack(
            [
                torch.cat([look(self.decode(part, layer).double()) for part in self._parts(stream)], 1)
                for layer, stream in zip(self.layers, self.streams, strict=True)
            ]
        )

    def _parts(self, stream: Float[Tensor, "batch pos d_model"]) -> Iterator[Tensor]:
        width = max(1, MOST_LOGITS // (stream.shape[0] * self.d_vocab))
        yield from stream.split(width, 1)


def _top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found = logits.softmax(-1).topk(k, -1)
    return found.indices.to(found.values.dtype), found.values
