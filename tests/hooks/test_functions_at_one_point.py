"""Several functions at one hook point: each has a copy of its own, and all of them are at one place
in the graph.
"""

import pytest
import torch

from bridge import TransformerBridge
from bridge.legacy import HookedTransformer
from tests.conftest import tiny

#: Views of every kind: identity, written through, heads, fused projections, taps, computed beside
#: the model.
NAMES = [
    "blocks.1.hook_resid_pre",
    "blocks.1.hook_resid_mid",
    "blocks.1.hook_mlp_in",
    "blocks.1.attn.hook_q",
    "blocks.1.attn.hook_k",
    "blocks.1.attn.hook_z",
    "blocks.1.attn.hook_attn_scores",
    "blocks.1.attn.hook_pattern",
    "blocks.1.ln1.hook_scale",
    "blocks.1.ln1.hook_normalized",
    "blocks.1.mlp.hook_post",
]


@pytest.fixture(params=["gpt2", "llama"])
def family(request):
    return TransformerBridge(tiny(request.param))


def keeper(held):
    return lambda act, hook: held.append(act)


def gradient_at(bridge, tokens, name):
    """From a run with one function for the norm before attention, whose readers a cache tells
    apart.
    """
    if ".ln1." in name:
        held = []
        loss = bridge.run_with_hooks(tokens, return_type="loss", fwd_hooks=[(name, keeper(held))])
        return torch.autograd.grad(loss, held)[0]
    _, cache = bridge.run_with_cache(tokens, names_filter=name, return_type="loss", incl_bwd=True)
    return cache[name + "_grad"]


@pytest.mark.parametrize("name", NAMES)
def test_what_each_was_shown_is_one_place_in_the_graph(family, tokens, name):
    held = []
    handle = family.hook_dict[name].add_hook(keeper(held))
    with family.hooks(fwd_hooks=[(name, keeper(held)), (name, keeper(held))]):
        loss = family(tokens, return_type="loss")
    handle.remove()
    assert len(held) == 3
    assert len({x.data_ptr() for x in held}) == 3
    gradients = [torch.autograd.grad(loss, x, retain_graph=True)[0] for x in held]
    for gradient in gradients:
        torch.testing.assert_close(gradient, gradient_at(family, tokens, name))
    # what is set at the second enters the path that starts at the first, and the reverse
    embedding = family.core.get_input_embeddings().weight
    assert torch.autograd.grad(held[0].sum(), embedding, retain_graph=True)[0].any()
    removed = held[1].register_hook(lambda g: g * 0)
    assert not torch.autograd.grad(held[0].sum(), embedding, retain_graph=True)[0].any()
    assert not torch.autograd.grad(held[2].sum(), embedding, retain_graph=True)[0].any()
    removed.remove()
    held[0].register_hook(lambda g: g * 0)
    assert not torch.autograd.grad(held[1].sum(), embedding)[0].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gradients", [True, False])
def test_what_an_earlier_one_holds_stays_when_a_later_one_writes(family, tokens, name, gradients):
    held = []

    def halve(act, hook):
        act *= 0.5
        held.append(act)

    with torch.set_grad_enabled(gradients):
        _, plain = family.run_with_cache(tokens, names_filter=name)
        with family.hooks(fwd_hooks=[(name, keeper(held)), (name, halve), (name, keeper(held))]):
            logits, cache = family.run_with_cache(tokens, names_filter=name)
        right = family.run_with_hooks(tokens, fwd_hooks=[(name, lambda act, hook: act * 0.5)])
    assert torch.equal(held[0], plain[name])
    assert torch.equal(held[1], plain[name] * 0.5)
    assert torch.equal(held[2], plain[name] * 0.5)
    assert torch.equal(cache[name], plain[name] * 0.5)
    assert torch.equal(logits, right)
    if gradients:  # the first is on the way to the second, which is at one place with the third
        ours, others, behind = (
            torch.autograd.grad(logits.square().sum(), x, retain_graph=True)[0]
            for x in (held[0], held[1], held[2])
        )
        torch.testing.assert_close(ours, others * 0.5)
        torch.testing.assert_close(others, behind)


def test_what_one_returned_is_what_the_next_one_sees(tokens):
    bridge, name, held, made = TransformerBridge(tiny("llama")), "blocks.1.attn.hook_q", [], []

    def double(act, hook):
        made.append(act * 2)
        return made[0]

    def clear(act, hook):
        act.zero_()

    logits = bridge.run_with_hooks(
        tokens, fwd_hooks=[(name, keeper(held)), (name, double), (name, keeper(held))]
    )
    assert held[1].grad_fn is made[0].grad_fn
    torch.testing.assert_close(
        torch.autograd.grad(logits.sum(), held[0], retain_graph=True)[0],
        2 * torch.autograd.grad(logits.sum(), held[1])[0],
    )
    bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda act, hook: made[0]), (name, clear)])
    assert made[0].any()


def test_each_keeps_its_own_gradient(family, tokens):
    held = {}

    def keep(key):
        def hook(act, hook):
            act.retain_grad()
            held.setdefault(hook.name, {})[key] = act

        return hook

    specs = [(name, keep(key)) for name in NAMES for key in range(3)]
    family.run_with_hooks(tokens, fwd_hooks=specs, return_type="loss").backward()
    for name in NAMES:
        right = gradient_at(family, tokens, name)
        for key in range(3):
            torch.testing.assert_close(held[name][key].grad, right)


def test_a_leaf_that_one_makes_is_on_the_way_to_what_the_next_one_sees(tokens):
    bridge, held = TransformerBridge(tiny("gpt2")), []
    bridge.core.requires_grad_(False)

    def ask(act, hook):
        held.append(act.requires_grad_())

    def write(act, hook):
        act *= 2

    name = "hook_embed"
    loss = bridge.run_with_hooks(
        tokens,
        fwd_hooks=[(name, ask), (name, write), (name, keeper(held)), (name, keeper(held))],
        return_type="loss",
    )
    assert held[0].is_leaf
    assert held[1].grad_fn is held[2].grad_fn
    leaf, behind = (torch.autograd.grad(loss, x, retain_graph=True)[0] for x in held[:2])
    torch.testing.assert_close(leaf, 2 * behind)


def test_only_looking_changes_nothing(family, tokens):
    plain = family(tokens)
    taps = (
        "blocks.1.attn.hook_attn_scores",
        "blocks.1.attn.hook_pattern",
    )  # that layer computes its scores by itself
    for name in [name for name in NAMES if name not in taps]:
        norms = []
        looks = [(name, lambda act, hook, norms=norms: norms.append(act.detach().norm()))] * 2
        assert torch.equal(family.run_with_hooks(tokens, fwd_hooks=looks), plain), name
        assert len(norms) == 2


def test_traces_and_programs_go_on_with_what_functions_made(tokens):
    bridge, name, held = TransformerBridge(tiny("llama")), "blocks.1.hook_mlp_out", []
    with bridge.hooks(fwd_hooks=[(name, keeper(held)), (name, lambda act, hook: act * 0.5)]):
        with bridge.trace(tokens) as run:
            seen = run[name]
            logits = run.logits
        right = bridge(tokens)
    torch.testing.assert_close(logits, right)
    one = torch.autograd.grad(logits.square().sum(), held[0], retain_graph=True)[0]
    torch.testing.assert_close(one, 0.5 * torch.autograd.grad(logits.square().sum(), seen)[0])
    kept = []
    program = bridge.program(
        (), [(name, keeper(kept)), (name, lambda act, hook: act * 0.5), (name, keeper(kept))]
    )
    out = program(tokens)["logits"]
    torch.testing.assert_close(out, right)
    first, second = (torch.autograd.grad(out.square().sum(), x, retain_graph=True)[0] for x in kept)
    torch.testing.assert_close(first, 0.5 * second)


def legacy_model():
    return HookedTransformer(
        {
            "n_layers": 2,
            "d_model": 16,
            "n_ctx": 40,
            "d_head": 8,
            "d_mlp": 32,
            "d_vocab": 61,
            "act_fn": "gelu",
            "seed": 0,
        }
    )


@pytest.mark.parametrize(
    "name", ["blocks.1.hook_resid_pre", "blocks.1.attn.hook_q", "blocks.1.attn.hook_pattern"]
)
def test_legacy_gives_all_of_them_one_tensor(tokens, name):
    model, held = legacy_model(), []
    model.hook_dict[name].add_hook(keeper(held))
    with model.hooks(
        fwd_hooks=[
            (name, keeper(held)),
            (name, lambda act, hook: act.mul_(0.5)),
            (name, keeper(held)),
        ]
    ):
        model(tokens)
    assert held[0] is held[1] is held[2]


def test_legacy_shows_a_leaf_to_all(tokens):
    model, held = legacy_model(), []
    model.requires_grad_(False)

    def ask(act, hook):
        act.requires_grad = True

    model.run_with_hooks(
        tokens, return_type="loss", fwd_hooks=[("hook_embed", keeper(held)), ("hook_embed", ask)]
    ).backward()
    assert held[0].grad.any()


@pytest.mark.parametrize("gradients", [True, False])
def test_a_cache_of_legacy_keeps_what_it_saw(tokens, gradients):
    model, name, held = legacy_model(), "blocks.1.hook_resid_pre", []
    with torch.set_grad_enabled(gradients):
        plain = model.run_with_cache(tokens)[1][name]
        with model.hooks(fwd_hooks=[(name, keeper(held))]):
            cached = model.add_caching_hooks(name)
            with model.hooks(fwd_hooks=[(name, lambda act, hook: act.mul_(0.5))]):
                model(tokens)
    assert torch.equal(cached[name], plain)
    if not gradients:
        assert torch.equal(held[0], plain)


@pytest.mark.parametrize("later_first", [False, True])
def test_gradients_come_to_the_later_of_two_names_of_one_activation_first(
    family, tokens, later_first
):
    earlier, later, seen = "blocks.0.hook_resid_post", "blocks.1.hook_resid_pre", {}

    def keep(gradient, hook):
        seen[hook.name] = gradient.clone()

    hooks = [(earlier, keep), (later, keep), (later, lambda gradient, hook: gradient * 0.5)]
    with family.hooks(bwd_hooks=hooks[::-1] if later_first else hooks):
        family(tokens, return_type="loss").backward()
    _, cache = family.run_with_cache(
        tokens, names_filter=[later], return_type="loss", incl_bwd=True
    )
    whole = cache[later + "_grad"]
    torch.testing.assert_close(seen[earlier], whole / 2)
    torch.testing.assert_close(seen[later], whole / 2 if later_first else whole)
