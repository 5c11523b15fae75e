"""Public signatures do not change unnoticed: `signatures.txt` holds them, and a change of it is seen in the review.

`WRITE=1 python -m pytest -n 0 tests/public/test_signatures.py` writes the file anew.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

HELD = Path(__file__).with_name("signatures.txt")
#: What docs/stability.md calls public.
PACKAGES = (
    "bridge", "adapters", "weight_processing", "bridge.lens", "bridge.patching", "bridge.circuits", "bridge.tasks",
    "bridge.pictures", "bridge.harvest",
)  # fmt: skip
#: Classes whose methods are public too.
CLASSES = ("bridge.TransformerBridge", "bridge.ActivationCache")


def shown(name: str, value: object) -> str:
    """A name with its arguments and their defaults. Annotations are for mypy: a wider one breaks nobody."""
    if not callable(value):
        return f"{name}: {type(value).__name__}" if not isinstance(value, property) else f"{name}: property"
    try:
        signature = inspect.signature(inspect.unwrap(value))
    except ValueError:
        return name
    parameters = list(signature.parameters.values())
    if isinstance(value, type) and any(base.__module__.startswith("transformers.") for base in value.__mro__):
        parameters = [p for p in parameters if p.name in value.__annotations__]  # the others are that version's own
    plain = [p.replace(annotation=p.empty) for p in parameters]
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return name + re.sub(r" at 0x[0-9a-f]+", "", text)


def signatures() -> Iterator[str]:
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            yield shown(f"{package}.{name}", value)
            if f"{package}.{name}" in CLASSES:
                own = {each: inspect.getattr_static(value, each) for each in dir(value) if not each.startswith("_")}
                for each, method in sorted(own.items()):
                    found = getattr(value, each) if isinstance(method, classmethod | staticmethod) else method
                    if _is_ours(value, each):
                        yield shown(f"{package}.{name}.{each}", found)


def _is_ours(cls: type, name: str) -> bool:
    """Whether one of our classes defines it, and not torch's `Module`."""
    return any(name in vars(base) and base.__module__.startswith("bridge.") for base in cls.__mro__)


def test_public_signatures_are_those_that_are_held() -> None:
    now = list(signatures())
    if os.environ.get("WRITE"):
        HELD.write_text("\n".join(now) + "\n")
    held = HELD.read_text().splitlines()
    changed = "\n".join(difflib.unified_diff(held, now, "held", "now", n=0, lineterm=""))
    assert not changed, f"{changed}\ndocs/stability.md says what may change; WRITE=1 holds the new ones"


def test_every_public_name_is_there() -> None:
    for package in PACKAGES:
        module = importlib.import_module(package)
        assert set(module.__all__) <= set(dir(module))
