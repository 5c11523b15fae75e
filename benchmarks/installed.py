"""`make extras`: the wheel, installed where nothing is, with each extra alone, and used; a part of
benchmarks/VERSIONS.md.

Each row is a new environment: torch's build for CPUs, then the wheel of `dist/` with one extra,
then what that extra is for (`tests/distribution/uses.py`). Without an extra it is the README's
first example, also with an older transformers. Then what pip would choose beside other libraries;
nothing of that is installed.

    python benchmarks/installed.py [--only pictures,onnx,beside]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from benchmarks.versions import HERE, INSTALLED, NEWEST, PAGE, ROOT, SMALL, NotMeasured, run
from tests.distribution.uses import BRIDGE, COMMANDS, USES

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
HEAD = f"""{INSTALLED}
Measured by `make extras`: in each row, torch {SMALL} for CPUs is installed in an empty environment, then the wheel
with that extra and its dependencies; then the features that need the extra are run (`tests/distribution/uses.py`),
outside the checkout.

| extra | transformers | packages | size | what was run | |
|---|---|---|---|---|---|
"""
#: What people use beside it.
NEIGHBOURS = ("sae-lens", "nnsight", "peft", "accelerate", "vllm", "lm-eval")
BESIDE = "## Beside other libraries\n"
BESIDE_HEAD = f"""{BESIDE}
The versions that pip selects if the wheel and another library are installed together in an empty environment
(`--dry-run`). `bridge.engine` needs vLLM 0.32, which the extra `vllm` installs.

| library | transformers | torch | packages |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """What is installed."""

    extra: str = ""
    transformers: str = NEWEST

    @property
    def name(self) -> str:
        return self.extra or f"none-{self.transformers}"

    def written(self, packages: int, size: int, result: str) -> str:
        done = "the README's first example" if not self.extra else "what it is for"
        if self.extra in COMMANDS:
            done = (
                " ".join(COMMANDS[self.extra][:2])
                if self.extra != "notebooks"
                else "a notebook of `examples/`"
            )
            done = re.sub(r"^-m (\w+)", r"`\1`", done)
        return f"{self.begin} {packages} | {size} MB | {done} | {result} |"

    @property
    def begin(self) -> str:
        return f"| {self.extra or 'none'} | {self.transformers} |"


#: What runs on CUDA alone: `make engine` tries it otherwise.
NOT_HERE = ("vllm",)
ROWS = (Row(), Row(transformers="5.15.1"), *map(Row, EXTRAS))


def first_example() -> str:
    """The first Python of the README."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found
    return found[1]


def installed(row: Row, wheel: Path) -> Path:
    """The interpreter of a new environment with torch, the wheel and the extra; the first two are
    put there once.
    """
    base, folder = HERE / f"wheel-{row.transformers}", HERE / "installed"
    kept = HERE / "kept.txt"
    kept.write_text(f"torch=={SMALL}\ntransformers=={row.transformers}\n")
    # -I: what is in the checkout does not count as installed.
    pip = ("-I", "-m", "pip", "install", "--quiet", "-c", kept)
    if not base.exists():
        making = HERE / "making"
        shutil.rmtree(making, ignore_errors=True)
        run(sys.executable, "-m", "venv", making)
        run(making / "bin" / "python", *pip, f"torch=={SMALL}")
        run(making / "bin" / "python", *pip, wheel)
        making.rename(base)
    shutil.rmtree(folder, ignore_errors=True)
    run("cp", "-al", base, folder)
    python = folder / "bin" / "python"
    if row.extra:
        run(python, *pip, f"{wheel}[{row.extra}]")
    return python


def measured(row: Row, wheel: Path, source: Path) -> str:
    """Installs and uses it; its row of the table."""
    python = installed(row, wheel)
    names = run(python, "-I", "-m", "pip", "list", "--format=freeze").splitlines()
    if brought := [name for name in names if name.startswith(("nvidia", "cuda", "triton"))]:
        raise NotMeasured(f"it brings what is for CUDA alone: {', '.join(brought)}")
    folder = python.parent.parent
    size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) >> 20
    used(python, row, source)
    shutil.rmtree(folder)
    return row.written(len(names), size, "works")


def used(python: Path, row: Row, source: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "UNCHECKED": "1"}
    with tempfile.TemporaryDirectory() as empty:
        command = COMMANDS.get(row.extra) or ["-c", BRIDGE + USES[row.extra]]
        commands = [command] if row.extra else [["-c", first_example()], command]
        for each in commands:
            done = subprocess.run(
                [str(python), *each],
                capture_output=True,
                text=True,
                env=environment,
                cwd=source if row.extra in COMMANDS else empty,
            )
            if done.returncode:
                raise NotMeasured(f"fails: {(done.stderr.strip() or done.stdout.strip())[-600:]}")


def beside(wheel: Path) -> None:
    """Writes the page's last table: what pip chooses where the wheel is asked for together with
    another library.
    """
    python = HERE / "empty" / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", python.parent.parent)
    lines = []
    for name in NEIGHBOURS:
        asked = (
            "-I",
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--ignore-installed",
            "--quiet",
            "--report",
            "-",
            wheel,
            name,
        )
        try:
            chosen = [each["metadata"] for each in json.loads(run(python, *asked))["install"]]
            versions = {
                re.sub("[_.]", "-", each["name"].lower()): each["version"] for each in chosen
            }
            lines.append(
                f"| {name} {versions[name]} | {versions['transformers']} | {versions['torch']} |"
                f" {len(chosen)} |"
            )
        except NotMeasured as why:
            print(f"{name}: {why}", file=sys.stderr, flush=True)
            lines.append(f"| {name} | does not resolve | | |")
        print(lines[-1], flush=True)
    PAGE.write_text(
        PAGE.read_text().partition(BESIDE)[0].rstrip()
        + "\n\n"
        + BESIDE_HEAD
        + "\n".join(lines)
        + "\n"
    )


def write(row: Row, line: str) -> None:
    """Puts a row into the page's table; the others stay."""
    before, _, behind = PAGE.read_text().partition(INSTALLED)
    table, title, last = behind.partition(BESIDE)
    there = {
        other: found
        for other in ROWS
        for found in table.splitlines()
        if found.startswith(other.begin)
    }
    there[row] = line
    lines = [there.get(other, f"{other.begin} | | | not measured |") for other in ROWS]
    PAGE.write_text(before.rstrip() + "\n\n" + HEAD + "\n".join(lines) + "\n\n" + title + last)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", default="", help="names of extras, none-5.23.0 or beside, with commas"
    )
    given = parser.parse_args()
    (wheel,) = (ROOT / "dist").glob("*.whl")
    HERE.mkdir(exist_ok=True)
    for base in HERE.glob("wheel-*"):
        if base.stat().st_mtime < wheel.stat().st_mtime:
            shutil.rmtree(base)
    if not given.only or "beside" in given.only.split(","):
        beside(wheel)
    failed = []
    for row in ROWS:
        if row.extra in NOT_HERE or (given.only and row.name not in given.only.split(",")):
            continue
        try:
            line = measured(row, wheel, ROOT / "build" / "sdist")
        except NotMeasured as why:
            failed.append(row.name)
            print(f"{row.name}: {why}", file=sys.stderr, flush=True)
            line = row.written(0, 0, "fails")
        print(line, flush=True)
        write(row, line)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
