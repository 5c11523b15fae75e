"""The folder of declarations that were inferred before."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from adapters.kept.declaration import Declaration, DeclarationError
from adapters.kept.identity import Identity

_LOGGER = logging.getLogger("bridge")
#: What says where the folder is; set and empty, nothing is kept.
VARIABLE = "TRANSFORMER_BRIDGE_CACHE"


def folder() -> Path | None:
    """Where declarations are kept; None: nowhere."""
    said = os.environ.get(VARIABLE)
    if said is not None:
        return Path(said) / "declarations" if said else None
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "transformer-bridge" / "declarations"


def kept(of: Identity) -> Declaration | None:
    """The declaration that was kept of a model; None where there is none that can be read.

    Args:
        of: which model.
    """
    place = _place(of)
    if place is None or not place.is_file():
        return None
    try:
        found = Declaration.load(place)
    except (DeclarationError, OSError) as error:
        _LOGGER.info("a kept declaration is not used: %s", error)
        return None
    return found if found.of == of else None


def keep(declaration: Declaration) -> None:
    """Keeps a declaration for the next time. Where that cannot be done, it is inferred again then.

    Args:
        declaration: what was inferred and proved.
    """
    place = _place(declaration.of)
    if place is None:
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        declaration.save(place)
    except (OSError, ValueError) as error:
        _LOGGER.info("the declaration is not kept: %s", error)


def _place(of: Identity) -> Path | None:
    where = folder()
    return None if where is None else where / f"{of.model.rpartition('.')[2]}-{of.key}.json"
