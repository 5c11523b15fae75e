"""tuned-lens: a lens of a HookedTransformer, its training, and its picture's data."""

import torch
from tuned_lens.nn.lenses import LogitLens, TunedLens, TunedLensConfig
from tuned_lens.nn.unembed import Unembed
from tuned_lens.plotting import PredictionTrajectory


def test_the_unembedding_is_the_models(model, texts):
    tokens = model.to_tokens(texts[0])
    names = ["ln_final.hook_out", "blocks.3.hook_resid_post"]
    logits, cache = model.run_with_cache(tokens, names_filter=names)
    lens = LogitLens.from_model(model)
    assert torch.allclose(lens(cache["resid_post", -1], idx=3), logits, atol=1e-3)
    before = model.W_U.clone()
    unembed = Unembed(model)
    with torch.no_grad():
        unembed.unembedding.weight.zero_()
    assert torch.equal(model.W_U, before), "it has a copy"
    normed = unembed.final_norm(cache["resid_post", -1])
    assert torch.allclose(normed, cache["ln_final.hook_out"], atol=1e-4)
    assert not any(parameter.requires_grad for parameter in unembed.parameters())


def test_it_trains(model, texts):
    cfg = model.cfg  # `TunedLens.from_model` takes Hugging Face's models only
    lens = TunedLens(Unembed(model), TunedLensConfig(cfg.model_name, cfg.d_model, cfg.n_layers))
    tokens = model.to_tokens(texts[:16])
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens)
    optimizer = torch.optim.Adam([p for p in lens.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(20):
        predicted = lens(cache["resid_post", 0], idx=1).log_softmax(-1)
        loss = torch.nn.functional.kl_div(
            predicted, logits.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_a_trajectory(model, texts):
    lens = LogitLens.from_model(model)
    tokens = model.to_tokens(texts[0])
    _, cache = model.run_with_cache(tokens)
    found = PredictionTrajectory.from_lens_and_cache(
        lens, tokens, cache, model(tokens), targets=tokens
    )
    assert found.log_probs.shape == (1, model.cfg.n_layers + 1, tokens.shape[1], model.cfg.d_vocab)
    first = model.unembed(model.ln_final(cache["resid_pre", 0])).log_softmax(-1)
    assert torch.allclose(torch.tensor(found.log_probs[:, 0]), first, atol=1e-3)
