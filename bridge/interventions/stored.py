"""The format of files of interventions and probes: a safetensors file with tensors, and a JSON
header that names its version, its model and a checksum. Loading executes no code.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from os import PathLike, fspath
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bridge.hooks.studied_bridge import StudiedBridge

Tensors = Mapping[str, Tensor]
#: The second version has a checksum of the header and of the tensors.
VERSION = 2
_CHECKSUM = "checksum"


class InterventionsFileError(ValueError):
    """An error for a file without interventions or without a probe, or of an unknown version."""


@dataclass(frozen=True)
class FileKind:
    """A kind of file.

    Attributes:
        name: what it holds, and the name of that entry in its header.
        versions: the versions that are read.
    """

    name: str
    versions: tuple[int, ...] = (VERSION,)

    @property
    def header(self) -> str:
        """The name of the header in the file's metadata."""
        return f"transformer_bridge_{self.name}"


# --------------------------------------------------------------------------------------------------
# The identity of the model that interventions were made on, and its comparison with another.
# --------------------------------------------------------------------------------------------------


class OtherModelError(ValueError):
    """An error for interventions or probes made on a model of another class, size or processing."""


@dataclass(frozen=True)
class Model:
    """The model that interventions or a probe were made on.

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

    def check(self, bridge: StudiedBridge, what: str = "these interventions were") -> None:
        """Reject a model that differs from this one; warn if only the name differs.

        Args:
            bridge: the bridge of the other model.
            what: the beginning of the message.

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
                f"{what} made on {self.name}, which is another model than {other.name}:"
                f" {'; '.join(differences)}"
            )
        if self.name != other.name:
            warnings.warn(
                f"{what} made on {self.name}, and this model is {other.name}: their sizes are the"
                " same, what their features mean may not be",
                stacklevel=4,
            )

    def _facts(self) -> dict[str, object]:
        """Return the facts that must agree between two models."""
        return {"class": self.kind, **self.sizes, "processing": dict(self.processed)}


# --------------------------------------------------------------------------------------------------
# Writing and reading.
# --------------------------------------------------------------------------------------------------


def write(
    file: str | PathLike[str], kind: FileKind, entry: object, tensors: Tensors, model: Model | None
) -> None:
    """Write a file: tensors, and a header with an entry of JSON types."""
    content = {
        "version": VERSION,
        "model": None if model is None else asdict(model),
        kind.name: entry,
    }
    header = {**content, _CHECKSUM: _checksum(content, tensors)}
    save_file(dict(tensors), fspath(file), {kind.header: json.dumps(header, allow_nan=False)})


def read_content(
    path: Path, kind: FileKind, check: Callable[[Model], None]
) -> tuple[object, dict[str, Tensor]]:
    """Return a file's entry and its tensors.

    Args:
        path: the path.
        kind: the kind of file.
        check: called with the model that it was made on, before anything else is checked.

    Raises:
        FileNotFoundError: there is no such file.
        InterventionsFileError: it is damaged, of another kind, or of an unknown version.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    header, tensors = _read(path, kind)
    model, entry = _content(header, tensors, kind)
    if model is not None:
        check(model)
    return entry, tensors


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


def _read(path: Path, kind: FileKind) -> tuple[object, dict[str, Tensor]]:
    """Return the header and the tensors."""
    try:
        with safe_open(path, framework="pt") as opened:
            text = (opened.metadata() or {}).get(kind.header)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InterventionsFileError(f"it is not a safetensors file ({error})") from error
    if text is None:
        raise InterventionsFileError(
            f"it holds tensors, and nothing says which {kind.name} they are of"
        )
    return json.loads(text, parse_constant=_refuse_constant), tensors


def _refuse_constant(text: str) -> float:
    raise InterventionsFileError(f"{text} is not a JSON number")


def _content(header: object, tensors: Tensors, kind: FileKind) -> tuple[Model | None, object]:
    """Check a header; return the model and the entry of the file's kind."""
    if not isinstance(header, dict) or "version" not in header:
        raise InterventionsFileError("its header names no version")
    version = header["version"]
    if type(version) is not int or version not in kind.versions:
        raise InterventionsFileError(
            f"it is of version {version!r}; this library reads version {VERSION}"
        )
    parts = ("version", "model", kind.name)
    names = parts if version == 1 else (*parts, _CHECKSUM)
    if sorted(header) != sorted(names):
        raise InterventionsFileError(
            f"its header has {', '.join(sorted(header))}; it has to have {', '.join(names)}"
        )
    if header.pop(_CHECKSUM, None) not in (None, _checksum(header, tensors)):
        raise InterventionsFileError(
            "it is damaged: its checksum is another than the one that it names"
        )
    model = header["model"]
    return None if model is None else Model.from_data(model), header[kind.name]


def _checksum(header: Mapping[str, object], tensors: Tensors) -> str:
    """Return the SHA-256 of a header, and of the types, shapes and bytes of its tensors."""
    total = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        header_of_tensor = f"{name} {tensor.dtype} {list(tensor.shape)}"
        total.update(header_of_tensor.encode())
        content = tensor.contiguous().reshape(-1).view(torch.uint8)
        total.update(content.numpy().data)
    return total.hexdigest()
