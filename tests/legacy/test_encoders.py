"""`HookedEncoder` and `HookedEncoderDecoder` against Hugging Face's own outputs."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertTokenizerFast,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from bridge.legacy import HookedEncoder, HookedEncoderDecoder, HookedTransformer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS += ["the", "a", "cat", "dog", "sat", "ran", "on", "to", "mat", "store", ",", "."]
MASKED = ["the [MASK] sat on the mat", "a dog [MASK]", "the cat ran to [MASK] store ."]
PAIR = ["the cat sat on the mat .", "a dog ran"]
FIELDS = {"n_layers": 2, "d_model": 12, "d_head": 4, "n_ctx": 9, "act_fn": "gelu", "device": "cpu"}


@pytest.fixture(scope="module")
def tokenizer():
    return BertTokenizerFast(vocab={word: index for index, word in enumerate(WORDS)})


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=20,
    )
    hf = BertForPreTraining(config)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    path = tmp_path_factory.mktemp("bert")
    hf.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def encoder(folder):
    return HookedEncoder.from_pretrained(folder, device="cpu")


@pytest.fixture(scope="module")
def masked(folder):
    return BertForMaskedLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def sequential(folder):
    return BertForNextSentencePrediction.from_pretrained(folder).eval()


def close(a, b):
    return torch.allclose(a, b, atol=1e-5)


def test_texts_and_tokens(encoder, masked, tokenizer):
    encoded = tokenizer(MASKED, return_tensors="pt", padding=True)
    right = masked(**encoded).logits
    assert close(encoder(MASKED), right)
    assert close(
        encoder(encoded["input_ids"], one_zero_attention_mask=encoded["attention_mask"]), right
    )
    tokens, types, mask = encoder.to_tokens(MASKED)
    assert torch.equal(tokens, encoded["input_ids"])
    assert torch.equal(types, encoded["token_type_ids"])
    assert torch.equal(mask, encoded["attention_mask"])
    assert encoder.to_str_tokens("a dog") == ["[CLS]", "a", "dog", "[SEP]"]
    assert encoder.get_token_position("dog", "a dog") == 2
    assert encoder.to_tokens("the " * 30)[0].shape == (1, 20)
    assert encoder.to_tokens("the " * 30, truncate=False)[0].shape == (1, 32)


def test_predictions(encoder, masked, tokenizer):
    encoded = tokenizer(MASKED, return_tensors="pt", padding=True)
    best = masked(**encoded).logits.argmax(-1)[encoded["input_ids"] == tokenizer.mask_token_id]
    words = [tokenizer.decode(token) for token in best]
    assert encoder(MASKED[:1], "predictions") == encoder(MASKED[0], "predictions") == words[0]
    assert encoder(MASKED, "predictions") == [
        f"Prediction {i}: {word}" for i, word in enumerate(words)
    ]
    assert (
        encoder(tokenizer(MASKED[1], return_tensors="pt")["input_ids"], return_type="predictions")
        == words[1]
    )


def test_parts_of_bert(encoder, masked, sequential, tokenizer):
    encoded = tokenizer(*PAIR, return_tensors="pt")
    tokens, types = encoded["input_ids"], encoded["token_type_ids"]
    embedded = masked.bert.embeddings(tokens, token_type_ids=types)
    assert torch.equal(encoder.embed(tokens, types), embedded)
    assert torch.equal(encoder.embed(tokens, token_type_ids=types), embedded)
    assert not torch.equal(encoder.embed(tokens), embedded)
    last = sequential.bert(**encoded).last_hidden_state
    assert close(encoder.encoder_output(tokens, types), last)
    assert torch.equal(encoder.pooler(last), sequential.bert.pooler(last))
    assert torch.equal(
        encoder.nsp_head(encoder.pooler(last)), sequential.cls(sequential.bert.pooler(last))
    )
    assert torch.equal(encoder.mlm_head(last), masked.cls.predictions.transform(last))
    assert torch.equal(encoder.unembed(encoder.mlm_head(last)), masked.cls.predictions(last))
    attention = masked.bert.encoder.layer[0].attention
    right = attention.output.dense(attention.self(embedded)[0])
    assert close(encoder.blocks[0].attn(embedded, embedded, embedded), right)
    block = masked.bert.encoder.layer[0](embedded)
    assert close(
        encoder.blocks[0](embedded), block if isinstance(block, torch.Tensor) else block[0]
    )


def test_a_checkpoint_without_the_other_head(masked, tokenizer, tmp_path):
    masked.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = HookedEncoder.from_pretrained(str(tmp_path), device="cpu")
    assert type(model.original_model) is BertForMaskedLM
    with pytest.raises(
        ValueError, match=r"reads in both directions: HookedEncoder\.from_pretrained"
    ):
        HookedTransformer.from_pretrained(str(tmp_path), device="cpu")


@pytest.mark.unchecked
def test_encoders_from_configurations(tokenizer, folder):
    model = HookedEncoder(FIELDS, tokenizer=tokenizer)
    assert model.tokenizer is tokenizer
    assert (model.cfg.d_vocab, model.cfg.n_heads, model.cfg.attention_dir) == (
        len(WORDS),
        3,
        "bidirectional",
    )
    assert model("a cat").shape == (1, 4, len(WORDS))
    tokens = torch.tensor([[2, 5, 6, 3]])
    assert not torch.allclose(
        model(tokens)[0, 1], model(torch.tensor([[2, 5, 7, 3]]))[0, 1], atol=1e-6
    )
    assert isinstance(
        HookedEncoder(FIELDS | {"tokenizer_name": folder}).tokenizer, BertTokenizerFast
    )
    assert HookedEncoder(FIELDS | {"d_vocab": 22}).tokenizer is None
    with pytest.raises(AssertionError, match="Must provide a tokenizer if d_vocab is not provided"):
        HookedEncoder(FIELDS)
    for change, message in (
        ({"gated_mlp": True}, "gated_mlp is True; in a HookedEncoder it can only be False"),
        ({"n_heads": 2}, "n_heads=2 times d_head=4 is not d_model=12"),
        ({"d_vocab_out": 5}, "d_vocab_out is 5"),
    ):
        with pytest.raises(ValueError, match=message):
            HookedEncoder(FIELDS | {"d_vocab": 22} | change)
    with pytest.raises(TypeError, match=r"HookedEncoder\.from_pretrained\('bert-base-cased'\)"):
        HookedEncoder("bert-base-cased")


@pytest.fixture(scope="module")
def seq2seq():
    torch.manual_seed(0)
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["<pad>", "</s>", *WORDS[1:]])}, "[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")
    config = T5Config(
        vocab_size=len(WORDS) + 1,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    hf = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return (
        HookedEncoderDecoder.from_pretrained(
            "t5-small", hf_model=hf, tokenizer=tokenizer, device="cpu"
        ),
        hf,
    )


def test_an_encoder_decoders_texts(seq2seq):
    model, hf = seq2seq
    assert model.original_model is hf
    encoded = model.tokenizer(PAIR, return_tensors="pt", padding=True)
    tokens, mask = model.to_tokens(PAIR)
    assert torch.equal(tokens, encoded["input_ids"])
    assert torch.equal(mask, encoded["attention_mask"])
    start = torch.zeros(2, 1, dtype=torch.long)
    right = hf(input_ids=tokens, attention_mask=mask, decoder_input_ids=start).logits
    assert close(model(PAIR), right)
    assert close(model(tokens, start, one_zero_attention_mask=mask), right)
    logits, cache = model.run_with_cache(
        tokens, start, "logits", mask, names_filter="decoder.1.cross_attn.hook_pattern"
    )
    assert close(logits, right)
    assert cache["decoder.1.cross_attn.hook_pattern"].shape == (2, 4, 1, tokens.shape[1])


def test_an_encoder_decoder_generates(seq2seq):
    model, hf = seq2seq
    encoded = model.tokenizer(PAIR[0], return_tensors="pt")
    right = hf.generate(**encoded, do_sample=False, max_new_tokens=6)
    assert model.generate(
        PAIR[0], do_sample=False, max_new_tokens=6, verbose=False
    ) == model.tokenizer.decode(right[0], skip_special_tokens=True)
    made = model.generate(
        encoded["input_ids"], encoded["attention_mask"], 6, do_sample=False, verbose=False
    )
    assert torch.equal(made, right)
    torch.manual_seed(0)
    many = encoded["input_ids"].repeat(30, 1)
    assert (
        len(
            model.generate(many, None, 1, temperature=9.0, stop_at_eos=False, verbose=False)[
                :, -1
            ].unique()
        )
        > 5
    )


def test_an_encoder_decoder_from_a_configuration():
    fields = FIELDS | {"act_fn": "relu", "d_vocab": 30, "relative_attention_num_buckets": 8}
    model = HookedEncoderDecoder(fields)
    assert model([[1, 2, 3]], [[0, 4]]).shape == (1, 2, 30)
    config = model.core.config
    assert (config.relative_attention_num_buckets, config.relative_attention_max_distance) == (
        8,
        128,
    )
    assert model.to("cpu", torch.float64).cpu() is model
    assert (
        model.to(torch.float32, False).to(torch.float64, print_details=False).cfg.dtype
        == torch.float64
    )
    assert model([[1, 2]], [[0]]).dtype == torch.float64
    assert (config.d_kv, config.d_ff, config.decoder_start_token_id) == (4, 48, 0)
    assert (
        HookedEncoderDecoder(fields | {"gated_mlp": True}).core.config.feed_forward_proj
        == "gated-relu"
    )
    with pytest.raises(ValueError, match="attn_only is True; in a HookedEncoderDecoder"):
        HookedEncoderDecoder(fields | {"attn_only": True})


def test_parts_of_t5(seq2seq):
    model, hf = seq2seq
    tokens, given = torch.tensor([[5, 6, 7, 8, 1]]), torch.tensor([[0, 9, 10]])
    logits, cache = model.run_with_cache(tokens, given)
    bias = model.encoder[0].attn.compute_relative_attention_bias(5, 5)
    assert torch.equal(bias, hf.encoder.block[0].layer[0].SelfAttention.compute_bias(5, 5))
    assert model.encoder[0].attn.has_relative_attention_bias
    assert not model.encoder[1].attn.has_relative_attention_bias
    assert (
        model.encoder[1].attn.relative_attention_num_buckets
        == hf.config.relative_attention_num_buckets
    )
    x = model.embed(tokens)
    assert torch.equal(x, cache["hook_embed"])
    for block in model.encoder:
        x = block(resid_pre=x, position_bias=bias)
    encoded = model.encoder_final_ln(x)
    assert close(encoded, hf.encoder(tokens).last_hidden_state)
    y, bias = model.embed(given), hf.decoder.block[0].layer[0].SelfAttention.compute_bias(3, 3)
    for i, block in enumerate(model.decoder):
        stream = {
            name: cache[f"decoder.{i}.hook_{name}"]
            for name in ("resid_pre", "attn_out", "cross_attn_out")
        }
        assert close(y, stream["resid_pre"])
        normed = block.ln1(y)
        assert close(block.attn(normed, normed, normed, position_bias=bias), stream["attn_out"])
        middle = block.ln2(y + stream["attn_out"])
        assert close(block.cross_attn(middle, encoded, encoded), stream["cross_attn_out"])
        normed = block.ln3(cache[f"decoder.{i}.hook_resid_mid_cross"])
        assert close(block.mlp(normed), cache[f"decoder.{i}.hook_mlp_out"])
        y = block(y, encoder_hidden_states=encoded, position_bias=bias)
    y = model.decoder_final_ln(y)
    assert close(y, hf.decoder(given, encoder_hidden_states=encoded).last_hidden_state)
    scale = 16**-0.5 if hf.config.scale_decoder_outputs else 1
    assert torch.allclose(model.unembed(y * scale), logits, atol=1e-4)
    with pytest.raises(TypeError, match="read one tensor"):
        model.decoder[0].cross_attn(y, encoded, 2 * encoded)
    with pytest.raises(TypeError, match="read one tensor"):
        model.decoder[0].cross_attn(y)
    with pytest.raises(TypeError, match="read one tensor"):
        model.encoder[0].attn(x, x, 2 * x)
    with pytest.raises(AttributeError, match="Did you mean encoder"):
        model.encodr  # noqa: B018
