"""Where nodes and lines of a graph stand."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.pictures.graphs import GraphLayout, levels_of

graphs = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1]),
    min_size=1,
    max_size=25,
    unique=True,
)


@settings(deadline=None, max_examples=150)
@given(graphs)
def test_everything_flows_down_and_nothing_stands_on_anything(pairs):
    edges = [(str(a), str(b)) for a, b in pairs]
    levels = levels_of(edges)
    assert all(levels[sender] < levels[receiver] for sender, receiver in edges)
    graph = GraphLayout(edges, levels)
    assert set(graph.nodes) == {name for edge in edges for name in edge}
    for (sender, receiver), path in zip(edges, graph.paths, strict=True):
        start, end = graph.nodes[sender], graph.nodes[receiver]
        assert path[0] is start and path[-1] is end
        assert [stop.level for stop in path] == list(range(start.level, end.level + 1))
    for stops in graph.levels:  # where a line passes a level, nothing else stands
        for stop, following in itertools.pairwise(sorted(stops, key=lambda stop: stop.x)):
            assert following.x - stop.x > (stop.width + following.width) / 2 - 1e-6
        for stop in stops:
            assert stop.width / 2 - 1e-6 < stop.x < graph.width - stop.width / 2 + 1e-6


def test_columns_may_be_given():
    edges = [("embed", "L0H1"), ("L0H1", "L5H2"), ("embed", "L5H2")]
    columns = {"embed": 0, "L0H1": 1, "L5H2": 11}
    graph = GraphLayout(edges, columns)
    assert graph.nodes["L5H2"].level == 2  # levels without a node take no room
    with pytest.raises(ValueError, match="'L5H2' has no column"):
        GraphLayout(edges, {"embed": 0, "L0H1": 1})
    with pytest.raises(ValueError, match="'L5H2' must have a larger column than 'L0H1'"):
        GraphLayout(edges, {"embed": 0, "L0H1": 1, "L5H2": 1})


def test_bands_lie_side_by_side():
    edges = [("a0", "b0"), ("a0", "b1"), ("a1", "b1"), ("b0", "c2"), ("a1", "c2")]
    columns = {"a0": 0, "a1": 0, "b0": 1, "b1": 1, "c2": 2}
    bands = {name: int(name[1]) for name in columns}
    graph = GraphLayout(edges, columns, bands)
    assert graph.bands == [0, 1, 2] and graph.middles == sorted(graph.middles)
    borders = [(left + right) / 2 for left, right in itertools.pairwise(graph.middles)]
    for name, stop in graph.nodes.items():
        assert sum(stop.x > border for border in borders) == bands[name]
    with pytest.raises(ValueError, match="'c2' has no band"):
        GraphLayout(edges, columns, {name: 0 for name in columns if name != "c2"})


def test_circles_are_named():
    with pytest.raises(ValueError, match="in a circle: "):
        levels_of([("a", "b"), ("b", "c"), ("c", "a")])
