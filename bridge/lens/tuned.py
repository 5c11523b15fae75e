"""Tuned lenses: for each layer a learned affine map to what the last layer would hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from adapters.architecture import Architecture
from adapters.config import ModelConfig
from bridge.hooks.arguments import check_positive, refuse_wrong_types, shown
from bridge.hooks.hooks import HookPoint
from bridge.run.inputs import Input, TextBatch
from bridge.run.recorder import PosSlice

# ----------------------------------------------------------------------------------------------------------------------
# What a lens needs of a bridge.
# ----------------------------------------------------------------------------------------------------------------------


class Readable(Protocol):
    """A bridge whose residual stream is read.

    Attributes:
        original_model: the model, with what wraps it.
        core: the Hugging Face model.
        cfg: the facts about it.
        architecture: what its adapter declares.
    """

    original_model: nn.Module
    core: PreTrainedModel
    architecture: Architecture
    cfg: ModelConfig

    @property
    def hook_dict(self) -> Mapping[str, HookPoint]:
        """The hook points, by name."""

    def __call__(self, input: Tensor, *, start_at_layer: int) -> Tensor:
        """Runs the model from a layer on: its logits."""

    def run_with_cache(
        self,
        input: Input,
        *,
        names_filter: Sequence[str],
        pos_slice: PosSlice = None,
        attention_mask: Tensor | None = None,
        return_type: str | None = "logits",
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Runs the model: its logits, and the activations of these names."""

    def batch_of(
        self, texts: Sequence[str], prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> TextBatch:
        """Texts as tokens, padded to one length."""


_KIND = "linear_tuned_lens"


class TunedLens(nn.Module):
    """An affine map for each layer: the stream that enters the layer, plus a linear map of it (Belrose et al. 2023,
    "Eliciting Latent Predictions from Transformers with the Tuned Lens").

    Folders that the package `tuned-lens` wrote (``params.pt`` and ``config.json``) load, and `save` writes such ones.

    Args:
        n_layers: how many layers the model has.
        d_model: the width of its stream.
        bias: whether the maps add something.

    Attributes:
        translators: a linear layer for the stream before each layer; new ones are zero, which is the logit lens.
        config: what `config.json` says.

    Example:
        >>> from bridge.lens import TunedLens
        >>> TunedLens(4, 128).translators[0].weight.abs().sum().item()
        0.0
    """

    @refuse_wrong_types
    def __init__(self, n_layers: int, d_model: int, bias: bool = True) -> None:
        super().__init__()
        for name, size in (("n_layers", n_layers), ("d_model", d_model)):
            check_positive(name, size)
        self.translators = nn.ModuleList([nn.Linear(d_model, d_model, bias=bias) for _ in range(n_layers)])
        for parameter in self.translators.parameters():
            nn.init.zeros_(parameter)
        self.config: dict[str, Any] = {
            "base_model_name_or_path": "",
            "d_model": d_model,
            "num_hidden_layers": n_layers,
            "bias": bias,
            "base_model_revision": None,
            "unembed_hash": None,
            "lens_type": _KIND,
        }

    def forward(self, stream: Float[Tensor, "*any d_model"], layer: int) -> Float[Tensor, "*any d_model"]:
        """The stream as the last layer would hold it.

        Args:
            stream: what enters the layer.
            layer: from 0; ``n_layers``, the end, stays as it is.
        """
        return stream if layer == len(self.translators) else stream + self.translators[layer](stream)

    @classmethod
    @refuse_wrong_types
    def load(cls, folder: str | Path, bridge: Readable | None = None, check_unembedding: bool = True) -> TunedLens:
        """Reads a lens.

        Args:
            folder: with ``params.pt`` and ``config.json``.
            bridge: the model that it is for; it is put on that model's device.
            check_unembedding: refuse a lens whose configuration names another unembedding than this model's.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: it is another kind of lens, or for another model.
        """
        folder = Path(folder)
        for name in ("config.json", "params.pt"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"folder is {str(folder)!r}, which has no {name}")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.get("lens_type", _KIND) != _KIND:
            raise ValueError(f"{folder} holds a lens of type {config['lens_type']!r}; only {_KIND!r} can be read")
        lens = cls(config["num_hidden_layers"], config["d_model"], config["bias"])
        lens.config |= config
        state = torch.load(folder / "params.pt", map_location="cpu", weights_only=True)
        lens.translators.load_state_dict(state)
        if bridge is not None:
            lens.check(bridge, check_unembedding)
            lens.to(bridge.cfg.device)
        return lens

    @refuse_wrong_types
    def save(self, folder: str | Path) -> None:
        """Writes ``params.pt`` and ``config.json``.

        Args:
            folder: it is made where it is missing.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.translators.state_dict(), folder / "params.pt")
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")

    @refuse_wrong_types
    def check(self, bridge: Readable, unembedding: bool = True) -> None:
        """Refuses a model that the lens is not for.

        Args:
            bridge: the model.
            unembedding: whether its unembedding has to be the one that the lens was trained with, as far as is known.

        Raises:
            ValueError: it has other sizes, or another unembedding.
        """
        n_layers, d_model = len(self.translators), self.config["d_model"]
        if (n_layers, d_model) != (bridge.cfg.n_layers, bridge.cfg.d_model):
            raise ValueError(
                f"the lens is for {n_layers} layers of width {d_model}; {bridge.cfg.model_name} has "
                f"{bridge.cfg.n_layers} of width {bridge.cfg.d_model}"
            )
        named = self.config["unembed_hash"]
        if unembedding and named and named != unembedding_hash(bridge):
            raise ValueError(
                f"the lens was trained with another unembedding than that of {bridge.cfg.model_name} (have its weights "
                "been processed?); check_unembedding=False uses it all the same"
            )

    @classmethod
    @refuse_wrong_types
    def fit(
        cls,
        bridge: Readable,
        batches: Iterable[Input],
        epochs: int = 1,
        learning_rate: float = 1e-3,
        verbose: bool = True,
    ) -> TunedLens:
        """Trains a lens: each layer's distribution is brought near the model's own, by the divergence between them.

        The model stays as it is. Adam; the learning rate falls to zero, linearly.

        Args:
            bridge: the model, in evaluation mode.
            batches: texts or tokens, as the bridge takes them. Padding of texts does not count; tokens have none.
            epochs: how many times to go through them.
            learning_rate: at the beginning.
            verbose: show a progress bar.

        Raises:
            ValueError: there are no batches, the model is in training mode, or the learning rate is not above zero.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.lens import TunedLens
            >>> bridge = TransformerBridge.boot_embedded()
            >>> lens = TunedLens.fit(bridge, ["The capital of France is Paris."], epochs=2, verbose=False)
        """
        if bridge.core.training:
            raise ValueError("the model is in training mode: call bridge.eval() first")
        if isinstance(batches, str) or (isinstance(batches, Tensor) and batches.ndim < 2):
            raise TypeError(f"batches is {shown(batches)}; it must be a list of batches, each of texts or tokens")
        if not learning_rate > 0:
            raise ValueError(f"learning_rate is {learning_rate}; it must be above zero")
        every = [_tokens_and_mask(bridge, batch) for batch in batches]
        if not every or epochs < 1:
            raise ValueError(f"there are {len(every)} batches and {epochs} epochs; a lens needs one of each, or more")
        bridge.architecture.refuse_several_streams(bridge.cfg.model_name)
        n = bridge.cfg.n_layers
        names = [f"blocks.{layer}.hook_resid_pre" for layer in range(n)]
        lens = cls(n, bridge.cfg.d_model).to(bridge.cfg.device)
        lens.config |= {"base_model_name_or_path": bridge.cfg.model_name, "unembed_hash": unembedding_hash(bridge)}
        optimizer = torch.optim.Adam(lens.parameters(), lr=learning_rate)
        total = epochs * len(every)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
        with tqdm(total=total, desc="tuning a lens", unit="batch", disable=not verbose) as bar, torch.enable_grad():
            for batch, mask in every * epochs:
                with torch.no_grad():
                    logits, cache = bridge.run_with_cache(batch, attention_mask=mask, names_filter=names)
                right = logits.float().log_softmax(-1)
                loss = 0.0
                optimizer.zero_grad()
                for layer, name in enumerate(names):  # one layer at a time: its logits are large
                    stream = cache[name].detach()
                    found = bridge(lens(stream, layer), start_at_layer=n).float().log_softmax(-1)
                    each = (right.exp() * (right - found)).sum(-1)  # batch pos
                    one = each.mean() if mask is None else each[mask.bool().to(each.device)].mean()
                    _accumulate(one, list(lens.translators[layer].parameters()))
                    loss += one.item() / n
                optimizer.step()
                schedule.step()
                bar.set_postfix(divergence=f"{loss:.3f}")
                bar.update()
        return lens.eval()


def _tokens_and_mask(bridge: Readable, batch: Input) -> tuple[Input, Tensor | None]:
    """A batch, and which of its positions are no padding; None: all of them."""
    if isinstance(batch, Sequence) and batch and isinstance(batch[0], str) and not isinstance(batch, str):
        padded = bridge.batch_of(batch)
        return padded.tokens, padded.mask
    return batch, None


def _accumulate(loss: Tensor, parameters: list[nn.Parameter]) -> None:
    """Gradients of these parameters alone: the model's own are not touched."""
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def unembedding_hash(bridge: Readable) -> str:
    """How the package `tuned-lens` names an unembedding: by its entries, printed to one decimal.

    Args:
        bridge: the bridge.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.lens.tuned import unembedding_hash
        >>> len(unembedding_hash(TransformerBridge.boot_embedded()))
        64
    """
    weight = bridge.core.get_output_embeddings().weight.detach().cpu().float().numpy()
    return hashlib.sha256(np.array_str(weight, precision=1).encode()).hexdigest()
