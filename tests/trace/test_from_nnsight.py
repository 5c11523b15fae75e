"""What programs for nnsight ask of a trace: outputs, skip, invoke, gradients of a module's output,
save.
"""

import pytest
import torch

from bridge import TransformerBridge
from bridge.trace.coroutine import OutOfStepError

PROMPT = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge.boot_embedded()


@torch.no_grad()
def test_a_skipped_module_returns_what_was_given(bridge):
    plain = bridge(PROMPT)
    with bridge.trace(PROMPT) as run:
        before = run.module("model.layers.0").output
        run.module("model.layers.1").skip(before)
    with bridge.trace(PROMPT) as other:
        other.skip(1)
    assert torch.equal(run.logits, other.logits) and not torch.allclose(
        run.logits, plain, atol=1e-2
    )
    called = []
    mlp = bridge.original_model.get_submodule("model.layers.1.mlp.up_proj")
    handle = mlp.register_forward_hook(lambda *_: called.append(1))
    with bridge.trace(PROMPT) as run:
        run.module("model.layers.1.mlp").skip(torch.zeros_like(before))
    handle.remove()
    by_hand = bridge.run_with_hooks(
        PROMPT, fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x * 0)]
    )
    assert torch.equal(run.logits, by_hand) and not called
    assert torch.equal(bridge(PROMPT), plain), "it is of that run alone"


def test_what_cannot_be_skipped(bridge):
    with (
        pytest.raises(OutOfStepError, match=r"layers\.1 was to be skipped"),
        bridge.trace(PROMPT) as run,
    ):
        after = run.module("model.layers.2").output
        run.module("model.layers.1").skip(after)
    with pytest.raises(TypeError, match="is a ModuleList"), bridge.trace(PROMPT) as run:
        run.module("model.layers").skip(0)
    captured = "blocks.1.mlp.hook_post"
    with (
        pytest.raises(ValueError, match=r"blocks\.1\.mlp\.hook_post, which is captured"),
        bridge.trace(PROMPT, capture=[captured]) as run,
    ):
        run.module("model.layers.1.mlp").skip(0)
    with (
        pytest.raises(TypeError, match="cannot be skipped in a generation"),
        bridge.trace_generate("Mary and", max_new_tokens=2, do_sample=False) as run,
    ):
        for step in run.steps:
            step.module("model.layers.1.mlp").skip(0)
    bridge(PROMPT)


def test_outputs_are_all_that_a_module_returns(bridge):
    with bridge.trace(PROMPT) as run:
        attention = run.module("model.layers.0.self_attn").outputs
        stream = bridge.blocks[1].outputs
        run.module("lm_head").outputs = run.module("lm_head").outputs * 2
    assert isinstance(attention, tuple) and attention[0].shape == stream.shape
    assert torch.equal(run.logits, 2 * bridge(PROMPT))
    with bridge.trace(PROMPT) as run:
        assert isinstance(bridge.blocks[0].attn.outputs, tuple)


def test_the_gradient_of_a_modules_output(bridge):
    with bridge.trace(PROMPT) as run:
        hidden = run.module("model.layers.1").output
        hidden.retain_grad()
    run.logits[0, -1].max().backward()
    with bridge.trace(PROMPT) as named:
        named["blocks.1.hook_resid_post"]
    named.logits[0, -1].max().backward()
    assert (
        torch.equal(hidden.grad, named.grad("blocks.1.hook_resid_post"))
        and hidden.grad.abs().max() > 0
    )


def test_several_prompts_in_one_trace(bridge):
    short = "Mary and John"
    with (
        pytest.raises(TypeError, match=r"run\.rows\(0\)"),
        bridge.trace([PROMPT, short]) as run,
        run.invoke(PROMPT),
    ):
        pass
    with torch.no_grad(), bridge.trace([PROMPT, short]) as run:
        run.rows(1)["blocks.1.hook_mlp_out"] = 0.0
    with torch.no_grad():
        alone = bridge.run_with_hooks(
            short, fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x * 0)]
        )
        assert torch.allclose(run.rows(1).logits, alone, atol=1e-4)
        assert torch.allclose(run.rows(0).logits, bridge(PROMPT), atol=1e-4)


def test_there_is_nothing_to_save(bridge):
    with pytest.raises(AttributeError) as caught, bridge.trace(PROMPT) as run:
        run.module("lm_head").output.save()
    assert "there is nothing to save" in caught.value.__notes__[0]
