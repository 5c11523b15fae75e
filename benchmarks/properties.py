"""Tries every property on every type of transformers, and makes docs/properties.md.

``python benchmarks/properties.py [TASK:TYPE ...] [--jobs N]``: without types, all of them, and the page is written;
with some, what is not right of them is printed. What is wrong, or ends in an accident, is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import transformers

from benchmarks.models import TITLES, quiet, shortened
from tests.every_type.cases import TASKS, usual, with_options
from tests.every_type.subject import Case, Outcome, Verdict
from tests.every_type.table import PROPERTIES, outcomes

PAGE = Path(__file__).resolve().parent.parent / "docs" / "properties.md"
#: What stands in a cell, the worst of all configurations of a type first.
SIGNS = {"WRONG": "WRONG", "CRASH": "CRASH", "refused": "r", "part": "part", "right": "yes", "absent": "–"}
Found = dict[Case, dict[str, Outcome]]
INTRODUCTION = """# What holds of every model

<!-- Made by `make properties`. -->

**In short.** {summary} To find a model, type its name above a table.

What this documentation promises, tried on every text architecture of transformers {version}: a tiny random instance of
each, as usual and with each option of its recipe the other way round (tied embeddings, biases, norms, caps, factors,
grouped heads). Each result is compared with something outside the library: plain torch hooks on an equal Hugging Face
model, its own outputs, products of its weights in float64. What is said of rows and requests is tried of each type as
usual.

*yes*: it holds of all configurations of the type that were tried. *part*: it holds wherever it could be compared,
which was not in every layer. *r*: of one at least it is refused by an error that says why. The reasons of both are
listed at the end. *–*: there is nothing to try; a model without attention has no patterns. A configuration that is
refused as a whole is counted apart: of "2 of 3" models two are wrapped, and the row is about these.

| | property | what holds |
|---|---|---|
{legend}

"""


def tried(cases: Iterable[Case], jobs: int | None) -> Found:
    """What comes of each case, each in a process of its own kind."""
    cases = list(cases)
    with ProcessPoolExecutor(jobs, initializer=quiet, mp_context=get_context("spawn")) as pool:
        return dict(zip(cases, pool.map(partial(outcomes, names=PROPERTIES), cases), strict=True))


def rows(found: Found) -> list[str]:
    """A row for each type."""
    by_type: dict[str, list[dict[str, Outcome]]] = defaultdict(list)
    for case, outcome in found.items():
        by_type[case.model_type].append(outcome)
    made = []
    for model_type, several in by_type.items():
        there = [each for each in several if any(x.verdict != "absent" for x in each.values())]
        wrapped = [each for each in there if not is_refused(each)]
        cells = [worst([each[name] for each in wrapped or several]) for name in PROPERTIES]
        models = str(len(there)) if len(wrapped) == len(there) else f"{len(wrapped)} of {len(there)}"
        made.append(f"| {' | '.join([model_type, models, *cells])} |")
    return made


def is_refused(outcome: dict[str, Outcome]) -> bool:
    """Whether a model is not wrapped at all."""
    return len({each.says for each in outcome.values()}) == 1 and all(x.verdict == "refused" for x in outcome.values())


def worst(several: list[Outcome]) -> str:
    """The sign of the worst of some outcomes."""
    verdicts = {"part" if each.verdict == "right" and each.says else each.verdict for each in several}
    return next(sign for verdict, sign in SIGNS.items() if verdict in verdicts)


def reasons_of(found: Found, verdict: Verdict) -> list[str]:
    """Each reason that a verdict gives, by property, with how many types and one of them."""
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for case, outcome in found.items():
        said = {name: each.says for name, each in outcome.items() if each.verdict == verdict and each.says}
        if is_refused(outcome):
            said = {"the model": next(iter(said.values()))} if said else {}
        for name, why in said.items():
            reasons[name][_reason(why.partition(": ")[2] if verdict == "refused" else why, case.model_type)].append(
                case.model_type
            )
    lines = []
    for name in ("the model", *PROPERTIES):
        for said_of_it, types in sorted(reasons[name].items(), key=lambda item: -len(item[1])):
            several = len(dict.fromkeys(types))
            lines.append(f"- **{name}**: {said_of_it} ({several}: {types[0]}{', ...' if several > 1 else ''})")
    return lines


def _reason(said: str, model_type: str) -> str:
    """An error's text without what is of one model only."""
    said = re.sub(r"(blocks|encoder|decoder)\.\d+", r"\1.i", said)
    said = "; ".join(dict.fromkeys(said.split("; ")))
    said = said.partition(": so what plays which part in ")[0]
    said = said.replace(model_type, "it").partition(". Did you mean")[0]
    return shortened(re.sub(r"\b\w+For\w+\b|\b\w+Model\w*\b", "it", said), 160)


def page(found: Found) -> str:
    """The page."""
    wrapped = [outcome for outcome in found.values() if not is_refused(outcome)]
    count = Counter(each.verdict for outcome in wrapped for each in outcome.values())
    part = sum(each.verdict == "right" and bool(each.says) for outcome in wrapped for each in outcome.values())
    summary = (
        f"{len(found)} models of {len({(case.task, case.model_type) for case in found})} types, "
        f"{len(found) - len(wrapped)} of them refused as a whole; {len(PROPERTIES)} properties: {count['right']:,} "
        f"results are right ({part:,} of these in part), {count['refused']:,} are refused with a reason, "
        f"{count['WRONG']} are wrong, {count['CRASH']} end in another error."
    )
    says = [(holds.__doc__ or "").splitlines()[0] for holds in PROPERTIES.values()]
    legend = "\n".join(
        f"| {i} | {name} | {said} |" for i, (name, said) in enumerate(zip(PROPERTIES, says, strict=True), 1)
    )
    text = INTRODUCTION.format(version=transformers.__version__, summary=summary, legend=legend)
    for task in TASKS:
        part = {case: outcome for case, outcome in found.items() if case.task == task}
        head = ["type", "models", *map(str, range(1, len(PROPERTIES) + 1))]
        table = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *rows(part)]
        text += f"## {TITLES[task]}\n\n" + "\n".join(table) + "\n\n"
    text += "## What is refused, and why\n\n" + "\n".join(reasons_of(found, "refused")) + "\n\n"
    return text + "## What could not be compared\n\n" + "\n".join(reasons_of(found, "right")) + "\n"


def main(arguments: list[str]) -> int:
    """Tries types, and says what is not right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="such as causal:llama")
    parser.add_argument("--jobs", type=int, default=None)
    chosen = parser.parse_args(arguments)
    quiet()
    as_usual = [case for task in TASKS for case in usual(task) if not chosen.types or str(case) in chosen.types]
    os.environ["TRANSFORMER_BRIDGE_CACHE"] = ""  # what an earlier state of the library has kept is not tried
    found = tried((each for case in as_usual for each in (case, *with_options(case))), chosen.jobs)
    bad = [
        f"{case}: {name}: {each.verdict}: {each.says}"
        for case, outcome in found.items()
        for name, each in outcome.items()
        if each.verdict in ("WRONG", "CRASH") or (chosen.types and each.verdict == "refused")
    ]
    print("\n".join(bad), flush=True)
    if not chosen.types:
        PAGE.write_text(page(found), encoding="utf-8")
    return int(any("WRONG" in each or "CRASH" in each for each in bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
