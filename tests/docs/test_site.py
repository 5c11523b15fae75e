"""The built site (`make docs`): no dead link, nothing from elsewhere, and every page quiet in a
browser.
"""

import ast
import json
import re
import time

import pytest

from tests.docs.site import ROOT, SITE, Page, outside
from tests.docs.test_how_to import TERMS
from tests.pictures.browser import Browser
from tools import lookup

pytestmark = pytest.mark.pages


@pytest.fixture(scope="module")
def pages():
    found = {path.resolve(): Page(path) for path in SITE.rglob("*.html")}
    assert len(found) > 20, f"{SITE} is not built: make docs"
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def test_no_link_is_dead(pages):
    dead, followed = [], 0
    for page in pages.values():
        for link in page.links:
            if outside(link):
                continue
            path, anchor = page.target(link)
            followed += 1
            if not path.exists():
                dead.append(f"{page.path.name}: {link}")
            elif anchor and path in pages and anchor not in pages[path].anchors:
                dead.append(f"{page.path.name}: {link} (no such anchor)")
    assert not dead
    assert followed > 1000


def test_nothing_is_loaded_from_elsewhere(pages):
    for page in pages.values():
        assert [link for link in page.loads if outside(link)] == []
        for link in page.loads:
            if not link.startswith("data:"):
                assert page.target(link)[0].exists(), f"{page.path.name} loads {link}"
    for sheet in SITE.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), (
            sheet
        )


def test_every_page_of_docs_is_there(pages):
    for source in (ROOT / "docs").glob("*.md"):
        assert (SITE / f"{source.stem}.html").resolve() in pages


@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "examples").glob("learn_smollm_*")), ids=lambda path: path.stem
)
def test_a_page_on_a_real_model_shows_its_stored_pictures(pages, notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    stored = [
        "".join(one["data"]["image/png"]) for one in outputs if "image/png" in one.get("data", {})
    ]
    loads = pages[(SITE / f"{notebook.stem}.html").resolve()].loads
    shown = [link.partition("base64,")[2] for link in loads if link.startswith("data:image/png")]
    assert shown == [png.strip() for png in stored] and shown


def test_every_page_is_quiet_in_a_browser(browser, pages):
    for path in pages:
        seen = browser.open(path)
        assert seen.console == [] and seen.errors == [], path
        assert all(
            request.startswith((SITE.resolve().as_uri(), "data:")) for request in seen.requests
        ), path


@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (1280, True), (640, False), (640, True)]
)
@pytest.mark.parametrize("name", ["pictures", "index"])
def test_pages_show_their_pictures(browser, pages, name, width, dark):
    page = SITE / f"{name}.html"
    browser.open(page, width, dark=dark)
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), flags=re.DOTALL
    )
    last = [ast.unparse(ast.parse(block).body[-1]) for block in blocks]
    wanted = sum(line.startswith("pictures.") or ".draw(" in line for line in last)
    grounds = browser.evaluate(
        "[...document.querySelectorAll('.bridge-picture > div > * svg.marks, .bridge-picture"
        " svg.marks, .bridge-picture canvas.marks')].map((s) =>"
        " getComputedStyle(s).backgroundColor)"
    )
    assert len(grounds) == wanted >= 1
    assert set(grounds) <= {"rgb(19, 20, 22)" if dark else "rgb(255, 255, 255)", "rgba(0, 0, 0, 0)"}
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def looked_up(browser, text):
    """What the look-up page shows of a typed text."""
    return browser.evaluate(
        f"""(() => {{
            const box = document.querySelector("#lookup input");
            box.value = {json.dumps(text)};
            box.dispatchEvent(new Event("input"));
            return document.querySelector("#lookup [role=status]").innerText;
        }})()"""
    )


def test_models_and_names_are_looked_up(browser, pages):
    browser.open(SITE / "lookup.html", 640)
    for text, shown in {
        "llama": "LlamaForCausalLM",
        "Qwen3ForCausalLM": "declared in adapters/families/llama.py",
        "meta-llama/Llama-3.1-8B": "LlamaForCausalLM",
        "Pythia": "GPTNeoXForCausalLM",
        "blt": "no tiny instance",
        "deepseek_v4": "it cannot start or stop at a layer: its blocks carry 4 streams",
        "get_params": "tl_parameters(): zeros are not made up for what is missing",
        "xyzzy": "No model type, class, family or name here",
    }.items():
        assert shown in looked_up(browser, text), text
        assert browser.evaluate("document.documentElement.scrollWidth") <= 640, text
    for row in lookup.models(lookup.read()):
        assert row["class"] == "–" or row["class"] in looked_up(browser, row["class"]), row
    assert browser.seen().errors == []


def test_code_has_buttons_that_copy_it(browser, pages):
    browser.open(SITE / "guide.html")
    blocks, buttons = (
        browser.evaluate(f"document.querySelectorAll('div.highlight {what}').length")
        for what in ("pre", "button.copybtn")
    )
    assert blocks == buttons > 5


def test_the_gallery_is_small():
    page = (SITE / "pictures.html").stat().st_size
    assert page + (SITE / "_static" / "vega.js").stat().st_size < 5_000_000


def first_result(browser, term):
    """Return the address that the site's search lists first."""
    browser.open(SITE / "search.html")
    browser.evaluate(f"Search.performSearch({json.dumps(term)})")
    until = time.monotonic() + 30
    while time.monotonic() < until:
        address = browser.evaluate(
            "document.querySelector('#search-results li a')?.getAttribute('href') ?? ''"
        )
        if address:
            return address
        time.sleep(0.05)
    raise AssertionError(f"no result for {term!r}")


@pytest.mark.parametrize(("term", "page"), TERMS.items())
def test_the_search_finds_a_techniques_page_first(browser, pages, term, page):
    assert first_result(browser, term).startswith(f"how_to_{page}.html")
