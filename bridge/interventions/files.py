"""Interventions in a safetensors file: tensors, and a JSON header. Loading executes no code."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from bridge.hooks.context import HookFunction
from bridge.interventions.operations import KINDS, Condition, Operation
from bridge.interventions.probes import Probe
from bridge.interventions.stored import (
    FileKind,
    InterventionsFileError,
    Model,
    read_content,
    refusing,
    write,
)

Tensors = Mapping[str, Tensor]
#: All operations, by name: a file cannot hold anything else.
OPERATIONS: dict[str, type[Operation]] = {kind.__name__: kind for kind in (*KINDS, Probe)}
#: The first version has no checksum.
INTERVENTIONS = FileKind("interventions", (1, 2))


def save(
    file: str | PathLike[str], pairs: Sequence[tuple[str, HookFunction]], model: Model | None
) -> None:
    """Write interventions; see `Interventions.save`."""
    tensors: dict[str, Tensor] = {}
    entries = [_entry(index, *pair, tensors) for index, pair in enumerate(pairs)]
    write(file, INTERVENTIONS, entries, tensors, model)


def _entry(
    index: int, point: str, operation: HookFunction, tensors: dict[str, Tensor]
) -> dict[str, object]:
    """Return an intervention's entry in the header; its tensors are added to `tensors`."""
    kind = type(operation).__name__
    if not isinstance(operation, Operation) or OPERATIONS.get(kind) is not type(operation):
        raise TypeError(
            f"the intervention at {point} is {operation!r}, a function, which is no data and"
            " cannot be saved: use the operations of bridge.interventions"
            f" ({', '.join(OPERATIONS)})"
        )
    entry: dict[str, object] = {"point": point, "operation": kind}
    for field in fields(operation):
        name, value = field.name, getattr(operation, field.name)
        if isinstance(value, Tensor):
            key = f"{index}.{name}"
            tensors[key] = value.detach().cpu().clone().contiguous()
            entry[name] = {"tensor": key}
        elif name in operation.numbers and isinstance(value, str):
            entry[name] = {"input": value}
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(
                f"{name} of {kind} at {point} is {value}, which JSON does not know: give it as a"
                " tensor"
            )
        elif name != "where" or value is not None:  # older versions do not read it
            entry[name] = _plain(value)
    return entry


def _plain(value: object) -> object:
    """Convert a field's value to JSON types."""
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    return asdict(value) if isinstance(value, Condition) else value


def read(file: str | PathLike[str], check: Callable[[Model], None]) -> list[tuple[str, Operation]]:
    """Read the interventions of a file.

    Args:
        file: the path.
        check: called with the model that they were made on, before anything else is checked.

    Raises:
        FileNotFoundError, InterventionsFileError: see `load`.
    """
    with refusing(Path(file)):
        entries, tensors = read_content(Path(file), INTERVENTIONS, check)
        if not isinstance(entries, list):
            raise InterventionsFileError("its interventions are no list")
        used: set[str] = set()
        pairs = [_pair(f"intervention {i}", x, tensors, used) for i, x in enumerate(entries)]
        unused = sorted(tensors.keys() - used)
        if unused:
            raise InterventionsFileError(f"the tensors {', '.join(unused)} are numbers of nothing")
        return pairs


def _pair(name: str, entry: object, tensors: Tensors, used: set[str]) -> tuple[str, Operation]:
    """Build one intervention.

    Args:
        name: the name of the intervention, for errors.
        entry: its entry in the header.
        tensors: the file's tensors.
        used: receives the names of its tensors.
    """
    if not isinstance(entry, dict):
        raise InterventionsFileError(f"{name} is {entry!r}, and no object")
    point, kind = _place(name, entry)
    values: dict[str, Any] = {}
    for field in (field.name for field in fields(kind)):
        value = entry.get(field)
        what = f"{field} of {name}"
        if field in kind.numbers:
            value = _number(what, value, tensors, used)
        elif field == "where":
            value = _condition(what, value)
        elif isinstance(value, dict):
            value = _slice(what, value)
        values[field] = value
    return point, kind(**values)


def _place(name: str, entry: dict[str, object]) -> tuple[str, type[Operation]]:
    """Check the fields of an entry; return its hook point and operation."""
    point, operation = entry.get("point"), entry.get("operation")
    if not isinstance(point, str):
        raise InterventionsFileError(f"{name} has the hook point {point!r}, which is no name")
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise InterventionsFileError(
            f"{name} is the operation {operation!r}; there are {', '.join(OPERATIONS)}"
        )
    kind = OPERATIONS[operation]
    known = [field.name for field in fields(kind)]
    if entry.keys() | {"where"} != {"point", "operation", *known}:
        raise InterventionsFileError(
            f"{name}, {operation}, has the fields {', '.join(sorted(entry))}; it needs"
            f" {', '.join(known)}"
        )
    return point, kind


def _slice(what: str, value: dict[str, object]) -> slice:
    ends = value.get("slice")
    if list(value) != ["slice"] or not isinstance(ends, list) or len(ends) != 3:
        raise InterventionsFileError(f"{what} is {value!r}; it has to be numbers or a slice")
    return slice(*ends)


def _condition(what: str, value: object) -> Condition | None:
    if value is None:
        return None
    names = {field.name for field in fields(Condition)}
    if not isinstance(value, dict) or value.keys() != names:
        raise InterventionsFileError(
            f"{what} is {value!r}; a condition has {', '.join(sorted(names))}"
        )
    return Condition(**value)


def _number(what: str, value: object, tensors: Tensors, used: set[str]) -> object:
    if value is None or type(value) in (int, float):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((kind, name),) = value.items()
        if kind == "input" and isinstance(name, str):
            return name
        if kind == "tensor":
            if not isinstance(name, str) or name not in tensors:
                raise InterventionsFileError(
                    f"{what} is the tensor {name!r}, which the file has not"
                )
            used.add(name)
            return tensors[name]
    raise InterventionsFileError(
        f"{what} is {value!r}; it has to be a number, a tensor or an input"
    )
