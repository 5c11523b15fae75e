"""Files and notebooks: everything that is needed is inside, and nothing needs a browser or a
network.
"""

import base64
import gzip
import itertools
import json
import re
import struct
import zlib

import pytest
import torch
import vl_convert

from bridge import TransformerBridge, pictures
from bridge.pictures.embedding import library, library_name


@pytest.fixture(scope="module")
def picture():
    return pictures.heads(torch.tensor([[0.5, -1.0], [0.0, 2.0]]), title="Two <layers> & heads")


def size(png):
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def test_png(picture, tmp_path):
    path = picture.save(tmp_path / "a.png", scale=3)
    wide, high = size(path.read_bytes())
    assert (wide, high) == size(picture.png(scale=3))
    assert wide == pytest.approx(3 * size(picture.png(scale=1))[0], abs=3)
    assert picture.png() != picture.png(dark=True)
    assert high > 100


def test_png_files_hold_the_same_pixels_as_they_are_drawn(picture):
    def parts(png):
        at, found = 8, []
        while at < len(png):
            (length,) = struct.unpack(">I", png[at : at + 4])
            body = png[at + 4 : at + 8 + length]
            assert (
                zlib.crc32(body) == struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0]
            )
            found.append((body[:4], body[4:]))
            at += 12 + length
        return found

    drawn, ours = (
        parts(png) for png in (vl_convert.vegalite_to_png(picture.spec(), scale=2), picture.png())
    )
    pixels = [
        zlib.decompress(b"".join(body for kind, body in each if kind == b"IDAT"))
        for each in (drawn, ours)
    ]
    assert pixels[0] == pixels[1]
    rest = [[part for part in each if part[0] != b"IDAT"] for each in (drawn, ours)]
    assert rest[0] == rest[1] and ours[0][0] == b"IHDR" and ours[-1][0] == b"IEND"
    assert len(picture.png()) < 0.7 * len(vl_convert.vegalite_to_png(picture.spec(), scale=2))


def test_svg(picture, tmp_path):
    text = picture.save(tmp_path / "a.svg").read_text()
    assert text.startswith("<svg") and "Two &lt;layers&gt; &amp; heads" in text
    assert picture.save(tmp_path / "b.svg", dark=True).read_text() != text


def test_html_has_everything_in_it(picture, tmp_path):
    text = picture.save(tmp_path / "a.html").read_text()
    assert library() in text
    assert (
        "src=" not in text.replace(library(), "")
        and "@import" not in text
        and '<link rel="icon" href="data:,">' in text
    )
    assert "<title>Two &lt;layers&gt; &amp; heads</title>" in text
    assert len(text) < 1_100_000


def test_the_specification_is_plain_and_one_parameter_tells_light_from_dark(picture):
    light, dark = picture.spec(), picture.spec(dark=True)
    assert json.loads(json.dumps(light)) == light
    assert light["params"] == [{"name": "dark", "value": False}] and dark["params"] == [
        {"name": "dark", "value": True}
    ]
    assert {**light, "params": None} == {**dark, "params": None}
    light["title"] = "changed"
    assert picture.spec()["title"] != "changed"


def test_no_text_of_a_token_ends_the_script():
    odd = ["</script><b>", "<!--"]
    text = pictures.attention(torch.rand(1, 2, 2), odd).fragment()
    assert text.count("</script>") == 1 and "<!--" not in text and "<b>" not in text


def test_notebooks_are_given_a_still_picture_and_the_library_once(picture, monkeypatch):
    # A session's first output is another than the later ones; other tests have had theirs.
    monkeypatch.setattr("bridge.pictures.pictures._outputs", itertools.count())
    first, second = picture._repr_mimebundle_(), picture._repr_mimebundle_()
    assert set(first) == {"text/html", "image/png", "text/plain"}
    (packed,) = re.findall(r'class="bridge-vega">([^<]+)<', first["text/html"])
    assert gzip.decompress(base64.b64decode(packed)).decode() == library()
    assert 'bridge-vega">' not in second["text/html"] and len(second["text/html"]) < 60_000
    for bundle in (first, second):  # seen where no script runs
        (still,) = re.findall(
            r'<img alt="[^"]*" src="data:image/png;base64,([^"]+)"', bundle["text/html"]
        )
        assert (
            base64.b64decode(still) == base64.b64decode(bundle["image/png"]) == picture.png(scale=1)
        )
        assert (
            json.dumps(picture.spec(), separators=(",", ":"), ensure_ascii=False)[:50]
            in bundle["text/html"]
        )


def test_pdf(picture, tmp_path):
    page = picture.save(tmp_path / "a.pdf").read_bytes()
    assert page.startswith(b"%PDF-") and b"%%EOF" in page[-16:] and len(page) > 2000


def test_data_are_small():
    pattern = torch.rand(12, 1, 12, 20, 20)
    text = pictures.attention(pattern, [f" token{i}" for i in range(20)]).fragment()
    assert len(text) < 7 * pattern.numel()  # "0.123,"


def test_pages_hold_the_library_once(picture):
    text = pictures.page("A <page>", ["## One & two", "Some <text>.", picture, picture])
    assert text.count(library()) == 1 and text.count('class="bridge-picture"') == 2
    assert (
        "<h2>One &amp; two</h2>" in text
        and "<p>Some &lt;text&gt;.</p>" in text
        and "A &lt;page&gt;</h1>" in text
    )


def test_a_bridge_without_tokenizer_can_be_drawn():
    bridge = TransformerBridge.boot_native(
        {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_vocab": 10, "n_ctx": 5, "attn_only": True}
    )
    _, cache = bridge.run_with_cache([[1, 2, 3]])
    tokens = [str(token) for token in (1, 2, 3)]
    assert size(pictures.attention(cache["pattern", 1], tokens).png())[0] > 100


def test_pages_of_a_folder_share_the_library(picture, tmp_path):
    """0.9 MB once, beside them; each is small."""
    (tmp_path / "vega.js").write_text("mine")
    for name in ("a.html", "b.html"):
        picture.save(tmp_path / name, linked=True)
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert len(text) < 20_000 and f'<script src="{library_name()}"></script>' in text
    assert {path.name for path in tmp_path.iterdir()} == {
        "a.html",
        "b.html",
        "vega.js",
        library_name(),
    }
    assert (tmp_path / "vega.js").read_text() == "mine"
    with pytest.raises(ValueError, match=r"a\.png holds no drawing library"):
        picture.save(tmp_path / "a.png", linked=True)


def test_lines_have_a_title_and_say_what_was_computed(picture):
    assert "<title>Two &lt;layers&gt; &amp; heads</title><desc>" in picture.svg()
    drawn = pictures.circuit([("embed", "logits", -1.0)], title="One edge").svg()
    assert re.search(
        r"^<svg [^>]*><title>One edge</title><desc>One edge\. blue: .*?; width: .*</desc>", drawn
    )
