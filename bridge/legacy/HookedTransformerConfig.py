"""`HookedTransformerConfig`: the configuration of a `HookedTransformer`, made from scratch or read from its model."""

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
from bridge.hooks.arguments import check_choice
from bridge.hooks.names import suggestion
from bridge.legacy.table import named
from bridge.legacy.utilities import get_device
from bridge.native.native import ACT_FNS, NativeConfig

#: Fields for which a model made from scratch has no place, and the value that they may have.
ONLY_LOADED: dict[str, Any] = {
    "post_embedding_ln": False, "rotary_base_local": None, "rotary_adjacent_pairs": False, "load_in_4bit": False,
    "relative_attention_max_distance": None, "relative_attention_num_buckets": None, "n_devices": 1,
}  # fmt: skip
_KNOWN_ACT_FNS = (*ACT_FNS, "xielu")
_ROTARY = ("rotary_dim", "rotary_base")


@dataclass(kw_only=True, repr=False, eq=False)
class LegacyFields:
    """What HookedTransformer's configurations say besides, of models too that were loaded."""

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
        """Whether a layer norm follows the activation function."""
        return str(vars(self)["act_fn"]).endswith("_ln")

    def set_seed_everywhere(self, seed: int) -> None:
        """Sets the seed of torch, Python and numpy."""
        set_seed(seed)


@dataclass(repr=False)
class HookedTransformerConfig(LegacyFields, LoadedModelFields, metaclass=ABCMeta):
    """What a `HookedTransformer` is made of: HookedTransformer's fields, defaults and checks.

    `docs/migration.md` and `bridge.NativeConfig` explain the fields. What is left at -1 or None is worked out from the
    others; a seed is set everywhere, as HookedTransformer does.

    Raises:
        ValueError: fields that contradict each other, or a value out of range.
        TypeError: a field that does not exist, or is missing.

    Example:
        >>> from bridge.legacy import HookedTransformerConfig
        >>> cfg = HookedTransformerConfig(n_layers=1, d_model=64, n_ctx=32, d_head=16, d_vocab=50, act_fn="relu")
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
                    "d_model=%d is not divisible by d_head=%d: n_heads is %d", self.d_model, self.d_head, self.n_heads
                )
        self._check()
        if self.seed is not None:
            self.set_seed_everywhere(self.seed)
        if self.d_mlp is None and not self.attn_only:
            self.d_mlp = 4 * self.d_model
        if self.initializer_range < 0:
            self.initializer_range = 0.8 / math.sqrt(self.d_model) if self.init_mode == "gpt2" else 1.0
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
                hint = suggestion(self.act_fn, _KNOWN_ACT_FNS)
                raise ValueError(f"act_fn is {self.act_fn!r}; it must be one of {', '.join(_KNOWN_ACT_FNS)}.{hint}")
        if (self.num_experts is None) != (self.experts_per_token is None):
            raise ValueError("num_experts and experts_per_token go together: give both or neither")
        check_choice("default_prepend_bos", self.default_prepend_bos, (True, False))
        if self.n_devices > 1 and torch.cuda.device_count() < self.n_devices:
            raise ValueError(f"n_devices={self.n_devices}, but this machine has {torch.cuda.device_count()}")

    def _count(self) -> int:
        """The weights of attention and MLPs, without biases, norms and embeddings, as HookedTransformer counts."""
        each = 4 * self.d_model * self.d_head * self.n_heads
        if not self.attn_only:
            assert self.d_mlp is not None
            mlp = self.d_model * self.d_mlp * (2 + self.gated_mlp)
            each += (mlp + self.d_model) * self.num_experts if self.num_experts else mlp
        return self.n_layers * each

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> HookedTransformerConfig:
        """A configuration from its fields."""
        known = [f.name for f in fields(cls)]
        for name in (name for name in config_dict if name not in known):
            raise TypeError(f"{name!r} is no field of HookedTransformerConfig.{suggestion(name, known)}")
        return cls(**config_dict)

    @classmethod
    def unwrap(cls, config: Mapping[str, Any] | HookedTransformerConfig | ModelConfig) -> HookedTransformerConfig:
        """A configuration of what may be its fields, or a model's `cfg`."""
        if isinstance(config, ModelConfig):
            return cls.of_model(config)
        if isinstance(config, Mapping):
            return cls.from_dict(config)
        if not isinstance(config, cls):
            what = type(config).__name__
            raise TypeError(f"{what} is no configuration: give a HookedTransformerConfig or its fields")
        return config

    @classmethod
    def of_model(cls, cfg: ModelConfig) -> HookedTransformerConfig:
        """The facts about a model (`bridge.cfg`) as a HookedTransformerConfig."""
        facts = ModelConfig.to_dict(cfg)
        names = {f.name for f in fields(cls)} - {"n_params", "seed"}
        given = {name: value for name, value in facts.items() if name in names and value is not None}
        # What a loaded model does not have, or says nothing of, has another sign here.
        given |= {"normalization_type": facts["normalization_type"], "device": str(facts["device"])}
        given |= {"n_ctx": facts["n_ctx"] or -1, "act_fn": "gelu"}
        made = cls(**given)
        made.act_fn, made.seed = facts["act_fn"], getattr(cfg, "seed", None)
        return made

    def to_dict(self) -> dict[str, Any]:
        """The fields, as a dictionary."""
        return dict(self.__dict__)

    def native(self) -> dict[str, Any]:
        """The fields of a `NativeConfig` for the same model."""
        for name, allowed in ONLY_LOADED.items():
            if getattr(self, name) != allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is for loaded models; one made from a configuration cannot have it"
                )
        if self.positional_embedding_type == "alibi":
            raise ValueError("positional_embedding_type='alibi' is for loaded models")
        if self.d_vocab < 0:
            raise ValueError(f"d_vocab is {self.d_vocab}: it is needed, or a tokenizer that says it")
        shared = {f.name for f in fields(NativeConfig)} & self.__dict__.keys() - {"tie_word_embeddings", *_ROTARY}
        given = {name: getattr(self, name) for name in shared}
        given["d_vocab_out"] = self.d_vocab_out if self.d_vocab_out > 0 else self.d_vocab  # which may be set late
        if not self.use_local_attn:
            given["window_size"] = given["attn_types"] = None
        if self.num_experts is not None:
            given["gated_mlp"] = True  # as HookedTransformer's experts are, whatever it says
        given["d_mlp"] = None if self.attn_only else self.d_mlp
        given["act_fn"] = None if self.attn_only else self.act_fn
        if self.init_mode == "muP":
            del given["init_mode"]  # the weights are drawn later
        given["attn_scale"] = float(self.attn_scale) if self.use_attn_scale else None
        if self.positional_embedding_type == "rotary":
            given |= {name: getattr(self, name) for name in _ROTARY}
        return given

    def __repr__(self) -> str:
        return "HookedTransformerConfig:\n" + pprint.pformat(self.to_dict())


@dataclass(repr=False)
class TransformerBridgeConfig(HookedTransformerConfig):
    """What TransformerLens 4's `boot_native` takes: the same fields, with defaults of its own.

    Args:
        architecture: a name of the user's, which decides nothing.
    """

    act_fn: str | None = "relu"
    architecture: str | None = None


#: What is read from the model at the time of asking.
_READ = ("device", "dtype", "n_params")


@dataclass(init=False, repr=False)
class HookedModelConfig(ModelConfig, LegacyFields):
    """`ModelConfig` as a `HookedTransformerConfig`: what only that has keeps its default until it is set.

    `device` and `dtype` are the model's until they are set. Setting them moves nothing: they then say what was set,
    also after the model is moved.
    """

    @classmethod
    def of(cls, cfg: ModelConfig) -> HookedModelConfig:
        """The same facts."""
        found = cls.__new__(cls)
        known = {f.name for f in fields(cfg)}
        for f in fields(cls):
            if f.name not in _READ:
                setattr(found, f.name, getattr(cfg, f.name) if f.name in known else f.default)
        return found

    @property
    def device(self) -> torch.device:
        """Where the model is, or is said to be."""
        return self.__dict__.get("said_device") or super().device

    @device.setter
    def device(self, device: torch.device | str | None) -> None:
        self.__dict__["said_device"] = None if device is None else torch.device(device)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's weights, or what it is said to be."""
        return self.__dict__.get("said_dtype") or super().dtype

    @dtype.setter
    def dtype(self, dtype: torch.dtype | None) -> None:
        self.__dict__["said_dtype"] = dtype

    def to_dict(self) -> dict[str, Any]:
        """HookedTransformer's fields, of which a model can be made again."""
        return HookedTransformerConfig.of_model(self).to_dict()

    def __setattr__(self, name: str, value: Any) -> None:
        """Keys and values are ungrouped where the field is set, as by the model's method."""
        before = self.__dict__.get(name)
        super().__setattr__(name, value)
        acts = self.__dict__.get("acts")
        if name == "ungroup_grouped_query_attention" and acts is not None and bool(value) != bool(before):
            try:
                acts(value)
            except BaseException:
                self.__dict__[name] = before
                raise

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "acts"}


HookedTransformerConfig.register(HookedModelConfig)
__getattr__ = named(__name__)
