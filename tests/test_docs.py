"""Every example in the documentation and in docstrings runs."""

import doctest
import importlib
import pathlib
import pkgutil
import re
import tomllib

import pytest

import adapters
import bridge
import tools
import weight_processing
from tools.notebooks import ON_REAL_MODEL

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bridge" / "AGENTS.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
MODULES = [
    name
    for package in (adapters, bridge, tools, weight_processing)
    for _, name, _ in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if not name.endswith("__main__")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    namespace = {"__name__": "__main__"}
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    if page.name.startswith(ON_REAL_MODEL):
        assert blocks  # `make real` runs them, as a notebook
        blocks = []
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        if target.startswith(("api/", "notebooks/")):
            continue  # made with the site, whose own tests look at its links
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_what_programs_read_is_true():
    """Each import of llms.txt works, each call is a method's, and both files take one screen and
    are in the wheel.
    """
    text = (ROOT / "bridge" / "llms.txt").read_text(encoding="utf-8")
    imports = re.findall(r"`(from [^`]+)`", text)
    calls = re.findall(r"`bridge\.(\w+)\(", text)
    assert len(imports) > 12 and len(calls) > 6
    for line in imports:
        exec(line, {})
    assert [name for name in calls if not hasattr(bridge.TransformerBridge, name)] == []
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]["package-data"]
    for name in ("llms.txt", "AGENTS.md"):
        assert len((ROOT / "bridge" / name).read_text(encoding="utf-8").splitlines()) <= 50
        assert name in package["bridge"]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name, capsys):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not failed, capsys.readouterr().out


def test_every_public_function_is_documented():
    undocumented = []
    for name in MODULES:
        if name.startswith("adapters.families"):
            continue  # the module's own docstring says which family it declares
        module = importlib.import_module(name)
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or getattr(value, "__module__", None) != name:
                continue
            if not (getattr(value, "__doc__", None) or "").strip():
                undocumented.append(f"{name}.{attribute}")
    assert not undocumented
