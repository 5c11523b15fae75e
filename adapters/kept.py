"""Kept declarations: a model's inferred and proved declaration in a file, for later sessions.

**In**: a declaration with its facts, the hook points that are not offered, and the model it was
inferred from.

**Out**: a JSON file, and from a file the same declaration, equal in every noun.

**How**:

1. `encoded` and `decoded` turn nouns into plain data and back: lists, objects, numbers and names. A
   name is one of a fixed vocabulary (the nouns of `adapters.architecture`, the views of
   `adapters.views`).
2. An `Identity` describes the model of a file: the model's class, its configuration except
   irrelevant fields, the shapes of its parameters, the code of its modules, and the versions of
   torch, transformers and this library. Any difference is named.
3. `Declaration` is the file: `save`, `load`. The cache (`folder`, `kept`, `keep`) finds one by the
   digest of its identity; it is written to a temporary file and then moved into place, so that no
   process reads a half-written one.

**Errors** (`DeclarationError`): a file that is damaged, belongs to another model, class or version,
or uses a name outside the vocabulary. A file is data and never code: nothing is imported or
unpickled. A declaration that cannot be encoded (with a user's own view) is not kept, and this is
reported.

**Independent of** how a declaration was inferred, and of its use.
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

# --------------------------------------------------------------------------------------------------
# A declaration as plain data, and back: lists, objects and numbers, never code.
# --------------------------------------------------------------------------------------------------


#: All types that a declaration may consist of, by name. A file can create nothing else.
_VOCABULARY: Mapping[str, Callable[..., object]] = {
    cls.__name__: cls
    for cls in (
        *vocabulary(),
        *(cls for cls in vars(views).values() if isinstance(cls, type) and issubclass(cls, View)),
    )
}
#: The marks of an object of the vocabulary, a mapping, a list (a JSON list is a tuple), or a number
#: that is not finite.
_KIND = "is"
_MAP = "map"
_LIST = "list"
_NUMBER = "number"


def encoded(value: object) -> Any:
    """Encode a declaration, or a value in it, as plain JSON data.

    Args:
        value: the declaration.

    Raises:
        ValueError: a value in it is not part of the vocabulary of declarations, such as a user's
            own view.

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
        return list(map(encoded, value))
    if isinstance(value, list):
        return {_LIST: list(map(encoded, value))}
    if isinstance(value, Mapping):
        return {_MAP: [[encoded(key), encoded(item)] for key, item in value.items()]}
    name = type(value).__name__
    if _VOCABULARY.get(name) is not type(value):
        raise ValueError(
            f"{value!r} is a {type(value).__qualname__}, which no file of a declaration can hold"
        )
    data = {_KIND: name}
    for key, usual in _arguments(name).items():
        item = getattr(value, key)
        if item != usual:
            data[key] = encoded(item)
    return data


def decoded(data: Any) -> Any:
    """Decode plain data into a declaration: the inverse of `encoded`.

    Args:
        data: the output of `encoded`.

    Raises:
        ValueError: it is not such an output; the message says why.
    """
    if isinstance(data, list):
        return tuple(map(decoded, data))
    if not isinstance(data, dict):
        return data
    if _KIND in data:
        return _object(data)
    ((kind, content),) = data.items() if len(data) == 1 else [("", None)]
    if kind == _NUMBER:
        return float(str(content))
    if kind == _LIST and isinstance(content, list):
        return list(map(decoded, content))
    if kind == _MAP and isinstance(content, list):
        return {key: decoded(item) for key, item in content}
    raise ValueError(f"{str(data)[:80]} is nothing that declarations are made of")


def _object(data: Mapping[str, Any]) -> object:
    name = data[_KIND]
    if name not in _VOCABULARY:
        raise ValueError(f"{name!r} is nothing that declarations are made of")
    arguments = {key: decoded(item) for key, item in data.items() if key != _KIND}
    if unknown := arguments.keys() - _arguments(name).keys():
        raise ValueError(f"{name} has no {', '.join(sorted(unknown))}")
    try:
        return _VOCABULARY[name](**arguments)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None


@cache
def _arguments(name: str) -> dict[str, object]:
    """Return the arguments of a type of the vocabulary, with the defaults."""
    parameters = inspect.signature(_VOCABULARY[name]).parameters
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return {name: x.default for name, x in parameters.items() if x.kind == plain}


# --------------------------------------------------------------------------------------------------
# The identity of a declaration's model: its code, its configuration, how it is loaded, the versions
# around it.
# --------------------------------------------------------------------------------------------------


_EMPTY_CELL = CellType()
#: Fields of a configuration that do not affect the computation, or that describe how it is loaded.
_OF_LOADING = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "id2label",
    "label2id",
    "_attn_implementation",
    "attn_implementation",
)


@dataclass(frozen=True)
class Identity:
    """The identity of a model: a kept declaration is read only for a model of the same identity.

    Attributes:
        model: the name of its class.
        code: a digest of the code of all its modules, and of the functions that these call, except
            torch's and the standard library's.
        config: its configuration, without fields about loading.
        loaded: a digest of its modules, their parameters and types, the attributes that code reads,
            the attention implementation, and the inputs of the trial run.
        versions: the versions of this library (with a digest of its code), transformers, torch and
            Python.
    """

    model: str
    code: str
    config: Mapping[str, Any]
    loaded: str
    versions: Mapping[str, str]

    @property
    def key(self) -> str:
        """Return a short digest of the identity."""
        return digest(json.dumps(asdict(self), sort_keys=True))

    def why_not(self, other: Identity) -> str:
        """Return why another model's declaration cannot apply to this one; "" if it may apply and
        has to be verified.

        Loading options and versions are not compared: a declaration is verified on the actual
        model.
        """
        if self.model != other.model:
            return f"it is of a {other.model}, and this is a {self.model}"
        for name in sorted({*self.config, *other.config}):
            value = self.config.get(name)
            other_value = other.config.get(name)
            if value != other_value:
                return f"its configuration says {name}={other_value!r}, and this one {value!r}"
        if self.code != other.code:
            return f"the source of {self.model} is another one since"
        return ""


def identity_of(model: nn.Module, version: str, inputs: Given | None = None) -> Identity:
    """Return the identity of a model.

    Args:
        model: a Hugging Face model, or one that wraps it.
        version: the version of this library and its code: declarations kept by a different commit
            are not read.
        inputs: the inputs of the trial run, by the names of its own arguments; None: generated.
    """
    core = core_of(model)
    config = getattr(core, "config", None)  # a plain module has none
    values = config.to_dict() if isinstance(config, PreTrainedConfig) else {}
    # No file has infinities.
    values = json.loads(json.dumps(values, default=str, skipkeys=True), parse_constant=str)
    code = _code_of(core)
    loaded = (
        list(_shape_of(model)),
        sorted(_attributes_of(core, code.names)),
        {name: list(x.shape) for name, x in (inputs or {}).items()},
        str(getattr(config, "_attn_implementation", None)),
    )
    return Identity(
        model=type(core).__qualname__,
        code=digest("".join(sorted(code.texts))),
        config={name: value for name, value in values.items() if name not in _OF_LOADING},
        loaded=digest(json.dumps(loaded)),
        versions={
            "transformer-bridge": version,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )


def digest(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def _shape_of(model: nn.Module) -> Iterator[tuple[str, str, list[object]]]:
    """Yield the path, the class and the parameters of each module."""
    for path, module in model.named_modules():
        parameters = module.named_parameters(recurse=False)
        own: list[object] = [(name, list(p.shape), str(p.dtype)) for name, p in parameters]
        yield path, type(module).__qualname__, own


def _code_of(core: nn.Module) -> _Code:
    """Return the code of all of a model's modules, compiled, so that comments and unrelated code do
    not count.
    """
    code = _Code()
    for cls in {type(module) for module in core.modules()}:
        code.add_class(cls)
    for module in core.modules():
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):  # set by a user
            code.add(vars(module)["forward"])
    return code


def _attributes_of(core: nn.Module, read: Set[str]) -> set[str]:
    """Return the attributes of modules that code may read: attributes named in the code, and all
    attributes of torch's own modules.
    """
    code = _Code()
    for path, module in core.named_modules():
        of_torch = type(module).__module__.startswith("torch.nn.")
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE and (of_torch or name in read):
                for leaf_name, leaf in _leaves(value, f"{path}.{name}"):
                    code.add(leaf, leaf_name)
    return code.texts


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield the values inside containers, with their paths."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}[{key!r}]")
    else:
        yield name, value


#: Attributes that every module has, or that do not affect the declaration (`_is_hooked`: it is
#: spread).
_OF_EVERY_MODULE = frozenset(
    (*vars(nn.Module()), "training", "gradient_checkpointing", "_is_hooked")
)


class _Code:
    """The texts of some code, and the names that it uses."""

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.names: set[str] = set()
        self._seen: set[int] = set()

    def add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if _is_looked_into(base.__module__) and self._is_new(base):
                for name, value in vars(base).items():
                    self.add(value, f"{base.__qualname__}.{name}")

    def _is_new(self, item: object) -> bool:
        """Tell whether a class or a function is new, and add it."""
        known = id(item) in self._seen
        self._seen.add(id(item))
        return not known

    def add(self, value: object, name: str = "") -> None:
        """Add the code that a value contains, under a name; add a plain value itself."""
        is_plain = isinstance(value, bool | int | float | str)
        if is_plain and not name.endswith("__"):  # not its documentation
            self.texts.add(f"{name}={value!r}\n")
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
        if not self._is_new(function):
            return
        own_name = function.__qualname__
        names: set[str] = set()
        self.texts.add("".join([own_name, *_written(function.__code__, names), "\n"]))
        if function.__name__ != "__init__":  # which writes them
            self.names |= names
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.add(default, f"{own_name} by default")
        for name in sorted(names & function.__globals__.keys()):
            self.add(function.__globals__[name], name)
        for cell in function.__closure__ or ():
            if cell != _EMPTY_CELL:
                self.add(cell.cell_contents, f"{own_name} around it")


def _written(code: CodeType, names: set[str]) -> Iterator[str]:
    """Yield a description of compiled code without its location; add the names that it uses to a
    set.
    """
    names |= set(code.co_names)
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _written(constant, names)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))
        elif not isinstance(constant, str) or constant != code.co_consts[0]:  # documentation
            yield repr(constant)


def _is_looked_into(module: str | None) -> bool:
    """Tell whether a module's code is the model's own: code of other packages is identified by
    their versions.
    """
    name = module or ""
    package = name.partition(".")[0]
    if package == "transformers":
        return name.startswith("transformers.models.")
    if package in ("torch", "builtins", "accelerate", "peft", ""):
        return False
    return package not in sys.stdlib_module_names


_FORMAT = "transformer-bridge declaration 1"


class DeclarationError(UnsupportedModelError):
    """An error for a file that is not a declaration, belongs to another model, or does not hold for
    this one.
    """


@dataclass(frozen=True, repr=False)
class Declaration:
    """A model's declaration, from an adapter or inferred; `TransformerBridge.declaration` returns
    it.

    Attributes:
        architecture: the declaration.
        of: the identity of its model.
        inferred: whether it was inferred from a run instead of declared by an adapter.
        points: a digest of the names of its hook points; "" if each process shows only some of
            them.
        not_offered: hook points, or prefixes of their names, that were not proved or not found,
            and the reason.
        no_layer_runs: why a run cannot start or stop at a layer; "" if it can.
        name: its name in errors: the file that it was read from.

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

    def __repr__(self) -> str:
        made = "inferred" if self.inferred else "by an adapter"
        missing = f", {len(self.not_offered)} things not offered" if self.not_offered else ""
        return f"Declaration({self.of.model}, {made}{missing})"

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the declaration as JSON. A concurrent reader sees either the old or the new file.

        Args:
            file: the path to write to.

        Raises:
            ValueError: a value in it cannot be encoded, such as a view of your own.

        Example:
            >>> import tempfile
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     bridge.declaration().save(f"{folder}/embedded.json")
            ...     again = TransformerBridge(
            ...         bridge.original_model, declaration=f"{folder}/embedded.json"
            ...     )
            >>> list(again.hook_dict) == list(bridge.hook_dict)
            True
        """
        path = Path(file)
        content = {
            "format": _FORMAT,
            "of": asdict(self.of),
            "inferred": self.inferred,
            "points": self.points,
            "architecture": encoded(self.architecture),
            "not_offered": dict(self.not_offered),
            "no_layer_runs": self.no_layer_runs,
        }
        text = sealed(content, allow_nan=False)
        new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            new.write_text(text)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Self:
        """Read a saved declaration. It is data: nothing in it is executed.

        Args:
            file: the path to read from.

        Raises:
            FileNotFoundError: there is no such file.
            DeclarationError: it is not a declaration, or a damaged one.

        Example:
            >>> from adapters.kept import Declaration
            >>> Declaration.load("model.json")
            Traceback (most recent call last):
            ...
            FileNotFoundError: [Errno 2] No such file or directory: 'model.json'
        """
        text = Path(file).read_bytes()
        try:
            content = unsealed(text)
            if content.get("format") != _FORMAT:
                raise DeclarationError(
                    f"{file} is no declaration that this version reads ({_FORMAT!r})"
                )
            return cls(**_fields(content), name=str(file))
        except DeclarationError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DeclarationError(f"{file} is damaged: {error}") from None

    def map_of(self, model: nn.Module) -> ModelMap:
        """Apply the declaration to a model.

        Args:
            model: the model.

        Raises:
            DeclarationError: it lacks declared modules.
        """
        mismatch = f"{self.name} does not fit the model"
        try:
            model_map = map_model(model, self.architecture).without(self.not_offered)
        except WRONG as error:
            raise DeclarationError(f"{mismatch}: {one_line(error)}") from error
        points = points_of(point.name for point in model_map.points)
        if self.points and model_map.layout is None and points != self.points:
            raise DeclarationError(f"{mismatch}: its hook points differ from the saved ones")
        no_layer_runs = self.no_layer_runs or model_map.no_layer_runs
        return replace(model_map, inferred=self.inferred, no_layer_runs=no_layer_runs)


def points_of(names: Iterable[str]) -> str:
    """Return a digest of the names of hook points."""
    return digest("\n".join(sorted(names)))


def _fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the content of a file into the fields of a declaration.

    Raises:
        ValueError, KeyError, TypeError: a field is missing or malformed.
    """
    architecture = decoded(content["architecture"])
    of = content["of"]
    if not isinstance(architecture, Architecture):
        raise TypeError("its architecture is none")
    names = ("inferred", "points", "not_offered", "no_layer_runs")
    plain = {name: content[name] for name in names}
    reasons = plain["not_offered"]
    texts = [plain["no_layer_runs"], plain["points"], *reasons, *reasons.values()]
    if not isinstance(plain["inferred"], bool) or not all(isinstance(x, str) for x in texts):
        raise ValueError("it has something other than names and reasons for what is not offered")
    return {"architecture": architecture, "of": Identity(**of), **plain}


# --------------------------------------------------------------------------------------------------
# The folder of declarations that were inferred before.
# --------------------------------------------------------------------------------------------------


_LOGGER = logging.getLogger("bridge")
#: The environment variable for the folder; if it is set and empty, nothing is kept.
VARIABLE = "TRANSFORMER_BRIDGE_CACHE"


def folder() -> Path | None:
    """Return the folder of kept declarations; None: nothing is kept."""
    own = os.environ.get(VARIABLE)
    if own is not None:
        return Path(own) / "declarations" if own else None
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "transformer-bridge" / "declarations"


def kept(of: Identity) -> Declaration | None:
    """Return the kept declaration of a model; None if there is no readable one.

    Args:
        of: the identity of the model.
    """
    place = _place(of)
    if place is None or not place.is_file():
        return None
    try:
        declaration = Declaration.load(place)
    except (DeclarationError, OSError) as error:
        _LOGGER.info("a kept declaration is not used: %s", error)
        return None
    return declaration if declaration.of == of else None


def keep(declaration: Declaration) -> None:
    """Keep a declaration for the next load. If that fails, the next load infers it again.

    Args:
        declaration: the inferred and proved declaration.
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
    kept_in = folder()
    if kept_in is None:
        return None
    return kept_in / f"{of.model.rpartition('.')[2]}-{of.key}.json"
