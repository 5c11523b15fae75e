"""A run in which some edges carry what the senders wrote in another run."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

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
from bridge.hooks.arguments import check_choice, check_positive, refuse_wrong_types
from bridge.hooks.hooks import HookPoint
from bridge.hooks.rows import tiled
from bridge.patching.runs import Edit, Patch, PatchedRuns, tokens_per_run
from bridge.run.inputs import Prompts, prompts_with


class OwnKeys:
    """Runs in which each query head reads a key and a value of its own, where the model has one for a group of heads.

    Each row stands in the batch several times. In the first copy a group's key is that of its first query head, in the
    second that of its second one. What a head puts together is taken from its own copy into all, so that all have one
    stream.

    Args:
        graph: the graph, which may be grouped or not.
        bridge: the bridge.

    Attributes:
        shared: of each layer, how many query heads share a key in the model that have their own in the graph, or 1.
        copies: how many times a row stands in the batch.
    """

    def __init__(self, graph: Graph, bridge: TransformerBridge) -> None:
        both = zip(graph.layers, Graph.of(bridge).layers, strict=True)
        self.shared = [own.key_heads // max(1, model.key_heads) or 1 for own, model in both]
        self.copies = math.lcm(*self.shared)

    def of(self, port: Port) -> int:
        """How many receivers of a port read, in the model, as one."""
        return self.shared[port.layer] if port.name.endswith(("hook_k_input", "hook_v_input")) else 1

    def hooks(self) -> list[Any]:
        """Hooks that take what each head puts together from its own copy."""
        return [
            (f"blocks.{layer}.attn.hook_z", partial(self._joined, shared))
            for layer, shared in enumerate(self.shared)
            if shared > 1
        ]

    def _joined(self, shared: int, z: Tensor, hook: HookPoint) -> Tensor:
        by_copy = z.unflatten(0, (self.copies, -1))[:shared].unflatten(3, (-1, shared))  # copy row pos group head d
        own = by_copy.diagonal(dim1=0, dim2=4).movedim(-1, 3).flatten(2, 3)
        return own.repeat(self.copies, 1, 1, 1)

    def read(self, port: Port, activation: Tensor) -> Float[Tensor, "row pos receiver d_model"]:
        """What a port's receivers read.

        Args:
            port: one with a head axis.
            activation: what stands there, of all copies.
        """
        shared = self.of(port)
        return activation.unflatten(0, (self.copies, -1))[:shared].movedim(0, 3).flatten(2, 3)

    def given(self, port: Port, inputs: Float[Tensor, "row pos receiver d_model"]) -> Tensor:
        """What stands at a port, in all copies, where its receivers read some inputs.

        Args:
            port: one with a head axis.
            inputs: of each receiver.
        """
        shared = self.of(port)
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
    """The logits of some prompts for each of several sets of edges, all in one batch.

    Every receiver reads the stream of this very run, to which is added, for each replaced edge, what the sender wrote
    in the other run less what it writes in this one. Norms, attention and MLPs are then computed from that by the
    model. Gradients reach what is replaced, by how much, and the other run.

    Args:
        graph: the graph.
        bridge: the bridge.
        prompts: the tokens, ``[batch, pos]``, and what else the model is given, by name.
        other: what replaces the senders, ``[sender, batch, pos, d_model]``, or one for all rows, or positions.
        replaced: for each set, which edges carry it, ``[set, receiver, sender]``, or ``[set, batch, receiver, sender]``
            where prompts have edges of their own; numbers between 0 and 1: by how much they do.
        neurons: which edges carry some coordinates of it besides, ``[set, receiver, sender]``, and which coordinates
            of each sender, ``[set, sender, d_model]``.
    """
    sets, (batch, length) = len(replaced), prompts["input_ids"].shape
    run = _EdgesReplaced(graph, bridge, other.expand(-1, batch, length, -1), replaced, neurons)
    logits = bridge.run_with_hooks(tiled(prompts, sets * run.keys.copies), fwd_hooks=run.hooks())
    return logits[: sets * batch].unflatten(0, (sets, batch))


class _EdgesReplaced:
    """What such a run remembers: see `run_with_edges_replaced`."""

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
        #: For each set and row, of each sender, the other run less this one.
        self.change = other.new_zeros(*self.shape, *other.shape[:1], *other.shape[2:])
        #: Edges, and of which coordinates of the senders: None, of all.
        self.terms: list[tuple[Tensor, Tensor | None]] = [(self._by_row(replaced), None)]
        if neurons is not None:
            self.terms.append((self._by_row(neurons[0]), neurons[1].to(other)[:, None, :, None]))
        self.seen: dict[str, Tensor] = {}

    def _by_row(self, edges: Tensor) -> Tensor:
        found = edges * self.graph.exists.to(edges.device)
        return (found if found.ndim == 4 else found[:, None].expand(-1, self.shape[1], -1, -1)).to(self.other)

    def hooks(self) -> list[Any]:
        """They see what senders write, and change what receivers read."""
        hooks: list[Any] = self.keys.hooks()
        for point, senders in self.graph.writes.items():
            names = names_of(self.bridge, point)
            hooks += [(name, partial(self._see, point, senders, names)) for name in names]
        used = torch.zeros(len(self.graph.receivers), dtype=torch.bool)
        for weights, _ in self.terms:
            used |= weights.requires_grad | weights.detach().bool().any(-1).flatten(0, 1).any(0).cpu()
        return hooks + [
            (port.name, self._reading(port))
            for port in self.graph.ports
            if used[port.first : port.first + port.count].any()
        ]

    def _see(self, point: str, senders: slice, names: Sequence[str], activation: Tensor, hook: HookPoint) -> None:
        """Notes what senders write, when all that is needed of them was seen."""
        self.seen[hook.name] = activation
        if all(name in self.seen for name in names):
            parts = parts_of(self.bridge, point, {name: self.seen.pop(name) for name in names})
            here = parts[:, : math.prod(self.shape)]  # what is written is the same in all copies
            here = here.unflatten(1, self.shape).movedim(0, 2)
            self.change[:, :, senders] = self.other[senders].movedim(0, 1) - here

    def _reading(self, port: Port) -> Callable[..., Tensor]:
        mine, before = slice(port.first, port.first + port.count), slice(port.upstream)

        def read(stream: Tensor, hook: HookPoint) -> Tensor:
            added: Tensor | float = 0.0
            for weights, coordinates in self.terms:
                upstream = self.change[:, :, before]  # set batch sender pos d_model
                if coordinates is not None:
                    upstream = upstream * coordinates[:, :, before]
                elif weights.requires_grad:  # what is written later may not change what the gradient is of
                    upstream = upstream.clone()
                added = added + weights[:, :, mine, before] @ upstream.flatten(3)
            assert isinstance(added, Tensor)
            by_row = added.unflatten(3, self.change.shape[3:]).flatten(0, 1).movedim(1, 2)  # row pos receiver d_model
            by_row = self.keys.given(port, by_row.to(stream.dtype))
            return stream + (by_row if port.per_head else by_row.squeeze(-2))

        return read


# ----------------------------------------------------------------------------------------------------------------------
# How faithful a circuit is: what the model does when all other edges carry something else.
# ----------------------------------------------------------------------------------------------------------------------


ABLATIONS = ("resample", "mean", "zero")


@dataclass(frozen=True)
class Evaluation:
    """The metric of a circuit alone, beside the whole model's and what is left without the circuit.

    Attributes:
        model: the metric of the whole model.
        ablated: with every edge replaced.
        circuit: with every edge replaced but those of the circuit.
        complement: with the circuit's edges replaced.
        share: the circuit's part of all edges.
        prompts: the first three for each prompt, ``[3, batch]``, if the metric gives a number for each.
    """

    model: float
    ablated: float
    circuit: float
    complement: float
    share: float
    prompts: Float[Tensor, "kind batch"] | None = field(default=None, compare=False)

    def _part(self, value: float) -> float:
        if self.model == self.ablated:
            raise ValueError(
                f"the metric is {self.model} with every edge and with none: there is nothing for a circuit to keep"
            )
        return (value - self.ablated) / (self.model - self.ablated)

    @property
    def faithfulness(self) -> float:
        """The circuit's part of what the model's metric is above that of no edges: 1 means all of it."""
        return self._part(self.circuit)

    @property
    def complement_faithfulness(self) -> float:
        """The same of all other edges: 0 means that nothing of it is left without the circuit."""
        return self._part(self.complement)


@dataclass(frozen=True)
class Curve:
    """The faithfulness of circuits of several sizes.

    Attributes:
        shares: parts of all edges, from small to large.
        faithfulness: of the circuit of each size.
        prompts: for each size the metric of the model, of no edges and of the circuit for each prompt, ``[share, 3,
            batch]``, if the metric gives a number for each.
    """

    shares: tuple[float, ...]
    faithfulness: tuple[float, ...]
    prompts: Float[Tensor, "share kind batch"] | None = field(default=None, compare=False)

    @property
    def cpr(self) -> float:
        """The circuit performance ratio: the area under the curve (Mueller et al. 2025). Larger is better."""
        return self._area(self.faithfulness)

    @property
    def cmd(self) -> float:
        """The circuit-model distance: the area between the curve and 1 (Mueller et al. 2025). 0 is best."""
        return self._area([abs(1 - value) for value in self.faithfulness])

    @refuse_wrong_types
    def intervals(self, level: float = 0.95, draws: int = 1000, seed: int = 0) -> dict[str, Tensor]:
        """How far the numbers may be off because these prompts were taken and no others: bootstrap intervals.

        Prompts are drawn again, as many as there are, and everything is computed of these (Efron 1979).

        Args:
            level: how much of the draws an interval holds.
            draws: how often prompts are drawn.
            seed: of the draws.

        Returns:
            The lower and the upper end of ``"faithfulness"``, ``[share, 2]``, and of ``"cpr"`` and ``"cmd"``, ``[2]``.

        Raises:
            ValueError: the metric gave one number for all prompts; a level that is none between 0 and 1; prompts that
                may be drawn without any difference between all edges and none.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.circuits import edge_attribution, faithfulness_curve, logit_difference
            >>> from bridge.tasks import embedded_pairs
            >>> bridge = TransformerBridge.boot_embedded()
            >>> pairs = embedded_pairs(bridge, "ioi", 6)
            >>> scores = edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric())
            >>> each = logit_difference(pairs.answers, pairs.wrong, each=True)
            >>> curve = faithfulness_curve(scores, bridge, pairs.clean, pairs.corrupted, each, shares=(0.1, 0.5, 1.0))
            >>> low, high = curve.intervals()["cpr"].tolist()
            >>> low <= curve.cpr <= high
            True
            >>> curve.draw("EAP-IG")
            Picture('Faithfulness of circuits')
        """
        if self.prompts is None:
            raise ValueError(
                "intervals are over prompts: give a metric with a number for each, as logit_difference(each=True)"
            )
        check_positive("draws", draws)
        if not 0 < level < 1:
            raise ValueError(f"level is {level}; it is between 0 and 1")
        batch = self.prompts.shape[-1]
        drawn = torch.randint(batch, (draws, batch), generator=torch.Generator().manual_seed(seed))
        model, ablated, circuit = self.prompts.double()[..., drawn].mean(-1).unbind(1)
        if same := int((model == ablated).any(0).sum()):
            raise ValueError(
                f"{same} of {draws} draws of prompts have the same metric with every edge and with none: there is "
                "nothing for a circuit to keep"
            )
        faithful = (circuit - ablated) / (model - ablated)
        widths = torch.tensor(self.shares, dtype=torch.float64).diff()

        def area(values: Tensor) -> Tensor:
            return ((values[1:] + values[:-1]) / 2 * widths[:, None]).sum(0)

        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
        found = {"faithfulness": faithful, "cpr": area(faithful), "cmd": area((1 - faithful).abs())}
        return {name: values.quantile(ends, dim=-1).movedim(0, -1) for name, values in found.items()}

    @refuse_wrong_types
    def draw(self, name: str = "circuit", **options: Any) -> Any:
        """A picture of the curve, by `bridge.pictures.faithfulness`: with `intervals` if the metric allows them.

        Args:
            name: of the curve.
            options: as `bridge.pictures.faithfulness` takes them.

        Raises:
            ImportError: what pictures need is not installed.
        """
        pictures = importlib.import_module("bridge.pictures")
        bands = {} if self.prompts is None else {name: self.intervals()["faithfulness"]}
        return pictures.faithfulness(self.shares, {name: self.faithfulness}, bands, **options)

    def _area(self, values: Sequence[float]) -> float:
        """By trapezoids between the shares."""
        steps = zip(self.shares, self.shares[1:], values, values[1:], strict=False)
        return sum((right - left) * (a + b) / 2 for left, right, a, b in steps)


def share_of(graph: Graph, mask: Bool[Tensor, "receiver sender"], neurons: Tensor | None) -> float:
    """A circuit's part of all edges; an edge of which some neurons are in it counts by their share.

    Args:
        graph: the graph.
        mask: its edges.
        neurons: its neurons, ``[sender, d_model]``; None: all.
    """
    kept = mask if neurons is None else mask * neurons.double().mean(1)
    return float(kept.sum()) / graph.n_edges


def evaluations(
    graph: Graph,
    circuits: Sequence[tuple[Bool[Tensor, "receiver sender"], Tensor | None]],
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric,
    ablation: str | Float[Tensor, "constant d_model"],
    reference: Prompts | None,
    model_kwargs: Mapping[str, Any],
) -> list[Evaluation]:
    """What several circuits do; see `Circuit.evaluate`.

    Args:
        graph: their graph.
        circuits: which edges each has, and which neurons of each sender, ``[sender, d_model]`` (None: all).
        bridge, clean, corrupted, metric, ablation, reference, model_kwargs: as there.

    Raises:
        ValueError: as there.
    """
    graph_of(bridge, graph)
    for _, neurons in circuits:
        refuse_another_width(neurons, bridge)
    one, wrote, other = ablated(graph, bridge, clean, corrupted, model_kwargs, ablation, reference)
    with torch.no_grad():
        model = measured(metric, wrote.logits)
        nothing = measured(metric, run_with_edges_replaced(graph, bridge, one, other, graph.exists[None])[0])
        found = []
        for mask, neurons in circuits:
            partly, replaced = None, torch.stack([graph.exists & ~mask, mask])
            if neurons is not None:
                replaced[1] = False
                partly = (mask.expand(2, -1, -1), torch.stack([~neurons, neurons]))
            alone, without = run_with_edges_replaced(graph, bridge, one, other, replaced, partly)
            values = torch.stack([model, nothing, measured(metric, alone), measured(metric, without)])
            whole, none, circuit, complement = (float(value.mean()) for value in values)
            share, each = share_of(graph, mask, neurons), values[:3] if model.ndim else None
            found.append(Evaluation(whole, none, circuit, complement, share, each))
    return found


def refuse_another_width(neurons: Tensor | None, bridge: TransformerBridge) -> None:
    """Refuses neurons of another model.

    Raises:
        ValueError: they are not as many as a sender of this model writes.
    """
    if neurons is not None and neurons.shape[1] != bridge.cfg.d_model:
        raise ValueError(
            f"there are {neurons.shape[1]} neurons of each sender, and this model has {bridge.cfg.d_model}"
        )


def graph_of(bridge: TransformerBridge, graph: Graph | None) -> Graph:
    """A graph that was asked for, or the model's own.

    Args:
        bridge: the bridge.
        graph: what was asked for.

    Raises:
        ValueError: it is another model's.
    """
    own = Graph.of(bridge)
    if graph is not None and graph != own and graph != Graph.of(bridge, grouped=False):
        raise ValueError(f"the graph is {graph}, and this model is {own}")
    return graph or own


def ablated(
    graph: Graph,
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    model_kwargs: Mapping[str, Any],
    ablation: str | Float[Tensor, "constant d_model"],
    reference: Prompts | None,
) -> tuple[dict[str, Any], SenderOutputs, Float[Tensor, "sender batch_or_one pos_or_one d_model"]]:
    """The clean prompts, what the senders write in their run, and what replaces that; see `Circuit.evaluate`.

    What else writes to the stream, as features of an image, stays; it may not differ.

    Args:
        graph, bridge: as everywhere.
        clean, corrupted, model_kwargs, ablation, reference: as there.

    Raises:
        ValueError: as there.
    """
    one, two = pairs_of(bridge, clean, corrupted, model_kwargs)
    if reference is not None and (isinstance(ablation, Tensor) or ablation != "mean"):
        said = "a tensor" if isinstance(ablation, Tensor) else repr(ablation)
        raise ValueError(f"reference prompts are for the mean; the ablation is {said}")
    if isinstance(ablation, Tensor):
        wanted = [len(graph.senders), bridge.cfg.d_model]
        if list(ablation.shape) != wanted:
            raise ValueError(
                f"ablation has shape {list(ablation.shape)}; constants are a vector for each sender, {wanted}"
            )
        if not ablation.isfinite().all():
            raise ValueError("ablation has numbers that are not finite")
        wrote, _ = written_in_both(graph, bridge, one, two)
        return one, wrote, ablation.to(bridge.cfg.device, bridge.cfg.dtype)[:, None, None]
    check_choice("ablation", ablation, ABLATIONS)
    prompts = two if reference is None else prompts_with(bridge, reference, {})
    lengths = [each["input_ids"].shape[1] for each in (prompts, two)]
    if lengths[0] != lengths[1]:
        raise ValueError(f"reference prompts have {lengths[0]} tokens, and these {lengths[1]}")
    counted = token_mask(prompts)
    if ablation == "mean" and (lacks := (token_mask(one).any(0) & ~counted.any(0)).nonzero().flatten().tolist()):
        raise ValueError(
            f"the mean has nothing to be over at positions {lacks}: clean prompts have tokens there, and what the mean "
            "is over has padding alone"
        )
    wrote, other = written_in_both(graph, bridge, one, two)
    if ablation == "resample":
        return one, wrote, other.parts
    if ablation == "zero":
        return one, wrote, torch.zeros_like(other.parts[:, :1])
    parts = other.parts if reference is None else written(graph, bridge, prompts).parts
    return one, wrote, mean_of(parts, counted, (1,)).to(parts.dtype)


def mean_of(
    parts: Float[Tensor, "sender batch pos d_model"], counted: Bool[Tensor, "batch pos"], over: tuple[int, ...]
) -> Float[Tensor, "..."]:
    """The mean over some axes, of tokens alone, in single precision or better: a sum of halves has no room.

    Args:
        parts: what senders write.
        counted: what is a token.
        over: the axes, which stay with one entry.
    """
    here = counted[None, :, :, None]
    total = parts.where(here, 0).sum(over, keepdim=True, dtype=torch.promote_types(parts.dtype, torch.float32))
    return total / here.sum(over, keepdim=True).clamp(min=1)


@refuse_wrong_types
def mean_outputs(bridge: TransformerBridge, prompts: Iterable[Prompts]) -> Float[Tensor, "sender d_model"]:
    """What each head and MLP writes on average over all tokens of some batches: constants for mean ablation.

    Args:
        bridge: the bridge.
        prompts: batches, ``[batch, pos]``, of any lengths, or what a processor gives; with an ``attention_mask``,
            padding counts for nothing.

    Returns:
        A vector for each sender of the model's graph, for ``evaluate(ablation=)``.

    Raises:
        ValueError: no prompts, or padding alone; a model without such a graph, or in training mode.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import mean_outputs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> mean_outputs(bridge, [bridge.to_tokens("Mary and"), bridge.to_tokens("When Mary and John")]).shape
        torch.Size([21, 128])
    """
    graph, whole, count = Graph.of(bridge), None, 0
    for batch in prompts:
        given = prompts_with(bridge, batch, {})
        wrote = written(graph, bridge, given)
        refuse_another_sum(bridge, wrote)
        counted = token_mask(given)
        here = wrote.parts.where(counted[None, :, :, None], 0).sum((1, 2), dtype=torch.float64)
        whole, count = here if whole is None else whole + here, count + int(counted.sum())
    if whole is None or not count:
        raise ValueError("there are no prompts to take the mean over, or padding alone")
    return (whole / count).to(bridge.cfg.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# What one edge alone does to a metric, measured: the edge carries what its sender writes in the corrupted run.
# ----------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def effects_of_edges(
    graph: Graph,
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric,
    edges: Sequence[str] | None,
    verbose: bool,
    model_kwargs: Mapping[str, Any],
    ablation: str | Float[Tensor, "constant d_model"] = "resample",
    reference: Prompts | None = None,
) -> Float[Tensor, "receiver sender"]:
    """What `edge_effects` returns as `EdgeScores`; 0 where an edge was not asked for.

    Args:
        graph: the graph of the bridge.
        bridge, clean, corrupted, metric, edges, verbose, model_kwargs, ablation, reference: as there.
    """
    wanted = graph.exists.nonzero().tolist() if edges is None else [list(graph.edge(edge)) for edge in edges]
    prompts, one, other = ablated(graph, bridge, clean, corrupted, model_kwargs, ablation, reference)
    change = other - one.parts
    values = torch.zeros(graph.exists.shape, dtype=torch.float64)
    differs = [part.abs().amax((0, 2)).nonzero().flatten() for part in change]
    wanted = [(receiver, sender) for receiver, sender in wanted if len(differs[sender])]
    base = float(one_number(metric, one.logits))
    keys = OwnKeys(graph, bridge)
    ports = [graph.port_of[receiver] for receiver, _ in wanted]
    points = [f"blocks.{port.layer}.attn.hook_z" if keys.of(port) > 1 else port.name for port in ports]
    hooks = [bridge.hook_dict[point] for point in points]
    runs = PatchedRuns(bridge, prompts, hooks, size=bridge.cfg.n_heads)
    patches: list[Patch] = []
    alone: dict[Port, list[tuple[int, int, int]]] = {}
    for index, ((receiver, sender), port, hook) in enumerate(zip(wanted, ports, hooks, strict=True)):
        which = receiver - port.first if port.per_head else None
        if which is not None and keys.of(port) > 1:
            alone.setdefault(port, []).append((index, which, sender))
        else:
            patches.append(Patch(index, hook, int(differs[sender][0]), _adding(change[sender], which)))
    of_ports = (_of_own_keys(keys.of(port), runs, port, some, change, differs) for port, some in alone.items())
    with tqdm(total=len(wanted), desc="patching edges", unit="edge", disable=not verbose) as bar:
        for patch, logits in itertools.chain.from_iterable(map(runs.logits, itertools.chain([patches], of_ports))):
            receiver, sender = wanted[patch.index]
            values[receiver, sender] = float(one_number(metric, logits)) - base
            bar.update()
    return values


def _of_own_keys(
    shared: int,
    runs: PatchedRuns,
    port: Port,
    wanted: Sequence[tuple[int, int, int]],
    change: Float[Tensor, "sender batch pos d_model"],
    differs: Sequence[Tensor],
) -> list[Patch]:
    """Patches of what heads put together, where the key or value of one alone is another than its group's.

    Args:
        shared: how many query heads a group has.
        runs: of the prompts.
        port: through which they read.
        wanted: edges: index, query head and sender.
        change, differs: of each sender, what the other run is more than this one, and at which positions.
    """
    bridge, layer, batch, length = runs.model, port.layer, *change.shape[1:3]
    groups = list(dict.fromkeys((head // shared, sender) for _, head, sender in wanted))
    run, point = runs.corrupted, f"blocks.{layer}.attn.hook_z"
    found: dict[tuple[int, int], Tensor] = {}
    together = max(1, tokens_per_run(bridge.cfg, change.device, length, change.element_size()) // (batch * length))
    for at in range(0, len(groups), together):
        some = groups[at : at + together]

        def add(read: Tensor, hook: HookPoint, some: Sequence[tuple[int, int]] = some) -> Tensor:
            read = read.clone()
            for rows, (group, sender) in zip(read.split(batch), some, strict=True):
                rows[:, :, group] += change[sender]
            return read

        def keep(z: Tensor, hook: HookPoint, some: Sequence[tuple[int, int]] = some) -> None:
            for rows, (group, sender) in zip(z.split(batch), some, strict=True):
                found[group, sender] = rows[:, :, group * shared : (group + 1) * shared].clone()

        given: Any = tiled(runs.prompts, len(some))
        options: dict[str, Any] = {"stop_at_layer": layer + 1}
        if run is not None and run.steps:
            given = run.streams[layer].repeat(len(some), 1, 1)
            options |= {"start_at_layer": layer, **run.options(layer, layer + 1, len(some), 0)}
        bridge.run_with_hooks(given, fwd_hooks=[(port.name, add), (point, keep)], **options)
    return [
        Patch(index, bridge.hook_dict[point], int(differs[sender][0]), _putting(found[head // shared, sender], head))
        for index, head, sender in wanted
    ]


def _putting(own: Float[Tensor, "batch pos group d_head"], head: int) -> Callable[[int], Edit]:
    """A patch that puts in what a head puts together, of what the heads of its group do."""

    def of(start: int) -> Edit:
        def put(z: Tensor) -> Tensor:
            z[:, :, head] = own[:, start:, head % own.shape[2]]
            return z

        return put

    return of


def _adding(change: Float[Tensor, "batch pos d_model"], which: int | None) -> Callable[[int], Edit]:
    """A patch that adds to a stream, or to one head's view of it."""

    def of(start: int) -> Edit:
        def add(stream: Tensor) -> Tensor:
            if which is None:
                return stream + change[:, start:]
            stream[:, :, which] += change[:, start:]
            return stream

        return add

    return of
