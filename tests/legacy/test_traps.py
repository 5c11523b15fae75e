"""What said nothing, or the wrong thing, where HookedTransformer's users would not expect it."""

import copy

import pytest
import torch

from bridge.legacy import HookedTransformer, HookedTransformerConfig
from bridge.legacy.hook_points import HookPoint
from bridge.legacy.utils import get_act_name
from tests.reference import DATA, reference

CFG = {"n_layers": 1, "d_model": 8, "n_ctx": 5, "d_head": 2, "act_fn": "relu", "device": "cpu"}


def test_layers_that_are_tensors():
    assert get_act_name("pattern", torch.tensor(1)) == "blocks.1.attn.hook_pattern"
    model = HookedTransformer(CFG | {"d_vocab": 10})
    _, cache = model.run_with_cache([[1, 2]])
    assert cache["pattern", torch.tensor(0)] is cache["pattern", 0]


def test_tokens_have_a_hook_point_where_the_configuration_says_so():
    model = HookedTransformer(CFG | {"d_vocab": 10, "use_hook_tokens": True})
    assert "hook_tokens" in model.hook_dict
    _, cache = model.run_with_cache([[1, 2]])
    assert cache["hook_tokens"].tolist() == [[1, 2]]
    other = HookedTransformer(CFG | {"d_vocab": 10})
    assert "hook_tokens" not in other.run_with_cache([[1, 2]])[1]


def test_setting_the_field_ungroups():
    tokens = reference("llama")["tokens"]
    model = HookedTransformer.from_pretrained_no_processing(str(DATA / "llama"), device="cpu")
    plain = model(tokens)
    model.cfg.ungroup_grouped_query_attention = True
    _, cache = model.run_with_cache(tokens)
    assert cache["k", 0].shape[2] == model.cfg.n_heads
    assert torch.allclose(model(tokens), plain, atol=1e-5)
    model.cfg.ungroup_grouped_query_attention = False
    assert model.run_with_cache(tokens)[1]["k", 0].shape[2] == 2
    model.add_hook("hook_embed", lambda x, hook: x)
    with pytest.raises(RuntimeError, match="hooks are attached"):
        model.cfg.ungroup_grouped_query_attention = True
    assert model.cfg.ungroup_grouped_query_attention is False
    made = HookedTransformer(
        CFG | {"d_vocab": 10, "n_key_value_heads": 2, "ungroup_grouped_query_attention": True}
    )
    assert made.run_with_cache([[1, 2]])[1]["k", 0].shape[2] == 4


def test_vocabularies_that_are_set_late():
    config = HookedTransformerConfig(**CFG, d_vocab=0)
    config.d_vocab = 12
    assert HookedTransformer(config)([[1, 2]]).shape[-1] == 12
    with pytest.raises(ValueError, match="Must provide a tokenizer"):
        HookedTransformer(HookedTransformerConfig(**CFG))


def test_no_vocabulary_at_all():
    """ACDC makes such a model, which reads a residual stream."""
    model = HookedTransformer(CFG | {"d_vocab": 0, "d_vocab_out": 3})
    stream = torch.randn(1, 4, model.cfg.d_model)
    logits, cache = model.run_with_cache(stream, start_at_layer=0)
    assert model.W_E.shape == (0, model.cfg.d_model) and logits.shape == (1, 4, 3)
    assert torch.equal(model(cache["resid_post", -1], start_at_layer=model.cfg.n_layers), logits)


def test_a_batch_of_several_has_no_axis_to_drop():
    model = HookedTransformer(CFG | {"d_vocab": 10})
    with pytest.raises(AssertionError):
        model.run_with_cache([[1, 2], [3, 4]], remove_batch_dim=True)
    with pytest.raises(ValueError):
        model.run_with_cache([[1, 2], [3, 4]], remove_batch_dim=True)


def test_every_field_is_there_and_can_be_set():
    from dataclasses import fields

    model = HookedTransformer(CFG | {"d_vocab": 10, "initializer_range": 0.3})
    assert not [f.name for f in fields(HookedTransformerConfig) if not hasattr(model.cfg, f.name)]
    assert model.cfg.initializer_range == 0.3
    assert isinstance(model.cfg, HookedTransformerConfig)
    assert not model.cfg.is_layer_norm_activation()
    other = copy.copy(model.cfg)
    model.cfg.dtype = torch.bfloat16
    assert other.dtype == torch.float32
    assert model.cfg.dtype == torch.bfloat16
    assert model.W_E.dtype == torch.float32
    model.cfg.device = "cpu"
    assert model.cfg.device == torch.device("cpu")


def test_handles_have_their_hook():
    point = HookPoint()
    point.add_hook(lambda x, hook: x * 2)
    (handle,) = point.fwd_hooks
    handle.hook.remove()
    assert point.fwd_hooks == []
