"""A pytest plugin for TransformerLens' tests: which passed, as a file; with ours under its name
where WHOSE says so.

`python -m pytest -p their_suite tests` with this folder on the path. Their package is `tests`, too:
ours cannot be imported.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "programs"))
import hub

if os.environ["WHOSE"] == "ours":
    import bridge.legacy.as_transformer_lens  # noqa: F401
hub.offline()
import transformer_lens

assert transformer_lens.__name__.startswith("bridge") == (os.environ["WHOSE"] == "ours")
if importlib.util.find_spec(
    "transformer_lens.utilities.hf_utils"
):  # version 4's tests ask the hub again, and again
    importlib.import_module("transformer_lens.utilities.hf_utils").enable_hf_retry = lambda: None
_OUTCOMES: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The worst of a test's three parts is its outcome."""
    counts = report.outcome != "passed" or report.when == "call"
    if counts and _OUTCOMES.get(report.nodeid) != "failed":
        _OUTCOMES[report.nodeid] = "skipped" if hasattr(report, "wasxfail") else report.outcome


def pytest_sessionfinish() -> None:
    Path(os.environ["OUTCOMES"]).write_text(json.dumps(_OUTCOMES, indent=1))
