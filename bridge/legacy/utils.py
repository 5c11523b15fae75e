"""What HookedTransformer's `utils` offers, where it is not about the insides of TransformerLens."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import constants, hf_hub_download
from jaxtyping import Float
from torch import Tensor

from bridge.legacy.table import NAMES, named, not_done

#: Where files of the hub are.
CACHE_DIR = constants.HF_HUB_CACHE
#: Stands for "what the model's configuration says".
USE_DEFAULT_VALUE = None


def to_numpy(tensor: Any) -> np.ndarray:
    """A tensor, list, tuple, number or array as an array."""
    if isinstance(tensor, Tensor):
        return tensor.detach().cpu().numpy()
    if isinstance(tensor, np.ndarray | list | tuple | int | float | bool | str):
        return np.asarray(tensor)
    raise ValueError(f"there is no array of {type(tensor).__name__}")


def get_corner(tensor: Any, n: int = 3) -> Any:
    """The first `n` entries of each axis, of a tensor or a `FactoredMatrix`."""
    corner = tensor[tuple(slice(n) for _ in range(tensor.ndim))]
    return corner if isinstance(corner, Tensor) else corner.AB


def remove_batch_dim(tensor: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The tensor without its first axis, where that has length 1."""
    return tensor[0] if tensor.shape[0] == 1 else tensor


def transpose(tensor: Float[Tensor, "... a b"]) -> Float[Tensor, "... b a"]:
    """The tensor with its last two axes exchanged."""
    return tensor.transpose(-1, -2)


def is_square(x: Tensor) -> bool:
    """Whether it is a square matrix."""
    return x.ndim == 2 and x.shape[0] == x.shape[1]


def is_lower_triangular(x: Tensor) -> bool:
    """Whether it is a square matrix with nothing above its diagonal."""
    return is_square(x) and x.equal(x.tril())


def override_or_use_default_value(default_flag: Any, override: Any = None) -> Any:
    """The override, or the default where that is None."""
    return default_flag if override is None else override


def is_library_available(name: str) -> bool:
    """Whether a package can be imported."""
    return name in sys.modules or importlib.util.find_spec(name) is not None


def download_file_from_hf(
    repo_name: str,
    file_name: str,
    subfolder: str = ".",
    cache_dir: str | None = None,
    force_is_torch: bool = False,
    **kwargs: Any,
) -> Any:
    """A file of the hub: what a JSON or torch file (in which nothing is run) holds, and the path of any other."""
    folder = None if subfolder == "." else subfolder
    path = hf_hub_download(repo_name, file_name, subfolder=folder, cache_dir=cache_dir, **kwargs)
    if path.endswith(".pth") or force_is_torch:
        return torch.load(path, map_location="cpu", weights_only=True)
    return json.loads(Path(path).read_text(encoding="utf-8")) if path.endswith(".json") else path


clear_huggingface_cache = not_done(
    "clear_huggingface_cache",
    "it would delete every model of every program; `hf cache rm` deletes the one that you name",
)

__getattr__ = named(__name__)
__all__ = [name for name in (*globals(), *NAMES["utils"]) if not name.startswith("_")]
