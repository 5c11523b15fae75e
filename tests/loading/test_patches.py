"""Classes replaced for one load: there for that load alone, put back after it, whatever happens."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Concatenate, WeightConverter
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from transformers.monkey_patching import (
    clear_patch_mapping,
    get_patch_mapping,
    register_patch_mapping,
)

from adapters import verify
from adapters.imports import has_transformers
from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny
from tests.loading.patched_qwen2_moe import FusedAttention, SequentialExperts

pytestmark = pytest.mark.skipif(
    not has_transformers("5.21"), reason="transformers is older than 5.21: tests/versions"
)


class FusedLlamaAttention(FusedAttention):
    bias = False


class MyAttention(LlamaAttention):
    """Counts its calls."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        type(self).calls += 1
        return super().forward(*args, **kwargs)


class MyMLP(LlamaMLP):
    """As it was."""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny("llama-gqa").save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = {
        name: value for name, value in vars(modeling_llama).items() if isinstance(value, type)
    }
    recorders = {
        name: dict(value._can_record_outputs or {})
        for name, value in before.items()
        if name == "LlamaModel"
    }
    yield
    assert {
        name: value for name, value in vars(modeling_llama).items() if isinstance(value, type)
    } == before
    assert dict(before["LlamaModel"]._can_record_outputs or {}) == recorders["LlamaModel"]
    clear_patch_mapping()


@pytest.mark.parametrize("name", ["LlamaAttention", "^Llama.*Attention$"])
def test_the_load_has_it_and_no_other(folder: str, name: str):
    tokens = torch.tensor([[3, 4, 5, 6]])
    plain = TransformerBridge.boot_transformers(folder)
    bridge = TransformerBridge.boot_transformers(folder, patches={name: MyAttention})
    assert {type(layer.self_attn) for layer in bridge.core.model.layers} == {MyAttention}
    assert get_patch_mapping() == {}
    assert (
        type(TransformerBridge.boot_transformers(folder).core.model.layers[0].self_attn)
        is LlamaAttention
    )
    before = MyAttention.calls
    logits, cache = bridge.run_with_cache(tokens)
    assert MyAttention.calls == before + 2
    wanted, expected = plain.run_with_cache(tokens)
    assert torch.equal(logits, wanted)
    assert all(torch.equal(cache[key], expected[key]) for key in expected)
    assert verify(bridge).passed
    program = bridge.program(capture=["blocks.1.attn.hook_pattern"])
    assert torch.equal(
        program(tokens)["blocks.1.attn.hook_pattern"], cache["blocks.1.attn.hook_pattern"]
    )


def test_attentions_are_recorded_of_patched_and_of_other_models(folder: str):
    tokens = torch.tensor([[3, 4, 5, 6]])
    patched = TransformerBridge.boot_transformers(
        folder, patches={"LlamaAttention": MyAttention}, attn_implementation="eager"
    )
    other = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    made = [model(tokens, output_attentions=True).attentions for model in (patched.core, other)]
    assert [len(x) for x in made] == [2, 2]
    assert torch.equal(made[0][1], made[1][1])


def test_a_load_that_fails_leaves_nothing_behind(folder: str):
    class Broken(LlamaAttention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("not this one")

    register_patch_mapping({"LlamaMLP": MyMLP})
    with pytest.raises(RuntimeError, match="not this one"):
        TransformerBridge.boot_transformers(folder, patches={"LlamaAttention": Broken})
    assert get_patch_mapping() == {"LlamaMLP": MyMLP}
    assert modeling_llama.LlamaAttention is LlamaAttention
    assert modeling_llama.LlamaMLP is LlamaMLP  # transformers alone would leave the user's there
    assert torch.empty(1).device.type == "cpu" and torch.get_default_dtype() == torch.float32


def test_what_the_user_registered_is_respected_and_stays(folder: str):
    class Theirs(LlamaAttention):
        """Registered by the user."""

    register_patch_mapping({".*MLP": MyMLP, "LlamaAttention": Theirs})
    bridge = TransformerBridge.boot_transformers(folder, patches={"LlamaAttention": MyAttention})
    layer = bridge.core.model.layers[0]
    assert (type(layer.self_attn), type(layer.mlp)) == (MyAttention, MyMLP)
    assert get_patch_mapping() == {".*MLP": MyMLP, "LlamaAttention": Theirs}
    globally = TransformerBridge.boot_transformers(folder)
    layer = globally.core.model.layers[0]
    assert (type(layer.self_attn), type(layer.mlp)) == (Theirs, MyMLP)
    assert verify(globally).passed
    modeling_llama.LlamaModel._can_record_outputs["attentions"] = (
        LlamaAttention  # transformers leaves that there
    )


def test_other_threads_do_not_see_it(folder: str):
    inside, resume = threading.Event(), threading.Event()

    class Slow(LlamaAttention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            inside.set()
            assert resume.wait(60)

    made: list[TransformerBridge] = []
    thread = threading.Thread(
        target=lambda: made.append(
            TransformerBridge.boot_transformers(folder, patches={"LlamaAttention": Slow})
        )
    )
    thread.start()
    assert inside.wait(60)
    try:
        assert modeling_llama.LlamaAttention is not LlamaAttention  # transformers has put it there
        config = tiny("llama-gqa").config
        others = [LlamaForCausalLM(config), AutoModelForCausalLM.from_pretrained(folder)]
        assert all(type(model.model.layers[1].self_attn) is LlamaAttention for model in others)
        assert isinstance(others[0].model.layers[0].self_attn, modeling_llama.LlamaAttention)
    finally:
        resume.set()
        thread.join()
    assert type(made[0].core.model.layers[1].self_attn) is Slow


def test_another_layout_with_weight_conversions(tmp_path: Path):
    tiny("qwen2_moe-mha-tied-dense-first").save_pretrained(tmp_path)
    tokens = torch.randint(3, 61, (2, 7))
    plain = TransformerBridge.boot_transformers(str(tmp_path))
    before = get_checkpoint_conversion_mapping("qwen2_moe")
    fused = WeightConverter(["q_proj", "k_proj", "v_proj"], ["qkv_proj"], [Concatenate(dim=0)])
    bridge = TransformerBridge.boot_transformers(
        str(tmp_path),
        patches={r"^Qwen2MoeExperts$": SequentialExperts, "Qwen2MoeAttention": FusedAttention},
        weight_conversions={"qwen2_moe": [fused]},
    )
    layer = bridge.core.model.layers[1]
    assert isinstance(layer.mlp.experts, SequentialExperts) and isinstance(
        layer.self_attn, FusedAttention
    )
    torch.testing.assert_close(bridge(tokens), plain(tokens))
    inferred = TransformerBridge(bridge.original_model, automatic="always")
    assert not inferred.offered().not_offered and verify(inferred, level="quick").passed
    names = [
        name
        for name in plain.hook_dict
        if not name.endswith((".q.hook_in", ".k.hook_in", ".v.hook_in"))
    ]
    expected, cache = (
        each.run_with_cache(tokens, names_filter=names)[1] for each in (plain, inferred)
    )
    for name in names:
        torch.testing.assert_close(cache[name], expected[name], msg=lambda m, n=name: f"{n}: {m}")
    again = get_checkpoint_conversion_mapping("qwen2_moe")
    assert [type(x) for x in again or ()] == [type(x) for x in before or ()]
    torch.testing.assert_close(
        TransformerBridge.boot_transformers(str(tmp_path))(tokens), plain(tokens)
    )


def test_verify_says_which_claims_a_layout_moved_and_inference_finds_them(folder: str):
    """One fused projection in the place of three: everything that a head makes, against the model
    as it was.
    """
    tokens = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    fused = WeightConverter(["q_proj", "k_proj", "v_proj"], ["qkv_proj"], [Concatenate(dim=0)])
    plain = TransformerBridge.boot_transformers(folder)
    patched = TransformerBridge.boot_transformers(
        folder,
        patches={"LlamaAttention": FusedLlamaAttention},
        weight_conversions={"llama": [fused]},
    )
    (claim,) = verify(patched).failed
    for what, name in (("queries", "q_proj"), ("keys", "k_proj"), ("values", "v_proj")):
        assert re.search(
            rf"blocks\.0\.attn and 1 more: .* {what} made by self_attn\.{name}, and the Fused",
            claim.detail,
        )
    assert "output" not in claim.detail and "qkv_proj, o_proj" in claim.detail
    with pytest.raises(
        RuntimeError, match=r"no module model\.layers\.0\.self_attn\.q_proj"
    ) as error:
        patched.run_with_cache(tokens)
    assert all(
        'TransformerBridge(model, automatic="always")' in said
        for said in (claim.detail, str(error.value))
    )
    bridge = TransformerBridge(patched.original_model, automatic="always")
    assert bridge.offered().summary.startswith(
        f"{folder} has an adapter, which was not used. One was inferred"
    )
    assert not bridge.offered().not_offered and verify(bridge).passed
    wanted, expected = plain.run_with_cache(tokens)
    logits, cache = bridge.run_with_cache(tokens)
    torch.testing.assert_close(logits, wanted)
    assert set(cache) == set(expected) and {"hook_q", "hook_v", "hook_pattern"} <= {
        x.split(".")[-1] for x in cache
    }
    for name in expected:
        torch.testing.assert_close(cache[name], expected[name], msg=lambda m, n=name: f"{n}: {m}")
    for part in ("q", "k", "v", "z", "pattern"):
        hooks = [(f"blocks.1.attn.hook_{part}", lambda act, hook: act * 0.5)]
        halved = plain.run_with_hooks(tokens, fwd_hooks=hooks)
        torch.testing.assert_close(bridge.run_with_hooks(tokens, fwd_hooks=hooks), halved)
        assert part == "z" or not torch.allclose(halved, wanted, atol=1e-4)


@pytest.mark.unchecked
def test_what_is_no_patch_is_refused(folder: str):
    with pytest.raises(
        ValueError, match=r"patches\['LlamaAttn'\].*no class.*Did you mean .*LlamaAttention"
    ):
        TransformerBridge.boot_transformers(folder, patches={"LlamaAttn": MyAttention})
    with pytest.raises(TypeError, match="must be a class of modules"):
        TransformerBridge.boot_transformers(folder, patches={"LlamaAttention": dict})
    with pytest.raises(ValueError, match="patches would change how the model is loaded"):
        TransformerBridge.boot_transformers(
            folder, hf_model=nn.Linear(1, 1), patches={"LlamaAttention": MyAttention}
        )
    assert isinstance(torch.ones(1), Tensor)
