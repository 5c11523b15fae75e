"""Spans of a chat: the message of each token, and whether it belongs to content, thinking or the
template.

Input: a tokenizer with a chat template, and messages. Output: `Spans`, consecutive `Span` objects;
every token is in exactly one. In order:

1. `_located` finds each text of the messages in the rendered chat. A search could find another
   occurrence, so the chat is rendered again with a mark in the text's place. Before and after the
   mark, both renderings must be equal; the text between must be the message's, except for
   whitespace that the template strips. If the template changes a text in another way, an error
   names the message. A template may drop thinking, which then has no span.
2. `_segments` assigns the template's own text between two messages. The part that also appears if
   the chat ends with the first message belongs to that message, the remainder to the next one.
3. `_sentences` splits texts after ``.``, ``?`` and ``!``, and at empty lines.
4. `_spans` assigns tokens. A token that overlaps two segments belongs to the segment of its first
   character that is not whitespace.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise, takewhile
from typing import Any, Literal, NamedTuple, TypeGuard, overload

import torch
from jaxtyping import Int
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bridge.arguments import CannotBeDoneError, TokenPositions, shown

Message = Mapping[str, Any]
#: Messages, each with a role.
Chat = Sequence[Message]
Kind = Literal["content", "thinking", "template"]


def is_chat(input: Any) -> TypeGuard[Chat]:
    """Tell whether an input is a chat: a list of messages, each with a role."""
    return (
        isinstance(input, list | tuple)
        and bool(input)
        and isinstance(input[0], Mapping)
        and "role" in input[0]
    )


def is_prompted(chat: Chat) -> bool:
    """Tell whether the chat template adds the beginning of the model's answer to a chat: unless
    the chat ends with an answer.
    """
    return chat[-1]["role"] != "assistant"


# --------------------------------------------------------------------------------------------------
# Spans.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span(TokenPositions):
    """Consecutive tokens of one message, and of one kind.

    Attributes:
        start, end: the first position, and the one after the last.
        role: the role of the message.
        turn: the number of the message in the chat; the model's answer has the next one.
        kind: ``"content"``, ``"thinking"``, or ``"template"``, for text that the template adds.
        sentence: the number of the sentence among those of its turn; None for the template's text.
        text: the text.
    """

    start: int
    end: int
    role: str
    turn: int
    kind: Kind
    sentence: int | None
    text: str

    @property
    def positions(self) -> list[int]:
        """See `TokenPositions`."""
        return list(range(self.start, self.end))


@dataclass(frozen=True)
class _ChatText:
    """The text of a chat, and its tokens.

    Attributes:
        text: the rendered chat.
        offsets: the first and the last character (exclusive) of each token.
        ids: the tokens.
        roles: the roles in the chat.
    """

    text: str
    offsets: list[tuple[int, int]]
    ids: list[int]
    roles: frozenset[str]


class Spans(TokenPositions, Sequence[Span]):
    """The spans of a chat, or some of them: a sequence of `Span`, accepted wherever positions are.

    ``spans["assistant"]`` selects a role; an index or a slice selects as in a list. Positions are
    indices into the chat's own row of tokens, `tokens`.

    Args:
        spans: the spans.
        layout: the chat's text and tokens.
    """

    def __init__(self, spans: Sequence[Span], layout: _ChatText) -> None:
        self._spans, self._layout = tuple(spans), layout

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice | str) -> Spans: ...
    def __getitem__(self, index: int | slice | str) -> Span | Spans:
        if isinstance(index, int):
            return self._spans[index]
        if isinstance(index, slice):
            return Spans(self._spans[index], self._layout)
        if index not in self._layout.roles:
            raise ValueError(
                f"no message has the role {index!r}; this chat has"
                f" {', '.join(map(repr, sorted(self._layout.roles)))}"
            )
        return self._where(lambda span: span.role == index)

    def __repr__(self) -> str:
        return f"Spans({len(self)} spans, {len(self.positions)} tokens)"

    def _where(self, keep: Callable[[Span], bool]) -> Spans:
        return Spans([span for span in self if keep(span)], self._layout)

    @property
    def positions(self) -> list[int]:
        """See `TokenPositions`."""
        return sorted({position for span in self for position in span.positions})

    @property
    def tokens(self) -> Int[Tensor, "1 pos"]:
        """Return the tokens of the whole chat, even if these are only some of its spans."""
        return torch.tensor([self._layout.ids], device="cpu")

    @property
    def text(self) -> str:
        """Return the text of the spans."""
        return "".join(span.text for span in self)

    @property
    def content(self) -> Spans:
        """Return the spans of the messages' contents."""
        return self._where(lambda span: span.kind == "content")

    @property
    def thinking(self) -> Spans:
        """Return the spans of thinking; none if the template drops it."""
        return self._where(lambda span: span.kind == "thinking")

    @property
    def template(self) -> Spans:
        """Return the spans of the template's own text."""
        return self._where(lambda span: span.kind == "template")

    def sentences(self) -> Spans:
        """Return one span for each sentence of the messages' contents and thinking."""
        return self._where(lambda span: span.sentence is not None)

    def turn(self, turn: int) -> Spans:
        """Return the spans of one message.

        Args:
            turn: its number in the chat.
        """
        return self._where(lambda span: span.turn == turn)

    def find(self, text: str) -> Spans:
        """Return a span for each occurrence of a text, with all tokens that overlap it.

        Args:
            text: the text, which may extend over adjacent spans.

        Raises:
            ValueError: it is empty, or does not occur.
        """
        if not text:
            raise ValueError("the text is empty: give what to find")
        hits = [hit for first, last in self._runs() for hit in self._hits(text, first, last)]
        if not hits:
            raise ValueError(f"{text!r} does not occur in {shown(self.text)}")
        return Spans(hits, self._layout)

    def check_has(self, span: Span) -> None:
        """Reject a span of another chat.

        Raises:
            ValueError: the text at its positions is another.
        """
        layout, ends = self._layout, (span.start, span.end)
        start, end = (_text_start(layout.offsets, at, len(layout.text)) for at in ends)
        if span.text not in layout.text[start:end]:
            raise ValueError(
                f"{shown(span.text)} does not belong to this chat, which has at its positions"
                f" {shown(layout.text[start:end])}"
            )

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each run of adjacent spans."""
        start = 0
        for index in range(1, len(self) + 1):
            if index == len(self) or self[index].start != self[index - 1].end:
                yield self[start].start, self[index - 1].end
                start = index

    def _hits(self, text: str, first: int, last: int) -> Iterator[Span]:
        """Yield the occurrences of a text among some tokens."""
        layout = self._layout
        begin = _text_start(layout.offsets, first)
        inside = layout.text[begin : _text_start(layout.offsets, last, len(layout.text))]
        for match in re.finditer(re.escape(text), inside):
            a, b = begin + match.start(), begin + match.end()
            touched = [
                position
                for position in range(first, last)
                if layout.offsets[position][0] < b and layout.offsets[position][1] > a
            ]
            if touched:
                owner = next(span for span in self if touched[0] in span.positions)
                yield replace(owner, start=touched[0], end=touched[-1] + 1, text=text)


def _text_start(offsets: Sequence[tuple[int, int]], position: int, end: int = 0) -> int:
    """Return the character at which a position's text begins. The first position also has all text
    before its token.
    """
    if not position:
        return 0
    return offsets[position][0] if position < len(offsets) else end


# --------------------------------------------------------------------------------------------------
# From messages to spans.
# --------------------------------------------------------------------------------------------------


class _Segment(NamedTuple):
    """Characters of the rendered chat that belong together; see `Span`."""

    start: int
    end: int
    role: str
    turn: int
    kind: Kind
    sentence: int | None = None


class _Piece(NamedTuple):
    """A text of a message.

    Attributes:
        text: the text.
        kind: content or thinking.
        marked: returns the message with another text in its place.
    """

    text: str
    kind: Kind
    marked: Callable[[str], Message]


def spans_of(tokenizer: PreTrainedTokenizerBase, chat: Chat, answer: str | None = None) -> Spans:
    """Return the spans of a chat; see `TransformerBridge.spans`."""
    check_has_template(tokenizer)
    if not is_chat(chat):
        raise TypeError(
            f"the chat is {shown(chat)}; it must be a list of messages, each with a role"
        )
    if not tokenizer.is_fast:
        raise CannotBeDoneError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which does not tell the characters of"
            " a token: load it with use_fast=True"
        )
    if answer is not None and not is_prompted(chat):
        raise ValueError("the chat ends with an answer already: leave answer= out")

    render = partial(_rendered, tokenizer)
    text = render(chat, is_prompted(chat))
    located = _located(render, text, chat)
    segments = list(_segments(render, text, chat, located))
    if answer:
        opened = text.rstrip().endswith("<think>")
        text += answer
        for start, kind, part in _thoughts(answer, opened):
            place = len(text) - len(answer) + start
            segments.append(_Segment(place, place + len(part), "assistant", len(chat), kind))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    layout = _ChatText(
        text,
        [*map(tuple, encoded["offset_mapping"])],
        list(encoded["input_ids"]),
        frozenset(segment.role for segment in segments),
    )
    if answer is None and layout.ids != chat_ids(tokenizer, chat):
        raise CannotBeDoneError(
            f"{type(tokenizer).__name__} makes other tokens of the rendered chat than of the chat"
            " itself, so its spans are not known"
        )
    return Spans([*_spans(layout, [*_sentences(text, segments)])], layout)


def check_has_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Reject a tokenizer without a chat template.

    Raises:
        CannotBeDoneError: it has none.
    """
    if not tokenizer.chat_template:
        raise CannotBeDoneError(
            f"{type(tokenizer).__name__} has no chat template, so it makes no tokens of a chat:"
            " give a text, or set bridge.tokenizer.chat_template"
        )


def _rendered(tokenizer: PreTrainedTokenizerBase, chat: Chat, prompt: bool) -> str:
    """Return a chat as text.

    Args:
        tokenizer: the tokenizer, which has a chat template.
        chat: the chat.
        prompt: whether to add the prefix of the model's answer.
    """
    text = tokenizer.apply_chat_template(
        [*map(dict, chat)], tokenize=False, add_generation_prompt=prompt
    )
    assert isinstance(text, str)
    return text


def chat_ids(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> list[int]:
    """Return the tokens of a chat, with the prefix of the model's answer unless the chat
    ends with one.

    Raises:
        CannotBeDoneError: the tokenizer has no chat template.
    """
    check_has_template(tokenizer)
    ids = tokenizer.apply_chat_template(
        [*map(dict, chat)], add_generation_prompt=is_prompted(chat), return_dict=False
    )
    return list(ids)


#: The fields of messages with thinking, as chat templates name them.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def _with_field(message: Message, name: str, text: str) -> Message:
    """Return a message with another text in a field."""
    return {**message, name: text}


def pieces_of(message: Message) -> Iterator[_Piece]:
    """Yield the texts of a message, in its fields and in the parts of its content."""
    for name in _THOUGHTS:
        if isinstance(message.get(name), str):
            yield _Piece(message[name], "thinking", partial(_with_field, message, name))
    content = message.get("content")
    if isinstance(content, str):
        yield from _in_text(message, content, partial(_with_field, message, "content"))
    elif isinstance(content, list | tuple):
        for index, part in enumerate(content):
            for name in ("text", "thinking"):
                if isinstance(part, Mapping) and isinstance(part.get(name), str):

                    def marked(new: str, index: int = index, name: str = name) -> Message:
                        new_part = {**content[index], name: new}
                        return {
                            **message,
                            "content": [*content[:index], new_part, *content[index + 1 :]],
                        }

                    kind: Kind = "thinking" if name == "thinking" else "content"
                    yield _Piece(part[name], kind, marked)


def _in_text(message: Message, text: str, put: Callable[[str], Message]) -> Iterator[_Piece]:
    """Yield the parts of a message's content. An answer may contain thinking between tags."""
    if message["role"] != "assistant":
        yield _Piece(text, "content", put)
        return
    for start, kind, part in _thoughts(text):
        if kind != "template":

            def marked(new: str, start: int = start, end: int = start + len(part)) -> Message:
                return put(text[:start] + new + text[end:])

            yield _Piece(part, kind, marked)


def _thoughts(text: str, opened: bool = False) -> Iterator[tuple[int, Kind, str]]:
    """Yield the parts of an answer (thinking, the tags around it, content), each with its start.

    Args:
        text: the answer.
        opened: whether the thinking has begun before it.
    """
    parts = re.split("(</?think>)", text)
    start = 0
    for index, part in enumerate(parts):
        closes = parts[index + 1 : index + 2] == ["</think>"]
        opens = parts[index - 1] == "<think>" if index else opened
        kind: Kind = "template" if index % 2 else "thinking" if closes or opens else "content"
        if part:
            yield start, kind, part
        start += len(part)


class _Located(NamedTuple):
    """A text of a message in the rendered chat.

    Attributes:
        start, end: its first character, and the one after the last.
        turn: the number of the message.
        kind: content or thinking.
        chat: the chat with a mark in its place.
        mark: that mark.
    """

    start: int
    end: int
    turn: int
    kind: Kind
    chat: Chat
    mark: str


def _located(render: Callable[[Chat, bool], str], text: str, chat: Chat) -> list[_Located]:
    """Locate the texts of the messages in the rendered chat; return them in the chat's order.

    Raises:
        CannotBeDoneError: the template changes one.
    """
    mark = next(chr(code) for code in count(0xE000) if chr(code) not in text)
    located: list[_Located] = []
    for turn, message in enumerate(chat):
        for piece in pieces_of(message):
            if not piece.text:
                continue
            marked = [*chat[:turn], piece.marked(mark), *chat[turn + 1 :]]
            around = render(marked, is_prompted(chat)).split(mark)
            rendered = _between(text, around, piece.text)
            dropped = piece.kind == "thinking" and around == [text]
            if rendered is None and not dropped and piece.text.strip():
                raise CannotBeDoneError(
                    f"the chat template changes the {piece.kind} of message {turn}"
                    f" ({message['role']}), {shown(piece.text)}, or other text because of it, so"
                    " its tokens cannot be told: change the message, or the template"
                )
            start = 0
            for before in around[:-1] if rendered else ():
                start += len(before)
                end = start + len(rendered or "")
                located.append(_Located(start, end, turn, piece.kind, marked, mark))
                start = end
    return sorted(located, key=lambda each: each.start)


def _between(text: str, around: Sequence[str], piece: str) -> str | None:
    """Return a message's text as it is rendered; None if it is not there, or changed.

    Args:
        text: the rendered chat.
        around: the rendered chat without the text, split where the text was.
        piece: the text; the template may strip its whitespace.
    """
    times = len(around) - 1
    if not times:
        return None
    start, length = len(around[0]), (len(text) - sum(map(len, around))) // times
    rendered = text[start : start + length] if length > 0 else ""
    stripped = rendered in piece and rendered.strip() == piece.strip()
    return rendered if stripped and rendered.join(around) == text else None


def _segments(
    render: Callable[[Chat, bool], str], text: str, chat: Chat, located: Sequence[_Located]
) -> Iterator[_Segment]:
    """Yield the segments of the rendered chat, including the template's own text."""
    known = {piece.turn for piece in located}
    end = _Located(len(text), len(text), len(chat), "content", chat, "")
    before = _Located(0, 0, -1, "content", chat, "")
    for piece in [*located, end]:
        gap, done = text[before.end : piece.start], 0
        for turn in range(max(0, before.turn), piece.turn):
            if turn == before.turn or turn not in known:
                same = _common(_tail(render, before, turn), gap)
                if same > done:
                    start = before.end
                    yield _template(chat, turn, start + done, start + same)
                    done = same
        owner = min(piece.turn, len(chat) - (not is_prompted(chat)))
        if done < len(gap):
            yield _template(chat, owner, before.end + done, piece.start)
        if piece is not end:
            role = str(chat[piece.turn]["role"])
            yield _Segment(piece.start, piece.end, role, piece.turn, piece.kind)
        before = piece


def _template(chat: Chat, turn: int, start: int, end: int) -> _Segment:
    """Return a segment of the template's text, of a message or of the model's answer."""
    role = str(chat[turn]["role"]) if turn < len(chat) else "assistant"
    return _Segment(start, end, role, turn, "template")


def _tail(render: Callable[[Chat, bool], str], piece: _Located, turn: int) -> str:
    """Render the chat up to a message, and return the text after a piece; empty if the template
    does not accept such a chat.
    """
    try:
        rendered = render(piece.chat[: turn + 1], False)
    except TemplateError:
        return ""
    return rendered.rpartition(piece.mark)[2] if piece.mark else rendered


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


#: The minimum length of a sentence in characters; a shorter one is joined with the next (at the
#: end of a text, with the previous one).
_LEAST = 10
#: The end of a sentence, with the whitespace after it.
_END = re.compile(r"(?<=[.?!])\s+|\n\s*\n\s*")


def _sentences(text: str, segments: Sequence[_Segment]) -> Iterator[_Segment]:
    """Yield the segments, with contents and thinking cut into numbered sentences."""
    number = dict.fromkeys((segment.turn for segment in segments), 0)
    for segment in segments:
        if segment.kind == "template":
            yield segment
            continue
        for start, end in pairwise(_cuts(text, segment.start, segment.end)):
            yield segment._replace(start=start, end=end, sentence=number[segment.turn])
            number[segment.turn] += 1


def _cuts(text: str, start: int, end: int) -> list[int]:
    """Return the starts of the sentences of a text, and its end."""
    cuts = [start]
    for match in _END.finditer(text, start, end):
        if len(text[cuts[-1] : match.end()].strip()) >= _LEAST:
            cuts.append(match.end())
    if len(cuts) > 1 and len(text[cuts[-1] : end].strip()) < _LEAST:
        cuts.pop()
    return [*cuts, end]


def _spans(layout: _ChatText, segments: Sequence[_Segment]) -> Iterator[Span]:
    """Yield the spans of the tokens."""
    text, offsets = layout.text, layout.offsets
    starts = [segment.start for segment in segments]

    def owner(token: tuple[int, int]) -> int:
        start, end = token
        stripped = len(text[start:end].lstrip())
        return bisect_right(starts, end - stripped if stripped else start) - 1

    owners = [owner(token) for token in offsets]
    cuts = [0, *(i for i in range(1, len(owners)) if owners[i] != owners[i - 1]), len(owners)]
    for start, end in pairwise(cuts):
        segment = segments[owners[start]]
        part = text[_text_start(offsets, start) : _text_start(offsets, end, len(text))]
        yield Span(start, end, segment.role, segment.turn, segment.kind, segment.sentence, part)
