"""Runs inside the hooks of runs, several bridges around one model, and what belongs to which."""

import copy
import threading

import pytest
import torch

from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny as any_tiny
from tests.conftest import FAMILIES, tiny, torch_hooks
from tests.tiny_models import checkpoint


def test_a_run_in_a_hook_is_a_run_of_its_own(tokens):
    outer, inner = TransformerBridge(tiny("gpt2")), TransformerBridge(tiny("llama"))
    plain, residual = outer(tokens), outer(tokens, stop_at_layer=2)
    results = []

    def run_both(x, hook):
        if not results:
            results.append(None)
            results.append(outer(tokens))
            results.append(inner(tokens))

    hook = [("blocks.0.hook_mlp_out", run_both)]
    assert torch.equal(outer.run_with_hooks(tokens, fwd_hooks=hook, stop_at_layer=2), residual)
    assert torch.equal(results[1], plain)
    results.clear()
    assert torch.equal(
        outer.run_with_hooks(outer(tokens, stop_at_layer=0), fwd_hooks=hook, start_at_layer=0),
        plain,
    )
    assert torch.equal(results[1], plain)

    seen = []

    def look(x, hook):
        with inner.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda y, hook: seen.append(1))]):
            inner(tokens)

    outer.run_with_hooks(residual, fwd_hooks=[("blocks.2.hook_mlp_out", look)], start_at_layer=2)
    assert seen == [1]

    def edit(x, hook):
        inner(tokens)
        return x * 0

    changed = outer.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_attn_in", edit)])
    assert not torch.equal(changed, plain)


def test_a_run_in_a_hook_leaves_the_cache_alone(bridge, tokens):
    _, expected = bridge.run_with_cache(tokens)
    caches = []

    def run(x, hook):
        if not caches:
            caches.append(None)
            caches[0] = bridge.run_with_cache(tokens[:, :4])[1]

    with bridge.hooks(fwd_hooks=[("blocks.1.attn.hook_z", run)]):
        _, cache = bridge.run_with_cache(tokens)
    for name in expected:
        assert torch.equal(cache[name], expected[name]), name
    _, short = bridge.run_with_cache(tokens[:, :4])
    for name in short:
        assert torch.equal(caches[0][name], short[name]), name


def test_a_run_in_a_hook_leaves_the_cache_of_a_generation_alone(tokens):
    bridge = TransformerBridge(tiny("llama"))
    given = {
        "max_new_tokens": 3,
        "do_sample": False,
        "return_type": "tokens",
        "return_cache": True,
        "verbose": False,
    }
    made, expected = bridge.generate(tokens, **given)
    running = []

    def run(x, hook):
        if not running:
            running.append(1)
            bridge(tokens[:, :4])
            running.clear()

    with bridge.hooks(fwd_hooks=[("blocks.1.attn.hook_z", run)]):
        again, cache = bridge.generate(tokens, **given)
    assert torch.equal(again, made)
    for name in expected:
        assert torch.equal(cache[name], expected[name]), name


@pytest.mark.parametrize("inside", ["softmax", "run", "cache"])
def test_a_softmax_of_a_hook_is_not_the_models(tokens, inside):
    bridge, other = TransformerBridge(any_tiny("bloom")), TransformerBridge(tiny("llama", "eager"))
    _, cache = TransformerBridge(tiny("llama")).run_with_cache(tokens[:, :4])
    compute = {
        "softmax": lambda x: x.softmax(-1),
        "run": lambda x: other(tokens[:, :4]),
        "cache": lambda x: cache["pattern", 0],
    }[inside]

    def hook(x, hook):
        compute(x)

    _, expected = bridge.run_with_cache(tokens)
    with bridge.hooks(fwd_hooks=[("blocks.0.attn.hook_q", hook)]):
        _, found = bridge.run_with_cache(tokens)
    for name in ("hook_attn_scores", "hook_pattern"):
        assert torch.equal(found[f"blocks.0.attn.{name}"], expected[f"blocks.0.attn.{name}"])


def test_two_bridges_around_one_model(family, tokens):
    model = tiny(family)
    one, other = TransformerBridge(model), TransformerBridge(model)
    seen = []
    first = one.blocks[0].attn.hook_pattern.add_hook(lambda x, hook: seen.append("one"))
    second = other.blocks[0].attn.hook_pattern.add_hook(lambda x, hook: seen.append("other"))
    one(tokens)
    assert sorted(seen) == ["one", "other"]  # the hooks are on the model, whichever bridge runs it
    seen.clear()
    first.remove()
    other(tokens)
    assert seen == ["other"]
    other.run_with_cache(tokens)
    seen.clear()
    other(tokens)
    assert seen == ["other"]
    second.remove()
    assert torch_hooks(model) == 0
    with pytest.raises(ValueError, match="belongs to another bridge"):
        one.run_with_hooks(tokens, fwd_hooks=[(other.hook_embed, lambda x, hook: x)])


def test_a_shallow_copy_leaves_the_hooks_of_the_original(bridge, tokens):
    seen = []
    bridge.add_hook("blocks.1.attn.hook_pattern", lambda x, hook: seen.append(1))
    bridge.add_hook("hook_embed", lambda x, hook: seen.append(1))
    twin = copy.copy(bridge)
    assert twin.original_model is bridge.original_model
    bridge(tokens)
    assert len(seen) == 2
    bridge.reset_hooks()


def test_what_follows_a_hook_stays_with_it(bridge, tokens):
    zero = lambda x, hook: x * 0
    plain = bridge(tokens)
    bridge.add_perma_hook("blocks.0.hook_attn_in", zero)
    edited = bridge(tokens)
    assert not torch.equal(edited, plain)
    bridge.reset_hooks()
    bridge.blocks[0].hook_v_input.remove_hooks("both")
    assert torch.equal(bridge(tokens), edited)
    bridge.reset_hooks(including_permanent=True)
    assert torch.equal(bridge(tokens), plain)
    assert torch_hooks(bridge.original_model) == 0
    gradients = []
    bridge.add_hook("blocks.0.hook_attn_in", lambda g, hook: gradients.append(g), "bwd")
    bridge.reset_hooks(direction="fwd")
    bridge(tokens, return_type="loss").backward()
    assert len(gradients) == 1
    bridge.reset_hooks()


def test_adding_to_many_points_is_all_or_nothing(bridge):
    watch = lambda g, hook: None
    bridge.add_hook("blocks.1.hook_q_input", lambda x, hook: x)
    before = torch_hooks(bridge.original_model)
    with pytest.raises(ValueError, match="cannot be used together"):
        bridge.add_hook(["blocks.0.hook_resid_pre", "blocks.1.ln1.hook_scale"], watch, "bwd")
    assert torch_hooks(bridge.original_model) == before
    assert not bridge.blocks[0].hook_resid_pre.listeners
    bridge.reset_hooks()


def test_attribution_patching_over_all_points(bridge, tokens):
    kept = {}

    def forward(x, hook):
        kept[hook.name] = x.detach()

    def backward(g, hook):
        kept[hook.name + "_grad"] = g.detach()

    bridge.add_hook(lambda name: not any(own in name for own in ("_input", "attn_in")), forward)
    bridge.add_hook(
        lambda name: not any(own in name for own in ("_input", "attn_in")), backward, "bwd"
    )
    bridge(tokens, return_type="loss").backward()
    bridge.reset_hooks()
    standard = [name for name, hook in bridge.hook_dict.items() if hook.point.group == "standard"]
    assert set(kept) >= {*standard, *(name + "_grad" for name in standard)}


def test_in_place_changes_of_gradients_and_of_data_count(bridge, tokens):
    embed = bridge.original_model.get_input_embeddings().weight

    def gradient(hook):
        loss = bridge.run_with_hooks(
            tokens, return_type="loss", bwd_hooks=[("blocks.1.hook_mlp_out", hook)]
        )
        return torch.autograd.grad(loss, embed)[0]

    assert torch.equal(
        gradient(lambda g, hook: g * 0), gradient(lambda g, hook: (g.zero_(), None)[1])
    )
    with torch.no_grad():

        def by_data(x, hook):
            x.data.zero_()

        wipe = bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_mlp_out", by_data)])
        zeroed = bridge.run_with_hooks(
            tokens, fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x * 0)]
        )
    assert torch.equal(wipe, zeroed)
    with pytest.raises(TypeError, match=r"backward hook .* returned float"):
        bridge.run_with_hooks(
            tokens, return_type="loss", bwd_hooks=[("hook_embed", lambda g, hook: 0.0)]
        ).backward()


@pytest.mark.parametrize("part", ["model", "forward", "block"])
@torch.no_grad()
def test_compiled_models_run_hooks(tokens, part):
    model = tiny("llama")
    plain = model(tokens).logits
    if part == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    elif part == "block":
        model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    bridge = TransformerBridge(torch.compile(model, backend="eager") if part == "model" else model)
    torch.testing.assert_close(bridge(tokens), plain)
    zeroed = bridge.run_with_hooks(
        tokens, fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x * 0)]
    )
    expected = TransformerBridge(tiny("llama")).run_with_hooks(
        tokens, fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x * 0)]
    )
    torch.testing.assert_close(zeroed, expected)
    torch.testing.assert_close(bridge(tokens), plain)
    assert bridge(tokens, stop_at_layer=1).shape == (2, 9, 32)
    _, cache = bridge.run_with_cache(tokens)
    assert list(cache) == list(TransformerBridge(tiny("llama")).run_with_cache(tokens)[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_leaves_the_graph_alone(family, tokens):
    grads = []
    for checkpointing in (True, False):
        model = tiny(family).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpointing:
            checkpoint(model)
        loss, cache = TransformerBridge(model).run_with_cache(
            tokens, return_type="loss", use_cache=False
        )
        loss.backward()  # the blocks run again, without the hooks
        assert not any(value.requires_grad for value in cache.values())
        grads.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_finished_threads_hooks_can_be_removed(bridge, tokens):
    thread = threading.Thread(target=lambda: bridge.add_hook("hook_embed", lambda x, hook: x))
    thread.start()
    thread.join()
    assert (
        torch_hooks(bridge.original_model) == 4
    )  # the site's, where a pass begins and ends, what keeps compiled code away
    bridge.reset_hooks()
    assert torch_hooks(bridge.original_model) == 0


def test_masks_that_do_not_fit(bridge, tokens):
    with pytest.raises(
        ValueError, match=r"attention_mask has shape \[2, 8\]; it must have \[2, 9\]"
    ):
        bridge(tokens, attention_mask=torch.ones(2, 8, dtype=torch.long))
    boolean = torch.ones(2, 9, dtype=torch.bool)
    assert torch.equal(
        bridge(tokens, attention_mask=boolean), bridge(tokens, attention_mask=boolean.long())
    )
    with pytest.raises(TypeError, match="input_ids is the input itself"):
        bridge(tokens, input_ids=tokens)


def test_continuing_a_padded_prompt(bridge, tokens):
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    _, past = bridge(tokens, attention_mask=mask, return_type="logits_and_cache")
    token = torch.tensor([[3], [4]])
    longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], -1)
    logits = bridge(token, attention_mask=longer, past_key_values=past)
    solo = bridge(torch.cat([tokens[1, :6], token[1]]))[0, -1]
    torch.testing.assert_close(logits[1, -1], solo, atol=1e-5, rtol=1e-4)


@pytest.mark.unchecked
def test_models_that_predict_nothing(tokens):
    bridge = TransformerBridge(tiny("gpt2").transformer)
    for kind in ("loss", "both", "predictions"):
        with pytest.raises(ValueError, match="has no unembedding"):
            bridge(tokens, return_type=kind)
    with pytest.raises(TypeError, match="which is no model"):
        TransformerBridge("gpt2")


def test_labels_give_the_models_own_loss(bridge, tokens):
    labels = tokens.clone()
    labels[:, :4] = -100
    expected = bridge.original_model(tokens, labels=labels).loss
    assert torch.equal(bridge(tokens, labels=labels, return_type="loss"), expected)


def test_properties_say_themselves_what_they_lack():
    with pytest.raises(AttributeError, match=r"has no pos_embed\.W_pos"):
        _ = TransformerBridge(tiny("llama")).W_pos


def test_assignments_that_would_be_lost(bridge):
    with pytest.raises(AttributeError, match="cannot be assigned"):
        bridge.blocks[0].attn.W_Q = torch.zeros(1)
