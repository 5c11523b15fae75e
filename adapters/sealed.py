"""JSON files with a checksum of their content, so that damage is detected. Nothing in them is ever
executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Read = TypeVar("Read")
_SEAL = "checksum of this file"


def sealed(content: Mapping[str, Any], allow_nan: bool = True) -> str:
    """Encode JSON data as text that `unsealed` reads.

    Args:
        content: the data.
        allow_nan: allow numbers that are not finite, which JSON itself lacks.

    Raises:
        ValueError, TypeError: a value in it cannot be encoded as JSON.
    """
    data = json.loads(json.dumps(content, allow_nan=allow_nan))
    return json.dumps({**data, _SEAL: _checksum(data)}, indent=1) + "\n"


def unsealed(text: str | bytes) -> dict[str, Any]:
    """Decode sealed text. Text without a checksum, from before checksums were added, is read
    unchecked.

    Args:
        text: the file's content.

    Raises:
        ValueError: it is not a JSON object, or its checksum differs.

    Example:
        >>> from adapters.sealed import sealed, unsealed
        >>> unsealed(sealed({"rows": 128}).replace("128", "129"))
        Traceback (most recent call last):
        ...
        ValueError: its checksum is another than the one that it names
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - a file is damaged, no argument is wrong
    checksum = data.pop(_SEAL, None)
    if checksum is not None and checksum != _checksum(data):
        raise ValueError("its checksum is another than the one that it names")
    return data


def read_file(
    path: str | Path,
    what: str,
    read: Callable[[Any], Read],
    opened: Callable[[bytes], Any] | None = None,
) -> Read:
    """Read a file; errors about it name the file.

    Args:
        path: the file.
        what: the kind of file, for errors, such as ``"circuit"``.
        read: converts the data to the result.
        opened: converts the file's content to data; None: JSON, with or without a checksum.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or contains something else.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"path is {str(path)!r}, which is no file")
    try:
        data = (opened or unsealed)(file.read_bytes())
        return read(data)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} holds no {what} that can be read: {error}") from error


def _checksum(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()
