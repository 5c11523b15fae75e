"""docs/methods.md has a row for each declared method, and differences that were measured."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.methods import by_hand, packages  # noqa: F401 - they declare rows
from benchmarks.methods.table import METHODS, relative

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: Method, page, paper, link, code, model, difference.
ROW = re.compile(
    r"\| \[(.+?)\]\((.+?)\) \| \[(.+?)\]\((.+?)\) \| (.+?) \| (.+?) \| (\d(?:e[+-]\d+)?) \|"
)


def rows():
    page = (DOCS / "methods.md").read_text(encoding="utf-8")
    table = page.partition("<!-- measured: methods -->\n")[2].partition("<!-- end -->")[0]
    lines = table.splitlines()[2:]
    matches = [ROW.fullmatch(line) for line in lines]
    assert all(matches), "every line is a row"
    return [match.groups() for match in matches]


def test_one_row_for_each_method():
    declared = sorted(METHODS, key=lambda method: method.page)
    assert len({method.name for method in declared}) == len(declared)
    expected = [(m.name, m.page, m.paper, m.link, m.model) for m in declared]
    assert [(*row[:4], row[5]) for row in rows()] == expected
    for method, row in zip(declared, rows(), strict=True):
        assert row[4].startswith(method.code)


def test_pages_exist():
    for method in METHODS:
        assert (DOCS / method.page.partition("#")[0]).exists()


def test_differences_are_small():
    small = [row for row in rows() if float(row[6]) <= 1e-5]
    assert len(small) >= 25
    assert small == rows(), "a larger difference needs its reason on the page"


def test_a_difference_is_relative_and_of_something():
    one, other = torch.tensor([1.0, torch.nan]), torch.tensor([4.0, torch.nan])
    assert relative(one, other) == 0.75
    for wrong in (torch.tensor([1.0]), torch.tensor([1.0, 2.0])):
        with pytest.raises(ValueError, match="NaN differs"):
            relative(one, wrong)
    with pytest.raises(ValueError, match="nothing is compared"):
        relative(torch.ones(2), torch.zeros(2))
