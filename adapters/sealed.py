"""Data in a file that says when it was damaged: JSON with a checksum of itself. Nothing in it is ever run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Read = TypeVar("Read")
_SEAL = "checksum of this file"


def sealed(content: Mapping[str, Any], allow_nan: bool = True) -> str:
    """What JSON can hold, as a text that `unsealed` reads.

    Args:
        content: the data.
        allow_nan: let numbers that are not finite through, which JSON itself has not.

    Raises:
        ValueError, TypeError: something of it is none that JSON can hold.
    """
    said = json.loads(json.dumps(content, allow_nan=allow_nan))
    return json.dumps({**said, _SEAL: _checksum(said)}, indent=1) + "\n"


def unsealed(text: str | bytes) -> dict[str, Any]:
    """What was sealed. A text that was written before there were checksums has none, and is read as it is.

    Args:
        text: the file's content.

    Raises:
        ValueError: it is no JSON, or no object, or not what was written.

    Example:
        >>> from adapters.sealed import sealed, unsealed
        >>> unsealed(sealed({"rows": 128}).replace("128", "129"))
        Traceback (most recent call last):
        ...
        ValueError: its checksum is another than the one that it names
    """
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - a file is damaged, no argument is wrong
    checksum = found.pop(_SEAL, None)
    if checksum is not None and checksum != _checksum(found):
        raise ValueError("its checksum is another than the one that it names")
    return found


def read_file(
    path: str | Path, what: str, read: Callable[[Any], Read], opened: Callable[[bytes], Any] | None = None
) -> Read:
    """What a file says; an error about it names the file.

    Args:
        path: the file.
        what: such as ``"circuit"``.
        read: makes it of the data.
        opened: makes data of what is in the file; None: JSON with a checksum or without.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or holds something else.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"path is {str(path)!r}, which is no file")
    try:
        return read((opened or unsealed)(Path(path).read_bytes()))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} holds no {what} that can be read: {error}") from error


def _checksum(said: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()
