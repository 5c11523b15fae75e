"""Models whose first blocks read images or sound: Whisper with made audio, ViT, HuBERT."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from adapters import verify
from adapters.inputs import CannotBeMade, sample_inputs
from bridge import TransformerBridge
from tests.adapters.mutations import mutations, tried
from tests.tiny_models import config_for, tiny_model, tiny_of

TOKENS = torch.randint(3, 99, (2, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "bridge")


@pytest.fixture(scope="module")
def sound() -> Tensor:
    """What Whisper's own feature extractor makes of a tone, and of noise: ``[2, mel, frame]``."""
    extract = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1)
    waves = [np.sin(np.arange(16000) * 0.17), np.random.default_rng(0).normal(size=9000)]
    features: Tensor = extract(waves, sampling_rate=16000, return_tensors="pt")["input_features"]
    return features


@pytest.fixture(scope="module")
def hearing() -> TransformerBridge:
    fields = {
        "num_mel_bins": 20,
        "max_source_positions": 50,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    return TransformerBridge(tiny_model("whisper", "speech", attn_implementation="eager", **fields))


def halved(module: nn.Module, args: object, output: Any) -> Any:
    """A plain torch hook."""
    return output * 0.5 if isinstance(output, Tensor) else (output[0] * 0.5, *output[1:])


def half(x: Tensor, hook: object) -> Tensor:
    return x * 0.5


def with_plain_hook(bridge: TransformerBridge, path: str, run: Callable[[], Tensor]) -> Tensor:
    handle = bridge.core.get_submodule(path).register_forward_hook(halved)
    try:
        with torch.no_grad():
            return run()
    finally:
        handle.remove()


def test_a_run_on_sound_is_the_models_own(hearing: TransformerBridge, sound: Tensor) -> None:
    model = hearing.original_model
    with torch.no_grad():
        own = model(input_features=sound, decoder_input_ids=TOKENS).logits
        assert torch.equal(hearing(TOKENS, input_features=sound), own)
        assert torch.equal(hearing(sound, decoder_input_ids=TOKENS), own)
        assert not torch.allclose(hearing(TOKENS, input_features=sound.flip(0)), own)
        start = torch.full((2, 1), model.config.decoder_start_token_id)
        assert torch.equal(
            hearing(sound), model(input_features=sound, decoder_input_ids=start).logits
        )
        loss = nn.functional.cross_entropy(own[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        for given in (
            hearing(TOKENS, "loss", input_features=sound),
            hearing(sound, "loss", decoder_input_ids=TOKENS),
        ):
            torch.testing.assert_close(given, loss)


def test_the_cache_of_a_run_on_sound(hearing: TransformerBridge, sound: Tensor) -> None:
    """Against the model's own hidden states and patterns, of both stacks."""
    with torch.no_grad():
        own = hearing.original_model(
            input_features=sound,
            decoder_input_ids=TOKENS,
            output_hidden_states=True,
            output_attentions=True,
        )
        logits, cache = hearing.run_with_cache(TOKENS, input_features=sound)
    torch.testing.assert_close(logits, own.logits)
    for layer in range(2):
        torch.testing.assert_close(
            cache[f"encoder.{layer}.hook_resid_pre"], own.encoder_hidden_states[layer]
        )
        torch.testing.assert_close(
            cache[f"decoder.{layer}.hook_resid_pre"], own.decoder_hidden_states[layer]
        )
        torch.testing.assert_close(
            cache[f"encoder.{layer}.attn.hook_pattern"], own.encoder_attentions[layer]
        )
        torch.testing.assert_close(
            cache[f"decoder.{layer}.attn.hook_pattern"], own.decoder_attentions[layer]
        )
        torch.testing.assert_close(
            cache[f"decoder.{layer}.cross_attn.hook_pattern"], own.cross_attentions[layer]
        )
    assert "hook_embed" not in hearing.hook_dict


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("decoder.0.hook_resid_post", "model.decoder.layers.0"),
        ("encoder.1.hook_resid_post", "model.encoder.layers.1"),
    ],
)
def test_a_hook_on_either_stack_changes_the_answer(
    hearing: TransformerBridge, sound: Tensor, name: str, path: str
) -> None:
    """As the same edit by a plain torch hook, of a run and of a generation."""
    model: Any = hearing.original_model
    options = {"max_new_tokens": 5, "do_sample": False}
    with torch.no_grad():
        plain = hearing(TOKENS, input_features=sound)
        edited = hearing.run_with_hooks(TOKENS, fwd_hooks=[(name, half)], input_features=sound)
        with hearing.hooks(fwd_hooks=[(name, half)]):
            made = hearing.generate(sound, **options, verbose=False)
    expected = with_plain_hook(
        hearing, path, lambda: model(input_features=sound, decoder_input_ids=TOKENS).logits
    )
    torch.testing.assert_close(edited, expected)
    assert not torch.allclose(edited, plain)
    assert torch.equal(
        made, with_plain_hook(hearing, path, lambda: model.generate(sound, **options))
    )


def test_a_trace_of_a_run_on_sound(hearing: TransformerBridge, sound: Tensor) -> None:
    with torch.no_grad():
        expected = hearing.run_with_hooks(
            TOKENS, fwd_hooks=[("encoder.1.hook_resid_post", half)], input_features=sound
        )
        with hearing.trace(TOKENS, input_features=sound) as run:
            run["encoder.1.hook_resid_post"] = run["encoder.1.hook_resid_post"] * 0.5
            logits = run.logits
        assert torch.equal(logits, expected)
        one = run.rows(1)
        assert one.tokens is not None and torch.equal(one.tokens, TOKENS[1:])
        assert torch.equal(one.logits, expected[1:])
    with pytest.raises(
        ValueError,
        match="a program takes tokens, but WhisperForConditionalGeneration reads input_f",
    ):
        hearing.program()


def test_text_is_generated_from_sound(hearing: TransformerBridge, sound: Tensor) -> None:
    model: Any = hearing.original_model
    options = {"max_new_tokens": 5, "do_sample": False}
    own = model.generate(sound, **options)
    assert torch.equal(hearing.generate(sound, **options, verbose=False), own)
    assert torch.equal(hearing.hf_generate(sound, **options), own)
    assert torch.equal(
        hearing.generate(input_features=sound, **options, verbose=False, return_type="tokens"), own
    )
    begun = model.generate(sound, decoder_input_ids=TOKENS, **options)
    assert torch.equal(
        hearing.generate(TOKENS, input_features=sound, **options, verbose=False), begun
    )
    assert not torch.equal(begun, own)
    said = "is not available for WhisperForConditionalGeneration, whose `generate` is its own"
    with pytest.raises(ValueError, match=said):
        hearing.generate(sound, **options, verbose=False, return_cache=True)
    with pytest.raises(ValueError, match=said):
        hearing.generate_stream(sound, **options, verbose=False)


@pytest.mark.parametrize(
    ("given", "named", "error", "said"),
    [
        (
            TOKENS,
            {},
            ValueError,
            r"needs input_features, and tokens are its decoder's: bridge\(tokens, input_features",
        ),
        (TOKENS, {"decoder_input_ids": TOKENS}, ValueError, "decoder_input_ids is given twice"),
        (
            torch.zeros(2, 20, 100),
            {"input_features": torch.zeros(2, 20, 100)},
            ValueError,
            "features is given twice",
        ),
        (
            torch.full((1, 3), 99),
            {"input_features": torch.zeros(1, 20, 100)},
            ValueError,
            "token id 99",
        ),
        (
            torch.full((1, 65), 3),
            {"input_features": torch.zeros(1, 20, 100)},
            ValueError,
            "has a context of 64",
        ),
        (
            torch.zeros(2, 20, 99),
            {},
            ValueError,
            "Whisper expects the mel input features to be of length 100",
        ),
        (
            TOKENS,
            {"input_feature": torch.zeros(2, 20, 100)},
            TypeError,
            "Did you mean .*input_features",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(
    hearing: TransformerBridge,
    given: Tensor,
    named: dict[str, Tensor],
    error: type[Exception],
    said: str,
) -> None:
    with pytest.raises(error, match=said):
        hearing(given, **named)


def test_whisper_is_declared_and_proved(sound: Tensor, hearing: TransformerBridge) -> None:
    """By what is made up, and with sound of one's own; what is inferred is the same."""
    assert not hearing.offered().inferred
    report = verify(hearing, inputs={"input_features": sound})
    assert report.passed, str(report)
    inferred = TransformerBridge(
        hearing.original_model, automatic="always", inputs={"input_features": sound}
    )
    assert set(inferred.hook_dict) == set(hearing.hook_dict)
    with torch.no_grad():
        caches = [
            each.run_with_cache(TOKENS, input_features=sound)[1] for each in (hearing, inferred)
        ]
    assert caches[0].keys() == caches[1].keys()
    for name, x in caches[0].items():
        torch.testing.assert_close(caches[1][name], x, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "name",
    [
        "cfg.decoder_start_token_id = 2",
        "encoder: Attention: q and k exchanged",
        "decoder: Attention: q and k exchanged",
    ],
)
def test_a_wrong_declaration_of_whisper_is_refused(hearing: TransformerBridge, name: str) -> None:
    found = [each for each in mutations(hearing.core) if each.name == name]
    assert found
    refused = tried(hearing.core, found[0])
    assert isinstance(refused, Exception) or not refused.passed


@pytest.mark.slow
def test_every_wrong_declaration_of_whisper_is_refused(hearing: TransformerBridge) -> None:
    changed = [each for each in mutations(hearing.core) if not each.same]
    reports = {each.name: tried(hearing.core, each) for each in changed}
    assert len(changed) > 150
    assert not [
        name for name, each in reports.items() if not isinstance(each, Exception) and each.passed
    ]


def test_other_sound_is_read_by_other_models() -> None:
    model = tiny_model("speech_to_text", "speech")
    bridge, given = TransformerBridge(model), sample_inputs(model)
    report = verify(bridge)
    assert report.passed, str(report)
    sound, tokens = given["input_features"], given["decoder_input_ids"]
    with torch.no_grad():
        assert torch.equal(bridge(tokens, input_features=sound), model(**given).logits)
        _, cache = bridge.run_with_cache(
            tokens, names_filter="decoder_embed.hook_out", input_features=sound
        )
    torch.testing.assert_close(
        cache["decoder_embed.hook_out"], bridge.W_E[tokens]
    )  # which it scales


def test_a_decoder_of_sound_alone_is_a_language_model() -> None:
    config = config_for(transformers.WhisperForCausalLM, is_encoder_decoder=False, is_decoder=True)
    bridge = TransformerBridge(tiny_of(transformers.WhisperForCausalLM, config))
    with torch.no_grad():
        assert torch.equal(bridge(TOKENS), bridge.original_model(TOKENS).logits)
    assert "blocks.1.hook_resid_post" in bridge.hook_dict


@pytest.mark.parametrize("name", ["ViTForImageClassification", "HubertForCTC"])
def test_a_model_without_tokens(name: str) -> None:
    """Its input is images, or sound; against its own hidden states, and the same edit by a plain
    torch hook.
    """
    cls = getattr(transformers, name)
    model = tiny_of(cls, config_for(cls))
    bridge, (given,) = TransformerBridge(model), sample_inputs(model).values()
    assert not bridge.offered().not_offered
    report = verify(bridge)
    assert report.passed, str(report)
    with torch.no_grad():
        own = model(given, output_hidden_states=True)
        assert torch.equal(bridge(given), own.logits)
        _, cache = bridge.run_with_cache(given)
        edited = bridge.run_with_hooks(given, fwd_hooks=[("blocks.0.hook_out", half)])
    torch.testing.assert_close(cache["blocks.0.hook_resid_pre"], own.hidden_states[0])
    torch.testing.assert_close(cache["blocks.1.hook_resid_pre"], own.hidden_states[1])
    torch.testing.assert_close(
        edited,
        with_plain_hook(bridge, bridge.block_paths[0], lambda: model(given).logits),
        rtol=1e-5,
        atol=1e-5,
    )
    assert not torch.allclose(edited, own.logits)
    for tokens in (TOKENS, "A text"):
        with pytest.raises(
            TypeError, match=f"{name} reads no tokens: its input is {model.main_input_name}"
        ):
            bridge(tokens)
    with pytest.raises(ValueError, match=r"predicts no tokens|no next-token loss"):
        bridge(given, return_type="loss")
    with pytest.raises(
        ValueError, match="cannot start or stop at a layer: its first block reads what is made of"
    ):
        bridge(given, stop_at_layer=1)


def test_what_cannot_be_made_up_is_asked_for() -> None:
    model = tiny_model("speech-encoder-decoder", "speech")
    with pytest.raises(
        TypeError, match=r"needs inputs, and none can be made up: pass inputs=\{'inputs': ...\}"
    ):
        TransformerBridge(model)
    sound = torch.randn(1, 8000, generator=torch.Generator().manual_seed(0))
    bridge = TransformerBridge(model, inputs={"inputs": sound})
    with pytest.raises(CannotBeMade, match="pass inputs="):
        verify(bridge)
    report = verify(bridge, inputs={"inputs": sound})
    assert report.passed, str(report)
