"""Loading: everything that a folder can show without a network."""

import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from bridge import TransformerBridge
from bridge.embedded import MODEL_DIR
from bridge.loading.loading import checkpoint_revision, checkpoint_steps
from tests.conftest import tiny


@pytest.fixture
def folder(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_folder_needs_no_network_and_gets_hugging_faces_defaults(folder, tokens):
    bridge = TransformerBridge.boot_transformers(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(bridge(tokens), plain(tokens).logits)
    assert (
        bridge.original_model.config._attn_implementation
        == plain.config._attn_implementation
        == "sdpa"
    )
    assert bridge.cfg.dtype == plain.dtype
    assert bridge.tokenizer is None
    assert bridge.cfg.model_name == folder


def test_options(folder, tokens):
    bridge = TransformerBridge.boot_transformers(
        folder, dtype=torch.bfloat16, attn_implementation="eager", device="cpu"
    )
    assert bridge.cfg.dtype == torch.bfloat16
    assert bridge.original_model.config._attn_implementation == "eager"
    bridge = TransformerBridge.boot_transformers(
        folder, hf_config_overrides={"activation_function": "relu"}
    )
    assert bridge.cfg.act_fn == "relu"
    with pytest.raises(ValueError, match="GPT2Config has no field 'activation_functoin'"):
        TransformerBridge.boot_transformers(
            folder, hf_config_overrides={"activation_functoin": "relu"}
        )
    assert (
        type(
            TransformerBridge.boot_transformers(
                str(MODEL_DIR), model_class=LlamaForCausalLM
            ).original_model
        )
        is LlamaForCausalLM
    )
    with pytest.raises(ValueError, match="n_ctx=100 is more than the 40 positions"):
        TransformerBridge.boot_transformers(folder, n_ctx=100)
    assert TransformerBridge.boot_transformers(str(MODEL_DIR), n_ctx=500).cfg.n_ctx == 500
    short = TransformerBridge.boot_transformers(folder, n_ctx=20)
    assert short.cfg.n_ctx == 20
    with pytest.raises(ValueError, match="has a context of 20"):
        short(torch.zeros(1, 21, dtype=torch.long))
    assert torch.equal(short(tokens), bridge.boot_transformers(folder)(tokens))


def test_a_given_model_and_tokenizer_are_used_as_they_are(folder):
    hf = tiny("llama")
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL_DIR))
    bridge = TransformerBridge.boot_transformers(folder, hf_model=hf, tokenizer=tokenizer)
    assert bridge.original_model is hf
    assert bridge.tokenizer is tokenizer
    with pytest.raises(ValueError, match="dtype would change how the model is loaded"):
        TransformerBridge.boot_transformers(folder, hf_model=hf, dtype=torch.float16)


def test_without_weights(folder):
    bridge = TransformerBridge.boot_transformers(folder, load_weights=False)
    assert bridge.cfg.device.type == "meta"
    assert all(p.is_meta for p in bridge.parameters())
    full = TransformerBridge.boot_transformers(folder)
    assert list(bridge.hook_dict) == list(full.hook_dict)
    assert bridge.cfg.n_layers == 3
    _, cache = bridge.run_with_cache(torch.zeros(2, 5, dtype=torch.long))
    assert cache["q", 0].shape == (2, 5, 4, 8)
    from adapters import verify

    with pytest.raises(ValueError, match="has no weights"):
        verify(bridge)


def test_what_nobody_knows_or_nothing_uses_is_refused(folder):
    with pytest.raises(
        TypeError,
        match=(
            r"^'cache_dirr' is an argument of neither the bridge nor .*\. Did you mean cache_dir\?$"
        ),
    ):
        TransformerBridge.boot_transformers(folder, cache_dirr="here")
    with pytest.raises(TypeError, match=r"^'from_pretrained' is an argument of neither") as raised:
        TransformerBridge.boot_transformers(folder, from_pretrained={"cache_dir": "here"})
    assert "Did you mean" not in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(
        raised.value
    )  # from a worker of a harvest
    for given in ({"device_map": "cpu"}, {"quantization_config": {}}, {"weights_only": True}):
        with pytest.raises(
            ValueError,
            match=f"{next(iter(given))} would say how weights are loaded, but load_weights",
        ):
            TransformerBridge.boot_transformers(folder, load_weights=False, **given)


def test_device_map(folder, tokens):
    bridge = TransformerBridge.boot_transformers(folder, device_map="cpu")
    assert torch.equal(bridge(tokens), TransformerBridge.boot_transformers(folder)(tokens))
    with pytest.raises(ValueError, match="device puts the whole model in one place"):
        TransformerBridge.boot_transformers(folder, device="cpu", device_map="auto")
    with pytest.raises(ValueError, match="n_devices=99, but this machine has"):
        TransformerBridge.boot_transformers(folder, n_devices=99)


def test_a_tokenizer_is_never_changed(embedded):
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL_DIR))
    before = (
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.padding_side,
        dict(tokenizer.special_tokens_map),
    )
    bridge = TransformerBridge(embedded.original_model, tokenizer)
    bridge.run_with_cache(["Mary and", "John"], padding_side="left")
    bridge.to_tokens("Mary", prepend_bos=False)
    assert (
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.padding_side,
        dict(tokenizer.special_tokens_map),
    ) == before
    assert bridge.tokenizer is tokenizer


def test_checkpoints():
    assert len(checkpoint_steps("EleutherAI/pythia-160m-deduped")) == 154
    assert len(checkpoint_steps("stanford-crfm/alias-gpt2-small-x21")) == 609
    assert checkpoint_revision("EleutherAI/pythia-70m", None, None) == (None, {})
    revision, facts = checkpoint_revision("EleutherAI/pythia-70m", -1, None)
    assert (revision, facts["checkpoint_index"], facts["checkpoint_value"]) == (
        "step143000",
        153,
        143000,
    )
    assert checkpoint_revision("EleutherAI/pythia-70m", None, 512)[0] == "step512"
    assert (
        checkpoint_revision("stanford-crfm/battlestar-gpt2-small-x49", 0, None)[0] == "checkpoint-0"
    )
    with pytest.raises(
        ValueError, match=r"no checkpoint at step 1500; the nearest are \[512, 1000, 2000\]"
    ):
        checkpoint_revision("EleutherAI/pythia-70m", None, 1500)
    with pytest.raises(
        ValueError, match="has 154 checkpoints; checkpoint_index=154 is out of range"
    ):
        checkpoint_revision("EleutherAI/pythia-70m", 154, None)
    with pytest.raises(ValueError, match="exclude each other"):
        checkpoint_revision("EleutherAI/pythia-70m", 1, 1)
    with pytest.raises(ValueError, match="no checkpoints are known for 'gpt2'"):
        TransformerBridge.boot_transformers("gpt2", checkpoint_index=3)


@pytest.mark.parametrize("name", ["EleutherAI/pythia-70m", "Pythia-70M", "EleutherAI/pythia-19m"])
def test_checkpoint_is_what_is_asked_of_the_hub(name, monkeypatch, folder):
    import transformers

    asked = []
    own = transformers.AutoConfig.from_pretrained

    def from_pretrained(name, **kwargs):
        asked.append((name, kwargs.get("revision")))
        return own(folder)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    monkeypatch.setattr(
        transformers.GPT2LMHeadModel,
        "from_pretrained",
        classmethod(lambda cls, name, **k: asked.append((name, k.get("revision"))) or tiny("gpt2")),
    )
    monkeypatch.setattr(
        transformers.AutoTokenizer,
        "from_pretrained",
        lambda name, **k: asked.append((name, k.get("revision"))),
    )
    bridge = TransformerBridge.boot_transformers(name, checkpoint_value=64)
    assert bridge.cfg.model_name == "EleutherAI/pythia-70m"
    assert asked == [("EleutherAI/pythia-70m", "step64")] * 3
    assert (
        bridge.cfg.from_checkpoint,
        bridge.cfg.checkpoint_value,
        bridge.cfg.checkpoint_index,
    ) == (True, 64, 7)


def test_facts_are_the_models(embedded):
    cfg = embedded.cfg
    hf = embedded.original_model.config
    assert (cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_mlp) == (
        hf.num_hidden_layers,
        hf.num_attention_heads,
        hf.hidden_size,
        hf.intermediate_size,
    )
    assert (cfg.normalization_type, cfg.eps, cfg.act_fn) == ("RMS", hf.rms_norm_eps, "silu")
    assert (cfg.positional_embedding_type, cfg.rotary_dim) == ("rotary", cfg.d_head)
    assert cfg.n_params == sum(p.numel() for p in embedded.original_model.parameters())
    gpt2 = TransformerBridge(tiny("gpt2")).cfg
    assert (gpt2.normalization_type, gpt2.positional_embedding_type, gpt2.act_fn) == (
        "LN",
        "standard",
        "gelu_new",
    )
    assert (gpt2.d_mlp, gpt2.n_ctx, gpt2.d_vocab, gpt2.d_vocab_out, gpt2.n_key_value_heads) == (
        128,
        40,
        61,
        61,
        None,
    )
    neox = TransformerBridge(tiny("gpt_neox")).cfg
    assert (neox.parallel_attn_mlp, neox.rotary_dim, neox.d_head) == (True, 2, 8)
    llama = TransformerBridge(tiny("llama")).cfg
    assert (llama.n_key_value_heads, llama.gated_mlp, llama.original_architecture) == (
        2,
        True,
        "LlamaForCausalLM",
    )
    assert llama.to_dict()["n_params"] == llama.n_params


def test_a_folder_goes_before_a_short_name(monkeypatch, tmp_path, tokens):
    model = tiny("gpt2")
    model.save_pretrained(tmp_path / "gpt2-small")
    monkeypatch.chdir(tmp_path)
    assert torch.equal(
        TransformerBridge.boot_transformers("gpt2-small")(tokens), model(tokens).logits
    )


def test_a_folder_may_have_any_name(monkeypatch, tmp_path, tokens):
    model = tiny("gpt2")
    model.save_pretrained(tmp_path / "NeelNanda" / "mine")
    monkeypatch.chdir(tmp_path)
    assert torch.equal(
        TransformerBridge.boot_transformers("NeelNanda/mine")(tokens), model(tokens).logits
    )


def test_a_model_in_hookedtransformers_own_format_says_what_loads_it():
    with pytest.raises(
        ValueError, match=r"SoLU_1L512W_C4_Code is stored in HookedTransformer's own.*bridge.legacy"
    ):
        TransformerBridge.boot_transformers("solu-1l")


def test_a_gguf_file_brings_its_tokenizer(monkeypatch, tmp_path):
    from bridge.loading import loading as boot

    asked = []
    monkeypatch.setattr(
        boot.AutoTokenizer,
        "from_pretrained",
        lambda *args, **options: asked.append((args, options)),
    )
    where = {"gguf_file": "small.gguf"}
    boot.tokenizer_of(boot.ModelFiles(str(tmp_path), where, {}), progress=True)
    assert asked == [((str(tmp_path),), where)]
    here = boot.ModelFiles(str(tmp_path), {}, {})
    assert boot.tokenizer_of(here, progress=True) is None and len(asked) == 1
