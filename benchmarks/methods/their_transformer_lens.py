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


def scores(model, given):
    """Return attribution patching of nodes and edges of one pair."""
    clean, corrupted = given["clean"][:1], given["corrupted"][:1]
    right, wrong = given["answers"][0], given["wrong"][0]
    metric = lambda logits: logits[0, -1, right] - logits[0, -1, wrong]
    nodes, edges = (
        attribution_patch(model, clean, corrupted, metric, EdgeAttributionConfig(granularity=kind))
        for kind in ("node", "edge")
    )
    return {
        "nodes": summed(nodes.node_scores, lambda node: edge_name(node, node).split("->")[0]),
        "edges": summed(edges.edge_scores, lambda edge: edge_name(*edge)),
    }


def patched(model, given):
    """Return tables of activation patching."""
    rows = torch.arange(len(given["clean"]))
    _, cache = model.run_with_cache(given["clean"])
    _, other = model.run_with_cache(given["corrupted"])

    def metric(logits):
        last = logits[:, -1]
        return (last[rows, given["answers"]] - last[rows, given["wrong"]]).mean()

    arguments = model, given["corrupted"], cache, metric
    path = patching.get_act_patch_direct_path(
        model, given["corrupted"], cache, other, metric, 0, 0, "v", verbose=False
    )
    return {
        "resid_pre": patching.get_act_patch_resid_pre(*arguments),
        "heads": patching.get_act_patch_attn_head_out_all_pos(*arguments),
        "patterns": patching.get_act_patch_attn_head_pattern_all_pos(*arguments),
        "path": path,
    }


def interchanged(model, given):
    """Return the logits with a subspace's coordinates of other prompts."""
    name, swap = "blocks.1.hook_out", SubspaceInterchange(given["basis"])
    _, cache = model.run_with_cache(given["clean"], names_filter=name)
    hook = lambda act, hook: swap(act, cache[name])
    return model.run_with_hooks(given["corrupted"], fwd_hooks=[(name, hook)])


def processed(folder, given):
    """Return what needs processed weights."""
    model = booted(folder)
    model.enable_compatibility_mode()
    names = ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_gate", "W_U", "W_E")
    result = {"weights": {name: getattr(model, name) for name in names}}
    for unit in ("component", "head"):
        found = direct_logit_attribution(
            model, given["clean"], given["answers"], given["wrong"], unit=unit
        )
        result[unit] = dict(zip(found.labels, found.attribution, strict=True))
    for mode in "QKV":
        scores = model.all_composition_scores(mode)
        result[f"composition {mode}"] = getattr(scores, "scores", scores)
    return result


def main(inputs, outputs):
    given = torch.load(inputs)
    model = booted(given["folder"])
    result = scores(model, given) | patched(model, given)
    text = model.to_string(given["repeated"])
    kinds = ("previous_token_head", "duplicate_token_head", "induction_head")
    model.to_tokens = lambda text, **options: given["repeated"][None]
    result["detected"] = {kind: detect_head(model, text, kind) for kind in kinds}
    result["interchange"] = interchanged(model, given)
    result |= processed(given["folder"], given)
    torch.save(result, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
