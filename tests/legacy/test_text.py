"""Tokens, padding, BOS and generation."""

import numpy as np
import pytest
import torch

from bridge.embedded import MODEL_DIR
from bridge.legacy import HookedTransformer
from tests.reference import DATA, reference

PROMPT = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def english():
    return HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")


def test_bos(english):
    bos = english.tokenizer.bos_token_id
    with_bos, without = (
        english.to_tokens("Mary and John"),
        english.to_tokens("Mary and John", prepend_bos=False),
    )
    assert with_bos[0, 0] == bos
    assert torch.equal(with_bos[:, 1:], without)
    assert english.cfg.default_prepend_bos is True
    english.cfg.default_prepend_bos = False
    assert torch.equal(english.to_tokens("Mary and John"), without)
    english.cfg.default_prepend_bos = True
    assert english.to_str_tokens("Mary and") == ["<bos>", "Mary", " and"]
    assert english.to_str_tokens(np.array([[*english.to_tokens("Mary and")[0]]])) == [
        "<bos>",
        "Mary",
        " and",
    ]
    assert english.to_single_str_token(int_token=english.to_single_token(" Mary")) == " Mary"
    assert english.get_token_position(" John", PROMPT, mode="last") == 10


def test_padding_sides(english):
    texts = ["Mary and John", "Mary"]
    pad = english.tokenizer.pad_token_id
    right, left = english.to_tokens(texts), english.to_tokens(texts, padding_side="left")
    assert right[1, 2:].tolist() == [pad, pad]
    assert left[1, :2].tolist() == [pad, pad]
    alone = english("Mary")
    assert torch.allclose(english(texts)[1, :2], alone[0], atol=1e-4)
    assert torch.allclose(english(texts, padding_side="left")[1, 2:], alone[0], atol=1e-4)


def test_tokens_with_padding_in_front_are_masked_where_the_tokenizer_pads_there(english):
    texts = ["Mary and John", "Mary"]
    left = english.to_tokens(texts, padding_side="left")
    english.tokenizer.padding_side = "left"
    assert torch.allclose(english(left)[1, 2:], english("Mary")[0], atol=1e-4)
    english.tokenizer.padding_side = "right"
    assert not torch.allclose(english(left)[1, 2:], english("Mary")[0], atol=1e-4)


def test_padding_in_front_of_tokens_is_masked_where_the_run_says_so(english):
    left = english.to_tokens(["Mary and John", "Mary"], padding_side="left")
    assert torch.allclose(english(left, padding_side="left")[1, 2:], english("Mary")[0], atol=1e-4)


def test_what_is_not_in_a_text(english):
    for position in (
        lambda: english.get_token_position(" John", "Mary and"),
        lambda: english.get_token_position(
            english.tokenizer.bos_token_id, "Mary", prepend_bos=False
        ),
        lambda: english.to_single_token("Mary and John"),
    ):
        for kind in (ValueError, AssertionError):  # HookedTransformer's is the second
            with pytest.raises(kind):
                position()
    with pytest.raises(AssertionError) as caught:
        english.get_token_position(" John", "Mary and")
    assert str(caught.value) == "The token does not occur in the prompt"


@pytest.mark.unchecked
def test_a_tokenizer_without_its_own_tokens(tmp_path):
    from transformers import AutoTokenizer

    bare = AutoTokenizer.from_pretrained(DATA / "gpt2")
    bare.pad_token, bare.bos_token = None, None
    model = HookedTransformer.from_pretrained_no_processing(
        str(DATA / "gpt2"), device="cpu", tokenizer=bare
    )
    assert model.tokenizer.pad_token == model.tokenizer.bos_token == "<eos>"
    assert bare.pad_token is None
    model.set_tokenizer(bare, default_padding_side="left")
    assert model.tokenizer.padding_side == "left"
    with pytest.raises(TypeError, match="str is no Hugging Face tokenizer"):
        model.set_tokenizer("gpt2")
    with pytest.raises(ValueError, match="default_padding_side is 'top'"):
        model.set_tokenizer(bare, "top")


def test_generate(english):
    greedy = english.generate(PROMPT, 3, do_sample=False, verbose=False)
    assert greedy.startswith(PROMPT + " Mary")
    assert english.generate([PROMPT], 3, do_sample=False, verbose=False) == greedy
    assert english.generate(PROMPT, 3, temperature=0, verbose=False) == greedy
    assert english.generate(PROMPT, 3, top_k=1, verbose=False) == greedy
    assert english.generate(PROMPT, 3, top_p=1e-6, verbose=False) == greedy
    assert (
        english.generate(PROMPT, 3, do_sample=False, use_past_kv_cache=False, verbose=False)
        == greedy
    )
    tokens = english.to_tokens(PROMPT)
    made = english.generate(tokens, 3, do_sample=False, verbose=False)
    assert english.to_string(made[0, 1:]).startswith(PROMPT + " Mary")
    assert torch.equal(
        english.generate(tokens, 3, do_sample=False, verbose=False, return_type="tensor"), made
    )
    several = english.generate([PROMPT, "Mary and John"], 2, do_sample=False, verbose=False)
    assert greedy.startswith(several[0])


def test_generate_samples_from_all_tokens(english):
    """Whatever the model's own generation_config says."""
    own = english.core.generation_config
    before, own.top_k = own.top_k, 1
    try:
        torch.manual_seed(0)
        ids = english.to_tokens(PROMPT).repeat(40, 1)
        made = english.generate(ids, 1, temperature=5.0, verbose=False, stop_at_eos=False)[:, -1]
        assert len(made.unique()) > 10
    finally:
        own.top_k = before


def test_generate_embeddings(english):
    tokens = english.to_tokens(PROMPT)
    embedded = english.core.get_input_embeddings()(tokens)
    made = english.generate(embedded, 2, do_sample=False, verbose=False)
    ids = english.generate(tokens, 2, do_sample=False, verbose=False)
    assert torch.equal(made, english.core.get_input_embeddings()(ids))
    assert torch.equal(
        english.generate(tokens, 2, do_sample=False, verbose=False, return_type="embeds"), made
    )


def test_hooks_act_on_generation(english):
    def away(z, hook):
        return z * 0

    plain = english.generate(PROMPT, 1, do_sample=False, verbose=False)
    with english.hooks(fwd_hooks=[(lambda name: name.endswith("attn.hook_z"), away)]):
        assert english.generate(PROMPT, 1, do_sample=False, verbose=False) != plain
    assert english.generate(PROMPT, 1, do_sample=False, verbose=False) == plain


def test_analysis_on_the_model(model):
    reference_of = reference("gpt2")
    for mode in "QKV":
        right = reference_of[f"processed/method/composition_{mode}"]
        assert torch.allclose(model.all_composition_scores(mode), right, atol=1e-3)
    assert torch.allclose(
        model.accumulated_bias(2), reference_of["processed/method/accumulated_bias"], atol=1e-4
    )
    directions = model.tokens_to_residual_directions(torch.tensor([5, 7, 9]))
    assert torch.allclose(
        directions, reference_of["processed/method/tokens_to_residual_directions"], atol=1e-4
    )
    assert model.all_head_labels() == [
        "L0H0",
        "L0H1",
        "L0H2",
        "L0H3",
        "L1H0",
        "L1H1",
        "L1H2",
        "L1H3",
    ]
    assert model.QK.shape == model.OV.shape == (2, 4, 32, 32)
    for name in ("QK", "OV"):
        of_layer = getattr(model.blocks[1].attn, name)
        assert of_layer.shape == (4, 32, 32)
        assert torch.equal(of_layer[2].AB, getattr(model, name)[1, 2].AB)
    with pytest.raises(AttributeError, match=r"blocks\.1\.mlp has no 'OV'"):
        model.blocks[1].mlp.OV  # noqa: B018
    for name in ("W_Q", "W_K", "W_V"):
        assert getattr(model, name).shape == (2, 4, 32, 8)
        assert torch.equal(getattr(model, name)[1], getattr(model.blocks[1].attn, name))
    assert model.W_O.shape == (2, 4, 8, 32)
    assert model.W_E_pos.shape == (101, 32)
    assert torch.equal(model.b_in[1], model.blocks[1].mlp.b_in)
    assert torch.allclose(model.W_U.mean(-1), torch.zeros(32), atol=1e-6)
    assert torch.equal(model.b_V, torch.zeros(2, 4, 8))
