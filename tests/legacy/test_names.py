"""The names that a notebook imports, and the models' names."""

import importlib
import subprocess
import sys
import types

import pytest

import bridge.legacy as transformer_lens
from bridge import ActivationCache, TransformerBridge
from bridge.legacy import table
from bridge.legacy.loading_from_pretrained import (
    MODEL_ALIASES,
    OFFICIAL_MODEL_NAMES,
    get_official_model_name,
    make_model_alias_map,
)


@pytest.mark.parametrize("name", transformer_lens.__all__)
def test_every_name_is_there(name):
    found = getattr(transformer_lens, name)
    assert found is not None
    assert name in dir(transformer_lens)


@pytest.mark.parametrize(
    "name",
    [
        "HookedTransformer",
        "HookedTransformerConfig",
        "HookedEncoder",
        "ActivationCache",
        "FactoredMatrix",
    ],
)
def test_a_class_and_its_module_have_one_name(name):
    module = importlib.import_module(f"bridge.legacy.{name}")
    assert isinstance(getattr(transformer_lens, name), type)
    assert getattr(module, name) is getattr(transformer_lens, name)


def test_the_ways_to_import():
    import bridge.legacy.utils as utils
    from bridge.legacy import EasyTransformer, HookedTransformer, loading, patching
    from bridge.legacy.HookedTransformer import HookedTransformer as again
    from bridge.legacy.utils import get_act_name

    assert HookedTransformer is again is EasyTransformer
    assert issubclass(HookedTransformer, TransformerBridge)
    assert transformer_lens.ActivationCache is ActivationCache
    assert utils.get_act_name is get_act_name
    assert loading.OFFICIAL_MODEL_NAMES is OFFICIAL_MODEL_NAMES
    assert callable(patching.get_act_patch_resid_pre)


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, bridge.legacy; assert 'torch' not in sys.modules and 'transformers' not in"
        " sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["HookedAudioEncoder", "lit", "factories"])
def test_what_is_not_offered_says_why(name):
    with pytest.raises(AttributeError, match=f"no {name}: .*docs/migration.md"):
        getattr(transformer_lens, name)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "from bridge.legacy.utils import print_gpu_mem",
            r"no print_gpu_mem: torch\.cuda\.memory_allocated",
        ),
        (
            "from bridge.legacy.loading_from_pretrained import convert_gpt2_weights",
            "not converted but viewed",
        ),
        ("from bridge.legacy.utils import get_act_nam", "Did you mean get_act_name"),
        (
            "from bridge.legacy.components.bert_block import BertBlock",
            "no bert_block: HookedEncoder's parts",
        ),
        ("from bridge.legacy.utilities.addmm import batch_addmm", "no addmm: .*Hugging Face"),
    ],
)
def test_an_import_says_why(line, why):
    with pytest.raises(ImportError, match=why):
        exec(line)
    assert not hasattr(transformer_lens.utils, "print_gpu_mem")


@pytest.mark.unchecked
def test_an_import_of_something_else_asks_as_anyone(monkeypatch):
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = lambda name: hasattr(transformer_lens, "not_there")
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    from lazy import thing

    assert thing is False


@pytest.mark.parametrize(
    "name", ["convert_hf_model_config", "get_basic_config", "NEED_REMOTE_CODE_MODELS"]
)
def test_what_loading_does_not_offer_says_why(name):
    with pytest.raises(AttributeError, match=f"no {name}: .*docs/migration.md"):
        getattr(transformer_lens.loading, name)


NAMES = {
    "HookedTransformer": (
        "HookedRootModule HookPoint Loss Output ActivationCache FactoredMatrix utils"
        " USE_DEFAULT_VALUE DTYPE_FROM_STRING SingleLoss LossPerToken"
        " HookedTransformerKeyValueCache HookedTransformerConfig loading LayerNormPre"
    ),
    "components": (
        "LayerNorm LayerNormPre RMSNorm RMSNormPre Embed PosEmbed Unembed Attention"
        " AbstractAttention GroupedQueryAttention MLP GatedMLP MoE TransformerBlock BertEmbed"
    ),
    "components.mlps.can_be_used_as_mlp": "CanBeUsedAsMLP",
    "components.mlps.mlp": "MLP",
    "components.mlps.gated_mlp": "GatedMLP",
    "components.attention": "Attention",
    "hook_points": "HookPoint HookedRootModule LensHandle HookFunction NamesFilter DeviceType",
    "loading_from_pretrained": (
        "get_official_model_name get_pretrained_model_config get_checkpoint_labels"
    ),
    "head_detector": "detect_head",
    "patching": (
        "get_act_patch_resid_pre get_act_patch_attn_head_all_pos_every generic_activation_patch"
    ),
    "past_key_value_caching": "HookedTransformerKeyValueCache HookedTransformerKeyValueCacheEntry",
    "ActivationCache": "ActivationCache",
}


@pytest.mark.parametrize("module", NAMES)
def test_what_programs_import_is_there(module):
    found = importlib.import_module(f"bridge.legacy.{module}")
    assert not [name for name in NAMES[module].split() if not hasattr(found, name)]


@pytest.mark.parametrize("module", table.NAMES)
def test_every_row_of_the_table_leads_somewhere(module):
    found = importlib.import_module(
        "bridge.legacy" if module == "package" else f"bridge.legacy.{module}"
    )
    for name, place in table.NAMES[module].items():
        assert getattr(found, name) is not None or name == "USE_DEFAULT_VALUE", place


@pytest.mark.parametrize("module", table.MODULES)
def test_every_module_of_the_table_is_there(module):
    assert importlib.import_module(f"bridge.legacy.{module}") is table.locate(table.MODULES[module])
    if module.startswith(
        "tools."
    ):  # whose functions have the names of their modules: other tests ask for these
        vars(table.locate("studies")).pop(module.rpartition(".")[2])


def test_modules_below_others_are_found_without_an_import_of_their_own():
    """In one process of its own, in which nothing of them is imported before."""
    below = [
        module
        for module in table.MODULES
        if "." in module and not module.startswith("tools.analysis.")
    ]
    lines = ["import bridge.legacy as tl", *(f"print(tl.{module}.__name__)" for module in below)]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    places = [table.MODULES[module] for module in below]
    wanted = [
        place if place.startswith("bridge.") else f"bridge.legacy.{place}" for place in places
    ]
    assert done.stdout.split() == wanted


def test_a_star_takes_what_the_table_adds():
    taken = {}
    exec("from bridge.legacy.utils import *", taken)
    assert (
        taken["get_act_name"]("k", 2) == "blocks.2.attn.hook_k"
        and "to_numpy" in taken
        and "Slice" in taken
    )


def test_a_misspelt_name_gets_a_suggestion():
    with pytest.raises(AttributeError, match="Did you mean HookedTransformer"):
        transformer_lens.HookedTransfomer  # noqa: B018


@pytest.mark.parametrize(
    ("short", "hub"),
    [
        ("gpt2-small", "gpt2"),
        ("GPT2", "gpt2"),
        ("distillgpt2", "distilgpt2"),
        ("opt-small", "facebook/opt-125m"),
        ("gpt-neo-125m", "EleutherAI/gpt-neo-125M"),
        ("gpt-j-6B", "EleutherAI/gpt-j-6B"),
        ("pythia", "EleutherAI/pythia-70m"),
        ("pythia-350m-deduped", "EleutherAI/pythia-410m-deduped"),
        ("pythia-1.4b-deduped-v0", "EleutherAI/pythia-1.4b-deduped-v0"),
        ("stanford-gpt2-small-a", "stanford-crfm/alias-gpt2-small-x21"),
        ("stanford-gpt2-medium-c", "stanford-crfm/celebrimbor-gpt2-medium-x81"),
        ("llama-7b", "huggyllama/llama-7b"),
        ("Llama-2-7b-chat", "meta-llama/Llama-2-7b-chat-hf"),
        ("tiny-stories-instruct-1L-21M", "roneneldan/TinyStories-Instuct-1Layer-21M"),
        ("mistral-7b", "mistralai/Mistral-7B-v0.1"),
        ("qwen1.5-0.5b-chat", "Qwen/Qwen1.5-0.5B-Chat"),
        ("gemma-2-2b-it", "google/gemma-2-2b-it"),
        ("gemma-2b", "google/gemma-2b"),
        ("phi-3", "microsoft/Phi-3-mini-4k-instruct"),
        ("stablelm-base-3b", "stabilityai/stablelm-base-alpha-3b"),
        ("somebody/some-model", "somebody/some-model"),
    ],
)
def test_model_names(short, hub):
    assert get_official_model_name(short) == hub


def test_each_name_is_of_one_model():
    owners = [(name.lower(), hub) for hub, short in MODEL_ALIASES.items() for name in (hub, *short)]
    assert dict(owners) == make_model_alias_map()
    assert len({name for name, _ in owners}) == len(set(owners))
    assert len(OFFICIAL_MODEL_NAMES) == len(set(OFFICIAL_MODEL_NAMES)) > 190


def test_an_unknown_model_gets_a_suggestion():
    with pytest.raises(
        ValueError, match=r"no model is known as 'gpt2-smal'. Did you mean gpt2-small"
    ):
        get_official_model_name("gpt2-smal")
