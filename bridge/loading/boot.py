"""Loading models: thin layers over `from_pretrained`."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from bridge.hooks.names import suggestion
from bridge.loading.model_names import OWN_FORMAT, hub_name
from bridge.loading.patches import Patches, WeightConversions, keep_recording, patched
from bridge.loading.training_checkpoints import checkpoint_revision
from bridge.native import NativeConfig, NativeModel

#: Where the parts of a model are to be, as accelerate takes it.
DeviceMap = str | int | torch.device | Mapping[str, str | int | torch.device] | None
#: How much each device, or the CPU, may hold, likewise.
MaxMemory = Mapping[int | str, int | str] | None


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


@dataclass(frozen=True)
class Loaded:
    """A model that was loaded.

    Attributes:
        model: the Hugging Face model.
        tokenizer: its tokenizer, if it has one.
        facts: fields of the bridge's `cfg` that say how it was loaded.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    facts: dict[str, str | int | bool]


def load(
    name_or_path: str,
    *,
    hf_model: nn.Module | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    hf_config_overrides: Mapping[str, object] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    load_weights: bool = True,
    trust_remote_code: bool = False,
    model_class: type[Any] | None = None,
    device_map: DeviceMap = None,
    n_devices: int | None = None,
    max_memory: MaxMemory = None,
    n_ctx: int | None = None,
    revision: str | None = None,
    checkpoint_index: int | None = None,
    checkpoint_value: int | None = None,
    attn_implementation: str | None = None,
    cache_dir: str | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
    token: str | bool | None = None,
    patches: Patches | None = None,
    weight_conversions: WeightConversions | None = None,
    gguf_file: str | None = None,
    quantization_config: object = None,
    progress: bool = False,
    from_pretrained: Mapping[str, object] | None = None,
) -> Loaded:
    """A model from the hub or a folder; see `TransformerBridge.boot_transformers`.

    Args:
        name_or_path: a hub name, a short name for one, or a folder.
        hf_model: use this model rather than load one.
        tokenizer, hf_config_overrides, device, dtype, load_weights, trust_remote_code, model_class: as there.
        device_map, n_devices, max_memory, n_ctx, revision, checkpoint_index, checkpoint_value: as there.
        attn_implementation, cache_dir, force_download, local_files_only, token: as there.
        patches, weight_conversions: as there.
        gguf_file, quantization_config, progress, from_pretrained: as there.

    Raises:
        ValueError: arguments that exclude each other, a checkpoint that does not exist, or a model that is stored in
            HookedTransformer's own format.
        UnknownArgumentError: an argument that nobody knows.
    """
    if hf_model is not None:
        given = {
            "hf_config_overrides": hf_config_overrides, "dtype": dtype, "device_map": device_map,
            "n_devices": n_devices, "max_memory": max_memory, "n_ctx": n_ctx, "model_class": model_class,
            "attn_implementation": attn_implementation, "checkpoint_index": checkpoint_index,
            "checkpoint_value": checkpoint_value, "patches": patches, "weight_conversions": weight_conversions,
            "gguf_file": gguf_file, "quantization_config": quantization_config, **(from_pretrained or {}),
        }  # fmt: skip
        clash = [name for name, value in given.items() if value is not None] + ["load_weights"] * (not load_weights)
        if clash:
            raise ValueError(f"{', '.join(clash)} would change how the model is loaded, but hf_model is loaded")
    name_or_path = hub_name(name_or_path)
    if hf_model is None and not os.path.isdir(name_or_path) and name_or_path.startswith(OWN_FORMAT):
        raise ValueError(
            f"{name_or_path} is stored in HookedTransformer's own format: "
            "bridge.legacy.HookedTransformer.from_pretrained loads it"
        )
    checkpoint = checkpoint_revision(name_or_path, checkpoint_index, checkpoint_value)
    if checkpoint is not None and revision is not None:
        raise ValueError(f"revision={revision!r} and a checkpoint exclude each other")
    repository = checkpoint.repository if checkpoint else name_or_path
    hub = {"cache_dir": cache_dir, "force_download": force_download, "local_files_only": local_files_only}
    where: dict[str, Any] = {name: value for name, value in {**hub, "token": token}.items() if value}
    where["trust_remote_code"] = trust_remote_code
    if checkpoint or revision:
        where["revision"] = checkpoint.revision if checkpoint else revision
    if gguf_file is not None:
        where["gguf_file"] = gguf_file
    if hf_model is None:
        config = AutoConfig.from_pretrained(repository, **where)
        _override(config, hf_config_overrides or {})
        text = config.get_text_config() if hasattr(config, "vision_config") else config
        _override(text, context_fields(text, n_ctx))
        loader = model_class or _class_for(config)
        if max_memory is not None and device_map is None and n_devices is None:
            raise ValueError("max_memory says how to spread a model: it needs device_map or n_devices")
        if device_map is not None and n_devices is not None:
            raise ValueError("device_map and n_devices both say how to spread the model")
        if device is not None and not load_weights:
            raise ValueError(f"a model without weights is on no device, so device={device!r} cannot be had")
        if device is not None and (device_map is not None or n_devices is not None):
            raise ValueError("device puts the whole model in one place; device_map and n_devices spread it")
        kwargs: dict[str, Any] = {"config": config, **where}
        if n_devices is not None:
            kwargs |= {"device_map": "balanced", "max_memory": max_memory or _first_devices(n_devices)}
        elif device_map is not None:
            kwargs |= {"device_map": device_map} | ({"max_memory": max_memory} if max_memory else {})
        given = {"dtype": dtype, "attn_implementation": attn_implementation, "quantization_config": quantization_config}
        kwargs |= {name: value for name, value in (given | dict(from_pretrained or {})).items() if value is not None}
        if not load_weights and (idle := kwargs.keys() - {"config", *where, "dtype", "attn_implementation"}):
            raise ValueError(f"{', '.join(sorted(idle))} would say how weights are loaded, but load_weights is False")
        with _bars(progress), patched(patches, weight_conversions, loader, config):
            try:
                hf_model = loader.from_pretrained(repository, **kwargs) if load_weights else _empty(loader, kwargs)
            except TypeError as error:
                _explain_unknown(error, from_pretrained or {}, loader)
                raise
            keep_recording(hf_model, patches)
        if model_class is None:
            hf_model = text_model(hf_model)
    if device is not None:
        hf_model.to(device)
    if tokenizer is None:
        with _bars(progress):
            tokenizer = _tokenizer(repository, where)
    facts: dict[str, str | int | bool] = {"model_name": name_or_path}
    if n_ctx is not None:
        facts["n_ctx"] = n_ctx
    if n_devices is not None:
        facts["n_devices"] = n_devices
    if checkpoint is not None:
        facts |= {
            "from_checkpoint": True,
            "checkpoint_index": checkpoint.index,
            "checkpoint_value": checkpoint.value,
            "checkpoint_label_type": "step",
        }
    return Loaded(hf_model, tokenizer, facts)


def make_native(
    config: NativeConfig | Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, **changes: object
) -> tuple[NativeModel, PreTrainedTokenizerBase | None]:
    """A small transformer with random weights, and its tokenizer; see `TransformerBridge.boot_native`.

    Args:
        config, tokenizer: as there.
        changes: fields in place of the configuration's; None leaves one as it is.
    """
    native = copy.copy(config) if isinstance(config, NativeConfig) else NativeConfig(**config)
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
            known = inspect.signature(load).parameters.keys() - {"from_pretrained"}
            raise UnknownArgumentError(name, loader.__name__, sorted(known)) from error


def _empty(loader: Any, kwargs: dict[str, Any]) -> nn.Module:
    """A model on the ``meta`` device."""
    config = kwargs["config"]
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "attn_implementation")}
    with torch.device("meta"):
        if hasattr(loader, "from_config"):  # one of transformers' Auto classes
            return loader.from_config(config, trust_remote_code=kwargs["trust_remote_code"], **options)
        return loader._from_config(config, **options)


def _tokenizer(repository: str, where: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    """The repository's tokenizer, or None where a folder has none."""
    if os.path.isdir(repository):
        files = (
            "tokenizer.json",
            "tokenizer_config.json",
            "tokenizer.model",
            "vocab.json",
            "vocab.txt",
            "spiece.model",
        )
        if not any(os.path.exists(os.path.join(repository, name)) for name in files):
            return None
    return AutoTokenizer.from_pretrained(repository, **where)


def _first_devices(n: int) -> dict[int, int]:
    found = torch.cuda.device_count()
    if n > found:
        raise ValueError(f"n_devices={n}, but this machine has {found}")
    return {i: torch.cuda.get_device_properties(i).total_memory for i in range(n)}


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
