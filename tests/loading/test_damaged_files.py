"""What is read from files is data, and a damaged file is an error that names it, never another
number.
"""

import dataclasses
import random

import pytest
import torch

from adapters.kept import Declaration, DeclarationError
from adapters.sealed import sealed, unsealed
from bridge import TransformerBridge
from bridge.circuits import Circuit, Graph
from bridge.features import AttributionGraph, attribution_graph
from bridge.interventions import Add, Interventions, InterventionsFileError, Set, load
from bridge.lens import TunedLens
from tests.conftest import tiny


def damaged(rng, data):
    """Bytes that were cut short, of which a bit flipped, or that lost or won a few."""
    made, at = bytearray(data), rng.randrange(len(data))
    match rng.randrange(4):
        case 0:
            made[at] ^= 1 << rng.randrange(8)
        case 1:
            del made[at:]
        case 2:
            del made[at : at + rng.randrange(1, 9)]
        case _:
            made[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(made)


class Interventional:
    """Interventions with numbers of some kinds."""

    error = InterventionsFileError

    def __init__(self, bridge):
        self.bridge = bridge

    def write(self, path):
        v = torch.linspace(-1, 1, 32)
        pairs = [
            ("blocks.0.hook_resid_post", Add(v, scale=0.5)),
            ("blocks.1.hook_resid_post", Set(v.half(), heads=None)),
        ]
        Interventions(pairs, self.bridge).save(path)
        return [path]

    def read(self, path):
        return [
            (point, type(operation).__name__, *(vars(operation).items()))
            for point, operation in load(path, self.bridge)
        ]


class Circuital:
    """A circuit with scores."""

    error = ValueError

    def __init__(self, bridge):
        self.graph = Graph.of(bridge)

    def write(self, path):
        chosen = self.graph.exists & (
            torch.rand(self.graph.exists.shape, generator=torch.manual_seed(0)) < 0.3
        )
        Circuit(self.graph, chosen, torch.randn(chosen.shape, dtype=torch.float64)).save(path)
        return [path]

    def read(self, path):
        return Circuit.load(path).edges


class Graphed:
    """A graph of features."""

    error = ValueError

    def __init__(self, bridge):
        self.bridge, self.tokens = bridge, torch.tensor([[3, 4, 5]])
        directions = torch.eye(32)[:, :3]
        basis = {
            "encode": lambda x: (x @ directions).relu(),
            "decode": lambda features: features @ directions.T,
        }
        bridge.add_basis("blocks.0.hook_resid_post", "few", **basis)

    def write(self, path):
        found = attribution_graph(self.bridge, self.tokens, ["blocks.0.hook_resid_post.few"])
        found.save(path, self.bridge, self.tokens)
        return [path]

    def read(self, path):
        return sorted(vars(AttributionGraph.load(path)).items())


class Declared:
    """A declaration, as it is kept of models."""

    error = DeclarationError

    def __init__(self, bridge):
        self.declaration = bridge.declaration()

    def write(self, path):
        self.declaration.save(path)
        return [path]

    def read(self, path):
        return [dataclasses.replace(Declaration.load(path), name="")]


class Tuned:
    """A tuned lens: two files in a folder."""

    error = ValueError

    def __init__(self, bridge):
        self.bridge = bridge

    def write(self, path):
        torch.manual_seed(0)
        lens = TunedLens(self.bridge.cfg.n_layers, self.bridge.cfg.d_model)
        with torch.no_grad():
            for parameter in lens.parameters():
                parameter.normal_()
        lens.save(path)
        return sorted(path.iterdir())

    def read(self, path):
        lens = TunedLens.load(path, self.bridge)
        return sorted((name, value) for name, value in lens.state_dict().items())


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("times", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [Interventional, Circuital, Graphed, Declared, Tuned])
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of what it finds in a damaged pickle
def test_damaged_files_never_give_another_number(tmp_path, kind, times):
    reader = kind(TransformerBridge(tiny("llama")))
    place = tmp_path / "it"
    files = reader.write(place)
    expected = reader.read(place)
    assert expected
    rng, refused = random.Random(0), 0
    for _ in range(times):
        file = rng.choice(files)
        data = file.read_bytes()
        made = damaged(rng, data)
        file.write_bytes(made)
        try:
            found = reader.read(place)
        except reader.error as error:
            assert str(file) in str(error)  # noqa: PT017
            refused += 1
        else:
            assert same(found, expected), (file.name, data, made)
        file.write_bytes(data)
    assert refused > 0.8 * times


def test_a_seal(tmp_path):
    assert unsealed(sealed({"a": [1.5, None], "b": {"c": "d"}})) == {
        "a": [1.5, None],
        "b": {"c": "d"},
    }
    assert unsealed('{"a": 1}') == {"a": 1}  # from before there were checksums
    for text in ('{"a": 1', "[1]", "[" * 100_000, b"\xff", sealed({"a": 1}).replace("1", "2", 1)):
        with pytest.raises(ValueError, match=r"Expecting|object|deeply|decode|checksum"):
            unsealed(text)
    with pytest.raises(ValueError, match="JSON compliant"):
        sealed({"a": float("nan")}, allow_nan=False)


def test_interventions_from_before_there_were_checksums(tmp_path):
    """A file of the first version, as it was written."""
    from tests.interventions.test_files import ENTRY, POINT, write

    bridge = TransformerBridge(tiny("llama"))
    write(tmp_path / "old", [ENTRY], version=1)
    ((point, operation),) = load(tmp_path / "old", bridge)
    assert point == POINT and torch.equal(operation.value, torch.ones(32))
