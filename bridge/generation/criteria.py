"""What is done at each step of a generation: counting, stopping, penalties."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteria

from bridge.hooks.context import Generation


class Steps(StoppingCriteria):
    """Counts the steps of a generation, moves its progress bar, and ends it when it is called off.

    Args:
        bar: the progress bar.
        generation: what counts them.
    """

    def __init__(self, bar: tqdm, generation: Generation) -> None:
        self.bar = bar
        self.generation = generation
        self.cancelled = False

    def __call__(self, input_ids: Tensor, scores: Tensor | tuple[Tensor, ...] | None, **kwargs: object) -> Tensor:
        self.generation.step += 1
        self.bar.update()
        return torch.full((input_ids.shape[0],), self.cancelled, dtype=torch.bool, device=input_ids.device)


class StopStrings(StoppingCriteria):
    """Ends a row when its newest token completes one of some strings, whatever tokens they are spread over.

    transformers' own criterion needs each token's text to be the same everywhere in a word, which word-level tokenizers
    do not give it; here the end of the row is decoded.

    Args:
        strings: the strings.
        tokenizer: decodes.
    """

    def __init__(self, strings: str | Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.strings = [strings] if isinstance(strings, str) else list(strings)
        if not self.strings or not all(self.strings):
            raise ValueError(f"stop_strings is {strings!r}; it must be a string, or several, and none of them empty")
        self.tokenizer = tokenizer
        # A token is at least a byte of text; some margin for those that are none.
        self.window = max(len(string.encode()) for string in self.strings) + 8

    def __call__(self, input_ids: Tensor, scores: Tensor | tuple[Tensor, ...] | None, **kwargs: object) -> Tensor:
        done = []
        for row in input_ids[:, -self.window :].tolist():
            now, before = (self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (row, row[:-1]))
            done.append(any(now.count(string) > before.count(string) for string in self.strings))
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


class FrequencyPenalty(LogitsProcessor):
    """Lowers the logit of each token by `penalty` for every time it stands in the sequence, as HookedTransformer does.

    Args:
        penalty: in logits.
    """

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - self.penalty * counts
