"""What TransformerLens 4.3 computes on the shipped model, in a process where `transformer_lens` is
theirs: ``python their_transformer_lens.py INPUTS OUTPUTS``.
"""

import sys

import torch
from transformer_lens import patching
from transformer_lens.head_detector import detect_head
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis import direct_logit_attribution
from transformer_lens.tools.analysis.attribution_patching import (
    EdgeAttributionConfig,
    attribution_patch,
)
from transformer_lens.tools.analysis.interchange import SubspaceInterchange
from transformers import AutoModelForCausalLM, AutoTokenizer


def booted(folder):
    """Return their bridge of the model."""
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    return TransformerBridge.boot_transformers(
        folder,
        hf_model=hf,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        device="cpu",
        dtype=torch.float64,
    )


def edge_name(sender, receiver):
    """Return an edge's name in our graph."""
    names = []
    for node in (sender, receiver):
        kind = node.kind
        if kind in ("embed", "logits"):
            names.append(kind)
        elif kind.startswith("mlp"):
            names.append(f"L{node.layer}MLP")
        else:
            side = f".{kind[0]}" if kind.endswith("input") else ""
            names.append(f"L{node.layer}H{node.head}{side}")
    return "->".join(names)


def summed(scores, name):
    """Return scores by name, summed over positions."""
    result = {}
    for key, score in scores.items():
        result[name(key)] = result.get(name(key), 0.0) + score
    return result


def scores(model, inputs):
    """Return attribution patching of nodes and edges of one pair."""
    clean, corrupted = inputs["clean"][:1], inputs["corrupted"][:1]
    right, wrong = inputs["answers"][0], inputs["wrong"][0]
    metric = lambda logits: logits[0, -1, right] - logits[0, -1, wrong]
    nodes, edges = (
        attribution_patch(model, clean, corrupted, metric, EdgeAttributionConfig(granularity=kind))
        for kind in ("node", "edge")
    )
    return {
        "nodes": summed(nodes.node_scores, lambda node: edge_name(node, node).split("->")[0]),
        "edges": summed(edges.edge_scores, lambda edge: edge_name(*edge)),
    }


def patched(model, inputs):
    """Return tables of activation patching."""
    rows = torch.arange(len(inputs["clean"]))
    _, cache = model.run_with_cache(inputs["clean"])
    _, other = model.run_with_cache(inputs["corrupted"])

    def metric(logits):
        last = logits[:, -1]
        return (last[rows, inputs["answers"]] - last[rows, inputs["wrong"]]).mean()

    arguments = model, inputs["corrupted"], cache, metric
    path = patching.get_act_patch_direct_path(
        model, inputs["corrupted"], cache, other, metric, 0, 0, "v", verbose=False
    )
    return {
        "resid_pre": patching.get_act_patch_resid_pre(*arguments),
        "heads": patching.get_act_patch_attn_head_out_all_pos(*arguments),
        "patterns": patching.get_act_patch_attn_head_pattern_all_pos(*arguments),
        "path": path,
    }


def interchanged(model, inputs):
    """Return the logits with a subspace's coordinates of other prompts."""
    name, swap = "blocks.1.hook_out", SubspaceInterchange(inputs["basis"])
    _, cache = model.run_with_cache(inputs["clean"], names_filter=name)
    hook = lambda act, hook: swap(act, cache[name])
    return model.run_with_hooks(inputs["corrupted"], fwd_hooks=[(name, hook)])


def processed(folder, inputs):
    """Return what needs processed weights."""
    model = booted(folder)
    model.enable_compatibility_mode()
    names = ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_gate", "W_U", "W_E")
    result = {"weights": {name: getattr(model, name) for name in names}}
    for unit in ("component", "head"):
        terms = direct_logit_attribution(
            model, inputs["clean"], inputs["answers"], inputs["wrong"], unit=unit
        )
        result[unit] = dict(zip(terms.labels, terms.attribution, strict=True))
    for mode in "QKV":
        scores = model.all_composition_scores(mode)
        result[f"composition {mode}"] = getattr(scores, "scores", scores)
    return result


def main(source, target):
    inputs = torch.load(source)
    model = booted(inputs["folder"])
    result = scores(model, inputs) | patched(model, inputs)
    text = model.to_string(inputs["repeated"])
    kinds = ("previous_token_head", "duplicate_token_head", "induction_head")
    model.to_tokens = lambda text, **options: inputs["repeated"][None]
    result["detected"] = {kind: detect_head(model, text, kind) for kind in kinds}
    result["interchange"] = interchanged(model, inputs)
    result |= processed(inputs["folder"], inputs)
    torch.save(result, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
