"""SAELens' objects placed by `add_basis`, against what its own HookedSAETransformer gives with
them.
"""

import pytest
import torch
from sae_lens import (
    SAE,
    GatedSAEConfig,
    HookedSAETransformer,
    JumpReLUSAEConfig,
    SkipTranscoder,
    SkipTranscoderConfig,
    StandardSAEConfig,
    TopKSAEConfig,
)

from bridge import TransformerBridge

POINTS = {
    "resid": "blocks.2.hook_resid_post",
    "mlp": "blocks.1.hook_mlp_out",
    "z": "blocks.1.attn.hook_z",
}
KINDS = {
    "standard": (StandardSAEConfig, {}),
    "layer_norm": (StandardSAEConfig, {"normalize_activations": "layer_norm"}),
    "rescaled": (StandardSAEConfig, {"normalize_activations": "constant_norm_rescale"}),
    "gated": (GatedSAEConfig, {}),
    "topk": (TopKSAEConfig, {"k": 7}),
    "jumprelu": (JumpReLUSAEConfig, {}),
}


def random_weights(sae):
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in sae.parameters():
            parameter.copy_(torch.randn_like(parameter) / 8)
    return sae.eval()


def made(kind, point):
    config, options = KINDS[kind]
    cfg = config(d_in=128, d_sae=96, dtype="float32", device="cpu", **options)
    cfg.metadata.hook_name = POINTS[point]
    return random_weights(SAE.get_sae_class_for_architecture(cfg.architecture())(cfg))


@pytest.fixture
def both(name):
    return TransformerBridge.boot_embedded(), HookedSAETransformer.from_pretrained_no_processing(
        name, device="cpu"
    )


@torch.no_grad()
@pytest.mark.parametrize("error", ["keep", "drop"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_logits_and_features(both, texts, kind, point, error):
    bridge, theirs = both
    sae = made(kind, point)
    if point == "z":
        sae.turn_on_forward_pass_hook_z_reshaping()
    tokens = bridge.to_tokens(texts[:3])
    keeps = error == "keep"
    logits, cache = theirs.run_with_cache_with_saes(tokens, saes=[sae], use_error_term=keeps)
    assert torch.equal(logits, theirs.run_with_saes(tokens, saes=[sae], use_error_term=keeps))
    with bridge.basis(POINTS[point], "sae", sae, error=error) as hook:
        found, own = bridge.run_with_cache(tokens, names_filter=hook)
        edited = bridge.run_with_hooks(
            tokens, fwd_hooks=[(hook, lambda features, hook: features * 0.5)]
        )
    scale = float(logits.abs().max())
    right = cache[f"{POINTS[point]}.hook_sae_acts_post"]
    assert (own[hook.name] - right).abs().max() < 1e-6 * max(1.0, float(right.abs().max()))
    assert (found - logits).abs().max() < 1e-6 * scale
    assert own[hook.name].shape[-1] == 96 and len(hook.point.axes.split()) == own[hook.name].ndim
    sae.use_error_term = keeps
    halved = theirs.run_with_hooks_with_saes(
        tokens,
        saes=[sae],
        fwd_hooks=[(f"{POINTS[point]}.hook_sae_acts_post", lambda features, hook: features * 0.5)],
    )
    assert (edited - halved).abs().max() < 1e-6 * scale
    assert not torch.allclose(edited, found, atol=1e-2)
    assert torch.equal(bridge(tokens), bridge.original_model(tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize("error", ["keep", "drop"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_double_precision_edited_logits_are_the_same(both, texts, kind, error):
    """What is left in single precision is rounding: SAELens adds up in another order where the
    error is kept.
    """
    bridge, theirs = both
    sae = made(kind, "resid").double()
    sae.cfg.dtype, sae.dtype, sae.use_error_term = "float64", torch.float64, error == "keep"
    bridge.to(torch.float64), theirs.to(torch.float64)
    tokens = bridge.to_tokens(texts[:3])
    halve = lambda features, hook: features * 0.5
    right = theirs.run_with_hooks_with_saes(
        tokens, saes=[sae], fwd_hooks=[(f"{POINTS['resid']}.hook_sae_acts_post", halve)]
    )
    with bridge.basis(POINTS["resid"], "sae", sae, error=error) as hook:
        found = bridge.run_with_hooks(tokens, fwd_hooks=[(hook, halve)])
    assert found.dtype == right.dtype == torch.float64
    assert (found - right).abs().max() < 1e-13 * right.abs().max()


@torch.no_grad()
def test_sparse_features_need_not_be_dense(both, texts):
    cfg = TopKSAEConfig(d_in=128, d_sae=96, k=7, dtype="float32", device="cpu")
    sae = random_weights(SAE.get_sae_class_for_architecture("topk")(cfg))
    bridge, _ = both
    tokens = bridge.to_tokens(texts[:2])

    def encode(x):
        return sae.encode(x).to_sparse()

    def decode(features):
        return sae.decode(features.to_dense() if features.is_sparse else features)

    plain = bridge.add_basis(POINTS["resid"], "dense", sae)
    hook = bridge.add_basis(POINTS["resid"], "sparse", encode=encode, decode=decode)
    logits, cache = bridge.run_with_cache(tokens, names_filter=[hook.name, plain.name])
    assert cache[hook.name].is_sparse and torch.equal(
        cache[hook.name].to_dense(), cache[plain.name]
    )
    assert torch.equal(
        bridge.run_with_hooks(tokens, fwd_hooks=[(hook, lambda features, hook: features)]), logits
    )
    edits = [
        bridge.run_with_hooks(tokens, fwd_hooks=[(point, lambda features, hook: features * 0.5)])
        for point in (hook, plain)
    ]
    assert torch.equal(*edits) and not torch.allclose(edits[0], logits, atol=1e-2)


@torch.no_grad()
def test_a_transcoder_with_its_skip_path(both, texts):
    bridge, _ = both
    cfg = SkipTranscoderConfig(
        d_in=128, d_sae=96, d_out=128, dtype="float32", device="cpu", apply_b_dec_to_input=False
    )
    transcoder = random_weights(SkipTranscoder(cfg))
    reads, writes = "blocks.2.hook_resid_mid", "blocks.2.hook_mlp_out"
    tokens = bridge.to_tokens(texts[:3])
    with pytest.raises(ValueError, match="has a skip path"):
        bridge.add_basis(writes, "tc", transcoder, reads=reads, error="drop")
    seen = {}

    def by_hand(act, hook):
        return transcoder(seen["read"])

    right = bridge.run_with_hooks(
        tokens, fwd_hooks=[(reads, lambda act, hook: seen.update(read=act)), (writes, by_hand)]
    )
    skip = lambda x: x @ transcoder.W_skip.T
    with bridge.basis(writes, "tc", transcoder, reads=reads, skip=skip, error="drop"):
        assert (bridge(tokens) - right).abs().max() < 1e-6 * float(right.abs().max())
