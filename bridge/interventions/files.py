"""Interventions in a file: tensors, and a header of JSON that says what they are numbers of. Nothing is executed."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bridge.hooks.asked import StudiedBridge
from bridge.hooks.context import HookFunction
from bridge.interventions.operations import OPERATIONS, Condition, Operation

# ----------------------------------------------------------------------------------------------------------------------
# Which model interventions were made on, and whether another one is like it.
# ----------------------------------------------------------------------------------------------------------------------


class OtherModelError(ValueError):
    """Interventions that were made on a model of another class, other sizes or another processing."""


@dataclass(frozen=True)
class Model:
    """The model that interventions were made on.

    Attributes:
        name: what it is called.
        kind: its class.
        sizes: its numbers of layers, heads, features, tokens.
        processed: what was done to its weights.
    """

    name: str
    kind: str
    sizes: Mapping[str, int | None]
    processed: Mapping[str, str]

    @classmethod
    def of(cls, bridge: StudiedBridge) -> Model:
        """The model of a bridge."""
        cfg = bridge.cfg
        sizes = {name: getattr(cfg, name) for name in ("n_layers", "n_heads", "d_model", "d_head", "d_mlp", "d_vocab")}
        return cls(str(cfg.model_name), type(bridge.core).__name__, sizes, dict(cfg.processed))

    @classmethod
    def from_data(cls, data: object) -> Model:
        """The model that `dataclasses.asdict` made data of.

        Raises:
            ValueError: it is something else.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(data, dict) or sorted(data) != sorted(names):
            raise ValueError(f"the model has to be described by {', '.join(names)}")
        name, kind, sizes, processed = (data[part] for part in names)
        texts = isinstance(name, str) and isinstance(kind, str) and isinstance(processed, dict)
        if not texts or not all(isinstance(value, str) for value in processed.values()):
            raise ValueError("the model's name, class and processing have to be text")
        if not isinstance(sizes, dict) or not all(size is None or type(size) is int for size in sizes.values()):
            raise ValueError("the model's sizes have to be whole numbers")
        return cls(name, kind, sizes, processed)

    def check(self, bridge: StudiedBridge) -> None:
        """Refuses a model that is not like this one, and warns of one that is only called otherwise.

        Raises:
            OtherModelError: its class, sizes or processing differ.
        """
        other = Model.of(bridge)
        differences = [
            f"{what} {mine!r} there, {its!r} here"
            for what, mine, its in (
                ("class", self.kind, other.kind),
                *((size, self.sizes.get(size), other.sizes[size]) for size in other.sizes),
                ("processing", dict(self.processed), dict(other.processed)),
            )
            if mine != its
        ]
        if differences:
            raise OtherModelError(
                f"these interventions were made on {self.name}, which is another model than {other.name}: "
                f"{'; '.join(differences)}"
            )
        if self.name != other.name:
            warnings.warn(
                f"these interventions were made on {self.name}, and this model is {other.name}: their sizes are the "
                "same, what their features mean may not be",
                stacklevel=4,
            )


#: The second has a checksum, of the header and of the tensors.
VERSION = 2
_HEADER = "transformer_bridge_interventions"
_PARTS, _CHECKSUM = ("version", "model", "interventions"), "checksum"


class InterventionsFileError(ValueError):
    """A file that holds no interventions, or not such as this version knows."""


def save(file: str | PathLike[str], pairs: Sequence[tuple[str, HookFunction]], model: Model | None) -> None:
    """Writes interventions; see `Interventions.save`."""
    tensors: dict[str, Tensor] = {}
    entries = []
    for index, (point, operation) in enumerate(pairs):
        if not isinstance(operation, Operation) or OPERATIONS.get(type(operation).__name__) is not type(operation):
            raise TypeError(
                f"the intervention at {point} is {operation!r}, a function, which is no data and cannot be saved: use "
                f"the operations of bridge.interventions ({', '.join(OPERATIONS)})"
            )
        entry: dict[str, object] = {"point": point, "operation": type(operation).__name__}
        for field in fields(operation):
            value = getattr(operation, field.name)
            if isinstance(value, Tensor):
                name = f"{index}.{field.name}"
                tensors[name] = value.detach().cpu().clone().contiguous()
                value = {"tensor": name}
            elif field.name in operation.numbers and isinstance(value, str):
                value = {"input": value}
            elif isinstance(value, slice):
                value = {"slice": [value.start, value.stop, value.step]}
            elif isinstance(value, Condition):
                value = asdict(value)
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError(
                    f"{field.name} of {type(operation).__name__} at {point} is {value}, which JSON does not know: give "
                    "it as a tensor"
                )
            elif field.name == "where":
                continue  # there is none, and older versions know of none
            entry[field.name] = value
        entries.append(entry)
    said = {"version": VERSION, "model": None if model is None else asdict(model), "interventions": entries}
    header = {**said, _CHECKSUM: _checksum(said, tensors)}
    save_file(tensors, fspath(file), {_HEADER: json.dumps(header, allow_nan=False)})


def _checksum(header: Mapping[str, object], tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of a header, and of the types, shapes and bytes of its tensors."""
    total = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def read(file: str | PathLike[str], check: Callable[[Model], None]) -> list[tuple[str, Operation]]:
    """Reads the interventions of a file.

    Args:
        file: the path.
        check: is given the model that they were made on, before anything else is looked at.

    Raises:
        FileNotFoundError, InterventionsFileError: see `load`.
    """
    path = Path(file)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    with refusing(path):
        header, tensors = _read(path)
        model, entries = _parts(header, tensors)
        if model is not None:
            check(model)
        used: set[str] = set()
        pairs = [_pair(index, entry, tensors, used) for index, entry in enumerate(entries)]
        if left := sorted(tensors.keys() - used):
            raise InterventionsFileError(f"the tensors {', '.join(left)} are numbers of nothing")
        return pairs


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Says of which file it is that something is wrong with.

    Raises:
        InterventionsFileError: in the place of what is raised inside.
    """
    try:
        yield
    except OtherModelError:
        raise
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        said = "its header is nested too deeply" if isinstance(error, RecursionError) else error.args[0]
        raise InterventionsFileError(f"{path} cannot be used: {said}") from error


def _read(path: Path) -> tuple[object, dict[str, Tensor]]:
    """The header and the tensors."""
    try:
        with safe_open(path, framework="pt") as opened:
            text = (opened.metadata() or {}).get(_HEADER)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InterventionsFileError(f"it is no file of safetensors ({error})") from error
    if text is None:
        raise InterventionsFileError("it holds tensors, and nothing says which interventions they are of")
    return json.loads(text, parse_constant=_no_number), tensors


def _no_number(text: str) -> float:
    raise InterventionsFileError(f"{text} is no number of JSON")


def _parts(header: object, tensors: Mapping[str, Tensor]) -> tuple[Model | None, list[object]]:
    if not isinstance(header, dict) or "version" not in header:
        raise InterventionsFileError("its header names no version")
    if type(header["version"]) is not int or header["version"] not in (1, VERSION):
        raise InterventionsFileError(f"it is of version {header['version']!r}; this library reads version {VERSION}")
    parts = _PARTS if header["version"] == 1 else (*_PARTS, _CHECKSUM)
    if sorted(header) != sorted(parts):
        raise InterventionsFileError(f"its header has {', '.join(sorted(header))}; it has to have {', '.join(parts)}")
    if header.pop(_CHECKSUM, None) not in (None, _checksum(header, tensors)):
        raise InterventionsFileError("it is damaged: its checksum is another than the one that it names")
    entries = header["interventions"]
    if not isinstance(entries, list):
        raise InterventionsFileError("its interventions are no list")
    return None if header["model"] is None else Model.from_data(header["model"]), entries


def _pair(index: int, entry: object, tensors: Mapping[str, Tensor], used: set[str]) -> tuple[str, Operation]:
    """One intervention.

    Args:
        index: its place in the file.
        entry: what the header says of it.
        tensors: of the file.
        used: takes the names of its tensors.
    """
    here = f"intervention {index}"
    if not isinstance(entry, dict):
        raise InterventionsFileError(f"{here} is {entry!r}, and no object")
    point, name = entry.get("point"), entry.get("operation")
    if not isinstance(point, str):
        raise InterventionsFileError(f"{here} has the hook point {point!r}, which is no name")
    if not isinstance(name, str) or name not in OPERATIONS:
        raise InterventionsFileError(f"{here} is the operation {name!r}; there are {', '.join(OPERATIONS)}")
    kind = OPERATIONS[name]
    known = [field.name for field in fields(kind)]
    if sorted([*entry, *({"where"} - entry.keys())]) != sorted(["point", "operation", *known]):
        raise InterventionsFileError(
            f"{here}, {name}, has the fields {', '.join(sorted(entry))}; it needs {', '.join(known)}"
        )
    given: dict[str, Any] = {}
    for field in known:
        value = entry.get(field)
        if field == "where":
            value = None if value is None else _condition(here, value)
        elif field in kind.numbers:
            value = _number(f"{field} of {here}", value, tensors, used)
        elif isinstance(value, dict):
            ends = value.get("slice")
            if list(value) != ["slice"] or not isinstance(ends, list) or len(ends) != 3:
                raise InterventionsFileError(f"{field} of {here} is {value!r}; it has to be numbers or a slice")
            value = slice(*ends)
        given[field] = value
    return point, kind(**given)


def _condition(here: str, value: object) -> Condition:
    names = sorted(field.name for field in fields(Condition))
    if not isinstance(value, dict) or sorted(value) != names:
        raise InterventionsFileError(f"where of {here} is {value!r}; a condition has {', '.join(names)}")
    return Condition(**value)


def _number(what: str, value: object, tensors: Mapping[str, Tensor], used: set[str]) -> object:
    if value is None or type(value) in (int, float):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((kind, name),) = value.items()
        if kind == "input" and isinstance(name, str):
            return name
        if kind == "tensor" and isinstance(name, str) and name in tensors:
            used.add(name)
            return tensors[name]
        if kind == "tensor":
            raise InterventionsFileError(f"{what} is the tensor {name!r}, which the file has not")
    raise InterventionsFileError(f"{what} is {value!r}; it has to be a number, a tensor or an input")
