"""What setters of a sweep may return, or change."""

import itertools

import pytest
import torch

from bridge import TransformerBridge
from bridge.patching.patching import generic_activation_patch
from bridge.patching.setters import layer_head_vector_patch_setter
from tests.conftest import tiny

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(0))


def new_tensor(corrupted, index, clean):
    made = corrupted.clone()
    made[:, :, index[1]] = clean[:, :, index[1]]
    return made


def in_place(corrupted, index, clean):
    corrupted[:, :, index[1]] = clean[:, :, index[1]]


def view_of_it(corrupted, index, clean):
    corrupted[:, :, index[1]] = clean[:, :, index[1]]
    return corrupted.view_as(corrupted)


def new_and_in_place(corrupted, index, clean):
    """What is returned counts, whatever was done to what was given."""
    made = new_tensor(corrupted, index, clean)
    corrupted.zero_()
    return made


@pytest.mark.parametrize("setter", [new_tensor, in_place, view_of_it, new_and_in_place])
@pytest.mark.parametrize("together", [1, 3, "auto"])
@torch.no_grad()
def test_setters_that_return_a_new_tensor_or_nothing(setter, together):
    """Each patch of a run is its own, however its setter says it, against one plain run with a hook
    for each.
    """
    bridge = TransformerBridge(tiny("gpt2"))
    clean, corrupted = TOKENS, TOKENS.clone()
    corrupted[:, 2] = (corrupted[:, 2] + 9) % 61
    _, cache = bridge.run_with_cache(clean, names_filter=lambda name: name.endswith("hook_z"))

    def metric(logits):
        return (logits[:, -1, 5] - logits[:, 4, 9]).mean()

    arguments = (bridge, corrupted, cache, metric, setter, "z", ("layer", "head"))
    found = generic_activation_patch(*arguments, patches_per_run=together, verbose=False)
    for layer, head in itertools.product(range(3), range(4)):
        name = f"blocks.{layer}.attn.hook_z"

        def by_hand(z, hook, name=name, head=head):
            z[:, :, head] = cache[name][:, :, head]

        expected = metric(bridge.run_with_hooks(corrupted, fwd_hooks=[(name, by_hand)]))
        torch.testing.assert_close(found[layer, head], expected, atol=1e-5, rtol=1e-4)
    assert found.std() > 0


def test_setters_may_do_nothing():
    bridge = TransformerBridge(tiny("gpt2"))
    _, cache = bridge.run_with_cache(TOKENS)
    some = lambda x, index, clean: (
        None if index[1] % 2 else layer_head_vector_patch_setter(x, index, clean * 0)
    )
    found = generic_activation_patch(
        bridge,
        TOKENS,
        cache,
        lambda logits: logits[0, -1, 5],
        some,
        "z",
        ("layer", "head"),
        verbose=False,
    )
    torch.testing.assert_close(found[:, 1::2], bridge(TOKENS)[0, -1, 5].detach().expand(3, 2))
    assert (found[:, ::2] != found[0, 1]).all()
