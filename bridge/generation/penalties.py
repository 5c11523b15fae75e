"""Logits processors that look at the tokens so far: each row's own tokens, without its padding.

Most of transformers' processors count padding as tokens (not that of ``repetition_penalty``), so
a padded row would be continued differently than when it is run on its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)

from adapters.views import Kwargs
from bridge.rows import BatchRows
from bridge.run.inputs import RunnableBridge

#: From tokens ``[row, pos]`` and logits ``[row, d_vocab]`` to logits.
Processor = Callable[[Tensor, Tensor], Tensor]

#: Arguments of `generate` that look at the tokens so far, with the values that change nothing.
_NEUTRAL = {"no_repeat_ngram_size": 0, "min_length": 0}
#: Arguments of processors that are made with the whole prompt.
_OF_PROMPTS = {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}


class _OfOwnTokens:
    """A logits processor that passes each row to another one, without the row's left padding.

    Args:
        processor: the other one.
        before: how many tokens of padding each row of the prompt has.
    """

    def __init__(self, processor: Processor, before: Sequence[int]) -> None:
        self._processor, self._before = processor, before

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        copies = len(input_ids) // len(self._before)  # beams, returned sequences
        rows = [
            self._processor(input_ids[i : i + 1, self._before[i // copies] :], scores[i : i + 1])
            for i in range(len(input_ids))
        ]
        return torch.cat(rows)


def _penalise_frequency(penalty: float, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Return scores less a penalty for each occurrence of the token, as HookedTransformer does."""
    ones = torch.ones_like(input_ids, dtype=scores.dtype)
    counts = torch.zeros_like(scores).scatter_add_(1, input_ids, ones)
    return scores - penalty * counts


def add_penalties(
    bridge: RunnableBridge, arguments: Kwargs, freq_penalty: float, rows: BatchRows
) -> None:
    """Add the processors that look at the tokens so far to the arguments of `generate`.

    Args:
        bridge: the bridge.
        arguments: of the model's `generate`; they are changed.
        freq_penalty: see `TransformerBridge.generate`.
        rows: the layout of the prompt's rows.

    Raises:
        ValueError: rows are padded, and a processor would count the padding of the whole prompt.
    """
    processors: list[Processor] = []
    is_padded = any(rows.before)
    if is_padded or not all(bool(mask.all()) for mask in rows.masks.values()):
        _refuse_of_prompts(bridge, arguments)
    if is_padded:
        processors += _looking_back(bridge, arguments)
    if freq_penalty:
        processors.append(functools.partial(_penalise_frequency, freq_penalty))
    if not processors:
        return
    if is_padded:
        processors = [_OfOwnTokens(processor, rows.before) for processor in processors]
    theirs = arguments.pop("logits_processor", None) or []
    arguments["logits_processor"] = LogitsProcessorList([*theirs, *processors])


def _value(bridge: RunnableBridge, arguments: Kwargs, name: str, neutral: float) -> float:
    """Return the value of a field of the generation's configuration."""
    value = arguments.get(name, getattr(bridge.core.generation_config, name, None))
    return neutral if value is None else value


def _refuse_of_prompts(bridge: RunnableBridge, arguments: Kwargs) -> None:
    """Refuse processors that are made with the prompts, padding included.

    N-grams with padding forbid only the padding token, which matters if that token ends a row.

    Raises:
        ValueError: one is asked for.
    """
    for name, neutral in _OF_PROMPTS.items():
        if name == "encoder_no_repeat_ngram_size" and not _padding_ends_rows(bridge, arguments):
            continue
        if _value(bridge, arguments, name, neutral) != neutral:
            raise ValueError(
                f"{name} would count the padding of shorter prompts as tokens: generate rows of"
                " different lengths one by one"
            )


def _padding_ends_rows(bridge: RunnableBridge, arguments: Kwargs) -> bool:
    """Tell whether the padding token also ends a row."""
    config = bridge.core.generation_config
    endings = arguments.get("eos_token_id", config.eos_token_id)
    padding = arguments.get("pad_token_id", config.pad_token_id)
    listed = endings if isinstance(endings, list | tuple) else [endings]
    return padding is None or padding in [int(token) for token in listed if token is not None]


def _looking_back(bridge: RunnableBridge, arguments: Kwargs) -> list[Processor]:
    """Return the processors that `generate` would make, and have it make none."""
    values = {name: _value(bridge, arguments, name, x) for name, x in _NEUTRAL.items()}
    arguments.update({name: x for name, x in _NEUTRAL.items() if values[name] != x})
    processors: list[Processor] = []
    if values["no_repeat_ngram_size"]:
        processors.append(NoRepeatNGramLogitsProcessor(int(values["no_repeat_ngram_size"])))
    ending = arguments.get("eos_token_id", bridge.core.generation_config.eos_token_id)
    if values["min_length"] and ending is not None:
        device = bridge.cfg.device
        processors.append(MinLengthLogitsProcessor(int(values["min_length"]), ending, str(device)))
    return processors
