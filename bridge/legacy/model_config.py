"""The facts about a model, with every field of HookedTransformer's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from adapters.config import ModelConfig


@dataclass(repr=False)
class HookedModelConfig(ModelConfig):
    """`ModelConfig` with the fields that only HookedTransformer's configuration has.

    `device` and `dtype` are the model's. Setting them says what they are said to be, until the model is moved: it does
    not move.
    """

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
    said: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, cfg: ModelConfig) -> HookedModelConfig:
        """The same facts."""
        return cls(**{f.name: getattr(cfg, f.name) for f in fields(cfg)})

    @property
    def device(self) -> torch.device:
        """Where the model is, or is said to be."""
        return self.said.get("device") or super().device

    @device.setter
    def device(self, device: torch.device | str | None) -> None:
        self.said["device"] = None if device is None else torch.device(device)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's weights, or what it is said to be."""
        return self.said.get("dtype") or super().dtype

    @dtype.setter
    def dtype(self, dtype: torch.dtype | None) -> None:
        self.said["dtype"] = dtype

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

    def to_dict(self) -> dict[str, Any]:
        """All fields, and `device`, `dtype` and `n_params`, as a plain dictionary."""
        return {name: value for name, value in super().to_dict().items() if name != "said"}
