"""Attribution graphs: who sends how much to whom in a local replacement model.

What comes in: a bridge, a prompt, and hook points in a basis. What goes out: an `AttributionGraph` of features, errors,
tokens and logits; the `ScoreTerms` of one attention score; or the `HeadLoadings` of what a node receives.

The mechanism, in order:

1. `attribution_graph` holds patterns and norm factors (`bridge.linearised`), and refuses a model that still bends.
2. `_ReplacementRun` runs the model once. What a basis explains becomes its features and what they leave unexplained.
   Each of these stands in the run as a leaf of autograd's graph: a `_Source`.
3. A row, what one receiver gets from every node, is its gradient at the leaves, times what stands there (`_rows`); of
   features in the prompt's first parts in a run of these parts alone (`_rows_of`).
4. With a limit, `_most_influential` goes from the logits backwards and computes the rows of those features alone that
   are among the most influential so far. `_among` then makes the graph of the nodes that are kept.
5. `score_terms` takes the rows of one query and one key, whose product is the score.
6. `head_loadings` cuts a second run at every head. There a receiver's gradient is what it takes from a head past no
   other one; the rows of that product in the first run are what reaches the receiver through the head last.

It knows nothing of what bases are made of, and asks for a picture when one is drawn.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from adapters.sealed import read_file, sealed
from adapters.views.basis import InBasis, dense
from bridge.analysis.analysis import refuse_no_stream, refuse_training
from bridge.bases.bases import takes_over, written_later
from bridge.bridge import TransformerBridge
from bridge.circuits.graph import refuse_inference_mode, token_mask
from bridge.hooks.arguments import check_positive, refuse_wrong_types
from bridge.hooks.hooks import HookPoint
from bridge.hooks.modules import close
from bridge.patching.patching import texts_of
from bridge.run.inputs import Prompts, prompts_with

#: What begins the residual stream: all of it, or what is added up.
_WHOLE_BEGINNING, _BEGINNINGS = "hook_full_embed", ("hook_embed", "hook_pos_embed")
#: What bases may stand on: the stream, what is added to it, and what a part's last matrix makes that of.
_LINEAR_BEHIND = (
    ".hook_resid_pre", ".hook_resid_mid", ".hook_resid_post", ".hook_attn_out", ".hook_mlp_out", ".attn.hook_z",
    ".mlp.hook_post",
)  # fmt: skip


#: Some receivers in turn, the nodes that send them something, and how much, ``[receiver, sender]``.
_Rows = tuple[slice, Int[Tensor, " sender"], Float[Tensor, "receiver sender"]]
Kind = Literal["feature", "error", "token", "constant", "dropped", "logit"]


@dataclass(frozen=True)
class Node:
    """A feature, an error, a token or a logit in an attribution graph.

    Attributes:
        kind: ``feature``; ``error``, what no basis explains of what stands at `point`; ``token``, what begins the
            stream; ``constant``, what decoders write at `point` where no feature is active, or at the point ``biases``
            all that no other node sends; ``dropped``, all nodes together that a limit left out; ``logit``, less the
            mean of all logits.
        point: the hook point that it stands on.
        pos: its position.
        index: the feature, or the token of a logit; 0 for other nodes.
        head: of features of each head, whose.
    """

    kind: Kind
    point: str
    pos: int
    index: int = 0
    head: int | None = None

    def __str__(self) -> str:
        place = self.point.removeprefix("blocks.").replace(".hook_", ".")
        of_head = "" if self.head is None else f".{self.head}"
        which = {"feature": f".{self.index}", "logit": f".{self.index}", "constant": ".constant"}.get(self.kind, "")
        return f"{place}[{self.pos}]{of_head}{which}"


@dataclass(frozen=True, repr=False)
class AttributionGraph:
    """What every node sends directly to every other one, in one run.

    Attributes:
        nodes: features, then errors, tokens, constants, what a limit dropped, and logits.
        rows: what `adjacency` has but zeros: for some receivers that follow each other, which ones; which nodes send
            any of them something; and how much, ``[receiver, sender]``. All others receive nothing.
        values: ``[node]``: features and logits as they are in the run; of errors, tokens and constants the length of
            the vector, and 0 for ``biases`` and ``dropped``, which are none.
        probabilities: of the logits' tokens.
        received: ``[node]``: of features and logits the sizes of all that they get, added up, constants aside and
            dropped nodes one by one; otherwise 0. Influence is counted in shares of it.
    """

    nodes: tuple[Node, ...]
    rows: tuple[_Rows, ...]
    values: Float[Tensor, " node"]
    probabilities: Float[Tensor, " logit"]
    received: Float[Tensor, " node"]

    @cached_property
    def _at(self) -> dict[Node, int]:
        return {node: at for at, node in enumerate(self.nodes)}

    def __repr__(self) -> str:
        kinds = [node.kind for node in self.nodes]
        counted = ", ".join(
            "what was dropped" if kind == "dropped" else f"{kinds.count(kind)} {kind}s" for kind in dict.fromkeys(kinds)
        )
        return f"AttributionGraph({counted})"

    @property
    def adjacency(self) -> Float[Tensor, "node node"]:
        """How much of a node's value comes straight from another one, past no other node: ``[receiver, sender]``.

        The row of a feature or a logit adds up to its value; a logit's is less the mean of all. This table is made when
        it is asked for: `rows` has the part of it where edges can be, mostly less than half.
        """
        found = self.values.new_zeros(len(self.nodes), len(self.nodes))
        for receivers, senders, sent in self.rows:
            found[receivers, senders] = sent
        return found

    def __getitem__(self, edge: tuple[Node, Node]) -> float:
        """What one node sends to another: ``graph[sender, receiver]``."""
        sender, receiver = (self._at[node] for node in edge)
        for receivers, senders, sent in self.rows:
            if receivers.start <= receiver < receivers.stop:
                return float(sent[receiver - receivers.start, senders == sender].sum())
        return 0.0

    def _of(self, *kinds: Kind) -> list[int]:
        return [i for i, node in enumerate(self.nodes) if node.kind in kinds]

    def _shares(self) -> Iterator[_Rows]:
        """Each edge's share of the sizes of all that its receiver gets, constants aside: they explain nothing."""
        aside, dropped = self.values.new_zeros(2, len(self.nodes), dtype=torch.bool)
        aside[self._of("constant", "dropped")] = dropped[self._of("dropped")] = True
        for receivers, senders, sent in self.rows:
            sizes, whole = sent.abs() * ~aside[senders], self.received[receivers, None]
            rest = (whole - sizes.sum(1, keepdim=True)).clamp(min=0)  # one by one they are larger than their sum
            yield receivers, senders, sizes.where(~dropped[senders], rest) / whole.clamp(min=1e-10)

    def influence(self) -> Float[Tensor, " node"]:
        """How much of the logits goes through each node, directly or not.

        Edges are taken as shares of the sizes of all that a node receives, and followed to the logits, which count by
        their probabilities (Ameisen et al. 2025, "Circuit Tracing"). What ``dropped`` has is what a limit lost: the
        ways to the logits that begin at a node that was left out.

        Example:
            See `attribution_graph`.
        """
        weights = self.received.new_zeros(len(self.nodes), dtype=torch.float64)
        weights[self._of("logit")] = self.probabilities.double()
        whole = torch.zeros_like(weights)
        while weights.any():  # edges go forward alone, so every way ends
            before, weights = weights, torch.zeros_like(whole)
            for receivers, senders, shares in self._shares():
                weights[senders] += before[receivers] @ shares.double()
            whole += weights
        return whole.to(self.values.dtype)

    def largest(self, n: int) -> list[tuple[str, str, float]]:
        """The edges with the most influence, as `bridge.pictures.circuit` takes them; none is of what was dropped.

        Args:
            n: how many.

        Raises:
            ValueError: no edge is asked for.
        """
        return [(str(self.nodes[j]), str(self.nodes[i]), sent) for i, j, sent in self._largest(n)]

    def _largest(self, n: int) -> list[tuple[int, int, float]]:
        """Receivers and senders of the edges with the most influence, and how much they send."""
        check_positive("n", n)
        weights = self.influence()
        weights[self._of("logit")] = self.probabilities
        found: list[tuple[float, tuple[int, int, float]]] = []
        for (receivers, senders, shares), (*_, sent) in zip(self._shares(), self.rows, strict=True):
            here = shares * weights[receivers, None] * ~torch.isin(senders, senders.new_tensor(self._of("dropped")))
            largest = here.flatten().topk(min(n, int(here.count_nonzero())))
            i, j = largest.indices // len(senders), largest.indices % len(senders)
            found += zip(largest.values.tolist(), _edges(receivers, senders, sent, i, j), strict=True)
        found.sort(key=lambda edge: -edge[0])
        return [edge for _, edge in found[:n]]

    @refuse_wrong_types
    def draw(self, n: int, bridge: TransformerBridge, tokens: Int[Tensor, "1 pos"], **options: Any) -> Any:
        """A picture of the edges with the most influence, by `bridge.pictures.circuit`: layers across, tokens down.

        Args:
            n: how many edges.
            bridge: the bridge, which knows the text of its tokens.
            tokens: the prompt of the graph, ``[1, pos]``.
            options: as `bridge.pictures.circuit` takes them.

        Raises:
            ImportError: what pictures need is not installed.
            ValueError: no edge is asked for; a prompt of another length.

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
                nodes[str(node)] = pictures.CircuitNode(column=column, label=label, position=node.pos)
        given = {"nodes": nodes, "tokens": bridge.to_str_tokens(tokens[0]), "measure": "contribution"}
        return pictures.circuit(edges, **(given | {"title": "Attribution graph"} | options))

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
        """Writes the graph as JSON that the interfaces of Neuronpedia and circuit-tracer read.

        Constants and what was dropped, which these do not know, are in a part of the file that they pass over.

        Args:
            path: the file.
            bridge: the bridge, which knows the text of its tokens.
            tokens: the prompt of the graph, ``[1, pos]``.
            n: how many edges, those with the most influence; None: all. What is cut counts as dropped when it is read.
            name: by which the interfaces list it (``slug``).
            scan: the features' name there, such as ``"gemma-2-2b"``.

        Raises:
            ValueError: a prompt of another length; no edge is asked for.

        Example:
            See `AttributionGraph.load`.
        """
        self._refuse_another_length(tokens)
        words = texts_of(bridge, tokens[0])
        influence = self.influence()
        first = influence.sort(descending=True)
        up_to = torch.zeros_like(influence).scatter(0, first.indices, first.values.cumsum(0) / influence.sum())
        ids = [_identity(node, bridge.cfg.n_layers, tokens) for node in self.nodes]
        weights = dict(zip(self._of("logit"), self.probabilities.tolist(), strict=True))
        said = [
            _as_interfaces_have_it(node, ids[i], tokens, bridge)
            | {"influence": float(up_to[i]), "activation": float(self.values[i]), "token_prob": weights.get(i, 0.0)}
            for i, node in enumerate(self.nodes)
        ]
        every = chain.from_iterable(_edges(*some, *some[2].nonzero(as_tuple=True)) for some in self.rows)
        edges = every if n is None else self._largest(n)
        links = [{"source": ids[j], "target": ids[i], "weight": sent} for i, j, sent in edges]
        unknown = {ids[i] for i in self._of("constant", "dropped")}
        own = {
            "version": 1,
            "nodes": [[ids[i], *astuple(node)] for i, node in enumerate(self.nodes)],
            "values": self.values.tolist(),
            "received": self.received.tolist(),
            "links": [link for link in links if link["source"] in unknown],
        }
        metadata = {
            "slug": name, "scan": scan, "transcoder_list": [], "prompt_tokens": words, "prompt": "".join(words),
            "node_threshold": None, "schema_version": 1,
        }  # fmt: skip
        pinned = {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""}
        content = {
            "metadata": metadata,
            "qParams": pinned,
            "nodes": [node for node in said if node["node_id"] not in unknown],
            "links": [link for link in links if link["source"] not in unknown],
            _OWN: own,
        }
        Path(path).write_text(sealed(content, allow_nan=False), encoding="utf-8")

    @classmethod
    @refuse_wrong_types
    def load(cls, path: str | Path) -> AttributionGraph:
        """Reads what `save` wrote, or a graph that circuit-tracer wrote.

        circuit-tracer's file has no constants, so its rows do not add up to values, and edges alone that it kept. Its
        features are called those of a basis ``transcoder`` on the MLPs' outputs.

        Args:
            path: the file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is no graph, or damaged, or of another version.

        Example:
            >>> import tempfile, pathlib, torch
            >>> from bridge import TransformerBridge
            >>> from bridge.features import AttributionGraph, attribution_graph
            >>> bridge, path = TransformerBridge.boot_embedded(), pathlib.Path(tempfile.mkdtemp()) / "graph.json"
            >>> tokens, W = bridge.to_tokens("Mary and John"), torch.eye(128)[:, :4]
            >>> basis = {"encode": lambda x: (x @ W).relu(), "decode": lambda f: f @ W.T}
            >>> point = bridge.add_basis("blocks.1.hook_resid_pre", "few", **basis)
            >>> graph = attribution_graph(bridge, tokens, [point.name])
            >>> graph.save(path, bridge, tokens)
            >>> torch.equal(AttributionGraph.load(path).adjacency, graph.adjacency)
            True
        """
        return read_file(path, "attribution graph", cls._of_file)

    @classmethod
    def _of_file(cls, content: dict[str, Any]) -> AttributionGraph:
        own = content.get(_OWN)
        if own is not None and own["version"] != 1:
            raise ValueError(f"it is of version {own['version']}; this package reads version 1")
        said = {node["node_id"]: node for node in content["nodes"]}
        nodes = {at: Node(*of) for at, *of in own["nodes"]} if own else {at: _read(node) for at, node in said.items()}
        at = {name: i for i, name in enumerate(nodes)}
        lost = [i for i, node in enumerate(nodes.values()) if node.kind == "dropped"]
        edges = [dict.fromkeys(lost, 0.0) for _ in nodes]  # what is lost is shared, also where its sum is nothing
        for link in [*content["links"], *(own["links"] if own else ())]:
            edges[at[link["target"]]][at[link["source"]]] = link["weight"]
        rows = tuple(
            (slice(i, i + 1), torch.tensor([*sent]).int(), torch.tensor([[*sent.values()]]))
            for i, sent in enumerate(edges)
            if sent
        )
        values = own["values"] if own else [said[name]["activation"] or 0.0 for name in nodes]
        received = torch.tensor(own["received"] if own else [sum(map(abs, sent.values()), 0.0) for sent in edges])
        ends = [said[name]["token_prob"] for name, node in nodes.items() if node.kind == "logit"]
        if not len(values) == len(received) == len(nodes):
            raise ValueError(f"it has {len(nodes)} nodes, {len(values)} values and {len(received)} sums")
        return cls(tuple(nodes.values()), rows, torch.tensor(values), torch.tensor(ends), received)

    def _refuse_another_length(self, tokens: Tensor) -> None:
        if tokens.shape[1] != self.nodes[-1].pos + 1:
            raise ValueError(f"tokens has {tokens.shape[1]} positions; the graph is of {self.nodes[-1].pos + 1}")


def _edges(receivers: slice, senders: Tensor, sent: Tensor, i: Tensor, j: Tensor) -> list[tuple[int, int, float]]:
    """Of some rows of a graph the entries at some places: receivers and senders, and how much is sent."""
    columns = (receivers.start + i).tolist(), senders[j].tolist(), sent[i, j].tolist()
    return [*zip(*columns, strict=True)]


#: The part of a graph's file that other programs do not know.
_OWN = "transformer_bridge"
#: What others call the kinds of nodes.
_KINDS: dict[Kind, str] = {
    "feature": "cross layer transcoder", "error": "mlp reconstruction error", "token": "embedding", "logit": "logit",
}  # fmt: skip


def _identity(node: Node, n_layers: int, tokens: Tensor) -> str:
    """A name of a node for interfaces: that of circuit-tracer for features of MLPs, tokens and logits."""
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


def _as_interfaces_have_it(node: Node, name: str, tokens: Tensor, bridge: TransformerBridge) -> dict[str, Any]:
    """A node by the fields that Neuronpedia and circuit-tracer read."""
    layer, feature, words = "E", node.pos, ""
    if node.kind == "logit":
        layer, feature = str(bridge.cfg.n_layers + 1), node.index
        words = f'Output "{texts_of(bridge, torch.tensor([node.index]))[0]}"'
    elif node.kind in ("feature", "error"):
        layer = node.point.split(".")[1]
        pair = int(layer) + node.index
        feature = pair * (pair + 1) // 2 + node.index if node.kind == "feature" else -1  # Cantor's number of the pair
    return {
        "node_id": name, "jsNodeId": name, "feature": feature, "layer": layer, "ctx_idx": node.pos, "clerp": words,
        "feature_type": _KINDS.get(node.kind, node.kind), "is_target_logit": node.kind == "logit", "run_idx": 0,
        "reverse_ctx_idx": 0,
    }  # fmt: skip


def _read(said: dict[str, Any]) -> Node:
    """A node of circuit-tracer's."""
    kind = next((kind for kind, name in _KINDS.items() if name == said["feature_type"]), None)
    if kind is None:
        raise ValueError(f"a node is of type {said['feature_type']!r}; known are {', '.join(_KINDS.values())}")
    index = int(said["node_id"].split("_")[1]) if kind in ("feature", "logit") else 0
    within = f"blocks.{said['layer']}.hook_mlp_out"
    points = {"feature": f"{within}.transcoder", "error": within, "token": "hook_embed", "logit": "logits"}
    return Node(kind, points[kind], int(said["ctx_idx"]), index)


def _column(node: Node, n_layers: int) -> tuple[int, str]:
    """Where a node stands from left to right, and what is written on it."""
    if node.kind == "token":
        return 0, ""
    if node.kind == "logit":
        return 3 * n_layers + 1, ""
    _, layer, point = node.point.split(".", 2)
    part = 1 if "attn" in point or "resid_pre" in point else 2 if "mlp" in point or "resid_mid" in point else 3
    return 3 * int(layer) + part, f"L{layer} error" if node.kind == "error" else f"L{layer} #{node.index}"


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
    **model_kwargs: Any,
) -> AttributionGraph:
    """What features, errors, tokens and logits send each other, in the local replacement model of a prompt.

    In that model attention patterns and norm factors are held at their values in this run, the layers that bases
    explain are replaced by their features and what they leave unexplained, and other MLPs are all error. So everything
    between two features is linear, and what a feature gets from its senders adds up to its value. What does not depend
    on any of them has nodes, too: what each decoder writes where no feature is active, and ``biases``: those of the
    encoder and of the model, and what is written at positions that are left out. Influence passes these over (Ameisen
    et al. 2025, "Circuit Tracing: Revealing Computational Graphs in Language Models"; the graph is that of
    circuit-tracer, which has no such nodes). The encoders' own derivative is taken where the features are, so for ReLU,
    JumpReLU and top-k it is their weights. Where an encoder attends to other positions, its softmax over them is held,
    as the model's patterns are.

    Features that are read inside an MLP or behind it (`mlp.hook_post`, and `hook_mlp_out` without `reads=`) get the
    MLP's derivative in this run: what enters such a feature is what a small change does, and does not add up. What it
    sends is exact. Such a feature gets nothing from ``biases`` but constants that a limit left out.

    Where there are more nodes than `limit`, those with the most influence are kept, found from the logits backwards: a
    feature's senders are looked at once it is among the most influential itself. Edges between kept nodes are those of
    the whole graph; what a node gets from all others comes from the one node ``dropped``, whose influence is what was
    lost. Memory grows with the kept nodes, not with the features that are active.

    Args:
        bridge: the bridge, in evaluation mode.
        tokens: one prompt, ``[1, pos]``, or what a processor gives.
        points: hook points in a basis, as `add_basis` returned them or by name: transcoders, or SAEs on the stream, on
            what is added to it, on `attn.hook_z` or on `mlp.hook_post`.
        logits: the tokens whose logits, at the last position, are nodes; or how many of the likeliest.
        without_positions: positions at which features and errors are no nodes (the first, as a rule, where features
            mean little). They still do what they did in the run.
        limit: how many features, errors and tokens are nodes; None: all.
        together: how many rows are computed at once, or fewer where their gradients would take over 1 GiB.
        file: where the adjacency stands, rows being written as they are computed: its memory is the system's to take
            back. Its room on the disk is taken before the first row is computed. A file of that name is replaced, and
            `AttributionGraph.save` writes what can be read again. None: in memory.
        model_kwargs: what else the model takes with it, such as ``pixel_values=``.

    Returns:
        The graph.

    Raises:
        ValueError: a point that is in no basis, or in one of something else inside a part; one that attends to other
            positions by a function that gives no pattern; training mode; no node or no row asked for; a model with an
            encoder and a decoder, or that is not linear where patterns, factors and MLPs are held (a state space, a
            gate, an activation function before the logits); padding; nothing to attribute.
        RuntimeError: in inference mode, which makes no gradients.
        OSError: there is no room for the file.

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
        ...     points.append(bridge.add_basis(write, "tc", encode=encode, decode=decode, reads=read).name)
        >>> graph = attribution_graph(bridge, bridge.to_tokens("Mary and John"), points, logits=1)
        >>> {node.kind for node in graph.nodes} == {"feature", "error", "token", "constant", "logit"}
        True
        >>> graph.influence().shape == (len(graph.nodes),)
        True
        >>> graph.draw(6, bridge, bridge.to_tokens("Mary and John"))
        Picture('Attribution graph')
    """
    if limit is not None:
        check_positive("limit", limit)
    bases, prompt, kept = _asked(bridge, tokens, points, without_positions, together, model_kwargs)
    _check_logits(logits, bridge.cfg.d_vocab)
    if file is not None and not Path(file).parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
    with torch.no_grad():
        plain = bridge(prompt)[0, -1].float()
    shares = plain.softmax(-1)
    chosen = shares.topk(logits).indices if isinstance(logits, int) else logits.to(shares.device)
    with bridge.linearised(prompt), torch.enable_grad():
        _refuse_what_is_not_linear(bridge, prompt)
        run = _ReplacementRun(bridge, prompt, bases, kept, chosen, shares[chosen], together)
    with torch.enable_grad():  # what was held is in the run
        return run.graph(limit, file)


@dataclass(frozen=True, repr=False)
class ScoreTerms:
    """One attention score as a sum over pairs of nodes: one's part of the query, times the other's of the key.

    Attributes:
        queries, keys: the nodes.
        query_parts, key_parts: ``[node, d_head]``: what each contributes to the head's query and key, behind norms and
            rotation, the scale of scores in the queries.
        position: what is added to the product of query and key (ALiBi, relative positions); 0 for other models.
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
        """The term of each pair. With `position` they add up to the score."""
        return self.query_parts @ self.key_parts.T

    @property
    def score(self) -> float:
        """The score, before a soft cap and the mask."""
        return float(self.query_parts.sum(0) @ self.key_parts.sum(0)) + self.position

    def largest(self, n: int) -> list[tuple[Node, Node, float]]:
        """The terms of the largest size: the node of the query, that of the key, the term.

        Args:
            n: how many.

        Raises:
            ValueError: no term is asked for.
        """
        check_positive("n", n)
        found: list[tuple[Node, Node, float]] = []
        for first in range(0, len(self.queries), _ROWS):  # a table of all pairs may be too large
            terms = _largest(self.query_parts[first : first + _ROWS] @ self.key_parts.T, n)
            found += [(self.queries[first + i], self.keys[j], term) for i, j, term in terms]
        found.sort(key=lambda term: -abs(term[2]))
        return found[:n]


def _largest(table: Float[Tensor, "row column"], n: int) -> list[tuple[int, int, float]]:
    """The entries of the largest size: row, column, entry."""
    found = table.abs().flatten().topk(min(n, table.numel())).indices.tolist()
    return [(i, j, float(table[i, j])) for i, j in (divmod(at, table.shape[1]) for at in found)]


#: Positions that are said to the model by numbers that are added to scores.
_ADD_TO_SCORES = ("alibi", "relative_positional_bias")
#: How many rows of a table of pairs are looked at together.
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
    """Why a head attends from one position to another: its score, taken apart into pairs of features.

    In the replacement model of `attribution_graph`, patterns and norm factors held, queries and keys are sums of what
    features, errors, tokens and constants contribute, so a score is a sum over pairs of them, exactly (Kamath et al.
    2025, "Tracing Attention Computation Through Feature Interactions"). Rotation and norms of queries and keys are in
    it.

    Args:
        bridge: the bridge, in evaluation mode.
        tokens: one prompt, ``[1, pos]``, or what a processor gives.
        points: hook points in a basis, as for `attribution_graph`.
        layer, head: which head.
        query, key: the positions that are attended from and to.
        without_positions, together, model_kwargs: as for `attribution_graph`.

    Raises:
        ValueError: as `attribution_graph`; a layer, head or position that is not there; a key behind the query; a head
            whose queries and keys are no hook points; scores that are not their product.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.features import score_terms
        >>> bridge, W = TransformerBridge.boot_embedded(), torch.eye(128)[:, :6]
        >>> basis = {"encode": lambda x: (x @ W).relu(), "decode": lambda f: f @ W.T}
        >>> point = bridge.add_basis("blocks.1.hook_mlp_out", "tc", **basis, reads="blocks.1.hook_resid_mid")
        >>> tokens = bridge.to_tokens("Mary and John")
        >>> terms = score_terms(bridge, tokens, [point.name], layer=3, head=1, query=3, key=1)
        >>> _, cache = bridge.run_with_cache(tokens, names_filter="blocks.3.attn.hook_attn_scores")
        >>> abs(terms.score - float(cache["scores", 3][0, 1, 3, 1])) < 1e-4
        True
        >>> abs(float(terms.values.sum()) + terms.position - terms.score) < 1e-4
        True
    """
    bases, prompt, kept = _asked(bridge, tokens, points, without_positions, together, model_kwargs)
    *made, name = _query_key_and_scores(bridge, layer)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(prompt, names_filter=name)
    scores = cache[name]
    for what, index, size in (
        ("head", head, scores.shape[1]),
        ("query", query, scores.shape[2]),
        ("key", key, scores.shape[3]),
    ):
        if not 0 <= index < size:
            raise ValueError(f"{what} is {index}; there are {size}, counted from 0")
    score = _uncapped(bridge.cfg.attn_scores_soft_cap, scores[0, head, query, key].float())
    if not torch.isfinite(score):
        raise ValueError(f"position {query} does not attend to position {key}: there is no score")
    with bridge.linearised(prompt), torch.enable_grad():
        _refuse_what_is_not_linear(bridge, prompt, made)
        none = torch.zeros(0, dtype=torch.long, device=score.device)
        run = _ReplacementRun(bridge, prompt, bases, kept, none, score.new_zeros(0), together, made)
        vectors = run.read[made[0]][0, query, head], run.read[made[1]][0, key]
        keys = vectors[1][head * len(vectors[1]) // scores.shape[1]]
        (queries, query_parts), (others, key_parts) = run.parts(vectors[0]), run.parts(keys)
    part, cfg = bridge.architecture.stack.block_at(layer).attn, bridge.cfg
    if cfg.use_attn_scale and part is not None:
        query_parts = query_parts / (part.own("attn_scale", cfg.attn_scale) or 1.0)
    product = float(query_parts.sum(0) @ key_parts.sum(0))
    position = float(score) - product
    if cfg.positional_embedding_type not in _ADD_TO_SCORES:
        if abs(position) > max(1e-3, torch.finfo(scores.dtype).eps) * max(
            1.0, float(query_parts.norm() * key_parts.norm())
        ):
            raise ValueError(
                f"the score is {float(score):.4g}, and the product of query and key "
                f"{product:.4g}: a term for each pair would be of something else"
            )
        position = 0.0
    return ScoreTerms(queries, others, query_parts, key_parts, position)


@dataclass(frozen=True, repr=False)
class HeadLoadings:
    """Through which attention heads a node receives what it gets from every other one.

    Attributes:
        receiver: the node.
        nodes: those that send it something, ``biases`` last: all that does not come from the others.
        heads: layer and head of each head that it may receive something through.
        direct: ``[node]``: what comes through no head.
        values: ``[node, head]``: what comes through each head last, past no head behind it. With `direct` they add up
            to the edge.
    """

    receiver: Node
    nodes: tuple[Node, ...]
    heads: tuple[tuple[int, int], ...]
    direct: Float[Tensor, " node"]
    values: Float[Tensor, "node head"]

    def __repr__(self) -> str:
        return f"HeadLoadings({self.receiver}, {len(self.nodes)} nodes through {len(self.heads)} heads)"

    def __getitem__(self, sender: Node) -> dict[tuple[int, int], float]:
        """What one node sends through each head."""
        if sender not in self.nodes:
            raise ValueError(f"{sender} sends nothing to {self.receiver}")
        return dict(zip(self.heads, self.values[self.nodes.index(sender)].tolist(), strict=True))

    @property
    def edges(self) -> Float[Tensor, " node"]:
        """The edge from each node: what is sent through all heads, and through none."""
        return self.values.sum(1) + self.direct

    def largest(self, n: int) -> list[tuple[Node, tuple[int, int], float]]:
        """The loadings of the largest size: sender, layer and head, how much.

        Args:
            n: how many.

        Raises:
            ValueError: no loading is asked for.
        """
        check_positive("n", n)
        return [(self.nodes[i], self.heads[j], loading) for i, j, loading in _largest(self.values, n)]


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
    """How much of each edge into a node comes through each attention head.

    In the replacement model of `attribution_graph`, an edge is a sum over paths, through heads of several layers, or
    through none. A path is counted with its last head, so that the loadings of an edge add up to it (heads' loadings of
    Kamath et al. 2025, "Tracing Attention Computation Through Feature Interactions").

    Args:
        bridge: the bridge, in evaluation mode.
        tokens: one prompt, ``[1, pos]``, or what a processor gives.
        points: hook points in a basis, as for `attribution_graph`.
        receiver: a feature or a logit, such as one of a graph's nodes.
        without_positions, together, model_kwargs: as for `attribution_graph`.

    Raises:
        ValueError: as `attribution_graph`; a node that receives nothing, or is not there in this run; one that is read
            inside an MLP or behind it, so that its edges are slopes; a layer whose heads are no hook points.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.features import attribution_graph, head_loadings
        >>> bridge, W = TransformerBridge.boot_embedded(), torch.eye(128)[:, :6]
        >>> basis = {"encode": lambda x: (x @ W).relu(), "decode": lambda f: f @ W.T}
        >>> point = bridge.add_basis("blocks.1.hook_mlp_out", "tc", **basis, reads="blocks.1.hook_resid_mid")
        >>> tokens = bridge.to_tokens("Mary and John")
        >>> graph = attribution_graph(bridge, tokens, [point.name], logits=1)
        >>> found = head_loadings(bridge, tokens, [point.name], graph.nodes[-1])
        >>> sender, (layer, head), loading = found.largest(1)[0]
        >>> found[sender][layer, head] == loading
        True
        >>> torch.allclose(found.edges, torch.tensor([graph[node, graph.nodes[-1]] for node in found.nodes]), atol=1e-4)
        True
    """
    bases, prompt, kept = _asked(bridge, tokens, points, without_positions, together, model_kwargs)
    names = _outputs_of_heads(bridge)
    logit = kept.nonzero().new_tensor([receiver.index] * (receiver.kind == "logit"))
    if len(logit):
        _check_logits(logit, bridge.cfg.d_vocab)
    with bridge.linearised(prompt), torch.enable_grad():
        _refuse_what_is_not_linear(bridge, prompt)
        none = kept.new_zeros(len(logit), dtype=torch.float)
        of = partial(_ReplacementRun, bridge, prompt, bases, kept, logit, none, together, names)
        run, cut = of(), of(stop=names)
        value, taken = run.value(receiver), cut.value(receiver)
        given = torch.autograd.grad(taken, [cut.cut[name] for name in names], allow_unused=True)
        reached = [(name, part) for name, part in zip(names, given, strict=True) if part is not None]
        through = [(part * run.read[name]).sum((0, 1, 3)) for name, part in reached]
        nodes, parts = run.parts(torch.cat([value[None], *through]))
    heads = [(int(name.split(".")[1]), head) for name, part in reached for head in range(part.shape[2])]
    values = parts[:, 1:]
    return HeadLoadings(receiver, nodes, tuple(heads), parts[:, 0] - values.sum(1), values)


def _outputs_of_heads(bridge: TransformerBridge) -> list[str]:
    """The hook points of what heads put together.

    Raises:
        ValueError: a layer's heads are no hook point.
    """
    found = [
        f"{name.removesuffix('.hook_attn_out')}.attn.hook_z"
        for name in bridge.hook_dict
        if name.endswith(".hook_attn_out")
    ]
    if gone := [name for name in found if name not in bridge.hook_dict]:
        raise ValueError(f"{bridge.cfg.model_name} has no {gone[0]}: what its heads put together is no hook point")
    return found


def _query_key_and_scores(bridge: TransformerBridge, layer: int) -> list[str]:
    """The hook points of a layer's queries and keys as they enter the product, and of the scores.

    Raises:
        ValueError: one is no hook point.
    """
    found, attention = [], f"blocks.{layer}.attn"
    for names in (("rot_q", "q"), ("rot_k", "k"), ("attn_scores",)):
        there = [at for name in names if (at := f"{attention}.hook_{name}") in bridge.hook_dict]
        if not there:
            raise ValueError(
                f"{bridge.cfg.model_name} has no queries, keys and scores in layer {layer} that are hook points"
            )
        found.append(there[0])
    return found


def _asked(
    bridge: TransformerBridge,
    tokens: Any,
    points: Sequence[str],
    without: Sequence[int],
    together: int,
    model_kwargs: Mapping[str, Any],
) -> tuple[list[HookPoint], dict[str, Any], Tensor]:
    """The bases, the prompt, and at which positions features and errors are nodes, of what all graphs are asked for.

    Raises:
        RuntimeError: inference mode.
        ValueError: training mode, several streams, no row, a base that cannot be, several prompts, padding, or a
            position that is not there.
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
        raise ValueError(f"{padding} of {length} tokens are padding, which one prompt needs none of: leave it out")
    if wrong := [pos for pos in without if not -length <= pos < length]:
        raise ValueError(f"without_positions names {wrong[0]}; there are {length} positions")
    kept = torch.ones(length, dtype=torch.bool, device=bridge.cfg.device)
    kept[list(without)] = False
    return bases, prompt, kept


def _check_logits(logits: Tensor | int, d_vocab: int) -> None:
    """Refuses tokens whose logits cannot be nodes.

    Raises:
        ValueError: none, too many, one that is given twice or is not in the vocabulary.
    """
    named = list(range(logits)) if isinstance(logits, int) else logits.tolist()
    if not named or len(set(named)) < len(named) or not 0 <= min(named) <= max(named) < d_vocab:
        said = logits if isinstance(logits, int) else named
        raise ValueError(f"logits is {said}; give how many, or different tokens from 0 to {d_vocab - 1}")


def _checked_bases(bridge: TransformerBridge, points: Sequence[str]) -> list[HookPoint]:
    """The hook points of the features.

    Raises:
        ValueError: there are none, or of some what they send is not linear or not known.
    """
    hooks = [bridge.select_hooks(point)[0] for point in points]
    bases = [hook for hook in hooks if isinstance(hook.view, InBasis)]
    if not hooks or len(bases) < len(hooks):
        named = ", ".join(hook.name for hook in hooks if hook not in bases) or "none"
        raise ValueError(f"points are hook points that add_basis placed; these are not: {named}")
    on = [hook.name.rpartition(".")[0] for hook in bases]
    if inside := [name for name in on if not name.endswith(_LINEAR_BEHIND)]:
        raise ValueError(
            f"{', '.join(inside)} is inside a part, so what is behind it is not linear in its features: place bases on "
            "the stream, on what attention or an MLP adds to it, on attn.hook_z or on mlp.hook_post"
        )
    if twice := sorted({name for name in on if on.count(name) > 1}):
        raise ValueError(f"several bases stand on {', '.join(twice)}: a part is replaced by one of them")
    if gone := sorted(hook.name for hook in bases if takes_over(hook)):
        raise ValueError(f"{', '.join(gone)} takes over features of an earlier layer: name the one of that layer")
    return bases


def _beginnings(bridge: TransformerBridge) -> list[str]:
    """The hook points at which the residual stream begins.

    Raises:
        ValueError: there is none.
    """
    if _WHOLE_BEGINNING in bridge.hook_dict:
        return [_WHOLE_BEGINNING]
    found = [name for name in _BEGINNINGS if name in bridge.hook_dict]
    if not found:
        raise ValueError(f"{bridge.cfg.model_name} has no {_BEGINNINGS[0]}: a graph begins where its stream does")
    return found


def _uncapped(cap: float, x: Tensor) -> Tensor:
    """What entered a soft cap, which is linear."""
    return cap * (x / cap).atanh() if cap > 0 else x


@torch.no_grad()
def _refuse_what_is_not_linear(bridge: TransformerBridge, prompt: dict[str, Any], names: Sequence[str] = ()) -> None:
    """Refuses a model whose stream, patterns and factors held, bends where what begins it is once, twice, three times.

    Raises:
        ValueError: it does; the message says where.
    """
    streams = [name for name in bridge.hook_dict if name.endswith((".hook_resid_mid", ".hook_resid_post"))]
    streams += names
    found: list[dict[str, Tensor]] = []
    with bridge.linearised(prompt, freeze=("mlp_out",)):
        for times in (1, 2, 3):
            larger = [(name, lambda act, hook, times=times: act * times) for name in _beginnings(bridge)]
            with bridge.hooks(fwd_hooks=larger):
                logits, cache = bridge.run_with_cache(prompt, names_filter=streams)
            ends = _uncapped(bridge.cfg.output_logits_soft_cap, logits.float())
            found.append({**cache, "the logits": ends})
    least = torch.finfo(logits.dtype).eps  # also of what was computed in half precision and is single here
    for name in found[0]:
        one, two, three = (run[name].double() for run in found)
        rounding = min(1000 * max(least, torch.finfo(found[0][name].dtype).eps), 0.05) * float(three.abs().max())
        if float((one - 2 * two + three).abs().max()) > rounding:
            raise ValueError(
                f"{bridge.cfg.model_name} is not linear between the embedding and {name} where patterns, norm factors "
                "and MLPs are held (a state space, a gate, an activation function before the logits, a basis with "
                'error="drop"): its graph would not add up'
            )


@dataclass(frozen=True, eq=False)
class _Source:
    """What sends: a tensor that the run's later parts are functions of, and its entries that are nodes.

    Attributes:
        kind, point: of the nodes.
        leaf: the tensor, ``[1, pos, ...]``.
        entries: for each node its indices: of a feature position, head if there are any, and feature; else a position.
        target: of features: what the leaf is a copy of, with its graph.
    """

    kind: Kind
    point: str
    leaf: Tensor
    entries: Int[Tensor, "node axis"]
    target: Tensor | None = None

    def nodes(self, which: Tensor) -> list[Node]:
        """Some of the nodes, by index."""
        found = self.entries[which].tolist()
        if self.kind != "feature":
            return [Node(self.kind, self.point, pos) for (pos,) in found]
        return [Node("feature", self.point, at[0], at[-1], *at[1:-1]) for at in found]

    def begins(self, whole: _Source, length: int) -> bool:
        """Whether this is the beginning of another one, of its first positions.

        Args:
            whole: the other one.
            length: how many positions.
        """
        first, rest = whole.entries.tensor_split([len(self.entries)])
        if (self.kind, self.point) != (whole.kind, whole.point) or not torch.equal(self.entries, first):
            return False
        return bool((rest[:, 0] >= length).all()) and close(self.leaf, whole.leaf[:, :length])

    def at(self, tensor: Tensor, which: Tensor) -> Tensor:
        """The entries of some of the nodes, of a tensor like the leaf."""
        return tensor[0][self.entries[which].unbind(1)]

    def sizes(self, which: Tensor) -> Float[Tensor, " node"]:
        """The values of features; of other nodes the lengths of their vectors."""
        stands = self.at(self.leaf.detach(), which)
        return stands if self.kind == "feature" else stands.flatten(1).norm(dim=-1)

    def sent(self, gradient: Tensor | None, rows: int) -> Float[Tensor, "row node"]:
        """What the nodes send to each of the receivers whose gradients these are."""
        if gradient is None:
            return self.leaf.new_zeros(rows, len(self.entries))
        where: tuple[slice | Tensor, ...] = (slice(None), *self.entries.unbind(1))
        found = (gradient[:, 0] * self.leaf.detach()[0])[where]
        return found if found.ndim == 2 else found.flatten(2).sum(-1)


@dataclass(frozen=True, eq=False)
class _Receivers:
    """Features of one source, or logits.

    Attributes:
        before: how many sources were made before them.
        which: the receivers, by index.
        of: the values of some of them, with their graph.
        linear: whether they are linear in what is sent: no MLP's inside is between.
    """

    before: int
    which: Int[Tensor, " receiver"]
    of: Callable[[Tensor], Tensor]
    linear: bool


#: What makes a pattern of scores, and what does that and more in one.
_SOFTMAX = (torch.softmax, Tensor.softmax, functional.softmax, torch.special.softmax)
_LOG_SOFTMAX = (torch.log_softmax, Tensor.log_softmax, functional.log_softmax, torch.special.log_softmax)
_WHOLE_ATTENTION = (functional.scaled_dot_product_attention, functional.multi_head_attention_forward)


class _PatternsHeld(TorchFunctionMode):
    """Holds what a basis attends to while it encodes: nothing flows through a softmax over positions.

    A pattern that is made otherwise (by exponentials, of sigmoids, with a column for a sink) is not known as one.

    Args:
        name: of the point in the basis.
        length: how many positions there are.
    """

    def __init__(self, name: str, length: int) -> None:
        super().__init__()
        self.name, self.length = name, length
        self._has_no_heads = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WHOLE_ATTENTION:
            raise ValueError(
                f"encode of {self.name} attends by {func.__name__}, whose pattern cannot be held: write it as "
                "scores.softmax(-1) @ values"
            )
        found = func(*args, **(kwargs or {}))
        if func not in (*_SOFTMAX, *_LOG_SOFTMAX) or list(found.shape[-2:]) != [self.length] * 2:
            return found
        if func in _LOG_SOFTMAX:
            raise ValueError(
                f"encode of {self.name} takes logarithms of a pattern, which cannot be held: write it as "
                "scores.softmax(-1) @ values"
            )
        self._has_no_heads |= found.ndim == 3
        return found.detach()

    def check(self, found: Tensor) -> None:
        """Refuses features among which a softmax may have been, since it would look like a pattern.

        Raises:
            ValueError: there are as many features as positions.
        """
        if self._has_no_heads and found.shape[-1] == self.length:
            raise ValueError(
                f"{self.name} has as many features as the prompt has tokens, {self.length}: a softmax over features "
                "cannot be told from one over positions. Take a prompt of another length"
            )


def _take_room(file: str | Path, n: int) -> None:
    """Makes a file of zeros for the edges between some nodes, of which each gets something from earlier ones alone.

    It is filled here, since a disk that is found to be full when memory is written back would end the process.

    Args:
        file: its name. What stood there is replaced; an earlier graph may still use it.
        n: how many nodes.

    Raises:
        OSError: there is no room, or no such folder.
    """
    path, size, zeros = Path(file), 4 * (n * (n - 1) // 2), bytes(2**20)
    left = size
    path.unlink(missing_ok=True)
    try:
        with path.open("wb", buffering=0) as made:
            while left:
                left -= made.write(zeros[:left])
            os.fsync(made.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        said = f"{error.strerror}: the edges between {n} nodes take up to {size} bytes"
        raise OSError(error.errno, said, str(file)) from error


#: Into how many parts a prompt is cut whose features' rows are computed without what is behind them.
_PREFIXES = 4
#: How many rows of the whole prompt a run of a part must spare.
_WORTHWHILE = 8
#: In which order the nodes of a graph stand.
_ORDER = ("feature", "error", "token", "constant")
#: How much memory the gradients of the rows that are computed at once may take.
_BYTES = 2**30
#: How many entries of a row are followed where nodes are ranked.
_FOLLOWED = 1024


class _ReplacementRun:
    """One run of the local replacement model, with its graph of derivatives.

    Args:
        bridge: the bridge; patterns and factors are held already.
        prompt: the tokens, ``[1, pos]``, and what else the model is given with them.
        bases: the hook points in a basis.
        kept: the positions at which features and errors are nodes.
        tokens: whose logits are nodes.
        probabilities: theirs.
        together: how many rows are computed at once.
        names: of hook points that are read, too.
        stop: of hook points behind which nothing of what made them counts.

    Attributes:
        read: what stands at hook points that are read, with its graph.
        cut: what stands for the activation behind a hook point of `stop`.
        sources: in the order of the computation: what a source is made of stands before it.
        logits: of the tokens, less the mean of all, as receivers.
    """

    def __init__(
        self,
        bridge: TransformerBridge,
        prompt: dict[str, Any],
        bases: Sequence[HookPoint],
        kept: Tensor,
        tokens: Tensor,
        probabilities: Tensor,
        together: int,
        names: Sequence[str] = (),
        stop: Sequence[str] = (),
    ) -> None:
        self.bridge, self.kept, self.together = bridge, kept, together
        self.prompt, self.bases = prompt, bases
        self.cut: dict[str, Tensor] = {}
        self.tokens, self.probabilities = tokens, probabilities
        self.sources: list[_Source] = []
        self.read: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        by_point = {hook.name.rpartition(".")[0]: hook for hook in bases}
        explained = {name.replace(".mlp.hook_post", ".hook_mlp_out") for name in by_point}  # by what made it
        mlps = [name for name in bridge.hook_dict if name.endswith(".hook_mlp_out") and name not in explained]
        reads = [name for hook in bases if isinstance(hook.view, InBasis) for name, _ in hook.view.reads]
        hooks: list[tuple[str, Callable[..., Tensor | None]]] = [(name, self._begin) for name in _beginnings(bridge)]
        hooks += [(name, self._keep) for name in dict.fromkeys([*reads, *names])]
        hooks += [(name, self._stop) for name in stop]
        later = [follower.name.rpartition(".")[0] for hook in bases for follower in hook.point.linked]
        for name in dict.fromkeys([*by_point, *later, *mlps]):
            hooks.append((name, self._replace(by_point.get(name), written_later(name, bases, bridge.hook_dict))))
        logits = bridge.run_with_hooks(prompt, fwd_hooks=hooks)[0, -1].float()
        made = _uncapped(bridge.cfg.output_logits_soft_cap, logits)
        ends = (made - made.mean())[tokens]
        self.logits = _Receivers(len(self.sources), torch.arange(len(tokens)), lambda some: ends[some], True)

    def _send(self, kind: Kind, point: str, value: Tensor, entries: Tensor, target: Tensor | None = None) -> Tensor:
        """Makes a source of a value, and returns what stands for it in the rest of the run."""
        leaf = value.detach().requires_grad_()
        self.sources.append(_Source(kind, point, leaf, entries, target))
        return leaf

    def _begin(self, act: Tensor, hook: HookPoint) -> Tensor:
        return self._send("token", hook.name, act, torch.arange(act.shape[1], device=act.device)[:, None])

    def _keep(self, act: Tensor, hook: HookPoint) -> None:
        self.read[hook.name] = act

    def _stop(self, act: Tensor, hook: HookPoint) -> Tensor:
        return self.cut.setdefault(hook.name, act.detach().requires_grad_())

    def _replace(self, basis: HookPoint | None, earlier: list[tuple[HookPoint, InBasis]]) -> Callable[..., Tensor]:
        """A hook that makes an MLP's output a function of features and errors alone.

        Args:
            basis: that of the features; None: the MLP is all error.
            earlier: what writes here of a cross-layer transcoder's layers.
        """

        def replace(act: Tensor, hook: HookPoint) -> Tensor:
            made = constant = torch.zeros_like(act)
            for layer, there in earlier:
                leaf = self._leaves[layer.name]
                made = made + there.decoded(leaf, act)
                constant = constant + there.decoded(torch.zeros_like(leaf), act)
            if basis is not None:
                view = basis.view
                assert isinstance(view, InBasis)
                read = view.read_in(self.read) if view.reads else act
                with _PatternsHeld(basis.name, act.shape[1]) as held:
                    found = dense(view.encode(read))
                held.check(found)
                entries = (found.detach()[0] * self.kept.view(-1, *[1] * (found.ndim - 2))).nonzero()
                leaf = self._leaves[basis.name] = self._send("feature", basis.name, found, entries, found)
                made = made + view.decoded(leaf, act)
                constant = constant + view.decoded(torch.zeros_like(leaf), act)
                if view.skip is not None:
                    made = made + view.skip(read)
            positions = self.kept.nonzero()
            error = self._send("error", hook.name, act - made, positions)
            if constant.any():
                made = made - constant.detach() + self._send("constant", hook.name, constant, positions)
            return error + made

        return replace

    def _rows(self, receivers: _Receivers) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """What each receiver gets from all sources before it, in batches: which ones, and a ``[row, node]`` of each."""
        sources = self.sources[: receivers.before]
        leaves = [source.leaf for source in sources]
        of_one = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        size = max(1, min(self.together, _BYTES // max(of_one, 1)))
        for some in receivers.which.split(size) if len(receivers.which) else ():
            gradients = self._gradients(receivers.of(some), leaves)
            sent = [source.sent(gradient, len(some)) for source, gradient in zip(sources, gradients, strict=True)]
            yield some, sent

    def _rows_of(self, wanted: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
        """The rows of features, as `_rows` gives them, source by source.

        Nothing behind a feature's position reaches it: those of the prompt's first parts are computed in runs of these
        parts alone, where they spare enough and are the same.

        Args:
            wanted: for each source, which of its features, in order.
        """
        length, begin = self.kept.numel(), 0
        for part in range(1, _PREFIXES + 1):
            end = length * part // _PREFIXES
            places = {at: self.sources[at].entries[which, 0] for at, which in wanted.items()}
            here = {at: which[(begin <= places[at]) & (places[at] < end)] for at, which in wanted.items()}
            spared = sum(len(which) for which in here.values()) * (length - end)
            run = (self._of_prefix(end) if spared > _WORTHWHILE * length else None) or self
            for at, which in here.items():
                for some, sent in run._rows(run._features(at, which)):
                    behind = [len(source.entries) - x.shape[1] for source, x in zip(self.sources, sent, strict=False)]
                    yield at, some, [functional.pad(x, (0, n)) if n else x for x, n in zip(sent, behind, strict=True)]
            begin = end

    def _of_prefix(self, length: int) -> _ReplacementRun | None:
        """The run of the prompt's first tokens; None where what stands at them is not what it is in the whole."""
        tokens_alone = self.prompt.keys() <= {"input_ids", "attention_mask"}
        if not tokens_alone or any(leaf.shape[-1] == length for leaf in self._leaves.values()):  # see `_PatternsHeld`
            return None
        prompt = {name: value[:, :length] for name, value in self.prompt.items()}
        with self.bridge.linearised(prompt):
            none = self.kept.new_zeros(0, dtype=torch.long)
            of = (prompt, self.bases, self.kept[:length], none, self.probabilities[:0], self.together)
            run = _ReplacementRun(self.bridge, *of)
        both = zip(run.sources, self.sources, strict=False)
        same = len(run.sources) == len(self.sources) and all(one.begins(other, length) for one, other in both)
        return run if same else None

    def _gradients(self, receivers: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Of each receiver: one by one where the model is spread, as DTensors know no vmap."""
        if not receivers.requires_grad:
            return [None] * len(leaves)
        given = partial(torch.autograd.grad, receivers, leaves, retain_graph=True, allow_unused=True)
        wanted = torch.eye(len(receivers), device=receivers.device, dtype=receivers.dtype)
        if self.bridge.wiring.sharing is None:
            return given(wanted, is_grads_batched=True)
        rows = [given(row) for row in wanted]
        return [None if of_leaf[0] is None else torch.stack(of_leaf) for of_leaf in zip(*rows, strict=True)]

    def _features(self, at: int, which: Tensor) -> _Receivers:
        """Some of a source's features as receivers."""
        source = self.sources[at]
        assert source.target is not None
        return _Receivers(at, which, partial(source.at, source.target), not self._bends(source.point))

    def graph(self, limit: int | None, file: str | Path | None) -> AttributionGraph:
        """The graph of the run.

        Args:
            limit: how many features, errors and tokens are nodes; None: all.
            file: where the adjacency stands; None: in memory.
        """
        if not any(len(source.entries) for source in self.sources if source.kind == "feature"):
            raise ValueError("no feature is active at these positions: there is nothing to attribute")
        ranked = sum(len(some.entries) for some in self.sources if some.kind != "constant")
        dropped = limit is not None and ranked > limit
        if file is not None:
            most = limit + 1 if limit is not None and dropped else sum(len(some.entries) for some in self.sources)
            _take_room(file, most + 1 + len(self.tokens))
        if limit is not None and dropped:
            return self._among(self._most_influential(limit), file, dropped=True)
        return self._among([torch.arange(len(some.entries), device=some.leaf.device) for some in self.sources], file)

    def _among(self, kept: list[Tensor], file: str | Path | None, dropped: bool = False) -> AttributionGraph:
        """The graph of some nodes of each source."""
        order = sorted(range(len(kept)), key=lambda at: _ORDER.index(self.sources[at].kind))
        first = dict(zip(order, accumulate((len(kept[at]) for at in order), initial=0), strict=False))
        columns = [slice(first[at], first[at] + len(mine)) for at, mine in enumerate(kept)]
        nodes = [node for at in order for node in self.sources[at].nodes(kept[at])]
        biases = len(nodes)
        nodes += [Node("constant", "biases", 0), *[Node("dropped", "dropped", 0)] * dropped]
        first[-1] = len(nodes)  # of the logits
        nodes += [Node("logit", "logits", self.kept.numel() - 1, int(token)) for token in self.tokens]
        shares = self.probabilities if file is None else self.probabilities.cpu()
        received, values = shares.new_zeros(2, len(nodes))
        found: list[_Rows] = []
        room, used = None, 0
        if file is not None:
            most = len(nodes) * (len(nodes) - 1) // 2
            room = torch.from_file(str(file), shared=True, size=most, dtype=shares.dtype)
        for at, source in enumerate(self.sources):
            values[columns[at]] = source.sizes(kept[at]).to(values)
        of_logits = ((-1, some, sent) for some, sent in self._rows(self.logits))
        features = {at: mine for at, mine in enumerate(kept) if self.sources[at].kind == "feature"}
        for at, some, sent in chain(of_logits, self._rows_of(features)):
            receivers = self.logits if at < 0 else self._features(at, some)
            rows = slice(first[at], first[at] + len(some))
            first[at] += len(some)
            table = received.new_zeros(len(some), len(nodes))
            for source, mine, column, parts in zip(self.sources, kept, columns, sent, strict=False):
                table[:, column] = parts[:, mine].to(table)
                if source.kind != "constant":
                    received[rows] += parts.abs().sum(1).to(received)
                if dropped:
                    rest = parts.index_fill(1, mine, 0).sum(1).to(table)
                    table[:, biases + (source.kind != "constant")] += rest
            values[rows] = receivers.of(some).detach().to(values)
            if receivers.linear:  # all is linear in the nodes and constant otherwise
                table[:, biases] += values[rows] - table.sum(1)
            reached = table.any(0)
            reached[biases + dropped] = True  # what was dropped has its share, also where its sum is nothing
            senders = reached.nonzero().flatten().int()
            part = table[:, senders]
            if room is not None:
                used += part.numel()
                part = room[used - part.numel() : used].view_as(part).copy_(part)
            found.append((rows, senders, part))
        if file is not None:
            os.truncate(file, 4 * used)
        found.sort(key=lambda some: some[0].start)
        return AttributionGraph(tuple(nodes), tuple(found), values, shares, received)

    def value(self, node: Node) -> Float[Tensor, ""]:
        """What stands at a feature or a logit, with its graph.

        Raises:
            ValueError: it is no such node, or is not there, or what it gets is a slope.
        """
        if node.kind == "logit" and node.pos == self.kept.numel() - 1:
            return self.logits.of(torch.tensor([0]))[0]
        if node.kind == "feature":
            for source in self.sources:
                if source.kind == "feature" and source.point == node.point:
                    if self._bends(source.point):
                        raise ValueError(f"{node} is read inside an MLP or behind it: its edges are slopes, of no sum")
                    place = [node.pos, *([] if node.head is None else [node.head]), node.index]
                    which = (source.entries == torch.tensor(place, device=source.entries.device)).all(1).nonzero()
                    if len(which):
                        assert source.target is not None
                        return source.at(source.target, which[0])[0]
        raise ValueError(f"{node} is no feature that is active in this run, and no logit of its last position")

    def parts(self, vector: Float[Tensor, " d_head"]) -> tuple[tuple[Node, ...], Float[Tensor, "node d_head"]]:
        """What each node contributes to a vector that is linear in them: which do, ``biases`` last, and what."""
        every = torch.arange(len(vector), device=vector.device)
        found: list[list[Tensor]] = [[] for _ in self.sources]
        for _, sent in self._rows(_Receivers(len(self.sources), every, lambda some: vector[some], True)):
            for rows, part in zip(found, sent, strict=True):
                rows.append(part)
        nodes: list[Node] = []
        parts: list[Tensor] = []
        for source, rows in zip(self.sources, found, strict=True):
            part = torch.cat(rows).T
            which = part.abs().amax(1).nonzero().flatten()
            nodes += source.nodes(which)
            parts.append(part[which])
        whole = torch.cat(parts)
        rest = (vector.detach() - whole.sum(0))[None]
        return (*nodes, Node("constant", "biases", 0)), torch.cat([whole, rest])

    def _most_influential(self, limit: int) -> list[Tensor]:
        """Which nodes of each source have the most influence, as `AttributionGraph.influence` counts it.

        It is followed from the logits through the features that are among the first so far, until the rows of all these
        are known. Of a row the largest entries alone are remembered: it is computed again for those that are kept.
        """
        offsets = [*accumulate((len(source.entries) for source in self.sources), initial=0)]
        feature = torch.cat([torch.full((len(some.entries),), some.kind == "feature") for some in self.sources])
        feature = feature.to(self.probabilities.device)

        def by_source(which: Tensor) -> list[Tensor]:
            return [which[(low <= which) & (which < high)].sort().values - low for low, high in pairwise(offsets)]

        begin = self.probabilities.new_zeros(offsets[-1], dtype=torch.float64)
        for some, sent in self._rows(self.logits):
            begin += self.probabilities[some].double() @ self._shares(sent).double()
        known: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        expanded = torch.zeros_like(feature)
        while True:
            influence = begin.clone()  # how much of the logits goes through each node, by the rows that are known
            for at in sorted(known, reverse=True):  # that of what is computed later is whole by then
                for rows, columns, shares in known[at]:
                    influence.index_add_(0, columns.flatten(), (influence[rows, None] * shares).flatten())
            best = influence.topk(limit)
            first = best.indices[best.values > 0]
            fresh = first[feature[first] & ~expanded[first]][: max(self.together, int(expanded.sum()) // 4)]
            if not len(fresh):
                return by_source(first)
            expanded[fresh] = True
            wanted = {at: which for at, which in enumerate(by_source(fresh)) if len(which)}
            for at, rows, sent in self._rows_of(wanted):
                shares = self._shares(sent)
                largest = shares.topk(min(_FOLLOWED, shares.shape[1]))
                known.setdefault(at, []).append((rows + offsets[at], largest.indices, largest.values))

    def _shares(self, sent: Sequence[Tensor]) -> Float[Tensor, "row node"]:
        """Of what each row gets the shares of the sizes, constants aside."""
        explain = [part.abs() * (some.kind != "constant") for some, part in zip(self.sources, sent, strict=False)]
        sizes = torch.cat(explain, 1)
        return sizes / sizes.sum(1, keepdim=True).clamp(min=1e-10)

    def _bends(self, point: str) -> bool:
        """Whether an MLP is between the stream and the features at a point, so that what they get is a slope."""
        view = self.bridge.hook_dict[point].view
        own = point.rpartition(".")[0]
        read = [name for name, _ in view.reads] if isinstance(view, InBasis) and view.reads else [own]
        return any(".mlp." in name or name.endswith(".hook_mlp_out") for name in read)
