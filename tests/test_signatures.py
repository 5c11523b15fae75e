"""What users call is called as before: the parameters of everything public, compared with those
that are written down.

`python -m tests.test_signatures` writes them down anew. A change of the file is a change for users:
it belongs into the changelog.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

WRITTEN = Path(__file__).parent / "data" / "signatures.txt"
#: The packages whose names users import.
PUBLIC = (
    "bridge",
    "bridge.circuits",
    "bridge.engine",
    "bridge.harvest",
    "bridge.harvest.reading",
    "bridge.lens",
    "bridge.native",
    "bridge.patching",
    "bridge.tasks",
    "weight_processing",
)


def exported(package: str) -> dict[str, object]:
    """The names that a package gives; of one that lists none, those of its modules."""
    module = importlib.import_module(package)
    names: list[str] | None = getattr(module, "__all__", None)
    if names is not None:
        return {f"{package}.{name}": getattr(module, name) for name in names}
    found: dict[str, object] = {}
    inside = getattr(module, "__path__", None)
    parts = (
        [package]
        if inside is None
        else [f"{package}.{found.name}" for found in pkgutil.iter_modules(inside)]
    )
    for part in map(importlib.import_module, parts):
        for name, value in vars(part).items():
            if not name.startswith("_") and getattr(value, "__module__", None) == part.__name__:
                found[f"{part.__name__}.{name}"] = value
    return found


def parameters(function: object) -> str | None:
    """How something is called, without annotations; None where it says nothing."""
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    plain = [
        parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def lines() -> Iterator[str]:
    """What is written down: a line for each function, class and method."""
    for package in PUBLIC:
        for path, value in exported(package).items():
            if inspect.isclass(value):
                yield f"{path}{parameters(value)}"
                if issubclass(value, BaseException):
                    continue
                for name, _ in inspect.getmembers_static(value):
                    home = next(cls for cls in value.__mro__ if name in vars(cls))
                    if not name.startswith("_") and home.__module__.startswith(
                        ("bridge", "weight_processing")
                    ):
                        yield f"{path}.{name}{parameters(getattr(value, name)) or ''}"
            elif inspect.isfunction(value):
                yield f"{path}{parameters(value)}"


def test_what_is_public_is_called_as_before():
    written, now = WRITTEN.read_text(encoding="utf-8").splitlines(), sorted(set(lines()))
    gone, new = (
        [line for line in written if line not in now],
        [line for line in now if line not in written],
    )
    assert not gone, (
        f"users call these so:\n{chr(10).join(gone)}\nand these are new:\n{chr(10).join(new)}"
    )
    assert not new, f"write them down (python -m tests.test_signatures):\n{chr(10).join(new)}"


if __name__ == "__main__":
    WRITTEN.write_text("\n".join(sorted(set(lines()))) + "\n", encoding="utf-8")
