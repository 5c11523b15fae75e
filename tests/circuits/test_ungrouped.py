"""Graphs in which each query head has a key and a value of its own, in models that compute one for
a group of heads.

What is right is told by a model whose projections have the rows of a group once for each of its
query heads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge
from bridge.circuits import (
    Circuit,
    Graph,
    Metric,
    edge_attribution,
    edge_effects,
    faithfulness_curve,
    information_flow,
    logit_difference,
    mean_outputs,
    node_attribution,
    path_patching,
    trained_edges,
)
from bridge.circuits.edge_runs import OwnKeys, run_with_edges_replaced
from bridge.circuits.graph import LayerShape, written
from tests.tiny_models import tiny_model

METHODS = ("gradient", "inputs", "clean_corrupted", "activations", "own_activations")


def llama(key_heads: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=key_heads,
        vocab_size=61,
        intermediate_size=48,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def both() -> tuple[TransformerBridge, TransformerBridge]:
    """The model with two key heads, and the one with a key head for each of eight query heads."""
    torch.manual_seed(0)
    model, wide = llama(2), llama(8)
    weights = model.state_dict()
    for name in [name for name in weights if "k_proj" in name or "v_proj" in name]:
        weights[name] = weights[name].unflatten(0, (2, -1)).repeat_interleave(4, 0).flatten(0, 1)
    wide.load_state_dict(weights)
    return TransformerBridge(model), TransformerBridge(wide)


@pytest.fixture(scope="module")
def pair() -> tuple[Tensor, Tensor]:
    clean, corrupted = torch.randint(0, 61, (2, 3, 6), generator=torch.Generator().manual_seed(1))
    corrupted[:, :2] = clean[:, :2]
    return clean, corrupted


@pytest.fixture(scope="module")
def metric() -> Metric:
    return logit_difference(torch.tensor([5, 8, 1]), torch.tensor([9, 2, 3]))


def same(found: Tensor, right: Tensor, tolerance: float = 1e-6) -> bool:
    """Whether they are the same but for the norms' single precision."""
    return bool(right.abs().max() > 1e-3) and torch.allclose(
        found, right, rtol=tolerance, atol=tolerance
    )


def test_the_graph(both) -> None:
    model, wide = both
    graph = Graph.of(model, grouped=False)
    assert graph == Graph.of(wide) == Graph.of(wide, grouped=False) != Graph.of(model)
    assert "L1H5.k" in graph.receivers and graph.receivers_named("L1H5") == [
        graph.receiver(f"L1H5.{letter}") for letter in "qkv"
    ]


@pytest.mark.parametrize("method", METHODS)
def test_scores_from_gradients(both, pair, metric, method) -> None:
    model, wide = both
    found = edge_attribution(model, *pair, metric, method, 3, Graph.of(model, grouped=False))
    assert same(found.values, edge_attribution(wide, *pair, metric, method, 3).values)


@pytest.mark.parametrize("ablation", ["resample", "mean", "zero"])
def test_effects_and_circuits(both, pair, metric, ablation) -> None:
    model, wide = both
    graph = Graph.of(model, grouped=False)
    right = edge_effects(wide, *pair, metric, verbose=False, ablation=ablation)
    found = edge_effects(model, *pair, metric, verbose=False, ablation=ablation, graph=graph)
    assert same(found.values, right.values)
    each = logit_difference(torch.tensor([5, 8, 1]), torch.tensor([9, 2, 3]), each=True)
    curves = [
        faithfulness_curve(right, bridge, *pair, each, ablation, (0.1, 0.4, 1.0)) for bridge in both
    ]
    assert same(*(curve.prompts for curve in curves))
    nodes = [node_attribution(bridge, *pair, metric, graph=graph) for bridge in both]
    assert same(nodes[0].neurons, nodes[1].neurons)
    circuit = nodes[0].top_neurons(200)
    ours, theirs = (circuit.evaluate(bridge, *pair, metric, ablation) for bridge in both)
    assert same(
        torch.tensor([ours.circuit, ours.complement]),
        torch.tensor([theirs.circuit, theirs.complement]),
    )


@pytest.mark.parametrize(
    "receivers", [["L1H5.k"], ["L1H5.v", "L2H3", "L2MLP"], ["L2H0.q", "L2H1.k", "logits"]]
)
def test_paths(both, pair, metric, receivers) -> None:
    model, wide = both
    right = path_patching(wide, *pair, metric, ["embed", "L0H1"], receivers)
    found = path_patching(
        model, *pair, metric, ["embed", "L0H1"], receivers, graph=Graph.of(model, grouped=False)
    )
    assert abs(found - right) < 1e-6 < abs(right)


def test_what_is_trained_and_what_needs_no_metric(both, pair) -> None:
    model, wide = both
    graph = Graph.of(model, grouped=False)
    assert same(
        information_flow(model, pair[0], graph).values, information_flow(wide, pair[0]).values
    )
    ours, theirs = (trained_edges(bridge, *pair, steps=3, graph=graph) for bridge in both)
    assert same(ours.values, theirs.values)
    circuit = ours.top(200)
    assert same(*(circuit.optimal_constants(bridge, pair[0], steps=3) for bridge in both))
    assert same(*(mean_outputs(bridge, [pair[0]]) for bridge in both))


@pytest.mark.parametrize("kind", ["json", "pt"])
def test_files_of_the_benchmark(both, pair, metric, tmp_path: Path, kind) -> None:
    """Its graph has no groups: what is read again is a circuit of the grouped model, too."""
    model, wide = both
    scores = edge_attribution(model, *pair, metric, graph=Graph.of(model, grouped=False))
    circuit, file = scores.greedy(60), tmp_path / f"circuit.{kind}"
    circuit.to_mib(file, model)
    again = Circuit.load(file)
    assert again == circuit
    assert again.evaluate(model, *pair, metric).circuit == pytest.approx(
        again.evaluate(wide, *pair, metric).circuit
    )
    with pytest.raises(ValueError, match=r"Graph.of\(bridge, grouped=False\)"):
        edge_attribution(model, *pair, metric).greedy(60).to_mib(file, model)


@pytest.mark.parametrize("family", ["gemma2", "qwen3", "falcon", "phi3", "gpt_bigcode", "cohere"])
def test_families(pair, metric, family) -> None:
    """The shares of a group's heads add up to the group's, and single edges are those of whole
    runs.
    """
    bridge = TransformerBridge(tiny_model(family).double())
    graph, grouped = Graph.of(bridge, grouped=False), Graph.of(bridge)
    tokens = tuple(some % bridge.cfg.d_vocab for some in pair)
    found, right = (
        edge_attribution(bridge, *tokens, metric, "gradient", graph=some)
        for some in (graph, grouped)
    )
    for port, of_group in zip(graph.ports, grouped.ports, strict=True):
        rows = found.values[port.first : port.first + port.count].unflatten(0, (of_group.count, -1))
        assert torch.allclose(
            rows.sum(1),
            right.values[of_group.first : of_group.first + of_group.count],
            rtol=0,
            atol=1e-6 * float(right.values.abs().max()),
        )
    edges = [
        name
        for at in graph.exists.nonzero().tolist()[::9]
        if ".q" not in (name := graph.edge_name(*at))
    ]
    effects = edge_effects(bridge, *tokens, metric, edges, verbose=False, graph=graph)
    assert effects.values.abs().max() > 1e-3
    sets = torch.zeros(len(edges), *graph.exists.shape)
    for row, edge in zip(sets, edges, strict=True):
        row[graph.edge(edge)] = 1
    with torch.no_grad():
        other, base = written(graph, bridge, tokens[1]).parts, float(metric(bridge(tokens[0])))
        logits = run_with_edges_replaced(graph, bridge, {"input_ids": tokens[0]}, other, sets)
    for edge, some in zip(edges, logits, strict=True):
        assert effects[edge] == pytest.approx(float(metric(some)) - base, abs=1e-9)


@pytest.mark.unchecked
def test_layers_with_groups_of_several_sizes() -> None:
    """Copies for all: a layer with groups of two has each of its heads in every other copy."""
    keys = OwnKeys.__new__(OwnKeys)
    keys.shared, keys.copies = [2, 3, 1], 6
    graph = Graph([LayerShape(6, 6, True, False)] * 3)
    for port in graph.ports:
        inputs = torch.randn(2, 4, port.count, 5)
        given = keys.spread(port, inputs)
        assert given.shape == (12, 4, port.count // keys.sharing(port), 5)
        if port.per_head:
            assert torch.equal(keys.read(port, given), inputs)
            for copy, row in enumerate(given.unflatten(0, (6, 2))):
                assert torch.equal(
                    row, inputs[:, :, copy % keys.sharing(port) :: keys.sharing(port)]
                )
    for shared in (2, 3):
        z = torch.randn(6, 2, 4, 6, 5)
        own = torch.stack([z[head % shared, :, :, head] for head in range(6)], 2)
        hook = SimpleNamespace(point=SimpleNamespace(depth=keys.shared.index(shared)))
        assert torch.equal(keys._join_heads(z.flatten(0, 1), hook), own.repeat(6, 1, 1, 1))


@pytest.mark.parametrize("family", ["olmo2", "bitnet"])
def test_heads_that_share_more_than_a_key(pair, metric, family) -> None:
    """One norm over the keys of all heads, or what they put together: no head has a key of
    its own.
    """
    bridge = TransformerBridge(tiny_model(family))
    grouped = Graph.of(bridge)
    heads = Graph([replace(layer, key_heads=layer.heads) for layer in grouped.layers])
    for study in (
        lambda: Graph.of(bridge, grouped=False),
        lambda: edge_attribution(bridge, *pair, metric, graph=heads),
    ):
        with pytest.raises(ValueError, match="go through one norm or module together"):
            study()
    tokens = tuple(some % bridge.cfg.d_vocab for some in pair)
    scores = edge_attribution(bridge, *tokens, metric, graph=grouped)
    assert torch.equal(scores.values, edge_attribution(bridge, *tokens, metric).values)
    assert scores.top(grouped.n_edges).evaluate(bridge, *tokens, metric).share == 1


def test_a_graph_of_another_model(both, pair, metric) -> None:
    model, _ = both
    other = Graph([LayerShape(4, 4, True, False)] * 3)
    for study in (edge_effects, edge_attribution):
        with pytest.raises(ValueError, match="this model is"):
            study(model, *pair, metric, graph=other)
    with pytest.raises(ValueError, match="this model is"):
        path_patching(model, *pair, metric, ["embed"], ["logits"], graph=other)
    with pytest.raises(ValueError, match="this model is"):
        information_flow(model, pair[0], other)
    with pytest.raises(ValueError, match="this model is"):
        trained_edges(model, *pair, graph=other)
