"""A right call of each public function that stands on runs; the parameters that are made wrong are
in its signature.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bridge import FactoredMatrix, TransformerBridge, patching
from bridge.analysis import head_detector, logit_lens
from bridge.analysis.svd import SVDInterpreter, composition_scores
from bridge.cache import ActivationCache
from bridge.circuits import (
    Circuit,
    Graph,
    edge_attribution,
    edge_effects,
    faithfulness_curve,
    kl_divergence,
    logit_difference,
    mean_scores,
    path_patching,
)
from bridge.harvest import Activations, check, harvest
from bridge.lens import TunedLens, lens
from bridge.tasks import embedded_pairs, induction, ioi
from weight_processing import (
    center_unembed,
    center_writing_weights,
    fold_layer_norm,
    fold_value_biases,
)

#: Parameters that say how much to do: a large number there is work, and no mistake.
COUNTS = ("steps", "epochs", "n", "length", "n_layers", "d_model")


class Call(NamedTuple):
    """One function.

    Attributes:
        name: what it is called.
        function: it, or a method that is bound to a right object.
        right: its arguments: those without a default, and others that make it quick.
        left_out: parameters that are not made wrong.
    """

    name: str
    function: Callable[..., Any]
    right: dict[str, Any]
    left_out: tuple[str, ...] = ()

    def parameters(self) -> list[str]:
        """Those that are made wrong."""
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        known = inspect.signature(self.function).parameters
        return [
            name for name, p in known.items() if p.kind not in kinds and name not in self.left_out
        ]


def metric(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, 5] - logits[0, -1, 6]


def traced(bridge: TransformerBridge) -> Callable[..., Any]:
    def run(
        input: Any,
        capture: Any = (),
        attention_mask: Any = None,
        start_at_layer: Any = None,
        stop_at_layer: Any = None,
        prepend_bos: Any = None,
        padding_side: Any = None,
        name: Any = "blocks.0.hook_resid_pre",
        value: Any = None,
    ) -> Any:
        options = {
            "capture": capture,
            "attention_mask": attention_mask,
            "start_at_layer": start_at_layer,
            "stop_at_layer": stop_at_layer,
            "prepend_bos": prepend_bos,
            "padding_side": padding_side,
        }
        with bridge.trace(input, **options) as run:
            x = run[name]
            if value is not None:
                run[name] = value
        return x

    return run


def trace_generated(bridge: TransformerBridge) -> Callable[..., Any]:
    def run(
        input: Any,
        max_new_tokens: Any = 1,
        do_sample: Any = False,
        name: Any = "blocks.0.hook_resid_pre",
    ) -> Any:
        with bridge.trace_generate(
            input, max_new_tokens=max_new_tokens, do_sample=do_sample
        ) as run:
            return [step[name] for step in run.steps]

    return run


def calls(folder: Path) -> list[Call]:
    """All of them, with what is written in a folder."""
    bridge = TransformerBridge.boot_embedded().eval()
    bridge.original_model.requires_grad_(False)
    native = TransformerBridge.boot_native(
        {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_vocab": 12, "n_ctx": 8, "act_fn": "gelu"}
    ).eval()
    clean, _ = bridge.to_tokens(["Mary and John", "Mary and Mary"])[:, None]
    with torch.no_grad():
        _, cache = bridge.run_with_cache(clean)
    stack = cache.decompose_resid()
    factored = FactoredMatrix(torch.randn(2, 4, 3), torch.randn(2, 3, 4))
    tokens = torch.tensor([[1, 2, 3], [3, 2, 1]])
    graph = Graph.of(native)
    scores = edge_attribution(native, tokens, tokens.flip(0), metric, steps=1)
    found = scores.top(3)
    reading = lens(bridge, clean)
    tuned = TunedLens(1, 8)
    tuned.save(folder / "lens")
    found.save(folder / "circuit.json")
    harvest(
        native, tokens, hook_points=["blocks.0.hook_resid_pre"], out=folder / "made", context_size=4
    )
    made = itertools.count()
    run = {"bridge": native, "clean": tokens, "corrupted": tokens.flip(0), "metric": metric}
    sweep = {
        "model": native,
        "corrupted_tokens": tokens,
        "clean_cache": native.run_with_cache(tokens.flip(0))[1],
        "patching_metric": metric,
    }
    W = torch.randn(2, 4, 3)

    def of(obj: Any, names: dict[str, dict[str, Any]]) -> list[Call]:
        kind = type(obj).__name__
        return [Call(f"{kind}.{name}", getattr(obj, name), right) for name, right in names.items()]

    def fresh() -> ActivationCache:
        return ActivationCache(dict(cache), bridge)

    def harvested(**options: Any) -> Any:
        return harvest(**{"out": folder / f"{next(made)}"} | options)

    harvested.__signature__ = inspect.signature(harvest)  # type: ignore[attr-defined]
    answers = torch.tensor([3])
    return [
        *of(
            cache,
            {
                "accumulated_resid": {},
                "apply_ln_to_stack": {"residual_stack": stack},
                "decompose_resid": {},
                "apply_slice_to_batch_dim": {"batch_slice": slice(0, 1)},
                "get_full_resid_decomposition": {},
                "get_neuron_results": {"layer": 0},
                "stack_activation": {"activation_name": "mlp_out"},
                "logit_attrs": {"residual_stack": stack, "tokens": clean[:, -1]},
                "stack_head_results": {"layer": 1},
                "stack_neuron_results": {"layer": 1},
                "__getitem__": {"key": "embed"},
            },
        ),
        Call("ActivationCache", ActivationCache, {"cache_dict": dict(cache), "model": bridge}),
        Call("ActivationCache.to", lambda device: fresh().to(device), {"device": "cpu"}),
        Call(
            "ActivationCache.toggle_autodiff",
            lambda mode: fresh().toggle_autodiff(mode),
            {"mode": False},
        ),
        Call("FactoredMatrix", FactoredMatrix, {"A": torch.randn(4, 3), "B": torch.randn(3, 4)}),
        *of(
            factored,
            {
                "get_corner": {},
                "unsqueeze": {"k": 0},
                "__getitem__": {"index": 0},
                "__matmul__": {"other": torch.randn(4, 2)},
            },
        ),
        *of(
            bridge,
            {
                "accumulated_bias": {"layer": 1},
                "all_composition_scores": {"mode": "K"},
                "get_neuron_labels": {"layer": 0, "neuron_slice": slice(0, 3)},
                "tokens_to_residual_directions": {"tokens": clean[:, -1]},
                "to_single_token": {"string": " and"},
                "to_single_str_token": {"int_token": 5},
                "to_str_tokens": {"input": "Mary and"},
                "get_token_position": {"single_token": " and", "input": "Mary and"},
                "shapes": {"input": "Mary and"},
                "trace_edit": {"body": lambda run: run["hook_embed"], "points": ["hook_embed"]},
                "set_use_attn_in": {"use_attn_in": False},
                "set_use_attn_result": {"use_attn_result": False},
            },
        ),
        Call("composition_scores", composition_scores, {"left": factored, "right": factored}),
        Call(
            "detect_head",
            head_detector.detect_head,
            {"model": bridge, "seq": "Mary and John", "detection_pattern": "previous_token_head"},
        ),
        Call(
            "compute_head_attention_similarity_score",
            head_detector.compute_head_attention_similarity_score,
            {
                "attention_pattern": torch.eye(3),
                "detection_pattern": torch.eye(3),
                "exclude_bos": False,
                "exclude_current_token": False,
                "error_measure": "mul",
            },
        ),
        Call("logit_lens", logit_lens.logit_lens, {"bridge": bridge, "tokens": clean}),
        Call(
            "head_contributions",
            logit_lens.head_contributions,
            {"bridge": bridge, "tokens": clean, "answers": answers, "others": answers + 1},
        ),
        *of(
            SVDInterpreter(bridge),
            {
                "get_singular_vectors": {
                    "vector_type": "OV",
                    "layer_index": 0,
                    "num_vectors": 2,
                    "head_index": 0,
                }
            },
        ),
        Call(
            "generic_activation_patch",
            patching.generic_activation_patch,
            {
                **sweep,
                "patch_setter": patching.layer_pos_patch_setter,
                "activation_name": "resid_pre",
                "index_axis_names": ("layer", "pos"),
                "verbose": False,
            },
            ("compiled",),
        ),  # what checks types in the tests cannot be compiled
        Call(
            "get_act_patch_resid_pre", patching.get_act_patch_resid_pre, {**sweep, "verbose": False}
        ),
        Call(
            "get_act_patch_attn_head_pattern_all_pos",
            patching.get_act_patch_attn_head_pattern_all_pos,
            {**sweep, "verbose": False},
        ),
        Call("ablated", patching.ablated, {"cache": sweep["clean_cache"], "ablation": "zero"}),
        *(
            Call(
                name,
                getattr(patching, name),
                {
                    "corrupted_activation": torch.zeros(1, 3, 2, 4),
                    "index": [0, *([1] * n)],
                    "clean_activation": torch.ones(1, 3, 2, 4),
                },
            )
            for name, n in (
                ("layer_pos_patch_setter", 1),
                ("layer_head_vector_patch_setter", 1),
                ("layer_pos_head_vector_patch_setter", 2),
            )
        ),
        Call("lens", lens, {"bridge": bridge, "input": clean}),
        *of(
            reading,
            {
                "logits": {"layer": 0},
                "probabilities": {"token": 5},
                "ranks": {"token": 5},
                "top": {},
            },
        ),
        Call("TunedLens", TunedLens, {"n_layers": 1, "d_model": 8}),
        Call("TunedLens.load", TunedLens.load, {"folder": folder / "lens"}),
        Call("TunedLens.save", tuned.save, {"folder": folder / "another"}),
        *of(tuned, {"check": {"bridge": native}}),
        Call(
            "TunedLens.fit",
            TunedLens.fit,
            {"bridge": native, "batches": [tokens], "verbose": False},
        ),
        Call("edge_attribution", edge_attribution, {**run, "steps": 1}),
        Call(
            "edge_effects",
            edge_effects,
            {**run, "edges": [graph.edge_name(1, 0)], "verbose": False},
        ),
        Call(
            "path_patching", path_patching, {**run, "senders": ["embed"], "receivers": ["logits"]}
        ),
        Call("faithfulness_curve", faithfulness_curve, {"scores": scores, **run, "shares": [0.5]}),
        Call("mean_scores", mean_scores, {"scores": [scores]}),
        Call("kl_divergence", kl_divergence, {"right": torch.zeros(1, 3, 12)}),
        Call("logit_difference", logit_difference, {"answers": answers, "wrong": answers}),
        *of(scores, {"top": {"n": 2}, "greedy": {"n": 2}, "threshold": {"least": 0.1}}),
        *of(found, {"evaluate": run}),
        Call(
            "Circuit.of_edges", Circuit.of_edges, {"graph": graph, "edges": [graph.edge_name(1, 0)]}
        ),
        Call("Circuit.load", Circuit.load, {"path": folder / "circuit.json"}),
        Call("Graph.of", Graph.of, {"bridge": native}),
        *of(
            graph,
            {
                "edge": {"name": graph.edge_name(1, 0)},
                "sender": {"name": "embed"},
                "receiver": {"name": "logits"},
                "receivers_named": {"name": "logits"},
            },
        ),
        Call("embedded_pairs", embedded_pairs, {"bridge": bridge, "kind": "repeats", "n": 1}),
        Call("induction", induction, {"source": bridge, "n": 1, "length": 2}),
        Call("ioi", ioi, {"source": bridge, "n": 1}),
        Call("trace", traced(native), {"input": tokens}),
        Call("trace_generate", trace_generated(native), {"input": tokens}),
        Call(
            "harvest",
            harvested,
            {
                "model": native,
                "source": tokens,
                "hook_points": ["blocks.0.hook_resid_pre"],
                "context_size": 4,
            },
            (
                "out",
                "address",
                "progress",
                "workers",
                "cpus_per_worker",
                "gpus_per_worker",
                "engine",
            ),
        ),
        Call("Activations", Activations, {"path": folder / "made"}),
        Call("check", check, {"path": folder / "made"}),
        Call("fold_layer_norm", fold_layer_norm, {"W": torch.randn(4, 3), "w": torch.ones(4)}),
        Call(
            "fold_value_biases",
            fold_value_biases,
            {"b_V": torch.zeros(2, 3), "W_O": torch.randn(2, 3, 4)},
        ),
        Call("center_unembed", center_unembed, {"W_U": W}),
        Call("center_writing_weights", center_writing_weights, {"W": W}),
    ]
