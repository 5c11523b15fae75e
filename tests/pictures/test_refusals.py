"""What is no picture is an error that says what was given and what would work."""

import subprocess
import sys

import pytest
import torch

from bridge import pictures
from bridge.hooks.studied_bridge import StudiedBridge

T = ["a", "b"]


class Words(StudiedBridge):
    def to_single_str_token(self, int_token):
        return str(int_token)


CASES = {
    "a batch of patterns": (
        lambda: pictures.attention(torch.rand(3, 4, 2, 2), T),
        r"batch of 3.*\[0\]",
    ),
    "a vector": (
        lambda: pictures.attention(torch.rand(4), T),
        r"\[head, query, key\]; the shape is \[4\]",
    ),
    "too few tokens": (
        lambda: pictures.attention(torch.rand(2, 2, 2), ["a"]),
        "1 tokens, and 2 positions",
    ),
    "NaN": (
        lambda: pictures.attention(torch.full((1, 2, 2), torch.nan), T),
        r"4 values .* nan at \[0, 0, 0\]",
    ),
    "infinite": (lambda: pictures.heads(torch.tensor([[1.0, torch.inf]])), r"inf at \[0, 1\]"),
    "masked heads": (
        lambda: pictures.heads(torch.tensor([[1.0, -torch.inf]])),
        r"-inf at \[0, 1\]",
    ),
    "empty": (lambda: pictures.heads(torch.zeros(0, 2)), r"shape \[0, 2\] hold no value"),
    "batch of heads": (
        lambda: pictures.heads(torch.rand(2, 3, 4)),
        r"2 rows: take one, \[0\], or their mean",
    ),
    "lens of a batch": (
        lambda: pictures.logit_lens(torch.rand(3, 2, 2, 5), T, Words()),
        "of one prompt",
    ),
    "top": (lambda: pictures.logit_lens(torch.rand(3, 2, 5), T, Words(), top=6), "from 1 to 5"),
    "unknown axis": (
        lambda: pictures.patching(torch.rand(2, 2), "layer position"),
        "'layer position'; it must name",
    ),
    "one axis": (lambda: pictures.patching(torch.rand(2), "layer"), "two or more"),
    "other axes": (
        lambda: pictures.patching(torch.rand(2, 2, 2), "layer head"),
        r"2 axes.*\[2, 2, 2\]",
    ),
    "no tokens": (
        lambda: pictures.patching(torch.rand(2, 2), "layer pos"),
        "text of its 2 positions",
    ),
    "clean alone": (
        lambda: pictures.patching(torch.rand(2, 2), "layer head", clean=1.0),
        "both clean and corrupted",
    ),
    "no difference": (
        lambda: pictures.patching(torch.rand(2, 2), "layer head", clean=1.0, corrupted=1.0),
        "nothing that patching could restore",
    ),
    "names of components": (
        lambda: pictures.attribution(torch.rand(3), ["x"]),
        "1 components, and 3",
    ),
    "positions without tokens": (
        lambda: pictures.attribution(torch.rand(3, 4), ["x"] * 3),
        "tokens would name",
    ),
    "composition of three axes": (
        lambda: pictures.composition(torch.rand(2, 2, 2)),
        r"\[layer, head, layer, head\]",
    ),
    "one layer": (lambda: pictures.composition(torch.rand(1, 2, 1, 2)), "of one layer"),
    "stream of a batch": (
        lambda: pictures.residual_norms(torch.rand(3, 2, 2, 5), T),
        "of one prompt",
    ),
    "negative weights": (
        lambda: pictures.routing(torch.tensor([[-1.0, 2.0]]), ["a"]),
        "not hook_router_logits",
    ),
    "weights of all experts": (
        lambda: pictures.routing(torch.tensor([[0.7, 0.3]]), ["a"]),
        "does not tell the chosen ones",
    ),
    "different layers": (
        lambda: pictures.routing({0: torch.rand(2, 3), 1: torch.rand(2, 4)}, T),
        r"different shapes, \[\[2, 3\], \[2, 4\]\]",
    ),
    "indices of other experts": (
        lambda: pictures.routing(torch.rand(2, 2), T, torch.tensor([[0, 9], [1, 2]]), n_experts=4),
        "there are 4 experts",
    ),
    "indices alone": (
        lambda: pictures.routing(torch.rand(2, 2), T, torch.zeros(2, 2).long()),
        "how many experts",
    ),
    "indices of another shape": (
        lambda: pictures.routing(torch.rand(2, 8), T, torch.zeros(2, 2).long(), n_experts=8),
        "hook_expert_indices",
    ),
    "no layers": (lambda: pictures.routing({}, T), "dictionary of them by layer"),
    "no edges": (lambda: pictures.circuit([]), "no edges"),
    "an edge twice": (
        lambda: pictures.circuit([("a", "b", 1.0), ("a", "b", 2.0)]),
        "more than once",
    ),
    "unknown node": (
        lambda: pictures.circuit([("a", "b", 1.0)], nodes={"c": pictures.CircuitNode()}),
        "'c' is one of the nodes, and no edge",
    ),
    "no tokens of a circuit": (
        lambda: pictures.circuit(
            [("a", "b", 1.0)], nodes={"a": pictures.CircuitNode(position=2)}, tokens=["x"]
        ),
        "'a' is at position 2, and there are 1 tokens",
    ),
    "no band": (
        lambda: pictures.circuit(
            [("a", "b", 1.0)], nodes={"a": pictures.CircuitNode(position=0)}, tokens=["x"]
        ),
        "'b' has no band, and others have one",
    ),
    "pattern of a circuit": (
        lambda: pictures.circuit(
            [("a", "b", 1.0)], nodes={"a": pictures.CircuitNode(pattern=torch.rand(2, 2))}
        ),
        r"shape \[2, 2\], and there are 0 tokens",
    ),
    "circle": (lambda: pictures.circuit([("a", "b", 1.0), ("b", "a", 2.0)]), "in a circle"),
    "NaN edge": (lambda: pictures.circuit([("a", "b", float("nan"))]), r"nan at \[0\]"),
    "panels of a table": (
        lambda: pictures.heat_map(torch.rand(2, 2), panels=["a"]),
        "one panel only",
    ),
    "ending": (
        lambda: pictures.heads(torch.rand(2, 2)).save("x.gif"),
        r"\.html, \.png, \.svg or \.pdf",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_values(case):
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pictures.attention(torch.rand(1, 2, 2), "ab"),
            r"tokens is str 'ab'.*to_str_tokens",
        ),
        (
            lambda: pictures.attention(torch.rand(1, 2, 2), torch.tensor([1, 2])),
            "tokens is Tensor.*to_str_tokens",
        ),
        (lambda: pictures.heads([[1.0]]), "must be a tensor; it is list"),
        (lambda: pictures.heads(torch.ones(2, 2, dtype=torch.bool)), "torch.bool"),
        (lambda: pictures.heat_map(torch.rand(2, 2), "ab"), "give a list of 2 names"),
        (lambda: pictures.circuit([("a", "b")]), r"one is \('a', 'b'\)"),
        (lambda: pictures.page("x", [3]), "a text or a picture"),
    ],
)
def test_types(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("missing", ["altair", "vl_convert"])
def test_without_the_extra_the_error_says_the_command(missing):
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        f"u.find_spec = lambda name, *rest: None if name == {missing!r} else find(name, *rest)\n"
        "import bridge\n"
        "try:\n    import bridge.pictures\nexcept ImportError as error:\n    print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert missing in said and "pip install 'transformer-bridge[pictures]'" in said
