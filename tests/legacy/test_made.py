"""Configurations, and models made from them."""

import random

import numpy as np
import pytest
import torch

from bridge.legacy import HookedTransformer, HookedTransformerConfig
from tests.reference import DATA

# Their texts are read by tiny tokenizers that do not know all words.
pytestmark = pytest.mark.filterwarnings("ignore:the tokenizer .* does not know")

BASE = {
    "n_layers": 2,
    "d_model": 16,
    "n_ctx": 8,
    "d_head": 4,
    "d_vocab": 11,
    "act_fn": "relu",
    "device": "cpu",
}


def test_defaults_are_worked_out():
    cfg = HookedTransformerConfig(**BASE)
    assert (cfg.n_heads, cfg.d_mlp, cfg.d_vocab_out, cfg.attn_scale) == (4, 64, 11, 2.0)
    assert cfg.initializer_range == pytest.approx(0.8 / 4)
    assert cfg.n_params == 2 * (16 * 4 * 4 * 4 + 2 * 16 * 64)
    assert HookedTransformerConfig(**BASE, init_mode="xavier_uniform").initializer_range == 1.0
    assert HookedTransformerConfig(**BASE, positional_embedding_type="rotary").rotary_dim == 4
    assert HookedTransformerConfig(**BASE, use_attn_scale=False).attn_scale == -1.0
    assert HookedTransformerConfig(**BASE | {"act_fn": None, "attn_only": True}).d_mlp is None
    assert HookedTransformerConfig(**BASE | {"act_fn": "solu_ln"}).is_layer_norm_activation()


def test_to_and_from_a_dictionary():
    cfg = HookedTransformerConfig(**BASE)
    assert HookedTransformerConfig.from_dict(cfg.to_dict()) == cfg
    assert HookedTransformerConfig.unwrap(cfg) is cfg
    assert HookedTransformerConfig.unwrap(BASE) == cfg
    assert "n_layers" in repr(cfg)
    assert repr(cfg).startswith("HookedTransformerConfig:")


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"act_fn": None}, ValueError, "act_fn must be given"),
        ({"act_fn": "rellu"}, ValueError, "Did you mean relu"),
        ({"use_local_attn": True}, ValueError, "window_size and attn_types"),
        ({"num_experts": 4}, ValueError, "go together"),
        ({"experts_per_token": 4}, ValueError, "go together"),
        ({"default_prepend_bos": "yes"}, ValueError, "must be True or False"),
        ({"n_devices": 99}, ValueError, "n_devices=99"),
        ({"d_modl": 4}, TypeError, "Did you mean d_model"),
    ],
)
def test_checks(change, error, message):
    with pytest.raises(error, match=message):
        HookedTransformerConfig.from_dict(BASE | change)


def test_a_seed_is_set_everywhere():
    def drawn():
        HookedTransformerConfig(**BASE, seed=5)
        return random.random(), np.random.rand(), float(torch.rand(()))

    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert drawn() == drawn()
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"attn_only": True, "normalization_type": None, "act_fn": None},
        {
            "positional_embedding_type": "rotary",
            "rotary_dim": 2,
            "normalization_type": "RMS",
            "gated_mlp": True,
        },
        {"positional_embedding_type": "shortformer", "act_fn": "solu_ln"},
        {"attention_dir": "bidirectional", "d_vocab_out": 3},
        {
            "parallel_attn_mlp": True,
            "scale_attn_by_inverse_layer_idx": True,
            "init_mode": "kaiming_normal",
        },
        {
            "use_attn_scale": False,
            "final_rms": True,
            "n_key_value_heads": 2,
            "dtype": torch.float64,
        },
    ],
)
def test_models_from_configurations(change):
    fields = BASE | change
    model = HookedTransformer(HookedTransformerConfig(**fields, seed=1))
    tokens = torch.tensor([[1, 2, 3, 4]])
    logits, cache = model.run_with_cache(tokens)
    assert logits.shape == (1, 4, fields.get("d_vocab_out", 11))
    assert logits.dtype == fields.get("dtype", torch.float32)
    assert cache["pattern", 1].shape == (1, 4, 4, 4)
    assert torch.equal(
        logits,
        HookedTransformer(HookedTransformerConfig(**fields, seed=1)).run_with_cache(tokens)[0],
    )
    assert model.cfg.model_name == "custom"


def test_fields_that_only_loaded_models_have():
    for change in ({"post_embedding_ln": True}, {"rotary_adjacent_pairs": True}):
        with pytest.raises(ValueError, match="is for loaded models"):
            HookedTransformer(BASE | change)
    with pytest.raises(ValueError, match="Must provide a tokenizer"):
        HookedTransformer({name: value for name, value in BASE.items() if name != "d_vocab"})


def test_the_vocabulary_of_a_tokenizer():
    fields = {name: value for name, value in BASE.items() if name != "d_vocab"}
    model = HookedTransformer(
        fields | {"tokenizer_name": str(DATA / "gpt2")}, default_padding_side="left"
    )
    assert (model.cfg.d_vocab, model.cfg.d_vocab_out) == (61, 61)
    assert model.tokenizer.padding_side == "left"
    assert model(model.to_tokens("a")).shape[-1] == 61


@pytest.mark.unchecked
def test_a_model_of_the_same_shape():
    loaded = HookedTransformer.from_pretrained_no_processing(str(DATA / "gpt2"), device="cpu")
    made = HookedTransformer(loaded.cfg)
    assert made.tokenizer is not None
    ours, right = made.tl_parameters(), loaded.tl_parameters()
    assert {name: value.shape for name, value in ours.items()} == {
        name: value.shape for name, value in right.items()
    }
    made.load_state_dict(right)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.allclose(made(tokens), loaded(tokens), atol=1e-4)
    with pytest.raises(TypeError, match="int is no configuration"):
        HookedTransformer(3)


def test_weights_can_be_assigned():
    model = HookedTransformer(BASE)
    new = torch.randn(4, 16, 4)
    model.blocks[1].attn.W_Q = torch.nn.Parameter(new)
    assert torch.equal(model.W_Q[1], new)
    model.embed.W_E = torch.eye(16)[:11]
    assert torch.equal(model.run_with_cache([[3]])[1]["embed"][0, 0], torch.eye(16)[3])
    with pytest.raises(ValueError, match=r"blocks.0.attn.W_Q has shape \[4, 16, 4\]"):
        model.blocks[0].attn.W_Q = torch.zeros(3)
    with pytest.raises(TypeError, match="weights take tensors"):
        model.blocks[0].attn.W_Q = 3
    with pytest.raises(AttributeError, match="Did you mean W_Q"):
        model.blocks[0].attn.W_QQ = new


def test_devices():
    model = HookedTransformer(BASE)
    assert model.to("cpu", print_details=False) is model
    assert model.cpu().to(torch.float64).cfg.dtype == torch.float64


def test_a_model_that_is_made_of_another_ones_facts_has_drawn_weights():
    facts = HookedTransformer(BASE | {"seed": 3}).cfg
    made = []
    for left in (777.0, -555.0):  # what another tensor leaves in memory is no weight
        junk = [torch.full((16, 64), left) for _ in range(200)]
        del junk
        made.append(HookedTransformer(facts))
    for model in made:
        assert all(x.abs().max() < 10 for x in model.parameters())
    assert made[0](torch.tensor([[1, 2, 3]])).isfinite().all()
