"""TransformerLens' own tests, run on ours with the import changed: what passes on theirs passes,
but for a list.

`make suites`: those of 2.18, and those of 4.3 that are of its public API. Both libraries run here,
without a network, on the hub of small models in `programs/hub.py`: what does not pass on theirs
then (it needs another model, trained weights, or a GPU) says nothing of ours. `suites.toml` lists
what passes there and not here.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter

import pytest

from tests.clients.programs import hub

HERE = pathlib.Path(__file__).parent
VOCABULARY, SITE = os.environ.get("PROGRAMS_VOCABULARY", ""), os.environ.get("PROGRAMS_SITE", "")
LISTED = tomllib.loads((HERE / "suites.toml").read_text())
#: Of each version: where its `tests` are, and the Python that has it.
VERSIONS = {
    "2.18": (os.environ.get("SUITES"), os.environ.get("PROGRAMS_REFERENCE")),
    "4.3": (os.environ.get("SUITES_4"), os.environ.get("SUITES_4_REFERENCE")),
}
#: Version 4's tests of what is inside of it: the files that name it, or what begins with an
#: underscore.
_INSIDE = re.compile(
    r"(?:import"
    r" |\.)_[a-z]|adapter|benchmarks|generalized_components|model_registry|weight_conversion"
    r"|transformer_lens\.tools"
)


def files(version, folder):
    """The files that are run, by their paths."""
    found = sorted(
        file
        for kind in ("unit", "integration", "acceptance")
        for file in folder.glob(f"tests/{kind}/**/test_*.py")
    )
    paths = [str(file.relative_to(folder)) for file in found]
    if version == "2.18":
        return paths
    return [path for path in paths if not _INSIDE.search(path + (folder / path).read_text())]


def passed(version, whose, python, folder, cache):
    """How many cases of each of their tests pass. (Some have random numbers for names.)"""
    outcomes = folder / f"{whose}.json"
    path = os.pathsep.join(filter(None, (str(HERE), str(HERE.parent.parent), SITE)))
    given = hub.at(str(cache)) | {
        "WHOSE": whose,
        "OUTCOMES": str(outcomes),
        "PYTHONPATH": path,
        "UNCHECKED": "1",
    }
    subprocess.run(
        [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "their_suite",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            ".",
            "--continue-on-collection-errors",
            *files(version, folder),
        ],
        cwd=folder,
        env={**os.environ, **given},
        capture_output=True,
    )
    return Counter(
        name.partition("[")[0]
        for name, how in json.loads(outcomes.read_text()).items()
        if how == "passed"
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_what_does_not_pass_is_listed_with_a_reason(version, tmp_path):
    place, python = VERSIONS[version]
    if not place:
        pytest.skip(f"nothing says where the tests of {version} are")
    assert python, f"no Python with TransformerLens {version}"
    shutil.copytree(f"{place}/tests", tmp_path / "tests")
    cache = tmp_path / "hub"
    hub.write(cache, pathlib.Path(VOCABULARY))
    theirs, ours = (
        passed(version, *who, tmp_path, cache)
        for who in (("theirs", python), ("ours", sys.executable))
    )
    failing = theirs - ours
    print(f"{theirs.total()} pass on theirs, {theirs.total() - failing.total()} of them here")
    named = Counter()
    for tests in LISTED[version].values():
        for name, count in tests.items():
            found = sum(number for test, number in failing.items() if test.startswith(name))
            assert found == count, f"{name}: {found} fail, {count} are listed"
            named[name] += count
    rest = {test: number for test, number in failing.items() if not test.startswith(tuple(named))}
    assert not rest, "not listed: " + json.dumps(rest, indent=1)
