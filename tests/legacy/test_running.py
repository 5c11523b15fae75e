"""Running, hooks, tokens and generation as HookedTransformer code calls them."""

import functools

import pytest
import torch

from bridge.legacy import HookedTransformer, HookedTransformerKeyValueCache, utils
from tests.reference import DATA, reference

FAMILIES = ["gpt2", "llama", "bloom", "gemma2"]


@pytest.fixture
def tokens():
    return reference("gpt2")["tokens"]


def double(x, hook):
    return x * 2


def test_the_order_of_arguments(model, tokens):
    logits, loss = model(tokens, "both")
    close = functools.partial(
        torch.allclose, atol=1e-4
    )  # a cached pattern is computed by another kernel
    assert torch.equal(
        model(tokens, "loss", True), utils.lm_cross_entropy_loss(logits, tokens, per_token=True)
    )
    both = model(tokens, return_type="both")
    assert torch.equal(both.logits, logits)
    assert torch.equal(both.loss, loss)
    assert model(tokens, None) is None
    residual = model(tokens, stop_at_layer=1)
    assert torch.equal(model(residual, "logits", False, None, None, 1), logits)
    assert close(model(residual, "loss", start_at_layer=1, tokens=tokens), loss)
    again = model(residual, return_type="both", start_at_layer=-1, tokens=tokens)
    assert torch.equal(again.logits, logits)
    (out_logits, out_loss), cache = model.run_with_cache(tokens, "both", True)
    assert out_loss.shape == (2, 9)
    assert close(out_logits, logits)
    assert torch.equal(model.run_with_hooks(tokens, "loss", fwd_hooks=[]), loss)
    assert torch.equal(cache["resid_post", -1], cache["blocks.1.hook_resid_post"])


def test_what_cannot_be_given(model, tokens):
    with pytest.raises(ValueError, match="shortformer_pos_embed"):
        model(tokens, shortformer_pos_embed=torch.zeros(1))
    with pytest.raises(ValueError, match="tokens are for start_at_layer"):
        model(tokens, tokens=tokens)
    with pytest.raises(TypeError, match=r"'loss_per_tokn'.*Did you mean loss_per_token"):
        model(tokens, loss_per_tokn=True)
    with pytest.raises(AttributeError, match="no get_residual: input_to_embed"):
        model.get_residual(tokens)


def test_stopping_at_each_layer(model, tokens):
    _, cache = model.run_with_cache(tokens)
    assert torch.equal(model(tokens, stop_at_layer=0), cache["blocks.0.hook_resid_pre"])
    assert torch.allclose(
        model(tokens, stop_at_layer=-1), cache["blocks.1.hook_resid_pre"], atol=1e-5
    )
    out, partial = model.run_with_cache(tokens, stop_at_layer=1)
    assert torch.allclose(out, cache["blocks.0.hook_resid_post"], atol=1e-5)
    assert "blocks.0.hook_resid_post" in partial
    assert "blocks.1.hook_resid_pre" not in partial


def test_hooks_outside_of_the_layers_that_run_do_not_fire(model, tokens):
    fired = []

    def note(x, hook):
        fired.append(hook.name)

    names = ["hook_embed", "blocks.0.attn.hook_k", "blocks.1.mlp.hook_pre"]
    model.run_with_hooks(tokens, stop_at_layer=1, fwd_hooks=[(name, note) for name in names])
    assert fired == names[:2]
    fired.clear()
    residual = model(tokens, stop_at_layer=1)
    model.run_with_hooks(
        input=residual, start_at_layer=1, fwd_hooks=[(name, note) for name in names]
    )
    assert fired == names[2:]
    _, cache = model.run_with_cache(tokens, names_filter=names, stop_at_layer=1)
    assert list(cache) == names[:2]
    _, cache = model.run_with_cache(tokens, names_filter=names[2:], stop_at_layer=1)
    assert not list(cache)


def test_the_tokens_that_are_embedded(model, tokens):
    def other(ids, hook):
        ids[:, 0] = 7
        return ids

    changed = tokens.clone()
    changed[:, 0] = 7
    assert torch.equal(
        model.run_with_hooks(tokens, fwd_hooks=[("hook_tokens", other)]), model(changed)
    )
    _, cache = model.run_with_cache(tokens, names_filter=["hook_tokens"])
    assert torch.equal(cache["hook_tokens"], tokens)


def test_what_enters_the_first_block(model, tokens):
    residual, ids, positions, mask = model.input_to_embed(tokens)
    assert torch.equal(residual, model(tokens, stop_at_layer=0))
    assert torch.equal(ids, tokens)
    assert positions is mask is None
    texts = [model.to_string(row) for row in (tokens[0], tokens[1, :4])]
    for side in ("left", "right"):
        residual, ids, _, mask = model.input_to_embed(texts, prepend_bos=False, padding_side=side)
        assert torch.equal(ids, model.to_tokens(texts, False, side))
        right = model(texts, "loss", prepend_bos=False, padding_side=side)
        again = model(residual, "loss", start_at_layer=0, tokens=ids, attention_mask=mask)
        assert torch.allclose(again, right, atol=1e-5)
    given = torch.ones_like(tokens)
    given[1, 3] = 0
    residual, _, _, mask = model.input_to_embed(tokens, attention_mask=given)
    right = model(tokens, attention_mask=given)
    assert torch.allclose(model(residual, start_at_layer=0, attention_mask=mask), right, atol=1e-5)


def test_a_shortformer():
    fields = {
        "n_layers": 2,
        "d_model": 8,
        "n_ctx": 9,
        "d_head": 4,
        "d_vocab": 10,
        "act_fn": "relu",
        "device": "cpu",
    }
    model = HookedTransformer(fields | {"positional_embedding_type": "shortformer"})
    tokens = torch.arange(10).reshape(2, 5)
    residual, ids, positions, _ = model.input_to_embed(tokens)
    assert torch.equal(positions[1], model.W_pos[:5])
    loss = model(residual, "loss", start_at_layer=0, tokens=ids, shortformer_pos_embed=positions)
    assert torch.allclose(loss, model(tokens, "loss"), atol=1e-6)
    with pytest.raises(ValueError, match="not what the model adds"):
        model(residual, start_at_layer=0, shortformer_pos_embed=positions + 1)


def test_filters_choose_what_is_switched_on(model, tokens):
    _, cache = model.run_with_cache(tokens, names_filter=lambda name: True)
    assert "blocks.0.attn.hook_result" not in cache
    assert "blocks.0.hook_q_input" not in cache
    assert "embed.hook_in" not in cache
    model.set_use_attn_result(use_attn_result=True)
    model.set_use_split_qkv_input(use_split_qkv_input=True)
    model.set_use_hook_mlp_in(use_hook_mlp_in=True)
    _, cache = model.run_with_cache(tokens, names_filter=lambda name: True)
    right = {
        key.split("/", 2)[2]
        for key in reference("gpt2")
        if key.startswith(("processed/cache", "processed_fine/cac"))
    }
    assert set(cache) == right


def test_heads_and_their_results(model, tokens):
    model.set_use_attn_result(True)
    _, cache = model.run_with_cache(tokens)
    total = cache["result", 1].sum(-2) + model.blocks[1].attn.b_O
    assert torch.allclose(total, cache["attn_out", 1], atol=1e-5)


def test_the_input_of_one_head(model, tokens):
    """Only the queries of head 2 change when only their input does."""
    model.set_use_split_qkv_input(True)

    def other(x, hook):
        x[:, :, 2] = x[:, :, 2].flip(-1)
        return x

    with model.hooks(fwd_hooks=[("blocks.1.hook_q_input", other)]):
        _, changed = model.run_with_cache(tokens)
    _, cache = model.run_with_cache(tokens)
    same = [
        torch.allclose(changed["q", 1][:, :, h], cache["q", 1][:, :, h], atol=1e-6)
        for h in range(4)
    ]
    assert same == [True, True, False, True]
    assert torch.equal(changed["k", 1], cache["k", 1])


def test_positions_of_a_cache(model, tokens):
    _, whole = model.run_with_cache(tokens)
    for given, positions in (
        (-1, [9]),
        (utils.Slice((2, 8, 3)), [2, 5]),
        ((3, 5), [3, 4]),
        ([0, 4], [0, 4]),
        (torch.tensor([1, 2]), [1, 2]),
    ):
        _, cache = model.run_with_cache(
            tokens, pos_slice=given, names_filter=["hook_embed", "blocks.0.attn.hook_q"]
        )
        assert torch.equal(cache["hook_embed"], whole["hook_embed"][:, positions])
        assert torch.equal(cache["q", 0], whole["q", 0][:, positions])


def test_hooks_of_all_kinds(model, tokens):
    plain = model(tokens)
    model.add_perma_hook("blocks.0.hook_mlp_out", double)
    model.add_hook(lambda name: name.endswith("hook_attn_out"), double)
    changed = model(tokens)
    model.reset_hooks()
    permanent = model(tokens)
    assert not torch.equal(changed, permanent)
    assert not torch.equal(permanent, plain)
    model.reset_hooks(including_permanent=True)
    assert torch.equal(model(tokens), plain)
    model.add_hook("hook_embed", double, level=3)
    model.remove_all_hook_fns(level=2)
    assert not torch.equal(model(tokens), plain)
    model.remove_all_hook_fns(level=3)
    assert torch.equal(model(tokens), plain)
    order = []
    model.add_hook("hook_embed", lambda x, hook: order.append("a"))
    model.add_hook("hook_embed", lambda x, hook: order.append("b"), prepend=True)
    model(tokens)
    assert order == ["b", "a"]
    with model.hooks(fwd_hooks=[("hook_embed", lambda x, hook: order.append("c"))]) as hooked:
        hooked(tokens)
    assert order == ["b", "a", "b", "a", "c"]


def test_the_hooks_that_are_there(model, tokens):
    point = model.hook_dict["hook_embed"]
    model.add_perma_hook("hook_embed", double)
    with model.hooks(
        fwd_hooks=[("hook_embed", double)], bwd_hooks=[(lambda name: name == "hook_embed", double)]
    ):
        model.run_with_cache(tokens)
        assert (len(point.fwd_hooks), len(point.bwd_hooks)) == (2, 1)
        point.fwd_hooks[1].remove()
    assert (len(point.fwd_hooks), len(point.bwd_hooks)) == (1, 0)
    model.remove_all_hook_fns(including_permanent=True)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_caching_hooks(model, tokens):
    cache = model.add_caching_hooks(["hook_embed"], incl_bwd=True)
    model(tokens, return_type="loss").backward()
    assert set(cache) == {"hook_embed", "hook_embed_grad"}
    model.zero_grad()
    model.reset_hooks()
    mine = {}
    model.cache_some(mine, lambda name: "pattern" in name)
    model(tokens)
    assert list(mine) == ["blocks.0.attn.hook_pattern", "blocks.1.attn.hook_pattern"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_keys_and_values_equals_one_run(family):
    model = HookedTransformer.from_pretrained_no_processing(str(DATA / family), device="cpu")
    tokens = reference(family)["tokens"]
    whole = model(tokens)
    cache = HookedTransformerKeyValueCache.init_cache(model.cfg, model.cfg.device, 2)
    assert cache[0].past_keys.shape[:2] == (2, 0)
    pieces = [
        model(tokens[:, start:stop], past_kv_cache=cache)
        for start, stop in ((0, 4), (4, 5), (5, 10))
    ]
    assert torch.allclose(torch.cat(pieces, 1), whole, atol=1e-4)
    assert all(entry.past_values.shape[1] == 10 for entry in cache.entries)
    assert cache.previous_attention_mask.shape == (2, 10)


def test_a_frozen_cache_stays(model, tokens):
    cache = HookedTransformerKeyValueCache.init_cache(model.cfg, model.cfg.device, 2)
    model(tokens[:, :6], past_kv_cache=cache)
    cache.freeze()
    first = model(tokens[:, 6:], past_kv_cache=cache)
    assert cache[1].past_keys.shape[1] == cache.previous_attention_mask.shape[1] == 6
    assert torch.equal(model(tokens[:, 6:], past_kv_cache=cache), first)
    cache.unfreeze()
    loss = model(tokens[:, 6:], "loss", past_kv_cache=cache)
    assert torch.allclose(loss, utils.lm_cross_entropy_loss(first, tokens[:, 6:]), atol=1e-5)
    assert len(cache) == 2
    assert cache[0].past_keys.shape[1] == 10


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_cache_whose_padding_is_on_the_side_that_the_run_names(family, side):
    model = HookedTransformer.from_pretrained_no_processing(str(DATA / family), device="cpu")
    pad, rows = model.tokenizer.pad_token_id, [[5, 6, 7, 8], [9, 10]]
    first = torch.tensor(
        [rows[0], [pad, pad, *rows[1]] if side == "left" else [*rows[1], pad, pad]]
    )
    second = torch.tensor([[11, 12], [pad, 13] if side == "left" else [13, pad]])
    alone = model(torch.tensor([[*rows[1], 13]]))[0, -1]
    cache = HookedTransformerKeyValueCache.init_cache(model.cfg, "cpu", 2)
    for other in ("left", "right"):
        model.tokenizer.padding_side = other
        model(first, past_kv_cache=cache, padding_side=side, prepend_bos=False)
        cache.freeze()
        last = model(second, past_kv_cache=cache, padding_side=side, prepend_bos=False)[1]
        assert torch.allclose(last[1 if side == "left" else 0], alone, atol=1e-4)
        cache = HookedTransformerKeyValueCache.init_cache(model.cfg, "cpu", 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_starting_at_a_layer_after_earlier_tokens(family):
    model = HookedTransformer.from_pretrained_no_processing(str(DATA / family), device="cpu")
    tokens = reference(family)["tokens"]
    whole = model(tokens)[:, 7:]
    cache = HookedTransformerKeyValueCache.init_cache(model.cfg, "cpu", 2)
    model(tokens[:, :7], past_kv_cache=cache)
    cache.freeze()
    new = tokens[:, 7:]
    _, ids, _, mask = model.input_to_embed(new, past_kv_cache=cache)
    assert mask.shape == (2, 10)
    residual = model(new, stop_at_layer=1, past_kv_cache=cache)
    for layer, x in ((1, residual), (0, model.input_to_embed(new, past_kv_cache=cache)[0])):
        again = model(x, start_at_layer=layer, tokens=ids, attention_mask=mask, past_kv_cache=cache)
        assert torch.allclose(again, whole, atol=1e-4)
        loss = model(
            x, "loss", start_at_layer=layer, tokens=ids, attention_mask=mask, past_kv_cache=cache
        )
        assert torch.allclose(loss, utils.lm_cross_entropy_loss(whole, new), atol=1e-4)
    cache.unfreeze()
    embedded, _, _, mask = model.input_to_embed(new[:, :1], past_kv_cache=cache)
    assert torch.allclose(
        model(embedded, start_at_layer=0, attention_mask=mask, past_kv_cache=cache),
        whole[:, :1],
        atol=1e-4,
    )
    assert torch.allclose(model(new[:, 1:], past_kv_cache=cache), whole[:, 1:], atol=1e-4)
    assert cache.previous_attention_mask.shape == (2, 10)


def test_a_cache_is_as_before_when_a_run_fails(model, tokens):
    def fail(x, hook):
        raise ZeroDivisionError

    cache = HookedTransformerKeyValueCache.init_cache(model.cfg, "cpu", 2)
    model(tokens[:, :6], past_kv_cache=cache)
    with pytest.raises(ZeroDivisionError):
        model.run_with_hooks(
            tokens[:, 6:], past_kv_cache=cache, fwd_hooks=[("blocks.1.hook_mlp_out", fail)]
        )
    assert [entry.past_keys.shape[1] for entry in cache] == [6, 6]
    assert torch.allclose(
        model(tokens[:, 6:], past_kv_cache=cache), model(tokens)[:, 6:], atol=1e-4
    )


def test_a_cache_with_padding(model):
    """Rows padded in front, and then again, come out as they would alone."""
    pad = model.tokenizer.pad_token_id
    rows = [[5, 6, 7, 8], [9, 10]]
    first = torch.tensor([rows[0], [pad, pad, *rows[1]]])
    second = torch.tensor([[11, 12], [pad, 13]])
    first_mask, second_mask = (
        torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
        torch.tensor([[1, 1], [0, 1]]),
    )
    cache = HookedTransformerKeyValueCache.init_cache(model.cfg, "cpu", 2)
    model(first, attention_mask=first_mask, past_kv_cache=cache)
    last = model(second, attention_mask=second_mask, past_kv_cache=cache)[:, -1]
    alone = torch.stack(
        [model(torch.tensor([ids]))[0, -1] for ids in ([*rows[0], 11, 12], [*rows[1], 13])]
    )
    assert torch.allclose(last, alone, atol=1e-4)


def test_a_cache_refuses_what_it_is_not_for(model, tokens):
    cache = HookedTransformerKeyValueCache.init_cache(model.cfg)
    with pytest.raises(ValueError, match="the cache is for 1 rows and the input has 2"):
        model(tokens, past_kv_cache=cache)
    with pytest.raises(
        ValueError, match="would miss these tokens in the layers before start_at_layer=1: freeze"
    ):
        model(torch.zeros(1, 2, 32), start_at_layer=1, past_kv_cache=cache)
    with pytest.raises(ValueError, match="a loss needs tokens"):
        model(torch.zeros(1, 2, 32), "loss", start_at_layer=0, past_kv_cache=cache)
    with pytest.raises(ValueError, match="the prompt has 50"):
        model(torch.zeros(1, 50, dtype=torch.long), past_kv_cache=cache)
    assert cache.previous_attention_mask.shape == (1, 0)


def test_a_function_chooses_what_is_switched_on(model, tokens):
    """As attribution patching has it: one function keeps what comes, one what goes back."""
    made, gradients = {}, {}
    model.add_hook(
        lambda name: "_input" not in name, lambda x, hook: made.__setitem__(hook.name, x)
    )
    model.add_hook(
        lambda name: "_input" not in name,
        lambda x, hook: gradients.__setitem__(hook.name, x),
        "bwd",
    )
    model(tokens, return_type="loss").backward()
    assert made.keys() == gradients.keys()
    # TransformerLens' notebook says 220 of GPT-2's twelve layers, with attention results: 4, and 18
    # in a layer.
    assert len(made) == 4 + 17 * model.cfg.n_layers
    assert not [
        name for name in made if name.endswith(("hook_attn_in", "hook_result", "hook_mlp_in"))
    ]
    assert "blocks.0.ln1.hook_scale" in made
    model.reset_hooks()
    model.set_use_attn_result(True)
    seen = []
    with model.hooks(
        fwd_hooks=[(lambda name: "attn" in name, lambda x, hook: seen.append(hook.name))]
    ):
        model(tokens)
    assert "blocks.1.attn.hook_result" in seen
    assert "blocks.1.hook_attn_in" not in seen
