"""Models that are stored in HookedTransformer's own format: a configuration, and state dicts with its names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled
from torch import Tensor

from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.loading.loading import OWN_FORMAT

#: How the hub is asked.
_HUB = ("revision", "token", "cache_dir", "force_download", "local_files_only")
#: What such configurations call fields otherwise.
_CALLED = {"normalization": "normalization_type", "architecture": "original_architecture"}
_CHECKPOINT = re.compile(r"checkpoints/.*_(\d+)\.pth")


@dataclass(frozen=True)
class OwnFormat:
    """Where a model in HookedTransformer's own format is.

    Attributes:
        name: its hub name, or a folder.
        hub: ``revision``, ``token``, ``cache_dir``, ``force_download`` and ``local_files_only``, where they are given.
    """

    name: str
    hub: dict[str, Any]

    def files(self) -> list[str]:
        """The names of its files."""
        if not os.path.isdir(self.name):
            given = {key: self.hub[key] for key in ("revision", "token") if key in self.hub}
            try:
                return list(HfApi().list_repo_files(self.name, **given))
            except OfflineModeIsEnabled:
                pass
        where = self.name if os.path.isdir(self.name) else snapshot_download(self.name, **self.hub)
        return sorted(str(path.relative_to(where)) for path in Path(where).rglob("*") if path.is_file())

    def path(self, file: str) -> str:
        """Where a file is, on this machine."""
        here = os.path.isdir(self.name)
        return os.path.join(self.name, file) if here else hf_hub_download(self.name, file, **self.hub)

    def stored(self) -> dict[str, Any]:
        """The configuration as it is stored."""
        return json.loads(Path(self.path("config.json")).read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    def checkpoints(self) -> tuple[list[int], str]:
        """The training checkpoints in the order of their files, and ``"step"`` or ``"token"``."""
        labels = [int(match[1]) for match in map(_CHECKPOINT.fullmatch, self.files()) if match]
        if not labels:
            raise ValueError(f"{self.name} has no checkpoints: no files such as checkpoints/model_1000.pth")
        return labels, "token" if labels[-1] > 1e9 else "step"

    def config(
        self, checkpoint_index: int | None = None, checkpoint_value: int | None = None, **changes: Any
    ) -> HookedTransformerConfig:
        """The model's configuration, with other fields where `changes` says so.

        Raises:
            ValueError: there is no such checkpoint.
        """
        stored = self.stored()
        known = {f.name for f in fields(HookedTransformerConfig)} - {"n_params", "device", "dtype", "seed"}
        given = {_CALLED.get(key, key): value for key, value in stored.items()}
        given = {key: value for key, value in given.items() if key in known}
        given.setdefault("original_architecture", "neel-solu-old" if "_old" in self.name else "neel")
        given.setdefault("positional_embedding_type", "shortformer" if stored.get("shortformer_pos") else "standard")
        given |= {"model_name": self.name.rstrip("/").rpartition("/")[2], "init_weights": False}
        if checkpoint_index is not None or checkpoint_value is not None:
            given |= self._checkpoint(checkpoint_index or 0, checkpoint_value)
        return HookedTransformerConfig(**(given | changes))

    def _checkpoint(self, index: int, value: int | None) -> dict[str, Any]:
        """What a configuration says of a checkpoint, which its value names, or else its index.

        Raises:
            ValueError: there is no such checkpoint.
        """
        labels, kind = self.checkpoints()
        if value is None:
            if not -len(labels) <= index < len(labels):
                raise ValueError(f"{self.name} has {len(labels)} checkpoints; {index} is out of range")
            value = labels[index]
        elif value not in labels:
            near = sorted(sorted(labels, key=lambda label: abs(label - value))[:3])
            raise ValueError(f"{self.name} has no checkpoint {value}; the nearest are {near}")
        return {
            "from_checkpoint": True, "checkpoint_label_type": kind, "checkpoint_value": value,
            "checkpoint_index": labels.index(value),
        }  # fmt: skip

    def state_dict(self, cfg: HookedTransformerConfig) -> dict[str, Tensor]:
        """The weights by HookedTransformer's names, in `cfg.dtype`, of as many layers as `cfg` says; nothing is run.

        Raises:
            FileNotFoundError: there is no file of weights.
        """
        ending = f"{cfg.checkpoint_value}.pth" if cfg.from_checkpoint else "final.pth"
        found = [file for file in self.files() if file.endswith(ending)]
        if not found:
            raise FileNotFoundError(f"{self.name} has no file that ends with {ending}")
        loaded = torch.load(self.path(found[0]), map_location="cpu", weights_only=True)
        weights = {name: value.to(cfg.dtype) for name, value in loaded.items()}
        if cfg.original_architecture == "neel-solu-old":
            weights = _as_now(weights, self.stored()["n_layers"])
        kept = tuple(f"blocks.{i}." for i in range(cfg.n_layers))
        return {name: x for name, x in weights.items() if not name.startswith("blocks.") or name.startswith(kept)}


def _as_now(weights: dict[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """The weights of the oldest models: norms had other names, and matrices of up to six layers were transposed."""
    made = {}
    for old, value in weights.items():
        name = old.replace("norm", "ln")
        name = name.replace("ln.", "ln_final.", 1) if name.startswith("ln.") else name
        turned = n_layers <= 8 if name == "pos_embed.W_pos" else n_layers <= 6 and "W_" in name
        made[name] = value.transpose(-2, -1) if turned else value
    return made


def own_format(name: str, given: Mapping[str, Any]) -> OwnFormat | None:
    """Where a model (a hub name, or a folder) is, if it is in HookedTransformer's own format.

    Args:
        name: its name.
        given: arguments for loading, of which some say how the hub is asked.
    """
    if not os.path.isdir(name):
        hub = {key: given[key] for key in _HUB if key in given}
        return OwnFormat(name, hub) if name.startswith(OWN_FORMAT) else None
    config = Path(name, "config.json")
    if not config.is_file() or not any(Path(name).glob("*.pth")):
        return None
    stored = json.loads(config.read_text(encoding="utf-8"))
    return None if "model_type" in stored or "d_model" not in stored else OwnFormat(name, {})


def load_own_format(model: Any, own: OwnFormat, config: HookedTransformerConfig) -> None:
    """Loads weights that are stored in HookedTransformer's own format into the model that `config` describes.

    Raises:
        ValueError: a matrix is missing; or a weight has no place.
    """
    state = own.state_dict(config)
    if "pos_embed.W_pos" in state:
        state["pos_embed.W_pos"] = state["pos_embed.W_pos"][: config.n_ctx]
    missing = [name for name in model.weights.getters if "W_" in name and name not in state]
    if missing:
        raise ValueError(f"{own.name} has no {', '.join(missing)}")
    found = model.load_state_dict(state, strict=False)
    if found.unexpected_keys:
        raise ValueError(f"{own.name} has weights without a place here: {', '.join(found.unexpected_keys)}")
    for name in ("model_name", "tokenizer_name", "original_architecture", "from_checkpoint", "checkpoint_index",
                 "checkpoint_value", "checkpoint_label_type", "default_prepend_bos"):  # fmt: skip
        setattr(model.cfg, name, getattr(config, name))
