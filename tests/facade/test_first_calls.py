"""What a user of Hugging Face types first: what a tokenizer gives, by names or as it is, arrays,
chats.
"""

import pytest
import torch

from bridge import TransformerBridge

TEXTS = ["When Mary and John went to the store", "Mary and John"]


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge.boot_embedded()


@pytest.fixture(scope="module")
def encoding(bridge):
    return bridge.tokenizer(TEXTS, return_tensors="pt", padding=True)


def test_what_a_tokenizer_gives(bridge, encoding):
    hf = bridge.original_model(**encoding).logits
    mask = encoding["attention_mask"].bool()
    for found in (
        bridge(**encoding),
        bridge(encoding),
        bridge(dict(encoding)),
        bridge.run_with_cache(**encoding)[0],
    ):
        assert torch.equal(
            found, bridge(encoding["input_ids"], attention_mask=encoding["attention_mask"])
        )
        torch.testing.assert_close(found[mask], hf[mask], rtol=1e-4, atol=1e-4)
    one = bridge.tokenizer(TEXTS[0], return_tensors="pt")
    assert torch.equal(bridge(**one), bridge.original_model(**one).logits)
    assert torch.equal(bridge.run_with_hooks(one), bridge(input_ids=one["input_ids"]))


def test_a_tokenizer_that_gives_lists(bridge):
    one = bridge.tokenizer(TEXTS[0])
    assert isinstance(one["input_ids"], list)
    assert torch.equal(bridge(one), bridge(one["input_ids"]))


def test_arrays(bridge, encoding):
    tokens, mask = encoding["input_ids"], encoding["attention_mask"]
    right = bridge(tokens, attention_mask=mask)
    assert torch.equal(bridge(tokens.numpy(), attention_mask=mask), right)
    arrays = tokens.numpy(), mask.numpy()
    assert torch.equal(bridge(arrays[0], attention_mask=arrays[1]), right)
    assert torch.equal(bridge.run_with_cache(arrays[0], attention_mask=arrays[1])[0], right)
    with bridge.trace(arrays[0], attention_mask=arrays[1]) as run:
        assert torch.equal(run.logits, right)
    settings = {"max_new_tokens": 2, "do_sample": False, "verbose": False}
    made = bridge.generate(arrays[0], attention_mask=arrays[1], **settings)
    assert torch.equal(made, bridge.generate(tokens, attention_mask=mask, **settings))
    assert torch.equal(bridge(bridge.tokenizer(TEXTS, return_tensors="np", padding=True)), right)


def test_traces_and_generations(bridge, encoding):
    with bridge.trace(encoding) as run:
        stream = run["blocks.1.hook_resid_post"]
    _, cache = bridge.run_with_cache(encoding)
    assert torch.equal(stream, cache["blocks.1.hook_resid_post"])
    with bridge.trace(**encoding) as run:
        assert torch.equal(run["blocks.1.hook_resid_post"], stream)
    settings = {"max_new_tokens": 3, "do_sample": False}
    right = bridge.generate(
        encoding["input_ids"], attention_mask=encoding["attention_mask"], verbose=False, **settings
    )
    assert torch.equal(bridge.generate(**encoding, verbose=False, **settings), right)
    assert torch.equal(bridge.generate(encoding, verbose=False, **settings), right)


def test_what_is_missing_or_given_twice(bridge, encoding):
    with pytest.raises(TypeError, match="there is no input: give a text"):
        bridge()
    with pytest.raises(
        TypeError, match="attention_mask: given twice, by name and in the BatchEncoding"
    ):
        bridge(encoding, attention_mask=encoding["attention_mask"])
    with pytest.raises(TypeError, match="input_ids is the input itself, and an input is given"):
        bridge("Mary", input_ids=encoding["input_ids"])


@pytest.mark.parametrize(
    ("name", "where"),
    [("output_hidden_states", "hook_resid_post"), ("output_attentions", r"attn\.hook_pattern")],
)
def test_options_of_hugging_faces_output(bridge, name, where):
    with pytest.raises(
        ValueError, match=rf"{name}=True is an option .* run_with_cache\(tokens\) gives .*{where}"
    ):
        bridge("Mary", **{name: True})
    assert torch.equal(bridge("Mary", **{name: False}), bridge("Mary"))
    with pytest.raises(
        TypeError,
        match="'return_dict' is not an argument of this call: a run returns what return_type says",
    ):
        bridge("Mary", return_dict=True)


def test_chats(bridge):
    chat = [{"role": "user", "content": "Mary and"}, {"role": "assistant", "content": " John"}]
    with pytest.raises(ValueError, match="has no chat template, so it makes no tokens of a chat"):
        bridge.to_tokens(chat)
    with pytest.raises(ValueError, match="has no chat template"):
        bridge(chat)
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}.{%"
        " endif %}"
    )
    bridge.tokenizer.chat_template = template
    try:
        assert torch.equal(
            bridge.to_tokens(chat), bridge.to_tokens("Mary and John", prepend_bos=False)
        )
        asked = bridge.to_tokens("Mary and.", prepend_bos=False)
        assert torch.equal(bridge.to_tokens(chat[:1]), asked)
        assert torch.equal(bridge(chat[:1]), bridge(asked))
        assert bridge.to_str_tokens(chat) == ["Mary", " and", " John"]
        assert bridge.to_str_tokens([chat[:1], "Mary"]) == [
            ["Mary", " and", "."],
            ["<bos>", "Mary"],
        ]
        texts = [bridge.generate(x, 2, do_sample=False, verbose=False) for x in (chat, [chat])]
        assert texts[0].startswith("Mary and John") and texts[1] == texts[:1]
        (answer,) = bridge.generate_batch([chat], 2, do_sample=False, verbose=False)
        assert answer.text == texts[0][len("Mary and John") :]
        with pytest.raises(ValueError, match="whether a chat starts with BOS, its template says"):
            bridge.to_tokens(chat, prepend_bos=True)
    finally:
        bridge.tokenizer.chat_template = None


def test_names_that_other_libraries_give_these_arguments_work(bridge):
    found = [index for index, _ in bridge.blocks_with(submodule="attn")]
    assert found == [index for index, _ in bridge.blocks_with("attn")] == [0, 1, 2, 3]
    handles = bridge.add_perma_hook("blocks.0.hook_mlp_out", hook_fn=lambda x, hook: x * 0)
    bridge.reset_hooks()
    assert not bridge.run_with_cache("Mary")[1]["mlp_out", 0].any()
    for handle in handles:
        handle.remove()
