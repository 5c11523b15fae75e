"""Features of a basis (an SAE, a transcoder, directions, a rotation), and their effect on a metric.

`TransformerBridge.add_basis` places a basis; its features are then a hook point like any other.
The analyses of such points, in order of their assumptions:

1. `feature_attribution`: gradients of a metric at any point, along the line from a baseline. It
   assumes nothing.
   `token_attribution` is the case of input tokens.
2. `feature_logit_attrs`: each feature's direct contribution to a logit. The basis's `decode` must
   be linear, which is checked.
3. `evaluate_features`: the model with some features alone, and without them.
4. `attribution_graph` (`bridge.features.graph`): the edges between features, with patterns and norm
   factors frozen. Everything between the features must then be linear, which is checked.
5. `interchange` and `fit_rotation` (`bridge.features.interchange`): one prompt's coordinates in
   another prompt, and the search for coordinates that carry a variable, with controls that must
   fail.
6. `direction` and `write_into_weights` (`bridge.features.directions`): the direction that separates
   two sets of prompts.

It raises an error for a point without a basis where one is needed, for a basis inside a component
whose later computation is not linear, and in training mode. It must not depend on the kind of
basis, only on `encode` and `decode`.
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
from bridge.arguments import check_positive, refuse_wrong_types
from bridge.bridge import TransformerBridge
from bridge.cache import ActivationCache
from bridge.circuits.edge_runs import Evaluation, check_mean
from bridge.circuits.graph import (
    Metric,
    gradients_of,
    one_number,
    refuse_inference_mode,
    token_mask,
)
from bridge.hooks.hooks import HookPoint
from bridge.patching.ablations import Noise, kind_of, mean_of_tokens, noise_of
from bridge.rows import check_position
from bridge.run.inputs import Prompts, prompts_with
from bridge.run.rules import Rules


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
    rules: str | Rules | None = None,
    **model_kwargs: Any,
) -> Float[Tensor, "batch pos *features"]:
    """Compute how much each feature, or each entry of any activation, adds to a metric.

    With one step this is the gradient in the unchanged run, times the difference from the baseline
    (attribution patching, Nanda 2023; for features Marks et al. 2024, "Sparse Feature Circuits").
    With more steps it is the mean gradient along the straight line from the baseline (integrated
    gradients, Sundararajan et al. 2017); the attributions then sum to the change of the metric.

    Args:
        bridge: the bridge, in evaluation mode.
        tokens: ``[batch, pos]``, or a processor's output.
        metric: a function from logits ``[batch, pos, d_vocab]`` to one number.
        point: the hook point, such as one in a basis.
        baseline: the reference values of the features, of their shape, or one row; None: zeros.
        steps: the number of runs in the mean, at the midpoints of equal parts of the line.
        attention_mask: 1 for tokens and 0 for padding.
        rules: the rules of the gradients, as for `TransformerBridge.rules`; None: plain gradients.
        model_kwargs: further model inputs, such as ``pixel_values=``.

    Returns:
        The shape of the activation.

    Raises:
        ValueError: no step; training mode; a baseline of another shape; a metric with several
            numbers, or one without a gradient.
        RuntimeError: the call is in inference mode, which has no gradients.

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
    check_position(metric, prompts.get("attention_mask"))
    with bridge.rules(rules):
        with torch.no_grad():
            _, cache = bridge.run_with_cache(prompts, names_filter=hook)
        act = dense(cache[hook.name])
        start = torch.zeros_like(act) if baseline is None else baseline.to(act)
        if start.shape not in (act.shape, act.shape[1:]):
            raise ValueError(
                f"the baseline has shape {list(start.shape)}; {hook.name} has {list(act.shape)}"
            )
        shares = [1.0] if steps == 1 else [(step + 0.5) / steps for step in range(steps)]
        total = torch.zeros_like(act)
        for share in shares:
            leaf = (start + share * (act - start)).requires_grad_()
            put = lambda act, hook, leaf=leaf: leaf
            with torch.enable_grad():
                logits = bridge.run_with_hooks(prompts, fwd_hooks=[(hook, put)])
                (gradient,) = gradients_of("metric", one_number(metric, logits), [leaf])
            total += gradient
    return total / steps * (act - start)


@refuse_wrong_types
def token_attribution(
    bridge: TransformerBridge,
    tokens: Prompts,
    metric: Metric,
    rules: str | Rules | None = None,
    baseline: int | Int[Tensor, "batch pos"] | None = None,
    **model_kwargs: Any,
) -> Float[Tensor, "batch pos"]:
    """Compute how much each input token adds to a metric: the gradient at its embedding, times the
    embedding, or its difference from another token's.

    Args:
        bridge: the bridge, in evaluation mode.
        tokens: ``[batch, pos]``, or a processor's output.
        metric: a function from logits ``[batch, pos, d_vocab]`` to one number.
        rules: the rules of the gradients, as for `TransformerBridge.rules`; None: plain gradients.
        baseline: the token, or the tokens, whose embeddings are the reference; None: zeros.
        model_kwargs: further model inputs, such as ``attention_mask=``.

    Returns:
        ``[batch, pos]``; 0 at padding.

    Raises:
        ValueError: as `feature_attribution`; the model lacks a hook point that a rule needs.
        RuntimeError: the call is in inference mode, which has no gradients.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.features import token_attribution
        >>> bridge = TransformerBridge.boot_embedded()
        >>> tokens = bridge.to_tokens("When Mary and John went to the store, John gave a drink to")
        >>> mary = bridge.to_single_token(" Mary")
        >>> by_token = token_attribution(bridge, tokens, lambda x: x[0, -1, mary], rules="gim")
        >>> bridge.to_single_str_token(int(tokens[0, by_token[0].argmax()]))
        ' Mary'
    """
    refuse_inference_mode("token_attribution")
    prompts = prompts_with(bridge, tokens, model_kwargs)
    with bridge.rules(rules):
        start = None
        if baseline is not None:
            ids = prompts["input_ids"]
            other = torch.full_like(ids, baseline) if isinstance(baseline, int) else baseline
            others = {**prompts, "input_ids": other}
            with torch.no_grad():
                _, cache = bridge.run_with_cache(others, names_filter="hook_embed")
            start = cache["hook_embed"]
        terms = feature_attribution(bridge, prompts, metric, "hook_embed", baseline=start)
    return terms.sum(-1)


#: Hook points whose activations are terms of the residual stream, or become terms after a
#: component's output projection.
_TERMS = re.compile(
    r"hook_(pos_)?embed|blocks\.\d+\.(hook_(resid_(pre|mid|post)|\w+_out)|attn\.hook_z|mlp\.hook_post)"
)


@refuse_wrong_types
def feature_logit_attrs(
    cache: ActivationCache,
    point: str | HookPoint,
    tokens: Tokens,
    incorrect_tokens: Tokens | None = None,
    *,
    pos_slice: Index = None,
) -> Float[Tensor, "*component_batch_pos"]:
    """Return each feature's direct contribution to the logit of a token, without later layers.

    This is `ActivationCache.logit_attrs` of the features' outputs, with the norms, factors and
    biases that it counts. The outputs of features of `attn.hook_z` or `mlp.hook_post` pass through
    the layer's output projection, and the norm after it.

    Args:
        cache: the cache of a run. It contains the point, the final norm's `hook_scale`, and that of
            each norm that the outputs pass first (the norm after attention or MLP in Gemma 2; norms
            on the stream itself).
        point: the hook point in the basis, whose `decode` is linear: on the stream, on an output
            added to it, on `attn.hook_z`, or on `mlp.hook_post`. The later outputs of a cross-layer
            transcoder belong to the points of those layers.
        tokens, incorrect_tokens: as for `logit_attrs`.
        pos_slice: the positions.

    Returns:
        ``[feature, batch, pos]``; if each head has features ``[head, feature, batch, pos]``.

    Raises:
        ValueError: the point is in no basis, or in a basis of an unsupported point inside a
            component; its `decode` is not linear; or the basis was changed since the run.
        MissingActivationsError, KeyError: the cache lacks a required activation.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.bases import Rotation
        >>> from bridge.features import feature_logit_attrs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> point = bridge.add_basis("blocks.3.hook_resid_post", "turned", Rotation(128))
        >>> logits, cache = bridge.run_with_cache(
        ...     "Mary and", names_filter=[point.name, "ln_final.hook_scale"]
        ... )
        >>> parts = feature_logit_attrs(cache, point.name, " John", " Mary")
        >>> right = (
        ...     logits[..., bridge.to_single_token(" John")]
        ...     - logits[..., bridge.to_single_token(" Mary")]
        ... )
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
            f"what features of {base} write goes through the rest of its part first: place a basis"
            " on the stream, on what is added to it, on attn.hook_z or on mlp.hook_post"
        )
    cache.check_basis(name)
    features = dense(cache[name])
    of_heads = "n_heads" in hook.point.axes.split()
    with torch.no_grad():
        # Outputs also pass through the output projection of their component.
        rows = _outputs(hook, features, of_heads)
        if base.endswith(".hook_z"):
            results = written_by_heads(cache, hook.point.depth, rows)
            rows = results if of_heads else results.sum(-2)
        elif base.endswith(".hook_post"):
            rows = rows @ rows_of_neurons(cache, hook.point.depth, rows)
    heads = features.shape[-2]
    features = pick(features, pos_slice, -3 if of_heads else -2).movedim(-1, 0)
    if of_heads:
        features = features.movedim(-1, 0).flatten(0, 1)
        rows = rows.transpose(0, 1).flatten(0, 1)
    rows = rows.view(len(rows), *[1] * (features.ndim - 1), -1)
    stack = at_the_end(cache, features.unsqueeze(-1) * rows, base, pos_slice)
    attrs = cache.logit_attrs(stack, tokens, incorrect_tokens, pos_slice=pos_slice)
    return attrs.unflatten(0, (heads, -1)) if of_heads else attrs


def _outputs(hook: HookPoint, features: Tensor, of_heads: bool) -> Tensor:
    """Return each feature's output at the point of its basis, ``[feature, *axes of a position]``.

    Raises:
        ValueError: the outputs depend on the values of the features.
    """
    view = hook.view
    assert isinstance(view, InBasis)
    decode, n = view.basis.decode, features.shape[-1]
    heads = features.shape[-2:-1] if of_heads else ()
    one = torch.eye(n, dtype=features.dtype, device=features.device)
    one = one.view(1, n, *[1] * len(heads), n).expand(1, n, *heads, n)
    zero = decode(features.new_zeros(1, 1, *heads, n))
    outputs = (decode(one) - zero)[0]
    if of_heads:
        total = torch.einsum("...hn,nhd->...hd", features, outputs)
    else:
        total = torch.tensordot(features, outputs, 1)
    error = (zero[0] + total - decode(features)).abs().max()
    if error > 1e-3 * (1 + features.abs().max()):
        raise ValueError(
            f"the decode of {hook.name} is not linear: it is not a sum over the features"
        )
    return outputs


# --------------------------------------------------------------------------------------------------
# The faithfulness of a circuit of features.
# --------------------------------------------------------------------------------------------------


@refuse_wrong_types
def evaluate_features(
    bridge: TransformerBridge,
    clean: Prompts,
    metric: Metric,
    kept: Mapping[str, Bool[Tensor, "..."]],
    *,
    ablation: str | Noise = "zero",
    corrupted: Prompts | None = None,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    **model_kwargs: Any,
) -> Evaluation:
    """Measure the model with only some features, and without them (Marks et al. 2024, "Sparse
    Feature Circuits").

    The error that no basis explains keeps its value in each run; `Evaluation.ablated` says how much
    of the metric it carries.

    Args:
        bridge: the bridge.
        clean: the prompts, ``[batch, pos]``, or a processor's output.
        metric: a function from logits ``[batch, pos, d_vocab]`` to one number.
        kept: for each hook point, a mask of the features in the circuit: ``[*features]``, at every
            position, or ``[pos, *features]``.
        ablation: the replacement of all other features: ``"zero"``; ``"mean"``, the mean of
            `corrupted` at each position; ``"resample"``, the values of `corrupted`, row by row;
            ``"noise"``, or `bridge.patching.Noise`, the values of `clean` plus Gaussian noise.
        corrupted: for ``"mean"`` and ``"resample"``: other prompts with the same number of
            positions.
        attention_mask: the mask of `clean`, 1 for tokens and 0 for padding.
        model_kwargs: further model inputs for `clean`, such as ``pixel_values=``.

    Returns:
        The metric of the model, without any of these features, of the circuit and of its
        complement; and the faithfulness.

    Raises:
        UnknownHookError: there is no hook point of this name.
        ValueError: no point; an unknown ablation, or prompts that do not fit it; a mask of another
            shape.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.bases import Rotation
        >>> from bridge.features import evaluate_features
        >>> bridge = TransformerBridge.boot_embedded()
        >>> point = bridge.add_basis("blocks.3.hook_resid_post", "turned", Rotation(128))
        >>> tokens = bridge.to_tokens("When Mary and John went to the store, John gave a drink to")
        >>> mary = lambda logits: logits[0, -1, bridge.to_single_token(" Mary")]
        >>> whole = evaluate_features(
        ...     bridge, tokens, mary, {point.name: torch.ones(128, dtype=torch.bool)}
        ... )
        >>> round(whole.faithfulness, 3), round(whole.complement_faithfulness, 3)
        (1.0, 0.0)
    """
    if not kept:
        raise ValueError("no hook point is named: there are no features to keep")
    kind = kind_of(ablation)
    prompts = prompts_with(bridge, clean, {"attention_mask": attention_mask, **model_kwargs})
    check_position(metric, prompts.get("attention_mask"))
    source = prompts if corrupted is None else prompts_with(bridge, corrupted, {})
    _check_corrupted(kind, prompts, None if corrupted is None else source)
    hooks = {bridge.select_hooks(name)[0]: mask for name, mask in kept.items()}
    masks = {hook: mask.to(bridge.cfg.device) for hook, mask in hooks.items()}
    with torch.no_grad():
        others = _replacements(bridge, list(masks), ablation, source)
        sizes: list[tuple[int, int]] = []

        def run(change: Callable[[Tensor], Tensor]) -> float:
            edits = [
                (hook, _keep(change(mask), others.get(hook.name), sizes))
                for hook, mask in masks.items()
            ]
            return float(metric(bridge.run_with_hooks(prompts, fwd_hooks=edits)))

        circuit = run(lambda mask: mask)
        share = sum(size for size, _ in sizes) / sum(size for _, size in sizes)
        without = run(torch.logical_not)
        ablated = run(torch.zeros_like)
        return Evaluation(float(metric(bridge(prompts))), ablated, circuit, without, share)


def _check_corrupted(kind: str, clean: dict[str, Any], corrupted: dict[str, Any] | None) -> None:
    """Raise an error for corrupted prompts that do not fit the ablation.

    Raises:
        ValueError: too many, too few, or of another length; padding where clean ones have tokens.
    """
    count, length = clean["input_ids"].shape
    rows, width = (None, length) if corrupted is None else corrupted["input_ids"].shape
    needed = kind in ("mean", "resample")
    if (rows is not None) != needed or (kind == "resample" and rows not in (1, count)):
        raise ValueError(
            f'{rows or "no"} corrupted prompts do not fit {count} clean ones and ablation="{kind}"'
        )
    if width != length:
        raise ValueError(f"clean prompts have {length} positions and corrupted ones {width}")
    if corrupted is None:
        return
    if kind == "mean":
        check_mean(clean, corrupted)
    elif bool((token_mask(clean) & ~token_mask(corrupted)).any()):
        raise ValueError(
            "corrupted prompts have padding where clean ones have tokens: pairs need as many"
            " tokens, in the same places"
        )


def _replacements(
    bridge: TransformerBridge,
    hooks: list[HookPoint],
    ablation: str | Noise,
    prompts: dict[str, Any],
) -> dict[str, Tensor]:
    """Return the replacement of features, from a run of these prompts; an empty mapping for
    zeros.
    """
    kind = kind_of(ablation)
    if kind == "zero":
        return {}
    _, cache = bridge.run_with_cache(prompts, names_filter=[hook.name for hook in hooks])
    features = {hook.name: dense(cache[hook.name]) for hook in hooks}
    if kind == "mean":
        mask = prompts.get("attention_mask")
        return {name: mean_of_tokens(act, mask) for name, act in features.items()}
    if kind == "noise":
        noise = noise_of(ablation)
        return {name: noise.added_to(act, name) for name, act in features.items()}
    return features


def _keep(
    mask: Tensor, other: Tensor | None, sizes: list[tuple[int, int]]
) -> Callable[..., Tensor]:
    """Return a hook that keeps some features.

    Args:
        mask: the kept features.
        other: the replacement of all others; None: zeros.
        sizes: receives the sizes of the mask and of its activation.
    """

    def keep(features: Tensor, hook: HookPoint) -> Tensor:
        if mask.shape not in (features.shape[1:], features.shape[2:]):
            raise ValueError(
                f"the mask of {hook.name} has shape {list(mask.shape)}; its features have "
                f"{list(features.shape[2:])}, and with positions {list(features.shape[1:])}"
            )
        chosen = mask.expand(features.shape[1:])
        sizes.append((int(chosen.sum()), chosen.numel()))
        ablated = torch.zeros_like(features) if other is None else other.to(features)
        return torch.where(chosen, features, ablated)

    return keep
