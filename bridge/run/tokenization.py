"""Text to tokens and back, without ever changing the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor


class TokenError(ValueError, AssertionError):
    """What was asked of text and tokens cannot be done. HookedTransformer gives an `AssertionError` there."""


@dataclass(frozen=True)
class Batch:
    """Token rows of one length.

    Attributes:
        tokens: ``[batch, pos]``.
        mask: ``[batch, pos]``, 1 for tokens and 0 for padding; None when nothing is padded.
    """

    tokens: Int[Tensor, "batch pos"]
    mask: Int[Tensor, "batch pos"] | None


class TokenizerFacts:
    """What a tokenizer does by itself, found out once by asking it.

    Args:
        tokenizer: a Hugging Face tokenizer; it is only read.

    Attributes:
        bos: the id that starts a text (BERT's CLS where there is no BOS), or None.
        adds_bos: the tokenizer puts it there by itself.
        ending: the ids that it appends by itself (EOS, SEP).
        pad: the id to pad with: its own, else EOS, else 0 (padding is always masked).
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        self.bos: int | None = bos if bos is not None else getattr(tokenizer, "cls_token_id", None)
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        dressed = tokenizer("a", add_special_tokens=True)["input_ids"]
        start = next(i for i in range(len(dressed) - len(plain) + 1) if dressed[i : i + len(plain)] == plain)
        self.adds_bos = self.bos is not None and self.bos in dressed[:start]
        self.ending: list[int] = dressed[start + len(plain) :]
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad: int = next(pad for pad in pads if pad is not None)

    def encode(self, text: str, prepend_bos: bool, keep_ending: bool) -> list[int]:
        """The ids of one text.

        Args:
            text: the text.
            prepend_bos: whether it starts with BOS (never twice).
            keep_ending: whether what the tokenizer appends by itself stays.

        Raises:
            ValueError: BOS was asked for and the tokenizer has none.
        """
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if prepend_bos:
            if self.bos is None:
                raise ValueError(
                    f"prepend_bos=True, but {type(self.tokenizer).__name__} has no BOS token (nor CLS); "
                    "use prepend_bos=False"
                )
            if not ids or ids[0] != self.bos:
                ids = [self.bos, *ids]
        return ids + self.ending if keep_ending else ids

    def pad_rows(self, rows: Sequence[Sequence[int]], side: str) -> Batch:
        """Token rows, padded to one length on one side."""
        longest = max(len(row) for row in rows)
        padded, masks = [], []
        for row in rows:
            gap = longest - len(row)
            fill, ones, zeros = [self.pad] * gap, [1] * len(row), [0] * gap
            padded.append([*fill, *row] if side == "left" else [*row, *fill])
            masks.append([*zeros, *ones] if side == "left" else [*ones, *zeros])
        uneven = any(len(row) != longest for row in rows)
        tokens = torch.tensor(padded, dtype=torch.long).reshape(len(rows), longest)
        return Batch(tokens, torch.tensor(masks, dtype=torch.long) if uneven else None)


class TokenMethods:
    """The methods of a bridge that turn text into tokens and back."""

    tokenizer: Any
    cfg: Any
    _facts: TokenizerFacts | None = None

    @property
    def tokenizer_facts(self) -> TokenizerFacts:
        """What the tokenizer does by itself.

        Raises:
            ValueError: the bridge has no tokenizer.
        """
        if self.tokenizer is None:
            raise TokenError(
                "this bridge has no tokenizer, so it takes tokens only; TransformerBridge(model, tokenizer) gives one"
            )
        if self._facts is None or self._facts.tokenizer is not self.tokenizer:
            self._facts = TokenizerFacts(self.tokenizer)
            self.cfg.tokenizer_prepends_bos = self._facts.adds_bos
        return self._facts

    def batch_of(
        self,
        texts: Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        longest: int | None = None,
    ) -> Batch:
        """Texts as token rows of one length, with the mask that says which tokens are padding.

        Args:
            texts: one or more.
            prepend_bos: start each with BOS; None: ``cfg.default_prepend_bos``, where the tokenizer has a BOS.
            padding_side: where shorter rows are padded; None: the tokenizer's own side.
            longest: how many tokens a row may have; longer ones lose what is beyond (but for EOS or SEP at their end).

        Raises:
            ValueError: no tokenizer, no texts, BOS asked for where there is none, or an unknown side.
        """
        facts = self.tokenizer_facts
        if not texts:
            raise ValueError("there are no texts: the list is empty")
        if prepend_bos is None:
            prepend_bos = self.cfg.default_prepend_bos and facts.bos is not None
        side = padding_side or facts.tokenizer.padding_side
        if side not in ("left", "right"):
            raise ValueError(f'padding_side is {side!r}; it must be "left" or "right"')
        keep_ending = self.cfg.attention_dir == "bidirectional"
        rows = [facts.encode(text, prepend_bos, keep_ending) for text in texts]
        if longest is not None:
            ending = facts.ending if keep_ending else []
            cut = longest - len(ending)
            rows = [row if len(row) <= longest else row[:cut] + ending for row in rows]
        if not all(rows):
            raise ValueError("an empty text gives no tokens at all without BOS; use prepend_bos=True, or leave it out")
        return facts.pad_rows(rows, side)

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Int[Tensor, "batch pos"]:
        """Text as tokens.

        Args:
            input: a text or several.
            prepend_bos: start each with BOS; None: ``cfg.default_prepend_bos``, where the tokenizer has a BOS.
            padding_side: where shorter rows are padded; None: the tokenizer's own side.
            move_to_device: put the tokens where the model is.
            truncate: cut rows that are longer than the model's context.

        Returns:
            ``[batch, pos]``, also for a single text.

        Raises:
            ValueError: as `batch_of`.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.to_tokens("Mary and John").shape
            torch.Size([1, 4])
        """
        if isinstance(input, Tensor):
            raise TypeError("to_tokens takes text; these are tokens already")
        longest = self.cfg.n_ctx if truncate else None
        tokens = self.batch_of([input] if isinstance(input, str) else input, prepend_bos, padding_side, longest).tokens
        return tokens.to(self.cfg.device) if move_to_device else tokens

    def to_string(self, tokens: Int[Tensor, "..."] | Sequence[int] | int) -> str | list[str]:
        """Tokens as text: one string for one row, a list for a batch.

        Args:
            tokens: ids, ``[]``, ``[pos]`` or ``[batch, pos]``.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.to_string(bridge.to_tokens("Mary and John", prepend_bos=False)[0])
            'Mary and John'
        """
        tokenizer = self.tokenizer_facts.tokenizer
        ids = torch.as_tensor(tokens)
        if ids.ndim == 2:
            return [tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in ids.tolist()]
        return str(tokenizer.decode(ids.reshape(-1).tolist(), clean_up_tokenization_spaces=False))

    def to_str_tokens(
        self,
        input: Any,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> list[str] | list[list[str]]:
        """A text or a row of tokens as the text of each token; a list of lists for several.

        Args:
            input: a text, several, or tokens ``[pos]``, ``[1, pos]`` or ``[batch, pos]``.
            prepend_bos, padding_side: as for `to_tokens`.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.to_str_tokens("Mary and John")
            ['<bos>', 'Mary', ' and', ' John']
        """
        if not isinstance(input, str | Tensor) and len(input) and not isinstance(input[0], str):
            input = torch.as_tensor(input)
        if isinstance(input, Tensor):
            rows = input.reshape(1, -1) if input.ndim < 2 else input
            split = [[str(self.to_string(token)) for token in row] for row in rows.tolist()]
            return split[0] if len(split) == 1 else split
        if isinstance(input, str):
            return self.to_str_tokens(self.batch_of([input], prepend_bos, padding_side).tokens[0])
        return [self.to_str_tokens(text, prepend_bos, padding_side) for text in input]  # type: ignore[return-value]

    def to_single_token(self, string: str) -> int:
        """The id of a text that is one token.

        Raises:
            ValueError: it is none, or more than one.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.to_single_str_token(bridge.to_single_token(" Mary"))
            ' Mary'
        """
        ids = self.tokenizer_facts.encode(string, prepend_bos=False, keep_ending=False)
        if len(ids) != 1:
            pieces = [str(self.to_string(token)) for token in ids]
            raise TokenError(f"{string!r} is {len(ids)} tokens, not one: {pieces}")
        return ids[0]

    def to_single_str_token(self, token: int) -> str:
        """The text of one token.

        Args:
            token: its id.
        """
        return str(self.to_string(int(token)))

    def get_token_position(
        self,
        single_token: str | int,
        input: str | Int[Tensor, "..."],
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Where a token stands in a text.

        Args:
            single_token: the token, as text or id.
            input: a text, or tokens ``[pos]`` or ``[1, pos]``.
            mode: ``"first"`` or ``"last"`` of several places.
            prepend_bos, padding_side: as for `to_tokens`, for a text.

        Raises:
            ValueError: it does not stand there; there is more than one row; or an unknown mode.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.get_token_position(" John", "When Mary and John went to the store, John gave", mode="last")
            10
        """
        if isinstance(input, str):
            input = self.batch_of([input], prepend_bos, padding_side, self.cfg.n_ctx).tokens
        tokens = torch.as_tensor(input)
        if tokens.ndim == 2:
            if len(tokens) != 1:
                raise ValueError(f"a position is of one row of tokens, not of {len(tokens)}")
            tokens = tokens[0]
        token = self.to_single_token(single_token) if isinstance(single_token, str) else single_token
        if mode not in ("first", "last"):
            raise ValueError(f'mode is {mode!r}; it must be "first" or "last"')
        places = (tokens == token).nonzero()[:, 0].tolist()
        if not places:
            # HookedTransformer's words, which programs compare.
            error = TokenError("The token does not occur in the prompt")
            error.add_note(f"{single_token!r} does not stand in {input!r}")
            raise error
        return int(places[0] if mode == "first" else places[-1])
