"""Promise 5: what the bridge attaches, it removes, and nothing else."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge import TransformerBridge
from tests.conftest import FAMILIES, tiny, torch_hooks


class Deliberate(Exception):
    pass


def fail(x, hook):
    raise Deliberate(hook.name)


MODELS = {name: TransformerBridge(tiny(name)) for name in FAMILIES}
TOKENS = torch.tensor([[1, 2, 3, 4]])
PLAIN = {name: bridge(TOKENS) for name, bridge in MODELS.items()}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_after_any_run_and_any_failure_the_model_is_as_it_was(data):
    name = data.draw(st.sampled_from(FAMILIES))
    bridge = MODELS[name]
    configs = [id(m.__dict__.get("config")) for m in bridge.original_model.modules()]
    points = data.draw(st.lists(st.sampled_from(list(bridge.hook_dict)), min_size=1, max_size=4))
    failing = data.draw(st.sampled_from([None, *points]))
    stop = data.draw(st.sampled_from([None, 0, 1, 3]))
    backward = data.draw(st.booleans())
    hooks = [
        (
            point,
            fail if point == failing else (lambda x, hook: x * 1.5 if x.is_floating_point() else x),
        )
        for point in points
    ]
    try:
        with torch.set_grad_enabled(backward):
            bridge.run_with_hooks(
                TOKENS,
                fwd_hooks=hooks,
                bwd_hooks=[(points[0], lambda g, hook: None)],
                stop_at_layer=stop,
            )
            bridge.run_with_cache(
                TOKENS,
                names_filter=points,
                incl_bwd=backward,
                return_type="loss",
                stop_at_layer=stop,
            )
    except Deliberate:
        pass
    except (
        ValueError
    ) as error:  # a hook point that does not run with this layer, or one without a gradient
        expected = (
            stop is not None
            or points == ["embed.hook_in"] * len(points)
            or "cannot be used together" in str(error)
        )
        if not expected:
            raise
    except (
        RuntimeError
    ) as error:  # one run holds edits of a norm, or of the heads' own inputs behind it
        refused = any(
            ".ln1." in point for point in points
        ) and "gives heads inputs of their own" in str(error)
        if not (backward or refused):
            raise
    assert torch_hooks(bridge.original_model) == 0
    assert [id(m.__dict__.get("config")) for m in bridge.original_model.modules()] == configs
    assert not any(point.listeners for point in bridge.hook_dict.values())
    assert torch.equal(bridge(TOKENS), PLAIN[name])


@pytest.mark.unchecked
def test_a_failing_attachment_leaves_nothing(bridge, tokens):
    with pytest.raises(KeyError), bridge.hooks(fwd_hooks=[("hook_embed", fail), ("nothing", fail)]):
        pass
    assert torch_hooks(bridge.original_model) == 0
    with pytest.raises(TypeError, match="cannot be called"):
        bridge.hook_embed.add_hook(3)
    assert torch_hooks(bridge.original_model) == 0


class NoAttention(torch.nn.Module):
    def forward(self, hidden_states, **kwargs):
        return hidden_states, None


def test_an_attention_that_cannot_be_tapped_leaves_nothing(tokens):
    model = tiny("llama")
    bridge = TransformerBridge(model)
    model.model.layers[1].self_attn = NoAttention()
    with pytest.raises(
        RuntimeError, match=r"NoAttention computed no scores .* blocks\.1\.attn\.hook_pattern"
    ):
        bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_pattern", lambda x, hook: x)])
    assert not bridge.wiring.listening
    assert not torch_hooks(model)
    assert not bridge.blocks[1].attn.hook_pattern.listeners


def test_the_users_own_torch_hooks_stay(bridge, hf, tokens):
    seen = []
    module = hf.get_submodule(bridge.block_paths[1])
    module.register_forward_hook(lambda *a: seen.append(1))
    bridge.run_with_cache(tokens)
    bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_post", lambda x, hook: x)])
    bridge.reset_hooks(including_permanent=True)
    assert len(seen) == 2
    assert torch_hooks(hf) == 1


def test_calls_leave_hooks_that_they_did_not_add(bridge, tokens):
    counts = {"kept": 0, "permanent": 0}

    def count(which):
        def fn(x, hook):
            counts[which] += 1

        return fn

    bridge.add_hook("blocks.0.hook_resid_pre", count("kept"))
    bridge.add_perma_hook("blocks.0.hook_resid_pre", count("permanent"))
    bridge.run_with_cache(tokens, names_filter="blocks.0.hook_resid_pre")
    bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: x)])
    assert counts == {"kept": 2, "permanent": 2}
    bridge.reset_hooks()
    bridge(tokens)
    assert counts == {"kept": 2, "permanent": 3}
    bridge.reset_hooks(including_permanent=True)
    bridge(tokens)
    assert counts == {"kept": 2, "permanent": 3}


@pytest.mark.unchecked
def test_handles_levels_directions_and_order(bridge, tokens):
    order = []
    add = lambda name, **more: bridge.blocks[1].hook_resid_pre.add_hook(
        lambda x, hook: order.append(name), **more
    )
    add("first"), add("second", level=2), add("zeroth", prepend=True)
    handle = add("handled")
    bridge(tokens)
    assert order == ["zeroth", "first", "second", "handled"]
    order.clear()
    handle.remove()
    handle.remove()
    bridge.reset_hooks(level=2)
    bridge(tokens)
    assert order == ["zeroth", "first"]
    order.clear()
    bridge.reset_hooks(direction="bwd")
    bridge(tokens)
    assert order == ["zeroth", "first"]
    bridge.reset_hooks(direction="fwd")
    assert torch_hooks(bridge.original_model) == 0
    with pytest.raises(ValueError, match="dir is 'forward'"):
        bridge.hook_embed.add_hook(fail, dir="forward")
    with pytest.raises(ValueError, match="dir is"):
        bridge.hook_embed.remove_hooks("forward")


def test_hooks_can_be_kept(bridge, tokens):
    plain = bridge(tokens)
    changed = bridge.run_with_hooks(
        tokens, fwd_hooks=[("hook_embed", lambda x, hook: x * 0)], reset_hooks_end=False
    )
    assert torch.equal(bridge(tokens), changed)
    bridge.reset_hooks()
    assert torch.equal(bridge(tokens), plain)


def test_contexts(bridge, tokens):
    def remember(x, hook):
        hook.ctx["mean"] = x.mean()

    bridge.run_with_hooks(tokens, fwd_hooks=[("hook_embed", remember)])
    assert "mean" in bridge.hook_embed.ctx
    bridge.hook_embed.clear_context()
    assert bridge.hook_embed.ctx == {}
    bridge.run_with_hooks(tokens, fwd_hooks=[("hook_embed", remember)], clear_contexts=True)
    assert bridge.hook_embed.ctx == {}
    bridge.add_hook("hook_embed", remember)
    bridge(tokens)
    bridge.reset_hooks(clear_contexts=False)
    assert "mean" in bridge.hook_embed.ctx
    bridge.clear_contexts()
    assert bridge.hook_embed.ctx == {}
    bridge(tokens)
    bridge.reset_hooks()
    assert bridge.hook_embed.ctx == {}


def test_a_handle_says_what_it_removes(bridge, tokens):
    plain = bridge(tokens)
    handles = bridge.add_hook("hook_embed", lambda x, hook: x * 2, is_permanent=True, level=3)
    handles.append(bridge.hook_embed.add_hook(hook=lambda x, hook: x * 2))
    assert [(handle.is_permanent, handle.context_level) for handle in handles] == [
        (True, 3),
        (False, None),
    ]
    for handle in handles:
        handle.remove()
    assert torch.equal(bridge(tokens), plain)


def test_moving_a_bridge_is_moving_its_model(bridge, monkeypatch):
    asked = []
    monkeypatch.setattr(bridge.original_model, "to", lambda *args, **kwargs: asked.append(args))
    assert bridge.cuda() is bridge.cuda(1) is bridge.cuda("cuda:2") is bridge.cpu() is bridge
    assert asked == [("cuda",), (torch.device("cuda", 1),), ("cuda:2",), ("cpu",)]
