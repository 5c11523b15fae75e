"""SAELens: an activations store, fifty steps of a sparse autoencoder, one in the model with and
without its error.
"""

import pytest
import torch
from datasets import Dataset
from sae_lens import (
    ActivationsStore,
    HookedSAETransformer,
    LanguageModelSAERunnerConfig,
    LanguageModelSAETrainingRunner,
    LoggingConfig,
    SAETransformerBridge,
    StandardTrainingSAEConfig,
)
from sae_lens.evals import EvalConfig, run_evals
from sae_lens.training.activation_scaler import ActivationScaler
from transformer_lens import HookedTransformer

POINT = "blocks.2.hook_resid_post"


@pytest.fixture(scope="module")
def config(name, tmp_path_factory):
    return LanguageModelSAERunnerConfig(
        sae=StandardTrainingSAEConfig(d_in=128, d_sae=64, l1_coefficient=0.1),
        model_name=name,
        hook_name=POINT,
        is_dataset_tokenized=False,
        streaming=False,
        context_size=16,
        training_tokens=50 * 64,
        train_batch_size_tokens=64,
        store_batch_size_prompts=4,
        n_batches_in_buffer=4,
        n_eval_batches=2,
        lr=1e-3,
        device="cpu",
        checkpoint_path=str(tmp_path_factory.mktemp("checkpoints")),
        output_path=str(tmp_path_factory.mktemp("output")),
        logger=LoggingConfig(log_to_wandb=False),
    )


@pytest.fixture(scope="module")
def data(texts):
    return Dataset.from_list(
        [{"text": " ".join(texts[i : i + 8])} for i in range(0, len(texts), 8)] * 40
    )


@pytest.fixture(scope="module")
def trained(config, data, name):
    model = HookedTransformer.from_pretrained_no_processing(name, device="cpu")
    return LanguageModelSAETrainingRunner(config, override_dataset=data, override_model=model).run()


def test_the_store_holds_the_models_activations(config, data, model):
    store = ActivationsStore.from_config(model, config, override_dataset=data)
    tokens = store.get_batch_tokens(3)
    assert tokens.shape == (3, 16)
    found = store.get_activations(tokens)
    by_hand = model.original_model(tokens, output_hidden_states=True).hidden_states[3]
    assert torch.allclose(found.reshape(by_hand.shape), by_hand, atol=1e-4)
    assert next(store).shape[-1] == 128


def test_fifty_steps_train(config, data, trained, model):
    store = ActivationsStore.from_config(model, config, override_dataset=data)
    acts = store.get_activations(store.get_batch_tokens(8)).reshape(-1, 128)
    untrained = type(trained).from_dict(trained.cfg.to_dict())
    with torch.no_grad():
        errors = [(sae(acts) - acts).square().mean().item() for sae in (untrained, trained)]
    assert errors[1] < 0.8 * errors[0]


def test_in_the_model_with_and_without_its_error(trained, name, texts):
    model = HookedSAETransformer.from_pretrained_no_processing(name, device="cpu")
    sae = trained
    tokens = model.to_tokens(texts[:3])
    plain = model(tokens)
    with torch.no_grad():
        by_hand = model.run_with_hooks(
            tokens, fwd_hooks=[(POINT, lambda x, hook: sae.decode(sae.encode(x)))]
        )
        put_in = model.run_with_saes(tokens, saes=[sae])
        with_error = model.run_with_saes(tokens, saes=[sae], use_error_term=True)
        logits, cache = model.run_with_cache_with_saes(tokens, saes=[sae], use_error_term=False)
        off = model.run_with_hooks_with_saes(
            tokens, saes=[sae], fwd_hooks=[(f"{POINT}.hook_sae_acts_post", lambda x, hook: x * 0)]
        )
        by_hand_off = model.run_with_hooks(
            tokens, fwd_hooks=[(POINT, lambda x, hook: sae.decode(sae.encode(x) * 0))]
        )
    assert torch.allclose(put_in, by_hand, atol=1e-4)
    assert not torch.allclose(put_in, plain, atol=1e-2)
    assert torch.allclose(with_error, plain, atol=1e-4)
    assert torch.equal(logits, put_in)
    resid = model.run_with_cache(tokens, names_filter=POINT)[1][POINT]
    assert torch.allclose(cache[f"{POINT}.hook_sae_acts_post"], sae.encode(resid), atol=1e-4)
    assert torch.allclose(off, by_hand_off, atol=1e-4)
    assert torch.equal(model(tokens), plain), "it is taken out again"
    assert not [key for key in model.hook_dict if "sae" in key]


def test_evaluation(config, data, trained, model):
    store = ActivationsStore.from_config(model, config, override_dataset=data)
    wanted = EvalConfig(
        batch_size_prompts=2,
        n_eval_reconstruction_batches=2,
        n_eval_sparsity_variance_batches=2,
        compute_ce_loss=True,
        compute_kl=True,
        compute_l2_norms=True,
        compute_sparsity_metrics=True,
        compute_variance_metrics=True,
    )
    metrics, _ = run_evals(trained, store, model, ActivationScaler(), eval_config=wanted)
    loss = metrics["model_performance_preservation"]
    assert loss["ce_loss_without_sae"] < loss["ce_loss_with_sae"] < loss["ce_loss_with_ablation"]
    assert metrics["reconstruction_quality"]["explained_variance"] > 0


@torch.no_grad()
def test_its_other_model_class_runs_the_same(trained, name, texts):
    model, sae = SAETransformerBridge.boot_transformers(name, device="cpu"), trained
    tokens = model.to_tokens(texts[:3])
    plain = model(tokens)
    by_hand = model.run_with_hooks(
        tokens, fwd_hooks=[(POINT, lambda x, hook: sae.decode(sae.encode(x)))]
    )
    put_in = model.run_with_saes(tokens, saes=[sae])
    assert torch.allclose(put_in, by_hand, atol=1e-4) and not torch.allclose(
        put_in, plain, atol=1e-2
    )
    assert torch.allclose(
        model.run_with_saes(tokens, saes=[sae], use_error_term=True), plain, atol=1e-4
    )
    logits, cache = model.run_with_cache_with_saes(tokens, saes=[sae], use_error_term=False)
    resid = model.run_with_cache(tokens, names_filter=POINT)[1][POINT]
    features = model.get_sae_hook_name(sae)
    assert torch.equal(logits, put_in) and torch.allclose(
        cache[features], sae.encode(resid), atol=1e-4
    )
    off = model.run_with_hooks_with_saes(
        tokens, saes=[sae], fwd_hooks=[(features, lambda x, hook: x * 0)]
    )
    by_hand_off = model.run_with_hooks(
        tokens, fwd_hooks=[(POINT, lambda x, hook: sae.decode(sae.encode(x) * 0))]
    )
    assert torch.allclose(off, by_hand_off, atol=1e-4)
    assert torch.equal(model(tokens), plain) and not [
        key for key in model.hook_dict if "sae" in key
    ]
