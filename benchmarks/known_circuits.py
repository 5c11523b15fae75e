"""How well methods tell the edges and nodes of known circuits from the others: the table of docs/bases.md.

python benchmarks/known_circuits.py
"""

from __future__ import annotations

import torch

from bridge.circuits import EdgeScores, Graph, edge_attribution, edge_effects
from bridge.tasks import Compiled, compiled
from bridge.tasks.compiled import PROGRAMS

METHODS = {
    "EAP": lambda *given: edge_attribution(*given, "gradient"),
    "EAP-IG (inputs)": lambda *given: edge_attribution(*given, "inputs", steps=10),
    "EAP-IG (activations)": lambda *given: edge_attribution(*given, "activations", steps=10),
    "exact": lambda *given: edge_effects(*given, verbose=False),
}


def areas(task: Compiled, scores: EdgeScores) -> tuple[float, float]:
    """Of edges and of nodes; where all nodes are in the circuit there is nothing to tell apart."""
    senders = {edge.split("->")[0] for edge in task.edges}
    whole = senders == set(Graph.of(task.bridge).senders)
    return task.edge_auc(scores), float("nan") if whole else task.node_auc(scores)


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    print("|".join(["", "program", "edges, in the circuit", *METHODS, ""]))
    for program in PROGRAMS:
        task = compiled(program)
        given = task.bridge, task.clean, task.corrupted, task.metric()
        found = [areas(task, method(*given)) for method in METHODS.values()]
        cells = [" / ".join("–" if value != value else f"{value:.2f}" for value in pair) for pair in found]
        print(f"| `{program}` | {Graph.of(task.bridge).n_edges}, {len(task.edges)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
