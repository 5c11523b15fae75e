"""What a bug report needs to say."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from torch import nn

from adapters.imports.versions import known_error
from adapters.layout import Layout
from bridge.facade.support_report import SupportReport
from bridge.version import __version__

_LIBRARIES = (
    "torch", "transformers", "tokenizers", "safetensors", "jaxtyping", "beartype", "greenlet", "accelerate", "peft",
)  # fmt: skip


def report(
    model: nn.Module, core: nn.Module, offered: SupportReport, processed: Mapping[str, str], layout: Layout | None
) -> str:
    """Versions, the model's class, what is offered of it, and what was done to its weights.

    Args:
        model: the wrapped model.
        core: the Hugging Face model in it.
        offered: what the bridge offers.
        processed: what was done to the weights.
        layout: how the model is spread over processes.
    """
    config = getattr(core, "config", None)
    lines = [
        ("transformer-bridge", __version__),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *((name, found) for name in _LIBRARIES if (found := _version(name))),
        ("model", " in ".join(dict.fromkeys([_class(core), _class(model)]))),
        ("attention", str(getattr(config, "_attn_implementation", None))),
        ("parameters", ", ".join(sorted({f"{each.dtype} on {each.device}" for each in core.parameters()}))),
        ("processed", ", ".join(f"{name}: {state}" for name, state in processed.items()) or "no"),
    ]
    if layout is not None:
        lines.append(("spread", layout.said))
    if wrong := known_error(core):
        lines.append(("known", wrong))
    width = max(len(name) for name, _ in lines)
    return "\n".join([*(f"{name:<{width}}  {value}" for name, value in lines), repr(offered)])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _class(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"
