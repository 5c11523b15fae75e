"""Circuits as graphs: who sends what to whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import altair as alt
import torch
from jaxtyping import Float
from torch import Tensor

from bridge.pictures.graph_marks import Graph
from bridge.pictures.labels import token_labels, visible
from bridge.pictures.layered_graph import columns_of, layout
from bridge.pictures.node_details import details
from bridge.pictures.picture import Picture
from bridge.pictures.style import configuration, dark_parameter
from bridge.pictures.values import checked, compact

#: From where, to where, and how much: ``("L0H1", "L2H3", 0.7)``.
Edge = tuple[str, str, float]


@dataclass(frozen=True, eq=False)
class CircuitNode:
    """What is known of a node of a circuit.

    Attributes:
        column: where it stands from left to right, such as its layer; None: to the right of all that send to it.
        label: what is written on it; None: its name.
        position: the position of the token that it stands at; None: at all of them.
        effect: its direct effect on the metric.
        pattern: what a head attends to, ``[query, key]``.

    Example:
        >>> from bridge import pictures
        >>> pictures.CircuitNode(column=3, effect=-0.5).column
        3
    """

    column: int | None = None
    label: str | None = None
    position: int | None = None
    effect: float | None = None
    pattern: Float[Tensor, "query key"] | None = None


def circuit(
    edges: Iterable[Edge],
    *,
    nodes: Mapping[str, CircuitNode] | None = None,
    tokens: Sequence[str] | None = None,
    joins: Iterable[tuple[str, str]] = (),
    supports: Literal["positive", "negative"] | None = None,
    metric: str = "metric",
    measure: str = "score",
    title: str = "Circuit",
) -> Picture:
    """A circuit as a graph, from left to right: a line for each edge, the thicker the larger its score.

    Blue is positive, orange negative, and dotted lines join what belongs together. Hovering over a line says from where
    to where it goes. In HTML, a slider hides edges with smaller scores, and the nodes that have no others; a click on a
    node shows its edges, its direct effect and what it attends to.

    Args:
        edges: for each, the sender's name, the receiver's name and a score.
        nodes: what is known of the nodes, by name. Either all have a column, or none; and so with positions.
        tokens: the text of each position, for nodes that have one, and for patterns: ``bridge.to_str_tokens(prompt)``.
        joins: pairs of nodes that belong together, such as a head's input and the head; without a score.
        supports: which scores say that an edge supports the metric, as those of a `Circuit` do; blue is theirs then.
            None: blue is positive.
        metric: what the scores are about, such as ``"logit difference"``.
        measure: what a score is.
        title: over the picture.

    Raises:
        ValueError: no edges, one that is given twice, a score that is not finite, senders and receivers in a circle,
            columns that do not go from left to right, a node of `nodes` that has no edge, or no tokens for positions.
        TypeError: an edge that is not two names and a number.

    Example:
        >>> from bridge import pictures
        >>> pictures.circuit([("embed", "L0H1", 0.9), ("L0H1", "L2H3", 0.7), ("L2H3", "logits", -0.4)])
        Picture('Circuit')
    """
    given = list(edges)
    pairs = _ends_of(given)
    scores = checked(torch.tensor([float(score) for *_, score in given]), "the scores")
    pairs += joins
    known = dict(nodes or {})
    words = [] if tokens is None else token_labels(tokens, len(tokens))
    _check_nodes(known, {name for pair in pairs for name in pair}, len(words))
    columns = {name: node.column for name, node in known.items() if node.column is not None}
    positions = {name: node.position for name, node in known.items() if node.position is not None}
    found = layout(pairs, columns or columns_of(pairs), positions or None)
    sizes = [score or 0.0 for score in compact(scores)]
    largest = max(map(abs, sizes)) or 1.0
    names = [*found.nodes]
    labels = [known.get(name, CircuitNode()).label or visible(name) for name in names]
    graph = Graph(
        pairs=[(names.index(sender), names.index(receiver)) for sender, receiver in pairs],
        scores=sizes,
        labels=labels,
        names=[
            f"{label} [{positions[name]}]" if name in positions else label
            for name, label in zip(names, labels, strict=True)
        ],
        places=[found.nodes[name] for name in names],
        paths=found.paths,
        rows=found.n_rows,
        bands=[(words[at], middle) for at, (middle, _) in found.bands.items()] if positions else [],
    )
    legend = [_legend(supports, metric, measure, largest)]
    if len(pairs) > len(given):
        legend.append("dotted: the inputs of one head; from left to right: the layers")
    drawn = graph.drawn(measure, supports == "negative").properties(title=alt.Title(title, subtitle=legend))
    effects = {names.index(name): node.effect for name, node in known.items() if node.effect is not None}
    patterns = {
        names.index(name): checked(node.pattern, "a pattern")
        for name, node in known.items()
        if node.pattern is not None
    }
    below = details(graph, effects, patterns, words, metric, measure)
    chart = alt.vconcat(drawn, below, spacing=14).properties(config=configuration(), usermeta={"details": True})
    return Picture(chart.add_params(dark_parameter(), _slider(largest)), title)


def _ends_of(edges: list[tuple[str, str, float]]) -> list[tuple[str, str]]:
    """Sender and receiver of each edge.

    Raises:
        ValueError: there are no edges, or one is given twice.
        TypeError: one is not two names and a number.
    """
    for edge in edges:
        if len(edge) != 3 or not isinstance(edge[0], str) or not isinstance(edge[1], str):
            raise TypeError(f"an edge is (sender, receiver, score), such as ('L0H1', 'L2H3', 0.7); one is {edge!r}")
    if not edges:
        raise ValueError("there are no edges: the circuit is empty")
    pairs = [(sender, receiver) for sender, receiver, _ in edges]
    if twice := [pair for pair in pairs if pairs.count(pair) > 1]:
        raise ValueError(f"the edge from {twice[0][0]!r} to {twice[0][1]!r} is given more than once")
    return pairs


def _check_nodes(nodes: Mapping[str, CircuitNode], ends: set[str], n_tokens: int) -> None:
    """Refuses nodes without an edge, and those that do not fit the tokens.

    Raises:
        ValueError: there is one.
    """
    for name, node in nodes.items():
        if name not in ends:
            raise ValueError(f"{name!r} is one of the nodes, and no edge begins or ends there")
        if node.position is not None and not 0 <= node.position < n_tokens:
            raise ValueError(
                f"{name!r} is at position {node.position}, and there are {n_tokens} tokens: tokens must hold the text "
                "of each position"
            )
        if node.pattern is not None and list(node.pattern.shape) != [n_tokens] * 2:
            raise ValueError(f"a pattern has shape {list(node.pattern.shape)}, and there are {n_tokens} tokens")


def _slider(largest: float) -> alt.Parameter:
    """What hides edges with smaller scores."""
    ends = alt.binding_range(min=0, max=largest, step=largest / 100, name="hide edges below ")
    return alt.param(name="least", value=0, bind=ends)


def _legend(supports: str | None, metric: str, measure: str, largest: float) -> str:
    """What colours and widths say."""
    if supports is None:
        said = f"blue: positive {measure}, orange: negative"
    else:
        said = f"blue: the {metric} falls without it, orange: it rises"
    return f"{said}; width: {measure}, up to {largest:g}"
