"""`bridge.legacy.TransformerBridge`: what programs for TransformerLens 3 and 4 ask of one, against
the bridge's own.
"""

import copy

import pytest
import torch
from torch import nn

from adapters import verify
from bridge import TransformerBridge as Plain
from bridge.legacy import HookedTransformer, HookPoint, TransformerBridge
from tests.reference import DATA

TOKENS = torch.tensor([[1, 5, 9, 7, 3]])


@pytest.fixture(scope="module")
def plain():
    return Plain.boot_transformers(str(DATA / "gpt2"))


@pytest.fixture
def bridge(plain):
    return TransformerBridge(plain.original_model, plain.tokenizer)


def test_it_runs_the_model_and_names_its_weights_as_the_model_does(bridge, plain):
    assert torch.equal(bridge(TOKENS), plain.original_model(TOKENS).logits)
    assert bridge.state_dict().keys() == plain.original_model.state_dict().keys()
    assert [name for name, _ in bridge.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    assert torch.equal(copy.deepcopy(bridge)(TOKENS), bridge(TOKENS))


def test_hook_points_are_modules_by_every_name(bridge):
    points = bridge.hook_dict
    assert (
        points["blocks.0.hook_out"]
        is points["blocks.0.hook_resid_post"]
        is bridge.blocks[0].hook_resid_post
    )
    assert all(
        isinstance(point, HookPoint) and isinstance(point, nn.Module) for point in points.values()
    )
    assert bridge.hook_aliases["blocks.0.hook_out"] == "blocks.0.hook_resid_post"
    assert (
        "blocks.0.hook_out" in points
        and points.get("blocks.0.hook_out") is bridge.blocks[0].hook_resid_post
    )
    assert len(bridge.hook_points()) == len(points) and points.get("blocks.0.hook_aut") is None
    with pytest.raises(KeyError, match="hook_aut"):
        points["blocks.0.hook_aut"]
    assert "attn.hook_z" in bridge.block_hooks(1) and "attn" in bridge.block_submodules(1)


def test_parts_are_called_hooked_and_listed(bridge):
    _, cache = bridge.run_with_cache(TOKENS)
    block = bridge.blocks[1]
    assert torch.allclose(
        block.mlp(cache["blocks.1.ln2.hook_normalized"]), cache["mlp_out", 1], atol=1e-5
    )
    assert block.attn.original_component is bridge.original_model.transformer.h[1].attn
    assert block.attn.get_hooks()["hook_z"] is block.attn.hook_z
    handle = block.attn.add_hook(lambda x, hook: x * 0)
    assert block.hook_attn_out.has_hooks() and not block.hook_attn_out.has_hooks(dir="bwd")
    assert [*bridge.list_hooks()] == ["blocks.1.hook_attn_out"]
    assert (
        isinstance(handle.id, int)
        and bridge.list_hooks()["blocks.1.hook_attn_out"][0].hook == handle
    )
    off = bridge.run_with_cache(TOKENS)[1]
    block.attn.remove_hooks()
    assert off["attn_out", 1].abs().max() == 0 and not bridge.list_hooks()
    permanent = bridge.add_perma_hook("blocks.0.hook_out", hook_fn=lambda x, hook: None)
    bridge.reset_hooks()
    assert bridge.blocks[0].hook_resid_post.has_hooks() and not bridge.list_hooks(
        including_permanent=False
    )
    permanent[0].remove()
    with pytest.raises(ValueError, match="must be 'output' or 'input'"):
        block.attn.add_hook(print, "middle")


def test_what_enters_the_first_block(bridge):
    stream, tokens, none, mask = bridge.input_to_embed(TOKENS)
    assert torch.equal(stream, bridge.run_with_cache(TOKENS)[1]["resid_pre", 0])
    assert torch.equal(tokens, TOKENS) and none is None and mask is None
    assert torch.allclose(bridge(stream, start_at_layer=0), bridge(TOKENS), atol=1e-5)


def test_hooks_without_a_batch_axis(bridge):
    seen = []

    def halve(x, hook):
        seen.append(x.shape)
        return x / 2

    found = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[("blocks.0.hook_out", halve)], remove_batch_dim=True
    )
    assert seen == [(5, 32)]
    assert torch.equal(
        found,
        bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_out", lambda x, hook: x / 2)]),
    )
    with pytest.raises(ValueError, match="has 2 rows"):
        bridge.run_with_hooks(
            TOKENS.expand(2, -1), [("blocks.0.hook_out", halve)], remove_batch_dim=True
        )


def test_a_cache_keeps_what_was_asked_for_by_its_alias(bridge):
    cache, forward, backward = bridge.get_caching_hooks(["blocks.0.hook_out"], incl_bwd=True)
    bridge.run_with_hooks(TOKENS, forward, backward, return_type="loss").backward()
    assert torch.equal(cache["blocks.0.hook_out"], cache["blocks.0.hook_resid_post"])
    assert torch.equal(cache["blocks.0.hook_out_grad"], cache["blocks.0.hook_resid_post_grad"])
    assert "blocks.0.hook_out" in cache and "blocks.1.hook_out" not in cache and len(cache) == 2
    with pytest.raises(KeyError, match=r"blocks\.1\.hook_resid_post"):
        cache["blocks.1.hook_out"]
    bridge.original_model.zero_grad()


def test_what_a_model_does_not_have(bridge):
    assert bridge.W_gate is None and bridge.blocks[0].mlp.W_gate is None
    with pytest.raises(ValueError, match=r"attn\.hook_pattern"):
        bridge(TOKENS, output_attentions=True)
    with pytest.raises(ValueError, match=r"AutoModelForCausalLM\.from_config"):
        TransformerBridge.boot_transformers(str(DATA / "gpt2"), load_weights=False, device="cpu")


def test_circuits_of_the_layers_that_have_attention(bridge):
    for (layers, found), whole in (
        (bridge.QK_for_attn_layers(), bridge.QK),
        (bridge.OV_for_attn_layers(), bridge.OV),
    ):
        assert layers == [0, 1] == bridge.composition_layer_indices()
        assert torch.allclose(found.AB, whole.AB, atol=1e-6)


def test_generating(bridge):
    greedy = bridge.generate(
        TOKENS, max_new_tokens=3, do_sample=False, verbose=False, stop_at_eos=False
    )
    zero = bridge.generate(
        TOKENS, max_new_tokens=3, temperature=0.0, verbose=False, stop_at_eos=False
    )
    assert torch.equal(zero, greedy)
    made = bridge.hf_generate(TOKENS, max_new_tokens=3, do_sample=False, stop_at_eos=False)
    assert torch.equal(made, greedy)
    alone = TransformerBridge(bridge.original_model)
    alone.cfg.eos_token_id = int(greedy[0, 5])  # there is no tokenizer to say it
    assert alone.generate(TOKENS, max_new_tokens=3, do_sample=False, verbose=False).shape == (1, 6)


@pytest.mark.parametrize("explicit", [None, "first", "other"])
def test_the_end_of_text_in_hf_generate(bridge, explicit, monkeypatch):
    options = {"max_new_tokens": 3, "do_sample": False}
    greedy = bridge.hf_generate(TOKENS, **options, stop_at_eos=False)
    first, others = int(greedy[0, 5]), set(greedy[0].tolist())
    monkeypatch.setattr(bridge.original_model.generation_config, "eos_token_id", first)
    given = {"first": first, "other": next(i for i in range(61) if i not in others)}.get(explicit)
    made = bridge.hf_generate(TOKENS, **options, eos_token_id=given)
    assert made.shape == (1, 8 if explicit == "other" else 6)
    assert torch.equal(
        bridge.hf_generate(TOKENS, **options, eos_token_id=given, stop_at_eos=False), greedy
    )
    whole = bridge.hf_generate(
        TOKENS, **options, stop_at_eos=False, output_scores=True, return_dict_in_generate=True
    )
    assert torch.equal(whole.sequences, greedy) and len(whole.scores) == 3


@pytest.mark.parametrize(
    "make", [TransformerBridge.boot_transformers, HookedTransformer.from_pretrained]
)
def test_they_are_verified_as_any_bridge_is(make, caplog):
    assert verify(make(str(DATA / "gpt2"), device="cpu")).passed


def test_the_users_tokenizer_is_copied(plain):
    before = plain.tokenizer.pad_token
    bridge = TransformerBridge(plain.original_model, plain.tokenizer)
    assert bridge.tokenizer is not plain.tokenizer and plain.tokenizer.pad_token == before


def test_hooks_outside_of_the_layers_that_run_do_not_fire(bridge):
    fired = []
    hooks = [("blocks.1.hook_out", lambda x, hook: fired.append(1))]
    bridge.run_with_hooks(TOKENS, hooks, stop_at_layer=1)
    assert not fired


@torch.no_grad()
def test_decompositions_along_directions(bridge):
    _, cache = bridge.run_with_cache(TOKENS)
    directions = torch.randn(32, 3)
    for name, arguments in (
        ("get_full_resid_decomposition", {}),
        ("stack_neuron_results", {"layer": 2, "apply_ln": True}),
        ("get_neuron_results", {"layer": 1}),
    ):
        whole = getattr(cache, name)(**arguments)
        found = getattr(cache, name)(**arguments, project_output_onto=directions)
        assert torch.allclose(found, whole @ directions, atol=1e-5)
        one = getattr(cache, name)(**arguments, project_output_onto=directions[:, 0])
        assert torch.allclose(one, found[..., 0], atol=1e-5)
    read = cache.stack_neuron_results(1, incl_remainder=True, mlp_input=True).sum(0)
    assert torch.allclose(read, cache["resid_mid", 1], atol=1e-5)
    normed = cache.stack_neuron_results(1, incl_remainder=True, mlp_input=True, apply_ln=True).sum(
        0
    )
    assert torch.allclose(
        normed, (read - read.mean(-1, keepdim=True)) / cache["scale", 1, "ln2"], atol=1e-4
    )
