"""Claims of inferred declarations where a model is not what its configuration, or another part of
it, says.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adapters import verify
from adapters.automatic.automatic import infer
from adapters.inputs import sample_inputs, split
from benchmarks.models import how_much
from bridge import TransformerBridge
from tests.adapters.mutations import declared_as
from tests.tiny_models import model_class, tiny_config, tiny_model, tiny_of


def all_of(bridge: TransformerBridge) -> dict[str, Tensor]:
    """Every activation of a run on what is made up for the model."""
    tokens, more = split(bridge.core, sample_inputs(bridge.core))
    with torch.no_grad():
        return dict(bridge.run_with_cache(tokens, names_filter=lambda name: True, **more)[1])


#: Heads as wide as those of a real model, and few of them.
HEADS_OF_64 = {
    "hidden_size": 128,
    "encoder_num_attention_heads": 2,
    "decoder_num_attention_heads": 2,
}
HEADS_OF_64 |= {"encoder_num_key_value_heads": 2, "decoder_num_key_value_heads": 2}


@pytest.mark.parametrize("sizes", ["small", "wide"])
def test_a_rotation_by_the_angles_of_another_width(sizes: str) -> None:
    """Moonshine makes its angles of 90 % of a head's columns, and turns one more: no base of that
    width.
    """
    config = tiny_config("moonshine", "speech", **HEADS_OF_64 if sizes == "wide" else {})
    model = tiny_of(model_class("moonshine", "speech"), config)
    bridge = TransformerBridge(model)
    assert how_much(bridge) == "full"
    report = verify(bridge)
    assert report.passed, report
    speeds = model.model.encoder.rotary_emb.inv_freq.double()
    base, dim = bridge.cfg.rotary_base, bridge.cfg.rotary_dim
    assert base is not None and dim == 2 * len(speeds)
    torch.testing.assert_close(
        base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim), speeds, rtol=1e-5, atol=0
    )
    assert base != model.config.rope_parameters["rope_theta"]


def test_a_decoder_with_another_activation_function_than_its_encoder() -> None:
    bridge = TransformerBridge(tiny_model("moonshine", "speech"))
    seen = all_of(bridge)
    pre, linear, post = (
        seen[f"decoder.0.mlp.hook_{name}"] for name in ("pre", "pre_linear", "post")
    )
    torch.testing.assert_close(post, torch.nn.functional.silu(pre) * linear)
    assert bridge.cfg.act_fn == "gelu"
    torch.testing.assert_close(
        seen["encoder.0.mlp.hook_post"], torch.nn.functional.gelu(seen["encoder.0.mlp.hook_pre"])
    )
    first, decoder = infer(bridge.core).architecture.stacks
    part = decoder.block.named[-1].step.part
    wrong = replace(
        decoder,
        block=replace(
            decoder.block,
            steps=(
                *decoder.block.steps[:-1],
                replace(decoder.block.steps[-1], part=replace(part, activation=None)),
            ),
        ),
    )
    with declared_as(replace(infer(bridge.core).architecture, stacks=(first, wrong))):
        assert not verify(TransformerBridge(bridge.core), level="quick").passed


def test_what_is_tied_is_seen_and_not_believed() -> None:
    """Pop2Piano's configuration says that it ties its output layer, and transformers does not tie
    it.
    """
    model = tiny_model("pop2piano", "speech")
    bridge = TransformerBridge(model)
    assert model.config.tie_word_embeddings and model.lm_head.weight is not model.shared.weight
    assert not bridge.cfg.tie_word_embeddings and verify(bridge).passed
    model.lm_head.weight = model.encoder.embed_tokens.weight
    assert bridge.cfg.tie_word_embeddings


def test_queries_that_are_multiplied_with_a_number_for_each_place_and_head() -> None:
    model = tiny_model("mistral_large4", "image_text")
    bridge = TransformerBridge(model)
    report = verify(bridge)
    assert how_much(bridge) == "full" and report.passed, report
    assert any("what queries are multiplied with" in check.detail for check in report.checks)
    seen = all_of(bridge)
    q, turned = seen["blocks.0.attn.hook_q"].double(), seen["blocks.0.attn.hook_rot_q"].double()
    by = model.model.language_model.layers[0].self_attn.softmax_scaling
    places = (torch.arange(q.shape[1]) + 1).log()[:, None]
    expected = (by.scale * places + by.bias).abs().double()
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1) * expected, rtol=1e-4, atol=1e-5)


def test_an_indexers_product_is_not_taken_for_queries_and_keys() -> None:
    """HY V4's indexer multiplies first, in the same module: what enters the attention's product is
    not offered.
    """
    bridge = TransformerBridge(tiny_model("hy_v4"))
    reasons = {
        name: why
        for name, why in bridge.offered().not_offered.items()
        if name.startswith("blocks.0")
    }
    assert set(reasons) == {"blocks.0.attn.hook_rot_q", "blocks.0.attn.hook_rot_k"}
    assert all(
        "a module inside of it may multiply others before" in why for why in reasons.values()
    )
    assert verify(bridge).passed


def test_a_part_that_reads_the_stream_itself_does_not_read_the_norm_of_another() -> None:
    """Inkling 2's MLP reads a mixture of earlier streams; its attention a norm of the stream."""
    attention, mlp = infer(tiny_model("inkling2_text")).architecture.stack.block.steps
    assert attention.pre is not None and attention.pre.path == "input_layernorm"
    assert mlp.pre is None and mlp.entry == "mlp_input"


def test_a_window_that_looks_ahead_one_token_farther_than_back() -> None:
    bridge = TransformerBridge(tiny_model("t5gemma2", "seq2seq"))
    (check,) = [
        each for each in verify(bridge).checks if each.name.startswith("attention goes where")
    ]
    window = bridge.cfg.window_size
    assert check.passed and f"{window} tokens ahead are seen, and {window - 1} back" in check.detail
    pattern = all_of(bridge)["encoder.0.attn.hook_pattern"] > 0
    row = pattern[0, 0, window].nonzero().flatten().tolist()
    assert row[0] == 1 and row[-1] == 2 * window


def test_a_part_of_which_nothing_is_seen_says_so() -> None:
    """Without its kernels MRA's attention puts out zeros."""
    reasons = TransformerBridge(tiny_model("mra", "masked")).offered().not_offered
    assert all("is given zeros alone" in why for why in reasons.values()) and reasons
