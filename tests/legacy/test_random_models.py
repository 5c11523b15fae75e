"""Random models of the configurations that HookedTransformer 2.18 builds: the same logits, from the
same seeds.

`python tests/legacy/test_random_models.py`, where TransformerLens 2.18 is installed, writes the
reference.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

REFERENCE = Path(__file__).resolve().parents[1] / "data" / "random_models.safetensors"
TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
BASE = {
    "n_layers": 2,
    "d_model": 16,
    "n_ctx": 12,
    "d_head": 8,
    "n_heads": 2,
    "d_mlp": 32,
    "d_vocab": 30,
    "act_fn": "gelu",
    "seed": 0,
    "device": "cpu",
    "normalization_type": "LN",
}
ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 8, "normalization_type": "RMS"}
KINDS = {
    "local": {"use_local_attn": True, "window_size": 3, "attn_types": ["global", "local"]},
    "by_parts": {
        **ROTARY,
        "use_NTK_by_parts_rope": True,
        "NTK_original_ctx_len": 20,
        "rotary_base": 100,
    },
    "scores_cap": {"attn_scores_soft_cap": 0.05},
    "logits_cap": {"output_logits_soft_cap": 0.5},
    "sandwich": {"use_normalization_before_and_after": True, "normalization_type": "RMS"},
    "qk_norm": {**ROTARY, "use_qk_norm": True},
    "mixture": {"num_experts": 4, "experts_per_token": 2, "act_fn": "silu", "gated_mlp": True},
}
#: What each of them is compared with, to see that it makes a difference.
WITHOUT = {
    "local": {},
    "by_parts": ROTARY,
    "scores_cap": {},
    "logits_cap": {},
    "sandwich": {"normalization_type": "RMS"},
    "qk_norm": ROTARY,
    "mixture": {"act_fn": "silu", "gated_mlp": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_logits_from_the_same_seed(kind):
    from adapters import verify
    from bridge import TransformerBridge
    from bridge.legacy import HookedTransformer

    right = load_file(REFERENCE)[kind]
    model = HookedTransformer(BASE | KINDS[kind])
    with torch.no_grad():
        assert torch.allclose(model(TOKENS), right, atol=1e-5)
        assert not torch.allclose(HookedTransformer(BASE | WITHOUT[kind])(TOKENS), right, atol=1e-4)
    for name, value in KINDS[kind].items():
        assert getattr(model.cfg, name) == value
    report = verify(TransformerBridge(model.original_model))
    assert report.passed, report


def test_what_is_shown_of_a_capped_and_of_a_local_layer():
    from bridge.legacy import HookedTransformer

    _, cache = HookedTransformer(BASE | KINDS["scores_cap"]).run_with_cache(TOKENS)
    scores = cache["attn_scores", 0]
    assert scores[scores.isfinite()].abs().max() <= 0.05
    _, cache = HookedTransformer(BASE | KINDS["local"]).run_with_cache(TOKENS)
    assert (
        cache["pattern", 0].tril(-3).abs().max() > 0
        and cache["pattern", 1].tril(-3).abs().max() == 0
    )


@pytest.mark.parametrize("kind", ["local", "scores_cap", "mixture"])
def test_saved_and_generating(kind, tmp_path):
    from bridge import TransformerBridge
    from bridge.legacy import HookedTransformer
    from bridge.native import NativeModel

    model = HookedTransformer(BASE | KINDS[kind])
    model.original_model.save_pretrained(tmp_path)
    again = TransformerBridge(NativeModel.from_pretrained(tmp_path))
    with torch.no_grad():
        assert torch.equal(again(TOKENS), model(TOKENS))
        grown = again.generate(TOKENS[:, :3], max_new_tokens=5, do_sample=False, verbose=False)
        for length in range(3, 8):  # through its cache as without one
            assert torch.equal(again(grown[:, :length])[:, -1].argmax(-1), grown[:, length])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"use_local_attn": True, "window_size": 3, "attn_types": ["local"]}, "for 2 layers"),
        ({"num_experts": 2, "experts_per_token": 3}, "exclude each other"),
        ({"use_normalization_before_and_after": True, "normalization_type": None}, "needs norms"),
        ({"use_NTK_by_parts_rope": True}, "is for positional_embedding_type='rotary'"),
        ({"post_embedding_ln": True}, "is for loaded models"),
    ],
)
def test_what_no_model_can_be(fields, why):
    from bridge.legacy import HookedTransformer

    with pytest.raises(ValueError, match=why):
        HookedTransformer(BASE | fields)


if __name__ == "__main__":
    from transformer_lens import HookedTransformer

    made = {
        kind: HookedTransformer(BASE | fields)(TOKENS).detach() for kind, fields in KINDS.items()
    }
    save_file({kind: logits.contiguous() for kind, logits in made.items()}, REFERENCE)
