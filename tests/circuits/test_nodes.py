"""Nodes, neurons, trained edges, other ablations, and prompts of several lengths, by hand."""

import pytest
import torch
from jaxtyping import TypeCheckError

from bridge import TransformerBridge
from bridge.circuits import (
    Circuit,
    EdgeScores,
    Graph,
    NodeScores,
    edge_attribution,
    edge_effects,
    faithfulness_curve,
    joined,
    kl_divergence,
    logit_difference,
    mean_outputs,
    mean_scores,
    node_attribution,
    node_effects,
    trained_edges,
)
from bridge.circuits.attribution import _absent
from bridge.circuits.graph import written
from bridge.tasks import trained
from tests.analysis.models import bridge_of
from tests.conftest import tiny, torch_hooks


def outputs_of(hand, tokens):
    with torch.no_grad():
        hand(tokens)
    return dict(hand.wrote)


def gradients_at_outputs(hand, tokens, metric, **options):
    """The gradient of the metric at what every sender writes."""
    loss = metric(hand(tokens, **options))
    return dict(zip(hand.wrote, torch.autograd.grad(loss, list(hand.wrote.values())), strict=True))


def test_neurons(gpt2, graph, hand, clean, corrupted, metric):
    one, other = outputs_of(hand, clean), outputs_of(hand, corrupted)
    at = gradients_at_outputs(hand, clean, metric)
    right = torch.stack(
        [((other[name] - one[name]) * at[name]).sum((0, 1)) for name in graph.senders]
    )
    found = node_attribution(gpt2, clean, corrupted, metric, "gradient")
    torch.testing.assert_close(found.neurons, right, atol=1e-11, rtol=1e-9)
    torch.testing.assert_close(found.values, right.sum(1), atol=1e-11, rtol=1e-9)
    edges = edge_attribution(gpt2, clean, corrupted, metric, "gradient")
    assert edges.nodes == pytest.approx(
        dict(zip(graph.senders, found.values.tolist(), strict=True))
    )
    assert right.abs().max() > 1e-3 and found["L0MLP"] == found.values[graph.sender("L0MLP")]
    assert (
        all(parameter.grad is None for parameter in gpt2.parameters())
        and torch_hooks(gpt2.original_model) == 0
    )


def test_neurons_by_integrated_gradients(gpt2, graph, hand, clean, corrupted, metric):
    one, other = outputs_of(hand, clean), outputs_of(hand, corrupted)
    right = torch.zeros(len(graph.senders), 32, dtype=torch.float64)
    for step in (1, 2, 3):
        embed = (other["embed"] + step / 3 * (one["embed"] - other["embed"])).requires_grad_()
        at = gradients_at_outputs(hand, clean, metric, embed=embed)
        right += (
            torch.stack(
                [((other[name] - one[name]) * at[name]).sum((0, 1)) for name in graph.senders]
            )
            / 3
        )
    found = node_attribution(gpt2, clean, corrupted, metric, steps=3)
    torch.testing.assert_close(found.neurons, right, atol=1e-11, rtol=1e-9)


def test_the_effects_of_nodes(gpt2, graph, hand, clean, corrupted, metric):
    other = outputs_of(hand, corrupted)
    found = node_effects(gpt2, clean, corrupted, metric)
    with torch.no_grad():
        base = metric(hand(clean))
        for name in graph.senders:
            right = float(
                metric(
                    hand(
                        clean,
                        outputs={name: other[name]},
                        embed=other[name] if name == "embed" else None,
                    )
                )
            )
            assert found[name] == pytest.approx(right - float(base), abs=1e-9)


def test_circuits_of_neurons(gpt2, graph, hand, clean, corrupted, metric, tmp_path):
    scores = node_attribution(gpt2, clean, corrupted, metric)
    circuit = scores.top_neurons(200).pruned()
    assert int(circuit.neurons.sum()) == 200 and 0 < circuit.share < 1
    every = {(graph.receivers[r], graph.senders[s]) for r, s in graph.exists.nonzero().tolist()}
    mask = {(receiver, sender) for sender, receiver, _ in circuit.edges}
    other = outputs_of(hand, corrupted)
    inside = dict(zip(graph.senders, circuit.neurons, strict=True))

    # Where an edge is not in the circuit, nothing of it stays; here all edges between its nodes
    # are.
    nodes = {sender for sender, neurons in inside.items() if neurons.any()}
    read = {name for name in graph.receivers if name == "logits" or name.split(".")[0] in nodes}
    assert {
        (receiver, sender) for receiver, sender in every if sender in nodes and receiver in read
    } >= mask
    whole = {pair: inside[pair[1]] & torch.tensor(pair in mask) for pair in every}
    found = circuit.evaluate(gpt2, clean, corrupted, metric)
    assert found.circuit == pytest.approx(
        kept_by_edge(hand, clean, every, other, whole, metric), abs=1e-9
    )
    opposite = {pair: ~inside[pair[1]] | torch.tensor(pair not in mask) for pair in every}
    assert found.complement == pytest.approx(
        kept_by_edge(hand, clean, every, other, opposite, metric), abs=1e-9
    )
    assert found.share == pytest.approx(circuit.share)
    file = tmp_path / "circuit.json"
    circuit.save(file)
    assert Circuit.load(file) == circuit and Circuit.load(file) != Circuit(graph, circuit.mask)
    for name in ("mib.json", "mib.pt"):
        circuit.to_mib(tmp_path / name, gpt2)
        assert Circuit.load(tmp_path / name) == circuit
    with pytest.raises(ValueError, match="the complement of a circuit of neurons"):
        circuit.complement()
    assert "200 of 512 neurons" in repr(circuit)


def kept_by_edge(hand, clean, pairs, other, coordinates, metric):
    """The metric of a run in which each pair keeps coordinates of its own."""
    with torch.no_grad():
        return float(metric(hand(clean, replaced=pairs, other=other, kept=coordinates)))


def test_curves_of_nodes_and_neurons(gpt2, graph, clean, corrupted, metric):
    scores = node_attribution(gpt2, clean, corrupted, metric)
    curve = faithfulness_curve(
        scores, gpt2, clean, corrupted, metric, shares=(0.3, 1.0), choose="top_neurons"
    )
    right = (
        scores.top_neurons(int(0.3 * 512))
        .pruned()
        .evaluate(gpt2, clean, corrupted, metric)
        .faithfulness
    )
    assert curve.faithfulness == pytest.approx((right, 1.0))
    nodes = faithfulness_curve(scores, gpt2, clean, corrupted, metric, shares=(0.5, 1.0))
    assert nodes.faithfulness[0] == pytest.approx(
        scores.top(8).evaluate(gpt2, clean, corrupted, metric).faithfulness
    )
    with pytest.raises(ValueError, match="choose is 'greedy'"):
        faithfulness_curve(scores, gpt2, clean, corrupted, metric, choose="greedy")
    with pytest.raises(ValueError, match="scores of nodes alone"):
        NodeScores(graph, scores.values).top_neurons(3)
    with pytest.raises(ValueError, match="there are scores of 3 nodes; this graph has 16"):
        NodeScores(graph, torch.zeros(3))


@pytest.mark.parametrize("ablation", ["zero", "mean", "constants"])
def test_scores_against_other_ablations(gpt2, graph, hand, clean, corrupted, metric, ablation):
    one, other = outputs_of(hand, clean), outputs_of(hand, corrupted)
    constants = torch.randn(
        len(graph.senders), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    right = {
        "zero": {name: torch.zeros_like(value) for name, value in one.items()},
        "mean": {
            name: value.mean(0, keepdim=True).expand_as(value) for name, value in other.items()
        },
        "constants": {
            name: row.expand_as(one[name])
            for name, row in zip(graph.senders, constants, strict=True)
        },
    }[ablation]
    given = constants if ablation == "constants" else ablation
    at = gradients_at_outputs(hand, clean, metric)
    change = torch.stack([((right[name] - one[name]) * at[name]).sum() for name in graph.senders])
    scores = edge_attribution(gpt2, clean, corrupted, metric, "gradient", ablation=given)
    torch.testing.assert_close(scores.values.sum(0), change, atol=1e-10, rtol=1e-9)
    edges = ["L0MLP->L1MLP", "embed->L2H0.q"]
    effects = edge_effects(gpt2, clean, corrupted, metric, edges, verbose=False, ablation=given)
    with torch.no_grad():
        base = float(metric(hand(clean)))
        for edge in edges:
            sender, receiver = edge.split("->")
            found = float(metric(hand(clean, replaced={(receiver, sender)}, other=right)))
            assert effects[edge] == pytest.approx(found - base, abs=1e-9)


def padded(rows):
    length = max(map(len, rows))
    tokens = torch.stack([torch.cat([row, row.new_zeros(length - len(row))]) for row in rows])
    return {
        "input_ids": tokens,
        "attention_mask": (
            torch.tensor([[at < len(row) for at in range(length)] for row in rows]).long()
        ),
    }


def by_prompt(alone):
    """The same with a number for each prompt."""
    for row, other, metric in alone:
        yield row, other, lambda logits, metric=metric: metric(logits)[None]


def test_prompts_of_several_lengths(gpt2, graph):
    """A padded batch gives the mean of what its rows give alone."""
    numbers = torch.Generator().manual_seed(5)
    rows = [torch.randint(1, 61, (length,), generator=numbers) for length in (4, 6, 5)]
    others = [torch.cat([row[:1], row[1:].flip(0)]) for row in rows]
    answers, wrong = torch.tensor([5, 8, 2]), torch.tensor([9, 2, 7])
    last = torch.tensor([len(row) - 1 for row in rows])
    metric = logit_difference(answers, wrong, last)
    alone = [
        (row[None], other[None], logit_difference(answers[i : i + 1], wrong[i : i + 1]))
        for i, (row, other) in enumerate(zip(rows, others, strict=True))
    ]
    for method in ("gradient", "inputs", "activations"):
        found = edge_attribution(gpt2, padded(rows), padded(others), metric, method)
        right = mean_scores([edge_attribution(gpt2, *one, method) for one in alone])
        torch.testing.assert_close(found.values, right.values, atol=1e-10, rtol=1e-8)
    scores, shares = (
        EdgeScores(graph, torch.randn(graph.exists.shape, generator=numbers)),
        (0.2, 1.0),
    )
    each = logit_difference(answers, wrong, last, each=True)
    together = faithfulness_curve(scores, gpt2, padded(rows), padded(others), each, shares=shares)
    whole = joined(
        [
            faithfulness_curve(scores, gpt2, row, other, one, shares=shares)
            for row, other, one in by_prompt(alone)
        ]
    )
    torch.testing.assert_close(whole.prompts, together.prompts, atol=1e-9, rtol=1e-7)
    assert whole.faithfulness == pytest.approx(together.faithfulness)
    with pytest.raises(ValueError, match="a metric gave one number for all prompts"):
        joined(
            [faithfulness_curve(scores, gpt2, padded(rows), padded(others), metric, shares=shares)]
        )
    mean = mean_outputs(gpt2, [padded(rows[:2]), padded(rows[2:])])
    parts = torch.cat([written(graph, gpt2, row[None]).parts[:, 0] for row in rows], 1)
    torch.testing.assert_close(mean, parts.mean(1), atol=1e-10, rtol=1e-8)
    with pytest.raises(ValueError, match="there are no prompts"):
        mean_outputs(gpt2, [])


def test_what_is_trained_without_a_loss_reads_each_prompts_last_token(gpt2, graph):
    """Padding behind a prompt is not what its next token is read at: as with a loss at the last
    tokens by hand.
    """
    rows = [torch.arange(1, 6), torch.arange(11, 14)]
    batch, other = padded(rows), padded([row.flip(0) for row in rows])
    right = gpt2(batch).detach().log_softmax(-1)

    def by_hand(logits):
        found = logits.log_softmax(-1)
        both = (
            [right[row, len(rows[row]) - 1] for row in range(2)],
            [found[row, len(rows[row]) - 1] for row in range(2)],
        )
        return sum((one.exp() * (one - here)).sum() for one, here in zip(*both, strict=True)) / 2

    found = trained_edges(gpt2, batch, other, steps=5)
    torch.testing.assert_close(
        found.values, trained_edges(gpt2, batch, other, by_hand, steps=5).values
    )
    none = Circuit.of_edges(graph, [])
    constants = none.optimal_constants(gpt2, batch, steps=5)
    torch.testing.assert_close(constants, none.optimal_constants(gpt2, batch, by_hand, steps=5))
    with pytest.raises((ValueError, TypeCheckError)):  # whichever looks first at the shapes
        kl_divergence(right, torch.tensor([4, 2]))(right[:1])


def test_the_mean_leaves_padding_out(gpt2, graph, metric):
    rows = [torch.arange(1, 6), torch.arange(11, 14)]
    batch = padded(rows)
    none = Circuit.of_edges(graph, [])
    # Without edges every position has its mean, so padding may be read: not by the metric itself.
    found = none.evaluate(gpt2, batch, batch, lambda logits: metric(logits), "mean").ablated
    parts = [written(graph, gpt2, row[None]).parts[:, 0] for row in rows]
    mean = torch.cat(
        [torch.stack([parts[0][:, :3], parts[1]]).mean(0), parts[0][:, 3:]], 1
    )  # of two, then of one
    end = mean.sum(0) + sum(block.attn.c_proj.bias for block in gpt2.original_model.transformer.h)
    with torch.no_grad():
        model = gpt2.original_model
        right = metric(model.lm_head(model.transformer.ln_f(end)).expand(2, -1, -1))
    assert found == pytest.approx(float(right))


def test_prompts_with_padding_in_other_places_are_refused(gpt2, graph, metric):
    long, short = padded([torch.arange(1, 6)] * 2), padded([torch.arange(1, 6), torch.arange(1, 4)])
    none = Circuit.of_edges(graph, [])
    studies = [
        lambda: none.evaluate(gpt2, long, short, metric),
        lambda: edge_attribution(gpt2, short, long, metric),
        lambda: trained_edges(gpt2, long, short, steps=1),
    ]
    for study in studies:
        with pytest.raises(ValueError, match="the masks of clean and corrupted prompts differ"):
            study()
    behind = long | {"attention_mask": torch.tensor([[0, 0, 1, 1, 1]] * 2)}
    with pytest.raises(ValueError, match=r"nothing to be over at positions \[0, 1\]"):
        none.evaluate(gpt2, long, long, metric, "mean", behind)
    none.evaluate(gpt2, behind, behind, metric, "mean", behind)  # nobody has a token there
    with pytest.raises(ValueError, match="padding alone"):
        mean_outputs(gpt2, [long | {"attention_mask": torch.zeros(2, 5, dtype=torch.long)}])


def test_means_of_halves_do_not_overflow():
    """The sum of what the embeddings write passes 65,504, the largest half; its mean is far from
    that.
    """
    model = tiny("gpt2")
    model.transformer.wte.weight.data[:, 3] += 400
    bridge = TransformerBridge(model.half())
    tokens = torch.randint(0, 61, (200, 5), generator=torch.Generator().manual_seed(0))
    metric = lambda logits: logits[:, -1, 7].float().mean()
    none = Circuit.of_edges(Graph.of(bridge), [])
    assert none.evaluate(bridge, tokens, tokens, metric, "mean").ablated == pytest.approx(
        none.evaluate(bridge, tokens[:100], tokens[:100], metric, "mean", tokens).ablated,
        rel=1e-2,
        abs=1e-2,
    )
    constants = none.optimal_constants(bridge, tokens, steps=2)
    assert constants.dtype == torch.float16 and bool(constants.isfinite().all())
    right = written(none.graph, bridge, tokens).parts.double().mean((1, 2))
    torch.testing.assert_close(mean_outputs(bridge, [tokens]).double(), right, rtol=1e-3, atol=1e-3)


def test_what_is_drawn_of_edges():
    """On average an edge is there with its probability; moving that moves what is drawn in the
    window alone.
    """
    drawn = torch.rand(200_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    absent = _absent(drawn, given.sigmoid())
    torch.testing.assert_close(
        1 - absent.detach().mean(0), given.sigmoid().detach(), atol=5e-3, rtol=0
    )
    partly = (absent > 0) & (absent < 1)
    window = (given.sigmoid() * (1 - given.sigmoid())).detach()
    torch.testing.assert_close(partly.double().mean(0), window, atol=5e-3, rtol=0)
    # Of a loss that an edge's absence makes larger by 3, the derivative by the logit is -3 p (1 -
    # p).
    (slope,) = torch.autograd.grad(3 * absent.mean(0).sum(), given)
    torch.testing.assert_close(slope, -3 * window, atol=2e-2, rtol=0)


def test_trained_edges_are_the_known_circuit():
    task = trained("most")
    clean, corrupted = task.clean[::4], task.corrupted[::4]
    right = task.bridge(clean).detach()
    way = (right - task.bridge(corrupted).detach()).square().mean()
    loss = lambda logits: (logits - right).square().mean() / way
    scores = trained_edges(task.bridge, clean, corrupted, loss, penalty=0.01, steps=100)
    assert scores.auroc(task.circuit) > 0.99 and scores.top(len(task.edges)) == task.circuit
    assert scores["L3MLP->logits"] > 0.7 and float(scores.flat.median()) < 0.1
    none = trained_edges(
        task.bridge, clean, corrupted, loss, penalty=100.0, steps=60
    )  # no edge is worth that
    assert float(none.values.max()) < 0.1
    assert float(scores.values.min()) >= 0 and float(scores.values.max()) <= 1
    with pytest.raises(ValueError, match="loss is nan"):
        trained_edges(
            task.bridge, task.clean, task.corrupted, lambda logits: logits.sum() * float("nan")
        )
    with pytest.raises(RuntimeError, match="needs gradients"), torch.inference_mode():
        trained_edges(task.bridge, task.clean, task.corrupted)
    with pytest.raises(ValueError, match=r"rate is 0\.0"):
        trained_edges(task.bridge, task.clean, task.corrupted, rate=0.0)
    for name, number in [("rate", torch.nan), ("rate", torch.inf), ("rate", -1.0)]:
        with pytest.raises(ValueError, match=f"{name} is {number}"):
            trained_edges(task.bridge, task.clean, task.corrupted, **{name: number})
    for number in (torch.nan, torch.inf, -1.0):
        with pytest.raises(ValueError, match=f"penalty is {number}"):
            trained_edges(task.bridge, task.clean, task.corrupted, penalty=number)
    weight = torch.ones(1, requires_grad=True)
    for without in (
        lambda logits: logits.detach().sum(),
        lambda logits: float(logits.detach().sum()),
        lambda logits: weight,
    ):
        with pytest.raises(ValueError, match="loss gives a number without a gradient"):
            trained_edges(task.bridge, task.clean, task.corrupted, without)
        with pytest.raises(ValueError, match="loss gives a number without a gradient"):
            Circuit.of_edges(scores.graph, []).optimal_constants(task.bridge, task.clean, without)


def test_neurons_of_another_model_are_refused(gpt2, graph, clean, corrupted, metric):
    wide = torch.ones(len(graph.senders), gpt2.cfg.d_model + 1)
    for circuit in (
        Circuit(graph, graph.exists, neurons=wide.bool()),
        NodeScores(graph, wide[:, 0], wide).top_neurons(9),
    ):
        with pytest.raises(ValueError, match="33 neurons of each sender, and this model has 32"):
            circuit.evaluate(gpt2, clean, corrupted, metric)
        with pytest.raises(ValueError, match="33 neurons of each sender, and this model has 32"):
            circuit.optimal_constants(gpt2, clean)
    for wrong in ({"mask": graph.exists.float()}, {"mask": graph.exists, "neurons": wide[:, :-1]}):
        with pytest.raises(
            (TypeError, TypeCheckError)
        ):  # whichever looks first at what kind of numbers they are
            Circuit(graph, **wrong)


def test_neurons_of_a_model_with_norms_behind_attention():
    """Of Gemma 2, a node's neurons sum to its edges."""
    bridge = bridge_of("gemma2").to(torch.float64)
    tokens = torch.randint(1, 60, (2, 2, 5), generator=torch.Generator().manual_seed(0))
    metric = logit_difference(torch.tensor([5, 8]), torch.tensor([9, 2]))
    edges = edge_attribution(bridge, tokens[0], tokens[1], metric, "gradient")
    nodes = node_attribution(bridge, tokens[0], tokens[1], metric, "gradient")
    torch.testing.assert_close(nodes.values, edges.values.sum(0), atol=1e-6, rtol=1e-5)
