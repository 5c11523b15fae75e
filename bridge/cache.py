"""`ActivationCache`: the activations of one run, by hook name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bridge.names import suggestion

_SHORT = {"attn": "pattern", "scores": "attn_scores"}
_IN_ATTENTION = {
    "q", "k", "v", "z", "result", "pattern", "attn_scores", "rot_q", "rot_k", "attn_logits",
}  # fmt: skip
_IN_MLP = {"pre", "post", "pre_linear", "mid"}


def act_name(name: str, layer: int | str | None = None, layer_type: str | None = None, stack: str = "blocks") -> str:
    """The full name of a hook point from its short one, as HookedTransformer's `get_act_name` gives it.

    Args:
        name: a short name such as ``q``, ``resid_pre``, ``scale``; or already a full one.
        layer: the block, or None outside of the blocks.
        layer_type: the part of the block where the name does not say it: ``a`` or ``attn``, ``m`` or ``mlp``, or a
            norm such as ``ln1``.
        stack: the list of blocks.

    Returns:
        Such as ``blocks.3.attn.hook_q``.

    Example:
        >>> from bridge.cache import act_name
        >>> act_name("q", 3), act_name("normalized", 2, "ln1"), act_name("embed")
        ('blocks.3.attn.hook_q', 'blocks.2.ln1.hook_normalized', 'hook_embed')
    """
    if ("." in name or name.startswith("hook_")) and layer is None and layer_type is None:
        return name
    name = _SHORT.get(name, name)
    if name == "attn_logits":
        name = "attn_scores"
    part = {"a": "attn", "m": "mlp", "b": ""}.get(layer_type or "", layer_type or "")
    if not part and name in _IN_ATTENTION:
        part = "attn"
    if not part and name in _IN_MLP:
        part = "mlp"
    if name in ("scale", "normalized") and not part and layer is None:
        part = "ln_final"
    pieces = [] if layer is None else [stack, str(layer)]
    if part:
        pieces.append(part)
    return ".".join([*pieces, f"hook_{name}"])


class ActivationCache(Mapping[str, Tensor]):
    """The activations of one run.

    Keys are canonical hook names; aliases and short forms are accepted: ``cache["q", 3]``,
    ``cache["resid_post", -1]``, ``cache["scale", 0, "ln1"]``.

    Args:
        activations: by canonical name, each with a leading batch axis where the run had one.
        model: the bridge that made them; its names and facts are used.
        has_batch_dim: False where the batch axis was removed.

    Example:
        >>> from bridge import TransformerBridge
        >>> bridge = TransformerBridge.boot_embedded()
        >>> logits, cache = bridge.run_with_cache("Mary and John")
        >>> cache["pattern", 0].shape == cache["blocks.0.attn.hook_pattern"].shape
        True
    """

    def __init__(self, activations: dict[str, Tensor], model: Any, has_batch_dim: bool = True) -> None:
        self.cache_dict = activations
        self.model = model
        self.has_batch_dim = has_batch_dim

    def __repr__(self) -> str:
        return f"ActivationCache with {len(self)} activations: {', '.join(list(self.cache_dict)[:4])}, ..."

    def __len__(self) -> int:
        return len(self.cache_dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str | tuple) and self._canonical(key) in self.cache_dict

    def __getitem__(self, key: str | tuple[Any, ...]) -> Tensor:
        name = self._canonical(key)
        found = self.cache_dict.get(name)
        if found is None:
            known = name.removesuffix("_grad") in self.model.hook_dict
            reason = "it was not asked for, or did not run" if known else "no hook point has this name"
            raise KeyError(f"{name!r} is not in the cache: {reason}.{suggestion(name, self.cache_dict)}")
        return found

    def _canonical(self, key: str | tuple[Any, ...]) -> str:
        if isinstance(key, tuple):
            name, layer, *part = key
            if isinstance(layer, int) and layer < 0:
                layer += self.model.cfg.n_layers
            key = act_name(name, layer, *part)
        if key in self.cache_dict:
            return key
        name, grad = (key[:-5], "_grad") if key.endswith("_grad") else (key, "")
        return self.model.names.aliases.get(name, name) + grad

    def remove_batch_dim(self) -> ActivationCache:
        """Removes the batch axis of a run on one prompt, in place.

        Raises:
            ValueError: the batch holds more than one.
        """
        if self.has_batch_dim:
            for name, value in self.cache_dict.items():
                if value.shape[0] != 1:
                    raise ValueError(f"cannot remove a batch axis of {value.shape[0]}: {name} has {list(value.shape)}")
            self.cache_dict = {name: value[0] for name, value in self.cache_dict.items()}
            self.has_batch_dim = False
        return self

    def to(self, device: torch.device | str, move_model: bool = False) -> ActivationCache:
        """Moves the activations, in place.

        Args:
            device: where to.
            move_model: move the model too.
        """
        self.cache_dict = {name: value.to(device) for name, value in self.cache_dict.items()}
        if move_model:
            self.model.to(device)
        return self
