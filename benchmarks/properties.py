"""Tries every property on every type of transformers, and writes its sections of docs/lookup.json.

``python benchmarks/properties.py [TASK:TYPE ...] [--jobs N]``: without types, all of them, and the
file is written; with some, what is not right of them is printed. What is wrong, or ends in an
accident, is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import transformers

from benchmarks.models import quiet, shortened
from tests.every_type.cases import TASKS, usual, with_options
from tests.every_type.subject import Case, Outcome, Verdict
from tests.every_type.table import PROPERTIES, outcomes
from tools.lookup import SIGNS, write

Found = dict[Case, dict[str, Outcome]]


def tried(cases: Iterable[Case], jobs: int | None) -> Found:
    """What comes of each case, each in a process of its own kind."""
    cases = list(cases)
    with ProcessPoolExecutor(jobs, initializer=quiet, mp_context=get_context("spawn")) as pool:
        return dict(zip(cases, pool.map(partial(outcomes, names=PROPERTIES), cases), strict=True))


def held(found: Found) -> dict[str, tuple[str, str]]:
    """Of each type, how many models were tried, and a sign for each property."""
    by_type: dict[str, list[dict[str, Outcome]]] = defaultdict(list)
    for case, outcome in found.items():
        by_type[f"{case.task}:{case.model_type}"].append(outcome)
    rows = {}
    for name, outcomes_of in by_type.items():
        present = [
            each for each in outcomes_of if any(x.verdict != "absent" for x in each.values())
        ]
        wrapped = [each for each in present if not is_refused(each)]
        models = str(len(present))
        if len(wrapped) != len(present):
            models = f"{len(wrapped)} of {models}"
        signs = (worst([each[x] for each in wrapped or outcomes_of]) for x in PROPERTIES)
        rows[name] = models, "".join(signs)
    return rows


def is_refused(outcome: dict[str, Outcome]) -> bool:
    """Whether a model is not wrapped at all."""
    return len({each.says for each in outcome.values()}) == 1 and all(
        x.verdict == "refused" for x in outcome.values()
    )


def worst(several: list[Outcome]) -> str:
    """The sign of the worst of some outcomes."""
    verdicts = {
        "part" if each.verdict == "right" and each.says else each.verdict for each in several
    }
    return next(sign for verdict, sign in SIGNS.items() if verdict in verdicts)


def reasons_of(found: Found, verdict: Verdict) -> list[list[Any]]:
    """Each reason that a verdict gives: its properties, its text, of how many types, and these."""
    types: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for case, outcome in found.items():
        says = {
            name: each.says
            for name, each in outcome.items()
            if each.verdict == verdict and each.says
        }
        if is_refused(outcome):
            says = {"the model": next(iter(says.values()))} if says else {}
        for name, why in says.items():
            text = why.partition(": ")[2] if verdict == "refused" else why
            types[_reason(text, case.model_type), name][case.model_type] = None
    together: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (text, name), of_it in types.items():
        together[text, tuple(of_it)].append(name)
    return [[names, text, len(of_it), list(of_it)] for (text, of_it), names in together.items()]


def _reason(said: str, model_type: str) -> str:
    """An error's text without what is of one model only."""
    said = re.sub(r"(blocks|encoder|decoder)\.\d+", r"\1.i", said)
    said = "; ".join(dict.fromkeys(said.split("; ")))
    said = said.partition(": so what plays which part in ")[0]
    said = said.replace(model_type, "it").partition(". Did you mean")[0]
    said = re.sub(r"\b\w+For\w+\b|\b\w+Model\w*\b", "it", said).removeprefix("it: ")
    return shortened(said, 160)


def sentence(holds: Callable[..., None]) -> str:
    """What a property says: the first paragraph of its docstring."""
    return " ".join((holds.__doc__ or "").partition("\n\n")[0].split())


def sections(found: Found) -> dict[str, Any]:
    """The sections of docs/lookup.json that this script measures."""
    wrapped = [
        each for outcome in found.values() if not is_refused(outcome) for each in outcome.values()
    ]
    totals = Counter(each.verdict for each in wrapped)
    return {
        "transformers": transformers.__version__,
        "totals": {
            "models": len(found),
            "refused models": sum(map(is_refused, found.values())),
            "right": totals["right"],
            "part": sum(each.verdict == "right" and bool(each.says) for each in wrapped),
            "refused": totals["refused"],
            "WRONG": totals["WRONG"],
            "CRASH": totals["CRASH"],
        },
        "properties": [[name, sentence(holds)] for name, holds in PROPERTIES.items()],
        "holds": held(found),
        "refused": reasons_of(found, "refused"),
        "part": reasons_of(found, "right"),
    }


def main(arguments: list[str]) -> int:
    """Tries types, and says what is not right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="such as causal:llama")
    parser.add_argument("--jobs", type=int, default=None)
    chosen = parser.parse_args(arguments)
    quiet()
    as_usual = [
        case
        for task in TASKS
        for case in usual(task)
        if not chosen.types or str(case) in chosen.types
    ]
    os.environ["TRANSFORMER_BRIDGE_CACHE"] = (
        ""  # what an earlier state of the library has kept is not tried
    )
    found = tried((each for case in as_usual for each in (case, *with_options(case))), chosen.jobs)
    bad = [
        f"{case}: {name}: {each.verdict}: {each.says}"
        for case, outcome in found.items()
        for name, each in outcome.items()
        if each.verdict in ("WRONG", "CRASH") or (chosen.types and each.verdict == "refused")
    ]
    print("\n".join(bad), flush=True)
    if not chosen.types:
        write(**sections(found))
    return int(any("WRONG" in each or "CRASH" in each for each in bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
