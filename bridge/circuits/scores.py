"""Scores of all edges, and the circuits that they choose."""

from __future__ import annotations

import heapq

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bridge.circuits.circuit import Circuit
from bridge.circuits.graph import Graph
from bridge.hooks.arguments import refuse_wrong_types


class EdgeScores:
    """A number for every edge: what replacing it does to a metric, measured or estimated.

    Negative means that the metric falls without the edge: it works for the answer.

    Args:
        graph: the graph.
        values: ``[receiver, sender]``; what is no edge counts for nothing.

    Raises:
        ValueError: the shape is not the graph's, or a score is no number.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import EdgeScores, Graph
        >>> graph = Graph.of(TransformerBridge.boot_embedded())
        >>> scores = EdgeScores(graph, torch.arange(53 * 21).view(53, 21))
        >>> scores.top(2).edges
        [('L3MLP', 'logits', 1112.0), ('L3H3', 'logits', 1111.0)]
    """

    def __init__(self, graph: Graph, values: Float[Tensor, "receiver sender"] | Tensor) -> None:
        if list(values.shape) != [len(graph.receivers), len(graph.senders)]:
            raise ValueError(
                f"scores have shape {list(values.shape)}; this graph needs [{len(graph.receivers)}, "
                f"{len(graph.senders)}], receivers and senders"
            )
        self.graph = graph
        self.values = torch.where(graph.exists, values.detach().cpu().double(), 0.0)
        if self.values.isnan().any():
            raise ValueError(f"{int(self.values.isnan().sum())} scores are NaN")

    def __getitem__(self, edge: str) -> float:
        return float(self.values[self.graph.edge(edge)])

    def __repr__(self) -> str:
        return f"EdgeScores({self.graph.n_edges} edges of {len(self.graph.layers)} layers)"

    @property
    def flat(self) -> Float[Tensor, " edge"]:
        """All scores, receiver by receiver."""
        return self.values[self.graph.exists]

    @refuse_wrong_types
    def threshold(self, least: float) -> Circuit:
        """The edges whose score is at least this large, of either sign.

        Args:
            least: the threshold.
        """
        return self._circuit(self.graph.exists & (self.values.abs() >= least))

    @refuse_wrong_types
    def top(self, n: int, absolute: bool = True) -> Circuit:
        """The `n` edges with the largest scores.

        Args:
            n: how many.
            absolute: of either sign; False: those without which the metric falls most.

        Raises:
            ValueError: there are not so many.
        """
        self._check(n)
        rank = self._rank(absolute).masked_fill(~self.graph.exists, -torch.inf)
        chosen = torch.zeros(rank.numel(), dtype=torch.bool)
        chosen[rank.flatten().sort(descending=True, stable=True).indices[:n]] = True
        return self._circuit(chosen.view_as(rank))

    @refuse_wrong_types
    def greedy(self, n: int, absolute: bool = True) -> Circuit:
        """`n` edges, each the best of those that lead into what is chosen already, from the logits backwards.

        So every edge has a way to the logits (the greedy search of Hanna et al. 2024).

        Args:
            n, absolute: as for `top`.

        Raises:
            ValueError: there are not so many.
        """
        self._check(n)
        rank, graph = self._rank(absolute), self.graph
        chosen = torch.zeros_like(graph.exists)
        candidates: list[tuple[float, int, int]] = []
        reached: set[int] = set()

        def reach(receiver: int) -> None:
            if receiver not in reached:
                reached.add(receiver)
                for sender in range(graph.port_of[receiver].upstream):
                    heapq.heappush(candidates, (-float(rank[receiver, sender]), receiver, sender))

        reach(len(graph.receivers) - 1)
        while candidates and n:
            _, receiver, sender = heapq.heappop(candidates)
            chosen[receiver, sender] = True
            n -= 1
            for more in graph.inputs[sender]:
                reach(more)
        return self._circuit(chosen)

    def _rank(self, absolute: bool) -> Tensor:
        return self.values.abs() if absolute else -self.values

    def _check(self, n: int) -> None:
        if not 0 <= n <= self.graph.n_edges:
            raise ValueError(f"n is {n}; there are {self.graph.n_edges} edges")

    def _circuit(self, mask: Bool[Tensor, "receiver sender"]) -> Circuit:
        return Circuit(self.graph, mask, self.values)
