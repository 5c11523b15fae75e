"""Scores of edges and nodes: what replacing each does to a metric, from gradients or measured; or trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.circuits.circuits import EdgeScores, NodeScores
from bridge.circuits.edge_runs import OwnKeys, ablated, effects_of_edges, graph_of, run_with_edges_replaced
from bridge.circuits.graph import (
    Graph,
    Metric,
    Port,
    SenderOutputs,
    check_rate,
    divergence_at_last_tokens,
    gradients_of,
    one_number,
    pairs_of,
    refuse_another_sum,
    refuse_inference_mode,
    token_mask,
    written,
    written_in_both,
)
from bridge.hooks.arguments import check_choice, check_positive, refuse_wrong_types
from bridge.hooks.hooks import HookPoint
from bridge.hooks.modules import close
from bridge.hooks.rows import tiled
from bridge.patching.lazy_logits import lazy
from bridge.patching.runs import CorruptedRun, may_start_later, tokens_per_run
from bridge.run.inputs import Prompts, prompts_with

METHODS = ("gradient", "inputs", "clean_corrupted", "activations", "own_activations")

#: On the way from here to the metric lie all receivers.
BEGIN = "blocks.0.hook_resid_pre"


@refuse_wrong_types
def edge_attribution(
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric,
    method: str = "inputs",
    steps: int = 5,
    graph: Graph | None = None,
    ablation: str | Float[Tensor, "constant d_model"] = "resample",
    reference: Prompts | None = None,
    **model_kwargs: Any,
) -> EdgeScores:
    """Estimates for every edge by how much the metric would change if the edge carried the corrupted run's activation.

    The score of an edge is the difference of what its sender writes in the two runs (corrupted less clean), times the
    gradient of the metric at its receiver's input, summed over positions and prompts. The gradient is that of

    - ``"gradient"`` (EAP): the clean run (Syed, Rager and Conmy 2023, "Attribution Patching Outperforms Automated
      Circuit Discovery").
    - ``"inputs"`` (EAP-IG-inputs): the mean over runs whose embeddings go from the corrupted ones to the clean ones in
      equal steps, the last not included (Hanna, Pezzelle and Belinkov 2024, "Have Faith in Faithfulness").
    - ``"clean_corrupted"``: the mean of the clean and the corrupted run, as in the code of the last.
    - ``"activations"`` (EAP-IG-activations): the mean over runs in each of which one part of the model (the embeddings,
      a layer's heads together, its MLP) writes what lies on the way from the corrupted to the clean run, all else being
      the clean run's (Mueller et al. 2025, "MIB: A Mechanistic Interpretability Benchmark").

    - ``"own_activations"``: the same, but each sender gets the gradients of the runs of its own part alone.

    The first four are what the benchmark's code computes. Papers differ: for inputs, theirs takes the steps 1 to m of
    m (the code 0 to m - 1); for activations, the formula is that of the last method (the code gives the gradients of
    every run to all senders). On TransformerLens that code has no gradients at the first layer's queries, keys and
    values while it replaces the embeddings, where no positions are added to these (rotary models); here they count.

    Args:
        bridge: the bridge, in evaluation mode.
        clean, corrupted: pairs of prompts, ``[batch, pos]``, or what a processor gives.
        metric: from logits ``[batch, pos, d_vocab]`` to one number with a gradient.
        method: see above.
        steps: how many runs the mean is of. The steps are one batch where the device's memory allows.
        graph: the model's graph, as `Graph.of` makes it, grouped or not; None: grouped.
        ablation, reference: what stands in the place of the corrupted run's, as for `Circuit.evaluate`.
        model_kwargs: what else the model takes with both prompts of a pair, such as ``pixel_values=``.

    Returns:
        A score for every edge.

    Raises:
        ValueError: an unknown method, fewer steps than one, pairs that do not fit, a model without such a graph, or a
            metric whose gradient is zero everywhere (a divergence from the clean run, in the clean run), or that has
            none; prompts between which nothing differs; a graph of another model; a model in training mode.
        RuntimeError: in inference mode, which makes no gradients.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import Graph, edge_attribution
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 4)
        >>> edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric())
        EdgeScores(479 edges of 4 layers)
        >>> graph = Graph.of(bridge, grouped=False)  # of this model the same: it has a key head for each head
        >>> edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric(), graph=graph)
        EdgeScores(479 edges of 4 layers)
    """
    check_choice("method", method, METHODS)
    check_positive("steps", steps)
    found = _Gradients(graph, bridge, metric, method, clean, corrupted, model_kwargs, ablation, reference)
    return EdgeScores(found.graph, found.gathered(steps))


@refuse_wrong_types
def node_attribution(
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric,
    method: str = "inputs",
    steps: int = 5,
    graph: Graph | None = None,
    ablation: str | Float[Tensor, "constant d_model"] = "resample",
    reference: Prompts | None = None,
    mlps: str = "output",
    **model_kwargs: Any,
) -> NodeScores:
    """Estimates for every head and MLP, and every coordinate of what it writes, by how much the metric would change.

    The score of a neuron is the difference of what its node writes there in the two runs (corrupted less clean), times
    the gradient of the metric at the node's output, summed over positions and prompts; that of a node is the sum of its
    neurons' (attribution patching: NAP; with integrated gradients NAP-IG). Gradients are those of `edge_attribution`;
    here ``"inputs"`` takes the steps 1 to m of m, as the benchmark's code does for nodes.

    Args:
        bridge, clean, corrupted, metric, steps, graph, ablation, reference, model_kwargs: as for `edge_attribution`.
        method: ``"gradient"``, ``"inputs"``, ``"clean_corrupted"`` or ``"activations"``.
        mlps: whether an MLP's gradient is that at its ``"output"``; or at its ``"input"``, as in the code of the
            Mechanistic Interpretability Benchmark, which leaves out what goes past the MLP or through it otherwise.

    Returns:
        A score for every node and every neuron.

    Raises:
        ValueError: as `edge_attribution`.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import node_attribution
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 4)
        >>> scores = node_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric())
        >>> scores, scores.top_neurons(500)
        (NodeScores(21 nodes, 2688 neurons), Circuit(174 of 479 edges, 500 of 2688 neurons))
    """
    check_choice("method", method, METHODS[:-1])
    check_choice("mlps", mlps, ("output", "input"))
    check_positive("steps", steps)
    found = _Gradients(graph, bridge, metric, method, clean, corrupted, model_kwargs, ablation, reference, mlps)
    scores = found.gathered(steps)
    return NodeScores(found.graph, scores.sum(1), scores)


class _Gradients:
    """Gathers gradients at the receivers, or at what the senders write, times the senders' differences.

    Args:
        graph, bridge, metric, method, clean, corrupted, model_kwargs, ablation, reference: as for `edge_attribution`.
        mlps: of neurons, where an MLP's gradient is taken, its ``"output"`` or ``"input"``; None: scores are of edges.

    Attributes:
        scores: ``[receiver, sender]``; of neurons ``[sender, d_model]``.

    Raises:
        ValueError: as there.
    """

    def __init__(
        self,
        graph: Graph | None,
        bridge: TransformerBridge,
        metric: Metric,
        method: str,
        clean: Prompts,
        corrupted: Prompts,
        model_kwargs: Mapping[str, Any],
        ablation: str | Tensor,
        reference: Prompts | None,
        mlps: str | None = None,
    ) -> None:
        refuse_inference_mode("attribution")
        self.graph, self.bridge, self.metric = graph_of(bridge, graph), bridge, metric
        self.method, self.mlps = method, mlps
        # What nodes write is the same, whoever reads it.
        self.keys = OwnKeys(self.graph if mlps is None else Graph.of(bridge), bridge)
        self.prompts, self.clean, other = ablated(
            self.graph, bridge, clean, corrupted, model_kwargs, ablation, reference
        )
        self.batch, self.length = self.prompts["input_ids"].shape
        self.change = other - self.clean.parts
        if not self.change.any():  # every score would be 0 whatever the gradient is
            raise ValueError(
                "what heads and MLPs write is the same in the clean run and in what replaces it: there is nothing to "
                "attribute"
            )
        shape = self.graph.exists.shape if mlps is None else (len(self.graph.senders), bridge.cfg.d_model)
        self.scores = self.change.new_zeros(shape)
        self.below: dict[int, Tensor] = {}
        #: The clean run, of which others need not run the first layers; None: where they must.
        self.later: CorruptedRun | None = None
        with torch.no_grad():
            end, logits = self.clean.end[:, -1:], self.clean.logits[:, -1:]
            #: Whether logits of some positions alone are the same, from the last stream.
            self.ends = may_start_later(bridge) and close(self._logits_of(end), logits)
            if self.ends and len(self.graph.layers) > 1 and method.endswith("activations"):
                run = CorruptedRun(bridge, self.prompts, range(1, len(self.graph.layers)))
                self.later = run if run.by_position and run.steps else None

    def gathered(self, steps: int) -> Tensor:
        """The scores.

        Args:
            steps: as for `edge_attribution`.

        Raises:
            ValueError: the gradient is zero everywhere.
        """
        of_parts = self.method.endswith("activations")
        first = of_parts or self.mlps is not None  # of nodes, the benchmark's code counts from 1
        every = [k / steps for k in range(first, first + steps)]
        shares = {"gradient": [1.0], "clean_corrupted": [0.0, 1.0]}.get(self.method, every)
        points = self.graph.writes if of_parts else {BEGIN: self.graph.writes[BEGIN]}
        for point, senders in points.items():
            here = self.clean.seen[point] if point in self.clean.seen else self.clean.parts[senders.start]
            given = (1.0, senders) if self.method == "own_activations" else (1 / len(points), slice(None))
            self.of_runs(point, here, here + self.change[senders].sum(0), shares, *given)
        if self.below:  # the runs began at these layers; before, all of them are the clean run
            self._backward({}, 1, 1.0, slice(None), below=self.below)
        if not self.scores.any():
            raise ValueError(
                "the gradient of the metric is zero at every receiver: there is nothing to attribute (a divergence "
                'from the clean run has its minimum there: use method="inputs")'
            )
        return self.scores

    def of_runs(
        self,
        name: str,
        clean: Tensor,
        corrupted: Tensor,
        shares: Sequence[float],
        weight: float,
        senders: slice,
    ) -> None:
        """Adds the mean of runs of the clean prompts, in which what stands at a hook point is partly the corrupted's.

        Args:
            name: the hook point.
            clean, corrupted: what stands there in both runs, ``[batch, pos, d_model]``.
            shares: the clean run's part, in each of the runs.
            weight: by which the mean counts.
            senders: whose edges get it.
        """
        # The graph of all layers is held for the backward pass.
        itemsize = self.change.element_size() * 2 * len(self.graph.layers)
        budget = tokens_per_run(self.bridge.cfg, self.change.device, self.length, itemsize)
        together = max(1, budget // (self.batch * self.length))
        first = 0 if self.later is None else self.bridge.hook_dict[name].point.depth
        for at in range(0, len(shares), together):
            some = shares[at : at + together]
            made = torch.cat([corrupted + share * (clean - corrupted) for share in some])
            n, counts = len(some), weight / len(shares)
            entered = self._backward({name: made}, n, counts, senders, first)
            if first and senders == slice(None):
                of_runs = counts * entered.unflatten(0, (n, -1)).sum(0)
                self.below[first] = self.below[first] + of_runs if first in self.below else of_runs

    def _logits_of(self, end: Float[Tensor, "batch some d_model"]) -> Tensor:
        found: Tensor = self.bridge(end, start_at_layer=len(self.graph.layers))
        return found

    def _total(self, found: Tensor) -> Tensor:
        """What the metric says of some runs, added up, of their logits or of the stream that these are made of."""
        parts: Sequence[Tensor] = found.split(self.batch)
        if self.ends:
            looked: dict[tuple[int, ...], Sequence[Tensor]] = {}

            def of(number: int, positions: list[int]) -> Tensor:
                if (here := tuple(positions)) not in looked:  # of all runs together, whose metric is the same
                    # Also where it looks without gradients first.
                    with torch.inference_mode(False), torch.enable_grad():
                        looked[here] = self._logits_of(found[:, positions]).split(self.batch)
                return looked[here][number]

            few = [
                lazy(partial(of, number), self.clean.logits.shape, self.clean.logits) for number in range(len(parts))
            ]
            total = torch.stack([one_number(self.metric, part) for part in few]).sum()
            if not any(part.passed_by(total) for part in few):
                return total
            parts = [part.whole() for part in few]  # what it did is none of torch's functions
        return torch.stack([one_number(self.metric, part) for part in parts]).sum()

    def _backward(
        self,
        replaced: Mapping[str, Tensor],
        n: int,
        weight: float,
        senders: slice,
        first: int = 0,
        below: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Gathers the gradients of one pass; gives that of what enters its first layer.

        Args:
            replaced: what stands at hook points.
            n: how many runs the batch is of.
            weight: by which each counts.
            senders: whose edges get it.
            first: the first layer that runs.
            below: in place of the metric, gradients of what enters some layers: what is above does not run.
        """
        leaves: list[Tensor] = []
        kept: dict[str, Tensor] = {}
        bridge, begin, below = self.bridge, f"blocks.{first}.hook_resid_pre", below or {}
        stop = max(below, default=len(self.graph.layers))

        def start(stream: Tensor, hook: HookPoint) -> Tensor:
            leaves.append(replaced.get(begin, stream).detach().requires_grad_())
            return leaves[0]

        def keep(activation: Tensor, hook: HookPoint) -> Tensor:
            kept[hook.name] = activation
            return activation  # what follows is computed from it

        put: list[Any] = [(begin, start)]
        for name, made in replaced.items():
            if name != begin:  # 0: what is before has a gradient
                put.append((name, lambda activation, hook, made=made: made + 0 * activation))
        own = self._own_keys(first, stop)
        put += [(port.name, keep) for ports in own.values() for port in ports]
        between = {layer: f"blocks.{layer}.hook_resid_pre" for layer in below if layer < stop}
        put += [(point, keep) for point in (*own, *between.values())]
        hooks = [
            (point, gather)
            for point, gather in self.hooks(n, weight, senders)
            if first <= bridge.hook_dict[point].point.depth < stop
        ]
        given: Any = tiled(self.prompts, n)
        options: dict[str, Any] = {"stop_at_layer": stop} if below or self.ends else {}
        if first:
            assert self.later is not None
            given = self.later.streams[first].repeat(n, 1, 1)
            options |= {"start_at_layer": first, **self.later.options(first, stop, n, 0)}
        with torch.enable_grad():
            found = bridge.run_with_hooks(given, fwd_hooks=put, bwd_hooks=hooks, **options)
            total = (found * below[stop]).sum() if below else self._total(found)
            for layer, point in between.items():
                total = total + (kept[point] * below[layer]).sum()
            entered, *at_heads = gradients_of("metric", total, [*leaves, *(kept[point] for point in own)], bool(own))
        for (point, ports), gradient in zip(own.items(), at_heads, strict=True):
            shared, reads = self.keys.of(ports[0]), [kept[port.name] for port in ports]
            for head in range(shared):  # each head's own share of what its group's key and value get
                of_heads = torch.zeros_like(gradient)
                of_heads[:, :, head::shared] = gradient[:, :, head::shared]
                shares = torch.autograd.grad(kept[point], reads, of_heads, retain_graph=True)
                for port, share in zip(ports, shares, strict=True):
                    receivers = slice(port.first + head, port.first + port.count, shared)
                    self._gather(port, receivers, n, weight, senders)(share)
        return entered

    def _own_keys(self, first: int, stop: int) -> dict[str, list[Port]]:
        """The ports of some layers whose receivers read as one in the model, by the point behind their heads."""
        found: dict[str, list[Port]] = {}
        for port in self.graph.ports:
            if self.keys.of(port) > 1 and first <= port.layer < stop:
                found.setdefault(f"blocks.{port.layer}.attn.hook_z", []).append(port)
        return found

    def hooks(self, n: int, weight: float, senders: slice) -> list[Any]:
        """Backward hooks that add to the scores.

        Args:
            n: how many runs a batch is of.
            weight: by which each counts.
            senders: whose edges get it; neurons of all.
        """
        if self.mlps is None:
            return [
                (port.name, self._gather(port, slice(port.first, port.first + port.count), n, weight, senders))
                for port in self.graph.ports
                if self.keys.of(port) == 1
            ]
        point = {"output": "hook_mlp_out", "input": "hook_mlp_in"}[self.mlps]
        return [
            (name.replace("hook_mlp_out", point), partial(self._gather_neurons, some, n, weight))
            for name, some in self.graph.writes.items()
        ]

    def _gather(self, port: Port, receivers: slice, n: int, weight: float, senders: slice) -> Callable[..., None]:
        """Adds the gradient of some of a port's receivers, times the differences of the senders that it reads."""
        chosen = range(len(self.graph.senders))[senders]
        at = slice(chosen.start, min(chosen.stop, port.upstream))

        def gather(gradient: Tensor, hook: HookPoint | None = None) -> None:
            of_runs = gradient.unflatten(0, (n, -1)).sum(0)
            by_receiver = of_runs.movedim(-2, 0) if port.per_head else of_runs.unsqueeze(0)
            with torch.no_grad():
                found = by_receiver.flatten(1).to(self.change.dtype) @ self.change[at].flatten(1).T
                self.scores[receivers, at] += weight * found

        return gather

    @torch.no_grad()
    def _gather_neurons(self, senders: slice, n: int, weight: float, gradient: Tensor, hook: HookPoint) -> None:
        """Adds the gradient of what some senders write, times its differences."""
        of_runs = gradient.unflatten(0, (n, -1)).sum(0).to(self.change.dtype)
        self.scores[senders] += weight * (self.change[senders] * of_runs).sum((1, 2))


@torch.no_grad()
@refuse_wrong_types
def information_flow(
    bridge: TransformerBridge, prompts: Prompts, graph: Graph | None = None, **model_kwargs: Any
) -> EdgeScores:
    """How near what each receiver reads is to what each sender wrote: scores without a metric and without corruption.

    The score of an edge is the sender's share of proximities ``max(|y| - |y - x|, 0)``, where y is what the receiver
    reads, x what the sender wrote, and the lengths are sums of absolute values: a mean over tokens, then over prompts
    (Ferrando and Voita 2024, "Information Flow Routes: Automatically Interpreting Language Models at Scale"; as in the
    code of the Mechanistic Interpretability Benchmark). Heads of a layer read the same stream, so have the same scores.

    Args:
        bridge: the bridge.
        prompts: ``[batch, pos]``, or what a processor gives; with an ``attention_mask``, padding counts for nothing.
        graph: the model's graph, as `Graph.of` makes it, grouped or not; None: grouped.
        model_kwargs: what else the model takes with them.

    Returns:
        A score from 0 to 1 for every edge; those of a receiver add up to 1, or to 0 where nothing is near.

    Raises:
        ValueError: a model without such a graph, or in training mode.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import information_flow
        >>> bridge = TransformerBridge.boot_embedded()
        >>> scores = information_flow(bridge, bridge.to_tokens("Mary and John went to the store"))
        >>> bool((scores.values.sum(1) - 1).abs().max() < 1e-5)
        True
    """
    graph, given = graph_of(bridge, graph), prompts_with(bridge, prompts, model_kwargs)
    streams = {port.name: _stream(graph, port) for port in graph.ports}
    wrote = written(graph, bridge, given, [*streams.values()])
    refuse_another_sum(bridge, wrote)
    parts = wrote.parts
    counted = token_mask(given).to(parts)
    weights = counted / counted.sum(1, keepdim=True) / len(counted)
    values = torch.zeros(graph.exists.shape, dtype=torch.float64)
    for port in graph.ports:
        read = wrote.seen[streams[port.name]]
        near = read.abs().sum(-1) - torch.stack([(read - part).abs().sum(-1) for part in parts[: port.upstream]])
        near = near.clamp(min=0)
        shares = near / near.sum(0).clamp(min=torch.finfo(near.dtype).tiny)
        values[port.first : port.first + port.count, : port.upstream] = (shares * weights).sum((1, 2)).double().cpu()
    return EdgeScores(graph, values)


@refuse_wrong_types
def mean_scores(scores: Iterable[EdgeScores], weights: Sequence[int | float] | None = None) -> EdgeScores:
    """The mean of scores from several batches, one of which is held at a time.

    Args:
        scores: of the same graph, such as ``(edge_attribution(bridge, *batch, metric) for batch in batches)``.
        weights: how much each counts, such as its number of prompts; None: all the same.

    Raises:
        ValueError: there are none, or they are of different graphs; weights that are not finite or add up to 0.

    Example:
        >>> import torch
        >>> from bridge.circuits import EdgeScores, Graph, mean_scores
        >>> from bridge import TransformerBridge
        >>> graph = Graph.of(TransformerBridge.boot_embedded())
        >>> one = EdgeScores(graph, torch.ones(len(graph.receivers), len(graph.senders)))
        >>> mean_scores([one, one])["embed->logits"]
        1.0
    """
    whole = 1.0 if weights is None else sum(weights)
    if not math.isfinite(whole) or (weights and whole == 0):
        raise ValueError(f"weights add up to {whole}: there is no mean of such weights")
    graph, total, count = None, torch.zeros(()), 0
    for some in scores:
        if count and some.graph != graph:
            raise ValueError("the mean is of one or more scores of the same graph")
        weight = 1 if weights is None else weights[count] if count < len(weights) else 0
        graph, total, count = some.graph, total + some.values * weight, count + 1
    if graph is None:
        raise ValueError("the mean is of one or more scores of the same graph")
    if weights is not None and count != len(weights):
        raise ValueError(f"there are {count} scores and {len(weights)} weights")
    return EdgeScores(graph, total / (count if weights is None else whole))


# ----------------------------------------------------------------------------------------------------------------------
# Edges replaced one at a time, and paths from some senders to some receivers, by running the model.
# ----------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@refuse_wrong_types
def edge_effects(
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric,
    edges: Sequence[str] | None = None,
    verbose: bool = True,
    ablation: str | Float[Tensor, "constant d_model"] = "resample",
    reference: Prompts | None = None,
    graph: Graph | None = None,
    **model_kwargs: Any,
) -> EdgeScores:
    """By how much the metric of the clean run changes if an edge carries what its sender writes in the corrupted run.

    Each edge is replaced alone, and the rest of the model runs from there (Goldowsky-Dill et al. 2023, "Localizing
    Model Behavior with Path Patching"). Runs start at the receiver's layer, and share batches, where that changes no
    result.

    Args:
        bridge: the bridge.
        clean, corrupted: pairs of prompts, ``[batch, pos]``, or what a processor gives.
        metric: from logits ``[batch, pos, d_vocab]`` to one number.
        edges: such as ``"L0H1->L3H2.q"``; None: all. Others have the score 0.
        verbose: show a progress bar.
        ablation, reference: what stands in the place of the corrupted run's, as for `Circuit.evaluate`.
        graph: the model's graph, as `Graph.of` makes it, grouped or not; None: grouped.
        model_kwargs: what else the model takes with both prompts of a pair.

    Raises:
        ValueError: pairs that do not fit, a model without such a graph, a graph of another model, an unknown edge.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import edge_effects
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 2)
        >>> edge = "embed->L0H0.v"
        >>> effects = edge_effects(bridge, pairs.clean, pairs.corrupted, pairs.metric(), [edge], verbose=False)
    """
    graph = graph_of(bridge, graph)
    given = (clean, corrupted, metric, edges, verbose, model_kwargs, ablation, reference)
    return EdgeScores(graph, effects_of_edges(graph, bridge, *given))


@torch.no_grad()
@refuse_wrong_types
def node_effects(
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric,
    ablation: str | Float[Tensor, "constant d_model"] = "resample",
    reference: Prompts | None = None,
    **model_kwargs: Any,
) -> NodeScores:
    """By how much the metric of the clean run changes if all edges out of a node carry what the ablation puts there.

    Args:
        bridge, clean, corrupted, metric, ablation, reference, model_kwargs: as for `edge_effects`.

    Raises:
        ValueError: as there.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import node_effects
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 2)
        >>> node_effects(bridge, pairs.clean, pairs.corrupted, pairs.metric())
        NodeScores(21 nodes)
    """
    graph = Graph.of(bridge)
    prompts, one, other = ablated(graph, bridge, clean, corrupted, model_kwargs, ablation, reference)
    base = one_number(metric, one.logits)
    every = torch.eye(len(graph.senders), dtype=torch.bool)[:, None] & graph.exists  # set receiver sender
    rows, length = prompts["input_ids"].shape
    itemsize = one.parts.element_size() * (2 + len(graph.senders) // 16)  # of which a block holds 16 of each token
    together = max(1, tokens_per_run(bridge.cfg, one.parts.device, length, itemsize) // (rows * length))
    found = []
    for some in every.split(together):
        runs = run_with_edges_replaced(graph, bridge, prompts, other, some)
        found += [float(one_number(metric, logits) - base) for logits in runs]
    return NodeScores(graph, torch.tensor(found, dtype=torch.float64))


@torch.no_grad()
@refuse_wrong_types
def path_patching(
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric,
    senders: Sequence[str],
    receivers: Sequence[str],
    through_mlps: bool = True,
    graph: Graph | None = None,
    **model_kwargs: Any,
) -> float:
    """By how much the metric of the clean run changes by what some senders tell some receivers.

    The receivers get the inputs that they would have if the senders wrote what they write in the corrupted run while
    all other heads kept what they write in the clean one; then the model runs with these inputs (Wang et al. 2022,
    "Interpretability in the Wild"). MLPs on the way pass the difference on, or keep theirs, too.

    Args:
        bridge: the bridge.
        clean, corrupted: pairs of prompts, ``[batch, pos]``, or what a processor gives.
        metric: from logits ``[batch, pos, d_vocab]`` to one number.
        senders: such as ``"L1H0"``, ``"L2MLP"``, ``"embed"``.
        receivers: such as ``"L3H2.q"``; ``"L3H2"``, all inputs of a head; ``"L3MLP"``; ``"logits"``.
        through_mlps: whether MLPs that are no senders follow what they read. False: direct edges alone.
        graph: the model's graph, as `Graph.of` makes it, grouped or not; None: grouped.
        model_kwargs: what else the model takes with both prompts of a pair.

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
    graph = graph_of(bridge, graph)
    sending = {graph.sender(name) for name in senders}
    receiving = sorted({index for name in receivers for index in graph.receivers_named(name)})
    pair = pairs_of(bridge, clean, corrupted, model_kwargs)
    one, other = written_in_both(graph, bridge, *pair)
    inputs = _inputs(graph, bridge, pair[0], one, other, sending, through_mlps)
    keys = OwnKeys(graph, bridge)
    hooks: list[Any] = keys.hooks()
    for port in graph.ports:
        mine = [index - port.first for index in receiving if port.first <= index < port.first + port.count]
        if mine:
            hooks.append((port.name, _given(keys, port, mine, inputs[port.name])))
    patched = bridge.run_with_hooks(tiled(pair[0], keys.copies), fwd_hooks=hooks)[: len(one.logits)]
    return float(one_number(metric, patched)) - float(one_number(metric, one.logits))


def _given(keys: OwnKeys, port: Port, which: list[int], stream: Tensor) -> Callable[..., Tensor]:
    def give(activation: Tensor, hook: HookPoint) -> Tensor:
        if not port.per_head:
            return stream.repeat(keys.copies, 1, 1)
        inputs = keys.read(port, activation).clone()
        inputs[:, :, which] = stream.unsqueeze(2)
        return keys.given(port, inputs)

    return give


def _inputs(
    graph: Graph,
    bridge: TransformerBridge,
    prompts: Mapping[str, Any],
    one: SenderOutputs,
    other: SenderOutputs,
    sending: set[int],
    through_mlps: bool,
) -> dict[str, Tensor]:
    """The residual stream at each port in a run with the senders replaced and all other heads as they were."""
    change = other.parts - one.parts
    hooks: list[Any] = []
    for point, senders in graph.writes.items():
        mine = sorted(sending & {*range(senders.start, senders.stop)})
        if point in one.seen:  # heads
            hooks.append((point, _always(one.seen[point] + change[mine].sum(0))))
        elif mine or (point.endswith("hook_mlp_out") and not through_mlps):
            hooks.append((point, _always((other if mine else one).parts[senders.start])))
    seen: dict[str, Tensor] = {}

    def see(activation: Tensor, hook: HookPoint) -> None:
        seen[hook.name] = activation.clone()

    streams = {port.name: _stream(graph, port) for port in graph.ports}
    hooks += [(name, see) for name in dict.fromkeys(streams.values())]
    bridge.run_with_hooks(prompts, fwd_hooks=hooks)
    return {name: seen[stream] for name, stream in streams.items()}


def _stream(graph: Graph, port: Port) -> str:
    """The hook point of the residual stream that a port reads."""
    if port.layer == len(graph.layers):
        return port.name
    mid = port.name.endswith("hook_mlp_in") and not graph.layers[port.layer].parallel and graph.layers[port.layer].heads
    return f"blocks.{port.layer}.hook_resid_{'mid' if mid else 'pre'}"


def _always(value: Tensor) -> Callable[..., Tensor]:
    return lambda activation, hook: value


# ----------------------------------------------------------------------------------------------------------------------
# A probability for each edge, trained.
# ----------------------------------------------------------------------------------------------------------------------


@refuse_wrong_types
def trained_edges(
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    loss: Metric | None = None,
    *,
    penalty: float = 1e-3,
    steps: int = 200,
    rate: float = 0.1,
    samples: int = 1,
    ablation: str | Float[Tensor, "constant d_model"] = "resample",
    reference: Prompts | None = None,
    seed: int = 0,
    graph: Graph | None = None,
    **model_kwargs: Any,
) -> EdgeScores:
    """A probability for each edge that the circuit has it, trained by uniform gradient sampling.

    Each prompt runs with a circuit of its own, in which an edge with probability p is there, or not, or, with
    probability ``p (1 - p)``, partly there, by a share drawn evenly between 0 and 1. The loss's derivative by that
    share is, on average, what having the edge changes; it moves the edge's logit (Li and Janson 2024, "Optimal Ablation
    for Interpretability"). As in their code, that average is over the circuits that have the edge partly. The loss
    grows by `penalty` for each edge.

    Args:
        bridge: the bridge, in evaluation mode.
        clean, corrupted: pairs of prompts, ``[batch, pos]``, or what a processor gives.
        loss: from logits ``[batch, pos, d_vocab]`` to one number that is to be small; None: the divergence from the
            whole model's next tokens at each prompt's last token.
        penalty: what an edge costs, in the loss's units.
        steps, rate: of training, by Adam.
        samples: how many circuits each prompt runs with in a step, all in one batch.
        ablation, reference: what other edges carry, as for `Circuit.evaluate`.
        seed: of what is drawn.
        graph: the model's graph, as `Graph.of` makes it, grouped or not; None: grouped.
        model_kwargs: what else the model takes with both prompts of a pair.

    Returns:
        The probabilities: unlike other scores they are never negative.

    Raises:
        ValueError: as `Circuit.evaluate`; no step or sample, a rate that is not positive and finite, a penalty
            below 0 or not finite, a loss that is not finite or has no gradient.
        RuntimeError: in inference mode, which makes no gradients.

    Example:
        >>> from bridge.circuits import trained_edges
        >>> from bridge.tasks import compiled
        >>> task = compiled("either")
        >>> def loss(logits):
        ...     return (logits - task.bridge(task.clean)).square().mean()
        >>> scores = trained_edges(task.bridge, task.clean, task.corrupted, loss, penalty=0.01, steps=20)
        >>> 0 <= float(scores.values.min()) <= float(scores.values.max()) <= 1
        True
    """
    for name, number in (("steps", steps), ("samples", samples)):
        check_positive(name, number)
    check_rate(rate)
    if not 0 <= penalty < math.inf:
        raise ValueError(f"penalty is {penalty}; it must be 0 or more, and finite")
    refuse_inference_mode("trained_edges")
    graph = graph_of(bridge, graph)
    one, wrote, other = ablated(graph, bridge, clean, corrupted, model_kwargs, ablation, reference)
    loss = loss or divergence_at_last_tokens(wrote.logits, one)
    numbers = torch.Generator().manual_seed(seed)
    given = torch.ones(graph.n_edges, requires_grad=True)
    optimizer, rows = torch.optim.Adam([given], lr=rate), len(one["input_ids"])
    with torch.enable_grad():
        for _ in range(steps):
            probability = given.sigmoid()
            drawn = torch.rand(samples, rows, graph.n_edges, generator=numbers)
            replaced = torch.zeros(samples, rows, *graph.exists.shape)
            replaced[:, :, graph.exists] = _absent(drawn, probability)
            logits = run_with_edges_replaced(graph, bridge, one, other, replaced.to(other))
            found = torch.stack([one_number(loss, some) for some in logits]).mean()
            if not found.isfinite():
                raise ValueError(f"loss is {found.item()}: it must be a finite number that can be small")
            (slope,) = gradients_of("loss", found, [given])
            given.grad = slope + penalty * (probability * (1 - probability)).detach()
            optimizer.step()
    values = torch.zeros(graph.exists.shape)
    values[graph.exists] = given.detach().sigmoid()
    return EdgeScores(graph, values)


def _absent(drawn: Float[Tensor, "... edge"], probability: Float[Tensor, " edge"]) -> Float[Tensor, "... edge"]:
    """How far edges are absent, by numbers drawn evenly between 0 and 1: none, all, or in a window partly.

    Of these last the gradient is 1 on average, over those that are no thousandth from an end.
    """
    window = (probability * (1 - probability)).detach().clamp(min=torch.finfo(drawn.dtype).tiny)
    place = (drawn - probability.detach()) / window + 0.5
    partly, counted = ((place - 0.5).abs() <= within for within in (0.5, 0.499))
    share = counted.to(drawn).flatten(0, -2).mean(0)
    weights = partly / share.where(share > 0, torch.inf)
    return place.clamp(0, 1) - weights * (probability - probability.detach())
