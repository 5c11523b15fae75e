"""Subclasses with a forward of their own, which calls the parts of the model."""

import pytest
import torch

from bridge.legacy import HookedTransformer, HookedTransformerConfig
from tests.reference import DATA

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def config(**more):
    sizes = {"n_layers": 2, "d_model": 16, "n_ctx": 16, "d_head": 4, "n_heads": 4, "d_mlp": 32}
    fields = {**sizes, "d_vocab": 20, "act_fn": "gelu", "seed": 0, "device": "cpu", **more}
    return HookedTransformerConfig(**fields)


class Looped(HookedTransformer):
    """TransformerLens' own loop, written out."""

    def embedded(self, input):
        return self.input_to_embed(input)[0]

    def one_block(self, block, residual):
        return block(
            residual, past_kv_cache_entry=None, shortformer_pos_embed=None, attention_mask=None
        )

    def forward(self, input, return_type="logits", stop_at_layer=None, **kwargs):
        residual = self.embedded(input)
        for block in [*self.blocks][:stop_at_layer]:
            residual = self.one_block(block, residual)
        if stop_at_layer is not None:
            return residual
        logits = self.unembed(self.ln_final(residual))
        return self.loss_fn(logits, input) if return_type == "loss" else logits


class FromParts(Looped):
    """The embeddings, too, without calls of hook points."""

    def embedded(self, input):
        return self.embed(input) + self.pos_embed(input)


class WithHookPoints(Looped):
    """Hook points are called where TransformerLens calls them."""

    def embedded(self, input):
        return self.hook_embed(self.embed(tokens=input)) + self.hook_pos_embed(
            self.pos_embed(tokens=input)
        )


class BlockByBlock(WithHookPoints):
    """The parts of blocks are called one by one."""

    def one_block(self, block, residual):
        residual = block.hook_resid_pre(residual)
        x = block.ln1(residual)
        attn_out = block.hook_attn_out(block.attn(query_input=x, key_input=x, value_input=x))
        residual = block.hook_resid_mid(residual + attn_out)
        return block.hook_resid_post(residual + block.apply_mlp(block.ln2(x=residual)))


KINDS = [Looped, FromParts, WithHookPoints, BlockByBlock]
#: Hook points that TransformerLens calls only if a switch is on.
SWITCHED = ("hook_tokens", "_input", "_in")


@pytest.fixture(scope="module")
def plain():
    return HookedTransformer(config())


@pytest.fixture(scope="module", params=KINDS)
def own(request):
    return request.param(config())


def test_a_forward_of_its_own_computes_the_same(plain, own):
    torch.testing.assert_close(own(TOKENS), plain(TOKENS))
    torch.testing.assert_close(own(TOKENS, stop_at_layer=1), plain(TOKENS, stop_at_layer=1))
    torch.testing.assert_close(own(TOKENS, return_type="loss"), plain(TOKENS, return_type="loss"))


def test_its_cache_is_that_of_the_model(plain, own):
    _, expected = plain.run_with_cache(TOKENS)
    _, cache = own.run_with_cache(TOKENS)
    _, named = own.run_with_cache(TOKENS, names_filter=list(expected))
    for name in expected:
        torch.testing.assert_close(cache[name], expected[name], msg=name)
        torch.testing.assert_close(named[name], expected[name], msg=name)


def test_hooks_run_once_and_change_the_same(plain, own):
    for name in [name for name in plain.hook_dict if not name.endswith(SWITCHED)]:
        calls = []

        def halve(x, hook, calls=calls):
            calls.append(hook.name)
            return x / 2

        expected = plain.run_with_hooks(TOKENS, fwd_hooks=[(name, halve)])
        result = own.run_with_hooks(TOKENS, fwd_hooks=[(name, halve)])
        assert calls == [name, name]
        torch.testing.assert_close(result, expected, msg=name)


def test_gradients(plain, own):
    names = ["hook_embed", "blocks.0.attn.hook_z", "blocks.1.hook_resid_post"]
    gradients = []
    for model in (plain, own):
        model.zero_grad()
        options = {"names_filter": names, "incl_bwd": True, "return_type": "loss"}
        _, cache = model.run_with_cache(TOKENS, **options)
        seen = []
        hooks = [("blocks.0.hook_mlp_out", lambda x, hook, seen=seen: seen.append(x.clone()))]
        with model.hooks(bwd_hooks=hooks):
            model(TOKENS, return_type="loss").backward()
        weights = [p.grad.clone() for p in model.parameters()]
        gradients.append([*(cache[f"{name}_grad"] for name in names), *seen, *weights])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_hook_point_that_is_called_again_runs_later_hooks(plain):
    x = plain.embed(TOKENS)
    with plain.hooks(fwd_hooks=[("hook_embed", lambda x, hook: x * 0)]):
        assert not plain.hook_embed(x).any()
    with plain.hooks(fwd_hooks=[("hook_embed", lambda x, hook: x + 1)]):
        once = plain.embed(TOKENS)
        assert plain.hook_embed(once) is once
    torch.testing.assert_close(once, x + 1)


def test_a_part_called_by_itself_runs_its_own_hooks_only(plain):
    seen = []
    x = torch.randn(1, 3, 16)
    hooks = [(lambda name: True, lambda x, hook: seen.append(hook.name))]
    with plain.hooks(fwd_hooks=hooks):
        plain.blocks[1].attn(x, x, x)
        plain.blocks[1].ln2(x)
    inside = ("blocks.1.attn.", "blocks.1.ln2.", "blocks.1.hook_attn_out")
    assert seen and all(name.startswith(inside) for name in seen)


def test_a_forward_put_on_the_instance(plain):
    model = HookedTransformer(config())
    model.forward = lambda tokens, **kwargs: model.unembed(
        model.ln_final(model.blocks[1](model.blocks[0](model.input_to_embed(tokens)[0])))
    )
    torch.testing.assert_close(model(TOKENS), plain(TOKENS))


def test_keys_and_values_of_a_block_are_refused(plain):
    with pytest.raises(TypeError, match="run the model with past_kv_cache"):
        plain.blocks[0](torch.randn(1, 3, 16), past_kv_cache_entry=object())


@pytest.mark.parametrize("family", ["gemma2", "phi3"])
def test_norms_behind_the_parts_and_other_places_of_outputs(family):
    class Own(HookedTransformer):
        def forward(self, input, **kwargs):
            residual = self.input_to_embed(input)[0]
            for block in self.blocks:
                x = block.ln1(residual)
                attn_out = block.attn(x, x, x)
                if "ln1_post" in block._modules:
                    attn_out = block.ln1_post(attn_out)
                residual = residual + block.hook_attn_out(attn_out)
                residual = residual + block.apply_mlp(block.ln2(residual))
            return self.ln_final(residual)

    load = {"device": "cpu"}
    plain = HookedTransformer.from_pretrained_no_processing(str(DATA / family), **load)
    own = Own.from_pretrained_no_processing(str(DATA / family), **load)
    for name in ("blocks.0.hook_attn_out", "blocks.0.hook_mlp_out"):
        hooks = [(name, lambda x, hook: x / 2)]
        with plain.hooks(fwd_hooks=hooks):
            expected = plain(TOKENS, stop_at_layer=plain.cfg.n_layers)
        torch.testing.assert_close(
            own.run_with_hooks(TOKENS, fwd_hooks=hooks), plain.ln_final(expected)
        )
