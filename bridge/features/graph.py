"""Attribution graphs: the edges between features, errors, tokens and logits in a replacement model.

Input: a bridge, a prompt, and hook points in a basis. Output: an `AttributionGraph` of features,
errors, tokens and logits; the `ScoreTerms` of one attention score; or the `HeadLoadings` of a
node's inputs.

The mechanism, in order:

1. `attribution_graph` freezes patterns and norm factors (`bridge.linearised`), and raises an error
   if the model is still not linear.
2. `_ReplacementRun` runs the model once. Activations with a basis become features and a
   reconstruction error. Each of these is a leaf of the autograd graph: a `_Source`.
3. A row holds one receiver's inputs from every node: its gradient at the leaves, times the leaves'
   values (`_rows`). Rows of features at early positions come from runs of a prefix (`_rows_of`).
4. With a limit, `_most_influential` goes from the logits backwards and computes only the rows of
   features that are among the most influential so far. `_Assembly` then builds the graph of the
   nodes that are kept.
5. `score_terms` takes the rows of one query and one key, whose product is the score.
6. `head_loadings` cuts a second run at every head. A receiver's gradient there is its direct input
   from a head, through no other head; the rows of that product in the first run are the inputs that
   reach the receiver through this head last.

It does not depend on how bases are built; pictures are imported only for drawing.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from adapters.sealed import read_file, sealed
from adapters.views.basis import InBasis, dense
from bridge.analysis.analysis import refuse_no_stream, refuse_training
from bridge.arguments import check_positive, refuse_wrong_types
from bridge.bases.bases import takes_over, written_later
from bridge.bridge import TransformerBridge
from bridge.circuits.graph import refuse_inference_mode, token_mask
from bridge.hooks.hooks import HookPoint
from bridge.modules import close
from bridge.patching.patching import texts_of
from bridge.run.inputs import Prompts, prompts_with
from bridge.run.rules import Rules, declared_rules

#: Hook points that start the residual stream: all of it, or the summed embeddings.
_WHOLE_BEGINNING, _BEGINNINGS = "hook_full_embed", ("hook_embed", "hook_pos_embed")
#: Hook points allowed for bases: the stream, outputs added to it, and inputs of output projections.
_LINEAR_BEHIND = (
    ".hook_resid_pre",
    ".hook_resid_mid",
    ".hook_resid_post",
    ".hook_attn_out",
    ".hook_mlp_out",
    ".attn.hook_z",
    ".mlp.hook_post",
)


#: Consecutive receivers, the nodes that send to them, and the weights, ``[receiver, sender]``.
_Rows = tuple[slice, Int[Tensor, " sender"], Float[Tensor, "receiver sender"]]
Kind = Literal["feature", "error", "token", "constant", "dropped", "logit"]


@dataclass(frozen=True)
class Node:
    """A feature, an error, a token or a logit in an attribution graph.

    Attributes:
        kind: ``feature``; ``error``, the part of the activation at `point` that no basis explains;
            ``token``, the start of the stream; ``constant``, the decoders' output at `point` with
            no active feature, or at the point ``biases`` everything that no other node sends;
            ``dropped``, all nodes together that a limit excluded; ``logit``, relative to the mean
            of all logits.
        point: the node's hook point.
        pos: the node's position.
        index: the feature, or the token of a logit; 0 for other nodes.
        head: the head, if each head has features.
    """

    kind: Kind
    point: str
    pos: int
    index: int = 0
    head: int | None = None

    def __str__(self) -> str:
        name = f"{self.point.removeprefix('blocks.').replace('.hook_', '.')}[{self.pos}]"
        if self.head is not None:
            name += f".{self.head}"
        if self.kind in ("feature", "logit"):
            return f"{name}.{self.index}"
        return f"{name}.constant" if self.kind == "constant" else name


@dataclass(frozen=True, repr=False)
class AttributionGraph:
    """The direct effects between all nodes in one run.

    Attributes:
        nodes: features, then errors, tokens, constants, what a limit dropped, and logits.
        rows: the non-zero part of `adjacency`: consecutive receivers; the nodes that send to any of
            them; and the weights, ``[receiver, sender]``. All other nodes receive nothing.
        values: ``[node]``: the values of features and logits in the run; for errors, tokens and
            constants the norm of the vector, and 0 for ``biases`` and ``dropped``, which have no
            vector.
        probabilities: the probabilities of the logits' tokens.
        received: ``[node]``: for features and logits the sum of the absolute values of all inputs,
            without constants and with dropped nodes counted separately; otherwise 0. Influence is
            counted in shares of it.
    """

    nodes: tuple[Node, ...]
    rows: tuple[_Rows, ...]
    values: Float[Tensor, " node"]
    probabilities: Float[Tensor, " logit"]
    received: Float[Tensor, " node"]

    @cached_property
    def _index(self) -> dict[Node, int]:
        return {node: place for place, node in enumerate(self.nodes)}

    def __repr__(self) -> str:
        kinds = [node.kind for node in self.nodes]
        counted = ", ".join(
            "what was dropped" if kind == "dropped" else f"{kinds.count(kind)} {kind}s"
            for kind in dict.fromkeys(kinds)
        )
        return f"AttributionGraph({counted})"

    @property
    def adjacency(self) -> Float[Tensor, "node node"]:
        """Return how much of each node's value comes directly from each other node: ``[receiver,
        sender]``.

        The row of a feature or a logit sums to its value; a logit's value is relative to the mean
        logit. This dense table is built on request: `rows` stores only the part where edges are
        possible, usually less than half.
        """
        table = self.values.new_zeros(len(self.nodes), len(self.nodes))
        for receivers, senders, sent in self.rows:
            table[receivers, senders] = sent
        return table

    def __getitem__(self, edge: tuple[Node, Node]) -> float:
        """Return the edge from one node to another: ``graph[sender, receiver]``."""
        sender, receiver = (self._index[node] for node in edge)
        for receivers, senders, sent in self.rows:
            if receivers.start <= receiver < receivers.stop:
                return float(sent[receiver - receivers.start, senders == sender].sum())
        return 0.0

    def _places(self, *kinds: Kind) -> list[int]:
        return [i for i, node in enumerate(self.nodes) if node.kind in kinds]

    def _shares(self) -> Iterator[_Rows]:
        """Yield absolute edge weights, normalised per receiver; constant nodes are excluded."""
        aside, dropped = self.values.new_zeros(2, len(self.nodes), dtype=torch.bool)
        aside[self._places("constant", "dropped")] = dropped[self._places("dropped")] = True
        for receivers, senders, sent in self.rows:
            sizes, total = sent.abs() * ~aside[senders], self.received[receivers, None]
            # The separate absolute values of dropped nodes add up to more than their sum.
            rest = (total - sizes.sum(1, keepdim=True)).clamp(min=0)
            sizes = sizes.where(~dropped[senders], rest)
            yield receivers, senders, sizes / total.clamp(min=1e-10)

    def influence(self) -> Float[Tensor, " node"]:
        """Return how much of the logits goes through each node, directly or indirectly.

        Edges are normalised to shares of each node's absolute inputs, and followed to the logits,
        which are weighted by their probabilities (Ameisen et al. 2025, "Circuit Tracing"). The
        influence of ``dropped`` is what a limit lost: the paths to the logits that start at an
        excluded node.

        Example:
            See `attribution_graph`.
        """
        weights = self.received.new_zeros(len(self.nodes), dtype=torch.float64)
        weights[self._places("logit")] = self.probabilities.double()
        total = torch.zeros_like(weights)
        while weights.any():  # edges only go forward, so every path ends
            before, weights = weights, torch.zeros_like(total)
            for receivers, senders, shares in self._shares():
                weights[senders] += before[receivers] @ shares.double()
            total += weights
        return total.to(self.values.dtype)

    def largest(self, n: int) -> list[tuple[str, str, float]]:
        """Return the edges with the most influence in the form of `bridge.pictures.circuit`,
        without dropped nodes.

        Args:
            n: the number of entries.

        Raises:
            ValueError: `n` is below 1.
        """
        return [(str(self.nodes[j]), str(self.nodes[i]), sent) for i, j, sent in self._largest(n)]

    def _largest(self, n: int) -> list[tuple[int, int, float]]:
        """Return receiver, sender and weight of the edges with the most influence."""
        check_positive("n", n)
        weights = self.influence()
        weights[self._places("logit")] = self.probabilities
        dropped = self._places("dropped")
        candidates: list[tuple[float, tuple[int, int, float]]] = []
        for (receivers, senders, shares), (*_, sent) in zip(self._shares(), self.rows, strict=True):
            kept = ~torch.isin(senders, senders.new_tensor(dropped))
            influence = shares * weights[receivers, None] * kept
            largest = influence.flatten().topk(min(n, int(influence.count_nonzero())))
            i, j = largest.indices // len(senders), largest.indices % len(senders)
            edges = _edges(receivers, senders, sent, i, j)
            candidates += zip(largest.values.tolist(), edges, strict=True)
        candidates.sort(key=lambda edge: -edge[0])
        return [edge for _, edge in candidates[:n]]

    #: The function of `bridge.pictures` that draws it.
    picture: ClassVar[str] = "circuit"

    @refuse_wrong_types
    def draw(
        self, n: int, bridge: TransformerBridge, tokens: Int[Tensor, "1 pos"], **options: Any
    ) -> Any:
        """Draw the edges with the most influence with `bridge.pictures.circuit`: layers down,
        tokens across.

        Args:
            n: the number of edges.
            bridge: the bridge, which decodes the tokens.
            tokens: the prompt of the graph, ``[1, pos]``.
            options: options of `bridge.pictures.circuit`.

        Raises:
            ImportError: the dependencies of pictures are not installed.
            ValueError: `n` is below 1; a prompt of another length.

        Example:
            See `attribution_graph`.
        """
        pictures = importlib.import_module("bridge.pictures")
        self._refuse_another_length(tokens)
        edges = self.largest(n)
        drawn = {name for sender, receiver, _ in edges for name in (sender, receiver)}
        nodes = {}
        for node in self.nodes:
            if str(node) in drawn:
                column, label = _column(node, bridge.cfg.n_layers)
                if node.kind in ("token", "logit"):
                    token = int(tokens[0, node.pos]) if node.kind == "token" else node.index
                    label = pictures.style.visible(bridge.to_single_str_token(token))
                place = {"column": column, "label": label, "position": node.pos}
                nodes[str(node)] = pictures.CircuitNode(**place)
        defaults = {
            "nodes": nodes,
            "tokens": bridge.to_str_tokens(tokens[0]),
            "measure": "contribution",
            "title": "Attribution graph",
        }
        return pictures.circuit(edges, **(defaults | options))

    @refuse_wrong_types
    def save(
        self,
        path: str | Path,
        bridge: TransformerBridge,
        tokens: Int[Tensor, "1 pos"],
        n: int | None = None,
        name: str = "graph",
        scan: str = "",
    ) -> None:
        """Write the graph as JSON that the interfaces of Neuronpedia and circuit-tracer read.

        These interfaces do not support constants and dropped nodes, so both are in a part of the
        file that they skip.

        Args:
            path: the file.
            bridge: the bridge, which decodes the tokens.
            tokens: the prompt of the graph, ``[1, pos]``.
            n: the number of edges, those with the most influence; None: all. The removed edges
                count as dropped when the file is loaded.
            name: the name in the interfaces (``slug``).
            scan: the name of the features there, such as ``"gemma-2-2b"``.

        Raises:
            ValueError: a prompt of another length; `n` is below 1.

        Example:
            See `AttributionGraph.load`.
        """
        self._refuse_another_length(tokens)
        words = texts_of(bridge, tokens[0])
        ids = [_identity(node, bridge.cfg.n_layers, tokens) for node in self.nodes]
        every = chain.from_iterable(
            _edges(*row, *row[2].nonzero(as_tuple=True)) for row in self.rows
        )
        edges = every if n is None else self._largest(n)
        links = [{"source": ids[j], "target": ids[i], "weight": sent} for i, j, sent in edges]
        unknown = {ids[i] for i in self._places("constant", "dropped")}
        own = {
            "version": 1,
            "nodes": [[name, *astuple(node)] for name, node in zip(ids, self.nodes, strict=True)],
            "values": self.values.tolist(),
            "received": self.received.tolist(),
            "links": [link for link in links if link["source"] in unknown],
        }
        metadata = {
            "slug": name,
            "scan": scan,
            "transcoder_list": [],
            "prompt_tokens": words,
            "prompt": "".join(words),
            "node_threshold": None,
            "schema_version": 1,
        }
        entries = self._entries(ids, bridge, tokens)
        content = {
            "metadata": metadata,
            "qParams": _NOTHING_PINNED,
            "nodes": [entry for entry in entries if entry["node_id"] not in unknown],
            "links": [link for link in links if link["source"] not in unknown],
            _OWN: own,
        }
        Path(path).write_text(sealed(content, allow_nan=False), encoding="utf-8")

    def _entries(
        self, ids: Sequence[str], bridge: TransformerBridge, tokens: Tensor
    ) -> list[dict[str, Any]]:
        """Return the nodes as the interfaces read them, with their names there."""
        influence = self.influence()
        ordered = influence.sort(descending=True)
        cumulative = ordered.values.cumsum(0) / influence.sum()
        up_to = torch.zeros_like(influence).scatter(0, ordered.indices, cumulative)
        probabilities = dict(zip(self._places("logit"), self.probabilities.tolist(), strict=True))
        entries = []
        for i, (node, name) in enumerate(zip(self.nodes, ids, strict=True)):
            entry = _as_interfaces_have_it(node, name, tokens, bridge)
            entry["influence"], entry["activation"] = float(up_to[i]), float(self.values[i])
            entry["token_prob"] = probabilities.get(i, 0.0)
            entries.append(entry)
        return entries

    @classmethod
    @refuse_wrong_types
    def load(cls, path: str | Path) -> AttributionGraph:
        """Read a graph written by `save` or by circuit-tracer.

        A file of circuit-tracer has no constants, so its rows do not sum to values, and it contains
        only the edges that were kept. Its features are named as features of a basis ``transcoder``
        on the MLPs' outputs.

        Args:
            path: the file.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is not a graph, is damaged, or has another version.

        Example:
            >>> import tempfile, pathlib, torch
            >>> from bridge import TransformerBridge
            >>> from bridge.features import AttributionGraph, attribution_graph
            >>> bridge, path = (
            ...     TransformerBridge.boot_embedded(),
            ...     pathlib.Path(tempfile.mkdtemp()) / "graph.json",
            ... )
            >>> tokens, W = bridge.to_tokens("Mary and John"), torch.eye(128)[:, :4]
            >>> basis = {"encode": lambda x: (x @ W).relu(), "decode": lambda f: f @ W.T}
            >>> point = bridge.add_basis("blocks.1.hook_resid_pre", "few", **basis)
            >>> graph = attribution_graph(bridge, tokens, [point.name])
            >>> graph.save(path, bridge, tokens)
            >>> torch.equal(AttributionGraph.load(path).adjacency, graph.adjacency)
            True
        """
        return read_file(path, "attribution graph", cls._from_json)

    @classmethod
    def _from_json(cls, content: dict[str, Any]) -> AttributionGraph:
        own = content.get(_OWN)
        if own is not None and own["version"] != 1:
            raise ValueError(f"it is of version {own['version']}; this package reads version 1")
        entries = {entry["node_id"]: entry for entry in content["nodes"]}
        if own:
            nodes = {name: Node(*fields) for name, *fields in own["nodes"]}
        else:
            nodes = {name: _read(entry) for name, entry in entries.items()}
        inputs = _inputs(nodes, [*content["links"], *(own["links"] if own else ())])
        rows = [_row(place, sent) for place, sent in enumerate(inputs) if sent]
        if own:
            values, received = own["values"], own["received"]
        else:
            values = [entries[name]["activation"] or 0.0 for name in nodes]
            received = [sum(map(abs, sent.values()), 0.0) for sent in inputs]
        if not len(values) == len(received) == len(nodes):
            raise ValueError(
                f"it has {len(nodes)} nodes, {len(values)} values and {len(received)} sums"
            )
        logits = [name for name, node in nodes.items() if node.kind == "logit"]
        probabilities = torch.tensor([entries[name]["token_prob"] for name in logits], device="cpu")
        numbers = (
            torch.tensor(values, device="cpu"),
            probabilities,
            torch.tensor(received, device="cpu"),
        )
        return cls(tuple(nodes.values()), tuple(rows), *numbers)

    def _refuse_another_length(self, tokens: Tensor) -> None:
        if tokens.shape[1] != self.nodes[-1].pos + 1:
            raise ValueError(
                f"tokens has {tokens.shape[1]} positions; the graph is of {self.nodes[-1].pos + 1}"
            )


def _inputs(nodes: Mapping[str, Node], links: Sequence[dict[str, Any]]) -> list[dict[int, float]]:
    """Return the inputs of each node, by the place of their sender, from the links of a file."""
    place = {name: i for i, name in enumerate(nodes)}
    # Dropped inputs count, even if they sum to zero.
    dropped = [i for i, node in enumerate(nodes.values()) if node.kind == "dropped"]
    inputs = [dict.fromkeys(dropped, 0.0) for _ in nodes]
    for link in links:
        inputs[place[link["target"]]][place[link["source"]]] = link["weight"]
    return inputs


def _row(place: int, inputs: Mapping[int, float]) -> _Rows:
    """Return a row of a graph, from its inputs by the place of their sender."""
    weights = torch.tensor([[*inputs.values()]], device="cpu")
    return slice(place, place + 1), torch.tensor([*inputs], device="cpu").int(), weights


def _edges(
    receivers: slice, senders: Tensor, sent: Tensor, i: Tensor, j: Tensor
) -> list[tuple[int, int, float]]:
    """Return selected entries of some rows of a graph: receivers, senders and weights."""
    columns = (receivers.start + i).tolist(), senders[j].tolist(), sent[i, j].tolist()
    return [*zip(*columns, strict=True)]


#: The part of a graph's file that other programs ignore.
_OWN = "transformer_bridge"
#: What a user of the interfaces can pin: nothing yet.
_NOTHING_PINNED = {
    "pinnedIds": [],
    "supernodes": [],
    "linkType": "both",
    "clickedId": "",
    "sg_pos": "",
}
#: The names of node kinds in other programs.
_KINDS: dict[Kind, str] = {
    "feature": "cross layer transcoder",
    "error": "mlp reconstruction error",
    "token": "embedding",
    "logit": "logit",
}


def _identity(node: Node, n_layers: int, tokens: Tensor) -> str:
    """Return a node's name for interfaces: that of circuit-tracer for features of MLPs, tokens and
    logits.
    """
    if node.kind == "feature":
        _, layer, *point = node.point.split(".")
        parts = [layer, str(node.index), str(node.pos)]
        if point[0] != "hook_mlp_out":
            parts.append(".".join(point))
        if node.head is not None:
            parts.append(f"h{node.head}")
        return "_".join(parts)
    if node.kind == "token":
        begins = node.point in ("hook_embed", _WHOLE_BEGINNING)
        return f"{'E' if begins else node.point}_{int(tokens[0, node.pos])}_{node.pos}"
    if node.kind == "logit":
        return f"{n_layers + 1}_{node.index}_{node.pos}"
    return f"{node.kind}_{node.point}_{node.pos}"


def _as_interfaces_have_it(
    node: Node, name: str, tokens: Tensor, bridge: TransformerBridge
) -> dict[str, Any]:
    """Convert a node to the fields that Neuronpedia and circuit-tracer read."""
    layer, feature, words = "E", node.pos, ""
    if node.kind == "logit":
        layer, feature = str(bridge.cfg.n_layers + 1), node.index
        words = f'Output "{texts_of(bridge, torch.tensor([node.index], device="cpu"))[0]}"'
    elif node.kind in ("feature", "error"):
        layer, feature = node.point.split(".")[1], -1
        if node.kind == "feature":  # Cantor's pairing function
            pair = int(layer) + node.index
            feature = pair * (pair + 1) // 2 + node.index
    return {
        "node_id": name,
        "jsNodeId": name,
        "feature": feature,
        "layer": layer,
        "ctx_idx": node.pos,
        "clerp": words,
        "feature_type": _KINDS.get(node.kind, node.kind),
        "is_target_logit": node.kind == "logit",
        "run_idx": 0,
        "reverse_ctx_idx": 0,
    }


def _read(entry: dict[str, Any]) -> Node:
    """Convert a node of circuit-tracer."""
    type_name = entry["feature_type"]
    kind = next((kind for kind, name in _KINDS.items() if name == type_name), None)
    if kind is None:
        raise ValueError(f"a node is of type {type_name!r}; known are {', '.join(_KINDS.values())}")
    index = int(entry["node_id"].split("_")[1]) if kind in ("feature", "logit") else 0
    output = f"blocks.{entry['layer']}.hook_mlp_out"
    points = {
        "feature": f"{output}.transcoder",
        "error": output,
        "token": "hook_embed",
        "logit": "logits",
    }
    return Node(kind, points[kind], int(entry["ctx_idx"]), index)


def _column(node: Node, n_layers: int) -> tuple[int, str]:
    """Return a node's column from top to bottom, and its label."""
    if node.kind == "token":
        return 0, ""
    if node.kind == "logit":
        return 3 * n_layers + 1, ""
    _, layer, point = node.point.split(".", 2)
    label = f"L{layer} error" if node.kind == "error" else f"L{layer} #{node.index}"
    column = 3 * int(layer) + 3
    if "attn" in point or "resid_pre" in point:
        column -= 2
    elif "mlp" in point or "resid_mid" in point:
        column -= 1
    return column, label


# --------------------------------------------------------------------------------------------------
# What users call: the graph of a prompt, the terms of a score, the heads that edges go through.
# --------------------------------------------------------------------------------------------------


@refuse_wrong_types
def attribution_graph(
    bridge: TransformerBridge,
    tokens: Prompts,
    points: Sequence[str],
    *,
    logits: Int[Tensor, " logit"] | int = 3,
    without_positions: Sequence[int] = (),
    limit: int | None = None,
    together: int = 64,
    file: str | Path | None = None,
    rules: str | Rules | None = None,
    **model_kwargs: Any,
) -> AttributionGraph:
    """Compute the edges between features, errors, tokens and logits in a prompt's local replacement
    model.

    In this model, attention patterns and norm factors are frozen at their values in this run.
    Layers that bases explain are replaced by their features and reconstruction errors, and other
    MLPs are errors only. Everything between two features is therefore linear, and a feature's
    inputs sum to its value. Terms that depend on none of the nodes have nodes, too: each decoder's
    output with no feature active, and ``biases``: those of the encoder and of the model, and the
    outputs at excluded positions. Influence ignores these constant nodes (Ameisen et al. 2025,
    "Circuit Tracing: Revealing Computational Graphs in Language Models"; the graph is that of
    circuit-tracer, which has no such nodes). The encoder's own derivative is taken at the features,
    so for ReLU, JumpReLU and top-k it equals the encoder's weights. If an encoder attends to other
    positions, its softmax over them is frozen, as the model's patterns are.

    Features that are read inside an MLP or after it (`mlp.hook_post`, and `hook_mlp_out` without
    `reads=`) use the MLP's derivative in this run: the edges into such a feature are first-order
    effects and do not sum to its value. The edges from it are exact. Such a feature gets nothing
    from ``biases`` except constants that a limit excluded.

    If there are more nodes than `limit`, the nodes with the most influence are kept. They are found
    from the logits backwards: a feature's senders are computed once the feature is among the most
    influential itself. Edges between kept nodes equal those of the full graph; the inputs from all
    excluded nodes come from the single node ``dropped``, whose influence is the lost share. Memory
    grows with the number of kept nodes, not with the number of active features.

    Args:
        bridge: the bridge, in evaluation mode.
        tokens: one prompt, ``[1, pos]``, or a processor's output.
        points: hook points in a basis, as returned by `add_basis` or by name: transcoders, or SAEs
            on the stream, on an output added to it, on `attn.hook_z` or on `mlp.hook_post`.
        logits: the tokens whose logits, at the last position, are nodes; or the number of likeliest
            tokens.
        without_positions: positions at which features and errors are not nodes (usually the first,
            where features mean little). They keep their effect in the run.
        limit: the number of features, errors and tokens that are nodes; None: all.
        together: the number of rows computed at once; fewer if their gradients would take over 1
            GiB.
        file: a file for the adjacency. Rows are written as they are computed, and the system can
            reclaim their memory. The disk space is allocated before the first row. An existing file
            is replaced; use `AttributionGraph.save` for a file that can be loaded. None: in memory.
        rules: further rules of the gradients, as for `TransformerBridge.rules`. Patterns and norm
            factors are held in any case. With factors (`v`, `gate`), inputs do not sum to values.
        model_kwargs: further model inputs, such as ``pixel_values=``.

    Returns:
        The graph.

    Raises:
        ValueError: rules with a temperature of the softmax, or that the model lacks a hook point
            for; a point without a basis, or with a basis of another point inside a component; a
            basis that attends to other positions without a softmax pattern; training mode; no node
            or no row requested; an encoder-decoder model; a model that is not linear with patterns,
            factors and MLPs frozen (a state space, a gate, an activation function before the
            logits); padding; nothing to attribute.
        RuntimeError: the call is in inference mode, which has no gradients.
        OSError: there is not enough disk space, or no such folder.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.features import attribution_graph
        >>> bridge, rows = TransformerBridge.boot_embedded(), torch.Generator().manual_seed(0)
        >>> W = torch.randn(128, 6, generator=rows) / 11
        >>> points = []
        >>> for layer in range(4):
        ...     read, write = f"blocks.{layer}.hook_resid_mid", f"blocks.{layer}.hook_mlp_out"
        ...     encode, decode = lambda x: (x @ W).relu(), lambda f: f @ W.T
        ...     points.append(
        ...         bridge.add_basis(write, "tc", encode=encode, decode=decode, reads=read).name
        ...     )
        >>> graph = attribution_graph(bridge, bridge.to_tokens("Mary and John"), points, logits=1)
        >>> {node.kind for node in graph.nodes} == {
        ...     "feature",
        ...     "error",
        ...     "token",
        ...     "constant",
        ...     "logit",
        ... }
        True
        >>> graph.influence().shape == (len(graph.nodes),)
        True
        >>> graph.draw(6, bridge, bridge.to_tokens("Mary and John"))
        Picture('Attribution graph')
    """
    if limit is not None:
        check_positive("limit", limit)
    task = _checked_task(bridge, tokens, points, without_positions, together, model_kwargs)
    _check_logits(logits, bridge.cfg.d_vocab)
    if file is not None and not Path(file).parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
    if declared_rules(rules).temperature is not None:
        raise ValueError(
            f"rules is {rules!r}, with a temperature of the softmax; the graph holds patterns:"
            ' pass rules without it, or with softmax="held"'
        )
    with bridge.rules(rules):
        with torch.no_grad():
            plain = bridge(task.prompt)[0, -1].float()
        shares = plain.softmax(-1)
        chosen = (
            shares.topk(logits).indices if isinstance(logits, int) else logits.to(shares.device)
        )
        with bridge.linearised(task.prompt), torch.enable_grad():
            _refuse_what_is_not_linear(task)
            run = _ReplacementRun(task, chosen)
        with torch.enable_grad():  # the frozen values are part of the run
            return run.graph(shares[chosen], limit, file)


@dataclass(frozen=True, repr=False)
class ScoreTerms:
    """An attention score as a sum over pairs of nodes: a query contribution times a key
    contribution.

    Attributes:
        queries, keys: the nodes.
        query_parts, key_parts: ``[node, d_head]``: each node's contribution to the head's query and
            key, after norms and rotation; the queries include the scale of scores.
        position: the term added to the product of query and key (ALiBi, relative positions); 0 for
            other models.
    """

    queries: tuple[Node, ...]
    keys: tuple[Node, ...]
    query_parts: Float[Tensor, "query d_head"]
    key_parts: Float[Tensor, "key d_head"]
    position: float

    def __repr__(self) -> str:
        return f"ScoreTerms({len(self.queries)} x {len(self.keys)} nodes, score {self.score:.4g})"

    @property
    def values(self) -> Float[Tensor, "query key"]:
        """Return the term of each pair. With `position` they sum to the score."""
        return self.query_parts @ self.key_parts.T

    @property
    def score(self) -> float:
        """Return the score, before a soft cap and the mask."""
        return float(self.query_parts.sum(0) @ self.key_parts.sum(0)) + self.position

    def largest(self, n: int) -> list[tuple[Node, Node, float]]:
        """Return the terms with the largest absolute value: query node, key node, term.

        Args:
            n: the number of entries.

        Raises:
            ValueError: `n` is below 1.
        """
        check_positive("n", n)
        candidates: list[tuple[Node, Node, float]] = []
        # In chunks, as a table of all pairs may be too large.
        for first in range(0, len(self.queries), _ROWS):
            terms = _largest(self.query_parts[first : first + _ROWS] @ self.key_parts.T, n)
            candidates += [(self.queries[first + i], self.keys[j], term) for i, j, term in terms]
        candidates.sort(key=lambda term: -abs(term[2]))
        return candidates[:n]


def _largest(table: Float[Tensor, "row column"], n: int) -> list[tuple[int, int, float]]:
    """Return the entries with the largest absolute value: row, column, entry."""
    entries = []
    for index in table.abs().flatten().topk(min(n, table.numel())).indices.tolist():
        row, column = divmod(index, table.shape[1])
        entries.append((row, column, float(table[row, column])))
    return entries


#: Hook points of positional terms that are added to scores.
_ADD_TO_SCORES = ("alibi", "relative_positional_bias")
#: The number of rows of a table of pairs processed at once.
_ROWS = 1024


@refuse_wrong_types
def score_terms(
    bridge: TransformerBridge,
    tokens: Prompts,
    points: Sequence[str],
    layer: int,
    head: int,
    query: int,
    key: int,
    *,
    without_positions: Sequence[int] = (),
    together: int = 64,
    **model_kwargs: Any,
) -> ScoreTerms:
    """Decompose a head's attention score between two positions into pairs of features.

    In the replacement model of `attribution_graph`, with patterns and norm factors frozen, queries
    and keys are sums of contributions of features, errors, tokens and constants. A score is
    therefore exactly a sum over pairs of these (Kamath et al. 2025, "Tracing Attention Computation
    Through Feature Interactions"). Rotation and norms of queries and keys are included.

    Args:
        bridge: the bridge, in evaluation mode.
        tokens: one prompt, ``[1, pos]``, or a processor's output.
        points: hook points in a basis, as for `attribution_graph`.
        layer, head: the layer and the head.
        query, key: the attending position, and the attended position.
        without_positions, together, model_kwargs: as for `attribution_graph`.

    Raises:
        ValueError: as `attribution_graph`; an unknown layer, head or position; a key after the
            query; a head without hook points for queries and keys; scores that are not their
            product.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.features import score_terms
        >>> bridge, W = TransformerBridge.boot_embedded(), torch.eye(128)[:, :6]
        >>> basis = {"encode": lambda x: (x @ W).relu(), "decode": lambda f: f @ W.T}
        >>> point = bridge.add_basis(
        ...     "blocks.1.hook_mlp_out", "tc", **basis, reads="blocks.1.hook_resid_mid"
        ... )
        >>> tokens = bridge.to_tokens("Mary and John")
        >>> terms = score_terms(bridge, tokens, [point.name], layer=3, head=1, query=3, key=1)
        >>> _, cache = bridge.run_with_cache(tokens, names_filter="blocks.3.attn.hook_attn_scores")
        >>> abs(terms.score - float(cache["scores", 3][0, 1, 3, 1])) < 1e-4
        True
        >>> abs(float(terms.values.sum()) + terms.position - terms.score) < 1e-4
        True
    """
    task = _checked_task(bridge, tokens, points, without_positions, together, model_kwargs)
    *names, scores_name = _query_key_and_scores(bridge, layer)
    scores = _scores(task, scores_name, {"head": head, "query": query, "key": key})
    score = _uncapped(bridge.cfg.attn_scores_soft_cap, scores[0, head, query, key].float())
    if not torch.isfinite(score):
        raise ValueError(f"position {query} does not attend to position {key}: there is no score")
    with bridge.linearised(task.prompt), torch.enable_grad():
        _refuse_what_is_not_linear(task, names)
        run = _ReplacementRun(task, names=names)
        all_queries, all_keys = (run.read[name][0] for name in names)
        key_head = head * all_keys.shape[1] // scores.shape[1]
        queries, query_parts = run.parts(all_queries[query, head])
        keys, key_parts = run.parts(all_keys[key, key_head])
    part, cfg = bridge.architecture.stack.block_at(layer).attn, bridge.cfg
    if cfg.use_attn_scale and part is not None:
        query_parts = query_parts / (part.own("attn_scale", cfg.attn_scale) or 1.0)
    tolerance = max(1e-3, torch.finfo(scores.dtype).eps)
    position = _positional_term(bridge, float(score), query_parts, key_parts, tolerance)
    return ScoreTerms(queries, keys, query_parts, key_parts, position)


def _positional_term(
    bridge: TransformerBridge, score: float, queries: Tensor, keys: Tensor, tolerance: float
) -> float:
    """Return what a model adds to the product of query and key.

    Raises:
        ValueError: it adds nothing, and yet the score is not this product.
    """
    product = float(queries.sum(0) @ keys.sum(0))
    if bridge.cfg.positional_embedding_type in _ADD_TO_SCORES:
        return score - product
    if abs(score - product) > tolerance * max(1.0, float(queries.norm() * keys.norm())):
        raise ValueError(
            f"the score is {score:.4g}, and the product of query and key {product:.4g}: a term for"
            " each pair would be of something else"
        )
    return 0.0


@torch.no_grad()
def _scores(task: _Task, name: str, places: Mapping[str, int]) -> Float[Tensor, "1 head query key"]:
    """Return a layer's attention scores.

    Args:
        task: the arguments of the graph.
        name: the hook point.
        places: a head, a query and a key.

    Raises:
        ValueError: there is no such head, query or key.
    """
    _, cache = task.bridge.run_with_cache(task.prompt, names_filter=name)
    for (axis, place), size in zip(places.items(), cache[name].shape[1:], strict=True):
        if not 0 <= place < size:
            raise ValueError(f"{axis} is {place}; there are {size}, counted from 0")
    return cache[name]


@dataclass(frozen=True, repr=False)
class HeadLoadings:
    """The attention heads through which a node receives its input from every other node.

    Attributes:
        receiver: the node.
        nodes: the sending nodes, with ``biases`` last: everything that does not come from the
            others.
        heads: layer and head of each head through which the node may receive input.
        direct: ``[node]``: the part that passes through no head.
        values: ``[node, head]``: the part that passes through each head last, with no later head.
            With `direct` these sum to the edge.
    """

    receiver: Node
    nodes: tuple[Node, ...]
    heads: tuple[tuple[int, int], ...]
    direct: Float[Tensor, " node"]
    values: Float[Tensor, "node head"]

    def __repr__(self) -> str:
        return (
            f"HeadLoadings({self.receiver}, {len(self.nodes)} nodes through {len(self.heads)}"
            " heads)"
        )

    def __getitem__(self, sender: Node) -> dict[tuple[int, int], float]:
        """Return the part of one node's edge that goes through each head."""
        if sender not in self.nodes:
            raise ValueError(f"{sender} sends nothing to {self.receiver}")
        return dict(zip(self.heads, self.values[self.nodes.index(sender)].tolist(), strict=True))

    @property
    def edges(self) -> Float[Tensor, " node"]:
        """Return the edge from each node: the sum over all heads, and over paths through no
        head.
        """
        return self.values.sum(1) + self.direct

    def largest(self, n: int) -> list[tuple[Node, tuple[int, int], float]]:
        """Return the loadings with the largest absolute value: sender, layer and head, amount.

        Args:
            n: the number of entries.

        Raises:
            ValueError: `n` is below 1.
        """
        check_positive("n", n)
        return [
            (self.nodes[i], self.heads[j], loading) for i, j, loading in _largest(self.values, n)
        ]


@refuse_wrong_types
def head_loadings(
    bridge: TransformerBridge,
    tokens: Prompts,
    points: Sequence[str],
    receiver: Node,
    *,
    without_positions: Sequence[int] = (),
    together: int = 64,
    **model_kwargs: Any,
) -> HeadLoadings:
    """Compute how much of each edge into a node comes through each attention head.

    In the replacement model of `attribution_graph`, an edge is a sum over paths, through heads of
    several layers, or through none. Each path is assigned to its last head, so the loadings of an
    edge sum to the edge (head loadings of Kamath et al. 2025, "Tracing Attention Computation
    Through Feature Interactions").

    Args:
        bridge: the bridge, in evaluation mode.
        tokens: one prompt, ``[1, pos]``, or a processor's output.
        points: hook points in a basis, as for `attribution_graph`.
        receiver: a feature or a logit, such as one of a graph's nodes.
        without_positions, together, model_kwargs: as for `attribution_graph`.

    Raises:
        ValueError: as `attribution_graph`; a node that receives nothing, or does not exist in this
            run; one that is read inside an MLP or after it, so that its edges are derivatives; a
            layer without hook points for its heads.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.features import attribution_graph, head_loadings
        >>> bridge, W = TransformerBridge.boot_embedded(), torch.eye(128)[:, :6]
        >>> basis = {"encode": lambda x: (x @ W).relu(), "decode": lambda f: f @ W.T}
        >>> point = bridge.add_basis(
        ...     "blocks.1.hook_mlp_out", "tc", **basis, reads="blocks.1.hook_resid_mid"
        ... )
        >>> tokens = bridge.to_tokens("Mary and John")
        >>> graph = attribution_graph(bridge, tokens, [point.name], logits=1)
        >>> found = head_loadings(bridge, tokens, [point.name], graph.nodes[-1])
        >>> sender, (layer, head), loading = found.largest(1)[0]
        >>> found[sender][layer, head] == loading
        True
        >>> torch.allclose(
        ...     found.edges,
        ...     torch.tensor([graph[node, graph.nodes[-1]] for node in found.nodes]),
        ...     atol=1e-4,
        ... )
        True
    """
    task = _checked_task(bridge, tokens, points, without_positions, together, model_kwargs)
    names = _outputs_of_heads(bridge)
    logit = None
    if receiver.kind == "logit":
        logit = task.kept.new_tensor([receiver.index], dtype=torch.long)
        _check_logits(logit, bridge.cfg.d_vocab)
    with bridge.linearised(task.prompt), torch.enable_grad():
        _refuse_what_is_not_linear(task)
        run = _ReplacementRun(task, logit, names)
        cut = _ReplacementRun(task, logit, names, stop=names)
        value, direct = run.value(receiver), cut.value(receiver)
        outputs = [cut.cut[name] for name in names]
        gradients = torch.autograd.grad(direct, outputs, allow_unused=True)
        heads, through = [], [value[None]]
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                layer = int(name.split(".")[1])
                heads += [(layer, head) for head in range(gradient.shape[2])]
                through.append((gradient * run.read[name]).sum((0, 1, 3)))
        nodes, parts = run.parts(torch.cat(through))
    values = parts[:, 1:]
    return HeadLoadings(receiver, nodes, tuple(heads), parts[:, 0] - values.sum(1), values)


# --------------------------------------------------------------------------------------------------
# Checks of the arguments, and of the model.
# --------------------------------------------------------------------------------------------------


def _outputs_of_heads(bridge: TransformerBridge) -> list[str]:
    """Return the hook points of the heads' outputs.

    Raises:
        ValueError: a layer's heads have no hook point.
    """
    blocks = [
        name.removesuffix(".hook_attn_out")
        for name in bridge.hook_dict
        if name.endswith(".hook_attn_out")
    ]
    names = [f"{block}.attn.hook_z" for block in blocks]
    for name in names:
        if name not in bridge.hook_dict:
            raise ValueError(
                f"{bridge.cfg.model_name} has no {name}: its heads' outputs have no hook point"
            )
    return names


def _query_key_and_scores(bridge: TransformerBridge, layer: int) -> list[str]:
    """Return the hook points of a layer's queries and keys at their product, and of the scores.

    Raises:
        ValueError: one of these has no hook point.
    """
    points = []
    for names in (("rot_q", "q"), ("rot_k", "k"), ("attn_scores",)):
        known = [f"blocks.{layer}.attn.hook_{name}" for name in names]
        known = [name for name in known if name in bridge.hook_dict]
        if not known:
            raise ValueError(
                f"{bridge.cfg.model_name} has no queries, keys and scores in layer {layer} that are"
                " hook points"
            )
        points.append(known[0])
    return points


@dataclass(frozen=True, eq=False)
class _Task:
    """The arguments that all graphs share.

    Attributes:
        bridge: the bridge.
        prompt: the tokens, ``[1, pos]``, and the other model inputs.
        bases: the hook points in a basis.
        kept: the positions at which features and errors are nodes.
        together: the number of rows computed at once.
    """

    bridge: TransformerBridge
    prompt: dict[str, Any]
    bases: Sequence[HookPoint]
    kept: Bool[Tensor, " pos"]
    together: int


def _checked_task(
    bridge: TransformerBridge,
    tokens: Any,
    points: Sequence[str],
    without: Sequence[int],
    together: int,
    model_kwargs: Mapping[str, Any],
) -> _Task:
    """Return the arguments that all graphs share, after checking them.

    Raises:
        RuntimeError: the call is in inference mode, which has no gradients.
        ValueError: training mode, several streams, no row, an unsuitable basis, several prompts,
            padding, or an unknown position.
    """
    refuse_inference_mode("a graph of features")
    refuse_training(bridge)
    refuse_no_stream(bridge)
    check_positive("together", together)
    bases = _checked_bases(bridge, points)
    prompt = prompts_with(bridge, tokens, model_kwargs)
    rows, length = prompt["input_ids"].shape
    if rows != 1:
        raise ValueError(f"tokens are {rows} prompts; a graph is of one, [1, pos]")
    if padding := int((~token_mask(prompt)).sum()):
        raise ValueError(
            f"{padding} of {length} tokens are padding, which one prompt needs none of: leave"
            " it out"
        )
    if wrong := [pos for pos in without if not -length <= pos < length]:
        raise ValueError(f"without_positions names {wrong[0]}; there are {length} positions")
    kept = torch.ones(length, dtype=torch.bool, device=bridge.cfg.device)
    kept[list(without)] = False
    return _Task(bridge, prompt, bases, kept, together)


def _check_logits(logits: Tensor | int, d_vocab: int) -> None:
    """Raise an error for tokens whose logits cannot be nodes.

    Raises:
        ValueError: no tokens, too many, duplicates, or one outside the vocabulary.
    """
    named = list(range(logits)) if isinstance(logits, int) else logits.tolist()
    if not named or len(set(named)) < len(named) or not 0 <= min(named) <= max(named) < d_vocab:
        shown = logits if isinstance(logits, int) else named
        raise ValueError(
            f"logits is {shown}; give how many, or different tokens from 0 to {d_vocab - 1}"
        )


def _checked_bases(bridge: TransformerBridge, points: Sequence[str]) -> list[HookPoint]:
    """Return the hook points of the features, after checking them.

    Raises:
        ValueError: there are no bases, or the output of one is not linear or not known.
    """
    hooks = [bridge.select_hooks(point)[0] for point in points]
    bases = [hook for hook in hooks if isinstance(hook.view, InBasis)]
    if not hooks or len(bases) < len(hooks):
        named = ", ".join(hook.name for hook in hooks if hook not in bases) or "none"
        raise ValueError(f"points are hook points that add_basis placed; these are not: {named}")
    on = [hook.name.rpartition(".")[0] for hook in bases]
    if inside := [name for name in on if not name.endswith(_LINEAR_BEHIND)]:
        raise ValueError(
            f"{', '.join(inside)} is inside a part, so what is behind it is not linear in its"
            " features: place bases on the stream, on what attention or an MLP adds to it, on"
            " attn.hook_z or on mlp.hook_post"
        )
    if twice := sorted({name for name in on if on.count(name) > 1}):
        raise ValueError(
            f"several bases stand on {', '.join(twice)}: a part is replaced by one of them"
        )
    if gone := sorted(hook.name for hook in bases if takes_over(hook)):
        raise ValueError(
            f"{', '.join(gone)} takes over features of an earlier layer: name the one of that layer"
        )
    return bases


def _beginnings(bridge: TransformerBridge) -> list[str]:
    """Return the hook points at which the residual stream begins.

    Raises:
        ValueError: there is no such hook point.
    """
    if _WHOLE_BEGINNING in bridge.hook_dict:
        return [_WHOLE_BEGINNING]
    names = [name for name in _BEGINNINGS if name in bridge.hook_dict]
    if not names:
        raise ValueError(
            f"{bridge.cfg.model_name} has no {_BEGINNINGS[0]}: a graph begins where its stream does"
        )
    return names


def _uncapped(cap: float, x: Tensor) -> Tensor:
    """Return the input of a soft cap, which is linear in the stream."""
    return cap * (x / cap).atanh() if cap > 0 else x


@torch.no_grad()
def _refuse_what_is_not_linear(task: _Task, names: Sequence[str] = ()) -> None:
    """Raise an error unless, with patterns and factors frozen, scaling the stream's start scales
    the whole stream.

    Raises:
        ValueError: the model is not linear; the message says where.
    """
    bridge, ends = task.bridge, (".hook_resid_mid", ".hook_resid_post")
    streams = [*(name for name in bridge.hook_dict if name.endswith(ends)), *names]
    runs: list[dict[str, Tensor]] = []
    with bridge.linearised(task.prompt, freeze=("mlp_out",)):
        for times in (1, 2, 3):
            scale = lambda act, hook, times=times: act * times
            with bridge.hooks(fwd_hooks=[(name, scale) for name in _beginnings(bridge)]):
                logits, cache = bridge.run_with_cache(task.prompt, names_filter=streams)
            uncapped = _uncapped(bridge.cfg.output_logits_soft_cap, logits.float())
            runs.append({**cache, "the logits": uncapped})
    # The logits' type counts for half-precision results stored in single precision, too.
    least = torch.finfo(logits.dtype).eps
    for name, act in runs[0].items():
        one, two, three = (run[name].double() for run in runs)
        relative = min(1000 * max(least, torch.finfo(act.dtype).eps), 0.05)
        rounding = relative * float(three.abs().max())
        if float((one - 2 * two + three).abs().max()) > rounding:
            raise ValueError(
                f"{bridge.cfg.model_name} is not linear between the embedding and {name} where"
                " patterns, norm factors and MLPs are held (a state space, a gate, an activation"
                ' function before the logits, a basis with error="drop"): its graph would not'
                " add up"
            )


# --------------------------------------------------------------------------------------------------
# The run of the replacement model, whose gradients are the edges.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Source:
    """A sending tensor on which later parts of the run depend, with the entries that are nodes.

    Attributes:
        kind, point: kind and hook point of the nodes.
        leaf: the tensor, ``[1, pos, ...]``.
        entries: the indices of each node: position, head (if any) and feature for a feature;
            otherwise a position.
        target: for features: the tensor that the leaf copies, with its autograd graph.
    """

    kind: Kind
    point: str
    leaf: Tensor
    entries: Int[Tensor, "node axis"]
    target: Tensor | None = None

    def nodes(self, which: Tensor) -> list[Node]:
        """Return some of the nodes, by index."""
        entries = self.entries[which].tolist()
        if self.kind != "feature":
            return [Node(self.kind, self.point, pos) for (pos,) in entries]
        return [Node("feature", self.point, pos, more[-1], *more[:-1]) for pos, *more in entries]

    def begins(self, other: _Source, length: int) -> bool:
        """Tell whether this source is the beginning of another one, at its first positions.

        Args:
            other: the other source.
            length: the number of positions.
        """
        first, rest = other.entries.tensor_split([len(self.entries)])
        same_point = (self.kind, self.point) == (other.kind, other.point)
        if not same_point or not torch.equal(self.entries, first):
            return False
        return bool((rest[:, 0] >= length).all()) and close(self.leaf, other.leaf[:, :length])

    def pick(self, tensor: Tensor, which: Tensor) -> Tensor:
        """Return the entries of some nodes in a tensor shaped like the leaf."""
        return tensor[0][self.entries[which].unbind(1)]

    def sizes(self, which: Tensor) -> Float[Tensor, " node"]:
        """Return the values of features; for other nodes the norms of their vectors."""
        values = self.pick(self.leaf.detach(), which)
        return values if self.kind == "feature" else values.flatten(1).norm(dim=-1)

    def sent(self, gradient: Tensor | None, rows: int) -> Float[Tensor, "row node"]:
        """Return the nodes' contributions to each of the receivers with these gradients."""
        if gradient is None:
            return self.leaf.new_zeros(rows, len(self.entries))
        index: tuple[slice | Tensor, ...] = (slice(None), *self.entries.unbind(1))
        products = (gradient[:, 0] * self.leaf.detach()[0])[index]
        return products if products.ndim == 2 else products.flatten(2).sum(-1)


@dataclass(frozen=True, eq=False)
class _Receivers:
    """Receivers: features of one source, or logits.

    Attributes:
        before: the number of sources created before these receivers.
        which: the indices of the receivers.
        values: returns the values of some of them, with their autograd graph.
        linear: whether they are linear in their inputs: no MLP lies between.
    """

    before: int
    which: Int[Tensor, " receiver"]
    values: Callable[[Tensor], Tensor]
    linear: bool


#: Functions that turn scores into a pattern, and fused functions that include this step.
_SOFTMAX = (torch.softmax, Tensor.softmax, functional.softmax, torch.special.softmax)
_LOG_SOFTMAX = (
    torch.log_softmax,
    Tensor.log_softmax,
    functional.log_softmax,
    torch.special.log_softmax,
)
_WHOLE_ATTENTION = (
    functional.scaled_dot_product_attention,
    functional.multi_head_attention_forward,
)


class _PatternsHeld(TorchFunctionMode):
    """A context that freezes the attention of an encoding basis: a softmax over positions passes no
    gradient.

    A pattern that is computed differently (by exponentials, by sigmoids, with a sink column) is not
    recognised.

    Args:
        name: the name of the point in the basis.
        length: the number of positions.
    """

    def __init__(self, name: str, length: int) -> None:
        super().__init__()
        self.name, self.length = name, length
        self._has_no_heads = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WHOLE_ATTENTION:
            raise ValueError(
                f"encode of {self.name} attends by {func.__name__}, whose pattern cannot be held:"
                " write it as scores.softmax(-1) @ values"
            )
        result = func(*args, **(kwargs or {}))
        if func not in (*_SOFTMAX, *_LOG_SOFTMAX) or list(result.shape[-2:]) != [self.length] * 2:
            return result
        if func in _LOG_SOFTMAX:
            raise ValueError(
                f"encode of {self.name} takes logarithms of a pattern, which cannot be held: write"
                " it as scores.softmax(-1) @ values"
            )
        self._has_no_heads |= result.ndim == 3
        return result.detach()

    def check(self, features: Tensor) -> None:
        """Raise an error for features that may come from a softmax, since it would be mistaken for
        a pattern.

        Raises:
            ValueError: there are as many features as positions.
        """
        if self._has_no_heads and features.shape[-1] == self.length:
            raise ValueError(
                f"{self.name} has as many features as the prompt has tokens, {self.length}: a"
                " softmax over features cannot be told from one over positions. Take a prompt of"
                " another length"
            )


class _EdgeFile:
    """A file for the edges between some nodes; each node receives only from earlier nodes.

    The file is filled with zeros at once, because a full disk that is only discovered when memory
    is written back would kill the process.

    Args:
        file: the file's name. An existing file is replaced; an earlier graph may still use it.
        n: the largest number of nodes.

    Raises:
        OSError: there is not enough disk space, or no such folder.
    """

    def __init__(self, file: str | Path, n: int) -> None:
        self.path, self.used = Path(file), 0
        size = 4 * (n * (n - 1) // 2)
        self.path.unlink(missing_ok=True)
        try:
            self._fill(size)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            reason = f"{error.strerror}: the edges between {n} nodes take up to {size} bytes"
            raise OSError(error.errno, reason, str(file)) from error
        self._edges = torch.from_file(str(file), shared=True, size=size // 4, dtype=torch.float32)

    def _fill(self, size: int) -> None:
        zeros = bytes(2**20)
        with self.path.open("wb", buffering=0) as stream:
            while size:
                size -= stream.write(zeros[:size])
            os.fsync(stream.fileno())

    def write(self, weights: Tensor) -> Tensor:
        """Write some edges, and return them in the file's memory."""
        first, self.used = self.used, self.used + weights.numel()
        return self._edges[first : self.used].view_as(weights).copy_(weights)

    def truncate(self) -> None:
        """Give back the disk space that was not used."""
        os.truncate(self.path, 4 * self.used)


#: The number of prefixes of a prompt in whose runs rows of features are computed.
_PREFIXES = 4
#: The number of full-prompt rows that a prefix run must save.
_WORTHWHILE = 8
#: The order of the nodes of a graph.
_ORDER = ("feature", "error", "token", "constant")
#: The memory limit for the gradients of rows that are computed at once.
_BYTES = 2**30
#: The number of entries per row that are followed when nodes are ranked.
_FOLLOWED = 1024


class _ReplacementRun:
    """A run of the local replacement model, with its autograd graph.

    Args:
        task: the arguments of the graph; the bridge's patterns and factors are already frozen.
        tokens: the tokens whose logits are nodes; None: none.
        names: the names of further hook points to read.
        stop: the names of hook points at which the gradient is cut.

    Attributes:
        read: the activations at the hook points that are read, with their autograd graph.
        cut: the leaf that replaces the activation after a hook point of `stop`.
        sources: the sources in the order of computation.
        logits: the tokens' logits, relative to the mean logit, as receivers.
    """

    def __init__(
        self,
        task: _Task,
        tokens: Int[Tensor, " logit"] | None = None,
        names: Sequence[str] = (),
        stop: Sequence[str] = (),
    ) -> None:
        self.task, self.bridge, self.kept = task, task.bridge, task.kept
        self.tokens = self.kept.new_zeros(0, dtype=torch.long) if tokens is None else tokens
        self.cut: dict[str, Tensor] = {}
        self.sources: list[_Source] = []
        self.read: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        output = self.bridge.run_with_hooks(task.prompt, fwd_hooks=self._hooks(names, stop))
        logits = _uncapped(self.bridge.cfg.output_logits_soft_cap, output[0, -1].float())
        ends = (logits - logits.mean())[self.tokens]
        which = torch.arange(len(self.tokens), device="cpu")
        self.logits = _Receivers(len(self.sources), which, lambda some: ends[some], True)

    def _hooks(self, names: Sequence[str], stop: Sequence[str]) -> list[tuple[str, Any]]:
        """Return the hooks that replace the model's layers, and read some activations."""
        bridge, bases = self.bridge, self.task.bases
        reads = [name for basis in bases for name, _ in _view_of(basis).reads]
        hooks: list[tuple[str, Any]] = [(name, self._begin) for name in _beginnings(bridge)]
        hooks += [(name, self._keep) for name in dict.fromkeys([*reads, *names])]
        hooks += [(name, self._stop) for name in stop]
        by_point = {basis.name.rpartition(".")[0]: basis for basis in bases}
        # A basis inside an MLP explains its output.
        explained = {name.replace(".mlp.hook_post", ".hook_mlp_out") for name in by_point}
        later = [hook.name.rpartition(".")[0] for basis in bases for hook in basis.point.linked]
        mlps = [name for name in bridge.hook_dict if name.endswith(".hook_mlp_out")]
        unexplained = [name for name in mlps if name not in explained]
        for name in dict.fromkeys([*by_point, *later, *unexplained]):
            earlier = written_later(name, bases, bridge.hook_dict)
            hooks.append((name, partial(self._replace, by_point.get(name), earlier)))
        return hooks

    def _send(
        self, kind: Kind, point: str, value: Tensor, entries: Tensor, target: Tensor | None = None
    ) -> Tensor:
        """Turn a value into a source, and return the leaf that replaces it in the rest of the
        run.
        """
        leaf = value.detach().requires_grad_()
        self.sources.append(_Source(kind, point, leaf, entries, target))
        return leaf

    def _begin(self, act: Tensor, hook: HookPoint) -> Tensor:
        return self._send(
            "token", hook.name, act, torch.arange(act.shape[1], device=act.device)[:, None]
        )

    def _keep(self, act: Tensor, hook: HookPoint) -> None:
        self.read[hook.name] = act

    def _stop(self, act: Tensor, hook: HookPoint) -> Tensor:
        return self.cut.setdefault(hook.name, act.detach().requires_grad_())

    def _replace(
        self,
        basis: HookPoint | None,
        earlier: Sequence[tuple[HookPoint, InBasis]],
        act: Tensor,
        hook: HookPoint,
    ) -> Tensor:
        """Make an activation a function of only features and errors.

        Args:
            basis: the basis of the features; None: the activation is all error.
            earlier: the earlier layers of a cross-layer transcoder that write here.
            act, hook: the activation, and its hook point.
        """
        decoded = constant = torch.zeros_like(act)
        writers = [(view, self._leaves[layer.name]) for layer, view in earlier]
        skipped: Tensor | None = None
        if basis is not None:
            view = _view_of(basis)
            read = view.read_in(self.read) if view.reads else act
            writers.append((view, self._encode(basis, view, read, act.shape[1])))
            skipped = None if view.skip is None else view.skip(read)
        for view, leaf in writers:
            decoded = decoded + view.decoded(leaf, act)
            constant = constant + view.decoded(torch.zeros_like(leaf), act)
        if skipped is not None:
            decoded = decoded + skipped
        positions = self.kept.nonzero()
        error = self._send("error", hook.name, act - decoded, positions)
        if constant.any():
            leaf = self._send("constant", hook.name, constant, positions)
            decoded = decoded - constant.detach() + leaf
        return error + decoded

    def _encode(self, basis: HookPoint, view: InBasis, read: Tensor, length: int) -> Tensor:
        """Encode what a basis reads, and return the leaf of the features."""
        with _PatternsHeld(basis.name, length) as held:
            features = dense(view.encode(read))
        held.check(features)
        kept = self.kept.view(-1, *[1] * (features.ndim - 2))
        entries = (features.detach()[0] * kept).nonzero()
        leaf = self._send("feature", basis.name, features, entries, features)
        self._leaves[basis.name] = leaf
        return leaf

    def _rows(self, receivers: _Receivers) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield batches of receivers, with a ``[row, node]`` tensor of their inputs from each
        earlier source.
        """
        sources = self.sources[: receivers.before]
        leaves = [source.leaf for source in sources]
        row_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        size = max(1, min(self.task.together, _BYTES // max(row_bytes, 1)))
        for some in receivers.which.split(size) if len(receivers.which) else ():
            gradients = self._gradients(receivers.values(some), leaves)
            pairs = zip(sources, gradients, strict=True)
            yield some, [source.sent(gradient, len(some)) for source, gradient in pairs]

    def _rows_of(
        self, requested: Mapping[int, Tensor]
    ) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
        """Yield the rows of features, in the form of `_rows`, source by source.

        Nothing after a feature's position can affect it. The rows of early positions are therefore
        computed in runs of a prefix of the prompt, if that saves enough and gives the same values.

        Args:
            requested: for each source, its requested features, in order.
        """
        length, begin = self.kept.numel(), 0
        for part in range(1, _PREFIXES + 1):
            end = length * part // _PREFIXES
            features: dict[int, Tensor] = {}
            for index, which in requested.items():
                positions = self.sources[index].entries[which, 0]
                features[index] = which[(begin <= positions) & (positions < end)]
            spared = sum(map(len, features.values())) * (length - end)
            run = self._prefix_run(end) if spared > _WORTHWHILE * length else None
            run = run or self
            for index, which in features.items():
                for some, sent in run._rows(run._features(index, which)):
                    yield index, some, self._padded(sent)
            begin = end

    def _padded(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of a prefix run with zeros for the nodes at later positions."""
        rows = []
        for source, part in zip(self.sources, sent, strict=False):
            later = len(source.entries) - part.shape[1]
            rows.append(functional.pad(part, (0, later)) if later else part)
        return rows

    def _prefix_run(self, length: int) -> _ReplacementRun | None:
        """Return the run of the prompt's first tokens; None if its activations differ from those of
        the full run.
        """
        prompt = self.task.prompt
        if not prompt.keys() <= {"input_ids", "attention_mask"}:
            return None
        if any(leaf.shape[-1] == length for leaf in self._leaves.values()):
            return None  # see `_PatternsHeld`
        prefix = {name: value[:, :length] for name, value in prompt.items()}
        with self.bridge.linearised(prefix):
            run = _ReplacementRun(replace(self.task, prompt=prefix, kept=self.kept[:length]))
        if len(run.sources) != len(self.sources):
            return None
        pairs = zip(run.sources, self.sources, strict=True)
        return run if all(one.begins(other, length) for one, other in pairs) else None

    def _gradients(self, receivers: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of each receiver, one by one for a sharded model, as DTensors do not
        support vmap.
        """
        if not receivers.requires_grad:
            return [None] * len(leaves)
        grad = partial(torch.autograd.grad, receivers, leaves, retain_graph=True, allow_unused=True)
        rows = torch.eye(len(receivers), device=receivers.device, dtype=receivers.dtype)
        if self.bridge.wiring.sharing is None:
            return grad(rows, is_grads_batched=True)
        by_leaf = zip(*map(grad, rows), strict=True)
        return [None if leaf[0] is None else torch.stack(leaf) for leaf in by_leaf]

    def _features(self, index: int, which: Tensor) -> _Receivers:
        """Return some of a source's features as receivers."""
        source = self.sources[index]
        assert source.target is not None
        values = partial(source.pick, source.target)
        return _Receivers(index, which, values, not self._bends(source.point))

    def graph(
        self, probabilities: Tensor, limit: int | None, file: str | Path | None
    ) -> AttributionGraph:
        """Return the graph of the run.

        Args:
            probabilities: the probabilities of the tokens.
            limit: the number of features, errors and tokens that are nodes; None: all.
            file: the file of the adjacency; None: in memory.
        """
        sizes = [len(source.entries) for source in self.sources]
        kinds = [source.kind for source in self.sources]
        if not any(n for n, kind in zip(sizes, kinds, strict=True) if kind == "feature"):
            raise ValueError(
                "no feature is active at these positions: there is nothing to attribute"
            )
        ranked = sum(n for n, kind in zip(sizes, kinds, strict=True) if kind != "constant")
        dropped = limit is not None and ranked > limit
        edges = None
        if file is not None:
            most = limit + 1 if limit is not None and dropped else sum(sizes)
            edges = _EdgeFile(file, most + 1 + len(self.tokens))
        if limit is not None and dropped:
            kept = self._most_influential(probabilities, limit)
        else:
            kept = [
                torch.arange(len(source.entries), device=source.leaf.device)
                for source in self.sources
            ]
        return _Assembly(self, kept, probabilities, edges, dropped).graph()

    def value(self, node: Node) -> Float[Tensor, ""]:
        """Return the value of a feature or a logit, with its autograd graph.

        Raises:
            ValueError: the node is neither a feature nor a logit, or does not exist; or an MLP lies
                between the stream and the feature, so that its edges are derivatives, which do not
                add up to its value.
        """
        if node.kind == "logit" and node.pos == self.kept.numel() - 1:
            return self.logits.values(torch.tensor([0], device="cpu"))[0]
        heads = () if node.head is None else (node.head,)
        entry = self.tokens.new_tensor([node.pos, *heads, node.index])
        for source in self.sources:
            if node.kind != "feature" or (source.kind, source.point) != (node.kind, node.point):
                continue
            if self._bends(source.point):
                raise ValueError(
                    f"{node} is read inside an MLP or after it: its edges are slopes, of no sum"
                )
            which = (source.entries == entry).all(1).nonzero()
            if len(which):
                assert source.target is not None
                return source.pick(source.target, which[0])[0]
        raise ValueError(
            f"{node} is no feature that is active in this run, and no logit of its last position"
        )

    def parts(
        self, vector: Float[Tensor, " d_head"]
    ) -> tuple[tuple[Node, ...], Float[Tensor, "node d_head"]]:
        """Return the nodes that contribute to a vector that is linear in them (``biases`` last),
        and their contributions.
        """
        entries = torch.arange(len(vector), device=vector.device)
        receivers = _Receivers(len(self.sources), entries, lambda some: vector[some], True)
        rows = [sent for _, sent in self._rows(receivers)]
        nodes: list[Node] = []
        parts: list[Tensor] = []
        for source, sent in zip(self.sources, zip(*rows, strict=True), strict=True):
            part = torch.cat(sent).T
            which = part.abs().amax(1).nonzero().flatten()
            nodes += source.nodes(which)
            parts.append(part[which])
        contributions = torch.cat(parts)
        rest = (vector.detach() - contributions.sum(0))[None]
        biases = Node("constant", "biases", 0)
        return (*nodes, biases), torch.cat([contributions, rest])

    def _most_influential(self, probabilities: Tensor, limit: int) -> list[Tensor]:
        """Return the nodes of each source with the most influence, as `AttributionGraph.influence`
        counts it.

        The influence is followed from the logits through the features that rank highest so far,
        until the rows of all these are known. Only the largest entries of a row are stored; the row
        is recomputed for the nodes that are kept.
        """
        sizes = [len(source.entries) for source in self.sources]
        offsets = [*accumulate(sizes, initial=0)]
        of_features = [source.kind == "feature" for source in self.sources]
        is_feature = torch.tensor(of_features, device="cpu").repeat_interleave(
            torch.tensor(sizes, device="cpu")
        )
        is_feature = is_feature.to(probabilities.device)
        begin = probabilities.new_zeros(offsets[-1], dtype=torch.float64)
        for some, sent in self._rows(self.logits):
            begin += probabilities[some].double() @ self._shares(sent).double()
        known: _KnownRows = {}
        expanded = torch.zeros_like(is_feature)
        while True:
            best = _followed(begin, known).topk(limit)
            first = best.indices[best.values > 0]
            unknown = first[is_feature[first] & ~expanded[first]]
            fresh = unknown[: max(self.task.together, int(expanded.sum()) // 4)]
            if not len(fresh):
                return _by_source(first, offsets)
            expanded[fresh] = True
            requested = enumerate(_by_source(fresh, offsets))
            for index, rows, sent in self._rows_of({i: some for i, some in requested if len(some)}):
                shares = self._shares(sent)
                largest = shares.topk(min(_FOLLOWED, shares.shape[1]))
                row = rows + offsets[index], largest.indices, largest.values
                known.setdefault(index, []).append(row)

    def _shares(self, sent: Sequence[Tensor]) -> Float[Tensor, "row node"]:
        """Normalise each row's absolute contributions, ignoring constants."""
        pairs = zip(self.sources, sent, strict=False)
        sizes = torch.cat([part.abs() * (some.kind != "constant") for some, part in pairs], 1)
        return sizes / sizes.sum(1, keepdim=True).clamp(min=1e-10)

    def _bends(self, point: str) -> bool:
        """Tell whether an MLP lies between the stream and the features at a point, so that edges
        are derivatives.
        """
        reads = _view_of(self.bridge.hook_dict[point]).reads
        names = [name for name, _ in reads] or [point.rpartition(".")[0]]
        return any(".mlp." in name or name.endswith(".hook_mlp_out") for name in names)


def _view_of(basis: HookPoint) -> InBasis:
    """Return the view of a hook point in a basis."""
    assert isinstance(basis.view, InBasis)
    return basis.view


#: For each source, the rows of its features that are known: the features, their senders, and the
#: shares of these.
_KnownRows = dict[int, list[tuple[Tensor, Tensor, Tensor]]]


def _followed(begin: Tensor, known: _KnownRows) -> Tensor:
    """Return the influence of each node on the logits, by the known rows.

    Args:
        begin: the influence without detours.
        known: the known rows.
    """
    influence = begin.clone()
    for index in sorted(known, reverse=True):  # the influence of later nodes is complete by then
        for rows, columns, shares in known[index]:
            added = (influence[rows, None] * shares).flatten()
            influence.index_add_(0, columns.flatten(), added)
    return influence


def _by_source(which: Tensor, offsets: Sequence[int]) -> list[Tensor]:
    """Split nodes by source, given the places at which the sources begin."""
    return [
        which[(low <= which) & (which < high)].sort().values - low
        for low, high in pairwise(offsets)
    ]


class _Assembly:
    """A graph whose rows are computed one after the other.

    Args:
        run: the run.
        kept: for each source, those of its nodes that are in the graph.
        probabilities: the probabilities of the logits' tokens.
        edges: the file of the rows; None: in memory.
        dropped: whether the graph lacks nodes of the run.

    Attributes:
        columns: the places of each source's nodes.
        biases: the place of the node ``biases``; that of ``dropped`` is the next one.
    """

    def __init__(
        self,
        run: _ReplacementRun,
        kept: Sequence[Tensor],
        probabilities: Tensor,
        edges: _EdgeFile | None,
        dropped: bool,
    ) -> None:
        self.run, self.kept, self.edges, self.dropped = run, kept, edges, dropped
        nodes: list[Node] = []
        columns: dict[int, slice] = {}
        for index in sorted(range(len(kept)), key=lambda i: _ORDER.index(run.sources[i].kind)):
            columns[index] = slice(len(nodes), len(nodes) + len(kept[index]))
            nodes += run.sources[index].nodes(kept[index])
        self.columns = [columns[index] for index in range(len(kept))]
        self.biases = len(nodes)
        nodes.append(Node("constant", "biases", 0))
        if dropped:
            nodes.append(Node("dropped", "dropped", 0))
        self.first_logit, last = len(nodes), run.kept.numel() - 1
        nodes += [Node("logit", "logits", last, int(token)) for token in run.tokens]
        self.nodes = tuple(nodes)
        self.probabilities = probabilities if edges is None else probabilities.cpu()
        self.received, self.values = self.probabilities.new_zeros(2, len(nodes))
        self.rows: list[_Rows] = []

    def graph(self) -> AttributionGraph:
        """Compute all rows, and return the graph."""
        run, features = self.run, {}
        for index, (source, which) in enumerate(zip(run.sources, self.kept, strict=True)):
            self.values[self.columns[index]] = source.sizes(which).to(self.values)
            if source.kind == "feature":
                features[index] = which
        first = self.first_logit
        for some, sent in run._rows(run.logits):
            self._add(first, run.logits, some, sent)
            first += len(some)
        begins = [column.start for column in self.columns]
        for index, some, sent in run._rows_of(features):
            self._add(begins[index], run._features(index, some), some, sent)
            begins[index] += len(some)
        if self.edges is not None:
            self.edges.truncate()
        rows = tuple(sorted(self.rows, key=lambda row: row[0].start))
        return AttributionGraph(self.nodes, rows, self.values, self.probabilities, self.received)

    def _add(self, first: int, receivers: _Receivers, some: Tensor, sent: Sequence[Tensor]) -> None:
        """Add the rows of some receivers, from the place `first` on."""
        rows, biases = slice(first, first + len(some)), self.biases
        table = self._table(rows, sent)
        self.values[rows] = receivers.values(some).detach().to(self.values)
        if receivers.linear:  # everything is linear in the nodes or constant
            table[:, biases] += self.values[rows] - table.sum(1)
        reached = table.any(0)
        reached[biases + self.dropped] = True  # dropped nodes count, even if they sum to zero
        senders = reached.nonzero().flatten().int()
        weights = table[:, senders]
        if self.edges is not None:
            weights = self.edges.write(weights)
        self.rows.append((rows, senders, weights))

    def _table(self, rows: slice, sent: Sequence[Tensor]) -> Tensor:
        """Return the inputs of some rows from all nodes of the graph."""
        table = self.received.new_zeros(rows.stop - rows.start, len(self.nodes))
        parts = zip(self.run.sources, self.kept, self.columns, sent, strict=False)
        for source, which, column, part in parts:
            counts = source.kind != "constant"
            table[:, column] = part[:, which].to(table)
            if counts:
                self.received[rows] += part.abs().sum(1).to(self.received)
            if self.dropped:
                rest = part.index_fill(1, which, 0).sum(1).to(table)
                table[:, self.biases + counts] += rest
        return table
