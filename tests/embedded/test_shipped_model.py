"""The shipped model as loaded from its folder, measured with plain Hugging Face classes, and the
folder itself.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bridge.embedded import MODEL_DIR, prompts
from bridge.embedded.language import SPECIALS, vocabulary
from bridge.embedded.prompts import KINDS
from tools.embedded.measure import accuracy, head_scores, repeat_accuracy, repeated_lists
from tools.embedded.text import english
from tools.embedded.train import build_model, build_tokenizer, save, train

SEED = 2024
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(autouse=True, scope="module")
def offline() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def model(offline: None) -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def tokenizer(offline: None) -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.mark.parametrize(("kind", "least"), [("ioi", 0.98), ("fact", 0.98), ("repeats", 0.95)])
def test_prompts_never_trained_are_answered(
    model: Any, tokenizer: Any, kind: str, least: float
) -> None:
    assert accuracy(model, tokenizer, prompts(kind, 500, SEED)) >= least


@pytest.mark.parametrize("length", [10, 25, 50])
def test_second_half_of_a_random_list_is_foretold(model: Any, tokenizer: Any, length: int) -> None:
    # Every word of the second half but its first, before which nothing says that the list is over.
    assert repeat_accuracy(model, repeated_lists(tokenizer, 60, length, SEED)) >= 0.95


def test_there_are_induction_and_previous_token_heads(model: Any, tokenizer: Any) -> None:
    induction, previous = head_scores(model, repeated_lists(tokenizer, 40, 25, SEED))
    assert induction.shape == previous.shape == (4, 4)
    assert induction.max() > 0.5
    assert previous.max() > 0.5


def test_head_scores_by_hand(model: Any, tokenizer: Any) -> None:
    length = 6
    ids = repeated_lists(tokenizer, 2, length, SEED)
    induction, previous = head_scores(model, ids)
    patterns = model(input_ids=ids, output_attentions=True).attentions
    for layer, head in ((0, 1), (3, 2)):
        pattern = patterns[layer][:, head]
        second_half = range(length + 1, 2 * length + 1)
        back = torch.stack([pattern[:, at, at - length + 1] for at in second_half]).mean()
        one = torch.stack([pattern[:, at, at - 1] for at in range(1, 2 * length + 1)]).mean()
        torch.testing.assert_close(induction[layer, head], back)
        torch.testing.assert_close(previous[layer, head], one)


def test_the_receiver_of_ioi_is_likelier_than_the_giver(model: Any, tokenizer: Any) -> None:
    for item in prompts("ioi", 20, SEED):
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(item.text)]])
        logits = model(input_ids=ids).logits[0, -1]
        answer, wrong = tokenizer.convert_tokens_to_ids([item.answer, item.wrong])
        assert logits[answer] > logits[wrong]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_single_tokens_right_after_the_text(tokenizer: Any, kind: str) -> None:
    for item in prompts(kind, 300, SEED):
        ids = tokenizer.encode(item.text)
        assert tokenizer.unk_token_id not in ids
        for word in filter(None, (item.answer, item.wrong)):
            assert tokenizer.encode(item.text + word) == [
                *ids,
                tokenizer.convert_tokens_to_ids(word),
            ]
            assert tokenizer.encode(word) == [tokenizer.convert_tokens_to_ids(word)]


def test_tokenizer_gives_the_text_back_and_adds_nothing(tokenizer: Any) -> None:
    rng = random.Random(SEED)
    for text in (english(rng).text for _ in range(300)):
        ids = tokenizer(text).input_ids
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([1, *ids, 2], skip_special_tokens=True) == text
        assert tokenizer.bos_token_id not in ids and tokenizer.eos_token_id not in ids
    assert tokenizer.encode("When zebras fly")[1:] == [tokenizer.unk_token_id] * 2


def test_special_tokens(model: Any, tokenizer: Any) -> None:
    found = (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token)
    assert found == SPECIALS
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == vocabulary()
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 128


def test_model_loads_as_float32(model: Any) -> None:
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.config.tie_word_embeddings


def test_generation_goes_on_in_the_language_of_training(model: Any, tokenizer: Any) -> None:
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode("The capital of France is")]])
    written = model.generate(ids, max_new_tokens=2, do_sample=False)
    assert (
        tokenizer.decode(written[0], skip_special_tokens=True) == "The capital of France is Paris."
    )


def test_saving_and_loading_round_trips(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = again.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path).encode("When Mary left") == tokenizer.encode(
        "When Mary left"
    )


def test_folder_is_small_complete_and_names_no_machine() -> None:
    assert {path.name for path in MODEL_DIR.iterdir()} == FILES
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 3_500_000
    for path in MODEL_DIR.glob("*.json"):
        text = path.read_text()
        assert not re.search(r'"/|[A-Za-z]:\\\\|://|_name_or_path', text), path.name
        json.loads(text)


def test_shipped_tokenizer_is_the_one_the_script_builds(tokenizer: Any) -> None:
    built = build_tokenizer()
    for text in (
        "When Mary and John went to the store, John gave a drink to",
        " stone river stone",
        "a-b  c\n",
    ):
        assert tokenizer.encode(text) == built.encode(text)


def test_saved_untrained_model_loads(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    save(build_model(tokenizer), tokenizer, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32


def test_accuracy_needs_prompts(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="one or more"):
        accuracy(model, tokenizer, [])


def test_training_takes_a_step_and_refuses_none() -> None:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    before = model.lm_head.weight.detach().clone()
    assert train(model, tokenizer, seed=0, steps=1, minutes=1.0, rate=2e-3) == 1
    assert not torch.equal(model.lm_head.weight, before)
    with pytest.raises(ValueError, match="steps is 0"):
        train(model, tokenizer, seed=0, steps=0, minutes=1.0, rate=2e-3)
