"""The picture in the README is small, is there, and is the one that the code beside it makes."""

import re

from bridge import TransformerBridge, pictures
from bridge.analysis.logit_lens import logit_lens
from tests.docs.site import ROOT


def test_the_picture_is_what_the_code_makes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (path,) = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    shown = ROOT / path
    assert shown.stat().st_size < 100_000
    bridge = TransformerBridge.boot_embedded()
    prompt = re.search(r'prompt = "(.*)"', text)[1]
    picture = pictures.logit_lens(logit_lens(bridge, bridge.to_tokens(prompt)), bridge.to_str_tokens(prompt), bridge)
    words = [re.findall(r">([^<>]+)</text>", svg) for svg in (picture.svg(), shown.read_text(encoding="utf-8"))]
    assert words[0] == words[1] and "·Mary" in words[0]
