"""Traces of every family, encoder-decoders and mixers included: against hooks, and against plain
torch hooks.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from adapters import register
from bridge import TransformerBridge
from tests.adapters.hybrid import hybrid, tiny_hybrid
from tests.adapters.test_verify_all import OTHER, USUAL, tiny
from tests.conftest import torch_hooks

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(5))
#: Inputs of heads of their own cannot be had beside the norm that they share, so they are asked for
#: one by one.
ALONE = ("hook_q_input", "hook_k_input", "hook_v_input", "hook_attn_in")


def fired(bridge: TransformerBridge) -> list[str]:
    """The points in the order in which hooks see them."""
    seen: list[str] = []
    names = [name for name in bridge.hook_dict if not name.endswith(ALONE)]
    with torch.no_grad(), bridge.hooks(fwd_hooks=[(names, lambda x, hook: seen.append(hook.name))]):
        bridge(TOKENS)
    return list(dict.fromkeys(seen))


@pytest.mark.parametrize("name", [*USUAL, *OTHER])
def test_every_point_in_one_trace(name):
    bridge = TransformerBridge(tiny(name))
    order = fired(bridge)
    expected = {}
    with torch.no_grad():
        with bridge.hooks(
            fwd_hooks=[(order, lambda x, hook: expected.update({hook.name: x.clone()}))]
        ):
            logits = bridge(TOKENS)
        with bridge.trace(TOKENS) as run:
            found = {point: run[point] for point in order}
    assert torch.equal(run.logits, logits)
    for point in order:
        assert torch.equal(found[point], expected[point]), point
    assert not torch_hooks(bridge.original_model)
    points = [bridge.hook_dict[point] for point in order]
    for before, after in itertools.pairwise(
        points
    ):  # blocks are declared in the order of the computation
        if (before.point.stack, before.point.depth) != (after.point.stack, after.point.depth):
            assert before.order < after.order, (before.name, after.name)


@pytest.mark.parametrize("name", USUAL)
def test_editing_each_point_is_what_a_hook_does(name):
    bridge = TransformerBridge(tiny(name))
    points = [
        p
        for p in bridge.hook_dict
        if "experts." not in p and p != "embed.hook_in" and "indices" not in p
    ]
    for point in points:
        with torch.no_grad():
            expected = bridge.run_with_hooks(TOKENS, fwd_hooks=[(point, lambda x, hook: x * 0.5)])
            with bridge.trace(TOKENS) as run:
                run[point] *= 0.5
            assert torch.equal(run.logits, expected), point
            with bridge.trace(TOKENS) as run:
                run[point] = run[point] * 0.5
            assert torch.equal(run.logits, expected), point


@pytest.mark.parametrize("name", USUAL)
def test_modules_against_torch_hooks(name):
    model = tiny(name)
    bridge = TransformerBridge(model)
    order, outputs = [], {}

    def keep(path):
        def hook(module, args, output):
            order.append(path)
            outputs[path] = output if isinstance(output, torch.Tensor) else output[0]

        return hook

    paths = [path for path, _ in model.named_modules() if path]
    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    with torch.no_grad():
        logits = bridge(TOKENS)
    for handle in handles:
        handle.remove()
    once = [
        path for path in order if order.count(path) == 1 and isinstance(outputs[path], torch.Tensor)
    ]
    with torch.no_grad(), bridge.trace(TOKENS) as run:
        for path in once:
            found = run.module(path).output
            found = found if isinstance(found, torch.Tensor) else found[0]
            assert torch.equal(found, outputs[path]), path
    assert torch.equal(run.logits, logits)


@pytest.mark.parametrize("name", USUAL)
def test_shapes_are_those_of_a_run(name):
    model = tiny(name)
    bridge = TransformerBridge(model)
    expected = {}
    with torch.no_grad():
        bridge.run_with_callback(
            TOKENS,
            lambda x, hook: expected.__setitem__(hook.name, (tuple(x.shape), x.dtype)),
            list(bridge.hook_dict),
        )
    for where in (bridge, TransformerBridge(tiny(name).to("meta"))):
        found = where.shapes(TOKENS)
        assert set(found) == set(expected)
        for point, (shape, dtype) in expected.items():
            assert found[point].dtype == dtype, point
            assert len(found[point].shape) == len(shape), point
            assert all(
                a is None or a == b for a, b in zip(found[point].shape, shape, strict=True)
            ), point
        assert sum(None in shape.shape for shape in found.values()) == sum(
            ".experts." in point for point in found
        )


def test_mixers():
    model = tiny_hybrid()
    register(type(model).__name__)(hybrid)
    bridge = TransformerBridge(model)
    order = fired(bridge)
    assert any("mixer" in point for point in order)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS, names_filter=order)
        with bridge.trace(TOKENS) as run:
            for point in order:
                torch.testing.assert_close(run[point], cache[point])
        for point in (p for p in order if "hook_mixer_out" in p):
            expected = bridge.run_with_hooks(TOKENS, fwd_hooks=[(point, lambda x, hook: x * 0.5)])
            with bridge.trace(TOKENS) as run:
                run[point] *= 0.5
            assert torch.equal(run.logits, expected)
            assert not torch.equal(expected, bridge(TOKENS))


def test_generation_of_an_encoder_decoder():
    bridge = TransformerBridge(tiny("t5"))
    given = {"max_new_tokens": 4, "do_sample": False, "use_past_kv_cache": False}

    def halve(x, hook):
        return x * 0.5

    with bridge.hooks(
        fwd_hooks=[("encoder.1.hook_mlp_out", halve), ("decoder.2.cross_attn.hook_z", halve)]
    ):
        expected = bridge.generate(TOKENS, return_type="tokens", verbose=False, **given)
    with bridge.trace_generate(TOKENS, **given) as run:
        run["decoder.2.cross_attn.hook_z"] *= 0.5
        for step in run.steps:
            if step.index == 0:
                step["encoder.1.hook_mlp_out"] *= 0.5
            assert step["decoder.0.hook_resid_pre"].shape[1] == step.index + 1
    assert torch.equal(run.tokens, expected)
