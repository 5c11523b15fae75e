"""Edge attribution against forward and backward passes, and circuits of the shipped model and of
SmolLM2-135M.

    python benchmarks/circuits.py mib THEIRS FOLDER    every method beside the code of the
    Mechanistic Interpretability
                                                       Benchmark: see benchmarks/against_mib.py
    python benchmarks/circuits.py time                 EAP-IG of all edges of a 12-layer d768 GPT-2,
    one pair python benchmarks/circuits.py shipped              the shipped model's IOI circuit
    python benchmarks/circuits.py smollm FOLDER        SmolLM2-135M-Instruct's, from the folder of
    its GGUF file python benchmarks/circuits.py graph TOKENS LIMIT   the graph of features of a
    random model of SmolLM2-135M's size;
                                                       with FILE: its adjacency stands there
    python benchmarks/circuits.py need                 memory of such graphs by tokens and features,
    and what a larger
                                                       model's would need by that

Times are alternated with what they are compared with, and given as medians of the ratios.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import against_mib
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from bridge import TransformerBridge
from bridge.circuits import (
    EdgeScores,
    Graph,
    edge_attribution,
    edge_effects,
    faithfulness_curve,
    logit_difference,
)
from bridge.circuits.edge_runs import ablate, evaluations
from bridge.features import attribution_graph
from bridge.tasks import Pairs, embedded_pairs, ioi

SHARES = (0.02, 0.05, 0.1, 0.2)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def times(rounds: int = 7) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=768, n_head=12)).eval()
    bridge = TransformerBridge(model)
    graph = Graph.of(bridge)
    clean, corrupted = torch.randint(0, 50000, (2, 1, 15))
    metric = logit_difference(torch.tensor([7]), torch.tensor([9]))

    def attribute(method: str = "inputs") -> EdgeScores:
        return edge_attribution(bridge, clean, corrupted, metric, method, steps=5, graph=graph)

    def training() -> None:
        model.zero_grad()
        metric(model(clean).logits).backward()

    def to_the_input() -> None:
        embedded = model.transformer.wte(clean).detach().requires_grad_()
        torch.autograd.grad(metric(model(inputs_embeds=embedded).logits), embedded)

    attribute(), training(), to_the_input()
    ours, plain, light = [], [], []
    for _ in range(rounds):
        ours.append(seconds(attribute))
        plain.append(seconds(training))
        light.append(seconds(to_the_input))
    against, against_light = (
        statistics.median(a / b for a, b in zip(ours, other, strict=True))
        for other in (plain, light)
    )
    print(f"{graph}, 15 tokens: EAP-IG with 5 steps {statistics.median(ours):.2f} s")
    print(
        f"  forward and backward passes with gradients of the weights in that time: {against:.1f}"
    )
    print(f"  forward and backward passes with gradients of the input alone: {against_light:.1f}")
    slow = seconds(lambda: attribute("activations"))
    print(
        f"  EAP-IG over activations, 5 steps: {slow:.1f} s, {slow / statistics.median(plain):.0f}"
        " of the former passes"
    )


def table(bridge: TransformerBridge, pairs: Pairs, held_out: Pairs, scores: EdgeScores) -> None:
    """Circuits of several sizes, on the prompts that they were found with and on others."""
    circuits = [scores.greedy(round(share * scores.graph.n_edges)) for share in SHARES]
    masks = [(circuit.mask, None) for circuit in circuits]
    figures = []
    for some in (pairs, held_out):
        pair = ablate(bridge, scores.graph, some.clean, some.corrupted, "resample", None, {})
        figures.append(evaluations(bridge, pair, masks, some.metric()))
    for share, circuit, *found in zip(SHARES, circuits, *figures, strict=True):
        numbers = "   ".join(
            f"{one.faithfulness:6.3f} {one.complement_faithfulness:7.3f}" for one in found
        )
        nodes = len(circuit.pruned().nodes)
        print(f"  {share:5.0%} {circuit.n_edges:6} edges, {nodes:3} nodes  {numbers}", flush=True)


def shipped() -> None:
    bridge = TransformerBridge.boot_embedded()
    pairs, held_out = (
        embedded_pairs(bridge, "ioi", 32, seed=0),
        embedded_pairs(bridge, "ioi", 64, seed=5),
    )
    metric = pairs.metric()
    start = time.perf_counter()
    exact = edge_effects(bridge, pairs.clean, pairs.corrupted, metric, verbose=False)
    print(
        f"{exact.graph}; exact patching of all edges, {len(pairs)} pairs:"
        f" {time.perf_counter() - start:.1f} s"
    )
    top = exact.values.abs().flatten().topk(20).indices
    for method in ("gradient", "inputs", "activations", "own_activations"):
        scores = edge_attribution(bridge, pairs.clean, pairs.corrupted, metric, method)
        both = torch.stack([scores.flat, exact.flat])
        ranks = both.argsort(-1).argsort(-1).double()
        same = (scores.values.flatten()[top].sign() == exact.values.flatten()[top].sign()).sum()
        print(
            f"{method:>12}: correlation with exact patching {torch.corrcoef(both)[0, 1]:.4f}, of"
            f" ranks {torch.corrcoef(ranks)[0, 1]:.3f}; signs of the top 20 edges equal: {same}"
        )
    for name, scores in (
        ("exact", exact),
        ("inputs", edge_attribution(bridge, pairs.clean, pairs.corrupted, metric)),
    ):
        print(
            f"by {name}: faithfulness and that of the complement, on these prompts and on 64 others"
        )
        table(bridge, pairs, held_out, scores)
        smallest = next(
            n
            for n in range(1, scores.graph.n_edges)
            if scores.greedy(n).evaluate(bridge, pairs.clean, pairs.corrupted, metric).faithfulness
            > 0.85
        )
        found = scores.greedy(smallest).evaluate(
            bridge, held_out.clean, held_out.corrupted, held_out.metric()
        )
        print(
            f"  smallest above 0.85: {smallest} edges, {found.share:.1%}; on the others"
            f" {found.faithfulness:.3f}"
        )
        for ablation in ("mean", "zero"):
            one = scores.greedy(round(0.1 * scores.graph.n_edges))
            found = one.evaluate(bridge, pairs.clean, pairs.corrupted, metric, ablation)
            print(
                f"  10 % under {ablation}: {found.faithfulness:.3f}, complement"
                f" {found.complement_faithfulness:.3f}"
            )
        curve = faithfulness_curve(
            scores, bridge, held_out.clean, held_out.corrupted, held_out.metric(), choose="greedy"
        )
        print(f"  CPR {curve.cpr:.3f}, CMD {curve.cmd:.3f}")


def smollm(folder: Path) -> None:
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=file).eval()
    bridge = TransformerBridge(model, tokenizer)
    model.requires_grad_(False)
    begin, used = time.perf_counter(), time.process_time()
    pairs, held_out = ioi(bridge, 8, seed=0), ioi(bridge, 8, seed=5)
    with torch.no_grad():
        difference = pairs.metric()(bridge(pairs.clean)).item()
        print(
            f"{len(pairs)} pairs of {pairs.clean.shape[1]} tokens; logit difference"
            f" {difference:.2f}"
        )
        logits = bridge(held_out.clean)[:, -1]
        right = (
            (
                logits.gather(1, held_out.answers[:, None])
                > logits.gather(1, held_out.wrong[:, None])
            )
            .float()
            .mean()
        )
        print(f"the indirect object is likelier in {right:.0%} of {len(held_out)} others")
    start = time.perf_counter()
    scores = edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric())
    print(
        f"{scores.graph}: EAP-IG, 5 steps, {len(pairs)} pairs: {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    start = time.perf_counter()
    print("by EAP-IG: faithfulness and that of the complement, on these prompts and on the others")
    table(bridge, pairs, held_out, scores)
    print(
        f"evaluation: {time.perf_counter() - start:.0f} s; all: {time.perf_counter() - begin:.0f}"
        f" s, and {time.process_time() - used:.0f} s of a processor"
    )
    for sender, receiver, score in scores.top(15).edges:
        print(f"  {sender:>8} -> {receiver:<9} {score:+.3f}")


class Transcoder(torch.nn.Module):
    """Random features of which few are active, as in trained ones."""

    def __init__(self, d: int, n: int) -> None:
        super().__init__()
        self.W_enc, self.W_dec = torch.randn(d, n) / d**0.5, torch.randn(n, d) / n**0.5

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x / x.square().mean(-1, keepdim=True).sqrt().detach() @ self.W_enc - 1.6)

    def decode(self, features: torch.Tensor) -> torch.Tensor:
        return features @ self.W_dec


LAYERS, HEADS, WIDTH = 30, 9, 576


def placed(
    n_tokens: int, layers: int = LAYERS, features: int = 1024
) -> tuple[TransformerBridge, list[str]]:
    """A random model of SmolLM2-135M's size, with a transcoder in each layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=n_tokens,
    )
    bridge = TransformerBridge(LlamaForCausalLM(config).eval().requires_grad_(False))
    reads, writes = ("hook_resid_mid", "hook_mlp_out")
    points = [
        bridge.add_basis(
            f"blocks.{i}.{writes}", "tc", Transcoder(WIDTH, features), reads=f"blocks.{i}.{reads}"
        ).name
        for i in range(layers)
    ]
    return bridge, points


def graph_of_features(
    n_tokens: int, limit: int, file: str | None = None, layers: int = LAYERS, features: int = 1024
) -> None:
    """What a graph needs above a run with the gradients of the same activations, on Linux."""
    bridge, points = placed(n_tokens, layers, features)
    tokens = torch.randint(0, 49152, (1, n_tokens))
    with torch.no_grad():
        _, cache = bridge.run_with_cache(tokens, names_filter=points)
    active = sum(int((found != 0).sum()) for found in cache.values())
    del cache
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    start = time.process_time()
    graph = attribution_graph(bridge, tokens, points, limit=limit, file=file)
    took = time.process_time() - start
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before
    lost = float(
        graph.influence()[[node.kind == "dropped" for node in graph.nodes]].sum()
        / graph.probabilities.sum()
    )
    edges = sum(int(sent.count_nonzero()) for *_, sent in graph.rows)
    held = sum(sent.numel() for *_, sent in graph.rows)
    indices = sum(senders.numel() for _, senders, _ in graph.rows)  # of four bytes, as what is held
    places = [node.pos for node in graph.nodes if node.kind == "feature"]
    print(
        f"{n_tokens} tokens, {active} active features, {len(graph.nodes)} nodes of at most {limit}:"
        f" {took:.0f} s of a processor, {more:.0f} MB above the runs before; {lost:.0%} of the"
        f" influence lost; {edges} edges, {edges / len(graph.nodes) ** 2:.0%} of all pairs;"
        f" features at {sum(places) / len(places) / n_tokens:.0%} of the prompt on average\n "
        f" bytes: {4 * (held + indices)} as it is, {4 * len(graph.nodes) ** 2} of a table of all"
        f" pairs, {8 * edges + 4 * len(graph.nodes)} of compressed rows with indices"
    )
    if file is not None:
        print(f"  the file has {Path(file).stat().st_size / 1e6:.1f} MB")


def memory_of(n_tokens: int, features: int) -> None:
    """Prints by how many bytes the process grows for a graph of few nodes, one row at a time, on
    Linux.
    """
    bridge, points = placed(n_tokens, features=features)
    tokens = torch.randint(0, 49152, (1, n_tokens))
    attribution_graph(bridge, tokens[:, :4], points, limit=8, together=1)  # what stays is loaded
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    attribution_graph(bridge, tokens, points, limit=8, together=1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


#: Gemma-2-2B with transcoders of 16,384 features: layers, heads, width, features, parameters,
#: tokens.
LARGER = (26, 8, 2304, 16384, 2.6e9, 2000)


def need() -> None:
    """Least squares of the measured memory by features, streams and patterns, and the sum for a
    larger model.
    """
    rows, found = [], []
    for n_tokens in (64, 128, 256, 512):
        for features in (1024, 4096):
            command = [sys.executable, __file__, "memory", str(n_tokens), str(features)]
            given = os.environ | {
                "MALLOC_MMAP_THRESHOLD_": "65536"
            }  # what is free goes back to the system
            made = subprocess.run(command, check=True, capture_output=True, text=True, env=given)
            took = float(made.stdout.split()[-1])
            rows.append(
                [
                    n_tokens * LAYERS * features,
                    n_tokens * LAYERS * WIDTH,
                    LAYERS * HEADS * n_tokens**2,
                ]
            )
            found.append(took)
            print(
                f"{n_tokens} tokens, {features} features a layer: {took / 1e6:.0f} MB", flush=True
            )
    table, right = torch.tensor(rows, dtype=torch.float64), torch.tensor(found, dtype=torch.float64)
    each = torch.linalg.lstsq(table, right[:, None]).solution.flatten()
    off = ((table @ each - right).abs() / right).max()
    print(
        "bytes for each feature, each number of a stream, each of a pattern:"
        f" {[round(x, 1) for x in each.tolist()]}; off by at most {off:.0%}"
    )
    layers, heads, width, features, parameters, n_tokens = LARGER
    counts = n_tokens * layers * features, n_tokens * layers * width, layers * heads * n_tokens**2
    parts = [float(byte) * count / 1e9 for byte, count in zip(each, counts, strict=True)]
    own = [4 * parameters / 1e9, 4 * 2 * layers * width * features / 1e9]
    print(
        f"larger: {parts[0]:.1f} GB for features, {parts[1]:.1f} for streams, {parts[2]:.1f} for"
        f" patterns, weights {own[0]:.1f}, transcoders {own[1]:.1f}: {sum(parts) + sum(own):.0f} GB"
    )


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "mib" and len(sys.argv) >= 4:
        named = sys.argv[4:]
        sizes = [size for size in ("shipped", *against_mib.SIZES) if size in named] or [
            "shipped",
            "small",
            "llama",
        ]
        for size in sizes:
            against_mib.main(*sys.argv[2:4], size, *(name for name in named if name not in sizes))
    elif what == "time":
        times()
    elif what == "shipped":
        shipped()
    elif what == "smollm" and len(sys.argv) == 3:
        smollm(Path(sys.argv[2]))
    elif what == "graph" and len(sys.argv) in (4, 5):
        graph_of_features(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    elif what == "need":
        need()
    elif what == "memory":
        memory_of(int(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(__doc__)
