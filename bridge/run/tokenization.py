"""Conversions between text and tokens that never change the tokenizer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapters.config import ModelConfig
from adapters.points import token_embedding
from bridge.arguments import CannotBeDoneError, listed
from bridge.modules import TokenEmbedding
from bridge.run.spans import Chat, chat_ids, is_chat, pieces_of

# --------------------------------------------------------------------------------------------------
# Checks of a run's input before anything runs, with errors that say what would work.
# --------------------------------------------------------------------------------------------------


_INTEGERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def as_tokens(input: Any) -> Tensor:
    """Convert integer tensors or lists of ids to tokens ``[batch, pos]``, int64.

    Raises:
        TypeError: it is neither. ValueError: it has the wrong number of axes, no rows, no tokens,
            or rows of different lengths.
    """
    if not isinstance(input, Tensor):
        if not isinstance(input, list | tuple):
            raise TypeError(
                f"the input is {type(input).__name__}; it must be a text, a list of texts, tokens"
                " [pos] or [batch, pos], or embeddings [batch, pos, d_model]"
            )
        input = _from_lists(input)
    if input.dtype not in _INTEGERS:
        raise TypeError(f"tokens must be whole numbers, not {input.dtype}")
    if input.ndim not in (1, 2):
        raise ValueError(f"tokens must be [pos] or [batch, pos], not {list(input.shape)}")
    tokens = input if input.dtype == torch.int64 else input.long()
    if tokens.ndim == 1:
        tokens = tokens.unsqueeze(0)
    if not tokens.numel():
        raise ValueError(
            f"the input has no {'rows' if not tokens.shape[0] else 'tokens'}: its shape is"
            f" {[*input.shape]}"
        )
    return tokens


def _from_lists(input: Sequence[Any]) -> Tensor:
    if not input:
        raise ValueError("the input has no tokens: the list is empty")
    if isinstance(input[0], Sequence) and not isinstance(input[0], str):
        for index, row in enumerate(input):
            if isinstance(row, str) or not isinstance(row, Sequence):
                raise TypeError(
                    f"row {index} of the input is {row!r}; it must be a list of token ids, as row"
                    " 0 is"
                )
            _check_ids(row, f"row {index}")
        lengths = [len(row) for row in input]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the rows of the input have {', '.join(map(str, lengths))} tokens; pad them to one"
                " length and pass attention_mask, or pass texts, which are padded"
            )
        if not lengths[0]:
            raise ValueError("the input has no tokens: its rows are empty")
    elif isinstance(input[0], Tensor):
        shapes = {
            tuple(row.shape) if isinstance(row, Tensor) else type(row).__name__ for row in input
        }
        if len(shapes) > 1 or any(row.ndim > 1 or row.dtype not in _INTEGERS for row in input):
            raise TypeError(
                f"the input is a list of tensors of shapes {', '.join(map(str, shapes))}; it must"
                " be one tensor of token ids [batch, pos] (torch.stack joins rows of one length)"
            )
        return torch.stack(list(input))
    else:
        _check_ids(input, "the input")
    return torch.tensor(input, device="cpu")


def _check_ids(row: Sequence[Any], where: str) -> None:
    for entry in row:
        if isinstance(entry, bool) or not hasattr(entry, "__index__"):
            raise TypeError(f"{where} holds {entry!r}; tokens must be whole numbers")


def check_texts(texts: Any) -> None:
    """Reject a value that is not a list of texts.

    Raises:
        TypeError: it is not a list, or contains something other than text.
    """
    if not isinstance(texts, Sequence) or isinstance(texts, str | bytes):
        raise TypeError(f"the input is {texts!r}; it must be a text or a list of texts")
    for index, text in enumerate(texts):
        if not isinstance(text, str) and not is_chat(text):
            raise TypeError(f"text {index} is {text!r}, which is no string, and no chat")


#: A text, or a chat: messages that the tokenizer's chat template renders.
Text = str | Chat
#: One or several of them.
Texts = Text | Sequence[Text]


def texts_in(input: Any) -> Sequence[Text] | None:
    """Return the texts or chats of an input: one, or a list; None if it is neither.

    The other elements of a list are checked when the texts are tokenized.
    """
    if isinstance(input, Tensor):
        return None
    if isinstance(input, str) or is_chat(input):
        return [input]
    several = isinstance(input, list | tuple) and bool(input)
    return input if several and (isinstance(input[0], str) or is_chat(input[0])) else None


def as_ids(tokens: Any) -> Tensor:
    """Convert a tensor, an id, or lists of ids to token ids with any number of axes.

    Raises:
        TypeError: they are not integers.
        ValueError: an id is negative, or too large for any tokenizer.
    """
    ids = tokens
    if not isinstance(tokens, Tensor):
        ids = _ids_listed(tokens)
    if ids.dtype not in _INTEGERS and ids.numel():
        raise TypeError(f"tokens must be whole numbers, not {ids.dtype}")
    ids = ids.long()
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < 2**32):
        raise ValueError(
            f"token ids are from 0 on, and these go from {int(ids.min())} to {int(ids.max())}"
        )
    return ids


def _ids_listed(tokens: Any) -> Tensor:
    """Return one id, or the ids in lists, as a tensor."""
    if not isinstance(tokens, list | tuple):
        _check_ids([tokens], "the input")
        return torch.tensor(tokens, device="cpu")
    if not tokens:
        return torch.zeros(0, dtype=torch.long, device="cpu")
    ids = as_tokens(tokens)
    is_row = not isinstance(tokens[0], Sequence | Tensor) or getattr(tokens[0], "ndim", 1) == 0
    return ids[0] if is_row else ids


def check_ids(
    embedding: TokenEmbedding, cfg: ModelConfig, tokens: Tensor, name: str = "the input"
) -> None:
    """Reject token ids that have no embedding.

    Ids on an accelerator are not read: that would wait for all queued work.

    Args:
        embedding: finds the token embeddings.
        cfg: the facts about the model.
        tokens: a non-empty tensor of integers.
        name: a description of them.

    Raises:
        ValueError: there is such an id.
    """
    if not tokens.is_cpu:
        return
    rows = getattr(embedding.module, "num_embeddings", None)
    rows = cfg.d_vocab if rows is None else rows
    if tokens.ndim == 2 and tokens.numel() <= 256:  # starting a kernel is slower
        ids = tokens.tolist()
        low, high = min(map(min, ids)), max(map(max, ids))
    else:
        low, high = (int(x) for x in tokens.aminmax())
    if low < 0 or high >= rows:
        bad = low if low < 0 else high
        place = (tokens == bad).nonzero()[0].tolist()
        raise ValueError(
            f"{name} has token id {bad} at {place}; {cfg.model_name} has ids from 0 to d_vocab - 1"
            f" = {rows - 1}"
        )


def check_embeddings(core: PreTrainedModel, input: Tensor) -> None:
    """Reject embeddings whose shape or dtype differs from the model's.

    Raises:
        TypeError: the dtype differs. ValueError: the width or the number of axes differs, or there
            are no embeddings.
    """
    embedding = token_embedding(core)
    width = getattr(embedding, "embedding_dim", None)
    if input.ndim not in (2, 3) or (width is not None and input.shape[-1] != width):
        axis = "d_model" if width is None else f"d_model={width}"
        raise ValueError(
            f"embeddings must be [pos, {axis}] or [batch, pos, {axis}], not"
            f" {list(input.shape)}; tokens must be whole numbers, and this is {input.dtype}"
        )
    if not input.numel():
        raise ValueError(f"the input has no tokens: the embeddings have shape {list(input.shape)}")
    weight = getattr(embedding, "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point():
        _check_type(input, {weight.dtype}, "embeddings")


def check_residual(model: nn.Module, input: Any, d_model: int) -> None:
    """Reject a tensor that cannot be the residual stream of a run that starts at a layer.

    Raises:
        TypeError: the dtype differs. ValueError: the shape differs.
    """
    if not isinstance(input, Tensor) or input.ndim != 3 or input.shape[-1] != d_model:
        shape = list(input.shape) if isinstance(input, Tensor) else type(input).__name__
        raise ValueError(
            f"with start_at_layer the input is the residual stream, [batch, pos, {d_model}], not"
            f" {shape}"
        )
    if not input.numel():
        raise ValueError(f"the residual stream is empty: its shape is {list(input.shape)}")
    if not any(p.dtype == input.dtype for p in model.parameters()):  # the first block usually tells
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        _check_type(input, dtypes, "the residual stream")


def _check_type(input: Tensor, allowed: set[torch.dtype], name: str) -> None:
    if input.dtype not in allowed and not torch.is_autocast_enabled(input.device.type):
        types = " or ".join(sorted(str(dtype) for dtype in allowed))
        raise TypeError(
            f"{name}: the type is {input.dtype}, and the model computes in {types}; use"
            f" .to({types})"
        )


def check_whole_logits(return_type: str | None, arguments: Mapping[str, Any]) -> None:
    """Reject a loss or a prediction if only some logits are computed.

    Raises:
        ValueError: it is requested.
    """
    kept = arguments.get("logits_to_keep")
    if return_type not in ("loss", "both", "predictions") or kept is None:
        return
    if isinstance(kept, Tensor) or kept != 0:
        raise ValueError(
            f"return_type={return_type!r} needs the logits of every position, and"
            f' logits_to_keep={kept!r} keeps some: leave it out, or use return_type="logits"'
        )


#: Tokens in a tensor, or as ids in lists.
Tokens = Int[Tensor, "..."] | Sequence[int] | Sequence[Sequence[int]]


class UnknownWordWarning(UserWarning):
    """A warning that the tokenizer does not know words of a text: the model reads unknown tokens
    instead.
    """


class MissingSpaceWarning(UserWarning):
    """A warning that an answer's text is another token than with a space in front, as a text
    continues with.
    """


@dataclass(frozen=True)
class Batch:
    """A batch of token rows of equal length.

    Attributes:
        tokens: ``[batch, pos]``.
        mask: ``[batch, pos]``, 1 for tokens and 0 for padding; None without padding.
    """

    tokens: Int[Tensor, "batch pos"]
    mask: Int[Tensor, "batch pos"] | None


class TokenizerFacts:
    """The behaviour of a tokenizer, tested once.

    Args:
        tokenizer: a Hugging Face tokenizer; it is only read.

    Attributes:
        bos: the id that starts a text (CLS if there is no BOS, as in BERT), or None.
        adds_bos: whether the tokenizer adds it by default.
        ending: the ids that it appends by default (EOS, SEP).
        pad: the id for padding: the tokenizer's own, or else EOS, or else 0 (padding is always
            masked).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        self.bos: int | None = bos if bos is not None else getattr(tokenizer, "cls_token_id", None)
        before, self.ending = _added_by(tokenizer)
        self.adds_bos = self.bos is not None and self.bos in before
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad: int = next(pad for pad in pads if pad is not None)

    def encode(self, text: Text, prepend_bos: bool, keep_ending: bool) -> list[int]:
        """Return the ids of one text, or of a chat, whose template says how it begins and ends.

        Args:
            text: the text, or the chat.
            prepend_bos: whether it starts with BOS (never twice).
            keep_ending: whether tokens that the tokenizer appends are kept.

        Raises:
            ValueError: BOS is requested and the tokenizer has none.
        """
        if not isinstance(text, str):
            return chat_ids(self.tokenizer, text)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if prepend_bos:
            if self.bos is None:
                raise ValueError(
                    f"prepend_bos=True, but {type(self.tokenizer).__name__} has no BOS token (nor"
                    " CLS); use prepend_bos=False"
                )
            if not ids or ids[0] != self.bos:
                ids = [self.bos, *ids]
        return ids + self.ending if keep_ending else ids

    def unknown_words(self, text: str, ids: Sequence[int]) -> list[str]:
        """Return the words of a text that become unknown tokens; a literal unknown token is
        excluded.

        Args:
            text: the text.
            ids: its tokens.
        """
        unknown = self.tokenizer.unk_token_id
        inner = list(ids)
        if inner and inner[0] == self.bos:  # GPT-2's is its unknown token, too
            inner = inner[1:]
        if self.ending and inner[-len(self.ending) :] == self.ending:
            inner = inner[: -len(self.ending)]
        if unknown is None or inner.count(unknown) <= text.count(str(self.tokenizer.unk_token)):
            return []
        words = dict.fromkeys(re.findall(r"\s*(?:\w+|[^\w\s]+)", text))
        unknown_words = [
            word
            for word in words
            if unknown in self.tokenizer(word, add_special_tokens=False)["input_ids"]
        ]
        return unknown_words or [text]

    def explain_unknown(self, words: Sequence[str]) -> str:
        """Return the message about words that the tokenizer does not know."""
        name, count = type(self.tokenizer).__name__, len(self.tokenizer)
        named = listed([*map(repr, words)], 10)
        return (
            f"the tokenizer ({name}) does not know {named}: the model reads"
            f" {self.tokenizer.unk_token} there. bridge.tokenizer.get_vocab() has the {count}"
            " tokens that it knows"
        )

    def pad_rows(self, rows: Sequence[Sequence[int]], side: str) -> Batch:
        """Pad token rows to equal length on one side."""
        longest = max(len(row) for row in rows)
        padded, masks = [], []
        for row in rows:
            gap = longest - len(row)
            before, behind = (gap, 0) if side == "left" else (0, gap)
            padded.append([self.pad] * before + [*row] + [self.pad] * behind)
            masks.append([0] * before + [1] * len(row) + [0] * behind)
        uneven = any(len(row) != longest for row in rows)
        tokens = torch.tensor(padded, dtype=torch.long, device="cpu").reshape(len(rows), longest)
        return Batch(
            tokens, torch.tensor(masks, dtype=torch.long, device="cpu") if uneven else None
        )


def _added_by(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer adds before and after a text.

    Raises:
        CannotBeDoneError: these tokens cannot be determined.
    """
    for text in _PROBES:
        plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        dressed: list[int] = tokenizer(text, add_special_tokens=True)["input_ids"]
        for start in range(len(dressed) - len(plain) + 1) if plain else ():
            if dressed[start : start + len(plain)] == plain:
                return dressed[:start], dressed[start + len(plain) :]
    raise CannotBeDoneError(
        f"{type(tokenizer).__name__} makes other tokens of each of {', '.join(map(repr, _PROBES))}"
        " when it adds special tokens, so what it adds cannot be told; give tokens in place of"
        " text"
    )


#: Texts at least one of which has tokens that stay the same when special ones are added around
#: them.
_PROBES = ("a", "A", "0", ".", " a", "the", "a b")


class HasTokenizer(Protocol):
    """The interface of a bridge that tokenization needs.

    Attributes:
        cfg: the facts about the model.
    """

    cfg: ModelConfig

    @property
    def tokenizer_facts(self) -> TokenizerFacts:
        """Return the tokenizer's own behaviour."""
        ...


class TextOptions(NamedTuple):
    """Options for tokenizing text. The fields are arguments of `TransformerBridge.batch_of`."""

    prepend_bos: bool | None = None
    padding_side: str | None = None
    longest: int | None = None


_USUAL = TextOptions()


def _unknown_words(facts: TokenizerFacts, text: Text, ids: list[int]) -> list[str]:
    """Return the words of a text, or of a chat's messages, that become unknown tokens. Roles and
    the template's own words are not named.
    """
    if isinstance(text, str):
        return facts.unknown_words(text, ids)
    unknown: list[str] = []
    for piece in (piece.text for message in text for piece in pieces_of(message)):
        inner = facts.tokenizer(piece, add_special_tokens=False)["input_ids"]
        unknown += facts.unknown_words(piece, inner)
    return unknown


def batch_of(bridge: HasTokenizer, texts: Sequence[Text], options: TextOptions = _USUAL) -> Batch:
    """Tokenize texts to padded rows of equal length, with the mask of real tokens.

    See `TransformerBridge.batch_of`.
    """
    prepend_bos, padding_side, longest = options
    check_texts(texts)
    facts = bridge.tokenizer_facts
    if not texts:
        raise ValueError("there are no texts: the list is empty")
    if prepend_bos is not None and not all(isinstance(text, str) for text in texts):
        raise CannotBeDoneError(
            f"prepend_bos={prepend_bos}: whether a chat starts with BOS, its template says; leave"
            " it out"
        )
    if prepend_bos is None:
        prepend_bos = bridge.cfg.default_prepend_bos and facts.bos is not None
    side = padding_side or facts.tokenizer.padding_side
    if side not in ("left", "right"):
        raise ValueError(f'padding_side is {side!r}; it must be "left" or "right"')
    keep_ending = bridge.cfg.attention_dir == "bidirectional"
    rows = [facts.encode(text, prepend_bos, keep_ending) for text in texts]
    unknown: dict[str, None] = {}
    for text, row in zip(texts, rows, strict=True):
        unknown |= dict.fromkeys(_unknown_words(facts, text, row))
    if unknown:
        warnings.warn(facts.explain_unknown(list(unknown)), UnknownWordWarning, stacklevel=3)
    if longest is not None:
        ending = facts.ending if keep_ending else []
        cut = longest - len(ending)
        rows = [row if len(row) <= longest else row[:cut] + ending for row in rows]
    if not all(rows):
        raise ValueError(
            "an empty text gives no tokens at all without BOS; use prepend_bos=True, or leave"
            " it out"
        )
    return facts.pad_rows(rows, side)


def to_tokens(
    bridge: HasTokenizer,
    input: Texts,
    options: TextOptions = _USUAL,
    move_to_device: bool = True,
    truncate: bool = True,
) -> Int[Tensor, "batch pos"]:
    """Convert text to tokens. See `TransformerBridge.to_tokens`."""
    if isinstance(input, Tensor):
        raise TypeError("to_tokens takes text; these are tokens already")
    longest = bridge.cfg.n_ctx if truncate else None
    texts = texts_in(input) or cast("Sequence[Text]", input)
    tokens = batch_of(bridge, texts, options._replace(longest=longest)).tokens
    return tokens.to(bridge.cfg.device) if move_to_device else tokens


def to_string(
    bridge: HasTokenizer,
    tokens: Int[Tensor, "..."] | Sequence[int] | Sequence[Int[Tensor, "..."]] | int,
) -> str | list[str]:
    """Convert tokens to text: a string for a row, a list for a batch. See
    `TransformerBridge.to_string`.
    """
    tokenizer = bridge.tokenizer_facts.tokenizer
    ids = as_ids(tokens)
    if ids.ndim == 2:
        return [
            str(tokenizer.decode(row, clean_up_tokenization_spaces=False)) for row in ids.tolist()
        ]
    return str(tokenizer.decode(ids.reshape(-1).tolist(), clean_up_tokenization_spaces=False))


def to_str_tokens(
    bridge: HasTokenizer, input: Texts | Tokens, options: TextOptions = _USUAL
) -> list[str] | list[list[str]]:
    """Return the text of each token of a text or a row; a list of lists for several.

    See `TransformerBridge.to_str_tokens`.
    """
    texts = texts_in(input)
    if texts is not None or (not isinstance(input, Tensor) and not len(input)):
        rows = [_pieces(bridge, batch_of(bridge, [x], options).tokens[0]) for x in texts or ()]
        return rows[0] if isinstance(input, str) or is_chat(input) else rows
    ids = as_ids(input)
    rows = [_pieces(bridge, row) for row in (ids.reshape(1, -1) if ids.ndim < 2 else ids)]
    return rows[0] if len(rows) == 1 else rows


def _pieces(bridge: HasTokenizer, row: Int[Tensor, " pos"]) -> list[str]:
    """Return the text of each token of a row."""
    return [str(to_string(bridge, token)) for token in row.tolist()]


def to_single_token(bridge: HasTokenizer, string: str) -> int:
    """Return the id of a text that is one token. See `TransformerBridge.to_single_token`."""
    facts = bridge.tokenizer_facts
    ids = facts.encode(string, prepend_bos=False, keep_ending=False)
    if unknown := facts.unknown_words(string, ids):
        raise CannotBeDoneError(f"{string!r} is no token: {facts.explain_unknown(unknown)}")
    if len(ids) != 1:
        pieces = [str(to_string(bridge, token)) for token in ids]
        raise CannotBeDoneError(f"{string!r} is {len(ids)} tokens, not one: {pieces}")
    return ids[0]


def to_answer_token(bridge: HasTokenizer, answer: str) -> int:
    """Return the id of an answer that is one token. See `TransformerBridge.to_answer_token`."""
    token = to_single_token(bridge, answer)
    if not answer[:1].isalpha():
        return token
    facts = bridge.tokenizer_facts
    ids = facts.encode(f" {answer}", prepend_bos=False, keep_ending=False)
    spaced = ids[0] if len(ids) == 1 else token
    if spaced != token and not facts.unknown_words(f" {answer}", ids):
        warnings.warn(
            f"{answer!r} is the token {token}; behind another word the model says {f' {answer}'!r},"
            f" the token {spaced}. Write the space, unless the prompt ends where none follows",
            MissingSpaceWarning,
            stacklevel=4,
        )
    return token


def to_single_str_token(bridge: HasTokenizer, token: int) -> str:
    """Return the text of one token. See `TransformerBridge.to_single_str_token`."""
    return str(to_string(bridge, int(token)))


def get_token_position(
    bridge: HasTokenizer,
    single_token: str | int,
    input: str | Int[Tensor, "..."],
    mode: str = "first",
    options: TextOptions = _USUAL,
) -> int:
    """Return the position of a token in a text. See `TransformerBridge.get_token_position`."""
    if isinstance(input, str):
        input = batch_of(bridge, [input], options._replace(longest=bridge.cfg.n_ctx)).tokens
    tokens = torch.as_tensor(input)
    if tokens.ndim == 2:
        if len(tokens) != 1:
            raise ValueError(f"a position is of one row of tokens, not of {len(tokens)}")
        tokens = tokens[0]
    token = to_single_token(bridge, single_token) if isinstance(single_token, str) else single_token
    if mode not in ("first", "last"):
        raise ValueError(f'mode is {mode!r}; it must be "first" or "last"')
    places = (tokens == token).nonzero()[:, 0].tolist()
    if not places:
        # HookedTransformer's words, which programs compare.
        error = CannotBeDoneError("The token does not occur in the prompt")
        error.add_note(f"{single_token!r} does not stand in {input!r}")
        raise error
    return int(places[0] if mode == "first" else places[-1])
