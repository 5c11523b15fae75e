"""A probability for each edge, trained."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.circuits.circuits import EdgeScores
from bridge.circuits.edge_runs import ablated, graph_of, run_with_edges_replaced
from bridge.circuits.graph import (
    Graph,
    Metric,
    check_rate,
    divergence_at_last_tokens,
    gradients_of,
    one_number,
    pairs_of,
    refuse_inference_mode,
)
from bridge.hooks.arguments import check_positive, refuse_wrong_types
from bridge.run.inputs import Prompts


@refuse_wrong_types
def trained_edges(
    bridge: TransformerBridge,
    clean: Prompts,
    corrupted: Prompts,
    loss: Metric | None = None,
    *,
    penalty: float = 1e-3,
    steps: int = 200,
    rate: float = 0.1,
    samples: int = 1,
    ablation: str | Float[Tensor, "constant d_model"] = "resample",
    reference: Prompts | None = None,
    seed: int = 0,
    graph: Graph | None = None,
    **model_kwargs: Any,
) -> EdgeScores:
    """A probability for each edge that the circuit has it, trained by uniform gradient sampling.

    Each prompt runs with a circuit of its own, in which an edge with probability p is there, or not, or, with
    probability ``p (1 - p)``, partly there, by a share drawn evenly between 0 and 1. The loss's derivative by that
    share is, on average, what having the edge changes; it moves the edge's logit (Li and Janson 2024, "Optimal Ablation
    for Interpretability"). As in their code, that average is over the circuits that have the edge partly. The loss
    grows by `penalty` for each edge.

    Args:
        bridge: the bridge, in evaluation mode.
        clean, corrupted: pairs of prompts, ``[batch, pos]``, or what a processor gives.
        loss: from logits ``[batch, pos, d_vocab]`` to one number that is to be small; None: the divergence from the
            whole model's next tokens at each prompt's last token.
        penalty: what an edge costs, in the loss's units.
        steps, rate: of training, by Adam.
        samples: how many circuits each prompt runs with in a step, all in one batch.
        ablation, reference: what other edges carry, as for `Circuit.evaluate`.
        seed: of what is drawn.
        graph: the model's graph, as `Graph.of` makes it, grouped or not; None: grouped.
        model_kwargs: what else the model takes with both prompts of a pair.

    Returns:
        The probabilities: unlike other scores they are never negative.

    Raises:
        ValueError: as `Circuit.evaluate`; no step or sample, a rate that is not positive and finite, a penalty
            below 0 or not finite, a loss that is not finite or has no gradient.
        RuntimeError: in inference mode, which makes no gradients.

    Example:
        >>> from bridge.circuits import trained_edges
        >>> from bridge.tasks import compiled
        >>> task = compiled("either")
        >>> def loss(logits):
        ...     return (logits - task.bridge(task.clean)).square().mean()
        >>> scores = trained_edges(task.bridge, task.clean, task.corrupted, loss, penalty=0.01, steps=20)
        >>> 0 <= float(scores.values.min()) <= float(scores.values.max()) <= 1
        True
    """
    for name, number in (("steps", steps), ("samples", samples)):
        check_positive(name, number)
    check_rate(rate)
    if not 0 <= penalty < math.inf:
        raise ValueError(f"penalty is {penalty}; it must be 0 or more, and finite")
    refuse_inference_mode("trained_edges")
    graph, (one, two) = graph_of(bridge, graph), pairs_of(bridge, clean, corrupted, model_kwargs)
    wrote, other = ablated(graph, bridge, one, two, ablation, reference)
    loss = loss or divergence_at_last_tokens(wrote.logits, one)
    numbers = torch.Generator().manual_seed(seed)
    given = torch.ones(graph.n_edges, requires_grad=True)
    optimizer, rows = torch.optim.Adam([given], lr=rate), len(one["input_ids"])
    with torch.enable_grad():
        for _ in range(steps):
            probability = given.sigmoid()
            drawn = torch.rand(samples, rows, graph.n_edges, generator=numbers)
            replaced = torch.zeros(samples, rows, *graph.exists.shape)
            replaced[:, :, graph.exists] = _absent(drawn, probability)
            logits = run_with_edges_replaced(graph, bridge, one, other, replaced.to(other))
            found = torch.stack([one_number(loss, some) for some in logits]).mean()
            _refuse_not_finite(found)
            (slope,) = gradients_of("loss", found, [given])
            given.grad = slope + penalty * (probability * (1 - probability)).detach()
            optimizer.step()
    values = torch.zeros(graph.exists.shape)
    values[graph.exists] = given.detach().sigmoid()
    return EdgeScores(graph, values)


def _absent(drawn: Float[Tensor, "... edge"], probability: Float[Tensor, " edge"]) -> Float[Tensor, "... edge"]:
    """How far edges are absent, by numbers drawn evenly between 0 and 1: none, all, or in a window partly.

    Of these last the gradient is 1 on average, over those that are no thousandth from an end.
    """
    window = (probability * (1 - probability)).detach().clamp(min=torch.finfo(drawn.dtype).tiny)
    place = (drawn - probability.detach()) / window + 0.5
    partly, counted = ((place - 0.5).abs() <= within for within in (0.5, 0.499))
    share = counted.to(drawn).flatten(0, -2).mean(0)
    weights = partly / share.where(share > 0, torch.inf)
    return place.clamp(0, 1) - weights * (probability - probability.detach())


def _refuse_not_finite(loss: Tensor) -> None:
    if not loss.isfinite():
        raise ValueError(f"loss is {loss.item()}: it must be a finite number that can be small")
