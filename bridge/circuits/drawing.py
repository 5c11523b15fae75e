"""What a picture of a circuit says of each node: where it stands, what it attends to, its direct effect."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.circuits.graph import Graph
from bridge.circuits.metrics import Metric
from bridge.circuits.single_edges import effects_of_edges
from bridge.patching.everything import texts_of

#: What is known of each node.
Facts = dict[str, dict[str, Any]]


def draw(
    graph: Graph,
    edges: Sequence[tuple[str, str, float]],
    nodes: Sequence[str],
    bridge: TransformerBridge | None,
    clean: Int[Tensor, "batch pos"] | None,
    corrupted: Int[Tensor, "batch pos"] | None,
    metric: Metric | str,
    options: Mapping[str, Any],
) -> Any:
    """The picture that `Circuit.draw` returns.

    Args:
        graph: the graph that the circuit is a part of.
        edges: the sender, the receiver and the score of each of its edges.
        nodes: what these connect.
        bridge, clean, corrupted, metric, options: as there.
    """
    pictures = importlib.import_module("bridge.pictures")
    joins = _joins(graph, {sender for sender, _, _ in edges}, {receiver for _, receiver, _ in edges})
    depths = _depths(graph)
    names = {name for sender, receiver, _ in edges for name in (sender, receiver)}
    facts: Facts = {name: {"column": depths[name]} for name in names}
    given: dict[str, Any] = {"joins": joins, "supports": "negative", "measure": "change"}
    given["metric"] = metric if isinstance(metric, str) else _name(metric)
    if bridge is None and clean is None and corrupted is None:
        if not isinstance(metric, str):
            raise ValueError("metric is a function, which is computed in runs: give bridge, clean and corrupted too")
    elif bridge is None or clean is None or corrupted is None or isinstance(metric, str):
        raise ValueError("give bridge, clean, corrupted and metric, a function of logits, together; or none of them")
    else:
        _add_effects(facts, graph, bridge, clean, corrupted, metric)
        _add_patterns(facts, [name for name in nodes if "H" in name], joins, bridge, clean)
        given["tokens"] = texts_of(bridge, clean[0])
    drawn = {name: pictures.CircuitNode(**known) for name, known in facts.items()}
    return pictures.circuit(edges, **(given | {"nodes": drawn} | dict(options)))


def _add_effects(
    facts: Facts,
    graph: Graph,
    bridge: TransformerBridge,
    clean: Int[Tensor, "batch pos"],
    corrupted: Int[Tensor, "batch pos"],
    metric: Metric,
) -> None:
    """What each sender does to the metric by its own edge to the logits."""
    direct = {f"{name}->logits": name for name in graph.senders if name in facts}
    effects = effects_of_edges(graph, bridge, clean, corrupted, metric, list(direct), verbose=False)
    for edge, name in direct.items():
        facts[name]["effect"] = float(effects[graph.edge(edge)])


def _add_patterns(
    facts: Facts,
    heads: list[str],
    joins: Sequence[tuple[str, str]],
    bridge: TransformerBridge,
    clean: Int[Tensor, "batch pos"],
) -> None:
    """What heads attend to, for them and for their inputs."""
    for name, pattern in _patterns(heads, bridge, clean).items():
        for node in {name, *(one for one, head in joins if head == name and "H" in one)} & facts.keys():
            facts[node]["pattern"] = pattern


def _name(metric: Metric) -> str:
    name = getattr(metric, "__name__", "metric")
    return "metric" if name == "<lambda>" else name.replace("_", " ")


@torch.no_grad()
def _patterns(heads: list[str], bridge: TransformerBridge, clean: Int[Tensor, "batch pos"]) -> dict[str, Tensor]:
    """What each head of the circuit attends to in the first prompt."""
    layers = sorted({int(name[1:].split("H")[0]) for name in heads})
    _, cache = bridge.run_with_cache(clean[:1], names_filter=[f"blocks.{i}.attn.hook_pattern" for i in layers])
    found = {}
    for name in heads:
        layer, head = map(int, name[1:].split("H"))
        found[name] = cache[f"blocks.{layer}.attn.hook_pattern"][0, head]
    return found


def _depths(graph: Graph) -> dict[str, int]:
    """A column for each node: of a layer, its heads' inputs, its heads, its MLP."""
    depths = {"embed": 0}
    for name in (*graph.receivers, *graph.senders[1:]):
        layer = len(graph.layers) if name == "logits" else int(name[1:].split("H")[0].split("G")[0].split("M")[0])
        part = 1 if "." in name or name == "logits" else 3 if name.endswith("MLP") else 2
        depths[name] = 3 * layer + part
    return depths


def _joins(graph: Graph, writing: set[str], reading: set[str]) -> list[tuple[str, str]]:
    """Each head that writes, with those of its inputs that are read through."""
    return [
        (graph.receivers[receiver], sender)
        for sender, inputs in zip(graph.senders, graph.inputs, strict=True)
        for receiver in inputs
        if sender in writing and graph.receivers[receiver] in reading and graph.receivers[receiver] != sender
    ]
