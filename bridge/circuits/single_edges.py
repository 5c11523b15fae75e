"""What one edge alone does to a metric, measured: the edge carries what its sender writes in the corrupted run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from bridge.bridge import TransformerBridge
from bridge.circuits.edge_run import EdgeRun
from bridge.circuits.graph import Graph
from bridge.circuits.metrics import Metric
from bridge.circuits.senders import written_in_both
from bridge.patching.corrupted import CorruptedRun
from bridge.patching.memory import tokens_per_run
from bridge.patching.runs import may_start_later
from bridge.patching.sweep import Job, Patch, Sweep


@torch.no_grad()
def effects_of_edges(
    graph: Graph,
    bridge: TransformerBridge,
    clean: Int[Tensor, "batch pos"],
    corrupted: Int[Tensor, "batch pos"],
    metric: Metric,
    edges: Sequence[str] | None,
    verbose: bool,
) -> Float[Tensor, "receiver sender"]:
    """What `edge_effects` returns as `EdgeScores`; 0 where an edge was not asked for.

    Args:
        graph: the graph of the bridge.
        bridge, clean, corrupted, metric, edges, verbose: as there.
    """
    wanted = graph.exists.nonzero().tolist() if edges is None else [list(graph.edge(edge)) for edge in edges]
    one, other = written_in_both(graph, bridge, clean, corrupted)
    change = other.parts - one.parts
    values = torch.zeros(graph.exists.shape, dtype=torch.float64)
    differs = [part.abs().amax((0, 2)).nonzero().flatten() for part in change]
    wanted = [(receiver, sender) for receiver, sender in wanted if len(differs[sender])]
    with tqdm(total=len(wanted), desc="patching edges", unit="edge", disable=not verbose) as bar:
        run = CorruptedRun(bridge, clean, [0]) if may_start_later(bridge) else None
        base = float(metric(one.logits))
        if run is None or not run.steps:
            for receiver, sender in wanted:
                replaced = torch.zeros_like(graph.exists)
                replaced[receiver, sender] = True
                logits = EdgeRun(graph, bridge, other.parts, replaced[None]).logits(clean)[0]
                values[receiver, sender] = float(metric(logits)) - base
                bar.update()
            return values
        jobs = []
        for index, (receiver, sender) in enumerate(wanted):
            port = graph.port_of[receiver]
            start = int(differs[sender][0]) if run.positions else 0
            which = receiver - port.first if port.per_head else None
            jobs.append(Job(index, bridge.hook_dict[port.name], start, _adding(change[sender], which)))
        size = one.logits.element_size()
        most = tokens_per_run(bridge.cfg, one.logits.device, clean.shape[1], size) // clean.shape[0]
        for job, logits in Sweep(run, lambda length: max(1, most // (length * bridge.cfg.n_heads))).logits(jobs):
            receiver, sender = wanted[job.index]
            values[receiver, sender] = float(metric(logits)) - base
            bar.update()
    return values


def _adding(change: Float[Tensor, "batch pos d_model"], which: int | None) -> Callable[[int], Patch]:
    """A patch that adds to a stream, or to one head's view of it."""

    def of(start: int) -> Patch:
        def add(stream: Tensor) -> Tensor:
            if which is None:
                return stream + change[:, start:]
            stream[:, :, which] += change[:, start:]
            return stream

        return add

    return of
