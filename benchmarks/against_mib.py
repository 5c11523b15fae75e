"""The time that scores of all edges take here, beside the code of the Mechanistic Interpretability Benchmark.

    python benchmarks/against_mib.py THEIRS FOLDER SIZE [ROUNDS]

THEIRS: a Python with TransformerLens 2.18; FOLDER: EAP-IG's `src`; SIZE: "small" (4 layers of 128), "gpt2" (12 of 768)
or "llama" (8 of 512, keys grouped by four).

Random models of one shape, one thread, processor time. Each side is a process that computes when it is asked, in turn;
the ratio is the median of the rounds'. Exact effects are of a few edges, but in the small model of all, and the time
that is printed is that of one.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import torch

#: Layers, width, heads, heads of keys, vocabulary, prompts.
SIZES = {
    "small": (4, 128, 4, 4, 2000, 8), "gpt2": (12, 768, 12, 12, 5000, 4), "llama": (8, 512, 8, 2, 5000, 4),
}  # fmt: skip
METHODS = {
    "gradient": "EAP", "inputs": "EAP-IG-inputs", "activations": "EAP-IG-activations", "exact": "exact",
}  # fmt: skip
LENGTH, STEPS, EDGES = 15, 5, 10
#: What takes minutes there is asked for this often.
ONCE = {("gpt2", "activations"), ("gpt2", "exact"), ("llama", "activations"), ("llama", "exact"), ("small", "exact")}


def theirs(size: str, folder: str) -> dict[str, Callable[[], Any]]:
    """Their code, on the processor, in the place of CUDA."""
    zeros = torch.zeros
    torch.zeros = lambda *shape, device=None, **more: zeros(  # type: ignore[assignment]
        *shape, device=None if device == "cuda" else device, **more
    )
    sys.path.insert(0, folder)
    sys.modules["eap.visualization"] = MagicMock()
    import eap.attribute  # type: ignore[import-not-found]
    import eap.evaluate  # type: ignore[import-not-found]
    from eap.graph import Graph  # type: ignore[import-not-found]
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    layers, width, heads, key_heads, vocabulary, rows = SIZES[size]
    kind: dict[str, Any] = {"act_fn": "gelu"}
    if size == "llama":
        kind = {
            "act_fn": "silu", "gated_mlp": True, "d_mlp": 3 * width, "normalization_type": "RMS",
            "positional_embedding_type": "rotary", "rotary_dim": width // heads, "n_key_value_heads": key_heads,
            "ungroup_grouped_query_attention": True,
        }  # fmt: skip
    model = HookedTransformer(
        HookedTransformerConfig(
            n_layers=layers, d_model=width, n_ctx=64, n_heads=heads, d_head=width // heads, d_vocab=vocabulary, seed=3,
            device="cpu", use_attn_result=True, use_split_qkv_input=True, use_hook_mlp_in=True, **kind,
        )
    )  # fmt: skip
    texts = dict(zip(("clean", "corrupted"), torch.randint(0, vocabulary, (2, rows, LENGTH)), strict=True))

    def tokenized(model: Any, inputs: list[str], max_length: int | None = None) -> tuple[Any, ...]:
        tokens = texts[inputs[0]]
        return tokens, torch.ones_like(tokens), torch.full((rows,), LENGTH), LENGTH

    for module in (eap.attribute, eap.evaluate):
        module.tokenize_plus = tokenized
    loader = [(["clean"] * rows, ["corrupted"] * rows, torch.arange(rows) + 1)]

    def metric(logits: torch.Tensor, clean: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits[torch.arange(rows), -1, labels].mean()

    def scored(method: str) -> None:
        eap.attribute.attribute(model, Graph.from_model(model), loader, metric, method, ig_steps=STEPS, quiet=True)

    def some_edges() -> None:
        graph = Graph.from_model(model)
        graph.in_graph |= graph.real_edge_mask
        edges = list(graph.edges.values())
        for edge in edges[:: len(edges) // EDGES][:EDGES]:
            edge.in_graph = False
            eap.evaluate.evaluate_graph(model, graph, loader, metric, quiet=True, skip_clean=True)
            edge.in_graph = True

    found: dict[str, Callable[[], Any]] = {name: (lambda at=at: scored(at)) for name, at in METHODS.items()}  # type: ignore[misc]
    return found | ({} if size == "small" else {"exact": some_edges})


def ours(size: str) -> dict[str, Callable[[], Any]]:
    """The same here."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from bridge import TransformerBridge
    from bridge.circuits import Graph, edge_attribution, edge_effects

    layers, width, heads, key_heads, vocabulary, rows = SIZES[size]
    if size == "llama":
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, num_key_value_heads=key_heads,
                intermediate_size=3 * width, vocab_size=vocabulary,
            )
        )  # fmt: skip
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, activation_function="gelu"
            )
        )  # fmt: skip
    bridge = TransformerBridge(model.eval())
    graph, pair = Graph.of(bridge, grouped=False), torch.randint(0, vocabulary, (2, rows, LENGTH))

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[torch.arange(rows), -1, torch.arange(rows) + 1].mean()

    def scored(method: str) -> None:
        edge_attribution(bridge, pair[0], pair[1], metric, method, STEPS, graph)

    every = graph.exists.nonzero().tolist()
    some = every if size == "small" else every[:: len(every) // EDGES][:EDGES]
    edges = [graph.edge_name(receiver, sender) for receiver, sender in some]
    found: dict[str, Callable[[], Any]] = {name: (lambda at=name: scored(at)) for name in METHODS}  # type: ignore[misc]
    return found | {"exact": lambda: edge_effects(bridge, *pair, metric, edges, verbose=False, graph=graph)}


def answer(runs: dict[str, Callable[[], Any]]) -> None:
    """Runs what it is asked for, and says what it took."""
    for line in sys.stdin:
        start = time.process_time()
        runs[line.strip()]()
        print(time.process_time() - start, file=sys.__stdout__, flush=True)


def main(python: str, folder: str, size: str, rounds: str = "9") -> None:
    """Prints a time for each method on both sides, and the ratio."""
    sides = {
        who: subprocess.Popen(
            [executable, __file__, who, size, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for who, executable in (("theirs", python), ("ours", sys.executable))
    }

    def took(who: str, method: str) -> float:
        side = sides[who]
        assert side.stdin is not None and side.stdout is not None
        side.stdin.write(f"{method}\n")
        side.stdin.flush()
        return float(side.stdout.readline())

    for method in METHODS:
        often = 1 if (size, method) in ONCE else int(rounds)
        if often > 1:
            took("theirs", method), took("ours", method)
        pairs = [(took("theirs", method), took("ours", method)) for _ in range(often)]
        ratio = statistics.median(one / other for one, other in pairs)
        edges = EDGES if method == "exact" and size != "small" else 1
        both = [statistics.median(side) / edges for side in zip(*pairs, strict=True)]
        print(f"{size} {method}: theirs {both[0]:.3f} s, ours {both[1]:.3f} s, ratio {ratio:.1f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] in ("theirs", "ours"):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        sys.stdout = sys.stderr  # answers alone go there
        answer(theirs(*sys.argv[2:4]) if sys.argv[1] == "theirs" else ours(sys.argv[2]))
    else:
        main(*sys.argv[1:])
