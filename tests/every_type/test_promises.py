"""A part of all types and properties: `make properties` tries them all."""

from __future__ import annotations

import logging

import pytest

from tests.every_type.cases import TASKS, covering, family, usual
from tests.every_type.subject import Case
from tests.every_type.table import PROPERTIES, outcomes

CHOSEN = covering(list(PROPERTIES))
#: What was wrong once, and is not chosen: factors behind parts, streams that come first, compressed
#: keys, blocks that run several times, of which some have no gradient.
ODD = [
    ("granite", ["heads", "W attention", "W mlp"]),
    ("gemma3n_text", ["streams", "generation cache", "rows edits", "slopes"]),
    ("deepseek_v4", ["generation cache"]),
    ("hrm_text", ["heads", "W attention", "W mlp"]),
]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "bridge")


@pytest.mark.filterwarnings(
    "ignore"
)  # of transformers, about options that a tiny model does not use
@pytest.mark.parametrize(
    ("case", "names"), [*CHOSEN, *((Case(x, "causal"), names) for x, names in ODD)], ids=str
)
def test_each_is_right_or_refused(case: Case, names: list[str]) -> None:
    found = outcomes(case, names)
    bad = [
        f"{name}: {each.verdict}: {each.says}"
        for name, each in found.items()
        if each.verdict.isupper()
    ]
    assert not bad, "\n".join([f"{case}:", *bad])


def test_every_family_and_every_property_occurs() -> None:
    tried = {name for _, names in CHOSEN for name in names}
    assert tried == set(PROPERTIES)
    every = {family(case) for task in TASKS for case in usual(task)} - {""}
    assert {family(case) for case, _ in CHOSEN} == every
    assert {case.task for case, _ in CHOSEN} == set(TASKS)
