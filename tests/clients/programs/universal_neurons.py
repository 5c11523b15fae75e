"""universal-neurons (wesg52): statistics of neurons' weights, their composition with heads, and an
ablation.
"""

from functools import partial

import intervention
import torch
import weights
from transformer_lens import HookedTransformer, HookedTransformerConfig


def numbers():
    config = HookedTransformerConfig(
        n_layers=2,
        d_model=16,
        n_ctx=12,
        n_heads=2,
        d_head=8,
        act_fn="gelu",
        d_vocab=23,
        seed=3,
        device="cpu",
    )
    model = HookedTransformer(config)
    found = {}
    for layer in range(2):
        for name, scores in zip(
            "kqvo", weights.compute_attention_composition(model, layer), strict=True
        ):
            found[f"{name} {layer}"] = scores
        for name, scores in zip(
            ("in", "out"), weights.compute_vocab_composition(model, layer), strict=False
        ):
            found[f"vocabulary {name} {layer}"] = scores
    table = weights.compute_neuron_statistics(model)
    found["statistics"] = torch.as_tensor(table.to_numpy(dtype=float))
    tokens = torch.arange(24).reshape(3, 8) % 23
    hook = partial(intervention.fixed_activation_hook, neuron=5, fixed_act=2.0)
    found["fixed"] = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.mlp.hook_post", hook)])
    hook = partial(intervention.threshold_ablation_hook, neuron=5, threshold=0.1)
    found["threshold"] = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.mlp.hook_post", hook)])
    return found
