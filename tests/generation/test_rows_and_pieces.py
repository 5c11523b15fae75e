"""What a generation says of its rows, and of text that changes while it grows."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge
from bridge.generation.generation import TextPieces

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(0))
NEW = {"max_new_tokens": 4, "do_sample": False, "verbose": False, "stop_at_eos": False}


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=61,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def test_a_generation_config_beside_the_arguments_is_refused():
    bridge = TransformerBridge(llama())
    calls = []
    bridge.original_model.register_forward_pre_hook(lambda module, args: calls.append(1))
    own = copy.deepcopy(bridge.original_model.generation_config)
    own.max_new_tokens = 2
    for run in (bridge.generate, bridge.generate_stream):
        with pytest.raises(
            TypeError, match=r"generation_config is not taken together with .* use hf_generate"
        ):
            run(TOKENS, generation_config=own, **NEW)
    assert not calls
    assert bridge.hf_generate(TOKENS, generation_config=own, do_sample=False).shape == (2, 9)


@pytest.mark.parametrize("stream", [False, True])
def test_how_many_rows_is_what_the_arguments_say(stream):
    """The model's own configuration may ask for several rows for each prompt."""
    model = llama()
    expected = TransformerBridge(model).generate(TOKENS, **NEW)
    model.generation_config.num_return_sequences, model.generation_config.do_sample = 2, True
    bridge = TransformerBridge(model)
    made = (
        torch.cat(list(bridge.generate_stream(TOKENS, **NEW)), -1)
        if stream
        else bridge.generate(TOKENS, **NEW)
    )
    assert torch.equal(made, expected)


def test_what_a_tokenizer_writes_in_another_way_once_others_follow():
    """`` .`` becomes ``.``: what was given stays, nothing is lost, and the stream goes on."""
    words = {1: "a", 2: " ", 3: ".", 4: "b", 5: " c", 6: " ?"}
    row = TextPieces(
        lambda ids: "".join(words[i] for i in ids).replace(" .", ".").replace(" ?", "?")
    )
    pieces = [row.add([i]) for i in (1, 2, 3, 4, 5)]
    assert pieces == ["a", " ", ".", "b", " c"]
    assert row.add([2]) == " "
    assert row.add([3], last=True) == "."
    whole = TextPieces(
        lambda ids: "".join(words[i] for i in ids).replace(" .", ".").replace(" ?", "?")
    )
    assert whole.add([1, 6, 4, 5], last=True) == "a?b c"
    empty = TextPieces(lambda ids: "" if len(ids) > 1 else "a")
    assert [empty.add([1]), empty.add([1]), empty.add([], last=True)] == ["a", "", ""]
