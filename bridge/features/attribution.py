"""How much of a metric comes from each feature."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.hooks.arguments import refuse_wrong_types
from bridge.hooks.hook_point import HookPoint

#: From the logits ``[batch, pos, d_vocab]`` to one number with a gradient.
Metric = Callable[[Float[Tensor, "batch pos d_vocab"]], Tensor]


@refuse_wrong_types
def feature_attribution(
    bridge: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    metric: Metric,
    point: str | HookPoint,
    *,
    baseline: Float[Tensor, "..."] | None = None,
    steps: int = 1,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
) -> Float[Tensor, "batch pos *features"]:
    """How much each feature, or each entry of any activation, adds to a metric.

    With one step the gradient in the run as it is, times the difference from the baseline (attribution patching, Nanda
    2023; for features Marks et al. 2024, "Sparse Feature Circuits"). With more the mean gradient on the straight way
    from the baseline (integrated gradients, Sundararajan et al. 2017): then the sum is what the metric changes by.

    Args:
        bridge: the bridge, in evaluation mode.
        tokens: ``[batch, pos]``.
        metric: from logits ``[batch, pos, d_vocab]`` to one number.
        point: the hook point, such as one in a basis.
        baseline: what the features are compared with, of their shape, or one row; None: zeros.
        steps: how many runs the mean is of; the midpoints of as many parts of the way.
        attention_mask: 1 for tokens and 0 for padding.

    Returns:
        The shape of the activation.

    Raises:
        ValueError: no step; training mode; a baseline of another shape.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.bases import Rotation
        >>> from bridge.features import feature_attribution
        >>> bridge = TransformerBridge.boot_embedded()
        >>> point = bridge.add_basis("blocks.1.hook_resid_post", "turned", Rotation(128, 5))
        >>> tokens = bridge.to_tokens("Mary and John")
        >>> feature_attribution(bridge, tokens, lambda logits: logits[0, -1, 7], point).shape
        torch.Size([1, 4, 5])
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be 1 or more")
    if bridge.training:
        raise ValueError("the model is in training mode, in which runs differ by dropout: call bridge.eval() first")
    (hook,) = bridge.select_hooks(point)
    masked = {} if attention_mask is None else {"attention_mask": attention_mask}
    with torch.no_grad():
        _, cache = bridge.run_with_cache(tokens, names_filter=hook, **masked)
    act = cache[hook.name]
    act = act.to_dense() if act.is_sparse else act
    start = torch.zeros_like(act) if baseline is None else baseline.to(act)
    if start.shape not in (act.shape, act.shape[1:]):
        raise ValueError(f"the baseline has shape {list(start.shape)}; {hook.name} has {list(act.shape)}")
    shares = [1.0] if steps == 1 else [(step + 0.5) / steps for step in range(steps)]
    total = torch.zeros_like(act)
    for share in shares:
        leaf = (start + share * (act - start)).requires_grad_()
        with torch.enable_grad():
            logits = bridge.run_with_hooks(tokens, fwd_hooks=[(hook, _put(leaf))], **masked)
            (gradient,) = torch.autograd.grad(metric(logits), leaf)
        total += gradient
    return total / steps * (act - start)


def _put(value: Tensor) -> Callable[..., Tensor]:
    def put(activation: Tensor, hook: HookPoint) -> Tensor:
        return value

    return put
