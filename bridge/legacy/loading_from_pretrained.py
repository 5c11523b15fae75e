"""What HookedTransformer's `loading_from_pretrained` offers about models: their names, configurations, checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from bridge.bridge import TransformerBridge
from bridge.checkpoints import PYTHIA_STEPS, STANFORD_STEPS, checkpoint_steps
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.model_names import (
    DEFAULT_MODEL_ALIASES,
    MODEL_ALIASES,
    OFFICIAL_MODEL_NAMES,
    get_official_model_name,
)

__all__ = [
    "DEFAULT_MODEL_ALIASES",
    "MODEL_ALIASES",
    "OFFICIAL_MODEL_NAMES",
    "PYTHIA_CHECKPOINTS",
    "STANFORD_CRFM_CHECKPOINTS",
    "get_checkpoint_labels",
    "get_num_params_of_pretrained",
    "get_official_model_name",
    "get_pretrained_model_config",
    "make_model_alias_map",
]

PYTHIA_CHECKPOINTS = list(PYTHIA_STEPS)
STANFORD_CRFM_CHECKPOINTS = list(STANFORD_STEPS)


def make_model_alias_map() -> dict[str, str]:
    """Every name of a model, in small letters, and the hub name that it stands for."""
    return {name.lower(): hub for hub, names in MODEL_ALIASES.items() for name in (hub, *names)}


def get_pretrained_model_config(model_name: str, **kwargs: Any) -> HookedTransformerConfig:
    """The configuration of a model, without loading its weights.

    Args:
        model_name: as for `get_official_model_name`.
        kwargs: as for `TransformerBridge.boot_transformers`.

    Example:
        >>> from bridge.embedded import MODEL_DIR
        >>> from bridge.legacy.loading_from_pretrained import get_pretrained_model_config
        >>> cfg = get_pretrained_model_config(str(MODEL_DIR))
        >>> cfg.n_layers, cfg.normalization_type
        (4, 'RMS')
    """
    name = get_official_model_name(model_name)
    bridge = TransformerBridge.boot_transformers(name, load_weights=False, **kwargs)
    bridge.cfg.model_name = name.rpartition("/")[2]
    bridge.cfg.tokenizer_name = name
    return HookedTransformerConfig.of_model(bridge.cfg)


def get_num_params_of_pretrained(model_name: str) -> int:
    """The number of weights of attention and MLPs, without biases, norms and embeddings."""
    count = get_pretrained_model_config(model_name).n_params
    assert count is not None
    return count


def get_checkpoint_labels(model_name: str, **kwargs: Any) -> tuple[list[int], str]:
    """The training checkpoints that were published with a model.

    Returns:
        The steps, and ``"step"``.

    Raises:
        ValueError: none are known.

    Example:
        >>> from bridge.legacy.loading_from_pretrained import get_checkpoint_labels
        >>> get_checkpoint_labels("pythia-70m")[0][-1]
        143000
    """
    return list(checkpoint_steps(get_official_model_name(model_name))), "step"


#: HookedTransformer's types by name.
DTYPE_FROM_STRING = {
    "float32": torch.float32, "fp32": torch.float32, "float16": torch.float16, "fp16": torch.float16,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
}  # fmt: skip
