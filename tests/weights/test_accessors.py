"""Weights under HookedTransformer's names: its values, its shapes, and the model's own storage
behind them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from bridge import TransformerBridge
from tests.adapters.test_reference import bridge_of
from tests.adapters.test_verify_all import USUAL, tiny
from tests.reference import DATA, FAMILIES

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(4))
#: The reference of BERT has no weights.
WITH_WEIGHTS = [family for family in FAMILIES if family != "bert"]


def right_weights(family: str) -> dict[str, Tensor]:
    """HookedTransformer's state dict without processing."""
    start = "raw/param/"
    tensors = load_file(DATA / family / "reference.safetensors")
    found = {
        name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)
    }
    if family == "bloom":
        # HookedTransformer allocates a table of positions for every model, random and never read.
        # BLOOM, which tells positions by slopes, has none.
        del found["pos_embed.W_pos"]
    return found


@pytest.mark.parametrize("family", WITH_WEIGHTS)
def test_the_state_dict_is_hooked_transformers(family: str) -> None:
    ours, right = bridge_of(family).tl_parameters(), right_weights(family)
    assert ours.keys() == right.keys()
    wrong = [name for name, value in right.items() if not torch.equal(ours[name], value)]
    assert not wrong
    assert dict(bridge_of(family).tl_named_parameters()).keys() == right.keys()


@pytest.mark.parametrize("family", WITH_WEIGHTS)
def test_stacks_over_layers(family: str) -> None:
    bridge, right = bridge_of(family), right_weights(family)
    for name in (
        "W_Q",
        "W_K",
        "W_V",
        "W_O",
        "b_Q",
        "b_K",
        "b_V",
        "b_O",
        "W_in",
        "W_out",
        "b_in",
        "b_out",
        "W_gate",
    ):
        part = "mlp" if name[2:] in ("in", "out", "gate") else "attn"
        layers = []
        for i in range(2):
            value = right.get(f"blocks.{i}.{part}.{name}")
            if value is None and f"blocks.{i}.{part}._{name}" in right:
                value = right[f"blocks.{i}.{part}._{name}"].repeat_interleave(2, dim=0)
            layers.append(value)
        if layers[0] is None:
            assert name == "W_gate" and not bridge.cfg.gated_mlp
            with pytest.raises(AttributeError, match="W_gate"):
                _ = bridge.W_gate
        else:
            assert torch.equal(getattr(bridge, name), torch.stack(layers))
    assert torch.equal(bridge.W_E, right["embed.W_E"])
    assert torch.equal(bridge.W_U, right["unembed.W_U"])
    assert torch.equal(bridge.b_U, right["unembed.b_U"])
    if "pos_embed.W_pos" in right:
        assert torch.equal(bridge.W_pos, right["pos_embed.W_pos"])
        assert torch.equal(
            bridge.W_E_pos, torch.cat([right["embed.W_E"], right["pos_embed.W_pos"]])
        )


def attention(stack: str, name: str = "attn", own: str = "") -> Iterable[str]:
    for kind in "Wb":
        yield from (f"{stack}.{name}.{kind}_{letter}" for letter in "QO")
        yield from (f"{stack}.{name}.{own}{kind}_{letter}" for letter in "KV")


def mlp(stack: str, gated: bool = False) -> Iterable[str]:
    yield from (f"{stack}.mlp.{name}" for name in ("W_in", "b_in", "W_out", "b_out"))
    yield from [f"{stack}.mlp.W_gate"] * gated


def norm(*names: str, bias: bool = True) -> Iterable[str]:
    for name in names:
        yield from [f"{name}.w"] + [f"{name}.b"] * bias


UNEMBED = {"unembed.W_U", "unembed.b_U"}


def test_names_of_mixtral() -> None:
    expected = {"embed.W_E", *norm("ln_final", bias=False), *UNEMBED}
    for i in range(2):
        block = f"blocks.{i}"
        expected |= {*attention(block, own="_"), *norm(f"{block}.ln1", f"{block}.ln2", bias=False)}
        expected.add(f"{block}.mlp.W_gate.weight")
        expected |= {
            f"{block}.mlp.experts.{e}.W_{part}.weight"
            for e in range(4)
            for part in ("in", "gate", "out")
        }
    assert TransformerBridge(tiny("mixtral-gqa")).tl_parameters().keys() == expected


def test_names_of_gpt_oss() -> None:
    expected = {"embed.W_E", *norm("ln_final", bias=False), *UNEMBED}
    for i in range(2):
        block = f"blocks.{i}"
        expected |= {*attention(block, own="_"), *norm(f"{block}.ln1", f"{block}.ln2", bias=False)}
        parts = [f"experts.{e}.W_{part}" for e in range(4) for part in ("in", "gate", "out")]
        expected |= {
            f"{block}.mlp.{part}.{kind}"
            for part in ("W_gate", *parts)
            for kind in ("weight", "bias")
        }
    bridge = TransformerBridge(tiny("gpt_oss-gqa"))
    assert bridge.tl_parameters().keys() == expected
    mlp, ours = bridge.original_model.model.layers[1].mlp, bridge.blocks[1].mlp
    held, expert = mlp.experts, ours.experts[2]
    assert torch.equal(ours.W_gate.weight, mlp.router.weight) and torch.equal(
        ours.W_gate.bias, mlp.router.bias
    )
    for start, part in enumerate((expert.W_gate, expert.W_in)):
        assert torch.equal(part.weight, held.gate_up_proj[2, :, start::2].T)
        assert torch.equal(part.bias, held.gate_up_proj_bias[2, start::2])
    assert torch.equal(expert.W_out.weight, held.down_proj[2].T)
    assert torch.equal(expert.W_out.bias, held.down_proj_bias[2])


@pytest.mark.parametrize(
    "case", ["qwen2_moe-gqa", "qwen2_moe-mha-tied-dense-first", "qwen2_moe-equal-widths"]
)
def test_names_of_qwen2_moe(case: str) -> None:
    dense = {"qwen2_moe-mha-tied-dense-first": 0, "qwen2_moe-equal-widths": 1}.get(case)
    expected = {"embed.W_E", *norm("ln_final", bias=False), *UNEMBED}
    for i in range(2):
        block, own = f"blocks.{i}", "" if "mha" in case else "_"
        expected |= {*attention(block, own=own), *norm(f"{block}.ln1", f"{block}.ln2", bias=False)}
        if i == dense:
            expected |= {*mlp(block, gated=True)}
            continue
        expected |= {
            f"{block}.mlp.experts.{e}.W_{part}.weight"
            for e in range(4)
            for part in ("in", "gate", "out")
        }
        expected |= {f"{block}.mlp.W_gate.weight", f"{block}.mlp.shared_expert_gate.weight"}
        expected |= {
            f"{block}.mlp.shared_expert.{name}"
            for name in ("W_in", "b_in", "W_gate", "W_out", "b_out")
        }
    bridge = TransformerBridge(tiny(case))
    assert bridge.tl_parameters().keys() == expected
    for i, layer in enumerate(bridge.original_model.model.layers):
        ours = bridge.blocks[i].mlp
        theirs = layer.mlp if i == dense else layer.mlp.shared_expert
        ours = ours if i == dense else ours.shared_expert
        assert torch.equal(ours.W_in, theirs.up_proj.weight.T) and torch.equal(
            ours.W_gate, theirs.gate_proj.weight.T
        )
        assert torch.equal(ours.W_out, theirs.down_proj.weight.T)
        assert ours.b_in.shape == theirs.up_proj.weight.shape[:1]
        if i != dense:
            held, expert = layer.mlp.experts, bridge.blocks[i].mlp.experts[3]
            gate, up = held.gate_up_proj[3].chunk(2)
            assert torch.equal(expert.W_gate.weight, gate) and torch.equal(expert.W_in.weight, up)
            assert torch.equal(expert.W_out.weight, held.down_proj[3])
    if dense is not None:
        with pytest.raises(AttributeError, match="W_in"):
            _ = bridge.W_in


@pytest.mark.parametrize("case", ["t5", "t5-gated-untied"])
def test_names_of_t5(case: str) -> None:
    expected = {"embed.W_E", *norm("encoder_final_ln", "decoder_final_ln", bias=False), *UNEMBED}
    for stack, layers, norms in (("encoder", 2, 2), ("decoder", 3, 3)):
        expected.add(f"{stack}.0.attn.rel_pos_bias.weight")
        for i in range(layers):
            block = f"{stack}.{i}"
            expected |= {*attention(block), *mlp(block, case != "t5")}
            expected |= {*norm(*(f"{block}.ln{n + 1}" for n in range(norms)), bias=False)}
            expected |= {*attention(block, "cross_attn")} if stack == "decoder" else set()
    bridge = TransformerBridge(tiny(case))
    assert bridge.tl_parameters().keys() == expected
    hf = bridge.original_model
    second = hf.decoder.block[2].layer[1].EncDecAttention
    assert torch.equal(bridge.decoder[2].cross_attn.W_K, second.k.weight.view(4, 6, 32).mT)
    assert torch.equal(
        bridge.decoder[2].cross_attn.W_O, second.o.weight.view(32, 4, 6).permute(1, 2, 0)
    )
    scale = 32**-0.5 if hf.config.scale_decoder_outputs else 1.0  # which the logits have, tied
    assert torch.equal(bridge.weights["unembed.W_U"], hf.lm_head.weight.T * scale)
    assert bridge.W_Q.shape == (2, 4, 32, 6)


def test_names_of_bert() -> None:
    bridge = TransformerBridge(tiny("bert", "BertForPreTraining"))
    tables = {"embed.embed.W_E", "embed.pos_embed.W_pos", "embed.token_type_embed.W_token_type"}
    heads = {f"{head}.{kind}" for head in ("mlm_head", "pooler", "nsp_head") for kind in "Wb"}
    expected = tables | heads | UNEMBED | {*norm("embed.ln", "mlm_head.ln")}
    for block in ("blocks.0", "blocks.1"):
        expected |= {*attention(block), *mlp(block), *norm(f"{block}.ln1", f"{block}.ln2")}
    assert bridge.tl_parameters().keys() == expected
    hf = bridge.original_model
    assert torch.equal(bridge.weights["nsp_head.W"], hf.cls.seq_relationship.weight.T)
    assert torch.equal(bridge.weights["mlm_head.b"], hf.cls.predictions.transform.dense.bias)
    assert torch.equal(bridge.W_pos, hf.bert.embeddings.position_embeddings.weight)
    with_one_head = TransformerBridge(tiny("bert")).tl_parameters().keys()
    assert with_one_head == expected - {
        f"{head}.{kind}" for head in ("pooler", "nsp_head") for kind in "Wb"
    }


@pytest.mark.parametrize("case", ["gptj", "phi"])
def test_a_norm_that_both_branches_share_is_there_twice(case: str) -> None:
    bridge = TransformerBridge(tiny(case))
    for kind in "wb":
        first, second = (bridge.weights[f"blocks.1.{name}.{kind}"] for name in ("ln1", "ln2"))
        assert first is second


def test_mixtral_computes_with_its_experts_weights() -> None:
    """As HookedTransformer does: ``W_out(act(W_gate(x)) * W_in(x))`` with linear layers, ``[d_out,
    d_in]``.
    """
    bridge = TransformerBridge(tiny("mixtral-gqa"))
    weights = {name: value.double() for name, value in bridge.tl_parameters().items()}
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
        for block in ("blocks.0", "blocks.1"):
            x = cache[f"{block}.ln2.hook_normalized"].double() * weights[f"{block}.ln2.w"]
            name = f"{block}.mlp"
            share, chosen = (x @ weights[f"{name}.W_gate.weight"].T).softmax(-1).topk(2)
            share = share / share.sum(-1, keepdim=True)
            out = torch.zeros_like(x)
            for e in range(4):
                w_in, w_gate, w_out = (
                    weights[f"{name}.experts.{e}.W_{part}.weight"] for part in ("in", "gate", "out")
                )
                made = (nn.functional.silu(x @ w_gate.T) * (x @ w_in.T)) @ w_out.T
                out += made * (share * (chosen == e)).sum(-1, keepdim=True)
            torch.testing.assert_close(
                cache[f"{block}.hook_mlp_out"].double(), out, atol=1e-5, rtol=1e-4
            )


def storages(model: nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


def computed(case: str, name: str) -> bool:
    """Whether the model stores something else: Gemma's norms and embedding, and what T5's logits
    are scaled with.
    """
    if case == "t5" and name == "unembed.W_U":
        return True
    return "gemma" in case and (name.endswith(".w") or name == "embed.W_E")


@pytest.mark.parametrize("case", [*USUAL, "gpt_oss-gqa", "qwen2_moe-equal-widths"])
def test_weights_are_the_models_own_storage(case: str) -> None:
    bridge = TransformerBridge(tiny(case))
    own = storages(bridge.original_model)
    for name, value in bridge.tl_named_parameters():
        if value.untyped_storage().data_ptr() in own:
            assert value.requires_grad
        else:
            assert computed(case, name) or ("b_" in name and not value.any()), name


@pytest.mark.parametrize("case", [*USUAL, "gpt_oss-gqa", "qwen2_moe-equal-widths"])
def test_gradients_reach_the_parameters(case: str) -> None:
    bridge = TransformerBridge(tiny(case))
    for name, value in bridge.tl_named_parameters():
        if not value.requires_grad:
            continue
        bridge.original_model.zero_grad()
        value.sum().backward()
        touched = sum(
            int(p.grad.count_nonzero())
            for p in bridge.original_model.parameters()
            if p.grad is not None
        )
        assert touched == value.numel(), name


@pytest.mark.parametrize("case", USUAL)
def test_an_edited_weight_changes_the_model(case: str) -> None:
    bridge = TransformerBridge(tiny(case))
    more: dict[str, Any] = {"decoder_input_ids": TOKENS} if case == "t5" else {}
    stack = "encoder" if case == "t5" else "blocks"
    own = "_" if bridge.cfg.n_key_value_heads else ""
    names = ["attn.W_Q", f"attn.{own}W_K", f"attn.{own}W_V", "attn.W_O"]
    names += ["mlp.W_in", "mlp.W_out"] if "mixtral" not in case else ["mlp.experts.2.W_in.weight"]
    names += ["mlp.W_gate"] if bridge.cfg.gated_mlp and "mixtral" not in case else []
    names += ["ln1.w"] if "gemma" not in case else []
    with torch.no_grad():
        before = bridge(TOKENS, **more)
        for name in names:
            value = bridge.weights[f"{stack}.1.{name}"]
            kept = value.clone()
            value.mul_(3.0)
            assert not torch.allclose(bridge(TOKENS, **more), before), name
            value.copy_(kept)
            assert torch.equal(bridge(TOKENS, **more), before)


def test_a_tied_table_is_one_table() -> None:
    bridge = TransformerBridge(tiny("gpt2"))
    assert bridge.W_E.data_ptr() == bridge.W_U.data_ptr()
    with torch.no_grad():
        bridge.W_E[5] = 7.0
    assert (bridge.W_U[:, 5] == 7.0).all()


@pytest.mark.parametrize(
    ("case", "heads", "groups"),
    [
        ("llama-gqa", 4, 2),
        ("gemma-mqa", 4, 1),
        ("mixtral-gqa", 4, 2),
        ("phi-gqa-tied", 4, 2),
        ("gpt_oss-gqa", 4, 2),
    ],
)
def test_grouped_keys_and_values(case: str, heads: int, groups: int) -> None:
    bridge = TransformerBridge(tiny(case))
    block, d_head = bridge.blocks[1].attn, bridge.cfg.d_head
    layer = bridge.original_model.model.layers[1].self_attn
    for letter, module in (("K", layer.k_proj), ("V", layer.v_proj)):
        stored, shown = getattr(block, f"_W_{letter}"), getattr(block, f"W_{letter}")
        assert stored.shape == (groups, 32, d_head) and shown.shape == (heads, 32, d_head)
        assert stored.data_ptr() == module.weight.data_ptr()
        assert torch.equal(shown, stored.repeat_interleave(heads // groups, dim=0))
        bias = getattr(block, f"b_{letter}")
        right = (
            torch.zeros(groups, d_head) if module.bias is None else module.bias.view(groups, d_head)
        )
        assert torch.equal(bias, right.repeat_interleave(heads // groups, dim=0))
        assert torch.equal(getattr(bridge, f"W_{letter}")[1], shown)
    shown.sum().backward()
    assert (layer.v_proj.weight.grad == heads / groups).all()


def test_gradients_reach_the_parameters_through_a_stack() -> None:
    bridge = TransformerBridge(tiny("gpt2"))
    bridge.W_Q[1].sum().backward()
    gradient = bridge.original_model.transformer.h[1].attn.c_attn.weight.grad
    assert (gradient[:, :32] == 1).all() and not gradient[:, 32:].any()
    assert not bridge.original_model.transformer.h[0].attn.c_attn.weight.grad.any()


def test_weights_have_the_models_type() -> None:
    bridge = TransformerBridge(tiny("llama-gqa", dtype=torch.bfloat16))
    assert {value.dtype for value in bridge.tl_parameters().values()} == {torch.bfloat16}


# PEFT still reads the attribute that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_layer_with_lora_has_no_plain_weight() -> None:
    model = peft.get_peft_model(tiny("llama-gqa"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    bridge = TransformerBridge(model)
    for read in (lambda: bridge.blocks[0].attn.W_Q, lambda: bridge.W_Q, bridge.tl_parameters):
        with pytest.raises(
            TypeError, match=r"layers\.0\.self_attn\.q_proj is a Linear.*merge_and_unload"
        ):
            read()
    assert bridge.blocks[0].attn.W_O.shape == (4, 8, 32)
    merged = TransformerBridge(model.merge_and_unload())
    assert merged.blocks[0].attn.W_Q.shape == (4, 32, 8)


def test_a_linear_layer_of_another_class_has_no_plain_weight() -> None:
    class Scaled(nn.Linear):
        pass

    model = tiny("llama-gqa")
    model.model.layers[1].mlp.down_proj = Scaled(48, 32, bias=False)
    bridge = TransformerBridge(model)
    with pytest.raises(
        TypeError, match=r"layers\.1\.mlp\.down_proj is a Scaled.*may compute something else"
    ):
        _ = bridge.blocks[1].mlp.W_out
    assert bridge.blocks[0].mlp.W_out.shape == (48, 32)


def test_gemma_shows_what_its_norms_multiply_with() -> None:
    bridge = TransformerBridge(tiny("gemma2-gqa"))
    layer = bridge.original_model.model.layers[0]
    assert torch.equal(bridge.blocks[0].ln1.w, layer.input_layernorm.weight + 1)
    assert torch.equal(bridge.blocks[0].ln1_post.w, layer.post_attention_layernorm.weight + 1)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS, names_filter="hook_embed")
    torch.testing.assert_close(bridge.W_E[TOKENS], cache["hook_embed"])


def test_a_model_without_a_head_has_no_unembedding() -> None:
    bridge = TransformerBridge(
        transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2))
    )
    with pytest.raises(AttributeError, match="W_U"):
        _ = bridge.W_U


def test_one_weight_of_the_blocks_that_have_a_part(embedded: TransformerBridge) -> None:
    layers, weights = embedded.stack_params_for("mlp", "mlp.W_in", lambda weight: weight.T)
    assert layers == [0, 1, 2, 3]
    assert torch.equal(weights, embedded.W_in.transpose(1, 2))
    with pytest.raises(ValueError, match=r"no block of .* has 'mixer'"):
        embedded.stack_params_for("mixer", "mixer.A")
