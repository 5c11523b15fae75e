"""All properties, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tests.every_type import generation, processing, reading, rows, running, sums
from tests.every_type.subject import Case, Outcome, Subject, outcome

#: By name: what is promised, as a function that raises where it does not hold.
PROPERTIES: dict[str, Callable[[Subject], None]] = (
    running.PROPERTIES
    | sums.PROPERTIES
    | reading.PROPERTIES
    | generation.PROPERTIES
    | processing.PROPERTIES
    | rows.PROPERTIES
)
#: What is tried of each type as usual, and not again with every option of its recipe.
AS_USUAL = frozenset(rows.PROPERTIES)


def outcomes(case: Case, names: Iterable[str] = PROPERTIES) -> dict[str, Outcome]:
    """What comes of each property on one model.

    Args:
        case: the model.
        names: which properties.
    """
    names, subject = list(names), Subject(case)
    for needed in (_runs_plainly, _is_wrapped):
        found = outcome(subject, needed)
        if found.verdict != "right":
            return dict.fromkeys(names, found)
    left_out = AS_USUAL if case.options else frozenset()
    once = Outcome("absent", "it is tried of the type as usual")
    return {
        name: once if name in left_out else outcome(subject, PROPERTIES[name]) for name in names
    }


def _runs_plainly(subject: Subject) -> None:
    with subject.itself(), torch.no_grad():
        subject.run()
    subject.compared += 1


def _is_wrapped(subject: Subject) -> None:
    subject.compared += int(subject.bridge.original_model is not subject.hf)
