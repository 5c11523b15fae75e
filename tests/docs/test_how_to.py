"""A page for each technique: found by the field's name, of one screen or two, with code that runs
and links to the papers.
"""

import re

import pytest

from tests.docs.site import ROOT

DOCS = ROOT / "docs"
#: The field's names, and the page each of them leads to.
TERMS = {
    "activation patching": "activation_patching",
    "interchange intervention": "activation_patching",
    "attribution patching": "attribution_patching",
    "gradient rule": "gradient_rules",
    "relevance propagation": "gradient_rules",
    "path patching": "path_patching",
    "direct logit attribution": "direct_logit_attribution",
    "logit lens": "logit_lens",
    "tuned lens": "logit_lens",
    "Jacobian lens": "jacobian_lens",
    "contrastive activation addition": "contrastive_activation_addition",
    "steering vector": "contrastive_activation_addition",
    "refusal ablation": "refusal_ablation",
    "abliteration": "refusal_ablation",
    "function vector": "function_vectors",
    "task vector": "function_vectors",
    "causal tracing": "causal_tracing",
    "thought anchor": "thought_anchors",
    "probing": "probing",
    "patchscope": "patchscopes",
    "max-activating examples": "max_activating_examples",
    "SAE features": "sae_features",
    "sparse autoencoder": "sae_features",
    "attribution graph": "attribution_graphs",
    "weight component": "weight_components",
    "parameter decomposition": "weight_components",
    "model diffing": "model_diffing",
    "vision patches": "vision_patches",
    "TransformerLens": "migrate",
    "harvest": "harvest",
    "vLLM": "vllm",
    "export": "export",
}
PAGES = {
    path.stem.removeprefix("how_to_"): path.read_text(encoding="utf-8")
    for path in sorted(DOCS.glob("how_to_*.md"))
}
#: Pages about the library, not about a published technique.
WITHOUT_PAPER = {"migrate", "harvest", "export"}


def opening(text):
    """Return a page's title and its first sentence."""
    title, paragraph = re.match(r"# ([^\n]+)\n\n(.+?)\n\n", text, re.DOTALL).groups()
    return f"{title}. {re.split(r'[.?] ', ' '.join(paragraph.split()))[0]}"


def prose(text):
    """Return the words outside of code, tables and the addresses of links."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", text).split()


@pytest.mark.parametrize(("term", "page"), TERMS.items())
def test_a_term_has_its_page(term, page):
    named = [name for name, text in PAGES.items() if re.search(term, opening(text), re.IGNORECASE)]
    assert named == [page]


def test_every_page_has_a_term():
    assert set(PAGES) == set(TERMS.values())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short_and_has_code_and_papers(name):
    text = PAGES[name]
    assert 150 <= len(prose(text)) <= 450
    assert "```python\n" in text
    for part in ("**How to read it.**", "**Usual mistakes.**", "**More.**"):
        assert text.count(part) == 1, part
    if name not in WITHOUT_PAPER:
        papers = text.partition("**Papers.**")[2].partition("**More.**")[0]
        assert re.search(r"\]\(https://", papers)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_reached_by_its_question(name):
    address = f"(how_to_{name}.md"
    assert address in (DOCS / "choose.md").read_text(encoding="utf-8")
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert "(choose.md)" in index and "(symptoms.md)" in index


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_in_the_navigation_once(name):
    texts = (path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    entries = [re.findall(rf"^how_to_{name}$", text, re.MULTILINE) for text in texts]
    assert sum(map(len, entries)) == 1
