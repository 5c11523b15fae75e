"""A run in which some edges carry what the senders wrote in another run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.circuits.graph import Graph, Port
from bridge.circuits.senders import heads_of, names_of
from bridge.hooks.hook_point import HookPoint


class EdgeRun:
    """One run of some prompts for each of several sets of edges, all in one batch.

    Every receiver reads the stream of this very run, to which is added, for each replaced edge, what the sender wrote
    in the other run less what it writes in this one. Norms, attention and MLPs are then computed from that by the
    model.

    Args:
        graph: the graph.
        bridge: the bridge.
        other: what replaces the senders, ``[sender, batch, pos, d_model]``, or one row for all.
        replaced: for each set, which edges carry it, ``[set, receiver, sender]``.
    """

    def __init__(
        self,
        graph: Graph,
        bridge: TransformerBridge,
        other: Float[Tensor, "sender batch_or_one pos d_model"],
        replaced: Bool[Tensor, "set receiver sender"],
    ) -> None:
        self.graph, self.bridge, self.other = graph, bridge, other
        self.replaced = (replaced & graph.exists).to(other.device, other.dtype)
        self.sets = len(replaced)
        self._seen: dict[str, Tensor] = {}
        self._other = self._change = other

    @torch.no_grad()
    def logits(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "set batch pos d_vocab"]:
        """The logits of each set.

        Args:
            tokens: the prompts, ``[batch, pos]``.
        """
        batch, length = tokens.shape
        self._other = self.other.expand(-1, batch, length, -1)
        self._change = self.other.new_zeros(self.sets, *self._other.shape)
        self._seen = {}
        hooks: list[Any] = [("blocks.0.hook_resid_pre", self._embed)]
        for layer in range(len(self.graph.layers)):
            hooks += [(name, self._see) for name in names_of(self.graph, self.bridge, layer)]
        used = self.replaced.bool().any(0)
        for port in self.graph.ports:
            if used[port.first : port.first + port.count].any():
                hooks.append((port.name, self._reading(port)))
        logits = self.bridge.run_with_hooks(tokens.repeat(self.sets, 1), fwd_hooks=hooks)
        return logits.unflatten(0, (self.sets, batch))

    def _embed(self, stream: Tensor, hook: HookPoint) -> None:
        self._write(0, stream.unsqueeze(0))

    def _see(self, activation: Tensor, hook: HookPoint) -> None:
        """Notes what a layer's senders write; heads count when all that is needed of them was seen."""
        layer = hook.layer()
        first, shape = self.graph.first_head[layer], self.graph.layers[layer]
        if hook.name.endswith("hook_mlp_out"):
            self._write(first + shape.heads, activation.unsqueeze(0))
            return
        self._seen[hook.name] = activation
        names = [name for name in names_of(self.graph, self.bridge, layer) if not name.endswith("hook_mlp_out")]
        if all(name in self._seen for name in names):
            self._write(first, heads_of(self.bridge, self._seen, layer))
            self._seen = {}

    def _write(self, sender: int, parts: Float[Tensor, "part rows pos d_model"]) -> None:
        """Keeps by how much senders of the other run differ from this one's."""
        here = parts.unflatten(1, (self.sets, -1)).movedim(1, 0)
        n = len(parts)
        torch.sub(self._other[sender : sender + n], here, out=self._change[:, sender : sender + n])

    def _reading(self, port: Port) -> Callable[..., Tensor]:
        weights = self.replaced[:, port.first : port.first + port.count, : port.upstream]

        def read(stream: Tensor, hook: HookPoint) -> Tensor:
            change = self._change[:, : port.upstream]  # set sender batch pos d_model
            added = (weights @ change.flatten(2)).unflatten(2, change.shape[2:])
            by_row = added.permute(0, 2, 3, 1, 4).flatten(0, 1)
            return stream + (by_row if port.per_head else by_row.squeeze(-2)).to(stream.dtype)

        return read
