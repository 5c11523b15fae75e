"""Gemma 3 with images: its text model; contexts as HookedTransformer caps them; what
`from_pretrained` takes.
"""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging

from bridge import TransformerBridge
from bridge.embedded import MODEL_DIR
from bridge.legacy import HookedTransformer
from tests.reference import DATA

IDS = torch.tensor([[1, 2, 3, 4, 5, 6]])


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    text = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 64,
        "sliding_window": 4,
        "max_position_embeddings": 20000,
    }
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path_factory.mktemp("gemma")
    model.save_pretrained(folder)
    return folder, model(input_ids=IDS).logits


def test_the_text_model_of_gemma_3(gemma):
    folder, right = gemma
    bridge = TransformerBridge.boot_transformers(str(folder))
    assert torch.equal(bridge(IDS), right)
    assert bridge.cfg.original_architecture == "Gemma3ForCausalLM"
    assert bridge.cfg.n_ctx == 20000
    assert bridge.generate(
        IDS, max_new_tokens=2, do_sample=False, return_type="tokens", verbose=False
    ).shape == (1, 8)
    _, cache = bridge.run_with_cache(IDS)
    assert "blocks.1.attn.hook_pattern" in cache
    plain = HookedTransformer.from_pretrained_no_processing(str(folder), device="cpu")
    assert torch.allclose(plain(IDS), right, atol=1e-5)
    assert plain.cfg.n_ctx == 8192, "as HookedTransformer has it"
    assert (
        HookedTransformer.from_pretrained_no_processing(
            str(folder), device="cpu", n_ctx=9000
        ).cfg.n_ctx
        == 9000
    )
    given = Gemma3ForConditionalGeneration.from_pretrained(folder).eval()
    for model in (given,):
        folded = HookedTransformer.from_pretrained(str(folder), hf_model=model, device="cpu")
        assert torch.allclose(folded(IDS).log_softmax(-1), right.log_softmax(-1), atol=1e-4)
    assert torch.equal(given(input_ids=IDS).logits, right), "the user's model stays as it was"


def test_contexts_are_capped_as_in_hooked_transformer(tmp_path):
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            vocab_size=9,
            max_position_embeddings=131072,
        )
    )
    for name, n_ctx in (("Llama-3.2-1B", 2048), ("Llama-2-7b-hf", 131072)):
        model.save_pretrained(tmp_path / name)
        loaded = HookedTransformer.from_pretrained_no_processing(str(tmp_path / name), device="cpu")
        assert loaded.cfg.n_ctx == n_ctx
        assert loaded.core.config.max_position_embeddings == 131072
        assert TransformerBridge.boot_transformers(str(tmp_path / name)).cfg.n_ctx == 131072


def test_what_from_pretrained_takes():
    bridge = TransformerBridge.boot_transformers(
        model_name=str(DATA / "llama"), use_safetensors=True
    )
    assert bridge.cfg.n_layers == 2
    with pytest.raises(TypeError, match="use_safetensor"):
        TransformerBridge.boot_transformers(str(DATA / "llama"), use_safetensor=True)
    with pytest.raises(ValueError, match="use_safetensors would change how the model is loaded"):
        TransformerBridge.boot_transformers(
            "x", hf_model=bridge.original_model, use_safetensors=True
        )


@pytest.mark.parametrize("wanted", [True, False])
def test_bars_only_where_they_are_asked_for(wanted, capfd):
    before = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        TransformerBridge.boot_transformers(str(MODEL_DIR), progress=wanted)
        assert logging.is_progress_bar_enabled()
    finally:
        if not before:
            logging.disable_progress_bar()
    assert ("Loading weights" in capfd.readouterr().err) is wanted


def test_a_gguf_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(16)
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
        "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
        "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
        "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
        "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
    }
    for name, path in names.items():
        writer.add_tensor(f"{name}.weight", model.get_submodule(path).weight.detach().numpy())
    for letter in "qk":  # llama.cpp keeps halves of a rotation side by side
        weight = model.get_submodule(f"model.layers.0.self_attn.{letter}_proj").weight.detach()
        turned = weight.unflatten(0, (2, 2, 8)).transpose(1, 2).flatten(0, 2).contiguous()
        writer.add_tensor(f"blk.0.attn_{letter}.weight", turned.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    own = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert torch.allclose(own(input_ids=IDS).logits, model(input_ids=IDS).logits, atol=1e-4)
    tokenizer = TransformerBridge.boot_embedded().tokenizer
    bridge = TransformerBridge.boot_transformers(
        str(tmp_path), gguf_file="tiny.gguf", tokenizer=tokenizer
    )
    right = bridge(IDS).log_softmax(-1)
    assert torch.equal(bridge(IDS), own(input_ids=IDS).logits)
    bridge.process_weights(fold_ln=True)
    assert torch.allclose(bridge(IDS).log_softmax(-1), right, atol=1e-4)
    loaded = HookedTransformer.from_pretrained(
        str(tmp_path), gguf_file="tiny.gguf", tokenizer=tokenizer, device="cpu"
    )
    assert torch.allclose(loaded(IDS).log_softmax(-1), right, atol=1e-4)


def test_arguments_of_transformer_lens_3(capsys):
    bridge = TransformerBridge.boot_embedded()
    text = "When Mary and John went to the store, John gave a drink to"
    kw = {"max_new_tokens": 5, "do_sample": False, "stop_at_eos": False}
    whole = bridge.generate(text, verbose=False, **kw)
    pieces = list(bridge.generate_stream(text, verbose=False, max_tokens_per_yield=2, **kw))
    assert "".join(pieces) == whole
    assert pieces[0] == text
    single = list(bridge.generate_stream(text, verbose=False, **kw))
    assert pieces[1:] == ["".join(single[i : i + 2]) for i in range(1, len(single), 2)]
    assert len(pieces) < len(single)
    tokens = bridge.to_tokens(text)
    parts = list(
        bridge.generate_stream(
            tokens, verbose=False, max_tokens_per_yield=3, return_type="tokens", **kw
        )
    )
    assert [part.shape[1] for part in parts] == [tokens.shape[1], 3, 2]
    with pytest.raises(ValueError, match="max_tokens_per_yield is 0"):
        bridge.generate_stream(text, max_tokens_per_yield=0)
    assert bridge.hf_generate(text, return_type="input", use_past_kv_cache=False, **kw) == whole
    assert bridge.hf_generate(text, return_type="tokens", **kw).shape == (1, tokens.shape[1] + 5)
    with pytest.raises(ValueError, match="return_type is 'texts'"):
        bridge.hf_generate(text, return_type="texts")
    bridge.set_use_attn_result(use_attn_result=True)
    bridge.set_use_split_qkv_input(use_split_qkv_input=False)
    bridge.set_use_attn_in(use_attn_in=False)
    bridge.set_use_hook_mlp_in(use_hook_mlp_in=False)
    assert bridge.to_single_str_token(int_token=int(tokens[0, 1])) == "When"
    (handle,) = bridge.add_hook("hook_embed", hook_fn=lambda x, hook: x * 0)
    handle.remove()
    with pytest.raises(TypeError, match="one function"):
        bridge.add_hook("hook_embed")
    assert bridge.get_hook_point("blocks.0.hook_in") is bridge.blocks[0].hook_resid_pre
    assert bridge.n_params_total == sum(p.numel() for p in bridge.original_model.parameters())
    layers, weights = bridge.stack_params_for("mlp", "mlp.W_in", reshape_fn=lambda w: w.T)
    assert layers == [0, 1, 2, 3]
    assert torch.equal(weights, bridge.W_in.mT)
    with pytest.raises(ValueError, match="'ssm'"):
        bridge.stack_params_for("ssm", "ssm.A")
    logits = bridge(tokens)
    assert torch.equal(bridge.loss_fn(logits, tokens), bridge(tokens, return_type="loss"))
    assert bridge.tokenizer_facts.adds_bos == bridge.cfg.tokenizer_prepends_bos
    assert bridge.cfg.tokenizer_appends_eos is False
    bridge.process_weights(verbose=True)
    assert "fold_ln: done" in capsys.readouterr().out
    fields = {
        "n_layers": 1,
        "d_model": 8,
        "n_heads": 2,
        "d_vocab": 10,
        "n_ctx": 5,
        "attn_only": True,
    }
    native = TransformerBridge.boot_native(
        fields, device="cpu", dtype=torch.float64, model_name="mine"
    )
    assert (native.cfg.dtype, native.cfg.model_name) == (torch.float64, "mine")
