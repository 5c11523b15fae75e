"""Which adapter is for which model."""

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

#: From a Hugging Face configuration to what its models are made of.
Declare = Callable[[PreTrainedConfig], Architecture]

_REGISTRY: dict[str, Declare] = {}
#: What looks at a model, for the declarations whose models can have other modules than are declared.
_CHECKS: dict[Declare, Callable[[nn.Module], None]] = {}
#: The file of `adapters/families` that each class name is declared in, and the function there.
_FAMILY = {
    name: (family, function)
    for family, functions in CLASSES.items() for function, names in functions.items() for name in names
}  # fmt: skip
_loaded = False
_LOADING = threading.RLock()
#: The group of entry points through which other packages bring adapters.
ENTRY_POINTS = "transformer_bridge.adapters"

#: Where a refusal points to.
_PAGES = "docs/models.md lists the models that have one, and docs/adapters.md shows how to write one."


class UnsupportedModelError(TypeError):
    """There is no adapter for this model's class."""


class UndeclaredOptionError(UnsupportedModelError):
    """The adapter of this model's class says nothing of an option that its configuration takes: it may be inferred."""


def register(*class_names: str, check: Callable[[nn.Module], None] | None = None) -> Callable[[Declare], Declare]:
    """Registers an adapter for all models that have a class of one of these names among their bases.

    Another package registers its own through an entry point in the group ``transformer_bridge.adapters`` that names a
    module which calls this. A name that is registered again belongs to the later adapter.

    Args:
        class_names: usually the family's ``...PreTrainedModel`` class, so that every head and every subclass of a
            user's is included.
        check: is given the model, and raises `UnsupportedModelError` where its modules are not those declared.

    Returns:
        A decorator for the function that declares the architecture from a Hugging Face configuration.

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
    """Says which options a declaration is for: with any other, what plays which part has to be inferred.

    Args:
        config: a Hugging Face configuration.
        fields: its fields, with the value that the declaration is true of; a tuple has several.

    Raises:
        UndeclaredOptionError: a field has another value; it is named.

    Example:
        >>> from transformers import OlmoConfig
        >>> from adapters.registry import only
        >>> only(OlmoConfig(), clip_qkv=None)
    """
    for name, value in fields.items():
        found = getattr(config, name, None)
        if found not in (value if isinstance(value, tuple) else (value,)):
            said = " or ".join(map(repr, value if isinstance(value, tuple) else (value,)))
            raise UndeclaredOptionError(
                f"the adapter for {type(config).__name__} is for {name}={said}, and this one has {found!r}"
            )


def supported() -> list[str]:
    """The class names that have an adapter, sorted.

    Example:
        >>> "GPT2PreTrainedModel" in supported()
        True
    """
    _load_other_packages()
    return sorted({*_REGISTRY, *_FAMILY})


def family_of(cls: type[nn.Module]) -> str | None:
    """The family of ours whose adapter a class of models has: the name of its file; None: it has none.

    Args:
        cls: a class of Hugging Face models.

    Example:
        >>> from transformers import MistralForCausalLM
        >>> from adapters.registry import family_of
        >>> family_of(MistralForCausalLM)
        'llama'
    """
    return next((_FAMILY[base.__name__][0] for base in cls.__mro__ if base.__name__ in _FAMILY), None)


def has_declaration(model: nn.Module) -> bool:
    """Whether a class among a model's bases has an adapter, or what wraps it hides it from hooks.

    Args:
        model: a Hugging Face model.
    """
    if isinstance(getattr(model, "module", None), PreTrainedModel) or not isinstance(model, PreTrainedModel):
        return True  # `declaration_for` says what is wrong with it
    return any(True for _ in declaring(type(model)))


def inherits_declaration(model: nn.Module) -> str:
    """The class of another package that a model's class takes its adapter from; "" where that is its own package's.

    A subclass of yours may compute something else than its parent, of which the adapter is true.

    Args:
        model: a Hugging Face model.
    """
    for cls, _ in declaring(type(model)):
        # torch's own subclasses (FSDP) run their parent's forward.
        packages = (cls.__module__.partition(".")[0], "torch")
        return "" if type(model).__module__.partition(".")[0] in packages else cls.__name__
    return ""


def is_declared(model: nn.Module) -> bool:
    """Whether a model's class has an adapter that is for the options of its configuration.

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
        pass  # a refusal, which is said as such
    return True


def declaration_for(model: nn.Module) -> Architecture:
    """What the adapter of this model's class declares for its configuration.

    Args:
        model: a Hugging Face model.

    Raises:
        UnsupportedModelError: no class among its bases has an adapter, or it lacks the tokens that this is for.
    """
    for cls, declare in declaring(type(model)):
        _check_version(cls.__name__, declare)
        declared = declare(config_of(model))
        tokens = join(base_path(model), declared.token_embeddings) if declared.token_embeddings else ""
        if _is_ours(declare) and not has_module(model, tokens):
            raise UndeclaredOptionError(
                f"{type(model).__name__} has no {tokens}, and the adapter of {cls.__name__} is for models with one"
            )
        return declared
    name = type(model).__name__
    if isinstance(inner := getattr(model, "module", None), PreTrainedModel):
        raise UnsupportedModelError(
            f"{name} runs copies of the model, or in other processes, where hooks do not reach: "
            f"wrap the {type(inner).__name__} in its .module"
        )
    namesakes = [cls for cls in type(model).__mro__ if _declare(cls.__name__) is not None]
    if namesakes:
        cls = namesakes[0]
        raise UnsupportedModelError(
            f"{name} is not transformers' own: its {cls.__name__} is from {cls.__module__}, and may compute anything. "
            "docs/adapters.md shows how to declare what it computes: a declaration of yours, registered for the name."
        )
    near = difflib.get_close_matches(name, supported(), n=3, cutoff=0.5)
    hint = f" The nearest are {', '.join(near)}." if near else ""
    plain = "" if isinstance(model, PreTrainedModel) else f"{name} is no PreTrainedModel of transformers, and "
    raise UnsupportedModelError(f"{plain}there is no adapter for {name}.{hint} {_PAGES}")


def check_modules(model: nn.Module) -> None:
    """Looks whether a model's modules are those that its adapter declares, where its configuration does not say so.

    Args:
        model: a Hugging Face model.

    Raises:
        UnsupportedModelError: they are not.
    """
    for _, declare in declaring(type(model)):
        if check := _CHECKS.get(declare):
            check(model)
        return


def declaration_of(config: PreTrainedConfig) -> Architecture:
    """What is declared for the model that a configuration is of: the text model inside of another.

    Args:
        config: a Hugging Face configuration.

    Raises:
        UndeclaredOptionError: that model has no adapter.
    """
    found = MODEL_MAPPING.get(type(config), None)
    text = found[0] if isinstance(found, tuple) else found
    classes = () if text is None else text.__mro__
    # Of some, transformers keeps no such list: their configuration has their name.
    for name in (*(cls.__name__ for cls in classes), f"{type(config).__name__.removesuffix('Config')}Model"):
        if (declare := _declare(name)) is not None:
            _check_version(name, declare)
            return declare(config)
    raise UndeclaredOptionError(f"the model of a {type(config).__name__} inside of it has no adapter")


def _check_version(name: str, declare: Declare) -> None:
    """Refuses a declaration of ours for a class that is another one in the installed transformers."""
    if _is_ours(declare) and (why := older_than_declared(name)):
        raise UndeclaredOptionError(why)


def _is_ours(declare: Declare) -> bool:
    return (declare.__module__ or "").startswith("adapters.families.")


def declaring(model_class: type) -> Iterator[tuple[type, Declare]]:
    """The classes among the bases of one that have an adapter, with that; the nearest first.

    Args:
        model_class: a class of models.
    """
    for cls in model_class.__mro__:
        if (declare := _declare(cls.__name__)) is not None and not _is_namesake(cls, declare):
            yield cls, declare


def _is_namesake(cls: type, declare: Declare) -> bool:
    """Whether a class (of remote code) only has the name of the one that our declaration is for."""
    ours = _is_ours(declare) and hasattr(transformers, cls.__name__)
    return ours and cls.__module__.split(".")[0] != "transformers"


def _declare(name: str) -> Declare | None:
    """What is registered for the name of a class. Our own family for it is imported when it is first asked for."""
    _load_other_packages()
    if name in _REGISTRY or name not in _FAMILY:
        return _REGISTRY.get(name)
    family, function = _FAMILY[name]
    declare: Declare = getattr(importlib.import_module(f"adapters.families.{family}"), function)
    return declare


def _load_other_packages() -> None:
    """Imports the families of other packages, once."""
    global _loaded
    with _LOADING:
        if _loaded:
            return
        _loaded = True  # before it is true: an adapter may ask for others while it is being imported
        try:
            for entry in entry_points(group=ENTRY_POINTS):
                _load_entry_point(entry)
        except BaseException:
            _loaded = False
            raise


def _load_entry_point(entry: EntryPoint) -> None:
    """Imports an adapter of another package. Whatever goes wrong there is said to be theirs, and goes wrong here."""
    try:
        entry.load()
    except BaseException as error:
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an installed package"
        error.add_note(
            f"This happened while importing the adapter {entry.name!r} ({entry.value}), which {package} declares as an "
            f"entry point in {ENTRY_POINTS}. Repair that package, or uninstall it."
        )
        raise
