"""Folders of transcoders, one for each layer, as bases: `bridge.add_transcoders`.

Input: a folder in one of two formats. **circuit-tracer's**: a ``config.yaml`` that names the hook
points, beside ``layer_0.safetensors`` and so on (a set of transcoders), ``W_enc_0.safetensors`` and
``W_dec_0.safetensors`` and so on (a cross-layer transcoder), or a list of files, also of Gemma
Scope (``.npz``) and Gemma Scope 2. **Gemma Scope 2's own**: ``layer_0_.../params.safetensors`` or
``params_layer_0.safetensors`` and so on, without a ``config.yaml``.

Output: for each layer a `CrossLayer` and the matrix of its skip path. The names of the tensors say
the format of a file; other names are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from adapters.config import ModelConfig
from bridge.bases.bases import CrossLayer

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Transcoder:
    """The transcoder of one layer.

    Attributes:
        basis: its features.
        affine: the matrix of its skip path, ``[d, d_out]``; None without one.
    """

    basis: CrossLayer
    affine: Tensor | None

    @property
    def skip(self) -> Callable[[Tensor], Tensor] | None:
        """Return the skip path, as `TransformerBridge.add_basis` takes it."""
        affine = self.affine
        return None if affine is None else lambda x: x @ affine.to(x)


@dataclass(frozen=True)
class TranscoderFolder:
    """A folder of transcoders.

    Attributes:
        reads: the last part of the name of the hook points that they read, such as
            ``"hook_resid_mid"``.
        writes: that of the hook points that they write.
        layers: the transcoder of each layer.
    """

    reads: str
    writes: str
    layers: list[Transcoder]

    @property
    def across(self) -> bool:
        """Tell whether features are written at later layers, too."""
        return any(layer.basis.n_later for layer in self.layers)

    def check(self, cfg: ModelConfig) -> None:
        """Check the number of layers, and the widths.

        Raises:
            ValueError: they are not the model's.
        """
        if len(self.layers) != cfg.n_layers:
            raise ValueError(
                f"the folder has transcoders of {len(self.layers)} layers, and the model"
                f" {cfg.n_layers} blocks"
            )
        for i, layer in enumerate(self.layers):
            widths = (layer.basis.W_enc.shape[1], len(layer.basis.b_dec))
            if widths != (cfg.d_model, cfg.d_model):
                raise ValueError(
                    f"the transcoder of layer {i} goes from {widths[0]} to {widths[1]} numbers, and"
                    f" the model's streams have {cfg.d_model}"
                )


def read_folder(folder: str | Path) -> TranscoderFolder:
    """Read a folder of transcoders.

    Args:
        folder: the folder.

    Raises:
        FileNotFoundError: it, or a file that its configuration names, is not there.
        ValueError: a format that is not known.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is no folder: download one (huggingface_hub.snapshot_download) and give its"
            " path"
        )
    config = folder / "config.yaml"
    if not config.exists():
        return TranscoderFolder("ln2.hook_out", "hook_mlp_out", _set_of(_gemma_files(folder)))
    settings = _settings(config)
    if "transcoders" in settings:
        files = [_local(folder, str(entry)) for entry in settings["transcoders"]]
        layers = _set_of(files)
    elif settings["model_kind"] == "transcoder_set":
        layers = _set_of(_numbered(folder, folder.glob("layer_*.safetensors")))
    else:
        encoders = _numbered(folder, folder.glob("W_enc_*.safetensors"))
        layers = [_of_two_files(folder, i) for i in range(len(encoders))]
    reads, writes = settings["feature_input_hook"], settings["feature_output_hook"]
    return TranscoderFolder(_OURS.get(reads, reads), writes, layers)


#: Hook points of TransformerLens 3 that have other names here.
_OURS = {"mlp.hook_in": "ln2.hook_out"}
#: What a configuration of circuit-tracer must say.
_NEEDED = ("model_kind", "feature_input_hook", "feature_output_hook")
_KINDS = ("transcoder_set", "cross_layer_transcoder")


def _settings(config: Path) -> dict[str, Any]:
    """Return the settings of a ``config.yaml``.

    Raises:
        ValueError: it is not circuit-tracer's.
    """
    import yaml  # a requirement of transformers

    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    missing = [name for name in _NEEDED if name not in (settings or {})]
    if missing:
        raise ValueError(f"{config} lacks {', '.join(missing)}, as circuit-tracer's files have")
    if settings["model_kind"] not in _KINDS:
        raise ValueError(
            f"the model_kind of {config} is {settings['model_kind']!r}; it is one of"
            f" {', '.join(_KINDS)}"
        )
    return dict(settings)


def _gemma_files(folder: Path) -> list[Path]:
    """Return the files of a folder of Gemma Scope 2.

    Raises:
        ValueError: it has none.
    """
    files = [*folder.glob("layer_*/params.safetensors"), *folder.glob("params_layer_*.safetensors")]
    if not files:
        raise ValueError(
            f"{folder} has no config.yaml (of circuit-tracer), and no layer_*/params.safetensors or"
            " params_layer_*.safetensors (of Gemma Scope 2)"
        )
    return _numbered(folder, files)


def _numbered(folder: Path, files: Iterable[Path]) -> list[Path]:
    """Return one file for each layer, in their order.

    Raises:
        ValueError: a layer has none, or several; or a file has no number.
    """
    by_layer: dict[int, list[Path]] = {}
    for file in files:
        number = re.search(r"(?:layer|W_enc)_(\d+)", str(file.relative_to(folder)))
        if number is None:
            raise ValueError(f"{file} does not say the number of its layer, as layer_0 does")
        by_layer.setdefault(int(number[1]), []).append(file)
    for layer in range(max(by_layer, default=-1) + 1):
        own = sorted(str(file.relative_to(folder)) for file in by_layer.get(layer, []))
        if len(own) != 1:
            raise ValueError(
                f"{folder} needs one file of layer {layer}, and has"
                f" {', '.join(own) if own else 'none'}"
            )
    if not by_layer:
        raise ValueError(f"{folder} has no files of layers")
    return [by_layer[layer][0] for layer in range(len(by_layer))]


def _local(folder: Path, entry: str) -> Path:
    """Return a file that a configuration names: in the folder, elsewhere, or on the hub.

    Raises:
        FileNotFoundError: it is not there.
    """
    if entry.startswith("hf://"):
        from huggingface_hub import hf_hub_download

        address = urlparse(entry)
        name, _, path = address.path.lstrip("/").partition("/")
        (revision,) = parse_qs(address.query).get("revision", [None])
        repository = f"{address.netloc}/{name}"
        return Path(hf_hub_download(repository, path, revision=revision))
    file = folder / entry
    if not file.exists():
        raise FileNotFoundError(f"{folder / 'config.yaml'} names {entry}, which is not there")
    return file


def _set_of(files: Iterable[Path]) -> list[Transcoder]:
    """Read the files of the layers of a set, or of Gemma Scope 2's cross-layer transcoder."""
    return [_of_file(file, layer) for layer, file in enumerate(files)]


#: circuit-tracer's name of each tensor in the files of Gemma Scope 2.
_GEMMA_NAMES = {
    "w_enc": "W_enc",
    "w_dec": "W_dec",
    "affine_skip_connection": "affine",
}
_THRESHOLD = "activation_function.threshold"
_REQUIRED = {"W_enc", "b_enc", "W_dec", "b_dec"}


def _of_file(file: Path, layer: int) -> Transcoder:
    """Read one layer's file.

    Raises:
        ValueError: a format that is not known.
    """
    tensors = _tensors(file)
    if "w_enc" in tensors:
        tensors = {_GEMMA_NAMES.get(name, name): x for name, x in tensors.items()}
        tensors["W_enc"] = tensors["W_enc"].mT
    elif file.suffix == ".npz":
        tensors["W_enc"] = tensors["W_enc"].mT
    else:
        tensors = _renamed(tensors)
    W_dec = tensors.get("W_dec")
    if W_dec is not None:  # across layers, with those before the own one
        tensors["W_dec"] = W_dec[:, None] if W_dec.ndim == 2 else W_dec[:, layer:]
    return _transcoder(file, tensors)


def _renamed(tensors: Tensors) -> Tensors:
    """Return the tensors of a file of circuit-tracer, whose skip path has ``[d_out, d]``."""
    if "W_skip" in tensors:
        tensors["affine"] = tensors.pop("W_skip").mT
    if _THRESHOLD in tensors:
        tensors["threshold"] = tensors.pop(_THRESHOLD)
    return tensors


def _of_two_files(folder: Path, layer: int) -> Transcoder:
    """Read one layer of circuit-tracer's cross-layer transcoder."""
    encoder, decoder = folder / f"W_enc_{layer}.safetensors", folder / f"W_dec_{layer}.safetensors"
    if not decoder.exists():
        raise FileNotFoundError(f"{decoder} is not there, and {encoder} is")
    tensors = _tensors(encoder) | _tensors(decoder)
    return _transcoder(encoder, {name.removesuffix(f"_{layer}"): x for name, x in tensors.items()})


def _tensors(file: Path) -> Tensors:
    """Read the tensors of a file."""
    if file.suffix == ".npz":
        with np.load(file) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays}
    return load_file(file)


def _transcoder(file: Path, tensors: Mapping[str, Tensor]) -> Transcoder:
    """Return a layer's transcoder.

    Raises:
        ValueError: tensors are missing, or some are not known.
    """
    if not _REQUIRED <= tensors.keys() <= _REQUIRED | {"threshold", "affine"}:
        raise ValueError(
            f"{file} has the tensors {', '.join(sorted(tensors))}; a transcoder has W_enc, b_enc,"
            " W_dec, b_dec, and perhaps a threshold and a skip path"
        )
    threshold = tensors.get("threshold")
    basis = CrossLayer(
        tensors["W_enc"],
        tensors["b_enc"],
        tensors["W_dec"],
        tensors["b_dec"],
        None if threshold is None else threshold.flatten(),
    )
    return Transcoder(basis, tensors.get("affine"))
