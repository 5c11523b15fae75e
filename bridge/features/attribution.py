"""How much of a metric comes from each feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adapters.views.basis import InBasis
from bridge.analysis.attribution import Tokens
from bridge.analysis.requirements import Index, pick
from bridge.bridge import TransformerBridge
from bridge.cache.activation_cache import ActivationCache
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
    masked: dict[str, Any] = {} if attention_mask is None else {"attention_mask": attention_mask}
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


@refuse_wrong_types
def feature_logit_attrs(
    cache: ActivationCache,
    point: str | HookPoint,
    tokens: Tokens,
    incorrect_tokens: Tokens | None = None,
    *,
    pos_slice: Index = None,
) -> Float[Tensor, "feature *batch_pos"]:
    """What each feature of a basis on the stream, or on what is added to it, adds directly to the logit of a token.

    `ActivationCache.logit_attrs` of what the features write: with the norms, factors and biases that it counts.

    Args:
        cache: of a run; it holds the point and the final norm's `hook_scale`.
        point: the hook point in the basis, whose `decode` is linear.
        tokens, incorrect_tokens: as for `logit_attrs`.
        pos_slice: which positions.

    Returns:
        ``[feature, batch, pos]``.

    Raises:
        ValueError: the point is in no basis, or in one of something inside a part; its `decode` is not linear.
        MissingActivationsError, KeyError: the cache does not hold what is needed.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.bases import Rotation
        >>> from bridge.features import feature_logit_attrs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> point = bridge.add_basis("blocks.3.hook_resid_post", "turned", Rotation(128))
        >>> logits, cache = bridge.run_with_cache("Mary and", names_filter=[point.name, "ln_final.hook_scale"])
        >>> parts = feature_logit_attrs(cache, point.name, " John", " Mary")
        >>> right = logits[..., bridge.to_single_token(" John")] - logits[..., bridge.to_single_token(" Mary")]
        >>> bool((parts.sum(0) - right).abs().max() < 1e-3)
        True
    """
    name = point if isinstance(point, str) else point.name
    view = cache.model.hook_dict[name].view
    if not isinstance(view, InBasis):
        raise ValueError(f"{name} is the model's own hook point, and no basis")  # noqa: TRY004 - a name is wrong
    base = name.rpartition(".")[0]
    if not base.endswith(("_out", "hook_resid_pre", "hook_resid_mid", "hook_resid_post", "embed")):
        raise ValueError(
            f"what features of {base} write goes through the rest of its part first: place a basis on the stream, or "
            "on what is added to it"
        )
    found = cache[name]
    features = found.to_dense() if found.is_sparse else found
    with torch.no_grad():
        n, decode = features.shape[-1], view.basis.decode
        zero = decode(features.new_zeros(1, 1, n))
        written = decode(torch.eye(n, dtype=features.dtype, device=features.device)[None])[0] - zero[0]
        far = (zero + features @ written - decode(features)).abs().max()
        if far > 1e-3 * (1 + features.abs().max()):
            raise ValueError(f"the decode of {name} is not linear in the features: it is no sum of what each writes")
    if pos_slice is not None:
        features = pick(features, pos_slice, 1)
    stack = features.movedim(-1, 0).unsqueeze(-1) * written.view(n, *[1] * (features.ndim - 1), -1)
    return cache.logit_attrs(stack, tokens, incorrect_tokens, pos_slice=pos_slice)
