"""The API reference: a page for each module that says in `__all__` what it offers, and nothing
else.

What a class inherits from ours is listed with it, so that no public method can be missing.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("bridge", "adapters", "weight_processing")
FOLDER = "api"
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):$")


@functools.cache
def modules() -> list[str]:
    """The public modules: those that have an `__all__`."""
    names = list(PACKAGES)
    for package in PACKAGES:
        found = importlib.import_module(package)
        names += [name for _, name, _ in pkgutil.walk_packages(found.__path__, f"{package}.")]
    names = [name for name in sorted(names) if not name.endswith("__main__")]
    return [name for name in names if hasattr(importlib.import_module(name), "__all__")]


def _defined(value: Any) -> bool:
    return inspect.isclass(value) or callable(value)


@functools.cache
def _data(module: Any) -> dict[str, str]:
    """The names that a module assigns at its top, each with the `#:` comment above it."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                above = node.lineno - 2
                comment: list[str] = []
                while above >= 0 and lines[above].strip().startswith("#:"):
                    comment.insert(0, lines[above].strip()[2:].strip())
                    above -= 1
                found[target.id] = " ".join(comment)
    return found


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class has from us, by name."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in PACKAGES:
            for name, value in vars(base).items():
                plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if not name.startswith("_") and (
                    inspect.isfunction(plain) or isinstance(value, property)
                ):
                    found.setdefault(name, value)
    yield from sorted(found.items())


def signature(value: Any) -> str:
    """A call as it is written in the source, a parameter a line where it is long."""
    value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):  # a class of C, or an enumeration
        return ""
    parts, starred = [], False
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        parts.append(_short_addresses(_typed(parameter)))
    empty = found.return_annotation is found.empty or inspect.isclass(value)
    returns = "" if empty else f" -> {_type(found.return_annotation)}"
    together = f"({', '.join(parts)}){returns}"
    return together if len(together) < 90 else "(\n    " + ",\n    ".join(parts) + f",\n){returns}"


def _typed(parameter: inspect.Parameter) -> str:
    """A parameter with its type and its default, as in the source."""
    name, equals, default = str(parameter.replace(annotation=parameter.empty)).partition("=")
    if parameter.annotation is parameter.empty:
        return f"{name}{equals}{default}"
    typed = f"{name}: {_type(parameter.annotation)}"
    return f"{typed} = {default}" if equals else typed


def _type(annotation: Any) -> str:
    """A type as in the source: modules postpone their annotations, which are text then."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return " ".join(text.split())


def _short_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def escaped(text: str) -> str:
    """Text of a docstring as Markdown: only code spans mean something."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text, flags=re.DOTALL)
    return "".join(
        part if at % 2 else re.sub(r"([<>*\[\]{}|$])", r"\\\1", part).replace("\\\\", "\\")
        for at, part in enumerate(parts)
    )


def described(doc: str | None) -> str:
    """A docstring as Markdown."""
    if not doc:
        return ""
    sections: list[tuple[str, list[str]]] = [("", [])]
    for line in inspect.cleandoc(doc).splitlines():
        heading = _SECTION.match(line)
        if heading:
            sections.append((heading[1], []))
        else:
            sections[-1][1].append(line)
    out = []
    for heading, lines in sections:
        text = inspect.cleandoc("\n".join(["", *lines]))
        if not text:
            continue
        if heading.startswith("Example"):
            out.append(f"```pycon\n{text}\n```")
        elif heading in ("Args", "Attributes", "Raises"):
            items = re.split(r"\n(?=\S)", text)
            out.append(f"**{heading}**\n")
            out.append("\n".join(_item(item) for item in items))
        elif heading:
            out.append(f"**{heading}**: {escaped(' '.join(text.split()))}")
        else:
            out.append(escaped(text))
    return "\n\n".join(out)


def _item(item: str) -> str:
    name, colon, text = item.partition(": ")
    text = " ".join(text.split())
    return (
        f"- `{name}`: {escaped(text)}"
        if colon and "\n" not in name
        else f"- {escaped(' '.join(item.split()))}"
    )


def entry(full: str, name: str, value: Any, comment: str, level: int) -> str:
    """What the reference says of one name."""
    anchor = f'<span id="{full}"></span>'
    parts = [f"{'#' * level} {escaped(name)}\n", anchor]
    if inspect.isclass(value):
        parts.append(f"```text\nclass {name}{signature(value)}\n```")
        parts.append(described(vars(value).get("__doc__")))
    elif isinstance(value, property):
        parts.append(
            f"*Property.* {described(value.fget.__doc__ if value.fget else value.__doc__)}"
        )
    elif _defined(value) and not comment:
        parts.append(f"```text\n{name}{signature(value)}\n```")
        parts.append(described(getattr(value, "__doc__", None)))
    else:
        parts.append(escaped(comment) or "Data.")
    text = "\n\n".join(part for part in parts if part)
    if inspect.isclass(value):
        for inner, member in members(value):
            text += "\n\n" + entry(f"{full}.{inner}", inner, member, "", level + 1)
    return text


def page(name: str) -> str:
    """The page of one module."""
    module = importlib.import_module(name)
    parts = [f"# {name}", described(module.__doc__)]
    for offered in module.__all__:
        value = getattr(module, offered)
        home = (
            importlib.import_module(getattr(value, "__module__", None) or name)
            if _defined(value)
            else module
        )
        comment = (
            _data(home).get(offered, "") if hasattr(home, "__file__") and home.__file__ else ""
        )
        parts.append(entry(f"{name}.{offered}", offered, value, comment, 2))
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(name: str) -> str:
    """The first line of a module's docstring, for a cell of a table.

    Args:
        name: of the module.

    Raises:
        ValueError: it has none.
    """
    doc = importlib.import_module(name).__doc__
    if not doc:
        raise ValueError(f"{name} has no docstring: say in its first line what it is for")
    first = " ".join(inspect.cleandoc(doc).split("\n\n")[0].split())
    return escaped(first)


def write(folder: Path) -> None:
    """Writes the pages."""
    folder.mkdir(exist_ok=True)
    wanted = {name: page(name) for name in modules()}
    wanted["index"] = (
        "# API reference\n\n"
        "What is public, from the docstrings ([what will not change](../stability.md)). "
        "[bridge](bridge.md) has what most people need: `TransformerBridge` with all its methods, "
        "`ActivationCache`, `FactoredMatrix`.\n\n| module | what it is for |\n|---|---|\n"
        + "\n".join(f"| [{name}]({name}.md) | {summary(name)} |" for name in modules())
        + "\n\n```{toctree}\n:hidden:\n:maxdepth: 1\n\n"
        + "\n".join(modules())
        + "\n```\n"
    )
    for old in folder.glob("*.md"):
        if old.stem not in wanted:
            old.unlink()
    for name, text in wanted.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Any) -> dict[str, Any]:
    """Sphinx's entry point."""
    write(Path(app.srcdir) / FOLDER)
    return {"parallel_read_safe": True}
