"""What was found by running the same lines with HookedTransformer 2.18 and here, and comparing what
they give.
"""

import numpy as np
import pytest
import torch

from bridge.legacy import (
    FactoredMatrix,
    HookedEncoder,
    HookedEncoderDecoder,
    HookedTransformer,
    HookedTransformerConfig,
    utils,
)
from tests.legacy.test_made import BASE

# Their texts are read by tiny tokenizers that do not know all words.
pytestmark = pytest.mark.filterwarnings("ignore:the tokenizer .* does not know")

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
LONG = "Mary and John " * 100


@pytest.mark.parametrize(
    ("ending", "found"),
    [
        ("_out", ["hook_attn_out", "hook_mlp_out"]),
        ("_in", ["hook_mlp_in"]),
        ("q", ["attn.hook_q"]),
    ],
)
def test_functions_are_asked_about_its_names_alone(ending, found):
    model = HookedTransformer(BASE | {"use_hook_mlp_in": True})
    _, cache = model.run_with_cache(TOKENS, names_filter=lambda name: name.endswith(ending))
    assert list(cache) == [f"blocks.{layer}.{name}" for layer in range(2) for name in found]
    seen = []
    model.run_with_hooks(
        TOKENS,
        fwd_hooks=[(lambda name: name.endswith(ending), lambda x, hook: seen.append(hook.name))],
    )
    assert seen == list(cache)


def test_a_function_still_finds_what_only_the_bridge_has():
    model = HookedTransformer(BASE)
    _, cache = model.run_with_cache(TOKENS, names_filter=lambda name: name.endswith("ln1.hook_out"))
    assert list(cache) == ["blocks.0.ln1.hook_out", "blocks.1.ln1.hook_out"]
    _, cache = model.run_with_cache(TOKENS, names_filter=lambda name: name.endswith("hook_result"))
    assert list(cache) == ["blocks.0.attn.hook_result", "blocks.1.attn.hook_result"]


# Recorded from HookedTransformer 2.18: the first two numbers of four matrices after
# `torch.manual_seed(0)`, and what torch draws next.
DRAWN = [
    (
        {"seed": 3},
        [-0.02168, 0.10179, 0.0951, 0.1631, -0.47931, -0.20724, -0.26475, 0.01071],
        0.8658,
    ),
    (
        {"init_mode": "xavier_uniform"},
        [-0.00432, 0.30972, -0.38635, 0.02443, -0.22932, 0.05556, -0.51181, -0.03666],
        0.75544,
    ),
    (
        {"init_mode": "kaiming_normal"},
        [-0.50349, -0.51535, -0.39572, 0.37722, 0.13519, -0.23695, 0.10179, -0.51641],
        0.75544,
    ),
    (
        {"init_mode": "muP"},
        [-1.12584, -1.15236, -0.27982, 0.26674, 0.09559, -0.16755, 0.20359, -1.03283],
        0.75544,
    ),
    (
        {"gated_mlp": True, "n_key_value_heads": 1},
        [-0.31844, -0.32594, -0.15829, 0.15089, -0.24701, 0.00121, -0.31763, 0.17564],
        0.29457,
    ),
]


@pytest.mark.parametrize(
    ("change", "numbers", "next_number"), DRAWN, ids=[str(change) for change, *_ in DRAWN]
)
def test_the_same_weights_are_drawn_from_the_same_seed(change, numbers, next_number):
    torch.manual_seed(0)
    model = HookedTransformer(
        BASE | {"n_layers": 1, "d_model": 8, "n_ctx": 6, "n_heads": 2, "d_vocab": 10} | change
    )
    assert torch.rand(1).item() == pytest.approx(next_number, abs=1e-5)
    weights = model.state_dict()
    names = ("embed.W_E", "blocks.0.attn.W_O", "blocks.0.mlp.W_out", "unembed.W_U")
    drawn = torch.cat([weights[name].flatten()[:2] for name in names])
    assert drawn.tolist() == pytest.approx(numbers, abs=1e-5)


def test_the_norm_in_solu_ln_has_weights():
    model = HookedTransformer(BASE | {"act_fn": "solu_ln"})
    generator = torch.Generator().manual_seed(0)
    given = {
        name: torch.randn(x.shape, generator=generator) for name, x in model.state_dict().items()
    }
    assert {"blocks.0.mlp.ln.w", "blocks.1.mlp.ln.b"} <= given.keys()
    model.load_state_dict(given)
    mlp = {name.removeprefix("blocks.1.mlp."): x.double() for name, x in given.items()}
    x = torch.randn(1, 3, 16, generator=generator)
    pre = x.double() @ mlp["W_in"] + mlp["b_in"]
    mid = pre * pre.softmax(-1)
    normed = torch.nn.functional.layer_norm(mid, mid.shape[-1:], mlp["ln.w"], mlp["ln.b"])
    torch.testing.assert_close(
        model.blocks[1].mlp(x).double(), normed @ mlp["W_out"] + mlp["b_out"], rtol=1e-4, atol=1e-4
    )
    before = model(TOKENS).log_softmax(-1)
    model.process_weights_()
    torch.testing.assert_close(model(TOKENS).log_softmax(-1), before, rtol=1e-3, atol=1e-3)


def test_there_are_no_gates_without_a_gate():
    assert HookedTransformer(BASE).W_gate is None
    assert HookedTransformer(BASE | {"gated_mlp": True}).W_gate.shape == (2, 16, 64)


def test_a_model_is_made_again_of_the_fields_of_its_cfg():
    model = HookedTransformer(BASE | {"positional_embedding_type": "rotary", "seed": 1})
    fields = model.cfg.to_dict()
    again = HookedTransformer(HookedTransformerConfig.from_dict(fields))
    assert again.cfg.positional_embedding_type == "rotary"
    assert torch.equal(again(TOKENS), model(TOKENS))  # the seed is among the fields
    assert torch.equal(HookedTransformer(model.cfg)(TOKENS), model(TOKENS))


def test_a_weight_shows_its_gradient(model):
    model(torch.tensor([[1, 2, 3, 4]]), return_type="loss").backward()
    whole = model.original_model.transformer.h[1].attn.c_attn.weight.grad
    d_model, heads = model.cfg.d_model, model.cfg.n_heads
    keys = whole[:, d_model : 2 * d_model].reshape(d_model, heads, -1).transpose(0, 1)
    assert torch.equal(model.blocks[1].attn.W_K.grad, keys)
    assert bool(keys.any())
    assert torch.equal(model.W_U.grad, model.original_model.lm_head.weight.grad.T)
    model.zero_grad()
    with pytest.warns(UserWarning, match="not a leaf"):
        assert model.blocks[1].attn.W_K.grad is None


@pytest.mark.parametrize("position", [utils.Slice(-1), torch.tensor(2)])
def test_an_axis_of_positions_is_not_taken_away(position):
    with pytest.raises(ValueError, match=r"would take the axis of positions away: give (-1|2),"):
        HookedTransformer(BASE).run_with_cache(TOKENS, pos_slice=position)


def test_a_text_that_is_too_long_is_cut_in_runs_too(model):
    tokens = model.to_tokens(LONG)
    assert tokens.shape[1] == model.cfg.n_ctx < model.to_tokens(LONG, truncate=False).shape[1]
    assert torch.equal(model(LONG), model(tokens))
    assert torch.equal(
        model.run_with_cache(LONG)[1]["resid_post", -1],
        model.run_with_cache(tokens)[1]["resid_post", -1],
    )
    assert len(model.to_str_tokens(LONG)) == tokens.shape[1]


def test_texts_of_lists_of_tokens(model):
    row = model.to_tokens("Mary and John")[0]
    assert model.to_string(list(row)) == model.to_string(row)
    assert model.to_str_tokens([row, row[:2]]) == [
        model.to_str_tokens(row),
        model.to_str_tokens(row[:2]),
    ]
    assert model.to_str_tokens(["Mary", ["and", "John"]]) == [
        model.to_str_tokens("Mary"),
        [model.to_str_tokens("and"), model.to_str_tokens("John")],
    ]


def test_rows_that_end_at_one_of_several_tokens_are_filled_with_eos(model):
    tokens = torch.randint(3, 50, (12, 4), generator=torch.Generator().manual_seed(0))
    given = {"max_new_tokens": 6, "do_sample": False, "verbose": False}
    free = model.generate(tokens, stop_at_eos=False, **given)
    assert torch.equal(model.generate(tokens, eos_token_id=[], **given), free)
    new = free[:, 4:].tolist()
    row, end = next(
        (i, x) for i, row in enumerate(new) for x in row[:5] if not all(x in other for other in new)
    )
    ended = new[row][: new[row].index(end) + 1]
    filled = model.generate(tokens, eos_token_id=[end, 10**6], **given)[row, 4:].tolist()
    assert filled == ended + [model.tokenizer.eos_token_id] * (6 - len(ended))


def test_the_frequency_penalty_comes_behind_the_temperature(model):
    tokens = torch.randint(3, 50, (8, 4), generator=torch.Generator().manual_seed(0))
    given = {"max_new_tokens": 5, "verbose": False, "stop_at_eos": False}
    torch.manual_seed(0)
    made = model.generate(tokens, temperature=3.0, freq_penalty=1.5, **given)
    torch.manual_seed(0)
    by_hand = tokens
    for _ in range(5):
        logits = model(by_hand)[:, -1] / 3.0
        counts = torch.nn.functional.one_hot(by_hand, model.cfg.d_vocab).sum(1)
        drawn = torch.distributions.Categorical(logits=logits - 1.5 * counts).sample()
        by_hand = torch.cat([by_hand, drawn[:, None]], 1)
    assert torch.equal(made, by_hand)
    greedy = model.generate(tokens, do_sample=False, **given)
    assert torch.equal(model.generate(tokens, do_sample=False, freq_penalty=100.0, **given), greedy)
    assert torch.equal(model.generate(tokens, temperature=0.0, freq_penalty=100.0, **given), greedy)


def test_tokens_may_begin_with_the_token_that_fills_rows_up(loaded):
    model = HookedTransformer(loaded.original_model, loaded.tokenizer)
    model.tokenizer.pad_token = model.tokenizer.eos_token = model.tokenizer.bos_token  # as GPT-2's
    tokens, given = (
        model.to_tokens(["Mary and John"] * 2),
        {"max_new_tokens": 3, "do_sample": False, "verbose": False},
    )
    assert int(tokens[0, 0]) == model.tokenizer.pad_token_id
    made = model.generate(tokens, eos_token_id=[10**6], **given)
    assert torch.equal(made, model.generate(tokens, stop_at_eos=False, **given))


def test_tokens_may_hold_padding_and_nothing_says_so(model, monkeypatch):
    """Several EOS are no word on padding: it would be read as text."""
    given = {"max_new_tokens": 2, "do_sample": False, "verbose": False}
    tokens = model.to_tokens("Mary and John")
    pad = next(
        token
        for token in range(1, 61)
        if token not in tokens and token != model.tokenizer.eos_token_id
    )
    monkeypatch.setattr(model.original_model.generation_config, "pad_token_id", pad)
    padded = torch.cat([torch.full((1, 2), pad), tokens], 1)
    for ends in (None, [10**6]):
        with pytest.raises(ValueError, match="the tokens hold the padding token"):
            model.generate(padded, eos_token_id=ends, **given)
    mask = torch.tensor([[0, 0] + [1] * tokens.shape[1]])
    made = model.generate(padded, eos_token_id=[10**6], attention_mask=mask, **given)
    assert torch.equal(made[:, 2:], model.generate(tokens[0], eos_token_id=[10**6], **given))


def test_composition_of_two_matrices():
    generator = torch.Generator().manual_seed(0)
    A, B, C, D = (
        torch.randn(shape, generator=generator) for shape in ((5, 3), (3, 5), (5, 2), (2, 5))
    )
    score = utils.composition_scores(FactoredMatrix(A, B), FactoredMatrix(C, D))
    assert score.shape == ()
    torch.testing.assert_close(score, (A @ B @ C @ D).norm() / (A @ B).norm() / (C @ D).norm())


def test_an_encoder_takes_an_embedding_and_an_unembedding_that_differ():
    encoder = HookedEncoder(BASE | {"act_fn": "gelu"})
    generator = torch.Generator().manual_seed(0)
    given = {
        name: torch.randn(x.shape, generator=generator) for name, x in encoder.state_dict().items()
    }
    encoder.load_state_dict(given)
    assert torch.equal(encoder.W_E, given["embed.embed.W_E"])
    assert torch.equal(encoder.W_U, given["unembed.W_U"])
    bert = encoder.original_model
    assert torch.equal(bert.cls.predictions.decoder.weight.T, given["unembed.W_U"])
    assert torch.equal(bert.bert.embeddings.word_embeddings.weight, given["embed.embed.W_E"])
    assert torch.equal(encoder(TOKENS), bert(input_ids=TOKENS).prediction_logits)


def test_weights_of_all_layers_are_the_encoders_and_then_the_decoders():
    model = HookedEncoderDecoder(BASE | {"n_ctx": 8})
    t5 = model.original_model
    stacked = torch.stack(
        [block.layer[0].SelfAttention.k.weight for block in (*t5.encoder.block, *t5.decoder.block)]
    )
    assert torch.equal(model.W_K, stacked.unflatten(1, (4, 4)).transpose(2, 3))
    assert model.W_out.shape == (4, 64, 16)
    assert len(model.all_head_labels()) == model.OV.A.shape[0] * model.OV.A.shape[1]


def test_a_class_of_the_users_may_take_any_arguments():
    class Louder(HookedTransformer):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    model = Louder(BASE)
    output, _ = model.run_with_cache(TOKENS, "logits")
    assert torch.equal(output, model.run_with_hooks(TOKENS, fwd_hooks=[]))
    assert torch.equal(output, model(TOKENS))


def test_a_key_may_be_a_short_name_alone_and_layers_numbers_of_any_kind(model):
    _, cache = model.run_with_cache("Mary and John")
    assert cache[("scale",)] is cache["ln_final.hook_scale"]
    assert cache[("q1",)] is cache["blocks.1.attn.hook_q"]
    assert cache["z", np.int64(-1)] is cache["z", model.cfg.n_layers - 1]
