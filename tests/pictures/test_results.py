"""What analysis returns: it prints itself in a line, and draws itself."""

import re

import pytest
import torch

from adapters import verify
from bridge import TransformerBridge, pictures
from bridge.circuits import (
    Curve,
    edge_attribution,
    faithfulness_curve,
    logit_difference,
    node_attribution,
)
from bridge.lens import lens
from bridge.patching import generic_activation_patch, layer_pos_patch_setter, patch_everything
from bridge.run.tokenization import MissingSpaceWarning
from bridge.tasks import embedded_pairs
from tests.tiny_models import tiny_model

TEXT = "When Mary and John went to the store, {} gave a drink to"
CLEAN, CORRUPTED = TEXT.format("John"), TEXT.format("Mary")


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge.boot_embedded()


@pytest.fixture(scope="module")
def results(bridge):
    pairs = embedded_pairs(bridge, "ioi", 4)
    both = bridge, pairs.clean, pairs.corrupted
    scores = edge_attribution(*both, pairs.metric())
    each = logit_difference(pairs.answers, pairs.wrong, each=True)
    circuit = scores.greedy(40)
    _, cache = bridge.run_with_cache(pairs.clean)
    measured = generic_activation_patch(
        bridge,
        pairs.corrupted,
        cache,
        each,
        layer_pos_patch_setter,
        "resid_pre",
        ("layer", "pos"),
        reduce="none",
        baseline=True,
        verbose=False,
    )
    reading = lens(bridge, ["The capital of France is", "Mary and"])
    return {
        "Pairs": pairs,
        "EdgeScores": scores,
        "NodeScores": node_attribution(*both, pairs.metric()),
        "Circuit": circuit,
        "Evaluation": circuit.evaluate(*both, each),
        "Curve": faithfulness_curve(scores, *both, each, shares=(0.1, 0.5, 1.0)),
        "PatchingResult": measured,
        "PatchedEverything": patch_everything(bridge, CLEAN, CORRUPTED, (" Mary", " John")),
        "Reading": reading,
        "Top": reading.top(3),
        "Report": verify(bridge, level="quick"),
    }


LINES = {
    "Pairs": r"Pairs\(4 pairs of 18 tokens, such as '.*'\)",
    "EdgeScores": r"EdgeScores\(479 edges of 4 layers, largest \w+->\S+ [+-][\d.]+\)",
    "NodeScores": r"NodeScores\(21 nodes, 2688 neurons, largest \w+ [+-][\d.]+\)",
    "Circuit": r"Circuit\(40 of 479 edges\)",
    "Evaluation": r"Evaluation\(faithfulness 0\.\d\d, of the complement -?\d\.\d\d; 8\.4% of the edges;.*",
    "Curve": r"Curve\(3 sizes, cpr \d\.\d+, cmd \d\.\d+; faithfulness .* at 10\.0%, .* 100\.0%\)",
    "PatchingResult": r"PatchingResult\(layer pos \[4, 18\], 4 prompts; metric up to \S+ at \[\d, \d+\]\)",
    "PatchedEverything": r"PatchedEverything\(4 layers, 15 positions; .* best head L\dH\d restores \d+%\)",
    "Reading": r"Reading\(\[layer batch pos\] \[5, 2, 6\], 0_pre to final_post, of 654 tokens\)",
    "Top": r"Top\(tokens \[layer batch pos k\]: \[5, 2, 6, 3\]\)",
    "Report": r"Report\(embedded: (\d+) of \1 checks hold\)",
}


@pytest.mark.parametrize("kind", LINES)
def test_a_result_is_one_line_with_the_figure_that_matters(results, kind):
    assert re.fullmatch(LINES[kind], repr(results[kind]))
    assert len(repr(results[kind])) < 160


def test_the_line_says_what_is_computed(results):
    assert f"faithfulness {results['Evaluation'].faithfulness:.2f}," in repr(results["Evaluation"])
    scores = results["EdgeScores"]
    ((sender, receiver, score),) = scores.top(1).edges
    assert f"{sender}->{receiver} {score:+.3g}" in repr(scores)
    found = results["PatchedEverything"]
    shares = (found.heads - found.corrupted) / (found.clean - found.corrupted)
    layer, head = divmod(int(shares.argmax()), 4)
    assert f"L{layer}H{head} restores {shares.max():.0%}" in repr(found)
    measured = results["PatchingResult"]
    value, place = re.search(r"up to (\S+) at \[(.*)\]", repr(measured)).groups()
    layer, position = map(int, place.split(", "))
    assert f"{measured.mean()[layer, position]:.3g}" == value == f"{measured.mean().max():.3g}"


def test_a_circuit_that_keeps_nothing_has_no_faithfulness(results):
    evaluation = type(results["Evaluation"])(1.0, 1.0, 1.0, 1.0, 0.5)
    assert repr(evaluation) == "Evaluation(50.0% of the edges; metric 1 of 1, 1 without edges)"


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (pictures.heads, "EdgeScores"),
        (pictures.heads, "NodeScores"),
        (pictures.circuit, "Circuit"),
        (pictures.faithfulness, "Curve"),
        (pictures.patching, "PatchedEverything"),
    ],
)
def test_pictures_take_results(results, function, kind):
    drawn = function(results[kind], title="Here")
    assert repr(drawn) == "Picture('Here')"
    assert drawn.html() == results[kind].draw(title="Here").html()


def test_scores_of_heads_are_in_their_places(results):
    scores = results["EdgeScores"]
    names = [[f"L{layer}H{head}" for head in range(4)] for layer in range(4)]
    values = torch.tensor([[scores.nodes[name] for name in row] for row in names])
    options = {"measure": "sum of scores", "title": "Scores of heads"}
    assert scores.draw().html() == pictures.heads(values, **options).html()


def test_patching_of_several_prompts(bridge, results):
    measured = results["PatchingResult"]
    words = bridge.to_str_tokens(results["Pairs"].corrupted[0])
    drawn = pictures.patching(measured, tokens=words)
    plain = pictures.patching(measured.mean(), "layer pos", words, metric="metric")
    assert drawn.html() == plain.html()
    restored = measured.draw(words, clean=5.0)
    corrupted = float(measured.baseline.mean())
    both = pictures.patching(measured.mean(), "layer pos", words, clean=5.0, corrupted=corrupted)
    assert restored.html() == both.html()
    with pytest.raises(ValueError, match="tokens must hold the text of its 18 positions"):
        measured.draw()


def test_a_reading_draws_one_prompt_without_its_padding(bridge, results):
    reading = results["Reading"]
    alone = lens(bridge, "Mary and")
    assert reading.draw(row=1, title="a").html() == alone.draw(title="a").html()
    assert pictures.logit_lens(alone).html() == alone.draw().html()
    logits = alone.stack()
    assert (
        alone.draw().html()
        == pictures.logit_lens(logits, bridge.to_str_tokens("Mary and"), bridge).html()
    )
    chosen = alone.draw(chosen=[" Mary", " John"])
    assert repr(chosen) == "Picture('Logit lens of chosen tokens')"
    last = lens(bridge, ["The capital of France is", "Mary and"], pos_slice=-1, layers=[0, 4])
    assert " Paris".strip() in last.draw(row=0).html()


REFUSED = {
    "another picture": (
        lambda r: pictures.circuit(r["Curve"]),
        r"pictures.circuit does not draw Curve: pictures.faithfulness does, .*draw\(\)$",
    ),
    "scores as a circuit": (
        lambda r: pictures.circuit(r["EdgeScores"]),
        r"its top\(20\) is a circuit$",
    ),
    "what is in it, once more": (
        lambda r: pictures.logit_lens(r["Reading"], ["a"]),
        r"pictures.logit_lens takes a Reading alone, and options by name",
    ),
    "several prompts": (
        lambda r: r["Reading"].draw(),
        r"the reading is of 2 prompts: draw\(row=0\) draws the first",
    ),
    "a prompt that is not there": (
        lambda r: r["Reading"].draw(row=2),
        r"row is 2; the reading is of 2 prompts",
    ),
    "a run that was not measured": (
        lambda r: type(r["PatchingResult"])(
            torch.zeros(2, 3), ("layer", "pos"), [], ("metric",), True
        ).draw(["a", "b", "c"], clean=1.0),
        r"the unpatched run was not measured: use baseline=True",
    ),
}


@pytest.mark.unchecked
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_picture_is_refused(results, case):
    call, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        call(results)


def test_a_model_without_a_tokenizer_has_no_words():
    reading = lens(TransformerBridge(tiny_model("gpt2")), torch.tensor([[5, 6]]))
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        reading.draw()


def test_the_stream_with_its_labels(bridge):
    _, cache = bridge.run_with_cache("Mary and John")
    pair = cache.accumulated_resid(return_labels=True)
    words = bridge.to_str_tokens("Mary and John")
    assert (
        pictures.residual_norms(pair, words).html()
        == pictures.residual_norms(*pair[:1], words, pair[1]).html()
    )


def test_a_curve_of_one_size():
    assert repr(Curve((1.0,), (1.0,))) == (
        "Curve(1 sizes, cpr 0.000, cmd 0.000; faithfulness 1.00 at 100.0%)"
    )


def test_an_answer_without_its_space_is_told(bridge):
    message = r"^'Mary' is the token 505; behind another word the model says ' Mary', the token 7\."
    with pytest.warns(MissingSpaceWarning, match=message):
        assert bridge.to_answer_token("Mary") == 505
    with pytest.warns(MissingSpaceWarning, match=message):
        patch_everything(bridge, CLEAN, CORRUPTED, ("Mary", " John"))
    _, cache = bridge.run_with_cache("Mary and")
    stack = cache.decompose_resid(pos_slice=-1)
    with pytest.warns(MissingSpaceWarning, match=message):
        cache.logit_attrs(stack, "Mary", " John", pos_slice=-1)
    assert bridge.to_answer_token(" Mary") == 7  # and no warning, which would be an error here
    assert bridge.to_answer_token(",") == bridge.to_single_token(",")
    assert bridge.to_single_token("Mary") == 505
