"""TransformerLens 2.18's own tests, run on ours with the import changed: what passes on theirs passes, but for a list.

`make suites`. Both run here, without a network, on the hub of small models in `programs/hub.py`: what does not pass on
theirs then (it needs another model, trained weights, or a GPU) says nothing of ours. `suites.toml` lists what passes
there and not here.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
from collections import Counter

import pytest

from tests.clients.programs import hub

HERE = pathlib.Path(__file__).parent
#: Where their `tests` are, the Python that has TransformerLens 2.18, GPT-2's vocabulary, what they import besides.
FOLDER, THEIRS = os.environ.get("SUITES"), os.environ.get("PROGRAMS_REFERENCE")
VOCABULARY, SITE = os.environ.get("PROGRAMS_VOCABULARY", ""), os.environ.get("PROGRAMS_SITE", "")
LISTED = tomllib.loads((HERE / "suites.toml").read_text())
pytestmark = pytest.mark.skipif(not FOLDER, reason="SUITES says where their tests are")


def passed(whose, python, folder, cache):
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
         "--rootdir", ".", "--continue-on-collection-errors", "tests/unit", "tests/integration", "tests/acceptance"],
        cwd=folder, env={**os.environ, **given}, capture_output=True,
    )  # fmt: skip
    return Counter(name.partition("[")[0] for name, how in json.loads(outcomes.read_text()).items() if how == "passed")


def test_what_does_not_pass_is_listed_with_a_reason(tmp_path):
    assert THEIRS, "no Python with TransformerLens 2.18"
    shutil.copytree(f"{FOLDER}/tests", tmp_path / "tests")
    cache = tmp_path / "hub"
    hub.write(cache, pathlib.Path(VOCABULARY))
    theirs, ours = (passed(*who, tmp_path, cache) for who in (("theirs", THEIRS), ("ours", sys.executable)))
    failing = theirs - ours
    print(f"{theirs.total()} pass on theirs, {theirs.total() - failing.total()} of them here")
    named = Counter()
    for tests in LISTED.values():
        for name, count in tests.items():
            found = sum(number for test, number in failing.items() if test.startswith(name))
            assert found == count, f"{name}: {found} fail, {count} are listed"
            named[name] += count
    rest = {test: number for test, number in failing.items() if not test.startswith(tuple(named))}
    assert not rest, "not listed: " + json.dumps(rest, indent=1)
