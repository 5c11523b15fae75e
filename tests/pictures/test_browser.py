"""Every picture in a real browser: it is drawn, says nothing on the console, fetches nothing, and
answers the mouse.
"""

import itertools
import json
import time

import pytest
import torch

from bridge import TransformerBridge, pictures
from bridge.circuits import edge_attribution, edge_effects
from bridge.cli.story import story
from bridge.tasks import embedded_pairs
from tests.pictures.large import LAYERS, TOKENS, all_pictures

pytestmark = pytest.mark.pages
SIZES = [(1280, False), (1280, True), (640, False), (640, True)]
NAMES = list(all_pictures())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    return {name: picture.save(folder / f"{name}.html") for name, picture in all_pictures().items()}


def clean(seen, page):
    assert seen.console == [] and seen.errors == []
    assert seen.requests == [page.resolve().as_uri()]  # itself, and nothing else


INSIDE = """(() => {
  const svg = document.querySelector('svg.marks, canvas.marks'), box = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].filter((t) => t.textContent && t.style.opacity !== '0');
  const outside = texts.filter((t) => {
    const r = t.getBoundingClientRect();
    return r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1;
  }).map((t) => t.textContent);
  const small = texts.filter((t) => parseFloat(getComputedStyle(t).fontSize) < 10).map((t) => t.textContent);
  return { kind: svg.tagName, width: box.width, height: box.height, outside, small, texts: texts.length,
    marks: svg.querySelectorAll('[aria-roledescription]').length,
    page: document.documentElement.scrollWidth, ground: getComputedStyle(document.body).backgroundColor };
})()"""


@pytest.mark.parametrize(
    ("width", "dark"), SIZES, ids=[f"{w}-{'dark' if d else 'light'}" for w, d in SIZES]
)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_drawn(browser, saved, name, width, dark):
    clean(browser.open(saved[name], width, dark=dark), saved[name])
    found = browser.evaluate(INSIDE)
    assert found["outside"] == [] and found["small"] == []
    assert found["width"] > 200 and found["height"] > 100
    assert found["page"] <= width  # what is wider scrolls in its own place
    assert found["ground"] == ("rgb(19, 20, 22)" if dark else "rgb(255, 255, 255)")
    if width == 1280:
        assert found["width"] <= 1232, "wider than the page"
    if found["kind"] == "svg":
        assert found["texts"] > 10 and found["marks"] > 12


def test_attention_answers_the_mouse(browser, saved):
    browser.open(saved["attention"])
    cells = browser.evaluate("""[...document.querySelectorAll('.mark-rect path')].map((c) => {
        const r = c.getBoundingClientRect();
        return [c.getAttribute('aria-label'), r.left + r.width / 2, r.top + r.height / 2];
    })""")
    label, x, y = next(
        cell for cell in cells if "query: ·bottle" in cell[0] and "key: ·Mary" in cell[0]
    )
    said = browser.hover(x, y)
    for line in ("query", "·bottle", "key", "·Mary", "weight", "panel", "head 0"):
        assert line in said, (said, label)


def test_the_ground_may_change_under_a_picture(browser, saved):
    browser.open(saved["heads"])
    read = "getComputedStyle(document.querySelector('svg.marks')).backgroundColor"
    assert browser.evaluate(read) == "rgb(255, 255, 255)"
    browser.send(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    wait = f"""new Promise((done) => {{
        const t = setInterval(() => {{ if ({read} === '%s') {{ clearInterval(t); done(1); }} }}, 20);
    }})"""
    browser.evaluate(wait % "rgb(19, 20, 22)")
    browser.evaluate(
        "document.body.dataset.theme = 'light'"
    )  # as Furo does when the reader chooses
    browser.evaluate(wait % "rgb(255, 255, 255)")


def test_panels_wrap_where_a_page_is_narrow(browser, saved):
    columns = (
        "new Set([...document.querySelectorAll('.role-scope .mark-rect')]"
        ".map((g) => Math.round(g.getBoundingClientRect().left))).size"
    )
    browser.open(saved["attention"], 1280)
    assert browser.evaluate(columns) == 4
    browser.open(saved["attention"], 640)
    assert browser.evaluate(columns) == 2
    assert (
        browser.evaluate("document.querySelector('svg.marks').getBoundingClientRect().width") <= 640
    )


def test_panels_of_pictures_put_together_wrap_too(browser, tmp_path):
    titles = [f"panel {i}" for i in range(3)]
    wide = pictures.patching(
        torch.rand(3, 4, 14), "layer pos", list(map(str, range(14))), panels=titles
    )
    pictures.together([wide, pictures.heads(torch.eye(3))], "Both").save(tmp_path / "both.html")
    for width in (1280, 640):
        browser.open(tmp_path / "both.html", width)
        assert (
            browser.evaluate("document.querySelector('svg.marks').getBoundingClientRect().width")
            <= width
        )


def test_the_lens_shows_its_words(browser, saved):
    browser.open(saved["lens"])
    words = browser.evaluate(
        "[...document.querySelectorAll('.mark-text text')].map((t) => t.textContent)"
    )
    assert sum(len(word) > 0 for word in words) >= (LAYERS + 1) * len(TOKENS)


def test_outputs_of_a_notebook_share_one_library(browser, tmp_path, monkeypatch):
    # A session's first output is another than the later ones; other tests have had theirs.
    monkeypatch.setattr("bridge.pictures.pictures._outputs", itertools.count())
    one, other = (
        all_pictures()[name]._repr_mimebundle_()["text/html"] for name in ("heads", "circuit")
    )
    page = tmp_path / "notebook.html"
    head = (
        '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><body'
        ' data-jp-theme-light="false">'
    )
    for body in (one + other, other + one):
        page.write_text(head + body)
        seen = browser.open(page)
        assert seen.console == [] and seen.errors == []
        grounds = (
            "[...document.querySelectorAll('svg.marks')].map((s) =>"
            " getComputedStyle(s).backgroundColor)"
        )
        assert browser.evaluate(grounds) == ["rgb(19, 20, 22)"] * 2
        assert browser.evaluate("document.querySelectorAll('.bridge-picture img').length") == 0
    page.write_text(
        head.replace("<body", "<svg class='marks'></svg><body") + other
    )  # without the library: a still picture
    browser.send("Page.navigate", url=page.resolve().as_uri())
    time.sleep(1)
    seen = browser.seen()
    assert seen.console == [] and seen.errors == []
    assert browser.evaluate("document.querySelector('.bridge-picture img').naturalWidth") > 200


def test_a_token_that_is_pointed_at_lights_what_it_attends_to(browser, tmp_path):
    words = ["<bos>", " Mary", " and", " John"]
    pattern = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0)).tril()
    page = tmp_path / "text.html"
    pictures.attention_text(pattern, words).save(page)
    clean(browser.open(page, 390), page)

    def lit():
        labels = browser.evaluate(
            "[...document.querySelectorAll('.mark-rect path')].map((c) => c.ariaLabel || '')"
        )
        found = [
            label.split("mean weight: ")[1].split(";")[0] for label in labels if "key: " in label
        ]
        return [float(text) for text in found]

    assert lit() == pytest.approx(
        pattern[:, 3].mean(0).tolist(), rel=2e-2, abs=1e-3
    )  # of the last token
    x, y = browser.evaluate("""(() => {
        const found = [...document.querySelectorAll('text')].find((t) => t.textContent === '·and');
        const box = found.getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2];
    })()""")
    browser.hover(x, y)
    time.sleep(0.5)
    assert lit() == pytest.approx(pattern[:, 2].mean(0).tolist(), rel=2e-2, abs=1e-3)
    browser.click("head 1")
    assert lit() == pytest.approx(pattern[[0, 2], 2].mean(0).tolist(), rel=2e-2, abs=1e-3)
    browser.click("head 0")
    assert lit() == pytest.approx(pattern[2, 2].tolist(), rel=2e-2, abs=1e-3)
    browser.click("head 1")
    assert lit() == pytest.approx(pattern[1:, 2].mean(0).tolist(), rel=2e-2, abs=1e-3)


def test_a_page_of_all_of_them(browser, tmp_path):
    page = tmp_path / "all.html"
    page.write_text(pictures.page("All", all_pictures().values()))
    assert page.stat().st_size < 5_000_000
    clean(browser.open(page), page)
    assert browser.evaluate("document.querySelectorAll('svg.marks, canvas.marks').length") == len(
        NAMES
    )


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_the_report_of_the_demo(browser, tmp_path, width, dark):
    page = tmp_path / "story.html"
    page.write_text(story(), encoding="utf-8")
    clean(browser.open(page, width, dark=dark), page)
    assert browser.evaluate("document.querySelectorAll('svg.marks').length") == 6
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_what_is_fetched_and_what_fails_would_be_seen(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        '<!doctype html><script src="missing.js"></script><script>console.warn("careful");'
        " nothing.there</script>"
    )
    seen = browser.open(page)
    assert json.dumps(seen.requests).count("missing.js") == 1
    assert seen.console == ["warning: careful"] and len(seen.errors) >= 2


def test_the_slider_of_a_circuit_hides_weak_edges(browser, tmp_path):
    edges = [
        ("embed", "L0H1.v", -4.0),
        ("L0H1", "logits", -3.0),
        ("embed", "L1MLP", 1.0),
        ("L1MLP", "logits", -1.0),
    ]
    columns = {
        name: column for column, name in enumerate(("embed", "L0H1.v", "L0H1", "L1MLP", "logits"))
    }
    page = tmp_path / "circuit.html"
    nodes = {name: pictures.CircuitNode(column=column) for name, column in columns.items()}
    pictures.circuit(edges, nodes=nodes, joins=[("L0H1.v", "L0H1")], supports="negative").save(page)
    clean(browser.open(page, 390), page)
    shown = "[...document.querySelectorAll('.mark-text text')].map((t) => t.textContent)"
    lines = "document.querySelectorAll('.mark-line path').length"
    assert {"L1MLP", "L0H1.v", "L0H1"} < set(browser.evaluate(shown)) and browser.evaluate(
        lines
    ) == 5
    browser.evaluate("""new Promise((done) => {
        const slider = document.querySelector('input[type=range]');
        slider.value = 2;
        slider.dispatchEvent(new Event('input'));
        setTimeout(done, 500);
    })""")
    assert {"L1MLP", "L0H1.v", "L0H1"} < set(browser.evaluate(shown))
    assert browser.evaluate(lines) == 3


def test_a_wide_graph_is_shrunk(browser, tmp_path):
    edges = [("embed", f"L0H{i}", 1.0 + i) for i in range(12)]
    page = pictures.circuit(edges).save(tmp_path / "circuit.html")
    clean(browser.open(page, 600), page)
    right = browser.evaluate("document.querySelector('svg.marks').getBoundingClientRect().right")
    assert right <= 600


def test_a_click_on_a_node_shows_its_edges_its_effect_and_its_pattern(browser, tmp_path):
    bridge = TransformerBridge.boot_embedded()
    pairs = embedded_pairs(bridge, "ioi", 4)
    metric = pairs.metric()
    circuit = edge_attribution(bridge, pairs.clean, pairs.corrupted, metric).greedy(24)
    direct = edge_effects(bridge, pairs.clean, pairs.corrupted, metric, verbose=False)
    page = tmp_path / "circuit.html"
    circuit.draw(bridge, pairs.clean, pairs.corrupted, metric).save(page)
    clean(browser.open(page), page)
    head = next(
        name
        for name in circuit.nodes
        if "H" in name and any(s == name for s, _, _ in circuit.edges)
    )
    _, cache = bridge.run_with_cache(pairs.clean[:1])
    layer, number = map(int, head[1:].split("H"))
    pattern = cache["pattern", layer][0, number]
    browser.click(head)
    effect = f"direct effect on the logit difference: {direct[f'{head}->logits']:+.3g}"
    labels = browser.evaluate(
        "[...document.querySelectorAll('.mark-text text')].map((t) => t.getAttribute('aria-label'))"
    )
    assert any(f"node: {head}; {effect}" in str(label) for label in labels), labels
    near = {head, *(f"{head}.{part}" for part in "qkv")}
    wanted = {f"{s} to {r}" for s, r, _ in circuit.edges if {s, r} & near}
    bright = (
        "[...document.querySelectorAll('.mark-line path')]"
        ".filter((p) => (p.getAttribute('aria-label') || '').includes('from') "
        "&& p.getAttribute('stroke-opacity') >= 0.3).length"
    )
    assert browser.evaluate(bright) == len(wanted)
    cells = browser.evaluate(
        "[...document.querySelectorAll('.mark-rect path')].map((c) => c.getAttribute('aria-label'))"
        ".filter((label) => label.includes('query'))"
    )
    allowed = torch.ones_like(pattern).tril().bool()  # what the mask forbids is blank
    for text, right in zip(cells, pattern[allowed].tolist(), strict=True):
        shown = float(text.split("weight: ")[1].split(";")[0].replace("−", "-"))
        assert abs(shown - right) <= 5e-3 * abs(right) + 1e-9
    browser.click("embed")
    cells = "[...document.querySelectorAll('.mark-rect path')].filter((c) => (c.getAttribute('aria-label') || '').includes('query'))"
    assert browser.evaluate(f"{cells}.length") == 0  # no head, so no pattern
    x, y = browser.evaluate("""(() => {
        const line = [...document.querySelectorAll('.mark-line path[aria-label*="from"]')].pop(), middle = 0.4 * line.getTotalLength();
        const at = line.getPointAtLength(middle).matrixTransform(line.getScreenCTM());
        return [at.x, at.y];
    })()""")
    said = browser.hover(x, y)
    assert "from" in said and "to" in said and "change" in said, said
