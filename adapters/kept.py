"""Kept declarations: what was inferred and proved of a model, as a file, so that it is not found out again.

**In**: a declaration with its facts, what is not offered, and the model that it was found of.

**Out**: a JSON file, and from a file the same declaration, equal in every noun.

**How**:

1. `encoded` and `decoded` turn nouns into plain data and back: lists, objects, numbers and names. A name is one of a
   fixed vocabulary (the nouns of `adapters.architecture`, the views of `adapters.views`).
2. An `Identity` says what a file is true of: the model's class, its configuration but for what does not matter, the
   shapes of its parameters, the code of its modules, and the versions of torch, transformers and this library. What
   differs is named.
3. `Declaration` is the file: `save`, `load`. The cache (`folder`, `kept`, `keep`) finds one by the digest of its
   identity; it is written next to its place and moved there, so that two processes cannot meet in a half-written one.

**It refuses** (`DeclarationError`) a file that is damaged, is of another model, class or version, or has a name that is
not of the vocabulary. A file is data and never code: nothing is imported or unpickled. What cannot be encoded (a view
of a user's) is not kept, and that is said.

**It does not know** how a declaration was found, or what is done with it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import os
import platform
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any, Self

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from adapters import views
from adapters.architecture import Architecture, vocabulary
from adapters.inputs import Given
from adapters.model import ModelMap, map_model
from adapters.observe.observe import WRONG, one_line
from adapters.points import core_of
from adapters.registry import UnsupportedModelError
from adapters.sealed import sealed, unsealed
from adapters.views import View

# ----------------------------------------------------------------------------------------------------------------------
# A declaration as plain data, and back: lists, objects and numbers, never code.
# ----------------------------------------------------------------------------------------------------------------------


#: All that a declaration may be made of, by name. Nothing else is ever made from a file.
_VOCABULARY: Mapping[str, Callable[..., object]] = {
    cls.__name__: cls
    for cls in (
        *vocabulary(),
        *(cls for cls in vars(views).values() if isinstance(cls, type) and issubclass(cls, View)),
    )
}
#: What says that an object is one of the vocabulary, a mapping, a list (a JSON list is a tuple), or no finite number.
_KIND, _MAP, _LIST, _NUMBER = "is", "map", "list", "number"


def encoded(value: object) -> Any:
    """A declaration, or a value in it, as what JSON can hold.

    Args:
        value: the declaration.

    Raises:
        ValueError: something in it is of no kind that declarations are made of, such as a view of a user's.

    Example:
        >>> from adapters.kept import decoded, encoded
        >>> from adapters.views import Heads
        >>> encoded(Heads(4)), decoded(encoded(Heads(4)))
        ({'is': 'Heads', 'n_heads': 4}, Heads)
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [encoded(each) for each in value]
    if isinstance(value, list):
        return {_LIST: [encoded(each) for each in value]}
    if isinstance(value, Mapping):
        return {_MAP: [[encoded(key), encoded(each)] for key, each in value.items()]}
    name = type(value).__name__
    if _VOCABULARY.get(name) is not type(value):
        raise ValueError(f"{value!r} is a {type(value).__qualname__}, which no file of a declaration can hold")
    found = {key: getattr(value, key) for key in _arguments(name)}
    return {_KIND: name} | {key: encoded(each) for key, each in found.items() if each != _arguments(name)[key]}


def decoded(data: Any) -> Any:
    """The other way.

    Args:
        data: what `encoded` has made.

    Raises:
        ValueError: it has not; the message says what it is.
    """
    if isinstance(data, list):
        return tuple(decoded(each) for each in data)
    if not isinstance(data, dict):
        return data
    if _KIND in data:
        return _object(data)
    ((kind, held),) = data.items() if len(data) == 1 else [("", None)]
    if kind == _NUMBER:
        return float(str(held))
    if kind in (_LIST, _MAP) and isinstance(held, list):
        return [decoded(each) for each in held] if kind == _LIST else {key: decoded(each) for key, each in held}
    raise ValueError(f"{str(data)[:80]} is nothing that declarations are made of")


def _object(data: Mapping[str, Any]) -> object:
    name = data[_KIND]
    if name not in _VOCABULARY:
        raise ValueError(f"{name!r} is nothing that declarations are made of")
    given = {key: decoded(each) for key, each in data.items() if key != _KIND}
    if unknown := given.keys() - _arguments(name).keys():
        raise ValueError(f"{name} has no {', '.join(sorted(unknown))}")
    try:
        return _VOCABULARY[name](**given)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None


@cache
def _arguments(name: str) -> dict[str, object]:
    """What one of the vocabulary is made from, with the defaults."""
    parameters = inspect.signature(_VOCABULARY[name]).parameters
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return {key: each.default for key, each in parameters.items() if each.kind == plain}


# ----------------------------------------------------------------------------------------------------------------------
# Which model a declaration is of: its code, its configuration, how it is loaded, the versions around it.
# ----------------------------------------------------------------------------------------------------------------------


_EMPTY_CELL = CellType()
#: Fields of a configuration that say nothing of what is computed, or that say how it is loaded.
_OF_LOADING = (
    "_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "quantization_config",
    "id2label", "label2id", "_attn_implementation", "attn_implementation",
)  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """What has to be the same for a declaration to be of a model.

    Attributes:
        model: the name of its class.
        code: of the code of all its modules, and what that calls besides torch's and the standard library's.
        config: its configuration, without what says how it is loaded.
        loaded: of its modules, of what is theirs and in which type, of their attributes that code reads, its attention,
            and what it is tried with.
        versions: of this library (with its code), transformers, torch and Python.
    """

    model: str
    code: str
    config: Mapping[str, Any]
    loaded: str
    versions: Mapping[str, str]

    @property
    def key(self) -> str:
        """It in a few characters."""
        return digest(json.dumps(asdict(self), sort_keys=True))

    def why_not(self, other: Identity) -> str:
        """Why what is declared of another model cannot be meant of this one; "" where it can, and is to be proved.

        How it is loaded, and versions, are no reason: what is declared is proved on the model as it is.
        """
        if self.model != other.model:
            return f"it is of a {other.model}, and this is a {self.model}"
        for name in sorted({*self.config, *other.config}):
            here, there = self.config.get(name), other.config.get(name)
            if here != there:
                return f"its configuration says {name}={there!r}, and this one {here!r}"
        return f"the source of {self.model} is another one since" if self.code != other.code else ""


def identity_of(model: nn.Module, version: str, inputs: Given | None = None) -> Identity:
    """Which model this is.

    Args:
        model: a Hugging Face model, or one that wraps it.
        version: of this library, and which code that is: what another commit kept is not read.
        inputs: what it is tried with, by the names of its own arguments; None: what is made up.
    """
    core = core_of(model)
    config = getattr(core, "config", None)  # a plain module has none
    told = config.to_dict() if isinstance(config, PreTrainedConfig) else {}
    # No file has infinities.
    said = json.loads(json.dumps(told, default=str, skipkeys=True), parse_constant=str)
    given = {name: list(x.shape) for name, x in (inputs or {}).items()}
    attention = str(getattr(config, "_attn_implementation", None))
    code = _code_of(core)
    attributes = sorted(_attributes_of(core, code.names))
    return Identity(
        model=type(core).__qualname__,
        code=digest("".join(sorted(code.found))),
        config={name: value for name, value in said.items() if name not in _OF_LOADING},
        loaded=digest(json.dumps([list(_shape_of(model)), attributes, given, attention])),
        versions={
            "transformer-bridge": version,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )


def digest(text: str) -> str:
    """A text in a few characters."""
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def _shape_of(model: nn.Module) -> Iterator[tuple[str, str, list[tuple[str, list[int], str]]]]:
    for path, module in model.named_modules():
        own = [(name, list(p.shape), str(p.dtype)) for name, p in module.named_parameters(recurse=False)]
        yield path, type(module).__qualname__, own


def _code_of(core: nn.Module) -> _Code:
    """All code that the model's modules are made of: compiled, so that neither comments nor other code count."""
    code = _Code()
    for cls in {type(module) for module in core.modules()}:
        code.add_class(cls)
    for module in core.modules():
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):  # put there by a user
            code.add(vars(module)["forward"])
    return code


def _attributes_of(core: nn.Module, read: Set[str]) -> set[str]:
    """The attributes of its modules that code may read: those that it names, and all of torch's own modules."""
    code = _Code()
    for path, module in core.named_modules():
        of_torch = type(module).__module__.startswith("torch.nn.")
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE and (of_torch or name in read):
                for where, each in _leaves(value, f"{path}.{name}"):
                    code.add(each, where)
    return code.found


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    """What containers hold, with where it is."""
    if isinstance(value, Mapping | list | tuple):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(each, f"{name}[{key!r}]")
    else:
        yield name, value


#: What is no attribute of a model's own, or changes nothing of what plays which part (`_is_hooked`: it is spread).
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "training", "gradient_checkpointing", "_is_hooked"))


class _Code:
    """What code is made of, as text, and the names that it uses."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.names: set[str] = set()
        self._seen: set[int] = set()

    def add_class(self, cls: type) -> None:
        for each in cls.__mro__:
            if _is_looked_into(each.__module__) and id(each) not in self._seen:
                self._seen.add(id(each))
                for name, value in vars(each).items():
                    self.add(value, f"{each.__qualname__}.{name}")

    def add(self, value: object, name: str = "") -> None:
        """Code that a value holds, and that this names; a plain value itself."""
        if isinstance(value, bool | int | float | str) and not name.endswith("__"):  # not its documentation
            self.found.add(f"{name}={value!r}\n")
        elif isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, property):
            self.add(value.fget)
        elif isinstance(value, staticmethod | classmethod):
            self.add(value.__func__)
        elif isinstance(value, partial):
            self.add(value.func)
        elif callable(value):
            function = inspect.unwrap(getattr(value, "__func__", value))
            if isinstance(function, FunctionType) and _is_looked_into(function.__module__):
                self._add_function(function)

    def _add_function(self, function: FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        names: set[str] = set()
        self.found.add("".join([function.__qualname__, *_written(function.__code__, names), "\n"]))
        if function.__name__ != "__init__":  # which writes them
            self.names |= names
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.add(default, f"{function.__qualname__} by default")
        for name in sorted(names & function.__globals__.keys()):
            self.add(function.__globals__[name], name)
        for cell in function.__closure__ or ():
            if cell != _EMPTY_CELL:
                self.add(cell.cell_contents, f"{function.__qualname__} around it")


def _written(code: CodeType, names: set[str]) -> Iterator[str]:
    """What code does, without where it stands; the names that it uses are added to a set."""
    names |= set(code.co_names)
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _written(constant, names)
        elif not (isinstance(constant, str) and constant == code.co_consts[0]):  # documentation
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _is_looked_into(module: str | None) -> bool:
    """Whether code of a module is the model's own: what stands in other packages, their versions say."""
    name = module or ""
    package = name.partition(".")[0]
    if package == "transformers":
        return name.startswith("transformers.models.")
    return package not in ("torch", "builtins", "accelerate", "peft", "") and package not in sys.stdlib_module_names


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
        text = sealed(said, allow_nan=False)
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
            >>> from adapters.kept import Declaration
            >>> Declaration.load("model.json")
            Traceback (most recent call last):
            ...
            FileNotFoundError: [Errno 2] No such file or directory: 'model.json'
        """
        path = Path(file)
        try:
            said = unsealed(path.read_bytes())
            if said.get("format") != _FORMAT:
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
    plain = {name: said[name] for name in ("inferred", "points", "not_offered", "no_layer_runs")}
    return {"architecture": architecture, "of": Identity(**of), **plain}


# ----------------------------------------------------------------------------------------------------------------------
# The folder of declarations that were inferred before.
# ----------------------------------------------------------------------------------------------------------------------


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
