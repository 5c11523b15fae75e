"""Differences between versions of torch and transformers, each with the version and the reason.

Nothing else in the package checks a version. A version that is too old for everything raises an
error when this module is imported, before the rest of the package is; a feature that the installed
version lacks raises an error that names it when it is used.
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


#: The oldest supported versions, as docs/versions.md shows them; keep `bridge.version` in
#: agreement.
_OLDEST = {"torch": "2.8", "transformers": "5.9"}
#: The requirements of exports. 5.15 has other exporters, which return no `ExportedModel`; they need
#: this torch.
_EXPORT = ("exporting a program", "5.23", "2.11")
#: Names that only some versions have: the module, what needs it, and the first versions of
#: transformers and torch.
_SINCE = {
    "ExportedModel": ("transformers.exporters", *_EXPORT),
    "HfExporter": ("transformers.exporters", *_EXPORT),
    "get_exporter_class": ("transformers.exporters.auto", *_EXPORT),
    "decompose_for_generation": ("transformers.exporters.utils", *_EXPORT),
}
#: Classes that transformers changed: our declaration is valid from this version on. An older one is
#: inferred.
_DECLARED_SINCE = {
    # Before, no router returns the choice of experts.
    "DeepseekV2PreTrainedModel": "5.15",
    "DeepseekV3PreTrainedModel": "5.15",
    "Dots1PreTrainedModel": "5.15",
    "Ernie4_5_MoePreTrainedModel": "5.15",
    "ExaoneMoePreTrainedModel": "5.15",
    "Glm4MoePreTrainedModel": "5.15",
    "Glm4MoeLitePreTrainedModel": "5.15",
    "HunYuanMoEV1PreTrainedModel": "5.15",
    "SolarOpenPreTrainedModel": "5.15",
    # Before, a router's output has another order, or its experts are stored elsewhere.
    "AriaTextPreTrainedModel": "5.21",
    "GraniteMoePreTrainedModel": "5.21",
    "GraniteMoeSharedPreTrainedModel": "5.21",
    # Before, a block returns a tuple.
    "MoshiForCausalLM": "5.21",
    "MoshiModel": "5.21",
}


class VersionError(ImportError):
    """An error for a library whose installed version lacks a needed feature; the message names the
    version that has it.
    """


def has_transformers(version: str) -> bool:
    """Tell whether the installed transformers is this version or a later one.

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
    """Raise an error for versions that this library does not work with at all.

    Raises:
        VersionError: torch or transformers is older than the oldest that works.
    """
    if not all(_since(library, _OLDEST[library.__name__]) for library in (torch, transformers)):
        packages = " ".join(f"'{name}>={version}'" for name, version in _OLDEST.items())
        raise VersionError(
            f"transformer-bridge works with torch {_OLDEST['torch']} and transformers"
            f" {_OLDEST['transformers']} or later, and torch {torch.__version__} and transformers"
            f" {transformers.__version__} are installed: pip install {packages}"
        )


_check_versions()


def is_compiling() -> bool:
    """Tell whether torch compiles, or exports, the code that this thread runs.

    ``torch.compiler.is_compiling`` is true in every thread from 2.13 on, while one of them compiles
    anything.
    """
    if not torch.compiler.is_compiling():
        return False
    # True in code that is being traced; elsewhere, code runs beside the compiler.
    if torch.compiler.is_dynamo_compiling():
        return True
    return CompileContext.try_get() is not None or TracingContext.try_get() is not None


def registered_conversions() -> set[str]:
    """Return the names for which a user registered a weight conversion in transformers.

    Registered conversions also affect saving since transformers 5.13, which records them. Earlier
    versions have no such record.
    """
    if not has_transformers("5.13"):
        return set()
    return importlib.import_module("transformers.conversion_mapping").USER_REGISTERED_MAPPINGS


def check_patching() -> None:
    """Raise an error for a patched load before 5.21, where transformers' patching imports every
    module it finds.

    Those imports fail in the middle of the load if torchvision or Pillow is missing.

    Raises:
        VersionError: transformers is older.
    """
    _require("loading with patches", "5.21")


def older_than_declared(name: str) -> str:
    """Return why our declaration does not apply to this class in the installed transformers; "" if
    it does.

    Args:
        name: of the class that the declaration is for.
    """
    since = _DECLARED_SINCE.get(name, "0")
    if has_transformers(since):
        return ""
    installed = transformers.__version__
    return (
        f"the declaration for {name} is of transformers {since} or later, and {installed} is"
        " installed"
    )


def check_batching() -> None:
    """Raise an error for transformers' continuous batching before 5.20, whose pages and options
    differ.

    Raises:
        VersionError: transformers is older.
    """
    _require("generate_batch", "5.20")


def check_tensor_parallel() -> None:
    """Raise an error for tensor parallelism before 5.16, where parameters do not show which shard
    of a weight they are.

    Raises:
        VersionError: transformers is older.
    """
    _require("a model that processes share (tensor parallelism)", "5.16")


def check_checkpointed_gradients() -> None:
    """Raise an error for gradient hooks in a checkpointed block before 5.23, where the checkpoint
    adds its own hooks to the block. In those versions the weights' gradients are wrong if a hook
    changes the gradient at a block's input.

    Raises:
        VersionError: transformers is older.
    """
    _require("a gradient hook in a block with activation checkpointing", "5.23")


def checkpointing_method() -> str:
    """Return the name of the method that turns activation checkpointing on: before 5.23 it is
    called gradient checkpointing.
    """
    word = "activation" if has_transformers("5.23") else "gradient"
    return f"{word}_checkpointing_enable"


def is_checkpointed(model: nn.Module) -> bool:
    """Tell whether activation checkpointing is on: before 5.23 the attribute is called gradient
    checkpointing.

    Args:
        model: a Hugging Face model.
    """
    word = "activation" if has_transformers("5.23") else "gradient"
    return bool(getattr(model, f"is_{word}_checkpointing"))


def rotation_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the rotary embedding's parameters from a configuration: one set, or one for each kind
    of layer. Until 5.15, the sets by kind of layer also contain an empty `rope_theta` (Gemma 3).

    Args:
        config: a Hugging Face configuration.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if parameters.get("rope_theta", 0) is None:
        del parameters["rope_theta"]
    return parameters


def clamp_of(config: PreTrainedConfig) -> tuple[float, float]:
    """Return the limit and the slope of gpt-oss's activation function: until 5.18 they are
    constants in its source.

    Args:
        config: a Hugging Face configuration of a model with that function.
    """
    if not has_transformers("5.19") and config.model_type == "gpt_oss":
        return 7.0, 1.702
    return config.swiglu_limit, config.swiglu_alpha


def unembedding_of_gpt_neox() -> str:
    """Return the path of GPT-NeoX's output layer: since 5.14 it has the usual name."""
    return "lm_head" if has_transformers("5.14") else "embed_out"


def gptj_is_like_others() -> bool:
    """Tell whether GPT-J and CodeGen accept all kernels and their blocks return only the stream:
    since 5.24.
    """
    return has_transformers("5.24")


def outputs_of_t5_encoder() -> int:
    """Return the number of values that a block of T5's encoder returns: since 5.15 as many as a
    decoder block.
    """
    return 3 if has_transformers("5.15") else 2


def known_error(model: nn.Module) -> str:
    """Return the known error in this version's computation of a model; "" if none is known.

    Args:
        model: a Hugging Face model.
    """
    config = getattr(model, "config", None)
    if has_transformers("5.21") or getattr(config, "_attn_implementation", "") != "sdpa":
        return ""
    if getattr(config, "model_type", "") not in ("gemma2", "vaultgemma"):
        return ""
    if not getattr(config, "attn_logit_softcapping", None):
        return ""
    return (
        f"transformers {transformers.__version__} leaves this model's soft cap of the scores"
        " out of its sdpa attention (from 5.21 on it has none for such models): load the model"
        " with attn_implementation='eager'"
    )


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


# --------------------------------------------------------------------------------------------------
# Packages whose parts are imported when they are first accessed (PEP 562).
# --------------------------------------------------------------------------------------------------


def lazily(
    package: str, *modules: str, **names: str
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package. Type checkers read its imports under
    ``TYPE_CHECKING``.

    Args:
        package: its name.
        modules: modules of the package.
        names: names that the package exports, each with the module that defines it.

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
