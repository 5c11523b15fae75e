"""Adapters from other packages, through entry points, and models that have no adapter."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from adapters import UnsupportedModelError, families, map_model, register, registry, supported
from adapters.families.llama import llama
from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny

ADAPTER = """
from adapters import register
from adapters.families.llama import llama_like


@register("StableLmPreTrainedModel")
def mine(config):
    return llama_like(config, config_values={"extra": {"from": "another package"}})
"""

USE = """
from adapters import UnsupportedModelError, map_model, supported
from transformers import StableLmConfig, StableLmModel

print("StableLmPreTrainedModel" in supported())
config = StableLmConfig(
    vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=8,
)
print(map_model(StableLmModel(config)).cfg.extra)
"""


def install(folder: Path, package: str, code: str | None, target: str) -> None:
    """Writes an installed distribution with one entry point."""
    if code is not None:
        (folder / f"{package}.py").write_text(code)
    info = folder / f"{package}-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 0.3\n"
    )
    (info / "entry_points.txt").write_text(f"[transformer_bridge.adapters]\nstable_lm = {target}\n")


#: What is registered before its family is imported stays.
FIRST = """
from adapters import map_model, register
from transformers import Qwen3Config, Qwen3Model, Qwen2Config, Qwen2Model

sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
             num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=8, head_dim=4)

@register("Qwen3PreTrainedModel")
def mine(config):
    raise SystemExit("mine")

map_model(Qwen2Model(Qwen2Config(**sizes)))  # whose family's file declares the other, too
try:
    map_model(Qwen3Model(Qwen3Config(**sizes)))
except SystemExit as mine:
    print(mine)
"""


def test_another_package_brings_an_adapter_and_what_is_registered_first_stays(
    tmp_path: Path,
) -> None:
    """In a fresh interpreter, which finds the folder's distributions beside our own."""
    install(tmp_path, "my_adapters", ADAPTER, "my_adapters")
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    done = subprocess.run(
        [sys.executable, "-c", FIRST + USE], env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["mine", "True", "{'from': 'another package'}"], done.stderr


@pytest.mark.parametrize(
    ("code", "target", "error", "message"),
    [
        (None, "nowhere", ModuleNotFoundError, "No module named 'nowhere'"),
        (ADAPTER, "broken:absent", AttributeError, "module 'broken' has no attribute 'absent'"),
        ("1 / 0", "broken", ZeroDivisionError, "division by zero"),
    ],
)
def test_an_adapter_that_cannot_be_imported_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str | None,
    target: str,
    error: type,
    message: str,
) -> None:
    install(tmp_path, "broken", code, target)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    # Other packages are looked for once in a process, and there is one process for all tests.
    monkeypatch.setattr(registry, "_loaded", False)
    for _ in range(2):  # it is not forgotten after the first time
        with pytest.raises(error, match=message) as caught:
            supported()
        (note,) = caught.value.__notes__
        assert f"importing the adapter 'stable_lm' ({target}), which broken 0.3 declares" in note
        assert "transformer_bridge.adapters" in note
    sys.modules.pop("broken", None)


def test_a_model_without_an_adapter_is_refused() -> None:
    class LlamoPreTrainedModel(nn.Module):
        pass

    with pytest.raises(
        UnsupportedModelError, match=r"no adapter for LlamoPreTrainedModel\. The nearest are Llama"
    ):
        map_model(LlamoPreTrainedModel())


def test_a_subclass_and_a_newly_registered_class_are_found() -> None:
    model = tiny("llama-gqa")

    class MyLlama(type(model)):  # type: ignore[misc]
        pass

    model.__class__ = MyLlama
    assert TransformerBridge(model).cfg.original_architecture == "MyLlama"
    assert "MyLlama" not in supported()
    assert register("MyLlama")(llama) is llama
    assert "MyLlama" in supported() and map_model(model).block_paths == [
        "model.layers.0",
        "model.layers.1",
    ]


def test_the_list_of_classes_names_what_the_files_declare() -> None:
    files = sorted(
        path.stem for path in Path(families.__path__[0]).glob("*.py") if path.stem != "__init__"
    )
    assert sorted(families.CLASSES) == files
    for file, functions in families.CLASSES.items():
        module = importlib.import_module(f"adapters.families.{file}")
        assert all(vars(module)[name].__module__ == module.__name__ for name in functions)
    every = [
        name
        for functions in families.CLASSES.values()
        for names in functions.values()
        for name in names
    ]
    assert len(set(every)) == len(every)


def test_importing_the_class_loads_no_family_and_no_proof() -> None:
    """Nor beartype, which cannot be imported after nnsight: that adds a method to `object`."""
    code = (
        "import sys; sys.modules['beartype'] = None; from bridge import TransformerBridge;"
        " print(*sys.modules)\n"
    )
    code += (
        "from bridge.arguments import check_types; check_types('f', {'x': ['a']}, {'x': list[str]})"
    )
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    assert "bridge.run.run" in loaded
    rooms = (
        "adapters.families.",
        "adapters.automatic.",
        "bridge.trace.",
        "bridge.programs.",
        "bridge.generation.",
    )
    rooms += (
        "bridge.lens.",
        "bridge.loading.",
        "bridge.patching",
        "bridge.legacy",
        "bridge.pictures",
        "bridge.export",
    )
    rooms += ("adapters.proofs.proofs", "beartype.")
    assert not [name for name in loaded if name.startswith(rooms)]
