"""Scores of edges and nodes: estimated from gradients, measured, or trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.arguments import check_choice, check_positive, refuse_wrong_types
from bridge.bridge import TransformerBridge
from bridge.circuits.circuits import EdgeScores, NodeScores
from bridge.circuits.edge_runs import (
    AblatedPair,
    OwnKeys,
    ablate,
    effects_of_edges,
    graph_of,
    run_with_edges_replaced,
)
from bridge.circuits.graph import (
    Graph,
    Metric,
    Port,
    check_rate,
    divergence_at_last_tokens,
    gradients_of,
    one_number,
    refuse_another_sum,
    refuse_inference_mode,
    token_mask,
    written,
)
from bridge.hooks.hooks import HookPoint
from bridge.modules import close
from bridge.patching.ablations import Noise
from bridge.patching.lazy_logits import LazyLogits, lazy
from bridge.patching.runs import CorruptedRun, chunks, may_start_later, tokens_per_run
from bridge.rows import check_position, tiled
from bridge.run.inputs import Prompts, prompts_with
from bridge.run.rules import Rules

METHODS = ("gradient", "inputs", "clean_corrupted", "activations", "own_activations")

#: All receivers lie between this point and the metric.
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
    ablation: str | Noise | Float[Tensor, "constant d_model"] = "resample",
    reference: Prompts | None = None,
    rules: str | Rules | None = None,
    **model_kwargs: Any,
) -> EdgeScores:
    """Estimate for every edge how the metric would change if the edge carried the corrupted run's
    activation.

    The score of an edge is the difference of its sender's output between the two runs (corrupted
    minus clean), times the gradient of the metric at its receiver's input, summed over positions
    and prompts. The gradient is taken in:

    - ``"gradient"`` (EAP): the clean run (Syed, Rager and Conmy 2023, "Attribution Patching
      Outperforms Automated Circuit Discovery").
    - ``"inputs"`` (EAP-IG-inputs): the mean over runs whose embeddings are interpolated from the
      corrupted ones to the clean ones in equal steps, without the last step (Hanna, Pezzelle and
      Belinkov 2024, "Have Faith in Faithfulness").
    - ``"clean_corrupted"``: the mean of the clean and the corrupted run, as in the code of the
      same paper.
    - ``"activations"`` (EAP-IG-activations): the mean over runs in each of which the output of one
      component (the embeddings, a layer's heads together, its MLP) is interpolated from the
      corrupted to the clean run, with everything else as in the clean run (Mueller et al. 2025,
      "MIB: A Mechanistic Interpretability Benchmark").
    - ``"own_activations"``: like ``"activations"``, but each sender only gets the gradients of the
      runs that interpolate its own component.

    The first four methods match the benchmark's code. The papers differ from it: for inputs, the
    paper takes the steps 1 to m of m (the code 0 to m - 1); for activations, the paper's formula is
    ``"own_activations"`` (the code gives the gradients of every run to all senders). For models
    that add no positions to the embeddings (rotary models), that code on TransformerLens has no
    gradients at the first layer's queries, keys and values while it replaces the embeddings; here
    these gradients count.

    Args:
        bridge: the bridge, in evaluation mode.
        clean, corrupted: pairs of prompts, ``[batch, pos]``, or a processor's output.
        metric: a function from logits ``[batch, pos, d_vocab]`` to one number with a gradient.
        method: one of the methods above.
        steps: the number of runs in the mean. All steps are one batch if the device's memory
            allows.
        graph: the model's graph from `Graph.of`, grouped or not; None: grouped.
        ablation, reference: the replacement of the corrupted run, as for `Circuit.evaluate`.
        rules: the rules of the gradients, as for `TransformerBridge.rules`; None: plain gradients.
        model_kwargs: further model inputs for both prompts of a pair, such as ``pixel_values=``.

    Returns:
        A score for every edge.

    Raises:
        ValueError: an unknown method, fewer than one step, pairs that do not match, a model without
            such a graph; a metric without a gradient, or whose gradient is zero everywhere (a
            divergence from the clean run, in the clean run); equal prompts; a graph of another
            model; a model in training mode.
        RuntimeError: the call is in inference mode, which has no gradients.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import Graph, edge_attribution
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 4)
        >>> edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric())
        EdgeScores(479 edges of 4 layers, largest embed->L0H0.v -18.3)
        >>> graph = Graph.of(
        ...     bridge, grouped=False
        ... )  # of this model the same: it has a key head for each head
        >>> edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric(), graph=graph)
        EdgeScores(479 edges of 4 layers, largest embed->L0H0.v -18.3)
    """
    check_choice("method", method, METHODS)
    check_positive("steps", steps)
    refuse_inference_mode("attribution")
    with bridge.rules(rules):
        pair = ablate(bridge, graph, clean, corrupted, ablation, reference, model_kwargs)
        return EdgeScores(pair.graph, _Gradients(bridge, pair, metric, method).gathered(steps))


@refuse_wrong_types
def node_attribution(
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric,
    method: str = "inputs",
    steps: int = 5,
    graph: Graph | None = None,
    ablation: str | Noise | Float[Tensor, "constant d_model"] = "resample",
    reference: Prompts | None = None,
    mlps: str = "output",
    rules: str | Rules | None = None,
    **model_kwargs: Any,
) -> NodeScores:
    """Estimate for every head and MLP, and every coordinate of its output, how the metric would
    change.

    The score of a neuron is the difference of its node's output there between the two runs
    (corrupted minus clean), times the gradient of the metric at the node's output, summed over
    positions and prompts. The score of a node is the sum over its neurons (attribution patching:
    NAP; with integrated gradients NAP-IG). Gradients are those of `edge_attribution`; here
    ``"inputs"`` takes the steps 1 to m of m, as the benchmark's code does for nodes.

    Args:
        bridge, clean, corrupted, metric, steps, graph, ablation, reference, rules, model_kwargs:
        as for `edge_attribution`.
        method: ``"gradient"``, ``"inputs"``, ``"clean_corrupted"`` or ``"activations"``.
        mlps: whether an MLP's gradient is taken at its ``"output"`` or at its ``"input"``. The
            latter is what the code of the Mechanistic Interpretability Benchmark does; it ignores
            paths around the MLP and counts paths through it.

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
        (NodeScores(21 nodes, 2688 neurons, largest embed -21.6),
         Circuit(174 of 479 edges, 500 of 2688 neurons))
    """
    check_choice("method", method, METHODS[:-1])
    check_choice("mlps", mlps, ("output", "input"))
    check_positive("steps", steps)
    refuse_inference_mode("attribution")
    with bridge.rules(rules):
        pair = ablate(bridge, graph, clean, corrupted, ablation, reference, model_kwargs)
        scores = _Gradients(bridge, pair, metric, method, mlps).gathered(steps)
    return NodeScores(pair.graph, scores.sum(1), scores)


@dataclass(frozen=True)
class _Pass:
    """One forward and backward pass of `_Gradients`.

    Attributes:
        replaced: replaced activations by hook point.
        n: the number of runs in the batch.
        weight: the weight of each run.
        senders: the senders whose edges get the scores.
        first: the first layer that runs.
        below: gradients at the inputs of some layers, used in place of the metric: later layers do
            not run.
    """

    replaced: Mapping[str, Tensor]
    n: int
    weight: float
    senders: slice
    first: int = 0
    below: Mapping[int, Tensor] = field(default_factory=dict)


class _Gradients:
    """An accumulator of gradients at the receivers, or at the senders' outputs, times the senders'
    differences.

    Args:
        bridge: the bridge.
        pair: the prompts and the replacement.
        metric, method: as for `edge_attribution`.
        mlps: for scores of neurons, where an MLP's gradient is taken, its ``"output"`` or
            ``"input"``; None for scores of edges.

    Attributes:
        scores: ``[receiver, sender]``; for neurons ``[sender, d_model]``.

    Raises:
        ValueError: as `edge_attribution`.
    """

    def __init__(
        self,
        bridge: TransformerBridge,
        pair: AblatedPair,
        metric: Metric,
        method: str,
        mlps: str | None = None,
    ) -> None:
        self.bridge, self.pair, self.graph, self.clean = bridge, pair, pair.graph, pair.clean
        check_position(metric, pair.prompts.get("attention_mask"))
        self.metric, self.method, self.mlps = metric, method, mlps
        # A node's output is the same for all of its readers.
        self.keys = OwnKeys(self.graph if mlps is None else Graph.of(bridge), bridge)
        self.change = pair.change
        if not self.change.any():  # every score would be 0 for any gradient
            raise ValueError(
                "what heads and MLPs write is the same in the clean run and in what replaces it:"
                " there is nothing to attribute"
            )
        _, self.batch, self.length, d_model = self.change.shape
        shape = self.graph.exists.shape if mlps is None else (len(self.graph.senders), d_model)
        self.scores = self.change.new_zeros(shape)
        #: Gradients at the inputs of the layers at which runs started.
        self.below: dict[int, Tensor] = {}
        #: The clean run, from which other runs reuse the first layers; None if they cannot.
        self.later: CorruptedRun | None = None
        with torch.no_grad():
            end, logits = self.clean.end[:, -1:], self.clean.logits[:, -1:]
            #: Whether logits of some positions alone, computed from the last stream, are the same.
            self.ends = may_start_later(bridge) and close(self._logits_of(end), logits)
            if self.ends and len(self.graph.layers) > 1 and method.endswith("activations"):
                run = CorruptedRun(bridge, pair.prompts, range(1, len(self.graph.layers)))
                self.later = run if run.by_position and run.steps else None

    def gathered(self, steps: int) -> Tensor:
        """Return the scores.

        Args:
            steps: as for `edge_attribution`.

        Raises:
            ValueError: the gradient is zero everywhere.
        """
        of_parts = self.method.endswith("activations")
        points = self.graph.writes if of_parts else {BEGIN: self.graph.writes[BEGIN]}
        shares = self._shares(steps)
        for point, senders in points.items():
            clean = self.clean.activations.get(point, self.clean.parts[senders.start])
            corrupted = clean + self.change[senders].sum(0)
            if self.method == "own_activations":
                self.of_runs(point, clean, corrupted, shares, 1.0, senders)
            else:
                self.of_runs(point, clean, corrupted, shares, 1 / len(points), slice(None))
        if self.below:  # the runs began at these layers; earlier layers are those of the clean run
            self._backward(_Pass({}, 1, 1.0, slice(None), below=self.below))
        if not self.scores.any():
            raise ValueError(
                "the gradient of the metric is zero at every receiver: there is nothing to"
                " attribute (a divergence from the clean run has its minimum there: use"
                ' method="inputs")'
            )
        return self.scores

    def _shares(self, steps: int) -> list[float]:
        """Return the clean run's share in each run."""
        if self.method == "gradient":
            return [1.0]
        if self.method == "clean_corrupted":
            return [0.0, 1.0]
        # For nodes, the benchmark's code counts the steps from 1.
        first = int(self.method.endswith("activations") or self.mlps is not None)
        return [step / steps for step in range(first, first + steps)]

    def of_runs(
        self,
        name: str,
        clean: Tensor,
        corrupted: Tensor,
        shares: Sequence[float],
        weight: float,
        senders: slice,
    ) -> None:
        """Add the mean over runs of the clean prompts in which one hook point is interpolated
        towards the corrupted run.

        Args:
            name: the hook point.
            clean, corrupted: the activation at the hook point in both runs, ``[batch, pos,
                d_model]``.
            shares: the clean run's share, in each of the runs.
            weight: the weight of the mean.
            senders: the senders whose edges get the scores.
        """
        # The autograd graph of all layers is kept for the backward pass.
        itemsize = self.change.element_size() * 2 * len(self.graph.layers)
        budget = tokens_per_run(self.bridge.cfg, self.change.device, self.length, itemsize)
        first = 0 if self.later is None else self.bridge.hook_dict[name].point.depth
        for some in chunks(shares, max(1, budget // (self.batch * self.length))):
            mixed = torch.cat([corrupted + share * (clean - corrupted) for share in some])
            run = _Pass({name: mixed}, len(some), weight / len(shares), senders, first)
            entered = self._backward(run)
            if first and senders == slice(None):
                of_runs = run.weight * entered.unflatten(0, (run.n, -1)).sum(0)
                below = self.below.get(first)
                self.below[first] = of_runs if below is None else below + of_runs

    def _logits_of(self, end: Float[Tensor, "batch some d_model"]) -> Tensor:
        logits: Tensor = self.bridge(end, start_at_layer=len(self.graph.layers))
        return logits

    def _total(self, output: Tensor) -> Tensor:
        """Return the summed metric of some runs, from their logits or from the stream before the
        unembedding.
        """
        parts: Sequence[Tensor] = output.split(self.batch)
        if self.ends:
            runs = self._lazy_logits(output)
            total = torch.stack([one_number(self.metric, run) for run in runs]).sum()
            if not any(run.passed_by(total) for run in runs):
                return total
            parts = [run.whole() for run in runs]  # the metric bypassed torch's functions
        return torch.stack([one_number(self.metric, part) for part in parts]).sum()

    def _lazy_logits(self, ends: Tensor) -> list[LazyLogits]:
        """Return the logits of some runs, computed where they are read, from the last stream."""
        computed: dict[tuple[int, ...], Sequence[Tensor]] = {}

        def logits_at(run: int, positions: list[int]) -> Tensor:
            key = tuple(positions)
            if key not in computed:  # for all runs together, if their metric is the same
                # Also if the metric reads positions without gradients first.
                with torch.inference_mode(False), torch.enable_grad():
                    computed[key] = self._logits_of(ends[:, positions]).split(self.batch)
            return computed[key][run]

        logits = self.clean.logits
        runs = range(len(ends) // self.batch)
        return [lazy(partial(logits_at, run), logits.shape, logits) for run in runs]

    def _backward(self, run: _Pass) -> Tensor:
        """Gather the gradients of one pass; return the gradient at the input of its first layer."""
        stop = max(run.below, default=len(self.graph.layers))
        own = self._own_keys(run.first, stop)
        kept: dict[str, Tensor] = {}
        with torch.enable_grad():
            total = self._forward(run, stop, own, kept)
            heads = [kept[point] for point in own]
            entered, *at_heads = gradients_of("metric", total, [kept[_LEAF], *heads], bool(own))
        for ports, outputs, gradient in zip(own.values(), heads, at_heads, strict=True):
            reads = [kept[port.name] for port in ports]
            self._gather_own_keys(run, ports, reads, outputs, gradient)
        return entered

    def _forward(
        self, run: _Pass, stop: int, own: Mapping[str, Sequence[Port]], kept: dict[str, Tensor]
    ) -> Tensor:
        """Return the number whose gradients a pass gathers.

        Args:
            run: the pass.
            stop: the layer at which it stops.
            own: the result of `_own_keys`.
            kept: receives the activations whose gradients are taken.
        """

        def keep(activation: Tensor, hook: HookPoint) -> Tensor:
            kept[hook.name] = activation
            return activation  # later computation depends on it

        begin = f"blocks.{run.first}.hook_resid_pre"
        between = {layer: f"blocks.{layer}.hook_resid_pre" for layer in run.below if layer < stop}
        read = [port.name for ports in own.values() for port in ports]
        put: list[Any] = [(begin, partial(_started, kept, run.replaced.get(begin)))]
        for name, value in run.replaced.items():
            if name != begin:  # at 0, the input before it has a gradient
                put.append((name, partial(_replaced, value)))
        put += [(point, keep) for point in (*read, *own, *between.values())]
        inputs, options = self._resumed(run, stop)
        hooks = self.hooks(run, stop)
        output = self.bridge.run_with_hooks(inputs, fwd_hooks=put, bwd_hooks=hooks, **options)
        total = (output * run.below[stop]).sum() if run.below else self._total(output)
        for layer, point in between.items():
            total = total + (kept[point] * run.below[layer]).sum()
        return total

    def _resumed(self, run: _Pass, stop: int) -> tuple[Any, dict[str, Any]]:
        """Return the input and the options of a pass, which starts at its first layer."""
        options: dict[str, Any] = {"stop_at_layer": stop} if run.below or self.ends else {}
        if not run.first:
            return tiled(self.pair.prompts, run.n), options
        assert self.later is not None
        options |= {"start_at_layer": run.first, **self.later.options(run.first, stop, run.n, 0)}
        return self.later.streams[run.first].repeat(run.n, 1, 1), options

    def _own_keys(self, first: int, stop: int) -> dict[str, list[Port]]:
        """Return the ports whose receivers share one input in the model, by the hook point of their
        heads' output.
        """
        ports: dict[str, list[Port]] = {}
        for port in self.graph.ports:
            if self.keys.sharing(port) > 1 and first <= port.layer < stop:
                ports.setdefault(f"blocks.{port.layer}.attn.hook_z", []).append(port)
        return ports

    def _gather_own_keys(
        self,
        run: _Pass,
        ports: Sequence[Port],
        reads: Sequence[Tensor],
        outputs: Tensor,
        gradient: Tensor,
    ) -> None:
        """Add each head's own share of its group's key and value gradient.

        Args:
            run: the pass.
            ports: the ports of a layer's keys and values.
            reads: the inputs of these ports.
            outputs, gradient: the heads' outputs, and the gradient there.
        """
        shared = self.keys.sharing(ports[0])
        for head in range(shared):
            of_heads = torch.zeros_like(gradient)
            of_heads[:, :, head::shared] = gradient[:, :, head::shared]
            shares = torch.autograd.grad(outputs, reads, of_heads, retain_graph=True)
            for port, share in zip(ports, shares, strict=True):
                receivers = slice(port.first + head, port.first + port.count, shared)
                self._gather(run, port, receivers, share)

    def hooks(self, run: _Pass, stop: int) -> list[Any]:
        """Return backward hooks that add to the scores.

        Args:
            run: the pass; for neurons, scores are those of all senders.
            stop: the layer at which it stops.
        """
        hooks: dict[str, Callable[..., None]] = {}
        if self.mlps is None:
            for port in self.graph.ports:
                if self.keys.sharing(port) == 1:
                    hooks[port.name] = partial(self._gather, run, port, port.receivers)
        else:
            point = {"output": "hook_mlp_out", "input": "hook_mlp_in"}[self.mlps]
            for name, some in self.graph.writes.items():
                gather = partial(self._gather_neurons, run, some)
                hooks[name.replace("hook_mlp_out", point)] = gather
        depth = {name: self.bridge.hook_dict[name].point.depth for name in hooks}
        return [(name, gather) for name, gather in hooks.items() if run.first <= depth[name] < stop]

    @torch.no_grad()
    def _gather(
        self,
        run: _Pass,
        port: Port,
        receivers: slice,
        gradient: Tensor,
        hook: HookPoint | None = None,
    ) -> None:
        """Add the gradient of a port's receivers, times the differences of their senders."""
        chosen = range(len(self.graph.senders))[run.senders]
        senders = slice(chosen.start, min(chosen.stop, port.upstream))
        of_runs = gradient.unflatten(0, (run.n, -1)).sum(0)
        by_receiver = of_runs.movedim(-2, 0) if port.per_head else of_runs.unsqueeze(0)
        by_receiver = by_receiver.flatten(1).to(self.change.dtype)
        self.scores[receivers, senders] += run.weight * (
            by_receiver @ self.change[senders].flatten(1).T
        )

    @torch.no_grad()
    def _gather_neurons(
        self, run: _Pass, senders: slice, gradient: Tensor, hook: HookPoint
    ) -> None:
        """Add the gradient at some senders' outputs, times their differences."""
        of_runs = gradient.unflatten(0, (run.n, -1)).sum(0).to(self.change.dtype)
        self.scores[senders] += run.weight * (self.change[senders] * of_runs).sum((1, 2))


#: The input of a pass's first layer, among the activations that it keeps.
_LEAF = "leaf"


def _started(
    kept: dict[str, Tensor], value: Tensor | None, stream: Tensor, hook: HookPoint
) -> Tensor:
    """Begin a pass with a leaf: a replacement of the stream, or the stream."""
    kept[_LEAF] = (stream if value is None else value).detach().requires_grad_()
    return kept[_LEAF]


def _replaced(value: Tensor, activation: Tensor, hook: HookPoint) -> Tensor:
    """Return a replacement through which the replaced activation keeps a gradient, of 0."""
    return value + 0 * activation


@torch.no_grad()
@refuse_wrong_types
def information_flow(
    bridge: TransformerBridge, prompts: Prompts, graph: Graph | None = None, **model_kwargs: Any
) -> EdgeScores:
    """Compute how close each receiver's input is to each sender's output: scores without a metric
    or corruption.

    The score of an edge is the sender's share of proximities ``max(|y| - |y - x|, 0)``, where y is
    the receiver's input, x the sender's output, and lengths are L1 norms: a mean over tokens, then
    over prompts (Ferrando and Voita 2024, "Information Flow Routes: Automatically Interpreting
    Language Models at Scale"; as in the code of the Mechanistic Interpretability Benchmark). The
    heads of a layer read the same stream, so they have the same scores.

    Args:
        bridge: the bridge.
        prompts: ``[batch, pos]``, or a processor's output; with an ``attention_mask``, padding is
            ignored.
        graph: the model's graph from `Graph.of`, grouped or not; None: grouped.
        model_kwargs: further model inputs for the prompts.

    Returns:
        A score from 0 to 1 for every edge; the scores of a receiver sum to 1, or to 0 if no sender
        is close.

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
    graph, inputs = graph_of(bridge, graph), prompts_with(bridge, prompts, model_kwargs)
    streams = {port.name: _stream(graph, port) for port in graph.ports}
    wrote = written(graph, bridge, inputs, [*streams.values()])
    refuse_another_sum(bridge, wrote)
    counted = token_mask(inputs).to(wrote.parts)
    weights = counted / counted.sum(1, keepdim=True) / len(counted)
    values = torch.zeros(graph.exists.shape, dtype=torch.float64, device="cpu")
    for port in graph.ports:
        read = wrote.activations[streams[port.name]]
        # Part by part, as a difference with all of them would take as much memory again.
        far = torch.stack([(read - part).abs().sum(-1) for part in wrote.parts[: port.upstream]])
        near = (read.abs().sum(-1) - far).clamp(min=0)
        shares = near / near.sum(0).clamp(min=torch.finfo(near.dtype).tiny)
        means = (shares * weights).sum((1, 2))
        values[port.receivers, : port.upstream] = means.double().cpu()
    return EdgeScores(graph, values)


@refuse_wrong_types
def mean_scores(
    scores: Iterable[EdgeScores], weights: Sequence[int | float] | None = None
) -> EdgeScores:
    """Return the mean of scores from several batches, holding one batch at a time.

    Args:
        scores: scores of the same graph, such as ``(edge_attribution(bridge, *batch, metric) for
            batch in batches)``.
        weights: the weight of each, such as its number of prompts; None: equal weights.

    Raises:
        ValueError: there are no scores, or they are of different graphs; weights that are not
            finite or sum to 0.

    Example:
        >>> import torch
        >>> from bridge.circuits import EdgeScores, Graph, mean_scores
        >>> from bridge import TransformerBridge
        >>> graph = Graph.of(TransformerBridge.boot_embedded())
        >>> one = EdgeScores(graph, torch.ones(len(graph.receivers), len(graph.senders)))
        >>> mean_scores([one, one])["embed->logits"]
        1.0
    """
    weight_sum = 1.0 if weights is None else sum(weights)
    if not math.isfinite(weight_sum) or (weights and weight_sum == 0):
        raise ValueError(f"weights add up to {weight_sum}: such weights have no mean")
    graph, total, count = None, torch.zeros((), device="cpu"), 0
    for some in scores:
        if count and some.graph != graph:
            raise ValueError("the mean is of one or more scores of the same graph")
        weight = 1 if weights is None else weights[count] if count < len(weights) else 0
        graph, total, count = some.graph, total + some.values * weight, count + 1
    if graph is None:
        raise ValueError("the mean is of one or more scores of the same graph")
    if weights is not None and count != len(weights):
        raise ValueError(f"there are {count} scores and {len(weights)} weights")
    return EdgeScores(graph, total / (count if weights is None else weight_sum))


# --------------------------------------------------------------------------------------------------
# Edges replaced one at a time, and paths from some senders to some receivers, by running the model.
# --------------------------------------------------------------------------------------------------


@torch.no_grad()
@refuse_wrong_types
def edge_effects(
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric,
    edges: Sequence[str] | None = None,
    verbose: bool = True,
    ablation: str | Noise | Float[Tensor, "constant d_model"] = "resample",
    reference: Prompts | None = None,
    graph: Graph | None = None,
    **model_kwargs: Any,
) -> EdgeScores:
    """Measure how the clean run's metric changes if one edge carries its sender's output in the
    corrupted run.

    Each edge is replaced alone, and the rest of the model runs from there (Goldowsky-Dill et al.
    2023, "Localizing Model Behavior with Path Patching"). Runs start at the receiver's layer, and
    share batches where this does not change the result.

    Args:
        bridge: the bridge.
        clean, corrupted: pairs of prompts, ``[batch, pos]``, or a processor's output.
        metric: a function from logits ``[batch, pos, d_vocab]`` to one number.
        edges: edges such as ``"L0H1->L3H2.q"``; None: all. Other edges have the score 0.
        verbose: show a progress bar.
        ablation, reference: the replacement of the corrupted run, as for `Circuit.evaluate`.
        graph: the model's graph from `Graph.of`, grouped or not; None: grouped.
        model_kwargs: further model inputs for both prompts of a pair.

    Raises:
        ValueError: pairs that do not match, a model without such a graph, a graph of another model,
            an unknown edge.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import edge_effects
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 2)
        >>> edge = "embed->L0H0.v"
        >>> effects = edge_effects(
        ...     bridge, pairs.clean, pairs.corrupted, pairs.metric(), [edge], verbose=False
        ... )
    """
    pair = ablate(bridge, graph, clean, corrupted, ablation, reference, model_kwargs)
    return EdgeScores(pair.graph, effects_of_edges(bridge, pair, metric, edges, verbose))


@torch.no_grad()
@refuse_wrong_types
def node_effects(
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric,
    ablation: str | Noise | Float[Tensor, "constant d_model"] = "resample",
    reference: Prompts | None = None,
    **model_kwargs: Any,
) -> NodeScores:
    """Measure how the clean run's metric changes if all edges out of a node carry the ablation's
    replacement.

    Args:
        bridge, clean, corrupted, metric, ablation, reference, model_kwargs: as for `edge_effects`.

    Raises:
        ValueError: as `edge_effects`.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import node_effects
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 2)
        >>> node_effects(bridge, pairs.clean, pairs.corrupted, pairs.metric())
        NodeScores(21 nodes, largest embed -16.8)
    """
    pair = ablate(bridge, None, clean, corrupted, ablation, reference, model_kwargs)
    check_position(metric, pair.prompts.get("attention_mask"))
    graph, parts = pair.graph, pair.clean.parts
    base = one_number(metric, pair.clean.logits)
    senders = len(graph.senders)
    outgoing = (
        torch.eye(senders, dtype=torch.bool, device="cpu")[:, None] & graph.exists
    )  # set receiver sender
    rows, length = pair.prompts["input_ids"].shape
    itemsize = parts.element_size() * (2 + senders // 16)  # a block holds 16 of these per token
    budget = tokens_per_run(bridge.cfg, parts.device, length, itemsize)
    effects = []
    for some in outgoing.split(max(1, budget // (rows * length))):
        runs = run_with_edges_replaced(graph, bridge, pair.prompts, pair.replacement, some)
        effects += [float(one_number(metric, logits) - base) for logits in runs]
    return NodeScores(graph, torch.tensor(effects, dtype=torch.float64, device="cpu"))


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
    """Measure how the clean run's metric changes if some receivers see the corrupted output of some
    senders.

    The receivers get the inputs that they would have if the senders' outputs were those of the
    corrupted run while all other heads kept their outputs of the clean run; then the model runs
    with these inputs (Wang et al. 2022, "Interpretability in the Wild"). MLPs on the path either
    pass the difference on or are frozen as well.

    Args:
        bridge: the bridge.
        clean, corrupted: pairs of prompts, ``[batch, pos]``, or a processor's output.
        metric: a function from logits ``[batch, pos, d_vocab]`` to one number.
        senders: names such as ``"L1H0"``, ``"L2MLP"``, ``"embed"``.
        receivers: names such as ``"L3H2.q"``; ``"L3H2"``, all inputs of a head; ``"L3MLP"``;
            ``"logits"``.
        through_mlps: whether MLPs that are not senders respond to their changed input. False:
            direct edges only.
        graph: the model's graph from `Graph.of`, grouped or not; None: grouped.
        model_kwargs: further model inputs for both prompts of a pair.

    Raises:
        ValueError: pairs that do not match, a model without such a graph, an unknown name, no
            sender or no receiver.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import path_patching
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 2)
        >>> change = path_patching(
        ...     bridge, pairs.clean, pairs.corrupted, pairs.metric(), ["L2H1"], ["logits"]
        ... )
    """
    if not senders or not receivers:
        raise ValueError("path patching needs one sender and one receiver, or more")
    graph = graph_of(bridge, graph)
    sending = {graph.sender(name) for name in senders}
    receiving = sorted({index for name in receivers for index in graph.receivers_named(name)})
    pair = ablate(bridge, graph, clean, corrupted, "resample", None, model_kwargs)
    check_position(metric, pair.prompts.get("attention_mask"))
    inputs = _inputs(bridge, pair, sending, through_mlps)
    keys = OwnKeys(graph, bridge)
    hooks: list[Any] = keys.hooks()
    for port in graph.ports:
        places = [index - port.first for index in receiving if graph.port_of[index] is port]
        if places:
            hooks.append((port.name, partial(_put, keys, port, places, inputs[port.name])))
    logits = bridge.run_with_hooks(tiled(pair.prompts, keys.copies), fwd_hooks=hooks)
    clean_logits = pair.clean.logits
    patched = float(one_number(metric, logits[: len(clean_logits)]))
    return patched - float(one_number(metric, clean_logits))


def _put(
    keys: OwnKeys,
    port: Port,
    places: list[int],
    stream: Tensor,
    activation: Tensor,
    hook: HookPoint,
) -> Tensor:
    """Replace the input of some receivers of a port by a stream."""
    if not port.per_head:
        return stream.repeat(keys.copies, 1, 1)
    inputs = keys.read(port, activation).clone()
    inputs[:, :, places] = stream.unsqueeze(2)
    return keys.spread(port, inputs)


def _inputs(
    bridge: TransformerBridge, pair: AblatedPair, sending: set[int], through_mlps: bool
) -> dict[str, Tensor]:
    """Return the residual stream at each port in a run with the senders replaced and all other
    heads frozen.
    """
    graph, clean = pair.graph, pair.clean
    hooks: list[Any] = []
    for point, senders in graph.writes.items():
        replaced = [sender for sender in range(senders.start, senders.stop) if sender in sending]
        if point in clean.activations:  # heads
            output = clean.activations[point] + pair.change[replaced].sum(0)
            hooks.append((point, _always(output)))
        elif replaced:
            hooks.append((point, _always(pair.replacement[senders.start])))
        elif point.endswith("hook_mlp_out") and not through_mlps:
            hooks.append((point, _always(clean.parts[senders.start])))
    read: dict[str, Tensor] = {}

    def keep(activation: Tensor, hook: HookPoint) -> None:
        read[hook.name] = activation.clone()

    streams = {port.name: _stream(graph, port) for port in graph.ports}
    hooks += [(name, keep) for name in dict.fromkeys(streams.values())]
    bridge.run_with_hooks(pair.prompts, fwd_hooks=hooks)
    return {name: read[stream] for name, stream in streams.items()}


def _stream(graph: Graph, port: Port) -> str:
    """Return the hook point of the residual stream that a port reads."""
    if port.layer == len(graph.layers):
        return port.name
    layer = graph.layers[port.layer]
    mid = port.name.endswith("hook_mlp_in") and layer.heads and not layer.parallel
    return f"blocks.{port.layer}.hook_resid_{'mid' if mid else 'pre'}"


def _always(value: Tensor) -> Callable[..., Tensor]:
    return lambda activation, hook: value


# --------------------------------------------------------------------------------------------------
# A probability for each edge, trained.
# --------------------------------------------------------------------------------------------------


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
    ablation: str | Noise | Float[Tensor, "constant d_model"] = "resample",
    reference: Prompts | None = None,
    seed: int = 0,
    graph: Graph | None = None,
    **model_kwargs: Any,
) -> EdgeScores:
    """Train the probability that each edge is in the circuit, by uniform gradient sampling.

    Each prompt runs with a circuit of its own, in which an edge with probability p is present, or
    absent, or, with probability ``p (1 - p)``, partly present, by a share drawn uniformly from 0 to
    1. The loss's derivative with respect to that share is, on average, the effect of the edge; it
    updates the edge's logit (Li and Janson 2024, "Optimal Ablation for Interpretability"). As in
    their code, that average is over the circuits that contain the edge partly. The loss grows by
    `penalty` for each edge.

    Args:
        bridge: the bridge, in evaluation mode.
        clean, corrupted: pairs of prompts, ``[batch, pos]``, or a processor's output.
        loss: a function from logits ``[batch, pos, d_vocab]`` to one number to minimise; None: the
            divergence from the full model's next-token distribution at each prompt's last token.
        penalty: the cost of an edge, in the loss's units.
        steps, rate: the number of training steps, and the learning rate of Adam.
        samples: the number of circuits that each prompt runs with in a step, all in one batch.
        ablation, reference: the replacement on other edges, as for `Circuit.evaluate`.
        seed: the random seed.
        graph: the model's graph from `Graph.of`, grouped or not; None: grouped.
        model_kwargs: further model inputs for both prompts of a pair.

    Returns:
        The probabilities. Unlike other scores they are never negative.

    Raises:
        ValueError: as `Circuit.evaluate`; no step or sample, a rate that is not positive and
            finite, a penalty below 0 or not finite, a loss that is not finite or has no gradient.
        RuntimeError: the call is in inference mode, which has no gradients.

    Example:
        >>> from bridge.circuits import trained_edges
        >>> from bridge.tasks import compiled
        >>> task = compiled("either")
        >>> def loss(logits):
        ...     return (logits - task.bridge(task.clean)).square().mean()
        >>> scores = trained_edges(
        ...     task.bridge, task.clean, task.corrupted, loss, penalty=0.01, steps=20
        ... )
        >>> 0 <= float(scores.values.min()) <= float(scores.values.max()) <= 1
        True
    """
    check_rate(rate)
    _check_training(steps, samples, penalty)
    refuse_inference_mode("trained_edges")
    pair = ablate(bridge, graph, clean, corrupted, ablation, reference, model_kwargs)
    graph = pair.graph
    loss = loss or divergence_at_last_tokens(pair.clean.logits, pair.prompts)
    check_position(loss, pair.prompts.get("attention_mask"))
    generator = torch.Generator().manual_seed(seed)
    edge_logits = torch.ones(graph.n_edges, requires_grad=True, device="cpu")
    optimizer = torch.optim.Adam([edge_logits], lr=rate)
    rows = len(pair.prompts["input_ids"])
    with torch.enable_grad():
        for _ in range(steps):
            probability = edge_logits.sigmoid()
            drawn = torch.rand(samples, rows, graph.n_edges, generator=generator, device="cpu")
            replaced = torch.zeros(samples, rows, *graph.exists.shape, device="cpu")
            replaced[:, :, graph.exists] = _absent(drawn, probability)
            value = _mean_loss(bridge, pair, replaced.to(pair.replacement), loss)
            (slope,) = gradients_of("loss", value, [edge_logits])
            edge_logits.grad = slope + penalty * (probability * (1 - probability)).detach()
            optimizer.step()
    values = torch.zeros(graph.exists.shape, device="cpu")
    values[graph.exists] = edge_logits.detach().sigmoid()
    return EdgeScores(graph, values)


def _check_training(steps: int, samples: int, penalty: float) -> None:
    check_positive("steps", steps)
    check_positive("samples", samples)
    if not 0 <= penalty < math.inf:
        raise ValueError(f"penalty is {penalty}; it must be 0 or more, and finite")


def _mean_loss(
    bridge: TransformerBridge, pair: AblatedPair, replaced: Tensor, loss: Metric
) -> Tensor:
    """Return the mean loss of several sets of replaced edges.

    Raises:
        ValueError: it is not finite.
    """
    run = partial(run_with_edges_replaced, pair.graph, bridge, pair.prompts, pair.replacement)
    value = torch.stack([one_number(loss, logits) for logits in run(replaced)]).mean()
    if not value.isfinite():
        raise ValueError(f"loss is {value.item()}: it must be a finite number that can be small")
    return value


def _absent(
    drawn: Float[Tensor, "... edge"], probability: Float[Tensor, " edge"]
) -> Float[Tensor, "... edge"]:
    """Return how far edges are absent, from uniform random numbers: fully, not at all, or partly in
    a window.

    The gradient of the partly absent edges is 1 on average, over those further than a thousandth
    from either end.
    """
    window = (probability * (1 - probability)).detach().clamp(min=torch.finfo(drawn.dtype).tiny)
    place = (drawn - probability.detach()) / window + 0.5
    partly, counted = ((place - 0.5).abs() <= within for within in (0.5, 0.499))
    share = counted.to(drawn).flatten(0, -2).mean(0)
    weights = partly / share.where(share > 0, torch.inf)
    return place.clamp(0, 1) - weights * (probability - probability.detach())
