"""The figures of the shipped model, measured with Hugging Face's own classes and nothing of the
bridge.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bridge.embedded.language import random_list
from bridge.embedded.prompts import Prompt, prompts


def load(folder: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer from a folder, with attention whose patterns can be read.

    Args:
        folder: where the model was saved.

    Raises:
        OSError: there is no model in the folder.

    Example:
        >>> from bridge.embedded import MODEL_DIR
        >>> from tools.embedded.measure import load
        >>> model, tokenizer = load(MODEL_DIR)
    """
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Prompt],
    bos: bool = True,
) -> float:
    """Return the share of prompts whose most likely next token, of the whole vocabulary, is the
    answer.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        items: the prompts.
        bos: whether the texts get the beginning token in front, as in training.

    Raises:
        ValueError: there are no prompts.

    Example:
        >>> from bridge.embedded import MODEL_DIR, prompts
        >>> from tools.embedded.measure import accuracy, load
        >>> accuracy(*load(MODEL_DIR), prompts("fact", 20)) > 0.9
        True
    """
    if not items:
        raise ValueError("there are no prompts; give one or more")
    groups: dict[int, list[tuple[list[int], int]]] = {}
    for item in items:
        ids = [tokenizer.bos_token_id] * bos + tokenizer.encode(item.text)
        answer = tokenizer.convert_tokens_to_ids(item.answer)
        assert isinstance(answer, int)  # of one token
        groups.setdefault(len(ids), []).append((ids, answer))
    right = 0
    # Grouped by length, so that nothing is padded.
    for rows in groups.values():
        logits = model(input_ids=torch.tensor([ids for ids, _ in rows])).logits[:, -1]
        right += int((logits.argmax(-1) == torch.tensor([answer for _, answer in rows])).sum())
    return right / len(items)


def repeated_lists(
    tokenizer: PreTrainedTokenizerBase, n: int, length: int, seed: int = 0
) -> torch.Tensor:
    """Return token ids of `n` held-out random lists, each said twice, after the beginning token.

    Args:
        tokenizer: the shipped tokenizer.
        n: how many rows.
        length: how many words a list has.
        seed: which lists.

    Example:
        >>> from bridge.embedded import MODEL_DIR
        >>> from tools.embedded.measure import load, repeated_lists
        >>> repeated_lists(load(MODEL_DIR)[1], 2, 10).shape
        torch.Size([2, 21])
    """
    rng = random.Random(seed)
    lists = [random_list(rng, length, held=True) for _ in range(n)]
    rows = [[f" {word}" for word in drawn] * 2 for drawn in lists]
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(row) for row in rows])
    return torch.nn.functional.pad(ids, (1, 0), value=tokenizer.bos_token_id)


@torch.no_grad()
def repeat_accuracy(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Return the share of words of the second half that are foretold, its first word left out.

    The first word of the second half is left out because nothing before it says that the list is
    over.

    Args:
        model: the model.
        ids: rows of `repeated_lists`.

    Example:
        >>> from bridge.embedded import MODEL_DIR
        >>> from tools.embedded.measure import load, repeat_accuracy, repeated_lists
        >>> model, tokenizer = load(MODEL_DIR)
        >>> repeat_accuracy(model, repeated_lists(tokenizer, 10, 10)) > 0.9
        True
    """
    length = (ids.shape[1] - 1) // 2
    foretold = model(input_ids=ids).logits[:, length + 1 : -1].argmax(-1)
    return float((foretold == ids[:, length + 2 :]).float().mean())


@torch.no_grad()
def head_scores(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the induction score and the previous-token score of every head, each as (layer, head).

    The induction score is the mean attention from a token of the second half to the token after its
    previous occurrence; the previous-token score is the mean attention from a token to the one
    before it, over all tokens but the beginning token.

    Args:
        model: the model, loaded with eager attention.
        ids: rows of `repeated_lists`.

    Example:
        >>> from bridge.embedded import MODEL_DIR
        >>> from tools.embedded.measure import head_scores, load, repeated_lists
        >>> model, tokenizer = load(MODEL_DIR)
        >>> induction, previous = head_scores(model, repeated_lists(tokenizer, 10, 20))
        >>> induction.shape
        torch.Size([4, 4])
    """
    length = (ids.shape[1] - 1) // 2
    patterns = torch.stack(model(input_ids=ids, output_attentions=True).attentions)
    # patterns is (layer, row, head, query, key); a token's previous occurrence is `length` before
    # it.
    induction = patterns.diagonal(1 - length, dim1=-2, dim2=-1)[..., 2:]
    previous = patterns.diagonal(-1, dim1=-2, dim2=-1)
    return induction.mean((1, -1)), previous.mean((1, -1))


def figures(folder: str | Path, n: int = 1000, seed: int = 12345) -> dict[str, object]:
    """Measure the model in a folder on prompts and lists that were not in training.

    Args:
        folder: where the model was saved.
        n: how many prompts of each kind.
        seed: which prompts.

    Raises:
        OSError: there is no model in the folder.

    Example:
        >>> from bridge.embedded import MODEL_DIR
        >>> from tools.embedded.measure import figures
        >>> figures(MODEL_DIR, n=20)["ioi"] > 0.9
        True
    """
    model, tokenizer = load(folder)
    result: dict[str, object] = {
        kind: accuracy(model, tokenizer, prompts(kind, n, seed))
        for kind in ("ioi", "fact", "repeats")
    }
    for length in (10, 20, 50):
        result[f"second_half_{length}"] = repeat_accuracy(
            model, repeated_lists(tokenizer, n // 5 + 1, length, seed)
        )
    induction, previous = head_scores(model, repeated_lists(tokenizer, 50, 25, seed))
    for name, scores in (("induction", induction), ("previous_token", previous)):
        best = int(scores.argmax())
        layer, head = divmod(best, scores.shape[1])
        result[f"{name}_head"] = {
            "layer": layer,
            "head": head,
            "score": round(float(scores.max()), 4),
            "over_half": int((scores > 0.5).sum()),
        }
    return result
