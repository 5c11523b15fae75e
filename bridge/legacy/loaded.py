"""Loading a model, or making one from a configuration, with HookedTransformer's arguments."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from adapters.config import ModelConfig
from bridge.hooks.arguments import check_choice
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.loading_from_pretrained import DTYPE_FROM_STRING, get_official_model_name
from bridge.legacy.running import LegacyRuns
from bridge.legacy.utilities.devices import get_device
from bridge.loading.loading import UnknownArgumentError, text_model
from bridge.run.tokenization import TokenError

#: What a model may be made from.
Made = HookedTransformerConfig | ModelConfig | Mapping[str, Any] | nn.Module


class LegacyLoading(LegacyRuns):
    """A bridge that is loaded with HookedTransformer's arguments, or made from its configuration."""

    @classmethod
    def from_pretrained(cls, model_name: str, **kwargs: Any) -> Any:
        """Loads a model."""
        raise NotImplementedError

    @classmethod
    def _load(
        cls,
        model_name: str,
        *,
        hf_model: nn.Module | None,
        tokenizer: Any,
        device: torch.device | str | None,
        move_to_device: bool,
        dtype: torch.dtype | str,
        passed_on: dict[str, Any],
        n_devices: int = 1,
        processing: bool = False,
        **loading: Any,
    ) -> Any:
        """A bridge around a loaded model, or around the given one: a copy of it where anything has to change."""
        kind = as_type(passed_on.pop("torch_dtype", dtype))
        passed_on.pop("low_cpu_mem_usage", None)  # as transformers always loads now
        official = get_official_model_name(model_name)
        target = torch.device(device or get_device()) if move_to_device and n_devices == 1 else None
        loading["n_devices"] = n_devices if n_devices > 1 else None
        if hf_model is None:
            loading |= {"dtype": kind, "device": None if "device_map" in passed_on else target}
        else:
            loading |= {"hf_model": _copied(text_model(hf_model), processing, kind, target), "n_ctx": None}
        try:
            bridge: Any = cls.boot_transformers(official, tokenizer=tokenizer, **loading, **passed_on)
        except UnknownArgumentError as error:  # whose names are HookedTransformer's here
            known = {
                name
                for way in (cls.from_pretrained, cls.boot_transformers)
                for name in inspect.signature(way).parameters
            }
            raise UnknownArgumentError(error.name, error.loader, known) from error.__cause__
        bridge.cfg.model_name = official.rstrip("/").rpartition("/")[2]
        return bridge

    @classmethod
    def _make(cls, given: Made, tokenizer: Any, move_to_device: bool) -> tuple[nn.Module, Any]:
        """The model and the tokenizer that a configuration describes; a model is taken as it is."""
        if isinstance(given, str):
            raise TypeError(f"{given!r} is no configuration: {cls.__name__}.from_pretrained({given!r}) loads a model")
        if isinstance(given, nn.Module):
            return given, tokenizer
        config = HookedTransformerConfig.unwrap(given)
        if tokenizer is None and config.tokenizer_name is not None:
            tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_name, trust_remote_code=config.trust_remote_code)
        if config.d_vocab < 0:
            if tokenizer is None:
                raise TokenError("Must provide a tokenizer if d_vocab is not provided")
            config.d_vocab = max(tokenizer.get_vocab().values()) + 1
            config.d_vocab_out = config.d_vocab if config.d_vocab_out < 0 else config.d_vocab_out
        return cls._model_of(config, move_to_device), tokenizer

    @classmethod
    def _model_of(cls, config: HookedTransformerConfig, move_to_device: bool) -> nn.Module:
        """A model with random weights."""
        raise NotImplementedError


class WithoutProcessing(LegacyLoading):
    """`HookedEncoder` and `HookedEncoderDecoder`: no processing, and the tokenizer is used as it is.

    Args:
        cfg: a `HookedTransformerConfig` or its fields, for a model with random weights; or a Hugging Face model, which
            is wrapped as it is.
        tokenizer: for text; it is only read. None: the one that ``cfg.tokenizer_name`` names.
        move_to_device: put a new model where ``cfg.device`` says.
    """

    #: The class to load; None: what the configuration's architecture says.
    loads: Any = None

    def __init__(self, cfg: Made, tokenizer: Any = None, move_to_device: bool = True) -> None:
        model, tokenizer = self._make(cfg, tokenizer, move_to_device)
        super().__init__(model)
        self.tokenizer = tokenizer
        if tokenizer is not None:
            self.cfg.tokenizer_name = getattr(tokenizer, "name_or_path", None) or None

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        hf_model: nn.Module | None = None,
        device: torch.device | str | None = None,
        tokenizer: Any = None,
        move_to_device: bool = True,
        dtype: torch.dtype | str = torch.float32,
        **from_pretrained_kwargs: Any,
    ) -> Any:
        """Loads a model."""
        if hf_model is None and cls.loads is not None:
            from_pretrained_kwargs.setdefault("model_class", cls.loads)
        return cls._load(
            model_name, hf_model=hf_model, tokenizer=tokenizer, device=device, move_to_device=move_to_device,
            dtype=dtype, passed_on=from_pretrained_kwargs, checkpoint_index=checkpoint_index,
            checkpoint_value=checkpoint_value,
        )  # fmt: skip

    @classmethod
    def _fields(cls, config: HookedTransformerConfig, names: Mapping[str, str], fixed: Mapping[str, Any]) -> Any:
        """A configuration's fields by Hugging Face's names."""
        if config.d_vocab_out not in (config.d_vocab, -1, 0):
            raise ValueError(f"d_vocab_out is {config.d_vocab_out}; {cls.__name__} has as many as d_vocab")
        for name, allowed in fixed.items():
            if getattr(config, name) != allowed:
                raise ValueError(f"{name} is {getattr(config, name)!r}; in a {cls.__name__} it can only be {allowed!r}")
        return {theirs: getattr(config, ours) for theirs, ours in names.items()}

    @staticmethod
    def _placed(model: nn.Module, config: HookedTransformerConfig, move_to_device: bool) -> nn.Module:
        return model.eval().to(config.dtype).to(config.device if move_to_device else "cpu")

    def tokens_and_mask(
        self, input: str | Sequence[str], move_to_device: bool, truncate: bool
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Text as tokens, and their mask."""
        longest = self.cfg.n_ctx if truncate else sys.maxsize
        batch = self.batch_of([input] if isinstance(input, str) else input, longest=longest)
        mask = torch.ones_like(batch.tokens) if batch.mask is None else batch.mask
        device = self.cfg.device if move_to_device else "cpu"
        return batch.tokens.to(device), mask.to(device)


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


def _copied(model: nn.Module, processing: bool, dtype: torch.dtype, device: torch.device | None) -> nn.Module:
    """The user's model, or a copy where something is to be different: the user's stays as it is."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    places = {parameter.device for parameter in model.parameters()}
    here = device is None or all(p.type == device.type and device.index in (None, p.index) for p in places)
    if not processing and kinds == {dtype} and here:
        return model
    copied: nn.Module = copy.deepcopy(model)
    return copied.to(dtype=dtype) if device is None else copied.to(device=device, dtype=dtype)
