"""Text to tokens, with made tokenizers of every habit; real ones are in tests/real."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bridge import TransformerBridge
from bridge.run.tokenization import TokenizerFacts, UnknownWordWarning
from tests.conftest import tiny

WORDS = {
    "<pad>": 0,
    "<bos>": 1,
    "<eos>": 2,
    "<unk>": 3,
    "[CLS]": 4,
    "[SEP]": 5,
    "a": 6,
    "b": 7,
    "c": 8,
    "d": 9,
}


def made(template=None, **specials):
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        used = [(word, WORDS[word]) for word in WORDS if word in template]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **specials)


BOS_EOS = {"bos_token": "<bos>", "eos_token": "<eos>"}
KINDS = {
    "without a BOS of its own accord": made(**BOS_EOS),
    "that adds BOS": made("<bos> $A", **BOS_EOS),
    "that adds EOS": made("$A <eos>", **BOS_EOS),
    "that adds both": made("<bos> $A <eos>", **BOS_EOS),
    "of BERT": made("[CLS] $A [SEP]", cls_token="[CLS]", sep_token="[SEP]", pad_token="<pad>"),
    "without any BOS": made(eos_token="<eos>"),
}


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return KINDS[request.param]


@pytest.fixture
def bridge(tokenizer):
    return TransformerBridge(tiny("gpt2"), tokenizer)


def test_prepend_bos_means_the_same_for_every_tokenizer(bridge, tokenizer):
    facts = bridge.tokenizer_facts
    assert bridge.to_tokens("a b", prepend_bos=False).tolist() == [[6, 7]]
    if tokenizer is KINDS["without any BOS"]:
        assert facts.bos is None
        assert bridge.to_tokens("a b").tolist() == [[6, 7]]
        with pytest.raises(ValueError, match="has no BOS token"):
            bridge.to_tokens("a b", prepend_bos=True)
        return
    start = 4 if tokenizer is KINDS["of BERT"] else 1
    assert facts.bos == start
    assert bridge.to_tokens("a b", prepend_bos=True).tolist() == [[start, 6, 7]]
    assert bridge.to_tokens("a b").tolist() == [[start, 6, 7]]
    bridge.cfg.default_prepend_bos = False
    assert bridge.to_tokens("a b").tolist() == [[6, 7]]
    assert bridge.to_tokens(
        f"{tokenizer.convert_ids_to_tokens(start)} a", prepend_bos=True
    ).tolist() == [[start, 6]]


def test_what_a_tokenizer_does_is_found_by_asking():
    facts = {name: TokenizerFacts(tokenizer) for name, tokenizer in KINDS.items()}
    assert [f.adds_bos for f in facts.values()] == [False, True, False, True, True, False]
    assert [f.ending for f in facts.values()] == [[], [], [2], [2], [5], []]
    assert [f.pad for f in facts.values()] == [2, 2, 2, 2, 0, 2]


def test_models_that_read_both_ways_keep_the_ending(tokenizer):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=61,
    )
    bridge = TransformerBridge(BertForMaskedLM(config).eval(), KINDS["of BERT"])
    assert bridge.to_tokens("a b").tolist() == [[4, 6, 7, 5]]
    assert bridge(["a b", "a"]).shape == (2, 4, 61)


def test_padding(bridge):
    pad = bridge.tokenizer_facts.pad
    assert bridge.to_tokens(["a b", "c"], prepend_bos=False, padding_side="left").tolist() == [
        [6, 7],
        [pad, 8],
    ]
    assert bridge.to_tokens(["a b", "c"], prepend_bos=False, padding_side="right").tolist() == [
        [6, 7],
        [8, pad],
    ]
    batch = bridge.batch_of(["a b", "c"], prepend_bos=False, padding_side="left")
    assert batch.mask.tolist() == [[1, 1], [0, 1]]
    assert bridge.batch_of(["a b", "c d"]).mask is None
    with pytest.raises(ValueError, match="padding_side is 'middle'"):
        bridge.to_tokens("a", padding_side="middle")
    with pytest.raises(ValueError, match="there are no texts"):
        bridge.to_tokens([])


def test_truncation(bridge):
    long = " ".join(["a"] * 60)
    assert bridge.to_tokens(long).shape == (1, 40)
    full = bridge.to_tokens(long, truncate=False)
    assert full.shape[1] >= 60
    with pytest.raises(ValueError, match="has a context of 40"):
        bridge(long)


def test_back_to_text(embedded):
    tokens = embedded.to_tokens(
        ["Mary and John", "Mary went"], prepend_bos=False, padding_side="right"
    )
    assert embedded.to_string(tokens[0]) == "Mary and John"
    assert embedded.to_string(tokens)[0] == "Mary and John"
    assert embedded.to_string(tokens[0].tolist()) == "Mary and John"
    assert embedded.to_string(tokens[0, 1]) == " and"
    assert embedded.to_str_tokens("Mary and", prepend_bos=False) == ["Mary", " and"]
    assert embedded.to_str_tokens(["Mary", "Mary and"], prepend_bos=False) == [
        ["Mary"],
        ["Mary", " and"],
    ]
    assert embedded.to_str_tokens(tokens[:1]) == ["Mary", " and", " John"]
    assert embedded.to_str_tokens(tokens[0]) == ["Mary", " and", " John"]
    assert embedded.to_single_str_token(embedded.to_single_token(" John")) == " John"
    with pytest.raises(ValueError, match=r"is 2 tokens, not one: \['Mary', ' and'\]"):
        embedded.to_single_token("Mary and")


def test_token_positions(embedded):
    text = "When Mary and John went to the store, John gave"
    assert embedded.get_token_position(" John", text) == 4
    assert embedded.get_token_position(" John", text, mode="last") == 10
    assert embedded.get_token_position(" John", text, prepend_bos=False) == 3
    tokens = embedded.to_tokens(text)
    assert embedded.get_token_position(int(tokens[0, 2]), tokens) == 2
    with pytest.raises(ValueError, match="does not stand in"):
        embedded.get_token_position(" store", "Mary and John")
    with pytest.raises(ValueError, match="mode is 'middle'"):
        embedded.get_token_position(" John", text, mode="middle")
    with pytest.raises(ValueError, match="of one row"):
        embedded.get_token_position(" John", torch.zeros(2, 3, dtype=torch.long))


def test_no_tokenizer():
    bridge = TransformerBridge(tiny("gpt2"))
    with pytest.raises(ValueError, match="has no tokenizer"):
        bridge.to_tokens("a")


def test_truncation_cuts_each_row_by_itself(bridge):
    tokens = bridge.to_tokens(["a " * 60, "b c"], prepend_bos=False, padding_side="left")
    assert tokens.shape == (2, 40)
    assert tokens[1, -2:].tolist() == [7, 8]


def test_words_that_the_tokenizer_does_not_know_are_named():
    bridge = TransformerBridge.boot_embedded()
    with pytest.raises(
        ValueError, match=r"' Obama' is no token: .* does not know ' Obama': the model reads <unk>"
    ):
        bridge.to_single_token(" Obama")
    for run in (bridge.to_tokens, bridge, bridge.to_str_tokens):
        with pytest.warns(
            UnknownWordWarning, match=r"does not know 'Barack', ' Obama': .* has the 654 tokens"
        ):
            run("Barack Obama and Mary" if run is not bridge else ["Mary", "Barack Obama"])
    with pytest.raises(ValueError, match="does not know 'Obama'"):
        bridge.run_with_cache("Mary and")[1].logit_attrs(torch.zeros(1, 1, 3, 128), "Obama")


def test_unknown_words_of_a_chat_are_named():
    bridge = TransformerBridge.boot_embedded()
    bridge.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    chat = [{"role": "user", "content": "Mary and Obama"}]
    for run in (bridge.to_tokens, bridge, bridge.to_str_tokens):
        with pytest.warns(UnknownWordWarning, match="does not know .*' Obama'"):
            run(chat)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Mary and Obama"}]}]
    bridge.tokenizer.chat_template = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    with pytest.warns(UnknownWordWarning, match="does not know .*' Obama'"):
        bridge.to_tokens(parts)


def test_an_unknown_token_that_is_asked_for_is_no_mistake():
    bridge = TransformerBridge(tiny("gpt2"), KINDS["that adds BOS"])
    assert bridge.to_single_token("<unk>") == 3
    assert bridge.to_tokens("a <unk> b", prepend_bos=False).tolist() == [[6, 3, 7]]


def test_a_bos_that_is_the_unknown_token_too_is_no_unknown_word():
    bridge = TransformerBridge.boot_embedded()
    tokenizer = bridge.tokenizer
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.unk_token  # as GPT-2's
    facts = TokenizerFacts(tokenizer)
    known = facts.encode("Mary and", True, False)
    assert known[0] == tokenizer.unk_token_id
    assert facts.unknown_words("Mary and", known) == []
    assert facts.unknown_words("Mary Barack", facts.encode("Mary Barack", True, False)) == [
        " Barack"
    ]
