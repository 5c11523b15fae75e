"""Methods beside their formulas, computed with torch hooks on Hugging Face's model."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from benchmarks.methods.hooked import (
    HEADS,
    LAYERS,
    changes,
    difference,
    edge_scores,
    gradients,
    head_output,
    hf,
    module,
    norm_of,
    of_head,
    ours,
    outputs,
    pairs,
    projection_of,
    run,
    with_input_moved,
)
from benchmarks.methods.table import Pair, method, numbers
from bridge import TransformerBridge
from bridge.analysis.head_detector import detect_head
from bridge.analysis.patterns import PatternStatistics, kurtosis, vertical_scores
from bridge.bases import CrossLayer, Directions
from bridge.circuits import (
    Circuit,
    Graph,
    edge_attribution,
    edge_effects,
    information_flow,
    kl_divergence,
    node_attribution,
    node_effects,
    path_patching,
)
from bridge.features import (
    direction,
    feature_attribution,
    interchange,
    token_attribution,
    write_into_weights,
)
from bridge.interventions import Add, ProjectOut, Set, Swap
from bridge.lens import JacobianLens, Lens
from bridge.patching import (
    Noise,
    ablated,
    get_act_patch_attn_head_out_all_pos,
    get_act_patch_resid_pre,
    suppression,
)
from bridge.run.rules import declared_rules

EDGES = ("embed->L0H0.v", "L0H0->L2H3.v", "L0H0->L1MLP", "L1MLP->L2H3.v", "L2H3->logits")
STREAMS = [f">layers.{layer}" for layer in range(LAYERS)]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
CHAT = [
    {
        "role": "user",
        "content": "Mary and John went to the store. John gave a drink to Mary. Then Mary went to"
        " the park. There Mary and John had a cake. Mary gave the cake to John.",
    }
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def read_out(stream: Tensor) -> Tensor:
    """Return the logits of a stream."""
    return hf().lm_head(hf().model.norm(stream))


def streams(tokens: Tensor) -> list[Tensor]:
    """Return the stream before each layer, and at the end."""
    _, kept = run(tokens, keep=[*STREAMS, ">norm"])
    return [kept[place] for place in [*STREAMS, ">norm"]]


# --------------------------------------------------------------------------------------------------
# Lenses and direct effects.
# --------------------------------------------------------------------------------------------------


@method(
    "Logit lens",
    "how_to_logit_lens.md",
    "nostalgebraist 2020",
    "https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens",
)
def logit_lens() -> Sequence[Pair]:
    reading = ours().lens(pairs().clean)
    return [
        (reading.logits(layer), read_out(stream))
        for layer, stream in enumerate(streams(pairs().clean))
    ]


def final_directions(stream: Tensor) -> Tensor:
    """Return each prompt's answer direction through the final norm, whose scale is held."""
    weight = hf().lm_head.weight
    directions = weight[pairs().answers] - weight[pairs().wrong]
    eps = hf().model.norm.variance_epsilon
    scale = (stream[:, -1].square().mean(-1, keepdim=True) + eps).sqrt()
    return directions * hf().model.norm.weight / scale


@method(
    "Direct logit attribution of layers",
    "how_to_direct_logit_attribution.md",
    "Elhage et al. 2021",
    "https://transformer-circuits.pub/2021/framework/index.html",
)
def attribution_of_layers() -> Sequence[Pair]:
    _, cache = ours().run_with_cache(pairs().clean)
    stack, labels = cache.decompose_resid(pos_slice=-1, return_labels=True)
    terms = cache.logit_attrs(stack, pairs().answers, pairs().wrong, pos_slice=-1)
    keep = [f"layers.{layer}.{part}" for layer in range(LAYERS) for part in ("self_attn", "mlp")]
    _, kept = run(pairs().clean, keep=["embed_tokens", *keep, ">norm"])
    written = torch.stack([kept[place][:, -1] for place in ["embed_tokens", *keep]])
    assert len(labels) == len(written)
    return [(terms, (written * final_directions(kept[">norm"])).sum(-1))]


@method(
    "Direct logit attribution of heads",
    "how_to_direct_logit_attribution.md",
    "Wang et al. 2022",
    "https://arxiv.org/abs/2211.00593",
)
def attribution_of_heads() -> Sequence[Pair]:
    _, cache = ours().run_with_cache(pairs().clean)
    heads = cache.stack_head_results(pos_slice=-1)
    terms = cache.logit_attrs(heads, pairs().answers, pairs().wrong, pos_slice=-1)
    senders = outputs(pairs().clean)
    written = torch.stack([x[:, -1] for name, x in senders.items() if "H" in name])
    return [(terms, (written * final_directions(streams(pairs().clean)[-1])).sum(-1))]


@method(
    "Jacobian lens: a fitted matrix",
    "how_to_jacobian_lens.md",
    "Gurnee et al. 2026",
    "https://transformer-circuits.pub/2026/workspace/index.html",
)
def jacobian_lens() -> Sequence[Pair]:
    """The derivative of the last stream at a token and those after it, averaged over both."""
    tokens = pairs().clean[:1]
    first = 10
    lens = JacobianLens.fit(ours(), [tokens[0]], skip_first=first, verbose=False)
    _, kept = run(tokens, {">layers.2": lambda x: x.detach().requires_grad_()}, [">norm"])
    last, stream = kept[">norm"], kept[">layers.2"]
    rows = []
    for feature in range(8):
        total = last[0, first:-1, feature].sum()
        (gradient,) = torch.autograd.grad(total, stream, retain_graph=True)
        rows.append(gradient[0, first:-1].mean(0))
    return [(lens.matrix(2)[:8], torch.stack(rows))]


# --------------------------------------------------------------------------------------------------
# Patching.
# --------------------------------------------------------------------------------------------------


def put_at(position: int, value: Tensor):
    """Return an edit that puts a value at a position."""

    def put(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, position] = value[:, position]
        return x

    return put


def put_head(head: int, value: Tensor):
    """Return an edit that replaces a head's columns."""

    def put(z: Tensor) -> Tensor:
        z = z.clone()
        z[..., of_head(head)] = value[..., of_head(head)]
        return z

    return put


@method(
    "Activation patching of the residual stream",
    "how_to_activation_patching.md",
    "Meng et al. 2022",
    "https://arxiv.org/abs/2202.05262",
)
@torch.no_grad()
def patching_streams() -> Sequence[Pair]:
    clean, corrupted = pairs().clean, pairs().corrupted
    _, cache = ours().run_with_cache(clean)
    table = get_act_patch_resid_pre(ours(), corrupted, cache, pairs().metric(), verbose=False)
    right = [
        [difference(run(corrupted, {place: put_at(at, x)})[0]) for at in range(clean.shape[1])]
        for place, x in zip(STREAMS, streams(clean), strict=False)
    ]
    return [(table, numbers(right))]


def heads_of(tokens: Tensor) -> list[Tensor]:
    """Return the input of each layer's output matrix."""
    places = [f">layers.{layer}.self_attn.o_proj" for layer in range(LAYERS)]
    _, kept = run(tokens, keep=places)
    return [kept[place] for place in places]


@method(
    "Activation patching of heads",
    "how_to_activation_patching.md",
    "Zhang and Nanda 2023",
    "https://arxiv.org/abs/2309.16042",
)
@torch.no_grad()
def patching_heads() -> Sequence[Pair]:
    clean, corrupted = pairs().clean, pairs().corrupted
    _, cache = ours().run_with_cache(clean)
    metric = pairs().metric()
    table = get_act_patch_attn_head_out_all_pos(ours(), corrupted, cache, metric, verbose=False)
    zs = heads_of(clean)
    right = [
        [
            difference(
                run(corrupted, {f">layers.{layer}.self_attn.o_proj": put_head(head, zs[layer])})[0]
            )
            for head in range(HEADS)
        ]
        for layer in range(LAYERS)
    ]
    return [(table, numbers(right))]


@method(
    "Causal mediation: an MLP's output, exchanged",
    "how_to_activation_patching.md",
    "Vig et al. 2020",
    "https://arxiv.org/abs/2004.12265",
)
@torch.no_grad()
def mediation() -> Sequence[Pair]:
    clean, corrupted = pairs().clean, pairs().corrupted
    logits = interchange(ours(), corrupted, clean, "blocks.1.hook_mlp_out")
    _, kept = run(clean, keep=["layers.1.mlp"])
    return [(logits, run(corrupted, {"layers.1.mlp": lambda x: kept["layers.1.mlp"]})[0])]


@method(
    "Path patching",
    "how_to_path_patching.md",
    "Wang et al. 2022",
    "https://arxiv.org/abs/2211.00593",
)
@torch.no_grad()
def paths() -> Sequence[Pair]:
    """The sender's corrupted output reaches the receivers directly and through MLPs; all other
    heads are held."""
    clean, corrupted = pairs().clean, pairs().corrupted
    receivers = [f"L2H{head}.v" for head in range(HEADS)]
    metric = pairs().metric()
    values, right = [], []
    zs, others = heads_of(clean), heads_of(corrupted)
    before = difference(run(clean)[0])
    projection, _ = projection_of(receivers[0])
    for sender in range(HEADS):
        changed = path_patching(ours(), clean, corrupted, metric, [f"L0H{sender}"], receivers)
        values.append(changed)
        held = {
            f">layers.{layer}.self_attn.o_proj": (lambda z, layer=layer: zs[layer])
            for layer in range(LAYERS)
        }
        held[">layers.0.self_attn.o_proj"] = lambda z, sender=sender: put_head(sender, others[0])(
            zs[0]
        )
        _, kept = run(clean, held, [projection])
        after = run(clean, {projection: lambda x, kept=kept: kept[projection]})[0]
        right.append(difference(after) - before)
    return [(numbers(values), torch.stack(right))]


@method(
    "Exact effects of edges",
    "circuits.md",
    "Conmy et al. 2023",
    "https://arxiv.org/abs/2304.14997",
)
@torch.no_grad()
def exact_edges() -> Sequence[Pair]:
    clean, corrupted = pairs().clean, pairs().corrupted
    effects = edge_effects(ours(), clean, corrupted, pairs().metric(), EDGES, verbose=False)
    before, change = difference(run(clean)[0]), changes()
    right = []
    for edge in EDGES:
        sender, receiver = edge.split("->")
        after = run(clean, with_input_moved(receiver, change[sender]))[0]
        right.append(difference(after) - before)
    return [(numbers([effects[edge] for edge in EDGES]), torch.stack(right))]


@method(
    "Exact effects of nodes",
    "how_to_attribution_patching.md",
    "Vig et al. 2020",
    "https://arxiv.org/abs/2004.12265",
)
@torch.no_grad()
def exact_nodes() -> Sequence[Pair]:
    clean, corrupted = pairs().clean, pairs().corrupted
    scores = node_effects(ours(), clean, corrupted, pairs().metric())
    zs, before = heads_of(corrupted), difference(run(clean)[0])
    _, kept = run(corrupted, keep=["embed_tokens", *(f"layers.{i}.mlp" for i in range(LAYERS))])
    right = []
    for sender in scores.graph.senders:
        if sender == "embed":
            edits = {"embed_tokens": lambda x: kept["embed_tokens"]}
        elif sender.endswith("MLP"):
            edits = {f"layers.{sender[1]}.mlp": lambda x, i=sender[1]: kept[f"layers.{i}.mlp"]}
        else:
            layer, head = int(sender[1]), int(sender[3])
            edits = {f">layers.{layer}.self_attn.o_proj": put_head(head, zs[layer])}
        right.append(difference(run(clean, edits)[0]) - before)
    return [(scores.values, torch.stack(right))]


@method(
    "Causal tracing with noise",
    "how_to_causal_tracing.md",
    "Meng et al. 2022",
    "https://arxiv.org/abs/2202.05262",
)
@torch.no_grad()
def tracing() -> Sequence[Pair]:
    """Add the same noise to one token's embedding, and put one clean activation back."""
    clean, at = pairs().clean, 2
    _, cache = ours().run_with_cache(clean)
    noisy = ablated(cache, ablation=Noise(scale=3.0, seed=0))["hook_embed"]

    def corrupt(embed: Tensor, hook: object) -> Tensor:
        embed[:, at] = noisy[:, at]
        return embed

    result = []
    for layer, stream in list(enumerate(streams(clean)))[1:LAYERS]:
        name = f"blocks.{layer}.hook_resid_pre"
        restore = Set(cache[name][:, at][:, None], positions=slice(at, at + 1))
        logits = ours().run_with_hooks(clean, fwd_hooks=[("hook_embed", corrupt), (name, restore)])
        edits = {"embed_tokens": put_at(at, noisy), f">layers.{layer}": put_at(at, stream)}
        result.append((logits, run(clean, edits)[0]))
    return result


@method(
    "Patching across models",
    "how_to_model_diffing.md",
    "Prakash et al. 2024",
    "https://arxiv.org/abs/2402.14811",
)
@torch.no_grad()
def across_models() -> Sequence[Pair]:
    """A model with other weights in one layer gives its activation to the first one."""
    other = TransformerBridge.boot_embedded().to(torch.float64)
    other.original_model.model.layers[0].mlp.down_proj.weight.mul_(1.2)
    name = "blocks.1.hook_attn_out"
    _, cache = other.run_with_cache(pairs().clean, names_filter=name)
    logits = ours().run_with_hooks(pairs().clean, fwd_hooks=[(name, lambda x, hook: cache[name])])
    stronger = {"layers.0.mlp": lambda x: x * 1.2}
    _, kept = run(pairs().clean, stronger, ["layers.1.self_attn"])
    right, _ = run(pairs().clean, {"layers.1.self_attn": lambda x: kept["layers.1.self_attn"]})
    return [(logits, right)]


@method(
    "Patchscopes",
    "how_to_patchscopes.md",
    "Ghandeharioun et al. 2024",
    "https://arxiv.org/abs/2401.06102",
)
@torch.no_grad()
def patchscopes() -> Sequence[Pair]:
    """A stream of one layer and prompt, put before another layer of another prompt."""
    source, target = pairs().clean, ours().to_tokens("The capital of Spain is").repeat(8, 1)
    _, cache = ours().run_with_cache(source)
    value = Set(cache["blocks.2.hook_resid_pre"][:, 2:3], positions=slice(4, 5))
    logits = ours().run_with_hooks(target, fwd_hooks=[("blocks.1.hook_resid_pre", value)])
    stream = streams(source)[2]

    def put(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 4] = stream[:, 2]
        return x

    return [(logits, run(target, {">layers.1": put})[0])]


# --------------------------------------------------------------------------------------------------
# Scores from gradients.
# --------------------------------------------------------------------------------------------------


def graph() -> Graph:
    return Graph.of(ours())


@method(
    "Edge attribution patching (EAP)",
    "circuits.md",
    "Syed et al. 2023",
    "https://arxiv.org/abs/2310.10348",
)
def eap() -> Sequence[Pair]:
    clean, corrupted = pairs().clean, pairs().corrupted
    scores = edge_attribution(ours(), clean, corrupted, pairs().metric(), "gradient")
    at = gradients(clean, list(scores.graph.receivers))
    return [(scores.values, edge_scores(changes(), at, scores.graph))]


@method(
    "EAP-IG over inputs",
    "circuits.md",
    "Hanna et al. 2024",
    "https://arxiv.org/abs/2403.17806",
)
def eap_ig_inputs() -> Sequence[Pair]:
    clean, corrupted = pairs().clean, pairs().corrupted
    scores = edge_attribution(ours(), clean, corrupted, pairs().metric(), "inputs", 5)
    one, other = (outputs(tokens)["embed"] for tokens in (clean, corrupted))
    total, change = torch.zeros_like(scores.values), changes()
    for step in range(5):
        embed = other + step / 5 * (one - other)
        edits = {"embed_tokens": lambda x, embed=embed: embed}
        at = gradients(clean, list(scores.graph.receivers), edits)
        total += edge_scores(change, at, scores.graph) / 5
    return [(scores.values, total)]


@method(
    "EAP-IG over activations",
    "circuits.md",
    "Mueller et al. 2025",
    "https://arxiv.org/abs/2504.13151",
)
def eap_ig_activations() -> Sequence[Pair]:
    clean, corrupted, steps = pairs().clean, pairs().corrupted, 2
    scores = edge_attribution(ours(), clean, corrupted, pairs().metric(), "activations", steps)
    places = ["embed_tokens"]
    for layer in range(LAYERS):
        places += [f">layers.{layer}.self_attn.o_proj", f"layers.{layer}.mlp"]
    (_, one), (_, other) = (run(tokens, keep=places) for tokens in (clean, corrupted))
    total, change = torch.zeros_like(scores.values), changes()
    for place in places:
        for step in range(1, steps + 1):
            value = other[place] + step / steps * (one[place] - other[place])
            edits = {place: lambda x, value=value: value}
            at = gradients(clean, list(scores.graph.receivers), edits)
            total += edge_scores(change, at, scores.graph) / steps / len(places)
    return [(scores.values, total)]


@method(
    "Attribution patching of nodes",
    "how_to_attribution_patching.md",
    "Nanda 2023",
    "https://www.neelnanda.io/mechanistic-interpretability/attribution-patching",
)
def attribution_patching() -> Sequence[Pair]:
    clean, corrupted = pairs().clean, pairs().corrupted
    scores = node_attribution(ours(), clean, corrupted, pairs().metric(), method="gradient")
    places = [f"layers.{layer}.{part}" for layer in range(LAYERS) for part in ("self_attn", "mlp")]
    start = {"embed_tokens": lambda x: x.clone().requires_grad_()}
    logits, kept = run(clean, start, places)
    order = ["embed_tokens", *places]
    at = torch.autograd.grad(difference(logits), [kept[place] for place in order])
    at, change, right = dict(zip(order, at, strict=True)), changes(), []
    for sender in scores.graph.senders:
        part = "mlp" if sender.endswith("MLP") else "self_attn"
        gradient = at["embed_tokens" if sender == "embed" else f"layers.{sender[1]}.{part}"]
        right.append((change[sender] * gradient).sum())
    return [(scores.values, torch.stack(right))]


@method(
    "Information flow routes",
    "circuits.md",
    "Ferrando and Voita 2024",
    "https://arxiv.org/abs/2403.00824",
)
@torch.no_grad()
def flow() -> Sequence[Pair]:
    """How near a receiver's input is to what each sender wrote, by the L1 norm, as shares."""
    tokens = pairs().clean
    scores = information_flow(ours(), tokens)
    senders = outputs(tokens)
    right = torch.zeros_like(scores.values)
    _, kept = run(tokens, keep=[f">{norm_of(name)}" for name in scores.graph.receivers])
    for receiver, name in enumerate(scores.graph.receivers):
        y = kept[f">{norm_of(name)}"]
        members = scores.graph.exists[receiver].nonzero().flatten().tolist()
        near = torch.stack(
            [
                (y.abs().sum(-1) - (y - senders[scores.graph.senders[i]]).abs().sum(-1)).clamp(0)
                for i in members
            ]
        )
        right[receiver, members] = (near / near.sum(0)).mean((1, 2))
    return [(scores.values, right)]


@method(
    "Divergence of a run with one edge replaced",
    "circuits.md",
    "Conmy et al. 2023",
    "https://arxiv.org/abs/2304.14997",
)
@torch.no_grad()
def divergences() -> Sequence[Pair]:
    """The ACDC metric: KL(model || model with the edge replaced) at the last token."""
    clean, corrupted = pairs().clean, pairs().corrupted
    metric = kl_divergence(ours()(clean))
    effects = edge_effects(ours(), clean, corrupted, metric, EDGES, verbose=False)
    change, p = changes(), run(clean)[0][:, -1].log_softmax(-1)
    right = []
    for edge in EDGES:
        sender, receiver = edge.split("->")
        q = run(clean, with_input_moved(receiver, change[sender]))[0][:, -1].log_softmax(-1)
        right.append((p.exp() * (p - q)).sum(-1).mean())
    return [(numbers([effects[edge] for edge in EDGES]), torch.stack(right))]


@method(
    "Integrated gradients of features",
    "bases.md",
    "Sundararajan et al. 2017",
    "https://arxiv.org/abs/1703.01365",
)
def integrated_gradients() -> Sequence[Pair]:
    return [_attribution(steps=8)]


@method(
    "Attribution of sparse features",
    "bases.md",
    "Marks et al. 2024",
    "https://arxiv.org/abs/2403.19647",
)
def feature_gradients() -> Sequence[Pair]:
    return [_attribution(steps=1)]


def dictionary(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the encoder, its bias and the decoder of an autoencoder with random weights."""
    return drawn(128, 48, seed=seed) / 11, drawn(48, seed=seed + 1) / 4, drawn(48, 128, seed=2) / 7


def _attribution(steps: int) -> Pair:
    """The features' gradient, with the reconstruction error held, on the line from zero."""
    tokens, name = pairs().clean, "blocks.2.hook_resid_post"
    W, b, D = dictionary()
    encode, decode = lambda x: (x @ W + b).relu(), lambda f: f @ D
    with ours().basis(name, "sae", encode=encode, decode=decode) as point:
        own = feature_attribution(ours(), tokens, pairs().metric(), point, steps=steps)
    _, kept = run(tokens, keep=["layers.2"])
    features = encode(kept["layers.2"]).detach()
    error = kept["layers.2"].detach() - decode(features)
    total = torch.zeros_like(features)
    for share in [1.0] if steps == 1 else [(step + 0.5) / steps for step in range(steps)]:
        leaf = (share * features).requires_grad_()
        logits, _ = run(tokens, {"layers.2": lambda x, leaf=leaf: decode(leaf) + error})
        total += torch.autograd.grad(difference(logits), leaf)[0] / steps
    return own, total * features


# --------------------------------------------------------------------------------------------------
# Features, subspaces and steering.
# --------------------------------------------------------------------------------------------------


@method(
    "Ablation of a sparse feature, error kept",
    "how_to_sae_features.md",
    "Cunningham et al. 2023",
    "https://arxiv.org/abs/2309.08600",
)
@torch.no_grad()
def sparse_features() -> Sequence[Pair]:
    tokens, name = pairs().clean, "blocks.2.hook_resid_post"
    W, b, D = dictionary()
    encode = lambda x: (x @ W + b).relu()
    without = lambda f: torch.where(torch.arange(48) % 3 == 0, 0.0, f)
    with ours().basis(name, "sae", encode=encode, decode=lambda f: f @ D) as point:
        hook = (point, lambda features, hook: without(features))
        logits = ours().run_with_hooks(tokens, fwd_hooks=[hook])
    edit = lambda x: without(encode(x)) @ D + x - encode(x) @ D
    return [(logits, run(tokens, {"layers.2": edit})[0])]


@method(
    "Masked components of a weight",
    "how_to_weight_components.md",
    "Bushnaq et al. 2025",
    "https://arxiv.org/abs/2506.20790",
)
@torch.no_grad()
def components() -> Sequence[Pair]:
    tokens, weight = pairs().clean, "layers.1.mlp.down_proj"
    d_out, d_in = module(weight).weight.shape
    V, U, mask = drawn(d_in, 8) / 16, drawn(8, d_out, seed=1) / 4, drawn(8, seed=2).sigmoid()
    point = ours().add_components("blocks.1.mlp.W_out", V, U)
    logits = ours().run_with_hooks(tokens, fwd_hooks=[(point, lambda x, hook: x * mask)])
    ours().remove_basis(point)
    _, kept = run(tokens, keep=[f">{weight}"])
    return [
        (logits, run(tokens, {weight: lambda y: y + (kept[f">{weight}"] @ V * (mask - 1)) @ U})[0])
    ]


@method(
    "Transcoder in place of an MLP",
    "bases.md",
    "Dunefsky et al. 2024",
    "https://arxiv.org/abs/2406.11944",
)
@torch.no_grad()
def transcoder() -> Sequence[Pair]:
    tokens, (W, b, D) = pairs().clean, dictionary()
    options = {"reads": "blocks.2.hook_resid_mid", "error": "drop"}
    encode = lambda x: (x @ W + b).relu()
    with ours().basis(
        "blocks.2.hook_mlp_out", "tc", encode=encode, decode=lambda f: f @ D, **options
    ):
        logits = ours()(tokens)
    place = ">layers.2.post_attention_layernorm"
    _, kept = run(tokens, keep=[place])
    return [(logits, run(tokens, {"layers.2.mlp": lambda x: encode(kept[place]) @ D})[0])]


@method(
    "Crosscoder of two streams",
    "bases.md",
    "Lindsey et al. 2024",
    "https://transformer-circuits.pub/2024/crosscoders/index.html",
)
@torch.no_grad()
def crosscoder() -> Sequence[Pair]:
    tokens, W, D = pairs().clean, drawn(256, 48) / 16, drawn(48, 128, seed=1) / 7
    reads = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_mid"]
    encode = lambda x: (x.flatten(-2) @ W).relu()
    with ours().basis(
        "blocks.1.hook_mlp_out", "cc", encode=encode, decode=lambda f: f @ D, reads=reads
    ) as point:
        logits = ours().run_with_hooks(tokens, fwd_hooks=[(point, lambda f, hook: f / 2)])
    places = [">layers.1", ">layers.1.post_attention_layernorm"]
    _, kept = run(tokens, keep=places)
    features = (torch.cat([kept[place] for place in places], -1) @ W).relu()
    return [(logits, run(tokens, {"layers.1.mlp": lambda x: x - features / 2 @ D})[0])]


@method(
    "Cross-layer transcoder",
    "bases.md",
    "Ameisen et al. 2025",
    "https://transformer-circuits.pub/2025/attribution-graphs/methods.html",
)
@torch.no_grad()
def cross_layer() -> Sequence[Pair]:
    """A layer's features, halved, in that layer and in the later ones that they are written in."""
    tokens, W_enc, W_dec = pairs().clean, drawn(48, 128) / 11, drawn(48, 3, 128, seed=1) / 11
    b_enc, b_dec = drawn(48, seed=2) / 4, torch.zeros(128, dtype=torch.float64)
    layer = CrossLayer(W_enc, b_enc, W_dec, b_dec)
    later = ["blocks.2.hook_mlp_out", "blocks.3.hook_mlp_out"]
    with ours().basis(
        "blocks.1.hook_mlp_out", "clt", layer, reads="blocks.1.hook_resid_mid", later=later
    ) as point:
        logits = ours().run_with_hooks(tokens, fwd_hooks=[(point, lambda f, hook: f / 2)])
    place = ">layers.1.post_attention_layernorm"
    _, kept = run(tokens, keep=[place])
    features = (kept[place] @ W_enc.T + b_enc).relu()
    edits = {f"layers.{1 + i}.mlp": lambda x, i=i: x - features / 2 @ W_dec[:, i] for i in range(3)}
    return [(logits, run(tokens, edits)[0])]


@method(
    "Interchange in a subspace (causal abstraction)",
    "bases.md#interchange-and-subspaces-that-carry-a-variable",
    "Geiger et al. 2021",
    "https://arxiv.org/abs/2106.02997",
)
@torch.no_grad()
def subspace() -> Sequence[Pair]:
    clean, corrupted = pairs().clean, pairs().corrupted
    basis = torch.linalg.qr(drawn(128, 5)).Q
    with ours().basis("blocks.1.hook_resid_post", "subspace", Directions(basis)) as point:
        logits = interchange(ours(), corrupted, clean, point)
    stream = streams(clean)[2]
    edit = lambda x: x + (stream - x) @ basis @ basis.T
    return [(logits, run(corrupted, {"layers.1": edit})[0])]


def contrasted() -> tuple[list[str], list[str]]:
    """Return two sets of prompts of one length: about capitals, and about languages."""
    from bridge.embedded.language import FACTS, PHRASINGS

    names = [place for place, _ in FACTS["capital"][:12]]
    return tuple(
        [PHRASINGS[kind][0].format(s=place) for place in names] for kind in ("capital", "language")
    )


def last_streams(texts: Sequence[str]) -> Tensor:
    """Return the output of layer 1 at each text's last token."""
    return torch.stack([streams(ours().to_tokens(text))[2][0, -1] for text in texts])


def mean_difference() -> Tensor:
    """Return the difference of the two sets' means."""
    return last_streams(contrasted()[0]).mean(0) - last_streams(contrasted()[1]).mean(0)


POINT = "blocks.1.hook_resid_post"


@method(
    "Difference of means",
    "bases.md#directions",
    "Marks and Tegmark 2023",
    "https://arxiv.org/abs/2310.06824",
)
@torch.no_grad()
def means() -> Sequence[Pair]:
    """The unit vector between the means of the prompts that are not held out: the same draws."""
    own = direction(ours(), *contrasted(), POINT, held_out=0.25, seed=0).vector
    generator, means = torch.Generator().manual_seed(0), []
    for texts in contrasted():
        kept = torch.randperm(len(texts), generator=generator)[len(texts) // 4 :]
        means.append(last_streams([texts[row] for row in kept]).mean(0))
    vector = means[0] - means[1]
    return [(own, vector / vector.norm())]


@method(
    "Contrastive activation addition",
    "how_to_contrastive_activation_addition.md",
    "Panickssery et al. 2023",
    "https://arxiv.org/abs/2312.06681",
)
@torch.no_grad()
def activation_addition() -> Sequence[Pair]:
    """At every token after the prompt's fifth, as for an answer."""
    vector = mean_difference()
    add = Add(vector, 1.5, positions=slice(5, None))
    logits = ours().run_with_hooks(pairs().clean, fwd_hooks=[(POINT, add)])
    later = (torch.arange(pairs().clean.shape[1]) >= 5)[:, None]
    return [(logits, run(pairs().clean, {"layers.1": lambda x: x + 1.5 * later * vector})[0])]


@method(
    "Activation addition from a pair of prompts",
    "how_to_contrastive_activation_addition.md",
    "Turner et al. 2023",
    "https://arxiv.org/abs/2308.10248",
)
@torch.no_grad()
def steering() -> Sequence[Pair]:
    """The difference of two prompts' streams, added at the first positions."""
    one, other = (ours().to_tokens(text) for text in ("The capital of Spain", "Mary and John went"))
    name = "blocks.1.hook_resid_pre"
    caches = [ours().run_with_cache(tokens, names_filter=name)[1] for tokens in (one, other)]
    vector = caches[0][name][0] - caches[1][name][0]

    def add(stream: Tensor, hook: object) -> None:
        stream[:, : len(vector)] += 3.0 * vector

    logits = ours().run_with_hooks(pairs().clean, fwd_hooks=[(name, add)])
    added = streams(one)[1][0] - streams(other)[1][0]

    def edit(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, : len(added)] += 3.0 * added
        return x

    return [(logits, run(pairs().clean, {">layers.1": edit})[0])]


WRITERS = ["embed_tokens"]
WRITERS += [f"layers.{layer}.{part}" for layer in range(LAYERS) for part in ("self_attn", "mlp")]


@method(
    "Refusal direction, removed from the weights",
    "how_to_refusal_ablation.md",
    "Arditi et al. 2024",
    "https://arxiv.org/abs/2406.11717",
)
@torch.no_grad()
def removed() -> Sequence[Pair]:
    vector = mean_difference()
    changed = TransformerBridge.boot_embedded().to(torch.float64)
    write_into_weights(changed, vector)
    unit = vector / vector.norm()
    edits = {place: lambda x: x - (x @ unit)[..., None] * unit for place in WRITERS}
    return [(changed(pairs().clean), run(pairs().clean, edits)[0])]


@method(
    "Direction projected out of every stream",
    "how_to_refusal_ablation.md",
    "Arditi et al. 2024",
    "https://arxiv.org/abs/2406.11717",
)
@torch.no_grad()
def projected() -> Sequence[Pair]:
    vector = mean_difference()
    names = [
        f"blocks.{layer}.hook_resid_{part}" for layer in range(LAYERS) for part in ("pre", "mid")
    ]
    logits = ours().run_with_hooks(
        pairs().clean, fwd_hooks=[(name, ProjectOut(vector)) for name in names]
    )
    unit = vector / vector.norm()
    # What is taken out of the stream at `mid` is taken out of the attention's output, too.
    places = [">layers.0", *(f"layers.{i}.self_attn" for i in range(LAYERS))]
    places += [f"layers.{i}.mlp" for i in range(LAYERS - 1)]
    edits = {place: lambda x: x - (x @ unit)[..., None] * unit for place in places}
    return [(logits, run(pairs().clean, edits)[0])]


@method(
    "Function vector",
    "how_to_function_vectors.md",
    "Todd et al. 2023",
    "https://arxiv.org/abs/2310.15213",
)
@torch.no_grad()
def function_vector() -> Sequence[Pair]:
    """Mean outputs of two heads over prompts, summed and added at the last token."""
    heads = [(0, 1), (1, 2)]
    _, cache = ours().run_with_cache(pairs().corrupted)
    own = sum(
        cache["z", layer][:, -1, head].mean(0) @ ours().W_O[layer, head] for layer, head in heads
    )
    logits = ours().run_with_hooks(pairs().clean, fwd_hooks=[(POINT, Add(own, 2.0, positions=-1))])
    zs = heads_of(pairs().corrupted)
    vector = sum(head_output(zs[layer], layer, head)[:, -1].mean(0) for layer, head in heads)

    def edit(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, -1] += 2.0 * vector
        return x

    return [(own, vector), (logits, run(pairs().clean, {"layers.1": edit})[0])]


@method(
    "Coordinates of two tokens, exchanged",
    "how_to_jacobian_lens.md",
    "Gurnee et al. 2026",
    "https://transformer-circuits.pub/2026/workspace/index.html",
)
@torch.no_grad()
def swapped() -> Sequence[Pair]:
    """The coordinates by least squares, in the plane of the two directions."""
    tokens = [" Mary", " John"]
    swap = Swap(*Lens(ours()).vectors(tokens, 2).double())
    logits = ours().run_with_hooks(pairs().clean, fwd_hooks=[(POINT, swap)])
    rows = hf().lm_head.weight[[ours().to_single_token(token) for token in tokens]]

    def edit(x: Tensor) -> Tensor:
        old = x @ torch.linalg.pinv(rows)
        return x + (old.flip(-1) - old) @ rows

    return [(logits, run(pairs().clean, {"layers.1": edit})[0])]


@method(
    "Mean ablation of a head",
    "patching.md",
    "Wang et al. 2022",
    "https://arxiv.org/abs/2211.00593",
)
@torch.no_grad()
def mean_ablation() -> Sequence[Pair]:
    _, cache = ours().run_with_cache(pairs().corrupted)
    mean = cache["z", 1].mean((0, 1))[[2]]
    logits = ours().run_with_hooks(
        pairs().clean, fwd_hooks=[("blocks.1.attn.hook_z", Set(mean, heads=[2]))]
    )
    z = heads_of(pairs().corrupted)[1].mean((0, 1))
    edit = lambda x: put_head(2, z.expand_as(x))(x)
    return [(logits, run(pairs().clean, {">layers.1.self_attn.o_proj": edit})[0])]


@method(
    "Circuit with constants in place of the rest",
    "circuits.md",
    "Li and Janson 2024",
    "https://arxiv.org/abs/2409.09951",
)
@torch.no_grad()
def constants() -> Sequence[Pair]:
    """A circuit of nodes whose other senders give a constant: their outputs are replaced."""
    clean, corrupted, metric = pairs().clean, pairs().corrupted, pairs().metric()
    own = graph()
    values = drawn(len(own.senders), 128) / 8
    out = ["L1H2", "L2MLP"]
    edges = own.exists.clone()
    edges[:, [own.senders.index(name) for name in out]] = False
    evaluation = Circuit(own, edges).evaluate(ours(), clean, corrupted, metric, ablation=values)
    heads, mlp = (values[own.senders.index(name)] for name in out)
    z = heads_of(clean)[1]
    change = heads - head_output(z, 1, 2)
    edits = {
        "layers.1.self_attn": lambda x: x + change,
        "layers.2.mlp": lambda x: mlp.expand_as(x),
    }
    right = difference(run(clean, edits)[0])
    return [(numbers([evaluation.circuit]), right[None])]


# --------------------------------------------------------------------------------------------------
# Attention patterns.
# --------------------------------------------------------------------------------------------------


@method(
    "Suppression of sentences",
    "how_to_thought_anchors.md",
    "Bogdan et al. 2025",
    "https://arxiv.org/abs/2506.19143",
)
@torch.no_grad()
def suppressed() -> Sequence[Pair]:
    """The test's computation from masks of transformers."""
    from tests.patching.test_sentences import by_hand

    bridge = TransformerBridge.boot_embedded()
    bridge.tokenizer.chat_template = TEMPLATE
    spans = bridge.spans(CHAT).sentences()
    values = suppression(bridge, spans, log=True)
    return [(values, torch.from_numpy(by_hand(bridge, spans, True)))]


@method(
    "Receiver heads: vertical scores and kurtosis",
    "how_to_thought_anchors.md",
    "Bogdan et al. 2025",
    "https://arxiv.org/abs/2506.19143",
)
@torch.no_grad()
def receiver_heads() -> Sequence[Pair]:
    """Means of blocks of the pattern, their columns' means, and scipy's kurtosis."""
    bridge = ours()
    bridge.tokenizer.chat_template = TEMPLATE
    spans, nearest = bridge.spans(CHAT).sentences(), 1
    statistics = PatternStatistics(groups=spans)
    bridge.run_with_callback(CHAT, statistics, lambda name: name.endswith("hook_pattern"))
    attention = hf()(spans.tokens, output_attentions=True).attentions
    result = []
    for layer, pattern in enumerate(attention):
        blocks = torch.tensor(
            [
                [
                    [float(head[a.start : a.end, b.start : b.end].mean()) for b in spans]
                    for a in spans
                ]
                for head in pattern[0]
            ]
        )
        name = f"blocks.{layer}.attn.hook_pattern"
        between = statistics.between[name][0].double()
        own = vertical_scores(between, nearest)
        n = len(spans)
        right = torch.full((HEADS, n), torch.nan, dtype=torch.float64)
        for column in range(n - nearest):
            right[:, column] = blocks[:, column + nearest :, column].mean(-1)
        result += [(own, right)]
        flat = stats.kurtosis(right.numpy(), axis=-1, nan_policy="omit")
        result += [(kurtosis(own), torch.from_numpy(np.asarray(flat)))]
    return result


@method(
    "Induction, previous-token and duplicate-token scores",
    "hook_points.md",
    "Olsson et al. 2022",
    "https://arxiv.org/abs/2209.11895",
)
@torch.no_grad()
def head_scores() -> Sequence[Pair]:
    """The share of a head's attention that goes where the pattern says."""
    half = torch.randint(10, 654, (12,), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([half, half])
    n = len(tokens)
    attention = torch.stack(hf()(tokens[None], output_attentions=True).attentions)[:, 0]
    place, result = torch.arange(n), []
    earlier = (tokens[:, None] == tokens) & (place < place[:, None])
    right = {
        "previous_token_head": place == place[:, None] - 1,
        "duplicate_token_head": earlier,
        "induction_head": torch.nn.functional.pad(earlier, (1, 0))[:, :-1],
    }
    for name, pattern in right.items():
        own = detect_head(ours(), tokens, name)
        result.append((own, (attention * pattern).sum((-1, -2)) / attention.sum((-1, -2))))
    return result


@method(
    "Composition scores of heads",
    "analysis.md",
    "Elhage et al. 2021",
    "https://transformer-circuits.pub/2021/framework/index.html",
)
@torch.no_grad()
def composition() -> Sequence[Pair]:
    """The norms of whole products, for value composition."""
    own = ours().all_composition_scores("V")
    right = torch.zeros_like(own)
    ov = {}
    for layer in range(LAYERS):
        for head in range(HEADS):
            v, o = (module(f"layers.{layer}.self_attn.{x}_proj").weight for x in "vo")
            gain = module(f"layers.{layer}.input_layernorm").weight
            plain = v[of_head(head)].T @ o[:, of_head(head)].T
            ov[layer, head] = plain, gain
    for (a, i), (one, _) in ov.items():
        for (b, j), (other, _) in ov.items():
            if a < b:
                right[a, i, b, j] = (one @ other).norm() / one.norm() / other.norm()
    return [(own, right)]


RULES = {
    "gim": ("GIM", "Edin et al. 2025", "https://arxiv.org/abs/2505.17630"),
    "relp": ("RelP", "Rezaei Jafari et al. 2025", "https://arxiv.org/abs/2508.21258"),
    "attnlrp": ("AttnLRP", "Achtibat et al. 2024", "https://arxiv.org/abs/2402.05602"),
}


def _by_rules(name: str) -> Sequence[Pair]:
    """Return the attribution of input tokens under gradient rules."""
    from tests.run.test_rules import by_hand

    tokens, answer = pairs().clean, 7
    own = token_attribution(ours(), tokens, lambda logits: logits[:, -1, answer].sum(), name)
    embeddings = hf().get_input_embeddings()(tokens).detach().requires_grad_()
    logits = by_hand(hf(), embeddings, declared_rules(name))
    (slope,) = torch.autograd.grad(logits[:, -1, answer].sum(), embeddings)
    return [(own, (slope * embeddings).sum(-1).detach())]


for _rules, (_title, *_paper) in RULES.items():
    method(f"Gradient rules: {_title}", "how_to_gradient_rules.md", *_paper)(
        functools.partial(_by_rules, _rules)
    )
