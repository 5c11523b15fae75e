"""Studies of prompts with images or sound: each gives the model what it is given, and is what
single runs give.
"""

import pytest
import torch
import transformers

from adapters.inputs import takes_besides
from bridge import TransformerBridge
from bridge.circuits import EdgeScores, edge_attribution, edge_effects, path_patching
from bridge.features import (
    attribution_graph,
    direction,
    evaluate_features,
    feature_attribution,
    fit_rotation,
    interchange,
)
from bridge.patching import get_act_patch_attn_head_out_by_pos, get_act_patch_resid_pre
from tests.bases.common import SAE
from tests.tiny_images import image_inputs
from tests.tiny_models import tiny_config, tiny_model, tiny_of

TYPES = ["gemma3", "llava", "qwen2_audio", "qwen2_vl", "qwen3_vl"]
RESID = "blocks.1.hook_resid_pre"


@pytest.fixture(scope="module", params=TYPES)
def prompts(request):
    """A bridge, clean and corrupted tokens, and what else the model takes with each."""
    task = "seq2seq" if request.param == "qwen2_audio" else "image_text"
    clean, given = image_inputs(request.param)
    if request.param != "gemma3":
        bridge = TransformerBridge(tiny_model(request.param, task))
    else:  # an image's four tokens see each other, and the first half of the prompt has them all
        config = tiny_config("gemma3", task, mm_tokens_per_image=4)
        config.text_config.sliding_window = 64
        bridge = TransformerBridge(tiny_of(transformers.Gemma3ForConditionalGeneration, config))
        clean = torch.cat([clean[:, :7], clean[:, -5:], clean[:, -5:]], 1)
        given["token_type_ids"] = (clean == 5).int()
    corrupted = clean.clone()
    corrupted[:, 1] = (corrupted[:, 1] + 7) % 50 + 9
    corrupted[:, -3] = (corrupted[:, -3] + 7) % 50 + 9
    return bridge, clean, corrupted, given


def metric(logits):
    return (logits[:, -1, 7] - logits[:, -1, 9]).mean()


def by_hand(bridge, tokens, given, name, put):
    return float(metric(bridge.run_with_hooks(tokens, fwd_hooks=[(name, put)], **given)))


@torch.no_grad()
@pytest.mark.parametrize("together", ["auto", 1, 3])
def test_patching_is_single_runs(prompts, together):
    bridge, clean, corrupted, given = prompts
    _, cache = bridge.run_with_cache(clean, **given)
    length = clean.shape[1]
    found = get_act_patch_resid_pre(
        bridge, corrupted, cache, metric, verbose=False, patches_per_run=together, **given
    )
    for layer in range(2):
        for pos in (0, 1, 2, 3, 4, length // 2, length - 3, length - 1):

            def put(x, hook):
                x[:, pos] = cache[hook.name][:, pos]  # noqa: B023
                return x

            expected = by_hand(bridge, corrupted, given, f"blocks.{layer}.hook_resid_pre", put)
            assert found[layer, pos].item() == pytest.approx(expected, abs=1e-5), (layer, pos)
    mapping = {"input_ids": corrupted, **given}
    again = get_act_patch_resid_pre(
        bridge, mapping, cache, metric, verbose=False, patches_per_run=together
    )
    assert torch.equal(again, found)


@torch.no_grad()
def test_a_lens_ends_in_what_the_model_says(prompts):
    bridge, clean, _, given = prompts
    _, cache = bridge.run_with_cache(clean, names_filter=RESID, **given)
    for reading in (bridge.lens(clean, **given), bridge.lens({"input_ids": clean, **given})):
        torch.testing.assert_close(reading.stack()[-1], bridge(clean, **given))
        torch.testing.assert_close(reading.stack()[1], bridge(cache[RESID], start_at_layer=2))


@torch.no_grad()
def test_a_run_from_a_layer_on_is_told_what_its_stream_is_of(prompts):
    """A stream does not say that it is of an image; with what the run was given, its logits are the
    run's.
    """
    bridge, clean, _, given = prompts
    stream, logits = bridge(clean, stop_at_layer=1, **given), bridge(clean, **given)
    besides = takes_besides(bridge.core)
    with pytest.raises(
        ValueError, match=f"a stream does not say whether it is of any.*{besides}=None"
    ):
        bridge(stream, start_at_layer=1)
    torch.testing.assert_close(bridge(stream, start_at_layer=1, input_ids=clean, **given), logits)
    text = torch.arange(9, 20)[None]
    of_text = bridge(text, stop_at_layer=1)
    torch.testing.assert_close(bridge(of_text, start_at_layer=1, **{besides: None}), bridge(text))
    torch.testing.assert_close(bridge(of_text, start_at_layer=1, input_ids=text), bridge(text))


def test_circuits_are_single_runs(prompts):
    bridge, clean, corrupted, given = prompts
    pair, edge, end = (clean, corrupted), "L1MLP->logits", "blocks.1.hook_resid_post"
    written = [
        bridge.run_with_cache(tokens, **given)[1]["blocks.1.hook_mlp_out"].detach()
        for tokens in pair
    ]
    change = written[1] - written[0]
    with torch.no_grad():
        base = float(metric(bridge(clean, **given)))
        effect = by_hand(bridge, clean, given, end, lambda x, hook: x + change) - base
    leaves = []
    logits = bridge.run_with_hooks(
        clean,
        fwd_hooks=[(end, lambda x, hook: leaves.append(x.detach().requires_grad_()) or leaves[0])],
        **given,
    )
    (slope,) = torch.autograd.grad(metric(logits), leaves[0])
    graph = edge_effects(bridge, *pair, metric, [edge], verbose=False, **given).graph
    at = graph.edge(edge)
    for given_as in ((*pair, given), (*({"input_ids": tokens, **given} for tokens in pair), {})):
        one, other, more = given_as
        found = edge_effects(bridge, one, other, metric, [edge], verbose=False, **more)
        assert found.values[at].item() == pytest.approx(effect, abs=1e-5)
        scores = edge_attribution(bridge, one, other, metric, "gradient", **more)
        assert scores.values[at].item() == pytest.approx(float((slope * change).sum()), abs=1e-5)
        steps = edge_attribution(bridge, one, other, metric, "inputs", steps=3, graph=graph, **more)
        assert steps.values.abs().max() > 0
        path = path_patching(bridge, one, other, metric, ["L1MLP"], ["logits"], **more)
        assert path == pytest.approx(effect, abs=1e-5)
        evaluation = scores.top(graph.n_edges // 2).evaluate(bridge, one, other, metric, **more)
        assert evaluation.model == pytest.approx(base, abs=1e-5)
        assert evaluation.ablated == pytest.approx(
            metric(bridge(corrupted, **given)).item(), abs=1e-4
        )


def test_a_circuit_of_pairs_of_which_something_else_differs_is_refused():
    """The features that Qwen3-VL adds behind its first block are of the image: with another, no
    edge carries it.
    """
    bridge, (tokens, given) = (
        TransformerBridge(tiny_model("qwen3_vl", "image_text")),
        image_inputs("qwen3_vl"),
    )
    graph = edge_effects(
        bridge, tokens, tokens.clone().fill_(9).where(tokens != 5, tokens), metric, [], **given
    ).graph
    circuit = EdgeScores(graph, torch.zeros(graph.exists.shape)).top(3)
    other = {**given, "pixel_values": given["pixel_values"] + 1}
    with pytest.raises(ValueError, match="does not add up"):
        circuit.evaluate(
            bridge, {"input_ids": tokens, **given}, {"input_ids": tokens, **other}, metric
        )


def test_features_are_single_runs(prompts):
    bridge, clean, corrupted, given = prompts
    both = [{"input_ids": tokens, **given} for tokens in (clean, corrupted)]
    acts = [
        bridge.run_with_cache(tokens, names_filter=RESID, **given)[1][RESID].detach()
        for tokens in (clean, corrupted)
    ]
    leaf = acts[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(
        metric(bridge.run_with_hooks(clean, fwd_hooks=[(RESID, lambda x, hook: leaf)], **given)),
        leaf,
    )
    torch.testing.assert_close(
        feature_attribution(bridge, clean, metric, RESID, **given), slope * acts[0]
    )
    torch.testing.assert_close(feature_attribution(bridge, both[0], metric, RESID), slope * acts[0])
    with torch.no_grad():
        left = {RESID: torch.zeros(acts[0].shape[-1], dtype=torch.bool)}
        found = evaluate_features(
            bridge, both[0], metric, left, ablation="resample", corrupted=both[1]
        )
        assert found.model == pytest.approx(float(metric(bridge(clean, **given))), abs=1e-5)
        assert found.circuit == pytest.approx(float(metric(bridge(corrupted, **given))), abs=1e-5)
        torch.testing.assert_close(
            interchange(bridge, clean, corrupted, RESID, **given), bridge(corrupted, **given)
        )
        placed = interchange(bridge, *both, RESID, position=-3)

        def put(x, hook):
            x[:, -3] = acts[1][:, -3]
            return x

        torch.testing.assert_close(
            placed, bridge.run_with_hooks(clean, fwd_hooks=[(RESID, put)], **given)
        )
        four = [{name: torch.cat([value, value]) for name, value in each.items()} for each in both]
        found = direction(bridge, *four, RESID).vector[:, None]
        rows = torch.cat([act[:, -1] for act in acts]).T  # it is of some of them
        torch.testing.assert_close(
            rows @ torch.linalg.lstsq(rows, found).solution, found, rtol=1e-3, atol=1e-4
        )


@torch.no_grad()
def test_an_attribution_graph_adds_up_to_what_the_model_says():
    bridge = TransformerBridge(tiny_model("llava", "image_text"))
    tokens, given = image_inputs("llava")
    tokens, image = tokens[:1], {"pixel_values": given["pixel_values"][:1]}
    sae = SAE(32, 24, 32)
    sae.b_enc.zero_()
    sae.b_dec.zero_()
    point = bridge.add_basis(
        "blocks.1.hook_mlp_out", "tc", sae, reads="blocks.1.hook_resid_mid"
    ).name
    logits = bridge(tokens, **image)[0, -1]
    for prompt, more in ((tokens, image), ({"input_ids": tokens, **image}, {})):
        graph = attribution_graph(bridge, prompt, [point], logits=torch.tensor([7, 9]), **more)
        torch.testing.assert_close(graph.values[-2:], (logits - logits.mean())[[7, 9]])
        torch.testing.assert_close(
            graph.adjacency[-2:].sum(1), graph.values[-2:], rtol=0, atol=1e-4
        )


def test_a_search_takes_what_has_an_entry_for_each_row(prompts):
    bridge, clean, corrupted, given = prompts
    labels, options = (
        torch.tensor([7, 9]),
        {"dimension": 2, "steps": 2, "held_out": 0.5, "controls": False},
    )
    if "image_grid_thw" in given:
        with pytest.raises(ValueError, match="pixel_values has no entry for each of the 2 prompts"):
            fit_rotation(bridge, clean, corrupted, labels, RESID, **options, **given)
    else:
        fit = fit_rotation(bridge, clean, corrupted, labels, RESID, **options, **given)
        assert fit.rotation.columns.shape == (32, 2)


def test_prompts_without_their_images_are_told(prompts):
    bridge, clean, corrupted, given = prompts
    _, cache = bridge.run_with_cache(clean, **given)
    calls = [
        lambda: get_act_patch_attn_head_out_by_pos(bridge, corrupted, cache, metric, verbose=False),
        lambda: bridge.lens(clean),
        lambda: edge_attribution(bridge, clean, corrupted, metric, "gradient"),
        lambda: feature_attribution(bridge, clean, metric, RESID),
        lambda: interchange(bridge, clean, corrupted, RESID),
    ]
    for call in calls:
        with pytest.warns(
            UserWarning,
            match="the tokens hold 5, which stands for (image|audio), and none is given",
        ):
            call()
    with pytest.raises(TypeError, match="pixel_value"):
        bridge.lens(clean, pixel_value=torch.zeros(2))
