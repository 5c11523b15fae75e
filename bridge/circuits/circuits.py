"""Circuits: which edges of a model's graph a behaviour needs, and how much of it they keep.

What comes in: a bridge, pairs of clean and corrupted prompts, and a metric of logits. What goes out: a score for each
edge (`EdgeScores`), some of the edges (`Circuit`), and how faithful these are (`Evaluation`, `Curve`).

The mechanism, in order:

1. `Graph.of` (`bridge.circuits.graph`): heads and MLPs write to the residual stream, and each reads the sum of what
   was written before. So from each writer there is an edge to each later reader; queries, keys and values read apart.
2. `written_in_both` takes two runs apart into what each writer wrote, and tries that the parts sum to the stream.
3. Scores (`bridge.circuits.attribution`): by how much the metric changes if an edge carries what its writer wrote in
   the corrupted run. Measured, a patch of what the reader reads (`edge_effects`); or estimated from gradients
   (`edge_attribution`).
4. `EdgeScores.top`, `greedy` and `threshold` choose circuits by scores.
5. `run_with_edges_replaced` (`bridge.circuits.edge_runs`) runs a model in which all other edges carry something else;
   `evaluations` measures the metric of circuits and of all that is outside of them. `OwnKeys`: where the graph's query
   heads have keys that the model has for a group, each row runs once for each head of a group.

It refuses a model whose stream is no plain sum, or a part of which has no input of its own; pairs of other shapes;
edges that do not exist. It knows nothing of features in a basis; pictures it asks for when one is drawn.
"""

from __future__ import annotations

import heapq
import importlib
import io
import json
import math
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from adapters.sealed import read_file, sealed
from bridge.bridge import TransformerBridge
from bridge.circuits.edge_runs import (
    Curve,
    Evaluation,
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
from bridge.hooks.arguments import check_choice, check_positive, refuse_wrong_types
from bridge.patching.patching import texts_of
from bridge.run.inputs import Prompts, prompts_with

# ----------------------------------------------------------------------------------------------------------------------
# What a picture of a circuit says of each node: where it stands, what it attends to, its direct effect.
# ----------------------------------------------------------------------------------------------------------------------


def _name(metric: Metric) -> str:
    name = getattr(metric, "__name__", "metric")
    return "metric" if name == "<lambda>" else name.replace("_", " ")


@torch.no_grad()
def _patterns(
    heads: list[str], joins: Sequence[tuple[str, str]], bridge: TransformerBridge, clean: dict[str, Any]
) -> dict[str, Tensor]:
    """What each head of the circuit attends to in the first prompt, for it and for its inputs."""
    places = {head: tuple(map(int, head[1:].split("H"))) for head in heads}
    # With images all rows run: the model alone knows which of them belong to the first.
    first = {"input_ids": clean["input_ids"][:1]} if len(clean) == 1 else clean
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in sorted({layer for layer, _ in places.values()})]
    _, cache = bridge.run_with_cache(first, names_filter=names)
    found = {name: cache[f"blocks.{layer}.attn.hook_pattern"][0, head] for name, (layer, head) in places.items()}
    return found | {one: found[head] for one, head in joins if "H" in one}


def _depth(graph: Graph, name: str) -> int:
    """A column for a node: of a layer, its heads' inputs, its heads, its MLP."""
    if name in ("embed", "logits"):
        return 0 if name == "embed" else 3 * len(graph.layers) + 1
    (layer, *_) = re.findall(r"\d+", name)
    return 3 * int(layer) + (1 if "." in name else 3 if name.endswith("MLP") else 2)


def _joins(graph: Graph, edges: Sequence[tuple[str, str, float]]) -> list[tuple[str, str]]:
    """Each head that writes, with those of its inputs that are read through."""
    writing, reading, _ = (set(column) for column in zip(*edges, strict=True)) if edges else ((), (), ())
    return [
        (graph.receivers[receiver], sender)
        for sender, inputs in zip(graph.senders, graph.inputs, strict=True)
        for receiver in inputs
        if sender in writing and graph.receivers[receiver] in reading and graph.receivers[receiver] != sender
    ]


def _mib_name(name: str) -> str:
    """What the benchmark calls a sender or a receiver."""
    found = re.fullmatch(r"L(\d+)(?:MLP|H(\d+)(?:\.([qkv]))?)", name)
    if found is None:
        return "input" if name == "embed" else name
    layer, head, letter = found.groups()
    return f"m{layer}" if head is None else f"a{layer}.h{head}" + (f"<{letter}>" if letter else "")


def _mib_rows(graph: Graph, sender: int) -> int | slice:
    """Whose neurons the benchmark's JSON has at a sender: for a head those of all heads of its layer."""
    of_one = next(some for some in graph.writes.values() if some.start <= sender < some.stop)
    return of_one if graph.senders[sender].count("H") else sender


def _mib_graph(config: dict[str, Any]) -> Graph:
    """The graph of a model that the benchmark has."""
    heads = config["n_heads"]
    return Graph([LayerShape(heads, heads, True, bool(config["parallel_attn_mlp"]))] * config["n_layers"])


def _mib_edges(graph: Graph) -> dict[str, tuple[int, int]]:
    """Receiver and sender of each edge, by the benchmark's name."""
    senders, receivers = ([_mib_name(name) for name in names] for names in (graph.senders, graph.receivers))
    return {f"{senders[j]}->{receivers[i]}": (i, j) for i, j in graph.exists.nonzero().tolist()}


def _unpickled(content: bytes) -> Any:
    """The tensors of a file.

    Raises:
        ValueError: it is none of torch's.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError("torch.save did not write it, or it is damaged") from error


def _of_tensors(found: Any) -> dict[str, Any]:
    """The benchmark's tensors, as its JSON has them.

    Raises:
        ValueError: they are not those.
    """
    wanted = {"cfg", "src_nodes", "dst_nodes", "edges_scores", "edges_in_graph"}
    if not isinstance(found, dict) or not wanted <= found.keys():
        raise ValueError(f"the benchmark's has {', '.join(sorted(wanted))}")
    shape = [len(found["src_nodes"]), len(found["dst_nodes"])]
    if any(list(found[name].shape) != shape for name in ("edges_scores", "edges_in_graph")):
        raise ValueError(f"its tensors have not the shape {shape} of its nodes")
    graph, edges = _mib_graph(found["cfg"]), {}
    for edge in _mib_edges(graph):
        sender, receiver = edge.split("->")
        at = found["src_nodes"].index(sender), found["dst_nodes"].index(receiver)
        edges[edge] = {"score": float(found["edges_scores"][at]), "in_graph": bool(found["edges_in_graph"][at])}
    nodes: dict[str, dict[str, Any]] = {name: {} for name in found["src_nodes"]}
    if "neurons_in_graph" in found:
        for row, name in enumerate(map(_mib_name, graph.senders)):
            nodes[name]["neurons"] = found["neurons_in_graph"][_mib_rows(graph, row)].tolist()
    return {"cfg": found["cfg"], "nodes": nodes, "edges": edges}


_FORMAT = "transformer-bridge circuit"
_VERSION = 1


class Circuit:
    """Some edges of a graph, with their scores.

    Args:
        graph: the graph.
        mask: which edges, ``[receiver, sender]``.
        scores: of the edges; None: 0 for all.
        neurons: which coordinates of what a sender writes its edges have, ``[sender, d_model]``; None: all.

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

    @refuse_wrong_types
    def __init__(
        self,
        graph: Graph,
        mask: Bool[Tensor, "receiver sender"],
        scores: Float[Tensor, "receiver sender"] | None = None,
        neurons: Bool[Tensor, "sender d_model"] | None = None,
    ) -> None:
        if neurons is not None and len(neurons) != len(graph.senders):
            raise ValueError(f"neurons are of {len(neurons)} senders; this graph has {len(graph.senders)}")
        if mask.shape != graph.exists.shape:
            raise ValueError(f"the mask has shape {list(mask.shape)}; this graph needs {list(graph.exists.shape)}")
        if (mask & ~graph.exists).any():
            receiver, sender = (int(i) for i in (mask & ~graph.exists).nonzero()[0])
            raise ValueError(f"there is no edge {graph.edge_name(receiver, sender)}")
        self.graph, self.mask = graph, mask.clone()
        self.neurons = None if neurons is None else neurons.cpu().clone()
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
        """Its part of all edges; an edge of which some neurons are in it counts by their share."""
        return share_of(self.graph, self.mask, self.neurons)

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
        """All other edges.

        Raises:
            ValueError: a circuit of neurons, whose complement has other neurons of other edges.
        """
        if self.neurons is not None:
            raise ValueError("the complement of a circuit of neurons has no one set of neurons for each sender")
        return Circuit(self.graph, self.graph.exists & ~self.mask, self.scores)

    def pruned(self) -> Circuit:
        """The circuit without edges that are on no way from the embeddings to the logits."""
        graph, mask = self.graph, self.mask.clone()
        if self.neurons is not None:
            mask &= self.neurons.any(1)
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
                return Circuit(graph, mask, self.scores, self.neurons)
            mask = left

    @refuse_wrong_types
    def evaluate(
        self,
        bridge: TransformerBridge,
        clean: Prompts,
        corrupted: Prompts,
        metric: Metric,
        ablation: str | Float[Tensor, "constant d_model"] = "resample",
        reference: Prompts | None = None,
        **model_kwargs: Any,
    ) -> Evaluation:
        """How much of the model's behaviour the circuit has, and how much its complement.

        Every other edge carries what the ablation puts in its sender's place: of the corrupted run (``"resample"``),
        the mean over prompts, position by position (``"mean"``), nothing (``"zero"``, the embeddings included), or
        constants, a vector for each sender, such as `optimal_constants`.
        Edges of the circuit carry what their senders write in this very run. Biases of output projections are no
        edges and stay, and so does what else a model adds to the stream, as features of an image.

        Args:
            bridge: the bridge.
            clean, corrupted: pairs of prompts, ``[batch, pos]``, or what a processor gives.
            metric: from logits ``[batch, pos, d_vocab]`` to one number, or one for each prompt.
            ablation: see above.
            reference: for ``"mean"``: the prompts that the mean is over, ``[rows, pos]``; None: the corrupted ones.
            model_kwargs: what else the model takes with both prompts of a pair, such as ``pixel_values=``. Where each
                has its own, and for `reference`, give prompts as a processor gives them.

        Raises:
            ValueError: an unknown ablation; prompts of different lengths, or whose masks differ; a mean at a position
                where what it is over has padding alone; a circuit of another model, or training mode; something
                besides heads and MLPs differs between the streams of a pair.

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
        return evaluations(
            self.graph, [(self.mask, self.neurons)], bridge, clean, corrupted, metric, ablation, reference, model_kwargs
        )[0]

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
        """One constant for each sender that harms the circuit least when all other edges carry it: optimal ablation.

        Means and zeros throw a model off by being unusual; what is left with the best constants is what the edges carry
        (Li and Janson 2024, "Optimal Ablation for Interpretability"). They are trained by Adam from the senders' means,
        in units of their spread; those of the step with the least loss are returned.

        Args:
            bridge: the bridge, in evaluation mode.
            prompts: what they are trained on, ``[batch, pos]``, or what a processor gives. Evaluate on others.
            loss: from logits to one number that is to be small; None: the divergence from the whole model's next tokens
                at each prompt's last token.
            steps: of training.
            rate: of learning.
            model_kwargs: what else the model takes with the prompts.

        Returns:
            The constants, for ``evaluate(ablation=)``.

        Raises:
            ValueError: a circuit of another model, training mode, no step, a rate that is not positive and finite, a
                loss that is not finite or has no gradient.
            RuntimeError: in inference mode, which makes no gradients.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.circuits import edge_attribution
            >>> from bridge.tasks import embedded_pairs
            >>> bridge = TransformerBridge.boot_embedded()
            >>> pairs = embedded_pairs(bridge, "ioi", 4)
            >>> scores = edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric())
            >>> circuit = scores.greedy(100)
            >>> constants = circuit.optimal_constants(bridge, pairs.clean, steps=3)
            >>> found = circuit.evaluate(bridge, pairs.clean, pairs.corrupted, pairs.metric(), constants)
        """
        graph_of(bridge, self.graph)
        refuse_another_width(self.neurons, bridge)
        check_positive("steps", steps)
        check_rate(rate)
        refuse_inference_mode("optimal_constants")
        given = prompts_with(bridge, prompts, model_kwargs)
        wrote, counted = written(self.graph, bridge, given), token_mask(given)
        refuse_another_sum(bridge, wrote)
        loss, parts = loss or divergence_at_last_tokens(wrote.logits, given), wrote.parts
        means = mean_of(parts, counted, (1, 2))
        sizes = mean_of((parts - means).square(), counted, (1, 2)).mean(-1, keepdim=True).sqrt()
        moved = torch.zeros_like(means, requires_grad=True)
        optimizer, least, best = torch.optim.Adam([moved], lr=rate), torch.inf, moved.detach().clone()
        replaced = (self.graph.exists & ~self.mask)[None]
        partly = None if self.neurons is None else (self.mask[None], ~self.neurons[None])
        if not replaced.any() and partly is None:  # nothing carries a constant
            return means[:, 0, 0].to(parts.dtype)
        with torch.enable_grad():
            for _ in range(steps):
                constants = (means + sizes * moved).to(parts.dtype)
                (logits,) = run_with_edges_replaced(self.graph, bridge, given, constants, replaced, partly)
                found = one_number(loss, logits)
                if not found.isfinite():
                    raise ValueError(f"loss is {found.item()}: constants are trained to make a finite number small")
                if found.item() < least:
                    least, best = found.item(), moved.detach().clone()
                (moved.grad,) = gradients_of("loss", found, [moved])
                optimizer.step()
        return (means + sizes * best)[:, 0, 0].to(parts.dtype)

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
        if self.neurons is not None:
            content["d_model"] = self.neurons.shape[1]
            content["neurons"] = [row.nonzero().flatten().tolist() for row in self.neurons]
        Path(path).write_text(sealed(content), encoding="utf-8")

    @refuse_wrong_types
    def to_mib(self, path: str | Path, bridge: TransformerBridge) -> None:
        """Writes the circuit, with the scores of all edges, as the Mechanistic Interpretability Benchmark reads it.

        That is what EAP-IG's ``Graph.from_json`` reads: nodes ``input``, ``a3.h2``, ``m3``; edges ``a0.h1->a3.h2<q>``;
        or, by the name of the file, the tensors of its ``Graph.from_pt``.

        Args:
            path: the file, ``.json`` or ``.pt``.
            bridge: the model of the circuit.

        Raises:
            ValueError: another kind of file; a circuit of another model; one with grouped keys, or with a layer without
                heads or MLP, for which that graph has no nodes.

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
                "the benchmark's graph has an MLP and as many heads in each layer, all with keys of their own: "
                f"{bridge.cfg.model_name} has not (if its keys are grouped, take Graph.of(bridge, grouped=False))"
            )
        if not self.scores.isfinite().all():
            raise ValueError("a score is not finite, which the file cannot hold")
        used = {graph.senders.index(name) for name in self.nodes if name != "logits"}
        config = {
            "n_layers": len(graph.layers), "n_heads": first.heads, "parallel_attn_mlp": first.parallel,
            "d_model": bridge.cfg.d_model,
        }  # fmt: skip
        senders, receivers = ([_mib_name(name) for name in names] for names in (graph.senders, graph.receivers))
        if path.suffix == ".pt":
            nodes = torch.tensor([at in used for at in range(len(senders))])
            tensors = {
                "cfg": config, "src_nodes": senders, "dst_nodes": receivers, "nodes_in_graph": nodes,
                "edges_scores": self.scores.T.float().contiguous(), "edges_in_graph": self.mask.T.contiguous(),
            }  # fmt: skip
            if self.neurons is not None:
                tensors |= {"neurons_in_graph": self.neurons, "neurons_scores": torch.zeros(self.neurons.shape)}
            torch.save(tensors, path)
            return
        said: dict[str, dict[str, Any]] = {name: {"in_graph": at in used} for at, name in enumerate(senders)}
        said["logits"] = {"in_graph": bool(self.mask[-1].any())}
        if self.neurons is not None:
            for at, name in enumerate(senders):
                said[name]["neurons"] = self.neurons[_mib_rows(graph, at)].tolist()
        edges = {
            edge: {"score": float(self.scores[at]), "in_graph": bool(self.mask[at])}
            for edge, at in _mib_edges(graph).items()
        }
        content = {"cfg": config, "nodes": said, "edges": edges}
        path.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    @refuse_wrong_types
    def load(cls, path: str | Path) -> Circuit:
        """Reads what `save` or `to_mib` wrote, or what the benchmark's own code writes.

        Args:
            path: the file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is no circuit, or damaged, or of another version.

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
            return read_file(path, "circuit", lambda found: cls._of_mib(_of_tensors(found)), _unpickled)
        return read_file(path, "circuit", cls._of_file)

    @classmethod
    def _of_file(cls, content: dict[str, Any]) -> Circuit:
        if {"cfg", "nodes", "edges"} <= content.keys():
            return cls._of_mib(content)
        if content.get("format") != _FORMAT:
            raise ValueError("`Circuit.save` did not write it")
        if content["version"] != _VERSION:
            raise ValueError(f"it is of version {content['version']}; this package reads version {_VERSION}")
        graph = Graph.from_dict(content["layers"])
        mask = torch.zeros_like(graph.exists)
        scores = torch.zeros(mask.shape, dtype=torch.float64)
        for sender, receiver, score in content["edges"]:
            at = graph.edge(f"{sender}->{receiver}")
            mask[at], scores[at] = True, score
        neurons = None
        if "neurons" in content:
            neurons = torch.zeros(len(content["neurons"]), content["d_model"], dtype=torch.bool)
            for row, some in zip(neurons, content["neurons"], strict=True):
                row[some] = True
        return cls(graph, mask, scores, neurons)

    @classmethod
    def _of_mib(cls, content: dict[str, Any]) -> Circuit:
        config = content["cfg"]
        graph = _mib_graph(config)
        known, edges = _mib_edges(graph), content["edges"]
        if different := sorted(known.keys() ^ edges.keys()):
            raise ValueError(f"its edges are not those of its model: {different[0]} is in one of them alone")
        mask, scores = torch.zeros_like(graph.exists), torch.zeros(graph.exists.shape, dtype=torch.float64)
        for edge, at in known.items():
            there, score = edges[edge]["in_graph"], float(edges[edge]["score"])
            if not isinstance(there, bool) or not math.isfinite(score):
                raise ValueError(f"{edge} has the score {score}, and is in the graph: {there!r}")
            mask[at], scores[at] = there, score
        rows = [content["nodes"][_mib_name(name)].get("neurons") for name in graph.senders]
        if all(row is None for row in rows):
            return cls(graph, mask, scores)
        neurons = torch.zeros(len(rows), config["d_model"], dtype=torch.bool)
        for sender, row in enumerate(rows):
            where = _mib_rows(graph, sender)
            if row is None or torch.tensor(row).shape != neurons[where].shape:
                raise ValueError(f"the neurons of {graph.senders[sender]} are not {list(neurons[where].shape)}")
            neurons[where] = torch.tensor(row).bool()
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
        """A picture of the circuit, by `bridge.pictures.circuit`: depth from left to right, heads with their inputs.

        Blue edges are those without which the metric falls (their score is negative). With a bridge and prompts, a
        click on a node, in HTML, shows what its head attends to in the first clean prompt, and its direct effect: by
        how much the metric changes if what it sends straight to the logits is that of the corrupted run.

        Args:
            bridge: the bridge.
            clean, corrupted: pairs of prompts, ``[batch, pos]``, or what a processor gives.
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
        graph, edges = self.graph, self.edges
        pictures = importlib.import_module("bridge.pictures")
        joins = _joins(graph, edges)
        names = dict.fromkeys(name for sender, receiver, _ in edges for name in (sender, receiver))
        given: dict[str, Any] = {"joins": joins, "supports": "negative", "measure": "change"}
        given["metric"] = metric if isinstance(metric, str) else _name(metric)
        effects: dict[str, float] = {}
        patterns: dict[str, Tensor] = {}
        if bridge is None and clean is None and corrupted is None:
            if not isinstance(metric, str):
                raise ValueError(
                    "metric is a function, which is computed in runs: give bridge, clean and corrupted too"
                )
        elif bridge is None or clean is None or corrupted is None or isinstance(metric, str):
            raise ValueError(
                "give bridge, clean, corrupted and metric, a function of logits, together; or none of them"
            )
        else:
            direct = {name: f"{name}->logits" for name in graph.senders if name in names}
            found = effects_of_edges(graph, bridge, clean, corrupted, metric, [*direct.values()], False, {})
            effects = {name: float(found[graph.edge(edge)]) for name, edge in direct.items()}
            prompts = prompts_with(bridge, clean, {})
            patterns = _patterns([name for name in self.nodes if "H" in name], joins, bridge, prompts)
            given["tokens"] = texts_of(bridge, prompts["input_ids"][0])
        given["nodes"] = {
            name: pictures.CircuitNode(column=_depth(graph, name), effect=effects.get(name), pattern=patterns.get(name))
            for name in names
        }
        return pictures.circuit(edges, **(given | options))

    def __eq__(self, other: object) -> bool:
        if not (isinstance(other, Circuit) and self.graph == other.graph and torch.equal(self.mask, other.mask)):
            return False
        if self.neurons is None or other.neurons is None:
            return self.neurons is other.neurons
        return torch.equal(self.neurons, other.neurons)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        neurons = "" if self.neurons is None else f", {int(self.neurons.sum())} of {self.neurons.numel()} neurons"
        return f"Circuit({self.n_edges} of {self.graph.n_edges} edges{neurons})"


# ----------------------------------------------------------------------------------------------------------------------
# Scores of all edges, and the circuits that they choose.
# ----------------------------------------------------------------------------------------------------------------------


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
        chosen = torch.zeros_like(self.graph.exists)
        chosen[self.graph.exists] = _first(self.flat, n, absolute, "edges")
        return self._circuit(chosen)

    @refuse_wrong_types
    def greedy(self, n: int, absolute: bool = True) -> Circuit:
        """`n` edges, each the best of those that lead into what is chosen already, from the logits backwards.

        So every edge has a way to the logits (the greedy search of Hanna et al. 2024).

        Args:
            n, absolute: as for `top`.

        Raises:
            ValueError: there are not so many.
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
        """How well the scores tell a known circuit's edges from the others: the area under the curve of both rates.

        1: every edge of the circuit has a larger score, of either sign, than every other; 0.5: as by chance.

        Args:
            known: the circuit.
            shares: of all edges, such as `SHARES`: the area is that under the greedy circuits of these sizes, as in the
                code of the Mechanistic Interpretability Benchmark (rounded up, from the first circuit on). None: over
                all pairs of an edge in the circuit and one that is not; ties count half.

        Raises:
            ValueError: a circuit of another graph, or with all edges or none; shares that do not grow to 1.

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
        chosen = [self.greedy(math.ceil(share * len(right))).pruned().mask[edges] for share in shares]
        false, true = (torch.stack([found[which].double().mean() for found in chosen]) for which in (~right, right))
        return float(torch.trapezoid(true, false / false[-1]))

    @property
    def nodes(self) -> dict[str, float]:
        """What each head and MLP counts: the sum over the edges that leave it.

        All that reads a node reads it through an edge. So of scores from gradients this is the gradient at the node's
        output times its difference: attribution patching of nodes (NAP, and NAP-IG of `"inputs"` and `"activations"`).
        """
        return dict(zip(self.graph.senders, self.values.sum(0).tolist(), strict=True))

    @refuse_wrong_types
    def top_nodes(self, n: int, absolute: bool = True) -> Circuit:
        """The edges between the `n` nodes that count most (see `nodes`), and from them to the logits.

        Args:
            n, absolute: as for `top`.

        Raises:
            ValueError: there are not so many.
        """
        return self._circuit(_between(self.graph, _first(self.values.sum(0), n, absolute, "nodes")))

    def _circuit(self, mask: Bool[Tensor, "receiver sender"]) -> Circuit:
        return Circuit(self.graph, mask, self.values)


def _first(counts: Tensor, n: int, absolute: bool, what: str) -> Bool[Tensor, "..."]:
    """Which `n` of some numbers are the largest, of either sign, or the most negative.

    Raises:
        ValueError: there are not so many.
    """
    _check_number(n, counts.numel(), what)
    chosen = torch.zeros(counts.numel(), dtype=torch.bool)
    chosen[_rank(counts, absolute).flatten().sort(descending=True, stable=True).indices[:n]] = True
    return chosen.view(counts.shape)


def _check_number(n: int, there: int, what: str) -> None:
    if not 0 <= n <= there:
        raise ValueError(f"n is {n}; there are {there} {what}")


def _rank(counts: Tensor, absolute: bool) -> Tensor:
    return counts.abs() if absolute else -counts


def _between(graph: Graph, chosen: Bool[Tensor, " sender"]) -> Bool[Tensor, "receiver sender"]:
    """The edges between some nodes, and from them to the logits."""
    reading = torch.zeros(len(graph.receivers), dtype=torch.bool)
    own = [i for sender in chosen.nonzero().flatten().tolist() for i in graph.inputs[sender]]
    reading[[len(graph.receivers) - 1, *own]] = True
    return graph.exists & chosen & reading[:, None]


class NodeScores:
    """A number for every head and MLP, or for every coordinate of what each writes (its neurons).

    Args:
        graph: the graph.
        values: of the nodes, ``[sender]``.
        neurons: of their neurons, ``[sender, d_model]``; None: nothing is known of them.

    Raises:
        ValueError: there are not as many as senders, or a score is no number.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import Graph, NodeScores
        >>> scores = NodeScores(Graph.of(TransformerBridge.boot_embedded()), torch.arange(21.0))
        >>> scores["L3MLP"], scores.top(3).nodes
        (20.0, ['L3H2', 'L3H3', 'L3MLP', 'logits'])
    """

    @refuse_wrong_types
    def __init__(
        self, graph: Graph, values: Float[Tensor, " sender"], neurons: Float[Tensor, "sender d_model"] | None = None
    ) -> None:
        for given in (values, neurons):
            if given is not None and len(given) != len(graph.senders):
                raise ValueError(f"there are scores of {len(given)} nodes; this graph has {len(graph.senders)}")
            if given is not None and given.isnan().any():
                raise ValueError(f"{int(given.isnan().sum())} scores are NaN")
        self.graph, self.values = graph, values.detach().cpu().double()
        self.neurons = None if neurons is None else neurons.detach().cpu().double()

    def __getitem__(self, node: str) -> float:
        return float(self.values[self.graph.sender(node)])

    def __repr__(self) -> str:
        neurons = "" if self.neurons is None else f", {self.neurons.numel()} neurons"
        return f"NodeScores({len(self.values)} nodes{neurons})"

    @refuse_wrong_types
    def top(self, n: int, absolute: bool = True) -> Circuit:
        """The edges between the `n` nodes that count most, and from them to the logits.

        Args:
            n, absolute: as for `EdgeScores.top`.

        Raises:
            ValueError: there are not so many.
        """
        return Circuit(self.graph, _between(self.graph, _first(self.values, n, absolute, "nodes")))

    @refuse_wrong_types
    def top_neurons(self, n: int, absolute: bool = True) -> Circuit:
        """The `n` neurons that count most, with the edges between the nodes that have some, and to the logits.

        Args:
            n, absolute: as for `EdgeScores.top`.

        Raises:
            ValueError: there are not so many, or no scores of neurons.
        """
        if self.neurons is None:
            raise ValueError("these are scores of nodes alone: `node_attribution` gives those of neurons, too")
        chosen = _first(self.neurons, n, absolute, "neurons")
        return Circuit(self.graph, _between(self.graph, chosen.any(1)), neurons=chosen)


# ----------------------------------------------------------------------------------------------------------------------
# Faithfulness of circuits of growing size.
# ----------------------------------------------------------------------------------------------------------------------


_NOTHING_TO_TELL = "all of these are in the circuit, or none is: there is nothing to tell apart"


def area_under_rates(scores: Float[Tensor, " one"], right: Bool[Tensor, " one"]) -> float:
    """The share of pairs (one right, one not) in which the right one has the larger score; ties count half.

    Args:
        scores: of each.
        right: which are right.

    Raises:
        ValueError: all are right, or none is.
    """
    if right.all() or not right.any():
        raise ValueError(_NOTHING_TO_TELL)
    outside, inside = scores[~right].sort().values, scores[right]
    below = torch.searchsorted(outside, inside) + torch.searchsorted(outside, inside, right=True)
    return float(below.double().mean() / 2 / len(outside))


def _check_shares(shares: Sequence[float]) -> None:
    if not shares or not shares[0] >= 0 or not shares[-1] <= 1 or list(shares) != sorted(set(shares)):
        raise ValueError(f"shares are {tuple(shares)}; they must grow, from 0 to 1")


#: The shares of the edges at which the Mechanistic Interpretability Benchmark looks.
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@refuse_wrong_types
def faithfulness_curve(
    scores: EdgeScores | NodeScores,
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric,
    ablation: str | Float[Tensor, "constant d_model"] = "resample",
    shares: Sequence[float] = SHARES,
    choose: str = "top",
    absolute: bool = True,
    reference: Prompts | None = None,
    **model_kwargs: Any,
) -> Curve:
    """The faithfulness of circuits of growing size, whose areas are the benchmark's CPR and CMD.

    Args:
        scores: what the circuits are chosen by.
        bridge, clean, corrupted, metric, ablation, reference, model_kwargs: as for `Circuit.evaluate`.
        shares: parts of all edges, or of all nodes or neurons.
        choose: ``"top"`` or ``"greedy"`` edges, or ``"top_nodes"``; of `NodeScores`: ``"top"`` or ``"top_neurons"``.
        absolute: as for `EdgeScores.top`.

    Raises:
        ValueError: as `Circuit.evaluate`; or an unknown way to choose; or shares that do not grow from 0 to 1.

    Example:
        >>> from bridge.circuits import Curve
        >>> curve = Curve((0.0, 0.5, 1.0), (0.0, 1.0, 1.0))
        >>> curve.cpr, curve.cmd
        (0.75, 0.25)
    """
    _check_shares(shares)
    graph = scores.graph
    whole = {"top": graph.n_edges, "greedy": graph.n_edges, "top_nodes": len(graph.senders)}
    if isinstance(scores, NodeScores):
        whole = {"top": len(graph.senders), "top_neurons": 0 if scores.neurons is None else scores.neurons.numel()}
    check_choice("choose", choose, tuple(whole))
    pick = getattr(scores, choose)
    # The benchmark's code rounds down, and leaves out what is on no way from the embeddings to the logits.
    circuits = [pick(int(share * whole[choose]), absolute).pruned() for share in shares]
    kept = [(circuit.mask, circuit.neurons) for circuit in circuits]
    found = evaluations(graph, kept, bridge, clean, corrupted, metric, ablation, reference, model_kwargs)
    each = [one.prompts for one in found if one.prompts is not None]
    return Curve(tuple(shares), tuple(one.faithfulness for one in found), torch.stack(each).cpu() if each else None)


@refuse_wrong_types
def joined(curves: Sequence[Curve]) -> Curve:
    """The curve of all prompts together, from curves of the same scores for several batches of them.

    Args:
        curves: of the same shares, each with a metric that gives a number for each prompt.

    Raises:
        ValueError: there are none, their shares differ, or a metric gave one number for all prompts.

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
    each = [curve.prompts for curve in curves if curve.prompts is not None]
    if len(each) < len(curves):
        raise ValueError("a metric gave one number for all prompts: give one for each, as logit_difference(each=True)")
    prompts = torch.cat(each, -1)
    model, none, circuit = prompts.double().mean(-1).unbind(1)
    if (model == none).any():
        raise ValueError("the metric is the same with every edge and with none: there is nothing for a circuit to keep")
    return Curve(curves[0].shares, tuple(((circuit - none) / (model - none)).tolist()), prompts)
