"""How the stream of an image begins, and how one vector is read from its end, found in a recording."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from adapters.automatic.norms import norm_kind
from adapters.norms import Norm
from adapters.observe.calls import BorderTensor, ModuleCall, Recording
from adapters.observe.tolerance import agree
from adapters.stream_ends import Embedding, tables

#: Of which positions a mean is tried: the class token, all, all behind the class token and registers.
_POOLS: tuple[tuple[int, int | None], ...] = ((0, 1), (0, None), *((n, None) for n in range(1, 9)), (0, 2))


def find_patches(recording: Recording, first: ModuleCall) -> Embedding:
    """What makes the stream that enters the first block, with paths of the model.

    Args:
        recording: of a run.
        first: the call of the first block.
    """
    if first.entered is None or first.entered.value.ndim != 3:
        return Embedding()
    stream = first.entered
    before = [call for call in recording.calls if -1 < call.end <= first.start and len(call.left) == 1]
    makes = [call for call in before if call.left[0].mark == stream.mark and call.left[0].key is None]
    module = max(makes, key=lambda call: call.end, default=None)
    if module is None or len(recording.of(module.path)) > 1:
        return Embedding()
    norm, total = None, stream
    for call in makes:
        if call.entered and (kind := norm_kind(call)):
            norm, total = Norm(call.path, kind), call.entered
    patches = next((call.path for call in before if _makes_patches(call, total.value)), None)
    return Embedding(added=tables(patches=patches), norm=norm, module=module.path)


def as_patches(module: nn.Module, made: Tensor) -> Tensor:
    """What the layer of patches puts out, ``[batch, patch, d_model]``."""
    return made.flatten(2).transpose(1, 2) if isinstance(module, nn.Conv2d) and made.ndim == 4 else made


def _makes_patches(call: ModuleCall, stream: Tensor) -> bool:
    """Whether it is the layer whose vectors are the last of a stream, but for what is the same in each image."""
    if not isinstance(call.module, nn.Conv2d | nn.Linear):
        return False
    made = as_patches(call.module, call.left[0].value)
    if made.ndim != 3 or made.shape[::2] != stream.shape[::2] or made.shape[1] > stream.shape[1]:
        return False
    rest = stream[:, -made.shape[1] :] - made
    return agree(rest[:1].expand_as(rest), rest, stream)


@dataclass(frozen=True)
class Pool:
    """One vector that is read of each image.

    Attributes:
        positions: see `adapters.stream_ends.Readout`.
        norm: the norm that reads it, with its path from the model; None where it is the mean of the final norm.
        unembed: the layer whose output are the logits.
    """

    positions: tuple[int, int | None]
    norm: Norm | None
    unembed: ModuleCall | None


def find_pool(
    recording: Recording, last: BorderTensor, final: Norm | None, after: int, logits: Tensor | None
) -> Pool | None:
    """The mean over positions that the final norm or the output layer reads; None where there is none.

    Args:
        recording: of a run.
        last: the last stream.
        final: the norm that reads it, with its path from the model.
        after: the time at which the last block ended.
        logits: what the model returns first.
    """
    x = recording.of(final.path)[-1].left[0].value if final else last.value
    if x.ndim != 3:
        return None
    behind = [call for call in recording.calls if call.start > after and call.entered and call.left]
    reads = [call for call in behind if call.entered and call.entered.value.shape == x[:, 0].shape]
    pools = {call: found for call in reads if call.entered and (found := _pool_of(x, call.entered.value))}
    norms = {call: kind for call in pools if final is None and (kind := norm_kind(call))}
    norm = next(iter(norms), None)
    for call in reads:
        made = call.left[0].value
        if logits is None or not call.is_linear or made.shape != logits.shape or not agree(made, logits):
            continue
        if call in pools:  # whatever else a norm reads (CLIP)
            return Pool(pools[call], None, call)
        if norm and call.reads(norm.left[0].mark):
            return Pool(pools[norm], Norm(norm.path, norms[norm]), call)
    return None if norm is None else Pool(pools[norm], Norm(norm.path, norms[norm]), None)


def _pool_of(x: Tensor, seen: Tensor) -> tuple[int, int | None] | None:
    """Of which positions a vector is the mean."""
    tried = (pool for pool in _POOLS if x[:, slice(*pool)].shape[1])
    return next((pool for pool in tried if agree(x[:, slice(*pool)].mean(1), seen)), None)
