"""Tries every property on every type of transformers, and makes docs/properties.md.

``python benchmarks/properties.py [TASK:TYPE ...] [--jobs N]``: without types, all of them, and the page is written;
with some, what is not right of them is printed. What is wrong, or ends in an accident, is an error.
"""

from __future__ import annotations

import argparse
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
from tests.properties.cases import TASKS, usual, with_options
from tests.properties.subject import Case, Outcome
from tests.properties.table import PROPERTIES, outcomes

PAGE = Path(__file__).resolve().parent.parent / "docs" / "properties.md"
#: What stands in a cell, the worst of all configurations of a type first.
SIGNS = {"WRONG": "WRONG", "CRASH": "CRASH", "refused": "r", "right": "yes", "absent": "–"}
Found = dict[Case, dict[str, Outcome]]
INTRODUCTION = """# What holds of every model

<!-- Made by `make properties`. -->

What this documentation promises, tried on every text architecture of transformers {version}: a tiny random instance of
each, as usual and with each option of its recipe the other way round (tied embeddings, biases, norms, caps, factors,
grouped heads). Each result is compared with something outside the library: plain torch hooks on an equal Hugging Face
model, its own outputs, products of its weights in float64. Three compare what the library itself
offers in two ways: weights with
activations (29, 30), and the raw lens with `W_U` (26); that these are the model's own is what `verify` proves.

*yes*: it holds of all configurations of the type that were tried. *r*: of one at least it is refused by an error that
says why (the reasons are listed at the end). *–*: there is nothing to try; a model without attention has no patterns.

{summary}

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
        cells = [worst([each[name] for each in there or several]) for name in PROPERTIES]
        made.append(f"| {' | '.join([model_type, str(len(there)), *cells])} |")
    return made


def worst(several: list[Outcome]) -> str:
    """The sign of the worst of some outcomes."""
    verdicts = {each.verdict for each in several}
    return next(sign for verdict, sign in SIGNS.items() if verdict in verdicts)


def refusals(found: Found) -> list[str]:
    """Each reason for which something is refused, by property, with how many types and one of them."""
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for case, outcome in found.items():
        said = {name: each.says for name, each in outcome.items() if each.verdict == "refused"}
        if len(said) == len(PROPERTIES) and len(set(said.values())) == 1:
            said = {"the model": next(iter(said.values()))}  # it is not wrapped at all
        for name, why in said.items():
            reasons[name][_reason(why, case.model_type)].append(case.model_type)
    lines = []
    for name in ("the model", *PROPERTIES):
        for said_of_it, types in sorted(reasons[name].items(), key=lambda item: -len(item[1])):
            several = len(dict.fromkeys(types))
            lines.append(f"- **{name}**: {said_of_it} ({several}: {types[0]}{', ...' if several > 1 else ''})")
    return lines


def _reason(said: str, model_type: str) -> str:
    """An error's text without what is of one model only."""
    said = re.sub(r"(blocks|encoder|decoder)\.\d+", r"\1.i", said.partition(": ")[2])
    said = said.partition(" None could be inferred either: ")[2] or said
    said = said.replace(model_type, "it").partition(". Did you mean")[0]
    return shortened(re.sub(r"\b\w+For\w+\b|\b\w+Model\w*\b", "it", said), 160)


def page(found: Found) -> str:
    """The page."""
    count = Counter(each.verdict for outcome in found.values() for each in outcome.values())
    summary = (
        f"{len(found)} models of {len({(case.task, case.model_type) for case in found})} types, {len(PROPERTIES)} "
        f"properties: {count['right']:,} results are right, {count['refused']:,} are refused with a reason, "
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
    return text + "## What is refused, and why\n\n" + "\n".join(refusals(found)) + "\n"


def main(arguments: list[str]) -> int:
    """Tries types, and says what is not right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="such as causal:llama")
    parser.add_argument("--jobs", type=int, default=None)
    chosen = parser.parse_args(arguments)
    quiet()
    as_usual = [case for task in TASKS for case in usual(task) if not chosen.types or str(case) in chosen.types]
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
