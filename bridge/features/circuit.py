"""How faithful a circuit of features is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from adapters.views.basis import dense
from bridge.bridge import TransformerBridge
from bridge.circuits.evaluation import ABLATIONS, Evaluation
from bridge.circuits.metrics import Metric
from bridge.hooks.arguments import check_choice, refuse_wrong_types
from bridge.hooks.hook_point import HookPoint


@refuse_wrong_types
def evaluate_features(
    bridge: TransformerBridge,
    clean: Int[Tensor, "batch pos"],
    metric: Metric,
    kept: Mapping[str, Bool[Tensor, "..."]],
    *,
    ablation: str = "zero",
    corrupted: Int[Tensor, "rows pos"] | None = None,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
) -> Evaluation:
    """What the model does with some features alone, and without them (Marks et al. 2024, "Sparse Feature Circuits").

    What no basis explains stays as each run has it; `Evaluation.ablated` says how much of the metric that is.

    Args:
        bridge: the bridge.
        clean: the prompts.
        metric: from logits ``[batch, pos, d_vocab]`` to one number.
        kept: of each hook point, which of its features belong to the circuit: ``[*features]``, at every position, or
            ``[pos, *features]``.
        ablation: what replaces the others: ``"zero"``; ``"mean"``, the mean of `corrupted` at each position;
            ``"resample"``, what `corrupted` has there, row by row.
        corrupted: other prompts, of as many positions.
        attention_mask: of `clean`, 1 for tokens and 0 for padding.

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
    rows = None if corrupted is None else len(corrupted)
    if (rows is None) != (ablation == "zero") or (ablation == "resample" and rows not in (1, len(clean))):
        raise ValueError(
            f'{rows or "no"} corrupted prompts do not fit {len(clean)} clean ones and ablation="{ablation}"'
        )
    if corrupted is not None and corrupted.shape[1] != clean.shape[1]:
        raise ValueError(f"clean prompts have {clean.shape[1]} positions and corrupted ones {corrupted.shape[1]}")
    hooks = {bridge.select_hooks(name)[0]: mask.to(bridge.cfg.device) for name, mask in kept.items()}
    with torch.no_grad():
        others = _others(bridge, list(hooks), ablation, corrupted)
        sizes: list[tuple[int, int]] = []

        def run(which: Callable[[Tensor], Tensor]) -> float:
            given = [(hook, _keep(which(mask), others.get(hook.name), sizes)) for hook, mask in hooks.items()]
            return float(metric(bridge.run_with_hooks(clean, fwd_hooks=given, attention_mask=attention_mask)))

        circuit = run(lambda mask: mask)
        share = sum(size for size, _ in sizes) / sum(size for _, size in sizes)
        without = run(torch.logical_not)
        ablated = run(torch.zeros_like)
        return Evaluation(float(metric(bridge(clean, attention_mask=attention_mask))), ablated, circuit, without, share)


def _others(
    bridge: TransformerBridge, hooks: list[HookPoint], ablation: str, corrupted: Tensor | None
) -> dict[str, Tensor]:
    """What replaces features; nothing for zeros."""
    if corrupted is None:
        return {}
    _, cache = bridge.run_with_cache(corrupted, names_filter=[hook.name for hook in hooks])
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
