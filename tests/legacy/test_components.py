"""What parts have besides weights: constants, parts that are registered again, and refusals."""

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from bridge.legacy import HookedTransformer
from tests.legacy.test_own_forward import TOKENS, config
from tests.reference import DATA


def made(**more):
    return HookedTransformer(config(**more))


def test_the_divisor_of_scores():
    assert [block.attn.attn_scale for block in made().blocks] == [2.0, 2.0]
    assert made(use_attn_scale=False).blocks[1].attn.attn_scale == 1.0
    by_layer = made(scale_attn_by_inverse_layer_idx=True)
    assert [block.attn.attn_scale for block in by_layer.blocks] == [2.0, 4.0]


def test_scores_are_divided_by_it():
    for model in (made(attn_scale=3.0), made(scale_attn_by_inverse_layer_idx=True)):
        _, cache = model.run_with_cache(TOKENS)
        q, k = (cache[name, 1].transpose(1, 2) for name in "qk")
        scores = q @ k.mT / model.blocks[1].attn.attn_scale
        shown = cache["attn_scores", 1]
        lower = shown.isfinite() & (shown > -1e9)
        torch.testing.assert_close(scores[lower], shown[lower])


def test_norms_compute_with_their_epsilon():
    model = made(eps=1e-2)
    x = torch.randn(1, 2, 16)
    for norm in (model.ln_final, model.blocks[0].ln1):
        centred = x - x.mean(-1, keepdim=True)
        expected = centred / (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
        torch.testing.assert_close(norm(x), expected * norm.w + norm.b)
        assert norm.length == 16
    folded = made(normalization_type="LNPre", eps=1e-3)
    assert folded.blocks[1].ln2.eps == 1e-3
    assert not hasattr(folded.ln_final, "length")  # nor has HookedTransformer's


@pytest.mark.parametrize("family", ["gemma2", "llama", "qwen3", "bloom", "gpt_neox"])
def test_constants_of_loaded_models(family):
    model = HookedTransformer.from_pretrained_no_processing(str(DATA / family), device="cpu")
    block = model.blocks[1]
    _, cache = model.run_with_cache(TOKENS)
    linear = cache["pre_linear", 1] if model.cfg.gated_mlp else 1
    post = block.mlp.act_fn(cache["pre", 1]) * linear
    torch.testing.assert_close(post, cache["post", 1])
    assert block.mlp.d_mlp == model.cfg.d_mlp and block.ln1.eps == model.cfg.eps
    assert block.normalization_type == model.cfg.normalization_type
    assert (block.attn.q_norm is None) == (family != "qwen3")
    if model.cfg.n_key_value_heads is not None:
        groups = model.cfg.n_heads // model.cfg.n_key_value_heads
        assert block.attn.repeat_kv_heads == groups


def test_experts():
    mlp = made(num_experts=3, experts_per_token=2, gated_mlp=True, act_fn="silu").blocks[0].mlp
    assert (mlp.num_experts, mlp.experts_per_token, mlp.d_mlp) == (3, 2, 32)
    assert {"num_experts", "act_fn"} <= {*dir(mlp)}


def test_constants_cannot_be_set_to_other_values():
    block = made().blocks[0]
    block.attn.attn_scale = block.attn.attn_scale
    for part, name, value in [
        (block.attn, "attn_scale", 1.0),
        (block.mlp, "act_fn", torch.relu),
        (block.ln1, "eps", 1.0),
    ]:
        with pytest.raises(TypeError, match="another value would change nothing"):
            setattr(part, name, value)


def test_what_attention_computes_with_is_refused_with_a_replacement():
    with pytest.raises(AttributeError, match="hook_q, "):
        made().blocks[0].attn.calculate_qkv_matrices(1, 2, 3)


def test_parts_that_are_registered_again():
    model = made()
    plain = model(TOKENS)
    for name, module in [*model.named_modules()]:
        if not name:
            continue
        path, _, last = name.rpartition(".")
        parent = model.get_submodule(path)
        parent.add_module(last, module)
        parent.register_module(last, module)
        setattr(parent, last, module)
    model.original_model = model.original_model
    assert not model.calls and not model.spliced
    assert "original_model" not in dict(model.named_children())
    torch.testing.assert_close(model(TOKENS), plain)


def test_a_module_of_the_users_that_is_registered_again_stays():
    model = made()
    model.blocks[0].mlp = zero = nn.Module()
    zero.forward = torch.zeros_like
    plain = model(TOKENS)
    model.blocks[0].add_module("mlp", zero)
    torch.testing.assert_close(model(TOKENS), plain)


def test_weights_that_are_registered_again():
    model = made()
    x = model(TOKENS).sum()
    for part in (model, model.embed, model.blocks[0].attn, model.blocks[0].ln1, model.unembed):
        for name in ("W_E", "W_Q", "w", "b_U", "mask"):
            if isinstance(weight := getattr(part, name, None), torch.Tensor):
                setattr(part, name, weight)
                part.register_buffer(name, weight)
                if part is not model and name != "mask":
                    part.register_parameter(name, weight)
    x.backward()  # nothing was written to
    assert all("W_Q" not in part._buffers for part in model.modules())
    with pytest.raises(AttributeError, match="no setter"):
        model.W_E = torch.zeros(20, 16)


def test_moving_by_keyword():
    assert made().to(device_or_dtype=torch.float64).W_E.dtype == torch.float64
    assert made().to(device_or_dtype="cpu", print_details=False).W_E.device.type == "cpu"


def test_a_trainer_says_what_to_pass(tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(TypeError, match=r"Trainer\(model=bridge\.original_model"):
        Trainer(model=made(), args=arguments)
