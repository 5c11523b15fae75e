"""What HookedTransformer's `loading_from_pretrained` offers about models: their names, configurations, checkpoints."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled
from jaxtyping import Int
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from adapters.config import ModelConfig
from bridge.bridge import TransformerBridge
from bridge.hooks.arguments import check_choice
from bridge.hooks.names import suggestion
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.running import LegacyRuns
from bridge.legacy.table import named
from bridge.legacy.utilities import get_device
from bridge.loading.loading import (
    BY_NAME,
    MODEL_ALIASES,
    OFFICIAL_MODEL_NAMES,
    OWN_FORMAT,
    PYTHIA_STEPS,
    STANFORD_STEPS,
    UnknownArgumentError,
    checkpoint_steps,
    hub_name,
    text_model,
)
from bridge.run.tokenization import TokenError

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


# ----------------------------------------------------------------------------------------------------------------------
# Loading a model, or making one from a configuration, with HookedTransformer's arguments.
# ----------------------------------------------------------------------------------------------------------------------


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


__getattr__ = named(__name__)
