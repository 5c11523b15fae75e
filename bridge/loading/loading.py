"""Loading models: thin layers over `from_pretrained`."""

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

# ----------------------------------------------------------------------------------------------------------------------
# Short names of models, as HookedTransformer has them, and the hub names that they stand for.
# ----------------------------------------------------------------------------------------------------------------------


#: For each organisation on the hub, its models, and the other names that each goes by.
_TABLE: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
#: What the hub names of models in HookedTransformer's own format begin with.
OWN_FORMAT = ("NeelNanda/", "ArthurConmy/redwood_attn_2l", "Baidicoot/Othello-GPT-Transformer-Lens")
#: For each of the models' names on the hub, the other names that it goes by.
MODEL_ALIASES = {
    f"{organisation}/{name}" if organisation else name: others.split()
    for organisation, models in _TABLE.items()
    for name, others in models.items()
}
#: The models' names on the hub.
OFFICIAL_MODEL_NAMES = list(MODEL_ALIASES)
#: Every name of a model, in small letters, and the hub name that it stands for.
BY_NAME = {name.lower(): hub for hub in OFFICIAL_MODEL_NAMES for name in (hub, *MODEL_ALIASES[hub])}


def hub_name(name: str) -> str:
    """The hub name that a short name stands for. Any other name, such as a folder's, stays as it is.

    Args:
        name: of a model; small and capital letters are the same.

    Example:
        >>> from bridge.loading.loading import hub_name
        >>> hub_name("pythia-70m"), hub_name("somebody/some-model")
        ('EleutherAI/pythia-70m', 'somebody/some-model')
    """
    return name if os.path.isdir(name) else BY_NAME.get(name.lower(), name)


# ----------------------------------------------------------------------------------------------------------------------
# Training checkpoints that were published with a model.
# ----------------------------------------------------------------------------------------------------------------------


#: Steps at which EleutherAI saved Pythia.
PYTHIA_STEPS = (0, *(2**i for i in range(10)), *range(1000, 143001, 1000))
#: Steps at which stanford-crfm saved its GPT-2 models.
STANFORD_STEPS = (
    *range(0, 100, 10), *range(100, 2000, 50), *range(2000, 20000, 100), *range(20000, 400001, 1000),
)  # fmt: skip


def checkpoint_steps(name: str) -> tuple[int, ...]:
    """The training steps at which a model was saved.

    Raises:
        ValueError: none are known for this model.

    Example:
        >>> from bridge.loading.loading import checkpoint_steps
        >>> checkpoint_steps("EleutherAI/pythia-70m")[:3]
        (0, 1, 2)
    """
    if re.match(r"(EleutherAI/)?pythia-", name):
        return PYTHIA_STEPS
    if name.startswith("stanford-crfm/"):
        return STANFORD_STEPS
    raise ValueError(f"no checkpoints are known for {name!r}; they are for EleutherAI/pythia-* and stanford-crfm/*")


def checkpoint_revision(name: str, index: int | None, value: int | None) -> tuple[str | None, dict[str, Any]]:
    """Where a checkpoint is, and which one it is: the revision, and fields of the bridge's `cfg`.

    Args:
        name: the model's name on the hub.
        index: its position in the list of the model's checkpoints; negative counts from the end.
        value: its training step.

    Raises:
        ValueError: both are given, or there is no such checkpoint.
    """
    if index is None and value is None:
        return None, {}
    if index is not None and value is not None:
        raise ValueError(f"checkpoint_index={index} and checkpoint_value={value} exclude each other")
    steps = checkpoint_steps(name)
    if value is not None:
        if value not in steps:
            near = sorted(steps, key=lambda step: abs(step - value))[:3]
            raise ValueError(f"{name} has no checkpoint at step {value}; the nearest are {sorted(near)}")
        index = steps.index(value)
    assert index is not None
    if not -len(steps) <= index < len(steps):
        raise ValueError(f"{name} has {len(steps)} checkpoints; checkpoint_index={index} is out of range")
    index %= len(steps)
    prefix = "step" if "pythia" in name else "checkpoint-"
    facts = {"from_checkpoint": True, "checkpoint_index": index, "checkpoint_value": steps[index]}
    return f"{prefix}{steps[index]}", facts | {"checkpoint_label_type": "step"}


# ----------------------------------------------------------------------------------------------------------------------
# What is asked of a load: which files, where the weights are to be, and what of the model.
# ----------------------------------------------------------------------------------------------------------------------


#: Where the parts of a model are to be, as accelerate takes it.
DeviceMap = str | int | torch.device | Mapping[str, str | int | torch.device] | None
#: How much each device, or the CPU, may hold, likewise.
MaxMemory = Mapping[int | str, int | str] | None


def looks_like_a_path(model: str) -> bool:
    """Whether a name can only be a folder's: those of the hub have one slash at most, and start with a letter.

    Args:
        model: the name.
    """
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model


def _check_folder(name: str, gguf_file: str | None) -> None:
    """Refuses what can only be a folder's name and is none, and a folder without a model.

    Raises:
        FileNotFoundError: it is so.
    """
    if os.path.isfile(name) and name.endswith(".gguf"):
        folder, file = os.path.split(name)
        raise FileNotFoundError(
            f"{name} is a file: give its folder, {folder or '.'}, and gguf_file={file!r} (--gguf-file)"
        )
    if not os.path.isdir(name):
        if looks_like_a_path(name):
            raise FileNotFoundError(f"{name}: there is no such folder")
        return
    if gguf_file is None and not os.path.exists(os.path.join(name, "config.json")):
        found = sorted(file for file in os.listdir(name) if file.endswith(".gguf"))
        files = " or ".join(f"gguf_file={file!r}" for file in found)
        hint = f"; it has GGUF: {files} (--gguf-file) loads it" if found else ""
        raise FileNotFoundError(f"{name}: there is no model in this folder, which has no config.json{hint}")


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What is asked of a load. The fields are arguments of `TransformerBridge.boot_transformers`."""

    # Which files.
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
    # Where the weights are to be.
    device: torch.device | str | None
    device_map: DeviceMap
    n_devices: int | None
    max_memory: MaxMemory
    # What of the model, and as what.
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
        """The repository, and what its files are asked for with.

        Args:
            check_format: a model is loaded from there, not the tokenizer alone.

        Raises:
            FileNotFoundError: a folder that does not exist.
            ValueError: a checkpoint that does not exist, or a format that is another's.
        """
        name = hub_name(self.name)
        _check_folder(name, self.gguf_file)
        if check_format and not os.path.isdir(name) and name.startswith(OWN_FORMAT):
            raise ValueError(
                f"{name} is stored in HookedTransformer's own format: "
                "bridge.legacy.HookedTransformer.from_pretrained loads it"
            )
        checkpoint, facts = checkpoint_revision(name, self.checkpoint_index, self.checkpoint_value)
        if checkpoint is not None and self.revision is not None:
            raise ValueError(f"revision={self.revision!r} and a checkpoint exclude each other")
        asked = {
            "cache_dir": self.cache_dir, "force_download": self.force_download, "token": self.token,
            "local_files_only": self.local_files_only, "gguf_file": self.gguf_file,
            "revision": checkpoint or self.revision,
        }  # fmt: skip
        where: dict[str, Any] = {key: value for key, value in asked.items() if value}
        where["trust_remote_code"] = self.trust_remote_code
        return ModelFiles(name, where, {"model_name": name} | facts)

    def _placed(self) -> dict[str, Any]:
        """What `from_pretrained` is given that says where the weights are to be.

        Raises:
            ValueError: arguments that exclude each other.
        """
        spreads = self.device_map is not None or self.n_devices is not None
        if self.max_memory is not None and not spreads:
            raise ValueError("max_memory says how to spread a model: it needs device_map or n_devices")
        if self.device_map is not None and self.n_devices is not None:
            raise ValueError("device_map and n_devices both say how to spread the model")
        if self.device is not None and not self.load_weights:
            raise ValueError(
                f"a model without weights is on no device, so device={self.device!r} cannot be had: leave it out; or "
                "wrap AutoModelForCausalLM.from_config(config), whose weights are random"
            )
        if self.device is not None and spreads:
            raise ValueError("device puts the whole model in one place; device_map and n_devices spread it")
        if self.n_devices is not None:
            return {"device_map": "balanced", "max_memory": self.max_memory or _first_devices(self.n_devices)}
        return {"device_map": self.device_map, "max_memory": self.max_memory or None}

    def config(self, files: ModelFiles) -> PreTrainedConfig:
        """The model's configuration, with the fields that are to be others."""
        config = AutoConfig.from_pretrained(files.name, **files.where)
        _override(config, self.hf_config_overrides or {})
        text = config.get_text_config() if hasattr(config, "vision_config") else config
        _override(text, context_fields(text, self.n_ctx))
        return config

    def arguments(self) -> dict[str, Any]:
        """What `from_pretrained` is given besides its configuration and where the files are.

        Raises:
            ValueError: arguments that exclude each other; or something would say how weights are loaded, and none are.
        """
        given = {
            **self._placed(), "dtype": self.dtype, "attn_implementation": self.attn_implementation,
            "quantization_config": self.quantization_config, **self.from_pretrained,
        }  # fmt: skip
        made = {name: value for name, value in given.items() if value is not None}
        if not self.load_weights and (idle := made.keys() - {"dtype", "attn_implementation"}):
            raise ValueError(f"{', '.join(sorted(idle))} would say how weights are loaded, but load_weights is False")
        return made


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is.

    Attributes:
        name: of the model on the hub, or a folder.
        where: what `from_pretrained` is given to find it.
        facts: fields of the bridge's `cfg`: its name, and which training checkpoint it is, if it is one.
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
    """What to change in a Hugging Face configuration for another context length.

    Raises:
        ValueError: it has none, or the model has learned fewer positions.
    """
    if n_ctx is None:
        return {}
    name = next((n for n in ("max_position_embeddings", "n_positions", "seq_length") if hasattr(config, n)), None)
    if name is None:
        raise ValueError(f"{type(config).__name__} has no context length to set to n_ctx={n_ctx}")
    learned = config.model_type in ("gpt2", "opt", "gpt_neo", "bert")
    if learned and n_ctx > getattr(config, name):
        raise ValueError(
            f"n_ctx={n_ctx} is more than the {getattr(config, name)} positions that this model has learned"
        )
    # A table of learned positions keeps its size; the limit that the bridge checks is its configuration's.
    return {} if learned else {name: n_ctx}


def _first_devices(n: int) -> dict[int, int]:
    found = torch.cuda.device_count()
    if n > found:
        raise ValueError(f"n_devices={n}, but this machine has {found}")
    return {i: torch.cuda.get_device_properties(i).total_memory for i in range(n)}


#: The files of which a folder with a tokenizer has one.
_OF_TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
)  # fmt: skip


class UnknownArgumentError(TypeError):
    """An argument for loading a model that neither the bridge nor Hugging Face's class knows.

    Args:
        name: of the argument.
        loader: what the class is called.
        known: the bridge's own arguments.
    """

    def __init__(self, name: str, loader: str, known: Iterable[str]) -> None:
        super().__init__(name, loader, tuple(known))  # with all of them it is made again in another process
        self.name, self.loader = name, loader

    def __str__(self) -> str:
        name, loader, known = self.args
        return f"{name!r} is an argument of neither the bridge nor {loader}.{suggestion(name, known)}"


def load(asked: LoadRequest, progress: bool) -> tuple[nn.Module, ModelFiles]:
    """A model from the hub or a folder; see `TransformerBridge.boot_transformers`.

    Args:
        asked: what is asked for.
        progress: show the bars of loading.

    Raises:
        ValueError: arguments that exclude each other, a checkpoint that does not exist, or a model that is stored in
            HookedTransformer's own format.
        UnknownArgumentError: an argument that nobody knows.
    """
    files = asked.files(check_format=True)
    config = asked.config(files)
    loader = asked.model_class or _class_for(config)
    arguments = {"config": config, **files.where} | asked.arguments()
    with _bars(progress), patched(asked.patches, asked.weight_conversions, loader, config):
        try:
            model = loader.from_pretrained(files.name, **arguments) if asked.load_weights else _empty(loader, arguments)
        except TypeError as error:
            _explain_unknown(error, asked.from_pretrained, loader)
            raise
        keep_recording(model, asked.patches)
    quantiser: Any = getattr(model, "hf_quantizer", None)
    if "gguf_file" in files.where and getattr(quantiser, "packed_modules", None) == {}:
        quantiser.remove_quantization_config(model)  # every weight was dequantised: the model can be saved
    model = text_model(model) if asked.model_class is None else model
    if asked.device is not None:
        model.to(asked.device)
    return model, files


#: What is asked of a model that is loaded already: the tokenizer's files, and where the model is to be.
_OF_LOADED = (
    "name", "revision", "cache_dir", "force_download", "local_files_only", "token", "trust_remote_code", "device",
    "load_weights", "from_pretrained",
)  # fmt: skip


def loaded_already(model: nn.Module, asked: LoadRequest) -> ModelFiles:
    """Puts a model that is loaded already on its device, and finds its files for the tokenizer.

    Raises:
        ValueError: an argument would change how it is loaded.
    """
    given = {name: value for name, value in vars(asked).items() if name not in _OF_LOADED} | {**asked.from_pretrained}
    clash = [name for name, value in given.items() if value is not None]
    clash += ["load_weights"] * (not asked.load_weights)
    if clash:
        raise ValueError(f"{', '.join(clash)} would change how the model is loaded, but hf_model is loaded")
    files = asked.files(check_format=False)
    if asked.device is not None:
        model.to(asked.device)
    return files


def tokenizer_of(files: ModelFiles, progress: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer that is kept with a model; None where a folder has none. A GGUF file holds its own."""
    alone = os.path.isdir(files.name) and "gguf_file" not in files.where
    if alone and not any(os.path.exists(os.path.join(files.name, name)) for name in _OF_TOKENIZERS):
        return None
    with _bars(progress):
        return AutoTokenizer.from_pretrained(files.name, **files.where)


def make_native(
    config: ModelFields | Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, **changes: object
) -> tuple[NativeModel, PreTrainedTokenizerBase | None]:
    """A small transformer with random weights, and its tokenizer; see `TransformerBridge.boot_native`.

    Args:
        config, tokenizer: as there.
        changes: fields in place of the configuration's; None leaves one as it is.
    """
    given = config.native() if isinstance(config, ModelFields) and not isinstance(config, NativeConfig) else config
    native = copy.copy(given) if isinstance(given, NativeConfig) else NativeConfig(**given)
    for name, value in changes.items():
        if value is not None:
            setattr(native, name, str(value) if name == "device" else value)
    if tokenizer is None and native.tokenizer_name is not None:
        tokenizer = AutoTokenizer.from_pretrained(native.tokenizer_name)
    return NativeModel(native), tokenizer


def text_model(model: nn.Module) -> nn.Module:
    """The language model of a Gemma 3 that also reads images, which shares its modules; any other model as it is.

    Args:
        model: a loaded model.
    """
    if type(model).__name__ != "Gemma3ForConditionalGeneration":
        return model
    whole = cast(transformers.Gemma3ForConditionalGeneration, model)
    with torch.device("meta"):
        text = transformers.Gemma3ForCausalLM(cast(transformers.Gemma3TextConfig, whole.config.text_config))
    text.model, text.lm_head = whole.model.language_model, whole.lm_head
    text.generation_config = whole.generation_config
    text.config.name_or_path = whole.config.name_or_path
    return text.train(whole.training)  # type: ignore[no-any-return]


def _class_for(config: PreTrainedConfig) -> type[Any]:
    """The class that the configuration's `architectures` names, or the one that its type has a head for."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    return transformers.AutoModelForCausalLM


def _explain_unknown(error: TypeError, given: Collection[str], loader: type[Any]) -> None:
    """Raises our own error where Hugging Face's says that it does not know an argument of the user's."""
    for name in given:
        if f"unexpected keyword argument {name!r}" in str(error):
            known = {field.name for field in fields(LoadRequest)} - {"name", "from_pretrained"}
            known |= {"hf_model", "tokenizer", "progress", "name_or_path"}
            raise UnknownArgumentError(name, loader.__name__, sorted(known)) from error


def _empty(loader: Any, kwargs: dict[str, Any]) -> nn.Module:
    """A model on the ``meta`` device."""
    config = kwargs["config"]
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "attn_implementation")}
    with torch.device("meta"):
        if hasattr(loader, "from_config"):  # one of transformers' Auto classes
            return loader.from_config(config, trust_remote_code=kwargs["trust_remote_code"], **options)
        return loader._from_config(config, **options)


@contextmanager
def _bars(wanted: bool) -> Iterator[None]:
    """Loads without progress bars, unless they are asked for."""
    from transformers.utils import logging

    if wanted or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
