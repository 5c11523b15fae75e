"""The rows that `make models` writes: some types are tried."""

from __future__ import annotations

import logging

import pytest

from benchmarks.models import row
from tests.tiny_models import Task


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "bridge")


@pytest.mark.parametrize(
    ("model_type", "offered", "proved"),
    [("granite", "full", True), ("llama", "full", True), ("diffllama", "parts", True), ("gemma3n_text", "–", False)],
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
    [("bart", "seq2seq", "full"), ("esm", "masked", "full"), ("tapas", "masked", "full"), ("fsmt", "seq2seq", "–")],
)
def test_rows_of_encoders_and_encoder_decoders(model_type: str, task: Task, offered: str) -> None:
    found = row(model_type, task)
    assert (found.offered, found.proved) == (offered, offered == "full"), str(found)
