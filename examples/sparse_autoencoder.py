"""A sparse autoencoder on the model in the package, trained with SAELens from a harvest.

    pip install sae-lens "transformer-bridge[harvest]"
    python examples/sparse_autoencoder.py

Prints the share of variance that the autoencoder explains on documents that it was not trained on,
and the words at which a few of its features are strongest.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from collections.abc import Iterator

import torch
from sae_lens.config import LoggingConfig, SAETrainerConfig
from sae_lens.saes.topk_sae import TopKTrainingSAE, TopKTrainingSAEConfig
from sae_lens.training.sae_trainer import SAETrainer
from torch import Tensor
from transformers import AutoTokenizer

from bridge.embedded import MODEL_DIR, prompts
from bridge.harvest import Activations, harvest

POINT = "blocks.2.hook_resid_post"


def texts(count: int, seed: int) -> list[str]:
    """Sentences that the model knows."""
    made = [
        prompt.text + prompt.answer + "."
        for kind in ("fact", "ioi")
        for prompt in prompts(kind, count)
    ]
    random.Random(seed).shuffle(made)
    return made


def training(acts: Activations, mean: Tensor, batch_size: int) -> Iterator[Tensor]:
    """Centred activations without end, in another order in each epoch."""
    for epoch in itertools.count():
        for batch in acts.batches(
            batch_size, shuffle=True, epoch=epoch, columns=[POINT], drop_last=True
        ):
            yield batch[POINT].float() - mean


def main(documents: int, steps: int) -> float:
    """Harvests, trains, and returns the explained share of the variance.

    Args:
        documents: how many of each kind are harvested.
        steps: training steps.
    """
    made = texts(documents, 0)
    held_out = made[: len(made) // 10]
    kw = {"hook_points": [POINT], "context_size": 32, "pack": False, "keep_special": False}
    with tempfile.TemporaryDirectory() as folder:
        print(harvest("embedded", made[len(held_out) :], out=f"{folder}/train", **kw))
        harvest("embedded", held_out, out=f"{folder}/test", **kw)
        acts, test = Activations(f"{folder}/train"), Activations(f"{folder}/test")[:]
        mean = acts.statistics(POINT).mean.float()
        torch.manual_seed(0)
        sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=128, d_sae=512, k=8))
        size = 512
        config = SAETrainerConfig(
            total_training_samples=size * steps,
            train_batch_size_samples=size,
            lr=1e-3,
            lr_end=1e-3,
            logger=LoggingConfig(log_to_wandb=False),
        )
        SAETrainer(config, sae, training(acts, mean, size)).fit()
    x = test[POINT].float() - mean
    with torch.no_grad():
        features = sae.encode(x)
        left = (x - sae.decode(features)).square().sum() / x.square().sum()
    print(f"explained share of the variance, on {len(x):,} other tokens: {1 - left:.3f}")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    for feature in features.sum(0).topk(5).indices.tolist():
        best = features[:, feature].topk(8).indices
        print(
            f"feature {feature}:"
            f" {[tokenizer.decode([token]) for token in test['token'][best].tolist()]}"
        )
    return float(1 - left)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    main(given.documents, given.steps)
