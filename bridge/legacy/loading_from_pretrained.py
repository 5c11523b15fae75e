"""HookedTransformer's `loading_from_pretrained`: model names, configurations and checkpoints."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from adapters.config import ModelConfig
from adapters.views import Kwargs
from bridge.arguments import check_choice
from bridge.bridge import TransformerBridge
from bridge.hooks.names import suggestion
from bridge.legacy.hook_points import Device
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.table import named
from bridge.legacy.utilities import get_device
from bridge.loading.loading import (
    BY_NAME,
    MODEL_ALIASES,
    OFFICIAL_MODEL_NAMES,
    OWN_FORMAT,
    PYTHIA_STEPS,
    STANFORD_STEPS,
    checkpoint_steps,
    hub_name,
)

# --------------------------------------------------------------------------------------------------
# Models stored in HookedTransformer's own format: a configuration, and state dicts with its names.
# --------------------------------------------------------------------------------------------------


StateDict = dict[str, Tensor]
#: The options for downloads from the hub.
_HUB = ("revision", "token", "cache_dir", "force_download", "local_files_only")
#: Fields that such configurations name differently.
_CALLED = {"normalization": "normalization_type", "architecture": "original_architecture"}
_CHECKPOINT = re.compile(r"checkpoints/.*_(\d+)\.pth")


@dataclass(frozen=True)
class _OwnFormat:
    """The location of a model in HookedTransformer's own format.

    Attributes:
        name: its hub name, or a folder.
        hub: ``revision``, ``token``, ``cache_dir``, ``force_download`` and ``local_files_only``, if
            passed.
    """

    name: str
    hub: Kwargs

    def files(self) -> list[str]:
        """Return the names of its files."""
        folder = self.name
        if not os.path.isdir(folder):
            options = {key: self.hub[key] for key in ("revision", "token") if key in self.hub}
            try:
                return list(HfApi().list_repo_files(self.name, **options))
            except OfflineModeIsEnabled:
                folder = snapshot_download(self.name, **self.hub)
        paths = Path(folder).rglob("*")
        return sorted(str(path.relative_to(folder)) for path in paths if path.is_file())

    def path(self, file: str) -> str:
        """Return the local path of a file."""
        if os.path.isdir(self.name):
            return os.path.join(self.name, file)
        return hf_hub_download(self.name, file, **self.hub)

    def stored(self) -> Kwargs:
        """Return the stored configuration."""
        return json.loads(Path(self.path("config.json")).read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    def checkpoints(self) -> tuple[list[int], str]:
        """Return the training checkpoints in the order of their files, and ``"step"`` or
        ``"token"``.
        """
        labels = [int(match[1]) for match in map(_CHECKPOINT.fullmatch, self.files()) if match]
        if not labels:
            raise ValueError(
                f"{self.name} has no checkpoints: no files such as checkpoints/model_1000.pth"
            )
        return labels, "token" if labels[-1] > 1e9 else "step"

    def config(
        self,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        **changes: Any,
    ) -> HookedTransformerConfig:
        """Return the model's configuration, with the fields of `changes` replaced.

        Raises:
            ValueError: there is no such checkpoint.
        """
        stored = self.stored()
        known = {field.name for field in fields(HookedTransformerConfig)}
        known -= {"n_params", "device", "dtype", "seed"}
        values: Kwargs = {
            "original_architecture": "neel-solu-old" if "_old" in self.name else "neel",
            "positional_embedding_type": (
                "shortformer" if stored.get("shortformer_pos") else "standard"
            ),
        }
        for key, value in stored.items():
            name = _CALLED.get(key, key)
            if name in known:
                values[name] = value
        values["model_name"] = self.name.rstrip("/").rpartition("/")[2]
        values["init_weights"] = False
        if checkpoint_index is not None or checkpoint_value is not None:
            values |= self._checkpoint(checkpoint_index or 0, checkpoint_value)
        return HookedTransformerConfig(**(values | changes))

    def _checkpoint(self, index: int, value: int | None) -> Kwargs:
        """Return the fields of a checkpoint, chosen by its value or else by its index.

        Raises:
            ValueError: there is no such checkpoint.
        """
        labels, kind = self.checkpoints()
        if value is None:
            if not -len(labels) <= index < len(labels):
                raise ValueError(
                    f"{self.name} has {len(labels)} checkpoints; {index} is out of range"
                )
            value = labels[index]
        elif value not in labels:
            near = sorted(sorted(labels, key=lambda label: abs(label - value))[:3])
            raise ValueError(f"{self.name} has no checkpoint {value}; the nearest are {near}")
        return {
            "from_checkpoint": True,
            "checkpoint_label_type": kind,
            "checkpoint_value": value,
            "checkpoint_index": labels.index(value),
        }

    def state_dict(self, cfg: HookedTransformerConfig) -> StateDict:
        """Return the weights of the layers in `cfg` by HookedTransformer's names, in `cfg.dtype`;
        stored code is never run.

        Raises:
            FileNotFoundError: the model has no weights file.
        """
        ending = f"{cfg.checkpoint_value}.pth" if cfg.from_checkpoint else "final.pth"
        file = next((file for file in self.files() if file.endswith(ending)), None)
        if file is None:
            raise FileNotFoundError(f"{self.name} has no file that ends with {ending}")
        loaded = torch.load(self.path(file), map_location="cpu", weights_only=True)
        weights = {name: value.to(cfg.dtype) for name, value in loaded.items()}
        if cfg.original_architecture == "neel-solu-old":
            weights = _as_now(weights, self.stored()["n_layers"])
        kept = tuple(f"blocks.{layer}." for layer in range(cfg.n_layers))
        dropped = [x for x in weights if x.startswith("blocks.") and not x.startswith(kept)]
        for name in dropped:
            del weights[name]
        return weights


def _as_now(weights: StateDict, n_layers: int) -> StateDict:
    """Convert the weights of the oldest models: their norms had other names, and matrices of up to
    six layers were transposed.
    """
    converted = {}
    for old, value in weights.items():
        name = old.replace("norm", "ln")
        if name.startswith("ln."):
            name = name.replace("ln.", "ln_final.", 1)
        last = 8 if name == "pos_embed.W_pos" else 6
        transposed = n_layers <= last and "W_" in name
        converted[name] = value.transpose(-2, -1) if transposed else value
    return converted


def own_format(name: str, options: Mapping[str, Any]) -> _OwnFormat | None:
    """Return the location of a model (a hub name or folder) in HookedTransformer's own format; None
    if it is in another format.

    Args:
        name: its name.
        options: arguments for loading; some are download options.
    """
    if not os.path.isdir(name):
        hub = {key: options[key] for key in _HUB if key in options}
        return _OwnFormat(name, hub) if name.startswith(OWN_FORMAT) else None
    config = Path(name, "config.json")
    if not config.is_file() or not any(Path(name).glob("*.pth")):
        return None
    stored = json.loads(config.read_text(encoding="utf-8"))
    return None if "model_type" in stored or "d_model" not in stored else _OwnFormat(name, {})


def load_own_format(model: Any, own: _OwnFormat, config: HookedTransformerConfig) -> None:
    """Load weights in HookedTransformer's own format into the model that `config` describes.

    Raises:
        ValueError: a matrix is missing, or a weight that the model cannot store.
    """
    state = own.state_dict(config)
    if "pos_embed.W_pos" in state:
        state["pos_embed.W_pos"] = state["pos_embed.W_pos"][: config.n_ctx]
    missing = [name for name in model.weights.getters if "W_" in name and name not in state]
    if missing:
        raise ValueError(f"{own.name} has no {', '.join(missing)}")
    unexpected = model.load_state_dict(state, strict=False).unexpected_keys
    if unexpected:
        raise ValueError(f"{own.name} has weights without a place here: {', '.join(unexpected)}")
    for name in (
        "model_name",
        "tokenizer_name",
        "original_architecture",
        "from_checkpoint",
        "checkpoint_index",
        "checkpoint_value",
        "checkpoint_label_type",
        "default_prepend_bos",
    ):
        setattr(model.cfg, name, getattr(config, name))


#: Models that HookedTransformer runs without BOS.
_WITHOUT_BOS = ("BloomForCausalLM", "QWenLMHeadModel", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
#: The shortest name of each model.
DEFAULT_MODEL_ALIASES = [min(MODEL_ALIASES[hub] or [hub], key=len) for hub in OFFICIAL_MODEL_NAMES]
PYTHIA_CHECKPOINTS = list(PYTHIA_STEPS)
STANFORD_CRFM_CHECKPOINTS = list(STANFORD_STEPS)


def make_model_alias_map() -> dict[str, str]:
    """Return the hub name for every lower-case name of a model."""
    return dict(BY_NAME)


def get_official_model_name(model_name: str) -> str:
    """Return the hub name of a model."""
    name = hub_name(model_name)
    if "/" in name or name in MODEL_ALIASES or os.path.isdir(name):
        return name
    raise ValueError(
        f"no model is known as {model_name!r}.{suggestion(model_name.lower(), BY_NAME)} A hub name"
        " with its organisation, or a folder, works as well."
    )


def get_pretrained_model_config(
    model_name: str,
    checkpoint_index: int | None = None,
    checkpoint_value: int | None = None,
    fold_ln: bool = False,
    device: Device = None,
    n_devices: int = 1,
    default_prepend_bos: bool | None = None,
    dtype: torch.dtype = torch.float32,
    first_n_layers: int | None = None,
    n_ctx: int | None = None,
    **kwargs: Any,
) -> HookedTransformerConfig:
    """Return the configuration of a model, without loading its weights."""
    name, place = get_official_model_name(model_name), str(device or get_device())
    own = own_format(name, kwargs)
    if own is not None:
        changes = {"n_layers": first_n_layers, "n_ctx": n_ctx, "device": place, "dtype": dtype}
        changes = {key: value for key, value in changes.items() if value is not None}
        cfg = own.config(checkpoint_index, checkpoint_value, **changes)
        cfg.default_prepend_bos = True if default_prepend_bos is None else default_prepend_bos
        if cfg.positional_embedding_type == "shortformer":
            fold_ln = False
    else:
        kwargs["checkpoint_index"] = checkpoint_index
        kwargs["checkpoint_value"] = checkpoint_value
        facts = _facts(name, n_ctx, kwargs)
        if first_n_layers is not None:
            facts.n_layers = first_n_layers
        facts.default_prepend_bos = starts_with_bos(facts, default_prepend_bos)
        cfg = HookedTransformerConfig.of_model(facts)
        cfg.device, cfg.n_devices, cfg.dtype = place, n_devices, dtype
    if fold_ln and cfg.normalization_type in ("LN", "RMS"):
        cfg.normalization_type += "Pre"
    return cfg


def _facts(name: str, n_ctx: int | None, options: Kwargs) -> ModelConfig:
    """Return the facts about a model that Hugging Face's format stores."""
    bridge = TransformerBridge.boot_transformers(name, load_weights=False, n_ctx=n_ctx, **options)
    facts = bridge.cfg
    facts.model_name, facts.tokenizer_name = name.rstrip("/").rpartition("/")[2], name
    if n_ctx is None:
        cap_context(facts)
    return facts


def starts_with_bos(cfg: ModelConfig, prepend_bos: bool | None) -> bool:
    """Tell whether HookedTransformer prepends BOS to a model's texts by default."""
    return cfg.original_architecture not in _WITHOUT_BOS if prepend_bos is None else prepend_bos


#: The longest contexts that HookedTransformer allows, by prefix of the model's name or
#: architecture.
_CAPS = {
    "Llama-3.1": 2048,
    "Llama-3.2": 2048,
    "Llama-3.3": 2048,
    "MistralForCausalLM": 2048,
    "BloomForCausalLM": 2048,
    "QWenLMHeadModel": 2048,
    "Qwen2ForCausalLM": 2048,
    "Qwen3ForCausalLM": 2048,
    "Gemma3ForCausalLM": 8192,
}


def cap_context(cfg: ModelConfig) -> None:
    """Limit a model's context as HookedTransformer does, which stored an attention mask of this
    size.
    """
    for start, most in _CAPS.items():
        if cfg.model_name.startswith(start) or cfg.original_architecture == start:
            cfg.n_ctx = most if cfg.n_ctx is None else min(cfg.n_ctx, most)


def get_checkpoint_labels(model_name: str, **kwargs: Any) -> tuple[list[int], str]:
    """Return the training checkpoints that were published with a model."""
    name = get_official_model_name(model_name)
    own = own_format(name, kwargs)
    return (list(checkpoint_steps(name)), "step") if own is None else own.checkpoints()


def get_pretrained_state_dict(
    official_model_name: str,
    cfg: Any = None,
    hf_model: Any = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> StateDict:
    """Return a model's weights as stored, without processing, by HookedTransformer's names."""
    name = get_official_model_name(official_model_name)
    own = own_format(name, kwargs)
    if own is not None:
        config = own.config() if cfg is None else copy.copy(HookedTransformerConfig.unwrap(cfg))
        config.dtype = dtype
        return own.state_dict(config)
    bridge = TransformerBridge.boot_transformers(
        name, hf_model=hf_model, dtype=None if hf_model else dtype, **kwargs
    )
    return {key: value.detach().to(dtype) for key, value in bridge.tl_parameters().items()}


def fill_missing_keys(model: Any, state_dict: StateDict) -> StateDict:
    """Add the model's own weights to a state dict where they are missing."""
    weights = model.state_dict()
    if not weights.keys() & state_dict.keys():
        weights = model.tl_parameters()
    for name, value in weights.items():
        if name not in state_dict:
            state_dict[name] = value
            if "W_" in name:
                logging.warning("the state dict has no %s: it stays as it is in the model", name)
    return state_dict


#: HookedTransformer's dtypes by name.
DTYPE_FROM_STRING = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def as_type(dtype: torch.dtype | str) -> torch.dtype:
    """Return a dtype by its name, as HookedTransformer does."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPE_FROM_STRING:
        raise ValueError(
            f"dtype is {dtype!r}; it must be a torch.dtype or one of {', '.join(DTYPE_FROM_STRING)}"
        )
    return DTYPE_FROM_STRING[dtype]


def copied_tokenizer(tokenizer: Any, padding_side: str = "right") -> Any:
    """Return a copy of a tokenizer that uses EOS for padding and BOS if it has no token for them.

    Raises:
        TypeError: it is not a Hugging Face tokenizer.
        ValueError: a padding side that is neither left nor right.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"{type(tokenizer).__name__} is no Hugging Face tokenizer")
    check_choice("default_padding_side", padding_side, ("left", "right"))
    copied = copy.deepcopy(tokenizer)
    copied.padding_side = padding_side
    for name in ("pad_token", "bos_token"):
        if getattr(copied, name) is None and copied.eos_token is not None:
            setattr(copied, name, copied.eos_token)
    return copied


__getattr__ = named(__name__)
