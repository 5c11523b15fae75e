"""The time that scores of all edges take, in the code of the Mechanistic Interpretability Benchmark and here.

    PYTHON benchmarks/against_mib.py theirs SIZE FOLDER   a Python with TransformerLens 2.18; FOLDER: EAP-IG's `src`
    python benchmarks/against_mib.py ours SIZE            SIZE: "small" (4 layers of 128) or "gpt2" (12 of 768)

Random models, one thread, processor time; of exact patching in the larger one the time of an edge.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import torch

SIZES = {"small": (4, 128, 4, 2000, 8), "gpt2": (12, 768, 12, 5000, 4)}  # layers, width, heads, vocabulary, prompts
METHODS = {
    "gradient": "EAP", "inputs": "EAP-IG-inputs", "activations": "EAP-IG-activations", "exact": "exact",
}  # fmt: skip
LENGTH, STEPS, EDGES = 15, 5, 10


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

    layers, width, heads, vocabulary, rows = SIZES[size]
    model = HookedTransformer(
        HookedTransformerConfig(
            n_layers=layers, d_model=width, n_ctx=64, n_heads=heads, d_head=width // heads, act_fn="gelu",
            d_vocab=vocabulary, seed=3, device="cpu", use_attn_result=True, use_split_qkv_input=True,
            use_hook_mlp_in=True,
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
    return found | ({"exact": some_edges} if size == "gpt2" else {})


def ours(size: str) -> dict[str, Callable[[], Any]]:
    """The same here."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from bridge import TransformerBridge
    from bridge.circuits import Graph, edge_attribution, edge_effects

    layers, width, heads, vocabulary, rows = SIZES[size]
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary)
    bridge = TransformerBridge(GPT2LMHeadModel(config).eval())
    graph, pair = Graph.of(bridge), torch.randint(0, vocabulary, (2, rows, LENGTH))

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[torch.arange(rows), -1, torch.arange(rows) + 1].mean()

    def scored(method: str) -> None:
        edge_attribution(bridge, pair[0], pair[1], metric, method, STEPS, graph)

    every = graph.exists.nonzero().tolist()
    some = every[:: len(every) // EDGES][:EDGES] if size == "gpt2" else every
    edges = [graph.edge_name(receiver, sender) for receiver, sender in some]
    found: dict[str, Callable[[], Any]] = {name: (lambda at=name: scored(at)) for name in METHODS}  # type: ignore[misc]
    return found | {"exact": lambda: edge_effects(bridge, pair[0], pair[1], metric, edges, verbose=False)}


def main() -> None:
    """Prints a time for each method."""
    who, size, *folder = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    runs = theirs(size, *folder) if who == "theirs" else ours(size)
    for name, run in runs.items():
        times = []
        for _ in range(3 if name in ("gradient", "inputs") else 1):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
        edges = EDGES if (size, name) == ("gpt2", "exact") else 1
        print(f"{who} {size} {name}: {statistics.median(times) / edges:.3f} s", flush=True)


if __name__ == "__main__":
    main()
