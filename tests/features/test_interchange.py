"""Interchange interventions against activation patching, and a fitted subspace against its
controls.
"""

import pytest
import torch

from bridge import TransformerBridge
from bridge.bases import Directions, Rotation
from bridge.features import (
    CoordinateMask,
    feature_attribution,
    feature_logit_attrs,
    fit_rotation,
    interchange,
    interchange_table,
)
from bridge.tasks import embedded_pairs
from tests.bases.common import SAE
from tests.conftest import tiny

POINT = "blocks.1.hook_resid_post"
BASE = torch.tensor([[5, 17, 2, 30, 11], [8, 3, 50, 12, 7]])
SOURCE = torch.tensor([[9, 1, 33, 4, 20], [2, 60, 41, 10, 15]])


@torch.no_grad()
@pytest.mark.parametrize("position", [None, 2, -1])
def test_all_coordinates_of_a_full_basis_are_patching(
    bridge: TransformerBridge, position: int | None
) -> None:
    _, cache = bridge.run_with_cache(SOURCE, names_filter=POINT)

    def patch(act: torch.Tensor, hook: object) -> torch.Tensor:
        at = slice(None) if position is None else position
        act[:, at] = cache[POINT][:, at]
        return act

    right = bridge.run_with_hooks(BASE, fwd_hooks=[(POINT, patch)])
    with bridge.basis(POINT, "all", Rotation(bridge.cfg.d_model)) as point:
        found = interchange(bridge, BASE, SOURCE, point, position=position)
        some = interchange(bridge, BASE, SOURCE, point, position=position, features=torch.arange(4))
    assert torch.allclose(found, right, atol=1e-4)
    assert not torch.allclose(some, right, atol=1e-2) and not torch.allclose(
        some, bridge(BASE), atol=1e-2
    )


@torch.no_grad()
def test_one_coordinate_by_hand(bridge: TransformerBridge) -> None:
    vector = torch.randn(bridge.cfg.d_model, generator=torch.Generator().manual_seed(0))
    unit = vector / vector.norm()
    _, cache = bridge.run_with_cache(SOURCE[:1], names_filter=POINT)

    def by_hand(act: torch.Tensor, hook: object) -> torch.Tensor:
        act[:, 1] += ((cache[POINT][:, 3] - act[:, 1]) @ unit)[:, None] * unit
        return act

    with bridge.basis(POINT, "one", Directions(vector)) as point:
        found = interchange(bridge, BASE, SOURCE[:1], point, position=1, source_position=3)
    assert torch.allclose(
        found, bridge.run_with_hooks(BASE, fwd_hooks=[(POINT, by_hand)]), atol=2e-5
    )


@pytest.mark.unchecked
def test_what_does_not_fit_is_refused(bridge: TransformerBridge) -> None:
    with pytest.raises(ValueError, match="source has 3 rows and base 2"):
        interchange(bridge, BASE, SOURCE[[0, 1, 0]], POINT)
    with pytest.raises(ValueError, match="give position"):
        interchange(bridge, BASE, SOURCE[:, :3], POINT)
    with pytest.raises(ValueError, match="3 base prompts"):
        fit_rotation(bridge, BASE[[0, 1, 0]], SOURCE, torch.tensor([1, 2]), POINT, dimension=2)


def test_a_subspace_is_found_and_the_controls_find_none() -> None:
    """Which name is the answer, in the stream of the last position of the shipped model."""
    bridge = TransformerBridge.boot_embedded()
    pairs = embedded_pairs(bridge, "ioi", 160)
    with torch.no_grad():
        labels = bridge(pairs.corrupted)[:, -1].argmax(-1)
    before = {name: value.clone() for name, value in bridge.state_dict().items()}
    fit = fit_rotation(
        bridge,
        pairs.clean,
        pairs.corrupted,
        labels,
        "blocks.3.hook_resid_mid",
        dimension=32,
        steps=120,
        lr=2e-2,
        among=labels.unique(),
    )
    assert fit.accuracy > 0.7 and fit.before < 0.2
    assert all(value < 0.5 for value in fit.controls.values()), fit
    assert set(fit.controls) == {"random subspace", "shuffled labels", "random model"}
    assert fit.losses[-1] < fit.losses[0] / 2
    columns = fit.rotation.columns
    assert torch.allclose(columns.T @ columns, torch.eye(32), atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in bridge.state_dict().items())
    assert not bridge.bases and not any(
        p.grad is not None for p in bridge.original_model.parameters()
    )


def test_a_seed_says_what_is_found(bridge: TransformerBridge) -> None:
    """Whatever else was drawn before; and what a user draws afterwards is as it was."""
    labels, found = torch.tensor([1, 2] * 4), []
    base, source = BASE.repeat(4, 1), SOURCE.repeat(4, 1)
    for before in (0, 1):
        torch.manual_seed(before)
        fit = fit_rotation(
            bridge, base, source, labels, POINT, dimension=2, steps=4, controls=False
        )
        found.append((fit.losses, fit.rotation.columns))
        after = torch.rand(3)
        torch.manual_seed(before)
        assert torch.equal(torch.rand(3), after)
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_nothing_is_trained_or_attributed_in_inference_mode(bridge: TransformerBridge) -> None:
    labels = torch.tensor([1, 2])
    pairs = (bridge, BASE, SOURCE, labels)
    studies = {
        "feature_attribution": lambda: feature_attribution(
            bridge, BASE, lambda logits: logits[0, -1, 7], POINT
        ),
        "fit_rotation": lambda: fit_rotation(*pairs, POINT, dimension=2, held_out=0.5),
        "interchange_table": lambda: interchange_table(
            *pairs, [POINT], methods=("subspace",), held_out=0.5
        ),
    }
    for name, study in studies.items():
        with torch.inference_mode(), pytest.raises(RuntimeError, match=f"{name} needs gradients"):
            study()
    with torch.inference_mode():  # where nothing is trained
        interchange_table(*pairs, [POINT], methods=("full",), held_out=0.5)


def test_attribution_of_what_a_metric_may_not_give(bridge: TransformerBridge) -> None:
    for metric, said in (
        (lambda logits: logits[:, -1, 7], "gives .* numbers"),
        (lambda logits: logits[0, -1, 7].detach(), "without a gradient"),
    ):
        with pytest.raises(ValueError, match=said):
            feature_attribution(bridge, BASE, metric, POINT)


def test_attribution_adds_up_and_is_the_gradient(bridge: TransformerBridge) -> None:
    point = bridge.add_basis(POINT, "sae", SAE(bridge.cfg.d_model, 40))

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return (logits[:, -1, 5] - logits[:, -1, 9]).sum()

    def without(act: torch.Tensor, hook: object) -> torch.Tensor:
        return act * 0

    with torch.no_grad():
        change = metric(bridge(BASE)) - metric(
            bridge.run_with_hooks(BASE, fwd_hooks=[(point, without)])
        )
        _, cache = bridge.run_with_cache(BASE, names_filter=point)
    integrated = feature_attribution(bridge, BASE, metric, point, steps=200)
    assert torch.allclose(integrated.sum(), change, atol=2e-3 * float(change.abs()) + 1e-3)
    plain = feature_attribution(bridge, BASE, metric, point)
    gradient: dict[str, torch.Tensor] = {}
    with bridge.hooks(bwd_hooks=[(point, lambda value, hook: gradient.__setitem__("at", value))]):
        metric(bridge(BASE)).backward()
    assert torch.allclose(plain, gradient["at"] * cache[point.name], rtol=1e-3, atol=1e-5)
    assert not torch.allclose(plain.sum(), change, atol=1e-3)
    bridge.remove_basis(point)


@torch.no_grad()
def test_features_and_the_rest_add_up_to_the_logits(bridge: TransformerBridge) -> None:
    last = f"blocks.{bridge.cfg.n_layers - 1}.hook_resid_post"
    sae = SAE(bridge.cfg.d_model, 40)
    with bridge.basis(last, "sae", sae) as point:
        names = [point.name, last, "ln_final.hook_scale"]
        _, cache = bridge.run_with_cache(BASE, names_filter=names)
        parts = feature_logit_attrs(cache, point.name, 7, 9)
        one = feature_logit_attrs(cache, point.name, 7, 9, pos_slice=-1)
        rest = cache.logit_attrs((bridge.basis_error(cache, point) + sae.b_dec)[None], 7, 9)
    _, plain = bridge.run_with_cache(BASE)
    whole = plain.logit_attrs(plain.decompose_resid(), 7, 9).sum(0)
    assert torch.allclose(parts.sum(0) + rest[0], whole, atol=1e-3)
    assert torch.allclose(one, parts[..., -1], atol=1e-5)
    assert parts.abs().max() > 1e-2


def test_a_table_of_exchanges() -> None:
    """What is whole is patching, a subspace is that of `fit_rotation`, masks exchange some
    coordinates.
    """
    bridge = TransformerBridge.boot_embedded()
    pairs = embedded_pairs(bridge, "ioi", 48)
    with torch.no_grad():
        labels = bridge(pairs.corrupted)[:, -1].argmax(-1)
    points, among = ("blocks.0.hook_resid_post", "blocks.3.hook_resid_post"), labels.unique()
    given = {"among": among, "steps": 40}
    features = {
        point: Rotation(128, 128, generator=torch.Generator().manual_seed(1)) for point in points
    }
    methods = ("full", "coordinates", "components", "features", "subspace")
    table = interchange_table(
        bridge,
        pairs.clean,
        pairs.corrupted,
        labels,
        points,
        (1, -1),
        methods=methods,
        dimension=32,
        features=features,
        **given,
    )
    fit = fit_rotation(
        bridge,
        pairs.clean,
        pairs.corrupted,
        labels,
        points[1],
        dimension=32,
        controls=False,
        **given,
    )
    assert fit.accuracy > 0.8 and float(table.accuracy[4, 1, 1]) == pytest.approx(
        fit.accuracy, abs=0.17
    )  # 2 of 12
    assert table.before == fit.before
    tested = torch.randperm(48, generator=torch.Generator().manual_seed(0))[:12]
    patched = interchange(
        bridge, pairs.clean[tested], pairs.corrupted[tested], points[1], position=1
    )
    answers = among[patched[:, -1, among].argmax(-1)]
    assert float(table.accuracy[0, 1, 0]) == pytest.approx(
        float((answers == labels[tested]).float().mean())
    )
    assert table.best("full") == (points[1], -1, 1.0)  # all that the logits are made of
    assert (table.accuracy[1:4, 1, 1] > 0.8).all() and table.before < 0.3, table
    assert (
        table.accuracy[:, 1, 0] < 0.3
    ).all()  # nothing at an early position reaches the answer from the last layer
    assert (
        table.sizes[0].eq(128).all()
        and table.sizes[4].eq(32).all()
        and (table.sizes[1:4] > 0).all()
    )
    assert (table.sizes[1:4] <= 128).all() and table.accuracy.shape == (5, 2, 2)
    assert not any(
        p.grad is not None
        for p in [*bridge.original_model.parameters(), *features[points[0]].parameters()]
    )
    with pytest.raises(ValueError, match=r"there are no features for blocks\.0"):
        interchange_table(
            bridge, pairs.clean, pairs.corrupted, labels, points, methods=("features",)
        )
    with pytest.raises(ValueError, match="method is 'all'"):
        interchange_table(bridge, pairs.clean, pairs.corrupted, labels, points, methods=("all",))
    with pytest.raises(ValueError, match="needs a point, a position and a method"):
        interchange_table(bridge, pairs.clean, pairs.corrupted, labels, ())


def test_masks_find_the_coordinates_that_matter() -> None:
    """Of a basis in which the logits read three coordinates alone, those are exchanged and few
    others.
    """
    mask = CoordinateMask(None, 4)
    here, there = torch.zeros(4), torch.arange(1.0, 5.0)
    mask.given.data = torch.tensor([-2.0, 0.0, 1.0, 3.0])
    mask.temperature = 0.5
    torch.testing.assert_close(mask(here, there), there * (mask.given.detach() / 0.5).sigmoid())
    assert torch.equal(mask.eval()(here, there), torch.tensor([0.0, 0.0, 3.0, 4.0]))
    turned = Rotation(4, 4, generator=torch.Generator().manual_seed(0))
    mask = CoordinateMask(turned, 4).eval()
    mask.given.data = torch.tensor([1.0, -1.0, -1.0, -1.0])
    axis = turned.columns[:, 0].detach()
    torch.testing.assert_close(mask(here, there).detach(), axis * (there @ axis))
    assert [*mask.parameters()] == [mask.given]


def test_a_table_in_half_precision_and_arguments_that_mean_nothing() -> None:
    bridge = TransformerBridge(tiny("llama").bfloat16())
    tokens = torch.randint(3, 60, (8, 5), generator=torch.Generator().manual_seed(0))
    labels = bridge(tokens.flip(0))[:, -1].argmax(-1)
    given = (
        bridge,
        tokens,
        tokens.flip(0),
        labels,
        [f"blocks.{bridge.cfg.n_layers - 1}.hook_resid_post"],
    )
    table = interchange_table(*given, dimension=4, steps=2)
    assert table.accuracy[table.methods.index("full")].item() == 1.0
    for wrong, said in (({"steps": 0}, "steps"), ({"batch_size": -1}, "batch_size")):
        with pytest.raises(ValueError, match=said):
            interchange_table(*given, **wrong)
    with pytest.raises(ValueError, match="labels go from"):
        interchange_table(*given[:3], labels + 10_000, given[4])
