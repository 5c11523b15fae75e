"""A masked model with trained weights: the ALBERT of RXNMapper, one layer that runs twelve times,
on reactions.
"""

import re

import pytest
import torch
from transformers import AlbertForMaskedLM

from adapters import verify
from bridge import TransformerBridge
from bridge.analysis.logit_lens import logit_lens

from .conftest import PLACE

FOLDER = PLACE / "rxnmapper" / "models" / "transformers" / "albert_heads_8_uspto_all_1310k"
#: Acetyl chloride and ethanol give ethyl acetate.
REACTION = "CC(=O)Cl.OCC>>CC(=O)OCC"


@pytest.fixture(scope="module")
def albert():
    return TransformerBridge(AlbertForMaskedLM.from_pretrained(FOLDER).eval())


@pytest.fixture(scope="module")
def words():
    return (FOLDER / "vocab.txt").read_text(encoding="utf-8").split("\n")


@pytest.fixture(scope="module")
def tokens(words):
    number = {word: i for i, word in enumerate(words)}
    split = re.findall(r"\[[^\]]+\]|Br|Cl|>>|.", REACTION)
    return torch.tensor([[number["[CLS]"], *(number[word] for word in split), number["[SEP]"]]])


def masked(tokens, words, position):
    tokens = tokens.clone()
    tokens[0, position] = words.index("[MASK]")
    return tokens


def test_it_is_the_model_and_verified(albert, tokens):
    assert torch.equal(albert(tokens), albert.original_model(tokens).logits)
    assert albert.cfg.n_layers == 12
    assert not albert.offered().not_offered
    report = verify(albert)
    assert report.passed, str(report)


def test_patterns_are_those_of_hugging_face(albert, tokens):
    eager = AlbertForMaskedLM.from_pretrained(FOLDER, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = eager(tokens, output_attentions=True).attentions
        _, cache = albert.run_with_cache(tokens)
    for layer in range(12):
        assert torch.allclose(cache["pattern", layer], expected[layer], atol=1e-5)


def test_a_head_maps_atoms(albert, tokens, words):
    """RXNMapper reads the map of atoms from one head of the last layer (Schwaller et al. 2021)."""
    with torch.no_grad():
        _, cache = albert.run_with_cache(tokens, names_filter="blocks.11.attn.hook_pattern")
    pattern = cache["pattern", 11][0, 5]
    text = [words[token] for token in tokens[0]]
    arrow = text.index(">>")
    found = {}
    for atom in (13, 14, 17, 19):
        alike = [other for other in range(arrow) if text[other] == text[atom]]
        found[atom] = alike[int(pattern[atom, alike].argmax())]
    assert found == {13: 1, 14: 2, 17: 5, 19: 9}  # the ester's oxygen is the alcohol's


def test_filling_a_mask_a_lens_and_a_hook(albert, tokens, words):
    """The carbonyl's oxygen in the product, hidden."""
    hidden = masked(tokens, words, 17)
    with torch.no_grad():
        logits, lens = albert(hidden), logit_lens(albert, hidden)
        without = [
            (f"blocks.{i}.attn.hook_pattern", lambda pattern, hook: pattern * 0) for i in range(12)
        ]
        blind = albert.run_with_hooks(hidden, fwd_hooks=without)
    assert words[logits[0, 17].argmax()] == "O"
    assert torch.allclose(lens[-1], logits, atol=1e-5)
    oxygen = words.index("O")
    ranks = (lens[:, 0, 17] > lens[:, 0, 17, oxygen, None]).sum(-1)
    assert ranks[-1] == 0 < ranks[0]
    assert blind[0, 17].log_softmax(-1)[oxygen] < logits[0, 17].log_softmax(-1)[oxygen] - 1
