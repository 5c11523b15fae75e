"""Sweeps over models with other caches than one pair of keys and values a layer: the numbers of
whole runs.
"""

import pytest
import torch

from bridge import TransformerBridge, patching
from bridge.hooks.names import act_name
from bridge.patching.setters import layer_head_vector_patch_setter, layer_pos_patch_setter
from tests.tiny_models import tiny_model


def by_plain_hooks(bridge, corrupted, cache, metric, name, setter, places):
    numbers = []
    for place in places:
        hook = (
            act_name(name, place[0]),
            lambda act, hook, place=place: setter(act, place, cache[hook.name]),
        )
        numbers.append(float(metric(bridge.run_with_hooks(corrupted, fwd_hooks=[hook]))))
    return torch.tensor(numbers)


def prompts():
    clean = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(3))
    corrupted = clean.clone()
    corrupted[0, 4] = 20
    return clean, corrupted


def metric(logits):
    return logits[0, -1, 5]


@pytest.mark.parametrize("kind", ["deepseek_v3", "minicpm3", "longcat_flash"])
@pytest.mark.parametrize("letter", ["k", "v"])
def test_keys_and_values_made_from_a_latent(kind, letter):
    bridge = TransformerBridge(tiny_model(kind))
    if act_name(letter, 0) not in bridge.hook_dict:
        pytest.skip(f"{kind} has no single {letter} in a layer")
    clean, corrupted = prompts()
    with torch.no_grad():
        _, cache = bridge.run_with_cache(clean)
        sweep = getattr(patching, f"get_act_patch_attn_head_{letter}_all_pos")
        found = sweep(bridge, corrupted, cache, metric, verbose=False)
        places = [
            [layer, head] for layer in range(bridge.cfg.n_layers) for head in range(found.shape[1])
        ]
        right = by_plain_hooks(
            bridge, corrupted, cache, metric, letter, layer_head_vector_patch_setter, places
        )
    torch.testing.assert_close(found.flatten(), right, atol=1e-5, rtol=1e-4)
    assert (right != metric(bridge(corrupted)).item()).any()


@pytest.mark.parametrize(
    "kind", ["longcat_flash", "recurrent_gemma", "whisper", "deepseek_v3", "jamba"]
)
def test_the_stream_of_models_with_other_caches(kind):
    bridge = TransformerBridge(tiny_model(kind))
    clean, corrupted = prompts()
    with torch.no_grad():
        _, cache = bridge.run_with_cache(clean)
        found = patching.get_act_patch_resid_pre(bridge, corrupted, cache, metric, verbose=False)
        places = [[layer, pos] for layer in range(bridge.cfg.n_layers) for pos in range(9)]
        right = by_plain_hooks(
            bridge, corrupted, cache, metric, "resid_pre", layer_pos_patch_setter, places
        )
    torch.testing.assert_close(found.flatten(), right, atol=1e-5, rtol=1e-4)
