"""What differs between the versions of torch and transformers, each difference with the version and what needs it.

Nothing else asks for a version. One that is too old for all of it is refused as this is imported, before the rest of
the package is; what the installed one does not have is refused by name when it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch._guards import CompileContext, TracingContext

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.exporters import ExportedModel as ExportedModel
    from transformers.exporters import HfExporter as HfExporter
    from transformers.exporters.auto import get_exporter_class as get_exporter_class
    from transformers.exporters.utils import decompose_for_generation as decompose_for_generation


#: The oldest versions that it works with, as docs/versions.md shows them. `bridge.version` says the same.
_OLDEST = {"torch": "2.8", "transformers": "5.9"}
#: What exports are made of. 5.15 has other exporters, which return no `ExportedModel`; they ask for this torch.
_EXPORT = ("exporting a program", "5.23", "2.11")
#: Names that only some versions have: the module, what needs it, and the first versions of transformers and torch.
_SINCE = {
    "ExportedModel": ("transformers.exporters", *_EXPORT),
    "HfExporter": ("transformers.exporters", *_EXPORT),
    "get_exporter_class": ("transformers.exporters.auto", *_EXPORT),
    "decompose_for_generation": ("transformers.exporters.utils", *_EXPORT),
}
#: Classes that transformers changed: what we declare is there from this version on. An older one is inferred.
_DECLARED_SINCE = {
    # Before, the router returns no choice of experts, or is none.
    "DeepseekV2PreTrainedModel": "5.15",
    "DeepseekV3PreTrainedModel": "5.15",
    "Dots1PreTrainedModel": "5.15",
    "Ernie4_5_MoePreTrainedModel": "5.15",
    "ExaoneMoePreTrainedModel": "5.15",
    "Glm4MoePreTrainedModel": "5.15",
    "Glm4MoeLitePreTrainedModel": "5.15",
    "HunYuanMoEV1PreTrainedModel": "5.15",
    "SolarOpenPreTrainedModel": "5.15",
    # Before, what a router returns is in another order, or its experts are kept elsewhere.
    "AriaTextPreTrainedModel": "5.21",
    "GraniteMoePreTrainedModel": "5.21",
    "GraniteMoeSharedPreTrainedModel": "5.21",
    # Before, a block returns a tuple.
    "MoshiForCausalLM": "5.21",
    "MoshiModel": "5.21",
}


class VersionError(ImportError):
    """The installed version of a library does not have what this needs; the message names the version that does."""


def has_transformers(version: str) -> bool:
    """Whether the installed transformers is this version or a later one.

    Args:
        version: such as ``"5.13"``.

    Example:
        >>> from adapters.imports import has_transformers
        >>> has_transformers("5.9"), has_transformers("99")
        (True, False)
    """
    return _since(transformers, version)


def _since(library: ModuleType, version: str) -> bool:
    return Version(Version(library.__version__).base_version) >= Version(version)


def _check_versions() -> None:
    """Refuses what nothing here works with.

    Raises:
        VersionError: torch or transformers is older than the oldest that works.
    """
    if not all(_since(library, _OLDEST[library.__name__]) for library in (torch, transformers)):
        asked = " ".join(f"'{name}>={version}'" for name, version in _OLDEST.items())
        raise VersionError(
            f"transformer-bridge works with torch {_OLDEST['torch']} and transformers {_OLDEST['transformers']} or "
            f"later, and torch {torch.__version__} and transformers {transformers.__version__} are installed: "
            f"pip install {asked}"
        )


_check_versions()


def is_compiling() -> bool:
    """Whether torch compiles, or exports, what this thread runs.

    ``torch.compiler.is_compiling`` is true in every thread from 2.13 on, while one of them compiles anything.
    """
    if not torch.compiler.is_compiling():
        return False
    here = torch.compiler.is_dynamo_compiling()  # in code that is being read; elsewhere it runs beside the compiler
    return here or CompileContext.try_get() is not None or TracingContext.try_get() is not None


def registered_conversions() -> set[str]:
    """The names for which a user registered how weights are converted, as transformers keeps them.

    It does since 5.13, where what is registered takes part in saving as well. Before, there is nothing to keep.
    """
    if not has_transformers("5.13"):
        return set()
    found: set[str] = importlib.import_module("transformers.conversion_mapping").USER_REGISTERED_MAPPINGS
    return found


def check_patching() -> None:
    """Refuses a patched load before 5.21, where transformers' patching looks into every module that it could import.

    It imports them so, which fails without torchvision and Pillow, in the middle of the load.

    Raises:
        VersionError: transformers is older.
    """
    _require("loading with patches", "5.21")


def older_than_declared(name: str) -> str:
    """Why our declaration is not of this class as it is in the installed transformers; "" where it is.

    Args:
        name: of the class that the declaration is for.
    """
    since = _DECLARED_SINCE.get(name, "0")
    if has_transformers(since):
        return ""
    installed = transformers.__version__
    return f"the declaration for {name} is of transformers {since} or later, and {installed} is installed"


def check_batching() -> None:
    """Refuses transformers' continuous batching before 5.20, whose pages and options are others.

    Raises:
        VersionError: transformers is older.
    """
    _require("generate_batch", "5.20")


def check_tensor_parallel() -> None:
    """Refuses tensor parallelism before 5.16, where no parameter says which part of a weight it is.

    Raises:
        VersionError: transformers is older.
    """
    _require("a model that processes share (tensor parallelism)", "5.16")


def check_checkpointed_gradients() -> None:
    """Refuses to listen to gradients in a checkpointed block before 5.23: the checkpoint has its hooks in it.

    The weights' gradients came out wrong there where a hook changed the gradient at a block's input.

    Raises:
        VersionError: transformers is older.
    """
    _require("a gradient hook in a block with activation checkpointing", "5.23")


def checkpointing_method() -> str:
    """What a model's method is called that turns activation checkpointing on: before 5.23 as gradients are named."""
    return "activation_checkpointing_enable" if has_transformers("5.23") else "gradient_checkpointing_enable"


def is_checkpointed(model: nn.Module) -> bool:
    """Whether activation checkpointing is on: before 5.23 the attribute is called as gradients are.

    Args:
        model: a Hugging Face model.
    """
    newer = has_transformers("5.23")
    return bool(getattr(model, "is_activation_checkpointing" if newer else "is_gradient_checkpointing"))


def rotation_of(config: PreTrainedConfig) -> dict[str, Any]:
    """What a configuration says of rotary embeddings: one set, or one for each kind of layer.

    Until 5.15 an empty `rope_theta` stands among those for each kind of layer (Gemma 3).

    Args:
        config: a Hugging Face configuration.
    """
    found = dict(getattr(config, "rope_parameters", None) or {})
    if found.get("rope_theta", 0) is None:
        del found["rope_theta"]
    return found


def clamp_of(config: PreTrainedConfig) -> tuple[float, float]:
    """The limit and the slope of gpt-oss's activation function: until 5.18 they are constants of its source.

    Args:
        config: a Hugging Face configuration of a model with that function.
    """
    if not has_transformers("5.19") and config.model_type == "gpt_oss":
        return 7.0, 1.702
    return config.swiglu_limit, config.swiglu_alpha


def unembedding_of_gpt_neox() -> str:
    """Where GPT-NeoX's output layer is: since 5.14 it has the name that all others have."""
    return "lm_head" if has_transformers("5.14") else "embed_out"


def gptj_is_like_others() -> bool:
    """Whether GPT-J and CodeGen take all kernels, and their blocks return the stream alone: since 5.24."""
    return has_transformers("5.24")


def outputs_of_t5_encoder() -> int:
    """How many values a block of T5's encoder returns: since 5.15 as many as one of its decoder."""
    return 3 if has_transformers("5.15") else 2


def known_error(model: nn.Module) -> str:
    """What this version of transformers is known to compute wrongly in a model; "" where nothing is known.

    Args:
        model: a Hugging Face model.
    """
    config = getattr(model, "config", None)
    capped = getattr(config, "model_type", "") in ("gemma2", "vaultgemma") and getattr(
        config, "attn_logit_softcapping", None
    )
    if capped and getattr(config, "_attn_implementation", "") == "sdpa" and not has_transformers("5.21"):
        return (
            f"transformers {transformers.__version__} leaves this model's soft cap of the scores out of its sdpa "
            "attention (from 5.21 on it has none for such models): load the model with attn_implementation='eager'"
        )
    return ""


def __getattr__(name: str) -> object:
    if name not in _SINCE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, *needed = _SINCE[name]
    _require(*needed)
    return getattr(importlib.import_module(module), name)


def _require(use: str, of_transformers: str, of_torch: str = "0") -> None:
    for library, version in ((transformers, of_transformers), (torch, of_torch)):
        if not _since(library, version):
            name = library.__name__
            raise VersionError(
                f"{use} needs {name} {version} or later, and {library.__version__} is installed: "
                f"pip install '{name}>={version}'"
            )


# ----------------------------------------------------------------------------------------------------------------------
# Packages whose parts are imported when they are first asked for (PEP 562).
# ----------------------------------------------------------------------------------------------------------------------


def lazily(package: str, *modules: str, **names: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package. Type checkers read its imports under ``TYPE_CHECKING``.

    Args:
        package: its name.
        modules: modules of it.
        names: names that are in a module of it, with that module.

    Returns:
        The two functions.

    Example:
        >>> from adapters.imports import lazily
        >>> __getattr__, __dir__ = lazily("json", "decoder", JSONEncoder="encoder")
        >>> __getattr__("decoder").__name__, __getattr__("JSONEncoder").__name__
        ('json.decoder', 'JSONEncoder')
    """

    def get(name: str) -> object:
        if name in names:
            return getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *modules, *names})

    return get, listed
