"""Every public class is explained in one place, its docstring, in words that a new reader knows or
can look up.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("adapters", "bridge", "weight_processing")
#: HookedTransformer's own names, for programs that use these.
THEIRS = "bridge.legacy"
#: Words that mean something of their own here, which no reader of papers or of torch knows: the
#: glossary says what.
OURS = {
    "basis",
    "canonical",
    "chain",
    "core",
    "declaration",
    "declared",
    "family",
    "filler",
    "harvest",
    "hook point",
    "link",
    "listener",
    "lowered",
    "operation",
    "packed",
    "part",
    "point",
    "program",
    "recorder",
    "scoped",
    "site",
    "source",
    "study",
    "tap",
    "view",
    "wiring",
}
#: Says nothing of a class.
EMPTY = {"a", "an", "in", "is", "it", "its", "of", "one", "that", "the", "was", "what"}


def public_modules() -> Iterator[str]:
    """The modules that say what is public of them."""
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        targets = (
            node.targets
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign)
        )
        if any(
            isinstance(name, ast.Name) and name.id == "__all__" for each in targets for name in each
        ):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
                ".__init__"
            )
            if not module.startswith(THEIRS):
                yield module


def public_classes() -> dict[str, set[type]]:
    """The classes among what is public, by name, but for errors, whose names say what is wrong."""
    found: dict[str, set[type]] = {}
    for module in map(importlib.import_module, public_modules()):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) and name[0].isupper() and not issubclass(thing, Exception):
                found.setdefault(name, set()).add(thing)
    return found


CLASSES = public_classes()


def first_line(cls: type) -> str:
    """The first line of a class's own docstring; the one that a dataclass makes of its fields is
    none.
    """
    said = inspect.cleandoc(vars(cls).get("__doc__") or "").partition("\n")[0]
    return "" if said.startswith(f"{cls.__name__}(") else said


def words_of(text: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Za-z]+", text)]


def glossary() -> set[str]:
    """The words that the table in CONTRIBUTING.md explains."""
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## Glossary")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    words = {word.strip() for row in rows for word in row.split(",")}
    return words | {each for word in words for each in word.split()}


def test_there_are_classes() -> None:
    assert len(CLASSES) > 80


def says_nothing(name: str, said: str) -> bool:
    """Whether a line has fewer than three words beside the name of its class. A formula says what
    it is.
    """
    own = set(words_of(" ".join(re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)))) | EMPTY
    telling = {
        word for word in words_of(said) if word not in own and word.removesuffix("s") not in own
    }
    return not said.startswith("``") and len(telling) < 3


@pytest.mark.parametrize("name", CLASSES)
def test_the_first_line_of_a_public_class_says_what_it_is(name: str) -> None:
    """Of our own words it uses only those that the glossary explains."""
    for cls in CLASSES[name]:
        said = first_line(cls)
        assert not says_nothing(name, said), (
            f"{cls.__module__}.{name} does not say what it is: {said!r}"
        )
        used = {word for word in OURS if re.search(rf"\b{word}s?\b", said.lower())}
        assert used <= glossary(), (
            f"the glossary of CONTRIBUTING.md does not explain {used - glossary()} ({name})"
        )


@pytest.mark.parametrize("said", ["", "A norm.", "What is in it.", "The report of one."])
def test_some_lines_say_nothing(said: str) -> None:
    assert says_nothing("Report" if "report" in said else "Norm", said)


def test_no_two_public_classes_share_a_name() -> None:
    shared = {
        name: [cls.__module__ for cls in classes]
        for name, classes in CLASSES.items()
        if len(classes) > 1
    }
    assert not shared
