"""Everything that works on hook points works on those in a basis: each use once, on a basis of each
kind.

The other side of each comparison is the same edit by hand, on the point that the basis stands on.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bridge import TransformerBridge, UnknownHookError, pictures
from bridge.bases import CrossLayer
from bridge.features import (
    attribution_graph,
    evaluate_features,
    feature_attribution,
    feature_logit_attrs,
)
from bridge.patching import (
    generic_activation_patch,
    layer_feature_patch_setter,
    layer_pos_feature_patch_setter,
)
from tests.bases.common import KINDS, Case, cases

CLOSE = {"rtol": 0, "atol": 2e-5}


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.tensor([[5, 17, 2, 30, 11, 44], [8, 3, 50, 12, 7, 21]])


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, bridge: TransformerBridge) -> Case:
    return cases(bridge)[request.param]


@pytest.fixture
def name(bridge: TransformerBridge, case: Case) -> Iterator[str]:
    hook = case.place(bridge)
    yield hook.name
    if hook.name in bridge.hook_dict:
        bridge.remove_basis(hook)


def halved(features: Tensor, hook: object = None) -> Tensor:
    return torch.cat([features[..., :2] * 0.5, features[..., 2:]], -1)


def by_hand(
    case: Case, edit: Callable[[Tensor], Tensor] = halved
) -> list[tuple[str, Callable[..., Tensor | None]]]:
    """Hooks on the model's own points that make the same edit."""
    seen: dict[str, Tensor] = {}

    def read(act: Tensor, hook: object) -> None:
        seen["read"] = act

    def write(act: Tensor, hook: object) -> Tensor:
        features = case.basis.encode(seen["read"] if case.reads else act)
        seen["old"], seen["new"] = features, edit(features)
        return act + case.basis.decode(seen["new"]) - case.basis.decode(features)

    def later(act: Tensor, hook: object) -> Tensor:
        assert isinstance(case.basis, CrossLayer)
        return act + (seen["new"] - seen["old"]) @ case.basis.W_dec[:, 1]

    reading = [(case.reads, read)] if case.reads else []
    return [*reading, (case.point, write), *([(case.later, later)] if case.later else [])]


def features_by_hand(bridge: TransformerBridge, case: Case, tokens: Tensor) -> Tensor:
    read = case.reads or case.point
    return case.basis.encode(bridge.run_with_cache(tokens, names_filter=read)[1][read])


@torch.no_grad()
def test_cache(bridge: TransformerBridge, case: Case, name: str, tokens: Tensor) -> None:
    logits, cache = bridge.run_with_cache(tokens, names_filter=bridge.hook_dict[name])
    assert torch.equal(cache[name], features_by_hand(bridge, case, tokens))
    assert torch.equal(logits, bridge.original_model(tokens).logits), "looking changes no bit"
    assert name not in bridge.run_with_cache(tokens)[1], "an unfiltered cache leaves it out"
    _, several = bridge.run_with_cache(tokens, names_filter=lambda some: some.endswith("own"))
    assert list(several) == [name]
    assert bridge.hook_dict[name].point.axes.split()[-1] == "feature"
    assert cache[name].ndim == len(bridge.hook_dict[name].point.axes.split())


@torch.no_grad()
def test_forward_hooks(bridge: TransformerBridge, case: Case, name: str, tokens: Tensor) -> None:
    plain = bridge(tokens)
    for untouched in (lambda features, hook: features, lambda features, hook: None):
        assert torch.equal(bridge.run_with_hooks(tokens, fwd_hooks=[(name, untouched)]), plain)
    edited = bridge.run_with_hooks(tokens, fwd_hooks=[(name, halved)])
    assert torch.allclose(edited, bridge.run_with_hooks(tokens, fwd_hooks=by_hand(case)), **CLOSE)
    assert not torch.allclose(edited, plain, atol=1e-3)


def test_backward_hooks(bridge: TransformerBridge, case: Case, name: str, tokens: Tensor) -> None:
    found: dict[str, Tensor] = {}

    def keep(gradient: Tensor, hook: object) -> None:
        found["gradient"] = gradient

    bridge.run_with_hooks(tokens, return_type="loss", bwd_hooks=[(name, keep)]).backward()
    leaf: list[Tensor] = []

    def from_leaf(features: Tensor) -> Tensor:
        leaf.append(features.detach().requires_grad_())
        return leaf[0]

    loss = bridge.run_with_hooks(tokens, return_type="loss", fwd_hooks=by_hand(case, from_leaf))
    (right,) = torch.autograd.grad(loss, leaf)
    assert (
        torch.allclose(found["gradient"], right, rtol=1e-4, atol=1e-6) and right.abs().max() > 1e-3
    )
    _, cache = bridge.run_with_cache(tokens, names_filter=name, incl_bwd=True, return_type="loss")
    assert torch.allclose(cache[f"{name}_grad"], right, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_trace(bridge: TransformerBridge, case: Case, name: str, tokens: Tensor) -> None:
    with bridge.trace(tokens) as run:
        run[name][..., :2] *= 0.5
    assert torch.allclose(
        run.logits, bridge.run_with_hooks(tokens, fwd_hooks=by_hand(case)), **CLOSE
    )


@torch.no_grad()
def test_programs(bridge: TransformerBridge, case: Case, name: str, tokens: Tensor) -> None:
    program = bridge.program(capture=[name], interventions=[(name, halved)])
    right = bridge.run_with_hooks(tokens, fwd_hooks=[(name, halved)])
    assert torch.equal(program(tokens)["logits"], right)
    reading = bridge.program(capture=[name])
    assert torch.equal(reading(tokens)["logits"], bridge(tokens))
    assert torch.equal(reading(tokens)[name], features_by_hand(bridge, case, tokens))


@torch.no_grad()
def test_generation(bridge: TransformerBridge, case: Case, name: str, tokens: Tensor) -> None:
    def generated(hooks: list[tuple[str, Callable[..., Tensor | None]]], cached: bool) -> Tensor:
        with bridge.hooks(fwd_hooks=hooks):
            return bridge.generate(
                tokens,
                max_new_tokens=5,
                do_sample=False,
                use_past_kv_cache=cached,
                return_type="tokens",
                verbose=False,
                stop_at_eos=False,
            )

    strong = [(name, lambda features, hook: features * 3 + 1)]
    found = generated(strong, True)
    assert torch.equal(found, generated(strong, False))
    assert torch.equal(found, generated(by_hand(case, lambda features: features * 3 + 1), True))
    assert not torch.equal(found, generated([], True))


@torch.no_grad()
def test_sweeps(bridge: TransformerBridge, case: Case, name: str, tokens: Tensor) -> None:
    clean, corrupted = tokens[:1], tokens[1:]
    _, cache = bridge.run_with_cache(clean, names_filter=name)
    heads = list(cache[name].shape[2:-1])  # of features of each head

    def metric(logits: Tensor) -> Tensor:
        return logits[0, -1, 5] - logits[0, -1, 9]

    short = name.split("hook_")[1]
    n, at = cache[name].shape[-1], bridge.hook_dict[name].point.depth
    axes = ["layer", *(["head"] if heads else []), "feature"]
    options = {"verbose": False, "index_axis_names": axes}
    found = generic_activation_patch(
        bridge, corrupted, cache, metric, layer_feature_patch_setter, short, **options
    )
    assert found.shape == (bridge.cfg.n_layers, *heads, n)
    assert found[[i for i in range(bridge.cfg.n_layers) if i != at]].isnan().all()
    options["index_axis_names"] = ["layer", "pos", *axes[1:]]
    by_pos = generic_activation_patch(
        bridge, corrupted, cache, metric, layer_pos_feature_patch_setter, short, **options
    )
    assert by_pos.shape == (bridge.cfg.n_layers, 6, *heads, n)
    for feature in (0, 1, n - 1):
        place = [size - 1 for size in heads] + [feature]
        for where, mine in (
            ((..., *place), found[(at, *place)]),
            ((0, 4, *place), by_pos[(at, 4, *place)]),
        ):

            def patch(features: Tensor, hook: object, where: tuple[object, ...] = where) -> Tensor:
                features[where] = cache[name][where]
                return features

            right = metric(bridge.run_with_hooks(corrupted, fwd_hooks=[(name, patch)]))
            assert torch.allclose(mine, right, atol=1e-4)
    assert found[at].std() > 1e-4
    if heads:
        options["index_axis_names"] = ["layer", "feature"]
        with pytest.raises(ValueError, match=r"this patch setter needs \[layer, head, feature\]"):
            generic_activation_patch(
                bridge, corrupted, cache, metric, layer_feature_patch_setter, short, **options
            )


def difference(logits: Tensor) -> Tensor:
    return (logits[:, -1, 5] - logits[:, -1, 9]).sum()


@torch.no_grad()
def test_lens(bridge: TransformerBridge, case: Case, name: str, tokens: Tensor) -> None:
    plain = bridge.lens(tokens).stack()
    with bridge.hooks(fwd_hooks=[(name, halved)]):
        found = bridge.lens(tokens).stack()
    with bridge.hooks(fwd_hooks=by_hand(case)):
        right = bridge.lens(tokens).stack()
    assert torch.allclose(found[2:], right[2:], **CLOSE), "behind block 1, in which the edit is"
    assert not torch.allclose(found[2:], plain[2:], atol=1e-3)


def test_attribution(bridge: TransformerBridge, case: Case, name: str, tokens: Tensor) -> None:
    leaf: list[Tensor] = []

    def from_leaf(features: Tensor) -> Tensor:
        leaf.append(features.detach().requires_grad_())
        return leaf[0]

    (right,) = torch.autograd.grad(
        difference(bridge.run_with_hooks(tokens, fwd_hooks=by_hand(case, from_leaf))), leaf
    )
    found = feature_attribution(bridge, tokens, difference, name)
    assert torch.allclose(found, right * leaf[0], rtol=1e-3, atol=1e-5) and found.abs().max() > 1e-3
    integrated = feature_attribution(bridge, tokens, difference, name, steps=64)
    with torch.no_grad():
        without = difference(
            bridge.run_with_hooks(tokens, fwd_hooks=by_hand(case, torch.zeros_like))
        )
        change = difference(bridge(tokens)) - without
    assert torch.allclose(integrated.sum(), change, rtol=0.02, atol=1e-3)
    names = [str(i) for i in range(found.shape[-1])]
    picture = pictures.heat_map(
        found[0].sum(0).reshape(-1, found.shape[-1]), columns=names, column_title="feature"
    )
    assert isinstance(picture, pictures.Picture)


@torch.no_grad()
def test_logit_attribution(
    bridge: TransformerBridge, case: Case, name: str, tokens: Tensor
) -> None:
    _, cache = bridge.run_with_cache(tokens, names_filter=[name, "ln_final.hook_scale"])
    features = cache[name]
    n = features.shape[-1]
    written = case.basis.decode(torch.eye(n)) - case.basis.decode(torch.zeros(1, n))
    if case.point.endswith("hook_z"):
        written = torch.einsum("nd,hdm->hnm", written, bridge.W_O[1])
    elif case.point.endswith("hook_post"):
        written = written @ bridge.W_out[1]
    if "LlamaForCausalLM" not in str(type(bridge.original_model)):
        written = written - written.mean(-1, keepdim=True)
    toward = bridge.ln_final.w * (bridge.W_U[:, 5] - bridge.W_U[:, 9])
    right = features * (written @ toward)
    right = right / cache["ln_final.hook_scale"].view(*tokens.shape, *[1] * (features.ndim - 2))
    found = feature_logit_attrs(cache, name, 5, 9)
    assert (
        torch.allclose(found.movedim((-2, -1), (0, 1)), right, rtol=1e-4, atol=1e-5)
        and right.abs().max() > 1e-3
    )
    shown = found.flatten(0, -3)[:, :1]
    assert isinstance(
        pictures.attribution(shown, [str(i) for i in range(len(shown))], ["a"] * 6),
        pictures.Picture,
    )


@torch.no_grad()
def test_circuits(bridge: TransformerBridge, case: Case, name: str, tokens: Tensor) -> None:
    """Features as nodes: how faithful some of them are, and their graph."""
    scores = feature_attribution(bridge, tokens, difference, name).sum((0, 1)).abs()
    mask = scores >= scores.median()

    def alone(keep: Tensor) -> float:
        edit = lambda features: torch.where(keep, features, torch.zeros(()))
        return float(difference(bridge.run_with_hooks(tokens, fwd_hooks=by_hand(case, edit))))

    found = evaluate_features(bridge, tokens, difference, {name: mask})
    right = [float(difference(bridge(tokens))), *map(alone, (torch.zeros_like(mask), mask, ~mask))]
    assert [found.model, found.ablated, found.circuit, found.complement] == pytest.approx(
        right, abs=1e-4
    )
    assert found.share == pytest.approx(float(mask.float().mean())) and 0 < found.share < 1
    every = {name: torch.ones_like(mask)}
    whole = evaluate_features(bridge, tokens, difference, every)
    assert (whole.faithfulness, whole.complement_faithfulness) == pytest.approx((1, 0), abs=1e-5)
    other = evaluate_features(
        bridge, tokens, difference, every, ablation="resample", corrupted=tokens.flip(0)
    )
    _, cache = bridge.run_with_cache(tokens.flip(0), names_filter=name)
    patched = bridge.run_with_hooks(tokens, fwd_hooks=by_hand(case, lambda features: cache[name]))
    assert other.ablated == pytest.approx(float(difference(patched)), abs=1e-4)
    graph = attribution_graph(bridge, tokens[:1], [name])
    assert isinstance(pictures.circuit(graph.largest(5)), pictures.Picture)


@torch.no_grad()
def test_harvest(
    bridge: TransformerBridge, case: Case, name: str, tokens: Tensor, tmp_path: Path
) -> None:
    from bridge.harvest import Activations, harvest

    if "pos" not in bridge.hook_dict[name].point.axes:
        pytest.skip("no rows of tokens")
    harvest(
        bridge, tokens.tolist(), hook_points=[name], out=tmp_path, context_size=6, dtype="float32"
    )
    found = torch.stack([Activations(tmp_path)[i][name] for i in range(6)])
    right = features_by_hand(bridge, case, tokens)[0]
    assert torch.allclose(found.reshape(right.shape), right, **CLOSE)


def test_removal(bridge: TransformerBridge, case: Case, name: str, tokens: Tensor) -> None:
    before = bridge(tokens)
    bridge.add_hook(name, lambda features, hook: features * 0)
    bridge.remove_basis(name)
    assert torch.equal(bridge(tokens), before) and not bridge.bases
    assert not any(
        module._forward_hooks or module._forward_pre_hooks
        for module in bridge.original_model.modules()
    )
    with pytest.raises(UnknownHookError):
        bridge.run_with_cache(tokens, names_filter=name)
