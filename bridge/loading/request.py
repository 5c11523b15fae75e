"""What is asked of a load: which files, where the weights are to be, and what of the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from bridge.loading.model_names import OWN_FORMAT, hub_name
from bridge.loading.patches import Patches, WeightConversions
from bridge.loading.training_checkpoints import Checkpoint, checkpoint_revision

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
class Source:
    """Which files a model is loaded from. The fields are arguments of `TransformerBridge.boot_transformers`."""

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

    def found(self, check_format: bool) -> Files:
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
        checkpoint = checkpoint_revision(name, self.checkpoint_index, self.checkpoint_value)
        if checkpoint is not None and self.revision is not None:
            raise ValueError(f"revision={self.revision!r} and a checkpoint exclude each other")
        asked = {
            "cache_dir": self.cache_dir, "force_download": self.force_download, "token": self.token,
            "local_files_only": self.local_files_only, "gguf_file": self.gguf_file,
            "revision": checkpoint.revision if checkpoint else self.revision,
        }  # fmt: skip
        where: dict[str, Any] = {key: value for key, value in asked.items() if value}
        where["trust_remote_code"] = self.trust_remote_code
        return Files(name, checkpoint.repository if checkpoint else name, where, checkpoint)


@dataclass(frozen=True)
class Files:
    """Where a model is.

    Attributes:
        name: of the model.
        repository: the hub's, or a folder.
        where: what `from_pretrained` is given to find it.
        checkpoint: which training checkpoint it is, if it is one.
    """

    name: str
    repository: str
    where: dict[str, Any]
    checkpoint: Checkpoint | None

    def facts(self) -> dict[str, str | int | bool]:
        """Fields of the bridge's `cfg`."""
        if self.checkpoint is None:
            return {"model_name": self.name}
        return {
            "model_name": self.name,
            "from_checkpoint": True,
            "checkpoint_index": self.checkpoint.index,
            "checkpoint_value": self.checkpoint.value,
            "checkpoint_label_type": "step",
        }


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a model's weights are to be. The fields are arguments of `TransformerBridge.boot_transformers`."""

    device: torch.device | str | None
    device_map: DeviceMap
    n_devices: int | None
    max_memory: MaxMemory

    @property
    def spreads(self) -> bool:
        """The model is spread over several devices."""
        return self.device_map is not None or self.n_devices is not None

    def arguments(self, load_weights: bool) -> dict[str, Any]:
        """What `from_pretrained` is given.

        Raises:
            ValueError: arguments that exclude each other.
        """
        if self.max_memory is not None and not self.spreads:
            raise ValueError("max_memory says how to spread a model: it needs device_map or n_devices")
        if self.device_map is not None and self.n_devices is not None:
            raise ValueError("device_map and n_devices both say how to spread the model")
        if self.device is not None and not load_weights:
            raise ValueError(
                f"a model without weights is on no device, so device={self.device!r} cannot be had: leave it out; or "
                "wrap AutoModelForCausalLM.from_config(config), whose weights are random"
            )
        if self.device is not None and self.spreads:
            raise ValueError("device puts the whole model in one place; device_map and n_devices spread it")
        if self.n_devices is not None:
            return {"device_map": "balanced", "max_memory": self.max_memory or _first_devices(self.n_devices)}
        given = {"device_map": self.device_map, "max_memory": self.max_memory or None}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What of a model is loaded, and as what. The fields are arguments of `TransformerBridge.boot_transformers`."""

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

    def config(self, files: Files) -> PreTrainedConfig:
        """The model's configuration, with the fields that are to be others."""
        config = AutoConfig.from_pretrained(files.repository, **files.where)
        _override(config, self.hf_config_overrides or {})
        text = config.get_text_config() if hasattr(config, "vision_config") else config
        _override(text, context_fields(text, self.n_ctx))
        return config

    def arguments(self, placed: Mapping[str, object]) -> dict[str, Any]:
        """What `from_pretrained` is given besides its configuration and where the files are.

        Args:
            placed: what says where the weights are to be.

        Raises:
            ValueError: something would say how weights are loaded, and none are.
        """
        given = {
            "dtype": self.dtype, "attn_implementation": self.attn_implementation,
            "quantization_config": self.quantization_config, **self.from_pretrained,
        }  # fmt: skip
        made = {**placed, **{name: value for name, value in given.items() if value is not None}}
        if not self.load_weights and (idle := made.keys() - {"dtype", "attn_implementation"}):
            raise ValueError(f"{', '.join(sorted(idle))} would say how weights are loaded, but load_weights is False")
        return made


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
