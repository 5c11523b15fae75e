"""Readings of probes in one generation, beside those of runs on the finished texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MaxTimeCriteria

from bridge import TransformerBridge
from bridge.interventions import FittedProbe, Scale
from bridge.interventions.probes import AGGREGATIONS
from tests.conftest import torch_hooks
from tests.interventions.test_probes import POINT, TEXTS, drawn, probe_over
from tests.tiny_models import tiny_model

GREEDY: dict[str, Any] = {"do_sample": False, "verbose": False}


@pytest.fixture(scope="module")
def bridge() -> TransformerBridge:
    return TransformerBridge.boot_embedded()


@pytest.fixture(scope="module")
def probes() -> list[FittedProbe]:
    return [probe_over(over, name=over) for over in AGGREGATIONS]


def own_rows(
    bridge: TransformerBridge, texts: list[str], n: int, **options: Any
) -> list[list[int]]:
    """Each text's tokens, continued on its own, without the last."""
    options = {**GREEDY, **options}
    return [
        bridge.generate(bridge.to_tokens(text), n, **options)[0, :-1].tolist() for text in texts
    ]


def check(readings: Any, expected: Any) -> None:
    assert len(readings) == len(expected)
    for own, right in zip(readings, expected, strict=True):
        assert own.keys() == right.keys()
        for name, reading in right.items():
            scale = max(1.0, float(reading.tokens.abs().max()))
            assert own[name].tokens.shape == reading.tokens.shape
            assert (own[name].tokens - reading.tokens).abs().max() < 1e-5 * scale
            assert abs(own[name].value - reading.value) < 1e-5 * scale


@pytest.mark.parametrize("cached", [True, False])
def test_one_text(bridge: TransformerBridge, probes: list[FittedProbe], cached: bool) -> None:
    text, readings = bridge.generate(
        TEXTS[0], 6, readings=probes, use_past_kv_cache=cached, **GREEDY
    )
    assert text == bridge.generate(TEXTS[0], 6, **GREEDY)
    check(readings, bridge.readings(own_rows(bridge, TEXTS[:1], 6), probes))
    assert torch_hooks(bridge.original_model) == 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["input", "tokens"])
def test_rows_of_several_lengths(
    bridge: TransformerBridge, probes: list[FittedProbe], side: str, kind: str
) -> None:
    """Left-padded prompts, and padding after rows that end before the others."""
    batch = bridge.batch_of(TEXTS, None, side)
    ends = {"eos_token_id": [bridge.to_single_token(" the"), bridge.to_single_token(".")]}
    options = {"attention_mask": batch.mask, "return_type": kind, "padding_side": side, **ends}
    output, readings = bridge.generate(batch.tokens, 9, readings=probes, **options, **GREEDY)
    rows = own_rows(bridge, TEXTS, 9, **ends)
    lengths = zip(rows, batch.mask.sum(1).tolist(), strict=True)
    assert len({len(row) - length for row, length in lengths}) > 1
    check(readings, bridge.readings(rows, probes))
    assert torch.equal(output, bridge.generate(batch.tokens, 9, **options, **GREEDY))
    _, of_texts = bridge.generate(TEXTS, 9, readings=probes, padding_side=side, **ends, **GREEDY)
    check(of_texts, bridge.readings(rows, probes))


def test_they_are_those_of_a_batch_of_requests(
    bridge: TransformerBridge, probes: list[FittedProbe]
) -> None:
    _, readings = bridge.generate(TEXTS, 5, readings=probes, **GREEDY)
    answers = sorted(
        bridge.generate_batch(TEXTS, 5, readings=probes, **GREEDY), key=lambda x: x.index
    )
    check(readings, [answer.readings for answer in answers])


def test_with_a_cache_input_tokens_and_several_sequences(
    bridge: TransformerBridge, probes: list[FittedProbe]
) -> None:
    torch.manual_seed(0)
    tokens, cache, readings, prompt = bridge.generate(
        TEXTS[:3],
        4,
        readings=probes,
        return_cache=True,
        return_input_tokens=True,
        names_filter="blocks.0.hook_mlp_out",
        num_return_sequences=2,
        return_type="tokens",
        stop_at_eos=False,
        padding_side="left",
        verbose=False,
    )
    assert {*cache} == {"blocks.0.hook_mlp_out", POINT} and len(prompt) == 3
    lengths = bridge.batch_of(TEXTS[:3]).mask.sum(1).repeat_interleave(2)
    rows = [row[-(n + 4) : -1].tolist() for row, n in zip(tokens, lengths.tolist(), strict=True)]
    assert len(rows) == 6
    check(readings, bridge.readings(rows, probes))


def test_hooks_act_on_them(bridge: TransformerBridge, probes: list[FittedProbe]) -> None:
    with bridge.hooks(fwd_hooks=[(POINT, Scale(0.0))]):
        _, readings = bridge.generate(TEXTS[0], 3, readings=probes, **GREEDY)
    assert all(reading.value == 0.25 for reading in readings[0].values())  # the bias


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "readings is not available with num_beams"),
        ({"stop_strings": "."}, "4 rows with stop_strings or stopping_criteria"),
        ({"stopping_criteria": MaxTimeCriteria(60.0)}, "stop_strings or stopping_criteria"),
        ({"inputs_embeds": torch.zeros(1, 3, 128)}, "of a prompt of text or tokens"),
    ],
)
def test_what_cannot_have_them_is_refused(
    bridge: TransformerBridge, probes: list[FittedProbe], options: dict[str, Any], message: str
) -> None:
    prompt = () if "inputs_embeds" in options else (TEXTS,)
    with pytest.raises(ValueError, match=message):
        bridge.generate(*prompt, readings=probes, **options, **GREEDY)


def test_streams_traces_and_programs_have_none(
    bridge: TransformerBridge, probes: list[FittedProbe]
) -> None:
    with pytest.raises(ValueError, match="readings is not for a stream"):
        bridge.generate_stream("Mary", readings=probes)
    with pytest.raises(TypeError, match="readings"):
        bridge.trace_generate("Mary", readings=probes)
    with pytest.raises(ValueError, match="readings is not available with a program"):
        bridge.generate("Mary", 2, readings=probes, program=bridge.program(), **GREEDY)
    with pytest.raises(ValueError, match="give each its own name"):
        bridge.generate("Mary", 2, readings=[probes[0], probes[0]], **GREEDY)
    text, readings = bridge.generate(
        TEXTS[0], 6, readings=probes, stop_strings=" the", stop_at_eos=False, **GREEDY
    )
    row = bridge.to_tokens(text)[0, :-1].tolist()
    check(readings, bridge.readings([row], probes))  # one row may have stop strings


def test_an_encoder_decoder_is_refused() -> None:
    bridge = TransformerBridge(tiny_model("t5", "seq2seq"))
    probe = FittedProbe(
        point="encoder_blocks.0.hook_resid_post", values=drawn(1, bridge.cfg.d_model), over="mean"
    )
    with pytest.raises(ValueError, match="which a decoder continues"):
        bridge.generate(torch.tensor([[5, 6, 7]]), 2, readings=[probe], **GREEDY)
