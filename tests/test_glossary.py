"""Every public class is in the glossary of CONTRIBUTING.md, or belongs to the field's own language."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("adapters", "bridge", "weight_processing")
#: HookedTransformer's own names, for programs that use these.
THEIRS = "bridge.legacy"


def public_modules() -> Iterator[str]:
    """The modules that say what is public of them."""
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        targets = (node.targets for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign))
        if any(isinstance(name, ast.Name) and name.id == "__all__" for each in targets for name in each):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not module.startswith(THEIRS):
                yield module


def public_classes() -> set[str]:
    """The names of the classes among what is public, but for errors."""
    found = set()
    for module in map(importlib.import_module, public_modules()):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) and name[0].isupper() and not issubclass(thing, Exception):
                found.add(name)
    return found


def test_every_public_class_is_in_the_glossary() -> None:
    glossary = (ROOT / "CONTRIBUTING.md").read_text().split("## Glossary")[1].split("\n## ")[0]
    explained = {name for code in re.findall(r"`([^`]+)`", glossary) for name in re.findall(r"\w+", code)}
    classes = public_classes()
    assert len(classes) > 80
    assert not classes - explained, f"say in the glossary of CONTRIBUTING.md what these are: {classes - explained}"
