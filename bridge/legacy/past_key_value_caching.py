"""`HookedTransformerKeyValueCache`: keys and values of earlier tokens, in the model's own cache."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from bridge.legacy.table import named

Device = torch.device | str | None


class HookedTransformerKeyValueCacheEntry:
    """The keys and values of one layer."""

    def __init__(self, cache: HookedTransformerKeyValueCache, layer: int) -> None:
        self._cache, self._layer = cache, layer

    @classmethod
    def init_cache_entry(
        cls, cfg: Any, device: Device = None, batch_size: int = 1
    ) -> HookedTransformerKeyValueCacheEntry:
        """Return an empty entry for one layer, outside any model's cache."""
        return cls(HookedTransformerKeyValueCache(cfg, device, batch_size), 0)

    def append(
        self,
        new_keys: Float[Tensor, "batch new_pos n_key_value_heads d_head"],
        new_values: Float[Tensor, "batch new_pos n_key_value_heads d_head"],
    ) -> tuple[
        Float[Tensor, "batch pos n_key_value_heads d_head"],
        Float[Tensor, "batch pos n_key_value_heads d_head"],
    ]:
        """Append keys and values and return all of them. A frozen cache does not keep the new
        ones.
        """
        past, shape = self.past_keys, new_keys.shape
        rows, _, n_heads, d_head = past.shape
        fits = len(shape) == 4 and [*shape] == [rows, shape[1], n_heads, d_head]
        if not fits or new_values.shape != shape:
            raise ValueError(
                f"keys and values have shapes {list(shape)} and {list(new_values.shape)};"
                f" both must be [{rows}, new_pos, {n_heads}, {d_head}]"
            )
        if self.frozen:
            keys = torch.cat([past, new_keys], 1)
            return keys, torch.cat([self.past_values, new_values], 1)
        new = (new_keys.transpose(1, 2), new_values.transpose(1, 2))
        keys, values = self._cache.past_key_values.update(*new, self._layer)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _stored(self, name: str) -> Tensor:
        cache = self._cache
        layers = cache.past_key_values.layers
        layer = layers[self._layer] if self._layer < len(layers) else None
        stored = getattr(layer, name, None)
        if stored is None or stored.numel() == 0:
            shape = (cache.batch_size, 0, cache.n_heads, cache.d_head)
            return torch.empty(shape, device=cache.device, dtype=cache.dtype)
        return stored.transpose(1, 2)

    @property
    def past_keys(self) -> Float[Tensor, "batch pos n_key_value_heads d_head"]:
        """Return the keys so far (with rotary embeddings: after rotation, as the model stores
        them).
        """
        return self._stored("keys")

    @property
    def past_values(self) -> Float[Tensor, "batch pos n_key_value_heads d_head"]:
        """Return the values so far."""
        return self._stored("values")

    @property
    def frozen(self) -> bool:
        """Tell whether runs leave the cache unchanged."""
        return self._cache.frozen


class HookedTransformerKeyValueCache:
    """Keys and values of earlier tokens, so that they need not be computed again.

    Make one with `init_cache` and pass it to a model as `past_kv_cache`; the model appends the keys
    and values of its tokens.

    Attributes:
        past_key_values: transformers' cache.
        previous_attention_mask: ``[batch, pos]``; 0 where an earlier token is padding.
        frozen: whether runs leave the cache unchanged.

    Example:
        >>> import torch
        >>> from bridge.embedded import MODEL_DIR
        >>> from bridge.legacy import HookedTransformer, HookedTransformerKeyValueCache
        >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
        >>> tokens = model.to_tokens("When Mary and John went to the store")
        >>> cache = HookedTransformerKeyValueCache.init_cache(model.cfg, model.cfg.device)
        >>> _ = model(tokens[:, :4], past_kv_cache=cache)
        >>> last = model(tokens[:, 4:], past_kv_cache=cache)[:, -1]
        >>> (
        ...     torch.allclose(last, model(tokens)[:, -1], atol=1e-4),
        ...     cache[0].past_keys.shape[1] == tokens.shape[1],
        ... )
        (True, True)
    """

    def __init__(self, cfg: Any, device: Device = None, batch_size: int = 1) -> None:
        self.batch_size, self.device, self.dtype = batch_size, device, cfg.dtype
        self.n_heads = cfg.n_key_value_heads or cfg.n_heads
        self.d_head, self.n_layers = cfg.d_head, cfg.n_layers
        config = getattr(getattr(cfg, "_model", None), "config", None)
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds <= {"full_attention", "sliding_attention"}:
            # Without a configuration, layers with a sliding window keep all keys, as in
            # HookedTransformer.
            config = None
        self.past_key_values = DynamicCache(config=config)
        self.previous_attention_mask = torch.empty((batch_size, 0), dtype=torch.int, device=device)
        self.frozen = False

    @classmethod
    def init_cache(
        cls, cfg: Any, device: Device = None, batch_size: int = 1
    ) -> HookedTransformerKeyValueCache:
        """Return an empty cache."""
        return cls(cfg, device, batch_size)

    @property
    def entries(self) -> list[HookedTransformerKeyValueCacheEntry]:
        """Return the keys and values of each layer."""
        return [self[i] for i in range(self.n_layers)]

    def __getitem__(self, index: int) -> HookedTransformerKeyValueCacheEntry:
        if not -self.n_layers <= index < self.n_layers:
            raise IndexError(f"the cache has {self.n_layers} layers; {index} is out of range")
        return HookedTransformerKeyValueCacheEntry(self, index % self.n_layers)

    def __len__(self) -> int:
        return self.n_layers

    def freeze(self) -> None:
        """Freeze the cache: runs leave it unchanged."""
        self.frozen = True

    def unfreeze(self) -> None:
        """Unfreeze the cache: runs append to it again."""
        self.frozen = False

    def append_attention_mask(
        self, attention_mask: Int[Tensor, "batch new_pos"]
    ) -> Int[Tensor, "batch pos"]:
        """Return the mask of all tokens, earlier and new; store it unless the cache is frozen."""
        earlier = self.previous_attention_mask.to(attention_mask.device)
        mask = torch.cat([earlier, attention_mask], dim=-1)
        if not self.frozen:
            self.previous_attention_mask = mask
        return mask

    def for_run(self, batch_size: int) -> Any:
        """Return a copy for the model, which replaces the cache after the run unless the cache is
        frozen.
        """
        if batch_size != self.batch_size:
            raise ValueError(
                f"the cache is for {self.batch_size} rows and the input has {batch_size}: "
                f"init_cache(model.cfg, device, batch_size={batch_size})"
            )
        copied = copy.copy(self.past_key_values)
        # A run replaces a layer's tensors rather than changing them in place.
        copied.layers = [copy.copy(layer) for layer in copied.layers]
        return copied


__getattr__ = named(__name__)
