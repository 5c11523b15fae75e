"""A notebook that splits a logit difference over what wrote to the residual stream."""

import pytest
import torch

import bridge.legacy as transformer_lens

PROMPT = "When Mary and John went to the store, John gave a drink to"
ANSWER, WRONG = " Mary", " John"


@pytest.fixture(scope="module")
def run(model):
    with torch.no_grad():
        logits, cache = model.run_with_cache(PROMPT)
    return logits, cache


@pytest.fixture
def difference(model, run):
    logits, _ = run
    return (
        logits[0, -1, model.to_single_token(ANSWER)] - logits[0, -1, model.to_single_token(WRONG)]
    )


def test_the_stream_is_the_sum_of_its_parts(model, run):
    _, cache = run
    parts, labels = cache.decompose_resid(return_labels=True)
    assert parts.shape == (2 * model.cfg.n_layers + 1, 1, 15, model.cfg.d_model)
    assert labels[:3] == ["embed", "0_attn_out", "0_mlp_out"]
    torch.testing.assert_close(parts.sum(0), cache["resid_post", -1], atol=1e-4, rtol=1e-4)

    halfway = cache.decompose_resid(layer=2)
    torch.testing.assert_close(halfway.sum(0), cache["resid_pre", 2], atol=1e-4, rtol=1e-4)

    everything = cache.get_full_resid_decomposition(expand_neurons=False)
    torch.testing.assert_close(everything.sum(0), cache["resid_post", -1], atol=1e-4, rtol=1e-4)

    neurons = cache.get_full_resid_decomposition(expand_neurons=True, pos_slice=-1)
    torch.testing.assert_close(neurons.sum(0), cache["resid_post", -1][:, -1], atol=1e-4, rtol=1e-4)


def test_heads_sum_to_attention(model, run):
    _, cache = run
    heads, labels = cache.stack_head_results(layer=-1, pos_slice=-1, return_labels=True)
    assert labels == [
        f"L{layer}H{head}"
        for layer in range(model.cfg.n_layers)
        for head in range(model.cfg.n_heads)
    ]
    per_layer = heads.reshape(model.cfg.n_layers, model.cfg.n_heads, 1, -1).sum(1)
    for layer in range(model.cfg.n_layers):
        expected = cache["attn_out", layer][:, -1] - model.b_O[layer]
        torch.testing.assert_close(per_layer[layer], expected, atol=1e-4, rtol=1e-4)


def test_attributions_sum_to_the_difference(model, run, difference):
    _, cache = run
    parts, labels = cache.decompose_resid(pos_slice=-1, return_labels=True)
    by_part = cache.logit_attrs(parts, tokens=ANSWER, incorrect_tokens=WRONG, pos_slice=-1)
    torch.testing.assert_close(by_part.sum(), difference, atol=1e-3, rtol=1e-3)

    heads = cache.stack_head_results(layer=-1, pos_slice=-1)
    by_head = cache.logit_attrs(heads, tokens=ANSWER, incorrect_tokens=WRONG, pos_slice=-1)
    assert by_head.shape == (model.cfg.n_layers * model.cfg.n_heads, 1)
    attention = torch.stack(
        [by_part[i] for i, label in enumerate(labels) if label.endswith("attn_out")]
    )
    torch.testing.assert_close(by_head.sum(), attention.sum(), atol=1e-3, rtol=1e-3)

    # By token ids, and one logit at a time.
    answer, wrong = model.to_single_token(ANSWER), model.to_single_token(WRONG)
    one = cache.logit_attrs(heads, tokens=answer, pos_slice=-1) - cache.logit_attrs(
        heads, tokens=wrong, pos_slice=-1
    )
    torch.testing.assert_close(one, by_head, atol=1e-3, rtol=1e-3)


def test_what_the_head_that_adds_most_reads_and_writes(model, run, difference):
    """Its OV circuit, a `FactoredMatrix`, turns the name that it looks at into the difference."""
    _, cache = run
    heads = cache.stack_head_results(layer=-1, pos_slice=-1)
    by_head = cache.logit_attrs(heads, tokens=ANSWER, incorrect_tokens=WRONG, pos_slice=-1)[:, 0]
    layer, head = divmod(by_head.argmax().item(), model.cfg.n_heads)
    assert by_head.max() > 0.2 * difference
    pattern = cache["pattern", layer][0, head, -1]
    position = pattern.argmax()
    assert model.to_str_tokens(PROMPT)[position] in (ANSWER, WRONG)

    ov = model.OV[layer, head]
    assert isinstance(ov, transformer_lens.FactoredMatrix) and ov.shape == (
        model.cfg.d_model,
        model.cfg.d_model,
    )
    read = cache["normalized", layer, "ln1"][0]
    written = pattern @ (read @ ov.AB)
    torch.testing.assert_close(
        written, heads[layer * model.cfg.n_heads + head, 0], atol=1e-4, rtol=1e-4
    )
    raised = (read[position] @ ov.AB) @ model.W_U
    assert raised[model.to_single_token(ANSWER)] > raised[model.to_single_token(WRONG)]
