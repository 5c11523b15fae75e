"""What is no file of interventions, or one for another model, is refused by name; nothing is
executed.
"""

import json
import pickle
import struct
import warnings

import pytest
import torch
from safetensors.torch import save_file

from bridge import TransformerBridge, UnknownHookError
from bridge.interventions import (
    Add,
    Interventions,
    InterventionsFileError,
    OtherModelError,
    Zero,
    load,
)
from tests.conftest import tiny

POINT, HEADER = "blocks.1.hook_resid_post", "transformer_bridge_interventions"
WHERE = {
    "positions": None,
    "keys": None,
    "heads": None,
    "features": None,
    "rows": None,
    "part": "all",
    "from_step": 0,
}
ENTRY = {"point": POINT, "operation": "Add", "value": {"tensor": "v"}, "scale": 1.0, **WHERE}


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge(tiny("llama"))


def write(file, entries, tensors=None, **header):
    tensors = {"v": torch.ones(32)} if tensors is None else tensors
    said = {"version": 1, "model": None, "interventions": entries, **header}
    save_file(tensors, file, {HEADER: said if isinstance(said, str) else json.dumps(said)})


def changed(**fields):
    return [{**ENTRY, **fields}]


#: What is wrong, how the file is made, what the error says.
HOSTILE = {
    "unknown operation": (
        changed(operation="system"),
        "the operation 'system'; there are Set, Add",
    ),
    "the base of all": (changed(operation="Operation"), "the operation 'Operation'"),
    "an operation that is no name": (changed(operation=["Add"]), "the operation"),
    "unknown point": (changed(point="blocks.7.hook_resid_post"), "blocks.7.hook_resid_post"),
    "a point that is no name": (changed(point=7), "no name"),
    "a field too many": (changed(harm="x"), "it needs"),
    "a field too few": (
        [{name: value for name, value in ENTRY.items() if name != "rows"}],
        "it needs",
    ),
    "no object": (["Add"], "no object"),
    "no list": ({"a": 1}, "no list"),
    "a tensor that is not there": (changed(value={"tensor": "w"}), "the tensor 'w'"),
    "a number of text": (changed(value="os.system('x')"), "has to be a number"),
    "an input of code": (changed(value={"input": "__import__('os')"}), "cannot be the name"),
    "a truth value": (changed(value=True), "has to be a number"),
    "a head too many": (
        [{**ENTRY, "point": "blocks.1.attn.hook_z", "value": 1.0, "heads": [4]}],
        "has 4 of them",
    ),
    "heads where there are none": (changed(heads=[0]), "no heads among them"),
    "a backward slice": (changed(positions={"slice": [0, 3, -1]}), "goes forwards"),
    "half a slice": (changed(positions={"slice": [0, 3]}), "numbers or a slice"),
    "a position of text": (changed(positions="first"), "positions is 'first'"),
    "a position of truth": (changed(positions=[True]), "positions is"),
    "an unknown part": (changed(part="thoughts"), "part is 'thoughts'"),
    "a step below nought": (changed(from_step=-1), "from_step is -1"),
    "tokens chosen twice": (changed(from_step=2, part="prompt"), "give one of them"),
}


@pytest.mark.unchecked  # a file names wrong types, and what says so is ours
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(bridge, tmp_path, name):
    entries, said = HOSTILE[name]
    write(tmp_path / "x", entries, None if "tensor" in json.dumps(entries) else {})
    with pytest.raises(InterventionsFileError, match="cannot be used") as caught:
        load(tmp_path / "x", bridge)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"v": torch.ones(31)}, "has shape [31]"),
        ({"v": torch.ones(2, 5, 32)}, "one number for all positions"),
        ({"v": torch.ones(1, 1, 1, 32)}, "has shape [1, 1, 1, 32]"),
        ({"v": torch.ones(32), "w": torch.ones(1)}, "the tensors w are numbers of nothing"),
    ],
)
def test_hostile_tensors_are_refused(bridge, tmp_path, tensors, said):
    write(tmp_path / "x", [ENTRY], tensors)
    with pytest.raises(InterventionsFileError) as caught:
        load(tmp_path / "x", bridge)
    assert said in str(caught.value)


class Boom:
    def __reduce__(self):
        return pytest.fail, ("it was executed",)


def test_hostile_bytes_are_refused(bridge, tmp_path):
    file = tmp_path / "x"
    Interventions([(POINT, Add(torch.ones(32)))], bridge).save(file)
    good = file.read_bytes()
    deep = b'{"__metadata__":{"' + HEADER.encode() + b'":"' + b"[" * 100000 + b'"}}'
    for content in [
        b"",
        b"no tensors at all",
        good[:40],
        good[:-8],
        struct.pack("<Q", 2**60) + good[8:],
        pickle.dumps(Boom()),
        struct.pack("<Q", len(deep)) + deep,
    ]:
        file.write_bytes(content)
        with pytest.raises(InterventionsFileError):
            load(file, bridge)
    save_file({"v": torch.ones(1)}, file)
    with pytest.raises(InterventionsFileError, match="nothing says which"):
        load(file, bridge)
    save_file(
        {"v": torch.ones(1)}, file, {HEADER: '{"version": 1, "model": null, "interventions": NaN}'}
    )
    with pytest.raises(InterventionsFileError, match="NaN"):
        load(file, bridge)
    with pytest.raises(InterventionsFileError):
        load(tmp_path, bridge)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load(tmp_path / "nowhere", bridge)


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_another_version_is_refused(bridge, tmp_path, version):
    write(tmp_path / "x", [ENTRY], version=version)
    with pytest.raises(InterventionsFileError, match="version"):
        load(tmp_path / "x", bridge)


def test_another_model_is_refused_and_another_name_warned_of(bridge, tmp_path):
    file = tmp_path / "x"
    Interventions([(POINT, Add(0.5))], bridge).save(file)
    with pytest.raises(
        OtherModelError, match="class 'LlamaForCausalLM' there, 'GPT2LMHeadModel' here"
    ):
        load(file, TransformerBridge(tiny("gpt2")))
    processed = TransformerBridge(tiny("llama"))
    processed.process_weights()
    with pytest.raises(OtherModelError, match="processing"):
        load(file, processed)
    same = TransformerBridge(tiny("llama"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(file, same) == Interventions([(POINT, Add(0.5))])
    same.core.config.name_or_path = "another"
    other = TransformerBridge(same.core)
    with pytest.warns(UserWarning, match="what their features mean may not be"):
        load(file, other)


def test_what_cannot_be_saved_says_so(bridge, tmp_path):
    class Mine(Zero):
        pass

    for function in (lambda x, hook: x, Mine()):
        made = Interventions([(POINT, function)], bridge)
        assert bridge.run_with_hooks(torch.tensor([[1, 2]]), fwd_hooks=made).shape == (
            1,
            2,
            61,
        )  # and goes everywhere
        with pytest.raises(TypeError, match="no data and cannot be saved"):
            made.save(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(UnknownHookError):
        Interventions([("blocks.9.hook_z", Zero())], bridge)
