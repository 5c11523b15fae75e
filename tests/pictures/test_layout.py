"""Where nodes and lines of a graph stand."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.pictures.graphs import columns_of, layout, strongest_path

graphs = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1]),
    min_size=1, max_size=25, unique=True,
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(graphs)
def test_everything_flows_to_the_right_and_nothing_stands_on_anything(pairs):
    edges = [(str(a), str(b)) for a, b in pairs]
    columns = columns_of(edges)
    assert all(columns[sender] < columns[receiver] for sender, receiver in edges)
    found = layout(edges, columns)
    assert set(found.nodes) == {name for edge in edges for name in edge}
    places = [*found.nodes.values()]
    for (sender, receiver), path in zip(edges, found.paths, strict=True):
        assert [column for column, _ in path] == list(range(found.nodes[sender][0] + 1, found.nodes[receiver][0] + 1))
        assert path[-1] == found.nodes[receiver]
        places += path[:-1]  # where a line passes a column, nothing else stands
    boxes = {*found.nodes.values()}
    for column in {column for column, _ in places}:
        there = sorted(place for place in places if place[0] == column)
        for one, other in itertools.pairwise(there):
            apart = {2: 1, 1: 0.5, 0: 0}[sum(place in boxes for place in (one, other))]
            assert other[1] - one[1] > apart - 1e-9 and other[1] > one[1]


@settings(deadline=None, max_examples=50)
@given(graphs, st.sampled_from([2.0, 3.0]))
def test_a_narrow_layout_breaks_columns(pairs, room):
    edges = [(str(a), str(b)) for a, b in pairs]
    columns = columns_of(edges)
    found = layout(edges, columns, room=room)
    assert found.n_rows <= max(room, 2.2 + 1e-9)  # one node beside all lines that pass
    for sender, receiver in edges:
        assert found.nodes[sender][0] < found.nodes[receiver][0]
    for one, other in itertools.combinations(columns, 2):
        if columns[one] < columns[other]:
            assert found.nodes[one][0] < found.nodes[other][0]


@settings(deadline=None, max_examples=100)
@given(graphs, st.randoms(use_true_random=False))
def test_the_strongest_path_is_the_one_whose_weakest_edge_is_the_strongest(pairs, random):
    scores = [random.choice([-1, 1]) * random.randint(1, 5) for _ in pairs]
    sizes = {pair: abs(score) for pair, score in zip(pairs, scores, strict=True)}
    nodes = sorted({node for pair in pairs for node in pair})

    def ways(node):
        further = [(node, *way) for sender, receiver in pairs if sender == node for way in ways(receiver)]
        return further or [(node,)]

    starts = [node for node in nodes if all(receiver != node for _, receiver in pairs)]
    every = [way for node in starts for way in ways(node)]
    weakest = {way: min(sizes[pair] for pair in itertools.pairwise(way)) for way in every}
    found = tuple(strongest_path(pairs, scores, nodes))
    assert found in weakest and weakest[found] == max(weakest.values())


def test_columns_may_be_given():
    edges = [("embed", "L0H1"), ("L0H1", "L5H2"), ("embed", "L5H2")]
    given_columns = {"embed": 0, "L0H1": 1, "L5H2": 11}
    assert layout(edges, given_columns).nodes["L5H2"][0] == 2  # columns without a node take no room
    with pytest.raises(ValueError, match="'L5H2' has no column"):
        layout(edges, {"embed": 0, "L0H1": 1})
    with pytest.raises(ValueError, match=r"'L5H2' \(column 1\) must stand to the right of 'L0H1' \(column 1\)"):
        layout(edges, {"embed": 0, "L0H1": 1, "L5H2": 1})


def test_bands_lie_one_under_the_other():
    edges = [("a0", "b0"), ("a0", "b1"), ("a1", "b1"), ("b0", "c2"), ("a1", "c2")]
    columns = {"a0": 0, "a1": 0, "b0": 1, "b1": 1, "c2": 2}
    bands = {name: int(name[1]) for name in columns}
    found = layout(edges, columns, bands)
    for name, (_, row) in found.nodes.items():
        middle, height = found.bands[bands[name]]
        assert abs(row - middle) <= height / 2
    (one, high), (two, next_high), (three, _) = (found.bands[band] for band in (0, 1, 2))
    assert one + high / 2 < two - next_high / 2 and two < three
    with pytest.raises(ValueError, match="'c2' has no band"):
        layout(edges, columns, {name: 0 for name in columns if name != "c2"})


def test_circles_are_named():
    with pytest.raises(ValueError, match="in a circle: "):
        columns_of([("a", "b"), ("b", "c"), ("c", "a")])
