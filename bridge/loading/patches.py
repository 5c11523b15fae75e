"""Classes of transformers replaced for one load: `boot_transformers(..., patches=...)`.

transformers' registry of patches, and what it does with it (it puts the new class in the place of the old one in all
its modules while a model is made), are global. Here the class in that place meanwhile asks who makes the module: the
load that the patches are for gets the new class, everyone else the old one. All is put back afterwards, also after an
error, and so is what transformers changes in its classes for good (which classes' outputs it records).
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
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.monkey_patching import get_patch_mapping, register_patch_mapping, unregister_patch_mapping
from transformers.utils.output_capturing import OutputRecorder, maybe_install_capturing_hooks

from adapters.imports import check_patching, registered_conversions
from bridge.hooks.names import suggestion

#: Names, or patterns of names, of transformers' classes, and the classes in their place.
Patches = Mapping[str, type[nn.Module]]
#: What transformers records the outputs of, by the name of the output.
Table = dict[str, Any]
Conversions = list[Any]
#: A model's class, or one of transformers' Auto classes.
Loader = type[Any]
#: By model type or class name, what makes the checkpoint's tensors those of the patched modules.
WeightConversions = Mapping[str, Sequence[object]]

_LOCK = threading.RLock()
#: The load that the present code is part of.
_LOAD: ContextVar[object | None] = ContextVar("transformer_bridge_patched_load", default=None)


class _ReplacementClass(type):
    """The class of what takes the place of a replaced class.

    Attributes:
        load: the load that the replacement is for.
        new: the replacement.
        old: what was replaced, by the name of the module that it was in.
    """

    load: object
    new: type[nn.Module]
    old: dict[str, type[nn.Module]]

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        if _LOAD.get() is cls.load:
            return cls.new(*args, **kwargs)
        return cls.replaced_in(sys._getframe(1).f_globals.get("__name__", ""))(*args, **kwargs)

    def replaced_in(cls, module: str) -> type[nn.Module]:
        """What was replaced in a module."""
        return cls.old.get(module) or next(iter(cls.old.values()))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.new, *cls.old.values()))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, (cls.new, *cls.old.values()))


@contextmanager
def patched(
    patches: Patches | None, conversions: WeightConversions | None, loader: Loader, config: object
) -> Iterator[None]:
    """Loads in the body of a ``with`` statement, in this thread, with patches.

    Args:
        patches: see `Patches`.
        conversions: see `WeightConversions`.
        loader: the class that is loaded, one of transformers' Auto classes or a model's.
        config: the configuration of the model.

    Raises:
        VersionError: transformers cannot patch here.
        TypeError: a replacement that is no module class.
        ValueError: a name that no class of the model's has.
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
        registered, recorders = get_patch_mapping(), _recorders(replacements)
        places = _places(registered)
        converted = {name: get_checkpoint_conversion_mapping(name) for name in conversions or {}}
        users = set(registered_conversions())
        token = _LOAD.set(load)
        try:
            register_patch_mapping({**replacements}, overwrite=True)
            for name, made in (conversions or {}).items():
                mapping: Any = _Conversions(load, list(made), converted[name])
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
    """Lets a patched model record the outputs of its new modules also after the load.

    Args:
        model: the model that was loaded.
        patches: the patches of the load.
    """
    if patches:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                maybe_install_capturing_hooks(module)


class _Conversions(Conversions):
    """Weight conversions for one load. transformers copies a list of conversions before it uses it."""

    def __init__(self, load: object, conversions: Conversions, before: Conversions | None) -> None:
        super().__init__(conversions)
        self._load, self._before = load, before

    def __deepcopy__(self, memo: dict[int, object]) -> Conversions | None:
        return copy.deepcopy(list(self) if _LOAD.get() is self._load else self._before, {**memo})


def _checked(patches: Patches) -> Patches:
    for name, new in patches.items():
        if not (isinstance(new, type) and issubclass(new, nn.Module)):
            raise TypeError(f"patches[{name!r}] is {new!r}; it must be a class of modules (torch.nn.Module)")
        try:
            re.compile(name)
        except re.error as error:
            raise ValueError(
                f"patches[{name!r}] is neither the name of a class nor a regular expression: {error}"
            ) from error
    return patches


def _import_model(loader: Loader, config: object) -> None:
    """Imports the module of the model's class, so that its classes are there."""
    mapping = getattr(loader, "_model_mapping", None)
    if mapping is not None:
        _ = mapping[type(config)]


def _modules() -> list[ModuleType]:
    """transformers' modules that were imported."""
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] == "transformers"
    ]


def _replacements(patches: Patches, load: object) -> Table:
    """What takes the place of each class that the patches name.

    Raises:
        ValueError: a patch names none.
    """
    found: dict[str, dict[str, type[nn.Module]]] = {}
    for module in _modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and issubclass(value, nn.Module) and _patch_for(name, patches) is not None:
                found.setdefault(name, {})[module.__name__] = value
    for pattern in patches:
        if not any(_patch_for(name, patches) == pattern for name in found):
            known = {name for module in _modules() if ".modeling_" in module.__name__ for name in vars(module)}
            raise ValueError(
                f"patches[{pattern!r}] is the name, or a pattern of the names, of no class in transformers' modules "
                f"for this model.{suggestion(pattern, known)}"
            )
    replacements: dict[str, Any] = {}
    for name, old in found.items():
        key = _patch_for(name, patches)
        assert key is not None
        fields = {"load": load, "new": patches[key], "old": old, "__doc__": patches[key].__doc__}
        replacements[name] = _ReplacementClass(name, (nn.Module,), fields)
    return replacements


def _patch_for(name: str, patches: Patches) -> str | None:
    """Which patch is for a class, as transformers decides it: its own name, or else the first pattern."""
    if name in patches:
        return name
    return next((pattern for pattern in patches if re.search(pattern, name)), None)


def _recorders(replacements: Mapping[str, _ReplacementClass]) -> list[tuple[Table, Table]]:
    """What transformers records the outputs of, and copies of it: it puts new classes there for good."""
    found: list[tuple[Table, Table]] = []
    for module in _modules() if replacements else ():
        for value in list(vars(module).values()):
            table = vars(value).get("_can_record_outputs") if isinstance(value, type) else None
            if isinstance(table, dict) and all(table is not other for other, _ in found):
                found.append((table, {name: _copied(recorders) for name, recorders in table.items()}))
    return found


def _copied(recorders: Any) -> Any:
    if isinstance(recorders, list):
        return [_copied(recorder) for recorder in recorders]
    return copy.copy(recorders) if isinstance(recorders, OutputRecorder) else recorders


def _places(patches: Patches) -> dict[tuple[str, str], object]:
    """What is there now where patches apply, by module and name."""
    return {
        (module.__name__, name): value
        for module in _modules()
        for name, value in list(vars(module).items())
        if isinstance(value, type) and _patch_for(name, patches) is not None
    }


def _restore(
    replacements: Mapping[str, _ReplacementClass], registered: Patches, places: Mapping[tuple[str, str], object]
) -> None:
    """Takes back what was registered, and what transformers leaves behind where a load fails."""
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
    for module in _modules():  # what was imported meanwhile
        for name, replacement in replacements.items():
            if vars(module).get(name) is replacement:
                setattr(module, name, replacement.replaced_in(module.__name__))
