"""What the corrupted run leaves for the patched ones: the stream of each layer, and keys and values."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from adapters.inputs.arguments import gives_cache
from bridge.bridge import TransformerBridge
from bridge.hooks.rounding import close
from bridge.run.layer_range import StopRun


class CorruptedRun:
    """One run of the corrupted prompts, and what later runs take from it.

    Args:
        model: the bridge.
        tokens: ``[batch, pos]``.
        layers: the layers at which patched runs will start, from 0.
        keep: hook points whose activations are wanted.
        attention_mask: ``[batch, pos]``, 1 for tokens and 0 for padding; None: no padding.

    Attributes:
        logits: ``[batch, pos, d_vocab]``.
        streams: the residual stream before each layer from the lowest of these on, ``[batch, pos, d_model]``.
        kept: the wanted activations, by name.
        handed_on: where the next block is given the same that a block leaves: the names of these two hook points.
        positions: whether going from layer to layer gives these logits again for runs that start behind the first
            positions.
    """

    def __init__(
        self,
        model: TransformerBridge,
        tokens: Int[Tensor, "batch pos"],
        layers: Sequence[int],
        keep: Sequence[str] = (),
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> None:
        self.model, self.tokens, self.attention_mask = model, tokens, attention_mask
        self.batch, self.length = tokens.shape
        first, n_layers = min(layers, default=0), model.cfg.n_layers
        names = {layer: f"blocks.{layer}.hook_resid_pre" for layer in range(first, n_layers)}
        self._streams_known = all(name in model.hook_dict for name in names.values())
        self.streams: dict[int, Tensor] = {}
        self.kept: dict[str, Tensor] = {}
        self.handed_on: dict[str, str] = {}
        ends = {f"blocks.{layer}.hook_resid_post": names.get(layer + 1) for layer in layers}
        pairs = {end: after for end, after in ends.items() if after in model.hook_dict and end in model.hook_dict}
        wanted = dict.fromkeys([*(names.values() if self._streams_known else ()), *pairs, *keep])
        options: dict[str, Any] = {"attention_mask": attention_mask}
        caching = self.length > 1 and _may_cache(model)
        if caching:
            options["return_type"] = "logits_and_cache"
        if wanted:
            output, cache = model.run_with_cache(tokens, names_filter=list(wanted), **options)
            self.kept = {name: cache[name] for name in keep}
            if self._streams_known:
                self.streams = {layer: cache[name] for layer, name in names.items()}
                self.handed_on = {end: after for end, after in pairs.items() if _same(cache[end], cache[after])}
        else:
            output = model(tokens, **options)
        self.logits: Float[Tensor, "batch pos d_vocab"] = output[0] if caching else output
        self._past: DynamicCache | None = _plain_cache(output[1], self.length) if caching else None
        self.positions = self._streams_known and self._past is not None and self._reproduces_logits(self.length // 2)

    @cached_property
    def steps(self) -> bool:
        """Whether going from layer to layer gives these logits again for runs of all positions; tried when asked."""
        return self._streams_known and self._reproduces_logits(0)

    def _reproduces_logits(self, start: int) -> bool:
        """Whether each layer of the corrupted run alone, from its stream, gives the next, and the last one the logits.

        The last layer comes first, so that a layer that waits for what an earlier one leaves it does not find that.
        """
        n_layers = self.model.cfg.n_layers
        right = self.logits[:, start:]
        for layer in sorted(self.streams, reverse=True):
            options = self.options(layer, layer + 1, 1, start)
            stream = self.streams[layer][:, start:]
            found = self.model(stream, start_at_layer=layer, stop_at_layer=layer + 1, **options)
            if layer == n_layers - 1:
                found = self.logits_of(found)
            if not close(found, right):
                return False
            right = stream
        return True

    @cached_property
    def ends_early(self) -> bool:
        """Whether the last block at the last position alone gives these logits again; tried when asked."""
        last, layer = self.length - 1, self.model.cfg.n_layers - 1
        if not self._streams_known or self._past is None or len(self._past.layers) != layer + 1:
            return False
        found = self.last_block(self.streams[layer], 0, last)
        return found.shape[1] == 1 and close(self.logits_of(found), self.logits[:, last:])

    def last_block(
        self, rows: Float[Tensor, "rows pos d_model"], start: int, begin: int
    ) -> Float[Tensor, "rows later d_model"]:
        """The stream after the last block at some positions alone: of those before, it makes keys and values, no more.

        Args:
            rows: the stream before the block.
            start: the position of their first column.
            begin: the first column that is wanted.
        """
        layer, repeats = self.model.cfg.n_layers - 1, len(rows) // self.batch
        options = self.options(layer, layer + 1, repeats, start)
        if begin:
            before = {name: mask[:, : start + begin] for name, mask in options.items() if name == "attention_mask"}
            keys = _KeysAlone(self._prefix(range(layer, layer + 1), repeats, start))
            self.model(rows[:, :begin], start_at_layer=layer, stop_at_layer=layer + 1, past_key_values=keys, **before)
            cache = options["past_key_values"] = self._prefix(range(0), repeats, start + begin)
            cache.layers[layer] = keys.layers[layer]
        return self.model(rows[:, begin:], start_at_layer=layer, stop_at_layer=layer + 1, **options)

    def logits_of(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_vocab"]:
        """What follows the blocks, at these positions.

        Args:
            stream: the residual stream after the last block.
        """
        return self.model(stream, start_at_layer=self.model.cfg.n_layers)

    def options(self, layer: int, stop: int, repeats: int, start: int) -> dict[str, Any]:
        """The arguments of a run of some layers from a position on: the mask, and the keys and values before.

        Args:
            layer, stop: the layers that run.
            repeats: how many times the prompts are in the batch.
            start: the first position that runs.
        """
        options: dict[str, Any] = {}
        if self.attention_mask is not None:
            options["attention_mask"] = self.attention_mask.repeat(repeats, 1)
        if start:
            options["past_key_values"] = self._prefix(range(layer, stop), repeats, start)
        return options

    def _prefix(self, layers: range, repeats: int, start: int) -> DynamicCache:
        """Keys and values of the first positions; only those of the layers that run are repeated."""
        assert self._past is not None
        several = len(self._past.layers) != self.model.cfg.n_layers  # attentions in a layer (LongCat)
        cache = copy.copy(self._past)
        cache.layers = []
        for index, layer in enumerate(self._past.layers):
            assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
            new = copy.copy(layer)
            new.keys, new.values = layer.keys[:, :, :start], layer.values[:, :, :start]
            if several or index in layers:
                new.keys, new.values = (x.repeat(repeats, 1, 1, 1) for x in (new.keys, new.values))
            if isinstance(new, DynamicSlidingWindowLayer):
                new.cumulative_length = start
            cache.layers.append(new)
        return cache


class _KeysAlone(DynamicCache):
    """A cache that ends a run as soon as it has a layer's keys and values.

    Args:
        cache: where they go.
    """

    def __init__(self, cache: DynamicCache) -> None:
        self.__dict__.update(cache.__dict__)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        super().update(key_states, value_states, *args, **kwargs)
        raise StopRun(key_states)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and torch.equal(one, other)


def _may_cache(model: TransformerBridge) -> bool:
    """Whether the model reads from left to right and takes keys and values of earlier tokens."""
    causal = model.cfg.attention_dir == "causal" and not model.core.config.is_encoder_decoder
    return causal and gives_cache(model.core)


def _plain_cache(cache: Any, length: int) -> DynamicCache | None:
    """The cache, if it is the usual kind and holds every position."""
    if type(cache) is not DynamicCache:
        return None
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return None
        if layer.keys is None or layer.keys.ndim != 4 or layer.keys.shape[-2] != length:
            return None
    return cache
