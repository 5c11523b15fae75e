"""Run the tests of what changed, in under two minutes: `make quick`, `make quick FILES=a.py`.

Changed are the lines that differ from `HEAD` (or from `BASE=REVISION`), or whole files that are
named. Which tests run which lines was measured by `make mutants` (`benchmarks/touched.py`); the
lines of the measured version are those of `HEAD`, if nothing was committed since. Tests that run a
changed line come first by how few others share it, then by how quick they are, until the time is
used up. A changed file of tests is run whole. Without a measurement, the tests of the changed
files' rooms are run. `make test` remains what counts: the last line tells how many tests were left
out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

from tools.structure import PACKAGES, ROOT, room_of

MEASURED = ROOT / ".mutants"
#: Seconds of tests that are chosen, over both processes, and after which none is begun.
SECONDS, LIMIT = 150.0, 80.0
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? ", re.MULTILINE)


def changed_lines(base: str) -> dict[str, set[int]]:
    """Map each file that differs from a revision to its changed lines, as they were there."""
    command = ["git", "diff", "--unified=0", "--no-renames", base, "--", *PACKAGES, "tests"]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return lines_of_diff(diff)


def lines_of_diff(diff: str) -> dict[str, set[int]]:
    """Map each file of a diff without context to its changed lines, as they were before."""
    changed: dict[str, set[int]] = {}
    for part in diff.split("diff --git "):
        path = re.search(r" b/(\S+)", part)
        if path is None:
            continue
        lines: set[int] = set()
        for first, count in _HUNK.findall(part):
            start = int(first)
            lines.update(range(start, start + max(1, int(count or 1))))
        changed[path[1]] = lines
    return changed


def folders_to_run(paths: Iterable[str]) -> list[str]:
    """List the folders of tests that are named after the rooms of files."""
    folders: dict[str, None] = {}
    for path in paths:
        room = room_of(path).removeprefix("bridge/").strip("/") or "facade"
        inside = path.split("/")[1] if room == "adapters" else ""
        for folder in (f"tests/{room}/{inside}".rstrip("/"), f"tests/{room}"):
            if (ROOT / folder).is_dir():
                folders[folder] = None
                break
    return list(folders)


def measured_tests(changed: dict[str, set[int]]) -> list[str]:
    """List the tests that run changed lines, until their time is used up."""
    import coverage

    recorded = coverage.CoverageData(str(MEASURED / "touched"))
    recorded.read()
    seconds: dict[str, float] = json.loads((MEASURED / "seconds.json").read_text())
    weights: defaultdict[str, float] = defaultdict(float)
    for path, lines in changed.items():
        contexts = recorded.contexts_by_lineno(path)
        for line in lines or contexts:
            tests = [test for test in contexts.get(line, ()) if test]
            for test in tests:
                weights[test] += 1 / len(tests)

    def order(test: str) -> float:
        return -weights[test] / (0.2 + seconds.get(test, 1.0))

    chosen: list[str] = []
    total = 0.0
    for test in sorted(weights, key=order):
        total += seconds.get(test, 1.0)
        if total > SECONDS:
            break
        chosen.append(test)
    return [test for test in chosen if (ROOT / test.split("::")[0]).exists()]


class TimeLimit:
    """A plugin that begins no test after a number of seconds, and tells how many are left out."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.left_out = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Skip a test that would begin too late."""
        if time.monotonic() > self.end:
            self.left_out += 1
            item.add_marker(pytest.mark.skip(reason=f"not begun after {LIMIT:.0f} s"))
        return (yield)


def main(arguments: list[str]) -> int:
    """Choose the tests and run them."""
    base = next((word[7:] for word in arguments if word.startswith("--base=")), "HEAD")
    files = [word for word in arguments if not word.startswith("--")]
    changed: dict[str, set[int]] = {path: set() for path in files} if files else changed_lines(base)
    own = [path for path in changed if path.startswith("tests/") and "/test_" in path]
    ours = {path: lines for path, lines in changed.items() if path.split("/")[0] in PACKAGES}
    if not changed:
        print(f"nothing differs from {base}: name FILES, or BASE=REVISION")
        return 0
    if (MEASURED / "touched").exists():
        tests = measured_tests(ours)
    else:
        tests = folders_to_run(ours)
        print("which tests run which lines was not measured: `make .mutants/touched` does it once")
    tests += [path for path in own if (ROOT / path).exists() and path not in tests]
    if not tests:
        print(f"no test runs any line of {', '.join(changed)}")
        return 1
    print(f"{len(tests)} tests or folders for {', '.join(changed)}")
    limit = TimeLimit(LIMIT)
    code = pytest.main(["-q", "-n", "0", "--maxfail=5", *tests], [limit])
    if limit.left_out:
        print(f"{limit.left_out} tests were left out after {LIMIT:.0f} seconds: make test runs all")
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
