"""Rough evaluations: losses on texts, the induction loss, and the indirect object identification task."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from bridge.legacy.datasets import load_from_hub, tokenize_and_concatenate
from bridge.legacy.table import named, not_done
from bridge.run.run import lm_loss

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
_NAMES = ("John", "Mary")
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
        >>> from bridge.legacy.evals import IOIDataset, ioi_eval
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
        self.names = list(_NAMES if names is None else names)
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
__getattr__ = named(__name__)
