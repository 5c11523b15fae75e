"""InterpBench (FlyingPumba): interchange accuracy and resampling ablations of two wrapped models,
and a copy of one.

Its compiler of programs (tracr) is not there: the models are random ones of its own class.
"""

import random
import sys
from types import SimpleNamespace

import torch

torch.Any = object  # iit writes it in an annotation, and torch has it no more
sys.path += [f"{sys.path[0]}/../{name}" for name in ("iit", "Automatic-Circuit-Discovery")]

from circuits_benchmark.metrics import iia
from circuits_benchmark.metrics.resampling_ablation_loss.resample_ablation_loss import (
    get_resample_ablation_loss,
)
from circuits_benchmark.metrics.sparsity import get_zero_weights_pct
from circuits_benchmark.transformers.hooked_tracr_transformer import HookedTracrTransformer
from circuits_benchmark.utils.circuit.circuit_eval import get_full_circuit
from iit.model_pairs.ll_model import LLModel
from iit.utils.iit_dataset import IITDataset
from transformer_lens import HookedTransformerConfig


class Categorical(HookedTracrTransformer):
    def is_categorical(self):
        return True


def made(seed):
    config = HookedTransformerConfig(
        n_layers=2,
        d_model=16,
        n_ctx=6,
        n_heads=2,
        d_head=8,
        act_fn="gelu",
        d_vocab=11,
        seed=seed,
        device="cpu",
        use_attn_result=True,
        use_split_qkv_input=True,
        use_hook_mlp_in=True,
    )
    return Categorical(config, None, None, [])


def numbers():
    base, hypothesis = LLModel(made(1)), LLModel(made(2))
    tokens = torch.arange(30).reshape(5, 6) % 11
    labels = torch.nn.functional.one_hot(tokens, 11).float()
    data = IITDataset(
        list(zip(tokens, labels, strict=True)),
        list(zip(tokens.flip(0), labels.flip(0), strict=True)),
    )
    circuit = get_full_circuit(2, 2)
    case = SimpleNamespace(get_name=lambda: "none", get_ll_gt_circuit=lambda granularity: circuit)
    found = {"nodes": len(circuit.nodes), "zero": get_zero_weights_pct(base)}
    accuracies = iia.evaluate_iia_on_all_ablation_types(
        case, base, hypothesis, data, iia_granularity="qkv"
    )
    for node, results in sorted(accuracies.items()):
        found |= {
            f"{node} {key}": value for key, value in results.items() if isinstance(value, float)
        }
    random.seed(0)
    pair = (tokens, labels), (tokens.flip(0), labels.flip(0))
    filters = ["hook_attn_out", "hook_mlp_out", "hook_result", "hook_z", "hook_embed"]
    loss = get_resample_ablation_loss(
        pair, base, hypothesis, None, filters, max_components=2, is_categorical=True
    )
    found |= {"loss": loss.loss, "variance": loss.variance_explained}
    found |= {f"loss {node}": value for node, value in sorted(loss.mean_loss_per_node.items())}
    copied = Categorical.from_hooked_tracr_transformer(base.model)
    return {**found, "logits": base(tokens), "copied": copied((tokens, labels))}
