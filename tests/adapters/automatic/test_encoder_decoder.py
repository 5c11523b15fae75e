"""Encoder-decoders that no adapter declares: both stacks and the attention between them, against
plain torch hooks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapters import verify
from adapters.automatic.automatic import infer, source_of
from adapters.inputs import sample_inputs
from adapters.views import PositionsFirst
from bridge import TransformerBridge
from tests.adapters.mutations import declared_as
from tests.tiny_models import tiny_model

#: Norms on the stream; norms before; RMS norms, position biases; a mixture in both stacks; gates
#: and grouped heads; positions before the batch.
TYPES = ("bart", "m2m_100", "umt5", "switch_transformers", "t5gemma", "fsmt")
#: The modules that project an encoder's output to keys in the first layer of the decoder, and that
#: put out the result.
CROSS = {
    "bart": (
        "model.decoder.layers.0.encoder_attn.k_proj",
        "model.decoder.layers.0.encoder_attn.out_proj",
    ),
    "m2m_100": (
        "model.decoder.layers.0.encoder_attn.k_proj",
        "model.decoder.layers.0.encoder_attn.out_proj",
    ),
    "umt5": (
        "decoder.block.0.layer.1.EncDecAttention.k",
        "decoder.block.0.layer.1.EncDecAttention.o",
    ),
    "switch_transformers": (
        "decoder.block.0.layer.1.EncDecAttention.k",
        "decoder.block.0.layer.1.EncDecAttention.o",
    ),
    "fsmt": (
        "model.decoder.layers.0.encoder_attn.k_proj",
        "model.decoder.layers.0.encoder_attn.out_proj",
    ),
    "t5gemma": (
        "model.decoder.layers.0.cross_attn.k_proj",
        "model.decoder.layers.0.cross_attn.o_proj",
    ),
}


def run(model: PreTrainedModel, *changes: tuple[str, Any]) -> Tensor:
    """The logits of a model by itself, with torch hooks on the outputs of modules."""
    handles = [model.get_submodule(path).register_forward_hook(hook) for path, hook in changes]
    try:
        with torch.no_grad():
            logits: Tensor = model(**sample_inputs(model)).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits


@pytest.mark.parametrize("model_type", TYPES)
def test_both_stacks_are_offered_and_proved(model_type: str) -> None:
    bridge = TransformerBridge(tiny_model(model_type, "seq2seq"), automatic="always")
    assert bridge.offered().inferred
    assert dict(bridge.offered().not_offered) == {}
    assert [stack.name for stack in bridge.architecture.stacks] == ["encoder", "decoder"]
    names = [[named.name for named in stack.block.named] for stack in bridge.architecture.stacks]
    assert names == [["attn", "mlp"], ["attn", "cross_attn", "mlp"]]
    report = verify(bridge, level="quick")
    assert report.passed, report


@pytest.mark.parametrize("model_type", TYPES)
def test_cross_attention_is_what_torch_hooks_see_and_change(model_type: str) -> None:
    model = tiny_model(model_type, "seq2seq")
    bridge = TransformerBridge(model, automatic="always")
    inputs = sample_inputs(model)
    tokens, more = inputs["input_ids"], {"decoder_input_ids": inputs["decoder_input_ids"]}
    keys, result = CROSS[model_type]
    seen: dict[str, Tensor] = {}

    def keep(path: str) -> tuple[str, Any]:
        return path, lambda module, args, output: seen.__setitem__(path, output)

    plain = run(model, keep(keys), keep(result))
    seen = {path: x.transpose(0, 1) if model_type == "fsmt" else x for path, x in seen.items()}
    _, cache = bridge.run_with_cache(tokens, **more)
    k = cache["decoder.0.cross_attn.hook_k"]
    assert k.shape[1] == tokens.shape[1] != cache["decoder.0.cross_attn.hook_q"].shape[1]
    torch.testing.assert_close(k.flatten(2), seen[keys], rtol=1e-5, atol=1e-5)
    pattern = cache["decoder.0.cross_attn.hook_pattern"]
    assert pattern.shape[-2:] == (more["decoder_input_ids"].shape[1], tokens.shape[1])
    v = cache["decoder.0.cross_attn.hook_v"].repeat_interleave(pattern.shape[1] // k.shape[2], 2)
    z = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
    assert torch.allclose(z, cache["decoder.0.cross_attn.hook_z"], atol=1e-5)
    if model_type != "t5gemma":  # which has a norm behind it
        torch.testing.assert_close(
            cache["decoder.0.hook_cross_attn_out"], seen[result], rtol=1e-5, atol=1e-5
        )

    halved = run(model, (keys, lambda module, args, output: output * 0.5))
    assert float((halved - plain).abs().max()) > 1e-2
    edited = bridge.run_with_hooks(
        tokens, fwd_hooks=[("decoder.0.cross_attn.hook_k", lambda x, hook: x * 0.5)], **more
    )
    torch.testing.assert_close(edited, halved, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_blocks_that_are_given_positions_first_in_both_stacks(tied: bool) -> None:
    """FSMT turns the sum of its embeddings, and turns back what enters its output layer."""
    model = tiny_model("fsmt", "seq2seq", tie_word_embeddings=tied)
    bridge = TransformerBridge(model)
    assert dict(bridge.offered().not_offered) == {}
    inputs = sample_inputs(model)
    tokens, more = inputs["input_ids"], {"decoder_input_ids": inputs["decoder_input_ids"]}
    _, cache = bridge.run_with_cache(tokens, names_filter=lambda name: True, **more)
    decoder = model.model.decoder
    first = cache["decoder_embed.hook_out"] + cache["decoder_pos_embed.hook_out"]
    assert torch.equal(first, cache["decoder.0.hook_resid_pre"])
    assert torch.equal(
        cache["decoder_pos_embed.hook_out"], decoder.embed_positions(more["decoder_input_ids"])
    )
    own = model(**inputs, output_hidden_states=True)
    for layer, seen in enumerate(own.decoder_hidden_states[:-1]):
        assert torch.equal(cache[f"decoder.{layer}.hook_resid_pre"], seen)
    assert torch.equal(cache["unembed.hook_in"], own.decoder_hidden_states[-1])
    assert torch.equal(cache["unembed.hook_out"], own.logits)

    def plain(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[3, 1] = 0
        return output

    def nothing_at_three(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        x[1, 3] = 0
        return x

    expected = run(model, ("model.decoder.layers.1.self_attn.q_proj", plain))
    found = bridge.run_with_hooks(
        tokens, fwd_hooks=[("decoder.1.attn.hook_q", nothing_at_three)], **more
    )
    assert torch.equal(found, expected) and not torch.allclose(found, own.logits)


@pytest.mark.parametrize("model_type", ["bart", "blenderbot-small"])
def test_the_decoders_own_embeddings(model_type: str) -> None:
    """In BART a norm is behind the sum of tokens and positions, in the small Blenderbot behind the
    tokens alone.
    """
    model = tiny_model(model_type, "seq2seq")
    bridge = TransformerBridge(model)
    inputs = sample_inputs(model)
    names = ["decoder_embed.hook_out", "decoder_pos_embed.hook_out", "decoder.0.hook_resid_pre"]
    _, cache = bridge.run_with_cache(
        inputs["input_ids"], names_filter=names, decoder_input_ids=inputs["decoder_input_ids"]
    )
    norm: nn.Module = model.model.decoder.layernorm_embedding
    tokens, positions = cache["decoder_embed.hook_out"], cache["decoder_pos_embed.hook_out"]
    with torch.no_grad():
        first = norm(tokens + positions) if model_type == "bart" else norm(tokens) + positions
        other = norm(tokens) + positions if model_type == "bart" else norm(tokens + positions)
    assert torch.allclose(first, cache["decoder.0.hook_resid_pre"], atol=1e-5)
    assert not torch.allclose(other, first, atol=1e-3)


def test_the_inferred_t5_shows_what_the_declared_one_does() -> None:
    model = tiny_model("t5", "seq2seq")
    declared, inferred = TransformerBridge(model), TransformerBridge(model, automatic="always")
    inputs = sample_inputs(model)
    caches = [
        bridge.run_with_cache(inputs["input_ids"], decoder_input_ids=inputs["decoder_input_ids"])[1]
        for bridge in (declared, inferred)
    ]
    assert set(caches[0].keys()) <= set(caches[1].keys())
    for name in caches[0].keys():  # noqa: SIM118  # a cache is iterated over by its tensors
        assert torch.equal(caches[0][name], caches[1][name]), name
    for mine, other in zip(declared.architecture.stacks, inferred.architecture.stacks, strict=True):
        assert [n.step.part.path for n in mine.block.named] == [
            n.step.part.path for n in other.block.named
        ]
        assert mine.final_norm == other.final_norm
    for name in (
        "n_layers",
        "n_heads",
        "d_head",
        "d_mlp",
        "attn_scale",
        "relative_attention_num_buckets",
    ):
        assert getattr(declared.cfg, name) == getattr(inferred.cfg, name), name


def test_a_table_that_a_layer_does_not_add_is_not_its_position_bias() -> None:
    """Cross-attention has no bias, self-attention has one in every layer, that of the first layer's
    table.
    """
    stack = infer(tiny_model("mt5", "seq2seq")).architecture.stacks[1]
    for layer in range(2):
        own, cross = stack.block_at(layer).attentions
        assert (own.position_bias, cross.position_bias) == ("relative_attention_bias", None)


@pytest.mark.parametrize("view", [None, PositionsFirst(embeddings=False, end=True)])
def test_a_wrong_order_of_positions_is_not_proved(view: PositionsFirst | None) -> None:
    model = tiny_model("fsmt", "seq2seq")
    right = infer(model).architecture
    wrong = replace(right, stacks=(right.stacks[0], replace(right.stacks[1], stream_view=view)))
    with declared_as(wrong):
        report = verify(TransformerBridge(model), level="quick")
    assert not report.passed


def test_a_norm_of_the_decoders_embeddings_that_is_left_out_is_not_proved() -> None:
    model = tiny_model("bart", "seq2seq")
    right = infer(model).architecture
    decoder = right.stacks[1]
    wrong = replace(
        right,
        stacks=(right.stacks[0], replace(decoder, embedding=replace(decoder.embedding, norm=None))),
    )
    bridge = TransformerBridge(model)
    bridge.__dict__["architecture"] = wrong
    report = verify(bridge, level="quick")
    assert not report.passed
    assert any("begins with the embeddings" in check.name for check in report.failed)


def test_no_start_token_is_asked_for_where_decoder_tokens_are_given() -> None:
    model = tiny_model("t5", "seq2seq")
    bridge, inputs = TransformerBridge(model), sample_inputs(model)
    assert not hasattr(model.config, "decoder_start_token_id")
    with torch.no_grad():
        logits = bridge(inputs["input_ids"], decoder_input_ids=inputs["decoder_input_ids"])
    assert torch.equal(logits, run(model))
    with pytest.raises(ValueError, match="pass decoder_input_ids"):
        bridge(inputs["input_ids"])


def test_a_bias_behind_the_output_layer_is_told_and_no_unknown() -> None:
    """Marian adds one to its logits, which is no parameter of a layer."""
    model = tiny_model("marian", "seq2seq")
    model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(0))
    bridge = TransformerBridge(model)
    assert dict(bridge.offered().not_offered) == {}
    report = verify(bridge)
    assert report.passed, report
    assert bridge.architecture.readout.bias == "final_logits_bias"
    assert torch.equal(bridge.b_U, model.final_logits_bias[0])


def test_the_layers_between_stream_and_output_layer_are_found_without_a_module_around_them() -> (
    None
):
    bridge = TransformerBridge(tiny_model("distilbert", "masked"))
    (head,) = bridge.architecture.heads
    assert (head.path, head.linear) == (".vocab_transform", ".vocab_transform")
    assert verify(bridge, level="quick").passed


def test_generation_shows_cross_attention_at_every_step() -> None:
    bridge = TransformerBridge(tiny_model("bart", "seq2seq"))
    tokens, shapes = sample_inputs(bridge.core)["input_ids"], list[tuple[int, ...]]()

    def look(x: Tensor, hook: object) -> None:
        shapes.append(tuple(x.shape))

    with bridge.hooks(fwd_hooks=[("decoder.0.cross_attn.hook_pattern", look)]):
        bridge.generate(tokens, max_new_tokens=3, do_sample=False, verbose=False)
    assert shapes == [(3, 4, 1, 11)] * 3


def test_its_source_declares_the_two_stacks() -> None:
    found = infer(tiny_model("t5gemma", "seq2seq")).architecture
    namespace: dict[str, Any] = {}
    source = source_of(found, "MinePreTrainedModel", "Mine").replace(
        '@register("MinePreTrainedModel")\n', ""
    )
    exec(compile(source, "mine", "exec"), namespace)
    assert namespace["mine"](None) == found
