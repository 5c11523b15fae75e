"""`HookedTransformer.from_pretrained` against HookedTransformer's own numbers, and its
arguments.
"""

import copy
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertForMaskedLM

from bridge.legacy import HookedEncoder, HookedEncoderDecoder, HookedTransformer
from bridge.legacy.loading_from_pretrained import (
    get_pretrained_model_config,
    get_pretrained_state_dict,
)
from tests.reference import DATA, FAMILIES, agree, entries, reference, wrong_logits, wrong_values


@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "bert"])
def test_values_and_weights_are_hooked_transformers(family, mode):
    load = (
        HookedTransformer.from_pretrained
        if mode == "processed"
        else HookedTransformer.from_pretrained_no_processing
    )
    model = load(str(DATA / family), device="cpu")
    assert not wrong_logits(model, family, mode)
    assert wrong_values(model, family, mode) == []
    ours, right = model.tl_parameters(), entries(family, "param", mode)
    wrong = [
        name
        for name, value in right.items()
        if name in ours and not agree(ours[name].detach(), value)
    ]
    assert wrong == []
    tokens = reference(family)["tokens"]
    loss = model(tokens, return_type="loss", loss_per_token=True)
    assert torch.allclose(loss, reference(family)[f"{mode}/loss_per_token"], atol=1e-3)


def test_bert_is_an_encoder():
    folder = str(DATA / "bert")
    model = HookedEncoder.from_pretrained(folder, device="cpu")
    assert not wrong_values(model, "bert", "raw")
    tokens = reference("bert")["tokens"]
    ids = torch.zeros_like(tokens)
    plain = BertForMaskedLM.from_pretrained(folder)(tokens, token_type_ids=ids).logits
    assert torch.equal(model(tokens, token_type_ids=ids), plain)
    logits, cache = model.run_with_cache(tokens, "logits", ids, names_filter="blocks.0.attn.hook_z")
    assert torch.equal(logits, plain)
    assert list(cache) == ["blocks.0.attn.hook_z"]
    model.tokenizer.mask_token = "<unk>"
    texts = [model.to_string(row) for row in ([7, 8, 3, 9], [11, 3])]
    mask = model.tokenizer.mask_token_id
    texts = [text.replace(model.to_string(3), "<unk>") for text in texts]
    rows = [model.to_tokens(text)[0] for text in texts]
    assert all((row == mask).sum() == 1 for row in rows)
    words = [model.to_string(model(row)[0].argmax(-1)[row[0] == mask]) for row in rows]
    assert model(texts, "predictions") == [
        f"Prediction {i}: {word}" for i, word in enumerate(words)
    ]
    assert model(texts[1], "predictions") == words[1]


def test_an_encoder_decoder_is_not_a_hooked_transformer(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9, decoder_start_token_id=0
    )
    hf = T5ForConditionalGeneration(config).eval()
    hf.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="HookedEncoderDecoder"):
        HookedTransformer.from_pretrained(str(tmp_path), device="cpu")
    model = HookedEncoderDecoder.from_pretrained(str(tmp_path), device="cpu")
    tokens, given = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 4]])
    right = hf(input_ids=tokens, decoder_input_ids=given).logits
    assert torch.allclose(model(tokens, given), right, atol=1e-6)
    _, cache = model.run_with_cache(tokens, given)
    assert "decoder.0.cross_attn.hook_pattern" in cache
    assert torch.allclose(model.run_with_hooks(tokens, given, "logits"), right, atol=1e-6)


def test_what_the_architecture_forbids_is_left_out_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        model = HookedTransformer.from_pretrained(str(DATA / "gemma2"), device="cpu")
    said = [
        record.getMessage() for record in caplog.records if record.name.startswith("bridge.legacy")
    ]
    assert any(
        line.startswith("center_unembed left out: its logits go through a soft cap")
        for line in said
    )
    assert any(line.startswith("center_writing_weights left out") for line in said)
    assert model.cfg.processed["fold_ln"] == "done"
    assert model.cfg.normalization_type == "RMSPre"


def test_a_given_model_is_not_changed():
    hf = AutoModelForCausalLM.from_pretrained(DATA / "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(DATA / "gpt2")
    before, tokenizer_before = copy.deepcopy(hf.state_dict()), copy.deepcopy(tokenizer.init_kwargs)
    sides = tokenizer.padding_side, tokenizer.pad_token, tokenizer.bos_token
    model = HookedTransformer.from_pretrained(
        "gpt2-small", hf_model=hf, tokenizer=tokenizer, device="cpu", default_padding_side="left"
    )
    assert model.original_model is not hf
    assert all(torch.equal(value, hf.state_dict()[name]) for name, value in before.items())
    assert (tokenizer.padding_side, tokenizer.pad_token, tokenizer.bos_token) == sides
    assert tokenizer.init_kwargs == tokenizer_before
    assert model.tokenizer.padding_side == "left"
    assert model.cfg.model_name == "gpt2"
    plain = HookedTransformer.from_pretrained_no_processing(
        "gpt2", hf_model=hf, tokenizer=tokenizer, device="cpu"
    )
    assert plain.original_model is hf
    half = HookedTransformer.from_pretrained_no_processing(
        "gpt2", hf_model=hf, tokenizer=tokenizer, device="cpu", dtype="bfloat16"
    )
    assert half.cfg.dtype == torch.bfloat16
    assert hf.dtype == torch.float32


def test_a_given_model_is_loaded_already():
    hf = AutoModelForCausalLM.from_pretrained(DATA / "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(DATA / "gpt2")
    for change in ({"checkpoint_value": 100}, {"checkpoint_index": 1}, {"n_devices": 2}):
        with pytest.raises(
            ValueError, match=f"{next(iter(change))} would change how the model is loaded"
        ):
            HookedTransformer.from_pretrained(
                "gpt2", hf_model=hf, tokenizer=tokenizer, device="cpu", **change
            )
    model = HookedTransformer.from_pretrained_no_processing(
        "gpt2", hf_model=hf, tokenizer=tokenizer, device="cpu", n_ctx=20
    )
    assert model.original_model is hf
    assert model.cfg.n_ctx == 20
    with pytest.raises(
        ValueError, match=r"n_ctx=4000 is more than the \d+ positions that this model has learned"
    ):
        HookedTransformer.from_pretrained(
            "gpt2", hf_model=hf, tokenizer=tokenizer, device="cpu", n_ctx=4000
        )


def test_fewer_layers_and_another_context():
    whole = HookedTransformer.from_pretrained_no_processing(str(DATA / "qwen3"), device="cpu")
    model = HookedTransformer.from_pretrained_no_processing(
        str(DATA / "qwen3"), device="cpu", first_n_layers=1, n_ctx=12
    )
    tokens = reference("qwen3")["tokens"]
    assert (model.cfg.n_layers, len(model.blocks), model.cfg.n_ctx) == (1, 1, 12)
    assert torch.equal(model(tokens, stop_at_layer=1), whole(tokens, stop_at_layer=1))
    assert model.tokenizer is not None
    assert model.generate(tokens[:, :4], max_new_tokens=2, verbose=False).shape == (2, 6)
    with pytest.raises(ValueError, match="first_n_layers is 7"):
        HookedTransformer.from_pretrained(str(DATA / "qwen3"), device="cpu", first_n_layers=7)


def test_defaults_of_bos():
    bloom = HookedTransformer.from_pretrained_no_processing(str(DATA / "bloom"), device="cpu")
    gpt2 = HookedTransformer.from_pretrained_no_processing(
        str(DATA / "gpt2"), device="cpu", default_prepend_bos=False
    )
    assert bloom.cfg.default_prepend_bos is False
    assert gpt2.cfg.default_prepend_bos is False


def test_arguments_of_the_bridge_and_of_hugging_face_are_passed_on():
    """Those that look like another one, too."""
    model = HookedTransformer.from_pretrained(
        str(DATA / "gpt2"), device="cpu", patches={}, weights_only=True
    )
    assert wrong_values(model, "gpt2", "processed") == []


@pytest.mark.unchecked
def test_arguments_that_nobody_knows():
    for wrong, meant in (
        ("trust_remote_cod", "trust_remote_code"),
        ("centre_unembed", "center_unembed"),
    ):
        said = (
            rf"^'{wrong}' is an argument of neither the bridge nor GPT2LMHeadModel. Did you mean"
            rf" {meant}\?$"
        )
        with pytest.raises(TypeError, match=said):
            HookedTransformer.from_pretrained(str(DATA / "gpt2"), **{wrong: True})
    with pytest.raises(
        TypeError,
        match=r"'load_in_8bit' is an argument of neither the bridge nor GPT2LMHeadModel\.",
    ):
        HookedTransformer.from_pretrained(str(DATA / "gpt2"), load_in_8bit=True)
    with pytest.raises(ValueError, match="dtype is 'float8'"):
        HookedTransformer.from_pretrained(str(DATA / "gpt2"), dtype="float8")
    with pytest.raises(TypeError, match=r"from_pretrained\('gpt2'\) loads a model"):
        HookedTransformer("gpt2")


def test_processing_afterwards():
    model = HookedTransformer.from_pretrained_no_processing(str(DATA / "gpt2"), device="cpu")
    model.process_weights_()
    assert wrong_values(model, "gpt2", "processed") == []


def test_a_state_dict_with_hooked_transformers_names():
    model = HookedTransformer.from_pretrained_no_processing(str(DATA / "gpt2"), device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = dict(entries("gpt2", "param", "raw"))
    model.load_and_process_state_dict(state)
    assert wrong_values(model, "gpt2", "processed") == []
    with pytest.raises(ValueError, match=r"has no weight 'blocks\.0\.attn\.W_X'"):
        model.load_and_process_state_dict({"blocks.0.attn.W_X": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="has shape"):
        model.load_and_process_state_dict({"blocks.0.attn.W_Q": torch.zeros(1)})


def test_state_dicts_of_both_kinds(caplog):
    model = HookedTransformer.from_pretrained_no_processing(str(DATA / "gpt2"), device="cpu")
    other = HookedTransformer.from_pretrained_no_processing(str(DATA / "gpt2"), device="cpu")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    own = {name: value.clone() for name, value in other.original_model.state_dict().items()}
    canonical = {name: value.detach().clone() for name, value in other.state_dict().items()}
    assert canonical.keys() == other.tl_parameters().keys()
    assert "transformer.h.0.attn.c_attn.weight" in own
    assert other.load_state_dict(model.tl_parameters()).missing_keys == []
    assert wrong_values(other, "gpt2", "raw") == []
    model.load_state_dict(own)
    assert all(torch.equal(value, canonical[name]) for name, value in model.tl_parameters().items())
    with pytest.raises(RuntimeError, match=r'Missing .*"blocks\.0\.attn\.W_Q"'):
        model.load_state_dict(
            {n: v for n, v in canonical.items() if n != "blocks.0.attn.W_Q"}
            | {"mine": torch.ones(1)}
        )
    filled = model.fill_missing_keys({"embed.W_E": canonical["embed.W_E"]})
    assert set(filled) == set(canonical)
    assert (
        model.load_state_dict({"embed.W_E": canonical["embed.W_E"]}, strict=False).unexpected_keys
        == []
    )
    found = model.load_state_dict(
        {"embed.W_E": canonical["embed.W_E"], "blocks.0.mlp.mine": torch.ones(1)}, False
    )
    assert found.unexpected_keys == ["blocks.0.mlp.mine"]
    assert "blocks.0.mlp.mine" in caplog.text
    with pytest.raises(RuntimeError, match="any of these names, such as 'mine'"):
        model.load_state_dict({"mine": torch.ones(1)}, strict=False)
    with pytest.raises(ValueError, match="assign=True"):
        model.load_state_dict(canonical, assign=True)


def test_configurations_without_weights():
    cfg = get_pretrained_model_config(str(DATA / "phi3"))
    assert (cfg.n_layers, cfg.d_model, cfg.n_heads, cfg.original_architecture) == (
        2,
        32,
        4,
        "Phi3ForCausalLM",
    )
    assert cfg.positional_embedding_type == "rotary"


def test_configurations_as_hooked_transformer_would_make_them():
    cfg = get_pretrained_model_config(
        str(DATA / "bloom"),
        fold_ln=True,
        device="cpu",
        dtype=torch.float64,
        first_n_layers=1,
        local_files_only=True,
    )
    assert (cfg.normalization_type, cfg.n_layers, cfg.dtype, cfg.device) == (
        "LNPre",
        1,
        torch.float64,
        "cpu",
    )
    assert cfg.default_prepend_bos is False
    assert (
        get_pretrained_model_config(
            str(DATA / "bloom"), default_prepend_bos=True
        ).default_prepend_bos
        is True
    )


@pytest.mark.parametrize("fold_ln", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_configuration_and_a_state_dict_make_the_model(family, fold_ln):
    """HookedTransformer's own way: where norms are to be folded, the model is made without their
    weights.
    """
    cfg = get_pretrained_model_config(str(DATA / family), fold_ln=fold_ln, device="cpu")
    model = HookedTransformer(cfg, move_to_device=False)
    state = get_pretrained_state_dict(str(DATA / family))
    given = {name: value.clone() for name, value in state.items()}
    model.load_and_process_state_dict(state)
    assert wrong_values(model, family, "processed") == []
    assert all(torch.equal(value, state[name]) for name, value in given.items())
    if fold_ln:
        assert not [name for name in model.tl_parameters() if ".ln1." in name]
    model.to(cfg.device)
    assert model.cfg.device == torch.device("cpu")


def test_weights_of_another_model_into_a_processed_one():
    model = HookedTransformer.from_pretrained(str(DATA / "gpt2"), device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    model.load_and_process_state_dict(get_pretrained_state_dict(str(DATA / "gpt2")))
    assert wrong_values(model, "gpt2", "processed") == []


def test_embedding_and_unembedding_are_two():
    model = HookedTransformer.from_pretrained_no_processing(str(DATA / "gpt2"), device="cpu")
    assert model.cfg.tie_word_embeddings
    state = {name: value.detach().clone() for name, value in model.tl_parameters().items()}
    model.load_state_dict(state)
    assert model.cfg.tie_word_embeddings, "they are the same still"
    before = model.W_E.clone()
    model.unembed.W_U = 2 * model.W_U
    assert torch.equal(model.W_E, before)
    assert torch.equal(model.W_U, 2 * before.T)
    assert not model.cfg.tie_word_embeddings
    other = HookedTransformer.from_pretrained_no_processing(str(DATA / "gpt2"), device="cpu")
    state["unembed.W_U"] = 3 * state["unembed.W_U"]
    other.load_state_dict(state)
    tokens = reference("gpt2")["tokens"]
    assert torch.allclose(other(tokens), 1.5 * model(tokens), atol=1e-4)
    assert torch.equal(other.W_E, before)


def test_configurations_are_equal_whatever_was_processed():
    load = HookedTransformer.from_pretrained
    none = {"fold_ln": False, "center_writing_weights": False, "center_unembed": False}
    plain = HookedTransformer.from_pretrained_no_processing(str(DATA / "gpt2"), device="cpu")
    assert plain.cfg == load(str(DATA / "gpt2"), device="cpu", **none).cfg
    assert plain.cfg != load(str(DATA / "gpt2"), device="cpu").cfg, "its norms have no weights"


def test_arguments_of_the_hub(tmp_path):
    model = HookedTransformer.from_pretrained(
        str(DATA / "gpt2"),
        device="cpu",
        cache_dir=str(tmp_path),
        local_files_only=True,
        low_cpu_mem_usage=True,
    )
    assert wrong_values(model, "gpt2", "processed") == []
