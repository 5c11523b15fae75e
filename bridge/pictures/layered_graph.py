"""Where the nodes and lines of a graph without circles stand when everything flows from left to right.

The layered drawing of Sugiyama et al. 1981, "Methods for Visual Understanding of Hierarchical System Structures": nodes
in columns, a place of its own for every line in each column that it passes, and orders in which few lines cross.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

#: A node, or where an edge passes a column: the edge's number and the column.
_Stop = str | tuple[int, int]
#: The stops of an edge, each with its column.
_Chain = list[tuple[int, _Stop]]

_BETWEEN_BANDS = 0.3


@dataclass(frozen=True)
class GraphLayout:
    """Places in columns and rows; rows are counted from the middle.

    Attributes:
        nodes: for each node its column and row.
        paths: for each edge the stops after its sender, its receiver the last, as columns and rows.
        n_columns, n_rows: how large it is.
        bands: for each band its middle row and its height.
    """

    nodes: dict[str, tuple[int, float]]
    paths: list[list[tuple[int, float]]]
    n_columns: int
    n_rows: float
    bands: dict[int, tuple[float, float]]


def columns_of(edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """A column for each node, to the right of all that send to it, and no further left than it has to be.

    Args:
        edges: sender and receiver of each.

    Raises:
        ValueError: the edges go in a circle.

    Example:
        >>> from bridge.pictures.layered_graph import columns_of
        >>> columns_of([("a", "b"), ("b", "c"), ("a", "c"), ("late", "c")])["late"]
        1
    """
    senders: dict[str, list[str]] = {}
    receivers: dict[str, list[str]] = {}
    for sender, receiver in edges:
        senders.setdefault(receiver, []).append(sender)
        senders.setdefault(sender, [])
        receivers.setdefault(sender, []).append(receiver)
    try:
        order = list(TopologicalSorter(senders).static_order())
    except CycleError as error:
        raise ValueError(f"the edges go in a circle: {' -> '.join(error.args[1])}") from error
    column: dict[str, int] = {}
    for node in order:
        column[node] = max((column[sender] + 1 for sender in senders[node]), default=0)
    for node in order:  # what nothing sends to stands just before the first that it sends to
        if not senders[node]:
            column[node] = min(column[receiver] for receiver in receivers[node]) - 1
    return column


def layout(
    edges: Sequence[tuple[str, str]], columns: Mapping[str, int], bands: Mapping[str, int] | None = None
) -> GraphLayout:
    """Rows for the nodes, and the stops of each edge.

    Args:
        edges: sender and receiver of each.
        columns: the column of each node.
        bands: the band of each node: bands lie one under the other, in the order of their numbers; None: all in one.

    Raises:
        ValueError: a node without a column or a band, or a receiver that does not stand to the right of its sender.

    Example:
        >>> from bridge.pictures.layered_graph import columns_of, layout
        >>> edges = [("a", "b"), ("b", "c"), ("a", "c")]
        >>> layout(edges, columns_of(edges)).nodes["b"][0]
        1
    """
    for edge in edges:
        _check(edge, columns, bands)
    shown = sorted({columns[node] for edge in edges for node in edge})
    index = {column: i for i, column in enumerate(shown)}  # columns without a node take no room
    nodes = dict.fromkeys(name for edge in edges for name in edge)
    band: dict[_Stop, int] = {node: 0 if bands is None else bands[node] for node in nodes}
    used = sorted(set(band.values()))
    chains = [_chain(i, edge, {node: index[columns[node]] for node in edge}) for i, edge in enumerate(edges)]
    for chain in chains:
        band |= _bands_between(chain, band, used)
    members: dict[int, list[_Stop]] = {i: [] for i in range(len(shown))}
    for column, stop in [(index[columns[node]], node) for node in nodes] + [p for chain in chains for p in chain[1:-1]]:
        members[column].append(stop)
    heights = {
        each: max(sum(_height(stop) for stop in stops if band[stop] == each) for stops in members.values())
        for each in used
    }
    total = sum(heights.values()) + _BETWEEN_BANDS * (len(used) - 1)
    starts = itertools.accumulate((heights[each] + _BETWEEN_BANDS for each in used), initial=0.0)
    middle = {each: start + heights[each] / 2 - total / 2 for each, start in zip(used, starts, strict=False)}
    row = _ordered(members, chains, lambda stops: _rows(stops, band, middle))
    return GraphLayout(
        nodes={stop: (c, row[stop]) for c, stops in members.items() for stop in stops if isinstance(stop, str)},
        paths=[[(c, row[stop]) for c, stop in chain[1:]] for chain in chains],
        n_columns=len(shown),
        n_rows=total,
        bands={each: (middle[each], heights[each]) for each in used},
    )


def _chain(number: int, edge: tuple[str, str], column: Mapping[str, int]) -> _Chain:
    """The stops of an edge from its sender to its receiver, with their columns."""
    sender, receiver = edge
    between = range(column[sender] + 1, column[receiver])
    return [(column[sender], sender), *((at, (number, at)) for at in between), (column[receiver], receiver)]


def _bands_between(chain: _Chain, band: Mapping[_Stop, int], used: list[int]) -> dict[_Stop, int]:
    """The bands of the stops of an edge: on a straight line from its sender's to its receiver's."""
    (start, sender), *between, (end, receiver) = chain
    first, last = used.index(band[sender]), used.index(band[receiver])
    return {stop: used[round(first + (at - start) / (end - start) * (last - first))] for at, stop in between}


def _ordered(
    members: dict[int, list[_Stop]],
    chains: Sequence[_Chain],
    rows: Callable[[Sequence[_Stop]], dict[_Stop, float]],
) -> dict[_Stop, float]:
    """Sorts each column by where its stops' neighbours are, to and fro, so that few lines cross.

    Args:
        members: the stops of each column, which are sorted.
        chains: those of each edge.
        rows: the rows of a column's stops.
    """
    near: dict[_Stop, list[_Stop]] = {}
    for (_, one), (_, other) in itertools.chain.from_iterable(map(itertools.pairwise, chains)):
        near.setdefault(one, []).append(other)
        near.setdefault(other, []).append(one)
    row: dict[_Stop, float] = {}
    for stops in members.values():
        row |= rows(stops)
    for sweep in range(12):
        for column in sorted(members, reverse=bool(sweep % 2)):
            members[column].sort(key=lambda stop: sum(row[other] for other in near[stop]) / len(near[stop]))
            row |= rows(members[column])
    return row


def _check(edge: tuple[str, str], columns: Mapping[str, int], bands: Mapping[str, int] | None) -> None:
    """Refuses an edge whose ends have no place, or that does not go to the right.

    Raises:
        ValueError: it does not.
    """
    for node in edge:
        if node not in columns:
            raise ValueError(f"{node!r} has no column; there are columns for {', '.join(map(repr, columns))}")
        if bands is not None and node not in bands:
            raise ValueError(f"{node!r} has no band, and others have one")
    sender, receiver = edge
    if columns[sender] >= columns[receiver]:
        raise ValueError(
            f"{receiver!r} (column {columns[receiver]}) must stand to the right of {sender!r} "
            f"(column {columns[sender]}), which sends to it"
        )


def _height(stop: _Stop) -> float:
    """A line that passes takes less room than a node."""
    return 1.0 if isinstance(stop, str) else 0.4


def _rows(stops: Sequence[_Stop], band: Mapping[_Stop, int], middle: Mapping[int, float]) -> dict[_Stop, float]:
    """The stops of a column, those of a band one under the other around its middle."""
    rows = {}
    for each in middle:
        there = [stop for stop in stops if band[stop] == each]
        at = middle[each] - sum(map(_height, there)) / 2
        for stop in there:
            rows[stop] = at + _height(stop) / 2
            at += _height(stop)
    return rows
