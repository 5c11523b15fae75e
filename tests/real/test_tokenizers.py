"""Text and tokens with the tokenizers that people use."""

from functools import partial

import pytest
import torch

from bridge import TransformerBridge
from bridge.generation.generation import TextPieces
from bridge.generation.options import decode
from bridge.run.tokenization import TokenizerFacts
from tests.conftest import tiny

TEXT = "Hello, world! Naïve café – 日本語 🙂"
NAMES = ["gpt2_tokenizer", "mistral_tokenizer", "smollm_tokenizer"]


@pytest.fixture(params=NAMES)
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def bridge(tokenizer):
    return TransformerBridge(tiny("gpt2"), tokenizer)  # only its tokens are asked for


def test_bos_means_the_same_everywhere(bridge, tokenizer):
    plain = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    bos = bridge.tokenizer_facts.bos
    assert bos == tokenizer.bos_token_id
    assert bridge.to_tokens(TEXT, prepend_bos=False, truncate=False).tolist() == [plain]
    assert bridge.to_tokens(TEXT, prepend_bos=True, truncate=False).tolist() == [[bos, *plain]]
    assert bridge.to_tokens(TEXT, truncate=False).tolist() == [[bos, *plain]]
    dressed = tokenizer.bos_token + TEXT
    doubled = bridge.to_tokens(dressed, prepend_bos=True, truncate=False)[0].tolist()
    assert doubled[0] == bos and bos not in doubled[1:]


def test_text_comes_back(bridge):
    tokens = bridge.to_tokens(TEXT, prepend_bos=False, truncate=False)
    assert bridge.to_string(tokens[0]).strip() == TEXT
    assert bridge.to_string(tokens) == [bridge.to_string(tokens[0])]
    pieces = bridge.to_str_tokens(TEXT, prepend_bos=False)
    assert len(pieces) == tokens.shape[1]


def test_pieces_of_a_stream_join(bridge, tokenizer):
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    row = TextPieces(partial(decode, bridge))
    pieces = [row.add([i]) for i in ids] + [row.add([], last=True)]
    assert "".join(pieces) == decode(bridge, ids)
    assert "\ufffd" not in "".join(pieces)


def test_what_they_do_by_themselves(gpt2_tokenizer, mistral_tokenizer, smollm_tokenizer):
    gpt2, mistral, smollm = (
        TokenizerFacts(t) for t in (gpt2_tokenizer, mistral_tokenizer, smollm_tokenizer)
    )
    assert (gpt2.bos, gpt2.adds_bos, gpt2.ending, gpt2.pad) == (50256, False, [], 50256)
    assert mistral.adds_bos == (mistral_tokenizer("a")["input_ids"][0] == 1)
    assert mistral.ending == smollm.ending == []


def test_padding_leaves_the_tokenizer_alone(bridge, tokenizer):
    before = (tokenizer.padding_side, tokenizer.pad_token, tokenizer.backend_tokenizer.to_str())
    for side in ("left", "right"):
        batch = bridge.batch_of(["one", "one two three four"], padding_side=side)
        assert batch.mask is not None
        assert batch.mask[0].tolist() == sorted(batch.mask[0].tolist(), reverse=side == "right")
    assert (
        tokenizer.padding_side,
        tokenizer.pad_token,
        tokenizer.backend_tokenizer.to_str(),
    ) == before


def test_single_tokens(gpt2_tokenizer):
    bridge = TransformerBridge(tiny("gpt2"), gpt2_tokenizer)
    assert bridge.to_single_token(" Mary") == 5335
    assert bridge.to_single_str_token(5335) == " Mary"
    with pytest.raises(ValueError, match="is 2 tokens, not one"):
        bridge.to_single_token(" Mary John")
    assert bridge.get_token_position(" Mary", "When Mary and Mary") == 2
    assert (
        bridge.get_token_position(" Mary", "When Mary and Mary", mode="last", prepend_bos=False)
        == 3
    )


def test_chat_templates_get_one_bos(smollm_tokenizer):
    bridge = TransformerBridge(tiny("gpt2"), smollm_tokenizer)
    chat = smollm_tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    tokens = bridge.to_tokens(chat, truncate=False)[0]
    assert torch.equal(
        tokens, torch.tensor(smollm_tokenizer(chat, add_special_tokens=False)["input_ids"])
    )
