"""The README's pictures exist, are small, and are what the library draws today."""

import re

from bridge import TransformerBridge, pictures
from bridge.circuits import edge_attribution
from bridge.patching import patch_everything
from bridge.tasks import embedded_pairs
from tests.docs.site import ROOT


def draw(prompt):
    """Return each picture of the README, by its file's name."""
    bridge = TransformerBridge.boot_embedded()
    words = bridge.to_str_tokens(prompt)
    _, cache = bridge.run_with_cache(prompt)
    corrupted = prompt.replace("John gave", "Mary gave")
    patched = patch_everything(bridge, prompt, corrupted, (" Mary", " John"))
    pairs = embedded_pairs(bridge, "ioi", 8)
    scores = edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric())
    return {
        "attention.svg": pictures.attention(
            cache["pattern", 2][0, 3], words, title="Head 3 of layer 2"
        ),
        "patching.svg": pictures.patching(
            patched.stream,
            "layer pos",
            words,
            clean=patched.clean,
            corrupted=patched.corrupted,
            metric="logit difference",
            title="Residual stream",
        ),
        "circuit.svg": scores.greedy(24).draw(title="Circuit of indirect objects"),
    }


def test_the_pictures_are_what_the_library_draws():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = [ROOT / path for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)]
    drawn = draw(re.search(r'prompt = "(.*)"', text)[1])
    assert {path.name for path in paths} == set(drawn)
    for path in paths:
        assert path.stat().st_size < 60_000
        stored, now = (
            re.findall(r">([^<>]+)</text>", svg)
            for svg in (path.read_text(encoding="utf-8"), drawn[path.name].svg())
        )
        assert stored == now
        assert len(now) > 10
