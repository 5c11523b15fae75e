"""Replace classes of transformers for one load: `boot_transformers(..., patches=...)`.

transformers' patch registry and its effect (while a model is made, the new class replaces the old
one in all its modules) are global. Here the temporary class checks which load creates the module:
the load with the patches gets the new class, every other caller the old one. Everything is restored
afterwards, also after an error, including the changes that transformers makes permanently to its
classes (the recorded output classes).
"""

from __future__ import annotations

import copy
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.monkey_patching import (
    get_patch_mapping,
    register_patch_mapping,
    unregister_patch_mapping,
)
from transformers.utils.output_capturing import OutputRecorder, maybe_install_capturing_hooks

from adapters.imports import check_patching, registered_conversions
from bridge.hooks.names import suggestion

#: Replacement classes by the name, or name pattern, of transformers' classes.
Patches = Mapping[str, type[nn.Module]]
#: The classes whose outputs transformers records, by the name of the output.
Table = dict[str, Any]
Conversions = list[Any]
#: A model's class, or one of transformers' Auto classes.
Loader = type[Any]
#: By model type or class name, the conversions from the checkpoint's tensors to those of the
#: patched modules.
WeightConversions = Mapping[str, Sequence[object]]

_LOCK = threading.RLock()
#: The load that the current context belongs to.
_LOAD: ContextVar[object | None] = ContextVar("transformer_bridge_patched_load", default=None)


class _ReplacementClass(type):
    """The metaclass of the temporary class that stands in for a replaced class.

    Attributes:
        load: the load with the patches.
        new: the replacement class.
        old: the replaced classes, by module name.
    """

    load: object
    new: type[nn.Module]
    old: dict[str, type[nn.Module]]

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        if _LOAD.get() is cls.load:
            return cls.new(*args, **kwargs)
        return cls.replaced_in(sys._getframe(1).f_globals.get("__name__", ""))(*args, **kwargs)

    def replaced_in(cls, module: str) -> type[nn.Module]:
        """Return the class that was replaced in a module."""
        return cls.old.get(module) or next(iter(cls.old.values()))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.new, *cls.old.values()))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, (cls.new, *cls.old.values()))


@contextmanager
def patched(
    patches: Patches | None, conversions: WeightConversions | None, loader: Loader, config: object
) -> Iterator[None]:
    """Apply patches to loads in the body of a ``with`` statement, in this thread.

    Args:
        patches: see `Patches`.
        conversions: see `WeightConversions`.
        loader: the class being loaded, one of transformers' Auto classes or a model's.
        config: the configuration of the model.

    Raises:
        VersionError: this version of transformers cannot patch.
        TypeError: a replacement that is not a module class.
        ValueError: a name that matches no class of the model.
    """
    if not patches and not conversions:
        yield
        return
    if patches:
        check_patching()
    _import_model(loader, config)
    load = object()
    with _LOCK:
        replacements = _replacements(_checked(patches or {}), load)
        registered = get_patch_mapping()
        recorders = _recorders(replacements)
        places = _places(registered)
        converted = {name: get_checkpoint_conversion_mapping(name) for name in conversions or {}}
        users = set(registered_conversions())
        token = _LOAD.set(load)
        try:
            register_patch_mapping({**replacements}, overwrite=True)
            for name, of_type in (conversions or {}).items():
                mapping: Any = _Conversions(load, list(of_type), converted[name])
                register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
            yield
        finally:
            _LOAD.reset(token)
            _restore(replacements, registered, places)
            for table, recorded in recorders:
                table.update(recorded)
            for name, before in converted.items():
                register_checkpoint_conversion_mapping(name, before, overwrite=True)
            registered_conversions().intersection_update(users)


def keep_recording(model: nn.Module, patches: Patches | None) -> None:
    """Make a patched model record the outputs of its new modules after the load, too.

    Args:
        model: the model that was loaded.
        patches: the patches of the load.
    """
    if patches:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                maybe_install_capturing_hooks(module)


class _Conversions(Conversions):
    """The weight conversions of one load. transformers copies a list of conversions before using
    it.
    """

    def __init__(self, load: object, conversions: Conversions, before: Conversions | None) -> None:
        super().__init__(conversions)
        self._load = load
        self._before = before

    def __deepcopy__(self, memo: dict[int, object]) -> Conversions | None:
        active = list(self) if _LOAD.get() is self._load else self._before
        return copy.deepcopy(active, {**memo})


def _checked(patches: Patches) -> Patches:
    for name, new in patches.items():
        if not (isinstance(new, type) and issubclass(new, nn.Module)):
            raise TypeError(
                f"patches[{name!r}] is {new!r}; it must be a class of modules (torch.nn.Module)"
            )
        try:
            re.compile(name)
        except re.error as error:
            raise ValueError(
                f"patches[{name!r}] is neither the name of a class nor a regular expression:"
                f" {error}"
            ) from error
    return patches


def _import_model(loader: Loader, config: object) -> None:
    """Import the module of the model's class, so that its classes exist."""
    mapping = getattr(loader, "_model_mapping", None)
    if mapping is not None:
        _ = mapping[type(config)]


def _modules() -> list[ModuleType]:
    """Return transformers' imported modules."""
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] == "transformers"
    ]


def _replacements(patches: Patches, load: object) -> Table:
    """Return the temporary class for each class that the patches name.

    Raises:
        ValueError: a patch matches no class.
    """
    classes: dict[str, dict[str, type[nn.Module]]] = {}
    for (module, name), value in _places(patches).items():
        if issubclass(value, nn.Module):
            classes.setdefault(name, {})[module] = value
    matched = {_patch_for(name, patches) for name in classes}
    for pattern in patches:
        if pattern not in matched:
            raise ValueError(
                f"patches[{pattern!r}] is the name, or a pattern of the names, of no class in"
                f" transformers' modules for this model.{suggestion(pattern, _known_names())}"
            )
    replacements: dict[str, Any] = {}
    for name, old in classes.items():
        key = _patch_for(name, patches)
        assert key is not None
        new = patches[key]
        fields = {"load": load, "new": new, "old": old, "__doc__": new.__doc__}
        replacements[name] = _ReplacementClass(name, (nn.Module,), fields)
    return replacements


def _known_names() -> set[str]:
    """Return the names in the modules of models."""
    names: set[str] = set()
    for module in _modules():
        if ".modeling_" in module.__name__:
            names.update(vars(module))
    return names


def _patch_for(name: str, patches: Patches) -> str | None:
    """Return the patch for a class by transformers' rule: an exact name first, else the first
    matching pattern.
    """
    if name in patches:
        return name
    return next((pattern for pattern in patches if re.search(pattern, name)), None)


def _recorders(replacements: Mapping[str, _ReplacementClass]) -> list[tuple[Table, Table]]:
    """Return transformers' tables of recorded output classes, and copies of them: patching changes
    them permanently.
    """
    tables: list[tuple[Table, Table]] = []
    if not replacements:
        return tables
    for module in _modules():
        for value in list(vars(module).values()):
            table = vars(value).get("_can_record_outputs") if isinstance(value, type) else None
            if isinstance(table, dict) and all(table is not other for other, _ in tables):
                copied = {name: _copied(recorders) for name, recorders in table.items()}
                tables.append((table, copied))
    return tables


def _copied(recorders: Any) -> Any:
    if isinstance(recorders, list):
        return [_copied(recorder) for recorder in recorders]
    return copy.copy(recorders) if isinstance(recorders, OutputRecorder) else recorders


def _places(patches: Patches) -> dict[tuple[str, str], type[Any]]:
    """Return the current classes that patches replace, by module and name."""
    places: dict[tuple[str, str], type[Any]] = {}
    for module in _modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and _patch_for(name, patches) is not None:
                places[module.__name__, name] = value
    return places


def _restore(
    replacements: Mapping[str, _ReplacementClass],
    registered: Patches,
    places: Mapping[tuple[str, str], object],
) -> None:
    """Remove the registered patches, and what transformers leaves behind when a load fails."""
    for name, replacement in replacements.items():
        if get_patch_mapping().get(name) is replacement:
            if name in registered:
                register_patch_mapping({name: registered[name]}, overwrite=True)
            else:
                unregister_patch_mapping([name])
    for (module_name, name), value in places.items():
        module = sys.modules[module_name]
        if vars(module).get(name) is not value:
            setattr(module, name, value)
    for module in _modules():  # imported in the meantime
        for name, replacement in replacements.items():
            if vars(module).get(name) is replacement:
                setattr(module, name, replacement.replaced_in(module.__name__))
