"""Edge attribution against gradients of a model computed head by head, and against small exact
changes.
"""

import pytest
import torch
from jaxtyping import TypeCheckError

from bridge import TransformerBridge
from bridge.circuits import (
    Circuit,
    EdgeScores,
    Graph,
    edge_attribution,
    edge_effects,
    faithfulness_curve,
    information_flow,
    kl_divergence,
    logit_difference,
    mean_outputs,
    mean_scores,
    node_attribution,
    node_effects,
    path_patching,
    trained_edges,
)
from bridge.circuits.edge_runs import run_with_edges_replaced
from bridge.circuits.graph import written
from tests.analysis.models import bridge_of
from tests.circuits.test_edges import FAMILIES
from tests.conftest import tiny, torch_hooks


def gradients(hand, graph, tokens, metric, **options):
    """The gradient of the metric at every receiver's input."""
    d_model = hand.model.config.n_embd
    bumps = {
        name: torch.zeros(*tokens.shape, d_model, dtype=torch.float64, requires_grad=True)
        for name in graph.receivers
    }
    loss = metric(hand(tokens, bumps=bumps, **options))
    return dict(
        zip(bumps, torch.autograd.grad(loss, list(bumps.values()), allow_unused=True), strict=True)
    )


def by_hand(graph, change, gradient, senders=None):
    found = torch.zeros(graph.exists.shape, dtype=torch.float64)
    for receiver, sender in graph.exists.nonzero().tolist():
        at = gradient[graph.receivers[receiver]]
        if at is not None and (senders is None or graph.senders[sender] in senders):
            found[receiver, sender] = (change[sender] * at).sum()
    return found


@pytest.fixture
def change(gpt2, graph, clean, corrupted):
    return written(graph, gpt2, corrupted).parts - written(graph, gpt2, clean).parts


def test_eap(gpt2, graph, hand, clean, corrupted, metric, change):
    right = by_hand(graph, change, gradients(hand, graph, clean, metric))
    found = edge_attribution(gpt2, clean, corrupted, metric, "gradient")
    torch.testing.assert_close(found.values, right, atol=1e-11, rtol=1e-9)
    assert right.abs().max() > 1e-3
    assert (
        all(parameter.grad is None for parameter in gpt2.parameters())
        and torch_hooks(gpt2.original_model) == 0
    )


def both(hand, clean, corrupted):
    """What the senders write in both runs."""
    found = []
    with torch.no_grad():
        for tokens in (clean, corrupted):
            hand(tokens)
            found.append(dict(hand.wrote))
    return found


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("divergence", [False, True])
def test_eap_ig_over_inputs(gpt2, graph, hand, clean, corrupted, metric, change, steps, divergence):
    """Steps 0 to m - 1, as the benchmark's code takes them: the clean run is none of them."""
    one, other = both(hand, clean, corrupted)
    if divergence:
        with torch.no_grad():
            metric = kl_divergence(gpt2(clean))
    right = 0
    for k in range(steps):
        point = other["embed"] + k / steps * (one["embed"] - other["embed"])
        right = (
            right
            + by_hand(graph, change, gradients(hand, graph, clean, metric, embed=point)) / steps
        )
    found = edge_attribution(gpt2, clean, corrupted, metric, "inputs", steps)
    torch.testing.assert_close(found.values, right, atol=1e-11, rtol=1e-9)
    assert right.abs().max() > 1e-3


def test_clean_and_corrupted(gpt2, graph, hand, clean, corrupted, metric, change):
    """The mean of the gradients of both runs, by hand."""
    right = sum(
        by_hand(graph, change, gradients(hand, graph, tokens, metric)) / 2
        for tokens in (clean, corrupted)
    )
    found = edge_attribution(gpt2, clean, corrupted, metric, "clean_corrupted")
    torch.testing.assert_close(found.values, right, atol=1e-11, rtol=1e-9)
    assert right.abs().max() > 1e-3


@pytest.mark.parametrize("padded", [False, True])
def test_information_flow_is_proximity(gpt2, graph, hand, clean, padded):
    """Receiver by receiver, sender by sender, token by token, from what a model computed head by
    head reads.
    """
    mask = torch.ones_like(clean)
    if padded:
        mask[0, -2:] = 0
    with torch.no_grad():
        hand(clean)
    right = torch.zeros(graph.exists.shape, dtype=torch.float64)
    for receiver, name in enumerate(graph.receivers):
        senders = graph.exists[receiver].nonzero().flatten().tolist()
        for row in range(len(clean)):
            tokens = mask[row].nonzero().flatten().tolist()
            for pos in tokens:
                y = hand.read[name][row, pos]
                near = [
                    max(
                        float(
                            y.abs().sum()
                            - (y - hand.wrote[graph.senders[sender]][row, pos]).abs().sum()
                        ),
                        0,
                    )
                    for sender in senders
                ]
                for sender, value in zip(senders, near, strict=True):
                    right[receiver, sender] += value / sum(near) / len(tokens) / len(clean)
    found = information_flow(gpt2, clean, attention_mask=mask)
    torch.testing.assert_close(found.values, right, atol=1e-11, rtol=1e-9)
    assert not torch.equal(found.values, information_flow(gpt2, clean).values) or not padded


def test_a_divergence_has_its_minimum_in_the_clean_run(gpt2, clean, corrupted):
    with torch.no_grad():
        metric = kl_divergence(gpt2(clean))
    with pytest.raises(ValueError, match="gradient of the metric is zero"):
        edge_attribution(gpt2, clean, corrupted, lambda logits: metric(logits) * 0)


@pytest.mark.parametrize("method", ["activations", "own_activations"])
def test_eap_ig_over_activations(gpt2, graph, hand, clean, corrupted, metric, change, method):
    """The benchmark's way: the gradients of all runs at all receivers, given to all senders; or to
    the part's own.
    """
    one, other = both(hand, clean, corrupted)
    steps, right = 3, torch.zeros(graph.exists.shape, dtype=torch.float64)
    parts = [["embed"]]
    for layer in range(3):
        parts += [[f"L{layer}H{head}" for head in range(4)], [f"L{layer}MLP"]]
    for part in parts:
        for k in range(1, steps + 1):
            outputs = {name: other[name] + k / steps * (one[name] - other[name]) for name in part}
            where = {"embed": outputs["embed"]} if part == ["embed"] else {"outputs": outputs}
            at = gradients(hand, graph, clean, metric, **where)
            right += by_hand(graph, change, at, None if method == "activations" else part)
    right /= steps * (len(parts) if method == "activations" else 1)
    found = edge_attribution(gpt2, clean, corrupted, metric, method, steps)
    torch.testing.assert_close(found.values, right, atol=1e-11, rtol=1e-9)
    assert right.abs().max() > 1e-3


def test_nodes_are_attributed_by_the_gradient_at_what_they_write(
    gpt2, hand, clean, corrupted, metric, change
):
    loss = metric(hand(clean))
    gradient = torch.autograd.grad(loss, list(hand.wrote.values()))
    right = [float((one * other).sum()) for one, other in zip(change, gradient, strict=True)]
    found = edge_attribution(gpt2, clean, corrupted, metric, "gradient").nodes
    assert list(found.values()) == pytest.approx(right, abs=1e-10) and max(map(abs, right)) > 1e-3


def test_prompts_of_several_lengths_in_one_batch(gpt2, clean, corrupted):
    """Padded behind, each read at its own last token: what is behind it changes nothing."""
    short = [tokens[1:, :4] for tokens in (clean, corrupted)]
    answers, wrong = torch.tensor([5, 8]), torch.tensor([9, 2])
    together = logit_difference(answers, wrong, torch.tensor([4, 3]))
    padded = [
        torch.cat([tokens[:1], torch.cat([tokens[1:, :4], torch.full((1, 1), 60)], 1)])
        for tokens in (clean, corrupted)
    ]
    for method in ("gradient", "inputs", "activations"):
        one = edge_attribution(
            gpt2, clean[:1], corrupted[:1], logit_difference(answers[:1], wrong[:1]), method
        )
        other = edge_attribution(gpt2, *short, logit_difference(answers[1:], wrong[1:]), method)
        found = edge_attribution(gpt2, *padded, together, method)
        torch.testing.assert_close(
            found.values, mean_scores([one, other]).values, atol=1e-11, rtol=1e-9
        )


def test_steps_in_several_batches(gpt2, clean, corrupted, metric, monkeypatch):
    right = edge_attribution(gpt2, clean, corrupted, metric)
    monkeypatch.setattr("bridge.circuits.attribution.tokens_per_run", lambda *args: 20)
    torch.testing.assert_close(
        edge_attribution(gpt2, clean, corrupted, metric).values, right.values
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_families_by_small_exact_changes(family, clean, corrupted):
    bridge = bridge_of(family).to(
        torch.float32 if family == "mixtral" else torch.float64
    )  # no kernel
    graph = Graph.of(bridge)
    metric = logit_difference(torch.tensor([5, 8]), torch.tensor([9, 2]))
    found = edge_attribution(bridge, clean, corrupted, metric, "gradient").values
    one, other = written(graph, bridge, clean).parts, written(graph, bridge, corrupted).parts
    small = 1e-3  # RMS norms compute in float32 whatever they are given
    largest = found.abs().max().item()
    edges = found.abs().flatten().topk(6).indices.tolist() + list(
        range(0, found.numel(), found.numel() // 9)
    )
    for receiver, sender in {divmod(index, found.shape[1]) for index in edges}:
        if graph.exists[receiver, sender]:
            mask = torch.zeros_like(graph.exists)
            mask[receiver, sender] = True
            up, down = (
                metric(
                    run_with_edges_replaced(
                        graph,
                        bridge,
                        {"input_ids": clean},
                        one + way * small * (other - one),
                        mask[None],
                    )[0]
                )
                for way in (1, -1)
            )
            right = ((up - down) / (2 * small)).item()
            assert found[receiver, sender].item() == pytest.approx(
                right, abs=5e-3 * largest, rel=0.02
            )
    assert largest > 1e-3


def test_mean_of_batches(gpt2, graph, clean, corrupted):
    metric = lambda logits: logits[:, -1, 3].mean()
    rows = [
        edge_attribution(gpt2, clean[i : i + 1], corrupted[i : i + 1], metric) for i in range(2)
    ]
    torch.testing.assert_close(
        mean_scores(rows).values, edge_attribution(gpt2, clean, corrupted, metric).values
    )
    assert torch.equal(mean_scores(iter(rows)).values, mean_scores(rows).values)
    weighted = mean_scores(rows, [3, 1]).values
    torch.testing.assert_close(weighted, 0.75 * rows[0].values + 0.25 * rows[1].values)
    with pytest.raises(ValueError, match="2 scores and 1 weights"):
        mean_scores(rows, [1])
    with pytest.raises(ValueError, match="one or more"):
        mean_scores([])
    for weights in ([1, -1], [0, 0.0], [1.0, float("inf")], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="such weights have no mean"):
            mean_scores(rows, weights)


def test_refusals(gpt2, graph, clean, corrupted, metric):
    with pytest.raises(ValueError, match="method is 'ig'"):
        edge_attribution(gpt2, clean, corrupted, metric, "ig")
    with pytest.raises(ValueError, match="steps is 0"):
        edge_attribution(gpt2, clean, corrupted, metric, steps=0)
    with pytest.raises((ValueError, TypeCheckError)):  # whichever looks first at the shapes
        logit_difference(torch.tensor([1, 2]), torch.tensor([1]))
    with pytest.raises(ValueError, match="1 rows, and there are 2 answers"):
        edge_attribution(gpt2, clean[:1], corrupted[:1], metric)
    with pytest.raises(ValueError, match=r"scores have shape \[2, 2\]"):
        EdgeScores(graph, torch.zeros(2, 2))
    with pytest.raises(ValueError, match="scores are NaN"):
        EdgeScores(graph, torch.full(graph.exists.shape, float("nan")))
    for attribution in (edge_attribution, node_attribution):
        with pytest.raises(ValueError, match="and this model is"):
            attribution(gpt2, clean, corrupted, metric, graph=Graph(graph.layers[:2]))
        for without in (
            lambda logits: metric(logits.detach()),
            lambda logits: float(metric(logits.detach())),
        ):
            with pytest.raises(ValueError, match="metric gives a number without a gradient"):
                attribution(gpt2, clean, corrupted, without)
        with (
            pytest.raises(RuntimeError, match="attribution needs gradients"),
            torch.inference_mode(),
        ):
            attribution(gpt2, clean, corrupted, metric)
        with pytest.raises(
            ValueError, match="is the same in the clean run and in what replaces it"
        ):
            attribution(gpt2, clean, clean, metric)


def test_training_mode_is_refused_everywhere(graph, clean, corrupted, metric):
    """Dropout of patterns alone: what is written between two runs of the same prompts still sums to
    the stream.
    """
    model = tiny("gpt2")
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5 if name.endswith("attn_dropout") else 0.0
    bridge = TransformerBridge(model.train())
    circuit, scores = (
        Circuit(graph, graph.exists),
        EdgeScores(graph, torch.ones(graph.exists.shape)),
    )
    studies = [
        lambda: edge_attribution(bridge, clean, corrupted, metric),
        lambda: node_attribution(bridge, clean, corrupted, metric),
        lambda: edge_effects(bridge, clean, corrupted, metric, ["embed->logits"], verbose=False),
        lambda: node_effects(bridge, clean, corrupted, metric),
        lambda: path_patching(bridge, clean, corrupted, metric, ["L0H0"], ["logits"]),
        lambda: information_flow(bridge, clean),
        lambda: mean_outputs(bridge, [clean]),
        lambda: circuit.evaluate(bridge, clean, corrupted, metric),
        lambda: circuit.optimal_constants(bridge, clean),
        lambda: faithfulness_curve(scores, bridge, clean, corrupted, metric),
        lambda: trained_edges(bridge, clean, corrupted),
    ]
    for study in studies:
        with pytest.raises(ValueError, match="training mode"):
            study()


def everywhere(logits: torch.Tensor) -> torch.Tensor:
    """A metric that looks at all positions."""
    return logits.log_softmax(-1)[..., 5].mean()


@pytest.mark.parametrize("method", ["gradient", "inputs", "activations", "own_activations"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("looks", ["at one", "at all"])
def test_what_need_not_run(metric, clean, corrupted, method, family, looks):
    """Where somebody listens, all layers run, and all logits are computed: the scores are the
    same.
    """
    bridge, metric = bridge_of(family), metric if looks == "at one" else everywhere
    graph = Graph.of(bridge, grouped=False)
    calls: list[int] = []
    found = edge_attribution(bridge, clean, corrupted, metric, method, 3, graph)
    with bridge.hooks(
        fwd_hooks=[("blocks.0.hook_resid_pre", lambda stream, hook: calls.append(len(stream)))]
    ):
        right = edge_attribution(bridge, clean, corrupted, metric, method, 3, graph)
        if method != "own_activations":
            nodes = node_attribution(bridge, clean, corrupted, metric, method, 3)
    assert right.values.abs().max() > 1e-3
    torch.testing.assert_close(
        found.values, right.values, rtol=0, atol=2e-5 * float(right.values.abs().max())
    )
    if method != "own_activations":
        again = node_attribution(bridge, clean, corrupted, metric, method, 3)
        torch.testing.assert_close(
            again.neurons, nodes.neurons, rtol=0, atol=2e-5 * float(nodes.neurons.abs().max())
        )


class Squares(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits[:, -1].square().sum()

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return (
            torch.zeros_like(logits).index_copy(
                1, torch.tensor([logits.shape[1] - 1]), 2 * logits[:, -1:]
            )
            * gradient
        )


def weighted(logits):
    """It looks without gradients first, at what it looks at again."""
    with torch.no_grad():
        weights = logits[:, -1].softmax(-1)
    return (weights * logits[:, -1]).sum() + logits[:, -2, 5].sum()


def of_the_best(logits):
    with torch.inference_mode():
        best = logits.argmax(-1).tolist()
    return logits.gather(-1, torch.tensor(best).unsqueeze(-1)).sum()


def by_row(logits):
    assert logits.requires_grad
    return torch.vmap(lambda row: row[-1, 5] - row[-1, 8])(logits).sum() + logits[:, -2, 5].sum()


@pytest.mark.parametrize("method", ["inputs", "activations"])
@pytest.mark.parametrize(
    "metric",
    [weighted, of_the_best, by_row, lambda logits: Squares.apply(logits) + logits[:, -2, 5].sum()],
)
def test_a_metric_may_do_anything_with_logits(gpt2, clean, corrupted, method, metric):
    """The scores are those of a metric that is given all logits, as they are where somebody
    listens.
    """
    found = edge_attribution(gpt2, clean, corrupted, metric, method, 3)
    with gpt2.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda stream, hook: None)]):
        right = edge_attribution(gpt2, clean, corrupted, metric, method, 3)
    torch.testing.assert_close(
        found.values, right.values, rtol=0, atol=2e-5 * float(right.values.abs().max())
    )


def test_layers_before_a_part_do_not_run_again(gpt2, clean, corrupted, metric, monkeypatch):
    """Eight steps of seven parts in three layers: 2 parts begin in each, and 1 at the
    embeddings.
    """
    block, rows = type(gpt2.original_model.transformer.h[0]), []
    forward = block.forward
    monkeypatch.setattr(
        block,
        "forward",
        lambda self, x, *args, **kwargs: rows.append(len(x)) or forward(self, x, *args, **kwargs),
    )
    edge_attribution(gpt2, clean, corrupted, metric, "activations", 8)
    ran = sum(rows) / len(clean)
    clean_and_corrupted, tried, below = 2 * 3, 3 + 2 + 2, 2
    assert ran <= 8 * (3 + 2 * (3 + 2 + 1)) + clean_and_corrupted + tried + below
    rows.clear()
    with gpt2.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda stream, hook: None)]):
        edge_attribution(gpt2, clean, corrupted, metric, "activations", 8)
    assert sum(rows) / len(clean) == 8 * 7 * 3 + clean_and_corrupted


class Bent(torch.nn.Module):
    """A projection that is not linear."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return y + 0.5 * (3 * y).tanh()


class Halved(Bent):
    def forward(self, x):
        y = self.inner(x)
        return 0.5 * y + 0.5 * y.detach()


def at_heads(bridge, clean, corrupted, metric, graph):
    """The scores by the gradients at heads' own inputs, as anybody's hooks see them."""
    change = written(graph, bridge, corrupted).parts - written(graph, bridge, clean).parts
    found = torch.zeros(graph.exists.shape).to(change)

    def look(gradient, hook):
        for port in graph.ports:
            if port.name == hook.name:
                of_each = gradient.movedim(-2, 0) if port.per_head else gradient[None]
                for i, one in enumerate(of_each):
                    found[port.first + i, : port.upstream] = (change[: port.upstream] * one).sum(
                        (1, 2, 3)
                    )

    names = [port.name for port in graph.ports]
    with bridge.hooks(bwd_hooks=[(names, look)]):
        metric(bridge(clean)).sum().backward()
    return found


@pytest.mark.parametrize("bent", [None, "q_proj", "v_proj", "in its gradient"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_gradients_of_heads_are_those_of_their_own_inputs(metric, clean, corrupted, family, bent):
    """Whatever stands between the stream and the projections, and where its gradient alone is
    another.
    """
    bridge = bridge_of(family).to(torch.float64)
    attention = bridge.original_model.model.layers[1].self_attn
    if bent == "in its gradient":
        attention.v_proj = Halved(attention.v_proj)
    elif bent:
        setattr(attention, bent, Bent(getattr(attention, bent)))
    graph = Graph.of(bridge)
    found = edge_attribution(bridge, clean, corrupted, metric, "gradient").values
    right = at_heads(bridge, clean, corrupted, metric, graph)
    # RMS norms compute in float32 whatever they are given.
    torch.testing.assert_close(found, right, atol=2e-6 * right.abs().max().item(), rtol=1e-5)
    assert right.abs().max() > 1e-3


@pytest.mark.parametrize(
    "change", [lambda y: y + 0.5 * (3 * y).tanh(), lambda y: 0.5 * y + 0.5 * y.detach()]
)
def test_torch_hooks_on_projections_are_refused(metric, clean, corrupted, change):
    """Heads' own inputs are projected anew, without the hook."""
    bridge = bridge_of("llama")
    attention = bridge.original_model.model.layers[1].self_attn
    attention.k_proj.register_forward_hook(lambda module, args, y: change(y))
    with pytest.raises(RuntimeError, match="remove the torch hook"):
        edge_attribution(bridge, clean, corrupted, metric, "gradient")
