"""EAP-IG (hannamw/EAP-IG): scores of edges by each of its methods, and what the best edges keep."""

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


def numbers():
    config = HookedTransformerConfig(
        n_layers=2, d_model=16, n_ctx=12, n_heads=2, d_head=8, act_fn="gelu", d_vocab=23, seed=3, device="cpu",
        use_attn_result=True, use_split_qkv_input=True, use_hook_mlp_in=True, ungroup_grouped_query_attention=True,
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
    for method in ("EAP", "EAP-IG-inputs", "EAP-IG-activations", "exact"):
        graph = Graph.from_model(model)
        eap.attribute.attribute(model, graph, loader, metric, method, ig_steps=3, quiet=True)
        found[method] = graph.scores[graph.real_edge_mask]
    graph.apply_topn(20, True)
    found["kept"] = evaluate.evaluate_graph(model, graph, loader, metric, quiet=True)
    return found
