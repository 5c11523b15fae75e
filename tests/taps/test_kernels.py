"""Attention by kernels that show nothing: what is no torch function is known by its arguments."""

import pytest
import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bridge import TransformerBridge
from bridge.taps.attention_call import AttentionCall
from tests.conftest import tiny
from tests.tiny_models import tiny_model

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(0))
NEW = {"max_new_tokens": 4, "do_sample": False, "verbose": False, "stop_at_eos": False}


def by_hand(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    sliding_window=None,
    is_causal=None,
    **kwargs,
):
    """Attention as flash computes it: a mask of tokens, the last query at the last key, a window of
    positions.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).double()
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).double()
    scores = query.double() @ key.transpose(-1, -2) * scaling
    queries, keys = scores.shape[-2:]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    for q in range(queries):
        place = q + keys - queries
        for k in range(keys):
            if (causal and k > place) or (
                sliding_window is not None and k <= place - sliding_window
            ):
                scores[..., q, k] = -torch.inf
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask[:, None, None].logical_not(), -torch.inf)
    pattern = scores.softmax(-1).nan_to_num()
    return (pattern @ value).transpose(1, 2).to(query.dtype), None


@pytest.fixture
def flash_by_hand(monkeypatch):
    """A kernel registered by a user, which hides what it computes from everybody."""

    def kernel(*args, **kwargs):
        with torch._C.DisableTorchFunctionSubclass(), torch._C.DisableTorchFunction():
            return by_hand(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = kernel
    yield "flash_attention_2"
    assert ALL_ATTENTION_FUNCTIONS["flash_attention_2"] is kernel
    del ALL_ATTENTION_FUNCTIONS["flash_attention_2"]


def windowed(kind, implementation) -> MistralForCausalLM:
    config = MistralConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=61,
        sliding_window=3 if kind == "window" else None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MistralForCausalLM._from_config(config, attn_implementation="eager").eval()
    model.config._attn_implementation = (
        implementation  # `set_attn_implementation` looks for flash itself
    )
    return model


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["window", "no window"])
@pytest.mark.parametrize("past", [0, 4, 6])
@torch.no_grad()
def test_windows_under_a_kernel_that_shows_nothing(flash_by_hand, kind, padded, past):
    """Scores, pattern and edits of them under a kernel of the user's are those of the model's own
    eager attention.
    """
    mask = (
        torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
        if padded
        else torch.ones(2, 7, dtype=torch.long)
    )
    seen = mask[:, :, None] * mask[:, None] * torch.ones(7, 7).tril()
    found = []
    for implementation in ("eager", flash_by_hand):
        bridge = TransformerBridge(windowed(kind, implementation))
        assert bridge.original_model.config._attn_implementation == implementation
        names = ["blocks.1.attn.hook_attn_scores", "blocks.1.attn.hook_pattern"]

        def run(how, bridge=bridge, **more):
            if past:
                kept = DynamicCache()  # which knows no windows, and forgets nothing
                bridge(TOKENS[:, :past], attention_mask=mask[:, :past], past_key_values=kept)
                more |= {"past_key_values": kept}
            return how(TOKENS[:, past:], attention_mask=mask, **more)

        plain = run(bridge)
        logits, cache = run(bridge.run_with_cache, names_filter=names)
        assert torch.equal(logits, plain)
        results = [plain, cache[names[0]], cache[names[1]]]
        for name, edit in (
            (names[0], lambda x, hook: x * torch.linspace(0.5, 2, x.shape[-1])),
            (names[1], lambda x, hook: x.roll(1, 1)),
            ("blocks.1.attn.hook_rot_k", lambda x, hook: x.flip(2)),
        ):
            results.append(run(bridge.run_with_hooks, fwd_hooks=[(name, edit)]))
            assert not torch.allclose(results[-1], plain)
        found.append(results)
    allowed = seen[:, past:].bool()
    if kind == "window":
        places = torch.arange(7)
        allowed = allowed & (places > places[past:, None] - 3)
    for ours, expected in zip(found[1][1:3], found[0][1:3], strict=True):
        keys = expected.shape[-1]
        at = allowed[:, None, :, -keys:].expand_as(expected)
        rows = at.any(-1, keepdim=True).expand_as(at)
        ours = ours[..., -keys:]
        torch.testing.assert_close(ours[at], expected[at], atol=1e-5, rtol=1e-4)
        assert not ours[rows & ~at].isfinite().logical_and(ours[rows & ~at] != 0).any()
    for ours, expected in zip(
        [found[1][0], *found[1][3:]], [found[0][0], *found[0][3:]], strict=True
    ):
        real = mask[:, past:].bool()
        torch.testing.assert_close(ours[real], expected[real], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_a_query_for_which_a_hook_forbids_everything(implementation):
    """It attends to nothing: no NaN, and what editing the pattern to zero gives."""
    bridge = TransformerBridge(tiny("llama", implementation))
    scores, pattern = ("blocks.1.attn.hook_attn_scores", "blocks.1.attn.hook_pattern")

    def forbid(x, hook):
        x[:, 1, 3] = 0 if hook.name == pattern else -torch.inf

    with bridge.hooks([(scores, forbid)]):
        logits, cache = bridge.run_with_cache(TOKENS, names_filter=[pattern])
    assert not cache[pattern][:, 1, 3].any()
    torch.testing.assert_close(cache[pattern][:, 0].sum(-1), torch.ones(2, 7))
    torch.testing.assert_close(logits, bridge.run_with_hooks(TOKENS, fwd_hooks=[(pattern, forbid)]))


@pytest.mark.parametrize("name", ["attn_scores", "pattern", "rot_q", "rot_k", "z"])
def test_queries_packed_in_groups(name):
    """One query of a padded batch is given to the kernel packed by groups of heads: an edit is of
    each head.
    """
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])

    def edit(x, hook):
        head = 1 if name in ("attn_scores", "pattern") else 2
        steps = torch.linspace(0.5, 2, x.shape[head]).view(
            [-1 if axis == head else 1 for axis in range(4)]
        )
        return x * steps

    made = []
    for implementation in ("eager", "sdpa"):
        bridge = TransformerBridge(tiny("llama", implementation))
        more = {"attention_mask": mask, "output_logits": True, **NEW}
        plain = torch.stack(bridge.generate(TOKENS, **more)["logits"])
        with bridge.hooks([(f"blocks.1.attn.hook_{name}", edit)]):
            made.append(torch.stack(bridge.generate(TOKENS, **more)["logits"]))
        assert not torch.allclose(made[-1][1:], plain[1:], atol=1e-3)
    torch.testing.assert_close(made[0], made[1], atol=1e-5, rtol=1e-4)


def test_a_kernel_is_given_back_what_it_returns_itself():
    """Packed queries come back packed, as the kernel has them."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, n, 8, generator=generator) for n in (3, 5, 5))
    call = AttentionCall(query, key, value, None, n_heads=6)
    result = call.result(call.pattern(call.scores()))
    assert result.shape == query.shape
    torch.testing.assert_close(
        result, torch.nn.functional.scaled_dot_product_attention(query, key, value)
    )


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "bloom"])
def test_in_half_precision_a_pattern_is_of_the_models_type_under_every_kernel(kind, kernel):
    model = tiny_model(kind, attn_implementation="eager").to(torch.bfloat16)
    wanted = model(TOKENS, output_attentions=True).attentions[1]
    model = tiny_model(kind, attn_implementation=kernel if kind != "bloom" else None).to(
        torch.bfloat16
    )
    bridge, name, shown = TransformerBridge(model), "blocks.1.attn.hook_pattern", []
    plain = model(TOKENS).logits
    logits, cache = bridge.run_with_cache(TOKENS, names_filter=name)
    assert torch.equal(logits, plain)
    assert cache[name].dtype == wanted.dtype == torch.bfloat16
    if kernel == "eager":
        assert torch.equal(cache[name], wanted)
    with bridge.hooks(
        fwd_hooks=[(name, lambda act, hook: shown.append(act))],
        bwd_hooks=[(name, lambda grad, hook: shown.append(grad))],
    ):
        hooked = bridge(TOKENS)
        hooked.float().sum().backward()
    if kernel == "eager":
        assert torch.equal(hooked, plain)
    assert [x.dtype for x in shown] == [torch.bfloat16] * 2
    assert bool(shown[1].any())
    halved = bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda act, hook: act / 2)])
    assert not torch.equal(halved, plain)
