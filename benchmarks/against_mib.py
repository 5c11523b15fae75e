"""Scores of edges, CPR and CMD beside the code of the Mechanistic Interpretability Benchmark: equal? how fast?

    python benchmarks/against_mib.py THEIRS FOLDER SIZE [ROUNDS [METHOD ...]]

THEIRS: a Python with TransformerLens 2.18; FOLDER: EAP-IG's `src`; SIZE: "shipped" (this package's model), or a random
one: "small" (4 layers of 128), "gpt2" (12 of 768), "llama" (8 of 512, keys grouped by four).

Both sides have the same weights and prompts. One thread, processor time. Each side is a process that computes when it
is asked, in turn; the ratio is the median of the rounds'. Exact effects are of a few edges but in models of four
layers, and the time that is printed is that of one. CPR and CMD are of their scores of EAP-IG over inputs.

In rotary models their code, on TransformerLens, misses gradients at the first layer's heads while it replaces the
embeddings: those scores of EAP-IG over activations are not compared.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

#: Of random models: layers, width, heads, heads of keys, vocabulary, prompts.
SIZES = {
    "small": (4, 128, 4, 4, 2000, 8), "gpt2": (12, 768, 12, 12, 5000, 4), "llama": (8, 512, 8, 2, 5000, 4),
}  # fmt: skip
METHODS = {
    "gradient": "EAP", "inputs": "EAP-IG-inputs", "activations": "EAP-IG-activations", "exact": "exact",
}  # fmt: skip
LENGTH, STEPS, EDGES = 15, 5, 10
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
#: What takes minutes there is asked for once.
ONCE = {
    ("gpt2", "activations"), ("gpt2", "exact"), ("llama", "activations"), ("llama", "exact"), ("small", "exact"),
    ("shipped", "exact"),
}  # fmt: skip
#: What TransformerLens is told of a model.
FACTS = (
    "n_layers", "d_model", "n_ctx", "n_heads", "d_head", "d_mlp", "d_vocab", "act_fn", "eps", "gated_mlp", "final_rms",
    "normalization_type", "positional_embedding_type", "rotary_dim", "rotary_base", "n_key_value_heads",
)  # fmt: skip


def theirs(given: dict[str, Any], folder: str) -> dict[str, Callable[[], torch.Tensor]]:
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

    config = HookedTransformerConfig(
        **given["facts"], device="cpu", use_attn_result=True, use_split_qkv_input=True, use_hook_mlp_in=True,
        ungroup_grouped_query_attention=True,
    )  # fmt: skip
    model = HookedTransformer(config)
    missing = model.load_state_dict(given["weights"], strict=False).missing_keys
    assert all(name.endswith(("mask", "IGNORE", "rotary_sin", "rotary_cos")) for name in missing), missing
    texts, rows = given["texts"], len(given["answers"])

    def tokenized(model: Any, inputs: list[str], max_length: int | None = None) -> tuple[Any, ...]:
        tokens = texts[inputs[0]]
        return tokens, torch.ones_like(tokens), torch.full((rows,), tokens.shape[1]), tokens.shape[1]

    for module in (eap.attribute, eap.evaluate):
        module.tokenize_plus = tokenized
    loader = [(["clean"] * rows, ["corrupted"] * rows, given["answers"])]

    def metric(logits: torch.Tensor, clean: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits[torch.arange(rows), -1, labels].mean()

    def scored(method: str) -> torch.Tensor:
        graph = Graph.from_model(model)
        eap.attribute.attribute(model, graph, loader, metric, method, ig_steps=STEPS, quiet=True)
        return graph.scores.T * (1 if method == "exact" else rows)  # they divide by the prompts again

    def some_edges() -> torch.Tensor:
        graph, found = Graph.from_model(model), []
        graph.in_graph |= graph.real_edge_mask
        for name in given["edges"]:
            graph.edges[name].in_graph = False
            found.append(eap.evaluate.evaluate_graph(model, graph, loader, metric, quiet=True, skip_clean=True).mean())
            graph.edges[name].in_graph = True
        return torch.stack(found) - eap.evaluate.evaluate_baseline(model, loader, metric, quiet=True).mean()

    def kept() -> torch.Tensor:
        """The metric with every edge, with none, and with circuits of growing size."""
        graph, found = Graph.from_model(model), [eap.evaluate.evaluate_baseline(model, loader, metric, quiet=True)]
        graph.scores = torch.load(given["scores"]).T.clone()
        for share in (0, *SHARES):
            graph.apply_topn(int(share * len(graph.edges)), True, prune=True)
            found.append(eap.evaluate.evaluate_graph(model, graph, loader, metric, quiet=True))
        return torch.stack([one.mean() for one in found])

    found: dict[str, Callable[[], torch.Tensor]] = {name: (lambda at=at: scored(at)) for name, at in METHODS.items()}  # type: ignore[misc]
    return found | ({"exact": some_edges} if given["edges"] else {}) | {"kept": kept}


def bridge_of(size: str) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    """A model, pairs of prompts, and the answers."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from bridge import TransformerBridge
    from bridge.tasks import embedded_pairs

    if size == "shipped":
        bridge = TransformerBridge.boot_embedded()
        pairs = embedded_pairs(bridge, "ioi", 8)
        return bridge, {"clean": pairs.clean, "corrupted": pairs.corrupted}, pairs.answers
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
            GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, activation_function="gelu")
        )
    texts = dict(zip(("clean", "corrupted"), torch.randint(0, vocabulary, (2, rows, LENGTH)), strict=True))
    return TransformerBridge(model.eval()), texts, torch.arange(rows) + 1


def ours(size: str, folder: str) -> dict[str, Callable[[], torch.Tensor]]:
    """The same here; what the others need is written to the folder."""
    import bridge.legacy.as_transformer_lens  # noqa: F401
    from bridge.circuits import EdgeScores, Graph, edge_attribution, edge_effects, faithfulness_curve
    from bridge.legacy import HookedTransformer

    model, texts, answers = bridge_of(size)
    graph, pair = Graph.of(model, grouped=False), (texts["clean"], texts["corrupted"])
    every = [graph.edge_name(receiver, sender) for receiver, sender in graph.exists.nonzero().tolist()]
    edges = every[:: len(every) // EDGES][:EDGES] if size in ("gpt2", "llama") else []
    as_theirs = HookedTransformer(model.original_model)
    facts = {name: value for name in FACTS if (value := getattr(as_theirs.cfg, name)) is not None}
    weights = {
        re.sub(r"\.(W|b)_([KV])$", r"._\1_\2", name) if "n_key_value_heads" in facts else name: value
        for name, value in as_theirs.state_dict().items()
    }
    named = [_as_they_say(edge) for edge in edges]
    torch.save(
        {"facts": facts, "weights": weights, "texts": texts, "answers": answers, "edges": named}, f"{folder}/given"
    )

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[torch.arange(len(answers)), -1, answers].mean()

    def scored(method: str) -> torch.Tensor:
        return edge_attribution(model, *pair, metric, method, STEPS, graph).values

    def effects() -> torch.Tensor:
        found = edge_effects(model, *pair, metric, edges or None, verbose=False, graph=graph)
        return torch.tensor([found[edge] for edge in edges]) if edges else found.values

    def kept() -> torch.Tensor:
        def each(logits: torch.Tensor) -> torch.Tensor:
            return logits[torch.arange(len(answers)), -1, answers]

        curve = faithfulness_curve(EdgeScores(graph, torch.load(f"{folder}/scores")), model, *pair, each)
        assert curve.prompts is not None
        whole, none, circuits = curve.prompts.mean(-1).unbind(1)
        return torch.cat([whole[:1], none[:1], circuits])

    found: dict[str, Callable[[], torch.Tensor]] = {name: (lambda at=name: scored(at)) for name in METHODS}  # type: ignore[misc]
    return found | {"exact": effects, "kept": kept}


def _as_they_say(edge: str) -> str:
    """An edge's name in their graph."""
    for ours, theirs in ((r"L(\d+)MLP", r"m\1"), (r"L(\d+)H(\d+)", r"a\1.h\2"), (r"\.([qkv])$", r"<\1>")):
        edge = re.sub(ours, theirs, edge)
    return edge.replace("embed", "input")


def answer(runs: dict[str, Callable[[], torch.Tensor]], file: str) -> None:
    """Runs what it is asked for, stores what came out, and says what it took."""
    print("ready", file=sys.__stdout__, flush=True)
    for line in sys.stdin:
        start = time.process_time()
        found = runs[line.strip()]()
        took = time.process_time() - start
        torch.save(found.detach().double(), file)
        print(took, file=sys.__stdout__, flush=True)


class Side:
    """One of the two processes."""

    def __init__(self, executable: str, *arguments: str) -> None:
        command = [executable, __file__, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def took(self, what: str) -> float:
        """Asks for something, and gives the seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def areas(kept: torch.Tensor) -> torch.Tensor:
    """CPR and CMD."""
    faithful = (kept[2:] - kept[1]) / (kept[0] - kept[1])
    shares = torch.tensor(SHARES, dtype=torch.float64)
    return torch.stack([torch.trapezoid(faithful, shares), torch.trapezoid((1 - faithful).abs(), shares)])


def main(python: str, eap: str, size: str, rounds: str = "9", *methods: str) -> None:
    """Prints for each method how far scores are from each other, the time on both sides, and the ratio."""
    with tempfile.TemporaryDirectory() as folder:
        here = Side(sys.executable, "ours", size, folder)
        there = Side(python, "theirs", folder, eap)

        def found() -> list[torch.Tensor]:
            return [torch.load(f"{folder}/{who}") for who in ("theirs", "ours")]

        for method in methods or METHODS:
            often = 1 if (size, method) in ONCE else int(rounds)
            if often > 1:
                there.took(method), here.took(method)
            pairs = [(there.took(method), here.took(method)) for _ in range(often)]
            ratio = statistics.median(one / other for one, other in pairs)
            right, mine = found()
            if method == "activations" and size in ("shipped", "llama"):
                right, mine = (scores[3 * (SIZES[size][2] if size in SIZES else 4) :] for scores in (right, mine))
            edges = EDGES if method == "exact" and size in ("gpt2", "llama") else 1
            both = [statistics.median(side) / edges for side in zip(*pairs, strict=True)]
            print(
                f"{size} {method}: theirs {both[0]:.3f} s, ours {both[1]:.3f} s, ratio {ratio:.1f}; scores up to "
                f"{float(right.abs().max()):.2g}, apart by {float((right - mine).abs().max()):.1g}",
                flush=True,
            )
            if method == "inputs":
                torch.save(right, f"{folder}/scores")
                there.took("kept"), here.took("kept")
                right, mine = found()
                print(
                    f"  metrics of ten circuits apart by {float((right - mine).abs().max()):.1g}; CPR and CMD "
                    f"{[round(x, 6) for x in areas(right).tolist()]}, apart by "
                    f"{float((areas(right) - areas(mine)).abs().max()):.1g}",
                    flush=True,
                )


if __name__ == "__main__":
    who, *more = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if who in ("theirs", "ours"):
        sys.stdout = sys.stderr  # answers alone go there
    if who == "ours":
        answer(ours(*more), str(Path(more[1]) / "ours"))
    elif who == "theirs":
        given = torch.load(f"{more[0]}/given") | {"scores": f"{more[0]}/scores"}
        answer(theirs(given, more[1]), str(Path(more[0]) / "theirs"))
    else:
        main(who, *more)
