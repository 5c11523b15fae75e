"""`make matrix`: the library in other versions of transformers, torch and Python, and
benchmarks/VERSIONS.md.

Each cell of the table is an environment of its own in `.matrix/`. In it run the declared families
and one use of every room (`tests/versions`), HookedTransformer's numbers, and a part of the suite.
What could not be installed here is in the table by name, as not measured.

    python benchmarks/versions.py [--only oldest,newest] [--pythons /path/to/python3.12 ...]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / ".matrix"
PAGE = ROOT / "benchmarks" / "VERSIONS.md"
#: The part of the page that is `installed.py`'s.
INSTALLED = "## Installed from the wheel\n"
#: The build for CPUs alone, which is small, and whose environment all cells with its Python start
#: from.
SMALL = "2.13.0"
PYTHON = "3.11"
#: How many processes run the tests of a cell.
JOBS = os.environ.get("JOBS", "2")


@dataclass(frozen=True)
class Cell:
    """One combination of versions."""

    transformers: str
    torch: str = SMALL
    python: str = PYTHON

    @property
    def name(self) -> str:
        return f"transformers-{self.transformers}-torch-{self.torch}-python-{self.python}"

    @property
    def which(self) -> str:
        """As a note names it."""
        python = "" if self.python == PYTHON else f" and Python {self.python}"
        return f"{self.transformers} with torch {self.torch}{python}"

    @property
    def row(self) -> re.Pattern[str]:
        """How its row of the table begins."""
        begin = f"| {self.transformers} | {self.torch}"
        return re.compile(rf"{re.escape(begin)}\S* \| {re.escape(self.python)}[ .]")


NEWEST = "5.23.0"
CELLS = (
    *map(
        Cell,
        (
            "5.9.0",
            "5.10.4",
            "5.12.1",
            "5.15.1",
            "5.18.0",
            "5.20.2",
            "5.21.1",
            "5.22.2",
            NEWEST,
            "5.24.0",
        ),
    ),
    Cell("5.9.0", "2.8.0"),
    *(Cell(NEWEST, torch) for torch in ("2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1")),
    Cell(NEWEST, "2.14.1", "3.12"),
    Cell(NEWEST, "2.15.0", "3.13"),
    Cell(NEWEST, "2.15.0", "3.14"),
)
#: The oldest of each library: together they are a cell of their own, in which transformers'
#: mixtures fail on a CPU.
NAMED = {"oldest": (Cell("5.9.0"), Cell(NEWEST, "2.8.0")), "newest": (Cell(NEWEST),)}

#: The parts of a cell: what the column is called, and the tests.
PARTS = {
    "families": ["tests/versions/test_families.py"],
    "rooms": ["tests/versions/test_rooms.py"],
    "reference numbers": [
        f"tests/{room}/test_reference.py" for room in ("adapters", "analysis", "weight_processing")
    ],
    "part of the suite": [
        "tests/lens/test_lens.py",
        "tests/cache/test_pickled.py",
        "tests/hooks/test_removal.py",
    ],
    "two processes": ["tests/sharded/test_sharded.py"],
}
#: What the tests need beside the library's own dependencies, without what is said to need torch.
TOOLS = [
    "pytest>=8",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "beartype>=0.20",
    "psutil>=6",
    "scikit-learn",
    "pyarrow>=18",
    "xxhash>=3.4",
]
#: What says that it needs torch, which is there: pip would look for all that this torch says it
#: needs.
NEED_TORCH = ["accelerate>=1.10", "peft>=0.18"]


class NotMeasured(Exception):
    """Why a cell could not be made here."""


def run(*command: str | Path, **options: str) -> str:
    """Runs a command; what it printed."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=ROOT, env=os.environ | options
    )
    if done.returncode:
        raise NotMeasured(
            f"{Path(str(command[0])).name} failed: {(done.stderr or done.stdout).strip()[-300:]}"
        )
    return done.stdout


def python_of(version: str, pythons: list[str]) -> str:
    """An interpreter of that version: one that was named, this one, or one on the path."""
    for path in (*pythons, sys.executable, shutil.which(f"python{version}") or ""):
        asked = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if (
            shutil.which(path)
            and subprocess.run(asked, capture_output=True, text=True).stdout.strip() == version
        ):
            return path
    raise NotMeasured(
        f"there is no Python {version} here; name one with PYTHONS=/path/to/python{version}"
    )


def environment(cell: Cell, pythons: list[str]) -> Path:
    """The interpreter of a cell's environment, which is made where it is not there."""
    folder = HERE / cell.name
    python = folder / "bin" / "python"
    if (folder / ".made").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    run(python_of(cell.python, pythons), "-m", "venv", folder)
    pip = (python, "-m", "pip", "install", "--quiet")
    if cell.python == PYTHON:  # beside the packages of this environment
        ours = run(sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        Path(site, "ours.pth").write_text(ours)
        listed = folder / "ours.txt"
        kept = "transformers|huggingface.hub|tokenizers|transformer.bridge"
        frozen = run(sys.executable, "-m", "pip", "freeze", "--exclude-editable").splitlines()
        listed.write_text(
            "\n".join(line for line in frozen if not re.match(kept, line) and "@" not in line)
        )
        run(*pip, "-c", listed, f"transformers=={cell.transformers}")
        if cell.torch != SMALL:
            run(*pip, "--no-deps", f"torch=={cell.torch}")
            run(sys.executable, "benchmarks/without_cuda.py", folder)
    else:
        run(*pip, "--no-deps", f"torch=={cell.torch}")
        asked = run(
            python, "-c", "import importlib.metadata as m; print(*m.requires('torch'), sep='\\n')"
        ).splitlines()
        needs = [
            need
            for need in asked
            if "extra ==" not in need and not re.match("nvidia|cuda|triton", need)
        ]
        run(*pip, *needs)
        run(sys.executable, "benchmarks/without_cuda.py", python.parent.parent)
        own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        run(
            *pip,
            f"transformers=={cell.transformers}",
            *(need for need in own if not need.startswith("tor")),
            *TOOLS,
        )
        run(*pip, "--no-deps", *NEED_TORCH)
    (folder / ".made").touch()
    return python


def measured(cell: Cell, pythons: list[str], parts: Iterable[str] = PARTS) -> dict[str, Any]:
    """What a cell's tests came to, by part."""
    python = environment(cell, pythons)
    libraries = "transformers.__version__, torch.__version__, platform.python_version()"
    printed = run(python, "-c", f"import platform, torch, transformers; print({libraries})").split()
    found: dict[str, Any] = dict(zip(("transformers", "torch", "python"), printed, strict=True))
    written = HERE / f"{cell.name}.xml"
    written.unlink(missing_ok=True)
    tests = [test for part in parts for test in PARTS[part]]
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-n",
        JOBS,
        "-p",
        "no:cacheprovider",
        f"--junitxml={written}",
        *tests,
    ]
    options = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "UNCHECKED": "1",
    }
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=ROOT, env=os.environ | options
    )
    if not written.exists():
        raise NotMeasured(f"pytest did not run: {(done.stderr or done.stdout).strip()[-300:]}")
    cases = list(ET.parse(written).iter("testcase"))
    for part in parts:
        modules = {file.removesuffix(".py").replace("/", ".") for file in PARTS[part]}
        found[part] = counted([case for case in cases if case.get("classname") in modules])
        if not found[part]["passed"]:
            raise NotMeasured(f"no test of {part} passed: {done.stdout.strip()[-300:]}")
    return found


def counted(cases: list[ET.Element]) -> dict[str, Any]:
    """How many tests passed, which failed, and what was skipped or expected to fail, with the
    reasons.
    """
    passed = 0
    failed: list[str] = []
    told: dict[str, str] = {}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif (skipped := case.find("skipped")) is not None:
            told[name] = str(skipped.get("message"))
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "told": told}


def page(results: dict[str, dict[str, Any]], before: str) -> str:
    """benchmarks/VERSIONS.md: what was measured now, and what the page said before of other cells."""
    rows: list[str] = []
    notes = told_before(before, {cell.which for cell in CELLS if cell.name in results})
    for cell in CELLS:
        found = results.get(cell.name)
        if found is None:
            there = [line for line in before.splitlines() if cell.row.match(line)]
            rows += [
                line + " not measured |" * (len(PARTS) + 4 - line.count("|")) for line in there
            ]
        elif "not measured" in found:
            rows.append(
                f"| {cell.transformers} | {cell.torch} | {cell.python} | not measured here | |"
                " | | |"
            )
            notes.setdefault(found["not measured"], []).append(cell.which)
        else:
            cells = [short(found[part]) for part in PARTS]
            rows.append(
                f"| {found['transformers']} | {found['torch']} | {found['python']} |"
                f" {' | '.join(cells)} |"
            )
            for part in PARTS:
                for note in said(found[part], part):
                    notes.setdefault(note.replace(f" {cell.transformers} ", " "), []).append(
                        cell.which
                    )
    lines = [f"- {note}. ({'; '.join(cells)})" for note, cells in notes.items()]
    return "\n".join([HEAD, *rows, "", "What did not pass, and where:", "", *lines, "", TAIL])


def told_before(page: str, but: set[str]) -> dict[str, list[str]]:
    """The page's notes, each with the cells that it is of; those of some cells are left out."""
    found: dict[str, list[str]] = {}
    for line in page.splitlines():
        if note := re.fullmatch(r"- (.*)\. \((\d[^()]* with torch [^()]*)\)", line):
            kept = [which for which in note[2].split("; ") if which not in but]
            found |= {note[1]: kept} if kept else {}
    return found


def short(found: dict[str, Any]) -> str:
    total = found["passed"] + len(found["failed"]) + len(found["told"])
    failed = f", {len(found['failed'])} fail" if found["failed"] else ""
    return f"{found['passed']} of {total}{failed}"


def said(found: dict[str, Any], part: str) -> Iterator[str]:
    """What is to be said of tests of a part that did not pass."""
    if found["failed"]:
        yield "fails: " + ", ".join(f"`{name.split('::')[-1]}`" for name in found["failed"])
    reasons: dict[str, list[str]] = {}
    for name, reason in found["told"].items():
        told = re.sub(
            ", and [^ ]+ is installed",
            "",
            reason.split(": pip")[0].removeprefix("refused by name: "),
        )
        reasons.setdefault(told, []).append(f"`{name.split('::')[-1]}`")
    for told, names in reasons.items():
        yield f"{', '.join(names) if len(names) < 5 else f'{len(names)} tests of {part}'}: {told}"


HEAD = """# Versions

`make matrix` measured which versions work: each row is a separate environment, and each number counts tests that
passed. *Families*: tiny random models; logits equal to Hugging Face's bit by bit, the cache, the pattern against
the model's own, an edit against a plain torch hook, generated tokens, `verify`. *Features*: one use of each part of
the library. *Reference numbers*: comparisons with HookedTransformer's numbers. *Two processes*: the tests of
`tests/sharded` that use two processes.

| transformers | torch | Python | families | features | reference numbers | part of the suite | two processes |
|---|---|---|---|---|---|---|---|"""
TAIL = """torch `2.13.0+cpu` is the build for CPUs. The others are builds for CUDA, run on a CPU with empty libraries
in place of CUDA's (`benchmarks/without_cuda.py`).

`adapters/imports.py` lists all differences between versions, with the reasons. If a version does not support
something that you use, an error names the required version: `export` needs transformers 5.23 and torch 2.11,
loading with patches transformers 5.21, `generate_batch` 5.20, tensor parallelism 5.16, a gradient hook in a block with
activation checkpointing 5.23.
In thirteen classes transformers 5.15 or 5.21 changed the mixture or the block (DeepSeek V3, Granite's mixtures, Moshi).
In earlier versions, their adapter is inferred from a run. If a version itself computes something incorrectly,
`adapters.verify` says so.

From 5.24 on, transformers uses another name for the model's `past_key_values`: `cache`. A run, a trace, a program and
`generate` take both names, in every version. From 5.24 on, `generate_batch` raises an error for GPT-NeoX and others,
because their attention omits an argument that transformers' own paged cache needs.

All 32 tests of two processes (`tests/sharded`) pass with torch 2.12.1, 2.13.0 and 2.14.1. With 2.11.0 and 2.10.0, the
gradients of Mixtral's parameters fail. With 2.10.0 and earlier, `process_weights` also fails, and so does a pass of
`generate_batch` after one that raised an error (torch loses the mask of an embedding whose rows are split over
processes). With 2.8.0, adapters fail too, which are not supported anyway. With transformers 5.24, one test fails here
because it needs a later PEFT than is installed. Each failure is torch's own error about meshes, placements or that
mask, never a wrong number.

The lower bounds in `pyproject.toml` are the lowest versions with which everything works, except as listed above: for
transformers, together with torch 2.13.0; for torch, together with transformers 5.23.0. Both lowest versions together
work except for
transformers' own mixtures on a CPU. Versions between two rows were not measured. The rows of torch 2.15 are from before
NumPy 2.5.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", default="", help="cells: oldest, newest, or parts of their names, with commas"
    )
    parser.add_argument("--pythons", nargs="*", default=[], help="interpreters")
    parser.add_argument(
        "--check", action="store_true", help="fail where a test fails, and leave the page as it is"
    )
    given = parser.parse_args()
    chosen = [
        cell
        for cell in CELLS
        if not given.only
        or any(
            cell in NAMED.get(word, ()) or (word not in NAMED and word in cell.name)
            for word in given.only.split(",")
        )
    ]
    HERE.mkdir(exist_ok=True)
    failed = []
    # With an old torch some things fail over two processes, in torch's own code: the page says
    # which.
    parts = [part for part in PARTS if not (given.check and part == "two processes")]
    for cell in chosen:
        try:
            found = measured(cell, given.pythons, parts)
            failed += [name for part in parts for name in found[part]["failed"]]
        except NotMeasured as why:
            found = {"not measured": str(why)}
            failed += [f"{cell.name}: {why}"] if given.check else []
        (HERE / f"{cell.name}.json").write_text(json.dumps(found, indent=1))
        cells = (
            [short(found[part]) for part in parts]
            if "not measured" not in found
            else [found["not measured"]]
        )
        print(cell.name, *cells, sep="  ", flush=True)
    if not given.check:
        before, title, installed = PAGE.read_text().partition(INSTALLED)
        results = {path.stem: json.loads(path.read_text()) for path in HERE.glob("*.json")}
        PAGE.write_text(page(results, before) + "\n" + title + installed)
    if given.check and failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
