"""activation_additions (montemac): what a prompt's activations, added to another prompt's, do to
its logits.
"""

import torch
from activation_additions import hook_utils
from activation_additions.prompt_utils import ActivationAddition
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
    tokens = torch.arange(24).reshape(3, 8) % 23
    additions = [
        ActivationAddition(coeff=4.0, act_name=1, tokens=torch.tensor([3, 1, 4])),
        ActivationAddition(
            coeff=-2.0, act_name="blocks.0.attn.hook_z", tokens=torch.tensor([1, 5, 9])
        ),
    ]
    with hook_utils.apply_activation_additions(model, additions):
        steered = model(tokens)
    return {
        "steered": steered,
        "magnitudes": hook_utils.steering_vec_magnitudes(additions[:1], model),
        "plain": model(tokens),
    }
