"""Wrong types and shapes for every parameter of what stands on runs: a result, or an error of ours,
and no traces.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import torch_hooks
from tests.facade.calls import COUNTS, Call, calls
from tests.facade.test_fuzz import WRONG, complaint, described

PARTS = 3


@pytest.mark.unchecked
@pytest.mark.parametrize("part", range(PARTS))
def test_wrong_arguments_of_every_public_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
):
    complaints, tried = [], 0
    for number, call in list(enumerate(calls(tmp_path)))[part::PARTS]:
        (tmp_path / f"{number}").mkdir()
        monkeypatch.chdir(tmp_path / f"{number}")  # some of them write to folders
        call.function(**call.right)
        for name in call.parameters():
            for wrong in WRONG:
                if name in COUNTS and type(wrong) is int and wrong > 1000:
                    continue
                tried += 1
                if found := refused(call, name, wrong):
                    complaints.append(f"{call.name}, {name}={described(wrong)}: {found}")
    assert not complaints, "\n".join(complaints)
    assert tried > 7000 / PARTS / 2


def refused(call: Call, name: str, wrong: object) -> str:
    """What is wrong with the error for this value, "" where there is none, or it is one of ours."""
    try:
        call.function(**call.right | {name: wrong})
    except OSError as error:  # it names the file
        return "" if error.args else "an OSError without words"
    except KeyError as error:  # whose words are ours where they are a sentence
        return "" if " " in str(error) else complaint(error)
    except Exception as error:  # noqa: BLE001 - which one it is, is what is looked at
        return complaint(error)
    return ""


@pytest.mark.unchecked
def test_what_was_refused_left_no_hooks(tmp_path: Path):
    for call in calls(tmp_path):
        bridge = next((x for x in call.right.values() if hasattr(x, "hook_dict")), None)
        if bridge is None:
            continue
        expected = bridge(torch.tensor([[1, 2, 3]]))
        for name in call.parameters():
            for wrong in WRONG[:12:3]:
                refused(call, name, wrong)
        assert torch_hooks(bridge.original_model) == 0, call.name
        assert torch.equal(bridge(torch.tensor([[1, 2, 3]])), expected), call.name
