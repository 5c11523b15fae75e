"""Interventions in a safetensors file: tensors, and a JSON header. Loading executes no code."""

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

from bridge.hooks.context import HookFunction
from bridge.hooks.studied_bridge import StudiedBridge
from bridge.interventions.operations import KINDS, Condition, Operation
from bridge.interventions.probes import Probe

Tensors = Mapping[str, Tensor]
#: All operations, by name: a file cannot hold anything else.
OPERATIONS: dict[str, type[Operation]] = {kind.__name__: kind for kind in (*KINDS, Probe)}
# --------------------------------------------------------------------------------------------------
# The identity of the model that interventions were made on, and its comparison with another.
# --------------------------------------------------------------------------------------------------


class OtherModelError(ValueError):
    """An error for interventions made on a model of another class, size or processing."""


@dataclass(frozen=True)
class Model:
    """The model that interventions were made on.

    Attributes:
        name: its name.
        kind: its class.
        sizes: its numbers of layers, heads, features, tokens.
        processed: the processing of its weights.
    """

    name: str
    kind: str
    sizes: Mapping[str, int | None]
    processed: Mapping[str, str]

    @classmethod
    def of(cls, bridge: StudiedBridge) -> Model:
        """Return the identity of a bridge's model."""
        cfg = bridge.cfg
        sizes = {
            name: getattr(cfg, name)
            for name in ("n_layers", "n_heads", "d_model", "d_head", "d_mlp", "d_vocab")
        }
        return cls(str(cfg.model_name), type(bridge.core).__name__, sizes, dict(cfg.processed))

    @classmethod
    def from_data(cls, data: object) -> Model:
        """Build the model's identity from the output of `dataclasses.asdict`.

        Raises:
            ValueError: it is not such an output.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(data, dict) or data.keys() != {*names}:
            raise ValueError(f"the model has to be described by {', '.join(names)}")
        name, kind, sizes, processed = (data[field] for field in names)
        texts = [name, kind, *processed.values()] if isinstance(processed, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("the model's name, class and processing have to be text")
        numbers = sizes.values() if isinstance(sizes, dict) else [""]
        if not all(size is None or type(size) is int for size in numbers):
            raise ValueError("the model's sizes have to be whole numbers")
        return cls(name, kind, sizes, processed)

    def check(self, bridge: StudiedBridge) -> None:
        """Reject a model that differs from this one; warn if only the name differs.

        Raises:
            OtherModelError: its class, sizes or processing differ.
        """
        other = Model.of(bridge)
        facts, other_facts = self._facts(), other._facts()
        differences = [
            f"{name} {facts.get(name)!r} there, {fact!r} here"
            for name, fact in other_facts.items()
            if facts.get(name) != fact
        ]
        if differences:
            raise OtherModelError(
                f"these interventions were made on {self.name}, which is another model than"
                f" {other.name}: {'; '.join(differences)}"
            )
        if self.name != other.name:
            warnings.warn(
                f"these interventions were made on {self.name}, and this model is {other.name}:"
                " their sizes are the same, what their features mean may not be",
                stacklevel=4,
            )

    def _facts(self) -> dict[str, object]:
        """Return the facts that must agree between two models."""
        return {"class": self.kind, **self.sizes, "processing": dict(self.processed)}


#: The second version has a checksum of the header and of the tensors.
VERSION = 2
_HEADER = "transformer_bridge_interventions"
_PARTS, _CHECKSUM = ("version", "model", "interventions"), "checksum"


class InterventionsFileError(ValueError):
    """An error for a file without interventions, or of an unknown version."""


def save(
    file: str | PathLike[str], pairs: Sequence[tuple[str, HookFunction]], model: Model | None
) -> None:
    """Write interventions; see `Interventions.save`."""
    tensors: dict[str, Tensor] = {}
    entries = [_entry(index, *pair, tensors) for index, pair in enumerate(pairs)]
    content = {
        "version": VERSION,
        "model": None if model is None else asdict(model),
        "interventions": entries,
    }
    header = {**content, _CHECKSUM: _checksum(content, tensors)}
    save_file(tensors, fspath(file), {_HEADER: json.dumps(header, allow_nan=False)})


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


def _checksum(header: Mapping[str, object], tensors: Tensors) -> str:
    """Return the SHA-256 of a header, and of the types, shapes and bytes of its tensors."""
    total = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        header_of_tensor = f"{name} {tensor.dtype} {list(tensor.shape)}"
        total.update(header_of_tensor.encode())
        content = tensor.contiguous().reshape(-1).view(torch.uint8)
        total.update(content.numpy().data)
    return total.hexdigest()


def read(file: str | PathLike[str], check: Callable[[Model], None]) -> list[tuple[str, Operation]]:
    """Read the interventions of a file.

    Args:
        file: the path.
        check: called with the model that they were made on, before anything else is checked.

    Raises:
        FileNotFoundError, InterventionsFileError: see `load`.
    """
    path = Path(file)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    with refusing(path):
        header, tensors = _read(path)
        model, entries = _content(header, tensors)
        if model is not None:
            check(model)
        used: set[str] = set()
        pairs = [_pair(f"intervention {i}", x, tensors, used) for i, x in enumerate(entries)]
        unused = sorted(tensors.keys() - used)
        if unused:
            raise InterventionsFileError(f"the tensors {', '.join(unused)} are numbers of nothing")
        return pairs


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn errors raised inside the ``with`` statement into errors that name the file.

    Raises:
        InterventionsFileError: in place of the original error.
    """
    try:
        yield
    except OtherModelError:
        raise
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        reason = "its header is nested too deeply" if deep else error.args[0]
        raise InterventionsFileError(f"{path} cannot be used: {reason}") from error


def _read(path: Path) -> tuple[object, dict[str, Tensor]]:
    """Return the header and the tensors."""
    try:
        with safe_open(path, framework="pt") as opened:
            text = (opened.metadata() or {}).get(_HEADER)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InterventionsFileError(f"it is not a safetensors file ({error})") from error
    if text is None:
        raise InterventionsFileError(
            "it holds tensors, and nothing says which interventions they are of"
        )
    return json.loads(text, parse_constant=_refuse_constant), tensors


def _refuse_constant(text: str) -> float:
    raise InterventionsFileError(f"{text} is not a JSON number")


def _content(header: object, tensors: Tensors) -> tuple[Model | None, list[object]]:
    """Check a header; return the model and the interventions' entries."""
    if not isinstance(header, dict) or "version" not in header:
        raise InterventionsFileError("its header names no version")
    version = header["version"]
    if type(version) is not int or version not in (1, VERSION):
        raise InterventionsFileError(
            f"it is of version {version!r}; this library reads version {VERSION}"
        )
    names = _PARTS if version == 1 else (*_PARTS, _CHECKSUM)
    if sorted(header) != sorted(names):
        raise InterventionsFileError(
            f"its header has {', '.join(sorted(header))}; it has to have {', '.join(names)}"
        )
    if header.pop(_CHECKSUM, None) not in (None, _checksum(header, tensors)):
        raise InterventionsFileError(
            "it is damaged: its checksum is another than the one that it names"
        )
    entries = header["interventions"]
    if not isinstance(entries, list):
        raise InterventionsFileError("its interventions are no list")
    model = header["model"]
    return None if model is None else Model.from_data(model), entries


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
