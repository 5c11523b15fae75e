"""What is derived from a run follows the declared recipe: how the stream begins, and how logits are
made of its end.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from adapters.inputs import sample_inputs, split
from bridge import TransformerBridge
from bridge.analysis.logit_lens import head_contributions
from tests.tiny_models import tiny_model

TOKENS = torch.arange(3, 21).reshape(2, 9)
ONE, OTHER = 5, 7


def constant(bridge: TransformerBridge) -> Tensor:
    """What belongs to no term: the bias of the logits and of the final norm, for one token over
    another.
    """
    found = bridge.b_U[ONE] - bridge.b_U[OTHER]
    bias = bridge.weights["ln_final.b"] if "ln_final.b" in bridge.weights.getters else None
    return found if bias is None else found + bias @ (bridge.W_U[:, ONE] - bridge.W_U[:, OTHER])


@pytest.mark.parametrize(
    "model_type",
    [
        "cohere",
        "granite",
        "minicpm3",
        "falcon_h1",
        "hyperclovax",
        "inkling_text",
        "mbart",
        "openai-gpt",
    ],
)
def test_attributions_of_all_terms_are_the_difference_of_logits(model_type: str) -> None:
    bridge = TransformerBridge(tiny_model(model_type))
    with torch.no_grad():
        logits = bridge.original_model(TOKENS).logits
        _, cache = bridge.run_with_cache(TOKENS)
        parts = cache.logit_attrs(cache.decompose_resid(), ONE, OTHER).sum(0) + constant(bridge)
    torch.testing.assert_close(parts, logits[..., ONE] - logits[..., OTHER], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "model_type", ["modernbert-decoder", "megatron-bert", "xlm-roberta-xl", "bert"]
)
def test_an_activation_before_the_logits_is_refused(model_type: str) -> None:
    bridge = TransformerBridge(tiny_model(model_type))
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
        with pytest.raises(ValueError, match="activation function come between"):
            cache.logit_attrs(cache.decompose_resid(), ONE, OTHER)
        with pytest.raises(ValueError, match="activation function come between"):
            head_contributions(
                bridge, TOKENS, torch.tensor([ONE, ONE]), torch.tensor([OTHER, OTHER])
            )


@pytest.mark.parametrize(
    "model_type",
    [
        "mbart",
        "roberta-prelayernorm",
        "blenderbot-small",
        "roc_bert",
        "xmod",
        "rembert",
        "xlm",
        "longcat_flash",
    ],
)
def test_terms_sum_to_the_stream_at_every_layer(model_type: str) -> None:
    bridge = TransformerBridge(tiny_model(model_type))
    seen: list[Tensor] = []
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
        for layer in range(bridge.cfg.n_layers):
            seen.append(cache["resid_pre", layer])
            terms = cache.decompose_resid(layer)
            torch.testing.assert_close(terms.sum(0), seen[-1], rtol=1e-4, atol=1e-4)
    assert len(seen) == 2


def test_a_bias_that_marian_adds_to_its_logits_is_in_b_U() -> None:
    model = tiny_model("marian", "seq2seq")
    model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(0))
    bridge = TransformerBridge(model)
    with torch.no_grad():
        logits = model(TOKENS, decoder_input_ids=TOKENS).logits
        _, cache = bridge.run_with_cache(TOKENS, decoder_input_ids=TOKENS)
        made = cache["decoder.1.hook_normalized_resid_post"] @ bridge.W_U + bridge.b_U
    torch.testing.assert_close(made, logits, rtol=1e-4, atol=1e-4)


def test_a_norm_of_a_gemma_by_hand_with_the_factor_behind_it() -> None:
    """HyperCLOVA X multiplies what the norm behind attention makes: each head's share, in
    float64.
    """
    model = tiny_model("hyperclovax").double()
    bridge = TransformerBridge(model)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
        heads = cache.stack_head_results(1, post_norms=True)
        block = model.model.layers[0]
        results = cache["blocks.0.attn.hook_z"].flatten(-2)[..., None, :] * torch.block_diag(
            *[torch.ones(1, bridge.cfg.d_head, dtype=torch.float64)] * bridge.cfg.n_heads
        )
        made = F.linear(results, block.self_attn.o_proj.weight)
        scale = (made.sum(-2).pow(2).mean(-1) + block.post_norm1.variance_epsilon).sqrt()
        right = (
            made
            / scale[..., None, None]
            * block.post_norm1.weight
            * model.config.residual_multiplier
        )
    torch.testing.assert_close(heads, right.movedim(-2, 0), rtol=1e-9, atol=1e-9)


def test_terms_of_a_text_beside_images_have_the_norm_of_their_embeddings_once() -> None:
    """BLIP norms the sum of its embeddings: the bias of that norm is one term, and no image is."""
    bridge = TransformerBridge(tiny_model("blip", "image_text"))
    tokens, more = split(bridge.core, sample_inputs(bridge.core))
    with torch.no_grad():
        _, cache = bridge.run_with_cache(tokens, **more)
        for layer in range(bridge.cfg.n_layers):
            terms, labels = cache.decompose_resid(layer, return_labels=True)
            torch.testing.assert_close(
                terms.sum(0), cache["resid_pre", layer], rtol=1e-4, atol=1e-4
            )
            assert not [label for label in labels if "images" in label]


def test_logits_that_the_model_replaces_are_no_sum() -> None:
    """Chameleon gives the tokens of images the least logit that there is."""
    bridge = TransformerBridge(tiny_model("chameleon", "image_text"))
    _, cache = bridge.run_with_cache(TOKENS)
    with pytest.raises(ValueError, match="the logits of some tokens by a constant"):
        cache.logit_attrs(cache.decompose_resid(), ONE, OTHER)
