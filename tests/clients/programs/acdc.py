"""The original ACDC (ArthurConmy/Automatic-Circuit-Discovery): which edges it keeps, and their
effects.
"""

import acdc.TLACDCExperiment as theirs
import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

theirs.show = lambda *args, **options: None  # it draws the graph after each step


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
        use_attn_result=True,
        use_split_qkv_input=True,
        use_hook_mlp_in=True,
    )
    model = HookedTransformer(config)
    clean = torch.arange(24).reshape(3, 8) % 23
    other = (clean * 7 + 1) % 23
    right = model(clean).log_softmax(-1).detach()

    def divergence(logits):
        return torch.nn.functional.kl_div(
            logits.log_softmax(-1), right, log_target=True, reduction="batchmean"
        )

    experiment = theirs.TLACDCExperiment(
        model=model,
        ds=clean,
        ref_ds=other,
        threshold=0.02,
        metric=divergence,
        online_cache_cpu=False,
        corrupted_cache_cpu=False,
        using_wandb=False,
        add_sender_hooks=True,
        add_receiver_hooks=False,
    )
    while experiment.current_node is not None:
        experiment.step()
    edges = {str(key): edge for key, edge in experiment.corr.all_edges().items() if edge.present}
    effects = {
        f"effect of {key}": edge.effect_size
        for key, edge in edges.items()
        if edge.effect_size is not None
    }
    return {**dict.fromkeys(edges, 1.0), **effects, "divergence": experiment.cur_metric}
