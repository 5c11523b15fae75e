"""Jacobian lenses beside TransformerLens 4.3's, which runs in a process of its own: there
`transformer_lens` is theirs, and here it is ours.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bridge import TransformerBridge
from bridge.bases import Directions
from bridge.embedded import MODEL_DIR, prompts
from bridge.interventions import ProjectOut, Replace, Swap
from bridge.lens import JacobianLens, Lens
from tests.clients.conftest import TRANSFORMER_LENS_4
from tests.tiny_models import tiny_model

HERE = Path(__file__).parent
TYPES = ("gpt2", "gemma2", "gemma3_text", "qwen3", "olmo", "gpt_oss")
NAMES = ("embedded", *TYPES)
#: Four layers each, where tiny models have two.
ALTERNATING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LAYERS = {
    "gpt2": {"n_layer": 4},
    "olmo": {"num_hidden_layers": 4},
    "qwen3": {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4},
} | dict.fromkeys(("gemma2", "gemma3_text", "gpt_oss"), ALTERNATING)
TOLERANCE = 1e-5


def close(ours, theirs):
    """Assert that tensors differ by no more than the tolerance, relative to the largest number."""
    difference = float((ours.float() - theirs.float()).abs().max())
    assert ours.shape == theirs.shape
    assert difference <= TOLERANCE * max(1.0, float(theirs.abs().max()))


def plan_of(name, folder):
    """A model, and what both libraries do with it."""
    if name == "embedded":
        bridge = TransformerBridge.boot_embedded()
        texts = [prompt.text + prompt.answer + "." for prompt in prompts("ioi", 8)]
        tokens = [bridge.to_tokens(" ".join(texts[start::4]))[0].tolist() for start in range(4)]
        pair = [bridge.to_single_token(token) for token in (" Mary", " John")]
        return bridge, tokens, pair, str(MODEL_DIR), 16
    model = tiny_model(name, **LAYERS[name])
    path = folder / name / "model"
    model.save_pretrained(path)
    drawn = torch.Generator().manual_seed(0)
    d_vocab = model.get_output_embeddings().weight.shape[0]
    tokens = [torch.randint(3, d_vocab, (n,), generator=drawn).tolist() for n in (14, 11, 12, 14)]
    return TransformerBridge(model), tokens, [7, 20], str(path), 4


def run_theirs(folder):
    environment = os.environ | {"PYTHONPATH": str(TRANSFORMER_LENS_4), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, HERE / "their_jacobian_lens.py", folder, str(MODEL_DIR)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By name: the bridge, the plan, and what TransformerLens computes."""
    folder = tmp_path_factory.mktemp("lenses")
    plans = {}
    for name in NAMES:
        (folder / name).mkdir()
        bridge, texts, pair, path, skip_first = plan_of(name, folder)
        plan = {
            "model": path,
            "texts": texts,
            "prompt": texts[0],
            "pair": pair,
            "skip_first": skip_first,
            "max_tokens": 128,
            "layer": 1,
            "k": 6,
            "file": str(folder / name / "theirs_lens.pt"),
        }
        (folder / name / "plan.json").write_text(json.dumps(plan), "utf-8")
        plans[name] = bridge, plan
    run_theirs(folder)
    return {name: (*each, torch.load(folder / name / "theirs.pt")) for name, each in plans.items()}


def fit(bridge, plan, texts):
    texts = [torch.tensor(text) for text in texts]
    return bridge.fit_lens(texts, skip_first=plan["skip_first"], corpus="tokens", verbose=False)


@pytest.fixture(params=NAMES)
def case(request, models):
    """A bridge, the plan, what they compute, and our lens."""
    bridge, plan, theirs = models[request.param]
    return bridge, plan, theirs, fit(bridge, plan, plan["texts"])


def points(bridge, plan):
    return [
        (layer + 1, f"blocks.{layer}.hook_resid_post")
        for layer in range(plan["layer"], bridge.cfg.n_layers - 1)
    ]


def test_entries_and_merging(case):
    bridge, plan, theirs, lens = case
    assert {layer - 1 for layer in lens.maps} == set(theirs["maps"])
    for layer, matrix in theirs["maps"].items():
        close(lens.maps[layer + 1], matrix)
    half = len(plan["texts"]) // 2
    parts = [fit(bridge, plan, part) for part in (plan["texts"][:half], plan["texts"][half:])]
    merged = Lens.merge(parts)
    for layer, matrix in theirs["merged"].items():
        close(merged.maps[layer + 1], matrix)


def test_readout(case):
    bridge, plan, theirs, lens = case
    reading = bridge.lens(torch.tensor(plan["prompt"]), lens)
    assert [layer - 1 for layer in reading.layers] == sorted(theirs["readout"])
    for layer, logits in theirs["readout"].items():
        close(reading.logits(layer + 1)[0].detach(), logits)


def test_vectors_and_edits(case):
    bridge, plan, theirs, lens = case
    prompt, pair = torch.tensor([plan["prompt"]]), plan["pair"]
    close(lens.vectors(pair, plan["layer"] + 1), theirs["vectors"])
    places = points(bridge, plan)
    _, cache = bridge.run_with_cache(prompt)
    clamps = []
    for layer, name in places:
        basis = Directions(lens.vectors(pair, layer).T)
        hook = bridge.add_basis(name, f"pair_{layer}", basis)
        clamps.append((hook, Replace(basis.encode(cache[name])[..., [1, 0]])))
    edits = {
        "swap": [(name, Swap(*lens.vectors(pair, layer), scale=1.5)) for layer, name in places],
        "ablation": [
            (name, ProjectOut(lens.vectors(pair, layer), positions=-1)) for layer, name in places
        ],
        "clamp": clamps,
    }
    with torch.no_grad():
        plain = bridge(prompt)
        for name, hooks in edits.items():
            logits = bridge.run_with_hooks(prompt, fwd_hooks=hooks)
            close(logits, theirs["edited"][name])
            assert (logits - plain).abs().max() > 1e-3
    for hook, _ in clamps:
        bridge.remove_basis(hook)


def test_decomposition_and_occupancy(case):
    bridge, plan, theirs, lens = case
    _, cache = bridge.run_with_cache(torch.tensor([plan["prompt"]]))
    streams = cache[f"blocks.{plan['layer']}.hook_resid_post"][0]
    parts = lens.decompose(streams, plan["layer"] + 1, k=plan["k"])
    for ours, theirs_of_it in zip(parts, theirs["decompositions"], strict=True):
        selected, support, coordinates, *vectors = theirs_of_it
        assert torch.equal(ours.tokens, selected)
        active = ours.coefficients > 0
        assert torch.equal(ours.tokens[active], support)
        close(ours.coefficients[active], coordinates)
        for vector, right in zip(
            (ours.reconstruction, ours.component, ours.rest), vectors, strict=True
        ):
            close(vector, right)
    estimates = lens.occupancy(streams[-3:], plan["layer"] + 1, most=8, controls=4)
    for ours, (count, tokens, captured, control) in zip(
        estimates, theirs["occupancies"], strict=True
    ):
        assert ours.count == count
        assert torch.equal(ours.tokens, tokens)
        close(ours.captured, captured)
        close(ours.control, control)


def test_files_both_ways(models, tmp_path):
    bridge, plan, theirs = models["embedded"]
    lens = JacobianLens.load(plan["file"], bridge, unembedding=False)
    for layer, matrix in theirs["maps"].items():
        assert torch.equal(lens.maps[layer + 1], matrix)
    assert lens.n_prompts == len(plan["texts"]) and lens.metadata["skip_first_positions"] == 16
    with pytest.raises(ValueError, match="the lens was fitted on"):
        Lens.load(plan["file"], bridge)
    ours = fit(bridge, plan, plan["texts"])
    with pytest.raises(ValueError, match="fitted in the same way"):
        Lens.merge([lens, ours])  # the unembedding of theirs is not recorded
    (tmp_path / "embedded").mkdir()
    ours.save(tmp_path / "ours.pt")
    content = {"model": str(MODEL_DIR), "ours": str(tmp_path / "ours.pt"), "prompt": plan["prompt"]}
    (tmp_path / "embedded" / "plan.json").write_text(json.dumps(content), "utf-8")
    run_theirs(tmp_path)
    for layer, logits in torch.load(tmp_path / "embedded" / "theirs.pt").items():
        close(logits, theirs["readout"][layer])
