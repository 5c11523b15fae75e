"""Circuits: the edges of a computation graph that a behaviour needs, and their faithfulness.

Input: a bridge, pairs of clean and corrupted prompts, and a metric of logits. Output: a score for
each edge (`EdgeScores`), a subset of the edges (`Circuit`), and its faithfulness (`Evaluation`,
`Curve`).

The mechanism, in order:

1. `Graph.of` (`bridge.circuits.graph`): heads and MLPs write to the residual stream, and each reads
   the sum of all earlier outputs. So each writer has an edge to each later reader; queries, keys
   and values are separate readers.
2. `written_in_both` splits two runs into the output of each writer, and checks that the outputs sum
   to the stream.
3. Scores (`bridge.circuits.attribution`) say how the metric changes if an edge carries its writer's
   output in the corrupted run. They are measured by patching the reader's input (`edge_effects`),
   or estimated from gradients (`edge_attribution`).
4. `EdgeScores.top`, `greedy` and `threshold` select circuits by score.
5. `run_with_edges_replaced` (`bridge.circuits.edge_runs`) runs a model in which all other edges
   carry a replacement. `evaluations` measures the metric of circuits and of their complements. If
   the graph gives each query head its own key where the model shares one per group, `OwnKeys` runs
   each row once per head of a group.

It raises an error for a model whose stream is not a plain sum, a component without an input of its
own, pairs of different shapes, and edges that do not exist. It does not depend on features in a
basis; pictures are imported only for drawing.
"""

from __future__ import annotations

import heapq
import importlib
import io
import json
import math
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from adapters.sealed import read_file, sealed
from bridge.arguments import check_choice, check_positive, refuse_wrong_types
from bridge.bridge import TransformerBridge
from bridge.circuits.edge_runs import (
    AblatedPair,
    Curve,
    Evaluation,
    ablate,
    effects_of_edges,
    evaluations,
    graph_of,
    mean_of,
    refuse_another_width,
    run_with_edges_replaced,
    share_of,
)
from bridge.circuits.graph import (
    Graph,
    LayerShape,
    Metric,
    check_rate,
    divergence_at_last_tokens,
    gradients_of,
    one_number,
    refuse_another_sum,
    refuse_inference_mode,
    token_mask,
    written,
)
from bridge.patching.ablations import Noise
from bridge.patching.patching import texts_of
from bridge.rows import check_position
from bridge.run.inputs import Prompts, prompts_with

# --------------------------------------------------------------------------------------------------
# Facts about each node in a picture of a circuit: its place, attention pattern and direct effect.
# --------------------------------------------------------------------------------------------------


def _metric_name(metric: Metric | str) -> str:
    if isinstance(metric, str):
        return metric
    name = getattr(metric, "__name__", "metric")
    return "metric" if name == "<lambda>" else name.replace("_", " ")


@torch.no_grad()
def _patterns(
    heads: list[str],
    joins: Sequence[tuple[str, str]],
    bridge: TransformerBridge,
    clean: dict[str, Any],
) -> dict[str, Tensor]:
    """Return the first prompt's attention pattern of each head of the circuit, for the head and for
    its inputs.
    """
    # With images all rows run, since only the model knows which images belong to the first row.
    first = {"input_ids": clean["input_ids"][:1]} if len(clean) == 1 else clean
    places = {name: name[1:].split("H") for name in heads}
    points = {name: f"blocks.{layer}.attn.hook_pattern" for name, (layer, _) in places.items()}
    filtered = list(dict.fromkeys(points.values()))
    _, cache = bridge.run_with_cache(first, names_filter=filtered)
    patterns = {name: cache[points[name]][0, int(head)] for name, (_, head) in places.items()}
    return patterns | {
        head_input: patterns[head] for head_input, head in joins if "H" in head_input
    }


def _direct_effects(
    bridge: TransformerBridge, pair: AblatedPair, metric: Metric, names: Iterable[str]
) -> dict[str, float]:
    """Return the effect of each sender's edge to the logits."""
    edges = {name: f"{name}->logits" for name in names if name in pair.graph.senders}
    effects = effects_of_edges(bridge, pair, metric, list(edges.values()), verbose=False)
    return {name: float(effects[pair.graph.edge(edge)]) for name, edge in edges.items()}


def _depth(graph: Graph, name: str) -> int:
    """Return a node's column: within a layer, its heads' inputs, its heads, its MLP."""
    if name in ("embed", "logits"):
        return 0 if name == "embed" else 3 * len(graph.layers) + 1
    layer, *_ = re.findall(r"\d+", name)
    return 3 * int(layer) + (1 if "." in name else 3 if name.endswith("MLP") else 2)


def _joins(graph: Graph, edges: Sequence[tuple[str, str, float]]) -> list[tuple[str, str]]:
    """Return pairs of a head's input and that head, for all heads of the circuit whose output and
    input both have edges in it."""
    writing = {sender for sender, _, _ in edges}
    reading = {receiver for _, receiver, _ in edges}
    joins = []
    for sender, inputs in zip(graph.senders, graph.inputs, strict=True):
        receivers = [graph.receivers[receiver] for receiver in inputs if sender in writing]
        joins += [(name, sender) for name in receivers if name in reading and name != sender]
    return joins


# --------------------------------------------------------------------------------------------------
# The files of the Mechanistic Interpretability Benchmark.
# --------------------------------------------------------------------------------------------------


def _mib_name(name: str) -> str:
    """Return the benchmark's name of a sender or a receiver."""
    parts = re.fullmatch(r"L(\d+)(?:MLP|H(\d+)(?:\.([qkv]))?)", name)
    if parts is None:
        return "input" if name == "embed" else name
    layer, head, letter = parts.groups()
    if head is None:
        return f"m{layer}"
    return f"a{layer}.h{head}<{letter}>" if letter else f"a{layer}.h{head}"


def _mib_rows(graph: Graph, sender: int) -> int | slice:
    """Return the senders whose neurons the benchmark's JSON stores: for a head, all heads of its
    layer.
    """
    if "H" not in graph.senders[sender]:
        return sender
    return next(some for some in graph.writes.values() if some.start <= sender < some.stop)


def _mib_graph(config: dict[str, Any]) -> Graph:
    """Return the graph of the benchmark's model."""
    heads, parallel = config["n_heads"], bool(config["parallel_attn_mlp"])
    return Graph([LayerShape(heads, heads, True, parallel)] * config["n_layers"])


def _mib_edges(graph: Graph) -> dict[str, tuple[int, int]]:
    """Return the receiver and sender of each edge, by the benchmark's name."""
    edges = {}
    for receiver, sender in graph.exists.nonzero().tolist():
        name = f"{_mib_name(graph.senders[sender])}->{_mib_name(graph.receivers[receiver])}"
        edges[name] = (receiver, sender)
    return edges


def _unpickled(content: bytes) -> Any:
    """Return the tensors of a file.

    Raises:
        ValueError: it is not a file of torch.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError("torch.save did not write it, or it is damaged") from error


def _json_of_tensors(tensors: Any) -> dict[str, Any]:
    """Convert the benchmark's tensors to the form of its JSON.

    Raises:
        ValueError: these are not the benchmark's tensors.
    """
    needed = {"cfg", "src_nodes", "dst_nodes", "edges_scores", "edges_in_graph"}
    if not isinstance(tensors, dict) or not needed <= tensors.keys():
        raise ValueError(f"the benchmark's has {', '.join(sorted(needed))}")
    senders, receivers = tensors["src_nodes"], tensors["dst_nodes"]
    scores, in_graph = tensors["edges_scores"], tensors["edges_in_graph"]
    shape = [len(senders), len(receivers)]
    if not list(scores.shape) == list(in_graph.shape) == shape:
        raise ValueError(f"its tensors have not the shape {shape} of its nodes")
    graph, edges = _mib_graph(tensors["cfg"]), {}
    for edge in _mib_edges(graph):
        sender, receiver = edge.split("->")
        place = senders.index(sender), receivers.index(receiver)
        edges[edge] = {"score": float(scores[place]), "in_graph": bool(in_graph[place])}
    nodes: dict[str, dict[str, Any]] = {name: {} for name in senders}
    if "neurons_in_graph" in tensors:
        for row, name in enumerate(graph.senders):
            neurons = tensors["neurons_in_graph"][_mib_rows(graph, row)]
            nodes[_mib_name(name)]["neurons"] = neurons.tolist()
    return {"cfg": tensors["cfg"], "nodes": nodes, "edges": edges}


def _mib_neurons(
    graph: Graph, nodes: dict[str, dict[str, Any]], d_model: int
) -> Bool[Tensor, "sender d_model"] | None:
    """Return the neurons of the benchmark's nodes; None if they have none.

    Raises:
        ValueError: a node has none, or not one for each coordinate.
    """
    rows = [nodes[_mib_name(name)].get("neurons") for name in graph.senders]
    if all(row is None for row in rows):
        return None
    neurons = torch.zeros(len(rows), d_model, dtype=torch.bool, device="cpu")
    for sender, row in enumerate(rows):
        place = _mib_rows(graph, sender)
        if row is None or torch.tensor(row, device="cpu").shape != neurons[place].shape:
            raise ValueError(
                f"the neurons of {graph.senders[sender]} are not {list(neurons[place].shape)}"
            )
        neurons[place] = torch.tensor(row, device="cpu").bool()
    return neurons


# --------------------------------------------------------------------------------------------------
# Circuits.
# --------------------------------------------------------------------------------------------------


_FORMAT = "transformer-bridge circuit"
_VERSION = 1


class Circuit:
    """A subset of a graph's edges, with their scores.

    Args:
        graph: the graph.
        mask: the edges, ``[receiver, sender]``.
        scores: scores of the edges; None: 0 for all.
        neurons: the coordinates of each sender's output that its edges include, ``[sender,
            d_model]``; None: all.

    Raises:
        ValueError: a shape does not match the graph, or a pair is not an edge.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import Circuit, Graph
        >>> graph = Graph.of(TransformerBridge.boot_embedded())
        >>> circuit = Circuit.of_edges(graph, ["embed->L1H0.v", "L1H0->logits"])
        >>> circuit, circuit.complement()
        (Circuit(2 of 479 edges), Circuit(477 of 479 edges))
    """

    #: The function of `bridge.pictures` that draws it.
    picture: ClassVar[str] = "circuit"

    @refuse_wrong_types
    def __init__(
        self,
        graph: Graph,
        mask: Bool[Tensor, "receiver sender"],
        scores: Float[Tensor, "receiver sender"] | None = None,
        neurons: Bool[Tensor, "sender d_model"] | None = None,
    ) -> None:
        if neurons is not None and len(neurons) != len(graph.senders):
            raise ValueError(
                f"neurons are of {len(neurons)} senders; this graph has {len(graph.senders)}"
            )
        if mask.shape != graph.exists.shape:
            raise ValueError(
                f"the mask has shape {list(mask.shape)}; this graph needs"
                f" {list(graph.exists.shape)}"
            )
        if (mask & ~graph.exists).any():
            receiver, sender = (int(i) for i in (mask & ~graph.exists).nonzero()[0])
            raise ValueError(f"there is no edge {graph.edge_name(receiver, sender)}")
        self.graph, self.mask = graph, mask.clone()
        self.neurons = None if neurons is None else neurons.cpu().clone()
        self.scores = (
            torch.zeros(mask.shape, dtype=torch.float64, device="cpu")
            if scores is None
            else scores.double()
        )

    @classmethod
    @refuse_wrong_types
    def of_edges(cls, graph: Graph, edges: Sequence[str]) -> Circuit:
        """Return a circuit of named edges.

        Args:
            graph: the graph.
            edges: names such as ``"L0H1->L3H2.q"``.

        Raises:
            ValueError: a name is not an edge of the graph.
        """
        mask = torch.zeros_like(graph.exists)
        for edge in edges:
            mask[graph.edge(edge)] = True
        return cls(graph, mask)

    @property
    def edges(self) -> list[tuple[str, str, float]]:
        """Return sender, receiver and score of every edge, sorted by decreasing absolute score."""
        graph, edges = self.graph, []
        for receiver, sender in self.mask.nonzero().tolist():
            score = float(self.scores[receiver, sender])
            edges.append((graph.senders[sender], graph.receivers[receiver], score))
        return sorted(edges, key=lambda edge: -abs(edge[2]))

    @property
    def n_edges(self) -> int:
        """Return the number of edges."""
        return int(self.mask.sum())

    @property
    def share(self) -> float:
        """Return the share of all edges; an edge with only some neurons in the circuit counts by
        their share.
        """
        return share_of(self.graph, self.mask, self.neurons)

    @property
    def nodes(self) -> list[str]:
        """Return the heads, MLPs, embeddings and logits that the edges connect, in the order of
        computation.
        """
        sends, receives = self.mask.any(0).tolist(), self.mask.any(1).tolist()
        names = [
            name
            for sender, name in enumerate(self.graph.senders)
            if sends[sender] or any(receives[i] for i in self.graph.inputs[sender])
        ]
        return [*names, "logits"] if receives[-1] else names

    def complement(self) -> Circuit:
        """Return the circuit of all other edges.

        Raises:
            ValueError: the circuit has neurons: the complement would need other neurons for other
                edges.
        """
        if self.neurons is not None:
            raise ValueError(
                "the complement of a circuit of neurons has no one set of neurons for each sender"
            )
        return Circuit(self.graph, self.graph.exists & ~self.mask, self.scores)

    def pruned(self) -> Circuit:
        """Return the circuit without edges that are on no path from the embeddings to the
        logits.
        """
        graph, mask = self.graph, self.mask.clone()
        if self.neurons is not None:
            mask &= self.neurons.any(1)
        while True:
            sends, receives = mask.any(0), mask.any(1)
            reached = [bool(receives[inputs].any()) for inputs in graph.inputs]
            reached[0] = True  # the embeddings have no inputs
            useful = torch.zeros_like(receives)
            useful[-1] = True
            for inputs, sending in zip(graph.inputs, sends, strict=True):
                if sending:
                    useful[inputs] = True
            kept = mask & torch.tensor(reached, device="cpu") & useful[:, None]
            if torch.equal(kept, mask):
                return Circuit(graph, mask, self.scores, self.neurons)
            mask = kept

    @refuse_wrong_types
    def evaluate(
        self,
        bridge: TransformerBridge,
        clean: Prompts,
        corrupted: Prompts,
        metric: Metric,
        ablation: str | Noise | Float[Tensor, "constant d_model"] = "resample",
        reference: Prompts | None = None,
        **model_kwargs: Any,
    ) -> Evaluation:
        """Measure how much of the model's behaviour the circuit keeps, and how much its complement
        keeps.

        Every other edge carries the ablation's replacement of its sender: the output in the
        corrupted run (``"resample"``), the mean over prompts, position by position (``"mean"``),
        zeros (``"zero"``, the embeddings included), the output in the clean run plus Gaussian noise
        (``"noise"``, or `bridge.patching.Noise`), or constants, a vector for each sender, such as
        `optimal_constants` (``"optimal"`` trains these). Edges of the circuit carry their senders'
        outputs in this run. Output projections' biases are not edges and are kept, as is any other
        input to the stream, such as image features.

        Args:
            bridge: the bridge.
            clean, corrupted: pairs of prompts, ``[batch, pos]``, or a processor's output.
            metric: a function from logits ``[batch, pos, d_vocab]`` to one number, or one for each
                prompt.
            ablation: one of the ablations above.
            reference: for ``"mean"``: the prompts to average over, ``[rows, pos]``; None: the
                corrupted ones. For ``"optimal"``: the prompts to train the constants on.
            model_kwargs: further model inputs for both prompts of a pair, such as
                ``pixel_values=``. If each prompt has its own, and for `reference`, pass prompts as
                a processor's output.

        Raises:
            ValueError: an unknown ablation; prompts of different lengths or with different masks; a
                mean at a position with padding only; ``"optimal"`` without `reference`; a circuit
                of another model; training mode; or an input to the stream besides heads and MLPs
                that differs within a pair.
            RuntimeError: ``"optimal"`` in inference mode, which has no gradients.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.circuits import edge_attribution
            >>> from bridge.tasks import embedded_pairs
            >>> bridge = TransformerBridge.boot_embedded()
            >>> pairs = embedded_pairs(bridge, "ioi", 4)
            >>> scores = edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric())
            >>> found = scores.greedy(240).evaluate(
            ...     bridge, pairs.clean, pairs.corrupted, pairs.metric()
            ... )
            >>> found.faithfulness > 0.5
            True
        """
        if isinstance(ablation, str) and ablation == "optimal":
            if reference is None:
                raise ValueError(
                    "optimal constants are trained on other prompts than these: give them as"
                    " reference"
                )
            ablation, reference = self.optimal_constants(bridge, reference), None
        pair = ablate(bridge, self.graph, clean, corrupted, ablation, reference, model_kwargs)
        (evaluation,) = evaluations(bridge, pair, [(self.mask, self.neurons)], metric)
        return evaluation

    @refuse_wrong_types
    def optimal_constants(
        self,
        bridge: TransformerBridge,
        prompts: Prompts,
        loss: Metric | None = None,
        steps: int = 100,
        rate: float = 0.05,
        **model_kwargs: Any,
    ) -> Float[Tensor, "sender d_model"]:
        """Train one constant for each sender such that ablating all other edges with it harms the
        circuit least.

        This is optimal ablation. Means and zeros disturb a model because they are unusual inputs;
        the loss that remains with the best constants measures the information in the edges (Li and
        Janson 2024, "Optimal Ablation for Interpretability"). Adam trains the constants from the
        senders' means, in units of their spread; the step with the smallest loss is returned.

        Args:
            bridge: the bridge, in evaluation mode.
            prompts: the training prompts, ``[batch, pos]``, or a processor's output. Evaluate on
                others.
            loss: a function from logits to one number to minimise; None: the divergence from the
                full model's next-token distribution at each prompt's last token.
            steps: the number of training steps.
            rate: the learning rate.
            model_kwargs: further model inputs for the prompts.

        Returns:
            The constants, for ``evaluate(ablation=)``.

        Raises:
            ValueError: a circuit of another model, training mode, no step, a rate that is not
                positive and finite, a loss that is not finite or has no gradient.
            RuntimeError: the call is in inference mode, which has no gradients.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.circuits import edge_attribution
            >>> from bridge.tasks import embedded_pairs
            >>> bridge = TransformerBridge.boot_embedded()
            >>> pairs = embedded_pairs(bridge, "ioi", 4)
            >>> scores = edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric())
            >>> circuit = scores.greedy(100)
            >>> constants = circuit.optimal_constants(bridge, pairs.clean, steps=3)
            >>> found = circuit.evaluate(
            ...     bridge, pairs.clean, pairs.corrupted, pairs.metric(), constants
            ... )
        """
        graph_of(bridge, self.graph)
        refuse_another_width(self.neurons, bridge)
        check_positive("steps", steps)
        check_rate(rate)
        refuse_inference_mode("optimal_constants")
        inputs = prompts_with(bridge, prompts, model_kwargs)
        wrote, counted = written(self.graph, bridge, inputs), token_mask(inputs)
        refuse_another_sum(bridge, wrote)
        measure = loss or divergence_at_last_tokens(wrote.logits, inputs)
        check_position(measure, inputs.get("attention_mask"))
        parts = wrote.parts
        means = mean_of(parts, counted, (1, 2))
        variances = mean_of((parts - means).square(), counted, (1, 2))
        sizes = variances.mean(-1, keepdim=True).sqrt()
        replaced = (self.graph.exists & ~self.mask)[None]
        partly = None if self.neurons is None else (self.mask[None], ~self.neurons[None])
        if not replaced.any() and partly is None:  # no edge carries a constant
            return means[:, 0, 0].to(parts.dtype)

        def loss_of(shift: Tensor) -> Tensor:
            constants = (means + sizes * shift).to(parts.dtype)
            edges = (replaced, partly)
            (logits,) = run_with_edges_replaced(self.graph, bridge, inputs, constants, *edges)
            return one_number(measure, logits)

        best = _minimised(loss_of, torch.zeros_like(means), steps, rate)
        return (means + sizes * best)[:, 0, 0].to(parts.dtype)

    @refuse_wrong_types
    def save(self, path: str | Path) -> None:
        """Write the circuit as JSON.

        Args:
            path: the file.
        """
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "layers": self.graph.to_dict(),
            "edges": [list(edge) for edge in self.edges],
        }
        if self.neurons is not None:
            content["d_model"] = self.neurons.shape[1]
            content["neurons"] = [row.nonzero().flatten().tolist() for row in self.neurons]
        Path(path).write_text(sealed(content), encoding="utf-8")

    @refuse_wrong_types
    def to_mib(self, path: str | Path, bridge: TransformerBridge) -> None:
        """Write the circuit, with the scores of all edges, in the format of the Mechanistic
        Interpretability Benchmark.

        The format is that of EAP-IG's ``Graph.from_json``: nodes ``input``, ``a3.h2``, ``m3``;
        edges ``a0.h1->a3.h2<q>``. Depending on the file's suffix, it is the tensors of
        ``Graph.from_pt`` instead.

        Args:
            path: the file, ``.json`` or ``.pt``.
            bridge: the model of the circuit.

        Raises:
            ValueError: an unknown suffix; a circuit of another model; one with grouped keys, or
                with a layer without heads or MLP, which the benchmark's graph cannot represent.

        Example:
            >>> import tempfile, pathlib
            >>> from bridge import TransformerBridge
            >>> from bridge.circuits import Circuit, Graph
            >>> bridge = TransformerBridge.boot_embedded()
            >>> circuit = Circuit.of_edges(Graph.of(bridge), ["embed->L1H0.v", "L1H0->logits"])
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "circuit.json"
            >>> circuit.to_mib(path, bridge)
            >>> Circuit.load(path) == circuit
            True
        """
        graph, path = self.graph, Path(path)
        check_choice("the suffix of path", path.suffix, (".json", ".pt"))
        graph_of(bridge, graph)
        first = graph.layers[0]
        if set(graph.layers) != {first} or not first.mlp or not first.heads == first.key_heads > 0:
            raise ValueError(
                "the benchmark's graph has an MLP and as many heads in each layer, all with keys"
                f" of their own: {bridge.cfg.model_name} has not (if its keys are grouped, take"
                " Graph.of(bridge, grouped=False))"
            )
        if not self.scores.isfinite().all():
            raise ValueError("a score is not finite, which the file cannot hold")
        config = {
            "n_layers": len(graph.layers),
            "n_heads": first.heads,
            "parallel_attn_mlp": first.parallel,
            "d_model": bridge.cfg.d_model,
        }
        if path.suffix == ".pt":
            torch.save({"cfg": config, **self._mib_tensors()}, path)
        else:
            content = json.dumps({"cfg": config, **self._mib_json()}, allow_nan=False)
            path.write_text(content + "\n", encoding="utf-8")

    def _mib_tensors(self) -> dict[str, Any]:
        """Return the circuit as the benchmark's tensors, without its model's sizes."""
        graph, nodes = self.graph, set(self.nodes)
        tensors = {
            "src_nodes": [_mib_name(name) for name in graph.senders],
            "dst_nodes": [_mib_name(name) for name in graph.receivers],
            "nodes_in_graph": torch.tensor([name in nodes for name in graph.senders], device="cpu"),
            "edges_scores": self.scores.T.float().contiguous(),
            "edges_in_graph": self.mask.T.contiguous(),
        }
        if self.neurons is not None:
            tensors["neurons_in_graph"] = self.neurons
            tensors["neurons_scores"] = torch.zeros(self.neurons.shape, device="cpu")
        return tensors

    def _mib_json(self) -> dict[str, Any]:
        """Return the circuit as the benchmark's JSON, without its model's sizes."""
        graph, names = self.graph, set(self.nodes)
        nodes: dict[str, dict[str, Any]] = {}
        for row, name in enumerate(graph.senders):
            facts = nodes[_mib_name(name)] = {"in_graph": name in names}
            if self.neurons is not None:
                facts["neurons"] = self.neurons[_mib_rows(graph, row)].tolist()
        nodes["logits"] = {"in_graph": "logits" in names}
        edges = {}
        for name, place in _mib_edges(graph).items():
            score, in_graph = float(self.scores[place]), bool(self.mask[place])
            edges[name] = {"score": score, "in_graph": in_graph}
        return {"nodes": nodes, "edges": edges}

    @classmethod
    @refuse_wrong_types
    def load(cls, path: str | Path) -> Circuit:
        """Read a circuit written by `save`, by `to_mib`, or by the benchmark's own code.

        Args:
            path: the file.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is not a circuit, is damaged, or has another version.

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
        if Path(path).suffix == ".pt":
            return read_file(path, "circuit", cls._from_tensors, _unpickled)
        return read_file(path, "circuit", cls._from_json)

    @classmethod
    def _from_tensors(cls, tensors: Any) -> Circuit:
        return cls._from_mib(_json_of_tensors(tensors))

    @classmethod
    def _from_json(cls, content: dict[str, Any]) -> Circuit:
        if {"cfg", "nodes", "edges"} <= content.keys():
            return cls._from_mib(content)
        if content.get("format") != _FORMAT:
            raise ValueError("`Circuit.save` did not write it")
        if content["version"] != _VERSION:
            raise ValueError(
                f"it is of version {content['version']}; this package reads version {_VERSION}"
            )
        graph = Graph.from_dict(content["layers"])
        mask = torch.zeros_like(graph.exists)
        scores = torch.zeros(mask.shape, dtype=torch.float64, device="cpu")
        for sender, receiver, score in content["edges"]:
            place = graph.edge(f"{sender}->{receiver}")
            mask[place], scores[place] = True, score
        neurons = None
        if "neurons" in content:
            neurons = torch.zeros(
                len(content["neurons"]), content["d_model"], dtype=torch.bool, device="cpu"
            )
            for row, some in zip(neurons, content["neurons"], strict=True):
                row[some] = True
        return cls(graph, mask, scores, neurons)

    @classmethod
    def _from_mib(cls, content: dict[str, Any]) -> Circuit:
        config, edges = content["cfg"], content["edges"]
        graph = _mib_graph(config)
        known = _mib_edges(graph)
        if different := sorted(known.keys() ^ edges.keys()):
            raise ValueError(
                f"its edges are not those of its model: {different[0]} is in one of them alone"
            )
        mask = torch.zeros_like(graph.exists)
        scores = torch.zeros(mask.shape, dtype=torch.float64, device="cpu")
        for edge, place in known.items():
            in_graph, score = edges[edge]["in_graph"], float(edges[edge]["score"])
            if not isinstance(in_graph, bool) or not math.isfinite(score):
                raise ValueError(f"{edge} has the score {score}, and is in the graph: {in_graph!r}")
            mask[place], scores[place] = in_graph, score
        neurons = _mib_neurons(graph, content["nodes"], config.get("d_model", 0))
        return cls(graph, mask, scores, neurons)

    @refuse_wrong_types
    def draw(
        self,
        bridge: TransformerBridge | None = None,
        clean: Prompts | None = None,
        corrupted: Prompts | None = None,
        metric: Metric | str = "metric",
        **options: Any,
    ) -> Any:
        """Draw the circuit with `bridge.pictures.circuit`: depth from top to bottom, heads with
        their inputs.

        Edges whose score is negative, so that the metric falls without them, are blue. With a
        bridge and prompts, clicking a node in the HTML shows its head's attention in the first
        clean prompt, and its direct effect: the change of the metric if its direct contribution to
        the logits is that of the corrupted run.

        Args:
            bridge: the bridge.
            clean, corrupted: pairs of prompts, ``[batch, pos]``, or a processor's output.
            metric: a function from logits to one number, as for `evaluate`; or its name.
            options: options of `bridge.pictures.circuit`.

        Raises:
            ImportError: the dependencies of pictures are not installed.
            ValueError: a bridge without prompts and a metric function, or these without a bridge.

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
        graph, edges = self.graph, self.edges
        pictures = importlib.import_module("bridge.pictures")
        joins = _joins(graph, edges)
        names = dict.fromkeys(name for sender, receiver, _ in edges for name in (sender, receiver))
        defaults: dict[str, Any] = {"joins": joins, "supports": "negative", "measure": "change"}
        defaults["metric"] = _metric_name(metric)
        effects: dict[str, float] = {}
        patterns: dict[str, Tensor] = {}
        if bridge is None and clean is None and corrupted is None:
            if not isinstance(metric, str):
                raise ValueError(
                    "metric is a function, which is computed in runs: give bridge, clean and"
                    " corrupted too"
                )
        elif bridge is None or clean is None or corrupted is None or isinstance(metric, str):
            raise ValueError(
                "give bridge, clean, corrupted and metric, a function of logits, together; or none"
                " of them"
            )
        else:
            pair = ablate(bridge, graph, clean, corrupted, "resample", None, {})
            effects = _direct_effects(bridge, pair, metric, names)
            heads = [name for name in self.nodes if "H" in name]
            patterns = _patterns(heads, joins, bridge, pair.prompts)
            defaults["tokens"] = texts_of(bridge, pair.prompts["input_ids"][0])
        nodes = {}
        for name in names:
            facts = {"effect": effects.get(name), "pattern": patterns.get(name)}
            nodes[name] = pictures.CircuitNode(column=_depth(graph, name), **facts)
        return pictures.circuit(edges, **(defaults | {"nodes": nodes} | options))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Circuit) or self.graph != other.graph:
            return False
        same = torch.equal(self.mask, other.mask)
        if self.neurons is None or other.neurons is None:
            return same and self.neurons is other.neurons
        return same and torch.equal(self.neurons, other.neurons)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        neurons = ""
        if self.neurons is not None:
            neurons = f", {int(self.neurons.sum())} of {self.neurons.numel()} neurons"
        return f"Circuit({self.n_edges} of {self.graph.n_edges} edges{neurons})"


def _minimised(
    loss_of: Callable[[Tensor], Tensor], start: Tensor, steps: int, rate: float
) -> Tensor:
    """Minimise a loss by Adam, and return the argument of the step with the smallest loss.

    Raises:
        ValueError: the loss is not finite, or has no gradient.
    """
    argument = torch.zeros_like(start, requires_grad=True)
    optimizer = torch.optim.Adam([argument], lr=rate)
    least, best = math.inf, start
    with torch.enable_grad():
        for _ in range(steps):
            loss = loss_of(argument)
            if not loss.isfinite():
                raise ValueError(
                    f"loss is {loss.item()}: constants are trained to make a finite number small"
                )
            if loss.item() < least:
                least, best = loss.item(), argument.detach().clone()
            (argument.grad,) = gradients_of("loss", loss, [argument])
            optimizer.step()
    return best


# --------------------------------------------------------------------------------------------------
# Scores of all edges, and the circuits selected by them.
# --------------------------------------------------------------------------------------------------


class EdgeScores:
    """A score for every edge: the measured or estimated effect of replacing it on a metric.

    A negative score means that the metric falls without the edge: the edge supports the answer.

    Args:
        graph: the graph.
        values: ``[receiver, sender]``; entries of pairs that are not edges are ignored.

    Raises:
        ValueError: the shape does not match the graph, or a score is NaN.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import EdgeScores, Graph
        >>> graph = Graph.of(TransformerBridge.boot_embedded())
        >>> scores = EdgeScores(graph, torch.arange(53 * 21).view(53, 21))
        >>> scores.top(2).edges
        [('L3MLP', 'logits', 1112.0), ('L3H3', 'logits', 1111.0)]
    """

    #: The function of `bridge.pictures` that draws it.
    picture: ClassVar[str] = "heads"

    def __init__(self, graph: Graph, values: Float[Tensor, "receiver sender"] | Tensor) -> None:
        if list(values.shape) != [len(graph.receivers), len(graph.senders)]:
            raise ValueError(
                f"scores have shape {list(values.shape)}; this graph needs [{len(graph.receivers)},"
                f" {len(graph.senders)}], receivers and senders"
            )
        self.graph = graph
        self.values = torch.where(graph.exists, values.detach().cpu().double(), 0.0)
        if self.values.isnan().any():
            raise ValueError(f"{int(self.values.isnan().sum())} scores are NaN")

    def __getitem__(self, edge: str) -> float:
        return float(self.values[self.graph.edge(edge)])

    def __repr__(self) -> str:
        graph = self.graph
        largest = ""
        if graph.n_edges:
            receiver, sender = divmod(int(self.values.abs().argmax()), len(graph.senders))
            score = float(self.values[receiver, sender])
            largest = f", largest {graph.edge_name(receiver, sender)} {score:+.3g}"
        return f"EdgeScores({graph.n_edges} edges of {len(graph.layers)} layers{largest})"

    def draw(self, **options: Any) -> Any:
        """Draw the sum of each head's scores (see `nodes`) with `bridge.pictures.heads`. For the
        edges, draw a circuit: ``scores.top(20).draw()``.

        Args:
            options: options of `bridge.pictures.heads`.

        Raises:
            ImportError: the dependencies of pictures are not installed.
            ValueError: layers with different numbers of heads.
        """
        defaults = {"measure": "sum of scores", "title": "Scores of heads"}
        return _drawn_heads(self.graph, self.values.sum(0), defaults | options)

    @property
    def flat(self) -> Float[Tensor, " edge"]:
        """Return all scores, receiver by receiver."""
        return self.values[self.graph.exists]

    @refuse_wrong_types
    def threshold(self, least: float) -> Circuit:
        """Return the edges with an absolute score of at least this value.

        Args:
            least: the threshold.
        """
        return self._circuit(self.graph.exists & (self.values.abs() >= least))

    @refuse_wrong_types
    def top(self, n: int, absolute: bool = True) -> Circuit:
        """Return the `n` edges with the largest scores.

        Args:
            n: the number of edges.
            absolute: rank by absolute value; False: by how far the metric falls without the edge.

        Raises:
            ValueError: there are fewer than `n`.
        """
        chosen = torch.zeros_like(self.graph.exists)
        chosen[self.graph.exists] = _first(self.flat, n, absolute, "edges")
        return self._circuit(chosen)

    @refuse_wrong_types
    def greedy(self, n: int, absolute: bool = True) -> Circuit:
        """Return `n` edges, chosen greedily from the logits backwards among the edges into the
        chosen nodes.

        Every chosen edge therefore has a path to the logits (the greedy search of Hanna et al.
        2024).

        Args:
            n, absolute: as for `top`.

        Raises:
            ValueError: there are fewer than `n`.
        """
        _check_number(n, self.graph.n_edges, "edges")
        rank, graph = _rank(self.values, absolute), self.graph
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

    @refuse_wrong_types
    def auroc(self, known: Circuit, shares: Sequence[float] | None = None) -> float:
        """Return how well the scores separate a known circuit's edges from others: the area under
        the ROC curve.

        1: every edge of the circuit has a larger absolute score than every other edge; 0.5: chance.

        Args:
            known: the known circuit.
            shares: shares of all edges, such as `SHARES`: the area is then computed from the greedy
                circuits of these sizes, as in the code of the Mechanistic Interpretability
                Benchmark (rounded up, from the first circuit on). None: over all pairs of an edge
                in the circuit and an edge outside it; ties count half.

        Raises:
            ValueError: a circuit of another graph, or with all edges or none; shares that do not
                increase to 1.

        Example:
            >>> from bridge.circuits import SHARES, edge_attribution
            >>> from bridge.tasks import compiled
            >>> task = compiled("reverse")
            >>> scores = edge_attribution(task.bridge, task.clean, task.corrupted, task.metric())
            >>> scores.auroc(task.circuit), 0.9 < scores.auroc(task.circuit, SHARES) <= 1
            (1.0, True)
        """
        if known.graph != self.graph:
            raise ValueError(f"the circuit is of {known.graph}, and these scores of {self.graph}")
        edges = self.graph.exists
        right = known.mask[edges]
        if shares is None:
            return area_under_rates(self.flat.abs(), right)
        _check_shares(shares)
        if shares[-1] != 1:
            raise ValueError(f"shares are {tuple(shares)}; the last one must be 1, all edges")
        if right.all() or not right.any():
            raise ValueError(_NOTHING_TO_TELL)
        sizes = [math.ceil(share * len(right)) for share in shares]
        chosen = torch.stack([self.greedy(size).pruned().mask[edges] for size in sizes]).double()
        true, false = chosen[:, right].mean(1), chosen[:, ~right].mean(1)
        return float(torch.trapezoid(true, false / false[-1]))

    @property
    def nodes(self) -> dict[str, float]:
        """Return the score of each head and MLP: the sum over its outgoing edges.

        Every reader of a node reads it through an edge. For scores from gradients the sum is
        therefore the gradient at the node's output times its difference: attribution patching of
        nodes (NAP, and NAP-IG for `"inputs"` and `"activations"`).
        """
        return dict(zip(self.graph.senders, self.values.sum(0).tolist(), strict=True))

    @refuse_wrong_types
    def top_nodes(self, n: int, absolute: bool = True) -> Circuit:
        """Return the edges between the `n` nodes with the largest scores (see `nodes`), and from
        them to the logits.

        Args:
            n, absolute: as for `top`.

        Raises:
            ValueError: there are fewer than `n`.
        """
        return self._circuit(_between(self.graph, _first(self.values.sum(0), n, absolute, "nodes")))

    def _circuit(self, mask: Bool[Tensor, "receiver sender"]) -> Circuit:
        return Circuit(self.graph, mask, self.values)


def _drawn_heads(graph: Graph, values: Float[Tensor, " sender"], options: Mapping[str, Any]) -> Any:
    """Draw the values of the senders that are heads.

    Raises:
        ValueError: layers with different numbers of heads.
    """
    heads = {layer.heads for layer in graph.layers}
    if len(heads) > 1 or not sum(heads):
        raise ValueError(
            f"the layers have {', '.join(map(str, sorted(heads)))} heads: a picture of heads is of"
            " layers that all have the same number"
        )
    places = [i for i, name in enumerate(graph.senders) if "H" in name]
    pictures = importlib.import_module("bridge.pictures")
    return pictures.heads(values[places].view(len(graph.layers), -1), **options)


def _first(counts: Tensor, n: int, absolute: bool, what: str) -> Bool[Tensor, "..."]:
    """Return a mask of the `n` largest numbers, by absolute value or by the most negative value.

    Raises:
        ValueError: there are fewer than `n` numbers.
    """
    _check_number(n, counts.numel(), what)
    chosen = torch.zeros(counts.numel(), dtype=torch.bool, device="cpu")
    chosen[_rank(counts, absolute).flatten().sort(descending=True, stable=True).indices[:n]] = True
    return chosen.view(counts.shape)


def _check_number(n: int, count: int, what: str) -> None:
    if not 0 <= n <= count:
        raise ValueError(f"n is {n}; there are {count} {what}")


def _rank(counts: Tensor, absolute: bool) -> Tensor:
    return counts.abs() if absolute else -counts


def _between(graph: Graph, chosen: Bool[Tensor, " sender"]) -> Bool[Tensor, "receiver sender"]:
    """Return the edges between some nodes, and from them to the logits."""
    reading = torch.zeros(len(graph.receivers), dtype=torch.bool, device="cpu")
    own = [i for sender in chosen.nonzero().flatten().tolist() for i in graph.inputs[sender]]
    reading[[len(graph.receivers) - 1, *own]] = True
    return graph.exists & chosen & reading[:, None]


class NodeScores:
    """A score for every head and MLP, or for every coordinate of its output (its neurons).

    Args:
        graph: the graph.
        values: scores of the nodes, ``[sender]``.
        neurons: scores of their neurons, ``[sender, d_model]``; None: unknown.

    Raises:
        ValueError: the number of scores does not match the senders, or a score is NaN.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import Graph, NodeScores
        >>> scores = NodeScores(Graph.of(TransformerBridge.boot_embedded()), torch.arange(21.0))
        >>> scores["L3MLP"], scores.top(3).nodes
        (20.0, ['L3H2', 'L3H3', 'L3MLP', 'logits'])
    """

    #: The function of `bridge.pictures` that draws it.
    picture: ClassVar[str] = "heads"

    @refuse_wrong_types
    def __init__(
        self,
        graph: Graph,
        values: Float[Tensor, " sender"],
        neurons: Float[Tensor, "sender d_model"] | None = None,
    ) -> None:
        for scores in (values,) if neurons is None else (values, neurons):
            if len(scores) != len(graph.senders):
                raise ValueError(
                    f"there are scores of {len(scores)} nodes; this graph has {len(graph.senders)}"
                )
            if scores.isnan().any():
                raise ValueError(f"{int(scores.isnan().sum())} scores are NaN")
        self.graph, self.values = graph, values.detach().cpu().double()
        self.neurons = None if neurons is None else neurons.detach().cpu().double()

    def __getitem__(self, node: str) -> float:
        return float(self.values[self.graph.sender(node)])

    def __repr__(self) -> str:
        neurons = "" if self.neurons is None else f", {self.neurons.numel()} neurons"
        best = int(self.values.abs().argmax())
        largest = f", largest {self.graph.senders[best]} {float(self.values[best]):+.3g}"
        return f"NodeScores({len(self.values)} nodes{neurons}{largest})"

    def draw(self, **options: Any) -> Any:
        """Draw the heads' scores with `bridge.pictures.heads`.

        Args:
            options: options of `bridge.pictures.heads`.

        Raises:
            ImportError: the dependencies of pictures are not installed.
            ValueError: layers with different numbers of heads.
        """
        defaults = {"measure": "score", "title": "Scores of heads"}
        return _drawn_heads(self.graph, self.values, defaults | options)

    @refuse_wrong_types
    def top(self, n: int, absolute: bool = True) -> Circuit:
        """Return the edges between the `n` nodes with the largest scores, and from them to the
        logits.

        Args:
            n, absolute: as for `EdgeScores.top`.

        Raises:
            ValueError: there are fewer than `n`.
        """
        return Circuit(self.graph, _between(self.graph, _first(self.values, n, absolute, "nodes")))

    @refuse_wrong_types
    def top_neurons(self, n: int, absolute: bool = True) -> Circuit:
        """Return the `n` neurons with the largest scores, with the edges between their nodes, and
        to the logits.

        Args:
            n, absolute: as for `EdgeScores.top`.

        Raises:
            ValueError: there are fewer than `n`, or there are no scores of neurons.
        """
        if self.neurons is None:
            raise ValueError(
                "these are scores of nodes alone: `node_attribution` gives those of neurons, too"
            )
        chosen = _first(self.neurons, n, absolute, "neurons")
        return Circuit(self.graph, _between(self.graph, chosen.any(1)), neurons=chosen)


# --------------------------------------------------------------------------------------------------
# Faithfulness of circuits of growing size.
# --------------------------------------------------------------------------------------------------


_NOTHING_TO_TELL = "all of these are in the circuit, or none is: there is nothing to tell apart"


def area_under_rates(scores: Float[Tensor, " one"], right: Bool[Tensor, " one"]) -> float:
    """Return the share of pairs (one true, one false) in which the true one scores higher; ties
    count half.

    Args:
        scores: the score of each item.
        right: a mask of the true items.

    Raises:
        ValueError: all items are true, or none is.
    """
    if right.all() or not right.any():
        raise ValueError(_NOTHING_TO_TELL)
    outside, inside = scores[~right].sort().values, scores[right]
    below = torch.searchsorted(outside, inside) + torch.searchsorted(outside, inside, right=True)
    return float(below.double().mean() / 2 / len(outside))


def _check_shares(shares: Sequence[float]) -> None:
    grow = list(shares) == sorted(set(shares))
    if not shares or not grow or not 0 <= shares[0] <= shares[-1] <= 1:
        raise ValueError(f"shares are {tuple(shares)}; they must grow, from 0 to 1")


#: The shares of edges that the Mechanistic Interpretability Benchmark evaluates.
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@refuse_wrong_types
def faithfulness_curve(
    scores: EdgeScores | NodeScores,
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric,
    ablation: str | Noise | Float[Tensor, "constant d_model"] = "resample",
    shares: Sequence[float] = SHARES,
    choose: str = "top",
    absolute: bool = True,
    reference: Prompts | None = None,
    **model_kwargs: Any,
) -> Curve:
    """Measure the faithfulness of circuits of growing size, whose areas are the benchmark's CPR and
    CMD.

    Args:
        scores: the scores by which circuits are selected.
        bridge, clean, corrupted, metric, ablation, reference, model_kwargs: as for
            `Circuit.evaluate`.
        shares: shares of all edges, or of all nodes or neurons.
        choose: ``"top"`` or ``"greedy"`` edges, or ``"top_nodes"``; of `NodeScores`: ``"top"`` or
            ``"top_neurons"``.
        absolute: as for `EdgeScores.top`.

    Raises:
        ValueError: as `Circuit.evaluate`; or an unknown `choose`; or shares that do not increase
            from 0 to 1.

    Example:
        >>> from bridge.circuits import Curve
        >>> curve = Curve((0.0, 0.5, 1.0), (0.0, 1.0, 1.0))
        >>> curve.cpr, curve.cmd
        (0.75, 0.25)
    """
    _check_shares(shares)
    graph = scores.graph
    n_nodes = len(graph.senders)
    if isinstance(scores, NodeScores):
        n_neurons = 0 if scores.neurons is None else scores.neurons.numel()
        sizes = {"top": n_nodes, "top_neurons": n_neurons}
    else:
        sizes = {"top": graph.n_edges, "greedy": graph.n_edges, "top_nodes": n_nodes}
    check_choice("choose", choose, tuple(sizes))
    pick = getattr(scores, choose)
    # The benchmark's code rounds down, and excludes edges on no path from the embeddings to the
    # logits.
    circuits = [pick(int(share * sizes[choose]), absolute).pruned() for share in shares]
    kept = [(circuit.mask, circuit.neurons) for circuit in circuits]
    pair = ablate(bridge, graph, clean, corrupted, ablation, reference, model_kwargs)
    evaluated = evaluations(bridge, pair, kept, metric)
    faithfulness = tuple(one.faithfulness for one in evaluated)
    prompts = [one.prompts for one in evaluated if one.prompts is not None]
    return Curve(tuple(shares), faithfulness, torch.stack(prompts).cpu() if prompts else None)


@refuse_wrong_types
def joined(curves: Sequence[Curve]) -> Curve:
    """Return the curve of all prompts together, from curves of the same scores for several batches.

    Args:
        curves: curves of the same shares, each from a metric with one number per prompt.

    Raises:
        ValueError: there are no curves, their shares differ, or a metric gave one number for all
            prompts.

    Example:
        >>> import torch
        >>> from bridge.circuits import Curve, joined
        >>> def of(model):
        ...     prompts = torch.tensor([[[model], [0.0], [0.0]], [[model], [0.0], [model]]])
        ...     return Curve((0.0, 1.0), (0.0, 1.0), prompts)
        >>> joined([of(1.0), of(3.0)]).prompts.shape, joined([of(1.0), of(3.0)]).cpr
        (torch.Size([2, 3, 2]), 0.5)
    """
    if not curves or any(curve.shares != curves[0].shares for curve in curves):
        raise ValueError("curves are joined if there are some, all of the same shares")
    batches = [curve.prompts for curve in curves if curve.prompts is not None]
    if len(batches) < len(curves):
        raise ValueError(
            "a metric gave one number for all prompts: give one for each, as"
            " logit_difference(each=True)"
        )
    prompts = torch.cat(batches, -1)
    model, none, circuit = prompts.double().mean(-1).unbind(1)
    if (model == none).any():
        raise ValueError(
            "the metric is the same with every edge and with none: there is nothing for a circuit"
            " to keep"
        )
    faithfulness = (circuit - none) / (model - none)
    return Curve(curves[0].shares, tuple(faithfulness.tolist()), prompts)
