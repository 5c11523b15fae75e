"""What the corrupted run leaves for the patched ones: the stream of each layer, and keys and values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from adapters.config import ModelConfig
from adapters.inputs import gives_cache
from bridge.bridge import TransformerBridge
from bridge.hooks.hooks import HookPoint
from bridge.hooks.modules import close
from bridge.run.layer_range import StopRun
from bridge.run.recorder import free_memory


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
        #: A classifier has one row of scores for each prompt: no part of it is of some positions.
        self.by_position = self.logits.ndim == 3 and self.logits.shape[:2] == tokens.shape
        self._streams_known = self._streams_known and self.by_position
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


# ----------------------------------------------------------------------------------------------------------------------
# Logits that are computed only at the positions that a metric looks at.
# ----------------------------------------------------------------------------------------------------------------------


#: From positions ``[k]`` to logits ``[batch, k, d_vocab]``.
LogitsAt = Callable[[list[int]], Tensor]

#: What says nothing about the values.
_FACTS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
        Tensor.size,
        Tensor.dim,
        Tensor.ndimension,
        Tensor.numel,
        Tensor.nelement,
        Tensor.__len__,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.get_device,
    ]
)


class LazyLogits(Tensor):
    """Stands for logits ``[batch, pos, d_vocab]``, which are computed when they are used.

    Indexing with positions (``logits[:, -1]``, ``logits[rows, positions, tokens]``) computes the logits there alone.
    Anything else computes all of them first: the values are those of plain logits, whatever is done. Should something
    read the memory itself, past torch's functions, it finds NaN there.

    Example:
        >>> import torch
        >>> from bridge.patching.corrupted import lazy
        >>> whole, asked = torch.arange(24.0).view(1, 4, 6), []
        >>> def at(positions):
        ...     asked.append(positions)
        ...     return whole[:, positions]
        >>> lazy(at, whole.shape, whole)[0, -1, 2], asked
        (tensor(20.), [[3]])
    """

    _at: LogitsAt
    _whole: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            return super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.__getitem__ and isinstance(args[0], LazyLogits) and args[0]._whole is None:
            found = _chosen(args[0], args[1])
            if found is not None:
                return found
        return func(*_plain(args), **{name: _plain(value) for name, value in kwargs.items()})

    @property
    def computed(self) -> bool:
        """Whether all logits were computed."""
        return self._whole is not None

    def whole(self) -> Tensor:
        """All logits, ``[batch, pos, d_vocab]``, as a plain tensor."""
        if self._whole is None:
            self._whole = self._at(list(range(_shape(self)[1])))
        return self._whole


def lazy(at: LogitsAt, shape: Sequence[int], like: Tensor) -> LazyLogits:
    """Logits that are computed where they are looked at.

    Args:
        at: computes them at some positions.
        shape: of all of them.
        like: a tensor of the same type and on the same device.
    """
    nothing = torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(*shape)
    made = nothing.as_subclass(LazyLogits)
    made._at, made._whole = at, None
    return made


def _shape(logits: LazyLogits) -> torch.Size:
    with torch._C.DisableTorchFunctionSubclass():
        return logits.shape


def _plain(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.whole()
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)([_plain(item) for item in value])
    return value


def _chosen(logits: LazyLogits, index: Any) -> Tensor | None:
    """What an index picks, computed at its positions alone; None where that is not the plain case."""
    shape = _shape(logits)
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is None or isinstance(item, bool | LazyLogits) for item in items):
        return None
    if any(isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) for item in items):
        return None
    dots = [place for place, item in enumerate(items) if item is Ellipsis]
    if dots:
        items[dots[0] : dots[0] + 1] = [slice(None)] * (4 - len(items))
    if len(dots) > 1 or not 2 <= len(items) <= 3:
        return None
    chosen = _positions(items[1], shape[1])
    if chosen is None:
        return None
    positions, new = chosen
    if len(positions) == shape[1]:
        return None
    values = logits._at(positions)
    return values[(items[0], new.to(values.device) if isinstance(new, Tensor) else new, *items[2:])]


def _positions(item: Any, n: int) -> tuple[list[int], Any] | None:
    """The positions that an index picks of `n`, and what picks the same of these alone."""
    if isinstance(item, int):
        return ([item % n], 0) if -n <= item < n else None
    if isinstance(item, slice):
        return list(range(n))[item], slice(None)
    if isinstance(item, list) and all(type(i) is int for i in item):
        item = torch.tensor(item, dtype=torch.long)
    if isinstance(item, Tensor) and item.dtype in (torch.int64, torch.int32) and item.numel():
        if bool((item < -n).any() | (item >= n).any()):
            return None
        found, inverse = torch.unique(item.long() % n, return_inverse=True)
        return found.tolist(), inverse
    return None


# ----------------------------------------------------------------------------------------------------------------------
# The runs behind activation patching: each from the lowest layer that its patch can change.
# ----------------------------------------------------------------------------------------------------------------------


#: Makes the patched activation from the corrupted one; None: what it did in place.
Patch = Callable[[Tensor], Tensor | None]


class PatchedRuns:
    """Runs of one corrupted prompt (or batch), each with one activation patched.

    A patch in layer l leaves everything below as it is in the corrupted run. So the corrupted residual stream is taken
    once, and each run starts at its patch's layer. That is done only where it changes nothing: not for models that
    cannot start at a layer, not where hooks are attached or dropout is on (each run would have had its own), not where
    a trial run does not give the corrupted logits back, and not for so few patches that it would not pay.

    Args:
        model: the bridge.
        tokens: the corrupted tokens, ``[batch, pos]``.
        depths: the layer of each patch that will be run.
        attention_mask: ``[batch, pos]``, 1 for tokens and 0 for padding; None: no padding.

    Attributes:
        starts: the corrupted residual stream before each layer that runs start at, ``[batch, pos, d_model]``.
    """

    def __init__(
        self,
        model: TransformerBridge,
        tokens: Int[Tensor, "batch pos"],
        depths: Sequence[int],
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> None:
        self.model, self.tokens, self.attention_mask = model, tokens, attention_mask
        self.starts: dict[int, Tensor] = {}
        saved, n_layers = sum(max(depth, 0) for depth in depths), model.cfg.n_layers
        # Taking the stream costs one run, trying it at most another.
        if saved > 2 * n_layers and may_start_later(model):
            self.starts = self._streams(sorted({depth for depth in depths if depth > 0}))

    def _streams(self, layers: list[int]) -> dict[int, Tensor]:
        names = {layer: f"blocks.{layer}.hook_resid_pre" for layer in layers}
        if any(name not in self.model.hook_dict for name in names.values()):
            return {}
        logits, cache = self.model.run_with_cache(
            self.tokens, names_filter=list(names.values()), attention_mask=self.attention_mask
        )
        found = {layer: cache[name] for layer, name in names.items()}
        again = self.model(found[layers[0]], start_at_layer=layers[0], attention_mask=self.attention_mask)
        tolerance = 10 * torch.finfo(logits.dtype).eps * logits.detach().abs().max().item()
        return found if torch.allclose(again, logits, rtol=0, atol=tolerance) else {}

    def logits(self, hook: HookPoint, patches: Sequence[Patch]) -> Sequence[Float[Tensor, "batch pos d_vocab"]]:
        """The logits of a run for each patch; all of them are one batch for the model.

        Args:
            hook: where the activation stands.
            patches: each makes a patched activation from the corrupted one.

        Raises:
            ValueError: there are several patches and the activation has no batch axis.
        """
        n, size = len(patches), len(self.tokens)

        def patch(activation: Tensor, hook: HookPoint) -> Tensor | None:
            if n == 1:
                return patches[0](activation)
            parts = activation.split(size)
            if len(activation) != n * size:
                raise ValueError(f"{hook.name} has no batch axis ({hook.point.axes}): use patches_per_run=1")
            new = [function(part) for function, part in zip(patches, parts, strict=True)]
            return torch.cat([part if made is None else made for made, part in zip(new, parts, strict=True)])

        start = self.starts.get(hook.point.depth)
        given = self.tokens if start is None else start
        options: dict[str, Any] = {} if start is None else {"start_at_layer": hook.point.depth}
        if self.attention_mask is not None:
            options["attention_mask"] = _repeat(self.attention_mask, n)
        logits = self.model.run_with_hooks(_repeat(given, n), fwd_hooks=[(hook, patch)], **options)
        return logits.split(size)


def may_start_later(model: TransformerBridge) -> bool:
    """Whether leaving out the layers below a patch changes nothing: no hooks, no dropout, and the model can do it.

    Args:
        model: the bridge.
    """
    if model.no_layer_runs:
        return False
    # Listeners of the bridge are behind torch hooks, too; those that do not are asked for one by one.
    if any(point.listeners for point in model.hook_dict.values()):
        return False
    return not any(
        module.training or module._forward_hooks or module._forward_pre_hooks
        for module in model.original_model.modules()
    )


def _repeat(rows: Tensor, n: int) -> Tensor:
    return rows if n == 1 else rows.repeat(n, *[1] * (rows.ndim - 1))


# ----------------------------------------------------------------------------------------------------------------------
# How much one run may hold at once.
# ----------------------------------------------------------------------------------------------------------------------


#: What a run may take of the memory that is free.
SHARE = 0.25
#: Tokens beyond which a larger batch was not faster on a processor (12-layer GPT-2), and on other devices.
MOST_TOKENS, MOST_TOKENS_ELSEWHERE = 4096, 65536


def tokens_per_run(cfg: ModelConfig, device: torch.device, length: int, itemsize: int) -> int:
    """How many tokens one run may have, all prompts of its batch together.

    Args:
        cfg: the facts about the model.
        device: where it is.
        length: how many tokens a prompt has.
        itemsize: bytes of one number.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.patching.corrupted import tokens_per_run
        >>> tokens_per_run(TransformerBridge.boot_embedded().cfg, torch.device("cpu"), 15, 4) > 0
        True
    """
    # What one block holds of a token at most: streams, projections, the MLP's inside, scores twice.
    numbers = 16 * cfg.d_model + 6 * (cfg.d_mlp or 0) + 3 * cfg.n_heads * length
    most = MOST_TOKENS if device.type == "cpu" else MOST_TOKENS_ELSEWHERE
    return max(1, min(most, int(SHARE * free_memory(device) / (numbers * itemsize))))
