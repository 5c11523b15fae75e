"""All properties, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.properties import further, reading, running, sums
from tests.properties.subject import Case, Outcome, Subject, outcome

#: By name: what is promised, as a function that raises where it does not hold.
PROPERTIES: dict[str, Callable[[Subject], None]] = (
    running.PROPERTIES | sums.PROPERTIES | reading.PROPERTIES | further.PROPERTIES
)


def outcomes(case: Case, names: Iterable[str] = PROPERTIES) -> dict[str, Outcome]:
    """What comes of each property on one model.

    Args:
        case: the model.
        names: which properties.
    """
    subject = Subject(case)
    built = outcome(subject, _is_built)
    if built.verdict not in ("right", "absent"):
        return dict.fromkeys(names, built)
    return {name: outcome(subject, PROPERTIES[name]) for name in names}


def _is_built(subject: Subject) -> None:
    subject.bridge  # noqa: B018 - it is made here
