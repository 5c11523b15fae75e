"""Readings: named functions of an activation that the worker computes after a pass. Only their
results, a few numbers per token, leave the worker; the activation does not.

A `FittedProbe` reads products with its weights. A `LensTop` reads the most likely tokens, through
an affine map, the final norm and the unembedding, or some of these.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor, nn

from adapters.points import base_path, path_from
from bridge.arguments import check_positive, shown
from bridge.bridge import TransformerBridge
from bridge.engine import insides
from bridge.hooks.hooks import HookPoint
from bridge.interventions import FittedProbe

#: The number of tokens whose logits are in memory at once.
_CHUNK = 256
#: The hook points of a layer's stream, with the distance of the layer before which it is read.
_STREAMS = {"hook_resid_pre": 0, "hook_resid_post": 1}


@dataclass(frozen=True)
class LensTop:
    """A reading of the residual stream as the most likely next tokens.

    Args:
        point: a ``hook_resid_pre`` or ``hook_resid_post``.
        kind: as for `bridge.lens`: ``"raw"``, through the unembedding only; ``"normed"``, through
            the final norm and the unembedding; or a `bridge.lens.TunedLens`, whose map comes before
            the final norm.
        k: the number of tokens.
        name: its name in `EngineAnswer.lens`; None: the name of the hook point.

    Example:
        >>> from bridge.engine import LensTop
        >>> LensTop("blocks.1.hook_resid_post", k=3).kind
        'raw'
    """

    point: str
    kind: str | nn.Module = "raw"
    k: int = 5
    name: str | None = None

    def __post_init__(self) -> None:
        check_positive("k", self.k)
        if self.kind not in ("raw", "normed") and not isinstance(self.kind, nn.Module):
            raise ValueError(
                f"kind is {shown(self.kind)}; it must be 'raw', 'normed' or a TunedLens"
            )


@dataclass(frozen=True)
class LikelyTokens:
    """The most likely next tokens that a lens reads at each processed token.

    Attributes:
        tokens: their ids, most likely first, ``[pos k]``.
        probabilities: their probabilities.
    """

    tokens: Tensor
    probabilities: Tensor


#: What a request may read.
Readable = FittedProbe | LensTop


@dataclass(frozen=True)
class EngineReading:
    """A reading as the worker receives it.

    Attributes:
        source: the probe or lens.
        point: the canonical name of its hook point.
        entry: the description of a lens: ``k``, and arguments of `insides.logits_of`.
        tensors: its weights: ``map`` (``[column feature]``) and ``shift``.
    """

    source: Readable
    point: str
    entry: Mapping[str, object]
    tensors: Mapping[str, Tensor]

    @property
    def label(self) -> str:
        """Return its name in answers."""
        source = self.source
        return source.name if isinstance(source, FittedProbe) else source.name or source.point

    @functools.cached_property
    def key(self) -> str:
        """Return a digest: equal readings have equal keys."""
        digest = hashlib.sha256(json.dumps([self.point, self.entry]).encode())
        for name, tensor in self.tensors.items():
            digest.update(f"{name} {list(tensor.shape)}".encode() + tensor.numpy().tobytes())
        return digest.hexdigest()


def engine_reading(source: Readable, bridge: TransformerBridge) -> EngineReading:
    """Check a reading, and return it as the worker receives it.

    Args:
        source: the probe or lens.
        bridge: the engine's bridge.

    Raises:
        TypeError: it is neither.
        ValueError: it does not fit the model.
    """
    if isinstance(source, FittedProbe):
        hook = source.check(bridge)
        return EngineReading(source, hook.name, {}, {"map": source.weights.cpu().contiguous()})
    if not isinstance(source, LensTop):
        raise TypeError(f"readings has {shown(source)}; it takes a FittedProbe or a LensTop")
    hook = bridge.names.find(source.point)
    tensors = _affine(source.kind, _layer(hook), bridge)
    if not 1 <= source.k <= bridge.cfg.d_vocab_out:
        raise ValueError(f"k is {source.k}; the vocabulary has {bridge.cfg.d_vocab_out} tokens")
    readout = bridge.architecture.readout
    model = bridge.original_model
    final = bridge.architecture.stack.final_norm
    logits: dict[str, object] = {}
    if source.kind == "raw":
        if readout.bias is not None:
            raise ValueError("the model adds a bias after its unembedding: use kind='normed'")
        logits["factors"] = [readout.factor_in, readout.factor_out]
    elif final is not None:
        logits["norm"] = path_from(model, final.path).removeprefix(f"{base_path(model)}.")
    entry = {"k": source.k, "logits": logits}
    return EngineReading(source, hook.name, entry, tensors)


def _layer(hook: HookPoint) -> int:
    """Return the layer before which a point shows the residual stream.

    Raises:
        ValueError: it shows something else.
    """
    match = re.fullmatch(r"blocks\.(\d+)\.(hook_resid_pre|hook_resid_post)", hook.name)
    if match is None:
        raise ValueError(
            f"a lens reads the residual stream between layers (hook_resid_pre, hook_resid_post),"
            f" and not {hook.name}"
        )
    return int(match[1]) + _STREAMS[match[2]]


@torch.no_grad()
def _affine(kind: str | nn.Module, layer: int, bridge: TransformerBridge) -> dict[str, Tensor]:
    """Return the map and the shift of a trained lens at a layer, which is affine; nothing for
    another kind.

    Raises:
        ValueError: it is for another model.
    """
    if isinstance(kind, str):
        return {}
    lens: Any = kind
    lens.check(bridge, unembedding=False)
    like = next(kind.parameters())
    read = lambda x: kind(x.to(like), layer).double().cpu()
    shift = read(torch.zeros(1, bridge.cfg.d_model))
    weight = (read(torch.eye(bridge.cfg.d_model)) - shift).T
    return {"map": weight.float().contiguous(), "shift": shift[0].float()}


def results_of(
    readings: Sequence[EngineReading], captured: Mapping[str, Tensor], prefix: str, length: int
) -> dict[str, Any]:
    """Return the `ProbeReading` or the `LikelyTokens` of each reading, by name.

    Args:
        readings: the readings of a request.
        captured: the worker's results.
        prefix: the beginning of the names of the request's results.
        length: the number of its processed tokens.
    """
    results: dict[str, Any] = {}
    for reading in readings:
        result = lambda name, key=reading.key: captured[f"{prefix}{key} {name}"][:length]
        source = reading.source
        if isinstance(source, FittedProbe):
            results[reading.label] = source.reading(result("products"))
        else:
            results[reading.label] = LikelyTokens(result("tokens"), result("probabilities"))
    return results


def unsent(readings: Sequence[EngineReading], sent: set[str]) -> tuple[str, bytes] | None:
    """Serialise the readings that the worker lacks, as JSON and safetensors; None if it has all. No
    code is executed when they are read.

    Args:
        readings: the readings.
        sent: the keys of its readings.
    """
    new = {reading.key: reading for reading in readings if reading.key not in sent}
    if not new:
        return None
    tensors = {f"{key} {name}": x for key, r in new.items() for name, x in r.tensors.items()}
    listing = json.dumps([[key, reading.point, reading.entry] for key, reading in new.items()])
    return listing, bytes_of(tensors)


# --------------------------------------------------------------------------------------------------
# In the worker.
# --------------------------------------------------------------------------------------------------


def computed(entry: Mapping[str, Any], tensors: Mapping[str, Tensor], model: Any, x: Tensor) -> Any:
    """Return the results of a reading by the end of their name.

    Args:
        entry, tensors: see `EngineReading`.
        model: vLLM's model.
        x: activations ``[token feature]``.
    """
    if "k" not in entry:
        return {"products": x.float() @ tensors["map"].T}
    parts = []
    for part in x.split(_CHUNK):
        if tensors:
            part = (part.float() @ tensors["map"].T + tensors["shift"]).to(x.dtype)
        parts.append(insides.logits_of(model, part, **entry["logits"]).softmax(-1).topk(entry["k"]))
    names = ("probabilities", "tokens")
    return {
        name: torch.cat(values)
        for name, values in zip(names, zip(*parts, strict=True), strict=True)
    }


def unpacked_readings(listing: str, data: bytes, model: Any) -> dict[str, tuple[str, Any]]:
    """Deserialise readings: by key, the hook point and the function of its activation.

    Args:
        listing, data: see `unsent`.
        model: vLLM's model.
    """
    device = next(model.parameters()).device
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors_of(data).items():
        key, _, end = name.partition(" ")
        tensors.setdefault(key, {})[end] = tensor.to(device)
    return {
        key: (point, functools.partial(computed, entry, tensors.get(key, {}), model))
        for key, point, entry in json.loads(listing)
    }
