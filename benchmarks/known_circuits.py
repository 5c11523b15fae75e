"""How well methods tell the edges of known circuits from the others: the tables of docs/bases.md
and docs/circuits.md.

python benchmarks/known_circuits.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bridge.circuits import (
    EdgeScores,
    Graph,
    NodeScores,
    edge_attribution,
    edge_effects,
    faithfulness_curve,
    information_flow,
    node_attribution,
    node_effects,
    trained_edges,
)
from bridge.circuits.circuits import area_under_rates
from bridge.tasks import KnownCircuit, compiled, trained
from bridge.tasks.compiled import PROGRAMS

METHODS = {
    "EAP": lambda *given: edge_attribution(*given, "gradient"),
    "EAP-IG (inputs)": lambda *given: edge_attribution(*given, "inputs", steps=10),
    "EAP-IG (activations)": lambda *given: edge_attribution(*given, "activations", steps=10),
    "exact": lambda *given: edge_effects(*given, verbose=False),
}


#: Besides, for models that were trained.
MORE = {
    "EAP-IG, own activations": lambda *given: edge_attribution(*given, "own_activations", steps=10),
    "clean and corrupted": lambda *given: edge_attribution(*given, "clean_corrupted"),
    "EAP-IG (inputs), means": lambda *given: edge_attribution(
        *given, "inputs", steps=10, ablation="mean"
    ),
    "EAP-IG (inputs), zeros": lambda *given: edge_attribution(
        *given, "inputs", steps=10, ablation="zero"
    ),
    "exact, means": lambda *given: edge_effects(*given, verbose=False, ablation="mean"),
    "exact, zeros": lambda *given: edge_effects(*given, verbose=False, ablation="zero"),
    "information flow": lambda bridge, clean, corrupted, metric: information_flow(bridge, clean),
}

#: Of nodes.
NODES = {
    "NAP": lambda *given: node_attribution(*given, "gradient"),
    "NAP-IG (inputs)": lambda *given: node_attribution(*given, "inputs", steps=10),
    "NAP-IG (activations)": lambda *given: node_attribution(*given, "activations", steps=10),
    "clean and corrupted": lambda *given: node_attribution(*given, "clean_corrupted"),
    "exact": lambda *given: node_effects(*given),
}


def sampled(task: KnownCircuit) -> EdgeScores:
    """Uniform gradient sampling, of how far answers are off: of the way to the corrupted prompts'
    answers.
    """
    with torch.no_grad():
        right = task.bridge(task.clean)
        way = (right - task.bridge(task.corrupted)).square().mean()

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return (logits - right).square().mean() / way

    return trained_edges(task.bridge, task.clean, task.corrupted, loss, penalty=0.01, steps=150)


def areas(task: KnownCircuit, scores: EdgeScores) -> tuple[float, float]:
    """Of edges and of nodes; where all nodes are in the circuit there is nothing to tell apart."""
    senders = {edge.split("->")[0] for edge in task.edges}
    whole = senders == set(Graph.of(task.bridge).senders)
    return task.edge_auc(scores), float("nan") if whole else task.node_auc(scores)


def of_edges(task: KnownCircuit, method: Callable[..., EdgeScores] | None) -> str:
    """A cell: the area, how many of the circuit are among as many best edges, and the CMD of greedy
    circuits.
    """
    given = task.bridge, task.clean, task.corrupted, task.metric()
    scores = sampled(task) if method is None else method(*given)
    among = int((scores.top(len(task.edges)).mask & task.circuit.mask).sum())
    curve = faithfulness_curve(scores, *given, choose="greedy")
    return f"{task.edge_auc(scores):.3f}, {among}, {curve.cmd:.3f}"


def of_nodes(task: KnownCircuit, method: Callable[..., NodeScores]) -> str:
    """A cell: the area, and how many of the circuit are among as many best nodes."""
    scores = method(task.bridge, task.clean, task.corrupted, task.metric())
    inside, counts = task.circuit.mask.any(0), scores.values.abs()
    among = int(inside[counts.topk(int(inside.sum())).indices].sum())
    return f"{area_under_rates(counts, inside):.3f}, {among} of {int(inside.sum())}"


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    print("|".join(["", "program", "edges, in the circuit", *METHODS, ""]))
    for program in PROGRAMS:
        task: KnownCircuit = compiled(program)
        given = task.bridge, task.clean, task.corrupted, task.metric()
        found = [areas(task, method(*given)) for method in METHODS.values()]
        cells = [
            " / ".join("–" if value != value else f"{value:.2f}" for value in pair)
            for pair in found
        ]
        print(
            f"| `{program}` | {Graph.of(task.bridge).n_edges}, {len(task.edges)} |"
            f" {' | '.join(cells)} |",
            flush=True,
        )
    tasks = [trained(program) for program in PROGRAMS]
    heading = "|".join(
        [
            "",
            "scores",
            *(
                f" `{program}`, {len(task.edges)}"
                for program, task in zip(PROGRAMS, tasks, strict=True)
            ),
            "",
        ]
    )
    print(
        "\nTrained models: of edges, area, how many of the circuit's n are among the best n,"
        f" CMD\n{heading}"
    )
    for name, method in {**METHODS, **MORE, "uniform gradient sampling": None}.items():
        print(f"| {name} | {' | '.join(of_edges(task, method) for task in tasks)} |", flush=True)
    print(f"\nTrained models: of nodes, area, and how many\n{heading}")
    for name, method in NODES.items():
        print(f"| {name} | {' | '.join(of_nodes(task, method) for task in tasks)} |", flush=True)


if __name__ == "__main__":
    main()
