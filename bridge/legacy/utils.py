"""What HookedTransformer's `utils` offers, where it is not about the insides of TransformerLens."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

import numpy as np
import torch
from huggingface_hub.constants import HF_HUB_CACHE as CACHE_DIR
from jaxtyping import Float
from torch import Tensor
from transformers.activations import XIELUActivation as XIELU

from bridge.analysis.composition import composition_scores
from bridge.hooks.act_names import act_name
from bridge.legacy.bos import (
    get_input_with_manually_prepended_bos,
    get_tokenizer_with_bos,
    get_tokens_with_bos_removed,
)
from bridge.legacy.datasets import get_dataset, keep_single_column, tokenize_and_concatenate
from bridge.legacy.devices import get_device, warn_if_mps
from bridge.legacy.missing import missing, not_done
from bridge.legacy.slices import Slice, SliceInput
from bridge.legacy.tokens import (
    get_attention_mask,
    get_cumsum_along_dim,
    get_offset_position_ids,
    lm_accuracy,
    lm_cross_entropy_loss,
    report_on_prompt,
    sample_logits,
)
from bridge.legacy.utilities.activation_functions import (
    SUPPORTED_ACTIVATIONS,
    gelu_fast,
    gelu_new,
    gelu_pytorch_tanh,
    solu,
    xielu,
)
from bridge.legacy.weight_init import (
    calc_fan_in_and_fan_out,
    init_kaiming_normal_,
    init_kaiming_uniform_,
    init_xavier_normal_,
    init_xavier_uniform_,
)

__all__ = [
    "ACTIVATION_FN_DICT", "CACHE_DIR", "USE_DEFAULT_VALUE", "XIELU", "LocallyOverridenDefaults", "Slice",
    "SliceInput", "calc_fan_in_and_fan_out", "clear_huggingface_cache", "composition_scores", "download_file_from_hf",
    "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "get_act_name", "get_attention_mask", "get_corner",
    "get_cumsum_along_dim", "get_dataset", "get_device", "get_input_with_manually_prepended_bos", "get_nested_attr",
    "get_offset_position_ids", "get_tokenizer_with_bos", "get_tokens_with_bos_removed", "init_kaiming_normal_",
    "init_kaiming_uniform_", "init_xavier_normal_", "init_xavier_uniform_", "is_library_available",
    "is_lower_triangular", "is_square", "keep_single_column", "lm_accuracy", "lm_cross_entropy_loss",
    "override_or_use_default_value", "print_gpu_mem", "remove_batch_dim", "repeat_along_head_dimension",
    "sample_logits", "select_compatible_kwargs", "set_nested_attr", "solu", "test_prompt", "to_numpy",
    "tokenize_and_concatenate", "transpose", "warn_if_mps", "xielu",
]  # fmt: skip

test_prompt = report_on_prompt

#: Stands for "what the model's configuration says".
USE_DEFAULT_VALUE = None


def get_act_name(name: str, layer: SupportsIndex | str | None = None, layer_type: str | None = None) -> str:
    """The full name of a hook point from its short one.

    Args:
        name: such as ``"q"`` or ``"resid_pre"``, or with layer and part in it, such as ``"k6"`` or ``"scale4ln1"``.
        layer: the block.
        layer_type: the part of the block where the name does not say it: ``"attn"``, ``"mlp"``, ``"ln1"``, ...

    Example:
        >>> from bridge.legacy.utils import get_act_name
        >>> get_act_name("k", 6), get_act_name("pre5"), get_act_name("normalized", 27, "ln2"), get_act_name("scale4ln1")
        ('blocks.6.attn.hook_k', 'blocks.5.mlp.hook_pre', 'blocks.27.ln2.hook_normalized', 'blocks.4.ln1.hook_scale')
    """
    return act_name(name, layer, layer_type)


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


def repeat_along_head_dimension(
    tensor: Float[Tensor, "batch pos d_model"], n_heads: int, clone_tensor: bool = True
) -> Float[Tensor, "batch pos n_heads d_model"]:
    """A copy of the tensor for each head."""
    repeated = tensor.unsqueeze(2).expand(-1, -1, n_heads, -1)
    return repeated.clone() if clone_tensor else repeated


#: Activation functions by their names in configurations.
ACTIVATION_FN_DICT = SUPPORTED_ACTIVATIONS


def override_or_use_default_value(default_flag: Any, override: Any = None) -> Any:
    """The override, or the default where that is None."""
    return default_flag if override is None else override


def get_nested_attr(obj: Any, attr_str: str) -> Any:
    """What a path such as ``"a.b.c"`` leads to."""
    for name in attr_str.split("."):
        obj = getattr(obj, name)
    return obj


def set_nested_attr(obj: Any, attr_str: str, value: Any) -> None:
    """Sets what a path such as ``"a.b.c"`` leads to."""
    *path, last = attr_str.split(".")
    setattr(get_nested_attr(obj, ".".join(path)) if path else obj, last, value)


class LocallyOverridenDefaults:
    """Other defaults of a model inside a ``with`` statement.

    Args:
        model: a `HookedTransformer`.
        overrides: ``prepend_bos`` and ``padding_side``; None leaves the default.

    Raises:
        ValueError: another name, or a value that it cannot have.

    Example:
        >>> from bridge.embedded import MODEL_DIR
        >>> from bridge.legacy import HookedTransformer, utils
        >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
        >>> with utils.LocallyOverridenDefaults(model, prepend_bos=False):
        ...     model.to_str_tokens("Mary and")
        ['Mary', ' and']
    """

    _PLACES = {  # noqa: RUF012
        "prepend_bos": ("cfg.default_prepend_bos", (None, True, False)),
        "padding_side": ("tokenizer.padding_side", (None, "left", "right")),
    }

    def __init__(self, model: Any, **overrides: Any) -> None:
        for name, value in overrides.items():
            if name not in self._PLACES:
                raise ValueError(f"{name!r} is no default of a model; {' and '.join(self._PLACES)} are")
            if value not in self._PLACES[name][1]:
                raise ValueError(f"{name} is {value!r}; it must be one of {self._PLACES[name][1]}")
        self.model, self.overrides = model, overrides
        self.before: dict[str, Any] = {}

    def __enter__(self) -> None:
        for name, value in self.overrides.items():
            path = self._PLACES[name][0]
            if value is not None and (name != "padding_side" or self.model.tokenizer is not None):
                self.before[path] = get_nested_attr(self.model, path)
                set_nested_attr(self.model, path, value)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self.before:
            set_nested_attr(self.model, *self.before.popitem())


def is_library_available(name: str) -> bool:
    """Whether a package can be imported."""
    return name in sys.modules or importlib.util.find_spec(name) is not None


def select_compatible_kwargs(kwargs_dict: dict[str, Any], callable: Callable[..., Any]) -> dict[str, Any]:
    """Those of the arguments that a function names."""
    names = inspect.getfullargspec(callable)
    return {name: value for name, value in kwargs_dict.items() if name in (*names.args, *names.kwonlyargs)}


def print_gpu_mem(step_name: str = "") -> None:
    """Prints how much memory is allocated on the GPU."""
    print(f"{step_name} ~ {torch.cuda.memory_allocated() / 2**30:.2f} GiB allocated on GPU.")


def download_file_from_hf(
    repo_name: str,
    file_name: str,
    subfolder: str = ".",
    cache_dir: str | None = None,
    force_is_torch: bool = False,
    **kwargs: Any,
) -> Any:
    """A file of the hub: what a JSON or torch file holds, and the path of any other.

    Unlike HookedTransformer's, torch files are read with ``weights_only=True``: nothing in them is run.
    """
    from huggingface_hub import hf_hub_download

    path = hf_hub_download(
        repo_name, file_name, subfolder=None if subfolder == "." else subfolder, cache_dir=cache_dir, **kwargs
    )
    if path.endswith(".pth") or force_is_torch:
        return torch.load(path, map_location="cpu", weights_only=True)
    return json.loads(Path(path).read_text(encoding="utf-8")) if path.endswith(".json") else path


clear_huggingface_cache = not_done(
    "clear_huggingface_cache",
    "it would delete every model of every program; `hf cache rm` deletes the one that you name",
)


_NOT_HERE = {
    "check_structure": "it was for debugging TransformerLens",
}


def __getattr__(name: str) -> Any:
    raise missing(__name__, name, _NOT_HERE, __all__)
