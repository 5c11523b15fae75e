"""A model as a tree of modules, and modules that a user puts into it."""

import copy
import pickle

import pytest
import torch
from torch import nn

from bridge.legacy import HookedTransformer, HookedTransformerConfig, components
from bridge.legacy.hook_points import HookedRootModule, HookPoint
from tests.reference import DATA, entries, reference, wrong_effects, wrong_values
from tests.tiny_models import tiny_model

TOKENS = reference("gpt2")["tokens"]


class Wrapper(nn.Module):
    """What stands in for a sparse autoencoder: reads what the part makes, and may change it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.hook_sae_in, self.hook_sae = HookPoint(), HookPoint()

    def forward(self, x=None, **kwargs):
        if x is None:
            x = kwargs.pop("query_input")
        return self.hook_sae(self.inner(self.hook_sae_in(x)))


def fresh(family="gpt2"):
    return HookedTransformer.from_pretrained_no_processing(str(DATA / family), device="cpu")


@pytest.fixture
def wrapped():
    model = fresh()
    model.blocks[0].mlp = Wrapper(model.blocks[0].mlp)
    return model


def double(x, hook):
    return x * 2


def test_the_tree():
    model = fresh()
    modules = dict(model.named_modules())
    assert set(model.hook_dict) <= set(modules)
    assert all(modules[name] is point for name, point in model.hook_dict.items())
    assert all(isinstance(point, HookPoint) for point in model.hook_dict.values())
    assert isinstance(model, HookedRootModule)
    assert model.get_submodule("blocks.1.attn") is model.blocks[1].attn is modules["blocks.1.attn"]
    assert getattr(model.blocks, "1") is model.blocks[-1] is list(model.blocks)[1]
    assert not [name for name in modules if name.startswith("original_model")]
    for part, kind in [
        ("embed", "Embed"),
        ("pos_embed", "PosEmbed"),
        ("unembed", "Unembed"),
        ("ln_final", "LayerNorm"),
        ("blocks.0", "TransformerBlock"),
        ("blocks.0.attn", "Attention"),
        ("blocks.0.mlp", "MLP"),
        ("blocks.1.ln2", "LayerNorm"),
    ]:
        assert type(modules[part]) is getattr(components, kind)
        assert isinstance(modules[part], nn.Module)
    assert not isinstance(model.blocks[0].mlp, components.GatedMLP)
    assert isinstance(model.blocks[0].mlp, components.mlps.can_be_used_as_mlp.CanBeUsedAsMLP)
    model.process_weights_()
    assert type(model.ln_final) is components.LayerNormPre
    llama = fresh("llama")
    assert type(llama.blocks[0].attn) is components.GroupedQueryAttention
    assert type(llama.blocks[0].mlp) is components.GatedMLP
    assert type(llama.ln_final) is components.RMSNorm
    assert model.blocks[0].mlp.W_gate is None


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "bloom", "phi3"])
def test_state_dicts_go_through(family):
    model, other = fresh(family), fresh(family)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    right = entries(family, "param", "raw")
    assert all(
        torch.allclose(x, right[n], atol=1e-4)
        for n, x in state.items()
        if n in right and x.shape == right[n].shape
    )
    assert len(state.keys() & right.keys()) > 20
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    tokens, plain = reference(family)["tokens"], model(reference(family)["tokens"])
    assert not torch.allclose(other(tokens), plain, atol=1e-2)
    if family == "gemma2":  # whose norms and embeddings are computed from what is stored
        with pytest.raises(RuntimeError, match="have no place"):
            other.load_state_dict(state)
        return
    other.load_state_dict(
        state | {"blocks.0.attn.mask": torch.ones(1), "blocks.0.attn.IGNORE": torch.ones(1)}
    )
    assert torch.equal(other(tokens), plain)
    attn = model.blocks[1].attn
    assert set(attn.state_dict()) == {
        n.removeprefix("blocks.1.attn.") for n in state if n.startswith("blocks.1.attn.")
    }
    attn.load_state_dict({name: value * 2 for name, value in attn.state_dict().items()})
    name = "W_O"
    assert torch.equal(model.weights[f"blocks.1.attn.{name}"], state[f"blocks.1.attn.{name}"] * 2)
    with pytest.raises(RuntimeError, match=r"Missing .*W_O"):
        attn.load_state_dict({})


def test_optimizers_train_it():
    model = fresh()
    before, hf = model.W_Q.clone(), model.original_model
    assert {id(p) for p in model.parameters()} == {id(p) for p in hf.parameters()}
    fused, out = hf.transformer.h[0].attn.c_attn, hf.transformer.h[0].attn.c_proj
    in_order = [
        fused.weight,
        out.weight,
        fused.bias,
        out.bias,
    ]  # HookedTransformer's: W_Q, W_O, b_Q, b_O
    assert [id(p) for p in model.blocks[0].attn.parameters()] == [id(p) for p in in_order]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = model(TOKENS, return_type="loss")
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert not torch.equal(model.W_Q, before)
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in hf.parameters())
    assert model.double().cfg.dtype == torch.float64


def test_a_part_has_what_a_user_gives_it():
    part = fresh().blocks[0].mlp
    part.tally = nn.Parameter(torch.ones(2))
    part.register_buffer("usual", torch.zeros(2))
    assert torch.equal(part.tally, torch.ones(2)) and torch.equal(part.usual, torch.zeros(2))
    with pytest.raises(AttributeError, match="tally"):
        _ = components.MLP.__new__(components.MLP).tally


@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "gemma2", "bloom", "gpt_neox", "opt", "phi3", "qwen3"]
)
def test_a_copy_of_a_part_stands_alone(family):
    model, tokens = fresh(family), reference(family)["tokens"]
    _, cache = model.run_with_cache(tokens)
    x = cache["resid_post", 0]
    for part in (
        model.blocks[1].attn,
        model.blocks[1].mlp,
        model.blocks[1],
        model.ln_final,
        model.unembed,
    ):
        alone = copy.deepcopy(part)
        assert torch.equal(alone(x), part(x))
        assert {p.data_ptr() for p in alone.parameters()}.isdisjoint(
            p.data_ptr() for p in model.parameters()
        )
        assert sum(p.numel() for p in alone.parameters()) == sum(
            p.numel() for p in part.parameters()
        )
        right = part(x)
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.add_(1)
        assert torch.equal(part(x), right)
        assert not torch.equal(alone(x), right)


def test_what_was_put_in_moves_with_the_model(wrapped):
    wrapped.blocks[0].mlp.own = nn.Linear(2, 2)
    assert wrapped.to(torch.float64, print_details=False) is wrapped
    assert wrapped.blocks[0].mlp.own.weight.dtype == wrapped.W_E.dtype == torch.float64
    assert wrapped.double().cpu().float().blocks[0].mlp.own.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "gemma2", "bloom", "gpt_neox", "opt", "phi3", "qwen3"]
)
def test_attention_of_three_inputs(family):
    """Against the reference's own weights, in float64, for what has no rotation or norm of
    its own.
    """
    model = fresh(family).double()
    attn, x = model.blocks[1].attn, torch.randn(3, 2, 10, 32, dtype=torch.float64)
    q, k, v = x
    made = attn(q, k, v)
    zs = [attn(*(q if i == 0 else torch.zeros_like(q), k, v)) for i in range(2)]
    assert torch.equal(zs[0], made)
    assert not torch.allclose(zs[1], made)
    # A model whose reads differ by hooks computes the same: queries and keys of other inputs, put
    # in by hand.
    held = {}
    for letter, given in (("q", q), ("k", k), ("v", v)):
        name = f"blocks.1.attn.hook_{letter}"
        with model.hooks(
            fwd_hooks=[(name, lambda act, hook: held.__setitem__(hook.name, act.clone()))]
        ):
            attn(given)
    put = [(name, lambda act, hook, kept=kept: kept) for name, kept in held.items()]
    with model.hooks(fwd_hooks=put):
        assert torch.allclose(attn(torch.zeros_like(q)), made, atol=1e-12)
    if family in ("gpt2", "opt"):
        W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O = (
            getattr(attn, f"{w}_{p}") for w in "Wb" for p in "QKVO"
        )
        queries, keys, values = (
            torch.einsum("bpm,hmd->bhpd", x, W) + b[None, :, None]
            for x, W, b in ((q, W_Q, b_Q), (k, W_K, b_K), (v, W_V, b_V))
        )
        scores = (queries @ keys.mT / model.cfg.attn_scale).masked_fill(
            ~torch.ones(10, 10).tril().bool(), -torch.inf
        )
        by_hand = torch.einsum("bhpd,hdm->bpm", scores.softmax(-1) @ values, W_O) + b_O
        assert torch.allclose(made, by_hand, atol=1e-9)
    seen = []
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_q", lambda act, hook: seen.append(act))]):
        attn(q, k, v)
    assert len(seen) == 1, "hooks see one run"
    assert torch.equal(seen[0], held["blocks.1.attn.hook_q"])


def test_components_from_configurations():
    cfg = {
        "n_layers": 2,
        "d_model": 16,
        "n_ctx": 8,
        "d_head": 4,
        "d_vocab": 11,
        "act_fn": "gelu",
        "device": "cpu",
    }
    x = torch.randn(2, 5, 16)
    attn = components.Attention(cfg)
    assert attn.W_Q.shape == (4, 16, 4)
    assert (
        attn.cfg == copy.deepcopy(attn).cfg == HookedTransformerConfig(**cfg)
    )  # of two layers, which it is told
    assert attn(x, x, x).shape == (2, 5, 16)
    assert set(attn.state_dict()) == {f"{w}_{p}" for w in "Wb" for p in "QKVO"}
    with pytest.raises(
        TypeError, match=r"reads \[batch, pos, d_model\], not \[2, 5, 4, 16\]: .*hook_q_input"
    ):
        attn(x[:, :, None].expand(-1, -1, 4, -1), x, x)
    seen = []
    attn.hook_pattern.add_hook(lambda pattern, hook: seen.append(pattern))
    attn(x)
    assert torch.allclose(seen[0].sum(-1), torch.ones(2, 4, 5))
    mlp = components.MLP(cfg)
    by_hand = nn.functional.gelu(x @ mlp.W_in + mlp.b_in) @ mlp.W_out + mlp.b_out
    assert torch.allclose(mlp(x), by_hand, atol=1e-6)
    gated = components.GatedMLP(cfg)
    assert torch.allclose(
        gated(x),
        (nn.functional.gelu(x @ gated.W_gate) * (x @ gated.W_in) + gated.b_in) @ gated.W_out
        + gated.b_out,
        atol=1e-6,
    )
    assert torch.allclose(
        components.LayerNorm(cfg)(x), nn.functional.layer_norm(x, (16,)), atol=1e-6
    )
    assert components.LayerNorm(cfg, length=6)(torch.randn(3, 6)).shape == (3, 6)
    assert torch.allclose(
        components.RMSNormPre(cfg)(x), nn.functional.rms_norm(x, (16,), eps=1e-5), atol=1e-6
    )
    tokens = torch.tensor([[1, 2, 3]])
    embed = components.Embed(cfg)
    assert torch.equal(embed(tokens), embed.W_E[tokens])
    positions = components.PosEmbed(cfg)
    assert torch.equal(positions(tokens)[0], positions.W_pos[:3])
    unembed = components.Unembed(cfg)
    assert torch.allclose(unembed(x), x @ unembed.W_U + unembed.b_U, atol=1e-6)
    block = components.TransformerBlock(cfg)
    assert block(x).shape == x.shape
    bare = components.TransformerBlock({**cfg, "attn_only": True})
    assert torch.allclose(bare(x), x + bare.attn(bare.ln1(x)), atol=1e-6)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=1.0)
    mlp(x).sum().backward()
    before = mlp.W_in.clone()
    optimizer.step()
    assert not torch.equal(mlp.W_in, before)
    grouped = components.GroupedQueryAttention({**cfg, "n_key_value_heads": 2})
    assert grouped(x).shape == x.shape
    with pytest.raises(TypeError, match="MoE is a part of loaded models"):
        components.MoE(cfg)


def test_its_hook_points_have_names_and_fire(wrapped):
    assert [name for name in wrapped.hook_dict if "sae" in name] == [
        "blocks.0.mlp.hook_sae_in",
        "blocks.0.mlp.hook_sae",
    ]
    logits, cache = wrapped.run_with_cache(TOKENS)
    assert torch.equal(logits, fresh()(TOKENS))
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
    x = torch.randn(1, 3, 32)
    assert torch.equal(wrapped.blocks[0].mlp(x), fresh().blocks[0].mlp(x)), (
        "called by itself, it does not recurse"
    )


def test_hooks_on_the_module_itself(wrapped):
    point = wrapped.blocks[0].mlp.hook_sae
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


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gpt_neox", "bloom", "opt", "phi3"])
@pytest.mark.parametrize("part", ["mlp", "attn"])
def test_the_models_own_hook_points_go_on(family, part):
    model = fresh(family)
    if family == "bloom" or (family, part) == ("opt", "mlp"):
        with pytest.raises(
            (AttributeError, TypeError), match=r"not one module|adding the residual stream"
        ):
            setattr(model.blocks[0], part, nn.Identity())
        assert getattr(model.blocks[0], part) is model.parts[f"blocks.0.{part}"]
        return
    for block in model.blocks:
        setattr(block, part, Wrapper(getattr(block, part)))
    assert wrong_values(model, family, "raw") == []
    assert wrong_effects(model, family, "raw") == []
    names = [f"blocks.0.{part}.hook_sae", f"blocks.0.{part}.hook_out"]
    _, cache = model.run_with_cache(TOKENS, names_filter=names)
    assert torch.allclose(*(cache[name] for name in names), atol=1e-6)
    off = model.run_with_hooks(
        TOKENS, fwd_hooks=[(f"blocks.0.{part}.hook_sae", lambda x, hook: x * 0)]
    )
    right = fresh(family).run_with_hooks(
        TOKENS, fwd_hooks=[(f"blocks.0.{part}.hook_out", lambda x, hook: x * 0)]
    )
    assert torch.allclose(off, right, atol=1e-5)


def test_other_parts_in_place():
    model, plain = fresh(), fresh()(TOKENS)
    model.blocks[1] = Wrapper(model.blocks[1])
    model.unembed = Wrapper(model.unembed)
    model.embed = Wrapper(model.embed)
    assert torch.equal(model.W_U, fresh().W_U)
    assert torch.equal(model(TOKENS), plain)
    _, cache = model.run_with_cache(TOKENS)
    assert torch.equal(cache["unembed.hook_sae"], plain)
    assert torch.equal(cache["embed.hook_sae_in"], TOKENS)
    assert torch.equal(cache["blocks.1.hook_sae"], cache["resid_post", 1])
    model = fresh()
    model.ln_final = nn.Identity()
    _, cache = model.run_with_cache(TOKENS)
    assert torch.allclose(model(TOKENS), cache["resid_post", 1] @ model.W_U + model.b_U, atol=1e-5)
    old = model.blocks[0].attn
    model.blocks[0].attn = Constant()
    _, cache = model.run_with_cache(TOKENS)
    assert not cache["attn_out", 0].any()
    assert torch.equal(cache["resid_mid", 0], cache["resid_pre", 0])
    model.blocks[0].attn = old
    assert model.run_with_cache(TOKENS)[1]["attn_out", 0].any()
    with pytest.raises(TypeError, match="pos_embed cannot be replaced"):
        model.pos_embed = nn.Identity()


class Constant(nn.Module):
    def forward(
        self, query_input, key_input, value_input, past_kv_cache_entry=None, attention_mask=None
    ):
        assert query_input is key_input is value_input
        return torch.zeros_like(query_input)


def test_a_forward_of_the_users(wrapped):
    """As programs of sparse autoencoders put a hook point before an MLP."""
    model, plain = fresh(), fresh()(TOKENS)
    for block in model.blocks:
        mlp = block.mlp
        mlp.hook_in = HookPoint()
        original = mlp.forward
        mlp.forward = lambda x, mlp=mlp, original=original: original(mlp.hook_in(x))
    model.setup()
    logits, cache = model.run_with_cache(TOKENS)
    assert torch.equal(logits, plain)
    assert torch.equal(cache["blocks.1.mlp.hook_in"], cache["normalized", 1, "ln2"])
    off = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.mlp.hook_in", lambda x, hook: x * 0)])
    right = fresh().run_with_hooks(
        TOKENS, fwd_hooks=[("blocks.0.ln2.hook_normalized", lambda x, hook: x * 0)]
    )
    assert torch.allclose(off, right, atol=1e-5)
    with pytest.raises(TypeError, match=r"blocks\.0\.mlp\.forward is a function of yours"):
        copy.deepcopy(model)


def test_torch_hooks_on_parts_and_points():
    model, plain, seen = fresh(), fresh()(TOKENS), []
    handle = model.blocks[1].mlp.register_forward_hook(
        lambda module, args, out: seen.append((module, args, out))
    )
    _, cache = model.run_with_cache(TOKENS)
    ((module, (x,), out),) = seen
    assert module is model.blocks[1].mlp
    assert torch.equal(out, cache["mlp_out", 1])
    assert torch.equal(x, cache["normalized", 1, "ln2"])
    handle.remove()
    model.blocks[0].attn.register_forward_hook(lambda module, args, out: out * 0)
    assert not model.run_with_cache(TOKENS)[1]["attn_out", 0].any()
    model = fresh()
    handle = model.blocks[0].hook_mlp_out.register_forward_hook(
        lambda point, args, out: args[0] * 0
    )
    assert not torch.equal(model(TOKENS), plain)
    handle.remove()
    assert torch.equal(model(TOKENS), plain)
    with pytest.raises(TypeError, match="always_call"):
        model.hook_embed.register_forward_hook(lambda *args: None, always_call=True)


def test_wrapping_while_hooks_are_attached():
    model = fresh()
    model.add_hook("blocks.0.attn.hook_pattern", lambda x, hook: x * 0, is_permanent=True)
    right = model(TOKENS)
    model.blocks[0].attn = Wrapper(model.blocks[0].attn)
    assert torch.allclose(model(TOKENS), right, atol=1e-6)
    model.reset_hooks(including_permanent=True)
    assert torch.equal(model(TOKENS), fresh()(TOKENS))
    assert "blocks.0.attn.hook_sae" in model.run_with_cache(TOKENS)[1]


def test_names_that_are_taken_and_parts_that_are_not_there():
    class Taken(Wrapper):
        def __init__(self, inner):
            super().__init__(inner)
            self.hook_post = HookPoint()

    model = fresh()
    with pytest.raises(
        ValueError, match=r"blocks\.0\.mlp\.hook_post is a hook point of the model already"
    ):
        model.blocks[0].mlp = Taken(model.blocks[0].mlp)
    assert model.blocks[0].mlp is model.parts["blocks.0.mlp"]
    assert not [name for name in model.hook_dict if "sae" in name]
    with pytest.raises(TypeError, match=r"blocks\.0\.attn\.hook_z cannot be set"):
        model.blocks[0].attn.hook_z = torch.zeros(3)
    with pytest.raises(AttributeError, match="Did you mean mlp"):
        model.blocks[0].mpl = nn.Identity()
    with pytest.raises(TypeError, match="other values would change nothing"):
        model.blocks[0].attn.mask = torch.ones(3, 3)
    model.blocks[0].attn.mask = model.blocks[0].attn.mask
    model.transcoders = nn.ModuleList([nn.Linear(3, 3)])
    assert "transcoders.0.weight" in dict(model.named_parameters())
    assert "transcoders.0.weight" in model.state_dict()
    model.transcoders.append(HookPoint())
    model.setup()
    with pytest.raises(ValueError, match=r"transcoders\.1 belongs to no layer"):
        model.hook_dict["transcoders.1"].layer()


def test_elsewhere_in_the_model():
    model = fresh()
    model.original_model.transformer.drop = nn.Sequential(
        model.original_model.transformer.drop, HookPoint()
    )
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
    model.blocks[0].hook_resid_post = sae
    assert "blocks.0.hook_resid_post.encoder.weight" in model.state_dict()
    by_hook = fresh().run_with_hooks(
        TOKENS, fwd_hooks=[("blocks.0.hook_resid_post", lambda x, hook: sae(x))]
    )
    assert torch.allclose(model(TOKENS), by_hook, atol=1e-5)
    name = "blocks.0.hook_resid_post.hook_sae_acts"
    _, cache = model.run_with_cache(TOKENS)
    assert cache[name].shape == (2, 10, 7)
    assert list(cache).index(name) < list(cache).index("blocks.1.hook_resid_pre")
    off = model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda acts, hook: acts * 0)])
    bias = sae.decoder.bias.expand(2, 10, 32)
    assert torch.allclose(off, fresh()(bias, start_at_layer=1), atol=1e-4)
    assert model.blocks[0].hook_resid_post is sae
    model.reset_hooks(including_permanent=True)
    assert torch.allclose(model(TOKENS), by_hook, atol=1e-5)
    model(TOKENS, return_type="loss").backward()
    assert sae.encoder.weight.grad.any()
    other = Autoencoder(32)
    model.hook_embed = other
    model.blocks[0].hook_resid_post = HookPoint()
    assert [name for name in model.hook_dict if "sae" in name] == ["hook_embed.hook_sae_acts"]
    changed = model(TOKENS)
    assert not torch.allclose(changed, plain, atol=1e-2)
    assert torch.equal(copy.deepcopy(model)(TOKENS), changed)
    model.hook_embed = HookPoint()
    assert torch.equal(model(TOKENS), plain)
    assert not [name for name in model.hook_dict if "sae" in name]
    assert model.hook_embed is model.hook_dict["hook_embed"]


def test_a_module_at_a_point_that_feeds_others_outlives_hooks_there():
    model, name = fresh(), "blocks.0.hook_attn_in"
    plain = model(TOKENS)
    model.blocks[0].hook_attn_in = Halves()
    halved = model(TOKENS)
    model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, hook: None)])
    assert torch.equal(model(TOKENS), halved)
    assert not torch.equal(halved, plain)
    with pytest.raises(
        ValueError, match=f"{name} has a module in its place, which a program has no place for"
    ):
        model.program(capture=["blocks.1.hook_resid_post"])
    model.blocks[0].hook_attn_in = HookPoint()
    program = model.program(interventions=[(name, lambda x, hook: x * 0.5)])
    torch.testing.assert_close(program(TOKENS)["logits"], halved)
    model.add_hook(name, lambda x, hook: x * 0.5)
    torch.testing.assert_close(model.program()(TOKENS)["logits"], halved)


class Halves(nn.Module):
    def forward(self, x):
        return x * 0.5


class CallsThePoint(nn.Module):
    """As programs that find circuits wrap hook points: it holds the old one, and calls it."""

    def __init__(self, point):
        super().__init__()
        self.point = point

    def forward(self, x):
        return self.point(x * 2)


def test_a_module_around_a_hook_point():
    model = fresh()
    right = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_mlp_out", double)])
    model.blocks[0].hook_mlp_out = CallsThePoint(model.blocks[0].hook_mlp_out)
    assert torch.equal(model(TOKENS), right)
    model.set_use_split_qkv_input(True)
    point = model.blocks[1].hook_q_input
    model.blocks[1].hook_q_input = CallsThePoint(point)
    halved = model.run_with_hooks(
        TOKENS, fwd_hooks=[("blocks.1.hook_q_input", lambda x, hook: x / 2)]
    )
    assert torch.allclose(halved, right, atol=1e-5)


def test_copies_keep_what_was_placed(wrapped):
    wrapped.blocks[1].attn.hook_mine = HookPoint()
    wrapped.sae = nn.Linear(2, 2)
    wrapped.hook_embed = Autoencoder(32)
    right = wrapped(TOKENS)
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        _, cache = other.run_with_cache(TOKENS, names_filter=lambda name: "sae" in name)
        assert len(cache) == 3
        assert torch.equal(other(TOKENS), right)
        wrapper = other.blocks[0].mlp
        assert wrapper.inner is other.parts["blocks.0.mlp"]
        assert wrapper is not wrapped.blocks[0].mlp
        assert "blocks.1.attn.hook_mine" in other.hook_dict
        assert other.sae.weight is not wrapped.sae.weight
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not torch.equal(other(TOKENS), right)
        assert torch.equal(wrapped(TOKENS), right)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gpt_neox"])
def test_parts_can_be_called(family):
    model, tokens = fresh(family), reference(family)["tokens"]
    logits, cache = model.run_with_cache(tokens)
    assert torch.allclose(model.embed(tokens), cache["embed"], atol=1e-5)
    assert torch.allclose(model.blocks[1](cache["resid_pre", 1]), cache["resid_post", 1], atol=1e-4)
    block = model.blocks[0]
    if family == "gpt2":
        assert torch.allclose(
            block.ln1(cache["resid_pre", 0]), cache["normalized", 0, "ln1"], atol=1e-5
        )
        assert torch.allclose(
            block.mlp(block.ln2(cache["resid_mid", 0])), cache["mlp_out", 0], atol=1e-5
        )
        off = []
        with model.hooks(
            fwd_hooks=[("blocks.0.mlp.hook_post", lambda x, hook: off.append(x) or x * 0)]
        ):
            assert torch.allclose(
                block.mlp(cache["resid_pre", 0]), block.mlp.b_out.expand(2, 10, 32), atol=1e-6
            )
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


@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "gemma2", "bloom", "gpt_neox", "opt", "phi3", "qwen3"]
)
def test_attention_can_be_called(family):
    model, tokens = fresh(family), reference(family)["tokens"]
    _, cache = model.run_with_cache(
        tokens, names_filter=["blocks.1.ln1.hook_out", "blocks.1.attn.hook_out"]
    )
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
    assert not attn.module._forward_pre_hooks
    with pytest.raises(TypeError, match="takes no cache"):
        attn(x, x, x, additive_attention_mask=torch.zeros(1))


def test_mod_dict(wrapped):
    assert wrapped.mod_dict["blocks.0.mlp.hook_sae"] is wrapped.hook_dict["blocks.0.mlp.hook_sae"]
    assert wrapped.mod_dict["blocks.1.attn"].module is wrapped.original_model.transformer.h[1].attn
    assert list(wrapped.hook_points()) == list(wrapped.hook_dict.values())


@pytest.mark.parametrize("model_type", ["cohere", "granite", "minicpm3"])
def test_the_unembedding_makes_logits_where_the_model_multiplies_them(model_type, tmp_path):
    tiny_model(model_type).save_pretrained(tmp_path)
    hooked = HookedTransformer.from_pretrained_no_processing(str(tmp_path), device="cpu")
    tokens = torch.arange(3, 21).reshape(2, 9)
    with torch.no_grad():
        logits, cache = hooked.run_with_cache(tokens)
        normed = hooked.ln_final(cache["resid_post", -1])
    assert torch.allclose(hooked.unembed(normed), logits, atol=1e-5)
    assert torch.allclose(normed @ hooked.W_U + hooked.b_U, logits, atol=1e-5)


def test_a_norm_that_is_folded_is_of_another_class_and_keeps_what_it_was_given():
    model = HookedTransformer.from_pretrained_no_processing(str(DATA / "gpt2"), device="cpu")
    before, seen = model.ln_final, []
    before.register_forward_hook(lambda part, args, out: seen.append(type(part)))
    before.note = nn.Parameter(torch.ones(1))
    model.add_hook("ln_final.hook_scale", lambda x, hook: seen.append(hook.name))
    model(TOKENS)
    assert seen == [components.LayerNorm, "ln_final.hook_scale"]
    model.process_weights_()
    seen.clear()
    model(TOKENS)
    assert seen == [components.LayerNormPre, "ln_final.hook_scale"]
    assert isinstance(model.ln_final, components.LayerNormPre) and isinstance(
        before, components.LayerNorm
    )
    assert model.ln_final.note is before.note and model.ln_final.hook_scale is before.hook_scale
    assert dict(model.named_parameters())["ln_final.note"] is before.note
    x = torch.randn(1, 3, model.cfg.d_model)
    assert torch.equal(model.ln_final(x), before(x))


def test_a_norm_in_a_module_of_the_users_stays_there_when_it_is_folded():
    model = HookedTransformer.from_pretrained_no_processing(str(DATA / "gpt2"), device="cpu")
    norm = model.ln_final
    model.ln_final = nn.Sequential(norm)
    model.process_weights_()
    assert model.ln_final[0] is norm
    folded = HookedTransformer.from_pretrained_no_processing(str(DATA / "gpt2"), device="cpu")
    folded.process_weights_()
    assert torch.equal(model(TOKENS), folded(TOKENS))
    model.ln_final = norm
    assert torch.equal(model(TOKENS), folded(TOKENS)) and torch.equal(
        copy.deepcopy(model)(TOKENS), folded(TOKENS)
    )
