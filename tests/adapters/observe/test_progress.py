"""What a wrap that infers says meanwhile: what is tried, at how many points; and nothing where bars
are off.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import transformers

from adapters import verify
from adapters.observe import recognised as progress
from bridge import TransformerBridge
from tests.conftest import tiny

pytestmark = pytest.mark.unchecked  # another class stands in the place of tqdm's


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The bars that are made, as in a terminal: each with what it said."""
    made: list[Any] = []

    class Bar(progress.tqdm):
        def __init__(self, *args: Any, disable: bool | None, **more: Any) -> None:
            self.shown, self.said = io.StringIO(), []
            super().__init__(*args, disable=bool(disable), file=self.shown, **more)
            made.append(self)

        def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
            self.said.append(s)
            super().set_postfix_str(s, refresh)

    # A bar shows itself on a terminal, and after seconds: a test has neither.
    monkeypatch.setattr(progress, "tqdm", Bar)
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    return made


def test_a_bar_says_what_is_tried_and_how_much(bars: list[Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "is_progress_bar_enabled", lambda: True)
    bridge = TransformerBridge(tiny("llama"), automatic="always")
    proving = next(bar for bar in bars if bar.desc.rstrip(": ") == "proving")
    assert proving.total >= len(bridge.hook_dict)
    assert 0 < proving.n <= proving.total
    assert "proving" in proving.shown.getvalue()
    assert {"the model itself", "hook points are seen", "what is read is written back"} <= set(
        proving.said
    )
    assert any(said.startswith("edits, ") for said in proving.said)


def test_a_verification_names_its_checks(bars: list[Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "is_progress_bar_enabled", lambda: True)
    report = verify(TransformerBridge(tiny("llama")))
    (verifying,) = [bar for bar in bars if bar.desc.startswith("verifying")]
    assert verifying.n >= len(report.checks)
    assert {"unhooked", "every hook fires", "writing back", "nothing left behind"} <= set(
        verifying.said
    )
    named = {check.name for check in report.checks} & set(verifying.said)
    assert len(named) > 9  # the claims of the declaration, by their own names


def test_a_declaration_shows_a_bar_in_all_its_stages(
    bars: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress, "is_progress_bar_enabled", lambda: True)
    TransformerBridge(tiny("llama"), automatic="always")
    (rest,) = [bar for bar in bars if bar.desc.startswith("proving the rest")]
    assert rest.n > 10
    assert "unhooked" in rest.said


def test_it_is_off_with_the_bars_of_transformers(bars: list[Any]):
    assert not transformers.utils.logging.is_progress_bar_enabled()  # switched off for all tests
    TransformerBridge(tiny("llama"), automatic="always")
    assert bars
    assert all(bar.disable and not bar.shown.getvalue() for bar in bars)
