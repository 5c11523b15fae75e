"""Tuned lenses: a learned affine map per layer that predicts the last layer's stream."""

from __future__ import annotations

import json
import pickle
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from bridge.arguments import check_positive, refuse_wrong_types, shown
from bridge.lens.maps import Lens
from bridge.lens.readout import exact_hash, unembedding_hash
from bridge.run.inputs import Input, RunnableBridge
from bridge.run.tokenization import texts_in

_KIND = "linear_tuned_lens"


#: Python's errors for a damaged zip or pickle.
DAMAGED = (
    EOFError,
    NotImplementedError,
    OSError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
)


class TunedLens(Lens):
    """An affine map per layer: the stream before the layer, plus a linear map of it (Belrose et al.
    2023, "Eliciting Latent Predictions from Transformers with the Tuned Lens").

    It loads folders that the package `tuned-lens` wrote (``params.pt`` and ``config.json``), and
    `save` writes the same format.

    Args:
        n_layers: the number of the model's layers.
        d_model: the width of its stream.
        bias: whether the maps have biases.

    Attributes:
        translators: a linear layer for the stream before each layer; new ones are zero, which is
            the logit lens.
        config: the contents of `config.json`.

    Example:
        >>> from bridge.lens import TunedLens
        >>> TunedLens(4, 128).translators[0].weight.abs().sum().item()
        0.0
    """

    title = "Tuned lens"

    @refuse_wrong_types
    def __init__(self, n_layers: int, d_model: int, bias: bool = True) -> None:
        super().__init__()
        for name, size in (("n_layers", n_layers), ("d_model", d_model)):
            check_positive(name, size)
        self.translators = nn.ModuleList(
            [nn.Linear(d_model, d_model, bias=bias) for _ in range(n_layers)]
        )
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

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(len(self.translators) + 1))

    def matrix(self, layer: int) -> Float[Tensor, "d_model d_model"]:
        parameters = [parameter for parameter in self.parameters() if parameter.ndim == 2]
        identity = torch.eye(self.config["d_model"]).to(parameters[0])
        if layer == len(parameters):
            return identity
        return identity + parameters[layer]

    def forward(
        self, stream: Float[Tensor, "*any d_model"], layer: int
    ) -> Float[Tensor, "*any d_model"]:
        """Predict the last layer's stream from a layer's stream.

        Args:
            stream: the residual stream before the layer.
            layer: from 0; ``n_layers``, the end, is returned unchanged.
        """
        if layer == len(self.translators):
            return stream
        translator = self.translators[layer]
        assert isinstance(translator, nn.Linear)
        # The lens may be in float32 where the model is in half precision.
        dtype = torch.promote_types(stream.dtype, translator.weight.dtype)
        bias = None if translator.bias is None else translator.bias.to(dtype)
        wide = stream.to(dtype)
        change = nn.functional.linear(wide, translator.weight.to(dtype), bias)
        return (wide + change).to(stream.dtype)

    @classmethod
    def is_at(cls, path: Path) -> bool:
        return (path / "config.json").is_file()

    @classmethod
    @refuse_wrong_types
    def load(
        cls,
        folder: str | Path,
        bridge: RunnableBridge | None = None,
        check_unembedding: bool = True,
    ) -> TunedLens:
        """Load a lens.

        Args:
            folder: the folder with ``params.pt`` and ``config.json``.
            bridge: the model that it is for; the lens is put on that model's device.
            check_unembedding: reject a lens whose configuration identifies a different unembedding.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: it is a different kind of lens, for a different model, or damaged.
        """
        folder = Path(folder)
        for name in ("config.json", "params.pt"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"folder is {str(folder)!r}, which has no {name}")
        file = folder / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            if config.get("lens_type", _KIND) != _KIND:
                raise ValueError(
                    f"its lens is of type {config['lens_type']!r}; only {_KIND!r} can be read"
                )
            n_layers = config["num_hidden_layers"]
            d_model = config["d_model"]
            bias = config["bias"]
            file = folder / "params.pt"
            state = _read_maps(file, (n_layers, d_model, d_model))
            lens = cls(n_layers, d_model, bias)
            lens.translators.load_state_dict(state)
        except (
            *DAMAGED,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(f"{file} cannot be used: {error}") from error
        lens.config |= config
        if bridge is not None:
            lens.on(bridge, check_unembedding).to(bridge.cfg.device)
        return lens

    @refuse_wrong_types
    def save(self, folder: str | Path) -> None:
        """Write ``params.pt`` and ``config.json``.

        Args:
            folder: the folder, which is created if it is missing.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.translators.state_dict(), folder / "params.pt")
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")

    @refuse_wrong_types
    def check(self, bridge: RunnableBridge, unembedding: bool = True) -> None:
        """Reject a model that the lens was not trained for.

        Args:
            bridge: the model.
            unembedding: also reject a model whose unembedding differs from the one used in
                training, as far as that is known.

        Raises:
            ValueError: its sizes or its unembedding differ.
        """
        n_layers, d_model = len(self.translators), self.config["d_model"]
        if (n_layers, d_model) != (bridge.cfg.n_layers, bridge.cfg.d_model):
            raise ValueError(
                f"the lens is for {n_layers} layers of width {d_model}; {bridge.cfg.model_name} has"
                f" {bridge.cfg.n_layers} of width {bridge.cfg.d_model}"
            )
        exact, short = self.config.get("unembed_sha256"), self.config["unembed_hash"]
        is_other = bool(
            exact != exact_hash(bridge) if exact else short and short != unembedding_hash(bridge)
        )
        if unembedding and is_other:
            raise ValueError(
                "the lens was trained with another unembedding than that of"
                f" {bridge.cfg.model_name} (have its weights been processed?);"
                " check_unembedding=False uses it all the same"
            )

    @classmethod
    @refuse_wrong_types
    def fit(
        cls,
        bridge: RunnableBridge,
        batches: Iterable[Input],
        epochs: int = 1,
        learning_rate: float = 1e-3,
        verbose: bool = True,
    ) -> TunedLens:
        """Train a lens: minimise each layer's KL divergence from the model's own distribution.

        The model is not changed. The optimiser is Adam; the learning rate decreases linearly to
        zero.

        Args:
            bridge: the model, in evaluation mode.
            batches: texts, or tokens without padding. The padding of texts is excluded.
            epochs: the number of passes over the batches.
            learning_rate: the initial learning rate.
            verbose: show a progress bar.

        Raises:
            ValueError: there are no batches, the model is in training mode, or the learning rate is
                not above zero.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.lens import TunedLens
            >>> bridge = TransformerBridge.boot_embedded()
            >>> lens = TunedLens.fit(
            ...     bridge, ["The capital of France is Paris."], epochs=2, verbose=False
            ... )
        """
        if bridge.core.training:
            raise ValueError("the model is in training mode: call bridge.eval() first")
        if isinstance(batches, str) or (isinstance(batches, Tensor) and batches.ndim < 2):
            raise TypeError(
                f"batches is {shown(batches)}; it must be a list of batches, each of texts or"
                " tokens"
            )
        if not learning_rate > 0:
            raise ValueError(f"learning_rate is {learning_rate}; it must be above zero")
        masked = [_tokens_and_mask(bridge, batch) for batch in batches]
        if not masked or epochs < 1:
            raise ValueError(
                f"there are {len(masked)} batches and {epochs} epochs; a lens needs one of each, or"
                " more"
            )
        bridge.architecture.refuse_several_streams(bridge.cfg.model_name)
        lens = cls(bridge.cfg.n_layers, bridge.cfg.d_model).to(bridge.cfg.device)
        lens.config["base_model_name_or_path"] = bridge.cfg.model_name
        lens.config["unembed_hash"] = unembedding_hash(bridge)
        lens.config["unembed_sha256"] = exact_hash(bridge)
        optimizer = torch.optim.Adam(lens.parameters(), lr=learning_rate)
        total = epochs * len(masked)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
        progress = tqdm(total=total, desc="tuning a lens", unit="batch", disable=not verbose)
        with progress, torch.enable_grad():
            for batch, mask in masked * epochs:
                optimizer.zero_grad()
                divergence = _set_gradients(lens, bridge, batch, mask)
                optimizer.step()
                schedule.step()
                progress.set_postfix(divergence=f"{divergence:.3f}")
                progress.update()
        return lens.eval().on(bridge, unembedding=False)


def _read_maps(file: Path, sizes: tuple[int, int, int]) -> dict[str, Tensor]:
    """Return the state dict of a lens's maps.

    Raises:
        ValueError: the file is damaged, or contains maps of other sizes.
    """
    if zipfile.is_zipfile(file) and (bad := zipfile.ZipFile(file).testzip()) is not None:
        raise ValueError(f"the checksum of {bad} in it is another")
    state: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    weights = [value for name, value in state.items() if name.endswith("weight")]
    if (len(weights), *weights[0].shape) != sizes:
        raise ValueError(
            f"it holds {len(weights)} maps {list(weights[0].shape)}, config.json says {sizes}"
        )
    return state


def _set_gradients(
    lens: TunedLens, bridge: RunnableBridge, batch: Input, mask: Tensor | None
) -> float:
    """Set the gradients of a lens's maps on one batch, and return the mean divergence over layers.

    The gradients are computed with `torch.autograd.grad`, so that those of the model's own
    parameters stay unchanged.
    """
    n = bridge.cfg.n_layers
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(n)]
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(batch, attention_mask=mask, names_filter=names)
    target = logits.float().log_softmax(-1)
    total = 0.0
    for layer, name in enumerate(names):  # one layer at a time: its logits are large
        stream = cache[name].detach()
        predicted = bridge(lens(stream, layer), start_at_layer=n).float().log_softmax(-1)
        divergences = (target.exp() * (target - predicted)).sum(-1)  # batch pos
        if mask is not None:
            divergences = divergences[mask.bool().to(divergences.device)]
        loss = divergences.mean()
        parameters = list(lens.translators[layer].parameters())
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        total += loss.item() / n
    return total


def _tokens_and_mask(bridge: RunnableBridge, batch: Input) -> tuple[Input, Tensor | None]:
    """Return a batch's tokens, and the mask of its real positions; None if there is no padding."""
    if isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if name != "attention_mask"}
        return inputs, batch.get("attention_mask")
    texts = None if isinstance(batch, str) else texts_in(batch)
    if texts is not None:
        padded = bridge.batch_of(texts)
        return padded.tokens, padded.mask
    return batch, None
