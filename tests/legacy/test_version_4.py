"""The public API of TransformerLens 4.3.0, name by name: there, refused with what to use, or
explained.

`python -m tests.legacy.test_version_4` writes the table in docs/migration.md; where
TransformerLens 4.3.0 is installed, it first writes its names and arguments to tests/data.
"""

import importlib
import importlib.metadata
import inspect
import json
from pathlib import Path

import pytest
import torch

import bridge.legacy
from bridge import TransformerBridge
from bridge.legacy import table

ROOT = Path(__file__).resolve().parents[2]
NAMES = ROOT / "tests" / "data" / "transformer_lens_4.json"
PAGE = ROOT / "docs" / "migration.md"
BEGIN, END = "<!-- written by python -m tests.legacy.test_version_4 -->\n", "<!-- until here -->\n"
#: Its classes, and ours.
CLASSES = {
    "transformer_lens.model_bridge:TransformerBridge": (
        "bridge.legacy.model_bridge:TransformerBridge"
    ),
    "transformer_lens.hook_points:HookPoint": "bridge.legacy.hook_points:HookPoint",
    "transformer_lens:ActivationCache": "bridge.legacy:ActivationCache",
    "transformer_lens.model_bridge.generalized_components.base:GeneralizedComponent": (
        "bridge.legacy.module_tree:Part"
    ),
    "transformer_lens:HookedRootModule": "bridge.legacy:HookedRootModule",
    "transformer_lens:FactoredMatrix": "bridge.legacy:FactoredMatrix",
    "transformer_lens:SVDInterpreter": "bridge.legacy:SVDInterpreter",
}
#: Its modules whose names programs import.
MODULES = (
    "",
    "model_bridge",
    "config",
    "hook_points",
    "utilities",
    "utilities.tensors",
    "patching",
    "tools.analysis",
)
#: What takes another method's arguments, besides its own.
PASSES_ON = {
    "run_with_cache": "forward",
    "run_with_hooks": "forward",
    "generate_stream": "generate",
    "hf_generate": "generate",
}


def named(place):
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def arguments(function):
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.items()
    return [
        name
        for name, parameter in found
        if parameter.kind not in kinds and name not in ("self", "cls")
    ]


def public(cls):
    """The public names of a class, with the arguments of those that are called."""
    of_torch = set(dir(torch.nn.Module))
    found = {}
    for name in sorted(set(dir(cls))):
        if name.startswith("_") or (name in of_torch and name not in vars(cls)):
            continue
        value = inspect.getattr_static(cls, name)
        function = getattr(value, "__func__", value)
        found[name] = arguments(function) if callable(function) else None
    return found


def read_installed():
    classes = {place: public(named(place)) for place in CLASSES}
    modules = {}
    for place in MODULES:
        module = importlib.import_module(f"transformer_lens.{place}".rstrip("."))
        ours = [
            name
            for name in dir(module)
            if not name.startswith("_") and _belongs(getattr(module, name), module)
        ]
        modules[place] = sorted({*ours, *getattr(module, "__all__", ())})
    return {"classes": classes, "modules": modules}


def _belongs(value, module):
    where = getattr(value, "__module__", None) or ""
    inside = (
        where.startswith("transformer_lens")
        if hasattr(module, "__path__")
        else where == module.__name__
    )
    return inside and not inspect.ismodule(value)


def version():
    try:
        return importlib.metadata.version("transformer-lens")
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(version() != "4.3.0", reason="TransformerLens 4.3.0 is not installed")
def test_the_names_are_those_of_the_installed_package():
    assert read_installed() == json.loads(NAMES.read_text())


def given_by(cls, name):
    """The arguments that a method of ours takes, those that it passes on to its parents'
    included.
    """
    found = set()
    for each in cls.__mro__:
        for method in (name, PASSES_ON.get(name)):
            value = vars(each).get(method)
            function = getattr(value, "__func__", value)
            if callable(function):
                found.update(arguments(function))
    return found


@pytest.mark.parametrize("place", CLASSES)
def test_every_name_of_a_class(place):
    cls, theirs = named(CLASSES[place]), json.loads(NAMES.read_text())["classes"][place]
    name_of = place.partition(":")[2]
    refused, differs = table.API.get(name_of, {}), table.DIFFERS.get(name_of, {})
    instance = set(dir(torch.nn.Module())) | {"original_model", "tokenizer", "cfg"}
    wrong = []
    for name, wanted in theirs.items():
        there = inspect.getattr_static(cls, name, None) is not None or name in instance
        if there == (name in refused):
            wrong.append(f"{name} is {'both there and refused' if there else 'missing'}")
        elif there and wanted:
            wrong += [
                f"{name}({argument})"
                for argument in wanted
                if argument not in given_by(cls, name)
                and f"{name}({argument})" not in differs
                and name not in differs
            ]
    assert not wrong
    for name in refused.keys() | {word.partition("(")[0] for word in differs}:
        assert name in theirs, f"{name} is no name of TransformerLens'"


@pytest.mark.parametrize("place", MODULES)
def test_every_name_of_a_module(place):
    ours = importlib.import_module(f"bridge.legacy.{place}".rstrip("."))
    for name in json.loads(NAMES.read_text())["modules"][place]:
        if table.why_not(ours.__name__, name) is not None:
            with pytest.raises((AttributeError, ImportError), match=r"docs/migration\.md"):
                getattr(ours, name)
        else:
            getattr(ours, name)


#: What ours call otherwise, in the same place and with the same meaning.
CALLED = {"hook": "hook_fn", "part": "submodule"}


@pytest.mark.parametrize(
    "ours", [TransformerBridge, bridge.legacy.TransformerBridge], ids=lambda cls: cls.__module__
)
def test_no_argument_means_another_thing_by_its_place(ours):
    """An argument that is given by its place means what it means there, or is refused: it is to be
    given by name.
    """
    theirs = json.loads(NAMES.read_text())["classes"][
        "transformer_lens.model_bridge:TransformerBridge"
    ]
    wrong = {}
    for name, wanted in theirs.items():
        value = inspect.getattr_static(ours, name, None)
        function = getattr(value, "__func__", value)
        if wanted is None or not inspect.isfunction(function):
            continue
        parameters = list(inspect.signature(function).parameters.values())[1:]
        by_place = [
            CALLED.get(p.name, p.name) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        if by_place[: len(wanted)] != wanted[: len(by_place)]:
            wrong[name] = by_place, wanted
    assert not wrong


def test_processing_by_place_is_refused():
    model = TransformerBridge.boot_embedded()
    before = model.W_U.clone()
    for call in (
        lambda: model.enable_compatibility_mode(True, True),
        lambda: model.process_weights(True),
        lambda: model.generate("Mary", 2, True, None, False, None, None, 1.0, 0.0, 1.0, True),
        lambda: model.hf_generate("Mary", 2),
        lambda: model("Mary", None, False, None, None, None, 1),
    ):
        with pytest.raises(TypeError, match="positional"):
            call()
    assert torch.equal(model.W_U, before)


@pytest.mark.parametrize(
    ("name", "line"),
    {
        "clear_hook_registry": "reset_hooks(including_permanent=True)",
        "QK_for_attn_layers": "bridge.stack_params_for('attn', 'attn.W_Q')",
        "OV_for_attn_layers": "bridge.stack_params_for('attn', 'attn.W_V')",
        "composition_layer_indices": "bridge.blocks_with('attn')",
        "block_hooks": "bridge.hook_dict",
        "block_submodules": "dir(bridge.blocks[0])",
        "prepare_multimodal_inputs": "AutoProcessor",
        "get_params": "tl_parameters()",
        "lm_head": "run.module('lm_head').output",
    }.items(),
)
def test_the_bridge_says_what_to_write_for_a_name_of_version_4(name, line):
    model = TransformerBridge.boot_embedded()
    with pytest.raises(AttributeError) as caught:
        getattr(model, name)
    assert line in str(caught.value)


def test_a_native_bridge_takes_hooked_transformers_configuration():
    cfg = {
        "n_layers": 1,
        "d_model": 16,
        "n_ctx": 16,
        "d_head": 4,
        "d_vocab": 20,
        "act_fn": "gelu",
        "device": "cpu",
    }
    theirs = bridge.legacy.HookedTransformer(bridge.legacy.HookedTransformerConfig(**cfg, seed=0))
    model = TransformerBridge.boot_native(bridge.legacy.HookedTransformerConfig(**cfg))
    before = model.W_E.clone()
    with pytest.raises(
        ValueError, match=r"bridge\.legacy\.HookedTransformer\(bridge\.original_model\)"
    ):
        model.load_state_dict(theirs.state_dict())
    assert torch.equal(model.W_E, before)
    bridge.legacy.HookedTransformer(model.original_model).load_state_dict(theirs.state_dict())
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.allclose(model(tokens), theirs(tokens), atol=1e-6)
    model.load_state_dict(model.state_dict())
    with pytest.raises(
        TypeError,
        match="boot_native takes a NativeConfig, its fields, or a HookedTransformerConfig",
    ):
        TransformerBridge.boot_native(model.cfg)


def test_a_refused_name_says_what_to_use():
    model = bridge.legacy.TransformerBridge.boot_native(
        {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_vocab": 9, "n_ctx": 5, "attn_only": True}
    )
    _, cache = model.run_with_cache([[1, 2, 3]])
    holders = {
        "TransformerBridge": model,
        "HookPoint": model.hook_embed,
        "GeneralizedComponent": model.blocks[0].attn,
        "HookedRootModule": bridge.legacy.HookedRootModule(),
        "ActivationCache": cache,
    }
    for name, refused in table.API.items():
        for attribute, instead in refused.items():
            with pytest.raises(AttributeError) as caught:
                getattr(holders[name], attribute)
            assert instead in str(caught.value)


def written():
    """The table in docs/migration.md."""
    theirs = {
        place.partition(":")[2]: found
        for place, found in json.loads(NAMES.read_text())["classes"].items()
    }
    lines = [
        "| TransformerLens 4.3.0 | names | here, with the same arguments | |",
        "|---|---|---|---|",
    ]
    for name, found in theirs.items():
        refused, differs = table.API.get(name, {}), table.DIFFERS.get(name, {})
        same = len(found) - len(refused) - len({word.partition("(")[0] for word in differs})
        lines.append(
            f"| `{name}` | {len(found)} | {same} | {len(refused)} refused, {len(differs)}"
            " explained |"
        )
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table():
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == written().strip()


if __name__ == "__main__":
    if version() == "4.3.0":
        NAMES.write_text(
            json.dumps(read_installed(), indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{written()}{END}{rest.partition(END)[2]}", encoding="utf-8")
