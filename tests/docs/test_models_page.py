"""The rows that `make models` writes into docs/lookup.json: some types are tried."""

from __future__ import annotations

import logging

import pytest
import transformers
from torch import Tensor, nn
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoMLP

from benchmarks.models import Row, named, row, row_of_class, summary
from tests.named_by_transformer_lens import NAMED
from tests.tiny_models import Task


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "bridge")


@pytest.mark.parametrize(
    ("model_type", "offered", "proved"),
    [
        ("granite", "full", True),
        ("llama", "full", True),
        ("diffllama", "parts", True),
        ("gemma3n_text", "parts", True),
    ],
)
def test_rows_say_what_is_found(model_type: str, offered: str, proved: bool) -> None:
    found = row(model_type, "causal")
    assert (found.offered, found.proved) == (offered, proved), str(found)
    assert bool(found.reason) == (offered != "full"), str(found)


def test_a_type_that_cannot_be_had_says_why() -> None:
    assert row("blt", "causal").reason.startswith("no tiny instance: its patches of bytes")


def test_the_text_of_a_model_of_images_has_a_row() -> None:
    found = row("smolvlm", "image_text")
    assert (found.how, found.offered, found.proved, found.reason) == ("declared", "full", True, "")
    found = row("vision-encoder-decoder", "image_text")  # with an image that is made up
    assert (found.how, found.offered, found.proved, found.reason) == ("inferred", "full", True, "")


@pytest.mark.parametrize(
    ("model_type", "task", "offered"),
    [
        ("bart", "seq2seq", "full"),
        ("esm", "masked", "full"),
        ("tapas", "masked", "full"),
        ("fsmt", "seq2seq", "full"),
    ],
)
def test_rows_of_encoders_and_encoder_decoders(model_type: str, task: Task, offered: str) -> None:
    found = row(model_type, task)
    assert (found.offered, found.proved) == (offered, offered == "full"), str(found)


def test_classes_without_text_have_a_row() -> None:
    found = row_of_class("ViTModel")
    assert (found.type, found.how, found.offered, found.proved, found.reason) == (
        "vit",
        "inferred",
        "full",
        True,
        "",
    )


def test_sound_that_becomes_text_has_a_row() -> None:
    found = row("whisper", "speech")
    assert (found.how, found.offered, found.proved, found.reason) == ("declared", "full", True, "")


@pytest.mark.parametrize(
    ("model_type", "task", "reason"),
    [
        ("mamba2", "causal", ""),  # no options: other heads
        ("qwen2_audio", "seq2seq", ""),  # of its text
        ("opt", "causal", "refused with do_layer_norm_before=False word_embed_proj_dim=16"),
        (
            "blip-2",
            "image_text",
            "refused with do_layer_norm_before=False word_embed_proj_dim=16",
        ),  # by its text's adapter
    ],
)
def test_a_full_type_is_so_in_three_configurations(
    model_type: str, task: Task, reason: str
) -> None:
    found = row(model_type, task)
    assert (found.is_full, found.tried, found.reason) == (True, 3, reason), str(found)


def test_what_holds_of_the_usual_configuration_alone_is_not_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = GPTNeoMLP.forward

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        made: Tensor = before(self, hidden_states)
        return made + 0.5 if hidden_states.shape[-1] == 512 else made

    monkeypatch.setattr(GPTNeoMLP, "forward", forward)
    found = row("gpt_neo", "causal")
    assert not found.is_full and found.tried == 3 and found.reason.startswith("with 512 wide: "), (
        str(found)
    )
    assert "1 types, 0 full" in summary("causal", [found])


def test_a_type_that_could_be_built_twice_is_not_counted() -> None:
    rows = [Row("a", "LlamaModel", "declared", "full", proved=True, tried=each) for each in (2, 3)]
    assert "2 types, 1 full" in summary("causal", rows)


def test_the_classes_that_another_library_names_are_counted() -> None:
    assert len(NAMED) == len({*NAMED}) == 134
    assert all(hasattr(transformers, name) for name in NAMED)
    rows = {name: Row("t", name, offered="full", proved=True) for name in NAMED}
    assert "134 are offered, 134 fully and proved, 134 at least" in named(rows)
    assert named(rows).endswith("The others: none.")
    rows |= {
        NAMED[0]: Row("t", NAMED[0], reason="because"),
        NAMED[1]: Row("t", NAMED[1], offered="stream"),
    }
    assert (
        "133 are offered, 132 fully and proved, 132 at least with the stream and its parts. The"
        f" others: {NAMED[0]}" in (named(rows))
    )
    assert "(because)" in named(rows)
