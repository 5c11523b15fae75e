"""Changes the code at random, runs the tests that belong to what was changed, and lists what no test noticed.

    make mutants                        # a hundred changes
    python benchmarks/mutants.py --n 20 --seed 7 --only bridge/hooks

Each mutant is one change of one place: a comparison turned around, `and` for `or`, a condition negated, a number one
higher, `+` for `-`, a True for a False, a statement left out, a returned value dropped. They are made on the syntax
tree, in a copy of the checkout, and the same seed makes the same mutants. Nothing is changed in docstrings,
annotations, imports and the words of errors. Whether one that nobody noticed is equivalent (an optimisation left out,
say) is for a reader to judge: each is shown as a line before and after.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

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
    "bridge/export": "tests/export",
    "bridge/facade": "tests/run tests/hooks tests/weights tests/robustness tests/generation tests/trace tests/analysis",
    "bridge/facade/loading.py": "tests/loading tests/native",
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
    "bridge/run": "tests/run tests/robustness tests/hunt tests/hooks tests/matrix",
    "bridge/taps": "tests/taps tests/run tests/robustness tests/hunt tests/matrix tests/adapters",
    "bridge/tasks": "tests/tasks",
    "bridge/trace": "tests/trace",
    "bridge/weights": "tests/weights tests/analysis",
    "bridge/wiring": "tests/wiring tests/run tests/hooks tests/robustness tests/hunt tests/matrix",
    "weight_processing": "tests/weight_processing tests/robustness",
}

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


def changed(node: ast.AST) -> ast.AST | None:
    """The node with one thing changed, or None where nothing of it is to be."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in COMPARISONS:
        new.ops[0] = COMPARISONS[type(new.ops[0])]()
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
    return Mutant(path, index, getattr(node, "lineno", 0), before, after, ast.unparse(tree))


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


def tests_for(path: str) -> list[str]:
    """The tests of what a file belongs to."""
    fitting = [folder for folder in TESTS if path.startswith(folder)]
    return [test for test in TESTS[max(fitting, key=len)].split() if (ROOT / test).exists()]


def noticed(mutant: Mutant, checkout: pathlib.Path, limit: float, workers: str) -> str:
    """Which tests notice it, "" where none does."""
    target = checkout / mutant.path
    original = target.read_text()
    target.write_text(mutant.source)
    try:
        for test in tests_for(mutant.path):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
            command += ["-n", workers, test]
            environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
            try:
                run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, timeout=limit)
            except subprocess.TimeoutExpired:
                return f"{test} (it never ended)"
            if run.returncode not in (0, 5):  # 5: nothing there to run
                return test
        return ""
    finally:
        target.write_text(original)


def main() -> int:
    """Runs them, prints those that nobody noticed, and returns 1 where they are more than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=100, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which")
    parser.add_argument("--only", default="", help="only files whose path begins so")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one folder of tests")
    parser.add_argument(
        "--workers", default="auto", help="how many processes run the tests of one mutant (pytest-xdist)"
    )
    parser.add_argument("--allowed", type=int, default=None, help="fail where more are not noticed")
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    arguments = parser.parse_args()
    mutants = chosen(arguments.n, arguments.seed, arguments.only)
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        checkout = pathlib.Path(folder) / "checkout"
        if not arguments.list:
            ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache")
            shutil.copytree(ROOT, checkout, ignore=ignored)
        for number, mutant in enumerate(mutants, 1):
            where = f"{mutant.path}:{mutant.line}: {mutant.before}  ->  {mutant.after}"
            by = "listed" if arguments.list else noticed(mutant, checkout, arguments.limit, arguments.workers)
            print(f"{number:4} {by if by else 'NOT NOTICED':36} {where}", flush=True)
            if not by:
                missed.append(where)
    if not arguments.list:
        print(f"\nnoticed {len(mutants) - len(missed)} of {len(mutants)} (seed {arguments.seed}); not noticed:")
        print("\n".join(missed))
    return int(arguments.allowed is not None and len(missed) > arguments.allowed)


if __name__ == "__main__":
    sys.exit(main())
