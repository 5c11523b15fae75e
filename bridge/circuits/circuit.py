"""A circuit: some of the edges of a model's graph."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.circuits.drawing import draw
from bridge.circuits.evaluation import Evaluation, evaluations
from bridge.circuits.graph import Graph
from bridge.circuits.metrics import Metric
from bridge.hooks.arguments import refuse_wrong_types

_FORMAT = "transformer-bridge circuit"
_VERSION = 1


class Circuit:
    """Some edges of a graph, with their scores.

    Args:
        graph: the graph.
        mask: which edges, ``[receiver, sender]``.
        scores: of the edges; None: 0 for all.

    Raises:
        ValueError: a shape is not the graph's, or a pair is no edge.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import Circuit, Graph
        >>> graph = Graph.of(TransformerBridge.boot_embedded())
        >>> circuit = Circuit.of_edges(graph, ["embed->L1H0.v", "L1H0->logits"])
        >>> circuit, circuit.complement()
        (Circuit(2 of 479 edges), Circuit(477 of 479 edges))
    """

    def __init__(
        self,
        graph: Graph,
        mask: Bool[Tensor, "receiver sender"],
        scores: Float[Tensor, "receiver sender"] | None = None,
    ) -> None:
        if mask.shape != graph.exists.shape:
            raise ValueError(f"the mask has shape {list(mask.shape)}; this graph needs {list(graph.exists.shape)}")
        if (mask & ~graph.exists).any():
            receiver, sender = (int(i) for i in (mask & ~graph.exists).nonzero()[0])
            raise ValueError(f"there is no edge {graph.edge_name(receiver, sender)}")
        self.graph, self.mask = graph, mask.clone()
        self.scores = torch.zeros(mask.shape, dtype=torch.float64) if scores is None else scores.double()

    @classmethod
    @refuse_wrong_types
    def of_edges(cls, graph: Graph, edges: Sequence[str]) -> Circuit:
        """A circuit of named edges.

        Args:
            graph: the graph.
            edges: such as ``"L0H1->L3H2.q"``.

        Raises:
            ValueError: one is no edge of the graph.
        """
        mask = torch.zeros_like(graph.exists)
        for edge in edges:
            mask[graph.edge(edge)] = True
        return cls(graph, mask)

    @property
    def edges(self) -> list[tuple[str, str, float]]:
        """Sender, receiver and score of every edge, the largest score first, of either sign."""
        found = [
            (self.graph.senders[sender], self.graph.receivers[receiver], float(self.scores[receiver, sender]))
            for receiver, sender in self.mask.nonzero().tolist()
        ]
        return sorted(found, key=lambda edge: -abs(edge[2]))

    @property
    def n_edges(self) -> int:
        """How many edges it has."""
        return int(self.mask.sum())

    @property
    def share(self) -> float:
        """Its part of all edges."""
        return self.n_edges / self.graph.n_edges

    @property
    def nodes(self) -> list[str]:
        """The heads, MLPs, embeddings and logits that its edges connect, in the order of the computation."""
        graph = self.graph
        used = set(self.mask.any(0).nonzero().flatten().tolist())
        receivers = set(self.mask.any(1).nonzero().flatten().tolist())
        fed = [sender for sender, inputs in enumerate(graph.inputs) if receivers & set(inputs)]
        names = [graph.senders[sender] for sender in sorted(used | set(fed))]
        return [*names, "logits"] if len(graph.receivers) - 1 in receivers else names

    def complement(self) -> Circuit:
        """All other edges."""
        return Circuit(self.graph, self.graph.exists & ~self.mask, self.scores)

    def pruned(self) -> Circuit:
        """The circuit without edges that are on no way from the embeddings to the logits."""
        graph, mask = self.graph, self.mask.clone()
        while True:
            receives = mask.any(1)
            sends = mask.any(0)
            alive = torch.tensor(
                [i == 0 or any(bool(receives[r]) for r in graph.inputs[i]) for i in range(mask.shape[1])]
            )
            useful = torch.zeros(mask.shape[0], dtype=torch.bool)
            useful[-1] = True
            for sender, inputs in enumerate(graph.inputs):
                if sends[sender]:
                    useful[inputs] = True
            left = mask & alive & useful[:, None]
            if torch.equal(left, mask):
                return Circuit(graph, mask, self.scores)
            mask = left

    @refuse_wrong_types
    def evaluate(
        self,
        bridge: TransformerBridge,
        clean: Int[Tensor, "batch pos"],
        corrupted: Int[Tensor, "batch pos"],
        metric: Metric,
        ablation: str = "resample",
        reference: Int[Tensor, "rows length"] | None = None,
    ) -> Evaluation:
        """How much of the model's behaviour the circuit has, and how much its complement.

        Every other edge carries what the ablation puts in its sender's place: of the corrupted run (``"resample"``),
        the mean over prompts, position by position (``"mean"``), or nothing (``"zero"``, the embeddings included).
        Edges of the circuit carry what their senders write in this very run. Biases of output projections are no
        edges and stay.

        Args:
            bridge: the bridge.
            clean, corrupted: pairs of prompts, ``[batch, pos]``.
            metric: from logits ``[batch, pos, d_vocab]`` to one number.
            ablation: see above.
            reference: for ``"mean"``: the prompts that the mean is over, ``[rows, pos]``; None: the corrupted ones.

        Raises:
            ValueError: an unknown ablation, prompts of different lengths, a circuit of another model.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.circuits import edge_attribution
            >>> from bridge.tasks import embedded_pairs
            >>> bridge = TransformerBridge.boot_embedded()
            >>> pairs = embedded_pairs(bridge, "ioi", 4)
            >>> scores = edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric())
            >>> found = scores.greedy(240).evaluate(bridge, pairs.clean, pairs.corrupted, pairs.metric())
            >>> found.faithfulness > 0.5
            True
        """
        return evaluations(self.graph, [self.mask], bridge, clean, corrupted, metric, ablation, reference)[0]

    @refuse_wrong_types
    def save(self, path: str | Path) -> None:
        """Writes the circuit as JSON.

        Args:
            path: the file.
        """
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "layers": self.graph.to_dict(),
            "edges": [list(edge) for edge in self.edges],
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    @refuse_wrong_types
    def load(cls, path: str | Path) -> Circuit:
        """Reads what `save` wrote.

        Args:
            path: the file.

        Raises:
            ValueError: the file is no circuit, or of another version.

        Example:
            >>> import tempfile, pathlib
            >>> from bridge import TransformerBridge
            >>> from bridge.circuits import Circuit, Graph
            >>> graph = Graph.of(TransformerBridge.boot_embedded())
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "circuit.json"
            >>> Circuit.of_edges(graph, ["embed->logits"]).save(path)
            >>> Circuit.load(path).edges
            [('embed', 'logits', 0.0)]
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"path is {str(path)!r}, which is no file")
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"{path} holds no circuit that `Circuit.save` wrote")
        if content["version"] != _VERSION:
            raise ValueError(f"{path} is of version {content['version']}; this package reads version {_VERSION}")
        graph = Graph.from_dict(content["layers"])
        mask = torch.zeros_like(graph.exists)
        scores = torch.zeros(mask.shape, dtype=torch.float64)
        for sender, receiver, score in content["edges"]:
            at = graph.edge(f"{sender}->{receiver}")
            mask[at], scores[at] = True, score
        return cls(graph, mask, scores)

    @refuse_wrong_types
    def draw(
        self,
        bridge: TransformerBridge | None = None,
        clean: Int[Tensor, "batch pos"] | None = None,
        corrupted: Int[Tensor, "batch pos"] | None = None,
        metric: Metric | str = "metric",
        **options: Any,
    ) -> Any:
        """A picture of the circuit, by `bridge.pictures.circuit`: depth from left to right, heads with their inputs.

        Blue edges are those without which the metric falls (their score is negative). With a bridge and prompts, a
        click on a node, in HTML, shows what its head attends to in the first clean prompt, and its direct effect: by
        how much the metric changes if what it sends straight to the logits is that of the corrupted run.

        Args:
            bridge: the bridge.
            clean, corrupted: pairs of prompts, ``[batch, pos]``.
            metric: from logits to one number, as for `evaluate`; or its name.
            options: as `bridge.pictures.circuit` takes them.

        Raises:
            ImportError: what pictures need is not installed.
            ValueError: a bridge without prompts and a metric to be computed, or these without a bridge.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.circuits import edge_attribution
            >>> from bridge.tasks import embedded_pairs
            >>> bridge = TransformerBridge.boot_embedded()
            >>> pairs = embedded_pairs(bridge, "ioi", 2)
            >>> scores = edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric())
            >>> scores.greedy(9).draw(bridge, pairs.clean, pairs.corrupted, pairs.metric())
            Picture('Circuit')
        """
        return draw(self.graph, self.edges, self.nodes, bridge, clean, corrupted, metric, options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Circuit) and self.graph == other.graph and torch.equal(self.mask, other.mask)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Circuit({self.n_edges} of {self.graph.n_edges} edges)"
