"""What a generation leaves is what a run on the finished text leaves, or it is refused."""

import pytest
import torch

from bridge import TransformerBridge
from tests.tiny_models import tiny_model

OPTIONS = {
    "max_new_tokens": 3,
    "do_sample": False,
    "verbose": False,
    "stop_at_eos": False,
    "return_type": "tokens",
}


def prompt():
    return torch.randint(3, 61, (2, 5), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["llama4_text", "nanochat"])
def test_modules_that_run_several_times_in_each_step(kind):
    bridge = TransformerBridge(tiny_model(kind))
    out, cache = bridge.generate(prompt(), return_cache=True, **OPTIONS)
    with torch.no_grad():
        _, right = bridge.run_with_cache(out[:, :-1])
    several = [name for name in cache if "@" in bridge.hook_dict[name].point.site.path]
    assert several
    for name in several:
        torch.testing.assert_close(cache[name], right[name], atol=1e-4, rtol=1e-3, msg=name)


def test_a_hook_at_one_of_several_calls_is_called_in_each_step():
    bridge = TransformerBridge(tiny_model("nanochat"))
    name = next(name for name, hook in bridge.hook_dict.items() if "@" in hook.point.site.path)
    seen = []
    with bridge.hooks(fwd_hooks=[(name, lambda act, hook: seen.append(act.shape[1]))]):
        bridge.generate(prompt(), **OPTIONS)
    assert seen == [5, 1, 1]


def test_a_model_that_reads_in_both_directions_is_refused_or_reads_all_anew():
    bridge = TransformerBridge(tiny_model("bert-generation"))
    with pytest.raises(ValueError, match="reads in both directions"):
        bridge.generate(prompt(), return_cache=True, **OPTIONS)
    out, cache = bridge.generate(prompt(), return_cache=True, use_past_kv_cache=False, **OPTIONS)
    with torch.no_grad():
        _, right = bridge.run_with_cache(out[:, :-1])
    for name in cache:
        torch.testing.assert_close(cache[name], right[name], atol=1e-5, rtol=1e-4, msg=name)


def test_what_runs_on_the_prompt_alone_is_left_out_and_refused_when_named():
    bridge = TransformerBridge(tiny_model("recurrent_gemma"))
    name = "blocks.0.mixer.hook_conv"
    out, cache = bridge.generate(prompt(), return_cache=True, **OPTIONS)
    assert name in bridge.hook_dict and name not in cache
    with torch.no_grad():
        _, right = bridge.run_with_cache(out[:, :-1])
    for other in cache:
        torch.testing.assert_close(cache[other], right[other], atol=1e-4, rtol=1e-3, msg=other)
    with pytest.raises(RuntimeError, match=r"hook_conv has no axis of positions.*run_with_cache"):
        bridge.generate(prompt(), return_cache=True, names_filter=[name], **OPTIONS)


@pytest.mark.parametrize("kind", ["rwkv", "mamba2", "recurrent_gemma", "bamba"])
def test_states_are_those_after_the_last_token(kind):
    bridge = TransformerBridge(tiny_model(kind))
    out, cache = bridge.generate(prompt()[:1], return_cache=True, **OPTIONS)
    with torch.no_grad():
        _, right = bridge.run_with_cache(out[:, :-1])
    states = [name for name in cache if "pos" not in bridge.hook_dict[name].point.axes.split()]
    for name in states:
        torch.testing.assert_close(cache[name], right[name], atol=1e-4, rtol=1e-3, msg=name)
    assert set(states) == {name for name in right if name in states}


def test_rows_that_the_model_itself_mixes_up_are_refused():
    bridge = TransformerBridge(tiny_model("rwkv"))
    said = r"has 2 positions in a step of 1 .* Generate the rows one by one"
    with (
        pytest.raises(ValueError, match=said),
        pytest.warns(UserWarning, match="a row of a batch otherwise than alone"),
    ):
        bridge.generate(prompt(), return_cache=True, **OPTIONS)
    out, cache = bridge.generate(prompt()[:1], return_cache=True, **OPTIONS)
    with torch.no_grad():
        _, right = bridge.run_with_cache(out[:, :-1])
    assert "blocks.1.hook_resid_post" in cache
    for name in cache:
        torch.testing.assert_close(cache[name], right[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("length", [5, 8])
def test_scores_of_keys_that_stand_for_several_tokens_are_left_out_and_refused_when_named(length):
    """DeepSeek V4 compresses keys behind a window that moves: of 8 tokens, steps have as many by
    chance, of others.
    """
    bridge = TransformerBridge(tiny_model("deepseek_v4"))
    name = "blocks.1.attn.hook_attn_scores"
    prompt = lambda: torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(1))
    out, cache = bridge.generate(prompt(), return_cache=True, **OPTIONS)
    assert name in bridge.hook_dict and name not in cache
    with torch.no_grad():
        _, right = bridge.run_with_cache(out[:, :-1])
    assert "blocks.1.hook_resid_pre" in cache
    for other in cache:
        torch.testing.assert_close(cache[other], right[other], atol=1e-4, rtol=1e-3, msg=other)
    with pytest.raises(
        RuntimeError,
        match=r"hook_attn_scores is of keys that stand for several tokens.*run_with_cache",
    ):
        bridge.generate(prompt(), return_cache=True, names_filter=[name], **OPTIONS)
