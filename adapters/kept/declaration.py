"""A declaration with what it was found of: saved in a file, and read again."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from torch import nn

from adapters.architecture import Architecture
from adapters.kept.encoding import decoded, encoded
from adapters.kept.identity import Identity, digest
from adapters.model import ModelMap, map_model
from adapters.observe.errors import WRONG, one_line
from adapters.registry import UnsupportedModelError

_FORMAT = "transformer-bridge declaration 1"


class DeclarationError(UnsupportedModelError):
    """A declaration that was given is not one, is of another model, or does not hold of this one."""


@dataclass(frozen=True)
class Declaration:
    """What plays which part in a model, as it was declared or inferred: `TransformerBridge.declaration` returns it.

    Attributes:
        architecture: the declaration.
        of: which model it is of.
        inferred: it was inferred from a run, and not declared by an adapter.
        points: of the names of its hook points, a digest; "" where each process shows a part of them.
        not_offered: hook points, or what their names begin with, that did not hold or were not found, and why.
        no_layer_runs: why a run cannot start or stop at a layer; "" where it can.
        name: what an error calls it: the file that it is from.

    Example:
        >>> from bridge import TransformerBridge
        >>> TransformerBridge.boot_embedded().declaration().architecture.stack.path
        'layers'
    """

    architecture: Architecture
    of: Identity
    inferred: bool
    points: str = ""
    not_offered: Mapping[str, str] = field(default_factory=dict)
    no_layer_runs: str = ""
    name: str = "the declaration"

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes it as JSON. Whoever reads the file meanwhile sees the old one or the new one.

        Args:
            file: where to.

        Raises:
            ValueError: it holds something that is no data, such as a view of your own.

        Example:
            >>> import tempfile
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     bridge.declaration().save(f"{folder}/embedded.json")
            ...     again = TransformerBridge(bridge.original_model, declaration=f"{folder}/embedded.json")
            >>> list(again.hook_dict) == list(bridge.hook_dict)
            True
        """
        path = Path(file)
        said = {
            "format": _FORMAT,
            "of": asdict(self.of),
            "inferred": self.inferred,
            "points": self.points,
            "architecture": encoded(self.architecture),
            "not_offered": dict(self.not_offered),
            "no_layer_runs": self.no_layer_runs,
        }
        text = json.dumps(said, indent=1, allow_nan=False)
        new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            new.write_text(text)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Self:
        """Reads one that was saved. It is data: nothing in it is run.

        Args:
            file: where it is.

        Raises:
            FileNotFoundError: there is no such file.
            DeclarationError: it is no declaration, or a damaged one.

        Example:
            >>> from adapters.kept.declaration import Declaration
            >>> Declaration.load("model.json")
            Traceback (most recent call last):
            ...
            FileNotFoundError: [Errno 2] No such file or directory: 'model.json'
        """
        path = Path(file)
        try:
            said = json.loads(path.read_text())
            if not isinstance(said, dict) or said.get("format") != _FORMAT:
                raise DeclarationError(f"{file} is no declaration that this version reads ({_FORMAT!r})")
            return cls(**_fields(said), name=str(file))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, DeclarationError):
                raise
            raise DeclarationError(f"{file} is damaged: {error}") from None

    def map_of(self, model: nn.Module) -> ModelMap:
        """What plays which part in a model by this declaration.

        Args:
            model: the model.

        Raises:
            DeclarationError: it has not the modules that are declared.
        """
        try:
            found = map_model(model, self.architecture)
            found = found.without(self.not_offered)
        except WRONG as error:
            raise DeclarationError(f"{self.name} does not fit the model: {one_line(error)}") from error
        if self.points and found.layout is None and points_of([point.name for point in found.points]) != self.points:
            raise DeclarationError(f"{self.name} does not fit the model: its hook points are not those that were saved")
        return replace(found, inferred=self.inferred, no_layer_runs=self.no_layer_runs or found.no_layer_runs)


def points_of(names: Iterable[str]) -> str:
    """A digest of the names of hook points."""
    return digest("\n".join(sorted(names)))


def _fields(said: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says, by the names of a declaration's fields.

    Raises:
        ValueError, KeyError, TypeError: something of it is missing, or is something else.
    """
    architecture, of = decoded(said["architecture"]), said["of"]
    if not isinstance(architecture, Architecture):
        raise TypeError("its architecture is none")
    texts = [said["no_layer_runs"], said["points"], *said["not_offered"], *said["not_offered"].values()]
    if not isinstance(said["inferred"], bool) or not all(isinstance(each, str) for each in texts):
        raise ValueError("it says something else than names and reasons of what is not offered")
    return {
        "architecture": architecture,
        "of": Identity(**of),
        "inferred": said["inferred"],
        "points": said["points"],
        "not_offered": said["not_offered"],
        "no_layer_runs": said["no_layer_runs"],
    }
