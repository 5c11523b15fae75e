"""Make `import transformer_lens` return `bridge.legacy`, once this module has been imported.

Use it for code that cannot be changed, such as another package. `bridge.legacy.utils` is then
`transformer_lens.utils`, and likewise for every other module: the same object under both names. The
names are those of TransformerLens 2 and 4. The effect is process-wide, even if TransformerLens is
installed.

`importlib.metadata` reports version 4.3.0; use `version` to change it.

Example:
    >>> import bridge.legacy.as_transformer_lens
    >>> import transformer_lens.utils
    >>> from transformer_lens.hook_points import HookPoint
    >>> transformer_lens.utils.get_act_name("resid_pre", 3)
    'blocks.3.hook_resid_pre'
    >>> from transformer_lens.model_bridge import TransformerBridge
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import bridge.legacy

NAME, OURS = "transformer_lens", bridge.legacy.__name__


class _Named(importlib.metadata.Distribution):
    """The distribution that `importlib.metadata` finds as ``transformer-lens``: a version, and no
    files.
    """

    reported = "4.3.0"

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {self.reported}\n"

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder that returns our modules under the other name."""

    def find_spec(
        self, fullname: str, path: Iterable[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != NAME or importlib.util.find_spec(_ours(fullname)) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Replace the module that Python has just created with ours."""
        sys.modules[module.__name__] = importlib.import_module(_ours(module.__name__))

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        """Yield our distribution for `importlib.metadata`."""
        if getattr(context, "name", None) in ("transformer-lens", NAME):
            yield _Named()


class version:
    """The version that `importlib.metadata` reports for ``transformer-lens``, from now on or inside
    a ``with`` statement. It changes nothing else: the names are always those of TransformerLens 2
    and 4.

    Args:
        said: the version, such as ``"2.18.0"``.

    Example:
        >>> import importlib.metadata
        >>> from bridge.legacy import as_transformer_lens
        >>> with as_transformer_lens.version("2.18.0"):
        ...     importlib.metadata.version("transformer-lens")
        '2.18.0'
        >>> importlib.metadata.version("transformer-lens")
        '4.3.0'
    """

    def __init__(self, said: str) -> None:
        self._before, _Named.reported = _Named.reported, said

    def __enter__(self) -> None:
        """Enter the ``with`` statement; the version was set by the constructor."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _Named.reported = self._before


def _ours(name: str) -> str:
    return OURS + name[len(NAME) :]


if sys.modules.get(NAME, bridge.legacy) is not bridge.legacy:
    raise ImportError(f"{NAME} has been imported already: import {__name__} before it")
if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
