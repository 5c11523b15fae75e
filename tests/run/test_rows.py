"""Runs of rows of unequal length, of decoders whose tokens the model makes, and of documents in one
row.
"""

import copy

import pytest
import torch
import transformers

from bridge import TransformerBridge
from bridge.interventions import Zero
from tests.generation.test_rows_alone import BART, shaken

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral", "Gemma"])
@pytest.mark.parametrize("pad", [0, 2, 5])
def test_a_score_does_not_depend_on_the_batch(family, pad):
    """Padding is the end of a text, or what the model alone knows."""
    tokenizer = copy.deepcopy(TransformerBridge.boot_embedded().tokenizer)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "num_key_value_heads": 4, "head_dim": 8}
    config = getattr(transformers, f"{family}Config")(**sizes, pad_token_id=pad)
    model = shaken(getattr(transformers, f"{family}ForSequenceClassification")(config), 0.05)
    for own in (True, False):
        if not own:
            tokenizer.pad_token = None
        bridge, texts = (
            TransformerBridge(model, tokenizer),
            ["Mary and John went to the store", "Mary"],
        )
        with torch.no_grad():
            alone = torch.cat([model(input_ids=bridge.to_tokens(text)).logits for text in texts])
            torch.testing.assert_close(bridge(texts), alone)
            batch = bridge.batch_of(texts)
            stream = bridge(texts, stop_at_layer=1)
            torch.testing.assert_close(
                bridge(stream, attention_mask=batch.mask, start_at_layer=1), alone
            )
            with pytest.raises(ValueError, match="embeddings have none"):
                bridge(model.get_input_embeddings()(batch.tokens), attention_mask=batch.mask)


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX"])
def test_documents_in_one_row_begin_again_from_a_layer_on(family):
    config = getattr(transformers, f"{family}Config")(**SIZES, pad_token_id=0)
    bridge = TransformerBridge(shaken(getattr(transformers, f"{family}ForCausalLM")(config), 0.05))
    places = torch.tensor([[0, 1, 2, 0, 1, 2]])
    for more in ({}, {"use_cache": False}):
        with torch.no_grad():
            whole = bridge(TOKENS[:1], position_ids=places, **more)
            stream = bridge(TOKENS[:1], position_ids=places, stop_at_layer=1, **more)
            again = bridge(stream, position_ids=places, start_at_layer=1, **more)
        torch.testing.assert_close(again, whole)


@pytest.mark.parametrize(
    "name",
    [
        "BartModel",
        "BartForQuestionAnswering",
        "BartForSequenceClassification",
        "BartForConditionalGeneration",
        "PLBartForConditionalGeneration",
        "MvpForConditionalGeneration",
        "MBartForConditionalGeneration",
    ],
)
def test_what_a_decoder_is_given_by_its_model_is_left_to_it(name):
    config = getattr(transformers, f"{name.split('For')[0].removesuffix('Model')}Config")(**BART)
    model, tokens = shaken(getattr(transformers, name)(config)), TOKENS.clone()
    tokens[:, -1] = 2
    found = TransformerBridge(model)(tokens)
    found = found if isinstance(found, torch.Tensor) else next(iter(found.values()))
    assert torch.equal(found, model(tokens)[0])


def test_a_decoder_of_another_number_of_heads():
    model = shaken(
        transformers.BartForConditionalGeneration(
            transformers.BartConfig(**{**BART, "decoder_attention_heads": 2})
        )
    )
    bridge, decoded, name = TransformerBridge(model), TOKENS[:, :4], "decoder.0.attn.hook_z"
    _, cache = bridge.run_with_cache(TOKENS, decoder_input_ids=decoded)
    assert cache[name].shape == (2, 4, 2, 16) and cache["encoder.0.attn.hook_z"].shape == (
        2,
        6,
        4,
        8,
    )
    found = bridge.run_with_hooks(
        TOKENS, decoder_input_ids=decoded, fwd_hooks=[(name, Zero(heads=1))]
    )
    out = model.model.decoder.layers[0].self_attn.out_proj
    handle = out.register_forward_pre_hook(
        lambda module, args: (torch.cat([args[0][..., :16], args[0][..., 16:] * 0], -1),)
    )
    torch.testing.assert_close(found, model(TOKENS, decoder_input_ids=decoded).logits)
    handle.remove()


def test_a_decoder_goes_on_behind_the_encoders_mask():
    model = shaken(transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)))
    bridge, decoded = (
        TransformerBridge(model),
        torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(1)),
    )
    mask = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])

    def past():
        return model(
            TOKENS, attention_mask=mask, decoder_input_ids=decoded[:, :3], use_cache=True
        ).past_key_values

    with torch.no_grad():
        whole = model(TOKENS, attention_mask=mask, decoder_input_ids=decoded).logits[:, 3:]
        found = bridge(
            TOKENS, attention_mask=mask, decoder_input_ids=decoded[:, 3:], past_key_values=past()
        )
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


def test_a_program_leaves_them_to_it_as_well():
    model = shaken(transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)))
    bridge = TransformerBridge(model)
    torch.testing.assert_close(bridge.program()(TOKENS)["logits"], bridge(TOKENS))
