"""Every method of the Mechanistic Interpretability Benchmark in its own code and in ours: equal?
how fast?

    python benchmarks/circuits.py mib THEIRS FOLDER [SIZE ...]

THEIRS: a Python with TransformerLens 2.18. FOLDER: has MIB-circuit-track, in whose EAP-IG folder is
the commit of EAP-IG that it pins, and optimalablation (alestolfo's, where its README takes uniform
gradient sampling from). SIZE: "shipped" (this package's model), or a random one: "small" (4 layers
of 128), "llama" (8 of 512, keys grouped by four), "gpt2" (12 of 768). Without a size, the first
three. Further words are methods of the table.

Both sides have the same weights and prompts, one thread, and are processes that compute when they
are asked, in turn. The ratio is the median of the rounds', of processor time; what is freed stays
with each process (FREED=1: as in any process, it may go back to the system). Below EAP-IG over
inputs stands how long the plain model takes for the runs that it cannot do without. What both find
is compared in float64, and in float32 by the largest score, where the float64 of each also says
which of the two is nearer to it. The only thing that is changed for float64 is that Hugging Face's
RMS norms and rotary tables, and what their graph keeps scores in, which are float32 in any model,
are float64, too.

Exact effects are of ten edges in models of more than four layers; the time is that of one. At
GPT-2's size, EAP-IG over activations takes one step in place of five, on both sides. CPR and CMD
are `evaluate_area_under_curve`'s, of their scores.

Where both differ by what their code does, the numbers say so: they are marked with the reason
(`KNOWN`).
"""

from __future__ import annotations

import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

#: What tells glibc from how many bytes on memory goes back to the system.
_KEPT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
#: Of random models: layers, width, heads, heads of keys, vocabulary, prompts.
SIZES = {
    "small": (4, 128, 4, 4, 2000, 8),
    "gpt2": (12, 768, 12, 12, 5000, 4),
    "llama": (8, 512, 8, 2, 5000, 4),
}
#: Of each method: what is scored, what they call it, what we call it, what stands in the place of
#: activations.
METHODS = {
    "EAP": ("edge", "EAP", "gradient", "patching"),
    "EAP, zeros": ("edge", "EAP", "gradient", "zero"),
    "EAP, means": ("edge", "EAP", "gradient", "mean-positional"),
    "EAP, constants": ("edge", "EAP", "gradient", "optimal"),
    "EAP-IG-inputs": ("edge", "EAP-IG-inputs", "inputs", "patching"),
    "clean-corrupted": ("edge", "clean-corrupted", "clean_corrupted", "patching"),
    "EAP-IG-activations": ("edge", "EAP-IG-activations", "activations", "patching"),
    "EAP-IG-activations, zeros": ("edge", "EAP-IG-activations", "activations", "zero"),
    "EAP-IG-activations, means": ("edge", "EAP-IG-activations", "activations", "mean-positional"),
    "exact": ("edge", "exact", "", "patching"),
    "exact, zeros": ("edge", "exact", "", "zero"),
    "exact, means": ("edge", "exact", "", "mean-positional"),
    "information flow routes": ("edge", "information-flow-routes", "", "patching"),
    "UGS, 5 steps": ("edge", "UGS", "", "patching"),
    "NAP": ("node", "EAP", "gradient", "patching"),
    "NAP, means": ("node", "EAP", "gradient", "mean-positional"),
    "NAP-IG-inputs": ("node", "EAP-IG-inputs", "inputs", "patching"),
    "NAP-IG-activations": ("node", "EAP-IG-activations", "activations", "patching"),
    "NAP of neurons": ("neuron", "EAP", "gradient", "patching"),
    "NAP-IG-inputs of neurons": ("neuron", "EAP-IG-inputs", "inputs", "patching"),
    "NAP-IG-activations of neurons": ("neuron", "EAP-IG-activations", "activations", "patching"),
    "exact, of nodes": ("node", "exact", "", "patching"),
}
POSITIONS = "learned positions are no part of their embeddings, which are not compared"
FIRST = (
    "the first layer's heads are not compared: theirs get no gradient there while embeddings are"
    " replaced"
)
#: Where both differ by what their code does: by method, and whether the model has learned positions
#: (None: any).
KNOWN = {
    ("EAP, zeros", True): POSITIONS,
    ("EAP, constants", True): POSITIONS,
    ("exact, zeros", True): POSITIONS,
    ("EAP-IG-activations, zeros", True): "their path leaves positions where they are",
    (
        "EAP-IG-activations, means",
        None,
    ): "their path goes to zeros, whatever stands in the place of activations",
    ("information flow routes", True): "they take embeddings without positions, and divide 0 by 0",
    ("EAP-IG-activations", False): FIRST,
    ("EAP-IG-activations, zeros", False): FIRST,
}
LENGTH, STEPS, EDGES, SAMPLES, SEED, PENALTY = 15, 5, 10, 2, 7, 1e-3
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
#: What TransformerLens is told of a model.
FACTS = (
    "n_layers",
    "d_model",
    "n_ctx",
    "n_heads",
    "d_head",
    "d_mlp",
    "d_vocab",
    "act_fn",
    "eps",
    "gated_mlp",
    "final_rms",
    "normalization_type",
    "positional_embedding_type",
    "rotary_dim",
    "rotary_base",
    "n_key_value_heads",
)
#: What both sides are asked for.
Runs = dict[str, Callable[[], torch.Tensor]]


def theirs(given: dict[str, Any], folder: str) -> Runs:
    """Their code, on the processor, in the place of CUDA."""
    zeros = torch.zeros
    torch.zeros = lambda *shape, device=None, **more: zeros(  # type: ignore[assignment]
        *shape, device=None if device == "cuda" else device, **more
    )
    for place in ("MIB-circuit-track", "MIB-circuit-track/EAP-IG/src", "optimalablation"):
        sys.path.insert(0, str(Path(folder) / place))
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    for missing in (
        "eap.visualization",
        "seaborn",
        "matplotlib",
        "matplotlib.pyplot",
        "utils.training_utils",
    ):
        sys.modules[missing] = MagicMock()  # pictures, and data from the hub
    config = HookedTransformerConfig(
        **given["facts"],
        device="cpu",
        dtype=given["dtype"],
        use_attn_result=True,
        use_split_qkv_input=True,
        use_hook_mlp_in=True,
        ungroup_grouped_query_attention=True,
    )
    model = HookedTransformer(config)
    missing = model.load_state_dict(given["weights"], strict=False).missing_keys
    assert all(name.endswith(("mask", "IGNORE", "rotary_sin", "rotary_cos")) for name in missing), (
        missing
    )
    their = Theirs(given, model)
    found: Runs = {}
    for name, (level, method, _, ablation) in METHODS.items():
        of = partial(their.scored, level, method, ablation)
        if method == "exact" and level == "edge" and given["edges"]:
            of = partial(their.some_edges, ablation)
        found[name] = partial(sampled, given, model) if method == "UGS" else of
        found[f"areas of {name}"] = partial(their.areas, method, ablation)
    return found


class Theirs:
    """Their code's parts that are asked for.

    Args:
        given: what `ours` wrote.
        model: a HookedTransformer.
    """

    def __init__(self, given: dict[str, Any], model: Any) -> None:
        import eap.attribute  # type: ignore[import-not-found]
        import eap.attribute_node  # type: ignore[import-not-found]
        import eap.evaluate  # type: ignore[import-not-found]
        import eap.utils  # type: ignore[import-not-found]

        self.given, self.model, self.code, self.rows = given, model, eap, len(given["answers"])
        for module in (eap.attribute, eap.attribute_node, eap.evaluate, eap.utils):
            module.tokenize_plus = self.tokenized
        self.loader = [(["clean"] * self.rows, ["corrupted"] * self.rows, given["answers"])]

    def tokenized(
        self, model: Any, inputs: list[str], max_length: int | None = None
    ) -> tuple[Any, ...]:
        """Texts are numbers."""
        tokens = self.given["texts"][inputs[0]]
        return (
            tokens,
            torch.ones_like(tokens),
            torch.full((self.rows,), tokens.shape[1]),
            tokens.shape[1],
        )

    def metric(
        self, logits: torch.Tensor, clean: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """The answers' logits."""
        return logits[torch.arange(self.rows), -1, labels].mean()

    def options(self, ablation: str) -> dict[str, Any]:
        """What stands in the place of activations."""
        return {
            "intervention": ablation,
            "intervention_dataloader": self.loader,
            "quiet": True,
            "optimal_ablation_path": self.given["constants"],
        }

    def scored(self, level: str, method: str, ablation: str) -> torch.Tensor:
        """Scores of edges, nodes or neurons."""
        more = {"ig_steps": self.given["steps"].get(method, STEPS), **self.options(ablation)}
        times = (
            1 if method in ("exact", "information-flow-routes") else self.rows
        )  # they divide by the prompts again
        of = self.code.graph.Graph.from_model
        if level == "edge":
            graph = of(self.model)
            graph.scores = graph.scores.to(self.given["dtype"])  # float32 in any model
            self.code.attribute.attribute(
                self.model, graph, self.loader, self.metric, method, **more
            )
            return graph.scores.T * times
        if method == "exact":
            return self.each_node(ablation)
        graph = of(self.model, neuron_level=level == "neuron", node_scores=level == "node")
        for kind in ("nodes_scores", "neurons_scores"):
            if getattr(graph, kind) is not None:
                setattr(graph, kind, getattr(graph, kind).to(self.given["dtype"]))
        given = self.model, graph, self.loader, self.metric, method
        self.code.attribute_node.attribute_node(*given, neuron=level == "neuron", **more)
        return (graph.nodes_scores if level == "node" else graph.neurons_scores)[
            : graph.n_forward
        ] * times

    def some_edges(self, ablation: str) -> torch.Tensor:
        """Exact effects of some edges."""
        graph, found = self.code.graph.Graph.from_model(self.model), []
        graph.in_graph |= graph.real_edge_mask
        given = self.model, graph, self.loader, self.metric
        for name in self.given["edges"]:
            graph.edges[name].in_graph = False
            kept = self.code.evaluate.evaluate_graph(
                *given, skip_clean=True, **self.options(ablation)
            )
            found.append(kept.mean())
            graph.edges[name].in_graph = True
        whole = self.code.evaluate.evaluate_baseline(
            self.model, self.loader, self.metric, quiet=True
        )
        return torch.stack(found) - whole.mean()

    def each_node(self, ablation: str) -> torch.Tensor:
        """Exact effects of nodes: theirs end in an error, as the logits' has no place, and leave
        the graph pruned.
        """
        found = []
        for sender in range(self.code.graph.Graph.from_model(self.model).n_forward):
            graph = self.code.graph.Graph.from_model(self.model)
            graph.in_graph |= graph.real_edge_mask
            graph.in_graph[sender] = False
            given = self.model, graph, self.loader, self.metric
            found.append(
                self.code.evaluate.evaluate_graph(
                    *given, skip_clean=True, **self.options(ablation)
                ).mean()
            )
        whole = self.code.evaluate.evaluate_baseline(
            self.model, self.loader, self.metric, quiet=True
        )
        return torch.stack(found) - whole.mean()

    def areas(self, method: str, ablation: str) -> torch.Tensor:
        """CPR and CMD, and the faithfulness of ten circuits."""
        from MIB_circuit_track.evaluation import evaluate_area_under_curve  # type: ignore[import-not-found]

        graph = self.code.graph.Graph.from_model(self.model)
        graph.scores = torch.load(self.given["scores"]).T.clone()
        given = self.model, graph, self.loader, self.metric
        greedy = method == "information-flow-routes"
        _, cpr, cmd, _, kept = evaluate_area_under_curve(
            *given, apply_greedy=greedy, **self.options(ablation)
        )
        return torch.tensor([cpr, cmd, *kept], dtype=torch.float64)


def sampled(given: dict[str, Any], model: Any) -> torch.Tensor:
    """Probabilities of edges after some steps of uniform gradient sampling, from numbers that are
    given.
    """
    import utils.circuit_utils  # type: ignore[import-not-found]
    from mask_samplers.EdgeMaskSampler import EdgeMaskUnifSampler  # type: ignore[import-not-found]
    from pruners.EdgePruner import EdgePruner  # type: ignore[import-not-found]
    from utils.MaskConfig import EdgeInferenceConfig  # type: ignore[import-not-found]

    utils.circuit_utils.device = "cpu"
    clean, corrupted = given["texts"]["clean"], given["texts"]["corrupted"]
    settings = EdgeInferenceConfig(model.cfg, "cpu", "", batch_size=len(clean), init_param=1)
    settings.lamb, settings.n_samples = PENALTY, SAMPLES
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    sampler = EdgeMaskUnifSampler(settings)
    pruner = EdgePruner(model, settings, sampler, counterfactual_mode=True, condition_pos=True)
    pruner.add_cache_hooks(), pruner.add_patching_hooks()
    drawn, drawing = given["drawn"], sampler.sampling_function
    step = 0
    places = given["places"]
    sampler.sampling_function = lambda _, parameter, at: drawing(
        drawn[step].flatten(0, 1)[:, places[at]].to(parameter), parameter, at
    )
    optimizer = torch.optim.Adam(sampler.parameters(), lr=0.1)
    try:
        for step in range(STEPS):  # noqa: B007
            optimizer.zero_grad()
            last = torch.full((len(clean),), clean.shape[1] - 1)
            loss = pruner(clean, last, corrupted, timing=False)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            optimizer.step()
    finally:
        model.reset_hooks()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    found = torch.zeros(drawn.shape[-1])
    for (key, index), place in places.items():
        found[place] = sampler.sampling_params[key][index][..., 0].sigmoid().detach()
    return found


def bridge_of(size: str, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    """A model, pairs of prompts, and the answers."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    from bridge import TransformerBridge
    from bridge.tasks import embedded_pairs

    if dtype == torch.float64:
        modeling_llama.LlamaRMSNorm.forward, modeling_llama.LlamaRotaryEmbedding.forward = (
            _rms_norm,
            _rotary,
        )
    if size == "shipped":
        bridge = TransformerBridge.boot_embedded()
        pairs = embedded_pairs(bridge, "ioi", 8)
        bridge.original_model.to(dtype)
        return (
            TransformerBridge(bridge.original_model, bridge.tokenizer),
            {"clean": pairs.clean, "corrupted": pairs.corrupted},
            pairs.answers,
        )
    layers, width, heads, key_heads, vocabulary, rows = SIZES[size]
    if size == "llama":
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=layers,
                hidden_size=width,
                num_attention_heads=heads,
                num_key_value_heads=key_heads,
                intermediate_size=3 * width,
                vocab_size=vocabulary,
            )
        )
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                n_layer=layers,
                n_embd=width,
                n_head=heads,
                vocab_size=vocabulary,
                activation_function="gelu",
            )
        )
    texts = dict(
        zip(("clean", "corrupted"), torch.randint(0, vocabulary, (2, rows, LENGTH)), strict=True)
    )
    for tokens in texts.values():
        tokens[:, 0] = (
            1  # the first token is all prompts', as their uniform gradient sampling takes it to be
        )
    return TransformerBridge(model.eval().to(dtype)), texts, torch.arange(rows) + 1


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Hugging Face's, without its change to float32."""
    found: torch.Tensor = self.weight * (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    )
    return found


def _rotary(
    self: Any, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of its tables."""
    width = 2 * len(self.inv_freq)
    base = self.config.rope_parameters["rope_theta"] ** (
        torch.arange(0, width, 2, dtype=torch.float64) / width
    )
    angles = (position_ids[..., None] / base).repeat(1, 1, 2)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def ours(size: str, type_: str, folder: str) -> Runs:
    """The same here; what the others need is written to the folder."""
    import bridge.legacy.as_transformer_lens  # noqa: F401
    from bridge.circuits import Graph, mean_outputs
    from bridge.legacy import HookedTransformer

    dtype = getattr(torch, type_)
    model, texts, answers = bridge_of(size, dtype)
    graph, rows = Graph.of(model, grouped=False), len(answers)
    steps = {"EAP-IG-activations": 1} if size == "gpt2" else {}
    every = [
        graph.edge_name(receiver, sender) for receiver, sender in graph.exists.nonzero().tolist()
    ]
    edges = every[:: len(every) // EDGES][:EDGES] if size in ("gpt2", "llama") else []
    as_theirs = HookedTransformer(model.original_model)
    facts = {name: value for name in FACTS if (value := getattr(as_theirs.cfg, name)) is not None}
    weights = {
        (
            re.sub(r"\.(W|b)_([KV])$", r"._\1_\2", name) if "n_key_value_heads" in facts else name
        ): value
        for name, value in as_theirs.state_dict().items()
    }
    constants = mean_outputs(model, [texts["clean"]])
    constants += torch.randn(constants.shape, generator=torch.Generator().manual_seed(0)) * float(
        constants.std()
    )
    constants_of = {"hook_embed": constants[0]}
    for layer in range(len(graph.layers)):
        own = constants[graph.writes[f"blocks.{layer}.hook_attn_out"]]
        own[1:] = 0  # `load_ablations` reads that of each layer's first head alone
        constants_of[f"blocks.{layer}.attn.hook_result"] = own
        (constants_of[f"blocks.{layer}.hook_mlp_out"],) = constants[
            graph.writes[f"blocks.{layer}.hook_mlp_out"]
        ]
    Path(f"{folder}/constants.{type_}").write_bytes(pickle.dumps(constants_of))
    drawing = torch.Generator().manual_seed(SEED)  # as `trained_edges` draws
    drawn = torch.stack(
        [torch.rand(SAMPLES, rows, len(every), generator=drawing) for _ in range(STEPS)]
    )
    saved = {
        "facts": facts,
        "weights": weights,
        "texts": texts,
        "answers": answers,
        "dtype": dtype,
        "drawn": drawn,
        "edges": [_as_they_say(edge) for edge in edges],
        "places": _places(graph),
        "steps": steps,
        "positions": facts["positional_embedding_type"] == "standard",
    }
    torch.save(saved, f"{folder}/given.{type_}")
    our, found = Ours(model, graph, texts, answers, constants, edges, steps), {}
    for name, (level, method, called, ablation) in METHODS.items():
        found[name] = partial(our.scored, level, method, called, ablation)
        found[f"areas of {name}"] = partial(our.areas, method, ablation, f"{folder}/scores")
    return found | {"plain runs": our.plain}


@dataclass
class Ours:
    """Our parts that are asked for."""

    model: Any
    graph: Any
    texts: dict[str, torch.Tensor]
    answers: torch.Tensor
    constants: torch.Tensor
    edges: list[str]
    steps: dict[str, int]

    def each(self, logits: torch.Tensor) -> torch.Tensor:
        """The answers' logits."""
        return logits[torch.arange(len(self.answers)), -1, self.answers]

    def metric(self, logits: torch.Tensor) -> torch.Tensor:
        """Their mean."""
        return self.each(logits).mean()

    def options(self, ablation: str) -> dict[str, Any]:
        """What stands in the place of activations."""
        ours: dict[str, Any] = {"patching": "resample", "zero": "zero", "optimal": self.constants}
        if ablation == "mean-positional":
            return {"ablation": "mean", "reference": self.texts["clean"]}
        return {"ablation": ours[ablation]}

    def scored(self, level: str, method: str, called: str, ablation: str) -> torch.Tensor:
        """Scores of edges, nodes or neurons."""
        from bridge.circuits import edge_attribution, edge_effects, information_flow, trained_edges

        given, more = (
            (self.model, self.texts["clean"], self.texts["corrupted"]),
            self.options(ablation),
        )
        if method == "UGS":
            sampling: dict[str, Any] = {
                "penalty": PENALTY,
                "steps": STEPS,
                "samples": SAMPLES,
                "seed": SEED,
            }
            return trained_edges(*given, graph=self.graph, **sampling).values[self.graph.exists]
        if method == "information-flow-routes":
            return information_flow(*given[:2], self.graph).values
        if level != "edge":
            return self.of_nodes(level, method, called, more)
        if method == "exact":
            some = self.edges or None
            effects = edge_effects(
                *given, self.metric, some, verbose=False, graph=self.graph, **more
            )
            return torch.tensor([effects[edge] for edge in some]) if some else effects.values
        steps = self.steps.get(method, STEPS)
        return edge_attribution(*given, self.metric, called, steps, self.graph, **more).values

    def of_nodes(self, level: str, method: str, called: str, more: dict[str, Any]) -> torch.Tensor:
        """Scores of nodes or neurons."""
        from bridge.circuits import node_attribution, node_effects

        given = self.model, self.texts["clean"], self.texts["corrupted"], self.metric
        if method == "exact":
            return node_effects(*given, **more).values
        found = node_attribution(
            *given, called, self.steps.get(method, STEPS), mlps="input", **more
        )
        return found.values if level == "node" else found.neurons  # type: ignore[return-value]

    def plain(self) -> torch.Tensor:
        """The plain model's runs that EAP-IG over inputs needs: two, and those with a gradient, as
        a batch.
        """
        model, clean, corrupted = (
            self.model.original_model,
            self.texts["clean"],
            self.texts["corrupted"],
        )
        with torch.no_grad():
            model(corrupted), model(clean)
            given = model.get_input_embeddings()(clean).repeat(STEPS, 1, 1)
        logits = model(inputs_embeds=given.requires_grad_(), logits_to_keep=1).logits
        chosen = logits[:, -1].gather(-1, self.answers.repeat(STEPS)[:, None])
        return torch.autograd.grad(chosen.sum(), given)[0]

    def areas(self, method: str, ablation: str, file: str) -> torch.Tensor:
        """CPR and CMD, and the faithfulness of ten circuits."""
        from bridge.circuits import EdgeScores, faithfulness_curve

        scores = EdgeScores(self.graph, torch.load(file))
        given = self.model, self.texts["clean"], self.texts["corrupted"], self.each
        choose = "greedy" if method == "information-flow-routes" else "top"
        curve = faithfulness_curve(scores, *given, choose=choose, **self.options(ablation))
        return torch.tensor([curve.cpr, curve.cmd, *curve.faithfulness], dtype=torch.float64)


def _places(graph: Any) -> dict[tuple[str, int], torch.Tensor]:
    """By the parameters of their uniform gradient sampling, which edge each number is of, of those
    in our order.
    """
    number = torch.zeros(graph.exists.shape, dtype=torch.long)
    number[graph.exists] = torch.arange(int(graph.exists.sum()))
    heads, layers = graph.layers[0].heads, len(graph.layers)
    senders = torch.arange(len(graph.senders))
    mlps = [
        int(senders[some]) for point, some in graph.writes.items() if "attn" not in point
    ]  # and the embeddings
    of_heads = torch.stack(
        [senders[some] for point, some in graph.writes.items() if "attn" in point]
    )
    found = {}
    for layer in range(layers + 1):
        upto = min(layer + 1, layers)
        row = graph.receiver(f"L{layer}MLP" if layer < layers else "logits")
        found["attn-mlp", layer] = number[row][of_heads[:upto]]
        found["mlp-mlp", layer] = number[row][mlps[: layer + 1]]
        if layer < layers:
            rows = [
                [graph.receiver(f"L{layer}H{head}.{letter}") for head in range(heads)]
                for letter in "qkv"
            ]
            of_layer = number[torch.tensor(rows)]
            found["attn-attn", layer] = of_layer[:, :, of_heads[:layer]]
            found["mlp-attn", layer] = of_layer[:, :, mlps[: layer + 1]]
    return found


def _as_they_say(edge: str) -> str:
    """An edge's name in their graph."""
    for ours, theirs in (
        (r"L(\d+)MLP", r"m\1"),
        (r"L(\d+)H(\d+)", r"a\1.h\2"),
        (r"\.([qkv])$", r"<\1>"),
    ):
        edge = re.sub(ours, theirs, edge)
    return edge.replace("embed", "input")


def answer(runs: Runs, file: str) -> None:
    """Runs what it is asked for, stores what came out, and says what it took; or what went
    wrong.
    """
    print("ready", file=sys.__stdout__, flush=True)
    for line in sys.stdin:
        start = time.process_time()
        try:
            found = runs[line.strip()]()
        except (RuntimeError, ValueError, IndexError) as error:
            print(
                f"{type(error).__name__}: {error}".splitlines()[0], file=sys.__stdout__, flush=True
            )
            continue
        took = time.process_time() - start
        torch.save(found.detach().double(), file)
        print(took, file=sys.__stdout__, flush=True)


class Side:
    """One of the processes.

    Args:
        executable: its Python.
        arguments: for this file.
        file: where it stores what it finds.
    """

    def __init__(self, executable: str, *arguments: str, file: str) -> None:
        command, self.file = [executable, __file__, *arguments, file], file
        errors = None if os.environ.get("LOUD") else subprocess.DEVNULL
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": errors,
        }
        # Else what is freed goes back or not, by what was allocated before: a third of the time by
        # chance.
        kept = {} if os.environ.get("FREED") else dict.fromkeys(_KEPT, "1000000000")
        self.process = subprocess.Popen(command, text=True, env=os.environ | kept, **pipes)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said == "ready\n", f"{command} ended ({said!r}); LOUD=1 shows why"

    def took(self, what: str) -> float:
        """Asks for something, and gives the seconds.

        Raises:
            RuntimeError: it ended in an error.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        said = self.process.stdout.readline().strip()
        try:
            return float(said)
        except ValueError:
            raise RuntimeError(said) from None

    def found(self, what: str | None = None) -> torch.Tensor:
        """What it found; asked for before, or now."""
        if what is not None:
            self.took(what)
        found: torch.Tensor = torch.load(self.file)
        return found


def main(python: str, code: str, size: str, *methods: str) -> None:
    """Prints a row for each method: how far scores and areas are from each other, times on both
    sides, and the ratio.

    Args:
        python, code: as above (THEIRS, FOLDER).
        size: of the model.
        methods: of `METHODS`; none: all.
    """
    large = size in ("gpt2", "llama")
    heads = SIZES[size][2] if size in SIZES else 4
    with tempfile.TemporaryDirectory() as folder:
        sides = {}
        for type_ in ("float32", "float64"):
            mine = Side(sys.executable, "ours", size, type_, folder, file=f"{folder}/ours.{type_}")
            sides[type_] = (
                Side(python, "theirs", type_, folder, code, file=f"{folder}/theirs.{type_}"),
                mine,
            )
        facts = torch.load(f"{folder}/given.float32")
        positions = facts["positions"]
        compared = partial(_compared, heads=heads, edges=facts["edges"])
        print(
            f"\n{size}\n| | theirs | ours | ratio | largest score | apart, float64 | float32, of"
            " the largest | theirs, ours from float64 | CPR, CMD apart, float64 | float32 |\n"
            + "|---" * 10
            + "|"
        )
        for method in methods or METHODS:
            level, called, _, instead = METHODS[method]
            why = KNOWN.get((method, positions)) or KNOWN.get((method, None)) or ""
            slow = called in ("exact", "EAP-IG-activations") and (large or called == "exact")
            there, here = sides["float32"]
            try:
                if not slow:
                    there.took(method), here.took(method)
                pairs = [
                    (there.took(method), here.took(method))
                    for _ in range(1 if slow else 3 if large else 7)
                ]
            except RuntimeError as error:
                print(f"| {method} | {error} |", flush=True)
                continue
            ratio = statistics.median(one / other for one, other in pairs)
            several = EDGES if called == "exact" and level == "edge" and large else 1
            both = [statistics.median(side) / several for side in zip(*pairs, strict=True)]
            single = [compared(side.found(), why) for side in (there, here)]
            largest = float(single[0].nan_to_num().abs().max())
            apart = float((single[0] - single[1]).abs().max()) / largest
            cells = [f"{both[0]:.3g} s", f"{both[1]:.3g} s", f"{ratio:.1f}", f"{largest:.2g}"]
            double = [compared(side.found(method), why) for side in sides["float64"]]
            off = [float((one - double[0]).abs().max()) / largest for one in single]
            cells += [f"{float((double[0] - double[1]).abs().max()):.0e}", f"{apart:.0e}"]
            cells += [", ".join(f"{one:.0e}" for one in off)]
            # Their evaluation takes no constants.
            evaluated = (
                called not in ("UGS", "exact" if large else "")
                and instead != "optimal"
                and "no part" not in why
            )
            if level == "edge" and evaluated:
                scores = sides["float64"][0].found()
                # Heads that read the same have the same flow of information: of equals, both sides
                # take others first.
                torch.save(scores.nan_to_num() + 1e-9 * torch.rand_like(scores), f"{folder}/scores")
                for type_ in ("float64", "float32"):
                    one, two = (side.found(f"areas of {method}") for side in sides[type_])
                    cells.append(f"{float((one - two)[:2].abs().max()):.0e}")
            print(f"| {method} | {' | '.join(cells)} |{f' ({why})' if why else ''}", flush=True)
            if (
                method == "EAP-IG-inputs"
            ):  # what nobody can be faster than who runs the model as it is
                pairs = [
                    (there.took(method), here.took("plain runs")) for _ in range(3 if large else 7)
                ]
                one, other = (statistics.median(side) for side in zip(*pairs, strict=True))
                print(
                    f"| its runs of the plain model | {one:.3g} s | {other:.3g} s |"
                    f" {one / other:.1f} |",
                    flush=True,
                )


def _compared(scores: torch.Tensor, why: str, heads: int, edges: list[str]) -> torch.Tensor:
    """What can be compared of scores: of all edges, or of some."""
    if why == POSITIONS:
        return (
            scores[:, 1:]
            if scores.ndim == 2
            else scores[[not edge.startswith("input") for edge in edges]]
        )
    return scores[3 * heads :] if why == FIRST else scores


if __name__ == "__main__":
    who, *more = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sys.stdout = sys.stderr  # answers alone go there
    if who == "ours":
        answer(ours(*more[:3]), more[3])
    else:
        type_, folder, code, file = more
        given = torch.load(f"{folder}/given.{type_}", weights_only=False)
        given |= {"scores": f"{folder}/scores", "constants": f"{folder}/constants.{type_}"}
        answer(theirs(given, code), file)
