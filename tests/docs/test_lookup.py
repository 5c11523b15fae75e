"""docs/lookup.json is whole; the numbers in the README and in docs/properties.md are its own."""

import re

import pytest

from adapters.families import CLASSES
from benchmarks.models import listed_base
from benchmarks.properties import sentence
from tests.docs.site import ROOT
from tests.every_type.table import PROPERTIES
from tools import lookup

DATA = lookup.read()
MODELS = lookup.models(DATA)


def counts(task):
    return lookup.counts(row for row in MODELS if row["task"] == task)


def test_the_tables_of_the_page_are_those_of_the_data():
    page = lookup.PAGE.read_text(encoding="utf-8")
    for name, lines in lookup.tables(DATA).items():
        stored = page.partition(f"<!-- {name}: written by tools/lookup.py -->\n")[2]
        assert stored.partition("<!-- end -->")[0].strip() == "\n".join(lines), (
            "python -m tools.lookup"
        )


def test_the_readme_counts_the_same_types():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for task, words in {
        "causal": "{} of {} causal",
        "masked": "{} of {} masked",
        "seq2seq": "{} of {} sequence-to-sequence",
        "image_text": "{} of {} image-text types",
    }.items():
        count = counts(task)
        assert words.format(count["full"], count["types"]) in text, task


def test_every_property_has_a_sign_and_its_sentence():
    assert [name for name, _ in DATA["properties"]] == list(PROPERTIES)
    assert all(says == sentence(PROPERTIES[name]) for name, says in DATA["properties"])
    signs = {sign for _, of_type in DATA["holds"].values() for sign in of_type}
    assert signs <= set(lookup.SIGNS.values()) - {"W", "C"}
    assert {len(of_type) for _, of_type in DATA["holds"].values()} == {len(PROPERTIES)}


@pytest.mark.parametrize(("section", "sign"), [("refused", "r"), ("part", "p")])
def test_every_refusal_has_a_reason(section, sign):
    """Of the type by name, or one whose other types were not written down."""
    for name, (_, signs) in DATA["holds"].items():
        model_type = name.partition(":")[2]
        for i, title in enumerate(PROPERTIES):
            possible = [
                says
                for names, says, count, types in DATA[section]
                if {title, "the model"} & {*names} and (model_type in types or count > len(types))
            ]
            assert signs[i] != sign or possible, f"{name}: {title}"


def test_rows_name_what_there_is():
    assert {row["task"] for row in MODELS} == {*DATA["tasks"]}
    families = {base for _, base, _, _ in DATA["families"]}
    assert families == {
        name for by_family in CLASSES.values() for names in by_family.values() for name in names
    }
    for row in MODELS:
        assert (row["family"] in families) == (row["adapter"] == "declared"), row
        assert row["family"] in ("", *families), row
        assert set(row["processed"]) <= {*map(str, range(len(lookup.TRANSFORMS))), "–"}, row
    assert listed_base("MistralForCausalLM") == "MistralPreTrainedModel"


def test_links_lead_to_pages():
    links = re.findall(r"\]\(([\w/]+\.md)", lookup.DATA.read_text(encoding="utf-8"))
    assert links and all((ROOT / "docs" / link).exists() for link in links)


def test_the_navigation_has_four_groups_of_at_most_ten():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    groups = re.findall(
        r"```{toctree}\n:hidden:\n:caption: ([^\n]+)\n\n(.+?)\n```", text, re.DOTALL
    )
    assert [title for title, _ in groups] == ["Tutorials", "How-to", "Explanation", "Reference"]
    assert all(len(pages.splitlines()) <= 10 for _, pages in groups)
