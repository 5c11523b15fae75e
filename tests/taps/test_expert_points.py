"""Each expert's input, activations and output: against the experts' own weights, edited, and where
each is a module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from adapters import verify
from adapters.feed_forward import expert_bias, expert_weight
from bridge import TransformerBridge
from tests.adapters.test_verify_all import SIZES, tiny
from tests.conftest import torch_hooks
from tests.loading.patched_qwen2_moe import SequentialExperts
from tests.tiny_models import tiny_model

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(3))
#: Of classes that have no adapter: what is where is inferred.
INFERRED: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "olmoe": (OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}
CASES = ["mixtral-gqa", "qwen2_moe-gqa", "qwen3_moe-gqa", "gpt_oss-gqa", *INFERRED]
PARTS = ("in", "gate", "pre", "post", "out")


def mixture(case: str) -> PreTrainedModel:
    """A tiny model with four experts in its second layer, each of which some tokens are sent to."""
    if case not in INFERRED:
        return tiny(case)
    config, sizes = INFERRED[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (0.5 if name.endswith("mlp.gate.weight") else 0.2)
            )
    return model.eval()


def names(layer: int, *parts: str) -> list[str]:
    return [f"blocks.{layer}.mlp.experts.{e}.hook_{part}" for e in range(4) for part in parts]


def experts_of(bridge: TransformerBridge) -> nn.Module:
    return bridge.core.get_submodule("model.layers.1.mlp.experts")


@pytest.mark.parametrize("case", CASES)
def test_what_experts_are_given_and_return(case: str):
    bridge = TransformerBridge(mixture(case))
    experts = bridge.core.model.layers[1].mlp.experts
    seen: list[Tensor] = []
    handle = experts.register_forward_hook(
        lambda module, args, output: seen.extend([*args, output])
    )
    plain = bridge(TOKENS)
    handle.remove()
    entered, chosen, weights, left = seen
    logits, cache = bridge.run_with_cache(TOKENS, names_filter=names(1, *PARTS))
    torch.testing.assert_close(logits, plain)
    total = torch.zeros_like(left)
    for e in range(4):
        act = {part: cache[f"blocks.1.mlp.experts.{e}.hook_{part}"] for part in PARTS}
        rank, token = torch.where((chosen == e).T)
        assert len(token) > 0 and torch.equal(act["in"], entered[token])
        for part, key in (("gate", "W_gate"), ("pre", "W_in"), ("out", "W_out")):
            made = (act["post"] if part == "out" else act["in"]) @ expert_weight(experts, e, key).T
            made = made + expert_bias(experts, e, key) if experts.has_bias else made
            torch.testing.assert_close(act[part], made, rtol=1e-4, atol=1e-5)
        total.index_add_(0, token, act["out"] * weights[token, rank, None])
    torch.testing.assert_close(total, left, rtol=1e-4, atol=1e-5)


def test_experts_without_a_gate():
    """Nemotron-H: one projection before the activation function, one behind it; an edit of either,
    by hand.
    """
    bridge = TransformerBridge(tiny_model("nemotron_h"))
    experts = bridge.core.model.layers[1].mixer.experts
    names = [name for name in bridge.hook_dict if ".mlp.experts." in name]
    assert {name.rpartition("_")[2] for name in names} == {"in", "pre", "post", "out"}
    _, cache = bridge.run_with_cache(TOKENS, names_filter=names)
    e = max(range(4), key=lambda e: len(cache[f"blocks.1.mlp.experts.{e}.hook_in"]))
    act = {
        part: cache[f"blocks.1.mlp.experts.{e}.hook_{part}"]
        for part in ("in", "pre", "post", "out")
    }
    torch.testing.assert_close(act["pre"], act["in"] @ experts.up_proj[e].T)
    torch.testing.assert_close(act["post"], act["pre"].relu().square())
    torch.testing.assert_close(act["out"], act["post"] @ experts.down_proj[e].T)
    name = f"blocks.1.mlp.experts.{e}.hook_pre"
    tripled = bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda act, hook: act * 3)])
    with torch.no_grad():
        experts.up_proj[e] *= 3
    torch.testing.assert_close(tripled, bridge(TOKENS))


def test_experts_that_are_computed_in_one_product():
    """Llama 4: each expert has a row for every token, times its weight; what is shown, and edits,
    by hand.
    """
    bridge = TransformerBridge(tiny_model("llama4_text"))
    mixture: Any = bridge.core.model.layers[1].feed_forward
    at, experts, own = "blocks.1.mlp", mixture.experts, bridge(TOKENS)
    names = [name for name in bridge.hook_dict if name.startswith(at) and "shared" not in name]
    _, cache = bridge.run_with_cache(TOKENS, names_filter=["blocks.1.ln2.hook_out", *names])
    tokens, weights = (
        cache[name].flatten(0, 1) for name in ("blocks.1.ln2.hook_out", f"{at}.hook_expert_weights")
    )
    logits, indices = (
        cache[f"{at}.hook_{name}"].flatten(0, 1) for name in ("router_logits", "expert_indices")
    )
    torch.testing.assert_close(logits, tokens @ mixture.router.weight.T)
    assert torch.equal(indices, logits.topk(2).indices)
    torch.testing.assert_close(weights.gather(-1, indices), logits.sigmoid().gather(-1, indices))
    for e in range(4):
        act = {part: cache[f"{at}.experts.{e}.hook_{part}"] for part in PARTS}
        torch.testing.assert_close(act["in"], tokens * weights[:, e, None])
        gate, up = (act["in"] @ experts.gate_up_proj[e]).chunk(2, -1)
        for part, made in (
            ("gate", gate),
            ("pre", up),
            ("post", up * torch.nn.functional.silu(gate)),
        ):
            torch.testing.assert_close(act[part], made)
        torch.testing.assert_close(act["out"], act["post"] @ experts.down_proj[e])
    edited = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[(f"{at}.experts.2.hook_pre", lambda act, hook: act * 3)]
    )
    others = (logits.argsort(-1)[:, :2]).view(*TOKENS.shape, 2)
    sent = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[(f"{at}.hook_expert_indices", lambda act, hook: others)]
    )
    with torch.no_grad():
        experts.gate_up_proj[2, :, experts.expert_dim :] *= 3
        torch.testing.assert_close(edited, bridge(TOKENS))
        experts.gate_up_proj[2, :, experts.expert_dim :] /= 3
    assert not torch.allclose(sent, own)


def test_experts_whose_matrices_are_stacked():
    """DBRX: three parameters for all experts; gate and up are given what is put in place of the
    expert's input.
    """
    bridge = TransformerBridge(tiny_model("dbrx"))
    mixture: Any = bridge.core.transformer.blocks[1].ffn
    at, E = "blocks.1.mlp", mixture.experts.num_experts
    w1, v1, w2 = (
        p.detach().view(E, -1, 32)
        for p in (getattr(mixture.experts.mlp, n) for n in ("w1", "v1", "w2"))
    )
    names = [name for name in bridge.hook_dict if name.startswith(f"{at}.")]
    _, cache = bridge.run_with_cache(
        TOKENS, names_filter=[f"{at}.hook_topk_weights", *names, "blocks.1.hook_mlp_out"]
    )
    weights, chosen = (
        cache[f"{at}.hook_{name}"].flatten(0, 1) for name in ("topk_weights", "expert_indices")
    )
    total = torch.zeros(TOKENS.numel(), 32)
    for e in range(E):
        act = {part: cache[f"{at}.experts.{e}.hook_{part}"] for part in PARTS}
        gate, up = act["in"] @ w1[e].T, act["in"] @ v1[e].T
        for part, made in (
            ("gate", gate),
            ("pre", up),
            ("post", torch.nn.functional.silu(gate) * up),
        ):
            torch.testing.assert_close(act[part], made)
        torch.testing.assert_close(act["out"], act["post"] @ w2[e])
        rank, token = torch.where((chosen == e).T)
        total.index_add_(0, token, act["out"] * weights[token, rank, None])
    torch.testing.assert_close(total, cache["blocks.1.hook_mlp_out"].flatten(0, 1))
    e = int(chosen.flatten().mode().values)
    halved = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[(f"{at}.experts.{e}.hook_in", lambda act, hook: act * 0.5)]
    )
    with torch.no_grad():
        for p in (mixture.experts.mlp.w1, mixture.experts.mlp.v1):
            p.view(E, -1, 32)[e] *= 0.5
    torch.testing.assert_close(halved, bridge(TOKENS))


@pytest.mark.parametrize("case", CASES)
def test_an_expert_that_is_changed(case: str):
    """Its output set to zero is its weight set to zero; its input doubled is other tokens."""
    bridge = TransformerBridge(mixture(case))
    name = "blocks.1.mlp.experts.2"
    zero = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[(f"{name}.hook_out", lambda act, hook: act * 0)]
    )
    with torch.no_grad():
        experts = bridge.core.model.layers[1].mlp.experts
        kept = {
            key: value[2].clone()
            for key, value in experts.named_parameters()
            if key.startswith("down_proj")
        }
        for key in kept:
            experts.get_parameter(key)[2] = 0
        wanted = bridge(TOKENS)
        for key, value in kept.items():
            experts.get_parameter(key)[2] = value
    torch.testing.assert_close(zero, wanted)
    assert not torch.allclose(zero, bridge(TOKENS))
    doubled = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[(f"{name}.hook_in", lambda act, hook: act * 2)]
    )
    _, cache = bridge.run_with_cache(TOKENS, names_filter=f"{name}.hook_gate")

    def set_both(act: Tensor, hook: object) -> Tensor:
        bias = (
            expert_bias(experts, 2, "W_gate" if "gate" in str(hook) else "W_in")
            if experts.has_bias
            else 0
        )
        return (act - bias) * 2 + bias

    by_hand = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[(f"{name}.hook_gate", set_both), (f"{name}.hook_pre", set_both)]
    )
    torch.testing.assert_close(doubled, by_hand)
    assert len(cache[f"{name}.hook_gate"]) > 0
    assert torch_hooks(bridge.core) == 0


def test_an_expert_without_tokens_has_no_rows():
    bridge = TransformerBridge(tiny("mixtral-gqa"))
    with torch.no_grad():
        gate = bridge.core.model.layers[0].mlp.gate
        gate.weight.mul_(0)
        _, cache = bridge.run_with_cache(TOKENS, names_filter=names(0, *PARTS))
    rows = [len(cache[name]) for name in names(0, "in")]
    assert sorted(rows) == [0, 0, 14, 14]
    empty = rows.index(0)
    assert cache[f"blocks.0.mlp.experts.{empty}.hook_out"].shape == (0, 32)
    assert cache[f"blocks.0.mlp.experts.{empty}.hook_post"].shape == (0, 48)


@pytest.mark.parametrize("case", ["qwen2_moe-gqa", *INFERRED])
def test_experts_that_are_modules(case: str, tmp_path: Path):
    """transformers' page on patches: the same points, on modules of their own."""
    mixture(case).save_pretrained(tmp_path)
    plain = TransformerBridge.boot_transformers(str(tmp_path))
    of = plain.core.config.model_type
    patched = TransformerBridge.boot_transformers(
        str(tmp_path),
        patches={type(experts_of(plain)).__name__: SequentialExperts},
        weight_conversions={of: []},
    )
    assert isinstance(experts_of(patched), SequentialExperts) and list(patched.hook_dict) == list(
        plain.hook_dict
    )
    assert all(
        torch.equal(patched.weights[name], get()) for name, get in plain.weights.getters.items()
    )
    assert case == "olmoe" or verify(patched, level="quick").passed
    wanted, expected = plain.run_with_cache(TOKENS, names_filter=names(1, *PARTS))
    logits, cache = patched.run_with_cache(TOKENS, names_filter=names(1, *PARTS))
    torch.testing.assert_close(logits, wanted)
    for name in names(1, *PARTS):
        torch.testing.assert_close(cache[name], expected[name], msg=lambda m, n=name: f"{n}: {m}")
    for part in PARTS:
        hooks = [(f"blocks.1.mlp.experts.1.hook_{part}", lambda act, hook: act * 0.3)]
        torch.testing.assert_close(
            patched.run_with_hooks(TOKENS, fwd_hooks=hooks),
            plain.run_with_hooks(TOKENS, fwd_hooks=hooks),
        )
        torch.testing.assert_close(
            patched.program(interventions=hooks)(TOKENS)["logits"],
            plain.run_with_hooks(TOKENS, fwd_hooks=hooks),
        )


def test_a_router_in_a_program():
    """DeepSeek's chooses by scores in groups: what its matrix makes is another thing than what is
    compared.
    """
    bridge = TransformerBridge(mixture("deepseek_v3"))
    for name in ("hook_router_logits", "hook_expert_weights", "experts.1.hook_post"):
        hooks = [(f"blocks.1.mlp.{name}", lambda act, hook: act * 0.5)]
        with bridge.hooks(hooks):
            wanted, cache = bridge.run_with_cache(TOKENS, names_filter=hooks[0][0])
        made = bridge.program(capture=[hooks[0][0]], interventions=hooks)(TOKENS)
        assert torch.equal(made["logits"], wanted) and torch.equal(
            made[hooks[0][0]], cache[hooks[0][0]]
        )
        assert not torch.allclose(wanted, bridge(TOKENS), atol=1e-5)


def test_nobody_pays_for_what_nobody_listens_to():
    bridge = TransformerBridge(tiny("mixtral-gqa"))
    assert not [name for name in bridge.run_with_cache(TOKENS)[1] if ".experts." in name]
    assert torch_hooks(bridge.core) == 0
    before = bridge(TOKENS)
    bridge.run_with_cache(TOKENS, names_filter=names(0, "out"))
    assert torch.equal(bridge(TOKENS), before)
