"""``python -m bridge export``."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.cli import main as cli


@pytest.mark.unchecked
def test_a_mistake_is_said_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert cli.main(["export", "embedded", "--capture", "blocks.3.hook_resid_pots", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: there is no hook point") and "blocks.3.hook_resid_post" in said
    assert cli.main(["export", str(tmp_path / "nowhere"), "--out", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []
