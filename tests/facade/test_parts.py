"""Parts called by themselves: `bridge.blocks[0](residual)`, `bridge.ln_final(residual)`."""

import gc
import weakref

import pytest
import torch

from bridge import TransformerBridge
from tests.tiny_models import tiny_model

TOKENS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
#: Scaled embeddings, learned positions, a factor before the unembedding, parallel parts, experts.
FAMILIES = ("llama", "gpt2", "gemma2", "minicpm3", "gpt_neox", "cohere", "mixtral", "bloom", "bart")


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge.boot_embedded()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_parts_one_after_the_other_are_the_model(family):
    bridge = TransformerBridge(tiny_model(family))
    logits, cache = bridge.run_with_cache(TOKENS)
    assert torch.equal(bridge.embed(TOKENS), cache["hook_embed"])
    residual = cache["blocks.0.hook_resid_pre"]
    for index, block in enumerate(bridge.blocks):
        assert torch.equal(residual, cache["resid_pre", index])
        residual = block(residual)
    if family != "bart":  # which has no final norm
        residual = bridge.ln_final(residual)
    result = bridge.unembed(residual)
    if cap := bridge.architecture.readout.soft_cap:
        result = cap * torch.tanh(result / cap)
    torch.testing.assert_close(result, logits, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_an_mlp_and_a_norm(bridge):
    _, cache = bridge.run_with_cache(TOKENS, names_filter=lambda name: "blocks.1." in name)
    normed = bridge.blocks[1].ln2(cache["resid_mid", 1])
    assert torch.equal(bridge.blocks[1].mlp(normed), cache["mlp_out", 1])
    (_, block), *_ = bridge.blocks_with("mlp")[1:]
    assert torch.equal(block(cache["resid_pre", 1]), cache["resid_post", 1])


@torch.no_grad()
@pytest.mark.parametrize(
    ("part", "point"),
    [
        ("embed", "hook_embed"),
        ("blocks.1", "blocks.1.attn.hook_z"),
        ("blocks.1.mlp", "blocks.1.mlp.hook_post"),
        ("ln_final", "ln_final.hook_normalized"),
        ("unembed", "unembed.hook_out"),
    ],
)
def test_hooks_run_in_a_part(bridge, part, point):
    """Each of them once, and what it returns goes on."""
    given = TOKENS if part == "embed" else torch.randn(2, 4, bridge.cfg.d_model)
    plain = bridge.call_part(part, given)
    calls = []

    def change(activation, hook):
        calls.append(hook.name)
        return activation * 2

    with bridge.hooks([(point, change)]):
        changed = bridge.call_part(part, given)
    assert calls == [point]
    assert not torch.allclose(plain, changed)
    assert torch.equal(bridge.call_part(part, given), plain)


def test_gradients_go_through_parts(bridge):
    residual = torch.randn(1, 3, bridge.cfg.d_model, requires_grad=True)
    bridge.unembed(bridge.ln_final(bridge.blocks[3](residual)))[0, -1, 7].backward()
    assert residual.grad.abs().sum() > 0


REFUSED = {
    "attn": (
        lambda b, x: b.blocks[0].attn(x),
        r"blocks.0.attn cannot be called by itself: call its block, bridge.blocks\[0\]\(residual\)"
        r".*get_submodule\('model.layers.0.self_attn'\)",
    ),
    "all blocks": (
        lambda b, x: b.blocks(x),
        r"bridge.blocks is a list: bridge.blocks\[0\]\(residual\)",
    ),
    "tokens for a norm": (
        lambda b, x: b.ln_final(TOKENS),
        r"ln_final takes a tensor \[batch, pos, d_model\] of numbers; it is",
    ),
    "text for the unembedding": (lambda b, x: b.unembed("Mary"), r"unembed takes a tensor"),
    "another width": (
        lambda b, x: b.ln_final(x[..., :1]),
        r"ln_final takes vectors of width 128; the input is \[1, 3, 1\]",
    ),
    "no such part": (
        lambda b, x: b.call_part("ln_finale", x),
        r"the model has no part 'ln_finale'\. Did you mean ln_final",
    ),
}


@pytest.mark.unchecked
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_called_says_what_can(bridge, case):
    call, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError, AttributeError), match=message):
        call(bridge, torch.randn(1, 3, bridge.cfg.d_model))


def test_a_head_between_the_norm_and_the_unembedding():
    """Without it, the logits would be others than the model's."""
    bridge = TransformerBridge(tiny_model("modernbert-decoder"))
    residual = torch.randn(1, 3, bridge.cfg.d_model)
    with pytest.raises(TypeError, match=r"bridge\(residual, start_at_layer=\d+\) computes"):
        bridge.unembed(bridge.ln_final(residual))


def test_a_part_does_not_keep_its_bridge_alive():
    bridge = TransformerBridge(tiny_model("gpt2"))
    bridge.blocks[0](torch.randn(1, 3, bridge.cfg.d_model))
    gone = weakref.ref(bridge)
    gc.disable()
    try:
        del bridge
        assert gone() is None
    finally:
        gc.enable()
