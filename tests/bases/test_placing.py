"""What is refused when a basis is placed, what becomes of its error, and moving it."""

import pytest
import torch

from bridge import TransformerBridge
from bridge.bases import CrossLayer, Directions, Neurons, Rotation
from bridge.patching import generic_activation_patch, layer_feature_patch_setter
from tests.bases.common import SAE, cross_layer
from tests.conftest import tiny

POINT = "blocks.1.hook_resid_post"
TOKENS = torch.tensor([[5, 17, 2, 30, 11, 44]])


@torch.no_grad()
def test_features_of_several_points_are_what_all_of_them_say() -> None:
    """A crosscoder: shown, edited, traced, lowered, generated with and differentiated as by
    hand.
    """
    bridge, numbers = TransformerBridge(tiny("gpt2")), torch.Generator().manual_seed(1)
    read = ["blocks.0.hook_resid_mid", "blocks.0.hook_resid_post", "blocks.1.hook_resid_mid"]
    sizes = ((40, 3, 32), (40,), (40, 1, 32), (32,))
    basis = CrossLayer(*(torch.randn(size, generator=numbers) / 6 for size in sizes))
    name = bridge.add_basis("blocks.1.hook_mlp_out", "cc", basis, reads=read).name
    _, cache = bridge.run_with_cache(TOKENS, names_filter=[*read, name, "blocks.1.hook_mlp_out"])
    streams = torch.stack([cache[one] for one in read], 2)
    right = (torch.einsum("bprd,frd->bpf", streams, basis.W_enc) + basis.b_enc).relu()
    assert (
        torch.allclose(cache[name], right, atol=1e-6) and (right > 0).any() and (right == 0).any()
    )
    error = bridge.basis_error(cache, name)
    assert torch.allclose(error + basis.decode(right), cache["blocks.1.hook_mlp_out"], atol=1e-5)

    def halved(act: torch.Tensor, hook: object = None) -> torch.Tensor:
        return act / 2

    def by_hand(act: torch.Tensor, hook: object) -> torch.Tensor:
        return act - basis.decode(right) + basis.decode(right / 2)

    wanted = bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_mlp_out", by_hand)])
    found = bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, halved)])
    assert torch.allclose(found, wanted, atol=1e-5) and not torch.allclose(
        found, bridge(TOKENS), atol=1e-3
    )
    assert torch.equal(bridge.program(interventions=[(name, halved)])(TOKENS)["logits"], found)
    with bridge.trace(TOKENS) as run:
        run[name][...] *= 0.5
    assert torch.equal(run.logits, found)
    with bridge.hooks(fwd_hooks=[(name, halved)]):
        made = bridge.generate(TOKENS, max_new_tokens=3, do_sample=False, verbose=False)
        assert torch.equal(
            made[:, :-1], torch.cat([TOKENS, bridge(made[:, :-1]).argmax(-1)[:, 5:-1]], 1)
        )
    with torch.enable_grad():  # all that is read counts
        gradients: dict[str, torch.Tensor] = {}
        hooks = [(one, lambda grad, hook: gradients.__setitem__(hook.name, grad)) for one in read]
        with bridge.hooks(fwd_hooks=[(name, halved)], bwd_hooks=hooks):
            bridge(TOKENS)[0, -1, 3].backward()
    assert len(gradients) == 3
    for refused in (
        lambda: generic_activation_patch(
            bridge,
            TOKENS,
            cache,
            lambda logits: logits[0, -1, 0],
            layer_feature_patch_setter,
            "mlp_out.cc",
            index_axis_names=["layer", "feature"],
            verbose=False,
        ),
        lambda: next(
            bridge.generate_batch([[5, 17]], max_new_tokens=1, capture=[name], verbose=False)
        ),
    ):
        with pytest.raises(ValueError, match=r"blocks\.1\.hook_mlp_out\.cc is of several points"):
            refused()
    bridge.remove_basis(name)
    with pytest.raises(
        ValueError, match=r"blocks\.1\.hook_resid_post does not come before blocks\.1\.hook_mlp_out"
    ):
        bridge.add_basis(
            "blocks.1.hook_mlp_out", "cc", basis, reads=[*read, "blocks.1.hook_resid_post"]
        )
    for wrong in ([read[0], read[0]], [read[0], "blocks.0.attn.hook_z"]):
        with pytest.raises(ValueError, match="several points are different, with like axes"):
            bridge.add_basis("blocks.1.hook_mlp_out", "cc", basis, reads=wrong)


@torch.no_grad()
def test_an_error_is_left_out_or_is_another_runs() -> None:
    bridge, other = TransformerBridge(tiny("gpt2")), torch.tensor([[8, 3, 50, 12, 7, 21]])
    sae = SAE(32, 40)
    plain = bridge(TOKENS)
    dropped = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[(POINT, lambda act, hook: sae.decode(sae.encode(act)))]
    )
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
    right = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[(POINT, lambda act, hook: sae.decode(sae.encode(act)) + error)]
    )
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
    with pytest.raises(
        ValueError, match=r"hook_resid_post\.one: the basis holds torch.float32 on cpu"
    ):
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
        (
            TypeError,
            "give either a basis",
            {"basis": sae, "encode": sae.encode, "decode": sae.decode},
        ),
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
    with pytest.raises(ValueError, match="hands on to"):
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


def place_both(bridge: TransformerBridge, error: object = "keep") -> list[str]:
    """A cross-layer transcoder of layers 0 and 1, which writes into layer 2 as well."""
    names = []
    for layer in (0, 1):
        writes = [f"blocks.{i}.hook_mlp_out" for i in range(layer, 3)]
        given = error if isinstance(error, str) else error[layer]
        hook = bridge.add_basis(
            writes[0],
            "clt",
            cross_layer(32, 40, 3 - layer),
            reads=f"blocks.{layer}.hook_resid_mid",
            later=writes[1:],
            error=given,
        )
        names.append(hook.name)
    return names


@torch.no_grad()
def test_a_cross_layer_transcoder_without_its_error_by_hand() -> None:
    bridge, other = TransformerBridge(tiny("gpt2")), torch.tensor([[8, 3, 50, 12, 7, 21]])
    plain, layers = bridge(TOKENS), [cross_layer(32, 40, 3), cross_layer(32, 40, 2)]
    seen: dict[int, torch.Tensor] = {}
    hooks = []
    for at in range(3):
        if at < 2:
            hooks.append(
                (
                    f"blocks.{at}.hook_resid_mid",
                    lambda act, hook, at=at: seen.update({at: layers[at].encode(act)}),
                )
            )

        def write(act: torch.Tensor, hook: object, at: int = at) -> torch.Tensor:
            made = sum(seen[i] @ layers[i].W_dec[:, at - i] for i in range(min(at + 1, 2)))
            return made + layers[at].b_dec if at < 2 else act + made

        hooks.append((f"blocks.{at}.hook_mlp_out", write))
    names = place_both(bridge, "drop")
    found = bridge(TOKENS)
    for name in names:
        bridge.remove_basis(name)
    assert torch.equal(bridge(TOKENS), plain) and not bridge.bases
    right = bridge.run_with_hooks(TOKENS, fwd_hooks=hooks)
    assert torch.allclose(found, right, atol=1e-5) and not torch.allclose(found, plain, atol=1e-2)
    names = place_both(bridge)
    writes = [name.rpartition(".")[0] for name in names]
    _, cache = bridge.run_with_cache(other, names_filter=[*names, *writes])
    errors = [bridge.basis_error(cache, name) for name in names]
    encoded = [cache[name] for name in names]
    by_hand = cache[writes[1]] - layers[1].decode(encoded[1]) - encoded[0] @ layers[0].W_dec[:, 1]
    assert torch.allclose(errors[1], by_hand, atol=1e-5)
    for name in names:
        bridge.remove_basis(name)
    place_both(bridge, errors)
    _, frozen = bridge.run_with_cache(other, names_filter=writes)
    assert all(torch.allclose(frozen[name], cache[name], atol=1e-5) for name in writes)


@pytest.mark.unchecked
def test_the_layers_of_a_transcoder_go_together() -> None:
    bridge = TransformerBridge(tiny("gpt2"))
    before = list(bridge.hook_dict)
    names = place_both(bridge)
    at = "blocks.2.hook_mlp_out"
    assert [hook.name for hook in bridge.bases] == [
        *names[:1],
        names[1],
        "blocks.1.hook_mlp_out.clt_of_0",
        f"{at}.clt_of_0",
        f"{at}.clt_of_1",
    ]
    with pytest.raises(ValueError, match="takes over features of an earlier layer"):
        bridge.remove_basis(f"{at}.clt_of_0")
    with pytest.raises(ValueError, match="which would not see"):
        bridge.add_basis(names[0], "some", Neurons(40, [3]))
    for name in names:
        bridge.remove_basis(name)
    assert list(bridge.hook_dict) == before
    reads, layer = "blocks.0.hook_resid_mid", cross_layer(32, 40, 2)
    for error, match, given in (
        (ValueError, "at 1 later points, and later= names 0", {"basis": layer, "reads": reads}),
        (ValueError, "say what they are of", {"basis": layer, "later": [at]}),
        (
            ValueError,
            "at 0 later points, and later= names 1",
            {"basis": SAE(32, 40), "reads": reads, "later": [at]},
        ),
        (
            ValueError,
            "does not come behind",
            {"basis": layer, "reads": reads, "later": ["blocks.0.hook_attn_out"]},
        ),
    ):
        with pytest.raises(error, match=match):
            bridge.add_basis("blocks.0.hook_mlp_out", "clt", **given)
    assert list(bridge.hook_dict) == before
    with pytest.raises(ValueError, match="do not fit each other"):
        CrossLayer(torch.randn(4, 8), torch.randn(5), torch.randn(4, 2, 8), torch.randn(8))


@torch.no_grad()
@pytest.mark.parametrize("error", ["keep", "drop"])
@pytest.mark.parametrize("per_run", ["auto", 1])
def test_sweeps_over_layers_that_are_written_later(per_run: int | str, error: str) -> None:
    """A patch goes on through all layers that it writes into, whatever other patches join there."""
    bridge, clean = TransformerBridge(tiny("gpt2")), torch.tensor([[8, 3, 50, 12, 7, 21]])
    names = place_both(bridge, error)
    _, cache = bridge.run_with_cache(clean, names_filter=names)

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, -1, 5] - logits[0, -1, 9]

    found = generic_activation_patch(
        bridge,
        TOKENS,
        cache,
        metric,
        layer_feature_patch_setter,
        "mlp_out.clt",
        ("layer", "feature"),
        verbose=False,
        patches_per_run=per_run,
    )
    for layer, name in enumerate(names):
        for feature in (0, 7, 39):

            def patch(
                features: torch.Tensor, hook: object, name: str = name, feature: int = feature
            ) -> torch.Tensor:
                features[..., feature] = cache[name][..., feature]
                return features

            right = metric(bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, patch)]))
            assert torch.allclose(found[layer, feature], right, atol=1e-5)
