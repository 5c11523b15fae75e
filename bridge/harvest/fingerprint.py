"""Fingerprints of what decides a harvest's rows: weights, tokenizers, the user's functions."""

from __future__ import annotations

import functools
import inspect
import json
import os
import types
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from adapters.linear import whole
from adapters.torch_hooks import is_users_own
from adapters.views.basis import InBasis
from bridge.bases.bases import modules_of
from bridge.bridge import TransformerBridge
from bridge.hooks.hooks import HookPoint
from bridge.interventions import Operation
from bridge.modules import adapters_at_work

# --------------------------------------------------------------------------------------------------
# What a harvest refuses, and what stops one.
# --------------------------------------------------------------------------------------------------


class HarvestError(ValueError):
    """An error for a harvest that cannot be made, continued, or read as requested."""


class MixError(HarvestError):
    """An error for a folder that holds a harvest of another model, tokenizer, source or option.

    Attributes:
        differences: each difference: its name, the folder's value, and the given value.
    """

    def __init__(self, folder: str, differences: list[tuple[str, object, object]]) -> None:
        self.differences = differences
        listed = [f"{name}: it has {old!r}, given was {new!r}" for name, old, new in differences]
        super().__init__(
            f"{folder} holds a harvest that this one cannot continue ({'; '.join(listed)}). "
            "Give the same, or another folder for `out`."
        )


class WriteError(OSError):
    """An error for a shard that could not be written, for example because the disk is full.
    Complete shards are kept."""


def digest(*parts: str | bytes) -> str:
    """Return the XXH3 hash (128 bits, xxhash) of parts; their boundaries count.

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
    """Add a tensor's dtype, shape and bytes to a hash."""
    total.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
    if tensor.numel() and tensor.device.type != "meta":
        flat = tensor.detach().contiguous().reshape(-1).cpu()
        values = flat.view(torch.uint8).numpy()
        total.update(np.ascontiguousarray(values).data)


def of_module(module: nn.Module) -> str:
    """Return the hash of a module's parameters and buffers, with their names, and of the numbers
    that it and its parts hold besides, such as an epsilon. Sharded tensors are gathered.

    Args:
        module: the module.
    """
    total = xxhash.xxh3_128()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        total.update(name.encode())
        add_tensor(total, whole(tensor))
    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            if type(value) is float and not name.startswith("_"):
                total.update(f"{path}.{name} {value!r};".encode())
    return total.hexdigest()


def _torch_hooks(model: nn.Module) -> list[str]:
    """Return the torch hooks around forwards that are the user's own: where, and their names."""
    listed = []
    for path, module in model.named_modules():
        for hook in chain(module._forward_pre_hooks.values(), module._forward_hooks.values()):
            if is_users_own(hook):
                listed.append(f"{path} {getattr(hook, '__qualname__', type(hook).__qualname__)}")
    return listed


def of_model(bridge: TransformerBridge) -> dict[str, str]:
    """Return the fingerprint of a model: its class, configuration and weights, its active adapters
    of PEFT, its hook points, and the torch hooks that the user has put on it.

    Args:
        bridge: the bridge.
    """
    config = bridge.core.config.to_dict()
    for varying in ("_name_or_path", "transformers_version", "architectures", "distributed_config"):
        config.pop(varying, None)
    points = []
    for hook in bridge.hook_dict.values():
        if hook in bridge.bases:
            continue
        point = hook.point
        points.append(f"{point.name} {point.site} {point.axes} {type(point.view).__name__}")
    fingerprint = {
        "class": type(bridge.core).__name__,
        "config": digest(json.dumps(config, sort_keys=True, default=str)),
        "weights": of_module(bridge.original_model),
        "adapter": digest(*points),
    }
    if bridge.bases:
        fingerprint["bases"] = digest(*map(_basis_hash, bridge.bases))
    if adapters := adapters_at_work(bridge.original_model):
        fingerprint["adapters at work"] = digest(repr(adapters))
    if hooks := _torch_hooks(bridge.original_model):
        fingerprint["torch hooks"] = digest(*hooks)
    return fingerprint


def _basis_hash(hook: HookPoint) -> str:
    """Return the hash of a basis.

    Raises:
        ValueError: it consists of functions.
    """
    view = hook.view
    assert isinstance(view, InBasis)
    modules = modules_of(view.basis)
    if not modules:
        raise ValueError(
            f"{hook.name} is made of functions, which nobody can tell from others when the harvest"
            " goes on: give add_basis a torch module, or remove_basis it"
        )
    source = view.reads[0][0] if view.reads else None
    total = xxhash.xxh3_128(f"{hook.name} {type(view.basis).__name__} {source}".encode())
    if isinstance(view.error, Tensor):
        add_tensor(total, view.error)
    else:
        total.update(view.error.encode())
    return total.hexdigest() + "".join(map(of_module, modules))


def of_tokenizer(tokenizer: Any) -> str:
    """Return the hash of a Hugging Face tokenizer: vocabulary, merges, rules, special tokens, and
    the chat template.

    Args:
        tokenizer: the tokenizer; it is only read.
    """
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    if template := getattr(tokenizer, "chat_template", None):
        special += json.dumps(template, sort_keys=True)
    if getattr(tokenizer, "is_fast", False):
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        # These belong to the last call, not to the tokenizer.
        rules.pop("truncation", None)
        rules.pop("padding", None)
        return digest(json.dumps(rules, sort_keys=True), special)
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return digest(type(tokenizer).__name__, vocabulary, special)


def of_folder(name_or_path: str) -> dict[str, list[int]] | None:
    """Return the sizes and modification times (ns) of a model's files; None if there is no such
    folder on this machine.

    Args:
        name_or_path: a folder.
    """
    if not os.path.isdir(name_or_path):
        return None
    files = {}
    for entry in sorted(Path(name_or_path).iterdir()):
        if entry.is_file():
            stat = entry.stat()
            files[entry.name] = [stat.st_size, stat.st_mtime_ns]
    return files


def of_value(value: object) -> str:
    """Return the hash of an option that the user wrote: a function, a module, a tensor, or plain
    data.

    A function is identified by its code, its defaults and the variables it closes over. If that is
    not possible, set an attribute `harvest_id` (a string), which is used instead.

    Args:
        value: the option.

    Raises:
        HarvestError: the value cannot be identified.

    Example:
        >>> from bridge.harvest.fingerprint import of_value
        >>> of_value(lambda x: x * 2) == of_value(lambda x: x * 3)
        False
    """
    total = xxhash.xxh3_128()
    _add(total, value, ())
    return total.hexdigest()


def _add(total: xxhash.xxh3_128, value: object, outer: tuple[int, ...]) -> None:
    if id(value) in outer:
        total.update(b"itself")
        return
    outer = (*outer, id(value))
    harvest_id = getattr(value, "harvest_id", None)
    if isinstance(harvest_id, str):
        total.update(b"id" + harvest_id.encode())
    elif isinstance(value, Tensor):
        add_tensor(total, value)
    elif isinstance(value, Operation):
        total.update(repr(value).encode())
    elif isinstance(value, np.ndarray):
        add_tensor(total, torch.from_numpy(np.ascontiguousarray(value)))
    elif isinstance(value, types.FunctionType):
        _add_function(total, value, outer)
    elif (plain := _plain_bytes(value)) is not None:
        total.update(plain)
    else:
        own, parts = _take_apart(value)
        total.update(own)
        for part in parts:
            _add(total, part, outer)


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def _plain_bytes(value: object) -> bytes | None:
    """Return the bytes that identify a value without parts; None for one with parts."""
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r};".encode()
    if isinstance(value, nn.Module):
        return (type(value).__qualname__ + of_module(value)).encode()
    if isinstance(value, types.ModuleType | type | types.BuiltinFunctionType):
        return f"{value.__name__};".encode()
    return None


def _take_apart(value: object) -> tuple[bytes, Iterable[object]]:
    """Return the bytes that identify a value without its parts, and the parts.

    Raises:
        HarvestError: the value cannot be identified.
    """
    if isinstance(value, types.MethodType):
        return b"", (value.__func__, value.__self__)
    if isinstance(value, functools.partial):
        return b"", (value.func, value.args, value.keywords)
    if isinstance(value, types.CodeType):
        return value.co_code + repr(value.co_names).encode(), value.co_consts
    if isinstance(value, set | frozenset | list | tuple):
        own = f"{type(value).__name__} {len(value)}".encode()
        return own, sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    if isinstance(value, dict):
        return f"dict {len(value)}".encode(), chain.from_iterable(value.items())
    if hasattr(value, "__dict__") and callable(value):
        return type(value).__qualname__.encode(), (vars(value), type(value).__call__)
    raise HarvestError(
        f"{value!r} is part of what decides the rows, and cannot be told from another when the"
        " harvest goes on; give the function that holds it an attribute `harvest_id`, a text that"
        " you change when it changes"
    )


def _add_function(
    total: xxhash.xxh3_128, function: types.FunctionType, outer: tuple[int, ...]
) -> None:
    _add(total, function.__code__, outer)
    _add(total, function.__defaults__, outer)
    _add(total, function.__kwdefaults__, outer)
    captured = inspect.getclosurevars(function)
    for name, value in sorted(captured.nonlocals.items()):
        total.update(name.encode())
        _add(total, value, outer)
    for name, value in sorted(captured.globals.items()):
        total.update(name.encode())
        if isinstance(value, types.FunctionType) and value.__module__ != function.__module__:
            # A library's: its name and code, and not all that the library consists of.
            total.update(f"{value.__module__}.{value.__qualname__}".encode())
            value = value.__code__
        _add(total, value, outer)
