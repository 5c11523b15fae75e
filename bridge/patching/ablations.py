"""What an ablation puts in the place of an activation: zeros, the mean over prompts, another prompt's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from bridge.hooks.arguments import refuse_wrong_types
from bridge.interventions.operations import mean


class AblatedActivations(Mapping[str, Tensor]):
    """Activations of a run as an ablation replaces them, worked out when they are asked for.

    Args:
        cache: the activations of a run, with their batch axis.
        replace: makes what replaces one of them.
    """

    def __init__(self, cache: Mapping[str, Tensor], replace: Callable[[Tensor], Tensor]) -> None:
        self._cache, self._replace = cache, replace

    def __getitem__(self, name: str) -> Tensor:
        return self._replace(self._cache[name])

    def __contains__(self, name: object) -> bool:
        return name in self._cache

    def __iter__(self) -> Iterator[str]:
        return iter(self._cache)

    def __len__(self) -> int:
        return len(self._cache)


@refuse_wrong_types
def ablated(cache: Mapping[str, Tensor], how: str, seed: int = 0) -> AblatedActivations:
    """Activations to patch with, in the place of a clean cache, so that a sweep ablates piece by piece.

    Args:
        cache: the activations of a run, with their batch axis: of the prompts themselves, or, for a mean, of others.
        how: ``"zero"``; ``"mean"``, over the rows of the batch, position by position; ``"resample"``, each row's from
            another row, all rows moved by the same number.
        seed: for ``"resample"``: which number.

    Raises:
        ValueError: `how` is none of these, or there is no other row to resample from.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.patching import ablated, get_act_patch_attn_head_out_all_pos
        >>> bridge = TransformerBridge.boot_embedded()
        >>> tokens = bridge.to_tokens(["Mary and John went", "Tom and James went"])
        >>> _, cache = bridge.run_with_cache(tokens)
        >>> metric = lambda logits: logits[:, -1].max(-1).values.mean()
        >>> zeroed = ablated(cache, "zero")
        >>> get_act_patch_attn_head_out_all_pos(bridge, tokens, zeroed, metric, verbose=False).shape  # layer head
        torch.Size([4, 4])
    """
    if how == "zero":
        return AblatedActivations(cache, lambda x: torch.zeros_like(x[:1]))
    if how == "mean":
        return AblatedActivations(cache, lambda x: mean(x, 0))
    if how != "resample":
        raise ValueError(f'how is {how!r}; it must be "zero", "mean" or "resample"')

    def resample(x: Tensor) -> Tensor:
        if len(x) < 2:
            raise ValueError("resampling takes from another row of the batch, and this cache has only one")
        by = int(torch.randint(1, len(x), (), generator=torch.Generator().manual_seed(seed)))
        return x.roll(by, 0)

    return AblatedActivations(cache, resample)
