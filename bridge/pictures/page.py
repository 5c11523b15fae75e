"""Pages that tell something in words and pictures."""

from __future__ import annotations

import html
from collections.abc import Iterable

from bridge.pictures.embedding import document
from bridge.pictures.picture import Picture


def page(title: str, parts: Iterable[str | Picture]) -> str:
    """One HTML page of words and pictures that needs nothing but itself.

    Args:
        title: its title and first heading.
        parts: in order, pictures and paragraphs of text. A text that starts with ``## `` is a heading.

    Returns:
        The page, to be written to a file.

    Raises:
        TypeError: a part that is neither a text nor a picture.

    Example:
        >>> import torch
        >>> from bridge import pictures
        >>> picture = pictures.heads(torch.tensor([[1.0, -1.0]]))
        >>> text = pictures.page("Two heads", ["## One layer", "They differ.", picture])
        >>> text.startswith("<!doctype html>"), "<h2>One layer</h2>" in text
        (True, True)
    """
    return document(title, "\n".join([f"<h1>{html.escape(title)}</h1>", *map(_part, parts)]))


def _part(part: str | Picture) -> str:
    if isinstance(part, Picture):
        return part.fragment()
    if not isinstance(part, str):
        raise TypeError(f"a part of a page is {type(part).__name__}; it must be a text or a picture")
    if part.startswith("## "):
        return f"<h2>{html.escape(part[3:])}</h2>"
    return f"<p>{html.escape(part)}</p>"
