"""Measures the rows of `rows.py`, prints them, and writes them into benchmarks/RESULTS.md.

    python benchmarks/report.py [--write] [--only TABLE,...] [--seconds N] [--threads 1,4]
                                [--device cuda] [--dtype ...]
    python benchmarks/report.py --before REVISION [--only TABLE,...]

Each figure is the median of ratios of the same round to the column's first thing, with the values
between which half of the rounds lie, and stands beside what the first thing is to itself: done once
more in every round. On one thread (time of the processor; also its instructions, where the counter
exists) and with all cores (time on the clock). ``--before`` measures another revision in turn with
this one, in processes of their own.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import memory
import torch
import transformers
from alternated import Timed, alternated, spread
from rows import TABLES, Column, Table

import bridge

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "RESULTS.md"
#: Of one column: each row's figures, the first row's too.
Measured = dict[str, Timed]


def measured(column: Column, seconds: float, device: str) -> Measured:
    """What one column's things take."""
    jobs = column.jobs(device)
    with torch.set_grad_enabled(column.grad):
        clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else None
        found = alternated(jobs, 60, device, seconds, clock)
    del jobs
    gc.collect()
    return found


def cell(name: str, found: Measured) -> str:
    """One figure, with its spread; of the first row, its time."""
    timed = found.get(name)
    if timed is None:
        return "–"
    if name == next(iter(found)):
        return f"{timed.seconds * 1e3:.3g} ms"
    low, median, high = statistics.quantiles(timed.ratios, n=4, method="inclusive")
    counted = "" if timed.instructions is None else f"; {timed.instructions:.3f}"
    return f"{median:.3f} ({low:.2f}–{high:.2f}{counted})"


def as_table(columns: dict[str, Measured]) -> list[str]:
    """Columns as lines of Markdown. Rows in which another library does better than the row of ours
    before it stay.
    """
    names = list(dict.fromkeys(name for found in columns.values() for name in found))
    head = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    return head + [
        f"| {name} | " + " | ".join(cell(name, found) for found in columns.values()) + " |"
        for name in names
    ]


def machine(device: str) -> str:
    """Where and when this is measured."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        name = found[1] if found else name
    if device == "cuda":
        name = f"{torch.cuda.get_device_name()}, {name}"
    load = (
        f"{os.getloadavg()[0]:.1f} processes were at work when it began"
        if hasattr(os, "getloadavg")
        else ""
    )
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}, {os.cpu_count()} cores, {versions}, {datetime.date.today()}; {load}"


def write(name: str, lines: Iterable[str]) -> None:
    """Puts other lines between the two marks of a table in the page.

    Raises:
        ValueError: it has no such marks.
    """
    marks = re.compile(rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    page = PAGE.read_text(encoding="utf-8")
    if not marks.search(page):
        raise ValueError(
            f"{PAGE.name} has no place for {name}: <!-- measured: {name} --> and <!-- end -->"
        )
    text = "\n".join(lines)
    PAGE.write_text(
        marks.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page), encoding="utf-8"
    )


def in_words(threads: int) -> str:
    """How many threads."""
    return "One thread" if threads == 1 else f"{threads} threads"


def report(
    tables: list[Table], threads: list[int], seconds: float, device: str, to_page: bool
) -> None:
    """Measures tables, and prints or writes them."""
    where = machine(device)
    print(where, flush=True)
    for table in tables:
        lines: list[str] = []
        for number in threads:
            torch.set_num_threads(number)
            columns = [
                column
                for column in table.columns
                if not (column.large and number == 1 and device == "cpu")
            ]
            found = {column.title: measured(column, seconds, device) for column in columns}
            lines += [f"{in_words(number)}:", "", *as_table(found), ""]
        print(f"\n## {table.name}\n\n" + "\n".join(lines), flush=True)
        if to_page:
            write(table.name, lines[:-1])
    if to_page:
        write("machine", [f"{where}."])


def medians(tables: list[Table], seconds: float) -> dict[str, list[float]]:
    """On one thread, each row's ratios, and those of its null."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for table in tables:
        for column in table.columns:
            if not column.large:
                for name, timed in measured(column, seconds, "cpu").items():
                    found[f"{table.name} | {column.title} | {name}"] = timed.ratios
    return found


def compared(revision: str, only: str, seconds: float) -> None:
    """Prints each row as it was in another revision and as it is now, measured in turn."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["git", "worktree", "add", "--detach", "--force", folder, revision],
            cwd=ROOT,
            check=True,
        )
        try:
            sides: dict[str, dict[str, list[float]]] = {folder: {}, str(ROOT): {}}
            for _ in range(2):
                for side, rows in sides.items():
                    made = Path(folder) / "measured.json"
                    command = [
                        sys.executable,
                        __file__,
                        "--medians",
                        str(made),
                        "--seconds",
                        str(seconds),
                    ]
                    environment = os.environ | {"PYTHONPATH": side}
                    subprocess.run(
                        [*command, "--only", only], env=environment, cwd=side, check=True
                    )
                    for name, ratios in json.loads(made.read_text()).items():
                        rows.setdefault(name, []).extend(ratios)
            before, now = sides.values()
            print("| table | column | row | before | now |\n|---|---|---|---|---|")
            for name, ratios in now.items():
                old = before.get(name)
                print(f"| {name} | {'–' if old is None else spread(old)} | {spread(ratios)} |")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def main() -> None:
    """Prints or writes the figures."""
    names = [*(table.name for table in TABLES), "memory"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="into benchmarks/RESULTS.md")
    parser.add_argument("--only", default="", help=f"some of {', '.join(names)}")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="for each column; five rounds at least"
    )
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--before", help="another revision, measured in turn with this one, on one thread"
    )
    parser.add_argument("--medians", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_default_dtype(getattr(torch, arguments.dtype))
    wanted = [name for name in arguments.only.split(",") if name] or names
    if unknown := set(wanted) - set(names):
        parser.error(
            f"no table is called {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        )
    tables = [table for table in TABLES if table.name in wanted]
    if arguments.before:
        compared(arguments.before, arguments.only, arguments.seconds)
    elif arguments.medians:
        assert bridge.__file__
        Path(arguments.medians).write_text(json.dumps(medians(tables, arguments.seconds)))
    else:
        threads = [int(number) for number in dict.fromkeys(arguments.threads.split(","))]
        threads = threads if arguments.device == "cpu" else [1]
        report(tables, threads, arguments.seconds, arguments.device, arguments.write)
        if "memory" in wanted and arguments.device == "cpu":
            lines = memory.table(4096)
            print("\n## memory\n\n" + "\n".join(lines), flush=True)
            if arguments.write:
                write("memory", lines)


if __name__ == "__main__":
    main()
