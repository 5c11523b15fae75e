"""Modules that a user puts into a model."""

import copy
import pickle

import pytest
import torch
from torch import nn

from bridge.legacy import HookedTransformer
from bridge.legacy.hook_points import HookPoint
from tests.reference import DATA, entries, reference, wrong_effects, wrong_values

TOKENS = reference("gpt2")["tokens"]


class Wrapper(nn.Module):
    """What stands in for a sparse autoencoder: reads what the module makes, and may change it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.hook_sae_in, self.hook_sae = HookPoint(), HookPoint()

    def forward(self, hidden_states, *args, **kwargs):
        x = self.inner(self.hook_sae_in(hidden_states), *args, **kwargs)
        return (self.hook_sae(x[0]), *x[1:]) if isinstance(x, tuple) else self.hook_sae(x)


def fresh(family="gpt2"):
    return HookedTransformer.from_pretrained_no_processing(str(DATA / family), device="cpu")


@pytest.fixture
def wrapped():
    model = fresh()
    model.blocks[0].mlp = Wrapper(model.blocks[0].mlp.module)
    return model


def double(x, hook):
    return x * 2


def test_its_hook_points_have_names_and_fire(wrapped):
    assert isinstance(wrapped.original_model.transformer.h[0].mlp, Wrapper)
    assert [name for name in wrapped.hook_dict if "sae" in name] == [
        "blocks.0.mlp.hook_sae_in",
        "blocks.0.mlp.hook_sae",
    ]
    logits, cache = wrapped.run_with_cache(TOKENS)
    assert torch.equal(cache["blocks.0.mlp.hook_sae"], cache["mlp_out", 0])
    order = list(cache)
    assert order.index("blocks.0.mlp.hook_sae") < order.index("blocks.1.hook_resid_pre")
    changed = wrapped.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.mlp.hook_sae", double)])
    right = wrapped.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_mlp_out", double)])
    assert torch.allclose(changed, right, atol=1e-5)
    assert not torch.allclose(changed, logits, atol=1e-2)
    assert wrapped.blocks[0].mlp.hook_sae.name == "blocks.0.mlp.hook_sae"
    with wrapped.hooks(bwd_hooks=[("blocks.0.mlp.hook_sae", double)]):
        _, cache = wrapped.run_with_cache(TOKENS, return_type="loss", incl_bwd=True)
    assert cache["blocks.0.mlp.hook_sae_grad"].any()


def test_hooks_on_the_module_itself(wrapped):
    point = wrapped.original_model.transformer.h[0].mlp.hook_sae
    plain = wrapped(TOKENS)
    point.add_hook(double)
    point.ctx["mine"] = 1
    changed = wrapped(TOKENS)
    assert not torch.equal(changed, plain)
    wrapped.reset_hooks()
    assert point.ctx == {}
    assert torch.equal(wrapped(TOKENS), plain)
    by_name = wrapped.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.mlp.hook_sae", double)])
    assert torch.equal(by_name, changed)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("part", ["mlp", "attn"])
def test_the_models_own_hook_points_are_found_inside(family, part):
    model = fresh(family)
    for block in model.blocks:
        setattr(block, part, Wrapper(getattr(block, part).module))
    assert wrong_values(model, family, "raw") == []
    assert wrong_effects(model, family, "raw") == []
    ours, right = model.tl_parameters(), entries(family, "param", "raw")
    assert all(
        torch.allclose(ours[n], right[n], atol=1e-4) for n in right if n in ours and ours[n].shape == right[n].shape
    )


def test_by_hand_and_setup():
    model = fresh()
    block = model.original_model.transformer.h[1]
    block.mlp = Wrapper(block.mlp)
    assert "blocks.1.mlp.hook_sae" not in model.hook_dict
    model.setup()
    assert "blocks.1.mlp.hook_sae" in model.hook_dict
    block.mlp = block.mlp.inner
    model.setup()
    assert "blocks.1.mlp.hook_sae" not in model.hook_dict
    assert wrong_values(model, "gpt2", "raw") == []


def test_wrapping_while_hooks_are_attached_is_an_error():
    model = fresh()
    model.add_hook("blocks.0.mlp.hook_post", double)
    with pytest.raises(RuntimeError, match="hook_post had hooks"):
        model.blocks[0].mlp = Wrapper(model.blocks[0].mlp.module)


def test_names_that_are_taken_and_parts_that_are_not_there():
    class Taken(Wrapper):
        def __init__(self, inner):
            super().__init__(inner)
            self.hook_post = HookPoint()

    model = fresh()
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.hook_post is a hook point of the model already"):
        model.blocks[0].mlp = Taken(model.blocks[0].mlp.module)
    with pytest.raises(TypeError, match=r"blocks\.0\.attn\.hook_z cannot be set"):
        model.blocks[0].attn.hook_z = torch.zeros(3)
    with pytest.raises(TypeError, match="only attention and MLPs can"):
        model.blocks[0].ln1 = Wrapper(model.blocks[0].ln1.module)
    with pytest.raises(AttributeError, match="Did you mean mlp"):
        model.blocks[0].mpl = nn.Identity()


def test_elsewhere_in_the_model():
    model = fresh()
    model.original_model.transformer.drop = nn.Sequential(model.original_model.transformer.drop, HookPoint())
    model.setup()
    _, cache = model.run_with_cache(TOKENS, names_filter="transformer.drop.1")
    assert torch.equal(cache["transformer.drop.1"], model(TOKENS, stop_at_layer=0))
    assert wrong_values(model, "gpt2", "raw") == []


class Autoencoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(width, 7), nn.Linear(7, width)
        self.hook_sae_acts = HookPoint()

    def forward(self, x):
        return self.decoder(self.hook_sae_acts(self.encoder(x).relu()))


def test_a_module_at_a_hook_point():
    model = fresh()
    plain, sae = model(TOKENS), Autoencoder(32)
    own = list(model.state_dict())
    model.blocks[0].hook_resid_post = sae
    assert list(model.state_dict()) == own
    by_hook = fresh().run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_resid_post", lambda x, hook: sae(x))])
    assert torch.allclose(model(TOKENS), by_hook, atol=1e-5)
    name = "blocks.0.hook_resid_post.hook_sae_acts"
    _, cache = model.run_with_cache(TOKENS)
    assert cache[name].shape == (2, 10, 7)
    assert list(cache).index(name) < list(cache).index("blocks.1.hook_resid_pre")
    off = model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda acts, hook: acts * 0)])
    bias = sae.decoder.bias.expand(2, 10, 32)
    assert torch.allclose(off, fresh()(bias, start_at_layer=1), atol=1e-4)
    assert model.blocks[0].hook_resid_post is model.hook_dict["blocks.0.hook_resid_post"]
    model.reset_hooks(including_permanent=True)
    assert torch.allclose(model(TOKENS), by_hook, atol=1e-5)
    model(TOKENS, return_type="loss").backward()
    assert sae.encoder.weight.grad.any()
    other = Autoencoder(32)
    model.hook_embed = other
    model.blocks[0].hook_resid_post = HookPoint()
    assert [name for name in model.hook_dict if "sae" in name] == ["hook_embed.hook_sae_acts"]
    assert not torch.allclose(model(TOKENS), plain, atol=1e-2)
    assert torch.equal(copy.deepcopy(model)(TOKENS), plain)
    model.hook_embed = HookPoint()
    assert torch.equal(model(TOKENS), plain)
    assert not [name for name in model.hook_dict if "sae" in name]


def test_copies_keep_what_was_placed(wrapped):
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        _, cache = other.run_with_cache(TOKENS, names_filter=lambda name: "sae" in name)
        assert len(cache) == 2
        assert other.placed["blocks.0.mlp.hook_sae"] is other.original_model.transformer.h[0].mlp.hook_sae


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gpt_neox"])
def test_parts_can_be_called(family):
    model, tokens = fresh(family), reference(family)["tokens"]
    logits, cache = model.run_with_cache(tokens)
    assert torch.allclose(model.embed(tokens), cache["embed"], atol=1e-5)
    assert torch.allclose(model.blocks[1](cache["resid_pre", 1]), cache["resid_post", 1], atol=1e-4)
    block = model.blocks[0]
    if family == "gpt2":
        assert torch.allclose(block.ln1(cache["resid_pre", 0]), cache["normalized", 0, "ln1"], atol=1e-5)
        assert torch.allclose(block.mlp(block.ln2(cache["resid_mid", 0])), cache["mlp_out", 0], atol=1e-5)
        off = []
        with model.hooks(fwd_hooks=[("blocks.0.mlp.hook_post", lambda x, hook: off.append(x) or x * 0)]):
            assert torch.allclose(block.mlp(cache["resid_pre", 0]), block.mlp.b_out.expand(2, 10, 32), atol=1e-6)
        assert len(off) == 1
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 10])
        assert torch.equal(model.pos_embed(tokens), cache["pos_embed"])
        positions = model.pos_embed(tokens, 0, attention_mask=mask)
        assert torch.equal(positions[1], model.W_pos[:10])
        assert torch.equal(positions[0, 2:], model.W_pos[:8])
        assert not positions[0, :2].any()
        assert torch.equal(model.pos_embed(tokens[:, 6:], 6, mask), positions[:, 6:])
    out = model.unembed(model.ln_final(cache["resid_post", -1]))
    cap = model.cfg.output_logits_soft_cap
    assert torch.allclose(out if cap <= 0 else cap * (out / cap).tanh(), logits, atol=1e-3)
    with pytest.raises(TypeError, match=r"blocks\.0\.mlp\.gate cannot be called by itself"):
        model.call_part("blocks.0.mlp.gate", tokens)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "bloom", "gpt_neox", "opt", "phi3", "qwen3"])
def test_attention_can_be_called(family):
    model, tokens = fresh(family), reference(family)["tokens"]
    _, cache = model.run_with_cache(tokens, names_filter=["blocks.1.ln1.hook_out", "blocks.1.attn.hook_out"])
    x = cache["blocks.1.ln1.hook_out"].requires_grad_()
    attn = model.blocks[1].attn
    out = attn(query_input=x, key_input=x, value_input=x)
    assert torch.equal(out, cache["blocks.1.attn.hook_out"])
    out[:, 4].sum().backward()
    assert x.grad[:, :5].any()
    assert not x.grad[:, 5:].any(), "it looks back only"
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: z * 0)]):
        assert torch.allclose(attn(x), attn.b_O.expand_as(x), atol=1e-6)
    assert not model.wiring.listening
    assert not model.original_model.get_submodule(model.module_path("blocks.1.attn"))._forward_pre_hooks
    with pytest.raises(TypeError, match="hook_q_input, hook_k_input and hook_v_input"):
        attn(x, x, 2 * x)


def test_mod_dict(wrapped):
    assert wrapped.mod_dict["blocks.0.mlp.hook_sae"] is wrapped.hook_dict["blocks.0.mlp.hook_sae"]
    assert wrapped.mod_dict["blocks.1.attn"].module is wrapped.original_model.transformer.h[1].attn
    assert list(wrapped.hook_points()) == list(wrapped.hook_dict.values())
