"""EAP-IG (hannamw/EAP-IG): scores of edges by each of its methods, and what the best edges keep."""

import tempfile

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

_zeros = torch.zeros
torch.zeros = lambda *size, device=None, **options: _zeros(
    *size, device=None if device == "cuda" else device, **options
)
import eap.attribute
from eap.graph import Graph


class Prompts:
    """In the place of its tokenizer: texts are numbers."""

    padding_side = "right"


#: Its methods, and what `bridge.circuits` calls them.
METHODS = {
    "EAP": "gradient", "EAP-IG-inputs": "inputs", "EAP-IG-activations": "activations",
    "clean-corrupted": "clean_corrupted", "information-flow-routes": None, "exact": None,
}  # fmt: skip


def as_bridge_circuits_has_it(method, graph, model, texts):
    """The same scores; and each reads the other's file."""
    from bridge.circuits import Circuit, edge_attribution, edge_effects, information_flow

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

    if method == "exact":
        ours = edge_effects(model, *pair, metric, verbose=False)
    elif method == "information-flow-routes":
        ours = information_flow(model, pair[0])
    else:
        ours = edge_attribution(model, *pair, metric, METHODS[method], steps=3)
    scale = 1 if method in ("exact", "information-flow-routes") else len(labels)  # they divide by the prompts again
    difference = (ours.values - theirs.scores * scale).abs().max()
    assert difference < 1e-6 * max(1, float(ours.values.abs().max())), (method, difference)


def numbers():
    return numbers_of("standard") | numbers_of("rotary")


def numbers_of(positions):
    config = HookedTransformerConfig(
        n_layers=2, d_model=16, n_ctx=12, n_heads=2, d_head=8, act_fn="gelu", d_vocab=23, seed=3, device="cpu",
        use_attn_result=True, use_split_qkv_input=True, use_hook_mlp_in=True, ungroup_grouped_query_attention=True,
        positional_embedding_type=positions, rotary_dim=8,
    )  # fmt: skip
    model = HookedTransformer(config)
    clean = torch.arange(24).reshape(3, 8) % 23
    texts = {"clean": clean, "corrupted": (clean * 7 + 1) % 23}

    def tokenized(model, inputs, max_length=None):
        tokens = texts[inputs[0]]
        return tokens, torch.ones_like(tokens), torch.full((len(tokens),), tokens.shape[1]), tokens.shape[1]

    from eap import attribute, evaluate

    attribute.tokenize_plus = evaluate.tokenize_plus = tokenized
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
        if (method, positions) == ("EAP-IG-activations", "rotary"):
            # Where a hook replaces the embeddings, nothing before the first layer requires a gradient, and there
            # TransformerLens calls no backward hooks. Here they are called: its first six edges have gradients.
            found[f"{positions}.{method}"][: 3 * model.cfg.n_heads] = 0
        if HookedTransformer.__module__.startswith("bridge."):
            as_bridge_circuits_has_it(method, graph, model, texts)
    graph = Graph.from_model(model)
    eap.attribute.attribute(model, graph, loader, metric, "EAP", quiet=True)
    graph.apply_topn(20, True)
    found[f"{positions}.kept"] = evaluate.evaluate_graph(model, graph, loader, metric, quiet=True)
    return found
