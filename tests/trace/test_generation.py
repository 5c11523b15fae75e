"""Traced generations, bodies as hooks, against `generate` with hooks."""

from __future__ import annotations

import pytest
import torch

from bridge.trace.coroutine import OutOfStepError
from tests.conftest import torch_hooks

GIVEN = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture(autouse=True)
def _nothing_left(bridge):
    yield
    assert not torch_hooks(bridge.original_model)
    assert not bridge.wiring.listening


def generated(bridge, tokens, hooks, **more):
    with bridge.hooks(fwd_hooks=hooks):
        return bridge.generate(tokens, return_type="tokens", verbose=False, **GIVEN, **more)


def halve(x, hook):
    return x * 0.5


def test_edits_in_and_outside_the_loop(bridge, tokens):
    def zero_head(x, hook):
        x[:, :, 1] = 0

    hooks = [
        ("blocks.0.attn.hook_z", zero_head),
        ("blocks.1.hook_mlp_out", halve),
        ("blocks.2.hook_resid_post", halve),
    ]
    expected = generated(bridge, tokens, hooks)
    with bridge.trace_generate(tokens, **GIVEN) as run:
        run["blocks.0.attn.hook_z"][:, :, 1] = 0
        run["blocks.1.hook_mlp_out"] *= 0.5
        lengths = []
        for step in run.steps:
            lengths.append(step["blocks.0.hook_resid_pre"].shape[1])
            step["blocks.2.hook_resid_post"] = step["blocks.2.hook_resid_post"] * 0.5
    assert torch.equal(run.tokens, expected) and lengths == [9, 1, 1, 1, 1]
    assert not torch.equal(expected, generated(bridge, tokens, []))


def test_methods_in_place_are_edits_of_every_step(bridge, tokens):
    expected = generated(
        bridge,
        tokens,
        [
            (
                "blocks.2.hook_resid_post",
                lambda x, hook: x.index_fill(-1, x.new_tensor([3]).long(), 9.0),
            )
        ],
    )
    with bridge.trace_generate(tokens, **GIVEN) as run:
        run["blocks.2.hook_resid_post"][:, :, 3].fill_(9.0).clamp_(max=9.0)
        with pytest.raises(RuntimeError, match="hook_resid_post cannot be asked for its norm here"):
            run["blocks.2.hook_resid_post"].norm()
    assert torch.equal(run.tokens, expected) and not torch.equal(
        expected, generated(bridge, tokens, [])
    )


def test_only_one_step(bridge, tokens):
    def at_two(x, hook):
        return x * -3 if bridge.step == 2 else None

    expected = generated(bridge, tokens, [("blocks.2.hook_resid_post", at_two)])
    with bridge.trace_generate(tokens, **GIVEN) as run:
        for step in run.steps:
            if step.index == 2:
                step["blocks.2.hook_resid_post"] *= -3
    assert torch.equal(run.tokens, expected)


def test_ends(bridge, tokens):
    plain = generated(bridge, tokens, [])
    first = int(plain[0, 9])
    with bridge.trace_generate(tokens[:1], eos_token_id=first, **GIVEN) as run:
        steps = [step.index for step in run.steps]
    assert steps == [0] and run.tokens.shape == (1, 10)
    with bridge.trace_generate(tokens, **GIVEN) as run:
        for step in run.steps:
            if step.index == 1:
                break
    assert torch.equal(run.tokens, plain)
    with bridge.trace_generate(tokens, **GIVEN) as run:
        for step in run.steps:
            if step.index == 1:
                run.stop()
    assert torch.equal(run.tokens, plain[:, :11])
    with pytest.raises(ZeroDivisionError), bridge.trace_generate(tokens, **GIVEN) as run:
        for step in run.steps:
            1 / step.index


def test_refusals(bridge, tokens):
    with bridge.trace_generate(tokens, **GIVEN) as run:
        with pytest.raises(RuntimeError, match="stands for every step"):
            run["blocks.0.hook_resid_post"] + 1
        with pytest.raises(RuntimeError, match="stands for every step"):
            torch.relu(run["blocks.0.hook_resid_post"])
        steps = iter(run.steps)
        first = next(steps)
        first["blocks.1.hook_resid_post"]
        with pytest.raises(OutOfStepError, match=r"has passed|the model is at"):
            first["blocks.0.hook_resid_post"]
        next(steps)
        with pytest.raises(RuntimeError, match="step 0 has ended"):
            first["blocks.2.hook_resid_post"]
    with pytest.raises(TypeError, match="return_type"):
        bridge.trace_generate(tokens, return_type="str")


def test_an_edit_that_does_not_fit_every_step(bridge, tokens):
    with pytest.raises(IndexError) as caught, bridge.trace_generate(tokens, **GIVEN) as run:
        run["blocks.0.hook_resid_post"][:, 5] = 0
    assert "at step 1" in caught.value.__notes__[0]


def test_a_body_as_hooks(bridge, tokens):
    def body(run):
        z = run["blocks.0.attn.hook_z"]
        z[:, :, 1] = 0
        with torch.no_grad():
            if run["blocks.1.hook_mlp_out"].norm() > 0:
                run["blocks.1.hook_mlp_out"] = run["blocks.1.hook_mlp_out"] * 0.5

    def zero_head(x, hook):
        x[:, :, 1] = 0

    hooks = [("blocks.0.attn.hook_z", zero_head), ("blocks.1.hook_mlp_out", halve)]
    edit = bridge.trace_edit(body)
    assert [name for name, _ in edit] == ["blocks.0.attn.hook_z", "blocks.1.hook_mlp_out"]
    assert torch.equal(
        bridge.run_with_hooks(tokens, fwd_hooks=edit),
        bridge.run_with_hooks(tokens, fwd_hooks=hooks),
    )
    assert torch.equal(generated(bridge, tokens, edit), generated(bridge, tokens, hooks))
    with bridge.hooks(fwd_hooks=edit):
        assert torch.equal(bridge(tokens), bridge(tokens))
        assert bridge(tokens).requires_grad

    def wrong(run):
        run["blocks.1.hook_mlp_out"]
        run["blocks.0.attn.hook_z"]

    with pytest.raises(OutOfStepError, match=r"has passed|the model is at"):
        bridge.trace_edit(wrong)
    late = bridge.trace_edit(wrong, points=["blocks.1.hook_mlp_out", "blocks.0.attn.hook_z"])
    with pytest.raises(OutOfStepError, match=r"has passed|the model is at"):
        bridge.run_with_hooks(tokens, fwd_hooks=late)
    with pytest.raises(ValueError, match="nothing"):
        bridge.trace_edit(lambda run: None)
