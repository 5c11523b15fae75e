"""HookedTransformer's `utils`: tensors, masks, sampling, slices, devices, activation functions.

Functions that take a model call it, and read its tokenizer and `cfg`. Evaluations, training,
initialisers, data sets and multi-GPU placement are not available: `names.toml` says what to use.
"""

from __future__ import annotations

import json
import os
import re
from builtins import slice as span  # this name shadows the module `utilities.slice`
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from huggingface_hub import constants, hf_hub_download
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper
from transformers.activations import ACT2FN

from bridge.arguments import CannotBeDoneError
from bridge.hooks.names import IN_ATTENTION, IN_MLP, PARTS, SHORT
from bridge.legacy.table import NAMES, named, not_done
from bridge.native.native import ACT_FNS, SoLU

#: Tokens of a batch, or a number per token.
TokenRows = Int[Tensor, "batch pos"]
#: The base URL of files on the hub.
CACHE_DIR = constants.HF_HUB_CACHE
#: A sentinel for "the model's configuration decides".
USE_DEFAULT_VALUE = None


def get_act_name(
    name: str, layer: SupportsIndex | str | None = None, layer_type: str | None = None
) -> str:
    """Return the full name of a hook point from its short name, exactly as HookedTransformer does:
    names of attention and MLP ignore `layer_type`, and a layer in the name wins.

    Example:
        >>> from bridge.legacy.utilities import get_act_name
        >>> get_act_name("k", 2), get_act_name("scale4ln1"), get_act_name("result", 1, "mlp")
        ('blocks.2.attn.hook_k', 'blocks.4.ln1.hook_scale', 'blocks.1.attn.hook_result')
    """
    if ("." in name or name.startswith("hook_")) and layer is None and layer_type is None:
        return name
    together = re.match(r"([a-z]+)(\d+)([a-z]?.*)", name)
    if together:
        name, layer, layer_type = together.groups()
    if name != "scores":  # of `act_name` alone
        name = SHORT.get(name, name)
    if name in IN_ATTENTION or name in IN_MLP:
        part = "attn" if name in IN_ATTENTION else "mlp"
    else:
        part = PARTS.get(layer_type or "", layer_type or "")
    in_block = "" if layer is None else f"blocks.{layer}"
    final = "ln_final" if layer is None and name in ("scale", "normalized") else ""
    return ".".join(word for word in (final, in_block, part, f"hook_{name}") if word)


def to_numpy(tensor: Any) -> np.ndarray:
    """Convert a tensor, list, tuple, number or array to an array."""
    if isinstance(tensor, Tensor):
        return tensor.detach().cpu().numpy()
    if isinstance(tensor, np.ndarray | list | tuple | int | float | bool | str):
        return np.asarray(tensor)
    raise ValueError(f"{type(tensor).__name__} cannot be converted to an array")


def get_corner(tensor: Any, n: int = 3) -> Any:
    """Return the first `n` entries of each axis, of a tensor or a `FactoredMatrix`."""
    corner = tensor[(span(n),) * tensor.ndim]
    return corner if isinstance(corner, Tensor) else corner.AB


def remove_batch_dim(tensor: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the tensor without its first axis, if that has length 1."""
    return tensor[0] if tensor.shape[0] == 1 else tensor


def transpose(tensor: Float[Tensor, "... a b"]) -> Float[Tensor, "... b a"]:
    """Return the tensor with its last two axes swapped."""
    return tensor.transpose(-1, -2)


def is_square(x: Tensor) -> bool:
    """Tell whether a tensor is a square matrix."""
    return x.ndim == 2 and x.shape[0] == x.shape[1]


def is_lower_triangular(x: Tensor) -> bool:
    """Tell whether a tensor is a square matrix with zeros above its diagonal."""
    return is_square(x) and torch.equal(x, x.tril())


def download_file_from_hf(
    repo_name: str,
    file_name: str,
    subfolder: str = ".",
    cache_dir: str | None = None,
    force_is_torch: bool = False,
    **kwargs: Any,
) -> Any:
    """Download a file from the hub. Return the content of a JSON or torch file (loaded without
    running code), and the path of any other file.
    """
    folder = None if subfolder == "." else subfolder
    path = hf_hub_download(repo_name, file_name, subfolder=folder, cache_dir=cache_dir, **kwargs)
    if path.endswith(".pth") or force_is_torch:
        return torch.load(path, map_location="cpu", weights_only=True)
    return json.loads(Path(path).read_text(encoding="utf-8")) if path.endswith(".json") else path


clear_huggingface_cache = not_done(
    "clear_huggingface_cache",
    "it would delete every model of every program; `hf cache rm` deletes the one that you name",
)


# --------------------------------------------------------------------------------------------------
# Masks and sampling, as in HookedTransformer's utils.
# --------------------------------------------------------------------------------------------------


def lm_accuracy(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: TokenRows,
    per_token: bool = False,
) -> Float[Tensor, ""] | Bool[Tensor, "batch pos-1"]:
    """Return how often the most likely next token is correct."""
    right = logits[:, :-1].argmax(-1) == tokens[:, 1:]
    return right if per_token else right.sum() / right.numel()


def sample_logits(
    final_logits: Float[Tensor, "batch d_vocab"],
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    tokens: TokenRows | None = None,
) -> Int[Tensor, " batch"]:
    """Sample a token for each row."""
    if temperature == 0:
        return final_logits.argmax(-1)
    if top_k is not None and top_k <= 0:
        raise ValueError(f"top_k is {top_k}; it must be more than 0")
    if top_k is None and top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be more than 0 and at most 1")
    logits = final_logits / temperature
    if freq_penalty:
        if tokens is None or tokens.ndim != 2:
            raise ValueError("freq_penalty needs the tokens so far, [batch, pos]")
        tokens = tokens.to(logits.device)
        penalties = torch.full_like(tokens, -1, dtype=logits.dtype) * freq_penalty
        logits = logits.scatter_add(-1, tokens, penalties)
    if top_k is not None:
        logits = TopKLogitsWarper(top_k)(tokens, logits)
    elif top_p is not None:
        logits = TopPLogitsWarper(top_p)(tokens, logits)
    return torch.distributions.Categorical(logits=logits.float()).sample()


def get_tokens_with_bos_removed(
    tokenizer: Any, tokens: Int[Tensor, "... pos"], padding_side: str | None = None
) -> Int[Tensor, "... less"]:
    """Return rows of tokens without their BOS token; for right-padded rows, without the first
    token.

    Args:
        tokenizer: the tokenizer that defines BOS, CLS and padding. If it has no BOS, the tokens are
            returned unchanged.
        tokens: ``[..., pos]``.
        padding_side: by default the tokenizer's.

    Raises:
        ValueError: a left-padded row does not start with BOS (or CLS) after its padding.
    """
    bos, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    if bos is None:
        return tokens
    if (padding_side or tokenizer.padding_side) == "right":
        return tokens[..., 1:]
    padding = torch.zeros_like(tokens)
    if pad is not None:
        padding = (tokens == pad).long().cumprod(-1)
    # If BOS is also the padding token, the last one on the left is BOS.
    start = padding.sum(-1, keepdim=True) - int(bos == pad)
    cls_token = getattr(tokenizer, "cls_token_id", None)
    starting = [bos] if cls_token is None else [bos, cls_token]
    places = torch.arange(tokens.shape[-1], device=tokens.device)
    first = (places == start) & torch.isin(tokens, tokens.new_tensor(starting))
    if not bool(first.any(-1).all()):
        raise ValueError(
            f"a row of the tokens does not start with BOS (token {bos}) behind its padding"
        )
    return tokens[~first].reshape(*tokens.shape[:-1], -1)


def get_attention_mask(
    tokenizer: Any,
    tokens: TokenRows,
    prepend_bos: bool,
    padding_side: str | None = None,
) -> TokenRows:
    """Return 1 for tokens and 0 for padding, which is detected on the tokenizer's padding side."""
    if tokenizer is None or tokenizer.pad_token_id is None:
        return torch.ones_like(tokens)
    right = (padding_side or tokenizer.padding_side) == "right"
    is_token = (tokens != tokenizer.pad_token_id).long()
    # How many tokens are between a place and the padded end, the place included.
    if right:
        counts = is_token.flip(-1).cumsum(-1).flip(-1)
    else:
        counts = is_token.cumsum(-1)
    mask = (counts > 0).to(tokens.dtype)
    if not right and prepend_bos and tokenizer.bos_token_id == tokenizer.pad_token_id:
        first = (mask == 0).sum(-1, keepdim=True) - 1
        mask.scatter_(-1, first.clamp(min=0), 1)
    return mask


def get_offset_position_ids(
    past_kv_pos_offset: int, attention_mask: Int[Tensor, "batch offset_pos"]
) -> TokenRows:
    """Return the position of each new token, counted from the first token that is not padding."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)[:, past_kv_pos_offset:]


def position_embeddings(
    table: Float[Tensor, "n_ctx d_model"],
    tokens: TokenRows,
    past_kv_pos_offset: int = 0,
    attention_mask: Int[Tensor, "batch offset_pos"] | None = None,
) -> Float[Tensor, "batch pos d_model"]:
    """Return the embedding of each token's position, and zero for padding."""
    if attention_mask is None:
        rows = table[past_kv_pos_offset : past_kv_pos_offset + tokens.shape[1]]
        return rows.expand(len(tokens), -1, -1)
    mask = attention_mask.to(table.device)
    positions = get_offset_position_ids(past_kv_pos_offset, mask)
    return table[positions] * mask[:, past_kv_pos_offset:, None]


def report_on_prompt(
    prompt: str,
    answer: str | list[str],
    model: Any,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
) -> None:
    """Print how well a model continues a prompt."""
    answers = [answer] if isinstance(answer, str) else answer
    plural = "s" if len(answers) > 1 else ""
    if prepend_space_to_answer:
        answers = [" " + text.removeprefix(" ") for text in answers]
    start = model.to_tokens(prompt, prepend_bos=prepend_bos)
    ends = _answer_tokens(model, answers)
    tokens = torch.cat([start.expand(len(ends), -1), ends], dim=1)
    with torch.no_grad():
        logits = model(tokens)[:, start.shape[1] - 1 : -1]
    if print_details:
        texts = [model.to_str_tokens(text, prepend_bos=False) for text in answers]
        print("Tokenized prompt:", model.to_str_tokens(prompt, prepend_bos=prepend_bos))
        print(f"Tokenized answer{plural}:", texts if plural else texts[0])
    summary = []
    for next_logits, right in zip(logits.unbind(1), ends.unbind(1), strict=True):
        order = next_logits.softmax(-1).argsort(descending=True)
        ranks = (order == right[:, None]).int().argmax(-1).tolist()
        names = [model.to_string(token) for token in right[:, None]]
        summary.append(list(zip(names, ranks, strict=True)))
        if print_details:
            print(f"Performance on answer token{plural}:")
            _print_tokens(model, next_logits, ranks, top_k)
    print(f"Ranks of the answer tokens: {summary if plural else [pairs[0] for pairs in summary]}")


def _answer_tokens(model: Any, answers: list[str]) -> Tensor:
    """Return the tokens of one answer, or the first token of each of several, ``[answer, pos]``."""
    rows = [model.to_tokens(text, prepend_bos=False)[0] for text in answers]
    if len(answers) < 2:
        return rows[0][None]  # type: ignore[no-any-return]
    return torch.stack([row[:1] for row in rows])


def _print_tokens(model: Any, logits: Tensor, ranks: list[int], top_k: int) -> None:
    """Print each row's correct token with its rank, and the first row's most likely tokens.

    Args:
        model: the model.
        logits: the logits of the next token, ``[row, d_vocab]``.
        ranks: the rank of the correct token in each row.
        top_k: the number of most likely tokens to print.
    """
    probs, order = logits.softmax(-1).sort(descending=True)
    n_top = min(top_k, logits.shape[-1])
    lines = [(f"Rank: {rank: <8}", row, rank) for row, rank in enumerate(ranks)]
    lines += [(f"Top {rank}th token.", 0, rank) for rank in range(n_top)]
    for title, row, rank in lines:
        token = order[row, rank]
        logit = float(logits[row, token])
        prob = float(probs[row, rank])
        text = model.to_string(token)
        print(f"{title} Logit: {logit:5.2f} Prob: {prob:6.2%} Token: |{text}|")


# Keep pytest from collecting it, whatever it is imported as
report_on_prompt.__dict__["__test__"] = False


# --------------------------------------------------------------------------------------------------
# `Slice`: the chosen entries of an axis, in the notation of HookedTransformer's ``pos_slice``.
# --------------------------------------------------------------------------------------------------


#: A position; ``(stop,)``, ``(start, stop)`` or ``(start, stop, step)``; a list, array or tensor of
#: positions; or None.
SliceInput = int | tuple[int | None, ...] | Sequence[int] | np.ndarray | Tensor | span | None


class Slice:
    """The chosen entries of an axis: an int takes one and drops the axis, a tuple holds the
    arguments of Python's `slice`, a list, array or tensor takes several, None takes all.

    Raises:
        ValueError: it is none of these.

    Example:
        >>> import torch
        >>> from bridge.legacy.utilities import Slice
        >>> x = torch.arange(10)
        >>> Slice((2, 8, 3)).apply(x), Slice(-1).apply(x), Slice([0, 4]).apply(x)
        (tensor([2, 5]), tensor(9), tensor([0, 4]))
    """

    def __init__(self, input_slice: SliceInput = None) -> None:
        self.slice: Any = input_slice
        if input_slice is None:
            self.slice, self.mode = span(None), "identity"
        elif type(input_slice) is int:
            self.mode = "int"
        elif isinstance(input_slice, span | tuple):
            self.slice = span(*input_slice) if isinstance(input_slice, tuple) else input_slice
            self.mode = "slice"
        elif isinstance(input_slice, list | np.ndarray | Tensor):
            self.slice, self.mode = to_numpy(input_slice), "array"
        else:
            raise ValueError(
                f"a slice cannot be {input_slice!r}; it must be an int, a tuple, a list, an array,"
                " a tensor or None"
            )

    @classmethod
    def unwrap(cls, slice_input: Slice | SliceInput) -> Slice:
        """Convert to a `Slice`. An int keeps its axis here, with length 1."""
        if isinstance(slice_input, Slice):
            return slice_input
        return cls([slice_input] if isinstance(slice_input, int) else slice_input)

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return the chosen entries of one axis of a tensor."""
        index: list[Any] = [span(None)] * tensor.ndim
        index[dim] = self.slice
        if self.mode == "array":
            index[dim] = torch.from_numpy(self.slice).to(tensor.device)
        return tensor[tuple(index)]

    def indices(self, max_ctx: int | None = None) -> np.ndarray:
        """Return the chosen positions of an axis of length `max_ctx`."""
        if self.mode == "int":
            return np.array([self.slice], dtype=np.int64)
        if max_ctx is None:
            raise ValueError(f"max_ctx is needed to know the positions of {self!r}")
        return np.arange(max_ctx, dtype=np.int64)[self.slice]

    def __repr__(self) -> str:
        return f"Slice: {self.slice} Mode: {self.mode} "


# --------------------------------------------------------------------------------------------------
# Defaults of a model, and its device.
# --------------------------------------------------------------------------------------------------


#: The values that `LocallyOverridenDefaults` accepts.
_OVERRIDES = {"prepend_bos": (None, True, False), "padding_side": (None, "left", "right")}


@contextmanager
def LocallyOverridenDefaults(model: Any, **overrides: Any) -> Iterator[None]:
    """Set the tokenization defaults of a model inside a ``with`` statement, and restore them
    afterwards. None keeps a default.

    Args:
        model: the model, whose ``cfg.default_prepend_bos`` and ``tokenizer.padding_side`` are set.
        overrides: ``prepend_bos`` and ``padding_side``; without a tokenizer, the latter is ignored.

    Raises:
        CannotBeDoneError: another name or value.
    """
    with ExitStack() as restoring:
        for name, value in overrides.items():
            if name not in _OVERRIDES:
                raise CannotBeDoneError(f"{name} cannot be set: only {' and '.join(_OVERRIDES)}")
            holder, attribute = model.cfg, "default_prepend_bos"
            if name == "padding_side":
                holder, attribute = model.tokenizer, name
            if holder is None:
                continue
            if value not in _OVERRIDES[name]:
                raise CannotBeDoneError(f"{name} is {value!r}, not one of {_OVERRIDES[name]}")
            default = getattr(holder, attribute)
            restoring.callback(setattr, holder, attribute, default)
            setattr(holder, attribute, default if value is None else value)
        yield


def get_device_for_block_index(
    index: int, cfg: Any, device: torch.device | str | None = None
) -> torch.device:
    """Return the device of a block of a model that is on one device.

    Raises:
        NotImplementedError: the model is on several.
    """
    if cfg.n_devices > 1:
        raise NotImplementedError(
            f"the model is on {cfg.n_devices} devices: model.blocks[{index}].attn.W_Q.device"
        )
    return torch.device(device or cfg.device)


def get_device() -> torch.device:
    """Return the first accelerator, or the CPU. Apple's is chosen only if
    TRANSFORMERLENS_ALLOW_MPS=1.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    allows_mps = os.environ.get("TRANSFORMERLENS_ALLOW_MPS") == "1"
    if torch.backends.mps.is_available() and allows_mps:
        return torch.device("mps")
    return torch.device("cpu")


# --------------------------------------------------------------------------------------------------
# Activation functions by HookedTransformer's names.
# --------------------------------------------------------------------------------------------------


#: The type of an activation function.
ActivationFunction = Callable[..., Tensor]


#: GPT-2's approximation of GELU; the same with a rounded constant (GPT-J); torch's own.
gelu_new, gelu_fast, gelu_pytorch_tanh = (
    ACT2FN[name] for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
)
#: ``x * softmax(x)``.
solu = SoLU()


def xielu(input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Compute xIELU with the initial parameters of training (Huang and Schlag 2024, "Deriving
    Activation Functions Using Integration"): a parabola above zero, an integrated exponential
    below. Apertus has learnt parameters.
    """
    alpha, beta = 0.8, 0.5
    above = alpha * input * input
    below = alpha * (torch.expm1(input.clamp(max=-1e-6)) - input)
    return torch.where(input > 0, above, below) + beta * input


#: The functions by their names in configurations.
SUPPORTED_ACTIVATIONS: dict[str, ActivationFunction] = {
    name: solu if name.startswith("solu") else ACT2FN[name] for name in ACT_FNS
} | {"xielu": xielu}

__getattr__ = named(__name__)
__all__ = [name for name in (*globals(), *NAMES["utilities"]) if not name.startswith("_")]
