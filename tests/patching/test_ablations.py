"""The table of ablations: one argument in patching, circuits and features, and Gaussian noise."""

import pytest
import torch

from bridge import TransformerBridge
from bridge.bases import Rotation
from bridge.circuits import Circuit, Graph, edge_attribution, edge_effects, faithfulness_curve
from bridge.circuits.graph import written
from bridge.features import evaluate_features
from bridge.patching import (
    ABLATIONS,
    Noise,
    ablated,
    get_act_patch_attn_head_out_all_pos,
    get_act_patch_resid_pre,
)
from bridge.tasks import embedded_pairs

PROMPT = "When Mary and John went to the store, John gave a drink to"
EMBED, POINT = "hook_embed", "blocks.1.hook_resid_pre"


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge.boot_embedded()


@pytest.fixture(scope="module")
def pairs(bridge):
    return embedded_pairs(bridge, "ioi", 4)


@pytest.fixture
def cache(bridge, pairs):
    return bridge.run_with_cache(pairs.clean)[1]


def mary_minus_john(bridge):
    mary, john = bridge.to_single_token(" Mary"), bridge.to_single_token(" John")
    return lambda logits: logits[0, -1, mary] - logits[0, -1, john]


def test_a_seed_decides_the_noise_and_nothing_else_does(cache):
    before = torch.get_rng_state()
    one, again = (ablated(cache, Noise(2.0, seed=5))[POINT] for _ in range(2))
    assert torch.equal(one, again)
    torch.manual_seed(7)
    assert torch.equal(one, ablated(cache, Noise(2.0, seed=5))[POINT])
    torch.set_rng_state(before)
    ablated(cache, "noise")[POINT]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(ablated(cache, "noise", seed=4)[POINT], ablated(cache, Noise(seed=4))[POINT])
    for other in (Noise(2.0, seed=6), Noise(1.0, seed=5)):
        assert not torch.equal(one, ablated(cache, other)[POINT])


def test_the_noise_has_the_scale_of_the_activation_at_each_position(cache):
    clean = cache[POINT]
    noise = ablated(cache, Noise(0.5))[POINT] - clean
    spread = 0.5 * clean.std(-1, correction=0, keepdim=True)
    draws = noise / spread
    torch.testing.assert_close(draws[1:], draws[:1].expand_as(draws[1:]), atol=1e-3, rtol=0)
    assert abs(float(draws[0].mean())) < 0.1 and abs(float(draws[0].std()) - 1) < 0.1
    other = ablated(cache, Noise(0.5))["blocks.2.hook_resid_pre"] - cache["blocks.2.hook_resid_pre"]
    together = torch.stack([draws[0].flatten(), other[0].flatten()])
    assert abs(float(torch.corrcoef(together)[0, 1])) < 0.1  # each hook point has its own


def test_a_row_is_the_same_when_run_on_its_own(bridge, pairs, cache):
    noisy = ablated(cache, Noise(seed=3))
    for row in range(len(pairs.clean)):
        alone = {name: cache[name][row : row + 1] for name in (EMBED, POINT)}
        for name in alone:
            assert torch.equal(ablated(alone, Noise(seed=3))[name], noisy[name][row : row + 1])
    shorter = {name: cache[name][:, :5] for name in (EMBED, POINT)}  # the rest would be padding
    for name in shorter:
        assert torch.equal(ablated(shorter, Noise(seed=3))[name], noisy[name][:, :5])


def test_half_precision_is_spread_in_single_precision():
    activation = torch.full((1, 2, 4), 300.0, dtype=torch.float16)
    activation[..., ::2] *= -1  # squares would overflow
    noisy = Noise(0.1).added_to(activation, "x")
    assert noisy.dtype == torch.float16 and bool(noisy.isfinite().all())
    assert not torch.equal(noisy, activation)


def test_scale_0_is_the_clean_run_bit_by_bit(bridge, pairs, cache):
    silent = Noise(0.0)
    source = ablated(cache, silent)
    assert all(torch.equal(source[name], cache[name]) for name in (EMBED, POINT))
    metric, clean = pairs.metric(), pairs.clean
    unpatched = float(metric(bridge(clean)))
    for sweep in (get_act_patch_resid_pre, get_act_patch_attn_head_out_all_pos):
        patched = sweep(bridge, clean, source, metric, verbose=False)
        assert bool((patched == unpatched).all())
    circuit = Circuit.of_edges(Graph.of(bridge), ["embed->logits"])
    evaluation = circuit.evaluate(bridge, clean, pairs.corrupted, metric, silent)
    assert evaluation.model == evaluation.ablated == evaluation.circuit == evaluation.complement
    point = bridge.add_basis("blocks.2.hook_resid_post", "turned", Rotation(128))
    none = {point.name: torch.zeros(128, dtype=torch.bool)}
    features = evaluate_features(bridge, clean, metric, none, ablation=silent)
    bridge.remove_basis(point)
    assert features.ablated == features.circuit == pytest.approx(features.model, abs=1e-4)


def test_causal_tracing_of_the_shipped_model_by_hand(bridge):
    """Noise on the embedding of Mary; clean streams are restored one at a time (Meng et
    al. 2022).
    """
    tokens, metric = bridge.to_tokens(PROMPT), mary_minus_john(bridge)
    subject = [place for place, word in enumerate(bridge.to_str_tokens(PROMPT)) if word == " Mary"]
    logits, cache = bridge.run_with_cache(tokens)
    embed = ablated(cache, Noise(scale=3.0, seed=1))[EMBED]
    corrupted_embed = cache[EMBED].clone()
    corrupted_embed[:, subject] = embed[:, subject]

    def corrupt(activation, hook):
        return corrupted_embed

    with bridge.hooks(fwd_hooks=[(EMBED, corrupt)]):
        traced = get_act_patch_resid_pre(bridge, tokens, cache, metric, verbose=False)
        corrupted = float(metric(bridge(tokens)))
    clean = float(metric(logits))
    assert corrupted < clean - 1

    for layer in range(bridge.cfg.n_layers):
        name = f"blocks.{layer}.hook_resid_pre"
        for position in range(tokens.shape[1]):

            def restore(stream, hook, name=name, position=position):
                stream[:, position] = cache[name][:, position]
                return stream

            hooks = [(EMBED, corrupt), (name, restore)]
            by_hand = float(metric(bridge.run_with_hooks(tokens, fwd_hooks=hooks)))
            assert float(traced[layer, position]) == pytest.approx(by_hand, abs=1e-4)
    others = [place for place in range(tokens.shape[1] - 1) if place not in subject]
    restored = (traced - corrupted) / (clean - corrupted)
    assert float(restored[0, others].abs().max()) < 1e-4  # nothing was corrupted there
    assert float(restored[0, subject].max()) > 0.2
    assert float(restored[-1, -1]) > 0.5  # at the end, the answer is at the last position


def test_noise_on_every_edge_by_hand(bridge, pairs):
    """All edges carry noisy outputs: the final stream moves by the sum of the noise."""
    graph, metric, noise = Graph.of(bridge), pairs.metric(), Noise(1.0, seed=2)
    clean = written(graph, bridge, pairs.clean)
    moved = clean.end.clone()
    for name, part in zip(graph.senders, clean.parts, strict=True):
        moved += noise.added_to(part, name) - part
    by_hand = float(metric(bridge(moved, start_at_layer=bridge.cfg.n_layers)))
    circuit = Circuit.of_edges(graph, ["L3H1->logits"])
    evaluation = circuit.evaluate(bridge, pairs.clean, pairs.corrupted, metric, noise)
    assert evaluation.ablated == pytest.approx(by_hand, abs=1e-3)
    effects = edge_effects(
        bridge,
        pairs.clean,
        pairs.corrupted,
        metric,
        ["L3H1->logits"],
        verbose=False,
        ablation=noise,
    )
    complement = evaluation.complement  # the model without this one edge
    assert effects["L3H1->logits"] == pytest.approx(complement - evaluation.model, abs=1e-3)
    scores = edge_attribution(bridge, pairs.clean, pairs.corrupted, metric, ablation=noise)
    assert scores.values.any()


def test_noise_on_features_by_hand(bridge, pairs):
    point = bridge.add_basis("blocks.2.hook_resid_post", "turned", Rotation(128))
    metric, noise = pairs.metric(), Noise(1.0, seed=2)
    none = {point.name: torch.zeros(128, dtype=torch.bool)}
    evaluation = evaluate_features(bridge, pairs.clean, metric, none, ablation=noise)
    _, cache = bridge.run_with_cache(pairs.clean, names_filter=point.name)
    noisy = noise.added_to(cache[point.name], point.name)
    logits = bridge.run_with_hooks(pairs.clean, fwd_hooks=[(point.name, lambda act, hook: noisy)])
    bridge.remove_basis(point)
    assert evaluation.ablated == pytest.approx(float(metric(logits)), abs=1e-4)
    assert evaluation.ablated < evaluation.model


def test_optimal_constants_by_name(bridge, pairs):
    circuit = edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric()).greedy(60)
    given = (bridge, pairs.clean, pairs.corrupted, pairs.metric())
    constants = circuit.optimal_constants(bridge, pairs.corrupted)
    by_name = circuit.evaluate(*given, ablation="optimal", reference=pairs.corrupted)
    assert by_name == circuit.evaluate(*given, ablation=constants)
    with pytest.raises(ValueError, match="give them as reference"):
        circuit.evaluate(*given, ablation="optimal")


WORKS = "it must be 'zero', 'mean', 'resample' or 'noise'"


def test_an_ablation_that_does_not_fit_is_refused_with_those_that_do(bridge, pairs, cache):
    assert set(ABLATIONS) == {"zero", "mean", "resample", "optimal", "noise"}
    metric, both = pairs.metric(), (bridge, pairs.clean, pairs.corrupted)
    scores = edge_attribution(*both, metric)
    kept = {"hook_embed": torch.ones(128, dtype=torch.bool)}
    for refused in ("optimal", "median"):
        with pytest.raises(ValueError, match=f"ablation is '{refused}'; {WORKS}"):
            ablated(cache, refused)
        with pytest.raises(ValueError, match=WORKS):
            edge_effects(*both, metric, verbose=False, ablation=refused)
        with pytest.raises(ValueError, match=WORKS):
            faithfulness_curve(scores, *both, metric, ablation=refused)
        with pytest.raises(ValueError, match=WORKS):
            evaluate_features(bridge, pairs.clean, metric, kept, ablation=refused)
    for scale in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be 0 or more, and finite"):
            Noise(scale)
    with pytest.raises(ValueError, match=r"needs an activation \[batch, pos, ...\]; x has shape"):
        ablated({"x": torch.ones(2, 3)}, "noise")["x"]


def test_the_former_name_of_the_argument_is_accepted_with_a_warning(cache):
    with pytest.warns(DeprecationWarning, match=r"ablated\(ablation=...\)"):
        former = ablated(cache, how="zero")
    assert torch.equal(former[POINT], ablated(cache, ablation="zero")[POINT])
    with (
        pytest.warns(DeprecationWarning, match="now"),
        pytest.raises(TypeError, match="ablation and its former name how"),
    ):
        ablated(cache, ablation="zero", how="zero")


def padded(bridge, texts, other):
    """Texts as left-padded tokens and their mask, with another token at the padding."""
    batch = bridge.batch_of(texts, padding_side="left")
    return batch.tokens.where(batch.mask.bool(), other), batch.mask


def test_padding_is_in_no_mean(bridge):
    texts, name = ["Mary and John went to", "Tom and", "When Mary"], "blocks.1.attn.hook_z"
    means = []
    for other in (5, 50):
        tokens, mask = padded(bridge, texts, other)
        _, cache = bridge.run_with_cache(tokens, attention_mask=mask)
        means.append(ablated(cache, "mean")[name])
        of_tokens = [cache[name][mask[:, i].bool(), i].mean(0) for i in range(mask.shape[1])]
        torch.testing.assert_close(means[-1][0], torch.stack(of_tokens))
    torch.testing.assert_close(*means)
    with pytest.raises(ValueError, match="padded differently"):
        ablated(cache, "resample")[name]
    with pytest.raises(ValueError, match="use rows of one length"):
        ablated(cache, "mean")["blocks.1.attn.hook_pattern"]
    _, last = bridge.run_with_cache(tokens, attention_mask=mask, pos_slice=-1)
    with pytest.raises(ValueError, match="use rows of one length"):
        ablated(last, "mean")[name]


def test_padding_is_in_no_mean_of_features(bridge):
    clean = bridge.to_tokens(["Mary and John went to", "John and Mary went to"])
    kept = torch.arange(128) < 64
    found = []
    with bridge.basis(POINT, "turned", Rotation(128)) as point:
        for other in (5, 50):
            tokens, mask = padded(bridge, ["Tom and James went to", "Tom and"], other)
            corrupted = {"input_ids": tokens, "attention_mask": mask}
            arguments = bridge, clean, mary_minus_john(bridge), {point.name: kept}
            found.append(
                evaluate_features(*arguments, ablation="mean", corrupted=corrupted).circuit
            )
        with pytest.raises(ValueError, match="padding where clean ones have tokens"):
            evaluate_features(*arguments, ablation="resample", corrupted=corrupted)
    assert found[0] == pytest.approx(found[1], abs=1e-4)
