"""The API reference covers every public name."""

import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import adapters
import bridge
import weight_processing

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_site"))
import api_pages  # noqa: E402  (found by the line above)


def every_public_name():
    """Full names, found without the generator's own help."""
    for package in (adapters, bridge, weight_processing):
        found = [
            name for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        ]
        for name in [package.__name__, *(name for name in found if not name.endswith("__main__"))]:
            module = importlib.import_module(name)
            for offered in getattr(module, "__all__", ()):
                yield name, f"{name}.{offered}"
                value = getattr(module, offered)
                for inner, member in (
                    inspect.getmembers_static(value) if inspect.isclass(value) else ()
                ):
                    ours = next(c for c in value.__mro__ if inner in vars(c)).__module__.split(".")[
                        0
                    ]
                    routine = isinstance(
                        member, classmethod | staticmethod | property
                    ) or inspect.isfunction(member)
                    if (
                        ours in ("adapters", "bridge", "weight_processing")
                        and routine
                        and not inner.startswith("_")
                    ):
                        yield name, f"{name}.{offered}.{inner}"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    api_pages.write(folder)
    return {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}


def test_every_public_name_is_on_its_page_and_nothing_else(pages):
    names = set(every_public_name())
    every = {name for _, name in names}
    assert (
        len(every) > 500
        and {"bridge.TransformerBridge.run_with_cache", "bridge.patching.patch_everything"} < every
    )
    assert [
        name for module, name in names if f'<span id="{name}"></span>' not in pages[module]
    ] == []
    assert set(pages) == {"index", *(module for module, _ in names)}
    shown = {name for text in pages.values() for name in re.findall(r'<span id="([^"]+)">', text)}
    assert shown == every


def test_what_the_documentation_imports_is_public():
    """But for what the pages about declaring a family use, and `bridge.legacy`, whose names are
    HookedTransformer's.
    """
    texts = [
        path.read_text(encoding="utf-8")
        for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    ]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.ipynb")]
    found = {
        (module, name.split(" as ")[0].strip())
        for text in texts
        for module, names in re.findall(
            r"^[ \"]*from ((?:bridge|weight_processing)[\w.]*) import ([\w, ]+)", text, re.M
        )
        for name in names.split(",")
        if not module.startswith("bridge.legacy")
    }
    assert len(found) > 30
    hidden = []
    for module, name in found:
        offered = getattr(importlib.import_module(module), "__all__", ())
        if name not in offered and f"{module}.{name}" not in api_pages.modules():
            hidden.append(f"{module}.{name}")
    assert not hidden


def test_every_page_is_listed(pages):
    listed = pages["index"].split("```{toctree}")[1].split()
    rows = dict(re.findall(r"^\| \[(.+)\]\(.+\) \| (.{10,}) \|$", pages["index"], re.MULTILINE))
    assert set(rows) == set(pages) - {"index"}  # each with what it is for
    assert set(pages) - {"index"} <= set(listed)


def test_docstrings_become_lists_and_examples():
    text = api_pages.described(
        "Does it.\n\nMore *about* <it> and ``x < y``.\n\nArgs:\n    a, b: two\n        lines.\n   "
        " c: one.\n\nRaises:\n    ValueError: never.\n\nReturns:\n    ``[pos]``.\n\nExample:\n   "
        " >>> 1\n    1"
    )
    assert text.startswith("Does it.\n\nMore \\*about\\* \\<it\\> and ``x < y``.")
    assert "- `a, b`: two lines.\n- `c`: one." in text and "- `ValueError`: never." in text
    assert "**Returns**: ``[pos]``." in text and text.endswith("```pycon\n>>> 1\n1\n```")


def test_signatures_are_written_as_calls():
    def call(a, /, b=1, *, c=None, **rest): ...

    assert api_pages.signature(call) == "(a, b=1, *, c=None, **rest)"
