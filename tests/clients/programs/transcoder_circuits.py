"""transcoder_circuits (jacobdunefsky): contributions of heads and transcoder features, and paths
through them.
"""

import torch
from transcoder_circuits import circuit_analysis as theirs
from transformer_lens import HookedTransformer, HookedTransformerConfig


class Transcoder:
    """As much of its transcoders as its functions read."""

    def __init__(self, layer, generator):
        self.cfg = type(
            "Config",
            (),
            {"hook_point_layer": layer, "hook_point": f"blocks.{layer}.ln2.hook_normalized"},
        )
        self.cfg.d_sae, self.cfg.is_transcoder, self.cfg.out_hook_point_layer = 12, True, layer
        self.cfg.out_hook_point = f"blocks.{layer}.hook_mlp_out"
        self.W_enc, self.W_dec = (
            torch.randn(size, generator=generator) for size in ((16, 12), (12, 16))
        )
        self.b_enc, self.b_dec = torch.randn(12, generator=generator), torch.zeros(16)

    def __call__(self, x):
        acts = torch.relu((x - self.b_dec) @ self.W_enc + self.b_enc)
        return acts @ self.W_dec, acts


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
    generator = torch.Generator().manual_seed(0)
    transcoders = [Transcoder(layer, generator) for layer in range(2)]
    tokens = torch.arange(8)[None] % 23
    _, cache = model.run_with_cache(tokens)
    found = {"heads": theirs.get_attn_head_contribs(model, cache, 1, torch.ones(16))}
    vector = theirs.make_sae_feature_vector(transcoders[1], 3)
    for name, value in (("1/scale", True), ("scale", False)):
        found[name] = theirs.get_ln_constant(model, cache, vector.vector, 1, -1, recip=value)
    found["gradient"] = theirs.get_transcoder_ixg(
        transcoders[0], cache, vector.vector, 0, -1, return_numpy=False
    )[0]
    paths = theirs.greedy_get_top_paths(
        model, transcoders, cache, vector, num_iters=2, num_branches=3
    )
    found["paths"] = [path[-1].contrib for level in paths for path in level]
    return found
