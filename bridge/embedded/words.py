"""The words of the shipped model's English, and the templates of its sentences: what `language.toml` says.

Everything is fixed and ordered: the order decides token ids, so adding a word means training again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LANGUAGE: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("language.toml").read_text(encoding="utf-8")
)
"""The whole file: words, sentences, facts, phrasings."""
_WORDS: dict[str, tuple[str, ...]] = {kind: tuple(text.split()) for kind, text in LANGUAGE["words"].items()}
_SENTENCES: dict[str, tuple[str, ...]] = {kind: tuple(templates) for kind, templates in LANGUAGE["sentences"].items()}

NAMES, PLACES, OBJECTS = _WORDS["names"], _WORDS["places"], _WORDS["objects"]
COLOURS, NUMBERS, LIST_EXTRAS = _WORDS["colours"], _WORDS["numbers"], _WORDS["list_extras"]
CONTEXTS, NAMED_CONTEXTS = _SENTENCES["contexts"], _SENTENCES["named_contexts"]
IOI_TEMPLATES, IOI_ENDINGS = _SENTENCES["ioi_templates"], _SENTENCES["ioi_endings"]
STORY_TEMPLATES, COUNT_TEMPLATES = _SENTENCES["story_templates"], _SENTENCES["count_templates"]
LIST_LEADS = _SENTENCES["list_leads"]
