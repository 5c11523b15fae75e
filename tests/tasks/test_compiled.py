"""Compiled programs: what they compute by hand, the compiler's own stream, and methods scored on known circuits."""

from collections import Counter

import pytest
import torch

from bridge.bases import Neurons
from bridge.circuits import EdgeScores, Graph, edge_attribution, edge_effects
from bridge.features import interchange
from bridge.tasks import Compiled, compiled
from bridge.tasks.compiled import PROGRAMS


@pytest.fixture(scope="module", params=PROGRAMS)
def task(request: pytest.FixtureRequest) -> Compiled:
    return compiled(request.param)


@torch.no_grad()
def test_the_stream_is_the_compilers_own(task: Compiled) -> None:
    name = f"blocks.{task.bridge.cfg.n_layers - 1}.hook_resid_post"
    _, cache = task.bridge.run_with_cache(task.clean[:4], names_filter=name)
    assert float((cache[name] - task.streams).abs().max()) == 0.0
    assert task.streams.shape == (4, 5, len(task.labels)) and task.streams.any()


@torch.no_grad()
def test_the_model_does_what_the_program_says(task: Compiled) -> None:
    words = {i: word for word, i in task.vocabulary.items()}
    for row in task.clean:
        tokens = [words[int(i)] for i in row][1:]
        found = task.bridge(row[None])[0, 1:]
        if task.outputs == ("frac_prevs_1",):
            right = [tokens[: i + 1].count("x") / (i + 1) for i in range(4)]
            assert found[:, 0].tolist() == pytest.approx(right, abs=1e-5)
            continue
        said = [task.outputs[i].split(":")[1] for i in found.argmax(-1)]
        counts = Counter(tokens)
        reverse, count, in_order = tokens[::-1], [str(counts[token]) for token in tokens], sorted(tokens)
        assert said == {"reverse": reverse, "hist": count, "sort": in_order}[task.outputs[0].split("_")[0]]


@pytest.mark.parametrize("method", ["gradient", "inputs", "activations", "exact"])
def test_methods_find_the_known_circuit(task: Compiled, method: str) -> None:
    given = task.bridge, task.clean, task.corrupted, task.metric()
    scores = edge_effects(*given, verbose=False) if method == "exact" else edge_attribution(*given, method, steps=10)
    assert task.edge_auc(scores) == 1.0
    if task.bridge.cfg.n_layers > 1:  # with one layer all nodes are in the circuit
        assert task.node_auc(scores) == 1.0


def test_the_score_of_methods_can_be_bad() -> None:
    task = compiled("sort_unique")
    graph = Graph.of(task.bridge)
    random = torch.rand(200, len(graph.receivers), len(graph.senders), generator=torch.Generator().manual_seed(0))
    by_chance = [task.edge_auc(EdgeScores(graph, values)) for values in random]
    assert sum(by_chance) / len(by_chance) == pytest.approx(0.5, abs=0.05)
    right = edge_effects(task.bridge, task.clean, task.corrupted, task.metric(), verbose=False)
    assert task.edge_auc(EdgeScores(graph, 1 / (right.values.abs() + 1e-3))) == 0.0
    hist = compiled("hist")
    scores = edge_effects(hist.bridge, hist.clean, hist.corrupted, hist.metric(), verbose=False)
    with pytest.raises(ValueError, match="nothing to tell apart"):
        hist.node_auc(scores)


@torch.no_grad()
def test_the_known_variable_carries_the_answer() -> None:
    """`map_3` says of each token whether it is "x": the share is made of that alone."""
    task = compiled("frac_prevs")
    point, at = "blocks.0.hook_resid_post", task.labels.index("map_3")
    with task.bridge.basis(point, "is_x", Neurons(len(task.labels), [at])) as variable:
        found = interchange(task.bridge, task.clean, task.corrupted, variable)
    assert torch.allclose(found, task.bridge(task.corrupted), atol=1e-6)
    others = [i for i in range(len(task.labels)) if i != at]
    with task.bridge.basis(point, "rest", Neurons(len(task.labels), others)) as rest:
        found = interchange(task.bridge, task.clean, task.corrupted, rest)
    assert torch.allclose(found, task.bridge(task.clean), atol=1e-6)


def test_another_program_is_refused() -> None:
    with pytest.raises(ValueError, match="there are frac_prevs, reverse, hist, sort_unique"):
        compiled("sort")
