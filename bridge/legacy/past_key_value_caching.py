"""`HookedTransformerKeyValueCache`: keys and values of earlier tokens, in the model's own cache."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from bridge.legacy.table import named


class HookedTransformerKeyValueCacheEntry:
    """The keys and values of one layer."""

    def __init__(self, cache: HookedTransformerKeyValueCache, layer: int) -> None:
        self._cache, self._layer = cache, layer

    @classmethod
    def init_cache_entry(
        cls, cfg: Any, device: torch.device | str | None = None, batch_size: int = 1
    ) -> HookedTransformerKeyValueCacheEntry:
        """An empty entry for one layer, which belongs to no model's cache."""
        return cls(HookedTransformerKeyValueCache(cfg, device, batch_size), 0)

    def append(
        self,
        new_keys: Float[Tensor, "batch new_pos n_key_value_heads d_head"],
        new_values: Float[Tensor, "batch new_pos n_key_value_heads d_head"],
    ) -> tuple[
        Float[Tensor, "batch pos n_key_value_heads d_head"], Float[Tensor, "batch pos n_key_value_heads d_head"]
    ]:
        """All keys and values, earlier and new. The new ones are kept, unless the cache is frozen."""
        past, fits = self.past_keys, new_keys.shape == new_values.shape and new_keys.ndim == 4
        if not fits or (len(new_keys), *new_keys.shape[2:]) != (len(past), *past.shape[2:]):
            raise ValueError(
                f"keys and values have shapes {list(new_keys.shape)} and {list(new_values.shape)}; both must be "
                f"[{len(past)}, new_pos, {past.shape[2]}, {past.shape[3]}]"
            )
        if self.frozen:
            return torch.cat([past, new_keys], 1), torch.cat([self.past_values, new_values], 1)
        new = (new_keys.transpose(1, 2), new_values.transpose(1, 2))
        keys, values = self._cache.past_key_values.update(*new, self._layer)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _stored(self, name: str) -> Tensor:
        layers = self._cache.past_key_values.layers
        stored = getattr(layers[self._layer], name, None) if self._layer < len(layers) else None
        if stored is None or stored.numel() == 0:
            shape = (self._cache.batch_size, 0, self._cache.n_heads, self._cache.d_head)
            return torch.empty(shape, device=self._cache.device, dtype=self._cache.dtype)
        return stored.transpose(1, 2)

    @property
    def past_keys(self) -> Float[Tensor, "batch pos n_key_value_heads d_head"]:
        """The keys so far (for rotary embeddings: as the model keeps them, which is after rotation)."""
        return self._stored("keys")

    @property
    def past_values(self) -> Float[Tensor, "batch pos n_key_value_heads d_head"]:
        """The values so far."""
        return self._stored("values")

    @property
    def frozen(self) -> bool:
        """Whether runs leave the cache as it is."""
        return self._cache.frozen


class HookedTransformerKeyValueCache:
    """Keys and values of earlier tokens, so that they need not be computed again.

    Made by `init_cache`, and passed as `past_kv_cache` to a model, which adds those of the tokens it is given.

    Attributes:
        past_key_values: transformers' cache.
        previous_attention_mask: ``[batch, pos]``: which of the earlier tokens are padding (0).
        frozen: runs read the cache and leave it as it is.

    Example:
        >>> import torch
        >>> from bridge.embedded import MODEL_DIR
        >>> from bridge.legacy import HookedTransformer, HookedTransformerKeyValueCache
        >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
        >>> tokens = model.to_tokens("When Mary and John went to the store")
        >>> cache = HookedTransformerKeyValueCache.init_cache(model.cfg, model.cfg.device)
        >>> _ = model(tokens[:, :4], past_kv_cache=cache)
        >>> last = model(tokens[:, 4:], past_kv_cache=cache)[:, -1]
        >>> torch.allclose(last, model(tokens)[:, -1], atol=1e-4), cache[0].past_keys.shape[1] == tokens.shape[1]
        (True, True)
    """

    def __init__(self, cfg: Any, device: torch.device | str | None = None, batch_size: int = 1) -> None:
        self.batch_size, self.device, self.dtype = batch_size, device, cfg.dtype
        self.n_heads, self.d_head, self.n_layers = cfg.n_key_value_heads or cfg.n_heads, cfg.d_head, cfg.n_layers
        config = getattr(getattr(cfg, "_model", None), "config", None)
        kinds = set(getattr(config, "layer_types", None) or ())
        # Without a configuration, layers with a sliding window keep all keys, as in HookedTransformer.
        self.past_key_values = DynamicCache(config=config if kinds - {"full_attention", "sliding_attention"} else None)
        self.previous_attention_mask = torch.empty((batch_size, 0), dtype=torch.int, device=device)
        self.frozen = False

    @classmethod
    def init_cache(
        cls, cfg: Any, device: torch.device | str | None = None, batch_size: int = 1
    ) -> HookedTransformerKeyValueCache:
        """An empty cache."""
        return cls(cfg, device, batch_size)

    @property
    def entries(self) -> list[HookedTransformerKeyValueCacheEntry]:
        """The keys and values of each layer."""
        return [self[i] for i in range(self.n_layers)]

    def __getitem__(self, index: int) -> HookedTransformerKeyValueCacheEntry:
        if not -self.n_layers <= index < self.n_layers:
            raise IndexError(f"the cache has {self.n_layers} layers; {index} is out of range")
        return HookedTransformerKeyValueCacheEntry(self, index % self.n_layers)

    def __len__(self) -> int:
        return self.n_layers

    def freeze(self) -> None:
        """Runs leave the cache as it is from now on."""
        self.frozen = True

    def unfreeze(self) -> None:
        """Runs add to the cache again."""
        self.frozen = False

    def append_attention_mask(self, attention_mask: Int[Tensor, "batch new_pos"]) -> Int[Tensor, "batch pos"]:
        """The mask of all tokens, earlier and new; kept unless the cache is frozen."""
        mask = torch.cat([self.previous_attention_mask.to(attention_mask.device), attention_mask], dim=-1)
        if not self.frozen:
            self.previous_attention_mask = mask
        return mask

    def for_run(self, batch_size: int) -> Any:
        """What the model is given: a copy, which takes the cache's place after the run unless that is frozen."""
        if batch_size != self.batch_size:
            raise ValueError(
                f"the cache is for {self.batch_size} rows and the input has {batch_size}: "
                f"init_cache(model.cfg, device, batch_size={batch_size})"
            )
        lent = copy.copy(self.past_key_values)
        # A layer gets new tensors in a run, and leaves those that it had as they are.
        lent.layers = [copy.copy(layer) for layer in lent.layers]
        return lent


__getattr__ = named(__name__)
