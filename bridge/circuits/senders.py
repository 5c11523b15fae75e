"""What each head and MLP writes to the residual stream in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.analysis.residual_norms import post_norm
from bridge.bridge import TransformerBridge
from bridge.circuits.graph import Graph

#: How far the parts may be from their sum, of its largest entry.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}  # some norms compute in float32 whatever they are given


@dataclass(frozen=True)
class SenderOutputs:
    """What a run's senders wrote.

    Attributes:
        parts: ``[sender, batch, pos, d_model]``. A head's is without the output projection's bias; where a norm follows
            attention, it is what that norm makes of the head's share, its scale held.
        logits: ``[batch, pos, d_vocab]``.
        attn_out: for each layer with attention, what it adds as a whole, ``[batch, pos, d_model]``.
        end: the residual stream after the last block, ``[batch, pos, d_model]``.
    """

    parts: Float[Tensor, "sender batch pos d_model"]
    logits: Float[Tensor, "batch pos d_vocab"]
    attn_out: Mapping[int, Tensor]
    end: Float[Tensor, "batch pos d_model"]


def names_of(graph: Graph, bridge: TransformerBridge, layer: int) -> list[str]:
    """The hook points that say what a layer's senders write.

    Args:
        graph: the graph.
        bridge: the bridge.
        layer: the layer.
    """
    block, shape = f"blocks.{layer}", graph.layers[layer]
    names = []
    if shape.heads:
        names.append(f"{block}.attn.hook_result")
        if f"{block}.ln1_post.hook_scale" in bridge.hook_dict:
            names += [f"{block}.attn.hook_out", f"{block}.ln1_post.hook_scale"]
    if shape.mlp:
        names.append(f"{block}.hook_mlp_out")
    return names


def heads_of(
    bridge: TransformerBridge, seen: Mapping[str, Tensor], layer: int
) -> Float[Tensor, "head batch pos d_model"]:
    """What a layer's heads write, from what was seen at the hook points of `names_of`.

    Args:
        bridge: the bridge.
        seen: activations by name.
        layer: the layer.
    """
    block = f"blocks.{layer}"
    results = seen[f"{block}.attn.hook_result"]
    if f"{block}.ln1_post.hook_scale" in seen:
        norm = post_norm(bridge, layer, "attn")
        assert norm is not None
        rest = seen[f"{block}.attn.hook_out"] - results.sum(-2)  # the bias, of which every head has its share
        results = results + (rest / results.shape[-2]).unsqueeze(-2)
        results = norm.linear(results, seen[f"{block}.ln1_post.hook_scale"].unsqueeze(-2)).to(rest.dtype)
    return results.movedim(-2, 0)


@torch.no_grad()
def written(graph: Graph, bridge: TransformerBridge, tokens: Int[Tensor, "batch pos"]) -> SenderOutputs:
    """Runs a model and takes apart what its senders write.

    Args:
        graph: its graph.
        bridge: the bridge.
        tokens: ``[batch, pos]``.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import Graph
        >>> from bridge.circuits.senders import written
        >>> bridge = TransformerBridge.boot_embedded()
        >>> written(Graph.of(bridge), bridge, bridge.to_tokens("Mary and")).parts.shape
        torch.Size([21, 1, 3, 128])
    """
    n = len(graph.layers)
    names = ["blocks.0.hook_resid_pre", f"blocks.{n - 1}.hook_resid_post"]
    for layer, shape in enumerate(graph.layers):
        names += names_of(graph, bridge, layer)
        if shape.heads:
            names.append(f"blocks.{layer}.hook_attn_out")
    logits, cache = bridge.run_with_cache(tokens, names_filter=names)
    embed = cache["blocks.0.hook_resid_pre"]
    parts = embed.new_empty(len(graph.senders), *embed.shape)
    parts[0] = embed
    attn_out = {}
    for layer, shape in enumerate(graph.layers):
        at = graph.first_head[layer]
        if shape.heads:
            parts[at : at + shape.heads] = heads_of(bridge, cache, layer)
            attn_out[layer] = cache[f"blocks.{layer}.hook_attn_out"]
        if shape.mlp:
            parts[at + shape.heads] = cache[f"blocks.{layer}.hook_mlp_out"]
    return SenderOutputs(parts, logits, attn_out, cache[f"blocks.{n - 1}.hook_resid_post"])


def written_in_both(
    graph: Graph, bridge: TransformerBridge, clean: Int[Tensor, "batch pos"], corrupted: Int[Tensor, "batch pos"]
) -> tuple[SenderOutputs, SenderOutputs]:
    """What the senders write in two runs.

    Args:
        graph: the graph.
        bridge: the bridge.
        clean, corrupted: ``[batch, pos]``.

    Raises:
        ValueError: the prompts differ in shape, or are the same; or the parts do not add up to the stream, so that it
            is no plain sum of what the graph's nodes write.
    """
    if clean.shape != corrupted.shape:
        raise ValueError(
            f"clean tokens are {list(clean.shape)} and corrupted ones {list(corrupted.shape)}: pairs need one shape, "
            "[batch, pos]"
        )
    one, other = written(graph, bridge, clean), written(graph, bridge, corrupted)
    right = other.end - one.end
    found = (other.parts - one.parts).sum(0)
    largest = max(right.abs().max().item(), one.end.abs().max().item() * 1e-3)
    tolerance = TOLERANCE.get(right.dtype, 30 * torch.finfo(right.dtype).eps) * largest
    if not torch.allclose(found, right, rtol=0, atol=tolerance):
        raise ValueError(
            f"in {bridge.cfg.model_name} what heads and MLPs write does not add up to the residual stream: it has no "
            "graph of residual edges"
        )
    return one, other
