"""Lets torch's build for CUDA be imported where CUDA's libraries are not: empty ones stand in their
place.

torch links to libraries of two gigabytes that a CPU never calls. For each that is missing an empty
one is made, with the names that torch asks for; a call of one ends the process. In CUDA's runtime,
which torch calls as it is imported and when it is asked for a device, each says that there is none.
It needs gcc, objdump and nm. For `make matrix` alone.

    python benchmarks/without_cuda.py FOLDER_OF_AN_ENVIRONMENT
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

#: CUDA's number for it: cudaErrorNoDevice.
NO_DEVICE = 100


def output(*command: str | Path) -> str:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=True
    ).stdout


def body_of(name: str) -> str:
    """What a function of CUDA's runtime returns: what is wrong, as a text or as a number."""
    return (
        'return (long) "no device";' if name.startswith("cudaGetError") else f"return {NO_DEVICE};"
    )


def main(environment: Path) -> None:
    (site,) = environment.glob("lib/python3*/site-packages")
    libraries = sorted((site / "torch" / "lib").glob("*.so*"))
    needed: set[str] = set()
    defined: set[str] = set()
    asked: set[tuple[str, str]] = set()  # names, and the versions of them
    owner: dict[str, str] = {}  # which library a version is of
    for library in libraries:
        head = output("objdump", "-p", library)
        needed |= set(re.findall(r"NEEDED\s+(\S+)", head))
        for name, lines in re.findall(r"required from (\S+):\n((?:\s+0x.*\n)+)", head):
            owner |= dict.fromkeys(re.findall(r"0x\S+ 0x\S+ \d+ (\S+)", lines), name)
        for kind, symbol in re.findall(
            r"^\s*(?:[0-9a-f]+)?\s+(\w) (\S+)$", output("nm", "-D", library), re.MULTILINE
        ):
            name, _, version = symbol.partition("@")
            if kind == "U":
                asked.add((name, version.lstrip("@")))
            else:
                defined.add(name)
    there = {path.name for path in [*libraries, *site.glob("nvidia/**/*.so*")]}
    loose = {
        name
        for name, version in asked
        if not version and name not in defined and re.match(r"(cu|nccl|nv)\w", name)
    }
    for missing in sorted(name for name in needed - there if re.match(r"lib(cu|nv|nccl)", name)):
        versions: dict[str, list[str]] = {}
        for name, version in asked:
            if version and owner[version] == missing:
                versions.setdefault(version, []).append(name)
        names = {*loose, *(name for own in versions.values() for name in own)}
        with tempfile.TemporaryDirectory() as folder:
            code, table = Path(folder, "empty.c"), Path(folder, "empty.map")
            runtime = missing.startswith("libcudart")
            bodies = "\n".join(
                f"long {name}(void) {{ {body_of(name) if runtime else 'abort();'} }}"
                for name in sorted(names)
            )
            code.write_text(f"void abort(void);\n{bodies}\n")
            table.write_text(
                "".join(f"{v} {{ global: {'; '.join(own)}; }};\n" for v, own in versions.items())
            )
            options = [f"-Wl,--version-script={table}"] if versions else []
            target = site / "torch" / "lib" / missing
            output(
                "gcc",
                "-shared",
                "-fPIC",
                "-w",
                "-fno-builtin",
                "-o",
                target,
                f"-Wl,-soname,{missing}",
                code,
                *options,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
