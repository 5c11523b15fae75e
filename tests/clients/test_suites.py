"""TransformerLens' own tests, run on ours with the import changed: those that pass on theirs, less a list with reasons.

`make suites`. Both run here, without a network, on the hub of small models in `programs/hub.py`: what does not pass on
theirs then (it needs another model, trained weights, or a GPU) says nothing of ours. `suites.toml` lists what passes
there and not here.
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
#: Where `2.18/tests` and `4.3/tests` are, the Python that has each version, GPT-2's vocabulary.
FOLDER, VOCABULARY = os.environ.get("SUITES"), os.environ.get("PROGRAMS_VOCABULARY", "")
SITE = os.environ.get("PROGRAMS_SITE", "")  # what they import besides
PYTHONS = {"2.18": os.environ.get("PROGRAMS_REFERENCE"), "4.3": os.environ.get("SUITES_REFERENCE")}
LISTED = tomllib.loads((HERE / "suites.toml").read_text())
#: What a test of the public interface does not name: attributes with an underscore, modules behind the public ones.
PRIVATE = re.compile(
    r"\._[a-z]|import _|transformer_lens\.(model_bridge\.(?!bridge\b)|conversion_utils|weight_processing|benchmarks"
    r"|tools|lit|factories|supported|architecture|pretrained|components|utilities\.)"
)
pytestmark = pytest.mark.skipif(not FOLDER, reason="SUITES says where their tests are")


def of_interest(version, tests):
    """The files that are run: all of version 2, and of version 4 those that keep to the public interface."""
    files = sorted(file for part in ("unit", "integration", "acceptance") for file in (tests / part).rglob("test_*.py"))
    texts = {file: file.read_text() for file in files}
    if version == "4.3":  # those of its units; the others need half an hour, and models from the hub
        units = (file for file in files if file.is_relative_to(tests / "unit") and "scripts" not in file.parts)
        files = [file for file in units if "transformer_lens" in texts[file] and not PRIVATE.search(texts[file])]
    return [str(file.relative_to(tests.parent)) for file in files]


def passed(whose, python, folder, files, cache):
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
        [python, "-m", "pytest", "-q", "-p", "their_suite", "-p", "no:cacheprovider", "-c", os.devnull,
         "--rootdir", ".", "--continue-on-collection-errors", *files],
        cwd=folder, env={**os.environ, **given}, capture_output=True,
    )  # fmt: skip
    return Counter(name.partition("[")[0] for name, how in json.loads(outcomes.read_text()).items() if how == "passed")


@pytest.mark.parametrize("version", PYTHONS)
def test_what_does_not_pass_is_listed_with_a_reason(version, tmp_path):
    python, listed = PYTHONS[version], LISTED[version]
    assert python, f"no Python with TransformerLens {version}"
    shutil.copytree(f"{FOLDER}/{version}/tests", tmp_path / "tests")
    hub.write(tmp_path / "hub", pathlib.Path(VOCABULARY))
    files = of_interest(version, tmp_path / "tests")
    theirs, ours = (
        passed(whose, which, tmp_path, files, tmp_path / "hub")
        for whose, which in (("theirs", python), ("ours", sys.executable))
    )
    failing = theirs - ours
    print(f"{theirs.total()} pass on {version}, {theirs.total() - failing.total()} of them here")
    named = Counter()
    for tests in listed.values():
        for name, count in tests.items():
            found = sum(number for test, number in failing.items() if test.startswith(name))
            assert found == count, f"{name}: {found} fail, {count} are listed"
            named[name] += count
    rest = {test: number for test, number in failing.items() if not test.startswith(tuple(named))}
    assert not rest, "not listed: " + json.dumps(rest, indent=1)
