"""Behaviour that a change to the code could take away unnoticed: one assertion for each."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from bridge import TransformerBridge
from bridge.run.tokenization import TokenizerFacts
from tests.adapters.test_verify_all import tiny
from tests.conftest import torch_hooks
from tests.tiny_models import checkpoint
from weight_processing.check import ProcessingError

TOKENS = torch.randint(3, 61, (2, 6), generator=torch.Generator().manual_seed(0))
NEW: dict[str, Any] = {
    "max_new_tokens": 4,
    "do_sample": False,
    "verbose": False,
    "stop_at_eos": False,
}


def halve(x, hook):
    return x * 0.5


@pytest.mark.parametrize("case", ["gpt2", "llama-gqa"])
def test_processed_twice_and_saved(case, tmp_path: Path):
    bridge = TransformerBridge(tiny(case))
    expected = bridge(TOKENS).log_softmax(-1)
    bridge.process_weights()
    once = {name: p.detach().clone() for name, p in bridge.original_model.named_parameters()}
    bridge.process_weights()
    for name, p in bridge.original_model.named_parameters():
        assert torch.equal(p, once[name]), name
    bridge.original_model.save_pretrained(tmp_path)
    again = TransformerBridge(type(bridge.core).from_pretrained(tmp_path).eval())
    torch.testing.assert_close(again(TOKENS).log_softmax(-1), expected, atol=1e-4, rtol=1e-4)


def test_a_second_fold_of_value_biases_changes_nothing():
    bridge = TransformerBridge(tiny("gpt2"))
    bridge.process_weights(
        fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=True
    )
    b_O = bridge.b_O.clone()
    assert not bridge.b_V.any()
    bridge.cfg.processed = {}
    del bridge.core.config.transformer_bridge_processed
    assert not bridge.cfg.processed
    bridge.process_weights(
        fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=True
    )
    torch.testing.assert_close(bridge.b_O, b_O)


def test_log_probabilities_that_are_no_numbers_fail_the_check():
    bridge = TransformerBridge(tiny("gpt2"))
    with torch.no_grad():
        bridge.original_model.transformer.h[0].mlp.c_fc.weight[0, 0] = float("nan")
    before = copy.deepcopy(bridge.original_model.state_dict())
    with pytest.raises(ProcessingError, match=r"not finite.* Nothing was changed"):
        bridge.process_weights()
    for name, value in bridge.original_model.state_dict().items():
        torch.testing.assert_close(value, before[name], atol=0, rtol=0, equal_nan=True)


def test_log_probabilities_that_become_no_numbers_fail_the_check():
    bridge = TransformerBridge(tiny("gpt2"))
    calls = []

    def breaks(module, args, output):
        calls.append(1)
        return output if len(calls) == 1 else output * float("nan")

    bridge.original_model.lm_head.register_forward_hook(breaks)
    with pytest.raises(ProcessingError, match="log probabilities changed by nan"):
        bridge.process_weights()
    assert len(calls) == 2


def test_new_biases_of_a_frozen_model_are_frozen():
    bridge = TransformerBridge(tiny("qwen2-gqa").requires_grad_(False))
    before = set(dict(bridge.original_model.named_parameters()))
    bridge.process_weights()
    new = {name: p for name, p in bridge.original_model.named_parameters() if name not in before}
    assert new
    assert not any(p.requires_grad for p in new.values())
    trained = TransformerBridge(tiny("qwen2-gqa"))
    trained.process_weights()
    assert all(p.requires_grad for p in trained.original_model.parameters())


@pytest.mark.parametrize("case", ["gpt2", "llama-gqa"])
def test_hook_attn_in_at_some_steps_of_a_generation(case):
    """Editing every head's input at a step is editing what query, key and value read there, and at
    no other step.
    """
    bridge = TransformerBridge(tiny(case))

    def at_step_two(x, hook):
        assert bridge.step is not None
        return x * torch.linspace(0.5, 1.5, x.shape[-1]) if bridge.step == 2 else None

    together = [("blocks.1.hook_attn_in", at_step_two)]
    apart = [(f"blocks.1.hook_{letter}_input", at_step_two) for letter in "qkv"]
    made = []
    for hooks in ((), together, apart):
        with bridge.hooks(hooks):
            made.append(torch.stack(bridge.generate(TOKENS, output_logits=True, **NEW)["logits"]))
    plain, ours, expected = made
    torch.testing.assert_close(ours, expected)
    assert torch.equal(ours[:2], plain[:2])
    assert not torch.allclose(ours[2], plain[2])


def test_hook_attn_in_of_one_head_with_grouped_keys():
    """A key head reads the mean of what its query heads read."""
    bridge = TransformerBridge(tiny("llama-gqa"))
    assert (bridge.cfg.n_heads, bridge.cfg.n_kv_heads) == (4, 2)

    def one_head(x, hook):
        x[:, :, 0] += torch.linspace(-1, 1, x.shape[-1])

    def its_group(x, hook):
        x[:, :, 0] += torch.linspace(-1, 1, x.shape[-1]) / 2

    ours = bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_attn_in", one_head)])
    by_hand = [
        ("blocks.1.hook_q_input", one_head),
        *((f"blocks.1.hook_{x}_input", its_group) for x in "kv"),
    ]
    torch.testing.assert_close(ours, bridge.run_with_hooks(TOKENS, fwd_hooks=by_hand))


def test_what_changes_after_it_was_recorded_is_an_error():
    bridge = TransformerBridge(tiny("gpt2"))
    name = "blocks.0.mlp.hook_post"
    inner = bridge.original_model.transformer.h[0].mlp.c_proj

    def wreck(mod, args):
        args[0].mul_(2)

    with torch.no_grad():
        bridge.run_with_cache(TOKENS, names_filter=name)
        with bridge.hooks([(name, lambda x, hook: None)]):  # so that our torch hook comes first
            handle = inner.register_forward_pre_hook(wreck)
            try:
                with pytest.raises(
                    RuntimeError, match=f"{name} was changed in place after it was recorded"
                ):
                    bridge.run_with_cache(TOKENS, names_filter=name)
            finally:
                handle.remove()
    assert torch_hooks(bridge.original_model) == 0


def test_gradients_of_what_the_loss_does_not_use_are_zeros_of_its_shape():
    bridge = TransformerBridge(tiny("llama-gqa"))
    names = [
        "blocks.0.hook_resid_pre",
        "blocks.0.attn.hook_z",
        "blocks.0.attn.hook_k",
        "blocks.0.attn.hook_pattern",
    ]
    with bridge.hooks([("blocks.1.hook_resid_pre", lambda x, hook: torch.ones_like(x))]):
        _, cache = bridge.run_with_cache(
            TOKENS, names_filter=names, return_type="loss", incl_bwd=True
        )
    for name in names:
        assert cache[f"{name}_grad"].shape == cache[name].shape
        assert not cache[f"{name}_grad"].any()


@pytest.mark.parametrize(
    "name", ["blocks.1.attn.hook_pattern", "blocks.1.attn.hook_attn_scores", "blocks.1.attn.hook_q"]
)
def test_what_is_kept_keeps_no_more_alive(name):
    bridge = TransformerBridge(tiny("llama-gqa"))
    for kwargs in ({"names_filter": name}, {"names_filter": name, "pos_slice": -1}):
        value = bridge.run_with_cache(TOKENS, **kwargs)[1][name]
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


def test_the_device_of_caching_hooks():
    bridge = TransformerBridge(tiny("gpt2"))
    cache = bridge.add_caching_hooks("blocks.0.hook_resid_pre", device="meta", incl_bwd=True)
    bridge(TOKENS, return_type="loss").backward()
    bridge.reset_hooks()
    assert {value.device.type for value in cache.values()} == {"meta"}
    assert len(cache) == 2


def test_a_pickled_cache_has_its_deferred_entries():
    bridge = TransformerBridge(tiny("llama-gqa"))
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
        _, other = bridge.run_with_cache(TOKENS)
    loaded = pickle.loads(pickle.dumps(other))
    assert set(loaded) == set(cache)
    for name in cache:
        torch.testing.assert_close(loaded[name], cache[name], msg=name)


def test_a_run_inside_of_one_that_stops():
    bridge = TransformerBridge(tiny("gpt2"))
    found = []

    def nested(x, hook):
        if not found:  # the run that it starts sees it too
            found.append(None)
            found[0] = bridge(TOKENS[:1])

    residual = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[("blocks.0.hook_resid_pre", nested)], stop_at_layer=1
    )
    assert torch.equal(residual, bridge(TOKENS, stop_at_layer=1))
    assert torch.equal(found[0], bridge(TOKENS[:1]))  # to its end: it is a run of its own


def test_a_blocks_own_forward_is_there_after_starting_at_a_layer():
    model = accelerate.cpu_offload(tiny("llama-gqa"), execution_device="cpu")
    block = model.model.layers[0]
    block.__dict__["forward"] = own = type(block).forward.__get__(block)
    bridge = TransformerBridge(model)
    expected = bridge(TOKENS)
    residual = bridge(TOKENS, stop_at_layer=1)
    assert torch.equal(bridge(residual, start_at_layer=1), expected)
    assert block.__dict__["forward"] is own
    assert torch.equal(bridge(TOKENS), expected)


def test_the_implementation_switched_while_someone_listens():
    model = tiny("llama-gqa")
    bridge = TransformerBridge(model)
    name = "blocks.1.attn.hook_pattern"
    with bridge.hooks([(name, halve)]):
        sdpa = bridge(TOKENS)
        model.set_attn_implementation("eager")
        eager = bridge(TOKENS)
    torch.testing.assert_close(eager, sdpa)
    assert not torch.allclose(sdpa, bridge(TOKENS))
    assert torch_hooks(model) == 0


@pytest.mark.parametrize("case", ["llama-gqa", "gpt_neox", "qwen3-gqa"])
def test_a_static_cache_with_rotated_keys(case):
    bridge = TransformerBridge(tiny(case))
    made = []
    for more in ({}, {"cache_implementation": "static", "disable_compile": True}):
        with bridge.hooks([("blocks.1.attn.hook_rot_k", lambda x, hook: x * 0.5)]):
            made.append(bridge.generate(TOKENS, output_logits=True, **NEW, **more))
    assert torch.equal(made[0]["sequences"], made[1]["sequences"])
    torch.testing.assert_close(
        torch.stack(made[0]["logits"]), torch.stack(made[1]["logits"]), atol=1e-4, rtol=1e-4
    )


def test_retain_grad_on_an_activation_that_is_computed():
    bridge = TransformerBridge(tiny("gpt2"))
    kept = {}

    def keep(x, hook):
        x.retain_grad()
        kept[hook.name] = x

    names = ["blocks.1.attn.hook_result", "blocks.1.hook_q_input", "blocks.1.ln2.hook_scale"]
    bridge.run_with_hooks(TOKENS, fwd_hooks=[(names, keep)], return_type="loss").backward()
    _, cache = bridge.run_with_cache(TOKENS, names_filter=names, return_type="loss", incl_bwd=True)
    for name in names:
        torch.testing.assert_close(kept[name].grad, cache[f"{name}_grad"], msg=name)


def test_what_was_cached_before_a_write_through_is_what_it_was():
    bridge = TransformerBridge(tiny("llama-gqa"))
    clean = bridge.run_with_cache(TOKENS)[1]
    with torch.no_grad(), bridge.hooks([("blocks.0.hook_resid_mid", halve)]):
        _, cache = bridge.run_with_cache(
            TOKENS, names_filter=["blocks.0.hook_attn_out", "blocks.0.hook_resid_mid"]
        )
    torch.testing.assert_close(cache["attn_out", 0], clean["attn_out", 0])
    torch.testing.assert_close(cache["resid_mid", 0], clean["resid_mid", 0] * 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["gpt2", "llama-gqa"])
def test_norm_scales_and_masks_in_half_precision(case, dtype):
    bridge = TransformerBridge(tiny(case, dtype=dtype))
    _, cache = bridge.run_with_cache(TOKENS)
    x = cache["resid_pre", 1].double()
    x = x - x.mean(-1, keepdim=True) if case == "gpt2" else x
    exact = (x.square().mean(-1, keepdim=True) + bridge.cfg.eps).sqrt()
    torch.testing.assert_close(cache["blocks.1.ln1.hook_scale"].double(), exact, atol=0, rtol=1e-5)
    scores = cache["attn_scores", 1]
    assert scores.dtype == dtype
    above = torch.ones(6, 6, dtype=torch.bool).triu(1)
    assert scores[..., above].isneginf().all()
    assert scores[..., ~above].isfinite().all()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_rows_of_scores_in_which_nothing_is_allowed(implementation):
    bridge = TransformerBridge(tiny("llama-gqa", attn_implementation=implementation))
    mask = torch.tensor([[1] * 6, [0, 0, 0, 1, 1, 1]])
    expected = bridge(TOKENS, attention_mask=mask)
    name = "blocks.1.attn.hook_attn_scores"
    _, cache = bridge.run_with_cache(
        TOKENS, attention_mask=mask, names_filter=[name, "blocks.1.attn.hook_pattern"]
    )
    assert not cache["pattern", 1].isnan().any()
    again = bridge.run_with_hooks(
        TOKENS, attention_mask=mask, fwd_hooks=[(name, lambda x, hook: x.clone())]
    )
    torch.testing.assert_close(again, expected)
    assert again.isfinite().all()


class OneId:
    """A tokenizer whose BOS is its EOS, which it puts at both ends."""

    bos_token_id = eos_token_id = 0
    pad_token_id = cls_token_id = None

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        plain = [ord(c) for c in text]
        return {"input_ids": [0, *plain, 0] if add_special_tokens else plain}


@pytest.mark.unchecked
def test_bos_and_eos_with_one_id():
    facts = TokenizerFacts(OneId())
    assert (facts.bos, facts.adds_bos, facts.ending, facts.pad) == (0, True, [0], 0)
    assert facts.encode("ab", prepend_bos=True, keep_ending=False) == [0, 97, 98]
    batch = facts.pad_rows([[0, 97, 98], [0, 97]], "left")
    assert batch.mask is not None
    assert batch.mask.tolist() == [[1, 1, 1], [0, 1, 1]]  # the BOS that is a pad id is a token


@pytest.mark.parametrize("case", ["gpt2", "llama-gqa", "bloom"])
def test_generation_without_keys_and_values_kept(case):
    bridge = TransformerBridge(tiny(case))
    with bridge.hooks([("blocks.1.hook_mlp_out", halve)]):
        kept = bridge.generate(TOKENS, output_logits=True, **NEW)
        anew = bridge.generate(TOKENS, output_logits=True, use_past_kv_cache=False, **NEW)
    assert torch.equal(kept["sequences"], anew["sequences"])
    torch.testing.assert_close(
        torch.stack(kept["logits"]), torch.stack(anew["logits"]), atol=1e-4, rtol=1e-4
    )


def test_checkpointing_without_gradients():
    model = tiny("llama-gqa")
    spec = [("blocks.1.hook_mlp_out", halve)]
    expected = TransformerBridge(copy.deepcopy(model)).run_with_hooks(TOKENS, fwd_hooks=spec)
    checkpoint(model, {"use_reentrant": False})
    bridge = TransformerBridge(model.train())
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(TOKENS)
        edited = bridge.run_with_hooks(TOKENS, fwd_hooks=spec)
    assert torch.equal(edited, expected)
    assert len(cache) == len(bridge.run_with_cache(TOKENS)[1])
    assert torch.equal(logits, model(TOKENS).logits)
