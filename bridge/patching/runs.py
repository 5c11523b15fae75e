"""The runs behind activation patching: each from the lowest layer that its patch can change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.hooks.hook_point import HookPoint

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
