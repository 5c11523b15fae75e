"""What HookedTransformer's `loading_from_pretrained` offers about models: their names, configurations, checkpoints."""

from __future__ import annotations

import copy
import logging
import os
from typing import Any

import torch
from torch import Tensor

from adapters.config import ModelConfig
from bridge.bridge import TransformerBridge
from bridge.hooks.names import suggestion
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.own_format import own_format
from bridge.legacy.table import named
from bridge.legacy.utilities.devices import get_device
from bridge.loading.loading import (
    BY_NAME,
    MODEL_ALIASES,
    OFFICIAL_MODEL_NAMES,
    PYTHIA_STEPS,
    STANFORD_STEPS,
    checkpoint_steps,
    hub_name,
)

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

__getattr__ = named(__name__)
