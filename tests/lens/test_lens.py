"""Lenses against plain Hugging Face modules, and tuned ones against what the package `tuned-lens`
computes.
"""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge
from bridge.lens import TunedLens, lens, unembedding_hash
from tests.analysis.models import bridge_of
from tests.conftest import tiny, torch_hooks
from tests.taps.test_touching import peak_bytes
from tests.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def hidden(bridge, tokens, **options):
    """The streams before each layer and the end (before the final norm), by Hugging Face."""
    model = bridge.original_model
    seen = []
    blocks = model.get_submodule(bridge.block_paths[0].rsplit(".", 1)[0])
    handle = blocks[-1].register_forward_hook(
        lambda module, args, out: seen.append(out if isinstance(out, torch.Tensor) else out[0])
    )
    output = model(tokens, output_hidden_states=True, **options)
    handle.remove()
    return torch.stack([*output.hidden_states[:-1], seen[0]]), output.logits


def final_norm(bridge):
    path = {
        "gpt2": "transformer.ln_f",
        "llama": "model.norm",
        "gpt_neox": "gpt_neox.final_layer_norm",
    }
    return bridge.original_model.get_submodule(path[bridge.original_model.config.model_type])


def test_normed_and_raw(bridge, tokens):
    streams, logits = hidden(bridge, tokens)
    unembed = bridge.original_model.get_output_embeddings()
    normed, raw = lens(bridge, tokens), lens(bridge, tokens, kind="raw")
    torch.testing.assert_close(
        normed.stack(), unembed(final_norm(bridge)(streams)), atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(raw.stack(), unembed(streams), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(normed.logits(-1), logits)
    assert normed.labels == ["0_pre", "1_pre", "2_pre", "final_post"]
    assert (normed.stack() - raw.stack()).abs().max() > 0.1


def test_what_a_reading_says(bridge, tokens):
    reading = lens(bridge, tokens, pos_slice=slice(2, 5))
    whole = reading.stack().double().softmax(-1)
    assert whole.shape == (4, 2, 3, 61)
    top = reading.top(3)
    values, indices = whole.topk(3, -1)
    assert torch.equal(top.tokens, indices)
    torch.testing.assert_close(top.probabilities, values)
    torch.testing.assert_close(reading.probabilities(7), whole[..., 7])
    assert torch.equal(reading.ranks(7), (whole > whole[..., 7:8]).sum(-1))
    kl = (whole[-1:] * (whole[-1:].log() - whole.log())).sum(-1)
    torch.testing.assert_close(reading.divergence().double(), kl, atol=1e-5, rtol=1e-4)


def test_inputs(embedded):
    text = "The capital of France is"
    right = lens(embedded, text).stack()
    tokens = embedded.to_tokens(text)
    for given in (tokens, tokens[0], tokens[0].tolist(), [text]):
        torch.testing.assert_close(lens(embedded, given).stack(), right)
    raw = embedded.lens(text, "raw", -1, [1, 4])
    assert torch.equal(raw.stack(), lens(embedded, text, "raw", -1, [1, 4]).stack())
    torch.testing.assert_close(lens(embedded, text, pos_slice=-1).stack(), right[:, :, -1:])
    torch.testing.assert_close(
        lens(embedded, text, pos_slice=[1, 3], layers=[2, -1]).stack(), right[[2, 4]][:, :, [1, 3]]
    )
    several = ["Later, Tom went home. The capital of France is", text]
    reading = lens(embedded, several, pos_slice=-1)
    for row, one in enumerate(several):
        alone = lens(embedded, one, pos_slice=-1).stack()[:, 0]
        torch.testing.assert_close(reading.stack()[:, row], alone, atol=1e-4, rtol=1e-4)
    assert reading.mask.tolist() == [[1], [1]]
    assert lens(embedded, several).mask.sum(-1).tolist() == [
        embedded.to_tokens(one).shape[1] for one in several
    ]


@pytest.mark.parametrize("positions", [(1, 4), (None, 3), slice(2, None), [0, 3], 2, -1])
def test_the_mask_of_some_positions(embedded, positions):
    several = ["Later, Tom went home. The capital of France is", "The capital of France is"]
    mask = lens(embedded, several).mask
    reading = lens(embedded, several, pos_slice=positions)
    at = (
        slice(*positions)
        if isinstance(positions, tuple)
        else [positions]
        if isinstance(positions, int)
        else positions
    )
    assert torch.equal(reading.mask, mask[:, at])
    assert reading.logits(0).shape[:2] == reading.mask.shape


@torch.enable_grad()
def test_padding_is_no_part_of_fitting(embedded):
    """Adam's first step is the gradient's sign: against that of each text by itself, over all their
    tokens.
    """
    texts = ["Later, Tom went home. The capital of France is", "The capital of"]
    tuned = TunedLens.fit(embedded, [texts], learning_rate=1e-3, verbose=False)
    n, rows = embedded.cfg.n_layers, [embedded.to_tokens(text) for text in texts]
    count = sum(row.numel() for row in rows)
    by_hand = TunedLens(n, embedded.cfg.d_model)
    for row in rows:
        with torch.no_grad():
            logits, cache = embedded.run_with_cache(row)
        right = logits.log_softmax(-1)
        for layer in range(n):
            found = embedded(
                by_hand(cache["resid_pre", layer], layer), start_at_layer=n
            ).log_softmax(-1)
            ((right.exp() * (right - found)).sum() / count).backward(
                inputs=list(by_hand.translators[layer].parameters())
            )
    for ours, plain in zip(tuned.translators, by_hand.translators, strict=True):
        for one, other in ((ours.weight, plain.weight), (ours.bias, plain.bias)):
            clear = other.grad.abs() > 1e-6
            assert clear.any()
            torch.testing.assert_close(
                one[clear], -1e-3 * other.grad[clear].sign(), atol=1e-4, rtol=0
            )


def test_top_of_one_position_holds_no_stack(bridge, tokens, monkeypatch):
    largest = []
    forward = TransformerBridge.forward
    monkeypatch.setattr(
        TransformerBridge,
        "forward",
        lambda self, *args, **more: largest.append(out := forward(self, *args, **more)) or out,
    )
    lens(bridge, tokens, pos_slice=-1).top(5)
    made = [out.shape for out in largest if isinstance(out, torch.Tensor)]
    assert made == [torch.Size([2, 1, 61])] * 4


def test_long_prompts_are_decoded_in_parts(bridge, tokens, monkeypatch):
    right = lens(bridge, tokens).top(4)
    # Of the size that is decoded in parts, logits take gigabytes.
    monkeypatch.setattr("bridge.lens.reading.MOST_LOGITS", 2 * 61 * 2)
    found = lens(bridge, tokens)
    assert torch.equal(found.top(4).tokens, right.tokens)
    torch.testing.assert_close(found.divergence(), lens(bridge, tokens).divergence())


@pytest.mark.unchecked
def test_a_bound_on_memory():
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=20_000,
    )
    bridge = TransformerBridge(LlamaForCausalLM(config).eval())
    tokens, bound = (
        torch.randint(3, 20_000, (2, 96)),
        2**23,
    )  # the logits of a layer take 15 MB, in float64 30
    free, bounded = lens(bridge, tokens), lens(bridge, tokens, max_bytes=bound)
    asked = [
        lambda x: x.top(5).tokens,
        lambda x: x.probabilities(7),
        lambda x: x.ranks(7),
        lambda x: x.divergence(),
    ]
    for ask in asked:
        torch.testing.assert_close(ask(bounded), ask(free))
        assert peak_bytes(lambda ask=ask: ask(bounded)) < 1.1 * bound
        assert peak_bytes(lambda ask=ask: ask(free)) > 4 * bound
    with pytest.raises(ValueError, match="max_bytes"):
        lens(bridge, tokens, max_bytes=0)


@pytest.mark.unchecked
def test_streams_are_not_held_twice():
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=12,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=61,
    )
    bridge, tokens = (
        TransformerBridge(LlamaForCausalLM(config).eval()),
        torch.randint(3, 61, (2, 256)),
    )
    size = lens(bridge, tokens).streams.nbytes
    assert peak_bytes(lambda: lens(bridge, tokens)) < 2.2 * size + peak_bytes(
        lambda: bridge(tokens)
    )


@pytest.mark.parametrize("case", ["gemma2", "bloom", "opt", "native-no_norm"])
def test_other_families_end_in_the_models_logits(case):
    bridge = bridge_of(case)
    tokens = torch.randint(3, 61, (2, 6))
    torch.testing.assert_close(
        lens(bridge, tokens).logits(-1), bridge(tokens), atol=1e-5, rtol=1e-4
    )


def test_refusals(bridge, tokens, embedded):
    with pytest.raises(ValueError, match="kind is 'tuned'"):
        lens(bridge, tokens, kind="tuned")
    with pytest.raises(ValueError, match="must be different ones from 0 to 3"):
        lens(bridge, tokens, layers=[0, 7])
    with pytest.raises(ValueError, match=r"k is 0; it must be from 1 to 61"):
        lens(bridge, tokens).top(0)
    with pytest.raises(ValueError, match="token is 99"):
        lens(bridge, tokens).ranks(99)
    with pytest.raises(ValueError, match="layer 1 was not read"):
        lens(bridge, tokens, layers=[0, 3]).logits(1)
    with pytest.raises(ValueError, match=r"4 layers of width 128; .* has 3 of width 32"):
        lens(bridge, tokens, kind=TunedLens(4, 128))
    with pytest.raises(ValueError, match="for texts it is computed"):
        lens(embedded, "Mary and", attention_mask=torch.ones(1, 3, dtype=torch.long))
    headless = TransformerBridge(
        GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=61)).eval()
    )
    with pytest.raises(ValueError, match="has no unembedding"):
        lens(headless, tokens)
    assert torch_hooks(bridge.original_model) == 0


def published(folder, bridge, hash_=None, **changes):
    """A folder as the package `tuned-lens` writes it: its file names, keys and fields."""
    n, d = bridge.cfg.n_layers, bridge.cfg.d_model
    torch.manual_seed(0)
    state = {}
    for layer in range(n):
        state[f"{layer}.weight"], state[f"{layer}.bias"] = torch.randn(d, d) * 0.1, torch.randn(d)
    config = {
        "base_model_name_or_path": "some/model",
        "d_model": d,
        "num_hidden_layers": n,
        "bias": True,
        "base_model_revision": None,
        "unembed_hash": hash_,
        "lens_type": "linear_tuned_lens",
    }
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "params.pt")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return state


def test_published_weights(bridge, tokens, tmp_path):
    state = published(tmp_path / "lens", bridge)
    tuned = TunedLens.load(tmp_path / "lens", bridge)
    streams, logits = hidden(bridge, tokens)
    unembed, norm = bridge.original_model.get_output_embeddings(), final_norm(bridge)
    found = lens(bridge, tokens, kind=tuned).stack()
    for layer in range(3):
        moved = (
            streams[layer] + streams[layer] @ state[f"{layer}.weight"].T + state[f"{layer}.bias"]
        )
        torch.testing.assert_close(found[layer], unembed(norm(moved)), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[3], logits)
    tuned.save(tmp_path / "again")
    again = torch.load(tmp_path / "again" / "params.pt", weights_only=True)
    assert set(again) == set(state) and all(torch.equal(again[name], state[name]) for name in state)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads(
        (tmp_path / "lens" / "config.json").read_text()
    )


def test_a_lens_for_another_model_is_refused(bridge, tmp_path):
    published(tmp_path / "lens", bridge, hash_="0" * 64)
    with pytest.raises(ValueError, match="trained with another unembedding"):
        TunedLens.load(tmp_path / "lens", bridge)
    assert (
        TunedLens.load(tmp_path / "lens", bridge, check_unembedding=False).config["unembed_hash"]
        == "0" * 64
    )
    published(tmp_path / "lens", bridge, hash_=unembedding_hash(bridge))
    TunedLens.load(tmp_path / "lens", bridge)
    published(tmp_path / "lens", bridge, lens_type="spline")
    with pytest.raises(ValueError, match="of type 'spline'"):
        TunedLens.load(tmp_path / "lens")


def test_fitting_brings_the_layers_near_the_end(embedded, capsys):
    texts = [
        "The capital of France is Paris.",
        "When Mary and John went to the store, John gave a drink to Mary.",
    ]
    before = {name: value.clone() for name, value in embedded.state_dict().items()}
    tuned = TunedLens.fit(embedded, texts, epochs=15)
    assert "30/30" in capsys.readouterr().err
    assert all(torch.equal(value, before[name]) for name, value in embedded.state_dict().items())
    assert all(parameter.grad is None for parameter in embedded.parameters())
    for text in texts:
        plain, better = (
            lens(embedded, text).divergence(),
            lens(embedded, text, kind=tuned).divergence(),
        )
        assert (better[:-1].mean((1, 2)) < 0.8 * plain[:-1].mean((1, 2))).all()
        assert better[-1].abs().max() < 1e-6
    assert tuned.config["unembed_hash"] == unembedding_hash(embedded)
    with pytest.raises(ValueError, match="0 batches"):
        TunedLens.fit(embedded, [])
    with pytest.raises(ValueError, match="training mode"):
        TunedLens.fit(TransformerBridge(tiny("gpt2").train()), texts)


def test_streams_of_two_types_are_kept_as_they_are():
    """Mamba's stream begins in the model's type and goes on in float32."""
    bridge = TransformerBridge(tiny_model("mamba").to(torch.bfloat16))
    tokens = torch.randint(3, 60, (2, 10), generator=torch.Generator().manual_seed(0))
    _, cache = bridge.run_with_cache(tokens)
    streams = bridge.lens(tokens, kind="raw").streams
    right = cache["blocks.1.hook_resid_post"]
    assert right.dtype == streams.dtype == torch.float32
    assert torch.equal(streams[-1], right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tuned_lens_of_a_model_in_half_precision(dtype):
    """The lens stays in float32, and reads what its matrices say; it is fitted there, too."""
    bridge = TransformerBridge(tiny_model("llama").to(dtype))
    tokens = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    lens = TunedLens.fit(bridge, [tokens], epochs=3, verbose=False)
    _, cache = bridge.run_with_cache(tokens)
    stream = cache["resid_pre", 1]
    translator = lens.translators[1]
    assert translator.weight.dtype == torch.float32 and translator.weight.abs().max() > 0
    wide = stream.float()
    right = (wide + wide @ translator.weight.T + translator.bias).to(dtype)
    assert torch.equal(lens(stream, 1), right)
    plain = bridge.lens(tokens).divergence()[0].mean()
    assert bridge.lens(tokens, lens).divergence()[0].mean() < plain
