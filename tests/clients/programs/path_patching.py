"""path_patching (callummcdougall): patched paths between heads, and patched activations of every
part.
"""

import importlib.util
import sys

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

_SPEC = importlib.util.spec_from_file_location("theirs", f"{sys.path[0]}/path_patching.py")
_THEIRS = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_THEIRS)


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
    )
    model = HookedTransformer(config)
    clean = torch.arange(24).reshape(3, 8) % 23
    other = (clean * 7 + 1) % 23
    _, clean_cache = model.run_with_cache(clean)
    _, other_cache = model.run_with_cache(other)

    def metric(logits):
        return logits[:, -1, 3].mean()

    caches = {"new_cache": other_cache}
    found = {}
    for part in ("q", "k", "v"):
        receiver = _THEIRS.Node(part, layer=1, head=0)
        found[f"z to {part}"] = _THEIRS.path_patch(
            model,
            clean,
            other,
            _THEIRS.Node("z", layer=0, head=1),
            receiver,
            metric,
            orig_cache=clean_cache,
            verbose=False,
            **caches,
        )
    scores = _THEIRS.path_patch(
        model,
        clean,
        other,
        _THEIRS.IterNode("z"),
        _THEIRS.Node("resid_post", layer=1),
        metric,
        orig_cache=clean_cache,
        verbose=False,
        **caches,
    )
    found |= {f"path of {name}": score for name, score in scores.items()}
    scores = _THEIRS.act_patch(
        model, clean, _THEIRS.IterNode(["z", "q", "mlp_out"]), metric, **caches
    )
    found |= {f"activation {name}": score for name, score in scores.items()}
    return found
