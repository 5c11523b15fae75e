"""Graphs, choosing circuits, their faithfulness, JSON, pictures."""

import json
import sys
import types

import pytest
import torch

from bridge import TransformerBridge
from bridge.circuits import (
    Circuit,
    Curve,
    EdgeScores,
    Graph,
    LayerShape,
    edge_attribution,
    edge_effects,
    faithfulness_curve,
    information_flow,
    kl_divergence,
    logit_difference,
    mean_outputs,
)
from bridge.circuits.circuits import _depth, _joins
from bridge.circuits.edge_runs import Evaluation
from bridge.circuits.graph import written
from bridge.tasks import embedded_pairs
from tests.circuits.by_hand import ByHand
from tests.conftest import tiny, torch_hooks
from tests.tiny_models import tiny_model


def scores_of(graph, seed=0):
    return EdgeScores(
        graph, torch.randn(graph.exists.shape, generator=torch.Generator().manual_seed(seed))
    )


def test_the_graph_of_gpt2_small_has_the_edges_that_papers_count():
    graph = Graph([LayerShape(12, 12, True, False)] * 12)
    assert (graph.n_edges, len(graph.senders)) == (32491, 157)


def test_grouped_keys_and_parallel_blocks():
    llama, neox = (
        Graph.of(TransformerBridge(tiny("llama"))),
        Graph.of(TransformerBridge(tiny("gpt_neox"))),
    )
    assert "L1G1.k" in llama.receivers and "L1H2.k" not in llama.receivers
    assert [llama.receivers[i] for i in llama.receivers_named("L1H2")] == [
        "L1H2.q",
        "L1G1.k",
        "L1G1.v",
    ]
    assert [llama.receivers[i] for i in llama.receivers_named("L1H1")] == [
        "L1H1.q",
        "L1G0.k",
        "L1G0.v",
    ]
    llama.edge("L1H0->L1MLP")
    with pytest.raises(ValueError, match="L1H0 writes after L1MLP has read"):
        neox.edge("L1H0->L1MLP")
    assert neox.exists.sum() < Graph.of(TransformerBridge(tiny("gpt2"))).exists.sum()


def test_threshold_top_and_greedy(graph):
    scores = scores_of(graph)
    ranked = scores.values.abs()[graph.exists].sort(descending=True).values
    top = scores.top(40)
    assert top.n_edges == 40 and [abs(edge[2]) for edge in top.edges] == pytest.approx(
        ranked[:40].tolist()
    )
    assert scores.threshold(float(ranked[39])) == top
    worst = scores.top(7, absolute=False)
    assert [edge[2] for edge in worst.edges] == pytest.approx(
        scores.flat.sort().values[:7].tolist()
    )
    assert (
        scores.top(graph.n_edges).n_edges == graph.n_edges == scores.greedy(graph.n_edges).n_edges
    )
    assert scores.top(0).n_edges == 0
    greedy = scores.greedy(40)
    # By hand: the best edge into what is reached, again and again.
    reached, chosen = {"logits"}, set()
    for _ in range(40):
        options = [
            (float(scores.values[r, s].abs()), graph.senders[s], graph.receivers[r])
            for r, s in graph.exists.nonzero().tolist()
            if graph.receivers[r] in reached
            and (graph.senders[s], graph.receivers[r]) not in chosen
        ]
        _, sender, receiver = max(options)
        chosen.add((sender, receiver))
        if sender != "embed":
            reached |= {graph.receivers[i] for i in graph.receivers_named(sender)}
    assert {edge[:2] for edge in greedy.edges} == chosen
    with pytest.raises(ValueError, match=f"n is 99999; there are {graph.n_edges} edges"):
        scores.greedy(99999)


def test_scores_by_name(graph):
    scores = scores_of(graph)
    assert scores["embed->L1H2.k"] == scores.values[graph.receivers.index("L1H2.k"), 0]


def test_pruning(graph):
    ways = ["embed->L0H1.v", "L0H1->L1MLP", "L1MLP->L2H0.q", "L2H0->logits"]
    dead = ["embed->L1H1.q", "L0H2->L1MLP", "L1H3->logits", "L1H1->L2H2.v"]
    found = Circuit.of_edges(graph, ways + dead).pruned()
    assert found == Circuit.of_edges(graph, ways)
    assert found.nodes == ["embed", "L0H1", "L1MLP", "L2H0", "logits"]
    assert Circuit.of_edges(graph, dead).pruned().n_edges == 0


def test_faithfulness_by_hand(gpt2, graph, clean, corrupted, metric):
    circuit = scores_of(graph).top(graph.n_edges // 2)
    hand = ByHand(gpt2.original_model, graph)
    mask = {(receiver, sender) for sender, receiver, _ in circuit.edges}
    every = {(graph.receivers[r], graph.senders[s]) for r, s in graph.exists.nonzero().tolist()}
    with torch.no_grad():
        hand(corrupted)
        wrote = dict(hand.wrote)
        sources = {
            "resample": wrote,
            "mean": {
                name: value.mean(0, keepdim=True).expand_as(value) for name, value in wrote.items()
            },
            "zero": {name: torch.zeros_like(value) for name, value in wrote.items()},
        }
        model = metric(hand(clean)).item()
        for ablation, other in sources.items():
            parts = [every, every - mask, mask]
            ablated, alone, without = (
                metric(hand(clean, replaced=part, other=other)).item() for part in parts
            )
            found = circuit.evaluate(gpt2, clean, corrupted, metric, ablation)
            assert (found.model, found.ablated) == pytest.approx((model, ablated))
            assert (found.circuit, found.complement) == pytest.approx((alone, without))
            assert found.faithfulness == pytest.approx((alone - ablated) / (model - ablated))
            assert found.complement_faithfulness == pytest.approx(
                (without - ablated) / (model - ablated)
            )
    assert found.share == circuit.n_edges / graph.n_edges
    assert circuit.evaluate(gpt2, clean, corrupted, metric).ablated == pytest.approx(
        metric(gpt2(corrupted)).item()
    )


def test_optimal_constants(gpt2, graph, clean, corrupted, metric):
    """They are put in the senders' places, and harm less than means and zeros do, which are where
    they could stay.
    """
    circuit = scores_of(graph).top(graph.n_edges // 2)
    constants = torch.randn(
        len(graph.senders), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    hand = ByHand(gpt2.original_model, graph)
    every = {(graph.receivers[r], graph.senders[s]) for r, s in graph.exists.nonzero().tolist()}
    other = {name: constants[at].expand(*clean.shape, -1) for at, name in enumerate(graph.senders)}
    with torch.no_grad():
        right = metric(
            hand(clean, replaced=every - {(r, s) for s, r, _ in circuit.edges}, other=other)
        ).item()
    assert circuit.evaluate(gpt2, clean, corrupted, metric, constants).circuit == pytest.approx(
        right
    )
    with torch.no_grad():
        divergence = kl_divergence(gpt2(clean))
    losses = {}
    best = circuit.optimal_constants(gpt2, clean, steps=60, rate=0.1)
    means = written(graph, gpt2, clean).parts.mean((1, 2))
    for name, ablation in {"best": best, "means": means, "zero": "zero"}.items():
        losses[name] = circuit.evaluate(gpt2, clean, corrupted, divergence, ablation).circuit
    assert losses["best"] < 0.5 * min(losses["means"], losses["zero"]) and not best.requires_grad
    assert torch.equal(
        circuit.optimal_constants(gpt2, clean, steps=1), means
    )  # the first step is the means themselves
    assert (
        all(parameter.grad is None for parameter in gpt2.parameters())
        and torch_hooks(gpt2.original_model) == 0
    )
    with pytest.raises(ValueError, match=r"ablation has shape \[3, 32\]"):
        circuit.evaluate(gpt2, clean, corrupted, metric, constants[:3])
    with pytest.raises(ValueError, match="rate is 0"):
        circuit.optimal_constants(gpt2, clean, rate=0.0)


def test_the_mean_over_other_prompts(gpt2, graph, clean, corrupted, metric):
    reference = torch.randint(0, 61, (5, 5), generator=torch.Generator().manual_seed(9))
    none = Circuit.of_edges(graph, [])
    found = none.evaluate(gpt2, clean, corrupted, metric, "mean", reference)
    end = written(graph, gpt2, reference).parts[:, :, :].mean(1).sum(0)
    hand = ByHand(gpt2.original_model, graph)
    with torch.no_grad():
        biases = sum(block.attn.c_proj.bias for block in gpt2.original_model.transformer.h)
        logits = hand.model.lm_head(hand.model.transformer.ln_f(end + biases)).expand(2, -1, -1)
    assert found.ablated == pytest.approx(metric(logits).item())
    # Two runs, which some processors add up in another order.
    assert found.circuit == pytest.approx(found.ablated, rel=1e-12)


def test_curves():
    curve = Curve((0.0, 0.1, 0.5, 1.0), (0.0, 0.5, 1.5, 1.0))
    assert curve.cpr == pytest.approx(0.1 * 0.25 + 0.4 * 1.0 + 0.5 * 1.25)
    assert curve.cmd == pytest.approx(0.1 * 0.75 + 0.4 * 0.5 + 0.5 * 0.25)


def test_the_curve_of_scores(gpt2, graph, clean, corrupted, metric):
    scores = scores_of(graph)
    found = faithfulness_curve(
        scores, gpt2, clean, corrupted, metric, shares=(0.1, 0.5, 1.0), choose="greedy"
    )
    right = [
        scores.greedy(int(share * graph.n_edges))
        .evaluate(gpt2, clean, corrupted, metric)
        .faithfulness
        for share in (0.1, 0.5, 1.0)
    ]
    assert found.faithfulness == pytest.approx(right) and right[-1] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="they must grow"):
        faithfulness_curve(scores, gpt2, clean, corrupted, metric, shares=(0.5, 0.1))
    with pytest.raises(ValueError, match="choose is 'best'"):
        faithfulness_curve(scores, gpt2, clean, corrupted, metric, choose="best")


def test_cpr_and_cmd_are_the_benchmarks(gpt2, graph, hand, clean, corrupted, metric):
    """Its code in float64: as many edges as the share, rounded down; trapezoids between the
    shares.
    """
    scores = scores_of(graph)
    shares = tuple(
        (k + 0.7) / graph.n_edges for k in range(10, 260, 25)
    )  # that would be rounded up
    found = faithfulness_curve(scores, gpt2, clean, corrupted, metric, shares=shares)
    order = sorted(
        graph.exists.nonzero().tolist(), key=lambda at: -abs(float(scores.values[tuple(at)]))
    )
    with torch.no_grad():
        whole, other = metric(hand(clean)), metric(hand(corrupted))
        hand(corrupted)
        wrote = dict(hand.wrote)
        right = []
        for share in shares:
            cut = order[int(share * len(order)) :]
            pairs = {(graph.receivers[receiver], graph.senders[sender]) for receiver, sender in cut}
            right.append(
                float((metric(hand(clean, replaced=pairs, other=wrote)) - other) / (whole - other))
            )
    assert found.faithfulness == pytest.approx(right, abs=1e-9)
    steps = list(zip(shares, shares[1:], right, right[1:], strict=False))
    assert found.cpr == pytest.approx(sum((b - a) * (x + y) / 2 for a, b, x, y in steps), abs=1e-9)
    assert found.cmd == pytest.approx(
        sum((b - a) * (abs(1 - x) + abs(1 - y)) / 2 for a, b, x, y in steps), abs=1e-9
    )


def test_circuits_of_nodes(gpt2, graph, clean, corrupted, metric):
    scores = scores_of(graph)
    counts = {
        name: sum(
            scores[f"{name}->{reader}"] for reader in graph.receivers if exists(graph, name, reader)
        )
        for name in graph.senders
    }
    assert scores.nodes == pytest.approx(counts)
    best = sorted(counts, key=lambda name: -abs(counts[name]))[:5]
    circuit = scores.top_nodes(5)
    right = {
        (name, reader)
        for name in best
        for reader in graph.receivers
        if exists(graph, name, reader) and (reader == "logits" or reader.split(".")[0] in best)
    }
    assert {(sender, receiver) for sender, receiver, _ in circuit.edges} == right
    curve = faithfulness_curve(
        scores, gpt2, clean, corrupted, metric, shares=(0.4, 1.0), choose="top_nodes"
    )
    alone = scores.top_nodes(int(0.4 * len(counts))).evaluate(gpt2, clean, corrupted, metric)
    assert curve.faithfulness == pytest.approx((alone.faithfulness, 1.0))
    with pytest.raises(ValueError, match="n is 99; there are 16 nodes"):
        scores.top_nodes(99)


def exists(graph, sender, receiver):
    return bool(graph.exists[graph.receiver(receiver), graph.sender(sender)])


def test_evaluation_refuses(gpt2, graph, clean, corrupted, metric):
    circuit = scores_of(graph).top(5)
    with pytest.raises(ValueError, match="ablation is 'median'"):
        circuit.evaluate(gpt2, clean, corrupted, metric, "median")
    with pytest.raises(ValueError, match="reference prompts are for the mean"):
        circuit.evaluate(gpt2, clean, corrupted, metric, "zero", clean)
    with pytest.raises(ValueError, match="reference prompts have 4 tokens"):
        circuit.evaluate(gpt2, clean, corrupted, metric, "mean", clean[:, :4])
    with pytest.raises(ValueError, match="and this model is"):
        circuit.evaluate(TransformerBridge(tiny("gpt_neox")), clean, corrupted, metric)
    with pytest.raises(ValueError, match="nothing for a circuit to keep"):
        _ = Evaluation(1.0, 1.0, 1.0, 1.0, 0.5).faithfulness
    with pytest.raises(ValueError, match="there is no edge L0H0->L0H0"):
        Circuit(graph, torch.ones_like(graph.exists))


def test_json(graph, tmp_path):
    circuit = scores_of(graph).top(30)
    path = tmp_path / "circuit.json"
    circuit.save(path)
    again = Circuit.load(path)
    assert again == circuit and again.edges == circuit.edges and again.graph == graph
    content = json.loads(path.read_text())
    content["edges"][0][1] = "L9MLP"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="its checksum is another"):
        Circuit.load(path)
    del content["checksum of this file"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="no receiver 'L9MLP'"):
        Circuit.load(path)
    path.write_text(json.dumps(content | {"version": 99}))
    with pytest.raises(ValueError, match="version 99"):
        Circuit.load(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="holds no circuit"):
        Circuit.load(path)


def test_drawing(graph, embedded, monkeypatch):
    circuit = scores_of(graph).top(3)
    drawing = types.SimpleNamespace(
        circuit=lambda edges, **options: (edges, options), CircuitNode=types.SimpleNamespace
    )
    monkeypatch.setitem(sys.modules, "bridge.pictures", drawing)
    edges, options = circuit.draw(width=4)
    assert edges == circuit.edges and options.pop("width") == 4
    assert (
        options.keys() == {"nodes", "joins", "supports", "measure", "metric"}
        and options["metric"] == "metric"
    )
    assert circuit.draw(metric="loss")[1]["metric"] == "loss"
    pairs = embedded_pairs(embedded, "ioi", 2)
    with pytest.raises(ValueError, match="give bridge, clean and corrupted too"):
        circuit.draw(metric=pairs.metric())
    with pytest.raises(ValueError, match="together; or none of them"):
        circuit.draw(embedded, pairs.clean)


@torch.no_grad()
def test_a_drawing_knows_direct_effects_and_patterns(embedded, monkeypatch):
    drawing = types.SimpleNamespace(
        circuit=lambda edges, **options: options, CircuitNode=types.SimpleNamespace
    )
    monkeypatch.setitem(sys.modules, "bridge.pictures", drawing)
    pairs = embedded_pairs(embedded, "ioi", 2)
    metric = pairs.metric()
    names = ["embed->L0H1.v", "L0H1->L2H0.q", "L2H0->logits", "embed->L3MLP", "L3MLP->logits"]
    given = Circuit.of_edges(Graph.of(embedded), names).draw(
        embedded, pairs.clean, pairs.corrupted, metric
    )
    assert given["metric"] == "logit difference" and given["tokens"] == embedded.to_str_tokens(
        pairs.clean[0]
    )
    nodes = given["nodes"]
    # By hand: what head 0 of layer 2 writes is taken from the corrupted run, in the last stream
    # alone.
    _, clean = embedded.run_with_cache(pairs.clean)
    _, corrupted = embedded.run_with_cache(pairs.corrupted)

    def written(cache):
        return cache["z", 2][:, :, 0] @ embedded.W_O[2, 0]

    end = clean["blocks.3.hook_resid_post"] + written(corrupted) - written(clean)
    wanted = metric(embedded(end, start_at_layer=4)) - metric(embedded(pairs.clean))
    assert (
        nodes["L2H0"].effect == pytest.approx(float(wanted), abs=1e-4) and abs(float(wanted)) > 1e-3
    )
    for name in ("L2H0", "L2H0.q"):
        assert torch.equal(nodes[name].pattern, clean["pattern", 2][0, 0])
    assert nodes["L3MLP"].pattern is None and nodes["logits"].effect is None


def test_the_shipped_models_circuit(embedded):
    """The figures that docs/circuits.md states, with room for another machine's rounding."""
    from bridge.circuits import edge_attribution, edge_effects

    pairs = embedded_pairs(embedded, "ioi", 8)
    metric = pairs.metric()
    exact = edge_effects(embedded, pairs.clean, pairs.corrupted, metric, verbose=False)
    scores = edge_attribution(embedded, pairs.clean, pairs.corrupted, metric)
    assert torch.corrcoef(torch.stack([scores.flat, exact.flat]))[0, 1] > 0.97
    top = exact.values.abs().flatten().topk(20).indices
    assert torch.equal(scores.values.flatten()[top].sign(), exact.values.flatten()[top].sign())
    found = scores.greedy(48).evaluate(embedded, pairs.clean, pairs.corrupted, metric)
    assert found.faithfulness > 0.85 and abs(found.complement_faithfulness) < 0.05
    other = (
        scores_of(exact.graph).greedy(48).evaluate(embedded, pairs.clean, pairs.corrupted, metric)
    )
    assert other.faithfulness < 0.3


def joins(circuit: Circuit) -> list[tuple[str, str]]:
    return _joins(circuit.graph, circuit.edges)


def test_a_drawing_joins_heads_with_their_inputs_and_goes_by_layers(embedded):
    names = [
        "embed->L0H1.v",
        "L0H1->L2H0.q",
        "L0MLP->L2H0.k",
        "L2H0->L3MLP",
        "L3MLP->logits",
        "embed->L1H0.v",
    ]
    circuit = Circuit.of_edges(Graph.of(embedded), names)
    assert joins(circuit) == [
        ("L0H1.v", "L0H1"),
        ("L2H0.q", "L2H0"),
        ("L2H0.k", "L2H0"),
    ]  # nothing reads L1H0
    order = ["embed", "L0H1.v", "L0H1", "L0MLP", "L2H0.q", "L2H0", "L3MLP", "logits"]
    columns = {
        name: _depth(circuit.graph, name)
        for name in (*circuit.graph.senders, *circuit.graph.receivers)
    }
    assert [columns[name] for name in order] == sorted({columns[name] for name in order})
    assert columns["L2H0.q"] == columns["L2H0.k"] and columns["logits"] == max(columns.values())


def test_a_drawing_of_grouped_keys():
    graph = Graph([LayerShape(4, 2, True, False)] * 2)
    circuit = Circuit.of_edges(graph, ["embed->L0G1.v", "L0H2->logits", "L0H3->logits"])
    assert joins(circuit) == [("L0G1.v", "L0H2"), ("L0G1.v", "L0H3")]
    assert _depth(graph, "L0G1.v") < _depth(graph, "L0H2")


def test_the_benchmarks_file_is_written_and_read(gpt2, graph, tmp_path):
    circuit, file = scores_of(graph).top(7), tmp_path / "circuit.json"
    circuit.to_mib(file, gpt2)
    again = Circuit.load(file)
    assert again == circuit and torch.equal(again.scores, circuit.scores)
    said = json.loads(file.read_text())
    score = circuit.edges[0][2]
    kept = {edge for edge, about in said["edges"].items() if about["in_graph"]}
    assert len(kept) == 7 and len(said["edges"]) == graph.n_edges
    assert {"input->a0.h0<q>", "a0.h1->m0", "m1->logits"} <= said["edges"].keys()
    assert said["nodes"].keys() >= {"input", "a1.h1", "m0", "logits"}
    assert any(said["edges"][edge]["score"] == score for edge in kept)
    for wrong in (
        {"edges": dict(list(said["edges"].items())[1:])},
        {"cfg": {**said["cfg"], "n_heads": 3}},
    ):
        file.write_text(json.dumps(said | wrong))
        with pytest.raises(
            ValueError, match=r"circuit\.json holds no circuit that can be read: its edges are not"
        ):
            Circuit.load(file)
    grouped = TransformerBridge(tiny("llama"))
    with pytest.raises(ValueError, match="all with keys of their own"):
        Circuit.of_edges(Graph.of(grouped), ["embed->logits"]).to_mib(file, grouped)
    with pytest.raises(ValueError, match="and this model is"):
        circuit.to_mib(file, TransformerBridge(tiny("gpt_neox")))


def test_intervals_are_bootstraps_over_prompts(gpt2, graph, clean, corrupted):
    """Prompts drawn by hand from runs of each prompt alone."""
    clean, corrupted = (
        (clean.repeat(3, 1) + torch.arange(3 * len(clean))[:, None]) % 61,
        corrupted.repeat(3, 1),
    )
    answers, wrong = torch.arange(len(clean)), torch.arange(len(clean)) + 9
    scores, shares = scores_of(graph), (0.1, 0.4, 1.0)
    each = logit_difference(answers, wrong, each=True)
    curve = faithfulness_curve(scores, gpt2, clean, corrupted, each, shares=shares)
    mean = faithfulness_curve(
        scores, gpt2, clean, corrupted, logit_difference(answers, wrong), shares=shares
    )
    assert curve.faithfulness == pytest.approx(mean.faithfulness, abs=1e-9) and mean.prompts is None
    alone = []
    for i in range(len(clean)):
        metric = logit_difference(answers[i : i + 1], wrong[i : i + 1])
        found = [
            scores.top(int(share * graph.n_edges))
            .pruned()
            .evaluate(gpt2, clean[i : i + 1], corrupted[i : i + 1], metric)
            for share in shares
        ]
        alone.append([[one.model, one.ablated, one.circuit] for one in found])
    alone = torch.tensor(alone, dtype=torch.float64)  # prompt share kind
    assert torch.allclose(curve.prompts.double(), alone.permute(1, 2, 0), atol=1e-9)
    generator, drawn = torch.Generator().manual_seed(4), []
    for rows in torch.randint(len(clean), (50, len(clean)), generator=generator):
        model, ablated, circuit = alone[rows].mean(0).unbind(-1)
        drawn.append((circuit - ablated) / (model - ablated))
    drawn = torch.stack(drawn)
    found = curve.intervals(level=0.8, draws=50, seed=4)
    right = torch.stack([drawn.quantile(0.1, dim=0), drawn.quantile(0.9, dim=0)], -1)
    assert torch.allclose(found["faithfulness"], right, atol=1e-8)
    areas = torch.tensor(
        [Curve(shares, tuple(row.tolist())).cpr for row in drawn], dtype=torch.float64
    )
    assert torch.allclose(
        found["cpr"], areas.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64)), atol=1e-8
    )
    assert found["cpr"][0] < found["cpr"][1] and found["cmd"].shape == (2,)
    with pytest.raises(ValueError, match="give a metric with a number for each"):
        mean.intervals()
    with pytest.raises(ValueError, match="level is 95"):
        curve.intervals(level=95.0)
    for study in (edge_attribution, edge_effects):
        with pytest.raises(ValueError, match="one for each prompt: scores are of one"):
            study(gpt2, clean, corrupted, each)


def test_what_a_metric_may_give(gpt2, graph, clean, corrupted):
    circuit = scores_of(graph).top(40)
    counted = circuit.evaluate(gpt2, clean, corrupted, lambda logits: (logits[:, -1, 3] > 0).sum())
    assert counted.model == int((gpt2(clean)[:, -1, 3] > 0).sum()) and counted.prompts is None
    kept = circuit.evaluate(
        gpt2, clean, corrupted, lambda logits: logits[:, -1, 3].mean(0, keepdim=True)
    )
    assert kept.prompts is None  # one number for all prompts, in whatever shape
    assert kept == circuit.evaluate(gpt2, clean, corrupted, lambda logits: logits[:, -1, 3].mean())
    each = [
        circuit.evaluate(gpt2, clean, corrupted, lambda logits: logits[:, -1, 3]) for _ in range(2)
    ]
    assert each[0] == each[1] and each[0].prompts.shape == (3, len(clean))
    with pytest.raises(
        ValueError,
        match=r"metric gives \[2, 2\] numbers; it is one number, or one for each of 2 prompts",
    ):
        circuit.evaluate(gpt2, clean, corrupted, lambda logits: logits[:, -1, :2])


def test_intervals_without_a_difference_are_refused():
    prompts = torch.tensor(
        [[[1.0, 3.0], [1.0, 1.0], [1.0, 2.0]], [[1.0, 3.0], [1.0, 1.0], [1.0, 3.0]]]
    )
    curve = Curve(
        (0.1, 1.0), (0.5, 1.0), prompts
    )  # the first prompt has the same metric with all edges and with none
    with pytest.raises(
        ValueError,
        match="of 1000 draws of prompts have the same metric with every edge and with none",
    ):
        curve.intervals()


def test_a_stream_that_is_no_sum_is_refused(gpt2, graph, clean, corrupted, metric):
    circuit = scores_of(graph).top(40)
    studies = {
        "information_flow": lambda: information_flow(gpt2, clean),
        "evaluate": lambda: circuit.evaluate(gpt2, clean, corrupted, metric),
        "mean": lambda: circuit.evaluate(gpt2, clean, corrupted, metric, "mean"),
        "optimal_constants": lambda: circuit.optimal_constants(gpt2, clean, steps=1),
    }
    for study in studies.values():
        study()
        larger = gpt2.hooks(
            fwd_hooks=[("blocks.1.hook_resid_pre", lambda stream, hook: stream * 1.5)]
        )
        with larger, pytest.raises(ValueError, match="does not add up to the residual stream"):
            study()
    gpt2.train()
    try:
        with pytest.raises(ValueError, match="training mode"):
            information_flow(gpt2, clean)
    finally:
        gpt2.eval()


def test_constants_that_cannot_be_trained_or_taken(gpt2, graph, clean, corrupted, metric):
    circuit = scores_of(graph).top(40)
    with pytest.raises(ValueError, match="loss is nan"):
        circuit.optimal_constants(gpt2, clean, loss=lambda logits: logits.sum() * float("nan"))
    with pytest.raises(RuntimeError, match="needs gradients"), torch.inference_mode():
        circuit.optimal_constants(gpt2, clean)
    means = written(graph, gpt2, clean).parts.mean((1, 2))
    assert torch.equal(
        Circuit(graph, graph.exists).optimal_constants(gpt2, clean), means
    )  # nothing carries them
    with pytest.raises(ValueError, match="not finite"):
        circuit.evaluate(gpt2, clean, corrupted, metric, means * float("inf"))
    with pytest.raises(ValueError, match="the ablation is a tensor"):
        circuit.evaluate(gpt2, clean, corrupted, metric, means, clean)


def test_a_file_of_the_benchmark_with_what_is_no_score(gpt2, graph, tmp_path):
    file = tmp_path / "circuit.json"
    scores_of(graph).top(7).to_mib(file, gpt2)
    said = json.loads(file.read_text())
    for wrong in ({"score": float("nan"), "in_graph": True}, {"score": 1.0, "in_graph": "false"}):
        file.write_text(json.dumps(said | {"edges": said["edges"] | {"m0->logits": wrong}}))
        with pytest.raises(ValueError, match="m0->logits has the score"):
            Circuit.load(file)
    with pytest.raises(ValueError, match="a score is not finite"):
        Circuit(graph, graph.exists, torch.full(graph.exists.shape, torch.inf)).to_mib(file, gpt2)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_under_autocast_the_sum_is_as_near_as_it_is_rounded(family, clean, corrupted, metric):
    bridge = TransformerBridge(tiny_model(family))
    exact = edge_attribution(bridge, clean, corrupted, metric)
    with torch.autocast("cpu", torch.bfloat16):
        scores = edge_attribution(bridge, clean, corrupted, metric)
        found = scores.top(40).evaluate(bridge, clean, corrupted, metric)
    assert (scores.flat - exact.flat).abs().max() < 0.05 * exact.flat.abs().max()
    right = exact.top(40).evaluate(bridge, clean, corrupted, metric)
    assert abs(found.model - right.model) < 0.05 * abs(right.model - right.ablated)


def test_damaged_tensors_of_the_benchmark_are_said_to_be(gpt2, graph, tmp_path):
    file = tmp_path / "circuit.pt"
    scores_of(graph).top(7).to_mib(file, gpt2)
    whole = torch.load(file)
    some = {name: value for name, value in whole["cfg"].items() if name != "n_heads"}
    wrong = [
        whole | {"cfg": some},
        whole | {"src_nodes": ["x", *whole["src_nodes"][1:]]},
        [1, 2],
        {},
    ]
    wrong.append(whole | {"edges_scores": whole["edges_scores"][1:]})
    damaged = [b"hello", b"", file.read_bytes()[:500]]
    for i, content in enumerate((*wrong, *damaged)):
        other = tmp_path / f"{i}.pt"
        if isinstance(content, bytes):
            other.write_bytes(content)
        else:
            torch.save(content, other)
        with pytest.raises(ValueError, match=rf"{i}\.pt holds no circuit that can be read"):
            Circuit.load(other)
    with pytest.raises(FileNotFoundError, match="which is no file"):
        Circuit.load(tmp_path / "none.pt")


@pytest.mark.parametrize("ablation", ["zero", "mean", "constants"])
def test_the_same_prompts_twice_prove_no_graph(gpt2, graph, clean, metric, ablation):
    """Between equal prompts nothing differs, whatever else writes to the stream."""
    constants = torch.zeros(len(graph.senders), gpt2.cfg.d_model)
    given = constants if ablation == "constants" else ablation
    circuit = scores_of(graph).top(2)
    larger = gpt2.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", lambda stream, hook: stream * 1.5)])
    with larger, pytest.raises(ValueError, match="does not add up to the residual stream"):
        circuit.evaluate(gpt2, clean, clean, metric, given)


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("jamba", "blocks.0.hook_mixer_out"),
        ("falcon_h1", "blocks.0.hook_mixer_out"),
        ("gemma4_text", "blocks.0.hook_mlp_2_out"),
    ],
)
def test_what_else_writes_to_the_stream_is_named_in_any_precision(kind, point):
    """In half precision the sum alone does not tell: what a mixer writes is no larger than what
    rounding may be.
    """
    bridge = TransformerBridge(tiny_model(kind).bfloat16())
    tokens = torch.randint(9, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    for study in (
        Graph.of,
        lambda bridge: information_flow(bridge, tokens),
        lambda bridge: mean_outputs(bridge, [tokens]),
    ):
        with pytest.raises(ValueError, match=f"writes to its residual stream at {point}"):
            study(bridge)


def test_a_stream_that_is_not_finite_is_said_to_be(gpt2, clean, corrupted, metric):
    endless = gpt2.hooks(
        fwd_hooks=[
            ("hook_embed", lambda stream, hook: stream.index_fill(1, torch.tensor([1]), torch.inf))
        ]
    )
    with (
        endless,
        pytest.raises(ValueError, match=r"numbers that are not finite, in torch\.float64"),
    ):
        edge_attribution(gpt2, clean, corrupted, metric)
