"""An inferred declaration as the source of an adapter's file."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from adapters.architecture import Architecture
from adapters.norms import GEMMA_NORM, LAYER_NORM, NO_NORM, OPAQUE_NORM, RMS_NORM, NormKind

#: The kinds of norms that have a name.
_KINDS = {
    LAYER_NORM: "LAYER_NORM", RMS_NORM: "RMS_NORM", GEMMA_NORM: "GEMMA_NORM", NO_NORM: "NO_NORM",
    OPAQUE_NORM: "OPAQUE_NORM",
}  # fmt: skip
#: Where the names in a declaration come from.
_MODULES = {
    "adapters.architecture": (
        "Architecture", "Block", "Embedding", "Head", "Mix", "Readout", "Stack", "Step",
    ),
    "adapters.attention": ("AddedOutput", "Attention", "Gate", "Projection", "SinkGate"),
    "adapters.feed_forward": ("MLP", "MoE"),
    "adapters.mixers.part": ("Mixer",),
    "adapters.norms": ("Norm", "NormKind", *_KINDS.values()),
    "adapters.registry": ("register",),
    "adapters.views": (
        "Affine", "AlibiScores", "Composed", "FilledScores", "Heads", "HeadsOfBatch", "MaskedScores", "OneHead",
        "PositionsFirst", "SeveralStreams", "SinkScores", "columns", "gathered", "interleaved",
    ),
}  # fmt: skip
_WIDTH = 110


def source_of(architecture: Architecture, class_name: str, model_name: str) -> str:
    """The file of an adapter that declares this.

    Sizes are written as the model has them: a family's adapter takes them from the configuration, and says only what
    differs from its nearest relative. It is a first draft, and true of this configuration.

    Args:
        architecture: what is declared.
        class_name: the class that it is registered for, usually the family's ``...PreTrainedModel``.
        model_name: for the first line.
    """
    constants = _shared_parts(architecture)
    body = _written(architecture, 4, constants)
    lines = [f"{name} = {_written(part, 0, {})}" for part, name in constants.items()]
    function = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", class_name.removesuffix("PreTrainedModel")).lower()
    declared = [
        f'@register("{class_name}")',
        f"def {function}(config: PreTrainedConfig) -> Architecture:",
        f"    return {body}",
    ]
    text = "\n".join([*lines, "", "", *declared]) + "\n"
    imports = [
        f"from {module} import {', '.join(used)}"
        for module, names in _MODULES.items()
        if (used := [name for name in names if re.search(rf"\b{name}\b", text)])
    ]
    head = [
        f'"""{model_name}."""',
        "",
        "from __future__ import annotations",
        "",
        "from transformers import PreTrainedConfig",
    ]
    return "\n".join([*head, "", *imports, "", text])


def _shared_parts(architecture: Architecture) -> dict[Any, str]:
    """Parts that stand in blocks of several kinds, with a name for each."""
    counts: Counter[Any] = Counter()
    for stack in architecture.stacks:
        for block in {id(block): block for block in stack.every_block}.values():
            counts.update(dict.fromkeys((step.part for step in block.steps if _is_hashable(step.part)), 1))
    shared = [part for part, count in counts.items() if count > 1]
    names = Counter(type(part).__name__ for part in shared)
    seen: Counter[str] = Counter()
    found = {}
    for part in shared:
        kind = type(part).__name__
        seen[kind] += 1
        found[part] = kind.upper() + (f"_{seen[kind]}" if names[kind] > 1 else "")
    return found


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _written(value: Any, indent: int, constants: Mapping[Any, str]) -> str:
    """A value as Python source, in lines that are not too long."""
    if _is_hashable(value) and value in constants:
        return constants[value]
    if isinstance(value, NormKind) and value in _KINDS:
        return _KINDS[value]
    if is_dataclass(value) and not isinstance(value, type):
        inside = [_argument(field, getattr(value, field.name), indent + 4, constants) for field in fields(value)]
        return _joined(f"{type(value).__name__}(", [each for each in inside if each], ")", indent)
    if isinstance(value, Mapping):
        pairs = (f"{_written(k, 0, {})}: {_written(v, indent + 4, constants)}" for k, v in value.items())
        return _joined("{", pairs, "}", indent)
    if isinstance(value, tuple):
        inside = [_written(each, indent + 4, constants) for each in value]
        return _joined(
            "(", [*inside[:-1], inside[-1] + ("," if len(inside) == 1 else "")] if inside else [], ")", indent
        )
    if isinstance(value, list):
        return f"[{', '.join(_written(each, 0, {}) for each in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    inner = [
        _written(each, indent + 4, constants) for each in vars(value).values() if not isinstance(each, bool | tuple)
    ]
    return _joined(f"{type(value).__name__}(", inner, ")", indent)


def _argument(field: Field[Any], value: Any, indent: int, constants: Mapping[Any, str]) -> str:
    """A field as an argument; "" where it has its default."""
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    if default is not MISSING and value == default:
        return ""
    text = _written(value, indent, constants)
    return (
        text
        if field.name in ("name", "path", "kind", "part", "steps") and default is MISSING
        else f"{field.name}={text}"
    )


def _joined(start: str, inside: Iterable[str], end: str, indent: int) -> str:
    inside = list(inside)
    line = f"{start}{', '.join(inside)}{end}"
    if len(line) + indent <= _WIDTH and "\n" not in line:
        return line
    pad = " " * (indent + 4)
    return f"{start}\n" + "".join(f"{pad}{each.rstrip(',')},\n" for each in inside) + " " * indent + end
