"""EAP-IG (hannamw/EAP-IG): scores of edges by each of its methods, and what the best edges keep."""

import tempfile

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

_zeros = torch.zeros
torch.zeros = lambda *size, device=None, **options: _zeros(
    *size, device=None if device == "cuda" else device, **options
)
import eap.attribute
import eap.attribute_node
import eap.utils
from eap.graph import Graph


class Prompts:
    """In the place of its tokenizer: texts are numbers."""

    padding_side = "right"


#: Its methods, and what `bridge.circuits` calls them.
METHODS = {
    "EAP": "gradient",
    "EAP-IG-inputs": "inputs",
    "EAP-IG-activations": "activations",
    "clean-corrupted": "clean_corrupted",
    "information-flow-routes": None,
    "exact": None,
}


#: What its code puts in the place of activations, and what `bridge.circuits` calls it.
ABLATIONS = {"zero": "zero", "mean-positional": "mean"}


def as_bridge_circuits_has_it(method, graph, model, texts, ablation="resample"):
    """The same scores, of a model whose keys stay grouped, too; and each reads the other's file."""
    from bridge.circuits import Circuit, edge_attribution, edge_effects, information_flow
    from bridge.circuits import Graph as OurGraph

    graph.apply_topn(20, True)
    with tempfile.TemporaryDirectory() as folder:
        graph.to_json(f"{folder}/theirs.json")
        theirs = Circuit.load(f"{folder}/theirs.json")
        theirs.to_mib(f"{folder}/ours.json", model)
        again = Graph.from_json(f"{folder}/ours.json")
    assert torch.equal(again.scores, graph.scores) and torch.equal(again.in_graph, graph.in_graph)
    labels = torch.tensor([1, 2, 3])
    model.eval()
    pair = texts["clean"], texts["corrupted"]

    def metric(logits):  # theirs is the mean over prompts, of a sum over batches' gradients
        return logits[torch.arange(3), -1, labels].mean()

    def scored():
        graph = OurGraph.of(model, grouped=False)
        given = {
            "ablation": ablation,
            "reference": pair[0] if ablation == "mean" else None,
            "graph": graph,
        }
        if method == "exact":
            return edge_effects(model, *pair, metric, verbose=False, **given).values
        if method == "information-flow-routes":
            return information_flow(model, pair[0], graph).values
        return edge_attribution(model, *pair, metric, METHODS[method], steps=3, **given).values

    found = [scored()]
    if model.grouped is not None:  # what was repeated
        model.set_ungroup_grouped_query_attention(False)
        assert OurGraph.of(model) != OurGraph.of(model, grouped=False)
        found.append(scored())
        model.set_ungroup_grouped_query_attention(True)
    scale = (
        1 if method in ("exact", "information-flow-routes") else len(labels)
    )  # they divide by the prompts again
    for ours in found:
        difference = (ours - theirs.scores * scale).abs()
        if (ablation, model.cfg.positional_embedding_type) == ("zero", "standard"):
            difference = difference[:, 1:]  # its embeddings are without positions, which stay there
        difference = difference.max()
        assert difference < 1e-6 * max(1, float(ours.abs().max())), (method, difference)


#: Its methods for nodes and neurons, and what `bridge.circuits` calls them. Its exact one ends in
#: an error.
NODE_METHODS = {"EAP": "gradient", "EAP-IG-inputs": "inputs", "EAP-IG-activations": "activations"}


def nodes_as_bridge_circuits_has_them(method, graph, model, texts, metric, loader):
    """The same scores of nodes and neurons, and the same of circuits of neurons; and each reads the
    other's files.
    """
    from eap.evaluate import evaluate_graph

    from bridge.circuits import Circuit, node_attribution

    labels = torch.tensor([1, 2, 3])
    pair = texts["clean"], texts["corrupted"]

    def mean(logits):
        return logits[torch.arange(3), -1, labels].mean()

    ours = node_attribution(model, *pair, mean, NODE_METHODS[method], steps=3, mlps="input")
    difference = (ours.neurons - graph.neurons_scores * len(labels)).abs().max()
    assert difference < 1e-6 * max(1, float(ours.neurons.abs().max())), (method, difference)
    graph.apply_topn(40, True, level="neuron", prune=True)
    circuit = ours.top_neurons(40).pruned()
    kept = evaluate_graph(model, graph, loader, metric, quiet=True).mean()
    assert abs(circuit.evaluate(model, *pair, mean).circuit - float(kept)) < 1e-6
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("json", "pt"):
            circuit.to_mib(f"{folder}/ours.{kind}", model)
            assert Circuit.load(f"{folder}/ours.{kind}") == circuit
        again = [Graph.from_json(f"{folder}/ours.json"), Graph.from_pt(f"{folder}/ours.pt")]
        for one in again:
            assert torch.equal(one.neurons_in_graph.bool(), circuit.neurons)
            assert torch.equal(one.in_graph, circuit.mask.T)
        graph.in_graph &= graph.real_edge_mask
        graph.to_pt(f"{folder}/theirs.pt")
        assert torch.equal(
            Circuit.load(f"{folder}/theirs.pt").neurons, graph.neurons_in_graph.bool()
        )


OURS = HookedTransformer.__module__.startswith("bridge.")


def ablated_numbers(model, positions, loader, metric, texts):
    found = {}
    for intervention, ablation in ABLATIONS.items():
        for method in ("EAP", "exact"):
            graph = Graph.from_model(model)
            eap.attribute.attribute(
                model,
                graph,
                loader,
                metric,
                method,
                intervention,
                quiet=True,
                intervention_dataloader=loader,
            )
            found[f"{positions}.{method}.{intervention}"] = graph.scores[
                graph.real_edge_mask
            ].clone()
            if OURS:
                as_bridge_circuits_has_it(method, graph, model, texts, ablation)
    return found


def node_numbers(model, positions, loader, metric, texts):
    found = {}
    for method in NODE_METHODS:
        for level in ("node", "neuron"):
            graph = Graph.from_model(
                model, neuron_level=level == "neuron", node_scores=level == "node"
            )
            eap.attribute_node.attribute_node(
                model,
                graph,
                loader,
                metric,
                method,
                ig_steps=3,
                quiet=True,
                neuron=level == "neuron",
            )
            scores = graph.nodes_scores if level == "node" else graph.neurons_scores
            found[f"{positions}.{method}.{level}"] = scores.clone()
            if OURS and level == "neuron":
                nodes_as_bridge_circuits_has_them(method, graph, model, texts, metric, loader)
    return found


def numbers():
    return numbers_of("standard") | numbers_of("rotary") | numbers_of("rotary", n_key_value_heads=1)


def numbers_of(positions, **options):
    config = HookedTransformerConfig(
        n_layers=2,
        d_model=16,
        n_ctx=12,
        n_heads=2,
        d_head=8,
        act_fn="gelu",
        d_vocab=23,
        seed=3,
        device="cpu",
        use_attn_result=True,
        use_split_qkv_input=True,
        use_hook_mlp_in=True,
        ungroup_grouped_query_attention=True,
        positional_embedding_type=positions,
        rotary_dim=8,
        **options,
    )
    model = HookedTransformer(config)
    if options:
        model.set_ungroup_grouped_query_attention(True)
        positions += ".grouped"
    clean = torch.arange(24).reshape(3, 8) % 23
    texts = {"clean": clean, "corrupted": (clean * 7 + 1) % 23}

    def tokenized(model, inputs, max_length=None):
        tokens = texts[inputs[0]]
        return (
            tokens,
            torch.ones_like(tokens),
            torch.full((len(tokens),), tokens.shape[1]),
            tokens.shape[1],
        )

    from eap import attribute, evaluate

    for module in (attribute, evaluate, eap.utils, eap.attribute_node):
        module.tokenize_plus = tokenized
    loader = [(["clean"] * 3, ["corrupted"] * 3, torch.tensor([1, 2, 3]))]

    def metric(logits, clean_logits, lengths, labels):
        return logits[torch.arange(len(labels)), lengths - 1, labels].mean()

    found = {}
    for method in METHODS:
        if (method, positions) == ("information-flow-routes", "standard"):
            continue  # it counts tokens without positions as what enters, and divides 0 by 0
        graph = Graph.from_model(model)
        eap.attribute.attribute(model, graph, loader, metric, method, ig_steps=3, quiet=True)
        found[f"{positions}.{method}"] = graph.scores[graph.real_edge_mask].clone()
        if method == "EAP-IG-activations" and positions != "standard":
            # Where a hook replaces the embeddings, nothing before the first layer requires a
            # gradient, and there TransformerLens calls no backward hooks. Here they are called: its
            # first six edges have gradients.
            found[f"{positions}.{method}"][: 3 * model.cfg.n_heads] = 0
        if OURS:
            as_bridge_circuits_has_it(method, graph, model, texts)
    for more in (ablated_numbers, node_numbers):
        found |= more(model, positions, loader, metric, texts)
    graph = Graph.from_model(model)
    eap.attribute.attribute(model, graph, loader, metric, "EAP", quiet=True)
    graph.apply_topn(20, True)
    found[f"{positions}.kept"] = evaluate.evaluate_graph(model, graph, loader, metric, quiet=True)
    return found
