"""Methods beside other people's packages: those of `make clients`."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.methods.by_hand import drawn, streams
from benchmarks.methods.hooked import HEADS, LAYERS, ours, pairs, run
from benchmarks.methods.table import Pair, method, numbers
from bridge import Rules, TransformerBridge
from bridge.analysis.head_detector import detect_head
from bridge.bases import Directions
from bridge.circuits import edge_attribution, edge_effects, node_attribution
from bridge.embedded import MODEL_DIR
from bridge.features import interchange, token_attribution
from bridge.interventions import FittedProbe, Probe
from bridge.interventions.probes import AGGREGATIONS
from bridge.lens import TunedLens
from bridge.patching import (
    get_act_patch_attn_head_out_all_pos,
    get_act_patch_attn_head_pattern_all_pos,
    get_act_patch_resid_pre,
)

HERE = Path(__file__).parent
THEIR_LIBRARY = "TransformerLens 4.3.0"

# --------------------------------------------------------------------------------------------------
# TransformerLens 4.3, in a process of its own.
# --------------------------------------------------------------------------------------------------


def repeated() -> Tensor:
    """Return random tokens, twice."""
    half = torch.randint(10, 654, (12,), generator=torch.Generator().manual_seed(0))
    return torch.cat([half, half])


def subspace() -> Tensor:
    return torch.linalg.qr(drawn(128, 5)).Q


@functools.cache
def theirs() -> Mapping[str, Any]:
    """Return what TransformerLens computes."""
    from tests.clients.conftest import TRANSFORMER_LENS_4

    inputs = {
        "folder": str(MODEL_DIR),
        "clean": pairs().clean,
        "corrupted": pairs().corrupted,
        "answers": pairs().answers,
        "wrong": pairs().wrong,
        "repeated": repeated(),
        "basis": subspace(),
    }
    environment = os.environ | {"PYTHONPATH": str(TRANSFORMER_LENS_4), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/inputs.pt", f"{folder}/outputs.pt"]
        torch.save(inputs, files[0])
        command = [sys.executable, HERE / "their_transformer_lens.py", *files]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(result.stderr[-3000:])
        return torch.load(files[1], weights_only=False)


def swept(name: str, sweep: Any) -> Sequence[Pair]:
    """Return a table of patching on both sides."""
    _, cache = ours().run_with_cache(pairs().clean)
    table = sweep(ours(), pairs().corrupted, cache, pairs().metric(), verbose=False)
    return [(table, theirs()[name])]


@method(
    "Activation patching: streams",
    "how_to_activation_patching.md",
    "Meng et al. 2022",
    "https://arxiv.org/abs/2202.05262",
    THEIR_LIBRARY,
)
@torch.no_grad()
def patched_streams() -> Sequence[Pair]:
    return swept("resid_pre", get_act_patch_resid_pre)


@method(
    "Activation patching: heads and their patterns",
    "how_to_activation_patching.md",
    "Zhang and Nanda 2023",
    "https://arxiv.org/abs/2309.16042",
    THEIR_LIBRARY,
)
@torch.no_grad()
def patched_heads() -> Sequence[Pair]:
    return [
        *swept("heads", get_act_patch_attn_head_out_all_pos),
        *swept("patterns", get_act_patch_attn_head_pattern_all_pos),
    ]


@method(
    "Path patching: head to head, direct",
    "how_to_path_patching.md",
    "Goldowsky-Dill et al. 2023",
    "https://arxiv.org/abs/2304.05969",
    THEIR_LIBRARY,
)
@torch.no_grad()
def direct_paths() -> Sequence[Pair]:
    """They patch clean into corrupted, and let the rest follow: exact effects of edges."""
    names = [f"L0H0->L{layer}H{head}.v" for layer in range(1, LAYERS) for head in range(HEADS)]
    metric, tokens = pairs().metric(), (pairs().corrupted, pairs().clean)
    effects = edge_effects(ours(), *tokens, metric, names, verbose=False)
    start = float(metric(ours()(pairs().corrupted)))
    values = numbers([effects[name] + start for name in names]).reshape(LAYERS - 1, HEADS)
    return [(values, theirs()["path"][1:])]


def one_pair() -> tuple[Tensor, Tensor, Any]:
    """Return the first pair, the corrupted prompt first, and its metric."""
    right, wrong = pairs().answers[0], pairs().wrong[0]
    metric = lambda logits: logits[0, -1, right] - logits[0, -1, wrong]
    return pairs().corrupted[:1], pairs().clean[:1], metric


@method(
    "Attribution patching: nodes",
    "how_to_attribution_patching.md",
    "Nanda 2023",
    "https://www.neelnanda.io/mechanistic-interpretability/attribution-patching",
    THEIR_LIBRARY,
)
def nodes() -> Sequence[Pair]:
    scores = node_attribution(ours(), *one_pair(), method="gradient")
    right = numbers([theirs()["nodes"][name] for name in scores.graph.senders])
    return [(scores.values, right)]


@method(
    "EAP: edges",
    "circuits.md",
    "Syed et al. 2023",
    "https://arxiv.org/abs/2310.10348",
    THEIR_LIBRARY,
)
def edges() -> Sequence[Pair]:
    scores = edge_attribution(ours(), *one_pair(), "gradient")
    graph = scores.graph
    places = graph.exists.nonzero().tolist()
    right = [theirs()["edges"][graph.edge_name(receiver, sender)] for receiver, sender in places]
    return [(scores.values[graph.exists], numbers(right))]


@method(
    "Interchange in a subspace",
    "bases.md#interchange-and-subspaces-that-carry-a-variable",
    "Geiger et al. 2023",
    "https://arxiv.org/abs/2303.02536",
    THEIR_LIBRARY,
)
@torch.no_grad()
def interchanged() -> Sequence[Pair]:
    with ours().basis("blocks.1.hook_resid_post", "subspace", Directions(subspace())) as point:
        logits = interchange(ours(), pairs().corrupted, pairs().clean, point)
    return [(logits, theirs()["interchange"])]


@method(
    "Head detection: induction, previous and duplicate tokens",
    "analysis.md",
    "Olsson et al. 2022",
    "https://arxiv.org/abs/2209.11895",
    THEIR_LIBRARY,
)
@torch.no_grad()
def detected() -> Sequence[Pair]:
    return [
        (detect_head(ours(), repeated(), name), scores)
        for name, scores in theirs()["detected"].items()
    ]


@functools.cache
def processed() -> TransformerBridge:
    """Return a bridge with processed weights."""
    bridge = TransformerBridge.boot_embedded().to(torch.float64)
    bridge.process_weights()
    return bridge


@method(
    "Weight processing",
    "weight_processing.md",
    "Elhage et al. 2021",
    "https://transformer-circuits.pub/2021/framework/index.html",
    THEIR_LIBRARY,
)
@torch.no_grad()
def weights() -> Sequence[Pair]:
    return [(getattr(processed(), name), value) for name, value in theirs()["weights"].items()]


@method(
    "Direct logit attribution",
    "how_to_direct_logit_attribution.md",
    "Elhage et al. 2021",
    "https://transformer-circuits.pub/2021/framework/index.html",
    THEIR_LIBRARY,
)
@torch.no_grad()
def attributed() -> Sequence[Pair]:
    """Layers, and heads: the remainder, which only they have, aside."""
    _, cache = ours().run_with_cache(pairs().clean)
    answers = pairs().answers, pairs().wrong
    result = []
    parts = {
        "component": cache.decompose_resid(pos_slice=-1, return_labels=True),
        "head": cache.stack_head_results(pos_slice=-1, return_labels=True),
    }
    for unit, (stack, labels) in parts.items():
        terms = cache.logit_attrs(stack, *answers, pos_slice=-1)
        result.append((terms, torch.stack([theirs()[unit][label] for label in labels])))
    return result


@method(
    "Composition scores",
    "analysis.md",
    "Elhage et al. 2021",
    "https://transformer-circuits.pub/2021/framework/index.html",
    THEIR_LIBRARY,
)
@torch.no_grad()
def compositions() -> Sequence[Pair]:
    return [
        (processed().all_composition_scores(mode), theirs()[f"composition {mode}"])
        for mode in "QKV"
    ]


@functools.cache
def jacobian() -> Any:
    """Return both sides of the test of Jacobian lenses."""
    import json

    from tests.clients.test_jacobian_lens import fit, plan_of, run_theirs

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "embedded").mkdir()
        bridge, texts, pair, path, skip_first = plan_of("embedded", folder)
        plan = {
            "model": path,
            "texts": texts,
            "prompt": texts[0],
            "pair": pair,
            "skip_first": skip_first,
            "max_tokens": 128,
            "layer": 1,
            "k": 6,
            "file": str(folder / "lens.pt"),
        }
        (folder / "embedded" / "plan.json").write_text(json.dumps(plan), "utf-8")
        run_theirs(folder)
        results = torch.load(folder / "embedded" / "theirs.pt")
    return bridge, plan, results, fit(bridge, plan, texts)


JACOBIAN = (
    "how_to_jacobian_lens.md",
    "Gurnee et al. 2026",
    "https://transformer-circuits.pub/2026/workspace/index.html",
    THEIR_LIBRARY,
)


@method("Jacobian lens: matrices", *JACOBIAN)
def jacobian_matrices() -> Sequence[Pair]:
    _, _, results, lens = jacobian()
    return [(lens.maps[layer + 1], matrix) for layer, matrix in results["maps"].items()]


@method("Jacobian lens: readout", *JACOBIAN)
def jacobian_readout() -> Sequence[Pair]:
    bridge, plan, results, lens = jacobian()
    reading = bridge.lens(torch.tensor(plan["prompt"]), lens)
    return [(reading.logits(layer + 1)[0], logits) for layer, logits in results["readout"].items()]


@method("Jacobian lens: coordinates exchanged, ablated", *JACOBIAN)
@torch.no_grad()
def jacobian_edits() -> Sequence[Pair]:
    from bridge.interventions import ProjectOut, Swap
    from tests.clients.test_jacobian_lens import points

    bridge, plan, results, lens = jacobian()
    prompt, pair = torch.tensor([plan["prompt"]]), plan["pair"]
    vectors = {name: lens.vectors(pair, layer) for layer, name in points(bridge, plan)}
    edits = {
        "swap": [(name, Swap(*rows, scale=1.5)) for name, rows in vectors.items()],
        "ablation": [(name, ProjectOut(rows, positions=-1)) for name, rows in vectors.items()],
    }
    return [
        (bridge.run_with_hooks(prompt, fwd_hooks=hooks), results["edited"][name])
        for name, hooks in edits.items()
    ]


@method("Jacobian lens: sparse decomposition", *JACOBIAN)
@torch.no_grad()
def jacobian_parts() -> Sequence[Pair]:
    bridge, plan, results, lens = jacobian()
    _, cache = bridge.run_with_cache(torch.tensor([plan["prompt"]]))
    streams = cache[f"blocks.{plan['layer']}.hook_resid_post"][0]
    parts = lens.decompose(streams, plan["layer"] + 1, k=plan["k"])
    result = []
    for own, (selected, _, _, *vectors) in zip(parts, results["decompositions"], strict=True):
        assert torch.equal(own.tokens, selected)
        result += zip((own.reconstruction, own.component, own.rest), vectors, strict=True)
    return result


@method("Jacobian lens: occupancy", *JACOBIAN)
@torch.no_grad()
def jacobian_occupancy() -> Sequence[Pair]:
    bridge, plan, results, lens = jacobian()
    _, cache = bridge.run_with_cache(torch.tensor([plan["prompt"]]))
    streams = cache[f"blocks.{plan['layer']}.hook_resid_post"][0, -3:]
    estimates = lens.occupancy(streams, plan["layer"] + 1, most=8, controls=4)
    result = []
    for own, (count, _, *shares) in zip(estimates, results["occupancies"], strict=True):
        assert own.count == count
        result += zip((own.captured, own.control), shares, strict=True)
    return result


# --------------------------------------------------------------------------------------------------
# Other packages.
# --------------------------------------------------------------------------------------------------


@method(
    "Tuned lens",
    "how_to_logit_lens.md",
    "Belrose et al. 2023",
    "https://arxiv.org/abs/2303.08112",
    "tuned-lens",
)
@torch.no_grad()
def tuned_lens() -> Sequence[Pair]:
    """A trained lens of ours, in their class, from its file."""
    from tuned_lens.nn.lenses import TunedLens as TheirTunedLens
    from tuned_lens.nn.unembed import Unembed

    bridge, prompt = TransformerBridge.boot_embedded(), pairs().clean
    with torch.enable_grad():
        lens = TunedLens.fit(bridge, [pairs().corrupted], epochs=20, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        lens.save(folder)
        unembed = Unembed(bridge.original_model)
        other = TheirTunedLens.from_unembed_and_pretrained(unembed, folder)
    reading = bridge.lens(prompt, lens)
    hidden = bridge.original_model(prompt, output_hidden_states=True).hidden_states
    return [(reading.logits(layer), other(hidden[layer], layer)) for layer in range(LAYERS)]


@method(
    "EAP: edges of a tiny model",
    "circuits.md",
    "Syed et al. 2023",
    "https://arxiv.org/abs/2310.10348",
    "auto-circuit",
    "tiny HookedTransformer, random",
)
def auto_circuit() -> Sequence[Pair]:
    """Their loss is the negative mean of the answers' difference; an MLP is a node of one layer."""
    import json

    from transformer_lens import HookedTransformer

    from tests.clients import test_auto_circuit as test

    name, pair = str(MODEL_DIR), test.EXAMPLES
    model: HookedTransformer = test.tiny(name).eval()
    patchable = test.patchable_model(
        test.tiny(name), factorized=True, slice_output="last_seq", separate_qkv=True
    )
    prompts = [
        {
            "clean": text,
            "corrupt": text.replace(right, wrong, 1),
            "answers": [right],
            "wrong_answers": [wrong],
        }
        for text, right, wrong in pair
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.json"
        path.write_text(json.dumps({"prompts": prompts}))
        loader, _ = test.load_datasets_from_json(
            model=patchable,
            path=path,
            device=torch.device("cpu"),
            prepend_bos=True,
            batch_size=2,
            train_test_size=(2, 0),
            return_seq_length=False,
            tail_divergence=False,
        )
    scores = test.edge_attribution_patching_prune_scores(
        patchable, loader, official_edges=None, answer_diff=True
    )
    (batch,) = loader
    answers, wrong = (
        torch.tensor([int(x) for x in xs]) for xs in (batch.answers, batch.wrong_answers)
    )
    rows = torch.arange(len(answers))

    def metric(logits: Tensor) -> Tensor:
        last = logits[:, -1]
        return (last[rows, wrong] - last[rows, answers]).mean()

    own = edge_attribution(model, batch.clean, batch.corrupt, metric, "gradient")
    values, right = [], []
    for edge in patchable.edges:
        values.append(own[f"{_sender(edge.src.name)}->{_receiver(edge.dest.name)}"])
        right.append(scores[edge.dest.module_name][edge.patch_idx])
    return [(torch.tensor(values), torch.stack(right))]


def _sender(name: str) -> str:
    """Return the name in our graph of ``A0.1``, ``MLP 1`` or ``Resid Start``."""
    if name.startswith("A"):
        layer, head = name[1:].split(".")
        return f"L{layer}H{head}"
    return "embed" if name == "Resid Start" else f"L{name.split()[1]}MLP"


def _receiver(name: str) -> str:
    """Return the name in our graph of ``A0.1.Q``, ``MLP 1`` or ``Resid End``."""
    if name.startswith("A"):
        head, side = name.rsplit(".", 1)
        return f"{_sender(head)}.{side.lower()}"
    return "logits" if name == "Resid End" else _sender(name)


@method(
    "Interchange of activations",
    "bases.md#interchange-and-subspaces-that-carry-a-variable",
    "Geiger et al. 2021",
    "https://arxiv.org/abs/2106.02997",
    "pyvene",
    "tiny GPT-2, random",
)
@torch.no_grad()
def exchanged() -> Sequence[Pair]:
    import pyvene

    return _with_pyvene(pyvene.VanillaIntervention)


@method(
    "Distributed alignment search: an exchanged subspace",
    "bases.md#interchange-and-subspaces-that-carry-a-variable",
    "Geiger et al. 2023",
    "https://arxiv.org/abs/2303.02536",
    "pyvene",
    "tiny GPT-2, random",
)
@torch.no_grad()
def rotated() -> Sequence[Pair]:
    import pyvene

    return _with_pyvene(pyvene.LowRankRotatedSpaceIntervention)


def _with_pyvene(kind: Any) -> Sequence[Pair]:
    """Return the logits with one position exchanged, at each point of the test."""
    import pyvene

    from tests.clients.test_pyvene import BASE, POINTS, SOURCE, bridge

    own, result = bridge.__wrapped__(), []
    for component, point in POINTS.items():
        config = pyvene.IntervenableConfig(
            {"layer": 1, "component": component, "unit": "pos", "low_rank_dimension": 3}, kind
        )
        model = pyvene.IntervenableModel(config, own.original_model)
        _, other = model(
            {"input_ids": BASE},
            [{"input_ids": SOURCE}],
            {"sources->base": 2},
            output_original_output=False,
        )
        (step,) = model.interventions.values()
        step = step[0] if isinstance(step, tuple) else step
        width = 64 if component == "mlp_activation" else 16
        rotated = hasattr(step, "rotate_layer")
        basis = step.rotate_layer.weight if rotated else torch.eye(width)
        with own.basis(point, "subspace", Directions(basis.detach())) as hook:
            logits = interchange(own, BASE, SOURCE, hook, position=2)
        result.append((logits, other.logits))
    return result


@method(
    "Gradient rules: GIM's norms, queries, keys and values",
    "how_to_gradient_rules.md",
    "Edin et al. 2025",
    "https://arxiv.org/abs/2505.17630",
    "gim-explain",
    "tiny GPT-2, random",
)
def gim_rules() -> Sequence[Pair]:
    """Its rule of the softmax acts on eager attention only, where those of q, k, v do not."""
    import gim

    from tests.clients.test_gradient_rules import TOKENS
    from tests.tiny_models import tiny_model

    factors = {"q": 0.25, "k": 0.25, "v": 0.5}
    scales = {f"{letter}_scale": factor for letter, factor in factors.items()}
    model = tiny_model("gpt2", attn_implementation="sdpa")
    theirs = gim.explain(
        model, TOKENS, baseline_token_id=5, freeze_norm=True, softmax_temperature=1.0, **scales
    )
    own = token_attribution(
        TransformerBridge(model),
        TOKENS,
        lambda logits: logits[0, -1].max(),
        Rules(norms="held", **factors),
        baseline=5,
    )
    return [(own[0], theirs)]


@method(
    "Gradient rules: AttnLRP, all of them",
    "how_to_gradient_rules.md",
    "Achtibat et al. 2024",
    "https://arxiv.org/abs/2402.05602",
    "lxt",
    "tiny Llama, random",
)
def attnlrp_rules() -> Sequence[Pair]:
    from tests.clients.test_gradient_rules import TOKENS, by_lxt
    from tests.tiny_models import tiny_model

    model = tiny_model("llama").double()
    metric = lambda logits: logits[0, -1, 3]
    own = token_attribution(TransformerBridge(model), TOKENS, metric, "attnlrp")
    x = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    target = metric(by_lxt(model, x))
    (relevance,) = torch.autograd.grad(target, x, target.detach())
    return [(own, relevance.sum(-1))]


SAES = {
    "standard": (
        "Bricken et al. 2023",
        "https://transformer-circuits.pub/2023/monosemantic-features",
    ),
    "gated": ("Rajamanoharan et al. 2024", "https://arxiv.org/abs/2404.16014"),
    "topk": ("Gao et al. 2024", "https://arxiv.org/abs/2406.04093"),
    "jumprelu": ("Rajamanoharan et al. 2024", "https://arxiv.org/abs/2407.14435"),
}


@torch.no_grad()
def _sae(kind: str) -> Sequence[Pair]:
    """Features, and the logits with their reconstruction, from a torch hook that calls SAELens."""
    from tests.clients.test_sae_lens_bases import made

    sae = made(kind, "resid").double()
    sae.cfg.dtype, sae.dtype = "float64", torch.float64
    with ours().basis("blocks.2.hook_resid_post", "sae", sae, error="drop") as point:
        logits, cache = ours().run_with_cache(pairs().clean, names_filter=point)
    features = {}

    def edit(x: Tensor) -> Tensor:
        features["x"] = sae.encode(x)
        return sae.decode(features["x"])

    right, _ = run(pairs().clean, {"layers.2": edit})
    return [(cache[point.name], features["x"]), (logits, right)]


for _kind, _paper in SAES.items():
    method(
        f"Sparse autoencoder in the model: {_kind}",
        "how_to_sae_features.md",
        *_paper,
        "sae-lens",
    )(functools.partial(_sae, _kind))


@torch.no_grad()
def _graph(kind: str) -> Sequence[Pair]:
    """The features' values and the edges between the nodes that both have, from stored graphs."""
    from safetensors.torch import load_file

    from bridge.features import Node, attribution_graph
    from tests.features.test_graph import (
        GRAPHS,
        READS,
        place_cross_layer,
        place_transcoders,
        reference_bridge,
    )

    result = []
    for family in ("gpt2", "llama"):
        key = f"{family}/{kind}/"
        other = {
            name.removeprefix(key): value
            for name, value in load_file(GRAPHS).items()
            if name.startswith(key)
        }
        bridge = reference_bridge(family)
        place = place_cross_layer if kind == "clt" else place_transcoders
        points = place(bridge, READS[family], other)
        tokens, ends = other["tokens"][None].long(), (7, 9, 11)
        with torch.enable_grad():
            graph = attribution_graph(
                bridge, tokens, points, logits=torch.tensor(ends), without_positions=[0]
            )
        n, mlps = tokens.shape[1], [f"blocks.{layer}.hook_mlp_out" for layer in range(2)]
        order = [Node("feature", points[a], b, c) for a, b, c in other["features"].tolist()]
        features = len(order)
        order += [Node("error", mlp, pos) for mlp in mlps for pos in range(n)]
        order += [Node("token", "hook_embed", pos) for pos in range(n)]
        order += [Node("logit", "logits", n - 1, token) for token in ends]
        at = {node: i for i, node in enumerate(graph.nodes)}
        kept = [i for i, node in enumerate(order) if node in at]
        mine = [at[order[i]] for i in kept]
        result.append((graph.values[:features], other["values"]))
        result.append((graph.adjacency[mine][:, mine], other["adjacency"][kept][:, kept]))
    return result


CIRCUIT_TRACER = "circuit-tracer 0.5.0, stored graphs", "tiny GPT-2 and Llama, random"
GRAPH_PAPER = (
    "Ameisen et al. 2025",
    "https://transformer-circuits.pub/2025/attribution-graphs/methods.html",
)
for _name, _kind in {
    "transcoders": "plain",
    "transcoders with skip paths": "skip",
    "a cross-layer transcoder": "clt",
}.items():
    method(
        f"Attribution graph: {_name}",
        "how_to_attribution_graphs.md",
        *GRAPH_PAPER,
        *CIRCUIT_TRACER,
    )(functools.partial(_graph, _kind))


@method(
    "Linear probe: coefficients",
    "how_to_probing.md",
    "Alain and Bengio 2016",
    "https://arxiv.org/abs/1610.01644",
    "scikit-learn",
    "none: random rows",
)
def probe() -> Sequence[Pair]:
    """Another solver of the same objective, to a smaller tolerance."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from tests.interventions.test_probes import POINT, separable, training_rows

    rows, labels = separable()
    own = Probe.fit(rows, labels, POINT, "last", strength=0.5, held_out=0.25, seed=1)
    train = training_rows(labels, 0.25, 1)
    regression = LogisticRegression(C=0.5, solver="newton-cholesky", tol=1e-10)
    pipeline = make_pipeline(StandardScaler(), regression)
    pipeline.fit(np.stack([x[-1].double().numpy() for x in rows])[train], labels[train])
    coefficients = regression.coef_[0] / pipeline[0].scale_
    return [(own.values[0], torch.from_numpy(coefficients))]


def _aggregation(over: str) -> Sequence[Pair]:
    """A text's readings from a run, beside the paper's sums over Hugging Face's hidden states."""
    from tests.interventions.test_probes import by_hand, probe_over

    probe: FittedProbe = probe_over(over)
    readings = ours().readings(pairs().clean.tolist(), [probe])
    own = numbers([reading["probe"].value for reading in readings])
    rows = streams(pairs().clean)[3].numpy()
    return [(own, numbers([by_hand(probe, row) for row in rows]))]


for _over in AGGREGATIONS:
    method(
        f"Probe over a text: {_over}",
        "how_to_probing.md",
        "Kramár et al. 2026",
        "https://arxiv.org/abs/2601.11516",
    )(functools.partial(_aggregation, _over))
