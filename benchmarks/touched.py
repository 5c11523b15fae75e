"""Which test runs which line of the library, and how long each test takes: what `make mutants`
chooses tests by.

    python benchmarks/touched.py .mutants       # runs the whole suite once, in two processes

It is a plugin of pytest, too: each process of a run writes what coverage.py saw of it, with the
name of the test as the context. What a pytest runs that a test starts belongs to that test. Lines
that run when a module is imported belong to no test, and are not looked at; nor are those of other
programs that a test starts.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections import defaultdict
from collections.abc import Iterator

import coverage
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ("bridge", "adapters", "weight_processing")
#: Variables of the environment: where a run writes, and the test that started it.
FOLDER, STARTED_BY = "TOUCHED", "TOUCHED_BY"


class Recorder:
    """Tells coverage.py which test is running, and adds up the seconds of each."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.coverage = coverage.Coverage(
            data_file=str(folder / "lines"),
            data_suffix=True,
            config_file=False,
            concurrency=["thread", "greenlet"],
            source=[str(ROOT / room) for room in ROOMS],
            messages=False,
        )
        self.coverage.set_option(
            "run:disable_warnings", ["module-not-imported", "no-data-collected"]
        )
        self.coverage.set_option("run:relative_files", True)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if sys.gettrace() is None:  # a test before turned it off
            self.coverage.stop()
            self.coverage.start()
        started_by = os.environ.setdefault(STARTED_BY, item.nodeid)
        self.coverage.switch_context(started_by)
        try:
            return (yield)
        finally:
            self.coverage.switch_context("")
            if started_by == item.nodeid:
                del os.environ[STARTED_BY]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        (self.folder / f"seconds.{os.getpid()}.json").write_text(json.dumps(self.seconds))


def pytest_configure(config: pytest.Config) -> None:
    """Records in the processes that run tests: with pytest-xdist not in the one that hands them
    out.
    """
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        config.pluginmanager.register(Recorder(pathlib.Path(os.environ[FOLDER])))


def main() -> int:
    """Runs the tests that are named, or all of them."""
    folder = pathlib.Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    os.environ["PYTEST_PLUGINS"] = "touched"
    code = pytest.main(sys.argv[2:] or ["-n", "2"])
    lines = coverage.CoverageData(str(folder / "touched"))
    seconds: dict[str, float] = {}
    for part in folder.glob("lines.*"):
        one = coverage.CoverageData(str(part))
        one.read()
        lines.update(one)
        part.unlink()
    for part in folder.glob("seconds.*.json"):
        seconds |= json.loads(part.read_text())
        part.unlink()
    lines.write()
    (folder / "seconds.json").write_text(json.dumps(seconds))
    return (
        0 if code == pytest.ExitCode.TESTS_FAILED else int(code)
    )  # some count what is alive, and what records is


if __name__ == "__main__":
    sys.exit(main())
