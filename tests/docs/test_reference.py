"""The API reference covers every public name."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_site"))
import api_pages  # noqa: E402  (found by the line above)


def every_public_name():
    """Full names, found without the generator's own help."""
    for name in api_pages.modules():
        module = importlib.import_module(name)
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or getattr(value, "__module__", None) != name:
                continue
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{name}.{attribute}"
            if inspect.isclass(value):
                for inner, member in vars(value).items():
                    routine = isinstance(member, classmethod | staticmethod | property) or inspect.isfunction(member)
                    if routine and not inner.startswith("_"):
                        yield f"{name}.{attribute}.{inner}"
        for offered in getattr(module, "__all__", ()):
            yield f"{name}.{offered}"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    api_pages.write(folder)
    return {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}


def test_every_public_name_is_on_its_page(pages):
    names = set(every_public_name())
    assert len(names) > 900 and "bridge.TransformerBridge" in names and "bridge.patching.get_act_patch_mlp_out" in names
    home = api_pages.page_of()
    modules = sorted(home, key=len, reverse=True)
    missing = []
    for name in names:
        module = next(m for m in modules if name.startswith(f"{m}."))
        if f'<span id="{name}"></span>' not in pages[home[module]]:
            missing.append(name)
    assert not missing


def test_every_page_is_listed(pages):
    listed = pages["index"].split("```{toctree}")[1].split()
    assert set(pages) - {"index"} <= set(listed)


def test_docstrings_become_lists_and_examples():
    text = api_pages.described(
        "Does it.\n\nMore *about* <it> and ``x < y``.\n\nArgs:\n    a, b: two\n        lines.\n    c: one.\n\n"
        "Raises:\n    ValueError: never.\n\nReturns:\n    ``[pos]``.\n\nExample:\n    >>> 1\n    1"
    )
    assert text.startswith("Does it.\n\nMore \\*about\\* \\<it\\> and ``x < y``.")
    assert "- `a, b`: two lines.\n- `c`: one." in text and "- `ValueError`: never." in text
    assert "**Returns**: ``[pos]``." in text and text.endswith("```pycon\n>>> 1\n1\n```")


def test_signatures_are_written_as_calls():
    def call(a, /, b=1, *, c=None, **rest): ...

    assert api_pages.signature(call) == "(a, b=1, *, c=None, **rest)"
