"""What a trace says about points of one block that are asked for in another order than the
model's.
"""

import re
from itertools import combinations

import pytest
import torch

from bridge import TransformerBridge
from bridge.trace.coroutine import OutOfStepError
from tests.tiny_models import tiny_model

TOKENS = torch.tensor([[3, 4, 5, 6]])


@pytest.mark.parametrize(
    ("kind", "first", "late"),
    [
        ("llama", "attn.hook_z", "attn.hook_pattern"),
        ("llama", "attn.hook_z", "attn.hook_attn_scores"),
        ("llama", "attn.hook_z", "attn.hook_rot_k"),
        ("gpt2", "attn.hook_z", "attn.hook_pattern"),
        ("qwen3", "attn.hook_z", "attn.q_norm.hook_scale"),
        ("qwen3", "attn.hook_rot_q", "attn.k_norm.hook_normalized"),
        ("qwen3_next", "mixer.hook_conv", "mixer.hook_in_proj_ba"),
        ("mamba", "mixer.hook_out_proj", "mixer.hook_in_proj"),
    ],
)
def test_too_late_is_an_error_of_order_with_the_models_positions(kind, first, late):
    bridge = TransformerBridge(tiny_model(kind))
    first, late = f"blocks.0.{first}", f"blocks.0.{late}"
    with (
        pytest.raises(OutOfStepError, match=r"has passed|the model is at") as error,
        bridge.trace(TOKENS) as run,
    ):
        run[first]
        run[late]
    passed, here = (
        int(number) for number in re.findall(r"\((\d+) of \d+ points\)", str(error.value))
    )
    assert passed < here
    with bridge.trace(TOKENS) as run:  # and in the order that it tells
        run[late]
        run[first]
    assert not any(
        module._forward_hooks or module._forward_pre_hooks
        for module in bridge.original_model.modules()
    )


def test_scores_that_cannot_be_seen_are_still_told_so():
    bridge = TransformerBridge(tiny_model("llama"))
    attention = bridge.original_model.model.layers[0].self_attn
    o_proj = attention.o_proj

    def forward(hidden_states, *args, **kwargs):
        return o_proj(hidden_states), None

    attention.forward = forward
    with (
        pytest.raises(RuntimeError, match="computed no scores that could be seen"),
        bridge.trace(TOKENS) as run,
    ):
        run["blocks.0.attn.hook_pattern"]


def test_a_default_cache_leaves_out_what_cannot_be_seen_with_one_line():
    bridge = TransformerBridge(tiny_model("llama"))
    plain, wanted = bridge.run_with_cache(TOKENS)
    attention = bridge.original_model.model.layers[0].self_attn
    kernel = attention.forward

    def forward(*args, **kwargs):
        with torch._C.DisableTorchFunction():  # a kernel that is no torch function
            return kernel(*args, **kwargs)

    attention.forward = forward
    with pytest.warns(
        UserWarning, match="leaves out hook_rot_q, hook_rot_k, hook_attn_scores, hook_pattern"
    ) as said:
        logits, cache = bridge.run_with_cache(TOKENS)
    assert len(said) == 1 and torch.equal(logits, plain)
    left_out = {"blocks.0.attn.hook_attn_scores", "blocks.0.attn.hook_pattern"}
    assert set(wanted) - set(cache) <= left_out | {
        "blocks.0.attn.hook_rot_q",
        "blocks.0.attn.hook_rot_k",
    }
    assert left_out <= set(wanted) - set(cache)
    with pytest.raises(RuntimeError, match="computed no scores that could be seen"):
        bridge.run_with_cache(TOKENS, names_filter="blocks.0.attn.hook_pattern")


def test_rwkv_goes_past_blocks_that_are_left_out():
    bridge = TransformerBridge(tiny_model("rwkv"))
    with torch.no_grad():
        with bridge.trace(TOKENS) as run:
            run.skip(0)
            entered = run["blocks.1.hook_resid_pre"]
            logits = run.logits
        _, cache = bridge.run_with_cache(TOKENS, names_filter="blocks.0.hook_resid_pre")
        assert torch.equal(entered, cache["resid_pre", 0])
        torch.testing.assert_close(logits, bridge(cache["resid_pre", 0], start_at_layer=1))


@pytest.mark.parametrize(("kind", "layers"), [("gpt2", "n_layer"), ("llama", "num_hidden_layers")])
def test_every_three_points_in_the_models_order_can_be_read_in_one_trace(kind, layers):
    bridge = TransformerBridge(tiny_model(kind, **{layers: 4}))
    inside = ("hook_resid_pre", "attn.hook_z", "hook_attn_out", "hook_mlp_out", "hook_resid_post")
    _, cache = bridge.run_with_cache(TOKENS)
    points = [f"blocks.{layer}.{name}" for layer in range(4) for name in inside]
    for names in combinations(points, 3):
        with bridge.trace(TOKENS) as run:
            seen = [run[name] for name in names]
        assert all(
            torch.equal(value, cache[name]) for value, name in zip(seen, names, strict=True)
        ), names
