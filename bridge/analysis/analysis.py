"""Analysis: what the activations and the weights of one run say, without running the model again.

What comes in: an `AnalysedRun` (an `ActivationCache`): activations by name, and the model that made them. What goes
out: tensors with an axis of components, and their names.

The mechanism, in order:

1. This file says what a study may ask of a run and of a model, picks positions, rows and neurons (`pick`), asks for
   activations by name (`require`, which says what to cache where one is missing), and refuses by name.
2. `bridge.analysis.layer_outputs`: what heads, neurons and biases of a layer write, from a few activations and
   weights, through the norm that stands behind them.
3. `bridge.analysis.decomposition`: walks the recipe of the stream as the architecture declares it, and gives its
   terms.
4. `bridge.analysis.residual`: the methods of a cache that use these: the stream in parts, attribution to logits.
5. `bridge.analysis.logit_lens` (each layer read as next tokens), `bridge.analysis.head_detector` (previous-token,
   duplicate and induction heads) and `bridge.analysis.svd` (singular vectors, composition) stand on their own.

Sums are sums: a decomposition adds up to the stream, an attribution to the logit, or it is refused (`refuse_no_sum`,
`refuse_no_logit_sum`, `refuse_no_stream`). It must not know of families: what is not in the declared recipe is not
assumed.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from bridge.hooks.arguments import listed
from bridge.hooks.asked import StudiedBridge


def refuse_training(model: nn.Module) -> None:
    """Refuses a model whose runs differ by dropout.

    Raises:
        ValueError: it is in training mode.
    """
    if model.training:
        raise ValueError("the model is in training mode, in which runs differ by dropout: call bridge.eval() first")


def refuse_no_sum(model: StudiedBridge, *, of_normed: bool = False) -> None:
    """Refuses a model whose residual stream cannot be taken apart into what was written to it.

    Args:
        model: the bridge.
        of_normed: norms on the stream itself are gone through, term by term.

    Raises:
        ValueError: its stream is no sum; the message says why.
    """
    if reason := model.architecture.why_no_sum(of_normed=of_normed):
        raise ValueError(f"{model.cfg.model_name}: {reason}. The hook points show each stream and each part")


def refuse_no_logit_sum(model: StudiedBridge) -> None:
    """Refuses a model whose logits are no sum over the terms of its residual stream.

    Args:
        model: the bridge.

    Raises:
        ValueError: they are not; the message says why.
    """
    if reason := model.architecture.why_no_logit_sum():
        raise ValueError(f"{model.cfg.model_name}: {reason}")


def refuse_no_stream(model: StudiedBridge) -> None:
    """Refuses a model without one list of blocks, or whose blocks carry several residual streams.

    Args:
        model: the bridge.

    Raises:
        ValueError: it is one.
    """
    if "blocks.0.hook_resid_pre" not in model.hook_dict:
        raise ValueError(
            f"{model.cfg.model_name} has no single list of blocks: decompositions and lenses are for models with one "
            "residual stream; its activations can be read by name"
        )
    model.architecture.refuse_several_streams(model.cfg.model_name)


class AnalysedRun(Mapping[str, Tensor]):
    """The activations of one run by hook name, and the model that made them.

    Attributes:
        has_batch_dim: whether they have their batch axis.
    """

    has_batch_dim: bool

    @property
    @abstractmethod
    def model(self) -> StudiedBridge:
        """The model that made them."""

    @abstractmethod
    def module_of_the_run(self, name: str) -> nn.Module:
        """The module at a hook point, with the weights that it had in the run."""

    @property
    @abstractmethod
    def cache_dict(self) -> dict[str, Tensor]:
        """All of them, by canonical name."""

    @abstractmethod
    def part(self, name: str, layer: int | None = None, *, heads: Index = None) -> Tensor:
        """Some heads of one of them, of which no others are computed where nobody has yet."""


@runtime_checkable
class HasSlice(Protocol):
    """An object that holds what picks from an axis, as HookedTransformer's `Slice`."""

    slice: Any  # whatever `Plain` allows, or a tuple
    mode: str


#: What picks from an axis: an index (the axis goes); ``(stop,)``, ``(start, stop)`` or ``(start, stop, step)``; a
#: slice; a list or tensor of indices; an object that holds one of these; None: everything.
Index = int | np.integer | slice | tuple[int | None, ...] | Sequence[int] | np.ndarray | Tensor | HasSlice | None


#: The same in the ways that torch itself understands.
Plain = int | slice | Sequence[int] | np.ndarray | Tensor | None


class MissingActivationsError(KeyError):
    """A cache does not hold what an analysis needs."""

    def __str__(self) -> str:
        return str(self.args[0])


def plain(index: Index) -> Plain:
    """What picks from an axis, as an int, a slice, a list, array or tensor of indices, or None.

    Args:
        index: see `Index`.

    Example:
        >>> import torch
        >>> from bridge.analysis.analysis import plain
        >>> plain((2, 5)), plain(torch.tensor(3))
        (slice(2, 5, None), 3)
    """
    if index is None or isinstance(index, int | slice | list):
        return index  # a protocol takes longer to ask about
    chosen = index.slice if isinstance(index, HasSlice) else index
    if isinstance(chosen, tuple):
        return slice(*chosen)
    if isinstance(chosen, np.integer) or (isinstance(chosen, np.ndarray | Tensor) and not chosen.ndim):
        return int(chosen)
    return chosen


def pick(x: Shaped[Tensor, "..."], index: Index, axis: int) -> Shaped[Tensor, "..."]:
    """A part of a tensor along one axis, chosen as HookedTransformer's `Slice` does.

    Args:
        x: any tensor.
        index: see `Index`. A tuple is a slice, a list is a list of indices.
        axis: which axis; negative ones count from the end.

    Returns:
        The part; an int takes the axis away.

    Raises:
        IndexError: there is no such index.

    Example:
        >>> import torch
        >>> from bridge.analysis.analysis import pick
        >>> pick(torch.arange(6), (1, 4), 0).tolist(), pick(torch.arange(6), [5, 0], 0).tolist()
        ([1, 2, 3], [5, 0])
    """
    chosen = plain(index)
    if chosen is None:
        return x
    if not isinstance(chosen, int | slice):
        chosen = torch.as_tensor(chosen, device=x.device)
    return x[(slice(None),) * (axis % x.ndim) + (chosen,)]


def require(cache: AnalysedRun, names: Iterable[str]) -> list[Tensor]:
    """The activations of these names.

    Args:
        cache: an `ActivationCache`.
        names: hook names or aliases.

    Raises:
        MissingActivationsError: the cache does not hold all of them; it says what to ask `run_with_cache` for.
        UnknownHookError: the model has no such hook point.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.analysis import require
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> len(require(cache, ["hook_embed", "blocks.0.hook_attn_out"]))
        2
    """
    names = list(names)
    missing = [name for name in names if name not in cache]
    for name in missing:
        cache.model.names.find(name)
    if missing:
        endings = tuple(dict.fromkeys(re.sub(r"^\w+\.\d+\.", "", name) for name in missing))
        accepts = f"name.endswith({endings if len(endings) > 1 else repr(endings[0])})"
        raise MissingActivationsError(
            f"the cache does not hold {listed(missing)}, which this needs. run_with_cache keeps them "
            f"without a names_filter, or with one that accepts {accepts} as well, in a run through all layers that "
            "starts from tokens"
        )
    return [cache[name] for name in names]


def layer_of(model: StudiedBridge, layer: int | None, mlp_input: bool = False) -> int:
    """The layer whose input is meant: None and -1 are the end of the residual stream, as in HookedTransformer.

    Args:
        model: the bridge.
        layer: in ``[0, n_layers]``, or -1 or None.
        mlp_input: the input of that layer's MLP is meant.

    Raises:
        ValueError: there is no such layer, or no such stream of a model with an encoder and a decoder.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.analysis import layer_of
        >>> layer_of(TransformerBridge.boot_embedded(), -1)
        4
    """
    refuse_no_stream(model)
    n = model.cfg.n_layers
    layer = n if layer is None or layer == -1 else layer
    if not 0 <= layer <= n:
        raise ValueError(f"layer is {layer}; it must be from 0 to {n}, or -1 or None for the end of the stream")
    if mlp_input and layer == n:
        raise ValueError(f"mlp_input=True needs a layer from 0 to {n - 1}: after the last layer there is no MLP")
    return layer
