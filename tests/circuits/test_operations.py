"""Circuits of a model with interventions that are data: the same as with the functions that do it
by hand.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from bridge import TransformerBridge
from bridge.circuits import Circuit, Graph, Metric, edge_attribution, edge_effects
from bridge.interventions import Add, Interventions, Scale, Zero

VECTOR = torch.linspace(-1, 1, 32, dtype=torch.float64)


def by_hand(gpt2: TransformerBridge) -> AbstractContextManager[object]:
    def add(act: Tensor, hook: object) -> Tensor:
        act[:, -2] += 2 * VECTOR
        return act

    def scale(act: Tensor, hook: object) -> Tensor:
        act[:, :, 1] *= 0.5
        return act

    hooks = [
        ("blocks.0.hook_resid_pre", add),
        ("blocks.1.attn.hook_z", scale),
        ("blocks.1.hook_mlp_out", zero),
    ]
    return gpt2.hooks(fwd_hooks=hooks)


def zero(act: Tensor, hook: object) -> Tensor:
    return torch.zeros_like(act)


def as_data(gpt2: TransformerBridge) -> AbstractContextManager[object]:
    made = Interventions(
        [
            ("blocks.0.hook_resid_pre", Add(2 * VECTOR, positions=-2)),
            ("blocks.1.attn.hook_z", Scale(0.5, heads=1)),
            ("blocks.1.hook_mlp_out", Zero()),
        ],
        gpt2,
    )
    return gpt2.hooks(fwd_hooks=made)


def results(
    place: Callable[[TransformerBridge], AbstractContextManager[object]],
    gpt2: TransformerBridge,
    graph: Graph,
    clean: Tensor,
    corrupted: Tensor,
    metric: Metric,
) -> list[Tensor]:
    with place(gpt2):
        given = gpt2, clean, corrupted, metric
        exact, gradient = (
            edge_effects(*given, verbose=False),
            edge_attribution(*given, "inputs", steps=3),
        )
        circuit = Circuit.of_edges(graph, [f"{graph.senders[0]}->{graph.receivers[-1]}"])
        found = circuit.evaluate(*given)
    return [
        exact.values,
        gradient.values,
        torch.tensor([found.model, found.ablated, found.circuit]),
    ]


def test_circuits_see_operations_as_they_see_functions(
    gpt2: TransformerBridge, graph: Graph, clean: Tensor, corrupted: Tensor, metric: Metric
) -> None:
    given = gpt2, graph, clean, corrupted, metric
    made, right = results(as_data, *given), results(by_hand, *given)
    plain = results(lambda bridge: bridge.hooks(), *given)
    for found, expected, without in zip(made, right, plain, strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-6)
        assert not torch.allclose(found, without, atol=1e-4)
