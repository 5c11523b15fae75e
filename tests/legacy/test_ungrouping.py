"""Keys and values of their own for each query head."""

import copy

import pytest
import torch
from torch import nn

from bridge.legacy import HookedTransformer, HookedTransformerKeyValueCache
from bridge.legacy.hook_points import HookPoint
from tests.reference import DATA, reference, wrong_logits, wrong_values

FAMILIES = ["llama", "gemma2", "qwen3"]


def load(family):
    return HookedTransformer.from_pretrained(str(DATA / family), device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_computes_what_it_did(family):
    model, tokens = load(family), reference(family)["tokens"]
    logits, cache = model.run_with_cache(tokens)
    before = {name: cache[name] for name in cache}  # patterns are computed when they are asked for
    state, cfg = {name: value.clone() for name, value in model.state_dict().items()}, model.cfg
    weights = {name: getattr(model, name) for name in ("W_Q", "W_K", "W_V", "b_K")}
    assert cfg.n_key_value_heads == 2
    model.set_ungroup_grouped_query_attention(ungroup_grouped_query_attention=True)
    assert model.cfg is cfg
    assert (cfg.n_key_value_heads, cfg.ungroup_grouped_query_attention, cfg.normalization_type) == (
        None,
        True,
        "RMSPre",
    )
    again, after = model.run_with_cache(tokens)
    assert torch.equal(again, logits)
    for name, value in before.items():
        per_group = name.endswith(("hook_k", "hook_v", "hook_rot_k")) or ".k_norm." in name
        right = value.repeat_interleave(2, 2) if per_group else value
        assert torch.equal(after[name], right), name
    assert all(torch.equal(getattr(model, name), value) for name, value in weights.items())
    assert not wrong_logits(model, family, "processed")
    assert torch.equal(copy.deepcopy(model)(tokens), logits)
    model.set_ungroup_grouped_query_attention(False)
    assert cfg.n_key_value_heads == 2
    assert not cfg.ungroup_grouped_query_attention
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert wrong_values(model, family, "processed") == []


def test_a_seed_draws_what_it_drew_before_they_were_ungrouped():
    fields = {
        "n_layers": 2,
        "d_model": 16,
        "n_ctx": 8,
        "d_head": 4,
        "n_heads": 4,
        "n_key_value_heads": 2,
        "d_vocab": 10,
        "act_fn": "silu",
        "device": "cpu",
        "seed": 3,
    }
    grouped, ungrouped = (
        HookedTransformer(fields | {"ungroup_grouped_query_attention": on}) for on in (False, True)
    )
    assert ungrouped.cfg.ungroup_grouped_query_attention
    assert torch.equal(ungrouped.W_K, grouped.W_K)
    assert torch.allclose(ungrouped([[1, 2, 3]]), grouped([[1, 2, 3]]), atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_one_heads_key_is_its_own(family):
    model, tokens = load(family), reference(family)["tokens"]
    model.set_ungroup_grouped_query_attention(True)
    model.set_use_split_qkv_input(True)
    _, plain = model.run_with_cache(tokens)
    assert (
        plain["blocks.1.hook_k_input"].shape
        == plain["blocks.1.hook_v_input"].shape
        == (2, 10, 4, 32)
    )

    def change(x, hook):
        x[:, :, 1] = x[:, :, 1].flip(-1)
        return x

    def changed_heads(point, seen):
        with model.hooks(fwd_hooks=[(f"blocks.1.{point}", change)]):
            _, cache = model.run_with_cache(tokens)
        return [
            not torch.allclose(cache[seen, 1][:, :, h], plain[seen, 1][:, :, h], atol=1e-6)
            for h in range(4)
        ]

    for point, seen in (
        ("attn.hook_k", "z"),
        ("attn.hook_v", "z"),
        ("hook_k_input", "k"),
        ("hook_v_input", "v"),
    ):
        assert changed_heads(point, seen) == [False, True, False, False], point


def test_keys_of_earlier_tokens():
    model, tokens = load("llama"), reference("llama")["tokens"]
    model.set_ungroup_grouped_query_attention(True)
    cache = HookedTransformerKeyValueCache.init_cache(model.cfg, "cpu", 2)
    model(tokens[:, :6], past_kv_cache=cache)
    assert cache[0].past_keys.shape == (2, 6, 4, 8)
    assert torch.allclose(
        model(tokens[:, 6:], past_kv_cache=cache), model(tokens)[:, 6:], atol=1e-4
    )
    assert model.generate(tokens, max_new_tokens=2, verbose=False).shape == (2, 12)


def test_what_cannot_be_ungrouped():
    model = load("llama")
    model.add_hook("hook_embed", lambda x, hook: None)
    with pytest.raises(RuntimeError, match="hooks are attached"):
        model.set_ungroup_grouped_query_attention(True)
    model.reset_hooks()
    model.blocks[0].mlp.hook_post = nn.Identity()
    with pytest.raises(
        RuntimeError, match=r"spliced in at blocks\.0\.mlp\.hook_post, which would be lost"
    ):
        model.set_ungroup_grouped_query_attention(True)
    model.blocks[0].mlp.hook_post = HookPoint()
    layer = model.original_model.model.layers[1].self_attn
    own, layer.v_proj = layer.v_proj, nn.Sequential(layer.v_proj)
    with pytest.raises(
        ValueError, match=r"v_proj in model\.layers\.1\.self_attn is no linear layer to their 16"
    ):
        model.set_ungroup_grouped_query_attention(True)
    layer.v_proj = own
    assert model.cfg.n_key_value_heads == 2
    assert wrong_values(model, "llama", "processed") == []
    model.set_ungroup_grouped_query_attention(True)
    with torch.no_grad():
        layer.k_proj.weight[0] += 1
    with pytest.raises(RuntimeError, match="k_proj was changed"):
        model.set_ungroup_grouped_query_attention(False)
    gpt2 = load("gpt2")
    gpt2.set_ungroup_grouped_query_attention(True)
    assert gpt2.cfg.ungroup_grouped_query_attention
    assert wrong_values(gpt2, "gpt2", "processed") == []


@pytest.mark.parametrize("run", [1, 2])
def test_an_exception_leaves_the_model_as_it_was(run):
    model, tokens, runs = load("llama"), reference("llama")["tokens"], []
    layers = model.original_model.model.layers
    model.train()
    layers[0].eval()
    before, modes = (
        model.original_model.state_dict(),
        [module.training for module in model.original_model.modules()],
    )

    def interrupt(*args):
        runs.append(args)
        if len(runs) == run:
            raise KeyboardInterrupt

    handle = layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.set_ungroup_grouped_query_attention(True)
    handle.remove()
    assert [module.training for module in model.original_model.modules()] == modes
    assert all(
        value.data_ptr() == before[name].data_ptr()
        for name, value in model.original_model.state_dict().items()
    )
    assert (model.cfg.n_key_value_heads, model.core.config.num_key_value_heads) == (2, 2)
    model.set_ungroup_grouped_query_attention(True)
    assert [module.training for module in model.original_model.modules()] == modes
    assert model.eval().run_with_cache(tokens)[1]["k", 0].shape[2] == 4


def test_no_memory_for_the_last_layer(monkeypatch):
    model, made, linear = load("llama"), [], torch.nn.Linear.__init__

    def counted(*args, **kwargs):
        made.append(args)
        if len(made) == 4:
            raise MemoryError
        linear(*args, **kwargs)

    monkeypatch.setattr(torch.nn.Linear, "__init__", counted)
    with pytest.raises(MemoryError):
        model.set_ungroup_grouped_query_attention(True)
    assert model.cfg.n_key_value_heads == 2
    assert wrong_values(model, "llama", "processed") == []


def test_back_in_another_type():
    model, right = load("llama"), load("llama").to(torch.bfloat16)
    model.set_ungroup_grouped_query_attention(True)
    model.to(torch.bfloat16)
    model.set_ungroup_grouped_query_attention(False)
    assert all(
        torch.equal(value, right.state_dict()[name]) for name, value in model.state_dict().items()
    )


def test_a_subclass_with_arguments_of_its_own():
    class Mine(HookedTransformer):
        def __init__(self, path, mine):
            super().__init__(load(path).original_model)
            self.mine = mine

    model, tokens = Mine("llama", mine=3), reference("llama")["tokens"]
    logits = model(tokens)
    model.set_ungroup_grouped_query_attention(True)
    assert torch.equal(model(tokens), logits)
    assert model.mine == 3
    assert model.run_with_cache(tokens)[1]["k", 0].shape[2] == 4
