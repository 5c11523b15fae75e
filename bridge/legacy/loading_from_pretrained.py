"""What HookedTransformer's `loading_from_pretrained` offers about models: their names, configurations, checkpoints."""

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
from bridge.bridge import TransformerBridge
from bridge.hooks.arguments import check_choice
from bridge.hooks.names import suggestion
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

# ----------------------------------------------------------------------------------------------------------------------
# Models that are stored in HookedTransformer's own format: a configuration, and state dicts with its names.
# ----------------------------------------------------------------------------------------------------------------------


#: How the hub is asked.
_HUB = ("revision", "token", "cache_dir", "force_download", "local_files_only")
#: What such configurations call fields otherwise.
_CALLED = {"normalization": "normalization_type", "architecture": "original_architecture"}
_CHECKPOINT = re.compile(r"checkpoints/.*_(\d+)\.pth")


@dataclass(frozen=True)
class OwnFormat:
    """Where a model in HookedTransformer's own format is.

    Attributes:
        name: its hub name, or a folder.
        hub: ``revision``, ``token``, ``cache_dir``, ``force_download`` and ``local_files_only``, where they are given.
    """

    name: str
    hub: dict[str, Any]

    def files(self) -> list[str]:
        """The names of its files."""
        if not os.path.isdir(self.name):
            given = {key: self.hub[key] for key in ("revision", "token") if key in self.hub}
            try:
                return list(HfApi().list_repo_files(self.name, **given))
            except OfflineModeIsEnabled:
                pass
        where = self.name if os.path.isdir(self.name) else snapshot_download(self.name, **self.hub)
        return sorted(str(path.relative_to(where)) for path in Path(where).rglob("*") if path.is_file())

    def path(self, file: str) -> str:
        """Where a file is, on this machine."""
        here = os.path.isdir(self.name)
        return os.path.join(self.name, file) if here else hf_hub_download(self.name, file, **self.hub)

    def stored(self) -> dict[str, Any]:
        """The configuration as it is stored."""
        return json.loads(Path(self.path("config.json")).read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    def checkpoints(self) -> tuple[list[int], str]:
        """The training checkpoints in the order of their files, and ``"step"`` or ``"token"``."""
        labels = [int(match[1]) for match in map(_CHECKPOINT.fullmatch, self.files()) if match]
        if not labels:
            raise ValueError(f"{self.name} has no checkpoints: no files such as checkpoints/model_1000.pth")
        return labels, "token" if labels[-1] > 1e9 else "step"

    def config(
        self, checkpoint_index: int | None = None, checkpoint_value: int | None = None, **changes: Any
    ) -> HookedTransformerConfig:
        """The model's configuration, with other fields where `changes` says so.

        Raises:
            ValueError: there is no such checkpoint.
        """
        stored = self.stored()
        known = {f.name for f in fields(HookedTransformerConfig)} - {"n_params", "device", "dtype", "seed"}
        given = {_CALLED.get(key, key): value for key, value in stored.items()}
        given = {key: value for key, value in given.items() if key in known}
        given.setdefault("original_architecture", "neel-solu-old" if "_old" in self.name else "neel")
        given.setdefault("positional_embedding_type", "shortformer" if stored.get("shortformer_pos") else "standard")
        given |= {"model_name": self.name.rstrip("/").rpartition("/")[2], "init_weights": False}
        if checkpoint_index is not None or checkpoint_value is not None:
            given |= self._checkpoint(checkpoint_index or 0, checkpoint_value)
        return HookedTransformerConfig(**(given | changes))

    def _checkpoint(self, index: int, value: int | None) -> dict[str, Any]:
        """What a configuration says of a checkpoint, which its value names, or else its index.

        Raises:
            ValueError: there is no such checkpoint.
        """
        labels, kind = self.checkpoints()
        if value is None:
            if not -len(labels) <= index < len(labels):
                raise ValueError(f"{self.name} has {len(labels)} checkpoints; {index} is out of range")
            value = labels[index]
        elif value not in labels:
            near = sorted(sorted(labels, key=lambda label: abs(label - value))[:3])
            raise ValueError(f"{self.name} has no checkpoint {value}; the nearest are {near}")
        return {
            "from_checkpoint": True, "checkpoint_label_type": kind, "checkpoint_value": value,
            "checkpoint_index": labels.index(value),
        }  # fmt: skip

    def state_dict(self, cfg: HookedTransformerConfig) -> dict[str, Tensor]:
        """The weights by HookedTransformer's names, in `cfg.dtype`, of as many layers as `cfg` says; nothing is run.

        Raises:
            FileNotFoundError: there is no file of weights.
        """
        ending = f"{cfg.checkpoint_value}.pth" if cfg.from_checkpoint else "final.pth"
        found = [file for file in self.files() if file.endswith(ending)]
        if not found:
            raise FileNotFoundError(f"{self.name} has no file that ends with {ending}")
        loaded = torch.load(self.path(found[0]), map_location="cpu", weights_only=True)
        weights = {name: value.to(cfg.dtype) for name, value in loaded.items()}
        if cfg.original_architecture == "neel-solu-old":
            weights = _as_now(weights, self.stored()["n_layers"])
        kept = tuple(f"blocks.{i}." for i in range(cfg.n_layers))
        return {name: x for name, x in weights.items() if not name.startswith("blocks.") or name.startswith(kept)}


def _as_now(weights: dict[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """The weights of the oldest models: norms had other names, and matrices of up to six layers were transposed."""
    made = {}
    for old, value in weights.items():
        name = old.replace("norm", "ln")
        name = name.replace("ln.", "ln_final.", 1) if name.startswith("ln.") else name
        turned = n_layers <= 8 if name == "pos_embed.W_pos" else n_layers <= 6 and "W_" in name
        made[name] = value.transpose(-2, -1) if turned else value
    return made


def own_format(name: str, given: Mapping[str, Any]) -> OwnFormat | None:
    """Where a model (a hub name, or a folder) is, if it is in HookedTransformer's own format.

    Args:
        name: its name.
        given: arguments for loading, of which some say how the hub is asked.
    """
    if not os.path.isdir(name):
        hub = {key: given[key] for key in _HUB if key in given}
        return OwnFormat(name, hub) if name.startswith(OWN_FORMAT) else None
    config = Path(name, "config.json")
    if not config.is_file() or not any(Path(name).glob("*.pth")):
        return None
    stored = json.loads(config.read_text(encoding="utf-8"))
    return None if "model_type" in stored or "d_model" not in stored else OwnFormat(name, {})


def load_own_format(model: Any, own: OwnFormat, config: HookedTransformerConfig) -> None:
    """Loads weights that are stored in HookedTransformer's own format into the model that `config` describes.

    Raises:
        ValueError: a matrix is missing; or a weight has no place.
    """
    state = own.state_dict(config)
    if "pos_embed.W_pos" in state:
        state["pos_embed.W_pos"] = state["pos_embed.W_pos"][: config.n_ctx]
    missing = [name for name in model.weights.getters if "W_" in name and name not in state]
    if missing:
        raise ValueError(f"{own.name} has no {', '.join(missing)}")
    found = model.load_state_dict(state, strict=False)
    if found.unexpected_keys:
        raise ValueError(f"{own.name} has weights without a place here: {', '.join(found.unexpected_keys)}")
    for name in ("model_name", "tokenizer_name", "original_architecture", "from_checkpoint", "checkpoint_index",
                 "checkpoint_value", "checkpoint_label_type", "default_prepend_bos"):  # fmt: skip
        setattr(model.cfg, name, getattr(config, name))


#: Models that HookedTransformer runs without BOS.
_WITHOUT_BOS = ("BloomForCausalLM", "QWenLMHeadModel", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
#: The shortest name of each model.
DEFAULT_MODEL_ALIASES = [min(MODEL_ALIASES[hub] or [hub], key=len) for hub in OFFICIAL_MODEL_NAMES]
PYTHIA_CHECKPOINTS = list(PYTHIA_STEPS)
STANFORD_CRFM_CHECKPOINTS = list(STANFORD_STEPS)


def make_model_alias_map() -> dict[str, str]:
    """Every name of a model, in small letters, and the hub name that it stands for."""
    return dict(BY_NAME)


def get_official_model_name(model_name: str) -> str:
    """The hub name of a model."""
    name = hub_name(model_name)
    if "/" in name or name in MODEL_ALIASES or os.path.isdir(name):
        return name
    raise ValueError(
        f"no model is known as {model_name!r}.{suggestion(model_name.lower(), BY_NAME)} A hub name with its "
        "organisation, or a folder, works as well."
    )


def get_pretrained_model_config(
    model_name: str,
    checkpoint_index: int | None = None,
    checkpoint_value: int | None = None,
    fold_ln: bool = False,
    device: torch.device | str | None = None,
    n_devices: int = 1,
    default_prepend_bos: bool | None = None,
    dtype: torch.dtype = torch.float32,
    first_n_layers: int | None = None,
    n_ctx: int | None = None,
    **kwargs: Any,
) -> HookedTransformerConfig:
    """The configuration of a model, without loading its weights."""
    name, place = get_official_model_name(model_name), str(device or get_device())
    own = own_format(name, kwargs)
    if own is not None:
        changes = {"n_layers": first_n_layers, "n_ctx": n_ctx, "device": place, "dtype": dtype}
        cfg = own.config(checkpoint_index, checkpoint_value, **{k: v for k, v in changes.items() if v is not None})
        folds = fold_ln and cfg.positional_embedding_type != "shortformer"
        cfg.default_prepend_bos = True if default_prepend_bos is None else default_prepend_bos
    else:
        kwargs |= {"checkpoint_index": checkpoint_index, "checkpoint_value": checkpoint_value, "n_ctx": n_ctx}
        facts = TransformerBridge.boot_transformers(name, load_weights=False, **kwargs).cfg
        facts.model_name, facts.tokenizer_name = name.rstrip("/").rpartition("/")[2], name
        if n_ctx is None:
            cap_context(facts)
        facts.n_layers = facts.n_layers if first_n_layers is None else first_n_layers
        facts.default_prepend_bos = starts_with_bos(facts, default_prepend_bos)
        cfg, folds = HookedTransformerConfig.of_model(facts), fold_ln
        cfg.device, cfg.n_devices, cfg.dtype = place, n_devices, dtype
    if folds and cfg.normalization_type in ("LN", "RMS"):
        cfg.normalization_type += "Pre"
    return cfg


def starts_with_bos(cfg: ModelConfig, wanted: bool | None) -> bool:
    """Whether HookedTransformer starts a model's texts with BOS, unless told otherwise."""
    return cfg.original_architecture not in _WITHOUT_BOS if wanted is None else wanted


#: The longest contexts that HookedTransformer gives models, by what their names or architectures begin with.
_CAPS = {
    "Llama-3.1": 2048, "Llama-3.2": 2048, "Llama-3.3": 2048, "MistralForCausalLM": 2048, "BloomForCausalLM": 2048,
    "QWenLMHeadModel": 2048, "Qwen2ForCausalLM": 2048, "Qwen3ForCausalLM": 2048, "Gemma3ForCausalLM": 8192,
}  # fmt: skip


def cap_context(cfg: ModelConfig) -> None:
    """Limits a model's context as HookedTransformer does, which kept an attention mask of this size."""
    for start, most in _CAPS.items():
        if cfg.model_name.startswith(start) or cfg.original_architecture == start:
            cfg.n_ctx = most if cfg.n_ctx is None else min(cfg.n_ctx, most)


def get_checkpoint_labels(model_name: str, **kwargs: Any) -> tuple[list[int], str]:
    """The training checkpoints that were published with a model."""
    name = get_official_model_name(model_name)
    own = own_format(name, kwargs)
    return (list(checkpoint_steps(name)), "step") if own is None else own.checkpoints()


def get_pretrained_state_dict(
    official_model_name: str, cfg: Any = None, hf_model: Any = None, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> dict[str, Tensor]:
    """A model's weights as they are stored, without processing, by HookedTransformer's names."""
    name = get_official_model_name(official_model_name)
    own = own_format(name, kwargs)
    if own is not None:
        config = own.config() if cfg is None else copy.copy(HookedTransformerConfig.unwrap(cfg))
        config.dtype = dtype
        return own.state_dict(config)
    bridge = TransformerBridge.boot_transformers(name, hf_model=hf_model, dtype=None if hf_model else dtype, **kwargs)
    return {key: value.detach().to(dtype) for key, value in bridge.tl_parameters().items()}


def fill_missing_keys(model: Any, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict, to which the model's own weights are added where it has none."""
    own = model.state_dict()
    own = own if own.keys() & state_dict.keys() else model.tl_parameters()
    missing = {key: value for key, value in own.items() if key not in state_dict}
    for key in missing:
        if "W_" in key:
            logging.warning("the state dict has no %s: it stays as it is in the model", key)
    state_dict.update(missing)
    return state_dict


#: HookedTransformer's types by name.
DTYPE_FROM_STRING = {
    "float32": torch.float32, "fp32": torch.float32, "float16": torch.float16, "fp16": torch.float16,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
}  # fmt: skip


def as_type(dtype: torch.dtype | str) -> torch.dtype:
    """A type by its name, as HookedTransformer has it."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPE_FROM_STRING:
        raise ValueError(f"dtype is {dtype!r}; it must be a torch.dtype or one of {', '.join(DTYPE_FROM_STRING)}")
    return DTYPE_FROM_STRING[dtype]


def copied_tokenizer(tokenizer: Any, padding_side: str = "right") -> Any:
    """A copy of a tokenizer, which pads and starts texts with EOS where it has no token for it.

    Raises:
        TypeError: it is no Hugging Face tokenizer.
        ValueError: a side that is neither.
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
