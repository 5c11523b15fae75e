"""Exact edges and paths against a model computed head by head in float64, and against plain torch
hooks.
"""

import pytest
import torch
from jaxtyping import TypeCheckError

from bridge.circuits import Graph, edge_effects, logit_difference, path_patching
from bridge.circuits.edge_runs import run_with_edges_replaced
from bridge.circuits.graph import written
from tests.analysis.models import bridge_of
from tests.circuits.by_torch_hooks import ByTorchHooks
from tests.conftest import torch_hooks

EDGES = [
    "embed->L0H1.q",
    "embed->L0H2.v",
    "embed->L0MLP",
    "L0H1->L0MLP",
    "L0H1->L1H2.k",
    "L0MLP->L2H3.q",
    "L1H0->L2H0.v",
    "L1H3->logits",
    "L2H2->L2MLP",
    "L2MLP->logits",
]
#: What reads a residual stream that is a plain sum.
FAMILIES = [
    "gpt2",
    "llama",
    "gpt_neox",
    "gemma2",
    "gemma3",
    "phi3",
    "bloom",
    "gptj",
    "phi",
    "opt",
    "qwen3",
    "mixtral",
    "native-no_norm",
    "native-attn_only",
    "native-solu_ln",
    "native-shortformer",
    "native-final_rms",
]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def test_the_model_by_hand_is_the_model(gpt2, hand, clean):
    torch.testing.assert_close(hand(clean), gpt2(clean))


def test_what_senders_write(gpt2, graph, hand, clean):
    hand(clean)
    found = written(graph, gpt2, clean)
    assert graph.senders == list(hand.wrote)
    torch.testing.assert_close(found.parts, torch.stack(list(hand.wrote.values())))


@pytest.mark.parametrize("edge", EDGES)
def test_one_edge(gpt2, graph, hand, clean, corrupted, metric, edge):
    sender, receiver = edge.split("->")
    hand(corrupted)
    other = dict(hand.wrote)
    right = metric(hand(clean, replaced={(receiver, sender)}, other=other)) - metric(hand(clean))
    assert right.abs() > 1e-6
    found = edge_effects(gpt2, clean, corrupted, metric, [edge], verbose=False)
    assert found[edge] == pytest.approx(right.item(), abs=1e-10)
    assert (found.flat != 0).sum() == 1


def test_prompts_of_one_token(gpt2, hand, clean, metric):
    """Of which no keys and values are kept: what is replaced is replaced from the first position
    on.
    """
    clean, corrupted = clean[:, :1], (clean[:, :1] + 7) % 61
    hand(corrupted)
    other = dict(hand.wrote)
    for edge in EDGES[3:]:
        sender, receiver = edge.split("->")
        right = metric(hand(clean, replaced={(receiver, sender)}, other=other)) - metric(
            hand(clean)
        )
        found = edge_effects(gpt2, clean, corrupted, metric, [edge], verbose=False)
        assert found[edge] == pytest.approx(right.item(), abs=1e-10)


def test_many_edges_at_once(gpt2, graph, hand, clean, corrupted):
    hand(corrupted)
    other = dict(hand.wrote)
    generator = torch.Generator().manual_seed(3)
    masks = torch.rand(3, *graph.exists.shape, generator=generator) < torch.tensor(
        [0.2, 0.5, 0.9]
    ).view(3, 1, 1)
    found = run_with_edges_replaced(
        graph, gpt2, {"input_ids": clean}, written(graph, gpt2, corrupted).parts, masks
    )
    for mask, logits in zip(masks, found, strict=True):
        pairs = {
            (graph.receivers[r], graph.senders[s])
            for r, s in (mask & graph.exists).nonzero().tolist()
        }
        torch.testing.assert_close(logits, hand(clean, replaced=pairs, other=other))


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, clean, corrupted):
    bridge = bridge_of(family)
    graph = Graph.of(bridge)
    parts = written(graph, bridge, corrupted).parts
    none, every = run_with_edges_replaced(
        graph, bridge, {"input_ids": clean}, parts, torch.stack([~graph.exists, graph.exists])
    )
    torch.testing.assert_close(none, bridge(clean), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(every, bridge(corrupted), atol=1e-4, rtol=1e-4)
    assert (none - every).abs().max() > 0.01
    metric = logit_difference(torch.tensor([5, 8]), torch.tensor([9, 2]))
    # Two ways to the same numbers: a sweep that starts at the receiver, and a whole run that adds
    # at the receiver.
    found = edge_effects(bridge, clean, corrupted, metric, verbose=False)
    base = metric(bridge(clean))
    for receiver, sender in graph.exists.nonzero().tolist()[:: max(1, graph.n_edges // 12)]:
        mask = torch.zeros_like(graph.exists)
        mask[receiver, sender] = True
        whole = (
            metric(
                run_with_edges_replaced(graph, bridge, {"input_ids": clean}, parts, mask[None])[0]
            )
            - base
        )
        assert found.values[receiver, sender] == pytest.approx(whole.item(), abs=1e-4)
    assert found.values.abs().max() > 1e-3
    assert torch_hooks(bridge.original_model) == 0


#: Grouped keys, parallel blocks, norms after a part, a mixture as one node.
BY_TORCH_HOOKS = {
    "llama": [
        "embed->L0G1.k",
        "L0H2->L1H3.q",
        "L0H1->L0MLP",
        "L0MLP->L2G0.v",
        "L1H3->L2G1.k",
        "L1MLP->logits",
    ],
    "gpt_neox": [
        "embed->L0H1.k",
        "L0H2->L1H3.q",
        "L0H1->L1MLP",
        "L0MLP->L2H0.v",
        "embed->L1MLP",
        "L1H3->logits",
    ],
    "gemma2": [
        "embed->L0G1.k",
        "L0H2->L1H3.q",
        "L0H1->L0MLP",
        "L0MLP->L1G0.v",
        "L1H3->logits",
        "L1MLP->logits",
    ],
    "mixtral": [
        "embed->L0G1.k",
        "L0H2->L1H3.q",
        "L0H1->L0MLP",
        "L0MLP->L1G0.v",
        "L1H3->logits",
        "L1MLP->logits",
    ],
}


@pytest.mark.parametrize("family", BY_TORCH_HOOKS)
def test_edges_of_other_blocks_by_plain_torch_hooks(family, clean, corrupted, metric):
    bridge = bridge_of(family)
    if family != "mixtral":  # its kernel has no float64
        bridge.to(torch.float64)
    hand = ByTorchHooks(bridge.original_model, post_norms=family == "gemma2")
    (one, right), (other, _) = hand.senders(clean), hand.senders(corrupted)
    edges = BY_TORCH_HOOKS[family]
    found = edge_effects(bridge, clean, corrupted, metric, edges, verbose=False)
    exact = (
        1e-5 if family == "mixtral" else 1e-6
    )  # RMS norms compute in float32 whatever they are given
    for edge in edges:
        sender, receiver = edge.split("->")
        change = other[sender] - one[sender]
        by_hand = (metric(hand.with_edge(clean, receiver, change)) - metric(right)).item()
        assert abs(by_hand) > 1e-5, edge
        assert found[edge] == pytest.approx(by_hand, abs=exact, rel=1e-4), edge


def test_with_hooks_of_the_user_in_place(gpt2, clean, corrupted, metric):
    with gpt2.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x * 0.5)]):
        some = edge_effects(gpt2, clean, corrupted, metric, EDGES[:3], verbose=False)
    plain = edge_effects(gpt2, clean, corrupted, metric, EDGES[:3], verbose=False)
    assert all(some[edge] != pytest.approx(plain[edge], abs=1e-6) for edge in EDGES[:3])


@pytest.mark.parametrize("edge", EDGES)
def test_a_direct_path_is_an_edge(gpt2, clean, corrupted, metric, edge):
    sender, receiver = edge.split("->")
    found = path_patching(gpt2, clean, corrupted, metric, [sender], [receiver], through_mlps=False)
    assert found == pytest.approx(
        edge_effects(gpt2, clean, corrupted, metric, [edge], verbose=False)[edge], abs=1e-9
    )


def test_paths_through_mlps_by_plain_torch_hooks(gpt2, clean, corrupted, metric):
    """To the logits: all attention as in the clean run but for one head, MLPs free."""
    model = gpt2.original_model
    attention = [block.attn for block in model.transformer.h]

    def outputs(tokens):
        seen, handles = {}, []
        for i, module in enumerate(attention):
            keep_out = lambda m, args, out, i=i: seen.update({("out", i): out[0]})
            keep_z = lambda m, args, i=i: seen.update({("z", i): args[0]})
            handles += [
                module.register_forward_hook(keep_out),
                module.c_proj.register_forward_pre_hook(keep_z),
            ]
        logits = model(tokens).logits
        for handle in handles:
            handle.remove()
        return logits, seen

    right, one = outputs(clean)
    _, other = outputs(corrupted)
    change = (other["z", 1] - one["z", 1])[..., 8:16] @ attention[1].c_proj.weight[8:16]
    held = [one["out", i] + (change if i == 1 else 0) for i in range(3)]
    handles = [
        module.register_forward_hook(lambda m, args, out, i=i: (held[i], *out[1:]))
        for i, module in enumerate(attention)
    ]
    patched = model(clean).logits
    for handle in handles:
        handle.remove()
    found = path_patching(gpt2, clean, corrupted, metric, ["L1H1"], ["logits"])
    assert found == pytest.approx((metric(patched) - metric(right)).item(), abs=1e-10)
    assert found != pytest.approx(
        path_patching(gpt2, clean, corrupted, metric, ["L1H1"], ["logits"], False), abs=1e-6
    )


def test_several_senders_and_receivers_by_hand(gpt2, hand, clean, corrupted, metric):
    hand(corrupted)
    other = dict(hand.wrote)
    base = metric(hand(clean))
    one = dict(hand.wrote)
    frozen = {name: value for name, value in one.items() if "H" in name}
    frozen |= {"L0H0": other["L0H0"], "L1H2": other["L1H2"]}
    hand(clean, embed=other["embed"], outputs=frozen)
    receivers = ["L1H1.q", "L2H0.q", "L2H0.k", "L2H0.v", "L2MLP"]
    inputs = {name: hand.read[name] for name in receivers}
    right = metric(hand(clean, inputs=inputs)) - base
    found = path_patching(
        gpt2, clean, corrupted, metric, ["L0H0", "L1H2", "embed"], ["L1H1.q", "L2H0", "L2MLP"]
    )
    assert found == pytest.approx(right.item(), abs=1e-10)


def test_refusals(gpt2, clean, corrupted, metric):
    with pytest.raises(
        ValueError, match=r"no edge L1H0->L0H1\.q: L1H0 writes after L0H1\.q has read"
    ):
        edge_effects(gpt2, clean, corrupted, metric, ["L1H0->L0H1.q"], verbose=False)
    with pytest.raises(ValueError, match=r"no sender 'L9H0'"):
        path_patching(gpt2, clean, corrupted, metric, ["L9H0"], ["logits"])
    with pytest.raises(ValueError, match="is no edge; one is written like"):
        edge_effects(gpt2, clean, corrupted, metric, ["L1H0"], verbose=False)
    with pytest.raises(ValueError, match="one sender and one receiver"):
        path_patching(gpt2, clean, corrupted, metric, [], ["logits"])
    with pytest.raises((ValueError, TypeCheckError)):  # whichever looks first at the shapes
        edge_effects(gpt2, clean, corrupted[:, :4], metric, verbose=False)
    with pytest.raises(ValueError, match="norms are applied to its residual stream itself"):
        Graph.of(bridge_of("bert"))


def test_a_stream_that_is_no_sum_of_its_parts_is_refused(gpt2, clean, corrupted, metric):
    with (
        gpt2.hooks(fwd_hooks=[("blocks.2.hook_resid_pre", lambda x, hook: x * 1.1)]),
        pytest.raises(ValueError, match="does not add up to the residual stream"),
    ):
        edge_effects(gpt2, clean, corrupted, metric, verbose=False)


def test_nothing_differs(gpt2, clean, metric):
    assert not edge_effects(gpt2, clean, clean, metric, verbose=False).values.any()
