"""Layers that differ in their number of heads, or of the heads of keys and values."""

import pytest
import torch

from bridge import TransformerBridge
from bridge.analysis.head_detector import detect_head
from bridge.analysis.svd import SVDInterpreter
from bridge.circuits import Graph
from bridge.circuits.edge_runs import run_with_edges_replaced
from bridge.circuits.graph import written
from tests.tiny_models import tiny_model

TOKENS, OTHERS = torch.tensor([[1, 5, 9, 33, 7]]), torch.tensor([[1, 5, 41, 33, 70]])
#: The heads of queries, and of keys and values, of each of two layers.
MODELS = {
    "more query heads": ("laguna", {"num_attention_heads_per_layer": [4, 8]}, [(4, 2), (8, 2)]),
    "fewer query heads": ("laguna", {"num_attention_heads_per_layer": [8, 2]}, [(8, 2), (2, 2)]),
    "others than the configuration says": (
        "laguna",
        {"num_attention_heads_per_layer": [8, 8]},
        [(8, 2), (8, 2)],
    ),
    "more key heads": ("mimo_v2_flash", {}, [(4, 2), (4, 4)]),
}


@pytest.fixture(params=MODELS)
def case(request):
    kind, fields, heads = MODELS[request.param]
    return TransformerBridge(tiny_model(kind, **fields)), heads


def by_hand(bridge, letter, layer, n):
    """The weight of each query head's queries, keys or values, from the projection itself."""
    weight = getattr(bridge.original_model.model.layers[layer].self_attn, f"{letter}_proj").weight
    each = weight.T.unflatten(1, (n[0] if letter == "q" else n[1], -1)).movedim(1, 0)
    return each.repeat_interleave(n[0] // len(each), 0)


def test_names_weights_and_singular_vectors(case):
    bridge, heads = case
    _, cache = bridge.run_with_cache(TOKENS)
    labels = [f"L{layer}H{head}" for layer, (n, _) in enumerate(heads) for head in range(n)]
    assert bridge.all_head_labels == cache.stack_head_results(return_labels=True)[1] == labels
    svd = SVDInterpreter(bridge)
    for layer, n in enumerate(heads):
        attn, out = (
            bridge.blocks[layer].attn,
            bridge.original_model.model.layers[layer].self_attn.o_proj.weight,
        )
        assert cache["q", layer].shape[-2:] == attn.W_Q.shape[::2]
        for letter in "qkv":
            assert torch.equal(
                getattr(attn, f"W_{letter.upper()}"), by_hand(bridge, letter, layer, n)
            )
        each = by_hand(bridge, "v", layer, n) @ out.T.unflatten(0, (n[0], -1))
        for head in range(n[0]):
            right = torch.linalg.svd(each[head]).Vh[0] @ bridge.W_U
            found = svd.get_singular_vectors("OV", layer, num_vectors=1, head_index=head).flatten()
            torch.testing.assert_close(found.abs(), right.abs(), atol=1e-4, rtol=1e-3)
        with pytest.raises(ValueError, match=f"between 0 and {n[0] - 1}"):
            svd.get_singular_vectors("OV", layer, num_vectors=1, head_index=n[0])


def test_weights_of_unequal_layers_are_no_one_tensor(case):
    bridge, heads = case
    if heads[0][0] == heads[1][0]:
        assert bridge.W_Q.shape[:2] == (2, heads[0][0])
        return
    with pytest.raises(
        AttributeError, match="W_Q of LagunaForCausalLM has other shapes in other layers"
    ):
        _ = bridge.W_Q


def test_every_edge_replaced_is_the_other_run(case):
    bridge, heads = case
    graph = Graph.of(bridge)
    assert [(layer.heads, layer.key_heads) for layer in graph.layers] == heads
    with torch.no_grad():
        sets = torch.stack([~graph.exists, graph.exists])
        none, every = run_with_edges_replaced(
            graph, bridge, {"input_ids": TOKENS}, written(graph, bridge, OTHERS).parts, sets
        )
        torch.testing.assert_close(none, bridge(TOKENS), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(every, bridge(OTHERS), atol=1e-4, rtol=1e-4)


def test_detected_heads(case, monkeypatch):
    bridge, heads = case
    monkeypatch.setattr(bridge, "to_tokens", lambda text, truncate=True: TOKENS)
    found = detect_head(bridge, "any", "previous_token_head", error_measure="abs")
    assert found.shape == (2, max(n for n, _ in heads))
    for layer, (n, _) in enumerate(heads):
        assert bool((found[layer, :n] != -1).all()) and bool((found[layer, n:] == -1).all())
