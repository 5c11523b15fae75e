"""With `pos_slice`, scores and patterns of the chosen queries alone are computed: the same as of
all, cut.
"""

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from adapters.views import View
from bridge import TransformerBridge
from bridge.taps.attention_call import AttentionCall, additive_mask
from tests.conftest import FAMILIES, tiny
from tests.tiny_models import tiny_model

INSIDE = ("hook_attn_scores", "hook_pattern")
CHOICES = [-1, 0, slice(2, 5), (3, None), [5, 1, 1]]


def insides(names):
    """The names of scores and patterns among these."""
    return [name for name in names if name.endswith(INSIDE)]


def cut(x, choice):
    """The chosen queries of scores or a pattern."""
    if isinstance(choice, int):
        choice = [choice]
    return x[:, :, slice(*choice) if isinstance(choice, tuple) else choice]


def assert_cut(bridge, tokens, choice, atol=2e-6, **inputs):
    """A cache at some positions is the whole cache at these, in all that it holds."""
    _, whole = bridge.run_with_cache(tokens, **inputs)
    _, part = bridge.run_with_cache(tokens, pos_slice=choice, **inputs)
    assert set(part) == set(whole)
    names = insides(whole)
    assert names
    for name in names:
        torch.testing.assert_close(part[name], cut(whole[name], choice), atol=atol, rtol=0)
        assert (
            part[name].untyped_storage().nbytes()
            <= 2 * part[name].numel() * part[name].element_size()
        )
    return part


@pytest.fixture
def made(monkeypatch):
    """Of how many queries scores were made, call by call."""
    sizes, own = [], AttentionCall.scores

    def scores(self):
        found = own(self)
        sizes.append(found.shape[2])
        return found

    # Scores that were made in full and cut afterwards look the same: what was saved is seen here
    # alone.
    monkeypatch.setattr(AttentionCall, "scores", scores)
    return sizes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right", None])
def test_with_padding(family, side, made):
    bridge = TransformerBridge(tiny(family))
    tokens = torch.randint(0, 61, (2, 9))
    mask = torch.ones_like(tokens)
    if side:
        mask[0, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    for choice in CHOICES:
        bridge.run_with_cache(tokens, attention_mask=mask, pos_slice=choice)
        assert (
            set(made) == {len(range(9)[slice(*choice)])}
            if isinstance(choice, tuple)
            else set(made) <= {1, 3}
        )
        made.clear()
        assert_cut(bridge, tokens, choice, attention_mask=mask)
        made.clear()


@pytest.mark.parametrize(
    ("family", "task", "attention"),
    [
        *[
            (family, "causal", kind)
            for family in ("mistral", "gemma3_text")
            for kind in ("sdpa", "eager")
        ],
        *[
            (family, "masked", kind)
            for family in ("bert", "modernbert")
            for kind in ("sdpa", "eager")
        ],
        ("gemma2", "causal", "eager"),
        ("gpt_oss", "causal", "eager"),
        ("bloom", "causal", "eager"),
        ("t5", "seq2seq", "sdpa"),
    ],
)
@pytest.mark.parametrize("choice", [-1, [7, 2]])
def test_windows_caps_sinks_and_both_directions(family, task, attention, choice):
    hf = tiny_model(family, task)
    hf.set_attn_implementation(attention)
    tokens = torch.randint(5, 50, (2, 11))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    inputs = {"decoder_input_ids": tokens} if family == "t5" else {}
    assert_cut(TransformerBridge(hf), tokens, choice, attention_mask=mask, **inputs)


def test_against_float64_by_hand(tokens):
    bridge = TransformerBridge(tiny("llama"))
    names = ["blocks.1.attn.hook_rot_q", "blocks.1.attn.hook_rot_k"]
    _, cache = bridge.run_with_cache(tokens, names_filter=names)
    q, k = (cache[name].double().transpose(1, 2) for name in names)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()
    pattern = (
        (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf).softmax(-1)
    )
    _, part = bridge.run_with_cache(
        tokens, pos_slice=[4, -1], names_filter="blocks.1.attn.hook_pattern"
    )
    torch.testing.assert_close(
        part["pattern", 1].double(), pattern[:, :, [4, 8]], atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("what", ["queries", "scores", "pattern"])
def test_edits_are_in_what_is_kept(tokens, what):
    bridge = TransformerBridge(tiny("llama"))
    name = {"queries": "hook_rot_q", "scores": "hook_attn_scores", "pattern": "hook_pattern"}[what]
    with bridge.hooks(fwd_hooks=[(f"blocks.1.attn.{name}", lambda x, hook: x * 0.5)]):
        assert_cut(bridge, tokens, -1)
        _, cache = bridge.run_with_cache(tokens, pos_slice=-1)
    _, plain = bridge.run_with_cache(tokens, pos_slice=-1)
    assert not torch.allclose(cache["pattern", 1], plain["pattern", 1], atol=1e-5)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_in_every_mode(tokens, context, attention):
    hf = tiny("llama")
    hf.set_attn_implementation(attention)
    with context():
        part = assert_cut(TransformerBridge(hf), tokens, -1)
    assert not any(x.requires_grad for x in part.values())


def test_autocast_chooses_the_precision(tokens):
    bridge = TransformerBridge(tiny("llama"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        part = assert_cut(bridge, tokens, -1, atol=2e-2)
    assert part["attn_scores", 1].dtype == torch.bfloat16


def test_after_a_past(tokens, made):
    bridge = TransformerBridge(tiny("llama"))
    past = DynamicCache(config=bridge.original_model.config)
    bridge(tokens[:, :4], past_key_values=past)
    _, part = bridge.run_with_cache(tokens[:, 4:], past_key_values=past, pos_slice=-1)
    assert set(made) == {1}
    _, whole = bridge.run_with_cache(tokens)
    torch.testing.assert_close(
        part["pattern", 2], whole["pattern", 2][:, :, -1:], atol=2e-6, rtol=0
    )


def test_gradients_of_a_cache_are_of_whole_patterns(tokens):
    bridge = TransformerBridge(tiny("llama"))
    name = "blocks.1.attn.hook_pattern"
    asked = {"names_filter": name, "incl_bwd": True, "return_type": "loss"}
    _, whole = bridge.run_with_cache(tokens, **asked)
    _, part = bridge.run_with_cache(tokens, pos_slice=-1, **asked)
    for key in (name, f"{name}_grad"):
        assert torch.equal(part[key], whole[key][:, :, -1:])


@pytest.mark.parametrize("choice", [9, [0, -10], slice(4, 4)])
def test_positions_that_are_not_there(tokens, choice):
    bridge = TransformerBridge(tiny("llama"))
    with pytest.raises(IndexError, match="positions"):
        bridge.run_with_cache(tokens, pos_slice=choice, names_filter="blocks.1.attn.hook_pattern")
    assert not bridge.wiring.listening


def test_a_view_that_sees_more_than_a_row_is_given_all_rows(tokens, made):
    class Flipped(View):
        identity = False

        def get(self, x, call):
            return x.flip(-2)

    bridge = TransformerBridge(tiny("llama"))
    hook = bridge.hook_dict["blocks.1.attn.hook_pattern"]
    expected = bridge.run_with_cache(tokens)[1][hook.name][:, :, :1]
    hook.view = Flipped()
    _, part = bridge.run_with_cache(tokens, pos_slice=-1, names_filter=hook.name)
    assert made[-1] == 9
    torch.testing.assert_close(part[hook.name], expected)


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("keys", [7, 9])
def test_the_mask_of_an_opaque_kernel(kernel, window, padded, keys):
    query, key = torch.randn(2, 4, 7, 8), torch.randn(2, 2, keys, 8)
    mask = (torch.arange(keys) >= torch.tensor([[0], [3]])).long() if padded else None
    options = {"is_causal": True, "sliding_window": window}
    whole = additive_mask(kernel, query, key, mask, options)
    chosen = torch.tensor([6, 2])
    assert torch.equal(
        additive_mask(kernel, query, key, mask, options, chosen), whole[..., chosen, :]
    )
    call = AttentionCall(
        query, key, key, mask, 4, kernel=kernel, options={**options, "s_aux": torch.randn(4)}
    )
    part = copy.copy(call)
    part.chosen = chosen
    torch.testing.assert_close(
        part.pattern(part.scores()), call.pattern(call.scores())[:, :, chosen]
    )


def test_a_query_twice_where_there_is_one():
    call = AttentionCall(torch.randn(1, 2, 1, 8), key := torch.randn(1, 2, 5, 8), key, None, 2)
    call.chosen = torch.tensor([0, 0])
    assert call.scores().shape == (1, 2, 2, 5)


def test_what_is_written_over_is_the_same():
    query, key = torch.randn(2, 1, 4, 33, 8)
    mask = torch.ones(33, 33, dtype=torch.bool).tril()
    for given in ({"mask": None, "causal": True}, {"mask": mask}, {"mask": torch.randn(33, 33)}):
        call = AttentionCall(query, key, key, n_heads=4, options={"softcap": 3.0}, **given)
        with torch.enable_grad():
            scores = call.scores()
            pattern = call.pattern(scores)
        with torch.no_grad():
            assert torch.equal(call.scores(), scores)
            assert torch.equal(call.pattern(call.scores(), over=True), pattern)


def test_a_hook_may_keep_and_change_the_pattern_it_is_shown(tokens):
    """It is shown the pattern itself, which nobody else holds: what it writes, counted or not,
    takes effect.
    """
    bridge, name = TransformerBridge(tiny("llama")), "blocks.1.attn.hook_pattern"
    kept = []

    def written(x, hook):
        kept.append(x)
        x.data[..., 0] = 0.25

    def returned(x, hook):
        x = x.clone()
        x[..., 0] = 0.25
        return x

    with torch.no_grad():
        expected = bridge.run_with_hooks(tokens, fwd_hooks=[(name, returned)])
        logits, cache = bridge.run_with_cache(tokens, names_filter=name)
        assert torch.equal(bridge.run_with_hooks(tokens, fwd_hooks=[(name, written)]), expected)
        assert not torch.equal(expected, logits)
        assert bool((kept[0][..., 0] == 0.25).all())
        assert torch.equal(kept[0][..., 1:], cache[name][..., 1:])
        # Where a second function stands there, each holds a copy of its own.
        seen = []
        both = [(name, lambda x, hook: seen.append(x)), (name, lambda x, hook: x.zero_())]
        bridge.run_with_hooks(tokens, fwd_hooks=both)
    assert torch.equal(seen[0], cache[name])


def test_modules_are_as_they_were(tokens):
    bridge = TransformerBridge(tiny("llama"))
    before = {name: dict(module.__dict__) for name, module in bridge.original_model.named_modules()}
    bridge.run_with_cache(tokens, pos_slice=-1)
    for name, module in bridge.original_model.named_modules():
        assert set(module.__dict__) == set(before[name])
        assert isinstance(module, nn.Module)
