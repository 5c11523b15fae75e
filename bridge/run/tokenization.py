"""Text to tokens and back, without ever changing the tokenizer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapters.config import ModelConfig
from adapters.points import token_embedding
from bridge.hooks.arguments import CannotBeDoneError, listed
from bridge.hooks.modules import TokenEmbedding

# ----------------------------------------------------------------------------------------------------------------------
# Refusing input that the model cannot take, before anything runs, in words that say what would work.
# ----------------------------------------------------------------------------------------------------------------------


_INTEGERS = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def as_tokens(input: Any) -> Tensor:
    """Tokens ``[batch, pos]``, int64, from a tensor of any whole numbers or lists of ids.

    Raises:
        TypeError: it is neither.
        ValueError: it has another number of axes, no rows, no tokens, or rows of different lengths.
    """
    if not isinstance(input, Tensor):
        if not isinstance(input, list | tuple):
            raise TypeError(
                f"the input is {type(input).__name__}; it must be a text, a list of texts, tokens [pos] or "
                "[batch, pos], or embeddings [batch, pos, d_model]"
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
            f"the input has no {'rows' if not tokens.shape[0] else 'tokens'}: its shape is {[*input.shape]}"
        )
    return tokens


def _from_lists(input: Sequence[Any]) -> Tensor:
    if not input:
        raise ValueError("the input has no tokens: the list is empty")
    if isinstance(input[0], Sequence) and not isinstance(input[0], str):
        for index, row in enumerate(input):
            if isinstance(row, str) or not isinstance(row, Sequence):
                raise TypeError(f"row {index} of the input is {row!r}; it must be a list of token ids, as row 0 is")
            _check_ids(row, f"row {index}")
        lengths = [len(row) for row in input]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the rows of the input have {', '.join(map(str, lengths))} tokens; pad them to one length and pass "
                "attention_mask, or pass texts, which are padded"
            )
        if not lengths[0]:
            raise ValueError("the input has no tokens: its rows are empty")
    elif isinstance(input[0], Tensor):
        shapes = {tuple(row.shape) if isinstance(row, Tensor) else type(row).__name__ for row in input}
        if len(shapes) > 1 or any(row.ndim > 1 or row.dtype not in _INTEGERS for row in input):
            raise TypeError(
                f"the input is a list of tensors of shapes {', '.join(map(str, shapes))}; it must be one tensor of "
                "token ids [batch, pos] (torch.stack joins rows of one length)"
            )
        return torch.stack(list(input))
    elif is_chat(input):
        raise TypeError("the input is a chat: bridge.to_tokens(messages) makes tokens of it by the chat template")
    else:
        _check_ids(input, "the input")
    return torch.tensor(input)


def _check_ids(row: Sequence[Any], where: str) -> None:
    for entry in row:
        if isinstance(entry, bool) or not hasattr(entry, "__index__"):
            raise TypeError(f"{where} holds {entry!r}; tokens must be whole numbers")


def is_chat(input: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether an input is a chat: a list of messages, each with a role."""
    return isinstance(input, list | tuple) and bool(input) and isinstance(input[0], Mapping) and "role" in input[0]


def check_texts(texts: Any) -> None:
    """Refuses what is no list of texts.

    Raises:
        TypeError: it is none, or holds something else.
    """
    if not isinstance(texts, Sequence) or isinstance(texts, str | bytes):
        raise TypeError(f"the input is {texts!r}; it must be a text or a list of texts")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"text {index} is {text!r}, which is no string")


def texts_in(input: Any) -> Sequence[str] | None:
    """The texts that an input is: one, or a list of them. None where it is something else.

    What is behind the first of a list is looked at where the texts become tokens.
    """
    if isinstance(input, Tensor):
        return None
    if isinstance(input, str):
        return [input]
    return input if isinstance(input, list | tuple) and input and isinstance(input[0], str) else None


def as_ids(tokens: Any) -> Tensor:
    """Token ids of any number of axes, from a tensor, an id, or lists of ids.

    Raises:
        TypeError: they are no whole numbers.
        ValueError: an id below zero, or more than a tokenizer can have.
    """
    ids = tokens
    if not isinstance(tokens, Tensor):
        if not isinstance(tokens, list | tuple):
            _check_ids([tokens], "the input")
        one = not isinstance(tokens, list | tuple)
        ids = torch.tensor(tokens) if one else as_tokens(tokens) if tokens else torch.zeros(0, dtype=torch.long)
        if not one and tokens and (not isinstance(tokens[0], Sequence | Tensor) or getattr(tokens[0], "ndim", 1) == 0):
            ids = ids[0]
    if ids.dtype not in _INTEGERS and ids.numel():
        raise TypeError(f"tokens must be whole numbers, not {ids.dtype}")
    ids = ids.long()
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < 2**32):
        raise ValueError(f"token ids are from 0 on, and these go from {int(ids.min())} to {int(ids.max())}")
    return ids


def check_ids(embedding: TokenEmbedding, cfg: ModelConfig, tokens: Tensor, name: str = "the input") -> None:
    """Refuses token ids that have no embedding.

    What is in the memory of an accelerator is not looked at: that would wait for everything under way there.

    Args:
        embedding: finds the token embeddings.
        cfg: the facts about the model.
        tokens: of whole numbers, not empty.
        name: what they are.

    Raises:
        ValueError: there is one.
    """
    if not tokens.is_cpu:
        return
    rows = getattr(embedding.module, "num_embeddings", None)
    rows = cfg.d_vocab if rows is None else rows
    if tokens.ndim == 2 and tokens.numel() <= 256:  # a kernel takes longer to start
        ids = tokens.tolist()
        low, high = min(map(min, ids)), max(map(max, ids))
    else:
        low, high = (int(x) for x in tokens.aminmax())
    if low < 0 or high >= rows:
        bad = low if low < 0 else high
        place = (tokens == bad).nonzero()[0].tolist()
        raise ValueError(
            f"{name} has token id {bad} at {place}; {cfg.model_name} has ids from 0 to d_vocab - 1 = {rows - 1}"
        )


def check_embeddings(core: PreTrainedModel, input: Tensor) -> None:
    """Refuses embeddings that the model's are not like.

    Raises:
        TypeError: another type.
        ValueError: another width, another number of axes, or none of them.
    """
    embedding = token_embedding(core)
    width = getattr(embedding, "embedding_dim", None)
    if input.ndim not in (2, 3) or (width is not None and input.shape[-1] != width):
        wanted = "d_model" if width is None else f"d_model={width}"
        raise ValueError(
            f"embeddings must be [pos, {wanted}] or [batch, pos, {wanted}], not {list(input.shape)}; "
            f"tokens must be whole numbers, and this is {input.dtype}"
        )
    if not input.numel():
        raise ValueError(f"the input has no tokens: the embeddings have shape {list(input.shape)}")
    weight = getattr(embedding, "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point():
        _check_type(input, {weight.dtype}, "embeddings")


def check_residual(model: nn.Module, input: Any, d_model: int) -> None:
    """Refuses what cannot be the residual stream of a run that starts at a layer.

    Raises:
        TypeError: another type.
        ValueError: another shape.
    """
    if not isinstance(input, Tensor) or input.ndim != 3 or input.shape[-1] != d_model:
        shape = list(input.shape) if isinstance(input, Tensor) else type(input).__name__
        raise ValueError(f"with start_at_layer the input is the residual stream, [batch, pos, {d_model}], not {shape}")
    if not input.numel():
        raise ValueError(f"the residual stream is empty: its shape is {list(input.shape)}")
    if not any(p.dtype == input.dtype for p in model.parameters()):  # the first one tells, most often
        _check_type(input, {p.dtype for p in model.parameters() if p.is_floating_point()}, "the residual stream")


def _check_type(input: Tensor, wanted: set[torch.dtype], name: str) -> None:
    if input.dtype not in wanted and not torch.is_autocast_enabled(input.device.type):
        types = " or ".join(sorted(str(dtype) for dtype in wanted))
        raise TypeError(f"{name}: the type is {input.dtype}, and the model computes in {types}; use .to({types})")


def check_whole_logits(return_type: str | None, arguments: Mapping[str, Any]) -> None:
    """Refuses a loss or a prediction of logits of which not all are computed.

    Raises:
        ValueError: it is asked for.
    """
    kept = arguments.get("logits_to_keep")
    if return_type in ("loss", "both", "predictions") and kept is not None and (isinstance(kept, Tensor) or kept != 0):
        raise ValueError(
            f"return_type={return_type!r} needs the logits of every position, and logits_to_keep={kept!r} keeps some: "
            'leave it out, or use return_type="logits"'
        )


#: Tokens in a tensor, or as ids in lists.
Tokens = Int[Tensor, "..."] | Sequence[int] | Sequence[Sequence[int]]


class UnknownWordWarning(UserWarning):
    """A text has words that the tokenizer does not know: the model reads its unknown token in their place."""


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

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        self.bos: int | None = bos if bos is not None else getattr(tokenizer, "cls_token_id", None)
        before, self.ending = _added_by(tokenizer)
        self.adds_bos = self.bos is not None and self.bos in before
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

    def unknown_words(self, text: str, ids: Sequence[int]) -> list[str]:
        """The words of a text that the tokenizer makes its unknown token of; one that the text names is not among them.

        Args:
            text: the text.
            ids: its tokens.
        """
        unknown = self.tokenizer.unk_token_id
        inner = list(ids)[1:] if ids and ids[0] == self.bos else list(ids)  # GPT-2's is its unknown token, too
        inner = inner[: -len(self.ending)] if self.ending and inner[-len(self.ending) :] == self.ending else inner
        if unknown is None or inner.count(unknown) <= text.count(str(self.tokenizer.unk_token)):
            return []
        words = re.findall(r"\s*(?:\w+|[^\w\s]+)", text)
        found = [word for word in words if unknown in self.tokenizer(word, add_special_tokens=False)["input_ids"]]
        return list(dict.fromkeys(found)) or [text]

    def explain_unknown(self, words: Sequence[str]) -> str:
        """What is to be said of words that the tokenizer does not know."""
        name, count = type(self.tokenizer).__name__, len(self.tokenizer)
        named = listed([*map(repr, words)], 10)
        return (
            f"the tokenizer ({name}) does not know {named}: the model reads {self.tokenizer.unk_token} there. "
            f"bridge.tokenizer.get_vocab() has the {count} tokens that it knows"
        )

    def pad_rows(self, rows: Sequence[Sequence[int]], side: str) -> Batch:
        """Token rows, padded to one length on one side."""
        longest = max(len(row) for row in rows)
        padded, masks = [], []
        for row in rows:
            gap = longest - len(row)
            before, behind = (gap, 0) if side == "left" else (0, gap)
            padded.append([self.pad] * before + [*row] + [self.pad] * behind)
            masks.append([0] * before + [1] * len(row) + [0] * behind)
        uneven = any(len(row) != longest for row in rows)
        tokens = torch.tensor(padded, dtype=torch.long).reshape(len(rows), longest)
        return Batch(tokens, torch.tensor(masks, dtype=torch.long) if uneven else None)


def _added_by(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and behind a text by itself.

    Raises:
        CannotBeDoneError: it cannot be told.
    """
    for text in _PROBES:
        plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        dressed: list[int] = tokenizer(text, add_special_tokens=True)["input_ids"]
        for start in range(len(dressed) - len(plain) + 1) if plain else ():
            if dressed[start : start + len(plain)] == plain:
                return dressed[:start], dressed[start + len(plain) :]
    raise CannotBeDoneError(
        f"{type(tokenizer).__name__} makes other tokens of each of {', '.join(map(repr, _PROBES))} when it adds "
        "special tokens, so what it adds cannot be told; give tokens in place of text"
    )


#: Texts of which at least one has tokens that stay the same with special ones around.
_PROBES = ("a", "A", "0", ".", " a", "the", "a b")


class HasTokenizer(Protocol):
    """What turning text into tokens needs of a bridge.

    Attributes:
        cfg: the facts about the model.
    """

    cfg: ModelConfig

    @property
    def tokenizer_facts(self) -> TokenizerFacts:
        """What the tokenizer does by itself."""
        ...


class TextOptions(NamedTuple):
    """How text becomes tokens. The fields are arguments of `TransformerBridge.batch_of`."""

    prepend_bos: bool | None = None
    padding_side: str | None = None
    longest: int | None = None


_USUAL = TextOptions()


def batch_of(bridge: HasTokenizer, texts: Sequence[str], options: TextOptions = _USUAL) -> Batch:
    """Texts as token rows of one length, with the mask that says which tokens are padding.

    See `TransformerBridge.batch_of`.
    """
    prepend_bos, padding_side, longest = options
    check_texts(texts)
    facts = bridge.tokenizer_facts
    if not texts:
        raise ValueError("there are no texts: the list is empty")
    if prepend_bos is None:
        prepend_bos = bridge.cfg.default_prepend_bos and facts.bos is not None
    side = padding_side or facts.tokenizer.padding_side
    if side not in ("left", "right"):
        raise ValueError(f'padding_side is {side!r}; it must be "left" or "right"')
    keep_ending = bridge.cfg.attention_dir == "bidirectional"
    rows = [facts.encode(text, prepend_bos, keep_ending) for text in texts]
    unknown = [word for text, row in zip(texts, rows, strict=True) for word in facts.unknown_words(text, row)]
    if unknown:
        warnings.warn(facts.explain_unknown(list(dict.fromkeys(unknown))), UnknownWordWarning, stacklevel=3)
    if longest is not None:
        ending = facts.ending if keep_ending else []
        cut = longest - len(ending)
        rows = [row if len(row) <= longest else row[:cut] + ending for row in rows]
    if not all(rows):
        raise ValueError("an empty text gives no tokens at all without BOS; use prepend_bos=True, or leave it out")
    return facts.pad_rows(rows, side)


def to_tokens(
    bridge: HasTokenizer,
    input: str | Sequence[str] | Sequence[Mapping[str, Any]],
    options: TextOptions = _USUAL,
    move_to_device: bool = True,
    truncate: bool = True,
) -> Int[Tensor, "batch pos"]:
    """Text as tokens. See `TransformerBridge.to_tokens`."""
    if isinstance(input, Tensor):
        raise TypeError("to_tokens takes text; these are tokens already")
    longest = bridge.cfg.n_ctx if truncate else None
    if is_chat(input):
        tokens = _chat(bridge.tokenizer_facts.tokenizer, input, options.prepend_bos)[:, :longest]
    else:
        texts = [input] if isinstance(input, str) else cast("Sequence[str]", input)
        tokens = batch_of(bridge, texts, options._replace(longest=longest)).tokens
    return tokens.to(bridge.cfg.device) if move_to_device else tokens


def _chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], prepend_bos: bool | None
) -> Int[Tensor, "1 pos"]:
    """A chat as tokens, with what comes before the model's answer.

    Raises:
        ValueError: the tokenizer has no chat template, or BOS is spoken of, which is the template's business.
    """
    if not tokenizer.chat_template:
        raise CannotBeDoneError(
            f"{type(tokenizer).__name__} has no chat template, so it makes no tokens of a chat: give a text, or set "
            "bridge.tokenizer.chat_template"
        )
    if prepend_bos is not None:
        raise CannotBeDoneError(
            f"prepend_bos={prepend_bos}: whether a chat starts with BOS, its template says; leave it out"
        )
    ids = tokenizer.apply_chat_template([*map(dict, messages)], add_generation_prompt=True, return_dict=False)
    return torch.tensor([ids])


def to_string(
    bridge: HasTokenizer, tokens: Int[Tensor, "..."] | Sequence[int] | Sequence[Int[Tensor, "..."]] | int
) -> str | list[str]:
    """Tokens as text: one string for one row, a list for a batch. See `TransformerBridge.to_string`."""
    tokenizer = bridge.tokenizer_facts.tokenizer
    ids = as_ids(tokens)
    if ids.ndim == 2:
        return [str(tokenizer.decode(row, clean_up_tokenization_spaces=False)) for row in ids.tolist()]
    return str(tokenizer.decode(ids.reshape(-1).tolist(), clean_up_tokenization_spaces=False))


def to_str_tokens(
    bridge: HasTokenizer, input: str | Sequence[str] | Tokens, options: TextOptions = _USUAL
) -> list[str] | list[list[str]]:
    """A text or a row of tokens as the text of each token; a list of lists for several.

    See `TransformerBridge.to_str_tokens`.
    """
    if isinstance(input, str):
        return _pieces(bridge, batch_of(bridge, [input], options).tokens[0])
    if _are_texts(input):
        return [_pieces(bridge, batch_of(bridge, [text], options).tokens[0]) for text in input]
    ids = as_ids(input)
    rows = [_pieces(bridge, row) for row in (ids.reshape(1, -1) if ids.ndim < 2 else ids)]
    return rows[0] if len(rows) == 1 else rows


def _are_texts(input: Sequence[str] | Tokens) -> TypeGuard[Sequence[str]]:
    return not isinstance(input, Tensor) and (len(input) == 0 or isinstance(input[0], str))


def _pieces(bridge: HasTokenizer, row: Int[Tensor, " pos"]) -> list[str]:
    """The text of each token of a row."""
    return [str(to_string(bridge, token)) for token in row.tolist()]


def to_single_token(bridge: HasTokenizer, string: str) -> int:
    """The id of a text that is one token. See `TransformerBridge.to_single_token`."""
    facts = bridge.tokenizer_facts
    ids = facts.encode(string, prepend_bos=False, keep_ending=False)
    if unknown := facts.unknown_words(string, ids):
        raise CannotBeDoneError(f"{string!r} is no token: {facts.explain_unknown(unknown)}")
    if len(ids) != 1:
        pieces = [str(to_string(bridge, token)) for token in ids]
        raise CannotBeDoneError(f"{string!r} is {len(ids)} tokens, not one: {pieces}")
    return ids[0]


def to_single_str_token(bridge: HasTokenizer, token: int) -> str:
    """The text of one token. See `TransformerBridge.to_single_str_token`."""
    return str(to_string(bridge, int(token)))


def get_token_position(
    bridge: HasTokenizer,
    single_token: str | int,
    input: str | Int[Tensor, "..."],
    mode: str = "first",
    options: TextOptions = _USUAL,
) -> int:
    """Where a token stands in a text. See `TransformerBridge.get_token_position`."""
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
