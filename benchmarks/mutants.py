"""Changes the code at random, runs the tests that belong to what was changed, and lists what no
test noticed.

    make mutants                        # a hundred changes
    make mutants N=20 SEED=7 ONLY=bridge/hooks,adapters/proofs

Each mutant is one change of one place: a comparison turned around, `and` for `or`, a condition
negated, a number one higher, `+` for `-`, a True for a False, a statement left out, a returned
value dropped. They are made on the syntax tree, in a copy of the checkout, and the same seed makes
the same mutants. Nothing is changed in docstrings, annotations, imports and the words of errors.
Whether one that nobody noticed is equivalent (an optimisation left out, say) is for a reader to
judge: each is shown as a line before and after.

Which tests run which line is measured once (`touched.py`). For a mutant those are run that run its
statement: files first that name the changed function, then the quick ones, and after them the other
tests of these files (a fixture or a cache may have run the line for a test before). A mutant
outside of functions is for every test that runs anything of its file. One process runs them and
stops at the first failure. A test counts only where it passes without the change: they are run
again at the end.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import coverage
import pytest
import transformers.pytorch_utils  # noqa: F401  with torch: what every test needs, imported once

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ("bridge", "adapters", "weight_processing")
#: How many files of tests are collected at first, and then: most mutants need no more.
FIRST, THEN = 6, 30
#: What is said of a mutant that no test noticed in the time there was: it hangs, or more time is
#: needed to know.
NO_END = "the tests did not end"
#: What is said of one that stands where no test comes.
NOT_RUN = "NOT NOTICED: no test runs it"
#: The times of files as they are changed and put back: each a second later, which is what compiled
#: files tell apart.
CLOCK = itertools.count(int(time.time()))

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """One change: the node that is number `index` of those in a file that can be changed."""

    path: str
    index: int
    line: int
    before: str
    after: str
    source: str
    inside: tuple[str, ...]
    lines: range | None


def changed(node: ast.AST) -> ast.AST | None:
    """The node with one thing changed, or None where nothing of it is to be."""
    new = copy.copy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in COMPARISONS:
        new.ops = [COMPARISONS[type(new.ops[0])](), *new.ops[1:]]
    elif isinstance(new, ast.BoolOp):
        new.op = ast.And() if isinstance(new.op, ast.Or) else ast.Or()
    elif isinstance(new, ast.BinOp) and type(new.op) in OPERATORS:
        new.op = OPERATORS[type(new.op)]()
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        return new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        new.value = not new.value
    elif isinstance(new, ast.Constant) and type(new.value) is int:
        new.value += 1
    elif isinstance(new, ast.If | ast.IfExp):
        new.test = ast.UnaryOp(ast.Not(), new.test)
    elif isinstance(new, ast.Return) and new.value is not None:
        new.value = ast.Constant(None)
    elif isinstance(new, ast.Expr) and isinstance(new.value, ast.Call):
        return ast.Pass()
    else:
        return None
    return new


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """What can be changed: its parent, the field and place there, and the node."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params") or isinstance(
            tree, ast.Raise
        ):
            continue
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(node, ast.AST):
                continue
            if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            if changed(node) is not None:
                yield tree, name, index if isinstance(value, list) else None, node
            yield from places(node)


def mutant_of(path: str, index: int) -> Mutant:
    """The mutant of a file that changes this one of its places."""
    tree = ast.parse((ROOT / path).read_text())
    parent, field, at, node = list(places(tree))[index]
    lines = lines_of(tree, node)
    new = ast.copy_location(changed(node) or node, node)
    before, after = (ast.unparse(x).splitlines()[0] for x in (node, new))
    if at is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[at] = new
    ast.fix_missing_locations(tree)
    line = getattr(node, "lineno", 0)
    return Mutant(
        path, index, line, before, after, ast.unparse(tree), names_around(path, line), lines
    )


def lines_of(tree: ast.AST, node: ast.AST) -> range | None:
    """The lines that a test has to run to notice a change of this node; None for what is done at
    import.

    Those of its statement (of a compound one its head), and of a function's body for a default of
    one of its arguments.
    """
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    around = [node]
    while around[-1] in parents:
        around.append(parents[around[-1]])
    functions = [one for one in around if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    statement = next(one for one in around if isinstance(one, ast.stmt))
    body = getattr(statement, "body", None)
    if not functions:
        return None
    if statement is functions[0]:
        return range(functions[0].body[0].lineno, (functions[0].end_lineno or 0) + 1)
    last = body[0].lineno - 1 if body else statement.end_lineno or 0
    return range(statement.lineno, max(last, statement.lineno) + 1)


def names_around(path: str, line: int) -> tuple[str, ...]:
    """The classes and functions that a line stands in."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [
        node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, kinds)
    ]
    return tuple(
        node.name
        for node in nodes
        if node.lineno <= line <= (node.end_lineno or 0) and "__" not in node.name
    )


def files(only: str) -> list[str]:
    """The files that are mutated."""
    every = sorted(
        str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")
    )
    return [path for path in every if path.startswith(tuple(only.split(",")))]


def chosen(n: int, seed: int, only: str) -> list[Mutant]:
    """Random mutants: every place of every file is as likely."""
    every = [
        (name, index)
        for name in files(only)
        for index in range(sum(1 for _ in places(ast.parse((ROOT / name).read_text()))))
    ]
    return [mutant_of(*place) for place in random.Random(seed).sample(every, min(n, len(every)))]


class Touched:
    """What was measured: which test runs which line, and how long it takes."""

    def __init__(self, folder: pathlib.Path) -> None:
        file = folder / "touched"
        self.lines = coverage.CoverageData(str(file))
        self.lines.read()
        self.seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text())
        measured = file.stat().st_mtime
        if changed_since := [
            name for name in files("") if (ROOT / name).stat().st_mtime > measured
        ]:
            raise RuntimeError(
                f"{changed_since[0]} was changed since {folder} was measured: measure again (make"
                " mutants)"
            )
        new = [
            path for path in (ROOT / "tests").rglob("test_*.py") if path.stat().st_mtime > measured
        ]
        self.new = [str(path.relative_to(ROOT)) for path in new]

    def tests_for(self, mutant: Mutant) -> dict[str, list[str]]:
        """By file, in the order in which they are to run: the tests that run what was changed."""
        found = self.lines.contexts_by_lineno(mutant.path)
        lines = found if mutant.lines is None else [line for line in mutant.lines if line in found]
        by: dict[str, list[str]] = {}
        for test in sorted({test for line in lines for test in found[line] if test}):
            by.setdefault(test.split("::")[0], []).append(test)
        for file in self.new:
            by.setdefault(file, [])

        def order(file: str) -> tuple[bool, int, float]:
            text = (ROOT / file).read_text()
            words = sum(bool(re.search(rf"\b{name}\b", text)) for name in mutant.inside)
            return (
                file not in self.new,
                -words,
                sum(self.seconds.get(test, 0.0) for test in by[file]),
            )

        return {file: by[file] for file in sorted(by, key=order) if (ROOT / file).exists()}


class FirstThese:
    """Puts these tests before the others that were collected."""

    def __init__(self, tests: list[str]) -> None:
        self.place = {test: number for number, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.place.get(item.nodeid, len(self.place)))


class Failed:
    """Writes the name of the test that fails, or of the file that cannot be collected."""

    def __init__(self, file: pathlib.Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.file.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.file.write_text(report.nodeid)


def run_tests(
    checkout: pathlib.Path, given: list[str], first: list[str], log: pathlib.Path, limit: int
) -> None:
    """In a process of its own, which has torch and transformers already: one pytest that stops at
    the first failure.
    """
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(checkout)
    os.environ["PYTHONPATH"] = str(checkout)
    sys.path[:] = [
        str(checkout),
        *(path for path in sys.path if path not in (str(ROOT), str(ROOT / "benchmarks"), "")),
    ]
    known = [
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]  # plugins that were imported here before
    code = pytest.main(
        ["-x", "-n", "0", "--no-header", "-p", "no:cacheprovider", *known, *given],
        [Failed(log.with_name("log.failed")), FirstThese(first)],
    )
    sys.stdout.flush()
    os._exit(int(code))


def outcome(checkout: pathlib.Path, given: list[str], first: list[str], limit: int) -> str:
    """The first test that fails of what pytest is given, "" where all pass, `NO_END` where they
    take longer.
    """
    log, failed = checkout.parent / "log", checkout.parent / "log.failed"
    failed.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(
        target=run_tests, args=(checkout, given, first, log, limit)
    )
    process.start()
    process.join(20 * limit)
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    if process.exitcode in (-signal.SIGKILL, -signal.SIGXCPU):
        return NO_END
    if process.exitcode == 0:
        return ""
    if failed.exists():
        return failed.read_text()
    if "while loading conftest" in log.read_text():
        return "tests/conftest.py"
    raise RuntimeError(
        f"the tests ended with {process.exitcode}, and none failed:\n{log.read_text()[-3000:]}"
    )


def noticed(mutant: Mutant, touched: Touched, checkout: pathlib.Path, limit: int) -> str:
    """Which test notices it, "" where none does."""
    target, tests = checkout / mutant.path, touched.tests_for(mutant)
    if not tests:
        return NOT_RUN
    in_order = list(tests)
    batches = [
        batch for batch in (in_order[:FIRST], in_order[FIRST:THEN], in_order[THEN:]) if batch
    ]
    original = target.read_text()

    def write(text: str) -> None:
        target.write_text(text)
        os.utime(
            target, (time.time(), next(CLOCK))
        )  # no compiled file of another text is taken for this one's

    write(mutant.source)
    try:
        results = (
            outcome(checkout, batch, [x for file in batch for x in tests[file]], limit)
            for batch in batches
        )
        return next(filter(None, results), "")
    finally:
        write(original)


def main() -> int:
    """Runs them, prints those that nobody noticed, and returns 1 where they are more than
    allowed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=100, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which")
    parser.add_argument(
        "--only", default="", help="only files whose path begins so, or so: bridge/hooks,adapters"
    )
    parser.add_argument(
        "--limit", type=int, default=150, help="seconds of processor time for each process of tests"
    )
    parser.add_argument(
        "--numbers", default="", help="of these mutants only those with these numbers: 3,17"
    )
    parser.add_argument(
        "--touched", type=pathlib.Path, default=ROOT / ".mutants", help="what touched.py measured"
    )
    parser.add_argument("--allowed", type=int, default=None, help="fail where more are not noticed")
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    arguments = parser.parse_args()
    mutants = dict(enumerate(chosen(arguments.n, arguments.seed, arguments.only), 1))
    if arguments.numbers:
        mutants = {int(number): mutants[int(number)] for number in arguments.numbers.split(",")}
    found: dict[int, str] = {}
    lines = {
        number: f"{m.path}:{m.line}: {m.before}  ->  {m.after}" for number, m in mutants.items()
    }
    if arguments.list:
        print("\n".join(f"{number:4} {line}" for number, line in lines.items()))
        return 0
    touched = Touched(arguments.touched)
    with tempfile.TemporaryDirectory() as folder:
        checkout = pathlib.Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".mutants")
        shutil.copytree(ROOT, checkout, ignore=ignored)
        for number, mutant in mutants.items():
            found[number] = noticed(mutant, touched, checkout, arguments.limit)
            print(f"{number:4} {found[number] or 'NOT NOTICED'}\n     {lines[number]}", flush=True)
        by = sorted({test for test in found.values() if test not in ("", NO_END, NOT_RUN)})
        if by and (wrong := outcome(checkout, by, [], 100 * arguments.limit)):
            raise RuntimeError(f"without any change, {wrong} fails too: it says nothing")
    missed = [number for number, by in found.items() if by in ("", NOT_RUN)]
    open_ = [number for number, by in found.items() if by == NO_END]
    print(
        f"\nnoticed {len(found) - len(missed) - len(open_)} of {len(found)} (seed {arguments.seed})"
    )
    print("\n".join(["not noticed:", *(lines[number] for number in missed)]))
    print("\n".join([f"{NO_END}:", *(lines[number] for number in open_)]) if open_ else "")
    return int(arguments.allowed is not None and len(missed) + len(open_) > arguments.allowed)


if __name__ == "__main__":
    sys.exit(main())
