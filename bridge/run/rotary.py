"""Rotary embeddings that take their factors from the longest row: each row is given its own.

transformers chooses the frequencies of ``longrope`` (Phi-3.5, Phi-4 mini) and ``dynamic`` from the
largest position of a call. In a padded batch that is the longest row's, and a shorter row would
get another rotation than alone. In such a batch the embedding is computed row by row
(`own_factors`). What cannot be computed so is refused: rows that pass the length at which the
factors change while they are generated, and requests of one batch on both sides of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from adapters.views import Args, Kwargs

_CHANGING = ("dynamic", "longrope")


def changing_rotaries(core: nn.Module) -> list[nn.Module]:
    """Return a model's rotary embeddings whose factors depend on the length of the input.

    Args:
        core: the model.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.run.rotary import changing_rotaries
        >>> changing_rotaries(TransformerBridge.boot_embedded().core)
        []
    """
    return [module for module in core.modules() if _changing_kinds(module)]


def _changing_kinds(module: nn.Module) -> dict[str | None, str]:
    """Return the kinds of a rotary embedding that change with the length, by type of layer."""
    kind = module.__dict__.get("rope_type")
    kinds = kind if isinstance(kind, Mapping) else {None: kind}
    return {
        layer: name
        for layer, name in kinds.items()
        if isinstance(name, str) and any(word in name for word in _CHANGING)
    }


def length_of_change(module: nn.Module) -> int:
    """Return the longest input for which a rotary embedding keeps its initial factors."""
    config: Any = module.config
    parameters: Any = config.rope_parameters
    lengths = []
    for layer, kind in _changing_kinds(module).items():
        own = parameters if layer is None else parameters[layer]
        if kind == "longrope":
            lengths.append(own["original_max_position_embeddings"])
        else:
            lengths.append(module.original_max_seq_len)
    return int(min(lengths))


# --------------------------------------------------------------------------------------------------
# The embedding of each row, computed alone.
# --------------------------------------------------------------------------------------------------


_ACTIVE: ContextVar[object] = ContextVar("transformer_bridge_rotary", default=None)


@contextmanager
def own_factors(core: nn.Module, real: Int[Tensor, "row token"] | None) -> Iterator[None]:
    """Give each row of a padded batch its own rotary factors inside a ``with`` statement.

    Args:
        core: the model.
        real: 1 for tokens and 0 for padding; None: the length of each row follows from the position
            ids, as in a generation.
    """
    rotaries = changing_rotaries(core)
    if not rotaries:
        yield
        return
    ours = object()

    def by_row(module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
        # Other threads may run the model meanwhile.
        return _rows_alone(module, args, kwargs, real) if _ACTIVE.get() is ours else None

    before = _ACTIVE.get()
    with ExitStack() as attached:
        for module in rotaries:
            handle = module.register_forward_hook(by_row, with_kwargs=True)
            attached.callback(handle.remove)
        _ACTIVE.set(ours)
        attached.callback(_ACTIVE.set, before)
        yield


def _rows_alone(module: nn.Module, args: Args, kwargs: Kwargs, real: Tensor | None) -> Any:
    """Return the embedding of each row as computed for that row alone; None if no row needs it.

    Raises:
        ValueError: positions have several axes, as for images.
    """
    names = ("x", "position_ids", "layer_type")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    x, positions = arguments.pop("x"), arguments.pop("position_ids")
    if positions.ndim != 2:
        raise ValueError(
            f"the rotary embedding {type(module).__name__} chooses its factors by the longest row,"
            f" and its positions have {positions.ndim} axes: run rows of different lengths one by"
            " one, without padding"
        )
    positions = positions.expand(x.shape[0], -1)
    if real is not None:
        own = real[:, -positions.shape[1] :].to(positions.device).bool()
        positions = positions.masked_fill(~own, 0)
    lengths = positions.amax(-1) + 1
    if int(lengths.max()) <= length_of_change(module) or len(lengths.unique()) == 1:
        return None
    rows = []
    for i in range(len(x)):
        twin = _unused(module)
        rows.append(twin.forward(x[i : i + 1], positions[i : i + 1], **arguments))
    if isinstance(rows[0], Tensor):
        return torch.cat(rows)
    return tuple([torch.cat(parts) for parts in zip(*rows, strict=True)])


def _unused(module: nn.Module) -> nn.Module:
    """Return a copy of an embedding in its initial state, before any longer input changed its
    factors. It shares the parameters. The module itself is not changed, because other threads may
    be running it.
    """
    twin = copy.copy(module)
    twin._buffers = dict(module._buffers)
    for layer, kind in _changing_kinds(module).items():
        prefix = "" if layer is None else f"{layer}_"
        frequencies = twin._buffers[f"{prefix}inv_freq"]
        assert frequencies is not None
        original = getattr(module, f"{prefix}original_inv_freq")
        twin._buffers[f"{prefix}inv_freq"] = original.to(frequencies.device).clone()
        if kind != "longrope":
            setattr(twin, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
    return twin


# --------------------------------------------------------------------------------------------------
# Generations whose rows cannot be continued as each alone.
# --------------------------------------------------------------------------------------------------


def refuse_rows_that_pass(core: nn.Module, lengths: Sequence[int], new: int) -> None:
    """Raise an error if rows of different lengths are generated and one would reach a length at
    which the factors change. There, transformers recomputes a row with the new factors, which it
    can only do for all rows at once.

    Args:
        core: the model.
        lengths: the lengths of the prompts, in tokens.
        new: the maximum number of new tokens.

    Raises:
        ValueError: a row would reach that length.
    """
    if len(set(lengths)) < 2:
        return
    for module in changing_rotaries(core):
        limit = length_of_change(module)
        if any(length <= limit < length + new for length in lengths):
            raise ValueError(
                f"the rotary embedding {type(module).__name__} has other factors above {limit}"
                f" tokens, which a row of this batch passes (the prompts have {min(lengths)} to"
                f" {max(lengths)} tokens, and {new} new ones may follow): generate rows of"
                " different lengths one by one"
            )


def refuse_requests_that_differ(core: nn.Module, lengths: Sequence[int], new: int) -> None:
    """Raise an error for requests of one batch that need different factors of a rotary embedding.

    Args:
        core: the model.
        lengths: the lengths of the prompts, in tokens.
        new: the maximum number of new tokens for each.

    Raises:
        ValueError: one may become longer than the length at which the factors change.
    """
    for module in changing_rotaries(core):
        limit = length_of_change(module)
        if lengths and max(lengths) + new > limit:
            raise ValueError(
                f"the rotary embedding {type(module).__name__} takes its factors from the longest"
                f" request above {limit} tokens, and a request has up to {max(lengths) + new}:"
                " continue such prompts with bridge.generate, one by one"
            )
