"""How well methods tell the edges of known circuits from the others: the tables of docs/bases.md and docs/circuits.md.

python benchmarks/known_circuits.py
"""

from __future__ import annotations

import torch

from bridge.circuits import (
    EdgeScores,
    Graph,
    edge_attribution,
    edge_effects,
    faithfulness_curve,
    information_flow,
    trained_edges,
)
from bridge.tasks import KnownCircuit, compiled, trained
from bridge.tasks.compiled import PROGRAMS, TRAINED

METHODS = {
    "EAP": lambda *given: edge_attribution(*given, "gradient"),
    "EAP-IG (inputs)": lambda *given: edge_attribution(*given, "inputs", steps=10),
    "EAP-IG (activations)": lambda *given: edge_attribution(*given, "activations", steps=10),
    "exact": lambda *given: edge_effects(*given, verbose=False),
}


#: Besides, for models that were trained.
MORE = {
    "EAP-IG (own activations)": lambda *given: edge_attribution(*given, "own_activations", steps=10),
    "clean and corrupted": lambda *given: edge_attribution(*given, "clean_corrupted"),
    "information flow": lambda bridge, clean, corrupted, metric: information_flow(bridge, clean),
}


def sampled(task: KnownCircuit) -> EdgeScores:
    """Uniform gradient sampling, of the square of what an answer is off by."""
    right = task.bridge(task.clean).detach()

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return (logits - right).square().sum(-1).mean()

    return trained_edges(task.bridge, task.clean, task.corrupted, loss, penalty=0.002, steps=150)


def areas(task: KnownCircuit, scores: EdgeScores) -> tuple[float, float]:
    """Of edges and of nodes; where all nodes are in the circuit there is nothing to tell apart."""
    senders = {edge.split("->")[0] for edge in task.edges}
    whole = senders == set(Graph.of(task.bridge).senders)
    return task.edge_auc(scores), float("nan") if whole else task.node_auc(scores)


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    print("|".join(["", "program", "edges, in the circuit", *METHODS, ""]))
    for program in PROGRAMS:
        task: KnownCircuit = compiled(program)
        given = task.bridge, task.clean, task.corrupted, task.metric()
        found = [areas(task, method(*given)) for method in METHODS.values()]
        cells = [" / ".join("–" if value != value else f"{value:.2f}" for value in pair) for pair in found]
        print(f"| `{program}` | {Graph.of(task.bridge).n_edges}, {len(task.edges)} | {' | '.join(cells)} |", flush=True)
    methods = METHODS | MORE
    print("|".join(["", "trained", "edges in the circuit", *methods, "uniform gradient sampling", ""]))
    for program in TRAINED:
        task = trained(program)
        given = task.bridge, task.clean, task.corrupted, task.metric()
        scores = [method(*given) for method in methods.values()] + [sampled(task)]
        cells = []
        for some in scores:
            curve = faithfulness_curve(some, *given, choose="greedy")
            cells.append(f"{task.edge_auc(some):.3f} / {curve.cmd:.3f}")
        print(f"| `{program}` | {len(task.edges)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
