"""A notebook that reads predictions from the residual stream after each layer."""

import pytest
import torch

from bridge.legacy import utils

PROMPTS = (
    "When Mary and John went to the store, John gave a drink to",
    "The capital of France is",
)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_lens_ends_in_the_prediction(model, prompt):
    tokens = model.to_tokens(prompt)
    logits, cache = model.run_with_cache(tokens, remove_batch_dim=True)
    accumulated, labels = cache.accumulated_resid(
        layer=-1, incl_mid=False, apply_ln=True, return_labels=True
    )
    layers_logits = accumulated @ model.W_U + model.b_U  # component pos d_vocab
    assert labels[0] == "0_pre" and labels[-1] == "final_post"
    assert layers_logits.shape == (model.cfg.n_layers + 1, tokens.shape[1], model.cfg.d_vocab)
    torch.testing.assert_close(
        layers_logits[-1].log_softmax(-1), logits[0].log_softmax(-1), atol=1e-3, rtol=1e-3
    )
    answer = logits[0, -1].argmax()
    probabilities = layers_logits[:, -1].softmax(-1)[:, answer]
    assert probabilities[-1] > 0.5 and probabilities[0] < 0.1
    assert layers_logits[-1, -1].argmax() == answer
    best = model.to_str_tokens(layers_logits[:, -1].argmax(-1))
    assert best[-1] == model.to_string(answer)


def test_the_lens_by_running_the_end_of_the_model(model):
    prompt = PROMPTS[0]
    logits, cache = model.run_with_cache(prompt)
    n_layers = model.cfg.n_layers
    accumulated = cache.accumulated_resid(layer=-1, apply_ln=True)
    for layer in range(n_layers):
        end = model(cache["resid_pre", layer], start_at_layer=n_layers)
        torch.testing.assert_close(
            end, accumulated[layer] @ model.W_U + model.b_U, atol=1e-3, rtol=1e-3
        )
    end = model(cache["resid_post", n_layers - 1], start_at_layer=n_layers)
    torch.testing.assert_close(end, logits, atol=1e-4, rtol=1e-4)


def test_the_lens_by_hooks(model):
    tokens = model.to_tokens(PROMPTS[0])
    seen = {}

    def lens(resid, hook):
        seen[hook.layer()] = model(resid, start_at_layer=model.cfg.n_layers)[0, -1].argmax().item()

    hook_names = [utils.get_act_name("resid_post", layer) for layer in range(model.cfg.n_layers)]
    logits = model.run_with_hooks(tokens, fwd_hooks=[(name, lens) for name in hook_names])
    assert list(seen) == list(range(model.cfg.n_layers))
    assert seen[model.cfg.n_layers - 1] == logits[0, -1].argmax()
