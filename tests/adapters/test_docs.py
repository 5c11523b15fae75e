"""What docs/adapters.md and docs/lookup.json say about the families is so."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from adapters.config import ModelConfig
from adapters.families import CLASSES
from adapters.registry import declaration_for
from tests.adapters.test_verify_all import ALIKE, OTHER, USUAL, tiny
from tools import lookup
from tools.structure import vocabulary

ROOT = Path(__file__).parents[2]


def test_the_look_up_has_every_class_that_we_support() -> None:
    rows = (
        (name, f"{file}.py")
        for file, found in CLASSES.items()
        for names in found.values()
        for name in names
    )
    declared = dict(rows)
    assert {base: file for _, base, file, _ in lookup.read()["families"]} == declared


def test_every_field_of_the_vocabulary_is_on_the_page() -> None:
    text = (ROOT / "docs" / "adapters.md").read_text()
    nouns = vocabulary()
    section = text.split("## A new family")[1].split("\n## ")[0]
    said = {field for field in re.findall(r"`(\w+\.\w+)`", section) if field.split(".")[0] in nouns}
    assert said == {f"{noun}.{field}" for noun, names in nouns.items() for field in names}


def keys_of_the_page() -> set[str]:
    """The keys of `config_values` that the page explains."""
    table = (
        (ROOT / "docs" / "adapters.md")
        .read_text()
        .split("### `config_values`")[1]
        .split("\n### ")[0]
    )
    return {
        key
        for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    }


def test_the_keys_of_config_values_are_those_that_are_used() -> None:
    keys = keys_of_the_page()
    assert keys <= {field.name for field in fields(ModelConfig)}
    used = {
        key
        for case in (*USUAL, *ALIKE, *OTHER)
        for key in declaration_for(tiny(case)).config_values
    }
    assert len(used) > 20 and used <= keys, used - keys


def test_the_vocabulary_of_declarations_does_not_grow() -> None:
    """A new odd model is a new combination of what is there; a field more has to replace one."""
    assert sum(map(len, vocabulary().values())) <= 110
