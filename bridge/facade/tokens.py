"""Text to tokens and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

from adapters.inputs.arguments import takes
from bridge.facade.base import WrappedModel
from bridge.hooks.arguments import refuse_wrong_types
from bridge.run import tokenization
from bridge.run.tokenization import Batch, TextOptions, TokenError, TokenizerFacts, Tokens


class TokenMethods(WrappedModel):
    """The methods of a bridge that turn text into tokens and back; the tokenizer is never changed."""

    _facts: TokenizerFacts | None = None

    @property
    def tokenizer_facts(self) -> TokenizerFacts:
        """What the tokenizer does by itself.

        Raises:
            ValueError: the bridge has no tokenizer.
        """
        taken = takes(self.core)
        if self.tokenizer is None and taken.tokens is None:
            raise TokenError(
                f"{type(self.core).__name__} reads {taken.main}, not text: it has no tokens. Give the bridge that "
                f"tensor, as in bridge.run_with_cache({taken.main}=...)"
            )
        if self.tokenizer is None:
            raise TokenError(
                "this bridge has no tokenizer, so it takes tokens only; TransformerBridge(model, tokenizer) gives one"
            )
        if self._facts is None or self._facts.tokenizer is not self.tokenizer:
            self._facts = TokenizerFacts(self.tokenizer)
            self.cfg.tokenizer_prepends_bos = self._facts.adds_bos
            self.cfg.tokenizer_appends_eos = self.tokenizer.eos_token_id in self._facts.ending
        return self._facts

    def batch_of(
        self,
        texts: Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        longest: int | None = None,
    ) -> Batch:
        """Texts as token rows of one length, with the mask that says which tokens are padding.

        Words that the tokenizer does not know are named in an `UnknownWordWarning`, here and wherever a text is given.

        Args:
            texts: one or more.
            prepend_bos: start each with BOS; None: ``cfg.default_prepend_bos``, where the tokenizer has a BOS.
            padding_side: where shorter rows are padded; None: the tokenizer's own side.
            longest: how many tokens a row may have; longer ones lose what is beyond (but for EOS or SEP at their end).

        Raises:
            ValueError: no tokenizer, no texts, BOS asked for where there is none, or an unknown side.
        """
        return tokenization.batch_of(self, texts, TextOptions(prepend_bos, padding_side, longest))

    def to_tokens(
        self,
        input: str | Sequence[str] | Sequence[Mapping[str, Any]],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Int[Tensor, "batch pos"]:
        """Text as tokens.

        Args:
            input: a text or several; or a chat (messages with ``role`` and ``content``), by the tokenizer's template
                for chats, with what comes before the answer.
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
        return tokenization.to_tokens(self, input, TextOptions(prepend_bos, padding_side), move_to_device, truncate)

    def to_string(
        self, tokens: Int[Tensor, "..."] | Sequence[int] | Sequence[Int[Tensor, "..."]] | int
    ) -> str | list[str]:
        """Tokens as text: one string for one row, a list for a batch.

        Args:
            tokens: ids, ``[]``, ``[pos]`` or ``[batch, pos]``, or a list of such.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.to_string(bridge.to_tokens("Mary and John", prepend_bos=False)[0])
            'Mary and John'
        """
        return tokenization.to_string(self, tokens)

    @refuse_wrong_types
    def to_str_tokens(
        self,
        input: str | Sequence[str] | Tokens,
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
        return tokenization.to_str_tokens(self, input, TextOptions(prepend_bos, padding_side))

    @refuse_wrong_types
    def to_single_token(self, string: str) -> int:
        """The id of a text that is one token.

        Raises:
            ValueError: it is none, or more than one, or has a word that the tokenizer does not know.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.to_single_str_token(bridge.to_single_token(" Mary"))
            ' Mary'
        """
        return tokenization.to_single_token(self, string)

    @refuse_wrong_types
    def to_single_str_token(self, int_token: int) -> str:
        """The text of one token.

        Args:
            int_token: its id.
        """
        return tokenization.to_single_str_token(self, int_token)

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
        options = TextOptions(prepend_bos, padding_side)
        return tokenization.get_token_position(self, single_token, input, mode, options)
