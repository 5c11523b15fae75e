"""Fingerprints of what decides a harvest's rows: weights, tokenizers, the user's functions."""

from __future__ import annotations

import functools
import inspect
import json
import os
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from adapters.linear import whole
from adapters.views.basis import InBasis
from bridge.bases.bases import modules_of
from bridge.bridge import TransformerBridge
from bridge.hooks.hooks import HookPoint
from bridge.hooks.modules import adapters_at_work
from bridge.interventions import Operation

# ----------------------------------------------------------------------------------------------------------------------
# What a harvest refuses, and what stops one.
# ----------------------------------------------------------------------------------------------------------------------


class HarvestError(ValueError):
    """A harvest cannot be made, continued, or read as asked."""


class MixError(HarvestError):
    """A folder holds a harvest of another model, tokenizer, source or option.

    Attributes:
        differences: what differs: its name, what the folder has, what was given.
    """

    def __init__(self, folder: str, differences: list[tuple[str, object, object]]) -> None:
        self.differences = differences
        said = "; ".join(f"{name}: it has {old!r}, given was {new!r}" for name, old, new in differences)
        super().__init__(
            f"{folder} holds a harvest that this one cannot continue ({said}). "
            "Give the same, or another folder for `out`."
        )


class WriteError(OSError):
    """A shard could not be written: the disk is full, say. The whole shards stand."""


def digest(*parts: str | bytes) -> str:
    """The XXH3 hash (128 bits, xxhash) of parts, each told from the next.

    Args:
        parts: text or bytes.

    Example:
        >>> from bridge.harvest.fingerprint import digest
        >>> digest("a", "bc") == digest("ab", "c")
        False
    """
    total = xxhash.xxh3_128()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def add_tensor(total: xxhash.xxh3_128, tensor: Tensor) -> None:
    """Takes a tensor's type, shape and bytes into a hash."""
    total.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
    if tensor.numel() and tensor.device.type != "meta":
        flat = tensor.detach().contiguous().reshape(-1).cpu()
        total.update(np.ascontiguousarray(flat.view(torch.uint8).numpy()).data)


def of_module(module: nn.Module) -> str:
    """The hash of a module's parameters and buffers, with their names. Those that are spread are put together.

    Args:
        module: the module.
    """
    total = xxhash.xxh3_128()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        total.update(name.encode())
        add_tensor(total, whole(tensor))
    return total.hexdigest()


def of_model(bridge: TransformerBridge) -> dict[str, str]:
    """What tells a model from another: its class, configuration and weights, which adapters of PEFT are at work, and
    where its own puts the points.

    Args:
        bridge: the bridge.
    """
    config = bridge.core.config.to_dict()
    for varying in ("_name_or_path", "transformers_version", "architectures", "distributed_config"):
        config.pop(varying, None)
    placed = bridge.bases
    adapters = adapters_at_work(bridge.original_model)
    declared = [hook.point for hook in bridge.hook_dict.values() if hook not in placed]
    return {
        **({"bases": digest(*(_of_basis(hook) for hook in placed))} if placed else {}),
        **({"adapters at work": digest(repr(adapters))} if adapters else {}),
        "class": type(bridge.core).__name__,
        "config": digest(json.dumps(config, sort_keys=True, default=str)),
        "weights": of_module(bridge.original_model),
        "adapter": digest(
            *(f"{point.name} {point.site} {point.axes} {type(point.view).__name__}" for point in declared)
        ),
    }


def _of_basis(hook: HookPoint) -> str:
    """What tells a basis from another of the same name.

    Raises:
        ValueError: it is made of functions.
    """
    assert isinstance(hook.view, InBasis)
    modules, error = modules_of(hook.view.basis), hook.view.error
    if not modules:
        raise ValueError(
            f"{hook.name} is made of functions, which nobody can tell from others when the harvest goes on: give "
            "add_basis a torch module, or remove_basis it"
        )
    what = f"{hook.name} {type(hook.view.basis).__name__} {hook.view.reads[0][0] if hook.view.reads else None}"
    total = xxhash.xxh3_128(what.encode())
    if isinstance(error, Tensor):
        add_tensor(total, error)
    else:
        total.update(error.encode())
    return total.hexdigest() + "".join(map(of_module, modules))


def of_tokenizer(tokenizer: Any) -> str:
    """The hash of a Hugging Face tokenizer: of its vocabulary, merges, rules and special tokens.

    Args:
        tokenizer: the tokenizer; it is only read.
    """
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    if getattr(tokenizer, "is_fast", False):
        whole = json.loads(tokenizer.backend_tokenizer.to_str())
        # What the last call asked for, and no part of the tokenizer.
        whole.pop("truncation", None)
        whole.pop("padding", None)
        return digest(json.dumps(whole, sort_keys=True), special)
    return digest(type(tokenizer).__name__, json.dumps(tokenizer.get_vocab(), sort_keys=True), special)


def of_folder(name_or_path: str) -> dict[str, list[int]] | None:
    """The files of a model's folder with their sizes and times of change (ns); None for what is no folder here.

    Args:
        name_or_path: a folder.
    """
    if not os.path.isdir(name_or_path):
        return None
    found = {}
    for entry in sorted(Path(name_or_path).iterdir()):
        if entry.is_file():
            stat = entry.stat()
            found[entry.name] = [stat.st_size, stat.st_mtime_ns]
    return found


def of_value(value: object) -> str:
    """The hash of an option that the user wrote: a function, a module, a tensor, or plain data.

    A function is told by its code, its defaults and what it closes over. An attribute `harvest_id` (a string) says
    it instead, for what cannot be told so.

    Args:
        value: the option.

    Raises:
        HarvestError: what the value is cannot be told from another.

    Example:
        >>> from bridge.harvest.fingerprint import of_value
        >>> of_value(lambda x: x * 2) == of_value(lambda x: x * 3)
        False
    """
    total = xxhash.xxh3_128()
    _add(total, value, ())
    return total.hexdigest()


def _add(total: xxhash.xxh3_128, value: object, seen: tuple[int, ...]) -> None:
    if id(value) in seen:
        total.update(b"itself")
        return
    seen = (*seen, id(value))
    given = getattr(value, "harvest_id", None)
    if isinstance(given, str):
        total.update(b"id" + given.encode())
    elif isinstance(value, Tensor):
        add_tensor(total, value)
    elif isinstance(value, Operation):
        total.update(repr(value).encode())
    elif isinstance(value, np.ndarray):
        add_tensor(total, torch.from_numpy(np.ascontiguousarray(value)))
    elif isinstance(value, types.FunctionType):
        _add_function(total, value, seen)
    elif (plain := _whole(value)) is not None:
        total.update(plain)
    else:
        own, parts = _taken_apart(value)
        total.update(own)
        for part in parts:
            _add(total, part, seen)


def _whole(value: object) -> bytes | None:
    """What a value that has no parts is told from others by; None for one that has some."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return f"{type(value).__name__} {value!r};".encode()
    if isinstance(value, nn.Module):
        return (type(value).__qualname__ + of_module(value)).encode()
    if isinstance(value, types.ModuleType | type | types.BuiltinFunctionType):
        return f"{value.__name__};".encode()
    return None


def _taken_apart(value: object) -> tuple[bytes, Iterable[object]]:
    """What a value is besides its parts, and these.

    Raises:
        HarvestError: it cannot be told from another.
    """
    if isinstance(value, types.MethodType):
        return b"", (value.__func__, value.__self__)
    if isinstance(value, functools.partial):
        return b"", (value.func, value.args, value.keywords)
    if isinstance(value, types.CodeType):
        return value.co_code + repr(value.co_names).encode(), value.co_consts
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {len(value)}".encode(), sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {len(value)}".encode(), value
    if isinstance(value, dict):
        return f"dict {len(value)}".encode(), [part for item in value.items() for part in item]
    if hasattr(value, "__dict__") and callable(value):
        return type(value).__qualname__.encode(), (vars(value), type(value).__call__)
    raise HarvestError(
        f"{value!r} is part of what decides the rows, and cannot be told from another when the harvest goes on; "
        "give the function that holds it an attribute `harvest_id`, a text that you change when it changes"
    )


def _add_function(total: xxhash.xxh3_128, function: types.FunctionType, seen: tuple[int, ...]) -> None:
    _add(total, function.__code__, seen)
    _add(total, function.__defaults__, seen)
    _add(total, function.__kwdefaults__, seen)
    captured = inspect.getclosurevars(function)
    for name in sorted(captured.nonlocals):
        total.update(name.encode())
        _add(total, captured.nonlocals[name], seen)
    for name in sorted(captured.globals):
        value = captured.globals[name]
        total.update(name.encode())
        if isinstance(value, types.FunctionType) and value.__module__ != function.__module__:
            # A library's: its name and code, and not all that the library consists of.
            total.update(f"{value.__module__}.{value.__qualname__}".encode())
            _add(total, value.__code__, seen)
        else:
            _add(total, value, seen)
