"""Which model a declaration is of: its code, its configuration, how it is loaded, the versions around it."""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from adapters.inputs.made import Given
from adapters.paths import core_path

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
        loaded: of its modules, of what is theirs and in which type, its attention, and what it is tried with.
        versions: of this library, transformers, torch and Python.
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
        version: of this library.
        inputs: what it is tried with, by the names of its own arguments; None: what is made up.
    """
    core = model.get_submodule(core_path(model))
    config = getattr(core, "config", None)  # a plain module has none
    told = config.to_dict() if isinstance(config, PreTrainedConfig) else {}
    # No file has infinities.
    said = json.loads(json.dumps(told, default=str, skipkeys=True), parse_constant=str)
    given = {name: list(x.shape) for name, x in (inputs or {}).items()}
    attention = str(getattr(config, "_attn_implementation", None))
    return Identity(
        model=type(core).__qualname__,
        code=digest("".join(sorted(_code_of(core)))),
        config={name: value for name, value in said.items() if name not in _OF_LOADING},
        loaded=digest(json.dumps([list(_shape_of(model)), given, attention])),
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


def _code_of(core: nn.Module) -> set[str]:
    """All code that the model's modules are made of: compiled, so that neither comments nor other code count."""
    code = _Code()
    for cls in {type(module) for module in core.modules()}:
        code.add_class(cls)
    for module in core.modules():
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):  # put there by a user
            code.add(vars(module)["forward"])
    return code.found


class _Code:
    def __init__(self) -> None:
        self.found: set[str] = set()
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
