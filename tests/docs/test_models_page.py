"""docs/models.md says of every type what is found when it is tried: some rows are tried again here."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from benchmarks.models import row
from tests.tiny_models import CANNOT_BE_BUILT, types

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "bridge")


@pytest.mark.parametrize("model_type", ["granite", "olmo2", "deepseek_v3", "mamba", "hrm_text", "blt"])
def test_rows_are_as_they_are_found(model_type: str) -> None:
    assert str(row(model_type, "causal")) in PAGE.read_text(encoding="utf-8")


def test_every_type_has_a_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for task in ("causal", "masked", "seq2seq"):
        for model_type in types(task):
            assert f"\n| {model_type} | " in text, model_type
    assert set(CANNOT_BE_BUILT) <= set(types("causal"))
