"""Texts as token ids, with the checks that tasks need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from bridge.bridge import TransformerBridge
from bridge.run.model_inputs import input_device
from bridge.run.tokenization import TokenizerFacts

#: What gives a tokenizer.
Source = TransformerBridge | PreTrainedTokenizerBase


class Encoder:
    """A tokenizer, asked for whole prompts and for single words.

    Args:
        source: a bridge, whose way to begin a text is taken, or a tokenizer.
        prepend_bos: whether prompts begin with BOS; None: as the bridge does, or where the tokenizer has one.

    Raises:
        ValueError: the bridge has no tokenizer, or the tokenizer no BOS that was asked for.
    """

    def __init__(self, source: Source, prepend_bos: bool | None = None) -> None:
        self.device = torch.device("cpu")
        if isinstance(source, TransformerBridge):
            if source.tokenizer is None:
                raise ValueError("the bridge has no tokenizer, and a task is made of texts: give it one")
            if prepend_bos is None:
                prepend_bos = source.cfg.default_prepend_bos
            self.device = input_device(source.original_model)
            source = source.tokenizer
        self.tokenizer = source
        self.facts = TokenizerFacts(source)
        self.bos = self.facts.bos is not None if prepend_bos is None else prepend_bos and self.facts.bos is not None
        self._words: dict[str, int | None] = {}

    def prompt(self, text: str) -> list[int]:
        """The ids of a prompt."""
        return self.facts.encode(text, self.bos, keep_ending=False)

    def word(self, text: str) -> int | None:
        """The id of a text that is one known token, else None."""
        if text not in self._words:
            ids = self.facts.encode(text, False, keep_ending=False)
            unknown = getattr(self.tokenizer, "unk_token_id", None)
            single = len(ids) == 1 and ids[0] != unknown and self.text(ids[0]).strip() == text.strip()
            self._words[text] = ids[0] if single else None
        return self._words[text]

    def words(self, what: str, candidates: Sequence[str], least: int) -> list[str]:
        """Those of some words that are one known token, with a space in front of them.

        Raises:
            ValueError: there are fewer than `least`.
        """
        known = [word for word in candidates if self.word(f" {word}") is not None]
        if len(known) < least:
            raise ValueError(f"only {len(known)} of the {what} are one token for this tokenizer; {least} are needed")
        return known

    def text(self, token: int) -> str:
        """The text of one token."""
        return str(self.tokenizer.decode([token]))

    def next_id(self, prompt: str, ids: list[int], following: str) -> int | None:
        """The one token that a text adds to a prompt, None where it is more than one or changes the prompt's own."""
        longer = self.prompt(prompt + following)
        known = longer[-1] != getattr(self.tokenizer, "unk_token_id", None)
        return longer[-1] if longer[:-1] == ids and known else None
