"""Jacobian lenses against derivatives by hand, and what any lens computes against plain algebra."""

import copy

import pytest
import torch

from bridge import TransformerBridge
from bridge.embedded import prompts
from bridge.interventions import Swap
from bridge.lens import JacobianLens, Lens, TunedLens
from bridge.lens.sparse import Dictionary
from tests.conftest import tiny
from tests.tiny_models import tiny_model


def by_hand(bridge, tokens, layer, skip_first):
    """The derivative of the last stream, one output number and one token at a time."""
    n, length = bridge.cfg.n_layers, tokens.shape[1]
    _, cache = bridge.run_with_cache(tokens)
    start = cache[f"blocks.{layer}.hook_resid_pre"].detach()

    def end(stream):
        hook = [(f"blocks.{layer}.hook_resid_pre", lambda act, hook: stream)]
        return bridge.run_with_hooks(tokens, fwd_hooks=hook, stop_at_layer=n)

    full = torch.autograd.functional.jacobian(end, start)[0, :, :, 0]  # pos d pos d
    kept = full[skip_first : length - 1, :, skip_first : length - 1]
    return kept.sum(0).mean(1)


@pytest.fixture
def texts():
    return [torch.randint(3, 61, (n,)) for n in (9, 7, 12)]


@pytest.mark.parametrize("skip_first", [0, 3])
def test_the_entries_are_mean_derivatives(bridge, texts, skip_first):
    lens = bridge.fit_lens(texts, skip_first=skip_first, verbose=False)
    for layer, matrix in lens.maps.items():
        right = sum(by_hand(bridge, text[None], layer, skip_first) for text in texts) / len(texts)
        torch.testing.assert_close(matrix, right, atol=1e-5, rtol=1e-4)
    assert lens.layers == (1, 2, 3)


@pytest.mark.parametrize("at_once", [5, 64])
def test_all_ways_to_fit_agree(bridge, texts, monkeypatch, at_once):
    right = bridge.fit_lens(texts, skip_first=2, verbose=False).matrices
    monkeypatch.setattr("bridge.lens.jacobian._continues", lambda bridge: False)
    uncut = bridge.fit_lens(texts, skip_first=2, at_once=at_once, verbose=False)
    monkeypatch.setattr("bridge.lens.jacobian._batches", lambda streams: False)
    copies = bridge.fit_lens(texts, skip_first=2, at_once=at_once, verbose=False)
    for other in (uncut, copies):
        torch.testing.assert_close(other.matrices, right, atol=1e-5, rtol=1e-4)


def test_a_fit_leaves_no_trace_and_sees_hooks(bridge, texts):
    before = [(p.requires_grad, p.grad) for p in bridge.original_model.parameters()]
    with torch.no_grad():
        plain = bridge.fit_lens(texts, skip_first=2, verbose=False)
    assert [(p.requires_grad, p.grad) for p in bridge.original_model.parameters()] == before
    assert not any(hook.listeners for hook in bridge.hook_dict.values())

    def first_tokens(act, hook):
        act[:, 2:4] = 0
        return act

    with bridge.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", first_tokens)]):
        edited = bridge.fit_lens(texts, skip_first=2, verbose=False)
        right = sum(by_hand(bridge, text[None], 1, 2) for text in texts) / len(texts)
    torch.testing.assert_close(edited.maps[1], right, atol=1e-5, rtol=1e-4)
    assert (edited.maps[1] - plain.maps[1]).abs().max() > 1e-4


def test_a_reading(bridge, texts):
    lens = bridge.fit_lens(texts, skip_first=2, verbose=False)
    tokens = texts[0][None]
    with torch.no_grad():
        reading = bridge.lens(tokens, lens)
        _, cache = bridge.run_with_cache(tokens)
        for layer in (1, 2):
            stream = cache[f"blocks.{layer}.hook_resid_pre"]
            right = bridge(stream @ lens.maps[layer].T, start_at_layer=3)
            torch.testing.assert_close(reading.logits(layer), right)
            torch.testing.assert_close(lens.decode(stream[0, 4], layer), right[0, 4])
        assert torch.equal(reading.logits(-1), bridge(tokens))
        assert reading.layers == (1, 2, 3)
        padded = bridge.lens(
            torch.cat([torch.zeros(1, 2, dtype=torch.long), tokens], 1),
            lens,
            attention_mask=torch.tensor([[0, 0] + [1] * tokens.shape[1]]),
        )
        torch.testing.assert_close(padded.logits(1)[:, 2:], reading.logits(1), atol=1e-4, rtol=1e-4)
        lens.matrices.mul_(0.5)
        with pytest.raises(ValueError, match="or the lens"):
            reading.logits(1)
    with pytest.raises(ValueError, match="layer is 0"):
        bridge.lens(tokens, lens, layers=[0])


@pytest.mark.parametrize("kind", ["identity", "tuned", "jacobian"])
def test_directions_of_any_lens(bridge, texts, kind):
    lens = Lens(bridge)
    if kind == "tuned":
        lens = bridge.fit_lens([text[None] for text in texts], "tuned", verbose=False)
    if kind == "jacobian":
        lens = bridge.fit_lens(texts, skip_first=2, verbose=False)
    torch.manual_seed(0)
    with torch.no_grad():
        streams = torch.randn(3, 2, 32)
        linear = lens(streams, 2) - lens(torch.zeros(32), 2)
        torch.testing.assert_close(streams @ lens.matrix(2).T, linear, atol=1e-5, rtol=1e-4)
        logits = lens.decode(streams, 2, normed=False)
        torch.testing.assert_close(logits, linear @ bridge.W_U, atol=1e-4, rtol=1e-4)
        vectors = lens.vectors([7, 9], 2)
        torch.testing.assert_close(streams @ vectors.T, logits[..., [7, 9]], atol=1e-4, rtol=1e-4)
        assert torch.equal(lens.vectors(7, 2), vectors[0])
        normed = bridge(lens(streams.view(1, 6, 32), 2), start_at_layer=3)
        torch.testing.assert_close(lens.decode(streams, 2), normed.view(3, 2, -1))
        mixed = 2 * vectors[0] / vectors[0].norm() + vectors[1] / vectors[1].norm()
        ((parts,), (estimate,)) = lens.decompose(mixed, 2, 4), lens.occupancy(mixed, 2, 4, 8)
    assert parts.tokens[0] == 7 and estimate.tokens[0] == 7
    torch.testing.assert_close(parts.component + parts.rest, mixed)
    assert bool((parts.coefficients >= 0).all())
    shares = estimate.captured.cumsum(0)
    assert shares[0] > 0.5 and shares[-1] <= 1 + 1e-5


def test_the_coefficients_are_the_best_non_negative_ones():
    drawn = torch.Generator().manual_seed(0)
    atoms, target = torch.randn(12, 8, generator=drawn), torch.randn(8, generator=drawn)
    fit = Dictionary(atoms).decompose(target, 12)
    chosen = atoms[fit.tokens].double()
    coefficients = torch.zeros(len(chosen), dtype=torch.double)
    for _ in range(50_000):  # projected gradients
        slopes = chosen @ (target - coefficients @ chosen)
        coefficients = (coefficients + 0.01 * slopes).clamp_min(0)
    torch.testing.assert_close(fit.coefficients.double(), coefficients, atol=1e-5, rtol=1e-5)
    residual = target - fit.component
    assert (chosen.float() @ residual).abs().max() < 1e-4
    with pytest.raises(ValueError, match="vectors of zeros"):
        Dictionary(torch.zeros(2, 8))


def test_files(bridge, texts, tmp_path):
    lens = bridge.fit_lens(texts, skip_first=2, verbose=False)
    lens.save(tmp_path / "lens.pt")
    for path in (tmp_path, tmp_path / "lens.pt"):
        again = Lens.load(path, bridge)
        assert torch.equal(again.matrices, lens.matrices) and again.metadata == lens.metadata
    published = {"J": {0: lens.maps[1].half(), 1: lens.maps[2].half()}, "n_prompts": 3}
    torch.save(published | {"source_layers": [0, 1], "d_model": 32}, tmp_path / "lens.pt")
    old = Lens.load(tmp_path, bridge)
    torch.testing.assert_close(old.maps[1], lens.maps[1], atol=1e-3, rtol=1e-3)
    TunedLens(3, 32).save(tmp_path / "tuned")
    assert type(Lens.load(tmp_path / "tuned", bridge)) is TunedLens
    copied = copy.deepcopy(lens)
    assert copied.bridge is None and lens.bridge is bridge
    with pytest.raises(ValueError, match="does not know its model"):
        copied.vectors(7, 1)


def test_merging(bridge, texts):
    lens = bridge.fit_lens(texts, skip_first=2, verbose=False)
    parts = [bridge.fit_lens(part, skip_first=2, verbose=False) for part in (texts[:1], texts[1:])]
    merged = Lens.merge(parts)
    torch.testing.assert_close(merged.matrices, lens.matrices, atol=1e-5, rtol=1e-4)
    assert merged.metadata == lens.metadata and merged.n_prompts == 3
    other = bridge.fit_lens(texts, skip_first=3, verbose=False)
    for lenses in ([lens, other], [lens, JacobianLens(lens.maps, 0, lens.metadata)]):
        with pytest.raises(ValueError, match="fitted in the same way"):
            Lens.merge(lenses)
    for lenses in ([], [lens, TunedLens(3, 32)]):
        with pytest.raises(ValueError, match="kinds"):
            Lens.merge(lenses)
    with pytest.raises(ValueError, match="no mean over texts"):
        Lens.merge([TunedLens(3, 32)])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"hook_convention": "blocks.{layer}.hook_resid_pre"}, "its hook_convention is"),
        ({"estimator": "other"}, "its estimator is"),
        ({"processing": {"compatibility_mode": True}}, "its processing is"),
        ({"target_layer": 1}, "maps are of the layers"),
        ({"target_layer": 5}, "the lens is for 6 layers"),
        ({"model_name": "somebody/other"}, "the lens was fitted on somebody/other"),
        ({"unembed_sha256": "0"}, "or on other weights"),
    ],
)
def test_other_conventions_are_refused(bridge, tmp_path, metadata, message):
    content = {"J": {0: torch.eye(32), 1: torch.eye(32)}, "n_prompts": 1, "d_model": 32}
    torch.save(content | {"metadata": metadata}, tmp_path / "lens.pt")
    with pytest.raises(ValueError, match=message):
        Lens.load(tmp_path, bridge)


def test_other_models_are_refused(bridge, texts):
    lens = bridge.fit_lens(texts, skip_first=2, verbose=False)
    with pytest.raises(ValueError, match="too few tokens"):
        bridge.fit_lens(texts, verbose=False)
    with pytest.raises(ValueError, match="too few tokens"):
        bridge.fit_lens([], verbose=False)
    with pytest.raises(ValueError, match="kind is 'other'"):
        bridge.fit_lens(texts, "other")
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        bridge.fit_lens(texts, skip_first=2, verbose=False)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        bridge.fit_lens(texts, skip_first=2, verbose=False)
    with pytest.raises(ValueError, match="training mode"):
        TransformerBridge(tiny("gpt2").train()).fit_lens(texts, skip_first=2)
    with pytest.raises(ValueError, match="computes in"):
        TransformerBridge(tiny("gpt2").bfloat16()).fit_lens(texts, skip_first=2)
    with pytest.raises(ValueError, match="causal decoders"):
        TransformerBridge(tiny_model("bert", "masked")).fit_lens(texts, skip_first=2)
    processed = TransformerBridge(copy.deepcopy(bridge.original_model))
    processed.process_weights()
    for refused in (lambda: processed.fit_lens(texts, skip_first=2), lambda: lens.on(processed)):
        with pytest.raises(ValueError, match="are processed"):
            refused()
    with pytest.raises(ValueError, match="has the shape"):
        lens.decode(torch.zeros(31), 1)
    with pytest.raises(ValueError, match="number of tokens is 0"):
        lens.decompose(torch.ones(32), 1, k=0)
    with pytest.raises(ValueError, match="zero or not finite"):
        lens.occupancy(torch.zeros(32), 1)


def test_chats_are_texts():
    bridge = TransformerBridge.boot_embedded()
    bridge.tokenizer.chat_template = "{{ messages[0].content }}"
    chat = [{"role": "user", "content": "Mary and John went"}]
    of_chat, of_tokens = (
        bridge.fit_lens([text], skip_first=0, verbose=False).matrices
        for text in (chat, bridge.to_tokens(chat)[0])
    )
    assert torch.equal(of_chat, of_tokens)


def test_a_hybrid_is_fitted_in_one_run():
    bridge = TransformerBridge(tiny_model("jamba"))
    texts = [torch.randint(3, 60, (9,))]
    lens = bridge.fit_lens(texts, skip_first=2, verbose=False)
    torch.testing.assert_close(
        lens.maps[1], by_hand(bridge, texts[0][None], 1, 2), atol=1e-5, rtol=1e-4
    )


def test_half_precision_reads():
    bridge = TransformerBridge.boot_embedded()
    texts = [prompt.text + prompt.answer for prompt in prompts("ioi", 2)]
    lens = bridge.fit_lens(texts, skip_first=4, verbose=False)
    half = TransformerBridge(copy.deepcopy(bridge.original_model).bfloat16(), bridge.tokenizer)
    with torch.no_grad():
        right = bridge.lens(texts[0], lens).top(1).tokens
        other = half.lens(texts[0], lens).top(1).tokens
    assert (right == other).float().mean() > 0.9


def test_swaps(bridge):
    drawn = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 32, generator=drawn)
    stream = torch.randn(2, 5, 32, generator=drawn)
    hook = bridge.hook_dict["blocks.1.hook_resid_post"]
    pair = torch.stack([a, b], 1).double()
    coordinates = stream.double() @ torch.linalg.pinv(pair).T
    right = stream.double() + 1.5 * (coordinates.flip(-1) - coordinates) @ pair.T
    torch.testing.assert_close(Swap(a, b, 1.5)(stream, hook).double(), right, atol=1e-5, rtol=1e-5)
    twice = Swap(a, b)(Swap(b, a)(stream, hook), hook)
    torch.testing.assert_close(twice, stream, atol=1e-5, rtol=1e-5)
    for wrong, message in (
        ((a, a + 1e-3 * b), "told apart"),
        ((a, torch.zeros(32)), "no direction"),
        ((a[None], b), r"must be \[feature\]"),
        ((a, b[:5]), r"must be \[feature\]"),
    ):
        with pytest.raises(ValueError, match=message):
            Swap(*wrong)
