"""`HookedTransformerConfig`: the configuration of a `HookedTransformer`."""

from __future__ import annotations

import logging
import math
import pprint
from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import set_seed

from adapters.config import LoadedModelFields, ModelConfig
from adapters.views import Kwargs
from bridge.arguments import check_choice
from bridge.hooks.names import suggestion
from bridge.legacy.table import named
from bridge.legacy.utilities import get_device
from bridge.native.native import ACT_FNS, NativeConfig

#: Fields that a model made from scratch does not support, and the value that they may have.
ONLY_LOADED: Kwargs = {
    "post_embedding_ln": False,
    "rotary_base_local": None,
    "rotary_adjacent_pairs": False,
    "load_in_4bit": False,
    "relative_attention_max_distance": None,
    "relative_attention_num_buckets": None,
    "n_devices": 1,
}
_KNOWN_ACT_FNS = (*ACT_FNS, "xielu")


@dataclass(kw_only=True, repr=False, eq=False)
class _LegacyFields:
    """Additional fields of HookedTransformer's configurations, also for loaded models."""

    init_mode: str = "gpt2"
    initializer_range: float = -1.0
    init_weights: bool = True
    use_hook_tokens: bool = False
    trust_remote_code: bool = False
    load_in_4bit: bool = False
    use_NTK_by_parts_rope: bool = False
    NTK_by_parts_low_freq_factor: float = 1.0
    NTK_by_parts_high_freq_factor: float = 4.0
    NTK_by_parts_factor: float = 8.0
    NTK_original_ctx_len: int = 8192

    def is_layer_norm_activation(self) -> bool:
        """Tell whether a layer norm follows the activation function."""
        return str(vars(self)["act_fn"]).endswith("_ln")

    def set_seed_everywhere(self, seed: int) -> None:
        """Set the seed of torch, Python and numpy."""
        set_seed(seed)


@dataclass(repr=False)
class HookedTransformerConfig(_LegacyFields, LoadedModelFields, metaclass=ABCMeta):
    """The configuration of a `HookedTransformer`, with HookedTransformer's fields, defaults and
    checks.

    `docs/migration.md` and `bridge.NativeConfig` explain the fields. Fields left at -1 or None are
    computed from the others; a seed is set globally, as in HookedTransformer.

    Raises:
        ValueError: fields that contradict each other, or a value out of range.
        TypeError: a field that does not exist, or is missing.

    Example:
        >>> from bridge.legacy import HookedTransformerConfig
        >>> cfg = HookedTransformerConfig(
        ...     n_layers=1, d_model=64, n_ctx=32, d_head=16, d_vocab=50, act_fn="relu"
        ... )
        >>> cfg.n_heads, cfg.d_mlp, cfg.d_vocab_out
        (4, 256, 50)
    """

    n_layers: int
    d_model: int
    n_ctx: int
    d_head: int
    model_name: str = "custom"
    n_heads: int = -1
    d_mlp: int | None = None
    act_fn: str | None = None
    d_vocab: int = -1
    eps: float = 1e-5
    attn_scale: float = -1.0
    original_architecture: str | None = None
    normalization_type: str | None = "LN"
    device: str | torch.device | None = None
    positional_embedding_type: str = "standard"
    d_vocab_out: int = -1
    n_params: int | None = None
    dtype: torch.dtype = torch.float32
    rotary_base: float = 10000

    def __post_init__(self) -> None:
        if self.n_heads == -1:
            self.n_heads = self.d_model // self.d_head
            if self.d_model % self.d_head:
                logging.warning(
                    "d_model=%d is not divisible by d_head=%d: n_heads is %d",
                    self.d_model,
                    self.d_head,
                    self.n_heads,
                )
        self._check()
        if self.seed is not None:
            self.set_seed_everywhere(self.seed)
        if self.d_mlp is None and not self.attn_only:
            self.d_mlp = 4 * self.d_model
        if self.initializer_range < 0:
            gpt2 = self.init_mode == "gpt2"
            self.initializer_range = 0.8 / math.sqrt(self.d_model) if gpt2 else 1.0
        if self.d_vocab_out == -1:
            self.d_vocab_out = self.d_vocab
        if self.positional_embedding_type == "rotary" and self.rotary_dim is None:
            self.rotary_dim = self.d_head
        if self.use_attn_scale and self.attn_scale == -1.0:
            self.attn_scale = math.sqrt(self.d_head)
        if self.device is None:
            self.device = str(get_device())
        self.n_params = self._count()

    def _check(self) -> None:
        if self.use_local_attn and (self.window_size is None or self.attn_types is None):
            raise ValueError("use_local_attn=True needs window_size and attn_types")
        if not self.attn_only:
            if self.act_fn is None:
                raise ValueError("act_fn must be given, unless attn_only=True")
            if self.act_fn not in _KNOWN_ACT_FNS:
                known, hint = ", ".join(_KNOWN_ACT_FNS), suggestion(self.act_fn, _KNOWN_ACT_FNS)
                raise ValueError(f"act_fn is {self.act_fn!r}; it must be one of {known}.{hint}")
        if (self.num_experts is None) != (self.experts_per_token is None):
            raise ValueError("num_experts and experts_per_token go together: give both or neither")
        check_choice("default_prepend_bos", self.default_prepend_bos, (True, False))
        if self.n_devices > 1 and torch.cuda.device_count() < self.n_devices:
            raise ValueError(
                f"n_devices={self.n_devices}, but this machine has {torch.cuda.device_count()}"
            )

    def _count(self) -> int:
        """Return the number of attention and MLP weights, without biases, norms and embeddings, as
        HookedTransformer counts them.
        """
        per_layer = 4 * self.d_model * self.d_head * self.n_heads
        if not self.attn_only:
            assert self.d_mlp is not None
            mlp = self.d_model * self.d_mlp * (2 + self.gated_mlp)
            per_layer += (mlp + self.d_model) * self.num_experts if self.num_experts else mlp
        return self.n_layers * per_layer

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> HookedTransformerConfig:
        """Return a configuration with these fields."""
        known = [f.name for f in fields(cls)]
        for name in config_dict:
            if name not in known:
                hint = suggestion(name, known)
                raise TypeError(f"HookedTransformerConfig has no field {name!r}.{hint}")
        return cls(**config_dict)

    @classmethod
    def unwrap(
        cls, config: Mapping[str, Any] | HookedTransformerConfig | ModelConfig
    ) -> HookedTransformerConfig:
        """Return a configuration from its fields or a model's `cfg`."""
        if isinstance(config, ModelConfig):
            return cls.of_model(config)
        if isinstance(config, Mapping):
            return cls.from_dict(config)
        if not isinstance(config, cls):
            raise TypeError(
                f"{type(config).__name__} is no configuration: give a HookedTransformerConfig or"
                " its fields"
            )
        return config

    @classmethod
    def of_model(cls, cfg: ModelConfig) -> HookedTransformerConfig:
        """Return the facts about a model (`bridge.cfg`) as a HookedTransformerConfig."""
        facts = ModelConfig.to_dict(cfg)
        names = {f.name for f in fields(cls)} - {"n_params", "seed"}
        values = {name: x for name, x in facts.items() if name in names and x is not None}
        # HookedTransformer marks missing and unknown fields of a loaded model with other values.
        values["normalization_type"] = facts["normalization_type"]
        values["device"] = str(facts["device"])
        values["n_ctx"] = facts["n_ctx"] or -1
        config = cls(**(values | {"act_fn": "gelu"}))
        config.act_fn, config.seed = facts["act_fn"], getattr(cfg, "seed", None)
        return config

    def to_dict(self) -> Kwargs:
        """Return the fields as a dictionary."""
        return dict(self.__dict__)

    def native(self) -> Kwargs:
        """Return the fields of a `NativeConfig` for the same model."""
        self._check_native()
        other = {"tie_word_embeddings"}
        if self.positional_embedding_type != "rotary":
            other |= {"rotary_dim", "rotary_base"}
        shared = {f.name for f in fields(NativeConfig)} & self.__dict__.keys() - other
        values = {name: getattr(self, name) for name in shared}
        if self.d_vocab_out <= 0:
            values["d_vocab_out"] = self.d_vocab
        if not self.use_local_attn:
            values["window_size"] = values["attn_types"] = None
        if self.num_experts is not None:
            # HookedTransformer's experts are gated, whatever the field says
            values["gated_mlp"] = True
        if self.attn_only:
            values["d_mlp"] = values["act_fn"] = None
        if self.init_mode == "muP":
            del values["init_mode"]  # the weights are drawn later
        values["attn_scale"] = float(self.attn_scale) if self.use_attn_scale else None
        return values

    def _check_native(self) -> None:
        """Reject fields that only loaded models can have."""
        for name, allowed in ONLY_LOADED.items():
            if getattr(self, name) != allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is for loaded models; one made from a"
                    " configuration cannot have it"
                )
        if self.positional_embedding_type == "alibi":
            raise ValueError("positional_embedding_type='alibi' is for loaded models")
        if self.d_vocab < 0:
            raise ValueError(
                f"d_vocab is {self.d_vocab}: it is needed, or a tokenizer that says it"
            )

    def __repr__(self) -> str:
        return "HookedTransformerConfig:\n" + pprint.pformat(self.to_dict())


@dataclass(repr=False)
class TransformerBridgeConfig(HookedTransformerConfig):
    """The configuration of TransformerLens 4's `boot_native`: the same fields, with other defaults.

    Args:
        architecture: a name of your choice; it has no effect.
    """

    act_fn: str | None = "relu"
    architecture: str | None = None


#: Fields that are read from the model on access.
_READ = ("device", "dtype", "n_params")


@dataclass(init=False, repr=False)
class HookedModelConfig(ModelConfig, _LegacyFields):
    """`ModelConfig` as a `HookedTransformerConfig`: its additional fields keep their defaults until
    they are set.

    `device` and `dtype` are the model's until they are set. Setting them moves nothing: afterwards
    they return the value that was set, also when the model is moved.
    """

    @classmethod
    def of(cls, cfg: ModelConfig) -> HookedModelConfig:
        """Return a configuration with the same facts."""
        config = cls.__new__(cls)
        known = {field.name for field in fields(cfg)}
        for field in fields(cls):
            name = field.name
            if name not in _READ:
                setattr(config, name, getattr(cfg, name) if name in known else field.default)
        return config

    @property
    def device(self) -> torch.device:
        """Return the model's device, or the value that was set."""
        return self.__dict__.get("set_device") or super().device

    @device.setter
    def device(self, device: torch.device | str | None) -> None:
        self.__dict__["set_device"] = None if device is None else torch.device(device)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the model's weights, or the value that was set."""
        return self.__dict__.get("set_dtype") or super().dtype

    @dtype.setter
    def dtype(self, dtype: torch.dtype | None) -> None:
        self.__dict__["set_dtype"] = dtype

    def to_dict(self) -> Kwargs:
        """Return HookedTransformer's fields, from which the model can be rebuilt."""
        return HookedTransformerConfig.of_model(self).to_dict()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; setting `ungroup_grouped_query_attention` ungroups keys and values, as the
        model's method does.
        """
        before = self.__dict__.get(name)
        super().__setattr__(name, value)
        set_ungrouped = self.__dict__.get("acts")
        if name != "ungroup_grouped_query_attention" or set_ungrouped is None:
            return
        if bool(value) != bool(before):
            try:
                set_ungrouped(value)
            except BaseException:
                self.__dict__[name] = before
                raise

    def __getstate__(self) -> Kwargs:
        return {name: value for name, value in self.__dict__.items() if name != "acts"}


HookedTransformerConfig.register(HookedModelConfig)
__getattr__ = named(__name__)
