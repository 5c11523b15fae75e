"""What features add directly to a logit, against the run with one feature larger and all that comes
later held.
"""

import pytest
import torch
from torch import Tensor, nn
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from bridge import HookPoint, TransformerBridge
from bridge.analysis.analysis import MissingActivationsError
from bridge.features import feature_logit_attrs
from tests.analysis.models import CASES, EXPERTS, bridge_of
from tests.bases.common import SAE

POINTS = (
    "hook_embed",
    "blocks.0.attn.hook_z",
    "blocks.0.mlp.hook_post",
    "blocks.0.hook_resid_post",
    "blocks.1.hook_attn_out",
    "blocks.1.attn.hook_z",
    "blocks.1.hook_resid_mid",
    "blocks.1.mlp.hook_post",
    "blocks.1.hook_mlp_out",
)
TOKENS = torch.tensor([[5, 17, 2, 30, 11, 44], [8, 3, 50, 12, 7, 21]])


def on_the_stream() -> TransformerBridge:
    """Norms stand on the stream (GPT-1)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = OpenAIGPTLMHeadModel(
            OpenAIGPTConfig(vocab_size=61, n_positions=20, n_embd=32, n_layer=2, n_head=4)
        )
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.1
    return TransformerBridge(model.eval())


class AllHeads(nn.Module):
    """One dictionary for all heads together, as SAELens has them."""

    hook_z_reshaping_mode = True

    def __init__(self, n_heads: int, d_head: int) -> None:
        super().__init__()
        self.sae, self.sizes = SAE(n_heads * d_head, 12), (n_heads, d_head)

    def encode(self, x: Tensor) -> Tensor:
        return self.sae.encode(x.flatten(-2))

    def decode(self, features: Tensor) -> Tensor:
        return self.sae.decode(features).unflatten(-1, self.sizes)


def moved(bridge: TransformerBridge, hook: HookPoint, entry: tuple[int, ...]) -> Tensor:
    """By how much the logits move when one feature goes away, patterns, factors and all later parts
    held.
    """
    base = bridge.hook_dict[hook.name.rpartition(".")[0]]
    later = [
        other
        for name, other in bridge.hook_dict.items()
        if name.endswith(("hook_attn_out", "hook_mlp_out"))
        and other.order > base.order
        and not (base.name.endswith(("hook_z", "hook_post")) and _last_matrix(base.name, name))
    ]

    def gone(features: Tensor, hook: object) -> Tensor:
        features[entry] = 0
        return features

    with bridge.linearised(TOKENS, freeze=("ln_scale", *(other.name for other in later))):
        before, after = bridge(TOKENS), bridge.run_with_hooks(TOKENS, fwd_hooks=[(hook, gone)])
    if (cap := bridge.cfg.output_logits_soft_cap) > 0:  # attributions are of what enters it
        before, after = (cap * (logits / cap).atanh() for logits in (before, after))
    return before - after


def _last_matrix(base: str, name: str) -> bool:
    """Whether this is the output of the very part that `base` is inside of."""
    _, layer, part, _ = base.split(".")
    return name == f"blocks.{layer}.hook_{part}_out"


@torch.no_grad()
@pytest.mark.parametrize("case", [*(case for case in CASES if case != "bert"), "on the stream"])
def test_a_features_part_of_a_logit_goes_with_it(case: str) -> None:
    bridge = on_the_stream() if case == "on the stream" else bridge_of(case)
    dtype = (
        torch.float32 if case in EXPERTS else torch.float64
    )  # torch has no grouped product in double precision
    bridge.to(dtype)
    seen = 0
    for point in (name for name in POINTS if name in bridge.hook_dict):
        shape = bridge.run_with_cache(TOKENS, names_filter=point)[1][point].shape
        kinds: list[nn.Module] = [SAE(shape[-1], 12)]
        if point.endswith("hook_z"):
            kinds.append(AllHeads(*shape[-2:]))
        for kind in kinds:
            with bridge.basis(point, "own", kind.to(dtype)) as hook:
                _, cache = bridge.run_with_cache(
                    TOKENS, names_filter=lambda n, own=hook.name: n == own or "scale" in n
                )
                found = feature_logit_attrs(cache, hook, 5, 9)
                assert found.shape == (*cache[hook.name].shape[2:], *TOKENS.shape)
                for entry in cache[hook.name].nonzero()[::37].tolist():
                    row, pos, *feature = entry
                    right = moved(bridge, hook, tuple(entry))[row, pos]
                    mine = found[(*feature, row, pos)]
                    assert torch.allclose(mine, right[5] - right[9], rtol=1e-4, atol=2e-6), (
                        point,
                        entry,
                    )  # RMS norms are float32
                    seen += bool(mine.abs() > 1e-3)
                one = feature_logit_attrs(cache, hook, 5, 9, pos_slice=3)
                assert torch.allclose(one, found[..., 3])
    assert seen > 20


@torch.no_grad()
def test_what_is_missing_or_goes_elsewhere_first_is_said() -> None:
    bridge = bridge_of("gemma2")
    with bridge.basis("blocks.0.attn.hook_z", "own", SAE(12, 5)) as hook:
        _, cache = bridge.run_with_cache(TOKENS, names_filter=[hook.name, "ln_final.hook_scale"])
        with pytest.raises(MissingActivationsError, match=r"blocks\.0\.ln1_post\.hook_scale"):
            feature_logit_attrs(cache, hook, 5)
        _, cache = bridge.run_with_cache(
            TOKENS, names_filter=lambda name: name == hook.name or "scale" in name
        )
        bridge.original_model.model.layers[0].self_attn.o_proj.weight.mul_(2)
        with pytest.raises(
            ValueError, match=r"the weights at blocks\.0\.attn\.hook_z were changed since the run"
        ):
            feature_logit_attrs(cache, hook, 5)
    for inside in ("blocks.0.attn.hook_out", "blocks.0.attn.hook_v", "blocks.0.mlp.hook_pre"):
        with bridge.basis(
            inside, "own", SAE(28 if "mlp" in inside else 12 if "v" in inside[-1] else 32, 5)
        ) as hook:
            _, cache = bridge.run_with_cache(
                TOKENS, names_filter=lambda name: "own" in name or "scale" in name
            )
            with pytest.raises(ValueError, match="goes through the rest of its part first"):
                feature_logit_attrs(cache, hook, 5)
