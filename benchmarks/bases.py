"""What a hook point in a basis costs, as ratios to a plain forward pass, alternated in one process.

python benchmarks/bases.py
"""

from __future__ import annotations

import torch
from alternated import NULL, Timed, alternated, spread
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from bridge import TransformerBridge
from bridge.patching import generic_activation_patch, layer_feature_patch_setter

N, ROUNDS = 4096, 31


class SAE(nn.Module):
    """A sparse autoencoder with random weights, of which about every tenth feature is active."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.W_enc = nn.Parameter(torch.randn(d, N) / d**0.5, requires_grad=False)
        self.W_dec = nn.Parameter(torch.randn(N, d) / N**0.5, requires_grad=False)

    def encode(self, x: Tensor) -> Tensor:
        """The features."""
        return (nn.functional.normalize(x, dim=-1) * x.shape[-1] ** 0.5 @ self.W_enc - 1.3).relu()

    def decode(self, features: Tensor) -> Tensor:
        """What they explain."""
        return features @ self.W_dec


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=2000)).eval()
    bare, bridge = TransformerBridge(model), TransformerBridge(model)
    clean, corrupted = torch.randint(0, 2000, (2, 1, 64))
    sae = SAE(256)
    point = bridge.add_basis("blocks.3.hook_resid_post", "sae", sae)
    _, cache = bridge.run_with_cache(clean, names_filter=[point.name, "blocks.3.hook_resid_post"])
    act = cache["blocks.3.hook_resid_post"]

    def plain() -> Tensor:
        return bare(clean)

    def base() -> object:
        return bare.run_with_cache(clean, names_filter="blocks.3.hook_resid_post")

    def read() -> object:
        return bridge.run_with_cache(clean, names_filter=point)

    def encoded() -> object:
        base()
        return sae.encode(act)

    active = (cache[point.name][0] > 0).any(0).nonzero().flatten()[:200]
    metric = lambda logits: logits[0, -1, 7]
    rows = _Rows([(3, int(feature)) for feature in active])

    def sweep() -> object:
        return generic_activation_patch(
            bridge,
            corrupted,
            cache,
            metric,
            layer_feature_patch_setter,
            "resid_post.sae",
            index_df=rows,
            verbose=False,
        )

    found = alternated({"plain": plain, "placed": lambda: bridge(clean)}, ROUNDS)
    print(f"the same forward pass once more   {spread(found[NULL].ratios)}")
    print(
        f"placed and not asked for          {spread(found['placed'].ratios)} of a forward pass"
        " without"
    )
    found = alternated({"encoded": encoded, "read": read}, ROUNDS)
    print(
        f"read                              {spread(found['read'].ratios)} of reading the point and"
        " encoding by hand"
    )
    found = alternated({"plain": plain, "sweep": sweep}, 7)
    each = Timed(
        tuple(seconds / len(active) for seconds in found["sweep"].rounds), found["sweep"].first
    )
    print(
        f"a sweep over {len(active)} features        {spread(each.ratios)} of a forward pass each"
    )
    sparse_costs(bridge, clean, sae)


def sparse_costs(bridge: TransformerBridge, tokens: Tensor, sae: SAE) -> None:
    """What a cache of top-k features holds, sparse and dense."""

    def top(x: Tensor) -> Tensor:
        found = sae.encode(x).topk(32, dim=-1)
        at = torch.cat(
            [
                torch.cartesian_prod(*map(torch.arange, found.indices.shape)).T[:2],
                found.indices.reshape(1, -1),
            ]
        )
        return torch.sparse_coo_tensor(at, found.values.flatten(), (*x.shape[:-1], N))

    hook = bridge.add_basis(
        "blocks.3.hook_resid_post", "top", encode=top, decode=lambda f: sae.decode(f.to_dense())
    )
    _, cache = bridge.run_with_cache(tokens, names_filter=hook)
    kept = cache[hook.name].coalesce()
    size = kept.values().nbytes + kept.indices().nbytes
    dense = kept.to_dense().nbytes
    print(
        f"32 of {N} features, kept          {size / dense:.3f} of the memory that they take where"
        " they are dense"
    )


class _Rows:
    """As much of a data frame as a sweep asks for."""

    def __init__(self, rows: list[tuple[int, int]]) -> None:
        self.rows = rows

    def itertuples(self, index: bool, name: None) -> list[tuple[int, int]]:
        """The rows."""
        return self.rows


if __name__ == "__main__":
    main()
