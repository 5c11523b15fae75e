"""The registry of adapters, by the model's class."""

from __future__ import annotations

import difflib
import importlib
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points

import transformers
from torch import nn
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from adapters.architecture import Architecture
from adapters.config import config_of
from adapters.families import CLASSES
from adapters.imports import older_than_declared
from adapters.points import base_path, has_module, join

#: A function that declares the architecture of a Hugging Face configuration.
Declare = Callable[[PreTrainedConfig], Architecture]

_REGISTRY: dict[str, Declare] = {}
#: Checks of a model, for declarations whose models can have other modules than declared.
_CHECKS: dict[Declare, Callable[[nn.Module], None]] = {}
#: The file of `adapters/families` that declares each class name, and the function there.
_FAMILY = {
    name: (family, function)
    for family, functions in CLASSES.items()
    for function, names in functions.items()
    for name in names
}
_loaded = False
_LOADING = threading.RLock()
#: The group of entry points through which other packages bring adapters.
ENTRY_POINTS = "transformer_bridge.adapters"

#: The pages that an error about an unsupported model refers to.
_PAGES = (
    "docs/lookup.md shows the models that have one, and docs/adapters.md shows how to write one."
)


class UnsupportedModelError(TypeError):
    """An error for a model whose class has no adapter."""


class UndeclaredOptionError(UnsupportedModelError):
    """An error for an option of the configuration that the adapter of the class does not cover: the
    declaration may be inferred.
    """


def register(
    *class_names: str, check: Callable[[nn.Module], None] | None = None
) -> Callable[[Declare], Declare]:
    """Register an adapter for all models whose class, or one of its base classes, has one of these
    names.

    Another package can register adapters through an entry point in the group
    ``transformer_bridge.adapters``, which names a module that calls this function. Registering a
    name again replaces the earlier adapter.

    Args:
        class_names: usually the family's ``...PreTrainedModel`` class, so that every head and every
            user's subclass is included.
        check: takes the model, and raises `UnsupportedModelError` if its modules are not the
            declared ones.

    Returns:
        A decorator for the function that declares the architecture from a Hugging Face
            configuration.

    Example:
        >>> from adapters import register
        >>> from adapters.families.llama import llama
        >>> _ = register("MyLlamaPreTrainedModel")(llama)
    """

    def add(declare: Declare) -> Declare:
        _REGISTRY.update(dict.fromkeys(class_names, declare))
        if check is not None:
            _CHECKS[declare] = check
        return declare

    return add


def only(config: PreTrainedConfig, **fields: object) -> None:
    """Restrict a declaration to some values of options; for any other value, the declaration has to
    be inferred.

    Args:
        config: a Hugging Face configuration.
        fields: for each field, the value for which the declaration holds; a tuple lists several.

    Raises:
        UndeclaredOptionError: a field has another value; the message names the field.

    Example:
        >>> from transformers import OlmoConfig
        >>> from adapters.registry import only
        >>> only(OlmoConfig(), clip_qkv=None)
    """
    for name, declared in fields.items():
        values = declared if isinstance(declared, tuple) else (declared,)
        value = getattr(config, name, None)
        if value not in values:
            raise UndeclaredOptionError(
                f"the adapter for {type(config).__name__} is for"
                f" {name}={' or '.join(map(repr, values))}, and this one has {value!r}"
            )


def supported() -> list[str]:
    """Return the class names that have an adapter, sorted.

    Example:
        >>> "GPT2PreTrainedModel" in supported()
        True
    """
    _load_other_packages()
    return sorted({*_REGISTRY, *_FAMILY})


def family_of(cls: type[nn.Module]) -> str | None:
    """Return the family, by its file name, whose adapter a class of models has; None if it is not
    one of this library's.

    Args:
        cls: a class of Hugging Face models.

    Example:
        >>> from transformers import MistralForCausalLM
        >>> from adapters.registry import family_of
        >>> family_of(MistralForCausalLM)
        'llama'
    """
    for base in cls.__mro__:
        if base.__name__ in _FAMILY:
            family, _ = _FAMILY[base.__name__]
            return family
    return None


def has_declaration(model: nn.Module) -> bool:
    """Tell whether one of a model's base classes has an adapter, or a wrapper hides the model from
    hooks.

    Args:
        model: a Hugging Face model.
    """
    wraps = isinstance(getattr(model, "module", None), PreTrainedModel)
    if wraps or not isinstance(model, PreTrainedModel):
        return True  # `declaration_for` reports the problem
    return any(True for _ in declaring(type(model)))


def inherits_declaration(model: nn.Module) -> str:
    """Return the class, if it is in another package, from which a model's class inherits its
    adapter; otherwise "".

    A user's subclass may compute something different from its parent, which the adapter describes.

    Args:
        model: a Hugging Face model.
    """
    for cls, _ in declaring(type(model)):
        # torch's own subclasses (FSDP) run their parent's forward.
        packages = (cls.__module__.partition(".")[0], "torch")
        package = type(model).__module__.partition(".")[0]
        return "" if package in packages else cls.__name__
    return ""


def is_declared(model: nn.Module) -> bool:
    """Tell whether a model's class has an adapter that covers the options of its configuration.

    Args:
        model: a Hugging Face model.
    """
    if not has_declaration(model):
        return False
    try:
        declaration_for(model)
    except UndeclaredOptionError:
        return False
    except UnsupportedModelError:
        pass  # an error, which is reported as such
    return True


def declaration_for(model: nn.Module) -> Architecture:
    """Return the declaration of this model's class for its configuration.

    Args:
        model: a Hugging Face model.

    Raises:
        UnsupportedModelError: none of its base classes has an adapter, or the model has no tokens.
    """
    for cls, declare in declaring(type(model)):
        _check_version(cls.__name__, declare)
        declared = declare(config_of(model))
        tokens = declared.token_embeddings
        path = join(base_path(model), tokens) if tokens else ""
        if _is_ours(declare) and not has_module(model, path):
            raise UndeclaredOptionError(
                f"{type(model).__name__} has no {path}, and the adapter of {cls.__name__} is for"
                " models with one"
            )
        return declared
    raise UnsupportedModelError(_why_undeclared(model))


def _why_undeclared(model: nn.Module) -> str:
    """Return the error message for a model whose class has no adapter."""
    name = type(model).__name__
    if isinstance(inner := getattr(model, "module", None), PreTrainedModel):
        return (
            f"{name} runs copies of the model, or in other processes, where hooks do not reach: "
            f"wrap the {type(inner).__name__} in its .module"
        )
    for cls in type(model).__mro__:
        if _declare(cls.__name__) is not None:
            return (
                f"{name} is not transformers' own: its {cls.__name__} is from {cls.__module__}, and"
                " may compute anything. docs/adapters.md shows how to declare what it computes: a"
                " declaration of yours, registered for the name."
            )
    message = f"there is no adapter for {name}."
    if not isinstance(model, PreTrainedModel):
        message = f"{name} is not a PreTrainedModel of transformers, and {message}"
    if near := difflib.get_close_matches(name, supported(), n=3, cutoff=0.5):
        message += f" The nearest are {', '.join(near)}."
    return f"{message} {_PAGES}"


def check_modules(model: nn.Module) -> None:
    """Check that a model has the modules that its adapter declares, if its configuration does not
    determine them.

    Args:
        model: a Hugging Face model.

    Raises:
        UnsupportedModelError: it does not have them.
    """
    for _, declare in declaring(type(model)):
        if check := _CHECKS.get(declare):
            check(model)
        return


def declaration_of(config: PreTrainedConfig) -> Architecture:
    """Return the declaration for the model of a configuration, which is the text model inside
    another model.

    Args:
        config: a Hugging Face configuration.

    Raises:
        UndeclaredOptionError: that model has no adapter.
    """
    config_name = type(config).__name__
    mapped = MODEL_MAPPING.get(type(config), None)
    text = mapped[0] if isinstance(mapped, tuple) else mapped
    names = [] if text is None else [cls.__name__ for cls in text.__mro__]
    # For some, transformers keeps no such list: the name follows from their configuration's.
    for name in (*names, f"{config_name.removesuffix('Config')}Model"):
        if (declare := _declare(name)) is not None:
            _check_version(name, declare)
            return declare(config)
    raise UndeclaredOptionError(f"the model of a {config_name} inside of it has no adapter")


def _check_version(name: str, declare: Declare) -> None:
    """Raise an error for a declaration of ours if the installed transformers has a different class
    of that name.
    """
    if _is_ours(declare) and (why := older_than_declared(name)):
        raise UndeclaredOptionError(why)


def _is_ours(declare: Declare) -> bool:
    return (declare.__module__ or "").startswith("adapters.families.")


def declaring(model_class: type) -> Iterator[tuple[type, Declare]]:
    """Yield the bases of a class that have an adapter, with the adapter; the nearest first.

    Args:
        model_class: a class of models.
    """
    for cls in model_class.__mro__:
        if (declare := _declare(cls.__name__)) is not None and not _is_namesake(cls, declare):
            yield cls, declare


def _is_namesake(cls: type, declare: Declare) -> bool:
    """Tell whether a class (of remote code) merely has the same name as the class that our
    declaration describes.
    """
    ours = _is_ours(declare) and hasattr(transformers, cls.__name__)
    return ours and cls.__module__.split(".")[0] != "transformers"


def _declare(name: str) -> Declare | None:
    """Return the adapter registered for the name of a class. A family in this library is imported
    when it is first needed.
    """
    _load_other_packages()
    if name in _REGISTRY or name not in _FAMILY:
        return _REGISTRY.get(name)
    family, function = _FAMILY[name]
    return getattr(importlib.import_module(f"adapters.families.{family}"), function)


def _load_other_packages() -> None:
    """Import the families of other packages, once."""
    global _loaded
    with _LOADING:
        if _loaded:
            return
        # Set before it is true: an adapter may look up others while it is being imported.
        _loaded = True
        try:
            for entry in entry_points(group=ENTRY_POINTS):
                _load_entry_point(entry)
        except BaseException:
            _loaded = False
            raise


def _load_entry_point(entry: EntryPoint) -> None:
    """Import an adapter of another package. An error in it is raised with a note that names the
    package.
    """
    try:
        entry.load()
    except BaseException as error:
        package = "an installed package"
        if entry.dist:
            package = f"{entry.dist.name} {entry.dist.version}"
        error.add_note(
            f"This happened while importing the adapter {entry.name!r} ({entry.value}), which"
            f" {package} declares as an entry point in {ENTRY_POINTS}. Repair that package, or"
            " uninstall it."
        )
        raise
