"""The API reference: a page for each room, written from what the packages hold, so that no name can be missing."""

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
    """All modules of the packages."""
    names = list(PACKAGES)
    for package in PACKAGES:
        found = importlib.import_module(package)
        names += [name for _, name, _ in pkgutil.walk_packages(found.__path__, f"{package}.")]
    return [name for name in sorted(names) if not name.endswith("__main__")]


@functools.cache
def rooms() -> dict[str, list[str]]:
    """The modules of each page: those of a room together, and those that stand in no room with their package."""
    known = modules()
    pages: dict[str, list[str]] = {}
    for name in known:
        first, inside, *_ = [*name.split("."), ""]
        room = f"{first}.{inside}"
        is_room = any(other.startswith(f"{room}.") for other in known)
        pages.setdefault(room if is_room else first, []).append(name)
    return pages


@functools.cache
def public_names(module_name: str) -> dict[str, Any]:
    """The functions, classes and data that a module defines, without those that start with an underscore."""
    module = importlib.import_module(module_name)
    found = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module_name and _defined(value)
    }
    return found | {name: vars(module)[name] for name in _data(module) if name in vars(module) and name not in found}


def _defined(value: Any) -> bool:
    return inspect.isclass(value) or callable(value)


@functools.cache
def _data(module: Any) -> dict[str, str]:
    """The names that a module assigns at its top, each with the `#:` comment above it."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
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
    """The public methods and properties that a class itself defines."""
    for name, value in vars(cls).items():
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not name.startswith("_") and (inspect.isfunction(plain) or isinstance(value, property)):
            yield name, value


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
        parts.append(str(parameter.replace(annotation=parameter.empty)))
    parts = [_short_addresses(part) for part in parts]
    together = f"({', '.join(parts)})"
    return together if len(together) < 90 else "(\n    " + ",\n    ".join(parts) + ",\n)"


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
    return f"- `{name}`: {escaped(text)}" if colon and "\n" not in name else f"- {escaped(' '.join(item.split()))}"


def entry(full: str, name: str, value: Any, comment: str, level: int) -> str:
    """What the reference says of one name."""
    anchor = f'<span id="{full}"></span>'
    parts = [f"{'#' * level} {escaped(name)}\n", anchor]
    if inspect.isclass(value):
        parts.append(f"```text\nclass {name}{signature(value)}\n```")
        parts.append(described(vars(value).get("__doc__")))
    elif isinstance(value, property):
        parts.append(f"*Property.* {described(value.fget.__doc__ if value.fget else value.__doc__)}")
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


@functools.cache
def page_of() -> dict[str, str]:
    """The page of each module."""
    return {name: room for room, names in rooms().items() for name in names}


def link(full_module: str, path: str, text: str) -> str:
    """A link to a name of a module."""
    return f'<a href="{page_of()[full_module]}.html#{full_module}.{path}"><code>{text}</code></a>'


def _offered(name: str) -> str:
    """What a package offers, with links to where it is described; classes with all that they inherit of ours."""
    module = importlib.import_module(name)
    ours = page_of()
    rows = []
    for offered in module.__all__:
        value = getattr(module, offered)
        home = getattr(value, "__module__", None)
        if home not in ours or offered not in public_names(home):
            rows.append(f'<span id="{name}.{offered}"></span>`{offered}`: {escaped(repr(value)[:80])}')
            continue
        summary = (inspect.getdoc(value) or "").split("\n")[0]
        rows.append(f'<span id="{name}.{offered}"></span>{link(home, offered, offered)}: {escaped(summary)}')
        if inspect.isclass(value):
            found: dict[str, str] = {}
            for cls in value.__mro__:
                if cls.__module__ in ours:
                    for inner, member in members(cls):
                        doc = (member.fget if isinstance(member, property) else member).__doc__ or ""
                        where = link(cls.__module__, f"{cls.__qualname__}.{inner}", inner)
                        found.setdefault(
                            inner, f"{where}: {escaped(doc.strip().splitlines()[0] if doc.strip() else '')}"
                        )
            rows[-1] += "".join(f"\n  - {found[inner]}" for inner in sorted(found))
    return "\n".join(f"- {row}" for row in rows)


def page(room: str, names: list[str]) -> str:
    """One page of the reference."""
    parts = [f"# {room}"]
    for name in names:
        module = importlib.import_module(name)
        if name != room:
            parts.append(f"## {name}\n")
        parts.append(described(module.__doc__))
        if hasattr(module, "__all__"):
            parts.append(_offered(name))
        comments = _data(module)
        for inner, value in public_names(name).items():
            parts.append(entry(f"{name}.{inner}", inner, value, comments.get(inner, ""), 2 if name == room else 3))
    return "\n\n".join(part for part in parts if part) + "\n"


def write(folder: Path) -> None:
    """Writes the pages."""
    folder.mkdir(exist_ok=True)
    pages = rooms()
    wanted = {room: page(room, names) for room, names in pages.items()}
    wanted["index"] = (
        "# API reference\n\nEvery name of the packages, from the docstrings. [bridge](bridge.md) has what most people "
        "need: `TransformerBridge` with all its methods, `ActivationCache`, `FactoredMatrix`.\n\n"
        "```{toctree}\n:maxdepth: 1\n\n" + "\n".join(pages) + "\n```\n"
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
