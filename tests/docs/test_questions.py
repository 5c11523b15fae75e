"""The ten questions of docs/questions.md are answered, each within two clicks from the first
page.
"""

import re

import pytest

from tests.docs.site import ROOT

DOCS = ROOT / "docs"
ROWS = re.findall(
    r"^\| (.*\?) \| (.*) \|$", (DOCS / "questions.md").read_text(encoding="utf-8"), re.MULTILINE
)


def links(page):
    return set(re.findall(r"\]\(([\w./]+\.md)", (DOCS / page).read_text(encoding="utf-8")))


def test_there_are_ten():
    assert len(ROWS) == 10 and len(dict(ROWS)) == 10


@pytest.mark.parametrize(("question", "answer"), ROWS, ids=[question for question, _ in ROWS])
def test_the_answer_is_two_clicks_away(question, answer):
    pages = re.findall(r"\]\(([\w.]+\.md)\)", answer)
    assert pages, question
    first = links("index.md")
    reached = first | {link for page in first if (DOCS / page).exists() for link in links(page)}
    assert "questions.md" in first and set(pages) <= reached
    said = "".join((DOCS / page).read_text(encoding="utf-8") for page in pages)
    for code in re.findall(r"`([^`]+)`", answer):  # the page has what the answer names
        for name in re.findall(r"[A-Za-z_]{6,}", code):
            assert name in said, f"{question} {name} is not on {pages}"
