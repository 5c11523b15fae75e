"""Programs that import `transformer_lens` get `bridge.legacy`, once this module has been imported.

For code that cannot be changed, such as another package. `bridge.legacy.utils` is then `transformer_lens.utils`, and so
is every other module: the same object under both names. It goes for the whole process, also where TransformerLens is
installed.

Example:
    >>> import bridge.legacy.as_transformer_lens
    >>> import transformer_lens.utils
    >>> from transformer_lens.hook_points import HookPoint
    >>> transformer_lens.utils.get_act_name("resid_pre", 3)
    'blocks.3.hook_resid_pre'
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable
from types import ModuleType

import bridge.legacy

NAME, OURS = "transformer_lens", bridge.legacy.__name__


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds our modules under the other name."""

    def find_spec(
        self, fullname: str, path: Iterable[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != NAME or importlib.util.find_spec(_ours(fullname)) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Puts our module where Python looks for the one that it has just made."""
        sys.modules[module.__name__] = importlib.import_module(_ours(module.__name__))


def _ours(name: str) -> str:
    return OURS + name[len(NAME) :]


if sys.modules.get(NAME, bridge.legacy) is not bridge.legacy:
    raise ImportError(f"{NAME} has been imported already: import {__name__} before it")
if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
