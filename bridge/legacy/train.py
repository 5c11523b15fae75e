"""A small training loop for language models, as HookedTransformer's `train` has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import optim
from torch.utils.data import DataLoader, Dataset

from bridge.legacy.utilities.devices import get_device


@dataclass
class HookedTransformerTrainConfig:
    """How to train."""

    num_epochs: int
    batch_size: int
    lr: float = 1e-3
    seed: int = 0
    momentum: float = 0.0
    max_grad_norm: float | None = None
    weight_decay: float | None = None
    optimizer_name: str = "Adam"
    device: str | None = None
    warmup_steps: int = 0
    save_every: int | None = None
    save_dir: str | None = None
    wandb: bool = False
    wandb_project_name: str | None = None
    print_every: int | None = 50
    max_steps: int | None = None


def train(model: Any, config: HookedTransformerTrainConfig, dataset: Dataset[Any] | Sequence[Any]) -> Any:
    """Trains a model, and returns it, to predict the next tokens of rows such as ``{"tokens": tensor}``, of one length.

    Raises:
        ValueError: an unknown optimizer, or `wandb`.
    """
    if config.wandb:
        raise ValueError("wandb=True: there is no connection to Weights and Biases; log from a loop of your own")
    torch.manual_seed(config.seed)
    device = torch.device(config.device or get_device())
    model.to(device)
    model.train()
    optimizer = _optimizer(model, config)
    warmup = config.warmup_steps
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / warmup) if warmup else 1.0)
    loader: DataLoader[Any] = DataLoader(cast(Dataset[Any], dataset), batch_size=config.batch_size, shuffle=True)
    for epoch in range(1, config.num_epochs + 1):
        for step, batch in enumerate(loader):
            loss = model(batch["tokens"].to(device), return_type="loss")
            loss.backward()
            if config.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if config.print_every is not None and step % config.print_every == 0:
                print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}")
            if config.save_every is not None and config.save_dir is not None and step % config.save_every == 0:
                torch.save(model.state_dict(), Path(config.save_dir) / f"model_{step}.pt")
            if config.max_steps is not None and step >= config.max_steps:
                break
    return model


def _optimizer(model: Any, config: HookedTransformerTrainConfig) -> optim.Optimizer:
    name, decay, weights = config.optimizer_name, config.weight_decay, model.parameters()
    if name in ("Adam", "AdamW"):  # Adam's own weight decay is not what is meant by it; AdamW's is
        return optim.Adam(weights, config.lr) if decay is None else optim.AdamW(weights, config.lr, weight_decay=decay)
    if name == "SGD":
        return optim.SGD(weights, config.lr, config.momentum, weight_decay=decay or 0.0)
    raise ValueError(f"optimizer_name is {name!r}; it must be Adam, AdamW or SGD")
