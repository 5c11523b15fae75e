"""Edges replaced one at a time, and paths from some senders to some receivers, by running the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.circuits.graph import Graph, Port
from bridge.circuits.metrics import Metric
from bridge.circuits.scores import EdgeScores
from bridge.circuits.senders import SenderOutputs, written_in_both
from bridge.circuits.single_edges import effects_of_edges
from bridge.hooks.arguments import refuse_wrong_types
from bridge.hooks.hook_point import HookPoint


@torch.no_grad()
@refuse_wrong_types
def edge_effects(
    bridge: TransformerBridge,
    clean: Int[Tensor, "batch pos"],
    corrupted: Int[Tensor, "batch pos"],
    metric: Metric,
    edges: Sequence[str] | None = None,
    verbose: bool = True,
) -> EdgeScores:
    """By how much the metric of the clean run changes if an edge carries what its sender writes in the corrupted run.

    Each edge is replaced alone, and the rest of the model runs from there (Goldowsky-Dill et al. 2023, "Localizing
    Model Behavior with Path Patching"). Runs start at the receiver's layer, and share batches, where that changes no
    result.

    Args:
        bridge: the bridge.
        clean, corrupted: pairs of prompts, ``[batch, pos]``.
        metric: from logits ``[batch, pos, d_vocab]`` to one number.
        edges: such as ``"L0H1->L3H2.q"``; None: all. Others have the score 0.
        verbose: show a progress bar.

    Raises:
        ValueError: pairs that do not fit, a model without such a graph, an unknown edge.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import edge_effects
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 2)
        >>> edge = "embed->L0H0.v"
        >>> effects = edge_effects(bridge, pairs.clean, pairs.corrupted, pairs.metric(), [edge], verbose=False)
    """
    graph = Graph.of(bridge)
    return EdgeScores(graph, effects_of_edges(graph, bridge, clean, corrupted, metric, edges, verbose))


@torch.no_grad()
@refuse_wrong_types
def path_patching(
    bridge: TransformerBridge,
    clean: Int[Tensor, "batch pos"],
    corrupted: Int[Tensor, "batch pos"],
    metric: Metric,
    senders: Sequence[str],
    receivers: Sequence[str],
    through_mlps: bool = True,
) -> float:
    """By how much the metric of the clean run changes by what some senders tell some receivers.

    The receivers get the inputs that they would have if the senders wrote what they write in the corrupted run while
    all other heads kept what they write in the clean one; then the model runs with these inputs (Wang et al. 2022,
    "Interpretability in the Wild"). MLPs on the way pass the difference on, or keep theirs, too.

    Args:
        bridge: the bridge.
        clean, corrupted: pairs of prompts, ``[batch, pos]``.
        metric: from logits ``[batch, pos, d_vocab]`` to one number.
        senders: such as ``"L1H0"``, ``"L2MLP"``, ``"embed"``.
        receivers: such as ``"L3H2.q"``; ``"L3H2"``, all inputs of a head; ``"L3MLP"``; ``"logits"``.
        through_mlps: whether MLPs that are no senders follow what they read. False: direct edges alone.

    Raises:
        ValueError: pairs that do not fit, a model without such a graph, an unknown name, no sender or no receiver.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import path_patching
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 2)
        >>> change = path_patching(bridge, pairs.clean, pairs.corrupted, pairs.metric(), ["L2H1"], ["logits"])
    """
    if not senders or not receivers:
        raise ValueError("path patching needs one sender and one receiver, or more")
    graph = Graph.of(bridge)
    sending = {graph.sender(name) for name in senders}
    receiving = sorted({index for name in receivers for index in graph.receivers_named(name)})
    one, other = written_in_both(graph, bridge, clean, corrupted)
    inputs = _inputs(graph, bridge, clean, one, other, sending, through_mlps)
    hooks: list[Any] = []
    for port in graph.ports:
        mine = [index - port.first for index in receiving if port.first <= index < port.first + port.count]
        if mine:
            hooks.append((port.name, _given(port, mine, inputs[port.name])))
    patched = bridge.run_with_hooks(clean, fwd_hooks=hooks)
    return float(metric(patched)) - float(metric(one.logits))


def _given(port: Port, which: list[int], stream: Tensor) -> Callable[..., Tensor]:
    def give(activation: Tensor, hook: HookPoint) -> Tensor:
        if not port.per_head:
            return stream
        activation = activation.clone()
        activation[:, :, which] = stream.unsqueeze(2)
        return activation

    return give


def _inputs(
    graph: Graph,
    bridge: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    one: SenderOutputs,
    other: SenderOutputs,
    sending: set[int],
    through_mlps: bool,
) -> dict[str, Tensor]:
    """The residual stream at each port in a run with the senders replaced and all other heads as they were."""
    change = other.parts - one.parts
    hooks: list[Any] = []
    if 0 in sending:
        hooks.append(("blocks.0.hook_resid_pre", _always(other.parts[0])))
    for layer, shape in enumerate(graph.layers):
        first = graph.first_head[layer]
        if shape.heads:
            mine = [index for index in range(first, first + shape.heads) if index in sending]
            hooks.append((f"blocks.{layer}.hook_attn_out", _always(one.attn_out[layer] + change[mine].sum(0))))
        mlp = first + shape.heads
        if shape.mlp and mlp in sending:
            hooks.append((f"blocks.{layer}.hook_mlp_out", _always(other.parts[mlp])))
        elif shape.mlp and not through_mlps:
            hooks.append((f"blocks.{layer}.hook_mlp_out", _always(one.parts[mlp])))
    seen: dict[str, Tensor] = {}

    def see(activation: Tensor, hook: HookPoint) -> None:
        seen[hook.name] = activation.clone()

    streams = {port.name: _stream(graph, port) for port in graph.ports}
    hooks += [(name, see) for name in dict.fromkeys(streams.values())]
    bridge.run_with_hooks(tokens, fwd_hooks=hooks)
    return {name: seen[stream] for name, stream in streams.items()}


def _stream(graph: Graph, port: Port) -> str:
    """The hook point of the residual stream that a port reads."""
    if port.layer == len(graph.layers):
        return port.name
    mid = port.name.endswith("hook_mlp_in") and not graph.layers[port.layer].parallel and graph.layers[port.layer].heads
    return f"blocks.{port.layer}.hook_resid_{'mid' if mid else 'pre'}"


def _always(value: Tensor) -> Callable[..., Tensor]:
    return lambda activation, hook: value
