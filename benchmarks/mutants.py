"""Changes the code at random, runs the tests that belong to what was changed, and lists what no test noticed.

    make mutants                        # a hundred changes
    python benchmarks/mutants.py --n 20 --seed 7 --only bridge/hooks

Each mutant is one change of one place: a comparison turned around, `and` for `or`, a condition negated, a number one
higher, `+` for `-`, a True for a False, a statement left out, a returned value dropped. They are made on the syntax
tree, in a copy of the checkout, and the same seed makes the same mutants. Nothing is changed in docstrings,
annotations, imports and the words of errors. Whether one that nobody noticed is equivalent (an optimisation left out,
say) is for a reader to judge: each is shown as a line before and after.

The tests of the rooms in `TESTS` are run, in one process that stops at the first failure, those files first that name
the changed function. A test counts only where it passes without the change: they are run again at the end.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
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

import pytest
import transformers.pytorch_utils  # noqa: F401  with torch: what every test needs, imported once

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ("bridge", "adapters", "weight_processing")
#: What is not a part of the library that computes anything.
LEFT_OUT = ("bridge/legacy", "bridge/embedded/train.py", "bridge/cli")
#: The tests that are run for a change in a folder, those that notice most first; the longest path that fits counts.
TESTS = {
    "adapters": "tests/adapters tests/matrix tests/weights tests/robustness tests/run",
    "bridge": "tests/run tests/hooks tests/robustness tests/matrix",
    "bridge/analysis": "tests/analysis tests/weights tests/hunt",
    "bridge/cache": "tests/cache tests/run tests/analysis",
    "bridge/circuits": "tests/circuits",
    "bridge/embedded": "tests/embedded",
    "bridge/export": "tests/programs",
    "bridge/facade": "tests/run tests/hooks tests/weights tests/robustness tests/generation tests/trace tests/analysis",
    "bridge/facade/loading.py": "tests/loading tests/native",
    "bridge/facade/lenses.py": "tests/lens tests/analysis",
    "bridge/facade/processing.py": "tests/weight_processing",
    "bridge/facade/tokens.py": "tests/run/test_tokens.py tests/robustness",
    "bridge/generation": "tests/generation tests/hunt tests/trace tests/robustness",
    "bridge/harvest": "tests/harvest",
    "bridge/hooks": "tests/hooks tests/run tests/robustness tests/hunt tests/taps tests/matrix",
    "bridge/lens": "tests/lens tests/robustness",
    "bridge/loading": "tests/loading",
    "bridge/native": "tests/native",
    "bridge/patching": "tests/patching",
    "bridge/pictures": "tests/pictures",
    "bridge/programs": "tests/programs",
    "bridge/run": "tests/run tests/robustness tests/hunt tests/hooks tests/matrix",
    "bridge/taps": "tests/taps tests/run tests/robustness tests/hunt tests/matrix tests/adapters",
    "bridge/tasks": "tests/tasks",
    "bridge/trace": "tests/trace",
    "bridge/weights": "tests/weights tests/analysis",
    "bridge/wiring": "tests/wiring tests/run tests/hooks tests/robustness tests/hunt tests/matrix",
    "weight_processing": "tests/weight_processing tests/robustness",
}

#: What is said of a mutant that no test noticed in the time there was: it hangs, or more time is needed to know.
NO_END = "the tests did not end"
#: The times of files as they are changed and put back: each a second later, which is what compiled files tell apart.
CLOCK = itertools.count(int(time.time()))

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip


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
        if name in ("annotation", "returns", "decorator_list", "type_params") or isinstance(tree, ast.Raise):
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
    new = ast.copy_location(changed(node) or node, node)
    before, after = (ast.unparse(x).splitlines()[0] for x in (node, new))
    if at is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[at] = new
    ast.fix_missing_locations(tree)
    line = getattr(node, "lineno", 0)
    return Mutant(path, index, line, before, after, ast.unparse(tree), names_around(path, line))


def names_around(path: str, line: int) -> tuple[str, ...]:
    """The classes and functions that a line stands in."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, kinds)]
    return tuple(node.name for node in nodes if node.lineno <= line <= (node.end_lineno or 0) and "__" not in node.name)


def files(only: str) -> list[str]:
    """The files that are mutated."""
    every = sorted(str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return [path for path in every if path.startswith(only) and not path.startswith(LEFT_OUT)]


def chosen(n: int, seed: int, only: str) -> list[Mutant]:
    """Random mutants: every place of every file is as likely."""
    every = [
        (name, index)
        for name in files(only)
        for index in range(sum(1 for _ in places(ast.parse((ROOT / name).read_text()))))
    ]
    return [mutant_of(*place) for place in random.Random(seed).sample(every, min(n, len(every)))]


def tests_for(mutant: Mutant) -> list[str]:
    """The files of tests of what was changed, those first that speak of it: of its function, then of its file."""
    fitting = [folder for folder in TESTS if mutant.path.startswith(folder)]
    rooms = [ROOT / test for test in TESTS[max(fitting, key=len)].split()]
    found = [file for room in rooms for file in ([room] if room.is_file() else sorted(room.rglob("test_*.py")))]
    near, stem = pathlib.Path(mutant.path).with_suffix("").parts[-1], mutant.path.rsplit("/", 1)[0].replace("/", ".")
    texts = {file: file.read_text() for file in found}

    def score(file: pathlib.Path) -> tuple[int, int, int]:
        words = [name for name in mutant.inside if re.search(rf"\b{name}\b", texts[file])]
        room = next(number for number, room in enumerate(rooms) if file == room or room in file.parents)
        return (-len(words), -(f"{stem}.{near}" in texts[file] or near in file.stem), room)

    return [str(file.relative_to(ROOT)) for file in sorted(texts, key=score)]


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


def run_tests(checkout: pathlib.Path, tests: list[str], log: pathlib.Path, limit: int) -> None:
    """In a process of its own, which has torch and transformers already: one pytest that stops at the first failure."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(checkout)
    os.environ["PYTHONPATH"] = str(checkout)
    sys.path[:] = [str(checkout), *(path for path in sys.path if path not in (str(ROOT), str(ROOT / "benchmarks"), ""))]
    known = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins that were imported here before
    code = pytest.main(
        ["-x", "-n", "0", "--no-header", "-p", "no:cacheprovider", *known, *tests],
        [Failed(log.with_name("log.failed"))],
    )
    sys.stdout.flush()
    os._exit(int(code))


def outcome(checkout: pathlib.Path, tests: list[str], limit: int) -> str:
    """The first of the tests that fails, "" where all pass, `NO_END` where they take longer."""
    log, failed = checkout.parent / "log", checkout.parent / "log.failed"
    failed.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(checkout, tests, log, limit))
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
    raise RuntimeError(f"the tests ended with {process.exitcode}, and none failed:\n{log.read_text()[-3000:]}")


def noticed(mutant: Mutant, checkout: pathlib.Path, limit: int) -> str:
    """Which test notices it, "" where none does."""
    target, tests = checkout / mutant.path, tests_for(mutant)
    original = target.read_text()

    def write(text: str) -> None:
        target.write_text(text)
        os.utime(target, (time.time(), next(CLOCK)))  # no compiled file of another text is taken for this one's

    write(mutant.source)
    try:
        return outcome(checkout, tests, limit)
    finally:
        write(original)


def main() -> int:
    """Runs them, prints those that nobody noticed, and returns 1 where they are more than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=100, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which")
    parser.add_argument("--only", default="", help="only files whose path begins so")
    parser.add_argument("--limit", type=int, default=600, help="seconds of processor time for the tests of one mutant")
    parser.add_argument("--numbers", default="", help="of these mutants only those with these numbers: 3,17")
    parser.add_argument("--allowed", type=int, default=None, help="fail where more are not noticed")
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    arguments = parser.parse_args()
    mutants = dict(enumerate(chosen(arguments.n, arguments.seed, arguments.only), 1))
    if arguments.numbers:
        mutants = {int(number): mutants[int(number)] for number in arguments.numbers.split(",")}
    found: dict[int, str] = {}
    lines = {number: f"{m.path}:{m.line}: {m.before}  ->  {m.after}" for number, m in mutants.items()}
    if arguments.list:
        print("\n".join(f"{number:4} {line}" for number, line in lines.items()))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = pathlib.Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, checkout, ignore=ignored)
        for number, mutant in mutants.items():
            found[number] = noticed(mutant, checkout, arguments.limit)
            print(f"{number:4} {found[number] or 'NOT NOTICED'}\n     {lines[number]}", flush=True)
        by = sorted({test for test in found.values() if test not in ("", NO_END)})
        if by and (wrong := outcome(checkout, by, 100 * arguments.limit)):
            raise RuntimeError(f"without any change, {wrong} fails too: it says nothing")
    missed = [number for number, by in found.items() if not by]
    open_ = [number for number, by in found.items() if by == NO_END]
    print(f"\nnoticed {len(found) - len(missed) - len(open_)} of {len(found)} (seed {arguments.seed})")
    print("\n".join(["not noticed:", *(lines[number] for number in missed)]))
    print("\n".join([f"{NO_END}:", *(lines[number] for number in open_)]) if open_ else "")
    return int(arguments.allowed is not None and len(missed) + len(open_) > arguments.allowed)


if __name__ == "__main__":
    sys.exit(main())
