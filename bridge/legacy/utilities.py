"""What HookedTransformer has beside models: `utils`, and all that version 4 has under `utilities`; `evals`; `train`.

Nothing here knows of a bridge: what takes a model calls it, and asks it for its tokenizer and its `cfg`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import os
import random
import sys
import warnings
from builtins import slice as span  # the module `utilities.slice` has its name here
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from huggingface_hub import constants, hf_hub_download
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import TopKLogitsWarper, TopPLogitsWarper
from transformers.activations import ACT2FN, XIELUActivation

from bridge.hooks.arguments import check_choice
from bridge.legacy.table import NAMES, named, not_done
from bridge.native.native import ACT_FNS, SoLU
from bridge.run.run import lm_loss

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
    corner = tensor[tuple(span(n) for _ in range(tensor.ndim))]
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


# ----------------------------------------------------------------------------------------------------------------------
# Masks and samples of tokens, as HookedTransformer's utils have them.
# ----------------------------------------------------------------------------------------------------------------------


def lm_accuracy(
    logits: Float[Tensor, "batch pos d_vocab"], tokens: Int[Tensor, "batch pos"], per_token: bool = False
) -> Float[Tensor, ""] | Bool[Tensor, "batch pos-1"]:
    """How often the likeliest next token is the right one."""
    right = logits[:, :-1].argmax(-1) == tokens[:, 1:]
    return right if per_token else right.sum() / right.numel()


def sample_logits(
    final_logits: Float[Tensor, "batch d_vocab"],
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    tokens: Int[Tensor, "batch pos"] | None = None,
) -> Int[Tensor, " batch"]:
    """Samples a token for each row."""
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
        logits = logits.scatter_add(-1, tokens, torch.full_like(tokens, -1, dtype=logits.dtype) * freq_penalty)
    if top_k is not None:
        logits = TopKLogitsWarper(top_k)(tokens, logits)
    elif top_p is not None:
        logits = TopPLogitsWarper(top_p)(tokens, logits)
    return torch.distributions.Categorical(logits=logits.float()).sample()


def get_cumsum_along_dim(tensor: Tensor, dim: int, reverse: bool = False) -> Tensor:
    """Sums along an axis from the start, or from the end."""
    return tensor.flip(dim).cumsum(dim).flip(dim) if reverse else tensor.cumsum(dim)


def get_tokens_with_bos_removed(
    tokenizer: Any, tokens: Int[Tensor, "... pos"], padding_side: str | None = None
) -> Int[Tensor, "... less"]:
    """Rows of tokens without the BOS that each starts with; where padding is on the right, without the first token.

    Args:
        tokenizer: whose BOS, CLS and padding are meant. Tokens of one without BOS are returned as they are.
        tokens: ``[..., pos]``.
        padding_side: the tokenizer's, if it is not given.

    Raises:
        ValueError: where padding is on the left, a row does not start with BOS (or CLS) behind its padding.
    """
    bos, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    if bos is None:
        return tokens
    if (padding_side or tokenizer.padding_side) == "right":
        return tokens[..., 1:]
    padding = torch.zeros_like(tokens) if pad is None else (tokens == pad).long().cumprod(-1)
    place = padding.sum(-1, keepdim=True) - int(bos == pad)  # the last token in front is BOS, if both are one
    at, starts = torch.arange(tokens.shape[-1], device=tokens.device), (bos, getattr(tokenizer, "cls_token_id", None))
    first = (at == place) & torch.isin(tokens, tokens.new_tensor([start for start in starts if start is not None]))
    if not bool(first.any(-1).all()):
        raise ValueError(f"a row of the tokens does not start with BOS (token {bos}) behind its padding")
    return tokens[~first].reshape(*tokens.shape[:-1], -1)


def get_attention_mask(
    tokenizer: Any, tokens: Int[Tensor, "batch pos"], prepend_bos: bool, padding_side: str | None = None
) -> Int[Tensor, "batch pos"]:
    """1 for tokens and 0 for padding, which is looked for on the side on which the tokenizer pads."""
    if tokenizer is None or tokenizer.pad_token_id is None:
        return torch.ones_like(tokens)
    right = (padding_side or tokenizer.padding_side) == "right"
    mask = (get_cumsum_along_dim((tokens != tokenizer.pad_token_id).long(), -1, right) > 0).to(tokens.dtype)
    if not right and prepend_bos and tokenizer.bos_token_id == tokenizer.pad_token_id:
        first = (mask == 0).sum(-1, keepdim=True) - 1
        mask.scatter_(-1, first.clamp(min=0), 1)
    return mask


def get_offset_position_ids(
    past_kv_pos_offset: int, attention_mask: Int[Tensor, "batch offset_pos"]
) -> Int[Tensor, "batch pos"]:
    """The position of each new token, counted from the first that is no padding."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)[:, past_kv_pos_offset:]


def position_embeddings(
    table: Float[Tensor, "n_ctx d_model"],
    tokens: Int[Tensor, "batch pos"],
    past_kv_pos_offset: int = 0,
    attention_mask: Int[Tensor, "batch offset_pos"] | None = None,
) -> Float[Tensor, "batch pos d_model"]:
    """The embedding of each token's position, and zero for padding."""
    if attention_mask is None:
        return table[past_kv_pos_offset : past_kv_pos_offset + tokens.shape[1]].expand(len(tokens), -1, -1)
    mask = attention_mask.to(table.device)
    return table[get_offset_position_ids(past_kv_pos_offset, mask)] * mask[:, past_kv_pos_offset:, None]


def report_on_prompt(
    prompt: str,
    answer: str | list[str],
    model: Any,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
) -> None:
    """Prints how well a model continues a prompt."""
    answers, several = ([answer], "") if isinstance(answer, str) else (answer, "s" * (len(answer) > 1))
    if prepend_space_to_answer:
        answers = [" " + text.removeprefix(" ") for text in answers]
    start = model.to_tokens(prompt, prepend_bos=prepend_bos)
    rows = [model.to_tokens(text, prepend_bos=False)[0] for text in answers]
    ends = torch.stack([row[:1] for row in rows]) if several else rows[0][None]
    tokens = torch.cat([start.expand(len(ends), -1), ends], dim=1)
    with torch.no_grad():
        logits = model(tokens)[:, start.shape[1] - 1 : -1]
    if print_details:
        texts = [model.to_str_tokens(text, prepend_bos=False) for text in answers]
        print("Tokenized prompt:", model.to_str_tokens(prompt, prepend_bos=prepend_bos))
        print(f"Tokenized answer{several}:", texts if several else texts[0])
    ranks = []
    for at, right in zip(logits.unbind(1), ends.unbind(1), strict=True):
        probs, order = at.softmax(-1).sort(descending=True)
        places = (order == right[:, None]).int().argmax(-1).tolist()
        names = [model.to_string(token) for token in right[:, None]]
        ranks.append(list(zip(names, places, strict=True)))
        if not print_details:
            continue
        print(f"Performance on answer token{several}:")
        lines = [(f"Rank: {place: <8}", row, place) for row, place in enumerate(places)]
        lines += [(f"Top {place}th token.", 0, place) for place in range(min(top_k, at.shape[-1]))]
        for title, row, place in lines:
            token = order[row, place]
            print(
                f"{title} Logit: {float(at[row, token]):5.2f} Prob: {float(probs[row, place]):6.2%} "
                f"Token: |{model.to_string(token)}|"
            )
    print(f"Ranks of the answer tokens: {ranks if several else [rank[0] for rank in ranks]}")


report_on_prompt.__dict__["__test__"] = False  # no test of pytest's, whatever it is imported as


# ----------------------------------------------------------------------------------------------------------------------
# `Slice`: which entries of an axis, in the notation of HookedTransformer's ``pos_slice``.
# ----------------------------------------------------------------------------------------------------------------------


#: A position; ``(stop,)``, ``(start, stop)`` or ``(start, stop, step)``; a list, array or tensor of positions; or None.
SliceInput = int | tuple[int | None, ...] | Sequence[int] | np.ndarray | Tensor | span | None


class Slice:
    """Which entries of an axis: an int takes one and drops the axis, a tuple is the arguments of Python's `slice`, a
    list, array or tensor takes several, None takes all.

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
            self.slice = np.asarray(input_slice.detach().cpu() if isinstance(input_slice, Tensor) else input_slice)
            self.mode = "array"
        else:
            raise ValueError(
                f"a slice cannot be {input_slice!r}; it must be an int, a tuple, a list, an array, a tensor or None"
            )

    @classmethod
    def unwrap(cls, slice_input: Slice | SliceInput) -> Slice:
        """A `Slice` of what may be one already. An int keeps its axis here, with length 1."""
        if isinstance(slice_input, Slice):
            return slice_input
        return cls([slice_input] if isinstance(slice_input, int) else slice_input)

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The chosen entries of one axis of a tensor."""
        index: list[Any] = [span(None)] * tensor.ndim
        index[dim] = torch.from_numpy(self.slice).to(tensor.device) if self.mode == "array" else self.slice
        return tensor[tuple(index)]

    def indices(self, max_ctx: int | None = None) -> np.ndarray:
        """The chosen positions of an axis of length `max_ctx`."""
        if self.mode == "int":
            return np.array([self.slice], dtype=np.int64)
        if max_ctx is None:
            raise ValueError(f"max_ctx is needed to know the positions of {self!r}")
        return np.arange(max_ctx, dtype=np.int64)[self.slice]

    def __repr__(self) -> str:
        return f"Slice: {self.slice} Mode: {self.mode} "


# ----------------------------------------------------------------------------------------------------------------------
# Small data sets, and texts into rows of tokens for training. Loading is the package `datasets`' work.
# ----------------------------------------------------------------------------------------------------------------------


#: The small data sets that HookedTransformer names, on the hub.
_SMALL = {
    "openwebtext": "stas/openwebtext-10k", "owt": "stas/openwebtext-10k", "pile": "NeelNanda/pile-10k",
    "c4": "NeelNanda/c4-10k", "code": "NeelNanda/code-10k", "python": "NeelNanda/code-10k",
    "c4_code": "NeelNanda/c4-code-20k", "c4-code": "NeelNanda/c4-code-20k", "wiki": "NeelNanda/wiki-10k",
}  # fmt: skip


def get_dataset(dataset_name: str, **kwargs: Any) -> Any:
    """A small data set of the hub, with a column ``text``. It needs the package `datasets`."""
    if dataset_name not in _SMALL:
        raise ValueError(f"no data set is known as {dataset_name!r}; these are: {', '.join(_SMALL)}")
    return load_from_hub(_SMALL[dataset_name], **kwargs)


def load_from_hub(*names: str, **kwargs: Any) -> Any:
    """The training split of a data set of the hub, by the package `datasets`."""
    try:
        module = importlib.import_module("datasets")
    except ImportError as error:
        call = ", ".join(map(repr, names))
        raise ImportError(
            f"datasets.load_dataset({call}, split='train') needs the package datasets, which is not installed: "
            "pip install datasets"
        ) from error
    return module.load_dataset(*names, split="train", **kwargs)


def keep_single_column(dataset: Any, col_name: str) -> Any:
    """A data set (of the package `datasets`) without its other columns."""
    return dataset.remove_columns([name for name in dataset.features if name != col_name])


def tokenize_and_concatenate(
    dataset: Any,
    tokenizer: Any,
    streaming: bool = False,
    max_length: int = 1024,
    column_name: str = "text",
    add_bos_token: bool = True,
    num_proc: int = 10,
) -> Any:
    """All texts of a data set one after another, with EOS between them, cut into rows of one length.

    Each text is tokenized as a whole (HookedTransformer cuts the joined text in 20 first, 2.18 at white space).
    The rest of a batch that fills no row is left out, unless the batch has no full row: then EOS fills it up.
    """
    if tokenizer.eos_token_id is None or (add_bos_token and tokenizer.bos_token_id is None):
        raise ValueError(f"{type(tokenizer).__name__} has no EOS token, or no BOS token while add_bos_token=True")
    rows_of = partial(_rows, tokenizer=tokenizer, column=column_name, length=max_length, add_bos=add_bos_token)
    parallel = {} if streaming else {"num_proc": num_proc}
    made = keep_single_column(dataset, column_name).map(rows_of, batched=True, remove_columns=[column_name], **parallel)
    made.set_format(type="torch", columns=["tokens"])
    return made


def _rows(examples: Any, tokenizer: Any, column: str, length: int, add_bos: bool) -> dict[str, np.ndarray]:
    """What is made of each batch of texts."""
    ids: list[int] = []
    for i, text in enumerate(examples[column]):
        ids += [tokenizer.eos_token_id] * (i > 0)
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    width = length - add_bos
    ids += [tokenizer.eos_token_id] * (width - len(ids))
    rows = np.array(ids[: len(ids) // width * width], dtype=np.int64).reshape(-1, width)
    return {"tokens": np.pad(rows, ((0, 0), (int(add_bos), 0)), constant_values=tokenizer.bos_token_id or 0)}


# ----------------------------------------------------------------------------------------------------------------------
# Rough evaluations: losses on texts, the induction loss, and the indirect object identification task.
# ----------------------------------------------------------------------------------------------------------------------


_TEXT = (
    "The old lighthouse keeper climbed the stairs every evening to light the lamp. From the window he could see the "
    "harbour, where the fishing boats came home before dark, and further out the ships that carried grain and timber "
    "to other countries. He had done this for thirty years, and he knew most of the captains by name."
)
#: What an `IOIDataset` is made of when nothing is given: one template names the indirect object first, the other the
#: subject.
_TEMPLATES = (
    "When [A] and [B] came to the [LOCATION] to look for [OBJECT], [B] passed the [OBJECT] to [A]",
    "When [B] and [A] came to the [LOCATION], [B] passed the [OBJECT] to [A]",
)
_PEOPLE = ("John", "Mary")
_NOUNS = {"LOCATION": ["store", "market"], "OBJECT": ["milk", "eggs", "bread"]}


def sanity_check(model: Any) -> Float[Tensor, ""]:
    """The loss on one paragraph of plain English, to see at a glance whether a model has learnt the language."""
    return model(_TEXT, return_type="loss")


def _loads(kind: str, names: tuple[str, ...], column: str, what: str) -> Callable[..., DataLoader[Any]]:
    def load(tokenizer: Any, batch_size: int = 8) -> DataLoader[Any]:
        rows = tokenize_and_concatenate(load_from_hub(*names), tokenizer, column_name=column)
        return DataLoader(rows, batch_size=batch_size, shuffle=True, drop_last=True)

    load.__name__ = f"make_{kind}_data_loader"
    load.__doc__ = f"Rows of {what}, from the hub by `datasets`."
    return load


make_wiki_data_loader = _loads("wiki", ("wikitext", "wikitext-2-v1"), "text", "Wikitext 2")
make_owt_data_loader = _loads("owt", ("stas/openwebtext-10k",), "text", "10,000 texts of OpenWebText")
make_pile_data_loader = _loads("pile", ("NeelNanda/pile-10k",), "text", "the first 10,000 texts of the Pile")
make_code_data_loader = _loads("code", ("codeparrot/codeparrot-valid-v2-near-dedup",), "content", "Python code")
DATASET_NAMES = ["wiki", "owt", "pile", "code"]
DATASET_LOADERS = [make_wiki_data_loader, make_owt_data_loader, make_pile_data_loader, make_code_data_loader]


@torch.inference_mode()
def evaluate_on_dataset(
    model: Any,
    data_loader: Iterable[Mapping[str, Tensor]],
    truncate: int = 100,
    device: torch.device | str | None = None,
) -> float:
    """The mean loss over batches."""
    rows = (batch["tokens"].to(model.cfg.device if device is None else device) for batch in data_loader)
    losses = [model(tokens, return_type="loss").mean().item() for tokens in tqdm(islice(rows, truncate))]
    if not losses:
        raise ValueError("there are no batches to evaluate on: the data loader is empty")
    return sum(losses) / len(losses)


def evaluate(model: Any, truncate: int = 100, batch_size: int = 8, tokenizer: Any = None) -> dict[str, float]:
    """The losses on the four data sets of `DATASET_NAMES`, which are printed too."""
    losses = {}
    for name, loader in zip(DATASET_NAMES, DATASET_LOADERS, strict=True):
        batches = loader(tokenizer=tokenizer or model.tokenizer, batch_size=batch_size)
        losses[f"{name}_loss"] = evaluate_on_dataset(model, batches, truncate)
        print(f"{name}: {losses[f'{name}_loss']}")
    return losses


@torch.inference_mode()
def induction_loss(
    model: Any,
    tokenizer: Any = None,
    batch_size: int = 4,
    subseq_len: int = 384,
    prepend_bos: bool | None = None,
    device: torch.device | str | None = None,
) -> Float[Tensor, ""]:
    """The loss on the second half of rows of random tokens that are repeated once: low where induction heads are."""
    cfg = model.cfg
    if cfg.n_ctx is not None and cfg.n_ctx > 0 and 2 * subseq_len > cfg.n_ctx:
        raise ValueError(f"subseq_len is {subseq_len}; twice that is more than the model's context of {cfg.n_ctx}")
    low, high = 100, min(20000, cfg.d_vocab)  # neither special tokens nor the rarest
    if high <= low:
        raise ValueError(f"tokens are drawn from number {low} on, and the model has {cfg.d_vocab}")
    half = torch.randint(low, high, (batch_size, subseq_len)).to(cfg.device if device is None else device)
    tokens = half.repeat(1, 2)
    if cfg.default_prepend_bos if prepend_bos is None else prepend_bos:
        tokens[:, 0] = (model.tokenizer if tokenizer is None else tokenizer).bos_token_id
    losses = lm_loss(model(tokens, return_type="logits"), tokens, per_token=True)
    return losses[:, subseq_len + 1 :].mean()


class IOIDataset(Dataset[dict[str, Tensor]]):
    """Prompts for indirect object identification (Wang et al. 2022, "Interpretability in the Wild").

    Templates have places for ``[A]``, the indirect object, which ends them, ``[B]``, the subject, and kinds of nouns.
    With `symmetric` each comes with a second prompt, in which the names are exchanged. The choices are made apart from
    everybody else's.

    Raises:
        ValueError: fewer than two names.

    Example:
        >>> from bridge.embedded import MODEL_DIR
        >>> from bridge.legacy import HookedTransformer
        >>> from bridge.legacy.utilities import IOIDataset, ioi_eval
        >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
        >>> data = IOIDataset(model.tokenizer, ["When [B] and [A] went to the store, [B] gave a drink to [A]"],
        ...     nouns={}, num_samples=10)
        >>> ioi_eval(model, data)["Accuracy"]
        1.0
    """

    def __init__(
        self,
        tokenizer: Any,
        templates: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        nouns: Mapping[str, Sequence[str]] | None = None,
        num_samples: int = 1000,
        symmetric: bool = False,
        prepend_bos: bool = True,
        seed: int | None = 42,
    ) -> None:
        self.tokenizer, self.prepend_bos = tokenizer, prepend_bos
        self.templates = list(_TEMPLATES if templates is None else templates)
        self.names = list(_PEOPLE if names is None else names)
        self.nouns = {kind: list(words) for kind, words in (_NOUNS if nouns is None else nouns).items()}
        if len(self.names) < 2:
            raise ValueError(f"two names are needed, for [A] and for [B]; there are {len(self.names)}")
        self._random = random.Random(seed)
        drawn = [self.get_sample(symmetric) for _ in range(num_samples // 2 if symmetric else num_samples)]
        self.samples = [sample for samples in drawn for sample in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        sample = self.samples[idx]
        ids = {key: self.tokenizer.encode(text, add_special_tokens=False) for key, text in sample.items()}
        ids["prompt"] = [self.tokenizer.bos_token_id] * self.prepend_bos + ids.pop("text")
        return {key: torch.tensor(row, dtype=torch.long) for key, row in ids.items()}

    def get_sample(self, symmetric: bool = False) -> list[dict[str, str]]:
        """The next prompt, with the names in it: ``{"text", "IO", "S"}``; with the second one if `symmetric`."""
        template = self._random.choice(self.templates)
        for kind, choices in self.nouns.items():
            template = template.replace(f"[{kind}]", self._random.choice(choices))
        first, second = self._random.sample(self.names, 2)
        pairs = [(first, second), (second, first)] if symmetric else [(first, second)]
        return [{"text": template.replace("[A]", a).replace("[B]", b), "IO": f" {a}", "S": f" {b}"} for a, b in pairs]


@torch.inference_mode()
def ioi_eval(
    model: Any,
    dataset: Dataset[dict[str, Tensor]] | Sequence[dict[str, Tensor]] | None = None,
    batch_size: int = 8,
    num_samples: int = 1000,
    tokenizer: Any = None,
    symmetric: bool = False,
) -> dict[str, float]:
    """How clearly a model prefers the indirect object to the subject.

    The names are compared at the first token in which they differ.

    Raises:
        ValueError: there are no prompts, one does not end with its name, or two names are the same.
    """
    if dataset is None:
        dataset = IOIDataset(tokenizer or model.tokenizer, num_samples=num_samples, symmetric=symmetric)
    batches: DataLoader[Any] = DataLoader(cast(Any, dataset), batch_size=batch_size, collate_fn=list)
    differences: list[float] = []
    for batch in tqdm(batches):
        prompts = [row["prompt"] for row in batch]
        logits = model(torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True), return_type="logits")
        for i, row in enumerate(batch):
            prompt, right, wrong = (row[name].tolist() for name in ("prompt", "IO", "S"))
            start = len(prompt) - len(right)
            if prompt[start:] != right:
                raise ValueError(f"a prompt ends with {prompt[start:]}; it must end with its IO, {right}")
            at = next((at for at, (a, b) in enumerate(zip(right, wrong, strict=False)) if a != b), None)
            if at is None:
                raise ValueError(f"the names {right} and {wrong} do not differ at any token")
            before = logits[i, start + at - 1]
            differences.append(float(before[right[at]] - before[wrong[at]]))
    if not differences:
        raise ValueError("there are no prompts to evaluate on: the data set is empty")
    made = torch.tensor(differences, dtype=torch.float64)
    return {"Logit Difference": made.mean().item(), "Accuracy": (made > 0).double().mean().item()}


mmlu_eval = not_done("mmlu_eval")
make_mmlu_data_loader = not_done("make_mmlu_data_loader")


# ----------------------------------------------------------------------------------------------------------------------
# Random weights by HookedTransformer's conventions: vectors on the right, heads on an axis of their own.
# ----------------------------------------------------------------------------------------------------------------------


def calc_fan_in_and_fan_out(tensor: Tensor) -> tuple[int, int]:
    """How many inputs and outputs a weight has, by its shape."""
    shape = tuple(tensor.shape)
    if len(shape) == 1:
        return 1, shape[0]
    if len(shape) == 2:
        return shape
    if len(shape) == 3:
        return shape[1], shape[0] * shape[2]
    raise ValueError(f"a weight has one, two or three axes; this one's shape is {list(shape)}")


def init_xavier_uniform_(param: Tensor, gain: float = 1.0) -> Tensor:
    """Fills a weight with uniform values of variance ``2 / (inputs + outputs)``, and returns it."""
    bound = gain * math.sqrt(6 / sum(calc_fan_in_and_fan_out(param)))
    return nn.init.uniform_(param, -bound, bound)


def init_xavier_normal_(param: Tensor, gain: float = 1.0) -> Tensor:
    """Fills a weight with normal values of variance ``2 / (inputs + outputs)``, and returns it."""
    return nn.init.normal_(param, std=gain * math.sqrt(2 / sum(calc_fan_in_and_fan_out(param))))


def init_kaiming_uniform_(
    param: Tensor, a: float = 0, nonlinearity: Any = "relu", gain: float = 1.0, mode: str = "fan_in"
) -> Tensor:
    """Fills a weight with uniform values of variance ``gain(nonlinearity)**2 / inputs``, and returns it."""
    bound = math.sqrt(3) * _kaiming_std(param, a, nonlinearity, gain, mode)
    return nn.init.uniform_(param, -bound, bound)


def init_kaiming_normal_(
    param: Tensor, a: float = 0, nonlinearity: Any = "relu", gain: float = 1.0, mode: str = "fan_in"
) -> Tensor:
    """Fills a weight with normal values of variance ``gain(nonlinearity)**2 / inputs``, and returns it."""
    return nn.init.normal_(param, std=_kaiming_std(param, a, nonlinearity, gain, mode))


def _kaiming_std(param: Tensor, a: float, nonlinearity: Any, gain: float, mode: str) -> float:
    check_choice("mode", mode, ("fan_in", "fan_out"))
    fan = calc_fan_in_and_fan_out(param)[mode == "fan_out"]
    return gain * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)


_FILLS: dict[str, Callable[..., Tensor]] = {
    "xavier_uniform": init_xavier_uniform_, "xavier_normal": init_xavier_normal_,
    "kaiming_uniform": init_kaiming_uniform_, "kaiming_normal": init_kaiming_normal_,
}  # fmt: skip


def draw(cfg: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Random matrices and their names, one after another: what HookedTransformer draws from the same random state.

    Args:
        cfg: says how: its `init_mode` and `initializer_range`.
        weights: all weights of a model, by HookedTransformer's names and in its order; those that are no matrices are
            left out.
    """

    for name, weight in weights:
        if "W_" not in name:
            continue
        new = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
        if cfg.init_mode in _FILLS:
            _FILLS[cfg.init_mode](new, gain=cfg.initializer_range)
        elif cfg.init_mode == "muP":
            nn.init.normal_(new, std=1.0 if "embed" in name else calc_fan_in_and_fan_out(new)[0] ** -0.5)
        else:
            nn.init.normal_(new, std=cfg.initializer_range)
        yield name, new


# ----------------------------------------------------------------------------------------------------------------------
# Which device a model goes to when nobody says, and which GPU has room.
# ----------------------------------------------------------------------------------------------------------------------


#: Pairs of a GPU's number and its free bytes.
AvailableDeviceMemory = list[tuple[int, int]]


def get_device() -> torch.device:
    """The first accelerator, or the CPU. Apple's is only chosen where TRANSFORMERLENS_ALLOW_MPS=1 is set."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available() and _mps_is_wanted():
        return torch.device("mps")
    return torch.device("cpu")


def warn_if_mps(device: torch.device | str) -> None:
    """Warns, once, that Apple's GPU may compute wrong values, unless TRANSFORMERLENS_ALLOW_MPS=1 is set."""
    if torch.device(device).type == "mps" and not _mps_is_wanted():
        _warn()


def _mps_is_wanted() -> bool:
    return os.environ.get("TRANSFORMERLENS_ALLOW_MPS") == "1"


@functools.cache
def _warn() -> None:
    warnings.warn(
        "the MPS backend may produce silently incorrect results (Apple's GPU): compare with the CPU. "
        "TRANSFORMERLENS_ALLOW_MPS=1 turns this warning off",
        stacklevel=3,
    )


def calculate_available_device_cuda_memory(i: int) -> int:
    """How many bytes of a GPU this process could still take: all but what it has taken."""
    return torch.cuda.get_device_properties(i).total_memory - torch.cuda.memory_allocated(i)


def determine_available_memory_for_available_devices(max_devices: int) -> AvailableDeviceMemory:
    """The first GPUs, each with its free bytes."""
    return [(i, calculate_available_device_cuda_memory(i)) for i in range(max_devices)]


def sort_devices_based_on_available_memory(devices: AvailableDeviceMemory) -> AvailableDeviceMemory:
    """The same GPUs, the emptiest first."""
    return sorted(devices, key=lambda device: device[1], reverse=True)


def get_best_available_cuda_device(max_devices: int | None = None) -> torch.device:
    """The GPU with the most free memory."""
    found = determine_available_memory_for_available_devices(
        torch.cuda.device_count() if max_devices is None else max_devices
    )
    if not found:
        raise OSError("there is no CUDA device")
    return torch.device("cuda", sort_devices_based_on_available_memory(found)[0][0])


def get_best_available_device(cfg: Any) -> torch.device:
    """The device of a configuration; the emptiest GPU where it is for several."""
    device = torch.device(cfg.device)
    if device.type == "cuda" and (cfg.n_devices or 1) > 1:
        return get_best_available_cuda_device(cfg.n_devices)
    return device


def get_device_for_block_index(index: int, cfg: Any, device: torch.device | str | None = None) -> torch.device:
    """The device of a block when all devices get the same number of blocks, one after another.

    The map of a model that Hugging Face spread is its own: ``model.blocks[index].attn.W_Q.device`` reads it.
    """
    first = torch.device(cfg.device if device is None else device)
    if first.type == "cpu":
        return first
    each = max(1, cfg.n_layers // (cfg.n_devices or 1))
    return torch.device(first.type, (first.index or 0) + index // each)


def move_to_and_update_config(
    model: Any, device_or_dtype: torch.device | str | torch.dtype, print_details: bool = True
) -> Any:
    """Moves a model, or changes the type of its weights: ``model.to``, after which its `cfg` says so by itself."""
    return model.to(device_or_dtype)


# ----------------------------------------------------------------------------------------------------------------------
# A small training loop for language models, as HookedTransformer's `train` has it.
# ----------------------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------
# Activation functions by HookedTransformer's names.
# ----------------------------------------------------------------------------------------------------------------------


#: What an activation function is.
ActivationFunction = Callable[..., Tensor]


#: GPT-2's approximation of GELU; the same with a rounded constant (GPT-J); and as torch computes it.
gelu_new, gelu_fast, gelu_pytorch_tanh = (ACT2FN[name] for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"))
#: ``x * softmax(x)``.
solu = SoLU()


class XIELU(XIELUActivation):
    """xIELU with parameters that are learnt, as Hugging Face computes it, in float32."""

    def __init__(
        self, alpha_p_init: float = 0.8, alpha_n_init: float = 0.8, beta_init: float = 0.5, eps: float = -1e-6
    ) -> None:
        super().__init__(alpha_p_init, alpha_n_init, beta_init, eps, torch.float32)


def xielu(input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """xIELU with the parameters that it starts training with (Huang and Schlag 2024, "Deriving Activation Functions
    Using Integration"): a parabola above zero, an integrated exponential below. Apertus has learnt parameters."""
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
