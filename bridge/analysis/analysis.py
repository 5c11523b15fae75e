"""Analyses of the activations and the weights of one run, without running the model again.

Input: an `AnalysedRun` (an `ActivationCache`), with activations by name and the model that made
them. Output: tensors with an axis of components, and the names of the components.

1. This file defines the interface of a run for analyses, picks positions, rows and neurons
   (`pick`), and requests activations by name (`require`). It raises an error that names what to
   cache if one is missing.
2. `bridge.analysis.layer_outputs` computes the outputs of heads, neurons and biases of a layer from
   a few activations and weights, through the norm that follows them.
3. `bridge.analysis.decomposition` follows the residual steps that the architecture declares, and
   returns their terms.
4. `bridge.analysis.residual` has the methods of a cache that use these: decomposition of the
   stream, attribution to logits.
5. `bridge.analysis.logit_lens` (each layer read as next tokens), `bridge.analysis.head_detector`
   (previous-token, duplicate-token and induction heads) and `bridge.analysis.svd` (singular
   vectors, composition) are independent.

A decomposition sums to the stream, and an attribution to the logit; otherwise an error is raised
(`refuse_no_sum`, `refuse_no_logit_sum`, `refuse_no_stream`). The code does not depend on model
families: it assumes nothing beyond the declared residual steps.
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

from bridge.arguments import TokenPositions, listed, positions_of
from bridge.hooks.studied_bridge import StudiedBridge


def refuse_training(model: nn.Module) -> None:
    """Reject a model whose runs differ because of dropout.

    Raises:
        ValueError: it is in training mode.
    """
    if model.training:
        raise ValueError(
            "the model is in training mode, in which runs differ by dropout: call bridge.eval()"
            " first"
        )


def refuse_no_sum(model: StudiedBridge, *, of_normed: bool = False) -> None:
    """Reject a model whose residual stream cannot be decomposed into a sum of written terms.

    Args:
        model: the bridge.
        of_normed: allow norms on the stream itself: each term is passed through them.

    Raises:
        ValueError: its stream is not such a sum; the message says why.
    """
    if reason := model.architecture.why_no_sum(of_normed=of_normed):
        raise ValueError(
            f"{model.cfg.model_name}: {reason}. The hook points show each stream and each part"
        )


def refuse_no_logit_sum(model: StudiedBridge) -> None:
    """Reject a model whose logits are not linear in the terms of its residual stream.

    Args:
        model: the bridge.

    Raises:
        ValueError: they are not; the message says why.
    """
    if reason := model.architecture.why_no_logit_sum():
        raise ValueError(f"{model.cfg.model_name}: {reason}")


def refuse_no_stream(model: StudiedBridge) -> None:
    """Reject a model without a single list of blocks, or whose blocks carry several streams.

    Args:
        model: the bridge.

    Raises:
        ValueError: it has no single list of blocks, or several streams.
    """
    if "blocks.0.hook_resid_pre" not in model.hook_dict:
        raise ValueError(
            f"{model.cfg.model_name} has no single list of blocks: decompositions and lenses are"
            " for models with one residual stream; its activations can be read by name"
        )
    model.architecture.refuse_several_streams(model.cfg.model_name)


class AnalysedRun(Mapping[str, Tensor]):
    """The activations of one run by hook name, and the model that computed them.

    Attributes:
        has_batch_dim: whether the activations have a batch axis.
    """

    has_batch_dim: bool

    @property
    @abstractmethod
    def model(self) -> StudiedBridge:
        """Return the model that produced the activations."""

    @abstractmethod
    def module_of_the_run(self, name: str) -> nn.Module:
        """Return the module at a hook point, with the weights that it had in the run."""

    @property
    @abstractmethod
    def cache_dict(self) -> dict[str, Tensor]:
        """Return all activations, by canonical name."""

    @abstractmethod
    def part(self, name: str, layer: int | None = None, *, heads: Index = None) -> Tensor:
        """Return some heads of an activation. If the activation is deferred, only these heads are
        computed.
        """


@runtime_checkable
class _HasSlice(Protocol):
    """An object that contains an index along an axis, such as HookedTransformer's `Slice`."""

    slice: Any  # any `Plain` index, or a tuple
    mode: str


#: An index along an axis: an int (which removes the axis); ``(stop,)``, ``(start, stop)`` or
#: ``(start, stop, step)``; a slice; a list or tensor of indices; an object that holds one of these;
#: None: everything.
Index = (
    int
    | np.integer
    | slice
    | tuple[int | None, ...]
    | Sequence[int]
    | np.ndarray
    | Tensor
    | TokenPositions
    | _HasSlice
    | None
)


#: The same, in the forms that torch accepts.
Plain = int | slice | Sequence[int] | np.ndarray | Tensor | None


class MissingActivationsError(KeyError):
    """An error for a cache that lacks the activations that an analysis needs."""

    def __str__(self) -> str:
        return str(self.args[0])


def plain(index: Index) -> Plain:
    """Convert an index along an axis to an int, a slice, a list, a tensor, or None.

    Args:
        index: see `Index`.

    Example:
        >>> import torch
        >>> from bridge.analysis.analysis import plain
        >>> plain((2, 5)), plain(torch.tensor(3))
        (slice(2, 5, None), 3)
    """
    if index is None or isinstance(index, int | slice | list):
        return index  # isinstance with a protocol is slower
    chosen: Any = positions_of(index)
    chosen = chosen.slice if isinstance(chosen, _HasSlice) else chosen
    if isinstance(chosen, tuple):
        return slice(*chosen)
    if isinstance(chosen, np.integer) or (
        isinstance(chosen, np.ndarray | Tensor) and not chosen.ndim
    ):
        return int(chosen)
    plain_index: Plain = chosen
    return plain_index


def pick(x: Shaped[Tensor, "..."], index: Index, axis: int) -> Shaped[Tensor, "..."]:
    """Select a part of a tensor along one axis, chosen as HookedTransformer's `Slice` does.

    Args:
        x: any tensor.
        index: see `Index`. A tuple is a slice, a list is a list of indices.
        axis: which axis; negative ones count from the end.

    Returns:
        The part; an int removes the axis.

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
    """Return the activations of these names.

    Args:
        cache: an `ActivationCache`.
        names: hook names or aliases.

    Raises:
        MissingActivationsError: the cache does not hold all of them; the message says what to
            request from `run_with_cache`.
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
            f"the cache does not hold {listed(missing)}, which this needs. run_with_cache keeps"
            f" them without a names_filter, or with one that accepts {accepts} as well, in a run"
            " through all layers that starts from tokens"
        )
    return [cache[name] for name in names]


def layer_of(model: StudiedBridge, layer: int | None, mlp_input: bool = False) -> int:
    """Return the layer whose input is requested; None and -1 mean the end of the residual stream.

    Args:
        model: the bridge.
        layer: in ``[0, n_layers]``, or -1 or None.
        mlp_input: request the input of that layer's MLP.

    Raises:
        ValueError: there is no such layer, or no such stream of a model with an encoder and a
            decoder.

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
        raise ValueError(
            f"layer is {layer}; it must be from 0 to {n}, or -1 or None for the end of the stream"
        )
    if mlp_input and layer == n:
        raise ValueError(
            f"mlp_input=True needs a layer from 0 to {n - 1}: after the last layer there is no MLP"
        )
    return layer
