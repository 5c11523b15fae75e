"""A run in which some edges carry their senders' outputs from another run."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from bridge.arguments import check_positive, refuse_wrong_types
from bridge.bridge import TransformerBridge
from bridge.circuits.graph import (
    Graph,
    Metric,
    Port,
    SenderOutputs,
    measured,
    names_of,
    one_number,
    pairs_of,
    parts_of,
    refuse_another_sum,
    token_mask,
    written,
    written_in_both,
)
from bridge.hooks.hooks import HookPoint
from bridge.patching.ablations import Noise, kind_of, noise_of
from bridge.patching.runs import Edit, Patch, PatchedRuns, chunks, tokens_per_run
from bridge.rows import check_position, tiled
from bridge.run.inputs import Prompts, prompts_with


class OwnKeys:
    """Runs in which each query head has its own key and value where the model shares one among a
    group of heads.

    Each row is repeated in the batch. The first copy uses the first query head's key for the group,
    the second copy the second head's, and so on. The output of a head is copied from its own copy
    into all copies, so that all have the same stream.

    Args:
        graph: the graph, which may be grouped or not.
        bridge: the bridge.

    Attributes:
        shared: for each layer, the number of query heads that share a key in the model but have
            their own in the graph, or 1.
        copies: the number of copies of each row in the batch.
    """

    def __init__(self, graph: Graph, bridge: TransformerBridge) -> None:
        both = zip(graph.layers, Graph.of(bridge).layers, strict=True)
        self.shared = [own.key_heads // max(1, model.key_heads) or 1 for own, model in both]
        self.copies = math.lcm(*self.shared)

    def sharing(self, port: Port) -> int:
        """Return how many receivers of a port share one input in the model."""
        if port.name.endswith(("hook_k_input", "hook_v_input")):
            return self.shared[port.layer]
        return 1

    def hooks(self) -> list[Any]:
        """Return hooks that take each head's output from its own copy."""
        layers = [layer for layer, shared in enumerate(self.shared) if shared > 1]
        return [(f"blocks.{layer}.attn.hook_z", self._join_heads) for layer in layers]

    def _join_heads(self, z: Tensor, hook: HookPoint) -> Tensor:
        shared = self.shared[hook.point.depth]
        copies = z.unflatten(0, (self.copies, -1))[:shared]
        by_head = copies.unflatten(3, (-1, shared))  # copy row pos group head d
        own = by_head.diagonal(dim1=0, dim2=4).movedim(-1, 3).flatten(2, 3)
        return own.repeat(self.copies, 1, 1, 1)

    def read(self, port: Port, activation: Tensor) -> Float[Tensor, "row pos receiver d_model"]:
        """Return the inputs of a port's receivers.

        Args:
            port: a port with a head axis.
            activation: the port's activation, of all copies.
        """
        copies = activation.unflatten(0, (self.copies, -1))[: self.sharing(port)]
        return copies.movedim(0, 3).flatten(2, 3)

    def spread(self, port: Port, inputs: Float[Tensor, "row pos receiver d_model"]) -> Tensor:
        """Return the activation of a port, in all copies, for the given receiver inputs.

        Args:
            port: a port with a head axis.
            inputs: the input of each receiver.
        """
        shared = self.sharing(port)
        by_copy = inputs.unflatten(2, (-1, shared)).movedim(3, 0)
        return by_copy.expand(self.copies // shared, *by_copy.shape).flatten(0, 2)


def run_with_edges_replaced(
    graph: Graph,
    bridge: TransformerBridge,
    prompts: Mapping[str, Any],
    other: Float[Tensor, "sender batch_or_one pos_or_one d_model"],
    replaced: Tensor,
    neurons: tuple[Tensor, Tensor] | None = None,
) -> Float[Tensor, "set batch pos d_vocab"]:
    """Return the logits of some prompts for each of several sets of edges, all in one batch.

    Every receiver reads the stream of this run. For each replaced edge, the difference between the
    sender's output in the other run and in this run is added. The model then computes norms,
    attention and MLPs from that. Gradients reach the replaced edges, their shares, and the other
    run.

    Args:
        graph: the graph.
        bridge: the bridge.
        prompts: the tokens, ``[batch, pos]``, and the other model inputs, by name.
        other: the replacement of the senders' outputs, ``[sender, batch, pos, d_model]``, with rows
            or positions of size 1 if it is the same for all.
        replaced: for each set, the edges that carry the replacement, ``[set, receiver, sender]``,
            or ``[set, batch, receiver, sender]`` for separate edges per prompt; numbers between 0
            and 1 replace edges partly.
        neurons: the edges that additionally carry some coordinates of the replacement, ``[set,
            receiver, sender]``, and these coordinates of each sender, ``[set, sender, d_model]``.
    """
    batch, length = prompts["input_ids"].shape
    run = _EdgesReplaced(graph, bridge, other.expand(-1, batch, length, -1), replaced, neurons)
    rows = tiled(prompts, len(replaced) * run.keys.copies)
    logits = bridge.run_with_hooks(rows, fwd_hooks=run.hooks())
    return logits[: math.prod(run.shape)].unflatten(0, run.shape)


class _EdgesReplaced:
    """The state of a run with replaced edges: see `run_with_edges_replaced`."""

    def __init__(
        self,
        graph: Graph,
        bridge: TransformerBridge,
        other: Float[Tensor, "sender batch pos d_model"],
        replaced: Tensor,
        neurons: tuple[Tensor, Tensor] | None,
    ) -> None:
        self.graph, self.bridge, self.other = graph, bridge, other
        self.keys = OwnKeys(graph, bridge)
        self.shape = len(replaced), other.shape[1]
        #: For each set, row and sender: the other run's output minus this run's.
        self.change = other.new_zeros(*self.shape, *other.shape[:1], *other.shape[2:])
        #: Edges, and the coordinates of their senders; None: all.
        self.terms: list[tuple[Tensor, Tensor | None]] = [(self._by_row(replaced), None)]
        if neurons is not None:
            self.terms.append((self._by_row(neurons[0]), neurons[1].to(other)[:, None, :, None]))
        #: Activations whose sender needs further ones.
        self.waiting: dict[str, Tensor] = {}

    def _by_row(self, edges: Tensor) -> Tensor:
        edges = edges * self.graph.exists.to(edges.device)
        if edges.ndim == 3:
            edges = edges[:, None].expand(-1, self.shape[1], -1, -1)
        return edges.to(self.other)

    def hooks(self) -> list[Any]:
        """Return hooks that record the senders' outputs and change the receivers' inputs."""
        hooks: list[Any] = self.keys.hooks()
        for point, senders in self.graph.writes.items():
            names = names_of(self.bridge, point)
            hooks += [(name, partial(self._record, point, senders, names)) for name in names]
        changed = torch.zeros(len(self.graph.receivers), dtype=torch.bool, device="cpu")
        for weights, _ in self.terms:
            nonzero = weights.detach().bool().any(-1).flatten(0, 1).any(0)
            changed |= weights.requires_grad | nonzero.cpu()
        for port in self.graph.ports:
            if changed[port.receivers].any():
                hooks.append((port.name, partial(self._change_inputs, port)))
        return hooks

    def _record(
        self, point: str, senders: slice, names: Sequence[str], activation: Tensor, hook: HookPoint
    ) -> None:
        """Record the senders' outputs once all hook points that they need have been reached."""
        self.waiting[hook.name] = activation
        if all(name in self.waiting for name in names):
            activations = {name: self.waiting.pop(name) for name in names}
            parts = parts_of(self.bridge, point, activations)
            parts = parts[:, : math.prod(self.shape)]  # the output is the same in all copies
            outputs = parts.unflatten(1, self.shape).movedim(0, 2)
            self.change[:, :, senders] = self.other[senders].movedim(0, 1) - outputs

    def _change_inputs(self, port: Port, stream: Tensor, hook: HookPoint) -> Tensor:
        """Add the changes of the senders to the stream that a port's receivers read."""
        upstream = slice(port.upstream)
        added: Tensor | float = 0.0
        for weights, coordinates in self.terms:
            change = self.change[:, :, upstream]  # set batch sender pos d_model
            if coordinates is not None:
                change = change * coordinates[:, :, upstream]
            elif weights.requires_grad:
                change = change.clone()  # later writes must not change what the gradient needs
            added = added + weights[:, :, port.receivers, upstream] @ change.flatten(3)
        assert isinstance(added, Tensor)
        by_row = added.unflatten(3, self.change.shape[3:]).flatten(0, 1)
        inputs = by_row.movedim(1, 2).to(stream.dtype)  # row pos receiver d_model
        inputs = self.keys.spread(port, inputs)
        return stream + (inputs if port.per_head else inputs.squeeze(-2))


# --------------------------------------------------------------------------------------------------
# The faithfulness of a circuit: the model's behaviour with all other edges replaced.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The metric of a circuit alone, of the full model, and of the model without the circuit.

    Attributes:
        model: the metric of the full model.
        ablated: the metric with every edge replaced.
        circuit: the metric with every edge outside the circuit replaced.
        complement: the metric with the circuit's edges replaced.
        share: the circuit's share of all edges.
        prompts: the first three attributes for each prompt, ``[3, batch]``, if the metric returns
            one number per prompt.
    """

    model: float
    ablated: float
    circuit: float
    complement: float
    share: float
    prompts: Float[Tensor, "kind batch"] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        metrics = f"metric {self.circuit:.3g} of {self.model:.3g}, {self.ablated:.3g} without edges"
        faithful = ""
        if self.model != self.ablated:
            faithful = f"faithfulness {self.faithfulness:.2f}"
            faithful += f", of the complement {self.complement_faithfulness:.2f}; "
        return f"Evaluation({faithful}{self.share:.1%} of the edges; {metrics})"

    def _share_kept(self, value: float) -> float:
        if self.model == self.ablated:
            raise ValueError(
                f"the metric is {self.model} with every edge and with none: there is nothing for a"
                " circuit to keep"
            )
        return (value - self.ablated) / (self.model - self.ablated)

    @property
    def faithfulness(self) -> float:
        """Return the circuit's share of the model's metric above that of no edges: 1 means all of
        it.
        """
        return self._share_kept(self.circuit)

    @property
    def complement_faithfulness(self) -> float:
        """Return the complement's share of the model's metric: 0 means that nothing remains without
        the circuit.
        """
        return self._share_kept(self.complement)


@dataclass(frozen=True, repr=False)
class Curve:
    """The faithfulness of circuits of several sizes.

    Attributes:
        shares: shares of all edges, in increasing order.
        faithfulness: the faithfulness of the circuit of each size.
        prompts: for each size and prompt, the metric of the model, of no edges and of the circuit,
            ``[share, 3, batch]``, if the metric returns one number per prompt.
    """

    shares: tuple[float, ...]
    faithfulness: tuple[float, ...]
    prompts: Float[Tensor, "share kind batch"] | None = field(default=None, compare=False)
    picture: ClassVar[str] = "faithfulness"

    def __repr__(self) -> str:
        points = [
            f"{value:.2f} at {share:.1%}"
            for share, value in zip(self.shares, self.faithfulness, strict=True)
        ]
        some = [*points[:1], *points[len(points) // 2 : -1][:1], *points[1:][-1:]]
        return (
            f"Curve({len(points)} sizes, cpr {self.cpr:.3f}, cmd {self.cmd:.3f}; faithfulness"
            f" {', '.join(some)})"
        )

    @property
    def cpr(self) -> float:
        """Return the circuit performance ratio: the area under the curve (Mueller et al. 2025).
        Larger is better.
        """
        return self._area(self.faithfulness)

    @property
    def cmd(self) -> float:
        """Return the circuit-model distance: the area between the curve and 1 (Mueller et al.
        2025). 0 is best.
        """
        return self._area([abs(1 - value) for value in self.faithfulness])

    @refuse_wrong_types
    def intervals(self, level: float = 0.95, draws: int = 1000, seed: int = 0) -> dict[str, Tensor]:
        """Estimate the sampling error of the curve's numbers over prompts: bootstrap intervals.

        The prompts are resampled with replacement, and all numbers are computed from each sample
        (Efron 1979).

        Args:
            level: the share of the samples that an interval contains.
            draws: the number of bootstrap samples.
            seed: the random seed.

        Returns:
            The lower and the upper end of ``"faithfulness"``, ``[share, 2]``, and of ``"cpr"`` and
            ``"cmd"``, ``[2]``.

        Raises:
            ValueError: the metric gave one number for all prompts; a level outside 0 to 1; prompts
                for which a sample may show no difference between all edges and none.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.circuits import edge_attribution, faithfulness_curve, logit_difference
            >>> from bridge.tasks import embedded_pairs
            >>> bridge = TransformerBridge.boot_embedded()
            >>> pairs = embedded_pairs(bridge, "ioi", 6)
            >>> scores = edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric())
            >>> each = logit_difference(pairs.answers, pairs.wrong, each=True)
            >>> curve = faithfulness_curve(
            ...     scores, bridge, pairs.clean, pairs.corrupted, each, shares=(0.1, 0.5, 1.0)
            ... )
            >>> low, high = curve.intervals()["cpr"].tolist()
            >>> low <= curve.cpr <= high
            True
            >>> curve.draw("EAP-IG")
            Picture('Faithfulness of circuits')
        """
        if self.prompts is None:
            raise ValueError(
                "intervals are over prompts: give a metric with a number for each, as"
                " logit_difference(each=True)"
            )
        check_positive("draws", draws)
        if not 0 < level < 1:
            raise ValueError(f"level is {level}; it is between 0 and 1")
        batch = self.prompts.shape[-1]
        drawn = torch.randint(
            batch, (draws, batch), generator=torch.Generator().manual_seed(seed), device="cpu"
        )
        model, ablated, circuit = self.prompts.double()[..., drawn].mean(-1).unbind(1)
        if same := int((model == ablated).any(0).sum()):
            raise ValueError(
                f"{same} of {draws} draws of prompts have the same metric with every edge and with"
                " none: there is nothing for a circuit to keep"
            )
        faithful = (circuit - ablated) / (model - ablated)
        widths = torch.tensor(self.shares, dtype=torch.float64, device="cpu").diff()

        def area(values: Tensor) -> Tensor:
            return ((values[1:] + values[:-1]) / 2 * widths[:, None]).sum(0)

        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64, device="cpu")

        def interval(values: Tensor) -> Tensor:
            return values.quantile(ends, dim=-1).movedim(0, -1)

        return {
            "faithfulness": interval(faithful),
            "cpr": interval(area(faithful)),
            "cmd": interval(area((1 - faithful).abs())),
        }

    @refuse_wrong_types
    def draw(self, name: str = "circuit", **options: Any) -> Any:
        """Draw the curve with `bridge.pictures.faithfulness`, with `intervals` if the metric allows
        them.

        Args:
            name: the curve's name.
            options: options of `bridge.pictures.faithfulness`.

        Raises:
            ImportError: the dependencies of pictures are not installed.
        """
        pictures = importlib.import_module("bridge.pictures")
        bands = {} if self.prompts is None else {name: self.intervals()["faithfulness"]}
        return pictures.faithfulness(self.shares, {name: self.faithfulness}, bands, **options)

    def _area(self, values: Sequence[float]) -> float:
        """Return the area by the trapezoidal rule over the shares."""
        area = 0.0
        for (start, one), (end, other) in pairwise(zip(self.shares, values, strict=True)):
            area += (end - start) * (one + other) / 2
        return area


def share_of(graph: Graph, mask: Bool[Tensor, "receiver sender"], neurons: Tensor | None) -> float:
    """Return a circuit's share of all edges; an edge with only some neurons in it counts by their
    share.

    Args:
        graph: the graph.
        mask: the circuit's edges.
        neurons: the circuit's neurons, ``[sender, d_model]``; None: all.
    """
    kept = mask if neurons is None else mask * neurons.double().mean(1)
    return float(kept.sum()) / graph.n_edges


def evaluations(
    bridge: TransformerBridge,
    pair: AblatedPair,
    circuits: Sequence[tuple[Bool[Tensor, "receiver sender"], Tensor | None]],
    metric: Metric,
) -> list[Evaluation]:
    """Evaluate several circuits; see `Circuit.evaluate`.

    Args:
        bridge: the bridge.
        pair: the prompts and the replacement, for the circuits' graph.
        circuits: the edges of each, and the neurons of each sender, ``[sender, d_model]`` (None:
            all).
        metric: as for `Circuit.evaluate`.

    Raises:
        ValueError: neurons of a model of another width; a metric of another shape.
    """
    for _, neurons in circuits:
        refuse_another_width(neurons, bridge)
    check_position(metric, pair.prompts.get("attention_mask"))
    graph = pair.graph
    run = partial(run_with_edges_replaced, graph, bridge, pair.prompts, pair.replacement)
    evaluated = []
    with torch.no_grad():
        model = measured(metric, pair.clean.logits)
        (logits,) = run(graph.exists[None])
        nothing = measured(metric, logits)
        for mask, neurons in circuits:
            replaced, partly = torch.stack([graph.exists & ~mask, mask]), None
            if neurons is not None:
                replaced[1] = False
                partly = (mask.expand(2, -1, -1), torch.stack([~neurons, neurons]))
            both = [measured(metric, logits) for logits in run(replaced, partly)]
            values = torch.stack([model, nothing, *both])
            full, none, circuit, complement = (float(value.mean()) for value in values)
            share, by_prompt = share_of(graph, mask, neurons), values[:3] if model.ndim else None
            evaluated.append(Evaluation(full, none, circuit, complement, share, by_prompt))
    return evaluated


def refuse_another_width(neurons: Tensor | None, bridge: TransformerBridge) -> None:
    """Raise an error for neurons of a model of another width.

    Raises:
        ValueError: their number differs from the width of this model's senders.
    """
    if neurons is not None and neurons.shape[1] != bridge.cfg.d_model:
        raise ValueError(
            f"there are {neurons.shape[1]} neurons of each sender, and this model has"
            f" {bridge.cfg.d_model}"
        )


def graph_of(bridge: TransformerBridge, graph: Graph | None) -> Graph:
    """Return the requested graph, or the model's own.

    Args:
        bridge: the bridge.
        graph: the requested graph.

    Raises:
        ValueError: the graph belongs to another model.
    """
    own = Graph.of(bridge)
    if graph is not None and graph != own and graph != Graph.of(bridge, grouped=False):
        raise ValueError(f"the graph is {graph}, and this model is {own}")
    return graph or own


# --------------------------------------------------------------------------------------------------
# The replacement of the senders' outputs on other edges.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AblatedPair:
    """A clean run, and the replacement of its senders' outputs.

    Attributes:
        graph: the model's graph.
        prompts: the clean prompts, as model inputs.
        clean: the senders' outputs in the clean run.
        replacement: the outputs that take their place, ``[sender, batch, pos, d_model]``, or one
            for all rows or positions.
    """

    graph: Graph
    prompts: dict[str, Any]
    clean: SenderOutputs
    replacement: Float[Tensor, "sender batch_or_one pos_or_one d_model"]

    @property
    def change(self) -> Float[Tensor, "sender batch pos d_model"]:
        """Return the replacement minus the clean run's outputs."""
        return self.replacement - self.clean.parts


def ablate(
    bridge: TransformerBridge,
    graph: Graph | None,
    clean: Prompts,
    corrupted: Prompts,
    ablation: str | Noise | Float[Tensor, "constant d_model"],
    reference: Prompts | None,
    model_kwargs: Mapping[str, Any],
) -> AblatedPair:
    """Run pairs of prompts, and return the clean run with the replacement of its senders' outputs.

    Any other input to the stream, such as image features, is kept; it must be the same in both
    runs.

    Args:
        bridge: the bridge.
        graph: the requested graph; None: the model's own.
        clean, corrupted, ablation, reference, model_kwargs: as for `Circuit.evaluate`.

    Raises:
        ValueError: as `Circuit.evaluate`.
    """
    graph = graph_of(bridge, graph)
    one, two = pairs_of(bridge, clean, corrupted, model_kwargs)
    kind = "a tensor" if isinstance(ablation, Tensor) else kind_of(ablation)
    if reference is not None and kind != "mean":
        raise ValueError(f"reference prompts are for the mean; the ablation is {kind}")
    averaged = two if reference is None else prompts_with(bridge, reference, {})
    if isinstance(ablation, Tensor):
        _check_constants(graph, bridge, ablation)
    elif kind == "mean":
        check_mean(one, averaged)
    wrote, other = written_in_both(graph, bridge, one, two)
    if isinstance(ablation, Tensor):
        replacement = ablation.to(bridge.cfg.device, bridge.cfg.dtype)[:, None, None]
    elif kind == "resample":
        replacement = other.parts
    elif kind == "zero":
        replacement = torch.zeros_like(other.parts[:, :1])
    elif kind == "noise":
        noise, outputs = noise_of(ablation), zip(graph.senders, wrote.parts, strict=True)
        replacement = torch.stack([noise.added_to(part, name) for name, part in outputs])
    else:
        parts = other.parts if reference is None else written(graph, bridge, averaged).parts
        replacement = mean_of(parts, token_mask(averaged), (1,)).to(parts.dtype)
    return AblatedPair(graph, one, wrote, replacement)


def _check_constants(graph: Graph, bridge: TransformerBridge, constants: Tensor) -> None:
    """Raise an error for constants of another model, or that are not finite.

    Raises:
        ValueError: another shape, or a number that is not finite.
    """
    shape = [len(graph.senders), bridge.cfg.d_model]
    if list(constants.shape) != shape:
        raise ValueError(
            f"ablation has shape {list(constants.shape)}; constants are a vector for each"
            f" sender, {shape}"
        )
    if not constants.isfinite().all():
        raise ValueError("ablation has numbers that are not finite")


def check_mean(clean: Mapping[str, Any], averaged: Mapping[str, Any]) -> None:
    """Raise an error for prompts that a mean does not fit.

    Args:
        clean: the clean prompts, as model inputs.
        averaged: the prompts that the mean is over.

    Raises:
        ValueError: the lengths differ, or clean prompts have tokens where all averaged ones have
            padding.
    """
    tokens, counted = token_mask(clean), token_mask(averaged)
    if counted.shape[1] != tokens.shape[1]:
        raise ValueError(
            f"reference prompts have {counted.shape[1]} tokens, and these {tokens.shape[1]}"
        )
    lacks = (tokens.any(0) & ~counted.any(0)).nonzero().flatten().tolist()
    if lacks:
        raise ValueError(
            f"the mean has nothing to be over at positions {lacks}: clean prompts have tokens"
            " there, and what the mean is over has padding alone"
        )


def mean_of(
    parts: Float[Tensor, "sender batch pos d_model"],
    counted: Bool[Tensor, "batch pos"],
    over: tuple[int, ...],
) -> Float[Tensor, "..."]:
    """Return the mean over some axes, of tokens only, in at least single precision, since half
    precision would overflow.

    Args:
        parts: the senders' outputs.
        counted: the mask of tokens.
        over: the averaged axes, which are kept with size 1.
    """
    tokens = counted[None, :, :, None]
    precise = torch.promote_types(parts.dtype, torch.float32)
    total = parts.where(tokens, 0).sum(over, keepdim=True, dtype=precise)
    return total / tokens.sum(over, keepdim=True).clamp(min=1)


@refuse_wrong_types
def mean_outputs(
    bridge: TransformerBridge, prompts: Iterable[Prompts]
) -> Float[Tensor, "sender d_model"]:
    """Return the mean output of each head and MLP over all tokens of some batches: constants for
    mean ablation.

    Args:
        bridge: the bridge.
        prompts: batches, ``[batch, pos]``, of any lengths, or a processor's output; with an
            ``attention_mask``, padding is ignored.

    Returns:
        A vector for each sender of the model's graph, for ``evaluate(ablation=)``.

    Raises:
        ValueError: no prompts, or only padding; a model without such a graph, or in training mode.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import mean_outputs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> mean_outputs(
        ...     bridge, [bridge.to_tokens("Mary and"), bridge.to_tokens("When Mary and John")]
        ... ).shape
        torch.Size([21, 128])
    """
    graph = Graph.of(bridge)
    total, count = torch.zeros((), dtype=torch.float64, device="cpu"), 0
    for batch in prompts:
        inputs = prompts_with(bridge, batch, {})
        wrote = written(graph, bridge, inputs)
        refuse_another_sum(bridge, wrote)
        tokens = token_mask(inputs)
        parts = wrote.parts.where(tokens[None, :, :, None], 0)
        total = total + parts.sum((1, 2), dtype=torch.float64)
        count += int(tokens.sum())
    if not count:
        raise ValueError("there are no prompts to take the mean over, or padding alone")
    return (total / count).to(bridge.cfg.dtype)


# --------------------------------------------------------------------------------------------------
# The measured effect of a single edge on a metric: the edge carries its sender's output in the
# corrupted run.
# --------------------------------------------------------------------------------------------------


@torch.no_grad()
def effects_of_edges(
    bridge: TransformerBridge,
    pair: AblatedPair,
    metric: Metric,
    edges: Sequence[str] | None,
    verbose: bool,
) -> Float[Tensor, "receiver sender"]:
    """Return the effects that `edge_effects` wraps as `EdgeScores`; 0 for edges that were not
    requested.

    Args:
        bridge: the bridge.
        pair: the prompts and the replacement.
        metric, edges, verbose: as for `edge_effects`.
    """
    check_position(metric, pair.prompts.get("attention_mask"))
    graph = pair.graph
    if edges is None:
        requested = [(receiver, sender) for receiver, sender in graph.exists.nonzero().tolist()]
    else:
        requested = [graph.edge(edge) for edge in edges]
    effects = torch.zeros(graph.exists.shape, dtype=torch.float64, device="cpu")
    patches = _EdgePatches(bridge, pair, requested)
    base = float(one_number(metric, pair.clean.logits))
    total = len(patches.edges)
    with tqdm(total=total, desc="patching edges", unit="edge", disable=not verbose) as bar:
        for patch, logits in patches.runs_of_all():
            effects[patches.edges[patch.index]] = float(one_number(metric, logits)) - base
            bar.update()
    return effects


class _EdgePatches:
    """The patches of single edges: each adds the change of the sender's output to the receiver's
    input.

    Args:
        bridge: the bridge.
        pair: the prompts and the replacement.
        edges: the edges, as receiver and sender.

    Attributes:
        edges: the edges whose sender changes anything.
        first: for each sender, the first position at which it changes.
    """

    def __init__(
        self, bridge: TransformerBridge, pair: AblatedPair, edges: Sequence[tuple[int, int]]
    ) -> None:
        self.bridge, self.change = bridge, pair.change
        self.keys = OwnKeys(pair.graph, bridge)
        differs = [part.abs().amax((0, 2)).nonzero().flatten().tolist() for part in self.change]
        self.first = {sender: places[0] for sender, places in enumerate(differs) if places}
        self.edges = [edge for edge in edges if edge[1] in self.first]
        self.ports = [pair.graph.port_of[receiver] for receiver, _ in self.edges]
        hooks = [bridge.hook_dict[self._point(port)] for port in self.ports]
        self.runs = PatchedRuns(bridge, pair.prompts, hooks, size=bridge.cfg.n_heads)

    def _point(self, port: Port) -> str:
        """Return the hook point that is patched: the heads' outputs if they share this input."""
        return _outputs_point(port) if self.keys.sharing(port) > 1 else port.name

    def runs_of_all(self) -> Iterator[tuple[Patch, Tensor]]:
        """Yield each patch, whose index is that of its edge, with its logits."""
        patches: list[Patch] = []
        of_shared_inputs: dict[Port, list[tuple[int, int, int]]] = {}
        for index, ((receiver, sender), port) in enumerate(
            zip(self.edges, self.ports, strict=True)
        ):
            head = receiver - port.first
            if self.keys.sharing(port) > 1:
                of_shared_inputs.setdefault(port, []).append((index, head, sender))
            else:
                edit = _adding(self.change[sender], head if port.per_head else None)
                patches.append(self._patch(index, port.name, edit))
        yield from self.runs.logits(patches)
        for port, edges in of_shared_inputs.items():
            yield from self.runs.logits(self._of_shared_inputs(port, edges))

    def _patch(self, index: int, point: str, edit: Callable[[int], Edit]) -> Patch:
        start = self.first[self.edges[index][1]]
        return Patch(index, self.bridge.hook_dict[point], start, edit)

    def _of_shared_inputs(self, port: Port, edges: Sequence[tuple[int, int, int]]) -> list[Patch]:
        """Return patches of heads' outputs in which only one head's key or value differs from its
        group's.

        Args:
            port: the port through which the receivers read.
            edges: index, query head and sender.
        """
        shared, point = self.keys.sharing(port), _outputs_point(port)
        groups = dict.fromkeys((head // shared, sender) for _, head, sender in edges)
        outputs = self._outputs(port, list(groups))
        return [
            self._patch(index, point, _putting(outputs[head // shared, sender], head))
            for index, head, sender in edges
        ]

    def _outputs(
        self, port: Port, groups: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], Tensor]:
        """Return the outputs of a group's heads, ``[batch, pos, head, d_head]``, if its key or
        value changes by a sender's change.

        Args:
            port: the port through which the groups read.
            groups: each group, and the sender.
        """
        batch, length = self.change.shape[1:3]
        itemsize = self.change.element_size()
        tokens = tokens_per_run(self.bridge.cfg, self.change.device, length, itemsize)
        outputs: dict[tuple[int, int], Tensor] = {}
        for some in chunks(groups, max(1, tokens // (batch * length))):
            for pair, rows in zip(some, self._run_groups(port, some).split(batch), strict=True):
                outputs[pair] = rows
        return outputs

    def _run_groups(self, port: Port, groups: Sequence[tuple[int, int]]) -> Tensor:
        """Return the outputs of some groups' heads, all in one run."""
        bridge, layer, run = self.bridge, port.layer, self.runs.corrupted
        shared, batch = self.keys.sharing(port), self.change.shape[1]
        outputs: list[Tensor] = []

        def add(read: Tensor, hook: HookPoint) -> Tensor:
            read = read.clone()
            for rows, (group, sender) in zip(read.split(batch), groups, strict=True):
                rows[:, :, group] += self.change[sender]
            return read

        def keep(z: Tensor, hook: HookPoint) -> None:
            for rows, (group, _) in zip(z.split(batch), groups, strict=True):
                outputs.append(rows[:, :, group * shared : (group + 1) * shared])

        inputs: Any = tiled(self.runs.prompts, len(groups))
        options: dict[str, Any] = {"stop_at_layer": layer + 1}
        if run is not None and run.steps:
            inputs = run.streams[layer].repeat(len(groups), 1, 1)
            options |= {"start_at_layer": layer, **run.options(layer, layer + 1, len(groups), 0)}
        hooks = [(port.name, add), (_outputs_point(port), keep)]
        bridge.run_with_hooks(inputs, fwd_hooks=hooks, **options)
        return torch.cat(outputs)


def _outputs_point(port: Port) -> str:
    return f"blocks.{port.layer}.attn.hook_z"


def _putting(own: Float[Tensor, "batch pos group d_head"], head: int) -> Callable[[int], Edit]:
    """Return a patch that sets a head's output, taken from the outputs of its group's heads."""

    def put(start: int, z: Tensor) -> Tensor:
        z[:, :, head] = own[:, start:, head % own.shape[2]]
        return z

    return lambda start: partial(put, start)


def _adding(change: Float[Tensor, "batch pos d_model"], head: int | None) -> Callable[[int], Edit]:
    """Return a patch that adds to a stream, or to one head's view of it."""

    def add(start: int, stream: Tensor) -> Tensor:
        if head is None:
            return stream + change[:, start:]
        stream[:, :, head] += change[:, start:]
        return stream

    return lambda start: partial(add, start)
