"""Features: what is found in a basis (an SAE, a transcoder, directions, a rotation), and how much of a metric it makes.

A basis is placed by `TransformerBridge.add_basis`; its features are then a hook point like any other. This room asks
of such points, in order of what is assumed:

1. `feature_attribution`: gradients of a metric at any point, along the way from a baseline. Nothing is assumed.
2. `feature_logit_attrs`: what each feature adds directly to a logit. Its `decode` must be linear, which is tried.
3. `evaluate_features`: what the model does with some features alone, and without them.
4. `attribution_graph` (`bridge.features.graph`): what features send each other, with patterns and norm factors held.
   Everything between them must be linear then, which is tried.
5. `interchange` and `fit_rotation` (`bridge.features.interchange`): coordinates of one prompt in another, and the
   search for those that carry a variable, with controls that must fail.
6. `direction` and `write_into_weights` (`bridge.features.directions`): what separates two sets of prompts.

It refuses a point that is in no basis where one is needed, a basis inside of a part where what is behind it is not
linear, and training mode. It must not know which kind of basis it is, only `encode` and `decode`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from adapters.views.basis import InBasis, dense
from bridge.analysis.analysis import Index, pick, refuse_training
from bridge.analysis.decomposition import at_the_end
from bridge.analysis.layer_outputs import rows_of_neurons, written_by_heads
from bridge.analysis.residual import Tokens
from bridge.bridge import TransformerBridge
from bridge.cache import ActivationCache
from bridge.circuits.edge_runs import ABLATIONS, Evaluation
from bridge.circuits.graph import Metric, gradients_of, one_number, refuse_inference_mode
from bridge.hooks.arguments import check_choice, check_positive, refuse_wrong_types
from bridge.hooks.hooks import HookPoint
from bridge.run.inputs import Prompts, prompts_with


@refuse_wrong_types
def feature_attribution(
    bridge: TransformerBridge,
    tokens: Prompts,
    metric: Metric,
    point: str | HookPoint,
    *,
    baseline: Float[Tensor, "..."] | None = None,
    steps: int = 1,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    **model_kwargs: Any,
) -> Float[Tensor, "batch pos *features"]:
    """How much each feature, or each entry of any activation, adds to a metric.

    With one step the gradient in the run as it is, times the difference from the baseline (attribution patching, Nanda
    2023; for features Marks et al. 2024, "Sparse Feature Circuits"). With more the mean gradient on the straight way
    from the baseline (integrated gradients, Sundararajan et al. 2017): then the sum is what the metric changes by.

    Args:
        bridge: the bridge, in evaluation mode.
        tokens: ``[batch, pos]``, or what a processor gives.
        metric: from logits ``[batch, pos, d_vocab]`` to one number.
        point: the hook point, such as one in a basis.
        baseline: what the features are compared with, of their shape, or one row; None: zeros.
        steps: how many runs the mean is of; the midpoints of as many parts of the way.
        attention_mask: 1 for tokens and 0 for padding.
        model_kwargs: what else the model takes with them, such as ``pixel_values=``.

    Returns:
        The shape of the activation.

    Raises:
        ValueError: no step; training mode; a baseline of another shape; a metric that gives several numbers, or one
            without a gradient.
        RuntimeError: in inference mode, which makes no gradients.

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
    refuse_inference_mode("feature_attribution")
    check_positive("steps", steps)
    refuse_training(bridge)
    (hook,) = bridge.select_hooks(point)
    prompts = prompts_with(bridge, tokens, {"attention_mask": attention_mask, **model_kwargs})
    with torch.no_grad():
        _, cache = bridge.run_with_cache(prompts, names_filter=hook)
    act = dense(cache[hook.name])
    start = torch.zeros_like(act) if baseline is None else baseline.to(act)
    if start.shape not in (act.shape, act.shape[1:]):
        raise ValueError(f"the baseline has shape {list(start.shape)}; {hook.name} has {list(act.shape)}")
    shares = [1.0] if steps == 1 else [(step + 0.5) / steps for step in range(steps)]
    total = torch.zeros_like(act)
    for share in shares:
        leaf = (start + share * (act - start)).requires_grad_()
        with torch.enable_grad():
            logits = bridge.run_with_hooks(prompts, fwd_hooks=[(hook, lambda act, hook, leaf=leaf: leaf)])
            (gradient,) = gradients_of("metric", one_number(metric, logits), [leaf])
        total += gradient
    return total / steps * (act - start)


#: Where what features write is a term of the residual stream, or becomes one by the weights of a part's last matrix.
_TERMS = re.compile(r"hook_(pos_)?embed|blocks\.\d+\.(hook_(resid_(pre|mid|post)|\w+_out)|attn\.hook_z|mlp\.hook_post)")


@refuse_wrong_types
def feature_logit_attrs(
    cache: ActivationCache,
    point: str | HookPoint,
    tokens: Tokens,
    incorrect_tokens: Tokens | None = None,
    *,
    pos_slice: Index = None,
) -> Float[Tensor, "*component_batch_pos"]:
    """What each feature adds directly to the logit of a token: past no other layer.

    `ActivationCache.logit_attrs` of what the features write: with the norms, factors and biases that it counts. What
    features of `attn.hook_z` or `mlp.hook_post` write goes through the layer's last matrix, and the norm behind it.

    Args:
        cache: of a run; it holds the point, the final norm's `hook_scale` and that of each norm that what is written
            goes through before (the one behind attention or MLP in Gemma 2; those on the stream itself).
        point: the hook point in the basis, whose `decode` is linear: on the stream, on what is added to it, on
            `attn.hook_z`, or on `mlp.hook_post`. Of a cross-layer transcoder, what it writes later is that of
            the points there.
        tokens, incorrect_tokens: as for `logit_attrs`.
        pos_slice: which positions.

    Returns:
        ``[feature, batch, pos]``; of features of each head ``[head, feature, batch, pos]``.

    Raises:
        ValueError: the point is in no basis, or in one of something else inside a part; its `decode` is not linear.
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
    hook = cache.model.hook_dict[name]
    if not isinstance(hook.view, InBasis):
        raise ValueError(f"{name} is the model's own hook point, and no basis")  # noqa: TRY004 - a name is wrong
    base = name.rpartition(".")[0]
    if not _TERMS.fullmatch(base):
        raise ValueError(
            f"what features of {base} write goes through the rest of its part first: place a basis on the stream, on "
            "what is added to it, on attn.hook_z or on mlp.hook_post"
        )
    features = dense(cache[name])
    of_heads = "n_heads" in hook.point.axes.split()
    with torch.no_grad():
        rows = _written(hook, features, of_heads)  # and behind the last matrix of their part
        if base.endswith(".hook_z"):
            results = written_by_heads(cache, hook.point.depth, rows)
            rows = results if of_heads else results.sum(-2)
        elif base.endswith(".hook_post"):
            rows = rows @ rows_of_neurons(cache, hook.point.depth, rows)
    features = pick(features, pos_slice, -3 if of_heads else -2).movedim(-1, 0)
    if of_heads:
        features, rows = features.movedim(-1, 0).flatten(0, 1), rows.transpose(0, 1).flatten(0, 1)
    stack = features.unsqueeze(-1) * rows.view(len(rows), *[1] * (features.ndim - 1), -1)
    found = cache.logit_attrs(at_the_end(cache, stack, base, pos_slice), tokens, incorrect_tokens, pos_slice=pos_slice)
    return found.unflatten(0, (cache[name].shape[-2], -1)) if of_heads else found


def _written(hook: HookPoint, features: Tensor, of_heads: bool) -> Tensor:
    """What each feature writes at the point that its basis stands on, ``[feature, *axes of a position]``.

    Raises:
        ValueError: that depends on what the features are.
    """
    view = hook.view
    assert isinstance(view, InBasis)
    n, heads = features.shape[-1], features.shape[-2:-1] if of_heads else ()
    one = torch.eye(n, dtype=features.dtype, device=features.device).view(1, n, *[1] * len(heads), n)
    zero = view.basis.decode(features.new_zeros(1, 1, *heads, n))
    written = (view.basis.decode(one.expand(1, n, *heads, n)) - zero)[0]
    summed = torch.einsum("...hn,nhd->...hd", features, written) if of_heads else torch.tensordot(features, written, 1)
    if (zero[0] + summed - view.basis.decode(features)).abs().max() > 1e-3 * (1 + features.abs().max()):
        raise ValueError(f"the decode of {hook.name} is not linear in the features: it is no sum of what each writes")
    return written


# ----------------------------------------------------------------------------------------------------------------------
# How faithful a circuit of features is.
# ----------------------------------------------------------------------------------------------------------------------


@refuse_wrong_types
def evaluate_features(
    bridge: TransformerBridge,
    clean: Prompts,
    metric: Metric,
    kept: Mapping[str, Bool[Tensor, "..."]],
    *,
    ablation: str = "zero",
    corrupted: Prompts | None = None,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    **model_kwargs: Any,
) -> Evaluation:
    """What the model does with some features alone, and without them (Marks et al. 2024, "Sparse Feature Circuits").

    What no basis explains stays as each run has it; `Evaluation.ablated` says how much of the metric that is.

    Args:
        bridge: the bridge.
        clean: the prompts, ``[batch, pos]``, or what a processor gives.
        metric: from logits ``[batch, pos, d_vocab]`` to one number.
        kept: of each hook point, which of its features belong to the circuit: ``[*features]``, at every position, or
            ``[pos, *features]``.
        ablation: what replaces the others: ``"zero"``; ``"mean"``, the mean of `corrupted` at each position;
            ``"resample"``, what `corrupted` has there, row by row.
        corrupted: other prompts, of as many positions, likewise.
        attention_mask: of `clean`, 1 for tokens and 0 for padding.
        model_kwargs: what else the model takes with `clean`, such as ``pixel_values=``.

    Returns:
        The metric of the model, without any of these features, of the circuit, of all others; and the faithfulness.

    Raises:
        UnknownHookError: a name that no hook point has.
        ValueError: no point; an unknown ablation, or prompts that do not fit it; a mask of another shape.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.bases import Rotation
        >>> from bridge.features import evaluate_features
        >>> bridge = TransformerBridge.boot_embedded()
        >>> point = bridge.add_basis("blocks.3.hook_resid_post", "turned", Rotation(128))
        >>> tokens = bridge.to_tokens("When Mary and John went to the store, John gave a drink to")
        >>> mary = lambda logits: logits[0, -1, bridge.to_single_token(" Mary")]
        >>> whole = evaluate_features(bridge, tokens, mary, {point.name: torch.ones(128, dtype=torch.bool)})
        >>> round(whole.faithfulness, 3), round(whole.complement_faithfulness, 3)
        (1.0, 0.0)
    """
    if not kept:
        raise ValueError("no hook point is named: there are no features to keep")
    check_choice("ablation", ablation, ABLATIONS)
    prompts = prompts_with(bridge, clean, {"attention_mask": attention_mask, **model_kwargs})
    count, length = prompts["input_ids"].shape
    other = None if corrupted is None else prompts_with(bridge, corrupted, {})
    rows, width = (None, length) if other is None else other["input_ids"].shape
    if (rows is None) != (ablation == "zero") or (ablation == "resample" and rows not in (1, count)):
        raise ValueError(f'{rows or "no"} corrupted prompts do not fit {count} clean ones and ablation="{ablation}"')
    if width != length:
        raise ValueError(f"clean prompts have {length} positions and corrupted ones {width}")
    hooks = {bridge.select_hooks(name)[0]: mask.to(bridge.cfg.device) for name, mask in kept.items()}
    with torch.no_grad():
        others = _others(bridge, list(hooks), ablation, other)
        sizes: list[tuple[int, int]] = []

        def run(which: Callable[[Tensor], Tensor]) -> float:
            edits = [(hook, _keep(which(mask), others.get(hook.name), sizes)) for hook, mask in hooks.items()]
            return float(metric(bridge.run_with_hooks(prompts, fwd_hooks=edits)))

        circuit = run(lambda mask: mask)
        share = sum(size for size, _ in sizes) / sum(size for _, size in sizes)
        without = run(torch.logical_not)
        ablated = run(torch.zeros_like)
        return Evaluation(float(metric(bridge(prompts))), ablated, circuit, without, share)


def _others(
    bridge: TransformerBridge, hooks: list[HookPoint], ablation: str, other: dict[str, Any] | None
) -> dict[str, Tensor]:
    """What replaces features; nothing for zeros."""
    if other is None:
        return {}
    _, cache = bridge.run_with_cache(other, names_filter=[hook.name for hook in hooks])
    found = {hook.name: dense(cache[hook.name]) for hook in hooks}
    return {name: act.mean(0, keepdim=True) for name, act in found.items()} if ablation == "mean" else found


def _keep(mask: Tensor, other: Tensor | None, sizes: list[tuple[int, int]]) -> Callable[..., Tensor]:
    """A hook that keeps some features.

    Args:
        mask: which.
        other: what replaces the others; None: zeros.
        sizes: of the mask and of what it chooses from are added here.
    """

    def keep(features: Tensor, hook: HookPoint) -> Tensor:
        if mask.shape not in (features.shape[1:], features.shape[2:]):
            raise ValueError(
                f"the mask of {hook.name} has shape {list(mask.shape)}; its features have "
                f"{list(features.shape[2:])}, and with positions {list(features.shape[1:])}"
            )
        chosen = mask.expand(features.shape[1:])
        sizes.append((int(chosen.sum()), chosen.numel()))
        return torch.where(chosen, features, torch.zeros_like(features) if other is None else other.to(features))

    return keep
