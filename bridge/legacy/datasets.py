"""Small data sets, and texts into rows of tokens for training. Loading is the package `datasets`' work."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import numpy as np

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

    Each text is tokenized as a whole (HookedTransformer cuts the joined text into 20 pieces first, which splits words).
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
