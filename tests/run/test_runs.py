"""What runs return, for each kind of input, and the errors they give."""

from dataclasses import replace

import pytest
import torch

from bridge import TransformerBridge
from bridge.run.run import lm_loss
from tests.conftest import tiny, torch_hooks
from tests.tiny_models import tiny_model


def test_return_types(bridge, hf, tokens):
    logits = hf(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert bridge(tokens, return_type=None) is None
    torch.testing.assert_close(bridge(tokens, return_type="loss"), loss)
    torch.testing.assert_close(bridge(tokens, return_type="loss"), hf(tokens, labels=tokens).loss)
    both = bridge(tokens, return_type="both")
    assert torch.equal(both[0], logits)
    torch.testing.assert_close(both[1], loss)
    per_token = bridge(tokens, return_type="loss", loss_per_token=True)
    assert per_token.shape == (2, 8)
    torch.testing.assert_close(per_token.mean(), loss)


def test_inputs(bridge, hf, tokens):
    assert torch.equal(bridge(tokens[0]), hf(tokens[:1]).logits)
    assert torch.equal(bridge(tokens[0].tolist()), hf(tokens[:1]).logits)
    assert torch.equal(bridge(tokens.tolist()), hf(tokens).logits)
    embeddings = hf.get_input_embeddings()(tokens)
    assert torch.equal(bridge(embeddings), hf(inputs_embeds=embeddings).logits)
    assert torch.equal(bridge(embeddings[0]), hf(inputs_embeds=embeddings[:1]).logits)
    with pytest.raises(ValueError, match="a loss needs tokens"):
        bridge(embeddings, return_type="loss")
    for wrong, error in (
        (3.5, TypeError),
        (torch.zeros(2, 2, 2, 2), ValueError),
        (torch.zeros(2, dtype=torch.bool), TypeError),
    ):
        from bridge.run.inputs import Request, prepare

        with pytest.raises(error):
            prepare(bridge, Request(wrong))
    with pytest.raises(ValueError, match="no tokens"):
        bridge(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="has no tokenizer"):
        bridge("text")


def test_a_prompt_that_is_too_long(bridge):
    with pytest.raises(ValueError, match=r"the prompt has 41 tokens; .* has a context of 40"):
        bridge(torch.zeros(1, 41, dtype=torch.long))
    assert bridge(torch.zeros(1, 40, dtype=torch.long)).shape[1] == 40


def test_ids_are_those_of_the_embedding_that_is_there_now(tokens):
    model = tiny("llama")
    bridge = TransformerBridge(model)
    width, rows = model.model.embed_tokens.embedding_dim, model.model.embed_tokens.num_embeddings
    model.resize_token_embeddings(rows + 2)
    assert bridge(torch.tensor([[0, rows + 1]])) is not None
    model.model.embed_tokens = torch.nn.Embedding(3, width)
    for length in (2, 600):  # looked at one by one, and by a kernel
        for bad in (3, -1):
            ids = torch.tensor([0] * length + [bad])
            with pytest.raises(
                ValueError, match=rf"token id {bad} at \[0, {length}\].* from 0 to d_vocab - 1 = 2"
            ):
                bridge(ids)


def test_model_arguments_pass_through(bridge, hf, tokens):
    past = hf(tokens[:, :5], use_cache=True).past_key_values
    torch.testing.assert_close(
        bridge(tokens[:, 5:], past_key_values=past), hf(tokens).logits[:, 5:], atol=1e-5, rtol=1e-5
    )
    mask = torch.ones_like(tokens)
    mask[:, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    assert torch.equal(
        bridge(tokens, attention_mask=mask),
        hf(tokens, attention_mask=mask, position_ids=positions).logits,
    )


@pytest.mark.parametrize("layer", [0, 1, 2, -1])
def test_starting_and_stopping(bridge, tokens, layer):
    _, cache = bridge.run_with_cache(
        tokens, names_filter=lambda name: name.endswith("hook_resid_pre")
    )
    residual = bridge(tokens, stop_at_layer=layer)
    assert torch.equal(residual, cache["resid_pre", layer])
    torch.testing.assert_close(
        bridge(residual, start_at_layer=layer), bridge(tokens), atol=0, rtol=0
    )
    assert torch_hooks(bridge.original_model) == 0


def test_stopping_after_the_last_layer(bridge, tokens):
    residual = bridge(tokens, stop_at_layer=3)
    assert torch.equal(
        residual, bridge.run_with_cache(tokens, names_filter="ln_final.hook_in")[1]["resid_post", 2]
    )
    assert torch.equal(bridge(residual, start_at_layer=3), bridge(tokens))


def test_layers_that_do_not_run_are_not_computed_or_shown(bridge, hf, tokens):
    ran = []
    handles = [
        m.register_forward_hook(lambda mod, a, o, name=n: ran.append(name))
        for n, m in hf.named_modules()
        if n.endswith(("mlp", "self_attn", "attention", ".attn"))
    ]
    _, cache = bridge.run_with_cache(tokens, stop_at_layer=2)
    residual = bridge(tokens, stop_at_layer=2)
    assert {name.split(".")[2] for name in ran} == {"0", "1"}
    assert not any(name.startswith(("blocks.2", "ln_final")) for name in cache)
    ran.clear()
    _, cache = bridge.run_with_cache(residual, start_at_layer=2)
    assert {name.split(".")[2] for name in ran} == {"2"}
    assert not any(name.startswith(("blocks.0", "blocks.1", "hook_")) for name in cache)
    assert torch.equal(cache["resid_pre", 2], residual)
    middle = bridge(bridge(tokens, stop_at_layer=1), start_at_layer=1, stop_at_layer=2)
    assert torch.equal(middle, residual)
    for handle in handles:
        handle.remove()


def test_layers_out_of_range(bridge, tokens):
    residual = bridge(tokens, stop_at_layer=1)
    for bad in (4, -4, 99):
        with pytest.raises(ValueError, match=f"stop_at_layer is {bad}; this model has 3 layers"):
            bridge(tokens, stop_at_layer=bad)
        with pytest.raises(ValueError, match=f"start_at_layer is {bad}"):
            bridge(residual, start_at_layer=bad)
    with pytest.raises(ValueError, match="is before"):
        bridge(residual, start_at_layer=2, stop_at_layer=1)
    with pytest.raises(ValueError, match=r"the input is the residual stream, \[batch, pos, 32\]"):
        bridge(tokens, start_at_layer=1)
    with pytest.raises(ValueError, match=r"blocks.2.hook_resid_pre does not run with"):
        bridge.run_with_cache(tokens, names_filter="blocks.2.hook_resid_pre", stop_at_layer=2)
    with pytest.raises(ValueError, match=r"hook_embed does not run with"):
        bridge.run_with_hooks(
            residual, fwd_hooks=[("hook_embed", lambda x, hook: x)], start_at_layer=1
        )


def test_persistent_hooks_respect_the_layers_that_run(bridge, tokens):
    seen = []
    bridge.add_hook(lambda name: True, lambda x, hook: seen.append(hook.name))
    residual = bridge(tokens, stop_at_layer=1)
    seen.clear()
    bridge(residual, start_at_layer=1)
    assert seen
    assert all(
        not name.startswith(("blocks.0", "hook_embed", "embed", "hook_pos")) for name in seen
    )
    bridge.reset_hooks()


def test_what_a_cache_keeps(bridge, tokens):
    _, cache = bridge.run_with_cache(tokens)
    assert all(not value.requires_grad for value in cache.values())
    _, plain = bridge.run_with_cache(tokens, return_cache_object=False)
    assert type(plain) is dict
    assert list(plain) == list(cache)
    _, last = bridge.run_with_cache(tokens, pos_slice=-1)
    for name, value in last.items():
        whole = cache[name]
        if name.endswith(("hook_pattern", "hook_attn_scores")):
            torch.testing.assert_close(
                value, whole[:, :, -1:], atol=1e-6, rtol=0
            )  # of these queries alone
        else:
            assert torch.equal(value, whole[:, -1:]), name
    _, some = bridge.run_with_cache(tokens, names_filter="hook_embed", pos_slice=[0, 3])
    assert torch.equal(some["hook_embed"], cache["hook_embed"][:, [0, 3]])
    _, single = bridge.run_with_cache(tokens[:1], remove_batch_dim=True)
    assert torch.equal(
        single["resid_post", 1], bridge.run_with_cache(tokens[:1])[1]["resid_post", 1][0]
    )
    with pytest.raises(ValueError, match="cannot remove a batch axis of 2"):
        bridge.run_with_cache(tokens, remove_batch_dim=True)
    _, moved = bridge.run_with_cache(tokens, device="meta")
    assert all(value.device.type == "meta" for value in moved.values())


def test_cached_values_are_not_changed_by_hooks_that_come_later(bridge, tokens):
    def wreck(x, hook):
        x.zero_()

    names = [name for name in bridge.hook_dict if bridge.hook_dict[name].point.group == "standard"]
    _, clean = bridge.run_with_cache(tokens)
    last = names[-1]
    with bridge.hooks(fwd_hooks=[(last, wreck)]):
        _, cache = bridge.run_with_cache(tokens)
    for name in names[:-1]:
        torch.testing.assert_close(cache[name], clean[name], atol=1e-5, rtol=1e-5)
    assert (cache[last] == 0).all()


def test_gradients_in_the_cache(bridge, tokens):
    loss, cache = bridge.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    assert all(p.grad is None for p in bridge.parameters())
    gradients = {}

    def keep(gradient, hook):
        gradients[hook.name] = gradient.clone()

    names = [name for name in bridge.hook_dict if bridge.hook_dict[name].point.group == "standard"]
    loss = bridge.run_with_hooks(tokens, return_type="loss", bwd_hooks=[(names, keep)])
    loss.backward()
    assert set(gradients) == set(names)
    for name in names:
        torch.testing.assert_close(cache[name + "_grad"], gradients[name], msg=name)
    with pytest.raises(ValueError, match="single number"):
        bridge.run_with_cache(tokens, incl_bwd=True)
    with torch.no_grad(), pytest.raises(ValueError, match="switched off"):
        bridge.run_with_cache(tokens, incl_bwd=True, return_type="loss")


def test_gradients_with_frozen_weights(bridge, tokens):
    expected = bridge.run_with_cache(tokens, return_type="loss", incl_bwd=True)[1]
    bridge.requires_grad_(False)
    _, cache = bridge.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    for name in ("hook_embed_grad", "blocks.1.hook_resid_pre_grad", "blocks.2.attn.hook_z_grad"):
        torch.testing.assert_close(cache[name], expected[name])


def test_caching_hooks_without_the_batch_axis(bridge, tokens):
    name = "blocks.0.hook_resid_pre"
    cache, forward, _ = bridge.get_caching_hooks(name, remove_batch_dim=True, pos_slice=(1, 4))
    with pytest.raises(ValueError, match="batch"):
        bridge.run_with_hooks(tokens, fwd_hooks=forward)
    assert not cache
    bridge.run_with_hooks(tokens[:1], fwd_hooks=forward)
    assert torch.equal(
        cache[name], bridge.run_with_cache(tokens[:1], names_filter=name)[1][name][0, 1:4]
    )


@pytest.mark.unchecked
@pytest.mark.parametrize("add", [False, True])
def test_positions_of_caching_hooks_are_refused_before_a_run(bridge, add):
    make = bridge.add_caching_hooks if add else bridge.get_caching_hooks
    with pytest.raises(
        TypeError, match=r"pos_slice is 1\.5; it must be an index, a slice, or a list of indices"
    ):
        make("blocks.0.hook_resid_pre", pos_slice=1.5)
    assert not any(point.listeners for point in bridge.hook_dict.values())


def test_caching_hooks(bridge, tokens):
    cache, forward, backward = bridge.get_caching_hooks("blocks.0.hook_resid_pre", incl_bwd=True)
    bridge.run_with_hooks(
        tokens, fwd_hooks=forward, bwd_hooks=backward, return_type="loss"
    ).backward()
    assert list(cache) == ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_pre_grad"]
    persistent = bridge.add_caching_hooks("blocks.0.hook_resid_pre")
    bridge(tokens)
    assert torch.equal(persistent["blocks.0.hook_resid_pre"], cache["blocks.0.hook_resid_pre"])
    bridge.reset_hooks()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_their_solo_runs(embedded, side):
    texts = [
        "Mary",
        "When Mary and John went to the store, John gave a drink to",
        "Mary and John went",
    ]
    logits, cache = embedded.run_with_cache(texts, padding_side=side)
    losses = embedded(texts, padding_side=side, return_type="loss", loss_per_token=True)
    predictions = embedded(texts, padding_side=side, return_type="predictions")
    for i, text in enumerate(texts):
        solo, solo_cache = embedded.run_with_cache(text)
        n = solo.shape[1]
        rows = slice(logits.shape[1] - n, None) if side == "left" else slice(0, n)
        torch.testing.assert_close(logits[i, rows], solo[0], atol=1e-4, rtol=1e-4)
        pairs = slice(losses.shape[1] - n + 1, None) if side == "left" else slice(0, n - 1)
        torch.testing.assert_close(
            losses[i, pairs],
            embedded(text, return_type="loss", loss_per_token=True)[0],
            atol=1e-4,
            rtol=1e-4,
        )
        torch.testing.assert_close(losses[i].sum(), losses[i, pairs].sum())
        assert predictions[i] == embedded(text, return_type="predictions")
        for name, value in solo_cache.items():
            batched = cache[name][i]
            if name.endswith(("hook_pattern", "hook_attn_scores")):
                torch.testing.assert_close(
                    batched[:, rows, rows], value[0], atol=1e-4, rtol=1e-4, msg=name
                )
            else:
                torch.testing.assert_close(batched[rows], value[0], atol=1e-4, rtol=1e-4, msg=name)


def test_loss_of_a_padded_batch_counts_real_tokens_only():
    logits = torch.randn(2, 4, 5)
    tokens = torch.tensor([[1, 2, 3, 4], [0, 0, 1, 2]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    expected = torch.cat(
        [
            lm_loss(logits[:1], tokens[:1], per_token=True)[0],
            lm_loss(logits[1:, 2:], tokens[1:, 2:], per_token=True)[0],
        ]
    )
    torch.testing.assert_close(lm_loss(logits, tokens, mask), expected.mean())
    logits[1, :2] = (
        torch.nan
    )  # what a padded position computes is no number, where it may read nothing
    torch.testing.assert_close(lm_loss(logits, tokens, mask), expected.mean())
    assert lm_loss(logits, tokens, mask, per_token=True)[1, :2].tolist() == [0, 0]


@pytest.mark.unchecked
def test_a_mask_of_another_shape_is_no_mask_of_the_loss():
    tokens = torch.tensor([[1, 2, 3, 4], [0, 0, 1, 2]])
    with pytest.raises(
        ValueError, match=r"attention_mask has shape \[1, 4\], and the tokens \[2, 4\]"
    ):
        lm_loss(
            torch.randn(2, 4, 5), tokens, tokens[:1]
        )  # it would count one row's tokens, and add up two rows' losses


def test_headless_and_other_heads(tokens):
    from transformers import GPT2ForSequenceClassification

    config = tiny("gpt2").config
    config.pad_token_id = 0
    model = GPT2ForSequenceClassification(config).eval()
    bridge = TransformerBridge(model)
    assert torch.equal(bridge(tokens), model(tokens).logits)
    assert "unembed.hook_in" not in bridge.hook_dict


def test_caching_hooks_can_be_left_in_place(bridge, tokens):
    _, cache = bridge.run_with_cache(
        tokens, names_filter="blocks.1.hook_resid_pre", reset_hooks_end=False
    )
    first = cache["resid_pre", 1].clone()
    bridge(tokens + 1)
    assert not torch.equal(cache["resid_pre", 1], first)
    assert torch.equal(cache["resid_pre", 1], bridge(tokens + 1, stop_at_layer=1))
    bridge.reset_hooks()
    assert torch_hooks(bridge.original_model) == 0


@pytest.mark.parametrize(
    "kind", ["llama", "gemma2", "granite", "granitemoe", "falcon_h1", "ctrl", "biogpt", "xglm"]
)
def test_rows_of_W_E_in_place_of_tokens_are_their_run(kind, tokens):
    bridge = TransformerBridge(tiny_model(kind))
    model, rows = bridge.original_model, bridge.W_E[tokens]
    logits, cache = bridge.run_with_cache(tokens)
    assert torch.equal(rows, cache["hook_embed"])
    torch.testing.assert_close(bridge(rows), logits)
    own = model.get_input_embeddings()(tokens)
    wanted = model(inputs_embeds=own.clone()).logits  # which may write over them
    assert torch.equal(bridge(inputs_embeds=own.clone()), wanted)
    assert torch.equal(bridge({"inputs_embeds": own.clone()}), wanted)


def test_embeddings_with_which_a_model_does_something_else_are_refused(tokens):
    bridge = TransformerBridge(tiny_model("granite"))
    made = replace(bridge.architecture.embedding, given="other")
    with pytest.raises(ValueError, match="edit hook_embed in a run of tokens"):
        made.in_place_of_tokens(bridge.W_E[tokens])


def test_a_generation_goes_on_with_rows_of_W_E_as_with_their_tokens(tokens):
    bridge, options = (
        TransformerBridge(tiny_model("granite")),
        {"max_new_tokens": 3, "do_sample": False, "verbose": False},
    )
    options |= {"return_type": "tokens", "stop_at_eos": False}
    wanted = bridge.generate(tokens, **options)[:, tokens.shape[1] :]
    assert torch.equal(bridge.generate(bridge.W_E[tokens], **options)[:, -3:], wanted)
    own = bridge.original_model.get_input_embeddings()(tokens)
    assert torch.equal(bridge.generate(inputs_embeds=own, **options)[:, -3:], wanted)
