"""Trained models against the program by hand, the compiled model, and edges that should not
matter.
"""

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bridge.circuits import Graph
from bridge.circuits.edge_runs import run_with_edges_replaced
from bridge.circuits.graph import written
from bridge.tasks import KnownCircuit, compiled, trained
from bridge.tasks.compiled import PROGRAMS
from tools.train_known_circuits import OUT, every_prompt, paths_of, right_answers


@pytest.fixture(scope="module", params=PROGRAMS)
def task(request: pytest.FixtureRequest) -> KnownCircuit:
    return trained(request.param)


def program_of(task: KnownCircuit) -> str:
    return str(task.bridge.cfg.model_name)


def by_hand(program: str, tokens: list[str]) -> list[str] | list[float]:
    """What a program says of some tokens."""
    if program == "frac_prevs":
        return [tokens[: i + 1].count("x") / (i + 1) for i in range(4)]
    counts = Counter(tokens)
    return {
        "reverse": tokens[::-1],
        "hist": [str(counts[token]) for token in tokens],
        "sort_unique": sorted(tokens),
        "either": [str(counts["x"] + counts["y"] > 0)] * 4,
        "most": [str(counts["x"] > 2.5)] * 4,
    }[program]


@torch.no_grad()
def test_each_prompt_there_is_is_answered_as_the_program_says(task: KnownCircuit) -> None:
    program = program_of(task)
    prompts, words = (
        every_prompt(compiled(program), program),
        {i: word for word, i in task.vocabulary.items()},
    )
    assert len(prompts) == {"sort_unique": 120, "reverse": 256, "either": 256}.get(program, 81)
    for row, found in zip(prompts, task.bridge(prompts)[:, 1:], strict=True):
        right = by_hand(program, [words[int(i)] for i in row][1:])
        if program == "frac_prevs":
            assert found[:, 0].tolist() == pytest.approx(right, abs=OFF)
        else:
            assert [task.outputs[i].split(":")[1] for i in found.argmax(-1)] == right


@torch.no_grad()
def test_with_any_edges_replaced_the_answer_is_the_compiled_models(task: KnownCircuit) -> None:
    """A thousand pairs, each with edges of its own; of the circuit's none or half, of the others
    none, half or all.
    """
    program, numbers = program_of(task), torch.Generator().manual_seed(5)
    small = compiled(program)
    prompts, paths = every_prompt(small, program), paths_of(small, program)
    assert {edge for path in paths.values() for edge in path} == task.edges
    models = Graph.of(small.bridge), Graph.of(task.bridge)
    base, source = (
        prompts[torch.randint(len(prompts), (1000,), generator=numbers)] for _ in range(2)
    )
    share, rest = torch.arange(1000) % 2 * 0.5, torch.arange(1000) // 2 % 3 * 0.5
    in_large = (
        torch.rand(1000, *models[1].exists.shape, generator=numbers) < rest[:, None, None]
    ) & models[1].exists
    for edge in sorted(task.edges):
        in_large[(slice(None), *models[1].edge(edge))] = torch.rand(1000, generator=numbers) < share
    in_small = torch.zeros(1000, *models[0].exists.shape)
    for edge, path in paths.items():
        along = torch.stack([in_large[(slice(None), *models[1].edge(one))] for one in path]).any(0)
        in_small[(slice(None), *models[0].edge(edge))] = along.float()
    right, found = (
        answers(one, base, source, replaced)
        for one, replaced in ((small, in_small), (task, in_large.float()))
    )
    assert not torch.equal(right, small.bridge(base)), "nothing of the circuit was replaced"
    assert right_answers(small, found[:, 1:], right[:, 1:]).all()


def answers(task: KnownCircuit, base: Tensor, source: Tensor, replaced: Tensor) -> Tensor:
    """The logits of prompts some of whose edges carry what is written for others."""
    graph = Graph.of(task.bridge)
    other = written(graph, task.bridge, source).parts
    return run_with_edges_replaced(graph, task.bridge, {"input_ids": base}, other, replaced[None])[
        0
    ]


#: By how much an edge outside of the circuit may move a probability (`frac_prevs`: a share), and
#: all of them together.
ONE, ALL = {"frac_prevs": 0.06}, {"frac_prevs": 0.035}
#: How far a share may be from the right one.
OFF = 0.03


@torch.no_grad()
def test_no_other_edge_matters(task: KnownCircuit) -> None:
    """Each edge outside of the circuit alone, and all at once. What is left without the circuit
    says nothing.
    """
    program = program_of(task)
    graph = Graph.of(task.bridge)
    assert graph.n_edges == 479
    usual = said(task, task.bridge(task.clean))
    other = written(graph, task.bridge, task.corrupted).parts
    outside = (graph.exists & ~task.circuit.mask).nonzero()
    replaced = torch.zeros(len(outside) + 1, *graph.exists.shape)
    replaced[torch.arange(len(outside)), outside[:, 0], outside[:, 1]] = 1
    replaced[-1] = (graph.exists & ~task.circuit.mask).float()
    moved = []
    for some in replaced.split(60):
        found = run_with_edges_replaced(graph, task.bridge, {"input_ids": task.clean}, other, some)
        moved += (said(task, found) - usual).abs().flatten(1).amax(1).tolist()
    assert max(moved[:-1]) < ONE.get(program, 0.04) and moved[-1] < ALL.get(program, 0.015)
    alone = task.circuit.evaluate(task.bridge, task.clean, task.corrupted, task.metric())
    assert (
        alone.faithfulness == pytest.approx(1, abs=0.05)
        and abs(alone.complement_faithfulness) < 0.05
    )


def said(task: KnownCircuit, logits: Tensor) -> Tensor:
    """Probabilities, or shares, behind BOS."""
    behind = logits[..., 1:, :]
    return behind if len(task.outputs) == 1 else behind.softmax(-1)


def test_another_program_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no program 'sort'"):
        trained("sort")


def test_a_wheel_without_the_models_says_where_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"source distribution.* folder="):
        trained("hist", folder=tmp_path)
    shutil.copy(OUT / "hist.safetensors", tmp_path)
    assert trained("hist", folder=tmp_path).edges == trained("hist").edges
