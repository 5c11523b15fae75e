"""The facts about a model, with every field of HookedTransformer's configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from adapters.config import ModelConfig
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig

#: What is read from the model at the time of asking.
_READ = ("device", "dtype", "n_params")


@dataclass(init=False, repr=False)
class HookedModelConfig(ModelConfig, HookedTransformerConfig):  # type: ignore[misc]  # the facts come first
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

    @property  # type: ignore[misc]
    def device(self) -> torch.device:
        """Where the model is, or is said to be."""
        return self.__dict__.get("said_device") or super().device

    @device.setter
    def device(self, device: torch.device | str | None) -> None:
        self.__dict__["said_device"] = None if device is None else torch.device(device)

    @property  # type: ignore[misc]
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
