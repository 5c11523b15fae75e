"""Residual streams that are no plain sums: scaled, normed as they enter, several at once, in turn,
positions first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from adapters import verify
from adapters.architecture import Block, Readout, Step
from adapters.attention import Projection
from adapters.feed_forward import MLP
from adapters.proofs.evidence import Hook
from adapters.proofs.slopes import SLOPES
from adapters.views import Affine, times
from benchmarks.models import how_much
from bridge import TransformerBridge
from bridge.circuits import Graph
from bridge.lens import lens
from tests.adapters.mutations import mutations, tried
from tests.tiny_models import tiny_model
from weight_processing.limits import no_processing

TOKENS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
#: What is offered of each, and the claims that are not proved, by a word.
OFFERED = {
    "beam": ("full", ""),
    "deepseek_v4": ("parts", ""),
    "doge": ("full", ""),
    "gpt_neox_japanese": ("full", ""),
    "hy_v4": ("parts", ""),
    "inkling_text": ("parts", ""),
    "longcat_flash": ("parts", ""),
    "minimax": ("full", ""),
    "qwen4_exp_text": ("parts", ""),
    "rwkv": ("full", ""),
    "xlnet": ("parts", ""),
    "zaya": ("parts", ""),
}


def of(model_type: str, **options: Any) -> tuple[PreTrainedModel, TransformerBridge]:
    model = tiny_model(model_type, **options)
    return model, TransformerBridge(model)


@pytest.mark.parametrize("model_type", OFFERED)
def test_the_stream_and_its_parts_are_offered_and_proved(model_type: str) -> None:
    model, bridge = of(model_type)
    offered, unproved = OFFERED[model_type]
    assert how_much(bridge) == offered
    report = verify(bridge)
    assert all(unproved and check.name.startswith(unproved) for check in report.failed), str(report)
    with torch.no_grad():
        own = model(TOKENS, output_hidden_states=True).hidden_states
        _, cache = bridge.run_with_cache(TOKENS)
    after = (
        "resid_post" if model_type == "rwkv" else "resid_pre"
    )  # whose first is what leaves the first block
    for layer in range(bridge.cfg.n_layers):
        seen = cache[after, layer]
        torch.testing.assert_close(seen.reshape(own[layer].shape), own[layer])


#: Claims of streams: the types in which they are made, and words of the changes that are tried.
CHANGED = {
    "beam": ("residual_transform",),
    "doge": ("residual_transform",),
    "minimax": ("residual_transform", "norm before the first"),
    "zaya": ("residual_transform", "output_transform"),
    "longcat_flash": ("reads what",),
    "xlnet": ("stream_view",),
    "deepseek_v4": ("Mixer: streams not", "stream_view", "collapse"),
    "hrm_text": ("block_inputs left", "parameters of the embedding"),
    "qwen4_exp_text": ("stream_view",),
}


@pytest.mark.parametrize("model_type", CHANGED)
def test_a_wrong_claim_is_refused(model_type: str) -> None:
    model = tiny_model(model_type)
    chosen = [
        each for each in mutations(model) if any(word in each.name for word in CHANGED[model_type])
    ]
    assert len(chosen) >= len(CHANGED[model_type])
    for mutation in chosen:
        report = tried(model, mutation)
        assert isinstance(report, Exception) or not report.passed, mutation.name


def test_a_stream_that_is_rescaled_between_blocks() -> None:
    """RWKV halves it every few blocks, and before the final norm."""
    model, bridge = of("rwkv", num_hidden_layers=4, rescale_every=2)
    assert (
        bridge.architecture.stack.block_inputs == {2: (("", 0.5),), 4: (("", 0.5),)}
        and not bridge.offered().not_offered
    )
    assert verify(bridge).passed
    (change,) = [each for each in mutations(model) if "block_inputs" in each.name]
    report = tried(model, change)
    assert not isinstance(report, Exception) and not report.passed
    with pytest.raises(ValueError, match=NO_SUM):
        bridge.run_with_cache(TOKENS)[1].decompose_resid()


def test_a_sum_that_parameters_scale_and_shift() -> None:
    """MobileBERT's norms are none: ``(stream + result) * weight + bias``."""
    model = tiny_model("mobilebert", "masked")
    block = TransformerBridge(model).architecture.stack.block
    (step,) = block.steps
    norm = "output.bottleneck.LayerNorm"
    assert step.residual_transform == (Affine(weight=f"{norm}.weight"),)
    assert step.output_transform == (Affine(weight=f"{norm}.weight"), Affine(plus=f"{norm}.bias"))
    (change,) = [
        each
        for each in mutations(model)
        if each.name.endswith(f"without {Affine(plus=f'{norm}.bias')}")
    ]
    report = tried(model, change)
    assert not isinstance(report, Exception) and any(
        "= resid_post" in check.name for check in report.failed
    )


def half(x: Tensor, hook: Hook) -> Tensor:
    return x * 0.5


@torch.no_grad()
def test_an_edit_behind_a_scale_of_parameters() -> None:
    """Zaya adds ``(result + bias) * scale``, made in one module with the stream."""
    model, bridge = of("zaya")
    scaling = model.model.layers[1].post_attention_residual_scale

    def plain(module: object, args: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
        return output - 0.5 * (args[0] + scaling.hidden_states_bias) * scaling.hidden_states_scale

    handle = scaling.register_forward_hook(plain)
    expected = model(TOKENS).logits
    handle.remove()
    found = bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_attn_out", half)])
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, bridge(TOKENS))


@torch.no_grad()
def test_an_edit_of_one_of_several_streams() -> None:
    model, bridge = of("deepseek_v4")

    def without_the_second(x: Tensor, hook: Hook) -> Tensor:
        assert x.shape == (2, 9, 4, bridge.cfg.d_model)
        return torch.cat([x[:, :, :1], torch.zeros_like(x[:, :, 1:2]), x[:, :, 2:]], 2)

    def zero(module: object, args: tuple[Tensor, ...]) -> None:
        args[0][:, :, 1].zero_()

    handle = model.model.layers[0].ffn_hc.register_forward_pre_hook(zero)
    expected = model(TOKENS).logits
    handle.remove()
    found = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[("blocks.0.hook_resid_mid", without_the_second)]
    )
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, bridge(TOKENS))


@torch.no_grad()
def test_an_edit_where_positions_come_first() -> None:
    model, bridge = of("xlnet")

    def nothing_at_two(x: Tensor, hook: Hook) -> Tensor:
        x = x.clone()
        x[0, 2] = 0
        return x

    def plain(module: object, args: object, output: Tensor) -> None:
        output[2, 0] = 0

    handle = model.transformer.layer[0].ff.layer_2.register_forward_hook(plain)
    expected = model(TOKENS).logits
    handle.remove()
    found = bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_mlp_out", nothing_at_two)])
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, bridge(TOKENS))


def test_lists_of_blocks_that_run_in_turn() -> None:
    """HRM runs its low list twice or more for each run of its high one: each run of a block has
    hook points.

    Its first turns run without a graph: where gradients miss a part of what edits do, points are
    withdrawn.
    """
    model, bridge = of("hrm_text")
    stack, reasons = bridge.architecture.stack, bridge.offered().not_offered
    assert how_much(bridge) == "parts" and verify(bridge).passed
    assert any(SLOPES in why for why in reasons.values())
    runs = [i for i, member in enumerate(stack.members) if member.startswith("H_module.layers.0@")]
    calls: list[Tensor] = []
    handle = model.model.H_module.layers[0].register_forward_hook(
        lambda module, args, output: calls.append(output)
    )
    _, cache = bridge.run_with_cache(TOKENS)
    handle.remove()
    assert len(calls) == len(runs) > 1
    offered = [
        i for i, run in enumerate(runs) if f"blocks.{run}.hook_resid_post" in bridge.hook_dict
    ]
    assert offered
    for i in offered:
        assert torch.equal(cache[f"blocks.{runs[i]}.hook_resid_post"], calls[i])
    again: list[Tensor] = []

    def plain(module: object, args: object, output: Tensor) -> Tensor:
        again.append(output)
        return output * 0.5 if len(again) == offered[0] + 1 else output

    handle = model.model.H_module.layers[0].register_forward_hook(plain)
    expected = model(TOKENS).logits
    handle.remove()
    found = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[(f"blocks.{runs[offered[0]]}.hook_resid_post", half)]
    )
    torch.testing.assert_close(found, expected)


def test_a_bias_that_the_block_adds_is_a_part_of_the_weights() -> None:
    model, bridge = of("gpt_neox_japanese")
    own = model.gpt_neox_japanese.layers[1].attention.dense_bias
    assert torch.equal(bridge.weights["blocks.1.attn.b_O"], own)
    assert not bridge.weights["blocks.0.attn.b_O"].any()


NO_SUM = (
    "its residual stream is multiplied or normalised on entering a block, so it is not the sum of"
    " what was written to it"
)


def test_studies_refuse_what_is_no_sum() -> None:
    _, doge = of("doge")
    _, cache = doge.run_with_cache(TOKENS)
    with pytest.raises(ValueError, match=NO_SUM):
        cache.decompose_resid()
    with pytest.raises(ValueError, match=NO_SUM):
        doge.accumulated_bias(1)
    with pytest.raises(ValueError, match=NO_SUM):
        Graph.of(doge)
    assert NO_SUM in no_processing(doge.core, doge.architecture)
    _, several = of("deepseek_v4")
    _, cache = several.run_with_cache(TOKENS)
    for study in (cache.decompose_resid, cache.accumulated_resid, lambda: lens(several, TOKENS)):
        with pytest.raises(ValueError, match=r"has 4 residual streams"):
            study()


PART = MLP("mlp", Projection("up"), "down")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: Step(PART, parallel_to=0, residual_transform=times(2.0)),
            "the first of parallel steps says it",
        ),
        (lambda: Block((Step(PART), Step(PART, parallel_to=1))), "none of the 1 before it"),
        (
            lambda: Readout("lm_head", output_transform=Affine(weight="scale")),
            "multiplies with a parameter",
        ),
    ],
)
def test_declarations_that_say_nothing_are_refused(make: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


def test_an_edit_behind_a_scale_of_zeros_is_refused() -> None:
    """What is added there is nothing, whatever is made of it: there is no tensor that would become
    the edit.
    """
    model, bridge = of("zaya")
    with torch.no_grad():
        model.model.layers[1].post_attention_residual_scale.hidden_states_scale[0] = 0
    name = "blocks.1.hook_attn_out"
    assert torch.equal(bridge.run_with_cache(TOKENS, names_filter=name)[0], model(TOKENS).logits)
    with pytest.raises(ValueError, match="has 1 zeros of 32"):
        bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, half)])
    with pytest.raises(ValueError, match="nor has it a gradient"):
        bridge.run_with_hooks(TOKENS, bwd_hooks=[(name, half)])
