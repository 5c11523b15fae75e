"""Trains models with norms and superposition to compute programs by known circuits: `bridge/tasks/programs/trained`.

    python -m tools.train_known_circuits [PROGRAM ...]

Strict interchange training (Gupta et al. 2024, "InterpBench: Semi-Synthetic Transformers for Evaluating Mechanistic
Interpretability Techniques"), of edges: what the compiled model's parts do is given to parts of a larger model. Some of
the circuit's edges carry, in both models, what their senders write for another prompt, and any of the larger model's
other edges do so, too. The larger model learns to answer as the compiled one does. So each edge of the circuit carries
what the program says, and no other edge carries anything that matters. Minutes for each program on one core.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bridge import TransformerBridge
from bridge.circuits import Graph
from bridge.circuits.edge_runs import run_with_edges_replaced
from bridge.circuits.graph import written
from bridge.native import NativeConfig
from bridge.tasks.compiled import TRAINED, Compiled, compiled

#: Which part of the larger model does what a part of the compiled one does.
PARTS = {
    "frac_prevs": {"L0MLP": "L0MLP", "L1H0": "L2H1"},
    "reverse": {"L3H0": "L2H3"},
    "hist": {"L0H0": "L1H2", "L0MLP": "L2MLP"},
    "sort_unique": {"L0H0": "L0H1", "L0MLP": "L1MLP", "L1H0": "L3H0"},
    "either": {"L0MLP": "L0MLP", "L1H0": "L1H0", "L1H1": "L1H3", "L1MLP": "L2MLP", "L2MLP": "L3MLP"},
    "most": {"L0MLP": "L0MLP", "L1H0": "L2H2", "L1MLP": "L3MLP"},
}
ROWS, STEPS, RATE = 128, 2000, 2e-3
#: Some need more.
LONGER = {"either": 4000}
OUT = Path(__file__).parents[1] / "bridge" / "tasks" / "programs" / "trained"


def shape(task: Compiled) -> dict[str, Any]:
    """What the larger model is made of."""
    cfg = task.bridge.cfg
    return {
        "n_layers": 4, "d_model": 64, "n_heads": 4, "d_head": 16, "d_mlp": 64, "n_ctx": cfg.n_ctx,
        "d_vocab": cfg.d_vocab, "d_vocab_out": len(task.outputs), "act_fn": "gelu", "normalization_type": "LN",
    }  # fmt: skip


def model_of(program: str, facts: dict[str, Any], seed: int = 0) -> TransformerBridge:
    """An untrained model for a program: four layers with norms, as wide as `facts` say."""
    return TransformerBridge.boot_native(
        NativeConfig(
            **facts, attention_dir="bidirectional", model_name=program, default_prepend_bos=False, seed=seed
        )
    )  # fmt: skip


def edges_of(task: Compiled, program: str) -> dict[str, str]:
    """The larger model's edge for each edge of the compiled one."""
    parts = {"embed": "embed", "logits": "logits", **PARTS[program]}

    def moved(name: str) -> str:
        part, dot, letter = name.partition(".")
        return parts[part] + dot + letter

    return {edge: "->".join(map(moved, edge.split("->"))) for edge in task.edges}


def prompts(task: Compiled, program: str, rows: int, numbers: torch.Generator) -> torch.Tensor:
    """Random ones. Tokens of ``sort_unique`` are all different."""
    words = torch.tensor([i for word, i in task.vocabulary.items() if word not in ("BOS", "compiler_pad")])
    length = task.clean.shape[1] - 1
    if program == "sort_unique":
        drawn = torch.rand(rows, len(words), generator=numbers).argsort(1)[:, :length]
    else:
        shares = torch.rand(rows, len(words), generator=numbers) ** 2  # so that rare answers are not rare
        drawn = torch.multinomial(shares + 1e-3, length, replacement=True, generator=numbers)
    return torch.cat([torch.full((rows, 1), task.vocabulary["BOS"]), words[drawn]], 1)


class Training:
    """A larger model, and how far it is from doing as the compiled one does."""

    def __init__(self, program: str, task: Compiled, bridge: TransformerBridge) -> None:
        self.program, self.task, self.bridge = program, task, bridge
        self.small, self.large = Graph.of(task.bridge), Graph.of(bridge)
        pairs = edges_of(task, program).items()
        self.own = torch.tensor([self.small.edge(edge) for edge, _ in pairs]).T
        self.given = torch.tensor([self.large.edge(edge) for _, edge in pairs]).T
        self.others = self.large.exists.clone()
        self.others[tuple(self.given)] = False

    def distance(self, numbers: torch.Generator, rows: int, share: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """The mean square between both models' answers, for each row.

        Args:
            numbers: what prompts and edges are drawn by.
            rows: how many prompts.
            share: for each row, how many of the circuit's edges are replaced.
            others: and of all other edges.
        """
        base, source = (prompts(self.task, self.program, rows, numbers) for _ in range(2))
        chosen = torch.rand(rows, self.own.shape[1], generator=numbers) < share[:, None]
        right = self.answers(self.task.bridge, self.small, self.own, chosen, base, source, None)
        more = (torch.rand(rows, *self.others.shape, generator=numbers) < others[:, None, None]) & self.others
        found = self.answers(self.bridge, self.large, self.given, chosen, base, source, more)
        return (found - right).square().sum(-1)[:, 1:].mean(1)  # nothing is asked at BOS

    def answers(
        self,
        bridge: TransformerBridge,
        graph: Graph,
        edges: torch.Tensor,
        chosen: torch.Tensor,
        base: torch.Tensor,
        source: torch.Tensor,
        more: torch.Tensor | None,
    ) -> torch.Tensor:
        """The logits of prompts in which chosen edges, and `more`, carry what is written for other prompts."""
        other = written(graph, bridge, source, gradients=more is not None)
        replaced = torch.zeros(1, len(base), *graph.exists.shape)
        replaced[0, :, edges[0], edges[1]] = chosen.float()
        if more is not None:
            replaced[0] += more
        with torch.set_grad_enabled(more is not None and torch.is_grad_enabled()):
            return run_with_edges_replaced(graph, bridge, {"input_ids": base}, other.parts, replaced)[0]


def train(program: str) -> None:
    """Trains, prints how far the model is from the compiled one, and writes it."""
    steps = LONGER.get(program, STEPS)
    task, started = compiled(program), time.perf_counter()
    facts = shape(task)
    bridge = model_of(program, facts)
    training, numbers = Training(program, task, bridge), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(bridge.original_model.parameters(), lr=RATE, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    levels = torch.tensor([0.0, 0.5, 1.0])
    for step in range(steps):
        share = torch.tensor([0.0, 0.5, 0.5])[torch.randint(3, (ROWS,), generator=numbers)]
        others = levels[torch.randint(3, (ROWS,), generator=numbers)]
        loss = training.distance(numbers, ROWS, share, others).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(bridge.original_model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 500 == 0 or step == steps - 1:
            print(f"{program} {step}: {loss.item():.5f}, {time.perf_counter() - started:.0f} s", flush=True)
    check = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for own, rest in ((0.0, 0.0), (0.0, 1.0), (0.5, 0.5), (1.0, 0.0)):
            n = 1000
            far = training.distance(check, n, torch.full((n,), own), torch.full((n,), rest))
            print(f"  replaced {own} of the circuit, {rest} of the rest: {far.mean():.5f}, at most {far.max():.4f}")
    write(program, facts, list(edges_of(task, program).values()), bridge.original_model.state_dict())


def write(program: str, facts: dict[str, Any], edges: list[str], weights: dict[str, torch.Tensor]) -> None:
    """Writes what `bridge.tasks.trained` reads, in half precision."""
    header = {"facts": json.dumps(facts), "edges": json.dumps(sorted(edges))}
    OUT.mkdir(exist_ok=True)
    halves = {name: value.half().contiguous() for name, value in weights.items()}
    save_file(halves, OUT / f"{program}.safetensors", header)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or TRAINED:
        train(name)
