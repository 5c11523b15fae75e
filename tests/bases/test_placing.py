"""What is refused when a basis is placed, what becomes of its error, and moving it."""

import pytest
import torch

from bridge import TransformerBridge
from bridge.bases import Directions, Neurons, Rotation
from tests.bases.common import SAE
from tests.conftest import tiny

POINT = "blocks.1.hook_resid_post"
TOKENS = torch.tensor([[5, 17, 2, 30, 11, 44]])


@torch.no_grad()
def test_an_error_is_left_out_or_is_another_runs() -> None:
    bridge, other = TransformerBridge(tiny("gpt2")), torch.tensor([[8, 3, 50, 12, 7, 21]])
    sae = SAE(32, 40)
    plain = bridge(TOKENS)
    dropped = bridge.run_with_hooks(TOKENS, fwd_hooks=[(POINT, lambda act, hook: sae.decode(sae.encode(act)))])
    hook = bridge.add_basis(POINT, "sae", sae, error="drop")
    assert torch.equal(bridge(TOKENS), dropped) and not torch.allclose(dropped, plain, atol=1e-2)
    bridge.reset_hooks()
    assert torch.equal(bridge(TOKENS), dropped), "it stays until the basis is removed"
    bridge.remove_basis(hook)
    assert torch.equal(bridge(TOKENS), plain)
    with bridge.basis(POINT, "sae", sae) as hook:
        _, cache = bridge.run_with_cache(other, names_filter=[hook.name, POINT])
        error = bridge.basis_error(cache, hook)
    assert torch.allclose(error, cache[POINT] - sae.decode(sae.encode(cache[POINT])), atol=1e-6)
    with bridge.basis(POINT, "sae", sae, error=error):
        found = bridge(TOKENS)
        assert torch.allclose(bridge(other), bridge.original_model(other).logits, atol=1e-5)
    right = bridge.run_with_hooks(TOKENS, fwd_hooks=[(POINT, lambda act, hook: sae.decode(sae.encode(act)) + error)])
    assert torch.allclose(found, right, atol=1e-5) and not torch.allclose(found, dropped, atol=1e-2)
    assert not bridge.bases and torch.equal(bridge(TOKENS), plain)


@torch.no_grad()
def test_several_and_one_on_another() -> None:
    bridge = TransformerBridge(tiny("gpt2"))
    plain = bridge(TOKENS)
    one = bridge.add_basis(POINT, "one", Rotation(32))
    inner = bridge.add_basis(one, "inner", Neurons(32, [3]))
    two = bridge.add_basis(POINT, "two", SAE(32, 40))
    alias = bridge.hook_dict[POINT].point.aliases[0]
    assert f"{POINT}.one, {POINT}.one.inner, {POINT}.two" in str(bridge)
    assert bridge.bases == [one, inner, two] and bridge.get_hook_point(f"{alias}.one") is one
    assert [hook.order for hook in bridge.hook_dict.values()] == list(range(len(bridge.hook_dict)))
    kept = [(hook, lambda features, hook: features) for hook in (inner, two, one)]
    assert torch.equal(bridge.run_with_hooks(TOKENS, fwd_hooks=kept), plain)
    bridge.remove_basis(one)
    assert bridge.bases == [two]


def test_it_moves_with_the_model_or_is_refused() -> None:
    bridge, sae = TransformerBridge(tiny("gpt2")), SAE(32, 40)
    bridge.add_basis(POINT, "sae", sae)
    bridge.to(torch.float64)
    assert sae.W_enc.dtype == torch.float64
    with pytest.raises(ValueError, match=r"hook_resid_post\.one: the basis holds torch.float32 on cpu"):
        bridge.add_basis(POINT, "one", SAE(32, 40))
    bridge.add_basis(POINT, "functions", encode=lambda x: x, decode=lambda x: x)
    with pytest.raises(ValueError, match="functions is made of functions"):
        bridge.to(torch.float32)
    assert sae.W_enc.dtype == torch.float64, "nothing was moved"


@pytest.mark.unchecked
def test_what_cannot_be_a_basis_is_refused() -> None:
    bridge, sae = TransformerBridge(tiny("gpt2")), SAE(32, 40)
    before = list(bridge.hook_dict)
    for error, match, given in (
        (TypeError, "give either a basis", {"basis": sae, "encode": sae.encode, "decode": sae.decode}),
        (TypeError, "give either a basis", {"encode": sae.encode}),
        (TypeError, "which has no method encode", {"basis": torch.nn.Linear(2, 2)}),
        (ValueError, "error is 'lose'", {"basis": sae, "error": "lose"}),
        (ValueError, "does not come before", {"basis": sae, "reads": "blocks.2.hook_resid_pre"}),
        (ValueError, "cannot read at", {"basis": sae, "reads": "blocks.0.ln1.hook_scale"}),
    ):
        with pytest.raises(error, match=match):
            bridge.add_basis(POINT, "sae", **given)
    with pytest.raises(ValueError, match="a word without dots"):
        bridge.add_basis(POINT, "a.b", sae)
    with pytest.raises(ValueError, match="only hands on to"):
        bridge.add_basis("blocks.1.hook_attn_in", "sae", sae)
    assert list(bridge.hook_dict) == before
    with pytest.raises(ValueError, match="model's own hook point"):
        bridge.remove_basis(POINT)
    bridge.add_basis(POINT, "sae", sae)
    with pytest.raises(ValueError, match="is there already"):
        bridge.add_basis(POINT, "sae", sae)
    wide = bridge.add_basis(POINT, "wide", SAE(32, 40, 16))
    with pytest.raises(ValueError, match=r"its decode gives \[1, 6, 16\]"):
        bridge.run_with_hooks(TOKENS, fwd_hooks=[(wide, lambda features, hook: features)])
    with pytest.raises(ValueError, match="not orthonormal"):
        Directions(torch.ones(4, 2), orthonormal=True)
    with pytest.raises(ValueError, match="not linearly independent"):
        Directions(torch.ones(4, 2))
