"""The options of a harvest that decide its rows, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from huggingface_hub import try_to_load_from_cache

from bridge.bridge import TransformerBridge
from bridge.embedded import MODEL_DIR
from bridge.harvest.errors import HarvestError
from bridge.harvest.fingerprint import of_value
from bridge.harvest.packing import Tokenization
from bridge.harvest.reductions import Reduction, Rows, TopPositions
from bridge.hooks.arguments import shown
from bridge.hooks.listener import HookFunction
from bridge.hooks.names import suggestion

DType = Literal["float16", "float32", "float64"]
FileFormat = Literal["arrow", "parquet"]
#: Names of special tokens that `separator` may be.
Special = Literal["bos", "eos", "sep", "cls", "pad"]


@dataclass(frozen=True)
class HarvestOptions:
    """What decides the rows, in addition to the model, the tokenizer and the source. See `harvest` for the fields."""

    hook_points: tuple[str, ...]
    tokens: Tokenization
    dtype: DType
    tokens_per_shard: int
    max_tokens: int | None
    keep_special: bool
    rows: Rows
    reduce: Mapping[str, Reduction]
    interventions: tuple[tuple[str, HookFunction], ...]
    batch_size: int | None
    format: FileFormat

    def describe(self, points: Sequence[str], batch_size: int, device: str) -> dict[str, Any]:
        """Plain data that differs when the rows would.

        Args:
            points: the hook points' canonical names.
            batch_size: the one that was chosen.
            device: the kind of device that computes.
        """
        rows = self.rows.describe() if isinstance(self.rows, TopPositions) else self.rows
        return {
            "hook_points": list(points),
            "context_size": self.tokens.context_size,
            "bos": self.tokens.bos,
            "separator": self.tokens.separator,
            "pack": self.tokens.pack,
            "dtype": self.dtype,
            "tokens_per_shard": self.tokens_per_shard,
            "max_tokens": self.max_tokens,
            "keep_special": self.keep_special,
            "rows": rows,
            "reduce": {name: reduction.describe() for name, reduction in sorted(self.reduce.items())},
            "interventions": [[name, of_value(function)] for name, function in self.interventions],
            "batch_size": batch_size,
            "device": device,
            "format": self.format,
        }


def check_number(name: str, value: object, least: int, none: bool = False) -> None:
    """Refuses what is no whole number, or too small a one.

    Raises:
        TypeError: it is no whole number.
        HarvestError: it is too small.
    """
    if none and value is None:
        return
    if type(value) is not int:
        raise TypeError(f"{name} is {value!r}; it must be a whole number{' or None' * none}")
    if value < least:
        raise HarvestError(f"{name} is {value}; it must be at least {least}")


def check_choice(name: str, value: object, choices: object) -> None:
    """Refuses what is none of the choices.

    Raises:
        HarvestError: it is none of them.
    """
    known = get_args(choices)
    if value not in known:
        near = suggestion(value, known) if isinstance(value, str) else ""
        raise HarvestError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, known))}.{near}")


def check_kinds(
    hook_points: object, interventions: object, reduce: object, prepend_bos: object, pack: object, keep_special: object
) -> None:
    """Refuses what is no list, mapping or truth value where `harvest` takes one.

    Raises:
        HarvestError: it is none.
    """
    for name, value in (("hook_points", hook_points), ("interventions", interventions)):
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            kind = (
                "a list with at least one name" if name == "hook_points" else "a list of pairs (hook point, function)"
            )
            raise HarvestError(f"{name} is {shown(value)}; it must be {kind}")
    if reduce is not None and not isinstance(reduce, Mapping):
        raise HarvestError(f"reduce is {shown(reduce)}; it must be a mapping from hook points to reductions")
    for name, value in (("pack", pack), ("keep_special", keep_special), ("prepend_bos", prepend_bos)):
        if not isinstance(value, bool) and not (name == "prepend_bos" and value is None):
            raise HarvestError(f"{name} is {shown(value)}; it must be True or False")


def special_id(tokenizer: Any, separator: int | str | None) -> int | None:
    """The id of a separator.

    Args:
        tokenizer: a Hugging Face tokenizer, or None.
        separator: an id, one of the names in `Special`, or None.

    Raises:
        HarvestError: the tokenizer has no such token.
    """
    if separator is None or type(separator) is int:
        return separator
    check_choice("separator", separator, Special)
    found = getattr(tokenizer, f"{separator}_token_id", None)
    if found is None:
        raise HarvestError(f"separator is {separator!r}, and the tokenizer has no such token: give its id")
    return int(found)


def bos_id(tokenizer: Any, prepend_bos: bool | None, default: bool) -> int | None:
    """The id that every input starts with.

    Args:
        tokenizer: a Hugging Face tokenizer, or None.
        prepend_bos: whether there is one; None: `default`, where the tokenizer has a BOS (or CLS).
        default: what the model is used with.

    Raises:
        HarvestError: it was asked for, and there is no such token.
    """
    bos = None
    if tokenizer is not None:
        bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    if prepend_bos and bos is None:
        raise HarvestError("prepend_bos=True, but the tokenizer has no BOS token (nor CLS); use prepend_bos=False")
    wanted = default if prepend_bos is None else prepend_bos
    return bos if wanted else None


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: a bridge, or a name that is loaded where it is needed.

    Attributes:
        bridge: the bridge, or None.
        name: the name or path, or None.
        device, dtype: for a name; None: as Hugging Face chooses.
    """

    bridge: TransformerBridge | None
    name: str | None
    device: str | None
    dtype: str | None

    @classmethod
    def of(cls, model: object, device: torch.device | str | None, dtype: torch.dtype | str | None) -> ModelSource:
        """Where `model` comes from.

        Raises:
            TypeError: it is neither a bridge nor a name.
            HarvestError: a bridge in training mode or with hooks of its own, or a device or type for a bridge.
            ValueError: a bridge of a model whose processes have rows of their own.
        """
        if isinstance(model, str):
            name = None if device is None else str(device)
            return cls(None, model, name, None if dtype is None else str(dtype).removeprefix("torch."))
        if not isinstance(model, TransformerBridge):
            raise TypeError(f"the model is {type(model).__name__}; it must be a TransformerBridge, a path or a name")
        if device is not None or dtype is not None:
            raise HarvestError(
                "device and model_dtype are for a model that is loaded by name: move the bridge yourself"
            )
        model.wiring.refuse_own_rows("a harvest")
        if model.training:
            raise HarvestError(
                "the model is in training mode, where dropout would change what is harvested: bridge.eval() first"
            )
        hooked = [hook.name for hook in model.hook_dict.values() if hook.fwd_hooks]
        if hooked:
            raise HarvestError(
                f"the bridge has hooks at {', '.join(hooked)}, which nobody would know of later: remove them "
                "(bridge.reset_hooks()), or give them as interventions="
            )
        return cls(model, None, None, None)

    def load(self) -> TransformerBridge:
        """The bridge."""
        if self.bridge is not None:
            return self.bridge
        if self.name == "embedded":
            bridge: TransformerBridge = TransformerBridge.boot_embedded()
            if self.dtype is not None:
                bridge.to(getattr(torch, self.dtype))
            if self.device is not None:
                bridge.to(self.device)
            return bridge.eval()
        assert self.name is not None
        loaded: TransformerBridge = TransformerBridge.boot_transformers(self.name, device=self.device, dtype=self.dtype)
        return loaded.eval()

    @property
    def path(self) -> str | None:
        """The folder or hub name; None for a bridge."""
        if self.name == "embedded":
            return str(MODEL_DIR)
        return self.name

    @property
    def folder(self) -> str | None:
        """The folder that the model's files are in, where that can be had without loading it."""
        if self.path is None or os.path.isdir(self.path):
            return self.path
        config = try_to_load_from_cache(self.path, "config.json")  # of a hub name: in the folder of its commit
        return os.path.dirname(config) if isinstance(config, str) else None
