"""Compiled programs: what they compute by hand, the compiler's own stream, and methods scored on
known circuits.
"""

import itertools
import random
from collections import Counter

import pytest
import torch

from bridge import TransformerBridge
from bridge.bases import Neurons
from bridge.circuits import SHARES, EdgeScores, Graph, edge_attribution, edge_effects
from bridge.features import fit_rotation, interchange
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
    for row in torch.cat([task.clean, task.corrupted]):
        tokens = [words[int(i)] for i in row][1:]
        found = task.bridge(row[None])[0, 1:]
        if task.outputs == ("frac_prevs_1",):
            right = [tokens[: i + 1].count("x") / (i + 1) for i in range(4)]
            assert found[:, 0].tolist() == pytest.approx(right, abs=1e-5)
            continue
        said = [task.outputs[i].split(":")[1] for i in found.argmax(-1)]
        name = task.outputs[0].split("_")[0]
        if name in ("either", "most"):
            assert (
                said
                == [
                    str(
                        "x" in tokens or "y" in tokens
                        if name == "either"
                        else tokens.count("x") > 2.5
                    )
                ]
                * 4
            )
            continue
        counts = Counter(tokens)
        reverse, count, in_order = (
            tokens[::-1],
            [str(counts[token]) for token in tokens],
            sorted(tokens),
        )
        assert said == {"reverse": reverse, "hist": count, "sort": in_order}[name]


@pytest.mark.parametrize("method", ["gradient", "inputs", "activations", "exact"])
def test_methods_find_the_known_circuit(task: Compiled, method: str) -> None:
    given = task.bridge, task.clean, task.corrupted, task.metric()
    scores = (
        edge_effects(*given, verbose=False)
        if method == "exact"
        else edge_attribution(*given, method, steps=10)
    )
    name = task.bridge.cfg.model_name
    if name in ("either", "most"):  # see the next test
        return
    assert task.edge_auc(scores) == 1.0
    if task.bridge.cfg.n_layers > 1:  # with one layer all nodes are in the circuit
        assert task.node_auc(scores) == 1.0


def test_what_methods_cannot_find() -> None:
    """Either of two ways is enough: one edge at a time changes nothing. A steep step has no slope
    at its ends.
    """
    areas: dict[str, dict[str, float]] = {}
    for name in ("either", "most"):
        task = compiled(name)
        given = task.bridge, task.clean, task.corrupted, task.metric()
        scores = {
            "exact": edge_effects(*given, verbose=False),
            "gradient": edge_attribution(*given, "gradient"),
            "10 steps": edge_attribution(*given, "inputs", steps=10),
            "100 steps": edge_attribution(*given, "inputs", steps=100),
        }
        areas[name] = {method: task.edge_auc(found) for method, found in scores.items()}
    assert areas["either"]["10 steps"] == areas["either"]["100 steps"] == 1.0
    assert max(areas["either"]["exact"], areas["either"]["gradient"]) < 0.75
    assert areas["most"]["exact"] == areas["most"]["100 steps"] == 1.0
    assert max(areas["most"]["gradient"], areas["most"]["10 steps"]) < 0.75


def test_the_score_of_methods_can_be_bad() -> None:
    task = compiled("sort_unique")
    graph = Graph.of(task.bridge)
    random = torch.rand(
        200, len(graph.receivers), len(graph.senders), generator=torch.Generator().manual_seed(0)
    )
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
    with pytest.raises(
        ValueError, match="there are frac_prevs, reverse, hist, sort_unique, either, most"
    ):
        compiled("sort")


def known_subspace(task: Compiled, variable: str) -> torch.Tensor:
    """The directions in which the values of a categorical variable differ, orthonormal, ``[d_model,
    values - 1]``.
    """
    names = [label.split(":") for label in task.labels]
    values = [
        name == variable and rest not in (["BOS"], ["compiler_pad"]) and bool(rest)
        for name, *rest in names
    ]
    one_hot = torch.eye(len(names))[:, torch.tensor(values)]
    return torch.linalg.svd(one_hot - one_hot.mean(1, keepdim=True)).U[:, : sum(values) - 1]


def test_a_fitted_rotation_finds_the_known_variable() -> None:
    """The last position of `reverse` holds its own token and, after the last layer, the first one:
    the answer.
    """
    task, generator = compiled("reverse"), torch.Generator().manual_seed(0)
    words = [task.vocabulary[word] for word in "abcd"]
    rows = torch.tensor(
        [[task.vocabulary["BOS"], *row] for row in itertools.product(words, repeat=4)]
    )
    base, source = (rows[torch.randint(len(rows), (160,), generator=generator)] for _ in range(2))
    labels = torch.tensor(
        [task.outputs.index(f"reverse_4:{'abcd'[words.index(int(row[1]))]}") for row in source]
    )
    fit = fit_rotation(
        task.bridge,
        base,
        source,
        labels,
        "blocks.3.hook_resid_mid",
        dimension=3,
        steps=100,
        lr=2e-2,
    )
    shares = [
        float((known_subspace(task, name).T @ fit.rotation.columns.detach()).square().sum() / 3)
        for name in ("reverse_4", "tokens")
    ]
    assert fit.accuracy == 1.0 and max(fit.before, *fit.controls.values()) < 0.5, fit
    assert shares[0] > 0.95 and shares[1] < 0.05


def test_a_fitted_rotation_tells_a_variable_from_another_one_at_its_place() -> None:
    """In `sort_unique` the last position asks which token is the largest (its rank), and takes over
    what that is.

    Where the first token is the largest and gets the value of another one, that value is the
    answer, as long as the rank stays. Both are in the stream there.
    """
    task, rng = compiled("sort_unique"), random.Random(0)
    orders = list(itertools.permutations("12345", 4))
    pairs = (
        rng.choices([row for row in orders if row[0] == max(row)], k=160),
        rng.choices(orders, k=160),
    )
    base, source = (
        torch.tensor([[task.vocabulary[word] for word in ("BOS", *row)] for row in rows])
        for rows in pairs
    )
    labels = torch.tensor([task.outputs.index(f"sort_12:{row[0]}") for row in pairs[1]])
    given = task.bridge, base, source, labels, "blocks.1.hook_resid_pre"
    fit = fit_rotation(*given, dimension=4, position=1, steps=100, lr=2e-2)
    shares = [
        float((known_subspace(task, name).T @ fit.rotation.columns.detach()).square().sum() / 4)
        for name in ("tokens", "target_pos_14")
    ]
    assert fit.accuracy == 1.0 and max(fit.before, *fit.controls.values()) < 0.5, fit
    assert shares[0] > 0.85 and shares[1] < 0.1


def test_the_area_under_the_rates_is_the_benchmarks_and_that_of_all_pairs(task: Compiled) -> None:
    """Both counted out by loops; the benchmark's is of greedy circuits of ten sizes, by
    trapezoids.
    """
    graph, known = Graph.of(task.bridge), task.circuit
    values = torch.randn(
        graph.exists.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    scores = EdgeScores(graph, (values * 4).round() + 3 * known.mask)  # with ties
    edges = [(int(receiver), int(sender)) for receiver, sender in graph.exists.nonzero()]
    inside = [abs(float(scores.values[edge])) for edge in edges if known.mask[edge]]
    outside = [abs(float(scores.values[edge])) for edge in edges if not known.mask[edge]]
    if not outside:
        with pytest.raises(ValueError, match="nothing to tell apart"):
            scores.auroc(known)
        return
    pairs = [(one > other) + (one == other) / 2 for one in inside for other in outside]
    assert scores.auroc(known) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)

    true, false = [], []
    for share in SHARES:
        left, chosen = share * len(edges), 0
        while left > 0:
            left, chosen = left - 1, chosen + 1
        mask = scores.greedy(chosen).pruned().mask
        true.append(sum(bool(mask[edge]) for edge in edges if known.mask[edge]) / len(inside))
        false.append(sum(bool(mask[edge]) for edge in edges if not known.mask[edge]) / len(outside))
    steps = range(len(SHARES) - 1)
    area = sum((false[i + 1] - false[i]) / false[-1] * (true[i + 1] + true[i]) / 2 for i in steps)
    assert scores.auroc(known, SHARES) == pytest.approx(area, abs=1e-12)
    for shares in ((0.5, 0.2, 1.0), (0.1, 0.5)):
        with pytest.raises(ValueError, match="shares are"):
            scores.auroc(known, shares)
    with pytest.raises(ValueError, match="the circuit is of"):
        scores.auroc(
            EdgeScores(Graph.of(TransformerBridge.boot_embedded()), torch.zeros(53, 21)).top(1)
        )
