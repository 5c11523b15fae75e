"""What looks at the tokens so far sees each row's own tokens, whatever stands at its padding."""

import pytest
import torch

from bridge import TransformerBridge
from bridge.interventions import Mean
from tests.conftest import tiny

ROWS = [torch.arange(1, 9), torch.arange(20, 25), torch.tensor([40, 41])]
GREEDY = {"do_sample": False, "verbose": False, "return_type": "tokens"}


@pytest.fixture
def bridge() -> TransformerBridge:
    return TransformerBridge(tiny("llama"))


def padded(side: str, filler: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, mask = torch.full((3, 8), filler), torch.zeros(3, 8, dtype=torch.long)
    for i, row in enumerate(ROWS):
        place = slice(8 - len(row), 8) if side == "left" else slice(len(row))
        tokens[i, place], mask[i, place] = row, 1
    return tokens, mask


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 5.0},
        {"repetition_penalty": 3.0, "num_beams": 3, "num_return_sequences": 2},
        {"no_repeat_ngram_size": 1},
        {"freq_penalty": 9.0},
    ],
)
def test_padding_is_not_penalised(bridge, options):
    options = GREEDY | options | {"stop_at_eos": False}
    expected = [bridge.generate(row, 6, **options)[:, len(row) :] for row in ROWS]
    likely = [int(bridge(row)[0, -1].argmax()) for row in ROWS]
    for filler in (0, *likely):
        for side in ("left", "right"):
            tokens, mask = padded(side, filler)
            found = bridge.generate(tokens, 6, attention_mask=mask, **options)
            for i, rows in enumerate(expected):
                start = 8 if side == "left" else len(ROWS[i])
                own = found[i * len(rows) : (i + 1) * len(rows), start : start + 6]
                assert torch.equal(own, rows), (filler, side, i)


def test_padding_does_not_make_a_row_long_enough_to_end(bridge):
    row = ROWS[2]
    free = bridge.generate(row, 6, stop_at_eos=False, **GREEDY)[0, len(row) :]
    options = GREEDY | {"min_length": len(row) + 3, "eos_token_id": int(free[0])}
    expected = bridge.generate(row, 6, **options)[0, len(row) :]
    tokens, mask = padded("left", 0)
    found = bridge.generate(tokens, 6, attention_mask=mask, **options)[2, 8:]
    assert int(expected[0]) != int(free[0])
    assert torch.equal(found[: len(expected)], expected)


@pytest.mark.parametrize("name", ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size"])
def test_what_is_made_of_whole_prompts_is_refused(bridge, name):
    tokens, mask = padded("left", 0)
    with pytest.raises(ValueError, match=f"{name} would count the padding"):
        bridge.generate(
            tokens, 6, attention_mask=mask, **GREEDY, **{name: 2}, pad_token_id=60, eos_token_id=60
        )


def test_a_row_that_has_ended_is_in_no_mean(bridge):
    tokens = torch.stack([ROWS[0], ROWS[0].flip(0), ROWS[0] + 10])
    hooks = [("blocks.0.hook_resid_post", Mean("rows", part="generated"))]
    with bridge.hooks(fwd_hooks=hooks):
        free = bridge.generate(tokens, 4, stop_at_eos=False, **GREEDY)[:, 8:]
        ending = int(free[0, 0])
        assert ending not in free[1:, 0]
        with pytest.raises(ValueError, match="a row of this generation has ended"):
            bridge.generate(tokens, 4, eos_token_id=ending, **GREEDY)
        never = next(i for i in range(61) if i not in free)
        assert torch.equal(bridge.generate(tokens, 4, eos_token_id=never, **GREEDY)[:, 8:], free)
