"""What stands on hook points, over several processes and in one: circuits, bases, graphs, lenses,
sweeps, traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

import bridge.patching as patching
from bridge import TransformerBridge
from bridge.bases import Directions, Neurons
from bridge.circuits import edge_attribution, edge_effects, path_patching
from bridge.features import attribution_graph, feature_attribution, interchange
from tests.sharded.models import TOKENS

CORRUPTED = TOKENS.clone()
CORRUPTED[:, 2] = torch.tensor([50, 60])


def metric(logits: Tensor) -> Tensor:
    return (logits[:, -1, 5] - logits[:, -1, 9]).mean()


def circuits(bridge: TransformerBridge) -> Iterable[Tensor]:
    scores = edge_attribution(bridge, TOKENS, CORRUPTED, metric)
    edges = ["embed->L1H0.q", "L0H1->logits"]
    exact = edge_effects(bridge, TOKENS, CORRUPTED, metric, edges, verbose=False)
    found = scores.top(12).evaluate(bridge, TOKENS, CORRUPTED, metric)
    numbers = [*(scores[edge] for edge in edges), *(exact[edge] for edge in edges)]
    yield torch.tensor([*numbers, found.faithfulness, found.complement_faithfulness])
    yield torch.tensor(path_patching(bridge, TOKENS, CORRUPTED, metric, ["L0H1"], ["L1H0.q"]))


def in_bases(bridge: TransformerBridge) -> Iterable[Tensor]:
    directions = Directions(
        torch.randn(64, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    )
    points = [bridge.add_basis("blocks.0.hook_resid_post", "few", directions).name]
    if "blocks.0.mlp.hook_post" in bridge.hook_dict:
        points.append(
            bridge.add_basis(
                "blocks.0.mlp.hook_post", "some", Neurons(bridge.cfg.d_mlp, [3, 50, 90])
            ).name
        )
    _, cache = bridge.run_with_cache(TOKENS, names_filter=points)
    for point in points:
        yield cache[point]
        yield bridge.run_with_hooks(
            TOKENS, fwd_hooks=[(point, lambda features, hook: features * 0.3)]
        )
        yield feature_attribution(bridge, TOKENS, metric, point)
    yield attribution_graph(bridge, TOKENS[:1], points[-1:]).adjacency
    yield interchange(bridge, TOKENS, TOKENS.flip(0), points[0], position=-1, source_position=-1)


def sweeps(bridge: TransformerBridge) -> Iterable[Tensor]:
    everything = patching.patch_everything(bridge, TOKENS[:1], CORRUPTED[:1], (5, 9))
    yield from (found for found in vars(everything).values() if isinstance(found, Tensor))
    _, cache = bridge.run_with_cache(CORRUPTED)
    yield patching.get_act_patch_attn_head_pattern_all_pos(bridge, TOKENS, cache, metric)
    ablated = patching.ablated(cache, "mean")["blocks.0.attn.hook_z"]
    yield bridge.run_with_hooks(
        TOKENS,
        fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: ablated.to(z.dtype).expand_as(z))],
    )


def read_as_tokens(bridge: TransformerBridge) -> Iterable[Tensor]:
    yield bridge.lens(TOKENS).logits(0)
    yield bridge(bridge.run_with_cache(TOKENS)[1]["blocks.0.hook_resid_post"], start_at_layer=1)


def traced(bridge: TransformerBridge) -> Iterable[Tensor]:
    with bridge.trace(TOKENS) as run:
        z, pattern = run["blocks.0.attn.hook_z"], run["blocks.1.attn.hook_pattern"]
        gradients = torch.autograd.grad(metric(run.logits), [z, pattern])
    yield from gradients
    with bridge.trace_generate(TOKENS, max_new_tokens=3, do_sample=False) as generation:
        generation["blocks.1.hook_resid_pre"] *= 0.9
        for step in generation.steps:
            yield step["blocks.0.attn.hook_z"].clone()
            step["blocks.1.attn.hook_pattern"][:] *= 0.8
    yield generation.tokens


def gradients_cached(bridge: TransformerBridge) -> Iterable[Tensor]:
    cache, forward, backward = bridge.get_caching_hooks(incl_bwd=True)
    with bridge.hooks(forward, backward):
        bridge(TOKENS, return_type="loss").backward()
    yield from (cache[name] for name in sorted(cache))


ALL: Mapping[str, Callable[[TransformerBridge], Iterable[Tensor]]] = {
    "circuits": circuits,
    "in_bases": in_bases,
    "sweeps": sweeps,
    "read_as_tokens": read_as_tokens,
    "traced": traced,
    "gradients_cached": gradients_cached,
}
