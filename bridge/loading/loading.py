"""Load models: thin layers over `from_pretrained`."""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from adapters.config import ModelFields
from bridge.hooks.names import suggestion
from bridge.loading.patches import Patches, WeightConversions, keep_recording, patched
from bridge.native import NativeConfig, NativeModel

# --------------------------------------------------------------------------------------------------
# HookedTransformer's short names of models, and the hub names that they stand for.
# --------------------------------------------------------------------------------------------------


#: For each organisation on the hub, its models and their other names.
_TABLE: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("models.toml").read_text(encoding="utf-8")
)
#: The prefixes of hub names of models in HookedTransformer's own format.
OWN_FORMAT = ("NeelNanda/", "ArthurConmy/redwood_attn_2l", "Baidicoot/Othello-GPT-Transformer-Lens")
#: The other names of each model, by hub name.
MODEL_ALIASES = {
    f"{organisation}/{name}" if organisation else name: others.split()
    for organisation, models in _TABLE.items()
    for name, others in models.items()
}
#: The models' hub names.
OFFICIAL_MODEL_NAMES = list(MODEL_ALIASES)
#: The hub name for every lower-case name of a model.
BY_NAME = {name.lower(): hub for hub in OFFICIAL_MODEL_NAMES for name in (hub, *MODEL_ALIASES[hub])}


def hub_name(name: str) -> str:
    """Return the hub name for a short name. Other names, such as a folder's, are returned
    unchanged.

    Args:
        name: the model's name, case-insensitive.

    Example:
        >>> from bridge.loading.loading import hub_name
        >>> hub_name("pythia-70m"), hub_name("somebody/some-model")
        ('EleutherAI/pythia-70m', 'somebody/some-model')
    """
    return name if os.path.isdir(name) else BY_NAME.get(name.lower(), name)


# --------------------------------------------------------------------------------------------------
# Published training checkpoints of models.
# --------------------------------------------------------------------------------------------------


#: The steps at which EleutherAI saved Pythia.
PYTHIA_STEPS = (0, *(2**i for i in range(10)), *range(1000, 143001, 1000))
#: The steps at which stanford-crfm saved its GPT-2 models.
STANFORD_STEPS = (
    *range(0, 100, 10),
    *range(100, 2000, 50),
    *range(2000, 20000, 100),
    *range(20000, 400001, 1000),
)


def checkpoint_steps(name: str) -> tuple[int, ...]:
    """Return the training steps at which a model was saved.

    Raises:
        ValueError: no checkpoints are known for this model.

    Example:
        >>> from bridge.loading.loading import checkpoint_steps
        >>> checkpoint_steps("EleutherAI/pythia-70m")[:3]
        (0, 1, 2)
    """
    if re.match(r"(EleutherAI/)?pythia-", name):
        return PYTHIA_STEPS
    if name.startswith("stanford-crfm/"):
        return STANFORD_STEPS
    raise ValueError(
        f"no checkpoints are known for {name!r}; they are for EleutherAI/pythia-* and"
        " stanford-crfm/*"
    )


def checkpoint_revision(
    name: str, index: int | None, value: int | None
) -> tuple[str | None, dict[str, Any]]:
    """Return the hub revision of a checkpoint, and its fields in the bridge's `cfg`.

    Args:
        name: the model's name on the hub.
        index: its position in the list of the model's checkpoints; negative counts from the end.
        value: its training step.

    Raises:
        ValueError: both are passed, or there is no such checkpoint.
    """
    if index is None and value is None:
        return None, {}
    if index is not None and value is not None:
        raise ValueError(
            f"checkpoint_index={index} and checkpoint_value={value} exclude each other"
        )
    steps = checkpoint_steps(name)
    if value is not None:
        if value not in steps:
            near = sorted(steps, key=lambda step: abs(step - value))[:3]
            raise ValueError(
                f"{name} has no checkpoint at step {value}; the nearest are {sorted(near)}"
            )
        index = steps.index(value)
    assert index is not None
    if not -len(steps) <= index < len(steps):
        raise ValueError(
            f"{name} has {len(steps)} checkpoints; checkpoint_index={index} is out of range"
        )
    index %= len(steps)
    prefix = "step" if "pythia" in name else "checkpoint-"
    facts = {"from_checkpoint": True, "checkpoint_index": index, "checkpoint_value": steps[index]}
    return f"{prefix}{steps[index]}", facts | {"checkpoint_label_type": "step"}


# --------------------------------------------------------------------------------------------------
# The arguments of a load: files, placement of weights, and model options.
# --------------------------------------------------------------------------------------------------


#: Maps parts of a model to devices, as in accelerate.
DeviceMap = str | int | torch.device | Mapping[str, str | int | torch.device] | None
#: The memory limit of each device and the CPU, as in accelerate.
MaxMemory = Mapping[int | str, int | str] | None


def looks_like_a_path(model: str) -> bool:
    """Tell whether a name can only be a folder's: hub names have at most one slash and start with a
    letter.

    Args:
        model: the name.
    """
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model


def _check_folder(name: str, gguf_file: str | None) -> None:
    """Check that a name that can only be a folder's is a folder, and contains a model.

    Raises:
        FileNotFoundError: it is not a folder, or contains no model.
    """
    if os.path.isfile(name) and name.endswith(".gguf"):
        folder, file = os.path.split(name)
        raise FileNotFoundError(
            f"{name} is a file: give its folder, {folder or '.'}, and gguf_file={file!r}"
            " (--gguf-file)"
        )
    if not os.path.isdir(name):
        if looks_like_a_path(name):
            raise FileNotFoundError(f"{name}: there is no such folder")
        return
    if gguf_file is None and not os.path.exists(os.path.join(name, "config.json")):
        names = sorted(file for file in os.listdir(name) if file.endswith(".gguf"))
        files = " or ".join(f"gguf_file={file!r}" for file in names)
        hint = f"; it has GGUF: {files} (--gguf-file) loads it" if files else ""
        raise FileNotFoundError(
            f"{name}: there is no model in this folder, which has no config.json{hint}"
        )


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """The arguments of a load. Its fields are arguments of
    `TransformerBridge.boot_transformers`.
    """

    # Files.
    name: str
    revision: str | None
    checkpoint_index: int | None
    checkpoint_value: int | None
    gguf_file: str | None
    cache_dir: str | None
    force_download: bool
    local_files_only: bool
    token: str | bool | None
    trust_remote_code: bool
    # Placement of the weights.
    device: torch.device | str | None
    device_map: DeviceMap
    n_devices: int | None
    max_memory: MaxMemory
    # Model options.
    model_class: type[Any] | None
    hf_config_overrides: Mapping[str, object] | None
    n_ctx: int | None
    dtype: torch.dtype | str | None
    attn_implementation: str | None
    quantization_config: object
    load_weights: bool
    patches: Patches | None
    weight_conversions: WeightConversions | None
    from_pretrained: Mapping[str, object]

    def files(self, check_format: bool) -> ModelFiles:
        """Return the repository and the arguments for finding its files.

        Args:
            check_format: a model is loaded from there, not just the tokenizer.

        Raises:
            FileNotFoundError: a folder that does not exist.
            ValueError: a checkpoint that does not exist, or an unsupported format.
        """
        model = hub_name(self.name)
        if not model.strip():
            raise ValueError(
                f"the model's name is {self.name!r}; it must be a folder, or a name on the hub"
            )
        _check_folder(model, self.gguf_file)
        if check_format and not os.path.isdir(model) and model.startswith(OWN_FORMAT):
            raise ValueError(
                f"{model} is stored in HookedTransformer's own format: "
                "bridge.legacy.HookedTransformer.from_pretrained loads it"
            )
        checkpoint, facts = checkpoint_revision(model, self.checkpoint_index, self.checkpoint_value)
        if checkpoint is not None and self.revision is not None:
            raise ValueError(f"revision={self.revision!r} and a checkpoint exclude each other")
        options = {
            "cache_dir": self.cache_dir,
            "force_download": self.force_download,
            "token": self.token,
            "local_files_only": self.local_files_only,
            "gguf_file": self.gguf_file,
            "revision": checkpoint or self.revision,
        }
        where: dict[str, Any] = {name: value for name, value in options.items() if value}
        where["trust_remote_code"] = self.trust_remote_code
        facts["model_name"] = model
        sizes = {"n_ctx": self.n_ctx, "n_devices": self.n_devices}
        facts |= {name: size for name, size in sizes.items() if size is not None}
        return ModelFiles(model, where, facts)

    def _placed(self) -> dict[str, Any]:
        """Return the arguments of `from_pretrained` that place the weights.

        Raises:
            ValueError: arguments that exclude each other.
        """
        spreads = self.device_map is not None or self.n_devices is not None
        if self.max_memory is not None and not spreads:
            raise ValueError(
                "max_memory says how to spread a model: it needs device_map or n_devices"
            )
        if self.device_map is not None and self.n_devices is not None:
            raise ValueError("device_map and n_devices both say how to spread the model")
        if self.device is not None and not self.load_weights:
            raise ValueError(
                f"a model without weights is on no device: omit device={self.device!r}, or wrap"
                " AutoModelForCausalLM.from_config(config), whose weights are random"
            )
        if self.device is not None and spreads:
            raise ValueError(
                "device puts the whole model in one place; device_map and n_devices spread it"
            )
        if self.n_devices is not None:
            memory = self.max_memory or _first_devices(self.n_devices)
            return {"device_map": "balanced", "max_memory": memory}
        return {"device_map": self.device_map, "max_memory": self.max_memory or None}

    def config(self, files: ModelFiles) -> PreTrainedConfig:
        """Return the model's configuration, with the requested fields replaced."""
        config = AutoConfig.from_pretrained(files.name, **files.where)
        _override(config, self.hf_config_overrides or {})
        text = config.get_text_config() if hasattr(config, "vision_config") else config
        _override(text, context_fields(text, self.n_ctx))
        return config

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `from_pretrained` besides the configuration and the location of
        the files.

        Raises:
            ValueError: arguments that exclude each other; or an argument about loading weights when
                none are loaded.
        """
        options = {
            **self._placed(),
            "dtype": self.dtype,
            "attn_implementation": self.attn_implementation,
            "quantization_config": self.quantization_config,
            **self.from_pretrained,
        }
        arguments = {name: value for name, value in options.items() if value is not None}
        unused = arguments.keys() - {"dtype", "attn_implementation"}
        if unused and not self.load_weights:
            raise ValueError(
                f"{', '.join(sorted(unused))} would say how weights are loaded, but load_weights is"
                " False"
            )
        return arguments


@dataclass(frozen=True)
class ModelFiles:
    """The location of a model.

    Attributes:
        name: the model's hub name, or a folder.
        where: the arguments with which `from_pretrained` finds it.
        facts: fields of the bridge's `cfg`: its name, the requested sizes, and the training
            checkpoint, if it is one.
    """

    name: str
    where: dict[str, Any]
    facts: dict[str, Any]


def _override(config: PreTrainedConfig, changes: Mapping[str, object]) -> None:
    for name, value in changes.items():
        if not hasattr(config, name):
            raise ValueError(f"{type(config).__name__} has no field {name!r}")
        setattr(config, name, value)


def context_fields(config: PreTrainedConfig, n_ctx: int | None) -> dict[str, int]:
    """Return the changes to a Hugging Face configuration for a different context length. As few
    fields as possible are changed: the bridge checks the limit in its own configuration, and rotary
    embeddings may derive their scale from the fields (yarn, longrope, dynamic).

    Raises:
        ValueError: the configuration has no context length, or the model has learned fewer
            positions.
    """
    if n_ctx is None:
        return {}
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        if hasattr(config, name):
            break
    else:
        raise ValueError(f"{type(config).__name__} has no context length to set to n_ctx={n_ctx}")
    learned = config.model_type in ("gpt2", "opt", "gpt_neo", "bert")
    if learned and n_ctx > getattr(config, name):
        raise ValueError(
            f"n_ctx={n_ctx} is more than the {getattr(config, name)} positions that this model has"
            " learned"
        )
    is_rotary = getattr(config, "rope_parameters", None) is not None
    needs_longer_table = n_ctx > getattr(config, name) and not is_rotary
    return {name: n_ctx} if needs_longer_table else {}


def _first_devices(n: int) -> dict[int, int]:
    n_existing = torch.cuda.device_count()
    if n > n_existing:
        raise ValueError(f"n_devices={n}, but this machine has {n_existing}")
    return {i: torch.cuda.get_device_properties(i).total_memory for i in range(n)}


#: The tokenizer files; a folder with a tokenizer has one of them.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


class UnknownArgumentError(TypeError):
    """An argument for loading a model that neither the bridge nor Hugging Face's class accepts.

    Args:
        name: the name of the argument.
        loader: the name of the class.
        known: the bridge's own arguments.
    """

    def __init__(self, name: str, loader: str, known: Iterable[str]) -> None:
        # Pickling needs all arguments to rebuild the error in another process.
        super().__init__(name, loader, tuple(known))
        self.name = name
        self.loader = loader

    def __str__(self) -> str:
        name, loader, known = self.args
        return (
            f"{name!r} is an argument of neither the bridge nor {loader}.{suggestion(name, known)}"
        )


def load(request: LoadRequest, progress: bool) -> tuple[nn.Module, ModelFiles]:
    """Load a model from the hub or a folder; see `TransformerBridge.boot_transformers`.

    Args:
        request: the arguments of the load.
        progress: show progress bars.

    Raises:
        ValueError: arguments that exclude each other, a checkpoint that does not exist, or a model
            that is stored in HookedTransformer's own format.
        UnknownArgumentError: an unknown argument.
    """
    files = request.files(check_format=True)
    config = request.config(files)
    loader = request.model_class or _class_for(config)
    arguments = {"config": config, **files.where} | request.arguments()
    with _bars(progress), patched(request.patches, request.weight_conversions, loader, config):
        try:
            if request.load_weights:
                model = loader.from_pretrained(files.name, **arguments)
            else:
                model = _empty(loader, arguments)
        except TypeError as error:
            _explain_unknown(error, request.from_pretrained, loader)
            raise
        keep_recording(model, request.patches)
    quantiser: Any = getattr(model, "hf_quantizer", None)
    if "gguf_file" in files.where and getattr(quantiser, "packed_modules", None) == {}:
        # All weights are dequantised, so the model can be saved.
        quantiser.remove_quantization_config(model)
    if request.model_class is None:
        model = text_model(model)
    if request.device is not None:
        model.to(request.device)
    return model, files


#: The arguments that a loaded model supports: the tokenizer's files and the model's device.
_ARGUMENTS_OF_LOADED = (
    "name",
    "revision",
    "cache_dir",
    "force_download",
    "local_files_only",
    "token",
    "trust_remote_code",
    "device",
    "load_weights",
    "from_pretrained",
)


def loaded_already(model: nn.Module, request: LoadRequest) -> ModelFiles:
    """Move a loaded model to its device, and find the files of its tokenizer.

    Raises:
        ValueError: an argument would change how the model is loaded.
    """
    options = {
        name: value for name, value in vars(request).items() if name not in _ARGUMENTS_OF_LOADED
    }
    options |= request.from_pretrained
    clash = [name for name, value in options.items() if value is not None]
    if not request.load_weights:
        clash.append("load_weights")
    if clash:
        raise ValueError(
            f"{', '.join(clash)} would change how the model is loaded, but hf_model is loaded"
        )
    files = request.files(check_format=False)
    if request.device is not None:
        model.to(request.device)
    return files


def tokenizer_of(files: ModelFiles, progress: bool) -> PreTrainedTokenizerBase | None:
    """Return a model's tokenizer; None if its folder has none. A GGUF file contains its own."""
    folder = Path(files.name)
    may_lack_one = folder.is_dir() and "gguf_file" not in files.where
    if may_lack_one and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    with _bars(progress):
        return AutoTokenizer.from_pretrained(files.name, **files.where)


def make_native(
    config: ModelFields | Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    **changes: object,
) -> tuple[NativeModel, PreTrainedTokenizerBase | None]:
    """Return a small transformer with random weights, and its tokenizer; see
    `TransformerBridge.boot_native`.

    Args:
        config, tokenizer: as for `TransformerBridge.boot_native`.
        changes: replacements for fields of the configuration; None keeps a field.
    """
    if isinstance(config, NativeConfig):
        native = copy.copy(config)
    elif isinstance(config, ModelFields):
        native = NativeConfig(**config.native())
    else:
        native = NativeConfig(**config)
    for name, value in changes.items():
        if value is not None:
            setattr(native, name, str(value) if name == "device" else value)
    if tokenizer is None and native.tokenizer_name is not None:
        tokenizer = AutoTokenizer.from_pretrained(native.tokenizer_name)
    return NativeModel(native), tokenizer


def text_model(model: nn.Module) -> nn.Module:
    """Return the language model of a multimodal Gemma 3, which shares its modules; any other model
    unchanged.

    Args:
        model: a loaded model.
    """
    if type(model).__name__ != "Gemma3ForConditionalGeneration":
        return model
    full = cast(transformers.Gemma3ForConditionalGeneration, model)
    config = cast(transformers.Gemma3TextConfig, full.config.text_config)
    with torch.device("meta"):
        text = transformers.Gemma3ForCausalLM(config)
    text.model = full.model.language_model
    text.lm_head = full.lm_head
    text.generation_config = full.generation_config
    text.config.name_or_path = full.config.name_or_path
    return text.train(full.training)  # type: ignore[no-any-return]


def _class_for(config: PreTrainedConfig) -> type[Any]:
    """Return the class in the configuration's `architectures`, or the one with the head of its
    model type.
    """
    for name in config.architectures or ():
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            return model_class
    return transformers.AutoModelForCausalLM


def _explain_unknown(error: TypeError, names: Collection[str], loader: type[Any]) -> None:
    """Raise this library's error if Hugging Face's error says that a user's argument is unknown."""
    for name in names:
        if f"unexpected keyword argument {name!r}" in str(error):
            known = {field.name for field in fields(LoadRequest)} - {"name", "from_pretrained"}
            known |= {"hf_model", "tokenizer", "progress", "name_or_path"}
            raise UnknownArgumentError(name, loader.__name__, sorted(known)) from error


def _empty(loader: Any, kwargs: dict[str, Any]) -> nn.Module:
    """Return a model on the ``meta`` device."""
    config = kwargs["config"]
    allowed = ("dtype", "attn_implementation")
    options = {name: value for name, value in kwargs.items() if name in allowed}
    with torch.device("meta"):
        if hasattr(loader, "from_config"):  # one of transformers' Auto classes
            return loader.from_config(
                config, trust_remote_code=kwargs["trust_remote_code"], **options
            )
        return loader._from_config(config, **options)


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Hide progress bars during a load, unless they are requested."""
    from transformers.utils import logging

    if shown or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
