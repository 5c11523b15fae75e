"""Each picture draws the numbers that it was given, in the places that they belong to."""

import itertools
import json
import re

import pytest
import torch

from bridge import pictures
from bridge.circuits import Curve
from bridge.hooks.studied_bridge import StudiedBridge
from bridge.pictures.style import PALETTE
from tests.pictures.drawn import marks, number

TOKENS = ["<bos>", " Mary", "\n", " Mary"]


class Words(StudiedBridge):
    def to_single_str_token(self, int_token):
        return f" w{int_token}"


def close(text, value):
    return number(text) == pytest.approx(float(value), rel=5e-3, abs=1e-12)


def test_attention_names_each_pair():
    pattern = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0)).tril()
    drawn = marks(pictures.attention(pattern, TOKENS))
    shown = ["<bos>", "·Mary", "↵", "·Mary"]
    assert len(drawn) == 30  # what the mask forbids is blank
    for mark in drawn:
        head, query, key = int(mark["panel"].removeprefix("head ")), int(mark["r"]), int(mark["c"])
        assert (mark["query"], mark["key"]) == (shown[query], shown[key])
        assert close(mark["weight"], pattern[0, head, query, key])
    assert len({(mark["panel"], mark["r"], mark["c"]) for mark in drawn}) == 30
    pattern[0, :, 2, 1] = 0
    assert len(marks(pictures.attention(pattern, TOKENS))) == 30  # a zero is not
    pattern[0, 0, 0, 3] = 0.1
    assert (
        len(marks(pictures.attention(pattern, TOKENS))) == 48
    )  # one that looks ahead: nothing is masked


def test_a_long_pattern_is_drawn_in_blocks_and_says_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr("bridge.pictures.attention_grids.LONGEST", 4)
    n, size = 10, 3
    pattern = torch.rand(2, n, n, generator=torch.Generator().manual_seed(0)).tril()
    pattern = pattern / pattern.sum(-1, keepdim=True) * 0.5
    pattern[1, 8, 7] = 0.75
    tokens = [f"t{i}" for i in range(n)]
    picture = pictures.attention(pattern, tokens)
    drawn = marks(picture)
    assert len(drawn) == 2 * 4 * 4
    for mark in drawn:
        head, query, key = int(mark["panel"][-1]), int(mark["r"]), int(mark["c"])
        block = pattern[head, query * size : (query + 1) * size, key * size : (key + 1) * size]
        first, last = query * size, min(query * size + 2, n - 1)
        assert mark["query"] == f"{first}t{first} to {last}t{last}"
        assert close(mark["weight"], block.sum(-1).mean())
    cell = float(pattern[1, 6:9, 6:9].sum(-1).mean())
    said = picture.svg()
    assert "a cell is of 3 queries and 3 keys" in said
    assert (
        f"furthest above its cell, of {cell:.2f}, is the weight 0.75 of query 8 to key 7)" in said
    )
    pattern[:, 0, 0] = 1.0  # the largest of every causal pattern, of which its cell leaves out less
    assert "0.75 of query 8 to key 7" in pictures.attention(pattern, tokens).svg()
    assert len(marks(pictures.attention(pattern[:, None, None], tokens))) == 2 * 4 * 4
    scores = (pattern * 9 - 4).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    picture = pictures.attention(scores, tokens)
    assert "lower ones are not shown" in picture.svg()
    drawn = marks(picture)
    assert len(drawn) == 2 * 10
    assert close(drawn[0]["score"], scores[0, :3, :3].max())
    monkeypatch.undo()
    assert "a cell is of" not in pictures.attention(pattern, tokens).svg()


def test_attention_of_all_layers():
    pattern = torch.rand(2, 1, 3, 4, 4)
    drawn = marks(pictures.attention(pattern, TOKENS, layers=[5, 7]))
    assert [mark["panel"] for mark in drawn[::16]] == [
        "L5H0",
        "L5H1",
        "L5H2",
        "L7H0",
        "L7H1",
        "L7H2",
    ]
    for i, mark in enumerate(drawn):
        assert close(mark["weight"], pattern.flatten()[i])


def test_masked_scores_stay_blank():
    scores = torch.randn(2, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    drawn = marks(pictures.attention(scores, TOKENS))
    assert len(drawn) == 2 * 10
    assert all(
        close(m["score"], scores[int(m["panel"][-1]), int(m["r"]), int(m["c"])]) for m in drawn
    )


def test_cross_attention_has_two_texts():
    drawn = marks(pictures.attention(torch.rand(2, 2, 3), ["a", "b"], key_tokens=["x", "y", "z"]))
    assert [(m["query"], m["key"]) for m in drawn[:6]] == [(q, k) for q in "ab" for k in "xyz"]


def test_the_logit_lens_shows_the_likeliest_tokens():
    logits = torch.randn(3, 1, 4, 9)
    drawn = [m for m in marks(pictures.logit_lens(logits, TOKENS, Words(), top=2)) if "v" in m]
    assert len(drawn) == 12
    for mark in drawn:
        layer, position = int(mark["l"]), int(mark["p"])
        assert mark["after layer"] == ["embed", "0", "1"][layer]
        assert mark["at token"] == pictures.style.visible(TOKENS[position])
        odds = logits[layer, 0, position].double().exp()
        for rank in (1, 2):
            word, share = mark[str(rank)].split(" ")
            token = odds.argsort(descending=True)[rank - 1]
            assert word == f"·w{token}"
            assert close(share, odds[token] / odds.sum())


@pytest.mark.parametrize(
    ("shape", "axes", "panels"),
    [
        ((3, 4), "layer pos", None),
        ((3, 3), "layer head", None),
        ((2, 3, 4), "layer pos", ["resid_pre", "attn_out"]),
        ((3, 4, 3), "layer pos head", None),
        ((3, 3, 4, 4), "layer head dest_pos src_pos", None),
    ],
)
@pytest.mark.parametrize("ends", [{}, {"clean": 3.0, "corrupted": 1.0}])
def test_a_layer_without_the_part_is_blank_and_says_so(shape, axes, panels, ends):
    """A sweep over a hybrid gives NaN there; a NaN anywhere else is a mistake."""
    results = torch.randn(shape, generator=torch.Generator().manual_seed(0)).add(5)
    layers = results[-1] if panels else results
    layers[1] = float("nan")
    picture = pictures.patching(results, axes, TOKENS, panels=panels, **ends)
    drawn = [
        mark for mark in marks(picture) if "shade" in mark
    ]  # not the numbers that are written into cells
    measure = "restored metric" if ends else "metric"
    said = [mark for mark in drawn if mark[measure] == "no such part"]
    others = [number(mark[measure]) for mark in drawn if mark[measure] != "no such part"]
    assert len(said) == layers[1].numel()
    right = results[results.isfinite()]
    right = ((right - 1) / 2 if ends else right).sort().values
    assert torch.allclose(torch.tensor(others).sort().values, right, rtol=5e-3)
    assert "1e+300" not in picture.svg() and "NaN" not in picture.svg()
    layers[1].flatten()[0] = 1.0
    with pytest.raises(ValueError, match="no finite numbers, the first of them nan"):
        pictures.patching(results, axes, TOKENS, panels=panels, **ends)
    with pytest.raises(ValueError, match="no finite numbers"):
        pictures.patching(torch.full(shape, float("nan")), axes, TOKENS, panels=panels, **ends)


@pytest.mark.parametrize(
    ("shape", "axes", "place"),
    [
        ((2, 4), "layer pos", lambda m: (m["layer"], m["c"])),
        ((2, 3), "layer head", lambda m: (m["layer"], m["head"])),
        (
            (2, 4, 3),
            "layer pos head",
            lambda m: (m["layer"], m["c"], m["panel"].removeprefix("head ")),
        ),
        (
            (2, 3, 4, 4),
            "layer head dest_pos src_pos",
            lambda m: (
                *re.fullmatch(r"layer (\d), head (\d)", m["panel"]).groups(),
                m["r"],
                m["c"],
            ),
        ),
    ],
)
def test_patching(shape, axes, place):
    results = torch.randn(shape)
    drawn = marks(pictures.patching(results, axes, TOKENS))
    found = {}
    for mark in drawn:
        if "metric" in mark:
            found[tuple(map(int, place(mark)))] = mark["metric"]
    assert len(found) == results.numel()
    assert all(close(text, results[index]) for index, text in found.items())


def test_patching_of_several_activations_and_what_it_restores():
    results = torch.randn(2, 3, 4)
    drawn = marks(
        pictures.patching(
            results, "layer pos", TOKENS, panels=["z", "q"], clean=5.0, corrupted=-3.0
        )
    )
    assert len(drawn) == 24
    for mark in drawn:
        value = results["zq".index(mark["panel"]), int(mark["layer"]), int(mark["c"])]
        assert close(mark["restored metric"], (value + 3) / 8)


def test_attribution_over_positions_and_at_one():
    values, names = torch.randn(3, 1, 4), ["embed", "0_attn_out", "0_mlp_out"]
    drawn = [m for m in marks(pictures.attribution(values, names, TOKENS)) if "contribution" in m]
    for mark in drawn:
        assert close(
            mark["contribution"], values[names.index(mark["component"]), 0, int(mark["c"])]
        )
    bars = marks(pictures.attribution(values[:, :, 2], names))
    assert [mark["component"] for mark in bars] == names
    assert all(
        close(mark["contribution"], value)
        for mark, value in zip(bars, values[:, 0, 2], strict=True)
    )


def test_heads():
    values = torch.randn(1, 3, 2)
    drawn = [m for m in marks(pictures.heads(values)) if "contribution" in m]
    assert {(m["layer"], m["head"]) for m in drawn} == {
        (str(i), str(j)) for i in range(3) for j in range(2)
    }
    assert all(close(m["contribution"], values[0, int(m["layer"]), int(m["head"])]) for m in drawn)


def test_composition_leaves_out_what_cannot_be():
    scores = torch.rand(3, 2, 3, 2)
    drawn = marks(pictures.composition(scores))
    assert len(drawn) == 3 * 4
    for mark in drawn:
        (writer, wh), (reader, rh) = (
            (int(n[1]), int(n[3])) for n in (mark["writing head"], mark["reading head"])
        )
        assert writer < reader
        assert close(mark["score"], scores[writer, wh, reader, rh])


def test_residual_norms():
    stream = torch.randn(3, 1, 4, 5)
    drawn = marks(pictures.residual_norms(stream, TOKENS, ["a", "b", "c"]))
    dots = [mark for mark in drawn if "component" in mark]
    assert len(dots) == 12
    (named,) = [mark for mark in drawn if "token" in mark and "component" not in mark]
    largest = max(dots, key=lambda dot: number(dot["norm"]))
    assert named["token"] == largest["token"] and close(named["norm (L2)"], number(largest["norm"]))
    for mark in dots:
        vector = stream["abc".index(mark["component"]), 0, int(mark["position"])].double()
        assert close(mark["norm"], vector.pow(2).sum().sqrt())


def test_faithfulness():
    shares, values = (0.01, 0.1, 1.0), {"a": (0.2, 0.7, 1.0), "b": (0.1, 0.4, 1.0)}
    band = torch.tensor([[0.1, 0.3], [0.6, 0.8], [1.0, 1.0]])
    drawn = marks(pictures.faithfulness(shares, values, {"a": band}))
    points = [mark for mark in drawn if "scores" in mark]
    assert len(points) == 6
    for mark in points:
        at = [
            abs(share - float(mark["share of edges"].rstrip("%")) / 100) < 1e-9 for share in shares
        ].index(True)
        right = values[mark["scores"]][at]
        low, high = band[at].tolist() if mark["scores"] == "a" else (right, right)
        assert (
            close(mark["faithfulness"], right),
            close(mark["from"], low),
            close(mark["to"], high),
        ) == (True,) * 3
    curves = {name: Curve(shares, line) for name, line in values.items()}
    assert marks(pictures.faithfulness(curves)) == marks(pictures.faithfulness(shares, values))
    for wrong in (
        (shares, {}),
        ({"a": curves["a"], "b": Curve((0.0, 1.0), (0.0, 1.0))},),
        ({},),
        (shares[:2], values),
        (shares, values, {"c": band}),
        (shares, values, {"a": band[:2]}),
        (shares, {"a": (0.1, 0.2, float("nan"))}),
    ):
        with pytest.raises(ValueError):
            pictures.faithfulness(*wrong)


def test_routing_leaves_zero_blank():
    weights = {
        1: torch.tensor([[0.0, 0.6, 0.4], [1.0, 0.0, 0.0]]),
        4: torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8]]),
    }
    drawn = marks(pictures.routing(weights, ["a", "b"]))
    found = {
        (int(m["panel"].split()[1]), int(m["c"]), int(m["expert"])): m["weight"] for m in drawn
    }
    wanted = {
        (layer, token, expert): table[token, expert]
        for layer, table in weights.items()
        for token in range(2)
        for expert in range(3)
        if table[token, expert] > 0
    }
    assert found.keys() == wanted.keys()
    assert all(close(text, wanted[key]) for key, text in found.items())


def test_routing_shows_the_chosen_experts():
    weights = {
        0: torch.tensor([[0.7, 0.3], [0.6, 0.4]]),
        3: torch.tensor([[[0.9, 0.1], [0.8, 0.2]]]),
    }
    chosen = {0: torch.tensor([[5, 1], [2, 5]]), 3: torch.tensor([[[0, 7], [7, 2]]])}
    picture = pictures.routing(weights, ["a", "b"], chosen, n_experts=8)
    found = {
        (int(m["panel"].split()[1]), int(m["c"]), int(m["expert"])): m["weight"]
        for m in marks(picture)
    }
    wanted = {
        (layer, token, int(chosen[layer].view(2, 2)[token, k])): weights[layer].view(2, 2)[token, k]
        for layer in weights
        for token in range(2)
        for k in range(2)
    }
    assert found.keys() == wanted.keys()
    assert all(close(text, wanted[key]) for key, text in found.items())
    for expert in range(8):  # those that get no token have a row, too
        assert f">{expert}</text>" in picture.svg()


def test_chosen_tokens():
    logits, vocabulary = torch.randn(3, 1, 4, 9), ["a", "b", "c"]

    class Known(StudiedBridge):
        def to_answer_token(self, answer):
            return vocabulary.index(answer)

    picture = pictures.chosen_lens(logits, TOKENS, Known(), ["c", "a"])
    assert re.findall(
        r'"domain": \[0.0, 0.5, 1.0\]', json.dumps(picture.spec())
    )  # probabilities: the bar goes to 1
    drawn = marks(picture)
    assert len(drawn) == 2 * 3 * 4
    odds = logits[:, 0].softmax(-1)
    for mark in drawn:
        layer = ["embed", "0", "1"].index(mark["after layer"])
        assert close(
            mark["probability"], odds[layer, int(mark["c"]), vocabulary.index(mark["panel"])]
        )
    with pytest.raises(ValueError, match="chosen is 'c'; give a list"):
        pictures.chosen_lens(logits, TOKENS, Known(), "c")


@pytest.mark.parametrize("sign", [1, -1])
def test_tokens_coloured_by_a_number(sign):
    values = torch.tensor([0.5, 2.0, 0.25, 1.0]) * torch.tensor([1, sign, 1, 1])
    picture = pictures.tokens(values[None], TOKENS, measure="loss")
    drawn = [mark for mark in marks(picture) if "loss" in mark]
    assert [(mark["token"], int(mark["position"])) for mark in drawn] == [
        ("<bos>", 0),
        ("·Mary", 1),
        ("↵", 2),
        ("·Mary", 3),
    ]
    assert all(close(mark["loss"], value) for mark, value in zip(drawn, values, strict=True))
    tops = [float(mark["y0"]) for mark in drawn]
    assert tops[0] == tops[1] == tops[2] < tops[3]  # a line feed ends the line
    assert picture.spec()["layer"][0]["encoding"]["color"]["scale"]["domain"][0] == (
        0 if sign > 0 else -2
    )


def test_a_long_text_is_broken_into_lines():
    drawn = [
        mark for mark in marks(pictures.tokens(torch.rand(40), [" word"] * 40)) if "value" in mark
    ]
    assert len(drawn) == 40 and len({mark["y0"] for mark in drawn}) > 2
    assert all(float(mark["x1"]) <= 640 for mark in drawn)


def test_a_token_lights_what_it_attends_to():
    pattern = torch.rand(3, 4, 4).tril()
    picture = pictures.attention_text(pattern, TOKENS, heads=["a", "b", "c"])
    lit = [mark for mark in marks(picture) if "key" in mark]
    assert [mark["key"] for mark in lit] == [
        "<bos>",
        "·Mary",
        "↵",
        "·Mary",
    ]  # of the last token, by all heads
    assert all(
        close(mark["mean weight"], value)
        for mark, value in zip(lit, pattern[:, -1].mean(0), strict=True)
    )
    assert [mark["head"] for mark in marks(picture) if "head" in mark] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="outside of 0 to 1"):
        pictures.attention_text(pattern * 3, TOKENS)
    with pytest.raises(ValueError, match="other keys than queries"):
        pictures.attention_text(torch.rand(3, 4, 5), TOKENS)


def test_an_overview_fits_a_screen():
    pattern = torch.rand(30, 1, 9, 6, 6)
    picture = pictures.attention(pattern, ["a", "b", "c", "d", "e", "f"])
    wide, high = map(
        float, re.search(r'width="([\d.]+)" height="([\d.]+)"', picture.svg()).groups()
    )
    assert wide <= 1232 and high <= 900
    drawn = marks(picture)
    assert len(drawn) == pattern.numel()
    for mark in drawn[::97]:
        layer, head = map(int, re.fullmatch(r"L(\d+)H(\d+)", mark["panel"]).groups())
        assert close(mark["weight"], pattern[layer, 0, head, int(mark["r"]), int(mark["c"])])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 9, 11, 12, 13])
def test_no_names_of_keys_stand_under_an_empty_panel(n):
    text = pictures.attention(torch.rand(n, 2, 2), ["query", "keyword"]).svg()
    upright = len(re.findall(r"rotate\(-90\)[^>]*>keyword<", text)) or text.count(">keyword<")
    facet = pictures.attention(torch.rand(n, 2, 2), ["query", "keyword"]).spec()
    if n > 1 and n % facet["encoding"]["facet"]["columns"]:
        assert (
            facet["resolve"]["axis"]["x"] == "independent"
            and text.count(">keyword<") >= n + upright - n
        )
    else:
        assert n == 1 or "resolve" not in facet or facet["resolve"]["axis"]["x"] == "shared"


def test_colour_bars_have_even_numbers():
    for picture in (
        pictures.heads(torch.tensor([[0.963, -0.2]])),
        pictures.attention(torch.rand(2, 3, 3), TOKENS[:3]),
    ):
        encoding = (picture.spec().get("layer") or [picture.spec()])[0]["encoding"]["color"]
        numbers = encoding["legend"]["values"]
        assert (
            len({round(b - a, 9) for a, b in itertools.pairwise(numbers)}) == 1
            and len(numbers) >= 3
        )
        assert numbers[-1] == encoding["scale"]["domain"][-1]


def test_several_pictures_as_one():
    one, other = (
        pictures.heads(torch.rand(2, 3)),
        pictures.patching(torch.rand(2, 4), "layer pos", TOKENS),
    )
    both = pictures.together([one, other], "Both")
    assert len(marks(both)) == len(marks(one)) + len(marks(other)) and ">Both<" in both.svg()
    with pytest.raises(ValueError, match="parts that answer a click"):
        pictures.together([one, pictures.circuit([("a", "b", 1.0)])], "Both")
    with pytest.raises(ValueError, match="no pictures"):
        pictures.together([], "None")


def test_circuit():
    edges = [("embed", "L0H1", 0.9), ("L0H1", "logits", -0.4), ("embed", "logits", 0.1)]
    drawn = marks(pictures.circuit(edges))
    weakest_first = sorted(edges, key=lambda edge: abs(edge[2]))  # what is strong is seen
    assert [(m["from"], m["to"], number(m["score"])) for m in drawn if "from" in m] == weakest_first
    assert [m["node"] for m in drawn if "node" in m] == ["embed", "L0H1", "logits"]


def deep_circuit(
    n_edges: int,
) -> tuple[list[tuple[str, str, float]], dict[str, pictures.CircuitNode]]:
    """Edges between heads and MLPs of thirty layers, and their columns."""
    numbers = torch.Generator().manual_seed(0)
    names = [
        "embed",
        *(f"L{i}{part}" for i in range(30) for part in ("H0", "H1", "H2", "H3", "MLP")),
        "logits",
    ]
    columns = {name: 0 if name == "embed" else 60 for name in ("embed", "logits")}
    columns |= {name: 2 * int(name[1:-2]) + 1 for name in names if "H" in name}
    columns |= {name: 2 * int(name[1:-3]) + 2 for name in names if name.endswith("MLP")}
    edges: dict[tuple[str, str], float] = {}
    while len(edges) < n_edges:
        one, other = torch.randint(0, len(names), (2,), generator=numbers).tolist()
        if columns[names[one]] < columns[names[other]]:
            edges[names[one], names[other]] = float(torch.randn(1, generator=numbers))
    ends = {name for pair in edges for name in pair}
    nodes = {name: pictures.CircuitNode(column=columns[name]) for name in ends}
    return [(*pair, score) for pair, score in edges.items()], nodes


@pytest.mark.parametrize("width", [340, 720, None])
@pytest.mark.parametrize("n_edges", [12, 60, 400])
def test_a_circuit_of_thirty_layers_fits(n_edges, width):
    """A column, and a page: as wide as that, every node and edge drawn, and no box on another
    one.
    """
    edges, nodes = deep_circuit(n_edges)
    picture = pictures.circuit(
        edges, nodes=nodes, title="A circuit with a title that has to be broken", width=width
    )
    svg = picture.svg()
    assert float(re.search(r'<svg[^>]* width="([\d.]+)"', svg).group(1)) <= (width or 720)
    drawn = marks(picture)
    assert len([m for m in drawn if "from" in m]) == n_edges
    assert len([m for m in drawn if "node" in m]) == len(nodes)
    (layer,) = (
        layer for layer in picture.spec()["hconcat"][0]["layer"] if layer["mark"]["type"] == "rect"
    )
    rows = json.loads(picture.spec()["datasets"][layer["data"]["name"]])
    assert len(rows) == len(nodes)
    places = [(row["x"], row["y"]) for row in rows]
    for (x, y), (other_x, other_y) in itertools.combinations(places, 2):
        assert abs(x - other_x) > layer["mark"]["width"] or abs(y - other_y) > 20


def test_a_graph_with_positions_fits_a_column():
    tokens = ["When", " Mary", " and", " John", " went"]
    nodes = {
        f"{layer}.{pos}": pictures.CircuitNode(column=layer, position=pos, label=f"L{layer} #{pos}")
        for layer in range(6)
        for pos in range(5)
    }
    edges = [
        (f"{layer}.{pos}", f"{layer + 1}.4", 1.0 + pos) for layer in range(5) for pos in range(5)
    ]
    nodes = {name: node for name, node in nodes.items() if any(name in edge[:2] for edge in edges)}
    picture = pictures.circuit(edges, nodes=nodes, tokens=tokens, width=340)
    svg = picture.svg()
    assert float(re.search(r'<svg[^>]* width="([\d.]+)"', svg).group(1)) <= 340
    assert all(f">{text}</text>" in svg for text in ("When", "·Mary", "L0 #3", "L5 #4"))
    with pytest.raises(ValueError, match="width is 60; the labels of these nodes") as refused:
        pictures.circuit(edges, nodes=nodes, tokens=tokens, width=60)
    least = int(re.search(r"need (\d+)", str(refused.value)).group(1))
    drawn = pictures.circuit(edges, nodes=nodes, tokens=tokens, width=least)
    width = float(re.search(r'<svg[^>]* width="([\d.]+)"', drawn.svg()).group(1))
    assert width <= least


def test_numbers_keep_what_the_eye_can_use():
    table = torch.tensor([[1.23456e-7, 123456.0], [-0.5, 0.0]])
    drawn = [number(m["value"]) for m in marks(pictures.heat_map(table)) if "value" in m]
    assert drawn[:4] == [1.235e-7, 123500, -0.5, 0]


@pytest.mark.parametrize("supports", ["positive", "negative"])
def test_the_colours_of_edges_say_what_supports_the_metric(supports):
    picture = pictures.circuit([("a", "b", 1.0), ("b", "c", -2.0)], supports=supports)
    lines = re.findall(r'aria-label="[^"]*from: ([^;"]*);[^>]* stroke="(#\w+)"', picture.svg())
    assert [sender for sender, _ in lines] == ["a", "b"]
    colours = [PALETTE["line"][0], PALETTE["accent"][0]]
    assert [colour for _, colour in lines] == (colours if supports == "positive" else colours[::-1])


def test_a_circuit_may_have_joins_apart_from_its_edges():
    assert pictures.circuit([("a", "b", 1.0)], joins=[("x", "y")]).svg()
